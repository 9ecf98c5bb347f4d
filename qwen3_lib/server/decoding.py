"""Uploads but WAV of 16,000 samples a second are decoded in a child process, which ends with the request.

soundfile and ffmpeg are large programs in C: a hostile file may hang them, end them, or make them take gigabytes. The
child, and the ffmpeg that it starts, have a limit of memory and one of processor time each.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from qwen3_asr import RATE
from qwen3_lib.app.fields import Refusal
from qwen3_lib.io.errors import InputError
from qwen3_lib.io.sounds import Recording, open_sound, read_wav
from qwen3_lib.server.vetting import child_of

DECODING_SECONDS, DECODING_MEMORY = 60, 2**29  # of the processor, and bytes, for a child and for its ffmpeg
MESSAGES = 2**20  # bytes that ffmpeg may write about a damaged file
SILENT = 10  # seconds until the next block of samples must come, on a busy machine, too


class Upload:
    """A stranger's sound in a file. `open` and its blocks may be used in any thread."""

    def __init__(self, file: BinaryIO):
        self.file, self.ended = file, False
        self.child: subprocess.Popen[bytes] | None = None
        self.user = Future[Any]()  # the work of the thread that reads
        self.user.cancel()

    def close(self) -> None:
        """Ends the child, and closes the file; may be called while another thread reads, which then gets InputError."""
        self.ended = True
        if self.child is not None:
            kill(self.child)
        user, self.user = self.user, Future()  # an exception in it would hold what holds this
        user.add_done_callback(lambda _: self.file.close())

    def open(self) -> Recording:
        """The sound, once. Raises InputError for what can't be read."""
        sound = read_wav(self.file, "the sound")
        if sound is None or sound.rate != RATE or not sound.seconds:
            sound = self.decoded()
        return replace(sound, blocks=self.until_closed(sound.blocks))

    def until_closed(self, blocks: Any) -> Iterator[np.ndarray]:
        with contextlib.closing(blocks):
            for block in blocks:
                if self.ended:
                    raise InputError("the sound: given up")
                yield block

    def decoded(self) -> Recording:
        """The sound by a child, which says what is wrong if it can't be read."""
        try:
            self.child = subprocess.Popen(**child_of(__name__), stdin=self.file, stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:  # too many processes or open files
            raise Refusal(503, "no process for the sound can be started; try again",
                          headers={"Retry-After": "2"}) from error
        if self.ended:  # since before the child was there
            kill(self.child)
        records = self.records(self.child)
        return Recording(records, RATE, next(records))

    def records(self, child: subprocess.Popen[bytes]) -> Iterator[Any]:
        """What main() writes: the sound's seconds, or None, and then its blocks."""
        assert child.stdout is not None
        with child:
            try:
                while True:
                    kind, value = json.loads(child.stdout.readline() or '["error", null]')
                    if kind == "end":
                        return
                    if kind == "error":
                        raise InputError(value or f"the sound: decoding it was given up: it takes {DECODING_SECONDS} "
                                         f"seconds or {DECODING_MEMORY / 1e9:.1f} GB, or stops for {SILENT} seconds")
                    yield np.frombuffer(child.stdout.read(value), "<f4") if kind == "block" else value
            finally:
                kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Ends a child, and its ffmpeg with it."""
    if child.returncode is None:  # else its number may be another process' by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()


# ---- In the child ----------------------------------------------------------------------------------------------------

def main() -> None:
    """Decodes the file that is stdin. Writes lines of JSON; the samples of a block follow its line."""
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource
        for which, most in ((resource.RLIMIT_CPU, DECODING_SECONDS), (resource.RLIMIT_AS, DECODING_MEMORY),
                            (resource.RLIMIT_FSIZE, MESSAGES)):
            with contextlib.suppress(ValueError):  # a lower one is set already
                resource.setrlimit(which, (most, most))
    try:
        alarm(SILENT)
        os.lseek(0, 0, os.SEEK_SET)
        sound = open_sound(sys.stdin.buffer)
        write("seconds", sound.seconds)
        for block in sound.blocks:
            write("block", block.nbytes, block.tobytes())
        write("end", None)
    except InputError as error:
        write("error", str(error))


def write(kind: str, value: Any, data: bytes = b"") -> None:
    """Writes a record, which may take any time; the next one must be there in SILENT seconds."""
    alarm(0)
    sys.stdout.buffer.write(json.dumps([kind, value]).encode() + b"\n" + data)
    sys.stdout.buffer.flush()
    alarm(SILENT)


def alarm(seconds: int) -> None:
    """Ends this process after so many seconds; 0: never."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(seconds)
