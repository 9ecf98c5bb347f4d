"""Guessed tokens are computed with the next one, in one pass: the same answer, in fewer passes.

Decoding waits for the memory: a pass reads all weights, whether it computes one token or five. So tokens are guessed,
computed together after the next one, and drawn one after the other while each drawn token equals its guess. A token's
logits don't depend on what is computed beside it, so the answer is the same, bit for bit, greedy or sampled.
"""
from __future__ import annotations

import copy
import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import numpy as np

from qwen3 import InputError, Model, NextTokens, compute, sample
from qwen3_lib.generation.ahead import ahead_of
from qwen3_lib.generation.schema import Constrained


class Proposer(ABC):
    """Where guesses come from. It measures what they cost and how often they are right, and gives as many as pay."""
    PAUSE = 32  # tokens to wait after guesses that don't pay, before one of them is tried again
    PART = 0.1  # of a new measurement in a running mean

    def __init__(self, n: int):
        self.n, self.pause, self.seen = n, 0, 0  # seen: passes with its guesses
        self.right, self.make, self.check = 0.8, 0.0, 0.0  # the share that is right; seconds to make and check a guess

    @abstractmethod
    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        """At most n tokens that may follow a sequence, all of whose tokens but the last are in the cache."""

    def length(self, plain: float | None, beside: int = 0) -> int:
        """How many guesses give the most tokens a second, where a pass without guesses takes `plain` seconds.

        None while that isn't known, or is to be measured again. `beside`: the other sequences in the pass.
        """
        if plain is None:
            return 0
        if self.pause:
            self.pause -= 1
            return 0 if self.pause else 1

        def speed(k: int) -> float:
            drawn = beside + sum(self.right ** i for i in range(k + 1))
            return drawn / (plain + k * (self.make + max(self.check, 0)))

        if (k := max(range(self.n + 1), key=speed)) == 0:
            self.pause = self.PAUSE
        return k

    def learn(self, guessed: int, right: int, seconds: float, plain: float, checked: int = 0) -> None:
        """Takes note of a pass: its guesses, how many were right, its seconds; `checked`: guesses of all sequences."""
        for i in range(min(right + 1, guessed)):
            self.right += self.part(1) * ((i < right) - self.right)
        self.check += self.part() * ((seconds - plain) / max(guessed, checked) - self.check)
        self.seen += 1

    def part(self, more: int = 0) -> float:
        """The part of a new measurement in a running mean: the first ones count for more."""
        return max(self.PART, 1 / (1 + more + self.seen))


class ForcedTokens(Proposer):
    """Knows the tokens that a schema forces: always right, so they are never too many."""
    MOST = 32  # in a pass, so that others who run in it don't wait for long

    def __init__(self, constrained: Constrained) -> None:
        super().__init__(self.MOST)
        self.constrained = constrained

    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        return self.constrained.certain[:n]

    def length(self, plain: float | None, beside: int = 0) -> int:
        return self.n

    def learn(self, guessed: int, right: int, seconds: float, plain: float, checked: int = 0) -> None:
        pass


class Lookup(Proposer):
    """Guesses the continuation of the text the last time its last few tokens occurred.

    Source: prompt lookup decoding (Saxena 2023).
    """
    SIZES = (3, 2)  # tokens that must be the same

    def __init__(self, n: int):
        super().__init__(n)
        self.text: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}  # tokens -> the place after them, the latest one

    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        for token in [*sequence.prompt.tolist(), *sequence.token_ids][len(self.text):]:
            for size in self.SIZES:
                if len(self.text) >= size:
                    self.places[tuple(self.text[-size:])] = len(self.text)
            self.text.append(token)
        places = (self.places.get(tuple(self.text[-size:])) for size in self.SIZES)
        at = next((place for place in places if place is not None), len(self.text))
        return list(itertools.takewhile(lambda token: token >= 0, self.text[at:at + n]))  # up to a picture


class Draft(Proposer):
    """Guesses what a smaller model, or the same one with fewer bits, draws with the same random numbers.

    Source: speculative decoding (Leviathan et al. 2023); here a guess must be the very token that the model draws.
    In a conversation, one Draft for all answers keeps its KV cache.
    """
    MOST = 8

    def __init__(self, model: Model, large: Model):
        super().__init__(self.MOST)
        if model.tokenizer.backend.get_vocab() != large.tokenizer.backend.get_vocab():
            raise InputError(f"{model.path} can't draft for {large.path}: their tokenizers differ")
        self.model = model
        self.cache: Any = model.engine.new_cache(model.config)

    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        text, guess = sequence.ids, list[int]()
        if len(text) + n > self.cache.max_length or (text < 0).any():  # pictures that another model has seen
            return []
        self.cache.truncate(self.cache.common_prefix(text[:-1]))
        new, rng = text[self.cache.length:], copy.deepcopy(sequence.rng)
        for _ in range(n):
            start = time.perf_counter()
            logits, _ = compute(self.model, [NextTokens(self.cache, new, guesses=len(guess))])
            token = sample(logits[0], sequence.sampling, rng, sequence.prompt, sequence.token_ids + guess)
            if len(new) <= self.MOST:  # else it was the prompt's pass
                self.make += self.PART * (time.perf_counter() - start - self.make)
            if token >= sequence.model.config.vocab_size:
                break
            guess.append(token)
            new = np.array([token])
        return guess


class MTP(Proposer):
    """Guesses the likeliest tokens by the model's own MTP head."""
    MOST = 6

    def __init__(self, model: Model):
        super().__init__(self.MOST)
        self.model = model

    def length(self, plain: float | None, beside: int = 0) -> int:
        return min(super().length(plain, beside), self.MOST if self.seen else 2)  # what they cost isn't known at first

    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        start = time.perf_counter()
        guess = ahead_of(cache).guess(self.model, sequence.ids, n)
        if guess:
            self.make += self.part() * ((time.perf_counter() - start) / n - self.make)
        return guess

    def follow(self, cache: Any, states: np.ndarray) -> None:
        """Takes the hidden states of the last tokens in a cache."""
        ahead_of(cache).follow(self.model, cache.token_ids[:cache.length], states)


class Speculator:
    """Guesses the tokens after a sequence's next one. The first source that has a guess makes it."""
    REFRESH = 64  # passes until one without guesses is measured again

    def __init__(self, sources: list[Proposer]):
        self.sources, self.source = sources, sources[0]
        self.mtp = next((source for source in sources if isinstance(source, MTP)), None)
        self.passes = 0
        self.guessed = self.accepted = 0  # in all
        self.latest = deque[float](maxlen=3)  # seconds of passes without guesses
        self.plain: float | None = None  # their median: a single pass may wait for a core, or for a kernel to be loaded

    def propose(self, sequence: Any, cache: Any, beside: int = 0) -> list[int]:
        """The guesses for the next pass of a sequence; none where they don't pay. `beside`: the others in the pass."""
        self.passes += 1
        plain = None if self.passes > self.REFRESH else self.plain
        room = sequence.limit - len(sequence.token_ids) - 1
        for self.source in self.sources:
            n = min(self.source.length(plain, beside), room)
            if n > 0 and (guess := self.source.guess(sequence, cache, n)):
                return guess
        return []

    def learn(self, guessed: int, right: int, seconds: float, checked: int = 0) -> None:
        """Takes note of a pass: its guesses, how many were right, its seconds; `checked`: guesses of all sequences."""
        self.guessed, self.accepted = self.guessed + guessed, self.accepted + right
        if guessed and self.plain is not None:
            self.source.learn(guessed, right, seconds, self.plain, checked)
        elif not guessed and not checked:
            self.latest.append(seconds)
            self.plain = statistics.median_low(self.latest) if len(self.latest) > 1 else None
            self.passes = 0


def has_mtp_head(model: Model) -> bool:
    return getattr(model.config, "mtp_num_hidden_layers", 0) > 0


def speculator(model: Model, constrained: Constrained | None, lookup: int | None,
               draft: Proposer | Model | str | None) -> Speculator | None:
    """The Speculator with these sources; None if there are none. draft: see options.py."""
    sources: list[Proposer] = [] if constrained is None else [ForcedTokens(constrained)]
    if lookup:
        sources.append(Lookup(lookup))
    if isinstance(draft, Model):
        draft = Draft(draft, model)
    if has_mtp_head(model) and (draft == "auto" or draft is None and model.engine.drafts):
        draft = MTP(model)
    sources += [draft] if isinstance(draft, Proposer) else []
    return Speculator(sources) if sources else None
