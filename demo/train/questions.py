"""How people ask: the wordings of the training text, by what is asked (questions.txt), and the answers to small talk
(chat.txt). patterns.txt: what values, sentences to tools, stories and system prompts are made of.

`(a|b|)` stands for any one of its alternatives, `{c}` for a value. Chinese wordings are under the same keys with
`_zh`. The wordings that training never sees are in heldout.txt, under the same keys.
"""

from pathlib import Path


def read_book(name: str) -> dict[str, list[str]]:
    """`key: wording / wording`, continued on indented lines; a line with `# ` is a heading."""
    book: dict[str, str] = {}
    key = ""
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            book[key] += " " + line.strip()
        elif not line.startswith("# "):
            key, _, text = line.partition(":")
            book[key] = text
    return {key: text.strip().split(" / ") for key, text in book.items()}


QUESTIONS = read_book("questions.txt")
CHAT = read_book("chat.txt")
PATTERNS = read_book("patterns.txt")
