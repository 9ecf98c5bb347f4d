"""The products that numba can't say in Python: vectors, in the language of LLVM.

numba turns Python into the instructions of LLVM, a compiler's language between C and machine code. An @intrinsic is
a function that writes such instructions itself: its `codegen` runs once, while a kernel is compiled, and each call on
`b`, the builder, appends an instruction to the kernel. So a loop like `for r in range(n_rows)` below runs at compile
time and writes the same instructions for each row, while `loop` writes a loop that runs in the kernel. A vector is
several numbers that one instruction processes together; LLVM chooses the machine's own instructions for vectors, and
keeps variables (`alloca`) in registers. Addresses are integers: LLVM knows no arrays.
"""
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwen3_io.errors import InputError, brief
from qwen3_kernels.layout import ABANDONED, ARRIVED, GROUP, PAIR, PANEL, ROUND, UNIT

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16  # float32 numbers in a vector; LLVM splits it where the machine's vectors are shorter
# Bytes to prefetch ahead. Intel's hardware prefetcher stops at the end of each page of 4096; AMD's doesn't, and is
# slowed down by requests.
AHEAD = 0 if llvm.get_host_cpu_name().startswith("znver") else 1024


def vector(kind: ir.Type, n: int) -> ir.VectorType:
    return ir.VectorType(kind, n)


def splat(kind: ir.Type, n: int, value: float) -> ir.Constant:
    """A vector of n times the same value."""
    return ir.Constant(vector(kind, n), [value] * n)


def call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """A call of one of LLVM's own functions, or of a machine's special instruction."""
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return b.call(function, args)


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


def prefetch(b: Any, address: Any) -> None:
    call(b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1))


def add_neighbours(b: Any, add: Callable, x: Any, y: Any = None) -> Any:
    """The sums of neighbouring numbers of x, followed by the sums of neighbouring numbers of y."""
    n = x.type.count * (1 if y is None else 2)
    return add(*(b.shuffle_vector(x, x if y is None else y, ir.Constant(vector(I32, n // 2), list(range(start, n, 2))))
                 for start in (0, 1)))


def totals(b: Any, values: Sequence[Any]) -> Any:
    """The sums of 1, 2 or 4 vectors of floats, as one vector."""
    left = list(values)
    while len(left) > 1:
        left = [add_neighbours(b, b.fadd, x, y) for x, y in zip(left[::2], left[1::2])]
    sums = left[0]
    while sums.type.count > len(values):
        sums = add_neighbours(b, b.fadd, sums)
    return sums


def loop(b: Any, n: Any, body: Callable[[Any], None]) -> None:
    """for i in range(n): body(i), in the kernel."""
    i = cgutils.alloca_once_value(b, I64(0))
    head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
    b.branch(head)
    b.position_at_end(head)
    b.cbranch(b.icmp_signed("<", b.load(i), n), inside, after)
    b.position_at_end(inside)
    body(b.load(i))
    b.store(b.add(b.load(i), I64(1)), i)
    b.branch(head)
    b.position_at_end(after)


def load_float(b: Any, address: Any, kind: str, n: int) -> Any:
    """n numbers of 16 or 32 bits as float32."""
    if kind == "bf16":  # the upper half of a float32
        bits = b.zext(load(b, address, I16, n), vector(I32, n))
        return b.bitcast(b.shl(bits, splat(I32, n, 16)), vector(F32, n))
    if kind == "f16":
        return b.fpext(load(b, address, F16, n), vector(F32, n))
    return load(b, address, F32, n)


def row_part(b: Any, kind: str, row: Any, n: Any, column: Any, count: int) -> Any:
    """`count` numbers of a stored row of n, from `column` on, as float32."""
    if kind != "i8":
        return load_float(b, at(b, row, (column, SIZES[kind])), kind, count)
    scale = b.fpext(load(b, at(b, row, n, (b.lshr(column, I64(5)), 2)), F16), F32)
    return b.fmul(b.sitofp(load(b, at(b, row, column), I8, count), vector(F32, count)), broadcast(b, scale, count))


SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1}  # bytes of a number


class Shape(NamedTuple):
    """How a CPU's registers are used best by the products below."""
    lanes: int  # 32-bit numbers in a vector
    together: int  # vectors of a panel's 32 rows that are worked on at a time
    vectors: int  # that the panel is multiplied with at a time


def float_shape(features: dict[str, bool]) -> Shape:
    """The shape of float products on a CPU with these features: as many sums as the CPU has registers."""
    if features.get("avx512f"):
        return Shape(16, 2, 12)
    if features.get("avx2"):
        return Shape(8, 2, 6)
    return Shape(4, 4, 6) if features.get("neon") else Shape(4, 2, 5)


INT8_SHAPES = {"vnni512": Shape(16, 2, 6), "vnni": Shape(8, 1, 6), "avx2": Shape(8, 1, 6), "neon": Shape(4, 2, 5),
               "plain": Shape(4, 1, 4)}


def int8_path(features: dict[str, bool]) -> str:
    """Which instructions multiply bytes: the best that a CPU with these features has."""
    if features.get("avx512vnni"):
        return "vnni512"
    if features.get("avxvnni"):
        return "vnni"
    if features.get("avx2"):
        return "avx2"
    return "neon" if features.get("dotprod") else "plain"


def runs(path: str, features: dict[str, bool]) -> bool:
    """Whether a CPU with these features has the instructions of a path."""
    if path == "vnni":
        return bool(features.get("avxvnni") or features.get("avx512vnni") and features.get("avx512vl"))
    needs = {"vnni512": "avx512vnni", "avx2": "avx2", "neon": "dotprod"}
    return path == "plain" or bool(features.get(needs[path]))


def chosen_path(wish: str | None, features: dict[str, bool]) -> str:
    """The path that is wished for, or the best. Raises InputError if there is no such path, or not on this CPU."""
    if not wish:
        return int8_path(features)
    if wish not in INT8_SHAPES or not runs(wish, features):
        able = [path for path in INT8_SHAPES if runs(path, features)]
        raise InputError(f"QWEN3_INT8_PATH is {brief(repr(wish))}; this CPU has {', '.join(able)}")
    return wish


FEATURES = dict(llvm.get_host_cpu_features())
PATH, FLOAT_SHAPE = chosen_path(os.environ.get("QWEN3_INT8_PATH"), FEATURES), float_shape(FEATURES)


def dot_bytes(b: Any, path: str, sums: Any, w: Any, x: Any, signed: bool) -> Any:
    """sums [n] + four products each of the bytes w and x [4 n]; n are the path's lanes.

    w is unsigned, x signed. With `signed`, w stands for w - 128; the paths with "vnni" leave that subtraction to the
    caller, because their instruction wants one factor unsigned.
    """
    n = sums.type.count
    if path.startswith("vnni"):
        if llvm.llvm_version_info < (22,):  # before LLVM 22, this intrinsic takes vectors of 32-bit integers
            w, x = b.bitcast(w, sums.type), b.bitcast(x, sums.type)
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * n}", sums.type, sums, w, x)
    if signed:
        w = b.xor(w, splat(I8, 4 * n, 0x80))
    if path == "avx2":  # u8 times s8 in pairs, whose sum must fit into 16 bits: |w| <= 127 or w <= 15 sees to that
        if signed:
            x = call(b, "llvm.x86.avx2.psign.b", x.type, x, w)
            w = call(b, "llvm.abs.v32i8", w.type, w, ir.IntType(1)(0))
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 2 * n), w, x)
        return b.add(sums, call(b, "llvm.x86.avx2.pmadd.wd", sums.type, pairs, splat(I16, 2 * n, 1)))
    if path == "neon":
        return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, w, x)
    products = b.mul((b.sext if signed else b.zext)(w, vector(I32, 4 * n)), b.sext(x, vector(I32, 4 * n)))
    products = add_neighbours(b, b.add, add_neighbours(b, b.add, products))
    return b.add(sums, products)


# Products: where nearly all time is spent. The formats of their factors: see layout.py.


def zero_sums(b: Any, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """A variable for each key: a vector of float32 zeros."""
    sums = {key: cgutils.alloca_once(b, vector(F32, lanes)) for key in keys}
    for sum_ in sums.values():
        b.store(splat(F32, lanes, 0.0), sum_)
    return sums


def float_dot(kind: str, n_rows: int, n_vectors: int) -> Any:
    """An intrinsic (w, stride, x, x_stride, n, out, out_stride): n_rows rows of floats times n_vectors.

    w: rows of n floats, n a multiple of 32; x: float32 [n] each. The strides are the bytes between two rows, two
    vectors, and the results of two vectors; the results of the rows are neighbours.
    """
    size, pieces = SIZES[kind], 4 // n_rows  # sums per result: they hide how long adding takes
    tile = [(r, t) for r in range(n_rows) for t in range(n_vectors)]

    @intrinsic
    def dot(context, w, stride, x, x_stride, n, out, out_stride):
        def codegen(context, b, signature, args):
            w, stride, x, x_stride, n, out, out_stride = args
            sums = zero_sums(b, [(r, t, i) for r, t in tile for i in range(pieces)], LANES)

            def step(i: Any, n_pieces: int) -> None:
                rows = [at(b, w, (stride, r)) for r in range(n_rows)]
                vectors = [at(b, x, (x_stride, t), (i, 64 * 4)) for t in range(n_vectors)]
                for row in rows if AHEAD else ():
                    for line in range(0, n_pieces * LANES * size, 64):
                        prefetch(b, at(b, row, (i, 64 * size), AHEAD + line))
                for piece in range(n_pieces):
                    column = b.add(b.mul(i, I64(64)), I64(piece * LANES))
                    values = [row_part(b, kind, row, n, column, LANES) for row in rows]
                    xs = [load(b, at(b, x, piece * LANES * 4), F32, LANES) for x in vectors]
                    for r, t in tile:
                        sum_ = sums[r, t, piece % pieces]
                        b.store(fma(b, values[r], xs[t], b.load(sum_)), sum_)

            whole = b.sdiv(n, I64(64))
            loop(b, whole, lambda i: step(i, 4))
            with b.if_then(b.icmp_signed("<", b.mul(whole, I64(64)), n)):
                step(whole, 2)
            for t in range(n_vectors):
                added = []
                for r in range(n_rows):
                    parts = [b.load(sums[r, t, i]) for i in range(pieces)]
                    while len(parts) > 1:
                        parts = [b.fadd(one, other) for one, other in zip(parts[::2], parts[1::2])]
                    added += parts
                store(b, totals(b, added), at(b, out, (out_stride, t)))
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 7), codegen

    return dot


def packed_tile(bits: int, n_vectors: int) -> Any:
    """An intrinsic (w, x, x_stride, n, out, out_stride): a packed block times n_vectors packed vectors of n columns.

    n is a multiple of 64; the strides are the bytes between two vectors, and between the results of two vectors. Each
    sum of a group stays a whole number until its scales are multiplied in.
    """
    lanes, together = INT8_SHAPES[PATH].lanes, INT8_SHAPES[PATH].together
    halves = range(8 // bits)
    if n_vectors == 1:  # the weights come from memory: read them in one go
        together = PANEL // lanes

    @intrinsic
    def tile(context, w, x, x_stride, n, out, out_stride):
        def codegen(context, b, signature, args):
            w, x, x_stride, n, out, out_stride = args
            groups = b.sdiv(n, I64(GROUP))
            vectors = [at(b, x, (x_stride, t)) for t in range(n_vectors)]
            scales = [b.add(vector_, n) for vector_ in vectors]
            corrections = [at(b, scale, (groups, 4)) for scale in scales]

            for first in range(0, PANEL // lanes, together):
                pieces = range(first, first + together)
                sums = zero_sums(b, [(p, t) for p in pieces for t in range(n_vectors)], lanes)

                def unit(i: Any) -> None:
                    w_scales = at(b, w, (i, UNIT[bits]))
                    here = at(b, w_scales, UNIT[bits] - 1024)
                    numbers = [b.add(b.mul(i, I64(8 // bits)), I64(h)) for h in halves]
                    for line in range(0, UNIT[bits], 64) if AHEAD and n_vectors == 1 else ():
                        prefetch(b, at(b, w_scales, AHEAD + line))
                    wholes = {}
                    for p, t in sums:
                        for h, g in enumerate(numbers):
                            wholes[p, t, h] = cgutils.alloca_once(b, vector(I32, lanes))
                            b.store(broadcast(b, load(b, at(b, corrections[t], (g, 4)), I32), lanes), wholes[p, t, h])

                    def four_columns(k: int) -> None:
                        words = {(t, h): b.bitcast(broadcast(b, load(b, at(b, v, (g, GROUP), 4 * k), I32), lanes),
                                                   vector(I8, 4 * lanes))
                                 for t, v in enumerate(vectors) for h, g in enumerate(numbers)}
                        for p in pieces:
                            value = load(b, at(b, here, 4 * PANEL * k + 4 * lanes * p), I8, 4 * lanes)
                            for h in halves:
                                part = value
                                if bits == 4:
                                    part = (b.lshr(value, splat(I8, 4 * lanes, 4)) if h else
                                            b.and_(value, splat(I8, 4 * lanes, 15)))
                                for t in range(n_vectors):
                                    sum_ = wholes[p, t, h]
                                    b.store(dot_bytes(b, PATH, b.load(sum_), part, words[t, h], bits == 8), sum_)

                    for k in range(GROUP // 4):
                        four_columns(k)
                    for h, g in enumerate(numbers):
                        for p in pieces:
                            w_scale = load_float(b, at(b, w_scales, 2 * PANEL * h + 2 * lanes * p), "f16", lanes)
                            for t in range(n_vectors):
                                scale = b.fmul(w_scale, broadcast(b, load(b, at(b, scales[t], (g, 4)), F32), lanes))
                                whole = b.sitofp(b.load(wholes[p, t, h]), vector(F32, lanes))
                                b.store(fma(b, whole, scale, b.load(sums[p, t])), sums[p, t])

                loop(b, b.sdiv(groups, I64(8 // bits)), unit)
                for (p, t), sum_ in sums.items():
                    store(b, b.load(sum_), at(b, out, (out_stride, t), 4 * lanes * p))
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 6), codegen

    return tile


def float_tile(n_vectors: int) -> Any:
    """An intrinsic (panel, panel_stride, x, x_stride, n, out, out_stride, add): n_vectors vectors times a panel.

    The panel is float32 [n, 32], `panel_stride` bytes from one row to the next; x: n_vectors rows of float32 [n], n a
    multiple of 8 -> out: n_vectors rows of float32 [32], to which the results are added if `add` is 1. All sums stay in
    registers, so that each number that is loaded is used several times: the inner kernel of every fast matrix product
    (Goto & van de Geijn 2008).
    """
    lanes, together = FLOAT_SHAPE.lanes, FLOAT_SHAPE.together

    @intrinsic
    def tile(context, panel, panel_stride, x, x_stride, n, out, out_stride, add):
        def codegen(context, b, signature, args):
            panel, panel_stride, x, x_stride, n, out, out_stride, add = args
            adds = b.icmp_signed("!=", add, I64(0))
            vectors = [at(b, x, (x_stride, t)) for t in range(n_vectors)]
            for first in range(0, PANEL // lanes, together):
                pieces = range(first, first + together)
                sums = zero_sums(b, [(p, t) for p in pieces for t in range(n_vectors)], lanes)

                def body(i: Any) -> None:
                    for k in range(8):
                        row = at(b, panel, (panel_stride, b.add(b.mul(i, I64(8)), I64(k))))
                        ws = {p: load(b, at(b, row, 4 * lanes * p), F32, lanes) for p in pieces}
                        for t in range(n_vectors):
                            value = broadcast(b, load(b, at(b, vectors[t], (i, 32), 4 * k), F32), lanes)
                            for p in pieces:
                                b.store(fma(b, ws[p], value, b.load(sums[p, t])), sums[p, t])

                loop(b, b.sdiv(n, I64(8)), body)
                for (p, t), sum_ in sums.items():
                    address = at(b, out, (out_stride, t), 4 * lanes * p)
                    with b.if_else(adds) as (then, otherwise):
                        with then:
                            store(b, b.fadd(load(b, address, F32, lanes), b.load(sum_)), address)
                        with otherwise:
                            store(b, b.load(sum_), address)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), codegen

    return tile


def expand_panel(kind: str) -> Any:
    """An intrinsic (w, stride, rows, n, out): 32 rows of n numbers -> float32 [n, 32], n a multiple of 16.

    From `rows` on the last row is taken again. Columns become rows by exchanging ever smaller squares of 16 x 16.
    """
    half = PANEL // 2

    @intrinsic
    def expand(context, w, stride, rows, n, out):
        def codegen(context, b, signature, args):
            w, stride, rows, n, out = args
            last = b.sub(rows, I64(1))
            for side in range(2):
                starts = []
                for r in range(side * half, side * half + half):
                    r = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
                    starts.append(b.add(w, b.mul(stride, r)))

                def square(i: Any) -> None:
                    values = [row_part(b, kind, start, n, b.mul(i, I64(half)), half) for start in starts]
                    for distance in (8, 4, 2, 1):
                        orders = [ir.Constant(vector(I32, half), order) for order in (
                            [half + (c ^ distance) if c & distance else c for c in range(half)],
                            [half + c if c & distance else c ^ distance for c in range(half)])]
                        for r in [r for r in range(half) if not r & distance]:
                            pair = values[r], values[r + distance]
                            values[r], values[r + distance] = (b.shuffle_vector(*pair, order) for order in orders)
                    for c, value in enumerate(values):
                        store(b, value, at(b, out, (i, half * 4 * PANEL), c * 4 * PANEL + side * 4 * half))

                loop(b, b.sdiv(n, I64(half)), square)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 5), codegen

    return expand


def weighted_sum(kind: str, n_vectors: int) -> Any:
    """An intrinsic (v, stride, p, p_stride, n, width, out, out_stride): adds weighted sums of n rows to n_vectors ones.

    v: n rows of `width` floats, a multiple of 32; p: n_vectors times float32 [n]; out: likewise [width].
    Eight rows at a time, so that memory is read in its order and sums are seldom loaded and stored.
    """
    @intrinsic
    def add(context, v, stride, p, p_stride, n, width, out, out_stride):
        def codegen(context, b, signature, args):
            v, stride, p, p_stride, n, width, out, out_stride = args

            def strip(first: Any, n_rows: int, column: Any, n_pieces: int) -> None:
                outs = {(i, t): at(b, out, (out_stride, t), (column, 4), 4 * LANES * i)
                        for i in range(n_pieces) for t in range(n_vectors)}
                sums = {key: load(b, address, F32, LANES) for key, address in outs.items()}
                for r in range(n_rows):
                    row = b.add(first, I64(r))
                    weights = [broadcast(b, load(b, at(b, p, (p_stride, t), (row, 4)), F32), LANES)
                               for t in range(n_vectors)]
                    for i in range(n_pieces):
                        here = b.add(column, I64(LANES * i))
                        value = row_part(b, kind, at(b, v, (stride, row)), width, here, LANES)
                        for t, weight in enumerate(weights):
                            sums[i, t] = fma(b, value, weight, sums[i, t])
                for key, address in outs.items():
                    store(b, sums[key], address)

            def rows(first: Any, n_rows: int) -> None:
                whole = b.sdiv(width, I64(64))
                loop(b, whole, lambda c: strip(first, n_rows, b.mul(c, I64(64)), 4))
                with b.if_then(b.icmp_signed("<", b.mul(whole, I64(64)), width)):
                    strip(first, n_rows, b.mul(whole, I64(64)), 2)

            eights = b.sdiv(n, I64(8))
            loop(b, eights, lambda i: rows(b.mul(i, I64(8)), 8))
            loop(b, b.sub(n, b.mul(eights, I64(8))), lambda i: rows(b.add(b.mul(eights, I64(8)), i), 1))
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), codegen

    return add


ROWS = 4  # of the KV cache that are multiplied with a vector together
(dot_f32, dots_f32), (dot_bf16, dots_bf16), (dot_f16, dots_f16) = (
    [float_dot(kind, 1, n) for n in (1, PAIR)] for kind in ("f32", "bf16", "f16"))
(rows_f32, rows_f32_pair), (rows_bf16, rows_bf16_pair), (rows_f16, rows_f16_pair), (rows_i8, rows_i8_pair) = (
    [float_dot(kind, ROWS, n) for n in (1, PAIR)] for kind in ("f32", "bf16", "f16", "i8"))
dot_i8, dots_i8 = (float_dot("i8", 1, n) for n in (1, PAIR))
(add_f32, adds_f32), (add_bf16, adds_bf16), (add_f16, adds_f16), (add_i8, adds_i8) = (
    [weighted_sum(kind, n) for n in (1, PAIR)] for kind in ("f32", "bf16", "f16", "i8"))
panel_f32, panel_bf16, panel_f16, panel_i8 = (expand_panel(kind) for kind in ("f32", "bf16", "f16", "i8"))
FLOAT_VECTORS, SOME_VECTORS = FLOAT_SHAPE.vectors, 4
INT8_VECTORS, INT4_VECTORS = INT8_SHAPES[PATH].vectors, INT8_SHAPES[PATH].vectors // 2  # 4 bits have two sums each
tiles_float, some_float, one_float = (float_tile(n) for n in (FLOAT_VECTORS, SOME_VECTORS, 1))
tiles_int8, tiles_int4 = packed_tile(8, INT8_VECTORS), packed_tile(4, INT4_VECTORS)
one_int8, one_int4 = (packed_tile(bits, 1) for bits in (8, 4))


@intrinsic
def meet(context, barrier, n_threads):
    """Waits until all threads of the team are here, or one has failed. `barrier`: the address of int64 [16], zeros.

    Threads that have arrived are counted on and on, since a count that is set back could be set back too late.
    """
    def codegen(context, b, signature, args):
        barrier, n_threads = args
        arrived, round_, abandoned = (b.inttoptr(b.add(barrier, I64(8 * i)), I64.as_pointer())
                                      for i in (ARRIVED, ROUND, ABANDONED))
        now = b.load_atomic(round_, "acquire", 8)
        before = b.atomic_rmw("add", arrived, I64(1), "acq_rel")
        next_ = b.add(now, I64(1))
        last = b.icmp_signed("==", b.add(before, I64(1)), b.mul(next_, n_threads))
        waits = cgutils.alloca_once_value(b, I64(0))
        open_, wait, turn, after = (b.append_basic_block(name) for name in ("open", "wait", "turn", "after"))
        b.cbranch(last, open_, wait)
        b.position_at_end(open_)
        b.store_atomic(next_, round_, "release", 8)
        b.branch(after)
        b.position_at_end(wait)
        opened = b.icmp_signed("!=", b.load_atomic(round_, "acquire", 8), now)
        failed = b.icmp_signed("!=", b.load_atomic(abandoned, "acquire", 8), I64(0))
        b.cbranch(b.or_(opened, failed), after, turn)
        b.position_at_end(turn)
        b.store(b.add(b.load(waits), I64(1)), waits)
        if FEATURES.get("sse2"):  # leaves the core to a thread that shares it
            call(b, "llvm.x86.sse2.pause", ir.VoidType())
        if os.name == "posix":  # who waits for long lets others run: there may be more threads than cores
            with b.if_then(b.icmp_signed(">", b.load(waits), I64(4000))):
                call(b, "sched_yield", I32)
        b.branch(wait)
        b.position_at_end(after)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def pointer(kind: Any) -> Any:
    """An intrinsic that makes an address a pointer, for numba.carray."""
    @intrinsic
    def convert(context, address):
        def codegen(context, b, signature, args):
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))
        return types.CPointer(kind)(types.int64), codegen
    return convert


to_pointer_u8, to_pointer_u16, to_pointer_f32 = pointer(types.uint8), pointer(types.uint16), pointer(types.float32)


@intrinsic
def float_from_bits(context, bits):
    """The float32 with these bits."""
    return types.float32(types.int32), lambda context, b, signature, args: b.bitcast(args[0], F32)


@intrinsic
def half_from_float(context, value):
    """The bits of a number as float16."""
    def codegen(context, b, signature, args):
        return b.bitcast(b.fptrunc(args[0], F16), I16)
    return types.uint16(types.float32), codegen


@intrinsic
def float_from_half(context, bits):
    def codegen(context, b, signature, args):
        return b.fpext(b.bitcast(args[0], F16), F32)
    return types.float32(types.uint16), codegen


@intrinsic
def bf16_from_float(context, value):
    """The bits of a number as bfloat16, rounded to the nearest, ties to even."""
    def codegen(context, b, signature, args):
        bits = b.bitcast(args[0], I32)
        upper = b.lshr(bits, I32(16))
        rounded = b.lshr(b.add(bits, b.add(b.and_(upper, I32(1)), I32(0x7FFF))), I32(16))
        is_nan = b.fcmp_unordered("uno", args[0], args[0])
        return b.trunc(b.select(is_nan, b.or_(upper, I32(0x40)), rounded), I16)
    return types.uint16(types.float32), codegen


@intrinsic
def float_from_bf16(context, bits):
    def codegen(context, b, signature, args):
        return b.bitcast(b.shl(b.zext(args[0], I32), I32(16)), F32)
    return types.float32(types.uint16), codegen
