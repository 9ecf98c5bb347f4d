"""Live dictation: what is settled when, where parts end, what comes through a pipe and stands on a terminal."""
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
import wave
from types import SimpleNamespace

import numpy as np
import pytest

import qwen3
import qwen3_asr
import qwen3_numba
from configs import ROOT, asr_config
from hearing import make_hearing, voice, wav_of
from helpers import assert_one_line, message_of, run_main
from qwen3_asr import RATE, transcribe
from qwen3_lib.app.terminal import ChangingEnd
from qwen3_lib.app.wrap import wrapped
from qwen3_lib.generation import dictation
from qwen3_lib.generation.dictation import Dictation
from qwen3_lib.io.sounds import STEP, STEPS_WAITING, Recording, live_sound, open_sound
from test_tiny_hearing import FOLDER, SPEECH, unseen


def steps_of(sound):
    return Recording(iter([sound[i:i + STEP] for i in range(0, len(sound), STEP)]), RATE)


def dictated(model, sound, **options):
    """The Dictation at its end; on the way, settled text never changes."""
    found, before = Dictation(model, steps_of(sound), **options), ""
    for _ in found:
        assert found.so_far.startswith(before)
        before = found.so_far
    return found


def raw(sound) -> bytes:
    return np.round(sound * 2**15).astype("<i2").tobytes()


def speech() -> np.ndarray:
    return np.concatenate([*open_sound(FOLDER / "speech.wav").blocks])


def sentences(n: int) -> np.ndarray:
    """Some of the sounds that tiny_hearing wasn't trained on, with a pause behind each."""
    return np.concatenate([np.pad(sound, (0, RATE)) for sound in unseen()[0][:n]]).astype(np.float32)


# ---- The text --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("engine", [qwen3.Engine, lambda: qwen3_numba.engine("int8")], ids=["NumPy", "int8"])
def test_its_text_is_that_of_the_sound_at_once(engine):
    """Of 40 sounds, and of a long one's parts: the model's answer depends on the steps in one of twenty at most."""
    model, same = qwen3.load_model(FOLDER, engine()), []
    for sound in unseen()[0]:
        same.append(dictated(model, sound.astype(np.float32)).so_far == str(transcribe(model, (sound, RATE))))
    found = dictated(model, long := sentences(30))
    for part in found.heard:
        alone = long[round(part.start * RATE):round(part.end * RATE)]
        [expected] = transcribe(model, (alone, RATE), longest_part=8).finish().parts
        same.append((part.text, part.language, part.n_tokens) == (expected.text, expected.language, expected.n_tokens))
    assert len(found.heard) > 10 and sum(same) >= 0.95 * len(same)
    assert [part.start for part in found.heard] == [0, *(part.end for part in found.heard[:-1])]
    assert found.heard[-1].end == pytest.approx(len(long) / RATE)


@pytest.mark.parametrize("options", [{"language": "en"}, {"context": "Lucy, twenty, orange"}], ids=str)
def test_a_language_and_a_context(options):
    assert dictated(qwen3.load_model(FOLDER), speech(), **options).so_far == SPEECH


def test_silence_has_no_text():
    found = dictated(qwen3.load_model(FOLDER), np.zeros(14 * RATE, np.float32))
    assert found.so_far == "" and found.heard[-1].end == 14 and {part.language for part in found.heard} == {""}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return qwen3.load_model(make_hearing(asr_config("0.6B"), tmp_path_factory.mktemp("hearing")))


@pytest.fixture
def say(random_model, monkeypatch):
    """A function that makes the model's answers begin so many of a text's tokens, and says how they end."""
    def say(text, lengths, ended):
        ids, n = random_model.tokenizer.encode(text, False), iter(lengths)

        class Said:
            def __init__(self, model, prompt, cache, options):
                self.token_ids, self.ended = [*ids[len(found.settled):next(n)]], next(ends)
                assert prompt[len(prompt) - len(found.settled):] == [*ids[:len(found.settled)]]

            def finish(self):
                return self

        ends = iter(ended)
        monkeypatch.setattr(dictation, "Completion", Said)
        found = Dictation(random_model, steps_of(voice(len(ended) * STEP - STEP)), longest_part=180)
        return found, ids

    return say


def test_the_last_five_tokens_and_two_steps_are_not_settled(say, random_model):
    """An answer that gets shorter, or that is cut off, takes nothing back."""
    text = "language English<asr_text>" + "".join(f" word {i}" for i in range(40))
    lengths = [12, 20, 30, 26, 40, 50, 60, 60]
    found, ids = say(text, lengths, ["stop"] * 4 + ["length", "loop", "stop", "stop"])
    steps = iter(found)
    settled = [len(found.settled) for _ in itertools.islice(steps, 7)]
    assert settled == [0, 15, 25, 25, 25, 25, 55]
    assert found.so_far == random_model.tokenizer.decode(ids[:55]).partition("<asr_text> ")[2].strip()
    assert len([*steps]) == 2 and found.heard[0].n_tokens == 60


def test_a_character_settles_as_a_whole(say, random_model):
    """Its bytes are several tokens."""
    text = "language Japanese<asr_text>" + "🦉é日" * 30
    found, ids = say(text, range(12, 100, 3), ["stop"] * 30)
    assert len(ids) > 150
    for end in found:
        assert text.startswith(random_model.tokenizer.decode(found.settled))
        assert text.partition("<asr_text>")[2].startswith(found.so_far)
    assert len(found.so_far) > 10


# ---- Parts -----------------------------------------------------------------------------------------------------------

def test_where_parts_end(random_model):
    """In a pause, else where it is quietest, and always in the last two seconds: what was settled before isn't behind
    it. Of an hour, no more than a part is in memory."""
    rng, lengths = np.random.default_rng(0), []
    loud = np.ones(1800 * STEP // 100, np.float32)
    for start in range(0, len(loud) // 2, 2300):  # a pause now and then
        loud[start:start + int(rng.integers(40))] = 0.001
    blocks = (rng.standard_normal(STEP).astype(np.float32) * loud[i * STEP // 100:(i + 1) * STEP // 100].repeat(100)
              for i in range(1800))
    found, total, heard = Dictation(random_model, Recording(blocks, RATE), longest_part=20), 0, 0
    tracemalloc.start()
    try:
        for samples, whole in found.cut():
            assert len(samples) >= heard - 1  # nothing that was heard as a part of this part is left to the next one
            heard = 0 if whole else len(samples)
            if whole:
                lengths.append(len(samples) / RATE)
                total += len(samples)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert total == 1800 * STEP and 13 <= min(lengths[:-1]) and max(lengths) <= 25
    assert len({round(each) for each in lengths}) > 5  # at pauses


@pytest.mark.parametrize("pause", [0, 17.1])
def test_a_part_ends_in_a_pause(random_model, pause):
    sound = np.random.default_rng(0).standard_normal(30 * RATE).astype(np.float32)
    sound[int(pause * RATE):int((pause + 0.3) * RATE)] *= 0.01
    part = next(samples for samples, whole in Dictation(random_model, steps_of(sound)).cut() if whole)
    assert 17.1 < len(part) / RATE < 17.4 if pause else 22 <= len(part) / RATE <= 24


def test_what_a_long_dictation_keeps():
    """The windows of a few steps, and the keys of one part."""
    model = qwen3.load_model(FOLDER)
    found = dictated(model, np.concatenate([sentences(10)] * 2))
    assert len(found.heard) > 6 and len(model.media.known) < 20


def test_no_samples(random_model):
    assert "no samples" in message_of(lambda: [*Dictation(random_model, steps_of(np.empty(0, np.float32)))])
    for wrong in (3.9, 1201, float("nan")):
        assert "longest_part" in message_of(Dictation, random_model, steps_of(voice(9_000)), longest_part=wrong)


# ---- Samples that come ----------------------------------------------------------------------------------------------

def samples_of(data: bytes) -> list[np.ndarray]:
    return [*live_sound(io.BytesIO(data)).blocks]


def test_samples_come_in_steps():
    """The bits of a file's; half a sample at the end is left out; a WAV file's header is no sound."""
    sound = raw(voice(5 * RATE))
    expected = np.frombuffer(sound, "<i2") / np.float32(2**15)
    file = wav_of(np.frombuffer(sound, "<i2")[:, None])
    endless, closed = file[:40] + b"\xff\xff\xff\xff" + sound, file + b"LIST\4\0\0\0mine"
    more = closed[:12] + b"LIST\5\0\0\0mine!\0" + closed[12:]
    for data in (sound, sound + b"\1", endless, closed, more):
        blocks = samples_of(data)
        assert [*map(len, blocks)] == [STEP, STEP, STEP // 2] and np.array_equal(np.concatenate(blocks), expected)
        assert blocks[0].dtype == np.float32
    assert samples_of(b"") == samples_of(b"\1") == [] and len(samples_of(b"ab")[0]) == 1


@pytest.mark.parametrize("data, words", [
    (wav_of(np.zeros((9, 2), "<i2"), 44_100), "2 channels, 44,100 samples of 16 bits a second"),
    (wav_of(np.zeros((9, 1), "u1")), "1 channel, 16,000 samples of 8 bits"),
    (wav_of(np.zeros((9, 1), "<i2"))[:30], "without its sound"), (wav_of(np.zeros((9, 1), "<i2"))[:12], "its sound")])
def test_wav_files_of_another_kind(data, words):
    assert words in message_of(samples_of, data)


def test_a_fast_pipe_waits():
    """A minute is read ahead."""
    class Endless:
        n, enough = 0, threading.Event()

        def read(self, n):
            self.n += n
            if self.n >= 2 * STEP * STEPS_WAITING:
                self.enough.set()
            return bytes(n)

    file = Endless()
    blocks = live_sound(file).blocks
    for i in range(1, 50):
        next(blocks)
        assert file.n <= 2 * STEP * (i + STEPS_WAITING + 2)
    assert file.enough.wait(30)


# ---- The command ----------------------------------------------------------------------------------------------------

def begin(*options, **popen) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "qwen3_asr.py"), "--model", str(FOLDER), "--live", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"TERM": "xterm"}, preexec_fn=lambda:
                            signal.signal(signal.SIGINT, signal.default_int_handler), **{
                                "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen)


@pytest.mark.parametrize("options", [(), ("--fast", "--language", "en")], ids=str)
def test_through_a_pipe(options):
    """Settled text comes while the sound still comes; the text is the same when all of it comes at once."""
    sound = raw(sentences(6))
    with begin(*options) as process:
        process.stdin.write(sound[:12 * 2 * RATE])
        process.stdin.flush()
        first = os.read(process.stdout.fileno(), 1000)
        process.stdin.write(sound[12 * 2 * RATE:])
        rest, said = process.communicate()
        assert (process.returncode, said) == (0, b"") and len(first) > 3 and len(rest) > 3
    with begin(*options, "--stats") as process:
        at_once, said = process.communicate(sound + b"\1")
        assert at_once == first + rest and b" steps, the longest " in said
    model = qwen3.load_model(FOLDER)
    assert at_once.decode() == dictated(model, np.frombuffer(sound, "<i2") / np.float32(2**15)).so_far + "\n"


def test_ctrl_c_leaves_what_is_settled():
    with begin() as process:
        process.stdin.write(raw(sentences(6)))
        process.stdin.flush()
        first = os.read(process.stdout.fileno(), 1000)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()  # the pipe is still open
        assert process.wait() == 130 and first and rest.endswith(b"\n")
        assert_one_line(process.stderr.read().decode(), "qwen3_asr.py: interrupted")


class Screen:
    """A terminal of so many columns, which obeys what ChangingEnd uses."""

    def __init__(self, width):
        self.width, self.rows, self.row, self.column = width, [""], 0, 0

    def show(self, text):
        for move, n, kind, c in re.findall(r"(\x1b\[(\d*)([A-Zm]))|([^\x1b])", text):
            if c == "\r":
                self.column = 0
            elif c == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row == len(self.rows))
            elif c:
                assert self.column < self.width
                self.rows[self.row] = self.rows[self.row][:self.column].ljust(self.column) + c
                self.column += 1
            elif kind == "A":
                self.row -= int(n)
            elif kind == "J":
                self.rows[self.row:] = [self.rows[self.row][:self.column]]


@pytest.mark.parametrize("width", [7, 12, 40])
def test_the_end_is_rewritten(monkeypatch, width):
    """The screen shows the text so far, broken between words, and the end behind it, whatever stood there before."""
    rng, screen, n = np.random.default_rng(width), Screen(width), 0
    text = " ".join("abcdef"[:n] for n in rng.integers(1, 7, 400))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(
        write=screen.show, flush=lambda: None, isatty=lambda: True, fileno=lambda: 1))
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((width, 9)))
    shown = ChangingEnd()
    for new, more in rng.integers(0, 20, (60, 2)):
        shown.show(text[n:n + new], text[n + new:n + new + more])
        n += new
        assert "\n".join(screen.rows).rstrip() == wrapped(text[:n + more], width).rstrip()


def test_on_a_terminal():
    """The last words change before they stay, and at last the text stands there."""
    pytest.importorskip("termios")
    sound, model = raw(sentences(6)), qwen3.load_model(FOLDER)
    text = dictated(model, np.frombuffer(sound, "<i2") / np.float32(2**15)).so_far
    master, slave = os.openpty()
    with begin("--language", "en", stdout=slave) as process:
        os.close(slave)
        threading.Thread(target=lambda: process.stdin.write(sound) and process.stdin.close()).start()
        seen = b""
        while more := read_terminal(master):
            seen += more
        assert process.wait() == 0
    os.close(master)
    frames, screen = seen.decode().replace("\r\n", "\n").split("\r\x1b[J"), Screen(80)
    assert len(frames) > 5 and "\x1b[2m" in frames[2]
    screen.show("\r\x1b[J".join(frames))
    assert " ".join(" ".join(screen.rows).split()) == text


def read_terminal(master: int) -> bytes:
    try:
        return os.read(master, 4096)
    except OSError:  # closed on the other side
        return b""


@pytest.mark.parametrize("options, status, words", [
    *(((option, *value), 2, f"--live does not go with {option}") for option, value in {
        "--json": (), "--words": (), "--timestamps": (), "--overwrite": (), "--format": ("srt",), "--out": ("a.txt",),
        "--aligner": ("x",)}.items()),
    (("a.wav",), 2, "--live hears stdin, and takes no other sound"),
    (("--part", "3"), 1, "--part must be a number from 4 to 1200"),
    (("--language", "Klingon"), 1, "klingon"), (("--max-tokens", "0"), 1, "--max-tokens")], ids=str)
def test_what_is_refused(capfd, options, status, words):
    found, out, err = run_main(capfd, "--model", FOLDER, "--live", *options, main=qwen3_asr.main)
    assert (found, out) == (status, "")
    assert_one_line(err, words)


def test_sounds_that_are_refused(capfd):
    """A terminal, at which nobody pipes; a WAV file of another kind; nothing."""
    two = io.BytesIO()
    with wave.open(two, "wb") as file:
        file.setparams((2, 2, 44_100, 0, "NONE", ""))
        file.writeframes(bytes(400))
    for stdin, words in ((None, "arecord -q -f S16_LE -r 16000 |"), (two.getvalue(), "2 channels, 44,100"),
                         (b"", "the sound has no samples")):
        status, out, err = run_main(capfd, "--model", FOLDER, "--live", stdin=stdin, main=qwen3_asr.main)
        assert (status, out) == (1, "")
        assert_one_line(err, words)
