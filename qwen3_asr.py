# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "threadpoolctl>=3.5"]
# ///
"""Speech to text by Qwen3-ASR in plain NumPy: from a sound to vectors that stand beside those of words.

    python qwen3_asr.py --model Qwen3-ASR-0.6B speech.wav     a folder with Qwen's files; the text goes to stdout

This file stands on qwen3.py, which you should read first. Read it from top to bottom:

    config -> log-mel -> convolutions -> positions -> layers -> a sound's tokens -> prompt -> answer -> loading -> main

How 2.5 seconds of sound become 33 tokens, with the sizes of Qwen3-ASR-0.6B:

    40,000 samples        0 s                  1 s                  2 s        2.5 s
                          +--------------------+--------------------+----------+
    log-mel [250, 128]    | 100 frames         | 100 frames         | 50       |    a frame: the loudness of 128 pitches
                          +--------------------+--------------------+----------+
    of each second        three convolutions, each with half of the times and half of the pitches,
                          [100, 128, 1] -> [50, 64, 480] -> [25, 32, 480] -> [13, 16, 480], linear, + positions 0 to 12
                          +--------------------+--------------------+----------+
    tokens [33, 896]      | 13 tokens          | 13 tokens          | 7 tokens |
                          +--------------------+--------------------+----------+
    of each 8 seconds     18 x layer:  x + attention(LayerNorm(x)), then  x + linear(GELU(linear(LayerNorm(x))))
                          linear -> GELU -> linear: embeddings [33, 1024], in the place of <|audio_pad|> in a prompt

The words that qwen3.py doesn't have:

    frame        25 ms of sound, every 10 ms, as the loudness of its pitches
    mel          a scale of pitches on which equal steps sound equal; log-mel: the logarithm of the loudness on it
    chunk        100 frames, one second: what the convolutions see together
    window       8 chunks, 104 tokens: what the layers see together; the windows of a sound don't depend on each other
"""
from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import threading
import wave
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Unpack

if __name__ == "__main__" and find_spec("qwen3") is None:
    sys.exit("qwen3_asr.py: it needs qwen3.py and tokenizer_utils.py beside it")

import qwen3  # first: it says in one line what is missing
import numpy as np
from qwen3 import (LIBRARY, QWEN3, Media, Model, Sampling, SamplingOptions, Sequence, Source, Stream,
                   attention_in_blocks, checked_whole, dense, gelu, layer_norm, linear, to_float32)
from tokenizer_utils import InputError, brief

if TYPE_CHECKING:
    from qwen3_lib.generation.transcript import Transcript

__all__ = ["Hearing", "Sound", "SoundConfig", "Sounds", "audio_tower", "log_mel", "transcribe"]

# ---- Config ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class SoundConfig:
    """The fields of audio_config in config.json that the tensors don't tell, under Hugging Face's names."""
    num_mel_bins: int = 128
    encoder_layers: int = 24
    encoder_attention_heads: int = 16
    n_window_infer: int = 800  # frames of a window


FIXED = {"activation_function": "gelu", "scale_embedding": False, "n_window": 50}  # other values are refused


# ---- From a sound to log-mel -----------------------------------------------------------------------------------------

RATE = 16_000  # samples in a second
FRAME, HOP = 400, 160  # samples of a frame, and from one frame to the next: 25 and 10 ms
SHORTEST = 8_000  # samples: shorter sounds are followed by silence
LONGEST = 1_260 * RATE  # samples that are heard as one
CHUNK_FRAMES = 100  # that the convolutions take at a time: one second


def mel_filters(n_mels: int, rate: int, frame: int) -> np.ndarray:
    """The share of each frequency of a frame's spectrum in each pitch -> [frame // 2 + 1, n_mels].

    A pitch is a triangle: 1 at its own frequency, 0 from those of its neighbours on, then divided by its area. Pitches
    are 66.7 Hz apart below 1,000 Hz, and 7 % of their frequency above (Slaney 1998), up to half the rate.
    """
    steps = np.linspace(0, 15 + 27 * np.log(rate / 2000) / np.log(6.4), n_mels + 2)
    hertz = np.where(steps < 15, steps * 200 / 3, 1000 * np.exp((steps - 15) * np.log(6.4) / 27))
    low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
    frequencies = np.linspace(0, rate / 2, frame // 2 + 1)[:, None]
    triangles = np.minimum((frequencies - low) / (middle - low), (high - frequencies) / (high - middle))
    return np.maximum(triangles, 0) * 2 / (high - low)


def log_mel(samples: np.ndarray, n_mels: int = 128) -> np.ndarray:
    """Samples [n], n at least SHORTEST -> the loudness of each pitch in each frame, float32 [n // 160, n_mels].

    The logarithm is cut 8 powers of ten below the loudest place, so a sound's loudness matters little.
    """
    padded = np.pad(samples.astype(np.float64), FRAME // 2, mode="reflect")  # so that frames begin around time 0
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:len(samples) // HOP]
    filters = mel_filters(n_mels, RATE, FRAME)
    smooth = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)  # Hann's window
    power = np.concatenate([np.abs(np.fft.rfft(frames[i:i + 1024] * smooth)) ** 2 @ filters
                            for i in range(0, len(frames), 1024)])
    decades = np.log10(np.maximum(power, 1e-10))
    return ((np.maximum(decades, decades.max() - 8) + 4) / 4).astype(np.float32)


# ---- Tower: from log-mel to embeddings -------------------------------------------------------------------------------

def convolution(x: np.ndarray, w: dict[str, Any], name: str) -> np.ndarray:
    """3 x 3 numbers around every second time and pitch, x [times, pitches, channels] -> GELU of [half, half, outputs].

    One product: the nine neighbours of a place side by side, [half, half, 9 * channels], 0 beyond the edges (im2col).
    """
    times, pitches = ((size + 1) // 2 for size in x.shape[:2])
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    neighbours = np.stack([padded[i:i + 2 * times - 1:2, j:j + 2 * pitches - 1:2] for i in range(3) for j in range(3)],
                          axis=2)
    return gelu(dense(neighbours.reshape(times, pitches, -1), w, name))


def sinusoids(n: int, d: int) -> np.ndarray:
    """The vectors of positions 0 to n - 1 [n, d]: sines, then cosines, of angles that grow with the position: the last
    angle 10,000 times as slowly as the first (Vaswani et al. 2017)."""
    angles = np.arange(n)[:, None] * np.exp(-np.log(10_000) * np.arange(d // 2) / (d // 2 - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def embed_chunk(mel: np.ndarray, w: dict[str, Any]) -> np.ndarray:
    """Log-mel [frames, 128] of at most a second -> a token for each 8 frames [ceil(frames / 8), d_model].

    Positions begin anew in each chunk. The frames that a last chunk lacks are 0, as in transformers.
    """
    x = np.pad(mel, ((0, CHUNK_FRAMES - len(mel)), (0, 0)))[:, :, None]
    for name in ("conv2d1", "conv2d2", "conv2d3"):
        x = convolution(x, w, name)
    x = linear(x.reshape(len(x), -1), w["conv_out.weight"])  # [13, d_model]
    return (x + sinusoids(*x.shape))[:-(-len(mel) // 8)]


def encoder_layer(x: np.ndarray, w: dict[str, Any], name: str, n_heads: int) -> np.ndarray:
    """One layer of the tower: x [n, d_model] of one window -> the same shape. Each token sees all."""
    h = layer_norm(x, w, f"{name}.self_attn_layer_norm", 1e-5)
    q, k, v = (dense(h, w, f"{name}.self_attn.{part}_proj").reshape(len(x), n_heads, -1).swapaxes(0, 1)
               for part in "qkv")  # [n_heads, n, head_dim] each
    heads = attention_in_blocks(q, k, v, causal=False).swapaxes(0, 1).reshape(x.shape)
    x = x + dense(heads, w, f"{name}.self_attn.out_proj")
    hidden = gelu(dense(layer_norm(x, w, f"{name}.final_layer_norm", 1e-5), w, f"{name}.fc1"))
    return x + dense(hidden, w, f"{name}.fc2")


@np.errstate(over="ignore", invalid="ignore")  # weights that aren't finite are reported once all windows are computed
def audio_tower(mel: np.ndarray, w: dict[str, Any], config: SoundConfig, embed: Any = embed_chunk) -> np.ndarray:
    """Log-mel [frames, 128] of one window -> embeddings [tokens, the language model's hidden_size]."""
    x = np.concatenate([embed(mel[i:i + CHUNK_FRAMES], w) for i in range(0, len(mel), CHUNK_FRAMES)])
    for i in range(config.encoder_layers):
        x = encoder_layer(x, w, f"layers.{i}", config.encoder_attention_heads)
    return dense(gelu(dense(layer_norm(x, w, "ln_post", 1e-5), w, "proj1")), w, "proj2")


# ---- A sound's tokens ------------------------------------------------------------------------------------------------

WINDOW_NUMBERS, KEPT_SOUNDS = itertools.count(1), 4  # kept though no sequence holds them: 38 MB if each has 3 minutes


@dataclass(frozen=True, eq=False)
class Window:
    """What the language model hears of a window: `vectors` [1, tokens, hidden_size], by `audio_tower`."""
    number: int
    vectors: np.ndarray
    digest: bytes  # of what it was made of


@dataclass(frozen=True, eq=False)
class Sound:
    """What the language model hears of a sound. Sounds that begin in the same way share their first windows."""
    windows: list[Window]

    @property
    def ids(self) -> np.ndarray:
        """The ids of its tokens [tokens]: see qwen3.Media."""
        return np.concatenate([~((each.number << 36) + np.arange(each.vectors.shape[1])) for each in self.windows])


# The names of a tower's tensors in the files: Qwen's own folders, those of transformers (-hf) -> in Sounds.weights.
TOWER_NAMES = {"thinker.audio_tower.": "", "model.audio_tower.": "", "model.multi_modal_projector.linear_1.": "proj1.",
               "model.multi_modal_projector.linear_2.": "proj2."}


class Sounds(Media):
    """The sounds of a model: the last ones are kept, and all that a sequence holds."""

    def __init__(self, source: Source):
        super().__init__()
        self.source, self.width, self.lock = source, source.config.hidden_size, threading.Lock()
        self.recent = deque[Sound](maxlen=KEPT_SOUNDS)

    @cached_property
    def config(self) -> SoundConfig:
        """Read for the first sound, as the weights are. Raises InputError for values that aren't supported."""
        raw, where = self.source.about, f"{self.source.path / 'config.json'}: "
        raw = raw.get("thinker_config", raw).get("audio_config")
        if not isinstance(raw, dict):
            raise InputError(f"{where}audio_config must be an object, not {brief(repr(raw))}")
        if wrong := [key for key, value in FIXED.items() if raw.get(key, value) != value]:
            raise InputError(f"{where}{wrong[0]} = {brief(raw[wrong[0]])} of audio_config is not supported, only "
                             f"{FIXED[wrong[0]]}")
        sizes = {name: checked_whole(f"{where}{name} of audio_config", raw.get(name, usual), 1)
                 for name, usual in asdict(SoundConfig()).items()}
        if sizes["n_window_infer"] % CHUNK_FRAMES or sizes["num_mel_bins"] > FRAME:  # a frame has no more pitches
            raise InputError(f"{where}num_mel_bins and n_window_infer of audio_config can't be {brief(sizes)}")
        return SoundConfig(**sizes)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The tower's weights in float32, those of the convolutions as the matrices that `convolution` wants."""
        w = dict[str, np.ndarray]()
        for name, tensor in self.source.tower.items():
            start = next(start for start in TOWER_NAMES if name.startswith(start))
            w[TOWER_NAMES[start] + name.removeprefix(start)] = to_float32(tensor)
        for name in ("conv2d1.weight", "conv2d2.weight", "conv2d3.weight"):  # [outputs, channels, pitches, times]
            w[name] = np.ascontiguousarray(w[name].transpose(0, 3, 2, 1).reshape(len(w[name]), -1))
        d, channels = len(w["conv_out.weight"]), len(w["conv2d3.weight"])  # [d_model, channels * pitches]
        w["conv_out.weight"] = np.ascontiguousarray(
            w["conv_out.weight"].reshape(d, channels, -1).swapaxes(1, 2).reshape(d, -1))
        return w

    def hear(self, samples: np.ndarray, each: Any = map) -> Sound:
        """The Sound of samples [n], RATE a second, divided by their peak if it is beyond 1, as Qwen's package does it.

        `each`: map, or what works on several windows at once.
        """
        return [*self.hear_in_pieces(samples, each)][-1]

    @cached_property
    def embed(self) -> Any:
        """embed_chunk, which keeps the last chunks: a sound that grows has the most of them again."""
        kept = lru_cache(16)(lambda data, pitches: embed_chunk(np.frombuffer(data, np.float32).reshape(-1, pitches),
                                                               self.weights))
        return lambda mel, _: kept(mel.tobytes(), mel.shape[1])

    def hear_in_pieces(self, samples: np.ndarray, each: Any = map) -> Iterator[Any]:
        """None after each window that wasn't known, so that others can be served in between, and then the Sound."""
        if len(samples) > LONGEST:
            raise InputError(f"a sound of {len(samples) / RATE:,.0f} s; at most {LONGEST // RATE:,} s are heard as one")
        samples = np.pad(samples / np.abs(samples).max(initial=1), (0, max(SHORTEST - len(samples), 0)))
        mel, step = log_mel(samples, self.config.num_mel_bins), self.config.n_window_infer
        parts = [mel[i:i + step] for i in range(0, len(mel), step)]
        keys, computed = [hashlib.sha256(part.tobytes()).digest() for part in parts], list[Window]()
        windows: dict[bytes, Any] = {key: self.known.get(key) for key in keys}
        new = {key: part for key, part in zip(keys, parts) if windows[key] is None}
        try:
            with self.lock:
                w = self.weights
            found = each(lambda part: audio_tower(part, w, self.config, self.embed), new.values())
            for key, vectors in zip(new, found):
                computed.append(Window(next(WINDOW_NUMBERS), vectors[None], key))
                yield None
        except (KeyError, ValueError) as error:  # no tensor of this name, or none of this shape
            raise InputError(f"{self.source.path}: its tower doesn't fit its config: {brief(error)}") from error
        if not all(one.vectors.shape[2] == self.width and np.isfinite(one.vectors).all() for one in computed):
            raise InputError(f"{self.source.path}: the tower gives no {self.width} finite numbers")
        for key, window in zip(new, computed):
            self.known[key] = self.known[window.number] = windows[key] = window
        self.recent.append(sound := Sound([windows[key] for key in keys]))
        yield sound


def hears(model: Model) -> bool:
    """Whether a model writes down sounds."""
    return isinstance(model.media, Sounds)


def sounds_of(model: Model) -> Sounds:
    """What the model hears with. Raises InputError for one that can't hear."""
    if not isinstance(model.media, Sounds):
        raise InputError(f"{model.path}: the model can't hear; Qwen/Qwen3-ASR-0.6B can")
    return model.media


# ---- Prompt and answer -----------------------------------------------------------------------------------------------

LANGUAGES = {"zh": "Chinese", "en": "English", "yue": "Cantonese", "ar": "Arabic", "de": "German", "fr": "French",
             "es": "Spanish", "pt": "Portuguese", "id": "Indonesian", "it": "Italian", "ko": "Korean", "ru": "Russian",
             "th": "Thai", "vi": "Vietnamese", "ja": "Japanese", "tr": "Turkish", "hi": "Hindi", "ms": "Malay",
             "nl": "Dutch", "sv": "Swedish", "da": "Danish", "fi": "Finnish", "pl": "Polish", "cs": "Czech",
             "fil": "Filipino", "fa": "Persian", "el": "Greek", "ro": "Romanian", "hu": "Hungarian", "mk": "Macedonian"}


def language_named(name: str | None) -> str:
    """The language as the model calls it, by its name or code (en, en-US); "" for None, "auto". Raises InputError."""
    names = LANGUAGES | {each.lower(): each for each in LANGUAGES.values()} | {"": "", "auto": ""}
    asked = "" if name is None else str(name).strip().lower()
    if (found := names.get(asked, LANGUAGES.get(asked.replace("_", "-").partition("-")[0]))) is None:
        raise InputError(f"the language {brief(repr(name))} is none of {', '.join(LANGUAGES.values())}")
    return found


def speech_prompt(model: Model, sound: Sound, language: str = "", context: str = "") -> np.ndarray:
    """The ids [n] of a prompt: the answer is the text of the sound.

    `context`: words that the sound is likely to hold, names for example; special tokens in it stay text. With a
    `language`, the answer doesn't begin with the language's name.
    """
    encode, after = model.tokenizer.encode, "<|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    return np.concatenate([
        encode("<|im_start|>", False), encode(f"system\n{context}", False, as_text=True),
        encode("<|im_end|>\n<|im_start|>user\n<|audio_start|>", False), sound.ids,
        encode(after + f"language {language}<asr_text>" * bool(language), False)])


def usual_limit(sound: Sound) -> int:
    """Most tokens of a sound's text, if nobody sets a limit: as many as the sound has, 13 a second, and 64 more."""
    return len(sound.ids) + 64


def usual_sampling(model: Model) -> Sampling:
    """The default settings of a sound's text: greedy, whatever the model's files say."""
    return replace(model.sampling, temperature=0.0)


def language_and_text(answer: str, language: str = "") -> tuple[str, str]:
    """An answer, language English<asr_text>Good morning. -> ("English", "Good morning."); "" for no speech.

    `language`: the one of the prompt, then all of the answer is text. So it is if the answer has no <asr_text>.
    """
    head, tag, text = answer.partition("<asr_text>")
    if language or not tag:
        return language, answer.strip()
    name = head.strip().partition("\n")[0].strip()
    name = name[len("language "):].strip() if name.lower().startswith("language ") else name
    return "" if name.lower() == "none" else name, text.strip()


class SpokenText:
    """Takes an answer apart while it grows, as language_and_text does: `language` and `text` are those so far."""

    def __init__(self, language: str = ""):
        self.given, self.language, self.answer, self.text = language, language, "", ""

    def push(self, piece: str, ended: bool = False) -> str:
        """Takes the next piece of the answer -> the next piece of the text, which is empty before <asr_text>."""
        self.answer, before = self.answer + piece, len(self.text)
        if self.given or ended or "<asr_text>" in self.answer:
            self.language, self.text = language_and_text(self.answer, self.given)
        return self.text[before:]


class Hearing(Stream):
    """The text of a sound as it comes: a Stream without the language before <asr_text>, which `language` is."""

    def __init__(self, model: Model, sound: Sound, language: str = "", context: str = "",
                 max_tokens: int | None = None, seed: int | None = None, eos_token_ids: Any = None, **sampling: Any):
        limit = checked_whole("max_tokens", usual_limit(sound) if max_tokens is None else max_tokens, 1)
        super().__init__(model, Sequence(model, speech_prompt(model, sound, language, context), limit, seed,
                                         eos_token_ids, sampling=usual_sampling(model).updated(**sampling)))
        self.spoken = SpokenText(language)
        ended = itertools.chain(((piece, False) for piece in self.pieces), [("", True)])
        self.pieces = filter(None, itertools.starmap(self.spoken.push, ended))

    @property
    def language(self) -> str:
        return self.spoken.language


# ---- Loading ---------------------------------------------------------------------------------------------------------

media_of = Sounds
MODEL_TYPES = {"qwen3_asr": replace(
    QWEN3, architectures=("Qwen3ASRForConditionalGeneration", "Qwen3ASRForTokenClassification"),
    text=("thinker_config", "text_config"), tower=tuple(TOWER_NAMES), media="qwen3_asr",
    quantize="int8", names={"thinker.model.": "model.", "thinker.lm_head.": "classes.",
                            "model.language_model.": "model.", "score.": "classes."})}
# A tied head is the embedding, and a forced aligner has classes in place of words.


# ---- The command line ------------------------------------------------------------------------------------------------

def samples_in_wav(file: str) -> np.ndarray:
    """The samples [n] of a WAV file, the mean of its channels; qwen3_lib/io/sounds.py reads other files. InputError."""
    try:
        with wave.open(file) as opened:
            form, data = opened.getparams(), opened.readframes(opened.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise InputError(f"{file}: cannot be read as WAV: {brief(error)}") from error
    if (form.sampwidth, form.framerate) != (2, RATE) or not data:
        raise InputError(f"{file}: {form.nframes} samples of {8 * form.sampwidth} bits, {form.framerate} a second; "
                         f"without qwen3_lib, only WAV of 16 bits, {RATE} a second is read")
    return np.frombuffer(data, "<i2").reshape(-1, form.nchannels).mean(axis=1, dtype=np.float32) / 2**15


def transcribe(model: Model, sound: Any, language: str | None = None, context: str | None = None,
               words: Model | Literal[False] = False, longest_part: float | None = None, max_tokens: int | None = None,
               seed: int | None = None, **sampling: Unpack[SamplingOptions]) -> Transcript:
    """The text of a sound: its file's path, the file's bytes, or (samples [n], how many of them a second).

    Samples are floats from -1 to 1, or int16 from -32,768 to 32,767; louder floats are divided by their peak.

    language: the one that is spoken, "English" or "en"; None: the model finds out
    context: words that the sound is likely to hold, names for example
    words: a forced aligner, Qwen/Qwen3-ForcedAligner-0.6B, which tells when each word is said: `words` of each part
    longest_part: in seconds; max_tokens of a part, by default those of its sound and 64 more
    seed and sampling: as in qwen3.generate, but greedy by default
    Raises InputError for what can't be read, and for a model that can't hear.
    """
    from qwen3_lib.generation.transcript import Transcript
    limit = None if max_tokens is None else checked_whole("max_tokens", max_tokens, 1)
    return Transcript(model, sound, language, context, longest_part, words, max_new_tokens=limit, seed=seed, **sampling)


def chat(model: Model, prompt: str, language: str | None, context: str | None, system: str | None,
         enable_thinking: bool | None, **options: Any) -> Hearing:
    """For qwen3.main: the prompt is the name of a file, and a system prompt is a context, too."""
    sound = sounds_of(model).hear(samples_in_wav(prompt))
    return Hearing(model, sound, language_named(language), context or system or "", **options)


def main(argv: list[str] | None = None) -> int:
    """Prints the text of a sound -> exit status, see qwen3.main."""
    sys.modules.setdefault("qwen3_asr", sys.modules[__name__])  # so that nothing imports a second copy of this file
    if LIBRARY.is_dir():
        from qwen3_lib.app.speech import main as with_all_options
        return with_all_options(argv)
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--language", help="the language that is spoken (default: the model finds out)")
    more.add_argument("--context", help="words that the sound is likely to hold")
    return qwen3.main(argv, chat, (more,))


if __name__ == "__main__":
    sys.exit(main())
