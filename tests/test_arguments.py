"""qwen3_io/arguments.py: options and token ids that can't be right are refused before anything is computed."""
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
from configs import BASE
from helpers import HUGE_INT, NUMERALS, assert_one_line, message_of, patiently, works_or_refused
from make_random_model import make_random_model

BAD_IDS = {
    "empty": ([], ["empty"]), "empty array": (np.zeros(0, np.int64), ["empty"]), "empty row": ([[]], ["empty"]),
    "out of range": ([1, 320, 2], ["320"]), "far out of range": ([2**62], [str(2**62)]),
    "beyond 64 bits": ([2**80], []), "huge": ([HUGE_INT], []), "negative": ([1, -1], ["-1"]),
    "float": ([1.0, 2.0], ["float"]), "float array": (np.ones(3, np.float32), ["float32"]),
    "nan": ([math.nan], ["float"]), "bool": ([True, False], ["bool"]), "strings": (["a", "b"], []),
    "string": ("abc", []), "bytes": (b"abc", []), "none": (None, []), "nones": ([None], []), "a number": (5, []),
    "3-d": (np.zeros((1, 2, 3), np.int64), ["shape"]), "ragged": ([[1, 2], [3]], []),
    "deeply ragged": ([1, [2, [3]]], []), "a set": ({1, 2}, []), "a generator": ((i for i in (1, 2)), []),
    "mixed": ([1, "a"], []),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_token_ids(model, case):
    """forward, generate and generate_batch refuse the same ids, before anything is computed."""
    ids, words = BAD_IDS[case]
    cache = qwen3.KVCache(model.config)
    assert_one_line(message_of(qwen3.forward, model, ids, cache), *words)
    assert cache.length == 0
    assert_one_line(message_of(qwen3.generate, model, ids), *words)
    assert_one_line(message_of(qwen3.generate_batch, model, [[1, 2], ids]), *words)


def test_generate_takes_one_sequence(model):
    """A batch given to `generate` must not lose its other rows in silence."""
    message_of(qwen3.generate, model, [[1, 2], [3, 4]])
    message_of(qwen3.generate_batch, model, [[[1, 2], [3, 4]]])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint64])
def test_integers_of_any_width_are_ids(model, dtype):
    expected = list(qwen3.generate(model, [1, 2, 100], 4, temperature=0, eos_token_ids=()))
    assert list(qwen3.generate(model, np.array([1, 2, 100], dtype), 4, temperature=0, repetition_penalty=1.0,
                               eos_token_ids=())) == expected


def test_prompt_longer_than_the_context(model):
    for n in (512, 513, 5000):
        assert_one_line(message_of(qwen3.generate, model, [1] * n), str(n), "512")
    assert_one_line(message_of(qwen3.generate_batch, model, [[1, 2], [1] * 600]), "600", "512")
    assert len(list(qwen3.generate(model, [1] * 510, 50, eos_token_ids=()))) == 2  # the context ends it
    assert_one_line(message_of(qwen3.forward, model, [1] * 513, qwen3.KVCache(model.config)), "513", "512")


@pytest.mark.parametrize("engine", ["qwen3", "qwen3_numba"])
def test_cache_of_another_model(tiny, tmp_path, engine):
    """Its arrays have another shape: kernels would write beside them."""
    engine = pytest.importorskip(engine)
    other = engine.load_model(make_random_model(BASE | {"num_hidden_layers": 5}, tmp_path))
    cache = engine.KVCache(engine.load_model(tiny).config)
    assert_one_line(message_of(engine.forward, other, [1, 2, 3], cache), "another model")
    assert_one_line(message_of(engine.hidden_states, other, [1, 2, 3], cache), "another model")
    assert cache.length == 0


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "f32", "int8"])
def test_cache_of_the_other_engine(demo, kv_dtype):
    fast = pytest.importorskip("qwen3_numba")
    cache = fast.CACHES[kv_dtype](demo.config)
    assert_one_line(message_of(qwen3.chat(demo, "Hello", cache=cache).finish), "engine")
    assert_one_line(message_of(fast.forward, fast.load_model(qwen3.BUNDLED), [1, 2], qwen3.KVCache(demo.config)), "engine")
    own = qwen3.KVCache(demo.config)
    qwen3.forward(demo, [1, 2, 3], own)
    assert_one_line(message_of(cache.copy, 0, own, 0, 3), "another kind")
    assert_one_line(message_of(own.copy, 0, cache, 0, 0), "another kind")
    assert_one_line(message_of(qwen3.KVCache(demo.config).copy, 0, own, 0, 4), "it has fewer")
    assert own.lengths[0] == 3 and cache.lengths[0] == 0


def test_a_cache_serves_one_answer_at_a_time(demo):
    """The one that came later has it: what it says is right, and the earlier one stops instead of going on wrongly."""
    cache, options = qwen3.KVCache(demo.config), {"temperature": 0, "enable_thinking": False}
    first = qwen3.chat(demo, "My name is Mia.", cache=cache, **options)
    first.step()
    second = qwen3.chat(demo, "What is my name?", cache=cache, **options)
    assert_one_line(message_of(first.finish), "another answer", "one for each")
    assert str(second) == str(qwen3.chat(demo, "What is my name?", **options)) != str(first.token_ids)
    again = qwen3.chat(demo, "My name is Mia.", cache=cache, **options)
    assert str(again) == str(qwen3.chat(demo, "My name is Mia.", **options))


def test_batch_that_is_not_the_caches(model):
    assert_one_line(message_of(qwen3.forward, model, [[1, 2], [3, 4]], qwen3.KVCache(model.config)), "1", "2")
    assert_one_line(message_of(qwen3.forward, model, [1, 2], qwen3.KVCache(model.config, 10, 2)), "1", "2")


BAD_ARGUMENTS = [("max_new_tokens", value) for value in (0, -1, 1.5, "5", math.nan)]
BAD_ARGUMENTS += [("temperature", value) for value in (-1, -0.001, math.nan, math.inf, "1", True, HUGE_INT)]
BAD_ARGUMENTS += [("top_k", value) for value in (-1, 2.5, math.nan, "5")]
BAD_ARGUMENTS += [("top_p", value) for value in (0, -1, 1.01, math.nan, "1")]
BAD_ARGUMENTS += [("min_p", value) for value in (-0.1, 1.01, math.nan, "0")]
BAD_ARGUMENTS += [("repetition_penalty", value) for value in (0, -1, math.inf, "x")]
BAD_ARGUMENTS += [(name, value) for name in ("presence_penalty", "frequency_penalty")
                  for value in (math.nan, math.inf, "x")]
BAD_ARGUMENTS += [("seed", value) for value in (-1, 1.5, "x")]
BAD_STOPS = [5, None, [5], "", [""], [None]]
BAD_ARGUMENTS += [("eos_token_ids", value) for value in ("x", ["x"], [1.5])]


@pytest.mark.parametrize("name, value", BAD_ARGUMENTS, ids=lambda value: repr(value)[:20])
def test_arguments_of_generate(model, name, value):
    assert_one_line(message_of(qwen3.generate, model, [1, 2], **{name: value}), name)
    assert_one_line(message_of(qwen3.generate_batch, model, [[1, 2]], **{name: value}), name)


@pytest.mark.parametrize("stop", BAD_STOPS, ids=repr)
def test_stop_texts(demo, stop):
    assert_one_line(message_of(qwen3.Completion, demo, [1], stop=stop), "a stop text must be")


@pytest.mark.parametrize("typed, meant", [
    ("temprature", "temperature"), ("topp", "top_p"), ("max_tokens", "max_new_tokens"),
    ("think_buget", "think_budget"), ("stops", "stop")])
def test_an_unknown_option_is_named_with_the_similar_one(demo, typed, meant):
    for call in (lambda: qwen3.chat(demo, "x", **{typed: 1}), lambda: qwen3.Completion(demo, [1], **{typed: 1})):
        assert_one_line(message_of(call), typed, "did you mean", meant)


def test_an_unknown_option_like_no_other_is_named_alone(demo):
    for call in (qwen3.chat, lambda *args, **options: qwen3.generate(args[0], [1], **options)):
        message = message_of(call, demo, "x", **{"zzzzzz": 1})
        assert "zzzzzz" in message and "did you mean" not in message
    assert "did you mean temperature" in message_of(qwen3.generate, demo, [1], temprature=1)
    assert "did you mean temperature" in message_of(qwen3.generate_batch, demo, [[1]], temprature=1)


def test_one_end_token_without_a_list(model):
    """config.json has it so; a caller may too."""
    first = next(qwen3.generate(model, [1, 2], temperature=0, eos_token_ids=()))
    tokens = works_or_refused(lambda: list(qwen3.generate(model, [1, 2], 5, temperature=0, eos_token_ids=first)))
    assert not tokens  # either way nothing may follow the end


# ----------------------------------------------------------------------------------------------------------------------
# Anything at all: tokens, or one line
# ----------------------------------------------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 319), min_size=1, max_size=6)
ANYTHING = st.one_of(st.none(), st.booleans(), NUMERALS, st.text(max_size=3),
                     st.lists(st.integers(-2, 400) | st.floats() | st.none(), max_size=3))
POSITIVE = st.floats(1e-3, 1e3) | st.floats(0, allow_nan=False) | st.integers(0, 10**40)
LIMITS = st.integers(1, 4) | st.integers(-1, 4) | st.sampled_from([math.nan, "x", 1.5])
ARGUMENTS = st.fixed_dictionaries({"max_new_tokens": LIMITS}, optional={
    **{name: POSITIVE | NUMERALS | ANYTHING
       for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")},
    **{name: st.floats(0, 1) | NUMERALS | ANYTHING for name in ("top_p", "min_p")},
    "top_k": st.integers(0, 400) | ANYTHING, "seed": st.integers(0, 2**70) | ANYTHING,
    "eos_token_ids": st.lists(st.integers(0, 319), max_size=4) | ANYTHING})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@patiently(400)
@given(ids=IDS | st.lists(st.lists(st.integers(-1, 320), max_size=3), max_size=3) | ANYTHING, arguments=ARGUMENTS)
def test_any_arguments_to_generate(model, ids, arguments):
    tokens = works_or_refused(lambda: list(qwen3.generate(model, ids, **arguments)))
    if tokens is not None:
        assert all(type(token) is int and 0 <= token < 320 for token in tokens)
        assert len(tokens) <= arguments["max_new_tokens"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@patiently(400)
@given(ids=IDS, arguments=st.fixed_dictionaries({
    "max_new_tokens": st.integers(1, 4), "seed": st.integers(0, 9)}, optional={
    "temperature": POSITIVE, "top_k": st.integers(0, 400), "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1), "repetition_penalty": POSITIVE,
    "presence_penalty": st.floats(allow_nan=False, allow_infinity=False), "frequency_penalty": st.floats(-2, 2),
    "eos_token_ids": st.lists(st.integers(0, 319), max_size=4)}))
def test_arguments_within_their_ranges(model, ids, arguments):
    tokens = works_or_refused(lambda: list(qwen3.generate(model, ids, **arguments)))
    if tokens is not None:
        assert all(type(token) is int and 0 <= token < 320 for token in tokens) and len(tokens) <= 4
