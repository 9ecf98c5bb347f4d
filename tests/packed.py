"""Packed weights as they lie in memory, unpacked again by NumPy from the description of the format."""
import mmap
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numba
import numpy as np
import pytest

import qwen3
import qwen3_5
import qwen3_numba as fast
from qwen3_5 import HybridConfig
from helpers import change_stored
from qwen3_lib.io.tensors import Blocks, PackedTensor
from qwen3_lib.kernels.build import kernel
from qwen3_lib.kernels.layout import (BF16, F16, F32, GROUP16_BYTES, INT4, INT5, INT8, Q4_0, Q4_1, Q4_K, Q5_1, Q5_K,
                                      Q6_K, Q8_1, ROUNDED, SIZES_BYTES, WEIGHT, address_table, is_packed, packed_shape,
                                      padded)
from qwen3_lib.kernels.memory import aligned
from qwen3_lib.kernels.packing import Packer, matrix_rows

FORMATS = {"f32": F32, "bf16": BF16, "bf16_rounded": ROUNDED, "f16": F16, "int8": INT8, "int5": INT5, "int4": INT4,
           "q8_1": Q8_1, "q5_1": Q5_1, "q4_1": Q4_1, "q6_k": Q6_K, "q5_k": Q5_K, "q4_k": Q4_K, "q4_0": Q4_0}
FIVES = (INT5, Q5_1)
MOST = {Q8_1: 255, Q5_1: 31, Q4_1: 15, Q6_K: 63, Q5_K: 31, Q4_K: 15}
OF_GGUF = (Q6_K, Q5_K, Q4_K)


SUMS = [("scale", "f4"), ("total", "i4"), ("first", "i4"), ("less", "i4")]
GROUP, GROUP16, SIGNS = (np.dtype([*numbers, *SUMS]) for numbers in (
    [("bytes", "i1", 32)], [("odd", "i2", 16), ("even", "i2", 16)], [("sizes", "i1", 32), ("flips", "i1", 32)]))


def packed_vectors(whole: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes [n, groups, 32] with their scales [n, groups] as packed vectors: see layout.py."""
    found, sums = np.zeros(scales.shape, GROUP), whole.sum(-1, dtype=np.int32)
    found["bytes"], found["scale"], found["total"], found["less"] = whole, scales, sums, -128 * sums
    found["first"] = whole[..., :16].sum(-1, dtype=np.int32)
    if not GROUP16_BYTES:
        return found.view(np.uint8)
    in_16_bits = np.zeros(scales.shape, GROUP16)
    for name in ("scale", "total", "first"):
        in_16_bits[name] = found[name]
    in_16_bits["odd"], in_16_bits["even"] = whole[..., 1::2], whole[..., ::2]
    in_16_bits["less"] = -(whole[..., 1::2] * whole[..., ::2].astype(np.int32)).sum(-1)
    signs = np.zeros(scales.shape, SIGNS)
    for name in ("scale", "total", "first"):
        signs[name] = found[name]
    signs["sizes"], signs["flips"] = np.abs(whole), np.where(whole < 0, 127, -128)
    signs["less"] = -np.minimum(whole, 0).sum(-1, dtype=np.int32)
    return np.concatenate([each.view(np.uint8) for each in (found, in_16_bits, signs)], axis=-1)


def groups_of(packed: np.ndarray) -> np.ndarray:
    """The groups of packed vectors, without those of 16 bits and of signs that may follow."""
    n = packed.shape[-1] // (GROUP.itemsize + GROUP16_BYTES + SIZES_BYTES)
    return packed[..., :n * GROUP.itemsize].view(GROUP)


class FromPython:
    """A room of kernels whose functions Python can call: the rooms compile them without numba's wrappers."""

    def __init__(self, room):
        self.room = room

    @cache
    def __getattr__(self, name):
        function = getattr(self.room, name)
        return numba.njit(lambda *args: function(*args)) if hasattr(function, "py_func") else function


def stored(w: np.ndarray, form: int) -> tuple[np.ndarray, np.record]:
    """(the matrix as it lies in memory, its WEIGHT) of weights [rows, n]."""
    rows, n = w.shape
    if form in (Q8_1, Q5_1, Q4_1) and rows > 0:
        data = blocks_of(*with_minima(w, MOST[form]), form)
    elif form == Q4_0 and rows > 0:
        data = blocks_of(*signed(w), None, form)
    elif form in OF_GGUF and rows > 0:
        wide = np.zeros((rows, padded(n, 256)), np.float32)
        wide[:, :n] = w
        tensor = PackedTensor("F32", wide.shape, lambda start, stop: factored(wide, form, start, stop),
                              mmap.mmap(-1, 4096), 6, factored=True)
        with ThreadPoolExecutor(2) as pool:
            data = Packer(pool, []).exact(tensor, form)
    elif form >= INT8:
        data, group, work = aligned(packed_shape(rows, n, form)), *np.empty((2, 32, 32), np.float32)
        for i, block in enumerate(data):
            part = np.ascontiguousarray(w[32 * i:32 * i + 32], np.float32)
            kernel("quantize.quantize_block")(address_table((part, block, group, work)), form)
    else:
        data = np.zeros((rows, padded(n, 32)), {F32: np.float32, F16: np.float16}.get(form, np.uint16))
        data[:, :n] = (w.view(np.uint32) >> 16) if form in (BF16, ROUNDED) else w
    return data, np.array([(data.ctypes.data, data.strides[0], form, rows, n)], WEIGHT)[0]


def factored(w: np.ndarray, form: int, start: int, stop: int) -> Blocks:
    """Rows of weights in a form of GGUF, with factors. Scales of Q6_K have any sign."""
    size, rows = 16 if form == Q6_K else 32, w[start:stop]
    groups = rows.reshape(len(rows), -1, size)
    minima = np.maximum(-groups.min(axis=-1), 0)
    if form == Q6_K:
        scales = abs(groups).max(axis=-1) / 31 * np.where(np.arange(groups.shape[1]) % 3, 1, -1)
        wishes, most = [scales], [127]
    else:
        wishes, most = [(groups.max(axis=-1) + minima) / MOST[form], minima], [63, 63]
    in_blocks = [wish.reshape(len(rows), -1, 256 // size) for wish in wishes]
    factors = [(abs(wish).max(axis=-1) / top + 1e-7).astype(np.float16) for wish, top in zip(in_blocks, most)]
    whole = [np.rint(wish / factor[..., None].astype(np.float32)).clip(-top, top).reshape(len(rows), -1)
             for wish, factor, top in zip(in_blocks, factors, most)]
    exact = [np.repeat(factor.astype(np.float32), 256 // size, axis=1) * scale for factor, scale in zip(factors, whole)]
    added = 32 if form == Q6_K else exact[1][..., None] / np.where(exact[0] == 0, 1, exact[0])[..., None]
    numbers = np.rint(groups / np.where(exact[0] == 0, 1, exact[0])[..., None] + added).clip(0, MOST[form])
    numbers = numbers.astype(np.int16).reshape(rows.shape) - np.int16(32 if form == Q6_K else 0)
    scales, *minima = np.array(whole).astype(np.int16)
    return Blocks(numbers, scales, *minima or [None], np.array([factors[0], *(-factor for factor in factors[1:])]))


def with_minima(w: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights as whole numbers 0 to most, columns padded to 32, times scales like float16, plus minima of groups."""
    wide = np.zeros((len(w), padded(w.shape[1], 32)), np.float32)
    wide[:, :w.shape[1]] = w
    groups = wide.reshape(len(w), wide.shape[1] // 32, 32)
    minima = groups.min(axis=-1)
    scales = ((groups.max(axis=-1) - minima) / most).astype(np.float16).astype(np.float32)
    whole = np.clip(np.rint((groups - minima[..., None]) / scales[..., None]), 0, most)
    return whole.astype(np.int16).reshape(wide.shape), scales, minima


def signed(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights as whole numbers -8 to 7, columns padded to 64, times float16 scales of any sign: the largest is -8."""
    wide = np.zeros((len(w), padded(w.shape[1], 64)), np.float32)
    wide[:, :w.shape[1]] = w
    groups = wide.reshape(len(w), -1, 32)
    largest = np.take_along_axis(groups, abs(groups).argmax(axis=-1)[..., None], axis=-1)
    scales = (largest / -8).astype(np.float16).astype(np.float32)
    whole = np.rint(groups / np.where(scales == 0, 1, scales)).clip(-8, 7)
    return whole.astype(np.int16).reshape(wide.shape), scales[..., 0]


def blocks_of(whole: np.ndarray, scales: np.ndarray, minima: np.ndarray | None, form: int) -> np.ndarray | None:
    """The blocks in which the fast engine keeps a published matrix of these numbers."""
    with ThreadPoolExecutor(2) as pool:
        return Packer(pool, []).exact(published(whole, scales, minima, form), form)


def published(whole: np.ndarray, scales: np.ndarray, minima: np.ndarray | None, form: int) -> PackedTensor:
    def blocks(start: int, stop: int) -> Blocks:
        return Blocks(whole[start:stop].copy(), scales[start:stop], None if minima is None else minima[start:stop])

    bits = {INT8: 8, Q8_1: 6, Q5_1: 5, Q4_1: 4, Q4_0: 4}[form]
    return PackedTensor("BF16", whole.shape, blocks, mmap.mmap(-1, 4096), bits, group=32)


def load_model(path, quantize: str | None, threads: int, kv_dtype: str | None) -> qwen3.Model:
    """fast.load_model; with "q5_1", "q4_1" or "q4_0", all matrices of a Qwen3 are as if published in that form.

    With None, the activations are float32; with "rounded", bf16.
    """
    if quantize in (None, "rounded"):
        return fast.load_model(path, None, threads, kv_dtype, tokenizer=False,
                               activations="f32" if quantize is None else "bf16")
    form = FORMATS.get(quantize)
    if form not in (Q8_1, Q5_1, Q4_1, Q4_0):
        return fast.load_model(path, quantize, threads, kv_dtype, tokenizer=False)

    def tensors(stored, source):
        if isinstance(source.config, HybridConfig):
            return stored
        return {name: tensor if tensor.data.ndim < 2 or name.endswith(".mlp.gate.weight")
                else packed(qwen3.to_float32(tensor)) for name, tensor in stored.items()}

    def packed(w):
        return published(*signed(w), None, form) if form == Q4_0 else published(*with_minima(w, MOST[form]), form)

    with pytest.MonkeyPatch.context() as patch:
        change_stored(patch, tensors)
        return fast.load_model(path, None, threads, kv_dtype, tokenizer=False)


def to_8_bits(x: np.ndarray) -> np.ndarray:
    n = x.shape[-1]
    groups = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % 32)]).reshape(*x.shape[:-1], -1, 32)
    scales = np.maximum(abs(groups).max(axis=-1, keepdims=True), np.float32(1e-36)) / np.float32(127)
    return (np.floor(groups / scales + np.float32(0.5)) * scales).reshape(*x.shape[:-1], -1)[..., :n]


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def round_vectors(patch: pytest.MonkeyPatch, is_rounded, rounds=to_8_bits) -> None:
    """From now on qwen3.py rounds the vectors that a matrix is multiplied with, if is_rounded(matrix)."""
    real = qwen3.linear

    def rounded(x, w):
        return real(rounds(x) if is_rounded(w) else x, w)

    def swiglu(x, gate_proj, up_proj, down_proj):
        gate = rounded(x, gate_proj)
        return rounded(gate / (1 + np.exp(-gate)) * rounded(x, up_proj), down_proj)

    for module in (qwen3, qwen3_5):
        patch.setattr(module, "linear", rounded)
        patch.setattr(module, "swiglu", swiglu)


def oracle_of(model: qwen3.Model, patch: pytest.MonkeyPatch) -> qwen3.Model:
    """qwen3.py's model with the numbers for which a fast model's matrices stand, and with vectors rounded as there."""
    rows = {"lm_head.weight": model.weights.head} | model.weights.matrices
    numbers = {name: matrix_rows(row, np.arange(row[0].rows)) for name, row in rows.items()}
    packed = [id(numbers[name]) for name, row in rows.items() if is_packed(row[0].form)]
    joined_there = (("in_proj_ba", "in_proj_b", "in_proj_a"), ("mlp.gate", "mlp.gate", "mlp.shared_expert_gate"))
    for joined, first, second in joined_there if isinstance(model.config, HybridConfig) else ():
        for name in [name for name in numbers if name.endswith(f"{joined}.weight")]:
            both = numbers.pop(name)
            n = len(both) // 2 if first == "in_proj_b" else len(both) - 1
            numbers |= {name.replace(joined, first): both[:n], name.replace(joined, second): both[n:]}
    tensors = {name: qwen3.Tensor("F32", array, None) for name, array in numbers.items()}
    with pytest.MonkeyPatch.context() as loading:
        change_stored(loading, lambda stored, source: stored | tensors)
        oracle = qwen3.load_model(model.path)
    round_vectors(patch, lambda w: id(w) in packed)
    return oracle


def reference(data: np.ndarray, weight: np.record) -> np.ndarray:
    """What stored weights stand for, by NumPy from the format's description."""
    if weight.form in (BF16, ROUNDED):
        return (data.astype(np.uint32) << 16).view(np.float32)[:, :weight.columns]
    if weight.form < INT8:
        return data.astype(np.float32)[:, :weight.columns]
    if weight.rows == 0:
        return np.empty((0, weight.columns), np.float32)
    if weight.form in OF_GGUF:
        return unpacked_of_gguf(data, weight.form)[:weight.rows, :weight.columns]
    whole, scales, zeros, minima = unpacked(data, weight.form)
    values = (whole - np.repeat(zeros, 32, axis=1)) * np.repeat(scales, 32, axis=1) + np.repeat(minima, 32, axis=1)
    return values[:weight.rows, :weight.columns].astype(np.float32)


def further_bits(further: np.ndarray, k: int, half: int, n: int) -> np.ndarray:
    """The n further bits of four columns [.., rows, 4]; further: bytes [.., 2, rows, 4], see layout.py."""
    place = n * (2 * k + half)
    return (further[..., place // 8, :, :] >> np.uint8(place % 8) & np.uint8(2**n - 1)).astype(np.int32)


def unpacked_of_gguf(data: np.ndarray, form: int) -> np.ndarray:
    """Weights in GGUF's forms as float32, padded: by 256 columns of 32 rows, by units of two groups."""
    kinds, size = (1, 16) if form == Q6_K else (2, 32)  # scales and perhaps minima; columns of a group
    blocks = data.reshape(len(data), -1, {Q6_K: 64 + 8 * 832, Q5_K: 128 + 4 * 1408, Q4_K: 128 + 4 * 1152}[form])
    factors = blocks[..., :64 * kinds].copy().view(np.float16).astype(np.float32)
    factors = factors.reshape(len(data), -1, kinds, 1, 1, 32)
    units = blocks[..., 64 * kinds:].reshape(*blocks.shape[:2], 128 // size, -1)
    scales = units[..., :64 * kinds].copy().view(np.int8).reshape(len(data), -1, 128 // size, kinds, 2, 32)
    scales = scales.swapaxes(2, 3) * factors  # [blocks, 256 columns, kinds, units, groups, rows]
    weights = units[..., -32 * size:].astype(np.int32).reshape(*units.shape[:3], 1, size // 4, 32, 4)
    # [blocks, 256 columns, units, groups, 4 columns, rows, 4]
    weights = np.concatenate([weights & 15, weights >> 4], axis=3)
    further = units[..., -32 * size - 256:-32 * size]
    for k, half in np.ndindex(size // 4, 2) if form != Q4_K else ():
        some = further_bits(further.reshape(*units.shape[:3], 2, 32, 4), k, half, 2 if form == Q6_K else 1)
        weights[..., half, k, :, :] += 16 * some
    values = (weights - (32 if form == Q6_K else 0)).astype(np.float32) * scales[:, :, 0, :, :, None, :, None]
    if kinds == 2:
        values += scales[:, :, 1, :, :, None, :, None]
    return values.astype(np.float32).transpose(0, 5, 1, 2, 3, 4, 6).reshape(32 * len(data), -1)


def unpacked(data: np.ndarray, form: int) -> tuple[np.ndarray, ...]:
    """(whole numbers [rows, columns], scales, zeros, minima [rows, groups]) of packed weights, padded."""
    halves = 1 if form in (INT8, Q8_1) else 2
    n_fifths, n_minima = 256 * (form in FIVES), 128 * halves * (form in (Q8_1, Q5_1, Q4_1))
    units = data.reshape(len(data), -1, 64 * halves + n_minima + n_fifths + 1024)  # [blocks, units, bytes]
    words = units[..., :64 * halves].copy().view(np.uint16).reshape(len(data), -1, 32).astype(np.int32)
    exponent, fraction = words >> 10, words & 1023
    scales = 2.0 ** (exponent + 80 - 127) * (1 + fraction / 1024)  # 6 and 10 bits
    zeros, minima = np.zeros((2, *words.shape))
    if n_minima:
        minima = units[..., 64 * halves:64 * halves + n_minima].copy().view(np.float32).reshape(words.shape)
    if halves == 1:
        zeros[:] = 128
    elif n_minima:
        pass
    elif form == Q4_0:
        scales, zeros = words.astype(np.uint16).view(np.float16).astype(np.float32), zeros + 8
    else:
        zeros = (6 + (words & 15) / 4) * (1 if form == INT4 else 2)
    values = units[..., -1024:].astype(np.int32).reshape(len(data), -1, 1, 8, 32, 4)
    if halves == 2:
        values = np.concatenate([values & 15, values >> 4], axis=2)
    if form in FIVES:
        further = units[..., -1280:-1024].reshape(len(data), -1, 2, 32, 4)
        for k, half in np.ndindex(8, 2):
            values[:, :, half, k] += 16 * further_bits(further, k, half, 1)
    whole = values.reshape(len(data), -1, 8, 32, 4).transpose(0, 3, 1, 2, 4).reshape(32 * len(data), -1)
    return whole, *(x.transpose(0, 2, 1).reshape(len(whole), -1) for x in (scales, zeros, minima))
