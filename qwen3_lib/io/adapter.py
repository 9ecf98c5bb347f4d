"""LoRA adapters in the layout of peft: adapter_config.json, and adapter_model.safetensors with two matrices per change.

    Adapted(source, folder)     a source of a model (its folder, a GGUF file) with the changes of an adapter

An adapter changes a matrix W [outputs, inputs] of its base model to W + scale * B A, with small matrices A [r, inputs]
and B [outputs, r]. Source: Hu et al. 2021 (LoRA). The sum is computed while an engine reads W.
"""
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3 import DTYPES, Config, Folder, Tensor, checked_number, checked_whole, map_safetensors, to_float32
from qwen3_lib.io.errors import InputError, brief, read_json_object, some
from qwen3_lib.io.tensors import AnyTensor, PackedTensor, rows_of
from tokenizer_utils import Tokenizer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Keys of adapter_config.json that don't change the computation, or say what the tensors' names and shapes say, too.
HARMLESS = {"auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
            "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
            "megatron_core", "peft_version", "qalora_group_size", "rank_pattern", "revision", "runtime_config",
            "target_modules", "task_type"}
# Other beginnings than these (pissa, olora, loftq, ...) change the base model, too.
ONLY = {"peft_type": ("LORA",), "use_rslora": (None, False, True),
        "init_lora_weights": (None, True, False, "gaussian", "orthogonal")}


class Adapted(Folder):
    """A model whose matrices have an adapter's changes. All else is the base's."""

    def __init__(self, base: Folder, folder: str | Path):
        super().__init__(base.path)
        self.base, self.adapter = base, Path(folder)
        if absent := [name for name in (CONFIG, WEIGHTS) if not (self.adapter / name).is_file()]:
            raise InputError(f"{folder}: not a LoRA adapter: it has no {absent[0]}")

    def json(self, name: str) -> dict[str, Any]:
        return self.base.json(name)

    def config(self) -> Config:
        return self.base.config()

    def tokenizer(self) -> Tokenizer:
        return self.base.tokenizer()

    def stored(self, dtypes: dict[str, Any] = DTYPES) -> dict[str, Any]:
        return self.base.stored(dtypes)

    def tensors(self, config: Config) -> dict[str, Any]:
        """The base's tensors with the changes. A change of a tied head leaves the embedding as it is."""
        stored = self.base.tensors(config)
        bases = {"lm_head.weight": stored["model.embed_tokens.weight"]} | stored
        del bases["model.embed_tokens.weight"]
        files = without_base(self.adapter, map_safetensors(self.adapter / WEIGHTS), bases["lm_head.weight"])
        changes = read_changes(self.adapter, read_json_object(self.adapter / CONFIG),
                               {name: to_float32(tensor) for name, tensor in files.items()})
        for name, change in changes.items():
            shape, found = (len(change.b), change.a.shape[1]), bases[name].shape if name in bases else ()
            if found != shape:
                raise InputError(f"{self.adapter}: an adapter for another model: {brief(name)} has the shape "
                                 f"{list(shape)}, in the base {list(found) or 'it is absent'}")
        return stored | {name: adapted(bases[name], change) for name, change in changes.items()}


class Change(NamedTuple):
    """W becomes W + scale * b @ a."""
    a: np.ndarray  # float32 [r, inputs]
    b: np.ndarray  # float32 [outputs, r]
    scale: float


def read_changes(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, Change]:
    """The changes of an adapter by the names of the base model's tensors (model.layers.0.self_attn.q_proj.weight).

    `config` is its adapter_config.json, `tensors` are its float32 matrices. Raises InputError for any kind of adapter
    but LoRA, for each option that changes the computation and isn't known here, and for matrices that aren't pairs.
    """
    file = folder / CONFIG
    for key, values in ONLY.items():
        if config.get(key) not in values:
            raise InputError(f"{file}: {key} = {brief(repr(config.get(key)))} is not supported, only "
                             f"{some(map(repr, values))} is")
    rank = checked_whole(f"{file}: r", config.get("r"), 1)
    alpha = checked_number(f"{file}: lora_alpha", config.get("lora_alpha"), -1e6, 1e6)
    for key, value in config.items():
        if key not in {*HARMLESS, *ONLY, "r", "lora_alpha"} and value not in (None, False, "none", [], {}):
            raise InputError(f"{file}: option {brief(key)} = {brief(value, 80)} is not supported by this program")
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if found is None or tensor.ndim != 2:
            raise InputError(f"{folder}: {brief(name)} is no matrix of a plain LoRA adapter")
        module = f"model.{found[1]}" if found[1].startswith("layers.") else found[1]
        if found[2] in (pair := pairs.setdefault(f"{module}.weight", {})):
            raise InputError(f"{folder}: there are two lora_{found[2]} for {brief(module)}")
        pair[found[2]] = tensor
    if not pairs:
        raise InputError(f"{folder / WEIGHTS}: there are no tensors")
    changes = {}
    for name, pair in pairs.items():
        if {*pair} != {"A", "B"} or pair["B"].shape[1] != len(pair["A"]) or len(pair["A"]) == 0:
            raise InputError(f"{folder}: lora_A and lora_B of {brief(name)} don't belong together")
        r = len(pair["A"])
        if not config.get("rank_pattern") and r != rank:
            raise InputError(f"{folder}: {brief(name)} has rank {r}, but {CONFIG} says {rank}")
        if not all(np.isfinite(matrix).all() for matrix in pair.values()):
            raise InputError(f"{folder}: NaN or infinity in the change of {brief(name)}")
        changes[name] = Change(pair["A"], pair["B"], alpha / (math.sqrt(r) if config.get("use_rslora") else r))
    return changes


def without_base(folder: Path, tensors: Mapping[str, Tensor], head: AnyTensor | None) -> dict[str, Tensor]:
    """An adapter's tensors without a copy of the base model's head, which peft stores where the adapter changes it.

    Raises InputError if it is no copy.
    """
    left = dict(tensors)
    for name in [name for name in tensors if re.fullmatch(r"(base_model\.model\.)?lm_head\.base_layer\.weight", name)]:
        copy, step = left.pop(name), 1024  # rows: a head is large
        if head is None or copy.shape != head.shape or not all(
                np.array_equal(rows_of(copy, i, i + step), rows_of(head, i, min(i + step, len(copy.data))))
                for i in range(0, len(copy.data), step)):
            raise InputError(f"{folder}: an adapter for another model: {name} is not the head of the base")
    return left


def adapted(base: AnyTensor, change: Change) -> PackedTensor:
    """The matrix with its change, computed whenever its data is read, so that it is in memory only once."""
    def rows(start: int, stop: int) -> np.ndarray:
        change_ = change.scale * (change.b[start:stop].astype(np.float64) @ change.a)  # whose order of sums is unknown
        return (rows_of(base, start, stop) + change_).astype(np.float32)

    kept = base.kept if isinstance(base, PackedTensor) else "BF16" if base.dtype == "BF16" else "F32"
    return PackedTensor("F32", (len(change.b), change.a.shape[1]), rows, base.mapping, kept=kept)
