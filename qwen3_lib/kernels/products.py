"""The products' machine code: which functions a pass needs, and in which way each is fastest on this machine.

A product may be computed in several ways, see vectors.ways: the numbers are the same, bit for bit, and which way is the
fastest depends on the CPU. Nothing is measured apart from the work: passes take turns in their ways, their times say
which way is the fastest, and that is kept beside the machine code.
"""
from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from qwen3_lib.io.errors import InputError
from qwen3_lib.io.writing import write_whole
from qwen3_lib.kernels.build import LAYERS, address_of, make_kernels, place, read_code
from qwen3_lib.kernels.cpu import AVX512
from qwen3_lib.kernels.layout import (FORMATS, KEYS, PRODUCT, PROMPT, ROUNDED, TRANSPOSED, TRANSPOSES, VALUES,
                                      VECTORS, WIDE, WIDENS, is_packed)
from qwen3_lib.kernels.objects import compile_product
from qwen3_lib.kernels.vectors import AT_ONCE, ATTENTION, MANY, ONE, Way, ways, widened_form

# ---- Which functions a pass needs ------------------------------------------------------------------------------------

Needs = tuple[tuple[int, int], ...]  # (format, number of vectors) of products
Taken = tuple[tuple[int, int, Way], ...]  # (format, count, way) where another way than the default is taken


@lru_cache(64)
def functions_for(needs: Needs, queries: Needs = (), taken: Taken = ()) -> np.ndarray:
    """The addresses of the functions for products with weights and, in `queries`, for attention to a cache.

    -> int64 [5, formats, 3, VECTORS + 1]: [PRODUCT, format, 0, n] multiplies n vectors with rows of a format if all
    vectors are multiplied at once, [.., 1, n] if there are more; likewise for attention [KEYS, ...], and
    [VALUES, format, 0, n] of weighted_rows. Where n is 0, the most vectors that are multiplied at once.
    [WIDENS, format, 0, 0] makes a block of a format its widened_form, which [PRODUCT, format, 2, n] multiplies with
    n of PROMPT vectors or more; it is 0 where that's not needed. [TRANSPOSES, format, 0, 0] transposes keys, which
    [KEYS, format, 2, n] multiplies with n of TRANSPOSED queries or more: that pays with the registers of AVX-512.
    """
    table, others = np.zeros((5, len(FORMATS), 3, VECTORS + 1), np.int64), {(*key,): way for *key, way in taken}
    for form, n in needs:
        known = [others.get((form, count), ways(form, count)[0]) for count in (ONE, AT_ONCE, MANY)]
        if n >= PROMPT and (wide := widened_form(form)) != form:
            way = ways(wide, MANY)[0]
            table[WIDENS, form, 0, 0] = function("widened", form, 1, way)
            table[PRODUCT, form, 2, 0] = way.vectors
            for size in sizes(n, way.vectors):
                table[PRODUCT, form, 2, size] = function("packed_product", wide, size, way)
        else:
            fill(table[PRODUCT, form], form, n, known)
    for form, n in queries:
        way = others.get((form, ATTENTION), ways(form, ATTENTION)[0])
        known = [ways(form, count)[0] for count in (ONE, AT_ONCE, MANY)]
        if form == ROUNDED and AVX512 and n >= TRANSPOSED:
            table[TRANSPOSES, form, 0, 0] = function("transposed_keys", form, 1, known[ONE])
            table[KEYS, form, 2, 0], found = VECTORS, sizes(n, VECTORS)
            for size in found:
                table[KEYS, form, 2, size] = function("transposed_product", form, size, known[AT_ONCE])
        else:
            known = [each._replace(prefetches=way.prefetches) for each in known]
            found = fill(table[KEYS, form], form, n, known)
        for size in found:
            kind = "weighted_pairs" if form == ROUNDED and AVX512 else "weighted_rows"
            table[VALUES, form, 0, size] = function(kind, form, size, way)
    return table


def fill(functions: np.ndarray, form: int, n: int, chosen: list[Way]) -> set[int]:
    """Writes the functions for n vectors into a part of a table, in the ways chosen for ONE, AT_ONCE and MANY.

    -> the numbers of vectors that they multiply at once.
    """
    many = int(n > chosen[AT_ONCE].vectors)
    found = sizes(n, chosen[AT_ONCE + many].vectors)
    for size in found:
        way = chosen[MANY if many else ONE if size == 1 else AT_ONCE]
        functions[many, size] = function("packed_product" if is_packed(form) else "float_product", form, size, way)
    functions[:2, 0] = chosen[AT_ONCE].vectors, chosen[MANY].vectors
    return found


def sizes(n: int, most: int) -> set[int]:
    """How many vectors are multiplied at once if n are shared evenly, in as few parts as possible."""
    tiles = -(-n // most)
    return {n // tiles, -(-n // tiles)}


@cache
def function(kind: str, form: int, n: int, way: Way) -> int:
    """The address of a product's function."""
    name = f"{kind}_{FORMATS[form].name}_{n}_{way.rows}_{way.prefetches}"
    return address_of(name, partial(compile_product, name, kind, form, n, way))


def any_number(form: int, most: int) -> Needs:
    """What is needed for any number of vectors up to the most: larger ones than here need no other functions."""
    return tuple((form, n) for n in (*range(1, 2 * VECTORS + 1), PROMPT) if n <= most)


def compile_all() -> Path:
    """Compiles all that any model needs -> the folder where it is kept. Raises InputError if it can't be kept."""
    names = (*LAYERS, "quantize_block", "pack_block")
    make_kernels(*names)
    for form in range(WIDE):
        needs = any_number(form, PROMPT)
        functions_for(needs, () if is_packed(form) else (*needs, (form, TRANSPOSED + 1)), ways_taken((form,), None))
    folder, made_from = place()
    if folder is None or any(read_code(folder / f"{name}.o", made_from) is None for name in names):
        raise InputError(f"the kernels can't be kept: {folder or 'NUMBA_CACHE_DIR'} must be a folder that belongs to "
                         "you and that only you can write to")
    return folder


# ---- Which way is the fastest: learned from the passes of the answers ------------------------------------------------

ENOUGH = 16  # rounds, each with a pass in each way: then a choice is settled, and rounds become rare
RARELY = 512  # passes from one such round to the next
FIRST = 3  # rounds of all ways: one pass that had to wait doesn't decide
SPREAD = 0.3  # a way that is slower by this share, divided by the number of rounds, has no part in the next one
MARGIN = 0.01  # a way must be so much faster than the default to be chosen
LONG = 64  # vectors: a shorter prompt isn't worth the compilation of another function
FAR = 8  # blocks of positions: attention to fewer of them takes too little of a pass
COUNTS = ONE, AT_ONCE, MANY, ATTENTION


@dataclass
class Choice:
    """What is known about the ways of one product.

    Ways take turns, so that the load of the machine and the length of the context are the same for all. `seen` are each
    way's latest log(its time / the default's). Their median counts: now and then a pass waits for a core.
    """
    seen: list[list[float]]
    rounds: int = 0
    best: int = 0
    passes: int = 0  # since the last round
    times: dict[Hashable, dict[int, float]] = field(default_factory=dict)  # of unfinished rounds: place, way -> log(s)

    def slower(self, way: int) -> float:
        """log(its time / the default's)."""
        return median(self.seen[way]) if self.seen[way] else 0.0

    def in_turn(self) -> list[int]:
        """The ways of a round: all at first, and when rounds are rare; else the ones that may still be the best."""
        limit = SPREAD / self.rounds if FIRST <= self.rounds < ENOUGH else math.inf
        return [i for i in range(len(self.seen)) if self.slower(i) - self.slower(self.best) <= limit]

    def next_way(self, place: Hashable) -> int | None:
        """The way that the next pass tries; None if no round is due. Passes of one place take the same time."""
        self.passes += 1
        if self.rounds == ENOUGH and self.passes < RARELY:
            return None
        if place not in self.times and len(self.times) >= VECTORS:
            self.times.clear()
        tried, turns = self.times.setdefault(place, {}), self.in_turn()
        first = self.rounds % len(turns)
        return next((i for i in turns[first:] + turns[:first] if i not in tried), self.best)

    def note(self, place: Hashable, way: int, seconds: float) -> None:
        """Takes in the time of a pass. When its round is complete, the medians follow, and perhaps the best way."""
        times = self.times.setdefault(place, {})
        times[way] = math.log(seconds)
        if not {*times} >= {*self.in_turn()}:
            return
        del self.times[place]
        default = median([time - self.slower(i) for i, time in times.items() if self.seen[i] or not any(self.seen)])
        for i, time in times.items():
            self.seen[i] = [*self.seen[i][1 - ENOUGH:], round(time - default, 4)]
        self.best = min((i for i in range(len(self.seen)) if self.seen[i]),
                        key=lambda i: self.slower(i) + (MARGIN if i else 0))
        self.rounds, self.passes = min(self.rounds + 1, ENOUGH), 0
        if len(self.in_turn()) == 1:
            self.rounds = ENOUGH


class Trial(NamedTuple):
    """A pass in a way that may not be the best one."""
    form: int
    count: int
    way: int
    place: Hashable

    def note(self, seconds: float) -> None:
        choices()[self.form, self.count].note(self.place, self.way, seconds)
        keep_at_exit()


def next_trial(forms: Iterable[int], cached: int, n: int, n_blocks: int, layers: Hashable) -> Trial | None:
    """What the next pass of n tokens tries, if anything: a way of the products with weights in these formats, or of
    attention to n_blocks of a cache in the format `cached`. Passes through equal `layers` take the same time.
    """
    keys = [(cached, ATTENTION)] * (FAR * n <= n_blocks and n <= VECTORS)
    for form in forms:
        count = ONE if n == 1 else AT_ONCE if n <= ways(form, AT_ONCE)[0].vectors else MANY
        keys += [(form, count)] * (count != MANY or n >= LONG and widened_form(form) == form)
    for form, count in keys if can_keep() else ():
        place = n, n_blocks, layers
        if (way := choices()[form, count].next_way(place)) is not None:
            return Trial(form, count, way, place)
    return None


def ways_taken(forms: Iterable[int], trial: Trial | None) -> Taken:
    """The (format, count, way) of a pass, where they aren't the defaults."""
    numbers = {(form, count): choices()[form, count].best for form in forms for count in COUNTS}
    if trial is not None:
        numbers[trial.form, trial.count] = trial.way
    return tuple((*key, ways(*key)[number]) for key, number in numbers.items() if number)


@cache
def can_keep() -> bool:
    """Whether choices can be kept; where they can't, each run would begin to learn."""
    folder, _ = place()
    return folder is not None and os.access(folder, os.W_OK)


@cache
def choices() -> dict[tuple[int, int], Choice]:
    """The choice for each (format, count), as an earlier process has kept it."""
    known = {(form, count): len(ways(form, count)) for form in range(len(FORMATS)) for count in COUNTS}
    found = {key: Choice([[] for _ in range(n)]) for key, n in known.items()}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        folder, made_from = place()
        kept = json.loads((folder / "choices.json").read_text()) if folder else {}
        for key, n in known.items() if kept["made from"] == made_from else ():
            seen, rounds, best = kept.get(name_of(*key)) or ([], 0, 0)
            if len(seen) == n and best in range(n) and rounds in range(ENOUGH + 1) and max(map(len, seen)) <= ENOUGH \
                    and all(math.isfinite(x) for some in seen for x in some):
                found[key] = Choice(seen, rounds, best)
    return found


def name_of(form: int, count: int) -> str:
    return f"{FORMATS[form].name}, {('one vector', 'a few', 'many', 'attention')[count]}"


@cache
def keep_at_exit() -> None:
    """A process that has learned something writes it when it ends."""
    atexit.register(keep_choices)


def keep_choices() -> None:
    folder, made_from = place()
    kept = {name_of(*key): (choice.seen, choice.rounds, choice.best)
            for key, choice in choices().items() if choice.rounds}
    text = json.dumps(kept | {"made from": made_from})
    with contextlib.suppress(InputError):
        if folder is not None:
            write_whole(folder / "choices.json", lambda out: out.write(text.encode()), 0o644)
