"""What the MTP head of a Qwen3.5 has read of the text in a cache: from there it guesses how the text goes on."""
from __future__ import annotations

from typing import Any

import numpy as np

from qwen3 import KVCache, Model
from qwen3_5 import mtp_config

UNREAD = 64  # states that wait at most until the head is asked for a guess; more of them it reads at once
KEPT_ENDS = 32  # states at the ends of turns, where a conversation may go on


class Ahead:
    """What the head has read, in a KV cache of its own, from the text's token `start` on, and what waits to be read.

    The head reads the hidden state of a token with the token after it, so the last state always waits. If it missed a
    part of the text, it begins anew after that part: its guesses may be worse, and no answer changes.
    """

    def __init__(self, cache: KVCache):
        self.cache, self.start = cache, 0
        self.text = np.empty(0, np.int64)  # the tokens from `start` on whose states were taken
        self.states = np.empty((0, 0), np.float32)  # of the last tokens, which wait
        self.ends = dict[int, np.ndarray]()  # position -> the state there, at the end of a turn

    def copy(self, n: int, max_length: int) -> Ahead:
        """For a cache of so many positions that begins with the first n tokens of this text."""
        copy = Ahead(type(self.cache)(self.cache.config, max_length))
        copy.cache.copy_from(self.cache, min(self.cache.length, n))
        copy.start, copy.text, copy.states, copy.ends = self.start, self.text, self.states, dict(self.ends)
        return copy

    def settle(self, text: np.ndarray, n: int) -> bool:
        """Forgets what doesn't belong to a text, of whose first n tokens the states should be known -> are they?"""
        known, first = text[self.start:n], len(self.text) - len(self.states)
        read = min(self.cache.common_prefix(text[self.start + 1:]), len(known))
        last = self.ends.get(n - 1)
        if 0 < len(known) <= len(self.text) and np.array_equal(known, self.text[:len(known)]):
            if read == first:
                self.states = self.states[:len(known) - read]
            elif read >= len(known) - (last is not None):
                self.states = self.states[:0] if last is None or read == len(known) else last[None]
            else:
                known = known[:0]
        else:
            known = known[:0]
        if not len(known):
            self.start, self.states, read = n, self.states[:0], 0
        self.cache.truncate(read)
        self.text, self.ends = known.copy(), {at: state for at, state in self.ends.items() if at < n}
        return len(known) > 0

    def follow(self, model: Model, text: np.ndarray, states: np.ndarray) -> None:
        """Takes the hidden states [n, hidden_size] of the last tokens of a text."""
        before = len(text) - len(states)
        self.settle(text, before)
        self.text = text[self.start:].copy()
        self.states = np.concatenate([self.states, states]) if len(self.states) else states
        for i in np.flatnonzero(np.isin(text[before:], model.eos_token_ids))[-2:].tolist():
            self.ends[before + i] = states[i].copy()
        self.ends = dict([*self.ends.items()][-KEPT_ENDS:])
        if len(self.states) > UNREAD:
            self.read(model, self.states[:-1], self.text[self.cache.length + 1:])
            self.states = self.states[-1:].copy()

    def read(self, model: Model, states: np.ndarray, token_ids: np.ndarray) -> tuple[np.ndarray, int]:
        assert model.engine.guess is not None
        return model.engine.guess(model, states, token_ids, self.cache, self.start)

    def guess(self, model: Model, text: np.ndarray, n: int) -> list[int]:
        """n guesses at how a text goes on, of which all tokens but the last are computed; none if their states are
        missing. A guess stands on those before it.
        """
        if not self.settle(text, len(text) - 1) or not len(self.states):
            return []
        states, token = self.read(model, self.states, text[self.start + self.cache.length + 1:])
        self.states, read, guesses = self.states[:0], self.cache.length, [token]
        while len(guesses) < n:
            states, token = self.read(model, states[-1:], np.array(guesses[-1:]))
            guesses.append(token)
        self.cache.truncate(read)
        return guesses


def ahead_of(cache: Any) -> Ahead:
    """What the head has read of the text in a HybridCache."""
    if cache.ahead is None:
        cache.ahead = Ahead(cache.plain(mtp_config(cache.config), cache.max_length))
    return cache.ahead  # type: ignore[no-any-return]
