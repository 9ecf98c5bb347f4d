"""The fast engine against its oracle: each kernel against NumPy, the whole against qwen3.py, in all formats."""
import gc
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
import pexpect
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from llvmlite import ir

import qwen3
import qwen3_files
import qwen3_kernels as kernels
import qwen3_numba as fast
from qwen3_layout import BF16, FLOAT16, FLOAT32, INT4, INT8, VERSION, packed_shape, padded
from configs import BASE, CASES
from make_random_model import make_random_model

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parents[1]
FORMATS = {"float32": FLOAT32, "bfloat16": BF16, "float16": FLOAT16, "int8": INT8, "int4": INT4}


def stored(w: np.ndarray, form: int) -> tuple[np.ndarray, np.ndarray]:
    """(the matrix as it lies in memory, (address, stride, format, rows, columns)) of weights [rows, n]."""
    rows, n = w.shape
    if form >= INT8:
        wide = np.zeros((padded(rows, 32), padded(n, 64)), np.float32)
        wide[:rows, :n] = w
        data = fast.aligned(packed_shape(rows, n, form))
        for i, block in enumerate(data):
            fast.kernels().quantize_block(wide[32 * i:32 * i + 32], 8 if form == INT8 else 4, block)
    else:
        data = np.zeros((rows, padded(n, 32)), {FLOAT32: np.float32, BF16: np.uint16, FLOAT16: np.float16}[form])
        data[:, :n] = (w.view(np.uint32) >> 16) if form == BF16 else w
    return data, np.array([data.ctypes.data, data.strides[0], form, rows, n])


def reference(data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What stored weights stand for, by NumPy from the format's description."""
    form, rows, n = weight[2:]
    if form == BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)[:, :n]
    if form < INT8:
        return data.astype(np.float32)[:, :n]
    if rows == 0:
        return np.empty((0, n), np.float32)
    whole, scales = unpacked(data, 8 if form == INT8 else 4)
    return (whole * np.repeat(scales, 32, axis=1))[:rows, :n].astype(np.float32)


def unpacked(data: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(whole numbers [rows, columns], scales [rows, groups]) of packed weights, rows and columns padded."""
    units = data.reshape(len(data), -1, 1024 + 64 * 8 // bits)  # [blocks, units, bytes]
    scales = units[..., :-1024].copy().view(np.float16).reshape(len(data), -1, 32).astype(np.float32)  # [blocks, groups, 32]
    values = units[..., -1024:].astype(np.int32).reshape(len(data), -1, 1, 8, 32, 4)
    whole = values - 128 if bits == 8 else np.concatenate([values & 15, values >> 4], axis=2) - 8
    whole = whole.reshape(len(data), -1, 8, 32, 4).transpose(0, 3, 1, 2, 4).reshape(32 * len(data), -1)
    return whole, scales.transpose(0, 2, 1).reshape(len(whole), -1)


# ----------------------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------------------

SIZES = [(0, 64), (1, 1), (3, 31), (4, 32), (5, 33), (32, 96), (9, 256), (2, 300), (33, 64), (70, 544), (13, 1024), (161, 513)]


@pytest.mark.parametrize("n_vectors", [1, 3, 8, 9, 31])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows, n", SIZES)
def test_linear(name, rows, n, n_vectors):
    form, rng = FORMATS[name], np.random.default_rng(rows * 1000 + n)
    data, weight = stored(rng.standard_normal((rows, n)).astype(np.float32), form)
    w = reference(data, weight)
    row = np.empty(n, np.float32)
    for r in range(rows):
        fast.kernels().weight_row(weight, r, row)
        np.testing.assert_array_equal(row, w[r])
    width = padded(n, 64)
    xs, packed = np.full((n_vectors, width), 7, np.float32), np.empty((n_vectors, width * 5 // 4), np.uint8)
    xs[:, :n] = rng.standard_normal((n_vectors, n))
    for x, p in zip(xs, packed):
        kernels.ready(x, n, form, p, 0, n)
    out = np.full((n_vectors, 64 + padded(rows, 32)), np.nan, np.float32)
    kernels.linear(weight, xs, packed, out, 32, 0, rows, np.empty(kernels.PANELS * kernels.DEPTH * kernels.PANEL, np.float32))
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
    """Groups of weights [n, 32], quantized so that the largest becomes 127 (4 bits: -8); the rest is rounded, clipped to 7."""
    largest = np.take_along_axis(groups, abs(groups).argmax(axis=1)[:, None], axis=1)
    scale = np.where(largest == 0, 1, abs(largest) / 127 if bits == 8 else largest / -8)
    return np.clip(np.floor(groups / scale + 0.5), -127 if bits == 8 else -8, 127 if bits == 8 else 7) * scale


@settings(max_examples=150, deadline=None, derandomize=True)
@given(arrays(np.float32, 256, elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)), st.sampled_from([8, 4]))
@example(np.full(256, 4.7319987e-05, np.float32), 8)  # scale 6.25 * 2**-24, stored as 6 * 2**-24
@example(np.full(256, 1e-5, np.float32), 8)  # scale 1.32 * 2**-24, stored as 2**-24: a loss of 24 %
@example(np.full(256, 1e-7, np.float32), 4)  # scale below 2**-25, stored as 0
def test_quantization_errs_less_than_the_plain_rule(w, bits):
    """The bound on the squared error of a group of 32 weights w has three terms.

    1. The kernel tries several divisors, one of them the plain rule's. It rounds w / divisor to whole numbers q and takes
       the least-squares scale s = sum(w q) / sum(q²). So its error is at most the plain rule's.
    2. float16 stores s + d. For the same q, the squared error grows by exactly d² sum(q²), because the least-squares s
       makes the cross term sum((w - s q) q) zero; rounding w again with the stored scale can only reduce the error.
       |d| is at most half the spacing of float16: 2**-11 of s if s is normal, but 2**-25 for every subnormal s (below
       2**-14). Since s² sum(q²) <= sum(w²) and |q| <= 127 (or 8), the growth is at most (d / s)² sum(w²), and at most
       32 (127 d)² (or 32 (8 d)²). So a subnormal scale costs at most 127 * 2**-25 = 3.8e-6 per weight.
    3. The kernel compares divisors by float32 sums of 32 products, each with an error up to 96 * 2**-24 of sum(w²).
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
    # Each whole number is the nearest one for the stored scale.
    kept, whole = kept[:, None].astype(np.float64), whole.reshape(-1, 32)
    nearest = np.clip(groups / np.where(kept == 0, np.inf, kept), low, high)
    assert (abs(whole - nearest) <= 0.5 + 1e-4).all()


@pytest.mark.parametrize("spread", [3, 0.02, 1e-3])
@pytest.mark.parametrize("bits, limit", [(8, 0.82), (4, 0.9)])
def test_quantization_of_normal_weights(bits, limit, spread):
    """The mean error is clearly below the plain rule's. Weights of 1e-3 have subnormal scales for 8 bits."""
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
        kernels.attend(q, k[part].ctypes.data, v[part].ctypes.data, k.strides[0], FLOAT16, part.stop - part.start, scores, partials[:, c])
    for h in range(heads):
        out = np.empty(width, np.float32)
        kernels.combine(partials[h], out)
        weights = np.exp(k.astype(np.float64) @ q[h])
        np.testing.assert_allclose(out, weights @ v.astype(np.float64) / weights.sum(), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The whole
# ----------------------------------------------------------------------------------------------------------------------

def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    """The root mean square of the difference, relative to the logits' spread."""
    return float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())


@pytest.mark.parametrize("name", CASES)
def test_logits(name, tmp_path):
    config, dtype, shards = CASES[name]
    path = make_random_model(config, tmp_path, dtype, shards)
    oracle = qwen3.load_model(path)
    ids = np.random.default_rng(0).integers(0, oracle.config.vocab_size, 90)
    expected = qwen3.forward(oracle, ids, qwen3.KVCache(oracle.config), all_logits=True)
    for quantize, limit in ((None, 1e-3), ("int8", 0.05), ("int4", 0.5)):
        model = fast.load_model(path, quantize)
        at_once = fast.forward(model, ids, fast.Cache(model.config), all_logits=True)
        cache = fast.Cache(model.config)
        pieces = [fast.forward(model, ids[a:b], cache, all_logits=True) for a, b in zip([0, 1, 2, 5, 40], [1, 2, 5, 40, 48])]
        singly = [fast.forward(model, [i], cache)[None] for i in ids[48:]]
        stepwise = np.concatenate(pieces + singly)
        assert distance(at_once, expected) < limit and distance(stepwise, expected) < limit
        assert distance(stepwise, at_once) < (1e-3 if quantize is None else 0.02)  # what is rounded to 8 bits may fall to the other side


@pytest.mark.parametrize("kv_dtype, limit", [("f16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2)])
@pytest.mark.parametrize("name", ["group of 5, head_dim 24", "odd sizes", "head_dim 128", "YaRN, transformers 5"])
def test_caches(name, kv_dtype, limit, tmp_path):
    """Long enough for several parts of the attention, in pieces that take each way to it."""
    config, dtype, shards = CASES[name]
    path = make_random_model(config | {"max_position_embeddings": 1000}, tmp_path, dtype, shards)
    oracle, model = qwen3.load_model(path), fast.load_model(path, kv_dtype=kv_dtype)
    ids = np.random.default_rng(0).integers(0, oracle.config.vocab_size, 600)
    expected = qwen3.forward(oracle, ids, qwen3.KVCache(oracle.config), all_logits=True)
    cache, ends = model.engine.new_cache(model.config), [0, 500, 501, 502, 508, 580, 600]
    logits = np.concatenate([fast.forward(model, ids[a:b], cache, all_logits=True) for a, b in zip(ends, ends[1:])])
    assert distance(logits, expected) < limit
    for a, b in zip(ends[1:], ends[2:]):
        assert distance(logits[a:b], expected[a:b]) < 2 * limit
    assert cache.k.itemsize * cache.k.shape[-1] == {"f16": 2, "bf16": 2, "int8": 1.0625}[kv_dtype] * -(-model.config.head_dim // 32) * 32


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_threads_change_nothing(threads, quantize):
    one, several = (fast.load_model(ROOT / "demo", quantize, n) for n in (1, threads))
    ids = one.tokenizer.encode("The capital of France is Paris, and that of Italy is Rome.")
    caches = [fast.Cache(one.config), fast.Cache(one.config)]
    for i in ids:
        a, b = (fast.forward(model, [i], cache) for model, cache in zip((one, several), caches))
        np.testing.assert_array_equal(a, b)


def test_callers_from_several_threads_take_turns():
    model = fast.load_model(ROOT / "demo")
    expected = qwen3.chat(model, "What is 12 + 30?").finish().text
    texts = []
    callers = [threading.Thread(target=lambda: texts.append(qwen3.chat(model, "What is 12 + 30?").finish().text))
               for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert texts == [expected] * 4


def test_the_bundled_model_says_the_same():
    oracle = qwen3.load_model(ROOT / "demo")
    questions = ["What is the capital of France?", "What is 417 + 385?", "法国的首都是哪里？", "Tell me a story about a fox."]
    for quantize in (None, "int8"):
        model = fast.load_model(ROOT / "demo", quantize)
        for question in questions:
            assert qwen3.chat(model, question).finish().token_ids == qwen3.chat(oracle, question).finish().token_ids


def test_long_decoding(tmp_path):
    """2,000 tokens, one by one, across many growths of the cache and parts of the attention."""
    path = make_random_model(BASE | {"max_position_embeddings": 4096}, tmp_path, "bfloat16")
    oracle, model = qwen3.load_model(path), fast.load_model(path)
    ids = np.random.default_rng(0).integers(0, 320, 2000)
    expected = qwen3.forward(oracle, ids, qwen3.KVCache(oracle.config), all_logits=True)
    cache = fast.Cache(model.config)
    logits = np.array([fast.forward(model, [i], cache) for i in ids])
    assert distance(logits, expected) < 1e-3 and distance(logits[-100:], expected[-100:]) < 1e-3


@pytest.mark.parametrize("lengths", [(5, 1, 8), (70, 3, 68), (300, 64, 299, 200)])
def test_batches(lengths, tmp_path):
    """Prompts of different lengths, padded on their left, and steps of one and of several tokens after them."""
    path, rng = make_random_model(BASE | {"max_position_embeddings": 1000}, tmp_path, "bfloat16"), np.random.default_rng(0)
    n, logits = max(lengths), []
    ids = rng.integers(0, 320, (len(lengths), n + 12))
    padding = [n - length for length in lengths]
    for module in (qwen3, fast):
        model = module.load_model(path)
        cache = model.engine.new_cache(model.config, left_padding=padding)
        logits.append(np.concatenate([model.engine.forward(model, ids[:, a:b], cache, all_logits=True)
                                      for a, b in zip([0, n, n + 1, n + 3], [n, n + 1, n + 3, n + 12])], axis=1))
    for expected, found, begin in zip(*logits, padding):
        assert distance(found[begin:], expected[begin:]) < 1e-3


def test_batches_and_conversations():
    oracle, model = qwen3.load_model(ROOT / "demo"), fast.load_model(ROOT / "demo")
    prompts = [oracle.tokenizer.encode(text) for text in ("The capital of France is", "One", "The capital of Japan is the city of")]
    assert (qwen3.generate_batch(model, prompts, max_new_tokens=12)
            == qwen3.generate_batch(oracle, prompts, max_new_tokens=12))
    cache = model.engine.new_cache(model.config)
    messages = [{"role": "user", "content": "My name is Mia."}]
    messages.append({"role": "assistant", "content": qwen3.chat(model, messages, cache=cache).finish().answer.content})
    reply = qwen3.chat(model, [*messages, {"role": "user", "content": "What is my name?"}], cache=cache).finish()
    assert reply.cached_tokens > 0 and "Mia" in reply.answer.content


@pytest.mark.parametrize("tensor", ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "layers.2.input_layernorm", "norm"])
def test_broken_weights_are_found(tensor, tmp_path):
    path = make_random_model(BASE, tmp_path, "float32")
    name = f"model.{tensor}.weight"
    header_size = int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")
    data = bytearray((path / "model.safetensors").read_bytes())
    begin, end = json.loads(data[8:8 + header_size])[name]["data_offsets"]
    data[8 + header_size + begin:8 + header_size + end] = np.full((end - begin) // 4, np.nan, np.float32).tobytes()
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(qwen3.InputError, match=re.escape(name)):
        list(qwen3.generate(fast.load_model(path), [1, 2, 3], 4))
    with pytest.raises(qwen3.InputError, match=re.escape(name)):
        list(qwen3.generate(fast.load_model(path, "int8"), [1, 2, 3], 4))


# ----------------------------------------------------------------------------------------------------------------------
# Instructions of other CPUs
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.compiles
@pytest.mark.parametrize("path", ["vnni", "avx2", "plain"])
def test_other_instructions(path, tmp_path):
    """The tests of the kernels again, in a process that is made to use what older CPUs have."""
    features = llvm.get_host_cpu_features()
    if path == "vnni" and not (features.get("avxvnni") or features.get("avx512vl") and features.get("avx512vnni")):
        pytest.skip("this CPU has no VNNI")
    if path == "avx2" and not features.get("avx2"):
        pytest.skip("this CPU has no AVX2")
    names = ["test_linear"] + ["test_the_bundled_model_says_the_same"] * (path == "plain")  # compiles all kernels: slow
    tests = [f"{__file__}::{name}" for name in names]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], capture_output=True,
                          text=True, timeout=600, cwd=ROOT,
                          env=os.environ | {"QWEN3_INT8_PATH": path, "NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path, triple, cpu, instruction", [
    ("vnni512", "x86_64-linux-gnu", "cascadelake", "vpdpbusd"), ("vnni", "x86_64-linux-gnu", "alderlake", "{vex} vpdpbusd"),
    ("avx2", "x86_64-linux-gnu", "haswell", "vpmaddubsw"), ("neon", "aarch64-linux-gnu", "neoverse-n1", "sdot"),
    ("plain", "x86_64-linux-gnu", "x86-64", "pm"), ("plain", "aarch64-linux-gnu", "generic", "mull")])
@pytest.mark.parametrize("signed", [True, False])
def test_instruction_selection(path, triple, cpu, instruction, signed):
    """What each path compiles to on a CPU for which it is meant."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    n, module = kernels.INT8_SHAPES[path].lanes, ir.Module()
    sums, values = ir.VectorType(ir.IntType(32), n), ir.VectorType(ir.IntType(8), 4 * n)
    function = ir.Function(module, ir.FunctionType(sums, [sums, values, values]), "dot")
    b = ir.IRBuilder(function.append_basic_block())
    b.ret(kernels.dot_bytes(b, path, *function.args, signed))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module.triple = triple
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert instruction in assembly.replace("\t", " ")


@pytest.mark.parametrize("features, path", [
    ({"avx512vnni": True, "avx512f": True, "avx2": True}, "vnni512"), ({"avxvnni": True, "avx2": True}, "vnni"),
    ({"avx512f": True, "avx2": True}, "avx2"), ({"avx2": True}, "avx2"), ({"dotprod": True}, "neon"), ({}, "plain")])
def test_choice_of_instructions(features, path):
    assert kernels.int8_path(features) == path


# ----------------------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------------------

def run(*arguments, program="qwen3_numba.py", **options):
    return subprocess.run([sys.executable, ROOT / program, *map(str, arguments)], capture_output=True, text=True,
                          timeout=300, **options)


@pytest.mark.parametrize("options", [[], ["--quantize", "int8"], ["--threads", "1"], ["--threads", "5", "--quantize", "int8"]])
def test_command_line(options):
    done = run("--model", ROOT / "demo", "--no-think", *options, "What is the capital of France?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n", "")


@pytest.mark.parametrize("options, words", [(["--quantize", "int2"], "invalid choice"), (["--threads", "0"], "threads")])
def test_bad_options(options, words):
    done = run("--model", ROOT / "demo", *options, "Hello")
    assert done.returncode in (1, 2) and done.stdout == ""
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_numba(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('No module named numba')")
    done = run("Hello", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "qwen3[fast]" in done.stderr and "qwen3.py" in done.stderr


@pytest.mark.compiles
def test_no_place_for_the_kernels(tmp_path):
    """No folder can be made, neither beside the program nor in the home: they are compiled, with a bar, and it works."""
    for file in [*ROOT.glob("*.py")]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in ("__pycache__", "cache"):
        (tmp_path / name).write_text("a file where a folder should be")
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    arguments = [str(tmp_path / "qwen3_numba.py"), "--model", str(ROOT / "demo"), "--no-think", "What is the capital of Peru?"]
    terminal = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=300,
                             env=environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    shown = terminal.read()
    terminal.close()
    assert terminal.exitstatus == 0 and "compiling, only this once" in shown
    assert len(set(re.findall(r"\d+/\d+", shown))) > 5  # the bar moves
    assert shown.split("\r")[-2:] == ["The capital of Peru is Lima.", "\n"]


def test_kernels_are_kept(tmp_path, monkeypatch):
    """In the first folder that takes them; whatever else lies there is not taken for them."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(fast, "kernel_folders", lambda: [tmp_path / "file" / "no", tmp_path / "new" / "yes"])
    arguments, code = {"weight_row": [["int64", 1], "int64", ["float32", 1]]}, os.urandom(5000)
    fast.keep_kernels("kernels.o", "these", arguments, code)
    file = tmp_path / "new" / "yes" / "kernels.o"
    assert [path.name for path in file.parent.iterdir()] == ["kernels.o"]
    assert fast.read_kernels(file, "these") == (arguments, code)
    assert fast.read_kernels(file, "those") is None and fast.read_kernels(tmp_path / "none", "these") is None
    whole = file.read_bytes()
    for damaged in (b"", whole[:50], whole[:-1], whole + b"0", whole[:-1] + bytes([whole[-1] ^ 1]), b"{}\n" + code, b"[]\n", code):
        file.write_bytes(damaged)
        assert fast.read_kernels(file, "these") is None


def test_kernels_take_only_what_they_are_made_for():
    for wrong in (np.zeros(32), np.zeros((1, 32), np.float32), np.zeros(64, np.float32)[::2]):
        with pytest.raises(TypeError, match="contiguous float32"):
            fast.kernels().weight_row(np.zeros(5, np.int64), 0, wrong)
    with pytest.raises(ValueError):
        fast.kernels().weight_row(np.zeros(5, np.int64), 0)


def test_cpus_and_settings_that_do_not_do(monkeypatch):
    monkeypatch.setattr(kernels, "FEATURES", {})
    if llvm.get_default_triple().startswith("x86"):
        with pytest.raises(qwen3.InputError, match="F16C"):
            kernels.machine_code()
    monkeypatch.setattr(kernels.numba.config, "DISABLE_JIT", 1)
    with pytest.raises(qwen3.InputError, match="NUMBA_DISABLE_JIT"):
        kernels.machine_code()


def test_what_cannot_be_compiled_is_one_line_with_the_versions(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("LLVM IR parsing error\n<string>:1:36: error: expected type\n" + 1000 * "~")

    monkeypatch.setattr(kernels, "machine_code", fail)
    monkeypatch.setattr(fast, "kernel_folders", lambda: [tmp_path])
    with pytest.raises(qwen3.InputError) as refused:
        fast.kernels.__wrapped__()
    message, llvm_version = str(refused.value), ".".join(map(str, llvm.llvm_version_info))
    assert len(message.splitlines()) == 1 and len(message) < 600
    for words in (f"numba {numba.__version__} ", f"llvmlite {llvmlite.__version__} ", f"LLVM {llvm_version}",
                  f"NumPy {np.__version__}", "RuntimeError: LLVM IR parsing error <string>:1:36: error: expected type",
                  "install the newest numba, or use qwen3.py"):
        assert words in message
    assert not any(tmp_path.iterdir())


def test_kernels_that_need_numba_to_run_are_refused(monkeypatch):
    """They would crash in the next process, which loads them without numba."""
    @kernels.called_from_python
    def allocates(x):
        x[:] = x[::-1].copy()

    monkeypatch.setattr(kernels, "KERNELS", {allocates: (kernels.F1,)})
    with pytest.raises(qwen3.InputError, match="NRT_"):
        kernels.machine_code()


@pytest.mark.compiles
def test_a_full_disk_and_two_at_once(tmp_path):
    """Both compile, because the cache is empty, and one can't even write it."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
    program = "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [ROOT / "qwen3_numba.py", "--model", ROOT / "demo", "--no-think", "What is the capital of Peru?"]
    processes = [subprocess.Popen([sys.executable, "-c", start + program, *command], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)})
                 for start in (limit, "import runpy, sys; ", "import runpy, sys; ")]
    for process in processes:
        stdout, stderr = process.communicate(timeout=300)
        assert (process.returncode, stdout, stderr) == (0, "The capital of Peru is Lima.\n", "")
    assert run(*command[1:], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}).stdout == "The capital of Peru is Lima.\n"


# ----------------------------------------------------------------------------------------------------------------------
# Quantized checkpoints
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["odd sizes", "theta 1e7, untied"])
def test_saved_and_loaded(name, form, tmp_path):
    config, dtype, shards = CASES[name]
    model = fast.load_model(make_random_model(config, tmp_path / "model", dtype, shards), form)
    fast.save_quantized(model, tmp_path / "saved", form)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(
        (tmp_path / "model" / "config.json").read_text())
    ids = np.arange(50) % model.config.vocab_size
    expected = fast.forward(model, ids, fast.Cache(model.config), all_logits=True)
    for quantize in (None, form):
        saved = fast.load_model(tmp_path / "saved", quantize)
        np.testing.assert_array_equal(fast.forward(saved, ids, fast.Cache(model.config), all_logits=True), expected)
    with pytest.raises(qwen3.InputError, match=f"this checkpoint is {form}"):
        fast.load_model(tmp_path / "saved", {"int8": "int4", "int4": "int8"}[form])
    with pytest.raises(qwen3.InputError, match="exists already"):
        fast.save_quantized(model, tmp_path / "saved", form)
    done = run("--model", tmp_path / "saved", "--raw", "Hello", program="qwen3.py")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("damage, words", [
    (lambda data: data[:-1], "not a valid safetensors file"), (lambda data: data[:100], "not a valid safetensors file"),
    (lambda data: data.replace(b'"version": "' + VERSION.encode(), b'"version": "0'), "another version"),
    (lambda data: data.replace(b"mlp.up_proj", b"mlp.xx_proj", 1), "don't fit config.json")])
def test_damaged_quantized_checkpoints(damage, words, tmp_path):
    model = fast.load_model(make_random_model(BASE, tmp_path / "model"), "int8")
    fast.save_quantized(model, tmp_path / "saved", "int8")
    file = tmp_path / "saved" / "model.int8.safetensors"
    data = file.read_bytes()
    assert damage(data) != data
    file.write_bytes(damage(data))
    with pytest.raises(qwen3.InputError, match=words):
        fast.load_model(tmp_path / "saved")


@pytest.mark.parametrize("limit, words", [("FSIZE, (10**6, 10**6)", "cannot be written"),
                                          ("AS, (sizes + 3 * 2**26, sizes + 3 * 2**26)", "not enough memory")])
def test_nothing_is_left_when_saving_fails(limit, words, tmp_path):
    """A disk that is full, and memory that doesn't suffice: set when all is loaded but the model."""
    model = make_random_model(BASE | {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 8}, tmp_path / "model")
    program = ("import resource, sys; sys.path.insert(0, '.'); import qwen3_cli, qwen3_numba\n"
               "qwen3_numba.kernels()\n"
               "sizes = 4096 * int(open('/proc/self/statm').read().split()[0])\n"
               f"resource.setrlimit(resource.RLIMIT_{limit})\n"
               "sys.exit(qwen3_numba.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", program, "--model", model, "--quantize", "int8", "--save-quantized",
                           tmp_path / "saved", "--threads", "1"], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "") and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


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
        qwen3_files.save_prompt_cache(cache, model, tmp_path / name)
        for other, another in models.items():
            if other == name:
                loaded = qwen3_files.load_prompt_cache(another, tmp_path / name)
                np.testing.assert_array_equal(loaded.k[..., :30, :], cache.k[..., :30, :])
                np.testing.assert_array_equal(loaded.token_ids[0, :30], ids)
            else:
                with pytest.raises(qwen3.InputError, match="prompt cache of another model"):
                    qwen3_files.load_prompt_cache(another, tmp_path / name)


# ----------------------------------------------------------------------------------------------------------------------
# Threads
# ----------------------------------------------------------------------------------------------------------------------

def test_available_cpus():
    program = "import os, qwen3_numba; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(qwen3_numba.available_cpus())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.stdout == "1\n"


def test_idle_threads_cost_nothing():
    model = fast.load_model(ROOT / "demo", threads=3)
    fast.forward(model, [1, 2, 3], fast.Cache(model.config))
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.1


class Interrupt:
    """Sends SIGINT to the main thread until `stopped` is set; only the first one raises KeyboardInterrupt.

    One signal is not enough: if it arrives just before the thread waits for a lock, Python handles it after that wait.
    """

    def __init__(self):
        self.stopped, self.count = threading.Event(), 0
        signal.signal(signal.SIGINT, self.heard)

    def heard(self, *_):
        self.count += 1
        if self.count == 1:
            raise KeyboardInterrupt

    def send(self) -> bool:
        """True if `stopped` was set within a minute."""
        for _ in range(600):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if self.stopped.wait(0.1):
                return True
        return False


def test_a_long_prefill_can_be_interrupted(tmp_path, monkeypatch):
    """The second job waits until the caller has its KeyboardInterrupt. No third job follows, and the model still works."""
    config = BASE | {"max_position_embeddings": 40000, "hidden_size": 128, "num_hidden_layers": 12}
    model = fast.load_model(make_random_model(config, tmp_path, "bfloat16"))
    ids = np.random.default_rng(0).integers(0, 320, 30000)
    cache = fast.Cache(model.config)
    fast.forward(model, ids[:20], cache)
    kernel, jobs, in_time, before = fast.kernels().decoder_layers, [], [], signal.getsignal(signal.SIGINT)
    call = kernel.call

    def interrupted_call(rank, *numbers):
        if rank == 0:
            jobs.append(numbers)
            if len(jobs) == 2:
                in_time.append(interrupt.send())
        return call(rank, *numbers)

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "call", interrupted_call)
        interrupt = Interrupt()
        try:
            with pytest.raises(KeyboardInterrupt):
                fast.forward(model, ids, cache)
            interrupt.stopped.set()
        finally:
            signal.signal(signal.SIGINT, before)
        cache.truncate(20)
        other = fast.Cache(model.config)
        fast.forward(model, ids[:20], other)  # a job for each layer, after the one that was interrupted
    assert in_time == [True] and len(jobs) == 2 + config["num_hidden_layers"]
    np.testing.assert_array_equal(fast.forward(model, ids[:5], cache), fast.forward(model, ids[:5], other))


def test_an_interrupted_job_keeps_what_it_reads(tmp_path):
    """The caller has dropped the model before the thread reads the weights, so only the job keeps the file mapped."""
    program = f"""
import gc, signal, sys, threading, weakref
sys.path.insert(0, {str(ROOT)!r})
import qwen3_numba as fast

{inspect.getsource(Interrupt)}
kernel, interrupt, computed = fast.kernels().decoder_layers, Interrupt(), threading.Event()
call = kernel.call

def interrupted_call(*numbers):
    interrupt.send()
    result = call(*numbers)
    computed.set()
    return result

def work():
    global model
    model = fast.load_model({str(make_random_model(BASE, tmp_path, "bfloat16"))!r}, threads=1)
    kernel.call = interrupted_call
    fast.forward(model, list(range(300)), fast.Cache(model.config))

try:
    work()
except KeyboardInterrupt:
    kernel.call = call
model, last = None, weakref.ref(model)
gc.collect()
print("gone" if last() is None else "still there")
interrupt.stopped.set()
demo = fast.load_model({str(ROOT / "demo")!r})
fast.forward(demo, [1, 2, 3], fast.Cache(demo.config))
print("computed" if computed.wait(60) else "not computed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gone\ncomputed\n", "")


def test_threads_end_with_their_model():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("qwen3-")}

    gc.collect()
    before = threads()
    model = fast.load_model(ROOT / "demo", threads=3)
    cache = fast.Cache(model.config)
    fast.forward(model, [1, 2, 3], cache)
    mine, weights, keys = threads() - before, weakref.ref(model.weights), weakref.ref(cache.k)
    assert len(mine) == 3
    del cache
    deadline = time.monotonic() + 30
    while keys() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert keys() is None  # no thread holds on to its last job
    del model
    gc.collect()
    for thread in mine:
        thread.join(30)
    assert weights() is None and not any(thread.is_alive() for thread in mine)


def test_a_forked_process_has_threads_of_its_own():
    model = fast.load_model(ROOT / "demo", threads=2)
    expected = fast.forward(model, [1, 2, 3], fast.Cache(model.config))
    child = os.fork()
    if child == 0:
        same = np.array_equal(fast.forward(model, [1, 2, 3], fast.Cache(model.config)), expected)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
