"""Remembering: something told, perhaps corrected, other things in between, then the question."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import words
from turns import Book, Turn, ask, language
from typos import typed
from words import capital

PETS = "cat dog rabbit horse parrot hamster fish turtle bird pony snake mouse puppy kitten goldfish".split()
PETS_ZH = "猫 狗 兔子 马 鹦鹉 仓鼠 鱼 乌龟 鸟 小猫 小狗".split()
RELATIVES = """sister brother friend mother father wife husband son daughter uncle aunt cousin boss teacher neighbour
neighbor doctor girlfriend boyfriend partner roommate colleague grandmother grandfather baby""".split()
RELATIVES_ZH = ("妹妹 哥哥 姐姐 弟弟 朋友 妈妈 爸爸 妻子 丈夫 儿子 女儿 "
                "叔叔 老师 邻居 老板 同学 同事 爷爷 奶奶").split()
COLORS = "red blue green yellow black white purple orange pink brown grey gold silver turquoise violet".split()
COLORS_ZH = "红色 蓝色 绿色 黄色 黑色 白色 紫色 橙色 粉色 棕色 灰色 金色".split()
LIKED = """color colour color colour food animal book film movie sport fruit city song game drink season day subject
flower band country hobby dish team toy car""".split()
LIKED_ZH = ("颜色 颜色 食物 动物 书 电影 运动 水果 城市 歌 "
            "游戏 饮料 季节 花 菜 科目 国家").split()
KINDS = ["name", "name", "pet", "pet", "city", "number", "age", "friend", "favourite", "favourite", "thing"]
# What the assistant says: once when it is told, once when it is asked.
SAYS = {"name": "your name is {m}", "pet": "your {p} is called {m}", "city": "you live in {m}",
        "number": "the number is {m}", "age": "you are {m} years old", "friend": "your {r} is called {m}",
        "favourite": "your favourite {n} is {m}", "thing": "your {n} is {m}"}
SAYS_ZH = {"name": "你叫{m}", "pet": "你的{p}叫{m}", "city": "你住在{m}", "number": "数字是{m}",
           "age": "你{m}岁", "friend": "你的{r}叫{m}", "favourite": "你最喜欢的{n}是{m}",
           "thing": "你的{n}是{m}"}


@dataclass
class Memory:
    """One thing that a person tells: its kind, what it belongs to, its value."""

    kind: str
    lang: str
    fill: dict[str, str]

    def key(self) -> tuple:
        """What can be told only once: two spellings of a colour are one thing."""
        n = "colour" if self.fill["n"] == "color" else self.fill["n"]
        return self.kind, {"pet": self.fill["p"], "friend": self.fill["r"], "favourite": n, "thing": n}.get(self.kind)


def value_of(rng: random.Random, kind: str, n: str, zh: bool) -> str:
    if kind == "age":
        return str(rng.randrange(1, 100))
    if kind == "number":
        return rng.choice([words.whole, words.whole, words.decimal if rng.random() < 0.3 else words.whole])(rng)
    if kind == "city":
        return words.chinese_city(rng) if zh else words.city(rng)
    if kind == "favourite" and n in ("color", "colour", "颜色") and rng.random() < 0.8:
        return rng.choice(COLORS_ZH if zh else COLORS)
    if kind in ("favourite", "thing"):
        draw = [lambda r: r.choice(words.chinese_nouns()), words.chinese_name, lambda r: r.choice(COLORS_ZH)] if zh \
            else [words.noun, words.noun, words.name, words.invented, lambda r: r.choice(COLORS), words.whole]
        return rng.choice(draw)(rng)
    return words.chinese_name(rng) if zh and rng.random() < 0.9 else words.name(rng)


def memory(rng: random.Random, lang: str, kind: str | None = None) -> Memory:
    zh, kind = lang == "_zh", kind or rng.choice(KINDS)
    if kind == "favourite" and rng.random() < 0.8:
        n = rng.choice(LIKED_ZH if zh else LIKED)
    else:
        n = rng.choice(words.chinese_nouns()) if zh else words.noun(rng)
    m, o = (value_of(rng, kind, n, zh) for _ in range(2))
    return Memory(kind, lang, dict(m=m, o=o, n=n, p=rng.choice(PETS_ZH if zh else PETS),
                                   r=rng.choice(RELATIVES_ZH if zh else RELATIVES),
                                   k=rng.choice(words.countries()).name[zh]))


def told(rng: random.Random, book: Book, thing: Memory, key: str) -> Turn:
    """The thing is told (`tell`) or corrected (`fix`); it keeps the spelling in which it was typed."""
    question, typed_fill = typed(rng, rng.choice(book[f"{key}_{thing.kind}{thing.lang}"]), thing.fill, copied=True)
    thing.fill["m"] = typed_fill["m"]
    says = said(thing)
    if thing.kind == "name" and key == "tell":
        answer = f"很高兴认识你，{thing.fill['m']}！" if thing.lang else f"Nice to meet you, {thing.fill['m']}!"
    else:
        answer = f"好的，{says}。" if thing.lang else f"OK, {says}."
    return Turn("memory", question, answer, "我要记住。" if thing.lang else "I will remember this.",
                [thing.fill["m"]])


def said(thing: Memory) -> str:
    return (SAYS_ZH if thing.lang else SAYS)[thing.kind].format(**thing.fill)


def asked(rng: random.Random, book: Book, thing: Memory) -> Turn:
    question = ask(rng, book, f"ask_{thing.kind}{thing.lang}", **thing.fill)
    m = thing.fill["m"]
    return Turn("memory", question, said(thing) + "。" if thing.lang else capital(said(thing)) + ".",
                f"我听说过：{m}" if thing.lang else f"I was told: {m}", [m])


def never_told(rng: random.Random, book: Book, thing: Memory) -> Turn:
    question = ask(rng, book, f"ask_{thing.kind}{thing.lang}", **thing.fill)
    return Turn("memory", question, "你没有告诉我。" if thing.lang else "You have not told me that.",
                "我没有听说过。" if thing.lang else "I was not told.",
                ["没有告诉" if thing.lang else "not told"])


def remembering(rng: random.Random, book: Book, filler: Callable[[random.Random], Turn]) -> list[Turn]:
    """Up to three things told, some corrected, asked for in any order, other turns between; it may end at any turn."""
    lang = language(rng)
    if rng.random() < 0.1:
        return [*(filler(rng) for _ in range(rng.choice([0, 0, 1, 2]))), never_told(rng, book, memory(rng, lang))]
    things: dict[tuple, Memory] = {}
    for _ in range(rng.choice([1, 1, 2, 3])):
        thing = memory(rng, lang)
        things.setdefault(thing.key(), thing)
    turns = []
    fillers = rng.choice([0, 0, 1, 1, 2, 3, 5, 8])
    for thing in things.values():
        turns.append(told(rng, book, thing, "tell"))
        if len(turns) > 1 and rng.random() < 0.5:
            turns[-2:] = [merged(rng, *turns[-2:], bool(lang))]
    if len(things) == 1 and rng.random() < 0.06:
        question = asked(rng, book, next(iter(things.values())))
        return [Turn("memory", f"{turns[0].question} {question.question}", question.answer, question.thought,
                     question.expected)]
    for thing in things.values():
        turns += [filler(rng) for _ in range(rng.choice([0, fillers]) if len(turns) < 9 else 0)]
        if rng.random() < 0.25:
            thing.fill["o"] = thing.fill["m"]
            thing.fill["m"] = value_of(rng, thing.kind, thing.fill["n"], bool(lang))
            turns.append(told(rng, book, thing, "fix"))
    for thing in rng.sample(list(things.values()), len(things)):
        turns.append(asked(rng, book, thing))
    if len(things) > 1 and rng.random() < 0.15:  # asked for together
        turns[-2:] = [merged(rng, *turns[-2:], bool(lang))]
    if rng.random() < 0.25:  # once more
        turns.append(asked(rng, book, rng.choice(list(things.values()))))
    missing = memory(rng, lang)
    if missing.key() not in things and rng.random() < 0.15:
        turns.append(never_told(rng, book, missing))
    # so that what is told gets an answer, too
    return turns[: rng.randint(1, len(turns))] if rng.random() < 0.4 else turns


def merged(rng: random.Random, one: Turn, two: Turn, zh: bool) -> Turn:
    """Two messages in one: as two sentences or as one."""
    between = "" if zh else " "
    question = f"{one.question}{between}{two.question}"
    if not zh and re.match(r"(I|My|What|Who|Where|How)\b", two.question, re.I) and rng.random() < 0.7:
        second = two.question if two.question[0] == "I" else two.question[0].lower() + two.question[1:]
        question = one.question.rstrip(".!?") + rng.choice([" and ", " and ", ", ", ", and ", "; ", " but "]) + second
    return Turn("memory", question, one.answer + between + two.answer, one.thought, two.expected)
