"""Folders that mlx-lm itself has converted, against mlx-lm's own logits. Skipped without mlx-lm."""
import json
from functools import partial

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE, HYBRID, HYBRID_MOE, NEXT, VOCABULARY
from helpers import logits_of, random_ids
from make_random_model import make_random_model
from published import publish
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
