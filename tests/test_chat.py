"""`python qwen3.py --chat`: on a real terminal, with lines from a pipe, and its parts under random use."""
import contextlib
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pexpect
import pytest
from safetensors.numpy import load_file, save_file

import qwen3
from qwen3_app import chat as qwen3_chat
from qwen3_app import cli as qwen3_cli
from qwen3_app import files as qwen3_files
from configs import BASE, VOCABULARY
from make_random_model import make_random_model
from qwen3 import InputError

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
PROMPT = "\r\n> "  # as the terminal shows it, at the start of a line
ONCE_MORE = "(Ctrl-C once more, Ctrl-D or /exit leaves)" + PROMPT
UP, LEFT, CTRL_A, CTRL_C, CTRL_D, CTRL_U = "\x1b[A", "\x1b[D", "\x01", "\x03", "\x04", "\x15"
PERU, LIMA = "What is the capital of Peru?", "The capital of Peru is Lima."
SPAIN, MADRID = "What is the capital of Spain?", "The capital of Spain is Madrid."
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
CALL, RESULT = {"name": "get_weather", "arguments": {"city": "Paris"}}, '{"temperature": 7, "condition": "sunny"}'
TINY = BASE | {"vocab_size": VOCABULARY, "max_position_embeddings": 2**20, "num_hidden_layers": 1,
              "tie_word_embeddings": False}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.fixture(scope="module")
def demo():
    return qwen3.load_model(DEMO)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a model with one layer of random weights."""
    return make_random_model(TINY, tmp_path_factory.mktemp("tiny"), "float32")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """The folder of a model whose answers never end: aaaaaaaa ..."""
    folder = make_random_model(TINY, tmp_path_factory.mktemp("endless"), "float32")
    weights = {name: np.full_like(tensor, tensor.ndim == 1 or "embed" in name)
               for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"][qwen3.load_model(folder).tokenizer.encode("a")] = 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# ---- helpers --------------------------------------------------------------------------------------------------------

def program(*arguments, shell: str = "") -> str:
    """A line for a shell that runs it."""
    return f"exec {shlex.join([sys.executable, str(ROOT / 'qwen3.py'), '--chat', *map(str, arguments)])} {shell}"


def surroundings(state: Path, env: dict[str, str]) -> dict:
    """Options for a process of the program: the same, whoever runs the tests, and with Ctrl-C not ignored."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "xterm", "INPUTRC": os.devnull,
           "XDG_STATE_HOME": str(state), "OPENBLAS_NUM_THREADS": "1"} | env
    return {"cwd": ROOT, "env": env, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}


@pytest.fixture
def open_chat(tmp_path):
    """A function that starts a chat on a terminal of its own. What still runs when the test ends is killed."""
    started = []

    def start(*arguments, model: Path = DEMO, shell: str = "", **env: str) -> pexpect.spawn:
        chat = pexpect.spawn("/bin/sh", ["-c", program("--model", model, *arguments, shell=shell)], timeout=60,
                             encoding="utf-8", codec_errors="replace", dimensions=(60, 300),
                             **surroundings(tmp_path / "state", env))
        chat.delaybeforesend = None  # no need: the terminal is set up before the prompt appears
        started.append(chat)
        chat.expect_exact("/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves" + PROMPT)
        return chat

    yield start
    for chat in started:
        chat.close(force=True)


@pytest.fixture
def start(tmp_path):
    """A function that starts a chat with pipes."""
    yield lambda *arguments, shell="": subprocess.Popen(
        program(*arguments, shell=shell), shell=True, text=True, errors="surrogateescape", stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **surroundings(tmp_path / "state", {}))
    assert not (tmp_path / "state").exists()  # no history of what nobody has typed


def ask(chat: pexpect.spawn, line: str, prompt: str = PROMPT) -> str:
    """Types a line -> what the terminal shows until the next prompt, without the line itself."""
    chat.send(line + "\r")
    chat.expect_exact(prompt)
    return chat.before.partition("\r\n")[2].replace("\r\n", "\n")


def press(chat: pexpect.spawn, key: str) -> None:
    """Presses a key when the program waits for one: readline would notice an earlier Ctrl-C only with the next key."""
    stat, deadline = Path(f"/proc/{chat.pid}/stat"), time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(") ")[2][0] != "S" and time.monotonic() < deadline:
        time.sleep(0.005)
    chat.send(key)


def status_at_end(chat: pexpect.spawn, key: str) -> int | None:
    """Presses a key and waits until the program has ended -> its exit status, None for a signal."""
    press(chat, key)
    chat.expect(pexpect.EOF)
    chat.wait()
    return chat.exitstatus


def saved(chat: pexpect.spawn, file: Path):
    """What /save writes."""
    assert re.fullmatch(r"\(saved \d+ messages\)", ask(chat, f"/save {file}"))
    return json.loads(file.read_text())


def roles(messages: list[dict]) -> str:
    """The initials of who has said something: s, u, a, t."""
    return "".join(message["role"][0] for message in messages)


OPTIONS = qwen3_cli.checked_options(qwen3_cli.parse_arguments(qwen3_cli.make_parser(), ["--chat", "--top-k", "7"]))


def new_chat(model: qwen3.Model, messages: list[dict] | None = None, **more) -> qwen3_chat.Chat:
    return qwen3_chat.Chat(model, list(messages or []), options=OPTIONS, **more)


def handled(chat: qwen3_chat.Chat, line: str) -> str:
    """Handles a line -> what was written to stdout and stderr, without the newline at its end."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        chat.handle(line)
    return out.getvalue().removesuffix("\n")


def refused(chat: qwen3_chat.Chat, line: str) -> str:
    """What a line is refused with; the conversation is then as before."""
    before = list(chat.messages)
    with pytest.raises(InputError) as caught:
        handled(chat, line)
    assert chat.messages == before
    return str(caught.value)


def type_in(monkeypatch, text: str) -> None:
    """Lets the program find a text on its stdin, as from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode(errors="surrogatepass"))))


def assert_valid(messages: list[dict]) -> None:
    for i, message in enumerate(messages):
        qwen3_files.check_message(message, f"message {i}")


@pytest.fixture
def playground(tmp_path, monkeypatch):
    """An empty home and working directory with files of others, which the test must leave as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("folder").mkdir()
    Path("theirs.txt").write_text("not ours")
    Path("unloadable.json").write_text('[{"role": "user"}]')
    Path("link").symlink_to("theirs.txt")
    Path("dangling").symlink_to("nowhere")
    yield
    assert (Path("theirs.txt").read_text(), Path("unloadable.json").read_text()) == ("not ours", '[{"role": "user"}]')
    assert os.readlink("link") == "theirs.txt" and not Path("nowhere").exists() and Path("folder").is_dir()


# ---- on a terminal --------------------------------------------------------------------------------------------------

def test_a_conversation(open_chat, tmp_path):
    chat, file = open_chat("--no-think"), tmp_path / "a conversation.json"
    assert ask(chat, "My name is Mia.") == "Nice to meet you, Mia!" and ask(chat, PERU) == LIMA
    assert ask(chat, "What is my name?") == "Your name is Mia."
    for _ in range(2):  # its own file, so it may go on in it
        assert ask(chat, f"/save '{file}'") == "(saved 6 messages)"
    assert "name of one file" in ask(chat, f"/save {file}")
    assert "there is no command /hepl; /help lists them" in ask(chat, "/hepl me")
    assert ask(chat, "/clear") == "(a new conversation)" and "Mia" not in ask(chat, "What is my name?")
    assert ask(chat, f'/load "{file}"') == "(loaded 6 messages)"
    assert ask(chat, "/stats") == "there is no answer yet" and ask(chat, "") == ask(chat, "   ") == ""
    assert ask(chat, "What is my name?") == "Your name is Mia."
    assert status_at_end(chat, CTRL_D) == 0  # a person has seen what was refused
    assert chat.before == "\r\n"  # the shell's prompt starts on a line of its own


def test_tools_are_called_and_their_results_asked_for(open_chat, tmp_path):
    tools, calls, more = tmp_path / "tools.json", tmp_path / "calls.json", "\r\nresult> "
    tools.write_text(json.dumps([WEATHER]))
    calls.write_text(json.dumps([TALK[0], {"role": "assistant", "tool_calls": [CALL] * 3}]))
    chat = open_chat("--hide-thinking", "--tools", tools)
    assert json.loads(ask(chat, "What is the weather in Paris?", more)) == CALL
    assert "7 degrees" in ask(chat, RESULT) and ask(chat, PERU) == LIMA
    assert ask(chat, f"/load {calls}", more) == "(loaded 2 messages)"
    assert ask(chat, RESULT, more) == ask(chat, RESULT, more) == "" and ask(chat, RESULT)
    value = saved(chat, tmp_path / "x.json")
    assert value["tools"] == [WEATHER] and roles(value["messages"]) == "uattta"


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["", "NO_COLOR", "dumb"])
def test_thoughts_are_dimmed(open_chat, env):
    shown = ask(open_chat(**env), "What is 12 + 30?")
    if not env:
        assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", shown, flags=re.DOTALL) == "\n\n12 + 30 = 42."
        shown = re.sub(r"\x1b\[[20]m", "", shown)
    assert re.fullmatch(r"<think>\n[^\x1b]+\n</think>\n\n12 \+ 30 = 42\.", shown)


def test_an_answer_into_a_file_and_no_place_for_a_history(open_chat, tmp_path):
    chat = open_chat("--no-think", shell=f"> {tmp_path / 'answers'}", XDG_STATE_HOME="", HOME="/dev/null")
    assert ask(chat, PERU) == ""  # but the prompt is on the terminal
    assert status_at_end(chat, CTRL_D) == 0 and chat.before == "\r\n"
    assert (tmp_path / "answers").read_text() == LIMA + "\n"


def test_keys_and_history(open_chat, tmp_path):
    chat = open_chat("--no-think")
    assert ask(chat, "the capital of Peu?" + LEFT * 2 + "r" + CTRL_A + "What is ") == LIMA
    assert ask(chat, SPAIN) == ask(chat, UP) == MADRID
    assert ask(chat, UP * 2 + CTRL_U + "/sta\t").startswith("prompt: ")
    chat.send("/s\t\t")
    chat.expect(r"/save\s+/set\s+/stats\s+/system\s+> /s")
    assert status_at_end(chat, CTRL_U + "/ex\t\r") == 0
    assert (tmp_path / "state" / "qwen3" / "history").stat().st_mode & 0o077 == 0  # nobody else's business
    assert ask(open_chat("--no-think"), UP * 3) == MADRID


def test_line_editing_with_libedit_without_a_home_and_without_readline(monkeypatch):
    fake = mock.MagicMock(backend="editline", __doc__="Importing this module enables line editing using libedit.")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    for readline in (fake, None):
        monkeypatch.setitem(sys.modules, "readline", readline)
        with qwen3_chat.line_editing(["/help"]):
            fake.parse_and_bind.assert_called_once_with("bind ^I rl_complete")


def test_messages_of_several_lines(open_chat, tmp_path):
    chat, more = open_chat("--no-think"), "\r\n... "
    assert ask(chat, '"""one', more) == "" and ask(chat, 'two"""') and ask(chat, '"""three', more) == ""
    press(chat, CTRL_D)  # ends the message, not the chat
    chat.expect_exact(PROMPT)
    ask(chat, "dropped \\", more)
    press(chat, CTRL_C)
    chat.expect_exact(ONCE_MORE)
    assert [message["content"] for message in saved(chat, tmp_path / "x.json")[::2]] == ["one\ntwo", "three"]


def test_ctrl_c_stops_an_answer_and_twice_in_a_row_leaves(open_chat, endless, tmp_path):
    chat, shown = open_chat(model=endless), []
    for typed in ("", "half a line"):  # which is dropped
        chat.send(typed)
        chat.expect_exact(typed)
        press(chat, CTRL_C)
        chat.expect_exact(ONCE_MORE)
        assert ask(chat, "/stats") == "there is no answer yet"
    for question in ("Once upon?", "Then?"):
        ask(chat, question, "aaaa")  # which appears while it is generated
        chat.send(CTRL_C)
        chat.expect_exact(ONCE_MORE)
        shown.append("aaaa" + chat.before.replace("^C", "").strip())
    messages = saved(chat, tmp_path / "x.json")
    assert roles(messages) == "uaua" and messages[2]["content"] == "Then?"
    for text, message in zip(shown, messages[1::2], strict=True):
        assert set(text + message["content"]) == {"a"}
        assert 0 <= len(message["content"]) - len(text) <= 1  # Ctrl-C may come between keeping a piece and showing it
    press(chat, CTRL_C)
    chat.expect_exact(ONCE_MORE)
    assert status_at_end(chat, CTRL_C) == 0


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])  # as in de_DE.UTF-8, as in C.UTF-8
def test_a_typed_line_that_is_no_text_is_refused(open_chat, tmp_path, encoding):
    chat = open_chat("--no-think", PYTHONIOENCODING=encoding)
    os.write(chat.child_fd, b"caf\xff\r")
    chat.expect_exact(PROMPT)
    assert "Traceback" not in chat.before and "not " in chat.before
    ask(chat, "café 法国")
    assert [message["content"] for message in saved(chat, tmp_path / "x.json")][:-1] == ["café 法国"]


# ---- with pipes -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("data, arguments, status, out", [
    (f"{PERU}\n{SPAIN}\n", [], 0, f"{LIMA}\n{MADRID}\n"),
    (f"{PERU}\r\n\r\n  \n{SPAIN}", [], 0, f"{LIMA}\n{MADRID}\n"),
    (f"\ufeff{PERU}\n/exit\n{SPAIN}\n", [], 0, f"{LIMA}\n"),
    ("", [PERU], 0, f"{LIMA}\n"),
    (SPAIN, ["word " * 5000], 1, f"{MADRID}\n"),
    (f"/hepl\n{PERU}\n", [], 1, f"{LIMA}\n"),
    (f"{PERU}\n\udcff caf\udce9\n{SPAIN}", [], 1, f"{LIMA}\n{MADRID}\n"),
    (f"{PERU}\n\udce7\udc95", [], 1, f"{LIMA}\n"),
], ids=["lines", "no newline at the end", "byte order mark", "prompt", "refused prompt", "refused line", "no text",
        "half a character"])
def test_lines_from_a_pipe(start, data, arguments, status, out):
    with start("--model", DEMO, "--no-think", *arguments) as chat:
        shown, error = chat.communicate(data, timeout=60)
    assert (chat.returncode, shown) == (status, out) and len(error.splitlines()) == status


def test_thoughts_and_statistics_in_a_pipe(start):
    with start("--stats") as chat:  # and no --model
        out, error = chat.communicate("My name is Mia.\nWhat is my name?\n", timeout=60)
    assert out.startswith("<think>\n") and out.endswith("</think>\n\nYour name is Mia.\n") and "\x1b" not in out
    assert re.fullmatch("No --model given: the small bundled model .*\n(.*peak memory.*\n){2}", error)


@pytest.mark.parametrize("shell, word", [("> /dev/full", "No space"), (">&-", "stdout is"), ("<&-", "stdin is closed")])
def test_files_that_are_of_no_use(start, shell, word):
    with start("--model", DEMO, shell=shell) as chat:
        _, error = chat.communicate("Hi\nHi\n", timeout=60)
    assert chat.returncode == 1 and len(error.splitlines()) == 1 and word in error


@pytest.mark.parametrize("act", ["closes stdout", "presses Ctrl-C"])
def test_while_an_answer_goes_through_a_pipe(start, endless, act):
    with start("--model", endless) as chat:
        chat.stdin.write("Once upon a time\n/set max_tokens 3\nAnd then?\n")
        chat.stdin.close()
        assert chat.stdout.read(9) == "aaaaaaaaa"
        if act == "closes stdout":  # as `| head -c 9` does
            chat.stdout.close()
            assert re.fullmatch(".* could not be written to stdout: Broken pipe\n", chat.stderr.read())
        else:
            chat.send_signal(signal.SIGINT)
            assert chat.stdout.read().splitlines()[-1] == "aaa"
        assert chat.wait(60) == (act == "closes stdout")


# ---- lines and commands ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, messages", [
    ("one\r\ntwo", ["one", "two"]),
    ('"""\n  one\n\ntwo "three"\n"""\nfour', ['  one\n\ntwo "three"', "four"]),
    ('  """one\ntwo"""  \n"""three"""\n""""""', ["one\ntwo", "three", ""]),
    ("one \\\n\\\ntwo\nthree\\", ["one \n\ntwo", "three"]),
    ('"""/clear"""\n"""\n//x"""\n/clear', ["//clear", "///x", "/clear"]),  # with a slash more: not a command
    ('"""one\ntwo', ["one\ntwo"])])
def test_read_message(monkeypatch, text, messages):
    type_in(monkeypatch, text)
    assert [qwen3_chat.read_message("> ") for _ in messages] == messages
    with pytest.raises(EOFError):
        qwen3_chat.read_message("> ")


def test_commands(demo):
    chat = new_chat(demo, enable_thinking=False)
    assert set(re.findall(r"(?m)(?:^|, )(/[a-z_]+)", handled(chat, "/help"))) == set(chat.commands)
    assert handled(chat, "/system") == "(no system prompt)"
    assert handled(chat, "/system  You are a helpful assistant. ") == "(system prompt set)"
    assert handled(chat, "/system") == "You are a helpful assistant."
    assert handled(chat, "//etc/passwd") and chat.messages[1] == {"role": "user", "content": "/etc/passwd"}
    assert handled(chat, "/clear") == "(a new conversation)" and roles(chat.messages) == "s"
    assert "no answer yet" in refused(chat, "/stats")
    assert handled(chat, "/system -") == "(no system prompt from now on)" and chat.messages == []
    assert handled(chat, PERU) == LIMA
    assert re.fullmatch(r"prompt: \d+ tokens \(\d+ from the cache\), [\d.]+ tokens/s, first token after [\d.]+ s \| "
                        r"answer: 7 tokens, [\d.]+ tokens/s \| .*context: \d+ of 4096 tokens", handled(chat, "/stats"))
    assert handled(chat, "/set max_tokens 6") and handled(chat, PERU) == LIMA[:-1] + "\n(cut off after 6 tokens)"
    for line, shown in {"/think": True, "/set hide_thinking on": False, "/set hide_thinking default": True}.items():
        handled(chat, line)
        assert re.fullmatch(r"<think>\n.+\n(?=\()" * shown + r"\n?\(cut off after 6 tokens\)", handled(chat, PERU))
        assert chat.messages[-1]["content"] == "" and chat.messages[-1]["reasoning_content"]
    assert handled(chat, "/no_think") and "<think>" not in handled(chat, PERU)
    with pytest.raises(EOFError):
        chat.handle("/exit")


def test_set(demo):
    chat = new_chat(demo)
    names = re.findall(r"\w+", re.search(r"show or set: (.*?) \(VALUE", handled(chat, "/help"), re.DOTALL)[1])
    shown = handled(chat, "/set")
    assert names == re.findall(r"(\w+) = ", shown) and "temperature = 0.0  top_k = 7 " in shown
    for setting, shown in {
            "temperature 0.5": "0.5", "temperature default": "0.0", "top_k ٣": "3", "top_k default": "7",
            "hide_thinking on": "on", "hide_thinking off": "off", "seed  1 ": "1", "temperature 3": "3",
            "max_tokens 9": "9"}.items():
        assert handled(chat, f"/set {setting}") == f"{setting.split()[0]} = {shown}"
    first = handled(chat, PERU)
    assert handled(chat, "/regenerate") != first
    chat.n_answers = 0
    assert handled(chat, "/regenerate") == first  # the seed repeats it


def test_set_shows_what_answers_are_drawn_with(demo):
    """Without thinking that is not what generation_config.json says."""
    chat = new_chat(dataclasses.replace(demo, sampling=qwen3.Sampling(0.6, 20, 0.95)), [])
    assert {"temperature = 0.6", "top_p = 0.95", "top_k = 7"} <= set(handled(chat, "/set").split("  "))
    handled(chat, "/no_think")
    assert {"temperature = 0.7", "top_p = 0.8", "top_k = 7"} <= set(handled(chat, "/set").split("  "))


def test_regenerate_while_results_are_missing(demo):
    """The answer with the calls is made anew, and no call is left without a result."""
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    asked = [{"role": "user", "content": PERU}, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    chat = new_chat(demo, [*asked, {"role": "tool", "content": "sunny"}])
    assert chat.missing_results() == 1
    handled(chat, "/regenerate")
    assert roles(chat.messages) == "ua" and not chat.missing_results()


@pytest.mark.parametrize("line", [
    "/hepl", "/load none.json", "/load -", "/load unloadable.json", "/save", "/save -", "/save .", "/save \0",
    "/save \udcff", "/regenerate", "/stats", "/system caf\udcff", "a " * 5000, *("/set " + setting for setting in [
        "temperature hot", "temperature", "temperature nan", "temperature 1e999", "top_k -1", "top_k ½", "top_p 0",
        "top_p 1.5", "top_p inf", "min_p -0.1", "seed -1", "seed 1.5", "seed +-5", f"seed {'9' * 5000}", "max_tokens 0",
        "max_new_tokens 0", "think_budget -1", "hide_thinking 1", "stop x", "nothing 1"])])
def test_a_refused_line_changes_nothing(demo, playground, line):
    chat = new_chat(demo, TALK[1:])
    assert refused(chat, line) and chat.options == OPTIONS and not chat.hide_thinking


def test_a_model_cannot_command_the_terminal():
    """Nothing gets there but newlines, tabs and our own dimming."""
    text, terminal, pipe = "".join(map(chr, range(0x300))), io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for out in (terminal, pipe):
        with contextlib.redirect_stdout(out):
            qwen3_cli.write(text)
    assert pipe.getvalue() == text
    assert terminal.getvalue() == re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def test_save_writes_only_over_its_own_files(demo, playground):
    chat, other = new_chat(demo, TALK), new_chat(demo, TALK)
    Path("loadable.json").write_text(json.dumps(TALK))
    os.link("theirs.txt", "hardlink")
    handled(other, "/save others.json")
    for name in ("own.json", "./folder/../own.json"):
        assert handled(chat, f"/save {name}") == "(saved 2 messages)"
    refused(chat, "/load unloadable.json")
    for name in ("theirs.txt", "others.json", "loadable.json", "link", "dangling", "hardlink", "folder",
                 "folder/../theirs.txt", "/dev/null", "unloadable.json"):
        assert "exists already" in refused(chat, f"/save {name}")
    assert handled(chat, "/load loadable.json") == "(loaded 2 messages)"
    chat.messages.append({"role": "user", "content": "\u2028 \x00 界"})
    Path("own link").symlink_to("own.json")
    handled(chat, "/save 'own link'")
    assert handled(other, "/load own.json") == "(loaded 3 messages; /regenerate answers the last one)"
    assert other.messages == chat.messages and json.loads(Path("others.json").read_text()) == TALK


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
def test_a_save_that_is_killed_leaves_a_whole_file_or_none(demo, playground):
    """The process is killed at random moments, while it saves again and again."""
    rng = random.Random(0)
    chat = new_chat(demo, [{"role": "user", "content": "界" * 500}] * 200)

    def save_again_and_again(name: str) -> None:
        while True:
            handled(chat, f"/save {name}")
            chat.messages.append({"role": "assistant", "content": "!" * 2000})

    for i in range(40):
        child = multiprocessing.get_context("fork").Process(target=save_again_and_again, args=[f"{i}.json"])
        child.start()
        time.sleep(rng.uniform(0, 0.002 * i))  # none gets far at first, all do in the end
        child.kill()
        child.join()
    files = [json.loads(file.read_text()) for file in Path().glob("[0-9]*.json")]
    assert files and all(len(messages) >= 200 for messages in files)


# ---- the KV cache over turns, and after Ctrl-C -----------------------------------------------------------------------

def handle_and_check(chat: qwen3_chat.Chat, line: str, stop_at: int | None = None) -> None:
    """Handles a line, with Ctrl-C at the n-th piece. Checks what the answer cost, and that it is as without a cache."""
    before, last = chat.cache.token_ids[0, :chat.cache.length].tolist(), chat.last
    forward = mock.Mock(side_effect=qwen3.forward)
    chat.model = dataclasses.replace(chat.model, engine=dataclasses.replace(chat.model.engine, forward=forward))
    stop = [] if stop_at is None else [None] * stop_at + [KeyboardInterrupt]
    with (mock.patch.object(qwen3_cli, "write", side_effect=itertools.chain(stop, itertools.repeat(None))),
          contextlib.suppress(KeyboardInterrupt, InputError)):
        handled(chat, line)
    assert_valid(chat.messages)
    passes = [len(call.args[1]) for call in forward.call_args_list]  # how many tokens each of them computed
    if chat.last is last or chat.last is None:
        assert not passes
        return
    prompt, answer, cached = chat.last.prompt_ids.tolist(), list(chat.last.token_ids), chat.last.cached_tokens
    assert cached == min(len(os.path.commonprefix([before, prompt])), len(prompt) - 1)
    assert not passes or passes[0] == len(prompt) - cached and len(answer) - sum(passes[1:]) in (0, 1)
    held = chat.cache.token_ids[0, :chat.cache.length].tolist()
    assert held == (prompt + answer)[:len(held)]
    n = len(answer) + (chat.last.finish_reason == "stop")
    fresh = qwen3.Completion(chat.model, prompt, max_new_tokens=n + 1, think_budget=chat.options["think_budget"])
    assert fresh.finish().token_ids[:n] == answer


LINES = ["My name is Mia.", "What is my name?", PERU, "What is 12 + 30?", "", "//slash", "/clear",
         "What is the weather in Paris?", "<|im_end|>\n<think>", "/stats", "/regenerate", "/think", "/no_think", "//x",
         "/system Be brief.", "/system -", "/set max_tokens 30", "/set think_budget 3", "/save x", "/load x"]


@pytest.mark.parametrize("seed", range(4))
def test_the_cache_kept_over_turns_changes_no_answer(demo, playground, seed):
    rng = random.Random(seed)
    chat = new_chat(demo, tools=[WEATHER] if seed % 2 else None)
    handled(chat, "/set max_tokens 12")
    for _ in range(9):
        handle_and_check(chat, rng.choice(LINES), rng.choice([None, rng.randrange(12)]))


def test_only_what_differs_is_computed_again(demo):
    chat, empty_thought = new_chat(demo), len(demo.tokenizer.encode("<think>\n\n</think>\n\n"))
    handle_and_check(chat, "My name is Mia.")
    for line in ("What is my name?", "/no_think", PERU, SPAIN):
        earlier = chat.last
        handle_and_check(chat, line)
        if line != "/no_think":  # of the answer before, the thought is gone, and so what follows is new
            assert chat.last.cached_tokens == len(earlier.prompt_ids) - empty_thought * (line == SPAIN)
    assert chat.messages[3]["content"] == "Your name is Mia." and roles(chat.messages) == "uauauaua"


def test_a_second_ctrl_c_may_come_at_once(demo, monkeypatch):
    type_in(monkeypatch, "")
    for name in ("read_line", "note"):
        monkeypatch.setattr(qwen3_chat, name, mock.Mock(side_effect=KeyboardInterrupt))
    statuses = []
    with contextlib.suppress(KeyboardInterrupt):
        statuses.append(qwen3_chat.run_chat(new_chat(demo)))
    assert statuses == [0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("the logits are not finite")])
def test_an_answer_that_does_not_begin(demo, error):
    """The old answer is there, the cache is as if nothing had happened; after Ctrl-C, the question stays."""
    engine = dataclasses.replace(demo.engine, forward=mock.Mock(side_effect=error))
    chat = new_chat(dataclasses.replace(demo, engine=engine), TALK)
    for line, added in {"/regenerate": [], PERU: [{"role": "user", "content": PERU}]}.items():
        with pytest.raises((KeyboardInterrupt, InputError)):
            handled(chat, line)
        assert chat.messages == TALK + added * (error is KeyboardInterrupt)
    handle_and_check(chat, "/regenerate")
    assert roles(chat.messages) in ("ua", "uaua")


@contextlib.contextmanager
def interrupted_at(step: int):
    """Ctrl-C before the n-th line of our own code."""
    steps = itertools.count(1)

    def trace(frame, event, _):
        if event == "line" and next(steps) == step:
            raise KeyboardInterrupt
        return trace if Path(frame.f_code.co_filename).parent == ROOT else None

    sys.settrace(trace)
    with contextlib.suppress(KeyboardInterrupt):
        yield
    sys.settrace(None)


@pytest.mark.parametrize("seed", range(30))
def test_ctrl_c_at_any_line_of_the_program(tiny, seed):
    """Wherever Ctrl-C comes: the messages stay valid, and the cache gives the answers that a fresh one gives."""
    rng = random.Random(seed)
    chat = new_chat(qwen3.load_model(tiny))
    handled(chat, "/set max_tokens 5")
    handle_and_check(chat, "My name is Mia.")
    for line in ("What is my name?", "/regenerate", PERU * rng.randint(1, 12)):
        kept = list(chat.messages)
        with interrupted_at(int(2 ** rng.uniform(0, 13))):
            handled(chat, line)
        assert_valid(chat.messages)
        assert chat.messages[:len(kept) - 1] == kept[:-1] and "aa" not in roles(chat.messages)
    handle_and_check(chat, "What is my name?")
    assert len(chat.last.token_ids) == 5 and chat.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ctrl_c_while_the_cache_grows(tiny, monkeypatch, n):
    """k and v, and when there is more to hold, again k and v, are copied into larger arrays: four moments."""
    chat, resized, calls = new_chat(qwen3.load_model(tiny)), qwen3.KVCache._resized, itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == n:
            raise KeyboardInterrupt
        return resized(*arguments)

    monkeypatch.setattr(qwen3.KVCache, "_resized", interrupted)
    handled(chat, "/set max_tokens 5")
    for line in ("My name is Mia.", "Hi", PERU * 20):
        with contextlib.suppress(KeyboardInterrupt):
            handled(chat, line)
    assert next(calls) > n
    for line in ("/regenerate", PERU * 10, "/regenerate"):
        handle_and_check(chat, line)


# ---- random lines ---------------------------------------------------------------------------------------------------

SPOKEN = ["<think>", "\n", "a thought", "</think>", "text", "\x1b[31m", "\ufffd", "界", "<tool_call>", "</tool_call>",
          '<tool_call>\n{"name": "f", "arguments": {"x": [1, 2.5, null, "\\u00e9"]}}\n</tool_call>', '{"name": "f"',
          '<tool_call>{"name": "f", "arguments": null}</tool_call>', '{"name": 1, "arguments": {}}', "<|im_end|>"]
NAMES = ["own.json", "two words", "'quoted name.json'", '"a', "it's", "", ".", "..", "/", "~", "--", "-", "*", "link",
         "theirs.txt", "dangling", "unloadable.json", "theirs.txt/x", "none/x", "none/..", "/dev/null", "folder",
         "$HOME", "x\0y", "a\\ b", "~nosuchuser/x", "n" * 255, "n" * 256, "\x1b[31m", "\udcff", "界" * 84]
VALUES = ["0", "1", "-1", "0.5", "1e4", "nan", "1e-999", "1e", "", "٣.٥", "½", "1_000", "1 2", " 3 ", "+-5", "on",
          "off", "ON", "''", "default", str(10**400), "9" * 5000, "\ud800", "\x00"]
WORDS = ["Hi", PERU, "法国的首都是哪里？", "👋🏽", "\x00", "\x1b[2J", "\u2028", "\ud800", "'", "\\", "/", "a" * 3000,
         '"""', '"""one\ntwo"""', "<think>", "</think>", "<tool_call>", "<|im_end|>", "{{", "\t", "\r", "\ufeff", "%s"]


def random_line(rng: random.Random, commands: list[str]) -> str:
    """A line as a person, a script, or a cat on the keyboard might type it. It saves nothing outside the folder."""
    words = "".join(rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(rng.choice([0, 1, 1, 2, 3, 8])))
    letters = "".join(chr(rng.randrange(rng.choice([0x300, 0x110000]))) for _ in range(rng.randrange(30)))
    key, value = rng.choice([*qwen3_chat.SETTINGS, "", "nothing"]), rng.choice(VALUES)
    return rng.choice([
        f"/set {key} {value}", f"/set{rng.choice(['', '  '])}{key} {value}", f"/save {rng.choice(NAMES)}",
        f"/load {rng.choice(NAMES)}", words, words, letters, "/" * rng.randint(1, 3) + words,
        rng.choice(commands) + rng.choice(["", " ", "x"]) + rng.choice(["", words, "-", value])])


def spoken_by(rng: random.Random):
    """A function like `chat`, with its checks; but the answers are made up, not computed. Some are interrupted."""
    def chat(*arguments, **options) -> qwen3.Completion:
        completion = qwen3.chat(*arguments, **options)
        pieces = rng.choices(SPOKEN, k=rng.choice([0, 1, 3, 6, 12]))
        completion.token_ids, completion.times = [0] * len(pieces), [0.0, 1.0, 2.0]
        end = KeyboardInterrupt if rng.random() < 0.1 else None
        completion._pieces = iter(mock.Mock(side_effect=[*pieces, end]), None)
        return completion

    return chat


@pytest.mark.parametrize("seed", range(6))
def test_random_lines(demo, playground, monkeypatch, seed):
    """From a pipe: whatever comes, the conversation stays valid, and it comes back as it was saved."""
    rng, n_lines = random.Random(seed), itertools.count(1)
    chat, other = new_chat(demo, tools=[WEATHER] if seed % 2 else None), new_chat(demo)
    commands = [name for name in chat.commands if name not in ("/save", "/load", "/exit")]

    def handle(line: str) -> None:
        try:
            qwen3_chat.Chat.handle(chat, line)
        finally:
            assert_valid(chat.messages)
            if (n := next(n_lines)) % 20 == 0 and chat.messages:
                chat.save(f"{n}.json")
                other.load(f"{n}.json")
                assert (other.messages, other.tools) == (chat.messages, chat.tools)
            if len(str(chat.messages)) > 4000:
                chat.clear("")

    type_in(monkeypatch, "\n".join(["long line " * 50_000, *(random_line(rng, commands) for _ in range(1000))]))
    monkeypatch.setattr(qwen3_chat, "chat", spoken_by(rng))
    monkeypatch.setattr(chat, "handle", handle)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert qwen3_chat.run_chat(chat) == 1
    assert sys.stdin.read() == "" and next(n_lines) > 700 and len(out.getvalue()) > 3000  # they are worth their while
