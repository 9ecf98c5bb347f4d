"""How a kernel finds its arrays in the job's table: a function for each field of Layers, NewTokens and Space."""
from functools import partial

import numba

from qwen3_lib.kernels.intrinsics import entry, int64_at
from qwen3_lib.kernels.layout import FUNCTIONS, JOB, NewTokens, Layers, Space, of
from qwen3_lib.kernels.translate import Translator

# A function is compiled once for each combination of its arguments' types. To numba a constant like 0 or True has a
# type of its own, np.int64(0) has not: that is why kernels write it.
# Without numba's wrappers, compiling takes two thirds of the time. Python calls kernels by their addresses: build.py.
compiled = partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
                   pipeline_class=Translator)
TABLE = Layers.__annotations__ | NewTokens.__annotations__ | {"products": of(FUNCTIONS, 3)} | Space.__annotations__
FIELD_NAMES = (*TABLE,)

for number, (name, annotation) in enumerate(TABLE.items()):  # fields.h(job) is the array `h`
    dtype, n_dimensions = annotation.__metadata__
    globals()[name] = entry(number, numba.from_dtype(dtype), n_dimensions)

# Of a JOB.
n_threads, shared, last, table = (int64_at(JOB.fields[name][1]) for name in ("n_threads", "shared", "last", "table"))
