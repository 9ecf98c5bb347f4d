"""From a pattern to what a person types: words chosen, then other capitals, missing marks, typos, politeness."""

import random
import re

from words import chinese

CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
# What stands before and after a question, parted by |.
BEFORE = (
    "Please |Please, |Hey, |Hi! |Hello, |Quick question: |OK, |So, |And |Now |Question: |Well, |Um, |Excuse me, |"
    "Sorry, |Hi, |hey |One more: |Then |Listen, |By the way, |I wonder: |Also, |Hmm, |Alright, |One thing: |Oh, |"
    "Right, |Good, |Dear bot, |Hi there, |Another thing: "
).split("|")
BEFORE_QUESTION = (
    "Let me ask: |Here is a question: |I have a question: |For my homework: |For school: |Answer this: |Guess: |"
    "Try this: |My son asks: |Somebody asked me: |I need to know: |Do you know: |Can you tell me: |Can you say |"
    "Tell me, |Help me out, |Maybe you know: |I'd like to know, "
).split("|")
AFTER_QUESTION = (
    ", do you know?|, can you say?| Do you know?|, I forgot|, for school|, quick|, any guess?|"
    ", what do you think?| Answer me."
).split("|")
AFTER = (
    " please|, please| Please.| Thanks!| Thank you.| thanks| now| Tell me.| pls|, bro| again| I forgot.|"
    " Just asking.| if you can| :)| thx|, my friend|, thank you| ok?| today"
).split("|")
BEFORE_ZH = (
    "请问，|请问|你好，|那么，|嗯，|还有，|对了，|问一下，|麻烦问一下，|老师，|再问一个：|有个问题：|我想知道，|帮我看看，"
).split("|")
# Words that a person leaves out, or puts in, without meaning anything else.
LEFT_OUT = {"the", "a", "an", "is", "are", "do", "does", "please", "of"}
PUT_IN = "really just actually again now like maybe exactly um uh simply".split()
AFTER_ZH = ["谢谢。", "谢谢！", "呢", "啊", "呀", "请回答。", "快说。"]


def choose(rng: random.Random, pattern: str) -> str:
    """One alternative for every `(a|b|)`, the innermost first."""
    while found := CHOICE.search(pattern):
        pattern = pattern[: found.start()] + rng.choice(found[1].split("|")) + pattern[found.end() :]
    return " ".join(pattern.split()) if pattern.isascii() else pattern


def mistyped(rng: random.Random, word: str) -> str:
    """One letter swapped with the next, left out, doubled or replaced."""
    i = rng.randrange(1, len(word) - 1)
    swapped, other = word[:i] + word[i + 1] + word[i] + word[i + 2:], rng.choice("abcdefghijklmnopqrstuvwxyz")
    return rng.choice([swapped, word[:i] + word[i + 1:], word[:i] + word[i] + word[i:],
                       word[:i] + other + word[i + 1:], swapped])


def with_typo(rng: random.Random, template: str) -> str:
    """A typing error in one of the words of more than three letters."""
    words = template.split(" ")
    long = [i for i, word in enumerate(words) if len(word) > 3 and word.strip("?.,!:").isascii()
            and word.strip("?.,!:").isalpha()]
    if long:
        i = rng.choice(long)
        words[i] = mistyped(rng, words[i])
    return " ".join(words)


def reworded(rng: random.Random, template: str) -> str:
    """A small word left out, put in, or two words swapped; in Chinese, a particle."""
    if not template.isascii():
        return template.replace("的", "", 1) if rng.random() < 0.5 else \
            re.sub("(?=[是在用说叫])", rng.choice(["究竟", "都", "现在", "一般"]), template, count=1)
    words = template.split(" ")
    if len(words) < 4:
        return template
    kind, small = rng.random(), [i for i, word in enumerate(words) if word.lower() in LEFT_OUT]
    if kind < 0.5 and small:
        del words[rng.choice(small)]
    elif kind < 0.8:
        # before a value it could be taken for its first word
        between = [i for i in range(1, len(words)) if "{" not in words[i]]
        words.insert(rng.choice(between or [1]), rng.choice(PUT_IN))
    else:
        i = rng.randrange(len(words) - 1)
        if "{" not in words[i] + words[i + 1]:
            words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def with_manners(rng: random.Random, template: str) -> str:
    zh = chinese(template)
    asks = template.endswith("?") and not zh
    if rng.random() < 0.1:
        before = rng.choice(BEFORE_ZH if zh else BEFORE_QUESTION if asks and rng.random() < 0.5 else BEFORE)
        template = before + (template if zh or template[0] == "{"
                             or template.startswith("I ") else template[0].lower() + template[1:])
    if rng.random() < 0.06:
        after = rng.choice(AFTER_ZH if zh else AFTER_QUESTION if asks and rng.random() < 0.5 else AFTER)
        template = ((template.rstrip("?.!。？！") or template) if rng.random() < 0.5 else template) + after
    return template


def with_marks(rng: random.Random, template: str) -> str:
    kind = rng.random()
    if kind < 0.18:
        template = template.rstrip("?.!。？！") or template  # a question may be nothing but marks
    elif kind < 0.21:
        template = template.replace("?", rng.choice(["??", " ?", "?!", "."])).replace("？", rng.choice(["?", "？？", "。"]))
    elif kind < 0.23:
        template = template.replace(".", "!")
    if rng.random() < 0.1:
        template = re.sub(r"(?<!\})'", "", template)  # but for a value's: "Tekne's" is not "Teknes"
    return template.replace("？", "?") if rng.random() < 0.1 else template


def typed(
    rng: random.Random, pattern: str, fill: dict[str, str], copied: bool = False, cased: bool = True,
    framed: bool = True
) -> tuple[str, dict[str, str]]:
    """(the text, the values as they stand in it). `copied`: the values are to be said again, so they get no typing
    errors; `cased=False` keeps their capitals; `framed=False` puts no words in, which might seem a part of a value."""
    template = choose(rng, pattern)
    if template[0] != "{" and not (template[0].islower() and rng.random() < 0.6):
        template = template[0].upper() + template[1:]
    if framed:
        if rng.random() < 0.06:
            template = reworded(rng, template)
        template = with_manners(rng, template)
    for chance in (0.07, 0.01):
        if rng.random() < chance:
            template = with_typo(rng, template)
    template = with_marks(rng, template)
    kind = rng.random()
    change = str.lower if kind < 0.12 else str.upper if kind < 0.15 else \
        str.title if kind < 0.16 and "'" not in template else None
    if change:
        template = re.sub(r"[^{}]+|\{\w+\}", lambda part: part[0] if part[0].startswith("{") else change(part[0]),
                          template)
        if cased:
            fill = {name: change(value) for name, value in fill.items()}
    elif rng.random() < 0.06 and template[0] != "{":
        template = template[0].lower() + template[1:]
    if not copied and rng.random() < 0.08:
        present = [name for name in re.findall(r"\{(\w+)\}", template) if fill[name].isascii()]
        if present:
            name = rng.choice(present)
            wrong = rng.choice([str.upper, str.lower, lambda value: with_typo(rng, value),
                                lambda value: with_typo(rng, value)])
            fill = fill | {name: wrong(fill[name])}
    return re.sub(r"\{(\w+)\}", lambda part: fill[part[1]], template), fill
