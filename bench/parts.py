"""The work `parts` of run.py: where a prompt and a token spend their time, by part, beside what this CPU could do.

Random weights in the shape of a few layers of Qwen3-0.6B; one thread, and its CPU time, so that other programs count
little. Hidden states are asked for, so the last layer computes all tokens. No clock runs inside the kernels: a part's
time is how much less a pass takes without the part, whose function is replaced by one that does nothing. All passes of
a round take turns; the fastest of the rounds counts. The limits: products of bf16 weights beside NumPy's sgemm, with
activations of bf16 beside a loop of the CPU's instruction for bf16 and nothing else; those of packed weights beside
such a loop for bytes; the memory's bandwidth. Of a token, the barriers are shown, too: how much longer it takes on all
threads than on one, by the clock, if nothing is multiplied; that needs a quiet machine.
Last come the instructions and cycles of 32 weights in loops of one vector on other CPUs, and in peers': see loops.py.
"""
import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from threadpoolctl import threadpool_limits

import harness
import loops
import qwen3
import qwen3_numba
from qwen3_lib.kernels import objects, passes, vectors
from qwen3_lib.kernels.build import kernel_at, linker, make_kernels, symbol
from qwen3_lib.kernels.dense import DENSE_STEPS
from qwen3_lib.kernels.cpu import INT8_SHAPES, ON_ARM, PAIRS, PATH
from qwen3_lib.kernels.layout import (FORMATS, INT8, KEYS, PRODUCT, REARRANGED, ROUNDED, TOGETHER, VALUES, is_packed)
from qwen3_lib.kernels.objects import compile_layers, compile_product
from qwen3_lib.kernels.vectors import FLOAT, I8, I32, I64, LANES, loop, splat, vector, widened_form

STEPS = tuple(map(symbol, DENSE_STEPS[:-1]))  # project_heads, attend_heads, finish_dense
SETTINGS = {"bf16": (None, "f32"), "bf16-rounded": (None, "bf16")}  # quantize and activations
PARTS = "products", "scaling", "keys", "values", "softmax, RoPE", "norms, packing", "silu, packing", "Python"
TILES = 12  # sums of the loop of nothing but instructions for bytes, or for bf16
LOOPS = 10**5
TOKENS = 4  # at a time
ANY_WAY = vectors.way_of(INT8, vectors.ONE)  # of functions that multiply no vectors


def linked(name: str, code: bytes) -> int:
    """The address of a function in an object file, which isn't kept."""
    linker().add_object_file(llvm.ObjectFileRef.from_data(code))
    linker().finalize_object()
    return linker().get_function_address(name)


def write_nothing(*_: Any) -> None:
    """A product that leaves its results as they are."""


def write_dots(form: int, n: int, way: Any, b: Any, out: Any) -> None:
    """LOOPS times TILES instructions for bytes, or for bf16."""
    lanes, kind = (LANES, FLOAT) if form == ROUNDED else (INT8_SHAPES[PATH].lanes, I32)
    sums = [vectors.variable(b, vector(kind, lanes)) for _ in range(TILES)]
    for sum_ in sums:
        b.store(splat(kind, lanes, 0), sum_)
    w, x = (vectors.load(b, vectors.at(b, out, 256 * i), *((I32, lanes) if form == ROUNDED else (I8, 4 * lanes)))
            for i in range(2))

    def step(_: Any) -> None:
        for sum_ in sums:  # if LLVM knew that all factors are the same, it would multiply once
            now, kind = b.load(sum_), ir.FunctionType(w.type, [w.type])
            w_ = b.asm(kind, "", "=w,0" if PATH in ON_ARM else "=x,0", [w], False)
            b.store(vectors.add_pairs(b, w_, x, now) if form == ROUNDED else
                    vectors.dot_bytes(b, PATH, now, w_, x, False), sum_)

    loop(b, I64(LOOPS), step)
    for i, sum_ in enumerate(sums):
        vectors.store(b, b.load(sum_), vectors.at(b, out, 256 * i))


def add_unscaled(b: Any, sums: Any, wholes: Any, form: int, *_: Any) -> None:
    """In place of add_scaled: the bits of the whole numbers, so that they aren't for nothing."""
    for half in range(FORMATS[form].halves):
        for p, t in sums:
            whole, sum_ = b.load(wholes[p, t, half]), b.load(sums[p, t])
            b.store(b.bitcast(b.add(b.bitcast(sum_, whole.type), whole), sum_.type), sums[p, t])


def replaced(functions: np.ndarray, kinds: tuple[int, ...], nothing: int) -> np.ndarray:
    """A table of products, see products.py, where those of some kinds do nothing."""
    functions = functions.copy()
    for kind in kinds:
        functions[kind]["address"] = functions[kind]["rearrange"] = nothing
    return functions


def unscaled(functions: np.ndarray, known: dict[tuple[int, int], int]) -> np.ndarray:
    """A table of products whose packed ones add whole numbers without their scales."""
    functions, before = functions.copy(), vectors.add_scaled
    vectors.add_scaled = add_unscaled
    for form in filter(is_packed, range(len(FORMATS))):
        for how, size in np.argwhere(functions["address"][PRODUCT, form]):
            if (form, size) not in known:
                name, wide = f"unscaled_{form}_{size}", widened_form(form) if how == REARRANGED else form
                way = vectors.way_of(wide, vectors.ONE if size == 1 else vectors.AT_ONCE if how == TOGETHER else
                                     vectors.MANY)
                known[form, size] = linked(name, compile_product(name, "packed_product", wide, int(size), way))
            functions[PRODUCT, form, how].address[size] = known[form, size]
    vectors.add_scaled = before
    return functions


def passed(work: Callable[[], Any], kernel: Any, table: Callable[[np.ndarray], np.ndarray],
           clock: Callable[[], float] = time.process_time) -> float:
    """The time of passes, CPU time by default, by this kernel with what `table` makes of the tables of products."""
    before = passes.kernel, passes.functions_for
    passes.kernel = lambda *steps: kernel or before[0](*steps)
    passes.functions_for = lambda *needs: table(before[1](*needs))
    start = clock()
    try:
        work()
        return clock() - start
    finally:
        passes.kernel, passes.functions_for = before


def fastest(work: Callable[[], Any]) -> float:
    """The least CPU time in seconds."""
    seconds = []
    for _ in range(15):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def limits() -> dict[str, float]:
    """What one core reaches, in 1e9 a second: operations of sgemm, of the instructions for bytes and, if the CPU has
    them, for bf16; bytes read from memory."""
    x, place = np.random.default_rng(0).standard_normal((1024, 1024), np.float32), np.zeros(4096, np.uint8)
    big = np.ones(2**26, np.int64)

    def dots(form: int, operations: int) -> float:
        name = f"dots_{form}"
        run = ctypes.CFUNCTYPE(None, ctypes.c_int64)(linked(name, compile_product(name, "dots", form, 0, ANY_WAY)))
        return operations * TILES * LOOPS / fastest(lambda: run(place.ctypes.data)) / 1e9

    with threadpool_limits(1):
        return {"sgemm": 2 * len(x)**3 / fastest(lambda: x @ x) / 1e9, "bytes": dots(INT8, 8 * INT8_SHAPES[PATH].lanes),
                **({"bf16": dots(ROUNDED, 4 * LANES)} if PAIRS else {}), "memory": big.nbytes / fastest(big.max) / 1e9}


def parts(bench: harness.Bench, formats: Sequence[str] = ("bf16", "bf16-rounded", "int8", "int4"),
          lengths: Sequence[int] = (512, 4096), contexts: Sequence[int] = (16, 4096), layers: int = 4,
          llama: str = "") -> list[str]:
    """Prompts of these lengths and tokens after these contexts in these formats, through a few layers of Qwen3-0.6B.

    llama: a folder with llama.cpp's sources, for its loops; --ik: one with those of ik_llama.cpp.
    """
    objects.WRITERS |= {"nothing": (write_nothing, 10), "dots": (write_dots, 1)}
    make_kernels(DENSE_STEPS)
    most, nothing = limits(), linked("nothing", compile_product("nothing", "nothing", 0, 0, ANY_WAY))
    steps = {step: kernel_at(linked(f"only_{step}",
                                    compile_layers(f"only_{step}", [step] * bool(step), "output_logits")))
             for step in (*STEPS, "")}
    rows = [["ms a layer, share", *PARTS, "all", "products: 1e9 operations/s", "of the limit"]]
    tokens = [[f"µs a token of {layers} layers, share", *PARTS, "all", "barriers"]]
    bench.model(num_hidden_layers=layers, vocab_size=4096)
    for form, (n, context) in itertools.product(formats, [*((n, 0) for n in lengths), *((1, n) for n in contexts)]):
        quantize, activations = SETTINGS.get(form, (form, None))
        model, team = (qwen3_numba.load_model(bench.path, quantize, threads, tokenizer=False, activations=activations)
                       for threads in (1, bench.args.threads))
        if context:
            work = passes_of(model, context)
            found = {name: seconds / TOKENS for name, seconds in measured(work, 5 * bench.args.rounds, steps,
                                                                          nothing).items()}
            cells = [f"{1e6 * found[name]:.0f}, {found[name] / found['all']:.0%}" for name in PARTS]
            tokens.append([f"{form}, after {context}", *cells, f"{1e6 * found['all']:.0f}",
                           f"{1e6 * barriers(work, passes_of(team, context), nothing):.0f}"])
            continue
        found = measured(lambda: qwen3.compute(model, [qwen3.NextTokens(
            model.engine.new_cache(model.config), np.arange(n))], states=True), bench.args.rounds, steps, nothing)
        ms = {name: 1e3 * seconds / model.config.num_hidden_layers for name, seconds in found.items()}
        weights = sum(a * b for a, b in model.weights.layers.matrices[0][["rows", "columns"]].tolist())
        speed = 2 * weights * n / (ms["products"] + ms["scaling"]) / 1e6
        cells = [f"{ms[name]:.2f}, {ms[name] / ms['all']:.0%}" for name in PARTS]
        limit = most["bytes" if quantize else "bf16" if activations == "bf16" and PAIRS else "sgemm"]
        rows.append([f"{form}, {n}", *cells, f"{ms['all']:.2f}", f"{speed:.0f}", f"{speed / limit:.2f}"])
    return [", ".join(f"{name} {value:.0f}" for name, value in most.items()) + " (1e9 a second)", "",
            *harness.table(*rows), "", *harness.table(*tokens), "", *loops.loops(llama, bench.args.ik)]


def passes_of(model: Any, context: int) -> Callable[[], Any]:
    """What computes TOKENS tokens, one after the other, after so many before them."""
    cache = model.engine.new_cache(model.config)
    qwen3_numba.forward(model, np.arange(context), cache)
    return lambda: [qwen3_numba.forward(model, [5], cache) for _ in range(TOKENS)]


def barriers(one: Callable[[], Any], team: Callable[[], Any], nothing: int) -> float:
    """How many seconds a token takes longer on a team than on one thread, if nothing is multiplied."""
    def seconds(work: Callable[[], Any]) -> float:
        return min(passed(work, None, lambda functions: replaced(functions, (PRODUCT, KEYS, VALUES), nothing),
                          time.perf_counter) for _ in range(30)) / TOKENS

    return seconds(team) - seconds(one)


def measured(work: Callable[[], Any], rounds: int, steps: dict[str, Any], nothing: int) -> dict[str, float]:
    """Part -> its CPU time in passes."""
    project, attend, finish = (steps[step] for step in STEPS)
    known: dict[tuple[int, int], int] = {}

    def without(*kinds: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda functions: replaced(functions, kinds, nothing)

    runs = {"all": (None, without()), "unmultiplied": (None, without(PRODUCT)),
            "unscaled": (None, lambda functions: unscaled(functions, known)),
            "attention": (attend, without()), "no keys": (attend, without(KEYS)),
            "no values": (attend, without(VALUES)), "softmax": (attend, without(KEYS, VALUES)),
            "norms": (project, without(PRODUCT)), "swiglu": (finish, without(PRODUCT)),
            "rest": (steps[""], without(PRODUCT))}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):  # the first one compiles
        for name, (kernel, table) in runs.items():
            seconds[name].append(passed(work, kernel, table))
    s = {name: min(some[1:]) for name, some in seconds.items()}
    return {"all": s["all"], "products": s["unscaled"] - s["unmultiplied"], "scaling": s["all"] - s["unscaled"],
            "keys": s["attention"] - s["no keys"], "values": s["attention"] - s["no values"],
            "softmax, RoPE": s["softmax"] - s["rest"], "norms, packing": s["norms"] - s["rest"],
            "silu, packing": s["swiglu"] - s["rest"], "Python": s["rest"]}

