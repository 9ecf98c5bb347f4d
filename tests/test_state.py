"""qwen3_app/state.py: the lines typed and the last conversation, kept for their user alone."""
import contextlib
import json
import os
import threading
from pathlib import Path

import pytest

from qwen3 import InputError
from qwen3_app import state

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("QWEN3_HISTORY", raising=False)
    return tmp_path / "qwen3"


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_lines_come_back_as_they_were_typed(folder):
    lines = ["plain", "two\nlines", '"quoted"', '"""', '"', "\\", "  spaces  ", "法国 👋", "/set x",
             "tab\there", "a\rb", "\u2028"]
    assert state.read_lines() == []
    for line in [*lines, "lone \ud800", "x" * 2**17]:  # no text; too much to recall
        state.add_line(line)
    assert state.read_lines() == lines
    assert mode(folder) == 0o700 and mode(folder / "history") == 0o600


def test_lines_of_a_history_written_by_readline(folder):
    folder.mkdir(mode=0o755)
    (folder / "history").write_bytes(b'What is this?\n"""\n"half\ncaf\xe9\n')
    assert state.read_lines() == ["What is this?", '"""', '"half', "caf\ufffd"]
    state.add_line("new")
    assert state.read_lines()[-1] == "new" and mode(folder) == 0o700


def test_a_long_history_loses_its_older_half(folder):
    folder.mkdir()
    (folder / "history").write_text("".join(f"{i:>99}\n" for i in range(20_000)))
    last = state.read_lines()
    assert last[-1].strip() == "19999" and [int(line) for line in last] == list(range(20_000 - len(last), 20_000))
    assert len(last) > 5000 and (folder / "history").stat().st_size <= 2**19 and mode(folder / "history") == 0o600
    assert state.read_lines() == last


def test_several_chats_append(folder):
    """Each line is whole, and none is lost."""
    lines = [[f"{name} {i} " + "x" * 500 for i in range(50)] for name in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: [state.add_line(line) for line in mine]) for mine in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(state.read_lines()) == sorted(sum(lines, []))


@pytest.mark.parametrize("obstacle", ["fifo", "folder", "no folder", "device"])
def test_an_obstacle_costs_comfort_only(folder, obstacle, monkeypatch):
    folder.mkdir()
    {"fifo": lambda: os.mkfifo(folder / "history"), "folder": (folder / "history").mkdir,
     "device": lambda: (folder / "history").symlink_to("/dev/zero"),
     "no folder": lambda: monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")}[obstacle]()
    state.add_line("text")
    assert state.read_lines() == []


def test_the_last_conversation(folder):
    with pytest.raises(InputError, match="no conversation to continue .no file .*last.json"):
        state.kept_conversation()
    for tools, value in ((None, TALK), ([], {"messages": TALK, "tools": []})):
        file = state.keep_conversation(TALK, tools)
        assert str(file) == state.kept_conversation() and json.loads(file.read_text()) == value
        assert mode(file) == 0o600 and mode(folder) == 0o700 and os.listdir(folder) == ["last.json"]


def assert_kept(can_be: bool) -> None:
    """check_kept tells what can be known before anything is written."""
    with contextlib.nullcontext() if can_be else pytest.raises(InputError, match=r"last.json: cannot be written: "):
        state.check_kept()


def test_a_conversation_that_cannot_be_kept_says_so(folder, monkeypatch):
    folder.mkdir()
    os.mkfifo(folder / "last.json")
    for home in (folder.parent, "/dev/null"):
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        with pytest.raises(InputError):
            state.keep_conversation(TALK, None)
        assert_kept(home != "/dev/null")
        with pytest.raises(InputError, match="no conversation to continue"):
            state.kept_conversation()


@pytest.mark.parametrize("name, value", [("QWEN3_HISTORY", "off"), ("QWEN3_HISTORY", "OFF")])
def test_nothing_is_kept_when_it_is_off(folder, monkeypatch, name, value):
    state.add_line("before")
    monkeypatch.setenv(name, value)
    state.add_line("after")
    assert state.read_lines() == [] and state.keep_conversation(TALK, None) is None
    assert (folder / "history").read_text() == "before\n" and os.listdir(folder) == ["history"]


def test_without_a_home(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "relative/paths/do/not/count")
    assert state.state_file("x") == Path.home() / ".local" / "state" / "qwen3" / "x"
    monkeypatch.setattr(Path, "home", lambda: exec("raise RuntimeError('no home')"))
    assert state.state_file("x") is None and state.read_lines() == [] and state.keep_conversation(TALK, None) is None
