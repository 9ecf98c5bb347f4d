"""Tensors as they lie in a file: mapped into memory, and computed from packed ones when they are needed.

    map_safetensors(file)   name -> StoredTensor, mapped and not yet read
    PackedTensor            a matrix that its file holds in another form (FP8, 4 bits, ...)
    to_float32(stored)      a tensor's numbers; rows_of: some rows of it
"""
import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from qwen3_io.errors import InputError, brief, some

STORED_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
# The parts of packed tensors, which formats.py and gguf_file.py understand.
PACKED_DTYPES: dict[str, np.dtype[Any]] = STORED_DTYPES | {
    "F8_E4M3": np.dtype("u1"), "I8": np.dtype("i1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class StoredTensor(NamedTuple):
    """A tensor in its file: `data` is a view of the mapped bytes, bfloat16 as uint16."""
    dtype: str
    data: np.ndarray
    mapping: mmap.mmap

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


BLOCK = 128  # rows of a matrix are unpacked in multiples of this number; FP8 has a scale for so many
Whole = Callable[[int, int], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


class PackedTensor(NamedTuple):
    """A matrix that its file holds in another form, with the fields of StoredTensor: `data` is computed at each access.

    rows(start, stop) -> these rows as float32 [stop - start, columns]; start is a multiple of BLOCK.
    `dtype` is what data gives: "F32", the exact numbers, or "BF16", the nearest ones in half the memory.
    bits: of a number in the file, without its share of the scales; 16 if an adapter has changed the matrix.
    whole(start, stop) -> the same rows as whole numbers int16 [stop - start, columns], the scales by which they are
    multiplied, float32 [stop - start, groups of columns], and what is added then, likewise, or None for nothing; None
    where groups aren't multiples of 32 columns in order.
    """
    dtype: str
    shape: tuple[int, int]
    rows: Callable[[int, int], np.ndarray]
    mapping: mmap.mmap
    bits: int = 16
    whole: Whole | None = None

    @property
    @np.errstate(over="ignore", invalid="ignore")  # infinity in a scale is reported once it has reached the logits
    def data(self) -> np.ndarray:
        out = np.empty(self.shape, STORED_DTYPES[self.dtype])
        step = max(2**22 // self.shape[1] // BLOCK, 1) * BLOCK  # a few megabytes at a time
        for start in range(0, len(out), step):
            some_rows = self.rows(start, min(start + step, len(out)))
            out[start:start + step] = to_bfloat16(some_rows) if self.dtype == "BF16" else some_rows
        forget_pages(self.mapping)
        return out


Tensor = StoredTensor | PackedTensor


def map_file(file: Path) -> mmap.mmap:
    """A file's bytes, mapped. Raises InputError if it can't be read or is empty."""
    try:
        with open(file, "rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{file}: empty; download it again") from error


def map_safetensors(file: Path, stored_dtypes: Mapping[str, np.dtype[Any]] = STORED_DTYPES) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file, mapped and not yet read. Raises InputError if the file is damaged.

    A safetensors file is 8 bytes with the length of a header, the header (JSON: name -> dtype, shape, offsets), and
    then the tensors' bytes. The safetensors library checks the file; NumPy reads the bytes in place, because the
    library's own NumPy reader knows no bfloat16.
    """
    try:
        with safetensors.safe_open(file, framework="numpy"):  # rejects inconsistent or truncated files
            pass
        with open(file, "rb") as opened:
            mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise InputError(f"{file}: not a valid safetensors file (truncated download?): {brief(error)}") from error
    start = 8 + int.from_bytes(mapping[:8], "little")
    header = json.loads(mapping[8:start])
    header.pop("__metadata__", None)
    dtypes = {name: entry["dtype"] for name, entry in header.items()}
    if wrong := [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in stored_dtypes]:
        raise InputError(f"{file}: only dtypes {', '.join(stored_dtypes)} are supported, but {some(wrong)}")
    tensors = {}
    for name, entry in header.items():
        dtype, shape = stored_dtypes[dtypes[name]], entry["shape"]
        try:
            if count := math.prod(shape):
                data = np.frombuffer(mapping, dtype, count, start + entry["data_offsets"][0]).reshape(shape)
            else:
                data = np.empty(shape, dtype)
        except ValueError as error:  # more dimensions, or larger ones beside a 0, than NumPy has
            raise InputError(f"{file}: {brief(name)} has the impossible shape {brief(shape, 80)}") from error
        tensors[name] = StoredTensor(dtypes[name], data, mapping)
    return tensors


def to_float32(stored: Tensor) -> np.ndarray:
    """The tensor as float32; a float32 tensor stays in the file. bfloat16 is the upper half of a float32."""
    data = stored.data
    if stored.dtype == "F32" and data.flags.aligned:
        return data
    values = np.empty(data.shape, np.float32)
    if stored.dtype == "BF16":
        bits = values.view(np.uint32)
        bits[...] = data
        bits <<= 16
    else:
        values[...] = data
    forget_pages(stored.mapping)
    return values


def rows_of(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Rows of a matrix as float32; start is a multiple of BLOCK."""
    return tensor.rows(start, stop) if isinstance(tensor, PackedTensor) else \
        to_float32(tensor._replace(data=tensor.data[start:stop]))


@np.errstate(over="ignore", invalid="ignore")
def both_ends(tensor: Tensor) -> bytes:
    """The bytes of the first and the last 1,024 numbers, by which tensors are told apart."""
    if isinstance(tensor, PackedTensor):
        last = (tensor.shape[0] - 1) // BLOCK * BLOCK
        first, end = tensor.rows(0, min(BLOCK, tensor.shape[0])), tensor.rows(last, tensor.shape[0])
        return first.reshape(-1)[:1024].tobytes() + end.reshape(-1)[-1024:].tobytes()
    flat = tensor.data.reshape(-1)
    return flat[:1024].tobytes() + flat[-1024:].tobytes()


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers as bfloat16, in uint16: rounded to nearest, of two equally near ones to the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    rounded[np.isnan(values)] = 0x7FC0  # whose bits may have overflowed
    return rounded.astype("<u2")


def forget_pages(mapping: mmap.mmap) -> None:
    """Pages read from a mapped file no longer count as this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
