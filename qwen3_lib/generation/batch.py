"""Continuous batching: who runs in which step."""
from __future__ import annotations

import bisect
import os
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from qwen3 import InputError, Model, SamplingOptions, Sequence, TokenIds, brief, checked_whole
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.options import AnswerOptions, GivenOptions
from qwen3_lib.generation.steps import Run, step
from qwen3_lib.generation.prefix_cache import PrefixCache
from qwen3_lib.generation.prompt_store import PromptStore, WORTH_LOADING
from qwen3_lib.io.disk import available_memory

PROMPT_PIECE = 128  # prompt tokens in a pass: enough for the speed of long ones, and running answers wait for no more
MOST_SLOTS = 32  # beyond, arithmetic takes the time and not the weights


def generate_batch(model: Model, prompts: list[TokenIds], max_new_tokens: int | None = None, seed: int | None = None,
                   eos_token_ids: Any = None, **sampling: Unpack[SamplingOptions]) -> list[list[int]]:
    """Continues several prompts together, so that each weight is read once for all of them -> the new ids of each.

    Takes the options of `generate`; the i-th prompt draws with seed + i.
    """
    if seed is not None:
        checked_whole("seed", seed, 0)
    settings = model.sampling.updated(**sampling)
    runs = [Run(Sequence(model, prompt, max_new_tokens, None if seed is None else seed + i, eos_token_ids,
                         sampling=settings), model.engine.new_cache(model.config)) for i, prompt in enumerate(prompts)]
    while running := [run for run in runs if run.sequence.finish_reason is None]:
        for tokens in step(model, running):
            if isinstance(tokens, InputError):
                raise tokens
    return [run.sequence.token_ids for run in runs]


@dataclass
class Request:
    """A request of a Batch; `cache` is its slot's."""
    key: Hashable
    completion: Completion
    salt: str
    cache: Any = None  # a KVCache, when it runs


class Batch:
    """Answers requests together: `slots` at a time, each with room for `longest` positions, prompt and answer.

    A request that waits joins as soon as a slot is free: the slot of the conversation that it continues, or else the
    one that loses least, by its tokens and how many requests ago it was used. A prompt that begins like another one in
    a slot gets that beginning as a copy; so does one that begins like an earlier one, of which `kept` bytes are kept
    when their slots are used again. What leaves this memory goes into the `store`, and comes from there, if there is
    one. Only requests with the same salt share a beginning. Raises InputError for wrong sizes.
    """

    def __init__(self, model: Model, slots: int, longest: int | None = None, kept: int = 0,
                 store: PromptStore | None = None):
        self.model, self.store = model, store
        self.slots = [model.engine.new_cache(model.config, longest) for _ in range(checked_whole("slots", slots, 1))]
        for cache in self.slots:
            cache.reserve(cache.max_length)  # now, so that no request fails for want of memory
        self.salts = dict.fromkeys(self.slots, "")  # of the slots' latest requests
        self.joined, self.n_joined = dict.fromkeys(self.slots, 0), 0  # which request was each slot's latest
        self.longest, self.kept = self.slots[0].max_length, PrefixCache(checked_whole("kept", kept, 0), store)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they have joined

    def add(self, key: Hashable, token_ids: TokenIds, salt: str = "", tools: list[dict[str, Any]] | None = None,
            options: AnswerOptions | None = None, **given: Unpack[GivenOptions]) -> Completion:
        """A new request, under a name of its own -> its answer, which grows with each `step`.

        Iterating over the answer gives the text that has come since the last time, and doesn't wait for more. Takes
        the options of Completion but `cache`. Raises InputError for values out of range, for a key in use, and for a
        prompt that leaves no room for an answer; the answer ends where the room does.
        """
        if any(request.key == key for request in self.requests):
            raise InputError(f"there is a request {brief(repr(key))} already")
        answer = Completion(self.model, token_ids, None, tools, options=options, closed=True, **given)
        if len(answer.prompt_ids) >= self.longest:
            raise InputError(f"the prompt has {len(answer.prompt_ids)} tokens and leaves no room for an answer: a slot "
                             f"has {self.longest} positions (--context)")
        self.waiting.append(Request(key, answer, salt))
        return answer

    @property
    def requests(self) -> list[Request]:
        """Those that run or wait."""
        return [*self.running, *self.waiting]

    @property
    def idle(self) -> bool:
        """True if nothing runs or waits."""
        return not self.running and not self.waiting

    @property
    def free(self) -> int:
        """The number of slots for which no request waits."""
        return max(len(self.slots) - len(self.running) - len(self.waiting), 0)

    def cancel(self, key: Hashable) -> None:
        """Forgets a request. Raises InputError if there is none of this name."""
        if not any(request.key == key for request in self.requests):
            raise InputError(f"there is no request {brief(repr(key))}")
        self.running = [request for request in self.running if request.key != key]
        self.waiting = deque(request for request in self.waiting if request.key != key)

    def step(self) -> list[tuple[Hashable, Completion | InputError]]:
        """One pass through the model for all requests that run -> (key, answer) of those that have ended in it.

        In place of the answer of a request that fails, the error.
        """
        for request in [*self.waiting]:
            if len(self.running) < len(self.slots) and self.join(request):
                self.running.append(request)
                self.waiting.remove(request)
        ended, ready = list[tuple[Hashable, Completion | InputError]](), list[Request]()
        for request in self.running:  # one whose schema takes long is left out, and the others go on
            try:
                if request.completion.settle():
                    ready += [request] if request.completion.ended is None else []
                    ended += [(request.key, request.completion)] if request.completion.ended else []
            except InputError as error:
                ended.append((request.key, error))
        if not ready and not ended and self.running:
            time.sleep(0.002)
        outcomes = step(self.model, [run for request in ready if (run := request.completion.run)], PROMPT_PIECE)
        ended += [(request.key, outcome if isinstance(outcome, InputError) else request.completion)
                  for request, outcome in zip(ready, outcomes)
                  if isinstance(outcome, InputError) or request.completion.ended is not None]
        self.running = [request for request in self.running if request.key not in {key for key, _ in ended}]
        return ended

    def join(self, request: Request) -> bool:
        """Gives a request a slot, with a copy of what the slots have of its prompt.

        False if it is better to wait, because much of the prompt is about to be read for another request.
        """
        prompt = request.completion.prompt_ids
        found = {cache: cache.common_prefix(prompt[:-1]) if salt == request.salt else 0
                 for cache, salt in (self.salts | self.kept.salts).items()}
        source = max(found, key=found.__getitem__)
        known = max(found[source], self.store.find(prompt[:-1], request.salt)[0] if self.store else 0)
        for other in self.running:
            if other.salt != request.salt:
                continue
            n = min(len(prompt) - 1, len(other.completion.prompt_ids))
            differing = np.flatnonzero(prompt[:n] != other.completion.prompt_ids[:n])
            soon = int(differing[0]) if len(differing) else n
            if not other.completion.token_ids and soon - known >= WORTH_LOADING:
                return False
        taken = {id(other.cache) for other in self.running}
        free = [cache for cache in self.slots if id(cache) not in taken]
        self.n_joined += 1
        goes_on = source in free and source.length <= 2 * found[source] + WORTH_LOADING  # else much may be lost
        request.cache = source if goes_on else min(free, key=lambda cache: (
            cache.length - found[cache]) / (self.n_joined - self.joined[cache]))
        self.joined[request.cache] = self.n_joined
        if request.cache.length > 2 * found[request.cache]:
            self.kept.add(request.cache, self.salts[request.cache])
        request.cache.truncate(found[request.cache])
        if request.cache is not source and found[source] >= WORTH_LOADING:
            request.cache.copy_from(source, found[source])
        self.salts[request.cache] = request.salt
        request.completion.begin(request.cache, self.store, request.salt)
        return True

    def save(self) -> None:
        """Writes what is in memory into the store, the latest requests first."""
        now = time.time_ns()
        if self.store is not None:
            latest = sorted(self.slots, key=self.joined.__getitem__, reverse=True)
            for cache in [*latest, *reversed(self.kept.salts)]:
                self.store.save(cache, (self.salts | self.kept.salts)[cache], now)


def slots_in(model: Model, longest: int, memory: int | None = None) -> int:
    """How many slots of `longest` positions fit in `memory` bytes, or in half of what is free; at most MOST_SLOTS.

    Raises InputError if not even one fits.
    """
    size = model.engine.new_cache(model.config, 1).bytes(longest)
    given = free_memory() // 2 if memory is None else memory
    if given < size:
        raise InputError(f"the keys and values of {longest} positions take {size / 1e6:,.0f} MB, more than the "
                         f"{given / 1e6:,.0f} MB for them; give more memory, or fewer positions")
    return min(given // size, MOST_SLOTS)


def positions_in(model: Model, slots: int, memory: int) -> int:
    """How many positions, up to the model's context, each of `slots` can have in `memory` bytes; -1 if not even 0."""
    cache = model.engine.new_cache(model.config, 1)
    return bisect.bisect_right(range(model.config.context_length + 1), memory // slots, key=cache.bytes) - 1


def free_memory() -> int:
    """The bytes of memory that this process may still take. Raises InputError where they can't be found out."""
    try:
        if Path("/proc/meminfo").exists():
            return available_memory()
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, AttributeError, ValueError) as error:
        raise InputError("the amount of free memory is unknown on this system; give it: --memory SIZE") from error
