"""Tensors of a file become matrices in memory: which format each gets, and its numbers in that format."""
from __future__ import annotations

import ctypes
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np

from qwen3 import Tensor, forget_pages, to_float32
from qwen3_lib.io.tensors import AnyTensor, PackedTensor, rows_of
from qwen3_lib.kernels.build import kernel
from qwen3_lib.kernels.disk import ExpertFile
from qwen3_lib.kernels.layout import (BF16, BIAS, F16, F32, FORMATS, GROUP, INT4, INT5, INT8, LARGEST, PANEL, Q4_0,
                                      Q4_1, Q4_K, Q5_1, Q5_K, Q6_K, Q8_1, ROUNDED, SHARING, SMALLEST, WEIGHT,
                                      address_table, is_packed, packed_shape, padded)
from qwen3_lib.kernels.memory import LargePages, empty, zeros
from qwen3_lib.io.errors import InputError

STORED = {"F64": F32, "F32": F32, "BF16": BF16, "F16": F16}  # by their names in safetensors
PACKED = {"int8": INT8, "int4": INT4}
# The router, a delta net's factors, and a part of an MTP head that NumPy computes: they keep all digits.
UNPACKED = (".mlp.gate.weight", ".in_proj_ba.weight", ".fc_embedding.weight", ".fc_hidden.weight")
MORE_BITS = {"fc": INT8, "v_proj": INT8, "o_proj": INT5, "embed_tokens": INT5, "lm_head": INT5,
             "input_mix_weight_down": INT8, "input_mix_weight_up": INT8}  # in an int4 model
# By the bits of a published packed matrix: the formats that may hold its very numbers, and the one if none does.
FORMS_OF_BITS = {2: (Q4_0, Q4_1, INT8), 3: (Q4_1, INT8), 4: (Q4_0, Q4_1, INT8), 5: (Q5_1, INT8), 6: (Q8_1, BF16),
                 8: (INT8, Q8_1, BF16), 16: (BF16,), 32: (F32,)}
OF_GGUF = {4: Q4_K, 5: Q5_K, 6: Q6_K}  # the same of a tensor with `factored` scales
# The first bit of the numbers of two groups in a byte, and of further bits, n for a number: see layout.py.
HALVES_AT = np.uint32([[0], [4]])
BITS_AT = {n: np.arange(0, 8, n, np.uint32).reshape(-1, 2).T.reshape(2, 1, -1) for n in (1, 2)}
BYTES = 0x01010101  # a byte four times


def packed_form(name: str, quantize: str) -> int:
    """The format of a matrix in a quantized model: int4 keeps more bits where they lessen the error most per byte."""
    if name.endswith(UNPACKED):
        return F32
    return MORE_BITS.get(name.split(".")[-2], INT4) if quantize == "int4" else PACKED[quantize]


def forms_of(name: str, tensor: AnyTensor, quantize: str | None) -> tuple[int, ...]:
    """The formats of a matrix that may hold the very numbers of a packed one, and last its format if none does."""
    if quantize is not None or name.endswith(UNPACKED if isinstance(tensor, PackedTensor) else UNPACKED[0]):
        form = packed_form(name, quantize or "int8")
        return form, form
    if not isinstance(tensor, PackedTensor):
        return (STORED[tensor.dtype],)
    if tensor.factored:
        return OF_GGUF[tensor.bits], INT8
    return FORMS_OF_BITS[tensor.bits]


def bytes_of(forms: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The most bytes of a matrix of this shape in one of these formats."""
    return max(math.prod(packed_shape(*shape, form)) if is_packed(form) else
               shape[0] * padded(shape[1], 32) * (4 if form == F32 else 2) for form in forms)


def as_packed(formats: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors without numbers, of the sizes that matrices have in the first of their formats."""
    nothing = mmap.mmap(-1, 1)
    return {name: Tensor("U8", np.broadcast_to(np.uint8(0), bytes_of(forms[:1], shapes[name])), nothing)
            for name, forms in formats.items()}


@lru_cache(64)
def fields_of(address: int, stride: int, form: int, n_rows: int) -> dict[str, np.ndarray]:
    """A matrix as it lies in memory: `rows` [rows, numbers], or the fields of the blocks of a packed one.

    These are [blocks, parts, units of a part, ..., 32 rows], four bytes as a uint32. A part's units share `factors`.
    """
    format_ = FORMATS[form]
    blocks = -(-n_rows // PANEL) if is_packed(form) else n_rows
    memory = (ctypes.c_uint8 * (blocks * stride)).from_address(address)
    if not is_packed(form):
        return {"rows": np.frombuffer(memory, {F32: "f4", F16: "f2"}.get(form, "u2")).reshape(blocks, -1)}
    scale, lowest = ("i1", "u1") if format_.shared else ("u2", "f4")
    unit = np.dtype([("scales", scale, (format_.halves, PANEL)),
                     *[("minima", lowest, (format_.halves, PANEL))] * format_.minima,
                     *[("bits", "u4", (2, PANEL))] * (format_.high_bits > 0),
                     ("numbers", "u4", (format_.group // 4, PANEL))])
    part = np.dtype([*[("factors", "f2", (1 + format_.minima, 1, PANEL))] * (format_.shared > 0),
                     ("units", unit, (max(format_.shared, 1),))])
    parts = np.frombuffer(memory, part).reshape(blocks, -1)
    return {name: parts["units"][name] for name in unit.names} | {name: parts[name] for name in part.names[:-1]}


@cache
def scale_table(form: int) -> np.ndarray:
    """By the 16 bits of a scale: float32 [65536, 2], the scale, and what is subtracted from each number."""
    format_, words = FORMATS[form], np.arange(2**16)
    scales = words.astype(np.uint16).view(np.float16) if format_.float16 else \
        ((words << 13) + BIAS).astype(np.int32).view(np.float32)
    constant = format_.offset or format_.minima
    zeros = np.full(2**16, format_.offset) if constant else (6 + (words & 15) / 4) * (1 + format_.high_bits)
    return np.stack([scales, zeros], axis=1, dtype=np.float32, casting="same_kind")


def matrix_rows(matrix: np.ndarray, ids: Any) -> np.ndarray:
    """Rows ids [n] of a WEIGHT [1] as float32 [n, columns]."""
    (address, stride, form, n_rows, columns), ids = matrix.tolist()[0], np.asarray(ids)
    format_, fields = FORMATS[form], fields_of(address, stride, form, n_rows)
    which = int(ids[0]) if len(ids) == 1 else ids  # a single row needs no copies
    if not is_packed(form):
        rows = fields["rows"][which, :columns]
        rows = (rows.astype(np.uint32) << 16).view(np.float32) if form in (BF16, ROUNDED) else rows.astype(np.float32)
        return rows.reshape(len(ids), columns)
    block, row = divmod(which, PANEL)
    found = {name: field[block, :, :, :, row] for name, field in fields.items()}  # [.., parts, units, ...]
    halves = format_.halves
    q = found["numbers"][..., None, :] >> HALVES_AT[:halves] & (BYTES * 15 if halves > 1 else BYTES * 255)
    if n_bits := format_.high_bits:
        bits = found["bits"][..., None, :, None] >> BITS_AT[n_bits] & BYTES * (2**n_bits - 1)
        q |= bits.reshape(q.shape) << 4
    if format_.shared:
        factors = found["factors"].astype(np.float32)
        scales, zeros = (factors[..., :1, :] * found["scales"])[..., None], np.float32(format_.offset)
    else:
        pairs = scale_table(form)[found["scales"]][..., None, :]
        scales, zeros = pairs[..., 0], pairs[..., 1]
    rows = scales * (q.view(np.uint8) - zeros)  # [.., parts, units, halves, group]
    if format_.minima:
        rows += (factors[..., 1:, :] * found["minima"] if format_.shared else found["minima"])[..., None]
    return np.ascontiguousarray(rows.reshape(len(ids), -1)[:, :columns])


class Packer:
    """Makes tensors matrices. `arrays` keeps alive what their addresses point to."""

    def __init__(self, pool: ThreadPoolExecutor, arrays: list[np.ndarray]):
        self.pool, self.pages, self.arrays = pool, LargePages(), arrays

    def weight(self, label: str, tensor: AnyTensor, forms: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """The WEIGHT [1] of a tensor of this shape in the first of these formats that fits, see forms_of.

        Raises InputError for numbers that the format can't hold.
        """
        for form in forms[:-1] if isinstance(tensor, PackedTensor) else ():
            in_groups = FORMATS[form].shared or tensor.group and tensor.group % GROUP == 0
            if in_groups and is_packed(form) and (data := self.exact(tensor, form)) is not None:
                return self.kept(data, form, *shape)
        form = forms[-1]
        data = self.rounded(label, tensor, form) if is_packed(form) else floats_of(tensor, form)
        return self.kept(data, form, *shape)

    def kept(self, data: np.ndarray, form: int, rows: int, columns: int) -> np.ndarray:
        self.arrays.append(data)
        return np.array([(data.ctypes.data, data.strides[0], form, rows, columns)], WEIGHT)

    def moved(self, matrix: np.ndarray, file: ExpertFile) -> np.ndarray:
        """The WEIGHT [1] of the last matrix, whose numbers go from memory into a file."""
        data, (_, _, form, rows, columns) = self.arrays.pop(), matrix.tolist()[0]
        out = file.take(data)
        if is_packed(form):
            self.pages.give_back(data)
        return self.kept(out, form, rows, columns)

    def rounded(self, label: str, tensor: AnyTensor, form: int) -> np.ndarray:
        """A matrix [rows, n] as packed blocks that err little."""
        n_rows, n = tensor.shape
        packed = self.pages.take(packed_shape(n_rows, n, form))

        def part(start: int) -> float:
            """Packs a block -> its largest weight. One only, because each thread may have a float32 copy of it."""
            with np.errstate(over="ignore", invalid="ignore"):  # by infinite scales
                rows = np.ascontiguousarray(rows_of(tensor, start, min(start + PANEL, n_rows)), np.float32)
            largest = float(max(rows.max(), -rows.min()))
            if not np.isfinite(largest):
                raise InputError(f"{label} has weights that are not finite, so it can't be quantized")
            group, work = empty((GROUP, PANEL), np.float32), empty((10, PANEL), np.float32)
            kernel("quantize.quantize_block")(address_table((rows, packed[start // PANEL], group, work)), form)
            return largest

        largest = max(self.pool.map(part, range(0, n_rows, PANEL)))
        if largest > LARGEST or 0 < largest < SMALLEST:
            raise InputError(f"{label} can't be quantized: its largest weight is {largest:.3g}, not between "
                             f"{SMALLEST:g} and {LARGEST:g}")
        forget_pages(tensor.mapping)
        return packed

    def exact(self, tensor: PackedTensor, form: int) -> np.ndarray | None:
        """A published packed matrix as blocks of a format; None if the format can't hold its numbers.

        GGUF's formats have the very numbers. So have the others if no scale has more than 10 bits after the first one,
        as float16 has; scales with more are rounded, but in Q4_0 they don't fit.
        """
        n_rows, n = tensor.shape
        packed = self.pages.take(packed_shape(n_rows, n, form))

        def part(start: int) -> bool:
            """Packs a block -> whether all its numbers fit."""
            found = (factored if FORMATS[form].shared else rescaled)(tensor, form, start, min(start + PANEL, n_rows))
            forget_pages(tensor.mapping)
            if found is None:
                return False
            whole, scales, factors = found
            block = packed[start // PANEL]
            both = np.zeros((2, PANEL, n // FORMATS[form].group), np.float32)
            for target, values in zip(both, scales):
                target[:len(whole)] = np.repeat(values, both.shape[2] // values.shape[1], axis=1)
            numbers, group = np.ascontiguousarray(whole, np.int16), empty((GROUP, PANEL), np.float32)
            kernel("quantize.pack_block")(address_table((numbers, both, block, group)), form)
            if factors is not None:
                common = np.zeros((len(factors), PANEL, n // SHARING), np.float16)
                common[:, :len(whole)] = factors
                places = block.view(np.float16).reshape(n // SHARING, -1)
                places[:, :PANEL * len(factors)] = common.transpose(2, 0, 1).reshape(n // SHARING, -1)
            return True

        if part(0) and all([*self.pool.map(part, range(PANEL, n_rows, PANEL))]):  # all end before the pages go back
            return packed
        self.pages.give_back(packed)
        return None


Numbers = tuple[np.ndarray, list[np.ndarray], np.ndarray | None]


@np.errstate(over="ignore", invalid="ignore")  # by infinite scales
def rescaled(tensor: PackedTensor, form: int, start: int, stop: int) -> Numbers | None:
    """Rows of a published matrix as a format's whole numbers, the bits of its scales and its minima, [rows, groups].

    None if these can't hold its numbers.
    """
    whole, scales, minima, _ = tensor.blocks(start, stop).multiplied()
    format_, groups = FORMATS[form], whole.reshape(*scales.shape, -1)
    groups[scales == 0] = 0
    if format_.float16:
        words, scales = scales.astype(np.float16).view(np.uint16), scales.astype(np.float32)
        fits = minima is None and np.array_equal(words.view(np.float16).astype(np.float32), scales)
    else:
        np.negative(groups, out=groups, where=(scales < 0)[..., None])
        scales = np.abs(scales).astype(np.float32)
        words = np.where(scales == 0, 0, scales.view(np.int32) - BIAS + 0x1000 & -0x2000)
        fits = 0 <= words.min() <= words.max() < 2**29 and (format_.minima > 0 or minima is None)
        nearest = np.where(scales == 0, 0, (words + BIAS).astype(np.int32).view(np.float32))
        words >>= 13
    if format_.minima:
        lowest = np.where(scales == 0, np.int16(0), np.minimum(groups.min(axis=-1), 0) + np.int16(format_.offset))
        groups -= lowest[..., None]
        minima = (nearest * lowest + (0 if minima is None else minima)).astype(np.float32)
        fits = fits and bool(np.isfinite(minima).all())
    whole += format_.offset
    if not fits or not np.isfinite(scales).all() or whole.min() < 0 or whole.max() > format_.most:
        return None
    return whole, [words, *([] if minima is None else [minima])], None


def factored(tensor: PackedTensor, form: int, start: int, stop: int) -> Numbers | None:
    """The same for scales that a format keeps as the file does, and their factors, see Blocks."""
    whole, scales, minima, factors = tensor.blocks(start, stop)
    whole += FORMATS[form].offset
    return (whole, [scales, minima][:len(factors)], factors) if np.isfinite(factors).all() else None


def floats_of(tensor: AnyTensor, form: int) -> np.ndarray:
    """A matrix by rows, which are padded to a multiple of 32; a view of the file where that changes nothing."""
    dtype = FORMATS[form].name.upper()
    if isinstance(tensor, PackedTensor):
        data = tensor._replace(dtype=dtype).read()
    else:
        data = tensor.data if tensor.dtype == dtype else to_float32(tensor)
    if data.shape[1] % 32 or data.strides[1] != data.itemsize:  # the latter: an expert of a Qwen3-VL, by columns
        data, found = zeros((len(data), padded(data.shape[1], 32)), data.dtype), data
        data[:, :found.shape[1]] = found
    return data
