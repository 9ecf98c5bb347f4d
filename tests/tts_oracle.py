"""The codec in float64, sample by sample as its papers write it: an oracle for decode of qwen3_tts.py."""
import math

import numpy as np

from oracle import norm, softmax, turned
from qwen3 import map_safetensors, to_float32


def convolved(x, w, b, dilation=1):
    """y[t, o] = b[o] + sum of w[o, c, j] x[t - (k - 1 - j) dilation, c]; w [outputs, inputs or 1, k]."""
    y, k = np.tile(b, (len(x), 1)), w.shape[2]
    for t in range(len(x)):
        for j in range(k):
            if (seen := t - (k - 1 - j) * dilation) >= 0:
                y[t] += w[:, 0, j] * x[seen] if w.shape[1] == 1 < x.shape[1] else w[:, :, j] @ x[seen]
    return y


def transposed(x, w, b, stride):
    """x[t] adds w[:, :, j] x[t] to y[t * stride + j]; what goes beyond the end is cut. w [inputs, outputs, k]."""
    y = np.tile(b, (len(x) * stride, 1))
    for t in range(len(x)):
        for j in range(w.shape[2]):
            if t * stride + j < len(y):
                y[t * stride + j] += x[t] @ w[:, :, j]
    return y


def codec_oracle(folder, about, codes):
    """Codes [n, groups] -> samples [n * 1920], or so many as the rates give, of the tensors in a folder."""
    w = {name.removeprefix("decoder."): to_float32(tensor).astype(np.float64)
         for name, tensor in map_safetensors(folder / "model.safetensors").items()}

    def conv(x, name, dilation=1):
        return convolved(x, w[f"{name}.weight"], w[f"{name}.bias"], dilation)

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def snake(x, name):
        return x + np.sin(np.exp(w[f"{name}.alpha"]) * x) ** 2 / (np.exp(w[f"{name}.beta"]) + 1e-9)

    parts = []
    for part, some in (("rvq_first", codes[:, :1]), ("rvq_rest", codes[:, 1:])):
        total = 0
        for i, column in enumerate(some.T):
            book = f"quantizer.{part}.vq.layers.{i}._codebook"
            total = total + (w[f"{book}.embedding_sum"] / np.maximum(w[f"{book}.cluster_usage"], 1e-5)[:, None])[column]
        parts.append(total @ w[f"quantizer.{part}.output_proj.weight"][:, :, 0].T)
    x = dense(conv(parts[0] + parts[1], "pre_conv.conv"), "pre_transformer.input_proj")
    n, size, eps = len(codes), about["head_dim"], about["rms_norm_eps"]
    positions, frequencies = np.arange(n), about["rope_theta"] ** (-np.arange(0, size, 2) / size)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < about["sliding_window"])
    for i in range(about["num_hidden_layers"]):
        start, heads = f"pre_transformer.layers.{i}", []
        h = norm(x, w[f"{start}.input_layernorm.weight"], eps)
        q, k, v = ((h @ w[f"{start}.self_attn.{part}_proj.weight"].T).reshape(n, -1, size).swapaxes(0, 1)
                   for part in "qkv")
        for a, b, c in zip(q, k, v):
            a, b = turned(a, positions, frequencies), turned(b, positions, frequencies)
            heads.append(softmax(np.where(seen, a @ b.T / math.sqrt(size), -np.inf)) @ c)
        x = x + np.concatenate(heads, -1) @ w[f"{start}.self_attn.o_proj.weight"].T * w[
            f"{start}.self_attn_layer_scale.scale"]
        h = norm(x, w[f"{start}.post_attention_layernorm.weight"], eps)
        gate = h @ w[f"{start}.mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{start}.mlp.up_proj.weight"].T)) @ w[
            f"{start}.mlp.down_proj.weight"].T * w[f"{start}.mlp_layer_scale.scale"]
    x = dense(norm(x, w["pre_transformer.norm.weight"], eps), "pre_transformer.output_proj")
    for i, stride in enumerate(about["upsampling_ratios"]):
        x = transposed(x, w[f"upsample.{i}.0.conv.weight"], w[f"upsample.{i}.0.conv.bias"], stride)
        h = conv(x, f"upsample.{i}.1.dwconv.conv")
        h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-6)
        h = dense(h * w[f"upsample.{i}.1.norm.weight"] + w[f"upsample.{i}.1.norm.bias"], f"upsample.{i}.1.pwconv1")
        h = h * np.vectorize(lambda each: math.erfc(-each / math.sqrt(2)) / 2)(h)
        x = x + w[f"upsample.{i}.1.gamma"] * dense(h, f"upsample.{i}.1.pwconv2")
    x = conv(x, "decoder.0.conv")
    for i, stride in enumerate(about["upsample_rates"], 1):
        start = f"decoder.{i}.block"
        x = transposed(snake(x, f"{start}.0"), w[f"{start}.1.conv.weight"], w[f"{start}.1.conv.bias"], stride)
        for j, dilation in ((2, 1), (3, 3), (4, 9)):
            h = conv(snake(x, f"{start}.{j}.act1"), f"{start}.{j}.conv1.conv", dilation)
            x = x + conv(snake(h, f"{start}.{j}.act2"), f"{start}.{j}.conv2.conv")
    last = len(about["upsample_rates"]) + 1
    return np.clip(conv(snake(x, f"decoder.{last}"), f"decoder.{last + 1}.conv")[:, 0], -1, 1)
