"""Sounds in files: what is read, what is refused."""
import io
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from hearing import voice, wav_of
from helpers import assert_one_line, message_of, works_or_refused
from qwen3_lib.io.sounds import Recording, open_sound, read_wav, resampled
from test_transcript import samples_of

VOICE = voice(30_000)
ZEROS = wav_of(np.zeros((99, 1), "<i2"))
needs_soundfile = pytest.mark.skipif(None in map(find_spec, ("soundfile", "soxr")), reason="needs soundfile and soxr")
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")


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
    assert read_wav(io.BytesIO(data), "") is not None  # it needs no other reader
    for source in (data, tmp_path / "a.wav", str(tmp_path / "a.wav")):
        found = samples_of(source)
        assert found.dtype == np.float32
        assert np.abs(found - VOICE * (2 / 3 if channels == 3 else 1)).max() <= step / 2 + 1e-7


def test_wav_with_other_chunks_and_the_long_form():
    """A chunk of odd length before the sound, one behind it; the encoding in a WAVE_FORMAT_EXTENSIBLE; a length that a
    pipe didn't know."""
    numbers = np.round(voice(150_000) * 2**15).astype("<i2")[:, None]  # in three blocks
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
    (ZEROS[:12] + ZEROS[36:], "without its format"), (ZEROS[:40] + b"\xfe\xff\xff\xff", "4,294,967,294 bytes"),
    (ZEROS[:36] + b"none\0\0\0\0" * 1000 + ZEROS[36:], "more than 1,000 chunks")],
    ids=lambda each: each if isinstance(each, str) else "")
def test_refusals(source, words):
    assert words in message_of(open_sound, source)


@pytest.mark.parametrize("n, works", [(1, True), (64, True), (65, False)])
def test_channels(n, works):
    """Up to 64, each a part of their mean."""
    numbers = np.random.default_rng(n).integers(-2**15, 2**15, (999, n)).astype("<i2")
    if works:
        assert np.abs(samples_of(wav_of(numbers)) - numbers.mean(axis=1) / 2**15).max() < 1e-6
    else:
        assert f"{n} channels" in message_of(open_sound, wav_of(numbers))


@pytest.mark.parametrize("rate, works", [(999, False), (1_000, True), (1_000_000, True), (1_000_001, False)])
@needs_soundfile
def test_the_lowest_and_the_highest_rate(rate, works):
    for source in ((VOICE, rate), wav_of(VOICE[:, None], rate, 3)):
        if works:
            sound = open_sound(source)
            assert (sound.rate, sound.seconds) == (16_000, len(VOICE) / rate)
        else:
            assert f"{rate:,} samples a second" in message_of(open_sound, source)


@pytest.mark.parametrize("channels, bits, width", [(1, 24, 4), (2, 16, 2), (1, 16, 4), (2, 24, 8), (1, 8, 2)])
def test_wav_whose_numbers_lie_apart_is_not_read_here(channels, bits, width):
    """Such as 24 bits in 32: another reader may know how."""
    data = wav_of(np.zeros((100, channels), "<i2"))
    odd = data[:32] + width.to_bytes(2, "little") + bits.to_bytes(2, "little") + data[36:]
    assert read_wav(io.BytesIO(odd), "") is None and read_wav(io.BytesIO(data), "") is not None


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setenv("PATH", "")
    assert_one_line(message_of(open_sound, b"fLaC" + bytes(100)), "ffmpeg", "pip install soundfile")


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
@pytest.mark.parametrize("n", [2, 5])
def test_channels_of_other_files(n, tmp_path):
    """FLAC with another sound in each; too many are refused."""
    import soundfile
    numbers = np.stack([voice(9_000, seed) for seed in range(n)], axis=1)
    soundfile.write(tmp_path / "a", numbers, 16_000, format="FLAC", subtype="PCM_24")
    assert np.abs(samples_of(tmp_path / "a") - numbers.mean(axis=1)).max() < 1e-6
    for many, works in ((64, True), (65, False)):
        soundfile.write(tmp_path / "b", np.zeros((99, many)), 16_000, format="AIFF", subtype="PCM_16")
        if works:
            assert len(samples_of(tmp_path / "b")) == 99
        else:
            assert "65 channels" in message_of(open_sound, tmp_path / "b")


@needs_soundfile
def test_files_in_which_soundfile_cant_seek(tmp_path, monkeypatch):
    """XI; a FLAC from a pipe, which doesn't say how long it is, is ffmpeg's."""
    import soundfile
    soundfile.write(tmp_path / "a.xi", VOICE, 44_100, format="XI", subtype="DPCM_16")
    assert np.abs(samples_of(tmp_path / "a.xi") - samples_of((VOICE, 44_100))).max() < 1e-3
    soundfile.write(tmp_path / "a.flac", VOICE, 16_000)
    data = bytearray((tmp_path / "a.flac").read_bytes())
    data[21:26] = data[21] & 0xf0, 0, 0, 0, 0  # 36 bits: how many samples
    if shutil.which("ffmpeg") is not None:
        assert np.array_equal(samples_of(bytes(data)), samples_of(tmp_path / "a.flac"))
    monkeypatch.setenv("PATH", "")
    assert "doesn't say how long it is" in message_of(samples_of, bytes(data))


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


@pytest.mark.parametrize("given, rate", [(8_000, 16_000), (24_000, 16_000), (44_100, 16_000), (48_000, 24_000),
                                         (1_000_000, 16_000), (1_001, 24_000)])
def test_another_rate_without_soxr(given, rate, monkeypatch):
    """Tones in the middle of a sound, as the formula gives them; none above half of the lower rate; in any blocks."""
    monkeypatch.setitem(sys.modules, "soxr", None)
    n, half = max(given // 2, 2_000), min(given, rate) / 2

    def tone(frequency, n, rate):
        return 0.5 * np.sin(2 * np.pi * frequency * np.arange(n) / rate + 1)

    for share in (0.02, 0.3, 0.85, *[1.2] * (rate < given)):
        sound = tone(share * half, n, given).astype(np.float32)
        found = np.concatenate([*open_sound((sound, given), rate).blocks])
        assert len(found) == -(-n * rate // given) and found.dtype == np.float32
        error = (found - tone(share * half, len(found), rate) * (share < 1))[len(found) // 4:-len(found) // 4]
        assert np.abs(error).max() < 2e-3
    cuts = np.sort(np.random.default_rng(0).integers(0, n, 9))
    parts = Recording(iter(np.split(sound, cuts)), given)
    assert np.array_equal(np.concatenate([*resampled(parts, rate).blocks]), found)


@needs_soundfile
def test_without_soxr_as_with_it(monkeypatch):
    """A voice, to two thousandths."""
    expected = samples_of((VOICE, 24_000))
    monkeypatch.setitem(sys.modules, "soxr", None)
    found = samples_of((VOICE, 24_000))
    assert len(found) == len(expected) and np.abs(found - expected)[200:-200].max() < 2e-3


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
