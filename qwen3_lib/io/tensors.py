"""Matrices that a file holds in another form (FP8, 4 bits, ...): computed when they are needed."""
from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3 import DTYPES, Tensor, forget_pages, to_float32
from qwen3_lib.io.errors import InputError

# The parts of packed tensors, which formats.py and gguf_file.py understand.
PACKED_DTYPES: dict[str, np.dtype[Any]] = DTYPES | {
    "F8_E4M3": np.dtype("u1"), "U8": np.dtype("u1"), "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "U32": np.dtype("<u4")}

EMBEDDING = "model.embed_tokens.weight"
BY_ROWS = "ngram_embedding"  # in the names of an n-gram table's parts: they stay in their files, a token reads few rows
ROWS_AT_ONCE = 32  # rows of a matrix are unpacked in multiples of this number: words hold 16 or fewer of them


class Blocks(NamedTuple):
    """Some rows of a packed matrix: numbers * scales + minima. Equal groups of columns, in order, share a scale."""
    numbers: np.ndarray  # int16 [rows, columns]; without scales float32, the values themselves
    scales: Any = None  # float32 [rows, groups]; with factors, whole numbers
    minima: Any = None  # likewise; None for nothing
    factors: Any = None  # of GGUF's K formats, float16 [1 or 2, rows, columns / 256]: of the scales, and of the minima

    def multiplied(self) -> Blocks:
        """The same without factors."""
        if self.factors is None:
            return self
        parts = ((factor.astype(np.float32)[..., None] * part.reshape(*factor.shape, -1)).reshape(part.shape)
                 for factor, part in zip(self.factors, (self.scales, self.minima)))
        return Blocks(self.numbers, *parts)

    def values(self) -> np.ndarray:
        """The rows as float32 [rows, columns]."""
        return self.numbers if self.scales is None else scaled(*self.multiplied()[:3])


class PackedTensor(NamedTuple):
    """A matrix that its file holds in another form, with the fields of Tensor but `data`: `read` computes the numbers.

    blocks(start, stop) gives these rows; start is a multiple of ROWS_AT_ONCE.
    `dtype` is what `read` gives: "F32", the exact numbers, or "BF16", the nearest ones in half the memory.
    bits: of a number in the file, without its share of the scales. A matrix that an adapter has changed has 16, in
    which the fast engine rounds it to bfloat16, or 32, if its base was float16 or float32.
    group: the columns that share a scale; 0 where blocks give values. factored: whether blocks have factors.
    stored, rows: the parts in the file, which have a row for each row, and a function that gives any rows in float32;
    only of an n-gram table, where a token reads a few rows.
    """
    dtype: str
    shape: tuple[int, int]
    blocks: Callable[[int, int], Blocks]
    mapping: mmap.mmap
    bits: int
    group: int = 0
    factored: bool = False
    stored: tuple[Tensor, ...] = ()
    rows: Callable[[np.ndarray], np.ndarray] | None = None

    @np.errstate(over="ignore", invalid="ignore")  # infinity in a scale is reported once it has reached the logits
    def read(self) -> np.ndarray:
        out = np.empty(self.shape, DTYPES[self.dtype])
        step = max(2**22 // self.shape[1] // ROWS_AT_ONCE, 1) * ROWS_AT_ONCE  # a few megabytes at a time
        for start in range(0, len(out), step):
            some_rows = rows_of(self, start, min(start + step, len(out)))
            out[start:start + step] = to_bfloat16(some_rows) if self.dtype == "BF16" else some_rows
        forget_pages(self.mapping)
        return out


AnyTensor = Tensor | PackedTensor


def alike(first: AnyTensor, second: AnyTensor) -> bool:
    """Whether two packed matrices may be one, the second one below the first: bits, groups and minima are the same."""
    return isinstance(first, PackedTensor) and isinstance(second, PackedTensor) and first.group > 0 \
        and first.shape[0] % ROWS_AT_ONCE == 0 and first[4:7] == second[4:7] \
        and (first.blocks(0, 1).minima is None) == (second.blocks(0, 1).minima is None)


def below(first: Any, second: Any) -> PackedTensor:
    """A matrix of the rows of two, one after the other: packed as they are, if they are alike."""
    n, packed = first.shape[0], alike(first, second)

    def blocks(start: int, stop: int) -> Blocks:
        halves = (first, start, min(stop, n)), (second, max(start - n, 0), stop - n)
        return joined([tensor.blocks(*rows) if packed else Blocks(rows_of(tensor, *rows))
                       for tensor, *rows in halves if rows[0] < rows[1]])

    return PackedTensor("F32", (n + second.shape[0], first.shape[1]), blocks, first.mapping,
                        *(first[4:7] if packed else [32]))


def joined(parts: list[Blocks]) -> Blocks:
    """The rows of all parts, one after the other."""
    return Blocks._make(each[0] if each[0] is None else np.concatenate(each, axis)
                        for each, axis in zip(zip(*parts), (0, 0, 0, 1)))


def map_file(file: Path) -> mmap.mmap:
    """A file's bytes, mapped. Raises InputError if it can't be read or is empty."""
    try:
        with open(file, "rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{file}: empty; download it again") from error


def rows_of(tensor: AnyTensor, start: int, stop: int) -> np.ndarray:
    """Rows of a matrix as float32; start is a multiple of ROWS_AT_ONCE."""
    return tensor.blocks(start, stop).values() if isinstance(tensor, PackedTensor) else \
        to_float32(tensor._replace(data=tensor.data[start:stop]))


def taken(tensor: AnyTensor, places: np.ndarray) -> AnyTensor:
    """These rows of a tensor, in this order."""
    if isinstance(tensor, Tensor):
        return tensor._replace(data=np.take(tensor.data, places, axis=0))
    blocks = tensor.blocks

    def in_runs(start: int, stop: int) -> Blocks:
        """The rows from each run of neighbouring rows of the file."""
        some, parts = places[start:stop], []
        for run in np.split(some, np.flatnonzero(np.diff(some) != 1) + 1):
            first = int(run[0]) // ROWS_AT_ONCE * ROWS_AT_ONCE
            found, rows = blocks(first, int(run[-1]) + 1), run - first
            parts.append(Blocks._make(each if each is None else each[:, rows] if each is found.factors else each[rows]
                                      for each in found))
        return joined(parts)

    return tensor._replace(shape=(len(places), tensor.shape[1]), blocks=in_runs)


def scaled(numbers: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None,
           group: np.ndarray | None = None) -> np.ndarray:
    """Whole numbers [rows, columns] times scales [rows, groups], plus minima likewise, as float32 [rows, columns].

    `group` [columns]: the group of each column; None stands for equal groups in order, which take a third of the time.
    """
    values = numbers.astype(np.float32)
    if group is not None:
        return values * scales[:, group]
    in_groups = values.reshape(*scales.shape, -1)  # [rows, groups, columns of a group]
    in_groups *= scales[..., None]
    if minima is not None:
        in_groups += minima[..., None]
    return values


@np.errstate(over="ignore", invalid="ignore")
def both_ends(tensor: AnyTensor) -> bytes:
    """The bytes of the first and the last 1,024 numbers, to tell tensors apart."""
    if isinstance(tensor, PackedTensor):
        last = (tensor.shape[0] - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE
        first, end = rows_of(tensor, 0, min(ROWS_AT_ONCE, tensor.shape[0])), rows_of(tensor, last, tensor.shape[0])
        return first.reshape(-1)[:1024].tobytes() + end.reshape(-1)[-1024:].tobytes()
    flat = tensor.data.reshape(-1)
    return flat[:1024].tobytes() + flat[-1024:].tobytes()


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers as bfloat16, in uint16: rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    rounded[np.isnan(values)] = 0x7FC0  # whose bits may have overflowed
    return rounded.astype("<u2")


def embeds(about: dict[str, Any], folder: Path) -> bool:
    """Whether a model gives no answers, by config.json, or sentence-transformers' files."""
    modules = folder / "modules.json"
    return not re.search("ForCausalLM|ForConditionalGeneration", str(about.get("architectures") or "ForCausalLM")) \
        or "classify_num" in (about.get("thinker_config") or ()) \
        or modules.is_file() and b"Pooling" in modules.read_bytes()
