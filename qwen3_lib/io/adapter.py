"""LoRA adapters in the layout of peft: adapter_config.json, and adapter_model.safetensors with small matrices.

    Adapted(source, "folder")        a source of a model (its folder, a GGUF file) with the changes of an adapter
    Adapted(source, "folder:0.5")    the changes half as strong

An adapter changes a matrix W [outputs, inputs] of its base model to W + scale * B A, with small matrices A [r, inputs]
and B [outputs, r]. Source: Hu et al. 2021 (LoRA). The sum is computed while an engine reads W.

The result equals peft's model before merging, the model that was trained: with a tied head, peft's merged model
changes the head together with the embedding.
"""
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3 import Config, Folder, Tensor, checked_number, checked_whole, map_safetensors, to_float32
from qwen3_lib.io.adapter_config import CONFIG, FUSED, Settings, full_name, is_target, key_of, number_of, read_settings
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.tensors import BLOCK, EMBEDDING, AnyTensor, Blocks, PackedTensor, Wrapped, rows_of

WEIGHTS, HEAD = "adapter_model.safetensors", "lm_head.weight"
LORA = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.default)?(?:\.weight|(\.bias))?")


class Adapted(Wrapped):
    """A model whose matrices have an adapter's changes. All else is the base's."""

    def __init__(self, base: Folder, name: str | Path):
        super().__init__(base)
        folder, _, weight = str(name).rpartition(":")
        self.adapter, self.weight = Path(name), 1.0
        if re.fullmatch(r"-?\d*\.?\d+", weight) and not self.adapter.is_dir():
            self.adapter, self.weight = Path(folder), checked_number(f"weight of {folder}", float(weight), -100, 100)
        if absent := [file for file in (CONFIG, WEIGHTS) if not (self.adapter / file).is_file()]:
            raise InputError(f"{self.adapter}: not a LoRA adapter: it has no {absent[0]}")

    def json(self, name: str) -> dict[str, Any]:
        """The base's file; an adapter with biases gives the model biases."""
        adds = name == "config.json" and self.settings.get("lora_bias")
        return self.base.json(name) | ({"attention_bias": True} if adds else {})

    def config(self) -> Config:
        config, adds = self.base.config(), self.json("config.json").get("attention_bias") is True
        return replace(config, attention_bias=config.attention_bias or adds)

    def stored(self) -> dict[str, Any]:
        """The base's tensors, with the adapter's classification head, where it has one."""
        return self.base.stored() | {name: tensor for name, tensor in self.files.items() if name.startswith("score.")}

    @cached_property
    def settings(self) -> Settings:
        return read_settings(self.adapter / CONFIG)

    @cached_property
    def files(self) -> dict[str, Tensor]:
        """The adapter's tensors, without the prefix that all names have. Tensors of a vision tower are left out."""
        stored = {name.removeprefix("base_model.model."): tensor
                  for name, tensor in map_safetensors(self.adapter / WEIGHTS).items()}
        return {name: tensor for name, tensor in stored.items() if not name.startswith("model.visual.")}

    def tensors(self, config: Config) -> dict[str, Any]:
        """The base's tensors with the changes. A change of a tied embedding leaves the head as it is, and vice versa.

        Raises InputError for an adapter of another kind or of another model.
        """
        biased = self.base.json("config.json").get("attention_bias") is True
        stored = self.base.tensors(replace(config, attention_bias=biased))
        tensors, tied = {HEAD: stored[EMBEDDING]} | stored, HEAD not in stored
        settings = self.settings | {"ensure_weight_tying": tied and self.settings.get("ensure_weight_tying")}
        copies, whole, small = sort_tensors(self.files, settings)
        changes = dict(changes_of(self, small, settings, config.num_experts))
        found: list[tuple[str, Any]] = [*copies.items(), *whole.items(), *changes.items()]
        for name, change in found:
            there = tensors[name].shape if name in tensors else None
            if there != change.shape:
                raise InputError(f"{self.adapter}: an adapter for another model: {brief(name)} has the shape "
                                 f"{list(change.shape)}, in the base {list(there) if there else 'it is absent'}")
        if not changes and not whole:
            raise InputError(f"{self.adapter}: there are no tensors that {CONFIG} names")
        first = not isinstance(self.base, Adapted)
        special = ["use_dora"] * bool(settings.get("use_dora")) + [*whole]
        if special and not (first and self.weight == 1):
            raise InputError(f"{self.adapter}: an adapter with {brief(special[0])} must be the first one, of weight 1")
        if first:  # later ones stand on the same copies
            tensors |= copies
            if tied and (copy := copies.get(HEAD, copies.get(EMBEDDING))) is not None:
                tensors[HEAD] = tensors[EMBEDDING] = copy
        tensors |= whole
        for name, change in changes.items():
            tensors[name] = adapted(tensors[name], change)
        biases = {name.removesuffix("weight") + "bias": change.scale * change.bias for name, change in changes.items()
                  if change.bias is not None and change.bias.any()}
        shapes = {name: shape for name, shape in self.shapes(config).items() if name.endswith(".bias")}
        if outside := biases.keys() - shapes.keys():
            raise InputError(f"{self.adapter}: lora_bias is supported in a Qwen3's attention only, not "
                             f"{brief(min(outside))}")
        for name, shape in shapes.items():
            bias = biases.get(name, np.zeros(shape)) + (to_float32(tensors[name]) if name in tensors else 0)
            tensors[name] = Tensor("F32", bias.astype(np.float32), stored[EMBEDDING].mapping)
        if tied and (settings["ensure_weight_tying"] and not special or tensors[HEAD] is tensors[EMBEDDING]):
            del tensors[HEAD]
        return tensors


# ---- adapter_model.safetensors ---------------------------------------------------------------------------------------

class Change(NamedTuple):
    """W becomes W + scale * b @ a. With DoRA, its rows (an embedding's columns) then get the lengths `lengths`."""
    a: np.ndarray  # float32 [r, inputs]
    b: np.ndarray  # float32 [outputs, r]
    scale: float
    lengths: np.ndarray | None = None  # float32 [outputs], or [inputs] if by_column. Source: Liu et al. 2024 (DoRA)
    by_column: bool = False
    bias: np.ndarray | None = None  # float32 [outputs], added with the scale to the outputs

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.b), self.a.shape[1]


Tensors = dict[str, Tensor]


def sort_tensors(files: Tensors, settings: Settings) -> tuple[Tensors, Tensors, dict[str, Tensors]]:
    """(copies of the base's tensors, tensors in place of the base's, module -> its small matrices) of an adapter.

    The first two by the base's names, the modules as in the file. Without tensors that peft ignores.
    """
    copies, whole, small = Tensors(), Tensors(), dict[str, Tensors]()
    for name, tensor in files.items():
        bare = name.replace(".base_layer.", ".")
        if (found := LORA.fullmatch(name)) is not None:
            small.setdefault(found[1], {})[found[2] + (found[3] or "")] = tensor
        elif (bare != name) == is_target(bare.rpartition(".")[0], settings) and not name.startswith("score.") \
                and ".lora_" not in name:
            (copies if bare != name else whole)[full_name(bare)] = tensor
    return copies, whole, small


def changes_of(adapter: Adapted, small: dict[str, Tensors], settings: Settings,
               experts: int) -> Iterator[tuple[str, Change]]:
    """(name of the base's tensor, its change). Raises InputError for matrices that aren't as adapter_config.json says.

    `experts`: the number of experts, whose matrices are stacked where peft changes the tensors of all together.
    """
    folder = adapter.adapter
    for module, parts in small.items():
        if (key := key_of(module, settings)) is None:
            continue
        if any(tensor.data.ndim != 1 + part.endswith(("A", "B")) for part, tensor in parts.items()):
            raise InputError(f"{folder}: a tensor of {brief(module)} is no matrix of a LoRA adapter")
        arrays, embedding = {part: to_float32(tensor) for part, tensor in parts.items()}, "embedding_A" in parts
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise InputError(f"{folder}: NaN or infinity in the change of {brief(module)}")
        a, b = (arrays.get(name, np.empty((0, 0))) for name in ("A", "B"))
        if embedding:
            a, b = arrays.get("embedding_B", a).T, arrays["embedding_A"].T
        if b.shape[1] != len(a) or len(a) == 0:
            raise InputError(f"{folder}: lora_A and lora_B of {brief(module)} don't belong together")
        rank = checked_whole(f"{folder}: r", number_of(settings, "r", "rank_pattern", key), 1)
        alpha = checked_number(f"{folder}: lora_alpha", number_of(settings, "lora_alpha", "alpha_pattern", key),
                               -1e6, 1e6)
        name, parameter = full_name(module.replace(".base_layer", "")), key.rpartition(".")[2]
        fused = name.endswith(".experts")
        if len(a) != rank * (experts if fused else 1):
            raise InputError(f"{folder}: {brief(module)} has rank {len(a)}, but {CONFIG} says {rank}"
                             f"{f' for each of {experts} experts' if fused else ''}")
        scale = adapter.weight * alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        lengths = arrays.get("magnitude_vector") if settings.get("use_dora") else None
        bias = arrays.get("B.bias") if settings.get("lora_bias") else None
        if settings.get("use_dora") and (lengths is None or len(lengths) != (a.shape[1] if embedding else len(b))) or \
                bias is not None and len(bias) != len(b):
            raise InputError(f"{folder}: lora_magnitude_vector or bias of {brief(module)} is absent or too long")
        if not fused:
            yield f"{name}.weight", Change(a, b, scale, lengths, embedding, bias)
        for expert in range(experts if fused else 0):
            rows = np.array_split(b[:, expert::experts], len(FUSED[parameter]))
            for projection, some_rows in zip(FUSED[parameter], rows):
                yield (f"{name}.{expert}.{projection}.weight",
                       Change(a[expert * rank:(expert + 1) * rank], some_rows, scale))


# ---- The changed matrix ----------------------------------------------------------------------------------------------

def adapted(base: AnyTensor, change: Change) -> PackedTensor:
    """The matrix with its change, computed whenever its data is read, so that it is in memory only once."""
    def summed(start: int, stop: int) -> np.ndarray:
        product = change.scale * (change.b[start:stop].astype(np.float64) @ change.a)  # whose order of sums is unknown
        return np.add(rows_of(base, start, stop), product)

    @cache
    def column_lengths() -> np.ndarray:
        blocks = [(start, min(start + 32 * BLOCK, len(change.b))) for start in range(0, len(change.b), 32 * BLOCK)]
        return np.sqrt(sum(np.square(summed(*block)).sum(axis=0) for block in blocks))

    @np.errstate(all="ignore")  # infinity and NaN are reported once they have reached the logits
    def blocks(start: int, stop: int) -> Blocks:
        values = summed(start, stop)
        if change.lengths is not None and change.by_column:
            values *= change.lengths / column_lengths()
        elif change.lengths is not None:
            values *= change.lengths[start:stop, None] / np.linalg.norm(values, axis=1, keepdims=True)
        return Blocks(values.astype(np.float32))

    kept = base.kept if isinstance(base, PackedTensor) else "BF16" if base.dtype == "BF16" else "F32"
    return PackedTensor("F32", change.shape, blocks, base.mapping, kept=kept)
