"""The fast engine against qwen3.py, in all formats; its command line; quantized checkpoints."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import qwen3
from configs import BASE, CASES, ROOT
from helpers import run_fast
from make_random_model import make_random_model
from qwen3_kernels.layout import VERSION
import qwen3_numba as fast

pytestmark = pytest.mark.core


def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    """The root mean square of the difference, relative to the logits' spread."""
    return float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())


# ----------------------------------------------------------------------------------------------------------------------
# The same logits and answers
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_logits(name, tmp_path):
    config, dtype, shards = CASES[name]
    path = make_random_model(config, tmp_path, dtype, shards)
    oracle = qwen3.load_model(path)
    ids = np.random.default_rng(0).integers(0, oracle.config.vocab_size, 90)
    expected = qwen3.forward(oracle, ids, qwen3.KVCache(oracle.config), all_logits=True)
    for quantize, limit in ((None, 1e-3), ("int8", 0.05), ("int4", 0.5)):
        model = fast.load_model(path, quantize)
        at_once = fast.forward(model, ids, fast.KVCache(model.config), all_logits=True)
        cache = fast.KVCache(model.config)
        pieces = [fast.forward(model, ids[a:b], cache, all_logits=True)
                  for a, b in zip([0, 1, 2, 5, 40], [1, 2, 5, 40, 48])]
        singly = [fast.forward(model, [i], cache)[None] for i in ids[48:]]
        stepwise = np.concatenate(pieces + singly)
        assert distance(at_once, expected) < limit and distance(stepwise, expected) < limit
        # what is rounded to 8 bits may fall to the other side
        assert distance(stepwise, at_once) < (1e-3 if quantize is None else 0.02)


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
    width = -(-model.config.head_dim // 32) * 32
    assert cache.k.itemsize * cache.k.shape[-1] == {"f16": 2, "bf16": 2, "int8": 1.0625}[kv_dtype] * width


def test_the_bundled_model_says_the_same():
    oracle = qwen3.load_model(ROOT / "demo")
    questions = ["What is the capital of France?", "What is 417 + 385?", "法国的首都是哪里？",
                 "Tell me a story about a fox."]
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
    cache = fast.KVCache(model.config)
    logits = np.array([fast.forward(model, [i], cache) for i in ids])
    assert distance(logits, expected) < 1e-3 and distance(logits[-100:], expected[-100:]) < 1e-3


@pytest.mark.parametrize("lengths", [(5, 1, 8), (70, 3, 68), (300, 64, 299, 200)])
def test_batches(lengths, tmp_path):
    """Prompts of different lengths, padded on their left, and steps of one and of several tokens after them."""
    path = make_random_model(BASE | {"max_position_embeddings": 1000}, tmp_path, "bfloat16")
    rng = np.random.default_rng(0)
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
    prompts = [oracle.tokenizer.encode(text)
               for text in ("The capital of France is", "One", "The capital of Japan is the city of")]
    assert (qwen3.generate_batch(model, prompts, max_new_tokens=12)
            == qwen3.generate_batch(oracle, prompts, max_new_tokens=12))
    cache = model.engine.new_cache(model.config)
    messages = [{"role": "user", "content": "My name is Mia."}]
    messages.append({"role": "assistant", "content": qwen3.chat(model, messages, cache=cache).finish().answer.content})
    reply = qwen3.chat(model, [*messages, {"role": "user", "content": "What is my name?"}], cache=cache).finish()
    assert reply.cached_tokens > 0 and "Mia" in reply.answer.content


@pytest.mark.parametrize("tensor", ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "layers.2.input_layernorm",
                                    "norm"])
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
# Processes
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [[], ["--quantize", "int8"], ["--threads", "1"],
                                     ["--threads", "5", "--quantize", "int8"]])
def test_command_line(options):
    done = run_fast("--model", ROOT / "demo", "--no-think", *options, "What is the capital of France?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n", "")


@pytest.mark.parametrize("options, words", [(["--quantize", "int2"], "invalid choice"),
                                            (["--threads", "0"], "threads")])
def test_bad_options(options, words):
    done = run_fast("--model", ROOT / "demo", *options, "Hello")
    assert done.returncode in (1, 2) and done.stdout == ""
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_numba(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('No module named numba')")
    done = run_fast("Hello", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "qwen3[fast]" in done.stderr and "qwen3.py" in done.stderr


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
    expected = fast.forward(model, ids, fast.KVCache(model.config), all_logits=True)
    for quantize in (None, form):
        saved = fast.load_model(tmp_path / "saved", quantize)
        np.testing.assert_array_equal(fast.forward(saved, ids, fast.KVCache(model.config), all_logits=True), expected)
    with pytest.raises(qwen3.InputError, match=f"this checkpoint is {form}"):
        fast.load_model(tmp_path / "saved", {"int8": "int4", "int4": "int8"}[form])
    with pytest.raises(qwen3.InputError, match="exists already"):
        fast.save_quantized(model, tmp_path / "saved", form)
    done = run_fast("--model", tmp_path / "saved", "--raw", "Hello", program="qwen3.py")
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
    model = make_random_model(BASE | {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 8},
                              tmp_path / "model")
    program = ("import resource, sys; sys.path.insert(0, '.'); import qwen3_numba\n"
               "qwen3_numba.kernels()\n"
               "sizes = 4096 * int(open('/proc/self/statm').read().split()[0])\n"
               f"resource.setrlimit(resource.RLIMIT_{limit})\n"
               "sys.exit(qwen3_numba.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", program, "--model", model, "--quantize", "int8", "--save-quantized",
                           tmp_path / "saved", "--threads", "1"], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "") and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
