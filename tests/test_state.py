"""qwen3_lib/app/files.py: the lines typed and the last conversation, kept for their user alone."""
import json
import os
from pathlib import Path

import pytest

from helpers import TALK
from qwen3 import InputError
from qwen3_lib.app import files


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("QWEN3_HISTORY", raising=False)
    return tmp_path / "qwen3"


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_what_is_kept_is_private(folder):
    folder.mkdir(mode=0o755)
    (folder / "history").write_text("+of an earlier version")
    (folder / "history").chmod(0o644)
    assert files.history_file() == folder / "history" and (folder / "history").read_text()
    with pytest.raises(InputError, match="no conversation to continue .no file .*last.json"):
        files.kept_conversation()
    for tools, value in ((None, TALK), ([], {"messages": TALK, "tools": []})):
        file = files.keep_conversation(TALK, tools)
        assert str(file) == files.kept_conversation() and json.loads(file.read_text()) == value
    assert mode(folder) == 0o700 and mode(file) == mode(folder / "history") == 0o600
    assert sorted(os.listdir(folder)) == ["history", "last.json"]


@pytest.mark.parametrize("place", ["/dev/null", "taken"])
def test_an_obstacle(folder, monkeypatch, place):
    """Without a history a chat goes on; a conversation that can't be kept is an error."""
    if place == "taken":
        (folder / "history").mkdir(parents=True)
        (folder / "last.json").mkdir()
    else:
        monkeypatch.setenv("XDG_STATE_HOME", place)
    assert files.history_file() is None
    with pytest.raises(InputError, match="last.json: "):
        files.keep_conversation(TALK, None)
    with pytest.raises(InputError, match="no conversation to continue"):
        files.kept_conversation()


def test_nothing_is_kept_when_it_is_off_or_there_is_no_home(folder, monkeypatch):
    monkeypatch.setenv("QWEN3_HISTORY", "OFF")
    assert files.history_file() is None and files.keep_conversation(TALK, None) is None and not folder.exists()
    monkeypatch.delenv("QWEN3_HISTORY")
    monkeypatch.setenv("XDG_STATE_HOME", "relative/paths/do/not/count")
    assert files.state_file("x") == Path.home() / ".local" / "state" / "qwen3" / "x"
    monkeypatch.setattr(Path, "home", lambda: exec("raise RuntimeError('no home')"))
    assert files.history_file() is None and files.keep_conversation(TALK, None) is None
