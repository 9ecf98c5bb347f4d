"""Checkpoints as they are published: official configs at a reduced size, and packed weights."""
import importlib.util
import json
from pathlib import Path

import numpy as np
import safetensors

from configs import SHARED
from qwen3 import map_safetensors
from qwen3_lib.io.tensors import PACKED_DTYPES

DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8", "float8_e4m3fn": "u1",
          "uint8": "u1", "int8": "i1"}


def official_configs() -> list[Path]:
    return sorted((SHARED / "configs").glob("*.json"))


def reduced(raw: dict) -> dict:
    """An official config with the same proportions at a fraction of the size: 1/16 of the widths, 1/4 of the heads."""
    kv_heads = max(raw["num_key_value_heads"] // 4, 1)
    small = {"hidden_size": raw["hidden_size"] // 16, "intermediate_size": raw["intermediate_size"] // 16,
             "num_hidden_layers": max(raw["num_hidden_layers"] // 24, 2), "num_key_value_heads": kv_heads,
             "num_attention_heads": raw["num_attention_heads"] // raw["num_key_value_heads"] * kv_heads,
             "head_dim": raw["head_dim"] // 4, "vocab_size": raw["vocab_size"] // 128, "torch_dtype": "float32",
             "eos_token_id": None, "bos_token_id": 0, "max_window_layers": max(raw["num_hidden_layers"] // 24, 2)}
    if "num_experts" in raw:
        small |= {"num_experts": raw["num_experts"] // 8, "moe_intermediate_size": raw["moe_intermediate_size"] // 16}
    return raw | small


def write_tensors(file: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Writes name -> (dtype as safetensors calls it in Python, array) as a safetensors file."""
    arrays = {name: np.ascontiguousarray(data, DTYPES[dtype]) for name, (dtype, data) in tensors.items()}
    safetensors.serialize_file({name: safetensors.TensorSpec(dtype=tensors[name][0], shape=data.shape,
                                                             data_ptr=data.ctypes.data, data_len=data.nbytes)
                                for name, data in arrays.items()}, file, {"format": "pt"})


def tensors_of(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """What write_tensors has written."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
             "I32": "int32", "I64": "int64", "U8": "uint8", "I8": "int8"}
    stored = map_safetensors(folder / "model.safetensors", PACKED_DTYPES)
    return {name: (names[tensor.dtype], tensor.data.copy()) for name, tensor in stored.items()}


def publish(folder: Path) -> Path:
    """Makes a folder of a Qwen3.5's text part one as Qwen publishes it, with the keys of 3.8.

    The text part is nested, and beside it are a vision tower and the layer of a draft, here a copy of the last one.
    """
    raw, rng = json.loads((folder / "config.json").read_text()), np.random.default_rng(0)
    last, kind = f"model.layers.{raw['num_hidden_layers'] - 1}.", raw["model_type"].removesuffix("_text")
    stored, visual = tensors_of(folder), "model.visual.blocks.0.attn.qkv"
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in stored.items()}
    tensors |= {name.replace(last, "mtp.layers.0."): value for name, value in stored.items() if name.startswith(last)}
    tensors |= {name: ("float32", rng.standard_normal((4, 8))) for name in ("mtp.fc.weight", f"{visual}.weight")}
    write_tensors(folder / "model.safetensors", tensors | {f"{visual}.bias": ("float32", np.ones(4))})
    about = {"quantization_config": raw.pop("quantization_config")} if "quantization_config" in raw else {}
    text = {key: value for key, value in raw.items() if key not in ("architectures", "torch_dtype")} | {
        "attn_output_gate": True, "dtype": "bfloat16", "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "pad_token_id": None,
        "output_gate_type": "swish", "partial_rotary_factor": 0.25, "output_router_logits": False}
    (folder / "config.json").write_text(json.dumps(about | {
        "architectures": [f"Qwen3_5{'Moe' * kind.endswith('moe')}ForConditionalGeneration"], "image_token_id": 248056,
        "language_model_only": False, "model_type": kind, "text_config": text, "transformers_version": "4.57.0.dev0",
        "tie_word_embeddings": raw["tie_word_embeddings"], "video_token_id": 248057, "vision_end_token_id": 248054,
        "vision_start_token_id": 248053, "vision_config": {
            "deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 8,
            "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 16, "model_type": kind, "num_heads": 2,
            "num_position_embeddings": 2304, "out_hidden_size": raw["hidden_size"], "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2}}))
    return folder


def change_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def pack_words(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Numbers [..., n] of so many bits -> int32 words [..., n * bits / 32]; the i-th goes to the place order[i]."""
    per_word = 32 // bits
    groups = numbers.reshape(*numbers.shape[:-1], -1, per_word).astype(np.uint64)
    places = range(per_word) if order is None else order
    words = sum(groups[..., i] << np.uint64(bits * place) for i, place in enumerate(places))
    return words.astype(np.uint32).view(np.int32)


def print_losses(title: str, originals: list[np.ndarray], packed: list[np.ndarray], kept: list[np.ndarray]) -> None:
    """Prints what a quantization loses, and what the fast engine's format loses after it; `pytest -s` shows it.

    kept: the numbers in the fast engine. Both are root mean squares of differences, in shares of the weights' spread.
    """
    def mean(ones, others):
        return np.mean([np.sqrt(((b - a)**2).mean()) / w.std() for w, a, b in zip(originals, ones, others)])

    more = f"; in the fast engine {mean(packed, kept):.4f} more" if kept else ""
    print(f"{title}: {mean(originals, packed):.4f} of the weights' spread lost by the quantization{more}")


def kept_by_the_fast_engine(path: Path, names: list[str]) -> list[np.ndarray]:
    """These matrices of a checkpoint as float32; an empty list without numba."""
    if not importlib.util.find_spec("numba"):
        return []
    import qwen3_numba as fast
    w = fast.load_model(path, tokenizer=False).weights
    rows = {"lm_head.weight": w.head} | w.matrices
    return [fast.matrix_rows(rows[name], range(rows[name][0].rows)) for name in names]


def is_nearest_int8(found: np.ndarray, values: np.ndarray) -> bool:
    """Whether each group of 32 columns errs by no more than the fast engine's int8 may."""
    pairs = np.pad(np.stack([found - values, values]), ((0, 0), (0, 0), (0, -values.shape[1] % 32)))
    errors, values = pairs.reshape(2, len(values), -1, 32)
    return bool((np.sqrt((errors**2).mean(-1)) <= 0.006 * np.abs(values).max(-1)).all())
