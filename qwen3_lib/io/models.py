"""Models that aren't a plain folder: names on the hub, GGUF files, published quantizations, scaled RoPE, adapters."""
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from qwen3 import (DTYPES, QUANTIZATION, Config, Folder, InputError, Tensor, checked_whole, config_of, rope_of)
from qwen3_lib.io.adapter import Adapted
from qwen3_lib.io.errors import brief
from qwen3_lib.io.formats import check_settings, unpacked
from qwen3_lib.io.gguf_file import gguf_json, is_embedder, is_gguf, map_gguf
from qwen3_lib.io.hub import resolve_model
from qwen3_lib.io.packed import Quantized, quantized_file
from qwen3_lib.io.rope import with_yarn
from qwen3_lib.io.tensors import PACKED_DTYPES
from tokenizer_utils import Tokenizer, library_errors, make_tokenizer


def open_model(name: str, offline: bool = False, adapters: Sequence[str | Path] = ()) -> Folder:
    """The model of this name. Raises InputError where there is none, and for a folder without a model."""
    path = resolve_model(name, offline)
    folder: Folder = GGUFFile(path) if is_gguf(path) else Checkpoint(path)
    if (quantized := quantized_file(path)) is not None:
        if adapters:
            raise InputError(f"{path}: packed weights take no adapter; quantize the original with --adapter")
        return Quantized(folder, *quantized)
    for adapter in adapters:
        folder = Adapted(folder, adapter)
    return folder


def load_config(path: str | Path) -> Config:
    """The config of a model's folder or GGUF file. Raises InputError for what is missing or not supported."""
    return open_model(str(path), offline=True).config()


EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
MIXTURES = ("Qwen3MoeForCausalLM", "Qwen3MoeModel")


class Checkpoint(Folder):
    """A folder whose weights may be quantized in a published format, whose RoPE may be scaled, or of a mixture."""

    def config(self) -> Config:
        file, raw = self.path / "config.json", self.json("config.json")
        self.quantization()
        rope, mixture = rope_of(raw), raw.get("model_type") == "qwen3_moe"
        if rope["rope_type"] not in ("default", "yarn"):
            raise InputError(f"{file}: rope type {brief(repr(rope['rope_type']))} is not supported, only 'default' and "
                             "'yarn' are")
        yarn = rope["rope_type"] == "yarn"
        plain: dict[str, Any] = {}
        if yarn:
            plain |= {"rope_scaling": None, "rope_parameters": None, "rope_theta": rope["rope_theta"]}
        if mixture:
            names = raw.get("architectures")
            others = [name for name in names if name not in MIXTURES] if isinstance(names, list) else names
            plain |= {"model_type": "qwen3", "architectures": others}
        config = config_of(raw | plain, file)
        config = with_experts(config, raw, file) if mixture else config
        return with_yarn(config, rope, file) if yarn else config

    def stored(self, dtypes: dict[str, Any] = DTYPES) -> dict[str, Any]:
        if (method := self.quantization()) is None:
            return split_experts(super().stored(dtypes))
        return unpacked(super().stored(PACKED_DTYPES), *method, self.path)

    def quantization(self) -> tuple[str, dict[str, Any]] | None:
        """The method of a published quantization and its settings, or None. Raises InputError for an unknown one."""
        about = next(filter(None, map(self.json("config.json").get, QUANTIZATION)), None)
        return None if about is None else check_settings(about, self.path / "config.json")


def with_experts(config: Config, raw: dict[str, Any], file: Path) -> Config:
    """The config of a mixture of experts. Raises InputError for sizes that can't be."""
    raw = {"num_experts": raw.get("num_local_experts")} | raw  # the name in transformers 5
    sizes: dict[str, Any] = {key: checked_whole(f"{file}: {key}", raw.get(key), 1) for key in EXPERT_SIZES}
    step = checked_whole(f"{file}: decoder_sparse_step", raw.get("decoder_sparse_step", 1), 1)
    dense = raw.get("mlp_only_layers") or []
    if not sizes["num_experts_per_tok"] <= sizes["num_experts"] <= 10_000 or not isinstance(dense, list):
        raise InputError(f"{file}: num_experts_per_tok = {sizes['num_experts_per_tok']} of num_experts = "
                         f"{sizes['num_experts']} and mlp_only_layers = {brief(dense)} can't be")
    sparse = tuple(i for i in range(config.num_hidden_layers) if (i + 1) % step == 0 and i not in dense)
    return replace(config, **sizes, sparse_layers=sparse, norm_topk_prob=bool(raw.get("norm_topk_prob")))


def split_experts(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replaces the fused expert tensors of transformers 5 by views of them, one per expert and projection.

    mlp.experts.gate_up_proj [num_experts, 2 * moe_intermediate_size, hidden_size], mlp.experts.down_proj
    [num_experts, hidden_size, moe_intermediate_size].
    """
    tensors = dict(stored)
    for name, tensor in stored.items():
        start, _, part = name.rpartition(".")
        if start.endswith(".mlp.experts") and len(tensor.shape) == 3:
            del tensors[name]
            for expert, data in enumerate(tensor.data):
                half = len(data) // 2
                rows = {"gate_proj": data[:half], "up_proj": data[half:]} if part == "gate_up_proj" else {part: data}
                tensors |= {f"{start}.{expert}.{key}.weight": tensor._replace(data=view) for key, view in rows.items()}
    return tensors


class GGUFFile(Checkpoint):
    """A GGUF file: its metadata are what the JSON files of a folder say."""

    def json(self, name: str) -> dict[str, Any]:
        return gguf_json(self.path, name)

    def stored(self, dtypes: dict[str, Any] = DTYPES) -> dict[str, Any]:
        stored = map_gguf(self.path)
        if is_embedder(self.path):  # as such a model's own file names its tensors
            stored = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
        return stored

    def tokenizer(self) -> Tokenizer:
        with library_errors(f"cannot read the tokenizer of {self.path}"):
            backend = tokenizers.Tokenizer.from_str(json.dumps(self.json("tokenizer.json")))
        return make_tokenizer(backend, self.json("tokenizer_config.json"), self.path)
