"""Mixtures of experts: their sizes in config.json, and their experts in files."""
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3 import Config, Tensor, checked_whole, config_of
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.tensors import AnyTensor


def moe_config(found: dict[str, Any], file: Path, names: Iterable[str], normalized: bool = False) -> Config:
    """The config of a mixture of experts. Raises InputError for sizes that can't be.

    normalized: the weights of the chosen experts have a sum of 1, whatever config.json says.
    """
    if "head_dim" not in found:
        heads = checked_whole(f"{file}: num_attention_heads", found["num_attention_heads"], 1)
        found = found | {"head_dim": checked_whole(f"{file}: hidden_size", found["hidden_size"], 1) // heads}
    config, found = config_of(found, file), {"num_experts": found["num_local_experts"]} | found
    sizes: dict[str, Any] = {key: checked_whole(f"{file}: {key}", found[key], 1)
                             for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    if not sizes["num_experts_per_tok"] <= sizes["num_experts"] <= 10_000:
        raise InputError(f"{file}: num_experts_per_tok = {sizes['num_experts_per_tok']} of num_experts = "
                         f"{sizes['num_experts']} can't be")
    return replace(config, **sizes, sparse_layers=sparse_layers(found, file, config.num_hidden_layers),
                   norm_topk_prob=normalized or bool(found.get("norm_topk_prob")))


def sparse_layers(found: dict[str, Any], file: Path, n_layers: int) -> tuple[int, ...]:
    """The layers that have experts. Raises InputError for keys that can't be."""
    step, dense = found.get("decoder_sparse_step", 1), found.get("mlp_only_layers") or []
    step = checked_whole(f"{file}: decoder_sparse_step", step, 1)
    if not isinstance(dense, list):
        raise InputError(f"{file}: mlp_only_layers = {brief(dense)} can't be")
    return tuple(i for i in range(n_layers) if (i + 1) % step == 0 and i not in dense)


def split_experts(stored: Mapping[str, AnyTensor], hidden_size: Any = None) -> dict[str, AnyTensor]:
    """Replaces the fused expert tensors of transformers 5 by views of them, one per expert and projection.

    mlp.experts.gate_up_proj [num_experts, 2 * moe_intermediate_size, hidden_size], mlp.experts.down_proj
    [num_experts, hidden_size, moe_intermediate_size]. Qwen3-VL has them transposed, which the hidden_size tells.
    """
    tensors = dict(stored)
    for name, tensor in stored.items():
        start, _, part = name.rpartition(".")
        if start.endswith(".mlp.experts") and isinstance(tensor, Tensor) and len(tensor.shape) == 3:
            del tensors[name]
            turned = hidden_size is not None and tensor.shape[2 if part == "gate_up_proj" else 1] != hidden_size
            for expert, data in enumerate(tensor.data.swapaxes(1, 2) if turned else tensor.data):
                half = len(data) // 2
                rows = {"gate_proj": data[:half], "up_proj": data[half:]} if part == "gate_up_proj" else {part: data}
                tensors |= {f"{start}.{expert}.{key}.weight": tensor._replace(data=view) for key, view in rows.items()}
    return tensors
