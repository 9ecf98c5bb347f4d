"""The mixture of experts: moe() against a plain loop, and the layouts of its files."""
import json

import numpy as np
import pytest

import qwen3
from configs import BASE
from helpers import REMOVED, config_at, edit_json, logits_of, message_of, random_ids
from make_random_model import make_random_model
from published import write_tensors
from qwen3 import map_safetensors

MOE = {key: value for key, value in BASE.items() if key != "max_window_layers"} | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False}


@pytest.mark.parametrize("norm", [True, False])
def test_moe_is_the_weighted_sum_of_the_likeliest_experts(norm):
    """Computed position by position in float64, from the definition."""
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((10, 32), np.float32), rng.standard_normal((8, 32), np.float32)
    experts = {e: {name: rng.standard_normal(shape, np.float32) / 6 for name, shape in
                   (("gate_proj", (24, 32)), ("up_proj", (24, 32)), ("down_proj", (32, 24)))} for e in range(8)}
    config = qwen3.Config(1, 32, 1, 1, 1, 1, 8, 1, 1e-6, 1e6, True, 8, num_experts=8, num_experts_per_tok=3,
                          moe_intermediate_size=24, norm_topk_prob=norm)
    out = qwen3.moe(x, gate, experts, config)
    assert out.shape == x.shape and out.dtype == np.float32
    for position, result in zip(x.astype(float), out):
        probabilities = np.exp(gate @ position) / np.exp(gate @ position).sum()
        best = sorted(range(8), key=lambda e: -probabilities[e])[:3]
        expected, total = np.zeros(32), sum(probabilities[e] for e in best) if norm else 1
        for e in best:
            g, up = experts[e]["gate_proj"] @ position, experts[e]["up_proj"] @ position
            expected += probabilities[e] / total * (experts[e]["down_proj"] @ (g / (1 + np.exp(-g)) * up))
        np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


def test_one_expert_of_one_is_a_dense_layer(tmp_path):
    """With a single expert as wide as the dense layer and its weights, nothing is left to choose."""
    dense = make_random_model(BASE | {"tie_word_embeddings": False}, tmp_path / "dense", "float32")
    stored = map_safetensors(dense / "model.safetensors")
    path = make_random_model(MOE | {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64},
                             tmp_path / "moe", "float32")
    tensors = {name.replace("mlp.", "mlp.experts.0."): ("float32", tensor.data) for name, tensor in stored.items()}
    gates = {f"model.layers.{i}.mlp.gate.weight": ("float32", np.ones((1, 32))) for i in range(3)}
    write_tensors(path / "model.safetensors", tensors | gates)
    ids = random_ids(9)
    assert np.array_equal(logits_of(path, ids), logits_of(dense, ids))


def fuse(path):
    """Rewrites a checkpoint as transformers 5 holds it: the experts of a layer stacked, gate above up."""
    stored = map_safetensors(path / "model.safetensors")
    tensors = {name: ("float32", tensor.data) for name, tensor in stored.items() if ".experts." not in name}
    raw = json.loads((path / "config.json").read_text())
    for i in range(raw["num_hidden_layers"]):
        experts = [[stored[f"model.layers.{i}.mlp.experts.{e}.{name}.weight"].data for e in range(raw["num_experts"])]
                   for name in ("gate_proj", "up_proj", "down_proj")]
        start = f"model.layers.{i}.mlp.experts"
        tensors[f"{start}.gate_up_proj"] = ("float32", np.concatenate([np.stack(experts[0]), np.stack(experts[1])], 1))
        tensors[f"{start}.down_proj"] = ("float32", np.stack(experts[2]))
    write_tensors(path / "model.safetensors", tensors)


def test_fused_experts(tmp_path):
    """And num_local_experts, as transformers 5 calls num_experts."""
    path, ids = make_random_model(MOE, tmp_path, "float32"), random_ids(20)
    separate = logits_of(path, ids)
    fuse(path)
    edit_json(path / "config.json", {"num_experts": REMOVED, "num_local_experts": 8})
    assert np.array_equal(logits_of(path, ids), separate)


def test_one_by_one_as_at_once(tmp_path):
    model, ids = qwen3.load_model(make_random_model(MOE, tmp_path, "float32")), random_ids(20)
    at_once, cache = logits_of(tmp_path, ids), qwen3.KVCache(model.config)
    one_by_one = np.array([qwen3.forward(model, [i], cache) for i in ids])
    np.testing.assert_allclose(one_by_one, at_once, atol=2e-5 * at_once.std())


def test_the_layers_that_are_sparse(tmp_path):
    for changes, sparse in (({}, (0, 1, 2)), ({"decoder_sparse_step": 2}, (1,)), ({"mlp_only_layers": [1]}, (0, 2)),
                            ({"mlp_only_layers": None}, (0, 1, 2))):
        (tmp_path / "config.json").write_text(json.dumps(MOE | changes))
        assert config_at(tmp_path).sparse_layers == sparse


@pytest.mark.parametrize("changes", [
    {"num_experts": 0}, {"num_experts_per_tok": 9}, {"num_experts": 10**6}, {"num_experts": "8"},
    {"moe_intermediate_size": "24"}, {"decoder_sparse_step": 0}, {"mlp_only_layers": "0"},
    {"mlp_only_layers": {"0": 1}},
    {"shared_expert_intermediate_size": 64}, {"use_qk_norm": False}, {"qkv_bias": True},
    {"architectures": ["Qwen2MoeForCausalLM"]}, {"architectures": 3}, {"architectures": [[1]]}], ids=str)
def test_config_names_what_is_wrong(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(MOE | changes))
    assert next(iter(changes)) in message_of(config_at, tmp_path)


def test_tensors_that_do_not_fit(tmp_path):
    path = make_random_model(MOE, tmp_path, "float32")
    edit_json(path / "config.json", {"mlp_only_layers": [1]})
    assert "model.layers.1.mlp.gate_proj.weight is missing" in message_of(qwen3.load_model, path)
    edit_json(path / "config.json", {"mlp_only_layers": [], "num_experts": 9})
    assert "model.layers.0.mlp.gate.weight has shape [8, 32], not [9, 32]" in message_of(qwen3.load_model, path)
