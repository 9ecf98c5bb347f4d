"""GGUF, llama.cpp's format: a model's weights, sizes, tokenizer and chat template in one file, or in several parts.

    gguf_json(file, name)   what config.json, tokenizer.json, ... of the same model would say
    map_gguf(file)          name -> tensor, under the names of a safetensors checkpoint
    is_embedder(file)       whether it is an embedding model

gguf_head.py reads a file's metadata and the table of its tensors.
"""
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from qwen3 import DTYPES, Tensor, to_float32
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.gguf_head import GGUF, TensorEntry, plain, read_gguf
from qwen3_lib.io.tensors import AnyTensor, Blocks, PackedTensor, below, taken
from qwen4_exp import FLASH, head_sizes, multipliers
from tokenizer_utils import END_TOKENS, SPLIT_PATTERNS

NORMAL_TOKEN, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens; others are unused


# ---- Tensors ---------------------------------------------------------------------------------------------------------

# GGUF's name -> ours; in a layer, blk.7.NAME.weight -> model.layers.7.NAME.weight
GGUF_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
         "output.weight": "lm_head.weight"}
LAYER_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
               "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
               "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
               "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
               "ffn_gate_inp": "mlp.gate"}
EXPERT_NAMES = {"ffn_gate_exps": ("gate_proj",), "ffn_up_exps": ("up_proj",), "ffn_down_exps": ("down_proj",),
                "ffn_gate_up_exps": ("gate_proj", "up_proj")}  # the first half of its rows is the gate
# Of Qwen3.5 and Qwen3-Next; ssm_a has no part.
HYBRID_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    # Of Qwen3-Next, two matrices joined; early files have the names ssm_beta_alpha and ssm_in.
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta_alpha": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz", "attn_post_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
    # Of the MTP head, in the block after the layers.
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm"}
# Of Qwen3.8-Flash-Next. The names of the MTP head's mixer differ between converters.
STREAM_PARTS = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up",
                "inject": "block_inject_weight"}
STREAM_NAMES = HYBRID_NAMES | {
    f"hc_{theirs}_{part}": f"{ours}_hyper_connection.{name}" for part, name in STREAM_PARTS.items()
    for theirs, ours in (("attn", "attn"), ("ffn", "mlp"))} | {
    f"nextn.{start}_{part}": f"hyper_connection_mixer.{name}" for part, name in STREAM_PARTS.items()
    for start in ("hc", "hc_head")} | {
    f"ple_{name}": f"ple.{name}" for name in ("norm_key", "norm_query", "norm_conv", "conv1d")} | {
    "ple_key": "ple.key_proj", "ple_value": "ple.value_proj", "indexer.q_proj": "self_attn.indexer.q_proj",
    "indexer.k_proj": "self_attn.indexer.k_proj", "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm"}
GGUF_VECTORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}


def our_name(gguf: GGUF, name: str, layer: str, tail: str) -> str:
    """Our name of a tensor, or "": blk.7.attn_q.weight -> model.layers.7.self_attn.q_proj.weight."""
    hybrid, streams = is_hybrid(gguf), has_streams(gguf)
    names, (key, _, part) = STREAM_NAMES if streams else HYBRID_NAMES if hybrid else LAYER_NAMES, tail.rpartition(".")
    if streams and name == TABLE:
        return f"model.layers.{ngram_layer(gguf)}.ple.ple_embedding.ngram_embedding.shard_0.weight"
    if streams and name.startswith("output_hc_"):
        part = STREAM_PARTS.get(name.removeprefix("output_hc_").removesuffix(".weight"), "")
        return f"model.hyper_connection_mixer.{part}.weight" if part else ""
    if hybrid and tail in GGUF_VECTORS:
        return f"model.layers.{layer}.{GGUF_VECTORS[tail]}"
    known = layer and key in names and part == "weight"
    return f"model.layers.{layer}.{names[key]}.weight" if known else GGUF_NAMES.get(name, "")


def map_gguf(file: Path) -> dict[str, AnyTensor]:
    """The tensors of a GGUF file, under the names of a safetensors checkpoint with one tensor per expert.

    Packed matrices become PackedTensors. Of Qwen3.5, what llama.cpp's converter has changed is changed back; of several
    blocks that guess further tokens (nextn), the first is the MTP head. Raises InputError for a damaged file.
    """
    gguf = read_gguf(file)
    hybrid, tensors = is_hybrid(gguf), dict[str, AnyTensor]()
    n_layers, heads = (layer_count(gguf), value_heads(gguf)) if hybrid else (None, None)
    for name, entry in gguf.tensors.items():
        _, layer, tail = name.split(".", 2) if name.startswith("blk.") and name.count(".") > 1 else ("", "", "")
        if n_layers is not None and layer.isdecimal() and int(layer) >= n_layers + has_head(gguf):
            continue
        if (key := tail.partition(".")[0]) in EXPERT_NAMES and len(entry.shape) == 3:
            for expert, data in enumerate(entry.data):
                for part, rows in zip(EXPERT_NAMES[key], np.array_split(data, len(EXPERT_NAMES[key]))):
                    ours = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                    one = entry._replace(shape=(len(rows), entry.shape[2]), data=rows)
                    tensors[ours] = tensor_of(one)
        else:
            ours = our_name(gguf, name, layer, tail)
            if not ours:
                raise InputError(f"{file}: no Qwen3 has the tensor {brief(name)}")
            if ours in tensors:
                raise InputError(f"{file}: {brief(ours)} is there twice, also as {brief(name)}")
            pieces = halved(entry, ours, file) if has_streams(gguf) and ours.endswith(".fc.weight") else {ours: entry}
            for ours, piece in pieces.items():
                tensor = tensor_of(piece, name == TABLE)
                tensors[ours] = tensor if heads is None else changed_back(ours, tensor, heads)
    for name in [name for name in tensors if name.endswith(".indexer.q_proj.weight")]:
        if (keys := name.replace("q_proj", "k_proj")) in tensors:
            tensors[name.replace("q_proj", "index_qk_proj")] = below(tensors.pop(name), tensors.pop(keys))
    return tensors


def halved(entry: TensorEntry, name: str, file: Path) -> dict[str, TensorEntry]:
    """The two matrices of a Qwen3.8-Flash-Next's MTP head that stand side by side in the file."""
    (rows, columns), half = entry.shape, entry.data.shape[1] // 2
    if columns % (2 * entry.form.numbers):
        raise InputError(f"{file}: {name} has {columns} columns, which {entry.form.name} can't halve")
    parts = {"embedding": entry.data[:, :half], "hidden": entry.data[:, half:]}
    return {name.replace(".fc.", f".fc_{part}."): entry._replace(shape=(rows, columns // 2), data=data)
            for part, data in parts.items()}


def tensor_of(entry: TensorEntry, by_row: bool = False) -> AnyTensor:
    """A tensor of the file, mapped or packed. by_row: with PackedTensor.rows."""
    form, data = entry.form, entry.data
    if form.unpack is None:
        return Tensor(form.name, data.view(DTYPES[form.name]), entry.mapping)
    unpack, in_blocks = form.unpack, data.reshape(-1, data.shape[-1] // form.size, form.size)

    def rows(some: np.ndarray) -> Blocks:
        (numbers, scales, minima, factors), n = unpack(some), len(some)
        if scales is None:
            return Blocks(numbers)
        return Blocks(numbers.reshape(n, -1), scales.reshape(n, -1), None if minima is None else minima.reshape(n, -1),
                      None if factors is None else factors.reshape(len(factors), n, -1))

    return PackedTensor("F32", (len(in_blocks), entry.shape[-1]), lambda start, stop: rows(in_blocks[start:stop]),
                        entry.mapping, form.bits, group=form.numbers // form.groups if form.groups else 0,
                        factored=form.factored, stored=(Tensor("U8", in_blocks, entry.mapping),) if by_row else (),
                        rows=(lambda some: rows(in_blocks[some]).values()) if by_row else None)


# ---- Qwen3.5: what llama.cpp's converter has changed -----------------------------------------------------------------
# Source: conversion/qwen.py of llama.cpp. Norms are stored plus 1, A_log as -exp(A_log), the convolution without the
# dimension of 1. The heads of values, which in Qwen's files stand together if they share a key, are dealt out in turn:
# of 2 key heads and 6 value heads, 0 1 2 3 4 5 are stored as 0 3 1 4 2 5.

class ValueHeads(NamedTuple):
    """The `places` [heads] of the value heads in the file, their `size`, and the number of rows before them."""
    places: np.ndarray
    size: int
    start: int

    def rows(self, size: int, start: int = 0) -> np.ndarray:
        """The place in the file of each row (or column) of heads of this size after `start` other rows."""
        heads = self.places[:, None] * size + np.arange(size)
        return np.concatenate([np.arange(start), start + heads.reshape(-1)])


def value_heads(gguf: GGUF) -> ValueHeads:
    """Raises InputError for sizes that can't be."""
    keys = ("group_count", "time_step_rank", "inner_size", "state_size")
    kind = gguf.metadata["general.architecture"]
    sizes: list[Any] = [gguf.metadata.get(f"{kind}.ssm.{key}") for key in keys]
    if not all(isinstance(size, int) and 0 < size < 2**20 for size in sizes) or sizes[1] % sizes[0] \
            or sizes[2] % sizes[1] or sizes[0] * sizes[3] >= 2**20:
        raise InputError(f"{gguf.file}: no Qwen3.5 has these sizes: ssm {dict(zip(keys, map(brief, sizes)))}")
    n_keys, n_values, inner, key_size = sizes
    places = np.arange(n_values).reshape(-1, n_keys).T.reshape(-1) if kind in QWEN3_5 else np.arange(n_values)
    return ValueHeads(places, inner // n_values, 2 * n_keys * key_size)


def changed_back(name: str, tensor: Any, heads: ValueHeads) -> AnyTensor:
    """A tensor of Qwen3.5 as Qwen's own files have it, by its name there."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if "norm" in part and not name.endswith("linear_attn.norm.weight"):
        return Tensor("F32", to_float32(tensor) - np.float32(1), tensor.mapping)
    if part == "shared_expert_gate":
        return tensor._replace(data=tensor.data.reshape(1, -1)) if isinstance(tensor, Tensor) else tensor
    if part == "A_log":
        with np.errstate(invalid="ignore", divide="ignore"):  # a damaged file is noticed by its logits
            tensor = Tensor("F32", np.log(-to_float32(tensor)), tensor.mapping)
    order = {"in_proj_qkv": (heads.size, heads.start), "conv1d": (heads.size, heads.start), "in_proj_z": (heads.size,),
             "in_proj_a": (1,), "in_proj_b": (1,), "A_log": (1,), "dt_bias": (1,), "out_proj": (heads.size,)}.get(part)
    if order is not None and ".linear_attn." in name:
        tensor = reordered(tensor, heads.rows(*order), part == "out_proj")
    return tensor._replace(data=tensor.data[:, None]) if part == "conv1d" and isinstance(tensor, Tensor) else tensor


def reordered(tensor: AnyTensor, places: np.ndarray, columns: bool) -> AnyTensor:
    """The tensor with its rows, or its columns, taken from these places. `fitting` refuses a wrong size."""
    if len(places) != tensor.shape[-1 if columns else 0] or np.array_equal(places, np.arange(len(places))):
        return tensor
    if not columns:
        return taken(tensor, places)
    if isinstance(tensor, Tensor):
        return tensor._replace(data=tensor.data[:, places])
    blocks, size = tensor.blocks, tensor.group
    if not size or (places.reshape(-1, size) % size != np.arange(size)).any():  # some groups are torn apart
        return tensor._replace(blocks=lambda start, stop: Blocks(blocks(start, stop).values()[:, places]), group=0,
                               factored=False)
    groups = places[::size] // size

    def moved(start: int, stop: int) -> Blocks:
        numbers, scales, minima, _ = blocks(start, stop).multiplied()
        return Blocks(np.take(numbers, places, axis=1), scales[:, groups],
                      None if minima is None else minima[:, groups])

    return tensor._replace(blocks=moved, factored=False)


# ---- Metadata, as the files of a model's folder ----------------------------------------------------------------------

def gguf_json(file: Path, name: str) -> dict[str, Any]:
    """The JSON object that a model's folder would have in the file `name`; empty if it would have none.

    Its readers check its values. Raises InputError for a damaged GGUF file.
    """
    makers: dict[str, Callable[[GGUF], dict[str, Any]]] = {
        "config.json": config_json, "generation_config.json": generation_json, "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": tokenizer_config_json}
    return makers[name](read_gguf(file)) if name in makers else {}


POOLING = {"none": 0, "last": 3}  # llama.cpp's numbers; last: the last token's state; 4 is a reranker


def is_embedder(file: Path) -> bool:
    """True for an embedding model. Raises InputError for a damaged file."""
    metadata = read_gguf(file).metadata
    return bool(plain(metadata.get(f"{metadata.get('general.architecture')}.pooling_type")) == POOLING["last"])


# GGUF's name -> transformers', where they differ
GGUF_MODEL_TYPES = {"qwen3moe": "qwen3_moe", "qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5",
                    "qwen35moe": "qwen3_5_moe", "qwen3next": "qwen3_next", "qwen4exp": "qwen4_exp"}
QWEN3_5 = ("qwen35", "qwen35moe", "qwen4exp")
SEEING = ("qwen3vl", "qwen3vlmoe", *QWEN3_5)  # architectures that may have a tower: see mmproj.py

# key of config.json -> key of the metadata, without its prefix "qwen3." or "qwen3moe."
GGUF_SIZES = {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
         "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
         "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
         "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
         "rope_theta": "rope.freq_base"}
# The same for YaRN's keys, after "rope.scaling.".
YARN = {"factor": "factor", "original_max_position_embeddings": "original_context_length", "attn_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
MOE_SIZES = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
             "moe_intermediate_size": "expert_feed_forward_length"}
HYBRID_SIZES = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
                "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank"}
STREAM_SIZES = {"hc_count": "hyper_connection.count", "hc_lowrank": "hyper_connection.low_rank",
                "ngram_size": "ple.ngram_size", "heads_per_ngram": "ple.heads_per_ngram",
                "ple_conv_kernel_size": "ple.conv_kernel", "eos_token_id": "ple.eos_token_id",
                "indexer_n_heads": "attention.indexer.head_count", "indexer_head_dim": "attention.indexer.key_length",
                "indexer_budget": "attention.indexer.top_k", "ple_embed_dim": "embedding_length_per_layer_input"}
TABLE = "per_layer_token_embd.weight"  # of n-grams


def is_hybrid(gguf: GGUF) -> bool:
    """True for Qwen3-Next, Qwen3.5 and its successors."""
    return gguf.metadata.get("general.architecture") in ("qwen3next", *QWEN3_5)


def has_streams(gguf: GGUF) -> bool:
    """True for Qwen3.8-Flash-Next."""
    return bool(gguf.metadata.get("general.architecture") == "qwen4exp")


def whole_numbers(gguf: GGUF, key: str) -> list[int]:
    """An array in the metadata of a Qwen3.8-Flash-Next. Raises InputError for another value."""
    found = gguf.metadata.get(f"qwen4exp.{key}")
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or not 0 < len(found) < 2**10 \
            or key != "ple.layer_multipliers" and found.max() > 2**31:
        raise InputError(f"{gguf.file}: qwen4exp.{key} = {brief(found)} can't be")
    return found.tolist()  # type: ignore[no-any-return]


def ngram_layer(gguf: GGUF) -> int:
    """The layer with the n-gram table. Raises InputError for several, whose tables would be one tensor."""
    layer, *more = whole_numbers(gguf, "ple.layers")
    if more:
        raise InputError(f"{gguf.file}: qwen4exp.ple.layers = {[layer, *more]} is not supported, only one layer is")
    return layer


def streams_json(gguf: GGUF) -> dict[str, Any]:
    """What text_config says of streams, index and n-grams. Raises InputError for another hash than Qwen's."""
    found = {key: plain(gguf.metadata.get(f"qwen4exp.{name}")) for key, name in STREAM_SIZES.items()}
    factors, sizes = (whole_numbers(gguf, f"ple.{name}") for name in ("layer_multipliers", "head_vocab_sizes"))
    width, embedding = found.pop("ple_embed_dim"), gguf.tensors.get("token_embd.weight")
    found |= {"ple_layer_ids": [ngram_layer(gguf) + 1], "split_ngram_parts": 1, "ngram_vocab_size_base": sizes[0],
              "ple_embed_dim": width * len(sizes) if isinstance(width, int) else width, "output_gate_type": "sigmoid",
              "indexer_compress_ratio": max(whole_numbers(gguf, "attention.compress_ratios"))}
    hashed: Any = SimpleNamespace(ngram_size=len(factors), ngram_heads=len(sizes), seed=FLASH.defaults["seed"],
                                  ngram_vocab_size_base=sizes[0], vocab_size=embedding.shape[0] if embedding else 1)
    if factors != multipliers(hashed, 0) or sizes != head_sizes(hashed, 0):
        raise InputError(f"{gguf.file}: its n-grams are hashed by other numbers than Qwen's: layer_multipliers "
                         f"{brief(factors)}, head_vocab_sizes {brief(sizes)}")
    return found


def layer_count(gguf: GGUF) -> int:
    """The layers of a hybrid, without those that guess further tokens, which stand after them."""
    kind = gguf.metadata["general.architecture"]
    n, guessing = gguf.metadata.get(f"{kind}.block_count"), gguf.metadata.get(f"{kind}.nextn_predict_layers", 0)
    if not isinstance(n, int) or not isinstance(guessing, int) or not 0 <= guessing < n <= 2**14:
        raise InputError(f"{gguf.file}: {kind}.block_count = {brief(n)} with nextn_predict_layers = {brief(guessing)} "
                         "can't be")
    return n - guessing


def has_head(gguf: GGUF) -> bool:
    """Whether there is an MTP head that shares embedding and lm_head with the model."""
    names = {name.split(".", 2)[2] for name in gguf.tensors if name.startswith(f"blk.{layer_count(gguf)}.")}
    own = {"nextn.embed_tokens.weight", "nextn.shared_head_head.weight"}
    return "nextn.eh_proj.weight" in names and not names & own


def hybrid_json(gguf: GGUF, raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of a hybrid, of a Qwen3.5 with its text part apart; `raw`: what config_json has read so far."""
    kind, n, heads = gguf.metadata["general.architecture"], layer_count(gguf), value_heads(gguf)
    rope = {"rope_theta": raw.pop("rope_theta"), "rope_type": "default"} | (raw.pop("rope_scaling") or {})
    turned = gguf.metadata.get(f"{kind}.rope.dimension_count")
    if isinstance(turned, int) and isinstance(raw["head_dim"], int) and raw["head_dim"]:
        rope |= {"partial_rotary_factor": turned / raw["head_dim"]}
    text = raw | {key: plain(gguf.metadata.get(f"{kind}.{name}")) for key, name in HYBRID_SIZES.items()} | {
        "num_hidden_layers": n, "linear_value_head_dim": heads.size,
        "layer_types": ["linear_attention" if f"blk.{i}.ssm_a" in gguf.tensors else "full_attention" for i in range(n)],
        "rope_parameters": rope, "mtp_num_hidden_layers": int(has_head(gguf))}
    if kind not in QWEN3_5:
        return text
    text |= {"model_type": f"{raw['model_type']}_text"} | (streams_json(gguf) if has_streams(gguf) else {})
    return {"model_type": raw["model_type"], "tie_word_embeddings": raw["tie_word_embeddings"], "text_config": text} | {
        key: gguf.metadata[name] for key, name in (("image_token_id", f"{kind}.ple.image_token_id"),)
        if name in gguf.metadata}


def config_json(gguf: GGUF) -> dict[str, Any]:
    metadata, kind = gguf.metadata, gguf.metadata.get("general.architecture")
    head_dim = plain(metadata.get(f"{kind}.attention.key_length"))
    only: dict[str, Any] = {f"{kind}.pooling_type": (None, *POOLING.values()),
                            f"{kind}.attention.value_length": (head_dim,)}
    only |= {} if is_hybrid(gguf) else {f"{kind}.rope.dimension_count": (None, head_dim)}
    for key, values in only.items():
        if (value := plain(metadata.get(key))) not in values:
            raise InputError(f"{gguf.file}: {key} = {brief(value)} is not supported, only "
                             f"{' or '.join(str(each) for each in values if each is not None)} is")
    model_type, embedding = GGUF_MODEL_TYPES.get(str(kind), kind), gguf.tensors.get("token_embd.weight")
    sizes = GGUF_SIZES | (MOE_SIZES if str(model_type).endswith(("_moe", "_next", "_exp")) else {})
    raw = {key: plain(metadata.get(f"{kind}.{name}")) for key, name in sizes.items()}
    raw["rope_theta"] = raw["rope_theta"] or 10_000.0  # as in llama.cpp
    raw |= {"model_type": model_type, "vocab_size": embedding.shape[0] if embedding else None,
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "attention_bias": any(name.endswith(".bias") and ".ssm_dt." not in name for name in gguf.tensors),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id")}
    if model_type in ("qwen3_moe", "qwen3_vl_moe", "qwen3_next"):  # llama.cpp always scales the chosen experts' weights
        n_layers = raw["num_hidden_layers"]
        dense = [i for i in range(n_layers if isinstance(n_layers, int) and n_layers <= len(gguf.tensors) else 0)
                 if f"blk.{i}.ffn_gate_inp.weight" not in gguf.tensors]
        raw |= {"norm_topk_prob": True, "mlp_only_layers": dense}
    raw |= {"is_causal": bool(plain(metadata.get(f"{kind}.attention.causal", True))),
            "rope_scaling": rope_scaling(gguf, f"{kind}.rope.")}
    sections = plain(metadata.get(f"{kind}.rope.dimension_sections"))
    if kind in SEEING and isinstance(sections, list):
        raw["rope_scaling"] = (raw["rope_scaling"] or {"rope_type": "default"}) | {"mrope_section": sections[:3]}
    if is_hybrid(gguf):
        return hybrid_json(gguf, raw)
    return raw | {"text_config": raw} if kind in SEEING else raw


def rope_scaling(gguf: GGUF, start: str) -> dict[str, Any] | None:
    """The object rope_scaling of config.json. `start`: of the keys' names.

    A factor without a type means linear. llama.cpp reads yarn_attn_factor, yarn_ext_factor and yarn_log_multiplier for
    other architectures only, so they change nothing here.
    """
    about = {key.removeprefix(f"{start}scaling."): plain(value) for key, value in gguf.metadata.items()}
    kind, factor = about.get("type", "linear"), about.get("factor", about.get(f"{start}scale_linear"))
    if kind == "yarn":
        return {"factor": factor or 1} | {key: about[name] for key, name in YARN.items() if about.get(name)} | \
            {"rope_type": kind}
    if about.get("attn_factor", 1) != 1:
        raise InputError(f"{gguf.file}: {start}scaling.attn_factor = {brief(about['attn_factor'])} is not supported "
                         "without yarn")
    return None if kind == "none" or factor in (None, 0, 1) else {"rope_type": kind, "factor": factor}


# Qwen's own values for Qwen3, because only new files hold some.
SAMPLING = {"temperature": ("temp", 0.6), "top_k": ("top_k", 20), "top_p": ("top_p", 0.95)}


def generation_json(gguf: GGUF) -> dict[str, Any]:
    tokens, end = gguf.metadata.get("tokenizer.ggml.tokens"), gguf.metadata.get("tokenizer.ggml.eos_token_id")
    ends = [] if end is None else [end]
    if isinstance(tokens, list):
        ends += [tokens.index(text) for text in END_TOKENS if text in tokens]  # either, whichever the file names
    newer = gguf.metadata.get("general.architecture") in QWEN3_5
    defaults = SAMPLING | ({"temperature": ("temp", 1.0)} if newer else {})
    values = {key: plain(gguf.metadata.get(f"general.sampling.{name}", default))
              for key, (name, default) in defaults.items()}
    return {"do_sample": True, "eos_token_id": ends} | values


WITH_MARKS = SPLIT_PATTERNS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
PRE_TOKENIZERS = {"qwen2": SPLIT_PATTERNS, "deepseek-r1-qwen": SPLIT_PATTERNS, "qwen35": WITH_MARKS}  # by GGUF's names


def tokenizer_json(gguf: GGUF) -> dict[str, Any]:
    keys = ("model", "pre", "tokens", "token_type", "merges")
    about = {key: gguf.metadata.get(f"tokenizer.ggml.{key}") for key in keys}
    model, pre = plain(about["model"]), plain(about["pre"])
    if model != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise InputError(f"{gguf.file}: the tokenizer {brief(model)}, {brief(pre)} is not supported, only gpt2 with "
                         f"{' or '.join(PRE_TOKENIZERS)} is")
    tokens, kinds, merges = about["tokens"], about["token_type"], about["merges"]
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(kinds, np.ndarray) \
            or len(kinds) != len(tokens):
        raise InputError(f"{gguf.file}: tokenizer.ggml.tokens, token_type or merges are absent or don't fit each other")
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] == NORMAL_TOKEN}
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": bool(kinds[i] == CONTROL)}
             for i, token in enumerate(tokens) if kinds[i] in (CONTROL, USER_DEFINED)]
    cutting = [{"type": "Split", "pattern": {"Regex": PRE_TOKENIZERS[pre]}, "behavior": "Isolated", "invert": False},
               {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]
    end = gguf.metadata.get("tokenizer.ggml.eos_token_id")
    ending = None
    if plain(gguf.metadata.get("tokenizer.ggml.add_eos_token")) and isinstance(end, int) and 0 <= end < len(tokens):
        text = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": tokens[end], "type_id": 0}}]
        special = {tokens[end]: {"id": tokens[end], "ids": [end], "tokens": [tokens[end]]}}
        ending = {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": special}
    return {"version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"}, "post_processor": ending,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cutting},
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}


def tokenizer_config_json(gguf: GGUF) -> dict[str, Any]:
    metadata, config = gguf.metadata, dict[str, Any]()
    tokens = metadata.get("tokenizer.ggml.tokens")
    for name, key in (("eos_token", "eos"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    if (template := plain(metadata.get("tokenizer.chat_template"))) is not None:
        config["chat_template"] = template
    added = tokenizer_json(gguf)["added_tokens"]
    return config | {"added_tokens_decoder": {str(token["id"]): token for token in added}}
