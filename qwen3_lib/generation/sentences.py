"""A text in the parts that are spoken one after the other."""
from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

LONGEST_TEXT = 500  # characters of a text that are spoken as one
ONE_SENTENCE = re.compile(r"\S.*?(?:[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+[”’」』）]*(?=[^。！？”’」』）])|"
                          r"(?=\n\s*\n))", re.DOTALL)


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """The sentences of a text that comes in pieces, as soon as each is complete; none is longer than LONGEST_TEXT."""
    held = ""
    for piece, last in itertools.chain(((piece, False) for piece in texts), [("\n\n", True)]):
        held += piece
        while held := held.lstrip():
            found = ONE_SENTENCE.match(held, 0, LONGEST_TEXT + 1)
            n = found.end() if found else len(held)
            if n > LONGEST_TEXT:
                space = max(held.rfind(mark, 0, LONGEST_TEXT) for mark in ",;:、，； ") + 1
                n = space if space > 0 else LONGEST_TEXT
            elif not found and not last:
                break
            yield held[:n].strip()
            held = held[n:]


def spoken_parts(text: str) -> Iterator[str]:
    """A text in parts of at most LONGEST_TEXT characters, of whole sentences where these are shorter."""
    part = ""
    for sentence in sentences([text]) if len(text.strip()) > LONGEST_TEXT else [text.strip()]:
        if part and len(part) + len(sentence) >= LONGEST_TEXT:
            yield part
            part = ""
        part += " " * bool(part) + sentence
    if part:
        yield part
