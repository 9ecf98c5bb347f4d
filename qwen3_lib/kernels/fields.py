"""How a kernel finds its arrays in the job's table: a function for each field of Layers, Batch and Space."""
from functools import partial

import numba
import numpy as np

from qwen3_lib.kernels.intrinsics import pointer, to_pointer_f32, to_pointer_f64, to_pointer_i64, to_pointer_u8
from qwen3_lib.kernels.layout import JOB, TASK, WEIGHT, Batch, Layers, Space

# A function is compiled once for each combination of its arguments' types. To numba a constant like 0 or True has a
# type of its own, np.int64(0) has not: that is why kernels write it.
# Without numba's wrappers, compiling takes two thirds of the time. Python calls kernels by their addresses: build.py.
compiled = partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
NAMES = (*Layers._fields, *Batch._fields, *Space._fields, "products")


def array_of(pointer, n_dimensions):
    """A function that makes a row of a table, see layout.table, an array."""
    @compiled
    def read(row):
        return numba.carray(pointer(row[0]), (row[1], row[2], row[3], row[4])[:n_dimensions])
    return read


floats1, floats2, floats3, floats4 = (array_of(to_pointer_f32, n) for n in (1, 2, 3, 4))
ints1, ints2, ints3, ints4 = (array_of(to_pointer_i64, n) for n in (1, 2, 3, 4))
to_weight, to_task, to_job = (pointer(numba.from_dtype(dtype)) for dtype in (WEIGHT, TASK, JOB))
weights1, weights2, weights3 = (array_of(to_weight, n) for n in (1, 2, 3))
tasks1 = array_of(to_task, 1)
bytes1, bytes2, doubles1 = array_of(to_pointer_u8, 1), array_of(to_pointer_u8, 2), array_of(to_pointer_f64, 1)


def field(name, read):
    index = NAMES.index(name)

    @compiled
    def find(job):
        return read(job[index])
    return find


matrices, forms, routers = field("matrices", weights2), field("forms", ints3), field("routers", weights1)
norms, head_norms, norm = field("norms", floats3), field("head_norms", floats3), field("norm", floats1)
head, eps, experts = field("head", weights1), field("eps", doubles1), field("experts", weights3)
routing, products = field("routing", ints1), field("products", ints4)
biases, windows, causal = field("biases", floats2), field("windows", ints1), field("causal", ints1)
places, delta_sizes, conv = field("places", ints2), field("delta_sizes", ints1), field("conv", floats3)
rates, delta_norms = field("rates", floats3), field("delta_norms", floats2)

x, cos, sin = field("x", floats2), field("cos", floats2), field("sin", floats2)
rows, tasks, tiles = field("rows", ints2), field("tasks", tasks1), field("tiles", ints2)
wanted, logits = field("wanted", ints1), field("logits", floats2)
caches, cache_rows = field("caches", ints2), field("cache_rows", ints1)
runs, states = field("runs", ints2), field("states", ints3)

h, packed, qkv = field("h", floats2), field("packed", bytes2), field("qkv", floats2)
queries, partials, own = field("queries", floats3), field("partials", floats4), field("own", floats2)
gate, up, gate_packed = field("gate", floats2), field("up", floats2), field("gate_packed", bytes2)
gathered, gathered_packed = field("gathered", floats2), field("gathered_packed", bytes2)
chosen, shares, starts = field("chosen", ints2), field("shares", floats2), field("starts", ints1)


@compiled
def rows_at(address, n):
    """A table of n arrays."""
    return numba.carray(to_pointer_i64(address), (n, 5))


@compiled
def job_at(address):
    """A JOB."""
    return numba.carray(to_job(address), (1,))[0]


@compiled
def table_at(address):
    """The table of a JOB."""
    return rows_at(job_at(address).table, np.int64(len(NAMES)))
