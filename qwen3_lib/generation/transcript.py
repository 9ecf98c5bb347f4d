"""The text of a sound of any length: cut where it is quiet, heard part after part in the same memory."""
from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from qwen3 import Model, checked_number
from qwen3_asr import RATE, Hearing, language_named, sounds_of
from qwen3_lib.generation.aligner import Word, check_aligner, timed_words
from qwen3_lib.generation.processors import StopLoops
from qwen3_lib.io.cores import in_threads
from qwen3_lib.io.sounds import open_sound
from tokenizer_utils import AnswerReader, InputError

LONGEST_PART = 180  # seconds
AROUND = 5  # seconds before and after the usual place of a cut, where the quietest place is looked for
UNSPACED = ("Chinese", "Cantonese", "Japanese", "Thai")  # written without spaces


def usual_part(context: int, most: float = LONGEST_PART) -> float:
    """Seconds of a part that has no length of its own: `most`, or as many as a context of so many tokens can hold."""
    # A second has 13 tokens in the prompt, 13 in the answer, and some for the words around them.
    return max(1, min(most, context // 30))


def checked_part(name: str, seconds: float, words: bool) -> float:
    """The seconds of a part. Raises InputError unless the model, and with `words` an aligner, can take as many."""
    return checked_number(name, seconds, 1, LONGEST_PART if words else 1200)


def quietest(samples: np.ndarray, place: int, around: int) -> int:
    """The place of the smallest sample in the quietest 100 ms within `around` samples of `place`."""
    start, n = place - around, RATE // 10
    levels = np.abs(samples[start:place + around])
    sums = np.cumsum(np.concatenate([[0.0], levels]))
    first = int(np.argmin(sums[n:] - sums[:-n]))
    return start + first + int(np.argmin(levels[first:first + n]))


def parts_in(blocks: Iterable[np.ndarray], longest: float = LONGEST_PART, start: int = 0) -> Iterator[np.ndarray]:
    """A sound in blocks -> from the sample `start` on, its parts of about `longest` seconds, which join without a gap.

    Raises InputError for a sound with no samples, and for samples that aren't finite.
    """
    held, most, skipped = np.empty(0, np.float32), int(longest * RATE), 0
    around = min(AROUND * RATE, most // 2)
    for block in itertools.chain(blocks, [None]):
        if block is not None and not np.isfinite(block).all():
            raise InputError("the sound has samples that are no finite numbers")
        if block is not None:
            held = np.concatenate([held, block[start - skipped:]])
            skipped = min(skipped + len(block), start)
        while len(held) > most + around * (block is not None):
            cut = quietest(held, most, around)
            yield held[:cut]
            held = held[cut:]
    if len(held):
        yield held
    elif not start:
        raise InputError("the sound has no samples")


@dataclass(frozen=True)
class Part:
    """The text of a sound from `start` to `end` in seconds."""
    start: float
    end: float
    text: str
    language: str  # "" if there is no speech
    finish_reason: str  # "stop"; "length": cut off; "loop": it went round in circles
    n_tokens: int
    words: tuple[Word, ...] = ()


def gap(before: str, text: str, language: str) -> str:
    """What stands between the text so far and a part's text: a space, if there are both and the language has spaces."""
    return " " * bool(before and text and language not in UNSPACED)


def joined_text(parts: Iterable[Part]) -> str:
    """The text of parts, with a space between them where the language has spaces."""
    text = ""
    for part in parts:
        text += gap(text, part.text, part.language) + part.text
    return text


def languages(parts: Iterable[Part]) -> str:
    """The language of parts, "" if there is no speech; where they differ, one after the other: "English,French"."""
    return ",".join(name for name, _ in itertools.groupby(part.language for part in parts if part.language))


class Transcript(Iterator[str]):
    """The text of a sound as it comes: iterate over its pieces, or print it. See qwen3_asr.transcribe.

    `text`, `language`, `seconds` and `parts` are those of the whole sound: they hear the rest first.
    """

    def __init__(self, model: Model, sound: Any, language: str | None = None, context: str | None = None,
                 longest_part: float | None = None, words: Model | Literal[False] = False, heard: Iterable[Part] = (),
                 **options: Any):
        """`heard`: the first parts, as an earlier Transcript of the same sound has heard them."""
        self.model, self.sounds, self.given = model, sounds_of(model), language_named(language)
        length = usual_part(model.config.context_length) if longest_part is None else longest_part
        self.longest_part = checked_part("longest_part", length, bool(words))
        if words is True:
            raise InputError("words must be the model of a forced aligner, such as Qwen/Qwen3-ForcedAligner-0.6B")
        if words:
            check_aligner(words, self.given)
        self.words = words
        self.options, self.recording = options | {"context": context or ""}, open_sound(sound)
        self.heard, self.tower_seconds, self.events = [*heard], 0.0, self.hear()
        self.so_far = joined_text(self.heard)

    def hear(self) -> Iterator[str | Part]:
        """The pieces of a part's text, and then the part, of one after the other."""
        cache = self.model.engine.new_cache(self.model.config)
        start = round(self.heard[-1].end * RATE) if self.heard else 0
        for samples in parts_in(self.recording.blocks, self.longest_part, start):
            began = time.perf_counter()
            sound = self.sounds.hear(samples, in_threads)
            self.tower_seconds += time.perf_counter() - began
            hearing = Hearing(self.model, sound, self.given, cache=cache,
                              processors=[StopLoops(AnswerReader(), None)], **self.options)
            for piece in hearing:
                if piece == hearing.text:  # the first one
                    piece = gap(self.so_far, piece, hearing.language) + piece
                self.so_far += piece
                yield piece
            end, words = start + len(samples), tuple[Word, ...]()
            if self.words:
                words = timed_words(self.words, samples, hearing.text, hearing.language, start / RATE)
            self.heard.append(Part(start / RATE, end / RATE, hearing.text, hearing.language,
                                   hearing.finish_reason or "", len(hearing.token_ids), words))
            yield self.heard[-1]
            start = end

    def __next__(self) -> str:
        return next(event for event in self.events if isinstance(event, str))

    def finish(self) -> Self:
        """Hears the rest -> itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Ends it where it is."""
        self.events = iter(())

    @property
    def parts(self) -> list[Part]:
        return self.finish().heard

    @property
    def text(self) -> str:
        return self.finish().so_far

    @property
    def language(self) -> str:
        return languages(self.parts)

    @property
    def seconds(self) -> float:
        return max((part.end for part in self.parts), default=0.0)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Transcript, so far {self.so_far!r}: iterate over it, print it, or call its finish()>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A notebook and IPython show the text."""
        printer.text(self.text)
