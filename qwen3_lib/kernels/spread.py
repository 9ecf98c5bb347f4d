"""The products of a prompt with packed weights by the instructions of AVX2 or AVX-VNNI: see vectors.py.

A block's weights are spread once for all vectors, into two streams of 16 rows each, group after group: the scales as
float32 [16 rows], then the zeros times -1 or the minima, where a format has them for each group, then a byte for each
weight, [group / 4, 16 rows, 4 columns]. So a core reads each stream as it lies, and unpacks nothing.

AVX2 has no exact products of two signed bytes. So INT8 becomes int16, and half of the multiplications become additions:
    w0 x0 + w1 x1 = (x0 + w1) (x1 + w0) - w0 w1 - x0 x1
(S. Winograd, A New Algorithm for Inner Product, IEEE Transactions on Computers C-17, 1968). The last two products are
added up beforehand: those of weights for each group and row, those of a vector for each of its groups. Four columns of
16 rows are stored as [2: the odd ones, the even ones; 16 rows; 2].
"""
import itertools
from typing import Any


from qwen3_lib.kernels.cpu import BYTE_OFFSET, PATH
from qwen3_lib.kernels.layout import FORMATS, GROUP, GROUP_BYTES, GROUP_SUMS, PANEL, fours_in_16_bits, unit_size
from qwen3_lib.kernels.vectors import (FLOAT, I8, I16, I32, I64, PackedVector, Way, at, broadcast, computed_first,
                                       dot_bytes, fma, half_bytes, load, loop, minus_zero, odd_and_even, pair_sums,
                                       prefetch, scales_of, splat, store, unit_of, variable, vector, widened, zero_sums)

DOTS = PATH if PATH == "vnni" else "avx2"
SPREAD_WAY = Way(2, 6 if DOTS == "vnni" else 4, 2)  # two registers of 8 rows
STREAMS = 2
LINE, REGISTER = 64, 32  # bytes; a line has four of each of a stream's 16 rows


def has_zeros(form: int) -> bool:
    """Whether each group has a zero of its own."""
    return not (FORMATS[form].minima or FORMATS[form].offset)


def less_start(form: int) -> int:
    """Where the sums of products of a group's weights begin in a stream, of numbers of 16 bits."""
    return LINE * (1 + (has_zeros(form) or FORMATS[form].minima))


def numbers_start(form: int) -> int:
    """Where a group's numbers begin in a stream."""
    return less_start(form) + LINE * is_int16(form)


def spread_size(form: int) -> int:
    """The bytes of a group in a stream."""
    return numbers_start(form) + (1 + is_int16(form)) * LINE * FORMATS[form].group // 4


def is_int16(form: int) -> bool:
    """Whether a stream has numbers of 16 bits, the odd columns apart from the even ones."""
    return DOTS == "avx2" and FORMATS[form].offset == BYTE_OFFSET


def write_spread(form: int, _: int, way: Way, b: Any, w: Any, n: Any, out: Any) -> None:
    """A packed block of n columns becomes two streams."""
    format_, size, numbers = FORMATS[form], spread_size(form), numbers_start(form)
    units = b.sdiv(n, I64(format_.group * format_.halves))

    def add_unit(i: Any) -> None:
        unit = unit_of(b, form, w, i)
        for half, stream, r in itertools.product(range(format_.halves), range(STREAMS), range(way.rows)):
            place = at(b, out, (at(b, i, (units, stream)), format_.halves * size), size * half + REGISTER * r)
            piece = way.rows * stream + r
            scale, word, minima = scales_of(b, form, unit, half, piece, REGISTER // 4)
            store(b, scale, place)
            if has_zeros(form) or format_.minima:
                store(b, minus_zero(b, form, word) if minima is None else minima, at(b, place, LINE))
            less = splat(I32, REGISTER // 4, 0)
            for k in range(format_.group // 4):
                value = load(b, at(b, unit.bytes_, 4 * PANEL * k + REGISTER * piece), I8, REGISTER)
                if format_.halves == 2:
                    value = half_bytes(b, form, value, half, unit.bits, k, piece)
                values = [value]
                if is_int16(form):
                    values = odd_and_even(b, b.xor(value, splat(I8, REGISTER, BYTE_OFFSET)))
                    less = b.sub(less, pair_sums(b, *values))
                for j, part in enumerate(values, len(values) * k):
                    store(b, part, at(b, place, numbers + LINE * j))
            if is_int16(form):
                store(b, less, at(b, place, less_start(form)))

    loop(b, units, add_unit)


def sum_of(b: Any, form: int, sum_: Any, weights: list[Any], words: list[Any]) -> Any:
    """A sum + the products of four columns of 8 rows and a vector's: a register each, or the odd and the even ones."""
    if not is_int16(form):
        return dot_bytes(b, DOTS, sum_, *weights, b.bitcast(*words, weights[0].type), False)
    kind = vector(I16, REGISTER // 2)
    (odd, even), (x_odd, x_even) = ([b.bitcast(value, kind) for value in two] for two in (weights, words))
    return b.add(sum_, pair_sums(b, b.add(x_even, odd), b.add(x_odd, even)))


def add_scaled_group(b: Any, form: int, wholes: dict[tuple[int, int], Any], sums: dict[tuple[int, int], Any],
                     vectors: list[PackedVector], group: tuple[Any, int], here: Any) -> None:
    """Adds the whole sums (vector, register) of a spread group to `sums`, float32, times both scales.

    group: the vectors' group of 32, and the byte in it.
    """
    format_, lanes = FORMATS[form], REGISTER // 4
    for t, vector_ in enumerate(vectors):
        factor = vector_.factor(b, group[0], lanes)
        total = b.sitofp(vector_.sum(b, group[0], (group[1], format_.group), lanes), factor.type)
        for r in range(SPREAD_WAY.rows):
            value, sum_ = b.sitofp(b.load(wholes[t, r]), factor.type), b.load(sums[t, r])
            scale, second = (load(b, at(b, here, REGISTER * r, start), FLOAT, lanes) for start in (0, LINE))
            if has_zeros(form):
                value = fma(b, second, total, value)
            elif format_.minima:
                sum_ = fma(b, second, b.fmul(total, factor), sum_)
            elif format_.offset != BYTE_OFFSET:
                value = fma(b, splat(FLOAT, lanes, -format_.offset), total, value)
            b.store(fma(b, value, b.fmul(scale, factor), sum_), sums[t, r])


def write_spread_product(form: int, n_vectors: int, way: Way, b: Any, w: Any, x: Any, x_stride: Any, n: Any, out: Any,
                         out_stride: Any, ahead: Any, turn: Any, turns: Any) -> None:
    """write_packed_product of a block that write_spread has spread: the same sums.

    Meanwhile the packed block that starts `ahead` bytes after w is fetched: products of the same block take `turns`.
    """
    format_, size, lanes, columns = FORMATS[form], spread_size(form), REGISTER // 4, FORMATS[form].group // 4
    keys, int16 = list(itertools.product(range(n_vectors), range(way.rows))), is_int16(form)
    narrow, shifted = DOTS == "avx2" and not int16, DOTS == "vnni" and format_.offset == BYTE_OFFSET
    steps = min(columns, fours_in_16_bits(form)) if narrow else columns
    zero, halves = splat(I16, 2 * lanes, 0) if narrow else splat(I32, lanes, 0), range(1 + int16)
    parts, groups, numbers = GROUP // format_.group, b.sdiv(n, I64(GROUP)), GROUP * len(halves)
    x = at(b, x, (groups, GROUP_BYTES)) if int16 else x  # behind all groups
    vectors = [PackedVector(at(b, x, (x_stride, t)), numbers) for t in range(n_vectors)]

    def add_group(packed: Any, byte: int, here: Any, sums: dict[tuple[int, int], Any]) -> None:
        """A group, whose factors begin at a byte of a group of the vectors."""
        running, wholes = ({key: variable(b, kind) for key in keys} for kind in (zero.type, vector(I32, lanes)))
        place = at(b, here, numbers_start(form))
        factors = at(b, x, (packed, numbers + GROUP_SUMS), byte)

        def first_sum(t: int, r: int) -> Any:
            less = vectors[t].less(b, packed, lanes) if int16 or shifted else zero
            return b.add(less, load(b, at(b, here, less_start(form), REGISTER * r), I32, lanes)) if int16 else less

        def four_columns(k: int) -> None:
            weights = [[load(b, at(b, place, LINE * (len(halves) * k + half), REGISTER * r), I8, REGISTER)
                        for half in halves] for r in range(way.rows)]
            for t in range(n_vectors):
                words = [broadcast(b, load(b, at(b, factors, (x_stride, t), 4 * k + GROUP * half), I32), lanes)
                         for half in halves]
                for r in range(way.rows):
                    b.store(sum_of(b, form, b.load(running[t, r]), weights[r], words), running[t, r])

        for k in range(columns):
            if k % steps:
                computed_first(b, running.values())
            else:
                for key, sum_ in running.items():
                    b.store(first_sum(*key), sum_)
            four_columns(k)
            if (k + 1) % steps == 0:
                for key, sum_ in running.items():
                    whole = widened(b, b.load(sum_)) if narrow else b.load(sum_)
                    b.store(b.add(b.load(wholes[key]), whole) if k >= steps else whole, wholes[key])
        add_scaled_group(b, form, wholes, sums, vectors, (packed, byte), here)

    fetched = int(unit_size(form)) * GROUP // (format_.group * format_.halves)  # bytes of 32 columns

    def stream(i: Any) -> None:
        start, sums = at(b, w, (b.mul(i, groups), parts * size)), zero_sums(b, keys, lanes)

        def step(packed: Any) -> None:
            with b.if_then(b.icmp_signed("==", b.urem(packed, turns), turn)):
                place = at(b, w, ahead, (packed, fetched), (i, fetched // STREAMS))
                prefetch(b, place, range(0, fetched // STREAMS, LINE), way.prefetches)
            for j in range(parts):
                add_group(packed, format_.group * j, at(b, start, (packed, parts * size), size * j), sums)

        loop(b, groups, step)
        for (t, r), sum_ in sums.items():
            store(b, b.load(sum_), at(b, out, (out_stride, t), (i, LINE), REGISTER * r))

    loop(b, I64(STREAMS), stream)
