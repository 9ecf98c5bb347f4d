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
from helpers import assert_one_line, finish, run_main, start

QUESTIONS = ["What is the capital of France?", "What is 417 + 385?", "Tell me a story.", "Hello!", "Who are you?"]
RECORDS = [{"id": f"q{i}", "prompt": question, "max_new_tokens": 4 + i % 5, "seed": i, "temperature": i % 2,
            "enable_thinking": False} for i, question in enumerate(QUESTIONS * 2)]


def write_lines(file, values):
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def read_lines(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def batch(*arguments):
    """The command as a process of its own."""
    return start(*(os.fsencode(str(part)) for part in (sys.executable, ROOT / "qwen3_batch.py", *arguments)))


def main(capfd, *arguments):
    """(status, stderr) of the command in this process; there is nothing on stdout."""
    status, out, err = run_main(capfd, *arguments, main=qwen3_batch.main)
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


@pytest.fixture(scope="module")
def expected(demo):
    """What chat answers: {line: (id, text, finish_reason, number of tokens)}."""
    found = {}
    for line, record in enumerate(RECORDS, 1):
        options = {key: value for key, value in record.items() if key not in ("id", "prompt")}
        reply = qwen3.chat(demo, record["prompt"], **options).finish()
        found[line] = record["id"], reply.answer.content, reply.finish_reason, len(reply.token_ids)
    return found


def assert_complete(out, expected):
    """Each record is there once, with its answer."""
    values = read_lines(out)
    assert {value["line"]: (value["id"], value["text"], value["finish_reason"], value["completion_tokens"])
            for value in values} == expected and len(values) == len(expected)


def test_killed_interrupted_and_started_again(expected, source, tmp_path):
    out = tmp_path / "out.jsonl"
    for n, number in ((1, signal.SIGKILL), (6, signal.SIGINT)):
        process = batch(source, "--out", out)
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < n):
            time.sleep(0.001)
        process.send_signal(number)
        status, _, err = finish(process)
        if number == signal.SIGINT and status:  # the job may have been faster
            assert status == 130 and err.endswith(": interrupted\n")
            assert re.search(r"done: \d+ of 10 records; the same command goes on", err)
        kept = out.read_bytes()
    status, _, err = finish(batch(source, "--out", out))
    assert status == 0 and out.read_bytes().startswith(kept[:kept.rfind(b"\n") + 1])
    assert re.search(r"out.jsonl: 10 records answered \(\d+ were done before\), \d+ tokens in .* s\n", err)
    assert_complete(out, expected)


def test_another_model_is_refused(capfd, tmp_path, tiny):
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_new_tokens": 2}]), tmp_path / "out.jsonl"
    folder = shutil.copytree(tiny, tmp_path / "model")
    assert main(capfd, source, "--out", out, "--model", folder)[0] == 0
    before = out.read_bytes()
    assert 'model was "model" and is "demo" now' in refusal(capfd, source, "--out", out)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["merges"].pop()
    for name, text in {"generation_config.json": '{"temperature": 0.7}', "chat_template.jinja": "Hi",
                       "tokenizer.json": json.dumps(tokenizer)}.items():
        (folder / name).write_text(text)
        assert "model's sha256 was" in refusal(capfd, source, "--out", out, "--model", folder)
        shutil.copy(tiny / name, folder)
    assert main(capfd, source, "--out", out, "--model", folder)[0] == 0
    assert out.read_bytes() == before


def test_forms_of_input(capfd, tmp_path, tiny):
    """All forms ask the same; the ids are those of the files."""
    rows, answers = ["a", "b", "a"], {}
    write_lines(tmp_path / "ours.jsonl", [{"id": f"r{i}", "prompt": f"Say {row}"} for i, row in enumerate(rows)])
    write_lines(tmp_path / "theirs.jsonl", [
        {"custom_id": f"r{i}", "body": {"model": "x", "messages": [{"role": "user", "content": f"Say {row}"}]}}
        for i, row in enumerate(rows)])
    (tmp_path / "in.txt").write_text("".join(f"Say {row}\n\n" for row in rows))
    for name, *options in [("ours.jsonl",), ("theirs.jsonl", "--openai"), ("in.txt",)]:
        out = tmp_path / f"{name}.out"
        status, err = main(capfd, tmp_path / name, "--out", out, "--model", tiny, "--greedy", "-n", 5, *options)
        assert status == 0 and ("plain text, one prompt per line" in err) is (name == "in.txt"), err
        for value in read_lines(out):
            if "custom_id" in value:
                message = value["response"]["body"]["choices"][0]["message"]
                value = {"id": value["custom_id"], "text": message["content"]}
            name = f"r{value['id'] // 2}" if isinstance(value["id"], int) else value["id"]
            assert answers.setdefault(name, value["text"]) == value["text"]
    assert sorted(answers) == ["r0", "r1", "r2"] and answers["r0"] == answers["r2"]


def test_failed_records_are_counted(capfd, tmp_path, tiny):
    """Status 1 only if all of them fail, also where they have failed before."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "logprobs": 2}, {"prompt": ""}, {"prompt": "a" * 999}])
    status, err = main(capfd, source, "--out", tmp_path / "out.jsonl", "--model", tiny, "-n", 1)
    assert status == 0 and "1 record answered" in err and "; 2 records failed: the results say why" in err
    found = {value["line"]: value for value in read_lines(tmp_path / "out.jsonl")}
    assert "empty" in found[2]["error"] and "too long" in found[3]["error"] and len(found[1]["logprobs"][0]["top"]) == 2
    status, err = main(capfd, source, "--out", tmp_path / "fast.jsonl", "--model", tiny, "-n", 1, "--fail-fast")
    assert status == 1 and "record 2: the prompt is empty" in err
    for prompts, expected in (([""], 1), ([], 0)):
        write_lines(source, [{"prompt": prompt} for prompt in prompts])
        for _ in range(2):
            assert main(capfd, source, "--out", tmp_path / f"{expected}.jsonl", "--model", tiny)[0] == expected


def test_wrong_usage(capfd, tmp_path, source):
    for options, words, status in [(["--greedy", "--temperature", 1], "--greedy does not go with --temperature", 2),
                                   (["--column", "a"], "jq -c", 2),
                                   (["--memory", 1], "give more memory", 1), (["--context", 1], "context", 1),
                                   (["-n", 0], "--max-tokens", 1), (["--tools", "nix"], "nix", 1)]:
        assert words in refusal(capfd, source, "--out", tmp_path / "out.jsonl", *options, status=status)
    assert not list(tmp_path.glob("out*"))  # nothing has begun


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_what_is_told_of_templates_makes_prompts(capfd, tmp_path):
    """The command in the message."""
    source = write_lines(tmp_path / "in.jsonl", [{"id": 7, "text": 'a "b"', "more": 1}, {"id": "x", "text": "蜜蜂"}])
    err = refusal(capfd, source, "--out", "out.jsonl", "--template", "Translate: {text}", status=2)
    command = err.partition("the records: ")[2].partition(" (--help")[0]
    out = subprocess.run(command, shell=True, check=True, cwd=tmp_path, stdout=subprocess.PIPE).stdout
    assert [*map(json.loads, out.splitlines())] == [{"id": 7, "prompt": 'Translate: a "b"'},
                                                    {"id": "x", "prompt": "Translate: 蜜蜂"}]


def test_sizes():
    for text, size in {"4GB": 4 * 10**9, "1.5 gib": 3 * 2**29, "500MB": 5 * 10**8, "77": 77, "2 kB": 2000}.items():
        assert qwen3_batch.checked_size("--memory", text) == size
    for text in ("", "GB", "-1", "1 TB", "nan", "1e9", "4G B"):
        with pytest.raises(qwen3.InputError, match="4GB"):
            qwen3_batch.checked_size("--memory", text)
