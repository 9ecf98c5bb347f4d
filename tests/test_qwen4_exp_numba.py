"""Qwen3.8-Flash-Next in the fast engine: qwen4_exp.py's numbers. Bits of pieces and batches: test_qwen3_numba_exact.py;
transformers' numbers, caches and guesses in both engines: test_qwen4_exp.py."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
import qwen3_numba as fast
import qwen4_exp
from configs import FLASH
from helpers import logits_of, random_ids, states_of
from make_random_model import make_random_model
from packed import FromPython
from published import tensors_of, write_tensors
from qwen3_5 import mtp_config
from qwen3_lib.generation.batch import Batch, generate_batch
from qwen3_lib.generation.completion import Completion
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.kernels import sparse, streams
from test_qwen3_numba import distance
from test_qwen4_exp import TWO_TABLES, WIDE

pytestmark = pytest.mark.core
choose_best, fit_of = FromPython(sparse).choose_best, FromPython(streams).fit_of
# With a budget of more than a block of the cache, and odd numbers of heads.
LARGE = {"indexer_budget": 270, "indexer_compress_ratio": 3, "num_attention_heads": 10, "num_key_value_heads": 2,
         "indexer_n_heads": 5, "indexer_head_dim": 40}
# All tokens go through all experts, and see all positions: small differences stay small.
WITHOUT_CHOICE = {"num_experts_per_tok": 8, "indexer_budget": 4096, "hidden_size": 64, "ple_embed_dim": 64}
SHAPES = {"plain": {}, "wide": WIDE, "two tables": TWO_TABLES, "large": LARGE, "no table": {"ple_layer_ids": []},
          "a table where a layer attends": {"layer_types": ["full_attention", "linear_attention"] * 2,
                                            "ple_layer_ids": [1]}}


def make(changes, path, dtype="float32"):
    return make_random_model(FLASH | changes, path, dtype)


@pytest.mark.parametrize("dtype, kv_dtype, limit", [("float32", "f32", 1e-5), ("bfloat16", "f32", 1e-5),
                                                    ("float16", "f32", 1e-5)])
@pytest.mark.parametrize("name", SHAPES)
def test_logits(name, dtype, kv_dtype, limit, tmp_path):
    path = make(SHAPES[name], tmp_path, dtype)
    ids = random_ids(400 if name == "large" else 130, 1, 320)
    model = fast.load_model(path, kv_dtype=kv_dtype, activations="f32")
    assert distance(logits_of(model, ids), logits_of(qwen3.load_model(path), ids)) < limit


def test_a_table_decides_nothing(tmp_path):
    """Weights of float32 have keys and values of float16, also beside an n-gram table of bfloat16."""
    tensors = tensors_of(path := make({}, tmp_path))
    write_tensors(path / "model.safetensors", tensors | {
        name: ("bfloat16", (array.view(np.uint32) >> 16)) for name, (_, array) in tensors.items()
        if "ngram_embedding" in name})
    assert fast.load_model(path).engine.new_cache.dtype == "f16"


@pytest.mark.parametrize("quantize, kv_dtype, limit", [(None, "f16", 1e-3), (None, "int8", 2e-2), (None, None, 2e-2),
                                                       ("int8", "f32", 5e-2), ("int4", "f32", 0.3)])
def test_formats_err_little(quantize, kv_dtype, limit, tmp_path):
    path = make(WITHOUT_CHOICE, tmp_path, "bfloat16")
    ids, activations = random_ids(130, 1, 320), "f32" if kv_dtype and not quantize else None
    model = fast.load_model(path, quantize, kv_dtype=kv_dtype, activations=activations)
    assert distance(logits_of(model, ids), logits_of(qwen3.load_model(path), ids)) < limit


def test_an_index_of_many_blocks(tmp_path):
    """Threads share it for a few tokens: the bits are those of a prompt."""
    model = fast.load_model(make({"indexer_compress_ratio": 1}, tmp_path), threads=3)
    ids, cache = random_ids(sparse.SCORED + 100, 1, 300), model.engine.new_cache(model.config)
    whole, n = logits_of(model, ids), sparse.SCORED - 4
    qwen3.forward(model, ids[:n], cache)
    found = [qwen3.forward(model, ids[i:i + 3], cache, all_logits=True) for i in range(n, len(ids), 3)]
    assert np.array_equal(np.concatenate(found), whole[n:])


def test_an_interruption_changes_nothing(tmp_path, monkeypatch):
    model = fast.load_model(make({}, tmp_path))
    ids, cache, run = random_ids(600, 1, 300), model.engine.new_cache(model.config), type(model.weights.team).run
    qwen3.forward(model, ids[:22], cache)

    def interrupted(team, kernel, record, *kept):
        run(team, kernel, record, *kept)
        if record[0].first == 1:  # before the third layer
            raise KeyboardInterrupt

    monkeypatch.setattr("qwen3_lib.kernels.passes.PASS", 256)
    monkeypatch.setattr(type(model.weights.team), "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        qwen3.forward(model, ids[22:], cache)
    monkeypatch.undo()
    assert cache.length == 22
    assert np.array_equal(qwen3.forward(model, ids[22:], cache), logits_of(model, ids)[-1])


def guessed(model, ids):
    """The logits of tokens, the streams that an MTP head gives for them, and its guess."""
    streams, head = states_of(model, ids[:-1]), model.engine.new_cache.plain(mtp_config(model.config))
    return logits_of(model, ids), *map(np.array, model.engine.guess(model, streams, np.array(ids[1:]), head, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_saved_folder(quantize, dtype, tmp_path):
    """The same bits, of guesses, too; the table is in the saved file as it was, and stays there."""
    path, ids = make({"mtp_num_hidden_layers": 1}, tmp_path / "m", dtype), random_ids(60)
    model = fast.load_model(path, quantize)
    save_quantized(model, tmp_path / "saved", quantize)
    saved = fast.load_model(tmp_path / "saved")
    for found, expected in zip(*(guessed(each, ids) for each in (saved, model))):
        assert np.array_equal(found, expected)
    parts, expected = saved.weights.tables[1].parts, model.weights.tables[1].parts
    assert [part.dtype for part in parts] == [part.dtype for part in expected]
    assert all(np.array_equal(part.data, other.data) and not part.data.flags.owndata
               for part, other in zip(parts, expected))


@given(st.lists(st.sampled_from([0.0, 1e-40, 0.25, 1.0, 1.5, 3e38]) | st.floats(0, 100, width=32), min_size=9),
       st.integers(1, 8))
def test_the_best_blocks(scores, most):
    config = SimpleNamespace(indexer_compress_ratio=1, indexer_budget=most)
    found, scores = np.empty(most, np.int64), np.array(scores, np.float32)
    choose_best(scores, found)
    assert found.tolist() == qwen4_exp.chosen_positions(scores, len(scores), config).tolist()


@pytest.mark.parametrize("size, sign", [(48, 1), (40, -1), (2560, 1), (5, 0)])
def test_the_fit_of_an_n_gram(size, sign):
    key, query = np.random.default_rng(1).normal(size=(2, size)).astype(np.float32)
    query *= sign * np.sign(key @ query)
    exact = float(key.astype(np.float64) @ query) / np.sqrt(size)
    assert abs(fit_of(key, query) - np.sign(exact) * np.sqrt(max(abs(exact), 1e-6))) < 1e-6


@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_batches_and_drafts_change_no_bit(quantize, kv_dtype, tmp_path):
    """Alone, beside others, in slots that keep beginnings, with guesses by lookup, by a small model, and by the MTP
    head."""
    path = make({"vocab_size": 4096, "mtp_num_hidden_layers": 1}, tmp_path, "bfloat16")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    model = fast.load_model(path, quantize, kv_dtype=kv_dtype)
    small = fast.load_model(path, "int4")
    prompts, options = [random_ids(n, n) for n in (9, 80, 200)], {"temperature": 0, "eos_token_ids": ()}
    prompts[1] *= 2
    alone = [list(qwen3.generate(model, prompt, 12, **options)) for prompt in prompts]
    assert generate_batch(model, prompts, 12, **options) == alone
    for prompt, expected in zip(prompts, alone):
        for guesses in ({"lookup": 4}, {"draft": small}, {"draft": "auto"}):
            drafted = Completion(model, prompt, max_new_tokens=12, **guesses, **options).finish()
            assert drafted.token_ids == expected
        assert drafted.speculator.mtp and drafted.speculator.guessed
    batch = Batch(model, 2, 300, kept=2**20)
    more = [*prompts, prompts[2] + alone[2], prompts[1]]
    answers = [batch.add(i, prompt, max_new_tokens=12, **options) for i, prompt in enumerate(more)]
    while not batch.idle:
        batch.step()
    assert [answer.token_ids for answer in answers] == [
        *alone, list(qwen3.generate(model, more[3], 12, **options)), alone[1]]
