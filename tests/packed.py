"""Packed weights as they lie in memory, unpacked again by NumPy from the description of the format."""
import numpy as np

import qwen3_numba as fast
from qwen3_kernels import compiled
from qwen3_kernels.layout import BF16, F16, F32, INT4, INT5, INT8, Weight, packed_shape, padded

FORMATS = {"f32": F32, "bf16": BF16, "f16": F16, "int8": INT8, "int5": INT5, "int4": INT4}


def stored(w: np.ndarray, form: int) -> tuple[np.ndarray, Weight]:
    """(the matrix as it lies in memory, its Weight) of weights [rows, n]."""
    rows, n = w.shape
    if form >= INT8:
        wide = np.zeros((padded(rows, 32), padded(n, 64)), np.float32)
        wide[:rows, :n] = w
        data, work = fast.aligned(packed_shape(rows, n, form)), np.empty((10, 32), np.float32)
        for i, block in enumerate(data):
            compiled.kernels().quantize_block(np.ascontiguousarray(wide[32 * i:32 * i + 32].T), form, block, work)
    else:
        data = np.zeros((rows, padded(n, 32)), {F32: np.float32, BF16: np.uint16, F16: np.float16}[form])
        data[:, :n] = (w.view(np.uint32) >> 16) if form == BF16 else w
    return data, Weight(data.ctypes.data, data.strides[0], form, rows, n)


def reference(data: np.ndarray, weight: Weight) -> np.ndarray:
    """What stored weights stand for, by NumPy from the format's description."""
    if weight.form == BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)[:, :weight.columns]
    if weight.form < INT8:
        return data.astype(np.float32)[:, :weight.columns]
    if weight.rows == 0:
        return np.empty((0, weight.columns), np.float32)
    whole, scales, zeros = unpacked(data, weight.form)
    values = (whole - np.repeat(zeros, 32, axis=1)) * np.repeat(scales, 32, axis=1)
    return values[:weight.rows, :weight.columns].astype(np.float32)


def unpacked(data: np.ndarray, form: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(whole numbers [rows, columns], scales, zeros [rows, groups]) of packed weights, rows and columns padded."""
    halves, n_fifths = (1, 0) if form == INT8 else (2, 256 if form == INT5 else 0)
    units = data.reshape(len(data), -1, 64 * halves + n_fifths + 1024)  # [blocks, units, bytes]
    words = units[..., :64 * halves].copy().view(np.uint16).reshape(len(data), -1, 32).astype(np.int32)
    exponent, fraction = words >> 10, words & 1023
    scales = 2.0 ** (exponent + 80 - 127) * (1 + fraction / 1024)  # 6 and 10 bits
    zeros = np.full(words.shape, 128.0) if form == INT8 else (6 + (words & 15) / 4) * (1 if form == INT4 else 2)
    values = units[..., -1024:].astype(np.int32).reshape(len(data), -1, 1, 8, 32, 4)
    if form != INT8:
        values = np.concatenate([values & 15, values >> 4], axis=2)
    if form == INT5:
        bits = np.unpackbits(units[..., 128:384], axis=-1, bitorder="little").reshape(len(data), -1, 8, 2, 32, 4)
        values = values + 16 * bits.astype(np.int32).swapaxes(2, 3)
    whole = values.reshape(len(data), -1, 8, 32, 4).transpose(0, 3, 1, 2, 4).reshape(32 * len(data), -1)
    return whole, *(x.transpose(0, 2, 1).reshape(len(whole), -1) for x in (scales, zeros))
