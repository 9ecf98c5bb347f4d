"""When each word of a text is said: Qwen3-ForcedAligner reads a sound and its text, with two marks after each word, and
gives each mark a class: how many times 80 ms after the sound's begin."""
import itertools
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen3 import Model, NextTokens, compute, linear, to_float32
from qwen3_asr import RATE, Sound, sounds_of
from qwen3_lib.io.cores import in_threads
from tokenizer_utils import InputError

CLASS_MS, TIMESTAMP = 80, "<timestamp>"
ALIGNED = ("Chinese", "English", "Cantonese", "French", "German", "Italian", "Portuguese", "Russian", "Spanish")
OPENERS = "([{“‘「『（［｛【〔〖〈《〘〚｢"  # of brackets and quotes: they belong to the word behind them
IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"


@dataclass(frozen=True)
class Word:
    """A word of a text, with the punctuation and the space after it, from `start` to `end` in seconds."""
    text: str
    start: float
    end: float


def check_aligner(model: Model, language: str) -> None:
    """Raises InputError for a model that is no forced aligner, and for a language whose words it can't time.

    Japanese and Korean would need packages that cut a text into words.
    """
    if not model.embeds or "classes.weight" not in model.source.heads:
        raise InputError(f"{model.path}: no forced aligner; Qwen/Qwen3-ForcedAligner-0.6B is one")
    if language not in (*ALIGNED, ""):
        raise InputError(f"words can't be timed in {language}, only in {', '.join(ALIGNED)}")


def split_words(text: str) -> list[tuple[str, str]]:
    """(word, the same without punctuation) of a text: runs without a space, and each ideograph by itself.

    The words join to the text; a text without letters and numbers has none.
    """
    words = list[tuple[int, int, str]]()  # (first, behind the last letter or number, both and those between) of each
    for run in re.finditer(f"([{IDEOGRAPHS}])|[^\\s{IDEOGRAPHS}]+", text):
        if kept := [i for i in range(*run.span()) if run[1] or text[i] == "'"
                    or unicodedata.category(text[i])[0] in "LN"]:
            words.append((kept[0], kept[-1] + 1, "".join(text[i] for i in kept)))
    begins = [0]
    for (_, end, _), (start, _, _) in itertools.pairwise(words):
        between = text[end:start]
        space = re.search(r"\s\S*\Z", between)
        begins.append(end + (space.start() + 1 if space else len(between.rstrip(OPENERS))))
    return [(text[i:j], word) for i, j, (_, _, word) in zip(begins, [*begins[1:], len(text)], words)]


def mark_classes(model: Model, sound: Sound, words: list[str]) -> np.ndarray:
    """The class of each mark [2 * words], in one pass through the model."""
    text = "<|audio_end|>" + "".join(word + 2 * TIMESTAMP for word in words)
    before, after = (model.tokenizer.encode(each, False) for each in ("<|audio_start|>", text))
    ids = np.concatenate([before, sound.ids, after]).astype(np.int64)
    _, x = compute(model, [NextTokens(model.engine.new_cache(model.config, len(ids)), ids, wanted=0)], states=True)
    head = to_float32(model.source.heads["classes.weight"])
    return linear(x[ids == model.tokenizer.token_to_id(TIMESTAMP)], head).argmax(axis=1)


def repaired(times: np.ndarray) -> np.ndarray:
    """Times [n] in order: the longest run that never falls stays. Of the others, one or two together take the time of
    their nearer neighbour in it, more lie evenly between both."""
    n = len(times)
    length, before = np.ones(n, int), np.full(n, -1)
    for i in range(1, n):
        lengths = np.where(times[:i] <= times[i], length[:i], 0)
        if lengths.max():
            before[i], length[i] = lengths.argmax(), lengths.max() + 1
    kept = [int(length.argmax())]
    while before[kept[-1]] >= 0:
        kept.append(int(before[kept[-1]]))
    kept.reverse()
    found = np.interp(np.arange(n), kept, times[kept])  # before the first and after the last one, theirs
    for left, right in zip(kept, kept[1:]):
        if right - left in (2, 3):
            found[left + 1], found[right - 1] = times[left], times[left if right - left == 2 else right]
    return found


def timed_words(model: Model, samples: np.ndarray, text: str, language: str, start: float = 0.0,
                each: Any = in_threads) -> tuple[Word, ...]:
    """The words of the text of a sound [n] that begins at `start` seconds; they join to the text.

    A text without letters and numbers is one word, as long as the sound. `each`: as of Sounds.hear.
    """
    check_aligner(model, language)
    if not (words := split_words(text)):
        return (Word(text, round(start, 3), round(start + len(samples) / RATE, 3)),) if text else ()
    classes = mark_classes(model, sounds_of(model).hear(samples, each), [word for _, word in words])
    times = [round(start + int(ms) / 1000, 3) for ms in repaired(classes * CLASS_MS)]
    return tuple(Word(shown, first, last) for (shown, _), first, last in zip(words, times[::2], times[1::2]))
