"""Folders of MLX, Apple's framework: their tensors under the names and with the axes of Qwen's own files.

Of an unquantized or a quantized model; formats.py unpacks the numbers. Source: the sanitize methods of mlx-lm, mlx-vlm
and mlx-audio, which a converter has run.
"""
from collections.abc import Mapping
from typing import Any

import numpy as np

from qwen3 import Tensor, to_float32

STARTS = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
          "language_model.mtp.": "mtp.", "vision_tower.": "model.visual.", "audio_tower.": "thinker.audio_tower."}
STACKED, CONVOLUTIONS, MTP_NORM = ".switch_mlp.", (".linear_attn.conv1d.weight", ".ple.conv1d.weight"), \
    "mtp.pre_fc_norm_embedding.weight"


def qwens_name(name: str) -> str:
    """The name of a tensor or a module in Qwen's own files."""
    name = name.replace(".ngram_embedding.shards.", ".ngram_embedding.shard_")
    return next((ours + name.removeprefix(start) for start, ours in STARTS.items() if name.startswith(start)), name)


def from_mlx(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors; those of another folder stay as they are."""
    tensors, hears = dict[str, Tensor](), any(name.startswith("audio_tower.") for name in stored)
    for name, tensor in stored.items():
        # A head beside a tower that hears is the classes of a forced aligner; others have none.
        name = f"thinker.{name}" if hears and name.startswith("lm_head.") else qwens_name(name)
        if STACKED in name and tensor.shape:  # of a layer [num_experts, ...], here one by one
            start, _, part = name.partition(STACKED)
            tensors |= {f"{start}.experts.{i}.{part}": tensor._replace(data=data) for i, data in enumerate(tensor.data)}
        else:
            tensors[name] = tensor._replace(data=channels_first(name, tensor.data))
    if not any(".attn_hyper_connection." in name for name in tensors) and any(
            name.endswith(CONVOLUTIONS) and tensor.shape != tensors[qwens_name(name)].shape
            for name, tensor in stored.items()):
        # The converter that turned the convolution has also added 1 to norms, but of Qwen3.8-Flash-Next; an MTP head
        # may come from elsewhere. Of Qwen's heads, this norm has a mean of -0.44, and of 0.56 with the 1.
        head = to_float32(tensors[MTP_NORM]).mean() > 0.25 if MTP_NORM in tensors else False
        for name, tensor in tensors.items():
            added = head if name.startswith("mtp.") else not name.startswith("model.visual.")
            if added and "norm" in name.removesuffix(".weight").rpartition(".")[2] and ".linear_attn." not in name:
                tensors[name] = Tensor("F32", to_float32(tensor) - np.float32(1), tensor.mapping)
    return tensors


def channels_first(name: str, data: Any) -> Any:
    """A convolution's weight [outputs, kernel..., inputs] as [outputs, inputs, kernel...]; it may be so already."""
    if name.endswith(CONVOLUTIONS) and data.ndim == 3 and data.shape[2] == 1 != data.shape[1]:
        return np.moveaxis(data, -1, 1)
    if name.endswith((".patch_embed.proj.weight", ".conv2d1.weight", ".conv2d2.weight", ".conv2d3.weight")) \
            and data.ndim > 3 and data.shape[-3] == data.shape[-2] != data.shape[-1]:  # kernels are squares
        return np.moveaxis(data, -1, 1)
    return data
