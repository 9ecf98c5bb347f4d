"""The text of a sound that is still being recorded: each step hears the part so far again, and most of it is known.

What the tower has made of the part's finished windows is kept (see Sounds), and so are their keys and values. The
answer begins with the tokens that are settled, as in Qwen's own package: those of the step before but the last five.
"""
from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from qwen3 import Model, checked_number
from qwen3_asr import RATE, SpokenText
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.transcript import AROUND, Part, SpeechRequest, gap, quietest, usual_part
from qwen3_lib.io.cores import in_threads
from qwen3_lib.io.sounds import STEP, Recording
from tokenizer_utils import InputError

LIVE_PART = 20  # seconds
UNSETTLED, UNSETTLED_STEPS = 5, 2  # the last tokens of an answer, and a part's first steps, which settle nothing
PAUSE = 10  # times as quiet as the part: where a part may end early


class Dictation(SpeechRequest):
    """The text of a recording as it comes, in blocks of STEP samples: iterate over its steps.

    Each step gives the text that may still change; `so_far` is the text before it, which never changes again.
    """

    def __init__(self, model: Model, sound: Recording, language: str | None = None, context: str | None = None,
                 longest_part: float | None = None, options: AnswerOptions = AnswerOptions()):
        """`longest_part`: in seconds, from 4 on. Raises InputError."""
        length = usual_part(model.config.context_length, LIVE_PART) if longest_part is None else longest_part
        super().__init__(model, sound, language, context, checked_number("longest_part", length, 4, 1200), options,
                         each=in_threads)
        self.step_seconds = list[float]()  # how long each step took

    def cut(self) -> Iterator[tuple[np.ndarray, bool]]:
        """The part so far, after each block, and whether it ends there.

        A part ends in its last block, so that no settled text belongs to the next part: where the block is quietest, if
        that is a pause and the part is long enough, or if the next block would make the part too long.
        """
        held, most = np.empty(0, np.float32), int(self.longest_part * RATE)
        around = min(AROUND * RATE, most // 2)
        for block in self.open().blocks:
            self.began, held = time.perf_counter(), np.concatenate([held, block])
            cut, n = 0, len(held)
            if len(block) == STEP and n >= most - around:
                cut, level = quietest(held, n - STEP // 2, STEP // 2)
                cut *= level <= np.abs(held).mean() / PAUSE or n + STEP > most + around
            yield held[:cut or n], cut > 0
            held = held[cut:]
        if len(held):
            yield held, True
        elif not self.heard:
            raise InputError("the sound has no samples")

    def __iter__(self) -> Iterator[str]:
        cache, decode = self.model.engine.new_cache(self.model.config), self.model.tokenizer.decode
        n_steps, before = 0, ""  # of a part; the text before it
        for step in self.steps():
            if isinstance(step, Part):
                self.so_far = before = before + gap(before, step.text, step.language) + step.text
                n_steps, self.settled = 0, []
                yield ""
            elif step is not None:
                self.answer = Completion(self.model, step[0], cache, options=step[1]).finish()
                ids, n_steps = self.settled + self.answer.token_ids, n_steps + 1
                self.n_tokens, n = len(ids), max(len(ids) - UNSETTLED, len(self.settled))
                self.spoken.push(decode(ids, True), True)
                if n_steps >= UNSETTLED_STEPS and self.answer.ended == "stop":
                    while n > len(self.settled) and decode(ids[:n]).endswith("\ufffd"):  # within a character
                        n -= 1
                    self.settled = ids[:n]
                text = SpokenText(self.given).push(decode(self.settled, True))
                shown = gap(before, self.spoken.text, self.spoken.language) + self.spoken.text
                self.so_far = before + shown[:len(text) and len(shown) - len(self.spoken.text) + len(text)]
                self.step_seconds.append(time.perf_counter() - self.began)
                yield shown[len(self.so_far) - len(before):]
