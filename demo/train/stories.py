"""Stories: a frame of few words around a subject that may be anything."""

import random
from dataclasses import dataclass

import words
from questions import PATTERNS
from turns import Book, Turn, ask, language, plural
from typos import typed
from words import an, capital


@dataclass
class Subject:
    asked: str  # as the question names it: "a fox", "two foxes", "my uncle"
    first: str  # as the story introduces it
    then: str  # as it goes on
    core: str  # what the story must mention
    many: bool = False


PARTS = "places moods goals events endings helpers".split()
PLACES, MOODS, GOALS, EVENTS, ENDINGS, HELPERS = (PATTERNS[f"story {part}"] for part in PARTS)
PLACES_ZH, MOODS_ZH, GOALS_ZH, EVENTS_ZH, ENDINGS_ZH, HELPERS_ZH = (PATTERNS[f"story {part}_zh"] for part in PARTS)


def subject(rng: random.Random) -> Subject:
    noun = words.noun(rng) if rng.random() < 0.8 else words.invented(rng)
    kind = rng.random()
    if kind < 0.12:
        name = words.name(rng)
        return Subject(name, name, name, name)
    if kind < 0.24:
        number = rng.choice(["two", "three", "", "many", "four", "some", "five"])
        return Subject(f"{number} {plural(noun)}".strip(), f"{number or 'many'} {plural(noun)}", f"the {plural(noun)}",
                       plural(noun), True)
    if kind < 0.32:
        other = words.noun(rng)
        both = f"{an(noun)} and {an(other)}"
        return Subject(both, both, f"the {noun} and the {other}", noun, True)
    if kind < 0.5:
        noun = f"{rng.choice(words.english('adjective'))} {noun}"
    asked = rng.choice([an(noun), an(noun), an(noun), "the " + noun, noun, "my " + noun])
    return Subject(asked, an(noun), "the " + noun, noun)


def tell(rng: random.Random, s: Subject) -> str:
    fill = dict(first=s.first, then=s.then, goal=rng.choice(GOALS), helper=rng.choice(HELPERS))
    be = "were" if s.many else "was"
    text = f"Once upon a time there {be} {s.first} in {rng.choice(PLACES)}. "
    text += f"{capital(s.then)} {be} {rng.choice(MOODS)}. "
    return text + f"{rng.choice(EVENTS)} {rng.choice(ENDINGS)}".format(**fill)


def tell_zh(rng: random.Random, s: str) -> str:
    text = f"从前，{rng.choice(PLACES_ZH)}有{s}。{s}{rng.choice(MOODS_ZH)}。"
    return text + (rng.choice(EVENTS_ZH) + rng.choice(ENDINGS_ZH)).format(
        s=s, goal=rng.choice(GOALS_ZH), helper=rng.choice(HELPERS_ZH))


def story(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    lang = language(rng) if lang is None else lang
    free = rng.random() < 0.06
    if lang:
        s = rng.choice(words.chinese_nouns()) if rng.random() < 0.8 else words.chinese_name(rng)
        question = ask(rng, book, "any_story_zh") if free else \
            ask(rng, book, "story_zh", s=rng.choice(["", "", "一个", "一只"]) + s)
        return Turn("stories", question, tell_zh(rng, "小猫" if free else s), "故事：" + ("小猫" if free else s),
                    ["小猫" if free else s])
    s = Subject("a cat", "a cat", "the cat", "cat") if free else subject(rng)
    question, fill = typed(rng, rng.choice(book["any_story" if free else "story"]), {"s": s.asked, "t": s.core},
                           copied=True, cased=False)
    return Turn("stories", question, tell(rng, s), f"A story about {s.first}.", [s.core])
