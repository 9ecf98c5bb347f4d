"""tests/tiny_hearing: a Qwen3-ASR that demo/train/hearing.py has trained on what espeak-ng says."""
import difflib
import itertools
import os
import re
import subprocess
import sys
import wave

import numpy as np
import pytest

import qwen3
import qwen3_inspect
import qwen3_numba
from configs import ROOT
from hearing import wav_of
from helpers import hide, message_of
from qwen3_asr import RATE, transcribe
from qwen3_inspect import PageOptions
from qwen3_lib.page.contents import contents

FOLDER = ROOT / "tests/tiny_hearing"
SPEECH = "Maria has four green apples. Seven white birds."  # what speech.wav says


def unseen():
    """The sounds of unseen.wav and their texts."""
    lengths, texts = zip(*(line.split(" ", 1) for line in (FOLDER / "unseen.txt").read_text().splitlines()))
    with wave.open(str(FOLDER / "unseen.wav")) as file:
        samples = (np.frombuffer(file.readframes(file.getnframes()), np.uint8) - np.float32(128)) / 128
    *sounds, rest = np.split(samples, [*itertools.accumulate(map(int, lengths))])
    assert len(sounds) == len(texts) == 40 and len(rest) == 0
    return sounds, texts


@pytest.fixture(scope="module", params=[qwen3.Engine, qwen3_numba.engine, lambda: qwen3_numba.engine("int8")],
                ids=["NumPy", "fast", "int8"])
def model(request):
    return qwen3.load_model(FOLDER, request.param())


def test_it_writes_down_what_is_said(model):
    """40 utterances, whose voices, speeds, pitches and sentences it wasn't trained on: 38 are exactly right."""
    right = [transcribe(model, (sound, RATE)).finish().text == text for sound, text in zip(*unseen())]
    assert sum(right) >= 38


@pytest.mark.parametrize("options", [{}, {"language": "English"}, {"context": "Lucy, twenty, orange"}], ids=str)
def test_it_hears_sentences(model, options):
    found = transcribe(model, FOLDER / "speech.wav", **options).finish()
    assert (found.text, found.language) == (SPEECH, "English")


@pytest.mark.parametrize("loudness", [0.05, 1e-3, 1e-5, 0])
@pytest.mark.parametrize("seconds", [0.3, 2, 14, 40])
def test_noise_and_silence_are_no_speech(model, loudness, seconds):
    """In numbers of 16 bits; 1e-5 is a few of the smallest steps among zeros, 0 is digital silence."""
    noise = loudness * np.random.default_rng(0).standard_normal(int(seconds * RATE))
    found = transcribe(model, ((noise * 2**15).round().astype(np.int16), RATE)).finish()
    assert (found.text, found.language) == ("", "")


def test_it_hears_minutes(model):
    """Five of them, with pauses of 0 to 2 seconds, at least 95 % of the words, in parts of 5 seconds by default."""
    rng, (sounds, texts) = np.random.default_rng(0), unseen()
    chosen = rng.integers(40, size=160)
    sound = np.concatenate([np.pad(sounds[i], (0, rng.integers(2 * RATE))) for i in chosen])
    assert 280 * RATE < len(sound) < 310 * RATE
    found, said = transcribe(model, (sound, RATE)).finish(), " ".join(texts[i] for i in chosen).split()
    assert max(part.end - part.start for part in found.parts) <= 7.5 and found.language == "English"
    blocks = difflib.SequenceMatcher(None, said, found.text.split(), autojunk=False).get_matching_blocks()
    assert sum(block.size for block in blocks) >= 0.95 * max(len(said), len(found.text.split()))


def test_the_command_prints_the_text():
    done = subprocess.run([sys.executable, ROOT / "qwen3_asr.py", "--model", FOLDER, FOLDER / "speech.wav"],
                          capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == (f"{SPEECH}\n", "", 0)


def test_the_page_shows_what_a_token_listens_to(tmp_path):
    """The spectrogram has a place for each token of the sound, and its tokens' weights in the maps; longer sounds and
    other models are refused."""
    with wave.open(str(FOLDER / "speech.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / np.float32(32768)
    model = qwen3.load_model(FOLDER)
    page = contents(model, PageOptions("Lucy", sound=samples))
    picture, n = page["pictures"][0], page["tokens"]["ids"].count(~0)
    assert page["about"]["answer"] == SPEECH and page["heard"] and not page["mrope"]
    assert (picture["rows"], picture["columns"]) == (1, n) and n == 13 * 3 + 10  # 3.8 seconds
    assert page["attention"]["positions"] == [[i] * 3 for i in range(len(page["tokens"]["ids"]))]
    assert "can't hear" in message_of(contents, qwen3.load_model(ROOT / "demo"), PageOptions("", sound=samples))
    long = tmp_path / "long.wav"
    long.write_bytes(wav_of((np.tile(samples, 20)[:, None] * 32767).astype("<i2")))
    assert "minute" in message_of(qwen3_inspect.samples_of, str(long))


def test_the_page_needs_no_extra(tmp_path):
    """The command of docs/inspect.md, as after README's installation."""
    hide(tmp_path, "PIL", "soundfile", "soxr")
    command = re.search(r"`python (qwen3_inspect.py [^`]*--sound[^`]*)`", (ROOT / "docs/inspect.md").read_text())[1]
    done = subprocess.run([sys.executable, *command.split(), "--out", tmp_path / "page.html"], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "data:image/png" in (tmp_path / "page.html").read_text("utf-8")
