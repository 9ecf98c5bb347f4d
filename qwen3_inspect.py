# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "threadpoolctl>=3.5", "numba>=0.62"]
# ///
"""See inside: one HTML file shows how a model computes the answer to a prompt, with the numbers of this prompt.

    python qwen3_inspect.py "The capital of France is" --open        writes qwen3_inspect.html and opens it
    python qwen3_inspect.py --model Qwen/Qwen3.5-0.8B --image photo.jpg "What is this?"
    python qwen3_inspect.py --model Qwen/Qwen3-ASR-0.6B --sound speech.wav

The file needs no network and can be sent to a friend. qwen3.py computes the model, qwen3_5.py a Qwen3.5. The room below
is qwen3_lib/page/:

    recorder.py    records each step of forward
    contents.py    computes what the panels show
    page.py        joins page.html, page.css, pictures.js, page.js and uplot/, the chart library, to one file
"""
from __future__ import annotations

import argparse
import itertools
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__" and None in map(find_spec, ("qwen3", "qwen3_lib")):
    sys.exit("qwen3_inspect.py: it needs qwen3.py and the folder qwen3_lib beside it")

from qwen3 import (  # first: it says what is missing
    CHUNK, Engine, InputError, Model, TokenIds, check_answers, checked_ids)
import numpy as np
import qwen3_5
from qwen3_lib.app.terminal import guarded, note, write
from qwen3_lib.app.files import picture_file
from qwen3_lib.app.models import readable_size
from qwen3_lib.app.arguments import Parser, add_max_pixels, add_model_options, add_sampling, answer_options, load_main
from qwen3_lib.io.models import sharing
from qwen3_lib.generation.transcript import parts_in
from qwen3_lib.io.sounds import open_sound
from qwen3_lib.io.writing import write_whole
from qwen3_lib.page.contents import PageOptions, contents
from qwen3_lib.page.page import html
from qwen3_lib.page.recorder import RecordedPass, Recorder

__all__ = ["InputError", "PageOptions", "RecordedPass", "inspect", "main", "record_pass"]

COMPARED = "python bench/run.py --only quality compares int8 and int4 with float32"
GONE = {"--quantized": COMPARED, "--no-quantized": COMPARED,
        "--compare": "python qwen3.py answers a question with --think and with --no-think"}


def check_engine(model: Model) -> None:
    """Raises InputError for a model whose passes aren't those of qwen3.py and qwen3_5.py."""
    if model.engine not in map(sharing, (Engine(), qwen3_5.DENSE.engine)):
        raise InputError(f"{model.path}: only the functions of qwen3.py are recorded, and another engine has others")


def record_pass(model: Model, text: str | TokenIds) -> RecordedPass:
    """One pass of a text, or of token ids [n], 512 at most: the page's numbers as arrays, for a program of your own.

    Of the RecordedPass: `token_ids` [n]; `attention`, of each layer that attends: the weights [n_heads, n, n], a row
    for each token that looks; `streams`: the residual stream before the first layer and after each, [n, hidden_size];
    `q` and `k` before RoPE; `logits` [n, vocab_size]; `deltas` and `states` of a Qwen3.5; `steps`: what computed them.
    The text is taken as it is; model.tokenizer.apply_chat_template makes one of messages.
    Raises InputError for no or too many tokens, ids out of range, and a model of the fast engine.
    """
    check_engine(model)
    ids = checked_ids(model, model.tokenizer.encode(text) if isinstance(text, str) else text)
    if len(ids) > CHUNK:
        raise InputError(f"the text has {len(ids):,} tokens; at most {CHUNK} are recorded")
    recorder = Recorder(model)
    recorder.keep_arrays = True
    logits = recorder.forward(ids, recorder.new_cache(), all_logits=True)
    return replace(recorder.passes[0], logits=logits)


def inspect(model: Model, options: PageOptions, tell: Callable[[str], Any] = lambda _: None) -> str:
    """The page, as the text of one HTML file. If pictures get fewer tokens than in qwen3.py, `tell` gets a line.

    Raises InputError for a prompt that is too long or can't be rendered, and for a model of the fast engine.
    """
    check_engine(model)
    page = contents(model, options)
    n = sum(each["rows"] * each["columns"] for each in page["pictures"])
    if n < (full := sum(each["full"] for each in page["pictures"])):
        tell(f"The page has room for {n:,} tokens of the {full:,} that qwen3.py makes of the pictures.")
    return html(page)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Writes one HTML file that shows how a Qwen3 model computes the answer to a prompt.",
                    hints=GONE)
    add = parser.add_argument
    add("prompt", nargs="?", default="", help="the question for the model, or the context of a sound")
    add("--image", action="append", metavar="FILE", default=[], help="a picture that the question is about, for a "
        "Qwen3-VL or Qwen3.5; may be repeated")
    add("--sound", metavar="FILE", help="a sound, which a Qwen3-ASR writes down")
    add_max_pixels(add, "as many as the page has room for")
    add("--out", metavar="FILE", default="qwen3_inspect.html", help="the file to write (default: %(default)s)")
    add("--html", dest="out", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # its earlier name
    add("--open", action="store_true", help="open the file in the browser")
    add("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    add("--think", action=argparse.BooleanOptionalAction, help="reason before the answer, or don't")
    add("-n", "--max-tokens", type=int, metavar="N", default=32, help="longest answer (default: %(default)s)")
    add_sampling(add)
    add_model_options(parser)
    return parser


def check_target(file: str) -> None:
    """Raises InputError for an existing file that is no page of this program, so that none is overwritten."""
    try:
        if os.path.isfile(file):
            with open(file, "rb") as opened:
                if b"<title>Inside Qwen3</title>" not in opened.read(4096):
                    raise InputError(f"{file}: exists and is no page of this program; give another --out")
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


def samples_of(file: str) -> np.ndarray:
    """The samples [n] of a sound's file. Raises InputError for a sound of more than a minute."""
    first, *more = itertools.islice(parts_in(open_sound(file).blocks, 60), 2)
    if more:
        raise InputError(f"{file}: the page has no room for more than a minute of sound")
    return first


def run(args: argparse.Namespace) -> int:
    """Writes the page -> exit status."""
    options = PageOptions(args.prompt, args.raw, args.think, answer_options(args),
                          [*map(picture_file, args.image)], None if args.sound is None else samples_of(args.sound))
    check_target(args.out)
    model = load_main(args, Engine())
    check_answers(model)
    # write_whole opens the file before inspect computes, so that an impossible place is refused first.
    write_whole(args.out, lambda file: file.write(inspect(model, options, note).encode("utf-8")))
    write(f"{args.out}: {readable_size(os.path.getsize(args.out))}\n")
    if args.open and not webbrowser.open(Path(os.path.realpath(args.out)).as_uri()):
        note(f"No browser was found: open {args.out} yourself.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status: 0; 1 for bad input, in one line; 2 for bad usage; 130 after Ctrl-C."""
    return guarded(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
