"""Which way of multiplying one vector is the fastest on this CPU: measured once, and kept beside its machine code.

No feature of a CPU tells how rows are prefetched best, and up to a third of the speed of decoding depends on it: see
docs/speed.md. All ways give the same bits. While an answer runs, nothing is measured.
"""
from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from qwen3_lib.io.cores import available_cpus
from qwen3_lib.io.errors import InputError
from qwen3_lib.kernels.build import can_keep, code_place, function, keep_code, product_kind, read_code, turn
from qwen3_lib.kernels.layout import FORMATS, INT8, JOB, KV8, PANEL, STORABLE, is_packed, packed_shape, vector_size
from qwen3_lib.kernels.memory import aligned, floats
from qwen3_lib.kernels.team import Team, team_of
from qwen3_lib.kernels.vectors import ONE, Way, way_of

SECONDS, ROUNDS = 0.1, 3  # for a format: as many rounds as fit, and these at least
GAIN = 1.03  # a way replaces the default if it is more than so many times as fast
COLUMNS = 2048  # of the rows: between those of a Qwen3-0.6B and of a Qwen3-8B
UNKNOWN_CACHE, MOST_BYTES = 2**25, 2**28
Ways = tuple[tuple[int, Way], ...]  # the ways of formats that don't take the default
# A thread's CPU time, so that other programs count little; Windows counts it in steps of 16 ms.
clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter


def tried_ways(form: int) -> list[Way]:
    """The ways that are tried, the default first.

    Rows of floats have one chain of sums each, whose latency some CPUs wait for: two or four rows have more chains.
    """
    default = way_of(form, ONE)
    ways = [default._replace(prefetches=level) for level in (1, 2, 0)]
    ways += [] if is_packed(form) else [Way(2, 1, 1), Way(4, 1, 0)]
    return [default, *(way for way in ways if way != default)]


def last_cache() -> int:
    """The bytes of the last caches of this process's CPUs, as Linux has them; smaller weights needn't be prefetched."""
    with contextlib.suppress(OSError, ValueError):
        last = max(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
        n_sharing = int((last / "shared_cpu_map").read_text().replace(",", ""), 16).bit_count()
        size = int((last / "size").read_text().strip().removesuffix("K")) * 1024
        return size * -(-available_cpus() // n_sharing)
    return UNKNOWN_CACHE


def ways_for(sizes: Mapping[int, int]) -> Ways:
    """The ways for weights of {format: bytes}, if they don't fit into the last cache; measures what isn't kept yet.

    Where nothing can be kept, nothing is measured, and all formats take the default.
    """
    cache = last_cache()
    found = {form: kept_way(form) for form, size in sorted(sizes.items()) if size > cache}
    if None in found.values() and can_keep(code_place()[0]):
        with turn(code_place()[0]):  # then look again
            found = {form: kept_way(form) for form in found}
            measure(form for form, way in found.items() if way is None)
        found = {form: kept_way(form) for form in found}
    return tuple((form, way) for form, way in found.items() if way not in (None, way_of(form, ONE)))


def place_of(form: int) -> tuple[Path, str]:
    """(the file of a format's way, what the way depends on)."""
    folder, made_from = code_place()
    return (folder or Path()) / f"way_{FORMATS[form].name}", f"{made_from} {last_cache()}"


def kept_way(form: int) -> Way | None:
    text = read_code(*place_of(form)) if code_place()[0] else None
    return None if text is None else Way(*map(int, text.split()))


def measure(forms: Iterable[int] = tuple(form for form in STORABLE if form != KV8)) -> dict[int, dict[Way, float]]:
    """Measures the ways of formats and keeps the fastest ones -> {format: {way: GB/s}}."""
    team, found = team_of(available_cpus()), dict[int, dict[Way, float]]()
    space = aligned((min(2 * last_cache(), MOST_BYTES) if (forms := [*forms]) else 0,))
    team.run(lambda _, rank: space[rank * len(space) // team.n_threads:][:-(-len(space) // team.n_threads)].fill(1),
             np.zeros(1, JOB))  # else the system would give one page of zeros for all, which the first cache holds
    for form in forms:
        ways = tried_ways(form)
        found[form] = dict(zip(ways, speeds(form, ways, team, space)))
        keep_code(*place_of(form), " ".join(map(str, fastest(found[form]))).encode())
    return found


def speeds(form: int, ways: list[Way], team: Team, space: np.ndarray) -> list[float]:
    """GB/s of a team that multiplies a vector with the space's bytes as weights, in each way; medians of turns."""
    stride = packed_shape(PANEL, COLUMNS, form)[1] if is_packed(form) else COLUMNS * FORMATS[form].number_size
    n = len(space) // team.n_threads // stride  # blocks or rows of a thread
    x, out, spent = aligned((max(vector_size(COLUMNS), 4 * COLUMNS),)), floats(team.n_threads, n + PANEL), \
        np.zeros(team.n_threads)
    place, vector, target = (array.ctypes.data for array in (space, x, out))
    products = [function(product_kind(form), form, 1, way) for way in ways]
    each_block = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(function("each_block", INT8, 1, Way(1, 1, 0)))

    def read(product: int, rank: int) -> None:
        start, result, begun = place + rank * n * stride, target + rank * out.strides[0], clock()
        if is_packed(form):
            each_block(product, start, stride, n, vector, COLUMNS, result)
        else:
            function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)(product)
            function(start, stride, n, vector, 0, COLUMNS, result, 0, 0, 0)
        spent[rank] = clock() - begun

    def seconds(product: int) -> float:
        team.run(lambda _, rank: read(product, rank), np.zeros(1, JOB))
        return float(spent.mean())

    rounds, end = list[list[float]](), time.monotonic() + SECONDS
    while len(rounds) < ROUNDS or time.monotonic() < end:
        rounds.append([seconds(product) for product in products])
    return (n * stride * team.n_threads / np.median(rounds, axis=0) / 1e9).tolist()


def fastest(found: Mapping[Way, float]) -> Way:
    """The fastest of {way: GB/s}; the default, which is the first, unless another one is clearly faster."""
    default, best = next(iter(found)), max(found, key=lambda way: found[way])
    return best if found[best] > GAIN * found[default] else default


def ways_table() -> list[str]:
    """Measures and keeps all ways -> lines: for each format, GB/s of all threads in each way; and which one is taken.

    Raises InputError if they can't be kept.
    """
    if not can_keep(code_place()[0]):
        raise InputError("the ways can't be kept: NUMBA_CACHE_DIR must be a folder that belongs to you and that only "
                         "you can write to")
    found = measure()

    def name(form: int, way: Way) -> str:
        rows = f"{way.rows} rows, " if way.rows > 1 and not is_packed(form) else ""
        return rows + ("no prefetch", "cache 1", "cache 2")[way.prefetches]

    names = [*dict.fromkeys(name(form, way) for form, ways in found.items() for way in ways)]
    rows = [["one vector, GB/s", *names, "taken"]]
    for form, ways in found.items():
        cells = {name(form, way): f"{speed:.1f}" for way, speed in ways.items()}
        rows.append([FORMATS[form].name, *(cells.get(each, "") for each in names), name(form, fastest(ways))])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
