"""tokenizer_utils.py on streams of text, at random: held against functions of the whole text."""
import contextlib
import dataclasses
import itertools
import re

import numpy as np
import pytest

import qwen3
from fuzzing import any_answer, any_text, cut_up, fuzz, merged, parts_of
import tokenizer_utils
from tokenizer_utils import held_back, parse_answer, split_stream, until_stop

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


# ----------------------------------------------------------------------------------------------------------------------
# Stop texts
# ----------------------------------------------------------------------------------------------------------------------

def until_first(text, stop):
    """The text before the stop text that is complete first; of several that end there, the longest."""
    for end in range(len(text) + 1):
        if found := [mark for mark in stop if text[:end].endswith(mark)]:
            return text[:end - max(map(len, found))]
    return text


@fuzz(8000, refused=False)
def test_until_stop(rng):
    """No part of a stop text gets through, however the text is cut up, and nothing else is held back."""
    letters = rng.choice(["ab", "aab", "abc", "<|im_end|>", "é\n日a"])
    text = "".join(rng.choices(letters, k=rng.randint(0, 30)))
    stop = tuple("".join(rng.choices(letters, k=rng.randint(1, rng.choice([2, 6])))) for _ in range(rng.randint(0, 4)))
    whole = until_first(text, stop)
    assert not any(mark in whole for mark in stop)
    pieces = cut_up(rng, text)
    passed = list(until_stop(pieces, stop))
    assert "".join(passed) == whole, (pieces, stop, passed)
    assert "".join(until_stop([text], stop)) == whole and "".join(until_stop(text, stop)) == whole, (text, stop)
    for i in range(len(pieces)):  # what has come so far: all of it has gone on but for a beginning of a stop text
        so_far = "".join(pieces[:i])
        if until_first(so_far, stop) == so_far:
            passed = passed_before_the_end(pieces[:i], stop)
            assert so_far.startswith(passed) and len(so_far) - len(passed) == held_back(so_far, stop)
    return True


def passed_before_the_end(pieces, stop):
    """What until_stop has passed on when it asks for more than these pieces."""
    passed = []

    def endless():
        yield from pieces
        raise EOFError

    with contextlib.suppress(EOFError):
        for piece in until_stop(endless(), stop):
            passed.append(piece)
    return "".join(passed)


@fuzz(5000, refused=False)
def test_held_back(rng):
    letters = rng.choice(["ab", "abc", "<think>/"])
    text, *marks = ["".join(rng.choices(letters, k=rng.randint(0, 9))) for _ in range(rng.randint(1, 4))]
    beginnings = {mark[:n] for mark in marks for n in range(len(mark))}
    assert held_back(text, marks) == max((len(start) for start in beginnings if text.endswith(start)), default=0)
    return True


@fuzz(2500, refused=False)
def test_stop_texts_of_a_model(rng, talker):
    """An answer with stop texts is the one without, cut behind its thought; why it ended is said."""
    prompt = [rng.randrange(322) for _ in range(3)]
    options = {"max_new_tokens": rng.randint(1, 12), "seed": rng.randrange(1000), "temperature": 1.0}
    full = qwen3.Completion(talker, prompt, **options).finish()
    stop = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(full.text) + 1)
        stop.append(full.text[at:at + rng.randint(1, 6)] or any_text(rng) or "x")
    before, thought = "", ""
    for kind, piece in parts_of(full.text, full.think_open_in_prompt):
        before, thought = (before + piece, thought) if kind != "thinking" else (before, before + piece)
        if before.strip() or thought:
            break
    whole = thought + until_first(full.text[len(thought):], stop)
    completion = qwen3.Completion(talker, prompt, stop=stop, **options)
    assert "".join(completion) == completion.text == whole
    assert completion.token_ids == full.token_ids[:len(completion.token_ids)]
    assert completion.finish_reason == ("stop" if whole != full.text and "\ufffd" not in "".join(stop)
                                        else completion.finish_reason)
    return True


def saying(model, prompt, script):
    """The model with a forward pass after which the tokens of `script`, and no others, follow the prompt."""
    def forward(model, token_ids, cache, all_logits=False):
        sequence = np.zeros(len(token_ids), int)
        cache.advance(sequence, cache.reserve(sequence), token_ids)
        logits = np.zeros(model.config.vocab_size, np.float32)
        logits[script[cache.length - len(prompt)]] = 1
        return logits
    return dataclasses.replace(model, engine=dataclasses.replace(qwen3.NUMPY, forward=forward))


@fuzz(2000, refused=False)
def test_stop_texts_do_not_end_a_thought(rng, talker):
    """However its tokens cut up the text: a stop text within the thought is passed on, the first one behind it ends."""
    encode, end = talker.tokenizer.encode, talker.eos_token_ids[0] if talker.eos_token_ids else 1
    stop = [rng.choice(["fox", "f", "a fox", "o\n", "x</", "think", "é日", "\n\n\n"]) for _ in range(rng.randint(1, 2))]
    words = [*stop, "a ", "fo", "x", "é", " think", "\n"]
    thought, answer = ("".join(rng.choices(words, k=rng.randint(0, 6))) for _ in range(2))
    opened, closed = rng.random() < 0.5, rng.random() < 0.8
    before = "" if opened else rng.choice(["", "", "\n", " \n"]) + "<think>"
    rest = f"\n\n{answer}" if closed else ""
    text = f"{before}\n{thought}" + f"\n</think>{rest}" * closed
    script = [token for piece in cut_up(rng, text, 9) if piece for token in encode(piece)]
    prompt = encode("Hi<think>" if opened else "Hi")
    room = talker.config.context_length - len(prompt)
    if len(script) >= room:
        return True
    completion = qwen3.Completion(saying(talker, prompt, [*script, end]), prompt, stop=stop, temperature=0,
                                  eos_token_ids=[end]).finish()
    assert completion.text == text[:len(text) - len(rest)] + until_first(rest, stop), (text, stop)
    assert completion.finish_reason == "stop"
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The parts of an answer
# ----------------------------------------------------------------------------------------------------------------------

@fuzz(8000)
def test_split_stream(rng):
    """The same parts however the text is cut up, nothing lost; and they are those of parse_answer where it has them."""
    text, opened = any_answer(rng)
    expected = parts_of(text, opened)
    for pieces in (cut_up(rng, text, 9), [text], text):
        parts = list(split_stream(pieces, opened))
        assert "".join(piece for _, piece in parts) == text
        assert merged(parts) == expected
    kinds = [kind for kind, _ in expected]
    if text.endswith(tokenizer_utils.END_TOKENS) or text.count("<think>") + opened != ("thinking" in kinds):
        return False
    thinking, content, call = ("".join(piece for kind, piece in expected if kind == wanted)
                               for wanted in ("thinking", "content", "call"))
    if not thinking and "</think>" in text or thinking and kinds[0] != "thinking":
        return False
    if thinking and not thinking.endswith("</think>"):
        return False  # a call may yet end the thought, which is only known at the end
    answer = parse_answer(text, opened)
    thought = thinking.removeprefix("" if opened else "<think>").removesuffix("</think>").strip("\n")
    assert answer.reasoning == (thought or None)
    content = (content if answer.tool_calls else content + call).lstrip("\n" if thinking else "")
    assert answer.content == (content.rstrip() if answer.tool_calls else content)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The think budget
# ----------------------------------------------------------------------------------------------------------------------

def biased(model, bias):
    """The model with something added to all its logits."""
    def forward(*args, **options):
        return qwen3.forward(*args, **options) + bias
    return dataclasses.replace(model, engine=dataclasses.replace(qwen3.NUMPY, forward=forward))


@fuzz(2500)
def test_think_budget(rng, talker):
    """No more tokens of thought are drawn than the budget has, however often a thought is opened and closed."""
    tokenizer, budget = talker.tokenizer, rng.choice([0, 1, 2, 3, 5, 9, None])
    opening, closing = map(tokenizer.token_to_id, ("<think>", "</think>"))
    bias = np.zeros(talker.config.vocab_size, np.float32)
    bias[opening], bias[closing] = rng.uniform(-3, 9), rng.uniform(-3, 9)
    prompt = tokenizer.encode(rng.choice(["Hi", "Hi<think>", "<think>\n", "<think>\nI a", "<think>a</think>", "a</think>",
                                          "<think>a</think><think>b", "<think>\n\n</think>\n\n"]))
    drawn, tokens = [], []  # the places of those that the model has drawn; all
    limit = rng.randint(1, 24)
    draw_one = qwen3.sampler(talker, np.array(prompt), qwen3.Sampling(1.0), rng.randrange(1000))

    def draw(logits, forced=None):
        if forced is None:
            drawn.append(len(tokens))
        return draw_one(logits, forced)

    limited = draw if budget is None else tokenizer_utils.with_think_budget(draw, tokenizer, prompt, budget)
    for token in qwen3.generate(biased(talker, bias), prompt, limit, draw=limited, eos_token_ids=()):
        tokens.append(token)
    assert len(tokens) == limit
    inside, spent = re.search("<think>((?!</think>).)*$", tokenizer.decode(prompt), re.DOTALL) is not None, 0
    ending = tokenizer.encode("\n</think>\n\n")
    for i, token in enumerate(tokens):
        if i in drawn:
            assert not inside or budget is None or spent < budget or token == closing and budget, (i, tokens, drawn)
            spent += inside and token not in (opening, closing)
        elif i == 0 or i - 1 in drawn:  # what is not drawn is the end of a thought
            forced = list(itertools.takewhile(lambda j: j not in drawn, range(i, limit)))
            repeated = ending * (len(forced) // len(ending) + 1)
            assert inside and spent == budget and [tokens[j] for j in forced] == repeated[:len(forced)]
        inside = (inside or token == opening) and token != closing
    assert budget is None or spent <= budget
    return len(drawn) < len(tokens)
