"""Forms of a transcript: text, JSON, and subtitles: what stands on the screen, from when to when."""
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from qwen3_lib.generation.aligner import Word, split_words
from qwen3_lib.generation.transcript import UNSPACED, Part, joined_text, languages

OUTPUT_FORMS = ("txt", "srt", "vtt", "json")
SUBTITLE = 20  # seconds of a part whose text is a subtitle
SHORTEST_CUE = 80  # ms, one step of the aligner: players don't show a subtitle without length
# What ends a sentence, and what may close behind it; behind a full stop that isn't wide, there is a space.
CLOSERS = "[\"'”’»」』)）\\]】]*"
SENTENCE = re.compile(f".+?(?:[。？！]+{CLOSERS}|[.?!…]{CLOSERS}(?=\\s|\\Z)|\\Z)\\s*", re.DOTALL)
SENTENCE_END = re.compile(f"[.?!…。？！]{CLOSERS}\\s*\\Z")


def clock(seconds: float) -> str:
    """Hours, minutes, seconds and thousandths: 00:01:02.345."""
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}.{rest % 1000:03}"


def as_object(parts: Sequence[Part]) -> dict[str, Any]:
    """A transcript as --json, .json and batch files have it."""
    return {"text": joined_text(parts), "language": languages(parts), "seconds": parts[-1].end if parts else 0.0,
            "parts": [{key: value for key, value in asdict(part).items() if value != ()} for part in parts]}


def file_text(parts: Sequence[Part], form: str) -> str:
    """A transcript as the text of a file in one of OUTPUT_FORMS."""
    if form == "json":
        return json.dumps(as_object(parts), ensure_ascii=False, indent=2) + "\n"
    if form == "txt":
        return joined_text(parts) + "\n"
    subtitles = [(f"{clock(start)} --> {clock(end)}\n", text) for start, end, text in cues(parts)]
    if form == "vtt":
        return "\n".join(["WEBVTT\n", *(f"{time}{escape(text, quote=False)}\n" for time, text in subtitles)])
    return "\n".join(f"{i}\n{time.replace('.', ',')}{text}\n" for i, (time, text) in enumerate(subtitles, 1))


def cues(parts: Sequence[Part]) -> list[tuple[float, float, str]]:
    """(start, end, text) of the subtitles of parts, in seconds: SHORTEST_CUE long at least, none over the next one.

    One that begins too late for it begins earlier. Where a sound is too short for all, the last ones end after it.
    """
    placed, latest = list[tuple[int, int, str]](), round(1000 * parts[-1].end) if parts else 0
    for start, end, text in reversed([cue for part in parts for cue in cues_of(part)]):
        first = min(round(1000 * start), latest - SHORTEST_CUE)
        placed.append((first, min(max(round(1000 * end), first + SHORTEST_CUE), latest), text))
        latest = first
    found, earliest = list[tuple[float, float, str]](), 0
    for first, last, text in reversed(placed):
        first = max(first, earliest)
        earliest = max(last, first + SHORTEST_CUE)
        found.append((first / 1000, earliest / 1000, text))
    return found


def cues_of(part: Part) -> list[tuple[float, float, str]]:
    """(start, end, text) of a part's subtitles: runs of its words.

    A run ends with a sentence, at a pause, after 7 seconds, or when two lines are full.
    """
    runs, most = list[list[Word]](), 40 if part.language in UNSPACED else 84
    for word in part.words or words_by_share(part):
        run = runs[-1] if runs else []
        text = "".join(each.text for each in run)
        if not run or len(text) + len(word.text.rstrip()) > most or SENTENCE_END.search(text) \
                or word.start > run[-1].end + 1 or word.end > run[0].start + 7:
            runs.append(run := [])
        run.append(word)
    return [(run[0].start, run[-1].end, " ".join("".join(word.text for word in run).split())) for run in runs]


def words_by_share(part: Part) -> list[Word]:
    """The words of a part's text without an aligner: each has its share of the part's time, by its characters."""
    words = [word for sentence in SENTENCE.findall(part.text)
             for word in [shown for shown, _ in split_words(sentence)] or [sentence]]
    step = (part.end - part.start) / max(1, len(part.text))
    times = [part.start + step * n for n in itertools.accumulate(map(len, words), initial=0)]
    return [Word(text, start, end) for text, start, end in zip(words, times, times[1:])]
