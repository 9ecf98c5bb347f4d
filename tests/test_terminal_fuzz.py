"""qwen3_app/terminal.py: whatever an answer holds, all of it is printed."""
import json
import sys

import pytest

from fuzzing import Stream, any_answer, cut_up, fuzz, parts_of
from qwen3_app import cli
from tokenizer_utils import parse_answer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


class Finished:
    """An answer that has been generated, as print_answer takes it."""

    def __init__(self, pieces, opened):
        self.pieces, self.think_open_in_prompt, self.answer = pieces, opened, parse_answer("".join(pieces), opened)

    def __iter__(self):
        return iter(self.pieces)


@fuzz(5000, refused=False)
def test_what_is_printed(rng):
    """All of an answer, calls as JSON, and a newline at its end; with hidden thoughts, all but the thoughts."""
    text, opened = any_answer(rng)
    finished = Finished(cut_up(rng, text, 9), opened)
    hide = rng.random() < 0.5
    sys.stdout, before = Stream(), sys.stdout
    try:
        cli.print_answer(finished, hide)
        out = sys.stdout.text()
    finally:
        sys.stdout = before
    assert out.endswith("\n")
    calls = finished.answer.tool_calls
    shown = [piece for kind, piece in parts_of(text, opened)
             if not (kind == "thinking" and hide) and not (kind == "call" and calls)]
    shown = "".join(shown) + "".join(json.dumps(call, ensure_ascii=False) for call in calls)
    assert "".join(out.split()) == "".join(shown.split())
    return True
