"""qwen3_lib/app/wrap.py: lines broken between words."""
import random
import textwrap

import pytest

from qwen3_lib.app.wrap import WORD_ROOM, Wrap, char_width, wrapped

WORDS = ["a", "fox", "it's", "(once)", "Wirtschaftsprüfer", "naïve", "法国", "的首都是巴黎，", "「日本」。", "한국어", "👋🏽",
         "👩\u200d👩\u200d👧", "e\u0301", "x" * WORD_ROOM, "https://example.org/" + "y" * 100]


def width_of(line: str) -> int:
    return sum(map(char_width, line))


def random_text(rng: random.Random) -> str:
    spaces = [" ", " ", " ", "  ", "\n", "\n\n", ""]
    return "".join(rng.choice(WORDS) + rng.choice(spaces) for _ in range(rng.randrange(60)))


@pytest.mark.parametrize("width", [20, 60, 120])
def test_plain_words_are_broken_as_textwrap_breaks_them(width):
    rng = random.Random(width)
    for _ in range(50):
        words = ["".join(rng.choices("abcdefgh.", k=rng.randint(1, 19))) for _ in range(100)]
        lines = wrapped(" ".join(words), width).split("\n")
        assert [line.rstrip() for line in lines] == textwrap.wrap(" ".join(words), width, break_on_hyphens=False)


@pytest.mark.parametrize("seed", range(10))
def test_any_text_in_any_pieces(seed):
    """Pieces change nothing; nothing is lost but spaces at the end of a line; only what can't be broken is longer."""
    rng = random.Random(seed)
    text, width = random_text(rng), rng.choice([0, 1, 2, 10, 39, 40, 41, 80])
    wrap, out, at = Wrap(lambda: width), "", 0
    while at < len(text):
        n = rng.randint(1, 9)
        out, at = out + wrap.feed(text[at:at + n]), at + n
    out += wrap.flush()
    assert out == wrapped(text, width) and "".join(out.split()) == "".join(text.split())
    if width == 0:
        assert out == text
    for line in out.split("\n") if width >= 40 else []:
        assert width_of(line) <= width or "x" * WORD_ROOM in line or "y" * 100 in line


def test_words_are_held_back_only_near_the_end_of_a_line():
    wrap = Wrap(lambda: 60)
    assert [wrap.feed(c) for c in "word"] == list("word")
    wrap.feed(" " + "x" * 30 + " ")
    assert wrap.feed("held") == "" and wrap.feed(" ") == "held " and wrap.feed("x" * 21) == "\n" + "x" * 21
    assert wrap.feed("y") == "y" and wrap.flush() == ""


def test_scripts_without_spaces_and_their_marks():
    assert wrapped("法国的首都是巴黎。", 8) == "法国的首\n都是巴\n黎。"
    assert wrapped("他说「好」", 6) == "他说\n「好」" and wrapped("한국어 한국어", 10) == "한국어 \n한국어"


def test_links_and_code_are_left_whole():
    link = "https://example.org/" + "a" * 100
    code = "```python\nprint('a long line of code', 'that can be copied as it is')\n```\n"
    assert link in wrapped(f"see there: {link} or elsewhere", 40)
    assert wrapped(code + "and then the words go on again", 20) == code + "and then the words \ngo on again"
