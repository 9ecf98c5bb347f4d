"""config.json without one of its keys: each model type is read as transformers' own config class reads it."""
import json

import numpy as np
import pytest

from qwen3 import InputError
import qwen3
from qwen3_lib.io.models import MODEL_TYPES, description_of
from qwen3_vision import Pictures

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
# Of RoPE, in modeling_*.py: no config class has them.
SECTIONS = {"qwen3_vl": [24, 20, 20], "qwen3_5": [11, 11, 10], "qwen4_exp": [11, 11, 10]}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
HYBRID = [kind for kind in MODEL_TYPES if "qwen3_5" in kind or kind == "qwen3_next" or "qwen4" in kind]
SPARSE = [kind for kind in MODEL_TYPES if "moe" in kind or kind in HYBRID and "qwen3_5" not in kind]
STREAMS = ("hc_count", "hc_lowrank", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base",
           "make_ngram_vocab_size_divisible_by", "split_ngram_parts", "seed", "ple_embed_dim", "indexer_n_heads",
           "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
WITHOUT_DEFAULTS = {"indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 512, "indexer_budget": 96,
                    "indexer_compress_ratio": 3, "ple_layer_ids": [3, 2], "ple_embed_dim": 1280, "eos_token_id": 5,
                    "output_gate_type": "sigmoid"}  # of Qwen3.8-Flash-Next
TOWER = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")


def other(value, key=""):
    """All of a config with other values than transformers' own."""
    if isinstance(value, dict):
        return {name: other(each, name) for name, each in value.items() if name != "id2label"}
    if isinstance(value, list):
        return value[::-1] * 2 if key == "layer_types" else [1 + each for each in value]
    is_size = type(value) in (int, float) and not key.endswith("_id") and "dropout" not in key
    return value * 2 if is_size else value


def whole(kind):
    """A config.json with every key of a model type, each with another value than the class has."""
    raw = other(transformers.CONFIG_MAPPING[kind]().to_dict())
    text = raw.get("text_config", raw)
    if "vision_config" in raw or "qwen3_5" in kind:
        text["rope_parameters"]["mrope_section"] = [5, 6, 7]
    if "layer_types" in text and kind not in HYBRID:
        text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    if "qwen4" in kind:
        text |= WITHOUT_DEFAULTS
    return raw | {"architectures": MODEL_TYPES[kind].architectures[:1]}


def paths(raw, start=()):
    """The places of all keys: ("text_config", "rope_parameters", "rope_theta"), ..."""
    for key, value in raw.items():
        yield (*start, key)
        if isinstance(value, dict):
            yield from paths(value, (*start, key))


def without(raw, path, values=()):
    """The config without a key, or with another value."""
    first, *rest = path
    if rest:
        return raw | {first: without(raw[first], rest, values)}
    return {key: value for key, value in raw.items() if key != first} | dict.fromkeys([first] * len(values), *values)


def read_by_transformers(kind, raw):
    config = transformers.CONFIG_MAPPING[kind].from_dict(raw)
    blind = not raw.get("vision_config") or not MODEL_TYPES[kind].media
    text, vision = config.get_text_config(), None if blind else config.vision_config
    rope, n = text.rope_parameters, text.num_hidden_layers
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    turned = int(head_dim * rope.get("partial_rotary_factor", 1))
    found = {name: getattr(text, name) for name in SIZES} | {
        "head_dim": head_dim, "rope_dim": turned, "context_length": text.max_position_embeddings,
        "rope_theta": rope["rope_theta"], "rope_type": rope["rope_type"]}
    if "qwen4" in kind:
        found |= {name: getattr(text, name) for name in STREAMS} | {
            "ple_layers": [i - 1 for i in text.ple_layer_ids],
            "output_gate_type": text.output_gate_type or text.hidden_act}
    if kind in SPARSE:
        found |= {name: getattr(text, name) for name in EXPERTS}
        found["norm_topk_prob"] = getattr(text, "norm_topk_prob", True)
        step, dense = getattr(text, "decoder_sparse_step", 1), getattr(text, "mlp_only_layers", ())
        found["sparse_layers"] = [i for i in range(n) if i not in dense and (i + 1) % step == 0]
    if "qwen3_5_moe" not in kind and "qwen4" not in kind:
        found["intermediate_size"] = text.intermediate_size
    if kind in HYBRID:
        found |= {name: value for name, value in vars(text).items() if name.startswith("linear_")}
        found["linear_layers"] = [i for i in range(n) if text.layer_types[i] == "linear_attention"]
    if vision is not None:
        section = rope.get("mrope_section", SECTIONS[kind.removesuffix("_moe")])
        axes = np.zeros(turned // 2, int)
        for axis in (1, 2):
            axes[axis:3 * section[axis]:3] = axis
        found |= {name: getattr(vision, name) for name in TOWER} | {
            "deepstack_visual_indexes": list(getattr(vision, "deepstack_visual_indexes", ())), "axes": axes.tolist(),
            "rope_theta of the tower": vision.rope_parameters["rope_theta"]}
    return found


def read_here(folder, names):
    about = description_of(qwen3.json_in(folder / "config.json"), folder / "config.json")
    config = about.config()
    found = vars(config) | {"rope_type": "default"}
    if "axes" in names:
        pictures = Pictures(qwen3.Source(folder, about.kind, qwen3.json_in(folder / "config.json"), about.language,
                                         config, {}, {}, {}, {}, qwen3.load_tokenizer))
        found |= {name: getattr(pictures.config, name) for name in (*TOWER, "deepstack_visual_indexes")} | {
            "axes": pictures.axes.tolist(), "rope_theta of the tower": pictures.config.rope_theta}
    found["sparse_layers"] = [i for i in config.sparse_layers if i < config.num_hidden_layers]  # without an MTP head's
    return {name: list(value) if isinstance(value := found[name], tuple) else value for name in names}


@pytest.mark.parametrize("kind", [kind for kind in MODEL_TYPES if kind in transformers.CONFIG_MAPPING])
def test_each_absent_key_has_transformers_value(kind, tmp_path):
    raw, refused, differing, same = whole(kind), [], {}, 0
    cases = {(): raw} | {path: without(raw, path) for path in paths(raw) if path != ("model_type",)}
    cases |= {(*path, None): without(raw, path, [None]) for path in paths(raw) if path != ("model_type",)}
    for path, changed in cases.items():
        try:
            theirs = read_by_transformers(kind, json.loads(json.dumps(changed)))
        except Exception:  # transformers can't read it either
            continue
        if None in theirs.values():  # it reads it, and can't make a model
            continue
        # Here, null is as absent; a Qwen3-ASR without text_config is no 1.7B: the tensors' shapes refuse both.
        if path[-2:] == ("num_key_value_heads", None) or kind == "qwen3_asr" and path[0:1] == ("text_config",) \
                and path[1:] in ((), (None,)):
            continue
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            ours = read_here(tmp_path, theirs)
        except InputError:
            refused.append(path)
            continue
        same += ours == theirs
        if ours != theirs:
            differing[path] = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert differing == {} and same > 50
    assert {path[-1] for path in refused} <= {"num_attention_heads"}  # no multiple of those of keys and values, then
