"""The mixture of experts: moe() against a plain loop, and the layouts of its files."""
import json

import numpy as np
import pytest

import qwen3
from configs import BASE
from helpers import REMOVED, assert_one_line, edit_json, message_of, random_ids, with_tensors
from make_random_model import make_random_model
from published import write_tensors
from qwen3_io.checkpoint import map_safetensors

MOE = {key: value for key, value in BASE.items() if key != "max_window_layers"} | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False}


def logits_of(path, ids):
    model = qwen3.load_model(path)
    return qwen3.forward(model, ids, qwen3.KVCache(model.config), all_logits=True)


@pytest.mark.parametrize("norm", [True, False])
def test_moe_is_the_weighted_sum_of_the_likeliest_experts(norm):
    """Computed position by position in float64, from the definition."""
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((2, 5, 32), np.float32), rng.standard_normal((8, 32), np.float32)
    experts = {e: {name: rng.standard_normal(shape, np.float32) / 6 for name, shape in
                   (("gate_proj", (24, 32)), ("up_proj", (24, 32)), ("down_proj", (32, 24)))} for e in range(8)}
    config = qwen3.Config(**{key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size",
                                                        "num_hidden_layers", "num_attention_heads",
                                                        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
                                                        "max_position_embeddings", "tie_word_embeddings")},
                          num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=norm)
    out = qwen3.moe(x, gate, experts, config)
    assert out.shape == x.shape and out.dtype == np.float32
    for position, result in zip(x.reshape(-1, 32).astype(float), out.reshape(-1, 32)):
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
    for i in range(3):
        experts = [[stored[f"model.layers.{i}.mlp.experts.{e}.{name}.weight"].data for e in range(8)]
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
    single = "model.layers.1.mlp.experts.3.up_proj.weight"
    with_tensors(path / "model.safetensors", {single: np.zeros((24, 32), np.float32)})
    assert_one_line(message_of(qwen3.load_model, path), "experts.3.up_proj.weight is there twice", "gate_up_proj")


def test_cache_and_batch_keep_the_answer(tmp_path):
    model = qwen3.load_model(make_random_model(MOE, tmp_path, "float32"))
    ids, cache = random_ids(20), qwen3.KVCache(model.config)
    at_once = logits_of(tmp_path, ids)
    one_by_one = np.array([qwen3.forward(model, [i], cache) for i in ids])
    np.testing.assert_allclose(one_by_one, at_once, atol=2e-5 * at_once.std())
    prompts = [ids[:4], ids[3:12]]
    alone = [list(qwen3.generate(model, prompt, 8, temperature=0, eos_token_ids=())) for prompt in prompts]
    assert qwen3.generate_batch(model, prompts, 8, temperature=0, eos_token_ids=()) == alone


WRONG = {
    "no experts": ({"num_experts": 0}, "num_experts"),
    "more chosen than there are": ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
    "experts in millions": ({"num_experts": 10**6}, "num_experts = 1000000"),
    "two numbers of experts": ({"num_local_experts": 4}, "num_local_experts"),
    "a wide text": ({"moe_intermediate_size": "24"}, "moe_intermediate_size"),
    "no step": ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "dense layers as a text": ({"mlp_only_layers": "0"}, "mlp_only_layers"),
    "dense layers as texts": ({"mlp_only_layers": ["0"]}, "mlp_only_layers"),
    "norm as a number": ({"norm_topk_prob": 1}, "norm_topk_prob"),
    "a shared expert": ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
    "no QK-Norm": ({"use_qk_norm": False}, "use_qk_norm = False"),
    "biases": ({"qkv_bias": True}, "qkv_bias = True"),
}


@pytest.mark.parametrize("case", WRONG)
def test_config_names_what_is_wrong(tmp_path, case):
    changes, words = WRONG[case]
    (tmp_path / "config.json").write_text(json.dumps(MOE | changes))
    assert words in message_of(qwen3.load_config, tmp_path)


def test_tensors_that_do_not_fit(tmp_path):
    path = make_random_model(MOE, tmp_path, "float32")
    edit_json(path / "config.json", {"mlp_only_layers": [1]})
    assert "model.layers.1.mlp.gate_proj.weight is missing" in message_of(qwen3.load_model, path)
    edit_json(path / "config.json", {"mlp_only_layers": [], "num_experts": 9})
    assert "model.layers.0.mlp.experts.8.gate_proj.weight is missing" in message_of(qwen3.load_model, path)
