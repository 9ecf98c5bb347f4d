"""Texts that are spoken at the same time: their talkers and code predictors share passes, frame by frame."""
from __future__ import annotations

from typing import Any

import numpy as np

from qwen3_tts import Speech, Talk, decode, next_frames
from tokenizer_utils import InputError


class Singer:
    """A Speech, which is taken further by `sing` alone. `n_frames`: so far."""

    def __init__(self, speech: Speech):
        self.speech, self.talks, self.n_frames = speech, speech.talks(), 0
        self.talk: Talk | None = None
        self.state = dict[str, Any]()  # the codec's

    def turn(self) -> Talk | None:
        """The Talk that goes on; None at the end of the text. Raises InputError."""
        if self.talk is None or self.talk.finish_reason is not None:
            self.talk, self.state = next(self.talks, None), {}
        return self.talk


Outcome = np.ndarray | InputError | None  # samples [n], which may be 0; what is wrong; None: it has ended


def sing(singers: list[Singer]) -> list[Outcome]:
    """Takes each one a frame further, all of one model."""
    outcomes, going = dict[Singer, Outcome](), list[tuple[Singer, Talk]]()
    for singer in singers:
        try:
            outcomes[singer] = talk = singer.turn()  # type: ignore[assignment]
            if talk is not None:
                going.append((singer, talk))
        except InputError as error:
            outcomes[singer] = error
    if going:
        try:
            frames = next_frames(going[0][0].speech.model, [talk for _, talk in going])
        except InputError as error:  # weights that aren't finite
            return [error] * len(singers)
        for (singer, _), codes in zip(going, frames):
            outcomes[singer] = np.empty(0, np.float32) if codes is None else decode(
                singer.speech.codec, codes[None], singer.state)
            singer.n_frames += codes is not None
    return [outcomes[singer] for singer in singers]
