"""Live comparison with transformers in float32. Skipped where torch and transformers aren't installed."""
import json
import os
from pathlib import Path

import numpy as np
import pytest

import qwen3
from configs import BASE, CASES
from helpers import REMOVED, edit_json
from make_random_model import make_random_model
from tokenizer_utils import load_tokenizer
import qwen3_numba as fast

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -r requirements-reference.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from make_golden import greedy, load as reference  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


ENGINES = {"NumPy": qwen3.load_model, "fast": lambda path: fast.load_model(path, kv_dtype="f32")}


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    """Both are float32, so they differ by rounding only: by 1e-6 of the spread, and the worst of 50,000 by 1e-5."""
    difference = np.abs(logits - expected) / expected.std()
    assert logits.dtype == np.float32 and np.sqrt((difference**2).mean()) < 3e-6 and difference.max() < 2e-5


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens(name, tmp_path):
    """Read at once, and token by token, which takes other ways through the engines."""
    config, dtype, shards = CASES[name]
    path = make_random_model(config, tmp_path, dtype, shards)
    theirs, ids = reference(path), np.random.default_rng(1).integers(0, config["vocab_size"], 150).tolist()
    tokens = greedy(theirs, ids[:7], 64)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    for load in ENGINES.values():
        model = load(path)
        forward, caches = model.engine.forward, [model.engine.new_cache(model.config) for _ in range(2)]
        assert_close(forward(model, ids, caches[0], all_logits=True), expected)
        assert_close(np.array([forward(model, [i], caches[1]) for i in ids]), expected)
        assert list(qwen3.generate(model, ids[:7], 64, temperature=0, eos_token_ids=())) == tokens


@pytest.mark.parametrize("tied", [True, False, None])
def test_head_in_the_file_is_used_as_transformers_does(tied, tmp_path):
    """A lm_head.weight that differs from the embedding counts, whatever the flag says, or if there is none."""
    path = make_random_model(CASES["group of 4, untied"][0], tmp_path)
    edit_json(path / "config.json", {"tie_word_embeddings": REMOVED if tied is None else tied})
    with torch.no_grad():
        expected = reference(path)(torch.tensor([[5, 6, 7]])).logits[0].numpy()
    for load in ENGINES.values():
        model = load(path)
        cache = model.engine.new_cache(model.config)
        assert_close(model.engine.forward(model, [5, 6, 7], cache, all_logits=True), expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 1e6, 5e6, 1e7])
def test_rope_frequencies(theta, head_dim, tmp_path):
    """Those of transformers to the last bit, in all pairs but one perhaps: torch's power isn't NumPy's."""
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"head_dim": head_dim, "rope_theta": theta}))
    ours, factor = qwen3.rope_frequencies(qwen3.load_config(tmp_path))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config).inv_freq.numpy()
    assert factor == 1 and ours.dtype == theirs.dtype == np.float32 and ours.shape == theirs.shape
    assert np.count_nonzero(ours != theirs) <= 1


@pytest.mark.parametrize("theta, head_dim", [(1e4, 128), (1e6, 128), (5e6, 64), (1e7, 256)])
def test_distant_positions(theta, head_dim, tmp_path, monkeypatch):
    """A text whose tokens stand at positions 0 to 39, around 6,000, and around 32,000.

    There an angle is 32,000 radians: a frequency that differs in its last bit turns it by 0.002.
    """
    positions = np.concatenate([start + np.arange(40) for start in (0, 5980, 31980)])
    config = BASE | {"rope_theta": theta, "head_dim": head_dim, "max_position_embeddings": 40960}
    path = make_random_model(config, tmp_path, "float32")
    ids = np.random.default_rng(2).integers(0, 320, len(positions))
    with torch.no_grad():
        expected = reference(path)(torch.tensor(ids)[None], position_ids=torch.tensor(positions)[None],
                                   attention_mask=torch.ones(1, len(ids))).logits[0].numpy()
    tables = qwen3.rope_tables
    for module in (qwen3, fast):
        monkeypatch.setattr(module, "rope_tables", lambda config, places: tables(config, positions[places]))
    for load in ENGINES.values():
        model = load(path)
        cache = model.engine.new_cache(model.config)
        assert_close(model.engine.forward(model, ids, cache, all_logits=True), expected)


def test_sampling_filters_keep_the_same_tokens():
    """Temperature, top-k, top-p and min-p leave the same tokens with the same probabilities as in transformers."""
    from transformers.generation import logits_process as warpers
    rng = np.random.default_rng(0)
    for _ in range(200):
        logits = (rng.standard_normal(rng.integers(2, 3000)) * rng.uniform(0.5, 8)).astype(np.float32)
        sampling = qwen3.Sampling(float(rng.uniform(0.1, 2)), int(rng.integers(0, 60)),
                                  float(rng.choice([1.0, rng.uniform(0.05, 1)])),
                                  float(rng.choice([0.0, rng.uniform(0, 0.3)])))
        scores = warpers.TemperatureLogitsWarper(sampling.temperature)(None, torch.tensor(logits)[None])
        if sampling.top_k:
            scores = warpers.TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = warpers.TopPLogitsWarper(sampling.top_p)(None, scores)
        if sampling.min_p:
            scores = warpers.MinPLogitsWarper(sampling.min_p)(None, scores)
        expected = torch.softmax(scores[0], -1).numpy()
        ids, probabilities = qwen3.candidates(logits, sampling)
        ours = np.zeros_like(expected)
        ours[ids] = probabilities
        assert np.abs(ours - expected).max() < 1e-4


def test_repetition_penalty_is_transformers():
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    prompt, answer = (np.bincount(ids, minlength=100).astype(np.float32) for ids in ([3, 7, 7], [9]))
    ours = qwen3.penalize(logits, qwen3.Sampling(repetition_penalty=1.3), prompt, answer)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[3, 7, 7, 9]]), torch.tensor(logits)[None])[0].numpy()
    assert np.allclose(ours, theirs, rtol=1e-6)


def test_bundled_model():
    model, theirs = qwen3.load_model(ROOT / "demo"), reference(ROOT / "demo")
    for question in ("What is the capital of Japan?", "What is 417 + 385?", "日本的首都是哪里？",
                     "Tell me a story about a fox."):
        ids = model.tokenizer.encode(model.tokenizer.apply_chat_template([{"role": "user", "content": question}]))
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        logits = qwen3.forward(model, ids, qwen3.KVCache(model.config), all_logits=True)
        assert np.abs(logits - expected).max() < 1e-4 * expected.std()
        answer = list(qwen3.generate(model, ids, 64, temperature=0, eos_token_ids=()))
        assert answer == greedy(theirs, ids, 64)


def test_bundled_template_is_read_alike():
    theirs, ours = transformers.AutoTokenizer.from_pretrained(ROOT / "demo"), load_tokenizer(ROOT / "demo")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"}, {"role": "user", "content": "法国?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == text
    assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.skipif("QWEN3_TEST_MODEL" not in os.environ,
                    reason="QWEN3_TEST_MODEL names no folder with a real checkpoint")
def test_real_checkpoint():
    path = Path(os.environ["QWEN3_TEST_MODEL"])
    model, theirs = qwen3.load_model(path), reference(path)
    ids = model.tokenizer.encode("The capital of France is")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    logits = qwen3.forward(model, ids, qwen3.KVCache(model.config), all_logits=True)
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    assert list(qwen3.generate(model, ids, 20, temperature=0, eos_token_ids=())) == greedy(theirs, ids, 20)
