"""What this CPU can do: the instructions that products may use, and how its registers are used best."""
import ctypes
import os
import platform
import sys
from typing import NamedTuple

import llvmlite.binding as llvm

from qwen3_lib.io.errors import InputError, brief


class Shape(NamedTuple):
    """How a CPU's registers are used best by the packed product."""
    lanes: int  # 32-bit numbers in a vector
    together: int  # vectors of a panel's 32 rows that are worked on at a time
    vectors: int  # that the panel is multiplied with at a time
    all: int  # vectors that are multiplied at once if there are no more


INT8_SHAPES = {"vnni512": Shape(16, 2, 6, 8), "vnni": Shape(8, 1, 6, 6), "avx2": Shape(8, 1, 8, 8),
               "i8mm": Shape(4, 4, 4, 4), "dotprod": Shape(4, 4, 4, 4), "neon": Shape(4, 2, 4, 4),
               "plain": Shape(4, 1, 4, 4)}
ON_ARM = ("i8mm", "dotprod", "neon")
UNSIGNED = ("vnni512", "vnni", "i8mm")  # their instruction wants one factor unsigned
BYTE_OFFSET = 128  # the offset of weights that are signed bytes
# ARM's instructions for bytes: LLVM's name; word and bit where Linux tells of them; macOS's name; Windows' number.
ARM = (("dotprod", 16, 20, b"FEAT_DotProd", 43), ("i8mm", 26, 13, b"FEAT_I8MM", 66))


def int8_paths(features: dict[str, bool]) -> list[str]:
    """Which instructions multiply bytes on a CPU with these features, the fastest first."""
    has = {"vnni512": features.get("avx512vnni"), "avx2": features.get("avx2"), "neon": features.get("neon"),
           "dotprod": features.get("dotprod"), "i8mm": features.get("i8mm"),
           "vnni": features.get("avxvnni") or features.get("avx512vnni") and features.get("avx512vl"), "plain": True}
    return [path for path in INT8_SHAPES if has[path]]


def host_features() -> dict[str, bool]:
    """LLVM's names of what this CPU has. It never tells of an ARM's instructions for bytes, so the system is asked."""
    features = dict(llvm.get_host_cpu_features())
    if platform.machine() not in ("aarch64", "arm64", "ARM64"):  # of Linux, macOS, Windows
        return features
    features["neon"] = True
    for feature, word, bit, name, number in ARM:
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        if sys.platform == "linux":
            value.value = ctypes.CDLL(None).getauxval(ctypes.c_ulong(word)) >> bit & 1
        elif sys.platform == "darwin":  # a name that it doesn't know leaves 0
            ctypes.CDLL(None).sysctlbyname(b"hw.optional.arm." + name, ctypes.byref(value), ctypes.byref(size), None, 0)
        elif sys.platform == "win32":
            value.value = ctypes.windll.kernel32.IsProcessorFeaturePresent(number)
        features[feature] = bool(value.value)
    return features


FEATURES = host_features()
ALL_PATHS, WISH = int8_paths(FEATURES), os.environ.get("QWEN3_INT8_PATH")
PATH = WISH if WISH in ALL_PATHS else ALL_PATHS[0]
PATHS = ALL_PATHS[ALL_PATHS.index(PATH):]
if WISH in ("avx2", "plain") or WISH == "vnni" and FEATURES.get("avxvnni"):  # as on a CPU without AVX-512
    more = ("avx512", "avx10", *(("avxvnni", "gfni") if WISH != "vnni" else ()))
    FEATURES = {name: on and not name.startswith(more) for name, on in FEATURES.items()}
PAIRS = bool(FEATURES.get("avx512bf16"))  # whether one instruction multiplies and adds pairs of bf16
AVX512 = bool(FEATURES.get("avx512f"))
LONG = 256 if AVX512 else 64  # so many vectors pay for transposing rows of bf16
SUMS = 24 if AVX512 else 6  # sums of 16 lanes that a CPU's registers hold, beside the factors


def check_path() -> None:
    """Raises InputError if $QWEN3_INT8_PATH names instructions that this CPU has not."""
    if WISH and WISH not in PATHS:
        raise InputError(f"QWEN3_INT8_PATH is {brief(repr(WISH))}; this CPU has {', '.join(PATHS)}")
