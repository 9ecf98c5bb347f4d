"""The kernels of qwen3_numba.py: what numba compiles for this CPU, once. Run or import qwen3_numba.py, not this file.

Those that have a namesake in qwen3.py compute the same; NumPy says there what it is. The order is that of forward:

    vectors and products (LLVM) -> small steps -> linear -> attention -> packing weights -> decoder layers -> logits

Four of them are called from Python, two by a team of threads at the same time, each with its rank; `machine_code`
compiles them and all that they call. How weights, vectors and the cache lie in memory is told in qwen3_layout.py.
"""
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from tqdm import tqdm

from qwen3 import InputError
from qwen3_layout import (BF16, CACHE8, DEPTH, DOWN, FEW, FLOAT16, FLOAT32, GATE, GROUP, INT8, K, LONG_PART, OUT,
                          PANEL, PANELS, POSITIONS, Q, TILE, UNIT, UP, V, padded)

# ----------------------------------------------------------------------------------------------------------------------
# LLVM: what numba can't say in Python, vectors and the products made of them
#
# numba turns Python into the instructions of LLVM, a compiler's language between C and machine code. An @intrinsic is
# a function that writes such instructions itself: its `codegen` runs once, while a kernel is compiled, and what it
# calls on `b`, the builder, is appended to the kernel. So a loop like `for r in range(n_rows)` below runs at compile
# time and writes the same instructions for each row, while `loop` writes a loop that runs in the kernel. Vectors are
# numbers that one instruction processes together; LLVM chooses the machine's own instructions for them, and keeps in
# registers what is here stored in an `alloca`, its word for a variable. Addresses are integers: LLVM knows no arrays.
# ----------------------------------------------------------------------------------------------------------------------

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16  # float32 numbers that are processed together; LLVM splits what is wider than the machine's vectors
# Bytes that are asked for before they are needed. Intel's hardware by itself stops at the end of each page of 4096;
# AMD's doesn't, and is slowed down by being asked.
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
    """A vector of n times a number that is known only in the kernel."""
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
    """An address plus offsets in bytes, of which a pair is a product: (index, size)."""
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
    """The sums of neighbouring numbers of x, and behind them those of y."""
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
    """The shape of the products of floats on a CPU that reports these features: as many sums as it has registers."""
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


FEATURES = dict(llvm.get_host_cpu_features())
PATH, FLOAT_SHAPE = os.environ.get("QWEN3_INT8_PATH") or int8_path(FEATURES), float_shape(FEATURES)


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


# Products: where nearly all time is spent. The formats of their factors: see qwen3_layout.py.


def zero_sums(b: Any, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """A variable for each key: a vector of float32 zeros."""
    sums = {key: cgutils.alloca_once(b, vector(F32, lanes)) for key in keys}
    for sum_ in sums.values():
        b.store(splat(F32, lanes, 0.0), sum_)
    return sums


def float_dot(kind: str, n_rows: int, n_vectors: int) -> Any:
    """An intrinsic (w, stride, x, x_stride, n, out, out_stride): n_rows rows of floats times n_vectors.

    w: rows of n floats, n a multiple of 32; x: float32 [n] each. The strides are the bytes between two rows, two
    vectors, and the results of two vectors; those of the rows are neighbours.
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
    if n_vectors == 1:  # what is read from memory is read in one go
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


PAIR, ROWS = 2, 4  # vectors that are multiplied with a row of floats together; rows of the KV cache likewise
(dot_f32, dots_f32), (dot_bf16, dots_bf16), (dot_f16, dots_f16) = (
    [float_dot(kind, 1, n) for n in (1, PAIR)] for kind in ("f32", "bf16", "f16"))
(rows_bf16, rows_bf16_pair), (rows_f16, rows_f16_pair), (rows_i8, rows_i8_pair) = (
    [float_dot(kind, ROWS, n) for n in (1, PAIR)] for kind in ("bf16", "f16", "i8"))
dot_i8, dots_i8 = (float_dot("i8", 1, n) for n in (1, PAIR))
(add_bf16, adds_bf16), (add_f16, adds_f16), (add_i8, adds_i8) = (
    [weighted_sum(kind, n) for n in (1, PAIR)] for kind in ("bf16", "f16", "i8"))
panel_f32, panel_bf16, panel_f16, panel_i8 = (expand_panel(kind) for kind in ("f32", "bf16", "f16", "i8"))
FLOAT_VECTORS, SOME_VECTORS = FLOAT_SHAPE.vectors, 4
INT8_VECTORS, INT4_VECTORS = INT8_SHAPES[PATH].vectors, INT8_SHAPES[PATH].vectors // 2  # 4 bits have two sums each
tiles_float, some_float, one_float = (float_tile(n) for n in (FLOAT_VECTORS, SOME_VECTORS, 1))
tiles_int8, tiles_int4 = packed_tile(8, INT8_VECTORS), packed_tile(4, INT4_VECTORS)
one_int8, one_int4 = (packed_tile(bits, 1) for bits in (8, 4))


@intrinsic
def meet(context, barrier, n_threads):
    """Waits until all threads of the team are here. `barrier` is the address of int64 [16]: arrived, and the round."""
    def codegen(context, b, signature, args):
        barrier, n_threads = args
        arrived, round_ = (b.inttoptr(b.add(barrier, I64(at)), I64.as_pointer()) for at in (0, 64))
        now = b.load_atomic(round_, "acquire", 8)
        last = b.icmp_signed("==", b.atomic_rmw("add", arrived, I64(1), "acq_rel"), b.sub(n_threads, I64(1)))
        waits = cgutils.alloca_once_value(b, I64(0))
        open_, wait, turn, after = (b.append_basic_block(name) for name in ("open", "wait", "turn", "after"))
        b.cbranch(last, open_, wait)
        b.position_at_end(open_)
        b.store_atomic(I64(0), arrived, "release", 8)
        b.store_atomic(b.add(now, I64(1)), round_, "release", 8)
        b.branch(after)
        b.position_at_end(wait)
        b.cbranch(b.icmp_signed("==", b.load_atomic(round_, "acquire", 8), now), turn, after)
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


# ----------------------------------------------------------------------------------------------------------------------
# The small steps of a layer
# ----------------------------------------------------------------------------------------------------------------------


# A function is compiled once for each combination of its arguments' types. To numba a constant like 0 or True has a
# type of its own, np.int64(0) has not: that is why it is written below.
#
# Sums may be taken in any order, so that they become vectors; but NaN stays NaN, or nobody noticed broken weights.
compiled = partial(numba.njit, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
called_from_python = partial(compiled, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # see machine_code


@compiled
def share(n, rank, n_threads):
    """(start, end) of a thread's part of n rows, in whole panels."""
    panels = (n + PANEL - 1) // PANEL
    return min(n, panels * rank // n_threads * PANEL), min(n, panels * (rank + 1) // n_threads * PANEL)


@compiled
def part_of(n, rank, n_threads):
    """A thread's part of range(n)."""
    return range(n * rank // n_threads, n * (rank + 1) // n_threads)


up_to = compiled(padded)


@compiled
def exp(x):
    """e ** x for x <= 0, to (4 + 0.8 |x|) 1e-7 of it: 2 ** whole from a float's bits, 2 ** fraction by a polynomial."""
    x = (np.float32(-87.0) if x < -87 else x) * np.float32(1.4426950408889634)
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    return p * float_from_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@compiled
def rms_norm(x, weight, eps, out):
    """qwen3.rms_norm of x [d] into out [d, or more]."""
    square = np.float32(0)
    for i in range(len(x)):
        square += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(square / np.float32(len(x)) + np.float32(eps))
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@compiled
def apply_rope(x, cos, sin):
    """qwen3.apply_rope of x [head_dim] in place."""
    half = len(cos)
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i] + a * sin[i]


@compiled
def silu_times(gate, up):
    """gate [n] becomes silu(gate) * up."""
    for i in range(len(gate)):
        e = exp(-abs(gate[i]))
        gate[i] *= up[i] * (np.float32(1) if gate[i] >= 0 else e) / (np.float32(1) + e)


@compiled
def add_to(x, y):
    """x [n] becomes x + y."""
    for i in range(len(x)):
        x[i] += y[i]


@compiled
def largest_of(x):
    """The largest number of x float32 [1 or more]. NaN counts as the largest, unless its sign is negative."""
    bits, largest = x.view(np.int32), np.int32(-2**31)
    for i in range(len(x)):  # integers, in the order of the numbers: their maximum is found many at a time
        largest = max(largest, bits[i] ^ (bits[i] >> np.int32(31) & np.int32(0x7FFFFFFF)))
    return float_from_bits(largest ^ (largest >> np.int32(31) & np.int32(0x7FFFFFFF)))


@compiled
def largest_size(x):
    """The largest absolute value of x float32. NaN counts as the largest."""
    bits, largest = x.view(np.int32), np.int32(0)
    for i in range(len(x)):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return float_from_bits(largest)


@compiled
def bytes_from(largest):
    """The factor that makes numbers up to `largest` bytes; 0 for such small ones that it would overflow."""
    return np.float32(127) / largest if largest > np.float32(1e-36) else np.float32(0)


@compiled
def pack_vector(x, packed, zero, first, last):
    """Packs groups first to last - 1 of x float32 [n], n a multiple of 64, for packed weights, see qwen3_layout.py.

    zero: the byte that stands for 0 in the weights.
    """
    n = len(x)
    values = packed[:n].view(np.int8)
    scales, corrections = packed[n:n + n // 8].view(np.float32), packed[n + n // 8:n + n // 4].view(np.int32)
    for g in range(first, last):
        group, whole = x[g * GROUP:(g + 1) * GROUP], values[g * GROUP:(g + 1) * GROUP]
        largest = largest_size(group)
        inverse = bytes_from(largest)
        sum_, xq, qq = np.int32(0), np.float32(0), np.float32(0)
        for i in range(GROUP):
            q = np.floor(group[i] * inverse + np.float32(0.5))
            xq += group[i] * q
            qq += q * q
            whole[i] = np.int32(q)
            sum_ += np.int32(q)
        # The scale that errs least; NaN if a number is NaN or infinite.
        scales[g] = (xq / qq if qq > 0 else np.float32(0)) + largest * np.float32(0)
        corrections[g] = -zero * sum_


ZERO_INT8 = 128 if PATH.startswith("vnni") else 0  # the other instructions subtract it themselves
ZERO_INT4 = 8


@compiled
def ready(x, n, form, packed, start, end):
    """Makes numbers start to end of x float32 [n, or more] the factor of a product with weights in this format.

    start is a multiple of 32, end too, or n. See `linear`.
    """
    if form >= INT8 and start < end:
        width = up_to(n, 2 * GROUP)
        if end == n:
            x[n:width] = 0
            end = width
        zero = ZERO_INT8 if form == INT8 else ZERO_INT4
        pack_vector(x[:width], packed[:width * 5 // 4], zero, start // GROUP, end // GROUP)


# ----------------------------------------------------------------------------------------------------------------------
# linear: the namesake of qwen3.linear, for one vector or many
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def linear(weight, x, packed, out, column, start, end, space):
    """Rows start to end of a weight times the vectors x float32 [n, ...] -> out float32 [n, ...], from `column` on.

    weight: (address, bytes per row or packed block, format, rows, columns), see Weights. packed uint8 [n, ...]: the
    vectors once more, for packed weights. start is a multiple of 32, and `out` is padded to a multiple of 32. space
    float32: to work in.
    """
    address, stride, form, columns = weight[0], weight[1], weight[2], up_to(weight[4], 32)
    if form >= INT8:
        linear_packed(weight, packed, out, column, start, end)
    elif len(x) > FEW:
        linear_expanded(weight, x, out, column, start, end, space.ctypes.data)
    else:
        for r in range(start, end):
            for t in range(0, len(x), PAIR):
                float_row(address + r * stride, form, x[t].ctypes.data, x.strides[0], columns,
                          out[t].ctypes.data + 4 * (column + r), out.strides[0], min(PAIR, len(x) - t))


@compiled
def float_row(row, form, x, x_stride, n, out, out_stride, count):
    """A row of floats times `count` vectors, one or PAIR."""
    if form == BF16:
        if count == 1:
            dot_bf16(row, 0, x, x_stride, n, out, out_stride)
        else:
            dots_bf16(row, 0, x, x_stride, n, out, out_stride)
    elif form == FLOAT16:
        if count == 1:
            dot_f16(row, 0, x, x_stride, n, out, out_stride)
        else:
            dots_f16(row, 0, x, x_stride, n, out, out_stride)
    elif form == CACHE8:
        if count == 1:
            dot_i8(row, 0, x, x_stride, n, out, out_stride)
        else:
            dots_i8(row, 0, x, x_stride, n, out, out_stride)
    elif count == 1:
        dot_f32(row, 0, x, x_stride, n, out, out_stride)
    else:
        dots_f32(row, 0, x, x_stride, n, out, out_stride)


@compiled
def linear_packed(weight, packed, out, column, start, end):
    """Packed weights are multiplied as they are, a block with several vectors, so that it is read once."""
    form, n, width = weight[2], len(packed), up_to(weight[4], 2 * GROUP)
    x_stride, out_stride, together = packed.strides[0], out.strides[0], INT8_VECTORS if form == INT8 else INT4_VECTORS
    for r in range(start, end, PANEL):
        w, t = weight[0] + r // PANEL * weight[1], 0
        while t < n:
            x, y = packed[t].ctypes.data, out[t].ctypes.data + 4 * (column + r)
            if t + together <= n:
                if form == INT8:
                    tiles_int8(w, x, x_stride, width, y, out_stride)
                else:
                    tiles_int4(w, x, x_stride, width, y, out_stride)
                t += together
            else:
                if form == INT8:
                    one_int8(w, x, x_stride, width, y, out_stride)
                else:
                    one_int4(w, x, x_stride, width, y, out_stride)
                t += 1


@compiled
def linear_expanded(weight, x, out, column, start, end, space):
    """Rows of floats are expanded, panel by panel, and each panel is multiplied with all vectors."""
    address, stride, form, n_rows, columns = weight[0], weight[1], weight[2], weight[3], up_to(weight[4], 32)
    size = 4 if form == FLOAT32 else 2
    for first in range(start, end, PANEL * PANELS):
        n_panels = min(PANELS, (end - first + PANEL - 1) // PANEL)
        for k in range(0, columns, DEPTH):
            depth = min(DEPTH, columns - k)
            for p in range(n_panels):
                r, panel = first + p * PANEL, space + p * DEPTH * PANEL * 4
                make_panel(address + r * stride + k * size, stride, form, min(PANEL, n_rows - r), depth, panel)
            t = 0
            while t < len(x):
                count = vectors_at_once(len(x) - t)
                for p in range(n_panels):
                    multiply(space + p * DEPTH * PANEL * 4, PANEL * 4, x[t].ctypes.data + 4 * k, x.strides[0], depth,
                             out[t].ctypes.data + 4 * (column + first + p * PANEL), out.strides[0], k > 0, count)
                t += count


@compiled
def make_panel(w, stride, form, rows, n, out):
    if form == BF16:
        panel_bf16(w, stride, rows, n, out)
    elif form == FLOAT16:
        panel_f16(w, stride, rows, n, out)
    elif form == CACHE8:
        panel_i8(w, stride, rows, n, out)
    else:
        panel_f32(w, stride, rows, n, out)


@compiled
def vectors_at_once(n):
    """How many of n vectors `multiply` takes next."""
    return FLOAT_VECTORS if n >= FLOAT_VECTORS else SOME_VECTORS if n >= SOME_VECTORS else 1


@compiled
def multiply(panel, panel_stride, x, x_stride, n, out, out_stride, add, count):
    if count == FLOAT_VECTORS:
        tiles_float(panel, panel_stride, x, x_stride, n, out, out_stride, add)
    elif count == SOME_VECTORS:
        some_float(panel, panel_stride, x, x_stride, n, out, out_stride, add)
    else:
        one_float(panel, panel_stride, x, x_stride, n, out, out_stride, add)


# ----------------------------------------------------------------------------------------------------------------------
# Attention of a few new positions: the cache is read once, like weights, by all threads
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def store_kv(cache, form, index, values):
    """Writes a row of float32 values into the cache, a flat array, from `index` on; zeros fill it up."""
    n = len(values)
    width = up_to(n, GROUP)
    if form == CACHE8:
        whole, scales = cache[index:index + width // 2].view(np.int8), cache[index + width // 2:]
        whole[n:] = 0
        for g in range(width // GROUP):
            group = values[g * GROUP:min((g + 1) * GROUP, n)]
            largest, out = largest_size(group), whole[g * GROUP:]
            inverse = bytes_from(largest)
            for i in range(len(group)):
                out[i] = np.int32(np.floor(group[i] * inverse + np.float32(0.5)))
            scales[g] = half_from_float(largest / np.float32(127))  # NaN if a number is NaN or infinite
        return
    out = cache[index:index + width]
    out[n:] = 0
    if form == FLOAT16:
        for i in range(n):
            out[i] = half_from_float(values[i])
    else:
        for i in range(n):
            out[i] = bf16_from_float(values[i])


@compiled
def exp_from(scores, largest):
    """Makes scores [n] exp(score - largest), in place -> the sum of that."""
    sum_ = np.float32(0)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - largest)
        sum_ += scores[i]
    return sum_


@compiled
def attend(q, k, v, stride, form, n, scores, partials):
    """One or PAIR query heads, q float32 [heads, width], with n positions of a KV head -> partials [heads, width + 2].

    k, v: the addresses of the first position, `stride` bytes from one to the next. partials: the sum of the values,
    weighted with exp(score - largest), then `largest`, then the sum of the weights. So what several threads have
    made of different positions can be added up later: softmax needs all scores only for its denominator (Milakov &
    Gimelshein 2018, "online" softmax). scores float32 [PAIR, n or more]: to work in.
    """
    count, width = q.shape
    partials[:] = 0
    partials[:, width] = -np.inf
    if n <= 0:
        return
    x, x_stride, p, p_stride = q.ctypes.data, q.strides[0], scores.ctypes.data, scores.strides[0]
    whole = n // ROWS * ROWS
    for t in range(0, whole, ROWS):
        if form == FLOAT16:
            if count == 1:
                rows_f16(k + t * stride, stride, x, x_stride, width, p + 4 * t, p_stride)
            else:
                rows_f16_pair(k + t * stride, stride, x, x_stride, width, p + 4 * t, p_stride)
        elif form == CACHE8:
            if count == 1:
                rows_i8(k + t * stride, stride, x, x_stride, width, p + 4 * t, p_stride)
            else:
                rows_i8_pair(k + t * stride, stride, x, x_stride, width, p + 4 * t, p_stride)
        elif count == 1:
            rows_bf16(k + t * stride, stride, x, x_stride, width, p + 4 * t, p_stride)
        else:
            rows_bf16_pair(k + t * stride, stride, x, x_stride, width, p + 4 * t, p_stride)
    for t in range(whole, n):
        float_row(k + t * stride, form, x, x_stride, width, p + 4 * t, p_stride, count)
    for h in range(count):
        largest = largest_of(scores[h, :n])
        partials[h, width], partials[h, width + 1] = largest, exp_from(scores[h, :n], largest)
    out, out_stride = partials.ctypes.data, partials.strides[0]
    if form == FLOAT16:
        if count == 1:
            add_f16(v, stride, p, p_stride, n, width, out, out_stride)
        else:
            adds_f16(v, stride, p, p_stride, n, width, out, out_stride)
    elif form == CACHE8:
        if count == 1:
            add_i8(v, stride, p, p_stride, n, width, out, out_stride)
        else:
            adds_i8(v, stride, p, p_stride, n, width, out, out_stride)
    elif count == 1:
        add_bf16(v, stride, p, p_stride, n, width, out, out_stride)
    else:
        adds_bf16(v, stride, p, p_stride, n, width, out, out_stride)


@compiled
def combine(partials, out):
    """The attention's output [head_dim] from the partial results [n, width + 2] of all positions."""
    width = partials.shape[1] - 2
    largest = np.float32(-np.inf)
    for c in range(len(partials)):
        largest = max(largest, partials[c, width])
    denominator = np.float32(0)
    out[:] = 0
    for c in range(len(partials)):
        if partials[c, width + 1] != 0:
            factor = exp(partials[c, width] - largest)
            denominator += factor * partials[c, width + 1]
            for i in range(len(out)):
                out[i] += factor * partials[c, i]
    if denominator != 0:  # else: a place that only pads its sequence
        for i in range(len(out)):
            out[i] /= denominator


# ----------------------------------------------------------------------------------------------------------------------
# Attention of many new positions: products again, of tiles that fit into a core's cache
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def shaped(x, shape):
    """The beginning of x float32 as an array of this shape."""
    return numba.carray(to_pointer_f32(x.ctypes.data), shape)


@compiled
def attend_tile(q, k, v, stride, form, first, seen, out, space):
    """The query heads of one KV head at several tokens, with the positions that each may see, as in FlashAttention.

    q float32 [group, n, width]; k, v: addresses of the position 0, `stride` bytes from one to the next; token t sees
    the positions from `first` to before seen + t -> out float32 [n, group * head_dim]; space float32: to work in.
    """
    group, n, width = q.shape
    head_dim = out.shape[1] // group
    keys, values = space[:POSITIONS * width], space[POSITIONS * width:2 * POSITIONS * width]
    rest = space[2 * POSITIONS * width:]
    scores, rest = shaped(rest, (TILE, POSITIONS)), rest[TILE * POSITIONS:]
    sums, rest = shaped(rest, (group, n, width)), rest[group * n * width:]
    largest, denominators = shaped(rest, (group, n)), shaped(rest[group * n:], (group, n))
    sums[:] = 0
    largest[:] = -np.inf
    denominators[:] = 0
    for start in range(first, seen + n - 1, POSITIONS):
        count = min(POSITIONS, seen + n - 1 - start)
        for p in range(0, count, PANEL):
            make_panel(k + (start + p) * stride, stride, form, count - p, width, keys.ctypes.data + p * width * 4)
        for i in range(up_to(count, PANEL)):  # values, too, lie in panels [POSITIONS, 32], one after the other
            for c in range(0, width, PANEL):
                here = c * POSITIONS + i * PANEL
                expand_row(v + (start + min(i, count - 1)) * stride, form, width, c, values[here:here + PANEL])
        for h in range(group):
            t = 0
            while t < n:
                together = vectors_at_once(n - t)
                reach = up_to(min(max(seen + t + together - 1 - start, 0), count), PANEL)  # what the last of them sees
                for p in range(0, reach, PANEL):
                    multiply(keys.ctypes.data + p * width * 4, PANEL * 4,
                             q[h].ctypes.data + t * q.strides[1], q.strides[1], width,
                             scores[t].ctypes.data + 4 * p, scores.strides[0], np.bool_(False), together)
                for i in range(t, t + together):
                    visible = min(max(seen + i - start, 0), count)
                    scores[i, visible:reach] = 0
                    if visible > 0:
                        old = largest[h, i]
                        largest[h, i] = max(old, largest_of(scores[i, :visible]))
                        factor = exp(old - largest[h, i])
                        denominators[h, i] = denominators[h, i] * factor + exp_from(scores[i, :visible], largest[h, i])
                        for j in range(width):
                            sums[h, i, j] *= factor
                for c in range(0, width, PANEL):
                    multiply(values.ctypes.data + 4 * c * POSITIONS, PANEL * 4,
                             scores.ctypes.data + t * scores.strides[0], scores.strides[0], reach,
                             sums[h, t].ctypes.data + 4 * c, sums.strides[1], np.bool_(True), together)
                t += together
    for h in range(group):
        for t in range(n):
            factor = np.float32(1) / denominators[h, t] if denominators[h, t] != 0 else np.float32(0)
            for i in range(head_dim):
                out[t, h * head_dim + i] = sums[h, t, i] * factor


# ----------------------------------------------------------------------------------------------------------------------
# Weights: packed, and rows of them
# ----------------------------------------------------------------------------------------------------------------------

TRIALS = 8  # scales that are tried for each group


@compiled
def quantize_group(w, bits, scale):
    """(the best scale for the whole numbers that w [32] / scale rounds to, the squared error it leaves)."""
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    inverse = np.float32(1) / scale
    wq, qq, ww = np.float32(0), np.float32(0), np.float32(0)
    for i in range(GROUP):
        q = np.float32(min(max(np.floor(w[i] * inverse + np.float32(0.5)), low), high))
        wq += w[i] * q
        qq += q * q
        ww += w[i] * w[i]
    best = wq / qq if qq > 0 else scale
    return best, ww - best * wq


@called_from_python
def quantize_block(w, bits, block):
    """w float32 [32, n], n a multiple of 64 -> a packed block, see qwen3_layout.py; the scales err least."""
    n_scales = 2 * PANEL * 8 // bits  # bytes
    unit_size = n_scales + 1024
    units = numba.carray(to_pointer_u8(block.ctypes.data), (len(block) // unit_size, unit_size))
    for r in range(PANEL):
        for g in range(w.shape[1] // GROUP):
            unit, half = units[g * bits // 8], g % (8 // bits)
            scales, values = unit[:n_scales].view(np.uint16), unit[n_scales:]
            group = w[r, g * GROUP:(g + 1) * GROUP]
            largest, extreme = np.float32(0), np.float32(0)
            for i in range(GROUP):
                if not abs(group[i]) <= largest:
                    largest, extreme = abs(group[i]), group[i]
            scale = np.float32(0)
            if largest > 0:
                smallest_error = np.float32(np.inf)
                for trial in range(TRIALS):
                    # 8 bits: the largest weight becomes 127 or somewhat less. 4 bits reach from -8 to 7: it becomes -8,
                    # or would become somewhat more, or less.
                    levels = np.float32(127 - trial) if bits == 8 else np.float32(8.75 - 0.25 * trial)
                    tried = largest / levels if bits == 8 else -extreme / levels
                    best, error = quantize_group(group, bits, tried)
                    if error < smallest_error:
                        smallest_error, scale = error, best
            stored = half_from_float(scale)
            scales[half * PANEL + r] = stored
            scale = float_from_half(stored)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for i in range(GROUP):
                q = np.floor(group[i] * inverse + np.float32(0.5))
                place = i // 4 * 4 * PANEL + r * 4 + i % 4
                if bits == 8:
                    values[place] = np.uint8(min(max(q, -127), 127) + 128)
                elif half == 0:
                    values[place] = np.uint8(min(max(q, -8), 7) + 8)
                else:
                    values[place] |= np.uint8(min(max(q, -8), 7) + 8) << 4


@compiled
def expand_row(address, form, n, first, out):
    """Numbers of a row of n, from `first` on, as float32 into out. `first` and len(out) are multiples of 32, or all."""
    end = first + len(out)
    if form == CACHE8:
        row = numba.carray(to_pointer_u8(address), (n + n // GROUP * 2,))
        whole, scales = row[:n].view(np.int8), row[n:].view(np.uint16)
        for g in range(first // GROUP, end // GROUP):
            scale = float_from_half(scales[g])
            for i in range(GROUP):
                out[g * GROUP + i - first] = scale * np.float32(whole[g * GROUP + i])
    elif form == FLOAT32:
        floats = numba.carray(to_pointer_f32(address), (n,))[first:end]
        for i in range(len(out)):
            out[i] = floats[i]
    else:
        half = numba.carray(to_pointer_u16(address), (n,))[first:end]
        if form == BF16:
            for i in range(len(out)):
                out[i] = float_from_bf16(half[i])
        else:
            for i in range(len(out)):
                out[i] = float_from_half(half[i])


@called_from_python
def weight_row(weight, r, out):
    """Row r of a weight as float32 [columns]."""
    address, stride, form, n = weight[0], weight[1], weight[2], weight[4]
    if form < INT8:
        expand_row(address + r * stride, form, n, np.int64(0), out[:n])
        return
    bits = 8 if form == INT8 else 4
    n_scales, lane = 2 * PANEL * 8 // bits, r % PANEL
    unit_size = n_scales + 1024
    units = numba.carray(to_pointer_u8(address + r // PANEL * stride), (stride // unit_size, unit_size))
    for i in range(n):
        g = i // GROUP
        unit, half = units[g * bits // 8], g % (8 // bits)
        scale = float_from_half(unit[:n_scales].view(np.uint16)[half * PANEL + lane])
        value = np.int32(unit[n_scales + i % GROUP // 4 * 4 * PANEL + lane * 4 + i % 4])
        out[i] = scale * np.float32(value - 128 if form == INT8 else (value >> half * 4 & 15) - 8)

# ----------------------------------------------------------------------------------------------------------------------
# The decoder layers: one job for the team, for one token or for many
# ----------------------------------------------------------------------------------------------------------------------


@called_from_python
def decoder_layers(rank, n_threads, barrier, first, last, layers, norms, head_norms, eps, x, cos, sin, k_cache, v_cache,
                   kv_form, length, padding, part_length, h, packed, qkv, queries, inner,
                   inner_packed, partials, space):
    """Layers first to last - 1: the namesake of qwen3.decoder_layer, in place of x. Each thread of the team runs this.

    x float32 [batch * n, hidden_size], a sequence's n new tokens after the other's; cos, sin [batch * n, head_dim / 2];
    k_cache, v_cache: see Cache; `length` positions are filled, the first padding[b] of them with nothing. The rest is
    space to work in, rows are padded to a multiple of 64: h [batch * n, the widest factor], packed: the same; qkv
    [batch * n, ...], queries [n_heads, batch * n, width], inner [2, batch * n, ...], inner_packed, partials [batch * n,
    n_heads, parts, width + 2], space [n_threads, ...].
    """
    m, hidden = x.shape
    batch, n_kv_heads, capacity, row_size = k_cache.shape[1:]
    n, n_heads, head_dim = m // batch, len(queries), 2 * cos.shape[1]
    group, parts = n_heads // n_kv_heads, partials.shape[2]
    q_size, kv_size, n_inner = n_heads * head_dim, n_kv_heads * head_dim, layers[0, DOWN, 4]
    k_start, v_start = up_to(q_size, PANEL), up_to(q_size, PANEL) + up_to(kv_size, PANEL)
    root, gate, zero = np.float32(1 / np.sqrt(head_dim)), barrier.ctypes.data, np.int64(0)
    flat_k = numba.carray(to_pointer_u16(k_cache.ctypes.data), (k_cache.size,))
    flat_v = numba.carray(to_pointer_u16(v_cache.ctypes.data), (v_cache.size,))
    mine = space[rank]
    scores = shaped(mine, (PAIR, LONG_PART))
    for layer in range(first, last):
        w = layers[layer]
        for t in part_of(m, rank, n_threads):
            rms_norm(x[t], norms[layer, 0], eps, h[t])
            ready(h[t], hidden, w[Q, 2], packed[t], zero, hidden)
        meet(gate, n_threads)

        start, end = share(q_size, rank, n_threads)
        linear(w[Q], h, packed, qkv, zero, start, end, mine)
        start, end = share(kv_size, rank, n_threads)
        linear(w[K], h, packed, qkv, k_start, start, end, mine)
        linear(w[V], h, packed, qkv, v_start, start, end, mine)
        meet(gate, n_threads)

        items = m * (n_heads + n_kv_heads)
        for item in part_of(items, rank, n_threads):
            t, i = item // (n_heads + n_kv_heads), item % (n_heads + n_kv_heads)
            if i < n_heads:
                query = queries[i, t, :head_dim]
                rms_norm(qkv[t, i * head_dim:(i + 1) * head_dim], head_norms[layer, 0], eps, query)
                apply_rope(query, cos[t], sin[t])
                for j in range(head_dim):
                    query[j] *= root
            else:
                i -= n_heads
                key, value = qkv[t, k_start + i * head_dim:], qkv[t, v_start + i * head_dim:]
                rms_norm(key[:head_dim], head_norms[layer, 1], eps, key[:head_dim])
                apply_rope(key[:head_dim], cos[t], sin[t])
                at = (((layer * batch + t // n) * n_kv_heads + i) * capacity + length + t % n) * row_size
                store_kv(flat_k, kv_form, at, key[:head_dim])
                store_kv(flat_v, kv_form, at, value[:head_dim])
        meet(gate, n_threads)

        if n <= FEW:  # parts of the cache, whose results are then combined
            items = batch * n_kv_heads * parts
            for item in part_of(items, rank, n_threads):
                b, i, part = item // parts // n_kv_heads, item // parts % n_kv_heads, item % parts
                begin = max(part * part_length, padding[b])
                at = 2 * (((layer * batch + b) * n_kv_heads + i) * capacity + begin) * row_size
                for t in range(n):
                    seen = min(length + t + 1, (part + 1) * part_length) - begin
                    for j in range(i * group, (i + 1) * group, PAIR):
                        some = slice(j, min(j + PAIR, (i + 1) * group))
                        attend(queries[some, b * n + t], k_cache.ctypes.data + at, v_cache.ctypes.data + at,
                               2 * row_size, kv_form, seen, scores, partials[b * n + t, some, part])
            meet(gate, n_threads)
            for t in part_of(m, rank, n_threads):
                for j in range(n_heads):
                    combine(partials[t, j], h[t, j * head_dim:(j + 1) * head_dim])
        else:
            for item in range(rank, batch * ((n + TILE - 1) // TILE) * n_kv_heads, n_threads):
                b, i, tile = item // n_kv_heads % batch, item % n_kv_heads, item // n_kv_heads // batch
                t, end = b * n + tile * TILE, b * n + min(n, (tile + 1) * TILE)
                at = 2 * (((layer * batch + b) * n_kv_heads + i) * capacity) * row_size
                attend_tile(queries[i * group:(i + 1) * group, t:end], k_cache.ctypes.data + at,
                            v_cache.ctypes.data + at, 2 * row_size, kv_form, padding[b], length + tile * TILE + 1,
                            h[t:end, i * group * head_dim:(i + 1) * group * head_dim], mine)
            meet(gate, n_threads)
        for t in part_of(m, rank, n_threads):
            ready(h[t], q_size, w[OUT, 2], packed[t], zero, q_size)
        meet(gate, n_threads)

        start, end = share(hidden, rank, n_threads)
        linear(w[OUT], h, packed, qkv, zero, start, end, mine)
        for t in range(m):
            add_to(x[t, start:end], qkv[t, start:end])
        meet(gate, n_threads)

        for t in part_of(m, rank, n_threads):
            rms_norm(x[t], norms[layer, 1], eps, h[t])
            ready(h[t], hidden, w[GATE, 2], packed[t], zero, hidden)
        meet(gate, n_threads)

        start, end = share(n_inner, rank, n_threads)
        linear(w[GATE], h, packed, inner[0], zero, start, end, mine)
        linear(w[UP], h, packed, inner[1], zero, start, end, mine)
        for t in range(m):
            silu_times(inner[0, t, start:end], inner[1, t, start:end])
            ready(inner[0, t], n_inner, w[DOWN, 2], inner_packed[t], start, end)
        meet(gate, n_threads)

        start, end = share(hidden, rank, n_threads)
        linear(w[DOWN], inner[0], inner_packed, qkv, zero, start, end, mine)
        for t in range(m):
            add_to(x[t, start:end], qkv[t, start:end])
        meet(gate, n_threads)


@called_from_python
def output_logits(rank, n_threads, barrier, x, norm, eps, head, h, packed, logits, space):
    """The namesake of qwen3.output_logits: x [n, hidden_size] -> logits [n, vocab_size, or more]."""
    (n, hidden), zero = x.shape, np.int64(0)
    for t in part_of(n, rank, n_threads):
        rms_norm(x[t], norm, eps, h[t])
        ready(h[t], hidden, head[2], packed[t], zero, hidden)
    meet(barrier.ctypes.data, n_threads)
    start, end = share(head[3], rank, n_threads)
    linear(head, h, packed, logits, zero, start, end, space[rank])
    meet(barrier.ctypes.data, n_threads)


# ----------------------------------------------------------------------------------------------------------------------
# Machine code of the kernels that are called from Python
# ----------------------------------------------------------------------------------------------------------------------

INT, ROW = types.int64, types.int64[::1]
F1, F2, F3, F4 = (types.Array(types.float32, d, "C") for d in (1, 2, 3, 4))
U1, U2, U5 = types.uint8[::1], types.uint8[:, ::1], types.Array(types.uint16, 5, "C")
RANK = (INT, INT, ROW)
KERNELS = {
    weight_row: (ROW, INT, F1),
    quantize_block: (F2, INT, U1),
    output_logits: (*RANK, F2, F1, types.float64, ROW, F2, U2, F2, F2),
    decoder_layers: (*RANK, INT, INT, types.int64[:, :, ::1], F3, F3, types.float64, F2, F2, F2, U5, U5, INT, INT, ROW,
                     INT, F2, U2, F2, F3, F3, U2, F4, F2),
}
# numba's code gives back what belongs to numba; what is passed from Python doesn't, so that this is never called.
NEVER_CALLED = "define void @NRT_MemInfo_call_dtor(ptr %memory) { ret void }"
C_LIBRARY = {"sqrt", "sqrtf", "sched_yield"}  # what they call besides each other; without numba there is nothing more


class Progress(event.Listener):
    """Moves a bar on when one of these functions has been compiled."""

    def __init__(self, functions: Iterable[Dispatcher], bar: tqdm):
        self.left, self.bar = set(functions), bar

    def on_start(self, started: event.Event) -> None:
        pass

    def on_end(self, ended: event.Event) -> None:
        if ended.data["dispatcher"] in self.left:
            self.left.remove(ended.data["dispatcher"])
            self.bar.update()


def machine_code() -> tuple[dict[str, list], bytes]:
    """Compiles the kernels for this CPU -> ({name: its arguments}, an object file that has functions of these names).

    An argument is "int64", "float64", or [dtype, n] for an array of n dimensions; see Kernel in qwen3_numba.py.
    Raises InputError if this CPU or numba's settings don't allow it.
    """
    if numba.config.DISABLE_JIT:
        raise InputError("the fast engine can't be compiled while NUMBA_DISABLE_JIT is set")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target, module, arguments = llvm.Target.from_default_triple(), llvm.parse_assembly(NEVER_CALLED), {}
    if target.name.startswith("x86") and not FEATURES.get("f16c"):
        raise InputError("the fast engine needs a CPU that converts float16 (F16C: since 2013); use qwen3.py")
    functions = [function for function in globals().values() if isinstance(function, Dispatcher)]
    with (tqdm(desc="compiling, only this once", total=len(functions), delay=1, leave=False, disable=None) as bar,
          event.install_listener("numba:compile", Progress(functions, bar))):
        for kernel, signature in KERNELS.items():
            kernel.compile(signature)
    for kernel, signature in KERNELS.items():
        module.link_in(llvm.parse_assembly(kernel.inspect_llvm(signature)))
        module.get_function(kernel.overloads[signature].fndesc.llvm_func_name).name = kernel.__name__
        arguments[kernel.__name__] = [[str(kind.dtype), kind.ndim] if isinstance(kind, types.Array) else str(kind)
                                      for kind in signature]
    absent = {function.name for function in module.functions if function.is_declaration
              and not function.name.startswith("llvm.")} - C_LIBRARY
    if absent:
        raise InputError(f"numba {numba.__version__} compiles kernels that need {', '.join(sorted(absent))} to run, so "
                         "they can't be kept; install another version of numba, or use qwen3.py")
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3,
        reloc="static" if target.name.startswith("x86") else "default", codemodel="jitdefault", jit=True)
    return arguments, machine.emit_object(module)
