"""Logits processors: each changes how a sequence draws its tokens, or notes what was drawn."""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qwen3 import checked_number
from qwen3_lib.generation.marks import Marks
from tokenizer_utils import InputError, Tokenizer, brief


class Processor:
    """What a Sequence asks for each token, in the order of its processors."""

    def before(self, logits: np.ndarray) -> np.ndarray:
        """The logits [vocab_size] to draw from."""
        return logits

    def forced(self) -> int | None:
        """The next token, if it isn't to be drawn; the first processor that has one decides."""
        return None

    def after(self, token: int | None) -> str | None:
        """Takes note of the token that was drawn, None at the end -> why the answer ends here, if it does."""
        return None


class ThinkBudget(Processor):
    """Closes a thought after `budget` tokens: the next tokens are then those of CLOSING."""
    CLOSING = "\n</think>\n\n"

    def __init__(self, tokenizer: Tokenizer, marks: Marks, budget: float):
        if marks.opening is None or marks.closing is None:
            raise InputError("think_budget needs a model whose tokenizer has the tokens <think> and </think>")
        self.marks, self.left = marks, budget
        self.ending = tokenizer.encode(self.CLOSING, add_special_tokens=False)
        self.next: list[int] = []  # the last one first

    def forced(self) -> int | None:
        if self.marks.inside and self.left <= 0 and not self.next:
            self.next = self.ending[::-1]
        self.marks.is_closed = bool(self.next)
        return self.next.pop() if self.next else None

    def after(self, token: int | None) -> str | None:
        self.left -= self.marks.was_inside and token != self.marks.closing
        return None


class StopLoops(Processor):
    """Closes a thought that runs in circles, and ends an answer that does so, with the reason "loop".

    A circle: the last tokens are the same text of at most LONGEST tokens, four times in a row, and at least LEAST
    tokens; at least MOST if they are of fewer than FEW kinds, as rows of dashes or zeros are. It is not enough that
    the same SIZE tokens come for the fourth time: they do so in 18 % of 10,000 cuts from programs and docs.
    """
    SIZE, LEAST, MOST, FEW = 24, 512, 2048, 6
    LONGEST = MOST // 4

    def __init__(self, marks: Marks, budget: ThinkBudget | None):
        self.marks, self.budget = marks, budget  # the budget closes a thought; None: the model has no thoughts
        self.text = list[int]()
        self.places = dict[int, int]()  # hash of SIZE tokens -> the length of the text up to their last occurrence
        self.distance = self.equal = 0  # the last `equal` tokens stand `distance` tokens before, too

    def after(self, token: int | None) -> str | None:
        if token is None or not self.runs_in_circles(token):
            return None
        if self.marks.inside and self.budget:
            self.budget.left = 0
            return None
        return "loop"

    def runs_in_circles(self, token: int) -> bool:
        """Takes note of the next token: 1 µs, however long the text is."""
        self.text.append(token)
        text, n = self.text, len(self.text)
        before = self.places.get(latest := hash(tuple(text[-self.SIZE:])), 0)
        self.places[latest] = n
        if self.distance and token == text[-1 - self.distance]:
            self.equal += 1
        elif before and n - before <= self.LONGEST:
            self.distance, self.equal = n - before, self.SIZE
        else:
            self.distance = self.equal = 0
        circle = self.distance + self.equal
        if circle < max(self.LEAST, 4 * self.distance):
            return False
        return circle >= self.MOST or len({*text[-self.distance:]}) >= self.FEW


class Bias(Processor):
    """Adds a number to the logits of some tokens."""

    def __init__(self, bias: dict[Any, float], n: int):
        if not isinstance(bias, dict) or not all(str(i).isdecimal() and len(str(i)) < 10 and int(i) < n for i in bias):
            raise InputError(f"logit_bias must be an object of token id, below {n}, and number, not "
                             f"{brief(repr(bias), 80)}")
        self.ids = np.array([int(i) for i in bias], np.int64)  # JSON has them as texts
        self.bias = np.array([checked_number("logit_bias", value, -100, 100) for value in bias.values()], np.float32)

    def before(self, logits: np.ndarray) -> np.ndarray:
        biased = logits.copy()
        biased[self.ids] += self.bias
        return biased


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


class Logprobs(Processor):
    """Notes the log-probability of each token and of the n most likely ones, from the model's own logits."""

    def __init__(self, tokenizer: Tokenizer, n: int):
        self.tokenizer, self.n, self.found = tokenizer, n, list[TokenLogprob]()

    def before(self, logits: np.ndarray) -> np.ndarray:
        self.logits = logits
        return logits

    def after(self, token: int | None) -> str | None:
        if token is not None:
            x = log_softmax(self.logits)
            best: Any = np.argsort(-x, kind="stable")[:self.n] if self.n else []
            top = [(int(i), float(x[i])) for i in best]
            self.found.append(TokenLogprob(token, float(x[token]), top, self.tokenizer.decode([token])))
        return None
