"""qwen3_batch.py as a command: real processes, the bundled model."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import qwen3
import qwen3_batch
from configs import ROOT
from helpers import assert_one_line, edit_json, finish, start

QUESTIONS = ["What is the capital of France?", "What is 417 + 385?", "Tell me a story about a robot.", "Hello!",
             "Name three animals.", "What is the capital of Japan?", "Who are you?", "What is 12 + 30?"]
RECORDS = [{"id": f"q{i}", "prompt": question, "max_new_tokens": 12 + i % 3, "seed": i, "temperature": i % 2,
            "enable_thinking": False} for i, question in enumerate(QUESTIONS * 2)]


def write_lines(file, values):
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def read_lines(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def batch(*arguments, **options):
    """The command as a process of its own."""
    return start(*(os.fsencode(str(part)) for part in (sys.executable, ROOT / "qwen3_batch.py", *arguments)), **options)


def main(capfd, *arguments):
    """(status, stderr) of the command in this process; there is nothing on stdout."""
    capfd.readouterr()
    try:
        status = qwen3_batch.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    out, err = capfd.readouterr()
    assert out == ""
    return status, err


def refusal(capfd, *arguments, status=1):
    code, err = main(capfd, *arguments)
    assert code == status, err
    assert_one_line(err)
    return err


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.jsonl", RECORDS)


def assert_complete(out, demo):
    """Each record once, with the answer that chat gives."""
    found = {value["line"]: value for value in read_lines(out)}
    assert len(found) == len(read_lines(out)) == len(RECORDS)
    for line, record in enumerate(RECORDS, 1):
        options = {key: value for key, value in record.items() if key not in ("id", "prompt")}
        reply = qwen3.chat(demo, record["prompt"], **options).finish()
        value = found[line]
        assert (value["id"], value["text"], value["finish_reason"], value["completion_tokens"]) == \
            (record["id"], reply.answer.content, reply.finish_reason, len(reply.token_ids))


def test_killed_and_started_again(demo, source, tmp_path):
    out = tmp_path / "out.jsonl"
    for n in (1, 6, 11):
        process = batch(source, "--out", out)
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < n):
            time.sleep(0.001)
        process.kill()
        process.communicate()
        kept = out.read_bytes()
    status, _, err = finish(batch(source, "--out", out), timeout=300)
    assert status == 0 and out.read_bytes().startswith(kept[:kept.rfind(b"\n") + 1])
    assert re.search(r"out.jsonl: \d+ records answered, \d+ tokens in .* s; \d+ were done before", err)
    assert_complete(out, demo)


def test_ctrl_c(source, tmp_path):
    out = tmp_path / "out.jsonl"
    process = batch(source, "--out", out)
    while process.poll() is None and (not out.exists() or not out.stat().st_size):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process, timeout=300)
    if status:  # it may have been faster
        assert status == 130 and "Traceback" not in err
        assert re.search(r"\d+ records are done; the same command goes on", err) and err.endswith(": interrupted\n")


SCRIPT = """set -u
mount -t tmpfs -o size=12k none "$1" || exit 99
"$2" "$3" in.jsonl --out "$1/out.jsonl"; first=$?
mount -o remount,size=1m "$1" || exit 99
"$2" "$3" in.jsonl --out "$1/out.jsonl"; second=$?
cp "$1/out.jsonl" out.jsonl
echo $first $second
"""


def test_a_small_disk_that_fills_up(demo, tmp_path):
    if not (unshare := shutil.which("unshare")):
        pytest.skip("no unshare, so no file system of our own")
    long = [record | {"id": record["id"] + "x" * 1000} for record in RECORDS]
    write_lines(tmp_path / "in.jsonl", long)
    (tmp_path / "disk").mkdir()
    done = subprocess.run([unshare, "-m", "bash", "-c", SCRIPT, "bash", tmp_path / "disk", sys.executable,
                           ROOT / "qwen3_batch.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if done.returncode in (1, 99):
        pytest.skip("no file system can be mounted here")
    assert done.stdout.split() == ["1", "0"], done.stderr
    assert "out.jsonl: cannot be written: No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert "goes on from there" in done.stderr and "were done before" in done.stderr
    write_lines(tmp_path / "out.jsonl", [value | {"id": value["id"].rstrip("x")}
                                         for value in read_lines(tmp_path / "out.jsonl")])
    assert_complete(tmp_path / "out.jsonl", demo)


def test_another_model_input_or_option_is_refused(capfd, tmp_path, tiny):
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_new_tokens": 2}]), tmp_path / "out.jsonl"
    folder = shutil.copytree(tiny, tmp_path / "model")
    assert main(capfd, source, "--out", out, "--model", folder)[0] == 0
    before = out.read_bytes()
    assert "the model is demo" in refusal(capfd, source, "--out", out)
    assert "the job began with temperature = null, not 0.5" in \
        refusal(capfd, source, "--out", out, "--model", folder, "--temperature", 0.5)
    assert "another process" not in main(capfd, source, "--out", out, "--model", folder)[1]
    edit_json(folder / "generation_config.json", {"temperature": 0.7})
    assert "files have changed" in refusal(capfd, source, "--out", out, "--model", folder)
    shutil.copy(tiny / "generation_config.json", folder)
    write_lines(source, [{"prompt": "b"}])
    assert "in.jsonl: the input is not the same" in refusal(capfd, source, "--out", out, "--model", folder)
    assert out.read_bytes() == before


def test_openai_and_tables(capfd, tmp_path, tiny):
    """All forms ask the same; the ids are those of the files."""
    rows = ["a", "b", "a"]
    write_lines(tmp_path / "ours.jsonl", [{"id": f"r{i}", "prompt": f"Say {row}"} for i, row in enumerate(rows)])
    bodies = [{"model": "x", "messages": [{"role": "user", "content": f"Say {row}"}]} for row in rows]
    write_lines(tmp_path / "theirs.jsonl", [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions",
                                             "body": body} for i, body in enumerate(bodies)])
    (tmp_path / "table.csv").write_text("id,word\n" + "".join(f"r{i},{row}\n" for i, row in enumerate(rows)))
    (tmp_path / "whole.csv").write_text("id,word\n" + "".join(f"r{i},Say {row}\n" for i, row in enumerate(rows)))
    answers = {}
    for name, *options in [("ours.jsonl",), ("theirs.jsonl", "--openai"), ("table.csv", "--template", "Say {word}"),
                           ("whole.csv", "--column", "word")]:
        out = tmp_path / f"{name}.out"
        status, err = main(capfd, tmp_path / name, "--out", out, "--model", tiny, "--greedy", "-n", 5, *options)
        assert status == 0, err
        for value in read_lines(out):
            if "custom_id" in value:
                message = value["response"]["body"]["choices"][0]["message"]
                value = {"id": value["custom_id"], "text": message["content"]}
            assert answers.setdefault(value["id"], value["text"]) == value["text"]
    assert sorted(answers) == ["r0", "r1", "r2"] and answers["r0"] == answers["r2"]


def test_bad_records_are_counted(capfd, tmp_path, tiny):
    prompts = [{"prompt": "a", "max_new_tokens": 1}, {"prompt": ""}, {"prompt": "a" * 999}]
    source = write_lines(tmp_path / "in.jsonl", prompts)
    status, err = main(capfd, source, "--out", tmp_path / "out.jsonl", "--model", tiny)
    assert status == 0 and "2 records could not be answered: the results say why" in err
    errors = [value["error"] for value in read_lines(tmp_path / "out.jsonl") if "error" in value]
    assert "empty" in errors[0] and "room" in errors[1]
    status, err = main(capfd, source, "--out", tmp_path / "fast.jsonl", "--model", tiny, "--fail-fast")
    assert status == 1 and "record 2: the prompt is empty" in err


def test_wrong_usage(capfd, tmp_path, source):
    out = tmp_path / "out.jsonl"
    assert "--out" in refusal(capfd, source, status=2)
    assert "--greedy does not go with --temperature" in \
        refusal(capfd, source, "--out", out, "--greedy", "--temperature", 1, status=2)
    assert "--column does not go with --template" in \
        refusal(capfd, source, "--out", out, "--column", "a", "--template", "{a}", status=2)
    assert "--raw does not go with --no-think" in refusal(capfd, source, "--out", out, "--raw", "--no-think", status=2)
    for options, words in [(["--memory", "much"], "--memory"), (["--memory", 1], "give more memory"), (["--context", 1], "context"), (["--top-p", 2], "top_p"),
                           (["-n", 0], "max_tokens"), (["--model", "nix"], "no such folder"),
                           (["--tools", "nix"], "nix")]:
        assert words in refusal(capfd, source, "--out", out, *options)
    assert "stdin: not a regular file" in refusal(capfd, "-", "--out", out)
    assert not list(tmp_path.glob("out*"))  # nothing has begun


def test_sizes():
    for text, size in {"4GB": 4 * 10**9, "1.5 gib": 3 * 2**29, "500MB": 5 * 10**8, "77": 77, "2 kB": 2000}.items():
        assert qwen3_batch.checked_size(text) == size
    assert qwen3_batch.checked_size(None) is None
    for text in ("", "GB", "-1", "1 TB", "nan", "1e9", "4G B"):
        with pytest.raises(qwen3.InputError, match="4GB"):
            qwen3_batch.checked_size(text)


def test_the_table_of_options_is_complete():
    listed = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs/batch.md").read_text()))
    assert listed == {option for action in qwen3_batch.make_parser()._actions for option in action.option_strings
                      if option.startswith("--") and option not in ("--help", "--no-think")}
