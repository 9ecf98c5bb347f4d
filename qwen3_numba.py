# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.21", "huggingface_hub>=2.4", "tqdm", "jinja2>=3.1.6",
#                 "numba>=0.68"]
# ///
"""Qwen3 at the speed of the memory: the functions of qwen3.py whose limit it is, compiled by numba while they run.

    python qwen3_numba.py "What is the capital of France?"                the same options as qwen3.py, and --quantize

Each new token needs every weight once, and a processor multiplies faster than its memory delivers: so a token takes as
long as its weights take to be read. From that follows all that is done here:

    fewer bytes      weights stay bfloat16 as in the file, or become 8 or 4 bits; keys and values are 16 bits
    all of the speed each core reads its share of the rows as one stream, asking for the bytes ahead of time
    nothing else     one job for the threads per token: they meet at barriers and never wait for Python in between

What isn't defined here is that of qwen3.py, generation, sampling and the command line among it; each function that is
has its namesake there, which says in NumPy what it computes. The order is that of forward:

    threads -> vectors (LLVM) -> dot products -> weights -> the small steps -> attention -> decoding -> prefill -> forward
"""
import argparse
import contextlib
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

try:
    import llvmlite.binding
    import numba
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
except ImportError as error:
    message = f"needs numba ({error}): pip install numba, or qwen3[fast]; qwen3.py does the same without it"
    if __name__ == "__main__":
        sys.exit(f"qwen3_numba.py: {message}")
    raise ImportError(f"qwen3_numba {message}") from error

import qwen3
from qwen3 import *  # noqa: F403  the same names
from qwen3 import Config, Engine, InputError, KVCache, Model, checked_ids, check_tensors, map_checkpoint, rope_tables

# ----------------------------------------------------------------------------------------------------------------------
# Threads: a team that runs one kernel together
# ----------------------------------------------------------------------------------------------------------------------


def available_cpus() -> int:
    """How many CPUs this process may really use: its affinity, and the quota of its cgroup where there is one."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux, no cgroup, or "max": no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, round(int(quota) / int(period))))
    return n


class Team:
    """Threads that run a kernel together, each with its rank. They sleep while there is nothing to do.

    The calling thread only waits, so that Ctrl-C reaches it at once; a job that was begun is still finished, and the
    next one comes after it. Callers from several threads take turns.
    """

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self._start()

    def _start(self) -> None:
        self.pid = os.getpid()
        self.barrier = np.zeros(16, np.int64)  # arrived [0], round [8]: on two cache lines
        self.queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(self.n_threads)]
        for rank in range(self.n_threads):
            threading.Thread(target=self._work, args=(rank,), daemon=True, name=f"qwen3-{rank}").start()

    def _work(self, rank: int) -> None:
        while True:
            kernel, args, done = self.queues[rank].get()
            if rank == 0:  # one put by the caller, which an interrupt can't cut in two; the others are called from here
                for other in self.queues[1:]:
                    other.put((kernel, args, None))
            kernel(rank, self.n_threads, self.barrier, *args)
            if done is not None:
                done.set()

    def run(self, kernel: Callable, *args: Any) -> None:
        """kernel(rank, n_threads, barrier, *args) on all threads. The kernel must end with `meet`."""
        if self.pid != os.getpid():  # threads don't survive a fork
            self._start()
        done = threading.Event()
        self.queues[0].put((kernel, args, done))
        done.wait()


# ----------------------------------------------------------------------------------------------------------------------
# Vectors: what numba can't say in Python
#
# numba turns Python into the instructions of LLVM, a compiler's language between C and machine code. An @intrinsic is a
# function that writes such instructions itself: its `codegen` runs once, while a kernel is compiled, and what it calls on
# `b`, the builder, is appended to the kernel. So the loops over `for r in range(rows)` below run at compile time and write
# the same instructions for each row, while `loop` writes a loop that runs in the kernel. <8 x float> is a vector of 8
# numbers, which one instruction processes together; LLVM chooses the machine's own instructions for it.
# Addresses are integers: LLVM knows nothing of arrays.
# ----------------------------------------------------------------------------------------------------------------------

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16  # float32 numbers that are processed together; LLVM splits what is wider than the machine's vectors
AHEAD = 1024  # bytes that are asked for before they are needed; hardware alone stops at the end of each page of 4096


def vector(kind: ir.Type, n: int) -> ir.VectorType:
    return ir.VectorType(kind, n)


def splat(kind: ir.Type, n: int, value: float) -> ir.Constant:
    """A vector of n times the same value."""
    return ir.Constant(vector(kind, n), [value] * n)


def call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """A call of one of LLVM's own functions, or of a machine's special instruction."""
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return b.call(function, args)


def load(b: Any, address: Any, kind: ir.Type, n: int) -> Any:
    """n numbers from memory, at any address."""
    value = b.load(b.inttoptr(address, vector(kind, n).as_pointer()))
    value.align = 1
    return value


def offset(b: Any, address: Any, index: Any, size: int) -> Any:
    """The address of the index-th thing of so many bytes."""
    return b.add(address, b.mul(index, I64(size)))


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in one instruction."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def prefetch(b: Any, address: Any) -> None:
    call(b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1))


def total(b: Any, value: Any) -> Any:
    """The sum of a vector's numbers."""
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(F32, [F32, value.type]),
                                              f"llvm.vector.reduce.fadd.v{value.type.count}f32")
    return b.call(function, [F32(0.0), value], fastmath=("reassoc",))  # in any order


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


def int8_path(features: dict[str, bool] | None = None) -> str:
    """Which instructions multiply bytes: the best that this CPU reports."""
    features = llvmlite.binding.get_host_cpu_features() if features is None else features
    if features.get("avx512vnni") and features.get("avx512vl") or features.get("avxvnni"):
        return "vnni"
    if features.get("avx2"):
        return "avx2"
    if features.get("dotprod"):
        return "neon"
    return "plain"


PATH = os.environ.get("QWEN3_INT8_PATH") or int8_path()


def dot_bytes(b: Any, path: str, w: Any, x: Any, signed: bool) -> Any:
    """w, x: <32 x i8> -> <8 x i32>, eight sums of four products.

    w is unsigned, x signed. With `signed`, w stands for w - 128; only the path "vnni" leaves that subtraction to the
    caller, because its instruction wants one factor unsigned.
    """
    if path == "vnni":
        return call(b, "llvm.x86.avx512.vpdpbusd.256", vector(I32, 8), splat(I32, 8, 0), w, x)
    if signed:
        w = b.xor(w, splat(I8, 32, 0x80))
    if path == "avx2":  # u8 times s8 in pairs, whose sum must fit into 16 bits: |w| <= 127 or w <= 15 sees to that
        if signed:
            negative = b.icmp_signed("<", w, splat(I8, 32, 0))
            x = b.select(negative, b.sub(splat(I8, 32, 0), x), x)
            w = b.select(negative, b.sub(splat(I8, 32, 0), w), w)
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), w, x)
        return call(b, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, splat(I16, 16, 1))

    def part(value: Any, start: int, n: int) -> Any:
        return b.shuffle_vector(value, value, ir.Constant(vector(I32, n), list(range(start, start + n))))

    if path == "neon":
        halves = [call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", vector(I32, 4), splat(I32, 4, 0), part(w, i, 16), part(x, i, 16))
                  for i in (0, 16)]
        return b.shuffle_vector(*halves, ir.Constant(vector(I32, 8), list(range(8))))
    products = b.mul((b.sext if signed else b.zext)(w, vector(I32, 32)), b.sext(x, vector(I32, 32)))
    return b.add(b.add(part(products, 0, 8), part(products, 8, 8)), b.add(part(products, 16, 8), part(products, 24, 8)))


# ----------------------------------------------------------------------------------------------------------------------
# Dot products: rows of weights times one vector, where nearly all time is spent
#
# Formats of a row: float32, bf16, f16; and two packed ones, in blocks of 256 weights, that is 8 groups of 32. Their row
# begins with a float16 scale for each group, then come the weights:
#   int8   a byte each, w = scale * (byte - 128)
#   int4   a half byte each, w = scale * (half byte - 8); 32 bytes hold two groups, the first in the lower halves
# A vector that is multiplied with them is packed likewise (see pack_vector): signed bytes, then for each group a scale,
# then for each group the correction -128 * scale * sum(bytes), or -8 * ..., for the offset of the weights.
# ----------------------------------------------------------------------------------------------------------------------

GROUP, BLOCK = 32, 256
FLOAT32, BF16, FLOAT16, INT8, INT4 = range(5)
KINDS = {FLOAT32: "f32", BF16: "bf16", FLOAT16: "f16"}
ROWS = 4  # rows at a time: their streams hide each other's waiting, and x is loaded once for all


def float_dot(kind: str, n_rows: int) -> Any:
    """An intrinsic (w, stride, x, n, out): n_rows rows, `stride` bytes apart, times x float32 [n], n a multiple of 32."""
    size = 4 if kind == "f32" else 2

    @intrinsic
    def dot(context, w, stride, x, n, out):
        def codegen(context, b, signature, args):
            w, stride, x, n, out = args
            sums = [cgutils.alloca_once_value(b, splat(F32, LANES, 0.0)) for _ in range(2 * n_rows)]

            def body(i: Any) -> None:
                xs = [load(b, b.add(offset(b, x, i, 4 * 2 * LANES), I64(4 * LANES * half)), F32, LANES) for half in (0, 1)]
                for r in range(n_rows):
                    here = offset(b, b.add(w, b.mul(stride, I64(r))), i, size * 2 * LANES)
                    for line in range(0, size * 2 * LANES, 64):
                        prefetch(b, b.add(here, I64(AHEAD + line)))
                    for half in (0, 1):
                        value = load_float(b, b.add(here, I64(size * LANES * half)), kind, LANES)
                        b.store(fma(b, value, xs[half], b.load(sums[2 * r + half])), sums[2 * r + half])

            loop(b, b.sdiv(n, I64(2 * LANES)), body)
            for r in range(n_rows):
                both = b.fadd(b.load(sums[2 * r]), b.load(sums[2 * r + 1]))
                b.store(total(b, both), b.inttoptr(b.add(out, I64(4 * r)), F32.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), codegen

    return dot


def packed_dot(bits: int, n_rows: int, n_vectors: int = 1) -> Any:
    """An intrinsic (w, stride, x, x_stride, n, out, out_stride): packed rows times packed vectors, n a multiple of 256.

    The strides are the bytes between two rows, two vectors, and the results of two vectors. With several vectors, each
    group of weights is loaded once for all of them.
    """
    tile = [(r, t) for r in range(n_rows) for t in range(n_vectors)]

    def groups(b: Any, address: Any) -> Any:
        """(number, address, half) of each of a block's groups; two groups of 4 bits share their bytes."""
        for part in range(bits):
            for half in range(8 // bits):
                yield part * (8 // bits) + half, b.add(address, I64(GROUP * part)), half

    def unpacked(b: Any, address: Any, half: int) -> Any:
        """The unsigned bytes of a group of weights."""
        value = load(b, address, I8, GROUP)
        if bits == 8:
            return value
        return b.lshr(value, splat(I8, GROUP, 4)) if half else b.and_(value, splat(I8, GROUP, 15))

    @intrinsic
    def dot(context, w, stride, x, x_stride, n, out, out_stride):
        def codegen(context, b, signature, args):
            w, stride, x, x_stride, n, out, out_stride = args
            blocks = b.sdiv(n, I64(BLOCK))
            rows = [b.add(w, b.mul(stride, I64(r))) for r in range(n_rows)]
            vectors = [b.add(x, b.mul(x_stride, I64(t))) for t in range(n_vectors)]
            sums = {at: cgutils.alloca_once_value(b, splat(F32, 8, 0.0)) for at in tile}

            def body(i: Any) -> None:
                packed = [offset(b, offset(b, row, blocks, 16), i, GROUP * bits) for row in rows]
                scales = {}
                for r, t in tile:
                    w_scale = load_float(b, offset(b, rows[r], i, 16), "f16", 8)
                    x_scales = offset(b, b.add(vectors[t], n), i, 32)
                    scales[r, t] = b.fmul(w_scale, load(b, x_scales, F32, 8))
                    correction = load(b, offset(b, x_scales, blocks, 32), F32, 8)
                    b.store(fma(b, w_scale, correction, b.load(sums[r, t])), sums[r, t])
                if n_vectors == 1:
                    for address in packed:
                        for line in range(0, GROUP * bits, 64):
                            prefetch(b, b.add(address, I64(AHEAD + line)))
                for r in range(n_rows):
                    for g, address, half in groups(b, packed[r]):
                        weights = unpacked(b, address, half)
                        for t in range(n_vectors):
                            xs = load(b, b.add(offset(b, vectors[t], i, BLOCK), I64(GROUP * g)), I8, GROUP)
                            whole = dot_bytes(b, PATH, weights, xs, bits == 8)
                            lanes = b.shuffle_vector(scales[r, t], scales[r, t], splat(I32, 8, g))
                            product = fma(b, b.sitofp(whole, vector(F32, 8)), lanes, b.load(sums[r, t]))
                            b.store(product, sums[r, t])

            loop(b, blocks, body)
            for r, t in tile:
                at = b.add(b.add(out, b.mul(out_stride, I64(t))), I64(4 * r))
                b.store(total(b, b.load(sums[r, t])), b.inttoptr(at, F32.as_pointer()))
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 7), codegen

    return dot


dot_f32, dot_bf16, dot_f16 = (float_dot(kind, ROWS) for kind in ("f32", "bf16", "f16"))
dot_f32_row, dot_bf16_row, dot_f16_row = (float_dot(kind, 1) for kind in ("f32", "bf16", "f16"))
dot_int8, dot_int4, dot_int8_row, dot_int4_row = (packed_dot(bits, rows) for rows in (ROWS, 1) for bits in (8, 4))
VECTORS = 4  # that are multiplied together in prefill
tile_int8, tile_int4 = (packed_dot(bits, ROWS, VECTORS) for bits in (8, 4))


def weighted_sum(kind: str) -> Any:
    """An intrinsic (v, stride, p, n, width, out): adds p[t] * v[t] for t < n to out float32 [width], a multiple of 32."""
    @intrinsic
    def add(context, v, stride, p, n, width, out):
        def codegen(context, b, signature, args):
            v, stride, p, n, width, out = args

            def columns(c: Any) -> None:
                parts = [b.inttoptr(b.add(offset(b, out, c, 128), I64(64 * half)), vector(F32, LANES).as_pointer()) for half in (0, 1)]
                sums = [cgutils.alloca_once(b, vector(F32, LANES)) for _ in parts]
                for part, sum_ in zip(parts, sums):
                    value = b.load(part)
                    value.align = 4
                    b.store(value, sum_)

                def row(t: Any) -> None:
                    weight = b.load(b.inttoptr(offset(b, p, t, 4), F32.as_pointer()))
                    lanes = b.insert_element(ir.Constant(vector(F32, LANES), ir.Undefined), weight, I32(0))
                    lanes = b.shuffle_vector(lanes, lanes, splat(I32, LANES, 0))
                    here = b.add(b.add(v, b.mul(stride, t)), b.mul(c, I64(128 if kind == "f32" else 64)))
                    for half in (0, 1):
                        value = load_float(b, b.add(here, I64((64 if kind == "f32" else 32) * half)), kind, LANES)
                        b.store(fma(b, value, lanes, b.load(sums[half])), sums[half])

                loop(b, n, row)
                for part, sum_ in zip(parts, sums):
                    b.store(b.load(sum_), part).align = 4

            loop(b, b.sdiv(width, I64(32)), columns)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64), codegen

    return add


add_f32, add_bf16, add_f16 = (weighted_sum(kind) for kind in ("f32", "bf16", "f16"))


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
        even = b.and_(b.lshr(bits, I32(16)), I32(1))
        return b.trunc(b.lshr(b.add(bits, b.add(even, I32(0x7FFF))), I32(16)), I16)
    return types.uint16(types.float32), codegen


@intrinsic
def float_from_bf16(context, bits):
    def codegen(context, b, signature, args):
        return b.bitcast(b.shl(b.zext(args[0], I32), I32(16)), F32)
    return types.float32(types.uint16), codegen


# ----------------------------------------------------------------------------------------------------------------------
# The small steps of a layer, each the namesake of a function in qwen3.py
# ----------------------------------------------------------------------------------------------------------------------


def compiled(function: Callable) -> Any:
    """The function, compiled when it is first called, and kept in numba's cache on disk if there is a place for it.

    Sums may be taken in any order, so that they become vectors; but NaN stays NaN, or broken weights would go unnoticed.
    """
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written to
        return numba.njit(**options)(function)



@compiled
def share(n, rank, n_threads):
    """(start, end) of a thread's part of n things, in whole steps of ROWS."""
    steps = (n + ROWS - 1) // ROWS
    return min(n, steps * rank // n_threads * ROWS), min(n, steps * (rank + 1) // n_threads * ROWS)


@compiled
def exp(x):
    """e ** x for x <= 0, to (4 + 0.8 |x|) 1e-7 of it: 2 ** whole from the bits of a float, 2 ** fraction by a polynomial."""
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
    """qwen3.rms_norm of x [d] into out [d]."""
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
    """silu(gate) * up of two numbers."""
    e = exp(-abs(gate))
    return gate * up * (np.float32(1) if gate >= 0 else e) / (np.float32(1) + e)


@compiled
def pack_vector(x, packed, zero):
    """Packs x float32 [n] for rows of int8 (zero 128) or int4 (zero 8), see above; n is a multiple of 256."""
    n = len(x)
    values = packed[:n].view(np.int8)
    scales, corrections = packed[n:n + n // 8].view(np.float32), packed[n + n // 8:n + n // 4].view(np.float32)
    for g in range(n // GROUP):
        largest, broken = np.float32(0), np.float32(0)
        for i in range(g * GROUP, (g + 1) * GROUP):
            largest = max(largest, abs(x[i]))
            broken += x[i] * np.float32(0)  # NaN if one is NaN or infinite
        inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
        total_ = np.int32(0)
        for i in range(g * GROUP, (g + 1) * GROUP):
            value = np.int32(np.floor(x[i] * inverse + np.float32(0.5)))
            values[i] = value
            total_ += value
        scales[g] = largest / np.float32(127) + broken
        corrections[g] = -zero * scales[g] * np.float32(total_)


@compiled
def ready(slot, width, form):
    """The address of the vector in a slot, float32 [width], as rows of this format want it: packed behind it if need be."""
    if form >= INT8:
        pack_vector(slot[:4 * width].view(np.float32), slot[4 * width:], ZERO_INT8 if form == INT8 else ZERO_INT4)
        return slot.ctypes.data + 4 * width
    return slot.ctypes.data


ZERO_INT8 = np.float32(128 if PATH == "vnni" else 0)  # the other instructions subtract it themselves
ZERO_INT4 = np.float32(8)


@compiled
def linear(weight, xs, n, columns, start, end, out, out_stride):
    """Rows start to end of a weight times n vectors -> out. Each row is read once from memory, whatever n is.

    weight: (address, bytes per row, format) of `columns` columns; xs: the vectors' addresses [n]; out: address of
    float32, `out_stride` bytes from one vector's results to the next one's.
    """
    address, stride, form = weight[0], weight[1], weight[2]
    step = BLOCK if form >= INT8 else 32
    width = (columns + step - 1) // step * step
    for r in range(start, end, ROWS):
        w = address + r * stride
        if r + ROWS <= end:
            for t in range(n):
                y = out + t * out_stride + 4 * r
                if form == BF16:
                    dot_bf16(w, stride, xs[t], width, y)
                elif form == INT8:
                    dot_int8(w, stride, xs[t], 0, width, y, 0)
                elif form == INT4:
                    dot_int4(w, stride, xs[t], 0, width, y, 0)
                elif form == FLOAT16:
                    dot_f16(w, stride, xs[t], width, y)
                else:
                    dot_f32(w, stride, xs[t], width, y)
        else:
            for t in range(n):
                for i in range(end - r):
                    row, y = w + i * stride, out + t * out_stride + 4 * (r + i)
                    if form == BF16:
                        dot_bf16_row(row, stride, xs[t], width, y)
                    elif form == INT8:
                        dot_int8_row(row, stride, xs[t], 0, width, y, 0)
                    elif form == INT4:
                        dot_int4_row(row, stride, xs[t], 0, width, y, 0)
                    elif form == FLOAT16:
                        dot_f16_row(row, stride, xs[t], width, y)
                    else:
                        dot_f32_row(row, stride, xs[t], width, y)


# ----------------------------------------------------------------------------------------------------------------------
# Attention of a few new positions: the cache is read once, like weights
# ----------------------------------------------------------------------------------------------------------------------

POSITIONS = 256  # of the cache that a thread works through at a time


@compiled
def store_kv(cache, form, index, values):
    """Writes float32 values into the cache, a flat array, from `index` on."""
    for i in range(len(values)):
        if form == FLOAT16:
            cache[index + i] = half_from_float(values[i])
        else:
            cache[index + i] = bf16_from_float(values[i])


@compiled
def attend(q, k, v, stride, form, n, scores, partial):
    """One query head, q float32 [width], with n positions of a KV head -> partial [width + 2].

    k, v: the addresses of the first position, `stride` bytes from one to the next. partial: the sum of the values,
    weighted with exp(score - largest), then `largest`, then the sum of the weights. So what several threads have
    made of different positions can be added up later: softmax needs all scores only for its denominator (Milakov &
    Gimelshein 2018, "online" softmax).
    """
    width = len(q)
    partial[:] = 0
    partial[width] = -np.inf
    if n <= 0:
        return
    weight = np.empty(3, np.int64)
    weight[0], weight[1], weight[2] = k, stride, form
    address = np.empty(1, np.int64)
    address[0] = q.ctypes.data
    linear(weight, address, 1, width, 0, n, scores.ctypes.data, 0)
    largest = scores[0]
    for t in range(1, n):
        largest = max(largest, scores[t])
    sum_ = np.float32(0)
    for t in range(n):
        scores[t] = exp(scores[t] - largest)
        sum_ += scores[t]
    if form == FLOAT16:
        add_f16(v, stride, scores.ctypes.data, n, width, partial.ctypes.data)
    else:
        add_bf16(v, stride, scores.ctypes.data, n, width, partial.ctypes.data)
    partial[width], partial[width + 1] = largest, sum_


@compiled
def combine(partials, out):
    """The attention's output [head_dim] from the partial results [n, width + 2] of all positions."""
    width = partials.shape[1] - 2
    largest = partials[0, width]
    for c in range(1, len(partials)):
        largest = max(largest, partials[c, width])
    denominator = np.float32(0)
    out[:] = 0
    for c in range(len(partials)):
        factor = exp(partials[c, width] - largest)
        denominator += factor * partials[c, width + 1]
        for i in range(len(out)):
            out[i] += factor * partials[c, i]
    for i in range(len(out)):
        out[i] /= denominator


# ----------------------------------------------------------------------------------------------------------------------
# Weights: as they lie in the file, or packed
# ----------------------------------------------------------------------------------------------------------------------

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # their columns in Weights.layers
Q, K, V, O, GATE, UP, DOWN = range(7)
FORMATS = {"F32": FLOAT32, "BF16": BF16, "F16": FLOAT16}
PACKED = {"int8": INT8, "int4": INT4}
VERSION = "1"  # of the packed formats in files


@dataclass
class Weights:
    """Where the weights are, for the kernels: (address, bytes per row, format) of each matrix.

    layers int64 [num_hidden_layers, 7, 3] in the order of LINEAR; embedding, head int64 [3]; norms float32
    [num_hidden_layers, 2, hidden_size], head_norms float32 [num_hidden_layers, 2, head_dim], norm float32 [hidden_size].
    `arrays` keeps alive what the addresses point to; `team` are the threads that work on it.
    """
    layers: np.ndarray
    embedding: np.ndarray
    head: np.ndarray
    norms: np.ndarray
    head_norms: np.ndarray
    norm: np.ndarray
    arrays: list[np.ndarray]
    team: Team

    @property
    def n_bytes(self) -> int:
        """The bytes of all matrices."""
        return sum(array.nbytes for array in self.arrays)


def padded(n: int, step: int = BLOCK) -> int:
    return -(-n // step) * step


def row_bytes(n: int, form: int) -> int:
    """Bytes of a row of n weights."""
    if form >= INT8:
        n = padded(n)
        return n // GROUP * 2 + n * (8 if form == INT8 else 4) // 8
    return padded(n, 32) * (4 if form == FLOAT32 else 2)


@compiled
def quantize_group(w, bits, scale):
    """(the best scale for the whole numbers that w [32] / scale rounds to, the squared error it leaves)."""
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    inverse = np.float32(1) / scale
    wq, qq = np.float32(0), np.float32(0)
    for i in range(GROUP):
        q = np.float32(min(max(np.floor(w[i] * inverse + np.float32(0.5)), low), high))
        wq += w[i] * q
        qq += q * q
    best = wq / qq if qq > 0 else scale
    error = np.float32(0)
    for i in range(GROUP):
        q = np.float32(min(max(np.floor(w[i] * inverse + np.float32(0.5)), low), high))
        error += (w[i] - best * q) ** 2
    return best, error


@compiled
def quantize_rows(w, bits, packed):
    """w float32 [rows, n], n a multiple of 256 -> packed rows, see above. For each group the scale that errs least."""
    n = w.shape[1]
    for r in range(len(w)):
        scales, values = packed[r, :n // 16].view(np.uint16), packed[r, n // 16:]
        for g in range(n // GROUP):
            group = w[r, g * GROUP:(g + 1) * GROUP]
            largest, at = np.float32(0), np.float32(0)
            for i in range(GROUP):
                if not abs(group[i]) <= largest:
                    largest, at = abs(group[i]), group[i]
            scale = np.float32(0)
            if largest > 0:
                smallest_error = np.float32(np.inf)
                for step in range(1 if bits == 8 else 12):
                    # 4 bits reach from -8 to 7: the largest weight gets -8, or somewhat more, or somewhat less than that
                    tried = largest / np.float32(127) if bits == 8 else -at / np.float32(8.8 - 0.2 * step)
                    best, error = quantize_group(group, bits, tried)
                    if error < smallest_error:
                        smallest_error, scale = error, best
            stored = half_from_float(scale)
            scales[g] = stored
            scale = float_from_half(stored)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for i in range(GROUP):
                q = np.floor(group[i] * inverse + np.float32(0.5))
                if bits == 8:
                    values[g * GROUP + i] = np.uint8(min(max(q, -127), 127) + 128)
                else:
                    half = np.uint8(min(max(q, -8), 7) + 8)
                    if g % 2 == 0:
                        values[g // 2 * GROUP + i] = half
                    else:
                        values[g // 2 * GROUP + i] |= half << 4


def to_float32(matrix: np.ndarray, form: int) -> np.ndarray:
    """Stored rows [rows, n] of one of the float formats as float32."""
    if form == BF16:
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix.astype(np.float32)


def load_weights(path: Path, config: Config, quantize: str | None = None, threads: int | None = None) -> Weights:
    """The namesake of qwen3.load_weights: nothing is expanded. `quantize` is None, "int8" or "int4"."""
    compile_kernels()
    team = Team(threads or available_cpus())
    saved, stored = map_quantized(path)
    if saved is None:
        stored = map_checkpoint(path)
        check_tensors(path, config, stored)
    elif quantize not in (None, saved):
        raise InputError(f"{path}: this checkpoint is {saved}, so it can't be made {quantize}")
    else:
        check_quantized(path, config, stored, saved)
        quantize = None
    arrays: list[np.ndarray] = []

    def place(name: str, pool: ThreadPoolExecutor) -> np.ndarray:
        tensor = stored[name]
        data, rows, n = tensor.data, *tensor.data.shape
        form = FORMATS.get(tensor.dtype, PACKED.get(saved))
        if quantize is not None:
            bits = 8 if quantize == "int8" else 4
            target = PACKED[quantize]
            packed = np.empty((rows, row_bytes(n, target)), np.uint8)

            def part(start: int) -> None:
                w = np.zeros((min(256, rows - start), padded(n)), np.float32)
                w[:, :n] = to_float32(data[start:start + 256], form)
                if not np.isfinite(w).all():
                    raise InputError(f"{path}: {name} has weights that are not finite, so it can't be quantized")
                quantize_rows(w, bits, packed[start:start + 256])

            list(pool.map(part, range(0, rows, 256)))
            qwen3.forget_pages(tensor.mapping)
            data, form = packed, target
        elif form < INT8 and n % 32:  # the kernels go in steps of 32
            wide = np.zeros((rows, padded(n, 32)), data.dtype)
            wide[:, :n] = data
            data = wide
        arrays.append(data)
        return np.array([data.ctypes.data, data.strides[0], form])

    layers = np.zeros((config.num_hidden_layers, len(LINEAR), 3), np.int64)
    with ThreadPoolExecutor(team.n_threads) as pool:
        embedding = place("model.embed_tokens.weight", pool)
        tied = config.tie_word_embeddings or "lm_head.weight" not in stored
        head = embedding if tied else place("lm_head.weight", pool)
        for i in tqdm(range(config.num_hidden_layers), "quantizing", delay=1, leave=False, disable=None if quantize else True):
            for j, name in enumerate(LINEAR):
                part = "self_attn" if j <= O else "mlp"
                layers[i, j] = place(f"model.layers.{i}.{part}.{name}.weight", pool)

    def norms(*names: str) -> np.ndarray:
        return np.array([[qwen3.to_float32(stored[f"model.layers.{i}.{name}.weight"]) for name in names]
                         for i in range(config.num_hidden_layers)])

    return Weights(layers, embedding, head, norms("input_layernorm", "post_attention_layernorm"),
                   norms("self_attn.q_norm", "self_attn.k_norm"), np.array(qwen3.to_float32(stored["model.norm.weight"])),
                   arrays, team)


def quantized_file(form: str) -> str:
    return f"model.{form}.safetensors"


def map_quantized(path: Path) -> tuple[str | None, dict[str, qwen3.StoredTensor]]:
    """("int8" or "int4", the tensors) of a folder that save_quantized has written; (None, {}) for any other."""
    for form in PACKED:
        file = qwen3.model_file(path, quantized_file(form), largest=None)
        if file is not None:
            stored = qwen3.map_safetensors(file, {**qwen3.STORED_DTYPES, "U8": np.dtype(np.uint8)})
            with qwen3.safetensors.safe_open(file, framework="numpy") as opened:
                metadata = opened.metadata() or {}
            if (metadata.get("format"), metadata.get("version")) != (form, VERSION):
                raise InputError(f"{file}: written by another version of this program; quantize the model anew")
            return form, stored
    return None, {}


def check_quantized(path: Path, config: Config, stored: dict[str, qwen3.StoredTensor], form: str) -> None:
    """Raises InputError unless each matrix is packed in this format, and each norm is there, with the right sizes."""
    shapes = qwen3.tensor_shapes(config)
    if "lm_head.weight" not in stored and config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    expected = {name: (shape[0], row_bytes(shape[1], PACKED[form])) if len(shape) == 2 else shape
                for name, shape in shapes.items()}
    found = {name: tensor.data.shape for name, tensor in stored.items()}
    kinds = {name: "U8" if len(shape) == 2 else "F32" for name, shape in shapes.items()}
    if found != expected or any(stored[name].dtype != kind for name, kind in kinds.items()):
        raise InputError(f"{path}: the quantized weights don't fit config.json; quantize the model anew")


def save_quantized(model: Model, folder: str | Path, form: str) -> None:
    """Writes a model that was loaded with quantize=form as a checkpoint of its own, which then loads at once.

    The folder must not exist yet, and appears when all of it is written. Raises InputError when that can't be done.
    """
    from qwen3_files import write_safetensors
    folder, w = Path(folder), model.weights
    if os.path.lexists(folder):
        raise InputError(f"{folder}: exists already; give the name of a new folder")
    if PACKED.get(form) != w.head[2]:
        raise InputError(f"{folder}: the model was not loaded as {form}")
    by_address = {array.ctypes.data: array for array in w.arrays}
    tensors = {"model.embed_tokens.weight": by_address[w.embedding[0]], "model.norm.weight": w.norm}
    if w.head[0] != w.embedding[0]:
        tensors["lm_head.weight"] = by_address[w.head[0]]
    for i, layer in enumerate(w.layers):
        names = [f"model.layers.{i}.{'self_attn' if j <= O else 'mlp'}.{name}.weight" for j, name in enumerate(LINEAR)]
        tensors |= {name: by_address[entry[0]] for name, entry in zip(names, layer)}
        for name, norm in zip(("input_layernorm", "post_attention_layernorm"), w.norms[i]):
            tensors[f"model.layers.{i}.{name}.weight"] = norm
        for name, norm in zip(("self_attn.q_norm", "self_attn.k_norm"), w.head_norms[i]):
            tensors[f"model.layers.{i}.{name}.weight"] = norm
    temporary = folder.with_name(f".qwen3-{os.getpid()}-{folder.name}.tmp")
    try:
        temporary.mkdir()
        for name in MODEL_FILES:
            if file := qwen3.model_file(model.path, name):
                (temporary / name).write_bytes(file.read_bytes())
        write_safetensors(temporary / quantized_file(form), tensors, {"format": form, "version": VERSION})
        os.rename(temporary, folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


# ----------------------------------------------------------------------------------------------------------------------
# Decoding: all layers for a few tokens, as one job for the team
# ----------------------------------------------------------------------------------------------------------------------

FEW = 8  # tokens that decode takes at a time


@compiled
def padded_block(n):
    return (n + BLOCK - 1) // BLOCK * BLOCK


@compiled
def decode_layers(rank, n_threads, barrier, layers, norms, head_norms, eps, x, cos, sin, k_cache, v_cache, kv_form, length,
                  q, kv, attended, inner, sums, partials, slots):
    """The decoder layers of n new tokens: x float32 [n, hidden_size] in place. Each thread of the team runs this.

    cos, sin [n, head_dim / 2]; k_cache, v_cache uint16 [n_layers, n_kv_heads, capacity, width]; `length` positions are
    filled. The rest is space to work in: q [n, n_heads, width], kv [2, n, n_kv_heads * head_dim], attended [n, n_heads *
    head_dim], inner [2, n, intermediate_size], sums [n, hidden_size], partials [n, n_heads, chunks, width + 2], slots uint8 [n_threads, n, ...].
    """
    n, hidden = x.shape
    n_heads, width = q.shape[1:]
    n_layers, n_kv_heads, capacity = k_cache.shape[:3]
    head_dim = 2 * cos.shape[1]
    group = n_heads // n_kv_heads
    gate = barrier.ctypes.data
    slot = slots[rank]
    xs = np.empty(n, np.int64)
    scores = np.empty(POSITIONS, np.float32)
    flat_k, flat_v = k_cache.reshape(-1), v_cache.reshape(-1)
    hidden_width, q_width, inner_width = padded_block(hidden), padded_block(n_heads * head_dim), padded_block(inner.shape[2])
    kv_size = n_kv_heads * head_dim
    chunks = (length + n + POSITIONS - 1) // POSITIONS
    root = np.float32(1 / np.sqrt(head_dim))
    for layer in range(n_layers):
        w = layers[layer]
        for t in range(n):  # each thread does the small steps for itself: quicker than to wait for another
            normed = slot[t, :4 * hidden_width].view(np.float32)
            normed[hidden:] = 0
            rms_norm(x[t], norms[layer, 0], eps, normed[:hidden])
            xs[t] = ready(slot[t], hidden_width, w[Q, 2])
        start, end = share(n_heads * head_dim, rank, n_threads)
        linear(w[Q], xs, n, hidden, start, end, attended.ctypes.data, 4 * n_heads * head_dim)
        start, end = share(kv_size, rank, n_threads)
        linear(w[K], xs, n, hidden, start, end, kv[0].ctypes.data, 4 * kv_size)
        linear(w[V], xs, n, hidden, start, end, kv[1].ctypes.data, 4 * kv_size)
        meet(gate, n_threads)

        for item in range(n * (n_heads + n_kv_heads) * rank // n_threads, n * (n_heads + n_kv_heads) * (rank + 1) // n_threads):
            t, h = item // (n_heads + n_kv_heads), item % (n_heads + n_kv_heads)
            if h < n_heads:
                head = q[t, h, :head_dim]
                rms_norm(attended[t, h * head_dim:(h + 1) * head_dim], head_norms[layer, 0], eps, head)
                apply_rope(head, cos[t], sin[t])
                for i in range(head_dim):
                    head[i] *= root
            else:
                h -= n_heads
                key = kv[0, t, h * head_dim:(h + 1) * head_dim]
                rms_norm(key, head_norms[layer, 1], eps, key)
                apply_rope(key, cos[t], sin[t])
                at = ((layer * n_kv_heads + h) * capacity + length + t) * width
                store_kv(flat_k, kv_form, at, key)
                store_kv(flat_v, kv_form, at, kv[1, t, h * head_dim:(h + 1) * head_dim])
        meet(gate, n_threads)

        for item in range(n_kv_heads * chunks * rank // n_threads, n_kv_heads * chunks * (rank + 1) // n_threads):
            g, c = item // chunks, item % chunks
            at = 2 * (((layer * n_kv_heads + g) * capacity) + c * POSITIONS) * width
            for t in range(n):
                seen = min(length + t + 1 - c * POSITIONS, POSITIONS)
                for h in range(g * group, (g + 1) * group):
                    attend(q[t, h], k_cache.ctypes.data + at, v_cache.ctypes.data + at, 2 * width, kv_form, seen, scores,
                           partials[t, h, c])
        meet(gate, n_threads)

        for item in range(n * n_heads * rank // n_threads, n * n_heads * (rank + 1) // n_threads):
            t, h = item // n_heads, item % n_heads
            combine(partials[t, h, :chunks], attended[t, h * head_dim:(h + 1) * head_dim])
        meet(gate, n_threads)

        for t in range(n):
            values = slot[t, :4 * q_width].view(np.float32)
            values[n_heads * head_dim:] = 0
            values[:n_heads * head_dim] = attended[t]
            xs[t] = ready(slot[t], q_width, w[O, 2])
        start, end = share(hidden, rank, n_threads)
        linear(w[O], xs, n, n_heads * head_dim, start, end, sums.ctypes.data, 4 * hidden)
        for t in range(n):
            for r in range(start, end):
                x[t, r] += sums[t, r]
        meet(gate, n_threads)

        for t in range(n):
            normed = slot[t, :4 * hidden_width].view(np.float32)
            normed[hidden:] = 0
            rms_norm(x[t], norms[layer, 1], eps, normed[:hidden])
            xs[t] = ready(slot[t], hidden_width, w[GATE, 2])
        start, end = share(inner.shape[2], rank, n_threads)
        linear(w[GATE], xs, n, hidden, start, end, inner[0].ctypes.data, 4 * inner.shape[2])
        linear(w[UP], xs, n, hidden, start, end, inner[1].ctypes.data, 4 * inner.shape[2])
        for t in range(n):
            for r in range(start, end):
                inner[0, t, r] = silu_times(inner[0, t, r], inner[1, t, r])
        meet(gate, n_threads)

        for t in range(n):
            values = slot[t, :4 * inner_width].view(np.float32)
            values[inner.shape[2]:] = 0
            values[:inner.shape[2]] = inner[0, t]
            xs[t] = ready(slot[t], inner_width, w[DOWN, 2])
        start, end = share(hidden, rank, n_threads)
        linear(w[DOWN], xs, n, inner.shape[2], start, end, sums.ctypes.data, 4 * hidden)
        for t in range(n):
            for r in range(start, end):
                x[t, r] += sums[t, r]
        meet(gate, n_threads)


@compiled
def output_logits(rank, n_threads, barrier, x, norm, eps, head, slots, logits):
    """The logits [n, vocab_size] of x [n, hidden_size]."""
    n, hidden = x.shape
    width = padded_block(hidden)
    xs = np.empty(n, np.int64)
    for t in range(n):
        normed = slots[rank, t, :4 * width].view(np.float32)
        normed[hidden:] = 0
        rms_norm(x[t], norm, eps, normed[:hidden])
        xs[t] = ready(slots[rank, t], width, head[2])
    start, end = share(logits.shape[1], rank, n_threads)
    linear(head, xs, n, hidden, start, end, logits.ctypes.data, 4 * logits.shape[1])
    meet(barrier.ctypes.data, n_threads)


# ----------------------------------------------------------------------------------------------------------------------
# Prefill: many tokens together, so that arithmetic is the limit: blocks of weights are expanded for NumPy's BLAS
# ----------------------------------------------------------------------------------------------------------------------

EXPANDED = 2**20  # weights that are float32 at a time


@compiled
def expand_row(address, form, columns, out):
    """A row of weights as float32 [columns]."""
    if form >= INT8:
        width = (columns + BLOCK - 1) // BLOCK * BLOCK
        scales = numba.carray(to_pointer_u16(address), (width // GROUP,))
        values = numba.carray(to_pointer_u8(address + width // GROUP * 2), (width,))
        for g in range((columns + GROUP - 1) // GROUP):
            scale = float_from_half(scales[g])
            for i in range(g * GROUP, min((g + 1) * GROUP, columns)):
                if form == INT8:
                    out[i] = scale * np.float32(np.int32(values[i]) - 128)
                else:
                    byte = values[g // 2 * GROUP + i - g * GROUP]
                    out[i] = scale * np.float32(np.int32(byte & 15 if g % 2 == 0 else byte >> 4) - 8)
    elif form == FLOAT32:
        row = numba.carray(to_pointer_f32(address), (columns,))
        for i in range(columns):
            out[i] = row[i]
    else:
        half = numba.carray(to_pointer_u16(address), (columns,))
        if form == BF16:
            for i in range(columns):
                out[i] = float_from_bf16(half[i])
        else:
            for i in range(columns):
                out[i] = float_from_half(half[i])


@compiled
def expand(rank, n_threads, barrier, weight, first, out):
    """Rows first, first + 1, ... of a weight into out float32 [rows, columns]."""
    start, end = share(len(out), rank, n_threads)
    for r in range(start, end):
        expand_row(weight[0] + (first + r) * weight[1], weight[2], out.shape[1], out[r])
    meet(barrier.ctypes.data, n_threads)


TOGETHER = 128  # vectors that are worked through together: packed, they fit into a core's cache


@compiled
def pack_vectors(rank, n_threads, barrier, x, packed, zero):
    """pack_vector of the rows of x float32 [n, width]."""
    start, end = share(len(x), rank, n_threads)
    for t in range(start, end):
        pack_vector(x[t], packed[t], zero)
    meet(barrier.ctypes.data, n_threads)


@compiled
def linear_packed(rank, n_threads, barrier, weight, packed, width, out):
    """Packed weights times packed vectors [n, ...] -> out float32 [n, rows], in tiles of ROWS rows and VECTORS vectors."""
    n, n_rows = out.shape
    stride, form = weight[1], weight[2]
    start, end = share(n_rows, rank, n_threads)
    xs = np.empty(1, np.int64)
    for first in range(0, n, TOGETHER):
        last = min(first + TOGETHER, n)
        for r in range(start, end, ROWS):
            w, t = weight[0] + r * stride, first
            while r + ROWS <= end and t + VECTORS <= last:
                x, y = packed[t].ctypes.data, out[t].ctypes.data + 4 * r
                if form == INT8:
                    tile_int8(w, stride, x, packed.strides[0], width, y, out.strides[0])
                else:
                    tile_int4(w, stride, x, packed.strides[0], width, y, out.strides[0])
                t += VECTORS
            while t < last:
                xs[0] = packed[t].ctypes.data
                linear(weight, xs, 1, width, r, min(r + ROWS, end), out[t].ctypes.data, 0)
                t += 1
    meet(barrier.ctypes.data, n_threads)


def linear_many(team: Team, weight: np.ndarray, columns: np.ndarray, n_rows: int) -> np.ndarray:
    """weight times columns [inputs, n] -> [n_rows, n].

    Packed weights are multiplied as they are, others by blocks of rows that are expanded in turn.
    """
    n_inputs = len(columns)
    if weight[2] >= INT8:
        n, width = columns.shape[1], padded(n_inputs)
        x = np.zeros((n, width), np.float32)
        x[:, :n_inputs] = columns.T
        packed, rows_first = np.empty((n, width * 5 // 4), np.uint8), np.empty((n, n_rows), np.float32)
        team.run(pack_vectors, x, packed, ZERO_INT8 if weight[2] == INT8 else ZERO_INT4)
        team.run(linear_packed, weight, packed, width, rows_first)
        return rows_first.T
    out = np.empty((n_rows, columns.shape[1]), np.float32)
    block = np.empty((min(n_rows, max(1, EXPANDED // n_inputs)), n_inputs), np.float32)
    for start in range(0, n_rows, len(block)):
        rows = block[:min(len(block), n_rows - start)]
        team.run(expand, weight, start, rows)
        np.matmul(rows, columns, out=out[start:start + len(rows)])
    return out


def decoder_layer(team: Team, x: np.ndarray, weights: Weights, config: Config, cache: "Cache", layer: int,
                  cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The namesake of qwen3.decoder_layer for many tokens: x [batch, n, hidden_size] -> the same shape."""
    (batch, n), w, eps = x.shape[:2], weights.layers[layer], config.rms_norm_eps
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def columns(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.reshape(batch * n, -1).T)

    def heads(rows: np.ndarray) -> np.ndarray:
        return rows.T.reshape(batch, n, -1, config.head_dim)

    h = columns(qwen3.rms_norm(x, weights.norms[layer, 0], eps))
    q, k, v = (heads(linear_many(team, w[i], h, size)) for i, size in ((Q, q_size), (K, kv_size), (V, kv_size)))
    q = qwen3.rms_norm(q, weights.head_norms[layer, 0], eps).swapaxes(1, 2)
    k = qwen3.rms_norm(k, weights.head_norms[layer, 1], eps).swapaxes(1, 2)
    keys, values = cache.append(layer, qwen3.apply_rope(k, cos, sin), v.swapaxes(1, 2))
    out = qwen3.attention_in_blocks(qwen3.apply_rope(q, cos, sin), keys, values, cache.left_padding)
    out = linear_many(team, w[O], columns(out.swapaxes(1, 2)), config.hidden_size)
    x = x + out.T.reshape(x.shape)
    h = columns(qwen3.rms_norm(x, weights.norms[layer, 1], eps))
    gate = linear_many(team, w[GATE], h, config.intermediate_size)
    up = linear_many(team, w[UP], h, config.intermediate_size)
    team.run(swiglu, gate.reshape(-1, order="A"), up.reshape(-1, order="A"))  # as they lie in memory
    return x + linear_many(team, w[DOWN], gate, config.hidden_size).T.reshape(x.shape)


@compiled
def swiglu(rank, n_threads, barrier, gate, up):
    """silu(gate) * up, in place of gate."""
    start, end = share(len(gate), rank, n_threads)
    for i in range(start, end):
        gate[i] = silu_times(gate[i], up[i])
    meet(barrier.ctypes.data, n_threads)


# ----------------------------------------------------------------------------------------------------------------------
# KV cache and forward
# ----------------------------------------------------------------------------------------------------------------------

class Cache(KVCache):
    """qwen3.KVCache with 16 bits per number, heads filled up with zeros to a multiple of 32 numbers."""
    form = FLOAT16

    def __init__(self, config: Config, max_length: int | None = None, left_padding: Sequence[int] | None = None):
        super().__init__(config, max_length, left_padding)
        shape = (*self.k.shape[:4], padded(config.head_dim, 32))
        self.k, self.v = np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)

    def _resized(self, old: np.ndarray, needed: int) -> np.ndarray:
        capacity = min(max(2 * old.shape[3], needed + 64), self.max_length)
        new = np.zeros((*old.shape[:3], capacity, old.shape[4]), np.uint16)
        new[..., :self.length, :] = old[..., :self.length, :]
        return new

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stores float32 k, v [batch, n_kv_heads, n, head_dim] -> all keys, all values of the layer as float32."""
        d, end = self.config.head_dim, self.length + k.shape[2]
        for store, new in ((self.k, k), (self.v, v)):
            store[layer, :, :, self.length:end, :d] = self.stored(new)
        return self.expanded(self.k[layer, :, :, :end, :d]), self.expanded(self.v[layer, :, :, :end, :d])

    def stored(self, values: np.ndarray) -> np.ndarray:
        """The bits of float32 values in 16 bits."""
        return values.astype(np.float16).view(np.uint16)

    def expanded(self, bits: np.ndarray) -> np.ndarray:
        """The float32 values of 16 bits each."""
        return bits.view(np.float16).astype(np.float32)


class Bf16Cache(Cache):
    """The same in bfloat16: fewer digits, but no value is too large for it."""
    form = BF16

    def stored(self, values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def expanded(self, bits: np.ndarray) -> np.ndarray:
        return (bits.astype(np.uint32) << 16).view(np.float32)


CACHES = {"f16": Cache, "bf16": Bf16Cache}


def embed(weights: Weights, ids: np.ndarray, hidden_size: int) -> np.ndarray:
    """Rows of the embedding as float32: ids [...] -> [..., hidden_size]."""
    x = np.empty((*ids.shape, hidden_size), np.float32)
    address, stride, form = weights.embedding
    for place in np.ndindex(ids.shape):
        expand_row(address + ids[place] * stride, form, hidden_size, x[place])
    return x


def decode(team: Team, model: Model, ids: np.ndarray, cache: Cache) -> np.ndarray:
    """Runs a few tokens [n] of one sequence through all layers -> the residual stream [n, hidden_size]."""
    config, w = model.config, model.weights
    n, n_heads, n_kv_heads, d = len(ids), config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cos, sin = (table[0, 0] for table in rope_tables(config, cache.positions(n)))
    x = embed(w, ids, config.hidden_size)
    width, chunks = cache.k.shape[4], -(-(cache.length + n) // POSITIONS)
    largest = padded(max(config.hidden_size, n_heads * d, config.intermediate_size))
    f32 = np.float32
    team.run(decode_layers, w.layers, w.norms, w.head_norms, config.rms_norm_eps, x, cos, sin, cache.k[:, 0], cache.v[:, 0],
             cache.form, cache.length, np.zeros((n, n_heads, width), f32), np.empty((2, n, n_kv_heads * d), f32),
             np.empty((n, n_heads * d), f32), np.empty((2, n, config.intermediate_size), f32),
             np.empty((n, config.hidden_size), f32), np.empty((n, n_heads, chunks, width + 2), f32),
             np.empty((team.n_threads, n, largest * 21 // 4), np.uint8))
    return x


def forward(model: Model, token_ids: Sequence[int] | np.ndarray, cache: Cache, all_logits: bool = False) -> np.ndarray:
    """The namesake of qwen3.forward."""
    config, w, team = model.config, model.weights, model.weights.team
    ids = checked_ids(token_ids, config)
    batch, n = ids.shape
    if batch != cache.k.shape[1]:
        raise InputError(f"the cache holds {cache.k.shape[1]} sequences, but there are tokens for {batch}")
    cache.reserve(n)
    logits = np.empty((batch, n if all_logits else 1, config.vocab_size), np.float32)
    chunk = max(1, qwen3.CHUNK // batch)
    few = batch == 1 and cache.left_padding is None and n <= FEW
    for start in range(0, n, chunk):
        now = ids[:, start:start + chunk]
        if few:
            x = decode(team, model, now[0], cache)[None]
        else:
            x = embed(w, now, config.hidden_size)
            cos, sin = rope_tables(config, cache.positions(now.shape[1]))
            for layer in range(config.num_hidden_layers):
                x = decoder_layer(team, x, w, config, cache, layer, cos, sin)
        cache.advance(now)
        if all_logits:
            logits[:, start:start + chunk] = output(team, model, x)
    if not all_logits:
        logits[:] = output(team, model, x[:, -1:])
    result = logits if all_logits else logits[:, 0]
    return result if np.ndim(token_ids) == 2 else result[0]


def output(team: Team, model: Model, x: np.ndarray) -> np.ndarray:
    """The logits [batch, n, vocab_size] of x [batch, n, hidden_size]."""
    config, w = model.config, model.weights
    rows = np.ascontiguousarray(x.reshape(-1, config.hidden_size))
    logits = np.empty((len(rows), config.vocab_size), np.float32)
    slots = np.empty((team.n_threads, FEW, padded(config.hidden_size) * 21 // 4), np.uint8)
    for start in range(0, len(rows), FEW):
        part = slice(start, start + FEW)
        team.run(output_logits, rows[part], w.norm, config.rms_norm_eps, w.head, slots, logits[part])
    return logits.reshape(*x.shape[:2], -1)


# The types with which the kernels are called, so that they can be compiled before anything waits for them.
INT, ROW3 = types.int64, types.int64[::1]
F1, F2, F3, F4, U1, U3, U4 = (*(types.Array(types.float32, d, "C") for d in (1, 2, 3, 4)),
                              *(types.Array(types.uint8, d, "C") for d in (1, 3)), types.Array(types.uint16, 4, "C"))
RANK = (INT, INT, ROW3)
KERNELS = {
    decode_layers: (*RANK, types.int64[:, :, ::1], F3, F3, types.float64, F2, F2, F2, U4, U4, INT, INT, F3, F3, F2, F3, F2,
                    F4, U3),
    output_logits: (*RANK, F2, F1, types.float64, ROW3, U3, F2),
    expand_row: (INT, INT, INT, F1),
    expand: (*RANK, ROW3, INT, F2),
    pack_vectors: (*RANK, F2, types.uint8[:, ::1], types.float32),
    linear_packed: (*RANK, ROW3, types.uint8[:, ::1], INT, F2),
    swiglu: (*RANK, F1, F1),
    quantize_rows: (F2, INT, types.uint8[:, ::1]),
}


def compile_kernels() -> None:
    """Compiles the kernels, or takes them from numba's cache. With a progress bar if it takes more than a moment."""
    for kernel, signature in tqdm(KERNELS.items(), "compiling, only this once", delay=1, leave=False, disable=None):
        with contextlib.suppress(OSError):  # the disk is full: then it is compiled, only not kept
            kernel.compile(signature)


def engine(quantize: str | None = None, threads: int | None = None, kv_dtype: str = "f16") -> Engine:
    """The Engine for qwen3.load_model. Raises InputError for values that there aren't."""
    if quantize not in (None, *PACKED):
        raise InputError(f"quantize must be int8 or int4, not {quantize!r}")
    if kv_dtype not in CACHES:
        raise InputError(f"kv_dtype must be f16 or bf16, not {kv_dtype!r}")
    qwen3.checked_whole("threads", threads, 1)
    return Engine(lambda path, config: load_weights(path, config, quantize, threads), CACHES[kv_dtype], forward)


def load_model(name: str | Path, quantize: str | None = None, threads: int | None = None, kv_dtype: str = "f16",
               offline: bool = False) -> Model:
    """The namesake of qwen3.load_model.

    quantize: None (weights stay as they are in the file), "int8" or "int4"; threads: None takes all available CPUs;
    kv_dtype: "f16" or "bf16", how keys and values are kept.
    """
    return qwen3.load_model(name, engine(quantize, threads, kv_dtype), offline)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of qwen3.py with this engine, and with options of its own."""
    import qwen3_cli
    parser = qwen3_cli.make_parser()
    add = parser.add_argument_group("the fast engine").add_argument
    add("--quantize", choices=["int8", "int4"], help="8 or 4 bits for each weight: 2 or 3.5 times as fast as bfloat16")
    add("--save-quantized", metavar="DIR", help="write the quantized model into a new folder, which loads at once, and end")
    add("--threads", type=int, metavar="N", help="how many threads compute (default: the CPUs that may be used)")
    add("--kv-dtype", choices=list(CACHES), default="f16", help="how keys and values are kept (default: %(default)s)")

    def save(args: argparse.Namespace, engine: Engine) -> None:
        if args.quantize is None:
            raise InputError("--save-quantized needs --quantize int8 or --quantize int4")
        save_quantized(qwen3_cli.load(args, engine), args.save_quantized, args.quantize)

    return qwen3_cli.main(argv, parser, lambda args: engine(args.quantize, args.threads, args.kv_dtype),
                          {"save_quantized": save})


if __name__ == "__main__":
    sys.exit(main())
