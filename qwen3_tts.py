# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "threadpoolctl>=3.5"]
# ///
"""Text to speech by Qwen3-TTS in plain NumPy: from a text to codes, and from codes to a sound.

    python qwen3_tts.py --model Qwen3-TTS-12Hz-0.6B-CustomVoice "Good morning." --out morning.wav

This file stands on qwen3.py, which you should read first. Read it from top to bottom:

    config -> prompt -> talker and code predictor -> codec -> voices of sounds -> speech -> loading -> main

How a text becomes a sound of 24,000 samples a second, with the sizes of Qwen3-TTS-12Hz-0.6B:

    prompt [n, 1024]    a vector for each token of the text, plus one for its place: language, voice, pad
    frame (80 ms)       |           0           |           1           |           2           |   until c0 = end
                        +-----------------------+-----------------------+-----------------------+
    talker              28 x decoder_layer -> h [1024] -> logits [3072], drawn: the code c0
    code predictor      h, c0 -> 5 x decoder_layer -> c1;  c1 -> c2;  ...  c14 -> c15: 15 passes, each drawn
    the next vector     of c0 + of c1 + ... + of c15 (+ of the next token of the text), to the talker
                        +-----------------------+-----------------------+-----------------------+
    codes [16]          rows of 16 codebooks, added -> convolution -> 8 x layer that sees 72 frames -> [1, 1024]
    upsampling          x 2, x 2, x 8, x 5, x 4, x 3 by transposed convolutions -> [1920, 96] -> convolution
                        +-----------------------+-----------------------+-----------------------+
    samples             | 1920                  | 1920                  | 1920                  |

The words that qwen3.py doesn't have:

    frame           80 ms of sound: 16 codes, each the number of a row in a codebook; the first says most
    talker          the language model: a Qwen3 whose vocabulary is the first codebook, and some marks
    code predictor  a small Qwen3 that draws the other codes of a frame
    codec           what makes sound of codes: a decoder of convolutions, each of which sees only what came before
    x-vector        what a speaker encoder hears in three seconds of a voice: a vector in the place of a named voice

The library: speak(model, text, voice=...) -> Speech, an iterator of samples as they come, which has .samples and .save.
"""
from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import threading
import wave
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Self

if __name__ == "__main__" and find_spec("qwen3") is None:
    sys.exit("qwen3_tts.py: it needs qwen3.py and tokenizer_utils.py beside it")

import qwen3  # first: it says in one line what is missing
import numpy as np
from qwen3 import (LIBRARY, QWEN3, Config, Engine, KVCache, Media, Model, Pass, Sampling, Source, Tensor, attention,
                   apply_rope, check_finite, checked_number, checked_whole, config_of, dense, gelu, json_in, layer_norm,
                   linear, map_safetensors, rms_norm, rope_tables, sample, swiglu, to_float32, together)
from tokenizer_utils import InputError, brief

__all__ = ["Codec", "Speech", "Talk", "Voices", "decode", "next_frames", "predict_codes", "speak", "talker_prompt"]

# ---- Config ----------------------------------------------------------------------------------------------------------

# What Qwen's package takes for keys that config.json lacks: of the talker, the code predictor, and the codec.
TALKER = {"vocab_size": 3072, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20,
          "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
          "rope_theta": 1e4, "tie_word_embeddings": False, "num_code_groups": 32,
          "codec_eos_token_id": 4198, "codec_think_id": 4202, "codec_nothink_id": 4203, "codec_think_bos_id": 4204,
          "codec_think_eos_id": 4205, "codec_pad_id": 4196, "codec_bos_id": 4197}
PREDICTOR = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
             "rms_norm_eps": 1e-6, "rope_theta": 1e4}
DECODER = {"codebook_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
           "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8000, "rms_norm_eps": 1e-5,
           "rope_theta": 1e4, "sliding_window": 72, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2]}
# How tokens are drawn unless generation_config.json says it; those of the code predictor begin with "subtalker_".
DRAWING = {"dosample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0}
MARKS = {"tts_pad": 151671, "tts_bos": 151672, "tts_eos": 151673}  # ids of the text side


def sizes_of(found: dict[str, Any], file: Path, names: Iterable[str] = ()) -> Config:
    """The Config of a transformer, whose head_dim may be absent. Raises InputError for what isn't computed here."""
    hidden, heads = (checked_whole(f"{file}: {name}", found[name], 1) for name in ("hidden_size", "num_attention_heads"))
    return config_of({"head_dim": hidden // heads, **found, "layer_types": None}, file)


# ---- Talker and code predictor: from vectors to the codes of a frame -------------------------------------------------

FEWEST = 2  # frames: the end isn't drawn before


class Talk:
    """A text that is spoken: `x` [n, hidden_size] are the vectors that the talker gets next, `codes` the frames so far.

    trailing [m, hidden_size]: the text's vectors that are added to the next frames' ones, then to all others the last.
    """

    def __init__(self, model: Model, x: np.ndarray, trailing: np.ndarray, limit: int, rng: np.random.Generator,
                 temperature: float | None = None):
        self.x, self.trailing, self.rng, self.codes = x, trailing, rng, list[np.ndarray]()
        self.finish_reason: str | None = None  # then "stop", or "length" after `limit` frames
        voices, room = voices_of(model), model.config.context_length - len(x)
        if room < 1:
            raise InputError(f"the text has {len(x)} tokens; the model's context is {model.config.context_length}")
        self.voices, self.limit = voices, min(limit, room)
        self.sampling, self.other = (each.updated(temperature=temperature) for each in voices.sampling)
        predictor = voices.predictor(model.engine)
        self.cache = model.engine.new_cache(model.config)
        self.frame = predictor.engine.new_cache(predictor.config, max_length=voices.groups)

    def first(self, logits: np.ndarray) -> int:
        """Draws c0, or the end, from the talker's logits [vocab_size]."""
        logits = np.where(self.voices.allowed, logits, -np.inf)
        if len(self.codes) < FEWEST:
            logits[self.voices.end] = -np.inf
        drawn = sample(logits, self.sampling, self.rng, (), [int(codes[0]) for codes in self.codes])
        if drawn == self.voices.end:
            self.finish_reason = "stop"
        return drawn

    def take(self, codes: np.ndarray, x: np.ndarray) -> None:
        """Takes a frame's codes [groups], and their vectors' sum [hidden_size]."""
        text = self.trailing[min(len(self.codes), len(self.trailing) - 1)]
        self.codes.append(codes)
        self.x = (x + text)[None]
        if len(self.codes) >= self.limit:
            self.finish_reason = "length"


def pass_of(caches: list[KVCache], x: list[np.ndarray], wanted: bool) -> Pass:
    """What goes through the layers after each cache: x[i] [n, hidden_size]; logits are wanted after each last row."""
    ends = np.cumsum([len(each) for each in x])
    rows = [(cache, slice(end - len(each), end)) for cache, each, end in zip(caches, x, ends.tolist())]
    positions = together([cache.reserve(len(each)) for cache, each in zip(caches, x)])
    return Pass(np.zeros_like(positions), together(x), positions, rows, ends[:len(ends) * wanted] - 1, True)


def next_frames(model: Model, talks: list[Talk]) -> list[np.ndarray | None]:
    """Runs talks that aren't finished one frame further, in one pass -> codes [groups] of each; None: it has ended."""
    new = pass_of([talk.cache for talk in talks], [talk.x for talk in talks], True)
    logits, states = model.engine.run(model, new)
    check_finite(model, logits)
    first = np.array([talk.first(row) for talk, row in zip(talks, logits)])
    going = [i for i, talk in enumerate(talks) if talk.finish_reason is None]
    found: list[np.ndarray | None] = [None] * len(talks)
    if going:
        codes, x = predict_codes(model, states[new.wanted[going]], first[going], [talks[i] for i in going])
        for i, frame, total in zip(going, codes, x):
            talks[i].take(frame, total)
            found[i] = frame
    return found


def predict_codes(model: Model, states: np.ndarray, first: np.ndarray, talks: list[Talk]) -> tuple[Any, np.ndarray]:
    """The talker's states [m, hidden_size] after its norm, and the codes c0 [m] -> (the codes of m frames [m, groups],
    the sums of their vectors [m, hidden_size]).

    The predictor's sequence begins anew in each frame: the state, then the vectors of c0 to c14, one after the other.
    """
    voices, predictor, caches = voices_of(model), voices_of(model).predictor(model.engine), [t.frame for t in talks]
    for cache in caches:
        cache.truncate(0)
    codes = [first]
    vectors = total = model.engine.rows(model, "embed_tokens", first)
    x = np.stack([states, vectors], axis=1)  # [m, 2, hidden_size]
    for table, head in zip(voices.tables, voices.heads):
        new = pass_of(caches, [*voices.narrowed(x)], False)
        _, hidden = predictor.engine.run(predictor, new)
        logits = linear(hidden[x.shape[1] - 1::x.shape[1]], head)
        check_finite(model, logits)
        codes.append(np.array([sample(row, talk.other, talk.rng) for row, talk in zip(logits, talks)]))
        vectors = table[codes[-1]]
        total, x = total + vectors, vectors[:, None]
    return np.stack(codes, axis=1), total


# ---- Codec: from codes to samples ------------------------------------------------------------------------------------
# Each function computes a frame of x [times, channels], and keeps in `state`, by its name, what it needs of the past.

def convolved(x: np.ndarray, w: dict[str, Any], name: str, state: dict[str, Any], dilation: int = 1) -> np.ndarray:
    """Each time sees itself and kernel - 1 earlier ones, `dilation` apart: x [n, inputs] -> [n, outputs].

    One product: what a time sees, side by side [n, kernel * inputs]; 0 before the beginning.
    """
    weight = w[f"{name}.weight"]  # [outputs, kernel * inputs]
    kernel = weight.shape[1] // x.shape[1]
    x = remembered(x, (kernel - 1) * dilation, state, name)
    n = len(x) - (kernel - 1) * dilation
    return linear(np.concatenate([x[i * dilation:i * dilation + n] for i in range(kernel)], axis=1), weight) + \
        w[f"{name}.bias"]


def remembered(x: np.ndarray, n: int, state: dict[str, Any], name: str) -> np.ndarray:
    """x behind the last n rows that came before it, or zeros."""
    before = state.get(name)
    x = np.concatenate([np.zeros((n, x.shape[1]), x.dtype) if before is None else before, x])
    state[name] = x[len(x) - n:]
    return x


def transposed_convolution(x: np.ndarray, w: dict[str, Any], name: str, state: dict[str, Any],
                           stride: int) -> np.ndarray:
    """Each time adds kernel rows to the output, of which the first `stride` are its own: [n, inputs] -> [n * stride,
    outputs]."""
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]  # [kernel * outputs, inputs]
    rows = linear(x, weight).reshape(len(x), -1, len(bias))  # [n, kernel, outputs]
    kernel, n = rows.shape[1], len(x) * stride
    out = np.zeros((n + kernel - stride, len(bias)), x.dtype)
    if name in state:
        out[:kernel - stride] = state[name]
    for i in range(0, kernel, stride):
        out[i:i + n] += rows[:, i:i + stride].reshape(n, -1)
    state[name] = out[n:]
    return out[:n] + bias


def snake(x: np.ndarray, w: dict[str, Any], name: str) -> np.ndarray:
    """x + sin²(alpha x) / beta, x [n, channels]: a periodic switch (Ziyin et al. 2020; the two factors of BigVGAN)."""
    wave = np.sin(x * w[f"{name}.alpha"])
    wave *= wave
    wave *= w[f"{name}.beta"]  # its inverse: see Codec.weights
    return x + wave


def codec_layer(x: np.ndarray, w: dict[str, Any], name: str, config: Config, window: int, state: dict[str, Any],
                cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [1, hidden_size] of a frame -> the same shape. It sees the last `window` frames, itself among them."""
    h = rms_norm(x, w[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
    q, k, v = (linear(h, w[f"{name}.self_attn.{part}_proj.weight"]).reshape(1, -1, config.head_dim).swapaxes(0, 1)
               for part in "qkv")
    k, v = apply_rope(k, cos, sin), v
    if name in state:
        k, v = (np.concatenate([old, new], axis=1)[:, -window:] for old, new in zip(state[name], (k, v)))
    state[name] = k, v
    heads = attention(apply_rope(q, cos, sin), k, v).swapaxes(0, 1).reshape(1, -1)
    x = x + linear(heads, w[f"{name}.self_attn.o_proj.weight"]) * w[f"{name}.self_attn_layer_scale.scale"]
    h = rms_norm(x, w[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
    return x + swiglu(h, *(w[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))) * \
        w[f"{name}.mlp_layer_scale.scale"]


def upsampled(x: np.ndarray, w: dict[str, Any], name: str, state: dict[str, Any], stride: int) -> np.ndarray:
    """`stride` times as many times, then a ConvNeXt block (Liu et al. 2022): x [n, d] -> [n * stride, d]."""
    x = transposed_convolution(x, w, f"{name}.0.conv", state, stride)
    weight = w[f"{name}.1.dwconv.conv.weight"]  # [kernel, d]: each channel by itself
    h = remembered(x, len(weight) - 1, state, f"{name}.1")
    h = sum(h[i:i + len(x)] * each for i, each in enumerate(weight)) + w[f"{name}.1.dwconv.conv.bias"]
    h = gelu(dense(layer_norm(h, w, f"{name}.1.norm", 1e-6), w, f"{name}.1.pwconv1"))
    return x + dense(h, w, f"{name}.1.pwconv2") * w[f"{name}.1.gamma"]


def decoder_block(x: np.ndarray, w: dict[str, Any], name: str, state: dict[str, Any], stride: int) -> np.ndarray:
    """`stride` times as many times, half of the channels, then three residual units: [n, c] -> [n * stride, c / 2]."""
    x = transposed_convolution(snake(x, w, f"{name}.0"), w, f"{name}.1.conv", state, stride)
    for i, dilation in enumerate((1, 3, 9), 2):
        h = convolved(snake(x, w, f"{name}.{i}.act1"), w, f"{name}.{i}.conv1.conv", state, dilation)
        x = x + convolved(snake(h, w, f"{name}.{i}.act2"), w, f"{name}.{i}.conv2.conv", state)
    return x


@dataclass(frozen=True, eq=False)
class Codec:
    """The decoder in a folder speech_tokenizer: `config` of its transformer, `about` the rest, `weights`."""
    config: Config
    about: dict[str, Any]  # decoder_config
    rate: int  # samples in a second
    weights: dict[str, np.ndarray]

    @property
    def samples(self) -> int:
        """Of a frame."""
        return int(np.prod([*self.about["upsampling_ratios"], *self.about["upsample_rates"]]))


def decode(codec: Codec, codes: np.ndarray, state: dict[str, Any]) -> np.ndarray:
    """Codes [n, groups] of the next frames -> samples from -1 to 1, float32 [n * codec.samples].

    `state`: {} before the first frame; it keeps what the next frames need. Frame by frame, so that a sound has the same
    bits as it comes and at once.
    """
    return np.concatenate([decode_frame(codec, frame, state) for frame in codes])


def decode_frame(codec: Codec, codes: np.ndarray, state: dict[str, Any]) -> np.ndarray:
    """The next frame's codes [groups] -> its samples, float32 [codec.samples]."""
    w, config, about = codec.weights, codec.config, codec.about
    rows = w["codebooks"][np.arange(len(codes)), codes]  # [groups, d]
    x = linear(rows[:1], w["rvq_first"]) + linear(rows[1:].sum(axis=0, keepdims=True), w["rvq_rest"])
    x = dense(convolved(x, w, "pre_conv.conv", state), w, "pre_transformer.input_proj")
    position = state["frames"] = state.get("frames", -1) + 1
    cos, sin = rope_tables(config, np.array([position]))
    for i in range(config.num_hidden_layers):
        x = codec_layer(x, w, f"pre_transformer.layers.{i}", config, about["sliding_window"], state, cos, sin)
    x = dense(rms_norm(x, w["pre_transformer.norm.weight"], config.rms_norm_eps), w, "pre_transformer.output_proj")
    for i, stride in enumerate(about["upsampling_ratios"]):
        x = upsampled(x, w, f"upsample.{i}", state, stride)
    x = convolved(x, w, "decoder.0.conv", state)
    for i, stride in enumerate(about["upsample_rates"], 1):
        x = decoder_block(x, w, f"decoder.{i}.block", state, stride)
    last = len(about["upsample_rates"]) + 1
    x = convolved(snake(x, w, f"decoder.{last}"), w, f"decoder.{last + 1}.conv", state)
    return np.clip(x[:, 0], -1, 1)


def read_codec(folder: Path) -> Codec:
    """The codec of a folder speech_tokenizer. Raises InputError for what is missing or damaged."""
    file = folder / "config.json"
    raw = qwen3.read_json_object(file)
    about = DECODER | {key: value for key, value in (raw.get("decoder_config") or {}).items() if value is not None}
    tensors = {name.removeprefix("decoder."): to_float32(tensor)
               for name, tensor in map_safetensors(folder / "model.safetensors").items() if name.startswith("decoder.")}
    config = sizes_of(about | {"vocab_size": about["codebook_size"]}, file)
    try:
        return Codec(config, about, int(raw.get("output_sample_rate", 24_000)), codec_weights(tensors, about))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{folder}: the weights don't fit config.json: {brief(error)}") from error


def codec_weights(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> dict[str, np.ndarray]:
    """The weights as the functions above want them: convolutions as matrices, the codebooks [groups, size, d]."""
    w, books = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, tensor in tensors.items():
        if name.endswith(".embedding_sum"):
            usage = np.maximum(tensors[name.replace("embedding_sum", "cluster_usage")], np.float32(1e-5))
            books[name] = tensor / usage[:, None]
        elif name.endswith((".alpha", ".beta")):
            tensor = np.exp(tensor)
            tensor = 1 / (tensor + np.float32(1e-9)) if name.endswith(".beta") else tensor
        elif tensor.ndim == 3 and "dwconv" in name:  # [d, 1, kernel]
            tensor = np.ascontiguousarray(tensor[:, 0].T)
        elif name.startswith("upsample.") and ".0.conv" in name or ".block.1.conv" in name:
            tensor = tensor.transpose(2, 1, 0).reshape(-1, len(tensor)) if tensor.ndim == 3 else tensor  # [in, out, k]
        elif tensor.ndim == 3:  # [outputs, inputs, kernel]
            tensor = tensor.transpose(0, 2, 1).reshape(len(tensor), -1)
        w[name] = np.ascontiguousarray(tensor)
    for name in ("rvq_first", "rvq_rest"):
        w[name] = w.pop(f"quantizer.{name}.output_proj.weight")
    order = [f"quantizer.{name}.vq.layers.{i}._codebook.embedding_sum" for name, n in
             (("rvq_first", 1), ("rvq_rest", len(books) - 1)) for i in range(n)]
    w["codebooks"] = np.stack([books[name] for name in order])
    return w


# ---- Voices: all that a talker lacks ---------------------------------------------------------------------------------

TOWER = ("talker.code_predictor.", "talker.text_projection.", "talker.model.text_embedding.", "speaker_encoder.")
CODES = {"zh": "chinese", "en": "english", "de": "german", "it": "italian", "pt": "portuguese", "es": "spanish",
         "ja": "japanese", "ko": "korean", "fr": "french", "ru": "russian"}


class Voices(Media):
    """What stands around a talker: the text's vectors, the code predictor, the codec, the speaker encoder.

    Each is read when it is first needed. `names` of the voices; `languages`; `kind`: custom_voice, voice_design, base.
    """

    def __init__(self, source: Source):
        super().__init__()
        self.source, self.lock, about = source, threading.RLock(), source.language
        self.kind, self.names = source.about.get("tts_model_type"), dict(about.get("spk_id") or {})
        self.ids = dict(about.get("codec_language_id") or {})
        self.languages = [name for name in self.ids if "dialect" not in name]
        self.dialects = {name: each for name, each in (about.get("spk_is_dialect") or {}).items() if each}
        self.end, self.models = about["codec_eos_token_id"], dict[Engine, Model]()
        raw = about.get("code_predictor_config") or {}
        self.about = PREDICTOR | {key: value for key, value in raw.items() if value is not None}
        self.groups = checked_whole(f"{source.path}: num_code_groups", about["num_code_groups"], 2)
        self.allowed = np.arange(source.config.vocab_size) < self.about["vocab_size"]
        self.allowed[self.end] = True

    def tensors(self, start: str) -> dict[str, Tensor]:
        """Those whose names begin so, without the beginning."""
        return {name.removeprefix(start): each for name, each in self.source.tower.items() if name.startswith(start)}

    @cached_property
    def sampling(self) -> tuple[Sampling, Sampling]:
        """How c0 is drawn, and how the other codes are: as generation_config.json says."""
        raw = {key: value for key, value in self.source.generation.items() if value is not None}
        found = []
        for start, dosample in (("", "do_sample"), ("subtalker_", "subtalker_dosample")):
            given = {name: raw.get(start + name, usual) for name, usual in DRAWING.items() if name != "dosample"}
            given["temperature"] *= bool(raw.get(dosample, True))
            found.append(Sampling(**given))
        return replace(found[0], repetition_penalty=raw.get("repetition_penalty", 1.05)), found[1]

    @cached_property
    def codec(self) -> Codec:
        return read_codec(self.source.path / "speech_tokenizer")

    @cached_property
    def projection(self) -> dict[str, np.ndarray]:
        return {name: to_float32(tensor) for name, tensor in self.tensors("talker.text_projection.").items()}

    def text(self, ids: Any) -> np.ndarray:
        """The vectors of a text's tokens [n] -> [n, hidden_size]."""
        table: Tensor = self.source.tower["talker.model.text_embedding.weight"]
        h = dense(to_float32(table._replace(data=table.read()[ids])), self.projection, "linear_fc1")
        return dense(h / (1 + np.exp(-h)), self.projection, "linear_fc2")

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """The vectors of the codes c1 to the last one: [vocab_size, hidden_size] each."""
        found = self.tensors("talker.code_predictor.model.codec_embedding.")
        return [to_float32(found[f"{i}.weight"]) for i in range(self.groups - 1)]

    @cached_property
    def heads(self) -> list[np.ndarray]:
        """From the predictor's states to the logits of c1 to the last one: [vocab_size, its hidden_size] each."""
        found = self.tensors("talker.code_predictor.lm_head.")
        return [to_float32(found[f"{i}.weight"]) for i in range(self.groups - 1)]

    @cached_property
    def narrow(self) -> dict[str, np.ndarray]:
        """In the 1.7B, whose predictor is narrower than the talker."""
        found = self.tensors("talker.code_predictor.small_to_mtp_projection.")
        return {f"narrow.{name}": to_float32(tensor) for name, tensor in found.items()}

    def narrowed(self, x: np.ndarray) -> np.ndarray:
        """The talker's vectors [..., hidden_size] as the predictor takes them."""
        return dense(x, self.narrow, "narrow") if self.narrow else x

    def predictor(self, engine: Engine) -> Model:
        """The code predictor's layers as a model of its own, computed by this engine; its logits are never wanted."""
        with self.lock:
            if engine not in self.models:
                file = self.source.path / "config.json"
                config = replace(sizes_of(self.about, file), tie_word_embeddings=True)
                found = self.tensors("talker.code_predictor.")
                tensors = {name: each for name, each in found.items() if name.startswith(("model.layers.", "model.norm."))}
                tensors["model.embed_tokens.weight"] = found["lm_head.0.weight"]
                tensors = qwen3.fitting(tensors, QWEN3.shapes(config), True, self.source.path)
                source = replace(self.source, kind=replace(QWEN3, engine=engine, quantize="int8"), config=config,
                                 tensors=tensors, tower={}, heads={})
                self.models[engine] = Model(source, config, engine.load_weights(source), None, Sampling(), (), None,  # type: ignore[arg-type]
                                            engine)
            return self.models[engine]


def speaks(model: Model) -> bool:
    """Whether a model speaks texts."""
    return isinstance(model.media, Voices)


def voices_of(model: Model) -> Voices:
    """What the model speaks with. Raises InputError for one that can't speak."""
    if not isinstance(model.media, Voices):
        raise InputError(f"{model.path}: the model can't speak; Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice can")
    return model.media


def talker_prompt(model: Model, text: str, voice: str | np.ndarray | None = None, language: str = "auto",
                  instruct: str = "", streamed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What the talker gets: (vectors [n, hidden_size], the text's vectors that follow one by one [m, hidden_size]).

    voice: a name, or the x-vector of a sound; streamed: the prompt has the first token of the text only.
    """
    voices, about, encode = voices_of(model), model.source.language, model.tokenizer.encode

    def code(*ids: int) -> np.ndarray:
        return model.engine.rows(model, "embed_tokens", np.array(ids))

    pad, begin, end = (voices.text([model.source.about.get(f"{name}_token_id", usual)]) for name, usual in MARKS.items())
    asked = [*encode("<|im_start|>user\n", False), *encode(instruct, False, as_text=True),
             *encode("<|im_end|>\n", False)] if instruct else []
    role, words = encode("<|im_start|>assistant\n", False), voices.text(encode(text, False, as_text=True))
    if isinstance(voice, str) and language in ("auto", "chinese"):
        language = voices.dialects.get(voice, language)
    think = [about[f"codec_{name}_id"] for name in ("nothink", "think_bos", "think_eos")] if language == "auto" else \
        [about["codec_think_id"], about["codec_think_bos_id"], voices.ids[language], about["codec_think_eos_id"]]
    spoken = code(voices.names[voice]) if isinstance(voice, str) else np.empty((0, len(pad[0]))) if voice is None else \
        voice[None]
    after, first = code(about["codec_pad_id"]), code(about["codec_bos_id"])
    prefix = together([code(*think), spoken, after]).astype(np.float32)
    prefix += together([pad] * (len(prefix) - 1) + [begin])
    start = together([voices.text([*asked, *role]), prefix])
    if streamed:
        return together([start, words[:1] + first]), together([words[1:], end, pad])
    return together([start, together([words, end]) + after, pad + first]), pad


# ---- Speech ----------------------------------------------------------------------------------------------------------

LONGEST_TEXT = 500  # characters of a text that are spoken as one
ONE_SENTENCE = re.compile(r"\S.*?(?:[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+[”’」』）]*|(?=\n\s*\n))", re.DOTALL)


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """The sentences of a text that comes in pieces, as soon as each is complete; none is longer than LONGEST_TEXT."""
    held = ""
    for piece, last in itertools.chain(((piece, False) for piece in texts), [("\n\n", True)]):
        held += piece
        while held := held.lstrip():
            found = ONE_SENTENCE.match(held)
            n = found.end() if found else len(held)
            if n > LONGEST_TEXT:
                space = max(held.rfind(mark, 0, LONGEST_TEXT) for mark in ",;:、，； ") + 1
                n = space if space > 0 else LONGEST_TEXT
            elif not found and not last:
                break
            yield held[:n].strip()
            held = held[n:]


def spoken_parts(text: str) -> Iterator[str]:
    """A text in parts of at most LONGEST_TEXT characters, of whole sentences where these are shorter."""
    part = ""
    for sentence in sentences([text]) if len(text.strip()) > LONGEST_TEXT else [text.strip()]:
        if part and len(part) + len(sentence) >= LONGEST_TEXT:
            yield part
            part = ""
        part += " " * bool(part) + sentence
    if part:
        yield part


class Speech(Iterator[np.ndarray]):
    """A text as it is spoken: iterate over float32 samples [n], `rate` a second, or take all `samples`, or `save` them.

    `finish_reason`: None until the end, then "stop", or "length" if max_seconds, or the model's own limit, cut it.
    """

    def __init__(self, model: Model, texts: Iterable[str], prompt: dict[str, Any], limit: int | None, seed: int | None,
                 temperature: float | None):
        voices = voices_of(model)
        self.model, self.codec, self.rate, self.pieces = model, voices.codec, voices.codec.rate, list[np.ndarray]()
        self.limit, self.temperature, self.prompt, self.texts = limit, temperature, prompt, texts
        self.finish_reason: str | None = None
        self.rng = np.random.default_rng(seed)
        self.coming = self.speak()

    def speak(self) -> Iterator[np.ndarray]:
        spoken, longest, reasons = 0, self.model.max_new_tokens or 2048, {"stop"}
        for text in self.texts:
            most = min(longest, longest if self.limit is None else self.limit - spoken)
            if most < 1:
                reasons.add("length")
                break
            talk = Talk(self.model, *talker_prompt(self.model, text, **self.prompt), most, self.rng, self.temperature)
            state = dict[str, Any]()
            while talk.finish_reason is None:
                [codes] = next_frames(self.model, [talk])
                if codes is not None:
                    yield decode(self.codec, codes[None], state)
            spoken += len(talk.codes)
            reasons.add(talk.finish_reason)
        self.finish_reason = min(reasons)

    def __next__(self) -> np.ndarray:
        self.pieces.append(next(self.coming))
        return self.pieces[-1]

    @property
    def samples(self) -> np.ndarray:
        """All samples [n]; computes those that are still to come."""
        for _ in self:
            pass
        return together([np.empty(0, np.float32), *self.pieces])

    def save(self, file: str | Path) -> None:
        """Writes all samples into a WAV file of 16 bits."""
        samples = self.samples
        with open(file, "wb") as opened:
            write_wav(opened, [samples], self.rate)


def speak(model: Model, text: str | Iterable[str], voice: str | None = None, language: str | None = None,
          instruct: str | None = None, describe: str | None = None, clone: Any = None, seed: int | None = None,
          temperature: float | None = None, max_seconds: float | None = None) -> Speech:
    """Speaks a text, or texts as they come -> a Speech: an iterator over float32 samples [n] as they come.

    voice: one of the model's voices, voices_of(model).names; None: its first one. language: "english" or "en"; None:
    the model finds out. instruct: how to speak, "whisper" for example (1.7B). describe: what voice (VoiceDesign).
    clone: a sound of three seconds whose voice is taken (Base): a file's path, or (samples [n], how many a second).
    The same seed gives the same sound. temperature: 0 draws the likeliest codes. max_seconds: of the sound.
    Raises InputError for values out of range, and for what this model can't do.
    """
    voices = voices_of(model)
    asked = {"voice": voice, "instruct": instruct, "describe": describe, "clone": clone}
    takes = {"custom_voice": ("voice", "instruct"), "voice_design": ("describe",), "base": ("clone",)}
    if (can := takes.get(str(voices.kind))) is None:
        raise InputError(f"{model.path}: tts_model_type = {brief(repr(voices.kind))} is none of {', '.join(takes)}")
    if wrong := [name for name, value in asked.items() if value is not None and name not in can]:
        raise InputError(f"{model.path}: this model takes no {wrong[0]}, but {' and '.join(can)}")
    speaker: Any = None
    if voices.kind == "custom_voice":
        speaker = next(iter(voices.names), "") if voice is None else str(voice).lower()
        if speaker not in voices.names:
            raise InputError(f"the voice {brief(repr(speaker))} is none of {', '.join(voices.names)}")
        if instruct and voices.source.about.get("tts_model_size") in ("0b6", "0b", "b6", "6"):
            raise InputError(f"{model.path}: the 0.6B takes no instruct; the 1.7B does")
    prompt = {"voice": speaker, "language": language_spoken(voices, language), "instruct": instruct or describe or ""}
    limit = None if max_seconds is None else max(1, round(checked_number("max_seconds", max_seconds, 0, 1e6) *
                                                          voices.codec.rate / voices.codec.samples))
    seed = None if seed is None else checked_whole("seed", seed, 0)
    voices.sampling[0].updated(temperature=temperature)
    if isinstance(text, str) and not text.strip():
        raise InputError("there is no text to speak")
    return Speech(model, spoken_parts(text) if isinstance(text, str) else
                  itertools.chain.from_iterable(map(spoken_parts, text)), prompt, limit, seed, temperature)


def language_spoken(voices: Voices, name: str | None) -> str:
    """The language as the model calls it, by its name or code (en, en-US); "auto" for None. Raises InputError."""
    asked = "auto" if name is None else str(name).strip().lower()
    found = CODES.get(asked.replace("_", "-").partition("-")[0], asked)
    if found not in ("auto", *voices.languages):
        raise InputError(f"the language {brief(repr(name))} is none of auto, {', '.join(voices.languages)}")
    return found


def write_wav(file: BinaryIO, pieces: Iterable[np.ndarray], rate: int) -> None:
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        for piece in pieces:
            out.writeframes(np.rint(piece * 32767).astype("<i2").tobytes())


media_of = Voices
MODEL_TYPES = {"qwen3_tts": replace(
    QWEN3, config=sizes_of, architectures=("Qwen3TTSForConditionalGeneration",), text=("talker_config",),
    defaults=TALKER, tower=TOWER, media="qwen3_tts", quantize="int8",
    names={"talker.model.codec_embedding.": "model.embed_tokens.", "talker.codec_head.": "lm_head.",
           "talker.model.": "model."})}
