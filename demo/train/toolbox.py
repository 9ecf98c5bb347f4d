"""The stock of tools.py: what values may be, how they stand in sentences, and tools as people write them."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import words
from questions import PATTERNS
from sums import in_words
from typos import choose


def one_of(key: str) -> Callable[[random.Random], str]:
    """Draws one of the words of a pattern; a `_` in one stands for a space."""
    return lambda rng: rng.choice(PATTERNS[key][0].split()).replace("_", " ")


def wording(kind: str) -> Callable[[random.Random], str]:
    """Draws a pattern and fills it: {n} noun, {a} adjective, {v} verb, {x} made-up word, {m} name, {c} city, {t} time,
    {d} digit; {N}, {A} and {X} with a capital."""
    draw = {"n": words.noun, "a": lambda r: r.choice(words.english("adjective")),
            "v": lambda r: r.choice(words.english("verb")), "x": words.invented, "m": words.name, "c": words.city,
            "t": words.clock, "d": lambda r: str(r.randint(2, 9)), "N": lambda r: words.capital(words.noun(r)),
            "A": lambda r: words.capital(r.choice(words.english("adjective"))),
            "X": lambda r: words.capital(words.invented(r))}

    def fill(rng: random.Random) -> str:
        text = choose(rng, rng.choice(PATTERNS[kind]))
        for key, word in draw.items():
            while "{" + key + "}" in text:
                text = text.replace("{" + key + "}", word(rng), 1)
        return text

    return fill


def code_value(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(rng.randint(3, 8)))


MONTHS, WEEKDAYS = one_of("month"), one_of("weekday")


def date_value(rng: random.Random) -> str:
    day, month, weekday, name = rng.randint(1, 28), rng.randint(1, 12), WEEKDAYS(rng), MONTHS(rng)
    soon = choose(rng, "(tomorrow|today|tonight|this weekend|next week|tomorrow evening|the day after tomorrow)")
    return rng.choice([f"2026-{month:02}-{day:02}", f"{month}/{day}/2026", soon, soon, weekday, weekday,
                       f"next {weekday}", f"{name} {day}", f"{day} {name}"])


def clock_value(rng: random.Random) -> str:
    hour = in_words(rng.randint(1, 12), False)
    spoken = choose(rng, f"((half past|quarter past|quarter to) {hour}|noon|midnight|{hour} o'clock|"
                         f"{rng.randint(1, 12)})")
    return spoken if rng.random() < 0.2 else words.clock(rng)


def number_value(rng: random.Random) -> str:
    return words.decimal(rng) if rng.random() < 0.25 else words.whole(rng)


def up_to(most: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randint(1, rng.choice([9, most, most])))


def noun_zh_value(rng: random.Random) -> str:
    return "".join(rng.choice(words.chinese_nouns()) for _ in range(rng.choice([1, 1, 2])))


def clock_zh_value(rng: random.Random) -> str:
    hour = rng.randint(1, 12)
    spelled = str(hour) if rng.random() < 0.5 else "两" if hour == 2 else in_words(hour, True)
    spoken = choose(rng, f"(早上|上午|中午|下午|晚上|明早|今晚||){spelled}点(半|一刻|整|||)")
    return spoken if rng.random() < 0.65 else f"{rng.randrange(24)}:{rng.randrange(60):02}"


def date_zh_value(rng: random.Random) -> str:
    day = f"{rng.randint(1, 12)}月{rng.randint(1, 28)}(日|号)"
    return choose(rng, f"(明天|后天|今天|今晚|周末|大后天|明天上午|明天下午|(周|星期|下周|这周|礼拜)(一|二|三|四|五|六)|{day}|{day})")


# What a value may be: its JSON type, how it is drawn. In Chinese, `city` means `city_zh`, and so on.
KINDS: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    **{kind: ("string", wording(kind))
       for kind in "person text query title message task thing place email file".split()},
    **{kind: ("string", one_of(kind)) for kind in "tongue currency food color measure tongue_zh money_zh".split()},
    "city": ("string", words.city),
    "boolean": ("boolean", lambda r: ""),
    "clock": ("string", clock_value),
    "code": ("string", code_value),
    "date": ("string", date_value),
    "number": ("number", number_value),
    "whole": ("integer", words.whole),
    "minutes": ("integer", up_to(120)),
    "few": ("integer", up_to(20)),
    "percent": ("integer", up_to(100)),
    "phone": ("string", lambda r: r.choice(["555-{}", "0{}", "{}"]).format(r.randrange(10**4, 10**7))),
    "switch": ("on|off", lambda r: r.choice(["on", "off"])),
    "lock": ("lock|unlock", lambda r: r.choice(["lock", "unlock"])),
    "unit": ("celsius|fahrenheit", lambda r: ""),
    "room": ("string", lambda r: r.choice(["kitchen", "bedroom", "living room", "bathroom", "garage", "hall", "office",
                                           "garden", words.noun(r)])),
    "city_zh": ("string", words.chinese_city),
    "person_zh": ("string", words.chinese_name),
    "noun_zh": ("string", noun_zh_value),
    "clock_zh": ("string", clock_zh_value),
    "date_zh": ("string", date_zh_value),
    "message_zh": ("string", lambda r: choose(
        r, "(我晚点到|我到家了|生日快乐|{n}准备好了|带上{n}|在{n}见|别忘了{n}|我找到{n}了)"
    ).replace("{n}", r.choice(words.chinese_nouns()))),
}
# These may be any words: nothing stands behind such a value unmarked.
FREE = {"text", "query", "title", "message", "task", "message_zh"}


@dataclass
class Tool:
    """`arguments`: key -> (names in the schema, kind). `questions` name them in braces, and may come with values that
    they only imply: ("double {x}", {"factor": "2"}). With `forms`, key -> how the value stands in a sentence, the
    questions are only intents, which tools.compose makes sentences of; those in `optional` are said more rarely."""

    names: str
    descriptions: list[str]
    arguments: dict[str, tuple[str, str]]
    questions: list
    results: dict[str, str] = field(default_factory=dict)  # key -> kind
    topic: str = ""
    forms: dict[str, list[str]] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    label: str = ""  # of two tools with one label only one is offered
    section: str = ""  # tools of one section are near relatives


def lines_of(file: str) -> list[str]:
    """A line that begins with four spaces goes on with the one before it."""
    return (Path(__file__).parent / file).read_text(encoding="utf-8").replace("\n    ", " ").strip().splitlines()


COMMON = set("get set add find list make do new of to number numbers take save start show open who people person item "
             "file name how me".split())
# How a value stands in a sentence, in slots.txt: key | names of the argument | kind | forms
STANDING = {key: (names, kind, forms.split(" / "))
            for key, names, kind, forms in (re.split(r" *\| *", line) for line in lines_of("slots.txt"))}


def slot_of(text: str, zh: bool) -> tuple[str, tuple[str, str], list[str], bool]:
    """`key=names:kind?` -> (key, (names in the schema, kind), forms, whether it is optional); the rest: STANDING."""
    text, optional = text.rstrip("?"), text.endswith("?")
    text, _, kind = text.partition(":")
    key, _, names = text.partition("=")
    standing = STANDING.get(key, (key, "text", ["{}"]))
    kind = kind or standing[1]
    names = standing[0] if not names else "" if names == "-" else names.replace(",", " ")
    return key, (names, kind + "_zh" if zh and kind + "_zh" in KINDS else kind), ["{}"] if zh else standing[2], optional


def services(file: str, whole: bool = False) -> list[Tool]:
    """The services in a file, each two lines, and more where four spaces begin the next:

    label and words of other questions that it is for | names | descriptions | arguments: key, `=other,names`, `:kind`,
    `?` if it is optional | results, then under two spaces the intents, parted by ` / `, with `=>` what they imply. Of
    one label only one is offered; those under one heading are near relatives. `whole`: questions, not intents."""
    tools: list[Tool] = []
    section = ""
    for line in lines_of(file):
        if line.startswith("# "):
            section = line[2:]
        elif line.startswith("  "):
            tools[-1].questions = line.strip().split(" / ")
        else:
            label, names, descriptions, arguments, results = line.split(" | ")
            slots = [slot_of(text, words.chinese(label)) for text in arguments.split()]
            given = {key: argument for key, argument, _, _ in slots}
            found = dict(pair.split(":") for pair in results.split())
            tool = Tool(names, descriptions.split("; "), given, [], found, label)
            if not whole:
                own = [word for word in re.split(r"\W|_", names.lower()) if len(word) > 2 and word not in COMMON]
                tool.topic = " ".join([*label.split(), *own, "sum" * (section == "sums")])
                tool.forms = {key: forms for key, _, forms, _ in slots}
                tool.optional = {key for key, _, _, optional in slots if optional}
                tool.label, tool.section = label.split()[0], section
            tools.append(tool)
    return tools


TOOLS = services("services.txt")
