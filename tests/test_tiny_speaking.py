"""tests/tiny_speaking: a Qwen3-TTS that demo/train/speaking.py has trained on what espeak-ng says."""
import subprocess
import sys
import zlib

import pytest

import qwen3
import qwen3_numba
from configs import ROOT
from qwen3_asr import transcribe
from qwen3_tts import speak

FOLDER, LISTENER = ROOT / "tests/tiny_speaking", ROOT / "tests/tiny_hearing"
UNSEEN = (FOLDER / "unseen.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def listener():
    return qwen3.load_model(LISTENER, qwen3_numba.engine())


@pytest.mark.parametrize("engine", [qwen3.Engine, qwen3_numba.engine, lambda: qwen3_numba.engine("int8")],
                         ids=["NumPy", "fast", "int8"])
def test_it_is_understood(engine, listener):
    """Twenty sentences and twenty rows of words, some repeated, that neither of the two models was trained on:
    tests/tiny_hearing writes down at least 19 of the sentences, and 13 of the rows, as they were said."""
    assert len({*UNSEEN}) == 40 and all(zlib.crc32(text.replace(",", "").encode()) % 10 == 0 for text in UNSEEN)
    model = qwen3.load_model(FOLDER, engine())
    heard = []
    for seed, text in enumerate(UNSEEN):
        speech = speak(model, text, seed=seed)
        heard.append(transcribe(listener, (speech.samples, speech.rate)).finish().text)
        assert speech.finish_reason == "stop"
    right = [*map(str.__eq__, heard, UNSEEN)]
    assert sum(right[:20]) >= 19 and sum(right[20:]) >= 13


def test_it_is_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 3e6


def test_the_commands_speak_and_hear(tmp_path):
    """As in README: one program speaks into a file, the other one reads it."""
    said = "Tom sees six red birds."
    for program, arguments, output in (
            ("qwen3_tts.py", [FOLDER, "--seed", "1", "--out", tmp_path / "said.wav", said], ""),
            ("qwen3_asr.py", [LISTENER, tmp_path / "said.wav"], f"{said}\n")):
        done = subprocess.run([sys.executable, ROOT / program, "--model", *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, output), done.stderr
