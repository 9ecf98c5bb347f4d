"""The products' machine code: which functions a pass needs, and in which way each is fastest on this machine.

A product may be computed in several ways, see vectors.ways: the numbers are the same, bit for bit, and which way is the
fastest depends on the CPU. Each starts with a stated default, so that the first answer waits for nothing; `tune` times
the ways on all threads at once and keeps the choice beside the machine code.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qwen3_lib.io.errors import InputError
from qwen3_lib.io.writing import write_whole
from qwen3_lib.kernels.build import LAYERS, address_of, kernel, make_kernels, place, read_code
from qwen3_lib.kernels.layout import (FORMATS, GROUP, KEYS, KV8, PANEL, PRODUCT, VALUES, VECTORS, Job, Weight,
                                      is_packed, own_space, packed_shape, padded, table, vector_size)
from qwen3_lib.kernels.memory import aligned, floats
from qwen3_lib.kernels.team import Team
from qwen3_lib.kernels.vectors import AT_ONCE, MANY, ONE, Way, compile_product, ways

SHAPE = (3, len(FORMATS), 2, VECTORS + 1)
# Addresses: of the functions that multiply n vectors with rows of a format, TABLE[PRODUCT, format, 0, n] if all vectors
# are multiplied at once, [.., 1, n] if there are more; likewise for attention [KEYS, ...], and [VALUES, format, 0, n] of
# weighted_rows. Where n is 0, the most vectors that are multiplied at once. int64
TABLE = np.zeros(SHAPE, np.int64)
COUNTS = {ONE: "1 vector", AT_ONCE: "a few vectors", MANY: "many vectors"}

# ---- Which functions a pass needs ------------------------------------------------------------------------------------

@cache
def prepare(form: int, n: int) -> None:
    """Makes the functions ready that multiply n vectors with weights of a format."""
    fill(TABLE[PRODUCT, form], form, n, [chosen_way(form, count) for count in COUNTS])


@cache
def prepare_all(form: int, most: int) -> None:
    """prepare for any number of vectors up to the most."""
    for n in range(1, most + 1):
        prepare(form, n)


@cache
def prepare_attention(form: int, n: int) -> None:
    """Makes the functions ready that multiply n queries with a cache of this format, whose rows are short."""
    asks = chosen_way(form, AT_ONCE).asks
    known = [ways(form, count)[0]._replace(asks=asks) for count in COUNTS]
    for size in fill(TABLE[KEYS, form], form, n, known):
        TABLE[VALUES, form, 0, size] = function("weighted_rows", form, size, known[AT_ONCE])


def fill(functions: np.ndarray, form: int, n: int, chosen: list[Way]) -> set[int]:
    """Writes the functions for n vectors into a part of a table, in the ways chosen for ONE, AT_ONCE and MANY.

    -> the numbers of vectors that they multiply at once.
    """
    many = int(n > chosen[AT_ONCE].vectors)
    tiles = -(-n // chosen[AT_ONCE + many].vectors)
    sizes = {n // tiles, -(-n // tiles)}
    for size in sizes:
        way = chosen[MANY if many else ONE if size == 1 else AT_ONCE]
        functions[many, size] = function("packed_product" if is_packed(form) else "float_product", form, size, way)
    functions[:, 0] = chosen[AT_ONCE].vectors, chosen[MANY].vectors  # last: another thread may be computing
    return sizes


def adopt(form: int) -> None:
    """Takes newly chosen ways into use: a pass that runs meanwhile finds a function whichever way it has begun in."""
    new, functions = np.zeros(SHAPE[2:], np.int64), TABLE[PRODUCT, form]
    for n in range(1, 2 * VECTORS + 1):
        fill(new, form, n, [chosen_way(form, count) for count in COUNTS])
    functions[:, 1:] = np.where(new[:, 1:], new[:, 1:], functions[:, 1:])
    functions[:, 0] = new[:, 0]


def function(kind: str, form: int, n: int, way: Way) -> int:
    """The address of a product's function."""
    name = f"{kind}_{FORMATS[form].name}_{n}_{way.rows}{'_asks' if way.asks else ''}"
    return address_of(name, partial(compile_product, name, kind, form, n, way))


def compile_all() -> Path:
    """Compiles all that any model needs -> the folder where it is kept. Raises InputError if it can't be kept."""
    names = (*LAYERS, "quantize_block", "pack_block", "multiply")
    make_kernels(*names)
    for form in range(len(FORMATS)):
        prepare_all(form, 2 * VECTORS)
        for n in () if is_packed(form) else range(1, 2 * VECTORS + 1):
            prepare_attention(form, n)
    folder, made_from = place()
    if folder is None or any(read_code(folder / f"{name}.o", made_from) is None for name in names):
        raise InputError(f"the kernels can't be kept: {folder or 'NUMBA_CACHE_DIR'} must be a folder that belongs to "
                         "you and that only you can write to")
    return folder


# ---- Which way is the fastest ----------------------------------------------------------------------------------------

MARGIN = 1.03  # a way must be so much faster than the default to be chosen
AGREEING = 2  # measurements in a row must choose the same: then nothing is measured any more


class Measured(NamedTuple):
    """The best of several timings of a way."""
    form: int
    count: int
    way: Way
    bytes_: float  # of weights a second
    operations: float  # a second
    chosen: bool

    def __str__(self) -> str:
        way = f"{self.way.rows:2} rows x {self.way.vectors} together, {'with' if self.way.asks else 'no'} prefetch"
        return (f"{FORMATS[self.form].name:5} {COUNTS[self.count]:13} {way:32} {self.bytes_ / 1e9:6.1f} GB/s "
                f"{self.operations / 1e9:7.1f} GFLOP/s{'  <- chosen' * self.chosen}")


def choices_file() -> Path | None:
    folder, _ = place()
    return folder and folder / "choices.json"


@cache
def choices() -> dict[str, list[int]]:
    """"bf16 0" -> [the number of the chosen way, how many measurements in a row chose it]; empty if nothing is kept."""
    with contextlib.suppress(OSError, ValueError):
        file = choices_file()
        kept = json.loads(file.read_text()) if file else None
        if isinstance(kept, dict) and kept.pop("made from", None) == place()[1]:
            return {key: value for key, value in kept.items()
                    if isinstance(value, list) and [type(x) for x in value] == [int, int]}
    return {}


def chosen_way(form: int, count: int) -> Way:
    known = ways(form, count)
    number = choices().get(f"{FORMATS[form].name} {count}", [0, 0])[0]
    return known[number if 0 <= number < len(known) else 0]


def is_settled(forms: Iterable[int]) -> bool:
    """Whether nothing is left to measure for these formats, or a measurement couldn't be kept."""
    file = choices_file()
    if file is None or not os.access(file.parent, os.W_OK):
        return True
    return all(choices().get(f"{FORMATS[form].name} {count}", [0, 0])[1] >= AGREEING
               for form in forms if form != KV8 for count in COUNTS)


def tune(forms: Iterable[int], team: Team, columns: int = 1024) -> Iterator[Measured]:
    """Times all ways for these formats, chooses the fastest and keeps the choice -> the measurements.

    A busy machine may mislead one measurement: so the best of several rounds counts, a way that is not the default must
    be MARGIN faster, and a choice is measured again until AGREEING runs in a row have chosen the same.
    """
    kept, forms = dict(choices()), sorted({*forms} - {KV8})
    for form in forms:
        for count in COUNTS:
            known = ways(form, count)
            speeds = measured(form, count, known, team, columns)
            best = max(range(len(known)), key=lambda i: speeds[i][0])
            number = best if speeds[best][0] > MARGIN * speeds[0][0] else 0
            key = f"{FORMATS[form].name} {count}"
            before, agreeing = kept.get(key, [-1, 0])
            kept[key] = [number, agreeing + 1 if number == before else 1]
            yield from (Measured(form, count, way, *speeds[i], i == number) for i, way in enumerate(known))
    if (file := choices_file()) is not None:
        text = json.dumps(kept | {"made from": place()[1]})
        with contextlib.suppress(OSError, InputError):
            write_whole(file, lambda out: out.write(text.encode()), 0o644)
    choices.cache_clear()
    for form in forms:
        adopt(form)


def measured(form: int, count: int, known: list[Way], team: Team, columns: int) -> list[tuple[float, float]]:
    """(bytes of weights, operations) a second of each way: the best of interleaved rounds, on all threads at once.

    The weights are read from memory, not from a cache: there are twice as many as the last cache holds.
    """
    n = {ONE: 1, AT_ONCE: known[0].vectors, MANY: 48}[count]  # 48: whole tiles of 8, 6, 4, 3 or 2
    size = packed_shape(PANEL, columns, form)[1] // PANEL if is_packed(form) else int(columns * FORMATS[form].size)
    n_rows = padded((16 << 20 if count == MANY else max(64 << 20, 2 * last_cache())) // size, PANEL)
    weights = aligned((n_rows, size))
    weights[:] = 0x3F  # a number near 1 in each format
    width = padded(columns, 2 * GROUP)
    weight = Weight(weights.ctypes.data, size * (PANEL if is_packed(form) else 1), form, n_rows, columns)
    x, packed, out = floats(n, width), aligned((n, vector_size(width))), floats(n, padded(n_rows, PANEL))
    own, tables = floats(team.n_threads, own_space(0, 0, width)), []
    for way in known:
        products = np.zeros(SHAPE, np.int64)
        fill(products[PRODUCT, form], form, n, [way] * 3)
        tables.append(products)
    best = [np.inf] * len(known)
    for _ in range(8):
        for i, products in enumerate(tables):
            arrays = np.array(weight), x, packed, out, own, products
            addresses = table(arrays)
            start = time.perf_counter()
            team.run(kernel("multiply"), np.array(Job(0, 0, 0, 0, addresses.ctypes.data, 0)), arrays, addresses)
            best[i] = min(best[i], time.perf_counter() - start)
    return [(weights.size / seconds, 2 * n * n_rows * columns / seconds) for seconds in best]


def last_cache() -> int:
    """The bytes of the CPU's last cache; 32 MiB where the system doesn't say."""
    sizes = [32 << 20]
    with contextlib.suppress(OSError, ValueError):
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            if found := re.fullmatch(r"(\d+)([KM])", file.read_text().strip()):
                sizes.append(int(found[1]) << (10 if found[2] == "K" else 20))
    return max(sizes)
