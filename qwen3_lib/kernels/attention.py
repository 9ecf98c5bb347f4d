"""The products of attention, see vectors.py: a prompt's queries with keys, and the softmax's weights with values.

A prompt's keys are transposed before, as are its rows of weights; without AVX-512, pairs of values come together. Few
queries are multiplied with keys as they lie in the cache, by vectors.write_float_product. ROUNDED: the numbers are
bf16, and the products of a pair are added together, as vectors.add_pairs does.
"""
import itertools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from qwen3_lib.kernels.cpu import AVX512, FEATURES, PAIRS, SUMS
from qwen3_lib.kernels.layout import BF16, FORMATS, GROUP, ROUNDED, VECTORS
from qwen3_lib.kernels.vectors import (FLOAT, I1, I16, I32, I64, LANES, PREFETCH_BYTES, Way, add_pairs, at, broadcast,
                                       flushed, fma, hidden, in_tiles, load, loop, prefetch, row_part, splat, store,
                                       two_parts, variable, vector, zero_sums)

# In which order a product works on the 16 pairs of 32 columns: the one in which their sums are added up. So they lie.
ORDER = tuple(int(f"{i:04b}"[::-1], 2) for i in range(LANES))
VALUE_ROWS = 3  # rows of values that are weighted at once: registers hold their factors for some vectors


def add_products(b: Any, form: int, words: Sequence[Any], places: Sequence[Any], apart: int,
                 sums: dict[tuple[int, int], Any]) -> None:
    """sums[t, g], float32 [16], + 16 pairs of bf16 at words[g] times the pair at places[t].

    One instruction adds both products, or two fmas do, in the order of its: the odd number of a pair before the even
    one; BF16: the even one first. Then places[t] has two float32, the odd one `apart` bytes after the even one.
    """
    if form == ROUNDED and PAIRS:
        factors = [load(b, word, I32, LANES) for word in words]
        for (t, g), sum_ in sums.items():
            value = broadcast(b, load(b, places[t], I32), LANES)
            b.store(add_pairs(b, factors[g], value, b.load(sum_)), sum_)
        return
    for odd in (0, 1) if form == BF16 else (1, 0):
        # The pairs are read twice: if LLVM knew that they are the same, it would keep them, and has no registers.
        factors = [two_parts(b, form, hidden(b, word), I64(2 * LANES), I64(0))[odd] for word in words]
        for t, place in enumerate(places):
            value = broadcast(b, load(b, at(b, place, apart * odd), FLOAT), LANES)
            for g, factor in enumerate(factors):
                b.store(fma(b, factor, value, b.load(sums[t, g])), sums[t, g])


def write_transposed_rows(form: int, _: int, way: Way, b: Any, w: Any, stride: Any, n_rows: Any, n: Any,
                          out: Any) -> None:
    """Transposes rows of bf16 [n_rows, n], keys or weights: a vector then holds a pair of columns of 16 rows.

    uint32 [n_rows / 16, 16, n / 32, 16 rows]: pair 16 j + i of a row stands at [.., ORDER[i], j]. n_rows is rounded up
    to a multiple of 32; the last row is repeated.
    """
    steps, last = b.sdiv(n, I64(32)), b.sub(n_rows, I64(1))

    def group(i: Any) -> None:
        numbers = [at(b, I64(r), (i, LANES)) for r in range(LANES)]
        rows = [at(b, w, (stride, b.select(b.icmp_signed("<", r, last), r, last))) for r in numbers]

        def step(j: Any) -> None:
            for row in rows:
                prefetch(b, at(b, row, (stride, LANES), (j, 4 * LANES)), [0], 2)
            values = transposed(b, [load(b, at(b, row, (j, 4 * LANES)), I32, LANES) for row in rows])
            for k, value in enumerate(values):
                place = at(b, j, (steps, ORDER[k]), (b.mul(i, steps), LANES))
                store(b, value, at(b, out, (place, 4 * LANES)))

        loop(b, steps, step)

    loop(b, b.mul(b.sdiv(b.add(n_rows, I64(31)), I64(32)), I64(2)), group)


def transposed(b: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square matrix whose rows are vectors: quarters of it change places, then quarters of these."""
    n, width = len(rows), len(rows) // 2
    while width:
        for i in [i for i in range(n) if not i & width]:
            x, y = rows[i], rows[i + width]
            orders = [[k if not k & width else n + k - width for k in range(n)],
                      [k + width if not k & width else n + k for k in range(n)]]
            rows[i], rows[i + width] = (b.shuffle_vector(x, y, ir.Constant(vector(I32, n), order)) for order in orders)
        width //= 2
    return rows


def write_transposed_product(form: int, n_vectors: int, way: Way, b: Any, w: Any, stride: Any, n_rows: Any, x: Any,
                             x_stride: Any, n: Any, out: Any, out_stride: Any, kept: Any, part: Any,
                             most: int = VECTORS, turned: bool = False) -> None:
    """write_float_product of rows that write_transposed_rows has transposed: the same sums, added in the same order.

    A lane is a row, so a row's 16 partial sums are added without moving numbers between lanes. More than `most` vectors
    are two tiles of so many, which may overlap; they can't be cut into parts. `turned`: the vectors are transposed,
    too, see intrinsics.turn_pairs.
    """
    together, n_groups = min(n_vectors, most), 2 if AVX512 else 1
    steps, keys = b.sdiv(n, I64(32)), list(itertools.product(range(together), range(n_groups)))
    goes_on, ends = b.trunc(part, I1), b.trunc(b.lshr(part, I64(1)), I1)

    def tile(first: Any, start: Any) -> None:
        groups = [at(b, w, (at(b, first, g), b.mul(n, I64(32)))) for g in range(n_groups)]
        vectors = [at(b, x, (x_stride, at(b, start, t))) for t in range(together)]
        kept_at = at(b, kept, (first, 4 * LANES * LANES * n_vectors))

        def added(i: int, distance: int) -> dict[tuple[int, int], Any]:
            """The sum of the partial sums i, i + distance, ..., for each of `keys`: see `totals`."""
            if distance < LANES:
                left, right = (added(j, 2 * distance) for j in (i, i + distance))
                return {key: b.fadd(left[key], right[key]) for key in keys}
            sums = zero_sums(b, keys, LANES)
            places = {key: at(b, kept_at, 4 * LANES * (len(keys) * i + j)) for j, key in enumerate(keys)}
            with b.if_then(goes_on):
                for key, place in places.items():
                    b.store(load(b, place, FLOAT, LANES), sums[key])
            loop(b, steps, lambda j: add_products(
                b, form, [at(b, group, (at(b, j, (steps, ORDER[i])), 4 * LANES)) for group in groups],
                [at(b, vector, (j, 4), (steps, 4 * ORDER[i])) if turned else at(b, vector, (j, 4 * GROUP), 4 * i)
                 for vector in vectors], 4 * LANES, sums))
            with b.if_then(ends):
                for key, place in places.items():
                    store(b, b.load(sums[key]), place)
            return {key: b.load(sum_) for key, sum_ in sums.items()}

        for (t, g), sum_ in added(0, 1).items():
            store(b, sum_, at(b, out, (out_stride, at(b, start, t)), (at(b, first, g), 4 * LANES)))

    with flushed(b, form == ROUNDED and bool(FEATURES.get("sse2"))):
        loop(b, b.sdiv(b.add(n_rows, I64(16 * n_groups - 1)), I64(16 * n_groups)), lambda i: loop(
            b, I64(1 + (n_vectors > together)), lambda half: tile(
                b.mul(i, I64(n_groups)), b.mul(half, I64(n_vectors - together)))))


def write_turned_product(*args: Any) -> None:
    """write_transposed_product of wide rows, so that a core reads the vectors as they lie."""
    write_transposed_product(*args, turned=True)


def write_transposed_scores(*args: Any) -> None:
    """write_transposed_product of short rows: where registers hold the sums of sums, too."""
    write_transposed_product(*args, most=4 if AVX512 else VECTORS)


def write_weighted_rows(form: int, n_vectors: int, way: Way, b: Any, w: Any, stride: Any, n_rows: Any, x: Any,
                        x_stride: Any, n: Any, out: Any, out_stride: Any) -> None:
    """out[t, k] += sum of w[r, k] x[t, r], in the order of r. n is a multiple of 32.

    A few rows at a time, from left to right, so that the memory is read in its order; the sums stay in the first cache.
    ROUNDED: x is bf16 numbers as float32, and the odd row of a pair comes before the even one, as in `add_pairs`.
    """
    size = 32 * FORMATS[form].number_size

    def tile(first: Any, order: Sequence[int]) -> None:
        rows, whole = [at(b, w, (stride, first), (stride, r)) for r in range(len(order))], size * len(order)
        factors = [[broadcast(b, load(b, at(b, x, (x_stride, t), (first, 4), 4 * r), FLOAT), LANES)
                    for r in range(len(order))] for t in range(n_vectors)]

        def step(i: Any) -> None:
            if way.prefetches:
                prefetch(b, at(b, rows[0], PREFETCH_BYTES, (i, whole)), range(0, whole, 64), way.prefetches)
            for half in range(2):
                column = at(b, I64(LANES * half), (i, 32))
                parts = [row_part(b, form, row, n, column) for row in rows]
                for t in range(n_vectors):
                    place = at(b, out, (out_stride, t), (column, 4))
                    sum_ = load(b, place, FLOAT, LANES)
                    for r in order:
                        sum_ = fma(b, parts[r], factors[t][r], sum_)
                    store(b, sum_, place)

        loop(b, b.sdiv(n, I64(32)), step)

    if form != ROUNDED:
        in_tiles(b, n_rows, VALUE_ROWS, lambda first, n_tile_rows: tile(first, range(n_tile_rows)))
        return
    with flushed(b, bool(FEATURES.get("sse2"))):
        in_tiles(b, b.lshr(n_rows, I64(1)), 2,
                 lambda pair, n_pairs: tile(b.shl(pair, I64(1)), (1, 0, 3, 2)[:2 * n_pairs]))
        with b.if_then(b.trunc(n_rows, I1)):
            tile(b.sub(n_rows, I64(1)), (0,))


def write_weighted_pairs(form: int, n_vectors: int, way: Way, b: Any, w: Any, stride: Any, n_rows: Any, x: Any,
                         x_stride: Any, n: Any, out: Any, out_stride: Any) -> None:
    """write_weighted_rows for ROUNDED, with the registers of AVX-512: the same sums.

    x: bf16 numbers, or the same as float32 without PAIRS; where n_rows is odd, a zero follows. The sums of a strip of
    columns stay in registers: all columns of a usual head for one vector or two, a cache line of each row for eight.
    """
    pairs, size = b.lshr(n_rows, I64(1)), 2 if PAIRS else 4

    def strip(first: Any, n_groups: int) -> None:
        columns = [at(b, I64(32 * i), (first, 32)) for i in range(n_groups)]
        places = {(t, c): at(b, out, (out_stride, t), (columns[c // 2], 4), c % 2 * 4 * LANES)
                  for t in range(n_vectors) for c in range(2 * n_groups)}
        sums = {key: variable(b, vector(FLOAT, LANES)) for key in places}
        for key, place in places.items():
            b.store(load(b, place, FLOAT, LANES), sums[key])

        def add(pair: Any, to_other: Any) -> None:
            even = at(b, w, (stride, b.shl(pair, I64(1))))
            odd = b.add(even, to_other)
            for row in (even, odd) if way.prefetches else ():
                prefetch(b, at(b, row, PREFETCH_BYTES, (columns[0], 2)), range(0, 64 * n_groups, 64), way.prefetches)
            parts = [part for column in columns for part in row_pair(b, even, odd, n, column)]
            for t in range(n_vectors):
                place = at(b, x, (x_stride, t), (pair, 2 * size))
                values = [broadcast(b, load(b, at(b, place, start), kind), LANES)
                          for start, kind in (((0, I32),) if PAIRS else ((4, FLOAT), (0, FLOAT)))]
                for c, factors in enumerate(parts):
                    for factor, value in zip(factors, values):
                        sum_ = sums[t, c]
                        b.store((add_pairs if PAIRS else fma)(b, factor, value, b.load(sum_)), sum_)

        loop(b, pairs, lambda pair: add(pair, stride))
        with b.if_then(b.trunc(n_rows, I1)):
            add(pairs, I64(0))
        for key, place in places.items():
            store(b, b.load(sums[key]), place)

    with flushed(b, not PAIRS and bool(FEATURES.get("sse2"))):
        in_tiles(b, b.sdiv(n, I64(32)), max(1, min(4, SUMS // 3 // n_vectors)), strip)


def write_paired_rows(form: int, _: int, way: Way, b: Any, w: Any, stride: Any, n_rows: Any, n: Any, out: Any) -> None:
    """Pairs of rows of bf16 [n_rows, n] -> uint32 [n / 16, n_rows / 2, 16 columns], the even row in the lower half."""
    pairs = b.lshr(n_rows, I64(1))

    def group(i: Any) -> None:
        def pair(j: Any) -> None:
            even = at(b, w, (stride, b.shl(j, I64(1))), (i, 2 * LANES))
            low, high = (b.zext(load(b, row, I16, LANES), vector(I32, LANES)) for row in (even, b.add(even, stride)))
            store(b, b.or_(low, b.shl(high, splat(I32, LANES, 16))), at(b, out, (at(b, j, (i, pairs)), 4 * LANES)))

        loop(b, pairs, pair)

    loop(b, b.sdiv(n, I64(LANES)), group)


def write_paired_product(form: int, n_vectors: int, way: Way, b: Any, w: Any, stride: Any, n_rows: Any, x: Any,
                         x_stride: Any, n: Any, out: Any, out_stride: Any) -> None:
    """write_weighted_rows of as many rows, an even number, as write_paired_rows has paired: the same sums.

    `stride`: the bytes from the pairs of 16 columns to those of the next 16. The sums stay in registers.
    """
    def group(i: Any) -> None:
        places = {(t, 0): at(b, out, (out_stride, t), (i, 4 * LANES)) for t in range(n_vectors)}
        sums = {key: variable(b, vector(FLOAT, LANES)) for key in places}
        for key, place in places.items():
            b.store(load(b, place, FLOAT, LANES), sums[key])
        loop(b, b.lshr(n_rows, I64(1)), lambda pair: add_products(
            b, form, [at(b, w, (i, stride), (pair, 4 * LANES))],
            [at(b, x, (x_stride, t), (pair, 8)) for t in range(n_vectors)], 4, sums))
        for key, place in places.items():
            store(b, b.load(sums[key]), place)

    with flushed(b, form == ROUNDED and bool(FEATURES.get("sse2"))):
        loop(b, b.sdiv(n, I64(LANES)), group)


def row_pair(b: Any, even: Any, odd: Any, n: Any, column: Any) -> list[tuple[Any, ...]]:
    """32 columns of two rows of bf16, as factors of `add_pairs` or of two fmas: the first 16, then the rest."""
    if not PAIRS:
        return [tuple(row_part(b, BF16, row, n, at(b, column, start)) for row in (odd, even)) for start in (0, LANES)]
    left, right = (load(b, at(b, row, (column, 2)), I16, 2 * LANES) for row in (even, odd))
    return [(b.bitcast(b.shuffle_vector(left, right, ir.Constant(vector(I32, 2 * LANES), [
        lane for i in range(start, start + LANES) for lane in (i, i + 2 * LANES)])), vector(I32, LANES)),)
        for start in (0, LANES)]
