"""qwen3_app/prompt.py: a chat on a real terminal, and with lines from a pipe; Ctrl-C and the signals that end it."""
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pexpect
import pytest
from safetensors.numpy import load_file, save_file

import qwen3
from qwen3_app import prompt
from configs import BASE, VOCABULARY
from make_random_model import make_random_model

TIMEOUT = 60
ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
READY, READ = "\x1b[?2004h", "\x1b[?2004l"  # what a prompt begins and ends with: pasting in brackets, on and off
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ONCE_MORE = "(Ctrl-C once more, Ctrl-D or /exit leaves)"
UP, LEFT, CTRL_A, CTRL_C, CTRL_D, CTRL_U = "\x1b[A", "\x1b[D", "\x01", "\x03", "\x04", "\x15"
ALT_ENTER = "\x1b\r"
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
def endless(tmp_path_factory):
    """The folder of a model whose answers never end: aaaaaaaa ..."""
    folder = make_random_model(TINY, tmp_path_factory.mktemp("endless"), "float32")
    weights = {name: np.full_like(tensor, tensor.ndim == 1 or "embed" in name)
               for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"][qwen3.load_model(folder).tokenizer.encode("a")] = 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """The folder of a model that takes its time to read."""
    changes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 8}
    return make_random_model(TINY | changes, tmp_path_factory.mktemp("slow"), "float32")


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

    def start(*arguments, model: Path = DEMO, shell: str = "", size: tuple = (60, 300), **env: str) -> pexpect.spawn:
        chat = pexpect.spawn("/bin/sh", ["-c", program("--model", model, *arguments, shell=shell)], timeout=TIMEOUT,
                             encoding="utf-8", codec_errors="replace", dimensions=size,
                             **surroundings(tmp_path / "state", env))
        chat.delaybeforesend = None  # no need: the terminal is set up before the prompt appears
        started.append(chat)
        chat.expect(r"/help lists the commands;\s+Ctrl-C stops an answer;\s+Ctrl-D\s+leaves")
        chat.banner = plain(chat.before)
        chat.expect_exact("> ")
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


def plain(text: str) -> str:
    """What a terminal has shown, without colours."""
    return ESCAPES.sub("", text).replace("\r", "").removesuffix("\n")


def shown_by(chat: pexpect.spawn, keys: str, prompt: str = "> ") -> str:
    """Types keys that end a line -> what the terminal gets until the next prompt."""
    chat.send(keys)
    chat.expect_exact(READ)
    chat.expect_exact(READY)
    shown = chat.before
    chat.expect_exact(prompt)
    return shown


def ask(chat: pexpect.spawn, line: str, prompt: str = "> ") -> str:
    """Types a line -> what is shown until the next prompt, without the line itself."""
    return plain(shown_by(chat, line + "\r", prompt))


def begin(chat: pexpect.spawn, line: str, answer: str) -> None:
    """Types a message and waits until its answer has begun like this."""
    chat.send(line + "\r")
    chat.expect_exact(READ)
    chat.expect_exact(answer)


def until_prompt(chat: pexpect.spawn) -> str:
    """What is shown until the next prompt."""
    chat.expect_exact(READY)
    shown = plain(chat.before)
    chat.expect_exact("> ")
    return shown


def status_at_end(chat: pexpect.spawn, key: str) -> int | None:
    """Presses a key and waits until the program has ended -> its exit status, None for a signal."""
    chat.send(key)
    chat.expect(pexpect.EOF)
    chat.wait()
    return chat.exitstatus


def saved(chat: pexpect.spawn, file: Path):
    """What /save writes."""
    assert re.fullmatch(r"\(saved \d+ messages?\)", ask(chat, f"/save {file}"))
    return json.loads(file.read_text())


def roles(messages: list[dict]) -> str:
    """The initials of who has said something: s, u, a, t."""
    return "".join(message["role"][0] for message in messages)


# ---- on a terminal --------------------------------------------------------------------------------------------------

def test_a_conversation(open_chat, tmp_path):
    chat, file = open_chat("--no-think"), tmp_path / "a conversation.json"
    assert chat.banner == "qwen3 · demo · 6.95 M parameters · context 4,096 · NumPy float32"
    assert ask(chat, "My name is Mia.") == "Nice to meet you, Mia!" and ask(chat, PERU) == LIMA
    assert ask(chat, "What is my name?") == "Your name is Mia."
    for _ in range(2):  # its own file, so it may go on in it
        assert ask(chat, f"/save '{file}'") == "(saved 6 messages)"
    assert "name of one file" in ask(chat, f"/save {file}")
    assert "there is no command /hepl; did you mean /help?" in ask(chat, "/hepl me")
    assert ask(chat, "/clear").startswith("(a new conversation") and "Mia" not in ask(chat, "What is my name?")
    assert ask(chat, f'/load "{file}"') == "(loaded 6 messages)"
    assert ask(chat, "/stats") == "there is no answer yet" and ask(chat, "") == ask(chat, "   ") == ""
    assert ask(chat, "What is my name?") == "Your name is Mia."
    assert ask(chat, f"/save '{file}'") == "(saved 8 messages)"
    assert status_at_end(chat, CTRL_D) == 0  # a person has seen what was refused
    assert chat.before.endswith("\r\n")  # the shell's prompt starts on a line of its own


def test_tools_are_called_and_their_results_asked_for(open_chat, tmp_path):
    tools, calls, more = tmp_path / "tools.json", tmp_path / "calls.json", "result> "
    tools.write_text(json.dumps([WEATHER]))
    calls.write_text(json.dumps([TALK[0], {"role": "assistant", "tool_calls": [CALL] * 3}]))
    chat = open_chat("--hide-thinking", "--tools", tools)
    assert json.loads(ask(chat, "What is the weather in Paris?", more).rpartition("…")[2]) == CALL
    assert "temperature is 7" in ask(chat, RESULT) and ask(chat, PERU).endswith(LIMA)
    assert ask(chat, f"/load {calls}", more) == "(loaded 2 messages)"
    assert ask(chat, RESULT, more) == ask(chat, RESULT, more) == "" and ask(chat, RESULT)
    value = saved(chat, tmp_path / "x.json")
    assert value["tools"] == [WEATHER] and roles(value["messages"]) == "uattta"


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["", "NO_COLOR"])
def test_prompt_thought_and_notes_differ_from_answers(open_chat, env):
    chat = open_chat(**env)
    shown, noted = shown_by(chat, "What is 12 + 30?\r"), shown_by(chat, "/system\r")
    if not env:
        assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", shown, flags=re.DOTALL).endswith("\r\n12 + 30 = 42.\r\n")
        assert "\x1b[36m(no system prompt)\x1b[0m" in noted and "\x1b[0;32;1m> " in shown_by(chat, "/system\r") + "> "\
            or "32;1m" in chat.before
    else:
        assert not re.search(r"\x1b\[[\d;]*[1-9]m", shown + noted)
    assert re.fullmatch(r"<think>\n[^\x1b]+\n</think>\n\n12 \+ 30 = 42\.", plain(shown))


def test_a_terminal_that_can_do_nothing_but_lines(open_chat):
    chat = open_chat("--no-think", TERM="dumb")
    for line, answer in {PERU: LIMA, '"""What is the\r\ncapital of Spain?"""': MADRID}.items():
        chat.send(line.replace("\n", "") + "\r")
        chat.expect_exact(answer + "\r\n> ")
        assert "\x1b" not in chat.before
    chat.send(CTRL_C)
    chat.expect_exact(ONCE_MORE + "\r\n> ")
    assert status_at_end(chat, CTRL_C) == 0 and "\x1b" not in chat.before


def test_an_answer_into_a_file_and_no_place_for_a_history(open_chat, tmp_path):
    chat = open_chat("--no-think", shell=f"> {tmp_path / 'answers'}", XDG_STATE_HOME="", HOME="/dev/null")
    assert ask(chat, PERU) == ""  # but the prompt is on the terminal
    assert status_at_end(chat, CTRL_D) == 0 and "(the conversation is lost: /dev/null/.local" in chat.before
    assert (tmp_path / "answers").read_text() == LIMA + "\n"


def test_keys_and_history(open_chat, tmp_path):
    chat = open_chat("--no-think")
    assert ask(chat, "the capital of Peu?" + LEFT * 2 + "r" + CTRL_A + "What is ") == LIMA
    assert ask(chat, SPAIN) == ask(chat, UP) == MADRID
    assert ask(chat, UP * 2 + CTRL_U + "/sta\t").startswith("prompt: ")
    chat.send("/s\t")
    chat.expect(r"/save\s+/set\s+/stats\s+/system")
    until_prompt(chat)
    (tmp_path / "one.json").write_text(json.dumps(TALK))
    assert ask(chat, CTRL_U + f"/load {tmp_path}/on\t") == "(loaded 2 messages)"
    assert ask(chat, "/set presence_pe\t0.5") == "presence_penalty = 0.5"
    assert status_at_end(chat, "/ex\t\r") == 0
    history = tmp_path / "state" / "qwen3" / "history"
    assert history.stat().st_mode & 0o777 == 0o600 and history.parent.stat().st_mode & 0o777 == 0o700
    chat = open_chat("--no-think")
    assert ask(chat, UP * 5) == MADRID


def test_several_chats_share_a_history(open_chat):
    """The last one to end doesn't win."""
    chats = [open_chat("--no-think") for _ in range(2)]
    assert ask(chats[0], PERU) == LIMA and ask(chats[1], SPAIN) == MADRID
    assert [status_at_end(chat, "/exit\r") for chat in chats] == [0, 0]
    assert ask(open_chat("--no-think"), UP * 3) == MADRID and ask(open_chat("--no-think"), UP * 5) == LIMA


def test_messages_of_several_lines(open_chat, tmp_path):
    """Between quotes; typed with Alt-Enter; pasted, even if they look like a command or many lines."""
    chat = open_chat("--no-think", "--max-tokens", 1)
    assert ask(chat, '"""one', "... ") == "" and ask(chat, 'two"""') and ask(chat, '"""three', "... ") == ""
    chat.send(CTRL_D)  # ends the message, not the chat
    until_prompt(chat)
    ask(chat, "dropped \\", "... ")
    chat.send(CTRL_C)
    assert ONCE_MORE not in until_prompt(chat) + ask(chat, "four" + ALT_ENTER + "five")
    for pasted in ("six\r\n\r\nseven\r\n", "/eight\rnine", "ten\n"):
        ask(chat, f"\x1b[200~{pasted}\x1b[201~")
    chat.send("eleven\rtwelve\r")  # typed faster than it is read
    until_prompt(chat), until_prompt(chat)
    assert [message["content"] for message in saved(chat, tmp_path / "x.json")[::2]] == [
        "one\ntwo", "three", "four\nfive", "six\n\nseven", "/eight\nnine", "ten", "eleven", "twelve"]


def test_ctrl_c_stops_an_answer_however_often_it_is_tapped(open_chat, endless, tmp_path):
    chat, shown = open_chat(model=endless), []
    for question in ("Once upon?", "Then?"):
        begin(chat, question, "aaaa")  # which appears while it is generated
        for _ in range(5):
            chat.send(CTRL_C)
            time.sleep(0.05)  # as fingers do it
        shown.append("aaaa" + until_prompt(chat))
        assert shown[-1].endswith("\n(stopped; the answer is kept as far as it came)")
        assert ask(chat, "/system") == "(no system prompt)"  # it still listens
    messages = saved(chat, tmp_path / "x.json")
    assert roles(messages) == "uaua" and messages[2]["content"] == "Then?"
    for text, message in zip(shown, messages[1::2], strict=True):
        assert set(text.partition("\n")[0] + message["content"]) == {"a"}
        assert 0 <= len(message["content"]) - text.partition("\n")[0].count("a") <= 1  # kept, but not yet shown
    assert status_at_end(chat, CTRL_D) == 0 and "kept" not in chat.before


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_in_a_row_leaves(open_chat):
    chat = open_chat()
    for text, told in (("", True), ("half a line", False), ("", True), ("and another", False), ("", True)):
        chat.send(text)
        chat.expect_exact(text)
        chat.send(CTRL_C)
        assert (ONCE_MORE in until_prompt(chat)) == told
    assert ask(chat, UP + CTRL_U + "/stats") == "there is no answer yet"  # what came between starts the count anew
    chat.send(CTRL_C)
    assert ONCE_MORE in until_prompt(chat)
    assert status_at_end(chat, CTRL_C) == 0


def test_ctrl_c_before_the_first_token_takes_the_message_back(open_chat, slow, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 3000)
    chat = open_chat("--system-file", tmp_path / "long.txt", model=slow)
    chat.send("Hi\r")
    chat.expect(r"reading the prompt … [1-9]\d* %")
    chat.send(CTRL_C)
    assert until_prompt(chat).endswith("\n(stopped before the answer began, so your message was taken back)")
    assert roles(saved(chat, tmp_path / "x.json")) == "s" and "no message to answer yet" in ask(chat, "/regenerate")
    assert status_at_end(chat, CTRL_D) == 0 and "kept" not in chat.before


LOST = """
import os, signal, time
from qwen3_app.prompt import CtrlC, signals

class Loses:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

with signals(CtrlC()):
    Loses()
    print("goes on", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not prompt.TIMER, reason="this system has no timers")
def test_a_signal_whose_exception_is_lost_ends_the_program_all_the_same():
    done = subprocess.run([sys.executable, "-c", LOST], cwd=Path(prompt.__file__).parents[1], capture_output=True,
                          text=True, timeout=30)
    assert done.stdout == "goes on\n" and "SystemExit: 143" in done.stderr and done.returncode == 143


@pytest.mark.parametrize("how", ["/exit", CTRL_D, CTRL_C, signal.SIGTERM, signal.SIGHUP, "SIGTERM in an answer",
                                 "hang up"])
def test_what_was_not_saved_is_kept(open_chat, endless, tmp_path, how):
    chat = open_chat("--system", "Be brief.", "--max-tokens", 3, model=endless)
    assert ask(chat, "Hi").startswith("aaa")
    file, status = tmp_path / "state" / "qwen3" / "last.json", 0
    if isinstance(how, signal.Signals):
        chat.kill(how)
        chat.expect(pexpect.EOF)
        chat.wait()
        status = 128 + how
    elif how == "SIGTERM in an answer":
        ask(chat, "/set max_tokens 100000")
        begin(chat, "More", "aaaa")
        chat.kill(signal.SIGTERM)
        chat.expect(pexpect.EOF)
        chat.wait()
        status = 128 + signal.SIGTERM
    elif how == "hang up":  # the terminal's window is closed
        chat.ptyproc.fileobj.close()
        assert chat.ptyproc.wait()
        status = None
    elif how == CTRL_C:
        chat.send(CTRL_C)
        until_prompt(chat)
        status_at_end(chat, CTRL_C)
    else:
        status_at_end(chat, how + "\r" if how == "/exit" else how)
    assert chat.exitstatus == status
    messages = json.loads(file.read_text())
    assert roles(messages) in ("sua", "suaua") and messages[2]["content"] == "aaa"
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert "Hi" in (file.parent / "history").read_text().splitlines()
    if how != "hang up":
        assert f"(kept in {file}: --continue goes on with it)" in plain(chat.before)
    chat = open_chat("--continue", "--max-tokens", 3, model=endless)
    assert ask(chat, "/history").startswith("system> Be brief.\n> Hi\naaa")
    assert status_at_end(chat, CTRL_D) == 0 and "kept" not in chat.before  # it is in a file


def test_nothing_is_kept_of_who_does_not_want_it(open_chat, start, tmp_path):
    chat = open_chat("--no-think", QWEN3_HISTORY="off")
    assert ask(chat, PERU) == LIMA and status_at_end(chat, CTRL_D) == 0
    assert "kept" not in chat.before and not (tmp_path / "state").exists()
    with start("--continue") as chat:
        _, error = chat.communicate("", timeout=60)
    assert chat.returncode == 1 and "there is no conversation to continue" in error


def test_something_else_in_place_of_the_history(open_chat, tmp_path):
    """A FIFO would wait for its other end."""
    (tmp_path / "state" / "qwen3").mkdir(parents=True)
    for name in ("history", "last.json"):
        os.mkfifo(tmp_path / "state" / "qwen3" / name)
    chat = open_chat("--no-think")
    assert ask(chat, PERU) == ask(chat, UP) == LIMA
    assert status_at_end(chat, CTRL_D) == 0 and "the conversation is lost" in chat.before


def test_lines_are_broken_between_words_even_if_the_window_changes(open_chat, tmp_path):
    chat = open_chat("--no-think", size=(40, 60))
    for width in (60, 45):
        if width != 60:
            chat.setwinsize(40, width)
            until_prompt(chat)  # is drawn anew
        shown = ask(chat, "Tell me a story about a fox."), ask(chat, "/help")
        story = saved(chat, tmp_path / f"{width}.json")[-1]["content"]
        lines = shown[0].splitlines()
        assert max(map(len, lines)) <= width and len(lines) > 2 and " ".join(map(str.rstrip, lines)) == story
        assert max(map(len, shown[1].splitlines())) <= width


def test_a_hidden_thought_is_announced_until_the_answer_begins(open_chat):
    shown = shown_by(open_chat("--hide-thinking"), PERU + "\r")
    assert re.search(r"thinking ….*?\r\x1b\[K" + LIMA[:10], shown) and "<think>" not in shown


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])  # as in de_DE.UTF-8, as in C.UTF-8
def test_a_typed_line_that_is_no_text_is_refused(open_chat, tmp_path, encoding):
    chat = open_chat("--no-think", PYTHONIOENCODING=encoding)
    os.write(chat.child_fd, b"caf\xff\r")
    assert "not " in until_prompt(chat) and "Traceback" not in chat.before
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
    assert re.fullmatch("(.*peak memory.*\n){2}", error)


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


# ---- lines ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, messages", [
    ("one\r\ntwo", ["one", "two"]),
    ('"""\n  one\n\ntwo "three"\n"""\nfour', ['  one\n\ntwo "three"', "four"]),
    ('  """one\ntwo"""  \n"""three"""\n""""""', ["one\ntwo", "three", ""]),
    ("one \\\n\\\ntwo\nthree\\", ["one \n\ntwo", "three"]),
    ('"""/clear"""\n"""\n//x"""\n/clear', ["//clear", "///x", "/clear"]),  # with a slash more: not a command
    ('"""one\ntwo', ["one\ntwo"])])
def test_read_message(monkeypatch, text, messages):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [prompt.read_message("> ") for _ in messages] == messages
    with pytest.raises(EOFError):
        prompt.read_message("> ")


def test_what_tab_makes_of_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one.json", "two words.json", ".hidden"):
        Path(name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "on it").touch()

    def lines(begin: str) -> list[str]:
        return [line for line, _ in prompt.completions(begin, ["/set", "/save", "/system"], ["top_k", "top_p"])]

    assert lines("/s") == ["/save", "/set", "/system"] and lines("/sa") == ["/save"] and lines("") == lines("Hi") == []
    assert lines("/set top") == ["/set top_k ", "/set top_p "] and lines("/system x") == []
    assert lines("/save ") == ["/save folder/", "/save one.json", "/save 'two words.json'"]
    assert lines("/save .h") == ["/save .hidden"] and lines("/load 'tw") == lines("/load two\\ ") == [
        "/load 'two words.json'"]
    assert lines("/load folder/o") == ["/load 'folder/on it'"] and lines("/load nowhere/x") == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lines("/load ~/o") == ["/load ~/one.json"]


def test_only_the_first_ctrl_c_of_a_row_counts_once_an_answer_runs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(prompt.time, "monotonic", lambda: now[0])
    ctrl_c = prompt.CtrlC()
    assert ctrl_c.counts() and ctrl_c.counts()  # no answer runs
    with pytest.raises(prompt.Stopped), ctrl_c.while_answering():
        assert ctrl_c.counts() and not ctrl_c.counts()
        now[0] += 10
        assert not ctrl_c.counts()  # it takes its time to stop
        raise KeyboardInterrupt
    for _ in range(9):
        now[0] += 0.4
        assert not ctrl_c.counts()
    now[0] += 0.6
    assert ctrl_c.counts() and ctrl_c.counts()
