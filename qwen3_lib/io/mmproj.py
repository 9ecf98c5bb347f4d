"""mmproj-*.gguf: the file beside a GGUF model in which llama.cpp keeps its tower for pictures or sounds.

    tower_file(file)        the tower's file of a model's file, or None
    tower_json(file)        what config.json would say of the tower
    map_tower(file)         name -> tensor, under the names of a safetensors checkpoint
"""
import re
from pathlib import Path
from typing import Any

import numpy as np

from qwen3 import Tensor, to_float32
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.gguf_file import SEEING, tensor_of
from qwen3_lib.io.gguf_head import GGUF, plain, read_gguf
from qwen3_lib.io.tensors import AnyTensor

VISION, AUDIO = "clip.vision.", "clip.audio."
PROJECTORS = {VISION: "qwen3vl_merger", AUDIO: "qwen3a"}
# key of vision_config or audio_config -> key of the metadata
TOWER_SIZES = {VISION: {"depth": "block_count", "num_heads": "attention.head_count", "patch_size": "patch_size",
                        "spatial_merge_size": "spatial_merge_size"},
               AUDIO: {"encoder_layers": "block_count", "encoder_attention_heads": "attention.head_count",
                       "num_mel_bins": "num_mel_bins"}}
# GGUF's name -> ours; v.blk.7.NAME.weight -> blocks.7.NAME.weight
MMPROJ_NAMES = {"v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1",
         "mm.2": "merger.linear_fc2"}
BLOCK_NAMES = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
               "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
DEEP_NAMES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
AUDIO_NAMES = {"a.conv2d.1": "conv2d1", "a.conv2d.2": "conv2d2", "a.conv2d.3": "conv2d3", "a.conv_out": "conv_out",
               "a.post_ln": "ln_post", "mm.a.mlp.1": "proj1", "mm.a.mlp.2": "proj2"}
AUDIO_BLOCK_NAMES = {"ln1": "self_attn_layer_norm", "ln2": "final_layer_norm", "attn_out": "self_attn.out_proj",
                     "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                     "ffn_up": "fc1", "ffn_down": "fc2"}


def tower_file(file: Path) -> Path | None:
    """The first mmproj*.gguf beside a model's file whose tower is a Qwen's and fits the model's width.

    In the hub's cache, it may also lie in the folder around that of a model in parts.
    """
    model = read_gguf(file)
    kind = model.metadata.get("general.architecture")
    if kind not in SEEING:
        return None
    in_cache = [folder.name for folder in file.parents[2:3]] == ["snapshots"]
    for other in sorted(path for folder in file.parents[:1 + in_cache] for path in folder.glob("*mmproj*.gguf")):
        about = read_gguf(other).metadata
        if about.get(f"{medium_of(other)}projection_dim") == model.metadata.get(f"{kind}.embedding_length"):
            return other
    return None


def medium_of(file: Path) -> str | None:
    """VISION or AUDIO, for which a Qwen's tower is in the file; None for others."""
    about = read_gguf(file).metadata
    return next((medium for medium, projector in PROJECTORS.items()
                 if about.get(f"{medium}projector_type", about.get("clip.projector_type")) == projector), None)


def deepstack(gguf: GGUF) -> list[int]:
    """The blocks after which something is kept for deepstack."""
    return np.flatnonzero(plain(gguf.metadata.get(f"{VISION}is_deepstack_layers", []))).tolist()


def tower_json(file: Path) -> dict[str, Any]:
    gguf, medium = read_gguf(file), medium_of(file)
    sizes = {key: plain(gguf.metadata.get(f"{medium}{name}")) for key, name in TOWER_SIZES[medium or VISION].items()}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    if medium == AUDIO:  # its language model has the architecture of a Qwen3-VL
        return {"model_type": "qwen3_asr", "audio_config": sizes}
    return {"vision_config": sizes | {"deepstack_visual_indexes": deepstack(gguf)}}


def map_tower(file: Path) -> dict[str, AnyTensor]:
    """The two frames of the patches' embedding become one tensor again. Raises InputError for a damaged file."""
    gguf, found = read_gguf(file), dict[str, AnyTensor]()
    tensors = {name: tensor_of(entry) for name, entry in gguf.tensors.items()}
    if medium_of(file) == AUDIO:
        tensors.pop("a.position_embd.weight", None)  # computed here
        for name, tensor in tensors.items():
            if name.endswith(".bias"):  # that of a convolution is [outputs, 1, 1]
                tensor = Tensor("F32", to_float32(tensor).reshape(-1), tensor.mapping)  # type: ignore[arg-type]
            found[f"thinker.audio_tower.{our_tower_name(gguf, name)}"] = tensor
        return found
    first, second = (tensors.pop(f"v.patch_embd.weight{end}", None) for end in ("", ".1"))
    if first is None or second is None or first.shape != second.shape:
        raise InputError(f"{file}: v.patch_embd.weight or v.patch_embd.weight.1 is missing")
    frames = np.stack([to_float32(first), to_float32(second)], axis=2)  # type: ignore[arg-type]
    found["patch_embed.proj.weight"] = Tensor("F32", frames, first.mapping)
    for name, tensor in tensors.items():
        found[our_tower_name(gguf, name)] = tensor
    return {f"model.visual.{name}": tensor for name, tensor in found.items()}


def our_tower_name(gguf: GGUF, name: str) -> str:
    stem, _, part = name.rpartition(".")
    if name == "v.position_embd.weight":
        return "pos_embed.weight"
    if stem in (names := MMPROJ_NAMES | AUDIO_NAMES):
        return f"{names[stem]}.{part}"
    if (match := re.fullmatch(r"a\.blk\.(\d+)\.(\w+)", stem)) is not None and match[2] in AUDIO_BLOCK_NAMES:
        return f"layers.{int(match[1])}.{AUDIO_BLOCK_NAMES[match[2]]}.{part}"
    if (match := re.fullmatch(r"v\.(blk|deepstack)\.(\d+)\.(\w+)", stem)) is not None:
        kind, number, key = match[1], int(match[2]), match[3]
        if kind == "blk" and key in BLOCK_NAMES:
            return f"blocks.{number}.{BLOCK_NAMES[key]}.{part}"
        if key in DEEP_NAMES and number in (deep := deepstack(gguf)):
            return f"deepstack_merger_list.{deep.index(number)}.{DEEP_NAMES[key]}.{part}"
    raise InputError(f"{gguf.file}: no Qwen has the tensor {brief(name)}")
