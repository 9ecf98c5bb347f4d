"""Folders that mlx-lm itself has converted, against mlx-lm's own logits; a table of n-grams packed by mx.quantize.
Skipped without mlx-lm."""
import json
from functools import partial

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE, FLASH, HYBRID, HYBRID_MOE, NEXT, VOCABULARY
from helpers import logits_of, random_ids
from make_random_model import make_random_model
from published import change_config, publish, tensors_of, write_tensors
from qwen3_lib.kernels.layout import FORMATS
from test_mlx import HYBRIDS, SPARSE, WIDE
from test_qwen3_moe import MOE, fuse
from test_qwen3_numba import distance

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

make = partial(make_random_model, dtype="bfloat16")
SIZES = {"hidden_size": 128, "vocab_size": VOCABULARY}
MODELS = {"qwen3": BASE | WIDE, "qwen3_moe": MOE | SPARSE, "qwen3_next": NEXT | HYBRIDS, "qwen3_5": HYBRID | HYBRIDS,
          "qwen3_5_moe": HYBRID_MOE | HYBRIDS}
QUANTIZED = {  # options of mlx_lm.convert, and the fast engine's format of most matrices
    "bf16": ({}, "bf16"), "3 bits": ({"q_bits": 3, "q_group_size": 128}, "q4_1"),
    "4 bits": ({"q_bits": 4, "q_group_size": 64}, "q4_1"), "6 bits": ({"q_bits": 6, "q_group_size": 64}, "q8_1"),
    "8 bits": ({"q_bits": 8, "q_group_size": 32}, "q8_1"),
    "mxfp4": ({"q_bits": 4, "q_group_size": 32, "q_mode": "mxfp4"}, "q5_1")}


@pytest.fixture(scope="module", params=MODELS)
def original(request, tmp_path_factory):
    """A folder as Qwen publishes it."""
    path = tmp_path_factory.mktemp("original") / "model"
    hybrid = request.param.startswith("qwen3_5")
    make(MODELS[request.param] | SIZES, path, dtype="float32" if hybrid else "bfloat16")
    if request.param == "qwen3_5_moe":
        fuse(path)
    return publish(path) if hybrid else path


@pytest.mark.parametrize("case", QUANTIZED)
def test_what_mlx_lm_has_converted(case, original, tmp_path):
    """In float32, to which mlx-lm's scales are raised: the same numbers, in another order of sums."""
    options, form = QUANTIZED[case]
    path, ids = tmp_path / "mlx", random_ids(40)
    mlx_lm.convert(str(original), mlx_path=str(path), quantize=bool(options), dtype="bfloat16", **options)
    theirs, _ = mlx_lm.load(str(path))
    theirs.set_dtype(mx.float32)
    expected = np.array(theirs(mx.array([ids]))[0])
    assert distance(logits_of(path, ids), expected) < 2e-5
    model = fast.load_model(path, tokenizer=False)
    assert model.weights.format.startswith(form)
    for name, matrix in model.weights.matrices.items():  # the very numbers, but of what is kept in bf16 or float32
        if FORMATS[matrix[0].form].name == form and name in model.source.tensors:
            values = qwen3.to_float32(model.source.tensors[name])
            assert np.array_equal(fast.matrix_rows(matrix, range(len(values))), values), name
    assert "quantization" in json.loads((path / "config.json").read_text()) or not options


def packed_table(path, mode, bits, size):
    """Quantizes the table of n-grams of a folder by mx.quantize, under mlx-vlm's names -> name -> its values."""
    tensors, values = tensors_of(path), {}
    for name in [name for name in tensors if "ngram_embedding" in name]:
        rows = mx.array(tensors.pop(name)[1]).astype(mx.bfloat16)
        parts = mx.quantize(rows, group_size=size, bits=bits, mode=mode)
        floats = [part.astype(mx.float32) if part.dtype == mx.bfloat16 else part for part in parts]
        values[name] = np.array(mx.dequantize(*floats, group_size=size, bits=bits, mode=mode, dtype=mx.float32))
        start = name.replace(".shard_", ".shards.").removesuffix(".weight")
        for end, part in zip(("weight", "scales", "biases"), parts):
            dtype = str(part.dtype).removeprefix("mlx.core.")
            tensors[f"{start}.{end}"] = dtype, np.array(part.view(mx.uint16) if dtype == "bfloat16" else part)
    write_tensors(path / "model.safetensors", tensors)
    change_config(path, quantization={"group_size": size, "bits": bits, "mode": mode})
    return values


@pytest.mark.parametrize("mode, bits, size", [("mxfp4", 4, 32), *(
    ("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128))])
def test_a_quantized_table_of_n_grams(mode, bits, size, tmp_path):
    """Its rows are mx.dequantize's, and the logits those of the same model with these numbers, in both engines."""
    config, ids = FLASH | {"ple_embed_dim": 1024}, random_ids(40)  # rows of 128 numbers
    path, plain = (make(config, tmp_path / name, dtype="float32") for name in ("packed", "plain"))
    values = packed_table(path, mode, bits, size)
    write_tensors(plain / "model.safetensors", tensors_of(plain) | {
        name: ("float32", rows) for name, rows in values.items()})
    whole = np.concatenate([*values.values()])
    wanted = np.random.default_rng(0).integers(0, len(whole), (50, 8))
    for load in (qwen3.load_model, partial(fast.load_model, kv_dtype="f32", activations="f32")):
        found, expected = load(path), load(plain)
        weights = found.weights
        table = (weights["tables"] if isinstance(weights, dict) else weights.tables)[1]
        assert np.array_equal(table.take(wanted), whole[wanted].reshape(50, -1))
        stored = [each.data for part in table.parts for each in part.stored]
        assert len(stored) == 3 * (3 if mode == "affine" else 2) and not any(each.flags.owndata for each in stored)
        assert np.array_equal(logits_of(found, ids), logits_of(expected, ids))
