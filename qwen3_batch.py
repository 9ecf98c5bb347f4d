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

import contextlib
import os
import re
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from qwen3 import Completion, InputError, KVCache, Model, answer_limit
from qwen3_io.arguments import Options, TokenIds, checked_prompt, checked_whole
from qwen3_io.errors import brief

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
    beginning as a copy. Keys and values take their memory when they are filled. Raises InputError for wrong sizes.
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
        wanted = checked_whole("max_new_tokens", options.pop("max_new_tokens", None), 1)
        limit, room = answer_limit(self.model, len(prompt), wanted), self.cache.max_length - len(prompt)
        if room < 1:
            raise InputError(f"the prompt has {len(prompt)} tokens and leaves no room for an answer: a slot has "
                             f"{self.cache.max_length} positions")
        engine = replace(self.model.engine, forward=lambda *args: request.forward(*args))
        answer = Completion(replace(self.model, engine=engine), prompt, min(limit, room), **options)
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
        found = [min(self.cache.common_prefix(prompt, slot), len(prompt) - 1) for slot in range(len(self.cache.lengths))]
        source = max(range(len(found)), key=found.__getitem__)
        for other in self.running.values():
            soon = common_length(prompt[:-1], other.completion.prompt_ids)
            if not other.completion.token_ids and soon - found[source] >= WORTH_COPYING:
                return False
        free = [slot for slot in range(len(found)) if slot not in self.running]
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


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences have in common at their start."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def slots_in(model: Model, longest: int, memory: int | None = None) -> int:
    """How many slots of `longest` positions fit in `memory` bytes, or in half of what is free; at most MOST_SLOTS.

    Raises InputError if not even one fits.
    """
    k = model.engine.new_cache(model.config, 1).k
    size = 2 * k.itemsize * k.shape[0] * k.shape[2] * k.shape[4] * longest
    given = free_memory() // 2 if memory is None else memory
    if given < size:
        raise InputError(f"the keys and values of {longest} positions take {size / 1e9:.2f} GB, more than the "
                         f"{given / 1e9:.2f} GB for them; give more memory, or fewer positions")
    return min(given // size, MOST_SLOTS)


def free_memory() -> int:
    """The bytes of memory that this process may still take. Raises InputError where they can't be found out."""
    try:
        if not Path("/proc/meminfo").exists():
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        free = int(re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
    except (OSError, AttributeError, ValueError, TypeError) as error:
        raise InputError("how much memory is free can't be found out here; say how much to take: --memory") from error
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max": no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free
