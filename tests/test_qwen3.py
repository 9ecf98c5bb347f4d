"""qwen3.py: the model, its cache, sampling and generation, against golden values, published formulas, properties."""
import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import qwen3
from configs import BASE, CASES, ROOT
from helpers import assert_one_line, message_of, random_ids
from make_random_model import make_random_model
from qwen3_io import checkpoint
from qwen3_io.errors import InputError

pytestmark = pytest.mark.core
GOLDEN = json.loads((ROOT / "tests" / "golden.json").read_text())


def logits_of(model, ids):
    """All logits at once, with an empty cache."""
    return qwen3.forward(model, ids, qwen3.KVCache(model.config), all_logits=True)


def close(a, b, tolerance=1e-5):
    return np.abs(a - b).max() <= tolerance * max(b.std(), 1e-30)


# ----------------------------------------------------------------------------------------------------------------------
# Golden values
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_random_models_match_transformers(name, tmp_path):
    config, dtype, shards = CASES[name]
    model, golden = qwen3.load_model(make_random_model(config, tmp_path, dtype, shards)), GOLDEN["random"][name]
    logits = qwen3.forward(model, golden["prompt"], qwen3.KVCache(model.config))
    assert np.abs(logits[:8] - golden["logits"]).max() < 1e-4 * golden["spread"]
    assert list(qwen3.generate(model, golden["prompt"], 64, temperature=0, eos_token_ids=())) == golden["greedy"]


@pytest.mark.parametrize("case", GOLDEN["demo"], ids=lambda case: f"{case['question']} {case['enable_thinking']}")
def test_bundled_model_matches_transformers(demo, case):
    text = demo.tokenizer.apply_chat_template([{"role": "user", "content": case["question"]}],
                                              enable_thinking=case["enable_thinking"])
    assert demo.tokenizer.encode(text) == case["prompt"]
    answer = list(qwen3.generate(demo, case["prompt"], 160, temperature=0))
    end = demo.tokenizer.token_to_id("<|im_end|>")
    assert answer + [end] * (len(answer) < len(case["greedy"])) == case["greedy"]


# ----------------------------------------------------------------------------------------------------------------------
# Components against their sources
# ----------------------------------------------------------------------------------------------------------------------

def test_rms_norm_matches_zhang_2019():
    """x_i / sqrt(mean of x²) * g_i, in float64; Qwen3 adds eps to the mean."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 5, 7)).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    for scale in (1e-4, 1, 1e4):  # at 1e-4 it matters that eps is inside the root
        y = (x * np.float32(scale)).astype(float)
        expected = y / np.sqrt((y ** 2).mean(-1, keepdims=True) + 1e-6) * weight
        assert np.allclose(qwen3.rms_norm(x * np.float32(scale), weight, 1e-6), expected, rtol=1e-5)


def test_grouped_query_attention_matches_ainslie_2023():
    """Head by head, position by position, in float64: each group of query heads looks up one K and V."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((6, 3, 4)).astype(np.float32)  # 6 query heads share 2 KV heads; 3 new of 5 positions
    k, v = rng.standard_normal((2, 2, 5, 4)).astype(np.float32)
    out = qwen3.attention(q, k, v)
    for head in range(6):
        for i in range(3):
            keys, values = k[head // 3, :3 + i].astype(float), v[head // 3, :3 + i]
            weights = np.exp(keys @ q[head, i] / math.sqrt(4))
            assert np.allclose(out[head, i], weights @ values / weights.sum(), atol=1e-5)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_attention_matches_vaswani_2017(heads, n, d, seed):
    """softmax(Q Kᵀ / sqrt(d)) V with a mask on later positions: one KV head for each query head."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, heads, n, d)).astype(np.float32)
    scores = np.einsum("hid,hjd->hij", q.astype(float), k) / math.sqrt(d)
    scores[..., np.arange(n)[:, None] < np.arange(n)] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert np.allclose(qwen3.attention(q, k, v), weights @ v, atol=1e-5)


def test_attention_survives_large_scores():
    q = np.full((1, 1, 4), 1e4, np.float32)
    k = np.stack([np.full(4, 1e4), np.full(4, -1e4)]).astype(np.float32)[None]
    v = np.array([[1.0], [2.0]], np.float32).repeat(4, axis=1)[None]
    assert np.array_equal(qwen3.attention(q, k, v), np.ones((1, 1, 4), np.float32))


@given(st.integers(0, 100_000), st.integers(0, 500))
def test_rope_depends_on_the_distance_only(start, distance):
    config = qwen3.Config(1, 1, 1, 1, 1, 1, 8, 1e-6, 1e6, 1, True)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 8)).astype(np.float32)

    def score(q_position, k_position):
        turned = [qwen3.apply_rope(x, *qwen3.rope_tables(config, np.array([position])))
                  for x, position in ((q, q_position), (k, k_position))]
        return float((turned[0] * turned[1]).sum())

    assert score(start + distance, start) == pytest.approx(score(distance, 0), abs=2e-2 if start > 1000 else 1e-3)


@given(st.sampled_from([2, 6, 64, 128]), st.sampled_from([100.0, 1e4, 1e6]), st.integers(0, 3000), st.integers(0, 99))
def test_rope_matches_su_2021(d, theta, position, seed):
    """Equation 15: a block-diagonal matrix of 2 x 2 rotations by m theta_i, where theta_i = theta^(-2 (i - 1) / d).

    The paper's blocks take neighbours; Qwen3's weights are permuted so that x[i] and x[i + d / 2] are one block.
    """
    config = qwen3.Config(1, 1, 1, 1, 1, 1, d, 1e-6, theta, 1, True)
    x = np.random.default_rng(seed).standard_normal(d).astype(np.float32)
    matrix, order = np.zeros((d, d)), np.arange(d).reshape(2, -1).T.reshape(-1)  # 0, d / 2, 1, d / 2 + 1, ...
    for i in range(1, d // 2 + 1):
        angle = position * theta ** (-2 * (i - 1) / d)
        block = slice(2 * i - 2, 2 * i)
        matrix[block, block] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    turned = qwen3.apply_rope(x[None, None], *qwen3.rope_tables(config, np.array([position])))[0, 0]
    rounding = 3 * 2.0**-24 * position  # of the angle: float32 power, reciprocal and product
    assert np.allclose(turned[order], matrix @ x[order], atol=1e-5 + 5 * rounding)  # no pair is longer than 5


def test_rope_pairs_halves():
    config = qwen3.Config(1, 1, 1, 1, 1, 1, 4, 1e-6, 100.0, 1, True)
    turned = qwen3.apply_rope(np.array([[[1, 0, 0, 2]]], np.float32), *qwen3.rope_tables(config, np.array([3])))[0, 0]
    a, b = 3.0, 3 * 100 ** -0.5  # the angles of the two pairs (0, 2) and (1, 3)
    assert np.allclose(turned, [math.cos(a), -2 * math.sin(b), math.sin(a), 2 * math.cos(b)], atol=1e-6)


@pytest.mark.parametrize("d, theta, length, factor", [
    (64, 1e6, 32768, 4.0), (128, 1e6, 32768, 4.0), (32, 1e4, 4096, 16.0)])
def test_yarn_matches_peng_2023(d, theta, length, factor):
    """Section 3.2 with alpha = 1 and beta = 32: r, the turns of a pair within the original length, decides.

    Pairs with r > beta keep their frequency, pairs with r < alpha have it divided by the factor. Between them the
    paper's formula is linear in r; its code, for which checkpoints are made, is linear in the index of the pair.
    Section 3.4: q and k are scaled by 0.1 ln(factor) + 1.
    """
    rope = checkpoint.yarn_config({"factor": factor, "original_max_position_embeddings": length}, 40960, Path("x.json"))
    config = qwen3.Config(1, 1, 1, 1, 1, 1, d, 1e-6, theta, 40960, True, yarn=rope)
    frequencies, scale = qwen3.rope_frequencies(config)
    low = math.floor(d * math.log(length / (2 * math.pi * 32)) / (2 * math.log(theta)))
    high = math.ceil(d * math.log(length / (2 * math.pi)) / (2 * math.log(theta)))
    cases = set()
    for i in range(d // 2):
        plain = theta ** (-2 * i / d)
        turns = length * plain / (2 * math.pi)
        case = "kept" if turns > 32 else "divided" if turns < 1 else "blended"
        ramp = {"kept": 0, "divided": 1}.get(case, (i - low) / (high - low))
        assert frequencies[i] == pytest.approx((1 - ramp) * plain + ramp * plain / factor, rel=1e-5)
        cases.add(case)
    assert cases == {"kept", "blended", "divided"}
    assert scale == pytest.approx(0.1 * math.log(factor) + 1)
    assert config.context_length == max(40960, factor * length)


def test_swiglu_matches_shazeer_2020():
    """FFN(x) = (Swish_1(x W) * x V) W2 with Swish_1(z) = z sigmoid(z), in float64."""
    rng = np.random.default_rng(0)
    x, (w, v), w2 = rng.standard_normal((2, 5, 7)), rng.standard_normal((2, 7, 11)), rng.standard_normal((11, 7))
    gate = x @ w
    expected = (gate / (1 + np.exp(-gate)) * (x @ v)) @ w2
    ours = qwen3.swiglu(*(a.astype(np.float32) for a in (x, w.T, v.T, w2.T)))  # stored as [outputs, inputs]
    assert np.allclose(ours, expected, atol=1e-4)


def test_swiglu_of_extreme_values():
    x = np.array([[-200.0, 200.0, 0.0]], np.float32)
    eye = np.eye(3, dtype=np.float32)
    with np.errstate(all="raise", under="ignore", over="ignore"):
        assert np.allclose(qwen3.swiglu(x, eye, eye, eye), [[0, 40000, 0]])


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------

@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_any_split_gives_the_same_logits(model, sizes):
    """Prefill in one go, in several calls on a warm cache, and token by token."""
    ids = random_ids(sum(sizes))
    cache, parts, start = qwen3.KVCache(model.config), [], 0
    for size in sizes:
        parts.append(qwen3.forward(model, ids[start:start + size], cache, all_logits=True))
        start += size
    whole = logits_of(model, ids)
    assert close(np.concatenate(parts), whole)
    cache = qwen3.KVCache(model.config)
    assert close(np.stack([qwen3.forward(model, [i], cache) for i in ids]), whole)


def test_chunks_inside_forward(model, monkeypatch):
    ids = random_ids(100)
    whole = logits_of(model, ids)
    assert close(qwen3.forward(model, ids, qwen3.KVCache(model.config)), whole[-1])
    monkeypatch.setattr(qwen3, "CHUNK", 7)
    assert close(logits_of(model, ids), whole)
    monkeypatch.setattr(qwen3, "QUERIES", 3)
    assert close(logits_of(model, ids), whole)
    monkeypatch.setattr(qwen3, "MAX_SCORES", 4 * 50)  # fewer and fewer positions together, in the end one
    assert close(logits_of(model, ids), whole)
    assert close(qwen3.forward(model, ids, qwen3.KVCache(model.config)), whole[-1])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.data())
def test_truncated_cache_is_as_new(model, n, data):
    kept = data.draw(st.integers(0, n))
    first, second = random_ids(n), random_ids(data.draw(st.integers(1, 80)), seed=1)
    cache = qwen3.KVCache(model.config)
    qwen3.forward(model, first, cache)
    cache.truncate(kept)
    assert cache.length == kept
    assert close(qwen3.forward(model, second, cache), logits_of(model, first[:kept] + second)[-1])


def test_cache_grows_by_a_quarter_up_to_its_limit(model):
    cache = qwen3.KVCache(model.config, 1500)
    capacities = [cache.k.shape[3] for _ in range(15) if qwen3.forward(model, random_ids(100), cache) is not None]
    assert sorted(set(capacities)) == [189, 314, 564, 814, 1189, 1500]
    with pytest.raises(qwen3.InputError, match="1501 positions"):
        qwen3.forward(model, [1], cache)
    assert cache.length == 1500


def test_truncating_out_of_range(model):
    cache = qwen3.KVCache(model.config)
    for length in (-1, 1):
        with pytest.raises(qwen3.InputError):
            cache.truncate(length)


def test_cache_too_small(model):
    cache = qwen3.KVCache(model.config, 4)
    assert_one_line(message_of(qwen3.forward, model, [1] * 5, cache), "5", "4")
    assert cache.length == 0
    before = qwen3.forward(model, [1, 2, 3], cache)
    assert_one_line(message_of(qwen3.forward, model, [4, 5], cache), "5", "4")
    assert cache.length == 3  # what was refused has changed nothing
    cache.truncate(0)
    assert np.array_equal(qwen3.forward(model, [1, 2, 3], cache), before)


@pytest.mark.parametrize("length", [0, -1])
def test_cache_length(model, length):
    assert_one_line(message_of(qwen3.KVCache, model.config, length), str(length))


@pytest.mark.parametrize("length", [-1, 4, 10**9])
def test_truncate_beyond_the_cache(model, length):
    cache = qwen3.KVCache(model.config)
    qwen3.forward(model, [1, 2, 3], cache)
    assert_one_line(message_of(cache.truncate, length), str(length))
    assert cache.length == 3


# ----------------------------------------------------------------------------------------------------------------------
# Batches
# ----------------------------------------------------------------------------------------------------------------------

PROMPTS = [random_ids(n, seed=n) for n in (5, 1, 40, 17)]


def test_batch_logits_match_single_ones(model):
    cache = qwen3.KVCache(model.config, batch=len(PROMPTS))
    logits = qwen3.forward(model, PROMPTS, cache)
    following = qwen3.forward(model, [[3], [], [5, 6], [7]], cache, all_logits=True)
    expected = [logits_of(model, prompt) for prompt in PROMPTS]
    assert close(logits, np.stack([each[-1] for each in expected]))
    expected = [logits_of(model, PROMPTS[i] + new)[-len(new):] for i, new in ((0, [3]), (2, [5, 6]), (3, [7]))]
    assert close(following, np.concatenate(expected))
    assert cache.lengths.tolist() == [6, 1, 42, 18]
    assert close(qwen3.forward(model, [[], [4], [], []], cache), logits_of(model, PROMPTS[1] + [4])[-1:])


def test_a_sequence_copied_goes_on_like_its_source(model):
    cache = qwen3.KVCache(model.config, batch=2)
    qwen3.forward(model, [PROMPTS[2], PROMPTS[0]], cache)
    cache.copy(1, cache, 0, 30)
    assert cache.lengths.tolist() == [40, 30] and cache.common_prefix(np.array(PROMPTS[2]), 1) == 30
    assert close(qwen3.forward(model, [[], PROMPTS[2][30:]], cache), logits_of(model, PROMPTS[2])[-1:])
    other = qwen3.KVCache(model.config)
    other.copy(0, cache, 1, 7)
    assert close(qwen3.forward(model, [9], other), logits_of(model, PROMPTS[2][:7] + [9])[-1])


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "top_k": 50, "seed": 3,
                                                          "presence_penalty": 1.0}])
def test_batch_answers_match_single_ones(model, options):
    """With ends that come at different times, so that rows are dropped on the way."""
    ends = tuple(range(0, 320, 12))
    single = []
    for i, prompt in enumerate(PROMPTS):
        seed = {"seed": options["seed"] + i} if "seed" in options else {}
        single.append(list(qwen3.generate(model, prompt, 30, eos_token_ids=ends, **options | seed)))
    assert len({len(answer) for answer in single}) > 1
    assert qwen3.generate_batch(model, PROMPTS, 30, eos_token_ids=ends, **options) == single
    assert qwen3.generate_batch(model, [], 30) == []


def test_batch_up_to_the_context(tmp_path):
    model = qwen3.load_model(make_random_model(BASE | {"max_position_embeddings": 48}, tmp_path))
    answers = qwen3.generate_batch(model, PROMPTS, temperature=0, eos_token_ids=())
    assert [len(prompt) + len(answer) for prompt, answer in zip(PROMPTS, answers)] == [48] * 4
    assert answers == [list(qwen3.generate(model, prompt, temperature=0, eos_token_ids=())) for prompt in PROMPTS]


# ----------------------------------------------------------------------------------------------------------------------
# Sampling
# ----------------------------------------------------------------------------------------------------------------------

def plain_candidates(logits, sampling):
    """The probabilities by definition, one step after the other, in float64 over the whole vocabulary."""
    x = logits.astype(float) / sampling.temperature
    if sampling.top_k:
        x[x < np.sort(x)[::-1][:sampling.top_k][-1]] = -np.inf
    order = np.argsort(-x, kind="stable")
    p = np.exp(x - x.max())
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    x[order[before >= sampling.top_p]] = -np.inf
    x[np.exp(x - x.max()) < sampling.min_p] = -np.inf
    p = np.exp(x - x.max())
    return p / p.sum()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.floats(0.1, 3), st.integers(0, 100), st.floats(0.05, 1),
       st.sampled_from([0, 0.01, 0.2, 1]), st.integers(0, 2**32 - 1))
def test_candidates_are_as_defined(n, temperature, top_k, top_p, min_p, seed):
    logits = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 4
    sampling = qwen3.Sampling(temperature, top_k, top_p, min_p)
    ids, probabilities = qwen3.candidates(logits, sampling)
    ours = np.zeros(n)
    ours[ids] = probabilities
    expected = plain_candidates(logits, sampling)
    assert np.abs(ours - expected).max() < 1e-4 or abs(len(ids) - (expected > 0).sum()) <= 1
    assert probabilities.dtype == np.float32
    assert abs(probabilities.sum() - 1) < 1e-4


@settings(max_examples=100)
@given(st.integers(1, 300), st.floats(0.01, 0.999), st.floats(0.5, 4), st.integers(0, 2**32 - 1))
def test_top_p_matches_holtzman_2019(n, p, spread, seed):
    """The smallest set of tokens whose probabilities sum to at least p, rescaled to a sum of 1."""
    logits = (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)
    probability = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    nucleus, total = [], 0.0
    for token in sorted(range(n), key=lambda token: -probability[token]):
        if total >= p:
            break
        nucleus.append(token)
        total += probability[token]
    assume(min(abs(total - p), abs(total - probability[nucleus[-1]] - p)) > 1e-5)  # rounding decides there
    ids, ours = qwen3.candidates(logits, qwen3.Sampling(1.0, top_p=p))
    assert sorted(ids) == sorted(nucleus)
    assert np.allclose(ours, probability[ids] / total, rtol=1e-4)


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_top_k_matches_fan_2018(n, k, seed):
    """The k most likely tokens, rescaled to a sum of 1."""
    logits = np.random.default_rng(seed).permutation(n).astype(np.float32) / 8  # no two alike
    kept = sorted(range(n), key=lambda token: -logits[token])[:k]
    weights = np.exp(logits[kept].astype(float) - logits.max())
    ids, ours = qwen3.candidates(logits, qwen3.Sampling(1.0, top_k=k))
    assert dict(zip(ids, ours)) == pytest.approx(dict(zip(kept, weights / weights.sum())), rel=1e-4)


@settings(max_examples=100)
@given(st.integers(1, 300), st.floats(0.001, 1), st.integers(0, 2**32 - 1))
def test_min_p_matches_nguyen_2024(n, min_p, seed):
    """The tokens at least min_p times as likely as the most likely one, rescaled to a sum of 1."""
    logits = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 3
    probability = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    bound = min_p * probability.max()
    assume(np.abs(probability / bound - 1).min() > 1e-5 or min_p == 1)
    kept = np.flatnonzero(probability >= bound)
    ids, ours = qwen3.candidates(logits, qwen3.Sampling(1.0, min_p=min_p))
    assert dict(zip(ids, ours)) == pytest.approx(dict(zip(kept, probability[kept] / probability[kept].sum())), rel=1e-4)


@settings(max_examples=50)
@given(st.lists(st.floats(0.25, 50, width=32), min_size=2, max_size=20), st.floats(0.5, 3), st.integers(0, 2**32 - 1))
def test_repetition_penalty_matches_keskar_2019(logits, penalty, seed):
    """p_i is in proportion to exp(x_i / I(i in g)), I = penalty for tokens that have been there, else 1.

    The paper's scores are taken as positive; as everywhere, negative ones are multiplied instead (test_penalties).
    """
    x, rng = np.array(logits, np.float32), np.random.default_rng(seed)
    prompt, answer = rng.integers(0, 3, (2, len(x))).astype(np.float32)
    penalized = qwen3.penalize(x, qwen3.Sampling(repetition_penalty=penalty), prompt, answer)
    for i in range(len(x)):
        assert penalized[i] == pytest.approx(x[i] / (penalty if prompt[i] or answer[i] else 1), rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20_000), st.floats(0, 1), st.integers(1, 1000), st.integers(0, 2**32 - 1))
def test_top_k_indices(n, share, distinct, seed):
    x = np.random.default_rng(seed).integers(0, distinct, n).astype(np.float32)  # with ties
    k = max(1, round(share * n))
    assert sorted(qwen3.top_k_indices(x, k)) == np.flatnonzero(x >= np.sort(x)[-k]).tolist()


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 40), st.floats(0.3, 2), st.integers(0, 2**32 - 1))
def test_samples_follow_the_distribution(n, temperature, seed):
    """Chi-square over 4000 draws; its 1 - 1e-9 quantile, so that it does not fail by chance."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(n).astype(np.float32) * 2
    sampling = qwen3.Sampling(temperature)
    expected = 4000 * plain_candidates(logits, sampling)
    counts = np.bincount([qwen3.sample(logits, sampling, rng) for _ in range(4000)], minlength=n)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    chi_square = ((observed - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    freedom = len(observed) - 1
    # Wilson-Hilferty
    quantile = max(freedom, 1) * (1 - 2 / (9 * max(freedom, 1)) + 6 * math.sqrt(2 / (9 * max(freedom, 1)))) ** 3
    assert chi_square < quantile + 10


def test_top_p_over_many_equal_tokens():
    ids, _ = qwen3.candidates(np.zeros(151_936, np.float32), qwen3.Sampling(1.0, top_p=0.9))
    assert len(ids) == pytest.approx(0.9 * 151_936, rel=1e-4)


@pytest.mark.parametrize("share, expected", [(0.5, 1000), (1e-5, 0.02)])
def test_small_probabilities_come_up_as_often_as_they_should(share, expected):
    """A share of the probability is spread over 100,000 tokens, too thinly for a running sum in float32."""
    logits = np.zeros(100_001, np.float32)
    logits[0] = math.log(100_000 * (1 - share) / share)
    rng = np.random.default_rng(0)
    others = sum(qwen3.sample(logits, qwen3.Sampling(1.0), rng) != 0 for _ in range(2000))
    assert abs(others - expected) <= 6 * math.sqrt(expected) + 1


def test_greedy_takes_the_maximum():
    logits = np.array([1, 5, 3], np.float32)
    assert qwen3.sample(logits, qwen3.Sampling(), np.random.default_rng()) == 1
    assert {qwen3.sample(logits, qwen3.Sampling(2.0, top_k=1), np.random.default_rng(i)) for i in range(20)} == {1}
    assert {qwen3.sample(logits, qwen3.Sampling(2.0, top_p=1e-6), np.random.default_rng(i)) for i in range(20)} == {1}
    assert {qwen3.sample(logits, qwen3.Sampling(2.0, min_p=1.0), np.random.default_rng(i)) for i in range(20)} == {1}


def test_a_token_that_is_not_drawn_counts_for_the_penalties(model):
    """The end of a thought that has used up its budget."""
    draw = qwen3.sampler(model, np.array([1]), qwen3.Sampling(presence_penalty=3), None)
    logits = np.zeros(model.config.vocab_size, np.float32)
    logits[7], logits[9] = 5, 4
    assert [draw(logits), draw(logits)] == [7, 9]
    draw = qwen3.sampler(model, np.array([1]), qwen3.Sampling(presence_penalty=3), None)
    assert [draw(logits, 7), draw(logits)] == [7, 9]


def test_penalties():
    logits = np.array([2, -2, 2, -2, 1], np.float32)
    prompt, answer = np.array([[1, 1, 0, 0, 0], [0, 0, 3, 1, 0]], np.float32)  # how often each token is in them

    def penalized(**values):
        return qwen3.penalize(logits, qwen3.Sampling(**values), prompt, answer).tolist()

    assert penalized() == logits.tolist()
    assert penalized(repetition_penalty=2.0) == [1, -4, 1, -4, 1]
    assert penalized(presence_penalty=0.5) == [2, -2, 1.5, -2.5, 1]
    assert penalized(frequency_penalty=0.5) == [2, -2, 0.5, -2.5, 1]


# ----------------------------------------------------------------------------------------------------------------------
# Generation
# ----------------------------------------------------------------------------------------------------------------------

def test_end_of_text_may_come_first(model):
    prompt = random_ids(5)
    first, second = list(qwen3.generate(model, prompt, 2, temperature=0, eos_token_ids=()))
    assert list(qwen3.generate(model, prompt, 10, temperature=0, eos_token_ids=[first])) == []
    if first != second:
        assert list(qwen3.generate(model, prompt, 10, temperature=0, eos_token_ids=[999, second])) == [first]


def test_generation_ends_with_the_context(tmp_path):
    model = qwen3.load_model(make_random_model(BASE | {"max_position_embeddings": 20}, tmp_path))
    assert len(list(qwen3.generate(model, random_ids(15), eos_token_ids=()))) == 5
    for n in (20, 25):
        with pytest.raises(qwen3.InputError, match="context is 20"):
            qwen3.generate(model, random_ids(n))


def test_seed_repeats_and_differs(model):
    def answer(seed):
        return list(qwen3.generate(model, random_ids(5), 20, temperature=1.0, seed=seed, eos_token_ids=()))
    assert answer(1) == answer(1) != answer(2)


def test_stream_of_text_is_the_whole_text(demo):
    ids = demo.tokenizer.encode("<think>\n日本 é 🙂\n</think>\n\nOK<|im_end|>")
    pieces = list(qwen3.stream_text(demo.tokenizer, iter(ids)))
    assert "".join(pieces) == "<think>\n日本 é 🙂\n</think>\n\nOK"
    assert len(pieces) == len(ids) + 1


# ----------------------------------------------------------------------------------------------------------------------
# The whole
# ----------------------------------------------------------------------------------------------------------------------

def test_a_model_without_tokenizer_gives_the_same_ids(tmp_path):
    path = make_random_model(BASE, tmp_path, "float32")
    whole, prompt = qwen3.load_model(path), random_ids(7)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    with pytest.raises(qwen3.InputError, match="tokenizer.json"):
        qwen3.load_model(path)
    bare = qwen3.load_model(path, tokenizer=False)
    assert np.array_equal(logits_of(bare, prompt), logits_of(whole, prompt))
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        assert list(qwen3.generate(bare, prompt, 9, **options)) == list(qwen3.generate(whole, prompt, 9, **options))
    assert qwen3.generate_batch(bare, [prompt], 9, temperature=0) == [list(
        qwen3.generate(whole, prompt, 9, temperature=0))]
    assert np.array_equal(qwen3.score(bare, prompt), qwen3.score(whole, prompt))
    for use in (lambda: qwen3.chat(bare, "Hello"), lambda: bare.tokenizer.encode("Hello"),
                lambda: bare.tokenizer.decode([1]), lambda: qwen3.Completion(bare, prompt).finish()):
        assert "tokenizer=False" in message_of(use)


def test_an_answer_prints_as_its_text_and_shows_its_state(demo, capsys):
    question = {"model": demo, "messages": "What is the capital of France?", "enable_thinking": False}
    print(qwen3.chat(**question))
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
    reply = qwen3.chat(**question)
    assert repr(reply) == "<Completion: 0 tokens, finish_reason=None, text=''>"  # nothing is computed for it
    first = next(reply)
    assert first in repr(reply) and "finish_reason=None" in repr(reply)
    assert f"{reply}" == str(reply) == reply.text == "The capital of France is Paris."
    assert "finish_reason='stop'" in repr(reply) and f"{len(reply.token_ids)} tokens" in repr(reply)


class Watched(np.ndarray):
    """An array whose every descendant notes its dtype."""
    dtypes: set = set()

    def __array_finalize__(self, parent):
        Watched.dtypes.add(self.dtype)


def test_no_float64_in_the_path(model):
    def watch(value):
        if isinstance(value, dict):
            return {key: watch(item) for key, item in value.items()}
        return [watch(item) for item in value] if isinstance(value, list) else value.view(Watched)

    watched = copy.copy(model)
    object.__setattr__(watched, "weights", watch(model.weights))
    Watched.dtypes.clear()
    for prompt in (random_ids(9), random_ids(1)):
        logits = qwen3.forward(watched, prompt, qwen3.KVCache(model.config), all_logits=True)
        for sampling in (qwen3.Sampling(0.7, 20, 0.8, 0.05, 1.1, 0.5, 0.5), qwen3.Sampling(1.0),
                         qwen3.Sampling(0.7, 0, 0.9)):
            counts = np.ones(len(logits[-1]), np.float32).view(Watched)
            qwen3.sample(qwen3.penalize(logits[-1], sampling, counts, counts), sampling, np.random.default_rng(0))
    assert {dtype for dtype in Watched.dtypes if dtype.kind == "f"} == {np.dtype(np.float32)}
    assert all(table.dtype == np.float32 for table in qwen3.rope_tables(model.config, np.array([3])))
    yarn = copy.copy(model.config)
    object.__setattr__(yarn, "yarn", checkpoint.yarn_config({"factor": 4.0}, 64, Path("config.json")))
    assert qwen3.rope_tables(yarn, np.array([3]))[0].dtype == np.float32


def test_needs_neither_torch_nor_numba():
    code = "import sys, qwen3; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# greedy tokens after "The capital of France is": (hidden size, layers, context) of the checkpoint -> ids
KNOWN_ANSWERS = {
    (4096, 36, 40960): ([12095, 13, 576, 6722, 315, 9625, 374] * 3)[:20],  # Qwen3-8B
}


@pytest.mark.skipif("QWEN3_TEST_MODEL" not in os.environ,
                    reason="QWEN3_TEST_MODEL names no folder with a real checkpoint")
def test_known_answer_of_a_real_checkpoint():
    model = qwen3.load_model(os.environ["QWEN3_TEST_MODEL"])
    shape = (model.config.hidden_size, model.config.num_hidden_layers, model.config.max_position_embeddings)
    if shape not in KNOWN_ANSWERS:
        pytest.skip(f"no known answer for a checkpoint with (hidden size, layers, context) {shape}")
    prompt = model.tokenizer.encode("The capital of France is")
    assert list(qwen3.generate(model, prompt, 20, temperature=0, eos_token_ids=())) == KNOWN_ANSWERS[shape]


def test_candidates_keep_the_ratios_of_the_model():
    """Whatever the filters leave, two tokens' probabilities stand in the ratio exp((a - b) / temperature)."""
    rng = np.random.default_rng(5)
    for temperature in (0.3, 0.7, 1.5):
        for sampling in (qwen3.Sampling(temperature, top_k=9), qwen3.Sampling(temperature, top_p=0.9),
                         qwen3.Sampling(temperature, min_p=0.01), qwen3.Sampling(temperature, 9, 0.9, 0.01)):
            logits = rng.standard_normal(500).astype(np.float32) * 3
            ids, probabilities = qwen3.candidates(logits, sampling)
            assert len(ids) > 1
            x = logits[ids].astype(float) / temperature
            np.testing.assert_allclose(np.log(probabilities / probabilities[0]), x - x[0], atol=1e-4)


def test_the_cache_of_another_model_with_the_same_shapes_is_refused(tmp_path):
    models = [qwen3.load_model(make_random_model(BASE | {"rope_theta": theta}, tmp_path / str(theta)))
              for theta in (10_000, 1_000_000)]
    cache = qwen3.KVCache(models[0].config)
    list(qwen3.generate(models[0], [1, 2, 3], 2, cache=cache))
    with pytest.raises(InputError, match="another model"):
        qwen3.generate(models[1], [1, 2, 3], 2, cache=cache)
