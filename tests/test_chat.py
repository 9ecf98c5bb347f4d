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
GREETING = "/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves"
PROMPT = "\r\n> "  # as the terminal shows it, at the start of a line
UP, LEFT, CTRL_A, CTRL_C, CTRL_D, CTRL_U = "\x1b[A", "\x1b[D", "\x01", "\x03", "\x04", "\x15"
PERU, LIMA = "What is the capital of Peru?", "The capital of Peru is Lima."
SPAIN, MADRID = "What is the capital of Spain?", "The capital of Spain is Madrid."
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
RESULT = '{"temperature": 7, "condition": "sunny"}'
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


# ---- models ---------------------------------------------------------------------------------------------------------

def reciter(folder: Path, text: str, again: str = "", broken: bool = False) -> None:
    """Makes a model that says `text` to everything, and then `again` for ever; a broken one then computes NaN.

    Each token's embedding is a direction of its own, the head maps it to the next token, and the layer adds nothing:
    the answers are the same on each machine. All other tokens share the direction that leads to the first one. So no
    token may occur twice, nor the newlines with which prompts end.
    """
    encode = qwen3.load_model(DEMO).tokenizer.encode
    loop = encode(again)
    said = encode(text) + loop
    size = len(said) + 1
    make_random_model(BASE | {
        "vocab_size": 3072, "hidden_size": size, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8,
        "num_key_value_heads": 1, "intermediate_size": 8, "tie_word_embeddings": False,
        "max_position_embeddings": 1_000_000}, folder, "float32")
    weights = {name: np.ones_like(tensor) if tensor.ndim == 1 else np.zeros_like(tensor)
               for name, tensor in load_file(folder / "model.safetensors").items()}
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, -1] = 1
    embedding[said] = np.eye(size, dtype=np.float32)[:-1]
    embedding[said[-1]] *= np.nan if broken else 1
    end = json.loads((DEMO / "generation_config.json").read_text())["eos_token_id"][0]
    head[said[0], -1] = 1
    for direction, token in enumerate(said[1:] + [loop[0] if loop else end]):
        head[token, direction] = 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def reciters(tmp_path_factory):
    """A folder with models that answer at once, and always the same."""
    folder = tmp_path_factory.mktemp("reciters")
    reciter(folder / "parrot", "Hello!")
    reciter(folder / "endless", "Once upon", " a")  # Once upon a a a a a ...
    reciter(folder / "endless thought", "<think>Once upon", " a")
    reciter(folder / "nasty", "Hi\x1b]0;title\x07")
    reciter(folder / "broken", " upon a time", broken=True)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model with one layer of random weights."""
    config = BASE | {"vocab_size": 3072, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    return qwen3.load_model(make_random_model(config, tmp_path_factory.mktemp("tiny"), "float32"))


@pytest.fixture(scope="module")
def demo():
    return qwen3.load_model(DEMO)


# ---- helpers: the program on a terminal and with pipes --------------------------------------------------------------

def command(*arguments) -> list[str]:
    return [sys.executable, str(ROOT / "qwen3.py"), "--chat", *map(str, arguments)]


def environment(state: Path, **changes: str) -> dict[str, str]:
    """The environment of the program, the same whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "QWEN3", "LC_", "NO_COLOR"))}
    return kept | {"TERM": "xterm", "XDG_STATE_HOME": str(state), "INPUTRC": os.devnull, "LANG": "C.UTF-8",
                   "OPENBLAS_NUM_THREADS": "1"} | changes


def hear_ctrl_c() -> None:
    """In the child: a shell that starts the tests in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def open_chat(tmp_path):
    """A function that starts a chat on a terminal of its own. What still runs when the test ends is killed."""
    started = []

    def start(*arguments, model: str | Path = DEMO, first: str = GREETING + PROMPT, **env) -> pexpect.spawn:
        program, *options = command("--model", model, *arguments)
        chat = pexpect.spawn(program, options, cwd=ROOT, env=environment(tmp_path / "state", **env), timeout=60,
                             encoding="utf-8", codec_errors="replace", dimensions=(60, 300), preexec_fn=hear_ctrl_c)
        chat.delaybeforesend = None  # no need: the terminal is set up before the prompt appears
        started.append(chat)
        chat.expect_exact(first)
        return chat

    yield start
    for chat in started:
        if not chat.closed and chat.isalive():
            chat.kill(signal.SIGKILL)
        chat.close()


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


def interrupt_answer(chat: pexpect.spawn, question: str = "Tell me a story.") -> str:
    """Asks, and stops the answer, which would never end -> what the terminal showed of it."""
    chat.send(question + "\r")
    chat.expect_exact("\r\n")
    chat.expect_exact(" a a a a")
    shown = chat.before + chat.after
    chat.send(CTRL_C)
    chat.expect_exact("(Ctrl-C once more, Ctrl-D or /exit leaves)" + PROMPT)
    return (shown + chat.before).replace("^C", "").strip()


def status_at_end(chat: pexpect.spawn) -> int | None:
    """Waits until the program has ended -> its exit status, None for a signal."""
    chat.expect(pexpect.EOF)
    chat.wait()
    return chat.exitstatus


def saved(chat: pexpect.spawn, file: Path) -> list[dict]:
    """The messages of the chat, as /save writes them."""
    assert re.fullmatch(r"\(saved \d+ messages\)", ask(chat, f"/save {file}"))
    return json.loads(file.read_text())


def roles(messages: list[dict]) -> str:
    """The initials of who has said something: s, u, a, t."""
    return "".join(message["role"][0] for message in messages)


@pytest.fixture
def piped(tmp_path):
    """A function that runs a chat with lines from a pipe -> (status, stdout, stderr)."""
    def run(data: str | bytes, *arguments) -> tuple[int, str, str]:
        done = subprocess.run(command(*arguments), input=data if isinstance(data, bytes) else data.encode(), cwd=ROOT,
                              capture_output=True, env=environment(tmp_path / "state"), timeout=60)
        assert not (tmp_path / "state").exists()  # no history of what nobody has typed
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


# ---- on a terminal: answers and commands ----------------------------------------------------------------------------

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
    chat.send(CTRL_D)
    assert status_at_end(chat) == 0  # a person has seen what was refused
    assert chat.before == "\r\n"  # the shell's prompt starts on a line of its own


def test_prompt_and_messages_given_are_answered_first(open_chat, tmp_path):
    (tmp_path / "talk.json").write_text(json.dumps([
        {"role": "user", "content": "My name is Mia."}, {"role": "assistant", "content": "Nice to meet you, Mia!"}]))
    chat = open_chat("--no-think", "--messages", tmp_path / "talk.json", "What is my name?",
                     first=f"{GREETING}\r\nYour name is Mia.{PROMPT}")
    assert roles(saved(chat, tmp_path / "x.json")) == "uaua"


def test_a_tool_is_called_and_its_result_asked_for(open_chat, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    chat = open_chat("--hide-thinking", "--tools", tmp_path / "tools.json")
    assert json.loads(ask(chat, "What is the weather in Paris?", prompt="\r\nresult> ")) == CALL
    assert "7 degrees" in ask(chat, RESULT)
    assert ask(chat, PERU) == LIMA
    value = saved(chat, tmp_path / "x.json")
    assert value["tools"] == [WEATHER] and roles(value["messages"]) == "uataua"


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["", "NO_COLOR", "dumb"])
def test_thoughts_are_dimmed(open_chat, env):
    shown = ask(open_chat(**env), "What is 12 + 30?")
    if not env:
        assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", shown, flags=re.DOTALL) == "\n\n12 + 30 = 42."
        shown = shown.replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert re.fullmatch(r"<think>\n[^\x1b]+\n</think>\n\n12 \+ 30 = 42\.", shown)


def test_an_answer_into_a_file_leaves_the_prompt_on_the_terminal(tmp_path):
    line = f"{' '.join(command('--model', 'demo', '--no-think'))} > {tmp_path / 'answers'}"
    chat = pexpect.spawn("/bin/sh", ["-c", line], cwd=ROOT, env=environment(tmp_path), timeout=60, encoding="utf-8")
    chat.expect_exact(GREETING + PROMPT)
    assert ask(chat, PERU) == ""
    chat.send(CTRL_D)
    assert status_at_end(chat) == 0
    assert (tmp_path / "answers").read_text() == LIMA + "\n"


# ---- on a terminal: the keyboard ------------------------------------------------------------------------------------

def test_keys_and_history(open_chat, tmp_path):
    chat = open_chat("--no-think")
    assert ask(chat, "the capital of Peu?" + LEFT * 2 + "r" + CTRL_A + "What is ") == LIMA
    assert ask(chat, SPAIN) == ask(chat, UP) == MADRID
    assert ask(chat, UP * 2 + CTRL_U) == ""
    chat.send(CTRL_D)
    assert status_at_end(chat) == 0
    assert (tmp_path / "state" / "qwen3" / "history").stat().st_mode & 0o077 == 0  # nobody else's business
    later = open_chat("--no-think")
    assert ask(later, UP) == MADRID and ask(later, UP * 2) == LIMA


def test_tab_completes_commands(open_chat, reciters):
    chat = open_chat(model=reciters / "parrot")
    assert ask(chat, "/sta\t") == "there is no answer yet"
    chat.send("/s\t\t")
    chat.expect(r"/save\s+/set\s+/stats\s+/system\s+> /s")
    assert ask(chat, CTRL_U + "Hello\t there") == "Hello!"
    chat.send("/ex\t\r")
    assert status_at_end(chat) == 0


def test_tab_with_libedit_and_no_home(monkeypatch):
    fake = mock.MagicMock(backend="editline", __doc__="Importing this module enables line editing using libedit.")
    monkeypatch.setitem(sys.modules, "readline", fake)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with qwen3_chat.line_editing(["/help"]):
        fake.parse_and_bind.assert_called_once_with("bind ^I rl_complete")
    monkeypatch.setitem(sys.modules, "readline", None)  # as on Windows
    with qwen3_chat.line_editing(["/help"]):
        pass


@pytest.mark.parametrize("content", ["folder", "unwritable", b"\xff\x00\n\n\x1b[31m\n" + b"x" * 100_000])
def test_a_history_of_no_use_costs_nothing(open_chat, reciters, tmp_path, content):
    history = tmp_path / "state" / "qwen3" / "history"
    if content == "folder":
        history.mkdir(parents=True)
    elif isinstance(content, bytes):
        history.parent.mkdir(parents=True)
        history.write_bytes(content)
    env = {"XDG_STATE_HOME": "", "HOME": "/dev/null"} if content == "unwritable" else {}
    chat = open_chat(model=reciters / "parrot", **env)
    assert ask(chat, "Hello") == ask(chat, UP) == "Hello!"
    chat.send(CTRL_D)
    assert status_at_end(chat) == 0 and chat.before == "\r\n"


def test_messages_of_several_lines(open_chat, reciters, tmp_path):
    chat, more = open_chat(model=reciters / "parrot"), "\r\n... "
    for line in ('"""', "  one", ""):
        ask(chat, line, more)
    assert ask(chat, 'two"""  ') == "Hello!"
    ask(chat, "three \\", more)
    assert ask(chat, "four") == "Hello!"
    ask(chat, '"""five', more)
    press(chat, CTRL_D)  # ends the message, not the chat
    chat.expect_exact("Hello!" + PROMPT)
    ask(chat, '"""dropped', more)
    press(chat, CTRL_C)
    chat.expect_exact(PROMPT)
    questions = [message["content"] for message in saved(chat, tmp_path / "x.json")[::2]]
    assert questions == ["  one\n\ntwo", "three \nfour", "five"]


def test_ctrl_c_stops_an_answer_and_keeps_it(open_chat, reciters, tmp_path):
    chat = open_chat(model=reciters / "endless")
    shown = [interrupt_answer(chat), interrupt_answer(chat, "And then?")]
    assert "from the cache" in ask(chat, "/stats")
    messages = saved(chat, tmp_path / "x.json")
    assert roles(messages) == "uaua" and messages[2]["content"] == "And then?"
    for text, message in zip(shown, messages[1::2], strict=True):
        assert re.fullmatch("Once upon( a)+", message["content"]) and re.fullmatch("Once upon( a)+", text)
        assert 0 <= len(message["content"]) - len(text) <= 2  # Ctrl-C may come between keeping a piece and showing it
    assert ask(chat, "/set max_tokens 4") == "max_tokens = 4"
    assert ask(chat, "Go on.") == "Once upon a a\n(cut off after 4 tokens)"


def test_a_thought_that_does_not_end(open_chat, reciters, tmp_path):
    chat = open_chat(model=reciters / "endless thought", NO_COLOR="1")
    interrupt_answer(chat)
    ask(chat, "/set max_tokens 6")
    assert ask(chat, "Go on.") == "<think>Once upon a a a\n(cut off after 6 tokens)"
    ask(chat, "/set hide_thinking on")
    assert ask(chat, "Go on.") == "\n(cut off after 6 tokens)"
    for message in saved(chat, tmp_path / "x.json")[1::2]:
        assert message["content"] == "" and re.fullmatch("Once upon( a)+", message["reasoning_content"])


def test_ctrl_c_twice_in_a_row_leaves(open_chat, reciters):
    chat = open_chat(model=reciters / "endless")
    for typed in ("", "half a line"):  # which is dropped
        chat.send(typed)
        chat.expect_exact(typed)
        press(chat, CTRL_C)
        chat.expect_exact("leaves)" + PROMPT)
        assert ask(chat, "/stats") == "there is no answer yet"
    interrupt_answer(chat)
    press(chat, CTRL_C)
    assert status_at_end(chat) == 0


def test_a_second_ctrl_c_may_come_at_once(demo, monkeypatch):
    type_in(monkeypatch, b"")
    for name in ("read_line", "note"):
        monkeypatch.setattr(qwen3_chat, name, mock.Mock(side_effect=KeyboardInterrupt))
    assert qwen3_chat.run_chat(new_chat(demo)) == 0


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])  # as in de_DE.UTF-8, as in C.UTF-8
def test_a_typed_line_that_is_no_text_is_refused(open_chat, reciters, tmp_path, encoding):
    chat = open_chat(model=reciters / "parrot", PYTHONIOENCODING=encoding)
    os.write(chat.child_fd, b"caf\xff\r")
    chat.expect_exact(PROMPT)
    assert "Traceback" not in chat.before and "not " in chat.before and "Hello!" not in chat.before
    assert ask(chat, "café 法国") == "Hello!"
    assert saved(chat, tmp_path / "x.json") == [{"role": "user", "content": "café 法国"}, TALK[1]]


# ---- lines from a pipe ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("data, arguments, status, out", [
    (f"{PERU}\n{SPAIN}\n", [], 0, f"{LIMA}\n{MADRID}\n"),
    (f"{PERU}\r\n\r\n  \n{SPAIN}", [], 0, f"{LIMA}\n{MADRID}\n"),
    (f"{PERU}\n/exit\n{SPAIN}\n", [], 0, f"{LIMA}\n"),
    ("", [], 0, ""),
    ("", [PERU], 0, f"{LIMA}\n"),
    (SPAIN, ["word " * 5000], 1, f"{MADRID}\n"),
    (f"/hepl\n{PERU}\n", [], 1, f"{LIMA}\n"),
    (f"{PERU}\n".encode() + b"\xff caf\xe9\n" + SPAIN.encode(), [], 1, f"{LIMA}\n{MADRID}\n"),
    (f"{PERU}\n界".encode()[:-1], [], 1, f"{LIMA}\n"),
], ids=["lines", "no newline at the end", "exit", "nothing", "prompt", "refused prompt", "refused line", "bytes",
        "half a character"])
def test_lines_from_a_pipe(piped, data, arguments, status, out):
    *result, error = piped(data, "--model", DEMO, "--no-think", *arguments)
    assert result == [status, out] and len(error.splitlines()) == status


def test_no_colours_and_no_prompts_in_a_pipe(piped):
    status, out, error = piped("My name is Mia.\nWhat is my name?\n", "--stats")  # and no --model
    assert status == 0 and "\x1b" not in out + error and not re.search(r"(?m)^(>|result>|\.\.\.)", out + error)
    assert out.startswith("<think>\n") and out.endswith("Your name is Mia.\n")
    first, *others = error.splitlines()
    assert "bundled model" in first and len(others) == 2 and all("peak memory" in line for line in others)


@pytest.mark.parametrize("redirection, word", [("> /dev/full", "No space"), (">&-", "stdout is closed"),
                                               ("<&-", "stdin is closed")])
def test_files_that_are_of_no_use(tmp_path, redirection, word):
    done = subprocess.run(f"{' '.join(command('--model', 'demo'))} {redirection}", shell=True, input="Hi\nHi\n",
                          cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and word in done.stderr


def start(state: Path, model: Path) -> subprocess.Popen:
    return subprocess.Popen(command("--model", model), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.PIPE, env=environment(state), preexec_fn=hear_ctrl_c)


def test_stdout_closed_by_its_reader(reciters, tmp_path):
    with start(tmp_path, reciters / "endless") as chat:
        chat.stdin.write("Hello\nHello\n")
        chat.stdin.close()
        assert chat.stdout.read(13) == "Once upon a a"
        chat.stdout.close()  # as `| head -1` does
        assert chat.wait(60) == 1
        [error] = chat.stderr
        assert "could not be written to stdout: Broken pipe" in error


def test_ctrl_c_with_a_pipe(reciters, tmp_path):
    with start(tmp_path, reciters / "endless") as chat:
        chat.stdin.write("Tell me a story.\n/set max_tokens 3\nAnd then?\n")
        chat.stdin.close()
        assert chat.stdout.read(30).startswith("Once upon a a a")
        chat.send_signal(signal.SIGINT)
        assert chat.stdout.read().splitlines()[-1] == "Once upon a"
        assert chat.wait(60) == 0


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


def type_in(monkeypatch, data: bytes) -> None:
    """Lets the program find these bytes on its stdin, as from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def assert_valid(messages: list[dict]) -> None:
    for i, message in enumerate(messages):
        qwen3_files.check_message(message, f"message {i}")


@pytest.fixture
def playground(tmp_path, monkeypatch):
    """An empty home and working directory, with files of others in it -> their contents."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("folder").mkdir()
    Path("theirs.txt").write_text("not ours")
    Path("unloadable.json").write_text('[{"role": "user"}]')
    Path("link").symlink_to("theirs.txt")
    Path("dangling").symlink_to("nowhere")
    return {name: Path(name).read_text() for name in ("theirs.txt", "unloadable.json")}


def assert_untouched(playground: dict[str, str]) -> None:
    assert {name: Path(name).read_text() for name in playground} == playground
    assert os.readlink("link") == "theirs.txt" and not Path("nowhere").exists() and Path("folder").is_dir()
    assert not list(Path().glob(".*.tmp"))


# ---- lines and commands ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("data, messages", [
    (b"one\r\ntwo", ["one", "two"]),
    (b'"""\n  one\n\ntwo "three"\n"""\nfour', ['  one\n\ntwo "three"', "four"]),
    (b'  """one\ntwo"""  \n"""three"""\n""""""', ["one\ntwo", "three", ""]),
    (b"one \\\n\\\ntwo\nthree\\", ["one \n\ntwo", "three\n"[:-1]]),
    (b'"""/clear"""\n"""\n//x"""\n/clear', ["//clear", "///x", "/clear"]),  # a slash more is a message, not a command
    (b'"""one\ntwo', ["one\ntwo"])])
def test_read_message(monkeypatch, data, messages):
    type_in(monkeypatch, data)
    assert [qwen3_chat.read_message("> ") for _ in messages] == messages
    with pytest.raises(EOFError):
        qwen3_chat.read_message("> ")


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]))
                .filter(lambda line: not line.rstrip().endswith('"""')), min_size=1))
def test_read_message_gives_what_is_between_the_quotes(lines):
    text = "\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        type_in(patch, f'"""\n{text}\n"""\nrest'.encode())
        assert qwen3_chat.read_message("> ") == "/" * text.strip("\n").startswith("/") + text.strip("\n")
        assert qwen3_chat.read_message("> ") == "rest"


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
    assert re.fullmatch(r"prompt: \d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s \| answer: 7 tokens, [\d.]+ "
                        r"tokens/s \| peak memory: [\d.]+ GB \| context: \d+ of 4096 tokens", handled(chat, "/stats"))
    for line, shown in (("/think", True), ("/set hide_thinking on", False), ("/set hide_thinking default", True),
                        ("/no_think", False)):
        handled(chat, line)
        assert ("<think>" in handled(chat, PERU)) == shown
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
            "hide_thinking on": "on", "seed  1 ": "1", f"max_tokens {10**400}": str(10**400),
            "max_tokens 3": "3"}.items():
        assert handled(chat, f"/set {setting}") == f"{setting.split()[0]} = {shown}"
    handled(chat, "/set temperature 3")
    answers = [handled(chat, line) for line in (PERU, "/regenerate")]
    assert answers[0] != answers[1] and all("(cut off after 3 tokens)" in answer for answer in answers)
    chat.n_answers = 0
    assert handled(chat, "/regenerate") == answers[0]  # the seed repeats it


@pytest.mark.parametrize("setting", [
    "temperature hot", "temperature", "temperature nan", "temperature 1e999", f"temperature {10**400}", "top_k -1",
    "top_k ½", "top_p 0", "top_p 1.5", "top_p inf", "min_p -0.1", "seed -1", "seed 1.5", "seed nan", "seed +-5",
    f"seed {'9' * 5000}", "max_tokens 0", "max_tokens 1e3", "max_new_tokens 0", "think_budget -1", "hide_thinking 1",
    "stop x", "nothing 1"])
def test_set_refuses(demo, setting):
    chat = new_chat(demo)
    assert setting.split()[0] in refused(chat, f"/set {setting}") and chat.options == OPTIONS


@pytest.mark.parametrize("line, status", [
    ("/hepl", 1), ("/set top_p 2", 1), ("/load none.json", 1), ("/load -", 1), ("/load unloadable.json", 1),
    ("/save", 1), ("/save -", 1), ("/save .", 1), ("/save \0", 1), ("/save \udcff", 1), ("/regenerate", 1),
    ("/stats", 1), ("/system caf\udcff", 1), ("a " * 5000, 1), ("/help", 0), ("/set", 0), ("/clear", 0),
    ("/system", 0), ("//", 0), ("", 0)])
def test_a_refused_line_is_the_status(tiny, playground, monkeypatch, capsys, line, status):
    """It is refused in one line, the conversation is as before, and the next line is handled."""
    type_in(monkeypatch, f"/set max_tokens 1\n{line}\n/think\n".encode(errors="surrogateescape"))
    chat = new_chat(tiny, [{"role": "system", "content": "Hi"}] if line != "/save ." else TALK)
    before = list(chat.messages)
    assert qwen3_chat.run_chat(chat) == status
    error = capsys.readouterr().err
    assert error.startswith("max_tokens = 1\n") and error.endswith("(thinks before it answers)\n")
    assert not status or len(error.splitlines()) == 3 and chat.messages == before
    assert_untouched(playground)


@pytest.mark.parametrize("line", ["A question", "/regenerate"])
def test_a_refusal_in_the_middle_of_an_answer(reciters, line):
    assert "the logits are not finite" in refused(new_chat(qwen3.load_model(reciters / "broken"), TALK), line)


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
    assert pipe.getvalue() == plain
    shown = re.sub(r"\x1b\[2m([^\x1b]*)\x1b\[0m", r"\1", terminal.getvalue())
    assert shown == re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", plain)


def test_escape_sequences_of_a_model(open_chat, reciters):
    assert ask(open_chat(model=reciters / "nasty"), "Hello") == "Hi\ufffd]0;title\ufffd"


# ---- the KV cache over turns ----------------------------------------------------------------------------------------

def counting(model: qwen3.Model) -> tuple[qwen3.Model, list[int]]:
    """The model, and how many tokens each of its forward passes computed."""
    passes: list[int] = []

    def forward(model, token_ids, cache, all_logits=False):
        passes.append(len(token_ids))
        return qwen3.forward(model, token_ids, cache, all_logits)

    return dataclasses.replace(model, engine=dataclasses.replace(model.engine, forward=forward)), passes


def assert_as_with_a_fresh_cache(chat: qwen3_chat.Chat) -> None:
    """The last answer is what the model says without any cache: each token is the likeliest, up to rounding."""
    prompt, answer = chat.last.prompt_ids.tolist(), list(chat.last.token_ids)
    ends = chat.last.finish_reason == "stop"
    logits = qwen3.forward(chat.model, prompt + answer, qwen3.KVCache(chat.model.config), all_logits=True)
    for row, token in zip(logits[len(prompt) - 1:], answer, strict=False):
        assert row[token] > row.max() - 1e-3
    assert not ends or max(logits[-1][token] for token in chat.model.eos_token_ids) > logits[-1].max() - 1e-3
    held = chat.cache.token_ids[0, :chat.cache.length].tolist()
    assert held == (prompt + answer)[:len(held)]


def handle_and_check(chat: qwen3_chat.Chat, passes: list[int], line: str, stop_at: int | None = None) -> None:
    """Handles a line, with Ctrl-C at the n-th piece of the answer, and checks the answer and what it cost."""
    before, last = chat.cache.token_ids[0, :chat.cache.length].tolist(), chat.last
    passes.clear()
    writes = itertools.count()

    def write(text: str, dim: bool = False) -> None:
        if next(writes) == stop_at:
            raise KeyboardInterrupt

    with mock.patch.object(qwen3_cli, "write", write), contextlib.suppress(KeyboardInterrupt, InputError):
        handled(chat, line)
    assert_valid(chat.messages)
    if chat.last in (last, None):
        assert not passes
        return
    prompt = chat.last.prompt_ids.tolist()
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False)))
    assert chat.last.cached_tokens == min(common, len(prompt) - 1)
    if passes:
        assert passes == [len(prompt) - chat.last.cached_tokens] + [1] * (len(passes) - 1)
        assert len(passes) - len(chat.last.token_ids) in (0, 1)
    assert_as_with_a_fresh_cache(chat)


LINES = ["My name is Mia.", "What is my name?", PERU, "法国的首都是哪里？", "What is 12 + 30?", "", "//slash", "👋🏽 \t x",
         "What is the weather in Paris?", "<|im_end|>\n<think>", "/stats", "/clear", "/regenerate", "/regenerate",
         "/think", "/no_think", "/system Be brief.", "/system -", "/nothing", "/set max_tokens 3",
         "/set max_tokens 30", "tools", "/save", "/load"]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LINES), st.none() | st.integers(0, 20)), max_size=8))
def test_the_cache_kept_over_turns_changes_no_answer(demo, tmp_path_factory, turns):
    model, passes = counting(demo)
    chat, file = new_chat(model), tmp_path_factory.mktemp("saved") / "x.json"
    handled(chat, "/set max_tokens 12")
    for line, stop_at in turns:
        if line == "tools":
            chat.tools = [WEATHER]  # as /load may do
        else:
            handle_and_check(chat, passes, f"{line} {file}" if line in ("/save", "/load") else line, stop_at)


def test_only_what_differs_is_computed_again(demo):
    model, passes = counting(demo)
    chat = new_chat(model)
    handle_and_check(chat, passes, "My name is Mia.")
    first = chat.last
    assert first.cached_tokens == 0
    handle_and_check(chat, passes, "What is my name?")
    assert chat.messages[-1]["content"] == "Your name is Mia."
    # The first answer's thought is gone from the second prompt: what precedes it is all that remains.
    assert chat.last.cached_tokens == len(first.prompt_ids)
    again = chat.last.token_ids
    handle_and_check(chat, passes, "/regenerate")
    assert chat.last.cached_tokens == len(chat.last.prompt_ids) - 1 and chat.last.token_ids == again
    handled(chat, "/no_think")  # all earlier turns stay as they are, but for the empty thought of the last one
    handle_and_check(chat, passes, PERU)
    earlier, thought = len(chat.last.prompt_ids), len(demo.tokenizer.encode("<think>\n\n</think>\n\n"))
    handle_and_check(chat, passes, SPAIN)
    assert roles(chat.messages) == "uauauaua" and chat.last.cached_tokens >= earlier - thought


def test_a_thought_cut_short_is_cached_as_it_was_said(demo):
    """The tokens that a budget puts into the answer were never likeliest, but are in the cache like all others."""
    chat = new_chat(demo)
    handled(chat, "/set think_budget 3")
    for line in ("What is 12 + 30?", "/regenerate", "What is 7 + 5?", "/regenerate"):
        handled(chat, line)
        assert list(qwen3.generate(demo, chat.last.prompt_ids, think_budget=3)) == chat.last.token_ids


def test_tool_calls_and_results(demo):
    model, passes = counting(demo)
    chat = new_chat(model, tools=[WEATHER])
    handle_and_check(chat, passes, "What is the weather in Paris?")
    assert chat.messages[-1]["tool_calls"] == [CALL] and chat.missing_results() == 1
    asked = chat.last
    handle_and_check(chat, passes, RESULT)
    assert "7 degrees" in chat.messages[-1]["content"] and chat.missing_results() == 0
    assert chat.last.cached_tokens >= len(asked.prompt_ids) + len(asked.token_ids) - 1  # thoughts stay until then
    handle_and_check(chat, passes, "/regenerate")
    assert roles(chat.messages) == "uata"


def test_each_of_several_calls_gets_its_result(demo):
    chat = new_chat(demo, [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL] * 3}], tools=[WEATHER])
    for missing in (3, 2, 1):
        assert chat.missing_results() == missing and chat.last is None
        handled(chat, RESULT)
    assert roles(chat.messages) == "uattta" and chat.missing_results() == 0


# ---- Ctrl-C anywhere ------------------------------------------------------------------------------------------------

def test_ctrl_c_before_the_first_token(demo):
    """The question stays, the cache is as if nothing had happened, and /regenerate has not lost the old answer."""
    model, passes = counting(demo)
    chat = new_chat(model)
    with mock.patch.object(qwen3_chat, "print_answer", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        chat.handle(PERU)
    assert chat.messages == [{"role": "user", "content": PERU}]
    handle_and_check(chat, passes, "/regenerate")
    before = list(chat.messages)
    assert before[1]["content"] == LIMA
    broken = dataclasses.replace(model.engine, forward=mock.Mock(side_effect=KeyboardInterrupt))
    chat.model = dataclasses.replace(model, engine=broken)
    with pytest.raises(KeyboardInterrupt):
        handled(chat, "/regenerate")
    assert chat.messages == before


def interrupted_at(step: int, call, *arguments) -> None:
    """Calls call(*arguments), with Ctrl-C before the n-th line of our own code."""
    left = step

    def trace(frame, event, _):
        nonlocal left
        if Path(frame.f_code.co_filename).parent != ROOT:
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call(*arguments)
    finally:
        sys.settrace(old)


@pytest.mark.parametrize("seed", range(40))
def test_ctrl_c_at_any_line_of_the_program(tiny, seed):
    """Wherever Ctrl-C comes: the messages stay valid, and the cache gives the answers that a fresh one gives."""
    rng = random.Random(seed)
    model, passes = counting(tiny)
    chat = new_chat(model)
    handled(chat, "/set max_tokens 5")
    handle_and_check(chat, passes, "My name is Mia.")
    for line in ("What is my name?", "/regenerate", PERU * rng.randint(1, 12)):
        kept = list(chat.messages)
        interrupted_at(int(2 ** rng.uniform(0, 13)), handled, chat, line)
        assert_valid(chat.messages)
        assert chat.messages[:len(kept) - 1] == kept[:-1] and "aa" not in roles(chat.messages)
    handle_and_check(chat, passes, "What is my name?")
    assert len(chat.last.token_ids) == 5 and chat.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_ctrl_c_while_the_cache_grows(tiny, call):
    """k, v, and when there is more to hold, again k and v are copied into larger arrays: four moments for Ctrl-C."""
    chat, resized, calls = new_chat(tiny), qwen3.KVCache._resized, itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == call:
            raise KeyboardInterrupt
        return resized(*arguments)

    handled(chat, "/set max_tokens 5")
    with mock.patch.object(qwen3.KVCache, "_resized", interrupted):
        for line in ("My name is Mia.", "Hi", PERU * 20):
            with contextlib.suppress(KeyboardInterrupt):
                handled(chat, line)
        assert next(calls) > call
    for line in ("/regenerate", PERU * 10, "/regenerate"):
        handled(chat, line)
        assert_as_with_a_fresh_cache(chat)


# ---- random lines ---------------------------------------------------------------------------------------------------

SPOKEN = ["<think>", "\n", "a thought", "</think>", "\n\n", "text", " more", "\x1b[31m", "\ufffd", "界", "<tool_call>",
          '<tool_call>\n{"name": "f", "arguments": {"x": [1, 2.5, null, "\\u00e9"]}}\n</tool_call>', '{"name": "f"',
          '<tool_call>{"name": "f", "arguments": null}</tool_call>', '{"name": 1, "arguments": {}}', "</tool_call>",
          '<tool_call>{"name": "f", "arguments": [3]}</tool_call>', '{"name": "f", "arguments": "{}"}', "<|im_end|>"]
NAMES = ["own.json", "x", "two words", "'quoted name.json'", '"a', "it's", "", "a b", "é界", ".", "..", "/", "~", "--",
         "theirs.txt", "link", "*", "dangling", "unloadable.json", "theirs.txt/x", "none/x", "none/..", "/dev/null",
         "$HOME", "/dev/full", "folder", "\0", "x\0y", "a\\ b", "~nosuchuser/x", "n" * 255, "n" * 256, "\x1b[31m",
         "\udcff", "x\n", "-", "界" * 84]
VALUES = ["0", "1", "-1", "0.5", "1.5", "2", "1e-4", "1e4", "nan", "inf", "-1e999", "1e-999", "1e", "", "٣", "٣.٥", "½",
          "1_000", "0x10", "1,5", "1 2", " 3 ", "+4", "+-5", "on", "off", "ON", "none", "''", "default", "10" * 200,
          str(10**400), "9" * 5000, "\ud800", "\x00", "1\n2"]
WORDS = ["Hi", PERU, "法国的首都是哪里？", "👋🏽", "\x00", "\x1b[2J", "\x7f", "\x9b", "\u202e", "\u2028", "\ud800",
         "\udcff", "'", '"', '"""', "\\", "//", "/", "<think>", "</think>", "<tool_call>", "<|im_start|>", "<|im_end|>",
         "{{", "{% raw %}", "a" * 3000, "\t", "\r", "\ufeff", "e\u0301", "-", "...", "%s", "{}", "\n"]


def random_line(rng: random.Random, commands: list[str]) -> str:
    """A line as a person, a script, or a cat on the keyboard might type it. It saves nothing outside the folder."""
    words = "".join(rng.choice(WORDS) + rng.choice(["", " ", "  "]) for _ in range(rng.choice([0, 1, 1, 2, 3, 8])))
    kind = rng.random()
    if kind < 0.25:
        key = rng.choice([*qwen3_chat.SETTINGS, "", "nothing"])
        return f"/set{rng.choice([' ', '  ', ''])}{key} {rng.choice(VALUES)}"
    if kind < 0.5:
        return f"{rng.choice(['/save', '/load'])} {rng.choice(NAMES)}"
    if kind < 0.65:
        return rng.choice(commands) + rng.choice(["", " ", "x"]) + rng.choice(["", words, "-", rng.choice(VALUES)])
    if kind < 0.7:
        return "/" * rng.choice([1, 2, 2, 3]) + words
    if kind < 0.75:
        return "".join(chr(rng.randrange(rng.choice([0x300, 0x110000]))) for _ in range(rng.randrange(30)))
    return words


def spoken_by(rng: random.Random):
    """A function like `chat`, with its checks; but the answers are made up, not computed. Some are interrupted."""
    def pieces(completion: qwen3.Completion, interrupted: bool):
        for i, piece in enumerate(rng.choices(SPOKEN, k=rng.choice([0, 1, 3, 6, 12]))):
            completion.token_ids.append(i)
            completion.times.append(time.perf_counter())
            yield piece
        if interrupted:
            raise KeyboardInterrupt

    def chat(*arguments, **options) -> qwen3.Completion:
        completion = qwen3.chat(*arguments, **options)
        completion._pieces = pieces(completion, rng.random() < 0.1)
        return completion

    return chat


@pytest.mark.parametrize("seed", range(8))
def test_random_lines(demo, playground, seed):
    """1,000 lines: what is refused is refused in one line, the conversation stays valid, no file of others changes."""
    rng, n_refused, n_answers = random.Random(seed), 0, 0
    chat = new_chat(demo, tools=[WEATHER] if seed % 2 else None)
    commands = [name for name in chat.commands if name not in ("/save", "/load")]
    with mock.patch.object(qwen3_chat, "chat", spoken_by(rng)):
        for i in range(1000):
            line, before = random_line(rng, commands), chat.last
            if i == 500:
                line = rng.choice(["/load ", "/save ", "/set seed ", "/", ""]) + "long line " * 50_000
            try:
                handled(chat, line)
            except (KeyboardInterrupt, EOFError):
                pass
            except InputError as error:
                assert len(str(error).splitlines()) == 1 and not isinstance(error, qwen3_cli.OutputError)
                n_refused += 1
            assert_valid(chat.messages)
            n_answers += chat.last not in (before, None)
            if i % 20 == 0 and chat.messages:
                handled(chat, f"/save {i}.json")
                other = new_chat(demo)
                handled(other, f"/load {i}.json")
                assert (other.messages, other.tools) == (chat.messages, chat.tools)
            if len(chat.messages) > 12 or len(str(chat.messages)) > 10_000:
                handled(chat, "/clear")
    assert 100 < n_answers and 100 < n_refused < 800  # the lines are worth their while
    assert_untouched(playground)


@pytest.mark.parametrize("seed", range(4))
def test_random_lines_through_a_pipe(demo, playground, monkeypatch, seed):
    """The same lines as a script would send them, so that also what makes messages of several lines is among them."""
    rng = random.Random(seed)
    chat = new_chat(demo)
    text = "\n".join(random_line(rng, ["/help", "/clear", "/system"]) for _ in range(300))
    type_in(monkeypatch, text.encode(errors="surrogatepass"))
    monkeypatch.setattr(qwen3_chat, "chat", spoken_by(rng))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert qwen3_chat.run_chat(chat) == 1
    assert sys.stdin.read() == ""
    assert_valid(chat.messages)
    assert_untouched(playground)


# ---- saving and loading ---------------------------------------------------------------------------------------------

def test_save_writes_only_over_its_own_files(demo, playground):
    chat, other = new_chat(demo, TALK), new_chat(demo, TALK)
    Path("loadable.json").write_text(json.dumps(TALK))
    handled(other, "/save others.json")
    handled(chat, "/save own.json")
    handled(chat, "/save ./folder/../own.json")
    os.link("theirs.txt", "hardlink")
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
    assert_untouched(playground)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
def test_a_save_that_is_killed_leaves_a_whole_file_or_none(demo, playground):
    """The process is killed at random moments, while it saves again and again."""
    rng, files = random.Random(0), []
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
        files += Path().glob(f"{i}.json")
    assert files
    for file in files:
        messages = json.loads(file.read_text())
        assert len(messages) >= 200 and {len(message["content"]) for message in messages[200:]} <= {2000}
        assert_valid(messages)
