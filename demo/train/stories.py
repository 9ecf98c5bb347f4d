"""Stories: a frame of few words around a subject that may be anything."""

import random
from dataclasses import dataclass

import words
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


PLACES = ["a green forest", "a small village", "a big city", "an old house", "a quiet garden", "a far country",
          "a little town", "a warm valley"]
MOODS = ["very lonely", "always hungry", "very curious", "never afraid", "small but brave", "tired of the rain",
         "kind to everyone"]
GOALS = ["the sea", "the high mountain", "the moon", "the old castle", "the end of the road", "the great river",
         "the market"]
EVENTS = [
    "One day {then} went out to find {goal}. The way was long, and a storm came. A {helper} showed the way with a lamp. ",
    "One morning {then} heard a song from {goal}. It was a {helper} that sang all alone. They sang together until the evening. ",
    "One night {then} lost a golden key on the way to {goal}. A {helper} looked for it until the sun came up, and found it in the grass. ",
    "In winter there was nothing to eat. A {helper} came from {goal} with warm bread and shared it with {then}. ",
    "Nobody had ever seen {goal}, so {then} built a little boat. In the middle of the river a {helper} was in danger, and {then} saved it. ",
    'A {helper} said: "There is a treasure at {goal}!" So {then} walked for seven days. The treasure was a box full of stars. ',
]
ENDINGS = [
    "From that day on they were friends. The end.",
    "Then {then} went home and slept well. The end.",
    "And {then} never forgot that day. The end.",
    "In the evening they danced and laughed. The end.",
]
HELPERS = ["fox", "bear", "mouse", "rabbit", "frog", "duck", "girl", "boy"]
PLACES_ZH = ["森林里", "小村子里", "大城市里", "老房子里", "花园里", "海边", "山上"]
MOODS_ZH = ["很孤单", "很好奇", "很勇敢", "总是很饿", "对大家都很好"]
GOALS_ZH = ["大海", "高山", "月亮", "古堡", "大河"]
HELPERS_ZH = ["狐狸", "小熊", "小鸟", "女孩", "青蛙"]
EVENTS_ZH = [
    "有一天，{s}想去看{goal}。路很远，还下起了大雨。一只{helper}提着灯来带路。",
    "一天早上，{s}听见{goal}那边有歌声。原来是{helper}在唱歌，他们一起唱到晚上。",
    "一天夜里，{s}在去{goal}的路上丢了一把金钥匙。{helper}找了很久，终于在草地里找到了。",
    "冬天没有吃的东西。{helper}从{goal}带来了热面包，和{s}一起吃。",
    "没有人见过{goal}，所以{s}造了一条小船。河中间{helper}遇到了危险，{s}救了它。",
]
ENDINGS_ZH = ["从那天起，他们成了好朋友。故事讲完了。", "后来{s}高兴地回家了。故事讲完了。", "{s}永远记得那一天。故事讲完了。"]


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
    text = f"Once upon a time there {be} {s.first} in {rng.choice(PLACES)}. {capital(s.then)} {be} {rng.choice(MOODS)}. "
    return text + (rng.choice(EVENTS) + rng.choice(ENDINGS)).format(**fill)


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
