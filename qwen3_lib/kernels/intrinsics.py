"""What numba can't say in Python: instructions of LLVM for the kernels in layers.py and quantize.py.

An @intrinsic is a function whose `codegen` runs once, while a kernel is compiled, and writes the kernel's instructions
itself, as those of vectors.py do.
"""
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import get_itemsize, make_array, populate_array

from qwen3_lib.kernels.attention import ORDER, transposed
from qwen3_lib.kernels.cpu import PAIRS
from qwen3_lib.kernels.layout import GROUP, GROUP16_BYTES, SIZES_BYTES
from qwen3_lib.kernels.vectors import (BFLOAT, FLOAT, HALF, I8, I16, I32, I64, LANES, at, broadcast, call, fma, load,
                                       loop, odd_and_even, pair_sums, sizes_and_flips, splat, store, totals, variable,
                                       vector, zero_sums)

LOG2_E = 1.4426950408889634
POWERS_OF_2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
               2.402264791363012e-1, 6.931472028550421e-1, 1.0)  # a polynomial for 2 ** x, -0.5 <= x <= 0.5
SMALLEST_NUMBER = 1e-21  # smaller ones count as zeros, so that their scale times a scale of weights keeps all digits


@intrinsic
def call_at(context, address, arguments):
    """Calls the function at an address with a tuple of int64."""
    n = len(arguments)

    def codegen(context, b, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [I64] * n)
        b.call(b.inttoptr(args[0], kind.as_pointer()), cgutils.unpack_tuple(b, args[1], n))
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, n)), codegen


@intrinsic
def result_at(context, address, arguments):
    """call_at of a function that returns an int64."""
    n = len(arguments)

    def codegen(context, b, signature, args):
        kind = ir.FunctionType(I64, [I64] * n)
        return b.call(b.inttoptr(args[0], kind.as_pointer()), cgutils.unpack_tuple(b, args[1], n))

    return types.int64(types.int64, types.UniTuple(types.int64, n)), codegen


@intrinsic
def dot(context, x, y, n):
    """The sum of the products of two float32 [n], n a multiple of 16, in the order of float_product."""
    def codegen(context, b, signature, args):
        x, y, n = args
        sums = zero_sums(b, [0], LANES)

        def step(i: Any) -> None:
            one, other = (load(b, at(b, address, (i, 4 * LANES)), FLOAT, LANES) for address in (x, y))
            b.store(fma(b, one, other, b.load(sums[0])), sums[0])

        loop(b, b.sdiv(n, I64(LANES)), step)
        return b.extract_element(totals(b, [b.load(sums[0])]), I32(0))

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def even_first(context, x, n):
    """Of each 32 numbers of x float32 [n], the even ones before the odd ones: as products with BF16 take them."""
    def codegen(context, b, signature, args):
        def group(i: Any) -> None:
            here = at(b, args[0], (i, 4 * GROUP))
            halves = [load(b, at(b, here, 4 * LANES * half), FLOAT, LANES) for half in range(2)]
            for half in range(2):
                lanes = ir.Constant(vector(I32, LANES), list(range(half, GROUP, 2)))
                store(b, b.shuffle_vector(*halves, lanes), at(b, here, 4 * LANES * half))

        loop(b, b.sdiv(args[1], I64(GROUP)), group)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def to_bf16(b: Any, values: Any) -> Any:
    """float32 [32], rounded to the nearest bf16, ties to even: int32 [32], whose lower halves are zeros."""
    bits = b.bitcast(values, vector(I32, GROUP))
    even = b.and_(b.lshr(bits, splat(I32, GROUP, 16)), splat(I32, GROUP, 1))
    near = b.add(bits, b.add(even, splat(I32, GROUP, 0x7FFF)))
    near = b.select(b.fcmp_unordered("uno", values, values), splat(I32, GROUP, 0x7FC00000), near)
    return b.and_(near, splat(I32, GROUP, -0x10000))


@intrinsic
def round_groups(context, x, n, step):
    """Rounds x float32 [n], n a multiple of 32, to the nearest bf16, ties to even.

    With PAIRS, each 32 of them become 64 bytes, `step` bytes after the last ones; else they are float32 again.
    """
    def codegen(context, b, signature, args):
        def group(i: Any) -> None:
            here = at(b, args[0], (i, 4 * GROUP))
            bits = to_bf16(b, load(b, here, FLOAT, GROUP))
            if PAIRS:
                store(b, b.trunc(b.lshr(bits, splat(I32, GROUP, 16)), vector(I16, GROUP)), at(b, args[0], (i, args[2])))
            else:
                store(b, bits, here)

        loop(b, b.sdiv(args[1], I64(GROUP)), group)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def turn_pairs(context, x, n, own):
    """Transposes a vector of bf16 [n], n >= 512, as round_groups makes it with a step of 128: a product with wide rows
    then reads it as it lies. uint32 [16, n / 32]: pair 16 j + i stands at [ORDER[i], j]. own [2 n bytes]: to work in.
    """
    def codegen(context, b, signature, args):
        x, n, own = args
        steps = b.sdiv(n, I64(GROUP))

        def block(i: Any) -> None:
            last, first = b.sub(steps, I64(LANES)), b.mul(i, I64(LANES))
            first = b.select(b.icmp_signed("<", first, last), first, last)
            groups = [load(b, at(b, x, (at(b, first, r), 4 * GROUP)), I32, LANES) for r in range(LANES)]
            for k, value in enumerate(transposed(b, groups)):
                store(b, value, at(b, own, (at(b, first, (steps, ORDER[k])), 4)))

        loop(b, b.sdiv(b.add(steps, I64(LANES - 1)), I64(LANES)), block)
        loop(b, steps, lambda i: store(b, load(b, at(b, own, (i, 64)), I32, LANES), at(b, x, (i, 64))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def write_exp(b: Any, x: Any) -> Any:
    """e ** x for float32 x <= 0, to (4 + 0.8 |x|) 1e-7 of it, of a number or a vector.

    2 ** whole from a float's bits, 2 ** fraction by a polynomial. Below -87, x counts as -87.
    """
    n = x.type.count if isinstance(x.type, ir.VectorType) else 0

    def number(kind: Any, value: float) -> Any:
        return splat(kind, n, value) if n else ir.Constant(kind, value)

    name, ints = (f"v{n}f32", vector(I32, n)) if n else ("f32", I32)
    x, least = (b.fmul(each, number(FLOAT, LOG2_E)) for each in (x, number(FLOAT, -87.0)))
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    whole = call(b, f"llvm.floor.{name}", x.type, b.fadd(x, number(FLOAT, 0.5)))
    fraction, power = b.fsub(x, whole), number(FLOAT, POWERS_OF_2[0])
    for factor in POWERS_OF_2[1:]:
        power = call(b, f"llvm.fma.{name}", x.type, power, fraction, number(FLOAT, factor))
    bits = b.shl(b.add(b.fptosi(whole, ints), number(I32, 127)), number(I32, 23))
    return b.fmul(power, b.bitcast(bits, x.type))


@intrinsic
def exp_of(context, x):
    """write_exp of a number."""
    return types.float32(types.float32), lambda context, b, signature, args: write_exp(b, args[0])


def softmax_row(rounds: bool) -> Any:
    """An intrinsic: n numbers of x float32 become exp(x - largest), those up to a multiple of 32 zeros -> the sum.

    With `rounds`, they are rounded to bf16 afterwards, as by round_groups with a step of 64.
    """
    @intrinsic
    def exp_until(context, x, n, largest):
        def codegen(context, b, signature, args):
            x, n, largest = args
            sums = zero_sums(b, [0], LANES)
            lanes = ir.Constant(vector(I32, LANES), list(range(LANES)))

            def sixteen(column: Any, masked: bool) -> Any:
                score = load(b, at(b, x, (column, 4)), FLOAT, LANES)
                value = write_exp(b, b.fsub(score, broadcast(b, largest, LANES)))
                if masked:
                    left = broadcast(b, b.trunc(b.sub(n, column), I32), LANES)
                    value = b.select(b.icmp_signed("<", lanes, left), value, splat(FLOAT, LANES, 0.0))
                b.store(b.fadd(b.load(sums[0]), value), sums[0])
                return value

            def group(i: Any, masked: bool = False) -> None:
                column = b.mul(i, I64(GROUP))
                halves = [sixteen(at(b, column, start), masked) for start in (0, LANES)]
                if rounds and PAIRS:  # none of them is subnormal: the instruction would make it zero
                    value = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(BFLOAT, GROUP), *halves[::-1])
                    store(b, value, at(b, x, (i, 2 * GROUP)))
                else:
                    value = b.shuffle_vector(*halves, ir.Constant(vector(I32, GROUP), list(range(GROUP))))
                    store(b, to_bf16(b, value) if rounds else value, at(b, x, (i, 4 * GROUP)))

            whole = b.sdiv(n, I64(GROUP))
            loop(b, whole, group)
            with b.if_then(b.icmp_signed("<", b.mul(whole, I64(GROUP)), n)):
                group(whole, True)
            return b.extract_element(totals(b, [b.load(sums[0])]), I32(0))

        return types.float32(types.int64, types.int64, types.float32), codegen
    return exp_until


exp_until, rounded_exp_until = map(softmax_row, (False, True))


def signed_bytes(b: Any, values: Any) -> tuple[Any, Any]:
    """(the largest size among float32 [32], NaN too; the numbers times what makes this size 127, rounded to int32)."""
    floats, ints = values.type, vector(I32, GROUP)
    sizes = b.and_(b.bitcast(values, ints), splat(I32, GROUP, 0x7FFFFFFF))  # integers, in the order of the sizes
    largest = b.bitcast(call(b, f"llvm.vector.reduce.umax.v{GROUP}i32", I32, sizes), FLOAT)
    factor = b.select(b.fcmp_ordered(">", largest, FLOAT(SMALLEST_NUMBER)), b.fdiv(FLOAT(127), largest), FLOAT(0))
    product = b.fadd(b.fmul(values, broadcast(b, factor, GROUP)), splat(FLOAT, GROUP, 0.5))
    return largest, b.fptosi(call(b, f"llvm.floor.v{GROUP}f32", floats, product), ints)


def scale_for(b: Any, largest: Any) -> Any:
    """What signed_bytes are multiplied with; NaN if a number is NaN or infinite."""
    return b.fadd(b.fdiv(largest, FLOAT(127)), b.fmul(largest, FLOAT(0)))


@intrinsic
def to_bytes(context, x, n, out):
    """Numbers x float32 [n <= 32] as signed bytes [32], then zeros -> their scale, see signed_bytes."""
    def codegen(context, b, signature, args):
        x, n, out = args
        some = variable(b, vector(FLOAT, GROUP))
        place = b.select(b.icmp_signed("<", n, I64(GROUP)), b.ptrtoint(some, I64), x)
        with b.if_then(b.icmp_signed("<", n, I64(GROUP))):
            b.store(splat(FLOAT, GROUP, 0.0), some)
            loop(b, n, lambda i: store(b, load(b, at(b, x, (i, 4)), FLOAT), at(b, place, (i, 4))))
        largest, whole = signed_bytes(b, load(b, place, FLOAT, GROUP))
        store(b, b.trunc(whole, vector(I8, GROUP)), out)
        return scale_for(b, largest)

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def pack_groups(context, x, n, out, stride, out16, stride16, width):
    """Packs x float32 [n], n a multiple of 32, for packed weights, see layout.py: each group `stride` bytes further.

    Where there are groups in 16 bits, the first of them begins at the address out16; groups of sizes and signs begin
    behind those of the whole vector, of `width` numbers.
    """
    def codegen(context, b, signature, args):
        def group(i: Any) -> None:
            largest, whole = signed_bytes(b, load(b, at(b, args[0], (i, 4 * GROUP)), FLOAT, GROUP))
            here, n = at(b, args[2], (i, args[3])), GROUP // 2
            halves = [b.shuffle_vector(whole, whole, ir.Constant(vector(I32, n), list(range(start, start + n))))
                      for start in (0, n)]
            first, second = (call(b, f"llvm.vector.reduce.add.v{n}i32", I32, half) for half in halves)
            total = b.add(first, second)
            numbers, scale = b.trunc(whole, vector(I8, GROUP)), scale_for(b, largest)
            places = [(here, [numbers], b.mul(total, I32(-128)))]
            if GROUP16_BYTES:
                parts = odd_and_even(b, numbers)
                products = call(b, "llvm.vector.reduce.add.v8i32", I32, pair_sums(b, *parts))
                place16 = at(b, args[4], (i, args[5]))
                places.append((place16, parts, b.neg(products)))
                pairs, zeros = b.udiv(b.add(args[6], I64(2 * GROUP - 1)), I64(2 * GROUP)), splat(I32, GROUP, 0)
                negative = b.select(b.icmp_signed("<", whole, zeros), whole, zeros)
                sum_ = call(b, f"llvm.vector.reduce.add.v{GROUP}i32", I32, negative)
                places.append((at(b, place16, (pairs, 2 * SIZES_BYTES)), sizes_and_flips(b, numbers), b.neg(sum_)))
            for place, parts, less in places:
                for j, part in enumerate(parts):
                    store(b, part, at(b, place, GROUP * j))
                for j, value in enumerate((scale, total, first, less)):
                    store(b, value, at(b, place, GROUP * len(parts) + 4 * j))

        loop(b, b.sdiv(args[1], I64(GROUP)), group)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


def array_of(context: Any, b: Any, kind: Any, address: Any, shape: Sequence[Any]) -> Any:
    """The array of a type that begins at an address, as numba keeps arrays."""
    array, itemsize = make_array(kind)(context, b), get_itemsize(context, kind)
    strides = [I64(itemsize)]
    for length in reversed(shape[1:]):
        strides.insert(0, b.mul(strides[0], length))
    data = b.inttoptr(address, context.get_data_type(kind.dtype).as_pointer())
    populate_array(array, data, list(shape), strides, itemsize, None)
    return array._getvalue()


def arrays(kind: Any) -> Any:
    """An intrinsic: the array of numbers of this kind at an address, with the shape in a tuple."""
    @intrinsic
    def array_at(context, address, shape):
        n = len(shape)

        def codegen(context, b, signature, args):
            return array_of(context, b, signature.return_type, args[0], cgutils.unpack_tuple(b, args[1], n))

        return types.Array(kind, n, "C")(types.int64, types.UniTuple(types.int64, n)), codegen
    return array_at


floats_at, uint32s_at, int64s_at = map(arrays, (types.float32, types.uint32, types.int64))
bytes_at, uint16s_at = map(arrays, (types.uint8, types.uint16))


def entry(index: int, kind: Any, n_dimensions: int) -> Any:
    """An intrinsic: the array in a row of layout.address_table. It compiles faster than a function of numba's."""
    @intrinsic
    def find(context, table):
        def codegen(context, b, signature, args):
            address, *shape = (load(b, at(b, args[0], 8 * (5 * index + i)), I64) for i in range(1 + n_dimensions))
            return array_of(context, b, signature.return_type, address, shape)
        return types.Array(kind, n_dimensions, "C")(types.int64), codegen
    return find


def int64_at(offset: int) -> Any:
    """An intrinsic: the int64 so many bytes after an address."""
    @intrinsic
    def find(context, address):
        def codegen(context, b, signature, args):
            return load(b, at(b, args[0], offset), I64)
        return types.int64(types.int64), codegen
    return find


def same_bits(source: Any, target: Any) -> Any:
    """An intrinsic: the bits of a number as a number of another kind."""
    @intrinsic
    def convert(context, x):
        def codegen(context, b, signature, args):
            return b.bitcast(args[0], context.get_value_type(target))
        return target(source), codegen
    return convert


float_of, bits_of = same_bits(types.int32, types.float32), same_bits(types.float32, types.int32)


@intrinsic
def half_from_float(context, value):
    """The bits of a number as float16."""
    def codegen(context, b, signature, args):
        return b.bitcast(b.fptrunc(args[0], HALF), I16)
    return types.uint16(types.float32), codegen
