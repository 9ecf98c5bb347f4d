"""qwen3_lib/app/prompt.py: a chat on a real terminal, and with lines from a pipe; Ctrl-C and signals."""
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import qwen3
from configs import BASE, VOCABULARY
from helpers import LIMA, MADRID, PERU, SPAIN, TALK, WEATHER, roles
from make_random_model import make_random_model
from qwen3_lib.app import prompt

termios = pytest.importorskip("termios", reason="Windows has no terminals as Unix has")
pexpect = pytest.importorskip("pexpect")
TIMEOUT = 60
ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
READY, READ = "\x1b[?2004h", "\x1b[?2004l"  # what a prompt begins and ends with: pasting in brackets, on and off
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ONCE_MORE = "(press Ctrl-C once more to leave, or Ctrl-D)"
UP, LEFT, CTRL_A, CTRL_C, CTRL_D, CTRL_U, ALT_ENTER = "\x1b[A", "\x1b[D", "\x01", "\x03", "\x04", "\x15", "\x1b\r"
CALL, RESULT = {"name": "get_weather", "arguments": {"city": "Paris"}}, '{"temperature": 7, "condition": "sunny"}'
TINY = BASE | {"vocab_size": VOCABULARY, "max_position_embeddings": 2**20, "num_hidden_layers": 1,
               "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """The folder of a model whose answers never end: aaaaaaaa ..."""
    folder = make_random_model(TINY, tmp_path_factory.mktemp("endless"), "float32")
    weights = {name: np.full_like(tensor, tensor.ndim == 1 or "embed" in name)
               for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"][qwen3.load_model(folder).tokenizer.encode("a")] = 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def program(*arguments, shell: str = "") -> str:
    """A line for a shell that runs a chat."""
    return f"exec {shlex.join([sys.executable, str(ROOT / 'qwen3.py'), '--chat', *map(str, arguments)])} {shell}"


def surroundings(state: Path, env: dict[str, str]) -> dict:
    """Options for a process of the program: the same, whoever runs the tests, and with Ctrl-C not ignored."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "xterm", "XDG_STATE_HOME": str(state),
           "OPENBLAS_NUM_THREADS": "1"} | env
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
        mode = termios.tcgetattr(chat.child_fd)
        mode[3] |= termios.NOFLSH  # or Ctrl-C discards what is printed and not read yet
        termios.tcsetattr(chat.child_fd, termios.TCSANOW, mode)
        started.append(chat)
        chat.banner = plain(until_prompt(chat, "\n" if env.get("TERM") == "dumb" else READY))
        return chat

    yield start
    for chat in started:
        chat.close(force=True)


@pytest.fixture
def start(tmp_path):
    """A function that starts a chat with pipes."""
    return lambda *arguments, shell="": subprocess.Popen(
        program(*arguments, shell=shell), shell=True, text=True, errors="surrogateescape", stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **surroundings(tmp_path / "state", {}))


def plain(text: str) -> str:
    """What a terminal has shown, without colours."""
    return ESCAPES.sub("", text).replace("\r", "").removesuffix("\n")


def until_prompt(chat: pexpect.spawn, ready: str = READY) -> str:
    """What the terminal gets until the next prompt."""
    chat.expect(re.escape(ready) + r"[^\n]*?(> |\.\.\. )")
    return chat.before


def shown_by(chat: pexpect.spawn, keys: str) -> str:
    """Types keys that end a line -> what the terminal gets until the next prompt."""
    chat.send(keys)
    chat.expect_exact(READ)
    return until_prompt(chat)


def ask(chat: pexpect.spawn, line: str) -> str:
    """Types a line -> what is shown until the next prompt, without the line itself."""
    return plain(shown_by(chat, line + "\r"))


def begin(chat: pexpect.spawn, line: str, answer: str) -> None:
    """Types a message and waits until its answer has begun like this."""
    chat.send(line + "\r")
    chat.expect_exact(READ)
    chat.expect_exact(answer)


def at_end(chat: pexpect.spawn, key: str = "") -> tuple[int | None, str]:
    """Presses a key -> (exit status, what was shown) at the end of the program."""
    chat.send(key)
    chat.expect(pexpect.EOF)
    chat.wait()
    return chat.exitstatus, plain(chat.before)


def saved(chat: pexpect.spawn, file: Path) -> list[dict]:
    """The messages that /save writes."""
    assert re.fullmatch(r"\(saved \d+ messages?\)", ask(chat, f"/save {file}"))
    return json.loads(file.read_text())


def kept(tmp_path: Path) -> list[dict]:
    """The messages that --continue goes on with."""
    return json.loads((tmp_path / "state" / "qwen3" / "last.json").read_text())


# ---- on a terminal --------------------------------------------------------------------------------------------------

def test_a_conversation(open_chat, tmp_path):
    chat, file = open_chat("--no-think"), tmp_path / "a conversation.json"
    assert chat.banner == ("qwen3 · demo · 6.95 M parameters · context 4,096 · NumPy float32\n"
                           "/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves")
    assert ask(chat, "My name is Mia.") == "Nice to meet you, Mia!" and ask(chat, PERU) == LIMA
    assert ask(chat, f"/save {file}") == "(saved 4 messages)"
    assert "there is no command /hepl; did you mean /help?" in ask(chat, "/hepl me")
    assert ask(chat, "/clear").startswith("(a new conversation") and "Mia" not in ask(chat, "What is my name?")
    assert ask(chat, f'/load "{file}"') == "(loaded 4 messages)" and ask(chat, "") == ask(chat, "   ") == ""
    assert ask(chat, "What is my name?") == "Your name is Mia." and "Mia" in kept(tmp_path)[-1]["content"]
    status, shown = at_end(chat, CTRL_D)
    assert status == 0 and shown.endswith("\n(the conversation is kept: --continue goes on with it)")
    chat = open_chat("--no-think", "--continue")
    assert chat.banner.endswith("(going on with 6 messages; the last question: What is my name?)")
    assert "kept" not in at_end(chat, CTRL_D)[1]  # nothing new
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    chat = open_chat("--hide-thinking", "--tools", tmp_path / "tools.json")
    assert json.loads(ask(chat, "What is the weather in Paris?").rpartition("…")[2]) == CALL
    assert "result> " in chat.after and "temperature is 7" in ask(chat, RESULT)
    assert saved(chat, tmp_path / "x.json")["tools"] == [WEATHER] == kept(tmp_path)["tools"]


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["", "NO_COLOR"])
def test_prompt_thought_and_notes_differ_from_answers(open_chat, env):
    chat = open_chat(**env)
    shown, noted = shown_by(chat, "What is 12 + 30?\r"), shown_by(chat, "/system\r") + shown_by(chat, "/system\r")
    if not env:
        assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", shown, flags=re.DOTALL).strip() == "12 + 30 = 42."
        assert "\x1b[36m(no system prompt)\x1b[0m" in noted and "32;1m> " in chat.after
    else:
        assert not re.search(r"\x1b\[[\d;]*[1-9]m", shown + noted)
    assert re.fullmatch(r"<think>\n[^\x1b]+\n</think>\n\n12 \+ 30 = 42\.", plain(shown))
    ask(chat, "/set hide_thinking on")
    shown = shown_by(chat, PERU + "\r")
    assert re.search(r"thinking ….*?\r\x1b\[K" + LIMA[:10], shown) and "<think>" not in shown


def test_a_terminal_that_can_do_nothing_but_lines(open_chat):
    chat = open_chat("--no-think", TERM="dumb")
    for line, answer in {PERU: LIMA, '"""What is the\r\ncapital of Spain?"""': MADRID}.items():
        chat.send(line.replace("\n", "") + "\r")
        chat.expect_exact(answer + "\r\n> ")
        assert "\x1b" not in chat.before
    chat.send(CTRL_C)
    chat.expect_exact(ONCE_MORE + "\r\n> ")
    status, shown = at_end(chat, CTRL_C)
    assert status == 0 and "\x1b" not in shown


def test_an_answer_into_a_file_and_no_place_for_a_history(open_chat, tmp_path):
    chat = open_chat("--no-think", shell=f"> {tmp_path / 'answers'}", XDG_STATE_HOME="", HOME="/dev/null")
    note = "(/dev/null/.local/state/qwen3/last.json: cannot be written: Not a directory; so only /save keeps this"
    assert ask(chat, PERU).startswith(note) and ask(chat, SPAIN) == ""  # the prompt is on the terminal
    assert at_end(chat, CTRL_D)[0] == 0 and (tmp_path / "answers").read_text() == f"{LIMA}\n{MADRID}\n"


def test_keys_history_and_tab(open_chat, tmp_path):
    chat, other = open_chat("--no-think"), open_chat("--no-think")
    assert ask(chat, "the capital of Peu?" + LEFT * 2 + "r" + CTRL_A + "What is ") == LIMA
    assert ask(chat, SPAIN) == ask(chat, UP) == MADRID and ask(other, PERU) == LIMA
    assert ask(chat, UP * 2 + CTRL_U + "/sta\t").startswith("prompt: ")
    chat.send("/s\t")
    chat.expect(r"/save\s+/set\s+/show\s+/stats\s+/system")
    until_prompt(chat)
    (tmp_path / "one two.json").write_text(json.dumps(TALK))
    assert ask(chat, CTRL_U + f"/load {tmp_path}/on\t") == "(loaded 2 messages)"
    assert ask(chat, "/set presence_pe\t 0.5") == "presence_penalty = 0.5"
    assert [at_end(chat, "/ex\t\r")[0], at_end(other, CTRL_D)[0]] == [0, 0]
    assert ask(open_chat("--no-think"), UP * 6) == MADRID and ask(open_chat("--no-think"), UP * 6) == LIMA
    assert (tmp_path / "state" / "qwen3" / "history").stat().st_mode & 0o777 == 0o600


def test_messages_of_several_lines(open_chat, tmp_path):
    """Between quotes; typed with Alt-Enter; pasted, even if they look like a command or many lines."""
    chat = open_chat("--no-think", "--max-tokens", 1)
    assert ask(chat, '"""one') == "" and ask(chat, 'two"""') and ask(chat, '"""three') == ""
    chat.send(CTRL_D)  # ends the message, not the chat
    until_prompt(chat)
    assert ask(chat, "dropped \\") == ""
    chat.send(CTRL_C)
    assert ONCE_MORE in until_prompt(chat)
    ask(chat, "four" + ALT_ENTER + "five")
    for pasted in ("six\r\n\r\nseven\r\n", "/eight\rnine", "ten\n"):
        ask(chat, f"\x1b[200~{pasted}\x1b[201~")
    chat.send("eleven\rtwelve\r")  # typed faster than it is read
    until_prompt(chat), until_prompt(chat)
    assert [message["content"] for message in saved(chat, tmp_path / "x.json")[::2]] == [
        "one\ntwo", "three", "four\nfive", "six\n\nseven", "/eight\nnine", "ten", "eleven", "twelve"]


def test_ctrl_c_stops_an_answer_and_twice_leaves(open_chat, endless, tmp_path):
    chat = open_chat(model=endless)
    for question in ("Once upon?", "Then?"):
        begin(chat, question, "aaaa")
        chat.send(CTRL_C)
        text, note = plain("aaaa" + until_prompt(chat)).split("\n")
        assert note == "(stopped; the conversation keeps what you see)"
        messages = kept(tmp_path)
        assert 0 <= len(messages[-1]["content"]) - text.count("a") <= 1  # kept, but not yet shown
    assert roles(messages) == "uaua" and messages[2]["content"] == "Then?"
    chat.send("half a line" + CTRL_C)
    assert ask(chat, UP + CTRL_U + "/stats").startswith("prompt: ")  # it still listens
    chat.send(CTRL_C)
    chat.expect_exact(ONCE_MORE)
    assert at_end(chat, CTRL_C)[0] == 0


def test_ctrl_c_before_the_first_token_takes_the_message_back(open_chat, tmp_path):
    changes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 8}
    slow = make_random_model(TINY | changes, tmp_path / "slow", "float32")
    (tmp_path / "long.txt").write_text("word " * 3000)
    chat = open_chat("--system-file", tmp_path / "long.txt", model=slow)
    chat.send("Hi\r")
    chat.expect(r"reading the prompt … [1-9]\d* %")
    chat.send(CTRL_C)
    assert "(stopped before the answer began: your message was taken back)" in until_prompt(chat)
    assert roles(saved(chat, tmp_path / "x.json")) == "s" and not (tmp_path / "state/qwen3/last.json").exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, "SIGTERM in an answer", "hang up"])
def test_a_conversation_is_kept_however_the_program_ends(open_chat, endless, tmp_path, how):
    chat = open_chat("--system", "Be brief.", "--max-tokens", 3, model=endless)
    assert ask(chat, "Hi").startswith("aaa")
    if how == "hang up":  # the terminal's window is closed
        chat.ptyproc.fileobj.close()
        assert chat.ptyproc.wait()
    elif how == "SIGTERM in an answer":
        ask(chat, "/set max_tokens 100000")
        begin(chat, "More", "aaaa")
        chat.kill(signal.SIGTERM)
        assert at_end(chat)[0] == 128 + signal.SIGTERM
        assert kept(tmp_path)[3]["content"] == "More" and "aaa" in kept(tmp_path)[4]["content"]
    else:
        chat.kill(how)
        assert at_end(chat)[0] == (None if how == signal.SIGKILL else 128 + how)
    assert roles(kept(tmp_path))[:3] == "sua" and kept(tmp_path)[2]["content"] == "aaa"


# ---- with pipes -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("data, arguments, status, out", [
    (f"\ufeff{PERU}\r\n\r\n  \n{SPAIN}", [], 0, f"{LIMA}\n{MADRID}\n"), (f"/exit\n{SPAIN}\n", [PERU], 0, f"{LIMA}\n"),
    (SPAIN, ["word " * 5000], 1, f"{MADRID}\n"), (f"{PERU}\n\udcff caf\udce9\n{SPAIN}", [], 1, f"{LIMA}\n{MADRID}\n"),
], ids=["lines", "prompt", "refused prompt", "no text"])
def test_lines_from_a_pipe(start, tmp_path, data, arguments, status, out):
    with start("--model", DEMO, "--no-think", *arguments) as chat:
        shown, error = chat.communicate(data, timeout=60)
    assert (chat.returncode, shown) == (status, out) and len(error.splitlines()) == status
    assert kept(tmp_path)[-1]["content"] == out.splitlines()[-1]
    assert os.listdir(tmp_path / "state/qwen3") == ["last.json"]  # no history of what nobody has typed


@pytest.mark.parametrize("act", ["closes stdout", "presses Ctrl-C"])
def test_while_an_answer_goes_through_a_pipe(start, endless, act):
    with start("--model", endless) as chat:
        chat.stdin.write("Once upon a time\n/set max_tokens 3\nAnd then?\n")
        chat.stdin.close()
        assert chat.stdout.read(9) == "aaaaaaaaa"
        if act == "closes stdout":  # as `| head -c 9` does
            chat.stdout.close()
            assert chat.stderr.read() == ""
        else:
            chat.send_signal(signal.SIGINT)
            assert chat.stdout.read().splitlines()[-1] == "aaa"
        assert chat.wait(60) == (141 if act == "closes stdout" else 0)


@pytest.mark.parametrize("text, messages", [
    ("\ufeffone\r\ntwo", ["one", "two"]), ('"""\n  one\n\ntwo "three"\n"""\nfour', ['  one\n\ntwo "three"', "four"]),
    ('  """one\ntwo"""  \n"""three"""\n""""""', ["one\ntwo", "three", ""]),
    ("one \\\n\\\ntwo\nthree\\", ["one \n\ntwo", "three"]),
    ('"""/clear"""\n"""\n//x"""\n/clear', ["//clear", "///x", "/clear"]),  # with a slash more: not a command
    ('"""one\ntwo', ["one\ntwo"])])
def test_read_message(monkeypatch, text, messages):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [prompt.read_message("> ") for _ in messages] == messages
    with pytest.raises(EOFError):
        prompt.read_message("> ")
