# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "prompt_toolkit>=3.0.40",
#                 "threadpoolctl>=3.5"]
# ///
"""Qwen3.8-Flash-Next (`qwen4_exp`) in plain NumPy: four residual streams, sparse attention, a table of n-grams.

    python qwen4_exp.py --model Qwen3.8-Flash-Next "What is the capital of France?"     a folder with Qwen's own files

This file stands on qwen3_5.py, which you should read first, and has what is new. Read it from top to bottom:

    config -> streams -> n-gram table -> sparse attention -> a layer, the whole pass, the MTP head -> cache -> loading

What is new against Qwen3.5, with the sizes of Qwen3.8-Flash-Next (`n` is the number of tokens):

    token ids [n] ---> embedding [n, 2560], four times side by side: the streams r [n, 4, 2560]
        |                        |
        v                        v
    the last 2 and 3        +-> r  (layer 1 only)  r + n-gram layer: 16 rows of 160 numbers of the table for each token
    tokens, hashed: rows    |    |
    of a table of 51        |    |---> read: of four streams one [n, 2560] ---> gated delta net, or sparse attention --+
    billion numbers,        |    |                                                                                    |
    which stays in the      |    +<--- write: added to each stream, with a weight for each <--------------------------+
    file                    |    |---> read ---> mixture of experts, as in Qwen3.5 ---> write ---> r
                            |    |                                    48 times: three delta nets, then one attention
                            +----+
                                 v
                               read, in place of the last RMSNorm [n, 2560] -> lm_head -> logits [n, 248320]

    sparse attention:   tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13     the query at 13; budget: 4 (Qwen's: 2,048)
                        index       K0        K1        K2                a key for each block: the average of 4
                        scores     0.3       2.1       0.0                how well each fits the token's index queries
                        it sees            4 5 6 7              12 13     the best blocks, and the unfinished one
"""
from __future__ import annotations

import itertools
import math
import mmap
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

if __name__ == "__main__" and find_spec("qwen3") is None:
    sys.exit("qwen4_exp.py: it needs qwen3.py, qwen3_5.py, tokenizer_utils.py and qwen3_lib beside it")

import qwen3  # first: it says in one line what is missing
import numpy as np
import qwen3_5
from qwen3 import (Engine, Model, Pass, Source, Tensor, TokenIds, apply_rope, attention, attention_in_blocks,
                   checked_whole, embed_tokens, linear, rms_norm, rope_tables, to_float32, together)
from qwen3_5 import (SPARSE, HybridCache, HybridConfig, Snapshot, State, causal_convolution, feed_forward,
                     gated_attention, gated_delta_net, hybrid_config, sigmoid, silu)
from tokenizer_utils import InputError, brief

__all__ = ["StreamCache", "StreamConfig", "chosen_positions", "ngram_rows", "read_streams", "sparse_attention"]

# ---- Config ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class StreamConfig(HybridConfig):
    """qwen3_5.HybridConfig, and the fields of what is new, under config.json's names."""
    hc_count: int  # residual streams
    hc_lowrank: int  # width inside their reading
    ple_layers: tuple[int, ...]  # the layers with an n-gram table; config.json's ple_layer_ids count from 1
    ple_embed_dim: int  # numbers that a token gets from the table
    ple_conv_kernel_size: int
    ngram_size: int  # the longest n-gram
    heads_per_ngram: int  # rows for each length of n-gram
    ngram_vocab_size_base: int  # each head has its own part of the table, at least as large
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int  # tensors of a table in the files
    seed: int  # of the hashes
    indexer_n_heads: int  # index queries of a token
    indexer_head_dim: int
    indexer_budget: int  # positions
    indexer_compress_ratio: int  # positions of a block
    output_gate_type: str  # of a delta net: "sigmoid" or "silu"

    @property
    def ngram_heads(self) -> int:
        """Rows of the table for each token."""
        return (self.ngram_size - 1) * self.heads_per_ngram


# ---- The streams -----------------------------------------------------------------------------------------------------

def read_streams(r: np.ndarray, w: dict[str, Any], name: str, config: StreamConfig) -> tuple[np.ndarray, np.ndarray]:
    """What a layer reads of the streams r [n, hc_count, hidden_size] -> h [n, hidden_size], and `flat`: r normalised.

    Each stream is normalised by itself. Each of its numbers passes a switch, which all streams set together, through
    hc_lowrank numbers; h is the mean of what passes. A layer has no other norm. Names with a colon: see load_weights.
    """
    normed = rms_norm(r, w[f"{name}:hc_norm"].reshape(r.shape[1:]), config.rms_norm_eps)
    flat = normed.reshape(len(r), r.shape[1] * r.shape[2])
    inner = silu(linear(flat, w[f"{name}:input_mix_weight_down"]) / np.float32(config.hc_count))
    switch = sigmoid(linear(inner, w[f"{name}:input_mix_weight_up"])).reshape(r.shape)
    return (switch * normed).mean(axis=1), flat


def write_streams(r: np.ndarray, out: np.ndarray, flat: np.ndarray, w: dict[str, Any], name: str) -> np.ndarray:
    """Adds a layer's output, out [n, hidden_size], to each stream, times a weight from 0 to 2, which `flat` sets."""
    weights = 2 * sigmoid(linear(flat, w[f"{name}:block_inject_weight"]) / np.float32(r.shape[1]))  # [n, hc_count]
    return r + weights[..., None] * out[:, None]


# ---- The n-gram table ------------------------------------------------------------------------------------------------
# A token's last two and three ids are hashed, heads_per_ngram times each, and each hash is a row of a table: knowledge
# of common word groups that costs no arithmetic. Each head has a part of the table, a prime number of rows.

def primes(first: int, n: int) -> list[int]:
    """The n smallest primes from `first` on."""
    numbers = itertools.count(max(first, 2))
    found = (each for each in numbers if all(each % divisor for divisor in range(2, math.isqrt(each) + 1)))
    return [*itertools.islice(found, n)]


def head_sizes(config: StreamConfig, table: int) -> list[int]:
    """Rows of each head of the table number `table`: the primes go on from table to table."""
    return primes(config.ngram_vocab_size_base, (table + 1) * config.ngram_heads)[table * config.ngram_heads:]


def multipliers(config: StreamConfig, table: int) -> list[int]:
    """An odd number for each token of an n-gram, whose product with an id has at most 63 bits; drawn by SplitMix64."""
    mask, step, half = 2**64 - 1, 0x9E3779B97F4A7C15, max(1, (2**63 - 1) // config.vocab_size // 2)
    drawn = []
    for i in range(config.ngram_size):
        x = config.seed + 10007 * table + (i + 2) * step & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        drawn.append(2 * ((x ^ x >> 31) % half) + 1)
    return drawn


class Table(NamedTuple):
    """An n-gram table [rows, d], which stays in its mapped files, and the hash that chooses rows."""
    parts: list[Any]  # Tensors, or PackedTensors of qwen3_lib
    end: int  # the end-of-text token: what stands before it isn't seen
    picture: int  # the id that a picture's tokens have in the hash
    factors: np.ndarray  # int64 [ngram_size]: see multipliers
    sizes: np.ndarray  # int64 [ngram_size - 1, heads_per_ngram]: see head_sizes
    offsets: np.ndarray  # the first row of each head, likewise

    def take(self, rows: np.ndarray) -> np.ndarray:
        """These rows [n, heads] in float32, side by side -> [n, heads * d]. Each is read once, in the file's order."""
        unique, places = np.unique(rows, return_inverse=True)
        ends = np.cumsum([part.shape[0] for part in self.parts])
        cut = np.split(unique, np.searchsorted(unique, ends[:-1]))
        wanted = [(part, some - (end - part.shape[0])) for some, end, part in zip(cut, ends, self.parts) if len(some)]
        for part, some in wanted:
            for stored in (part,) if isinstance(part, Tensor) else part.stored:
                read_ahead(stored, some)
        found = np.concatenate([to_float32(part._replace(data=part.data[some])) if isinstance(part, Tensor) else
                                part.rows(some) for part, some in wanted])
        return found[places].reshape(len(rows), -1)


def read_ahead(stored: Tensor, rows: np.ndarray) -> None:
    """Tells the system which rows come, so that it reads them together and not one after the other."""
    if hasattr(mmap, "MADV_WILLNEED"):
        size, at = stored.data.strides[0], stored.data.ctypes.data - np.frombuffer(stored.mapping, "u1").ctypes.data
        pages = np.unique((at + np.concatenate([rows * size, rows * size + size - 1])) // mmap.PAGESIZE)
        for page in pages.tolist():
            stored.mapping.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, 1)


def ngram_rows(before: np.ndarray, ids: np.ndarray, table: Table) -> np.ndarray:
    """The rows of tokens [n] after the tokens `before` -> [n, ngram_heads], those of pairs first.

    Of a pair: (id * factor 0 xor the id before * factor 1) mod the head's size, plus its offset; a triple goes on with
    factor 2. Before the text, and from an earlier end of text backwards, all ids are the end of text.
    """
    more, n = len(table.factors) - 1, len(ids)
    text = np.concatenate([np.full(more, table.end), before, ids])[-(n + more):]
    text = np.where(text < 0, table.picture, text)
    hashed, ended, rows = text[more:] * table.factors[0], np.zeros(n, bool), []
    for i in range(1, more + 1):
        earlier = text[more - i:][:n]
        ended |= earlier == table.end
        hashed ^= np.where(ended, table.end, earlier) * table.factors[i]
        rows.append(hashed[:, None] % table.sizes[i - 1] + table.offsets[i - 1])
    return np.concatenate(rows, axis=1)


def look_up(tables: dict[int, Table], new: Pass) -> dict[int, np.ndarray]:
    """What the table of each n-gram layer has for the tokens of a pass, [n, ple_embed_dim]."""
    return {layer: table.take(np.concatenate([
        ngram_rows(one.token_ids[:one.length], new.token_ids[rows], table) for one, rows in new.parts]))
        for layer, table in tables.items()}


def ngram_layer(r: np.ndarray, found: np.ndarray, w: dict[str, Any], config: StreamConfig, cache: Pass,
                layer: int) -> np.ndarray:
    """Adds to the streams r [n, hc_count, hidden_size] what the table has, found [n, ple_embed_dim].

    All streams get the same value, as far as a key for each fits what the stream holds. A convolution over every
    ngram_size-th token spreads the values to the next tokens.
    """
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x.reshape(r.shape), w[f"ple:norm_{name}"].reshape(r.shape[1:]), config.rms_norm_eps)

    key, query = norm(linear(found, w["ple:key_proj"]), "key"), norm(r, "query")
    fit = (key * query).sum(axis=-1, keepdims=True) / np.float32(math.sqrt(config.hidden_size))  # [n, hc_count, 1]
    fit = np.sign(fit) * np.sqrt(np.maximum(np.abs(fit), np.float32(1e-6)))
    value = sigmoid(fit) * linear(found, w["ple:value_proj"])[:, None]
    rows = norm(value, "conv").reshape(len(r), -1)
    spread = together([one.spread(layer, rows[part], w["ple:conv1d"]) for one, part in cache.parts])
    return r + value + spread.reshape(r.shape)


# ---- Sparse attention ------------------------------------------------------------------------------------------------

def turned(x: np.ndarray, norm: np.ndarray, config: StreamConfig, positions: np.ndarray) -> np.ndarray:
    """Index queries or keys [heads, n, indexer_head_dim]: normalised, and RoPE turns their first rope_dim numbers."""
    x = rms_norm(x, norm, config.rms_norm_eps)
    cos, sin = rope_tables(config, positions)
    return np.concatenate([apply_rope(x[..., :config.rope_dim], cos, sin), x[..., config.rope_dim:]], axis=-1)


def block_keys(keys: np.ndarray, norm: np.ndarray, config: StreamConfig, positions: np.ndarray) -> np.ndarray:
    """The keys of n blocks [n, d]: each the average of its raw keys [n * ratio, d], at its first token's position."""
    mean = keys.reshape(len(positions), config.indexer_compress_ratio, keys.shape[-1]).mean(axis=1)
    return turned(mean[None], norm, config, positions)[0]


def chosen_positions(scores: np.ndarray, length: int, config: StreamConfig) -> np.ndarray:
    """The positions that the last of `length` tokens sees, by its scores of whole blocks [length // ratio], in order.

    All of the best blocks that fit into the budget (of equal ones the first), and the tokens after the last block.
    """
    ratio = config.indexer_compress_ratio
    best = np.argsort(-scores, kind="stable")[:config.indexer_budget // ratio]
    whole = np.sort(best)[:, None] * ratio + np.arange(ratio)
    return np.concatenate([whole.reshape(-1), np.arange(len(scores) * ratio, length)])


def sparse_attention(x: np.ndarray, w: dict[str, Any], config: StreamConfig, cache: Pass, layer: int,
                     cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """gated_attention, each token to the positions that its index queries choose: x [n, hidden_size] -> that shape."""
    index = linear(x, w["index_qk_proj"]).reshape(len(x), -1, config.indexer_head_dim)  # the last one is the key
    queries = turned(index[:, :-1].swapaxes(0, 1), w["q_layernorm"], config, cache.positions)

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return together([one.look(layer, q[:, rows], k[:, rows], v[:, rows], queries[:, rows], index[rows, -1],
                                  cache.positions[rows], w["k_layernorm"]) for one, rows in cache.parts], axis=1)

    by_index: Any = SimpleNamespace(attend=attend)  # in place of Pass.attend
    return gated_attention(x, w, config, by_index, layer, cos, sin)


# ---- A layer, and the whole pass -------------------------------------------------------------------------------------

def decoder_layer(r: np.ndarray, w: dict[str, Any], config: StreamConfig, cache: Pass, layer: int,
                  cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One layer: the streams r [n, hc_count, hidden_size] -> the same shape. Writes into the caches of a pass."""
    h, flat = read_streams(r, w, "attn_hyper_connection", config)
    attend = sparse_attention if "index_qk_proj" in w else gated_attention  # an MTP head has no index
    out = gated_delta_net(h, w, config, cache, layer, GATES[config.output_gate_type]) \
        if layer in config.linear_layers else attend(h, w, config, cache, layer, cos, sin)
    r = write_streams(r, out, flat, w, "attn_hyper_connection")
    h, flat = read_streams(r, w, "mlp_hyper_connection", config)
    return write_streams(r, feed_forward(h, w, config), flat, w, "mlp_hyper_connection")


@np.errstate(over="ignore", invalid="ignore")
def run_pass(model: Model, new: Pass) -> tuple[np.ndarray, np.ndarray]:
    """The namesake of qwen3.run_pass; its hidden states are the streams, [n, hc_count * hidden_size]."""
    config, weights = model.config, model.weights  # type: Any, Any
    cos, sin = rope_tables(config, new.positions)
    found = look_up(weights["tables"], new)  # for all tokens, before the first layer
    r = np.repeat(new.x[:, None], config.hc_count, axis=1)
    for i, w in enumerate(weights["layers"]):
        if i in found:
            r = ngram_layer(r, found[i], w, config, new, i)
        r = decoder_layer(r, w, config, new, i, cos, sin)
    new.advance()
    h, _ = read_streams(r[new.wanted], weights, "hyper_connection_mixer", config)
    return linear(h, weights["lm_head"]), r.reshape(len(r), -1)


@np.errstate(over="ignore", invalid="ignore")
def guess(model: Model, states: np.ndarray, token_ids: TokenIds, cache: Any, start: int) -> tuple[np.ndarray, int]:
    """The namesake of qwen3_5.guess, with run_pass' hidden states. The head's layer attends to all it has read."""
    w, ids, config = model.weights["mtp"], np.asarray(token_ids), cache.config
    cos, sin = rope_tables(config, start + cache.reserve(len(ids)))
    following = rms_norm(embed_tokens(model, ids), w["pre_fc_norm_embedding"], config.rms_norm_eps)
    before = rms_norm(states, w["pre_fc_norm_hidden"], config.rms_norm_eps)  # all streams together
    r = linear(before.reshape(len(ids), config.hc_count, -1), w["fc_hidden"])
    r = r + linear(following, w["fc_embedding"])[:, None]
    r = decoder_layer(r, w, config, cache, 0, cos, sin)
    cache.advance(ids)
    h, _ = read_streams(r[-1:], w, "hyper_connection_mixer", config)
    return r.reshape(len(ids), -1), int(linear(h, model.weights["lm_head"]).argmax())


# ---- The cache -------------------------------------------------------------------------------------------------------

class StreamCache(HybridCache):
    """A HybridCache with an index of the layers that attend, and the last rows of n-gram layers.

    index [n attending, 1, capacity, d]: raw index keys; blocks [n attending, capacity // ratio, d]: the keys of whole
    blocks. A block that is cut is computed again. places [capacity, rope_dim / 2]: of each token, see rope_tables. In a
    snapshot, a layer's number is the key of its delta net's state, and ~number the key of its n-gram layer's rows.
    """
    config: StreamConfig
    kind = "of streams"

    def __init__(self, config: StreamConfig, max_length: int | None = None):
        super().__init__(config, max_length)
        self.index = np.empty((len(self.attending), 1, 0, config.indexer_head_dim), np.float32)
        self.blocks = np.empty((len(self.attending), 0, config.indexer_head_dim), np.float32)
        self.places = np.empty((0, config.rope_dim // 2), np.float32)
        self.n_earlier = (config.ple_conv_kernel_size - 1) * config.ngram_size  # rows that an n-gram layer keeps
        earlier = np.zeros((self.n_earlier, config.hc_count * config.hidden_size), np.float32)
        before = State(earlier, np.zeros(0, np.float32), np.zeros((0, 0), np.float32))
        self.fixed += (self.most + 2) * len(config.ple_layers) * earlier.nbytes
        self.snapshots = [Snapshot(0, self.snapshots[0].states | {~layer: before for layer in config.ple_layers}, True)]

    def reserve(self, n: int, guesses: int = 0) -> np.ndarray:
        positions = super().reserve(n, guesses)
        if self.index.shape[2] != (capacity := len(self.token_ids)):
            self.index = self._resized(self.index, capacity)
            more = capacity // self.config.indexer_compress_ratio - self.blocks.shape[1]
            self.blocks = np.pad(self.blocks, ((0, 0), (0, more), (0, 0)))
            self.places = np.pad(self.places, ((0, capacity - len(self.places)), (0, 0)))
        return positions

    def look(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, queries: np.ndarray, keys: np.ndarray,
             positions: np.ndarray, norm: np.ndarray) -> np.ndarray:
        """KVCache.attend, each new token to its chosen_positions.

        Of the index are queries [heads, n, d], raw keys [n, d] and the norm of block_keys.
        """
        i, ratio, start = self.attending.index(layer), self.config.indexer_compress_ratio, self.length
        end = start + len(keys)
        self.index[i, 0, start:end], self.places[start:end] = keys, positions.reshape(len(keys), -1)
        first, n_blocks = start // ratio, end // ratio
        if first < n_blocks:  # the new tokens complete some
            new = slice(first * ratio, n_blocks * ratio)
            self.blocks[i, first:n_blocks] = block_keys(self.index[i, 0, new], norm, self.config,
                                                        self.places[new][::ratio])
        self.k[i, :, start:end], self.v[i, :, start:end] = k, v
        k, v = self.k[i, :, :end], self.v[i, :, :end]
        plain = min(max(self.config.indexer_budget + ratio - 1 - start, 0), len(keys))  # the first tokens that see all
        out = [attention_in_blocks(q[:, :plain], k[:, :start + plain], v[:, :start + plain])] if plain else []
        for t in range(plain, len(keys)):
            length = start + t + 1
            scores = np.maximum(queries[:, t] @ self.blocks[i, :length // ratio].T, 0).sum(axis=0)
            seen = chosen_positions(scores, length, self.config)
            out.append(attention(q[:, t:t + 1], k[:, seen], v[:, seen]))
        return together(out, axis=1)

    def spread(self, layer: int, rows: np.ndarray, conv1d: np.ndarray) -> np.ndarray:
        """The convolution of an n-gram layer over new rows [n, hc_count * hidden_size] -> the same shape."""
        guesses = self.unsure(len(rows))
        history, memory, late = self.snapshots[-1].states[~layer]
        out, history = causal_convolution(rows, conv1d, history[len(late):], guesses, self.config.ngram_size)
        self.new[~layer] = State(history, memory, np.zeros((guesses, 0), np.float32))
        return out

    def rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """See KVCache.rows; also index, places, and the blocks that these positions complete."""
        whole = slice(*(n // self.config.indexer_compress_ratio for n in (start, stop)))
        return super().rows(start, stop) | {"index": self.index[:, :, start:stop], "blocks": self.blocks[:, whole],
                                            "places": self.places[start:stop]}

    def state(self, length: int) -> dict[str, np.ndarray]:
        """See HybridCache.state; also ngram0, ...: [rows, hc_count * hidden_size] of each table."""
        states = next(each.states for each in self.snapshots if each.length == length)
        return super().state(length) | {f"ngram{i}": states[~i].history for i in self.config.ple_layers}

    def go_on(self, token_ids: np.ndarray, state: dict[str, np.ndarray]) -> None:
        for i in self.config.ple_layers:
            history = state[f"ngram{i}"]
            late = np.zeros((max(len(history) - self.n_earlier, 0), 0), np.float32)
            self.new[~i] = State(history, np.zeros(0, np.float32), late)
        super().go_on(token_ids, state)

    def bytes(self, length: int, more_layers: int = 0) -> int:
        keys = len(self.attending) * (length + length // self.config.indexer_compress_ratio)
        return super().bytes(length) + 4 * (keys * self.config.indexer_head_dim + length * self.config.rope_dim // 2)


# ---- Loading ---------------------------------------------------------------------------------------------------------

GATES = {"silu": silu, "sigmoid": sigmoid}  # output_gate_type
ATTENDING = ("full_attention", "indexed_attention", "deepseek_sparse_attention", "hybrid_indexed")  # files differ


def stream_config(found: dict[str, Any], file: Path, names: Iterable[str]) -> StreamConfig:
    """The StreamConfig of Source.language. Raises InputError, as hybrid_config does."""
    config = hybrid_config(found, file, names, sparse=True, attending=ATTENDING)
    found = {"ple_embed_dim": config.hidden_size, "output_gate_type": found.get("hidden_act", "silu")} | found
    sizes: dict[str, Any] = {name: checked_whole(f"{file}: {name}", found.get(name), int(name != "seed"))
                             for name, kind in StreamConfig.__annotations__.items() if kind == "int"}
    ids = found.get("ple_layer_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) and 1 <= i <= config.num_hidden_layers for i in ids):
        raise InputError(f"{file}: ple_layer_ids = {brief(repr(ids), 80)} can't be: it counts layers from 1")
    for key, *only in (("output_gate_type", *GATES), ("indexer_kv_heads", 1)):
        if found.get(key, 1) not in only:
            raise InputError(f"{file}: {qwen3.unsupported(key, found[key], *only)}")
    if ids and not config.eos_token_ids:
        raise InputError(f"{file}: an n-gram table needs eos_token_id")
    config = StreamConfig(**asdict(config) | {"norm_topk_prob": bool(found["norm_topk_prob"])}, **sizes,
                          output_gate_type=found["output_gate_type"],
                          ple_layers=tuple(i - 1 for i in sorted({*ids})))
    if config.hc_count < 2 or config.indexer_budget % config.indexer_compress_ratio \
            or ids and (not config.ngram_heads or config.ple_embed_dim % config.ngram_heads) \
            or config.rope_dim > config.indexer_head_dim:
        raise InputError(f"{file}: no Qwen3.8-Flash-Next has these sizes: RoPE of {config.rope_dim} numbers, {sizes}")
    return config


def tensor_shapes(config: StreamConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, but for the vision tower and the index of the MTP head."""
    d, low, size, kernel = config.hidden_size, config.hc_lowrank, config.indexer_head_dim, config.ple_conv_kernel_size
    streams, n, head = config.hc_count * d, config.num_hidden_layers, f"layers.{config.num_hidden_layers}"
    shapes = {name: shape for name, shape in qwen3_5.tensor_shapes(config).items() if not name.endswith(
        ("model.norm.weight", "_layernorm.weight", f"{head}.norm.weight", f"{head}.fc.weight"))}

    def put(place: str, **parts: tuple[int, ...]) -> None:
        shapes.update({f"model.{place}.{name}.weight": shape for name, shape in parts.items()})

    def connect(place: str, **more: tuple[int, ...]) -> None:
        put(place, hc_norm=(streams,), input_mix_weight_down=(low, streams), input_mix_weight_up=(streams, low), **more)

    connect("hyper_connection_mixer")
    if config.mtp_num_hidden_layers:
        put(head, fc_embedding=(d, d), fc_hidden=(d, d), pre_fc_norm_hidden=(streams,))
        connect(f"{head}.hyper_connection_mixer")
    for i in range(n + config.mtp_num_hidden_layers):
        for half in ("attn", "mlp"):
            connect(f"layers.{i}.{half}_hyper_connection", block_inject_weight=(config.hc_count, streams))
        if i not in (*config.linear_layers, n):
            put(f"layers.{i}.self_attn.indexer", index_qk_proj=((config.indexer_n_heads + 1) * size, d),
                q_layernorm=(size,), k_layernorm=(size,))
    for table, i in enumerate(config.ple_layers):
        put(f"layers.{i}.ple", key_proj=(streams, config.ple_embed_dim), value_proj=(d, config.ple_embed_dim),
            norm_key=(streams,), norm_query=(streams,), norm_conv=(streams,), conv1d=(streams, 1, kernel))
        rows = sum(head_sizes(config, table))
        rows += -rows % config.make_ngram_vocab_size_divisible_by
        step, width = -(-rows // config.split_ngram_parts), config.ple_embed_dim // config.ngram_heads
        put(f"layers.{i}.ple.ple_embedding.ngram_embedding", **{
            f"shard_{part}": (min(step, rows - start), width) for part, start in enumerate(range(0, rows, step))})
    return shapes


def tables_of(source: Source) -> dict[int, Table]:
    """The n-gram tables, by their layers."""
    config: Any = source.config
    found, picture = dict[int, Table](), checked_whole("image_token_id", source.about.get("image_token_id", 248056), 0)
    for i, layer in enumerate(config.ple_layers):
        parts = [tensor for name, tensor in source.tensors.items()  # in the order of shapes
                 if name.startswith(f"model.layers.{layer}.ple.ple_embedding.")]
        if any(not isinstance(part, Tensor) and part.rows is None for part in parts):
            raise InputError(f"{source.path}: the n-gram table is quantized in a way that isn't supported")
        factors = np.array(multipliers(config, i), np.int64)
        sizes = np.array(head_sizes(config, i), np.int64).reshape(-1, config.heads_per_ngram)
        offsets = sizes.cumsum().reshape(sizes.shape) - sizes
        found[layer] = Table(parts, config.eos_token_ids[0], picture, factors, sizes, offsets)
    return found


def load_weights(source: Source) -> dict[str, Any]:
    """The namesake of qwen3.load_weights; a part of a layer has a name such as ple:key_proj."""
    tensors = {re.sub(r"(_connection|_mixer|ple)\.", r"\1:", name): tensor for name, tensor in source.tensors.items()
               if "ngram_embedding" not in name}
    return qwen3_5.load_weights(replace(source, tensors=tensors)) | {"tables": tables_of(source)}


FLASH = replace(SPARSE, config=stream_config, shapes=tensor_shapes, defaults=SPARSE.defaults | {
    "partial_rotary_factor": 1.0, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "hc_count": 4,
    "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8, "seed": 1234,
    "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 512},
    architectures=("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"), fast="qwen3_lib.kernels.flash",
    engine=Engine(load_weights, StreamCache, run_pass, guess=guess), layer=decoder_layer)
MODEL_TYPES = {"qwen4_exp_text": FLASH, "qwen4_exp": replace(FLASH, text=("text_config",))}


if __name__ == "__main__":
    sys.exit(qwen3.main())
