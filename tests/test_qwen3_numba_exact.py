"""The fast engine's promise: a token's logits depend on the tokens before it and on nothing else, bit for bit."""
import dataclasses
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__
from hypothesis import given, settings
from hypothesis import strategies as st

import qwen3
from configs import BASE, CASES, FLASH, HYBRID, HYBRID_MOE, NEXT, ROOT
from helpers import logits_of, random_ids, with_tensors
from make_random_model import make_random_model
from packed import load_model
from qwen3_lib.kernels import cpu
from test_qwen3_moe import MOE
import qwen3_numba as fast

SHAPES = {"group of 2": BASE, "group of 5, head_dim 24": CASES["group of 5, head_dim 24"][0],
          "odd sizes": CASES["odd sizes"][0], "group of 8, wide": BASE | {
              "hidden_size": 1120, "intermediate_size": 1184, "num_hidden_layers": 1, "num_attention_heads": 8,
              "num_key_value_heads": 1, "head_dim": 96},
          "experts": MOE | {"hidden_size": 96, "moe_intermediate_size": 72, "mlp_only_layers": [1], "num_experts": 9},
          "hybrid": HYBRID | {"linear_num_value_heads": 6}, "hybrid mixture": HYBRID_MOE,
          "hybrid of Qwen3-Next": NEXT | {"mlp_only_layers": [1]},
          "hybrid of streams": FLASH,
          "hybrid of streams, blocks of the cache": FLASH | {
              "indexer_budget": 270, "indexer_compress_ratio": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
              "hc_count": 3, "ple_layer_ids": [1, 3], "indexer_n_heads": 10, "indexer_head_dim": 24}}
N = 530  # tokens: three blocks of the attention


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """get(shape, dtype, quantize, kv_dtype) -> (path, ids, their logits, read one by one with a single thread)."""
    found = {}

    def get(shape, dtype, quantize, kv_dtype):
        key = shape, dtype, quantize, kv_dtype
        if key not in found:
            folder = tmp_path_factory.mktemp("exact")
            path = make_random_model(SHAPES[shape] | {"max_position_embeddings": 1000}, folder, dtype)
            model = load_model(path, quantize, 1, kv_dtype)
            ids, cache = random_ids(N, 1, model.config.vocab_size), model.engine.new_cache(model.config)
            found[key] = path, ids, np.array([fast.forward(model, [i], cache) for i in ids])
        return found[key]

    return get


KV_DTYPES = ("f16", "bf16", "f32", "int8")
FORMATS = (("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "int8"), ("bfloat16", "int4"),
           ("float32", "q5_1"), ("float32", "q4_1"), ("float32", "q4_0"), ("bfloat16", "rounded"), ("float32", "q8_1"))


# Experts with all formats, other shapes with half of them (of a hybrid, no matrices are published); with each cache.
@pytest.mark.parametrize("shape, dtype, quantize, kv_dtype", [
    (shape, *form, KV_DTYPES[(i + j // 2) % 4]) for i, shape in enumerate(SHAPES) for j, form in enumerate(FORMATS)
    if (i + j) % 2 == 0 and not (shape.startswith("hybrid") and str(form[1])[0] == "q") or shape == "experts"])
@settings(max_examples=2, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_way_of_asking(shape, dtype, quantize, kv_dtype, reference, data):
    """In pieces of any lengths, with any number of threads, beside other sequences, after tokens were taken back, with
    a beginning copied from another sequence: the same bits as one token after the other."""
    path, ids, expected = reference(shape, dtype, quantize, kv_dtype)
    model = load_model(path, quantize, data.draw(st.integers(1, 3), label="threads"), kv_dtype)
    lengths = data.draw(st.lists(st.integers(1, N), min_size=1, max_size=3), label="lengths")
    wrong = random_ids(N, 2, model.config.vocab_size)
    caches = [model.engine.new_cache(model.config, N) for _ in lengths]
    piece = st.one_of(st.integers(0, 12), st.integers(0, N))
    while any(cache.length < length for cache, length in zip(caches, lengths)):
        done = [cache.length for cache in caches]
        sequence = int(np.argmax(np.subtract(lengths, done)))
        now = [min(data.draw(piece, label="piece"), length - n) for n, length in zip(done, lengths)]
        now[sequence] = max(now[sequence], 1)
        action = data.draw(st.integers(0, 5), label="action")
        if action == 0:  # wrong tokens, taken back
            together(model, caches, [wrong[:n] for n in now], guessed=True)
            for cache, length in zip(caches, done):
                cache.truncate(length)
        if action == 1 and len(lengths) > 1:  # a beginning that another sequence has computed
            source = int(np.argmax(done))
            n = caches[source].common_prefix(np.array(ids[:lengths[sequence] - 1]))
            if n > done[sequence]:
                caches[sequence].copy_from(caches[source], n)
                done[sequence], now[sequence] = n, 1
        last = data.draw(st.booleans(), label="last")
        logits = together(model, caches, [ids[n:n + m] for n, m in zip(done, now)], last)
        np.testing.assert_array_equal(logits, np.concatenate([expected[n + last * max(m - 1, 0):n + m]
                                                              for n, m in zip(done, now)]))


def together(model, caches, parts, last=False, guessed=False):
    """The logits of new tokens of several sequences, some of which may have none, in one pass."""
    some = [qwen3.NextTokens(cache, np.array(part), 1 if last else len(part), len(part) if guessed else 0)
            for cache, part in zip(caches, parts) if len(part)]
    return qwen3.compute(model, some)[0]


@pytest.mark.parametrize("shape, quantize, kv_dtype", [
    ("group of 2", None, "f16"), ("group of 2", None, "int8"), ("group of 8, wide", "rounded", "bf16")])
def test_only_the_last_logits(shape, quantize, kv_dtype, reference):
    """Of prompts around the size of a pass, alone and in a batch: the same bits as all logits."""
    path, ids, expected = reference(shape, "bfloat16", quantize, kv_dtype)
    long = 2 * random_ids(520, 3)
    model = load_model(path, quantize, 2, kv_dtype)
    np.testing.assert_array_equal(logits_of(model, ids), expected)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, context_length=2000))
    whole = logits_of(model, long)
    lengths = (511, 512, 513, 1025)
    for n in lengths:
        np.testing.assert_array_equal(fast.forward(model, long[:n], model.engine.new_cache(model.config)), whole[n - 1])
    for order in (lengths, lengths[::-1]):
        caches = [model.engine.new_cache(model.config) for _ in order]
        found = together(model, caches, [long[:n] for n in order], last=True)
        np.testing.assert_array_equal(found, whole[np.array(order) - 1])
    np.testing.assert_array_equal(fast.forward(model, ids[:5], model.engine.new_cache(model.config)), expected[4])


@pytest.mark.parametrize("wanted", [0, 1, 65])
def test_the_last_layer_computes_what_is_wanted(wanted, tmp_path):
    """Of a prompt with few logits, the last layer leaves x as it was: with so many tokens, it takes the time."""
    model = load_model(make_random_model(BASE | {"num_hidden_layers": 1}, tmp_path, "bfloat16"), None, 2, "bf16")
    part = qwen3.NextTokens(model.engine.new_cache(model.config), np.array(random_ids(100, 1)), wanted)
    for states in (False, True):
        (new,) = qwen3.passes(model, [part], states)
        before = new.x.copy()
        model.engine.run(model, new)
        assert np.array_equal(new.x, before) == (wanted < 65 and not states)


@pytest.mark.parametrize("kv_dtype, overflows", [("f16", False), ("bf16", False), ("int8", False), ("f16", True)])
def test_nothing_broken_reaches_earlier_rows(overflows, kv_dtype, tmp_path):
    """A token of NaN, or one whose values overflow, at position 256 or later: later rows are NaN, no earlier one."""
    path = make_random_model(BASE | {"tie_word_embeddings": False, "max_position_embeddings": 1000}, tmp_path,
                             "float32")
    embedding = np.array(qwen3.map_safetensors(path / "model.safetensors")["model.embed_tokens.weight"].data)
    changed, name = {"model.embed_tokens.weight": embedding}, "model.layers.0.self_attn.v_proj.weight"
    embedding[7] = np.nan
    if overflows:  # only token 7 has a first number, which v_proj makes too large for float16
        embedding[:, 0], embedding[7] = 0, np.arange(32) == 0
        changed[name] = np.array(qwen3.map_safetensors(path / "model.safetensors")[name].data)
        changed[name][:, 0] = 1e6
    with_tensors(path / "model.safetensors", changed)
    model = fast.load_model(path, kv_dtype=kv_dtype, activations="f32")
    for place in (256, 300):
        ids = [i % 7 for i in range(place)] + [7] + [i % 7 for i in range(300)]
        for step in (len(ids), 100):
            cache = model.engine.new_cache(model.config)
            logits = np.concatenate([fast.forward(model, ids[i:i + step], cache, True)
                                     for i in range(0, len(ids), step)])
            assert np.isfinite(logits[:place]).all() and np.isnan(logits[place:]).all(axis=1).all()
            cache.truncate(0)  # nothing broken stays in the work space, either
            np.testing.assert_array_equal(fast.forward(model, ids[:9], cache, True), logits[:9])


PROGRAM = f"""
import hashlib, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import qwen3_numba as fast
from packed import load_model
for quantize, kv_dtype in ((None, "f16"), (None, "bf16"), ("int8", "int8"), ("int4", "f32"), ("q5_1", "f16"),
                           ("q4_1", "f16"), ("q8_1", "f16"), ("rounded", "f16"), ("rounded", "bf16")):
    model = load_model(sys.argv[1], quantize, 2, kv_dtype)
    logits = logits_of(model, [i * 7 % 311 for i in range(300)])
    print(quantize, kv_dtype, hashlib.sha256(logits.tobytes()).hexdigest())
"""


@pytest.mark.compiles
@pytest.mark.parametrize("path", ["vnni", "avx2", "plain"])
def test_the_same_bits_on_other_cpus(path, tmp_path):
    """With the instructions that other CPUs with fma have; AVX-512 is switched off, for NumPy's cosines, too."""
    if path not in cpu.PATHS:
        pytest.skip(f"this CPU has no {path}")
    model = make_random_model(SHAPES["odd sizes"], tmp_path / "model", "bfloat16")

    def hashes(**environment):
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(model)], capture_output=True, text=True, timeout=900,
                              env=os.environ | environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    longer = " ".join(name for name in __cpu_dispatch__ if name.startswith(("AVX512", "X86_V4")))
    assert hashes(QWEN3_INT8_PATH=path, NUMBA_CACHE_DIR=str(tmp_path / "kernels"),
                  NPY_DISABLE_CPU_FEATURES=longer) == hashes()


@pytest.mark.parametrize("quantize, kv_dtype, expected", [
    (None, "f16", "92e430a49d16d772"), ("int8", "f16", "822504187bd50d92"), ("int4", "f16", "767a636a88a41a94"),
    ("rounded", "f16", "cbe9a239a0b110a5"), ("rounded", "bf16", "7975de1f67050f8d"),
    ("int8", None, "d5a9b4ebb67e7834")])
def test_the_bundled_model_on_every_cpu(quantize, kv_dtype, expected):
    """Whole, in pieces and in a batch: the same bits on x86 with AVX-512 and without, and on ARM, see emulate.py."""
    model, ids = load_model(ROOT / "demo", quantize, 2, kv_dtype), random_ids(45, 0, 4096)
    whole = logits_of(model, ids)
    cache = model.engine.new_cache(model.config)
    pieces = [fast.forward(model, ids[start:end], cache, True)
              for start, end in ((0, 30), (30, 34), (34, 44), (44, 45))]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    caches = [model.engine.new_cache(model.config) for _ in range(3)]
    batch = together(model, caches, [ids[:10], ids[:1], ids[:20]])
    np.testing.assert_array_equal(batch, np.concatenate([whole[:10], whole[:1], whole[:20]]))
    assert hashlib.sha256(whole.tobytes()).hexdigest()[:16] == expected
