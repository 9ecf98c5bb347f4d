"""Records what each step of forward does; qwen3.py contains nothing for it.

A function of qwen3.py looks up the other functions in one dict, its module's. A `Recorder` copies all functions into a
dict of its own and wraps the components there. So a recorded pass runs the same lines, and all other passes run the
functions of qwen3.py themselves: a recorder costs them no time.
"""
from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import numpy as np

import qwen3
from qwen3 import Config, KVCache, Model, TokenIds


@dataclass(frozen=True)
class Step:
    """One call of a component within a pass."""
    function: str
    weight: str  # the names of its weights, or ""
    layer: int  # -1 before the first layer, num_hidden_layers after the last one
    line: int  # line of qwen3.py with the call
    shape: tuple[int, ...]  # of the result
    seconds: float
    read: int | None  # bytes of the arguments; None for moe, which reads the chosen experts only
    operations: int | None  # additions and multiplications
    norms: np.ndarray | None  # the length of the result's vector at each position, [n]


@dataclass
class Pass:
    """One call of forward with n tokens."""
    n: int
    seconds: float = 0.0  # of all steps together
    length: int = 0  # positions in the cache after the pass
    capacity: int = 0  # positions the cache has room for
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))  # after the last token, [vocab_size]
    steps: list[Step] = field(default_factory=list)
    streams: list[np.ndarray] = field(default_factory=list)  # residual stream at the start and after each layer, [n, d]
    attention: list[np.ndarray] = field(default_factory=list)  # of each layer, [n_heads, n, length]
    q: list[np.ndarray] = field(default_factory=list)  # of each layer before RoPE, [n_heads, n, head_dim]
    k: list[np.ndarray] = field(default_factory=list)  # [n_kv_heads, n, head_dim]


# Component -> the additions and multiplications of a call, from its arguments; attend's are q, all keys, all values.
OPERATIONS: dict[str, Callable[..., int]] = {
    "rope_tables": lambda config, positions: 3 * positions.size * config.head_dim // 2,
    "rms_norm": lambda x, weight, eps: 4 * x.size,
    "linear": lambda x, weight, bias=None: 2 * x.size * weight.shape[0],
    "apply_rope": lambda x, cos, sin: 3 * x.size,
    "attend": lambda q, k, v: 4 * q.size * k.shape[1],  # q times all keys, then the weights times all values
    "swiglu": lambda x, gate_proj, up_proj, down_proj: 6 * x.size * gate_proj.shape[0],
}
COMPONENTS = ("rope_tables", "rms_norm", "linear", "apply_rope", "swiglu", "moe")
HEADS_FIRST = ("apply_rope", "attend")  # their results are [heads, n, d], other results [n, ...]


class Recorder:
    """Runs a model of qwen3.py and records each pass in `passes`.

    With `keep_arrays`, a pass also keeps its residual streams, attention weights, queries and keys.
    """

    def __init__(self, model: Model):
        self.model, self.passes, self.keep_arrays = model, list[Pass](), False
        self._layer, self._inside, self._ended = -1, False, 0.0  # _ended: when the last step was recorded
        self._before_rope: list[np.ndarray] = []  # q and k of this layer
        self._names = {id(array): name for layer in [model.weights, *model.weights["layers"]]
                       for name, array in layer.items() if isinstance(array, np.ndarray)}
        self._names[id(model.weights["lm_head"])] = "lm_head"  # not "embed_tokens", which may be the same array
        names = dict(vars(qwen3))
        names |= {name: copied(function, names) for name, function in vars(qwen3).items()
                  if isinstance(function, FunctionType) and function.__module__ == qwen3.__name__}
        names |= {name: self._recorded(name, names[name]) for name in COMPONENTS}
        names["decoder_layer"] = self._recorded_layer(names["decoder_layer"])
        self._logits_of = names["logits_of"]

    def forward(self, token_ids: TokenIds, cache: KVCache, all_logits: bool = False) -> np.ndarray:
        """qwen3.forward for at most qwen3.CHUNK tokens and a cache of `new_cache`."""
        now = Pass(len(token_ids))
        self.passes.append(now)
        self._layer = -1
        logits = self._logits_of(self.model, token_ids, cache, all_logits)
        now.logits = logits[-1] if all_logits else logits
        now.seconds = sum(step.seconds for step in now.steps)
        now.length, now.capacity = cache.length, cache.k.shape[2]
        return logits

    def new_cache(self) -> KVCache:
        """An empty KVCache whose `attend` is recorded."""
        cache = KVCache(self.model.config)
        setattr(cache, "attend", functools.partial(self._recorded("attend", KVCache.attend), cache))
        return cache

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if self._inside:  # a component called by another one is part of it
                return function(*args, **options)
            self._inside, start = True, time.perf_counter()
            try:
                out = function(*args)
                seconds = time.perf_counter() - start
            finally:
                self._inside = False
            self._record(name, sys._getframe(1).f_lineno, seconds, args, out)
            self._ended = time.perf_counter()
            return out

        return wrapped

    def _record(self, name: str, line: int, seconds: float, args: tuple[Any, ...], out: Any) -> None:
        now = self.passes[-1]
        if name == "attend":
            cache, layer, q, new, _ = args
            args = q, *(all_[layer, :, :cache.length + new.shape[1]] for all_ in (cache.k, cache.v))
        weight = ", ".join(self._names[id(a)] for a in args if id(a) in self._names)
        read = None if name == "moe" else sum(a.nbytes for a in args if isinstance(a, np.ndarray))
        operations = OPERATIONS[name](*args) if name in OPERATIONS else None
        shape = out[0].shape if name == "rope_tables" else out.shape  # cos and sin
        norms = None if name == "rope_tables" else lengths(out, 1 if name in HEADS_FIRST else 0)
        now.steps.append(Step(name, weight, self._layer, line, shape, seconds, read, operations, norms))
        if self.keep_arrays and name == "apply_rope":
            self._before_rope.append(args[0])
        if self.keep_arrays and name == "attend":
            q, k = self._before_rope  # decoder_layer turns q first
            now.q.append(q)
            now.k.append(k)
            now.attention.append(attention_weights(args[0], args[1], self.model.config, self._layer))
            self._before_rope.clear()

    def _recorded_layer(self, function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def wrapped(x: np.ndarray, w: dict[str, Any], config: Config, cache: KVCache, layer: int, *tables: Any) -> Any:
            now = self.passes[-1]
            if layer == 0:  # hidden_states looks up the embedding itself, after rope_tables
                seconds = time.perf_counter() - self._ended
                now.steps.append(Step("embedding", "embed_tokens", -1, line_of('w["embed_tokens"][ids'), x.shape,
                                      seconds, x.nbytes, 0, lengths(x, 0)))
            self._layer = layer
            out = function(x, w, config, cache, layer, *tables)
            self._layer = layer + 1  # after the last layer: the head
            if self.keep_arrays:
                now.streams += [x, out] if layer == 0 else [out]
            return out

        return wrapped


def copied(function: Any, names: dict[str, Any]) -> Any:
    """The same function, but it looks up other functions in `names`; its decorators stay around it."""
    inner, cells = getattr(function, "__wrapped__", None), function.__closure__
    if inner is not None:
        names, copy = function.__globals__, copied(inner, names)
        cells = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in cells or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def attention_weights(q: np.ndarray, k: np.ndarray, config: Config, layer: int) -> np.ndarray:
    """The weights of the values in attention() of a layer, [n_heads, n, length].

    attention() returns them if the values are unit vectors, one for each of head_dim positions at a time.
    """
    length, head_dim = k.shape[1:]
    units = [np.eye(length, head_dim, -start, dtype=np.float32) for start in range(0, length, head_dim)]
    window = config.windows[layer] if config.windows else 0
    weights = [qwen3.attention(q, k, np.broadcast_to(unit, k.shape), window, config.causal) for unit in units]
    return np.concatenate(weights, axis=-1)[..., :length]


def lengths(x: np.ndarray, axis: int) -> np.ndarray:
    """The Euclidean norm of x at each position -> [n]; `axis` is the axis of the positions."""
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
