"""The products where nearly all time is spent: vectors, in the language of LLVM. Those of attention: attention.py.

LLVM's language lies between C and machine code. A function here that takes `b`, the builder, runs once, while the
product is compiled, and each call on `b` appends an instruction to the product. So a loop like
`for r in range(n_rows)` below runs at compile time and writes the same instructions for each row, while `loop` writes a
loop that runs in the product. A vector is several numbers that one instruction processes together; LLVM chooses the
machine's own instructions for vectors, and keeps variables in registers. Addresses are integers: LLVM knows no arrays.

Each product is compiled by itself, for one format and one number of vectors, when it is first needed: see products.py.
"""
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from qwen3_lib.kernels.cpu import BYTE_OFFSET, FEATURES, INT8_SHAPES, ON_ARM, PAIRS, PATH, SUMS, UNSIGNED
from qwen3_lib.kernels.layout import (BF16, BIAS, F16, F32, FORMATS, GROUP, GROUP16_BYTES, GROUP_BYTES, GROUP_SUMS,
                                      PANEL, ROUNDED, SIZES_BYTES, VECTORS, WIDE, WIDE_M, factors_size,
                                      fours_in_16_bits, is_packed, unit_size)

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
PREFETCH_BYTES = 8192  # bytes: at least so far ahead of a product, the memory is asked for the rows that follow
LANES = 16  # float32 numbers in a vector on every CPU, or sums would differ; LLVM splits it where registers are shorter


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite doesn't know."""

    def __str__(self) -> str:
        return "bfloat"


BFLOAT = BFloat()


def vector(kind: ir.Type, n: int) -> ir.VectorType:
    return ir.VectorType(kind, n)


def splat(kind: ir.Type, n: int, value: float) -> ir.Constant:
    """A vector of n times the same value."""
    return ir.Constant(vector(kind, n), [value] * n)


def call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """A call of one of LLVM's own functions, or of a machine's special instruction."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), args)


def broadcast(b: Any, value: Any, n: int) -> Any:
    """A vector of n times a number that only the kernel knows."""
    lanes = b.insert_element(ir.Constant(vector(value.type, n), ir.Undefined), value, I32(0))
    return b.shuffle_vector(lanes, lanes, splat(I32, n, 0))


def load(b: Any, address: Any, kind: ir.Type, n: int | None = None) -> Any:
    """A number from memory, or a vector of n, at any address."""
    value = b.load(b.inttoptr(address, (kind if n is None else vector(kind, n)).as_pointer()))
    value.align = 1
    return value


def store(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def at(b: Any, address: Any, *offsets: Any) -> Any:
    """An address plus offsets in bytes; an offset may be a pair (index, size), their product."""
    for offset in offsets:
        pair = offset if isinstance(offset, tuple) else (offset, 1)
        address = b.add(address, b.mul(*(x if isinstance(x, ir.Value) else I64(x) for x in pair)))
    return address


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in one instruction."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def prefetch(b: Any, address: Any, offsets: Iterable[int], level: int) -> None:
    """Asks the memory for the lines at these offsets, for the first or the second cache."""
    for offset in offsets:
        place = b.inttoptr(at(b, address, offset), I8.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(4 - level), I32(1))


def add_neighbours(b: Any, x: Any) -> Any:
    """The sums of neighbouring whole numbers of x."""
    n = x.type.count
    return b.add(*(b.shuffle_vector(x, x, ir.Constant(vector(I32, n // 2), list(range(start, n, 2))))
                   for start in (0, 1)))


def totals(b: Any, values: Sequence[Any]) -> Any:
    """The sum of each of 1, 2, 4, 8 or 16 vectors of 16 floats, as one vector.

    Always (i, i + 8), then (i, i + 4), (i, i + 2), (i, i + 1), however many vectors there are: the order of every sum.
    """
    left, width = list(values), LANES
    while width > 1:
        half, added = width // 2, []
        for x, y in zip(left, left[len(left) // 2:]) if len(left) > 1 else [(left[0], None)]:
            lanes = range(x.type.count)
            if y is None:
                orders = [[i for i in lanes if (i % width < half) == first] for first in (True, False)]
            else:  # half of the numbers keep their lanes, which is cheap
                orders = [[i if i % width < half else len(lanes) + i for i in lanes],
                          [i + half if i % width < half else len(lanes) + i - half for i in lanes]]
            orders = [ir.Constant(vector(I32, len(order)), order) for order in orders]
            added.append(b.fadd(*(b.shuffle_vector(x, x if y is None else y, order) for order in orders)))
        left, width = added, half
    return left[0]


def loop(b: Any, n: Any, body: Callable[[Any], None]) -> None:
    """for i in range(n): body(i), in the kernel."""
    before, (head, inside, after) = b.block, [b.append_basic_block() for _ in range(3)]
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(I64(0), before)
    b.cbranch(b.icmp_signed("<", i, n), inside, after)
    b.position_at_end(inside)
    body(i)
    i.add_incoming(b.add(i, I64(1)), b.block)
    b.branch(head)
    b.position_at_end(after)


def hidden(b: Any, value: Any) -> Any:
    """The same int64, of which LLVM knows nothing."""
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], False)


def computed_first(b: Any, variables: Collection[Any]) -> None:
    """Keeps LLVM from loading what follows before these variables are computed: registers wouldn't hold it all."""
    values = [*map(b.load, variables)]
    kinds = [value.type for value in values]
    constraints = ["=w" if PATH in ON_ARM else "=v"] * len(kinds) + [*map(str, range(len(kinds))), "~{memory}"]
    result = ir.LiteralStructType(kinds) if len(kinds) > 1 else kinds[0]
    after = b.asm(ir.FunctionType(result, kinds), "", ",".join(constraints), values, True)
    for i, variable_ in enumerate(variables):
        b.store(b.extract_value(after, i) if len(kinds) > 1 else after, variable_)


def variable(b: Any, kind: ir.Type) -> Any:
    """A place for a value, which LLVM keeps in a register."""
    with b.goto_entry_block():
        return b.alloca(kind)


def row_part(b: Any, form: int, row: Any, n: Any, column: Any) -> Any:
    """16 numbers of a stored row of n, from `column` on, as float32."""
    place, floats = at(b, row, (column, FORMATS[form].number_size)), vector(FLOAT, LANES)
    if form == F32:
        return load(b, place, FLOAT, LANES)
    if form == F16:
        return b.fpext(load(b, place, HALF, LANES), floats)
    if form in (BF16, ROUNDED):  # the upper half of a float32
        return b.bitcast(b.shl(b.zext(load(b, place, I16, LANES), vector(I32, LANES)), splat(I32, LANES, 16)), floats)
    scale = b.fpext(load(b, at(b, row, n, (b.lshr(column, I64(5)), 2)), HALF), FLOAT)
    return b.fmul(b.sitofp(load(b, place, I8, LANES), floats), broadcast(b, scale, LANES))


class Way(NamedTuple):
    """How a product is computed: the result is the same in each way, bit for bit; the speed depends on the CPU."""
    rows: int  # that are worked on together, at most; of a packed block, vectors of its 32 rows
    vectors: int  # that the rows are multiplied with at a time, at most
    prefetches: int  # the rows that follow: for cache 1 or 2, or 0: some CPUs do that well enough by themselves


ONE, AT_ONCE, MANY = range(3)  # one vector; as many as are multiplied at once; more


def way_of(form: int, count: int) -> Way:
    """The fastest way to multiply ONE, AT_ONCE or MANY vectors with weights of a format: see docs/speed.md."""
    if is_packed(form):
        lanes, together, most, at_once = INT8_SHAPES[PATH]
        if FORMATS[form].halves == 2:  # a vector then has two sums
            most = at_once = most // 2
        rows, vectors = ((PANEL // lanes, 1), (together, at_once), (together, most))[count]
        # No room for prefetches.
        exhausted = count == MANY and is_rolled(form, vectors) and FORMATS[form].scale_size == 4
        level = 1 if count == ONE or PATH == "vnni512" else 2
        return Way(rows, vectors, 0 if PATH in ON_ARM or exhausted else level)
    if count == ONE:  # 0.82 (AVX-512) and 0.89 (AVX2) of the time of four rows together, on a Zen 5
        return Way(1, 1, 1)
    if count == MANY and SUMS < VECTORS:  # 0.97 of the time of one row with six vectors; of ROUNDED 0.93
        return Way(2, 3, 2)
    most = min(VECTORS, SUMS)
    return Way(min(4, SUMS // most), most, 1 if count == AT_ONCE else 2)


def is_rolled(form: int, n_vectors: int) -> bool:
    """Whether a packed product multiplies four columns after the other in a loop, and not in one go."""
    return PATH == "vnni512" and n_vectors > 1 and FORMATS[form].halves == 1


def widened_form(form: int) -> int:
    """The format in which a prompt's vectors are multiplied with a block of a packed format: bytes, unpacked once."""
    format_ = FORMATS[form]
    if PATH == "vnni512" and (format_.halves, format_.group) == (2, GROUP):
        return WIDE_M if format_.minima else WIDE
    return form


def dot_bytes(b: Any, path: str, sums: Any, w: Any, x: Any, signed: bool) -> Any:
    """sums [n] + four products each of the bytes w and x [4 n]; n are the path's lanes.

    w is unsigned, x signed. With `signed`, w stands for w - 128; UNSIGNED paths leave that subtraction to the caller.
    Sums may be int16 [2 n], of two products each, where the CPU makes those first ("avx2"): `widened` adds them up.
    """
    if sums.type.element == I16:
        return b.add(sums, call(b, "llvm.x86.avx2.pmadd.ub.sw", sums.type, w, x))
    n = sums.type.count
    if path.startswith("vnni"):
        if llvm.llvm_version_info < (22,):  # before LLVM 22, this intrinsic takes vectors of 32-bit integers
            w, x = b.bitcast(w, sums.type), b.bitcast(x, sums.type)
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * n}", sums.type, sums, w, x)
    if path == "i8mm":
        return call(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", sums.type, sums, w, x)
    if signed:
        w = b.xor(w, splat(I8, 4 * n, 0x80))
    if path == "avx2":  # u8 times s8 in pairs, whose sum must fit into 16 bits: |w| <= 127 or w <= 63 sees to that
        if signed:
            x = call(b, "llvm.x86.avx2.psign.b", x.type, x, w)
            w = call(b, "llvm.abs.v32i8", w.type, w, I1(0))
        return b.add(sums, widened(b, call(b, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 2 * n), w, x)))
    if path == "neon":  # products of 16 bits, then sums of two and of four
        products = b.mul(*(b.sext(factor, vector(I16, 4 * n)) for factor in (w, x)))
        parts = (b.shuffle_vector(products, products, ir.Constant(vector(I32, 2 * n), list(range(i, i + 2 * n))))
                 for i in (0, 2 * n))
        pairs = [call(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", sums.type, part) for part in parts]
        return b.add(sums, call(b, "llvm.aarch64.neon.addp.v4i32", sums.type, *pairs))
    if path == "dotprod":
        return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, w, x)
    products = b.mul((b.sext if signed else b.zext)(w, vector(I32, 4 * n)), b.sext(x, vector(I32, 4 * n)))
    return b.add(sums, add_neighbours(b, add_neighbours(b, products)))


def sizes_and_flips(b: Any, x: Any) -> tuple[Any, Any]:
    """Of bytes x the sizes |x|, and the bytes whose xor with w + 128 is w, or ~w = -w - 1 where x < 0.

    So a sum of products lacks the sizes of the negative ones.
    """
    below = b.sext(b.icmp_signed("<", x, splat(I8, x.type.count, 0)), x.type)
    return call(b, f"llvm.abs.v{x.type.count}i8", x.type, x, I1(0)), b.xor(below, splat(I8, x.type.count, 0x80))


def is_flipped(form: int, n_vectors: int) -> bool:
    """Whether a packed product gives the weights the signs of a vector, and multiplies them with its sizes.

    With 2 to 8 vectors, that takes 1.02 to 1.18 times as long as giving each vector the signs of the weights.
    """
    return PATH == "avx2" and SIZES_BYTES > 0 and FORMATS[form].offset == BYTE_OFFSET and n_vectors == 1


def odd_and_even(b: Any, numbers: Any) -> tuple[Any, Any]:
    """Signed bytes [2 n] as int16 [n]: the odd ones, and the even ones."""
    pairs = b.bitcast(numbers, vector(I16, numbers.type.count // 2))
    eight = splat(I16, pairs.type.count, 8)
    return b.ashr(pairs, eight), b.ashr(b.shl(pairs, eight), eight)


def pair_sums(b: Any, x: Any, y: Any) -> Any:
    """The sums of the products of neighbours of int16 x and y [2 n], as int32 [n]."""
    return call(b, "llvm.x86.avx2.pmadd.wd", vector(I32, x.type.count // 2), x, y)


def widened(b: Any, sums: Any) -> Any:
    """The sums of neighbours of int16 [2 n] as int32 [n]."""
    return pair_sums(b, sums, splat(I16, sums.type.count, 1))


def two_parts(b: Any, form: int, row: Any, n: Any, column: Any) -> list[Any]:
    """Numbers `column` to `column` + 31 of a stored row of n as float32: the first 16 and the rest.

    BF16: the even ones and the odd ones, which takes half as many instructions; see `even_first` below.
    """
    if form not in (BF16, ROUNDED):
        return [row_part(b, form, row, n, at(b, column, start)) for start in (0, LANES)]
    pairs = load(b, at(b, row, (column, 2)), I32, LANES)
    return [b.bitcast(bits, vector(FLOAT, LANES)) for bits in (
        b.shl(pairs, splat(I32, LANES, 16)), b.and_(pairs, splat(I32, LANES, -0x10000)))]


def add_pairs(b: Any, w: Any, x: Any, sums: Any) -> Any:
    """sums float32 [16] + the products of pairs of bf16, int32 [16]: two fmas, the odd ones before the even ones."""
    w, x = (b.bitcast(pairs, vector(BFLOAT, 2 * LANES)) for pairs in (w, x))
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, w, x)


@contextmanager
def flushed(b: Any, flushes: bool) -> Iterator[None]:
    """Inside, x86 takes subnormal factors and sums for zeros, as `add_pairs` does: bits 6 and 15 of MXCSR say so."""
    if flushes:
        before, inside = variable(b, I32), variable(b, I32)
        call(b, "llvm.x86.sse.stmxcsr", ir.VoidType(), before)
        b.store(b.or_(b.load(before), I32(0x8040)), inside)
        call(b, "llvm.x86.sse.ldmxcsr", ir.VoidType(), inside)
    yield
    if flushes:
        call(b, "llvm.x86.sse.ldmxcsr", ir.VoidType(), before)


# Products: where nearly all time is spent. The formats of their factors: see layout.py.


def zero_sums(b: Any, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """A variable for each key: a vector of float32 zeros."""
    sums = {key: variable(b, vector(FLOAT, lanes)) for key in keys}
    for sum_ in sums.values():
        b.store(splat(FLOAT, lanes, 0.0), sum_)
    return sums


def in_tiles(b: Any, n_rows: Any, together: int, tile: Callable[[Any, int], None]) -> None:
    """tile(first row, number of rows) for `together` rows at a time, then for each of the rest."""
    whole = b.sdiv(n_rows, I64(together))
    loop(b, whole, lambda i: tile(b.mul(i, I64(together)), together))
    if together > 1:
        done = b.mul(whole, I64(together))
        loop(b, b.sub(n_rows, done), lambda i: tile(b.add(done, i), 1))


def write_float_product(form: int, n_vectors: int, way: Way, b: Any, w: Any, stride: Any, n_rows: Any, x: Any,
                        x_stride: Any, n: Any, out: Any, out_stride: Any, kept: Any, part: Any) -> None:
    """out[t, r] = sum of w[r, k] x[t, k]: 16 partial sums in the order of k, then `totals`.

    w: rows of n floats as they lie in memory, n a multiple of 32; x float32, for BF16 as layers.for_bf16 makes it. The
    strides are the bytes between two rows, two vectors, and the results of two vectors. The sums of several rows and
    vectors stay in registers, so that each number that is loaded is used several times. A product may be cut into parts
    of the columns: with bit 0 of `part` set it continues the sums in `kept` float32 [n_rows, n_vectors, 16], with bit 1
    it leaves them there.
    """
    together, size = min(way.rows, SUMS // n_vectors), 32 * FORMATS[form].number_size
    pairs = form == ROUNDED and PAIRS
    tile_size = b.mul(stride, I64(together))
    ahead = b.select(b.icmp_signed("<", tile_size, I64(PREFETCH_BYTES)), I64(PREFETCH_BYTES), tile_size)

    def tile(first: Any, n_tile_rows: int) -> None:
        keys = [(t, r) for t in range(n_vectors) for r in range(n_tile_rows)]
        rows = [at(b, w, (stride, first), (stride, r)) for r in range(n_tile_rows)]
        kept_at = at(b, kept, (first, n_vectors * 4 * LANES))
        sums = zero_sums(b, keys, LANES)
        with b.if_then(b.trunc(part, I1)):
            for i, key in enumerate(keys):
                b.store(load(b, at(b, kept_at, 4 * LANES * i), FLOAT, LANES), sums[key])

        def step(i: Any) -> None:
            column = b.mul(i, I64(32))
            for row in rows if way.prefetches else ():
                prefetch(b, at(b, row, ahead, (i, size)), range(0, size, 64), way.prefetches)
            parts = [[load(b, at(b, row, (column, 2)), I32, LANES)] if pairs else two_parts(b, form, row, n, column)
                     for row in rows]
            for half in (0,) if pairs else (1, 0) if form == ROUNDED else (0, 1):
                for t in range(n_vectors):
                    place = at(b, x, (x_stride, t), (column, 4), 4 * LANES * half)
                    value = load(b, place, I32 if pairs else FLOAT, LANES)
                    for r in range(n_tile_rows):
                        sum_ = (add_pairs if pairs else fma)(b, parts[r][half], value, b.load(sums[t, r]))
                        b.store(sum_, sums[t, r])

        loop(b, b.sdiv(n, I64(32)), step)
        with b.if_else(b.trunc(b.lshr(part, I64(1)), I1)) as (goes_on, ends):
            with goes_on:
                for i, key in enumerate(keys):
                    store(b, b.load(sums[key]), at(b, kept_at, 4 * LANES * i))
            with ends:
                done = 0
                while done < len(keys):
                    count = 1 << (len(keys) - done).bit_length() - 1
                    some = [b.load(sums[key]) for key in keys[done:done + min(count, LANES)]]
                    sum_, i = totals(b, some), 0
                    while i < len(some):  # neighbouring rows are stored together
                        t, r = keys[done + i]
                        run = min(len(some) - i, n_tile_rows - r)
                        lanes = ir.Constant(vector(I32, run), list(range(i, i + run)))
                        store(b, b.shuffle_vector(sum_, sum_, lanes), at(b, out, (out_stride, t), (first, 4), 4 * r))
                        i += run
                    done += len(some)

    with flushed(b, form == ROUNDED and bool(FEATURES.get("sse2"))):
        in_tiles(b, n_rows, together, tile)


def scale_of(b: Any, word: Any) -> Any:
    """The float32 of scales' bits, int32 [lanes]."""
    n = word.type.count
    return b.bitcast(b.add(b.shl(word, splat(I32, n, 13)), splat(I32, n, BIAS)), vector(FLOAT, n))


def least_zero(form: int) -> int:
    """The least zero of INT4 or INT5, in whole numbers: see minus_zero; 0 of other formats."""
    format_ = FORMATS[form]
    return 0 if format_.offset or format_.minima else 12 if format_.high_bits else 6


def minus_zero(b: Any, form: int, word: Any) -> Any:
    """The zeros of INT4 or INT5 in scales' bits, int32 [lanes], times -1, as float32."""
    n, fives = word.type.count, FORMATS[form].high_bits
    least = 0xC1800000 if fives else 0xC1000000  # -16 or -8; the 4 bits join its fraction
    bits = b.or_(b.and_(b.shl(word, splat(I32, n, 18)), splat(I32, n, 15 << 18)), splat(I32, n, least))
    return b.fadd(b.bitcast(bits, vector(FLOAT, n)), splat(FLOAT, n, 4 if fives else 2))


def half_bytes(b: Any, form: int, value: Any, half: int, bits: Any, k: int, piece: int) -> Any:
    """The weights in lower or upper halves of bytes, four columns of some rows; their further bits are at `bits`."""
    n = value.type.count
    part = b.lshr(value, splat(I8, n, 4)) if half else b.and_(value, splat(I8, n, 15))
    if n_bits := FORMATS[form].high_bits:
        some = load(b, at(b, bits, 4 * PANEL * (n_bits * k // 4), n * piece), I16, n // 2)
        left = 4 - n_bits * (2 * k + half) % 8  # of 16 bits, for there is no instruction for bytes
        some = b.shl(some, splat(I16, n // 2, left)) if left >= 0 else b.lshr(some, splat(I16, n // 2, -left))
        part = b.or_(part, b.and_(b.bitcast(some, value.type), splat(I8, n, 16 * (2**n_bits - 1))))
    return part


class PackedVector(NamedTuple):
    """A packed vector at an address: see layout.py."""
    address: Any
    numbers: int = GROUP  # bytes of a group's numbers

    def field(self, b: Any, kind: ir.Type, group: Any, offset: Any, lanes: int) -> Any:
        """A number of a group of 32, `lanes` times: LLVM loads and copies it in one instruction."""
        return broadcast(b, load(b, at(b, self.address, (group, self.numbers + GROUP_SUMS), offset), kind), lanes)

    def factor(self, b: Any, group: Any, lanes: int) -> Any:
        return self.field(b, FLOAT, group, self.numbers, lanes)

    def less(self, b: Any, group: Any, lanes: int) -> Any:
        """What sums of products begin with, int32."""
        return self.field(b, I32, group, self.numbers + 12, lanes)

    def sum(self, b: Any, group: Any, part: tuple[int, int], lanes: int) -> Any:
        """The sum of bytes (first, number) of a group, int32: of all 32, or of the first or the second 16."""
        total, first = (self.field(b, I32, group, self.numbers + 4 * i, lanes) for i in (1, 2))
        return total if part[1] == GROUP else b.sub(total, first) if part[0] else first


class Unit(NamedTuple):
    """A unit of a packed block, see layout.unit_size."""
    number: Any
    here: Any  # the addresses: of its scales,
    factors: Any  # of the factors that it shares with others,
    bits: Any  # of its further bits
    bytes_: Any  # and of its weights

    def groups(self, b: Any, form: int) -> list[tuple[Any, int]]:
        """Where its groups begin in a packed vector, (number of a group of 32, byte): one for each of `halves`."""
        group, halves = FORMATS[form].group, FORMATS[form].halves
        return [(at(b, I64(group * half // GROUP), (self.number, group * halves // GROUP)), group * half % GROUP)
                for half in range(halves)]


def unit_of(b: Any, form: int, block: Any, number: Any) -> Unit:
    """A unit of the block at an address."""
    size, factors_bytes, shared = int(unit_size(form)), int(factors_size(form)), FORMATS[form].shared
    here = factors = at(b, block, (number, size))
    if shared:
        factors = at(b, block, (b.udiv(number, I64(shared)), shared * size + factors_bytes))
        here = at(b, here, (b.udiv(number, I64(shared)), factors_bytes), factors_bytes)
    if PATH in ON_ARM:  # hides the sum, or LLVM counts back from the unit's end, which no load of ARM can
        here = hidden(b, here)
    weights = PANEL * FORMATS[form].group
    return Unit(number, here, factors, at(b, here, size - weights - 256), at(b, here, size - weights))


def first_sums(b: Any, form: int, vectors: Sequence[PackedVector], places: Sequence[tuple[Any, int]]
               ) -> dict[tuple[int, int], Any]:
    """(vector, half) -> what `whole_sums` begin with, int32 [lanes]: less the offset or the least zero of all weights.

    places: of a unit's groups.
    """
    lanes, format_, firsts = INT8_SHAPES[PATH].lanes, FORMATS[form], {}
    for t, vector_ in enumerate(vectors):
        for h in range(format_.halves):
            first = splat(I32, lanes, 0)
            if format_.offset == BYTE_OFFSET:  # other paths subtract it themselves
                if PATH in UNSIGNED or is_flipped(form, len(vectors)):
                    first = vector_.less(b, places[h][0], lanes)
            elif less := format_.offset or least_zero(form):
                total = vector_.sum(b, places[h][0], (places[h][1], format_.group), lanes)
                first = b.mul(total, splat(I32, lanes, -less))
            firsts[t, h] = first
    return firsts


def whole_sums(b: Any, form: int, way: Way, unit: Unit, vectors: Sequence[PackedVector], pieces: range,
               fetch: Callable[[range, Any], None]) -> dict[tuple[int, int, int], Any]:
    """(piece, vector, half) -> a variable: the sums of a unit's weights times bytes, int32 [lanes].

    The offset or the least zero is subtracted from the weights. fetch(lines, i) prefetches a few lines of the unit,
    i * len(lines) lines after these; a core can't wait for many at once.
    """
    lanes, format_ = INT8_SHAPES[PATH].lanes, FORMATS[form]
    halves, group = range(format_.halves), format_.group
    rolled = is_rolled(form, len(vectors)) or PATH == "avx2" and len(vectors) > 1 and not format_.high_bits
    narrow = PATH == "avx2" and len(halves) == 2
    step = min(fours_in_16_bits(form), 8)
    signed = format_.offset == BYTE_OFFSET
    flipped = is_flipped(form, len(vectors))
    places = unit.groups(b, form)
    starts = first_sums(b, form, vectors, places)
    firsts = {(p, *key): first for key, first in starts.items() for p in pieces}
    wholes = {key: variable(b, first.type) for key, first in firsts.items()}
    for key, first in firsts.items():  # with AVX2, it comes last, so that no sum waits for it
        b.store(splat(I32, lanes, 0) if PATH == "avx2" else first, wholes[key])
    running = {key: variable(b, vector(I16, 2 * lanes)) for key in wholes} if narrow else wholes
    ordered = len(vectors) == 1 and (PATH == "avx2" or PATH in ON_ARM and format_.high_bits == 1)

    def four_columns(k: Any) -> None:
        if ordered and k:
            computed_first(b, (running if k % step else wholes).values())

        def words_of(start: int) -> dict[tuple[int, int], Any]:
            return {(t, h): b.bitcast(vector_.field(b, I32, number, at(b, I64(start + byte), (k, 4)), lanes),
                                      vector(I8, 4 * lanes))
                    for t, vector_ in enumerate(vectors) for h, (number, byte) in enumerate(places)}

        words, flips = words_of(0), words_of(GROUP) if flipped else {}
        for p in pieces:
            value = load(b, at(b, unit.bytes_, (k, 4 * PANEL), 4 * lanes * p), I8, 4 * lanes)
            for h in halves:
                part = value if len(halves) == 1 else half_bytes(b, form, value, h, unit.bits, k, p)
                for t in range(len(vectors)):
                    sum_, word = running[p, t, h], words[t, h]
                    factors = (word, b.xor(part, flips[t, h])) if flipped else (part, word)
                    b.store(dot_bytes(b, PATH, b.load(sum_), *factors, signed and not flipped), sum_)

    columns, lines = group // 4, int(unit_size(form)) // 64
    for k in range(0, columns, step):
        for sum_ in running.values() if narrow else ():
            b.store(splat(I16, 2 * lanes, 0), sum_)
        n_turns = step // (2 if PATH == "vnni512" else 1)
        if rolled:
            here = range(lines * k // columns, lines * (k + step) // columns)
            each = len(here) // n_turns if is_rolled(form, len(vectors)) else 0  # lines that a turn of the loop fetches
            fetch(here[each * n_turns:], I64(0))

            def turn(j: Any) -> None:
                fetch(here[:each], j)
                for i in range(step // n_turns):
                    four_columns(at(b, I64(k + i), (j, step // n_turns)))

            loop(b, hidden(b, I64(n_turns)), turn)  # if LLVM knew n_turns, it would load all words first: no room
        else:
            for j in range(k, k + step):
                if j % 2 == 0:
                    fetch(range(lines * j // columns, lines * (j + 2) // columns), I64(0))
                four_columns(j)
        for key, sum_ in running.items() if narrow else ():
            b.store(b.add(b.load(wholes[key]), widened(b, b.load(sum_))), wholes[key])
    for key, first in firsts.items() if PATH == "avx2" else ():
        b.store(b.add(b.load(wholes[key]), first), wholes[key])
    return wholes


def scales_of(b: Any, form: int, unit: Unit, half: int, piece: int, lanes: int) -> tuple[Any, Any, Any]:
    """(the scales of `lanes` rows, their bits, the minima) of a unit's group; None instead of what a format hasn't."""
    format_, floats = FORMATS[form], vector(FLOAT, lanes)
    width, minima = format_.scale_size, 1 if format_.shared else 4  # bytes
    words = at(b, unit.here, PANEL * width * half, width * lanes * piece)
    lowest = at(b, unit.here, PANEL * (width * format_.halves + minima * half), minima * lanes * piece)
    if format_.float16:
        return b.fpext(load(b, words, HALF, lanes), floats), None, None
    if not format_.shared:
        minimum = load(b, lowest, FLOAT, lanes) if format_.minima else None
        if width == 4:
            return load(b, words, FLOAT, lanes), None, minimum
        word = b.zext(load(b, words, I16, lanes), vector(I32, lanes))
        return scale_of(b, word), word, minimum

    def times(i: int, value: Any) -> Any:
        common = load(b, at(b, unit.factors, 2 * PANEL * i, 2 * lanes * piece), HALF, lanes)
        return b.fmul(b.fpext(common, floats), b.sitofp(value, floats))

    scale = times(0, b.sext(load(b, words, I8, lanes), vector(I32, lanes)))
    return scale, None, times(1, b.zext(load(b, lowest, I8, lanes), vector(I32, lanes))) if format_.minima else None


def add_scaled(b: Any, sums: dict[Any, Any], wholes: dict[Any, Any], form: int, unit: Unit,
               vectors: Sequence[PackedVector]) -> None:
    """Adds whole_sums to `sums` (piece, vector), float32 [lanes], times both scales: first those of the first half."""
    for half, (number, _) in enumerate(unit.groups(b, form)):
        known: dict[int, tuple[Any, Any, Any]] = {}
        for p, t in sums:
            whole, vector_ = b.load(wholes[p, t, half]), vectors[t]
            lanes = whole.type.count
            if p not in known:
                known[p] = scales_of(b, form, unit, half, p, lanes)
            scale, word, minima = known[p]
            factor = vector_.factor(b, number, lanes)
            value, sum_ = b.sitofp(whole, vector(FLOAT, lanes)), b.load(sums[p, t])
            sum_x = b.sitofp(vector_.sum(b, number, (0, GROUP), lanes), value.type)
            if minima is not None:
                sum_ = fma(b, minima, b.fmul(sum_x, factor), sum_)
            elif least_zero(form):
                beyond = b.sitofp(b.and_(word, splat(I32, lanes, 15)), value.type)  # beyond the least zero
                value = fma(b, beyond, b.fmul(sum_x, splat(FLOAT, lanes, -least_zero(form) / 24)), value)
            b.store(fma(b, value, b.fmul(scale, factor), sum_), sums[p, t])


def write_packed_product(form: int, n_vectors: int, way: Way, b: Any, w: Any, x: Any, x_stride: Any, n: Any, out: Any,
                         out_stride: Any, ahead: Any, turn: Any, turns: Any) -> None:
    """A packed block times packed vectors of n columns, a multiple of 64 -> out[t, 32 rows].

    Each sum of a group stays a whole number until its scales are multiplied in. Meanwhile the block that starts `ahead`
    bytes later is fetched: products of the same block take `turns`, and this one fetches the units of its `turn`.
    """
    lanes, units = INT8_SHAPES[PATH].lanes, b.sdiv(n, I64(FORMATS[form].group * FORMATS[form].halves))
    numbers = GROUP
    if is_flipped(form, n_vectors):  # behind all other groups
        x, numbers = at(b, x, (b.sdiv(n, I64(GROUP)), GROUP_BYTES + GROUP16_BYTES)), 2 * GROUP
    vectors = [PackedVector(at(b, x, (x_stride, t)), numbers) for t in range(n_vectors)]
    now = variable(b, I64)  # whose turn it is to fetch
    for first in range(0, PANEL // lanes, way.rows):
        pieces = range(first, first + way.rows)
        sums = zero_sums(b, [(p, t) for p in pieces for t in range(n_vectors)], lanes)
        b.store(I64(0), now)

        def add_unit(i: Any) -> None:
            # For one vector, the division keeps LLVM from fetching all lines of a unit in one go.
            unit, here = unit_of(b, form, w, i), b.load(now) if n_vectors > 1 else b.urem(i, turns)
            mine, next_ = b.icmp_signed("==", here, turn), b.add(here, I64(1))
            b.store(b.select(b.icmp_signed("<", next_, turns), next_, I64(0)), now)

            def fetch(lines: range, i: Any) -> None:
                if way.prefetches and lines:
                    with b.if_then(mine):
                        place = at(b, unit.here, ahead, (i, 64 * len(lines)))
                        prefetch(b, place, [64 * line for line in lines], way.prefetches)

            add_scaled(b, sums, whole_sums(b, form, way, unit, vectors, pieces, fetch), form, unit, vectors)

        loop(b, units, add_unit)
        for (p, t), sum_ in sums.items():
            store(b, b.load(sum_), at(b, out, (out_stride, t), 4 * lanes * p))


def write_each_block(_form: int, _n_vectors: int, _way: Way, b: Any, product: Any, w: Any, stride: Any, n_blocks: Any,
                     x: Any, n: Any, out: Any) -> None:
    """The packed product at an address, of one vector and each of some blocks, as layers.linear calls it."""
    function = b.inttoptr(product, ir.FunctionType(ir.VoidType(), [I64] * 9).as_pointer())

    def block(i: Any) -> None:
        ahead = b.select(b.icmp_signed("<", b.add(i, I64(1)), n_blocks), stride, I64(0))
        b.call(function, [at(b, w, (i, stride)), x, I64(0), n, out, I64(0), ahead, I64(0), I64(1)])

    loop(b, n_blocks, block)


def write_widened(form: int, _: int, way: Way, b: Any, w: Any, n: Any, out: Any) -> None:
    """A packed block of n columns becomes a block of its widened_form, whose products give the same bits.

    The zeros of INT4 are quarters, those of INT5 halves: their weights, less the zeros, become whole numbers four times
    and twice as large, and their scales smaller. The scales of vectors leave room for that: see intrinsics.SMALLEST.
    """
    format_, wide, lanes = FORMATS[form], widened_form(form), INT8_SHAPES[PATH].lanes
    size, with_zero = int(unit_size(wide)), not format_.minima and not format_.offset
    places = (1 if format_.high_bits else 2) if with_zero else 0

    def add_unit(i: Any) -> None:
        unit = unit_of(b, form, w, i)
        for half in range(format_.halves):
            place = at(b, out, (i, size * format_.halves), size * half)
            for p in range(PANEL // lanes):
                scale, word, minima = scales_of(b, form, unit, half, p, lanes)
                added = splat(I32, lanes, 0 if format_.minima else BYTE_OFFSET - format_.offset)
                if with_zero:
                    added = b.sub(splat(I32, lanes, BYTE_OFFSET - 24), b.and_(word, splat(I32, lanes, 15)))
                added = b.bitcast(b.mul(added, splat(I32, lanes, 0x01010101)), vector(I8, 4 * lanes))
                scale = b.fmul(scale, splat(FLOAT, lanes, 0.5**places))
                for j, values in enumerate((scale, minima) if format_.minima else (scale,)):
                    store(b, values, at(b, place, 4 * PANEL * j + 4 * lanes * p))
                for k in range(GROUP // 4):
                    value = load(b, at(b, unit.bytes_, 4 * PANEL * k + 4 * lanes * p), I8, 4 * lanes)
                    value = b.shl(half_bytes(b, form, value, half, unit.bits, k, p), splat(I8, 4 * lanes, places))
                    store(b, b.add(value, added), at(b, place, size - PANEL * GROUP + 4 * PANEL * k + 4 * lanes * p))

    loop(b, b.sdiv(n, I64(GROUP * format_.halves)), add_unit)
