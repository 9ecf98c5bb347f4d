"""Qwen3.8-Flash-Next in GGUF: the folder's tensors after the steps of llama.cpp's converter, under its names, and back.

The names are those of conversion/qwen4exp.py, as long as no package of llama.cpp knows them; those of other hybrids are
compared with its list.
"""
import dataclasses
import json
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
import qwen4_exp
from configs import FLASH, seeing_hybrid
from helpers import assert_one_line, logits_of, message_of, random_ids, stored_in
from make_random_model import make_random_model
from published import tensors_of, write_tensors
from qwen3 import to_float32
from qwen3_lib.io.gguf_file import (EXPERT_NAMES, GGUF_SIZES, HYBRID_SIZES, MOE_SIZES, STREAM_SIZES, YARN,
                                    GGUF_MODEL_TYPES, our_name)
from qwen3_lib.io.models import open_model

gguf = pytest.importorskip("gguf")
from test_gguf_file import N_TOKENS, as_converted, finished, tokenizer_keys  # noqa: E402
from test_mmproj import logits, write_tower  # noqa: E402

SMALL = FLASH | {"vocab_size": N_TOKENS, "hidden_size": 64, "ple_embed_dim": 256, "hc_lowrank": 32, "head_dim": 32,
                 "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "linear_key_head_dim": 32,
                 "linear_value_head_dim": 32, "linear_num_value_heads": 4, "tie_word_embeddings": False,
                 "mtp_num_hidden_layers": 1, "norm_topk_prob": True}
MIXER = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up",
         "block_inject_weight": "inject"}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "self_attn.indexer.q_layernorm": "indexer.q_norm", "self_attn.indexer.k_layernorm": "indexer.k_norm",
         "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
         "linear_attn.conv1d": "ssm_conv1d", "linear_attn.in_proj_a": "ssm_alpha",
         "linear_attn.in_proj_b": "ssm_beta", "linear_attn.norm": "ssm_norm",
         "linear_attn.out_proj": "ssm_out", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
         **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
         **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
         **{f"{ours}_hyper_connection.{name}": f"hc_{theirs}_{part}" for name, part in MIXER.items()
            for ours, theirs in (("attn", "attn"), ("mlp", "ffn"))},
         **{f"ple.{name}_proj": f"ple_{name}" for name in ("key", "value")}, "ple.conv1d": "ple_conv1d",
         **{f"ple.norm_{name}": f"ple_norm_{name}" for name in ("key", "query", "conv")},
         **{f"hyper_connection_mixer.{name}": f"nextn.hc_head_{part}" for name, part in MIXER.items()},
         "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm", "fc": "nextn.eh_proj"}
OUTSIDE = {"model.embed_tokens": "token_embd", "lm_head": "output",
           **{f"model.hyper_connection_mixer.{name}": f"output_hc_{part}" for name, part in MIXER.items()}}


def converted(path, n):
    """GGUF's name -> array, of the tensors in a folder."""
    stored = {name: to_float32(tensor) for name, tensor in qwen3.map_safetensors(path / "model.safetensors").items()}
    stored = {name.replace("mtp.layers.0.", f"model.layers.{n}.").replace("mtp.", f"model.layers.{n}."): array
              for name, array in stored.items()}
    for name in [name for name in stored if ".experts.0." in name]:
        stored[name.replace(".experts.0.", ".experts.")] = np.stack(
            [stored.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(SMALL["num_experts"])])
    table = [stored.pop(name) for name in [*stored] if "ngram_embedding" in name]
    fc = [stored.pop(f"model.layers.{n}.fc_{part}.weight") for part in ("embedding", "hidden")]
    out = {"per_layer_token_embd.weight": np.concatenate(table)}
    for name, array in (stored | {f"model.layers.{n}.fc.weight": np.concatenate(fc, axis=1)}).items():
        part = name.removesuffix(".weight")
        if ".linear_attn." in name:
            part, array = as_converted(name, array, SMALL | {"model_type": "qwen3_5"})
            part = part.removesuffix(".weight")
        elif "norm" in part.rpartition(".")[2]:
            array = array + 1
        elif part.endswith(".conv1d"):
            array = array.squeeze(1)
        if part in OUTSIDE:
            out[f"{OUTSIDE[part]}.weight"] = array
            continue
        _, _, layer, within = part.split(".", 3)
        queries = SMALL["indexer_n_heads"] * SMALL["indexer_head_dim"]
        if within.endswith("index_qk_proj"):
            out |= {f"blk.{layer}.indexer.q_proj.weight": array[:queries],
                    f"blk.{layer}.indexer.k_proj.weight": array[queries:]}
        elif within in ("linear_attn.A_log", "linear_attn.dt_proj.bias"):
            out[f"blk.{layer}.{'ssm_a' if within.endswith('A_log') else 'ssm_dt.bias'}"] = array
        else:
            out[f"blk.{layer}.{NAMES[within]}.weight"] = array
    return out


def write_flash(path, out, form="F32", plain=False, **changes):
    """The Qwen3.8-Flash-Next in a folder as a GGUF file -> the file. plain: rounded to `form`, kept as F32."""
    config, n = json.loads((path / "config.json").read_text()), SMALL["num_hidden_layers"]
    writer, rope = gguf.GGUFWriter(out, "qwen4exp"), config["rope_parameters"]
    heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    about = SimpleNamespace(**config, ngram_heads=heads, seed=1234)
    sizes = qwen4_exp.head_sizes(about, 0)
    keys = {"block_count": n + 1, "nextn_predict_layers": 1, "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"], "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"], "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [*rope.get("mrope_section", (4, 2, 2)), 0],
            "rope.freq_base": float(rope["rope_theta"]), "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
            "ssm.state_size": config["linear_key_head_dim"], "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"], "full_attention_interval": 4,
            "expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
            "hyper_connection.count": config["hc_count"], "hyper_connection.low_rank": config["hc_lowrank"],
            "attention.indexer.head_count": config["indexer_n_heads"],
            "attention.indexer.key_length": config["indexer_head_dim"],
            "attention.indexer.top_k": config["indexer_budget"],
            "attention.compress_ratios": [0, 0, 0, config["indexer_compress_ratio"], 0], "ple.layers": [1],
            "ple.ngram_size": config["ngram_size"], "ple.heads_per_ngram": config["heads_per_ngram"],
            "ple.conv_kernel": config["ple_conv_kernel_size"], "ple.eos_token_id": config["eos_token_id"],
            "ple.image_token_id": 6, "ple.head_offsets": np.cumsum([0, *sizes])[:-1].tolist(),
            "ple.head_vocab_sizes": sizes, "embedding_length_per_layer_input": config["ple_embed_dim"] // len(sizes)}
    writer.add_key_value("qwen4exp.ple.layer_multipliers", qwen4_exp.multipliers(about, 0), gguf.GGUFValueType.ARRAY,
                         gguf.GGUFValueType.UINT64)
    for name, array in converted(path, n).items():
        small = array.ndim == 1 or name.endswith(("gate_inp.weight", "gate_inp_shexp.weight", "conv1d.weight"))
        target = gguf.GGMLQuantizationType["F32" if small else form]
        packed = gguf.quantize(np.ascontiguousarray(array), target)
        if plain:
            packed, target = gguf.dequantize(packed, target), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, packed, raw_dtype=target)
    keys = {f"qwen4exp.{key}": value for key, value in keys.items()}
    return finished(writer, keys | tokenizer_keys(path) | changes, out)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_random_model(SMALL, tmp_path_factory.mktemp("m"), "float32")


def strings_in(keys):
    """The strings of a class of constants, and of the classes in it."""
    for value in vars(keys).values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, type):
            yield from strings_in(value)


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35", "qwen35moe", "qwen4exp"])
def test_names_are_those_of_the_package(arch):
    """All tensors of an architecture have a name of ours, and the keys that are read are keys of llama.cpp."""
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(arch)
    if number is None:
        pytest.skip(f"gguf {version('gguf')} doesn't know {arch}")
    file = SimpleNamespace(metadata={"general.architecture": arch, f"{arch}.ple.layers": np.array([1])}, file=arch)
    for tensor in gguf.MODEL_TENSORS[number]:
        name = gguf.TENSOR_NAMES[tensor].format(bid=3)
        tail = name.removeprefix("blk.3.") if name.startswith("blk.") else ""
        found = [our_name(file, name + end, "3" if tail else "", tail + end) for end in (".weight", ".bias", "")]
        assert any(found) or tail in EXPERT_NAMES, name
    sizes = [GGUF_SIZES, HYBRID_SIZES, MOE_SIZES, STREAM_SIZES if arch == "qwen4exp" else {}]
    keys = [*(name for each in sizes for name in each.values()), *(f"rope.scaling.{name}" for name in YARN.values()),
            "nextn_predict_layers", "rope.dimension_count", "rope.dimension_sections", "attention.value_length"]
    assert {f"{{arch}}.{name}" for name in keys} <= {*strings_in(gguf.Keys)}
    assert arch in GGUF_MODEL_TYPES


def test_a_converted_model_is_the_folder(path, tmp_path):
    """The same tensors (what the converter rounds, within rounding), the same config, the same logits."""
    file = write_flash(path, tmp_path / "x.gguf")
    ours, original = open_model(str(file)), open_model(str(path))
    table = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_"
    same = {name: getattr(original.config, name) for name in ("eos_token_ids", "split_ngram_parts",
                                                              "ngram_vocab_size_base")}
    assert dataclasses.replace(ours.config, **same) == original.config and ours.config.eos_token_ids[0] == 7
    assert {name for name in ours.tensors if table not in name} == {name for name in original.tensors
                                                                    if table not in name}
    whole = np.concatenate([to_float32(part) for name, part in original.tensors.items() if table in name])
    assert np.array_equal(to_float32(ours.tensors[f"{table}0.weight"]), whole)
    for name, tensor in original.tensors.items():
        if table not in name:
            rounded = 2e-7 * ("norm" in name or "A_log" in name)
            assert np.allclose(to_float32(ours.tensors[name]), tensor.data, rtol=5 * rounded, atol=rounded), name
    ids = random_ids(70, vocab_size=N_TOKENS)
    exact = logits_of(path, ids)
    for engine in (qwen3.Engine(), fast.engine(kv_dtype="f32")):
        assert np.abs(logits_of(qwen3.load_model(file, engine), ids) - exact).max() < 1e-4 * exact.std()
    states = np.random.default_rng(0).standard_normal((5, 4 * 64), np.float32)
    guesses = [qwen4_exp.guess(model, states, np.array(random_ids(5)), model.engine.new_cache.plain(
        qwen4_exp.qwen3_5.mtp_config(model.config)), 2)[0] for model in map(qwen3.load_model, (file, path))]
    assert np.abs(guesses[0] - guesses[1]).max() < 1e-4
    assert qwen3.load_model(file).sampling == qwen3.Sampling(1.0, 20, 0.95)


def test_pictures(path, tmp_path):
    """With the tower in an mmproj file: the logits of a folder with the same tensors."""
    config = seeing_hybrid({key: value for key, value in SMALL.items() if key != "mtp_num_hidden_layers"}, "0.8B")
    config["text_config"]["vocab_size"] = N_TOKENS
    folder = make_random_model(config, tmp_path / "folder", "float32")
    text = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors_of(path).items()}
    tensors = {name: text.get(name, tensor) for name, tensor in tensors_of(folder).items()}
    write_tensors(folder / "model.safetensors", tensors)
    file = write_flash(path, tmp_path / "x.gguf")
    write_tower(folder, tmp_path / "mmproj.gguf")
    for engine in (qwen3.Engine, fast.engine):
        assert np.array_equal(*(logits(qwen3.load_model(each, engine())) for each in (file, folder)))


@pytest.mark.parametrize("form", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_packed(form, path, tmp_path):
    """The numbers are those of the package's own dequantization; those of the table as single rows, too."""
    files = [write_flash(path, tmp_path / f"{plain}.gguf", form, plain) for plain in (False, True)]
    packed, plain = (stored_in(file) for file in files)
    assert packed.keys() == plain.keys()
    for name, tensor in plain.items():
        assert np.array_equal(to_float32(packed[name]), to_float32(tensor)), name
    ids = random_ids(40, vocab_size=N_TOKENS)
    models = [qwen3.load_model(file) for file in files]
    rows = np.array([[0, 5, 700], [700, 701, 1]])
    assert np.array_equal(*(model.weights["tables"][1].take(rows) for model in models))
    assert np.array_equal(*(logits_of(model, ids) for model in models))
    quick = fast.load_model(files[0])
    assert np.abs(logits_of(quick, ids) - logits_of(models[0], ids)).mean() < 0.1 * logits_of(models[0], ids).std()


@pytest.mark.parametrize("changes, words", [
    ({"qwen4exp.ple.layers": [1, 2]}, "ple.layers = [1, 2]"), ({"qwen4exp.ple.layers": None}, "ple.layers = None"),
    ({"qwen4exp.ple.layers": ["a"]}, "ple.layers"), ({"qwen4exp.ple.head_vocab_sizes": [307, 313]}, "hashed by other"),
    ({"qwen4exp.ple.head_vocab_sizes": [2**31 - 1] * 8}, "hashed by other"),
    ({"qwen4exp.hyper_connection.count": 1}, "hc_count"), ({"qwen4exp.ple.eos_token_id": "x"}, "eos_token_id"),
    ({"qwen4exp.attention.indexer.top_k": 6}, "indexer_budget"), ({"qwen4exp.ple.ngram_size": 0}, "ngram_size"),
    ({"qwen4exp.attention.compress_ratios": "4"}, "compress_ratios"),
    ({"qwen4exp.embedding_length_per_layer_input": "x"}, "ple_embed_dim")], ids=str)
def test_metadata_that_is_wrong(changes, words, path, tmp_path):
    assert_one_line(message_of(qwen3.load_model, write_flash(path, tmp_path / "x.gguf", **changes)), "x.gguf", words)
