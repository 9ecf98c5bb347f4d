"""Qwen3.5 in the fast engine: qwen3_5.py's numbers. Bits: test_qwen3_numba_exact.py."""
import os

import numpy as np
import pytest

import qwen3
from configs import HYBRID, HYBRIDS
from helpers import logits_of, random_ids, stored_in
from make_random_model import make_random_model
from packed import FromPython
from published import tensors_of, write_tensors
from qwen3_lib.kernels import delta
from qwen3_lib.kernels.memory import Reused
from test_qwen3_numba import distance
import qwen3_numba as fast

pytestmark = pytest.mark.core
decay_of, log_of_one_plus = FromPython(delta).decay_of, FromPython(delta).log_of_one_plus


def make(config, path, dtype="float32"):
    return make_random_model(config, path, dtype)


@pytest.mark.parametrize("dtype, kv_dtype, limit", [("float32", "f32", 1e-5), ("bfloat16", "f32", 1e-5),
                                                    ("bfloat16", "f16", 1e-3), ("float16", "int8", 2e-2)])
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits(name, dtype, kv_dtype, limit, tmp_path):
    path = make(HYBRIDS[name], tmp_path, dtype)
    oracle, model = qwen3.load_model(path), fast.load_model(path, kv_dtype=kv_dtype, activations="f32")
    ids = random_ids(130, 1, oracle.config.vocab_size)
    assert distance(logits_of(model, ids), logits_of(oracle, ids)) < limit


@pytest.mark.parametrize("a, rate, bias", [
    (0, 1, 0), (-30, 16, 1), (30, 16, 1), (0.3, 0.01, -5), (88, 1, 0), (2, 5, -2.5)])
def test_decay(a, rate, bias):
    expected = np.exp(-rate * np.logaddexp(0, np.float64(a) + bias))
    assert abs(decay_of(*map(np.float32, (a, rate, bias))) - expected) <= 2e-6 * expected + 1e-37


def test_the_logarithm_of_one_plus():
    x = np.concatenate([np.linspace(0, 1, 4001), np.geomspace(1e-30, 1, 999)]).astype(np.float32)
    found, exact = np.array([log_of_one_plus(each) for each in x], np.float64), np.log1p(x.astype(np.float64))
    assert (np.abs(found - exact) <= 4 / 2**24 * exact).all()


def test_a_matrix_of_float32_beside_one_of_bfloat16(tmp_path):
    """in_proj_a and in_proj_b are one matrix in the fast engine, and may be stored with different digits."""
    path = make(HYBRID, tmp_path, "bfloat16")
    numbers = {name: qwen3.to_float32(tensor)
               for name, tensor in stored_in(path).items()}
    write_tensors(path / "model.safetensors", tensors_of(path) | {
        name: ("float32", values * np.float32(1.001)) for name, values in numbers.items() if "in_proj_a" in name})
    ids, model = random_ids(40, 1, 320), fast.load_model(path, kv_dtype="f32", activations="f32")
    assert distance(logits_of(model, ids), logits_of(qwen3.load_model(path), ids)) < 1e-5


def test_decay_of_numbers_that_are_not_finite():
    assert np.isnan(decay_of(np.float32(np.nan), np.float32(1), np.float32(0)))


def test_an_interruption_between_layers_changes_nothing(tmp_path, monkeypatch):
    model = fast.load_model(make(HYBRID, tmp_path))
    ids, cache, run = random_ids(600, 1, 300), model.engine.new_cache(model.config), type(model.weights.team).run
    qwen3.forward(model, ids[:20], cache)

    def interrupted(team, kernel, record, *kept):
        if record[0].first == 1:  # after the first layer
            raise KeyboardInterrupt
        run(team, kernel, record, *kept)

    monkeypatch.setattr("qwen3_lib.kernels.passes.PASS", 256)
    monkeypatch.setattr(type(model.weights.team), "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        qwen3.forward(model, ids[20:], cache)
    monkeypatch.undo()
    assert cache.length == 20
    assert np.array_equal(qwen3.forward(model, ids[20:], cache), logits_of(model, ids)[-1])


def test_memory_in_use_is_never_given_again():
    rng, memory, alive = np.random.default_rng(0), Reused(), {}
    for i in range(500):
        array = memory.take(int(rng.integers(1, 50)))
        array[:] = i
        alive[i] = array[rng.integers(len(array)):].reshape(1, -1)  # a view is enough
        del array
        for other in rng.choice([*alive], rng.integers(3)):
            alive.pop(other, None)
        assert all((view == j).all() for j, view in alive.items())


@pytest.mark.skipif("QWEN3_CHECK_MEMORY" in os.environ, reason="each array has pages of its own then")
def test_tokens_take_no_new_memory(tmp_path):
    """States lie in two places in turn; the logits that nobody keeps lie in one."""
    model, places = fast.load_model(make(HYBRID, tmp_path)), set()
    cache = model.engine.new_cache(model.config)
    for token in random_ids(20, 1, 300):
        logits = qwen3.forward(model, [token], cache)
        places.add((cache.snapshots[-1].states[0].memory.ctypes.data, logits.ctypes.data))
        del logits
    assert len(places) == 2 and len({logits for _, logits in places}) == 1
