# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40"]
# ///
"""Qwen3 language models in plain NumPy, from the files that Hugging Face publishes to streamed text.

    python qwen3.py "What is the capital of France?"                        the small bundled model answers
    python qwen3.py --model Qwen3-0.6B "What is the capital of France?"     a folder with Qwen's own files

Read this file from top to bottom:

    config -> components -> KV cache -> forward -> sampling -> generation -> conversation -> loading

The data flow, with the sizes of Qwen3-0.6B (`n` is the number of tokens):

    token ids [n] -> embedding [n, 1024] -> 28 x decoder layer [n, 1024] -> RMSNorm -> lm_head -> logits [n, 151936]
    decoder layer:  x + attention(RMSNorm(x)), then  x + swiglu(RMSNorm(x)), or moe in a mixture of experts

The words:

    token            a piece of text with a number; the tokenizer cuts text into tokens
    embedding        the learned vector of a token
    residual stream  the vector x [hidden_size] of a position, to which each layer adds something
    attention head   one of several attentions side by side, each on its own head_dim numbers
    logits           a score for each token of the vocabulary to be the next one; softmax turns them into probabilities
    lm_head          the matrix from the residual stream to the logits; "tied" if it is the embedding matrix again
    prefill, decode  to run the whole prompt through the model; to run one new token
    end of text      a token the model emits when it is done

All arithmetic is float32. The tokens of a batch lie behind each other in one array; only attention tells them apart.
"""
from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C during the imports ends with one line instead of a traceback
    from qwen3_app.start import catch_ctrl_c
    catch_ctrl_c()

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from qwen3_io.arguments import (Options, SamplingOptions, TokenIds, check_sampling, checked_batch, checked_ends,
                                checked_prompt, checked_stop, checked_whole, common_prefix, is_batch, last_tokens,
                                parts_of)
from qwen3_io.checkpoint import (check_answers, check_finite, is_headless, map_weights, read_config,
                                 read_generation_config, to_float32)
from qwen3_io.errors import InputError, brief, is_whole
from qwen3_io.hub import resolve_model
from qwen3_io.progress import progress
from tokenizer_utils import (Answer, NoTokenizer, Tokenizer, inside_thought, load_tokenizer, parse_answer, stream_text,
                             until_stop_in_answer, with_think_budget)

__version__ = "0.2.0"
__all__ = ["BUNDLED", "Answer", "Completion", "Config", "Engine", "InputError", "KVCache", "Model", "Sampling",
           "TokenLogprob", "Tokenizer", "chat", "default_sampling", "forward", "generate", "generate_batch",
           "load_config", "load_model", "load_weights", "score"]

# ----------------------------------------------------------------------------------------------------------------------
# Config: the model's sizes, from config.json
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Config:
    """The fields of config.json that inference needs, under Hugging Face's names."""
    vocab_size: int  # rows of the embedding; more than the tokenizer has tokens
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the SwiGLU
    num_hidden_layers: int
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # key and value heads, each shared by a group of query heads
    head_dim: int  # independent of hidden_size: q_proj maps hidden_size to num_attention_heads * head_dim
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool  # the lm_head is the embedding again
    yarn: dict[str, float] | None = None  # the parameters of YaRN, if the checkpoint asks for it
    eos_token_ids: tuple[int, ...] = ()
    adapter: str | None = None  # the folder of a LoRA adapter, which is merged into the weights
    sparse_layers: tuple[int, ...] = ()  # the layers that are a mixture of experts; the fields below are theirs
    num_experts: int = 0
    num_experts_per_tok: int = 0  # the experts that a position goes through
    moe_intermediate_size: int = 0  # width inside the SwiGLU of an expert
    norm_topk_prob: bool = False  # the weights of the chosen experts are scaled to a sum of 1

    @property
    def context_length(self) -> int:
        """The number of positions the model can tell apart. YaRN stretches the trained number."""
        stretched = self.yarn["factor"] * self.yarn["original_max_position_embeddings"] if self.yarn else 0
        return max(self.max_position_embeddings, int(stretched))


# ----------------------------------------------------------------------------------------------------------------------
# Components, in the order of the data flow. Each is a function of arrays.
# ----------------------------------------------------------------------------------------------------------------------

def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [..., inputs] times weight [outputs, inputs] transposed -> [..., outputs]. Nearly all time is spent here."""
    rows = x.reshape(-1, x.shape[-1]) @ weight.T  # one product for the whole batch, so that each weight is read once
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., d] scaled to a root mean square of 1, then by weight [d].

    Keeps the numbers in range, however many layers have added to x. Source: Zhang & Sennrich 2019 (RMSNorm).
    """
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    x = x * (1 / np.sqrt(mean_square + np.float32(eps)))
    x *= weight
    return x


def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary position embedding: turns each pair (i, i + head_dim / 2) of x [heads, n, head_dim] by its angle.

    Attention by itself knows no order. With q turned by angles in proportion to its position, and k likewise, q·k
    depends on the distance of the two positions, and on nothing else of them.
    Qwen3 pairs the first half of a head with the second ("half-split"). The paper (Su et al. 2021) pairs neighbours;
    weights made for one layout don't work with the other.
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_tables(config: Config, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every angle at positions [n] -> two arrays [n, head_dim / 2]."""
    frequencies, factor = rope_frequencies(config)
    angles = positions[:, None].astype(np.float32) * frequencies
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def rope_frequencies(config: Config) -> tuple[np.ndarray, float]:
    """(radians per position for each pair of dimensions, [head_dim / 2]; a factor for cos and sin).

    Pair i turns by theta ** (-2i / head_dim) per position: the first pairs quickly, for near positions, the last ones
    slowly, for distant ones. YaRN (Peng et al. 2023) divides the frequency of the slow pairs, which made no full turn
    within the context of the training, by `factor`, keeps the quick ones, and blends the pairs between.
    """
    d, theta, yarn = config.head_dim, config.rope_theta, config.yarn
    # The power in float64 and the reciprocal in float32 give the reference's bits; at position 6,000 a float32 power
    # would be off by 2e-4 in the logits.
    frequencies = 1 / (theta ** (np.arange(0, d, 2) / d)).astype(np.float32)
    if yarn is None:
        return frequencies, 1.0
    # The (fractional) pairs that make so many turns within the original context; d - 1 and 0.001 as in the reference.
    quick, slow = (d * math.log(yarn["original_max_position_embeddings"] / (yarn[turns] * 2 * math.pi))
                   / (2 * math.log(theta)) for turns in ("beta_fast", "beta_slow"))
    low, high = max(math.floor(quick), 0), min(math.ceil(slow), d - 1)
    ramp = np.clip((np.arange(d // 2, dtype=np.float32) - low) / np.float32(max(high - low, 0.001)), 0, 1)
    return frequencies / np.float32(yarn["factor"]) * ramp + frequencies * (1 - ramp), yarn["attention_factor"]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal grouped-query attention of the newest n positions to all positions so far (Ainslie et al. 2023).

    Each position asks with its query q, and each position so far answers with its key k. The score q·k sets the weight
    of that position's value v: out = softmax(q kᵀ / sqrt(head_dim)) v, where softmax(s) = exp(s) / sum(exp(s)) turns
    scores into weights that sum to 1, and the root keeps the spread of the scores near 1 for any head_dim.
    "Causal": a position sees itself and the positions before it.

    q: [n_heads, n, head_dim]; k, v: [n_kv_heads, length, head_dim], the new positions last -> [n_heads, n, head_dim]
    """
    n_heads, n, head_dim = q.shape
    n_kv_heads, length = k.shape[:2]
    # Query head h uses KV head h // group. The heads of a group are neighbours, so one reshape stacks them as rows of
    # one product, and K and V are not repeated in memory.
    group = n_heads // n_kv_heads
    q = (q * np.float32(head_dim ** -0.5)).reshape(n_kv_heads, group * n, head_dim)
    scores = q @ k.swapaxes(-1, -2)  # [n_kv_heads, group * n, length]
    if n > 1:  # a single newest token sees everything and needs no mask
        future = np.triu(np.ones((n, n), bool), 1)
        np.copyto(scores.reshape(n_kv_heads, group, n, length)[..., -n:], -np.inf, where=future)
    scores -= scores.max(axis=-1, keepdims=True)  # does not change the softmax, and exp can't overflow
    np.exp(scores, out=scores)
    out = scores @ v / scores.sum(axis=-1, keepdims=True)  # divided after the product, where there is less to divide
    return out.reshape(n_heads, n, head_dim)


QUERIES = 128  # positions whose attention is computed together
MAX_SCORES = 2**24  # attention scores in memory at a time (64 MiB): with very long contexts, fewer positions together


def attention_in_blocks(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """attention() in blocks of queries, skipping keys after a block's last query."""
    (n_heads, n), length = q.shape[:2], k.shape[1]
    block = max(1, min(QUERIES, MAX_SCORES // (n_heads * length)))
    blocks = [(i, length - n + min(i + block, n)) for i in range(0, n, block)]  # (first query, keys that the last sees)
    return np.concatenate([attention(q[:, i:i + block], k[:, :seen], v[:, :seen]) for i, seen in blocks], axis=1)


def swiglu(x: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray) -> np.ndarray:
    """down(silu(gate(x)) * up(x)), x [..., hidden_size] -> the same shape. Source: Shazeer 2020 (GLU variants).

    Attention moves information between positions; SwiGLU works on each position alone. silu(g) = g / (1 + exp(-g)) is
    a smooth switch: for each inner dimension it sets the share of up(x) that passes.
    """
    # OpenBLAS is 1.15 times as fast at W @ columns as at rows @ W.T, so the rows become columns once.
    columns = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T)
    hidden = gate_proj @ columns  # [intermediate_size, rows]
    switch = np.exp(-hidden)  # may overflow to inf: then silu is -0, which is right
    switch += 1
    hidden /= switch
    hidden *= np.matmul(up_proj, columns, out=switch)
    return (down_proj @ hidden).T.reshape(x.shape)


def moe(x: np.ndarray, gate: np.ndarray, experts: dict[int, dict[str, np.ndarray]], config: Config) -> np.ndarray:
    """Mixture of experts, x [..., hidden_size] -> the same shape. Source: Shazeer et al. 2017.

    Each expert is a SwiGLU. The router, gate [num_experts, hidden_size], gives a position a probability for each. The
    num_experts_per_tok most likely experts are added in proportion to it: many weights, but few are read per token.
    """
    rows = x.reshape(-1, x.shape[-1])
    probabilities = np.exp(log_softmax(linear(rows, gate)))  # [rows, num_experts]
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :config.num_experts_per_tok]
    weights = np.take_along_axis(probabilities, chosen, axis=-1)  # [rows, num_experts_per_tok]
    if config.norm_topk_prob:
        weights /= weights.sum(axis=-1, keepdims=True)
    out = np.zeros_like(rows)
    for expert in np.unique(chosen):  # each expert once, for all positions that chose it
        row, rank = np.nonzero(chosen == expert)
        out[row] += weights[row, rank, None] * swiglu(rows[row], **experts[expert])
    return out.reshape(x.shape)


def decoder_layer(x: np.ndarray, w: dict[str, Any], config: Config, cache: KVCache, layer: int,
                  parts: list[tuple[int, slice]], cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One layer: x [n, hidden_size] -> the same shape. Writes the new keys and values into the cache.

    `parts` says whose tokens these are: (a sequence of the cache, its rows of x).
    """
    eps, n = config.rms_norm_eps, len(x)
    h = rms_norm(x, w["input_layernorm"], eps)
    q = linear(h, w["q_proj"]).reshape(n, -1, config.head_dim)  # [n, n_heads, head_dim]
    k = linear(h, w["k_proj"]).reshape(n, -1, config.head_dim)  # [n, n_kv_heads, head_dim]
    v = linear(h, w["v_proj"]).reshape(n, -1, config.head_dim).swapaxes(0, 1)
    q = apply_rope(rms_norm(q, w["q_norm"], eps).swapaxes(0, 1), cos, sin)  # QK-Norm: each head by itself, before RoPE
    k = apply_rope(rms_norm(k, w["k_norm"], eps).swapaxes(0, 1), cos, sin)  # [n_kv_heads, n, head_dim]
    out = np.concatenate([attention_in_blocks(q[:, part], *cache.append(layer, sequence, k[:, part], v[:, part]))
                          for sequence, part in parts], axis=1)
    x = x + linear(out.swapaxes(0, 1).reshape(n, -1), w["o_proj"])  # heads side by side: n_heads * head_dim
    h = rms_norm(x, w["post_attention_layernorm"], eps)
    return x + (moe(h, w["gate"], w["experts"], config) if "experts" in w else
                swiglu(h, w["gate_proj"], w["up_proj"], w["down_proj"]))


# ----------------------------------------------------------------------------------------------------------------------
# KV cache: the keys and values of all positions so far
#
# A token sees only the tokens before it. So nothing computed for a position ever changes, and later tokens need only
# its k and v. With these kept, a new token costs as much as a prompt of one token. The price is
# 2 * layers * n_kv_heads * head_dim * 4 bytes per position: 229 kB in Qwen3-0.6B.
# ----------------------------------------------------------------------------------------------------------------------

class KVCache:
    """The keys and values of `batch` sequences, each one array [n_layers, batch, n_kv_heads, capacity, head_dim].

    Of sequence i, lengths[i] positions are filled. A full cache grows to a quarter more than needed, plus 64, but at
    most to `max_length` positions. `token_ids` [batch, capacity] are the tokens, for comparison with a later prompt.
    """

    form = "f32"  # the number format; faster engines have caches with smaller ones

    def __init__(self, config: Config, max_length: int | None = None, batch: int = 1):
        self.max_length = config.context_length if max_length is None else max_length
        if not is_whole(self.max_length, 1) or not is_whole(batch, 1):
            raise InputError(f"a KV cache has 1 or more positions and rows, not {brief(max_length)} and {brief(batch)}")
        self.config = config
        self.lengths, self.n_uses = np.zeros(batch, np.int64), 0  # n_uses: how many answers `reuse` gave it to
        self.k = np.empty((config.num_hidden_layers, batch, config.num_key_value_heads, 0, config.head_dim), np.float32)
        self.v = np.empty_like(self.k)
        self.token_ids = np.empty((batch, 0), np.int64)

    @property
    def length(self) -> int:
        """The number of filled positions, of the longest sequence."""
        return int(self.lengths.max())

    def reserve(self, sequences: np.ndarray) -> np.ndarray:
        """Makes room for tokens [n] of these sequences, in order -> their positions [n], behind the filled ones.

        Raises InputError beyond max_length.
        """
        counts = np.bincount(sequences, minlength=len(self.lengths))
        positions = np.arange(len(sequences)) + np.repeat(self.lengths - counts.cumsum() + counts, counts)
        needed = int((self.lengths + counts).max())
        if needed > self.max_length:
            raise InputError(f"{needed} positions don't fit into a context of {self.max_length}")
        # One after the other: only one old array lies beside its copy. Each by itself: Ctrl-C may come in between.
        if needed > self.k.shape[3]:
            self.k = self._resized(self.k, needed)
        if needed > self.v.shape[3]:
            self.v = self._resized(self.v, needed)
        if needed > self.token_ids.shape[1]:
            self.token_ids = np.pad(self.token_ids, ((0, 0), (0, self.k.shape[3] - self.token_ids.shape[1])))
        return positions

    def _resized(self, old: np.ndarray, needed: int) -> np.ndarray:
        capacity = min(needed + needed // 4 + 64, self.max_length)
        new = np.empty((*old.shape[:3], capacity, old.shape[4]), old.dtype)
        new[..., :self.length, :] = old[..., :self.length, :]
        return new

    def append(self, layer: int, sequence: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Writes k, v [n_kv_heads, n, head_dim] behind the filled part -> all keys, all values of the sequence.

        The new positions count only after `advance`, so an interruption leaves the cache unchanged.
        """
        start, end = self.lengths[sequence], self.lengths[sequence] + k.shape[1]
        self.k[layer, sequence, :, start:end] = k
        self.v[layer, sequence, :, start:end] = v
        return self.k[layer, sequence, :, :end], self.v[layer, sequence, :, :end]

    def advance(self, sequences: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Counts new tokens [n] of these sequences, in the order of their positions, as filled."""
        self.token_ids[sequences, positions] = token_ids
        self.lengths[sequences] = positions + 1  # of several, the last one counts

    def common_prefix(self, token_ids: np.ndarray, sequence: int = 0) -> int:
        """How many positions of a sequence hold the first of the tokens `token_ids` [n]."""
        return common_prefix(self.token_ids[sequence, :self.lengths[sequence]], token_ids)

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forgets all positions of a sequence from `length` on."""
        if not is_whole(length, 0) or length > self.lengths[sequence]:
            raise InputError(f"a cache of {self.lengths[sequence]} positions can't be cut to {brief(length)}")
        self.lengths[sequence] = length

    def copy(self, sequence: int, source: KVCache, source_sequence: int, n: int) -> None:
        """Makes a sequence a copy of the first n positions of another one, in this cache or in another of its kind."""
        if (type(source), source.config) != (type(self), self.config) or n > source.lengths[source_sequence]:
            raise InputError(f"{n} positions can't be copied from this cache: it has fewer, or is of another kind")
        self.lengths[sequence] = 0
        positions = self.reserve(np.full(n, sequence))
        self.k[:, sequence, :, :n] = source.k[:, source_sequence, :, :n]
        self.v[:, sequence, :, :n] = source.v[:, source_sequence, :, :n]
        self.advance(np.full(n, sequence), positions, source.token_ids[source_sequence, :n])


# ----------------------------------------------------------------------------------------------------------------------
# forward: token ids in, logits out
# ----------------------------------------------------------------------------------------------------------------------

CHUNK = 512  # prompt tokens that go through the layers together: enough for full speed of the matrix products


@np.errstate(over="ignore", invalid="ignore")  # NaN in the weights is reported once it has reached the logits
def forward(model: Model, token_ids: TokenIds, cache: KVCache, all_logits: bool = False) -> np.ndarray:
    """Runs new tokens through the model, after the tokens in the cache, and adds them to the cache.

    token_ids: [n]; for a batch a list of such, one for each sequence of the cache, [] for one that waits. Prefill is a
    call with the whole prompt, decoding one with one token.
    -> the logits after the last token, float32 [vocab_size]; of a batch [number of sequences with new tokens,
    vocab_size]. With `all_logits`, those after each token: [n, vocab_size], the sequences of a batch behind each other.
    Raises InputError for ids out of range, for the cache of another model, and when the context is full.
    """
    x = hidden_states(model, token_ids, cache)
    x = x if all_logits else x[last_tokens(token_ids)]  # the head costs several layers: last tokens only
    logits = linear(x, model.weights["lm_head"])
    return logits if all_logits or is_batch(token_ids) else logits[0]


@np.errstate(over="ignore", invalid="ignore")
def hidden_states(model: Model, token_ids: TokenIds, cache: KVCache) -> np.ndarray:
    """forward without the head -> the residual stream after the last norm, float32 [n, hidden_size]."""
    config, w = model.config, model.weights
    ids, sequences = checked_batch(token_ids, cache, config, np.float32)
    positions, out = cache.reserve(sequences), np.empty((len(ids), config.hidden_size), np.float32)
    for start in range(0, len(ids), CHUNK):
        now = slice(start, start + CHUNK)
        cos, sin = rope_tables(config, positions[now])
        x = w["embed_tokens"][ids[now]]  # [CHUNK, hidden_size]
        parts = parts_of(sequences[now])
        for i, layer in enumerate(w["layers"]):
            x = decoder_layer(x, layer, config, cache, i, parts, cos, sin)
        cache.advance(sequences[now], positions[now], ids[now])
        out[now] = rms_norm(x, w["norm"], config.rms_norm_eps)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Sampling: from logits to the next token
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token. Order as in transformers: penalties, temperature, top-k, top-p, min-p."""
    temperature: float = 0.0  # divides the logits: below 1, likely tokens get likelier; 0 is greedy decoding
    top_k: int = 0  # only the k most likely tokens; 0 is off
    top_p: float = 1.0  # only the most likely tokens that together reach this probability
    min_p: float = 0.0  # only tokens at least this fraction as likely as the most likely one
    repetition_penalty: float = 1.0  # divides (negative: multiplies) the logits of tokens in the prompt or the answer
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted once for each time the token is in the answer

    def __post_init__(self) -> None:
        check_sampling(asdict(self))

    def updated(self, **changes: float | None) -> Sampling:
        """The same with the given values; None leaves a value unchanged. Raises InputError for unknown names."""
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        check_sampling(given)
        return replace(self, **given)


def penalize(logits: np.ndarray, sampling: Sampling, prompt_counts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Logits [vocab_size] after the penalties; the counts [vocab_size] are of tokens in the prompt, in the answer."""
    if sampling.repetition_penalty != 1:
        penalty, seen = np.float32(sampling.repetition_penalty), prompt_counts + counts > 0
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.presence_penalty or sampling.frequency_penalty:
        presence, frequency = np.float32(sampling.presence_penalty), np.float32(sampling.frequency_penalty)
        logits = logits - presence * (counts > 0) - frequency * counts
    return logits


def top_k_indices(x: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest of x [n], and of all that equal the k-th (as in transformers); in no particular order.

    Read x as a table of 64 rows. The k largest of its columns' maxima are k elements of x, so the k-th largest of x is
    at least the smallest of these. Only the elements that reach it, a few more than k, are partitioned: 0.06 ms for
    151,936 logits and k = 20, where partitioning all of them takes 0.94 ms.
    """
    columns = len(x) // 64
    if columns < k:
        return np.flatnonzero(x >= np.partition(x, -k)[-k])
    maxima = x[:64 * columns].reshape(64, columns).max(axis=0)
    indices = np.flatnonzero(x >= np.partition(maxima, -k)[-k])
    return indices[x[indices] >= np.partition(x[indices], -k)[-k]]


def running_sum(x: np.ndarray) -> np.ndarray:
    """The sum of x [n] up to each element, [n]. One float32 sum over 151,936 small numbers would lose most of them."""
    side = math.isqrt(max(len(x) - 1, 0)) + 1
    sums = np.cumsum(np.pad(x, (0, side * side - len(x))).reshape(side, side), axis=1)  # along rows of a square
    sums[1:] += np.cumsum(sums[:-1, -1])[:, None]
    return sums.reshape(-1)[:len(x)]


def top_p_indices(x: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the fewest of x [n], log-probabilities up to a constant, that together reach top_p. (Holtzman 2019)

    The 1024 most likely tokens nearly always reach it, so all of them are sorted only when these don't.
    """
    total = np.exp(x).sum()
    for k in (min(1024, len(x)), len(x)):
        order = top_k_indices(x, k)
        order = order[np.argsort(-x[order], kind="stable")]
        probabilities = np.exp(x[order]) / total
        before = running_sum(probabilities) - probabilities  # the probability of all more likely tokens together
        kept = max(int(np.count_nonzero(before < np.float32(top_p))), 1)
        if kept < len(order):
            break
    return order[:kept]


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that temperature, top-k, top-p and min-p leave of logits [vocab_size] -> (ids, probabilities)."""
    x = (logits - logits.max()) / np.float32(sampling.temperature)
    ids = top_k_indices(x, sampling.top_k) if 0 < sampling.top_k < len(x) else np.arange(len(x))
    if sampling.top_p < 1:
        ids = ids[top_p_indices(x[ids], sampling.top_p)]
    if sampling.min_p > 0:
        ids = ids[x[ids] >= math.log(sampling.min_p)]  # the most likely token has x = 0
    probabilities = np.exp(x[ids])
    return ids, probabilities / probabilities.sum()


def sample(logits: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """Draws a token id from logits [vocab_size]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ids, probabilities = candidates(logits, sampling)
    # A race: a token arrives after an exponentially distributed time, and is the first in proportion to its rate. The
    # times are drawn as float64, because one float32 in 8 million is 0.
    return int(ids[(probabilities / rng.standard_exponential(len(ids)).astype(np.float32)).argmax()])


Draw = Callable[..., int]  # draws the next token from logits [vocab_size]
Forward = Callable[..., np.ndarray]  # has the parameters of `forward`


def sampler(model: Model, prompt: np.ndarray, sampling: Sampling, seed: int | None) -> Draw:
    """A function that draws a sequence's next token, or takes the one given, and remembers it for the penalties."""
    rng = np.random.default_rng(seed)
    prompt_counts = np.bincount(prompt, minlength=model.config.vocab_size).astype(np.float32)
    counts = np.zeros(model.config.vocab_size, np.float32)

    def draw(logits: np.ndarray, forced: int | None = None) -> int:
        check_finite(logits, model.path, model.engine.overflow)
        token = sample(penalize(logits, sampling, prompt_counts, counts), sampling, rng) if forced is None else forced
        counts[token] += 1
        return token

    return draw


# ----------------------------------------------------------------------------------------------------------------------
# Generation: token ids in, an iterator of token ids out
# ----------------------------------------------------------------------------------------------------------------------

def generate(model: Model, token_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None,
             seed: int | None = None, eos_token_ids: Iterable[int] | None = None, cache: KVCache | None = None,
             forward: Forward | None = None, draw: Draw | None = None,
             observe: Callable[[int, np.ndarray], None] | None = None,
             **sampling: Unpack[SamplingOptions]) -> Iterator[int]:
    """Continues the prompt `token_ids` [n], one token id at a time.

    Ends at an end-of-text token (which is not yielded), after max_new_tokens, or when the context is full;
    `eos_token_ids=()` never ends early. `sampling` takes the fields of Sampling; defaults come from the model's
    generation_config.json. The same seed gives the same tokens.

    A `cache` filled by an earlier call is cut back to the longest common prefix with the prompt, then belongs to this
    call: a conversation costs only its new tokens. `forward` and `draw` take the place of the model's forward (see
    Lookup) and of the sampler (see with_think_budget). `observe(token, logits [vocab_size])` is called with each token
    and the model's logits. Raises InputError, before anything is computed, for ids and values out of range.
    """
    prompt = checked_prompt(token_ids, model.config.vocab_size)
    limit, ends = answer_limit(model, len(prompt), max_new_tokens), checked_ends(eos_token_ids, model.eos_token_ids)
    settings, seed = model.sampling.updated(**sampling), checked_whole("seed", seed, 0)
    next_token = sampler(model, prompt, settings, seed) if draw is None else draw
    run = model.engine.forward if forward is None else forward
    cache = model.engine.new_cache(model.config) if cache is None else cache
    remaining, turn = reuse(cache, prompt, model.config), cache.n_uses

    def tokens() -> Iterator[int]:
        new: Sequence[int] | np.ndarray = remaining
        for _ in range(limit):
            if cache.n_uses != turn:
                raise InputError("the cache was given to another answer meanwhile; take one for each")
            logits = run(model, new, cache)  # first the whole prompt, then one token at a time
            token = next_token(logits)
            if token in ends:
                return
            if observe is not None:
                observe(token, logits)
            yield token
            new = [token]

    return tokens()


def reuse(cache: KVCache, prompt: np.ndarray, config: Config) -> np.ndarray:
    """Cuts the cache back to its common prefix with the prompt [n] -> the tokens that remain to be computed."""
    if cache.config != config or len(cache.lengths) != 1:
        raise InputError("the cache given belongs to another model, or to a batch")
    cache.truncate(min(cache.common_prefix(prompt), len(prompt) - 1))  # the last token's logits say how to go on
    cache.n_uses += 1
    return prompt[cache.length:]


def answer_limit(model: Model, prompt_length: int, max_new_tokens: int | None) -> int:
    """The largest number of new tokens: as asked for, else the checkpoint's limit; at most the room in the context."""
    check_answers(model.path, model.embeds)
    wanted = model.max_new_tokens if max_new_tokens is None else checked_whole("max_new_tokens", max_new_tokens, 1)
    room = model.config.context_length - prompt_length
    if room < 1:
        raise InputError(f"the prompt has {prompt_length} tokens and leaves no room for an answer: "
                         f"the model's context is {model.config.context_length}")
    return room if wanted is None else min(wanted, room)


def generate_batch(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int | None = None,
                   seed: int | None = None, eos_token_ids: Iterable[int] | None = None,
                   **sampling: Unpack[SamplingOptions]) -> list[list[int]]:
    """Continues several prompts together, so that each weight is read once for all of them -> the new ids of each.

    Takes the options of `generate`, and gives the same answers up to rounding: the i-th prompt draws with seed + i.
    """
    checked = [checked_prompt(prompt, model.config.vocab_size) for prompt in prompts]
    limits = [answer_limit(model, len(prompt), max_new_tokens) for prompt in checked]
    settings, ends = model.sampling.updated(**sampling), checked_ends(eos_token_ids, model.eos_token_ids)
    checked_whole("seed", seed, 0)
    draws = [sampler(model, prompt, settings, None if seed is None else seed + i) for i, prompt in enumerate(checked)]
    longest = max((len(prompt) + limit for prompt, limit in zip(checked, limits)), default=1)
    cache = model.engine.new_cache(model.config, longest, max(len(checked), 1))
    answers: list[list[int]] = [[] for _ in checked]
    new = [prompt.tolist() for prompt in checked]  # the tokens to be computed next, of each sequence
    while running := [i for i, ids in enumerate(new) if ids]:
        for i, logits in zip(running, model.engine.forward(model, new, cache)):
            token, new[i] = draws[i](logits), []
            if token not in ends:
                answers[i].append(token)
                new[i] = [token] if len(answers[i]) < limits[i] else []
    return answers


# ----------------------------------------------------------------------------------------------------------------------
# Conversation: from messages to text, and the likelihood of a text
# ----------------------------------------------------------------------------------------------------------------------

class TokenLogprob(NamedTuple):
    """The log-probability of a token (natural logarithm), and the most likely tokens in its place."""
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # token ids and their logprobs, the most likely first


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logits [..., vocab_size] -> natural logarithms of the probabilities, the same shape."""
    x = logits - logits.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


class Completion(Iterator[str]):
    """An answer while it is generated: iterate over it for its text, piece by piece, or call `finish` for all of it.

    `prompt_ids` [n]; the state so far: `token_ids`, `text`, `logprobs` (if asked for), `times`, the start and the
    arrival of each token in seconds; `cached_tokens`, the prompt tokens found in the cache; `finish_reason`: None
    until the last token, then "stop" (it ended by itself or at a stop text) or "length" (it was cut off).
    """

    def __init__(self, model: Model, token_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None,
                 stop: str | Sequence[str] = (), logprobs: int | None = None, cache: KVCache | None = None,
                 seed: int | None = None, eos_token_ids: Iterable[int] | None = None, think_budget: int | None = None,
                 lookup: int | None = None, **sampling: Unpack[SamplingOptions]):
        """Takes the options of `generate`, and

        stop: texts that end the answer and are not part of it; they may span tokens, and don't apply to a thought
        logprobs: record the logprob of each token and of this many alternatives, before temperature and penalties
        think_budget: close a thought after this number of tokens
        lookup: guess up to this number of tokens from the earlier text and check them in one pass; the same answer
        """
        self.model, self.prompt_ids = model, checked_prompt(token_ids, model.config.vocab_size)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self._n_top = checked_whole("logprobs", logprobs, 0)
        self._limit = answer_limit(model, len(self.prompt_ids), max_new_tokens)
        self._texts: list[str] = []
        stop, tokenizer = checked_stop(stop), model.tokenizer
        settings, seed = model.sampling.updated(**sampling), checked_whole("seed", seed, 0)
        draw = sampler(model, self.prompt_ids, settings, seed)
        if (budget := checked_whole("think_budget", think_budget, 0)) is not None:
            draw = with_think_budget(draw, tokenizer, self.prompt_ids, budget)
        forward = model.engine.forward
        if n_guesses := checked_whole("lookup", lookup, 0):
            from qwen3_lookup import Lookup
            forward = Lookup(forward, self.prompt_ids, n_guesses)
        cache = model.engine.new_cache(model.config) if cache is None else cache
        tokens = generate(model, self.prompt_ids, max_new_tokens, eos_token_ids=eos_token_ids, cache=cache,
                          forward=forward, draw=draw, observe=None if logprobs is None else self._record)
        self.cached_tokens = cache.length
        self.times = [time.perf_counter()]
        pieces = stream_text(tokenizer, self._counted(tokens))
        self._pieces = until_stop_in_answer(pieces, stop, self.think_open_in_prompt) if stop else pieces

    def _record(self, token: int, logits: np.ndarray) -> None:
        x = log_softmax(logits)
        best = top_k_indices(x, min(self._n_top, len(x))) if self._n_top else np.empty(0, int)
        best = best[np.argsort(-x[best], kind="stable")][:self._n_top]
        self.logprobs.append(TokenLogprob(token, float(x[token]), [(int(i), float(x[i])) for i in best]))

    def _counted(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            self.token_ids.append(token)
            self.times.append(time.perf_counter())
            if len(self.token_ids) == self._limit:
                self.finish_reason = "length"
            yield token
        self.finish_reason = self.finish_reason or "stop"

    def step(self) -> str:
        """The text that one more token completes, maybe ""; raises StopIteration at the end."""
        try:
            piece = next(self._pieces)
        except StopIteration:  # a stop text has cut the text, or generation has ended
            cut = self.text != self.model.tokenizer.decode(self.token_ids, skip_special_tokens=True)
            self.finish_reason = "stop" if cut else self.finish_reason or "stop"
            raise
        self._texts.append(piece)
        return piece

    def __next__(self) -> str:
        while not (piece := self.step()):
            pass
        return piece

    def finish(self) -> Completion:
        """Generates the rest -> itself."""
        for _ in self:
            pass
        return self

    def __str__(self) -> str:
        """The whole text, after generating the rest: `print(chat(model, "Hello!"))`."""
        return self.finish().text

    def __repr__(self) -> str:
        return f"<Completion: {len(self.token_ids)} tokens, finish_reason={self.finish_reason!r}, text={self.text!r}>"

    @property
    def text(self) -> str:
        """The text so far, thoughts and tool calls included."""
        return "".join(self._texts)

    @property
    def think_open_in_prompt(self) -> bool:
        """True if the prompt ends within a thought, so that the text begins with its rest."""
        return inside_thought(self.model.tokenizer, self.prompt_ids)

    @property
    def answer(self) -> Answer:
        """The text so far, taken apart into reasoning, content and tool_calls."""
        return parse_answer(self.text, self.think_open_in_prompt)


# Recommended by Qwen's authors for answers without thinking; generation_config.json holds the values for thinking.
WITHOUT_THINKING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}


def default_sampling(model: Model, enable_thinking: bool | None) -> Sampling:
    """The default settings of an answer. With enable_thinking=False, a model that samples gets WITHOUT_THINKING."""
    unthinking = enable_thinking is False and model.sampling.temperature > 0
    return model.sampling.updated(**WITHOUT_THINKING) if unthinking else model.sampling


def chat(model: Model, messages: str | Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
         enable_thinking: bool | None = None, **options: Unpack[Options]) -> Completion:
    """The answer to a conversation, or to a single question given as a text.

    messages: {"role": "system" | "user" | "assistant" | "tool", "content": ...} objects as in OpenAI's API; `tools`
    are JSON schemas. enable_thinking: None leaves it to the template. `options` are those of Completion; defaults of
    the sampling come from default_sampling. Raises InputError, before anything is computed, for unknown options,
    messages that can't be rendered, and values out of range.
    """
    check_answers(model.path, model.embeds)
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    text = model.tokenizer.apply_chat_template(messages, tools, enable_thinking=enable_thinking, join_text_parts=True)
    given = {name: value for name, value in options.items() if value is not None}
    sampling = asdict(default_sampling(model, enable_thinking))
    return Completion(model, model.tokenizer.encode(text), **(sampling | given))


SCORED = 128  # positions whose logits are in memory at a time: 78 MB with a vocabulary of 151,936


def score(model: Model, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The logprob of each token of a text [n] but the first, given those before it -> [n - 1], natural logarithms.

    Perplexity is exp of minus their mean. Raises InputError for ids out of range and for too long a text.
    """
    check_answers(model.path, model.embeds)
    ids = checked_prompt(token_ids, model.config.vocab_size)
    if len(ids) > model.config.context_length:
        raise InputError(f"the text has {len(ids)} tokens; the model's context is {model.config.context_length}")
    cache, logprobs = model.engine.new_cache(model.config, len(ids)), [np.empty(0, np.float32)]
    for start in range(0, len(ids) - 1, SCORED):
        now, following = ids[start:start + SCORED], ids[start + 1:start + SCORED + 1]
        logits = model.engine.forward(model, now, cache, all_logits=True)  # [SCORED, vocab_size]
        check_finite(logits, model.path, model.engine.overflow)
        x = log_softmax(logits)
        logprobs.append(x[np.arange(len(following)), following])
    return np.concatenate(logprobs)


# ----------------------------------------------------------------------------------------------------------------------
# Loading a model
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Engine:
    """The parts that a faster implementation replaces; sampling, generation and the command line exist once.

    load_weights(path, config) -> model.weights, in any form the engine's forward wants
    new_cache(config, max_length, batch) -> a KVCache, or something with the same methods
    forward(model, token_ids, cache, all_logits) -> logits
    """
    load_weights: Callable[[Path, Config], Any]
    new_cache: Callable[..., KVCache]
    forward: Forward
    hidden_states: Forward | None = None  # (model, token_ids, cache); these two are for qwen3_embed.py
    head_rows: Forward | None = None  # (model, token_ids) -> their rows of the lm_head, [n, hidden_size]
    maps: bool = False  # load_weights only maps files: their pages arrive while the tokenizer loads
    overflow: str = "the computation itself has overflowed float32"  # if logits aren't finite, but all weights are


NUMPY: Engine = Engine(lambda path, config: load_weights(path, config), KVCache, forward, hidden_states,
                       lambda model, token_ids: model.weights["lm_head"][token_ids])


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint: its folder, config, weights, tokenizer, its authors' defaults, and the engine."""
    path: Path
    config: Config
    weights: Any
    tokenizer: Tokenizer
    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int | None
    engine: Engine
    embeds: bool = False  # an embedding model, which gives vectors and can't answer: see qwen3_embed.py


HERE = Path(__file__).resolve().parent
BUNDLED = HERE / ("qwen3/demo" if (HERE / "qwen3").is_dir() else "demo")  # the small model; installed, in qwen3/


def load_model(name: str | Path, engine: Engine = NUMPY, offline: bool = False, tokenizer: bool = True,
               adapter: str | Path | None = None) -> Model:
    """Loads a folder with config.json, tokenizer.json and *.safetensors as published on Hugging Face.

    `name` may also be the name of a model on the hub (Qwen/Qwen3-0.6B, or 0.6B for short): it is taken from the hub's
    cache or, unless `offline`, downloaded into it. With tokenizer=False, the folder needs no tokenizer, and the model
    reads and writes only token ids. `adapter` is the folder of a LoRA adapter.
    Raises InputError, one line that names the file, for anything missing, damaged or unsupported.
    """
    path = resolve_model(str(name), offline)
    config = load_config(path, adapter)
    sampling, eos_token_ids, max_new_tokens = read_generation_config(path)
    mapped = engine.load_weights(path, config) if engine.maps else None
    text_side = load_tokenizer(path) if tokenizer else NoTokenizer(path)
    embeds = is_headless(path) or tokenizer and bool(text_side.ending)
    return Model(path, config, mapped or engine.load_weights(path, config), text_side, Sampling(**sampling),
                 eos_token_ids or config.eos_token_ids, max_new_tokens, engine, embeds)


def load_config(path: Path, adapter: str | Path | None = None) -> Config:
    """The config of the model folder `path`. Raises InputError, see read_config."""
    return Config(**read_config(path, adapter))


def load_weights(path: Path, config: Config) -> dict[str, Any]:
    """The weights of a model folder in float32, by short names; w["layers"][i] holds those of one decoder layer."""
    stored = map_weights(path, asdict(config))
    weights: dict[str, Any] = {"layers": [{} for _ in range(config.num_hidden_layers)]}
    for name, tensor in progress(stored.items(), "loading", unit=" tensors"):
        parts = name.split(".")  # model.layers.7.self_attn.q_proj.weight becomes layers[7]["q_proj"]
        place = weights["layers"][int(parts[2])] if parts[1] == "layers" else weights
        if "experts" in parts:  # model.layers.7.mlp.experts.3.up_proj.weight becomes layers[7]["experts"][3]["up_proj"]
            place = place.setdefault("experts", {}).setdefault(int(parts[5]), {})
        place[parts[-2]] = to_float32(tensor)
    weights.setdefault("lm_head", weights["embed_tokens"])
    # glibc keeps freed blocks up to the largest one freed so far; with no fresh pages per array, prefill is 1.12 x.
    np.empty(2**25 - 2**16, np.uint8)
    return weights


if __name__ == "__main__":
    from qwen3_app.cli import main
    raise SystemExit(main())
