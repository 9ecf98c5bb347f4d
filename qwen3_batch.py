# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "prompt_toolkit>=3.0.40",
#                 "threadpoolctl>=3.5", "numba>=0.62"]
# ///
"""Many prompts answered together, with either engine: continuous batching.

    python qwen3_batch.py in.jsonl --out out.jsonl     one record per line; the same command continues a stopped job

A pass through the model reads each weight once, whether for one token or for many. So a `Batch` gives a pass the next
tokens of all requests: one token of each answer, and pieces of the prompts of new requests.

    batch = Batch(model, slots=8, longest=2048)
    for i, prompt in enumerate(prompts):
        batch.add(i, model.tokenizer.encode(prompt), max_new_tokens=100)
    while not batch.idle:
        for i, answer in batch.step():
            print(i, answer)

With the fast engine, an answer is the same to the last bit whatever runs beside it. The classes stand in
qwen3_lib/generation/batch.py.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__" and None in map(find_spec, ("qwen3", "qwen3_lib")):
    sys.exit("qwen3_batch.py: it needs qwen3.py and the folder qwen3_lib beside it")

from qwen3 import checked_whole
from qwen3_lib.app.terminal import guarded, note
from qwen3_lib.app.files import read_tools
from qwen3_lib.app.jobs import Results, description, run_job
from qwen3_lib.app.arguments import (Parser, add_answer_options, add_draft, add_engine_options, add_max_pixels,
                                     add_model_options, answer_options, checked_size, load_main, template_option)
from qwen3_lib.app.records import JobSettings, open_source, request_of_row
from qwen3_lib.generation.choir import AT_ONCE, Choir
from qwen3_lib.generation.batch import MOST_SLOTS, Batch, free_memory, generate_batch, positions_in, slots_in
from qwen3_tts import speaks

__all__ = ["MOST_SLOTS", "Batch", "free_memory", "generate_batch", "positions_in", "slots_in"]

# ---- The command line ------------------------------------------------------------------------------------------------

SLOT_TOKENS = 4096  # tokens of a prompt and its answer; each slot takes memory for all of them
BATCH_EXCLUDES = {"raw": ("system", "tools", "think", "think_budget", "chat_template_kwargs"),
                  "greedy": ("temperature",), "json_schema": ("regex", "grammar"), "regex": ("grammar",)}
PROMPTS_ONLY = """write the prompts into the records: jq -c '{id, prompt: ("Translate: " + .text)}' in.jsonl"""


def make_parser() -> Parser:
    parser = Parser(description="Answers a file of prompts. Each result is one line of JSON, written as soon as the "
                    "answer is finished. A job that was stopped goes on when you start it again.",
                    epilog="A record's own options override the options given here; these override the model's "
                    "generation_config.json.", hints={"--template": PROMPTS_ONLY, "--column": PROMPTS_ONLY})
    add = parser.add_argument_group("files").add_argument
    add("input", help='JSON lines, each with "prompt" or "messages" ("audio" for a model that hears, "speak" for one '
        "that speaks), and \"id\" and options if you like; plain text, one prompt per line; or OpenAI's batch form")
    add("--out", metavar="FILE", required=True, help="write the results to FILE; FILE.job beside it describes the job")
    add("--text", action="store_true", help="read the input as plain text, one prompt per line (default: if the first "
        'line does not begin with "{", and the name does not end in .jsonl, .ndjson or .json)')
    add("--openai", action="store_true", help="write results in the form of OpenAI's batch files")
    add("--fail-fast", action="store_true", help="stop at the first record that fails")
    add_model_options(parser)
    add = parser.add_argument_group("memory").add_argument
    add("--memory", metavar="SIZE", help="memory for keys and values, such as 4GB; with more memory, more records are "
        f"answered at the same time, at most {MOST_SLOTS} (default: half of the free memory)")
    add("--context", type=int, metavar="N", help="most tokens of a prompt and its answer together (default: "
        f"{SLOT_TOKENS}, or the model's context if that is smaller)")
    add_engine_options(parser)
    add_draft(parser.add_argument)
    add = parser.add_argument_group("what to ask").add_argument
    add("-s", "--system", metavar="TEXT", help="system prompt for records without one")
    add("--tools", metavar="FILE", help="tools that the model may call: JSON in the form of OpenAI's API")
    add_max_pixels(add)
    add("--raw", action="store_true", help="continue the prompts as plain text, without the chat template")
    add = add_answer_options(parser)
    add("--logprobs", type=int, metavar="N", help="add each token's logprob and the N most likely tokens to the result")
    return parser


def run(args: argparse.Namespace) -> int:
    """Does what the options say -> exit status: 1 if there are records, and none of them was answered."""
    given = answer_options(args).given
    if (variables := template_option(args)) is not None:
        given["chat_template_kwargs"] = variables
    tools = None if args.tools is None else read_tools(args.tools)
    settings = JobSettings(given, args.system, tools, args.think, args.raw, args.openai,
                           None if args.context is None else checked_whole("context", args.context, 2))
    folder = Path(args.input).resolve().parent
    memory, source = checked_size("--memory", args.memory), open_source(args.input, args.text)
    model = load_main(args)
    longest = min(args.context or SLOT_TOKENS, model.config.context_length)
    slots = AT_ONCE if speaks(model) else slots_in(model, longest, memory)
    with Results(args.out, description(source, model, settings), source) as journal:
        form = "plain text, one prompt per line; " if source.form == "text" else ""
        most = "" if speaks(model) else f", each of at most {longest} tokens with its answer"
        note(f"{args.input}: {form}records: {source.n_records}, {slots} at a time{most}")
        batch = Choir() if speaks(model) else Batch(model, slots, longest)
        run_job(source, journal, batch, lambda row, line: request_of_row(model, settings, row, line, folder, longest),
                args.openai, args.fail_fast)
    return 1 if journal.n_failed and not journal.n_answered else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.check(args, BATCH_EXCLUDES)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
