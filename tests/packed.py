"""Packed weights as they lie in memory, unpacked again by NumPy from the description of the format."""
import numpy as np

from qwen3_kernels import compiled
from qwen3_kernels.layout import BF16, FLOAT16, FLOAT32, INT4, INT8, packed_shape, padded
import qwen3_numba as fast

FORMATS = {"float32": FLOAT32, "bfloat16": BF16, "float16": FLOAT16, "int8": INT8, "int4": INT4}


def stored(w: np.ndarray, form: int) -> tuple[np.ndarray, np.ndarray]:
    """(the matrix as it lies in memory, (address, stride, format, rows, columns)) of weights [rows, n]."""
    rows, n = w.shape
    if form >= INT8:
        wide = np.zeros((padded(rows, 32), padded(n, 64)), np.float32)
        wide[:rows, :n] = w
        data = fast.aligned(packed_shape(rows, n, form))
        for i, block in enumerate(data):
            compiled.kernels().quantize_block(wide[32 * i:32 * i + 32], 8 if form == INT8 else 4, block)
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
    # [blocks, groups, 32]
    scales = units[..., :-1024].copy().view(np.float16).reshape(len(data), -1, 32).astype(np.float32)
    values = units[..., -1024:].astype(np.int32).reshape(len(data), -1, 1, 8, 32, 4)
    whole = values - 128 if bits == 8 else np.concatenate([values & 15, values >> 4], axis=2) - 8
    whole = whole.reshape(len(data), -1, 8, 32, 4).transpose(0, 3, 1, 2, 4).reshape(32 * len(data), -1)
    return whole, scales.transpose(0, 2, 1).reshape(len(whole), -1)
