"""LoRA adapters in the layout of peft: adapter_config.json, and adapter_model.safetensors with small matrices.

    with_adapter(source, "folder")    the Source of a model with the changes of an adapter

An adapter changes a matrix W [outputs, inputs] of its base model to W + scale * B A, with small matrices A [r, inputs]
and B [outputs, r]. Source: Hu et al. 2021 (LoRA). The sum is computed while an engine reads W.

The result equals peft's model before merging, the model that was trained: with a tied head, peft's merged model
changes the head together with the embedding.
"""
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3 import Source, Tensor, checked_number, map_safetensors, to_float32
from qwen3_lib.io.errors import InputError, brief, read_json_object
from qwen3_lib.io.tensors import ROWS_AT_ONCE, EMBEDDING, AnyTensor, Blocks, PackedTensor, rows_of

ADAPTER_CONFIG, ADAPTER_WEIGHTS, HEAD = "adapter_config.json", "adapter_model.safetensors", "lm_head.weight"
LORA = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.default)?(?:\.weight)?")
MERGE = "merge the adapter into its base with peft first"
# Keys of adapter_config.json that are of training alone, or say what the file of tensors says, too.
IGNORED_KEYS = {"alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
            "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
            "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save",
            "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
            "task_type", "velora_config"}
# Values that need no merging. Other beginnings than these (PiSSA, OLoRA, LoftQ, ...) change the base model, too.
KNOWN = {"peft_type": ("LORA",), "use_rslora": (True,),
         "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}


def with_adapter(source: Source, name: str | Path) -> Source:
    """The model with the changes of an adapter. A change of a tied embedding leaves the head as it is, and vice versa.

    Raises InputError for an adapter of another kind or of another model.
    """
    if source.saved is not None:
        raise InputError(f"{source.path}: packed weights take no adapter; quantize the original with --adapter")
    adapter = Adapter(name)
    tensors = {HEAD: source.tensors[EMBEDDING]} | source.tensors
    changes = dict(adapter.changes(tensors))
    for name, change in changes.items():
        if name not in tensors or tensors[name].shape != change.shape:
            there = list(tensors[name].shape) if name in tensors else "it is absent"
            raise InputError(f"{adapter.folder}: an adapter for another model: {brief(name)} has the shape "
                             f"{list(change.shape)}, in the base {there}")
        tensors[name] = adapted(tensors[name], change)
    if not changes:
        raise InputError(f"{adapter.folder}: there are no tensors lora_A and lora_B")
    if HEAD not in source.tensors and tensors[HEAD] is tensors[EMBEDDING]:
        del tensors[HEAD]
    heads = {name: tensor for name, tensor in adapter.files.items() if name.startswith("score.")}
    return replace(source, tensors=tensors, heads=source.heads | heads, adapter=adapter.folder)


class Adapter:
    """The files of an adapter. Raises InputError for a folder without them."""

    def __init__(self, name: str | Path):
        self.folder = Path(name)
        if absent := [file for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (self.folder / file).is_file()]:
            weighted = f"; for a part of its changes, {MERGE}" if re.search(r":-?\d*\.?\d+$", str(name)) else ""
            raise InputError(f"{name}: not a LoRA adapter: it has no {absent[0]}{weighted}")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """adapter_config.json. Raises InputError for what changes the computation and isn't known here."""
        file = self.folder / ADAPTER_CONFIG
        settings = {"peft_type": "missing", "lora_alpha": 8} | read_json_object(file)
        for key, value in settings.items():
            harmless = key in IGNORED_KEYS or key != "peft_type" and value in (None, False, [], {})
            if not harmless and value not in KNOWN.get(key, ()):
                raise InputError(f"{file}: {brief(key)} = {brief(repr(value))} is not supported; {MERGE}")
        return settings

    @cached_property
    def files(self) -> dict[str, Tensor]:
        """The adapter's tensors, without the prefix that all names have. Tensors of a vision tower are left out."""
        stored = {name.removeprefix("base_model.model."): tensor
                  for name, tensor in map_safetensors(self.folder / ADAPTER_WEIGHTS).items()}
        return {name: tensor for name, tensor in stored.items() if not name.startswith("model.visual.")}

    def changes(self, originals: Mapping[str, AnyTensor]) -> Iterator[tuple[str, "Change"]]:
        """(name of the base's tensor, its change). Raises InputError for tensors that are no such matrices."""
        pairs, rooted = dict[str, dict[str, np.ndarray]](), self.settings.get("use_rslora")
        for name, tensor in self.files.items():
            if found := LORA.fullmatch(name):
                pairs.setdefault(found[1], {})[found[2]] = array = to_float32(tensor)
                if array.ndim != 2 or not np.isfinite(array).all():
                    raise InputError(f"{self.folder}: {brief(name)} is no matrix, or has NaN or infinity")
            elif not name.startswith("score."):  # peft saves embedding and head, too, where it changes one of them
                original = originals.get(full_name(name.replace(".base_layer.", ".")))
                if original is None or not equal(original, tensor):
                    raise InputError(f"{self.folder}: {brief(name)} is not supported, only lora_A and lora_B are; "
                                     f"{MERGE}")
        for module, arrays in pairs.items():
            if arrays.keys() == {"embedding_A", "embedding_B"}:
                arrays = {"A": arrays["embedding_B"].T, "B": arrays["embedding_A"].T}
            if arrays.keys() != {"A", "B"} or len(arrays["A"]) == 0 or arrays["B"].shape[1] != len(arrays["A"]):
                raise InputError(f"{self.folder}: lora_A and lora_B of {brief(module)} don't belong together")
            rank = len(arrays["A"])
            scale = self.alpha(module) / (math.sqrt(rank) if rooted else rank)
            yield f"{full_name(module)}.weight", Change(arrays["A"], arrays["B"], scale)

    def alpha(self, module: str) -> float:
        """lora_alpha, or its exception for this module."""
        patterns = self.settings.get("alpha_pattern") or {}
        try:
            found = next((value for pattern, value in patterns.items()
                          if re.fullmatch(rf"(.*\.)?({pattern})", module)), self.settings["lora_alpha"])
        except (AttributeError, re.error, OverflowError, RecursionError) as error:
            raise InputError(f"{self.folder / ADAPTER_CONFIG}: alpha_pattern must be an object of regular "
                             "expressions: "
                             f"{brief(error)}") from error
        return checked_number(f"{self.folder}: lora_alpha", found, -1e6, 1e6)


def full_name(name: str) -> str:
    """The name of a module or a tensor in a language model.

    An embedding model's lacks `model.`; beside a vision tower it begins with `model.language_model.`
    """
    name = name.replace("model.language_model.", "model.", 1)
    return f"model.{name}" if name.split(".")[0] in ("layers", "embed_tokens", "norm") else name


def equal(a: AnyTensor, b: AnyTensor) -> bool:
    """Whether two matrices hold the same numbers."""
    return a.shape == b.shape and all(np.array_equal(rows_of(a, i, i + ROWS_AT_ONCE), rows_of(b, i, i + ROWS_AT_ONCE))
                                      for i in range(0, a.shape[0], ROWS_AT_ONCE))


# ---- The changed matrix ----------------------------------------------------------------------------------------------

class Change(NamedTuple):
    """W becomes W + scale * b @ a."""
    a: np.ndarray  # float32 [r, inputs]
    b: np.ndarray  # float32 [outputs, r]
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.b), self.a.shape[1]


def adapted(base: AnyTensor, change: Change) -> PackedTensor:
    """The matrix with its change, computed whenever its data is read, so that it is in memory only once."""
    def blocks(start: int, stop: int) -> Blocks:
        product = change.scale * (change.b[start:stop].astype(np.float64) @ change.a)  # whose order of sums is unknown
        return Blocks(np.add(rows_of(base, start, stop), product).astype(np.float32))

    bits = base.bits if isinstance(base, PackedTensor) else 16 if base.dtype == "BF16" else 32
    return PackedTensor("F32", change.shape, blocks, base.mapping, max(bits, 16))
