"""The output: answers on stdout; notes, statistics and errors on stderr."""
import contextlib
import copy
import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from qwen3 import accept_all_text
from qwen3_lib.app.wrap import Wrap, wrapped
from qwen3_lib.io.errors import InputError


class OutputError(InputError):
    """stdout can't be written, or stdin can't be read: the conversation ends."""


# ---- The terminal: colours, widths, harmless text --------------------------------------------------------------------

DIM, CYAN, RESET, ERASE_LINE = "\x1b[2m", "\x1b[36m", "\x1b[0m", "\r\x1b[K"
COMMANDING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters
                        "\u200b\u202a-\u202e\u2066-\u2069]")  # show nothing, or turn the direction of the text


def harmless(text: str, stream: TextIO) -> str:
    """On a terminal, the text without control characters: neither a model nor a file may command the terminal."""
    return COMMANDING.sub("\ufffd", text) if stream.isatty() else text


def obey_escapes() -> None:
    """Makes a console of Windows obey colours and movements of the cursor, as all other terminals do at once."""
    if sys.platform == "win32":
        kernel32 = ctypes.windll.kernel32
        for stream in (-11, -12):  # stdout, stderr; a stream that is no console refuses, which is harmless
            kernel32.SetConsoleMode(kernel32.GetStdHandle(stream), 7)  # 4, this ability, and 1 + 2, the usual ones


def is_screen(stream: TextIO | None) -> bool:
    """True for a terminal whose cursor can be moved."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(stream: TextIO) -> bool:
    """True for a screen, unless NO_COLOR is set (https://no-color.org)."""
    return is_screen(stream) and not os.environ.get("NO_COLOR")


def columns(stream: TextIO) -> int:
    """The width of the terminal now; 0 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def note(text: str, colour: str = "") -> None:
    """Prints a line to stderr, on a terminal broken between words. A closed stderr is no error."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            text = wrapped(harmless(text, sys.stderr), columns(sys.stderr))
            text = colour + text + RESET if colour and text and coloured(sys.stderr) else text
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def to_stdout() -> Iterator[None]:
    """Raises OutputError when stdout was closed (`| head -1`) or its disk is full."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain again when it exits
        raise OutputError(f"the answer could not be written to stdout: {error.strerror}") from error


def write(text: str, dim: bool = False) -> None:
    """Prints a piece of the answer."""
    text = harmless(text, sys.stdout)
    if dim and text and coloured(sys.stdout):
        text = DIM + text + RESET
    with to_stdout():
        print(text, end="")


class Status:
    """A progress line on a terminal, erased before anything else is printed. In a pipe it isn't shown."""

    def __init__(self) -> None:
        self.text = ""

    def show(self, text: str) -> None:
        """Shows the text in place of an earlier one."""
        if text != self.text and is_screen(sys.stderr):
            self.text = text
            colour, normal = (CYAN, RESET) if coloured(sys.stderr) else ("", "")
            self.print(ERASE_LINE + colour + text + normal)

    def erase(self) -> None:
        if self.text:
            self.text = ""
            self.print(ERASE_LINE)

    def print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)


# ---- Answers ---------------------------------------------------------------------------------------------------------

class Page:
    """Stdout while an answer is written: on a terminal, lines are broken between words and thoughts dimmed."""

    def __init__(self) -> None:
        self.wrap = Wrap(lambda: columns(sys.stdout))
        self.dim, self.last = False, ""  # the last piece: dimmed or not, and its last character

    def write(self, text: str, dim: bool = False) -> None:
        """Writes a piece of the answer."""
        if text:
            rest, self.dim = self.wrap.flush() if dim != self.dim else "", dim
            write(rest, not dim)
            self.last = text[-1]
            write(self.wrap.feed(harmless(text, sys.stdout)), dim)

    def end(self) -> None:
        """Ends the last line."""
        write(self.wrap.flush(), self.dim)
        if self.last != "\n":
            write("\n")


class ChangingEnd:
    """Stdout while the end of a text may still change: on a terminal the end is dimmed, and rewritten each time."""

    def __init__(self) -> None:
        self.wrap = Wrap(lambda: columns(sys.stdout))
        self.row, self.lines = "", 0  # the last line of the text that stays; the lines of its end below

    def show(self, text: str, end: str) -> None:
        """Adds to the text that stays, and puts another end behind it."""
        text = self.row + self.wrap.feed(harmless(text, sys.stdout))
        ahead = copy.copy(self.wrap)
        end = ahead.feed(harmless(end, sys.stdout)) + ahead.flush()
        up = f"\x1b[{self.lines}A" if self.lines else ""
        self.row, self.lines = text.rpartition("\n")[2], end.count("\n")
        with to_stdout():
            print(f"{up}\r\x1b[J{text}{DIM if coloured(sys.stdout) else ''}{end}{RESET * coloured(sys.stdout)}", end="")


def print_json(value: dict) -> None:
    """Prints a value as one line of JSON."""
    write(json.dumps(value, ensure_ascii=False) + "\n")


def guarded(work: Callable[[], int]) -> int:
    """Does the work of a command -> its exit status. Bad input and Ctrl-C end in one line on stderr."""
    sys.stdin = open(os.devnull) if sys.stdin is None else sys.stdin  # None: it is closed
    sys.stderr = open(os.devnull, "w") if sys.stderr is None else sys.stderr
    try:
        if sys.stdout is None:
            raise InputError("stdout is closed, so the answer can't be written")
        accept_all_text(sys.stdout)
        obey_escapes()
        return work()
    except InputError as error:
        if isinstance(error.__cause__, BrokenPipeError):  # `| head -1` has read enough
            return 141  # as if SIGPIPE had ended it
        message, status = str(error), 1
    except ImportError as error:  # of an extra: see qwen3_lib/kernels
        message, status = str(error), 1
    except MemoryError:
        message, status = "not enough memory for this model", 1
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    note(f"{os.path.basename(sys.argv[0])}: {message}")
    return status
