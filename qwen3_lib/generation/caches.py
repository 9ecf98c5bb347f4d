"""Several sequences in one pass: their caches answer the model as one."""
from __future__ import annotations

from typing import Any

import numpy as np


class Caches:
    """The KV caches of several sequences for one pass, with the new tokens of all, one sequence after the other.

    counts[i] tokens of the pass belong to caches[i]. The last guesses[i] tokens of this sequence may be cut off again;
    the first of them may be of earlier passes. `last`: the rows of the pass whose logits are wanted, of each sequence
    those of its new guesses and of the token before them.
    """

    def __init__(self, caches: list[Any], counts: list[int], guesses: list[int] | None = None):
        self.caches, self.counts, self.guesses = caches, counts, guesses or [0] * len(counts)
        self.last = np.concatenate([np.arange(end - min(1 + n, count), end)
                                    for end, count, n in zip(np.cumsum(counts), counts, self.guesses)])
        self.done = 0  # tokens of the pass that are computed
        self.found: tuple[int, list[tuple[Any, slice]]] = 0, []  # what `parts` has given last, until `advance`

    def reserve(self, n: int) -> np.ndarray:
        """Makes room for all n tokens -> their positions [n], each in its own sequence."""
        return np.concatenate([
            cache.reserve(count, guesses) for cache, count, guesses in zip(self.caches, self.counts, self.guesses)])

    def parts(self, n: int) -> list[tuple[Any, slice]]:
        """(cache, its rows) of the next n tokens: the same for each layer."""
        if self.found[0] != n:
            ends, parts = np.cumsum(self.counts).tolist(), list[tuple[Any, slice]]()
            for cache, start, end in zip(self.caches, [0, *ends], ends):
                first, stop = max(start, self.done), min(end, self.done + n)
                if first < stop:
                    parts.append((cache, slice(first - self.done, stop - self.done)))
            self.found = n, parts
        return self.found[1]

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """KVCache.attend of each sequence -> [n_heads, n, head_dim]."""
        parts = self.parts(k.shape[1])
        if len(parts) == 1:
            return parts[0][0].attend(layer, q, k, v)  # type: ignore[no-any-return]
        return np.concatenate([cache.attend(layer, q[:, rows], k[:, rows], v[:, rows])
                               for cache, rows in parts], axis=1)

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
        self.done, self.found = self.done + len(token_ids), (0, [])
