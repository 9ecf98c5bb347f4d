"""The formats of GGUF's tensors: from blocks, uint8 [rows, blocks, bytes], to whole numbers, scales and minima."""
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qwen3_lib.io.errors import InputError
from qwen3_lib.io.tensors import Blocks


def halves(data: np.ndarray) -> np.ndarray:
    """Pairs of bytes, each a float16, as float32."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def shifted(data: np.ndarray, together: int, bits: int) -> np.ndarray:
    """Numbers of so many bits, int16: of `together` bytes first all the lowest bits, then all the next ones, ..."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    numbers = data.reshape(*data.shape[:2], -1, 1, together) >> shifts & np.uint8(2**bits - 1)
    return numbers.reshape(*data.shape[:2], -1).astype(np.int16)


def q8_0(blocks: np.ndarray) -> Blocks:
    """A scale, the numbers."""
    return Blocks(blocks[..., 2:].view(np.int8).astype(np.int16), halves(blocks[..., :2]))


def q4_q5(blocks: np.ndarray, bits: int, zero: int | None) -> Blocks:
    """A scale, without a zero point a minimum, perhaps the fifth bits, the lower 4 bits."""
    numbers = shifted(blocks[..., -16:], 16, 4)
    if bits == 5:
        numbers |= np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little").astype(np.int16) << 4
    if zero is None:
        return Blocks(numbers, halves(blocks[..., :2]), halves(blocks[..., 2:4]))
    numbers -= zero
    return Blocks(numbers, halves(blocks[..., :2]))


def q4_k_q5_k(blocks: np.ndarray, bits: int) -> Blocks:
    """The factors of the scales and of the minima, 6 bits of 8 scales and minima, perhaps fifth bits, lower 4 bits."""
    low, high, rest = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate([low & 63, low >> 2 & 48 | rest & 15], axis=-1)
    minima = np.concatenate([high & 63, high >> 2 & 48 | rest >> 4], axis=-1)
    factors = np.stack([blocks[..., :2], blocks[..., 2:4] ^ np.array([0, 0x80], np.uint8)])  # minima are subtracted
    numbers = shifted(blocks[..., -128:], 32, 4)
    if bits == 5:
        numbers |= shifted(blocks[..., 16:48], 32, 1) << 4
    return Blocks(numbers, scales, minima, factors.view("<f2"))


def q6_k(blocks: np.ndarray) -> Blocks:
    """The lower 4 bits, the upper 2 bits, 16 scales of 8 bits, the factor of the scales."""
    numbers = shifted(blocks[..., :128], 64, 4) | shifted(blocks[..., 128:192], 32, 2) << 4
    numbers -= 32
    return Blocks(numbers, blocks[..., 192:208].view(np.int8),
                  factors=np.ascontiguousarray(blocks[None, ..., 208:]).view("<f2"))


class GGUFFormat(NamedTuple):
    """A row of the table of formats. The `numbers` of a block are `size` bytes; equal groups of them have a scale."""
    name: str
    numbers: int
    size: int
    groups: int = 1  # of a block; 0: `unpack` gives values
    bits: int = 32  # of a whole number
    unpack: Callable[[np.ndarray], Blocks] | None = None  # None: the numbers are there as they are
    factored: bool = False  # Blocks.factors: then the fast engine keeps the scales as they are


GGUF_FORMATS = {  # by their numbers in the file
    0: GGUFFormat("F32", 1, 4), 1: GGUFFormat("F16", 1, 2), 30: GGUFFormat("BF16", 1, 2),
    2: GGUFFormat("Q4_0", 32, 18, 1, 4, functools.partial(q4_q5, bits=4, zero=8)),
    3: GGUFFormat("Q4_1", 32, 20, 1, 4, functools.partial(q4_q5, bits=4, zero=None)),
    6: GGUFFormat("Q5_0", 32, 22, 1, 5, functools.partial(q4_q5, bits=5, zero=16)),
    7: GGUFFormat("Q5_1", 32, 24, 1, 5, functools.partial(q4_q5, bits=5, zero=None)),
    8: GGUFFormat("Q8_0", 32, 34, 1, 8, q8_0),
    12: GGUFFormat("Q4_K", 256, 144, 8, 4, functools.partial(q4_k_q5_k, bits=4), True),
    13: GGUFFormat("Q5_K", 256, 176, 8, 5, functools.partial(q4_k_q5_k, bits=5), True),
    14: GGUFFormat("Q6_K", 256, 210, 16, 6, q6_k, True)}


def format_of(kind: int) -> GGUFFormat:
    """The format of this number. One without a kernel here is read by gguf, llama.cpp's own package.

    Raises InputError where neither reads it, or gguf is missing.
    """
    if kind in GGUF_FORMATS:
        return GGUF_FORMATS[kind]
    try:
        import gguf
    except ImportError as error:
        raise InputError(f"the format number {kind}, which only llama.cpp's package reads: pip install gguf") from error
    try:
        form = gguf.GGMLQuantizationType(kind)
        numbers, size = gguf.GGML_QUANT_SIZES[form]
        gguf.dequantize(np.zeros(size, np.uint8), form)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise InputError(f"the format number {kind}, which is not supported, nor by gguf: {error}") from error
    return GGUFFormat(form.name, numbers, size, 0, 4, lambda blocks: Blocks(
        gguf.dequantize(blocks.reshape(len(blocks), -1), form)))
