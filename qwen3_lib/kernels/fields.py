"""How a kernel finds its arrays in the job's table: a function for each field of Layers, Batch and Space."""
from functools import partial

import numba
from numba.types import float32, float64, int64, uint8

from qwen3_lib.kernels.intrinsics import entry, number
from qwen3_lib.kernels.layout import JOB, TASK, WEIGHT, Batch, Layers, Space

# A function is compiled once for each combination of its arguments' types. To numba a constant like 0 or True has a
# type of its own, np.int64(0) has not: that is why kernels write it.
# Without numba's wrappers, compiling takes two thirds of the time. Python calls kernels by their addresses: build.py.
compiled = partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
NAMES = (*Layers._fields, *Batch._fields, *Space._fields, "products")
weight, task = map(numba.from_dtype, (WEIGHT, TASK))


def field(name, kind, n_dimensions):
    return entry(NAMES.index(name), kind, n_dimensions)


matrices, forms, routers = field("matrices", weight, 2), field("forms", int64, 3), field("routers", weight, 1)
norms, head_norms, norm = field("norms", float32, 3), field("head_norms", float32, 3), field("norm", float32, 1)
head, eps, experts = field("head", weight, 1), field("eps", float64, 1), field("experts", weight, 3)
routing, products = field("routing", int64, 1), field("products", int64, 4)
places, delta_sizes, conv = field("places", int64, 2), field("delta_sizes", int64, 1), field("conv", float32, 3)
rates, delta_norms = field("rates", float32, 3), field("delta_norms", float32, 2)

x, cos, sin = field("x", float32, 2), field("cos", float32, 2), field("sin", float32, 2)
rows, tasks, tiles = field("rows", int64, 2), field("tasks", task, 1), field("tiles", int64, 2)
wanted, logits = field("wanted", int64, 1), field("logits", float32, 2)
caches, cache_rows = field("caches", int64, 2), field("cache_rows", int64, 1)
runs, states = field("runs", int64, 2), field("states", int64, 3)

h, packed, qkv = field("h", float32, 2), field("packed", uint8, 2), field("qkv", float32, 2)
queries, partials, own = field("queries", float32, 3), field("partials", float32, 4), field("own", float32, 2)
gate, up, gate_packed = field("gate", float32, 2), field("up", float32, 2), field("gate_packed", uint8, 2)
gathered, gathered_packed = field("gathered", float32, 2), field("gathered_packed", uint8, 2)
chosen, shares, starts = field("chosen", int64, 2), field("shares", float32, 2), field("starts", int64, 1)

n_threads, barrier, table = (number(JOB.fields[name][1]) for name in ("n_threads", "barrier", "table"))  # of a JOB
