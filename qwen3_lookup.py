"""Prompt lookup decoding: guessed tokens are computed together with the next one, for fewer passes and the same answer.

    generate(model, ids, forward=Lookup(model.engine.forward, ids, 4))      or: chat(model, "...", lookup=4)
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Lookup:
    """A `forward` for generate that computes guessed tokens in the same pass: fewer passes, the same logits.

    The guess is the continuation of the text the last time its last few tokens occurred. A guess costs little, because
    one pass computes several tokens in hardly more time than one (where memory is the limit). Source: prompt lookup
    decoding (Saxena 2023). It measures the time per token with and without guesses, and pauses when guesses cost more.
    """
    SIZES, PAUSE = (3, 2), 32  # tokens that must be the same; tokens to wait before the next try

    def __init__(self, forward: Callable[..., np.ndarray], prompt: Sequence[int] | np.ndarray, n: int):
        self.forward, self.n, self.wait = forward, n, 0
        self.text: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}  # tokens -> the place after them, the latest one
        self.ahead: list[tuple[int, np.ndarray]] | None = None  # guessed tokens in the cache, and the logits after them
        self.passed = (0, 0.0)  # guessed tokens and seconds of the last pass
        self.seconds = {True: 0.0, False: 0.0}  # per token, with guesses and without: running means
        for token in prompt:
            self.add(int(token))

    def __call__(self, model: Any, token_ids: Sequence[int] | np.ndarray, cache: Any) -> np.ndarray:
        """The logits after the last of the new tokens, [vocab_size]."""
        if self.ahead is None:  # the prompt
            self.ahead = []
            return self.forward(model, token_ids, cache)
        token = int(token_ids[-1])
        self.add(token)
        if self.ahead and self.ahead[0][0] == token:
            return self.ahead.pop(0)[1]
        self.timed(*self.passed, len(self.ahead))
        cache.truncate(cache.length - len(self.ahead))  # the wrong guesses
        self.ahead = []
        guess, start = self.guess(cache.max_length - cache.length - 1), time.perf_counter()
        logits = np.atleast_2d(self.forward(model, [token, *guess], cache, all_logits=bool(guess)))
        self.passed, self.ahead = (len(guess), time.perf_counter() - start), list(zip(guess, logits[1:]))
        return logits[0]

    def add(self, token: int) -> None:
        """Notes the text's next token."""
        for size in self.SIZES:
            if len(self.text) >= size:
                self.places[tuple(self.text[-size:])] = len(self.text)
        self.text.append(token)

    def guess(self, room: int) -> list[int]:
        """The next tokens, n or `room` at most; [] if the last tokens have not occurred before, or during a pause."""
        self.wait -= 1
        if self.wait >= 0 or not self.seconds[False]:  # the first pass measures the time without guesses
            return []
        for size in self.SIZES:
            at = self.places.get(tuple(self.text[-size:]))
            if at is not None:
                return self.text[at:at + min(self.n, room)]
        return []

    def timed(self, n_guessed: int, seconds: float, n_wrong: int) -> None:
        """Notes the time of a pass per right token, and pauses if guesses cost more than they save."""
        if not seconds:
            return
        guessed = n_guessed > 0
        old, new = self.seconds[guessed], seconds / (1 + n_guessed - n_wrong)
        self.seconds[guessed] = 0.75 * old + 0.25 * new if old else new
        if guessed and self.seconds[True] > self.seconds[False]:
            self.wait, self.seconds[True] = self.PAUSE, 0.0
