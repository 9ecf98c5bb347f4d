"""The command line by real processes: answers, JSON, logprobs, scores."""
import json
import math

import numpy as np
import pytest

import qwen3
from configs import FRANCE, PARIS, ROOT
from helpers import output, refusal, run


@pytest.fixture(scope="module")
def model(demo):
    return demo


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

    def watched(model, prompt, settings, seed):
        seen.append(settings)
        return lambda logits: model.eos_token_ids[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3, "sampler", watched)
        qwen3.chat(sampled, "Hello", enable_thinking=False, temperature=None, top_p=0.5).finish()
        qwen3.chat(sampled, "Hello").finish()
    assert seen == [qwen3.Sampling(temperature=0.7, top_p=0.5, top_k=20), sampling]
