# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "numba>=0.62"]
# ///
"""Many prompts answered together, with either engine.

    python qwen3_batch.py in.jsonl --out out.jsonl          a record a line; started again, it goes on where it stopped
"""
from __future__ import annotations

if __name__ == "__main__":  # so that Ctrl-C during the imports, too, ends in one line
    from qwen3_app.start import catch_ctrl_c
    catch_ctrl_c()

import argparse
import re
import sys
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from qwen3 import BUNDLED, NUMPY, Completion, Engine, InputError, Model, load_model
from qwen3_io.arguments import checked_whole
from qwen3_io.checkpoint import check_answers
from qwen3_io.errors import brief

__all__ = ["Batch", "slots_in"]


class Batch:
    """Requests answered one after the other."""

    def __init__(self, model: Model, slots: int, longest: int):
        self.model, self.slots, self.longest = model, slots, longest
        self.waiting: deque[tuple[Hashable, Completion]] = deque()

    def add(self, key: Hashable, token_ids: Any, **options: Any) -> None:
        """Adds a request. Raises InputError for bad options, and for a prompt that doesn't fit."""
        room = self.longest - len(token_ids)
        if room < 1:
            raise InputError(f"the prompt has {len(token_ids)} tokens and leaves no room for an answer: a slot has "
                             f"{self.longest} positions (--context)")
        wanted = checked_whole("max_new_tokens", options.pop("max_new_tokens", None), 1)
        limit = room if wanted is None else min(wanted, room)
        self.waiting.append((key, Completion(self.model, token_ids, max_new_tokens=limit, **options)))

    def step(self) -> list[tuple[Hashable, Completion | InputError]]:
        """Answers a request -> those that have ended."""
        key, completion = self.waiting.popleft()
        return [(key, completion.finish())]

    def cancel(self, key: Hashable) -> None:
        """Forgets a request."""
        self.waiting = deque(entry for entry in self.waiting if entry[0] != key)

    @property
    def idle(self) -> bool:
        """True if nothing waits or runs."""
        return not self.waiting

    @property
    def free(self) -> int:
        """The number of slots for which nothing waits yet."""
        return self.slots - len(self.waiting)


def slots_in(model: Model, longest: int, memory: int | None) -> int:
    """How many slots of `longest` positions fit into `memory` bytes, or into what is free."""
    return 1


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------

CONTEXT = 4096  # positions for a prompt with its answer; each slot takes memory for all of them
EXCLUDES = {"raw": ("system", "tools", "think", "think_budget"), "greedy": ("temperature",), "column": ("template",)}
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def make_parser() -> argparse.ArgumentParser:
    from qwen3_app.cli import Parser, add_answer_options
    parser = Parser(description="Answers many prompts: a JSON object a line in, one a line out, in the order in which "
                    "they are finished. Stopped in any way and started again, it goes on where it was.",
                    epilog="Options of a record come before those given here, and both before the model's defaults.")
    add = parser.add_argument_group("files").add_argument
    add("input", help='JSON lines with {"id", "prompt" or "messages", options}; a batch file of OpenAI\'s; or a table, '
        ".csv or .parquet")
    add("--out", metavar="FILE", required=True, help="where the results go, a line each; FILE.job beside it says what "
        "the job is")
    add("--openai", action="store_true", help="results in the form of OpenAI's batch files")
    add("--column", metavar="NAME", help="the column of a table that holds the prompts")
    add("--template", metavar="TEXT", help='make the prompts of columns: "Translate: {text}"')
    add("--fail-fast", action="store_true", help="stop at the first record that can't be answered")
    add = parser.add_argument_group("which model").add_argument
    add("-m", "--model", metavar="NAME", help="as for qwen3.py (default: $QWEN3_MODEL, else the small bundled model)")
    add("--offline", action="store_true", help="never use the network: only folders and the hub's cache")
    add("--adapter", metavar="DIR", help="a folder with a LoRA adapter for the model")
    add("--memory", metavar="SIZE", help="memory for keys and values, such as 4GB: it gives the number of records that "
        "are answered together (default: what is free)")
    add("--context", type=int, metavar="N", help=f"positions for a prompt with its answer (default: {CONTEXT}, or the "
        "model's context if that is less)")
    add("--fast", action="store_true", help="compute with qwen3_numba; the next three options do so, too")
    add("--quantize", choices=["int8", "int4"], help="8 or 4 bits a weight")
    add("--threads", type=int, metavar="N", help="how many threads compute (default: the CPUs that may be used)")
    add("--kv-dtype", choices=["f16", "bf16", "f32", "int8"], help="format of keys and values (default: f16)")
    add = parser.add_argument_group("what to ask").add_argument
    add("-s", "--system", metavar="TEXT", help="system prompt of records without one")
    add("--tools", metavar="FILE", help="tools that the model may call: JSON, as in OpenAI's API")
    add("--raw", action="store_true", help="continue the prompts as plain text, without the chat template")
    add = add_answer_options(parser)
    add("--logprobs", type=int, metavar="N", help="the logprob of each token and of the N most likely ones")
    parser.set_defaults(lookup=None)
    return parser


def checked_size(text: str | None) -> int | None:
    """The bytes in "4GB", "500 MB" or "2GiB"; None for None. Raises InputError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]i?b|)", text.strip().lower())
    if found is None:
        raise InputError(f"--memory must be a size such as 4GB or 500MB, not {brief(repr(text))}")
    return int(float(found[1]) * UNITS[found[2]])


def run(args: argparse.Namespace) -> int:
    """Does what the options say -> exit status."""
    from qwen3_app.cli import checked_options
    from qwen3_app.files import read_tools
    from qwen3_app.jobs import Journal, description, locked, run_job
    from qwen3_app.models import named_model
    from qwen3_app.records import Settings, open_source
    from qwen3_app.terminal import note
    options = checked_options(args) | {"logprobs": checked_whole("logprobs", args.logprobs, 0)}
    given = {name: value for name, value in options.items() if value not in (None, ())}
    template = args.template if args.column is None else "{" + args.column + "}"
    tools = None if args.tools is None else read_tools(args.tools)
    settings = Settings(given, args.system, tools, args.think, args.raw, template, args.openai,
                        checked_whole("context", args.context, 2))
    memory, source = checked_size(args.memory), open_source(args.input, template)
    with locked(args.out) as lock:
        model = load_model(named_model(args) or BUNDLED, make_engine(args), args.offline, adapter=args.adapter)
        check_answers(model.path, model.embeds)
        with Journal(args.out, lock, description(source, model, settings), source.n_rows) as journal:
            longest = min(args.context or CONTEXT, model.config.context_length)
            slots = slots_in(model, longest, memory)
            note(f"{slots} record{'s' * (slots > 1)} at a time, of at most {longest} tokens with the answer")
            run_job(model, source, journal, settings, Batch(model, slots, longest), args.fail_fast)
    return 0


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine that the options ask for. Raises InputError if numba is needed and missing."""
    if not args.fast and args.quantize is None and args.threads is None and args.kv_dtype is None:
        return NUMPY
    try:
        import qwen3_numba
    except ImportError as error:  # numba is an extra that a plain installation leaves out
        raise InputError(str(error)) from error
    return qwen3_numba.engine(args.quantize, args.threads, args.kv_dtype or "f16")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    from qwen3_app.cli import guarded, shown
    parser = make_parser()
    args = parser.parse_args(argv)
    for option, others in EXCLUDES.items():
        for other in others:
            if all(getattr(args, name) != parser.get_default(name) for name in (option, other)):
                parser.error(f"--{option} does not go with {shown(other, args)}")
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
