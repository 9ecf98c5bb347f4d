"""qwen3_lib/generation/batch.py: requests that come, go and fail as they like, compared with each of them alone."""
import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
from configs import BASE, ROOT
from helpers import assert_one_line, counting, lengths_in, message_of, patiently, random_ids, with_engine, with_logits
from make_random_model import make_random_model
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation import batch as room
from qwen3_lib.generation.batch import PROMPT_PIECE, Batch, generate_batch, positions_in, slots_in

BEGINNINGS = [[], random_ids(30, 1), random_ids(200, 2)]  # what several requests have in common


@pytest.fixture(scope="module", params=["numpy", "numba"])
def model(request, tmp_path_factory):
    """With NumPy, the sums depend on the batch, so only ids and texts are the same; with numba all bits are."""
    path = make_random_model(BASE | {"max_position_embeddings": 1000, "num_hidden_layers": 1},
                             tmp_path_factory.mktemp("batch"), "bfloat16", tokenizer=ROOT / "demo")
    if request.param == "numpy":
        return qwen3.load_model(path)
    pytest.importorskip("numba")
    import qwen3_numba
    return qwen3_numba.load_model(path, "int8", 2)


def told(answer):
    exact = type(answer.model.weights) is not dict
    return (answer.token_ids, answer.text, answer.finish_reason,
            answer.logprobs if exact else [entry.token_id for entry in answer.logprobs])


def finished(batch, most=1000):
    """Steps until the batch is idle -> its results. A batch that doesn't end fails the test."""
    results = {}
    for _ in range(most):
        results |= dict(batch.step())
        if batch.idle:
            return results
    pytest.fail(f"the batch still runs after {most} steps")


@st.composite
def requests(draw):
    options = draw(st.fixed_dictionaries({"max_new_tokens": st.integers(1, 20)}, optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]), "top_k": st.integers(0, 50),
        "top_p": st.sampled_from([0.5, 1.0]), "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "stop": st.sampled_from(["a", ["e", "th"], [" "]]), "logprobs": st.integers(0, 3), "lookup": st.integers(0, 4),
        "think_budget": st.integers(0, 9), "eos_token_ids": st.sampled_from([[], list(range(0, 320, 9))])}))
    own = random_ids(draw(st.one_of(st.integers(1, 40), st.integers(1, 400))), draw(st.integers(0, 99)))
    arrival, lives = draw(st.integers(0, 30)), draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))
    salted = draw(st.sampled_from([{}, {"salt": "a"}]))
    return draw(st.sampled_from(BEGINNINGS)) + own, options | {"seed": draw(st.integers(0, 9))}, arrival, lives, salted


@given(st.lists(requests(), min_size=1, max_size=9), st.integers(1, 5))
@patiently(10)
def test_answers_are_those_of_single_runs(model, wanted, slots):
    """Requests that arrive at any time, with any options, some cancelled."""
    batch, results, cancelled = Batch(model, slots, 900), {}, set()
    for step in range(43):
        for i, (prompt, options, arrival, lives, salted) in enumerate(wanted):
            if arrival == step:
                batch.add(i, prompt, **options, **salted)
            if lives is not None and step == arrival + lives and i not in results:
                batch.cancel(i)
                cancelled.add(i)
        results |= dict(batch.step())
    results |= finished(batch)
    assert results.keys() | cancelled == set(range(len(wanted))) and not results.keys() & cancelled
    for i, answer in results.items():
        prompt, options, *_ = wanted[i]
        assert told(answer) == told(Completion(model, prompt, **options).finish())


def test_a_slot_is_used_again_by_shorter_and_by_similar_prompts(model):
    """What is left of an earlier request behind the common beginning is forgotten."""
    prompts = [random_ids(300, 1), random_ids(300, 1)[:150] + [7], random_ids(300, 1)[:150], [5], random_ids(300, 1)]
    batch = Batch(model, 1, 400)
    for i, prompt in enumerate(prompts):
        batch.add(i, prompt, max_new_tokens=6, eos_token_ids=())
    results = finished(batch)
    for i, prompt in enumerate(prompts):
        assert told(results[i]) == told(Completion(model, prompt, max_new_tokens=6, eos_token_ids=()).finish())
    assert [results[i].cached_tokens for i in range(5)] == [0, 150, 149, 0, 0]


def test_a_common_beginning_is_computed_once(model):
    counted, passes = counting(model, lengths_in)
    batch = Batch(counted, 4, 500)
    for i in range(9):
        batch.add(i, BEGINNINGS[2] + random_ids(5, i), max_new_tokens=4, eos_token_ids=())
    answers = finished(batch)
    assert sum(map(sum, passes)) == 200 + 9 * 5 + 9 * 3  # the beginning, each end, each token but the last ones
    assert sorted(answer.cached_tokens for answer in answers.values()) == [0] + [200] * 8


@pytest.mark.parametrize("slots, kept, together, salts, cached", [
    (1, 2**24, False, "-ab-bac", [0, 0, 0, 99, 99, 99, 0]), (1, 0, False, "aab-a", [0, 99, 0, 0, 0]),
    (4, 0, False, "-ab-ba", [0, 0, 0, 99, 99, 99]),
    (4, 2**24, True, "ab-a", [0, 0, 0, 85])])  # two passes read 85 tokens of each of three prompts
def test_only_requests_with_the_same_salt_share_a_beginning(model, slots, kept, together, salts, cached):
    """Whether it stands in a slot or in a kept copy, or is about to be read for another request."""
    batch, prompt, answers = Batch(model, slots, 500, kept), random_ids(100, 1), []
    for i, salt in enumerate(salts):
        answers.append(batch.add(i, prompt, salt.strip("-"), max_new_tokens=3, eos_token_ids=()))
        if not together:
            finished(batch)
    batch.step()
    assert len(batch.running) == len({*salts}) * together  # only an equal salt waits for the beginning
    finished(batch)
    assert [answer.cached_tokens for answer in answers] == cached
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


@pytest.mark.parametrize("common, cached", [(1, 0), (60, 60)])  # a title; another agent with the same instructions
def test_requests_beside_a_conversation_do_not_take_its_slot(model, common, cached):
    """Though they begin like it. One that nobody continues goes after a while."""
    batch, prompt = Batch(model, 2, 500), random_ids(200, 1)

    def cached_tokens(prompt):
        answer = batch.add("x", prompt, max_new_tokens=3, eos_token_ids=())
        finished(batch)
        return answer.cached_tokens

    assert cached_tokens(prompt) == 0
    found = [cached_tokens(prompt[:common] + random_ids(20, i)) for i in range(3, 6)]
    assert [n if n > 1 else 0 for n in found] == [cached] * 3  # the end of a prompt is computed for its logits
    assert cached_tokens(prompt) == 199 and cached_tokens([*prompt, *random_ids(9, 2)]) >= 200
    for i in range(30):
        cached_tokens(random_ids(20, 10 + i))
    assert cached_tokens(prompt) < 100


def test_running_answers_wait_for_no_more_than_a_piece(model):
    counted, passes = counting(model, lengths_in)
    batch = Batch(counted, 3, 900)
    first = batch.add("first", [1, 2, 3], max_new_tokens=30, eos_token_ids=())
    batch.step()
    for name in "ab":
        batch.add(name, random_ids(5 * PROMPT_PIECE + 7, ord(name)), max_new_tokens=3, eos_token_ids=())
    for n in range(2, 13):
        batch.step()
        assert len(first.token_ids) == n and "".join(first) is not None
    assert all(sum(each) <= PROMPT_PIECE + 2 for each in passes)
    assert sum(1 for each in passes if sum(each) > PROMPT_PIECE) >= 9  # and the pieces are full


def test_what_a_short_prompt_leaves_of_a_piece_is_for_the_long_one(model):
    counted, passes = counting(model, lengths_in)
    batch = Batch(counted, 2, 500)
    for n in (300, 5):
        batch.add(n, random_ids(n), max_new_tokens=2, eos_token_ids=())
    finished(batch)
    assert passes[0] == [PROMPT_PIECE - 5, 5]


def test_the_text_of_an_answer_can_be_read_while_it_grows(demo):
    batch, pieces = Batch(demo, 2, 100), []
    prompt = qwen3.chat(demo, "What is the capital of France?").prompt_ids
    answers = [batch.add(i, prompt, max_new_tokens=n) for i, n in enumerate((12, 8))]
    while not batch.idle:
        pieces.append("".join(answers[0]))  # also before it has begun
        batch.step()
    assert "".join([*pieces, *answers[0]]) == answers[0].text != "" and len(set(pieces)) > 5
    alone = qwen3.chat(demo, "What is the capital of France?", max_new_tokens=12).finish()
    assert (answers[0].text, answers[0].token_ids) == (alone.text, alone.token_ids)
    assert answers[1].text and answers[0].text.startswith(answers[1].text)


def test_a_request_that_fails_leaves_the_others_alone(model):
    def failing(logits, new):
        bad = [cache.token_ids[0] == 7 for cache, _ in new.parts]
        return np.where(np.array(bad)[:, None], np.nan, logits)

    batch = Batch(with_logits(model, failing), 3, 100)
    for i, prompt in enumerate([[1, 2], [7, 2], [3]]):
        batch.add(i, prompt, max_new_tokens=5, eos_token_ids=())
    results = finished(batch)
    assert_one_line(str(results[1]), "not finite")
    for i, prompt in ((0, [1, 2]), (2, [3])):
        assert told(results[i]) == told(Completion(model, prompt, max_new_tokens=5, eos_token_ids=()).finish())


def test_a_step_that_was_interrupted_is_made_again(model):
    """Before or after any of its passes: the answers are those of a batch without interruptions."""
    prompts, answers = [random_ids(n, n) for n in (700, 30, 420)], []
    for interrupted in (False, True):
        calls = []

        def run(*args):
            calls.append(args)
            if interrupted and len(calls) % 4 == 0:
                raise KeyboardInterrupt
            result = model.engine.run(*args)
            if interrupted and len(calls) % 3 == 0:
                raise KeyboardInterrupt
            return result

        batch = Batch(with_engine(model, run=run), 3, 900)
        for i, prompt in enumerate(prompts):
            batch.add(i, prompt, max_new_tokens=9, eos_token_ids=[])
        results = {}
        for _ in range(100):
            with contextlib.suppress(KeyboardInterrupt):
                results |= dict(batch.step())
        answers.append([told(results[i])[:3] for i in range(3)])
    assert answers[0] == answers[1]


def test_an_answer_ends_where_its_room_does(model):
    batch = Batch(model, 1, 50)
    batch.add(1, random_ids(40), eos_token_ids=(), lookup=5)
    answer = finished(batch)[1]
    assert len(answer.token_ids) == 10 and answer.finish_reason == "length"


def test_refusals(model):
    batch = Batch(model, 2, 50)
    batch.add("a", [1, 2, 3], max_new_tokens=1000)
    for prompt, options, words in [([1] * 50, {}, ["50", "room"]), ([1] * 5000, {}, ["5000", "room"]),
                                   ([], {}, ["empty"]),
                                   ([1], {"temperature": -1}, ["temperature"])]:
        assert_one_line(message_of(batch.add, "b", prompt, **options), *words)
    assert_one_line(message_of(batch.add, "a", [1]), "'a'", "already")
    assert_one_line(message_of(batch.cancel, "b"), "'b'")
    assert_one_line(message_of(Batch, model, 0, 10), "slots", "0")
    assert_one_line(message_of(Batch, model, 1, 0), "0")
    assert batch.free == 1 and not batch.idle


def filled(model, ids):
    cache = model.engine.new_cache(model.config)
    qwen3.forward(model, ids, cache)
    return cache


@pytest.mark.parametrize("n, order, cached",
                         [(1, "ba+bcdb", [0, 0, 100, 99, 0, 0, 99]), (2, "xbcbcx", [0, 0, 0, 99, 0, 99]),
                          (2, "abdxbd", [0, 0, 0, 0, 99, 99])])  # the oldest one goes
def test_a_prompt_finds_what_is_kept_of_an_earlier_one(model, n, order, cached):
    """In room for n prompts: not a conversation that goes on (+), nothing too long (c), and no beginning twice."""
    prompts = {name: random_ids(300 if name == "c" else 100, ord(name)) for name in "abcdx"}
    prompts["+"] = prompts["a"] + [7] * 9
    batch, options = Batch(model, 1, 400, n * model.engine.new_cache(model.config).bytes(110)), {"eos_token_ids": ()}
    for i, name in enumerate(order):
        batch.add(i, prompts[name], max_new_tokens=2, **options)
    results = finished(batch)
    assert [results[i].cached_tokens for i in range(len(order))] == cached
    for i, name in enumerate(order):
        assert told(results[i]) == told(Completion(model, prompts[name], max_new_tokens=2, **options).finish())


def test_a_copy_replaces_what_was_there(model):
    target, source = filled(model, random_ids(9, 1)), filled(model, random_ids(12, 2))
    target.copy_from(source, 5)
    assert target.length == 5 and target.token_ids.ravel()[:5].tolist() == random_ids(12, 2)[:5]


def test_slots_follow_from_memory(model, monkeypatch):
    k = model.engine.new_cache(model.config, 100).k
    size = 2 * k.itemsize * k.shape[1] * k.shape[3] * 100  # k and v of one layer, 100 positions
    assert slots_in(model, 100, size) == 1 and slots_in(model, 100, 5 * size - 1) == 4
    assert slots_in(model, 100, 10**12) == room.MOST_SLOTS
    assert_one_line(message_of(slots_in, model, 10**6, 1000), "MB", "memory")
    monkeypatch.setattr(room, "free_memory", lambda: 6 * size)
    assert slots_in(model, 100) == 3


def test_the_context_follows_from_memory(model, demo):
    """As many positions as fit, and not one more; never more than the model's."""
    for given in (model, demo):
        one = given.engine.new_cache(given.config, 1).bytes(1)
        for slots, n in ((1, 100), (3, 50)):
            assert positions_in(given, slots, slots * n * one) == n
            assert positions_in(given, slots, slots * (n + 1) * one - 1) == n
        assert positions_in(given, 2, 10**12) == given.config.context_length


@pytest.mark.parametrize("limit", [
    {"memory.max": "4000000", "memory.stat": "anon 3000000"},
    {"memory/memory.limit_in_bytes": "4000000", "memory/memory.stat": "cache 900000\ntotal_rss 3000000"}])
def test_memory_of_a_container(limit, monkeypatch):
    """Control groups of both versions: see test_disk.py."""
    assert 2**20 < room.free_memory() < 2**50
    files = {"/proc/meminfo": "MemAvailable: 9000000 kB"} | {f"/sys/fs/cgroup/{name}": limit[name] for name in limit}

    def read(self, encoding=None):
        if str(self) not in files:
            raise FileNotFoundError(self)
        return files[str(self)]

    monkeypatch.setattr(room.Path, "exists", lambda self: str(self) in files)
    monkeypatch.setattr(room.Path, "read_text", read)
    assert room.free_memory() == 1_000_000


def test_generate_batch(model):
    prompts = [random_ids(n, n) for n in (3, 500, 40)]
    batched = generate_batch(model, prompts, 12, seed=5, eos_token_ids=range(0, 320, 40), temperature=1.0)
    assert batched == [list(qwen3.generate(model, prompt, 12, 5 + i, range(0, 320, 40), temperature=1.0))
                       for i, prompt in enumerate(prompts)]
    assert generate_batch(model, []) == []
    assert_one_line(message_of(generate_batch, model, [[1], []]), "empty")
    assert_one_line(message_of(generate_batch, model, [[1]], seed=-1), "seed")
