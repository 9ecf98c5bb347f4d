"""The text of a sound of any length: cut where it is quiet, heard part after part in the same memory."""
from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, Unpack

import numpy as np

from qwen3 import Model, checked_number
from qwen3_asr import (RATE, SpokenText, language_named, sounds_of, speech_prompt, usual_limit,
                       usual_sampling)
from qwen3_lib.generation.aligner import Word, check_aligner, timed_words
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.options import AnswerOptions, GivenOptions, options_of
from qwen3_lib.io.cores import in_threads, in_turns
from qwen3_lib.io.sounds import Recording, open_sound
from tokenizer_utils import InputError

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


def quietest(samples: np.ndarray, place: int, around: int) -> tuple[int, float]:
    """(place of the smallest sample, mean size) of the quietest 100 ms within `around` samples of `place`."""
    start, n = place - around, RATE // 10
    levels = np.abs(samples[start:place + around])
    sums = np.cumsum(np.concatenate([[0.0], levels]))
    first = int(np.argmin(totals := sums[n:] - sums[:-n]))
    return start + first + int(np.argmin(levels[first:first + n])), float(totals[first]) / n


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
            cut, _ = quietest(held, most, around)
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


class SpeechRequest:
    """A sound that is written down part after part, each by an answer of its own: the command, the server and batch
    files are loops over `steps`.

    `heard`: the parts so far; `so_far`: all of the text so far.
    """
    salt, tools = "", None

    def __init__(self, model: Model, sound: Any, language: str | None, context: str | None, longest_part: float,
                 options: AnswerOptions, words: Model | None = None, heard: Iterable[Part] = (), each: Any = in_turns):
        """`longest_part`: in seconds; `words`: a forced aligner; `heard`: the first parts, as an earlier request of the
        same sound has heard them; `each`: see Sounds.hear. Raises InputError."""
        self.model, self.sounds, self.given = model, sounds_of(model), language_named(language)
        if words is not None:
            check_aligner(words, self.given)
        self.sound, self.context, self.longest_part, self.words, self.each = sound, context, longest_part, words, each
        self.options = replace(options.over(usual_sampling(model)), stop_loops=options.stop_loops is not False)
        self.heard, self.tower_seconds, self.settled = [*heard], 0.0, list[int]()  # settled: tokens of a part's answer
        self.so_far, self.end = joined_text(self.heard), round(self.heard[-1].end * RATE) if self.heard else 0

    def open(self) -> Recording:
        return open_sound(self.sound)

    def cut(self) -> Iterator[tuple[np.ndarray, bool]]:
        """The samples of each part, and True: the part is whole."""
        return ((samples, True) for samples in parts_in(self.open().blocks, self.longest_part, self.end))

    def steps(self) -> Generator[tuple[list[int], AnswerOptions] | Part | None]:
        """None after each window that the tower has heard, so that others can be served in between; the prompt and
        options of a part's answer, which `read` takes; then the part."""
        for samples, whole in self.cut():
            began, start = time.perf_counter(), self.end / RATE
            for sound in self.sounds.hear_in_pieces(samples, self.each):
                if sound is None:
                    yield None
            self.tower_seconds += time.perf_counter() - began
            self.spoken = spoken = SpokenText(self.given)
            limit = (self.options.max_new_tokens or usual_limit(sound)) - len(self.settled)
            yield ([*speech_prompt(self.model, sound, self.given, self.context or "").tolist(), *self.settled],
                   replace(self.options, max_new_tokens=max(1, limit)))
            if not whole:
                continue
            self.end += len(samples)
            words = () if self.words is None else timed_words(self.words, samples, spoken.text, spoken.language, start,
                                                              self.each)
            self.heard.append(Part(start, self.end / RATE, spoken.text, spoken.language, str(self.answer.ended),
                                   self.n_tokens, words))
            yield self.heard[-1]

    def read(self, piece: str, ended: Completion | None = None) -> str:
        """Takes the next piece of a part's answer -> the next piece of the text, with the space between two parts.

        `ended`: the answer, with its last piece.
        """
        new = self.spoken.push(piece, ended is not None)
        if new and new == self.spoken.text:  # the first one
            new = gap(self.so_far, new, self.spoken.language) + new
        self.so_far += new
        if ended is not None:
            self.answer, self.n_tokens = ended, len(ended.token_ids)
        return new

    @property
    def answers(self) -> Iterator[tuple[list[int], AnswerOptions]]:
        """The prompts and options among the steps, one after the other."""
        return (step for step in self.steps() if isinstance(step, tuple))


class Transcript(SpeechRequest, Iterator[str]):
    """The text of a sound as it comes: iterate over its pieces, or print it. See qwen3_asr.transcribe.

    `text`, `language`, `seconds` and `parts` are of a sound that was heard to its end, or closed; before, they raise
    InputError.
    """

    def __init__(self, model: Model, sound: Any, language: str | None = None, context: str | None = None,
                 longest_part: float | None = None, words: Model | Literal[False] = False, heard: Iterable[Part] = (),
                 **given: Unpack[GivenOptions]):
        if words is True:
            raise InputError("words must be the model of a forced aligner, such as Qwen/Qwen3-ForcedAligner-0.6B")
        length = usual_part(model.config.context_length) if longest_part is None else longest_part
        self.recording = open_sound(sound)
        super().__init__(model, self.recording, language, context, checked_part("longest_part", length, bool(words)),
                         options_of(given), words or None, heard, in_threads)
        self.events, self.closed = self.hear(), False

    def hear(self) -> Iterator[str | Part]:
        """The pieces of a part's text, and then the part, of one after the other."""
        cache = self.model.engine.new_cache(self.model.config)
        for step in self.steps():
            if isinstance(step, Part):
                yield step
            elif step is not None:
                answer = Completion(self.model, step[0], cache, options=step[1])
                yield from filter(None, map(self.read, answer))
                yield from filter(None, [self.read("", answer)])
        self.closed = True

    def __next__(self) -> str:
        return next(event for event in self.events if isinstance(event, str))

    def finish(self) -> Self:
        """Hears the rest -> itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Ends it where it is."""
        self.events, self.closed = iter(()), True

    def check_finished(self) -> None:
        if not self.closed:
            raise InputError("the sound isn't heard to its end: iterate over its text, or call finish()")

    @property
    def parts(self) -> list[Part]:
        self.check_finished()
        return self.heard

    @property
    def text(self) -> str:
        self.check_finished()
        return self.so_far

    @property
    def language(self) -> str:
        return languages(self.parts)

    @property
    def seconds(self) -> float:
        return max((part.end for part in self.parts), default=0.0)

    def __str__(self) -> str:
        return self.finish().text

    def __repr__(self) -> str:
        return f"<Transcript, so far {self.so_far!r}: iterate over it, print it, or call its finish()>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A notebook and IPython show the text."""
        printer.text(str(self))
