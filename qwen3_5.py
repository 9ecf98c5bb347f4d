# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "prompt_toolkit>=3.0.40",
#                 "threadpoolctl>=3.5"]
# ///
"""Qwen3.5, 3.6 and 3.8 in plain NumPy: three layers of four keep a state of fixed size in place of keys and values.

    python qwen3_5.py --model Qwen3.5-0.8B "What is the capital of France?"     a folder with Qwen's own files

This file stands on qwen3.py, which you should read first, and has what is new. Read it from top to bottom:

    config -> components -> the state, in place of a cache -> the MTP head -> loading -> command line

The data flow, with the sizes of Qwen3.5-0.8B (`n` is the number of tokens):

    token ids [n] -> embedding [n, 1024] -> 24 x decoder layer [n, 1024] -> RMSNorm -> lm_head -> logits [n, 248320]
    decoder layer:  x + mixer(RMSNorm(x)), then  x + swiglu(RMSNorm(x)), or moe with an expert for all positions
    mixer:          three times gated_delta_net, then once gated_attention, and so on

The words that qwen3.py doesn't have:

    gated delta net   a layer that reads a text like a recurrent network: it changes a state with each token
    state S           a matrix [key_dim, value_dim] for each head, a memory of pairs: a key k recalls the value k S
    delta rule        to store a value under a key, add only its difference to the value that the key recalls
    decay             before each token, the state is multiplied by exp(g), a number from 0 to 1: it forgets
    partial RoPE      only the first quarter of a head is turned by its position
    vision tower      model.visual.* in the files, read by qwen3_vision.py
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

if __name__ == "__main__" and find_spec("qwen3") is None:
    sys.exit("qwen3_5.py: it needs qwen3.py and tokenizer_utils.py beside it")

import qwen3  # first: it says in one line what is missing
import numpy as np
from qwen3 import (QWEN3, QWEN3_VL, Config, Engine, KVCache, Model, ModelType, Pass, Source, TokenIds, apply_rope,
                   checked_number, checked_whole, config_of, embed_tokens, linear, moe, rms_norm, rope_of, rope_tables,
                   swiglu)
from tokenizer_utils import InputError, brief

__all__ = ["HybridCache", "HybridConfig", "delta_rule", "delta_rule_in_chunks"]

# ---- Config ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class HybridConfig(Config):
    """qwen3.Config, and the fields of the new layers. `sparse_layers` count an MTP head's layer, too."""
    linear_layers: tuple[int, ...]  # the layers that are gated delta nets; the others attend
    linear_num_key_heads: int  # heads of q and k, each shared by a group of value heads
    linear_num_value_heads: int  # heads of v, and states
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int  # width of the convolution: how many tokens it sees
    shared_expert_intermediate_size: int = 0  # width inside the expert that all positions go through
    mtp_num_hidden_layers: int = 0  # 1 with an MTP head, whose layer stands after the others

    @property
    def conv_dim(self) -> int:
        """The channels of the convolution: q, k and v of all heads."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + \
            self.linear_num_value_heads * self.linear_value_head_dim


# ---- Components, in the order of the data flow -----------------------------------------------------------------------

def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)): a switch from 0 to 1."""
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x): 0 far below 0, x far above."""
    return x * sigmoid(x)


def causal_convolution(x: np.ndarray, weight: np.ndarray, history: np.ndarray, guesses: int = 0,
                       step: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """silu of each channel's weighted sum over the last few tokens: x [n, channels] -> the same shape, new history.

    weight [channels, width]: of each step-th token; history [(width - 1) * step, channels] are the rows before x. So a
    head sees what stands just before a token without attention. The new history begins before the last `guesses` rows,
    and has them, too.
    """
    n, width = len(x), weight.shape[1]
    rows = np.concatenate([history, x])
    out = sum(rows[i * step:i * step + n] * weight[:, i] for i in range(width))
    return silu(out), rows[n - guesses:].copy()  # a view would keep all rows in memory


def unit_length(x: np.ndarray) -> np.ndarray:
    """x [..., d] divided by its Euclidean norm."""
    return x / np.sqrt(np.einsum("...i,...i->...", x, x)[..., None] + np.float32(1e-6))


def delta_rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray,
               state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gated delta rule, token by token, as the paper says it (Yang et al. 2024, Gated Delta Networks).

    First the state decays. Then it learns: `beta` (0 to 1) of the difference between v and the value that k recalls is
    stored under k. A key of length 1 that is stored with beta 1 recalls exactly its value, whatever was there before.
    Plain linear attention would add v to the old value. At last, q recalls the output.

    q, k [heads, n, key_dim], v [heads, n, value_dim], g and beta [heads, n], state [heads, key_dim, value_dim]
    -> (out [heads, n, value_dim], the new state)
    """
    out = np.empty_like(v)
    for t in range(v.shape[1]):
        now = slice(t, t + 1)
        state = state * np.exp(g[:, now, None])
        difference = v[:, now] - k[:, now] @ state  # [heads, 1, value_dim]
        state += k[:, now].swapaxes(1, 2) * (beta[:, now, None] * difference)
        out[:, now] = q[:, now] @ state
    return out, state


DELTA_CHUNK = 64  # tokens that the delta rule computes together


def delta_rule_in_chunks(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray,
                         state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """delta_rule for DELTA_CHUNK tokens at a time: matrix products in place of steps. Takes and gives the same.

    With u_t = beta_t (v_t - what k_t recalls), the state after token t is a sum: the decayed first state, and each
    k_j u_jᵀ decayed from j to t. What k_t recalls is then a sum over the earlier u_j, so the u of a block are the
    solution of linear equations, with a matrix that is triangular and has a diagonal of 1:

        u_t + beta_t sum_{j<t} exp(G_t - G_j) (k_t·k_j) u_j = beta_t (v_t - exp(G_t) k_t S),   G_t = g_1 + ... + g_t
        out_t = exp(G_t) q_t S + sum_{j<=t} exp(G_t - G_j) (q_t·k_j) u_j
    """
    out = np.empty_like(v)
    for start in range(0, v.shape[1], DELTA_CHUNK):
        now = slice(start, start + DELTA_CHUNK)
        q_, k_, rate = q[:, now], k[:, now], beta[:, now, None]
        n, keys = k_.shape[1], k_.swapaxes(1, 2)
        total = g[:, now].cumsum(axis=1, dtype=np.float64)[..., None]  # float64, because differences follow
        until = np.exp(total).astype(np.float32)  # [heads, n, 1]: the decay of the first state until each token
        # The mask comes before exp, which could overflow for the tokens to come.
        between = np.where(np.tri(n, dtype=bool), total - total.swapaxes(1, 2), -np.inf)
        between = np.exp(between).astype(np.float32)  # [heads, n, n]
        system = np.tril(rate * between * (k_ @ keys), -1) + np.eye(n, dtype=np.float32)
        u = np.linalg.solve(system, rate * (v[:, now] - until * (k_ @ state)))  # [heads, n, value_dim]
        out[:, now] = until * (q_ @ state) + (between * (q_ @ keys)) @ u
        state = until[:, -1:] * state + (keys * between[:, -1:]) @ u
    return out, state


def mix(rows: np.ndarray, learned: int, state: np.ndarray, shape: tuple[int, int, int],
        rule: Any = delta_rule_in_chunks) -> tuple[np.ndarray, np.ndarray]:
    """The delta rule of some tokens: rows [n, conv_dim + 2 heads], their q, k and v after the convolution, g and beta.

    shape: (heads, key_dim, value_dim); each key head serves a group of value heads. -> (out [n, heads, value_dim], the
    state after the first `learned` tokens).
    """
    n, (heads, key_dim, value_dim) = len(rows), shape
    key_size = (rows.shape[1] - heads * (value_dim + 2)) // 2
    q, k, v, g, beta = np.split(rows, np.cumsum([key_size, key_size, heads * value_dim, heads]), axis=1)
    q, k = (unit_length(a.reshape(n, -1, key_dim).swapaxes(0, 1)) for a in (q, k))  # [key heads, n, key_dim]
    q, k = (a.repeat(heads // len(a), axis=0) for a in (q * np.float32(key_dim ** -0.5), k))
    tokens = q, k, v.reshape(n, heads, value_dim).swapaxes(0, 1), g.T, beta.T
    first, state = rule(*(a[:, :learned] for a in tokens), state)
    last, _ = rule(*(a[:, learned:] for a in tokens), state)
    return np.concatenate([first, last], axis=1).swapaxes(0, 1), state


def gated_delta_net(x: np.ndarray, w: dict[str, Any], config: HybridConfig, cache: Pass, layer: int,
                    gate: Callable[[np.ndarray], np.ndarray] = silu) -> np.ndarray:
    """A mixer without keys and values: x [n, hidden_size] -> the same shape. Writes the new state into the cache."""
    n = len(x)
    # How much is forgotten, and how much is learned, depends on the token. A_log sets a head's usual memory.
    g = -np.exp(w["A_log"]) * np.logaddexp(0, linear(x, w["in_proj_a"]) + w["dt_bias"])  # [n, heads], below 0
    new = linear(x, w["in_proj_qkv"]), g, sigmoid(linear(x, w["in_proj_b"]))
    out = np.concatenate([one.recall(layer, w["conv1d"], *(array[rows] for array in new))  # of each sequence
                          for one, rows in cache.parts])
    z = linear(x, w["in_proj_z"]).reshape(out.shape)  # [n, heads, value_dim], the output's gate
    out = rms_norm(out, w["norm"], config.rms_norm_eps) * gate(z)
    return linear(out.reshape(n, -1), w["out_proj"])


def gated_attention(x: np.ndarray, w: dict[str, Any], config: HybridConfig, cache: Pass, layer: int,
                    cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The attention of qwen3.decoder_layer with two changes: RoPE turns a part of a head, and a gate for each output.

    The rest of a head compares meanings regardless of the distance. The gate lets a head say nothing; in Qwen3, it has
    to look somewhere, most often at the first token.
    """
    n, turned = len(x), config.rope_dim
    q, gate = np.split(linear(x, w["q_proj"]).reshape(n, -1, 2 * config.head_dim), 2, axis=-1)  # [n, heads, head_dim]
    k = linear(x, w["k_proj"]).reshape(n, -1, config.head_dim)
    v = linear(x, w["v_proj"]).reshape(n, -1, config.head_dim).swapaxes(0, 1)
    q, k = (rms_norm(a, norm, config.rms_norm_eps).swapaxes(0, 1) for a, norm in ((q, w["q_norm"]), (k, w["k_norm"])))
    q, k = (np.concatenate([apply_rope(a[..., :turned], cos, sin), a[..., turned:]], axis=-1) for a in (q, k))
    out = cache.attend(layer, q, k, v).swapaxes(0, 1) * sigmoid(gate)
    return linear(out.reshape(n, -1), w["o_proj"])


def feed_forward(h: np.ndarray, w: dict[str, Any], config: HybridConfig) -> np.ndarray:
    """The second half of a layer: h [n, hidden_size] -> the same shape."""
    out = swiglu(h, w["gate_proj"], w["up_proj"], w["down_proj"])
    if "experts" in w:  # then this was the expert that all positions go through, as far as its gate [n, 1] lets them
        out = moe(h, w["gate"], w["experts"], config) + sigmoid(linear(h, w["shared_expert_gate"])) * out
    return out


def decoder_layer(x: np.ndarray, w: dict[str, Any], config: HybridConfig, cache: Pass, layer: int,
                  cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One layer: x [n, hidden_size] -> the same shape. Writes into the caches of a pass."""
    h = rms_norm(x, w["input_layernorm"], config.rms_norm_eps)
    x = x + (gated_delta_net(h, w, config, cache, layer) if layer in config.linear_layers else
             gated_attention(h, w, config, cache, layer, cos, sin))
    return x + feed_forward(rms_norm(x, w["post_attention_layernorm"], config.rms_norm_eps), w, config)


# ---- The state, in place of a cache ----------------------------------------------------------------------------------
# A delta net needs nothing of earlier tokens but its state and the last rows before its convolution: 20 MB in
# Qwen3.5-0.8B, for a text of any length. Only every fourth layer keeps keys and values: 25 kB per position.
# The price: what a state has learned can't be taken out again, so it can't be cut back to an earlier token. But a
# conversation goes on, or is changed, at the border of a turn. So the states at these borders are kept. And a guess
# that may be wrong isn't learned in its own pass, but in the next one, from its q, k, v, g and beta: 0.6 MB.

KEPT_STATES = 2**28  # bytes for kept states: 13 of Qwen3.5-0.8B


class State(NamedTuple):
    """The state of a delta net. Its arrays are never written to, because each pass makes new ones."""
    history: np.ndarray  # [width - 1 + late, conv_dim], the last rows before the convolution
    memory: np.ndarray  # S of each head, which hasn't learned the `late` last tokens yet
    late: np.ndarray  # their q, k and v after the convolution, g and beta, [late, conv_dim + 2 value heads]


STATE_ARRAYS = "history", "state", "late"  # the names of a State's arrays in files


class Snapshot(NamedTuple):
    """The state of each delta net, by its layer, after the first `length` tokens."""
    length: int
    states: dict[int, State]
    kept: bool = False  # also when the text goes on


class HybridCache(KVCache):
    """The keys and values of the layers that attend, and snapshots of the others.

    snapshots: of no tokens, at borders of turns, before each of the last guesses, and at `length`, in this order.
    """
    config: HybridConfig
    kind = "of a hybrid"
    plain: type[KVCache] = KVCache  # of a model whose layers all attend, such as the MTP head

    def __init__(self, config: HybridConfig, max_length: int | None = None):
        super().__init__(config, max_length)
        self.attending = [i for i in range(config.num_hidden_layers) if i not in config.linear_layers]
        self.k, self.v = self.k[:len(self.attending)], self.v[:len(self.attending)]
        self.shape = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        self.empty = State(np.zeros((config.linear_conv_kernel_dim - 1, config.conv_dim), np.float32),
                           np.zeros(self.stored_shape(), np.float32),
                           np.zeros((0, config.conv_dim + 2 * self.shape[0]), np.float32))
        size = len(config.linear_layers) * sum(array.nbytes for array in self.empty)
        self.most = max(KEPT_STATES // max(size, 1), 3)  # the borders before and after the last message, and the first
        self.fixed = (self.most + 2) * size  # with those of now and of the pass that runs
        self.snapshots = [Snapshot(0, dict.fromkeys(config.linear_layers, self.empty), kept=True)]
        self.new, self.sure = dict[int, State](), 0  # of the pass that runs; from which position on it has guesses
        self.marked = list[int]()  # the positions after turns that end in the new tokens

    def stored_shape(self) -> tuple[int, ...]:
        """The shape of an S; faster engines have another one."""
        return self.shape

    def reserve(self, n: int, guesses: int = 0) -> np.ndarray:
        """See KVCache.reserve. The last `guesses` tokens, new or not, may be cut off again."""
        self.truncate(self.length)  # without what an interrupted pass has left
        self.sure = self.length + n - guesses
        return super().reserve(n)

    def unsure(self, n: int) -> int:
        """How many of the next n tokens the states don't learn yet: the guesses, but for the first token."""
        return max(min(self.length + n - self.sure, n - 1), 0)

    def borders(self, token_ids: np.ndarray, ends: Iterable[int]) -> list[int]:
        """See KVCache.borders: behind the last two turns that end in these tokens. The states there are kept."""
        found: list[int] = (np.flatnonzero(np.isin(token_ids, [*ends]))[-2:] + 1).tolist()
        self.marked = [self.length + n for n in found]
        return found

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return super().attend(self.attending.index(layer), q, k, v)

    def recall(self, layer: int, conv1d: np.ndarray, qkv: np.ndarray, g: np.ndarray, beta: np.ndarray) -> np.ndarray:
        """The convolution and the delta rule of new tokens: qkv [n, conv_dim], g and beta [n, value heads]
        -> [n, value heads, value_dim]. The new state counts only after `advance`.
        """
        n, guesses = len(qkv), self.unsure(len(qkv))
        history, state, late = self.snapshots[-1].states[layer]
        qkv, history = causal_convolution(qkv, conv1d, history[len(late):], guesses)
        rows = np.concatenate([late, np.concatenate([qkv, g, beta], axis=1)])  # of all tokens that S hasn't learned
        learned, rule = len(rows) - guesses, delta_rule if n == 1 + guesses else delta_rule_in_chunks
        out, state = mix(rows, learned, state, self.shape, rule)
        self.new[layer] = State(history, state, rows[learned:].copy())
        return out[-n:]

    def advance(self, token_ids: np.ndarray) -> None:
        """Counts the new tokens [n] as filled. Of the snapshots before, those that no guess needs go, unless kept."""
        end = self.length + len(token_ids)
        late = min((len(state.late) for state in self.new.values()), default=0)
        self.snapshots += [Snapshot(end - cut, {
            layer: State(history[:len(history) - cut], memory, rows[:len(rows) - cut])
            for layer, (history, memory, rows) in self.new.items()}) for cut in range(late, -1, -1)]
        super().advance(token_ids)
        self.snapshots = [each for each in self.snapshots if each.kept or each.length >= min(self.sure, end)]
        if end in self.marked:
            self.keep()

    def keep(self) -> None:
        """Keeps the last snapshot. If there are too many, the oldest one goes, but for the first."""
        self.snapshots[-1] = self.snapshots[-1]._replace(kept=True)
        kept = [each for each in self.snapshots if each.kept]
        if len(kept) > 1 + self.most:  # 1: of no tokens
            self.snapshots = [each for each in self.snapshots if each is not kept[2]]

    def copy_from(self, source: Self, n: int) -> None:
        super().copy_from(source, n)
        now = next(each for each in source.snapshots if each.length == n)
        kept = [each for each in source.snapshots if each.kept and each.length < n]
        self.snapshots = [*kept, now._replace(kept=False)]
        self.ahead = source.ahead and source.ahead.copy(n, self.max_length)

    def state(self, length: int) -> dict[str, np.ndarray]:
        """See KVCache.state: history, state and late [n_linear_layers, ...], the State of each delta net."""
        states = next(each.states for each in self.snapshots if each.length == length)
        layers = [states[layer] for layer in self.config.linear_layers]
        return dict(zip(STATE_ARRAYS, map(np.stack, zip(*layers))))

    def go_on(self, token_ids: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """See KVCache.go_on. The state is kept: a conversation goes on there."""
        layers = self.config.linear_layers
        self.new |= dict(zip(layers, map(State, *(state[name] for name in STATE_ARRAYS)))) if layers else {}
        empty, lates = self.snapshots[0].states, {new.late.shape[:1] for new in self.new.values()}
        if self.new.keys() != empty.keys() or len(lates) > 1 or any(
                found.shape != (len(other) + sum(*lates) * (i != 1), *other.shape[1:]) or found.dtype != other.dtype
                for layer, new in self.new.items() for i, (found, other) in enumerate(zip(new, empty[layer]))):
            raise InputError("the states of another cache, or damaged ones")
        super().go_on(token_ids, state)
        self.keep()

    def bytes(self, length: int, more_layers: int = 0) -> int:
        return self.fixed + super().bytes(length, self.config.mtp_num_hidden_layers)  # the MTP head has a cache, too

    def common_prefix(self, token_ids: np.ndarray) -> int:
        """The last position with a snapshot, up to which the cache holds the first of the tokens `token_ids` [n]."""
        n = super().common_prefix(token_ids)
        return max(each.length for each in self.snapshots if each.length <= n)

    def truncate(self, length: int) -> None:
        """Forgets all positions from `length` on. Raises InputError for a length without a snapshot."""
        if length not in (each.length for each in self.snapshots):
            raise InputError(f"no state is kept after {length} of the {self.length} tokens")
        super().truncate(length)
        self.snapshots = [each for each in self.snapshots if each.length <= length]


# ---- The MTP head ----------------------------------------------------------------------------------------------------
# A pass reads all weights for one token, or for a few. So the next tokens are guessed and computed together; each right
# guess saves a pass: see qwen3_lib/generation/guesses.py. The head is one more layer, with a KV cache of its own.

def mtp_config(config: HybridConfig) -> HybridConfig:
    """The config of the head: a model of one layer, which attends."""
    sparse = config.num_hidden_layers in config.sparse_layers
    return replace(config, num_hidden_layers=1, linear_layers=(), sparse_layers=(0,) * sparse)


@np.errstate(over="ignore", invalid="ignore")
def guess(model: Model, states: np.ndarray, token_ids: TokenIds, cache: KVCache, start: int) -> tuple[np.ndarray, int]:
    """The head reads the hidden states [n, hidden_size] of some tokens, and token_ids [n], the token after each.

    -> (what it takes for the hidden states of these next tokens, the token that it guesses after the last of them).
    To guess further, take its states for hidden states and its guess for the next token. `cache` is one of mtp_config,
    its first position that of token `start`. Source: Gloeckle et al. 2024, DeepSeek-AI 2024 (V3).
    """
    w, ids, eps = model.weights["mtp"], np.asarray(token_ids), model.config.rms_norm_eps
    cos, sin = rope_tables(model.config, start + cache.reserve(len(ids)))  # each state at the position of its own token
    following = rms_norm(embed_tokens(model, ids), w["pre_fc_norm_embedding"], eps)
    x = linear(np.concatenate([following, rms_norm(states, w["pre_fc_norm_hidden"], eps)], axis=1), w["fc"])
    x = decoder_layer(x, w, cache.config, cache, 0, cos, sin)  # type: ignore[arg-type]
    cache.advance(ids)
    x = rms_norm(x, w["norm"], eps)
    return x, int(linear(x[-1:], model.weights["lm_head"]).argmax())


# ---- Loading ---------------------------------------------------------------------------------------------------------

LAYER_TYPES = ("linear_attention", "full_attention")
MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
DELTA_FIELDS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                "linear_conv_kernel_dim")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
NEW = ("layer_types", "partial_rotary_factor", "shared_expert_intermediate_size")  # they mean another thing in a Qwen3


def hybrid_config(found: dict[str, Any], file: Path, names: Iterable[str], sparse: bool = False,
                  attending: tuple[str, ...] = LAYER_TYPES[1:]) -> HybridConfig:
    """The HybridConfig of Source.language; sparse: of a mixture of experts. Raises InputError, as config_of does.

    names: of the stored tensors, which tell of an MTP head; attending: the layer_types that attend.
    """
    rope = rope_of(found)
    part = rope.pop("partial_rotary_factor", found["partial_rotary_factor"])
    part = checked_number(f"{file}: partial_rotary_factor", part, 0, 1)
    sizes: dict[str, Any] = {key: checked_whole(f"{file}: {key}", found[key], 1)
                             for key in (*DELTA_FIELDS, *(EXPERTS if sparse else ()))}
    interval = checked_whole(f"{file}: full_attention_interval", found["full_attention_interval"], 1)
    plain = {key: value for key, value in found.items() if key not in NEW and key != "rope_scaling"}
    plain |= {"rope_parameters": rope} | ({"intermediate_size": sizes["moe_intermediate_size"]} if sparse else {})
    config = config_of(plain, file)  # checks the rest
    n = config.num_hidden_layers
    kinds = found.get("layer_types") or [LAYER_TYPES[(i + 1) % interval == 0] for i in range(n)]
    if not isinstance(kinds, list) or len(kinds) != n or {*map(str, kinds)} - {LAYER_TYPES[0], *attending}:
        raise InputError(f"{file}: layer_types = {brief(repr(kinds), 80)} can't be")
    fields = asdict(config) | sizes | {"norm_topk_prob": sparse, "rope_dim": int(config.head_dim * part)}
    mtp = checked_whole(f"{file}: mtp_num_hidden_layers", found.get("mtp_num_hidden_layers", 0), 0)
    has_head = bool(mtp and not found.get("mtp_use_dedicated_embeddings") and any(".fc" in name for name in names))
    fields |= {"mtp_num_hidden_layers": int(has_head), "sparse_layers": tuple(range(n + has_head)) if sparse else ()}
    config = HybridConfig(**fields, linear_layers=tuple(i for i in range(n) if kinds[i] == LAYER_TYPES[0]))
    if config.rope_dim % 2 or not config.rope_dim or config.linear_num_value_heads % config.linear_num_key_heads \
            or sparse and not config.num_experts_per_tok <= config.num_experts <= 10_000:
        raise InputError(f"{file}: no Qwen3.5 has these sizes: RoPE of {config.rope_dim} numbers, {sizes}")
    return config


def tensor_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, but for the vision tower."""
    d, q_size = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_size, heads = config.num_key_value_heads * config.head_dim, config.linear_num_value_heads
    v_size, head_dim = heads * config.linear_value_head_dim, (config.head_dim,)
    attending = {"q_proj.weight": (2 * q_size, d), "k_proj.weight": (kv_size, d), "v_proj.weight": (kv_size, d),
                 "q_norm.weight": head_dim, "k_norm.weight": head_dim, "o_proj.weight": (d, q_size)}
    recurrent = {"in_proj_qkv.weight": (config.conv_dim, d), "in_proj_z.weight": (v_size, d),
                 "in_proj_b.weight": (heads, d), "in_proj_a.weight": (heads, d), "A_log": (heads,), "dt_bias": (heads,),
                 "conv1d.weight": (config.conv_dim, 1, config.linear_conv_kernel_dim),
                 "norm.weight": (config.linear_value_head_dim,), "out_proj.weight": (d, v_size)}

    def swiglu_shapes(name: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {f"mlp.{name}gate_proj.weight": (inner, d), f"mlp.{name}up_proj.weight": (inner, d),
                f"mlp.{name}down_proj.weight": (d, inner)}

    norms: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    dense = swiglu_shapes("", config.intermediate_size)
    sparse = swiglu_shapes("shared_expert.", config.shared_expert_intermediate_size) | {
        "mlp.gate.weight": (config.num_experts, d), "mlp.shared_expert_gate.weight": (1, d)}
    for expert in range(config.num_experts):
        sparse |= swiglu_shapes(f"experts.{expert}.", config.moe_intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_hidden_layers + config.mtp_num_hidden_layers):
        start, mixer = ("linear_attn", recurrent) if i in config.linear_layers else ("self_attn", attending)
        layer = {f"{start}.{name}": shape for name, shape in mixer.items()} | norms
        layer |= sparse if i in config.sparse_layers else dense
        if i == config.num_hidden_layers:
            layer |= {"fc.weight": (d, 2 * d)} | {f"{name}.weight": (d,) for name in MTP_NORMS}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (d,), "lm_head.weight": (config.vocab_size, d)}


def load_weights(source: Source) -> dict[str, Any]:
    """The namesake of qwen3.load_weights."""
    config: Any = source.config
    weights = qwen3.load_weights(source)
    for w in (weights, *weights["layers"]):
        for name in w:
            if "norm" in name and (name != "norm" or "A_log" not in w):  # only a delta net's norm is stored whole
                w[name] = 1 + w[name]  # the files hold the distance from 1
            elif name.endswith("conv1d"):
                w[name] = w[name].reshape(len(w[name]), -1)
    return weights | ({"mtp": weights["layers"].pop()} if config.mtp_num_hidden_layers else {})


DENSE = ModelType(hybrid_config, tensor_shapes, QWEN3.defaults | {
    "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4}, ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    Engine(load_weights, HybridCache, guess=guess),
    names={"model.language_model.": "model.", "mtp.layers.0.": "model.layers.{num_hidden_layers}.",
           "mtp.": "model.layers.{num_hidden_layers}."}, tower=QWEN3_VL.tower, media=QWEN3_VL.media,
                  seeing={"mrope_section": [11, 11, 10]}, fast="qwen3_lib.kernels.hybrid", layer=decoder_layer)
SPARSE = replace(DENSE, config=partial(hybrid_config, sparse=True), defaults=DENSE.defaults | {
    "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"))
MODEL_TYPES = {"qwen3_5_text": DENSE, "qwen3_5": replace(DENSE, text=("text_config",)),
               "qwen3_5_moe_text": SPARSE, "qwen3_5_moe": replace(SPARSE, text=("text_config",))}


if __name__ == "__main__":
    sys.exit(qwen3.main())
