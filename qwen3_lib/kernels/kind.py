"""What the fast engine has for the layers of a model type: a row, in a file of its own that ModelType.fast names."""
from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from qwen3 import Config, InputError, ModelType


class Widths(NamedTuple):
    """Numbers for which work_space makes room, beyond those of attention and of an MLP."""
    mixed: int = 0  # a token's results of what stands in the place of attention
    projected: int = 0  # all projections of a token, side by side
    own: int = 0  # what a thread works in
    shared: int = 0  # the width inside an expert for all tokens
    fused: int = 0  # what an MTP head's fc is multiplied with


class Kind(NamedTuple):
    """A row: what differs between the layers of model types."""
    mixers: tuple[str, ...]  # the kernels of a layer before its MLP: file.function
    matrices: Callable[[Config, int], tuple[str, ...]]  # the names of a layer's matrices, in the places of LINEAR
    fields: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]]  # fields of Layers, from vectors and config
    widths: Callable[[Any], Widths]
    cache: Callable[[type[Any]], type[Any]]  # the class of caches, from a class of plain ones
    tables: Callable[[list[Any], np.ndarray], tuple[np.ndarray, np.ndarray]]  # `runs` and `states` of NewTokens
    joined: tuple[tuple[str, str, str], ...] = ()  # two matrices that are one here, the second one below the first
    norm_offset: float = 0.0  # what the files' norms lack: 1 where they hold the distance from 1


def kind_for(model_type: ModelType) -> Kind:
    """The row for a model type. Raises InputError for one whose layers the fast engine can't compute."""
    if not model_type.fast:
        raise InputError(f"the fast engine can't compute a {model_type.architectures[0]} yet: leave out --fast and the "
                         "options that need it")
    return import_module(model_type.fast).KIND  # type: ignore[no-any-return]


def steps_of(kind: Kind, config: Config) -> tuple[str, ...]:
    """The kernels that run a model: those of each layer, then the one at the model's end."""
    return (*kind.mixers, "experts.finish_sparse" if config.sparse_layers else "layers.finish_dense",
            "layers.output_logits")
