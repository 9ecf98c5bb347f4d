"""qwen3_app/cli.py with random options and files: an answer, or one line that says why not."""
import io
import json
import os

import pytest

import qwen3
from fuzzing import any_number, any_text, fuzz, in_child, run_cli
from helpers import assert_one_line, filled_cache
from qwen3_app import files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


@pytest.fixture(scope="module")
def odd_files(tiny, memory):
    """Names of files of all kinds: texts, JSON, and what is neither."""
    path = memory / "odd"
    path.mkdir()
    message = [{"role": "user", "content": "Hi"}]
    contents = {
        "text": b"Hello\n", "lines": b"one\r\ntwo\n\nthree", "empty": b"", "newline": b"\n", "nul": b"a\0b",
        "latin": b"caf\xe9",
        "bom": b"\xef\xbb\xbfHi", "only bom": b"\xef\xbb\xbf", "utf16": "Hi".encode("utf-16"), "half": "é".encode()[:1],
        "controls": bytes(range(32)), "surrogate": "\ud800".encode("utf-8", "surrogatepass"), "long": b"word " * 20_000,
        "special": b"<|im_end|><think>", "messages": json.dumps(message).encode(), "number": b"1",
        "deep": b"[" * 100_000,
        "both": json.dumps({"messages": message, "tools": [{"name": "f"}]}).encode(), "tools": b'[{"name": "f"}]',
        "system": b'[{"role": "system", "content": "Be brief."}]', "call": json.dumps([*message, {"role": "assistant",
            "tool_calls": [{"name": "f", "arguments": {}}]}, {"role": "tool", "content": "5"}]).encode(),
        "odd role": b'[{"role": "\\ud800", "content": ""}]', "a\nb": b"Hello", "\udcff": b"Hello", "-": b"dash",
        "日本": b"Hello",
    }
    for name, content in contents.items():
        (path / name).write_bytes(content)
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")
    (path / "link").symlink_to("text")
    with open(path / "huge", "wb") as file:
        file.truncate(2**40)  # of nothing: it takes no place on the disk
    files.save_prompt_cache(filled_cache(qwen3.load_model(tiny), [1, 2, 3]), qwen3.load_model(tiny),
                                  path / "cache")
    return path


TEXT_FILES = ["text", "lines", "messages", "tools", "both", "call", "system", "bom", "link", "special"]
SPECIAL_FILES = ["", ".", "..", "/", "/dev/null", "/nowhere/..", "nowhere/x", "a\0b", "\ud800", "x" * 300,
                 "/proc/self/mem", "~"]


def any_file(rng, path):
    kind = rng.random()
    if kind < 0.002:
        return rng.choice(["/dev/zero", str(path / "huge")])  # the most that is read of them are 64 MiB
    if kind < 0.1:
        return rng.choice([*SPECIAL_FILES, any_text(rng)])
    if kind < 0.2:
        return "-"
    return str(path / rng.choice(sorted({*os.listdir(path)} - {"huge"}) if kind < 0.5 else TEXT_FILES))


def odd_number(rng):
    number = any_number(rng)
    return rng.choice([str(number) if abs(number) < 10**300 else "1e999", "", "x", "1_0", "٣", "0x10", "1e5", "+2",
                       " 3 ", "--", "9" * 5000])


def options_with_values(path, saving):
    """Option -> a function that makes a value: mostly one that it may have."""
    def whole(low, high):
        return lambda rng: str(rng.randint(low, high)) if rng.random() < 0.75 else odd_number(rng)

    def real(low, high):
        return lambda rng: str(round(rng.uniform(low, high), 3)) if rng.random() < 0.75 else odd_number(rng)

    def text(rng):
        return rng.choice(["Be brief.", "e", any_text(rng)])

    def file(rng):
        return any_file(rng, path)

    def fitting(*names):
        return lambda rng: str(path / rng.choice(names)) if rng.random() < 0.7 else any_file(rng, path)

    def cache(rng):
        if rng.random() < 0.6:
            return str(rng.choice([saving / "cache", saving / "new", path / "cache"]))
        name = any_file(rng, path)  # it may be written: so of odd texts only those that stay in the working directory
        return name if name in SPECIAL_FILES or name.startswith(str(path)) else name.replace("/", "")

    return {"--file": file, "--system": text, "--system-file": file,
            "--messages": fitting("messages", "both", "call", "system"),
            "--tools": fitting("tools"), "--think-budget": whole(0, 5), "--max-tokens": whole(1, 6), "--stop": text,
            "--temperature": real(0, 3), "--top-k": whole(0, 400), "--top-p": real(0, 1), "--min-p": real(0, 1),
            "--repetition-penalty": real(0.5, 2), "--presence-penalty": real(-2, 2), "--frequency-penalty": real(-2, 2),
            "--seed": whole(0, 99), "--logprobs": whole(0, 3), "--prompt-cache": cache, "--model": file}


SWITCHES = ["--raw", "--score", "--chat", "--think", "--no-think", "--hide-thinking", "--greedy", "--json", "--stats",
            "--offline", "--help", "--nonsense", "--sc", "--s", "-", "-x", "--chat=1"]
SWITCH_WEIGHTS = [6, 3, 2, 4, 4, 3, 2, 4, 3, 1, 0.3, 0.3, 0.3, 0.3, 0.5, 0.3, 0.3]


def any_arguments(rng, tiny, options):
    arguments = [["Hello"] if rng.random() < 0.6 else [rng.choice(["-", any_text(rng)])]] * (rng.random() < 0.85)
    names = [name for name in options if name not in ("--model", "--max-tokens")]
    for name in rng.sample(names, rng.choice([0, 1, 1, 2, 2, 3, 4, 6])) + ["--max-tokens"] * (rng.random() < 0.6):
        value = options[name](rng)
        arguments.append([f"{name}={value}"] if rng.random() < 0.5 or value.startswith("-") else [name, value])
    switches = rng.choices(SWITCHES, SWITCH_WEIGHTS, k=rng.choice([0, 0, 1, 1, 2, 3]))
    arguments += [[name] for name in dict.fromkeys(switches)]
    arguments.append(["--model", str(tiny) if rng.random() < 0.97 else options["--model"](rng)])
    rng.shuffle(arguments)
    if rng.random() < 0.05:
        arguments.append(rng.choice([[rng.choice(list(options))], ["--"], ["--", "-x"], ["--", any_text(rng)]]))
    return [argument for group in arguments for argument in group]


def pipe_content(rng, path):
    """What is piped in: a file's content, or any bytes. No lines that are commands of the chat."""
    content = rng.choice([(path / rng.choice(TEXT_FILES)).read_bytes(), rng.randbytes(rng.randint(0, 9)), b"",
                          any_text(rng).encode("utf-8", "surrogatepass"), b"Hello\n\xff\nHello\n", b"Hello\n\xe9",
                          b'"""\na', b"a\\\n", b"a\\"])
    return content.replace(b"/", b"")


@fuzz(2500)
def test_command_line(rng, tiny, odd_files, scratch):
    """Status 0 and an answer; or status 1 or 2 and one line that says why not."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch), "COLUMNS": "100"}
    saving, empty = scratch / "saving", scratch / "empty"
    for folder in (saving, empty):
        folder.mkdir(exist_ok=True)
    os.chdir(empty)
    arguments = any_arguments(rng, tiny, options_with_values(odd_files, saving))
    stdin = pipe_content(rng, odd_files)
    before = sorted(os.listdir(odd_files))
    status, out, err = run_cli(arguments, stdin, rng.choice(["strict", "surrogateescape"]))
    lines = [line for line in err.splitlines() if not line.startswith("No --model given")]
    where = (arguments, stdin, status, out[-300:], err[-300:])
    assert status in (0, 1, 2) and "Traceback" not in err and "not enough memory" not in err, where
    if status == 2:
        assert len(lines) == 1 and not out and "error:" in lines[0], where
    elif "--chat" in arguments:
        assert len(lines) <= 3 * len(stdin) + 3, where
    elif status == 1:
        assert len(lines) == 1, where
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


class Endless(io.RawIOBase):
    """A pipe that never ends."""
    taken = 0

    def readable(self):
        return True

    def readinto(self, buffer):
        self.taken += len(buffer)
        assert self.taken < 2**28, "it reads without end"
        return len(buffer)


@pytest.mark.parametrize("arguments", [["-"], ["--raw", "-"], ["--score"], ["Hi", "--messages", "-"], ["--file", "-"]])
def test_endless_stdin(tiny, arguments):
    """No more is read than a model could hold."""
    status, out, err = in_child(lambda: run_cli(["--model", str(tiny), *arguments], Endless()))
    assert status == 1 and not out
    assert_one_line(err, "stdin", "longer")
