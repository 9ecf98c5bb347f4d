"""Records what each component does in a pass. qwen3.py and qwen3_5.py contain no line for it.

A function looks up the other functions in one dict, its module's. A `Recorder` copies all functions into a
dict of its own and wraps the components there. So a recorded pass runs the same lines, and all other passes run the
functions themselves: a recorder costs them no time.
"""
from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import getsource
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numpy as np

import qwen3
import qwen3_5
from qwen3 import Config, KVCache, Model, TokenIds


@dataclass(frozen=True)
class Step:
    """One call of a component within a pass."""
    function: str
    weight: str  # the names of its weights, or ""
    layer: int  # -1 before the first layer, num_hidden_layers after the last one
    file: str  # qwen3.py, or qwen3_5.py
    line: int  # of the file, with the call
    shape: tuple[int, ...]  # of the result
    seconds: float
    read: int | None  # bytes of the arguments; None for moe, which reads the chosen experts only
    operations: int | None  # additions and multiplications
    norms: np.ndarray | None  # the length of the result's vector at each position, [n]


@dataclass
class RecordedPass:
    """One call of forward with n tokens."""
    token_ids: np.ndarray
    seconds: float = 0.0  # of all steps together
    length: int = 0  # positions in the cache after the pass
    capacity: int = 0  # positions the cache has room for
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))  # after the last token, [vocab_size]
    steps: list[Step] = field(default_factory=list)
    streams: list[np.ndarray] = field(default_factory=list)  # residual stream at the start and after each layer, [n, d]
    attention: list[np.ndarray] = field(default_factory=list)  # of each layer that attends, [n_heads, n, length]
    q: list[np.ndarray] = field(default_factory=list)  # of each layer before RoPE, [n_heads, n, rope_dim]
    k: list[np.ndarray] = field(default_factory=list)  # [n_kv_heads, n, rope_dim]
    gates: list[np.ndarray] = field(default_factory=list)  # of a Qwen3.5's attention: the mean of each output's gate
    deltas: list[np.ndarray] = field(default_factory=list)  # of each delta net: decay, beta, |S|, [3, heads, n]
    states: list[np.ndarray] = field(default_factory=list)  # its last S, [heads, key_dim, value_dim]

    @property
    def n(self) -> int:
        return len(self.token_ids)


# Component -> the additions and multiplications of a call, from its arguments; attend's are q, all keys, all values.
OPERATIONS: dict[str, Callable[..., int]] = {
    "rope_tables": lambda config, positions: 3 * len(positions) * config.rope_dim // 2,
    "rms_norm": lambda x, weight, eps: 4 * x.size,
    "linear": lambda x, weight: 2 * x.size * weight.shape[0],
    "apply_rope": lambda x, cos, sin: 3 * x.size,
    "attend": lambda q, k, v: 4 * q.size * k.shape[1],  # q times all keys, then the weights times all values
    "swiglu": lambda x, gate_proj, up_proj, down_proj: 6 * x.size * gate_proj.shape[0],
    "sigmoid": lambda x: 2 * x.size,
    "causal_convolution": lambda x, weight, history, guesses=0: x.size * (2 * weight.shape[1] + 3),
    "unit_length": lambda x: 3 * x.size,
    "delta_rule": lambda q, k, v, g, beta, state: v.shape[1] * (7 * state.size + 2 * v[:, 0].size),
    "delta_rule_in_chunks": lambda q, k, v, g, beta, state: sum(
        len(state) * block_operations(min(v.shape[1] - at, qwen3_5.DELTA_CHUNK), *state.shape[1:])
        for at in range(0, v.shape[1], qwen3_5.DELTA_CHUNK)),
}


def block_operations(n: int, key_dim: int, value_dim: int) -> int:
    """Of a head and n tokens in delta_rule_in_chunks: three products with the state, which decays and grows; products
    of the keys with k and q; the equations, with n unknowns for each value; a product with their solution."""
    return (6 * n + 2) * key_dim * value_dim + 4 * n * n * (key_dim + value_dim) + 2 * n**3 // 3


# Their results are [heads, n, d], other results [n, ...].
HEADS_FIRST = ("apply_rope", "attend", "unit_length", "delta_rule", "delta_rule_in_chunks")


class Recorder:
    """Runs a model of qwen3.py or qwen3_5.py and records each pass in `passes`.

    With `keep_arrays`, a pass also keeps its residual streams, attention weights, queries and keys, and the states of
    delta nets.
    """

    def __init__(self, model: Model):
        self.model, self.passes, self.keep_arrays = model, list[RecordedPass](), False
        self._layer, self._inside = -1, False
        self._before_rope: list[np.ndarray] = []  # q and k of this layer
        self._names = {id(array): name for layer in [model.weights, *model.weights["layers"]]
                       for name, array in layer.items() if isinstance(array, np.ndarray)}
        self._names |= {id(layer["norm"]): "linear_attn.norm" for layer in model.weights["layers"] if "norm" in layer}
        self._names[id(model.weights["lm_head"])] = "lm_head"  # not "embed_tokens", which may be the same array
        self.linear = list(getattr(model.config, "linear_layers", ()))  # the delta nets of a Qwen3.5
        self.attending = [i for i in range(model.config.num_hidden_layers) if i not in self.linear]
        self.modules = [qwen3, *{sys.modules[model.source.kind.layer.__module__]} - {qwen3}]
        names = {name: value for module in self.modules for name, value in vars(module).items()}
        names |= {name: copied(function, names) for name, function in names.items()
                  if isinstance(function, FunctionType) and function.__module__ in ("qwen3", "qwen3_5")}
        names |= {name: self._recorded(name, names[name]) for name in ("moe", *OPERATIONS) if name in names}
        names["decoder_layer"] = self._recorded_layer(names["decoder_layer"])
        self._functions = names

    def forward(self, token_ids: TokenIds, cache: KVCache, all_logits: bool = False) -> np.ndarray:
        """qwen3.forward for at most qwen3.CHUNK tokens and a cache of `new_cache`."""
        now = RecordedPass(np.asarray(token_ids))
        self.passes.append(now)
        self._layer = -1
        start = time.perf_counter()
        part = qwen3.NextTokens(cache, np.asarray(token_ids), len(token_ids) if all_logits else 1)
        [new] = qwen3.passes(self.model, [part])
        line = getsource(qwen3).partition("embed_tokens(model, new)")[0].count("\n") + 1
        now.steps.append(Step("embedding", "embed_tokens", -1, "qwen3.py", line, new.x.shape,
                              time.perf_counter() - start, new.x.nbytes, 0, lengths(new.x, 0)))
        kind = replace(self.model.source.kind, layer=self._functions["decoder_layer"])
        recorded = replace(self.model, source=replace(self.model.source, kind=kind))
        logits, _ = copied(qwen3.run_pass, self._functions)(recorded, new)
        now.logits, logits = logits[-1], logits if all_logits else logits[0]
        now.seconds = sum(step.seconds for step in now.steps)
        now.length, now.capacity = cache.length, cache.k.shape[2]
        return logits

    def new_cache(self) -> KVCache:
        """An empty cache whose `attend` is recorded, and whose `recall` consists of recorded components.

        A pass goes through the layers at once: no states are kept at its borders.
        """
        cache = self.model.engine.new_cache(self.model.config)
        setattr(cache, "borders", lambda token_ids, ends: [])
        setattr(cache, "attend", functools.partial(self._recorded("attend", type(cache).attend), cache))
        if (recall := getattr(type(cache), "recall", None)) is not None:
            setattr(cache, "recall", functools.partial(copied(recall, self._functions), cache))
        return cache

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if self._inside or not getattr(args[0], "size", 1):  # a part of another component; of no guesses
                return function(*args, **options)
            self._inside, start = True, time.perf_counter()
            try:
                out = function(*args)
                seconds = time.perf_counter() - start
            finally:
                self._inside = False
            caller = sys._getframe(1)
            self._record(name, Path(caller.f_code.co_filename).name, caller.f_lineno, seconds, args, out)
            return out

        return wrapped

    def _record(self, name: str, file: str, line: int, seconds: float, args: tuple[Any, ...], out: Any) -> None:
        now = self.passes[-1]
        if name == "attend":
            cache, layer, q, new, _ = args
            at = self.attending.index(layer)
            args = q, *(all_[at, :, :cache.length + new.shape[1]] for all_ in (cache.k, cache.v))
        weight = ", ".join(self._names[id(a)] for a in args if id(a) in self._names)
        read = None if name == "moe" else sum(a.nbytes for a in args if isinstance(a, np.ndarray))
        operations = OPERATIONS[name](*args) if name in OPERATIONS else None
        out, last = out if isinstance(out, tuple) else (out, None)  # (cos, sin), or (result, what the cache keeps)
        norms = None if name == "rope_tables" else lengths(out, 1 if name in HEADS_FIRST else 0)
        now.steps.append(Step(name, weight, self._layer, file, line, out.shape, seconds, read, operations, norms))
        if self.keep_arrays and name == "apply_rope":
            self._before_rope.append(args[0])
        if self.keep_arrays and name == "attend":
            q, k = self._before_rope  # decoder_layer turns q first
            now.q.append(q)
            now.k.append(k)
            now.attention.append(attention_weights(args[0], args[1]))
            self._before_rope.clear()
        if self.keep_arrays and name == "sigmoid" and now.steps[-2].function == "attend":
            now.gates.append(out.mean(axis=-1).T)
        if self.keep_arrays and name.startswith("delta_rule"):
            now.deltas.append(np.stack([np.exp(args[3]), args[4], state_lengths(args[:-1], args[-1])]))
            now.states.append(last)

    def _recorded_layer(self, function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def wrapped(x: np.ndarray, w: dict[str, Any], config: Config, cache: KVCache, layer: int, *tables: Any) -> Any:
            now = self.passes[-1]
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


def attention_weights(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The weights of the values in attention(), [n_heads, n, length].

    attention() returns them if the values are unit vectors, one for each of head_dim positions at a time.
    """
    length, head_dim = k.shape[1:]
    units = [np.eye(length, head_dim, -start, dtype=np.float32) for start in range(0, length, head_dim)]
    weights = [qwen3.attention_in_blocks(q, k, np.broadcast_to(unit, k.shape)) for unit in units]
    return np.concatenate(weights, axis=-1)[..., :length]


def state_lengths(tokens: tuple[np.ndarray, ...], state: np.ndarray) -> np.ndarray:
    """The root of the sum of squares of each head's state after each token, [heads, n]. tokens: delta_rule's arrays."""
    found = []
    for t in range(tokens[0].shape[1]):
        q, k, v, g, beta = (array[:, t:t + 1] for array in tokens)
        _, state = qwen3_5.delta_rule(q, k, v, g, beta, state)
        found.append(lengths(state, 0))
    return np.stack(found, axis=1)


def lengths(x: np.ndarray, axis: int) -> np.ndarray:
    """The Euclidean norm of x at each position -> [n]; `axis` is the axis of the positions."""
    rows = np.moveaxis(x, axis, 0)
    return np.sqrt(np.square(rows.reshape(len(rows), -1), dtype=np.float64).sum(axis=1))
