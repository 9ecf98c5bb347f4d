"""qwen3_lib/app/terminal.py and report.py: what is printed and how."""
import dataclasses
import io
import json
import math
import random
import sys

import pytest

import qwen3
from configs import FRANCE, ROOT
from helpers import read_safetensors
from fuzzing import any_answer, cut_up, pairs_of, taken_apart
from make_random_model import make_random_model
from qwen3_lib.app import report, terminal
from qwen3_lib.generation.completion import Completion
from qwen3_lib.io import facts
from test_qwen3_moe import MOE


# ---- a cut answer ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, full, words", [
    ({"max_new_tokens": 4}, False, "The thought took 4 tokens, and no answer followed: raise --max-tokens for more."),
    ({"max_new_tokens": 12}, False, "The answer was cut off after 12 tokens: raise --max-tokens for more."),
    ({}, True, "The thought took 4 tokens, and no answer followed: the context of"),
    ({"enable_thinking": False}, True, "The answer was cut off after 4 tokens: the context of"),
    ({"enable_thinking": False, "schema": {"type": "object"}, "max_new_tokens": 2}, False,
     "The answer was cut off after 2 tokens, and the JSON is not complete: raise --max-tokens for more.")])
def test_why_an_answer_was_cut_off(demo, options, full, words):
    length = len(qwen3.chat(demo, FRANCE, **options).prompt_ids) + 4 if full else 4096
    model = dataclasses.replace(demo, config=dataclasses.replace(demo.config, context_length=length))
    told = report.cut_note(qwen3.chat(model, FRANCE, temperature=0, **options).finish())
    assert told.startswith(words) and ("is full" in told) == full


# ---- the terminal ---------------------------------------------------------------------------------------------------

class Screen(io.StringIO):
    """A terminal that remembers what it was sent."""
    def isatty(self) -> bool:
        return True


def test_banner_and_sizes(demo, tmp_path):
    assert facts.banner(demo) == "qwen3 · demo · 6.95 M parameters · context 4,096 · NumPy float32"
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B/snapshots/0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((ROOT / "demo/config.json").read_bytes())
    hub = dataclasses.replace(demo, source=dataclasses.replace(demo.source, path=snapshot))
    assert "· Qwen/Qwen3-0.6B ·" in facts.banner(hub)
    sizes = read_safetensors(ROOT / "tests/tiny_seeing/model.safetensors")[0]
    n = sum(math.prod(entry["shape"]) for name, entry in sizes.items() if name.startswith("model.visual."))
    assert f"and a tower of {n:,} · context" in facts.banner(qwen3.load_model(ROOT / "tests/tiny_seeing"))
    for tied in (True, False):
        config = dataclasses.replace(demo.config, tie_word_embeddings=tied)
        shapes = qwen3.tensor_shapes(config)
        n = sum(math.prod(shape) for name, shape in shapes.items() if not (tied and name == "lm_head.weight"))
        assert facts.parameters(dataclasses.replace(demo.source, config=config)) == n
    # Its embedding is its lm_head.
    assert facts.weight_bytes(demo) == 4 * facts.parameters(demo.source)


def test_a_mixture_of_experts_reads_a_share_of_its_weights(tmp_path):
    model = qwen3.load_model(make_random_model(MOE | {"mlp_only_layers": [0]}, tmp_path, "float32"))
    shapes = qwen3.tensor_shapes(model.config)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    assert facts.parameters(model.source) == sum(sizes.values())
    chosen = sum(size for name, size in sizes.items() if ".experts." not in name or int(name.split(".")[5]) < 3)
    assert facts.weight_bytes(model) == 4 * (chosen - sizes["model.embed_tokens.weight"])
    text = report.statistics(Completion(model, [1, 2, 3], max_new_tokens=4).finish())
    assert f"a token goes through {chosen / sum(sizes.values()):.1%} of the weights" in text


def test_statistics_say_how_fast_the_weights_were_read(demo):
    done = qwen3.chat(demo, FRANCE, max_new_tokens=5).finish()
    done.times = [0.0, 2.0, 2.1, 2.2, 2.3, 2.4]
    text = report.statistics(done)
    assert "answer: 5 tokens, 10.0 tokens/s, reading 0.278 GB/s of weights" in text
    assert "first token after 2.00 s" in text
    guessing = qwen3.chat(demo, FRANCE, max_new_tokens=5, lookup=3).finish()
    assert "guesses right" in report.statistics(guessing) and "GB/s" not in report.statistics(guessing)


@pytest.mark.parametrize("term, shown", [("xterm", True), ("dumb", False)])
def test_a_status_line_is_erased(monkeypatch, term, shown):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", "1")
    status = terminal.Status()
    for _ in range(2):
        status.show("slow")
    status.erase()
    status.erase()
    assert screen.getvalue() == "\r\x1b[Kslow\r\x1b[K" * shown


def test_a_model_cannot_command_the_terminal(monkeypatch, capsys):
    """A terminal gets only newlines, tabs and our own dimming."""
    text = "".join(map(chr, [*range(0x300), *range(0x2000, 0x2070)]))
    terminal.write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    terminal.write(text)
    commanding = [*range(9), *range(11, 32), *range(127, 160), 0x200b, *range(0x202a, 0x202f), *range(0x2066, 0x206a)]
    assert screen.getvalue() == text.translate(dict.fromkeys(commanding, "\ufffd"))


def test_notes_and_answers_in_a_pipe_are_as_they_are(capsys, demo):
    text = "word " * 100 + "\u202e\x1b[31m\u200b"
    terminal.note(text, terminal.CYAN)
    terminal.write(text, dim=True)
    assert capsys.readouterr() == (text, text + "\n")


class Finished:
    """An answer that has been generated, as print_answer takes it."""

    def __init__(self, pieces, opened):
        self.pieces, self.opened = pieces, opened
        self.answer, _ = taken_apart("".join(pieces), opened)

    def parts(self):
        return pairs_of(self.pieces, self.opened)

    def __iter__(self):
        return iter(self.pieces)


@pytest.mark.parametrize("hide", [False, True])
def test_all_of_an_answer_is_printed(capsys, hide):
    """Calls as JSON, and a newline at the end; with hidden thoughts, all but the thoughts."""
    for seed in range(500):
        rng = random.Random(seed)
        text, opened = any_answer(rng)
        finished = Finished(cut_up(rng, text, 9), opened)
        report.print_answer(finished, hide)
        out, calls = capsys.readouterr().out, finished.answer.tool_calls
        tags = "".join(piece for kind, piece in finished.parts() if kind == "tag")
        opening, closing = ("<think>" in tags, "</think>" in tags) if not hide else (False, False)
        shown = "<think>" * opening + ("" if hide else finished.answer.reasoning or "") + "</think>" * closing
        shown += finished.answer.content
        shown += "".join(json.dumps(call, ensure_ascii=False) for call in calls)
        assert out.endswith("\n") and "".join(out.split()) == "".join(shown.split()), seed
