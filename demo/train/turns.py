"""What the parts of the demo model's text have in common: a question with its answer, and how one is worded."""

import hashlib
import random
from dataclasses import dataclass, field

from typos import typed

Book = dict[str, list[str]]


@dataclass
class Turn:
    """A question and its right answer. `expected`: strings, one of which a right answer contains."""

    skill: str
    question: str
    answer: str
    thought: str
    expected: list[str] = field(default_factory=list)


def is_held_out(*key: object) -> bool:
    """True for the tenth of all keys that training never sees."""
    return hashlib.sha256(repr(key).encode()).digest()[0] % 10 == 0


def language(rng: random.Random) -> str:
    return "" if rng.random() < 0.65 else "_zh"


def ask(rng: random.Random, book: Book, key: str, **fill: str) -> str:
    return typed(rng, rng.choice(book[key]), fill)[0]


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"
