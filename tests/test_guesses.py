"""qwen3_lib/generation/guesses.py and steps.py: guessed tokens change no answer, and as many are made as pay."""
import dataclasses
import itertools

import numpy as np
import pytest

import qwen3
from helpers import message_of, with_engine, with_logits
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.guesses import Draft, Lookup, Proposer, Speculator
from qwen3_lib.generation.steps import Run, step

pytestmark = pytest.mark.core


def test_guesses_end_with_the_context(model):
    class Wrong(Proposer):
        def guess(self, sequence, cache, n):
            return [1] * n

        def length(self, plain, beside):
            return self.n

    prompt = [1] * (model.config.context_length - 3)
    answer = Completion(model, prompt, draft=Wrong(8), logit_bias={2: 100}, eos_token_ids=(), temperature=0).finish()
    assert (answer.token_ids, answer.finish_reason) == ([2] * 3, "length")


@pytest.mark.parametrize("text, guess", [
    ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [9, 5]), ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [8, 1]),
    ([5, 2, 3, 8, 7, 1, 2, 3], [8, 7]), ([5, 3, 8, 7, 1, 2, 3], [])])
def test_a_lookup_goes_on_as_the_last_time_after_three_tokens_or_else_two(model, text, guess):
    assert Lookup(2).guess(qwen3.Sequence(model, text), None, 2) == guess


def test_right_guesses_save_passes(model):
    sequence = qwen3.Sequence(model, [1, 2, 3, 4, 1, 2], 20, temperature=0, eos_token_ids=())
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
        guesses.plain, guesses.sources[0].check = 1.0, 0.0
    assert sequence.token_ids == [3, 4, 1, 2] * 5 and passes == 5


@pytest.mark.parametrize("right, make, check, beside, expected", [
    (1, 0, 0, 0, 8), (0.5, 0.5, 0.6, 0, 0), (0.9, 0.3, 0.05, 0, 4), (0.9, 0.3, 0.05, 1, 2), (0.9, 0.3, 0.05, 3, 0),
    (0, 0.1, 0.1, 0, 0), (0.7, 0.3, 0.05, 0, 2)])
def test_as_many_guesses_as_pay(right, make, check, beside, expected):
    """n guesses give beside + 1 + r + r² + … tokens for 1 + n (make + check) seconds: the best n of this table."""
    source = Lookup(8)
    source.right, source.make, source.check = right, make, check
    assert source.length(1.0, beside) == expected
    if expected == 0:  # then one is tried again after a while
        assert [source.length(1.0) for _ in range(Proposer.PAUSE)] == [0] * (Proposer.PAUSE - 1) + [1]


@pytest.mark.parametrize("right, expected", [(0, 0), (1, 3), (4, 8)])
def test_a_source_learns_how_many_guesses_pay(right, expected):
    """From passes of 1.2 s in place of 1 s: always wrong, right every second time (see above), always right."""
    source = Lookup(8)
    for _ in range(99):
        source.learn(4, right, 1.2, 1.0)
    assert source.length(1.0) == expected


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
    draft.length = lambda *_: 4
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
