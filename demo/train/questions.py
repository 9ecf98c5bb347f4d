"""How people ask: the wordings of the training text, by what is asked (questions.txt), and what small talk is answered (chat.txt).

`(a|b|)` stands for any one of its alternatives, `{c}` for a value. Chinese wordings are under the same keys with
`_zh`. The wordings that training never sees are in heldout.py, under the same keys.
"""

from pathlib import Path


def read_book(name: str) -> dict[str, list[str]]:
    """A key stands on a line of its own, its wordings under it, indented and parted by ` / `; a line with `# ` is a heading."""
    book: dict[str, str] = {}
    key = ""
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            book[key] += " " + line.strip()
        elif not line.startswith("# "):
            key = line
            book[key] = ""
    return {key: text.strip().split(" / ") for key, text in book.items()}


QUESTIONS = read_book("questions.txt")
CHAT = read_book("chat.txt")
