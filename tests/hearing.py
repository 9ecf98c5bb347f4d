"""Models that hear, with random weights, and sounds: what the tests of Qwen3-ASR share."""
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

import qwen3
from configs import SPEECH_TOKENS, asr_config
from make_random_model import make_random_model

# Sharp attention, and a last norm of both signs, so that an answer has many different tokens, which the sound decides.
LIVELY = {"embed_tokens": 3, "norm": 0, "q_norm": 6, "k_norm": 2}


def make_hearing(config: dict, path: Path, dtype: str = "float32") -> Path:
    """A random Qwen3-ASR with the bundled tokenizer and SPEECH_TOKENS."""
    make_random_model(config, path, dtype, scales=LIVELY)
    tokenizer = json.loads((path / "tokenizer.json").read_text("utf-8"))
    one = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [one | {"id": i, "content": name, "special": name != "<asr_text>"}
                                  for name, i in SPEECH_TOKENS.items()]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_hearing(asr_config("0.6B"), tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def model(path):
    return qwen3.load_model(path)


def voice(n_samples: int, seed: int = 0) -> np.ndarray:
    """Something like a voice: overtones of a pitch that wanders, in syllables, with a little noise."""
    rng, t = np.random.default_rng(seed), np.arange(n_samples) / 16_000
    phase = np.cumsum(120 + 40 * np.sin(2 * np.pi * (0.4 + 0.1 * seed) * t)) / 16_000
    sound = sum(np.sin(2 * np.pi * k * phase) / k for k in range(1, 12)) * np.sin(2 * np.pi * 1.7 * t + seed) ** 2
    return (0.2 * sound + 0.01 * rng.standard_normal(n_samples)).astype(np.float32)


def wav_of(numbers: np.ndarray, rate: int = 16_000, encoding: int = 1) -> bytes:
    """A WAV file of numbers [n, channels], by the specification; those of 24 bits come as bytes [n, channels, 3]."""
    channels, width = numbers.shape[1], numbers.itemsize * math.prod(numbers.shape[1:])
    form = struct.pack("<HHIIHH", encoding, channels, rate, rate * width, width, 8 * width // channels)
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", numbers.nbytes)
    return b"RIFF" + struct.pack("<I", len(body) + numbers.nbytes) + body + numbers.tobytes()
