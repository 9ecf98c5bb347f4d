"""Notes what each step of forward does, while qwen3.py knows nothing of it.

A function of qwen3.py finds the others by their names in one dict, the module's. A `Recorder` copies all of them into a
dict of its own, in which the components are wrapped. So a recorded pass runs the same lines, and every other pass runs
the functions of qwen3.py themselves: without a recorder, recording costs nothing.
"""
from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any

import numpy as np

import qwen3
from qwen3 import Config, KVCache, Model


@dataclass(frozen=True)
class Step:
    """One call of a component within a pass."""
    function: str
    weight: str  # the names of its weights, or ""
    layer: int  # -1 before the first layer, num_hidden_layers after the last one
    line: int  # of qwen3.py: where it is called
    shape: tuple[int, ...]  # of the result
    seconds: float
    read: int | None  # bytes of the arrays given; None where the step itself chooses among its weights
    operations: int | None  # additions and multiplications
    norms: np.ndarray | None  # the length of the result's vector at each position, [n]


@dataclass
class Pass:
    """One call of forward with n tokens."""
    n: int
    start: float  # seconds since the recorder was made
    seconds: float = 0.0  # of all steps together
    length: int = 0  # positions in the cache afterwards
    capacity: int = 0  # positions for which the cache has room
    steps: list[Step] = field(default_factory=list)
    streams: list[np.ndarray] = field(default_factory=list)  # residual stream at the start and after each layer, [n, d]
    attention: list[np.ndarray] = field(default_factory=list)  # of each layer, [n_heads, n, length]
    q: list[np.ndarray] = field(default_factory=list)  # of each layer before RoPE, [n_heads, n, head_dim]
    k: list[np.ndarray] = field(default_factory=list)  # [n_kv_heads, n, head_dim]


# Component -> the additions and multiplications of a call, from its arguments.
OPERATIONS: dict[str, Callable[..., int]] = {
    "rope_tables": lambda config, positions: 3 * positions.size * config.head_dim // 2,
    "rms_norm": lambda x, weight, eps: 4 * x.size,
    "linear": lambda x, weight: 2 * x.size * weight.shape[0],
    "apply_rope": lambda x, cos, sin: 3 * x.size,
    "append": lambda layer, sequence, k, v: 0,
    "attention_in_blocks": lambda q, k, v: 4 * q.size * k.shape[1],
    "swiglu": lambda x, gate_proj, up_proj, down_proj: 6 * x.size * gate_proj.shape[0],
}
COMPONENTS = ("rope_tables", "rms_norm", "linear", "apply_rope", "attention_in_blocks", "swiglu", "moe")
HEADS_FIRST = ("apply_rope", "attention_in_blocks")  # their results are [heads, n, d], others' [n, ...]


class Recorder:
    """Runs a model of qwen3.py and notes each pass in `passes`.

    `model` is the model given, with a forward and caches that are recorded: it goes wherever a model goes. With
    `keep_arrays`, a pass also keeps its residual streams, attention weights, queries and keys.
    """

    def __init__(self, model: Model):
        self.passes: list[Pass] = []
        self.keep_arrays = False
        self.began = time.perf_counter()
        self._n_layers = model.config.num_hidden_layers
        self._layer, self._inside = -1, False
        self._rotated: list[np.ndarray] = []  # of this layer, before RoPE
        self._ended = 0.0  # when the last step was noted
        self._names = {id(array): name for layer in [model.weights, *model.weights["layers"]]
                       for name, array in layer.items() if isinstance(array, np.ndarray)}
        self._names[id(model.weights["lm_head"])] = "lm_head"  # and not "embed_tokens" where it is the same array
        names = dict(vars(qwen3))
        for name, function in vars(qwen3).items():
            if isinstance(function, FunctionType) and function.__module__ == qwen3.__name__:
                names[name] = copied(function, names)
        for name in COMPONENTS:
            if name in names:
                names[name] = self._noted(name, names[name])
        names["decoder_layer"] = self._noted_layer(names["decoder_layer"])
        self._forward = names["forward"]
        self.model = replace(model, engine=replace(model.engine, forward=self.forward, new_cache=self.new_cache))

    def forward(self, model: Model, token_ids: Sequence[int] | np.ndarray, cache: KVCache,
                all_logits: bool = False) -> np.ndarray:
        """The namesake of qwen3.forward, for one sequence of at most qwen3.CHUNK tokens."""
        now = Pass(len(token_ids), time.perf_counter() - self.began)
        self.passes.append(now)
        self._layer = -1
        logits = self._forward(model, token_ids, cache, all_logits)
        now.seconds = sum(step.seconds for step in now.steps)
        now.length, now.capacity = cache.length, cache.k.shape[3]
        return logits

    def new_cache(self, config: Config, max_length: int | None = None, batch: int = 1) -> KVCache:
        """An empty KVCache whose `append` is noted, too."""
        cache = KVCache(config, max_length, batch)
        setattr(cache, "append", self._noted("append", cache.append))
        return cache

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if self._inside:  # a component that another one calls is part of it
                return function(*args, **options)
            self._inside, start = True, time.perf_counter()
            try:
                out = function(*args, **options)
                seconds = time.perf_counter() - start
            finally:
                self._inside = False
            self._note(name, sys._getframe(1).f_lineno, seconds, args, out)
            self._ended = time.perf_counter()
            return out

        return wrapped

    def _note(self, name: str, line: int, seconds: float, args: tuple[Any, ...], out: Any) -> None:
        now = self.passes[-1]
        weight = ", ".join(self._names[id(a)] for a in args if id(a) in self._names)
        chooses = any(isinstance(a, dict) for a in args)
        read = None if chooses else sum(a.nbytes for a in args if isinstance(a, np.ndarray))
        operations = OPERATIONS[name](*args) if name in OPERATIONS else None
        array = out[0] if isinstance(out, tuple) else out
        norms = None if name in ("append", "rope_tables") else lengths(array, 1 if name in HEADS_FIRST else 0)
        now.steps.append(Step(name, weight, self._layer, line, array.shape, seconds, read, operations, norms))
        if self.keep_arrays and name == "apply_rope":
            self._rotated.append(args[0])
        if self.keep_arrays and name == "attention_in_blocks":
            q, k = self._rotated  # in the order of decoder_layer
            now.q.append(q)
            now.k.append(k)
            self._rotated.clear()
            now.attention.append(attention_weights(*args[:2]))

    def _noted_layer(self, function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def wrapped(x: np.ndarray, w: dict[str, Any], config: Config, cache: KVCache, layer: int, *tables: Any) -> Any:
            now = self.passes[-1]
            if layer == 0:  # forward looks up the embedding by itself, after rope_tables
                seconds = time.perf_counter() - self._ended
                now.steps.append(Step("embedding", "embed_tokens", -1, line_of('w["embed_tokens"][ids[now]]'), x.shape,
                                      seconds, x.nbytes, 0, lengths(x, 0)))
            if layer == 0 and self.keep_arrays:
                now.streams.append(x)
            self._layer = layer
            x = function(x, w, config, cache, layer, *tables)
            self._layer = layer + 1  # after the last layer: the head
            if self.keep_arrays:
                now.streams.append(x)
            return x

        return wrapped


def copied(function: Any, names: dict[str, Any]) -> Any:
    """The same function, which finds what it calls in `names` instead of its module; its decorators stay around it."""
    inner, cells = getattr(function, "__wrapped__", None), function.__closure__
    if inner is not None:
        names, copy = function.__globals__, copied(inner, names)
        cells = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in cells or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def attention_weights(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The weights with which attention() adds up the values, [n_heads, n, length].

    They are what attention() returns when the values are unit vectors, one for each of head_dim positions at a time.
    """
    length, head_dim = k.shape[1:]
    units = [np.eye(length, head_dim, -start, dtype=np.float32) for start in range(0, length, head_dim)]
    weights = [qwen3.attention(q, k, np.broadcast_to(unit, k.shape)) for unit in units]
    return np.concatenate(weights, axis=-1)[..., :length]


def lengths(x: np.ndarray, axis: int) -> np.ndarray:
    """The Euclidean norm at each position of x, whose positions are on `axis` -> [n]."""
    rows = np.moveaxis(x, axis, 0)
    return np.sqrt(np.square(rows.reshape(len(rows), -1), dtype=np.float64).sum(axis=1))


@functools.cache
def source() -> str:
    """The text of qwen3.py."""
    with open(qwen3.__file__, encoding="utf-8") as file:
        return file.read()


def line_of(text: str) -> int:
    """The number of the first line of qwen3.py that contains a text."""
    return source()[:source().index(text)].count("\n") + 1
