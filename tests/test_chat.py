"""`python qwen3.py --chat`: on a real terminal, with lines from a pipe, and its parts under random use."""
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pexpect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import qwen3
import qwen3_chat
import qwen3_cli
import qwen3_files
from configs import BASE
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
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.fixture(scope="module")
def demo():
    return qwen3.load_model(DEMO)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a model with one layer of random weights."""
    return make_random_model(BASE | {"vocab_size": 3072, "num_hidden_layers": 1, "max_position_embeddings": 10**6,
                                     "tie_word_embeddings": False}, tmp_path_factory.mktemp("tiny"), "float32")


@pytest.fixture(scope="module")
def endless(tiny, tmp_path_factory):
    """The folder of a model whose answers never end: aaaaaaaa ..."""
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("endless") / "model")
    weights = {name: np.full_like(tensor, tensor.ndim == 1 or "embed" in name)
               for name, tensor in load_file(tiny / "model.safetensors").items()}
    weights["lm_head.weight"][qwen3.load_model(tiny).tokenizer.encode("a")] = 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# ---- helpers: the program on a terminal and with pipes --------------------------------------------------------------

def program(*arguments, shell: str = "") -> str:
    """A line for a shell that runs it."""
    return f"exec {shlex.join([sys.executable, str(ROOT / 'qwen3.py'), '--chat', *map(str, arguments)])} {shell}"


def surroundings(state: Path, env: dict[str, str]) -> dict:
    """Options for a process of the program: the same, whoever runs the tests, and with Ctrl-C not ignored."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "QWEN3", "LC_", "NO_COLOR"))}
    env = kept | {"TERM": "xterm", "XDG_STATE_HOME": str(state), "INPUTRC": os.devnull, "LANG": "C.UTF-8",
                  "OPENBLAS_NUM_THREADS": "1"} | env
    return {"cwd": ROOT, "env": env, "preexec_fn": functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)}


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


def interrupt_answer(chat: pexpect.spawn, question: str) -> str:
    """Asks, and stops the answer, which would never end -> what the terminal showed of it."""
    chat.send(question + "\r")
    chat.expect_exact("\r\n")
    chat.expect_exact("aaaa")  # so it appears while it is generated
    shown = chat.before + chat.after
    chat.send(CTRL_C)
    chat.expect_exact(ONCE_MORE)
    return (shown + chat.before).replace("^C", "").strip()


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


# ---- on a terminal --------------------------------------------------------------------------------------------------

def test_a_conversation(open_chat, tmp_path):
    chat, file = open_chat("--no-think"), tmp_path / "a conversation.json"
    assert ask(chat, "My name is Mia.") == "Nice to meet you, Mia!"
    assert ask(chat, PERU) == LIMA
    assert ask(chat, "What is my name?") == "Your name is Mia."
    for _ in range(2):  # its own file, so it may go on in it
        assert ask(chat, f"/save '{file}'") == "(saved 6 messages)"
    assert "name of one file" in ask(chat, f"/save {file}")
    assert "there is no command /hepl; /help lists them" in ask(chat, "/hepl me")
    assert ask(chat, "/clear") == "(a new conversation)" and "Mia" not in ask(chat, "What is my name?")
    assert ask(chat, f'/load "{file}"') == "(loaded 6 messages)"
    assert ask(chat, "") == ask(chat, "   ") == ""
    assert ask(chat, "What is my name?") == "Your name is Mia."
    assert status_at_end(chat, CTRL_D) == 0  # a person has seen what was refused
    assert chat.before == "\r\n"  # the shell's prompt starts on a line of its own


def test_a_tool_is_called_and_its_result_asked_for(open_chat, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    chat = open_chat("--hide-thinking", "--tools", tmp_path / "tools.json")
    assert json.loads(ask(chat, "What is the weather in Paris?", prompt="\r\nresult> ")) == CALL
    assert "7 degrees" in ask(chat, RESULT)
    assert ask(chat, PERU) == LIMA
    assert saved(chat, tmp_path / "x.json")["tools"] == [WEATHER]


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["", "NO_COLOR", "dumb"])
def test_thoughts_are_dimmed(open_chat, env):
    shown = ask(open_chat(**env), "What is 12 + 30?")
    if not env:
        assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", shown, flags=re.DOTALL) == "\n\n12 + 30 = 42."
        shown = re.sub(r"\x1b\[[20]m", "", shown)
    assert re.fullmatch(r"<think>\n[^\x1b]+\n</think>\n\n12 \+ 30 = 42\.", shown)


def test_an_answer_into_a_file_leaves_the_prompt_on_the_terminal(open_chat, tmp_path):
    chat = open_chat("--no-think", shell=f" > {tmp_path / 'answers'}")
    assert ask(chat, PERU) == "" and status_at_end(chat, CTRL_D) == 0
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


@pytest.mark.parametrize("state, home", [("/dev/null", "/"), ("", "/dev/null")])
def test_a_history_that_cannot_be_kept_costs_nothing(open_chat, state, home):
    chat = open_chat("--no-think", XDG_STATE_HOME=state, HOME=home)
    assert ask(chat, PERU) == ask(chat, UP) == LIMA
    assert status_at_end(chat, CTRL_D) == 0 and chat.before == "\r\n"


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
    ask(chat, '"""one', more)
    assert ask(chat, 'two"""') and ask(chat, '"""three', more) == ""
    press(chat, CTRL_D)  # ends the message, not the chat
    chat.expect_exact(PROMPT)
    ask(chat, "dropped \\", more)
    press(chat, CTRL_C)
    chat.expect_exact(ONCE_MORE)
    assert [message["content"] for message in saved(chat, tmp_path / "x.json")[::2]] == ["one\ntwo", "three"]


def test_ctrl_c_stops_an_answer_and_keeps_it_and_twice_in_a_row_leaves(open_chat, endless, tmp_path):
    chat = open_chat(model=endless)
    for typed in ("", "half a line"):  # which is dropped
        chat.send(typed)
        chat.expect_exact(typed)
        press(chat, CTRL_C)
        chat.expect_exact(ONCE_MORE)
        assert ask(chat, "/stats") == "there is no answer yet"
    shown = [interrupt_answer(chat, "Once upon a time"), interrupt_answer(chat, "And then?")]
    assert "from the cache" in ask(chat, "/stats")
    messages = saved(chat, tmp_path / "x.json")
    assert roles(messages) == "uaua" and messages[2]["content"] == "And then?"
    for text, message in zip(shown, messages[1::2], strict=True):
        assert set(text + message["content"]) == {"a"}
        assert 0 <= len(message["content"]) - len(text) <= 1  # Ctrl-C may come between keeping a piece and showing it
    interrupt_answer(chat, "Go on.")
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
    (f"{PERU}\n/exit\n{SPAIN}\n", [], 0, f"{LIMA}\n"),
    ("", [PERU], 0, f"{LIMA}\n"),
    (SPAIN, ["word " * 5000], 1, f"{MADRID}\n"),
    (f"/hepl\n{PERU}\n", [], 1, f"{LIMA}\n"),
    (f"{PERU}\n\udcff caf\udce9\n{SPAIN}", [], 1, f"{LIMA}\n{MADRID}\n"),
    (f"{PERU}\n\udce7\udc95", [], 1, f"{LIMA}\n"),
], ids=["lines", "no newline at the end", "exit", "prompt", "refused prompt", "refused line", "no text",
        "half a character"])
def test_lines_from_a_pipe(start, data, arguments, status, out):
    with start("--model", DEMO, "--no-think", *arguments) as chat:
        shown, error = chat.communicate(data, timeout=60)
    assert (chat.returncode, shown) == (status, out) and len(error.splitlines()) == status


def test_no_colours_and_no_prompts_in_a_pipe(start):
    with start("--stats") as chat:  # and no --model
        out, error = chat.communicate("My name is Mia.\nWhat is my name?\n", timeout=60)
    assert chat.returncode == 0 and not re.search(r"(?m)\x1b|^>", out + error)
    assert out.startswith("<think>\n") and out.endswith("Your name is Mia.\n")
    first, *others = error.splitlines()
    assert "bundled model" in first and len(others) == 2 and all("peak memory" in line for line in others)


@pytest.mark.parametrize("shell, word", [("> /dev/full", "No space"), (">&-", "stdout is closed"),
                                         ("<&-", "stdin is closed")])
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
        if act == "presses Ctrl-C":
            chat.send_signal(signal.SIGINT)
            assert chat.stdout.read().splitlines()[-1] == "aaa" and chat.wait(60) == 0
        else:  # as `| head -c 9` does
            chat.stdout.close()
            [error] = chat.stderr
            assert "could not be written to stdout: Broken pipe" in error and chat.wait(60) == 1


# ---- helpers: parts of the program ----------------------------------------------------------------------------------

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
    """The one line with which a line is refused; the conversation is then as before."""
    before = list(chat.messages)
    with pytest.raises(InputError) as caught:
        handled(chat, line)
    assert len(str(caught.value).splitlines()) == 1 and chat.messages == before
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
    for line, shown in {"/think": True, "/set hide_thinking on": False, "/set hide_thinking default": True}.items():
        handled(chat, line)
        assert ("<think>" in handled(chat, PERU)) == shown and chat.messages[-1]["reasoning_content"]
    handled(chat, "/set max_tokens 6")
    assert handled(chat, PERU).endswith("\n(cut off after 6 tokens)") and chat.messages[-1]["content"] == ""
    handled(chat, "/no_think")
    assert handled(chat, PERU) == LIMA[:-1] + "\n(cut off after 6 tokens)"
    with pytest.raises(EOFError):
        chat.handle("/exit")


def test_set(demo):
    chat = new_chat(demo)
    assert handled(chat, "/set").startswith("temperature = 0.0  top_k = 7  ")
    assert handled(chat, "/set").endswith("  max_tokens = default  think_budget = default  hide_thinking = off")
    names = re.search(r"show or set: (.*?) \(VALUE", handled(chat, "/help"), re.DOTALL)[1].replace(",", "").split()
    assert names == re.findall(r"(\w+) = ", handled(chat, "/set"))
    for setting, shown in {
            "temperature 0.5": "0.5", "temperature default": "0.0", "top_k ٣": "3", "top_k default": "7",
            "hide_thinking on": "on", "hide_thinking off": "off", "seed  1 ": "1", "temperature 3": "3"}.items():
        assert handled(chat, f"/set {setting}") == f"{setting.split()[0]} = {shown}"
    handled(chat, f"/set max_tokens {10**400}")
    handled(chat, "/set max_tokens 9")
    first = handled(chat, PERU)
    assert handled(chat, "/regenerate") != first
    chat.n_answers = 0
    assert handled(chat, "/regenerate") == first  # the seed repeats it


@pytest.mark.parametrize("line", [
    "/hepl", "/load none.json", "/load -", "/load unloadable.json", "/save", "/save -", "/save .", "/save \0",
    "/save \udcff", "/regenerate", "/stats", "/system caf\udcff", "a " * 5000, *("/set " + setting for setting in [
        "temperature hot", "temperature", "temperature nan", "temperature 1e999", "top_k -1", "top_k ½", "top_p 0",
        "top_p 1.5", "top_p inf", "min_p -0.1", "seed -1", "seed 1.5", "seed +-5", f"seed {'9' * 5000}", "max_tokens 0",
        "max_new_tokens 0", "think_budget -1", "hide_thinking 1", "stop x", "nothing 1"])])
def test_a_refused_line_changes_nothing(demo, playground, line):
    chat = new_chat(demo, TALK[1:])
    assert refused(chat, line) and chat.options == OPTIONS and not chat.hide_thinking


def test_a_refusal_in_the_middle_of_an_answer(demo):
    for line in ("A question", "/regenerate"):
        results = [qwen3.forward(demo, [1], qwen3.KVCache(demo.config)), InputError("the logits are not finite")]
        engine = dataclasses.replace(demo.engine, forward=mock.Mock(side_effect=results))
        assert "the logits are not finite" in refused(new_chat(dataclasses.replace(demo, engine=engine), TALK), line)


@given(st.lists(st.tuples(st.text(st.one_of(st.characters(max_codepoint=0xA0), st.characters())), st.booleans())))
def test_a_model_cannot_command_the_terminal(pieces):
    """Whatever is written, and however it is cut into pieces: nothing but newlines, tabs and our own dimming."""
    terminal, pipe = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for out in (terminal, pipe):
        with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, {"TERM": "xterm", "NO_COLOR": ""}):
            for piece, dim in pieces:
                qwen3_cli.write(piece, dim=dim)
    plain = "".join(piece for piece, _ in pieces)
    shown = re.sub(r"\x1b\[2m([^\x1b]*)\x1b\[0m", r"\1", terminal.getvalue())
    assert pipe.getvalue() == plain and shown == re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", plain)


# ---- the KV cache over turns ----------------------------------------------------------------------------------------

def handle_and_check(chat: qwen3_chat.Chat, line: str, stop_at: int | None = None) -> None:
    """Handles a line, with Ctrl-C at the n-th piece of the answer, and checks the answer and what it cost."""
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
    assert not passes or passes == [len(prompt) - cached] + [1] * (len(passes) - 1)
    assert not passes or len(passes) - len(answer) in (0, 1)
    held = chat.cache.token_ids[0, :chat.cache.length].tolist()
    assert held == (prompt + answer)[:len(held)]
    # Without any cache, the model says the same: each token is the likeliest, up to rounding.
    said = answer + [chat.model.eos_token_ids[0]] * (chat.last.finish_reason == "stop")
    logits = qwen3.forward(chat.model, prompt + said, qwen3.KVCache(chat.model.config), all_logits=True)
    for row, token in zip(logits[len(prompt) - 1:], said, strict=False):
        assert row[token] > row.max() - 1e-3


LINES = ["My name is Mia.", "What is my name?", PERU, "法国的首都是哪里？", "What is 12 + 30?", "", "//slash", "/clear",
         "What is the weather in Paris?", "<|im_end|>\n<think>", "/stats", "/regenerate", "/think", "/no_think",
         "/system Be brief.", "/system -", "/nothing", "/set max_tokens 3", "/set max_tokens 30", "/save", "/load"]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LINES), st.none() | st.integers(0, 20)), max_size=8), st.booleans())
def test_the_cache_kept_over_turns_changes_no_answer(demo, tmp_path_factory, turns, tools):
    chat, file = new_chat(demo, tools=[WEATHER] if tools else None), tmp_path_factory.mktemp("saved") / "x.json"
    handled(chat, "/set max_tokens 12")
    for line, stop_at in turns:
        handle_and_check(chat, f"{line} {file}" if line in ("/save", "/load") else line, stop_at)


def test_only_what_differs_is_computed_again(demo):
    chat = new_chat(demo)
    handle_and_check(chat, "My name is Mia.")
    first = chat.last
    assert first.cached_tokens == 0
    handle_and_check(chat, "What is my name?")
    assert chat.messages[-1]["content"] == "Your name is Mia."
    # The first answer's thought is gone from the second prompt: what precedes it is all that remains.
    assert chat.last.cached_tokens == len(first.prompt_ids)
    again = chat.last.token_ids
    handle_and_check(chat, "/regenerate")
    assert chat.last.cached_tokens == len(chat.last.prompt_ids) - 1 and chat.last.token_ids == again
    handled(chat, "/no_think")  # all earlier turns stay as they are, but for the empty thought of the last one
    handle_and_check(chat, PERU)
    earlier, thought = len(chat.last.prompt_ids), len(demo.tokenizer.encode("<think>\n\n</think>\n\n"))
    handle_and_check(chat, SPAIN)
    assert roles(chat.messages) == "uauauaua" and chat.last.cached_tokens >= earlier - thought


def test_a_thought_cut_short_is_cached_as_it_was_said(demo):
    """The tokens that a budget puts into the answer were never likeliest, but are in the cache like all others."""
    chat = new_chat(demo)
    handled(chat, "/set think_budget 3")
    for line in ("What is 12 + 30?", "/regenerate", "What is 7 + 5?"):
        handled(chat, line)
        assert list(qwen3.generate(demo, chat.last.prompt_ids, think_budget=3)) == chat.last.token_ids


def test_tool_calls_and_results(demo):
    chat = new_chat(demo, tools=[WEATHER])
    handle_and_check(chat, "What is the weather in Paris?")
    assert chat.messages[-1]["tool_calls"] == [CALL] and chat.missing_results() == 1
    asked = chat.last
    handle_and_check(chat, RESULT)
    assert "7 degrees" in chat.messages[-1]["content"] and chat.missing_results() == 0
    assert chat.last.cached_tokens >= len(asked.prompt_ids) + len(asked.token_ids) - 1  # thoughts stay until then
    chat = new_chat(demo, [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL] * 3}], tools=[WEATHER])
    for missing in (3, 2, 1):  # each of several calls gets its result
        assert chat.missing_results() == missing and chat.last is None
        handled(chat, RESULT)
    assert roles(chat.messages) == "uattta" and chat.missing_results() == 0


# ---- Ctrl-C anywhere ------------------------------------------------------------------------------------------------

def test_a_second_ctrl_c_may_come_at_once(demo, monkeypatch):
    type_in(monkeypatch, "")
    for name in ("read_line", "note"):
        monkeypatch.setattr(qwen3_chat, name, mock.Mock(side_effect=KeyboardInterrupt))
    assert qwen3_chat.run_chat(new_chat(demo)) == 0


def test_ctrl_c_before_the_first_token(demo):
    """The question stays, the cache is as if nothing had happened, and /regenerate has not lost the old answer."""
    engine = dataclasses.replace(demo.engine, forward=mock.Mock(side_effect=KeyboardInterrupt))
    chat = new_chat(dataclasses.replace(demo, engine=engine))
    with pytest.raises(KeyboardInterrupt):
        handled(chat, PERU)
    assert chat.messages == [{"role": "user", "content": PERU}]
    handle_and_check(chat, "/regenerate")
    before = list(chat.messages)
    assert before[1]["content"] == LIMA
    chat.model = dataclasses.replace(demo, engine=engine)
    with pytest.raises(KeyboardInterrupt):
        handled(chat, "/regenerate")
    assert chat.messages == before


@contextlib.contextmanager
def interrupted_at(step: int):
    """Ctrl-C before the n-th line of our own code."""
    left = step

    def trace(frame, event, _):
        nonlocal left
        left -= event == "line"
        if event == "line" and left == 0:
            raise KeyboardInterrupt
        return trace if Path(frame.f_code.co_filename).parent == ROOT else None

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(old)


@pytest.mark.parametrize("seed", range(40))
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


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_ctrl_c_while_the_cache_grows(tiny, monkeypatch, n):
    """k, v, and when there is more to hold, again k and v are copied into larger arrays: four moments for Ctrl-C."""
    chat, resized, calls = new_chat(qwen3.load_model(tiny)), qwen3.KVCache._resized, itertools.count()
    monkeypatch.setattr(qwen3.KVCache, "_resized", lambda *arguments: resized(*arguments) if next(calls) != n else stop())
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
NAMES = ["own.json", "two words", "'quoted name.json'", '"a', "it's", "", "é界", ".", "..", "/", "~", "--", "*", "link",
         "theirs.txt", "dangling", "unloadable.json", "theirs.txt/x", "none/x", "none/..", "/dev/null", "$HOME", "folder",
         "x\0y", "a\\ b", "~nosuchuser/x", "n" * 255, "n" * 256, "\x1b[31m", "\udcff", "-", "界" * 84]
VALUES = ["0", "1", "-1", "0.5", "2", "1e-4", "1e4", "nan", "-1e999", "1e-999", "1e", "", "٣.٥", "½", "1_000", "0x10",
          "1 2", " 3 ", "+4", "+-5", "on", "off", "ON", "''", "default", str(10**400), "9" * 5000, "\ud800", "\x00"]
WORDS = ["Hi", PERU, "法国的首都是哪里？", "👋🏽", "\x00", "\x1b[2J", "\x9b", "\u2028", "\ud800", "\udcff", "'", "\\", "//",
         '"""', '"""one\ntwo"""', "/", "<think>", "</think>", "<tool_call>", "<|im_start|>", "<|im_end|>", "{{", "\t",
         "{% raw %}", "a" * 3000, "\r", "\ufeff", "-", "%s"]


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
    def pieces(completion: qwen3.Completion):
        for piece in rng.choices(SPOKEN, k=rng.choice([0, 1, 3, 6, 12])):
            completion.token_ids.append(0)
            completion.times.append(time.perf_counter())
            yield piece
        if rng.random() < 0.1:
            raise KeyboardInterrupt

    def chat(*arguments, **options) -> qwen3.Completion:
        completion = qwen3.chat(*arguments, **options)
        completion._pieces = pieces(completion)
        return completion

    return chat


@pytest.mark.parametrize("seed", range(8))
def test_random_lines(demo, playground, monkeypatch, seed):
    """From a pipe: what is refused is refused in one line; the conversation stays valid, and comes back as saved."""
    rng, counts = random.Random(seed), dict.fromkeys(["lines", "refused", "answers"], 0)
    chat, other = new_chat(demo, tools=[WEATHER] if seed % 2 else None), new_chat(demo)
    commands = [name for name in chat.commands if name not in ("/save", "/load", "/exit")]

    def handle(line: str) -> None:
        counts["lines"] += 1
        try:
            qwen3_chat.Chat.handle(chat, line)
        except InputError as error:
            assert len(str(error).splitlines()) == 1 and not isinstance(error, qwen3_cli.OutputError)
            counts["refused"] += 1
            raise
        finally:
            assert_valid(chat.messages)
        if counts["lines"] % 20 == 0 and chat.messages:
            chat.save(f"{counts['lines']}.json")
            other.load(f"{counts['lines']}.json")
            assert (other.messages, other.tools or None) == (chat.messages, chat.tools)
        if len(chat.messages) > 12 or len(str(chat.messages)) > 10_000:
            chat.clear("")

    lines = [random_line(rng, commands) for _ in range(1000)]
    type_in(monkeypatch, "\n".join([*lines[:500], "long line " * 50_000, *lines[500:]]))
    monkeypatch.setattr(qwen3_chat, "chat", spoken_by(rng))
    monkeypatch.setattr(chat, "handle", handle)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert qwen3_chat.run_chat(chat) == 1
    print(counts)
    assert sys.stdin.read() == "" and len(out.getvalue().splitlines()) > 100
    assert counts["lines"] > 700 and 100 < counts["refused"] < 700  # the lines are worth their while


# ---- saving and loading ---------------------------------------------------------------------------------------------

def test_save_writes_only_over_its_own_files(demo, playground):
    chat, other = new_chat(demo, TALK), new_chat(demo, TALK)
    Path("loadable.json").write_text(json.dumps(TALK))
    os.link("theirs.txt", "hardlink")
    handled(other, "/save others.json")
    handled(chat, "/save own.json")
    handled(chat, "/save ./folder/../own.json")
    refused(chat, "/load unloadable.json")
    for name in ("theirs.txt", "others.json", "loadable.json", "link", "dangling", "hardlink", "folder", ".",
                 "folder/../theirs.txt", "/dev/null", "unloadable.json"):
        assert "exists already" in refused(chat, f"/save {name}")
    assert handled(chat, "/load loadable.json") == "(loaded 2 messages)"
    chat.messages.append({"role": "user", "content": "\u2028 \x00 界"})
    handled(chat, "/save loadable.json")
    Path("own link").symlink_to("own.json")
    handled(chat, "/save 'own link'")
    assert handled(other, "/load own.json") == "(loaded 3 messages; /regenerate answers the last one)"
    assert json.loads(Path("loadable.json").read_text()) == other.messages == chat.messages
    assert Path("own link").is_symlink() and json.loads(Path("others.json").read_text()) == TALK


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
def test_a_save_that_is_killed_leaves_a_whole_file_or_none(demo, playground):
    """The process is killed at random moments, while it saves again and again."""
    rng = random.Random(0)
    chat = new_chat(demo, [{"role": "user", "content": "界" * 500}] * 200)

    def save_again_and_again(name: str) -> None:
        while True:
            handled(chat, f"/save {name}")
            chat.messages.append({"role": "assistant", "content": "!" * 2000})

    for i in range(60):
        child = multiprocessing.get_context("fork").Process(target=save_again_and_again, args=[f"{i}.json"])
        child.start()
        time.sleep(rng.uniform(0, 0.002 * i))  # none gets far at first, all do in the end
        child.kill()
        child.join()
    files = [json.loads(file.read_text()) for file in Path().glob("[0-9]*.json")]
    assert files
    for messages in files:
        assert_valid(messages)
        assert len(messages) >= 200 and {len(message["content"]) for message in messages[200:]} <= {2000}
