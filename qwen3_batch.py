# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "numba>=0.62"]
# ///
"""Many prompts answered together, with either engine: continuous batching.

    python qwen3_batch.py in.jsonl --out out.jsonl          a record a line; started again, it goes on where it stopped

A pass through the model reads each weight once, whether for one token or for many. So a `Batch` gives a pass the next
tokens of all its requests: one token of each answer, and pieces of the prompts of those that have just joined.

    batch = Batch(model, slots=8, longest=2048)
    for i, prompt in enumerate(prompts):
        batch.add(i, model.tokenizer.encode(prompt), max_new_tokens=100)
    while not batch.idle:
        for i, answer in batch.step():
            print(i, answer)

With the fast engine, an answer is the same to the last bit whatever runs beside it.
"""
from __future__ import annotations

if __name__ == "__main__":  # so that Ctrl-C during the imports, too, ends in one line
    from qwen3_app.start import catch_ctrl_c
    catch_ctrl_c()

import argparse
import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from qwen3 import BUNDLED, NUMPY, Completion, Engine, InputError, KVCache, Model, answer_limit, load_model
from qwen3_io.arguments import Options, TokenIds, checked_prompt, checked_whole, common_prefix
from qwen3_io.checkpoint import check_answers
from qwen3_io.errors import brief, counted

__all__ = ["Batch", "slots_in"]

PIECE = 128  # prompt tokens in a pass: enough for the speed of long ones, and running answers wait for no more
WORTH_COPYING = 16  # about as many tokens are computed in the time that it takes to read the weights once
MOST_SLOTS = 32  # beyond, arithmetic takes the time and not the weights


@dataclass
class Request:
    """A request of a Batch: `slot` is its sequence of the cache; `computed` counts its tokens that are there."""
    key: Hashable
    completion: Completion
    slot: int = -1
    computed: int = 0
    logits: np.ndarray | None = None  # after the last token, until a token is drawn from them

    def forward(self, model: Model, token_ids: TokenIds, cache: KVCache) -> np.ndarray:
        """Gives the completion, in place of the model's forward, the logits that the batch has computed."""
        if self.logits is None:
            raise InputError("this answer belongs to a Batch: call the batch's step()")
        logits, self.logits = self.logits, None
        return logits

    @property
    def new(self) -> Sequence[int] | np.ndarray:
        """The tokens to be computed next: what is left of the prompt, or the last token drawn."""
        prompt, drawn = self.completion.prompt_ids, self.completion.token_ids
        return drawn[-1:] if drawn else prompt[self.computed:]


class Batch:
    """Answers requests together: `slots` at a time, each with room for `longest` positions, prompt and answer.

    A request that waits joins as soon as a slot is free. A prompt that begins like another one in the cache gets that
    beginning as a copy. Raises InputError for wrong sizes.
    """

    def __init__(self, model: Model, slots: int, longest: int | None = None):
        self.model = model
        self.cache = model.engine.new_cache(model.config, longest, slots)
        self.cache.reserve(np.zeros(self.cache.max_length, np.int64))
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # slot -> request, in the order in which they have joined

    def add(self, key: Hashable, token_ids: Sequence[int] | np.ndarray, **options: Unpack[Options]) -> Completion:
        """A new request, under a name of its own -> its answer, which grows with each `step`.

        Takes the options of Completion but `cache` and `lookup`. Raises InputError for values out of range, for a key
        that is in use, and for a prompt that leaves no room for an answer; the answer ends where the room does.
        """
        if any(request.key == key for request in self.requests):
            raise InputError(f"there is a request {brief(repr(key))} already")
        if wrong := {"cache", "lookup"} & {name for name, value in options.items() if value}:
            raise InputError(f"a request of a batch has no option {wrong.pop()}")
        prompt = checked_prompt(token_ids, self.model.config.vocab_size)
        limit = answer_limit(self.model, len(prompt), options.get("max_new_tokens"))
        room = self.cache.max_length - len(prompt)
        if room < 1:
            raise InputError(f"the prompt has {len(prompt)} tokens and leaves no room for an answer: a slot has "
                             f"{self.cache.max_length} positions (--context)")
        options["max_new_tokens"] = min(limit, room)
        engine = replace(self.model.engine, forward=lambda *args: request.forward(*args))
        answer = Completion(replace(self.model, engine=engine), prompt, **options)
        request = Request(key, answer)
        self.waiting.append(request)
        return answer

    @property
    def requests(self) -> list[Request]:
        """Those that run or wait."""
        return [*self.running.values(), *self.waiting]

    @property
    def idle(self) -> bool:
        """True if nothing runs or waits."""
        return not self.running and not self.waiting

    @property
    def free(self) -> int:
        """The number of slots for which no request waits."""
        return max(len(self.cache.lengths) - len(self.running) - len(self.waiting), 0)

    def cancel(self, key: Hashable) -> None:
        """Forgets a request. Raises InputError if there is none of this name."""
        for request in self.requests:
            if request.key == key:
                self.running.pop(request.slot, None)
                self.waiting = deque(other for other in self.waiting if other is not request)
                return
        raise InputError(f"there is no request {brief(repr(key))}")

    def step(self) -> list[tuple[Hashable, Completion | InputError]]:
        """One pass through the model for all requests that run -> (key, answer) of those that have ended in it.

        In place of the answer of a request that fails, the error.
        """
        new, ended = self.next_tokens(), []
        slots = [slot for slot, ids in enumerate(new) if len(ids)]
        for slot, logits in zip(slots, self.model.engine.forward(self.model, new, self.cache) if slots else []):
            request = self.running[slot]
            request.computed = int(self.cache.lengths[slot])
            if request.computed < len(request.completion.prompt_ids):
                continue  # more pieces of the prompt are to come
            request.logits = logits
            if (result := answered(request)) is not None:
                ended.append((request.key, result))
                del self.running[slot]
        return ended

    def next_tokens(self) -> list[Sequence[int] | np.ndarray]:
        """The tokens of the next pass, for each slot; requests that wait join where there is room."""
        new: list[Sequence[int] | np.ndarray] = [[] for _ in self.cache.lengths]
        room = PIECE
        for slot, request in self.running.items():
            self.cache.truncate(request.computed, slot)  # what an interrupted step has left
            reads = not request.completion.token_ids
            new[slot] = request.new[:room if reads else 1]
            room -= len(new[slot]) if reads else 0
        while room and self.waiting and len(self.running) < len(new) and self.join(self.waiting[0]):
            request = self.waiting.popleft()
            new[request.slot] = request.new[:room]
            room -= len(new[request.slot])
        return new

    def join(self, request: Request) -> bool:
        """Gives a request a slot, with a copy of what the cache has of its prompt.

        False if it is better to wait, because much of the prompt is about to be read for another request.
        """
        prompt = request.completion.prompt_ids
        slots = range(len(self.cache.lengths))
        found = [min(self.cache.common_prefix(prompt, slot), len(prompt) - 1) for slot in slots]
        source = max(slots, key=found.__getitem__)
        for other in self.running.values():
            soon = common_prefix(prompt[:-1], other.completion.prompt_ids)
            if not other.completion.token_ids and soon - found[source] >= WORTH_COPYING:
                return False
        free = [slot for slot in slots if slot not in self.running]
        request.slot = source if source in free else min(free, key=self.cache.lengths.__getitem__)
        if request.slot == source:
            self.cache.truncate(found[source], source)
        elif found[source] >= WORTH_COPYING:
            self.cache.copy(request.slot, self.cache, source, found[source])
        else:
            self.cache.truncate(0, request.slot)
        request.computed = request.completion.cached_tokens = int(self.cache.lengths[request.slot])
        self.running[request.slot] = request
        return True


def answered(request: Request) -> Completion | InputError | None:
    """Draws a token from the request's logits -> the answer if it ends with it, or the error; else None."""
    answer = request.completion
    try:
        while request.logits is not None:
            answer.step()
        return None if answer.finish_reason is None else answer.finish()
    except StopIteration:
        return answer
    except InputError as error:
        return error


def slots_in(model: Model, longest: int, memory: int | None = None) -> int:
    """How many slots of `longest` positions fit in `memory` bytes, or in half of what is free; at most MOST_SLOTS.

    Raises InputError if not even one fits.
    """
    k = model.engine.new_cache(model.config, 1).k
    size = 2 * k.itemsize * k.shape[0] * k.shape[2] * k.shape[4] * longest
    given = free_memory() // 2 if memory is None else memory
    if given < size:
        raise InputError(f"the keys and values of {longest} positions take {size / 1e6:,.0f} MB, more than the "
                         f"{given / 1e6:,.0f} MB for them; give more memory, or fewer positions")
    return min(given // size, MOST_SLOTS)


def free_memory() -> int:
    """The bytes of memory that this process may still take. Raises InputError where they can't be found out."""
    try:
        if not Path("/proc/meminfo").exists():
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].removesuffix("kB")) * 1024
    except (OSError, AttributeError, ValueError, KeyError) as error:
        raise InputError("how much memory is free can't be found out here; say how much to take: --memory") from error
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max": no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


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
        longest = min(args.context or CONTEXT, model.config.context_length)
        slots = slots_in(model, longest, memory)
        with Journal(args.out, lock, description(source, model, settings), source.n_rows) as journal:
            note(f"{counted(slots, 'record')} at a time, of at most {longest} tokens with the answer")
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
