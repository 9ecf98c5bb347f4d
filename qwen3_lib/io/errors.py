"""Words and checks for messages about bad input. InputError itself stands in tokenizer_utils.py."""
import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tokenizer_utils import InputError, brief, parse_json, read_json_object

__all__ = ["LARGEST_TEXT", "LONGEST_LINE", "InputError", "brief", "counted", "did_you_mean", "is_number", "is_whole",
           "number_between", "parse_json", "read_json_object", "some"]

LONGEST_LINE = 2000  # characters of an error message
LARGEST_TEXT = 2**26  # bytes of a text that is read as a whole; no model's context holds half as much
LARGEST_FLOAT32 = 3.4028234663852886e38


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
