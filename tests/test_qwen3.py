"""qwen3.py: the model, its cache, sampling and generation, against golden values, published formulas, properties."""
import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import qwen3
from configs import BASE, CASES, FRANCE, PARIS, ROOT
from helpers import HUGE_INT, counting, filled_cache, logits_of, message_of, random_ids
from make_random_model import make_random_model
from oracle import oracle
from qwen3_lib.io.rope import stretched

pytestmark = pytest.mark.core
GOLDEN = json.loads((ROOT / "tests" / "golden.json").read_text())
PLAIN = qwen3.Config(1, 1, 1, 1, 1, 1, 8, 1, 1e-6, 1e6, True, 8)


def close(a, b, tolerance=1e-5):
    return np.abs(a - b).max() <= tolerance * b.std()


# ---- Golden values ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("library", [True, False], ids=["with qwen3_lib", "alone"])
@pytest.mark.parametrize("name", CASES)
def test_random_models_match_transformers(name, library, tmp_path, monkeypatch):
    if not library:
        monkeypatch.setattr(qwen3, "LIBRARY", tmp_path / "nothing")
    config, dtype, shards = CASES[name]
    path, golden = make_random_model(config, tmp_path, dtype, shards), GOLDEN["random"][name]
    if not library and "YaRN" in name:
        assert "config.json" in message_of(qwen3.load_model, path)
        return
    model = qwen3.load_model(path)
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


# ---- Components against their sources --------------------------------------------------------------------------------

def test_rms_norm_matches_zhang_2019():
    """x_i / sqrt(mean of x²) * g_i, in float64; Qwen3 adds eps to the mean."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 5, 7)).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    for scale in (1e-4, 1, 1e4):  # at 1e-4 it matters that eps is inside the root
        y = (x * np.float32(scale)).astype(float)
        expected = y / np.sqrt((y ** 2).mean(-1, keepdims=True) + 1e-6) * weight
        assert np.allclose(qwen3.rms_norm(x * np.float32(scale), weight, 1e-6), expected, rtol=1e-5)


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.integers(1, 5),
       st.integers(0, 2**32 - 1))
def test_grouped_query_attention_matches_ainslie_2023(n_kv_heads, group, n, before, d, seed):
    """Head by head, position by position, in float64: each group of query heads looks up one K and V."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n_kv_heads * group, n, d)).astype(np.float32)
    k, v = rng.standard_normal((2, n_kv_heads, before + n, d)).astype(np.float32)
    out = qwen3.attention(q, k, v)
    for head in range(n_kv_heads * group):
        for i in range(n):
            keys, values = k[head // group, :before + i + 1].astype(float), v[head // group, :before + i + 1]
            weights = np.exp(keys @ q[head, i] / math.sqrt(d))
            assert np.allclose(out[head, i], weights @ values / weights.sum(), atol=1e-5)


def test_attention_survives_large_scores():
    q = np.full((1, 1, 4), 1e4, np.float32)
    k = np.stack([np.full(4, 1e4), np.full(4, -1e4)]).astype(np.float32)[None]
    v = np.array([[1.0], [2.0]], np.float32).repeat(4, axis=1)[None]
    assert np.array_equal(qwen3.attention(q, k, v), np.ones((1, 1, 4), np.float32))


@given(st.sampled_from([2, 6, 64, 128]), st.sampled_from([100.0, 1e4, 1e6]), st.integers(0, 3000), st.integers(0, 99))
def test_rope_matches_su_2021(d, theta, position, seed):
    """Equation 15: a block-diagonal matrix of 2 x 2 rotations by m theta_i, where theta_i = theta^(-2 (i - 1) / d).

    The paper's blocks take neighbours; Qwen3's weights are permuted so that x[i] and x[i + d / 2] are one block.
    """
    config = dataclasses.replace(PLAIN, rope_dim=d, rope_theta=theta)
    x = np.random.default_rng(seed).standard_normal(d).astype(np.float32)
    matrix, order = np.zeros((d, d)), np.arange(d).reshape(2, -1).T.reshape(-1)  # 0, d / 2, 1, d / 2 + 1, ...
    for i in range(1, d // 2 + 1):
        angle = position * theta ** (-2 * (i - 1) / d)
        block = slice(2 * i - 2, 2 * i)
        matrix[block, block] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    turned = qwen3.apply_rope(x[None, None], *qwen3.rope_tables(config, np.array([position])))[0, 0]
    rounding = 3 * 2.0**-24 * position  # of the angle: float32 power, reciprocal and product
    assert np.allclose(turned[order], matrix @ x[order], atol=1e-5 + 5 * rounding)  # no pair is longer than 5


def test_swiglu_matches_shazeer_2020():
    """FFN(x) = (Swish_1(x W) * x V) W2 with Swish_1(z) = z sigmoid(z), in float64."""
    rng = np.random.default_rng(0)
    x, (w, v), w2 = rng.standard_normal((2, 5, 7)), rng.standard_normal((2, 7, 11)), rng.standard_normal((11, 7))
    gate = x @ w
    expected = (gate / (1 + np.exp(-gate)) * (x @ v)) @ w2
    ours = qwen3.swiglu(*(a.astype(np.float32) for a in (x, w.T, v.T, w2.T)))  # stored as [outputs, inputs]
    assert np.allclose(ours, expected, atol=1e-4)
    eye = np.eye(3, dtype=np.float32)
    with np.errstate(over="ignore"):
        extreme = qwen3.swiglu(np.array([[-200.0, 200.0, 0.0]], np.float32), eye, eye, eye)
    assert np.allclose(extreme, [[0, 40000, 0]])


def test_the_whole_matches_the_papers_in_float64(model):
    ids = random_ids(100)
    assert close(logits_of(model, ids), oracle(model, ids).logits, 2e-5)


# ---- The cache and forward -------------------------------------------------------------------------------------------

@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.data())
def test_any_split_gives_the_same_logits(model, sizes, data):
    """Prefill in one go, in several calls on a warm cache, token by token, and after a cut."""
    ids = random_ids(sum(sizes))
    whole, cache, parts, start = logits_of(model, ids), qwen3.KVCache(model.config), [], 0
    for size in sizes:
        parts.append(qwen3.forward(model, ids[start:start + size], cache, all_logits=True))
        start += size
    assert close(np.concatenate(parts), whole)
    cache.truncate(kept := data.draw(st.integers(0, len(ids))))
    assert cache.length == kept and cache.common_prefix(np.array(ids)) == kept
    assert "can't be cut" in message_of(cache.truncate, kept + 1)
    for i in range(kept, len(ids)):
        assert close(qwen3.forward(model, [ids[i]], cache), whole[i])


@pytest.mark.parametrize("room", [0, 1, 2])
def test_an_answer_ends_where_its_cache_does(model, room):
    """The last token needs no place in the cache: a cache as long as the prompt has room for one."""
    cache = qwen3.KVCache(model.config, 5 + room)
    sequence = qwen3.Sequence(model, [1, 2, 3, 4, 5], eos_token_ids=())
    assert len([*qwen3.run(model, sequence, sequence.resume(cache))]) == max(room, 1)
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize("n", [6, 7, 8, 13, 14, 15, 50])
def test_chunks_inside_forward(model, monkeypatch, n):
    """Whatever goes through the layers together, the logits are the same; one row without all_logits."""
    ids = random_ids(n)
    whole = logits_of(model, ids)
    for changes in ({"CHUNK": 7}, {"CHUNK": 7, "QUERIES": 3}, {"MAX_SCORES": 4 * 25}, {"MAX_SCORES": 1}):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(qwen3, name, value)
            assert close(logits_of(model, ids), whole)
            assert close(qwen3.forward(model, ids, qwen3.KVCache(model.config)), whole[-1])


def test_cache_grows_by_a_quarter_up_to_its_limit(model):
    cache = qwen3.KVCache(model.config, 1500)
    capacities = [cache.k.shape[2] for _ in range(15) if qwen3.forward(model, random_ids(100), cache) is not None]
    assert sorted(set(capacities)) == [189, 314, 564, 814, 1189, 1500]
    assert "1501 positions" in message_of(qwen3.forward, model, [1], cache)
    assert cache.length == 1500  # what was refused has changed nothing
    for length in (-1, 1.5):
        message_of(cache.truncate, length)
    for length in (0, -1):
        message_of(qwen3.KVCache, model.config, length)


def test_the_cache_of_another_model_is_refused(tmp_path):
    """Even one of the same shapes: its keys are turned by other angles."""
    models = [qwen3.load_model(make_random_model(BASE | {"rope_theta": theta}, tmp_path / str(theta)))
              for theta in (10_000, 1_000_000)]
    cache = filled_cache(models[0], [1, 2, 3])
    for call in (qwen3.generate, qwen3.forward):
        assert "another model" in message_of(call, models[1], [1, 2, 3], cache=cache)
    assert cache.length == 3


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

    watched = dataclasses.replace(model, weights=watch(model.weights))
    Watched.dtypes.clear()
    for prompt in (random_ids(9), random_ids(1)):
        logits = qwen3.forward(watched, prompt, qwen3.KVCache(model.config), all_logits=True)
        for sampling in (qwen3.Sampling(0.7, 20, 1.0, 0.05, 1.1, 0.5, 0.5), qwen3.Sampling(1.0)):
            qwen3.sample(logits[-1], sampling, np.random.default_rng(0), [1, 2], [3, 3])
    assert {dtype for dtype in Watched.dtypes if dtype.kind == "f"} == {np.dtype(np.float32)}
    for config in (model.config, stretched(model.config, 4)):
        assert all(table.dtype == np.float32 for table in qwen3.rope_tables(config, np.array([3])))


# ---- Sampling --------------------------------------------------------------------------------------------------------

def plain_candidates(logits, sampling):
    """({token: probability} by definition, token by token in float64; how near rounding comes to another choice)."""
    x = {token: float(value) / sampling.temperature for token, value in enumerate(logits)}
    order = sorted(x, key=lambda token: -x[token])
    if sampling.top_k:
        order = [token for token in order if x[token] >= x[order[min(sampling.top_k, len(order)) - 1]]]
    weights = {token: math.exp(x[token] - x[order[0]]) for token in order}
    total, before, margin, kept = math.fsum(weights.values()), 0.0, 1.0, []
    for token in order:
        if sampling.top_p < 1:
            margin = min(margin, abs(before / total - sampling.top_p))
            if before / total >= sampling.top_p:
                break
        before += weights[token]
        kept.append(token)
    if sampling.min_p:
        margin = min(margin, *(abs(weights[token] / sampling.min_p - 1) for token in kept[1:] or kept))
        kept = [token for token in kept if weights[token] >= sampling.min_p or token == order[0]]
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}, margin


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000) | st.just(20_000), st.floats(0.1, 3), st.integers(0, 100),
       st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1]), st.sampled_from([0, 0.001, 0.01, 0.2, 0.9]),
       st.integers(0, 2**32 - 1))
def test_candidates_are_as_defined(n, temperature, top_k, top_p, min_p, seed):
    """Fan 2018 (top-k), Holtzman 2019 (top-p), Nguyen 2024 (min-p), one after the other."""
    logits = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 4
    sampling = qwen3.Sampling(temperature, top_k, top_p, min_p)
    expected, margin = plain_candidates(logits, sampling)
    assume(margin > 1e-5)  # else rounding decides
    ids, probabilities = qwen3.candidates(logits, sampling)
    assert probabilities.dtype == np.float32
    assert dict(zip(ids.tolist(), probabilities.tolist())) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("top_p, at_least", [(0.5, 1025), (0.9, 4000), (0.999, 20_000)])
def test_a_nucleus_of_many_unequal_tokens(top_p, at_least, seed):
    """Flat distributions: neither a fixed number of candidates nor a running sum in float32 would find these."""
    logits = np.random.default_rng(seed).uniform(0, 3, 30_000).astype(np.float32)
    expected, margin = plain_candidates(logits, qwen3.Sampling(1.0, 0, top_p))
    ids, probabilities = qwen3.candidates(logits, qwen3.Sampling(1.0, 0, top_p))
    assert len(expected) > at_least
    assert {*ids.tolist()} ^ {*expected} <= ({*list(expected)[-2:], *ids[-2:].tolist()} if margin < 1e-7 else set())
    assert np.allclose(probabilities, [expected.get(token, 0) for token in ids.tolist()], rtol=1e-3)


def test_equal_tokens():
    """Those that equal the k-th are candidates, too, as in transformers; top-p takes only as many as it needs."""
    logits = np.array([0, 1, 3, 1, 1, 0], np.float32)
    assert sorted(qwen3.candidates(logits, qwen3.Sampling(1.0, top_k=2))[0]) == [1, 2, 3, 4]
    assert len(qwen3.candidates(np.zeros(4, np.float32), qwen3.Sampling(1.0, top_p=0.5))[0]) == 2
    ids, _ = qwen3.candidates(np.zeros(151_936, np.float32), qwen3.Sampling(1.0, top_p=0.9))
    assert len(ids) == pytest.approx(0.9 * 151_936, rel=1e-4)


def test_the_most_likely_of_nearly_equal_tokens_is_always_a_candidate():
    """Their probabilities are equal in float64, and top-p takes one of the two; min-p = 1 leaves the largest logit."""
    logits = np.array([0, np.nextafter(np.float32(0), np.float32(1))])
    assert qwen3.candidates(logits, qwen3.Sampling(1.0, top_p=0.4, min_p=1))[0].tolist() == [1]


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 40), st.floats(0.3, 2), st.integers(0, 2**32 - 1))
def test_samples_follow_the_distribution(n, temperature, seed):
    """Chi-square over 2000 draws; its 1 - 1e-9 quantile, so that it does not fail by chance."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(n).astype(np.float32) * 2
    expected = np.zeros(n)
    for token, probability in plain_candidates(logits, qwen3.Sampling(temperature))[0].items():
        expected[token] = 2000 * probability
    counts = np.bincount([qwen3.sample(logits, qwen3.Sampling(temperature), rng) for _ in range(2000)], minlength=n)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    chi_square = ((observed - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    freedom = max(len(observed) - 1, 1)
    quantile = freedom * (1 - 2 / (9 * freedom) + 6 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert chi_square < quantile + 10


@pytest.mark.parametrize("share, expected", [(0.5, 200), (1e-5, 0.004)])
def test_small_probabilities_come_up_as_often_as_they_should(share, expected):
    """A share of the probability is spread over 100,000 tokens, too thinly for a running sum in float32."""
    logits = np.zeros(100_001, np.float32)
    logits[0] = math.log(100_000 * (1 - share) / share)
    rng = np.random.default_rng(0)
    others = sum(qwen3.sample(logits, qwen3.Sampling(1.0), rng) != 0 for _ in range(400))
    assert abs(others - expected) <= 6 * math.sqrt(expected) + 1


def test_greedy_takes_the_maximum():
    logits = np.array([1, 5, 3], np.float32)
    for sampling in (qwen3.Sampling(), qwen3.Sampling(1e-50), qwen3.Sampling(2.0, top_k=1),
                     qwen3.Sampling(2.0, top_p=1e-6),
                     qwen3.Sampling(2.0, top_p=0), qwen3.Sampling(2.0, min_p=1.0)):
        assert {qwen3.sample(logits, sampling, np.random.default_rng(i)) for i in range(20)} == {1}


def test_penalties():
    """Keskar 2019: scores of tokens that have been there are divided; negative ones are multiplied, as everywhere."""
    logits = np.array([0.5, -2, 2, -2, 1], np.float32)
    prompt, answer = [1, 0, 0, 0], [2, 3, 2, 2]

    def penalized(**values):
        return qwen3.penalize(logits, qwen3.Sampling(**values), prompt, answer).tolist()

    assert penalized() == logits.tolist()
    assert penalized(repetition_penalty=2.0) == [0.25, -4, 1, -4, 1]
    assert penalized(presence_penalty=0.5) == [0.5, -2, 1.5, -2.5, 1]
    assert penalized(frequency_penalty=0.5) == [0.5, -2, 0.5, -2.5, 1]
    assert qwen3.sample(logits, qwen3.Sampling(presence_penalty=1.5), np.random.default_rng(), [0], [2]) == 4
    assert logits.tolist() == [0.5, -2, 2, -2, 1]  # the caller's are left as they are


# ---- Generation ------------------------------------------------------------------------------------------------------

def test_end_of_text_may_come_first(model):
    prompt = random_ids(5)
    answer = list(qwen3.generate(model, prompt, 20, temperature=0, eos_token_ids=()))
    for end in {*answer}:
        shorter = list(qwen3.generate(model, prompt, 20, temperature=0, eos_token_ids=[999, end]))
        assert shorter == answer[:answer.index(end)]
    assert len({*answer}) > 1


def test_generation_ends_with_the_context(tmp_path):
    model = qwen3.load_model(make_random_model(BASE | {"max_position_embeddings": 20}, tmp_path))
    assert len(list(qwen3.generate(model, random_ids(15), eos_token_ids=()))) == 5
    small = qwen3.KVCache(model.config, 17)
    assert len(list(qwen3.generate(model, random_ids(15), 50, eos_token_ids=(), cache=small))) == 2
    for n in (20, 25):
        assert "context is 20" in message_of(qwen3.generate, model, random_ids(n))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=4))
def test_a_cache_used_again_gives_the_same_answers(model, turns):
    """Prompts that share a beginning with what came before; some answers are given up half-way."""
    cache, before = qwen3.KVCache(model.config), []
    for shared, own, taken in turns:
        prompt = before[:shared] + random_ids(own, seed=shared)
        tokens = qwen3.generate(model, prompt, 9, temperature=0, eos_token_ids=(), cache=cache)
        answer = [token for token, _ in zip(tokens, range(taken))]
        assert answer == list(qwen3.generate(model, prompt, 9, temperature=0, eos_token_ids=()))[:taken]
        assert cache.token_ids[:cache.length].tolist() == (prompt + answer)[:cache.length]
        before = prompt + answer


def test_only_new_tokens_are_computed(model):
    """The prompt's last token is always computed again, because its logits are wanted."""
    watched, counts = counting(model)
    cache, prompt = qwen3.KVCache(model.config), random_ids(30)
    for ids in (prompt, prompt, prompt[:20], prompt[:20] + [7, 8]):
        list(qwen3.generate(watched, ids, 2, temperature=0, eos_token_ids=(), cache=cache))
    assert counts == [30, 1, 1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("n", [5, 9])
def test_a_cache_serves_one_answer_at_a_time(model, n):
    """The one that came later has it; the earlier one stops, even if both are equally long."""
    cache, options = qwen3.KVCache(model.config), {"temperature": 0, "eos_token_ids": ()}
    first = qwen3.generate(model, random_ids(9), 9, cache=cache, **options)
    next(first)
    second = qwen3.generate(model, random_ids(n, seed=1), 9, cache=cache, **options)
    begun = next(second)
    assert "another answer" in message_of(next, first)
    assert [begun, *second] == list(qwen3.generate(model, random_ids(n, seed=1), 9, **options))


def test_logits_that_are_not_finite_are_refused(model):
    for value in (math.nan, math.inf, 3e38):
        broken = dataclasses.replace(model, weights=model.weights | {"norm": np.full(32, value, np.float32)})
        assert "not finite" in message_of(next, qwen3.generate(broken, [0, 1, 2]))


BAD_IDS = {
    "empty": [], "empty array": np.zeros(0, np.int64), "empty row": [[]], "out of range": [1, 320, 2],
    "beyond 64 bits": [2**80], "huge": [HUGE_INT], "negative": [1, -1], "float": [1.0, 2.0],
    "float array": np.ones(3, np.float32), "nan": [math.nan], "bool": [True, False], "strings": ["a", "b"],
    "string": "abc", "bytes": b"abc", "none": None, "nones": [None], "a number": 5, "two rows": [[1, 2], [3, 4]],
    "3-d": np.zeros((1, 2, 3), np.int64), "deeply ragged": [1, [2, [3]]], "a set": {1, 2}}


@pytest.mark.parametrize("case", BAD_IDS)
def test_token_ids_that_are_refused(model, case):
    """forward and generate refuse the same ids, before anything is computed."""
    cache = qwen3.KVCache(model.config)
    message_of(qwen3.forward, model, BAD_IDS[case], cache)
    assert cache.length == 0
    message_of(qwen3.generate, model, BAD_IDS[case])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint64])
def test_integers_of_any_width_are_ids(model, dtype):
    expected = list(qwen3.generate(model, [1, 2, 100], 4, temperature=0))
    assert list(qwen3.generate(model, np.array([1, 2, 100], dtype), 4, temperature=0)) == expected


BAD_ARGUMENTS = {
    "max_new_tokens": (0, -1, 1.5, "5", math.nan), "temperature": (-1, math.nan, math.inf, "1", True, HUGE_INT),
    "top_k": (-1, 2.5, math.nan, "5"), "top_p": (-1, 1.01, math.nan, "1"), "min_p": (-0.1, 1.01, math.nan, "0"),
    "repetition_penalty": (0, -1, math.inf, "x"), "presence_penalty": (math.nan, math.inf, "x"),
    "frequency_penalty": (math.nan, math.inf, "x"), "seed": (-1, 1.5, "x"), "eos_token_ids": (["x"], [1.5]),
    "temprature": (1,)}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_are_refused(model, name):
    for value in BAD_ARGUMENTS[name]:
        message = message_of(qwen3.generate, model, [1, 2], **{name: value})
        assert name in message or name == "eos_token_ids" and "end-of-text id" in message


# ---- Conversation, and the whole -------------------------------------------------------------------------------------

@pytest.mark.parametrize("library", [True, False], ids=["with qwen3_lib", "alone"])
def test_chat_takes_a_text_a_message_or_a_list(demo, monkeypatch, tmp_path, library):
    if not library:
        monkeypatch.setattr(qwen3, "LIBRARY", tmp_path / "nothing")
    message, options = {"role": "user", "content": FRANCE}, {"enable_thinking": False, "temperature": 0}
    for messages in (FRANCE, message, [message], [message | {"content": [{"type": "text", "text": FRANCE}]}]):
        assert "".join(qwen3.chat(demo, messages, **options)) == PARIS.strip()
    prompts = []
    monkeypatch.setattr(type(demo.tokenizer), "encode",
                        lambda self, text, add_special_tokens: prompts.append(text) or [1])
    qwen3.chat(demo, message, system="Be brief.", **options)
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" in prompts[-1]
    assert "temprature" in message_of(qwen3.chat, demo, "Hi", temprature=1)


def test_default_sampling(model):
    """Qwen's values for answers without thinking, where the model samples at all."""
    thinking = dataclasses.replace(model, sampling=qwen3.Sampling(0.6, 20, 0.95, repetition_penalty=1.1))
    assert qwen3.default_sampling(thinking, None) == qwen3.default_sampling(thinking, True) == thinking.sampling
    assert qwen3.default_sampling(thinking, False) == qwen3.Sampling(0.7, 20, 0.8, 0, 1.1)
    greedy = dataclasses.replace(model, sampling=qwen3.Sampling())
    assert qwen3.default_sampling(greedy, False) == qwen3.Sampling()


def test_a_model_without_tokenizer_gives_the_same_ids(tmp_path):
    path = make_random_model(BASE, tmp_path, "float32")
    whole, prompt = qwen3.load_model(path), random_ids(7)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    assert "tokenizer.json" in message_of(qwen3.load_model, path)
    bare = qwen3.load_model(path, tokenizer=False)
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        assert list(qwen3.generate(bare, prompt, 9, **options)) == list(qwen3.generate(whole, prompt, 9, **options))
    assert len(repr(whole)) < 100


def test_needs_neither_torch_nor_numba():
    code = "import sys, qwen3; print([m for m in ('torch', 'transformers', 'numba', 'tqdm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
