"""Folders of MLX: the numbers that mx.dequantize gives, and each model type's names, axes and norms."""
import base64
import json
import mmap
import re
from functools import partial

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE, FLASH, HYBRID, HYBRID_MOE, NEXT, ROOT, asr_config, seeing_hybrid, vl_config
from hearing import make_hearing, voice
from helpers import (assert_batches_and_drafts_change_nothing, assert_one_line, edit_json, logits_of,
                     message_of, random_ids, run_main)
from make_random_model import make_random_model
from published import change_config, mlx, publish, quantize_model, tensors_of, write_tensors
from qwen3 import Tensor
from qwen3_lib.io.formats import METHODS, unpacked
from qwen3_lib.io.models import open_model
from qwen3_lib.io.pictures import picture_of
from qwen3_lib.io.schemes import mlx_schemes
from qwen3_lib.io.tensors import PackedTensor
from qwen3_lib.kernels.layout import is_packed
from test_qwen3_moe import MOE
from test_qwen3_numba import distance

make = partial(make_random_model, dtype="float32")
GOLDEN = json.loads((ROOT / "tests/golden_mlx.json").read_text())


@pytest.mark.parametrize("case", GOLDEN)
def test_the_numbers_are_those_of_mlx(case):
    """Packed by mx.quantize: tests/make_golden_mlx.py."""
    mode, bits, size = re.fullmatch(r"(\w+), (\d) bits, groups of (\d+)", case).groups()
    codes = {"weight": "U32", "scales": "BF16" if mode == "affine" else "U8", "biases": "BF16", "values": "F32"}
    arrays = {name: np.frombuffer(base64.b64decode(text), {"U32": "<u4", "BF16": "<u2", "U8": "u1", "F32": "<f4"}[
        codes[name]]).reshape(2, -1) for name, text in GOLDEN[case].items()}
    values, memory = arrays.pop("values"), mmap.mmap(-1, 4096)
    parts = {name: Tensor(codes[name], array, memory) for name, array in arrays.items()}
    scheme = mlx_schemes({"mode": mode, "bits": int(bits), "group_size": int(size)})[0]
    shape, _, blocks, group = METHODS["mlx"].function("x", parts, scheme)
    assert shape == (2, 128) and group == int(size) and np.array_equal(blocks(0, 2).values(), values)
    if mode == "affine":  # the writer makes scales of both signs
        assert set(np.sign(blocks(0, 2).scales.reshape(-1))) == {-1, 1} or size != "32"
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_0"  # single rows, of a table of n-grams
    table = unpacked({f"{name}.{part}": tensor for part, tensor in parts.items()}, "mlx", [scheme], ROOT)
    assert np.array_equal(table[f"{name}.weight"].rows(np.array([1, 0, 1])), values[[1, 0, 1]])


# ---- Whole folders ---------------------------------------------------------------------------------------------------

def converted(path, prefix="", tower="", added=(), head_added=True):
    """Makes a folder of Qwen's names one of MLX's. prefix: of the language model; added: the norms that get 1.

    tower: how the names of the tower begin in Qwen's files. head_added: whether an MTP head's norms get 1, too.
    """
    tensors, stacks = {}, {}
    for name, (dtype, data) in tensors_of(path).items():
        if expert := re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", name):
            stacks.setdefault(f"{expert[1]}.switch_mlp.{expert[3]}", {})[int(expert[2])] = dtype, data
            continue
        tensors[name] = dtype, data
    for name, each in stacks.items():
        tensors[name] = each[0][0], np.stack([each[i][1] for i in range(len(each))])
    out = {}
    for name, (dtype, data) in tensors.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if "conv" in part and data.ndim > 2 or part == "proj" and data.ndim == 5:  # channels last
            data = data.transpose(0, *range(2, data.ndim), 1)
        if part in added and (head_added or not name.startswith("mtp.")) and "linear_attn" not in name \
                and not (tower and name.startswith(tower)):
            dtype, data = "float32", data + np.float32(1)
        if tower and name.startswith(tower):
            name = name.removeprefix(tower) if tower == "thinker." else name.replace(tower, "vision_tower.")
        elif name.startswith("thinker."):
            name = name.removeprefix("thinker.")
        elif not name.startswith("mtp."):
            name = prefix + name.replace("model.language_model.", "model.").replace(".shard_", ".shards.")
        out[name] = dtype, data
    write_tensors(path / "model.safetensors", out)
    index = {"metadata": {}, "weight_map": dict.fromkeys(out, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm", "pre_fc_norm_hidden",
         "pre_fc_norm_embedding")
ENDS = ("_proj.weight", "_qkvz.weight", "_ba.weight", "_qkv.weight", "_z.weight", "_a.weight", "_b.weight",
        "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "shared_expert_gate.weight",
        "input_mix_weight_down.weight", "input_mix_weight_up.weight", "block_inject_weight.weight",
        *(f"ngram_embedding.shard_{i}.weight" for i in range(3)))
FOUR = {"group_size": 64, "bits": 4}
ROUTERS = {f"{start}model.layers.{i}.mlp.{name}": {"group_size": 64, "bits": 8} for start in ("", "language_model.")
           for name in ("gate", "shared_expert_gate") for i in range(9)}


def four_and_eight(w, settings):
    """4 bits; 8 of routers, as mlx-lm does it."""
    return mlx(w, settings | ({"bits": 8} if len(w) in (1, 8) else {}))


WIDE = {"hidden_size": 64, "intermediate_size": 128}
SPARSE = WIDE | {"moe_intermediate_size": 64}
HYBRIDS = SPARSE | {"shared_expert_intermediate_size": 64, "linear_value_head_dim": 32}
TEXTS = {  # name -> (config, prefix, norms)
    "qwen3": (BASE | WIDE, "", ()),
    "qwen3, untied": (BASE | WIDE | {"tie_word_embeddings": False}, "", ()),
    "qwen3_moe": (MOE | SPARSE, "", ()), "qwen3_next": (NEXT | HYBRIDS, "", NORMS),
    "qwen3_5": (HYBRID | HYBRIDS, "language_model.", NORMS),
    "qwen3_5_moe": (HYBRID_MOE | HYBRIDS, "language_model.", NORMS),
    "qwen4_exp": (FLASH | HYBRIDS | {"ple_embed_dim": 512, "hc_lowrank": 64}, "language_model.", ())}  # its norms stay
QUANTIZED = {"bf16": None, "4 bits": (four_and_eight, FOUR | ROUTERS), "3 bits": (mlx, FOUR | {"bits": 3}),
             "6 bits": (mlx, {"group_size": 32, "bits": 6, "mode": "affine"}),
             "mxfp4": (mlx, {"group_size": 32, "bits": 4, "mode": "mxfp4"})}


def both_forms(tmp_path, config, quantized):
    """The folder of a text model, and one with the same numbers that isn't quantized; both as Qwen publishes them."""
    path, plain = (make(config, tmp_path / name) for name in ("mlx", "plain"))
    if quantized:
        values = quantize_model(path, *quantized, ENDS)
        write_tensors(plain / "model.safetensors", {name: ("float32", value) for name, value in values.items()})
    if "qwen3_5" in config["model_type"]:  # with an MTP head and a tower, which mlx-lm drops
        for folder in (path, plain):
            publish(folder)
            tensors = {name: each for name, each in tensors_of(folder).items() if not name.startswith("model.visual.")}
            write_tensors(folder / "model.safetensors", tensors)
    return path, plain


@pytest.mark.parametrize("bits", QUANTIZED)
@pytest.mark.parametrize("name", TEXTS)
def test_text_models(name, bits, tmp_path):
    """Tensors, config and logits are those of the folder from which MLX's was converted; a norm plus 1 is rounded."""
    config, prefix, added = TEXTS[name]
    path, plain = both_forms(tmp_path, config, QUANTIZED[bits])
    found, expected = open_model(str(converted(path, prefix, added=added))), open_model(str(plain))
    assert found.config == expected.config and found.tensors.keys() == expected.tensors.keys() and not found.heads
    for key, tensor in expected.tensors.items():
        ours, theirs = qwen3.to_float32(found.tensors[key]), qwen3.to_float32(tensor)
        assert np.allclose(ours, theirs, rtol=0, atol=2e-7 if added and "norm" in key else 0), key
    matrices = [key for key in found.tensors if isinstance(found.tensors[key], PackedTensor)]
    assert bool(matrices) == (bits != "bf16")
    assert "model.embed_tokens.weight" in matrices or not matrices
    ids = random_ids(40)
    exact = logits_of(plain, ids)
    assert distance(logits_of(path, ids), exact) < (1e-4 if added else 1e-30)
    weights = fast.load_model(path).weights
    for key in matrices:  # in the fast engine, the very numbers
        if key in weights.matrices:
            values = qwen3.to_float32(expected.tensors[key])
            assert np.array_equal(fast.matrix_rows(weights.matrices[key], range(len(values))), values), key
            joined = key.endswith(("input_mix_weight_down.weight", "v_proj.weight"))  # each above another matrix
            assert is_packed(weights.matrices[key][0].form) or not joined, key


def test_groups_of_single_modules(tmp_path):
    """A layer's experts are one module in config.json, under the file's own name."""
    config, own = MOE | SPARSE | {"moe_intermediate_size": 96}, {"group_size": 32, "bits": 5}

    def pack(w, settings):
        return mlx(w, settings | (own if w.shape[1] == 96 else {}))

    modules = {f"model.layers.{i}.mlp.switch_mlp.down_proj": own for i in range(config["num_hidden_layers"])}
    path, plain = both_forms(tmp_path, config, (pack, FOUR | modules))
    assert np.array_equal(logits_of(converted(path), random_ids(40)), logits_of(plain, random_ids(40)))


@pytest.mark.parametrize("bits", ["4 bits", "6 bits"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_batches_and_drafts_change_no_bit(name, bits, tmp_path):
    """Of a hybrid in the fast engine, by its own MTP head, which is quantized, too."""
    config, prefix, added = TEXTS[name]
    path, _ = both_forms(tmp_path, config, QUANTIZED[bits])
    model, prompts = fast.load_model(converted(path, prefix, added=added)), [random_ids(n, n) for n in (9, 70, 130)]
    assert_batches_and_drafts_change_nothing(model, prompts)


@pytest.mark.parametrize("head_added", [False, True], ids=["raw", "plus 1"])
@pytest.mark.parametrize("beside", [False, True], ids=["one file", "a file beside it"])
def test_an_mtp_head(head_added, beside, tmp_path):
    """Its norms are stored as in Qwen's files or plus 1, whatever the model's are; the index may not name its file."""
    path, plain = both_forms(tmp_path, HYBRID | HYBRIDS, QUANTIZED["4 bits"])
    for folder in (path, plain):  # with the mean that Qwen's heads have
        tensors = tensors_of(folder)
        dtype, data = tensors["mtp.pre_fc_norm_embedding.weight"]
        tensors["mtp.pre_fc_norm_embedding.weight"] = dtype, data / 10 - np.float32(0.44)
        write_tensors(folder / "model.safetensors", tensors)
    converted(path, "language_model.", added=NORMS, head_added=head_added)
    if beside:
        tensors = tensors_of(path)
        for file, own in (("model.safetensors", False), ("model-mtp.safetensors", True)):
            write_tensors(path / file, {name: each for name, each in tensors.items() if name.startswith("mtp.") == own})
        (path / "model.safetensors.index.json").write_text(json.dumps(
            {"weight_map": {name: "model.safetensors" for name in tensors if not name.startswith("mtp.")}}))
    found, expected = open_model(str(path)), open_model(str(plain))
    assert found.config.mtp_num_hidden_layers == 1 and found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert np.allclose(qwen3.to_float32(found.tensors[key]), qwen3.to_float32(tensor), rtol=0, atol=2e-7), key


SEEING = {"qwen3_vl": (vl_config("2B"), ()), "qwen3_vl_moe": (vl_config("30B-A3B"), ()),
          "qwen3_5": (seeing_hybrid(HYBRID, "0.8B"), NORMS),
          "qwen3_5_moe": (seeing_hybrid(HYBRID_MOE, "9B, 27B"), NORMS)}


@pytest.mark.parametrize("name", SEEING)
def test_models_that_see(name, tmp_path):
    """The vectors of a picture are the same, bit for bit."""
    config, added = SEEING[name]
    path, plain = (make(config, tmp_path / each) for each in ("mlx", "plain"))
    converted(path, "language_model.", "model.visual.", added)
    found, expected = (qwen3.load_model(each, tokenizer=False) for each in (path, plain))
    picture = picture_of(np.random.default_rng(0).integers(0, 256, (300, 260, 3), np.uint8))
    assert np.array_equal(found.media.show(picture).vectors, expected.media.show(picture).vectors)
    assert distance(logits_of(found, random_ids(20)), logits_of(expected, random_ids(20))) < 1e-4


@pytest.mark.parametrize("size", ["0.6B", "1.7B"])
def test_models_that_hear(size, tmp_path):
    """The text model is quantized, the tower isn't."""
    path, plain = (make_hearing(asr_config(size), tmp_path / each) for each in ("mlx", "plain"))
    ends = tuple(f"thinker.model.layers.{i}.mlp.{name}_proj.weight" for i in range(3) for name in ("up", "down"))
    values = quantize_model(path, mlx, {"group_size": 64, "bits": 5}, ends)
    write_tensors(plain / "model.safetensors", {name: ("float32", value) for name, value in values.items()})
    converted(path, tower="thinker.")
    found, expected = (qwen3.load_model(each) for each in (path, plain))
    sounds = [each.media.vectors(each.media.hear(voice(30_000)).ids) for each in (found, expected)]
    assert np.array_equal(*sounds) and len(sounds[0])
    assert np.array_equal(logits_of(found, random_ids(20)), logits_of(expected, random_ids(20)))


def test_a_forced_aligner(tmp_path):
    """Its head, the classes, has lost its prefix, too."""
    path, plain = (make_hearing(asr_config("0.6B", n_classes=50), tmp_path / name) for name in ("mlx", "plain"))
    converted(path, tower="thinker.")
    found, expected = (open_model(str(each)) for each in (path, plain))
    assert found.heads.keys() == expected.heads.keys() == {"classes.weight"}
    assert found.tower.keys() == expected.tower.keys() and found.tensors.keys() == expected.tensors.keys()
    for key in expected.heads:
        assert np.array_equal(found.heads[key].data, expected.heads[key].data)


# ---- What config.json says -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_either_key_names_the_quantization(key, tmp_path, capfd):
    """As mlx-lm writes them, without a method; a command answers, and lists the folder."""
    vocabulary = json.loads((ROOT / "demo/config.json").read_text())["vocab_size"]
    path = make(BASE | WIDE | {"vocab_size": vocabulary}, tmp_path / "Qwen3-MLX-4bit")
    quantize_model(path, mlx, FOUR, ENDS)
    change_config(converted(path), **{"quantization_config": None, key: FOUR})
    status, text, _ = run_main(capfd, "--model", path, "--greedy", "--max-tokens", 3, "--json", "Hello")
    assert status == 0 and len(json.loads(text)["text"])


@pytest.mark.parametrize("changes, words", [
    ({"bits": 7}, ("bits = 7", "only 2 to 6 or 8")), ({"group_size": 16}, ("group_size = 16",)),
    ({"mode": "nvfp4"}, ("mode nvfp4",)), ({"mode": "mxfp4", "group_size": 64}, ("mxfp4", "group_size = 64")),
    ({"model.layers.0.mlp.down_proj": {"bits": "4", "group_size": 64}}, ("bits = 4",)),
    ({"group_size": 128}, ("weight has shape [64, 128], not [64, 64]",))], ids=str)
def test_what_is_refused(changes, words, tmp_path):
    path = make(BASE | WIDE, tmp_path)
    quantize_model(path, mlx, FOUR)
    edit_json(path / "config.json", {"quantization_config": FOUR | changes})
    assert_one_line(message_of(qwen3.load_model, path), str(path), *words)


@pytest.mark.parametrize("part, value, words", [
    ("biases", None, "down_proj.biases is missing"), ("scales", None, "lack the other parts of mlx"),
    ("biases", ("bfloat16", np.zeros((64, 1))), "biases has shape [64, 1]"),
    ("scales", ("uint8", np.zeros((64, 2))), "scales is U8"),
    ("weight", ("uint32", np.zeros((64, 17))), "17 words in a row")], ids=str)
def test_damaged_parts(part, value, words, tmp_path):
    path, name = make(BASE | WIDE, tmp_path), "model.layers.0.mlp.down_proj"
    quantize_model(path, mlx, FOUR)
    tensors = tensors_of(path) | {f"{name}.{part}": value}
    write_tensors(path / "model.safetensors", {key: each for key, each in tensors.items() if each is not None})
    assert_one_line(message_of(qwen3.load_model, path), str(path), words)
