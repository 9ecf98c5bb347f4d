"""qwen3_lib/kernels/layers.py: each kernel against NumPy."""
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qwen3
from packed import FORMATS, FromPython, groups_of, packed_vectors, reference, stored, to_bf16, unpacked
from qwen3_lib.kernels import intrinsics, layers, quantize
from qwen3_lib.kernels.build import kernel
from qwen3_lib.kernels.cpu import LONG, PAIRS
from qwen3_lib.kernels.dense import DENSE_STEPS
from qwen3_lib.kernels.fields import FIELD_NAMES
from qwen3_lib.kernels.intrinsics import SMALLEST_NUMBER
from qwen3_lib.kernels.layout import (APART, BF16, BLOCK, F16, F32, INT4, INT5, INT8, JOB, KV8, ROUNDED,
                                      VECTORS, own_space, padded, address_table, vector_size)
from qwen3_lib.kernels.packing import matrix_rows
from qwen3_lib.kernels.products import functions_for
from qwen3_lib.kernels.team import Team

pytestmark = pytest.mark.core
SIZES = [(0, 64), (1, 1), (3, 31), (4, 32), (5, 33), (32, 96), (9, 256), (2, 300), (33, 64), (70, 544), (13, 1024),
         (161, 513), (40, 3100)]
TEAM = Team(2)
kernels, quantizing = FromPython(layers), FromPython(quantize)


def multiplied(weight, xs):
    """(products with vectors xs [n, columns], these vectors as they were multiplied), by the kernels as they are kept.

    The model has no layers: its norm makes the vectors factors, and its head is the weight.
    """
    (n, d), width, ones = xs.shape, padded(xs.shape[1], 64), np.ones(xs.shape[1], np.float32)
    out = np.full((n + 2, padded(weight.rows, 32)), np.nan, np.float32)
    h, packed = np.full((n, width + APART), 7, np.float32), np.full((n, vector_size(width)), 7, np.uint8)
    arrays = {"norm": ones, "head": np.array([weight]), "eps": np.zeros(1), "x": xs, "wanted": np.arange(n),
              "logits": out[1:-1], "h": h, "packed": packed, "own": np.zeros((2, own_space(0, 0, width)), np.float32),
              "products": functions_for(((weight.form, n),))}
    fields = address_table(tuple(arrays.get(name, np.zeros(0)) for name in FIELD_NAMES))
    TEAM.run(kernel(*DENSE_STEPS), np.array([(0, 0, 0, 0, fields.ctypes.data, 1)], JOB))
    assert np.isnan(out[[0, -1]]).all()  # nothing is written beyond
    factors = h[:, :width]
    if weight.form == ROUNDED and PAIRS:
        factors = from_bf16(factors.reshape(n, -1, 32)[..., :16].copy().view(np.uint16)).reshape(n, width)
    elif weight.form in (BF16, ROUNDED):
        factors = factors.reshape(n, -1, 2, 16).swapaxes(2, 3).reshape(n, width)  # even_first
    np.testing.assert_allclose(factors[:, :d], qwen3.rms_norm(xs, ones, 0), rtol=1e-5 + (weight.form == ROUNDED) / 256)
    if weight.form >= INT8:  # the vector is rounded to 8 bits, too: compare with what it was rounded to
        groups = groups_of(packed)
        rounded = groups["bytes"] * groups["scale"][..., None]
        assert (abs(rounded - factors.reshape(n, -1, 32)) <= groups["scale"][..., None]).all()
        factors = rounded.reshape(n, width)
    return out[1:-1, :weight.rows], factors[:, :d]


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows, n", SIZES)
def test_linear(name, rows, n):
    """Of 1 to 31 vectors together: the products that NumPy gives, to the last bit those of each vector alone."""
    rng = np.random.default_rng(rows * 1000 + n)
    data, weight = stored(rng.standard_normal((rows, n)).astype(np.float32), FORMATS[name])
    w = reference(data, weight)
    if rows:
        some = rng.integers(0, rows, min(2 * rows, 20))
        for ids in (some, some[:1]):
            found = matrix_rows(np.array([weight]), ids)
            np.testing.assert_array_equal(found, w[ids])
            found[:] = np.nan  # the caller's own: the products below don't change
    xs = rng.standard_normal((31, n)).astype(np.float32)
    singly = {t: multiplied(weight, xs[t:t + 1])[0][0] for t in (0, 2, 5, 7, 8, 23, 30)}
    for n_vectors in (3, 8, 9, 31):
        found, factors = multiplied(weight, xs[:n_vectors])
        np.testing.assert_allclose(found, factors.astype(np.float64) @ w.T.astype(np.float64), atol=8e-5 * np.sqrt(n))
        assert all(np.array_equal(found[t], alone) for t, alone in singly.items() if t < n_vectors)


@pytest.mark.parametrize("n", [96, 4160])
def test_linear_of_a_long_prompt(n):
    """So many vectors that rows of bf16 are transposed before, at least 32 at a time: the bits of each vector alone."""
    rng = np.random.default_rng(n)
    data, weight = stored(rng.standard_normal((70, n)).astype(np.float32), ROUNDED)
    xs = rng.standard_normal((LONG + 1, n)).astype(np.float32)
    found, factors = multiplied(weight, xs)
    expected = factors.astype(np.float64) @ reference(data, weight).T.astype(np.float64)
    np.testing.assert_allclose(found, expected, atol=8e-5 * np.sqrt(n))
    for t in (0, LONG):
        np.testing.assert_array_equal(found[t], multiplied(weight, xs[t:t + 1])[0][0])


def test_exp():
    x = np.linspace(-87, 0, 20001).astype(np.float32)
    ours = np.array([kernels.exp(value) for value in x])
    expected = np.exp(x.astype(np.float64))
    assert (abs(ours - expected) <= expected * (4e-7 + 8e-8 * abs(x))).all()
    assert np.isnan(kernels.exp(np.float32(np.nan))) and kernels.exp(np.float32(-np.inf)) < 1e-37


@pytest.mark.parametrize("row", [intrinsics.exp_until, intrinsics.rounded_exp_until])
def test_a_row_of_the_softmax(row):
    """exp of each score by itself, 16 partial sums added in pairs; zeros up to a multiple of 32; then rounded."""
    rng, function = np.random.default_rng(0), numba.njit(lambda x, n, largest: row(x, n, largest))
    for n in (1, 15, 16, 31, 32, 33, 100, 256):
        x, end = rng.standard_normal(256).astype(np.float32) * np.float32(30), padded(n, 32)
        expected, sums = np.zeros(end, np.float32), np.zeros(16, np.float32)
        expected[:n] = [kernels.exp(value - x[:n].max()) for value in x[:n]]
        for some in expected.reshape(-1, 16):
            sums += some
        for apart in (8, 4, 2, 1):
            sums = sums[:apart] + sums[apart:]
        assert function(x.ctypes.data, n, x[:n].max()) == sums[0]
        if row is intrinsics.rounded_exp_until:
            expected = to_bf16(expected)
            x = from_bf16(x.view(np.uint16)) if PAIRS else x
        np.testing.assert_array_equal(x[:end], expected)


def test_norm_rope_silu():
    rng = np.random.default_rng(0)
    for d in (2, 6, 24, 100, 128):
        x, weight = rng.standard_normal((2, d)).astype(np.float32)
        out = np.empty_like(x)
        kernels.rms_norm(x, weight, 1e-6, out)
        np.testing.assert_allclose(out, qwen3.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)
        cos, sin = rng.standard_normal((2, d // 2)).astype(np.float32)
        expected = qwen3.apply_rope(x[None, None], cos, sin)[0, 0]
        kernels.apply_rope(x, cos, sin)
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
    gate, up = np.array([-200, -20, -1.5, 0, 0.3, 4, 90] * 3, np.float32), rng.standard_normal(21).astype(np.float32)
    expected = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    kernels.silu_times(gate, up)
    np.testing.assert_allclose(gate, expected, rtol=1e-5, atol=1e-30)


def test_largest():
    rng = np.random.default_rng(0)
    for n in (1, 5, 32, 100):
        for x in (rng.standard_normal(n), -abs(rng.standard_normal(n)), np.zeros(n), np.full(n, -np.inf), -np.zeros(n)):
            x = x.astype(np.float32)
            assert kernels.largest_of(x) == x.max()
            x[rng.integers(n)] = np.inf
            assert kernels.largest_of(x) == np.inf
            x[rng.integers(n)] = np.nan
            assert np.isnan(kernels.largest_of(x))


@pytest.mark.parametrize("size", [0, 1e-44, 2e-36, 9e-22, 3e-21, 1, 1e30])
def test_vectors_of_any_size_are_packed(size):
    x = np.random.default_rng(0).uniform(0.5, 1, 64).astype(np.float32) * np.float32(size)
    packed = np.empty(vector_size(64), np.uint8)
    kernels.ready(x, 64, INT8, packed, 0, 64)
    groups = groups_of(packed)
    np.testing.assert_array_equal(packed_vectors(groups["bytes"], groups["scale"]), packed)
    found = (groups["bytes"] * groups["scale"][:, None]).ravel()
    np.testing.assert_allclose(found, x, atol=size / 200 + SMALLEST_NUMBER, rtol=0)
    for broken in (np.nan, -np.nan, np.inf, -np.inf):
        x[40] = broken
        kernels.ready(x, 64, INT8, packed, 0, 64)
        assert np.isnan(groups["scale"]).tolist() == [False, True]


def rounded(x):
    """x float32 [n], a multiple of 64, as vectors are rounded for weights of bf16."""
    x = x.copy()
    kernels.for_bf16(x, ROUNDED)
    if PAIRS:
        return from_bf16(x.reshape(-1, 32)[:, :16].copy().view(np.uint16)).ravel()
    return x.reshape(-1, 2, 16).swapaxes(1, 2).ravel()


def test_bfloat16_is_the_nearest():
    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(0, 2**32, 4096), np.arange(2**15, 2**31, 9 * 2**16), [0x7F800000, 0xFF800000]])
    x = bits.astype(np.uint32).view(np.float32)
    x = x[abs(x) < 3.38e38]  # what is rounded up to infinity is left out
    x = np.pad(x, (0, -len(x) % 32))
    stored = np.empty(len(x), np.uint16)
    kernels.store_kv(stored, BF16, x)
    np.testing.assert_array_equal(rounded(x), from_bf16(stored))
    lower = x.view(np.uint32) >> 16 << 16
    below, above = (bits.astype(np.uint32).view(np.float32).astype(np.float64) for bits in (lower, lower + 2**16))
    is_even, nearer = (lower >> 16) % 2 == 0, abs(above - x) - abs(x - below)
    expected = np.where((nearer > 0) | is_even & (nearer == 0), below, above)
    np.testing.assert_array_equal(from_bf16(stored), expected)
    special = np.array([np.inf, -np.inf] + [0] * 30, np.float32)
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF], np.uint32).view(np.float32)
    special[2:8] = nan
    kernels.store_kv(stored[:32], BF16, special)
    np.testing.assert_array_equal(from_bf16(stored[:32]), special)
    np.testing.assert_array_equal(rounded(special), special)


# ---- Weights in packed formats ---------------------------------------------------------------------------------------

PACKED = {"int8": INT8, "int5": INT5, "int4": INT4}


def best_of_many(groups: np.ndarray, form: int) -> np.ndarray:
    """The least squared error of groups [n, 32] over many scales and all zeros: what the kernel's search looks for."""
    low, high = (1, 255) if form == INT8 else (0, 15 if form == INT4 else 31)
    zeros = [128] if form == INT8 else (6 + np.arange(16) / 4) * (1 if form == INT4 else 2)
    least = np.full(len(groups), np.inf)
    for zero in zeros:
        size = np.maximum(groups.max(axis=1) / (high - zero), groups.min(axis=1) / (low - zero))
        for factor in np.linspace(0.6, 1.1, 50):
            scale = (size * factor)[:, None]
            errors = (np.clip(np.rint(groups / scale + zero), low, high) - zero) * scale - groups
            least = np.minimum(least, (errors ** 2).sum(axis=1))
    return least


@pytest.mark.parametrize("spread", [3, 0.02, 1e-6])
@pytest.mark.parametrize("form", PACKED)
def test_scales_and_zeros_err_least(form, spread):
    groups = np.random.default_rng(0).normal(0, spread, (1024, 32))
    found = reference(*stored(groups.reshape(32, -1).astype(np.float32), PACKED[form])).reshape(-1, 32)
    ours, best = ((found - groups) ** 2).sum(), best_of_many(groups, PACKED[form]).sum()
    assert ours < 1.1 * best


@pytest.mark.parametrize("form", PACKED)
def test_weights_are_rounded_with_the_scale_that_is_stored(form):
    """Each weight becomes the nearest of the numbers that the stored scale and zero allow."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((32, 512)) * np.exp(rng.uniform(-8, 8, (32, 1)))).astype(np.float32)
    whole, scales, zeros, _ = unpacked(stored(w, PACKED[form])[0], PACKED[form])
    places = w / np.repeat(scales, 32, axis=1) + np.repeat(zeros, 32, axis=1)
    low, high = (1, 255) if form == "int8" else (0, 15 if form == "int4" else 31)
    assert (abs(whole - np.clip(places, low, high)) <= 0.5 + 1e-4).all()


RMS = {"int8": 0.006, "int5": 0.03, "int4": 0.06}  # the bounds that layout.py states


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.floats(-23, 12), st.floats(0, 12), st.floats(0, 1), st.sampled_from(sorted(PACKED)))
def test_errors_are_bounded(seed, log_size, log_spread, negative, form):
    """By a share of the group's largest weight, whatever the group's shape: one sign, one large weight, all alike."""
    rng = np.random.default_rng(seed)
    sign = np.where(rng.random((32, 64)) < negative, -1, 1)
    w = (np.exp(log_size + rng.uniform(-log_spread, 0, (32, 64))) * sign).astype(np.float32)
    found = reference(*stored(w, PACKED[form]))
    groups, errors = w.reshape(32, 2, 32), (found - w.astype(np.float64)).reshape(32, 2, 32)
    assert (np.sqrt((errors**2).mean(axis=2)) <= RMS[form] * abs(groups).max(axis=2)).all()


@pytest.mark.parametrize("size", [0, 1e-10, -1e-10, 1e-5, -3e-5, 7e-3, 60000])
@pytest.mark.parametrize("form", PACKED)
def test_constant_weights_keep_their_digits(form, size):
    found = reference(*stored(np.full((32, 64), size, np.float32), PACKED[form]))
    np.testing.assert_allclose(found, size, rtol=0.008)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-16])
def test_weights_too_small_for_any_scale_become_small_ones(form, size):
    found = reference(*stored(np.full((32, 64), size, np.float32), PACKED[form]))
    assert np.isfinite(found).all() and (abs(found) <= 2e-12).all()


@pytest.mark.parametrize("form", PACKED)
def test_what_lies_behind_a_row_is_not_packed(form):
    """The next row lies there. Zeros in its place give the same bytes."""
    wide = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    wide[1::2] *= 1000
    wide[:, 40:] = 0
    np.testing.assert_array_equal(stored(wide[:, :40].copy(), PACKED[form])[0], stored(wide, PACKED[form])[0])


# ---- Vectors ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rest", [7, 1e30, np.nan, np.inf])
@pytest.mark.parametrize("n", [1, 31, 33, 63, 64, 65, 100])
def test_what_lies_behind_a_vector_is_not_packed(n, rest):
    """The room behind it, up to a whole number of groups, counts as zeros: not for the scale, and not for the sum."""
    width = padded(n, 64)
    x, clean = np.full(width, rest, np.float32), np.zeros(width, np.float32)
    x[:n] = clean[:n] = np.random.default_rng(n).standard_normal(n)
    packed, expected = np.full((2, vector_size(width)), 99, np.uint8)
    kernels.ready(x, n, INT8, packed, 0, n)
    kernels.ready(clean, width, INT8, expected, 0, width)
    np.testing.assert_array_equal(packed, expected)
    assert not groups_of(packed)["bytes"].ravel()[n:].any()


# ---- Rows of the cache -----------------------------------------------------------------------------------------------

FORMS = {"f32": (F32, 2, 1e-6), "bf16": (BF16, 1, 1e-2), "rounded": (ROUNDED, 1, 1e-2), "f16": (F16, 1, 1e-3),
         "int8": (KV8, 0.5 + 1 / 32, 4e-3)}  # (format, uint16 per number, error)


def cache_of(values: np.ndarray, name: str) -> np.ndarray:
    """Rows of values [n, d] as the cache keeps them, in d padded to a multiple of 32 numbers."""
    form, units, _ = FORMS[name]
    size = int(padded(values.shape[1], 32) * units)
    cache = np.full((len(values), size), 0x7E00, np.uint16)  # NaN, where nothing is written
    for stored, row in zip(cache, values):
        kernels.store_kv(stored, form, row)
    return cache


def expanded(cache: np.ndarray, name: str) -> np.ndarray:
    """Rows of the cache as numbers [n, width], by NumPy from the format's description."""
    if name == "f32":
        return cache.view(np.float32).astype(np.float64)
    if name in ("bf16", "rounded"):
        return (cache.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name == "f16":
        return cache.view(np.float16).astype(np.float64)
    width = cache.shape[1] * 32 // 17
    scales = cache[:, width // 2:].copy().view(np.float16).astype(np.float64)
    return cache[:, :width // 2].copy().view(np.int8) * np.repeat(scales, 32, axis=1)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("d", [2, 6, 24, 32, 33, 64, 128])
def test_rows_of_the_cache(name, d):
    values = np.random.default_rng(0).standard_normal((5, d)).astype(np.float32)
    out = expanded(cache_of(values, name), name)
    np.testing.assert_allclose(out[:, :d], values, atol=FORMS[name][2] * 4 * (name != "f32"), rtol=0)
    assert not out[:, d:].any()


def test_rows_of_f16_are_numpys():
    """All float16 numbers, subnormals included, and what lies halfway between two."""
    numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, numbers * np.float32(1.0001)])
    x = np.pad(x[x < 65520], (0, -len(x[x < 65520]) % 32))
    for values in (x, -x):
        stored_ = np.empty(len(x), np.uint16)
        kernels.store_kv(stored_, F16, values)
        np.testing.assert_array_equal(stored_, values.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("value", [65504.0, 65519.0, 65520.0, 1e6, 9e6, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_too_large_for_the_cache_is_not_infinite_but_nan(name, value, sign):
    """Infinity could vanish: a key of minus infinity only gets no weight. NaN reaches the logits, and is reported."""
    found = expanded(cache_of(np.array([[1.0, sign * value] * 16], np.float32), name), name)[0, 1]
    largest = {"f16": 65519, "int8": 65519 * 127}.get(name, 3e38)
    if abs(value) <= largest:
        np.testing.assert_allclose(found, sign * value, rtol=1e-2)
    elif name in ("f16", "int8"):
        assert np.isnan(found)
    else:
        np.testing.assert_array_equal(np.float32(found), np.float32(sign * value))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("group, width, n, far", [
    (1, 32, 1, False), (2, 32, 3, False), (1, 64, 4, False), (2, 96, 257, False), (1, 128, 300, False),
    (5, 128, 700, False), (4, 64, 700, False), (2, 32, 260, True)])
def test_attention_to_blocks(name, group, width, n, far):
    """Blocks joined in their order are softmax(q kᵀ) v of what the cache holds; a token alone gives the same bits.

    far: all scores are negative, those of every second query below -87, where exp ends.
    """
    rng, tokens = np.random.default_rng(n), min(n, 9)
    q = (rng.standard_normal((tokens * group, width)) / 4).astype(np.float32)
    k, v = rng.standard_normal((2, n, width)).astype(np.float32)
    if far:
        q, k = to_bf16(abs(q) * 16), -abs(k)
        q[::2] *= 4
    caches = [cache_of(values, name) for values in (k, v)]
    k, v = (expanded(cache, name) for cache in caches)
    last = n - tokens + np.arange(tokens * group)[:, None] // group
    scores = np.where(np.arange(n) <= last, (to_bf16(q) if name == "rounded" else q).astype(np.float64) @ k.T, -np.inf)
    assert not far or scores[::2].max() < -87 and -87 < scores[1::2].max() < 0
    weights = factors = np.exp(scores)
    if name == "rounded":  # in each block, the weights beside the largest one
        most = [scores[:, block:block + BLOCK].max(axis=1, keepdims=True) for block in range(0, n, BLOCK)]
        most = np.exp(np.repeat(most, BLOCK, axis=0)[:n, :, 0].T)
        factors = to_bf16(np.divide(weights, most, where=most > 0, out=np.zeros_like(most)).astype(np.float32)) * most
    expected = factors @ v / weights.sum(axis=1, keepdims=True)
    result = attended(q, group, tokens, caches, name)
    limit = 3e-5 if name == "rounded" else 1e-5  # a weight halfway between two bf16 may become the other one
    found = result[:, :width] / result[:, width + 1:width + 2]
    np.testing.assert_allclose(found, expected, atol=limit * (1 + 99 * far))
    for t in range(tokens):
        alone = attended(q[t * group:(t + 1) * group].copy(), group, 1,
                         [cache[:n - tokens + t + 1] for cache in caches], name)
        np.testing.assert_array_equal(alone[:, :width + 2], result[t * group:(t + 1) * group, :width + 2])


def attended(q, group, tokens, caches, name):
    """What `attend` and `join` give for the last tokens of a sequence, whose keys and values are all in caches."""
    n, width = len(caches[0]), q.shape[1]
    q = q.copy()
    for query in q:
        kernels.for_bf16(query, FORMS[name][0])
    result, part = np.empty((2, len(q), width + 16), np.float32)
    own = np.empty((VECTORS + width) * BLOCK, np.float32)
    functions = functions_for((), ((FORMS[name][0], 1), (FORMS[name][0], len(q))))
    for block in range(0, n, BLOCK):
        kernels.attend(functions, q, group, n - tokens + 1 - block, *(cache[block:] for cache in caches),
                       FORMS[name][0], part if block else result, own)
        for left, right in zip(result, part) if block else ():
            kernels.join(left, right, width)
    return result


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("place", [3, 290])
def test_a_score_far_above_those_of_another_block(name, place):
    """By more than exp can take; both as the first block and as the second. All weight is on one position."""
    rng, width, n = np.random.default_rng(0), 32, 300
    k, v = rng.standard_normal((2, n, width)).astype(np.float32)
    k[place] = 5
    q, caches = np.ones((1, width), np.float32), [cache_of(values, name) for values in (k, v)]
    scores = q.astype(np.float64) @ expanded(caches[0], name).T
    assert scores[0, place] > 100 + np.delete(scores[0], place).max()
    result, expected = attended(q, 1, 1, caches, name), expanded(caches[1], name)[place]
    np.testing.assert_allclose(result[0, :width] / result[0, width + 1], expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("broken", ["key", "value"])
def test_nan_reaches_the_tokens_that_see_it(name, broken):
    """In the second block of positions: tokens before it have numbers, those from it on NaN."""
    rng, group, width, tokens, n, place = np.random.default_rng(0), 2, 32, 9, 270, 266
    q = rng.standard_normal((tokens * group, width)).astype(np.float32)
    rows = {kind: rng.standard_normal((n, width)).astype(np.float32) for kind in ("key", "value")}
    rows[broken][place] = np.nan
    result = attended(q, group, tokens, [cache_of(values, name) for values in rows.values()], name)
    found, sees = result[:, :width] / result[:, width + 1:width + 2], n - tokens + np.arange(len(q)) // group >= place
    assert np.isnan(found[sees]).all() and np.isfinite(found[~sees]).all()
