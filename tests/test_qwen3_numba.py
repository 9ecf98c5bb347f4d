"""The fast engine against qwen3.py, in all formats; its command line."""
import re
import sys
import threading
import time

import numpy as np
import pytest

import qwen3
from configs import BASE, CASES, HYBRID, HYBRID_MOE, ROOT
from helpers import (assert_one_line, change_stored, logits_of, message_of, random_ids, read_safetensors, stored_in,
                     with_tensors)
from helpers import write_safetensors as write_file
from make_random_model import make_random_model
from packed import FORMATS, MOST, oracle_of, published, round_vectors, to_bf16, with_minima
from qwen3_lib.generation.processors import log_softmax
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.kernels import weights
from qwen3_lib.kernels.layout import INT8
from qwen3_lib.kernels.memory import LargePages
from test_qwen3_moe import MOE
import qwen3_numba as fast

pytestmark = pytest.mark.core


def tensor_of(path, name: str) -> qwen3.Tensor:
    return qwen3.map_safetensors(path / "model.safetensors")[name]


def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    """The root mean square of the difference, relative to the logits' spread."""
    return float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())


# ---- The same logits and answers -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_logits(name, tmp_path):
    config, dtype, shards = CASES[name]
    path = make_random_model(config, tmp_path, dtype, shards)
    oracle = qwen3.load_model(path)
    ids = np.random.default_rng(0).integers(0, oracle.config.vocab_size, 90)
    expected = logits_of(oracle, ids)
    for quantize, limit in ((None, 1e-3), ("int8", 0.05), ("int4", 0.5)):
        model = fast.load_model(path, quantize, activations="f32")
        logits = logits_of(model, ids)
        assert distance(logits, expected) < limit


@pytest.mark.skipif(sys.platform != "linux", reason="weights move on Linux alone")
@pytest.mark.parametrize("config", [BASE, HYBRID])
@pytest.mark.parametrize("room", ["three times as much", "none", "a limit of the process"])
def test_matrices_move_out_of_a_mapped_file(config, room, tmp_path, monkeypatch):
    """Where memory has room for three times as much: then the file's matrices may change, and no bit of logits does."""
    def fails(*_):
        raise MemoryError

    moves = room == "three times as much"
    path, ids = make_random_model(config, tmp_path, "bfloat16"), np.arange(30)
    expected, file = logits_of(fast.load_model(path), ids), path / "model.safetensors"
    monkeypatch.setattr(weights, "available_memory", lambda: 3 * (room != "none") * file.stat().st_size)
    if room == "a limit of the process":
        monkeypatch.setattr(LargePages, "take", fails)
    model = fast.load_model(path)
    cache = model.engine.new_cache(model.config)
    found = [fast.forward(model, ids[i:i + 1], cache) for i in range(20)]
    header, data = read_safetensors(file)
    start, changed = file.stat().st_size - len(data), bytearray(data)
    for name, tensor in header.items():
        if "layers" in name:
            begin, end = tensor["data_offsets"]
            changed[begin:end] = bytes(end - begin)
    with open(file, "r+b") as mapped:
        mapped.seek(start)
        mapped.write(changed)
    found += [fast.forward(model, ids[i:i + 1], cache) for i in range(20, 30)]
    np.testing.assert_array_equal(found[:20], expected[:20])
    assert np.array_equal(found[20:], expected[20:]) == moves


@pytest.mark.skipif(sys.platform != "linux", reason="weights move on Linux alone")
def test_one_thread_at_a_time_moves_matrices(tmp_path, monkeypatch):
    """Else two matrices could get the same memory."""
    inside, most, take = [], [], LargePages.take

    def slow(pages, shape):
        inside.append(shape)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return take(pages, shape)

    monkeypatch.setattr(weights, "available_memory", lambda: 2**40)
    monkeypatch.setattr(LargePages, "take", slow)
    w = fast.load_model(make_random_model(BASE, tmp_path, "bfloat16")).weights

    def move_all():
        while w.mapped:
            weights.move_layer(w)

    threads = [threading.Thread(target=move_all) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert most and max(most) == 1 and not w.mapped


@pytest.mark.parametrize("odd", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight",
                                 "model.layers.2.mlp.down_proj.weight"])
def test_a_matrix_of_another_dtype(odd, tmp_path):
    """One of float16 among others of bfloat16, in whose products vectors have another order."""
    path = make_random_model(BASE, tmp_path, "bfloat16")
    header, data = read_safetensors(path / "model.safetensors")
    begin, end = header[odd]["data_offsets"]
    header[odd]["dtype"] = "F16"  # as large as bfloat16
    half = qwen3.to_float32(tensor_of(path, odd)).astype(np.float16).tobytes()
    write_file(path / "model.safetensors", header, data[:begin] + half + data[end:])
    oracle, model, ids = qwen3.load_model(path), fast.load_model(path, kv_dtype="f32", activations="f32"), np.arange(40)
    expected = logits_of(oracle, ids)
    assert distance(logits_of(model, ids), expected) < 1e-5


def in_short_texts(model) -> np.ndarray:
    """The logits of 20 texts of 3 tokens."""
    return np.concatenate([logits_of(model, ids) for ids in np.reshape(random_ids(60), (20, 3))])


def assert_like_numpy(model, monkeypatch):
    """The texts are short, for now and then the last bit of a number is another before a vector is rounded."""
    expected, found = map(in_short_texts, (oracle_of(model, monkeypatch), model))
    errors = np.sqrt(((found - expected)**2).mean(axis=1)) / expected.std()
    assert np.median(errors) < 1e-5, errors


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("config", [BASE, MOE | {"mlp_only_layers": [1], "hidden_size": 80}, HYBRID, HYBRID_MOE],
                         ids=["dense", "mixture", "hybrid", "hybrid mixture"])
def test_packed_matrices(config, quantize, tmp_path, monkeypatch):
    """The logits of the numbers for which the packed matrices stand."""
    model = fast.load_model(make_random_model(config, tmp_path, "float32"), quantize, kv_dtype="f32")
    assert_like_numpy(model, monkeypatch)


MIXED = {"q_proj": "BF16", "k_proj": "F16", "v_proj": "Q4_1", "gate_proj": "INT8", "up_proj": "BF16",
         "down_proj": "F16"}


@pytest.mark.parametrize("config", [BASE, MOE | {"moe_intermediate_size": 32, "num_experts_per_tok": 8}],
                         ids=["dense", "mixture"])  # all experts: rounded vectors choose no others
def test_matrices_of_several_formats_after_one_norm(config, tmp_path, monkeypatch):
    """Published packed matrices beside BF16 and F16: the logits of the numbers for which they stand."""
    path = make_random_model(config, tmp_path, "float32")

    def tensors(found, source):
        found = dict(found)
        for name, tensor in [*found.items()]:
            form, values = MIXED.get(name.split(".")[-2]), qwen3.to_float32(tensor)
            if form in ("BF16", "F16"):
                bits = (values.view(np.uint32) >> 16).astype(np.uint16) if form == "BF16" else values.astype(np.float16)
                found[name] = qwen3.Tensor(form, bits, tensor.mapping)
            elif form:
                kind = FORMATS[form.lower()]
                whole, scales, minima = with_minima(values, MOST.get(kind, 255))
                if kind == INT8:  # the whole numbers are signed, and there are no minima
                    whole, minima = whole - 128, None
                found[name] = published(whole, scales, minima, kind)
        return found

    with monkeypatch.context() as patch:
        change_stored(patch, tensors)
        model = fast.load_model(path, kv_dtype="f32", activations="f32")
    assert {FORMATS[form.lower()] for form in MIXED.values()} <= {
        int(weight[0].form) for weight in model.weights.matrices.values()}
    assert_like_numpy(model, monkeypatch)


def test_activations_of_bf16(tmp_path, monkeypatch):
    """Rounded before each product with bf16: the logits of qwen3.py with the same rounding. Weights of float16 stay."""
    path = make_random_model(BASE, tmp_path / "bf16", "bfloat16")
    oracle, model = qwen3.load_model(path), fast.load_model(path, kv_dtype="f32", activations="bf16")
    exact, found = map(in_short_texts, (oracle, model))
    round_vectors(monkeypatch, lambda w: True, to_bf16)
    errors = [np.sqrt(((found - some)**2).mean(axis=1)) / some.std() for some in (in_short_texts(oracle), exact)]
    assert np.median(errors[0]) < 1e-5 and np.median(errors[1]) > 1e-3
    path = make_random_model(BASE, tmp_path / "f16", "float16")
    same = [in_short_texts(fast.load_model(path, kv_dtype="f16", activations=form)) for form in fast.ACTIVATIONS]
    np.testing.assert_array_equal(*same)


@pytest.mark.parametrize("quantize, options, cached", [
    (None, {}, "rounded-bf16"), ("int8", {}, "rounded-bf16"), ("int4", {}, "rounded-bf16"),
    (None, {"activations": "f32"}, "f16"), ("int8", {"activations": "f32"}, "f16"),
    ("int8", {"kv_dtype": "f16"}, "f16"), ("int8", {"kv_dtype": "bf16"}, "rounded-bf16")])
def test_attention_in_quantized_models(quantize, options, cached, tmp_path):
    """Attention in a model with packed weights rounds to bf16 by default, also in a folder of --save-quantized."""
    models = [fast.load_model(ROOT / "demo", quantize, tokenizer=False, **options)]
    if quantize is not None:
        save_quantized(models[0], tmp_path / "packed", quantize)
        models.append(fast.load_model(tmp_path / "packed", tokenizer=False, **options))
    assert {model.engine.new_cache.dtype for model in models} == {cached}


def test_the_plain_cache_fits_a_quantized_model():
    """KVCache is what --kv-dtype f16 means, whatever the model's own caches are; one of NumPy is refused."""
    ids, models = random_ids(40), [fast.load_model(ROOT / "demo", "int8", 1, kind, tokenizer=False)
                                   for kind in (None, "f16")]
    plain = fast.forward(models[0], ids, fast.KVCache(models[0].config))
    np.testing.assert_array_equal(plain, fast.forward(models[1], ids, models[1].engine.new_cache(models[1].config)))
    assert "model.engine.new_cache" in message_of(fast.forward, models[0], ids, qwen3.KVCache(models[0].config))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_attention_costs_no_digits(form):
    """What bf16 in attention changes is little beside what 8 bits for a weight and a vector change."""
    ids, exact = random_ids(300, 3, 4096), qwen3.load_model(ROOT / "demo", tokenizer=False)
    models = [fast.load_model(ROOT / "demo", form, tokenizer=False, activations=kind) for kind in ("f32", None)]
    expected, *found = (log_softmax(logits_of(model, ids).astype(np.float64)) for model in (exact, *models))
    plain, rounded = ((np.exp(expected) * (expected - some)).sum(axis=1).mean() for some in found)
    assert rounded < 1.1 * plain


def test_activations_of_another_format():
    assert_one_line(message_of(fast.load_model, ROOT / "demo", activations="f16"), "activations", "f32", "bf16", "f16")


@pytest.mark.parametrize("kv_dtype, limit", [("f16", 1e-3), ("bf16", 1e-2), ("f32", 1e-5), ("int8", 2e-2)])
@pytest.mark.parametrize("name", ["group of 5, head_dim 24", "odd sizes", "head_dim 128", "YaRN, transformers 5"])
def test_caches(name, kv_dtype, limit, tmp_path):
    """Long enough for several parts of the attention, in pieces that take each way to it."""
    config, dtype, shards = CASES[name]
    path = make_random_model(config | {"max_position_embeddings": 1000}, tmp_path, dtype, shards)
    oracle, model = qwen3.load_model(path), fast.load_model(path, kv_dtype=kv_dtype, activations="f32")
    ids = np.random.default_rng(0).integers(0, oracle.config.vocab_size, 600)
    expected = logits_of(oracle, ids)
    cache, ends = model.engine.new_cache(model.config), [0, 500, 501, 502, 508, 580, 600]
    logits = np.concatenate([fast.forward(model, ids[a:b], cache, all_logits=True) for a, b in zip(ends, ends[1:])])
    assert distance(logits, expected) < limit
    for a, b in zip(ends[1:], ends[2:]):
        assert distance(logits[a:b], expected[a:b]) < 2 * limit
    width = -(-model.config.head_dim // 32) * 32
    assert cache.k.itemsize * cache.k.shape[-1] == {"f16": 2, "bf16": 2, "f32": 4, "int8": 1.0625}[kv_dtype] * width


@pytest.mark.parametrize("tensor", ["self_attn.q_proj", "mlp.gate", "mlp.experts.3.up_proj", "mlp.experts.7.down_proj",
                                    "input_layernorm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_weights_are_found(tensor, value, tmp_path):
    path = make_random_model(MOE | {"num_experts_per_tok": 8}, tmp_path, "float32")
    weight = np.array(tensor_of(path, name := f"model.layers.1.{tensor}.weight").data)
    weight[0] = value
    with_tensors(path / "model.safetensors", {name: weight})
    model = fast.load_model(path)
    for prompt in ([1, 2, 3], [1]):
        assert "not finite" in message_of(lambda prompt=prompt: list(qwen3.generate(model, prompt, 4, temperature=0)))


# ---- Weights that can't be packed ------------------------------------------------------------------------------------

@pytest.mark.parametrize("form, name", [("int8", "model.embed_tokens.weight"),
                                        ("int4", "model.layers.1.mlp.down_proj.weight")])
@pytest.mark.parametrize("value, words", [(np.inf, "not finite"), (-np.inf, "not finite"), (np.nan, "not finite"),
                                          (1e8, "largest weight is 1e+08"), (-1e8, "largest weight is 1e+08")])
def test_weights_that_have_no_place_in_the_format(value, words, name, form, tmp_path):
    """One in the last row, which has a block of its own: 8 bits made 0 of infinity, without a word."""
    path = make_random_model(BASE, tmp_path, "float32")
    weight = np.array(tensor_of(path, name).data)
    weight[-1, -1] = value
    with_tensors(path / "model.safetensors", {name: weight})
    with pytest.raises(qwen3.InputError, match=re.escape(name) + ".*" + re.escape(words)):
        fast.load_model(path, form)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_tensors_of_tiny_and_of_huge_weights(form, tmp_path):
    """Tiny digits would be lost; only if all are 0, there is none to lose. 2**18 is still taken."""
    path, name = make_random_model(BASE, tmp_path, "float32"), "model.layers.0.self_attn.q_proj.weight"
    weight = np.array(tensor_of(path, name).data)
    place = np.unravel_index(np.abs(weight).argmax(), weight.shape)
    for largest, works in ((1e-12, False), (0, True), (1e-8, True), (2.0**18, True), (2.0**18 + 1 / 32, False)):
        some = weight * np.float32(largest / abs(weight[place]))
        some[place] = largest
        with_tensors(path / "model.safetensors", {name: some})
        if works:
            model = fast.load_model(path, form)
            assert np.isfinite(fast.forward(model, [1], fast.KVCache(model.config))).all()
        else:
            with pytest.raises(qwen3.InputError, match=re.escape(name) + ".*largest weight"):
                fast.load_model(path, form)


# ---- Numbers too large for the cache ---------------------------------------------------------------------------------

@pytest.mark.parametrize("kv_dtype, factor, works", [("f16", 1e3, True), ("f16", 1e6, False), ("int8", 1e6, True),
                                                     ("int8", 1e9, False), ("bf16", 1e9, True), ("f32", 1e9, True)])
@pytest.mark.parametrize("tensor", ["self_attn.v_proj", "self_attn.k_norm"])
def test_a_cache_that_overflows_says_so(tensor, kv_dtype, factor, works, tmp_path):
    """And which cache holds such numbers; all weights are finite, and so is the computation."""
    path, name = make_random_model(BASE, tmp_path / "model", "float32"), f"model.layers.1.{tensor}.weight"
    weight = np.array(tensor_of(path, name).data)
    with_tensors(path / "model.safetensors", {name: weight * np.float32(factor)})
    model = fast.load_model(path, kv_dtype=kv_dtype, activations="f32")
    for prompt in ([1, 2, 3], list(range(40))):
        if works:
            assert len(list(qwen3.generate(model, prompt, 4, temperature=0, eos_token_ids=()))) == 4
        else:
            message = message_of(lambda prompt=prompt: list(qwen3.generate(model, prompt, 4, temperature=0)))
            assert "cache" in message and "--kv-dtype bf16" in message and "computation" not in message


@pytest.mark.parametrize("form, factor", [
    ("f16", 1e-6), ("int8", 1e-6), ("int8", 0), ("f16", 1), ("int8", 1), ("f32", 1e-6)])
def test_values_that_vanish_in_the_cache_are_said_once(tmp_path, capfd, form, factor):
    path, name = make_random_model(BASE, tmp_path, "float32"), "model.layers.1.self_attn.v_proj.weight"
    values = qwen3.to_float32(stored_in(path)[name]) * np.float32(factor)
    with_tensors(path / "model.safetensors", {name: values})
    model = fast.load_model(path, kv_dtype=form, tokenizer=False)
    for prompt in ([5], [1, 2, 3], range(40)):
        fast.forward(model, list(prompt), model.engine.new_cache(model.config))
    said = [line for line in capfd.readouterr().err.splitlines() if "cache" in line]
    assert len(said) == (factor != 1 and form != "f32")
    assert all("layer 1 " in line and "--kv-dtype f32" in line for line in said)
