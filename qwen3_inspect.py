# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "numba>=0.62"]
# ///
"""See inside: one HTML file that shows a prompt on its way through the model, with this prompt's own numbers.

    python qwen3_inspect.py "The capital of France is" --open        writes qwen3_inspect.html and opens it

The file needs no network and can be sent to a friend. The model is computed by qwen3.py; the panel on quantization, and
folders that the fast engine has quantized, need the fast engine and so numba. The room below is qwen3_page/:

    recorder.py    notes what each step of forward does
    packed.py      unpacks the weights of a quantized folder
    contents.py    what the panels show
    page.py        makes the file of page.html, page.css, page.js and uplot/, the library that draws the charts
"""
from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C during the imports ends with one line instead of a traceback
    from qwen3_app.start import catch_ctrl_c
    catch_ctrl_c()

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from qwen3 import BUNDLED, InputError, Model, Sampling, load_model
from qwen3_app.cli import Parser
from qwen3_app.models import named_model, readable_size
from qwen3_app.start import program, release_ctrl_c
from qwen3_app.terminal import note, write
from qwen3_io.arguments import checked_whole
from qwen3_io.writing import write_whole
from qwen3_page import packed
from qwen3_page.contents import Wish, contents
from qwen3_page.page import html

__all__ = ["InputError", "Wish", "inspect", "main"]

COMPARED = "What is 417 + 385?"  # the bundled model adds with thinking and guesses without


def inspect(model: Model, wish: Wish) -> str:
    """The page, as the text of one HTML file. Raises InputError for a prompt that is too long or can't be rendered."""
    return html(contents(model, wish))


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = Parser(description="Writes one HTML file that shows a prompt on its way through a Qwen3 model.")
    add = parser.add_argument
    add("prompt", help="what to ask")
    add("--html", metavar="FILE", default="qwen3_inspect.html", help="the file to write (default: %(default)s)")
    add("--open", action="store_true", help="open it in the browser")
    add("-m", "--model", metavar="NAME", help="a folder or a model on the hub, as for qwen3.py")
    add("--offline", action="store_true", help="never use the network")
    add("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    add("--think", action=argparse.BooleanOptionalAction, help="reason before the answer, or don't")
    add("-n", "--max-tokens", type=int, metavar="N", default=32, help="longest answer (default: %(default)s)")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    for name in ("temperature", "top-p", "min-p", "repetition-penalty", "presence-penalty", "frequency-penalty"):
        add(f"--{name}", type=float, metavar="X", help="as for qwen3.py")
    add("--top-k", type=int, metavar="K", help="as for qwen3.py")
    add("--quantized", action=argparse.BooleanOptionalAction, default=True,
        help="compare with int8 and int4, computed by the fast engine (default: yes)")
    add("--compare", metavar="QUESTION", help="answer this question with thinking and without (default: with the "
        f'bundled model "{COMPARED}", with others none)')
    return parser


def wished(args: argparse.Namespace) -> Wish:
    """The options as a Wish. Raises InputError for wrong values."""
    for name, text in (("the prompt", args.prompt), ("--html", args.html), ("--compare", args.compare)):
        if text is not None and not text.strip():
            raise InputError(f"{name} is empty")
    if os.path.isfile(args.html):
        check_page(args.html)
    if args.raw and args.think is not None:
        raise InputError("--raw does not go with --think: without the chat template, nothing asks for a thought")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    sampling = {name: getattr(args, name) for name in names}
    Sampling().updated(**sampling)
    compared = COMPARED if args.compare is None and named_model(args) is None else args.compare
    return Wish(args.prompt, args.raw, args.think, checked_whole("max_tokens", args.max_tokens, 1) or 1,
                sampling, checked_whole("seed", args.seed, 0), args.quantized,
                compared)


def check_page(name: str) -> None:
    """Raises InputError for a file that isn't a page of this program: it would be overwritten."""
    try:
        with open(name, "rb") as file:
            if b"<title>Inside Qwen3</title>" not in file.read(4096):
                raise InputError(f"{name}: exists already, and is no page of this program; give another --html")
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status: 0; 1 for bad input, in one line; 2 for bad usage; 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    release_ctrl_c()
    try:
        wish = wished(args)
        model = load_model(named_model(args) or BUNDLED, packed.ENGINE, args.offline)
        # Computed while the file is open: a place that can't be written is refused first.
        write_whole(args.html, lambda file: file.write(inspect(model, wish).encode("utf-8")))
        write(f"{args.html}: {readable_size(os.path.getsize(args.html))}\n")
        if args.open and not webbrowser.open(Path(os.path.realpath(args.html)).as_uri()):
            raise InputError(f"no browser was found; open {args.html} yourself")
        return 0
    except InputError as error:
        message, status = str(error), 1
    except MemoryError:
        message, status = "not enough memory for this model", 1
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    note(f"{program()}: {message}")
    return status


if __name__ == "__main__":
    sys.exit(main())
