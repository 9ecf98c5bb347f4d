"""Guessed tokens are computed with the next one, in one pass: the same answer, in fewer passes.

Decoding waits for the memory: a pass reads all weights, whether it computes one token or five. So tokens are guessed,
computed together after the next one, and drawn one after the other while each drawn token equals its guess. A token's
logits don't depend on what is computed beside it, so the answer is the same, bit for bit, greedy or sampled.
"""
from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from qwen3 import InputError, Model, NextTokens, compute, sample
from qwen3_lib.generation.ahead import ahead_of
from qwen3_lib.generation.schema import Constrained


class Proposer(ABC):
    """Where guesses come from, and how many to make: one more after a pass of right guesses, else one fewer.

    A guess costs PRICE of a pass, see docs/speed.md, and every sequence in the pass waits for it; a right guess brings
    a token. Once guesses have lost LOSS tokens, they pause: for 1 pass, after the next loss for 2, 4, ... 32, until
    they gain again.
    """
    PRICE = 0.12  # to make a guess, and to check it
    DEAREST = 0.5  # of a guess, in passes
    FIRST = 3  # guesses in the first pass
    CREDIT, LOSS = 2.0, 0.5  # the most tokens that are counted as gained or lost
    LONGEST = 32  # passes of a pause

    def __init__(self, most: int):
        self.most, self.n, self.price = most, min(self.FIRST, most), self.PRICE
        self.gained, self.pause, self.wait = 0.0, 0, 1

    @abstractmethod
    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        """At most n tokens that may follow a sequence, all of whose tokens but the last are in the cache."""

    def length(self, beside: int = 0) -> int:
        """How many tokens to guess for the next pass; `beside`: the other sequences in it."""
        self.price = self.PRICE * (1 + beside)
        if self.pause:
            self.pause -= 1
            return 0
        return self.n if self.price < self.DEAREST else 0

    def learn(self, guessed: int, right: int) -> None:
        """Takes note of the pass: its guesses, and how many were right."""
        self.n = min(self.n + 1, self.most) if right == guessed else max(self.n - 1, 1)
        self.gained = min(self.gained + right - self.price * guessed, self.CREDIT)
        if self.gained > 0:
            self.wait = 1
        elif self.gained <= -self.LOSS:
            self.n, self.gained = 1, -self.LOSS
            self.pause, self.wait = self.wait, min(2 * self.wait, self.LONGEST)


class ForcedTokens(Proposer):
    """Knows the tokens that a schema forces: always right, so they are never too many."""
    MOST = 32  # in a pass, so that others who run in it don't wait for long

    def __init__(self, constrained: Constrained) -> None:
        super().__init__(self.MOST)
        self.constrained = constrained

    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        return self.constrained.certain[:n]

    def length(self, beside: int = 0) -> int:
        return self.most

    def learn(self, guessed: int, right: int) -> None:
        pass


class Lookup(Proposer):
    """Guesses the continuation of the text the last time its last few tokens occurred.

    Source: prompt lookup decoding (Saxena 2023).
    """
    PRICE = 0.06  # only to check a guess
    SIZES = (3, 2)  # tokens that must be the same

    def __init__(self, most: int):
        super().__init__(most)
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
    PRICE = 0.4  # of a model in bf16, if the draft is the same in int4
    MOST = 6

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
            logits, _ = compute(self.model, [NextTokens(self.cache, new, guesses=len(guess))])
            token = sample(logits[0], sequence.sampling, rng, sequence.prompt, sequence.token_ids + guess)
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

    def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
        return ahead_of(cache).guess(self.model, sequence.ids, n)

    def follow(self, cache: Any, states: np.ndarray) -> None:
        """Takes the hidden states of the last tokens in a cache."""
        ahead_of(cache).follow(self.model, cache.token_ids[:cache.length], states)


class Speculator:
    """Guesses the tokens after a sequence's next one. The first source that has a guess makes it."""

    def __init__(self, sources: list[Proposer]):
        self.sources, self.source = sources, sources[0]
        self.mtp = next((source for source in sources if isinstance(source, MTP)), None)
        self.passes = self.guessed = self.accepted = 0

    def propose(self, sequence: Any, cache: Any, beside: int = 0) -> list[int]:
        """The guesses for the next pass of a sequence. `beside`: the other sequences in the pass."""
        room = sequence.limit - len(sequence.token_ids) - 1
        for self.source in self.sources:
            n = min(self.source.length(beside), room)
            if n > 0 and (guess := self.source.guess(sequence, cache, n)):
                return guess
        return []

    def learn(self, guessed: int, right: int) -> None:
        """Takes note of a pass that gave tokens: its guesses, and how many were right."""
        self.passes, self.guessed, self.accepted = self.passes + 1, self.guessed + guessed, self.accepted + right
        if guessed:
            self.source.learn(guessed, right)


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
