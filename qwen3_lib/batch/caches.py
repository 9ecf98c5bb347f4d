"""Several sequences in one pass: their caches answer the model as one."""
from __future__ import annotations

from typing import Any

import numpy as np

from qwen3 import KVCache
from qwen3_5 import HybridCache


class Caches:
    """The KV caches of several sequences for one pass, with the new tokens of all behind each other.

    counts[i] tokens of the pass belong to caches[i]. `last`: the rows of the pass whose logits are wanted: of each
    sequence those of its last token, and of the `guesses[i]` tokens before it.
    """

    def __init__(self, caches: list[Any], counts: list[int], guesses: list[int] | None = None):
        self.caches, self.counts = caches, counts
        ends, guesses = np.cumsum(counts), guesses or [0] * len(counts)
        self.last = np.concatenate([np.arange(end - 1 - n, end) for end, n in zip(ends, guesses)])
        for cache, n in zip(caches, guesses):
            cache.guesses = n
        self.done = 0  # tokens of the pass that are computed

    def reserve(self, n: int) -> np.ndarray:
        """Makes room for all n tokens -> their positions [n], each in its own sequence."""
        return np.concatenate([cache.reserve(count) for cache, count in zip(self.caches, self.counts)])

    def parts(self, n: int) -> list[tuple[Any, slice]]:
        """(cache, its rows) of the next n tokens."""
        ends, parts = np.cumsum(self.counts).tolist(), []
        for cache, start, end in zip(self.caches, [0, *ends], ends):
            first, stop = max(start, self.done), min(end, self.done + n)
            if first < stop:
                parts.append((cache, slice(first - self.done, stop - self.done)))
        return parts

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """KVCache.attend of each sequence -> [n_heads, n, head_dim]."""
        return np.concatenate([cache.attend(layer, q[:, rows], k[:, rows], v[:, rows])
                               for cache, rows in self.parts(k.shape[1])], axis=1)

    def recall(self, layer: int, weight: np.ndarray, *new: np.ndarray) -> np.ndarray:
        """HybridCache.recall of each sequence -> [n, value heads, value_dim]."""
        return np.concatenate([cache.recall(layer, weight, *(array[rows] for array in new))
                               for cache, rows in self.parts(len(new[0]))])

    def keep(self) -> None:
        """HybridCache.keep of the sequence whose token was computed last."""
        self.caches[int(np.searchsorted(np.cumsum(self.counts), self.done))].keep()

    def advance(self, token_ids: np.ndarray) -> None:
        """Counts the next tokens [n] as filled, see KVCache.advance."""
        for cache, rows in self.parts(len(token_ids)):
            cache.advance(token_ids[rows])
        self.done += len(token_ids)


def copy_prefix(target: KVCache, source: KVCache, n: int) -> None:
    """Makes a cache a copy of the first n positions of another one of its kind."""
    target.truncate(0)
    target.reserve(n)
    target.k[:, :, :n], target.v[:, :, :n] = source.k[:, :, :n], source.v[:, :, :n]
    if isinstance(target, HybridCache) and isinstance(source, HybridCache):
        target.adopt(source, n)
    target.advance(source.token_ids[:n])


def size_of(cache: KVCache, length: int) -> int:
    """The bytes of a cache like this one with so many positions."""
    k, states = cache.k, cache.fixed if isinstance(cache, HybridCache) else 0
    return states + 2 * k.itemsize * k.shape[0] * k.shape[1] * k.shape[3] * length


class Kept:
    """Copies of caches whose slots are used again, at most `limit` bytes; those used longest ago are dropped first."""

    def __init__(self, limit: int):
        self.limit, self.caches = limit, list[KVCache]()

    def add(self, cache: KVCache) -> None:
        """Copies a cache, in place of the copies that begin in the same way and are shorter."""
        if size_of(cache, cache.length) > self.limit:
            return
        copy = type(cache)(cache.config, cache.length)
        copy_prefix(copy, cache, cache.length)
        ids = copy.token_ids[:copy.length]
        self.caches = [*(each for each in self.caches if each.common_prefix(ids) < each.length), copy]
        while sum(size_of(each, each.length) for each in self.caches) > self.limit:
            del self.caches[0]

    def used(self, cache: KVCache) -> KVCache:
        """The cache, which is dropped later than the others if it is a kept one."""
        if any(each is cache for each in self.caches):
            self.caches = [*(each for each in self.caches if each is not cache), cache]
        return cache
