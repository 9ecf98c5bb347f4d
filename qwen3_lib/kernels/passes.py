"""A pass of new tokens through the layers: what the kernels get, and which of them run for which tokens."""
from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from qwen3_lib.kernels.build import kernel
from qwen3_lib.kernels.kind import steps_of
from qwen3_lib.kernels.layout import (BLOCK, CACHE, CACHE_ROWS, DOWN, F32, FEW, GATE, JOB, OUT, PANEL, PASS, PROMPT,
                                      TASK, TILE, TILES, UP, Layers, NewTokens, Q, address_table, padded)
from qwen3_lib.kernels.memory import empty
from qwen3_lib.kernels.products import any_number, functions_for
from qwen3_lib.kernels.weights import Weights, move_layer


def batch_of(w: Weights, x: np.ndarray, turned: tuple[np.ndarray, np.ndarray], caches: list[Any], rows: np.ndarray,
             wanted: np.ndarray, new: Any = None) -> NewTokens:
    """x [m, hidden_size] at `rows`, ROW [m], of these caches; turned: rope_tables; the tokens `wanted` get logits.

    new: what Kind.new takes, a Pass or the streams of an MTP head.
    """
    tasks, tiles = tasks_for(w, rows)
    shape = len(wanted), padded(int(w.layers.head["rows"][0]), PANEL)
    logits = w.logits.take(shape[0] * shape[1]).reshape(shape) if len(wanted) <= PROMPT else empty(shape, np.float32)
    where = [(cache.k.ctypes.data, cache.v.ctypes.data, cache.k.shape[2]) for cache in caches]
    about = w.kind.new(w, caches, np.bincount(rows["sequence"], minlength=len(caches)), new)
    return NewTokens(x=x, cos=turned[0], sin=turned[1], rows=rows, tasks=tasks, tiles=tiles, wanted=wanted,
                     logits=logits, caches=np.array(where, CACHE), **about,
                     cache_rows=np.array([(caches[0].stored, caches[0].k.shape[3])], CACHE_ROWS))


def needed_functions(w: Weights, batch: NewTokens, n_queries: list[int]) -> np.ndarray:
    """The table of products for a batch whose tasks have so many queries."""
    m, n_wanted = len(batch.x), len(batch.wanted)
    needs = [(form, m) for form in w.formats]
    if n_wanted:
        needs += [(form, n_wanted) for form in (int(w.layers.head["form"][0]), *w.last_formats)]
    for form in w.experts_formats:  # an expert may have been chosen by any number of tokens
        needs += any_number(form, m)
    form, group = int(batch.cache_rows["form"][0]), w.config.num_attention_heads // w.config.num_key_value_heads
    queries = tuple((form, n) for n in sorted({1, *n_queries, *[group] * len(w.layers.indexing)}))
    queries += tuple((F32, int(each.heads)) for each in w.layers.indexing if each.heads)
    return functions_for(tuple(needs), queries, w.ways)


def runner(w: Weights, layers: Layers, batch: NewTokens, caches: list[Any]) -> Callable[[int, int, bool], None]:
    """A function that runs layers `first` to `last` - 1 on a batch's x, in place, and then, if asked, its logits."""
    config, m = w.config, len(batch.x)
    n_queries = (batch.tasks["n"] * (config.num_attention_heads // config.num_key_value_heads)).tolist()
    space, space_table = w.work_space(config, m, len(batch.tasks), max(n_queries, default=0))
    functions = needed_functions(w, batch, n_queries)
    table = w.table if layers is w.layers else address_table(layers)
    job_table = np.concatenate([table, address_table((*batch, functions)), space_table])

    def run(first: int, last: int, logits: bool) -> None:
        job = np.array([(0, 0, first, last, job_table.ctypes.data, logits * (len(batch.heads) or 1))], JOB)
        w.team.run(kernel(*steps_of(w.kind, config)), job, w, layers, caches, batch, space, functions, job_table)

    return run


def run_layers(w: Weights, batch: NewTokens, caches: list[Any], added: Any = (), states: bool = True) -> np.ndarray:
    """Runs the batch's x through all layers, in place -> the logits [n, vocab_size] of the tokens that get some.

    added[i] [m, hidden_size] is added to x after layer i. Without `states`, x isn't wanted after the last layer. So of
    a prompt, that layer only computes keys and values, and all else for the tokens that get logits: the same bits.
    """
    n_layers, m, rows = len(w.layers.places), len(batch.x), batch.wanted
    if m <= FEW:
        move_layer(w)
    added, run = added[:n_layers], runner(w, w.layers, batch, caches)
    attends = not states and w.layers.places[-1].attention >= 0
    whole = n_layers - (attends and len(rows) <= PROMPT < m and len(added) < n_layers)
    stops = sorted({0, whole, *range(0, whole, max(1, PASS // m)), *range(1, len(added) + 1)})
    if len(added) == n_layers:  # the head by itself: x changes after the last layer, or there are no layers
        stops.append(n_layers)
    for first, last in (spans := [*itertools.pairwise(stops)]):
        run(first, last, (first, last) == spans[-1] and whole == n_layers)
        if first < last <= len(added):
            batch.x[:] += added[last - 1]
    if whole < n_layers:
        unseen = batch._replace(tasks=batch.tasks[:0], tiles=batch.tiles[:0])
        runner(w, keys_alone(w.layers), unseen, caches)(whole, n_layers, False)
    if whole < n_layers and len(rows):
        tasks, tiles = tasks_for(w, batch.rows[rows])
        some = batch._replace(x=batch.x[rows], cos=batch.cos[rows], sin=batch.sin[rows], rows=batch.rows[rows],
                              tasks=tasks, tiles=tiles, wanted=np.arange(len(rows)))
        runner(w, w.layers, some, caches)(whole, n_layers, True)
    return batch.logits[:, :int(w.layers.head["rows"][0])]


def keys_alone(layers: Layers) -> Layers:
    """The same layers; the last one has rows in the matrices of keys and values, and in no others."""
    matrices, routers = layers.matrices.copy(), layers.routers.copy()
    matrices["rows"][-1, [Q, OUT, GATE, UP, DOWN]] = routers["rows"][-1] = 0
    return layers._replace(matrices=matrices, routers=routers)


def tasks_for(w: Weights, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """attention_tasks of a model."""
    group = w.config.num_attention_heads // w.config.num_key_value_heads
    return attention_tasks(rows["sequence"], rows["position"], group, w.kind.seen(w.config))


def attention_tasks(sequences: np.ndarray, positions: np.ndarray, group: int,
                    whole: int = sys.maxsize) -> tuple[np.ndarray, np.ndarray]:
    """The sequence and the position of each new token [m] -> TASK [n_tasks], TILES [n_tiles]

    whole: from this position on, a token sees at most so many, and has other tasks than the tokens before.
    """
    tasks, tiles, ends = [], [], [len(sequences)]
    if len(sequences) > 1:
        gaps = np.diff(2 * sequences + (positions >= whole)) | np.diff(positions) - 1
        ends = [*(np.flatnonzero(gaps) + 1).tolist(), *ends]
    for start, end in zip([0, *ends], ends):
        sequence, n_new = int(sequences[start]), end - start
        few = n_new <= FEW
        step = n_new if few else max(1, TILE // group)
        for row in range(start, start + n_new, step):
            n = min(step, start + n_new - row)
            seen, most = (int(positions[last]) + 1 for last in (row, row + n - 1))
            n_blocks, before = -(-min(most, whole) // BLOCK), len(tasks)
            here = (sequence, row, n, seen)
            tasks += [(*here, block, 1) for block in range(n_blocks)] if few else [(*here, 0, n_blocks)]
            tiles.append((before, len(tasks)))
    return np.array(tasks, TASK), np.array(tiles, TILES)
