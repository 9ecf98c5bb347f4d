"""Trains `tests/tiny_hearing/`: a tiny Qwen3-ASR, which writes down what espeak-ng says.

    python demo/train/hearing.py

needs `pip install -e ".[train]"` and the program espeak-ng. The folder has the layout of Qwen's originals. Each word is
a token. Besides the loss of the answer there is one of the language model's second layer, which says after each word of
the sound which one it was (CTC): so the later layers have only to copy. The voices, speeds, pitches and sentences of
the held-out set are not in the training set.

The weights in the folder had 4,000 steps from nothing, on noise and one to three sentences in short silences, and then

    python demo/train/hearing.py --start FIRST --peak 0.5 --steps 600 --utterances 6000 --out SECOND
    python demo/train/hearing.py --start SECOND --peak 0.3 --steps 400 --utterances 5000 --mix FIRST 0.4

on sentences alone, and then, with the rows of words (`row`; in the first 250 steps half of the texts of 14,000
utterances)

    python demo/train/hearing.py --start THIRD --peak 0.8 --steps 1500 --utterances 5000 --mix THIRD 0.2
"""
import json
import random
import re
import subprocess
import sys
import wave
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from transformers import Qwen3ASRConfig, Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration

from loop import IGNORED, ROOT, encoded, judge, options, train

sys.path.insert(1, str(ROOT))

from qwen3 import Model, load_model  # noqa: E402
from qwen3_asr import RATE, transcribe  # noqa: E402
from tokenizer_utils import SPLIT_PATTERNS  # noqa: E402

DIGITS = "zero one two three four five six seven eight nine".split()
COUNTS = [*DIGITS[2:], "ten"]
COLOURS = "red green blue white yellow".split()
NAMES = "Anna Tom Maria David".split()
VERBS = "has sees wants".split()
THINGS = "birds boats apples houses books".split()
PHRASES = [*DIGITS, "ten", *COLOURS, *NAMES, *THINGS, "yes", "no", "hello", "thank you"]
ACCENTS = "en-gb en-us en-gb-scotland en-gb-x-rp en-029".split()
UNSEEN_VOICES = "m6 f4 m8 Andrea edward steph".split()
SPEECH = "Maria has four green apples. Seven white birds."  # unseen sentences
LONGEST = 14  # seconds of speech in a part of a long sound
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
PLAIN = ["<asr_text>"]  # a named token that isn't special
TURNS = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n<|audio_start|>{}<|audio_end|><|im_end|>\n" \
    "<|im_start|>assistant\n"
AUDIO = {"model_type": "qwen3_asr_audio_encoder", "num_mel_bins": 128, "d_model": 128, "encoder_layers": 2,
         "encoder_attention_heads": 2, "encoder_ffn_dim": 256, "output_dim": 128, "activation_function": "gelu",
         "n_window": 50, "n_window_infer": 800, "conv_chunksize": 500, "downsample_hidden_size": 24,
         "max_source_positions": 1500, "scale_embedding": False}
TEXT = {"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True, "attention_bias": False,
        "max_position_embeddings": 150,  # so parts of 5 seconds, at most 7.5, are heard
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}}


@cache
def training_voices() -> list[str]:
    """All variants of espeak-ng's voices but UNSEEN_VOICES, some 90."""
    lines = subprocess.run(["espeak-ng", "--voices=variant"], capture_output=True, text=True, check=True).stdout
    return sorted({*re.findall(r"!v/(\S+)", lines)} - {*UNSEEN_VOICES})


def sentence(rng: random.Random) -> str:
    """A word or two, some digits, or up to five words about somebody's things."""
    kind = rng.random()
    if kind < 0.4:
        words = [rng.choice(PHRASES)]
    elif kind < 0.55:
        words = rng.sample(DIGITS, rng.randint(2, 5))
    elif kind < 0.62:
        words = [rng.choice(["hello,", "thank you,"]), rng.choice(NAMES)]
    else:
        words = [rng.choice(COUNTS), rng.choice(COLOURS), rng.choice(THINGS)]
        words = [rng.choice(NAMES), rng.choice(VERBS), *words] if kind < 0.85 else words[rng.randrange(2):]
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."


def row(rng: random.Random) -> str:
    """One to six words in a row, of one kind or of any, some of them repeated, or a sentence that lacks some words."""
    if rng.random() < 0.3:
        kinds = ["hello", "thank you", "yes", "no"], NAMES, VERBS, ["one", *COUNTS], COLOURS, THINGS
        words = [rng.choice(kind) for kind in kinds if rng.random() < 0.7]
    else:
        kind, words = rng.choice([DIGITS, DIGITS, COLOURS, NAMES, THINGS, PHRASES, [*PHRASES, *VERBS]]), list[str]()
        for _ in range(rng.randint(1, 6)):
            words.append(words[-1] if words and rng.random() < 0.2 else rng.choice(kind))
    words, commas = words or [rng.choice(PHRASES)], rng.random()
    text = (", " if commas < 0.2 else " ").join(words)
    text = text.replace(" ", ", ", 1) if 0.2 < commas < 0.25 and words[0] != "thank you" else text
    return text[0].upper() + text[1:] + "."


def is_unseen(text: str) -> bool:
    """Is this sentence of several words only in the held-out set? One in ten is; single words are in both."""
    return zlib.crc32(text.replace(",", "").encode()) % 10 == 0


def spoken(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """What espeak-ng says, int16 [samples] at 16,000 Hz; speed in words a minute, pitch from 0 to 99."""
    said = subprocess.run(["espeak-ng", "--stdout", "-v", voice, "-s", str(speed), "-p", str(pitch), text],
                          capture_output=True, check=True).stdout
    samples = np.frombuffer(said[44:], "<i2").astype(np.float64)
    samples = np.pad(samples, (0, -len(samples) % 441))  # 22,050 Hz : 16,000 Hz = 441 : 320
    length = len(samples) // 441 * 320
    samples = np.fft.irfft(np.fft.rfft(samples)[:length // 2 + 1], length) * 320 / 441
    return np.clip(samples.round(), -32768, 32767).astype(np.int16)


@dataclass
class Utterance:
    """Sentences in one voice, with seconds of silence between them."""

    texts: list[str]
    voice: str
    speed: int
    pitch: int
    pauses: list[float]

    def said(self) -> tuple[str, np.ndarray]:
        """The text and its sound, int16 [samples], without the last sentences where more than 14 seconds are full."""
        parts, n = [spoken(self.texts[0], self.voice, self.speed, self.pitch)], 1
        for text, pause in zip(self.texts[1:], self.pauses):
            more = [np.zeros(int(RATE * pause), np.int16), spoken(text, self.voice, self.speed, self.pitch)]
            if n >= 3 and sum(map(len, parts + more)) > LONGEST * RATE:
                break
            parts, n = parts + more, n + 1
        return " ".join(self.texts[:n]), np.concatenate(parts)


def utterance(rng: random.Random, unseen: bool, wanted: int = 0, rows: float = 0) -> Utterance:
    """So many sentences, by default one to three, of the training set or of the held-out, unseen one; with a share of
    rows of words."""
    wanted, texts = wanted or rng.choices((1, 2, 3), (70, 20, 10))[0], list[str]()
    while len(texts) < wanted:
        text = row(rng) if rows and rng.random() < rows else sentence(rng)
        if is_unseen(text) == unseen if " " in text else not unseen or rng.random() < 0.1:
            texts.append(text)
    speed = rng.choice([s for s in range(110, 221) if (s % 10 in (4, 5)) == unseen])
    pitch = rng.choice([p for p in range(10, 91) if (p % 10 in (2, 3)) == unseen])
    voice = f"{rng.choice(ACCENTS)}+{rng.choice(UNSEEN_VOICES if unseen else training_voices())}"
    return Utterance(texts, voice, speed, pitch, [rng.uniform(0.1, 2.5) for _ in texts[1:]])


def noise(rng: np.random.Generator, length: int) -> np.ndarray:
    """From white to pink, of mean square 1."""
    spectrum = np.fft.rfft(rng.standard_normal(length)) * np.arange(1, length // 2 + 2) ** -rng.uniform(0, 0.5)
    samples = np.fft.irfft(spectrum, length)
    return samples / samples.std()


def recorded(rng: np.random.Generator, speech: np.ndarray, silence: float = 0.5, softest: float = 30) -> np.ndarray:
    """The speech between silences of up to so many seconds, softer by up to so many dB, in noise 10 to 50 dB below it:
    float32 [samples] within -1..1."""
    before, after = (int(RATE * silence * rng.uniform() ** 2) for _ in range(2))
    samples = np.pad(speech / 32768, (before, max(after, 8000 - before - len(speech))))
    level = samples.std() if speech.any() else 0.1
    samples = samples + noise(rng, len(samples)) * level * 10 ** (-rng.uniform(10, 50) / 20)
    return (samples * 10 ** (-rng.uniform(0, softest) / 20) / np.abs(samples).max()).astype(np.float32)


def silence(rng: np.random.Generator, length: int) -> np.ndarray:
    """Noise of any loudness in numbers of 16 bits, down to zeros: float32 [samples]."""
    samples = noise(rng, length) * 10 ** (-rng.uniform(10, 110) / 20)
    if rng.random() < 0.2:
        samples[:rng.integers(length)] = 0
    return (samples * 32767).round().astype(np.float32) / 32768


def training_sound(rng: np.random.Generator, speech: np.ndarray) -> np.ndarray:
    """As `recorded`; one sound in five has longer silences, some of them digital: float32 [samples]."""
    if not speech.any() and rng.random() < 0.6:
        return silence(rng, max(len(speech), 8000))
    if rng.random() < 0.8:
        return recorded(rng, speech)
    if rng.random() < 0.5:
        return recorded(rng, speech, 4)
    samples = np.pad(speech / 32768, [int(RATE * 4 * rng.uniform() ** 2) for _ in range(2)])
    return (samples * 10 ** (-rng.uniform(0, 30) / 20)).astype(np.float32)


def unseen_sounds(n: int, rows: float = 0) -> list[tuple[str | None, np.ndarray]]:
    """n held-out texts and sounds as `recorded` gives them; one in twenty is noise, and has no text."""
    rng, numbers = random.Random("unseen"), np.random.default_rng(0)
    said = [utterance(rng, True, rows=rows).said() if i % 20 else (None, np.zeros(rng.randrange(8000, 64000)))
            for i in range(n)]
    return [(text, recorded(numbers, speech)) for text, speech in said]


def short_sounds() -> list[tuple[str | None, np.ndarray]]:
    """40 held-out texts and sounds for the tests, in numbers of 8 bits: 24 have one word, 16 have several."""
    rng, numbers, sounds = random.Random("short"), np.random.default_rng(1), list[tuple[str | None, np.ndarray]]()
    while len(sounds) < 40:
        text, speech = utterance(rng, True).said()
        samples = recorded(numbers, speech, 0.1, 6)
        several = len(sounds) >= 24
        if (" " in text) == several and len(samples) < (1.4 if several else 0.75) * RATE and text not in dict(sounds):
            sounds.append((text, (samples * 127).round() / 128))
    return sounds


def long_sounds(n: int) -> list[tuple[str | None, np.ndarray]]:
    """n held-out texts and sounds of four to nine sentences."""
    rng, numbers = random.Random("long"), np.random.default_rng(2)
    said = [utterance(rng, True, rng.randint(4, 9)).said() for _ in range(n)]
    return [(text, recorded(numbers, speech)) for text, speech in said]


def silent_sounds(n: int) -> list[tuple[str | None, np.ndarray]]:
    """n silences of up to 14 seconds; the first ten are digital."""
    rng, numbers = random.Random("silence"), np.random.default_rng(3)
    lengths = [rng.randrange(8000, LONGEST * RATE) for _ in range(n)]
    return [(None, np.zeros(length, np.float32) if i < 10 else silence(numbers, length))
            for i, length in enumerate(lengths)]


def write_sounds(out: Path) -> None:
    """speech.wav, for the first try; unseen.wav has those of `short_sounds`, unseen.txt their samples and texts."""
    said = spoken(SPEECH, "en-gb+f4", 145, 53).tobytes()
    short = short_sounds()
    for name, width, data in (("speech", 2, said), ("unseen", 1, b"".join(
            (samples * 128 + 128).astype(np.uint8).tobytes() for _, samples in short))):
        with wave.open(str(out / f"{name}.wav"), "wb") as file:
            file.setparams((1, width, RATE, 0, "NONE", ""))
            file.writeframes(data)
    (out / "unseen.txt").write_text("".join(f"{len(samples)} {text}\n" for text, samples in short))


def trained_tokenizer(special: list[str] = SPECIAL, plain: list[str] = PLAIN) -> tokenizers.Tokenizer:
    """Bytes, and merges up to whole words; then the named tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERNS), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    rng = random.Random("tokenizer")
    texts = ["system\n", "user\n", "assistant\n", "language English", "language None"] * 200
    texts += [f"{sentence(rng)} {sentence(rng)}" for _ in range(10000)]
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=640, show_progress=False, initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())))
    made.add_special_tokens(special)
    made.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in plain])
    return made


def batch_of(tokenizer: tokenizers.Tokenizer, sounds: list[tuple[str | None, np.ndarray]],
             rng: random.Random) -> dict[str, Any]:
    """The model's arguments for texts (None: no speech) and sounds, with labels, and the texts' ids; for some of them
    a context, or a prompt that names the language."""
    extractor, mels, told = Qwen3ASRFeatureExtractor(), [], []
    for text, samples in sounds:
        mels.append(extractor(samples, sampling_rate=RATE, padding="longest", n_window=0)["input_features"][0])
        seconds, rest = divmod(mels[-1].shape[1], 100)
        context = " ".join(rng.sample(PHRASES, 4)) if rng.random() < 0.1 else ""
        forced = rng.random() < (0.1 if text else 0.3)
        head = f"language {'English' if text or forced else 'None'}<asr_text>"
        asked = TURNS.format(context, "<|audio_pad|>" * (13 * seconds + -(-rest // 8)))
        told.append((asked + head * forced, head * (not forced) + (text or "") + "<|im_end|>"))
    ids, labels = encoded(tokenizer, told)
    words = [tokenizer.encode((text or "").replace(".", "").replace(",", "")).ids for text, _ in sounds]
    n_frames = torch.tensor([mel.shape[1] for mel in mels])
    longest = -(-int(n_frames.max()) // 100) * 100
    return {"input_ids": ids, "labels": labels, "words": words,
            "input_features": torch.stack([F.pad(torch.as_tensor(mel), (0, longest - mel.shape[1])) for mel in mels]),
            "input_features_mask": (torch.arange(longest) < n_frames[:, None]).long()}


def losses_of(model: Any, tokenizer: tokenizers.Tokenizer, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Cross entropy of the answers, and CTC of their words at the sound's positions after the second layer."""
    labels, words = batch.pop("labels")[:, 1:], batch.pop("words")
    out = model.model(**batch, use_cache=False, output_hidden_states=True)
    asked = labels != IGNORED
    answers = F.cross_entropy(model.lm_head(out.last_hidden_state[:, :-1][asked]), labels[asked])
    pad = tokenizer.token_to_id("<|audio_pad|>")
    heard = [each[ids == pad] for each, ids in zip(out.hidden_states[2], batch["input_ids"])]
    scores = model.lm_head(model.model.language_model.norm(torch.nn.utils.rnn.pad_sequence(heard))).log_softmax(-1)
    ctc = F.ctc_loss(scores, torch.tensor(sum(words, [])), torch.tensor([len(each) for each in heard]),
                     torch.tensor([len(each) for each in words]), blank=pad, zero_infinity=True)
    return {"loss": answers, "CTC": 0.3 * ctc}


def original_name(name: str) -> str:
    """The name of a parameter of transformers' in Qwen's own files."""
    name = name.replace("model.multi_modal_projector.linear_", "model.audio_tower.proj")
    return name.replace("model.language_model.", "thinker.model.").replace("model.audio_tower.", "thinker.audio_tower.")


def files_of(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> dict[str, Any]:
    """The files of a folder as Qwen's originals are, but for the weights."""
    made = json.loads(tokenizer.to_str())
    added = {str(token.pop("id")): token for token in made["added_tokens"]}
    end, pad = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    return {
        "config.json": config, "vocab.json": json.dumps(made["model"]["vocab"], ensure_ascii=False) + "\n",
        "merges.txt": "#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in made["model"]["merges"]),
        "generation_config.json": {"do_sample": False, "eos_token_id": [pad, end], "pad_token_id": pad},
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "n_fft": 400, "hop_length": 160,
            "chunk_length": 30, "dither": 0.0, "padding_value": 0.0, "sampling_rate": RATE},
        "tokenizer_config.json": {
            "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
            "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
            "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer", "unk_token": None}}


def answers(model: Model, sounds: list[tuple[str | None, np.ndarray]]) -> Iterator[tuple[str, str]]:
    """What is to be written for sounds, and what the model writes."""
    for text, samples in sounds:
        found = transcribe(model, (samples, RATE)).finish()
        yield f"English: {text}" if text else ": ", f"{found.language}: {found.text}"


def new_model(tokenizer: tokenizers.Tokenizer) -> tuple[Any, dict[str, Any]]:
    """transformers' model with random weights, and its config as Qwen's files have it."""
    end, turn, start, stop, pad = (tokenizer.token_to_id(f"<|{name}|>") for name in (
        "endoftext", "im_end", "audio_start", "audio_end", "audio_pad"))
    text = TEXT | {"vocab_size": tokenizer.get_vocab_size()}
    config = {"architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr",
              "support_languages": ["English"], "thinker_config": {
                  "model_type": "qwen3_asr", "dtype": "bfloat16", "audio_config": AUDIO, "text_config": text,
                  "audio_start_token_id": start, "audio_end_token_id": stop, "audio_token_id": pad}}
    model = Qwen3ASRForConditionalGeneration(Qwen3ASRConfig(
        audio_config=AUDIO | {"model_type": "qwen3_asr_encoder"}, audio_token_id=pad, eos_token_id=[end, turn],
        pad_token_id=end, text_config={key: value for key, value in text.items() if key != "rope_scaling"})).float()
    for name, p in model.named_parameters():
        if p.dim() > 1 and "embed" not in name:  # transformers' are so small that positions drown the sound
            torch.nn.init.normal_(p, std=p[0].numel() ** -0.5 * (2 if p.dim() == 4 else 1))
    return model.to(memory_format=torch.channels_last), config  # so convolutions take a quarter of the time


def main() -> None:
    args = options(__doc__, 4000, "about 48 seconds of sound", ROOT / "tests/tiny_hearing", utterances=dict(
        type=int, default=14000, help="that espeak-ng makes (default 14000)"))
    tokenizer = trained_tokenizer()
    model, config = new_model(tokenizer)
    rng = random.Random("speech")
    # One in ten is as long as a part of a long sound.
    drawn = [utterance(rng, False, rng.randint(4, 9) if rng.random() < 0.1 else 0, 0.7) for _ in range(args.utterances)]
    with ThreadPoolExecutor() as pool:
        speech = sorted(pool.map(Utterance.said, drawn), key=lambda each: len(each[1]))
    seconds = np.array([len(samples) / RATE for _, samples in speech])
    print(f"{seconds.sum() / 3600:.1f} hours of speech, {seconds[0]:.1f} to {seconds[-1]:.1f} s", flush=True)

    def losses(step: int) -> Iterator[dict[str, torch.Tensor]]:
        rng, numbers = random.Random(f"step {step}"), np.random.default_rng(step)
        longest = 20 if args.start else 1.2 + 14 * max(2 * step / args.steps - 0.2, 0)  # from nothing, short ones first
        first = rng.randrange(max(int((seconds < longest).sum()) - 48, 1))
        rows = speech[first:first + min(max(int(48 / (seconds[first] + 0.8)), 4), 24)]
        rows = [(None, 0 * samples) if rng.random() < 0.05 else (said, samples) for said, samples in rows]
        batch = batch_of(tokenizer, [(said, training_sound(numbers, samples)) for said, samples in rows], rng)
        for mel in batch["input_features"]:  # without some pitches, so that no single one decides
            for _ in range(rng.randint(0, 2)):
                low = rng.randrange(112)
                mel[low:low + rng.randint(1, 16)] = mel.mean()
        yield losses_of(model, tokenizer, batch)

    files = files_of(tokenizer, config)
    train(args, model, original_name, files, (0.003, 0.001), losses)
    write_sounds(args.out)
    heard = load_model(args.out)
    for kind, sounds in (("held-out utterances", unseen_sounds(400)), ("rows of words", unseen_sounds(400, 1)),
                         ("of the tests", short_sounds()), ("of four to nine sentences", long_sounds(100)),
                         ("silences", silent_sounds(100))):
        judge(kind, answers(heard, sounds))


if __name__ == "__main__":
    main()
