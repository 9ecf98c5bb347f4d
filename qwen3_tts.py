# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "threadpoolctl>=3.5"]
# ///
"""Text to speech by Qwen3-TTS in plain NumPy: from a text to codes, and from codes to a sound.

    python qwen3_tts.py --model Qwen3-TTS-12Hz-0.6B-CustomVoice "Good morning." --out morning.wav

This file stands on qwen3.py, which you should read first. Read it from top to bottom:

    config -> prompt -> talker and code predictor -> codec -> what stands around a talker -> speech -> main

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
import math
import sys
import wave
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__" and find_spec("qwen3") is None:
    sys.exit("qwen3_tts.py: it needs qwen3.py and tokenizer_utils.py beside it")

import qwen3  # first: it says in one line what is missing
import numpy as np
from qwen3 import (CHUNK, LIBRARY, QWEN3, Config, Engine, Media, Model, Pass, Sampling, Source, Tensor, apply_rope,
                   attention, check_finite, checked_number, checked_whole, config_of, dense, gelu, layer_norm, linear,
                   map_safetensors, rms_norm, rope_tables, sample, swiglu, to_float32, together)
from tokenizer_utils import InputError, brief, read_json_object

__all__ = ["Codec", "Speech", "Talk", "Voices", "decode", "next_frames", "predict_codes", "speak", "talker_prompt"]

# ---- Config ----------------------------------------------------------------------------------------------------------

# What Qwen's package takes for keys that config.json lacks: of the talker, the code predictor, and the codec's decoder.
USUAL = {"hidden_size": 1024, "num_attention_heads": 16, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
         "max_position_embeddings": 32768}
TALKER = USUAL | {"vocab_size": 3072, "intermediate_size": 2048, "num_hidden_layers": 20, "num_key_value_heads": 2,
                  "tie_word_embeddings": False, "num_code_groups": 32, "codec_eos_token_id": 4198,
                  "codec_think_id": 4202, "codec_nothink_id": 4203, "codec_think_bos_id": 4204,
                  "codec_think_eos_id": 4205, "codec_pad_id": 4196, "codec_bos_id": 4197}
PREDICTOR = USUAL | {"vocab_size": 2048, "intermediate_size": 3072, "num_hidden_layers": 5, "num_key_value_heads": 8,
                     "head_dim": 128}
DECODER = USUAL | {"intermediate_size": 3072, "num_hidden_layers": 8, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
                   "sliding_window": 72, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2]}
DRAWING = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05,
           "subtalker_dosample": True, "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0}
MARKS = {"pad": 151671, "bos": 151672, "eos": 151673}  # ids of the text side


def sizes_of(found: dict[str, Any], file: Path, names: Iterable[str] = ()) -> Config:
    """The Config of a transformer, whose head_dim may be absent. Raises InputError for what isn't computed here."""
    width, heads = (checked_whole(f"{file}: {name}", found[name], 1) for name in ("hidden_size", "num_attention_heads"))
    return config_of({"head_dim": width // heads, **found, "layer_types": None}, file)


def given(found: dict[str, Any], key: str) -> dict[str, Any]:
    """The object with this key in an object of config.json, without nulls; empty if there is none."""
    if not isinstance(inner := found.get(key) or {}, dict):
        raise InputError(f"config.json: {key} must be an object, not {brief(repr(inner))}")
    return {name: value for name, value in inner.items() if value is not None}


# ---- Prompt: a text, a voice and a language as vectors ---------------------------------------------------------------

@np.errstate(over="ignore", invalid="ignore")  # the talker's logits tell it
def talker_prompt(model: Model, text: str, voice: str | np.ndarray | None = None, language: str = "auto",
                  instruct: str = "", streamed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What the talker gets: (vectors [n, hidden_size], the text's vectors that follow one by one [m, hidden_size]).

    voice: a name, or the x-vector of a sound; streamed: the prompt has the first token of the text only.
    """
    voices, about, encode = voices_of(model), model.source.language, model.tokenizer.encode

    def code(*ids: int) -> np.ndarray:
        return model.engine.rows(model, "embed_tokens", np.array(ids))

    marks = [model.source.about.get(f"tts_{name}_token_id", usual) for name, usual in MARKS.items()]
    pad, begin, end = voices.text(marks)[:, None]
    asked = [*encode("<|im_start|>user\n", False), *encode(instruct, False, as_text=True),
             *encode("<|im_end|>\n", False)] if instruct else []
    role, words = encode("<|im_start|>assistant\n", False), voices.text(encode(text, False, as_text=True))
    if isinstance(voice, str) and language in ("auto", "chinese"):
        language = voices.dialects.get(voice) or language
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


# ---- Talker and code predictor: from vectors to the codes of a frame -------------------------------------------------

FEWEST = 2  # frames: the end isn't drawn before


class Talk:
    """A text that is spoken: `x` [n, hidden_size], what the talker gets next; `codes`, the frames so far [groups].

    trailing [m, hidden_size]: the vectors of text that are added to those of the frames; the last one to all others.
    """

    def __init__(self, model: Model, x: np.ndarray, trailing: np.ndarray, limit: int, rng: np.random.Generator,
                 temperature: float | None = None):
        self.x, self.trailing, self.rng, self.codes = x, trailing, rng, list[np.ndarray]()
        # The codec's; the frames that were given to it, and what it decodes.
        self.state, self.n_decoded, self.decoding = dict[str, Any](), 0, deque[Future[np.ndarray]]()
        self.beside = model.engine.beside
        self.finish_reason: str | None = None  # then "stop", or "length" after `limit` frames
        self.voices, self.limit = voices_of(model), min(limit, model.config.context_length - len(x))
        predictor = self.voices.predictor(model.engine)
        self.sampling, self.other = (each.updated(temperature=temperature) for each in self.voices.sampling)
        self.cache = model.engine.new_cache(model.config)
        self.frame = model.engine.new_cache(predictor[0].config, self.voices.groups)  # new in each frame

    def first(self, logits: np.ndarray) -> int:
        """Draws c0, or the end, from the talker's logits [vocab_size]."""
        logits = np.where(self.voices.allowed, logits, -np.inf)
        if len(self.codes) < FEWEST:
            logits[self.voices.end] = -np.inf
        drawn = sample(logits, self.sampling, self.rng, (), [int(codes[0]) for codes in self.codes])
        self.finish_reason = "stop" if drawn == self.voices.end else None
        return drawn

    def take(self, codes: np.ndarray, x: np.ndarray) -> None:
        """Takes a frame: its codes [groups], and the sum of their vectors [hidden_size]."""
        self.x = (x + self.trailing[min(len(self.codes), len(self.trailing) - 1)])[None]
        self.codes.append(codes)
        self.finish_reason = "length" if len(self.codes) >= self.limit else None


def pass_of(caches: list[Any], x: list[np.ndarray], states: bool = False) -> Pass:
    """What goes through the layers after each cache: x[i] [n, hidden_size]; logits are wanted after each last row,
    and hidden states of all rows if `states`."""
    ends = np.cumsum([len(each) for each in x])
    rows = [(cache, slice(end - len(each), end)) for cache, each, end in zip(caches, x, ends.tolist())]
    positions = together([cache.reserve(len(each)) for cache, each in zip(caches, x)])
    return Pass(np.zeros_like(positions), together(x), positions, rows, ends - 1, states)


def next_frames(model: Model, talks: list[Talk]) -> None:
    """Runs talks that aren't finished one frame further, in one pass; one that ends takes no frame."""
    for talk in talks:
        while len(talk.x) > CHUNK:  # of a long prompt
            model.engine.run(model, pass_of([talk.cache], [talk.x[:CHUNK]]))
            talk.x = talk.x[CHUNK:]
    new = pass_of([talk.cache for talk in talks], [talk.x for talk in talks], True)
    logits, states = model.engine.run(model, new)
    check_finite(model, logits)
    first = np.array([talk.first(row) for talk, row in zip(talks, logits)])
    going = [i for i, talk in enumerate(talks) if talk.finish_reason is None]
    if going:
        codes, x = predict_codes(model, states[new.wanted[going]], first[going], [talks[i] for i in going])
        for i, *frame in zip(going, codes, x):
            talks[i].take(*frame)


@np.errstate(over="ignore", invalid="ignore")
def predict_codes(model: Model, states: np.ndarray, first: np.ndarray, talks: list[Talk]) -> tuple[Any, Any]:
    """The codes of a frame of each talk [m, groups], and the sums of their vectors [m, hidden_size].

    states [m, hidden_size]: the talker's, after its norm; first [m]: the codes c0, drawn from them. The predictor's
    sequence is the state, then the vectors of c0 to the last code but one, one after the other.
    """
    voices, codes = voices_of(model), [first]
    predictor, w = voices.predictor(model.engine), voices.weights
    for talk in talks:
        talk.frame.truncate(0)
    total = model.engine.rows(model, "embed_tokens", first)
    x = np.stack([states, total], axis=1)  # [m, 2, hidden_size]
    x = dense(x, w, NARROW) if f"{NARROW}.weight" in w else x
    while (i := len(codes) - 1) < len(predictor):
        logits, _ = model.engine.run(predictor[i], pass_of([talk.frame for talk in talks], [*x]))
        check_finite(model, logits)
        codes.append(np.array([sample(row, talk.other, talk.rng) for row, talk in zip(logits, talks)]))
        codes += model.engine.draws(predictor[i + 1:], w["narrow"][i:], codes[-1], talks)  # by fast kernels, all others
        x = w["narrow"][len(codes) - 2, codes[-1]][:, None]
    return np.stack(codes, axis=1), sum([table[drawn] for table, drawn in zip(w["codes"], codes[1:])], total)


# ---- Codec: from codes to samples ------------------------------------------------------------------------------------
# Each function computes the next x [times, channels], and keeps in `state`, by its name, what it needs of the past.

MOST_FRAMES = 8   # that are decoded at once: weights are read once for all of them
MOST_TIMES = 512  # that a block of the decoder computes at once: they stay in the CPU's second cache


def convolved(x: np.ndarray, w: dict[str, Any], name: str, state: dict[str, Any], dilation: int = 1,
              stride: int = 1) -> np.ndarray:
    """Each time sees itself and some earlier ones, `dilation` apart, or zeros: x [n, inputs] -> [n * stride, outputs].

    All that it sees lies side by side, so this is one product. A transposed convolution gives `stride` times for each.
    """
    kernel = w[f"{name}.weight"].shape[1] // x.shape[1]  # weight: [stride * outputs, kernel * inputs]
    seen = side_by_side(remembered(x, (kernel - 1) * dilation, state, name), kernel, dilation)
    return dense(seen, w, name).reshape(len(x) * stride, -1)


def side_by_side(x: np.ndarray, kernel: int, dilation: int) -> np.ndarray:
    """x [n + (kernel - 1) * dilation, inputs] -> what each of n times sees, [n, kernel * inputs] (im2col)."""
    n = len(x) - (kernel - 1) * dilation
    return together([x[i * dilation:i * dilation + n] for i in range(kernel)], axis=1)


def remembered(x: np.ndarray, n: int, state: dict[str, Any], name: str) -> np.ndarray:
    """x behind the last n rows that came before it, or zeros."""
    before = state.get(name)
    x = np.concatenate([np.zeros((n, x.shape[1]), x.dtype) if before is None else before, x])
    state[name] = x[len(x) - n:]
    return x


def snake(x: np.ndarray, w: dict[str, Any], name: str) -> np.ndarray:
    """x + sin²(alpha x) / beta, x [n, channels]: a periodic switch (Ziyin et al. 2020; the two factors of BigVGAN)."""
    sines = x * w[f"{name}.alpha"]
    np.sin(sines, out=sines)
    sines *= sines
    sines *= w[f"{name}.beta"]  # its inverse: see read_codec
    sines += x
    return sines


def codec_layer(x: np.ndarray, w: dict[str, Any], name: str, config: Config, window: int, state: dict[str, Any],
                cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [n, hidden_size] of frames -> the same shape. Each sees the last `window` frames, itself among them."""
    n, h = len(x), rms_norm(x, w[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
    q, k, v = (linear(h, w[f"{name}.self_attn.{part}_proj.weight"]).reshape(n, -1, config.head_dim).swapaxes(0, 1)
               for part in "qkv")
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    if name in state:
        k, v = (np.concatenate([old, new], axis=1) for old, new in zip(state[name], (k, v)))
    state[name], ends = (k[:, -window:], v[:, -window:]), range(k.shape[1] - n + 1, k.shape[1] + 1)
    heads = np.concatenate([attention(q[:, i:i + 1], k[:, max(end - window, 0):end], v[:, max(end - window, 0):end])
                            for i, end in enumerate(ends)], axis=1).swapaxes(0, 1).reshape(n, -1)
    x = x + linear(heads, w[f"{name}.self_attn.o_proj.weight"]) * w[f"{name}.self_attn_layer_scale.scale"]
    h = rms_norm(x, w[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
    return x + swiglu(h, *(w[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))) * \
        w[f"{name}.mlp_layer_scale.scale"]


def upsampled(x: np.ndarray, w: dict[str, Any], name: str, state: dict[str, Any], stride: int) -> np.ndarray:
    """`stride` times as many times, then a ConvNeXt block (Liu et al. 2022): x [n, d] -> [n * stride, d]."""
    x = convolved(x, w, f"{name}.0.conv", state, 1, stride)
    weight = w[f"{name}.1.dwconv.conv.weight"]  # [kernel, d]: each channel by itself
    h = remembered(x, len(weight) - 1, state, f"{name}.1")
    h = sum(h[i:i + len(x)] * each for i, each in enumerate(weight)) + w[f"{name}.1.dwconv.conv.bias"]
    h = gelu(dense(layer_norm(h, w, f"{name}.1.norm", 1e-6), w, f"{name}.1.pwconv1"))
    return x + dense(h, w, f"{name}.1.pwconv2") * w[f"{name}.1.gamma"]


def decoder_block(x: np.ndarray, w: dict[str, Any], name: str, state: dict[str, Any], stride: int) -> np.ndarray:
    """`stride` times as many times, half of the channels, then three residual units: [n, c] -> [n * stride, c / 2]."""
    x = convolved(snake(x, w, f"{name}.0"), w, f"{name}.1.conv", state, 1, stride)
    for i, dilation in enumerate((1, 3, 9), 2):
        h = convolved(snake(x, w, f"{name}.{i}.act1"), w, f"{name}.{i}.conv1.conv", state, dilation)
        x = x + dense(snake(h, w, f"{name}.{i}.act2"), w, f"{name}.{i}.conv2.conv")
    return x


@dataclass(frozen=True, eq=False)
class Codec:
    """A decoder: the Config of its transformer, `about` the rest of decoder_config."""
    config: Config
    about: dict[str, Any]
    samples: int  # of a frame
    rate: int  # samples a second
    weights: dict[str, np.ndarray]


@np.errstate(over="ignore", invalid="ignore")  # reported once all is computed
def decode(codec: Codec, codes: np.ndarray, state: dict[str, Any]) -> np.ndarray:
    """Codes [n, groups] of the next frames -> samples from -1 to 1, float32 [n * codec.samples].

    `state`: {} before the first frame; it keeps what the next frames need. In blocks whose size depends on the number
    of frames before: a sound that is decoded by complete blocks, as `heard` does, has the same bits as all at once.
    """
    parts = list[np.ndarray]()
    while len(codes):
        n = block_size(state.get("frames", 0))
        parts.append(decode_block(codec, codes[:n], state))
        codes = codes[n:]
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise InputError("the codec gives samples that are no finite numbers")
    return samples


def block_size(n: int) -> int:
    """How many frames are decoded at once after n: few, so that the first sound comes soon and none comes too late."""
    return min(1 + n // 4, MOST_FRAMES)


def heard(codec: Codec, talk: Talk) -> np.ndarray:
    """The samples that are ready, and at a talk's end all of them. Frames are decoded when they are a block, or the
    last ones: by an engine that can, beside the next frames, with all threads where these wait for it."""
    codes, ends = np.array(talk.codes[talk.n_decoded:]), talk.finish_reason is not None
    waits = ends or talk.n_decoded == 0
    if len(codes) and (ends or len(codes) >= block_size(talk.n_decoded)):
        talk.n_decoded += len(codes)
        if talk.beside is None:
            return decode(codec, codes, talk.state)
        talk.decoding.append(talk.beside(partial(decode, codec, codes, talk.state), waits))
    found = [np.empty(0, np.float32)]
    while talk.decoding and (waits or len(talk.decoding) > 1 or talk.decoding[0].done()):
        found.append(talk.decoding.popleft().result())
    return np.concatenate(found)


def decode_block(codec: Codec, codes: np.ndarray, state: dict[str, Any]) -> np.ndarray:
    """The next frames' codes [n, groups] -> their samples, float32 [n * codec.samples]."""
    w, config, about = codec.weights, codec.config, codec.about
    rows = w["codebooks"][np.arange(codes.shape[1]), codes]  # [n, groups, d]
    first, rest = (w[f"quantizer.rvq_{part}.output_proj.weight"] for part in ("first", "rest"))
    x = linear(rows[:, 0], first) + linear(rows[:, 1:].sum(axis=1), rest)
    x = dense(convolved(x, w, "pre_conv.conv", state), w, "pre_transformer.input_proj")
    state["frames"] = state.get("frames", 0) + len(codes)
    turned = rope_tables(config, np.arange(state["frames"] - len(codes), state["frames"]))
    for i in range(config.num_hidden_layers):
        x = codec_layer(x, w, f"pre_transformer.layers.{i}", config, about["sliding_window"], state, *turned)
    x = dense(rms_norm(x, w["pre_transformer.norm.weight"], config.rms_norm_eps), w, "pre_transformer.output_proj")
    for i, stride in enumerate(about["upsampling_ratios"]):
        x = upsampled(x, w, f"upsample.{i}", state, stride)
    x, i = convolved(x, w, "decoder.0.conv", state), 0
    for i, stride in enumerate(about["upsample_rates"], 1):
        some = max(1, MOST_TIMES // stride)
        x = np.concatenate([decoder_block(x[j:j + some], w, f"decoder.{i}.block", state, stride)
                            for j in range(0, len(x), some)])
    x = np.concatenate([convolved(snake(x[j:j + MOST_TIMES], w, f"decoder.{i + 1}"), w, f"decoder.{i + 2}.conv", state)
                        for j in range(0, len(x), MOST_TIMES)])
    return np.clip(x[:, 0], -1, 1)


def read_codec(folder: Path, groups: int, size: int) -> Codec:
    """The codec in a folder, for frames of so many codes below `size`. Raises InputError for what is missing, damaged
    or not computed here."""
    raw, file, w = read_json_object(folder / "config.json"), folder / "config.json", dict[str, np.ndarray]()
    about: dict[str, Any] = DECODER | given(raw, "decoder_config")
    stored = map_safetensors(folder / "model.safetensors")
    try:
        strides = {f"upsample.{i}.0.conv": stride for i, stride in enumerate(about["upsampling_ratios"])} | {
            f"decoder.{i}.block.1.conv": stride for i, stride in enumerate(about["upsample_rates"], 1)}
        for name in (name.removeprefix("decoder.") for name in stored if name.startswith("decoder.")):
            tensor, (layer, _, part) = to_float32(stored[f"decoder.{name}"]), name.rpartition(".")
            if part in ("alpha", "beta"):
                tensor = np.exp(tensor) if part == "alpha" else 1 / (np.exp(tensor) + np.float32(1e-9))
            elif layer in strides:
                tensor = np.tile(tensor, strides[layer]) if part == "bias" else by_stride(tensor, strides[layer])
            tensor = tensor[:, 0].T if tensor.ndim == 3 and "dwconv" in name else as_matrix(tensor)  # [kernel, d]
            w[name] = np.asfortranarray(tensor)  # so a product with the transposed takes 4 % less time
        books = [f"quantizer.rvq_{'rest' if i else 'first'}.vq.layers.{max(i - 1, 0)}._codebook."
                 for i in range(groups)]
        w["codebooks"] = np.stack([w[f"{book}embedding_sum"] / np.maximum(w[f"{book}cluster_usage"], np.float32(1e-5))[
            :, None] for book in books])
        codec = Codec(sizes_of(about | {"vocab_size": size}, file), about,
                      math.prod([*about["upsampling_ratios"], *about["upsample_rates"]]),
                      checked_whole(f"{file}: output_sample_rate", raw.get("output_sample_rate", 24_000), 1), w)
        decode(codec, np.full((1, groups), size - 1), {})
    except (ArithmeticError, KeyError, ValueError, IndexError, TypeError) as error:  # a tensor or size that doesn't fit
        raise InputError(f"{folder}: the codec's weights don't fit config.json: {brief(error)}") from error
    return codec


def as_matrix(tensor: np.ndarray) -> np.ndarray:
    """A convolution's weight [outputs, inputs, kernel] -> [outputs, kernel * inputs]; others stay as they are."""
    return tensor.transpose(0, 2, 1).reshape(len(tensor), -1) if tensor.ndim == 3 else tensor


def by_stride(tensor: np.ndarray, stride: int) -> np.ndarray:
    """A transposed convolution's weight [inputs, outputs, kernel] -> [stride * outputs, kernel / stride * inputs]: each
    time gives `stride` of the output, to which the times before add, whose kernels go on there."""
    inputs, outputs, kernel = tensor.shape
    times = tensor.reshape(inputs, outputs, kernel // stride, stride)[:, :, ::-1]  # the earliest first
    return times.transpose(3, 1, 2, 0).reshape(stride * outputs, -1)


# ---- Voices: all that a talker lacks ---------------------------------------------------------------------------------

NARROW = "small_to_mtp_projection"  # where the code predictor is narrower than the talker: in the 1.7B
AROUND_TALKER = ("talker.code_predictor.", "talker.text_projection.", "talker.model.")  # how names of tensors begin
CODES = {"zh": "chinese", "en": "english", "de": "german", "it": "italian", "pt": "portuguese", "es": "spanish",
         "ja": "japanese", "ko": "korean", "fr": "french", "ru": "russian"}


class Voices(Media):
    """What stands around a talker: the text's vectors, the code predictor, the codec. Each is read for the first text.

    `kind`: custom_voice, with voices' `names`, voice_design or base. `allowed` [vocab_size]: what may be drawn as c0.
    """

    def __init__(self, source: Source):
        super().__init__()
        self.source, about, self.models = source, source.language, dict[Engine, list[Model]]()
        self.kind, self.ids = source.about.get("tts_model_type"), given(about, "codec_language_id")
        self.names, self.dialects = ({name.lower(): value for name, value in given(about, key).items()}
                                     for key in ("spk_id", "spk_is_dialect"))
        file, size = source.path / "config.json", source.config.vocab_size
        predictor = sizes_of(PREDICTOR | given(about, "code_predictor_config"), file)
        self.config = replace(predictor, tie_word_embeddings=True)  # with a head, as if that were the embedding
        self.groups = checked_whole(f"{file}: num_code_groups", about["num_code_groups"], 2)
        marks = {key: about[key] for key in TALKER if key.startswith("codec_")}
        for name, value in (marks | self.names | self.ids).items():
            if checked_whole(f"{file}: {name}", value, 0) >= size:
                raise InputError(f"{file}: {name} = {value}, but the talker has {size} codes and marks")
        self.end, self.allowed = about["codec_eos_token_id"], np.arange(size) < self.config.vocab_size
        self.allowed[self.end] = True

    @cached_property
    def sampling(self) -> tuple[Sampling, Sampling]:
        """How c0 is drawn, and how the other codes are, unless speak says it."""
        raw = DRAWING | {name: value for name, value in self.source.generation.items() if value is not None}
        one, other = (Sampling(raw[f"{at}temperature"] if raw[drawn] else 0.0, raw[f"{at}top_k"], raw[f"{at}top_p"])
                      for at, drawn in (("", "do_sample"), ("subtalker_", "subtalker_dosample")))
        return one.updated(repetition_penalty=raw["repetition_penalty"]), other

    @cached_property
    def codec(self) -> Codec:
        return read_codec(self.source.path / "speech_tokenizer", self.groups, self.config.vocab_size)

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """All that stands around the talker, by shorter names. Raises InputError if one is missing or doesn't fit."""
        found = {name.removeprefix(start): tensor for start in AROUND_TALKER
                 for name, tensor in self.source.tower.items() if name.startswith(start)}
        found["model.embed_tokens.weight"] = found.get("lm_head.0.weight")
        size, width, within = self.config.vocab_size, self.source.config.hidden_size, self.config.hidden_size
        words, inner = (self.source.language.get(f"text_{name}_size") for name in ("vocab", "hidden"))
        shapes: dict[str, Any] = {"text_embedding.weight": (words, inner)}
        shapes |= {"linear_fc1.weight": (inner, inner), "linear_fc1.bias": (inner,)}
        shapes |= {"linear_fc2.weight": (width, inner), "linear_fc2.bias": (width,)}
        if within != width:
            shapes |= {f"{NARROW}.weight": (within, width), f"{NARROW}.bias": (within,)}
        for i in range(self.groups - 1):
            shapes |= {f"lm_head.{i}.weight": (size, within), f"model.codec_embedding.{i}.weight": (size, width)}
        return qwen3.fitting(found, shapes | QWEN3.shapes(self.config), True, self.source.path)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The projections, and the code predictor's tables: `codes`, and `narrow`, as wide as its layers."""
        w = {name: to_float32(tensor) for name, tensor in self.tensors.items() if name.startswith(("linear_", NARROW))}
        w["codes"] = np.stack([to_float32(self.tensors[f"model.codec_embedding.{i}.weight"])
                               for i in range(self.groups - 1)])
        return w | {"narrow": dense(w["codes"], w, NARROW) if f"{NARROW}.weight" in w else w["codes"]}

    def text(self, ids: list[int]) -> np.ndarray:
        """The vectors of a text's tokens [n] -> [n, hidden_size]."""
        w, table = self.weights, self.tensors["text_embedding.weight"]
        if max(ids) >= len(table.data):
            raise InputError(f"{self.source.path}: the tokenizer has more tokens than the text embedding")
        h = dense(to_float32(table._replace(data=table.read()[ids])), w, "linear_fc1")
        return dense(h / (1 + np.exp(-h)), w, "linear_fc2")

    def predictor(self, engine: Engine) -> list[Model]:
        """The code predictor in this engine: a model for each code after c0, with the same layers and another head."""
        if engine not in self.models:
            heads, none = [self.tensors[f"lm_head.{i}.weight"] for i in range(self.groups - 1)], cast(Any, None)
            tensors = {name: self.tensors[name] for name in QWEN3.shapes(self.config) if name in self.tensors}
            kind = replace(QWEN3, engine=engine, fewest="int8", fast=self.source.kind.fast)
            source = replace(self.source, kind=kind, config=self.config, tensors=tensors, tower={}, heads={})
            self.models[engine] = [Model(source, self.config, weights, none, Sampling(), (), None, engine)
                                   for weights in engine.with_heads(replace(source, saved=None), heads)]
        return self.models[engine]


def speaks(model: Model) -> bool:
    """Whether a model speaks texts."""
    return isinstance(model.media, Voices)


def voices_of(model: Model) -> Voices:
    """What the model speaks with. Raises InputError for one that can't speak."""
    if not isinstance(model.media, Voices):
        raise InputError(f"{model.path}: the model can't speak; Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice can")
    return model.media


# ---- Speech ----------------------------------------------------------------------------------------------------------

class Speech(Iterator[np.ndarray]):
    """A text as it is spoken: iterate over float32 samples [n], `rate` a second, or take all `samples`, or `save` them.

    `finish_reason`: None until the end, then "stop", or "length" if max_seconds, or the model's own limit, cut it.
    """

    def __init__(self, model: Model, texts: Iterable[str], prompt: dict[str, Any], limit: int, seed: int | None,
                 temperature: float | None):
        """prompt: for `talker_prompt`."""
        self.model, self.texts, self.prompt, self.limit, self.temperature = model, texts, prompt, limit, temperature
        self.codec, self.rng = voices_of(model).codec, np.random.default_rng(seed)
        self.rate, self.pieces = self.codec.rate, list[np.ndarray]()
        self.longest = model.max_new_tokens or 2048  # frames of one text; limit: of all texts
        self.finish_reason: str | None = None
        self.coming = self.speak()

    def talks(self) -> Iterator[Talk]:
        """A Talk of each text, one after the other: `next_frames` runs it until it has a finish_reason."""
        left, reasons = self.limit, set[str | None]()
        for text in self.texts:
            if left == 0:  # the last one has ended by its "length"
                break
            talk = Talk(self.model, *talker_prompt(self.model, text, **self.prompt), min(self.longest, left), self.rng,
                        self.temperature)
            yield talk
            left -= len(talk.codes)
            reasons.add(talk.finish_reason)
        if not reasons:
            raise InputError("there is no text to speak")
        self.finish_reason = "length" if "length" in reasons else "stop"

    def speak(self) -> Iterator[np.ndarray]:
        for talk in self.talks():
            while talk.finish_reason is None:
                next_frames(self.model, [talk])
                if len(samples := heard(self.codec, talk)):
                    yield samples

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
        numbers = np.rint(self.samples * 32767).astype("<i2")
        with wave.open(str(file), "wb") as opened:
            opened.setparams((1, 2, self.rate, 0, "NONE", ""))
            opened.writeframes(numbers.tobytes())


def speak(model: Model, text: str | Iterable[str], voice: str | None = None, language: str | None = None,
          instruct: str | None = None, describe: str | None = None, clone: Any = None, seed: int | None = None,
          temperature: float | None = None, max_seconds: float | None = None) -> Speech:
    """Speaks a text, or one that comes in pieces, sentence by sentence -> its Speech: samples as they come.

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
    if voices.kind == "base":
        from qwen3_lib.generation.speaker import voice_in
        speaker = voice_in(clone, model.source)
    if voices.kind == "custom_voice":
        speaker = next(iter(voices.names), "") if voice is None else str(voice).lower()
        if speaker not in voices.names:
            raise InputError(f"voice must be one of {', '.join(voices.names)}, not {brief(repr(speaker))}")
        if instruct and voices.source.about.get("tts_model_size") == "0b6":
            raise InputError(f"{model.path}: the 0.6B takes no instruct; the 1.7B does")
    prompt = {"voice": speaker, "language": language_spoken(voices, language), "instruct": instruct or describe or "",
              "streamed": voices.kind == "base"}  # as Qwen's package does by default
    seconds = checked_number("max_seconds", 1e6 if max_seconds is None else max_seconds, 0, 1e6)
    limit = max(1, round(seconds * voices.codec.rate / voices.codec.samples))
    seed = None if seed is None else checked_whole("seed", seed, 0)
    voices.sampling[0].updated(temperature=temperature)
    if isinstance(text, str) and not text.strip():
        raise InputError("there is no text to speak")
    texts = [text.strip()] if isinstance(text, str) else text
    if LIBRARY.is_dir():
        from qwen3_lib.generation.sentences import sentences, spoken_parts
        texts = spoken_parts(text) if isinstance(text, str) else sentences(text)
    return Speech(model, texts, prompt, limit, seed, temperature)


def language_spoken(voices: Voices, name: str | None) -> str:
    """The language as the model calls it, by its name or code (en, en-US); "auto" for None. Raises InputError."""
    asked = "auto" if name is None else str(name).strip().lower()
    found = CODES.get(asked.replace("_", "-").partition("-")[0], asked)
    if found not in (known := ["auto", *(each for each in voices.ids if "dialect" not in each)]):
        raise InputError(f"language must be one of {', '.join(known)}, not {brief(repr(name))}")
    return found


media_of = Voices
MODEL_TYPES = {"qwen3_tts": replace(
    QWEN3, config=sizes_of, architectures=("Qwen3TTSForConditionalGeneration",), text=("talker_config",),
    tower=(*AROUND_TALKER[:2], f"{AROUND_TALKER[2]}text_embedding.", "speaker_encoder."), media="qwen3_tts",
    defaults=TALKER, instead="qwen3_tts.py", fast="qwen3_lib.kernels.speaking", quantize="int8", names={
        "talker.model.codec_embedding.": "model.embed_tokens.", "talker.codec_head.": "lm_head.",
        "talker.model.": "model."})}


# ---- The command line ------------------------------------------------------------------------------------------------

OPTIONS = {  # name: its type, what stands for its value in the help, the help
    "voice": (str, "NAME", "one of the model's voices (default: its first one)"),
    "language": (str, "NAME", "the language of the text, such as English or en (default: auto)"),
    "instruct": (str, "TEXT", "how to say it, such as \"very angry\" (1.7B)"),
    "describe": (str, "TEXT", "what the voice is like (VoiceDesign)"),
    "seed": (int, "N", "the same seed gives the same sound"),
    "temperature": (float, "T", "0 takes the likeliest codes (default: the model's)"),
    "max-seconds": (float, "S", "longest sound (default: the model's limit for each part of the text)")}


def main(argv: list[str] | None = None) -> int:
    """Speaks a text -> exit status, see qwen3.main."""
    sys.modules.setdefault("qwen3_tts", sys.modules[__name__])  # so that nothing imports a second copy of this file

    def work() -> int:
        if LIBRARY.is_dir():
            from qwen3_lib.app.talk import main as with_all_options
            return with_all_options(argv)
        parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description="%(prog)s [options] text: speaks it")
        parser.add_argument("text", nargs="+", help="what to say")
        parser.add_argument("--model", required=True, help="folder with Qwen's own files")
        parser.add_argument("--out", required=True, help="the WAV file to write")
        for name, (kind, metavar, text) in OPTIONS.items():
            parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
        args = vars(parser.parse_args(argv))
        model, text, out = qwen3.load_model(args.pop("model")), " ".join(args.pop("text")), args.pop("out")
        speak(model, text, **args).save(out)
        return 0

    return qwen3.in_one_line(work)


if __name__ == "__main__":
    sys.exit(main())
