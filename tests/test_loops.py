"""stop_loops: texts that run in circles end, others don't, and what else is computed beside them changes nothing."""
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
from configs import FRANCE, ROOT
from helpers import patiently, random_ids
from qwen3_lib.app.chat import Chat
from qwen3_lib.generation.batch import Batch
from qwen3_lib.generation.completion import Completion
from tokenizer_utils import AnswerReader
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.processors import StopLoops
from qwen3_lib.generation.schema import regex
from test_answers import saying

CIRCLE = "The quick brown fox jumps over the lazy dog. "
LONG = f"({CIRCLE.replace('.', '[.]')}){{30}}"


def ends_at(ids, kind=StopLoops) -> int | None:
    """The length of the text until it ends as a circle; None: it doesn't."""
    loops = kind(AnswerReader(), None)
    return next((n for n, token in enumerate(ids, 1) if loops.after(token) is not None), None)


class Short(StopLoops):
    """The same with numbers that short texts reach."""
    SIZE, LEAST, WINDOW, FEW = 3, 10, 40, 3


def runs_in_circles(text) -> bool:
    """The definition for Short, without a state: looks at the whole text for each of its tokens."""
    def repeats(end):
        ends = list[int]()
        for place in range(3, end):
            if text[place - 3:place] == text[end - 3:end] and (not ends or place - ends[-1] >= 3):
                ends.append(place)
        return len(ends) >= 3 and ends[-3] > end - 40

    last = [repeats(end) for end in range(max(len(text) - 39, 3), len(text) + 1)]
    unchanged = len(text) >= 40 and any(text[-40:-distance] == text[-40:][distance:] for distance in range(1, 11))
    kinds = {token for token, repeated in zip(text[-10:], last[-10:]) if repeated}
    return len(text) >= 10 and sum(last[-10:]) >= 9 and (len(kinds) >= 3 or unchanged)


@given(st.lists(st.integers(0, 4), max_size=20), st.lists(st.integers(0, 4), min_size=1, max_size=12),
       st.lists(st.integers(0, 4), max_size=20), st.integers(2, 9))
@patiently(100)
def test_a_text_ends_where_its_definition_says(before, circle, after, changed):
    text = [*before, *circle * 4, *after, *circle * 14]
    text[::changed * 7] = [9] * len(text[::changed * 7])
    assert ends_at(text, Short) == next((n for n in range(len(text) + 1) if runs_in_circles(text[:n])), None)


@pytest.mark.parametrize("period", [12, 20, 23, 24, 25, 100, 170, 400, 600])
def test_circles_of_any_length_end_also_if_they_change_a_little(period):
    rng = np.random.default_rng(period)
    circle, start = rng.permutation(1000)[:period].tolist(), [*range(2000, 2500)]
    occurrences = 3 * period * -(-24 // period)  # side by side
    assert 922 < ends_at([*start, *circle * 600]) - 500 <= occurrences + 24 + 1024
    changing = [token for i in range(999) for token in [*circle * (-(-600 // period)), 3000 + i]]
    assert ends_at([*start, *changing][:9999]) is not None


def test_dashes_and_zeros_are_no_circle(demo):
    encode = demo.tokenizer.encode
    for text in ("-" * 40 + "\n", "=" * 400, ("0, " * 20 + "\n") * 8, "|---" * 40 + "|\n", "None, " * 100, " " * 800):
        assert ends_at(encode(text)) is None, text
    assert ends_at([*range(300), *[0] * 1500, *range(300)]) is None  # prose, zeros, prose
    bits = random.Random(0).choices(["1.0e+00 ", "0.0e+00 "], k=2000)
    assert ends_at(encode("".join(bits))) is None  # a table without an end
    assert ends_at(encode("-" * 50000)) is not None


def natural_texts():
    """Parts of files of Python's standard library and of this project: code, tables, lists of numbers, prose."""
    rng, library = random.Random(0), Path(sysconfig.get_paths()["stdlib"])
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("qwen3_lib/**/*.py"),
             *(file for file in library.rglob("*.py") if "site-packages" not in file.parts)]
    for file in rng.sample(sorted(files), 60):
        text = file.read_text("utf-8", "ignore")
        start = rng.randrange(max(len(text) - 8000, 1))
        yield file, text[start:start + 8000]


def test_no_natural_text_is_a_circle(demo):
    for file, text in natural_texts():
        assert ends_at(demo.tokenizer.encode(text)) is None, file


def test_a_thought_in_circles_is_closed_and_an_answer_follows(demo):
    encode, end = demo.tokenizer.encode, demo.eos_token_ids[0]
    circle, rest = encode(CIRCLE), [*encode("Paris."), end]
    thought = [*encode("<think>\n"), *circle * 99]
    thought = thought[:ends_at(thought)]
    script = [*thought, *[0] * len(encode("\n</think>\n\n")), *rest]
    answer = qwen3.chat(saying(demo, script), FRANCE, stop_loops=True, temperature=0, logprobs=0).finish()
    assert (answer.answer.content, answer.finish_reason) == ("Paris.", "stop")
    assert 922 < len(thought) < 1200 and answer.answer.reasoning.startswith(CIRCLE * 20)
    assert len(answer.token_ids) == len(script) - 1 == len(answer.logprobs)
    plain = qwen3.chat(saying(demo, [*encode("<think>\n"), *circle * 99]), FRANCE, temperature=0, max_new_tokens=900)
    assert plain.finish().finish_reason == "length"


def test_guesses_and_company_never_change_where_an_answer_ends(model, monkeypatch):
    for name, value in {"SIZE": 3, "LEAST": 12, "WINDOW": 60, "FEW": 2}.items():
        monkeypatch.setattr(StopLoops, name, value)
    def told(answer):
        return answer.token_ids, answer.text, answer.finish_reason

    options = {"max_new_tokens": 200, "temperature": 0, "eos_token_ids": (), "stop_loops": True}
    prompts = [random_ids(5, i) for i in range(8)]
    alone = [told(Completion(model, prompt, **options).finish()) for prompt in prompts]
    reasons = [reason for *_, reason in alone]
    assert reasons.count("loop") > 2
    batch = Batch(model, 3, 300)
    together = [batch.add(i, prompt, lookup=3 * (i % 2), **options) for i, prompt in enumerate(prompts)]
    while not batch.idle:
        batch.step()
    assert [*map(told, together)] == alone
    assert [told(Completion(model, prompt, lookup=4, **options).finish()) for prompt in prompts] == alone


def test_a_chat_ends_circles_unless_it_is_told_not_to(demo, capfd, monkeypatch):
    """As the command line does with --stop-loops: it says so in one line."""
    monkeypatch.setattr(StopLoops, "LEAST", 200)
    chat = Chat(demo, [], enable_thinking=False, options=AnswerOptions(schema=regex(LONG)))
    chat.handle(FRANCE)
    out, err = capfd.readouterr()
    assert 15 < out.count(CIRCLE) < 30 and "repeats the same text" in err and err.count("\n") == 1
    assert chat.last.finish_reason == "loop"
    chat.handle("/set stop_loops off")
    chat.handle(FRANCE)
    assert capfd.readouterr().out == CIRCLE * 30 + "\n" and chat.last.finish_reason == "stop"
