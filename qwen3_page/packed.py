"""The weights of a folder that the fast engine has quantized, as qwen3.py wants them: each byte becomes its float32."""
from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import qwen3
from qwen3 import Config, Engine, InputError
from qwen3_io.checkpoint import StoredTensor, quantized_file, tensor_shapes
from qwen3_page.recorder import copied


def load_weights(path: Path, config: Config) -> dict[str, Any]:
    """The namesake of qwen3.load_weights, which refuses packed weights. Raises InputError where numba is absent."""
    if quantized_file(path) is None:
        return qwen3.load_weights(path, config)
    return copied(qwen3.load_weights, vars(qwen3) | {"map_weights": lambda *_: expanded(path, config)})(path, config)


def expanded(path: Path, config: Config) -> dict[str, StoredTensor]:
    """The tensors of a folder written by save_quantized, in float32."""
    try:
        import qwen3_numba
    except ImportError as error:
        raise InputError(f"{path}: quantized by the fast engine, which unpacks the weights: {error}") from error
    form, stored = qwen3_numba.read_quantized(path, config)
    shapes = tensor_shapes(asdict(config))

    def floats(name: str, tensor: StoredTensor) -> StoredTensor:
        if tensor.dtype != "U8":
            return tensor
        rows, columns = shapes[name]
        packed = qwen3_numba.packed_form(name, str(form))
        matrix = np.array(qwen3_numba.Weight(tensor.data.ctypes.data, tensor.data.strides[0], packed, rows, columns))
        return tensor._replace(dtype="F32", data=qwen3_numba.matrix_rows(matrix, range(rows)))

    return {name: floats(name, tensor) for name, tensor in stored.items()}


ENGINE: Engine = replace(qwen3.NUMPY, load_weights=load_weights)
