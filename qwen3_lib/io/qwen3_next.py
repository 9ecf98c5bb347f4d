"""Qwen3-Next and Qwen3-Coder-Next: a Qwen3.5 mixture whose files hold the projections of a delta net as two matrices.

in_proj_qkvz [key heads * rows of a head, hidden_size] has for each key head its q, its k, the v of its value heads, and
their z; in_proj_ba likewise b and a. Cut by rows, they are the matrices of a Qwen3.5.
Source: transformers, fix_query_key_value_ordering of modeling_qwen3_next.py.
"""
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwen3 import checked_whole
from qwen3_5 import SPARSE, HybridConfig, hybrid_config
from qwen3_lib.io.errors import InputError
from qwen3_lib.io.mixtures import sparse_layers
from qwen3_lib.io.tensors import AnyTensor, taken


def next_config(found: dict[str, Any], file: Path, names: Iterable[str]) -> HybridConfig:
    """The config of a Qwen3-Next, whose layers may be dense. Raises InputError, as hybrid_config does."""
    config = hybrid_config(found, file, names, sparse=True)
    n, dense = config.num_hidden_layers, checked_whole(f"{file}: intermediate_size", found["intermediate_size"], 1)
    sparse = {*sparse_layers(found, file, n), n}  # n: an MTP head's layer
    return replace(config, sparse_layers=tuple(i for i in config.sparse_layers if i in sparse),
                   intermediate_size=dense, norm_topk_prob=bool(found["norm_topk_prob"]))


def cut_projections(tensors: dict[str, AnyTensor], config: HybridConfig, path: Path) -> dict[str, AnyTensor]:
    """The tensors under Qwen3.5's names. Raises InputError for a matrix of other sizes."""
    heads, values = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, values * config.linear_value_head_dim
    parts = {"in_proj_qkvz": {"in_proj_qkv": [key, key, value], "in_proj_z": [value]},  # the rows of a key head
             "in_proj_ba": {"in_proj_b": [values], "in_proj_a": [values]}}
    out: dict[str, AnyTensor] = {}
    for name, tensor in tensors.items():
        start, _, module = name.removesuffix(".weight").rpartition(".")
        sizes = [size for each in parts.get(module, {}).values() for size in each]
        if not sizes:
            out[name] = tensor
            continue
        if tensor.shape != (shape := (heads * sum(sizes), config.hidden_size)):
            raise InputError(f"{path}: {name} has shape {list(tensor.shape)}, not {list(shape)}")
        rows = iter(np.split(np.arange(shape[0]).reshape(heads, -1), np.cumsum(sizes)[:-1], axis=1))
        for ours, each in parts[module].items():
            places = np.concatenate([next(rows).reshape(-1) for _ in each])
            out[f"{start}.{ours}.weight"] = taken(tensor, places)
    return out


NEXT = replace(SPARSE, config=next_config, cut=cut_projections, architectures=("Qwen3NextForCausalLM",),
               defaults=SPARSE.defaults | {
    "vocab_size": 151936, "intermediate_size": 5632, "num_hidden_layers": 48, "num_experts": 512,
    "num_experts_per_tok": 10, "norm_topk_prob": True,
    "mtp_num_hidden_layers": 1},  # the key is absent: the tensors tell whether there is an MTP head
               tower=(), media="", seeing={})
