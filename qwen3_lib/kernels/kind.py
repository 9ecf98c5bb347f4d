"""What the fast engine has for the layers of a model type: a row, in a file of its own that ModelType.fast names."""
from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from qwen3 import Config, InputError, ModelType, Source


class Widths(NamedTuple):
    """Numbers for which work_space makes room, beyond those of attention and of an MLP."""
    mixed: int = 0  # a token's results of what stands in the place of attention
    projected: int = 0  # all projections of a token, side by side
    own: int = 0  # what a thread works in
    shared: int = 0  # the width inside an expert for all tokens
    fused: int = 0  # what an MTP head's fc is multiplied with
    streams: int = 0  # how many there are in place of one
    index: tuple[int, int] = (0, 0)  # index queries of a token, and their size
    blocks: int = 0  # how many a token chooses


class Kind(NamedTuple):
    """A row: what differs between the layers of model types."""
    mixers: tuple[str, ...]  # the kernels of a layer before its MLP: file.function
    matrices: Callable[[Config, int], tuple[str, ...]]  # the names of a layer's matrices, in the places of LINEAR
    fields: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]]  # fields of Layers, from vectors and config
    widths: Callable[[Any], Widths]
    cache: Callable[[type[Any]], type[Any]]  # the class of caches, from a class of plain ones
    new: Callable[..., dict[str, np.ndarray]]  # fields of NewTokens: from Weights, caches, new tokens of each, Pass
    joined: tuple[tuple[str, str, str], ...] = ()  # two matrices that are one here, the second one below the first
    norm_offset: float = 0.0  # what the files' norms lack: 1 where they hold the distance from 1
    finish: str = ""  # the kernel with the MLP; by default that of a dense layer, or of a mixture
    last: str = "layers.output_logits"  # the kernel at the model's end
    # Further matrices by name: the field of Layers, and the index there.
    more: Callable[[Config], dict[str, tuple[str, tuple[int, ...]]]] = lambda config: {}
    seen: Callable[[Config], int] = lambda config: sys.maxsize  # up to so many positions, a token sees all
    fc: tuple[str, ...] = ("fc",)  # an MTP head's matrices of embeddings and hidden states
    head: Callable[[Any], Any] = lambda config: config  # of its config, as a model of one layer
    new_of_head: Any = None  # `new` of it, from streams in place of a Pass
    enter: Any = None  # the streams of an MTP head; see flash.streams_of_head, and MTPHead for a head without streams
    tables: Callable[[Source], Any] = lambda source: None  # of n-grams, which stay in their files


def kind_for(model_type: ModelType) -> Kind:
    """The row for a model type. Raises InputError for one whose layers the fast engine can't compute."""
    if not model_type.fast:
        raise InputError(f"the fast engine can't compute a {model_type.architectures[0]} yet: leave out --fast and the "
                         "options that need it")
    return import_module(model_type.fast).KIND  # type: ignore[no-any-return]


def steps_of(kind: Kind, config: Config) -> tuple[str, ...]:
    """The kernels that run a model: those of each layer, then the one at the model's end."""
    finish = kind.finish or ("experts.finish_sparse" if config.sparse_layers else "layers.finish_dense")
    return *kind.mixers, finish, kind.last
