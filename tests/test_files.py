"""qwen3_app/files.py by real processes: prompts, conversations and tools from files and stdin, and saved prompts."""
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qwen3
from configs import BASE, VOCABULARY, FRANCE, PARIS, ROOT
from helpers import output, refusal, run
from make_random_model import make_random_model
from qwen3_app import files
from qwen3_app.cli import make_parser, read_prompt
import qwen3_numba as fast

# ----------------------------------------------------------------------------------------------------------------------
# Where the prompt comes from
# ----------------------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
MIA = [{"role": "user", "content": "My name is Mia."}, {"role": "assistant", "content": "Nice to meet you, Mia!"},
       {"role": "user", "content": "What is my name?"}]


def write(file: Path, value) -> Path:
    file.write_text(json.dumps(value))
    return file


def test_prompt_from_stdin():
    assert output("--no-think", stdin=FRANCE + "\n") == PARIS
    assert output("--no-think", "-", stdin=FRANCE) == PARIS


def test_a_prompt_leaves_stdin_alone():
    assert output("--no-think", FRANCE, stdin="Hello") == PARIS


def test_prompt_and_system_prompt_from_files(tmp_path):
    (tmp_path / "prompt.txt").write_text(FRANCE + "\n")
    (tmp_path / "system.txt").write_text("You are a helpful assistant.")
    assert output("--no-think", "--file", tmp_path / "prompt.txt", "--system-file", tmp_path / "system.txt") == PARIS
    both = output("--json", "--no-think", "--file", tmp_path / "prompt.txt", "Please answer:")
    messages = [{"role": "user", "content": "Please answer:\n\n" + FRANCE}]
    tokenizer = qwen3.load_tokenizer(ROOT / "demo")
    assert json.loads(both)["prompt_tokens"] == len(tokenizer.encode(
        tokenizer.apply_chat_template(messages, enable_thinking=False)))
    args = make_parser().parse_args(["Please answer:", "--file", str(tmp_path / "prompt.txt")])
    assert read_prompt(args) == messages[0]["content"]


def test_conversation_from_a_file(tmp_path):
    (tmp_path / "chat.json").write_text(json.dumps(MIA))
    assert output("--no-think", "--messages", tmp_path / "chat.json") == "Your name is Mia.\n"
    (tmp_path / "object.json").write_text(json.dumps({"messages": MIA, "model": "any"}))
    assert output("--no-think", "--messages", tmp_path / "object.json") == "Your name is Mia.\n"
    assert output("--no-think", "--messages", tmp_path / "chat.json", FRANCE) == PARIS


def test_tool_call_and_its_result(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    question = {"role": "user", "content": "What is the weather in Lisbon?"}
    printed = output("--tools", tmp_path / "tools.json", "--hide-thinking", question["content"])
    call = {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    assert json.loads(printed) == call and printed.count("\n") == 1
    value = json.loads(output("--tools", tmp_path / "tools.json", "--json", question["content"]))
    assert (value["tool_calls"], value["finish_reason"]) == ([call], "tool_calls")
    as_openai = {"id": "1", "type": "function", "function": call | {"arguments": json.dumps(call["arguments"])}}
    (tmp_path / "chat.json").write_text(json.dumps({"tools": TOOLS, "messages": [
        question, {"role": "assistant", "content": None, "tool_calls": [as_openai]},
        {"role": "tool", "tool_call_id": "1", "content": '{"temperature": 21, "condition": "sunny"}'}]}))
    answer = output("--hide-thinking", "--messages", tmp_path / "chat.json")
    assert "21" in answer and "sunny" in answer


@pytest.mark.parametrize("content, words", [
    ("[", "not valid JSON"), ("[]", "list of messages"), ('"text"', "list of messages"), ("[1]", "message 0"),
    ('[{"role": "king", "content": "x"}]', "role"), ('[{"role": "user"}]', "content"),
    ('[{"role": "user", "content": [{"type": "image"}]}]', "content"),
    ('[{"role": "assistant", "tool_calls": [{"name": 1}]}]', "tool_calls"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools")])
def test_bad_messages(tmp_path, content, words):
    (tmp_path / "chat.json").write_text(content)
    assert words in refusal("--messages", tmp_path / "chat.json") and "chat.json" in refusal(
        "--messages", tmp_path / "chat.json")


def test_odd_files(tmp_path):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    assert "UTF-8" in refusal("--file", tmp_path / "latin")
    assert "is a directory" in refusal("--file", tmp_path).lower()
    assert "no such file" in refusal("--tools", tmp_path / "none", "Hello").lower()
    assert "empty" in refusal("-", stdin=" \n")
    assert "longer than" in refusal("--file", "/dev/zero")
    assert "system message" in refusal("--system", "x", "--messages",
                                       write(tmp_path / "m", [{"role": "system", "content": "y"}]))


# ----------------------------------------------------------------------------------------------------------------------
# Saved prompts
# ----------------------------------------------------------------------------------------------------------------------

def test_prompt_cache(tmp_path):
    file, system = tmp_path / "prompt.cache", "You are a helpful assistant."
    options = ("--prompt-cache", file, "--system", system, "--json")
    first = json.loads(output(*options, FRANCE))
    again = json.loads(output(*options, FRANCE))
    assert (first["cached_tokens"], again["cached_tokens"]) == (0, first["prompt_tokens"] - 1)
    assert again["text"] == first["text"]
    before = file.read_bytes()
    other = json.loads(output(*options, "What is the capital of Italy?"))
    assert 0 < other["cached_tokens"] < other["prompt_tokens"] - 1 and "Rome" in other["text"]
    assert file.read_bytes() == before  # a prompt that only begins alike leaves the file to the first one
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompt.cache"]


def test_prompt_cache_of_another_model_or_of_something_else(tmp_path):
    from make_random_model import make_random_model
    config = json.loads((ROOT / "demo/config.json").read_text())
    make_random_model(config, tmp_path / "other", tokenizer=ROOT / "demo")
    file = tmp_path / "prompt.cache"
    output("--prompt-cache", file, FRANCE)
    content = file.read_bytes()
    assert "another model" in refusal("--model", tmp_path / "other", "--prompt-cache", file, FRANCE)
    assert "not a prompt cache" in refusal("--prompt-cache", ROOT / "demo/model.safetensors", FRANCE)
    file.write_bytes(content[:-1])
    assert "damaged" in refusal("--prompt-cache", file, FRANCE)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "damaged" in refusal("--prompt-cache", file, FRANCE)
    assert "cannot be written" in run("--prompt-cache", tmp_path / "no/such/folder", FRANCE).stderr
    assert "not a regular file" in refusal("--prompt-cache", "/dev/null", FRANCE)


def test_interrupted_answer_keeps_the_prompt(tmp_path):
    """Of a model whose answer only Ctrl-C ends."""
    endless = make_random_model(BASE | {"vocab_size": VOCABULARY, "max_position_embeddings": 2**20},
                                tmp_path / "endless")
    file = tmp_path / "prompt.cache"
    options = ["--model", endless, "--raw", "--seed", "1", "--prompt-cache", file, "The capital"]
    process = subprocess.Popen([sys.executable, ROOT / "qwen3.py", *options], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "qwen3.py: interrupted\n")
    assert json.loads(output("--json", "--max-tokens", "2", *options))["cached_tokens"]


def test_prompt_caches_of_each_way_to_keep_them(tmp_path):
    """Each is taken up again, in a quantized checkpoint too, and by no engine that keeps weights or cache otherwise."""
    fast.save_quantized(fast.load_model(ROOT / "demo", "int8"), tmp_path / "packed", "int8")
    models = {"f16": fast.load_model(ROOT / "demo"), "bf16": fast.load_model(ROOT / "demo", kv_dtype="bf16"),
              "int8": fast.load_model(ROOT / "demo", "int8"), "saved": fast.load_model(tmp_path / "packed"),
              "numpy": qwen3.load_model(ROOT / "demo")}
    ids = np.arange(30)
    for name, model in models.items():
        cache = model.engine.new_cache(model.config)
        model.engine.forward(model, ids, cache)
        files.save_prompt_cache(cache, model, tmp_path / name)
        for other, another in models.items():
            if other == name:
                loaded = files.load_prompt_cache(another, tmp_path / name)
                np.testing.assert_array_equal(loaded.k[..., :30, :], cache.k[..., :30, :])
                np.testing.assert_array_equal(loaded.token_ids[0, :30], ids)
            else:
                with pytest.raises(qwen3.InputError, match="prompt cache of another model"):
                    files.load_prompt_cache(another, tmp_path / name)


def test_a_prompt_cache_is_refused_after_rope_theta_has_changed(tmp_path):
    folder, file = make_random_model(BASE | {"vocab_size": VOCABULARY}, tmp_path / "model"), tmp_path / "cache"
    arguments = ("--model", folder, "--raw", "--max-tokens", 2, "--prompt-cache", file, "The capital of France")
    assert run(*arguments).returncode == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10_000}))
    done = run(*arguments)
    assert done.returncode == 1 and "another model" in done.stderr


def test_a_prompt_cache_holds_the_prompt_and_nothing_of_the_answer(tmp_path):
    file, question = tmp_path / "cache", "What is the capital of France?"
    assert run("--prompt-cache", file, question).returncode == 0
    model = qwen3.load_model(qwen3.BUNDLED)
    cache, prompt = files.load_prompt_cache(model, file), qwen3.chat(model, question).prompt_ids
    assert cache.token_ids[0, :cache.length].tolist() == prompt.tolist()


@pytest.mark.parametrize("arguments", [["--file", "FILE"], ["--raw", "--file", "FILE"],
                                       ["--system-file", "FILE", "Hi"]])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, arguments):
    answers = []
    for text in ("The capital of France is", "\ufeffThe capital of France is"):
        (tmp_path / "text").write_text(text, encoding="utf-8")
        done = run("--json", "--max-tokens", 4, *(tmp_path / "text" if word == "FILE" else word for word in arguments))
        answers.append(json.loads(done.stdout)["prompt_tokens"])
    assert answers[0] == answers[1]
