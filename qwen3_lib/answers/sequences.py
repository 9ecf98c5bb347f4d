"""Sequences around a sequence: each changes how tokens are drawn, or notes what was drawn."""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qwen3 import Sequence, checked_number
from qwen3_lib.answers.answer import inside_thought
from tokenizer_utils import InputError, brief


class Wrapped:
    """A sequence around another one: all that it doesn't define is the inner one's."""

    def __init__(self, sequence: Any):
        self.sequence = sequence

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sequence, name)


class ThinkBudget(Wrapped):
    """Closes a thought after `budget` tokens: the next tokens are then those of CLOSING."""
    CLOSING = "\n</think>\n\n"

    def __init__(self, sequence: Sequence, budget: int):
        super().__init__(sequence)
        tokenizer = sequence.model.tokenizer
        self.opening, self.closing = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
        if self.opening is None or self.closing is None:
            raise InputError("think_budget needs a model whose tokenizer has the tokens <think> and </think>")
        self.inside, self.left = inside_thought(tokenizer, sequence.prompt), budget
        self.ending = tokenizer.encode(self.CLOSING, add_special_tokens=False)
        self.forced: list[int] = []  # tokens still to come, the next one last

    def feed(self, logits: np.ndarray, token: int | None = None) -> list[int]:
        if self.inside and self.left <= 0:
            self.inside, self.forced = False, self.ending[::-1]
        if self.forced:
            return self.sequence.feed(logits, self.forced.pop())
        tokens = self.sequence.feed(logits, token)
        for drawn in tokens:
            self.left -= self.inside and drawn != self.closing
            self.inside = drawn == self.opening or self.inside and drawn != self.closing
        return tokens


class Biased(Wrapped):
    """Adds a number to the logits of some tokens."""

    def __init__(self, sequence: Sequence, bias: dict[Any, float]):
        super().__init__(sequence)
        n = sequence.model.config.vocab_size
        if not isinstance(bias, dict) or not all(str(i).isdecimal() and len(str(i)) < 10 and int(i) < n for i in bias):
            raise InputError(f"logit_bias must be an object of token id, below {n}, and number, not "
                             f"{brief(repr(bias), 80)}")
        self.ids = np.array([int(i) for i in bias], np.int64)  # JSON has them as texts
        self.bias = np.array([checked_number("logit_bias", value, -100, 100) for value in bias.values()], np.float32)

    def feed(self, logits: np.ndarray, token: int | None = None) -> list[int]:
        biased = logits.copy()
        biased[self.ids] += self.bias
        return self.sequence.feed(biased, token)


class TokenLogprob(NamedTuple):
    """The log-probability of a token (natural logarithm), and the most likely tokens in its place."""
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # token ids and their logprobs, the most likely first
    text: str  # of the token


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logits [..., vocab_size] -> natural logarithms of the probabilities, the same shape."""
    x = logits - logits.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


class Logprobs(Wrapped):
    """Notes the log-probability of each token and of the n most likely ones, before temperature and penalties."""

    def __init__(self, sequence: Any, n: int):
        super().__init__(sequence)
        self.n, self.logprobs = n, list[TokenLogprob]()

    def feed(self, logits: np.ndarray, token: int | None = None) -> list[int]:
        tokens, decode = self.sequence.feed(logits, token), self.sequence.model.tokenizer.decode
        for drawn in tokens:
            x = log_softmax(logits)
            best: Any = np.argsort(-x, kind="stable")[:self.n] if self.n else []
            top = [(int(i), float(x[i])) for i in best]
            self.logprobs.append(TokenLogprob(drawn, float(x[drawn]), top, decode([drawn])))
        return tokens
