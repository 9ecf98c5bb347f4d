"""Logits processors: each changes how a sequence draws its tokens, or records them."""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qwen3 import checked_number
from tokenizer_utils import AnswerReader, InputError, Tokenizer, brief


class Processor:
    """What a Sequence asks for each token, in the order of its processors."""

    def before(self, logits: np.ndarray) -> np.ndarray:
        """The logits [vocab_size] to draw from."""
        return logits

    def forced(self) -> int | None:
        """The next token, if it isn't to be drawn; the first processor that has one decides."""
        return None

    def after(self, token: int | None, forces: Processor | None = None) -> str | None:
        """Takes note of the token that was drawn, or that the processor `forces` has forced; None at the end -> why the
        answer ends here, if it does."""
        return None


class ThinkBudget(Processor):
    """Closes a thought after `budget` tokens: CLOSING is then forced, token by token."""
    CLOSING = "\n</think>\n\n"

    def __init__(self, tokenizer: Tokenizer, reader: AnswerReader, budget: float):
        if None in reader.think_ids:
            raise InputError("think_budget needs a model whose tokenizer has the tokens <think> and </think>")
        self.reader, self.left = reader, budget
        self.ending = tokenizer.encode(self.CLOSING, add_special_tokens=False)
        self.next: list[int] = []  # the last one first

    def end_thought(self) -> None:
        self.left = 0

    def forced(self) -> int | None:
        if self.reader.inside and self.left <= 0 and not self.next:
            self.next = self.ending[::-1]
        return self.next.pop() if self.next else None

    def after(self, token: int | None, forces: Processor | None = None) -> str | None:
        self.left -= self.reader.was_inside and token != self.reader.think_ids[1]
        return None


class StopLoops(Processor):
    """Closes a thought that runs in circles, and ends an answer that does so, with the reason "loop".

    A text runs in circles when 90 % of the last LEAST tokens end a run of SIZE tokens that comes for the fourth time
    within WINDOW tokens, its occurrences side by side. Some such tokens are common: 18 % of 10,000 cuts from programs
    and their docs have them, but never more than 79 % (Qwen's tokens). Only tables of few kinds of tokens have 100 %,
    those of zeros and ones for example: fewer than FEW kinds must go round without any change for WINDOW tokens.
    """
    SIZE, LEAST, WINDOW, FEW = 24, 1024, 2048, 12

    def __init__(self, reader: AnswerReader, budget: ThinkBudget | None):
        self.reader, self.budget = reader, budget  # the budget closes a thought; None: the model has no thoughts
        self.begin()

    def begin(self) -> None:
        self.text, self.repeats = list[int](), [0]  # repeats: how many tokens up to each one end a run as above
        self.places = dict[int, tuple[int, ...]]()  # hash of a run -> the ends of its last three occurrences

    def after(self, token: int | None, forces: Processor | None = None) -> str | None:
        if token is None or not self.runs_in_circles(token):
            return None
        if self.reader.inside and self.budget:
            self.budget.end_thought()
            self.begin()
            return None
        return "loop"

    def runs_in_circles(self, token: int) -> bool:
        """Takes note of the next token: 2 µs, however long the text is."""
        self.text.append(token)
        n, run = len(self.text), hash(tuple(self.text[-self.SIZE:]))
        ends = self.places.get(run, ())
        self.repeats.append(self.repeats[-1] + (len(ends) == 3 and ends[0] > n - self.WINDOW))
        if not ends or n - ends[-1] >= self.SIZE:
            self.places[run] = *ends[-2:], n
        if n < self.LEAST or self.repeats[n] - self.repeats[n - self.LEAST] < 0.9 * self.LEAST:
            return False
        kinds = {self.text[i] for i in range(n - self.LEAST, n) if self.repeats[i] < self.repeats[i + 1]}
        last, distance = self.text[-self.WINDOW:], n - ends[-1] if ends else n
        unchanged = distance <= self.WINDOW // 4 and last[distance:] == last[:-distance]
        return len(kinds) >= self.FEW or n >= self.WINDOW and unchanged


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


def most_likely(x: np.ndarray, n: int) -> np.ndarray:
    """The indices of the n largest of x [n_all], the largest first, of equal ones the lower index first."""
    n = min(n, len(x))
    at_least = np.flatnonzero(x >= np.partition(x, len(x) - n)[len(x) - n]) if n else np.empty(0, int)  # 1/8 of a sort
    return at_least[np.argsort(-x[at_least], kind="stable")[:n]]


class Logprobs(Processor):
    """Notes the log-probability of each token and of the n most likely ones, from the model's own logits."""

    def __init__(self, tokenizer: Tokenizer, n: int):
        self.tokenizer, self.n, self.found = tokenizer, n, list[TokenLogprob]()

    def before(self, logits: np.ndarray) -> np.ndarray:
        self.logits = logits
        return logits

    def after(self, token: int | None, forces: Processor | None = None) -> str | None:
        if token is not None:
            x = log_softmax(self.logits)
            best: Any = most_likely(x, self.n)
            top = [(int(i), float(x[i])) for i in best]
            self.found.append(TokenLogprob(token, float(x[token]), top, self.tokenizer.decode([token])))
        return None
