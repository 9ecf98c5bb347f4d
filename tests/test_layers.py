"""Kernels against NumPy: packing of weights and vectors, and the rows of the KV cache."""
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qwen3_kernels import compiled
from qwen3_kernels import layers as kernels
from qwen3_kernels.layout import BF16, CACHE8, FLOAT16, FLOAT32, INT4, INT8, packed_shape, padded

PACKED = {"int8": INT8, "int4": INT4}


def pack(w: np.ndarray, form: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights [32, n] -> (the numbers they became [32, n], their scales [32, groups])."""
    rows, n = w.shape
    block = np.zeros(packed_shape(rows, n, form), np.uint8)
    bits = 8 if form == INT8 else 4
    compiled.kernels().quantize_block(np.pad(w, ((0, 0), (0, -n % 64))), bits, block[0])
    found = np.empty((rows, n), np.float32)
    for row, out in enumerate(found):
        compiled.kernels().weight_row(np.array([block.ctypes.data, block.strides[0], form, rows, n]), row, out)
    units = block.reshape(-1, 1024 + 64 * 8 // bits)[:, :-1024].copy().view(np.float16)  # [units, groups of a unit * 32]
    return found, units.reshape(-1, 32).T.astype(np.float32)[:, :-(-n // 32)]


# ----------------------------------------------------------------------------------------------------------------------
# Weights
# ----------------------------------------------------------------------------------------------------------------------

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

FORMS = {"f32": (FLOAT32, 2, 1e-6), "bf16": (BF16, 1, 1e-2), "f16": (FLOAT16, 1, 1e-3), "int8": (CACHE8, 0.5 + 1 / 32, 2e-2)}


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
@pytest.mark.parametrize("heads, width, n", [(1, 32, 1), (2, 32, 3), (1, 64, 4), (2, 96, 257), (1, 128, 300), (2, 128, 1000)])
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
