"""Trains `tests/tiny_speaking/`: a tiny Qwen3-TTS, which speaks as espeak-ng does, on one pitch.

    python demo/train/speaking.py

needs `pip install -e ".[train]"` and the program espeak-ng. The folder has the layout of Qwen's originals, and the
words of `tests/tiny_hearing`, which understands it. First the codec is trained, see codec.py, then the talker with the
code predictor. The sentences of the held-out set, those of hearing.py, are not in the training set.

The weights in the folder had 6,000 steps on 8,500 sentences (22 minutes of one core that other programs used, too), and
then, with the rows of words of hearing.py's `row`,

    python demo/train/speaking.py --start FIRST --codec-steps 0 --steps 5000 --utterances 7000

(16,000 utterances in the first 1,150 steps; the start's speech_tokenizer was copied before).
tests/tiny_hearing writes down 200 of 200 held-out sentences as they were said.
"""
import argparse
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config, Qwen3Model

import hearing
from codec import CROP, FRAME, GROUPS, RATE, SIZE, Codes, Decoder, codec_config, codec_losses, in_phase
from hearing import is_unseen, row, sentence, trained_tokenizer
from loop import IGNORED, ROOT, from_identity, judge, options, train

sys.path.insert(1, str(ROOT))

from qwen3 import Model, load_model  # noqa: E402
from qwen3_asr import transcribe  # noqa: E402
from qwen3_tts import speak  # noqa: E402

ESPEAK = ["espeak-ng", "--stdout", "-m", "-v", "en-us", "-s", "150", "-p", "60"]  # with this, a pitch of 100 Hz
MONOTONE = '<speak><prosody range="0%">{}</prosody></speak>'
VOICE = "tom"
TEMPERATURE = 0.3  # of the file; the usual 0.9 is for more weights
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]
MARKS = {f"codec_{name}_id": SIZE + i for i, name in enumerate(
    ("pad", "bos", "eos_token", "think", "nothink", "think_bos", "think_eos"))}
END, ENGLISH, SPEAKER = MARKS["codec_eos_token_id"], SIZE + 10, SIZE + 20
STACK = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "attention_bias": False,
         "max_position_embeddings": 1024}
TALKER = STACK | MARKS | {
    "model_type": "qwen3_tts_talker", "num_hidden_layers": 3, "text_hidden_size": 96, "tie_word_embeddings": False,
    "vocab_size": SIZE + 1024,  # Qwen's package takes the last 1,024 for marks
    "num_code_groups": GROUPS, "codec_language_id": {"english": ENGLISH}, "spk_id": {VOICE: SPEAKER},
    "spk_is_dialect": {VOICE: False},
    "rope_scaling": {"interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}}
PREDICTOR = STACK | {"model_type": "qwen3_tts_talker_code_predictor", "num_hidden_layers": 2, "vocab_size": SIZE,
                     "num_code_groups": GROUPS}


def spoken(text: str) -> np.ndarray:
    """What espeak-ng says on a pitch of 100 Hz: float32 [samples] at 24,000 Hz, whole frames."""
    said = subprocess.run([*ESPEAK, MONOTONE.format(text)], capture_output=True, check=True).stdout
    samples = np.frombuffer(said[44:], "<i2") / 32768
    samples = np.pad(samples, (0, -len(samples) % 147))  # 22,050 Hz : 24,000 Hz = 147 : 160
    length = len(samples) // 147 * 160
    samples = np.fft.irfft(np.fft.rfft(samples), length) * 160 / 147
    samples = samples[:np.flatnonzero(np.abs(samples) > 0.003)[-1] + RATE // 10]
    return in_phase(np.pad(samples, (0, -len(samples) % FRAME)))


def sentences(rng: random.Random, unseen: bool, draw: Callable[[random.Random], str] = sentence) -> Iterator[str]:
    """Of the training set, or of the held-out, unseen one, which has no single words; the other one has fewer."""
    while True:
        text = draw(rng)
        if is_unseen(text) == unseen if " " in text else not unseen and rng.random() < 0.3:
            yield text


def stack(config: dict[str, Any]) -> nn.Module:
    """transformers' layers of Qwen3."""
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    sizes = {name: config[name] for name in (*STACK, "vocab_size", "num_hidden_layers") if name != "rope_theta"}
    return from_identity(Qwen3Model(Qwen3Config(**sizes, rope_parameters=rope)))


class Talker(nn.Module):
    """A Qwen3-TTS: the talker, whose vocabulary is the first codebook, and the predictor of a frame's other codes."""

    def __init__(self, n_tokens: int):
        super().__init__()
        n, text = TALKER["hidden_size"], TALKER["text_hidden_size"]
        self.model, self.predictor = stack(TALKER), stack(PREDICTOR)
        self.predictor.embed_tokens = None
        self.text_embedding = nn.Embedding(n_tokens, text)
        self.linear_fc1, self.linear_fc2 = nn.Linear(text, text), nn.Linear(text, n)
        self.codec_head = nn.Linear(n, TALKER["vocab_size"], bias=False)
        self.embedding = nn.ModuleList(nn.Embedding(SIZE, n) for _ in range(GROUPS - 1))
        self.head = nn.ModuleList(nn.Linear(n, SIZE, bias=False) for _ in range(GROUPS - 1))
        for name, p in self.named_parameters():
            if "embed" in name:
                nn.init.normal_(p, std=0.3)

    def tables(self) -> list[nn.Module]:
        """The vectors of a frame's codes."""
        return [self.model.embed_tokens, *self.embedding]

    def vectors(self, text: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Ids [...] and codes [..., groups], negative where there is none -> the sums of their vectors [..., n]."""
        x = self.linear_fc2(F.silu(self.linear_fc1(self.text_embedding(text.clamp(min=0))))) * (text >= 0)[..., None]
        for table, each in zip(self.tables(), codes.unbind(-1)):
            x = x + table(each.clamp(min=0)) * (each >= 0)[..., None]
        return x

    def others(self, states: torch.Tensor, codes: torch.Tensor) -> list[torch.Tensor]:
        """Frames' states [m, hidden_size] and codes [m, groups] -> logits [m, size] of each code but the first."""
        before = [table(each) for table, each in zip(self.tables(), codes[:, :-1].unbind(1))]
        x = self.predictor(inputs_embeds=torch.stack([states, *before], 1), use_cache=False).last_hidden_state
        return [head(x[:, i]) for i, head in enumerate(self.head, 1)]


def original_name(name: str) -> str:
    """The name of a talker's parameter in Qwen's own files."""
    for own, other in (("model.embed_tokens.", "model.codec_embedding."), ("text_embedding.", "model.text_embedding."),
                       ("linear_", "text_projection.linear_"), ("predictor.", "code_predictor.model."),
                       ("embedding.", "code_predictor.model.codec_embedding."), ("head.", "code_predictor.lm_head.")):
        if name.startswith(own):
            name = other + name.removeprefix(own)
            break
    return f"talker.{name}"


def prompt(tokenizer: tokenizers.Tokenizer, text: str, language: bool) -> tuple[list[int], list[int]]:
    """The ids of the text's side and of the codec's side of a prompt, which has a language or not; -1: none."""
    pad, begin, end = (tokenizer.token_to_id(token) for token in SPECIAL[3:])
    role, words = tokenizer.encode("<|im_start|>assistant\n").ids, tokenizer.encode(text).ids
    think = [MARKS[f"codec_{name}_id"] for name in ("think" if language else "nothink", "think_bos", "think_eos")]
    think = [*think[:2], *[ENGLISH] * language, think[2], SPEAKER]
    rest, bos = MARKS["codec_pad_id"], MARKS["codec_bos_id"]
    return ([*role, *[pad] * len(think), begin, *words, end, pad],
            [*[-1] * len(role), *think, rest, *[rest] * (len(words) + 1), bos])


def batch_of(tokenizer: tokenizers.Tokenizer, rows: list[tuple[str, torch.Tensor]], rng: random.Random
             ) -> list[torch.Tensor]:
    """Texts and their codes [frames, groups] -> ids [rows, n], codes and labels [rows, n, groups].

    Some texts have no capitals, or another mark or none at the end; half of them have a language. The talker doesn't
    get all frames that it said before: so it learns to look at the text rather than which sentences there are.
    """
    columns: list[list[torch.Tensor]] = [[], [], []]
    for text, codes in rows:
        text = text[:-1] + rng.choice(["", "", "!", "?"]) if rng.random() < 0.2 else text
        ids, marks = prompt(tokenizer, text.lower() if rng.random() < 0.1 else text, rng.random() < 0.5)
        before = F.pad(torch.tensor(marks)[:, None], (0, GROUPS - 1), value=-1)
        heard = codes.masked_fill(torch.rand(len(codes), 1) < rng.choice([0.0, 0.2, 0.5]), -1)
        labels = torch.cat([torch.full((len(ids) - 1, GROUPS), IGNORED), codes, torch.full((1, GROUPS), IGNORED)])
        labels[-1, 0] = END
        for column, each in zip(columns, (torch.tensor(ids + [ids[-1]] * len(codes)), torch.cat([before, heard]),
                                          labels)):
            column.append(each)
    return [nn.utils.rnn.pad_sequence(each, True, fill) for each, fill in zip(columns, (-1, -1, IGNORED))]


def talker_losses(model: Talker, text: torch.Tensor, codes: torch.Tensor, labels: torch.Tensor
                  ) -> dict[str, torch.Tensor]:
    """Cross entropy of the first codes and the end, and the sum of those of the other codes."""
    states = model.model(inputs_embeds=model.vectors(text, codes), use_cache=False).last_hidden_state
    said, frames = labels[..., 0] != IGNORED, labels[..., 1] != IGNORED
    wanted = labels[frames]
    others = [F.cross_entropy(logits, each) for logits, each in
              zip(model.others(states[frames], wanted), wanted[:, 1:].unbind(1))]
    return {"first": F.cross_entropy(model.codec_head(states[said]), labels[said][:, 0]),
            "others": torch.stack(others).sum()}


def files_of(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """The files of a folder as Qwen's originals are, but for the weights."""
    start, end, pad, begin, eod = (tokenizer.token_to_id(token) for token in SPECIAL[1:])
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts", "tts_model_size": "0b6",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz", "tts_model_type": "custom_voice", "im_start_token_id": start,
        "im_end_token_id": end, "assistant_token_id": tokenizer.token_to_id("assistant"), "tts_pad_token_id": pad,
        "tts_bos_token_id": begin, "tts_eos_token_id": eod,
        "talker_config": TALKER | {"text_vocab_size": tokenizer.get_vocab_size(), "code_predictor_config": PREDICTOR}}
    drawing = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 50, "top_p": 1.0}
    files = hearing.files_of(tokenizer, config)
    del files["preprocessor_config.json"]
    return files | {"generation_config.json": drawing | {
        f"subtalker_{name.replace('_', '', name == 'do_sample')}": value for name, value in drawing.items()} | {
            "max_new_tokens": 250, "repetition_penalty": 1.0}}


def answers(speaker: Model, listener: Model, texts: list[str]) -> Iterator[tuple[str, str]]:
    """The texts, and what tests/tiny_hearing hears when they are spoken."""
    for seed, text in enumerate(texts):
        speech = speak(speaker, text, seed=seed)
        yield text, transcribe(listener, (speech.samples, RATE)).finish().text


def main() -> None:
    args = options(__doc__, 11000, "24 texts", ROOT / "tests/tiny_speaking", codec_steps=dict(
        type=int, default=2000, help="of nine seconds of sound each (default 2000)"), utterances=dict(
        type=int, default=16000, help="that espeak-ng makes (default 16000)"))
    rng = random.Random("speech")
    texts = sentences(rng, False)
    digits = (text for text in texts if " " in text and set(text[:-1].lower().split()) <= set(hearing.DIGITS))
    said = [next(digits) if kind < 0.3 else next(texts) if kind < 0.85 else f"{next(texts)} {next(texts)}"
            for kind in (rng.random() for _ in range(args.utterances // 2))]  # digits in a row are the hardest to say
    said += islice(sentences(random.Random("rows"), False, row), args.utterances - len(said))
    with ThreadPoolExecutor() as pool:
        sounds = [torch.from_numpy(sound) for sound in pool.map(spoken, said)]
    n_frames = [len(sound) // FRAME for sound in sounds]
    sounds = [F.pad(sound, (0, max(CROP * FRAME - len(sound), 0))) for sound in sounds]
    print(f"{sum(n_frames) * FRAME / RATE / 3600:.1f} hours of speech", flush=True)
    coder = Codes(sounds[:800])
    codes = [coder.of(sound) for sound in sounds]
    decoder = Decoder(coder.books)
    own = {"steps": args.codec_steps, "out": args.out / "speech_tokenizer",
           "start": args.start and args.start / "speech_tokenizer", "mix": None,
           "checkpoint": args.checkpoint and args.checkpoint.with_suffix(".codec")}
    train(argparse.Namespace(**vars(args) | own), decoder, "decoder.{}".format, {"config.json": codec_config()},
          (0.003, 0.003), lambda step: codec_losses(decoder, sounds, codes, step))

    tokenizer = trained_tokenizer(SPECIAL, [])
    model = Talker(tokenizer.get_vocab_size())
    pairs = sorted(((text, each[:n]) for text, each, n in zip(said, codes, n_frames)), key=lambda pair: len(pair[1]))

    def losses(step: int) -> Iterator[dict[str, torch.Tensor]]:
        rng = random.Random(f"talker {step}")
        first = rng.randrange(max(len(pairs) - 120, 1))  # of texts that are about as long
        yield talker_losses(model, *batch_of(tokenizer, rng.sample(pairs[first:first + 120], 24), rng))

    train(args, model, original_name, files_of(tokenizer), (0.01, 0.003), losses)
    unseen = {kind: [*islice(sentences(random.Random("unseen"), True, draw), 200)]
              for kind, draw in (("held-out sentences", sentence), ("held-out rows of words", row))}
    (args.out / "unseen.txt").write_text("".join(
        f"{text}\n" for each in unseen.values() for text in [*dict.fromkeys(each)][:20]))
    speaker, listener = load_model(args.out), load_model(ROOT / "tests/tiny_hearing")
    for kind, each in unseen.items():
        judge(kind, answers(speaker, listener, each))


if __name__ == "__main__":
    main()
