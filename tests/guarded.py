"""Arrays that end where a page begins which nobody may touch: a kernel that reads or writes beyond one crashes at once.

    QWEN3_CHECK_MEMORY=1 pytest        runs all tests with them, see conftest.py
"""
import ctypes
import math
import mmap

import numpy as np

import qwen3
import qwen3_numba as fast
from qwen3_lib.kernels import hybrid, memory, packing

PAGE = mmap.PAGESIZE
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def zeros(shape, dtype=np.float64) -> np.ndarray:
    """np.zeros, with a page behind it that may be neither read nor written."""
    shape, dtype = (shape,) if isinstance(shape, int) else tuple(map(int, shape)), np.dtype(dtype)
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // PAGE) * PAGE
    pages = mmap.mmap(-1, size + PAGE)
    whole = np.frombuffer(pages, np.uint8)
    if protect(whole.ctypes.data + size, PAGE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return whole[size - count * dtype.itemsize:size].view(dtype).reshape(shape)


def empty(shape, dtype=np.float64) -> np.ndarray:
    """The same, filled with 255: as floats, these are NaN."""
    array = zeros(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 255
    return array


def resized(cache, old: np.ndarray, capacity: int) -> np.ndarray:
    new = qwen3.KVCache._resized(cache, old, capacity)
    guarded = empty(new.shape, new.dtype)
    guarded[:] = new
    return guarded


def guard_memory() -> None:
    """From now on the fast engine's own arrays are such ones."""
    for module in (memory, packing):
        module.zeros, module.empty = zeros, empty
    fast.empty, fast.KVCache._resized = empty, resized
    memory.LargePages.take = lambda self, shape: zeros(shape, np.uint8)
    memory.aligned = lambda shape: zeros(shape, np.uint8)  # blocks are multiples of 64 bytes: they begin on a line, too
    memory.Reused.take = lambda self, n: empty(n, np.float32)
    hybrid.StateCache.arrays = lambda self, shapes: [[empty(shape, np.float32) for _ in range(n)]
                                                     for n, *shape in shapes]
