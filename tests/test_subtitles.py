"""Words of a transcript and subtitles: no text is lost, each can be seen, none stands over the next one."""
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3_lib.app.subtitles import cues, cues_of, file_text
from qwen3_lib.generation.aligner import Word, split_words
from qwen3_lib.generation.transcript import Part

# What texts are made of: words, ideographs, kana, marks of all kinds, dashes alone, spaces, emoji, combining marks.
PIECES = st.sampled_from([
    "Hello", "it's", "你", "好", "世界", "です", "한국", "ไทย", "12", "3.14", "e-mail", "naïve", "e\u0301", "\U00020000", ",", ".",
    "。", "，", "！", "?!", "…", "—", "–", "-", " - ", "'", "\"", "“", "”", "«", "»", "（", "）", "《", "》", "「", "」", "(", ")", "¿",
    "$", " ", "  ", "\n", "\t", "\u3000", "\u200b", "😀", "👩‍🚀", "<", ">", "&", "-->", "\u0301", "x" * 30])
TEXTS = st.one_of(st.lists(PIECES, max_size=40).map("".join), st.text(max_size=60))
LANGUAGES = st.sampled_from(["English", "Chinese", "Japanese", "Thai", ""])


def shown(text):
    """As it stands on a screen, in one line."""
    return " ".join(text.split())


# ----------------------------------------------------------------------------------------------------------------------
# Words
# ----------------------------------------------------------------------------------------------------------------------

@given(TEXTS)
def test_words_join_to_their_text(text):
    """Each has one run of letters and numbers at least, which stand in the text in this order."""
    words = split_words(text)
    assert "".join(each for each, _ in words) == (text if words else "")
    assert bool(words) == any(c.isalnum() or c == "'" for c in text)
    assert all(word and not word.isspace() for _, word in words)
    for each, word in words:
        rest = iter(each)
        assert all(c in rest for c in word)


@pytest.mark.parametrize("text, words", [
    ("你好，世界。今天很好！", ["你", "好，", "世", "界。", "今", "天", "很", "好！"]),
    ("— Well, it's 12 — isn't it? …", ["— Well, ", "it's ", "12 — ", "isn't ", "it? …"]),
    ("他说：“你好”（笑）。Hello, 世界", ["他", "说：", "“你", "好”", "（笑）。", "Hello, ", "世", "界"]),
    ('She said "no" (twice) for $5.', ["She ", "said ", '"no" ', "(twice) ", "for ", "$5."]),
    ("One 🎉\n\ntwo", ["One 🎉\n\n", "two"]), ("《三体》", ["《三", "体》"]), ("…", []), ("", [])])
def test_words_with_their_punctuation(text, words):
    assert [each for each, _ in split_words(text)] == words


# ----------------------------------------------------------------------------------------------------------------------
# Subtitles
# ----------------------------------------------------------------------------------------------------------------------

def part_of(text, start, seconds, language, steps=None):
    """A part; `steps`: its words' times in 80 ms, as an aligner may give them, also none, and beyond its end."""
    words = [] if steps is None else [each for each, _ in split_words(text)] or [text] * bool(text)
    times, now = [], 0
    for i in range(2 * len(words)):
        now += steps[i % len(steps)]
        times.append(round(start + 0.08 * now, 3))
    return Part(start, start + seconds, text, language, "stop", 1,
                tuple(map(Word, words, times[::2], times[1::2])))


@given(st.lists(st.tuples(TEXTS.map(str.strip), st.sampled_from([0.01, 0.3, 2, 20]), LANGUAGES, st.one_of(
    st.none(), st.lists(st.sampled_from([0, 0, 0, 1, 1, 4, 50]), min_size=1, max_size=6))), min_size=1, max_size=4))
def test_subtitles_of_any_parts(given_parts):
    """They have all of the text, 80 ms at least, and none begins before the last one ends; so in each form."""
    parts, start = [], 0.0
    for text, seconds, *more in given_parts:
        parts.append(part_of(text, start, seconds, *more))
        start += seconds
    found = cues(parts)
    assert re.sub(r"\s", "", "".join(text for *_, text in found)) == re.sub(
        r"\s", "", "".join(part.text for part in parts))
    assert all(text == shown(text) != "" for *_, text in found)
    times = [time for start, end, _ in found for time in (start, end)]
    assert all(end - start > 0.0799 for start, end, _ in found) and times == sorted(times)
    assert min(times, default=0) >= 0
    assert not times or times[-1] <= max(round(start, 3), round(0.08 * len(found), 3))
    for form, comma in (("srt", ","), ("vtt", ".")):
        written = [re.fullmatch(r"(\d\d):(\d\d):(\d\d)[,.](\d\d\d)", each) for each in re.findall(
            rf"(?m)^(\S+{comma}\d\d\d) --> (\S+{comma}\d\d\d)$", file_text(parts, form)) for each in each]
        written = [int(h) * 3600_000 + int(m) * 60_000 + int(s) * 1000 + int(ms) for h, m, s, ms in map(
            re.Match.groups, written)]
        assert written == [round(1000 * time) for time in times]


def test_subtitles_break_at_words():
    """After a sentence, at a pause, after 7 seconds, when two lines are full; ideographs stand without spaces."""
    words = [Word("One ", 0, 0.5), Word("two. ", 0.5, 1), Word("Three ", 1, 1.25), Word("four ", 2.5, 3),
             Word("five ", 9, 9.5), *(Word("x" * 20 + " ", 9.5 + i / 4, 9.75 + i / 4) for i in range(5))]
    part = Part(0, 20, "...", "English", "stop", 9, tuple(words))
    five = " ".join(["x" * 20] * 3)
    assert cues_of(part) == [(0, 1, "One two."), (1, 1.25, "Three"), (2.5, 3, "four"), (9, 10.25, f"five {five}"),
                             (10.25, 10.75, five[:41])]
    text = "你好，世界。今天很好！"
    assert [text for *_, text in cues_of(part_of(text, 0, 5, "Chinese", [1]))] == ["你好，世界。", "今天很好！"]
    for language, most in (("Chinese", 40), ("Cantonese", 40), ("English", 84)):
        assert [len(text) for *_, text in cues_of(part_of("字" * 100, 0, 5, language, [0]))][0] == most


@pytest.mark.parametrize("end", ["Yes.", "Yes?", "Yes!", "Yes…", "Yes.”", 'Yes."', "好。", "好！", "好？", "好。」", "はい。"])
def test_where_a_sentence_ends(end):
    for steps in (None, [1]):
        assert [text for *_, text in cues_of(part_of(f"{end} And", 0, 1, "", steps))] == [end, "And"]


def test_a_number_is_no_sentence():
    text = "It is 3.14, or 1.2.3 e.g.x"
    assert [text for *_, text in cues_of(part_of(text, 0, 1, ""))] == [text]


def test_subtitles_without_an_aligner():
    """A sentence has its share of the part's time, by its characters, spaces among them; a long one is cut in lines."""
    part = Part(10, 20, "One two. Three four five. 😀 Six!", "English", "stop", 9)
    assert [(round(start, 6), round(end, 6), text) for start, end, text in cues_of(part)] == [
        (10, 10 + 10 * 9 / 32, "One two."), (10 + 10 * 9 / 32, 10 + 10 * 26 / 32, "Three four five."),
        (10 + 10 * 26 / 32, 20, "😀 Six!")]
    for seconds, n in ((20, 83), (40, 41)):  # two lines; 7 seconds
        found = cues_of(Part(0, seconds, " ".join(["longer"] * 40), "English", "stop", 9))
        assert [len(text) for *_, text in found][:3] == [n] * 3
    found = cues_of(Part(0, 5, "そうです。はい、そうです。それから", "Japanese", "stop", 9))
    assert [text for *_, text in found] == ["そうです。", "はい、そうです。", "それから"]


def test_subtitles_without_length():
    """What is said at one time is moved, back from the next subtitle or from the sound's end."""
    words = [Word("A. ", 1.04, 1.04), Word("B. ", 1.04, 1.04), Word("C. ", 2, 2), Word("D. ", 2, 2), Word("E.", 2, 2)]
    assert cues([Part(0, 2, "A. B. C. D. E.", "", "stop", 1, tuple(words))]) == [
        (0.96, 1.04, "A."), (1.04, 1.12, "B."), (1.76, 1.84, "C."), (1.84, 1.92, "D."), (1.92, 2.0, "E.")]
    assert cues([Part(0, 0.05, "A. B.", "", "stop", 1)]) == [(0, 0.08, "A."), (0.08, 0.16, "B.")]
    assert cues([]) == [] == cues([Part(0, 1, "", "", "stop", 1)])


def test_the_forms_of_a_file():
    """WebVTT's own characters are written as it wants them, and no others."""
    parts = [Part(0, 3661.5, """It's "Tom & Ada" <b>-->\n\nno&amp;""", "English", "stop", 1,
                  (Word("It's ", 1, 2), Word(""""Tom & Ada" <b>-->\n\nno&amp;""", 3600, 3661.5)))]
    assert file_text(parts, "vtt") == ("WEBVTT\n\n00:00:01.000 --> 00:00:02.000\nIt's\n\n"
                                       "01:00:00.000 --> 01:01:01.500\n\"Tom &amp; Ada\" &lt;b&gt;--&gt; no&amp;amp;\n")
    assert file_text(parts, "srt") == ("1\n00:00:01,000 --> 00:00:02,000\nIt's\n\n2\n01:00:00,000 --> 01:01:01,500\n"
                                       "\"Tom & Ada\" <b>--> no&amp;\n")
