"""qwen3_kernels/layers.py: each kernel against NumPy."""
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import qwen3
from packed import FORMATS, reference, stored, unpacked
from qwen3_kernels import compiled
from qwen3_kernels import layers as kernels
from qwen3_kernels.layout import BF16, CACHE8, FLOAT16, FLOAT32, INT4, INT8, padded

pytestmark = pytest.mark.core
SIZES = [(0, 64), (1, 1), (3, 31), (4, 32), (5, 33), (32, 96), (9, 256), (2, 300), (33, 64), (70, 544), (13, 1024),
         (161, 513)]


@pytest.mark.parametrize("n_vectors", [1, 3, 8, 9, 31])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows, n", SIZES)
def test_linear(name, rows, n, n_vectors):
    form, rng = FORMATS[name], np.random.default_rng(rows * 1000 + n)
    data, weight = stored(rng.standard_normal((rows, n)).astype(np.float32), form)
    w = reference(data, weight)
    row = np.empty(n, np.float32)
    for r in range(rows):
        compiled.kernels().weight_row(weight, r, row)
        np.testing.assert_array_equal(row, w[r])
    width = padded(n, 64)
    xs, packed = np.full((n_vectors, width), 7, np.float32), np.empty((n_vectors, width * 5 // 4), np.uint8)
    xs[:, :n] = rng.standard_normal((n_vectors, n))
    for x, p in zip(xs, packed):
        kernels.ready(x, n, form, p, 0, n)
    out = np.full((n_vectors, 64 + padded(rows, 32)), np.nan, np.float32)
    kernels.linear(weight, xs, packed, out, 32, 0, rows,
                   np.empty(kernels.PANELS * kernels.DEPTH * kernels.PANEL, np.float32))
    assert np.isnan(out[:, :32]).all() and np.isnan(out[:, 32 + padded(rows, 32):]).all()  # nothing is written beyond
    factors = xs[:, :n]
    if form >= INT8:  # the vector is rounded to 8 bits, too: compare with what it was rounded to
        scales = np.repeat(packed[:, width:width + width // 8].copy().view(np.float32), 32, axis=1)
        rounded = (packed[:, :width].view(np.int8) * scales)[:, :n]
        assert (abs(rounded - factors) <= scales[:, :n]).all()
        factors = rounded
    expected = factors.astype(np.float64) @ w.T.astype(np.float64)
    np.testing.assert_allclose(out[:, 32:32 + rows], expected, atol=8e-5 * np.sqrt(n))


def test_exp():
    x = np.linspace(-87, 0, 20001).astype(np.float32)
    ours = np.array([kernels.exp(value) for value in x])
    expected = np.exp(x.astype(np.float64))
    assert (abs(ours - expected) <= expected * (4e-7 + 8e-8 * abs(x))).all()
    assert np.isnan(kernels.exp(np.float32(np.nan))) and kernels.exp(np.float32(-np.inf)) < 1e-37


def test_norm_rope_silu():
    rng = np.random.default_rng(0)
    for d in (2, 6, 24, 100, 128):
        x, weight = rng.standard_normal((2, d)).astype(np.float32)
        out = np.empty_like(x)
        kernels.rms_norm(x, weight, 1e-6, out)
        np.testing.assert_allclose(out, qwen3.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)
        cos, sin = rng.standard_normal((2, d // 2)).astype(np.float32)
        expected = qwen3.apply_rope(x[None, None, None], cos, sin)[0, 0, 0]
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
            assert kernels.largest_of(x) == x.max() and kernels.largest_size(x) == abs(x).max()
            x[rng.integers(n)] = np.inf
            assert kernels.largest_of(x) == kernels.largest_size(x) == np.inf
            x[rng.integers(n)] = np.nan
            assert np.isnan(kernels.largest_of(x)) and np.isnan(kernels.largest_size(x))


@pytest.mark.parametrize("size", [0, 1e-44, 3.6e-37, 2e-36, 1e-20, 1, 1e30])
def test_vectors_of_any_size_are_packed(size):
    x = np.random.default_rng(0).uniform(0.5, 1, 64).astype(np.float32) * np.float32(size)
    packed = np.empty(64 * 5 // 4, np.uint8)
    kernels.pack_vector(x, packed, 128, 0, 2)
    found = packed[:64].view(np.int8) * np.repeat(packed[64:72].view(np.float32), 32)
    np.testing.assert_allclose(found, x, atol=size / 200 + 1e-36, rtol=0)
    for broken in (np.nan, -np.nan, np.inf, -np.inf):
        x[40] = broken
        kernels.pack_vector(x, packed, 128, 0, 2)
        assert np.isfinite(packed[64:68].view(np.float32)).all() and np.isnan(packed[68:72].view(np.float32)).all()


def test_bfloat16_is_the_nearest():
    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(0, 2**32, 4096), np.arange(2**15, 2**31, 2**19), [0x7F800000, 0xFF800000]])
    x = bits.astype(np.uint32).view(np.float32)
    x = x[abs(x) < 3.38e38]  # what is rounded up to infinity is left out
    x = np.pad(x, (0, -len(x) % 32))
    stored = np.empty(len(x), np.uint16)
    kernels.store_kv(stored, BF16, 0, x)
    lower = x.view(np.uint32) >> 16 << 16
    below, above = (bits.astype(np.uint32).view(np.float32).astype(np.float64) for bits in (lower, lower + 2**16))
    is_even, nearer = (lower >> 16) % 2 == 0, abs(above - x) - abs(x - below)
    expected = np.where((nearer > 0) | is_even & (nearer == 0), below, above)
    np.testing.assert_array_equal((stored.astype(np.uint32) << 16).view(np.float32), expected)
    special = np.array([np.inf, -np.inf] + [0] * 30, np.float32)
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF], np.uint32).view(np.float32)
    special[2:8] = nan
    kernels.store_kv(stored[:32], BF16, 0, special)
    np.testing.assert_array_equal((stored[:32].astype(np.uint32) << 16).view(np.float32), special)


def plain_rule(groups: np.ndarray, bits: int) -> np.ndarray:
    """Groups of weights [n, 32] scaled so that the largest becomes 127, or -8; the rest is rounded and cut at 7."""
    largest = np.take_along_axis(groups, abs(groups).argmax(axis=1)[:, None], axis=1)
    scale = np.where(largest == 0, 1, abs(largest) / 127 if bits == 8 else largest / -8)
    return np.clip(np.floor(groups / scale + 0.5), -127 if bits == 8 else -8, 127 if bits == 8 else 7) * scale


@settings(max_examples=150, deadline=None, derandomize=True)
@given(arrays(np.float32, 256, elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)), st.sampled_from([8, 4]))
@example(np.full(256, 4.7319987e-05, np.float32), 8)  # a scale of 6.25 * 2**-24, between two float16
@example(np.full(256, 1e-5, np.float32), 8)  # of 1.32 * 2**-24: the nearest float16 loses 24 %
@example(np.full(256, 1e-7, np.float32), 4)  # of less than 2**-25: the nearest float16 is 0
def test_quantization_errs_less_than_the_plain_rule(w, bits):
    """Squared errors of a group of 32 weights w. The bound has three terms:

    1. The kernel tries several divisors, the plain rule's among them, rounds w to whole numbers q, and takes the scale
       s = sum(w q) / sum(q²), which errs least for them. So it errs no more than the plain rule.
    2. float16 keeps s + d instead of s. The error for the same q grows by d² sum(q²) exactly, because s makes the mixed
       term sum((w - s q) q) zero; rounding w anew with the kept scale only lessens it. |d| is half the distance of
       neighbouring float16 numbers at most: below 2**-11 of a normal scale, but 2**-25 for each subnormal scale, one
       below 2**-14, however small it is. Because s² sum(q²) <= sum(w²), and |q| <= 127 or 8, the growth is at most
       (d / s)² sum(w²), and 32 (127 d)² or 32 (8 d)²: per weight 127 * 2**-25 = 3.8e-6 if the scale is subnormal.
    3. The kernel compares divisors by float32 sums of 32 products, which err by 96 * 2**-24 of sum(w²) each.
    """
    data, weight = stored(w[None], INT8 if bits == 8 else INT4)
    groups, found = w.reshape(-1, 32).astype(np.float64), reference(data, weight).reshape(-1, 32)
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    ours, theirs, squares = (((x - groups) ** 2).sum(axis=1) for x in (found, plain_rule(groups, bits), 0))
    whole, kept = (x[0] for x in unpacked(data, bits))
    half_step = np.spacing(abs(kept).astype(np.float16)).astype(np.float64) / 2
    share = np.minimum(half_step / np.maximum(abs(kept) - half_step, half_step), 1)  # at least |d / s|
    rounded = np.minimum(share ** 2 * squares, 32 * (low * half_step) ** 2)
    assert (ours <= theirs + rounded + 2 * 96 * 2.0**-24 * squares).all()
    # Each whole number is the nearest one for the scale as it is kept.
    kept, whole = kept[:, None].astype(np.float64), whole.reshape(-1, 32)
    nearest = np.clip(groups / np.where(kept == 0, np.inf, kept), low, high)
    assert (abs(whole - nearest) <= 0.5 + 1e-4).all()


@pytest.mark.parametrize("spread", [3, 0.02, 1e-3])
@pytest.mark.parametrize("bits, limit", [(8, 0.82), (4, 0.9)])
def test_quantization_of_normal_weights(bits, limit, spread):
    """On average it errs clearly less than the plain rule; weights of 1e-3 have subnormal float16 scales for 8 bits."""
    groups = np.random.default_rng(0).normal(0, spread, (2048, 32)).astype(np.float32)
    found = reference(*stored(groups.reshape(32, -1), INT8 if bits == 8 else INT4)).reshape(-1, 32)
    ours, theirs = (((x - groups) ** 2).mean() for x in (found, plain_rule(groups, bits)))
    assert ours < limit * theirs


@pytest.mark.parametrize("heads, width", [(1, 32), (2, 32), (1, 64), (2, 96), (2, 128)])
def test_attention_in_parts(heads, width):
    """Partial results of pieces of the cache, combined, are the attention to all of it."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((heads, width)).astype(np.float32) / 4
    k, v = rng.standard_normal((2, 700, width)).astype(np.float16)
    partials, scores = np.empty((heads, 3, width + 2), np.float32), np.empty((2, 256), np.float32)
    for c in range(3):
        part = slice(c * 256, min((c + 1) * 256, 700))
        kernels.attend(q, k[part].ctypes.data, v[part].ctypes.data, k.strides[0], FLOAT16, part.stop - part.start,
                       scores, partials[:, c])
    for h in range(heads):
        out = np.empty(width, np.float32)
        kernels.combine(partials[h], out)
        weights = np.exp(k.astype(np.float64) @ q[h])
        np.testing.assert_allclose(out, weights @ v.astype(np.float64) / weights.sum(), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Weights in packed formats
# ----------------------------------------------------------------------------------------------------------------------

PACKED = {"int8": INT8, "int4": INT4}


def pack(w: np.ndarray, form: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights [32, n] -> (the numbers they became [32, n], their scales [32, groups])."""
    data, weight = stored(w, form)
    return reference(data, weight), unpacked(data, 8 if form == INT8 else 4)[1]


@pytest.mark.parametrize("form", PACKED)
def test_weights_are_rounded_with_the_scale_that_is_stored(form):
    """Each weight becomes the nearest of the numbers that the stored scale, a float16, allows."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((32, 512)) * np.exp(rng.uniform(-8, 8, (32, 1)))).astype(np.float32)
    found, scales = pack(w, PACKED[form])
    scale = np.repeat(scales, 32, axis=1).astype(np.float64)
    low, high = (-127, 127) if form == "int8" else (-8, 7)
    ratio = w / scale
    nearest = np.clip(np.floor(ratio + 0.5), low, high)
    is_tie = abs(ratio - np.floor(ratio) - 0.5) < 1e-5
    np.testing.assert_array_equal((found / scale).round()[~is_tie], nearest[~is_tie])


RMS = {"int8": 0.006, "int4": 0.1}  # the bounds that layout.py states


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.floats(-20, 11), st.floats(0, 12), st.sampled_from(sorted(PACKED)))
@example(0, float(np.log(1e-5)), 0.0, "int8")
@example(0, float(np.log(6.1e-5 * 127)), 0.0, "int8")
def test_errors_are_bounded(seed, log_size, log_spread, form):
    """By the share of a group's largest weight that layout.py states, and 3e-8, half the step of subnormal scales."""
    rng = np.random.default_rng(seed)
    w = np.exp(log_size + rng.uniform(-log_spread, 0, (32, 64))) * rng.choice([-1, 1], (32, 64))
    w = w.astype(np.float32)
    found, _ = pack(w, PACKED[form])
    groups, errors = w.reshape(32, 2, 32), (found - w.astype(np.float64)).reshape(32, 2, 32)
    rms = np.sqrt((errors**2).mean(axis=2))
    assert (rms <= RMS[form] * abs(groups).max(axis=2) + 3e-8).all()


@pytest.mark.parametrize("size", [1e-5, -1e-5, 3e-5, 1e-4, 1e-3, 7e-3])
@pytest.mark.parametrize("form", PACKED)
def test_constant_weights_keep_their_digits(form, size):
    """The nearest float16 to 1e-5 / 127 is 6e-8, for which 1e-5 is too large by a quarter."""
    found, _ = pack(np.full((32, 64), size, np.float32), PACKED[form])
    np.testing.assert_allclose(found, size, rtol=0.006 if form == "int8" else 0.03)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("size", [0, 1e-45, 1e-38, 1e-8, 2.9e-8])
def test_weights_too_small_for_any_scale_become_small_ones(form, size):
    found, _ = pack(np.full((32, 64), size, np.float32), PACKED[form])
    assert np.isfinite(found).all() and (abs(found - size) <= 3e-8).all()


# ----------------------------------------------------------------------------------------------------------------------
# Vectors
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rest", [7, 1e30, np.nan, np.inf])
@pytest.mark.parametrize("n", [1, 31, 33, 63, 64, 65, 100])
def test_what_lies_behind_a_vector_is_not_packed(n, rest):
    """The room behind it, up to a whole number of groups, counts as zeros: not for the scale, and not for the sum."""
    width = padded(n, 64)
    x, clean = np.full(width, rest, np.float32), np.zeros(width, np.float32)
    x[:n] = clean[:n] = np.random.default_rng(n).standard_normal(n)
    packed, expected = np.full((2, width * 5 // 4), 99, np.uint8)
    kernels.ready(x, n, INT8, packed, 0, n)
    kernels.pack_vector(clean, expected, kernels.ZERO_INT8, 0, width // 32)
    np.testing.assert_array_equal(packed, expected)
    assert not packed[n:width].any()


# ----------------------------------------------------------------------------------------------------------------------
# Rows of the cache
# ----------------------------------------------------------------------------------------------------------------------

FORMS = {"f32": (FLOAT32, 2, 1e-6), "bf16": (BF16, 1, 1e-2), "f16": (FLOAT16, 1, 1e-3),
         "int8": (CACHE8, 0.5 + 1 / 32, 2e-2)}  # (format, uint16 per number, error)


def cache_of(values: np.ndarray, name: str) -> np.ndarray:
    """Rows of values [n, d] as the cache keeps them, in d padded to a multiple of 32 numbers."""
    form, units, _ = FORMS[name]
    size = int(padded(values.shape[1], 32) * units)
    cache = np.full((len(values), size), 0x7E00, np.uint16)  # NaN, where nothing is written
    for i, row in enumerate(values):
        kernels.store_kv(cache.reshape(-1), form, i * size, row)
    return cache


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("d", [2, 6, 24, 32, 33, 64, 128])
def test_rows_of_the_cache(name, d):
    form, _, limit = FORMS[name]
    values = np.random.default_rng(0).standard_normal((5, d)).astype(np.float32)
    cache, width = cache_of(values, name), padded(d, 32)
    for row, expected in zip(cache, values):
        out = np.empty(width, np.float32)
        kernels.expand_row(row.ctypes.data, form, width, 0, out)
        np.testing.assert_allclose(out[:d], expected, atol=limit * 4 * (name != "f32"), rtol=0)
        assert not out[d:].any()


@pytest.mark.parametrize("value", [65504.0, 65519.0, 65520.0, 1e6, 9e6, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_too_large_for_the_cache_is_not_infinite_but_nan(name, value, sign):
    """Infinity could vanish: a key of minus infinity only gets no weight. NaN reaches the logits, and is reported."""
    values = np.array([[1.0, sign * value] * 16], np.float32)
    cache, out = cache_of(values, name), np.empty(32, np.float32)
    kernels.expand_row(cache.ctypes.data, FORMS[name][0], 32, 0, out)
    largest = {"f16": 65519, "int8": 65519 * 127}.get(name, 3e38)
    if abs(value) <= largest:
        np.testing.assert_allclose(out[1], sign * value, rtol=1e-2)
    elif name in ("f16", "int8"):
        assert np.isnan(out[1])
    else:
        np.testing.assert_array_equal(out[1], np.float32(sign * value))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("heads, width, n", [(1, 32, 1), (2, 32, 3), (1, 64, 4), (2, 96, 257), (1, 128, 300),
                                             (2, 128, 1000)])
def test_attention_to_each_kind_of_cache(name, heads, width, n):
    """A few queries and many take different ways; both are softmax(q kᵀ) v of what the cache holds."""
    form, _, _ = FORMS[name]
    rng = np.random.default_rng(n)
    q = (rng.standard_normal((heads, width)) / 4).astype(np.float32)
    caches = [cache_of(rng.standard_normal((n, width)).astype(np.float32), name) for _ in range(2)]
    k, v = np.empty((2, n, width))
    for cache, held in zip(caches, (k, v)):
        for row, out in zip(cache, held):
            expanded = np.empty(width, np.float32)
            kernels.expand_row(row.ctypes.data, form, width, 0, expanded)
            out[:] = expanded
    weights = np.exp(q.astype(np.float64) @ k.T)
    expected = weights @ v / weights.sum(axis=1, keepdims=True)
    addresses, stride = [cache.ctypes.data for cache in caches], caches[0].strides[0]
    partials = np.empty((heads, 1, width + 2), np.float32)
    kernels.attend(q, *addresses, stride, form, n, np.empty((2, 1024), np.float32), partials[:, 0])
    space = np.empty(10**6, np.float32)
    for head in range(heads):
        few, many = np.empty(width, np.float32), np.empty((1, width), np.float32)
        kernels.combine(partials[head], few)
        kernels.attend_tile(q[head][None, None], *addresses, stride, form, 0, n, many, space)
        np.testing.assert_allclose(few, expected[head], atol=1e-5)
        np.testing.assert_allclose(many[0], expected[head], atol=1e-5)
