"""qwen3_lib/app/files.py: conversations and tools from files, and saved prompts, and what is kept for the user."""
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE, FRANCE, PARIS, ROOT, VOCABULARY
from helpers import (TALK, WEATHER, assert_cli_refuses, assert_one_line, edit_json, endless, filled_cache, finish,
                     message_of, random_ids, run_main)
from make_random_model import make_random_model
from qwen3 import InputError
from qwen3_lib.app import files
from qwen3_lib.io.packed import save_quantized

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


# ---- Saved prompts ---------------------------------------------------------------------------------------------------

def test_a_saved_prompt_is_taken_up(capfd, demo, tmp_path):
    file = tmp_path / "prompt.cache"
    options = ("--prompt-cache", file, "--system", "You are a helpful assistant.", "--json")
    first, again = (json.loads(answered(capfd, *options, FRANCE)) for _ in range(2))
    assert (first["cached_tokens"], again["cached_tokens"]) == (0, first["prompt_tokens"] - 1)
    assert again["text"] == first["text"]
    prompt = qwen3.chat(demo, FRANCE, system="You are a helpful assistant.").prompt_ids
    cache = files.load_prompt_cache(demo, file)
    assert cache.token_ids[:cache.length].tolist() == prompt.tolist()  # nothing of the answer
    before = file.read_bytes()
    other = json.loads(answered(capfd, *options, "What is the capital of Italy?"))
    assert 0 < other["cached_tokens"] < other["prompt_tokens"] - 1 and "Rome" in other["text"]
    assert file.read_bytes() == before  # a prompt that only begins alike leaves the file to the first one
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompt.cache"]


def test_saved_prompts_that_are_refused(demo, model, tmp_path, capfd):
    file = tmp_path / "cache"
    files.save_prompt_cache(filled_cache(demo, random_ids(9)), demo, file)
    content = file.read_bytes()
    assert "another model" in message_of(files.load_prompt_cache, model, file)
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        assert "damaged" in message_of(files.load_prompt_cache, demo, file)
    assert "not a prompt cache" in message_of(files.load_prompt_cache, demo, ROOT / "demo/model.safetensors")
    assert "not a regular file" in message_of(files.load_prompt_cache, demo, "/dev/null")


@pytest.mark.parametrize("options", [["--prompt-cache", "{}/none/file", FRANCE], ["--prompt-cache", "", FRANCE],
                                     *(["--quantize", "int8", "--save-quantized", name]
                                       for name in ("{}/none/new", "{}"))])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, capfd, options, monkeypatch):
    monkeypatch.setattr(qwen3, "sample", lambda *_: pytest.fail("a token would have been drawn for nothing"))
    monkeypatch.setattr(fast, "load_weights", lambda *_: pytest.fail("packed for nothing"))
    assert_cli_refuses(capfd, [option.format(tmp_path) for option in options],
                       "is empty" if "" in options else str(tmp_path))


def test_a_saved_prompt_belongs_to_the_config_it_was_made_with(tmp_path):
    folder = make_random_model(BASE | {"vocab_size": VOCABULARY}, tmp_path / "model")
    model = qwen3.load_model(folder)
    files.save_prompt_cache(filled_cache(model, [1, 2]), model, tmp_path / "cache")
    edit_json(folder / "config.json", {"rope_theta": 10000})
    assert "another model" in message_of(files.load_prompt_cache, qwen3.load_model(folder), tmp_path / "cache")


def test_an_interrupted_answer_keeps_the_prompt(pristine, tmp_path):
    process = endless(pristine, "--prompt-cache", tmp_path / "cache", "The capital of", stdin=subprocess.DEVNULL)
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    assert finish(process)[::2] == (130, "qwen3.py: interrupted\n")
    assert files.load_prompt_cache(qwen3.load_model(pristine), tmp_path / "cache").length


def test_saved_prompts_of_each_engine(tmp_path):
    """Each is taken up again, and by no engine that keeps weights or cache in another form."""
    save_quantized(fast.load_model(ROOT / "demo", "int8"), tmp_path / "packed", "int8")
    models = {"numpy": qwen3.load_model(ROOT / "demo"), "saved": fast.load_model(tmp_path / "packed")} | {
        name: fast.load_model(ROOT / "demo", **options) for name, options in {
            "f16": {"activations": "f32"}, "kv int8": {"kv_dtype": "int8"}, "int8": {"quantize": "int8"},
            "bf16": {"kv_dtype": "bf16", "activations": "f32"},
            "rounded": {}, "exact": {"quantize": "int8", "activations": "f32"}}.items()}
    ids = random_ids(30)
    for name, model in models.items():
        cache = model.engine.new_cache(model.config)
        expected = qwen3.forward(model, ids, cache)
        files.save_prompt_cache(cache, model, tmp_path / name)
        for other, another in models.items():
            if other == name:
                loaded = files.load_prompt_cache(another, tmp_path / name)
                loaded.truncate(29)
                np.testing.assert_allclose(qwen3.forward(another, ids[29:], loaded), expected, atol=1e-3)
            else:
                assert "another engine" in message_of(files.load_prompt_cache, another, tmp_path / name)


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
