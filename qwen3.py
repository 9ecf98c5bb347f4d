# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66", "jinja2>=3.1.6"]
# ///
"""Qwen3 language models in plain NumPy, from the files that Hugging Face publishes to streamed text.

    python qwen3.py "What is the capital of France?"                        the small bundled model answers
    python qwen3.py --model Qwen3-0.6B "What is the capital of France?"     a folder with Qwen's own files

The file reads from top to bottom, in the order in which a checkpoint becomes text:

    config -> weights -> components -> KV cache -> forward -> sampling -> model -> generation

Who wants to see the model itself first may skip to the components. What flows through it, with the sizes of Qwen3-0.6B
(`n` is the number of tokens):

    token ids [n] -> embedding [n, 1024] -> 28 x decoder layer [n, 1024] -> RMSNorm -> lm_head -> logits [n, 151936]
    decoder layer:  x + attention(RMSNorm(x)), then  x + swiglu(RMSNorm(x))

The words:

    token            a piece of text, numbered; the tokenizer cuts text into tokens
    embedding        the learned vector that stands for a token
    residual stream  the vector x [hidden_size] of a position, to which each layer adds something
    attention head   one of several attentions that run side by side, each on head_dim numbers of its own
    logits           a score for every token of the vocabulary to be the next one; softmax makes them probabilities
    lm_head          the matrix from the residual stream to the logits; "tied" when it is the embedding matrix again
    prefill, decode  running the prompt through the model; running one new token at a time
    end of text      a token by which the model says that it is done

Everything is float32. The arrays have a leading batch axis; a single prompt is a batch of one.
"""
import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from tqdm import tqdm

from tokenizer_utils import (Answer, InputError, StreamDecoder, Tokenizer, load_tokenizer, model_file, parse_answer,
                             until_stop)

# ----------------------------------------------------------------------------------------------------------------------
# Config: the model's sizes, from config.json
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Config:
    """The fields of config.json that inference needs, under Hugging Face's names."""
    vocab_size: int  # rows of the embedding; more than the tokenizer has tokens
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the SwiGLU
    num_hidden_layers: int
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # key and value heads, each shared by a group of query heads
    head_dim: int  # a free choice: q_proj maps hidden_size to num_attention_heads * head_dim. 128 in all of Qwen's own
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool  # the lm_head is the embedding again
    yarn: dict | None = None  # the parameters of YaRN, when the checkpoint asks for it
    eos_token_ids: tuple[int, ...] = ()

    @property
    def context_length(self) -> int:
        """Positions that the model can tell apart. YaRN stretches what it was trained on."""
        stretched = self.yarn["factor"] * self.yarn["original_max_position_embeddings"] if self.yarn else 0
        return max(self.max_position_embeddings, int(stretched))


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")
# Keys that would change what the model computes: any other value than this one is refused.
ONLY_VALUE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
              "attention_bias": False, "use_sliding_window": False}
# Keys that don't change it, whatever they hold (use_sliding_window rules over sliding_window and max_window_layers).
HARMLESS_KEYS = {"attention_dropout", "bos_token_id", "dtype", "initializer_range", "max_window_layers", "pad_token_id",
                 "sliding_window", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
                 "_attn_implementation_autoset", "unsloth_fixed", "unsloth_version"}
KNOWN_KEYS = {*SIZES, *ONLY_VALUE, *HARMLESS_KEYS, "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
              "layer_types", "tie_word_embeddings", "eos_token_id"}
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def read_json_object(path: Path) -> dict:
    """The JSON object in a file. Raises InputError, with the file's name, when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def is_number(value: Any) -> bool:
    """True for a real number that float32 can hold: not for NaN, infinity, True or a text."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT32


def is_whole(value: Any, minimum: int) -> bool:
    """True for an integer (not True or 3.0) of at least `minimum`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= minimum


def number_between(value: Any, low: float, high: float, name: str, file: Path) -> float:
    """The value called `name` in `file`. Raises InputError unless it is a number from low to high."""
    if not is_number(value) or not low <= value <= high:
        raise InputError(f"{file}: {name} must be a number between {low:g} and {high:g}, not {value!r}")
    return float(value)


def load_config(path: Path) -> Config:
    """The config of the model folder `path`, written by transformers 4 or 5.

    Raises InputError for a missing or malformed field, and names every option that this file does not implement.
    """
    file = path / "config.json"
    raw = read_json_object(file)
    for key, value in ONLY_VALUE.items():
        if key in raw and (raw[key] != value or type(raw[key]) is not type(value)):
            raise InputError(f"{file}: {key} = {raw[key]!r} is not supported, only {value!r} is (dense Qwen3)")
    for key, value in raw.items():
        if key not in KNOWN_KEYS and value is not None:
            raise InputError(f"{file}: option {key} = {str(value)[:80]} is not supported by this program")
    for key in SIZES:
        if not is_whole(raw.get(key), 1) or raw[key] >= 2**31:
            raise InputError(f"{file}: {key} must be a positive integer, not {raw.get(key)!r}")
    n_layers, layer_types = raw["num_hidden_layers"], raw.get("layer_types")
    if layer_types is not None and not (isinstance(layer_types, list) and len(layer_types) == n_layers
                                        and all(kind == "full_attention" for kind in layer_types)):
        raise InputError(f"{file}: layer_types must be 'full_attention' for each layer, not {layer_types!r}")
    tied = raw.get("tie_word_embeddings", True)  # where the flag is missing, the file decides: see load_weights
    if not isinstance(tied, bool):
        raise InputError(f"{file}: tie_word_embeddings must be true or false, not {tied!r}")
    theta, yarn = rope_config(raw, file)
    eps = number_between(raw.get("rms_norm_eps"), 1e-15, 1, "rms_norm_eps", file)
    config = Config(**{key: raw[key] for key in SIZES}, rms_norm_eps=eps, rope_theta=theta, tie_word_embeddings=tied,
                    yarn=yarn, eos_token_ids=token_id_list(raw.get("eos_token_id"), file))
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(f"{file}: {config.num_attention_heads} attention heads can't share "
                         f"{config.num_key_value_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise InputError(f"{file}: head_dim must be even, because RoPE rotates pairs, not {config.head_dim}")
    return config


def rope_config(raw: dict, file: Path) -> tuple[float, dict | None]:
    """(rope_theta, the parameters of YaRN or None) of a config.json.

    transformers 4 writes rope_theta and rope_scaling, transformers 5 puts both into rope_parameters.
    """
    given = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None]
    if any(not isinstance(rope, dict) for rope in given):
        raise InputError(f"{file}: rope_parameters and rope_scaling must be objects, not {given!r}")
    thetas = [values["rope_theta"] for values in (raw, *given) if values.get("rope_theta") is not None]
    kinds = [rope[key] for rope in given for key in ("rope_type", "type") if key in rope] or ["default"]
    if len(given) > 1 or any(theta != thetas[0] for theta in thetas) or any(kind != kinds[0] for kind in kinds):
        raise InputError(f"{file}: rope_theta, rope_parameters, rope_scaling contradict each other: {thetas} {given}")
    theta = number_between(thetas[0] if thetas else None, 2, 1e15, "rope_theta", file)
    rope = {key: value for key, value in (given[0] if given else {}).items()
            if key not in ("rope_theta", "rope_type", "type") and value is not None}
    if kinds[0] == "yarn":
        return theta, yarn_config(rope, raw["max_position_embeddings"], file)
    if kinds[0] != "default":
        raise InputError(f"{file}: rope type {kinds[0]!r} is not supported, only 'default' and 'yarn' are")
    if rope:
        raise InputError(f"{file}: rope parameters {rope} are not supported with rope type 'default'")
    return theta, None


def yarn_config(rope: dict, max_position_embeddings: int, file: Path) -> dict:
    """The parameters of YaRN, checked, those that have a default filled in."""
    yarn = {"factor": None, "original_max_position_embeddings": max_position_embeddings,
            "beta_fast": 32, "beta_slow": 1} | rope
    ranges = {"factor": (1, 1e6), "original_max_position_embeddings": (1, 2**31), "beta_fast": (1e-6, 1e6),
              "beta_slow": (1e-6, 1e6), "attention_factor": (1e-6, 1e6)}
    for key in yarn:
        if key not in ranges:
            raise InputError(f"{file}: rope parameter {key} = {yarn[key]!r} is not supported with rope type 'yarn'")
        yarn[key] = number_between(yarn[key], *ranges[key], key, file)
    if yarn["beta_fast"] <= yarn["beta_slow"]:
        raise InputError(f"{file}: beta_fast {yarn['beta_fast']:g} must be larger than beta_slow {yarn['beta_slow']:g}")
    return {"attention_factor": 0.1 * math.log(yarn["factor"]) + 1} | yarn


def token_id_list(value: Any, file: Path) -> tuple[int, ...]:
    """eos_token_id as the files have it: nothing, a number, or a list of numbers."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not is_whole(i, 0) for i in ids):
        raise InputError(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)


# ----------------------------------------------------------------------------------------------------------------------
# Weights: from safetensors files, mapped into memory, to float32 arrays
#
# A safetensors file is 8 bytes with the length of a header, the header (JSON: name -> dtype, shape, offsets), and then
# the tensors' bytes. The safetensors library checks the file; NumPy reads the bytes where they lie, because the
# library's own NumPy reader knows no bfloat16.
# ----------------------------------------------------------------------------------------------------------------------

STORED_DTYPES = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


class StoredTensor(NamedTuple):
    """A tensor as it lies in its file: `data` is a view of the mapped bytes, bfloat16 as uint16."""
    dtype: str
    data: np.ndarray
    mapping: mmap.mmap


def map_safetensors(file: Path, stored_dtypes: dict[str, np.dtype] = STORED_DTYPES) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file, without reading them yet. Raises InputError if the file is damaged."""
    try:
        with safetensors.safe_open(file, framework="numpy"):  # refuses lying headers and truncated files
            pass
        with open(file, "rb") as opened:
            mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise InputError(f"{file}: not a valid safetensors file (truncated download?): {error}") from error
    start = 8 + int.from_bytes(mapping[:8], "little")
    header = json.loads(mapping[8:start])
    header.pop("__metadata__", None)
    dtypes = {name: entry["dtype"] for name, entry in header.items()}
    if wrong := [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in stored_dtypes]:
        raise InputError(f"{file}: only dtypes {', '.join(stored_dtypes)} are supported, but {', '.join(wrong)}")
    tensors = {}
    for name, entry in header.items():
        dtype, shape = stored_dtypes[dtypes[name]], entry["shape"]
        try:
            if count := math.prod(shape):
                data = np.frombuffer(mapping, dtype, count, start + entry["data_offsets"][0]).reshape(shape)
            else:
                data = np.empty(shape, dtype)
        except ValueError as error:  # more dimensions, or larger ones beside a 0, than NumPy has
            raise InputError(f"{file}: {name} has the impossible shape {str(shape)[:80]}") from error
        tensors[name] = StoredTensor(dtypes[name], data, mapping)
    return tensors


def map_checkpoint(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder: model.safetensors, or the shards that model.safetensors.index.json lists."""
    if single := model_file(path, "model.safetensors", largest=None):
        return map_safetensors(single)
    index = model_file(path, "model.safetensors.index.json")
    if index is None:
        raise InputError(f"{path}: no model.safetensors and no model.safetensors.index.json in this folder")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: no weight_map from tensor names to files")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InputError(f"{index}: {shard!r} is not the name of a safetensors file in this folder")
        file = model_file(path, shard, largest=None)
        if file is None:
            raise InputError(f"{path}: the shard {shard} is missing; the index lists it")
        found = map_safetensors(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise InputError(f"{path}: tensor {twice[0]} is in {shard} and in another shard")
        tensors |= found
    if absent := [name for name in weight_map if name not in tensors]:
        raise InputError(f"{index}: no shard has {', '.join(absent)}")
    return tensors


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint. A linear layer is stored as [outputs, inputs]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        **{f"model.layers.{i}.{name}.weight": shape
           for i in range(config.num_hidden_layers) for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }


def check_tensors(path: Path, config: Config, stored: dict[str, StoredTensor]) -> None:
    """Raises InputError that names each tensor that is missing, unexpected, or of another shape than by config.json."""
    if config.num_hidden_layers > len(stored):
        raise InputError(f"{path}: the weights don't fit config.json: {len(stored)} tensors are too few for "
                         f"{config.num_hidden_layers} layers")
    shapes = tensor_shapes(config)
    if config.tie_word_embeddings and "lm_head.weight" not in stored:
        del shapes["lm_head.weight"]
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [f"{name} is unexpected" for name in stored if name not in shapes]
    problems += [f"{name} has shape {list(stored[name].data.shape)}, not {list(shape)}"
                 for name, shape in shapes.items() if name in stored and stored[name].data.shape != shape]
    if problems:
        raise InputError(f"{path}: the weights don't fit config.json: {'; '.join(problems)}")


def to_float32(stored: StoredTensor) -> np.ndarray:
    """The tensor as float32. What is float32 in the file stays where it is; bfloat16 is the upper half of a float32."""
    if stored.dtype == "F32" and stored.data.flags.aligned:
        return stored.data
    values = np.empty(stored.data.shape, np.float32)
    if stored.dtype == "BF16":
        bits = values.view(np.uint32)
        bits[...] = stored.data
        bits <<= 16
    else:
        values[...] = stored.data
    forget_pages(stored.mapping)
    return values


def forget_pages(mapping: mmap.mmap) -> None:
    """What has been read of a mapped file no longer counts as this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def load_weights(path: Path, config: Config) -> dict:
    """The weights of a model folder in float32, by short names; w["layers"][i] holds those of one decoder layer.

    The head is tied to the embedding when config.json says so and no lm_head.weight in the file says otherwise: tied
    checkpoints may contain a copy, and where it is no copy, transformers goes by the file.
    """
    stored = map_checkpoint(path)
    check_tensors(path, config, stored)
    head, embedding = stored.get("lm_head.weight"), stored["model.embed_tokens.weight"]
    tied = head is None or (config.tie_word_embeddings and head.dtype == embedding.dtype
                            and all(map(np.array_equal, head.data, embedding.data)))  # row by row, for memory's sake
    if tied:
        stored.pop("lm_head.weight", None)
    weights: dict[str, Any] = {"layers": [{} for _ in range(config.num_hidden_layers)]}
    for name, tensor in tqdm(stored.items(), "loading", delay=1, leave=False, disable=None, unit=" tensors"):
        parts = name.split(".")  # model.layers.7.self_attn.q_proj.weight becomes layers[7]["q_proj"]
        place = weights["layers"][int(parts[2])] if parts[1] == "layers" else weights
        place[parts[-2]] = to_float32(tensor)
    if tied:
        weights["lm_head"] = weights["embed_tokens"]
    keep_freed_memory()
    return weights


def keep_freed_memory() -> None:
    """Makes the C library keep freed arrays of up to 32 MB for the next ones, instead of handing them to the system.

    glibc keeps blocks up to the size of the largest that was ever freed. Prefill allocates and frees thousands of
    arrays of a few megabytes; without the fresh pages for each, it is 1.12 times as fast.
    """
    np.empty(2**25 - 2**16, np.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# Components, in the order in which the data meets them. Each is a function of arrays.
# ----------------------------------------------------------------------------------------------------------------------

def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [..., inputs] times weight [outputs, inputs] transposed -> [..., outputs]. Nearly all time is spent here."""
    rows = x.reshape(-1, x.shape[-1]) @ weight.T  # one product for the whole batch, so that each weight is read once
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., d] scaled to a root mean square of 1, then by weight [d].

    Keeps the numbers in range, however many layers have added to x. Source: Zhang & Sennrich 2019 (RMSNorm).
    """
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    x = x * (1 / np.sqrt(mean_square + np.float32(eps)))
    x *= weight
    return x


def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary position embedding: turns each pair (i, i + head_dim / 2) of x [batch, heads, n, head_dim] by its angle.

    Attention by itself knows no order. With q turned by angles in proportion to its position, and k likewise, q·k
    depends on how far apart the two are, and on nothing else of their positions.
    Qwen3 pairs the first half of a head with the second ("half-split"). The paper (Su et al. 2021) pairs neighbours;
    weights made for one layout don't work with the other.
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_tables(config: Config, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every angle at positions [batch, n] -> two arrays [batch, 1, n, head_dim / 2]."""
    frequencies, factor = rope_frequencies(config)
    angles = positions[:, None, :, None].astype(np.float32) * frequencies
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def rope_frequencies(config: Config) -> tuple[np.ndarray, float]:
    """(radians per position for each pair of dimensions, [head_dim / 2]; a factor for cos and sin).

    Pair i turns by theta ** (-2i / head_dim) per position: the first pairs quickly, for what stands close by, the last
    ones slowly, for what is far. YaRN (Peng et al. 2023) stretches the slow pairs, which have not made a full turn
    within the context of the training, by `factor`, leaves the quick ones, and blends those between.
    """
    d, theta, yarn = config.head_dim, config.rope_theta, config.yarn
    frequencies = 1 / np.float32(theta) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    if yarn is None:
        return frequencies, 1.0

    def pair(turns: float) -> float:
        """The (fractional) pair that makes so many turns within the original context."""
        return d * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair(yarn["beta_slow"])), d - 1)  # d - 1 and 0.001 as in the reference
    ramp = np.clip((np.arange(d // 2, dtype=np.float32) - low) / np.float32(max(high - low, 0.001)), 0, 1)
    return frequencies / np.float32(yarn["factor"]) * ramp + frequencies * (1 - ramp), yarn["attention_factor"]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, left_padding: np.ndarray | None = None) -> np.ndarray:
    """Causal grouped-query attention of the newest n positions to all positions so far (Ainslie et al. 2023).

    Each position asks with its query q, and each position so far answers with its key k: how well the two fit, q·k,
    decides how much of that position's value v is taken. out = softmax(q kᵀ / sqrt(head_dim)) v, where
    softmax(s) = exp(s) / sum(exp(s)) turns scores into shares that sum to 1, and the root keeps the spread of the
    scores near 1 whatever head_dim is. "Causal": a position sees itself and what is before it.

    q: [batch, n_heads, n, head_dim]; k, v: [batch, n_kv_heads, length, head_dim], the new positions last. Where
    `left_padding` [batch] is given, a sequence ignores so many positions at its start. -> [batch, n_heads, n, head_dim]
    """
    batch, n_heads, n, head_dim = q.shape
    n_kv_heads, length = k.shape[1:3]
    # Query head h uses KV head h // group. The heads of a group are neighbours, so one reshape stacks them as rows of
    # one product, and K and V are not repeated in memory.
    group = n_heads // n_kv_heads
    q = (q * np.float32(head_dim ** -0.5)).reshape(batch, n_kv_heads, group * n, head_dim)
    scores = q @ k.swapaxes(-1, -2)  # [batch, n_kv_heads, group * n, length]
    blocked = np.finfo(np.float32).min  # not -inf: a row of nothing but padding must not become NaN
    if n > 1:  # a single newest token sees everything and needs no mask
        future = np.triu(np.ones((n, n), bool), 1)
        np.copyto(scores.reshape(batch, n_kv_heads, group, n, length)[..., -n:], blocked, where=future)
    if left_padding is not None:
        for row, n_columns in enumerate(left_padding):
            scores[row, ..., :n_columns] = blocked
    scores -= scores.max(axis=-1, keepdims=True)  # does not change the softmax, and exp can't overflow
    np.exp(scores, out=scores)
    out = scores @ v / scores.sum(axis=-1, keepdims=True)  # divided after the product, where there is less to divide
    return out.reshape(batch, n_heads, n, head_dim)


QUERIES = 128  # positions whose attention is computed together
MAX_SCORES = 2**24  # attention scores in memory at a time (64 MiB): with very long contexts, fewer positions together


def attention_in_blocks(q: np.ndarray, k: np.ndarray, v: np.ndarray, left_padding: np.ndarray | None) -> np.ndarray:
    """The same for a few positions at a time, each block without the keys that lie in the future of all of it."""
    (batch, n_heads, n), length = q.shape[:3], k.shape[2]
    block = max(1, min(QUERIES, MAX_SCORES // (batch * n_heads * length)))
    outs = []
    for start in range(0, n, block):
        seen = length - n + min(start + block, n)
        outs.append(attention(q[:, :, start:start + block], k[:, :, :seen], v[:, :, :seen], left_padding))
    return outs[0] if len(outs) == 1 else np.concatenate(outs, axis=2)


def swiglu(x: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
    """down(silu(gate(x)) * up(x)), x [..., hidden_size] -> the same shape. Source: Shazeer 2020 (GLU variants).

    Attention moves information between positions; this works on each position alone. silu(g) = g / (1 + exp(-g)) is a
    smooth switch that decides for each inner dimension how much of up(x) passes.
    """
    # OpenBLAS is 1.15 times as fast at W @ columns as at rows @ W.T, so the rows become columns once.
    columns = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T)
    hidden = gate_proj @ columns  # [intermediate_size, rows]
    switch = np.exp(-hidden)  # may overflow to inf: then silu is -0, which is right
    switch += 1
    hidden /= switch
    hidden *= np.matmul(up_proj, columns, out=switch)
    return (down_proj @ hidden).T.reshape(x.shape)


def decoder_layer(x: np.ndarray, w: dict, config: Config, cache: "KVCache", layer: int,
                  cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One layer: x [batch, n, hidden_size] -> the same shape. Writes the new keys and values into the cache."""
    eps, (batch, n) = config.rms_norm_eps, x.shape[:2]
    h = rms_norm(x, w["input_layernorm"], eps)
    q = linear(h, w["q_proj"]).reshape(batch, n, -1, config.head_dim)  # [batch, n, n_heads, head_dim]
    k = linear(h, w["k_proj"]).reshape(batch, n, -1, config.head_dim)  # [batch, n, n_kv_heads, head_dim]
    v = linear(h, w["v_proj"]).reshape(batch, n, -1, config.head_dim)
    q = rms_norm(q, w["q_norm"], eps).swapaxes(1, 2)  # QK-Norm: each head for itself, before RoPE
    k = rms_norm(k, w["k_norm"], eps).swapaxes(1, 2)  # [batch, n_kv_heads, n, head_dim]
    keys, values = cache.append(layer, apply_rope(k, cos, sin), v.swapaxes(1, 2))
    out = attention_in_blocks(apply_rope(q, cos, sin), keys, values, cache.left_padding)
    x = x + linear(out.swapaxes(1, 2).reshape(batch, n, -1), w["o_proj"])  # heads side by side: n_heads * head_dim
    return x + swiglu(rms_norm(x, w["post_attention_layernorm"], eps), w["gate_proj"], w["up_proj"], w["down_proj"])


# ----------------------------------------------------------------------------------------------------------------------
# KV cache: the keys and values of all positions so far
#
# A token sees only what is before it. So nothing that was computed for a position ever changes, and of it later tokens
# need only k and v. Keeping them makes a new token as cheap as a prompt of one token. The price is
# 2 * layers * n_kv_heads * head_dim * 4 bytes per position: 229 kB in Qwen3-0.6B.
# ----------------------------------------------------------------------------------------------------------------------

class KVCache:
    """Keys and values, each one array [n_layers, batch, n_kv_heads, capacity, head_dim]; `length` positions are filled.

    The capacity, whenever it is used up, becomes a quarter more than what is needed, and 64, but `max_length` at most.
    `left_padding` [batch], if given, counts the positions at the start of each sequence that hold nothing. `token_ids`
    [batch, capacity] are the tokens at the positions, so that a later prompt can be compared.
    """

    stored_as = "float32"  # what a saved cache says of its numbers; faster engines have caches with smaller ones

    def __init__(self, config: Config, max_length: int | None = None, left_padding: Sequence[int] | None = None):
        self.max_length = config.context_length if max_length is None else max_length
        if not is_whole(self.max_length, 1):
            raise InputError(f"the length of a KV cache must be a whole number, 1 or more, not {max_length!r}")
        self.config = config
        self.length = 0
        self.left_padding = None if left_padding is None else np.array(left_padding, np.int64)
        batch = 1 if left_padding is None else len(left_padding)
        self.k = np.empty((config.num_hidden_layers, batch, config.num_key_value_heads, 0, config.head_dim), np.float32)
        self.v = np.empty_like(self.k)
        self.token_ids = np.empty((batch, 0), np.int64)

    def reserve(self, n: int) -> None:
        """Makes room for n more positions. Raises InputError beyond max_length."""
        needed = self.length + n
        if needed > self.max_length:
            raise InputError(f"{needed} positions don't fit into a context of {self.max_length}")
        # One after the other: only one old array lies beside its copy. Each for itself: Ctrl-C may come in between.
        if needed > self.k.shape[3]:
            self.k = self._resized(self.k, needed)
        if needed > self.v.shape[3]:
            self.v = self._resized(self.v, needed)
        if needed > self.token_ids.shape[1]:
            self.token_ids = np.pad(self.token_ids, ((0, 0), (0, self.k.shape[3] - self.token_ids.shape[1])))

    def _resized(self, old: np.ndarray, needed: int) -> np.ndarray:
        capacity = min(needed + needed // 4 + 64, self.max_length)
        new = np.empty((*old.shape[:3], capacity, old.shape[4]), old.dtype)
        new[..., :self.length, :] = old[..., :self.length, :]
        return new

    def positions(self, n: int) -> np.ndarray:
        """The positions of the next n tokens within their sequences, [batch, n]; padding, which nobody sees, gets 0."""
        padding = np.zeros(1, np.int64) if self.left_padding is None else self.left_padding
        return np.maximum(self.length + np.arange(n) - padding[:, None], 0)

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Writes k, v [batch, n_kv_heads, n, head_dim] behind the filled part -> all keys, all values of the layer.

        The new positions count only after `advance`: what is interrupted in between leaves the cache as it was.
        """
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length:end] = k
        self.v[layer, :, :, self.length:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def advance(self, token_ids: np.ndarray) -> None:
        """Counts the tokens [batch, n] whose keys and values every layer has appended."""
        end = self.length + token_ids.shape[1]
        self.token_ids[:, self.length:end] = token_ids
        self.length = end

    def common_prefix(self, token_ids: np.ndarray) -> int:
        """How many positions, from the first on, hold the tokens `token_ids` [n] (in a cache of one sequence)."""
        n = min(self.length, len(token_ids))
        differing = np.flatnonzero(self.token_ids[0, :n] != token_ids[:n])
        return int(differing[0]) if len(differing) else n

    def truncate(self, length: int) -> None:
        """Forgets all positions from `length` on."""
        if not is_whole(length, 0) or length > self.length:
            raise InputError(f"a cache of {self.length} positions can't be cut to {length!r}")
        self.length = length

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these sequences of the batch."""
        self.k = np.take(self.k, rows, axis=1)  # as self.k[:, rows], but it lies in memory in the order of its axes
        self.v = np.take(self.v, rows, axis=1)
        self.token_ids = self.token_ids[rows]
        self.left_padding = None if self.left_padding is None else self.left_padding[rows]


# ----------------------------------------------------------------------------------------------------------------------
# forward: token ids in, logits out
# ----------------------------------------------------------------------------------------------------------------------

CHUNK = 512  # prompt tokens that go through the layers together: enough for full speed of the matrix products


def checked_ids(token_ids: Sequence[int] | np.ndarray, config: Config) -> np.ndarray:
    """Token ids as an integer array [batch, n]. Raises InputError unless there are some and all have an embedding."""
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise InputError("the sequences of a batch must have the same number of token ids") from error
    if ids.size == 0:
        raise InputError("there are no tokens: the prompt is empty")
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise InputError("token ids must be integers in one list (or one list per sequence), "
                         f"not {ids.dtype} of shape {ids.shape}")
    if wrong := ids[(ids < 0) | (ids >= config.vocab_size)].tolist():
        raise InputError(f"token id {wrong[0]} is out of range: the model has {config.vocab_size} tokens")
    return np.atleast_2d(ids)


def output_logits(x: np.ndarray, w: dict, eps: float) -> np.ndarray:
    """Residual stream [batch, n, hidden_size] -> logits [batch, n, vocab_size]."""
    return linear(rms_norm(x, w["norm"], eps), w["lm_head"])


def forward(model: "Model", token_ids: Sequence[int] | np.ndarray, cache: KVCache,
            all_logits: bool = False) -> np.ndarray:
    """Runs new tokens through the model, behind what the cache holds, and adds them to the cache.

    token_ids: [n], or [batch, n] for a batch. Prefill is a call with the whole prompt, decoding one with one token.
    -> the logits after the last token, float32 [vocab_size]; with `all_logits` after each, [n, vocab_size]; for a
    batch with the batch axis in front. Raises InputError for ids out of range and when the context is full.
    """
    config, w = model.config, model.weights
    ids = checked_ids(token_ids, config)
    batch, n = ids.shape
    if batch != cache.k.shape[1]:
        raise InputError(f"the cache holds {cache.k.shape[1]} sequences, but there are tokens for {batch}")
    cache.reserve(n)
    logits = np.empty((batch, n, config.vocab_size) if all_logits else 0, np.float32)
    chunk = max(1, CHUNK // batch)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN in the weights is reported once it has reached the logits
        for start in range(0, n, chunk):
            now = ids[:, start:start + chunk]
            cos, sin = rope_tables(config, cache.positions(now.shape[1]))
            x = w["embed_tokens"][now]  # [batch, chunk, hidden_size]
            for i, layer in enumerate(w["layers"]):
                x = decoder_layer(x, layer, config, cache, i, cos, sin)
            cache.advance(now)
            if all_logits:
                logits[:, start:start + chunk] = output_logits(x, w, config.rms_norm_eps)
        if not all_logits:  # the head is as large as several layers: only where somebody looks
            logits = output_logits(x[:, -1:], w, config.rms_norm_eps)[:, 0]
    return logits if np.ndim(token_ids) == 2 else logits[0]


# ----------------------------------------------------------------------------------------------------------------------
# Sampling: from logits to the next token
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The order is that of transformers: penalties, temperature, top-k, top-p, min-p."""
    temperature: float = 0.0  # divides the logits: below 1, likely tokens get likelier; 0 (greedy) takes the likeliest
    top_k: int = 0  # only the k most likely tokens; 0 is off
    top_p: float = 1.0  # only the most likely tokens that together reach this probability
    min_p: float = 0.0  # only tokens at least this fraction as likely as the most likely one
    repetition_penalty: float = 1.0  # divides (negative: multiplies) the logits of tokens in the prompt or the answer
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted as often as the token is in the answer

    def __post_init__(self) -> None:
        def check(name: str, wanted: str, is_right: Callable[[Any], bool]) -> None:
            value = getattr(self, name)
            if not is_number(value) or not is_right(value):
                raise InputError(f"{name} must be {wanted}, not {value!r}")

        check("temperature", "0 (greedy), or between 0.0001 and 10000", lambda t: t == 0 or 1e-4 <= t <= 1e4)
        check("top_k", "a whole number, 0 (off) or more", lambda k: is_whole(k, 0))
        check("top_p", "above 0 and at most 1", lambda p: 0 < p <= 1)
        check("min_p", "between 0 and 1", lambda p: 0 <= p <= 1)
        check("repetition_penalty", "between 0.0001 and 10000", lambda x: 1e-4 <= x <= 1e4)
        check("presence_penalty", "between -10000 and 10000", lambda x: abs(x) <= 1e4)
        check("frequency_penalty", "between -10000 and 10000", lambda x: abs(x) <= 1e4)

    def updated(self, **changes: float | None) -> "Sampling":
        """The same with the given values; None leaves a value as it is."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def penalize(logits: np.ndarray, sampling: Sampling, prompt_counts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Logits [vocab_size] after the penalties; the counts say how often a token was in the prompt, in the answer."""
    if sampling.repetition_penalty != 1:
        penalty, seen = np.float32(sampling.repetition_penalty), prompt_counts + counts > 0
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.presence_penalty or sampling.frequency_penalty:
        presence, frequency = np.float32(sampling.presence_penalty), np.float32(sampling.frequency_penalty)
        logits = logits - presence * (counts > 0) - frequency * counts
    return logits


def top_k_indices(x: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest of x [n], and of all that equal the k-th (as in transformers); in no particular order.

    Read x as a table of 64 rows. The k largest of its columns' maxima are k elements of x, so the k-th largest of x is
    at least the smallest of these. Only the elements that reach it, a few more than k, are partitioned: 0.06 ms for
    151,936 logits and k = 20, where partitioning all of them takes 0.94 ms.
    """
    columns = len(x) // 64
    if columns < k:
        return np.flatnonzero(x >= np.partition(x, -k)[-k])
    maxima = x[:64 * columns].reshape(64, columns).max(axis=0)
    indices = np.flatnonzero(x >= np.partition(maxima, -k)[-k])
    return indices[x[indices] >= np.partition(x[indices], -k)[-k]]


def as_square(x: np.ndarray) -> np.ndarray:
    """x [n] as the rows of the smallest square that holds it, filled up with zeros.

    Sums over 151,936 small float32 numbers are taken in two steps, along a row and over rows: a single running sum
    would lose what is small against it.
    """
    side = math.isqrt(max(len(x) - 1, 0)) + 1
    square = np.zeros(side * side, np.float32)
    square[:len(x)] = x
    return square.reshape(side, side)


def running_sum(x: np.ndarray) -> np.ndarray:
    """The sum of x [n] up to each element, [n]."""
    sums = np.cumsum(as_square(x), axis=1)
    sums[1:] += np.cumsum(sums[:-1, -1])[:, None]
    return sums.reshape(-1)[:len(x)]


def top_p_indices(x: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the fewest of x [n], log-probabilities up to a constant, that together reach top_p. (Holtzman 2019)

    The 1024 most likely tokens nearly always reach it, so all of them are sorted only when these don't.
    """
    total = np.exp(x).sum()
    for k in (min(1024, len(x)), len(x)):
        order = top_k_indices(x, k)
        order = order[np.argsort(-x[order], kind="stable")]
        probabilities = np.exp(x[order]) / total
        before = running_sum(probabilities) - probabilities  # what all more likely tokens reach together
        kept = max(np.count_nonzero(before < np.float32(top_p)), 1)
        if kept < len(order):
            break
    return order[:kept]


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """What temperature, top-k, top-p and min-p leave of logits [vocab_size] -> (token ids, their probabilities)."""
    x = (logits - logits.max()) / np.float32(sampling.temperature)
    ids = top_k_indices(x, sampling.top_k) if 0 < sampling.top_k < len(x) else np.arange(len(x))
    if sampling.top_p < 1:
        ids = ids[top_p_indices(x[ids], sampling.top_p)]
    if sampling.min_p > 0:
        ids = ids[x[ids] >= math.log(sampling.min_p)]  # the most likely token has x = 0
    probabilities = np.exp(x[ids])
    return ids, probabilities / probabilities.sum()


def draw_index(weights: np.ndarray, rng: np.random.Generator) -> int:
    """An index of weights [n], drawn in proportion to them; never one whose weight is 0."""
    sums = np.cumsum(weights)
    index = np.searchsorted(sums, rng.random(dtype=np.float32) * sums[-1], side="right")
    return int(min(index, np.searchsorted(sums, sums[-1])))  # the product may round up to the whole sum


def sample(logits: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """Draws a token id from logits [vocab_size]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ids, probabilities = candidates(logits, sampling)
    square = as_square(probabilities)
    row = draw_index(square.sum(axis=1), rng)  # first a row of the square, then a token of the row
    return int(ids[row * len(square) + draw_index(square[row], rng)])


# ----------------------------------------------------------------------------------------------------------------------
# Model: a loaded checkpoint, and who computes with it
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Engine:
    """What a faster implementation replaces; generation, sampling and the command line exist once, in this file.

    load_weights(path, config) -> whatever the engine's own forward wants as model.weights
    new_cache(config, max_length, left_padding) -> a KVCache, or something with the same methods
    forward(model, token_ids, cache, all_logits) -> logits
    """
    load_weights: Callable[[Path, Config], Any]
    new_cache: Callable[..., KVCache]
    forward: Callable[..., np.ndarray]


NUMPY = Engine(load_weights, KVCache, forward)


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint: its folder, config, weights, tokenizer, its authors' defaults, and who computes."""
    path: Path
    config: Config
    weights: Any
    tokenizer: Tokenizer
    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int | None
    engine: Engine


# Keys of generation_config.json besides those of Sampling; others would change what is generated and are refused.
GENERATION_KEYS = {"bos_token_id", "do_sample", "eos_token_id", "max_new_tokens", "max_length", "pad_token_id",
                   "transformers_version", "trust_remote_code", "use_cache", "_from_model_config"}


def load_generation_config(path: Path, config: Config) -> tuple[Sampling, tuple[int, ...], int | None]:
    """(sampling defaults, end-of-text ids, longest answer or None) from generation_config.json, which may be missing.

    As in transformers, do_sample is off unless switched on, and then top_k is 50 and temperature 1 unless given.
    """
    file = path / "generation_config.json"
    raw = read_json_object(file) if model_file(path, file.name) else {}
    names = Sampling.__dataclass_fields__
    for key, value in raw.items():
        if key not in GENERATION_KEYS and key not in names and value is not None and value is not False:
            raise InputError(f"{file}: option {key} = {str(value)[:80]} is not supported; without it, remove the line")
    if raw.get("do_sample") is not None and not isinstance(raw["do_sample"], bool):
        raise InputError(f"{file}: do_sample must be true or false, not {raw['do_sample']!r}")
    values = {"temperature": 1.0, "top_k": 50} if raw.get("do_sample") else {}
    values |= {name: raw[name] for name in names if raw.get(name) is not None}
    if not raw.get("do_sample"):
        values["temperature"] = 0.0
    try:
        sampling = Sampling(**values)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    longest = raw.get("max_new_tokens")
    if longest is not None and not is_whole(longest, 1):
        raise InputError(f"{file}: max_new_tokens must be a positive integer, not {longest!r}")
    return sampling, token_id_list(raw.get("eos_token_id"), file) or config.eos_token_ids, longest


def load_model(name: str | Path, engine: Engine = NUMPY, offline: bool = False) -> Model:
    """Loads a folder with config.json, tokenizer.json and *.safetensors as published on Hugging Face.

    `name` may also be that of a model on the hub (Qwen/Qwen3-0.6B, or 0.6B for short): it is taken from the hub's cache
    or, unless `offline`, downloaded into it.
    Raises InputError, one line that names the file, for anything missing, damaged or unsupported.
    """
    path = Path(name)
    if not name or not os.path.isdir(name):
        from qwen3_hub import resolve_model  # only where it is needed, because importing the hub's client takes time
        path = resolve_model(str(name), offline)
    if model_file(path, "config.json") is None:
        raise InputError(f"{path}: no config.json in this folder, so it is not a model")
    config = load_config(path)
    sampling, eos_token_ids, max_new_tokens = load_generation_config(path, config)
    tokenizer = load_tokenizer(path)
    weights = engine.load_weights(path, config)
    return Model(path, config, weights, tokenizer, sampling, eos_token_ids, max_new_tokens, engine)


# ----------------------------------------------------------------------------------------------------------------------
# Generation: an iterator of token ids, a stream of text on top of it, and several prompts at once
# ----------------------------------------------------------------------------------------------------------------------

def sampler(model: Model, prompt: np.ndarray, sampling: Sampling, seed: int | None) -> Callable[[np.ndarray], int]:
    """A function that draws a sequence's next token from logits [vocab_size] and remembers it for the penalties."""
    rng = np.random.default_rng(seed)
    prompt_counts = np.bincount(prompt, minlength=model.config.vocab_size).astype(np.float32)
    counts = np.zeros(model.config.vocab_size, np.float32)

    def draw(logits: np.ndarray) -> int:
        check_finite(model, logits)
        token = sample(penalize(logits, sampling, prompt_counts, counts), sampling, rng)
        counts[token] += 1
        return token

    return draw


def check_finite(model: Model, logits: np.ndarray) -> None:
    """Raises InputError that names the broken tensors if a logit is NaN or infinite."""
    if not np.isfinite(logits).all():
        raise InputError(f"{model.path}: the logits are not finite: {broken_tensors(model.path)}")


def broken_tensors(path: Path) -> str:
    """Which tensors of a checkpoint hold NaN or infinity, in words."""
    broken = [name for name, tensor in map_checkpoint(path).items() if not np.isfinite(to_float32(tensor)).all()]
    if broken:
        return f"NaN or infinity in {', '.join(broken)}"
    return "all weights are finite, so the computation itself has overflowed float32"


def checked_prompt(token_ids: Sequence[int] | np.ndarray, config: Config) -> np.ndarray:
    """The token ids of one sequence as an array [n]."""
    ids = checked_ids(token_ids, config)
    if len(ids) > 1:
        raise InputError(f"a prompt is one list of token ids, not {len(ids)} (generate_batch takes several prompts)")
    return ids[0]


def checked_whole(name: str, value: int | None, minimum: int) -> int | None:
    """The value. Raises InputError unless it is None or a whole number of at least `minimum`."""
    if value is not None and not is_whole(value, minimum):
        raise InputError(f"{name} must be a whole number, {minimum} or more, not {value!r}")
    return value


def checked_ends(model: Model, eos_token_ids: Iterable[int] | None) -> set[int]:
    """The ids that end an answer: those given, else the checkpoint's."""
    ids = model.eos_token_ids if eos_token_ids is None else eos_token_ids
    ids = list(ids) if isinstance(ids, Iterable) else [None]
    if not all(is_whole(i, 0) for i in ids):
        raise InputError(f"eos_token_ids must be a list of token ids, not {eos_token_ids!r}")
    return set(ids)


def answer_limit(model: Model, prompt_length: int, max_new_tokens: int | None) -> int:
    """How many tokens may follow: what was asked for, else the checkpoint's limit; no more than the context holds."""
    wanted = model.max_new_tokens if max_new_tokens is None else checked_whole("max_new_tokens", max_new_tokens, 1)
    room = model.config.context_length - prompt_length
    if room < 1:
        raise InputError(f"the prompt has {prompt_length} tokens and leaves no room for an answer: "
                         f"the model's context is {model.config.context_length}")
    return room if wanted is None else min(wanted, room)


def reuse(cache: KVCache, prompt: np.ndarray, config: Config) -> np.ndarray:
    """Cuts the cache back to what it has in common with the prompt [n] -> the tokens that remain to be computed.

    At least the last one remains, because its logits say how to go on.
    """
    if cache.config != config or cache.k.shape[1] != 1 or cache.left_padding is not None:
        raise InputError("the cache given belongs to another model, or to a batch")
    cache.truncate(min(cache.common_prefix(prompt), len(prompt) - 1))
    return prompt[cache.length:]


def inside_thought(model: Model, prompt: np.ndarray) -> bool:
    """True if the prompt [n] ends within <think>, so that the answer begins with the rest of a thought."""
    return model.tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")


THOUGHT_CLOSING = "\n</think>\n\n"  # what a thought that has used up its budget ends with


def thought_limiter(model: Model, prompt: np.ndarray, budget: int | None) -> Callable[[int | None], list[int]]:
    """A function that is told each token drawn (first None) and says with which tokens to go on, or nothing: [].

    It lets `budget` tokens of thought pass between <think> and </think>, then closes the thought.
    """
    opening, closing = model.tokenizer.token_to_id("<think>"), model.tokenizer.token_to_id("</think>")
    if checked_whole("think_budget", budget, 0) is not None and (opening is None or closing is None):
        raise InputError("think_budget needs a model whose tokenizer has the tokens <think> and </think>")
    ending = [] if budget is None else model.tokenizer.encode(THOUGHT_CLOSING)
    inside, spent = inside_thought(model, prompt), 0

    def forced(token: int | None) -> list[int]:
        nonlocal inside, spent
        if token in (opening, closing) and token is not None:
            inside = token == opening
        elif inside and token is not None:
            spent += 1
        if inside and budget is not None and spent >= budget:
            inside = False
            return ending
        return []

    return forced


class Lookup:
    """Guesses how a text goes on: as it went on the last time that its last few tokens were seen.

    A guess costs little to check, because one pass can compute several tokens for hardly more than one (where memory is
    the limit). Source: prompt lookup decoding (Saxena 2023). It measures whether it pays, and pauses when it doesn't.
    """
    SIZES, PAUSE = (3, 2), 32  # how many tokens must be the same; tokens to wait before it is tried again

    def __init__(self, token_ids: Sequence[int], n: int):
        self.n, self.text, self.wait = n, [], 0
        self.places: dict[tuple[int, ...], int] = {}  # tokens -> where the text went on after them, the latest time
        self.seconds = {True: 0.0, False: 0.0}  # per token, with guesses and without: running means
        for token in token_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Takes note of the text's next token."""
        for size in self.SIZES:
            if len(self.text) >= size:
                self.places[tuple(self.text[-size:])] = len(self.text)
        self.text.append(token)

    def guess(self, room: int) -> list[int]:
        """The next tokens, n or `room` at most; [] where nothing like it was there before, or while it pauses."""
        self.wait -= 1
        if self.wait >= 0 or not self.seconds[False]:  # the first token tells what one costs without guesses
            return []
        for size in self.SIZES:
            at = self.places.get(tuple(self.text[-size:]))
            if at is not None:
                return self.text[at:at + min(self.n, room)]
        return []

    def timed(self, guessed: bool, seconds: float, n_tokens: int) -> None:
        """Takes note of what a pass has cost, and pauses if guesses cost more than they bring."""
        old, new = self.seconds[guessed], seconds / n_tokens
        self.seconds[guessed] = 0.75 * old + 0.25 * new if old else new
        if guessed and self.seconds[True] > self.seconds[False]:
            self.wait, self.seconds[True] = self.PAUSE, 0.0


def generate(model: Model, token_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None,
             seed: int | None = None, eos_token_ids: Iterable[int] | None = None, cache: KVCache | None = None,
             think_budget: int | None = None, observe: Callable[[int, np.ndarray], None] | None = None,
             lookup: int | None = None, **sampling: float | None) -> Iterator[int]:
    """Continues the prompt `token_ids` [n], one token id at a time.

    Ends at an end-of-text token (which is not yielded), after max_new_tokens, or when the context is full;
    `eos_token_ids=()` never ends early. `sampling` takes the fields of Sampling: temperature, top_k, top_p, min_p,
    repetition_penalty, presence_penalty, frequency_penalty. What is None or missing is as the checkpoint's
    generation_config.json has it. The same seed gives the same tokens.

    A `cache` that an earlier call has filled is cut back to the longest common prefix with the prompt, and the rest of
    the prompt is computed: a conversation costs only what is new. `think_budget` closes a thought after so many tokens.
    `observe(token, logits [vocab_size])` is called with each token drawn and the logits as the model computed them.
    `lookup` guesses up to so many tokens from what was there before and checks them in one pass. Each token is still
    drawn from its own logits, so the answer is the same; only passes are saved.
    Raises InputError, before anything is computed, for ids and values out of range.
    """
    prompt = checked_prompt(token_ids, model.config)
    limit = answer_limit(model, len(prompt), max_new_tokens)
    draw = sampler(model, prompt, model.sampling.updated(**sampling), checked_whole("seed", seed, 0))
    ends, forced = checked_ends(model, eos_token_ids), thought_limiter(model, prompt, think_budget)
    cache = model.engine.new_cache(model.config) if cache is None else cache
    remaining = reuse(cache, prompt, model.config)
    guesses = Lookup(prompt.tolist(), lookup) if checked_whole("lookup", lookup, 0) else None

    def tokens() -> Iterator[int]:
        new, queue, n = list(remaining), forced(None), 0
        while n < limit:
            if queue:
                if guesses is not None:
                    guesses.add(queue[0])
                yield queue[0]
                n, new, queue = n + 1, [*new, queue[0]], queue[1:]
                continue
            start = time.perf_counter()
            guess = guesses.guess(limit - n - 1) if guesses is not None and len(new) == 1 else []
            logits = model.engine.forward(model, new + guess, cache, all_logits=bool(guess))
            seconds, known, drawn = time.perf_counter() - start, cache.length - len(guess), []
            for row, guessed in zip(np.atleast_2d(logits), [*guess, None]):
                token = draw(row)
                if token in ends:
                    return
                if observe is not None:
                    observe(token, row)
                drawn.append(token)
                if guesses is not None:
                    guesses.add(token)
                yield token
                queue = forced(token)
                if token != guessed or queue:
                    break
            cache.truncate(known + len(drawn) - 1)  # what was guessed right is computed already
            if guesses is not None and len(new) == 1:
                guesses.timed(bool(guess), seconds, len(drawn))
            n, new = n + len(drawn), drawn[-1:]

    return tokens()


def stream_text(tokenizer: Tokenizer, token_ids: Iterable[int]) -> Iterator[str]:
    """The text of a stream of token ids, each piece as soon as its characters are complete."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True)
    for token in token_ids:
        if piece := decoder.push(token):
            yield piece
    if rest := decoder.flush():
        yield rest


def generate_batch(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int | None = None,
                   seed: int | None = None, eos_token_ids: Iterable[int] | None = None,
                   **sampling: float | None) -> list[list[int]]:
    """Continues several prompts together, so that each weight is read once for all of them -> the new ids of each.

    Takes what `generate` takes, and gives the same answers up to rounding: the i-th prompt draws with seed + i.
    Shorter prompts are padded on the left, so that all end in the same column.
    """
    prompts = [checked_prompt(prompt, model.config) for prompt in prompts]
    limits = [answer_limit(model, len(prompt), max_new_tokens) for prompt in prompts]
    settings, ends = model.sampling.updated(**sampling), checked_ends(model, eos_token_ids)
    checked_whole("seed", seed, 0)
    draws = [sampler(model, prompt, settings, None if seed is None else seed + i) for i, prompt in enumerate(prompts)]
    if not prompts:
        return []
    longest = max(map(len, prompts))
    left_padding = [longest - len(prompt) for prompt in prompts]
    cache = model.engine.new_cache(model.config, longest + max(limits), left_padding)
    new = np.stack([np.pad(prompt, (columns, 0)) for prompt, columns in zip(prompts, left_padding)])  # [batch, longest]
    answers: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))  # which answer each row of the batch belongs to
    while running:
        logits = model.engine.forward(model, new, cache)  # [batch, vocab_size]
        going_on = []
        for row, i in enumerate(running):
            token = draws[i](logits[row])
            if token not in ends:
                answers[i].append(token)
                if len(answers[i]) < limits[i]:
                    going_on.append(row)
        if len(going_on) < len(running):  # finished rows are no more work
            cache.keep(going_on)
            running = [running[row] for row in going_on]
        new = np.array([[answers[i][-1]] for i in running])  # [batch, 1]
    return answers


class TokenLogprob(NamedTuple):
    """How likely the model found a token, as a natural logarithm, and what it found most likely in its place."""
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # token ids and their logprobs, the most likely first


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logits [..., vocab_size] -> natural logarithms of the probabilities, the same shape."""
    x = logits - logits.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


class Completion(Iterator[str]):
    """An answer while it is generated: iterate over it for its text, piece by piece, or call `finish` for all of it.

    `prompt_ids` [n]; how far the answer has come: `token_ids`, `text`, `logprobs` (if asked for), `times`, the start
    and the arrival of each token in seconds; `cached_tokens`, what the cache spared of the prompt; `finish_reason`:
    None while it goes on, then "stop" (it ended by itself or at a stop text) or "length" (it was cut off).
    """

    def __init__(self, model: Model, token_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None,
                 stop: str | Sequence[str] = (), logprobs: int | None = None, cache: KVCache | None = None,
                 **options: Any):
        """Takes what `generate` takes, and

        stop: texts that end the answer and are no part of it; they may span tokens
        logprobs: record the probability of each token and so many alternatives, before temperature and penalties
        """
        self.model, self.prompt_ids = model, checked_prompt(token_ids, model.config)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self._n_top = checked_whole("logprobs", logprobs, 0)
        self._limit = answer_limit(model, len(self.prompt_ids), max_new_tokens)
        self._texts: list[str] = []
        cache = model.engine.new_cache(model.config) if cache is None else cache
        observe = None if logprobs is None else self._record
        tokens = generate(model, self.prompt_ids, max_new_tokens, cache=cache, observe=observe, **options)
        self.cached_tokens = cache.length
        self.times = [time.perf_counter()]
        self._pieces = until_stop(stream_text(model.tokenizer, self._counted(tokens)), checked_stop(stop))

    def _record(self, token: int, logits: np.ndarray) -> None:
        x = log_softmax(logits)
        best = top_k_indices(x, min(self._n_top, len(x))) if self._n_top else np.empty(0, int)
        best = best[np.argsort(-x[best], kind="stable")][:self._n_top]
        self.logprobs.append(TokenLogprob(token, float(x[token]), [(int(i), float(x[i])) for i in best]))

    def _counted(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            self.token_ids.append(token)
            self.times.append(time.perf_counter())
            yield token
        self.finish_reason = "length" if len(self.token_ids) == self._limit else "stop"

    def __next__(self) -> str:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.finish_reason = self.finish_reason or "stop"  # at a stop text, with more to come
            raise
        self._texts.append(piece)
        return piece

    def finish(self) -> "Completion":
        """Generates the rest -> itself."""
        for _ in self:
            pass
        return self

    @property
    def text(self) -> str:
        """What has been generated so far, thoughts and tool calls included."""
        return "".join(self._texts)

    @property
    def think_open_in_prompt(self) -> bool:
        """True if the prompt ends within a thought, which the text then goes on with."""
        return inside_thought(self.model, self.prompt_ids)

    @property
    def answer(self) -> Answer:
        """The text so far, taken apart into reasoning, content and tool_calls."""
        return parse_answer(self.text, self.think_open_in_prompt)


def checked_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop texts as a tuple. Raises InputError for an empty one, which would end every answer at once."""
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise InputError(f"a stop text must be a text of at least one character, not {stop!r}")
    return stop


# What Qwen's authors recommend for answers without thinking; generation_config.json holds the values for thinking.
WITHOUT_THINKING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}


def default_sampling(model: Model, enable_thinking: bool | None) -> Sampling:
    """How an answer is drawn if nothing else is said.

    With enable_thinking=False, a model whose authors sample gets their values for answers without thinking.
    """
    unthinking = enable_thinking is False and model.sampling.temperature > 0
    return model.sampling.updated(**WITHOUT_THINKING) if unthinking else model.sampling


def chat(model: Model, messages: str | Sequence[dict], tools: Sequence[dict] | None = None,
         enable_thinking: bool | None = None, **options: Any) -> Completion:
    """The answer to a conversation, or to a single question given as a text.

    messages: {"role": "system" | "user" | "assistant" | "tool", "content": ...} objects as OpenAI has them; `tools`
    are JSON schemas. enable_thinking: None leaves it to the template. `options` are those of Completion and generate;
    what isn't given of Sampling is as `default_sampling` has it.
    Raises InputError, before anything is computed, for what can't be rendered or is out of range.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    text = model.tokenizer.apply_chat_template(messages, tools, enable_thinking=enable_thinking, join_text_parts=True)
    given = {name: value for name, value in options.items() if value is not None}
    sampling = asdict(default_sampling(model, enable_thinking))
    return Completion(model, model.tokenizer.encode(text), **(sampling | given))


SCORED = 128  # positions whose logits are in memory at a time: 78 MB with a vocabulary of 151,936


def score(model: Model, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The logprob of each token of a text [n] but the first, given those before it -> [n - 1], natural logarithms.

    Perplexity is exp of minus their mean. Raises InputError for ids out of range and for more than the context holds.
    """
    ids = checked_prompt(token_ids, model.config)
    if len(ids) > model.config.context_length:
        raise InputError(f"the text has {len(ids)} tokens; the model's context is {model.config.context_length}")
    cache, logprobs = model.engine.new_cache(model.config, len(ids)), [np.empty(0, np.float32)]
    for start in range(0, len(ids) - 1, SCORED):
        now, following = ids[start:start + SCORED], ids[start + 1:start + SCORED + 1]
        logits = model.engine.forward(model, now, cache, all_logits=True)  # [SCORED, vocab_size]
        check_finite(model, logits)
        x = log_softmax(logits)
        logprobs.append(x[np.arange(len(following)), following])
    return np.concatenate(logprobs)


BUNDLED = Path(__file__).resolve().parent / "demo"  # the small model that comes with this file

if __name__ == "__main__":
    from qwen3_cli import main
    sys.exit(main())
