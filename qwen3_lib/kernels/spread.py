"""The products of a prompt with packed weights by the instructions of AVX2 or AVX-VNNI: see vectors.py.

A block's weights are spread once for all vectors, into two streams of 16 rows each, group after group: the scales as
float32 [16 rows], then the zeros times -1 or the minima, where a format has them for each group, then a byte for each
weight, [group / 4, 16 rows, 4 columns]; with AVX2, those of INT8 are signed. So a core reads each stream as it lies, and unpacks
nothing.
"""
import itertools
from typing import Any

from qwen3_lib.kernels.cpu import BYTE_OFFSET, PATH
from qwen3_lib.kernels.layout import FORMATS, GROUP, PANEL, unit_size
from qwen3_lib.kernels.vectors import (FLOAT, I8, I16, I32, I64, PackedVector, Way, at, dot_bytes, fma, half_bytes,
                                       hidden, load, loop, minus_zero, prefetch, scales_of, splat, store, unit_of, variable,
                                       vector, widened, zero_sums)

DOTS = PATH if PATH == "vnni" else "avx2"
SPREAD_WAY = Way(2, 6 if DOTS == "vnni" else 4, 2)  # two registers of 8 rows
STREAMS = 2
LINE, REGISTER = 64, 32  # bytes; a line has four of each of a stream's 16 rows


def has_zeros(form: int) -> bool:
    """Whether each group has a zero of its own."""
    return not (FORMATS[form].minima or FORMATS[form].offset)


def numbers_start(form: int) -> int:
    """Where a group's numbers begin in a stream."""
    return LINE * (1 + (has_zeros(form) or FORMATS[form].minima))


def spread_size(form: int) -> int:
    """The bytes of a group in a stream."""
    return numbers_start(form) + LINE * FORMATS[form].group // 4


def is_signed(form: int) -> bool:
    """Whether a stream's bytes have a sign."""
    return DOTS == "avx2" and FORMATS[form].offset == BYTE_OFFSET


def offset(b: Any, value: Any) -> Any:
    """Unsigned bytes less 128 as signed ones, or the other way round."""
    return b.xor(value, splat(I8, REGISTER, 0x80))


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
            if numbers > LINE:
                store(b, minus_zero(b, form, word) if minima is None else minima, at(b, place, LINE))
            for k in range(format_.group // 4):
                value = load(b, at(b, unit.bytes_, 4 * PANEL * k + REGISTER * piece), I8, REGISTER)
                if format_.halves == 2:
                    value = half_bytes(b, form, value, half, unit.bits, k, piece)
                elif is_signed(form):
                    value = offset(b, value)
                store(b, value, at(b, place, numbers + LINE * k))

    loop(b, units, add_unit)


def write_spread_product(form: int, n_vectors: int, way: Way, b: Any, w: Any, x: Any, x_stride: Any, n: Any, out: Any,
                         out_stride: Any, ahead: Any, turn: Any, turns: Any) -> None:
    """write_packed_product of a block that write_spread has spread: the same sums.

    Meanwhile the packed block that starts `ahead` bytes after w is fetched: products of the same block take `turns`.
    """
    format_, size, lanes, columns = FORMATS[form], spread_size(form), REGISTER // 4, FORMATS[form].group // 4
    vectors = [PackedVector(at(b, x, (x_stride, t))) for t in range(n_vectors)]
    keys, signed = list(itertools.product(range(n_vectors), range(way.rows))), is_signed(form)
    narrow, shifted = DOTS == "avx2" and not signed, DOTS == "vnni" and format_.offset == BYTE_OFFSET
    steps = min(columns, (8, 4, 2)[format_.more]) if narrow else columns  # 16 bits hold 2 * 2 * 63 * 127
    zero = splat(I16, 2 * lanes, 0) if narrow else splat(I32, lanes, 0)

    def add_group(packed: Any, byte: int, here: Any, sums: dict[tuple[int, int], Any]) -> None:
        """A group, whose factors begin at a byte of a group of the vectors."""
        running, wholes = ({key: variable(b, kind) for key in keys} for kind in (zero.type, vector(I32, lanes)))

        def four_columns(k: Any, first: bool) -> None:
            place = at(b, here, numbers_start(form), (k, LINE))
            parts = [load(b, at(b, place, REGISTER * r), I8, REGISTER) for r in range(way.rows)]
            parts = [offset(b, part) for part in parts] if signed else parts  # `dot_bytes` takes it back at once
            for t, vector_ in enumerate(vectors):
                before = vector_.field(b, I32, packed, GROUP + 12, lanes) if shifted else zero
                word = b.bitcast(vector_.field(b, I32, packed, at(b, I64(byte), (k, 4)), lanes), parts[0].type)
                for r, part in enumerate(parts):
                    sum_ = running[t, r]
                    b.store(dot_bytes(b, DOTS, before if first else b.load(sum_), part, word, signed), sum_)

        for start in range(0, columns, steps):
            four_columns(I64(start), True)
            rest = I64(steps - 1) if steps == 2 else hidden(b, I64(steps - 1))  # else LLVM loads all words at once
            loop(b, rest, lambda j, start=start: four_columns(at(b, I64(start + 1), j), False))
            for key, sum_ in running.items():
                whole = widened(b, b.load(sum_)) if narrow else b.load(sum_)
                b.store(b.add(b.load(wholes[key]), whole) if start else whole, wholes[key])
        for t, vector_ in enumerate(vectors):
            factor = vector_.factor(b, packed, lanes)
            total = b.sitofp(vector_.sum(b, packed, (byte, format_.group), lanes), factor.type)
            for r in range(way.rows):
                value, sum_ = b.sitofp(b.load(wholes[t, r]), factor.type), b.load(sums[t, r])
                scale, second = (load(b, at(b, here, REGISTER * r, start), FLOAT, lanes) for start in (0, LINE))
                if has_zeros(form):
                    value = fma(b, second, total, value)
                elif format_.minima:
                    sum_ = fma(b, second, b.fmul(total, factor), sum_)
                elif format_.offset != BYTE_OFFSET:
                    value = fma(b, splat(FLOAT, lanes, -format_.offset), total, value)
                b.store(fma(b, value, b.fmul(scale, factor), sum_), sums[t, r])

    parts, groups = GROUP // format_.group, b.sdiv(n, I64(GROUP))

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
