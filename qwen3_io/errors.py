"""The ground floor: the error for bad input, the reader of JSON, and small checks. It imports nothing of ours."""
import difflib
import json
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

LONGEST_LINE = 2000  # characters of an error message
LARGEST_TEXT = 2**26  # bytes of a file that is read as a whole; no model has a JSON file or template half as large
LARGEST_FLOAT32 = 3.4028234663852886e38


class InputError(ValueError):
    """Bad input: a file, a value, a prompt. The message is one line for the user, safe to print on a terminal."""

    def __init__(self, message: str):
        super().__init__(brief(message, LONGEST_LINE))


def brief(value: object, longest: int = 200) -> str:
    """The value's text as one line of at most `longest` characters, with unprintable characters written as escapes.

    Escaped are control characters, which command a terminal, and those that change the direction of text or show
    nothing, which disguise a name (U+202E, U+200B).
    """
    text = str(value)
    shortened = " ".join(text[:10 * longest].split())  # before anything that takes time and memory: it may be large
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shortened[:longest + 1])
    complete = len(escaped) <= longest and len(text) <= 10 * longest
    return escaped if complete else escaped[:longest - 4].rstrip() + " ..."


def some(names: Iterable[str], most: int = 5) -> str:
    """The names as an enumeration; of more than `most`, the first ones and the number of the others."""
    names = [brief(name) for name in names]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def counted(n: int, thing: str) -> str:
    """"1 token", "2 tokens"."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" if one of the known names resembles `name`, else an empty text."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def parse_json(text: str | bytes, where: object) -> Any:
    """The JSON value in a text. Raises InputError that begins with `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {brief(error)}") from error


def read_json(file: Path) -> Any:
    """The JSON value in a file. Raises InputError that names the file."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_TEXT:
        raise InputError(f"{file}: larger than {LARGEST_TEXT} bytes, so it is not what its name says")
    return parse_json(data, file)


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError that names the file."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise InputError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def is_number(value: Any) -> bool:
    """True for a real number in the range of float32: not for NaN, infinity, True or a text."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and bool(abs(value) <= LARGEST_FLOAT32)


def is_whole(value: Any, minimum: int) -> bool:
    """True for an integer (not True or 3.0) of at least `minimum`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def number_between(value: Any, low: float, high: float, name: str, file: Path) -> float:
    """The value called `name` in `file`. Raises InputError unless it is a number from low to high."""
    if not is_number(value) or not low <= value <= high:
        raise InputError(f"{file}: {name} must be a number between {low:g} and {high:g}, not {brief(repr(value))}")
    return float(value)
