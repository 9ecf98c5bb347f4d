"""Qwen3.5: each part against its definition, whole random models against an oracle in float64, and states kept."""
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import qwen3
import qwen3_5
import qwen3_numba
from configs import HYBRID, HYBRID_MOE, HYBRIDS, VOCABULARY
from helpers import message_of, random_ids, rebuilt, states_of, with_logits
from make_random_model import make_random_model
from oracle import hybrid_oracle
from published import publish
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.guesses import Draft, Proposer
from qwen3_lib.generation.schema import regex
from qwen3 import NextTokens, compute
from qwen3_lib.generation.batch import Batch, generate_batch, positions_in, slots_in

END = 7  # the end of a turn
make = partial(make_random_model, dtype="float32")


@pytest.fixture(scope="module", params=["NumPy", "fast"])
def model(request, tmp_path_factory):
    path = make(HYBRID, tmp_path_factory.mktemp("hybrid"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return qwen3.load_model(path, qwen3_numba.engine() if request.param == "fast" else qwen3.Engine())


def fresh(model, ids, **options):
    return qwen3.forward(model, ids, model.engine.new_cache(model.config), **options)


def test_a_cache_of_the_wrong_class_names_the_right_one(model):
    said = message_of(qwen3.forward, model, [1], qwen3.KVCache(model.config))
    assert "another class: model.engine.new_cache(model.config)" in said


# ---- Components ------------------------------------------------------------------------------------------------------

def rule_arguments(n, seed=0, decay=0.1):
    """q, k, v, g, beta and a state of 3 heads for n tokens."""
    rng = np.random.default_rng(seed)
    q, k = (qwen3_5.unit_length(rng.standard_normal((3, n, 8), np.float32)) for _ in range(2))
    v, g = rng.standard_normal((3, n, 12), np.float32), -decay * rng.standard_normal((3, n), np.float32)**2
    beta = qwen3_5.sigmoid(rng.standard_normal((3, n), np.float32))
    return q, k, v, g, beta, rng.standard_normal((3, 8, 12), np.float32)


@pytest.mark.parametrize("decay", [0, 0.1, 300])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_chunks_of_the_delta_rule_are_its_steps(n, decay):
    """Also when a token forgets everything: exp(-300 x²) is 0, its inverse would be infinite."""
    *tokens, state = rule_arguments(n, n, decay)
    with np.errstate(over="raise", invalid="raise"):
        expected, expected_state = qwen3_5.delta_rule(*tokens, state)
        out, last = qwen3_5.delta_rule_in_chunks(*tokens, state)
    assert out.dtype == last.dtype == np.float32
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(last, expected_state, atol=1e-5)
    parts, last = [], state
    for now in (slice(0, n // 3), slice(n // 3, n)):
        out, last = qwen3_5.delta_rule_in_chunks(*(array[:, now] for array in tokens), last)
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=1e-5)
    np.testing.assert_allclose(last, expected_state, atol=1e-5)


def test_what_is_stored_is_recalled():
    """With beta 1 and without decay, the last value under a key of length 1; other keys at right angles keep theirs."""
    keys, values = np.eye(4, dtype=np.float32)[[0, 1, 0]][None], np.arange(9, dtype=np.float32).reshape(1, 3, 3)
    zero, one = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    for rule in (qwen3_5.delta_rule, qwen3_5.delta_rule_in_chunks):
        out, state = rule(keys, keys, values, zero, one, np.ones((1, 4, 3), np.float32))
        assert np.array_equal(out, values)
        assert np.array_equal(state[0], [values[0, 2], values[0, 1], [1] * 3, [1] * 3])


def test_a_short_key_stays_short():
    """As in transformers: x / sqrt(x·x + 1e-6)."""
    found = np.linalg.norm(qwen3_5.unit_length(np.array([[3e-3, 4e-3], [6e-4, 8e-4], [0, 0]], np.float32)), axis=-1)
    np.testing.assert_allclose(found, [(25 / 26) ** 0.5, 0.5 ** 0.5, 0], rtol=1e-6)


def test_the_convolution_sees_the_last_tokens_only():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((9, 5), np.float32), rng.standard_normal((5, 4), np.float32)
    out, history = qwen3_5.causal_convolution(x, weight, np.zeros((3, 5), np.float32))
    for channel in range(5):
        sums = np.convolve(x[:, channel].astype(float), weight[channel, ::-1])[:9]
        np.testing.assert_allclose(out[:, channel], sums / (1 + np.exp(-sums)), rtol=1e-4, atol=1e-6)
    first, kept = qwen3_5.causal_convolution(x[:1], weight, np.zeros((3, 5), np.float32))
    rest, kept = qwen3_5.causal_convolution(x[1:], weight, kept)
    np.testing.assert_allclose(np.concatenate([first, rest]), out, rtol=1e-5)
    assert np.array_equal(kept, history) and np.array_equal(history, x[-3:])


# ---- Whole models ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", HYBRIDS)
def test_random_models(name, tmp_path):
    """At once, token by token, and in pieces: the logits of the oracle."""
    model, ids = qwen3.load_model(make(HYBRIDS[name], tmp_path)), random_ids(130)
    expected = hybrid_oracle(model, ids)
    caches = [model.engine.new_cache(model.config) for _ in range(2)]
    found = {"at once": fresh(model, ids, all_logits=True),
             "one by one": np.array([qwen3.forward(model, [i], caches[0]) for i in ids]),
             "in pieces": np.concatenate([qwen3.forward(model, part, caches[1], all_logits=True)
                                          for part in np.split(ids, [1, 64, 66, 129])])}
    for way, logits in found.items():
        assert logits.dtype == np.float32 and np.abs(logits - expected).max() < 1e-4 * expected.std(), way


def test_the_published_form(tmp_path):
    """The text part nested in config.json, its names in the file, and beside it a vision tower and an MTP head."""
    plain, path = (make(HYBRID | {"tie_word_embeddings": False}, tmp_path / name) for name in ("plain", "published"))
    ids = random_ids(20)
    assert np.array_equal(fresh(qwen3.load_model(publish(path)), ids), fresh(qwen3.load_model(plain), ids))


@pytest.mark.parametrize("changes", [
    {"hidden_act": "gelu"}, {"attention_bias": True}, {"linear_num_key_heads": 0}, {"linear_num_value_heads": 3},
    {"layer_types": ["linear_attention"] * 3}, {"layer_types": ["sliding_attention"] * 4},
    {"architectures": ["Qwen3_5ForSequenceClassification"]}, {"text_config": 3, "model_type": "qwen3_5"},
    {"rope_parameters": {"rope_type": "yarn", "factor": "4", "rope_theta": 1e7}},
    {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e7}},
    {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2}}], ids=str)
def test_config_names_what_is_wrong(changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | changes))
    words = {"rope_parameters": "r", "linear_num_value_heads": "sizes"}
    name = next(iter(changes))
    assert words.get(name, name) in message_of(qwen3.load_model, tmp_path, tokenizer=False)


def test_tensors_that_do_not_fit(tmp_path):
    path = make(HYBRID_MOE, tmp_path)
    (path / "config.json").write_text(json.dumps(HYBRID_MOE | {"shared_expert_intermediate_size": 8}))
    assert "mlp.shared_expert.gate_proj.weight has shape [40, 48], not [8, 48]" in message_of(qwen3.load_model, path)


# ---- Guesses ---------------------------------------------------------------------------------------------------------

def changed(model, likes, passes=None):
    """The model that likes some tokens more than it did, and notes how many tokens it computes in each pass."""
    noted = [] if passes is None else passes

    def liking(logits, new):
        noted.append(len(new.token_ids))
        return logits + np.float32(likes)

    return with_logits(model, liking)


WORDS = np.where(np.arange(VOCABULARY) // 6 == 5, 12, 0)  # six likely tokens: texts repeat themselves


@pytest.mark.parametrize("beside, cut", [(1, 0), (1, 3), (508, 1), (508, 2), (509, 3), (511, 0), (511, 2)])
def test_a_cache_is_cut_back_to_before_a_guess(model, cut, beside):
    """Twice, the second time beginning with tokens that the state hasn't learned; beside another sequence, with which a
    chunk of 512 tokens may end between the guesses; and from a file."""
    ids, cache = random_ids(30), model.engine.new_cache(model.config)
    expected = np.array([qwen3.forward(model, [i], cache) for i in ids])
    cache = model.engine.new_cache(model.config)
    qwen3.forward(model, ids[:10], cache)
    for _ in range(2):
        start, other = cache.length, model.engine.new_cache(model.config)
        new = np.array(random_ids(beside, 2) + ids[start:start + 5 - cut] + random_ids(cut, 1))
        compute(model, [NextTokens(other, new[:beside]), NextTokens(cache, new[beside:], guesses=3)])
        cache.truncate(start + 5 - cut)
    assert "after 13 of" in message_of(cache.truncate, 13)
    for each in cache, rebuilt(model, cache):
        found, end = qwen3.forward(model, ids[each.length:], each, all_logits=True), len(ids)
        most = 1e-4 if model.engine.load_weights is qwen3_5.load_weights else 0
        assert np.abs(found - expected[end - len(found):]).max() <= most


@pytest.mark.parametrize("model", ["NumPy"], indirect=True)
def test_a_draft_computes_its_own_guesses_once(model, monkeypatch):
    monkeypatch.setattr(Proposer, "length", lambda self, *_: min(self.n, 4))
    passes, likes, prompt = [], WORDS[:320], turn(40, 1) + [30]
    large, small = changed(model, likes), changed(model, likes + np.random.default_rng(0).standard_normal(320), passes)
    answer = Completion(large, prompt, draft=Draft(small, large), max_new_tokens=40, temperature=0).finish()
    assert 0 < answer.speculator.accepted < answer.speculator.guessed and passes[0] > 40 and max(passes[1:]) <= 2


def test_what_a_schema_forces_is_computed_together(tmp_path):
    passes, model = [], qwen3.load_model(make(HYBRID | {"vocab_size": VOCABULARY}, tmp_path))
    answer, alone = (Completion(changed(model, 0, passes), [8, 9], schema=regex("The capital is (Paris|Rome), or so"),
                                stop=", or") for _ in range(2))
    assert answer.finish().text in ("The capital is Paris", "The capital is Rome") and max(passes) > 3
    alone.speculator = None
    assert alone.finish().token_ids == answer.token_ids


# ---- The state -------------------------------------------------------------------------------------------------------

def turn(n, seed):
    """A message of n tokens, and the end of the turn."""
    return [8 + i % 300 for i in random_ids(n, seed)] + [END]


def kept(cache):
    """The lengths of the snapshots that are kept, without that of no tokens."""
    return [each.length for each in cache.snapshots[1:] if each.kept]


def memory_of(array):
    """The array that a view is cut from."""
    return memory_of(array.base) if isinstance(array.base, np.ndarray) else array


def answered(model, prompt, cache):
    """(how many tokens the cache had, the greedy answer), which is that of a new cache."""
    completion = Completion(model, prompt, cache, max_new_tokens=6, temperature=0, eos_token_ids=()).finish()
    assert completion.token_ids == list(qwen3.generate(model, prompt, 6, temperature=0, eos_token_ids=()))
    return completion.cached_tokens, completion.token_ids


def test_a_conversation_resumes_at_the_border_of_a_turn(model):
    system, first, header, cache = turn(10, 0), turn(30, 1), [8, 9], model.engine.new_cache(model.config)
    n, asked = len(system), system + first + header
    assert answered(model, asked, cache)[0] == 0
    assert answered(model, asked, cache)[0] == n + len(first)  # again
    assert answered(model, system + turn(600, 2) + header, cache)[0] == n  # another message
    found, answer = answered(model, asked, cache)
    assert found == n
    without_thought = asked + answer[2:] + turn(20, 3) + header
    found, answer = answered(model, without_thought, cache)
    assert found == n + len(first)
    whole = without_thought + answer + turn(5, 4) + header
    assert answered(model, whole, cache)[0] == len(without_thought) + 5  # the last token was drawn and not computed
    assert answered(model, without_thought, cache)[0] == len(without_thought) - len(header)
    assert answered(model, random_ids(9, 5), cache)[0] == 0
    assert [answered(model, system, cache)[0] for _ in range(2)] == [0, 0]  # the last token gives the logits


def test_the_first_and_the_last_states_are_kept(model, monkeypatch):
    monkeypatch.setattr(qwen3_5, "KEPT_STATES", 0)
    cache, turns = model.engine.new_cache(model.config), [turn(9, seed) for seed in range(8)]
    for one in turns:
        qwen3.forward(model, one + [9], cache)
    assert kept(cache) == [10, 76, 87] and [each.length for each in cache.snapshots] == [0, 10, 76, 87, 88]
    arrays = [array for _, states, _ in cache.snapshots[1:] for state in states.values() for array in state]
    assert sum(array.nbytes for array in arrays) == 4 / 5 * cache.fixed  # the fifth is that of a pass
    whole = {id(array): array for array in map(memory_of, arrays)}  # which the arrays keep alive
    assert sum(array.nbytes for array in whole.values()) <= 4 / 5 * cache.fixed + 64 * len(arrays)
    assert "after 65 of the 88" in message_of(cache.truncate, 65)
    cache.truncate(76)
    assert np.array_equal(qwen3.forward(model, [3], cache), qwen3.forward(model, [3], filled(model, turns, 76)))


def filled(model, turns, n):
    cache = model.engine.new_cache(model.config)
    for one in turns:
        if cache.length + len(one) < n:
            qwen3.forward(model, one + [9], cache)
    qwen3.forward(model, turns[n // 11][:n - cache.length], cache)
    return cache


@pytest.mark.parametrize("model", ["NumPy"], indirect=True)
def test_an_interrupted_pass_changes_nothing(model):
    ids, cache = turn(600, 1), model.engine.new_cache(model.config)
    qwen3.forward(model, ids[:20], cache)

    def interrupted(x, w, config, cache, i, *tables):
        if i == 2 and len(x) < 100:  # the second part of the pass
            raise KeyboardInterrupt
        return qwen3_5.decoder_layer(x, w, config, cache, i, *tables)

    with pytest.raises(KeyboardInterrupt):
        kind = replace(model.source.kind, layer=interrupted)
        qwen3.forward(replace(model, source=replace(model.source, kind=kind)), ids[20:], cache)
    assert cache.length == 20 + qwen3.CHUNK
    logits, expected = qwen3.forward(model, ids[cache.length:], cache), fresh(model, ids)
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


def test_several_sequences_in_one_pass(model):
    """More tokens than a chunk, the ends of turns within them."""
    prompts = [turn(30, 1) + [8], turn(400, 2) + turn(300, 3) + [9], random_ids(1, 4)]
    alone = [list(qwen3.generate(model, prompt, 12, temperature=0)) for prompt in prompts]
    assert generate_batch(model, prompts, 12, temperature=0) == alone
    caches = [model.engine.new_cache(model.config) for _ in prompts]
    _, states = compute(model, [NextTokens(*each, 0) for each in zip(caches, map(np.array, prompts))], states=True)
    for prompt, cache, x in zip(prompts, caches, np.split(states, np.cumsum(list(map(len, prompts)))[:-1])):
        expected = states_of(model, prompt)
        assert cache.length == len(prompt) and np.abs(x - expected).max() < 1e-4 * expected.std()
    assert [kept(cache) for cache in caches] == [[31], [401, 702], []]


def test_a_batch_copies_the_states_of_a_common_beginning(model):
    """From a slot in use, and from a copy of a slot used again."""
    system, options = turn(40, 0), {"max_new_tokens": 4, "temperature": 0, "eos_token_ids": ()}
    prompts = [system + turn(20, seed) + [8] for seed in (1, 2)] + [turn(50, 3) + [8]]
    batch, found = Batch(model, 1, 200, 10**9), []
    for i, prompt in enumerate([*prompts, prompts[0] + [9]]):
        completion = batch.add(i, prompt, **options)
        while not batch.idle:
            batch.step()
        found.append(completion.cached_tokens)
        assert completion.token_ids == list(qwen3.generate(model, prompt, 4, temperature=0, eos_token_ids=()))
    assert found == [0, len(system), 0, len(system)]


def test_a_copy_of_a_part_goes_on_from_a_kept_state(model):
    """And its size counts the states."""
    turns, new = turn(30, 0) + turn(40, 1) + turn(20, 2), model.engine.new_cache
    source = new(model.config)
    qwen3.forward(model, turns + [8], source)
    for n in (*kept(source), source.length):
        (copy := new(model.config)).copy_from(source, n)
        qwen3.forward(model, (turns + [8])[:n], expected := new(model.config))
        assert np.abs(qwen3.forward(model, [9], copy) - qwen3.forward(model, [9], expected)).max() < 1e-4
    states = [array for each in source.snapshots for state in each.states.values() for array in state]
    assert source.bytes(0) > sum(each.nbytes for each in states) and source.bytes(9) > source.bytes(0)


def test_a_slot_holds_the_states(model):
    """As many as 256 MB hold, and two more while a pass runs; one layer of four has keys and values."""
    channels, n_heads = 2 * 16 + 2 * 16 + 2 * 16, 2  # of q, k and v; three rows before the convolution
    states = 3 * 4 * (3 * channels + n_heads * 16 * 16)
    size = (2**28 // states + 2) * states + 100 * 2 * 32 * {"f32": 4, "f16": 2}[model.engine.new_cache.dtype]
    assert slots_in(model, 100, 2 * size) == 2 and slots_in(model, 100, 2 * size - 1) == 1
    assert "MB" in message_of(slots_in, model, 100, size - 1)
    assert positions_in(model, 2, 2 * size) == 100 == positions_in(model, 2, 2 * size + 1)
    assert positions_in(model, 1, 1) == -1
