"""--lookup: guesses from what was there before are checked, so only the time changes, never the answer."""
import itertools
from dataclasses import replace

import numpy as np
import pytest

import qwen3
import qwen3_numba
from configs import BASE
from make_random_model import make_random_model
from qwen3_lookup import Lookup

pytestmark = pytest.mark.core

QUESTIONS = ["What is 417 + 385?", "Tell me a story about a fox.", "What is the capital of Peru?"]


@pytest.fixture(scope="module", params=[None, "int8", "int4", "numpy"])
def model(request):
    if request.param == "numpy":
        return qwen3.load_model(qwen3.BUNDLED)
    return qwen3_numba.load_model(qwen3.BUNDLED, request.param)


def prompts(model):
    return [model.tokenizer.encode(model.tokenizer.apply_chat_template([{"role": "user", "content": question}]))
            for question in QUESTIONS]


@pytest.mark.parametrize("n", [1, 4, 7, 20])
def test_greedy_answers_stay_the_same(model, n):
    for prompt in prompts(model):
        expected = list(qwen3.generate(model, prompt, 150, temperature=0))
        forward = Lookup(model.engine.forward, prompt, n)
        assert list(qwen3.generate(model, prompt, 150, temperature=0, forward=forward)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_sampled_answers_stay_the_same(model, seed):
    """With the same seed: each token is drawn from the same distribution with the same random numbers."""
    for prompt in prompts(model):
        options = dict(temperature=1.2, top_p=0.95, seed=seed)
        expected = list(qwen3.generate(model, prompt, 80, **options))
        forward = Lookup(model.engine.forward, prompt, 5)
        assert list(qwen3.generate(model, prompt, 80, **options, forward=forward)) == expected


def counting(model, monkeypatch):
    """(the model, a list to which each of its passes adds how many tokens it computes); guesses always seem to pay."""
    counts, forward = [], model.engine.forward

    def counted(model, token_ids, cache, all_logits=False):
        counts.append(len(token_ids))
        return forward(model, token_ids, cache, all_logits)

    monkeypatch.setattr(Lookup, "timed", lambda self, *_: self.seconds.update({False: 1.0}))
    return replace(model, engine=replace(model.engine, forward=counted)), counts


def test_the_distribution_is_exact(tmp_path, monkeypatch):
    """Tokens that were guessed, often wrongly, come over many seeds as often as their probability says."""
    model = qwen3.load_model(make_random_model(BASE | {"vocab_size": 3, "eos_token_id": []}, tmp_path))
    prompt, n = [0, 1, 2, 0, 1, 2, 0, 1], 1500
    counted, passes = counting(model, monkeypatch)
    counts = np.zeros((3, 3))
    for seed in range(n):  # the fourth and the fifth of six
        tokens = list(qwen3.generate(counted, prompt, 6, temperature=1.0, seed=seed, eos_token_ids=(),
                                     forward=Lookup(counted.engine.forward, prompt, 2)))
        counts[tuple(tokens[3:5])] += 1
    several = sum(1 < count < len(prompt) for count in passes)
    assert several > n and n < len(passes) - n < 5 * n - several / 8  # there were guesses, and some were right
    probability = np.zeros((3, 3))
    for answer in itertools.product(range(3), repeat=5):
        logits = qwen3.forward(model, [*prompt, *answer], qwen3.KVCache(model.config), True)[len(prompt) - 1:-1]
        probability[answer[3:]] += np.exp(sum(qwen3.log_softmax(row)[token] for row, token in zip(logits, answer)))
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-5)
    chi_square = ((counts - n * probability) ** 2 / (n * probability)).sum()
    assert chi_square < 26.1  # 8 degrees of freedom: exceeded once in a thousand times


def test_it_saves_passes(monkeypatch):
    """When the answer occurs in the text, whatever the model says. Without pauses, which depend on the time."""
    monkeypatch.setattr(Lookup, "PAUSE", 0)
    model, counts = counting(qwen3_numba.load_model(qwen3.BUNDLED), monkeypatch)
    prompt, options = model.tokenizer.encode("Tell me a story about a fox."), {"temperature": 0, "eos_token_ids": ()}
    expected = list(qwen3.generate(model, prompt, 60, **options))
    counts.clear()
    assert list(qwen3.generate(model, prompt, 60, forward=Lookup(model.engine.forward, [*expected, *prompt], 4),
                               **options)) == expected
    assert len(counts) < 30 and max(counts[1:]) == 5


def test_it_pauses_when_it_does_not_pay():
    lookup = Lookup(qwen3.forward, [1, 2, 3, 4, 1, 2, 3], 4)
    assert lookup.guess(10) == []  # what a token costs without guesses isn't known yet
    lookup.timed(0, 0.010, 0)
    assert lookup.guess(10) == [4, 1, 2, 3]
    lookup.timed(4, 0.012, 2)  # three tokens for a little more than one: it pays
    assert lookup.guess(2) == [4, 1]
    lookup.timed(4, 0.100, 4)  # nothing was right, and the pass took long
    assert [bool(lookup.guess(10)) for _ in range(lookup.PAUSE + 1)] == [False] * lookup.PAUSE + [True]


@pytest.mark.parametrize("budget", [0, 1, 5, 13])
def test_guesses_respect_a_thought_that_was_closed(budget):
    """Tokens forced by the think budget end a run of right guesses."""
    model = qwen3.load_model(qwen3.BUNDLED)
    options = {"think_budget": budget, "temperature": 0, "max_new_tokens": 80}
    question = "What is 417 + 385? What is 417 + 385?"
    expected = qwen3.chat(model, question, **options).finish().token_ids
    assert qwen3.chat(model, question, **options, lookup=6).finish().token_ids == expected
