"""The command line of `python qwen3_tts.py`: a text in; a sound played, written, or in a pipe.

The sound goes to where --out says, everything else to stderr. Exit status as in cli.py.
"""
from __future__ import annotations

import argparse
import codecs
import io
import itertools
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qwen3_lib.app.arguments import Parser, add_engine_options, add_model_options, load_main, named_model
from qwen3_lib.app.journal import write_all
from qwen3_lib.app.terminal import guarded, note, write
from qwen3_lib.io.errors import InputError
from qwen3_tts import OPTIONS, Speech, speak, voices_of

CODED = (".aac", ".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".webm")  # how names of files end that are no WAV
UNKNOWN = 2**32 - 1  # bytes: what programs write into the header of a WAV file in a pipe


def make_parser() -> Parser:
    parser = Parser(usage="%(prog)s [options] [text]", description="Speaks a text with a Qwen3-TTS. On a terminal the "
                    "sound is played; in a pipe it goes to stdout, as WAV. Everything else goes to stderr.")
    add = parser.add_argument_group("what to say, and how").add_argument
    add("text", nargs="*", help="what to say; without it, a piped text is spoken as it comes, sentence by sentence")
    for name, (kind, metavar, text) in OPTIONS.items():
        add(f"--{name}", type=kind, metavar=metavar, help=text)
    add("--clone", metavar="FILE", help="a sound of three seconds, of a voice that you may use (Base)")
    add("--voices", action="store_true", help="print the names of the model's voices")
    add("--out", metavar="FILE", help="write a WAV file; - is stdout (default: play it on a terminal, else stdout)")
    add_model_options(parser, "none")
    add_engine_options(parser)
    return parser


# ---- Where a sound goes ----------------------------------------------------------------------------------------------

def write_wav(file: Any, pieces: Iterable[np.ndarray], rate: int) -> int:
    """Writes samples as they come, as WAV of 16 bits -> how many. In a pipe, the header can't say how many."""
    n = 0
    put(file, wav_header(rate, UNKNOWN))
    try:
        for piece in pieces:
            put(file, in_16_bits(piece).tobytes())
            n += len(piece)
    finally:  # what was spoken before Ctrl-C can be heard
        if file.seekable():
            file.seek(0)
            put(file, wav_header(rate, 2 * n))
    return n


def put(file: Any, data: bytes) -> None:
    """Writes bytes into an unbuffered file. Raises InputError if nobody reads them, or if they don't fit."""
    try:
        write_all(file, data)
    except OSError as error:
        raise InputError(f"the sound could not be written: {error.strerror}") from error


def in_16_bits(samples: np.ndarray) -> np.ndarray:
    """Samples [n] from -1 to 1, as WAV has them."""
    return np.rint(samples * 32767).astype("<i2")


def wav_header(rate: int, n_bytes: int) -> bytes:
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", min(36 + n_bytes, UNKNOWN), b"WAVE", b"fmt ", 16, 1, 1, rate,
                       2 * rate, 2, 16, b"data", n_bytes)


def player() -> str:
    """The program that plays a sound here, or "winsound", a part of Python. Raises InputError where there is none."""
    found = "winsound" if sys.platform == "win32" else next(filter(shutil.which, ("aplay", "afplay")), None)
    if found is None:
        raise InputError("neither aplay nor afplay is here to play the sound; write a file: --out speech.wav")
    return found


def play(pieces: Iterator[np.ndarray], speech: Speech, program: str) -> int:
    """Plays a sound, by aplay as it comes -> how many samples. Raises InputError if it can't be played."""
    n, status = 0, 0
    if program == "aplay":
        with subprocess.Popen([program, "-q", "-"], stdin=subprocess.PIPE, bufsize=0) as process:
            try:
                n = write_wav(process.stdin, pieces, speech.rate)
            except InputError as error:
                if not isinstance(error.__cause__, BrokenPipeError):  # else it has ended, and its status tells
                    raise
        status = process.returncode
    else:
        with tempfile.TemporaryDirectory() as folder:
            speech.save(file := Path(folder) / "speech.wav")
            n = len(speech.samples)
            if program == "winsound":
                import winsound
                winsound.PlaySound(str(file), winsound.SND_FILENAME)  # type: ignore[attr-defined]
            else:
                status = subprocess.run([program, file], check=False).returncode
    if status:
        raise InputError(f"{program} could not play the sound; write a file: --out speech.wav")
    return n


def as_they_come(speech: Speech) -> Iterator[np.ndarray]:
    """The pieces of a speech, which doesn't keep them: it may be as long as a book."""
    for piece in speech:
        speech.pieces.clear()
        yield piece


# ---- What to say -----------------------------------------------------------------------------------------------------

def piped() -> Iterator[str]:
    """The text in stdin as it comes, also within a line. Raises InputError for what is no text."""
    stdin: Any = sys.stdin.buffer
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(sys.stdin.encoding)(), translate=True)
    try:
        while data := stdin.read1(4096):
            yield decoder.decode(data).replace("\ufeff", "")  # a mark of the encoding, with which files begin
        yield decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        raise InputError(f"the piped text can't be read: {error}") from error


def say(args: argparse.Namespace) -> int:
    """Does what the command line asks for -> exit status."""
    if named_model(args) is None:
        raise InputError("name a model that speaks: --model Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice, which is downloaded "
                         "once")
    if args.out is not None and args.out.lower().endswith(CODED):
        raise InputError(f"{args.out}: only WAV is written; ffmpeg makes other files of it: --out - | "
                         f"ffmpeg -i - {args.out}")
    program = player() if args.out is None and sys.stdout.isatty() and not args.voices else ""
    model = load_main(args)
    if args.voices:
        if not (names := voices_of(model).names):
            raise InputError(f"{model.path}: this model has no voices with names: give --describe or --clone")
        write("".join(f"{name}\n" for name in names))
        return 0
    options = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in OPTIONS}
    speech = speak(model, " ".join(args.text) if args.text else piped(), clone=args.clone, **options)
    pieces = itertools.chain([next(speech)], as_they_come(speech))  # what is wrong is told before a file is opened
    if program:
        n = play(pieces, speech, program)
    elif args.out in (None, "-"):
        n = write_wav(open(sys.stdout.fileno(), "wb", buffering=0, closefd=False), pieces, speech.rate)
    else:
        try:
            with open(args.out, "wb", buffering=0) as file:
                n = write_wav(file, pieces, speech.rate)
        except OSError as error:
            raise InputError(f"{args.out}: cannot be written: {error.strerror}") from error
    limit = speech.longest * speech.codec.samples / speech.rate
    cut = (f"; it was cut off by --max-seconds, or by the model's limit of {limit:.1f} s for each part of a text"
           if speech.finish_reason == "length" else "")
    note(f"{'' if args.out in (None, '-') else f'{args.out}: '}{n / speech.rate:.1f} s{cut}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line -> exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not args.text and not args.voices and (sys.stdin is None or sys.stdin.isatty()):
        parser.error("there is no text")
    return guarded(lambda: say(args))
