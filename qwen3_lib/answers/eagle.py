"""EAGLE-3 heads: one small layer that guesses the next tokens of the model it was trained for.

    residual stream before three layers -> fc -> hidden [n, hidden_size]
    hidden and the embedding of the next token -> decoder layer -> norm -> lm_head -> logits of the token after that one

The head's own output is the hidden state for the next guess. Its vocabulary is the model's most frequent tokens.
Source: Li et al. 2025 (EAGLE-3).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen3 import (CHUNK, DTYPES, Config, Folder, InputError, KVCache, Model, Tensor, apply_rope, brief,
                   checked_whole, config_of, linear, rms_norm, rope_tables, swiglu, to_float32)

HEAD_DTYPES = DTYPES | {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "BOOL": np.dtype("?")}
UNKNOWN = ("norm_output", "norm_before_fc", "fc_norm")  # keys of later kinds of heads, which are refused


@dataclass(frozen=True)
class Head:
    """A loaded head; `weights` by short names, like those of a decoder layer."""
    config: Config  # of a model with this one layer
    weights: dict[str, np.ndarray]
    embedding: Tensor | None  # of its own, in the file; None: the model's
    layers: tuple[int, ...]  # of the model: the head takes the residual stream before each of them
    token_ids: np.ndarray  # of the model, for each row of lm_head
    norm_before_residual: bool

    def fused(self, streams: dict[int, np.ndarray]) -> np.ndarray:
        """Layer -> residual stream [n, hidden_size] before it, of the model -> hidden [n, hidden_size]."""
        return linear(np.concatenate([streams[layer] for layer in self.layers], axis=-1), self.weights["fc"])

    def embedded(self, model: Model, token_ids: np.ndarray) -> np.ndarray:
        if self.embedding is None:
            return model.engine.rows(model, "embed_tokens", token_ids)
        return to_float32(self.embedding._replace(data=self.embedding.data[token_ids]))

    def forward(self, embedded: np.ndarray, hidden: np.ndarray, token_ids: np.ndarray, cache: KVCache) -> np.ndarray:
        """The layer: embedded, hidden [n, hidden_size] of new tokens [n] -> the last one's output [hidden_size]."""
        positions = cache.reserve(len(token_ids))
        for start in range(0, len(token_ids), CHUNK):
            now = slice(start, start + CHUNK)
            x = self.layer(embedded[now], hidden[now], cache, *rope_tables(self.config, positions[now]))
            cache.advance(token_ids[now])
        return x[-1]

    def layer(self, embedded: np.ndarray, hidden: np.ndarray, cache: KVCache, cos: np.ndarray,
              sin: np.ndarray) -> np.ndarray:
        """qwen3.decoder_layer without QK-Norm, and with q, k and v of [embedding, hidden]."""
        w, eps, n = self.weights, self.config.rms_norm_eps, len(hidden)
        normed = rms_norm(hidden, w["hidden_norm"], eps)
        h = np.concatenate([rms_norm(embedded, w["input_layernorm"], eps), normed], axis=-1)
        q, k, v = (linear(h, w[name]).reshape(n, -1, self.config.head_dim).swapaxes(0, 1)
                   for name in ("q_proj", "k_proj", "v_proj"))
        out = cache.attend(0, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        x = normed if self.norm_before_residual else hidden
        x = x + linear(out.swapaxes(0, 1).reshape(n, -1), w["o_proj"])
        h = rms_norm(x, w["post_attention_layernorm"], eps)
        return x + swiglu(h, w["gate_proj"], w["up_proj"], w["down_proj"])

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """The layer's output [hidden_size] -> logits [vocab_size] of the model's tokens, -inf for unknown ones."""
        logits = np.full(self.config.vocab_size, -np.inf, np.float32)
        normed = rms_norm(hidden, self.weights["norm"], self.config.rms_norm_eps)
        logits[self.token_ids] = linear(normed, self.weights["lm_head"])
        return logits


def is_head(folder: Folder) -> bool:
    """Whether config.json says that the folder is an EAGLE-3 head."""
    config = folder.json("config.json")
    names = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    return "eagle3" in names or "draft_vocab_size" in config


def load_head(folder: Folder, model: Model) -> Head:
    """A head of this model, as published in safetensors. Raises InputError for the head of another model.

    speculators (RedHatAI) nest the layer's sizes in transformer_layer_config and call the layer layers.0, others
    midlayer. Without embed_tokens of its own, a head takes the model's.
    """
    file, raw = folder.path / "config.json", folder.json("config.json")
    sizes = raw.get("transformer_layer_config", raw)
    if not isinstance(sizes, dict) or any(map(raw.get, UNKNOWN)) or sizes.get("num_hidden_layers") != 1:
        raise InputError(f"{file}: only EAGLE-3 heads of one layer are supported, without {', '.join(UNKNOWN)}")
    large, heads = model.config, checked_whole("num_attention_heads", sizes.get("num_attention_heads"), 1)
    head_dim = sizes.get("head_dim") or large.hidden_size // heads
    config = config_of(sizes | {"head_dim": head_dim, "max_position_embeddings": large.context_length,
                                "model_type": "qwen3", "architectures": None}, file)
    if (config.hidden_size, config.vocab_size) != (large.hidden_size, large.vocab_size):
        raise InputError(f"{folder.path} is a head for another model than {model.path}: hidden_size "
                         f"{config.hidden_size} and vocab_size {config.vocab_size}, not {large.hidden_size} and "
                         f"{large.vocab_size}")
    n = large.num_hidden_layers
    layers = raw.get("eagle_aux_hidden_state_layer_ids") or [2, n // 2, n - 3]
    if not isinstance(layers, list) or len(layers) != 3 or not all(layer in range(n) for layer in layers):
        raise InputError(f"{file}: a head sees three layers of {model.path}, which has {n}, not {brief(repr(layers))}")
    rows = checked_whole(f"{file}: draft_vocab_size", raw.get("draft_vocab_size") or large.vocab_size, 1)
    tensors = tensors_of(folder, config, rows)
    embedding, token_ids = tensors.pop("embed_tokens", None), np.arange(rows)
    if "d2t" in tensors:
        token_ids += tensors.pop("d2t").data
    if token_ids.min() < 0 or token_ids.max() >= large.vocab_size:
        raise InputError(f"{folder.path}: d2t names tokens that {model.path} doesn't have")
    weights = {name: to_float32(tensor) for name, tensor in tensors.items()}
    return Head(config, weights, embedding, tuple(layers), token_ids, bool(raw.get("norm_before_residual")))


def tensors_of(folder: Folder, config: Config, rows: int) -> dict[str, Tensor]:
    """The head's tensors by short names; `rows` are lm_head's.

    Raises InputError for missing, misshapen and unknown ones.
    """
    d, inner, q_size = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    tensors = {name.removesuffix(".weight").rpartition(".")[2]: tensor  # midlayer.self_attn.q_proj.weight: q_proj
               for name, tensor in folder.stored(HEAD_DTYPES).items()}
    tensors.pop("t2d", None)  # which of the model's tokens the head knows: d2t says it, too
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (d, 3 * d), "hidden_norm": (d,), "input_layernorm": (d,), "q_proj": (q_size, 2 * d),
        "k_proj": (kv_size, 2 * d), "v_proj": (kv_size, 2 * d), "o_proj": (d, q_size),
        "post_attention_layernorm": (d,), "gate_proj": (inner, d), "up_proj": (inner, d), "down_proj": (d, inner),
        "norm": (d,), "lm_head": (rows, d), "embed_tokens": (config.vocab_size, d), "d2t": (rows,)}
    optional = {"embed_tokens", "d2t"} - tensors.keys()
    for name in sorted((shapes.keys() | tensors.keys()) - optional):
        found = tensors[name].shape if name in tensors else "missing"
        if found != shapes.get(name):
            raise InputError(f"{folder.path}: the tensor {name} of an EAGLE-3 head must be {shapes.get(name)}, "
                             f"not {found}")
    return tensors
