"""One pass through the model for one sequence or several, and the tokens drawn from it."""
from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from qwen3 import CHUNK, InputError, KVCache, Model, NextTokens, Sequence, compute
from qwen3_lib.generation.guesses import Speculator


class Run(NamedTuple):
    """A sequence with its cache, and what guesses its next tokens, if anything."""
    sequence: Sequence
    cache: KVCache
    speculator: Speculator | None = None


def step(model: Model, runs: list[Run], room: int | None = None) -> list[Any]:
    """One pass for several sequences -> the tokens drawn of each.

    room: how many tokens of prompts are computed; by default all, or CHUNK if an MTP head guesses. Each prompt gets a
    fair share, so that a short one doesn't wait for a long one. A sequence draws when its whole prompt is computed. A
    sequence that fails gives its InputError in place of tokens.
    """
    rests = [sequence.rewind(cache) for sequence, cache, _ in runs]
    unread = [0 if run.sequence.token_ids and len(rest) == 1 else len(rest) for run, rest in zip(runs, rests)]
    shares, reading = list(unread), sorted((i for i, n in enumerate(unread) if n), key=unread.__getitem__)
    drafts = any(speculator and speculator.mtp for *_, speculator in runs)
    left = room if room is not None else CHUNK if drafts else sum(unread)  # hidden states take memory
    for place, i in enumerate(reading):
        shares[i] = min(unread[i], left // (len(reading) - place))
        left -= shares[i]
    parts, some, guesses = list[NextTokens](), list[int](), list[list[int]]()  # some: the sequences in this pass
    for i, (sequence, cache, speculator) in enumerate(runs):
        guess = speculator.propose(sequence, cache, unread.count(0) - 1) \
            if speculator and not unread[i] else []
        ids = rests[i][:shares[i]] if unread[i] else [*rests[i], *guess]
        if len(ids):
            parts.append(NextTokens(cache, np.asarray(ids), min(1 + len(guess), len(ids)), len(guess)))
            some.append(i)
            guesses.append(guess)
    drawn: list[Any] = [[] for _ in runs]
    if not some:
        return drawn
    logits, states = compute(model, parts, drafts)
    rows = split(logits, [part.wanted for part in parts])
    hiddens = split(states, [len(part.token_ids) for part in parts])
    for i, guess, row, hidden in zip(some, guesses, rows, hiddens):
        sequence, cache, speculator = runs[i]
        right = 0
        if cache.length >= len(sequence.ids):  # else more pieces of the prompt are to come
            try:
                drawn[i] = draw(sequence, row, guess)
            except InputError as error:
                drawn[i] = error
                continue
            right = sum(token == guessed for token, guessed in zip(drawn[i], guess))
            cache.truncate(cache.length - len(guess) + right)
            if speculator:
                speculator.learn(len(guess), right)
        if speculator and speculator.mtp:
            speculator.mtp.follow(cache, hidden[:len(hidden) - len(guess) + right])
    return drawn


def split(rows: np.ndarray, counts: list[int]) -> list[np.ndarray]:
    """The first rows of an array, as many as the first count says, then the next ones, and so on."""
    return [rows[end - n:end] for n, end in zip(counts, accumulate(counts))]


def draw(sequence: Sequence, logits: np.ndarray, guess: list[int]) -> list[int]:
    """Draws from logits [1 + guesses, vocab_size], one token after the other while the guess is right."""
    drawn = list[int]()
    for i, row in enumerate(logits):
        drawn += (tokens := sequence.feed(row))
        if sequence.finish_reason or tokens != guess[i:i + 1]:
            break
    return drawn
