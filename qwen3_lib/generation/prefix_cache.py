"""Copies of caches: of a common beginning, and for later requests."""
from __future__ import annotations

from qwen3 import KVCache
from qwen3_5 import HybridCache
from qwen3_lib.generation.ahead import AHEAD, ahead_of


def copy_prefix(target: KVCache, source: KVCache, n: int) -> None:
    """Makes a cache a copy of the first n positions of another one of its kind."""
    target.truncate(0)
    target.reserve(n)
    target.k[:, :, :n], target.v[:, :, :n] = source.k[:, :, :n], source.v[:, :, :n]
    if isinstance(target, HybridCache) and isinstance(source, HybridCache):
        target.adopt(source, n)
        if source in AHEAD:
            known, copy = AHEAD[source], ahead_of(target)
            copy_prefix(copy.cache, known.cache, min(known.cache.length, n))
            copy.start, copy.text, copy.states, copy.ends = known.start, known.text, known.states, dict(known.ends)
    target.advance(source.token_ids[:n])


def size_of(cache: KVCache, length: int) -> int:
    """The bytes of a cache like this one with so many positions."""
    k, states, layers = cache.k, 0, len(cache.k)
    if isinstance(cache, HybridCache):
        states, layers = cache.fixed, layers + cache.config.mtp_num_hidden_layers
    return states + 2 * k.itemsize * layers * k.shape[1] * k.shape[3] * length


class PrefixCache:
    """Copies of caches whose slots are used again, at most `limit` bytes; the oldest copies are dropped first."""

    def __init__(self, limit: int):
        self.limit, self.salts = limit, dict[KVCache, str]()  # copy -> salt of its request

    def add(self, cache: KVCache, salt: str) -> None:
        """Copies a cache, in place of the copies of this salt that begin in the same way and are shorter."""
        if size_of(cache, cache.length) > self.limit:
            return
        copy = type(cache)(cache.config, cache.length)
        copy_prefix(copy, cache, cache.length)
        ids = copy.token_ids[:copy.length]
        self.salts = {each: given for each, given in self.salts.items()
                      if given != salt or each.common_prefix(ids) < each.length} | {copy: salt}
        while sum(size_of(each, each.length) for each in self.salts) > self.limit:
            del self.salts[next(iter(self.salts))]
