"""The formats of GGUF's tensors: from blocks, uint8 [rows, blocks, bytes], to whole numbers, scales and minima."""
import base64
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qwen3_lib.io.tensors import E2M1, Blocks

TABLE_4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)  # IQ4_*
THREES = np.array([[1], [3], [9], [27], [81]], np.uint8)


def grid(text: str, bits: int, together: int, values: tuple[int, ...]) -> np.ndarray:
    """A table [rows, together] of values, whose places are written in so many bits each, as base64."""
    places = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), bitorder="little").reshape(-1, bits)
    return np.array(values, np.int16)[places @ (1 << np.arange(bits))].reshape(-1, together)


# Tables of llama.cpp (MIT License, The ggml authors): the rows of numbers that a byte or 9 bits stand for.
IQ2_XXS = grid(
    "AAACAAUACAAKABEAFAAgACIAKAAqAEEARABQAFgAYQBkAIAAggCKAKIAAQEEARABFQFAAYQBmAEAAgICIgKCAgEEBAQQBCEEJARABEIESARgBIEE"
    "hASQBKQEAAUCBQgFIAVGBWkFgAWRBQkGEAZABoQGpAYACAUICAgUCCgIQQhECFAIUgiICAQJQAkCChQKARAEEBAQIRBAEGAQhBCQEJUQABEIESAR"
    "UBFaEYARJBJFEgAUCBQgFCUUSRSAFBgVYhUAFhYWARgEGBAYQBiBGAAZBRmgGVEaACACIAogRCBhIIAggiApIUghACICIgEkBCQQJEAkViQAJUEl"
    "ZCWQJggoICiUKEQqAUAEQBBAGEAhQCRAQEBIQFZAYECBQIRAkEAAQSBBYUGAQYVBAUIQQkhCVkJoQgBECEQgRIBEmUQSRSRFAEYBSARIEEhASEVI"
    "AElYSWFJgklFSpBKAFAIUBFQGVAgUIBQiFAEUUJRpFGRUpBUklQKVQFWVFYAWBFYGVhkWEBZCFoEYBBgQGBoYABhVWEYYmBiAGQFZBBlEmWEZUJo"
    "AIACgAqAQYCCgASBGIFAgRGCAYQEhBCEFYRAhGCEAIVGhZSFCYZAhmCGAogEiRGKBJAQkCSQQJChkBaRgJFFkgCUIpRElFGVgZggmQKgUKCFoAmh"
    "AKIYpFCoBKk=", 2, 8, (8, 25, 43))
IQ3_XXS = grid(
    "ACAABJAAC/AAECABGSACO9ADQTAESKAEUVAFWKAFYcAGeAAIgkAIiQAJkpAJm/AJqfAKvRAMx4AMylAN+LAQH0ESL7ETPREUR6EVatEZtIEczOEc"
    "4xEfATIgCKIgETIhGKIhHHIiKAIkQpIkUCIlgTIoiKIokYIpugIswgIt2WIu9hIwBYMyUEM1ZpM3hSM94ANAApRACwRBEmRBGSRCQTRERYREShRF"
    "WDRHd4RHgCRIifRIkCRJnwRKrRRMyMRM+MRPHbVSQ3VVYcVXwTVczlVeAYZgChZhE4ZiNaZjQCZkUJZlZGZmgTZoiFZpqqZrybZtGHdyOgd0Rid1"
    "bcd4njd72wd/BPiAHfiBK/iCfAiJnwiKsGiLx1iOBJmSNFmVY4mXxYmcyomdChqiOAqkRmqlbcqomqqrwrquCDuxF6uzQpu1qEu94kvBJGzCNBzF"
    "cfzItIzN3kzSRa3Wmz3c0T3gBX7gCK7hKm7lYK7opa7qwN7s2w7vER/yQC/0VI/5", 3, 4, (4, 12, 20, 28, 36, 44, 52, 62))
IQ3_S = grid(
    "ABAAAlAAB4AACaAADOAAEBABFbABICACJXACKbACMCADOcADPwAEQSAERIAESdAEUDAFV5AFXUAGcVAHegAIgVAIh4AIi+AIkVAJmMAJolAKp5AK"
    "q4ALuzAMydAM0CAN2bAN3kAO6KAO95AP/QAQC/EQEUERGgESI5ESOCEURAEVUmEVWxEWZXEWdrEXhpEYi5EZqpEbwCEcxAEd0mEd24Ee7AEgASIg"
    "BIIgCbIgDfIgECIhGcIhHsIiLhIjOgIkQTIkRoIkTBIlWLIlYYImaoInfgIoitIojwIplKIpoDIqrQIruhIsxHIsyLIs0XIt2MIt4SIv+DIwBaMw"
    "DJMxGyMyJoMyLBM0SLM0UYM1WpM2kEM5l0M6phM8w4M8yhM93RM+8oM/ABRAA1RAB4RACsRADhRBE3RBGKRBITRCJYRCKnRDOLRDPQREQoRES/RE"
    "UlRFWcRFYpRGgURIhxRJk4RJnxRKq/RKucRLwCRMxZRM0kRN2bRN4oRO9hRQBwVRE6VRHRVSOtVTRJVUUvVVYLVWeAVYgnVYkdVasVVcyWVd2DVe"
    "6CVgCbZgDfZgEpZhG9ZhIkZiJ5ZiM5ZjQTZkRcZkUTZlYAZneuZngKZokKZpnIZqwYZszBZt03Zt2BZu43Zu7bZvA5dwDidxGadyMEdzQYd0Sld1"
    "Wkd2brd3jhd6wTd80Cd93QeABKiAEEiBF6iBIYiCOCiER5iESyiFWNiFY5iGbRiIg4iIjRiJmwiKryiLuEiMybiM0CiN2diNACmQFPmRIJmTRXmU"
    "USmXi8mZsImczYmd45meAoqgDCqhIEqiJ6qiNsqjQTqkRaqkUaqlegqoiTqpmOqpqyqsx4qs10qu6Vqv+xqwBAuxGmuySmu1abu2oiu8xCu9CbzA"
    "DZzBGwzDQAzFV0zHiszJotzKsozLwMzM0QzOFT3SMg3UQ83VcF3YoJ3cyw3gBH7gEC7hHg7iLC7jQp7kVD7mZR7ohI7ojh7pmJ7qwq7t3b7uAV/w"
    "Cw/xKC/1Yi/4mQ/8", 3, 4, (1, 3, 5, 7, 9, 11, 13, 15))
# 7 signs as a byte, 1 for minus; the eighth makes their number even.
SIGNS = np.array([seven | seven.bit_count() % 2 << 7 for seven in range(128)], np.uint8)


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


def q2_k(blocks: np.ndarray) -> Blocks:
    """16 times 4 bits of a scale and of a minimum, the numbers, the factors of the scales and of the minima."""
    few = blocks[..., :16]
    return Blocks(shifted(blocks[..., 16:80], 32, 2), halves(blocks[..., 80:82]) * (few & 15),
                  -halves(blocks[..., 82:]) * (few >> 4))


def q3_k(blocks: np.ndarray) -> Blocks:
    """The third bits, the lower 2 bits, the lower 4 and the upper 2 bits of 16 scales, the factor of the scales."""
    numbers = shifted(blocks[..., 32:96], 32, 2) | shifted(blocks[..., :32], 32, 1) << 2
    few = shifted(blocks[..., 96:104], 8, 4) | shifted(blocks[..., 104:108], 4, 2) << 4
    numbers -= 4
    return Blocks(numbers, halves(blocks[..., 108:]) * (few - 32).astype(np.float32))


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


def iq4_nl(blocks: np.ndarray) -> Blocks:
    """A scale, places in the table."""
    return Blocks(TABLE_4[shifted(blocks[..., 2:], 16, 4)], halves(blocks[..., :2]))


def iq4_xs(blocks: np.ndarray) -> Blocks:
    """The factor of the scales, the upper 2 and the lower 4 bits of 8 scales, places in the table."""
    few = shifted(blocks[..., 4:8], 1, 4) | shifted(blocks[..., 2:4], 1, 2) << 4
    return Blocks(TABLE_4[shifted(blocks[..., 8:], 16, 4)], halves(blocks[..., :2]) * (few - 32).astype(np.float32))


def mxfp4(blocks: np.ndarray) -> Blocks:
    """The exponent of the scale, places in the table."""
    scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)
    return Blocks(E2M1[shifted(blocks[..., 1:], 16, 4)], scales)


def tq1_0(blocks: np.ndarray) -> Blocks:
    """Numbers to the base 3, five in a byte, then the last ones, four in a byte; a scale."""
    digits = [blocks[..., None, start:stop] * THREES[:n] for start, stop, n in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    numbers = np.concatenate([part.reshape(*blocks.shape[:2], -1) for part in digits], axis=-1).astype(np.int16)
    return Blocks((numbers * 3 >> 8) - 1, halves(blocks[..., 52:]))


def tq2_0(blocks: np.ndarray) -> Blocks:
    """The numbers, a scale."""
    return Blocks(shifted(blocks[..., :64], 32, 2) - 1, halves(blocks[..., 64:]))


def signed(numbers: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Numbers [rows, blocks, ...] times their signs, bits of bytes [rows, blocks, ...]."""
    bits = np.unpackbits(signs.reshape(*signs.shape[:2], -1), axis=-1, bitorder="little")
    return numbers.reshape(bits.shape) * (1 - 2 * bits.astype(np.int16))


def seven_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words of 4 bytes -> bytes of signs [rows, blocks, words, 4], and the upper 4 bits of the words plus 1/2."""
    words = np.ascontiguousarray(words).view("<u4")
    signs = SIGNS[words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127]
    return signs, (words >> 28).astype(np.float32) + np.float32(0.5)


def iq2_xxs(blocks: np.ndarray) -> Blocks:
    """The factor of the scales; 8 times 4 rows of the table, the signs of their numbers and a scale."""
    parts = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 8)
    signs, scales = seven_signs(parts[..., 4:].reshape(*blocks.shape[:2], -1))
    return Blocks(signed(IQ2_XXS[parts[..., :4]], signs), halves(blocks[..., :2]) * scales * np.float32(0.25))


def iq3_xxs(blocks: np.ndarray) -> Blocks:
    """The factor of the scales, rows of the table, the signs of their numbers and 8 scales."""
    signs, scales = seven_signs(blocks[..., 66:])
    return Blocks(signed(IQ3_XXS[blocks[..., 2:66]], signs), halves(blocks[..., :2]) * scales * np.float32(0.5))


def iq3_s(blocks: np.ndarray) -> Blocks:
    """The factor of the scales, rows of the table, their ninth bits, the signs of the numbers, 8 scales."""
    ninth = np.unpackbits(blocks[..., 66:74], axis=-1, bitorder="little").astype(np.int16) << 8
    few = 2 * shifted(blocks[..., 106:], 1, 4) + 1
    return Blocks(signed(IQ3_S[blocks[..., 2:66] | ninth], blocks[..., 74:106]),
                  halves(blocks[..., :2]) * few.astype(np.float32))


class Format(NamedTuple):
    """A row of the table of formats. The `numbers` of a block are `size` bytes and have scales in equal groups."""
    name: str
    numbers: int
    size: int
    groups: int = 1
    bits: int = 32  # of a whole number
    unpack: Callable[[np.ndarray], Blocks] | None = None  # None: the numbers are there as they are
    factored: bool = False  # Blocks.factors: then the fast engine keeps the scales as they are


FORMATS = {  # by their numbers in the file
    0: Format("F32", 1, 4), 1: Format("F16", 1, 2), 30: Format("BF16", 1, 2),
    2: Format("Q4_0", 32, 18, 1, 4, functools.partial(q4_q5, bits=4, zero=8)),
    3: Format("Q4_1", 32, 20, 1, 4, functools.partial(q4_q5, bits=4, zero=None)),
    6: Format("Q5_0", 32, 22, 1, 5, functools.partial(q4_q5, bits=5, zero=16)),
    7: Format("Q5_1", 32, 24, 1, 5, functools.partial(q4_q5, bits=5, zero=None)),
    8: Format("Q8_0", 32, 34, 1, 8, q8_0),
    10: Format("Q2_K", 256, 84, 16, 2, q2_k), 11: Format("Q3_K", 256, 110, 16, 3, q3_k),
    12: Format("Q4_K", 256, 144, 8, 4, functools.partial(q4_k_q5_k, bits=4), True),
    13: Format("Q5_K", 256, 176, 8, 5, functools.partial(q4_k_q5_k, bits=5), True),
    14: Format("Q6_K", 256, 210, 16, 6, q6_k, True),
    16: Format("IQ2_XXS", 256, 66, 8, 8, iq2_xxs), 18: Format("IQ3_XXS", 256, 98, 8, 8, iq3_xxs),
    21: Format("IQ3_S", 256, 110, 8, 5, iq3_s),
    20: Format("IQ4_NL", 32, 18, 1, 8, iq4_nl), 23: Format("IQ4_XS", 256, 136, 8, 8, iq4_xs),
    34: Format("TQ1_0", 256, 54, 1, 2, tq1_0), 35: Format("TQ2_0", 256, 66, 1, 2, tq2_0),
    39: Format("MXFP4", 32, 17, 1, 5, mxfp4)}
OTHER_FORMATS = {17: "IQ2_XS", 19: "IQ1_S", 22: "IQ2_S", 28: "F64", 29: "IQ1_M", 40: "NVFP4", 41: "Q1_0"}
