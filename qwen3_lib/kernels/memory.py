"""Memory for the kernels: arrays that begin where a line of the CPU's cache does, and the space that they work in."""
from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque

import numpy as np

from qwen3 import Config
from qwen3_lib.kernels.kind import Kind
from qwen3_lib.kernels.layout import APART, BLOCK, PANEL, Space, own_space, padded, vector_size

MADV_DONTNEED = 4  # Linux
empty, zeros = np.empty, np.zeros  # what kernels write to; tests put pages after it that mustn't be touched


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """uint8 zeros that begin where a line of the cache does, so that no vector lies in two."""
    size = int(np.prod(shape))
    space = zeros(size + 63, np.uint8)
    start = -space.ctypes.data % 64
    return space[start:start + size].reshape(shape)


def floats(*shape: int) -> np.ndarray:
    """float32 zeros that begin likewise."""
    return aligned((*shape[:-1], shape[-1] * 4)).view(np.float32)


class LargePages:
    """Zeros for packed matrices, cut from arrays so large that the system gives large pages: they are read faster."""
    LARGE = 64 << 20

    def __init__(self) -> None:
        self.space, self.used = aligned((0,)), 0

    def take(self, shape: tuple[int, int]) -> np.ndarray:
        size = shape[0] * shape[1]  # a multiple of 64
        if self.used + size > len(self.space):
            self.space, self.used = aligned((max(size, self.LARGE),)), 0
        self.used += size
        return self.space[self.used - size:self.used].reshape(shape)

    def give_back(self, last: np.ndarray) -> None:
        last[:] = 0
        self.used -= last.size


def in_memory(data: np.ndarray) -> np.ndarray:
    """A copy of an array of a mapped file."""
    copy = aligned((data.nbytes,)).view(data.dtype).reshape(data.shape)
    copy[:] = data
    return copy


def let_go(address: int, size: int) -> None:
    """Tells Linux that these bytes of a mapped file aren't needed for now."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)


class Reused:
    """Memory for arrays that each pass makes anew. Once nothing refers to the arrays, a later pass takes their memory.

    The system clears the pages of new memory; for a hybrid's states, clearing takes longer than the work on them.
    """

    def __init__(self) -> None:
        self.free: deque[np.ndarray] = deque(maxlen=1)

    def take(self, n: int) -> np.ndarray:
        """float32 [n], without values yet, that begin where a line of the cache does."""
        piece = empty(0, np.float32)
        with contextlib.suppress(IndexError):  # none is free
            piece = self.free.pop()
        if not n <= len(piece) <= 2 * n:
            space = empty(n + 15, np.float32)
            start = -space.ctypes.data % 64 // 4
            piece = space[start:start + n]
        used = (ctypes.c_float * len(piece)).from_buffer(piece)  # what all arrays of it refer to
        weakref.finalize(used, self.free.append, piece)
        return np.frombuffer(used, np.float32)[:n]


def experts_of(config: Config) -> tuple[int, int]:
    """(the experts of a layer, those that a token goes through), with the shared one."""
    shared = int(getattr(config, "shared_expert_intermediate_size", 0) > 0)
    return config.num_experts + shared, config.num_experts_per_tok + shared


def work_space(kind: Kind, config: Config, n_threads: int, m: int, n_tasks: int, n_queries: int,
               own: list[np.ndarray]) -> Space:
    """For m tokens, n_tasks tasks of attention, n_queries queries of a task; `own`: what threads worked in before."""
    n_heads, n_kv_heads, width = config.num_attention_heads, config.num_key_value_heads, padded(config.head_dim, 32)
    more = kind.widths(config)
    gathered, (n_experts, k) = padded(config.hidden_size, 64), experts_of(config)
    widest = padded(max(config.hidden_size, n_heads * config.head_dim, more.mixed, more.fused), 64)
    dense = not {*range(config.num_hidden_layers)} <= {*config.sparse_layers}
    inner = padded(max(config.intermediate_size * dense, config.moe_intermediate_size, more.shared), 64)
    n_qkv = padded(n_heads * config.head_dim, PANEL) + 2 * padded(n_kv_heads * config.head_dim, PANEL)
    n_rows, n_pairs = max(m, m * k), m * k
    n_own = max(own_space(n_queries, width, max(widest, inner)), more.own)
    kept = [each for each in own if each.shape[1] >= n_own]
    return Space(
        h=floats(m, widest + APART), packed=empty((m, vector_size(widest)), np.uint8),
        qkv=floats(m, max(n_qkv, more.projected, widest, padded(n_experts, PANEL))),
        queries=floats(n_kv_heads, m * (n_heads // n_kv_heads), width),
        gate=floats(n_rows, inner + APART), up=floats(n_rows, inner + APART),
        gate_packed=empty((n_rows, vector_size(inner)), np.uint8),
        partials=floats(n_tasks, n_kv_heads, n_queries, width + 16),
        own=kept[0] if kept else floats(n_threads, n_own),
        gathered=floats(n_pairs, gathered + APART), gathered_packed=empty((n_pairs, vector_size(gathered)), np.uint8),
        chosen=empty((m, k), np.int64), shares=floats(m, k), starts=empty(n_experts + 2, np.int64),
        writing=floats(m, more.streams), index_queries=floats(m * more.index[0], padded(more.index[1], 32)),
        chosen_blocks=empty((m, more.blocks), np.int64),
        copied=empty((n_threads, 4 * BLOCK * width if more.blocks else 0), np.uint16))
