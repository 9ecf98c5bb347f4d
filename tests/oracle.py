"""The whole model in float64, position by position as the papers write it: an oracle for what passes are said to do."""
import math
from types import SimpleNamespace

import numpy as np

from qwen3 import to_float32


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


def hybrid_oracle(model, ids) -> np.ndarray:
    """The logits [n, vocab] of a Qwen3.5, from the tensors of its file: each head's state changes token by token."""
    c, tensors = model.config, stored_tensors(model)
    x = tensors["model.embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        x = hybrid_layer(c, part_of(tensors, f"model.layers.{i}."), x, np.arange(len(ids)))
    x = norm(x, 1 + tensors["model.norm.weight"], c.rms_norm_eps)
    return x @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T


def mtp_oracle(model, states, ids, start) -> tuple[np.ndarray, np.ndarray]:
    """(the states [n, hidden] of an MTP head that reads hidden states and the tokens after them, their logits)."""
    c, tensors = model.config, stored_tensors(model)
    w, embedding = part_of(tensors, f"model.layers.{c.num_hidden_layers}."), tensors["model.embed_tokens.weight"]
    both = [norm(x, 1 + w[f"pre_fc_norm_{name}"], c.rms_norm_eps)
            for name, x in (("embedding", embedding[ids]), ("hidden", states.astype(np.float64)))]
    x = hybrid_layer(c, w, np.concatenate(both, axis=-1) @ w["fc"].T, start + np.arange(len(ids)))
    x = norm(x, 1 + w["norm"], c.rms_norm_eps)
    return x, x @ tensors.get("lm_head.weight", embedding).T


def stored_tensors(model) -> dict[str, np.ndarray]:
    stored = model.source.tensors | model.source.heads
    return {name: to_float32(tensor).astype(np.float64) for name, tensor in stored.items()}


def part_of(tensors, start) -> dict[str, np.ndarray]:
    """The tensors of a layer: "q_proj", "experts.3.up_proj"."""
    names = {name: name.removeprefix(start).removesuffix(".weight") for name in tensors if name.startswith(start)}
    return {short.partition(".")[2] or short: tensors[name] for name, short in names.items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def hybrid_layer(c, w, x, positions) -> np.ndarray:
    """x [n, hidden_size] after a layer of a Qwen3.5."""
    x = x + mixed(c, w, norm(x, 1 + w["input_layernorm"], c.rms_norm_eps), positions)
    return x + fed_forward(c, w, norm(x, 1 + w["post_attention_layernorm"], c.rms_norm_eps))


def mixed(c, w, h, positions) -> np.ndarray:
    """What the delta net, or the attention, of a layer makes of h [n, hidden_size]."""
    n, outs = len(h), []
    frequencies = c.rope_theta ** (-np.arange(0, c.rope_dim, 2) / c.rope_dim)
    if "A_log" in w:
        rows, width = h @ w["in_proj_qkv"].T, w["conv1d"].shape[-1]
        qkv = np.array([silu(sum(w["conv1d"][:, 0, width - 1 - j] * rows[t - j] for j in range(min(width, t + 1))))
                        for t in range(n)])
        z, gains = h @ w["in_proj_z"].T, 1 / (1 + np.exp(-h @ w["in_proj_b"].T))
        kept = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(h @ w["in_proj_a"].T + w["dt_bias"])))
        heads, key, value = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        for head_ in range(heads):
            at = head_ * c.linear_num_key_heads // heads * key
            q, k = qkv[:, at:at + key], qkv[:, c.linear_num_key_heads * key + at:][:, :key]
            q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
            v = qkv[:, 2 * c.linear_num_key_heads * key + head_ * value:][:, :value]
            state, out = np.zeros((value, key)), np.empty((n, value))
            for t in range(n):
                state = kept[t, head_] * state
                state += gains[t, head_] * np.outer(v[t] - state @ k[t], k[t])
                out[t] = state @ q[t] / np.sqrt(key)
            outs.append(norm(out, w["norm"], c.rms_norm_eps) * silu(z[:, head_ * value:][:, :value]))
        return np.concatenate(outs, axis=-1) @ w["out_proj"].T
    else:
        both = (h @ w["q_proj"].T).reshape(n, -1, 2 * c.head_dim).swapaxes(0, 1)
        k, v = ((h @ w[f"{name}_proj"].T).reshape(n, -1, c.head_dim).swapaxes(0, 1) for name in "kv")
        for head_, q in enumerate(both):
            pair = []
            for a, weight in ((q[:, :c.head_dim], w["q_norm"]),
                              (k[head_ * len(k) // len(both)], w["k_norm"])):
                a = norm(a, 1 + weight, c.rms_norm_eps)
                pair.append(np.concatenate([turned(a[:, :c.rope_dim], positions, frequencies),
                                            a[:, c.rope_dim:]], -1))
            scores = np.where(np.tri(n, dtype=bool), pair[0] @ pair[1].T / np.sqrt(c.head_dim), -np.inf)
            outs.append(softmax(scores) @ v[head_ * len(v) // len(both)] / (1 + np.exp(-q[:, c.head_dim:])))
        return np.concatenate(outs, axis=-1) @ w["o_proj"].T


def fed_forward(c, w, h) -> np.ndarray:
    """The FFN of a layer, or its mixture of experts."""
    def swiglu(h, name=""):
        return (silu(h @ w[f"{name}gate_proj"].T) * (h @ w[f"{name}up_proj"].T)) @ w[f"{name}down_proj"].T

    if "gate" not in w:
        return swiglu(h)
    probabilities, out = softmax(h @ w["gate"].T), np.empty_like(h)
    for t in range(len(h)):
        best = np.argsort(-probabilities[t])[:c.num_experts_per_tok]
        total = probabilities[t, best].sum() if c.norm_topk_prob else 1
        out[t] = sum(probabilities[t, e] / total * swiglu(h[t], f"experts.{e}.") for e in best)
        out[t] += swiglu(h[t], "shared_expert.") * sigmoid(w["shared_expert_gate"][0] @ h[t])
    return out


def flash_mtp_oracle(model, states, ids, start) -> tuple[np.ndarray, np.ndarray]:
    """mtp_oracle of a Qwen3.8-Flash-Next: states [n, streams * hidden_size]. A stream of a token at a time."""
    c, tensors = model.config, stored_tensors(model)
    begin, embedding = f"model.layers.{c.num_hidden_layers}.", tensors["model.embed_tokens.weight"]
    w = part_of(tensors, begin)  # of attention and experts; the streams' weights have the same last names
    own = {name.removeprefix(begin).removesuffix(".weight"): array for name, array in tensors.items()}

    def read(streams, name):
        """(what is read [hidden_size], how much each stream takes of what is written)"""
        each = np.array([norm(x, 1 + g, c.rms_norm_eps) for x, g in zip(
            streams, own[f"{name}.hc_norm"].reshape(streams.shape))])
        inner = silu(own[f"{name}.input_mix_weight_down"] @ each.reshape(-1) / c.hc_count)
        switch = sigmoid(own[f"{name}.input_mix_weight_up"] @ inner).reshape(each.shape)
        taken = own.get(f"{name}.block_inject_weight", np.zeros((c.hc_count, each.size))) @ each.reshape(-1)
        return sum(switch * each) / c.hc_count, 2 * sigmoid(taken / c.hc_count)

    def halves(streams, name, function):
        found = [read(each, name) for each in streams]
        out = function(np.array([h for h, _ in found]))
        return np.array([each + np.outer(taken, x) for each, (_, taken), x in zip(streams, found, out)])

    streams = []
    for state, token in zip(states.astype(np.float64), ids):
        new = own["fc_embedding"] @ norm(embedding[token], 1 + own["pre_fc_norm_embedding"], c.rms_norm_eps)
        old = norm(state, 1 + own["pre_fc_norm_hidden"], c.rms_norm_eps).reshape(c.hc_count, -1)
        streams.append([own["fc_hidden"] @ each + new for each in old])
    positions = start + np.arange(len(ids))
    streams = halves(np.array(streams), "attn_hyper_connection", lambda h: mixed(c, w, h, positions))
    streams = halves(streams, "mlp_hyper_connection", lambda h: fed_forward(c, w, h))
    h = np.array([read(each, "hyper_connection_mixer")[0] for each in streams])
    return streams.reshape(len(ids), -1), h @ tensors.get("lm_head.weight", embedding).T


def ears_oracle(tower, mel, n_layers, n_heads) -> np.ndarray:
    """The tower of a Qwen3-ASR, from the tensors in its file: log-mel [frames, pitches] of a window -> embeddings
    [tokens, width]. Each place of a convolution, and each token, by itself."""
    w = {name.removeprefix("thinker.audio_tower."): to_float32(tensor).astype(np.float64)
         for name, tensor in tower.items()}

    def gelu(x):
        return np.array([value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x.flat]).reshape(x.shape)

    def dense(x, name):
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def normed(x, name):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def convolved(x, name):
        """x [channels, pitches, times] at every second place, with the neighbours at its sides, 0 beyond the edges."""
        out = np.empty((len(w[f"{name}.bias"]), -(-x.shape[1] // 2), -(-x.shape[2] // 2)))
        for p in range(out.shape[1]):
            for t in range(out.shape[2]):
                out[:, p, t] = w[f"{name}.bias"]
                for i in range(max(2 * p - 1, 0), min(2 * p + 2, x.shape[1])):
                    for j in range(max(2 * t - 1, 0), min(2 * t + 2, x.shape[2])):
                        out[:, p, t] += w[f"{name}.weight"][:, :, i - 2 * p + 1, j - 2 * t + 1] @ x[:, i, j]
        return gelu(out)

    tokens, d = [], w["conv_out.weight"].shape[0]
    for start in range(0, len(mel), 100):
        frames, image = min(len(mel) - start, 100), np.zeros((1, mel.shape[1], 100))
        image[0, :, :frames] = mel[start:start + frames].T
        for name in ("conv2d1", "conv2d2", "conv2d3"):
            image = convolved(image, name)
        for t in range(-(-frames // 8)):
            angles = [t / 10_000 ** (i / (d // 2 - 1)) for i in range(d // 2)]
            place = [*map(math.sin, angles), *map(math.cos, angles)]
            tokens.append(w["conv_out.weight"] @ image[:, :, t].reshape(-1) + place)
    for layer in range(n_layers):
        name, size = f"layers.{layer}", d // n_heads
        h = [normed(x, f"{name}.self_attn_layer_norm") for x in tokens]
        q, k, v = (np.array([dense(x, f"{name}.self_attn.{part}_proj") for x in h]) for part in "qkv")
        for t in range(len(tokens)):
            heads = [softmax(k[:, i:i + size] @ q[t, i:i + size] / math.sqrt(size)) @ v[:, i:i + size]
                     for i in range(0, d, size)]
            x = tokens[t] + dense(np.concatenate(heads), f"{name}.self_attn.out_proj")
            tokens[t] = x + dense(gelu(dense(normed(x, f"{name}.final_layer_norm"), f"{name}.fc1")), f"{name}.fc2")
    return np.array([dense(gelu(dense(normed(x, "ln_post"), "proj1")), "proj2") for x in tokens])
