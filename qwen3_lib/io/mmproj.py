"""mmproj-*.gguf: the file beside a GGUF model in which llama.cpp keeps its vision tower.

    tower_file(file)        the tower's file of a model's file, or None
    vision_json(file)       what vision_config in config.json would say
    map_tower(file)         name -> tensor, under the names of a safetensors checkpoint
"""
import re
from pathlib import Path
from typing import Any

import numpy as np

from qwen3 import Tensor, to_float32
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.gguf_file import GGUF, SEEING, plain, read_gguf, tensor_of
from qwen3_lib.io.tensors import AnyTensor

VISION = "clip.vision."
# key of vision_config -> key of the metadata
TOWER_SIZES = {"depth": "block_count", "num_heads": "attention.head_count", "patch_size": "patch_size",
         "spatial_merge_size": "spatial_merge_size"}
# GGUF's name -> ours; v.blk.7.NAME.weight -> blocks.7.NAME.weight
MMPROJ_NAMES = {"v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1",
         "mm.2": "merger.linear_fc2"}
BLOCK_NAMES = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
               "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
DEEP_NAMES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


def tower_file(file: Path) -> Path | None:
    """The first mmproj*.gguf beside a model's file whose tower is a Qwen's and fits the model's width."""
    model = read_gguf(file)
    kind = model.metadata.get("general.architecture")
    if kind not in SEEING:
        return None
    for other in sorted(file.parent.glob("*mmproj*.gguf")):
        about = read_gguf(other).metadata
        if about.get(f"{VISION}projector_type", about.get("clip.projector_type")) == "qwen3vl_merger" \
                and about.get(f"{VISION}projection_dim") == model.metadata.get(f"{kind}.embedding_length"):
            return other
    return None


def deepstack(gguf: GGUF) -> list[int]:
    """The blocks after which something is kept for deepstack."""
    return np.flatnonzero(plain(gguf.metadata.get(f"{VISION}is_deepstack_layers", []))).tolist()


def vision_json(file: Path) -> dict[str, Any]:
    gguf = read_gguf(file)
    sizes = {key: plain(gguf.metadata.get(f"{VISION}{name}")) for key, name in TOWER_SIZES.items()}
    return {key: value for key, value in sizes.items() if value is not None} | {
        "deepstack_visual_indexes": deepstack(gguf)}


def map_tower(file: Path) -> dict[str, AnyTensor]:
    """The two frames of the patches' embedding become one tensor again. Raises InputError for a damaged file."""
    gguf, found = read_gguf(file), dict[str, AnyTensor]()
    tensors = {name: tensor_of(entry, gguf.mapping) for name, entry in gguf.tensors.items()}
    first, second = (tensors.pop(f"v.patch_embd.weight{end}", None) for end in ("", ".1"))
    if first is None or second is None or first.shape != second.shape:
        raise InputError(f"{file}: v.patch_embd.weight or v.patch_embd.weight.1 is missing")
    frames = np.stack([to_float32(first), to_float32(second)], axis=2)  # type: ignore[arg-type]
    found["patch_embed.proj.weight"] = Tensor("F32", frames, gguf.mapping)
    for name, tensor in tensors.items():
        found[our_tower_name(gguf, name)] = tensor
    return {f"model.visual.{name}": tensor for name, tensor in found.items()}


def our_tower_name(gguf: GGUF, name: str) -> str:
    stem, _, part = name.rpartition(".")
    if name == "v.position_embd.weight":
        return "pos_embed.weight"
    if stem in MMPROJ_NAMES:
        return f"{MMPROJ_NAMES[stem]}.{part}"
    if (match := re.fullmatch(r"v\.(blk|deepstack)\.(\d+)\.(\w+)", stem)) is not None:
        kind, number, key = match[1], int(match[2]), match[3]
        if kind == "blk" and key in BLOCK_NAMES:
            return f"blocks.{number}.{BLOCK_NAMES[key]}.{part}"
        if key in DEEP_NAMES and number in (deep := deepstack(gguf)):
            return f"deepstack_merger_list.{deep.index(number)}.{DEEP_NAMES[key]}.{part}"
    raise InputError(f"{gguf.file}: no Qwen has the tensor {brief(name)}")
