"""Sounds in files, and long ones: what is read, what is refused, where they are cut; and the command line."""
import json
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

import qwen3
import qwen3_asr
from configs import ROOT, asr_config
from hearing import make_hearing, voice, wav_of
from helpers import assert_one_line, message_of, run_main, works_or_refused
from qwen3_asr import transcribe
from qwen3_lib.app import speech
from qwen3_lib.app.subtitles import cues
from qwen3_lib.generation.aligner import timed_words
from qwen3_lib.generation.processors import StopLoops
from qwen3_lib.generation.transcript import Part, joined_text, parts_in, quietest
from qwen3_lib.io.sounds import open_sound

VOICE = voice(30_000)
ZEROS = wav_of(np.zeros((99, 1), "<i2"))
needs_soundfile = pytest.mark.skipif(None in map(find_spec, ("soundfile", "soxr")), reason="needs soundfile and soxr")
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")


def samples_of(source) -> np.ndarray:
    return np.concatenate([*open_sound(source).blocks])


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("numbers, encoding, step", [
    (np.round(VOICE * 2**7 + 2**7).astype("u1"), 1, 2**-7), (np.round(VOICE * 2**15).astype("<i2"), 1, 2**-15),
    (np.round(VOICE * 2**31).astype("<i4"), 1, 2**-24), (VOICE.astype("<f4"), 3, 1e-9), (VOICE.astype("<f8"), 3, 1e-9),
    (np.round(VOICE * 2**23).astype("<i4").view("u1").reshape(-1, 4)[:, :3], 1, 2**-23)],
    ids=["8", "16", "32", "float", "double", "24"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_wav(numbers, encoding, step, channels, tmp_path):
    """Bits and floats, the mean of the channels; a path, its text, bytes."""
    silence = np.full_like(numbers, 2**7 if numbers.dtype == np.uint8 and numbers.ndim == 1 else 0)
    data = wav_of(np.stack([numbers, numbers, silence][:channels], axis=1), encoding=encoding)
    (tmp_path / "a.wav").write_bytes(data)
    for source in (data, tmp_path / "a.wav", str(tmp_path / "a.wav")):
        found = samples_of(source)
        assert found.dtype == np.float32
        assert np.abs(found - VOICE * (2 / 3 if channels == 3 else 1)).max() <= step / 2 + 1e-7


def test_wav_with_other_chunks_and_the_long_form():
    """A chunk of odd length before the sound, one behind it; the encoding in a WAVE_FORMAT_EXTENSIBLE; a length that a
    pipe didn't know."""
    numbers = np.round(VOICE * 2**15).astype("<i2")[:, None]
    plain = wav_of(numbers)
    form = plain[20:36].replace(b"\x01\0", b"\xfe\xff", 1) + b"\x16\0\x10\0\0\0\0\0" + b"\x01\0" + bytes(14)
    long = plain[:12] + b"LIST\x03\0\0\0abc\0" + b"fmt \x28\0\0\0" + form + plain[36:]
    for data in (long, long + b"LIST\x02\0\0\0ab", plain[:40] + b"\xff" * 4 + plain[44:]):
        assert np.array_equal(samples_of(data), numbers[:, 0].astype(np.float32) / 2**15)


@pytest.mark.parametrize("source, words", [
    ("none.wav", "no such file"), (".", "is a folder"), ("https://example.org/a.mp3", "download the sound"),
    (b"", "the file is empty"), ("", "no such file"), (5, "not 5"), (None, "not None"),
    (VOICE, "must be a path"), ((VOICE, 0), "samples"), ((VOICE[:, None], 16_000), "samples"),
    ((VOICE.astype(int), 16_000), "samples"), ((VOICE[:0], 16_000), "no samples"), ((VOICE, 10), "10 samples a second"),
    (wav_of(np.zeros((0, 1), "<i2")), "no samples"), (ZEROS[:22] + bytes(2) + ZEROS[24:], "0 channels"),
    (ZEROS[:24] + bytes(4) + ZEROS[28:], "0 samples a second"), (wav_of(np.zeros((2, 99), "<i2")), "99 channels"),
    (ZEROS[:-10], "promises 198 bytes of sound, and 188"), (ZEROS[:38], "without its sound"),
    (ZEROS[:12] + ZEROS[36:], "without its format"), (ZEROS[:40] + b"\xfe\xff\xff\xff", "4,294,967,294 bytes")],
    ids=lambda each: each if isinstance(each, str) else "")
def test_refusals(source, words):
    assert words in message_of(open_sound, source)


def test_samples_that_are_no_numbers():
    for wrong in (np.nan, np.inf):
        samples = voice(300_000)
        samples[200_000] = wrong
        assert "finite" in message_of(lambda: [*parts_in(open_sound((samples, 16_000)).blocks)])


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    monkeypatch.setenv("PATH", "")
    for source, needs in ((b"fLaC" + bytes(100), ("ffmpeg", "soundfile soxr")), ((VOICE, 44_100), ("soxr", "ffmpeg")),
                          (wav_of(np.zeros((99, 1), "<i2"), 44_100), ("soxr", "the program ffmpeg"))):
        assert_one_line(message_of(open_sound, source), *needs)


def test_damaged_wav_files(monkeypatch):
    """1,000 of them: read, or refused in one line."""
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    monkeypatch.setenv("PATH", "")
    rng, whole = random.Random(0), wav_of(np.round(VOICE[:200] * 2**15).astype("<i2")[:, None])
    for _ in range(1000 * int(os.environ.get("FUZZ", 1))):
        data = bytearray(whole[:rng.randrange(len(whole)) if rng.random() < 0.2 else None])
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(min(len(data), 50) or 1)
            other = rng.choice([bytes(4), b"\xff" * 4, rng.randbytes(rng.randint(0, 5))])
            data[place:place + rng.randint(0, 4)] = other
        works_or_refused(samples_of, bytes(data))


@needs_soundfile
@pytest.mark.parametrize("form, encoding, off", [("FLAC", "PCM_24", 1e-6), ("OGG", "VORBIS", 0.05), ("MP3", None, 0.06),
                                                 ("WAV", "ULAW", 0.01), ("AIFF", "PCM_16", 1e-4)])
def test_files_of_soundfile(form, encoding, off, tmp_path):
    import soundfile
    soundfile.write(tmp_path / "a", VOICE, 16_000, format=form, subtype=encoding)
    for source in (tmp_path / "a", (tmp_path / "a").read_bytes()):
        sound = open_sound(source)
        assert sound.seconds == pytest.approx(len(VOICE) / 16_000, abs=0.1)
        found = np.concatenate([*sound.blocks])[:len(VOICE)]
        assert np.abs(found - VOICE[:len(found)]).max() < off
    if form == "FLAC":
        assert "cannot be read" in message_of(samples_of, (tmp_path / "a").read_bytes()[:20_000])


@needs_soundfile
@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_rates(rate):
    """In blocks as at once, which is what librosa does for Qwen's package."""
    import soxr
    sound = voice(200_000)
    assert np.abs(samples_of((sound, rate)) - soxr.resample(sound, rate, 16_000)).max() < 1e-6


@needs_ffmpeg
@pytest.mark.parametrize("name", ["a.m4a", "a.mp4", "a.webm", "a.mkv"])
def test_files_of_ffmpeg(name, tmp_path):
    (tmp_path / "a.wav").write_bytes(wav_of(VOICE[:, None], encoding=3))
    subprocess.run(["ffmpeg", "-v", "error", "-i", tmp_path / "a.wav", tmp_path / name], check=True)
    for source in (tmp_path / name, (tmp_path / name).read_bytes()):
        found = samples_of(source)
        assert abs(len(found) - len(VOICE)) < 2_000 and np.corrcoef(found[:20_000], VOICE[:20_000])[0, 1] > 0.98
    next(blocks := open_sound(tmp_path / name).blocks)
    blocks.close()  # ends the process


@needs_ffmpeg
@pytest.mark.parametrize("form, encoding", [("WAV", "PCM_16"), ("MP3", None)])
def test_without_soxr_ffmpeg_changes_the_rate(form, encoding, tmp_path, monkeypatch):
    """Of all files; as well as soxr does it."""
    soundfile = pytest.importorskip("soundfile")
    t, file = np.arange(44_100) / 44_100, tmp_path / f"a.{form.lower()}"
    soundfile.write(file, 0.5 * np.sin(2 * np.pi * 440 * t), 44_100, format=form, subtype=encoding)
    expected, given = samples_of(file), file.read_bytes()
    for name in ("soxr", "soundfile"):
        monkeypatch.setitem(sys.modules, name, None)
        for source in (file, given):
            found = samples_of(source)
            assert abs(len(found) - len(expected)) < 2000  # an MP3 begins with silence, which ffmpeg leaves out
            assert np.isclose(np.abs(np.fft.rfft(found, 16_000)).argmax(), 440, atol=1)
            assert np.isclose(np.std(found[4000:12_000]), np.std(expected[4000:12_000]), rtol=0.01)


@needs_ffmpeg
def test_a_video_without_sound(tmp_path):
    command = "ffmpeg -v error -f lavfi -i color=red:s=64x64:d=1 -y".split()
    subprocess.run([*command, tmp_path / "a.mp4"], check=True)
    message = message_of(lambda: [*open_sound(tmp_path / "a.mp4").blocks])
    assert message == f"{tmp_path / 'a.mp4'}: there is no sound in it"


@needs_ffmpeg
def test_a_playlist_opens_no_other_file(tmp_path):
    (tmp_path / "a.wav").write_bytes(wav_of(VOICE[:, None], encoding=3))
    for name, text in (("a.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\na.wav\n#EXT-X-ENDLIST\n"),
                       ("a.ffconcat", "ffconcat version 1.0\nfile a.wav\n")):
        (tmp_path / name).write_text(text)
        assert "cannot be read by ffmpeg" in message_of(samples_of, tmp_path / name)


# ----------------------------------------------------------------------------------------------------------------------
# Long sounds
# ----------------------------------------------------------------------------------------------------------------------

def test_the_quietest_place():
    """By the definition, step by step, which is that of Qwen's package."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        samples = (rng.standard_normal(60_000) * rng.random(60_000 // 100).repeat(100)).astype(np.float32)
        levels = np.abs(samples[20_000:40_000]).astype(float)
        first = min(range(20_000 - 1_600 + 1), key=lambda i: levels[i:i + 1_600].sum())
        assert quietest(samples, 30_000, 10_000) == 20_000 + first + levels[first:first + 1_600].argmin()


@pytest.mark.parametrize("seconds, longest", [(3, 180), (25, 10), (25, 3), (25, 25), (25.1, 25)])
def test_parts_join_to_the_sound(seconds, longest):
    """Whatever the blocks are; a part is as long as it may be, give or take 5 seconds."""
    sound = voice(int(16_000 * seconds))
    for n in (1_000, 65_536, len(sound)):
        parts = [*parts_in((sound[i:i + n] for i in range(0, len(sound), n)), longest)]
        around = min(5, longest / 2)
        assert np.array_equal(np.concatenate(parts), sound)
        assert all(longest - around <= len(part) / 16_000 <= longest + around for part in parts[:-1])
        assert len(parts) == (1 if seconds <= longest else len(parts)) and len(parts[-1]) <= longest * 16_000


def test_an_hour_takes_little_memory(tmp_path):
    file = tmp_path / "hour.wav"
    head = wav_of(np.zeros((1, 1), "<i2"))[:40] + (2 * 16_000 * 3600).to_bytes(4, "little")
    file.write_bytes(head)
    os.truncate(file, len(head) + 2 * 16_000 * 3600)
    tracemalloc.start()
    try:
        assert sum(map(len, parts_in(open_sound(file).blocks))) == 16_000 * 3600
        assert tracemalloc.get_traced_memory()[1] < 2**26  # as float32, the hour has 230 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("language, text", [("English", "one two"), ("Chinese", "onetwo"), ("", "one two")])
def test_a_space_between_parts_where_the_language_has_spaces(language, text):
    parts = [Part(0, 1, each, language, "stop", 1) for each in ("", "one", "", "two", "")]
    assert joined_text(parts) == text


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_hearing(asr_config("0.6B"), tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def model(path):
    return qwen3.load_model(path)


@pytest.fixture(scope="module")
def aligner_path(tmp_path_factory):
    return make_hearing(asr_config("0.6B", n_classes=60), tmp_path_factory.mktemp("aligner"))


@pytest.fixture
def sound(tmp_path):
    """A file with 40 seconds of a voice."""
    (tmp_path / "voice.wav").write_bytes(wav_of(np.round(voice(640_000) * 2**15).astype("<i2")[:, None]))
    return tmp_path / "voice.wav"


def test_a_transcript(model, sound):
    """Its pieces are its text; its parts are those of sounds by themselves."""
    found = transcribe(model, sound, "en", "Ada", max_tokens=5, longest_part=15)
    pieces = [*found]
    assert "".join(pieces) == found.text == str(found) == joined_text(found.parts) and len(pieces) > 3
    assert (found.language, found.seconds) == ("English", 40.0)
    samples = samples_of(sound)
    for part in found.parts:
        alone = transcribe(model, (samples[round(part.start * 16_000):round(part.end * 16_000)], 16_000), "en", "Ada",
                           max_tokens=5)
        assert (alone.text, part.finish_reason, part.n_tokens) == (part.text, "length", 5)
    assert [part.end for part in found.parts] == [*[part.start for part in found.parts[1:]], 40.0]


def test_words_have_times(model, aligner_path, sound):
    """Within their part, and those of the part by itself; they join to its text."""
    aligner = qwen3.load_model(aligner_path)
    found = transcribe(model, sound, "en", words=aligner, max_tokens=12, longest_part=15)
    samples = samples_of(sound)
    for part in found.parts:
        assert "".join(word.text for word in part.words) == part.text != ""
        times = [time for word in part.words for time in (word.start, word.end)]
        assert times == sorted(times) and part.start - 0.001 <= times[0] and times[-1] < part.start + 60 * 0.08
        alone = samples[round(part.start * 16_000):round(part.end * 16_000)]
        alone = timed_words(aligner, alone, part.text, "English")
        assert [round(word.start + part.start, 3) for word in alone] == [word.start for word in part.words]


def test_words_that_have_no_times(model, aligner_path):
    aligner = qwen3.load_model(aligner_path)
    for words, options, said in ((True, {}, "must be the model of a forced aligner"), (model, {}, "no forced aligner"),
                                 (aligner, {"language": "ja"}, "timed in Japanese"),
                                 (aligner, {"language": "Korean"}, "timed in Korean"),
                                 (aligner, {"language": "Thai"}, "only in Chinese, English"),
                                 (aligner, {"longest_part": 300}, "longest_part")):
        assert said in message_of(transcribe, model, (VOICE, 16_000), words=words, **options)
    assert "no answers" in message_of(lambda: transcribe(aligner, (VOICE, 16_000)).finish())


@pytest.mark.parametrize("gain", [10, 1, 1 / 30])
def test_loud_samples_are_divided_by_their_peak(model, aligner_path, monkeypatch, gain):
    """For the text and for the times of its words, in each part; quiet ones stay."""
    aligner, heard, real = qwen3.load_model(aligner_path), [], qwen3_asr.log_mel
    monkeypatch.setattr(qwen3_asr, "log_mel", lambda samples, *more: heard.append(samples) or real(samples, *more))
    samples = voice(40_000, 9) * np.float32(gain)
    found = transcribe(model, (samples, 16_000), "en", words=aligner, max_tokens=12, longest_part=1).parts
    expected = []
    for i, part in enumerate(found):
        alone = samples[round(part.start * 16_000):round(part.end * 16_000)]
        expected.append(alone / max(1, np.abs(alone).max()))
        assert all(np.array_equal(each[:len(alone)], expected[i]) for each in heard[2 * i:2 * i + 2])
        times = timed_words(aligner, expected[i], part.text, "English", part.start)
        assert times == part.words == timed_words(aligner, alone, part.text, "English", part.start) != ()
    assert len(expected) > 1


def test_samples_in_int16_are_those_of_a_file(model):
    """32,768 is 1: from the lowest to the highest."""
    numbers = np.concatenate([[-2**15, 2**15 - 1], np.round(VOICE * 2**15)]).astype(np.int16)
    assert np.array_equal(samples_of((numbers, 16_000)), samples_of(wav_of(numbers[:, None])))
    assert samples_of((numbers, 16_000)).dtype == np.float32 and samples_of((numbers, 16_000))[0] == -1
    assert transcribe(model, (numbers, 16_000), max_tokens=5).text == transcribe(
        model, (numbers / 2**15, 16_000), max_tokens=5).text != ""


def test_a_notebook_shows_the_text(model):
    """By IPython's own protocol; at a plain prompt nothing is computed."""
    found = transcribe(model, (VOICE, 16_000), max_tokens=5)
    assert repr(found).startswith("<Transcript, so far '': ") and found.heard == []
    shown = SimpleNamespace(text=lambda text: shown.__setattr__("found", text))
    found._repr_pretty_(shown, False)
    assert shown.found == found.text == str(found) != "" and repr(found.text) in repr(found)


def test_names_of_languages():
    names = {None: "", "": "", "auto": "", "Auto": "", "de": "German", "GERMAN": "German", "en-US": "English",
             "pt_BR": "Portuguese", " yue ": "Cantonese", "zh-Hans-CN": "Chinese", "mk": "Macedonian", "FIL": "Filipino"}
    assert {name: qwen3_asr.language_named(name) for name in names} == names
    for wrong in ("xx", "auto en", "-", "e n"):
        assert repr(wrong) in message_of(qwen3_asr.language_named, wrong)


@pytest.mark.parametrize("options, words", [
    ({"language": "Klingon"}, "'Klingon' is none of Chinese, English"), ({"longest_part": 0}, "longest_part"),
    ({"max_tokens": 0}, "max_tokens"), ({"temprature": 1}, "temprature is none of"),
    ({"context": "a " * 9000}, "context")])
def test_options_that_are_refused(model, options, words):
    assert words in message_of(lambda: transcribe(model, (VOICE, 16_000), **options).finish())
