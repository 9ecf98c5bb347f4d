"""qwen3_lib/generation/guesses.py and steps.py: guessed tokens change no answer, and as many are made as pay."""
import dataclasses
import itertools
import random

import numpy as np
import pytest

import qwen3
from helpers import message_of, with_engine, with_logits
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.guesses import MTP, Draft, Lookup, Proposer, Speculator
from qwen3_lib.generation.steps import Run, step

pytestmark = pytest.mark.core


def test_guesses_end_with_the_context(model):
    class Wrong(Proposer):
        def guess(self, sequence, cache, n):
            return [1] * n

        def length(self, beside=0):
            return self.most

    prompt = [1] * (model.config.context_length - 3)
    answer = Completion(model, prompt, draft=Wrong(8), logit_bias={2: 100}, eos_token_ids=(), temperature=0).finish()
    assert (answer.token_ids, answer.finish_reason) == ([2] * 3, "length")


@pytest.mark.parametrize("text, guess", [
    ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [9, 5]), ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [8, 1]),
    ([5, 2, 3, 8, 7, 1, 2, 3], [8, 7]), ([5, 3, 8, 7, 1, 2, 3], [])])
def test_a_lookup_goes_on_as_the_last_time_after_three_tokens_or_else_two(model, text, guess):
    assert Lookup(2).guess(qwen3.Sequence(model, text), None, 2) == guess


def test_right_guesses_save_passes(model):
    sequence = qwen3.Sequence(model, [1, 2, 3, 4, 1, 2], 20, eos_token_ids=(), sampling=qwen3.Sampling())
    guesses, passes = Speculator([Lookup(4)]), 0

    def following(model, new):
        nonlocal passes
        passes += 1
        new.advance()
        ids = new.token_ids[new.wanted]
        return np.eye(320, dtype=np.float32)[[{1: 2, 2: 3, 3: 4, 4: 1}[int(i)] for i in ids]], new.x

    run = Run(sequence, qwen3.KVCache(model.config), guesses)
    run.cache.reserve(100)
    while sequence.finish_reason is None:
        step(with_engine(model, run=following), [run])
    assert sequence.token_ids == [3, 4, 1, 2] * 5 and passes == 5  # with 0, 3, 4, 4 and 4 guesses
    assert (guesses.passes, guesses.guessed, guesses.accepted) == (5, 15, 15)


def test_one_guess_more_after_a_right_pass_and_one_fewer_after_another():
    source, found = Lookup(4), list[int]()
    for share in [1] * 4 + [0.9] * 2 + [1]:
        found.append(n := source.length())
        source.learn(n, int(share * n))
    assert found == [3, 4, 4, 4, 4, 3, 2] and source.length() == 3


def speed(source, share, others=0, passes=4000):
    """Tokens in the time of a pass without guesses, where each guess is right with this probability."""
    rng, tokens, time = random.Random(0), 0, 0.0
    for _ in range(passes):
        n = source.length(others)
        right = next((i for i in range(n) if rng.random() >= share), n)
        if n:
            source.learn(n, right)
        tokens, time = tokens + 1 + right, time + 1 + source.PRICE * n * (1 + others)
    return tokens / time


@pytest.mark.parametrize("source", [lambda: Lookup(6), lambda: MTP(None), lambda: NoModel()])
@pytest.mark.parametrize("share, least", [(0.25, 0.95), (0.5, 0.9), (0.75, 0.85), (0.9, 0.92), (0.95, 0.96), (1, 0.99)])
def test_nearly_as_many_guesses_as_pay(source, share, least):
    """k guesses give 1 + r + r² + … + r^k tokens for 1 + k PRICE passes: beside the best k, or none."""
    best = max(sum(share ** i for i in range(k + 1)) / (1 + k * source().PRICE) for k in range(source().most + 1))
    assert speed(source(), share) > least * best


@pytest.mark.parametrize("source", [lambda: Lookup(8), lambda: MTP(None), lambda: NoModel()])
def test_guesses_that_are_never_right_cost_nearly_nothing(source):
    assert speed(source(), 0) > 0.985 and speed(source(), 0, passes=100) > 0.965
    assert speed(late := source(), 1, passes=100) > 2 and speed(late, 0) > 0.98 and speed(late, 1) > 2


def test_guesses_among_other_sequences():
    """All wait for a guess, so fewer pay, and none where a guess costs half a pass."""
    assert [MTP(None).length(others) for others in (0, 3, 4, 30)] == [3, 3, 0, 0]
    assert speed(MTP(None), 0.9, 1) > 1.8 and speed(MTP(None), 0.9, 3) > 1.3
    assert all(speed(MTP(None), share, others) > 0.945 for share in (0, 0.25, 0.5) for others in (1, 2, 3, 4, 30))


class NoModel(Draft):
    def __init__(self):
        Proposer.__init__(self, self.MOST)


def test_a_draft_may_have_more_rows_or_a_shorter_context_than_the_model(model):
    """Rows behind those of the tokens only fill up the matrix: what a draft draws there is no guess."""
    rows = with_logits(model, lambda logits, _: np.append(logits, np.full((1, 8), 99), 1))
    short = dataclasses.replace(model, config=dataclasses.replace(model.config, context_length=9))
    options = {"temperature": 0, "max_new_tokens": 12, "eos_token_ids": ()}
    for draft in (rows, short):
        assert Completion(model, [1, 2], draft=draft, **options).finish().token_ids == \
            Completion(model, [1, 2], **options).finish().token_ids


def test_a_draft_with_the_same_weights_guesses_right(model):
    """Whatever is drawn with, also after a wrong guess, and in the next answer."""
    calls = itertools.count()

    draft = Draft(with_logits(model, lambda logits, _: logits[:, ::-1] if next(calls) == 4 else logits), model)
    draft.length = lambda beside: 4
    for prompt, wrong in (([1, 2, 3], {1, 2, 3, 4}), ([1, 4], {0})):
        guesses = Completion(model, prompt, max_new_tokens=60, seed=3, temperature=1.0, repetition_penalty=1.5, top_k=9,
                             eos_token_ids=(), draft=draft).finish().speculator
        assert guesses.accepted > 0 and guesses.guessed - guesses.accepted in wrong


def test_guesses_in_a_cache_that_another_answer_has_taken_are_refused(model):
    cache = qwen3.KVCache(model.config)
    next(one := Completion(model, [3, 2, 1, 2], cache=cache, lookup=4))
    next(Completion(model, [4, 2], cache=cache))
    assert "each answer its own cache" in message_of(one.finish)


def test_a_draft_needs_the_same_tokenizer(tiny_model, demo):
    assert "tokenizers differ" in message_of(Completion, demo, [1, 2], draft=tiny_model)
