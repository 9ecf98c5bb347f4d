"""python qwen3_tts.py: what is played, written and piped, and the three files alone."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import wave

import numpy as np
import pytest

import qwen3
from configs import ROOT, VOICES, tts_config
from helpers import assert_one_line, run_main
from qwen3_lib.app import talk
from qwen3_lib.app.talk import main
from qwen3_lib.io.sounds import open_sound
from qwen3_tts import speak
from talking import make_talking

TEXT = "Good morning."
SEED = ("--seed", "4")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_talking(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def samples(path):
    return speak(qwen3.load_model(path), TEXT, seed=4).samples


def numbers_in(file) -> np.ndarray:
    with wave.open(str(file)) as opened:
        assert opened.getparams()[:3] == (1, 2, 24_000)
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2")


def as_numbers(samples) -> np.ndarray:
    return np.rint(samples * 32767).astype("<i2")


def test_a_sound_in_a_file(path, samples, tmp_path, capfd):
    file = tmp_path / "a.wav"
    status, out, err = run_main(capfd, "--model", path, "Good", "morning.", *SEED, "--out", file, main=main)
    assert (status, out) == (0, "") and np.array_equal(numbers_in(file), as_numbers(samples))
    assert_one_line(err, f"a.wav: {len(samples) / 24_000:.1f} s")


def test_a_mark_of_the_encoding_is_not_spoken(path, samples, tmp_path, capfd):
    status, *_ = run_main(capfd, "--model", path, *SEED, "--out", tmp_path / "a.wav",
                          stdin=b"\xef\xbb\xbf" + TEXT.encode(), main=main)
    assert status == 0 and np.array_equal(numbers_in(tmp_path / "a.wav"), as_numbers(samples))


@pytest.mark.parametrize("out", [(), ("--out", "-")])
def test_a_sound_in_a_pipe(path, samples, capfdbinary, out):
    """As WAV whose header can't say how long it is; our own reader takes it."""
    status, data, _ = run_main(capfdbinary, "--model", path, TEXT, *SEED, *out, main=main)
    found = np.concatenate([*open_sound(data, 24_000).blocks])
    assert status == 0 and np.abs(found - samples).max() < 1e-4


def test_a_piped_text_is_spoken_sentence_by_sentence(path, tmp_path):
    """The first sentence's sound is there before the second one is written."""
    process = subprocess.Popen([sys.executable, ROOT / "qwen3_tts.py", "--model", path, *SEED], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    process.stdin.write(b"Good morning. How")  # within a line, as a model writes it
    first = process.stdout.read(44)
    assert first[:4] == b"RIFF" and process.stdout.read(2)
    rest, said = process.communicate(b" are you? \xe4\xbd\xa0\xe5\xa5\xbd\xe3\x80\x82", timeout=100)
    pieces = ["Good morning. ", "How are you? ", "你好。"]
    expected = as_numbers(speak(qwen3.load_model(path), pieces, seed=4).samples)
    assert process.returncode == 0 and np.array_equal(np.frombuffer(rest, "<i2"), expected[1:]), said


def test_a_long_sound_is_not_kept_in_memory(path, tmp_path, capfd, monkeypatch):
    kept = []
    monkeypatch.setattr(talk, "in_16_bits", lambda piece: kept.append(len(speech[0].pieces)) or as_numbers(piece))
    speech, made = [], talk.speak
    monkeypatch.setattr(talk, "speak", lambda *args, **given: speech.append(made(*args, **given)) or speech[0])
    run_main(capfd, "--model", path, "--out", tmp_path / "a.wav", stdin=b"Yes. No. " * 20, main=main)
    assert len(kept) > 40 and max(kept) <= 1


@pytest.mark.skipif(sys.platform == "win32", reason="a player that is a script")
@pytest.mark.parametrize("program", ["aplay", "afplay"])
def test_a_sound_is_played_on_a_terminal(path, samples, tmp_path, program):
    """By a player that keeps what it gets: aplay reads its stdin, afplay a file."""
    (tmp_path / "bin").mkdir()
    taken, player = tmp_path / "taken.wav", tmp_path / "bin" / program
    player.write_text(f"#!/bin/sh\n/bin/cat {'' if program == 'aplay' else '$1'} > {taken}\n")
    player.chmod(0o755)
    done = on_a_terminal(path, {"PATH": str(tmp_path / "bin")})
    found = np.concatenate([*open_sound(str(taken), 24_000).blocks])
    assert done.returncode == 0 and np.abs(found - samples).max() < 1e-4


@pytest.mark.skipif(sys.platform == "win32", reason="a player that is a script")
@pytest.mark.parametrize("program", ["aplay", "afplay"])
def test_a_player_that_fails(path, tmp_path, program):
    player = tmp_path / program
    player.write_text("#!/bin/sh\nexit 1\n")
    player.chmod(0o755)
    done = on_a_terminal(path, {"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert_one_line(done.stderr.decode(), f"{program} could not play", "--out speech.wav")


@pytest.mark.skipif(sys.platform == "win32", reason="it has a player")
def test_without_a_player_the_way_out_is_told(path, tmp_path):
    done = on_a_terminal(path, {"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert_one_line(done.stderr.decode(), "neither aplay nor afplay", "--out speech.wav")


def on_a_terminal(path, variables) -> subprocess.CompletedProcess:
    ours, its = pytest.importorskip("pty").openpty()
    try:
        return subprocess.run([sys.executable, ROOT / "qwen3_tts.py", "--model", path, TEXT, *SEED], stdin=its,
                              stdout=its, stderr=subprocess.PIPE, env=os.environ | variables, timeout=100)
    finally:
        os.close(ours)
        os.close(its)


def test_the_names_of_voices(path, capfd):
    assert run_main(capfd, "--model", path, "--voices", main=main) == (0, "".join(f"{name}\n" for name in VOICES), "")


def test_a_model_without_names_of_voices(tmp_path, capfd):
    path = make_talking(tmp_path / "design", tts_config("1.7B", "voice_design"))
    status, out, err = run_main(capfd, "--model", path, "--voices", main=main)
    assert (status, out) == (1, "")
    assert_one_line(err, "--describe")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_what_was_spoken(path, tmp_path):
    file = tmp_path / "a.wav"
    process = subprocess.Popen([sys.executable, ROOT / "qwen3_tts.py", "--model", path, *SEED, "--out", file],
                               stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    process.stdin.write(f"{TEXT}\nAnd".encode())
    expected = as_numbers(speak(qwen3.load_model(path), [f"{TEXT} "], seed=4).samples)
    while not file.exists() or file.stat().st_size < 44 + 2 * len(expected):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert_one_line(process.stderr.read().decode(), "interrupted")
    assert np.array_equal(numbers_in(file), expected)


@pytest.mark.parametrize("arguments, words", [
    ((TEXT, "--voice", "nobody"), "one of serena"), ((TEXT, "--language", "fr"), "one of auto"), ((), "no text"),
    ((TEXT, "--describe", "old"), "no describe"), ((TEXT, "--clone", "a.wav"), "no clone"),
    ((TEXT, "--out", "none/a.wav"), "none/a.wav: cannot be written"), ((TEXT, "--out", "a.MP3"), "only WAV"),
    ((TEXT, "--temperature", "-1"), "temperature"), ((TEXT, "--max-seconds", "-1"), "max_seconds"),
    ((TEXT, "--speed", "2"), "--speed")])
def test_bad_input_is_one_line(path, tmp_path, monkeypatch, capfd, arguments, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = run_main(capfd, "--model", path, *arguments, main=main)
    assert status in (1, 2) and not out and not [*tmp_path.iterdir()]
    assert_one_line(err, words)


def test_a_model_must_be_named(monkeypatch, capfd):
    monkeypatch.delenv("QWEN3_MODEL", raising=False)
    for arguments in ((TEXT, "--out", "a.wav"), ("--voices",)):
        status, out, err = run_main(capfd, *arguments, main=main)
        assert (status, out) == (1, "")
        assert_one_line(err, "name a model that speaks: --model Qwen/Qwen3-TTS")


@pytest.mark.parametrize("own, options", [(3, ()), (3, ("--max-seconds", "9")), (50, ("--max-seconds", "0.24"))])
def test_what_cut_a_sound_is_told(tmp_path, capfd, own, options):
    """The model's limit of 3 or 50 frames of 80 ms, for each part, or --max-seconds."""
    copy = shutil.copytree(ROOT / "tests/tiny_speaking", tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"max_new_tokens": own}))
    _, _, err = run_main(capfd, "--model", copy, "Tom sees six red birds.", *SEED, *options, "--out",
                         tmp_path / "a.wav", main=main)
    cut = f"it was cut off by --max-seconds, or by the model's limit of {own * 0.08:.1f} s"
    assert_one_line(err, f"a.wav: 0.2 s; {cut}")


def test_nothing_is_written_for_an_empty_text(path, tmp_path, capfd):
    for stdin, words in ((b"\n \n", "no text"), (b"a\xff", "can't be read"), (None, "no text")):
        status, _, err = run_main(capfd, "--model", path, "--out", tmp_path / "a.wav", stdin=stdin, main=main)
        assert status in (1, 2) and not [*tmp_path.iterdir()]
        assert_one_line(err, words)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_and_a_reader_that_leaves(path, capfd):
    status, _, err = run_main(capfd, "--model", path, TEXT, "--out", "/dev/full", main=main)
    assert status == 1
    assert_one_line(err, "No space left")
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" "{ROOT}/qwen3_tts.py" --model "{path}" {TEXT} | true; '
                           "exit ${PIPESTATUS[0]}"], capture_output=True, timeout=100)
    assert done.returncode in (0, 141) and done.stderr.count(b"\n") <= 1  # 0: it was faster


def test_three_files_alone(path, samples, tmp_path):
    """qwen3_tts.py beside qwen3.py and tokenizer_utils.py: the sound that the library gives."""
    def run(*arguments, program="qwen3_tts.py"):
        done = subprocess.run([sys.executable, program, *arguments], cwd=tmp_path, text=True, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True)
        return done.returncode, done.stdout, done.stderr

    shutil.copy(ROOT / "tokenizer_utils.py", tmp_path)
    for name, words in (("qwen3.py", "need qwen3_5.py"), ("qwen3_tts.py", "use qwen3_tts.py")):
        shutil.copy(ROOT / name, tmp_path)
        status, _, err = run("--model", path, TEXT, program="qwen3.py")
        assert status == 1
        assert_one_line(err, words, "qwen3_tts.py")
    assert run("--model", path, "Good", "morning.", *SEED, "--out", "a.wav") == (0, "", "")
    assert np.array_equal(numbers_in(tmp_path / "a.wav"), as_numbers(samples))
    for arguments, words in (((path, "--voice", "nobody"), "one of serena"), ((ROOT / "demo",), "can't speak"),
                             ((path, "--language", "fr"), "one of auto"), ((tmp_path,), "no folder with config.json")):
        status, out, err = run("--model", *arguments, TEXT, "--out", "b.wav")
        assert (status, out, (tmp_path / "b.wav").exists()) == (1, "", False)
        assert_one_line(err, words)
    status, _, err = run("--model", path, TEXT, "--out", "none/a.wav")
    assert status == 1
    assert_one_line(err, "none/a.wav")
