"""The words of the demo model's world: countries, names, nouns, cities, and strings that nobody has seen before."""

import random
from dataclasses import dataclass
from functools import cache

from lists import chinese, everything
from questions import PATTERNS


@dataclass(frozen=True)
class Country:
    """What the model knows of a country; each tuple is (English, Chinese)."""

    code: str
    name: tuple[str, str]
    capital: tuple[str, str]
    continent: tuple[str, str]
    languages: tuple[tuple[str, str], ...]  # the one or two with most speakers, of those that are official
    spoken: frozenset[str]  # English names of all languages that CLDR lists for it
    currency: tuple[str, str]
    population: int
    aliases: tuple[tuple[str, ...], tuple[str, ...]]


lists = cache(everything)


@cache
def countries() -> tuple[Country, ...]:
    return tuple(Country(about["code"], *(tuple(about[key]) for key in ("name", "capital", "continent")),
                         tuple(map(tuple, about["languages"])), frozenset(about["spoken"]), tuple(about["currency"]),
                         about["population"], tuple(map(tuple, about["aliases"])))
                 for about in lists()["countries"])


def country(rng: random.Random) -> Country:
    """Large countries, which people ask for, more often than small ones."""
    return max(rng.sample(countries(), 2), key=lambda c: c.population) if rng.random() < 0.5 else \
        rng.choice(countries())


def english(kind: str) -> list[str]:
    """Nouns, verbs or adjectives in common use."""
    return lists()[kind]


def chinese_nouns() -> list[str]:
    return lists()["chinese_nouns"]


# ---- Strings made up on the spot: copying is the only way to say them again -----------------------------------------

ONSETS = "b c d f g h j k l m n p r s t v w y z br ch cl dr fl gr kr ll ph pr qu sh sk st th tr x".split()
VOWELS = "a a e e i i o o u y ai ea ee ie oo ou".split()
CODAS = ["", "", "", "", "n", "r", "s", "l", "m", "th", "x", "k", "d", "ck", "ng", "tt"]


def invented(rng: random.Random) -> str:
    """A word of random syllables, or, more rarely, of random letters."""
    if rng.random() < 0.2:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9)))
    return "".join(rng.choice(["", *ONSETS] if i == 0 else ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
                   for i in range(rng.choice([1, 2, 2, 2, 3])))


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def name(rng: random.Random) -> str:
    word = rng.choice(lists()["first_names"]) if rng.random() < 0.5 else capital(invented(rng))
    if rng.random() < 0.06:
        word += " " + (capital(invented(rng)) if rng.random() < 0.7 else rng.choice(lists()["first_names"]))
    return word


def chinese_name(rng: random.Random) -> str:
    surnames, given = lists()["chinese_names"]
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(surnames) + rng.choice(given)
    if kind < 0.6:
        return rng.choice("小阿老大") + rng.choice(lists()["chinese_characters"])
    return "".join(rng.choice(lists()["chinese_characters"]) for _ in range(rng.choice([1, 2, 2, 3, 3])))


def city(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(lists()["cities"])
    if kind < 0.8:
        return rng.choice(countries()).capital[0]
    return " ".join(capital(invented(rng)) for _ in range(rng.choice([1, 1, 1, 2])))


def chinese_city(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(lists()["chinese_cities"])
    if kind < 0.75:
        return rng.choice(countries()).capital[1]
    return "".join(rng.choice(lists()["chinese_characters"]) for _ in range(rng.choice([2, 2, 3])))


# Nouns that schemas and people use most. They are so frequent that the tokenizer has them with a space and without, and
# both must be learned: "a game" is to be called as {"game": ...}.
EVERYDAY = PATTERNS["everyday"][0].split()


def noun(rng: random.Random) -> str:
    return rng.choice(EVERYDAY if rng.random() < 0.2 else english("noun"))


def clock(rng: random.Random) -> str:
    hour = rng.randrange(24)
    return rng.choice([f"{hour}:{rng.randrange(60):02}", f"{hour:02}:{rng.randrange(60):02}",
                       f"{1 + hour % 12} {rng.choice(['am', 'pm'])}", f"{1 + hour % 12}{rng.choice(['am', 'pm'])}",
                       f"{1 + hour % 12}:{rng.randrange(60):02} {rng.choice(['am', 'pm'])}"])


def whole(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 4, 5])))


def decimal(rng: random.Random) -> str:
    whole = rng.randrange(10 ** rng.choice([1, 2, 3]))
    return f"{whole}.{rng.randrange(1, 10) if rng.random() < 0.6 else rng.randrange(10, 100)}".rstrip("0")


def an(word: str) -> str:
    return ("an " if word[0].lower() in "aeiou" else "a ") + word
