"""Sounds in files, bytes and arrays -> samples of one channel, 16,000 a second or another rate.

They come in blocks: any length in little memory. A file is read by the first that can: this file reads WAV; soundfile
FLAC, OGG, MP3 and more; ffmpeg all else. soxr changes the rate; if it is absent, this file does.
"""
from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import queue
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen3_asr import RATE
from qwen3_lib.io.errors import InputError, brief, counted, is_whole
from tokenizer_utils import library_errors

# A WAV file's encoding and bits -> the type of a number, and the number that becomes 1; 24 bits are widened to 32.
WAV_NUMBERS = {(1, 8): ("u1", 2**7), (1, 16): ("<i2", 2**15), (1, 24): ("<i4", 2**31), (1, 32): ("<i4", 2**31),
               (3, 32): ("<f4", 1), (3, 64): ("<f8", 1)}
BLOCK_SAMPLES = 2**16  # of all channels, that are read together
MOST_CHUNKS = 1000  # of a WAV file before its sound
RATES = range(1_000, 1_000_001)  # samples a second
MOST_CHANNELS = 64
STEP, STEPS_WAITING = 2 * RATE, 30  # samples of a live sound that are heard at a time; a minute of them may wait
ENDLESS = 0x7FFF0000  # bytes: recorders that don't know how long a sound will be write such lengths
# Formats that ffmpeg may find. Others (playlists) name further files and addresses, which it would open.
FFMPEG_FORMATS = ("aac,ac3,aiff,amr,asf,avi,caf,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,"
                  "w64,wav")


@dataclass
class Recording:
    """A sound, read once from its begin to its end: blocks of float32 samples [n], `rate` a second."""
    blocks: Iterator[np.ndarray]
    rate: int
    seconds: float | None = None  # None: only the end will tell


def open_sound(source: Any, rate: int = RATE) -> Recording:
    """The sound in a file, in its bytes, or (samples [n], their rate) -> the mean of its channels, `rate` a second.

    A file is its path, or open, with a fileno. Samples are floats from -1 to 1, or int16, which 32,768 divides. A
    Recording, which is open already, stays as it is.

    Raises InputError for what can't be read, most of it at once, damage inside a file while its blocks are read.
    """
    where = brief(source) if isinstance(source, str | Path) else "the sound"
    if isinstance(source, Recording):
        return source
    if isinstance(source, tuple) and len(source) == 2:
        samples, given = source
        if not is_whole(given, 1) or not isinstance(samples, np.ndarray) or samples.ndim != 1 \
                or samples.dtype.kind != "f" and samples.dtype != np.int16:
            raise InputError("a sound in memory must be (samples [n] in floats or int16, how many a second), not "
                             f"{brief(repr(source), 80)}")
        one = np.float32(1 if samples.dtype.kind == "f" else 2**15)
        sound = Recording(iter([samples.astype(np.float32) / one]), int(given), len(samples) / given)
    elif isinstance(source, str | Path | bytes | io.IOBase):
        if isinstance(source, str | Path) and not os.path.isfile(source):
            reason = "is a folder" if os.path.isdir(source) else "no such file"
            reason = "an address is not opened; download the sound" if "://" in str(source) else reason
            raise InputError(f"{where or repr('')}: {reason}")
        with library_errors(f"{where}: cannot be read"):
            file: Any = io.BytesIO(source) if isinstance(source, bytes) else \
                open(source, "rb") if isinstance(source, str | Path) else source
        sound = read_wav(file, where) or read_other(file, source, where, rate)
    else:
        raise InputError(f"a sound must be a path, bytes, or (samples, rate), not {brief(repr(source), 80)}")
    if sound.seconds == 0:
        raise InputError(f"{where}: it has no samples")
    if sound.rate not in RATES:
        raise InputError(f"{where}: {sound.rate:,} samples a second; {RATES[0]:,} to {RATES[-1]:,} can be read")
    if sound.rate == rate:
        return sound
    return resampled(sound, rate)


def mono(numbers: np.ndarray) -> np.ndarray:
    """Numbers [n, channels] -> the mean of the channels, float32 [n]."""
    return numbers.mean(axis=1, dtype=np.float64).astype(np.float32)


def read_wav(file: BinaryIO, where: str) -> Recording | None:
    """The sound in a WAV file; None for other files, and for encodings that WAV_NUMBERS lacks.

    Raises InputError for a damaged file.
    """
    head, size, place, form = file.read(12), file.seek(0, 2), 12, b""
    if head[:4] + head[8:] != b"RIFFWAVE":
        return None
    for _ in range(MOST_CHUNKS):  # a name, a length, and so many bytes
        file.seek(place)
        about = file.read(8)
        name, length, place = about[:4], int.from_bytes(about[4:], "little"), place + 8
        if name == b"data" or len(about) < 8:
            break
        form = file.read(min(length, 40)) if name == b"fmt " else form
        place += length + length % 2
    else:
        raise InputError(f"{where}: a WAV file with more than {MOST_CHUNKS:,} chunks before its sound")
    if len(about) < 8 or len(form) < 16:
        raise InputError(f"{where}: a damaged WAV file, without its {'format' if len(about) == 8 else 'sound'}")
    encoding, channels, rate, _, width, bits = struct.unpack("<HHIIHH", form[:16])
    if encoding == 0xFFFE:  # "extensible": the encoding stands further behind
        encoding = int.from_bytes(form[24:26], "little")
    if not 0 < channels <= MOST_CHANNELS or not rate:
        raise InputError(f"{where}: {channels} channels, {rate:,} samples a second can't be read")
    if (encoding, bits) not in WAV_NUMBERS or width != channels * bits // 8:
        return None
    if length == 2**32 - 1:  # written into a pipe, by a program that didn't know the length
        length = size - place
    if length > size - place:
        raise InputError(f"{where}: cut short: its header promises {length:,} bytes of sound, and {size - place:,} "
                         "are there")
    (kind, one), n, step = WAV_NUMBERS[encoding, bits], length // width, BLOCK_SAMPLES // channels

    def blocks() -> Iterator[np.ndarray]:
        with file:
            file.seek(place)
            for start in range(0, n, step):
                data = file.read(min(step, n - start) * width)
                if bits == 24:  # as the upper bytes of 32
                    data = np.pad(np.frombuffer(data, np.uint8).reshape(-1, 3), ((0, 0), (1, 0))).tobytes()
                numbers = np.frombuffer(data, kind).reshape(-1, channels)
                yield mono((numbers - float(one * (bits == 8))) / one)

    return Recording(blocks(), rate, n / rate)


def live_sound(file: Any) -> Recording:
    """Samples of 16 bits, RATE a second, in blocks of STEP as they come, the last one shorter.

    A thread reads them, so that a recorder doesn't wait while a block is heard: of a sound that comes faster, a minute
    waits here, and the rest in the pipe. The header of a WAV file may stand before the samples. Half a sample at the
    end is left out. Raises InputError for other WAV files and for what can't be read, while the blocks are read.
    """
    blocks: queue.Queue[bytes | Exception] = queue.Queue(STEPS_WAITING)

    def read(n: int) -> bytes:
        """The next n bytes; fewer at the end."""
        data = b""
        while more := file.read(n - len(data)):
            data += more
        return data

    def fill() -> None:
        try:
            data, left = read(12), math.inf
            if data[:4] + data[8:] == b"RIFFWAVE":
                data, left = b"", wav_length(read)
            while data := data + read(int(min(2 * STEP - len(data), left))):
                blocks.put(data)
                data, left = b"", left - len(data)
        except (InputError, OSError) as error:
            blocks.put(error)
        blocks.put(b"")

    threading.Thread(target=fill, daemon=True).start()

    def arrived() -> Iterator[np.ndarray]:
        while data := blocks.get():
            if isinstance(data, Exception):
                raise InputError(f"stdin: {data}") from data
            if len(data) > 1:
                yield np.frombuffer(data[:len(data) // 2 * 2], "<i2") / np.float32(2**15)

    return Recording(arrived(), RATE)


def wav_length(read: Callable[[int], bytes]) -> float:
    """The bytes of sound behind a WAV file's header, which was read up to WAVE. Raises InputError for other samples."""
    for _ in range(MOST_CHUNKS):
        name, length = struct.unpack("<4sI", read(8).ljust(8, b"\0"))
        if name == b"data":
            return math.inf if length >= ENDLESS else length
        form = read(min(length + length % 2, 2**16))
        if name == b"fmt " and len(form) >= 16:
            _, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
            if (channels, rate, bits) != (1, RATE, 16):
                raise InputError(f"{counted(channels, 'channel')}, {rate:,} samples of {bits} bits a second; a live "
                                 f"sound needs 1 channel and {RATE:,} samples of 16 bits: arecord -f S16_LE -r {RATE}")
    raise InputError("a WAV file without its sound")


def read_other(file: BinaryIO, source: str | Path | bytes | io.IOBase, where: str, rate: int) -> Recording:
    """The sound in a file but WAV, by soundfile or else by ffmpeg. Raises InputError where neither can."""
    if not file.seek(0, 2):
        raise InputError(f"{where}: the file is empty")
    reason = "FLAC, OGG and MP3 need that, or: pip install soundfile"
    with contextlib.suppress(ImportError):
        import soundfile
        file.seek(0)
        try:
            sound = soundfile.SoundFile(file)
            if sound.channels > MOST_CHANNELS:
                raise InputError(f"{where}: {sound.channels} channels can't be read")
            if sound.frames < 2**62:
                return Recording(soundfile_blocks(sound, where), sound.samplerate, sound.frames / sound.samplerate)
            reason = "soundfile can't, because the file doesn't say how long it is"  # a FLAC from a pipe
        except soundfile.LibsndfileError as error:
            reason = f"soundfile says: {brief(error.error_string)}"
    if shutil.which("ffmpeg") is None:
        raise InputError(f"{where}: only the program ffmpeg can read it, and there is none in the PATH ({reason})")
    return Recording(ffmpeg_blocks(file, source, where, rate), rate)


def soundfile_blocks(sound: Any, where: str) -> Iterator[np.ndarray]:
    with library_errors(f"{where}: cannot be read"):
        while len(block := sound.read(BLOCK_SAMPLES // sound.channels, dtype="float32", always_2d=True)):
            yield mono(block)


def ffmpeg_blocks(file: BinaryIO, source: str | Path | bytes | io.IOBase, where: str,
                  rate: int) -> Iterator[np.ndarray]:
    """What the program ffmpeg reads, at this rate, by its own resampler. A file without a path is its stdin."""
    with tempfile.TemporaryFile() as copy, tempfile.TemporaryFile() as said:
        if isinstance(source, bytes):
            copy.write(source)
            copy.flush()
        stdin = copy if isinstance(source, bytes) else file
        os.lseek(stdin.fileno(), 0, os.SEEK_SET)  # on macOS, /dev/fd/0 begins where stdin is
        name = os.path.abspath(source) if isinstance(source, str | Path) else "/dev/fd/0"
        command = ["ffmpeg", "-nostdin", "-v", "error", "-threads", "1", "-filter_threads", "1", "-protocol_whitelist",
                   "file", "-format_whitelist", FFMPEG_FORMATS, "-i", f"file:{name}", "-vn", "-f", "f32le", "-ac", "1",
                   "-ar", str(rate), "-"]
        # With Python's signals, where SIGXFSZ is ignored: messages beyond a limit are lost, and ffmpeg goes on.
        with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=said,
                              restore_signals=False) as process:
            assert process.stdout is not None
            try:
                while data := process.stdout.read(4 * BLOCK_SAMPLES):
                    yield np.frombuffer(data[:len(data) // 4 * 4], "<f4")
            except BaseException:  # nobody wants the rest
                process.kill()
                raise
        if process.returncode:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 10_000))
            reason = said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            reason = re.sub(r"^\[[^]]* @ 0x\w+\] ", "", reason)  # which part of ffmpeg says it
            if "not contain any stream" in reason:
                raise InputError(f"{where}: there is no sound in it")
            raise InputError(f"{where}: cannot be read by ffmpeg: {brief(reason.removeprefix(f'file:{name}: '))}")


def resampled(sound: Recording, rate: int) -> Recording:
    """The sound at this rate, by soxr, as librosa does it for Qwen's own package; without soxr, by by_sinc."""
    try:
        import soxr
    except ImportError:
        return Recording(by_sinc(sound.blocks, sound.rate, rate), rate, sound.seconds)
    stream = soxr.ResampleStream(sound.rate, rate, 1)

    def blocks() -> Iterator[np.ndarray]:
        for block in sound.blocks:
            yield stream.resample_chunk(block)
        yield stream.resample_chunk(np.empty(0, np.float32), last=True)

    return Recording(blocks(), rate, sound.seconds)


def by_sinc(blocks: Iterator[np.ndarray], given: int, rate: int) -> Iterator[np.ndarray]:
    """Blocks of `given` samples a second -> blocks of `rate` a second.

    Each new sample is a sum of those around it, weighted by a sinc in a Hann window (Smith 1984, "A flexible sampling-
    rate conversion method"), which takes away what is above half of the lower rate.
    """
    cut = 0.95 * min(1, rate / given)
    reach = math.ceil(32 / cut)  # samples on each side
    around, most = np.arange(-reach, reach + 1), 2**20 // (2 * reach + 1)  # new samples at a time
    held, first, n, done = np.zeros(reach, np.float32), -reach, 0, 0  # first: held[0]'s place among the old samples
    for block in itertools.chain(blocks, [None]):
        n += 0 if block is None else len(block)
        held = np.concatenate([held, np.zeros(reach + 1, np.float32) if block is None else block])
        stop = ((first + len(held) - reach) * rate - 1) // given + 1
        stop = -(-n * rate // given) if block is None else max(stop, done)
        for start in range(done, stop, most):
            place, rest = np.divmod(np.arange(start, min(start + most, stop)) * given, rate)
            t = around - (rest / rate)[:, None]
            weights = cut * np.sinc(cut * t) * np.cos(t * (math.pi / 2 / (reach + 1))) ** 2
            old = np.lib.stride_tricks.sliding_window_view(held, len(around))[place - first - reach]
            yield np.einsum("ij,ij->i", old, weights).astype(np.float32)
        past, done = stop * given // rate - reach - first, stop
        held, first = held[past:], first + past
