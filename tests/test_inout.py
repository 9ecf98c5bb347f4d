"""What goes in and comes out on the command line, by real processes: stdin, files, conversations, tools, JSON, scores."""
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qwen3
from configs import BASE
from make_random_model import make_random_model

ROOT = Path(__file__).resolve().parents[1]
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris.\n"
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
MIA = [{"role": "user", "content": "My name is Mia."}, {"role": "assistant", "content": "Nice to meet you, Mia!"},
       {"role": "user", "content": "What is my name?"}]


def run(*arguments, flags=(), stdin="", environment=None, **options):
    """A finished process of qwen3.py with the bundled model."""
    command = [sys.executable, *flags, ROOT / "qwen3.py", "--model", ROOT / "demo", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120,
                          env=os.environ | (environment or {}), **options)


def output(*arguments, **options) -> str:
    """The stdout of a run that must succeed and have nothing to say on stderr."""
    done = run(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def refusal(*arguments, status=1, **options) -> str:
    """The one line of a run that must fail."""
    done = run(*arguments, **options)
    assert done.returncode == status and done.stdout == "" and len(done.stderr.splitlines()) == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def model():
    return qwen3.load_model(ROOT / "demo")


# ----------------------------------------------------------------------------------------------------------------------
# Where the prompt comes from
# ----------------------------------------------------------------------------------------------------------------------

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
    assert "system message" in refusal("--system", "x", "--messages", write(tmp_path / "m", [{"role": "system", "content": "y"}]))


def write(file: Path, value) -> Path:
    file.write_text(json.dumps(value))
    return file


@pytest.mark.parametrize("options", [
    ["--raw", "--system", "x"], ["--raw", "--no-think"], ["--chat", "--json"], ["--score", "--stop", "x"],
    ["--score", "--top-k", "0"], ["--greedy", "--temperature", "0"], ["--json", "--hide-thinking"],
    ["--system", "", "--system-file", "f"], ["--file", "-", "-"], ["--no-such-option"], ["--top-k", "many"]])
def test_options_that_do_not_go_together(options):
    assert "--help" in refusal(*options, "Hello", status=2) or "stdin" in refusal(*options, "Hello", status=2)


# ----------------------------------------------------------------------------------------------------------------------
# What comes out
# ----------------------------------------------------------------------------------------------------------------------

def test_stop_text_across_tokens(model):
    whole = output("--no-think", FRANCE).rstrip("\n")
    tokens = [model.tokenizer.decode([i]) for i in model.tokenizer.encode(whole)]
    assert "ce is P" in whole and not any("ce is P" in token for token in tokens)
    done = json.loads(output("--no-think", "--json", "--stop", "nothing", "--stop", "ce is P", FRANCE))
    assert (done["text"], done["finish_reason"]) == ("The capital of Fran", "stop")
    assert output("--no-think", "--stop", "Par", FRANCE) == "The capital of France is \n"
    assert "stop text" in refusal("--stop", "", "Hello")


def test_json_has_all_parts(model):
    value = json.loads(output("--json", FRANCE))
    completion = qwen3.chat(model, FRANCE).finish()
    assert value["text"] == PARIS.strip() and value["reasoning"] == completion.answer.reasoning
    assert value["finish_reason"] == "stop" and value["tool_calls"] == []
    assert value["completion_tokens"] == len(completion.token_ids)
    assert value["prompt_tokens"] == len(completion.prompt_ids)
    assert 0 < value["seconds_to_first_token"] <= value["seconds"]
    cut = json.loads(output("--json", "--no-think", "--max-tokens", "3", FRANCE))
    assert (cut["text"], cut["finish_reason"], cut["completion_tokens"]) == ("The capital of", "length", 3)


def test_logprobs(model):
    value = json.loads(output("--json", "--no-think", "--logprobs", "3", FRANCE))["logprobs"]
    ids = [entry["id"] for entry in value]
    prompt = model.tokenizer.encode(model.tokenizer.apply_chat_template(
        [{"role": "user", "content": FRANCE}], enable_thinking=False))
    logits = qwen3.forward(model, prompt + ids, qwen3.KVCache(model.config), all_logits=True)[len(prompt) - 1:-1]
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for row, entry in zip(expected, value):
        assert entry["logprob"] == pytest.approx(row[entry["id"]], abs=1e-4)
        assert [other["id"] for other in entry["top"]] == np.argsort(-row)[:3].tolist()
        assert entry["token"] == model.tokenizer.decode([entry["id"]])
    done = run("--no-think", "--logprobs", "1", FRANCE)
    assert done.stdout == PARIS and len(done.stderr.splitlines()) == len(value)


def test_score_of_a_text_and_of_lines(model, tmp_path):
    lines = ["The capital of France is Paris.", "The capital of France is Rome.", "", "a", "法国的首都是巴黎。"]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    rows = [line.split("\t") for line in output("--score", "--file", tmp_path / "lines.txt").splitlines()]
    assert [row[3] for row in rows] == lines
    for line, (logprob, tokens, perplexity, _) in zip(lines, rows):
        ids = model.tokenizer.encode(line)
        if len(ids) < 2:
            assert (float(logprob), tokens, perplexity) == (0, "0", "-")
            continue
        logits = qwen3.forward(model, ids, qwen3.KVCache(model.config), all_logits=True).astype(np.float64)
        all_logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = sum(all_logprobs[i, ids[i + 1]] for i in range(len(ids) - 1))
        assert int(tokens) == len(ids) - 1 and float(logprob) == pytest.approx(expected, abs=1e-3)
        assert float(perplexity) == pytest.approx(math.exp(-expected / (len(ids) - 1)), rel=1e-3)
    assert float(rows[0][0]) > float(rows[1][0])
    value = json.loads(output("--score", "--json", lines[0]))
    assert value["text"] == lines[0] and value["logprob"] == pytest.approx(float(rows[0][0]), abs=1e-3)


def test_scores_of_a_long_text_do_not_depend_on_how_it_is_cut_up(model, monkeypatch):
    ids = np.random.default_rng(0).integers(0, 3000, 300)
    whole = qwen3.score(model, ids)
    assert whole.shape == (299,)
    monkeypatch.setattr(qwen3, "SCORED", 7)
    np.testing.assert_allclose(qwen3.score(model, ids), whole, atol=1e-3)


def test_thinking_is_hidden_or_limited():
    sums = "What is 417 + 385?"
    assert output("--hide-thinking", sums) == "417 + 385 = 802.\n"
    text = json.loads(output("--json", "--think-budget", "5", sums))
    tokenizer = qwen3.load_tokenizer(ROOT / "demo")
    assert len(tokenizer.encode(text["reasoning"])) <= 5 and text["text"]
    assert output("--think-budget", "0", FRANCE) == "<think>\n</think>\n\n" + PARIS


def test_greedy_is_temperature_0():
    story = "Tell me a story about a wolf."
    assert output("--greedy", story) == output("--temperature", "0", story)


def test_colour_only_on_a_terminal():
    assert "\x1b" not in output(FRANCE)


def test_recommended_values_without_thinking(model):
    """Qwen's generation_config.json holds the values for thinking; without it, the authors recommend others."""
    seen = []
    sampling = qwen3.Sampling(temperature=0.6, top_p=0.95, top_k=20)
    sampled = qwen3.replace(model, sampling=sampling)

    def watched(*arguments, **options):
        seen.append(sampling.updated(**{name: options.get(name) for name in qwen3.Sampling.__dataclass_fields__}))
        return iter(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3, "generate", watched)
        qwen3.chat(sampled, "Hello", enable_thinking=False, temperature=None, top_p=0.5).finish()
        qwen3.chat(sampled, "Hello").finish()
    assert seen == [qwen3.Sampling(temperature=0.7, top_p=0.5, top_k=20), sampling]


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
    """The model has no end token, so only Ctrl-C ends its answer."""
    endless = make_random_model(BASE | {"vocab_size": 3072, "max_position_embeddings": 2**20}, tmp_path / "endless")
    file = tmp_path / "prompt.cache"
    options = ["--model", endless, "--raw", "--seed", "1", "--prompt-cache", file, "The capital"]
    process = subprocess.Popen([sys.executable, ROOT / "qwen3.py", *options], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "qwen3.py: interrupted\n")
    assert json.loads(output("--json", "--max-tokens", "2", *options))["cached_tokens"]


# ----------------------------------------------------------------------------------------------------------------------
# Installed, copied, optimised
# ----------------------------------------------------------------------------------------------------------------------

def test_works_without_assertions():
    assert output("--no-think", FRANCE, flags=["-O"]) == PARIS
    assert output("--no-think", FRANCE, flags=["-OO"]) == PARIS


def test_works_from_a_copy_of_the_files(tmp_path):
    for name in ("qwen3.py", "tokenizer_utils.py", "qwen3_template.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    program = (f"from qwen3 import load_model, generate, chat\nmodel = load_model({str(ROOT / 'demo')!r})\n"
               f"print(chat(model, {FRANCE!r}, enable_thinking=False).finish().text)")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, PARIS, "")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the project is installed, from a copy, as pip installs it."""
    target, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = names.stdout.splitlines() if names.returncode == 0 else [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--target", target, source], check=True, timeout=300)
    return target


def test_installed_command(installed, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "QWEN3_MODEL"}
    done = subprocess.run([installed / "bin/qwen3", "--no-think", FRANCE], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120, env=environment | {"PYTHONPATH": str(installed)})
    assert (done.returncode, done.stdout) == (0, PARIS)
    assert "bundled model" in done.stderr


def test_installed_types(installed, tmp_path):
    (tmp_path / "program.py").write_text(
        "from qwen3 import load_model, generate, chat\nmodel = load_model('x')\nreply = chat(model, 'Hello')\n"
        "reveal_type(reply.answer.content)\nreveal_type(list(generate(model, [1])))\nload_model(1.5)\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "program.py"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"MYPYPATH": "", "PYTHONPATH": str(installed)})
    assert 'is "str"' in done.stdout and 'is "list[int]"' in done.stdout
    assert re.search(r'program.py:6: error: Argument 1 to "load_model" has incompatible type "float"', done.stdout)
    assert "Found 1 error" in done.stdout, done.stdout
