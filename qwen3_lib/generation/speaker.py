"""A speaker encoder: from a sound to the vector of its voice, which a Qwen3-TTS-Base takes for a name."""
from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from qwen3 import Source, dense, softmax, to_float32
from qwen3_asr import mel_filters
from qwen3_lib.io.sounds import open_sound
from qwen3_tts import as_matrix, side_by_side
from tokenizer_utils import InputError

SPEAKER = {"mel_dim": 128, "enc_channels": [512, 512, 512, 512, 1536], "enc_dilations": [1, 2, 3, 4, 1],
           "enc_res2net_scale": 8, "sample_rate": 24_000}
SECONDS = (0.5, 60)  # of a sound whose voice is taken


def voice_mel(samples: np.ndarray, n_mels: int, rate: int) -> np.ndarray:
    """Samples [n] -> the logarithm of the loudness of each pitch every 256 samples, float32 [frames, n_mels]."""
    padded = np.pad(samples.astype(np.float64), (1024 - 256) // 2, mode="reflect")
    smooth = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)  # Hann's window
    frames = np.lib.stride_tricks.sliding_window_view(padded, 1024)[::256] * smooth
    loudness = np.sqrt(np.abs(np.fft.rfft(frames)) ** 2 + 1e-9)
    return np.log(np.maximum(loudness @ mel_filters(n_mels, rate, 1024), 1e-5)).astype(np.float32)


def x_vector(mel: np.ndarray, w: dict[str, Any], about: dict[str, Any]) -> np.ndarray:
    """Log-mel [frames, n_mels] -> the voice's vector [hidden_size] (ECAPA-TDNN, Desplanques et al. 2020)."""
    def layer(x: np.ndarray, name: str, dilation: int = 1) -> np.ndarray:  # with reflections beyond the ends
        kernel = w[f"{name}.weight"].shape[1] // x.shape[1]
        side = (kernel - 1) * dilation // 2
        return dense(side_by_side(np.pad(x, ((side, side), (0, 0)), mode="reflect"), kernel, dilation), w, name)

    def relu(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    dilations, scale = about["enc_dilations"], about["enc_res2net_scale"]
    x, outs = relu(layer(mel, "blocks.0.conv", dilations[0])), list[np.ndarray]()
    for i, dilation in enumerate(dilations[1:-1], 1):
        first, *others = np.split(relu(layer(x, f"blocks.{i}.tdnn1.conv")), scale, axis=1)
        parts, before = [first], np.zeros_like(first)
        for j, part in enumerate(others):
            before = relu(layer(part + before, f"blocks.{i}.res2net_block.blocks.{j}.conv", dilation))
            parts.append(before)
        h = relu(layer(np.concatenate(parts, axis=1), f"blocks.{i}.tdnn2.conv"))
        switch = layer(relu(layer(h.mean(axis=0, keepdims=True), f"blocks.{i}.se_block.conv1")),
                       f"blocks.{i}.se_block.conv2")
        x = x + h / (1 + np.exp(-switch))
        outs.append(x)
    x = relu(layer(np.concatenate(outs, axis=1), "mfa.conv", dilations[-1]))
    h = np.concatenate([x, *(np.broadcast_to(each, x.shape) for each in spread(x, np.float32(1 / len(x))))], axis=1)
    weights = softmax(layer(np.tanh(relu(layer(h, "asp.tdnn.conv"))), "asp.conv").T).T  # over the times
    return layer(np.concatenate(spread(x, weights))[None], "fc")[0]


def spread(x: np.ndarray, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation [channels] of x [times, channels], by weights that sum to 1."""
    mean = (weights * x).sum(axis=0)
    return mean, np.sqrt(np.maximum((weights * (x - mean) ** 2).sum(axis=0), 1e-12))


def voice_in(sound: Any, source: Source) -> np.ndarray:
    """The x-vector [hidden_size] of a sound, what open_sound takes, by the encoder of a model. Raises InputError."""
    if sound is None:
        raise InputError(f"{source.path}: this model has no voice of its own: give clone, a sound of three seconds")
    start, about = "speaker_encoder.", SPEAKER | (source.about.get("speaker_encoder_config") or {})
    rate = about["sample_rate"]
    samples = np.concatenate([*itertools.islice(open_sound(sound, rate).blocks, 1000)])
    if not SECONDS[0] * rate <= len(samples) <= SECONDS[1] * rate or not np.isfinite(samples).all():
        raise InputError(f"the sound of a voice must have {SECONDS[0]} to {SECONDS[1]} seconds of finite samples, not "
                         f"{len(samples) / rate:.1f}; three are enough")
    w = {name.removeprefix(start): as_matrix(to_float32(tensor)) for name, tensor in source.tower.items()
         if name.startswith(start)}
    try:
        found = x_vector(voice_mel(samples, about["mel_dim"], rate), w, about)
    except (KeyError, ValueError, TypeError) as error:  # no tensor of this name, or none of this shape
        raise InputError(f"{source.path}: its speaker encoder doesn't fit its config: {error}") from error
    if len(found) != source.config.hidden_size or not np.isfinite(found).all():
        raise InputError(f"{source.path}: the speaker encoder gives no {source.config.hidden_size} finite numbers")
    return found
