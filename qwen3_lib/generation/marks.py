"""Tells thought, content and calls apart while an answer grows."""
from __future__ import annotations

import bisect
from collections.abc import Sequence

FOLLOWING = {"start": {"<think>": "thinking", "<tool_call>": "call"}, "thinking": {"</think>": "content"},
             "content": {"<tool_call>": "call"}, "call": {}}  # state -> tag -> next state
TAGS = {state: sorted({"<tool_call>", *FOLLOWING[state]}) for state in FOLLOWING if state != "call"}


def held_back(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of a text that could begin one of the marks, which are sorted."""
    for start in range(max(len(text) - max(map(len, marks), default=0), 0), len(text)):
        at = bisect.bisect_left(marks, end := text[start:])
        if at < len(marks) and marks[at].startswith(end):
            return len(end)
    return 0


class Marks:
    """Takes the text of an answer piece by piece; `pairs` are the pieces that are certain, each with its kind.

    The kinds: "thinking", with its tags; "content"; and "call", all text from <tool_call> on. A thought opens once. As
    in parse_answer, a call ends a thought that has no </think>, which is known only at the end of the answer.
    A text of `stop` ends the answer and is left out; in a thought at the beginning it has no effect.
    `inside` counts tokens, not text: whether the latest token stands between `opening`, the id of <think>, and
    `closing`. There a thought may open again.
    """

    def __init__(self, think_open_in_prompt: bool, stop: tuple[str, ...] = (), opening: int | None = None,
                 closing: int | None = None):
        self.state = "thinking" if think_open_in_prompt else "start"
        self.pairs, self.held = list[tuple[str, str]](), ""
        self.stop, self.stops, self.stopped = sorted(stop), False, False  # stops: whether the stop texts apply now
        self.opening, self.closing = opening, closing
        self.inside = self.was_inside = think_open_in_prompt  # was_inside: before the latest token
        self.is_closed = False  # whether a ThinkBudget has chosen the latest token

    def push(self, piece: str, ended: bool = False, token: int | None = None) -> None:
        """Takes the text of the next token, and its id if there is one; `ended`: no more will come."""
        self.was_inside = self.inside
        self.inside = token == self.opening or self.inside and token != self.closing
        self.held += "" if self.stopped else piece
        while self.held and self.step(ended):
            pass

    def step(self, ended: bool) -> bool:
        """Moves what is certain from `held` to `pairs`, up to the next tag -> whether there was a tag."""
        if self.state == "start" and not self.stops:
            start = self.held.lstrip()
            if not ended and "<think>".startswith(start) and start != "<think>":
                return False
            self.stops = not start.startswith("<think>")
        stop = self.stop if self.stops else []
        if ends := [(at + len(text), at) for text in stop if (at := self.held.find(text)) >= 0]:
            self.held, self.stopped = self.held[:min(ends)[1]], True  # the first complete one, of two the longer
        ended = ended or self.stopped
        text = self.held if ended else self.held[:len(self.held) - held_back(self.held, stop)]
        following = FOLLOWING[self.state]
        if self.state == "thinking" and "</think>" not in text:
            following = {"<tool_call>": "call"} if ended else {}
            text = text if ended else text.partition("<tool_call>")[0]
        kind = "content" if self.state == "start" else self.state
        if found := [(text.index(tag), tag) for tag in following if tag in text]:
            at, tag = min(found)
            at += len(tag) if tag == "</think>" else 0  # this tag belongs to the thought
            self.state, self.stops = following[tag], self.stops or tag == "</think>"
        else:
            at = len(text) - (0 if ended else held_back(text, TAGS.get(self.state, ())))
        if at:
            self.pairs.append((kind, self.held[:at]))
        self.held = self.held[at:]
        return bool(found)
