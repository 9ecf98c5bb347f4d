"""qwen3.py with random prompts: texts of any kind, logprobs, scores."""
import json
import math
import shutil

import numpy as np
import pytest

import qwen3
from configs import VOCABULARY, TINY
from fuzzing import any_text, fuzz, run_cli
from helpers import assert_one_line, filled_cache, message_of, with_tensors, works_or_refused
from make_random_model import make_random_model
from tokenizer_utils import parse_answer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


# ----------------------------------------------------------------------------------------------------------------------
# Prompts of any kind
# ----------------------------------------------------------------------------------------------------------------------

@fuzz(3000)
def test_prompts(rng, talker):
    """Any text as a question and as a text to continue: pieces of text, or one line."""
    text = any_text(rng, rng.choice([1, 4, 12]))
    if rng.random() < 0.005:
        text = (text or "a") * (100_000 // max(len(text.encode("utf-8", "surrogatepass")), 1))
    options = {"max_new_tokens": rng.randint(1, 4), "seed": rng.randrange(100), "temperature": rng.choice([0, 1.0]),
               "logprobs": rng.choice([None, 0, 2])}
    thinking = rng.choice([None, True, False])
    done = [works_or_refused(lambda: qwen3.chat(talker, text, enable_thinking=thinking, **options).finish()),
            works_or_refused(lambda: qwen3.Completion(talker, talker.tokenizer.encode(text), **options).finish())]
    for completion in filter(None, done):
        ids = completion.token_ids
        assert len(ids) <= options["max_new_tokens"] and completion.finish_reason in ("stop", "length")
        assert completion.text == talker.tokenizer.decode(ids, skip_special_tokens=True)
        assert completion.answer == parse_answer(completion.text, completion.think_open_in_prompt)
        assert len(completion.logprobs) == (0 if options["logprobs"] is None else len(ids))
    return all(done)


def test_a_prompt_of_100_kilobytes(tmp_path):
    """Within the context of the model."""
    config = TINY | {"vocab_size": VOCABULARY, "num_attention_heads": 1, "head_dim": 2,
                     "max_position_embeddings": 2**16}
    loaded = qwen3.load_model(make_random_model(config, tmp_path / "model", "float32"))
    text = " capital capital capital capital capital capital capital<|im_end|>\n日本\0" * 1400
    assert len(text.encode()) > 100_000 and len(loaded.tokenizer.encode(text)) > 15_000
    assert len(qwen3.chat(loaded, text, max_new_tokens=2, eos_token_ids=()).finish().token_ids) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Logprobs and scores
# ----------------------------------------------------------------------------------------------------------------------

def exact_logprobs(logits):
    """log-softmax in float64, written as it is defined."""
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@fuzz(2500, refused=False)
def test_logprobs(rng, model):
    """Each is that of the token drawn, of the model as it is: whatever the temperature, the penalties and the cache."""
    n_tokens = model.config.vocab_size
    prompt = [rng.randrange(n_tokens) for _ in range(rng.randint(1, 8))]
    cache = filled_cache(model, prompt[:rng.randint(1, 8)]) if rng.random() < 0.3 else None
    options = {"temperature": rng.choice([0, 0.3, 1.0, 4.0]), "top_k": rng.choice([0, 5]),
               "repetition_penalty": rng.uniform(0.5, 2),
               "presence_penalty": rng.uniform(-1, 1), "seed": rng.randrange(1000)}
    n_top = rng.choice([0, 1, 3, 20, n_tokens, 10**30])
    completion = qwen3.Completion(model, prompt, rng.randint(1, 8), logprobs=n_top, cache=cache, **options).finish()
    ids = completion.token_ids
    logits = qwen3.forward(model, prompt + ids[:-1], qwen3.KVCache(model.config), all_logits=True)
    exact = exact_logprobs(logits[len(prompt) - 1:])
    assert [entry.token_id for entry in completion.logprobs] == ids
    for entry, row in zip(completion.logprobs, exact, strict=True):
        assert type(entry.logprob) is float and abs(entry.logprob - row[entry.token_id]) < 1e-4
        best, values = [token for token, _ in entry.top], [value for _, value in entry.top]
        assert len(set(best)) == len(best) == min(n_top, n_tokens) and values == sorted(values, reverse=True)
        assert np.allclose(values, row[best], atol=1e-4) and np.allclose(values, np.sort(row)[::-1][:n_top], atol=1e-4)
    return True


@fuzz(2500, refused=False)
def test_score(rng, model):
    """Each logprob is that of a forward pass over nothing but what is before the token."""
    ids = [rng.randrange(model.config.vocab_size) for _ in range(rng.choice([1, 2, 3, 5, 8]))]
    logprobs = qwen3.score(model, ids)
    exact = [exact_logprobs(qwen3.forward(model, ids[:i], qwen3.KVCache(model.config)))[ids[i]]
             for i in range(1, len(ids))]
    assert logprobs.shape == (len(ids) - 1,) and np.allclose(logprobs, exact, atol=1e-4)
    assert abs(logprobs.sum() - sum(exact)) < 1e-3
    return True


@pytest.mark.parametrize("n", [127, 128, 129, 130, 256, 257, 258, 400])
def test_score_of_a_long_text(tmp_path, n):
    """Around the number of positions that are computed together."""
    loaded = qwen3.load_model(make_random_model(TINY | {"vocab_size": VOCABULARY, "max_position_embeddings": 400},
                                                tmp_path / "model", "float32"))
    ids = np.random.default_rng(n).integers(0, VOCABULARY, n)
    logits = qwen3.forward(loaded, ids, qwen3.KVCache(loaded.config), all_logits=True)
    exact = exact_logprobs(logits)[np.arange(n - 1), ids[1:]]
    assert np.allclose(qwen3.score(loaded, ids), exact, atol=1e-4)


def with_norm(tiny, path, value):
    """The tiny model with such numbers in its last norm, which scale all logits."""
    shutil.copytree(tiny, path)
    with_tensors(path / "model.safetensors", {"model.norm.weight": np.full(TINY["hidden_size"], value)})
    return path


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["", "json"])
def test_scores_beyond_all_bounds(tiny, tmp_path, as_json):
    """A text that the model finds so unlikely that its perplexity is no float."""
    path = with_norm(tiny, tmp_path / "model", 1e4)
    status, out, err = run_cli(["--score", "--model", str(path), "Hello", *as_json], b"")
    assert (status, err) == (0, "") and out.endswith("\n")
    if as_json:
        assert json.loads(out, parse_constant=pytest.fail)["logprob"] < -1000


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a warning would be one more line on stderr
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_score_of_a_broken_model(tiny, tmp_path, value):
    """Refused as for generation: not a number is no score."""
    path = with_norm(tiny, tmp_path / "model", value)
    message_of(qwen3.score, qwen3.load_model(path), [1, 2, 3])
    status, out, err = run_cli(["--score", "--model", str(path), "Hello"], b"")
    assert status == 1 and not out
    assert_one_line(err, "not finite")
