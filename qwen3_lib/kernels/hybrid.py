"""What the fast engine has for a Qwen3.5, beside qwen3_numba.py: its matrices by name, its states, its cache."""
from __future__ import annotations

import ctypes
import itertools
import math
from functools import cache
from typing import Any

import numpy as np

from qwen3_5 import HybridCache, HybridConfig, State
from qwen3_lib.kernels import dense
from qwen3_lib.kernels.kind import Kind, Widths
from qwen3_lib.kernels.layout import (DELTA_SIZES, GATE, LINEAR, PANEL, PLACE, RUN, STATE, SUMS_OF_DELTA, TOKENS,
                                      WEIGHT, is_packed, padded)
from qwen3_lib.kernels.memory import Reused, aligned

# The matrices of a delta net, in the places of LINEAR. The small ones for beta and the decay are one matrix here.
DELTA = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_ba", "linear_attn.out_proj",
         *LINEAR[GATE:])


JOINED = (("linear_attn.in_proj_b", "linear_attn.in_proj_a", "linear_attn.in_proj_ba"),
          ("mlp.gate", "mlp.shared_expert_gate", "mlp.gate"))


def state_fields(vectors: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """What Layers in layout.py says about delta nets."""
    n_layers = config.num_hidden_layers
    recurrent = config.linear_layers
    places = np.full(n_layers, -1, PLACE)
    places["attention"][[i for i in range(n_layers) if i not in recurrent]] = np.arange(n_layers - len(recurrent))
    places["state"][[*recurrent]] = np.arange(len(recurrent))
    if not recurrent:  # an MTP head's layer
        return dense.attending(vectors, config)

    def all_of(name: str) -> list[np.ndarray]:
        return [vectors[f"model.layers.{i}.linear_attn.{name}"] for i in recurrent]

    conv = np.array([np.ascontiguousarray(weight.reshape(len(weight), -1).T) for weight in all_of("conv1d.weight")])
    rates = np.array([all_of("A_log"), all_of("dt_bias")], np.float32).swapaxes(0, 1).copy()
    rates[:, 0] = np.exp(rates[:, 0])
    sizes = np.array([(config.linear_num_key_heads, config.linear_key_head_dim, config.linear_num_value_heads,
                       config.linear_value_head_dim, 0)], DELTA_SIZES)
    return dense.NO_STREAMS | {"places": places, "delta_sizes": sizes, "conv": conv, "rates": rates,
            "delta_norms": np.array(all_of("norm.weight"), np.float32)}


class StateCache(HybridCache):
    """A HybridCache whose states lie as delta.py wants them: float32 [value heads, strips, key_dim padded, 16].

    All those of a pass lie in one piece of memory.
    """

    def __init__(self, config: HybridConfig, max_length: int | None = None):
        super().__init__(config, max_length)
        self.pieces = Reused()

    def stored_shape(self) -> tuple[int, ...]:
        heads, key_dim, value_dim = self.shape
        return heads, padded(value_dim, 16) // 16, padded(key_dim, SUMS_OF_DELTA), 16

    def new_arrays(self, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
        """float32 of these shapes, without values yet."""
        ends = list(itertools.accumulate(map(math.prod, shapes)))
        piece = self.pieces.take(ends[-1])
        return [piece[end - math.prod(shape):end].reshape(shape) for end, shape in zip(ends, shapes)]

    def make_new(self, guesses: int) -> None:
        """Makes `new`, without values yet: states that don't learn the last `guesses` tokens."""
        layers, (history, memory, late) = self.config.linear_layers, (array.shape for array in self.empty)
        memories, histories, lates = self.new_arrays([(len(layers), *shape) for shape in (
            memory, (history[0] + guesses, history[1]), (guesses, late[1]))])  # S first: no row lies in two lines
        self.new = dict(zip(layers, map(State, histories, memories, lates)))


class Vocabulary:
    """The rows of the lm_head that an MTP head guesses from, in blocks of 32: the rows of common tokens, which have the
    lowest ids, and the blocks of the latest other tokens of the texts. The whole lm_head costs several layers.
    """
    COMMON, OTHERS = 384, 192  # of 32 rows

    def __init__(self, head: np.ndarray):
        address, stride, form, n_rows, columns = head.tolist()[0]
        size, n = stride * (1 if is_packed(form) else PANEL), n_rows // PANEL
        self.rows = np.frombuffer((ctypes.c_uint8 * (n * size)).from_address(address), np.uint8).reshape(n, size)
        self.panels, self.next = np.arange(min(self.COMMON + self.OTHERS, n)), self.COMMON  # a place -> what is there
        self.known, self.matrix = np.arange(n) < len(self.panels), head
        if not self.known.all():
            self.copy = aligned((len(self.panels), size))
            self.copy[:] = self.rows[:len(self.panels)]
            n_rows = len(self.panels) * PANEL
            self.matrix = np.array([(self.copy.ctypes.data, stride, form, n_rows, columns)], WEIGHT)

    def add(self, token_ids: np.ndarray) -> None:
        """Takes in tokens, in place of others that were taken in long ago."""
        for panel in np.unique(token_ids[token_ids >= 0] // PANEL):  # those below 0 are of pictures
            if panel < len(self.known) and not self.known[panel]:
                self.known[[panel, self.panels[self.next]]] = True, False
                self.panels[self.next], self.copy[self.next] = panel, self.rows[panel]
                self.next = max((self.next + 1) % len(self.panels), self.COMMON)

    def token(self, row: int) -> int:
        """The token of a row of `matrix`."""
        return int(self.panels[row // PANEL]) * PANEL + row % PANEL if row // PANEL < len(self.panels) else row


def state_tables(weights: Any, caches: list[Any], counts: np.ndarray, new: Any) -> dict[str, np.ndarray]:
    """`runs` and `states` of NewTokens in layout.py, with new arrays for the states after the pass.

    counts [n_sequences]: the new tokens of each.
    """
    if not hasattr(caches[0], "snapshots"):  # of an MTP head
        return dense.no_states(weights, caches, counts, new)
    ends, runs, states = np.cumsum(counts).tolist(), [], []
    for cache, n, end in zip(caches, counts.tolist(), ends):
        guesses, before = cache.unsure(n), cache.snapshots[-1].states
        cache.make_new(guesses)
        pairs = [(before[layer], new) for layer, new in cache.new.items()]
        runs.append((end - n, end, len(pairs[0][0].late) if pairs else 0, guesses))
        states.append([[tuple(array.ctypes.data for array in state) for state in pair] for pair in pairs])
    return dense.NO_NEW_STREAMS | {"runs": np.array(runs, RUN),
                                   "states": np.array(states, STATE).reshape(len(caches), -1, 2)}


def widths(config: HybridConfig) -> Widths:
    """Of work_space: a delta net's results, its projections, and what a thread works in."""
    heads, key_dim, value_dim = (config.linear_num_value_heads, padded(config.linear_key_head_dim, SUMS_OF_DELTA),
                                 config.linear_value_head_dim)
    mixed = heads * value_dim
    attending = 2 * (padded(config.num_attention_heads * config.head_dim, PANEL)
                     + padded(config.num_key_value_heads * config.head_dim, PANEL))
    return Widths(mixed, max(sum(padded(n, PANEL) for n in (config.conv_dim, mixed, 2 * heads)), attending),
                  TOKENS * (2 * key_dim + 2) + (TOKENS + key_dim) * padded(value_dim, 16),
                  config.shared_expert_intermediate_size, 2 * config.hidden_size * config.mtp_num_hidden_layers)


@cache
def with_states(plain: type[Any]) -> type[Any]:
    """A class of plain caches, with states."""
    return type(f"Hybrid{plain.__name__}", (plain, StateCache), {"plain": plain, "kind": "of a fast hybrid"})


KIND = Kind(mixers=(*dense.KIND.mixers, "delta.mix_states"),
            matrices=lambda config, layer: DELTA if layer in config.linear_layers else LINEAR,  # type: ignore[attr-defined]
            fields=state_fields, widths=widths, cache=with_states, new=state_tables, joined=JOINED, norm_offset=1.0)
