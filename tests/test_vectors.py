"""qwen3_lib/kernels/vectors.py: the instructions of each kind of CPU."""
import ctypes
from functools import cache

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from llvmlite import ir

from packed import FORMATS, packed_vectors, reference, stored
from qwen3_lib.kernels import attention, cpu, intrinsics, objects, spread, vectors
from qwen3_lib.kernels.build import address_of
from qwen3_lib.kernels.intrinsics import SMALLEST_NUMBER
from qwen3_lib.kernels.layout import (BF16, F16, F32, GROUP16_BYTES, HALVES, HIGH_BITS, INT8, Q8_1, ROUNDED,
                                      VECTORS, factors_size, is_packed, padded, unit_size)

pytestmark = pytest.mark.core


@pytest.mark.parametrize("path, triple, name, instruction", [
    ("vnni512", "x86_64-linux-gnu", "cascadelake", "vpdpbusd"),
    ("vnni", "x86_64-linux-gnu", "alderlake", "{vex} vpdpbusd"), ("avx2", "x86_64-linux-gnu", "haswell", "vpmaddubsw"),
    ("i8mm", "aarch64-linux-gnu", "neoverse-n2", "usdot"), ("dotprod", "aarch64-linux-gnu", "neoverse-n1", "sdot"),
    ("neon", "aarch64-linux-gnu", "cortex-a72", "smull2"), ("plain", "x86_64-linux-gnu", "x86-64", "pm"),
    ("plain", "aarch64-linux-gnu", "generic", "mull")])
@pytest.mark.parametrize("signed", [True, False])
def test_instruction_selection(path, triple, name, instruction, signed):
    """What each path compiles to on a CPU for which it is meant."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    n, module = cpu.INT8_SHAPES[path].lanes, ir.Module()
    sums = ir.VectorType(ir.IntType(16), 2 * n) if path == "avx2" else ir.VectorType(ir.IntType(32), n)
    values = ir.VectorType(ir.IntType(8), 4 * n)
    function = ir.Function(module, ir.FunctionType(sums, [sums, values, values]), "dot")
    b = ir.IRBuilder(function.append_basic_block())
    b.ret(vectors.dot_bytes(b, path, *function.args, signed))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, opt=3)
    module.triple = triple
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert instruction in assembly.replace("\t", " ")


@pytest.mark.parametrize("features, path", [
    ({"avx512vnni": True, "avx512f": True, "avx2": True}, "vnni512"), ({"avxvnni": True, "avx2": True}, "vnni"),
    ({"avx512f": True, "avx2": True}, "avx2"), ({"avx2": True}, "avx2"),
    ({"neon": True, "dotprod": True, "i8mm": True}, "i8mm"), ({"neon": True, "dotprod": True}, "dotprod"),
    ({"neon": True}, "neon"), ({}, "plain")])
def test_choice_of_instructions(features, path):
    assert cpu.int8_paths(features)[0] == path


@cache
def product_of(path, form, n_vectors):
    """The function that multiplies a packed block with n_vectors with the instructions of a path.

    On a CPU without these instructions, plain ones stand for the sums of products: all else is as on that path.
    """
    name, real = f"packed_{path}_{form}_{n_vectors}", vectors.dot_bytes

    def plain(b, path, sums, w, x, signed):
        return real(b, "plain", sums, w, x, signed and path not in cpu.UNSIGNED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "PATH", path)
        if path not in cpu.PATHS:
            patch.setattr(vectors, "dot_bytes", plain)
        way = vectors.way_of(form, vectors.ONE if n_vectors == 1 else vectors.AT_ONCE)
        address = address_of(name, lambda: objects.compile_product(name, "packed_product", form, n_vectors, way))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(address)


@pytest.mark.parametrize("name", ["q8_1", "q6_k", "q4_k", "q4_0"])
def test_every_path_gives_the_same_bits(name):
    form, n, rng = FORMATS[name], 512, np.random.default_rng(0)
    data, weight = stored(rng.standard_normal((32, n)).astype(np.float32), form)
    out, whole = np.zeros((2, 2, 32), np.float32), rng.integers(-127, 128, (2, n // 32, 32)).astype(np.int8)
    scales = rng.random((2, n // 32)).astype(np.float32)
    x = packed_vectors(whole, scales)
    foreign = {*cpu.INT8_SHAPES} - {*cpu.PATHS, "avx2"} if name != "q4_0" else ()
    for path in (vectors.PATH, *cpu.PATHS, *sorted(foreign)):
        for n_vectors in (2, 1) if path == vectors.PATH else (2,):  # each takes long to compile
            product_of(path, form, n_vectors)(data.ctypes.data, x.ctypes.data, x.strides[0], n, out[1].ctypes.data,
                                              out.strides[1], 0, 0, 1)
            if not out[0].any():
                out[0] = out[1]
            np.testing.assert_array_equal(out[1, :n_vectors], out[0, :n_vectors])
    expected = ((whole * scales[..., None]).reshape(2, n).astype(np.float64)
                @ reference(data, weight).T.astype(np.float64))
    np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=0.02)


def rearranged(form, data, n, kind):
    """A block of n columns as a prompt's products take it: "widened" or "spread" -> (the block, its product)."""
    wide, way = vectors.widened_form(form), spread.SPREAD_WAY
    int16 = form in (INT8, Q8_1) and spread.DOTS == "avx2" and not GROUP16_BYTES
    if kind == "widened" and wide == form or kind == "spread" and (spread.DOTS not in cpu.PATHS or int16):
        pytest.skip(f"this CPU's products don't take {kind} blocks")
    block = np.zeros(32 * n * 3, np.uint8)
    function_of(kind, form, 1, way)(data.ctypes.data, n, block.ctypes.data)
    return block, function_of("spread_product", form, 2, way) if kind == "spread" else product_of(vectors.PATH, wide, 2)


def function_of(kind, form, n_vectors, way):
    name = f"{kind}_{form}_{way}"
    address = address_of(name, lambda: objects.compile_product(name, kind, form, n_vectors, way))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * objects.WRITERS[kind][1])(address)


@pytest.mark.parametrize("kind", ["widened", "spread"])
@pytest.mark.parametrize("name", ["int8", "int5", "int4", "q8_1", "q5_1", "q4_1", "q6_k", "q5_k", "q4_k", "q4_0"])
def test_a_rearranged_block_gives_the_same_bits(name, kind):
    """Also of the smallest scales, whose products would lose digits if SMALLEST were smaller."""
    form, n, rng = FORMATS[name], 512, np.random.default_rng(0)
    rows = rng.standard_normal((32, n)).astype(np.float32)
    rows[:, n // 2:] *= np.float32(1e-13) if name in ("int5", "int4") else 1
    data, _ = stored(rows, form)
    out, (block, product) = np.zeros((2, 2, 32), np.float32), rearranged(form, data, n, kind)
    for scale in (1, SMALLEST_NUMBER / 127):
        whole = rng.integers(-127, 128, (2, n // 32, 32)).astype(np.int8)
        whole[:, :n // 64] *= scale == 1  # the small ones alone
        x = packed_vectors(whole, (1 + rng.random((2, n // 32))) * scale)
        for some, w, multiply in zip(out, (data, block), (product_of(vectors.PATH, form, 2), product)):
            multiply(w.ctypes.data, x.ctypes.data, x.strides[0], n, some.ctypes.data, some.strides[0], 0, 0, 1)
        assert out.any()
        np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.parametrize("path", [*cpu.PATHS, *["spread"] * (spread.DOTS in cpu.PATHS)])
@pytest.mark.parametrize("name", ["int8", "int5", "int4", "q8_1", "q6_k"])  # the others have INT5's and INT4's bytes
def test_sums_of_the_largest_bytes_do_not_overflow(path, name):
    """The least and the greatest bytes of weights, times the largest ones of a vector, alone and two at a time."""
    form, n = FORMATS[name], 128
    data, weight = stored(np.random.default_rng(0).standard_normal((32, n)).astype(np.float32), form)
    size, whole = unit_size(form), 512 + 256 if name == "q6_k" else 1024 + 256 * HIGH_BITS[form]
    for byte in (0, 255):
        for unit in data[0, factors_size(form):].reshape(-1, size):
            unit[size - whole:] = byte  # all but the scales and minima
        for sign in (-1, 1):
            x = packed_vectors(np.full((2, n // 32, 32), 127 * sign, np.int8), np.full((2, n // 32), 1 / 127))
            for n_vectors in (1, 2) if path == vectors.PATH else (2,):
                out, (block, product) = np.zeros((2, 32), np.float32), rearranged(form, data, n, path) \
                    if path == "spread" else (data, product_of(path, form, n_vectors))
                product(block.ctypes.data, x.ctypes.data, x.strides[0], n, out.ctypes.data, out.strides[0], 0, 0, 1)
                np.testing.assert_allclose(out[:n_vectors], np.tile(sign * reference(data, weight).sum(axis=1),
                                                                    (n_vectors, 1)), rtol=1e-5)


@cache
def bf16_product_of(pairs, n_vectors, kind="float_product", avx512=True):
    """The function that multiplies rows of bf16 with rounded vectors, by the instruction for pairs or by fma."""
    name = f"bf16_{pairs}_{n_vectors}_{kind}_{avx512}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "AVX512", avx512)
        for module in (vectors, attention):
            patch.setattr(module, "PAIRS", pairs)
        way = vectors.way_of(ROUNDED, vectors.ONE if n_vectors == 1 else vectors.AT_ONCE)
        if kind != "float_product":  # the others' sums leave room for VECTORS on every CPU
            way = way._replace(vectors=VECTORS)
        address = address_of(name, lambda: objects.compile_product(name, kind, ROUNDED, n_vectors, way))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * objects.WRITERS[kind][1])(address)


def factors_of(x, pairs):
    """Vectors of bf16 uint16 [n_vectors, n] as products with ROUNDED take them."""
    groups = x.reshape(len(x), -1, 32)
    factors = np.zeros(groups.shape, np.uint32)
    if pairs:
        factors.view(np.uint16)[..., :32] = groups
    else:  # even_first
        factors[:] = np.concatenate([groups[..., ::2], groups[..., 1::2]], axis=-1).astype(np.uint32) << 16
    return factors


@pytest.mark.skipif(not cpu.PAIRS, reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize("w_exponents, x_exponents", [
    ((0, 1), (0, 1)), ((-30, 30), (-30, 30)), ((-75, -55), (-75, -55)), ((-133, -120), (110, 126))])
@pytest.mark.parametrize("n_vectors", [1, 3])
def test_fma_gives_the_bits_of_the_instruction_for_pairs(w_exponents, x_exponents, n_vectors):
    """Also of sums that cancel out, of subnormal sums, and of subnormal weights, which both take for zeros."""
    rng, rows, n, first = np.random.default_rng(0), 5, 128, 64

    def numbers(exponents, *shape):
        some = rng.standard_normal(shape) * 2.0 ** rng.integers(*exponents, shape)
        return (some.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    w, x, out = numbers(w_exponents, rows, n), numbers(x_exponents, n_vectors, n), []
    w[:, 2:n:4], x[:, 2:n:4] = w[:, :n:4] ^ 0x8000, x[:, :n:4]  # in neighbouring lanes
    for pairs in (True, False):
        factors = factors_of(x, pairs)
        for parts in ((0, n),), ((0, first), (first, n)):
            sums, kept = np.zeros((n_vectors, rows), np.float32), np.zeros((rows, n_vectors, 16), np.float32)
            for start, end in parts:
                bf16_product_of(pairs, n_vectors)(
                    w.ctypes.data + 2 * start, w.strides[0], rows, factors.ctypes.data + 4 * start, factors.strides[0],
                    end - start, sums.ctypes.data, sums.strides[0], kept.ctypes.data, (start > 0) + 2 * (end < n))
            out.append(sums.view(np.uint32))
    assert out[0].any() and all(np.array_equal(some, out[0]) for some in out)


@pytest.mark.parametrize("form, w, x", [
    (F32, 2.0**-70, 2.0**-70), (BF16, 2.0**-70, 2.0**-70), (F16, 2.0**-14, 2.0**-126)])
def test_subnormal_sums_of_stored_rows(form, w, x):
    """Only products with ROUNDED take them for zeros, as the instruction for pairs does."""
    n, out, name = 32, np.zeros((1, 1), np.float32), f"subnormal_{form}"
    row = np.full((1, n), w, np.float16 if form == F16 else np.float32)
    row = (row.view(np.uint32) >> 16).astype(np.uint16) if form == BF16 else row
    factors, way = np.full((1, n), x, np.float32), vectors.way_of(form, vectors.ONE)
    address = address_of(name, lambda: objects.compile_product(name, "float_product", form, 1, way))
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)(address)(
        row.ctypes.data, row.strides[0], 1, factors.ctypes.data, factors.strides[0], n, out.ctypes.data, 4, 0, 0)
    assert out[0, 0] == np.float32(n * w * x) > 0


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.skipif(
    not cpu.PAIRS, reason="this CPU has no AVX512_BF16"))])
@pytest.mark.parametrize("n_vectors, avx512", [(5, True), (6, True), (7, True), (8, True), (1, False), (6, False)])
@pytest.mark.parametrize("n, rows", [(32, 1), (96, 31), (128, 32), (128, 250), (256, 49)])
def test_transposed_rows_give_the_same_sums(n, rows, n_vectors, avx512, pairs):
    """As the rows themselves; behind the last row, the memory is not read as a row. The second ones also in parts."""
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16 for shape in ((rows + 1, n), (8, n)))
    w, factors = w.astype(np.uint16), factors_of(x.astype(np.uint16), pairs)
    w[rows:] = 0x7FC0  # NaN
    padded_rows = padded(rows, 32)
    expected, found = np.zeros((2, n_vectors, padded_rows), np.float32)
    for out, vector in zip(expected, factors):
        bf16_product_of(pairs, 1)(w.ctypes.data, w.strides[0], rows, vector.ctypes.data, factors.strides[0], n,
                                  out.ctypes.data, expected.strides[0], 0, 0)
    assert expected[:, :rows].all()
    whole, two = ((0, n),), ((0, 32), (32, n))
    for kind, parts in [("transposed_scores", whole), ("transposed_product", whole)] + \
            [("transposed_product", two)] * (n > 32):
        kept = np.zeros((padded_rows, n_vectors, 16), np.float32)
        found[:] = np.nan
        for start, end in parts:
            keys = np.zeros((padded_rows, (end - start) // 2), np.uint32)
            bf16_product_of(pairs, 1, "transposed_rows")(w[:, start:].ctypes.data, w.strides[0], rows, end - start,
                                                         keys.ctypes.data)
            bf16_product_of(pairs, n_vectors, kind, avx512)(
                keys.ctypes.data, 0, rows, factors.ctypes.data + 4 * start, factors.strides[0], end - start,
                found.ctypes.data, found.strides[0], kept.ctypes.data, (start > 0) + 2 * (end < n))
        assert not np.isnan(found[:, :rows]).any()
        np.testing.assert_array_equal(found[:, :rows], expected[:, :rows])


@pytest.mark.skipif(not cpu.PAIRS, reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize("n, rows, n_vectors", [(512, 33, 8), (544, 1, 5), (1120, 64, 7)])
def test_turned_vectors_give_the_same_sums(n, rows, n_vectors):
    """As the rows and the vectors themselves; and a vector's pairs stand in the order of the sums."""
    rng, run = np.random.default_rng(0), numba.njit(lambda x, n, own: intrinsics.turn_pairs(x, n, own))
    w, x = ((rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for shape in ((rows, n), (n_vectors, n)))
    factors, keys = factors_of(x, True), np.zeros((padded(rows, 32), n // 2), np.uint32)
    expected, found = np.zeros((2, n_vectors, padded(rows, 32)), np.float32)
    for out, vector in zip(expected, factors):
        bf16_product_of(True, 1)(w.ctypes.data, w.strides[0], rows, vector.ctypes.data, factors.strides[0], n,
                                 out.ctypes.data, expected.strides[0], 0, 0)
    own = np.zeros(n, np.uint16)
    for vector, numbers in zip(factors, x):
        run(vector.ctypes.data, n, own.ctypes.data)
        order = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]
        pairs = numbers.view(np.uint32).reshape(-1, 16).T[order]
        np.testing.assert_array_equal(vector.reshape(-1)[:n // 2], pairs.ravel())
    bf16_product_of(True, 1, "transposed_rows")(w.ctypes.data, w.strides[0], rows, n, keys.ctypes.data)
    bf16_product_of(True, n_vectors, "turned_product")(
        keys.ctypes.data, 0, rows, factors.ctypes.data, factors.strides[0], n, found.ctypes.data, found.strides[0], 0,
        0)
    np.testing.assert_array_equal(found[:, :rows], expected[:, :rows])


@pytest.mark.parametrize("n_vectors", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 250])
def test_values_weighted_in_both_ways(rows, n_vectors):
    """Row by row, in strips of columns, by fma and the instruction, and pairs of rows apart: the same bits."""
    rng, n, found = np.random.default_rng(0), 96, []
    bits = [rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
            for shape in ((rows, n), (n_vectors, padded(rows, 2)))]
    w, x = (some.astype(np.uint16) for some in bits)
    x[:, rows:] = 0
    for kind, pairs in [("weighted_rows", False), ("weighted_pairs", False), *[("weighted_pairs", True)] * cpu.PAIRS]:
        factors, out = x if pairs else x.astype(np.uint32) << 16, np.zeros((n_vectors, n), np.float32)
        bf16_product_of(pairs, n_vectors, kind)(w.ctypes.data, w.strides[0], rows, factors.ctypes.data,
                                                factors.strides[0], n, out.ctypes.data, out.strides[0])
        found.append(out)
    if rows % 2 == 0:
        apart, out = np.zeros((n // 16, rows // 2, 16), np.uint32), np.zeros((n_vectors, n), np.float32)
        bf16_product_of(False, 1, "paired_rows")(w.ctypes.data, w.strides[0], rows, n, apart.ctypes.data)
        factors = x.astype(np.uint32) << 16
        bf16_product_of(False, n_vectors, "paired_product")(apart.ctypes.data, apart.strides[0], rows,
            factors.ctypes.data, factors.strides[0], n, out.ctypes.data, out.strides[0])
        found.append(out)
    numbers = [some.astype(np.uint32) << 16 for some in (w, x[:, :rows])]
    expected = np.matmul(*(some.view(np.float32).astype(np.float64) for some in numbers[::-1]))
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    assert all(np.array_equal(each, found[0]) for each in found)


REGISTERS = {"vnni512": 32, "vnni": 16, "avx2": 16, "i8mm": 32, "dotprod": 32, "neon": 32, "plain": 16}  # for vectors


@pytest.mark.parametrize("sums", [6, 24])  # of AVX2, NEON and plain; of AVX-512
@pytest.mark.parametrize("path", cpu.INT8_SHAPES)
def test_no_product_is_made_for_more_vectors_than_registers_hold(path, sums, monkeypatch):
    """Sums of all default ways fit, packed blocks are worked on whole, one vector more than a way takes is refused.

    Sums of several vectors with packed blocks take half of the registers at most.
    """
    monkeypatch.setattr(vectors, "PATH", path)
    monkeypatch.setattr(vectors, "SUMS", sums)
    for form in FORMATS.values():
        for way in (vectors.way_of(form, count) for count in (vectors.ONE, vectors.AT_ONCE, vectors.MANY)):
            if is_packed(form):
                assert 32 // cpu.INT8_SHAPES[path].lanes % way.rows == 0
                assert way.vectors == 1 or way.rows * way.vectors * HALVES[form] <= REGISTERS[path] // 2
            else:
                assert 1 <= way.rows * way.vectors <= sums
            with pytest.raises(ValueError, match=f"{way.vectors + 1} vectors"):
                kind = "packed_product" if is_packed(form) else "float_product"
                objects.compile_product("too_many", kind, form, way.vectors + 1, way)
