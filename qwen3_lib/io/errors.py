"""Words and checks for messages about bad input. InputError itself stands in tokenizer_utils.py."""
import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from tokenizer_utils import InputError, brief, parse_json, read_json_object

__all__ = ["LONGEST_LINE", "InputError", "TooLong", "brief", "counted", "did_you_mean", "encoded", "is_whole",
           "parse_json", "read_json_object", "some"]

LONGEST_LINE = 2000  # characters of an error message


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
    similar = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)  # --prompt is not --part
    return f"; did you mean {similar[0]}?" if similar else ""


def is_whole(value: Any, minimum: int) -> bool:
    """True for an integer (not True or 3.0) of at least `minimum`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum
