"""Prompt lookup decoding: guessed tokens are computed with the next one, for fewer passes and the same answer."""
from __future__ import annotations

import time
from typing import Any

import numpy as np

from qwen3_lib.answers.sequences import Wrapped


class Lookup(Wrapped):
    """A sequence that guesses up to n tokens behind the next one. The tokens drawn are the same, in fewer passes.

    The guess is the continuation of the text the last time its last few tokens occurred. A guess costs little, because
    one pass computes several tokens in hardly more time than one (where memory is the limit). Source: prompt lookup
    decoding (Saxena 2023). It measures the time per token with and without guesses, and pauses when guesses cost more.
    """
    SIZES, PAUSE = (3, 2), 32  # tokens that must be the same; tokens to wait before the next try

    def __init__(self, sequence: Any, n: int):
        super().__init__(sequence)
        self.n, self.pause, self.wrong = n, 0, 0
        self.guess: list[int] = []
        self.text: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}  # tokens -> the place after them, the latest one
        self.seconds = {True: 0.0, False: 0.0}  # per token, with guesses and without: running means
        self.since: float | None = None  # the end of the last feed
        for token in sequence.prompt.tolist():
            self.note(token)

    @property
    def new(self) -> Any:
        """The tokens to compute next, the guesses behind them."""
        return [*self.sequence.new, *self.guess] if self.guess else self.sequence.new

    @property
    def guesses(self) -> int:
        return len(self.guess)

    def feed(self, logits: np.ndarray) -> list[int]:
        """Draws from logits [1 + guesses, vocab_size], or [vocab_size] without guesses, while the guess is right."""
        drawn, guess = [], self.guess
        for i, row in enumerate(np.atleast_2d(logits)):
            drawn += (tokens := self.sequence.feed(row))
            if not len(self.sequence.new) or tokens != guess[i:i + 1]:
                break
        right = sum(token == guessed for token, guessed in zip(drawn, guess))
        self.wrong, self.guess = len(guess) - right, []
        for token in drawn:
            self.note(token)
        self.time(bool(guess), len(drawn))
        if len(self.sequence.new):
            self.guess = self.next_guess()
        return drawn

    def note(self, token: int) -> None:
        """Notes the text's next token."""
        for size in self.SIZES:
            if len(self.text) >= size:
                self.places[tuple(self.text[-size:])] = len(self.text)
        self.text.append(token)

    def next_guess(self) -> list[int]:
        """At most n tokens; none if the last tokens haven't occurred before, or during a pause."""
        self.pause -= 1
        if self.pause >= 0 or not self.seconds[False]:  # the first pass measures the time without guesses
            return []
        room = self.sequence.limit - len(self.sequence.token_ids) - 1
        for size in self.SIZES:
            at = self.places.get(tuple(self.text[-size:]))
            if at is not None:
                return self.text[at:at + min(self.n, room)]
        return []

    def time(self, guessed: bool, n_tokens: int) -> None:
        """Notes the time of a pass per token, and pauses if guesses cost more than they save."""
        before, self.since = self.since, time.perf_counter()
        if before is None or not n_tokens:  # the pass of the prompt
            return
        old, new = self.seconds[guessed], (self.since - before) / n_tokens
        self.seconds[guessed] = 0.75 * old + 0.25 * new if old else new
        if guessed and self.seconds[True] > self.seconds[False]:
            self.pause, self.seconds[True] = self.PAUSE, 0.0
