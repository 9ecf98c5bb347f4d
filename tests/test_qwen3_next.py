"""Qwen3-Next: its projections cut, in each kind of file; its MTP head; whole models against transformers in float64."""
import dataclasses
import json
from functools import partial

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import HYBRIDS, NEXT
from helpers import (assert_batches_and_drafts_change_nothing, assert_like, assert_one_line, edit_json, logits_of,
                     message_of, random_ids, states_of, stored_in, transformers_logits)
from make_random_model import make_random_model
from oracle import mtp_oracle
from published import CASES, FLOAT, bytes_in_blocks, quantize_model, tensors_of, write_tensors
from qwen3_5 import mtp_config
from qwen3_lib.io.tensors import PackedTensor
from test_qwen3_numba import distance

make = partial(make_random_model, dtype="float32")
KINDS = {name: config for name, config in HYBRIDS.items() if name.startswith("Qwen3-Next")}
# The published ratios at a quarter of the widths of heads: 16 key heads, 32 value heads, and experts.
PROPORTIONS = NEXT | {
    "hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 32,
    "num_experts_per_tok": 10, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "vocab_size": 970}
JOINED = ("in_proj_qkvz.weight", "in_proj_ba.weight")


def cut_by_hand(tensors: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    """The published tensors under the names of a Qwen3.5, each row by its head and its place there."""
    keys, ratio = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], ratio * config["linear_value_head_dim"]
    out = {}
    for name, array in tensors.items():
        start = name.rpartition("in_proj_")[0]
        if name.endswith(JOINED[0]):
            heads = [array[i * (2 * key + 2 * value):][:2 * key + 2 * value] for i in range(keys)]
            out[f"{start}in_proj_qkv.weight"] = np.concatenate(
                [head[:key] for head in heads] + [head[key:2 * key] for head in heads]
                + [head[2 * key:2 * key + value] for head in heads])
            out[f"{start}in_proj_z.weight"] = np.concatenate([head[2 * key + value:] for head in heads])
        elif name.endswith(JOINED[1]):
            for part, offset in (("b", 0), ("a", ratio)):
                out[f"{start}in_proj_{part}.weight"] = np.array(
                    [array[2 * ratio * i + offset + j] for i in range(keys) for j in range(ratio)])
        else:
            out[name] = array
    return out


def head_names(tensors: dict, n_layers: int) -> dict:
    """The names of an MTP head as in its file."""
    return {name.replace(f"model.layers.{n_layers}.", "mtp.layers.0." if ".mlp." in name or ".self_attn." in name
                         or "layernorm" in name else "mtp."): value for name, value in tensors.items()}


@pytest.mark.parametrize("name", KINDS)
def test_the_projections_are_cut(name, tmp_path):
    path = make(KINDS[name], tmp_path)
    stored = {name: array for name, (_, array) in tensors_of(path).items()}
    assert any(name.endswith(JOINED) for name in stored)
    expected, found = cut_by_hand(stored, KINDS[name]), stored_in(path)
    found = head_names(found, KINDS[name]["num_hidden_layers"])
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key].data, values) for key, values in expected.items())


def test_matrices_of_other_sizes(tmp_path):
    path = make(NEXT, tmp_path)
    edit_json(path / "config.json", {"linear_value_head_dim": 16})
    said = message_of(qwen3.load_model, path)
    assert_one_line(said, str(path), "in_proj_qkvz.weight has shape [256, 48], not [192, 48]")
    edit_json(path / "config.json", {"mlp_only_layers": 3})
    assert_one_line(message_of(qwen3.load_model, path), "config.json", "mlp_only_layers")


# ---- Quantized files -------------------------------------------------------------------------------------------------

def blocks_of_16(w, _settings):
    parts, values = bytes_in_blocks(w, FLOAT, 16, 16)
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, values


QUANTIZED = {name: CASES[name] for name in ("AWQ, groups of 32", "GPTQ, 4 bits", "GPTQ, act-order",
                                            "compressed-tensors, act-order", "nf4")} | {
    "FP8 in blocks": (blocks_of_16, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]})}


@pytest.mark.parametrize("heads", [(32, 32), (16, 24)], ids=str)
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_projections(case, heads, tmp_path):
    """Their numbers, and in qwen3.py the logits of the plain model with these numbers, bit for bit. The rows of b and a
    alternate, and heads of 24 rows don't begin where a word does."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
             "linear_key_head_dim": heads[0], "linear_value_head_dim": heads[1]}
    path, plain = (make(NEXT | sizes, tmp_path / name) for name in ("model", "plain"))
    values = quantize_model(path, *QUANTIZED[case], (*JOINED, "_proj.weight"))
    write_tensors(plain / "model.safetensors", {name: ("float32", value) for name, value in values.items()})
    found, expected = head_names(stored_in(path), 4), cut_by_hand(values, NEXT | sizes)
    for key, tensor in found.items():
        assert np.array_equal(qwen3.to_float32(tensor), expected[key]), key
    assert all(isinstance(found[f"model.layers.0.linear_attn.in_proj_{part}.weight"], PackedTensor)
               for part in ("qkv", "z", "b", "a"))
    assert np.array_equal(logits_of(path, random_ids(20)), logits_of(plain, random_ids(20)))
    if case.startswith("GPTQ, 4"):  # which the fast engine keeps as they are
        weights = fast.load_model(path).weights
        for part in ("qkv", "z"):
            name = f"model.layers.1.linear_attn.in_proj_{part}.weight"
            assert np.array_equal(fast.matrix_rows(weights.matrices[name], range(len(expected[name]))), expected[name])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("form", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", KINDS)
def test_gguf_files(name, form, early, tmp_path):
    """By the gguf package's names; in early files, all four projections are one matrix, and names differ."""
    pytest.importorskip("gguf")
    from test_gguf_file import N_TOKENS, write_hybrid
    sizes = {"vocab_size": N_TOKENS, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64,
             "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32}
    path = make(KINDS[name] | sizes | {"norm_topk_prob": True}, tmp_path / "m", seed=3)  # as in llama.cpp, always
    files = [write_hybrid(path, tmp_path / f"{plain}.gguf", form, plain, early=early) for plain in (False, True)]
    found, plain = (qwen3.load_model(file) for file in files)
    config = qwen3.load_model(path).config
    assert dataclasses.replace(found.config, eos_token_ids=()) == config and config.mtp_num_hidden_layers == 1
    for key, tensor in plain.source.tensors.items():
        assert np.array_equal(qwen3.to_float32(found.source.tensors[key]), qwen3.to_float32(tensor)), key
    ids = random_ids(40, vocab_size=N_TOKENS)
    logits = logits_of(found, ids)
    assert np.array_equal(logits, logits_of(plain, ids))
    if form == "F32":
        for key, tensor in stored_in(path).items():  # the converter rounds 1 + a norm
            assert np.allclose(qwen3.to_float32(found.source.tensors[key]), tensor.data, rtol=1e-6, atol=2e-7), key
        exact, model = logits_of(path, ids), fast.load_model(files[0], kv_dtype="f32", activations="f32")
        assert distance(logits, exact) < 1e-5 and distance(logits_of(model, ids), exact) < 1e-5


# ---- The MTP head, batches and drafts --------------------------------------------------------------------------------

@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("engine", ["NumPy", "fast"])
def test_the_head_is_that_of_the_formulas(name, engine, tmp_path):
    """config.json has no key for it: the tensors tell. Its layer has experts, even if the model's first has none."""
    path = make(KINDS[name] | {"mlp_only_layers": [0]}, tmp_path)
    model = qwen3.load_model(path, qwen3.Engine() if engine == "NumPy" else fast.engine(kv_dtype="f32", threads=1))
    hidden, ids = states_of(model, random_ids(30)[:-1]), random_ids(30)
    expected, logits = mtp_oracle(model, hidden, ids[1:], 3)
    cache = model.engine.new_cache.plain(mtp_config(model.config))
    states, token = model.engine.guess(model, hidden, np.array(ids[1:]), cache, 3)
    assert np.abs(states - expected).max() < 1e-4 and token == logits[-1].argmax()
    stored = tensors_of(path)
    assert "mtp.layers.0.mlp.experts.0.up_proj.weight" in stored and "model.layers.0.mlp.up_proj.weight" in stored
    tensors = {key: value for key, value in stored.items() if "mtp." not in key}
    write_tensors(path / "model.safetensors", tensors)
    assert qwen3.load_model(path).config.mtp_num_hidden_layers == 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_batches_and_drafts_change_no_bit(name, quantize, tmp_path):
    """In the fast engine: alone, beside others, with guesses of the MTP head and from a saved folder."""
    path = make(KINDS[name] | {"vocab_size": 4096}, tmp_path / "m", dtype="bfloat16")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    model, prompts = fast.load_model(path, quantize), [random_ids(n, n) for n in (9, 80, 200)]
    assert_batches_and_drafts_change_nothing(model, prompts)
    if quantize:
        from qwen3_lib.io.packed import save_quantized
        save_quantized(model, tmp_path / "saved", quantize)
        saved = fast.load_model(tmp_path / "saved")
        assert saved.config == model.config
        assert np.array_equal(logits_of(saved, prompts[1]), logits_of(model, prompts[1]))


# ---- transformers ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [
    {}, {"linear_num_value_heads": 2, "head_dim": 64}, {"norm_topk_prob": False}, {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0, 3]}, {"layer_types": ["full_attention", "linear_attention"] * 2}, {"rope_theta": 5000000},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    PROPORTIONS], ids=lambda changes: str(changes)[:40])
def test_transformers_in_float64(changes, tmp_path):
    """Both engines read the text at once and token by token."""
    path, ids = make(NEXT | changes, tmp_path), random_ids(100)
    expected = transformers_logits(path, ids)
    for model in (qwen3.load_model(path), fast.load_model(path, kv_dtype="f32", activations="f32")):
        cache = model.engine.new_cache(model.config)
        for logits in (logits_of(model, ids), np.array([qwen3.forward(model, [i], cache) for i in ids])):
            assert_like(logits, expected)
