"""The stock of tools.py: what the values of arguments may be, how they stand in sentences, and tools like those that people write."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import words
from sums import in_words
from typos import choose


def one_of(text: str) -> Callable[[random.Random], str]:
    """Draws one of the words of `text`; a `_` in one stands for a space."""
    return lambda rng: rng.choice(text.split()).replace("_", " ")


def wording(*patterns: str) -> Callable[[random.Random], str]:
    """Draws a pattern and fills it: {n} noun, {a} adjective, {v} verb, {x} made-up word, {m} name, {c} city, {t} time, {d} digit;
    {N}, {A} and {X} with a capital."""
    draw = {"n": words.noun, "a": lambda r: r.choice(words.english("adjective")),
            "v": lambda r: r.choice(words.english("verb")), "x": words.invented, "m": words.name, "c": words.city,
            "t": words.clock, "d": lambda r: str(r.randint(2, 9)), "N": lambda r: words.capital(words.noun(r)),
            "A": lambda r: words.capital(r.choice(words.english("adjective"))),
            "X": lambda r: words.capital(words.invented(r))}

    def fill(rng: random.Random) -> str:
        text = choose(rng, rng.choice(patterns))
        for key, word in draw.items():
            while "{" + key + "}" in text:
                text = text.replace("{" + key + "}", word(rng), 1)
        return text

    return fill


text_value = wording("{n}", "{n}", "{x}", "{a}", "{a} {n}", "{n} {n}", "{x} {n}", "{n} {x}", "{n} {n} {n}", "{a} {n} {n}")
query_value = wording(
    "{n}", "{n} {n}", "(best|cheap|new|used|old|good) {n}", "{n} (recipe|history|prices|ideas|rules|facts|near {c}|in {c})", "(how|where) to {v} (a|the) {n}",
    "{a} {n}", "{m}", "{x}", "{c}", "{n} for {n}", "why (is|are) {n} {a}", "(history|price|meaning|size) of {n}", "{x} {n}",
)  # fmt: skip
title_value = wording(
    "{n}", "{x}", "{a} {n}", "the {n}", "the {a} {n}", "{n} of {n}", "{n} in the {n}", "{m}", "my {n}", "{a} {a} {n}", "{n} {d}",
    "the {n} of {c}", "{v} the {n}", "(team|family|birthday|lunch|work) (meeting|dinner|party|call|trip)", "{n} {n}", "{x} {x}",
)  # fmt: skip
message_value = wording(
    "I am (late|here|at home|on my way|sick|{a}|busy|in {c})", "I'm (late|here|at home|on my way|sick|{a}|running late|not coming)",
    "see you (tomorrow|at {t}|later|there|in {c}|soon)", "(happy birthday|good luck|thank you|call me|come home|well done|get well soon)",
    "the {n} is (ready|here|broken|lost|{a}|in the {n})", "(dinner|lunch|the party|the {n}) is at {t}", "bring (the|a|my|your) {n}( and the {n}|)",
    "(I|we) (need|want|have|found|lost|forgot|like|will bring) (the|a|my|two|your) {n}( and a {n}|)", "we meet (at {t}|in {c}|at the {n})",
    "(can|will|could) you {v} the {n}", "I will (be there at {t}|{v} the {n}|call you back|come later)", "my {n} is {a}", "{v} the {n}",
    "don't (forget|{v}) the {n}", "the (train|meeting|{n}) (was moved to|starts at|leaves at) {t}", "{m} (says hello|is {a}|has the {n}|will {v} it)",
    "where is (the|my) {n}", "it is {a} (here|in {c})", "there is (a|no) {n} in the {n}",
)  # fmt: skip
task_value = wording(
    "(buy|get|order|find|bring|fetch) (milk|bread|eggs|the {n}|a {n}|some {n}|{n}|{n} and {n})", "(call|phone|visit|email|meet|pay|thank|help) {m}",
    "call (mum|mom|dad|the {n}|my {n}|my boss)", "{v} (the|my|a) {n}", "{v} the {a} {n}", "(feed|wash|walk|clean|paint|fix) (the|my) {n}",
    "(take|throw) out the (trash|{n})", "pay the (rent|bill|{n})", "water the (plants|flowers|{n})", "go to (the {n}|{c}|bed|work)", "be {a}",
    "write to {m}", "pick up (the {n}|{m}|the kids)", "look for (a|the) {n}", "ask {m} about the {n}", "talk to {m}", "turn off the {n}",
)  # fmt: skip

person_value = wording(*["{m}"] * 9, "Dr. {m}", "Mr. {m}", "Mrs. {m}", "(Aunt|Uncle|Professor) {m}",
                       "my (mother|brother|boss|wife|son|{n})", "(mum|dad|the {n})", "{m} {X}")  # fmt: skip
place_value = wording("{c}", "{c}", "{m} Street", "the {n}", "{N} Square", "{c} {n}", "{d}{d} {x} Road", "{x}", "{X}",
                      "{N} (House|Garden|Bar|Station|Park|Airport|Kitchen)",
                      "(Hotel|Cafe|Trattoria|Villa|Casa|Chez|Bar) {X}", "{X} (Inn|Grill|Hall|Mall|Tower)", "{m}'s",
                      "{m}'s {N}", "The {A} {N}", "{X}platz", "Terminal {d}", "the {a} {n}")  # fmt: skip
file_value = wording("{n}.(txt|pdf|csv|py|jpg)", "{x}.(txt|pdf|csv|py|jpg)", "{n}_{n}.(txt|doc)", "{n}{d}.(png|pdf)",
                     "{n}/{n}.(txt|md|json)", "(src|home|docs|data)/{n}.(py|csv)", "{n}-{n}.(zip|xlsx|mp3)",
                     "(var|home|usr)/{n}")  # fmt: skip
thing_value = wording("{n}", "{n}", "{n}", "{n} {n}", "{a} {n}", "{a} {n}", "{x}", "{N} {N}", "{N}", "{a} {n} {n}",
                      "{n} of {n}", "{X} {n}", "{c} {n}")


def code_value(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(rng.randint(3, 8)))


MONTHS = one_of("January February March April May June July August September October November December")
WEEKDAYS = one_of("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def date_value(rng: random.Random) -> str:
    day, month, weekday, name = rng.randint(1, 28), rng.randint(1, 12), WEEKDAYS(rng), MONTHS(rng)
    soon = choose(rng, "(tomorrow|today|tonight|this weekend|next week|tomorrow evening|the day after tomorrow)")
    return rng.choice(
        [f"2026-{month:02}-{day:02}", f"{month}/{day}/2026", soon, soon, weekday, weekday, f"next {weekday}",
         f"{name} {day}", f"{day} {name}"]
    )


def clock_value(rng: random.Random) -> str:
    hour = in_words(rng.randint(1, 12), False)
    spoken = choose(rng, f"((half past|quarter past|quarter to) {hour}|noon|midnight|{hour} o'clock|{rng.randint(1, 12)})")
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
    "city": ("string", words.city),
    "person": ("string", person_value),
    "boolean": ("boolean", lambda r: ""),
    "clock": ("string", clock_value),
    "text": ("string", text_value),
    "query": ("string", query_value),
    "title": ("string", title_value),
    "message": ("string", message_value),
    "task": ("string", task_value),
    "code": ("string", code_value),
    "date": ("string", date_value),
    "number": ("number", number_value),
    "whole": ("integer", words.whole),
    "minutes": ("integer", up_to(120)),
    "few": ("integer", up_to(20)),
    "percent": ("integer", up_to(100)),
    "thing": ("string", thing_value),
    "place": ("string", place_value),
    "email": ("string", wording("{x}@{n}.(com|org|net|de)", "{n}@{x}.(com|org)", "{x}.{x}@{n}.net")),
    "phone": ("string", lambda r: r.choice(["555-{}", "0{}", "{}"]).format(r.randrange(10**4, 10**7))),
    "file": ("string", file_value),
    "tongue": ("string", one_of("French German Spanish English Chinese Latin Japanese Italian Russian Dutch Greek Polish Arabic")),
    "currency": ("string", one_of("euros dollars pounds yen USD EUR GBP JPY CHF francs pesos rupees yuan euro dollar CNY")),
    "food": ("string", one_of("Italian Chinese Thai Indian Greek Mexican French vegan Japanese pizza sushi burger cheap noodle")),
    "color": ("string", one_of("red blue green yellow white purple orange pink warm_white cold_white turquoise")),
    "measure": ("string", one_of("km miles meters feet kg pounds grams ounces liters gallons celsius fahrenheit inches cm hours minutes")),
    "switch": ("on|off", lambda r: r.choice(["on", "off"])),
    "lock": ("lock|unlock", lambda r: r.choice(["lock", "unlock"])),
    "unit": ("celsius|fahrenheit", lambda r: ""),
    "room": (
        "string",
        lambda r: r.choice(["kitchen", "bedroom", "living room", "bathroom", "garage", "hall", "office", "garden", words.noun(r)]),
    ),
    "tongue_zh": ("string", one_of("英语 法语 德语 日语 西班牙语 俄语 意大利语")),
    "city_zh": ("string", words.chinese_city),
    "person_zh": ("string", words.chinese_name),
    "money_zh": ("string", one_of("美元 欧元 日元 英镑 人民币 韩元 卢布")),
    "noun_zh": ("string", noun_zh_value),
    "clock_zh": ("string", clock_zh_value),
    "date_zh": ("string", date_zh_value),
    "message_zh": (
        "string",
        lambda r: choose(r, "(我晚点到|我到家了|生日快乐|{n}准备好了|带上{n}|在{n}见|别忘了{n}|我找到{n}了)").replace(
            "{n}", r.choice(words.chinese_nouns())
        ),
    ),
}
FREE = {"text", "query", "title", "message", "task", "message_zh"}  # may be any words: nothing stands behind such a value unmarked


@dataclass
class Tool:
    """`arguments`: key -> (names in the schema, kind). `questions` name them in braces, and may come with values that they
    only imply: ("double {x}", {"factor": "2"}). With `forms`, key -> how the value stands in a sentence, the questions are
    only intents, which tools.compose makes sentences of; those in `optional` are said more rarely."""

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


# How a value stands in a sentence: key | names of the argument | kind | forms
SLOTS = """
city | city town location place area region | city | in {} / in {} / in {} / in {} / in {} / at {} / near {} / for {} / around {}
from | from origin start departure source from_city | city | from {} / from {} / leaving {} / starting in {}
to | to destination target arrival to_city goal | city | to {} / to {} / going to {} / towards {}
place | place location address where destination | place | at {} / to {} / near {}
who | person name who user guest contact owner | person | for {} / with {} / of {} / under the name {}
recipient | to recipient contact person name | person | to {} / to {} / for {}
time | time at hour start when begin start_time | clock | at {} / at {} / at {} / for {} / by {} / from {}
until | until end end_time till | clock | until {} / till {} / ending at {}
date | date day when on | date | on {} / for {} / {} / {} / starting {}
title | title name label subject text | title | called {} / named {} / titled {} / called "{}" / with the title {}
topic | topic subject about query q keyword | query | about {} / on {} / for {} / about "{}" / regarding {}
item | item product name thing article | thing | of {} / for {} / of the {}
id | id code number key reference order_id | code | {} / number {} / with the id {} / with code {} / no. {}
user_id | id user_id number uid account | whole | {} / number {} / with id {} / #{}
count | count number quantity amount people guests n | few | for {} / for {} people / for {} persons / for {} of us
days | days nights duration length count | few | for {} days / for the next {} days / {} days
minutes | minutes duration length mins time | minutes | for {} minutes / of {} minutes / {} minutes / {} min / for {} min
amount | amount value sum price | number | of {} / for {}
limit | limit max_price budget max maximum | whole | under {} / below {} / up to {} / for less than {} / max {}
email | email address to mail | email | to {} / at {} / with the email {}
file | file path filename document name | file | {} / called {} / from {} / the file {}
room | room place where location zone | room | in the {} / in the {} / of the {}
level | level value percent volume brightness | percent | to {} / to {} percent / to {}% / at {}
degrees | temperature degrees value target | number | to {} / to {} degrees / at {} degrees
tongue | language lang target_language to tongue | tongue | in {} / into {} / to {}
food | cuisine food kind type style | food | with {} food / for {} food
color | color colour shade | color | in {} / in {} / to {}
unit | unit units scale | | in {} / in {} / in degrees {} / ({})
mode | mode type by | | by {} / {} mode / in {} mode / ({})
size | size | | in {} / size {} / in size {}
length | length size | | {} / kept {}
genre | genre type category | | {} / genre {}
role | role type rights | | as {} / as an {} / with the role {}
priority | priority importance level | | with {} priority / {} priority / priority {}
age | age years | few | aged {} / {} years old / age {}
rate | rate tip percent | percent | with {} percent / at {}% / {} percent
lang | language lang | tongue | in {} / in {}
currency | currency unit | currency | in {} / in {}
artist | artist singer band | person | by {} / by {} / from {}
episode | episode number nr | few | episode {} / number {}
note | note reason text | title | for {} / with the note {}
subject | subject title | title | with the subject {} / subject "{}"
km | distance km length | number | {} km / over {} km
account | account account_id iban | code | {} / of {} / for account {}
voice | voice speaker | | with a {} voice / in a {} voice / {} voice
style | style look | | in {} style / as a {}
"""


COMMON = set(
    "get set add find list make do new of to number numbers take save start show open who people person item file name how me".split()
)
STANDING = {key: (names, kind, forms.split(" / "))
            for key, names, kind, forms in (re.split(r" *\| *", line) for line in SLOTS.strip().splitlines())}


def slot_of(text: str, zh: bool) -> tuple[str, tuple[str, str], list[str], bool]:
    """`key=names:kind?` -> (key, (names in the schema, kind), forms, whether it is optional); the rest comes from SLOTS."""
    text, optional = text.rstrip("?"), text.endswith("?")
    text, _, kind = text.partition(":")
    key, _, names = text.partition("=")
    standing = STANDING.get(key, (key, "text", ["{}"]))
    kind = kind or standing[1]
    names = standing[0] if not names else "" if names == "-" else names.replace(",", " ")
    return key, (names, kind + "_zh" if zh and kind + "_zh" in KINDS else kind), ["{}"] if zh else standing[2], optional


def services(file: str, whole: bool = False) -> list[Tool]:
    """The services in a file, each two lines, and more where four spaces begin the next:

    label and words of other questions that it is for | names | descriptions | arguments: key, `=other,names`, `:kind`, `?` if
    it is optional | results, then under two spaces the intents, parted by ` / `, with `=>` what they imply. Of one label only
    one is offered; those under one heading are near relatives. `whole`: the questions are whole sentences, not intents."""
    tools: list[Tool] = []
    section, text = "", (Path(__file__).parent / file).read_text(encoding="utf-8")
    for line in text.replace("\n    ", " ").strip().splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif line.startswith("  "):
            tools[-1].questions = line.strip().split(" / ")
        else:
            label, names, descriptions, arguments, results = line.split(" | ")
            slots = [slot_of(text, words.chinese(label)) for text in arguments.split()]
            given = {key: argument for key, argument, _, _ in slots}
            tool = Tool(names, descriptions.split("; "), given, [], dict(pair.split(":") for pair in results.split()), label)
            if not whole:
                own = [word for word in re.split(r"\W|_", names.lower()) if len(word) > 2 and word not in COMMON]
                tool.topic = " ".join([*label.split(), *own, "sum" * (section == "sums")])
                tool.forms = {key: forms for key, _, forms, _ in slots}
                tool.optional = {key for key, _, _, optional in slots if optional}
                tool.label, tool.section = label.split()[0], section
            tools.append(tool)
    return tools


TOOLS = services("services.txt")
