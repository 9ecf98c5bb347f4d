"""Texts that are spoken at the same time: their talkers and code predictors share passes, frame by frame."""
from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from qwen3_tts import Speech, Talk, heard, next_frames
from tokenizer_utils import InputError


class Singer:
    """A Speech, which is taken further by `sing` alone. `n_frames`: so far."""

    def __init__(self, speech: Speech):
        self.speech, self.talks, self.n_frames = speech, speech.talks(), 0
        self.talk: Talk | None = None

    def turn(self) -> Talk | None:
        """The Talk that goes on; None at the end of the text. Raises InputError."""
        if self.talk is None or self.talk.finish_reason is not None:
            self.talk = next(self.talks, None)
        return self.talk


AT_ONCE = 8  # texts that share a pass
Outcome = np.ndarray | InputError | None  # samples [n], which may be 0; what is wrong; None: it has ended


def sing(singers: list[Singer]) -> list[Outcome]:
    """Takes each one a frame further, all of one model."""
    outcomes, going = dict[Singer, Outcome](), list[tuple[Singer, Talk]]()
    for singer in singers:
        try:
            if (talk := singer.turn()) is None:
                outcomes[singer] = None
            else:
                going.append((singer, talk))
        except InputError as error:
            outcomes[singer] = error
    if going:
        try:
            next_frames(going[0][0].speech.model, [talk for _, talk in going])
        except InputError as error:  # weights that aren't finite
            return [error] * len(singers)
        for singer, talk in going:
            try:
                outcomes[singer] = heard(singer.speech.codec, talk)
            except InputError as error:
                outcomes[singer] = error
            singer.n_frames += talk.finish_reason != "stop"  # the end is drawn in place of a frame
    return [outcomes[singer] for singer in singers]


class SpokenRequest:
    """A text of a Choir, in the place of a request of a Batch."""
    salt, tools = "", None

    def __init__(self, speech: Speech):
        self.speech = speech

    @property
    def answers(self) -> Iterator[tuple[Speech, None]]:
        return iter([(self.speech, None)])


class Spoken(Singer):
    """A text of a Choir: `samples` [n], once it is spoken."""

    def __init__(self, speech: Speech):
        super().__init__(speech)
        self.pieces = [np.empty(0, np.float32)]

    @property
    def samples(self) -> np.ndarray:
        return np.concatenate(self.pieces)


class Choir:
    """Speaks texts together, as a Batch answers requests: AT_ONCE at a time."""

    def __init__(self) -> None:
        self.singers = dict[Hashable, Spoken]()

    @property
    def free(self) -> int:
        return AT_ONCE - len(self.singers)

    @property
    def idle(self) -> bool:
        return not self.singers

    def add(self, key: Hashable, speech: Speech, *_: Any, **given: Any) -> None:
        self.singers[key] = Spoken(speech)

    def step(self) -> list[tuple[Hashable, Spoken | InputError]]:
        """Takes each text a frame further -> those that have ended, and what is wrong with others."""
        ended = list[tuple[Hashable, Spoken | InputError]]()
        for (key, singer), outcome in zip([*self.singers.items()], sing([*self.singers.values()])):
            if isinstance(outcome, np.ndarray):
                singer.pieces.append(outcome)
            else:
                ended.append((key, singer if outcome is None else outcome))
                del self.singers[key]
        return ended
