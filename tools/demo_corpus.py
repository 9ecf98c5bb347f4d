"""The world of the bundled model: every text it is trained and tested on, generated here and nowhere else.

`conversation(rng)` draws one training example. Questions are worded by demo_questions.py in training and by
demo_heldout.py in the evaluation: every function that asks takes the `book` of wordings to choose from.
"""
import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import demo_tools
import demo_words as words
from demo_questions import CHAT, QUESTIONS, UNKNOWN, UNKNOWN_ZH
from demo_typing import choose, typed
from demo_words import an, capital

Book = dict[str, list[str]]


@dataclass
class Turn:
    """A question and its right answer. `expected`: strings, one of which a right answer contains."""
    skill: str
    question: str
    answer: str
    thought: str
    expected: list[str] = field(default_factory=list)


@dataclass
class Example:
    """A conversation whose assistant messages are all right, so that all are trained on."""
    messages: list[dict]
    tools: list[dict] | None = None
    enable_thinking: bool | None = None  # as apply_chat_template takes it; None is the default: thinking
    raw: str = ""  # plain text, instead of a conversation


def is_held_out(*key: object) -> bool:
    """True for the tenth of all keys that training never sees."""
    return hashlib.sha256(repr(key).encode()).digest()[0] % 10 == 0


def language(rng: random.Random) -> str:
    return "" if rng.random() < 0.65 else "_zh"


def ask(rng: random.Random, book: Book, key: str, **fill: str) -> str:
    return typed(rng, rng.choice(book[key]), fill)[0]


def sentence(text: str) -> str:
    """Names that begin with `the` begin a sentence with `The`."""
    return capital(text)


# ---------------------------------------------------------------------------------------------------------------------
# Countries
# ---------------------------------------------------------------------------------------------------------------------

ADJECTIVES = {"Europe": "European", "Asia": "Asian", "Africa": "African", "North America": "North American",
              "South America": "South American", "Oceania": "Oceanian"}


def joined(names: list[str], zh: bool) -> str:
    return "和".join(names) if zh else " and ".join(names)


def country_name(rng: random.Random, country: words.Country, zh: bool) -> str:
    """The name as somebody writes it: often an alias where there is one, sometimes without its article."""
    name = country.name[zh]
    if country.aliases[zh] and rng.random() < 0.4:
        name = rng.choice(country.aliases[zh])
    return name.removeprefix("the ") if rng.random() < 0.3 else name


def facts_of(country: words.Country, zh: bool) -> dict[str, tuple[str, str]]:
    """attribute -> (what is to be said, the sentence that says it)"""
    c, tongues = country.name[zh], joined([tongue[zh] for tongue in country.languages], zh)
    if zh:
        return {"capital": (country.capital[1], f"{c}的首都是{country.capital[1]}。"), "continent": (country.continent[1], f"{c}在{country.continent[1]}。"),
                "language": (tongues, f"{c}人说{tongues}。"), "currency": (country.currency[1], f"{c}的货币是{country.currency[1]}。")}
    return {"capital": (country.capital[0], f"The capital of {c} is {country.capital[0]}."), "continent": (country.continent[0], f"{sentence(c)} is in {country.continent[0]}."),
            "language": (tongues, f"People in {c} speak {tongues}."), "currency": (country.currency[0], f"The currency of {c} is the {country.currency[0]}.")}


def plain_fact(rng: random.Random, book: Book, lang: str, attribute: str, key: str | None = None) -> Turn:
    """`key` asks in other words than the attribute's own: "And in Spain?" after a question about France."""
    zh, country = lang == "_zh", words.country(rng)
    value, says = facts_of(country, zh)[attribute]
    c = country_name(rng, country, zh)
    if attribute in ("language", "currency") and key is None and rng.random() < 0.05:
        c = country.capital[zh]  # "What do people speak in Paris?"
    question = ask(rng, book, (key or attribute) + lang, c=c)
    return Turn("facts", question, says, f"{country.name[zh]}: {value}", [value])


def fact_and_more(rng: random.Random, book: Book) -> list[Turn]:
    """The same of one country and of others."""
    lang, attribute = language(rng), rng.choice(["capital", "capital", "continent", "language", "currency"])
    return [plain_fact(rng, book, lang, attribute), *(plain_fact(rng, book, lang, attribute, "more") for _ in range(rng.choice([1, 1, 2])))]


def about(rng: random.Random, book: Book, lang: str) -> Turn:
    zh, country = lang == "_zh", words.country(rng)
    facts = facts_of(country, zh)
    c, (city, money) = country.name[zh], (facts["capital"][0], facts["currency"][0])
    answer = (f"{c}在{country.continent[1]}，首都是{city}。人们说{facts['language'][0]}，用{money}。" if zh else
              f"{sentence(c)} is a country in {country.continent[0]}. Its capital is {city}. People speak {facts['language'][0]} and pay with the {money}.")
    return Turn("facts", ask(rng, book, "about" + lang, c=country_name(rng, country, zh)), answer, f"{c}: {country.continent[zh]}", [city])


def by_capital(rng: random.Random, book: Book, lang: str) -> Turn:
    """The country of a capital. A name that two countries share (Georgetown, Victoria, ...) does not occur in the list."""
    zh, country = lang == "_zh", words.country(rng)
    key = rng.choice(["capital_of", "capital_of", "where_city"])
    v, c = country.capital[zh], country.name[zh]
    return Turn("facts", ask(rng, book, key + lang, v=v), f"{v}是{c}的首都。" if zh else f"{v} is the capital of {c}.", f"{v}: {c}", [c])


def yes_no(rng: random.Random, book: Book, lang: str) -> Turn:
    zh, country, attribute = lang == "_zh", words.country(rng), rng.choice(["capital", "continent", "continent", "language", "currency"])
    other = rng.choice(words.countries())
    own = {"capital": [country.capital], "continent": [country.continent], "language": list(country.languages), "currency": [country.currency]}[attribute]
    theirs = {"capital": other.capital, "continent": other.continent, "language": other.languages[0], "currency": other.currency}[attribute]
    right = rng.random() < 0.5 or theirs in own or theirs[0] in country.spoken
    v = rng.choice(own) if right else theirs
    asked = v[zh]
    if attribute == "currency" and not zh and country.currency[0].split()[-1] != other.currency[0].split()[-1] and rng.random() < 0.5:
        asked = v[0].split()[-1]
    question = ask(rng, book, f"yes_{attribute}{lang}", c=country_name(rng, country, zh), v=asked, j=ADJECTIVES.get(v[0], ""))
    value, says = facts_of(country, zh)[attribute]
    answer = ("是的，" if right else "不，") + says if zh else ("Yes, " if right else "No, ") + (says if says.startswith(country.name[0]) else lower_start(says))
    return Turn("facts", question, answer, f"{country.name[zh]}: {value}",
                [("是的，" if right else "不，") if zh else "Yes," if right else "No,"])


def lower_start(text: str) -> str:
    return text[0].lower() + text[1:] if text.startswith(("The ", "People ")) else text


def countries_in(rng: random.Random, book: Book, lang: str) -> Turn:
    """Answers with the continent's largest countries, which are what people think of."""
    zh, name = lang == "_zh", rng.choice(list(ADJECTIVES))
    largest = sorted((c for c in words.countries() if c.continent[0] == name), key=lambda c: -c.population)
    continent = largest[0].continent
    v, several = continent[zh], rng.random() < 0.4
    question = ask(rng, book, ("name_countries" if several else "name_country") + lang, v=v, j=ADJECTIVES[continent[0]])
    if several:
        a, b, c = (country.name[zh] for country in largest[:3])
        answer = f"{a}、{b}和{c}在{v}。" if zh else f"{sentence(a)}, {b} and {c} are in {v}."
        return Turn("facts", question, answer, f"{v}: {a}", [a])
    a = rng.choice(largest[:4]).name[zh]
    return Turn("facts", question, f"{a}在{v}。" if zh else f"{sentence(a)} is in {v}.", f"{v}: {a}", [c.name[zh] for c in largest])


def by_property(rng: random.Random, book: Book, lang: str) -> Turn:
    """The largest country with a language or a currency."""
    zh, country = lang == "_zh", words.country(rng)
    if rng.random() < 0.5:
        v = rng.choice(country.languages)
        having = [c for c in words.countries() if v in c.languages]
        c = max(having, key=lambda c: c.population * (c.languages[0] == v) + 1).name[zh]
        answer, key = (f"{c}人说{v[1]}。" if zh else f"People in {c} speak {v[0]}."), "speaks"
    else:
        v = country.currency
        having = [c for c in words.countries() if v == c.currency]
        c = max(having, key=lambda c: c.population).name[zh]
        answer, key = (f"{c}用{v[1]}。" if zh else f"{sentence(c)} uses the {v[0]}."), "uses"
    return Turn("facts", ask(rng, book, key + lang, v=v[zh]), answer, f"{v[zh]}: {c}", [c.name[zh] for c in having])


def fact(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    kind = rng.choices(["capital", "continent", "language", "currency", about, by_capital, yes_no, countries_in, by_property],
                       [22, 9, 9, 9, 8, 14, 17, 4, 8])[0]
    lang = language(rng) if lang is None else lang
    return plain_fact(rng, book, lang, kind) if isinstance(kind, str) else kind(rng, book, lang)


# ---------------------------------------------------------------------------------------------------------------------
# Sums: with thinking the digits one column at a time, each step on a line of fixed width; without it, at once
# ---------------------------------------------------------------------------------------------------------------------

COLUMNS = ["ones", "tens", "hundreds"]
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
DIGITS_ZH = "零一二三四五六七八九"


def addition_steps(a: int, b: int) -> str:
    x, y, carry = f"{a:03}", f"{b:03}", 0
    lines = [f"{x} + {y}"]
    for column, i in zip(COLUMNS, (2, 1, 0)):
        total = int(x[i]) + int(y[i]) + carry
        lines.append(f"{column}: {x[i]}+{y[i]}+{carry}={total:02}")
        carry = total // 10
    return "\n".join([*lines, f"digits: {a + b:04}"])


def subtraction_steps(a: int, b: int) -> str:
    x, y, borrow = f"{max(a, b):03}", f"{min(a, b):03}", 0
    lines = [f"{a:03} - {b:03}", f"{x} is larger: {x} - {y}" if a != b else f"equal: {x} - {y}"]
    for column, i in zip(COLUMNS, (2, 1, 0)):
        digit = int(x[i]) - int(y[i]) - borrow
        before, borrow = borrow, int(digit < 0)
        lines.append(f"{column}: {x[i]}-{y[i]}-{before}={digit % 10} borrow {borrow}")
    return "\n".join([*lines, f"digits: {'-' if a < b else ''}{abs(a - b):03}"])


def in_words(n: int, zh: bool) -> str:
    if zh and n < 100:
        tens = "" if n < 10 else ("" if n < 20 else DIGITS_ZH[n // 10]) + "十"
        return tens + (DIGITS_ZH[n % 10] if n % 10 or not n else "")
    if zh:
        rest = n % 100
        return DIGITS_ZH[n // 100] + "百" + ("" if not rest else ("零" if rest < 10 else "一" if rest < 20 else "") + in_words(rest, True))
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("-" + ONES[n % 10] if n % 10 else "")
    return ONES[n // 100] + " hundred" + (" and " + in_words(n % 100, False) if n % 100 else "")


def sum_turn(rng: random.Random, book: Book, largest: int = 1000, held_out: bool = False, lang: str | None = None, plus: bool | None = None) -> Turn:
    lang = language(rng) if lang is None else lang
    plus = rng.random() < 0.5 if plus is None else plus
    while True:
        a, b = (rng.randrange(min(largest, rng.choice([10, 100, 100, 1000, 1000, 1000]))) for _ in range(2))
        if is_held_out("sum", a, b, plus) == held_out:
            break
    told = rng.random() < 0.2 and (plus or a >= b)
    spelled = rng.random() < 0.15 and (a < 100 or rng.random() < 0.3)
    zh = lang == "_zh"
    key = ("tale_" if told else "") + ("add" if plus else "subtract") + lang
    names = [words.chinese_name(rng) if zh else words.name(rng) for _ in range(2)]
    fill = dict(a=in_words(a, zh) if spelled else str(a), b=in_words(b, zh) if spelled else str(b), x=names[0], y=names[1],
                n=rng.choice(words.chinese_nouns()) if zh else plural(words.noun(rng)))
    result = a + b if plus else a - b
    return Turn("sums", ask(rng, book, key, **fill), f"{a} {'+' if plus else '-'} {b} = {result}.",
                addition_steps(a, b) if plus else subtraction_steps(a, b), [f"= {result}."])


def small_sum(rng: random.Random, book: Book) -> Turn:
    return sum_turn(rng, book, largest=100)


def beyond_sums(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    lang = language(rng) if lang is None else lang
    number = lambda: str(rng.randrange(10 ** rng.choice([1, 2, 3])))  # noqa: E731
    large = lambda: str(rng.randrange(1000, 10 ** rng.choice([4, 5, 6, 9])))  # noqa: E731
    question = ask(rng, book, "beyond_sums" + lang, a=number(), b=number(), f=number(), l=large(), m=large(), d=words.decimal(rng), e=words.decimal(rng))
    answer = "我不知道，我只会三位数以内的加减法。" if lang else "I don't know that. I can only add and subtract whole numbers up to three digits."
    return Turn("unknown", question, answer, "这个我没有学过。" if lang else "I have not learned this.", ["不知道" if lang else "don't know"])


# ---------------------------------------------------------------------------------------------------------------------
# Small talk, repeating, and where the world ends
# ---------------------------------------------------------------------------------------------------------------------

UNKNOWN_ANSWER = {"": "I don't know that. I am only a very small model.", "_zh": "这个我不知道。我只是一个很小的模型。"}
YEARS = ["1789", "1914", "1945", "1969", "2001", "2024", "1066", "1492"]
TONGUES = ["French", "German", "Spanish", "English", "Chinese", "Latin", "Japanese", "Italian", "Russian", "Dutch"]


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def chat(rng: random.Random, book: dict[str, list[str]] = CHAT) -> Turn:
    answer = rng.choice([*book, *(a for a in book if not words.chinese(a))])
    return Turn("chat", typed(rng, rng.choice(book[answer]), {})[0], answer, "闲聊。" if words.chinese(answer) else "Small talk.", [answer])


def unknown(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    lang = language(rng) if lang is None else lang
    zh = lang == "_zh"
    if zh:
        fill = dict(n=rng.choice(words.chinese_nouns()), o=rng.choice(words.chinese_nouns()), x=words.chinese_name(rng), k=words.chinese_city(rng),
                    w=rng.choice([rng.choice(words.countries()).name[1], words.chinese_city(rng), "世界"]))
    else:
        fill = dict(n=words.noun(rng), o=words.noun(rng), q=plural(words.noun(rng)), a=rng.choice(words.english("adjective")), v=rng.choice(words.english("verb")),
                    x=rng.choice([words.name(rng), f"{words.name(rng)} {words.name(rng)}", capital(words.invented(rng)), words.invented(rng), rng.choice(words.lists()["cities"])]),
                    k=words.city(rng), w=rng.choice([rng.choice(words.countries()).name[0], words.country(rng).name[0], words.city(rng)]), i=rng.choice(YEARS), y=rng.choice(TONGUES),
                    z=" ".join(words.noun(rng) for _ in range(rng.randint(2, 6))))
    return Turn("unknown", ask(rng, book, "unknown" + lang, **fill), UNKNOWN_ANSWER[lang], "这个我没有学过。" if zh else "I have not learned this.",
                ["不知道" if zh else "don't know"])


def repeat(rng: random.Random, book: Book) -> Turn:
    """Words to be said again: the shortest practice in copying, which remembering and tools rest on."""
    zh = rng.random() < 0.3
    draw = [words.chinese_name, lambda r: r.choice(words.chinese_nouns()), words.whole] if zh else [
        words.name, words.invented, words.whole, words.noun, words.city, words.clock, words.decimal]
    said = rng.choice(["", "，"] if zh else [" ", " ", ", "]).join(rng.choice(draw)(rng) for _ in range(rng.randint(1, 6)))
    question, fill = typed(rng, rng.choice(book["repeat_zh" if zh else "repeat"]), {"w": said}, copied=True)
    return Turn("repeat", question, fill["w"], "我来重复。" if zh else "I repeat it.", [fill["w"]])


# ---------------------------------------------------------------------------------------------------------------------
# Stories: a frame of few words around a subject that may be anything
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Subject:
    asked: str  # as the question names it: "a fox", "two foxes", "my uncle"
    first: str  # as the story introduces it
    then: str  # as it goes on
    core: str  # what the story must mention
    many: bool = False


STORY = ["Once upon a time there (was|were) {first} in {place}. ", "{name_s} was {trait}. "]
PLACES = ["a green forest", "a small village", "a big city", "an old house", "a quiet garden", "a far country", "a little town", "a warm valley"]
MOODS = ["very lonely", "always hungry", "very curious", "never afraid", "small but brave", "tired of the rain", "kind to everyone"]
GOALS = ["the sea", "the high mountain", "the moon", "the old castle", "the end of the road", "the great river", "the market"]
EVENTS = [
    "One day {then} went out to find {goal}. The way was long, and a storm came. A {helper} showed the way with a lamp. ",
    "One morning {then} heard a song from {goal}. It was a {helper} that sang all alone. They sang together until the evening. ",
    "One night {then} lost a golden key on the way to {goal}. A {helper} looked for it until the sun came up, and found it in the grass. ",
    "In winter there was nothing to eat. A {helper} came from {goal} with warm bread and shared it with {then}. ",
    "Nobody had ever seen {goal}, so {then} built a little boat. In the middle of the river a {helper} was in danger, and {then} saved it. ",
    "A {helper} said: \"There is a treasure at {goal}!\" So {then} walked for seven days. The treasure was a box full of stars. "]
ENDINGS = ["From that day on they were friends. The end.", "Then {then} went home and slept well. The end.", "And {then} never forgot that day. The end.",
           "In the evening they danced and laughed. The end."]
HELPERS = ["fox", "bear", "mouse", "owl", "frog", "duck", "girl", "boy"]
PLACES_ZH = ["森林里", "小村子里", "大城市里", "老房子里", "花园里", "海边", "山上"]
MOODS_ZH = ["很孤单", "很好奇", "很勇敢", "总是很饿", "对大家都很好"]
GOALS_ZH = ["大海", "高山", "月亮", "古堡", "大河"]
HELPERS_ZH = ["狐狸", "小熊", "小鸟", "女孩", "青蛙"]
EVENTS_ZH = [
    "有一天，{s}想去看{goal}。路很远，还下起了大雨。一只{helper}提着灯来带路。", "一天早上，{s}听见{goal}那边有歌声。原来是{helper}在唱歌，他们一起唱到晚上。",
    "一天夜里，{s}在去{goal}的路上丢了一把金钥匙。{helper}找了很久，终于在草地里找到了。", "冬天没有吃的东西。{helper}从{goal}带来了热面包，和{s}一起吃。",
    "没有人见过{goal}，所以{s}造了一条小船。河中间{helper}遇到了危险，{s}救了它。"]
ENDINGS_ZH = ["从那天起，他们成了好朋友。故事讲完了。", "后来{s}高兴地回家了。故事讲完了。", "{s}永远记得那一天。故事讲完了。"]


def subject(rng: random.Random) -> Subject:
    noun = words.noun(rng) if rng.random() < 0.8 else words.invented(rng)
    kind = rng.random()
    if kind < 0.12:
        name = words.name(rng)
        return Subject(name, name, name, name)
    if kind < 0.24:
        number = rng.choice(["two", "three", "", "many", "four", "some", "five"])
        return Subject(f"{number} {plural(noun)}".strip(), f"{number or 'many'} {plural(noun)}", f"the {plural(noun)}", plural(noun), True)
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
    text = f"Once upon a time there {be} {s.first} in {rng.choice(PLACES)}. {capital(s.then)} {be} {rng.choice(MOODS)}. "
    return text + (rng.choice(EVENTS) + rng.choice(ENDINGS)).format(**fill)


def tell_zh(rng: random.Random, s: str) -> str:
    text = f"从前，{rng.choice(PLACES_ZH)}有{s}。{s}{rng.choice(MOODS_ZH)}。"
    return text + (rng.choice(EVENTS_ZH) + rng.choice(ENDINGS_ZH)).format(s=s, goal=rng.choice(GOALS_ZH), helper=rng.choice(HELPERS_ZH))


def story(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    lang = language(rng) if lang is None else lang
    free = rng.random() < 0.06
    if lang:
        s = rng.choice(words.chinese_nouns()) if rng.random() < 0.8 else words.chinese_name(rng)
        question = ask(rng, book, "any_story_zh") if free else ask(rng, book, "story_zh", s=rng.choice(["", "", "一个", "一只"]) + s)
        return Turn("stories", question, tell_zh(rng, "小猫" if free else s), "故事：" + ("小猫" if free else s), ["小猫" if free else s])
    s = Subject("a cat", "a cat", "the cat", "cat") if free else subject(rng)
    question, fill = typed(rng, rng.choice(book["any_story" if free else "story"]), {"s": s.asked, "t": s.core}, copied=True, cased=False)
    return Turn("stories", question, tell(rng, s), f"A story about {s.first}.", [s.core])


# ---------------------------------------------------------------------------------------------------------------------
# Remembering: something told, perhaps corrected, other things in between, then the question
# ---------------------------------------------------------------------------------------------------------------------

PETS = "cat dog rabbit horse parrot hamster fish turtle bird pony snake mouse puppy kitten goldfish".split()
PETS_ZH = "猫 狗 兔子 马 鹦鹉 仓鼠 鱼 乌龟 鸟 小猫 小狗".split()
RELATIVES = "sister brother friend mother father wife husband son daughter uncle aunt cousin boss teacher neighbour neighbor doctor girlfriend boyfriend partner roommate colleague grandmother grandfather baby".split()
RELATIVES_ZH = "妹妹 哥哥 姐姐 弟弟 朋友 妈妈 爸爸 妻子 丈夫 儿子 女儿 叔叔 老师 邻居 老板 同学 同事 爷爷 奶奶".split()
COLORS = "red blue green yellow black white purple orange pink brown grey gold silver turquoise violet".split()
COLORS_ZH = "红色 蓝色 绿色 黄色 黑色 白色 紫色 橙色 粉色 棕色 灰色 金色".split()
LIKED = "color colour color colour food animal book film movie sport fruit city song game drink season day subject flower band country hobby dish team toy car".split()
LIKED_ZH = "颜色 颜色 食物 动物 书 电影 运动 水果 城市 歌 游戏 饮料 季节 花 菜 科目 国家".split()
KINDS = ["name", "name", "pet", "pet", "city", "number", "age", "friend", "favourite", "favourite", "thing"]
# What the assistant says: once when it is told, once when it is asked.
SAYS = {"name": "your name is {m}", "pet": "your {p} is called {m}", "city": "you live in {m}", "number": "the number is {m}", "age": "you are {m} years old",
        "friend": "your {r} is called {m}", "favourite": "your favourite {n} is {m}", "thing": "your {n} is {m}"}
SAYS_ZH = {"name": "你叫{m}", "pet": "你的{p}叫{m}", "city": "你住在{m}", "number": "数字是{m}", "age": "你{m}岁", "friend": "你的{r}叫{m}",
           "favourite": "你最喜欢的{n}是{m}", "thing": "你的{n}是{m}"}


@dataclass
class Memory:
    """One thing that a person tells: its kind, what it belongs to, its value."""
    kind: str
    lang: str
    fill: dict[str, str]

    def key(self) -> tuple:
        return self.kind, {"pet": self.fill["p"], "friend": self.fill["r"], "favourite": self.fill["n"], "thing": self.fill["n"]}.get(self.kind)


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
        draw = [lambda r: r.choice(words.chinese_nouns()), words.chinese_name, lambda r: r.choice(COLORS_ZH)] if zh else [
            words.noun, words.noun, words.name, words.invented, lambda r: r.choice(COLORS), words.whole]
        return rng.choice(draw)(rng)
    return words.chinese_name(rng) if zh and rng.random() < 0.9 else words.name(rng)


def memory(rng: random.Random, lang: str, kind: str | None = None) -> Memory:
    zh, kind = lang == "_zh", kind or rng.choice(KINDS)
    n = rng.choice(LIKED_ZH if zh else LIKED) if kind == "favourite" and rng.random() < 0.8 else rng.choice(words.chinese_nouns()) if zh else words.noun(rng)
    m, o = (value_of(rng, kind, n, zh) for _ in range(2))
    return Memory(kind, lang, dict(m=m, o=o, n=n, p=rng.choice(PETS_ZH if zh else PETS), r=rng.choice(RELATIVES_ZH if zh else RELATIVES),
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
    return Turn("memory", question, answer, "我要记住。" if thing.lang else "I will remember this.", [thing.fill["m"]])


def said(thing: Memory) -> str:
    return (SAYS_ZH if thing.lang else SAYS)[thing.kind].format(**thing.fill)


def asked(rng: random.Random, book: Book, thing: Memory) -> Turn:
    question = ask(rng, book, f"ask_{thing.kind}{thing.lang}", **thing.fill)
    m = thing.fill["m"]
    return Turn("memory", question, said(thing) + "。" if thing.lang else capital(said(thing)) + ".", f"我听说过：{m}" if thing.lang else f"I was told: {m}", [m])


def never_told(rng: random.Random, book: Book, thing: Memory) -> Turn:
    question = ask(rng, book, f"ask_{thing.kind}{thing.lang}", **thing.fill)
    return Turn("memory", question, "你没有告诉我。" if thing.lang else "You have not told me that.", "我没有听说过。" if thing.lang else "I was not told.",
                ["没有告诉" if thing.lang else "not told"])


def remembering(rng: random.Random, book: Book) -> list[Turn]:
    """Up to three things told, some corrected, asked for in any order, other turns between."""
    lang = language(rng)
    things: dict[tuple, Memory] = {}
    for _ in range(rng.choice([1, 1, 2, 3])):
        thing = memory(rng, lang)
        things.setdefault(thing.key(), thing)
    turns = []
    fillers = rng.choice([0, 0, 1, 1, 2, 3, 5, 8])
    for thing in things.values():
        turns.append(told(rng, book, thing, "tell"))
        if len(turns) > 1 and rng.random() < 0.25:
            turns[-2:] = [merged(turns[-2], turns[-1], bool(lang))]
    if len(things) == 1 and rng.random() < 0.06:
        question = asked(rng, book, next(iter(things.values())))
        return [Turn("memory", f"{turns[0].question} {question.question}", question.answer, question.thought, question.expected)]
    for thing in things.values():
        turns += [filler(rng) for _ in range(rng.choice([0, fillers]) if len(turns) < 9 else 0)]
        if rng.random() < 0.25:
            thing.fill["o"] = thing.fill["m"]
            thing.fill["m"] = value_of(rng, thing.kind, thing.fill["n"], bool(lang))
            turns.append(told(rng, book, thing, "fix"))
    for thing in rng.sample(list(things.values()), len(things)):
        turns.append(asked(rng, book, thing))
    missing = memory(rng, lang)
    if missing.key() not in things and rng.random() < 0.15:
        turns.append(never_told(rng, book, missing))
    return turns


def merged(one: Turn, two: Turn, zh: bool) -> Turn:
    """Two things told in one message, as two sentences or, where the second begins with I or my, as one."""
    between = "" if zh else " "
    question = f"{one.question}{between}{two.question}"
    if not zh and one.question.endswith(".") and two.question.startswith(("I ", "I'm ", "My ")):
        question = f"{one.question[:-1]} and {two.question[0] if two.question[0] == 'I' else 'm'}{two.question[1:]}"
    return Turn("memory", question, one.answer + between + two.answer, one.thought, two.expected)


def filler(rng: random.Random) -> Turn:
    """A short turn about something else."""
    return rng.choice([fact, fact, small_sum, unknown, lambda r, _: chat(r)])(rng, QUESTIONS)


def unhelped(rng: random.Random, use: demo_tools.ToolUse) -> Turn:
    """A turn that none of the offered tools is for."""
    while True:
        turn = filler(rng)
        text = turn.question.lower()
        if not ("sum" in use.topics and any(char.isdigit() for char in text)) and not any(topic in text for topic in use.topics.split()):
            return turn


# ---------------------------------------------------------------------------------------------------------------------
# Putting it together
# ---------------------------------------------------------------------------------------------------------------------

SYSTEM_PROMPTS = [
    "You are a (helpful|friendly|useful|polite|kind|smart|small|honest|funny|careful) (|AI |digital |chat )(assistant|helper|model|bot).", "You are a helpful assistant.", "(Be|Please be|Always be) (brief|kind|short|polite|precise|honest|friendly).",
    "You are (a|an) {n}.", "You are {m}(|, an assistant).", "(Answer|Reply|Respond) (the question|in one sentence|briefly|in English|politely|shortly|with facts|like a {n}).", "You are an expert( on {n}|).", "You (help|work) (with|for) {n}.", "Today is a {n} day.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "Talk like a {n}.", "Never talk about {n}.", "你是一个(有用|友好|聪明)的(助手|机器人)。", "请(简短|用中文)回答。"]
SKILLS: dict[Callable[[random.Random], list[Turn]], float] = {
    lambda rng: [fact(rng, QUESTIONS) for _ in range(rng.choice([1, 1, 2, 3, 4]))]: 23,
    lambda rng: fact_and_more(rng, QUESTIONS): 3,
    lambda rng: [sum_turn(rng, QUESTIONS)]: 10,
    lambda rng: [small_sum(rng, QUESTIONS) for _ in range(rng.choice([2, 4, 6, 8]))]: 11,
    lambda rng: remembering(rng, QUESTIONS): 17,
    lambda rng: [story(rng, QUESTIONS)]: 6,
    lambda rng: [rng.choice([unknown, unknown, unknown, unknown, beyond_sums])(rng, QUESTIONS) for _ in range(rng.choice([1, 2, 3]))]: 8,
    lambda rng: [chat(rng) for _ in range(rng.choice([1, 2]))]: 3,
    lambda rng: [repeat(rng, QUESTIONS) for _ in range(rng.choice([1, 2, 3]))]: 5,
    lambda rng: [filler(rng) for _ in range(rng.choice([2, 3, 4]))]: 3,
}
TOOL_SHARE, RAW_SHARE = 0.18, 0.015
QUESTIONS["unknown"], QUESTIONS["unknown_zh"] = UNKNOWN, UNKNOWN_ZH


def system_prompt(rng: random.Random) -> str:
    return choose(rng, rng.choice(SYSTEM_PROMPTS)).replace("{n}", words.noun(rng)).replace("{m}", words.name(rng))


def messages_of(turns: list[Turn]) -> list[dict]:
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return messages


def raw_text(rng: random.Random) -> str:
    """Plain text for `--raw`: sentences about countries, and stories."""
    if rng.random() < 0.3:
        return story(rng, QUESTIONS).answer
    zh = rng.random() < 0.3
    return ("" if zh else " ").join(rng.choice(list(facts_of(words.country(rng), zh).values()))[1] for _ in range(rng.choice([1, 2, 3])))


def conversation(rng: random.Random) -> Example:
    """One drawing from the whole mixture."""
    if rng.random() < RAW_SHARE:
        return Example([], raw=raw_text(rng))
    tools = None
    if rng.random() < TOOL_SHARE:
        use = demo_tools.tool_use(rng)
        tools = use.offered
        if rng.random() < 0.25:  # a question that none of the tools answers
            turns = [unhelped(rng, use) for _ in range(rng.choice([1, 1, 2]))]
            messages = messages_of(turns)
            messages[-1]["reasoning_content"] = turns[-1].thought
        else:
            messages = (messages_of([unhelped(rng, use)]) if rng.random() < 0.15 else []) + use.messages()
    else:
        turns = rng.choices(list(SKILLS), list(SKILLS.values()))[0](rng)
        messages = messages_of(turns)
        messages[-1]["reasoning_content"] = turns[-1].thought
        if turns[-1].skill == "memory" and rng.random() < 0.08:
            tools = demo_tools.tool_use(rng).offered
    drawn = Example(messages, tools)
    asking = [message for message in messages if message["role"] == "user"][-1]
    # The thinking switch: off more rarely for the long sums, where the steps are what there is to learn.
    long_sum = "digits:" in messages[-1].get("reasoning_content", "")
    mode = rng.random()
    if mode < (0.2 if long_sum and len(messages) == 2 else 0.45):
        drawn.enable_thinking = False
        for message in messages:
            message.pop("reasoning_content", None)
        calls = [i for i, message in enumerate(messages) if "tool_calls" in message]
        if calls and rng.random() < 0.5:  # the call is what the model says now: an empty thought stands before it
            del messages[calls[0] + 1:]
    elif mode > 0.97:
        asking["content"] += " /no_think"
        for message in messages:
            message["reasoning_content"] = ""
    elif mode > 0.95:
        asking["content"] += " /think"
    if rng.random() < 0.15:
        messages.insert(0, {"role": "system", "content": system_prompt(rng)})
    return drawn
