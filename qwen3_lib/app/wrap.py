"""Breaks streamed text into lines between words."""
import unicodedata
from collections.abc import Callable

WORD_ROOM = 40  # columns: a word with so many left is printed as it comes; a longer one is a link, not a word
CLOSING, OPENING = frozenset("、。，．：；！？）］｝」』】》〉”’…"), frozenset("（［｛「『【《〈“‘")
JOINER = "\u200d"  # makes one emoji of two
SKIN_TONES = range(0x1F3FB, 0x1F400)
HANGUL = range(0xAC00, 0xD7B0)  # wide, but written with spaces


def char_width(c: str) -> int:
    """The columns that a character takes on a terminal."""
    if c.isascii():
        return 1
    if unicodedata.category(c) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def stands_alone(c: str) -> bool:
    """True for characters of scripts without spaces, where a line may be broken before and after each."""
    return char_width(c) == 2 and ord(c) not in HANGUL


def may_break(last: str, c: str) -> bool:
    """True if a line may be broken between two characters, neither of them a space."""
    if c in CLOSING or last in OPENING or last == JOINER or ord(c) in SKIN_TONES or not char_width(c):
        return False
    return stands_alone(last) or stands_alone(c)


class Wrap:
    """Breaks a text that comes in pieces into lines of `width()` columns; how it is cut into pieces changes nothing.

    A word is held back until it is certain on which line it stands. Words longer than a line (links), and the lines of
    code blocks, are left to the terminal, so that they can be copied. `width` is asked at the start of each line,
    because the window may change; 0 breaks nothing.
    """

    def __init__(self, width: Callable[[], int]):
        self.ask, self.width, self.column = width, 0, 0
        self.held, self.last = "", ""  # the part of the word that is not yet printed; the word's last character
        self.streaming = False  # the word is printed as it comes
        self.begin, self.code = "", False  # the first three characters of the line; within a code block

    def feed(self, text: str) -> str:
        """The text that can be printed after this piece."""
        return "".join(map(self.character, text))

    def character(self, c: str) -> str:
        if c == "\n":
            rest, self.column = self.flush(), 0
            self.code ^= self.begin == "```"
            self.begin = ""
            return rest + "\n"
        if self.column == 0 and not self.held:
            self.width = self.ask()
        if len(self.begin) < 3 and c != " ":
            self.begin += c
        if self.code or not self.width:
            self.column += 1
            return c
        if c in " \t":
            return self.flush() + self.space(c)
        before = self.flush() if self.last and may_break(self.last, c) else ""
        self.held += c
        self.last = c if char_width(c) or c == JOINER else self.last or c
        return before + self.begun()

    def space(self, c: str) -> str:
        n = 1 if c == " " else 8 - self.column % 8
        if self.column + n > self.width:
            self.column = self.width
            return ""  # the line ends here anyway
        self.column += n
        return c

    def begun(self) -> str:
        """The part of the word that can be printed so far."""
        room, before = self.width - self.column, ""
        if not self.streaming and self.column and room < WORD_ROOM:
            if sum(map(char_width, self.held)) <= room:
                return ""
            self.column, before = 0, "\n"
            self.width = self.ask()
        self.streaming = True
        return before + self.printed()

    def printed(self) -> str:
        text, self.held = self.held, ""
        self.column += sum(map(char_width, text))
        if self.column > self.width:  # the terminal has gone on on its next line
            self.column = (self.column - 1) % max(self.width, 1) + 1
        return text

    def flush(self) -> str:
        """The rest of the word, which ends here."""
        self.streaming, self.last = False, ""
        return self.printed()


def wrapped(text: str, width: int) -> str:
    """The text in lines of `width` columns."""
    wrap = Wrap(lambda: width)
    return wrap.feed(text) + wrap.flush()
