"""Answers as they grow: thoughts in prompts, stop texts."""
from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenizer_utils import AnswerReader, Tokenizer


def last_turn(tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray) -> str:
    """The text of the prompt [n] after its last <|im_start|>; all of it without one."""
    starts = np.flatnonzero(np.asarray(prompt) == tokenizer.token_to_id("<|im_start|>"))
    return tokenizer.decode(prompt[starts[-1] + 1 if len(starts) else 0:])


def inside_thought(turn: str) -> bool:
    """True if a prompt with this last turn ends within <think>, so that the answer begins with a thought's rest."""
    return turn.rfind("<think>") > turn.rfind("</think>")


def held_back(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of a text that could begin one of the marks, which are sorted."""
    for start in range(max(len(text) - max(map(len, marks), default=0), 0), len(text)):
        at = bisect.bisect_left(marks, end := text[start:])
        if at < len(marks) and marks[at].startswith(end):
            return len(end)
    return 0


class StoppingReader(AnswerReader):
    """An AnswerReader that ends at the first of some texts, which is left out. They don't apply to a thought."""

    def __init__(self, *args: Any, stop: Sequence[str] = ()):
        super().__init__(*args)
        self.stop, self.stopped = sorted(stop), ""  # stopped: the text that has ended it

    def push(self, text: str, token: int | None = None, ended: bool = False) -> list[tuple[str, str]]:
        return super().push("" if self.stopped else text, token, ended)

    def step(self, ended: bool) -> bool:
        if self.state in ("start", "thinking"):
            return super().step(ended)
        if ends := [(at + len(text), at, text) for text in self.stop if (at := self.held.find(text)) >= 0]:
            _, at, self.stopped = min(ends)  # the first complete one, of two the longer
            self.held = self.held[:at]
        ended = ended or bool(self.stopped)
        certain = len(self.held) - (0 if ended else held_back(self.held, self.stop))
        self.held, rest = self.held[:certain], self.held[certain:]
        again = bool(self.held) and super().step(ended)
        self.held += rest
        return again
