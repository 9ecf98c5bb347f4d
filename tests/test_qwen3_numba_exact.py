"""The fast engine's promise: a token's logits depend on the tokens before it and on nothing else, bit for bit."""
import os
import subprocess
import sys

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import BASE, CASES, ROOT
from helpers import random_ids, read_safetensors, with_tensors
from make_random_model import make_random_model
from packed import load_model
import qwen3_numba as fast
from qwen3_kernels import vectors

SHAPES = {"group of 2": BASE, "group of 5, head_dim 24": CASES["group of 5, head_dim 24"][0],
          "odd sizes": CASES["odd sizes"][0], "group of 8, wide": BASE | {
              "hidden_size": 1120, "intermediate_size": 1184, "num_hidden_layers": 1, "num_attention_heads": 8,
              "num_key_value_heads": 1, "head_dim": 96}}
N = 600  # tokens: three blocks of the attention


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


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "f32", "int8"])
@pytest.mark.parametrize("dtype, quantize", [("bfloat16", None), ("float16", None), ("float32", None),
                                             ("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", "q5_1"),
                                             ("float32", "q4_1")])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_way_of_asking(shape, dtype, quantize, kv_dtype, reference, data):
    """In pieces of any lengths, with any number of threads, beside other sequences, after tokens were taken back, with
    a beginning copied from another sequence: the same bits as one token after the other."""
    path, ids, expected = reference(shape, dtype, quantize, kv_dtype)
    model = load_model(path, quantize, data.draw(st.integers(1, 4), label="threads"), kv_dtype)
    lengths = data.draw(st.lists(st.integers(1, N), min_size=1, max_size=4), label="lengths")
    wrong = random_ids(N, 2, model.config.vocab_size)
    cache, done = model.engine.new_cache(model.config, N, len(lengths)), np.zeros(len(lengths), int)
    piece = st.one_of(st.integers(0, 12), st.integers(0, N))
    while (done < lengths).any():
        now = [min(data.draw(piece, label="piece"), length - n) for n, length in zip(done, lengths)]
        sequence = int(np.argmax(lengths - done))
        now[sequence] = max(now[sequence], 1)
        action = data.draw(st.integers(0, 5), label="action")
        if action == 0:  # wrong tokens, taken back
            fast.forward(model, [wrong[:n] for n in now], cache)
            for i, length in enumerate(done):
                cache.truncate(int(length), i)
        if action == 1 and len(lengths) > 1:  # a beginning that another sequence has computed
            source = int(np.argmax(done))
            n = min(int(done[source]), lengths[sequence] - 1)
            if n > done[sequence]:
                cache.copy(sequence, cache, source, n)
                done[sequence] = n
                now[sequence] = 1
        logits = fast.forward(model, [ids[n:n + m] for n, m in zip(done, now)], cache, all_logits=True)
        np.testing.assert_array_equal(logits, np.concatenate([expected[n:n + m] for n, m in zip(done, now)]))
        done += now


PROGRAM = f"""
import hashlib, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import qwen3_numba as fast
from packed import load_model
for quantize, kv_dtype in ((None, "f16"), (None, "bf16"), ("int8", "int8"), ("int4", "f32"), ("q5_1", "f16"),
                           ("q4_1", "f16")):
    model = load_model(sys.argv[1], quantize, 2, kv_dtype)
    logits = fast.forward(model, [i * 7 % 311 for i in range(300)], model.engine.new_cache(model.config), True)
    print(quantize, kv_dtype, hashlib.sha256(logits.tobytes()).hexdigest())
"""


@pytest.mark.compiles
@pytest.mark.parametrize("path", ["vnni", "avx2", "plain"])
def test_the_same_bits_on_other_cpus(path, tmp_path):
    """With the instructions that other CPUs with fma have; AVX-512 is switched off, for NumPy's cosines, too."""
    if path not in vectors.PATHS:
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


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "f32", "int8"])
def test_nan_stays_in_its_own_text(tmp_path, kv_dtype):
    """A text whose numbers are broken leaves nothing behind in the work space that the next one uses."""
    path = make_random_model(BASE | {"head_dim": 48, "tie_word_embeddings": False}, tmp_path, "float32")
    embedding = read_safetensors(path / "model.safetensors")[0]["model.embed_tokens.weight"]
    with_tensors(path / "model.safetensors", {"model.embed_tokens.weight": np.where(
        np.arange(embedding["shape"][0])[:, None] == 7, np.nan, np.ones(embedding["shape"], np.float32))})
    model = fast.load_model(path, kv_dtype=kv_dtype)
    cache = model.engine.new_cache(model.config, 50)
    expected = fast.forward(model, [5], cache)
    cache.truncate(0)
    assert np.isnan(fast.forward(model, [7], cache)).any()
    cache.truncate(0)
    np.testing.assert_array_equal(fast.forward(model, [5], cache), expected)
