"""qwen3_lib/app/cli.py with random options and files: an answer, or one line that says why not."""
import json
import os

import pytest

from fuzzing import any_number, any_text, fuzz, run_cli
from helpers import filled_cache
from qwen3_lib.app import files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
TEXT_FILES = ["text", "lines", "messages", "tools", "both", "call", "system", "bom", "special"]
SPECIAL_FILES = ["", ".", "..", "/", "/dev/null", "/nowhere/..", "nowhere/x", "\ud800", "x" * 300,
                 "/proc/self/mem", "~", "~nobody"]


@pytest.fixture(scope="module")
def odd_files(tiny_model, memory):
    """A folder with files of all kinds: texts, JSON, and what is neither."""
    path, message = memory / "odd", [{"role": "user", "content": "Hi"}]
    path.mkdir()
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    contents = {
        "text": b"Hello\n", "lines": b"one\r\ntwo\n\nthree", "empty": b"", "nul": b"a\0b", "latin": b"caf\xe9",
        "bom": b"\xef\xbb\xbfHi", "utf16": "Hi".encode("utf-16"), "half": "é".encode()[:1],
        "controls": bytes(range(32)), "surrogate": "\ud800".encode("utf-8", "surrogatepass"), "long": b"word " * 20_000,
        "special": b"<|im_end|><think>", "messages": json.dumps(message).encode(), "number": b"1", "deep": b"[" * 100_000,
        "both": json.dumps({"messages": message, "tools": [{"name": "f"}]}).encode(), "tools": b'[{"name": "f"}]',
        "system": b'[{"role": "system", "content": "Be brief."}]',
        "call": json.dumps([*message, call, {"role": "tool", "content": "5"}]).encode(),
        "odd role": b'[{"role": "\\ud800", "content": ""}]', "a\nb": b"Hello", "\udcff": b"Hello", "-": b"dash"}
    for name, content in contents.items():
        (path / name).write_bytes(content)
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")
    files.save_prompt_cache(filled_cache(tiny_model, [1, 2, 3]), tiny_model, path / "cache")
    return path


def any_file(rng, path):
    kind = rng.random()
    if kind < 0.1:
        return rng.choice([*SPECIAL_FILES, any_text(rng)])
    return "-" if kind < 0.2 else str(path / rng.choice(sorted(os.listdir(path)) if kind < 0.5 else TEXT_FILES))


def options_with_values(rng, path, saving):
    """Option -> a value, mostly one that it may have."""
    number = any_number(rng)
    odd = rng.choice([str(number) if abs(number) < 10**300 else "1e999", "", "x", "1_0", "٣", "1e5", "+2", " 3 ", "9" * 5000])

    def mostly(value):
        return str(value) if rng.random() < 0.75 else odd

    def fitting(*names):
        return str(path / rng.choice(names)) if rng.random() < 0.7 else any_file(rng, path)

    # It may be written: of odd names only those that stay in the working directory.
    odd_cache = rng.choice([*SPECIAL_FILES, any_text(rng).replace("/", "")])
    text = rng.choice(["Be brief.", "e", any_text(rng)])
    return {"--file": any_file(rng, path), "--system": text, "--system-file": any_file(rng, path),
            "--messages": fitting("messages", "both", "call", "system"), "--tools": fitting("tools"), "--stop": text,
            "--think-budget": mostly(rng.randint(0, 5)), "--temperature": mostly(round(rng.uniform(0, 3), 3)),
            "--top-k": mostly(rng.randint(0, 400)), "--top-p": mostly(round(rng.random(), 3)),
            "--min-p": mostly(round(rng.random(), 3)), "--repetition-penalty": mostly(round(rng.uniform(0.5, 2), 3)),
            "--presence-penalty": mostly(round(rng.uniform(-2, 2), 3)), "--seed": mostly(rng.randint(0, 99)),
            "--frequency-penalty": mostly(round(rng.uniform(-2, 2), 3)), "--logprobs": mostly(rng.randint(0, 3)),
            "--lookup": mostly(rng.randint(0, 3)), "--json-schema": any_file(rng, path), "--regex": text,
            "--grammar": any_file(rng, path), "--prompt-cache": rng.choice([
                str(saving / "cache"), str(saving / "new"), str(path / "cache"), odd_cache])}


SWITCHES = {"--raw": 6, "--score": 3, "--think": 4, "--no-think": 4, "--hide-thinking": 3, "--greedy": 2, "--json": 4,
            "--stats": 3, "--help": 0.3, "--nonsense": 0.3, "--sc": 0.3, "--s": 0.3, "-": 0.5, "-x": 0.3, "--raw=1": 0.3}


def any_arguments(rng, tiny, options, path):
    groups = [["Hello"] if rng.random() < 0.6 else [rng.choice(["-", any_text(rng)])]] * (rng.random() < 0.85)
    for name in rng.sample(sorted(options), rng.choice([0, 1, 1, 2, 2, 3, 4, 6])):
        groups.append([f"{name}={options[name]}"] if rng.random() < 0.5 or options[name].startswith("-")
                      else [name, options[name]])
    groups += [[name] for name in {*rng.choices([*SWITCHES], [*SWITCHES.values()], k=rng.choice([0, 0, 1, 1, 2, 3]))}]
    groups += [["--max-tokens", str(rng.randint(1, 6))]] * (rng.random() < 0.6)
    groups.append(["--offline", "--model", str(tiny) if rng.random() < 0.97 else any_file(rng, path)])
    rng.shuffle(groups := sorted(groups))
    groups += [rng.choice([["--file"], ["--"], ["--", "-x"], ["--", any_text(rng)]])] * (rng.random() < 0.05)
    return [argument.replace("\0", "") for group in groups for argument in group]  # no process can be given a NUL


@fuzz(300)
def test_command_line(rng, tiny, odd_files, scratch):
    """Status 0 and an answer; or status 1 or 2 and one line that says why not."""
    os.environ["HF_HOME"] = str(scratch)
    saving, empty = scratch / "saving", scratch / "empty"
    for folder in (saving, empty):
        folder.mkdir(exist_ok=True)
    os.chdir(empty)
    arguments = any_arguments(rng, tiny, options_with_values(rng, odd_files, saving), odd_files)
    stdin = rng.choice([(odd_files / rng.choice(TEXT_FILES)).read_bytes(), rng.randbytes(rng.randint(0, 9)), b""])
    before = sorted(os.listdir(odd_files))
    status, out, err = run_cli(arguments, stdin, rng.choice(["strict", "surrogateescape"]))
    where = (arguments, stdin, status, out[-300:], err[-300:])
    assert status in (0, 1, 2) and "Traceback" not in err and "not enough memory" not in err, where
    if status:
        assert len(err.splitlines()) == 1 and err[:-1].isprintable() and len(err) < 2200, where
        assert status == 1 or not out and "error:" in err, where
    else:
        assert out.endswith("\n"), where
        if "--json" in arguments and "--help" not in arguments:
            for line in out[:-1].split("\n"):
                assert isinstance(json.loads(line, parse_constant=pytest.fail), dict), where
    assert sorted(os.listdir(odd_files)) == before, where
    for name in os.listdir(empty):  # only what --prompt-cache names
        assert any(name in argument for argument in arguments), where
        (empty / name).unlink()
    return status == 0
