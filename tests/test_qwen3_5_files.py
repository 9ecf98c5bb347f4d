"""Qwen3.5 in the files that people have: published, quantized, scaled RoPE, adapters; against the reference."""
import json
from functools import partial

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import HYBRID, HYBRID_MOE, HYBRID_SIZES
from helpers import edit_json, logits_of, random_ids
from make_random_model import make_random_model
from published import CASES, FLOAT, bytes_in_blocks, publish, quantize_model, write_tensors
from test_qwen3_moe import fuse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from make_golden import load as reference  # noqa: E402
from test_adapter import trained  # noqa: E402
from test_reference import both_engines, compare, hybrid_that_sees  # noqa: E402

BOTH = {"dense": HYBRID, "mixture": HYBRID_MOE}
make = partial(make_random_model, dtype="float32")


# ---- Published folders -----------------------------------------------------------------------------------------------

@both_engines
@pytest.mark.parametrize("size", HYBRID_SIZES)
def test_all_sizes(size, engine, tmp_path):
    """The shapes of the family at 1/16 of the widths, with 1/4 of the linear heads, and one period of layers."""
    hidden, inner, heads, kv_heads, value_heads, tied, experts = HYBRID_SIZES[size]
    config = (HYBRID_MOE if experts else HYBRID) | {
        "hidden_size": hidden // 16, "num_attention_heads": heads // 2, "num_key_value_heads": kv_heads // 2,
        "linear_num_key_heads": 4, "linear_num_value_heads": value_heads // 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "tie_word_embeddings": tied, "vocab_size": 970}
    config |= {"num_experts": experts // 16, "num_experts_per_tok": 8, "moe_intermediate_size": inner // 16,
               "shared_expert_intermediate_size": inner // 16} if experts else {"intermediate_size": inner // 16}
    path = make(config, tmp_path)
    theirs = reference(path)
    if experts:
        fuse(path)
    compare(engine, publish(path), theirs)


def fp8(w, _settings):
    parts, values = bytes_in_blocks(w, FLOAT, 16, 16)
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, values


PUBLISHED = {name: CASES[name] for name in ("GPTQ, act-order", "AWQ, groups of 32", "auto-round, GPTQ's packing",
                                            "compressed-tensors, act-order", "nf4")} | {
    "FP8 in blocks": (fp8, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_per_tensor": False, "weight_block_size": [16, 16],
                            "modules_to_not_convert": ["lm_head", "mtp.fc"]})}
ENDS = ("_proj.weight", "_qkv.weight", "_z.weight")  # of the matrices that are quantized


@pytest.mark.parametrize("case, kind", [*((case, "dense") for case in PUBLISHED), ("FP8 in blocks", "mixture"),
                                        ("GPTQ, act-order", "mixture")])
def test_quantizations(case, kind, tmp_path):
    """The logits of transformers on the numbers that the packed ones stand for; in the fast engine, nearly."""
    pack, settings = PUBLISHED[case]
    path = make(BOTH[kind] | {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
                              "shared_expert_intermediate_size": 64}, tmp_path / "model")
    plain = make(json.loads((path / "config.json").read_text()), tmp_path / "plain")
    values = quantize_model(path, pack, settings, ENDS)
    write_tensors(plain / "model.safetensors", {name: ("float32", value) for name, value in values.items()})
    compare("qwen3", publish(path), reference(plain))
    ids = random_ids(20)
    expected, found = (logits_of(model, ids) for model in (path, fast.load_model(path)))
    assert np.sqrt(((found - expected)**2).mean()) < 0.5 * expected.std()  # 8 bits may lead a random router elsewhere


def test_unpacked_experts_beside_packed_matrices(tmp_path):
    """The stacked experts are left as they are; and the settings may stand in the text part."""
    path = make(HYBRID_MOE | {"hidden_size": 64}, tmp_path / "model")
    plain = make(json.loads((path / "config.json").read_text()), tmp_path / "plain")
    fuse(path)
    values = quantize_model(path, *PUBLISHED["GPTQ, act-order"], (".o_proj.weight", ".out_proj.weight"))
    write_tensors(plain / "model.safetensors", {name: ("float32", value) for name, value in values.items()})
    theirs, raw = reference(plain), json.loads((publish(path) / "config.json").read_text())
    raw["text_config"]["quantization_config"] = raw.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(raw))
    compare("qwen3", path, theirs)


# ---- YaRN ------------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@both_engines
def test_yarn(engine, tmp_path):
    """As Qwen writes YaRN for long texts: beside mrope_section, which a text doesn't need."""
    rope = HYBRID["rope_parameters"] | {"rope_theta": 1e4, "mrope_section": [3, 3, 2]} | YARN
    config = HYBRID | {"head_dim": 64, "rope_parameters": rope}
    path = make(config, tmp_path)
    theirs = reference(path)
    compare(engine, path, theirs, 150)
    edit_json(path / "config.json", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": YARN})
    compare(engine, publish(path), theirs)


# ---- Adapters --------------------------------------------------------------------------------------------------------

ALL = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
       "gate_proj", "up_proj", "down_proj"]


@pytest.mark.filterwarnings("ignore")  # of peft, about tied heads
@both_engines
@pytest.mark.parametrize("kind, options", [
    ("dense", {"target_modules": ALL}),
    ("dense", {"target_modules": [*ALL, "embed_tokens"]}),
    ("mixture", {"target_modules": [*ALL, "shared_expert_gate", "lm_head"], "use_rslora": True})],
    ids=["all", "the embedding", "a mixture"])
def test_adapters(kind, options, engine, tmp_path):
    path = make(BOTH[kind], tmp_path / "model")
    theirs = trained(reference(path), tmp_path / "adapter", **options)
    compare(engine, path, theirs, adapter=tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BOTH)
def test_an_adapter_of_a_model_with_a_vision_tower(kind, tmp_path):
    """Which peft changes, too, under names as in the base."""
    base = hybrid_that_sees(BOTH[kind])
    base.save_pretrained(tmp_path / "base")
    theirs = trained(base, tmp_path / "adapter", target_modules=[*ALL, "qkv"])
    assert any("visual" in name for name in qwen3.map_safetensors(tmp_path / "adapter/adapter_model.safetensors"))
    model, ids = qwen3.load_model(tmp_path / "base", adapter=tmp_path / "adapter", tokenizer=False), random_ids(80)
    logits = logits_of(model, ids)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
