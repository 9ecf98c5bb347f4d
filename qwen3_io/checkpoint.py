"""A model's folder, or its GGUF file, read strictly: config.json, generation_config.json, and the tensors.

    read_config(folder)              the checked fields of qwen3.Config
    read_generation_config(folder)   the checked fields of qwen3.Sampling, end-of-text ids, the longest answer
    map_weights(folder, config)      name -> tensor, mapped and not yet read
    to_float32(stored)               a tensor's numbers

Whatever is missing, damaged or unsupported raises InputError, one line that names the file.
"""
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3_io import adapter
from qwen3_io.arguments import SAMPLING, check_sampling
from qwen3_io.errors import LARGEST_TEXT, InputError, brief, is_whole, number_between, read_json_object, some
from qwen3_io.formats import METHODS, check_settings, unpacked
from qwen3_io.gguf_file import gguf_json, is_embedder, is_gguf, map_gguf
from qwen3_io.tensors import (PACKED_DTYPES, STORED_DTYPES, StoredTensor, Tensor, forget_pages, map_safetensors,
                              to_float32)

__all__ = ["ARCHITECTURES", "KNOWN_KEYS", "METHODS", "QUANTIZED", "StoredTensor", "architecture_of", "check_answers",
           "check_finite", "check_tensors", "checked_weights", "forget_pages", "is_headless", "map_checkpoint",
           "map_quantized", "map_safetensors", "map_stored", "map_weights", "model_file", "model_json",
           "quantized_file", "read_config", "read_generation_config", "stretched", "tensor_shapes", "to_float32"]


def model_file(folder: Path, name: str, largest: int | None = LARGEST_TEXT) -> Path | None:
    """The path of a file of a model's folder, or None if the folder has no file of that name. Links are followed.

    Raises InputError for anything but a regular file, and for one of more than `largest` bytes.
    """
    file = folder / name
    if not os.path.lexists(file):
        return None
    if not os.path.isfile(file):
        raise InputError(f"{file}: not a regular file (or a link to nothing); download it again")
    if largest is not None and os.path.getsize(file) > largest:
        raise InputError(f"{file}: larger than {largest} bytes, so it is not what its name says; download it again")
    if is_lfs_pointer(file):
        raise InputError(f"{file}: a git-lfs pointer, not the file itself; run: git lfs pull")
    return file


LFS_POINTER = b"version https://git-lfs"  # git's place-holder for a large file that was not fetched


def is_lfs_pointer(file: Path) -> bool:
    try:
        with open(file, "rb") as opened:
            return opened.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:  # who wants to read the file gets the same error, and can say what for
        return False


def model_json(path: Path, name: str) -> tuple[Path, dict[str, Any] | None]:
    """(where, the JSON object) of a model's file `name`, or of a GGUF file in its place; None if there is none."""
    if is_gguf(path):
        return path, gguf_json(path, name)
    return path / name, read_json_object(path / name) if model_file(path, name) else None


# ----------------------------------------------------------------------------------------------------------------------
# config.json
# ----------------------------------------------------------------------------------------------------------------------

class Architecture(NamedTuple):
    """A row of ARCHITECTURES: what this program computes."""
    name: str  # in "architectures" of config.json
    title: str
    sizes: tuple[str, ...]  # the keys of config.json that must be positive integers
    only: dict[str, Any]  # keys that change the computation; only these values are accepted
    engines: tuple[str, ...]  # the programs that run it


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
ONLY_VALUE = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
ARCHITECTURES = {  # model_type of config.json -> row
    "qwen3": Architecture("Qwen3ForCausalLM", "dense Qwen3", SIZES, ONLY_VALUE, ("qwen3.py", "qwen3_numba.py")),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", "mixture of experts", SIZES + EXPERTS, ONLY_VALUE | {
        "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}, ("qwen3.py", "qwen3_numba.py")),
}
SUPPORTED = "only Qwen3 is: Qwen/Qwen3-0.6B to Qwen/Qwen3-32B, 30B-A3B, 235B-A22B and Coder"
MOST_LAYERS, MOST_EXPERTS = 10_000, 100_000  # in all layers; a wrong number is an error message and no long wait
# Keys that don't change the computation (use_sliding_window rules over sliding_window and max_window_layers).
HARMLESS_KEYS = {"attention_dropout", "bos_token_id", "dtype", "initializer_range", "max_window_layers", "pad_token_id",
                 "sliding_window", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
                 "_attn_implementation_autoset", "unsloth_fixed", "unsloth_version"}
KNOWN_KEYS = {*SIZES, *ONLY_VALUE, *HARMLESS_KEYS, "architectures", "model_type", "rms_norm_eps", "rope_theta",
              "rope_scaling", "rope_parameters", "layer_types", "tie_word_embeddings", "eos_token_id",
              "quantization_config", "compression_config", "quantization"}
MOE_KEYS = {*EXPERTS, "num_local_experts", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob",
            "output_router_logits", "router_aux_loss_coef"}  # the last two are for training


def read_config(path: Path, adapter_folder: str | Path | None = None) -> dict[str, Any]:
    """The fields of qwen3.Config from config.json, written by transformers 4 or 5, or from a GGUF file.

    `adapter_folder` has a LoRA adapter for the model.

    Raises InputError for a missing or malformed field, and names every option that changes the computation and isn't
    implemented.
    """
    file, raw = model_json(path, "config.json")
    if raw is None:
        raise InputError(f"{path}: {no_model(path)}")
    if raw.get("architectures") == ["Qwen3Model"]:  # a model without a head, as training tools save embedding models
        raw["architectures"] = ["Qwen3ForCausalLM"]
    kind = check_architecture(raw, file)
    if "num_local_experts" in raw:  # the name in transformers 5
        raw.setdefault("num_experts", raw["num_local_experts"])
    for key, value in kind.only.items():
        if key in raw and (raw[key] != value or type(raw[key]) is not type(value)):
            raise InputError(f"{file}: {key} = {brief(repr(raw[key]))} is not supported, only {value!r} is")
    if (about := quantization(raw)) is not None:
        check_settings(about, file)
    known = KNOWN_KEYS | {*kind.only} | (MOE_KEYS if "num_experts" in kind.sizes else set())
    for key, value in raw.items():
        if key not in known and value is not None:
            raise InputError(f"{file}: option {brief(key)} = {brief(value, 80)} is not supported by this program")
    for key in kind.sizes:
        if not is_whole(raw.get(key), 1) or raw[key] >= 2**31:
            raise InputError(f"{file}: {key} must be a positive integer, not {brief(repr(raw.get(key)))}")
    n_layers, layer_types = raw["num_hidden_layers"], raw.get("layer_types")
    if n_layers > MOST_LAYERS:
        raise InputError(f"{file}: num_hidden_layers = {n_layers} is more than any model has")
    if layer_types is not None and not (isinstance(layer_types, list) and len(layer_types) == n_layers
                                        and all(kind == "full_attention" for kind in layer_types)):
        raise InputError(f"{file}: layer_types must be 'full_attention' for each layer, not {brief(layer_types)}")
    # If absent, load_weights decides from the tensors.
    tied = true_or_false(raw, "tie_word_embeddings", True, file)
    theta, yarn = rope_config(raw, file)
    eps = number_between(raw.get("rms_norm_eps"), 1e-15, 1, "rms_norm_eps", file)
    if raw["num_attention_heads"] % raw["num_key_value_heads"]:
        raise InputError(f"{file}: {raw['num_attention_heads']} attention heads can't share "
                         f"{raw['num_key_value_heads']} key-value heads evenly")
    if raw["head_dim"] % 2:
        raise InputError(f"{file}: head_dim must be even, because RoPE rotates pairs, not {raw['head_dim']}")
    return {**{key: raw[key] for key in kind.sizes}, "rms_norm_eps": eps, "rope_theta": theta, "yarn": yarn,
            "tie_word_embeddings": tied, "eos_token_ids": token_id_list(raw.get("eos_token_id"), file),
            "adapter": None if adapter_folder is None else checked_adapter(path, Path(adapter_folder)),
            **(expert_config(raw, file) if "num_experts" in kind.sizes else NO_EXPERTS)}


NO_EXPERTS: dict[str, Any] = {"sparse_layers": (), "norm_topk_prob": False, **dict.fromkeys(EXPERTS, 0)}


def expert_config(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The other fields of a mixture of experts: which layers have experts, and how their weights are scaled."""
    n_experts, n_layers = raw["num_experts"], raw["num_hidden_layers"]
    if raw.get("num_local_experts", n_experts) != n_experts or n_experts * n_layers > MOST_EXPERTS:
        raise InputError(f"{file}: num_experts = {n_experts} contradicts num_local_experts, or is more than any model "
                         "has")
    if raw["num_experts_per_tok"] > n_experts:
        raise InputError(f"{file}: num_experts_per_tok = {raw['num_experts_per_tok']} is more than num_experts = "
                         f"{n_experts}")
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not is_whole(step, 1):
        raise InputError(f"{file}: decoder_sparse_step must be a positive integer, not {brief(repr(step))}")
    if not isinstance(dense, list) or not all(is_whole(i, 0) for i in dense):
        raise InputError(f"{file}: mlp_only_layers must be a list of numbers of layers, not {brief(repr(dense))}")
    sparse = sorted({*range(step - 1, n_layers, step)} - {*dense})
    return {"sparse_layers": tuple(sparse),
            "norm_topk_prob": true_or_false(raw, "norm_topk_prob", False, file)}


def true_or_false(raw: Mapping[str, Any], key: str, default: bool, file: Path) -> bool:
    if not isinstance(value := raw.get(key, default), bool):
        raise InputError(f"{file}: {key} must be true or false, not {brief(repr(value))}")
    return value


# model_type of a related model -> its description; several share a beginning.
RELATIVES = {"qwen3_next": "Qwen3-Next", "qwen3_5": "Qwen3.5", "qwen3_6": "Qwen3.6",
             "qwen3_vl": "Qwen3-VL (a model that sees)", "qwen3_omni": "Qwen3-Omni (a model that sees and hears)",
             "qwen3_asr": "Qwen3-ASR (a model that hears)", "qwen3_tts": "Qwen3-TTS (a model that speaks)",
             "qwen3": "a relative of Qwen3", "qwen2_vl": "Qwen2-VL",
             "qwen2_5_vl": "Qwen2.5-VL", "qwen2_5_omni": "Qwen2.5-Omni", "qwen2_moe": "a mixture of experts of Qwen2",
             "qwen2_audio": "Qwen2-Audio", "qwen2": "Qwen2, Qwen2.5 or QwQ", "qwen": "the first Qwen"}


def check_architecture(raw: Mapping[str, Any], file: Path) -> Architecture:
    """The row of a config.json in ARCHITECTURES. Raises InputError that names another architecture."""
    kind, names = raw.get("model_type", "qwen3"), raw.get("architectures")
    if not isinstance(kind, str):
        raise InputError(f"{file}: model_type must be a text, not {brief(repr(kind))}")
    if kind not in ARCHITECTURES:  # GGUF writes names without "_"
        what = next((what for start, what in RELATIVES.items()
                     if kind.replace("_", "").startswith(start.replace("_", ""))), "another architecture")
        raise InputError(f"{file}: {what} is not supported (model_type = {brief(repr(kind))}, architectures = "
                         f"{brief(names)}), {SUPPORTED}")
    if "architectures" in raw and names != [ARCHITECTURES[kind].name]:
        raise InputError(f"{file}: architectures = {brief(repr(names))} is not supported, only "
                         f"{[ARCHITECTURES[kind].name]} is ({ARCHITECTURES[kind].title})")
    return ARCHITECTURES[kind]


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The row in ARCHITECTURES of the fields of a Config."""
    return ARCHITECTURES["qwen3_moe" if config["num_experts"] else "qwen3"]


def no_model(folder: Path) -> str:
    """Why a folder without config.json is no model, and what to do."""
    try:
        names = sorted(os.listdir(folder))
        commits = sorted(os.listdir(folder / "snapshots")) if "snapshots" in names else []
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if "adapter_config.json" in names:
        return "a LoRA adapter, not a model; give its base model with --model, and this folder with --adapter"
    if files := [name for name in names if name.endswith(".gguf")]:
        return f"a folder of several GGUF files; give one of them: {some(files)}"
    if commits:
        return f"the hub's cache keeps the model below this folder; give {folder / 'snapshots' / commits[-1]}"
    return "no config.json in this folder, so it is not a model"


def quantization(raw: Mapping[str, Any]) -> Any:
    """What a config.json says of its quantization, or None."""
    keys = ("quantization_config", "compression_config", "quantization")  # the last one is written by MLX
    return next((raw[key] for key in keys if raw.get(key)), None)


def rope_config(raw: Mapping[str, Any], file: Path) -> tuple[float, dict[str, float] | None]:
    """(rope_theta, the parameters of YaRN or None) of a config.json.

    transformers 4 writes rope_theta and rope_scaling, transformers 5 puts both into rope_parameters.
    """
    given = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None]
    if any(not isinstance(rope, dict) for rope in given):
        raise InputError(f"{file}: rope_parameters and rope_scaling must be objects, not {brief(given)}")
    thetas = [values["rope_theta"] for values in (raw, *given) if values.get("rope_theta") is not None]
    kinds = [rope[key] for rope in given for key in ("rope_type", "type") if key in rope] or ["default"]
    if len(given) > 1 or any(theta != thetas[0] for theta in thetas) or any(kind != kinds[0] for kind in kinds):
        raise InputError(f"{file}: rope_theta, rope_parameters, rope_scaling contradict each other: "
                         f"{brief(thetas)} {brief(given)}")
    theta = number_between(thetas[0] if thetas else None, 2, 1e15, "rope_theta", file)
    rope = {key: value for key, value in (given[0] if given else {}).items()
            if key not in ("rope_theta", "rope_type", "type") and value is not None}
    if kinds[0] == "yarn":
        return theta, yarn_config(rope, raw["max_position_embeddings"], file)
    if kinds[0] != "default":
        raise InputError(f"{file}: rope type {brief(repr(kinds[0]))} is not supported, only 'default' and 'yarn' are")
    if rope:
        raise InputError(f"{file}: rope parameters {brief(rope)} are not supported with rope type 'default'")
    return theta, None


YARN_RANGES = {"factor": (1, 1e6), "original_max_position_embeddings": (1, 2**31), "beta_fast": (1e-6, 1e6),
               "beta_slow": (1e-6, 1e6), "attention_factor": (1e-6, 1e6)}


def yarn_config(rope: Mapping[str, Any], max_position_embeddings: int, file: Path) -> dict[str, float]:
    """The parameters of YaRN, checked, with defaults for the absent ones."""
    yarn = {"factor": None, "original_max_position_embeddings": max_position_embeddings,
            "beta_fast": 32, "beta_slow": 1} | dict(rope)
    for key, value in yarn.items():
        if key not in YARN_RANGES:
            raise InputError(f"{file}: rope parameter {brief(key)} = {brief(repr(value))} is not supported with rope "
                             "type 'yarn'")
        yarn[key] = number_between(value, *YARN_RANGES[key], key, file)
    if yarn["beta_fast"] <= yarn["beta_slow"]:
        raise InputError(f"{file}: beta_fast {yarn['beta_fast']:g} must be larger than beta_slow {yarn['beta_slow']:g}")
    return {"attention_factor": 0.1 * math.log(yarn["factor"]) + 1} | yarn


TRAINED = {40960: 32768}  # max_position_embeddings of Qwen3: 32,768 positions of training, and room for an answer


def stretched(factor: float, max_position_embeddings: int) -> dict[str, float]:
    """YaRN's parameters for a model whose context is to be `factor` times as long as in its training."""
    original = TRAINED.get(max_position_embeddings, max_position_embeddings)
    return yarn_config({"factor": factor}, original, Path("--rope-factor"))


def token_id_list(value: Any, file: Path) -> tuple[int, ...]:
    """eos_token_id of a file: nothing, a number, or a list of numbers."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not is_whole(i, 0) for i in ids):
        raise InputError(f"{file}: eos_token_id must be a token id or a list of them, not {brief(repr(value))}")
    return tuple(ids)


# ----------------------------------------------------------------------------------------------------------------------
# generation_config.json: how the model's authors draw tokens
# ----------------------------------------------------------------------------------------------------------------------

# Keys of generation_config.json besides those of Sampling; others would change the answers and are refused.
GENERATION_KEYS = {"bos_token_id", "do_sample", "eos_token_id", "max_new_tokens", "max_length", "pad_token_id",
                   "transformers_version", "trust_remote_code", "use_cache", "_from_model_config"}


def read_generation_config(folder: Path) -> tuple[dict[str, Any], tuple[int, ...], int | None]:
    """(fields of qwen3.Sampling, end-of-text ids, longest answer or None) from generation_config.json, if there is one.

    As in transformers, do_sample is off unless switched on, and then top_k is 50 and temperature 1 unless given.
    """
    file, found = model_json(folder, "generation_config.json")
    raw = found or {}
    for key, value in raw.items():
        if key not in GENERATION_KEYS and key not in SAMPLING and value is not None and value is not False:
            raise InputError(f"{file}: option {brief(key)} = {brief(value, 80)} is not supported; without it, remove "
                             "the line")
    if raw.get("do_sample") is not None and not isinstance(raw["do_sample"], bool):
        raise InputError(f"{file}: do_sample must be true or false, not {brief(repr(raw['do_sample']))}")
    values = {"temperature": 1.0, "top_k": 50} if raw.get("do_sample") else {}
    values |= {name: raw[name] for name in SAMPLING if raw.get(name) is not None}
    if not raw.get("do_sample"):
        values["temperature"] = 0.0
    try:
        check_sampling(values)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    longest = raw.get("max_new_tokens")
    if longest is not None and not is_whole(longest, 1):
        raise InputError(f"{file}: max_new_tokens must be a positive integer, not {brief(repr(longest))}")
    return values, token_id_list(raw.get("eos_token_id"), file), longest


# ----------------------------------------------------------------------------------------------------------------------
# Weights: where they lie, under which names and with which shapes
# ----------------------------------------------------------------------------------------------------------------------

def map_checkpoint(path: Path, dtype: str = "F32") -> dict[str, Tensor]:
    """The tensors of a model folder or GGUF file, as of an unquantized checkpoint with one tensor per expert.

    Quantized matrices become PackedTensors of this dtype. Raises InputError for missing and damaged files.
    """
    if is_gguf(path):
        return map_gguf(path, dtype)
    file, raw = model_json(path, "config.json")
    if (about := quantization(raw or {})) is None:
        return split_experts(map_files(path))
    return unpacked(map_files(path, PACKED_DTYPES), *check_settings(about, file), path, dtype)


def split_experts(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces the fused expert tensors of transformers 5 by views of them, one per expert and projection.

    mlp.experts.gate_up_proj [num_experts, 2 * moe_intermediate_size, hidden_size], mlp.experts.down_proj
    [num_experts, hidden_size, moe_intermediate_size].
    """
    tensors = dict(stored)
    for name, tensor in stored.items():
        start, _, part = name.rpartition(".")
        if not start.endswith(".mlp.experts") or len(tensor.shape) != 3 or not math.prod(tensor.shape) \
                or not isinstance(tensor, StoredTensor):
            continue
        del tensors[name]
        for expert, data in enumerate(tensor.data):
            half = len(data) // 2
            rows = {"gate_proj": data[:half], "up_proj": data[half:]} if part == "gate_up_proj" else {part: data}
            for key, view in rows.items():
                if (single := f"{start}.{expert}.{key}.weight") in stored:
                    raise InputError(f"{single} is there twice, also in {name}; download the checkpoint again")
                tensors[single] = tensor._replace(data=view)
    return tensors


def map_files(folder: Path, dtypes: Mapping[str, np.dtype[Any]] = STORED_DTYPES) -> dict[str, StoredTensor]:
    """The tensors in a folder's files: model.safetensors, or the shards that model.safetensors.index.json lists."""
    if single := model_file(folder, "model.safetensors", largest=None):
        return map_safetensors(single, dtypes)
    index = model_file(folder, "model.safetensors.index.json")
    if index is None:
        if quantized_file(folder) is not None:
            raise InputError(f"{folder}: quantized by the fast engine, which loads it: python qwen3_numba.py --model "
                             f"{folder}")
        raise InputError(f"{folder}: {no_weights(folder)}")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: no weight_map from tensor names to files")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InputError(f"{index}: {brief(repr(shard))} is not the name of a safetensors file in this folder")
        file = model_file(folder, shard, largest=None)
        if file is None:
            raise InputError(f"{folder}: the shard {shard} is missing; the index lists it")
        found = map_safetensors(file, dtypes)
        if twice := sorted(found.keys() & tensors.keys()):
            raise InputError(f"{folder}: tensor {brief(twice[0])} is in {shard} and in another shard")
        tensors |= found
    if absent := [name for name in weight_map if name not in tensors]:
        raise InputError(f"{index}: no shard has {some(absent)}")
    return tensors


def no_weights(folder: Path) -> str:
    """The missing files of a folder without model.safetensors and its index, and advice."""
    names = sorted(os.listdir(folder))
    if files := [name for name in names if name.endswith(".gguf")]:
        return f"its weights are GGUF files, no safetensors; give one of them: {some(files)}"
    if any(name.startswith("pytorch_model") for name in names):
        return ("its weights are pytorch_model.bin, which is not supported, because it can run code; take a "
                "checkpoint with safetensors files, or convert it (transformers: save_pretrained)")
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return f"no model.safetensors.index.json, which says what is in {some(shards, 2)}; download it, too"
    return "no model.safetensors and no model.safetensors.index.json in this folder"


def check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Tensor],
                  optional: str | None = None) -> None:
    """Raises InputError unless the stored tensors have the names and shapes expected; `optional` may be absent."""
    problems = [f"{name} is missing" for name in shapes if name not in stored and name != optional]
    problems += [f"{name} is unexpected" for name in stored if name not in shapes]
    problems += [f"{name} has shape {list(stored[name].shape)}, not {list(shape)}"
                 for name, shape in shapes.items() if name in stored and stored[name].shape != shape]
    if problems:
        raise InputError(f"{folder}: the weights don't fit config.json: {some(problems)}")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, from the fields of its Config.

    A linear layer is stored as [outputs, inputs].
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
    }
    dense = swiglu_shapes("mlp", hidden, inner)
    n_experts, narrow = config["num_experts"], config["moe_intermediate_size"]
    sparse: dict[str, tuple[int, ...]] = {"mlp.gate": (n_experts, hidden)}
    for expert in range(n_experts):
        sparse |= swiglu_shapes(f"mlp.experts.{expert}", hidden, narrow)
    return {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        **{f"model.layers.{i}.{name}.weight": shape for i in range(config["num_hidden_layers"])
           for name, shape in (layer | (sparse if i in config["sparse_layers"] else dense)).items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }


def swiglu_shapes(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.gate_proj": (inner, hidden), f"{name}.up_proj": (inner, hidden),
            f"{name}.down_proj": (hidden, inner)}


def map_weights(folder: Path, config: Mapping[str, Any], dtype: str = "F32") -> dict[str, Tensor]:
    """The tensors of a model folder or GGUF file, with checked names and shapes; no lm_head.weight if the head is tied.

    Quantized matrices become PackedTensors of this dtype: "F32" or "BF16".

    The head is tied to the embedding if config.json says so and the file holds no other lm_head.weight: tied
    checkpoints may contain a copy, and if it is no copy, transformers uses the file's.
    """
    stored = checked_weights(folder, config, dtype)
    head, embedding = stored.get("lm_head.weight"), stored["model.embed_tokens.weight"]
    if head is not None and config["tie_word_embeddings"] and head.dtype == embedding.dtype \
            and all(map(np.array_equal, head.data, embedding.data)):  # row by row, which takes no memory
        del stored["lm_head.weight"]
    return stored if config.get("adapter") is None else with_adapter(stored, Path(config["adapter"]), dtype)


def checked_weights(folder: Path, config: Mapping[str, Any], dtype: str = "F32") -> dict[str, Tensor]:
    """The stored tensors under the names of tensor_shapes, with the shapes that config.json says.

    An embedding model's file has names without `model.`, and no head.
    """
    stored = map_checkpoint(folder, dtype)
    headless = EMBEDDING in stored
    if headless:
        stored = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in stored.items()}
    check_tensors(folder, tensor_shapes(config), stored,
                  "lm_head.weight" if headless or config["tie_word_embeddings"] else None)
    return stored


EMBEDDING = "embed_tokens.weight"  # the embedding's name in a file of a model without a head


def is_headless(folder: Path) -> bool:
    """True for the weights of an embedding model, by their names, or for a GGUF file that says so."""
    return is_embedder(folder) if is_gguf(folder) else EMBEDDING in map_stored(folder)


def check_answers(folder: Path, embeds: bool) -> None:
    """Raises InputError for an embedding model, which can't answer."""
    if embeds:
        raise InputError(f"{folder}: an embedding model gives vectors, not answers: python qwen3_embed.py --model "
                         f"{folder}; to chat, take a model such as Qwen/Qwen3-0.6B")


def broken_tensors(folder: Path) -> list[str]:
    """The names of a checkpoint's tensors that hold NaN or infinity."""
    return [name for name, tensor in map_stored(folder).items() if not np.isfinite(to_float32(tensor)).all()]


def check_finite(numbers: np.ndarray, folder: Path, overflow: str, name: str = "logits") -> None:
    """Raises InputError that names the broken tensors if a number isn't finite; if none is broken, gives `overflow`."""
    if not np.isfinite(numbers).all():
        broken = broken_tensors(folder)
        why = f"NaN or infinity in {some(broken)}" if broken else f"all weights are finite, so {overflow}"
        raise InputError(f"{folder}: the {name} are not finite: {why}")


# ----------------------------------------------------------------------------------------------------------------------
# LoRA adapters, merged into the matrices
# ----------------------------------------------------------------------------------------------------------------------

def checked_adapter(folder: Path, adapter_folder: Path) -> str:
    """The path of an adapter's folder. Raises InputError if it is none, or if the base model can't take one."""
    if quantized_file(folder) is not None:
        raise InputError(f"{folder}: an adapter can't be added to packed weights; quantize the original with --adapter")
    if not adapter_folder.is_dir():
        raise InputError(f"{adapter_folder}: no such folder")
    for name in (adapter.CONFIG, adapter.WEIGHTS):
        if model_file(adapter_folder, name, largest=None) is None:
            raise InputError(f"{adapter_folder}: no {name} in this folder, so it is not a LoRA adapter")
    return str(adapter_folder)


def with_adapter(stored: dict[str, Tensor], folder: Path, dtype: str) -> dict[str, Tensor]:
    """The tensors with an adapter's changes. Raises InputError for an adapter of another model.

    A change of a tied head leaves the embedding as it is.
    """
    bases = {"lm_head.weight": stored["model.embed_tokens.weight"]} | stored
    files = adapter.without_base(folder, map_safetensors(folder / adapter.WEIGHTS), bases["lm_head.weight"])
    changes = adapter.read_changes(folder, read_json_object(folder / adapter.CONFIG),
                                   {name: to_float32(tensor) for name, tensor in files.items()})
    del bases["model.embed_tokens.weight"]
    adapter.check_changes(folder, changes, {name: tensor.shape for name, tensor in bases.items()})
    return stored | {name: adapter.adapted(bases[name], change, dtype) for name, change in changes.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints that qwen3_numba.save_quantized has written
# ----------------------------------------------------------------------------------------------------------------------

QUANTIZED = ("int8", "int4")


def quantized_file(folder: Path) -> tuple[str, Path] | None:
    """(format, file) of a folder written by save_quantized, the format "int8" or "int4"; None for any other folder."""
    files = {form: model_file(folder, f"model.{form}.safetensors", largest=None) for form in QUANTIZED}
    return next(((form, file) for form, file in files.items() if file is not None), None)


def map_quantized(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file written by save_quantized."""
    return map_safetensors(file, {**STORED_DTYPES, "U8": np.dtype(np.uint8)})


def map_stored(folder: Path) -> Mapping[str, Tensor]:
    """The tensors of a model's folder, or of one written by save_quantized."""
    quantized = quantized_file(folder)
    return map_checkpoint(folder) if quantized is None else map_quantized(quantized[1])
