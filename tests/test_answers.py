"""qwen3_lib/generation/: text on top of ids, held against functions of the whole text and against passes over it."""
import asyncio
import dataclasses
import inspect
import itertools
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import get_type_hints

import numpy as np
import pytest
import tokenizers
from hypothesis import given, strategies as st

import qwen3
from configs import FRANCE, PARIS, SHARED, needs_official_files
from fuzzing import CALL, any_answer, any_text, cut_up, fuzz, pairs_of, taken_apart
from helpers import (WEATHER, assert_one_line, edit_json, filled_cache, message_of, random_ids, with_engine,
                     with_logits, works_or_refused)
from qwen3_lib.generation.answer import StoppingReader, inside_thought, last_turn
from qwen3_lib.generation.tools import tool_schema, values_for
from tokenizer_utils import Answer, AnswerReader, Tokenizer, parse_answer
from qwen3_lib.generation.completion import AnswerText, Completion
from qwen3_lib.generation.options import AnswerOptions, GivenOptions
from qwen3_lib.generation.score import SCORED, score
from qwen3_lib.generation.processors import most_likely, ThinkBudget
from qwen3_lib.app.records import JobSettings, request_of_row
from qwen3_lib.generation.messages import encoded

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


def saying(model, script):
    """The model with a forward pass after which the tokens of `script`, and no others, follow any prompt."""
    def run(model, new):
        new.advance()
        logits = np.zeros((1, model.config.vocab_size), np.float32)
        logits[0, script[said.n]] = 1
        said.n += 1
        return logits, new.x
    said = type("Said", (), {"n": 0})
    return with_engine(model, run=run)


def ending(model, text):
    """The model with a forward pass that makes it say this text, and then end."""
    end = model.tokenizer.token_to_id("<|im_end|>")
    return dataclasses.replace(saying(model, [*model.tokenizer.encode(text), *[end] * 9]), eos_token_ids=(end,))


CALLED, THOUGHTS = {"name": "f", "arguments": {}}, ("reasoning_content", "reasoning", "thinking")


def weather(city: str, days: "int | None" = 3, *, units: list[str] = ()) -> str:
    """Tells the weather.

    city (in any language): where
    """


def xml_call(name, **arguments):
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def tool(name="f", **types):
    """The tool in OpenAI's form; a type is a name, several, or a schema."""
    properties = {key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


# ---- Completion ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("engine, options", [
    ("qwen3", {"lookup": 4}), ("qwen3_numba", {"draft": True})])
def test_an_answer_that_shares_its_cache_is_right_or_refused(engine, options):
    model = pytest.importorskip(engine).load_model(qwen3.BUNDLED)
    options = {"enable_thinking": False, "temperature": 0} | options | ({"draft": model} if "draft" in options else {})
    questions = [f"What is the capital of {country}?" for country in ("France", "Peru", "Italy")]
    alone = [str(qwen3.chat(model, question, **options)) for question in questions]
    cache = model.engine.new_cache(model.config)
    first = qwen3.chat(model, questions[0], cache=cache, **options)
    assert alone[0].startswith(next(first))
    second = qwen3.chat(model, questions[1], cache=cache, **options)
    assert alone[1].startswith(next(second))
    refusal = message_of(first.finish)
    assert "another answer" in refusal and str(second) == alone[1]

    def ask(i):
        try:
            return str(qwen3.chat(model, questions[i % 3], cache=cache, **options))
        except qwen3.InputError as error:
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(ask, range(12)))
    assert [each for i, each in enumerate(found) if each not in (alone[i % 3], refusal)] == [] and refusal in found


def test_a_chat_model_whose_tokenizer_appends_a_token(tmp_path):
    """As in transformers, what its post-processor appends belongs to plain texts, not to the text of a template."""
    folder = shutil.copytree(qwen3.BUNDLED, tmp_path / "model")
    end = "<|endoftext|>"
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = next(token["id"] for token in added if token["content"] == end)
    edit_json(folder / "tokenizer.json", {"post_processor": {
        "type": "TemplateProcessing", "pair": [], "single": [{"Sequence": {"id": "A", "type_id": 0}},
                                                             {"SpecialToken": {"id": end, "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [number], "tokens": [end]}}}})
    model = qwen3.load_model(folder)
    assert model.tokenizer.encode("Hello")[-1] == number and not model.embeds
    assert qwen3.chat(model, FRANCE, enable_thinking=False, temperature=0).finish().text.strip() == PARIS.strip()


def test_a_text_that_cannot_fit_is_refused(demo):
    long = "to be or not to be, " * 50_000
    for call, *args in ((qwen3.chat, demo, long), (encoded, demo.tokenizer, long, 4096),
                        (request_of_row, demo, JobSettings(), {"prompt": long}, 1),
                        (request_of_row, demo, JobSettings(raw=True), {"prompt": long}, 1)):
        assert_one_line(message_of(call, *args), "prompt is too long: more than", "tokens > 4096 maximum")


@pytest.mark.parametrize("text", ["a" * 200_000, "to be or not to be, " * 10_000, "<|im_end|>" * 20_000, " " * 200_000,
                                  "é" * 200_000, "".join(map(chr, range(0x4e00, 0x9000))) * 4])
def test_a_text_that_fits_has_its_ids_and_one_that_is_cut_the_first_of_them(demo, text):
    ids = demo.tokenizer.encode(text)
    assert encoded(demo.tokenizer, text, len(ids)) == ids
    for room in (0, 1, 4096, 40_000):
        assert encoded(demo.tokenizer, text, room, cut=True)[:room] == ids[:room]


@fuzz(150)
def test_prompts(rng, talker):
    """Any text as a question and as a text to continue: a text that fits its ids, or one line."""
    text = any_text(rng, rng.choice([1, 4, 12]))
    options = {"max_new_tokens": rng.randint(1, 4), "seed": rng.randrange(100), "temperature": rng.choice([0, 1.0]),
               "logprobs": rng.choice([None, 0, 2])}
    thinking = rng.choice([None, True, False])
    done = [works_or_refused(lambda: qwen3.chat(talker, text, enable_thinking=thinking, **options).finish()),
            works_or_refused(lambda: Completion(talker, talker.tokenizer.encode(text), **options).finish())]
    for completion in filter(None, done):
        ids = completion.token_ids
        assert completion.finish_reason == ("length" if len(ids) == options["max_new_tokens"] else "stop")
        assert completion.text == talker.tokenizer.decode(ids, skip_special_tokens=True)
        opened = inside_thought(last_turn(talker.tokenizer, completion.prompt_ids))
        assert completion.answer == taken_apart(completion.text, opened)[0]
        assert len(completion.logprobs) == (0 if options["logprobs"] is None else len(ids))
        assert len(completion.times) == 1 + len(ids)
    return all(done)


def test_an_answer_prints_as_its_text_and_shows_its_state(demo):
    question = {"model": demo, "messages": FRANCE, "enable_thinking": False, "temperature": 0}
    reply = qwen3.chat(**question)
    assert "0 tokens" in repr(reply) and "not finished" in repr(reply)  # nothing is computed for it
    first = next(reply)
    assert first in repr(reply) and reply.finish_reason is None
    assert f"{reply}" == str(reply) == reply.text == reply._repr_markdown_() == PARIS.strip()
    assert reply.finish_reason == "stop" and f"<Completion: {len(reply.token_ids)} tokens, stop" in repr(reply)
    assert reply.message == {"role": "assistant", "content": PARIS.strip()}

    async def pieces():
        return [piece async for piece in qwen3.chat(**question)]

    async def whole():
        return await qwen3.chat(**question)

    assert "".join(asyncio.run(pieces())) == asyncio.run(whole()).text == PARIS.strip()


def test_an_answer_is_taken_apart_when_it_is_finished(demo):
    question = {"model": demo, "messages": FRANCE, "enable_thinking": False, "temperature": 0}
    begun = qwen3.chat(**question)
    for _ in range(2):  # before the first piece and after it
        assert {message_of(lambda: getattr(begun, name)) for name in ("answer", "message")} == {
            "the answer isn't finished: iterate over it, or call its finish()"}
        first = next(begun)
    assert begun.finish().answer.content == begun.message["content"] == PARIS.strip()
    assert PARIS.strip().endswith(first + "".join(begun))  # what came meanwhile can still be read
    assert qwen3.chat(**question, schema={"const": "Lima"}).finish().parsed == "Lima"
    closed = qwen3.chat(**question)
    first = next(closed)
    closed.close()
    assert (closed.answer.content, [*closed], closed.finish_reason) == (first, [], None)


def test_an_answer_with_calls_ends_for_tool_calls(demo):
    reply = qwen3.chat(demo, "What is the weather in Lisbon?", [WEATHER], temperature=0)
    assert reply.finish_reason is None and {"finish_reason", "text", "token_ids"} <= {*dir(reply)}
    assert reply.finish().finish_reason == "tool_calls" and reply.answer.tool_calls


def test_the_options_of_chat_are_named(demo):
    """Those of generate in its signature, all others in its help; max_tokens is another name of max_new_tokens."""
    parameters = inspect.signature(qwen3.chat).parameters.items()
    options = {name for name, about in parameters if about.kind is about.KEYWORD_ONLY}
    known = {*AnswerOptions.__dataclass_fields__}
    assert {*qwen3.Sampling.__dataclass_fields__} < options < known | {"max_tokens", "cache"}
    assert all(name in options or name in qwen3.chat.__doc__ for name in known)
    assert "sop" in message_of(qwen3.chat, demo, FRANCE, sop="x")
    assert len(qwen3.chat(demo, FRANCE, max_tokens=3).finish().token_ids) == 3
    assert "max_new_tokens" in message_of(Completion, demo, [1], max_tokens=3)
    assert message_of(qwen3.chat, demo, FRANCE, max_tokens=0).startswith("max_tokens must")
    assert "load_model" in message_of(qwen3.chat, "demo", FRANCE)
    assert get_type_hints(GivenOptions) == get_type_hints(AnswerOptions)  # what type checkers see


def test_in_a_notebook_a_thought_is_a_quotation_and_a_call_is_code(demo):
    reply = qwen3.chat(demo, "Hello", max_new_tokens=1, temperature=0).finish()
    call = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    reply.reader = AnswerReader()
    reply.reader.push(f"<think>\nOne.\n\n<b>Two.\n</think>\n\nText.\n{call}")
    assert reply._repr_markdown_() == \
        '> One.\n> \n> <b>Two.\n\nText.\n\n```json\n{"name": "look", "arguments": {"a": 1}}\n```'


def test_a_tag_in_the_question_opens_no_thought(talker):
    assert qwen3.chat(ending(talker, "Hi"), "Is <think> a tag?", temperature=0).finish().answer == Answer(None, "Hi")


def test_the_tools_of_a_chat_give_arguments_in_xml_their_types(demo):
    model, tools = ending(demo, xml_call("f", a="5", b="5")), [tool(a="string", b="integer")]
    reply = qwen3.chat(model, "Hello", tools, temperature=0)
    assert reply.finish().answer.tool_calls == [{"name": "f", "arguments": {"a": "5", "b": 5}}]


@pytest.mark.parametrize("messages", [5, None, [], {}, ["Hello"], {"content": "Hello"},
                                      {"role": "usr", "content": "Hello"}, [{"role": "user"}],
                                      {"role": "user", "content": 5}, {"role": "user", "tool_calls": [CALLED]},
                                      *({"role": "assistant", "content": "a", key: 5} for key in THOUGHTS),
                                      *({"role": "assistant", "tool_calls": calls} for calls in (
                                          5, [{"name": "f"}], [{"arguments": {}}], [CALLED | {"name": 5}]))])
def test_messages_that_are_none(demo, messages):
    words = f"not {messages}" if messages in (5, None, []) else "messages: message 0"
    assert_one_line(message_of(qwen3.chat, demo, messages, system="Be brief."), words)


@pytest.mark.parametrize("options", [{"stop": 5}, {"stop": [5]}, {"stop": ""}, {"stop": [None]}, {"stop": {"x": 1}},
                                     {"logprobs": -1}, {"think_budget": 1.5}, {"lookup": "x"}, {"logprobs": True},
                                     {"stop_loops": 1},
                                     {"stops": "x"}, {"logit_bias": {"4096": 1}}, {"logit_bias": {"9" * 5000: 1}},
                                     {"logit_bias": {"5": 100.1}}, {"logit_bias": {5: -101}}])
def test_options_that_are_refused(demo, options):
    name = next(iter(options))
    message = message_of(Completion, demo, [1], **options)
    assert ("a stop text must be" if name == "stop" else name) in message


# ---- Logprobs and scores ---------------------------------------------------------------------------------------------

def exact_logprobs(logits):
    """log-softmax in float64, written as it is defined."""
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@fuzz(50)
def test_the_most_likely_tokens_are_those_of_a_whole_sort(rng):
    x = np.array([rng.choice([0, 0.5, 1, rng.random()]) for _ in range(rng.randint(1, 40))], np.float32)
    for n in (0, 1, rng.randint(1, 50), 10**30):
        assert most_likely(x, n).tolist() == np.argsort(-x, kind="stable")[:n].tolist()
    return len(x) > 1


@fuzz(100, refused=False)
def test_logprobs(rng, tiny_model):
    """Of each token drawn, by the model as it is: whatever the temperature, penalties, bias, cache, and end."""
    model, n_tokens = tiny_model, tiny_model.config.vocab_size
    prompt = [rng.randrange(n_tokens) for _ in range(rng.randint(1, 8))]
    cache = filled_cache(model, prompt[:rng.randint(1, 8)]) if rng.random() < 0.3 else None
    options = {"temperature": rng.choice([0, 0.3, 1.0, 4.0]), "top_k": rng.choice([0, 5]),
               "repetition_penalty": rng.uniform(0.5, 2), "presence_penalty": rng.uniform(-1, 1),
               "seed": rng.randrange(1000), "eos_token_ids": range(0, n_tokens, rng.choice([2, 5, n_tokens]))}
    options["logit_bias"] = {rng.randrange(n_tokens): rng.uniform(-9, 9)}
    n_top = rng.choice([0, 1, 3, 20, n_tokens, 10**30])
    completion = Completion(model, prompt, max_new_tokens=rng.randint(1, 8), logprobs=n_top, cache=cache, **options)
    ids = completion.finish().token_ids
    assert [entry.token_id for entry in completion.logprobs] == ids
    if not ids:
        return False
    logits = qwen3.forward(model, prompt + ids[:-1], qwen3.KVCache(model.config), all_logits=True)
    for entry, row in zip(completion.logprobs, exact_logprobs(logits[len(prompt) - 1:]), strict=True):
        assert entry.text == model.tokenizer.decode([entry.token_id])
        assert type(entry.logprob) is float and abs(entry.logprob - row[entry.token_id]) < 1e-4
        best, values = [token for token, _ in entry.top], [value for _, value in entry.top]
        assert len({*best}) == len(best) == min(n_top, n_tokens) and values == sorted(values, reverse=True)
        assert np.allclose(values, row[best], atol=1e-4) and np.allclose(values, np.sort(row)[::-1][:n_top], atol=1e-4)
    return completion.finish_reason == "stop"


def test_a_bias_is_added_to_a_logit(model):
    logits = qwen3.forward(model, [1, 2, 3], qwen3.KVCache(model.config))
    second, best = map(int, np.argsort(logits)[-2:])
    for share, token in ((0.9, best), (1.1, second)):
        bias = {str(second): float(logits[best] - logits[second]) * share}
        assert Completion(model, [1, 2, 3], logit_bias=bias, max_new_tokens=1).finish().token_ids == [token]


@pytest.mark.parametrize("n", [1, 2, SCORED - 1, SCORED, SCORED + 1, SCORED + 2, 2 * SCORED, 2 * SCORED + 1, 400, 512])
def test_score(model, n):
    """A forward pass over the tokens before it gives the same logprob of each token; 512 tokens fill the context."""
    ids = random_ids(n, n)
    logits = qwen3.forward(model, ids, qwen3.KVCache(model.config), all_logits=True)
    exact = exact_logprobs(logits)[np.arange(n - 1), ids[1:]]
    assert np.allclose(score(model, ids), exact, atol=1e-4) and score(model, ids).shape == (n - 1,)


def test_scores_that_are_refused(model):
    assert "context is 512" in message_of(score, model, random_ids(513))
    assert "gives no answers" in message_of(score, dataclasses.replace(model, embeds=True), [1, 2])
    for value in (np.nan, np.inf, 3e38):
        broken = dataclasses.replace(model, weights=model.weights | {"norm": np.full(32, value, np.float32)})
        assert "not finite" in message_of(score, broken, [1, 2, 3])


# ---- Stop texts ------------------------------------------------------------------------------------------------------

def until_first(text, stop):
    """The text before the stop text that is complete first; of several that end there, the longest."""
    for end in range(len(text) + 1):
        if found := [mark for mark in stop if text[:end].endswith(mark)]:
            return text[:end - max(map(len, found))]
    return text


@fuzz(1000, refused=False)
def test_stop_texts(rng):
    """No part of a stop text gets through, however the text is cut up; else only a tag's beginning is held back."""
    def begun_at(text, marks):
        return min(n for n in range(len(text) + 1)
                   if n == len(text) or any(mark[:-1].startswith(text[n:]) for mark in marks))

    letters = rng.choice(["ab", "aab", "abc", "<|im_end|>", "é\n日a", " \na"])
    text = "".join(rng.choices(letters, k=rng.randint(0, 30)))
    stop = tuple("".join(rng.choices(letters, k=rng.randint(1, rng.choice([2, 6])))) for _ in range(rng.randint(0, 4)))
    reader, said = StoppingReader(stop=stop), ""
    for piece in cut_up(rng, text):
        reader.push(piece)
        shown, said = "".join(piece for _, piece in reader.pieces), said + piece
        if reader.stopped:
            break
        begun = not "<think>".startswith(said.lstrip())  # else it may yet become a thought
        certain = said[:begun_at(said[:begun_at(said, stop)], ["<tool_call>"])].rstrip()
        assert said.startswith(shown) and (not begun or len(shown) == len(certain))
    reader.finish()
    expected = until_first(text, stop)
    assert ("".join(piece for _, piece in reader.pieces), bool(reader.stopped)) == (expected, expected != text)
    return True


@fuzz(200, refused=False)
def test_stop_texts_do_not_end_a_thought(rng, talker):
    """However its tokens cut up the text: a stop text within the thought is passed on, the first one behind it ends."""
    encode, end = talker.tokenizer.encode, 1
    stop = [rng.choice(["fox", "f", "a fox", "o\n", "x</", "think", "é日", "\n\n\n"]) for _ in range(rng.randint(1, 2))]
    words = [*stop, "a ", "fo", "x", "é", " think", "\n"]
    thought, answer = ("".join(rng.choices(words, k=rng.randint(0, 6))) for _ in range(2))
    opened, closed = rng.random() < 0.5, rng.random() < 0.8
    before = "" if opened else rng.choice(["", "", "\n", " \n"]) + "<think>"
    rest = f"\n\n{answer}" if closed else ""
    text = f"{before}\n{thought}" + f"\n</think>{rest}" * closed
    script = [token for piece in cut_up(rng, text, 9) if piece for token in encode(piece)]
    prompt = encode("Hi<think>" if opened else "Hi")
    if len(script) >= talker.config.context_length - len(prompt):
        return True
    completion = Completion(saying(talker, [*script, end]), prompt, stop=stop, temperature=0, eos_token_ids=[end])
    assert str(completion) == text[:len(text) - len(rest)] + until_first(rest, stop), (text, stop)
    assert completion.finish_reason == "stop"
    return True


@pytest.mark.parametrize("lookup", [None, 6])
@pytest.mark.parametrize("stop", ["Paris. Paris", "zz", "is.", " Rome. Pa"])
def test_tokens_behind_a_stop_text_are_not_kept(demo, stop, lookup):
    """A stop text across tokens, which may come by right guesses together with the tokens behind it."""
    text = " Paris. Rome. Paris. Paris. Rome. Paris. Paris"
    prompt = ids = demo.tokenizer.encode(text)
    whole = np.array([*prompt, *ids, demo.eos_token_ids[0], *[0] * 9])

    def run(model, new):  # whole, and nothing else, is certain
        following = whole[new.positions[new.wanted] + 1]
        new.advance()
        return np.float32(following[:, None] == np.arange(model.config.vocab_size)), new.x

    answer = Completion(with_engine(demo, run=run), prompt, stop=stop, lookup=lookup, logprobs=0)
    answer.finish()
    kept = len(answer.token_ids)
    assert answer.text == until_first(text, [stop]) and answer.finish_reason == "stop"
    assert answer.token_ids == ids[:kept] and [entry.token_id for entry in answer.logprobs] == ids[:kept]
    assert (stop in demo.tokenizer.decode(ids[:kept])) == (stop in text)
    assert stop not in demo.tokenizer.decode(ids[:kept - 1])  # the last token completes it


# ---- The think budget ------------------------------------------------------------------------------------------------

@fuzz(200, refused=False)
def test_think_budget(rng, talker):
    """No more tokens of thought are drawn than the budget has, however often a thought is opened and closed."""
    tokenizer, budget = talker.tokenizer, rng.choice([0, 1, 2, 3, 5, 9])
    opening, closing = map(tokenizer.token_to_id, ("<think>", "</think>"))
    bias = np.zeros(talker.config.vocab_size, np.float32)
    bias[opening], bias[closing] = rng.uniform(-3, 9), rng.uniform(-3, 9)
    model = with_logits(talker, lambda logits, _: logits + bias)
    prompt = tokenizer.encode(rng.choice(["Hi", "Hi<think>", "<think>\n", "<think>a</think>", "a</think>",
                                          "<think>a</think><think>b", "<think>\n\n</think>\n\n"]))
    drawn: list[int] = []  # the places of the tokens that the model has drawn
    reader = StoppingReader(inside_thought(last_turn(tokenizer, prompt)), parse_answer, (opening, closing))

    class Noted(ThinkBudget):
        def forced(self):
            token = super().forced()
            drawn.extend([len(sequence.token_ids)] if token is None else [])
            return token

    sequence = qwen3.Sequence(model, prompt, rng.randint(1, 24), rng.randrange(1000), (),
                              [AnswerText(tokenizer, reader), Noted(tokenizer, reader, budget)], qwen3.Sampling(1.0))
    tokens = list(qwen3.run(model, sequence, qwen3.KVCache(model.config)))
    assert len(tokens) == sequence.limit
    inside, spent = re.search("<think>((?!</think>).)*$", tokenizer.decode(prompt), re.DOTALL) is not None, 0
    ending = tokenizer.encode("\n</think>\n\n")
    for i, token in enumerate(tokens):
        if i in drawn:
            assert not inside or spent < budget or token == closing and budget, (i, tokens, drawn)
            spent += inside and token != closing
        elif i == 0 or i - 1 in drawn:  # what is not drawn is the end of a thought
            forced = list(itertools.takewhile(lambda j: j not in drawn, range(i, len(tokens))))
            assert inside and spent == budget and [tokens[j] for j in forced] == (ending * 9)[:len(forced)]
        inside = (inside or token == opening) and token != closing
    assert spent <= budget
    return len(drawn) < len(tokens)


def test_a_think_budget_and_a_schema(talker):
    """The text that closes the thought is none of the schema's, though it has several tokens here."""
    prompt = talker.tokenizer.encode("<|im_start|>assistant\n<think>\n")
    model = dataclasses.replace(talker, eos_token_ids=(talker.tokenizer.token_to_id("<|im_end|>"),))
    assert str(Completion(model, prompt, schema={"const": "a"}, think_budget=0)) == '\n</think>\n\n"a"'


def test_a_think_budget_needs_the_tokens_of_a_thought(talker):
    backend = tokenizers.Tokenizer.from_str(talker.tokenizer.backend.to_str().replace("<think>", "<hm>"))
    model = dataclasses.replace(talker, tokenizer=Tokenizer(backend))
    assert "tokens <think> and </think>" in message_of(Completion, model, [1], think_budget=5)


@pytest.mark.parametrize("start, said", [
    *(("<think>a</think>b<|im_end|>\n<|im_start|>assistant\n", f"<think>hm</think>{space}")
      for space in ("", "\n")), ("Hi<|im_end|>\n<|im_start|>assistant\n<think>\n", "hm</think>")])
def test_a_schema_leaves_the_thought_free(talker, start, said):
    """Also after a turn with a thought, and where the prompt opens the thought; line breaks may follow it."""
    prompt = talker.tokenizer.encode(f"<|im_start|>assistant\n{start}")
    answer = Completion(ending(talker, said), prompt, schema={"const": "a"}, temperature=0)
    answer.speculator = None
    assert answer.finish().text == said + '"a"'


# ---- Tools -----------------------------------------------------------------------------------------------------------

def test_python_functions_are_tools(demo):
    parameters = {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "where"}, "days": {"type": "integer"}, "units": {"type": "array"}}}
    assert tool_schema(weather) == {"type": "function", "function": {
        "name": "weather", "description": "Tells the weather.", "parameters": parameters}}
    assert "can't be read" in message_of(tool_schema, min)
    answer = qwen3.chat(demo, "What is the weather in Lisbon?", [weather]).finish()
    assert answer.message["tool_calls"][0]["arguments"]["city"] == "Lisbon"


# ---- Answers taken apart ---------------------------------------------------------------------------------------------

@needs_official_files
def test_golden_parse():
    for line in (SHARED / "golden/parse.jsonl").read_text("utf-8").splitlines():
        case = json.loads(line)
        expected = (case[name] for name in ("reasoning", "content", "tool_calls", "reasoning_truncated"))
        assert parse_answer(case["raw"], case["think_open_in_prompt"]) == Answer(*expected), case["name"]


PARSED = [{"name": "f", "arguments": {"a": 1}}]


@pytest.mark.parametrize("text, opened, expected", [
    ("", False, Answer(None, "")), ("", True, Answer(None, "", [], True)),
    ("<think>", False, Answer(None, "", [], True)), ("Hi<|im_end|><|endoftext|>", False, Answer(None, "Hi")),
    ("<|im_end|>Hi", False, Answer(None, "<|im_end|>Hi")), ("\nHi \n", False, Answer(None, "\nHi \n")),
    ("<think>a\n</think>\n\nb</think>c", False, Answer("a", "b</think>c")),
    (f"<think>\nhm\n{CALL}", False, Answer("hm", "", PARSED)), (f"hm{CALL}<|im_end|>", True, Answer("hm", "", PARSED)),
    ("hm<tool_call>{", True, Answer("hm", "<tool_call>{")),
    (f"Let me see. \n{CALL}\n{CALL} done", False, Answer(None, "Let me see.", PARSED * 2)),
    (f"{CALL}<tool_call>", False, Answer(None, f"{CALL}<tool_call>")),
    ("<think>\n\n a \n b\t\n\n</think>\n\n c \n", False, Answer(" a \n b\t", " c \n")),
    ("a \n", True, Answer("a ", "", reasoning_truncated=True)),
    (f"x {CALL} <tool_call>[1]</tool_call>", False, Answer(None, f"x {CALL} <tool_call>[1]</tool_call>")),
    ('<tool_call>{"name": 5, "arguments": {}}', False, Answer(None, '<tool_call>{"name": 5, "arguments": {}}')),
    ('<tool_call>{"name": "f", "arguments": null}', False, Answer(None, "", [{"name": "f", "arguments": None}])),
])
def test_parse_answer(text, opened, expected):
    assert parse_answer(text, opened) == expected


def test_a_tag_is_given_as_soon_as_it_is_whole():
    reader = AnswerReader()
    assert [reader.push(piece) for piece in ("<thi", "nk>", "\nhm", "\n", "</think>", "\n\n", "Hi")] == [
        [], [("tag", "<think>")], [("tag", "\n"), ("thinking", "hm")], [], [("tag", "\n</think>")], [("tag", "\n\n")],
        [("content", "Hi")]]


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "9" * 5000, "{'a': 1}", "",
                                       "NaN", "[-Infinity]", '{"a": 1e999}'])
def test_hostile_tool_calls_stay_text(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse_answer(text) == Answer(None, text)


@pytest.mark.parametrize("text, content", [("<think>\na\n</think>\n\n  b", "  b"), ("<think>a</think>\tb ", "\tb "),
                                           ("<think>a</think>\n\n\n\u2003b\n", "\u2003b\n"), ("a</think> b", " b")])
def test_only_line_breaks_go_between_a_thought_and_its_answer(text, content):
    """Code and poems begin with spaces."""
    assert parse_answer(text, not text.startswith("<think>")).content == content


@fuzz(600, refused=False)
def test_an_answer_taken_apart_piece_by_piece(rng):
    """The same however the text is cut up, nothing lost; and what the whole of the text tells."""
    text, opened = any_answer(rng)
    expected, calls = taken_apart(text, opened)
    for pieces in (cut_up(rng, text, 9), [text], text):
        parts = pairs_of(pieces, opened)
        assert "".join(piece for _, piece in parts) == text
        reader = AnswerReader(opened)
        for piece in pieces:
            reader.push(piece)
        assert reader.finish() == expected
        thinking, content, call = ("".join(piece for kind, piece in parts if kind == wanted)
                                   for wanted in ("thinking", "content", "call"))
        assert thinking == (expected.reasoning or "")
        if expected.tool_calls or "<tool_call>" not in content:
            assert (content, call) == (expected.content, calls)
    return True


@given(st.text("a\n <>/", max_size=6), st.lists(st.sampled_from(["<think>", "</think>", CALL, "b", "\n"]), max_size=5))
def test_parse_answer_leaves_out_text_before_a_thought(before, rest):
    text = "".join(rest)
    if "<think>" in text and not re.search("</think>|<tool_call>", text[:text.index("<think>")]):
        assert parse_answer(before + text) == taken_apart(text[text.index("<think>"):], False)[0]
    elif text.startswith("</think>"):
        assert parse_answer(before + text) == taken_apart(before + text, True)[0]


@pytest.mark.parametrize("kind, text, value", [
    ("string", "03106", "03106"), ("string", "true", "true"), ("string", "null", "null"), ("string", "[1]", "[1]"),
    ("string", " two\n\n  lines\n", " two\n\n  lines\n"), ("string", "", ""), ("string", "<b>&amp;<", "<b>&amp;<"),
    ("integer", "5", 5), ("integer", "-12", -12), ("integer", "5.5", "5.5"), ("integer", "five", "five"),
    ("integer", "true", "true"), ("integer", "9" * 5000, "9" * 5000), ("number", "5", 5), ("number", "2.5e-3", 0.0025),
    ("number", "1e999", "1e999"), ("number", "NaN", "NaN"), ("boolean", "true", True), ("boolean", "False", False),
    ("boolean", "yes", "yes"), ("boolean", "1", "1"), ("object", '{"a": [1, "é"]}', {"a": [1, "é"]}),
    ("object", "[1]", "[1]"), ("array", '[\n 1,\n "</parameter>"\n]', [1, "</parameter>"]), ("array", "[1", "[1"),
    ("integer", "None", None), ("null", "null", None), (["string", "null"], "None", None),
    (["integer", "null"], "5", 5), (["null", "string"], "5", "5"),
    ({"anyOf": [{"type": "null"}, {"type": "number"}]}, "5", 5),
    ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[5]", [5]), ({"anyOf": [{"type": "string"}]}, "5", "5"),
    ({}, "5", 5), ({}, "five", "five"), ({"$ref": "#/x"}, '{"a": 1}', {"a": 1}), ("unknown", "5", 5)], ids=str)
def test_arguments_in_xml_have_their_schemas_types(kind, text, value):
    for tools in ([tool(a=kind)], [tool("g", a="string"), tool(a=kind)["function"]]):
        [call] = parse_answer(xml_call("f", a=text), value_of=values_for(tools)).tool_calls
        assert call == {"name": "f", "arguments": {"a": value}} and type(call["arguments"]["a"]) is type(value)


@pytest.mark.parametrize("tools", [
    None, [], [tool("other", a="string")], [{"name": "f"}], [{"name": "f", "parameters": 5}], [{"function": None}],
    [{"name": "f", "parameters": {"properties": {"a": 5}}}]], ids=str)
def test_arguments_without_a_schema_are_json_or_text(tools):
    for text, value in (("5", 5), ("x: 5", "x: 5")):
        assert parse_answer(xml_call("f", a=text),
                            value_of=values_for(tools)).tool_calls[0]["arguments"] == {"a": value}


XML = xml_call("f", a="1")
TAGS_IN_TEXT = f"</function></tool_call><think></parameter> {CALL}"


@pytest.mark.parametrize("text, expected", [
    (XML + "\n" + xml_call("g"), Answer(None, "", [*PARSED, {"name": "g", "arguments": {}}])),
    (f"Let me see.\n\n{XML} done", Answer(None, "Let me see.", PARSED)),
    (f"{CALL}\n{XML}", Answer(None, "", PARSED * 2)),
    (f"<think>\nhm\n</think>\n\n{XML}<|im_end|>", Answer("hm", "", PARSED)),
    (f"<think>\nhm\n{XML}", Answer("hm", "", PARSED)),
    (XML.removesuffix("\n</tool_call>"), Answer(None, "", PARSED)),  # as with JSON, the last tag may be missing
    (XML.replace("\n", ""), Answer(None, "", PARSED)),
    (xml_call("f", unnamed="1"), Answer(None, "", [{"name": "f", "arguments": {"unnamed": "1"}}])),
    *((start + xml_call("f", s=TAGS_IN_TEXT), Answer(thought, "", [{"name": "f", "arguments": {"s": TAGS_IN_TEXT}}]))
      for start, thought in (("", None), ("x</think>", "x"))),
])
def test_calls_in_xml(text, expected):
    """Also while they grow: a closing tag in a value ends no call."""
    value_of = values_for([tool(a="integer", s="string")])
    assert parse_answer(text, value_of=value_of) == expected
    reader = AnswerReader(text.startswith("x</think>"), value_of)
    for char in text.removesuffix("<|im_end|>"):
        reader.push(char)
    assert reader.finish() == expected


@pytest.mark.parametrize("text", [
    XML.replace("\n</parameter>", ""), XML.replace("</function>", ""), XML.replace("<function=f>", "<function=>"),
    XML.replace("<function=f>", "<function={{ name }}>"), XML.replace("<function=f>\n", "<function=f>\nhm\n"),
    XML.replace("</function>", "hm</function>"), XML[:-40], "<tool_call><function=f", XML.replace("f>", "f", 1),
    f"{XML}\n<tool_call>\n<function=f>\n<parameter=a>\n1", "<tool_call>" + "<function=f><parameter=a>" * 3000,
    "<tool_call><function=f>" + "<parameter=a></parameter>" * 20_000, "<tool_call>" * 20_000], ids=lambda it: it[:60])
def test_malformed_calls_in_xml_stay_text(text):
    assert parse_answer(text, value_of=values_for([tool(a="integer")])) == Answer(None, text)
