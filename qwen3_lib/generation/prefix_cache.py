"""Copies of caches for later requests."""
from __future__ import annotations

from qwen3 import KVCache
from qwen3_lib.generation.prompt_store import PromptStore


class PrefixCache:
    """Copies of caches whose slots are used again, at most `limit` bytes; the oldest copies are dropped first, into the
    `store`, if there is one."""

    def __init__(self, limit: int, store: PromptStore | None = None):
        self.limit, self.store, self.salts = limit, store, dict[KVCache, str]()  # copy -> salt of its request

    def add(self, cache: KVCache, salt: str) -> None:
        """Copies a cache, in place of the copies of this salt that begin in the same way and are shorter."""
        if cache.bytes(cache.length) > self.limit:
            if self.store is not None:
                self.store.save(cache, salt)
            return
        copy = type(cache)(cache.config, cache.length)
        copy.copy_from(cache, cache.length)
        ids = copy.token_ids[:copy.length]
        self.salts = {each: given for each, given in self.salts.items()
                      if given != salt or each.common_prefix(ids) < each.length} | {copy: salt}
        while sum(each.bytes(each.length) for each in self.salts) > self.limit:
            oldest = next(iter(self.salts))
            if self.store is not None:
                self.store.save(oldest, self.salts[oldest])
            del self.salts[oldest]
