"""A model's folder, read strictly: config.json, generation_config.json, and the tensors in its safetensors files.

    read_config(folder)              the checked fields of qwen3.Config
    read_generation_config(folder)   the checked fields of qwen3.Sampling, end-of-text ids, the longest answer
    map_weights(folder, config)      name -> StoredTensor, mapped and not yet read
    to_float32(stored)               a tensor's numbers

Whatever is missing, damaged or unsupported raises InputError, one line that names the file.
"""
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from qwen3_io import adapter
from qwen3_io.arguments import SAMPLING, check_sampling
from qwen3_io.errors import LARGEST_TEXT, InputError, brief, is_whole, number_between, read_json_object, some


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


# ----------------------------------------------------------------------------------------------------------------------
# config.json
# ----------------------------------------------------------------------------------------------------------------------

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")
MOST_LAYERS = 10_000  # so that a wrong number is an error message and no long wait
# Keys that change the computation; only these values are accepted.
ONLY_VALUE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
              "attention_bias": False, "use_sliding_window": False}
# Keys that don't change the computation (use_sliding_window rules over sliding_window and max_window_layers).
HARMLESS_KEYS = {"attention_dropout", "bos_token_id", "dtype", "initializer_range", "max_window_layers", "pad_token_id",
                 "sliding_window", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
                 "_attn_implementation_autoset", "unsloth_fixed", "unsloth_version"}
KNOWN_KEYS = {*SIZES, *ONLY_VALUE, *HARMLESS_KEYS, "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
              "layer_types", "tie_word_embeddings", "eos_token_id"}


def read_config(folder: Path, adapter_folder: str | Path | None = None) -> dict[str, Any]:
    """The fields of qwen3.Config from config.json, written by transformers 4 or 5, and the folder of a LoRA adapter.

    Raises InputError for a missing or malformed field, and names every option that changes the computation and isn't
    implemented.
    """
    file = folder / "config.json"
    if model_file(folder, file.name) is None:
        raise InputError(f"{folder}: {no_model(folder)}")
    raw = read_json_object(file)
    check_architecture(raw, file)
    if raw.get("architectures") == ["Qwen3Model"]:  # a model without a head, as training tools save embedding models
        del raw["architectures"]
    for key, value in ONLY_VALUE.items():
        if key in raw and (raw[key] != value or type(raw[key]) is not type(value)):
            raise InputError(f"{file}: {key} = {brief(repr(raw[key]))} is not supported, only {value!r} is "
                             "(dense Qwen3)")
    if (method := quantization(raw)) is not None:
        raise InputError(f"{file}: quantization_config: a checkpoint quantized by {method} is not supported; take "
                         "the model in bfloat16; python qwen3_numba.py --quantize int8 quantizes it")
    for key, value in raw.items():
        if key not in KNOWN_KEYS and value is not None:
            raise InputError(f"{file}: option {brief(key)} = {brief(value, 80)} is not supported by this program")
    for key in SIZES:
        if not is_whole(raw.get(key), 1) or raw[key] >= 2**31:
            raise InputError(f"{file}: {key} must be a positive integer, not {brief(repr(raw.get(key)))}")
    n_layers, layer_types = raw["num_hidden_layers"], raw.get("layer_types")
    if n_layers > MOST_LAYERS:
        raise InputError(f"{file}: num_hidden_layers = {n_layers} is more than any model has")
    if layer_types is not None and not (isinstance(layer_types, list) and len(layer_types) == n_layers
                                        and all(kind == "full_attention" for kind in layer_types)):
        raise InputError(f"{file}: layer_types must be 'full_attention' for each layer, not {brief(layer_types)}")
    tied = raw.get("tie_word_embeddings", True)  # if absent, load_weights decides from the tensors
    if not isinstance(tied, bool):
        raise InputError(f"{file}: tie_word_embeddings must be true or false, not {brief(repr(tied))}")
    theta, yarn = rope_config(raw, file)
    eps = number_between(raw.get("rms_norm_eps"), 1e-15, 1, "rms_norm_eps", file)
    if raw["num_attention_heads"] % raw["num_key_value_heads"]:
        raise InputError(f"{file}: {raw['num_attention_heads']} attention heads can't share "
                         f"{raw['num_key_value_heads']} key-value heads evenly")
    if raw["head_dim"] % 2:
        raise InputError(f"{file}: head_dim must be even, because RoPE rotates pairs, not {raw['head_dim']}")
    return {**{key: raw[key] for key in SIZES}, "rms_norm_eps": eps, "rope_theta": theta, "yarn": yarn,
            "tie_word_embeddings": tied, "eos_token_ids": token_id_list(raw.get("eos_token_id"), file),
            "adapter": None if adapter_folder is None else checked_adapter(folder, Path(adapter_folder))}


# model_type of a related model -> its description; several share a beginning.
RELATIVES = {"qwen3_moe": "a mixture of experts", "qwen3_next": "Qwen3-Next", "qwen3_5": "Qwen3.5",
             "qwen3_vl": "a model that sees", "qwen3_omni": "a model that sees and hears",
             "qwen3_asr": "a model that hears", "qwen3_tts": "a model that speaks", "qwen2_vl": "Qwen2-VL",
             "qwen2_5_vl": "Qwen2.5-VL", "qwen2_5_omni": "Qwen2.5-Omni", "qwen2_moe": "a mixture of experts of Qwen2",
             "qwen2_audio": "Qwen2-Audio", "qwen2": "Qwen2, Qwen2.5 or QwQ", "qwen": "the first Qwen"}


def check_architecture(raw: Mapping[str, Any], file: Path) -> None:
    """Raises InputError that names another architecture than dense Qwen3."""
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind != "qwen3":
        what = next((what for start, what in RELATIVES.items() if kind.startswith(start)), "another architecture")
        raise InputError(f"{file}: {what} is not supported (model_type = {brief(repr(kind))}, architectures = "
                         f"{brief(raw.get('architectures'))}), only dense Qwen3 is: Qwen/Qwen3-0.6B to Qwen/Qwen3-32B")


def no_model(folder: Path) -> str:
    """Why a folder without config.json is no model, and what to do."""
    try:
        names = sorted(os.listdir(folder))
        commits = sorted(os.listdir(folder / "snapshots")) if "snapshots" in names else []
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if "adapter_config.json" in names:
        return "a LoRA adapter, not a model; give its base model with --model, and this folder with --adapter"
    if any(name.endswith(".gguf") for name in names):
        return "a folder of GGUF files, which are not supported; take the model's safetensors files"
    if commits:
        return f"the hub's cache keeps the model below this folder; give {folder / 'snapshots' / commits[-1]}"
    return "no config.json in this folder, so it is not a model"


def quantization(raw: Mapping[str, Any]) -> str | None:
    """The method of a quantized checkpoint (fp8, awq, gptq, ...), or None."""
    keys = ("quantization_config", "compression_config", "quantization")  # the last one is written by MLX
    about = next((raw[key] for key in keys if raw.get(key)), None)
    if about is None:
        return None
    method = about.get("quant_method") or ("MLX" if "bits" in about else None) if isinstance(about, dict) else about
    return brief("an unknown method" if method is None else method)


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
    file = folder / "generation_config.json"
    raw = read_json_object(file) if model_file(folder, file.name) else {}
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
# Weights: safetensors files, mapped into memory
#
# A safetensors file is 8 bytes with the length of a header, the header (JSON: name -> dtype, shape, offsets), and then
# the tensors' bytes. The safetensors library checks the file; NumPy reads the bytes in place, because the library's own
# NumPy reader knows no bfloat16.
# ----------------------------------------------------------------------------------------------------------------------

STORED_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}

class StoredTensor(NamedTuple):
    """A tensor in its file: `data` is a view of the mapped bytes, bfloat16 as uint16."""
    dtype: str
    data: np.ndarray
    mapping: mmap.mmap


def map_safetensors(file: Path, stored_dtypes: Mapping[str, np.dtype[Any]] = STORED_DTYPES) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file, mapped and not yet read. Raises InputError if the file is damaged."""
    try:
        with safetensors.safe_open(file, framework="numpy"):  # rejects inconsistent or truncated files
            pass
        with open(file, "rb") as opened:
            mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise InputError(f"{file}: not a valid safetensors file (truncated download?): {brief(error)}") from error
    start = 8 + int.from_bytes(mapping[:8], "little")
    header = json.loads(mapping[8:start])
    header.pop("__metadata__", None)
    dtypes = {name: entry["dtype"] for name, entry in header.items()}
    if wrong := [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in stored_dtypes]:
        raise InputError(f"{file}: only dtypes {', '.join(stored_dtypes)} are supported, but {some(wrong)}")
    tensors = {}
    for name, entry in header.items():
        dtype, shape = stored_dtypes[dtypes[name]], entry["shape"]
        try:
            if count := math.prod(shape):
                data = np.frombuffer(mapping, dtype, count, start + entry["data_offsets"][0]).reshape(shape)
            else:
                data = np.empty(shape, dtype)
        except ValueError as error:  # more dimensions, or larger ones beside a 0, than NumPy has
            raise InputError(f"{file}: {brief(name)} has the impossible shape {brief(shape, 80)}") from error
        tensors[name] = StoredTensor(dtypes[name], data, mapping)
    return tensors


def map_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder: model.safetensors, or the shards that model.safetensors.index.json lists."""
    if single := model_file(folder, "model.safetensors", largest=None):
        return map_safetensors(single)
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
        found = map_safetensors(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise InputError(f"{folder}: tensor {brief(twice[0])} is in {shard} and in another shard")
        tensors |= found
    if absent := [name for name in weight_map if name not in tensors]:
        raise InputError(f"{index}: no shard has {some(absent)}")
    return tensors


def no_weights(folder: Path) -> str:
    """The missing files of a folder without model.safetensors and its index, and advice."""
    names = sorted(os.listdir(folder))
    if any(name.endswith(".gguf") for name in names):
        return "its weights are GGUF files, which are not supported; take the model's safetensors files"
    if any(name.startswith("pytorch_model") for name in names):
        return ("its weights are pytorch_model.bin, which is not supported, because it can run code; take a "
                "checkpoint with safetensors files, or convert it (transformers: save_pretrained)")
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return f"no model.safetensors.index.json, which says what is in {some(shards, 2)}; download it, too"
    return "no model.safetensors and no model.safetensors.index.json in this folder"


def check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor],
                  optional: str | None = None) -> None:
    """Raises InputError unless the stored tensors have the names and shapes expected; `optional` may be absent."""
    problems = [f"{name} is missing" for name in shapes if name not in stored and name != optional]
    problems += [f"{name} is unexpected" for name in stored if name not in shapes]
    problems += [f"{name} has shape {list(stored[name].data.shape)}, not {list(shape)}"
                 for name, shape in shapes.items() if name in stored and stored[name].data.shape != shape]
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
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        **{f"model.layers.{i}.{name}.weight": shape
           for i in range(config["num_hidden_layers"]) for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }


def map_weights(folder: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The stored tensors of a model folder, with checked names and shapes; no lm_head.weight if the head is tied.

    The head is tied to the embedding if config.json says so and the file holds no other lm_head.weight: tied
    checkpoints may contain a copy, and if it is no copy, transformers uses the file's.
    """
    stored = checked_weights(folder, config)
    head, embedding = stored.get("lm_head.weight"), stored["model.embed_tokens.weight"]
    if head is not None and config["tie_word_embeddings"] and head.dtype == embedding.dtype \
            and all(map(np.array_equal, head.data, embedding.data)):  # row by row, which takes no memory
        del stored["lm_head.weight"]
    return stored if config.get("adapter") is None else with_adapter(stored, Path(config["adapter"]))


def checked_weights(folder: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The stored tensors under the names of tensor_shapes, with the shapes that config.json says.

    An embedding model's file has names without `model.`, and no head.
    """
    stored = map_checkpoint(folder)
    headless = EMBEDDING in stored
    if headless:
        stored = {f"model.{name}": tensor for name, tensor in stored.items()}
    check_tensors(folder, tensor_shapes(config), stored,
                  "lm_head.weight" if headless or config["tie_word_embeddings"] else None)
    return stored


EMBEDDING = "embed_tokens.weight"  # the embedding's name in a file of a model without a head


def is_headless(folder: Path) -> bool:
    """True for the weights of an embedding model, by their names."""
    return quantized_file(folder) is None and EMBEDDING in map_checkpoint(folder)


def check_answers(folder: Path, embeds: bool) -> None:
    """Raises InputError for an embedding model, which can't answer."""
    if embeds:
        raise InputError(f"{folder}: an embedding model gives vectors, not answers: python qwen3_embed.py --model "
                         f"{folder}; to chat, take a model such as Qwen/Qwen3-0.6B")


def to_float32(stored: StoredTensor) -> np.ndarray:
    """The tensor as float32; a float32 tensor stays in the file. bfloat16 is the upper half of a float32."""
    data = stored.data  # an adapted one is computed anew each time
    if stored.dtype == "F32" and data.flags.aligned:
        return data
    values = np.empty(data.shape, np.float32)
    if stored.dtype == "BF16":
        bits = values.view(np.uint32)
        bits[...] = data
        bits <<= 16
    else:
        values[...] = data
    forget_pages(stored.mapping)
    return values


def broken_tensors(folder: Path) -> list[str]:
    """The names of a checkpoint's tensors that hold NaN or infinity."""
    return [name for name, tensor in map_stored(folder).items() if not np.isfinite(to_float32(tensor)).all()]


def check_finite(folder: Path, numbers: np.ndarray, overflow: str, name: str = "logits") -> None:
    """Raises InputError if a number is NaN or infinite: names the broken tensors, or says `overflow` if none is."""
    if not np.isfinite(numbers).all():
        broken = broken_tensors(folder)
        why = f"NaN or infinity in {some(broken)}" if broken else f"all weights are finite, so {overflow}"
        raise InputError(f"{folder}: the {name} are not finite: {why}")


def forget_pages(mapping: mmap.mmap) -> None:
    """Pages read from a mapped file no longer count as this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


# ----------------------------------------------------------------------------------------------------------------------
# LoRA adapters, merged into the matrices
# ----------------------------------------------------------------------------------------------------------------------

class Adapted(StoredTensor):
    """A stored matrix with the change of an adapter: the sum is computed whenever `data` is read.

    It is rounded to the format of the file, so an adapted model needs no more memory and time than its base.
    """
    change: adapter.Change

    @classmethod
    def of(cls, base: StoredTensor, change: adapter.Change) -> "Adapted":
        adapted = cls(*base)
        adapted.change = change
        return adapted

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        base = StoredTensor(*self)
        merged = self.change.b @ self.change.a
        merged *= np.float32(self.change.scale)
        merged += to_float32(base)
        if self.dtype == "BF16":
            bits = merged.view(np.uint32)  # rounded to nearest, to even in the middle; then the upper half
            return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype("<u2")
        with np.errstate(over="ignore"):
            return merged.astype(base.data.dtype, copy=False)


def checked_adapter(folder: Path, adapter_folder: Path) -> str:
    """The path of an adapter's folder. Raises InputError if it is none, or if the base model can't take one."""
    if quantized_file(folder) is not None:
        raise InputError(f"{folder}: an adapter can't be added to packed weights; quantize the original with --adapter")
    for name in (adapter.CONFIG, adapter.WEIGHTS):
        if model_file(adapter_folder, name, largest=None) is None:
            raise InputError(f"{adapter_folder}: no {name} in this folder, so it is not a LoRA adapter")
    return str(adapter_folder)


def with_adapter(stored: dict[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """The tensors with an adapter's changes. Raises InputError for an adapter of another model.

    A change of a tied head leaves the embedding as it is.
    """
    files = map_safetensors(folder / adapter.WEIGHTS)
    changes = adapter.read_changes(folder, read_json_object(folder / adapter.CONFIG),
                                   {name: to_float32(tensor) for name, tensor in files.items()})
    bases = {"lm_head.weight": stored["model.embed_tokens.weight"]} | stored
    del bases["model.embed_tokens.weight"]
    adapter.check_changes(folder, changes, {name: tensor.data.shape for name, tensor in bases.items()})
    if packed := [name for name in changes if bases[name].dtype not in STORED_DTYPES]:
        raise InputError(f"{folder}: an adapter can't be added to packed weights: {some(packed, 2)}")
    return stored | {name: Adapted.of(bases[name], change) for name, change in changes.items()}


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


def map_stored(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's folder, or of one written by save_quantized."""
    quantized = quantized_file(folder)
    return map_checkpoint(folder) if quantized is None else map_quantized(quantized[1])
