"""Qwen3.8-Flash-Next: its parts beside plain formulas, its cache, and whole models against transformers in float64."""
import json
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import qwen3
import qwen3_5
import qwen4_exp
from configs import FLASH, VOCABULARY
from helpers import (assert_like, assert_one_line, edit_json, logits_of, message_of, random_ids, rebuilt, states_of,
                     transformers_logits)
from make_random_model import make_random_model
from oracle import flash_mtp_oracle
from published import CASES, E4M3, FP8_BLOCKS, e4m3, quantize_model, tensors_of, write_tensors
from qwen3_lib.app import arguments
from qwen3_lib.generation.ahead import ahead_of
from qwen3_lib.generation.batch import Batch, generate_batch
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.guesses import MTP
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.kernels.kind import kind_for

make = partial(make_random_model, dtype="float32")
TWO_TABLES = {"ple_layer_ids": [1, 3], "ngram_size": 2, "heads_per_ngram": 6, "ple_conv_kernel_size": 3}
WIDE = {"hc_count": 3, "indexer_n_heads": 10, "indexer_head_dim": 24, "indexer_budget": 12, "indexer_compress_ratio": 3,
        "output_gate_type": "silu", "num_hidden_layers": 6, "linear_num_value_heads": 6}


def fast_model(path):
    """By the fast engine, with the digits of NumPy's."""
    return pytest.importorskip("qwen3_numba").load_model(path, kv_dtype="f32", activations="f32")


ENGINES = {"NumPy": qwen3.load_model, "fast": fast_model}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make(FLASH | {"vocab_size": VOCABULARY}, tmp_path_factory.mktemp("flash"))


@pytest.fixture(scope="module")
def plain(path):
    return qwen3.load_model(path)


@pytest.fixture(scope="module", params=ENGINES)
def model(path, request):
    return ENGINES[request.param](path)


def prompt(n, seed=0):
    """Token ids, among them an end of text now and then."""
    ids = random_ids(n, seed)
    ids[5::17] = [7] * len(ids[5::17])
    return ids


# ---- Parts -----------------------------------------------------------------------------------------------------------

def test_the_published_constants_of_the_hash():
    config = SimpleNamespace(vocab_size=248320, ngram_size=3, ngram_heads=16, seed=1234,
                             ngram_vocab_size_base=20_000_000)
    assert qwen4_exp.multipliers(config, 0) == [23703573157769, 20109073645365, 8052911324071]
    sizes = qwen4_exp.head_sizes(config, 0)
    assert sizes[:3] == [20000003, 20000023, 20000033] and sizes[-1] == 20000171 and sum(sizes) == 320001446
    assert qwen4_exp.head_sizes(config, 1)[0] > 20000171


def test_rows_of_n_grams(plain):
    """Token by token, with whole numbers of any size; ids before an end of text, and before the text, don't count."""
    by, ids = plain.weights["tables"][1], prompt(60)
    ids[20:23] = [7, 7, 3]
    found = qwen4_exp.ngram_rows(np.array([], int), np.array(ids), by)
    for p in range(len(ids)):
        seen = [ids[p]]
        for earlier in (p - 1, p - 2):
            seen.append(7 if earlier < 0 or 7 in ids[earlier:p] else ids[earlier])
        products = [token * int(factor) for token, factor in zip(seen, by.factors)]
        pair, triple = products[0] ^ products[1], products[0] ^ products[1] ^ products[2]
        assert found[p].tolist() == [mixed % int(size) + int(offset) for mixed, sizes, offsets in zip(
            (pair, triple), by.sizes, by.offsets) for size, offset in zip(sizes, offsets)]
    for cut in (1, 2, 21, 22):
        rest = qwen4_exp.ngram_rows(np.array(ids[:cut]), np.array(ids[cut:]), by)
        assert np.array_equal(rest, found[cut:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_table_stays_in_the_file(dtype, tmp_path):
    path = make_random_model(FLASH, tmp_path, dtype)
    model = qwen3.load_model(path)
    table = model.weights["tables"][1]
    whole = np.concatenate([qwen3.to_float32(part) for part in table.parts])
    assert len(table.parts) == 3 and len(whole) % 128 == 0 and whole.shape[1] == 6
    assert not any(part.data.flags.owndata for part in table.parts)  # views of the mapped file
    rows = np.array([[0, len(whole) - 1, 5], [5, 900, 900]])
    assert np.array_equal(table.take(rows), whole[rows].reshape(2, -1))


def test_the_choice_of_positions(plain):
    config = plain.config  # two blocks of 4
    scores = np.array([0.5, 2, 0, 2, 2], np.float32)
    assert qwen4_exp.chosen_positions(scores, 22, config).tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21]
    assert qwen4_exp.chosen_positions(scores[:2], 8, config).tolist() == [*range(8)]
    assert qwen4_exp.chosen_positions(scores[:0], 3, config).tolist() == [0, 1, 2]


def test_a_large_budget_is_full_attention(tmp_path):
    ids = prompt(70)
    path = make(FLASH | {"indexer_budget": 4096}, tmp_path)
    whole = logits_of(path, ids)
    edit_json(path / "config.json", {"indexer_budget": 8})
    sparse = logits_of(path, ids)
    assert np.abs(whole[:11] - sparse[:11]).max() < 1e-5  # two whole blocks, and three tokens
    assert np.abs(whole[40:] - sparse[40:]).max() > 1e-2
    edit_json(path / "config.json", {"indexer_budget": 68})  # 70 tokens are 17 whole blocks
    assert np.abs(logits_of(path, ids) - whole).max() < 1e-5


# ---- The cache -------------------------------------------------------------------------------------------------------

def test_chunks_and_single_tokens(model):
    ids = prompt(90)
    expected = logits_of(model, ids)
    spread = expected.std()
    for sizes in ([1] * 90, [3, 1, 17, 2, 30, 37], [89, 1]):
        cache, found = model.engine.new_cache(model.config), []
        for n, end in zip(sizes, np.cumsum(sizes)):
            found.append(qwen3.forward(model, ids[end - n:end], cache, all_logits=True))
        assert np.abs(np.concatenate(found) - expected).max() < 1e-4 * spread, sizes


def test_a_cache_is_cut_copied_and_rebuilt(model):
    """At the end of a turn, inside a block of the index; each goes on as a new cache would."""
    ids = prompt(40)
    ids[22] = 1
    model_ends = qwen3.replace(model, eos_token_ids=(1,))
    cache = model.engine.new_cache(model.config)
    qwen3.forward(model_ends, ids, cache)
    assert cache.common_prefix(np.array(ids[:30])) == 23
    more = prompt(30, 5)
    expected = logits_of(model, ids[:23] + more)[23:]
    copy = model.engine.new_cache(model.config)
    copy.copy_from(cache, 23)
    loaded = rebuilt(model, copy)
    cache.truncate(23)
    assert cache.bytes(500) > cache.bytes(20) > 0
    for each in (cache, copy, loaded):
        assert each.length == 23
        found = qwen3.forward(model, more, each, all_logits=True)
        assert np.abs(found - expected).max() < 1e-4 * expected.std()


def test_guesses_are_cut_off_again(model):
    """n-gram rows, index and states: after right and wrong guesses, the answer is the plain one."""
    ids = prompt(30) * 2
    options = {"max_new_tokens": 40, "temperature": 0, "eos_token_ids": (), "logit_bias": {3: 90, 4: 90, 8: 90}}
    drafted = Completion(model, ids, lookup=5, **options).finish()
    assert drafted.token_ids == Completion(model, ids, **options).finish().token_ids
    assert drafted.speculator.guessed > drafted.speculator.accepted > 0
    cache = model.engine.new_cache(model.config)
    expected = logits_of(model, ids)
    qwen3.compute(model, [qwen3.NextTokens(cache, np.array(ids[:41]), 1)])
    wrong = np.array([*ids[41:44], 9, 9, 9])
    qwen3.compute(model, [qwen3.NextTokens(cache, wrong, 6, 5)])
    cache.truncate(44)
    found = qwen3.forward(model, ids[44:], cache, all_logits=True)
    assert np.abs(found - expected[44:]).max() < 1e-4 * expected.std()


def test_alone_and_in_company(model):
    prompts = [prompt(n, n) for n in (3, 30, 77)]
    alone = [list(qwen3.generate(model, each, 12, temperature=0, eos_token_ids=())) for each in prompts]
    assert generate_batch(model, prompts, 12, temperature=0, eos_token_ids=()) == alone
    batch = Batch(model, 2, 200, kept=2**20)
    answers = [batch.add(i, each, max_new_tokens=12, temperature=0, eos_token_ids=())
               for i, each in enumerate(prompts + [prompts[2] + alone[2]])]
    while not batch.idle:
        batch.step()
    assert [answer.token_ids for answer in answers[:3]] == alone
    assert answers[3].token_ids == list(qwen3.generate(model, prompts[2] + alone[2], 12, temperature=0,
                                                       eos_token_ids=()))


@pytest.mark.parametrize("name", ["ngram1", "history", "state", "late"])
@pytest.mark.parametrize("change", [
    lambda array: array[:0], lambda array: array[:, :0], lambda array: array[..., :0], lambda array: array[0],
    lambda array: array.astype(np.float16), lambda array: np.concatenate([array, array], axis=-2)],
    ids=["none", "no rows", "no columns", "fewer axes", "float16", "more rows"])
def test_states_of_another_shape_are_refused(name, change, model):
    """A kernel would write beyond them."""
    cache = model.engine.new_cache(model.config)
    qwen3.forward(model, prompt(30), cache)
    before = cache.state(30)
    with_change = before | {name: change(before[name]) if len(before[name]) else before[name]}
    cache.state = lambda length: with_change
    if (with_change[name].shape, with_change[name].dtype) != (before[name].shape, before[name].dtype):
        assert_one_line(message_of(rebuilt, model, cache), "another cache")


# ---- The MTP head ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=ENGINES)
def drafting(tmp_path_factory, request):
    return ENGINES[request.param](make(FLASH | {"vocab_size": VOCABULARY, "mtp_num_hidden_layers": 1},
                                       tmp_path_factory.mktemp("drafting")))


def test_the_head_is_that_of_the_formulas(drafting):
    """In pieces, with the model's own streams: the states and the guesses of the oracle."""
    ids, cache = prompt(40), drafting.engine.new_cache.plain(qwen3_5.mtp_config(drafting.config))
    streams, end = states_of(drafting, ids[:-1]), 0
    assert streams.shape == (39, 4 * 48)
    expected, logits = flash_mtp_oracle(drafting, streams, ids[1:], 3)
    for n in (30, 1, 8):
        start, end = end, end + n
        states, token = drafting.engine.guess(drafting, streams[start:end], np.array(ids[start + 1:end + 1]), cache, 3)
        assert np.abs(states - expected[start:end]).max() < 1e-4 and token == logits[end - 1].argmax()


def test_no_guess_changes_an_answer(drafting, monkeypatch):
    """Greedy and sampled, in a conversation and in a batch, with a head of which two guesses of three are right."""
    monkeypatch.setattr(MTP, "length", lambda self, *_: 3)
    options, text, rng = {"max_new_tokens": 40, "eos_token_ids": (), "seed": 3}, prompt(50), random.Random(0)

    def often_right(model, states, token_ids, cache, start):
        states, token = drafting.engine.guess(model, states, token_ids, cache, start)
        known = answer[start + cache.length + 1:][:1] if rng.random() < 0.67 else []
        return states, [*known, token][0]

    model = replace(drafting, engine=replace(drafting.engine, guess=often_right))
    cache, batch = model.engine.new_cache(model.config), Batch(model, 2, 300, 2**20)
    for i, temperature in enumerate((0, 0.7, 0)):
        plain = Completion(drafting, text, draft="off", temperature=temperature, **options).finish()
        answer = [*text, *plain.token_ids]
        found = Completion(model, text, cache, draft="auto", temperature=temperature, **options).finish()
        other = batch.add(i, text, draft="auto", temperature=temperature, **options)
        while not batch.idle:
            batch.step()
        assert found.token_ids == plain.token_ids == other.token_ids
        assert found.speculator.guessed > found.speculator.accepted > 0 < other.speculator.accepted
        assert ahead_of(cache).start == 0
        text = answer + prompt(9)


# ---- Refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key, value, words", [
    ("ple_layer_ids", [0], "ple_layer_ids"), ("ple_layer_ids", 3, "ple_layer_ids"), ("hc_count", 1, "hc_count"),
    ("indexer_budget", 10, "indexer_budget"), ("indexer_budget", None, "indexer_budget"),
    ("hc_lowrank", "a", "hc_lowrank"),
    ("indexer_kv_heads", 2, "indexer_kv_heads"), ("output_gate_type", "tanh", "output_gate_type"),
    ("eos_token_id", None, "eos_token_id"), ("indexer_head_dim", 6, "indexer_head_dim"),
    ("ple_embed_dim", 50, "ple_embed_dim")])
def test_sizes_that_cannot_be(key, value, words, tmp_path):
    path = make(FLASH, tmp_path)
    edit_json(path / "config.json", {key: value})
    assert_one_line(message_of(qwen3.load_model, path), "config.json", words)


def test_a_type_that_the_fast_engine_lacks(tmp_path, monkeypatch):
    """It refuses one in a line; and a large model takes NumPy, unless the fast engine is asked for."""
    pytest.importorskip("qwen3_numba")
    source = qwen3.load_model(make(FLASH, tmp_path)).source
    source = qwen3.replace(source, kind=qwen3.replace(source.kind, fast=""))
    assert_one_line(message_of(kind_for, source.kind), "the fast engine can't compute a Qwen4ExpForCausalLM yet")
    monkeypatch.setattr(arguments, "LARGE", 0)
    options = SimpleNamespace(fast=None, **dict.fromkeys(arguments.ENGINE_OPTIONS))
    assert arguments.engine_of(options, source) == qwen3.Engine()


def test_as_published(tmp_path):
    """With its text part nested, a tower, a part of an MTP head and joined experts, which are left out or cut."""
    text = {key: value for key, value in FLASH.items() if key not in ("architectures", "torch_dtype")}
    about = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": text,
             "tie_word_embeddings": False}
    plain, path = make(FLASH, tmp_path / "plain"), make(FLASH, tmp_path / "m")
    (path / "config.json").write_text(json.dumps(about))
    tensors = tensors_of(path)
    for layer in range(4):
        start = f"model.layers.{layer}.mlp.experts."
        parts = {part: [tensors.pop(f"{start}{i}.{part}_proj.weight")[1] for i in range(8)]
                 for part in ("gate", "up", "down")}
        tensors[f"{start}gate_up_proj"] = "float32", np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{start}down_proj"] = "float32", np.array(parts["down"])
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tensors |= {name: ("float32", np.zeros((2, 2), np.float32)) for name in (
        "mtp.layers.0.mlp.gate.weight", "model.visual.merger.norm.weight")}
    write_tensors(path / "model.safetensors", tensors)
    assert np.array_equal(logits_of(path, prompt(40)), logits_of(plain, prompt(40)))


def test_in_fp8(tmp_path):
    """As Qwen publishes it: experts in blocks with scales, the n-gram table with one scale, which isn't expanded."""
    plain, path = make(FLASH, tmp_path / "plain"), make(FLASH, tmp_path / "m")
    expected = quantize_model(path, CASES["FP8 in blocks, the last ones cut off"][0], FP8_BLOCKS, (
        "up_proj.weight", "gate_proj.weight", "down_proj.weight"))
    tensors, rng = tensors_of(path), np.random.default_rng(0)
    scale = np.array([0.0078125], np.float32)
    for name in [name for name in tensors if "ngram_embedding" in name]:
        codes = e4m3(rng, tensors[name][1].shape)
        tensors[name], expected[name] = ("float8_e4m3fn", codes), E4M3[codes] * scale
    tensors["model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale"] = "float32", scale
    tensors["model.layers.1.ple.ple_embedding.layer_multipliers"] = "int64", np.arange(3)
    write_tensors(path / "model.safetensors", tensors)
    write_tensors(plain / "model.safetensors", {name: ("float32", array) for name, array in expected.items()})
    model, ids = qwen3.load_model(path), prompt(40)
    stored = [each.data for part in model.weights["tables"][1].parts for each in part.stored]
    assert len(stored) == 3 and all(data.dtype == np.uint8 and not data.flags.owndata for data in stored)
    exact = logits_of(plain, ids)
    assert np.array_equal(logits_of(model, ids), exact)
    assert np.abs(logits_of(fast_model(path), ids) - exact).max() < 0.1 * exact.std()  # experts are rounded to bf16
    quantized = pytest.importorskip("qwen3_numba").load_model(path, "int8")
    assert_one_line(message_of(save_quantized, quantized, tmp_path / "saved", "int8"), "table can't be saved")
    tensors.pop("model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale")
    write_tensors(path / "model.safetensors", tensors)
    assert_one_line(message_of(qwen3.load_model, path), "ngram_embedding.shard_0.weight is F8_E4M3")


@pytest.mark.parametrize("name", ["AWQ, groups of 32", "GPTQ, 4 bits", "auto-round, GPTQ's packing", "MLX, 4 bits"])
def test_published_quantizations(name, tmp_path):
    """The experts, as most of these files have it, but no table."""
    config = FLASH | {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
                      "mtp_num_hidden_layers": 1}
    plain, path = make(config, tmp_path / "plain"), make(config, tmp_path / "m")
    expected = quantize_model(path, *CASES[name], ("up_proj.weight", "gate_proj.weight", "down_proj.weight"))
    write_tensors(plain / "model.safetensors", {key: ("float32", array) for key, array in expected.items()})
    exact, ids = logits_of(plain, prompt(40)), prompt(40)
    assert np.array_equal(logits_of(path, ids), exact)
    assert np.abs(logits_of(fast_model(path), ids) - exact).max() < 0.2 * exact.std()  # vectors are rounded to 8 bits


def test_a_table_that_is_quantized_by_columns(tmp_path):
    """GPTQ's words hold numbers of several rows."""
    path = make(FLASH | {"ple_embed_dim": 256, "split_ngram_parts": 1}, tmp_path)
    quantize_model(path, *CASES["GPTQ, 4 bits"], ("ngram_embedding.shard_0.weight",))
    assert_one_line(message_of(qwen3.load_model, path), str(path), "n-gram table is quantized in a way")


# ---- transformers ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [
    {}, WIDE, TWO_TABLES, {"indexer_budget": 32, "norm_topk_prob": False}, {"ple_layer_ids": []},
    {"layer_types": ["full_attention", "linear_attention"] * 2, "ple_embed_dim": 96},
    {"eos_token_id": [7, 9], "split_ngram_parts": 1, "seed": 5},
    {"rope_parameters": FLASH["rope_parameters"] | {"rope_theta": 5000000, "partial_rotary_factor": 0.5}}],
    ids=lambda changes: str(changes)[:40])
def test_transformers_in_float64(changes, tmp_path, monkeypatch):
    """The text at once, in pieces and token by token. Of blocks with equal scores, transformers may take any: there are
    none here."""
    def without_ties(scores, length, config, choose=qwen4_exp.chosen_positions):
        best = np.sort(scores)[::-1][config.indexer_budget // config.indexer_compress_ratio - 1:][:2]
        assert len(best) < 2 or best[0] > best[1] + 1e-5
        return choose(scores, length, config)

    monkeypatch.setattr(qwen4_exp, "chosen_positions", without_ties)
    path, ids = make(FLASH | changes, tmp_path), prompt(100)
    expected = transformers_logits(path, ids)
    for load in ENGINES.values():
        model = load(path)
        cache, pieces = model.engine.new_cache(model.config), model.engine.new_cache(model.config)
        for logits in (logits_of(model, ids), np.array([qwen3.forward(model, [i], cache) for i in ids]),
                       np.concatenate([qwen3.forward(model, ids[i:i + 7], pieces, all_logits=True)
                                       for i in range(0, 100, 7)])):
            assert_like(logits, expected)
