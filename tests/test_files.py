"""qwen3_lib/app/files.py: conversations and tools from files, and what is kept for the user."""
import json
import os
from pathlib import Path

import pytest

import qwen3
import qwen3_numba as fast
from configs import FRANCE, PARIS
from helpers import TALK, WEATHER, assert_cli_refuses, assert_one_line, message_of, run_main
from qwen3 import InputError
from qwen3_lib.app import files

MIA = [{"role": "user", "content": "My name is Mia."}, {"role": "assistant", "content": "Nice to meet you, Mia!"},
       {"role": "user", "content": "What is my name?"}]
LISBON = "What is the weather in Lisbon?"


def answered(capfd, *arguments) -> str:
    """The stdout of a command that must succeed and have nothing to say."""
    status, out, err = run_main(capfd, "--hide-thinking", *arguments)
    assert (status, err) == (0, "")
    return out


def test_conversations_and_system_prompts(capfd, tmp_path):
    file = tmp_path / "chat.json"
    for value in (MIA, {"messages": MIA, "model": "any"}):
        file.write_text(json.dumps(value))
        assert answered(capfd, "--messages", file) == "Your name is Mia.\n"
    assert answered(capfd, "--messages", file, FRANCE) == PARIS
    (tmp_path / "system").write_text("\ufeffYou are a helpful assistant.\r\n")
    counts = [json.loads(answered(capfd, *option, "--json", FRANCE))["prompt_tokens"] for option in (
        ["--system-file", tmp_path / "system"], ["--system", "You are a helpful assistant."], [])]
    assert counts[0] == counts[1] > counts[2]


def test_a_tool_call_and_its_result(capfd, tmp_path):
    """--messages takes the call as --json gives it, in OpenAI's form."""
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    call = {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    printed = answered(capfd, "--tools", tmp_path / "tools.json", LISBON)
    assert json.loads(printed) == call and printed.count("\n") == 1
    value = json.loads(answered(capfd, "--tools", tmp_path / "tools.json", "--json", LISBON))
    [as_openai] = value["tool_calls"]
    function = as_openai["function"] | {"arguments": json.loads(as_openai["function"]["arguments"])}
    assert (function, as_openai["type"], value["finish_reason"]) == (call, "function", "tool_calls")
    (tmp_path / "chat.json").write_text(json.dumps({"tools": [WEATHER], "messages": [
        {"role": "user", "content": LISBON}, {"role": "assistant", "content": value["text"], "tool_calls": [as_openai]},
        {"role": "tool", "tool_call_id": as_openai["id"], "content": '{"temperature": 21, "condition": "sunny"}'}]}))
    answer = answered(capfd, "--messages", tmp_path / "chat.json")
    assert "21" in answer and "sunny" in answer


@pytest.mark.parametrize("content, words", [
    ("[", "not valid JSON"), ("[]", "list of messages"), ('"text"', "list of messages"), ("[1]", "message 0"),
    ('[{"role": "user", "content": [{"type": "video"}]}]', "a video"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools")])
def test_bad_messages(tmp_path, content, words):
    (tmp_path / "chat.json").write_text(content)
    assert_one_line(message_of(files.read_messages, str(tmp_path / "chat.json")), "chat.json", words)


def test_files_that_cannot_be_read(capfd, tmp_path):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "system").write_text('[{"role": "system", "content": "y"}]')
    for arguments, words in [(["--file", tmp_path / "latin"], "UTF-8"), (["--file", tmp_path], "is a directory"),
                             (["--tools", tmp_path / "none", "Hello"], "no such file"),
                             (["--system-file", "a\0b", "Hello"], "null"),
                             (["--system", "x", "--messages", tmp_path / "system"], "has a system message")]:
        assert_cli_refuses(capfd, arguments, words)


@pytest.mark.parametrize("options", [["--keep-on-disk", "{}/file/kept", FRANCE],
                                     *(["--quantize", "int8", "--save-quantized", name]
                                       for name in ("{}/none/new", "{}"))])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, capfd, options, monkeypatch):
    monkeypatch.setattr(qwen3, "sample", lambda *_: pytest.fail("a token would have been drawn for nothing"))
    monkeypatch.setattr(fast, "load_weights", lambda *_: pytest.fail("packed for nothing"))
    (tmp_path / "file").write_text("")
    assert_cli_refuses(capfd, [option.format(tmp_path) for option in options], str(tmp_path))


# ---- Kept for the user alone: the lines typed, and the last conversation ---------------------------------------------

@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("QWEN3_HISTORY", raising=False)
    return tmp_path / "qwen3"


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_what_is_kept_is_private(state):
    state.mkdir(mode=0o755)
    (state / "history").write_text("+of an earlier version")
    (state / "history").chmod(0o644)
    assert files.history_file() == state / "history" and (state / "history").read_text()
    with pytest.raises(InputError, match="no conversation to continue .no file .*last.json"):
        files.kept_conversation()
    for tools, value in ((None, TALK), ([], {"messages": TALK, "tools": []})):
        file = files.keep_conversation(TALK, tools)
        assert str(file) == files.kept_conversation() and json.loads(file.read_text()) == value
    assert mode(state) == 0o700 and mode(file) == mode(state / "history") == 0o600
    assert sorted(os.listdir(state)) == ["history", "last.json"]


@pytest.mark.parametrize("place", ["/dev/null", "taken"])
def test_an_obstacle(state, monkeypatch, place):
    """Without a history a chat goes on; a conversation that can't be kept is an error."""
    if place == "taken":
        (state / "history").mkdir(parents=True)
        (state / "last.json").mkdir()
    else:
        monkeypatch.setenv("XDG_STATE_HOME", place)
    assert files.history_file() is None
    with pytest.raises(InputError, match="last.json: "):
        files.keep_conversation(TALK, None)
    with pytest.raises(InputError, match="no conversation to continue"):
        files.kept_conversation()


def test_nothing_is_kept_when_it_is_off_or_there_is_no_home(state, monkeypatch):
    monkeypatch.setenv("QWEN3_HISTORY", "OFF")
    assert files.history_file() is None and files.keep_conversation(TALK, None) is None and not state.exists()
    monkeypatch.delenv("QWEN3_HISTORY")
    monkeypatch.setenv("XDG_STATE_HOME", "relative/paths/do/not/count")
    assert files.state_file("x") == Path.home() / ".local" / "state" / "qwen3" / "x"
    monkeypatch.setattr(Path, "home", lambda: exec("raise RuntimeError('no home')"))
    assert files.history_file() is None and files.keep_conversation(TALK, None) is None
