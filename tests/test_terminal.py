"""qwen3_app/terminal.py: what is printed and how."""
import dataclasses
from pathlib import Path

import pytest

import qwen3
from qwen3_app import terminal

ROOT = Path(__file__).resolve().parents[1]
FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def demo():
    return qwen3.load_model(ROOT / "demo")


# ---- a cut answer ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, thinking, words", [
    (5, None, "All 5 tokens went into the thought, so there is no answer yet: raise --max-tokens for more."),
    (5, False, "The answer was cut off after 5 tokens: raise --max-tokens for more."),
    (None, False, None), (None, None, None)])
def test_a_cut_answer_says_so(demo, n, thinking, words):
    assert terminal.cut_note(qwen3.chat(demo, FRANCE, None, thinking, max_new_tokens=n).finish()) == words


def test_a_thought_that_ended_before_the_cut(demo):
    whole = qwen3.chat(demo, FRANCE).finish()
    closing = whole.token_ids.index(demo.tokenizer.token_to_id("</think>"))
    cut = [terminal.cut_note(qwen3.chat(demo, FRANCE, max_new_tokens=n).finish()) for n in (closing + 1, closing + 4)]
    assert cut[0].startswith("All ") and cut[1].startswith("The answer was cut off")


@pytest.mark.parametrize("thinking, words", [(None, "All 4 tokens went into the thought"),
                                             (False, "The answer was cut off after 4 tokens")])
def test_a_full_context_is_named_and_no_option(demo, thinking, words):
    prompt = len(qwen3.chat(demo, FRANCE, None, thinking).prompt_ids)
    small = dataclasses.replace(demo, config=dataclasses.replace(demo.config, max_position_embeddings=prompt + 4))
    told = terminal.cut_note(qwen3.chat(small, FRANCE, None, thinking).finish())
    assert told.startswith(words) and f"the context of {prompt + 4} tokens is full" in told and "max" not in told
