# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "prompt_toolkit>=3.0.40",
#                 "threadpoolctl>=3.5"]
# ///
"""Qwen3 language models in plain NumPy, from the files that Hugging Face publishes to streamed text.

    python qwen3.py "What is the capital of France?"                        the small bundled model answers
    python qwen3.py --model Qwen3-0.6B "What is the capital of France?"     a folder with Qwen's own files

This file and tokenizer_utils.py are enough for the second command. The folder qwen3_lib beside them adds a chat, names
on the hub, quantized files and more. The model computes in float32; a comment says why where a number is float64.
Read this file from top to bottom:

    config -> components -> KV cache -> forward -> sampling -> generation -> conversation
    then what a first reading can do without: passes -> towers -> loading -> checks -> main

The data flow, with the sizes of Qwen3-0.6B (`n` is the number of tokens):

    token ids [n] -> embedding [n, 1024] -> 28 x decoder layer [n, 1024] -> RMSNorm -> lm_head -> logits [n, 151936]
    decoder layer:  x + attention(RMSNorm(x)), then  x + swiglu(RMSNorm(x)), or moe in a mixture of experts

The words:

    token            a piece of text with a number; the tokenizer cuts text into tokens, the vocabulary lists them all
    embedding        the learned vector of a token
    residual stream  the vector x [hidden_size] of a position, to which each layer adds something
    attention head   one of several attentions side by side, each on its own head_dim numbers
    logits           a score for each token of the vocabulary to be the next one; softmax turns them into probabilities
    lm_head          the matrix from the residual stream to the logits; "tied" if it is the embedding matrix again
    prefill, decode  to run the whole prompt through the model; to run one new token
    end of text      a token the model emits when it is done
    thinking         the model's reasoning before its answer, between <think> and </think>
    tower            a transformer that turns a picture or a sound into vectors beside those of tokens
    MTP head         a layer of a Qwen3.5 that guesses the token after the next one ("multi-token prediction")
"""
from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path

try:
    from typing import TYPE_CHECKING, Any, NamedTuple, Never, Self, TypedDict, Unpack  # Self: since Python 3.11

    import numpy as np
    import safetensors

    from tokenizer_utils import (Answer, InputError, Tokenizer, brief, checked_messages, load_tokenizer, parse_answer,
                                 read_json_object, stream_text, with_system)
except (ImportError, KeyboardInterrupt) as error:
    if not (program := Path(sys.argv[0]).name).startswith(("qwen3", "qwen4")):  # the others' names begin so, too
        raise
    stopped = isinstance(error, KeyboardInterrupt)
    print(f"{program}: interrupted" if stopped else f"{program}: {error}; this is Python {sys.version.split()[0]}; it "
          "needs 3.11 or newer, tokenizer_utils.py beside it, and: pip install numpy safetensors tokenizers jinja2",
          file=sys.stderr)
    sys.exit(130 if stopped else 1)
if TYPE_CHECKING:
    from qwen3_lib.generation.completion import Completion

__version__ = "0.3.0"
__all__ = ["BUNDLED", "Config", "Engine", "InputError", "KVCache", "Model", "Sampling", "Sequence",
           "Tokenizer", "chat", "default_sampling", "forward", "generate", "load_model"]

# ---- Config: the model's sizes, from config.json ---------------------------------------------------------------------

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
    context_length: int  # max_position_embeddings, the number of positions the model can tell apart; more with YaRN
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool  # the lm_head is the embedding again
    rope_dim: int  # how many numbers of a head RoPE turns: all in a Qwen3
    eos_token_ids: tuple[int, ...] = ()
    rope_frequencies: tuple[float, ...] = ()  # in place of the powers of theta: scaled RoPE, by qwen3_lib/io/rope.py
    rope_factor: float = 1.0  # of cos and sin
    sparse_layers: tuple[int, ...] = ()  # the layers that are a mixture of experts; the fields below are theirs
    num_experts: int = 0
    num_experts_per_tok: int = 0  # the experts that a position goes through
    moe_intermediate_size: int = 0  # width inside the SwiGLU of an expert
    norm_topk_prob: bool = False  # the weights of the chosen experts are scaled to a sum of 1


# ---- Components, in the order of the data flow: functions of arrays --------------------------------------------------

def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [..., inputs] times weight [outputs, inputs] transposed -> [..., outputs]. Nearly all time is spent here."""
    rows = x.reshape(-1, x.shape[-1]) @ weight.T  # one product for all positions, so that each weight is read once
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def softmax(x: np.ndarray) -> np.ndarray:
    """Scores [..., n] -> weights that sum to 1: exp(x) / sum(exp(x))."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))  # the maximum cancels out, and exp can't overflow
    return weights / weights.sum(axis=-1, keepdims=True)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., d] scaled to a root mean square of 1, then by weight [d].

    Keeps the numbers in range, however many layers have added to x. Source: Zhang & Sennrich 2019 (RMSNorm).
    """
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    return x * (1 / np.sqrt(mean_square + np.float32(eps))) * weight


def rope_tables(config: Config, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every angle at positions [n] -> two arrays [n, rope_dim / 2].

    Pair i turns by theta ** (-2i / rope_dim) per position: the first pairs fast, for near positions, the last slowly.
    Positions may also be [n, rope_dim / 2], one for each pair: a picture's tokens have a row and a column.
    """
    # The power in float64: a float32 power would be off by 2e-4 in the logits at position 6,000.
    powers = config.rope_theta ** (np.arange(0, config.rope_dim, 2) / config.rope_dim)
    frequencies = 1 / powers.astype(np.float32)
    if config.rope_frequencies:
        frequencies = np.array(config.rope_frequencies, np.float32)
    angles = positions.reshape(len(positions), -1).astype(np.float32) * frequencies
    factor = np.float32(config.rope_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary position embedding: turns each pair (i, i + head_dim / 2) of x [heads, n, head_dim] by its angle.

    Attention by itself knows no order. With q and k turned by angles in proportion to their positions, the score q·k
    depends on the distance between the two positions only.
    Qwen3 pairs the first half of a head with the second ("half-split"). The paper (Su et al. 2021) pairs neighbours;
    weights made for one layout don't work with the other.
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = True) -> np.ndarray:
    """Grouped-query attention of the newest n positions to all positions so far (Ainslie et al. 2023).

    Each position asks with its query q, and each position so far answers with its key k. The score q·k sets the weight
    of that position's value v: out = softmax(q kᵀ / sqrt(head_dim)) v. The root keeps the spread of the scores near 1
    for any head_dim. "Causal": a position sees itself and the positions before it; the patches of a picture see all.

    q: [n_heads, n, head_dim]; k, v: [n_kv_heads, length, head_dim], the new positions last -> [n_heads, n, head_dim]
    """
    (n_heads, n, head_dim), (n_kv_heads, length) = q.shape, k.shape[:2]
    # Query head h uses KV head h // group. The heads of a group are neighbours, so one reshape stacks them as rows of
    # one product, and K and V are not repeated in memory.
    group = n_heads // n_kv_heads
    q = (q * np.float32(head_dim ** -0.5)).reshape(n_kv_heads, group * n, head_dim)
    scores = q @ k.swapaxes(-1, -2)  # [n_kv_heads, group * n, length]
    if n > 1 and causal:  # a single newest token sees everything and needs no mask
        np.copyto(scores.reshape(-1, n, length)[..., -n:], -np.inf, where=np.triu(np.ones((n, n), bool), 1))
    # softmax(scores) @ v, in place and with the division last, where there is less to divide: 1.2 times as fast.
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return (scores @ v / scores.sum(axis=-1, keepdims=True)).reshape(n_heads, n, head_dim)


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
    """Mixture of experts, x [n, hidden_size] -> the same shape; only qwen3_lib loads one. Source: Shazeer et al. 2017.

    Each expert is a SwiGLU. The router, gate [num_experts, hidden_size], gives a position a probability for each. The
    num_experts_per_tok most likely experts are added in proportion to it: many weights, but few are read per token.
    """
    probabilities = softmax(linear(x, gate))  # [n, num_experts]
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :config.num_experts_per_tok]
    weights = np.take_along_axis(probabilities, chosen, axis=-1)  # [n, num_experts_per_tok]
    if config.norm_topk_prob:
        weights /= weights.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for expert in np.unique(chosen):  # each expert once, for all positions that chose it
        row, rank = np.nonzero(chosen == expert)
        out[row] += weights[row, rank, None] * swiglu(x[row], **experts[expert])
    return out


def decoder_layer(x: np.ndarray, w: dict[str, Any], config: Config, cache: KVCache | Pass, layer: int,
                  cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One layer: x [n, hidden_size] -> the same shape. Writes the new keys and values into the cache, or caches."""
    eps, n = config.rms_norm_eps, len(x)
    h = rms_norm(x, w["input_layernorm"], eps)
    q = linear(h, w["q_proj"]).reshape(n, -1, config.head_dim)  # [n, n_heads, head_dim]
    k = linear(h, w["k_proj"]).reshape(n, -1, config.head_dim)  # [n, n_kv_heads, head_dim]
    v = linear(h, w["v_proj"]).reshape(n, -1, config.head_dim).swapaxes(0, 1)
    q = apply_rope(rms_norm(q, w["q_norm"], eps).swapaxes(0, 1), cos, sin)  # QK-Norm: each head by itself, before RoPE
    k = apply_rope(rms_norm(k, w["k_norm"], eps).swapaxes(0, 1), cos, sin)  # [n_kv_heads, n, head_dim]
    out = cache.attend(layer, q, k, v)  # attention() to all positions so far, [n_heads, n, head_dim]
    out = out.swapaxes(0, 1).reshape(n, -1)  # heads side by side: n_heads * head_dim
    x = x + linear(out, w["o_proj"])
    h = rms_norm(x, w["post_attention_layernorm"], eps)
    return x + (moe(h, w["gate"], w["experts"], config) if "experts" in w else
                swiglu(h, w["gate_proj"], w["up_proj"], w["down_proj"]))


# ---- KV cache: the keys and values of all positions so far -----------------------------------------------------------
# A token sees only the tokens before it. So nothing computed for a position ever changes: with its k and v kept, a new
# token costs as much as a prompt of one token, and 2 * layers * n_kv_heads * head_dim * 4 bytes, 229 kB in Qwen3-0.6B.

class Cache:
    """The keys and values of one sequence, k and v [n_layers, n_kv_heads, capacity, head_dim]; `length` are filled.

    A full cache grows by a quarter and 64 positions, at most to `max_length`. `token_ids` [capacity]: their tokens.
    KVCache, further below, is a Cache that can also be copied and kept.
    """

    def __init__(self, config: Config, max_length: int | None = None):
        self.config, self.length = config, 0
        self.max_length = config.context_length if max_length is None else checked_whole("max_length", max_length, 1)
        self.k = np.empty((config.num_hidden_layers, config.num_key_value_heads, 0, config.head_dim), np.float32)
        self.v = np.empty_like(self.k)
        self.token_ids = np.empty(0, np.int64)
        self.lock = threading.Lock()  # held during a pass, so that threads take turns

    def reserve(self, n: int, guesses: int = 0) -> np.ndarray:
        """Makes room for n new tokens -> their positions [n]; the last `guesses` tokens may be cut off again.

        Raises InputError beyond max_length.
        """
        needed = self.length + n
        if needed > self.max_length:
            raise InputError(f"{needed} positions don't fit into a context of {self.max_length}")
        if needed > len(self.token_ids):
            # Each array by itself: only one old one lies beside its copy, and Ctrl-C may come in between.
            capacity = min(needed + needed // 4 + 64, self.max_length)
            self.k, self.v = self._resized(self.k, capacity), self._resized(self.v, capacity)
            self.token_ids = np.pad(self.token_ids, (0, capacity - len(self.token_ids)))
        return np.arange(self.length, needed)

    def _resized(self, old: np.ndarray, capacity: int) -> np.ndarray:
        new = np.empty((*old.shape[:2], capacity, old.shape[3]), old.dtype)
        new[:, :, :self.length] = old[:, :, :self.length]
        return new

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Writes k, v [n_kv_heads, n, head_dim] after the filled part -> attention() of q [n_heads, n, head_dim].

        The new positions count only after `advance`, so an interruption leaves the cache unchanged.
        """
        end = self.length + k.shape[1]
        self.k[layer, :, self.length:end] = k
        self.v[layer, :, self.length:end] = v
        return attention_in_blocks(q, self.k[layer, :, :end], self.v[layer, :, :end])

    def advance(self, token_ids: np.ndarray) -> None:
        """Counts the new tokens [n] as filled."""
        self.token_ids[self.length:self.length + len(token_ids)] = token_ids
        self.length += len(token_ids)

    def common_prefix(self, token_ids: np.ndarray) -> int:
        """How many positions hold the first of the tokens `token_ids` [n]."""
        n = min(self.length, len(token_ids))
        differing = np.flatnonzero(self.token_ids[:n] != token_ids[:n])
        return int(differing[0]) if len(differing) else n

    def truncate(self, length: int) -> None:
        """Forgets all positions from `length` on."""
        if checked_whole("length", length, 0) > self.length:
            raise InputError(f"a cache of {self.length} positions can't be cut to {length}")
        self.length = length


# ---- forward: token ids in, logits out -------------------------------------------------------------------------------

CHUNK = 512  # prompt tokens that go through the layers together: enough for full speed of the matrix products
TokenIds = list[int] | np.ndarray


class Pass(NamedTuple):
    """What goes through the layers together: new tokens of one sequence, or of several, one after the other.

    The caller makes it; an engine runs it and asks for nothing more.
    """
    token_ids: np.ndarray  # [n]
    x: np.ndarray  # their embeddings [n, hidden_size], which the engine may overwrite
    positions: np.ndarray  # [n], or [n, rope_dim / 2]: see rope_tables
    parts: list[tuple[Any, slice]]  # the KVCache of each sequence, and its rows of x
    wanted: np.ndarray  # the rows of x after which logits are wanted
    states: bool = False  # whether the hidden states are wanted, too
    added: np.ndarray | tuple[()] = ()  # [k, n, hidden_size]: added to x after the first k layers

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """KVCache.attend of each sequence -> [n_heads, n, head_dim]."""
        return together([cache.attend(layer, q[:, rows], k[:, rows], v[:, rows]) for cache, rows in self.parts], axis=1)

    def advance(self) -> None:
        """Counts the new tokens as filled."""
        for cache, rows in self.parts:
            cache.advance(self.token_ids[rows])


@np.errstate(over="ignore", invalid="ignore")  # NaN in the weights is reported once it has reached the logits
def run_pass(model: Model, new: Pass) -> tuple[np.ndarray, np.ndarray]:
    """Runs a pass through all layers -> (logits float32 [wanted, vocab_size], hidden states [n, hidden_size])."""
    config, weights, x, layer = model.config, model.weights, new.x, model.source.kind.layer  # decoder_layer, in a Qwen3
    cos, sin = rope_tables(config, new.positions)
    for i, w in enumerate(weights["layers"]):
        x = layer(x, w, config, new, i, cos, sin)
        if i < len(new.added):  # of pictures
            x = x + new.added[i]
    new.advance()
    x = rms_norm(x, weights["norm"], config.rms_norm_eps)
    return linear(x[new.wanted], weights["lm_head"]), x  # the head costs several layers


def forward(model: Model, token_ids: TokenIds, cache: KVCache, all_logits: bool = False) -> np.ndarray:
    """Runs new tokens [n] through the model, after the tokens in the cache, and adds them to the cache.

    -> the logits after the last token, float32 [vocab_size]; with `all_logits`, after each token, [n, vocab_size].
    Raises InputError for ids out of range, for the cache of another model, and when the context is full.
    """
    check_cache(model, cache)
    ids = checked_ids(model, token_ids)
    with cache.lock:
        logits, _ = compute(model, [NextTokens(cache, ids, len(ids) if all_logits else 1)])
    return logits if all_logits else logits[0]


# ---- Sampling: from logits to the next token -------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token. Order as in transformers: penalties, temperature, top-k, top-p, min-p."""
    temperature: float = 0.0  # divides the logits: below 1, likely tokens get likelier; 0 takes the likeliest (greedy)
    top_k: int = 0  # only the k most likely tokens; 0 is off
    top_p: float = 1.0  # only the most likely tokens that together reach this probability
    min_p: float = 0.0  # only tokens at least this fraction as likely as the most likely one
    repetition_penalty: float = 1.0  # divides (negative: multiplies) the logits of tokens in the prompt or the answer
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted once for each time the token is in the answer

    def __post_init__(self) -> None:
        checked_whole("top_k", self.top_k, 0)
        for name, (low, high) in RANGES.items():
            checked_number(name, getattr(self, name), low, high)

    def updated(self, **changes: Any) -> Sampling:
        """The same with the given values; None leaves a value unchanged. Raises InputError for unknown names."""
        if unknown := changes.keys() - asdict(self).keys():
            raise InputError(f"{brief(min(unknown))} is none of max_new_tokens, seed, {', '.join(asdict(self))}")
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def penalize(logits: np.ndarray, sampling: Sampling, prompt: Iterable[int], answer: Iterable[int]) -> np.ndarray:
    """Logits [vocab_size] after the penalties on tokens in the prompt and in the answer so far."""
    logits, factor = logits.copy(), np.float32(sampling.repetition_penalty)
    ids = np.unique(np.array([*prompt, *answer], int))
    ids = ids[ids >= 0]  # without a picture's tokens
    logits[ids] = np.where(logits[ids] > 0, logits[ids] / factor, logits[ids] * factor)
    ids, counts = np.unique(np.array(answer, int), return_counts=True)
    logits[ids] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * np.float32(counts)
    return logits


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that temperature, top-k, top-p and min-p leave of logits [vocab_size] -> (ids, probabilities)."""
    x = (logits - logits.max()) / np.float32(sampling.temperature)
    if 0 < sampling.top_k < len(x):
        ids = np.flatnonzero(x >= np.partition(x, -sampling.top_k)[-sampling.top_k])  # the k-th largest and all above
    else:
        ids = np.arange(len(x))
    if sampling.top_p < 1:  # the fewest that together reach top_p (Holtzman et al. 2019)
        probabilities = softmax(x[ids].astype(np.float64))  # a float32 sum of 151,936 small numbers would lose most
        # Tokens below this probability sum to less than 1 - top_p, so none is needed: that leaves few to sort.
        some = probabilities * len(ids) >= (1 - sampling.top_p) * 0.999
        ids, probabilities = ids[some], probabilities[some]
        order = np.argsort(-x[ids], kind="stable")  # of nearly equal logits, the probabilities may be equal
        ids, probabilities = ids[order], probabilities[order]
        before = np.cumsum(probabilities) - probabilities  # the probability of all more likely tokens together
        ids = ids[:max(int(np.count_nonzero(before < sampling.top_p)), 1)]
    if sampling.min_p > 0:
        ids = ids[x[ids] >= math.log(sampling.min_p)]  # the most likely token has x = 0
    return ids, softmax(x[ids])


def sample(logits: np.ndarray, sampling: Sampling, rng: np.random.Generator, prompt: Iterable[int] = (),
           answer: Iterable[int] = ()) -> int:
    """Draws a token id from logits [vocab_size]; the penalties are on tokens of the prompt and the answer so far."""
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0):
        logits = penalize(logits, sampling, prompt, answer)
    if sampling.temperature < 1e-4:
        return int(logits.argmax())
    ids, probabilities = candidates(logits, sampling)
    # A race (the Gumbel-max trick): a token arrives after an exponentially distributed time whose rate is the token's
    # probability. So it arrives first with this probability. Drawn as float64, because one float32 in 8 million is 0.
    return int(ids[(probabilities / rng.standard_exponential(len(ids)).astype(np.float32)).argmax()])


# ---- Generation: token ids in, an iterator of token ids out ----------------------------------------------------------

class Sequence:
    """A sequence that grows: `rewind(cache)` are the tokens to compute next, and `feed(logits)` draws.

    `prompt` [n]; `token_ids`, the tokens drawn so far; `finish_reason`: None until the end, then "stop" (at an
    end-of-text token, which is not kept), "length" (after max_new_tokens, or when the context is full), or what a
    processor says. Takes the options of `generate`, `sampling` as a whole (default: the model's), and processors, see
    qwen3_lib/generation/processors.py.
    Raises InputError for ids and values out of range.
    """

    def __init__(self, model: Model, token_ids: TokenIds, max_new_tokens: int | None = None, seed: int | None = None,
                 eos_token_ids: Iterable[int] | None = None, processors: Any = (), sampling: Sampling | None = None):
        check_answers(model)
        prompt = checked_ids(model, token_ids)
        self.media = None if model.media is None else model.media.held(prompt)  # so that they are kept
        self.model, self.processors = model, [*processors]
        self.sampling, self.token_ids = sampling or model.sampling, list[int]()
        self.finish_reason: str | None = None
        ends = model.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.ends = {checked_whole("an end-of-text id", token, 0) for token in ends}
        room, wanted = model.config.context_length - len(prompt), max_new_tokens
        if room < 1:
            raise InputError(f"the prompt has {len(prompt)} tokens and leaves no room for an answer: the model's "
                             f"context is {model.config.context_length}")
        wanted = (model.max_new_tokens or room) if wanted is None else checked_whole("max_new_tokens", wanted, 1)
        self.limit = min(room, wanted)
        self.rng = np.random.default_rng(None if seed is None else checked_whole("seed", seed, 0))
        self.buffer = np.empty(len(prompt) + self.limit, np.int64)
        self.prompt = self.buffer[:len(prompt)]
        self.prompt[:] = prompt

    def resume(self, cache: KVCache | None) -> KVCache:
        """Cuts the cache back to its common prefix with the prompt -> the cache, or a new one."""
        cache = self.model.engine.new_cache(self.model.config) if cache is None else cache
        check_cache(self.model, cache)
        with cache.lock:
            cache.truncate(cache.common_prefix(self.prompt[:-1]))  # the last token gives the logits
        self.limit = min(self.limit, cache.max_length - len(self.prompt))
        return cache

    @property
    def ids(self) -> np.ndarray:
        """The prompt and the tokens drawn so far."""
        return self.buffer[:len(self.prompt) + len(self.token_ids)]

    def rewind(self, cache: KVCache) -> np.ndarray:
        """The tokens that the cache lacks. Raises InputError for a cache that another answer has filled."""
        ids = self.ids
        n = min(cache.length, len(ids) - 1)  # one less if a pass was interrupted
        if not np.array_equal(cache.token_ids[:n], ids[:n]):
            raise InputError("the cache belongs to another answer now; give each answer its own cache")
        cache.truncate(n)
        return ids[n:]

    def feed(self, logits: np.ndarray) -> list[int]:
        """Draws the next token from logits [vocab_size] -> [token], or [] at the end of text."""
        check_finite(self.model, logits)
        for each in self.processors:
            logits = each.before(logits)
        forces, token = next(((each, forced) for each in self.processors if (forced := each.forced()) is not None),
                             (None, None))
        if token is None:
            token = sample(logits, self.sampling, self.rng, self.prompt, self.token_ids)
        if token in self.ends:
            self.end("stop")
            return []
        self.token_ids.append(token)
        self.ids[-1] = token
        reasons = [reason for each in self.processors if (reason := each.after(token, forces))]
        if reasons or len(self.token_ids) >= self.limit:  # the last token needs no place in the cache
            self.end(reasons[0] if reasons else "length")
        return [token]

    def end(self, reason: str) -> None:
        reasons = [given for each in self.processors if (given := each.after(None))]  # all of them learn that it ends
        self.finish_reason = reasons[0] if reasons else reason


def run(model: Model, sequence: Sequence, cache: KVCache) -> Iterator[int]:
    """Feeds a sequence until it ends -> its tokens, one at a time."""
    while sequence.finish_reason is None:  # first the whole prompt, then one token at a time
        with cache.lock:
            logits, _ = compute(model, [NextTokens(cache, sequence.rewind(cache))])
        yield from sequence.feed(logits[0])


def generate(model: Model, token_ids: TokenIds, max_new_tokens: int | None = None, seed: int | None = None,
             eos_token_ids: Iterable[int] | None = None, cache: KVCache | None = None,
             **sampling: Unpack[SamplingOptions]) -> Iterator[int]:
    """Continues the prompt `token_ids` [n], one token id at a time.

    Ends as a Sequence does; `eos_token_ids=()` never ends early. `sampling` takes the fields of Sampling; defaults come
    from the model's generation_config.json. The same seed gives the same tokens. A `cache` filled by an earlier call is
    cut back to its common prefix with the prompt: in a conversation, only the new tokens are computed.
    Raises InputError, before anything is computed, for ids and values out of range.
    """
    settings = model.sampling.updated(**sampling)
    sequence = Sequence(model, token_ids, max_new_tokens, seed, eos_token_ids, sampling=settings)
    return run(model, sequence, sequence.resume(cache))


# ---- Conversation: messages in, text out -----------------------------------------------------------------------------

WITHOUT_THINKING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}  # as Qwen's authors recommend


def default_sampling(model: Model, enable_thinking: bool | None) -> Sampling:
    """The default settings of an answer. With enable_thinking=False, a model that samples gets WITHOUT_THINKING."""
    unthinking = enable_thinking is False and model.sampling.temperature > 0
    return model.sampling.updated(**WITHOUT_THINKING) if unthinking else model.sampling


class Stream(Iterator[str]):
    """An answer as it comes: iterate over its pieces, print it, or call `finish` for all of its `text`."""
    closed = False  # it goes no further by itself

    def __init__(self, model: Model, sequence: Sequence, cache: KVCache | None = None):
        self.sequence, self.text, self.token_ids = sequence, "", sequence.token_ids
        self.pieces = stream_text(model.tokenizer, run(model, sequence, sequence.resume(cache)))

    @property
    def finish_reason(self) -> str | None:
        return self.sequence.finish_reason

    def __next__(self) -> str:
        piece = next(self.pieces)
        self.text += piece
        return piece

    def close(self) -> None:
        """Ends it where it is."""
        self.closed, self.pieces = True, iter(())

    def finish(self) -> Self:
        """Generates the rest -> itself."""
        for _ in self:
            pass
        return self

    def check_finished(self) -> None:
        if not self.closed and self.sequence.finish_reason is None:
            raise InputError("the answer isn't finished: iterate over it, or call its finish()")

    @property
    def answer(self) -> Answer:
        """A finished answer, taken apart into reasoning, content and tool_calls. Raises InputError before."""
        self.check_finished()
        last = self.sequence.model.tokenizer.decode(self.sequence.prompt[-2:]).strip()
        return parse_answer(self.text, last == "<think>")  # a template may open the thought

    def __str__(self) -> str:
        return self.finish().text

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, so far {self.text!r}: iterate over it, print it, or call its finish()>"


def chat(model: Model, messages: str | dict[str, Any] | list[dict[str, Any]], tools: list[Any] | None = None,
         enable_thinking: bool | None = None, system: str | None = None,
         chat_template_kwargs: dict[str, Any] | None = None, *, max_new_tokens: int | None = None,
         max_tokens: int | None = None, seed: int | None = None, cache: KVCache | None = None,
         eos_token_ids: Iterable[int] | None = None, temperature: float | None = None, top_k: int | None = None,
         top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
         presence_penalty: float | None = None, frequency_penalty: float | None = None,
         **more: Unpack[MoreOptions]) -> Completion:
    """The answer to a conversation, or to a single question given as a text: a Stream of its pieces.

    messages: {"role": "system" | "user" | "assistant" | "tool", "content": ...}, as in OpenAI's API
    tools: JSON schemas as in OpenAI's API; system: the text of a system message before all others
    enable_thinking: None leaves it to the model's chat template; chat_template_kwargs: its other variables
    max_new_tokens (or max_tokens) to frequency_penalty: as in `generate`, with defaults from default_sampling
    With the folder qwen3_lib, tools may be Python functions, the answer is a Completion, which tells more, and `more`
    are the options of qwen3_lib/generation/options.py: stop, logprobs, think_budget, stop_loops, lookup, draft,
    max_string, logit_bias, max_pixels, and schema: a JSON Schema, a class, regex("...") or lark("...") of schema.py
    Raises InputError, before anything is computed, for values out of range and unreadable messages.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                                "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
                                "frequency_penalty": frequency_penalty}
    if not isinstance(model, Model):
        raise InputError(f"chat takes a model of load_model, not {brief(repr(model), 80)}")
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "eos_token_ids": eos_token_ids}
    if max_tokens is not None:
        limits["max_new_tokens"] = checked_whole("max_tokens", max_tokens, 1)
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    messages = [messages] if isinstance(messages, dict) else messages
    messages = with_system(checked_messages(messages, "messages"), system)
    if LIBRARY.is_dir():
        from qwen3_lib.generation.completion import complete
        options: dict[str, Any] = {**limits, **sampling, **more}
        return complete(model, messages, tools, enable_thinking, chat_template_kwargs, cache, **options)
    if more:
        raise InputError(f"qwen3.py alone has no option {min(more)}: more options need the folder qwen3_lib beside it")
    text = model.tokenizer.apply_chat_template(messages, tools, enable_thinking=enable_thinking, join_text_parts=True,
                                               chat_template_kwargs=chat_template_kwargs)
    settings = default_sampling(model, enable_thinking).updated(**sampling)
    sequence = Sequence(model, model.tokenizer.encode(text, False), **limits, sampling=settings)
    return Stream(model, sequence, cache)  # type: ignore[return-value]


# ======================================================================================================================
# Here ends the model. The rest is work for many tokens at once, pictures and sounds, files, checks of what comes from
# outside, and the command line.

# ---- Passes: attention in blocks; new tokens of one sequence or of several, pictures among them ----------------------

QUERIES = 128  # positions whose attention is computed together
MAX_SCORES = 2**24  # attention scores in memory at a time (64 MiB): with very long contexts, fewer positions together


def attention_in_blocks(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = True) -> np.ndarray:
    """attention() in blocks of queries, each without the keys that come after its last query."""
    n, length = q.shape[1], k.shape[1]
    block = max(1, min(QUERIES, MAX_SCORES // (len(q) * length)))
    ends = [min(length - n + i + block, length) if causal else length for i in range(0, n, block)]
    return together([attention(q[:, i * block:(i + 1) * block], k[:, :end], v[:, :end], causal)
                     for i, end in enumerate(ends)], axis=1)


class KVCache(Cache):
    """A Cache that can be copied, and kept in a file; other engines' caches are classes of it."""
    dtype = "f32"  # its number format; the fast engine has caches with smaller ones
    kind = "of the NumPy engine"  # a model takes caches of one kind only: see check_cache
    ahead: Any = None  # what an MTP head has read of the tokens: see qwen3_lib/generation/ahead.py

    def borders(self, token_ids: np.ndarray, ends: Iterable[int]) -> list[int]:
        """Behind which of the new tokens [n] a pass must stop: none. A Qwen3.5 keeps its state where a turn ends.

        `ends`: the end-of-text tokens, at which turns end.
        """
        return []

    def copy_from(self, source: Self, n: int) -> None:
        """Becomes a copy of the first n positions of another cache of its kind."""
        self.truncate(0)
        self.reserve(n)
        for ours, theirs in zip(self.rows(0, n).values(), source.rows(0, n).values()):
            ours[:] = theirs
        self.advance(source.token_ids[:n])

    def rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """What these positions hold, for a file or from one: k and v [n_layers, n_kv_heads, stop - start, head_dim]."""
        return {"k": self.k[:, :, start:stop], "v": self.v[:, :, start:stop]}

    def state(self, length: int) -> dict[str, np.ndarray]:
        """What is needed beside rows to go on after so many positions, for a file: nothing. A Qwen3.5 has states."""
        return {}

    def go_on(self, token_ids: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Counts tokens [n] as filled, whose rows were written after `reserve`, and takes the state after them."""
        self.advance(token_ids)

    def bytes(self, length: int, more_layers: int = 0) -> int:
        """The bytes of a cache like this one with so many positions."""
        return 2 * self.k.itemsize * (len(self.k) + more_layers) * self.k.shape[1] * self.k.shape[3] * length


class NextTokens(NamedTuple):
    """The new tokens of one sequence, for `passes`."""
    cache: KVCache  # what was computed before them
    token_ids: np.ndarray  # [n]
    wanted: int = 1  # logits are wanted after so many of the last tokens
    guesses: int = 0  # so many of the last tokens may be cut off again


def embed_tokens(model: Model, ids: np.ndarray) -> np.ndarray:
    """The vectors of tokens [n] -> [n, hidden_size]: rows of embed_tokens, or what a tower has made of a picture."""
    x = model.engine.rows(model, "embed_tokens", np.maximum(ids, 0))
    if model.media is not None and (seen := ids < 0).any():
        x[seen] = model.media.vectors(ids[seen])[0]
    return x


def passes(model: Model, parts: list[NextTokens], states: bool = False) -> Iterator[Pass]:
    """The new tokens of some sequences, in passes of at most CHUNK tokens. Run each before you ask for the next one.

    Raises InputError if a cache has no room for its tokens.
    """
    media, ids = model.media, together([part.token_ids for part in parts])
    ends = [*itertools.accumulate(len(part.token_ids) for part in parts)]
    places = [*zip(parts, [0, *ends], ends)]  # with the first and the last row of each sequence
    positions = together([part.cache.reserve(len(part.token_ids), part.guesses) for part in parts])
    if media is not None:
        positions = together([media.positions(cache.token_ids[:cache.length], new) for cache, new, *_ in parts])
    wanted = together([np.arange(end - part.wanted, end) for part, _, end in places])
    stops = {*range(0, len(ids), CHUNK), len(ids)}
    for part, first, _ in places:
        stops |= {first + n for n in part.cache.borders(part.token_ids, model.eos_token_ids)}
    for start, stop in itertools.pairwise(sorted(stops)):
        new = ids[start:stop]
        rows = [(part.cache, slice(max(first, start) - start, min(end, stop) - start))
                for part, first, end in places if first < stop and start < end]
        yield Pass(new, embed_tokens(model, new), positions[start:stop], rows,
                   wanted[(start <= wanted) & (wanted < stop)] - start, states,
                   media.added(new) if media is not None and (new < 0).any() else ())


def compute(model: Model, parts: list[NextTokens], states: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Runs new tokens of some sequences through the model, and adds them to the caches.

    -> (the wanted logits of all, float32 [m, vocab_size]; with `states`, the residual stream after the last norm,
    [n, hidden_size]). `forward` without its checks, for one sequence or several.
    """
    logits, hidden = zip(*[model.engine.run(model, new) for new in passes(model, parts, states)])
    return together(logits), together(hidden)


def together(arrays: Any, axis: int = 0) -> np.ndarray:
    """np.concatenate, without a copy of a single array."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


# ---- Towers: what qwen3_vision.py, qwen3_asr.py and qwen3_tts.py share -----------------------------------------------

def dense(x: np.ndarray, w: dict[str, Any], name: str) -> np.ndarray:
    """A linear layer with bias: x [n, inputs] -> [n, outputs]. w: a tower's weights, by their names."""
    rows = linear(x, w[f"{name}.weight"])
    rows += w[f"{name}.bias"]
    return rows


def layer_norm(x: np.ndarray, w: dict[str, Any], name: str, eps: float) -> np.ndarray:
    """x [n, d] shifted to a mean of 0, then as in rms_norm, plus bias (Ba et al. 2016)."""
    return rms_norm(x - x.mean(axis=-1, keepdims=True), w[f"{name}.weight"], eps) + w[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the probability that a normally distributed number is below x (Hendrycks & Gimpel 2016).

    The tail, erfc(size / sqrt(2)) / 2, has the form of Abramowitz & Stegun 7.1.26 with one term more. Its factors were
    fitted for p = 0.39 (minimax). So gelu is off by 1.4e-8 at most, before float32 rounds.
    """
    size = np.abs(x)
    t, tail = 1 / (1 + np.float32(0.39 * 0.5 ** 0.5) * size), np.zeros_like(x)
    for factor in (-0.113768459, 0.44333176, -0.317699449, 0.324779142, 0.0456944311, 0.117662574):
        tail += np.float32(factor)  # in place: x is the largest array of a tower
        tail *= t
    tail *= np.exp(np.float32(-0.5) * size * size)
    tail *= size
    return np.maximum(x, 0) - tail


class Media:
    """What a model's tower has made of pictures or sounds: see qwen3_vision.py and qwen3_asr.py.

    Their tokens have ids below 0, where no vocabulary has any: ~id has the number of a picture or sound from bit 36 on,
    and the token's place in it in the last 14 bits. A number is given once in a process. So caches, which compare ids,
    never take one picture for another, and know a picture that comes again.
    """

    def __init__(self) -> None:
        self.known = weakref.WeakValueDictionary[int | bytes, Any]()  # by their numbers, and by what they were made of

    def __contains__(self, token_id: int) -> bool:
        return token_id < 0 and int(~token_id >> 36) in self.known

    def held(self, ids: np.ndarray) -> list[Any]:
        """The pictures or sounds of these tokens [n]: they are known as long as this list is."""
        return [self.known[number] for number in {*(~ids[ids < 0] >> 36).tolist()}]

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """Of tokens [n], all below 0 -> [1 + k, n, hidden_size]: embeddings, then what the first k layers get, too."""
        numbers, places = ~ids >> 36, ~ids & 2**14 - 1
        found = {number: self.known[number].vectors for number in {*numbers.tolist()}}
        return np.stack([found[number][:, place] for number, place in zip(numbers.tolist(), places)], axis=1)

    def added(self, ids: np.ndarray) -> np.ndarray:
        """Of tokens [n] -> [k, n, hidden_size]: what is added after the first k layers; 0 for words (deepstack)."""
        vectors = self.vectors(ids[ids < 0])[1:]
        added = np.zeros((len(vectors), len(ids), vectors.shape[2]), np.float32)
        added[:, ids < 0] = vectors
        return added

    def positions(self, before: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Of tokens [n] after the tokens `before`, for rope_tables: one by one, as in a text."""
        return len(before) + np.arange(len(ids))


# ---- Loading: a folder with config.json, tokenizer.json and *.safetensors --------------------------------------------

# Keys of config.json that change the computation; only these values are accepted.
ONLY = {"hidden_act": "silu", "attention_bias": False, "qkv_bias": False, "mlp_bias": False, "use_qk_norm": True,
        "use_sliding_window": False, "shared_expert_intermediate_size": 0, "partial_rotary_factor": 1.0,
        "is_causal": True, "use_bidirectional_attention": False, "rope_type": "default"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim")


def rope_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The parameters of RoPE in config.json's object, in the dialect of transformers 5 or 4."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InputError(f"config.json: RoPE must have one object for all layers, not {brief(repr(rope))}")
    rope = {key: value for key, value in rope.items() if value is not None}
    return {"rope_theta": raw.get("rope_theta"), "rope_type": rope.get("type", "default")} | rope


def unsupported(key: str, value: Any, *only: Any) -> str:
    """The error text for a value in config.json that this program can't compute; `only` are the values that it can."""
    files = ("qwen3_5.py", "qwen4_exp.py", "qwen3_vision.py", "qwen3_asr.py", "qwen3_tts.py", "qwen3_lib")
    absent = [name for name in files if not (HERE / name).exists()]
    more = f"other models need {', '.join(absent)} beside qwen3.py" if absent else "transformers computes it"
    return f"{key} = {brief(repr(value), 80)} is not supported, only {', '.join(map(repr, only))}; {more}"


def config_of(found: dict[str, Any], file: Path, names: Iterable[str] = ()) -> Config:
    """The Config of Source.language. Raises InputError for what is malformed or not computed here."""
    try:
        found = {key: value for key, value in (found | rope_of(found)).items() if value is not None}
        if wrong := [key for key, value in ONLY.items() if found.get(key, value) != value]:
            raise ValueError(unsupported(wrong[0], found[wrong[0]], ONLY[wrong[0]]))
        sizes: dict[str, Any] = {key: checked_whole(key, found[key], 1) for key in SIZES}
        heads, kv_heads, context = sizes["num_attention_heads"], sizes["num_key_value_heads"], "max_position_embeddings"
        if heads % kv_heads or sizes["head_dim"] % 2 or max(sizes["num_hidden_layers"], sizes["head_dim"]) > 2**14:
            raise ValueError(f"no Qwen3 has these sizes: {sizes}")  # heads can't be grouped, or turned in pairs
        if found.get("layer_types", full := ["full_attention"] * sizes["num_hidden_layers"]) != full:
            raise ValueError(unsupported("layer_types", found["layer_types"], "full_attention"))
        return Config(**sizes, context_length=checked_whole(context, found[context], 1), eos_token_ids=ids_in(found),
                      rms_norm_eps=checked_number("rms_norm_eps", found["rms_norm_eps"], 0, 1),
                      rope_dim=sizes["head_dim"],
                      rope_theta=checked_number("rope_theta", found["rope_theta"], 1.1, 1e12),
                      tie_word_embeddings=bool(found.get("tie_word_embeddings", True)))  # absent: the tensors decide
    except (TypeError, ValueError) as error:
        raise InputError(f"{file}: {brief(error)}") from error


def ids_in(raw: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id, which is absent, a number or a list of numbers."""
    ids = [] if raw.get("eos_token_id") is None else raw["eos_token_id"]
    return tuple(checked_whole("eos_token_id", i, 0) for i in (ids if isinstance(ids, list) else [ids]))


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model. A linear layer is stored as [outputs, inputs]."""
    d, q_size = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    attention_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (d,), "self_attn.q_proj": (q_size, d), "self_attn.k_proj": (kv_size, d),
        "self_attn.v_proj": (kv_size, d), "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,), "self_attn.o_proj": (d, q_size), "post_attention_layernorm": (d,)}
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config.vocab_size, d)}
    for i in range(config.num_hidden_layers):
        layer, swiglus = dict(attention_shapes), {"mlp": config.intermediate_size}  # name -> width inside
        if i in config.sparse_layers:
            layer["mlp.gate"] = (config.num_experts, d)
            swiglus = {f"mlp.experts.{expert}": config.moe_intermediate_size for expert in range(config.num_experts)}
        for name, inner in swiglus.items():
            layer |= {f"{name}.gate_proj": (inner, d), f"{name}.up_proj": (inner, d), f"{name}.down_proj": (d, inner)}
        names |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    names |= {"model.norm": (d,), "lm_head": (config.vocab_size, d)}
    return {f"{name}.weight": shape for name, shape in names.items()}


class Tensor(NamedTuple):
    """A tensor in its file: `data` is a view of the mapped bytes, bfloat16 as uint16."""
    dtype: str
    data: np.ndarray
    mapping: mmap.mmap

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def read(self) -> np.ndarray:
        """The numbers; a tensor that its file holds in another form computes them."""
        return self.data


DTYPES: dict[str, Any] = dict(BF16=np.dtype("<u2"), F16=np.dtype("<f2"), F32=np.dtype("<f4"), F64=np.dtype("<f8"))


def map_safetensors(file: Path, dtypes: dict[str, Any] = DTYPES) -> dict[str, Tensor]:
    """The tensors of these dtypes in a safetensors file, mapped and not yet read. Raises InputError for a damaged file.

    A safetensors file is 8 bytes with the length of a header, the header (JSON: name -> dtype, shape, offsets), and
    the tensors' bytes. The library checks the file; its own NumPy reader has no bfloat16, so the bytes are read here.
    """
    try:
        with open(file, "rb") as opened, safetensors.safe_open(file, framework="numpy"):  # rejects damaged files
            mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        start, tensors = 8 + int.from_bytes(mapping[:8], "little"), {}
        for name, entry in json.loads(mapping[8:start]).items():
            if name != "__metadata__" and entry["dtype"] in dtypes:
                dtype, (first, end) = dtypes[entry["dtype"]], entry["data_offsets"]
                data = np.frombuffer(mapping, dtype, (end - first) // dtype.itemsize, start + first)
                tensors[name] = Tensor(entry["dtype"], data.reshape(entry["shape"]), mapping)
        return tensors
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or brief(error)}") from error


def to_float32(tensor: Tensor) -> np.ndarray:
    """The tensor as float32; a float32 tensor stays in the file. bfloat16 is the upper half of a float32."""
    data = tensor.read()
    if tensor.dtype == "F32" and data.flags.aligned:
        return data
    values: Any = data.astype(np.uint32 if tensor.dtype == "BF16" else np.float32)
    if tensor.dtype == "BF16":
        values <<= 16  # in place: the embedding is the largest tensor, and a second copy of it the peak of loading
        values = values.view(np.float32)
    forget_pages(tensor.mapping)
    return values


def forget_pages(mapping: mmap.mmap) -> None:
    """Pages read from a mapped file no longer count as this process's memory; Windows can't do that."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


# What the files of a model say goes through one value, a Source. Each kind of files is a function that gives one, and
# so is each change: an adapter is a function from a Source to a Source, see qwen3_lib/io/.

@dataclass(frozen=True, eq=False)
class Source:
    """What the files of a model say, read once."""
    path: Path
    kind: ModelType
    about: dict[str, Any]  # config.json
    language: dict[str, Any]  # what it says of the language model, with transformers' values where it says nothing
    config: Config
    tensors: dict[str, Any]  # a Tensor for each name of kind.shapes, but for a head that is the embedding again
    heads: dict[str, Any]  # the other tensors of the language model: heads of classifiers
    tower: dict[str, Any]  # those that make vectors of pictures or sounds, by their names in the files
    generation: dict[str, Any]  # generation_config.json
    tokenizer: Callable[[], Tokenizer]  # reads it: a model may be loaded without one
    embeds: bool = False  # an embedding model or classifier, which gives no answers: see qwen3_embed.py
    bare: bool = False  # an embedding model's own file, whose names lack "model."
    saved: Any = None  # of weights that only the fast engine reads: see qwen3_lib/io/packed.py
    adapter: Path | None = None  # the folder of an adapter whose changes are in `tensors`


def json_in(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_json_object(file) if os.path.isfile(file) else {}


def kind_of(about: dict[str, Any], file: Path, types: dict[str, ModelType]) -> ModelType:
    """The row of the table for config.json's model_type. Raises InputError for a type that isn't there."""
    name = about.get("model_type", "missing")
    if not isinstance(name, str) or name not in types:
        raise InputError(f"{file}: {unsupported('model_type', name, *types)}")
    return types[name]


def language_of(about: dict[str, Any], file: Path, kind: ModelType) -> dict[str, Any]:
    """What config.json says of the language model. Raises InputError for other architectures than the type's."""
    text = about
    for key in kind.text:
        found = text.get(key)
        text = found if found is not None else {} if key == kind.text[-1] else text
        if not isinstance(text, dict):
            raise InputError(f"{file}: {key} must be an object, not {brief(repr(text))}")
    above = {key: about[key] for key in ("architectures", "tie_word_embeddings") if key in about}
    text = {"eos_token_id": about.get("eos_token_id")} | text | above
    names = text.get("architectures") or []
    if unknown := [name for name in names if name not in kind.architectures] if isinstance(names, list) else [names]:
        raise InputError(f"{file}: {unsupported('architectures', unknown[0], *kind.architectures)}")
    return kind.defaults | {key: value for key, value in text.items() if value is not None}


def renamed(stored: dict[str, Any], kind: ModelType, language: dict[str, Any]) -> dict[str, Any]:
    """The language model's tensors, without a tower's, by the names in kind.shapes."""
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(kind.tower)}
    for start, ours in kind.names.items():
        ours = ours.format(**language) if "{" in ours else ours
        tensors = {ours + name.removeprefix(start) if name.startswith(start) else name: tensor
                   for name, tensor in tensors.items()}
    return tensors


def shards_of(folder: Path) -> list[Path]:
    """A folder's safetensors files: one, or several with an index."""
    index = json_in(folder / "model.safetensors.index.json").get("weight_map", {"": "model.safetensors"})
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise InputError(f"{folder}: weight_map in model.safetensors.index.json must be an object of name: file")
    return [folder / name for name in sorted({*index.values()})]


def read_folder(path: Path, types: dict[str, ModelType]) -> Source:
    """The Source of a folder as published. Raises InputError for what is missing, damaged or not computed here."""
    about, file = json_in(path / "config.json"), path / "config.json"
    kind = kind_of(about, file, types)
    language = language_of(about, file, kind)
    stored = {name: tensor for shard in shards_of(path) for name, tensor in map_safetensors(shard).items()}
    tensors = renamed(stored, kind, language)
    config = kind.config(language, file, tensors)
    shapes = kind.shapes(config)
    return Source(path, kind, about, language, config, fitting(tensors, shapes, config.tie_word_embeddings, path),
                  {name: tensor for name, tensor in tensors.items() if name not in shapes},
                  {name: tensor for name, tensor in stored.items() if name.startswith(kind.tower)},
                  json_in(path / "generation_config.json"), lambda: load_tokenizer(path))


def fitting(stored: dict[str, Any], shapes: dict[str, tuple[int, ...]], tied: bool, path: Path) -> dict[str, Any]:
    """The stored tensors of `shapes`; no head that is the embedding again. Raises InputError if one is missing."""
    tensors, wrong = {key: stored[key] for key in shapes if key in stored}, f"{path}: the weights don't fit config.json"
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise InputError(f"{wrong}: {name} has shape {list(tensors[name].shape)}, not {list(shape)}")
        if name not in tensors and (name != "lm_head.weight" or not tied):
            raise InputError(f"{wrong}: {name} is missing, or its type is none of {', '.join(DTYPES)}")
    head: Any = tensors.get("lm_head.weight")
    embedding: Any = tensors.get("model.embed_tokens.weight")
    if tied and head is not None and head.dtype == embedding.dtype \
            and all(map(np.array_equal, head.data, embedding.data)):  # row by row, which takes no memory
        del tensors["lm_head.weight"]
    return tensors


def load_weights(source: Source) -> dict[str, Any]:
    """The weights in float32, by short names; w["layers"][i] holds those of one decoder layer."""
    tensors = source.tensors
    # One more than num_hidden_layers in a Qwen3.5 with an MTP head.
    n_layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    weights: dict[str, Any] = {"layers": [{} for _ in range(n_layers)]}
    for name, tensor in tensors.items():
        parts = name.removesuffix(".weight").split(".")  # model.layers.7.self_attn.q_proj becomes layers[7]["q_proj"]
        place = weights["layers"][int(parts[2])] if "layers" in parts else weights
        if "experts" in parts:  # model.layers.7.mlp.experts.3.up_proj.weight becomes layers[7]["experts"][3]["up_proj"]
            place = place.setdefault("experts", {}).setdefault(int(parts[5]), {})
        place[parts[-1]] = to_float32(tensor)
    weights.setdefault("lm_head", weights["embed_tokens"])
    return weights


def with_heads(source: Source, heads: list[Any]) -> list[dict[str, Any]]:
    """The weights of a source, as often as there are heads, each with one of these tensors [rows, hidden_size]."""
    weights = load_weights(source)
    return [weights | {"lm_head": to_float32(head)} for head in heads]


@dataclass(frozen=True)
class Engine:
    """The parts that a faster implementation replaces; sampling, generation and the command line exist once."""
    load_weights: Callable[[Source], Any] = load_weights  # model.weights, in any form the other parts want
    new_cache: type[KVCache] = KVCache
    run: Callable[[Any, Pass], tuple[np.ndarray, np.ndarray]] = run_pass
    rows: Callable[..., np.ndarray] = lambda model, name, ids: model.weights[name][ids]  # of lm_head or embed_tokens
    # A source's weights with each of these heads [rows, hidden_size]: qwen3_tts.py has one for each code.
    with_heads: Callable[[Source, list[Any]], list[Any]] = with_heads
    overflow: str = "a number is too large for float32"  # if logits aren't finite, but all weights are
    draws: Callable[..., list[np.ndarray]] = lambda *_: []  # of several passes in one call, see qwen3_tts.predict_codes
    guess: Callable[..., tuple[np.ndarray, int]] | None = None  # guesses tokens by an MTP head, see qwen3_5.py
    beside: Callable[..., Any] | None = None  # does other work beside the next passes, see qwen3_tts.heard
    drafts: bool = False  # whether the head guesses by default: in this engine, no guess changes a bit of the answer


@dataclass(frozen=True)
class ModelType:
    """A row of MODEL_TYPES: how to read a model of one model_type. qwen3_5.py and qwen3_lib have more rows."""
    config: Callable[..., Any]  # the Config, from Source.language, config.json's path, and the names of the tensors
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    defaults: dict[str, Any]  # transformers' values of keys that config.json lacks
    architectures: tuple[str, ...]
    engine: Engine = Engine()
    layer: Callable[..., np.ndarray] = decoder_layer
    text: tuple[str, ...] = ()  # the keys that lead to the language model's object; all but the last may be absent
    names: dict[str, str] = field(default_factory=dict)  # how names begin in the files -> in `shapes`
    cut: Callable[..., Any] = lambda tensors, config, path: tensors  # joined tensors of the files, cut
    tower: tuple[str, ...] = ()  # how the names of a tower's tensors begin
    media: str = ""  # the module that reads the tower: its media_of(source) gives Model.media
    seeing: dict[str, Any] = field(default_factory=dict)  # transformers' values for pictures
    instead: str = ""  # for a model that gives no answers: the script to use it with
    fast: str = "qwen3_lib.kernels.dense"  # the module with what the fast engine has for its layers; "" if nothing
    quantize: str | None = None  # how the fast engine packs the weights, unless the caller says so
    fewest: str = ""  # "int8": packed in 8 bits where the caller asks for 4, which harm this model


QWEN3 = ModelType(config_of, tensor_shapes, {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4}, ("Qwen3ForCausalLM",))
QWEN3_VL = replace(QWEN3, architectures=("Qwen3VLForConditionalGeneration",), text=("text_config",),
                   defaults=QWEN3.defaults | {"max_position_embeddings": 128000, "rope_theta": 5e5},
                   names={"model.language_model.": "model."}, tower=("model.visual.",), media="qwen3_vision",
                   seeing={"mrope_section": [24, 20, 20], "deepstack_visual_indexes": [8, 16, 24]})
MODEL_TYPES = {"qwen3": QWEN3, "qwen3_vl": QWEN3_VL}


@dataclass(frozen=True, repr=False)
class Model:
    """A loaded model: where it comes from, config, weights, tokenizer, its authors' defaults, and the engine."""
    source: Source
    config: Config
    weights: Any
    tokenizer: Tokenizer  # None if it was loaded without one
    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int | None
    engine: Engine
    embeds: bool = False  # an embedding model or classifier, which can't answer: see qwen3_embed.py
    media: Any = None  # its Pictures or Sounds, if it sees or hears: their tokens have ids below 0

    @property
    def path(self) -> Path:
        return self.source.path

    def __repr__(self) -> str:
        return f"<Model {self.path.name}: {self.config.num_hidden_layers} layers of {self.config.hidden_size}>"


log = logging.getLogger("qwen3")
log.addHandler(logging.NullHandler())  # nothing is printed unless the program around this file asks for it
HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "qwen3_lib"  # what stands on this file, where it is there
BUNDLED: Any = next(filter(Path.is_dir, (HERE / "demo", LIBRARY / "demo")), None)  # the small model, if it is there


def load_model(name: str | Path, engine: Engine | Callable[..., Engine] = Engine(), offline: bool = False,
               tokenizer: bool = True, adapter: str | Path | None = None, **others: Never) -> Model:
    """Loads a folder with config.json, tokenizer.json and *.safetensors as published on Hugging Face.

    With qwen3_lib beside this file, `name` may also be a GGUF file, or a model on the hub (Qwen/Qwen3-0.6B, or 0.6B),
    which is downloaded unless it is in the hub's cache or `offline`; `adapter` is the folder of a LoRA adapter. With
    tokenizer=False, the model takes and gives token ids.
    Raises InputError, one line that names the file, for anything missing, damaged or unsupported.
    """
    if others:
        raise InputError(f"load_model of qwen3 has no option {min(others)}; that of qwen3_numba, the fast engine, has "
                         "quantize, threads, kv_dtype and activations")
    if LIBRARY.is_dir():
        from qwen3_lib.io.models import open_model
        source = open_model(str(name), offline, adapter)
    else:
        path, types = Path(os.path.expanduser(str(name))), MODEL_TYPES
        if adapter is not None or not os.path.isfile(path / "config.json"):
            raise InputError(f"{name}: no folder with config.json; other models and adapters need the folder qwen3_lib")
        for module in ("qwen3_5", "qwen3_asr", "qwen3_tts"):
            if (HERE / f"{module}.py").is_file():
                types = types | import_module(module).MODEL_TYPES
        source = read_folder(path, types)
    kind = source.kind
    beside = kind.media and (HERE / f"{kind.media}.py").is_file()
    media = import_module(kind.media).media_of(source) if beside else None
    engine = engine if isinstance(engine, Engine) else engine(source)  # chosen by the model's size
    engine = kind.engine if engine == Engine() else engine
    start = time.perf_counter()
    text_side: Any = source.tokenizer() if tokenizer else None
    sampling, longest, ends = generation_defaults(source)
    model = Model(source, source.config, engine.load_weights(source), text_side, sampling,
                  ends or source.config.eos_token_ids, longest, engine, source.embeds, media)
    if log.isEnabledFor(logging.INFO) and LIBRARY.is_dir():
        from qwen3_lib.io.facts import banner, weight_bytes
        log.info("loaded %s in %.2f s: %s, a token reads %.0f MB of weights", model.path, time.perf_counter() - start,
                 banner(model), weight_bytes(model) / 1e6)
    return model


def generation_defaults(source: Source) -> tuple[Sampling, int | None, tuple[int, ...]]:
    """(sampling, max_new_tokens, eos_token_ids) of generation_config.json. Raises InputError for wrong values."""
    raw = {key: value for key, value in source.generation.items() if value is not None}
    given = {key: raw[key] for key in asdict(Sampling()) if key in raw}
    # As in transformers: greedy without do_sample; with do_sample, top_k is 50 unless given.
    given = {"temperature": 1.0, "top_k": 50} | given if raw.get("do_sample") else given | {"temperature": 0.0}
    try:
        longest = checked_whole("max_new_tokens", raw["max_new_tokens"], 1) if "max_new_tokens" in raw else None
        return Sampling(**given), longest, ids_in(raw)
    except InputError as error:
        raise InputError(f"{source.path / 'generation_config.json'}: {error}") from error


# ---- Checks: each raises InputError ----------------------------------------------------------------------------------

RANGES = {"temperature": (0, 1e4), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (1e-4, 1e4),
          "presence_penalty": (-1e4, 1e4), "frequency_penalty": (-1e4, 1e4)}  # of Sampling


def checked_ids(model: Model, token_ids: TokenIds) -> np.ndarray:
    """The token ids of one sequence as an array [n]. Raises InputError unless there are some and all are known."""
    ids = np.array(token_ids, dtype=object)  # object, so that 1.5 and True stay what they are
    if ids.shape == (0,):
        raise InputError("the prompt is empty")
    if ids.ndim != 1 or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids):
        raise InputError(f"a prompt must be one list of token ids, not {brief(token_ids, 80)}")
    known = model.media or ()  # a picture's tokens have ids below 0
    if wrong := [i for i in ids if not 0 <= i < model.config.vocab_size and i not in known]:
        raise InputError(f"token id {wrong[0]} is out of range: the model has {model.config.vocab_size} tokens")
    return ids.astype(np.int64)


def checked_whole(name: str, value: Any, minimum: int) -> int:
    """The value. Raises InputError unless it is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise InputError(f"{name} must be a whole number, {minimum} or more, not {brief(repr(value))}")
    return int(value)


def checked_number(name: str, value: Any, low: float, high: float) -> float:
    """The value. Raises InputError unless it is a number from low to high."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not low <= value <= high:
        raise InputError(f"{name} must be a number from {low:.9g} to {high:.9g}, not {brief(repr(value))}")
    return float(value)


def check_answers(model: Model) -> None:
    """Raises InputError for a model that gives no answers."""
    if model.embeds or model.source.kind.instead:
        what, instead = ("an embedding model or classifier", "qwen3_embed.py") if model.embeds else \
            ("a model that speaks", model.source.kind.instead)
        raise InputError(f"{model.path}: {what} gives no answers: use {instead}")


def check_cache(model: Model, cache: KVCache) -> None:
    """Raises InputError for the cache of another model or engine."""
    if model.engine.new_cache.kind != cache.kind:
        raise InputError("this model needs a cache of another class: model.engine.new_cache(model.config)")
    if cache.config != model.config:
        raise InputError("the cache belongs to another model")


def check_finite(model: Model, logits: np.ndarray) -> None:
    """Raises InputError unless all logits are finite; it names the first damaged tensor. Its cause tells the kind."""
    if not np.isfinite(logits).all():
        reason = next((f"{name} has NaN or infinity" for name, tensor in model.source.tensors.items()
                       if tensor.dtype in DTYPES and not np.isfinite(to_float32(tensor)).all()), model.engine.overflow)
        raise InputError(f"{model.path}: the logits are not finite: {reason}") from FloatingPointError()


# The names and types of options, for type checkers: those of Sampling, and of qwen3_lib/generation/options.py.
SamplingOptions = TypedDict("SamplingOptions", {
    "temperature": float | None, "top_k": int | None, "top_p": float | None, "min_p": float | None,
    "repetition_penalty": float | None, "presence_penalty": float | None, "frequency_penalty": float | None},
    total=False)
MoreOptions = TypedDict("MoreOptions", {
    "stop": str | Iterable[str] | None, "logprobs": int | None, "think_budget": int | None, "stop_loops": bool | None,
    "lookup": int | None, "draft": Any, "max_string": int | None, "logit_bias": dict[Any, float] | None,
    "max_pixels": int | None, "schema": Any}, total=False)


# ---- The command line ------------------------------------------------------------------------------------------------

def accept_all_text(stream: Any) -> None:
    """Lets a stream take every character: UTF-8 on Windows; elsewhere a question mark for one that it can't show."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="replace")


def main(argv: list[str] | None = None, answer: Callable[..., Any] = chat, more: tuple[Any, ...] = ()) -> int:
    """Answers a prompt -> exit status: 0; 1 for bad input, in one line on stderr; 2 for bad usage; 130 after Ctrl-C.

    The `answer` of qwen3_vision.py takes `more` options, each argparse.ArgumentParser a group of them.
    """
    sys.modules.setdefault("qwen3", sys.modules[__name__])  # so that nothing imports a second copy of this file

    def work() -> int:
        if LIBRARY.is_dir():  # with many more options
            from qwen3_lib.app.cli import main as with_all_options
            return with_all_options(argv)
        parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, parents=more,
                                         description="%(prog)s [options] prompt: answers it with a Qwen3 model")
        add = parser.add_argument
        add("prompt", nargs="*", help="what to ask; a piped text follows it")
        add("--model", default=BUNDLED, required=BUNDLED is None, help="folder with Qwen's own files")
        add("--no-think", dest="enable_thinking", action="store_false", default=None, help="answer without reasoning")
        for name, kind, text in (("system", str, "system prompt"), ("max-tokens", int, "longest answer"),
                                 ("seed", int, "the same seed gives the same answer"),
                                 ("temperature", float, "0 takes the likeliest token; the default is the model's"),
                                 ("top-k", int, "draw from so many tokens only"),
                                 ("top-p", float, "draw from the likeliest tokens that reach this probability")):
            add(f"--{name}", type=kind, help=text)
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            parser.error(f"unknown option {unknown[0]}; the folder qwen3_lib beside qwen3.py has more options, "
                         "qwen3_vision.py has --image")
        piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
        prompt = "\n\n".join(filter(None, (" ".join(args.prompt), piped))) or parser.error("there is no prompt")
        accept_all_text(sys.stdout)
        options = {name: value for name, value in vars(args).items() if name not in ("prompt", "model")}
        for piece in answer(load_model(args.model), prompt, **options):
            print(piece, end="", flush=True)
        print()
        return 0

    return in_one_line(work)


def in_one_line(work: Callable[[], int]) -> int:
    """Does the work of a command -> exit status. Bad input, Ctrl-C and a full disk end in one line on stderr."""
    try:
        return work()
    except KeyboardInterrupt:
        print(f"\n{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone: `| head -1`
        os._exit(141)
    except (InputError, ImportError, UnicodeDecodeError, MemoryError) as error:  # UnicodeDecodeError: of the piped text
        print(f"{Path(sys.argv[0]).name}: {str(error) or 'not enough memory'}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        os._exit(1)  # at an ordinary end, Python would write to a full disk again


if __name__ == "__main__":
    sys.exit(main())
