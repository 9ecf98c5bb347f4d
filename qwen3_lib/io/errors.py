"""Words and checks for messages about bad input. InputError itself stands in tokenizer_utils.py."""
import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from tokenizer_utils import InputError, Tokenizer, brief, parse_json, read_json_object

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


class TooLong(InputError):
    """A text that has more tokens than the context."""


TEXT_PIECE, BORDER = 2**16, 64  # characters that are encoded on trial; tokens that a border between two of them may add


def encoded(tokenizer: Tokenizer, text: str, room: int, add_special_tokens: bool = True,
            cut: bool = False) -> list[int]:
    """The ids of a text. Raises TooLong for one that can't fit into `room` tokens; or cuts it after them.

    A long text is encoded in pieces first, because all of it could take gigabytes: 200 bytes for each token.
    """
    n = 0
    for end in range(TEXT_PIECE, len(text) + TEXT_PIECE, TEXT_PIECE) if len(text) > TEXT_PIECE else ():
        n += len(tokenizer.encode(text[end - TEXT_PIECE:end], add_special_tokens=False)) - BORDER
        if n > room and cut:
            text = text[:end]
            break
        if n > room:
            raise TooLong(f"the text has {len(text):,} characters; the first {min(end, len(text)):,} are too many for "
                          f"the context of {room:,} tokens")
    return tokenizer.encode(text, add_special_tokens)
