"""What the fast engine has for a Qwen3.8-Flash-Next, beside hybrid.py: its matrices, its tables, its cache."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from qwen3 import linear, rms_norm, rope_tables
from qwen3_5 import State
from qwen4_exp import StreamCache, StreamConfig, look_up, tables_of
from qwen3_lib.kernels import dense, hybrid
from qwen3_lib.kernels.kind import Kind, Widths
from qwen3_lib.kernels.layout import BLOCK, FEW, INDEX, INDEXING, PANEL, WEIGHT, WHOLE_BLOCK, padded

CONNECTIONS = "attn_hyper_connection", "mlp_hyper_connection"
READING = "input_mix_weight_down", "input_mix_weight_up"
JOINS = (*hybrid.JOINED, ("self_attn.v_proj", "self_attn.indexer.index_qk_proj", "self_attn.v_proj"),
         *((f"{name}.{READING[0]}", f"{name}.block_inject_weight", f"{name}.{READING[0]}") for name in CONNECTIONS))


def more_matrices(config: StreamConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Those of the streams and of n-gram layers."""
    places: dict[str, tuple[str, tuple[int, ...]]] = {}
    for i, part in enumerate(READING):
        for layer in range(config.num_hidden_layers):
            places |= {f"model.layers.{layer}.{name}.{part}.weight": ("reading", (layer, half, i))
                       for half, name in enumerate(CONNECTIONS)}
        places[f"model.hyper_connection_mixer.{part}.weight"] = "reading", (config.num_hidden_layers, 0, i)
    return places | {f"model.layers.{layer}.ple.{name}_proj.weight": ("ngrams", (table, i))
                     for table, layer in enumerate(config.ple_layers) for i, name in enumerate(("key", "value"))}


def stream_fields(vectors: dict[str, np.ndarray], config: StreamConfig) -> dict[str, np.ndarray]:
    """What Layers in layout.py says of streams, and of delta nets."""
    n, tables, each = config.num_hidden_layers, len(config.ple_layers), (config.hc_count, config.hidden_size)
    found = hybrid.state_fields(vectors, config)
    found["places"]["ngrams"][[*config.ple_layers]] = range(tables)
    if config.linear_layers:
        found["delta_sizes"]["sigmoid"] = config.output_gate_type == "sigmoid"

    def norm(name: str) -> np.ndarray:
        return 1 + vectors[f"model.{name}.weight"]

    stream_norms = np.ones((n + 1, 2, *each), np.float32)
    for i in range(n):
        for half, name in enumerate(CONNECTIONS):
            stream_norms[i, half] = norm(f"layers.{i}.{name}.hc_norm").reshape(each)
    stream_norms[n, 0] = norm("hyper_connection_mixer.hc_norm").reshape(each)
    attending = [i for i in range(n) if i not in config.linear_layers]
    index_norms = [[norm(f"layers.{i}.self_attn.indexer.{name}_layernorm") for name in "qk"]
                   for i in attending if config.indexer_n_heads]
    ngram_norms = [[norm(f"layers.{i}.ple.norm_{name}").reshape(each) for name in ("key", "query", "conv")]
                   for i in config.ple_layers]
    ngram_conv = [vectors[f"model.layers.{i}.ple.conv1d.weight"][:, 0].T for i in config.ple_layers]
    sizes = np.array([(config.indexer_n_heads, config.indexer_head_dim, most_blocks(config),
                       config.indexer_compress_ratio, config.ngram_size)], INDEXING)
    return found | {
        "indexing": sizes, "reading": np.zeros((n + 1, 2, 2), WEIGHT), "stream_norms": stream_norms,
        "index_norms": np.array(index_norms, np.float32).reshape(len(attending), 2, config.indexer_head_dim),
        "ngrams": np.zeros((tables, 2), WEIGHT),
        "ngram_norms": np.array(ngram_norms, np.float32).reshape(tables, 3, *each),
        "ngram_conv": np.array(ngram_conv, np.float32).reshape(tables, config.ple_conv_kernel_size, each[0] * each[1])}


def most_blocks(config: StreamConfig) -> int:
    """How many whole blocks a token sees."""
    return config.indexer_budget // config.indexer_compress_ratio


class IndexCache(hybrid.StateCache, StreamCache):
    """A StreamCache as the kernels want it: rows of `blocks` are padded to a multiple of 32 numbers."""

    def __init__(self, config: StreamConfig, max_length: int | None = None):
        super().__init__(config, max_length)
        self.blocks = np.empty((len(self.attending), 0, padded(config.indexer_head_dim, 32)), np.float32)

    def make_new(self, guesses: int) -> None:
        super().make_new(guesses)
        for layer in self.config.ple_layers:
            rows = np.empty((self.n_earlier + guesses, self.config.hc_count * self.config.hidden_size), np.float32)
            self.new[~layer] = State(rows, np.zeros(0, np.float32), np.zeros((guesses, 0), np.float32))


@cache
def with_streams(plain: type[Any]) -> type[Any]:
    """A class of plain caches, with states and an index."""
    return type(f"Stream{plain.__name__}", (plain, IndexCache), {"plain": plain, "kind": "of fast streams"})


def stream_tables(weights: Any, caches: list[Any], counts: np.ndarray, new: Any) -> dict[str, np.ndarray]:
    """hybrid.state_tables and what NewTokens in layout.py says of streams. x becomes zeros."""
    config, m = weights.config, len(new.x)
    ratio, rows = config.indexer_compress_ratio, look_up(weights.tables, new)
    for cache, part in new.parts:
        cache.places[cache.length:][:part.stop - part.start] = new.positions[part].reshape(part.stop - part.start, -1)
    whole = np.array([(i, block) for i, (cache, n) in enumerate(zip(caches, counts.tolist()))
                      for block in range(cache.length // ratio, (cache.length + n) // ratio)], WHOLE_BLOCK)
    firsts = [caches[i].places[block * ratio] for i, block in whole.tolist()]
    cos, sin = rope_tables(config, np.array([*firsts, caches[0].places[0]]))  # one more, because there may be none
    streams = np.tile(new.x, config.hc_count)
    new.x[:] = 0
    most = max(cache.blocks.shape[1] for cache in caches)
    return hybrid.state_tables(weights, caches, counts, new) | {
        "streams": streams, "which": np.arange(m),
        "found": np.array([*rows.values()], np.float32).reshape(len(rows), m, -1 if rows else 0),
        "indices": np.array([(cache.index.ctypes.data, cache.blocks.ctypes.data, cache.index.shape[2],
                              cache.blocks.shape[1]) for cache in caches], INDEX),
        "whole": whole, "whole_cos": cos, "whole_sin": sin,
        "scores": np.empty((m if m <= FEW else weights.team.n_threads, most), np.float32)}


def head_config(config: StreamConfig) -> StreamConfig:
    """Of an MTP head, which attends to all, and so has no index; nor has it an n-gram table."""
    return replace(config, ple_layers=(), indexer_n_heads=0, indexer_head_dim=0, indexer_budget=2**40,
                   indexer_compress_ratio=1)


def streams_of_head(head: Any, rows: np.ndarray, states: np.ndarray, eps: float) -> np.ndarray:
    """What the layer of an MTP head reads [n, hc_count * hidden_size]: see qwen4_exp.guess. Few tokens: by NumPy."""
    d = rows.shape[1]
    following, before = (rms_norm(part, norm, eps) for part, norm in zip((rows, states), head.norms))
    embedding, hidden = map(linear, (following, before.reshape(-1, d)), head.unpacked)
    streams = hidden.reshape(len(rows), -1, d) + embedding[:, None]
    return np.ascontiguousarray(streams.reshape(len(rows), -1))


def head_tables(weights: Any, caches: list[Any], counts: np.ndarray, streams: np.ndarray) -> dict[str, np.ndarray]:
    """stream_tables of an MTP head, of streams_of_head."""
    m = len(streams)
    return dense.no_states(weights, caches, counts, streams) | {
        "streams": streams, "which": np.arange(m), "found": np.empty((0, m, 0), np.float32),
        "indices": np.zeros(len(caches), INDEX), "scores": np.empty((m, 0), np.float32)}


def all_widths(config: StreamConfig) -> Widths:
    """Of work_space: those of a hybrid, and of streams."""
    streams, index = config.hc_count * config.hidden_size, (config.indexer_n_heads, config.indexer_head_dim)
    plain = hybrid.widths(config)
    attending = plain.projected + padded((index[0] + 1) * index[1], PANEL)
    ngrams = padded(streams, PANEL) + padded(config.hidden_size, PANEL)
    low = padded(config.hc_lowrank + config.hc_count, PANEL)
    return plain._replace(mixed=max(plain.mixed, streams, config.ple_embed_dim), projected=max(attending, ngrams, low),
                          shared=max(plain.shared, config.hc_lowrank),
                          own=max(plain.own, config.indexer_n_heads * BLOCK), streams=config.hc_count, index=index,
                          blocks=most_blocks(config) if config.indexer_n_heads else 0)


KIND = Kind(mixers=("streams.read_mixed", "sparse.attend_chosen", "delta.mix_states"), matrices=hybrid.KIND.matrices,
            fields=stream_fields, widths=all_widths, cache=with_streams, new=stream_tables, joined=JOINS,
            norm_offset=1.0, finish="streams.finish_streams", last="streams.output_streams", more=more_matrices,
            seen=lambda config: config.indexer_budget + config.indexer_compress_ratio - 1,
            fc=("fc_embedding", "fc_hidden"), head=head_config, new_of_head=head_tables,
            enter=streams_of_head, tables=tables_of)
