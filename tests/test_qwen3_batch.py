"""Continuous batching: requests that come, go and fail as they like, compared with each of them alone."""
import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
import qwen3_batch
import qwen3_numba as fast
from configs import BASE, ROOT
from helpers import assert_one_line, message_of, patiently, random_ids
from make_random_model import make_random_model
from qwen3_batch import PIECE, Batch, slots_in

BEGINNINGS = [[], random_ids(30, 1), random_ids(200, 2)]  # what several requests have in common


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_random_model(BASE | {"max_position_embeddings": 1000, "num_hidden_layers": 1},
                             tmp_path_factory.mktemp("batch"), "bfloat16", tokenizer=ROOT / "demo")
    return fast.load_model(path, "int8", 2)


@st.composite
def requests(draw):
    options = draw(st.fixed_dictionaries({"max_new_tokens": st.integers(1, 20)}, optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]), "top_k": st.integers(0, 50), "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]), "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 1.0]), "stop": st.sampled_from(["a", ["e", "th"], [" "]]),
        "logprobs": st.integers(0, 3), "eos_token_ids": st.sampled_from([[], list(range(0, 320, 9))])}))
    beginning = draw(st.sampled_from(BEGINNINGS))
    own = random_ids(draw(st.one_of(st.integers(1, 40), st.integers(1, 400))), draw(st.integers(0, 99)))
    arrival, lives = draw(st.integers(0, 30)), draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))
    return beginning + own, options | {"seed": draw(st.integers(0, 9))}, arrival, lives


def told(answer):
    return answer.token_ids, answer.text, answer.finish_reason, answer.logprobs


@given(st.lists(requests(), min_size=1, max_size=9), st.integers(1, 5))
@patiently(25)
def test_answers_are_those_of_single_runs(model, wanted, slots):
    """Requests that arrive at any time, with any settings, some cancelled: exactly the same ids, texts and logprobs."""
    batch, results, cancelled, step = Batch(model, slots, 900), {}, set(), 0
    while step <= 30 or not batch.idle:
        for i, (prompt, options, arrival, lives) in enumerate(wanted):
            if arrival == step:
                batch.add(i, prompt, **options)
            if lives is not None and step == arrival + lives and i not in results:
                batch.cancel(i)
                cancelled.add(i)
        results |= dict(batch.step())
        step += 1
    assert results.keys() | cancelled == set(range(len(wanted))) and not results.keys() & cancelled
    for i, answer in results.items():
        prompt, options, *_ = wanted[i]
        assert told(answer) == told(qwen3.Completion(model, prompt, **options).finish())


def counting(model):
    """(the model, a list to which each pass adds how many tokens each slot gets)."""
    passes = []

    def counted(model, ids, cache):
        passes.append([len(each) for each in ids])
        return fast.forward(model, ids, cache)

    return dataclasses.replace(model, engine=dataclasses.replace(model.engine, forward=counted)), passes


def test_a_common_beginning_is_computed_once(model):
    counted, passes = counting(model)
    batch = Batch(counted, 4, 500)
    for i in range(9):
        batch.add(i, BEGINNINGS[2] + random_ids(5, i), max_new_tokens=4, eos_token_ids=())
    answers = {}
    while not batch.idle:
        answers |= dict(batch.step())
    assert sum(map(sum, passes)) == 200 + 9 * 5 + 9 * 3  # the beginning, each end, each token but the last ones
    assert sorted(answer.cached_tokens for answer in answers.values()) == [0] + [200] * 8


def test_running_answers_wait_for_no_more_than_a_piece(model):
    counted, passes = counting(model)
    batch = Batch(counted, 3, 900)
    first = batch.add("first", [1, 2, 3], max_new_tokens=30, eos_token_ids=())
    batch.step()
    for name in "ab":
        batch.add(name, random_ids(5 * PIECE + 7, ord(name)), max_new_tokens=3, eos_token_ids=())
    for n in range(2, 13):
        batch.step()
        assert len(first.token_ids) == n and first.text
    assert all(sum(each) <= PIECE + 2 for each in passes)
    assert sum(1 for each in passes if sum(each) > PIECE) >= 9  # and the pieces are full


def test_either_engine(demo):
    """The NumPy engine's sums depend on the batch, so only the likely tokens are sure to be the same."""
    batch, questions = Batch(demo, 2, 300), ["What is the capital of France?", "3 + 4", "Hello!"]
    for question in questions:
        text = demo.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        batch.add(question, demo.tokenizer.encode(text), max_new_tokens=40, temperature=0.0)
    answers = {}
    while not batch.idle:
        answers |= dict(batch.step())
    for question in questions:
        alone = qwen3.chat(demo, question, max_new_tokens=40, temperature=0.0).finish()
        assert answers[question].token_ids == alone.token_ids and answers[question].answer == alone.answer


def test_a_request_that_fails_leaves_the_others_alone(model):
    def broken(model, ids, cache):
        logits = fast.forward(model, ids, cache)
        return np.array([np.full_like(row, np.nan) if cache.token_ids[slot, 0] == 7 else row
                         for slot, row in zip([i for i, each in enumerate(ids) if len(each)], logits)])

    batch = Batch(dataclasses.replace(model, engine=dataclasses.replace(model.engine, forward=broken)), 3, 100)
    for i, prompt in enumerate([[1, 2], [7, 2], [3]]):
        batch.add(i, prompt, max_new_tokens=5, eos_token_ids=())
    results = {}
    while not batch.idle:
        results |= dict(batch.step())
    assert isinstance(results[1], qwen3.InputError)
    for i, prompt in ((0, [1, 2]), (2, [3])):
        assert told(results[i]) == told(qwen3.Completion(model, prompt, 5, eos_token_ids=()).finish())


def test_refusals(model):
    batch = Batch(model, 2, 50)
    answer = batch.add("a", [1, 2, 3], max_new_tokens=1000)
    assert_one_line(message_of(batch.add, "a", [1]), "'a'", "already")
    assert_one_line(message_of(batch.add, "b", [1] * 50), "50", "room")
    assert_one_line(message_of(batch.add, "b", [1] * 5000), "5000", "room")
    assert_one_line(message_of(batch.add, "b", []), "empty")
    assert_one_line(message_of(batch.add, "b", [1], temperature=-1), "temperature")
    assert_one_line(message_of(batch.add, "b", [1], max_new_tokens=0), "max_new_tokens")
    assert_one_line(message_of(batch.add, "b", [1], lookup=3), "lookup")
    assert_one_line(message_of(batch.cancel, "b"), "'b'")
    assert_one_line(message_of(answer.finish), "step()")
    assert_one_line(message_of(Batch, model, 0, 10), "0")
    assert_one_line(message_of(Batch, model, 1, 0), "0")
    assert batch.free == 1 and not batch.idle


def test_an_answer_ends_where_its_room_does(model):
    batch = Batch(model, 1, 50)
    batch.add(1, random_ids(40), eos_token_ids=())
    while not batch.idle:
        ended = batch.step()
    [(_, answer)] = ended
    assert len(answer.token_ids) == 10 and answer.finish_reason == "length"


def test_slots_follow_from_memory(model, monkeypatch):
    size = 2 * 2 * 1 * 2 * 32 * 100  # k and v, 16 bits, one layer, 2 heads of 16 numbers filled up to 32, 100 positions
    assert slots_in(model, 100, size) == 1 and slots_in(model, 100, 5 * size - 1) == 4
    assert slots_in(model, 100, 10**12) == qwen3_batch.MOST_SLOTS
    assert_one_line(message_of(slots_in, model, 10**6, 1000), "256 MB", "memory")
    monkeypatch.setattr(qwen3_batch, "free_memory", lambda: 6 * size)
    assert slots_in(model, 100) == 3
    monkeypatch.undo()
    assert 2**20 < qwen3_batch.free_memory() < 2**50


def test_memory_of_a_container(monkeypatch):
    files = {"/proc/meminfo": "MemAvailable: 9000000 kB\n", "/sys/fs/cgroup/memory.max": "4000000\n",
             "/sys/fs/cgroup/memory.current": "3000000\n"}
    monkeypatch.setattr(qwen3_batch.Path, "exists", lambda self: str(self) in files)
    monkeypatch.setattr(qwen3_batch.Path, "read_text", lambda self: files[str(self)])
    assert qwen3_batch.free_memory() == 1_000_000


def test_a_cache_is_no_option_of_a_request(model):
    refused = message_of(Batch(model, 1, 50).add, 1, [5, 6], cache=model.engine.new_cache(model.config))
    assert_one_line(refused, "no option cache")


def test_a_step_that_was_interrupted_is_made_again(model):
    """At any of its passes: the answers are those of a batch without interruptions."""
    prompts, answers = [random_ids(n, n) for n in (700, 30, 420)], []
    for interrupted in (False, True):
        batch, forward, calls = Batch(model, 3, 900), model.engine.forward, []

        def broken(*args):
            result = forward(*args)
            calls.append(args)
            if interrupted and len(calls) % 3 == 0:
                raise KeyboardInterrupt
            return result

        batch.model = dataclasses.replace(model, engine=dataclasses.replace(model.engine, forward=broken))
        results = [batch.add(i, prompt, max_new_tokens=9, eos_token_ids=[]) for i, prompt in enumerate(prompts)]
        while not batch.idle:
            with contextlib.suppress(KeyboardInterrupt):
                batch.step()
        answers.append([told(result) for result in results])
    assert answers[0] == answers[1]
