"""Small talk, repeating, and where the world ends."""

import random

import words
from questions import CHAT
from turns import Book, Turn, ask, language, plural
from typos import typed
from words import capital

UNKNOWN_ANSWER = {"": "I don't know that. I am only a very small model.",
                  "_zh": "这个我不知道。我只是一个很小的模型。"}
YEARS = ["1789", "1914", "1945", "1969", "2001", "2024", "1066", "1492"]
TONGUES = ["French", "German", "Spanish", "English", "Chinese", "Latin", "Japanese", "Italian", "Russian", "Dutch"]


def chat(rng: random.Random, book: dict[str, list[str]] = CHAT) -> Turn:
    answer = rng.choice([*book, *(a for a in book if not words.chinese(a))])
    return Turn("chat", typed(rng, rng.choice(book[answer]), {})[0], answer,
                "闲聊。" if words.chinese(answer) else "Small talk.", [answer])


def unknown_place(rng: random.Random, book: Book, lang: str) -> str:
    """What is asked of countries, asked of places that the model does not know: regions, cities, made-up names."""
    zh = lang == "_zh"
    places = [rng.choice(words.lists()["regions"])[zh], words.chinese_name(rng) if zh else capital(words.invented(rng))]
    places.append(rng.choice(words.lists()["chinese_cities" if zh else "cities"]))
    key = rng.choice(["capital", "capital", "continent", "language", "currency", "about"])
    return ask(rng, book, key + lang, c=rng.choice(places))


def not_known(question: str, lang: str) -> Turn:
    thought, expected = ("这个我没有学过。", "不知道") if lang else \
        ("I have not learned this.", "don't know")
    return Turn("unknown", question, UNKNOWN_ANSWER[lang], thought, [expected])


def unknown(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    lang = language(rng) if lang is None else lang
    zh = lang == "_zh"
    if zh:
        fill = dict(n=rng.choice(words.chinese_nouns()), o=rng.choice(words.chinese_nouns()),
                    x=words.chinese_name(rng), k=words.chinese_city(rng),
                    w=rng.choice([rng.choice(words.countries()).name[1], words.chinese_city(rng), "世界"]))
    else:
        fill = dict(n=words.noun(rng), o=words.noun(rng), q=plural(words.noun(rng)),
                    a=rng.choice(words.english("adjective")), v=rng.choice(words.english("verb")),
                    x=rng.choice([words.name(rng), f"{words.name(rng)} {words.name(rng)}",
                                  capital(words.invented(rng)), words.invented(rng),
                                  rng.choice(words.lists()["cities"])]),
                    k=words.city(rng), w=rng.choice([rng.choice(words.countries()).name[0],
                                                     words.country(rng).name[0], words.city(rng)]),
                    i=rng.choice(YEARS), y=rng.choice(TONGUES),
                    z=" ".join(words.noun(rng) for _ in range(rng.randint(2, 6))))
    question = unknown_place(rng, book, lang) if rng.random() < 0.15 else ask(rng, book, "unknown" + lang, **fill)
    return not_known(question, lang)


def repeat(rng: random.Random, book: Book) -> Turn:
    """Words to be said again: the shortest practice in copying, which remembering and tools rest on."""
    zh = rng.random() < 0.3
    draw = [words.chinese_name, lambda r: r.choice(words.chinese_nouns()), words.whole] if zh else [
        words.name, words.invented, words.whole, words.noun, words.city, words.clock, words.decimal]
    said = rng.choice(["", "，"] if zh else [" ", " ", ", "]).join(rng.choice(draw)(rng)
                                                                  for _ in range(rng.randint(1, 6)))
    question, fill = typed(rng, rng.choice(book["repeat_zh" if zh else "repeat"]), {"w": said}, copied=True)
    return Turn("repeat", question, fill["w"], "我来重复。" if zh else "I repeat it.", [fill["w"]])
