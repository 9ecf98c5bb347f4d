"""The whole model in float64, position by position as the papers write it: an oracle for what passes are said to do."""
from types import SimpleNamespace

import numpy as np


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def turned(x, positions, frequencies):
    """Pairs as complex numbers, multiplied by exp(i * angle)."""
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def oracle(model, ids) -> SimpleNamespace:
    """Streams [layers + 1, n, hidden], attention [layers, heads, n, n], q and k before RoPE, logits [n, vocab]."""
    c, n = model.config, len(ids)
    frequencies = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    group, positions = c.num_attention_heads // c.num_key_value_heads, np.arange(n)
    x = model.weights["embed_tokens"][ids].astype(np.float64)
    out = SimpleNamespace(streams=[x], attention=[], q=[], k=[])
    for layer in model.weights["layers"]:
        w = {name: array.astype(np.float64) for name, array in layer.items()}
        h = norm(x, w["input_layernorm"], c.rms_norm_eps)
        q, k, v = ((h @ w[f"{name}_proj"].T).reshape(n, -1, c.head_dim).swapaxes(0, 1) for name in "qkv")
        q, k = norm(q, w["q_norm"], c.rms_norm_eps), norm(k, w["k_norm"], c.rms_norm_eps)
        heads, maps = [], []
        for i in range(c.num_attention_heads):
            a, b = turned(q[i], positions, frequencies), turned(k[i // group], positions, frequencies)
            scores = np.where(positions[:, None] >= positions, a @ b.T / np.sqrt(c.head_dim), -np.inf)
            maps.append(softmax(scores))
            heads.append(maps[-1] @ v[i // group])
        x = x + np.concatenate(heads, axis=-1) @ w["o_proj"].T
        h = norm(x, w["post_attention_layernorm"], c.rms_norm_eps)
        gate = h @ w["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up_proj"].T)) @ w["down_proj"].T
        out.streams.append(x)
        for name, value in (("attention", maps), ("q", q), ("k", k)):
            getattr(out, name).append(value)
    out.logits = head(model, x)
    return out


def head(model, x):
    """The head's answer to residual streams [n, hidden] -> [n, vocab]."""
    w = model.weights
    return norm(x, w["norm"].astype(np.float64), model.config.rms_norm_eps) @ w["lm_head"].astype(np.float64).T
