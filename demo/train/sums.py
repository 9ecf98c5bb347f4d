"""Sums: with thinking the digits one column at a time, each step on a line of fixed width; without it, at once."""

import random

import words
from turns import Book, Turn, ask, is_held_out, language, plural

COLUMNS = ["ones", "tens", "hundreds"]
ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen").split()
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
        return DIGITS_ZH[n // 100] + "百" + ("" if not rest else ("零" if rest < 10 else "一" if rest < 20 else "")
                                            + in_words(rest, True))
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("-" + ONES[n % 10] if n % 10 else "")
    return ONES[n // 100] + " hundred" + (" and " + in_words(n % 100, False) if n % 100 else "")


def sum_turn(rng: random.Random, book: Book, largest: int = 1000, held_out: bool = False, lang: str | None = None,
             plus: bool | None = None) -> Turn:
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
    fill = dict(a=in_words(a, zh) if spelled else str(a), b=in_words(b, zh) if spelled else str(b), x=names[0],
                y=names[1], n=rng.choice(words.chinese_nouns()) if zh else plural(words.noun(rng)))
    result = a + b if plus else a - b
    return Turn("sums", ask(rng, book, key, **fill), f"{a} {'+' if plus else '-'} {b} = {result}.",
                addition_steps(a, b) if plus else subtraction_steps(a, b), [f"= {result}."])


def small_sum(rng: random.Random, book: Book) -> Turn:
    return sum_turn(rng, book, largest=100)


def beyond_sums(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    lang = language(rng) if lang is None else lang
    number = lambda: str(rng.randrange(10 ** rng.choice([1, 2, 3])))  # noqa: E731
    large = lambda: str(rng.randrange(1000, 10 ** rng.choice([4, 5, 6, 9])))  # noqa: E731
    question = ask(rng, book, "beyond_sums" + lang, a=number(), b=number(), f=number(), l=large(), m=large(),
                   d=words.decimal(rng), e=words.decimal(rng))
    answer = "我不知道，我只会三位数以内的加减法。" if lang else \
        "I don't know that. I can only add and subtract whole numbers up to three digits."
    return Turn("unknown", question, answer, "这个我没有学过。" if lang else "I have not learned this.",
                ["不知道" if lang else "don't know"])
