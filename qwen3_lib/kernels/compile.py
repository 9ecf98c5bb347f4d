"""numba compiles kernels: a program of its own that build.py runs, for numba takes long to import and to compile.

    main([KERNEL, ...])    writes each kernel's size and object file to stdout, or ends with one line on stderr

build.py runs it with NUMBA_OPT=0: else numba would optimize each function, and those that call it with it inside them.
Here LLVM optimizes a kernel once, as a whole, which takes half the time.
"""
import re
import sys

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types

from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.kernels import delta, experts, layers, quantize
from qwen3_lib.kernels.cpu import FEATURES
from qwen3_lib.kernels.objects import machine, object_code

SIGNATURE = (types.int64,) * 3
# numba counts who uses an array of its own, and frees it; those of kernels aren't numba's, so there is nothing to do.
COUNTING = re.compile(r"^define [^\n]*@(NRT_incref|NRT_decref)\(.*?^}\n", re.MULTILINE | re.DOTALL)
NOTHING = "".join(f"define void @NRT_{name}(ptr %memory) {{ ret void }}\n"
                  for name in ("incref", "decref", "MemInfo_call_dtor"))
C_LIBRARY = {"sqrt", "sqrtf", "sched_yield"}  # called by kernels; without numba there is no more


def machine_code(name: str) -> bytes:
    """Compiles a kernel for this CPU -> an object file that has a function of this name.

    It is numba's own function, not the one that @cfunc makes: that reports errors through Python, which would tie the
    object file to numba. Raises InputError if this CPU or numba's settings don't allow it.
    """
    if numba.config.DISABLE_JIT:
        raise InputError("the fast engine can't be compiled while NUMBA_DISABLE_JIT is set")
    cpu = machine()
    if cpu.triple.startswith("x86") and not (FEATURES.get("f16c") and FEATURES.get("fma")):
        raise InputError("the fast engine needs a CPU with FMA and F16C (since 2013); --no-fast takes NumPy")
    kernel = next(vars(room)[name] for room in (layers, delta, experts, quantize) if name in vars(room))
    kernel.compile(SIGNATURE)
    module = llvm.parse_assembly(COUNTING.sub(r"declare void @\1(ptr)\n", kernel.inspect_llvm(SIGNATURE)))
    module.link_in(llvm.parse_assembly(NOTHING))
    module.get_function(kernel.overloads[SIGNATURE].fndesc.llvm_func_name).name = name
    for function in module.functions:  # kernels are linked together: only their names may meet
        if function.name != name and not function.is_declaration:
            function.linkage = "internal"
    absent = {function.name for function in module.functions if function.is_declaration
              and not function.name.startswith("llvm.")} - C_LIBRARY
    if absent:
        raise InputError(f"numba {numba.__version__} compiles kernels that need {', '.join(sorted(absent))} to run, so "
                         "they can't be kept; install another version of numba, or take NumPy: --no-fast")
    return object_code(module, cpu, 2)


def main(names: list[str]) -> None:
    try:
        for name in names:
            code = machine_code(name)
            sys.stdout.buffer.write(b"%016x%s" % (len(code), code))
        sys.stdout.flush()
    except InputError as error:
        sys.exit(str(error))
    except Exception as error:  # numba and LLVM raise many types when their versions don't fit the kernels
        version = ".".join(map(str, llvm.llvm_version_info))
        sys.exit(f"by numba {numba.__version__} with llvmlite {llvmlite.__version__} (LLVM {version}) and NumPy "
                 f"{np.__version__}: {brief(f'{type(error).__name__}: {error}', 300)}; install the newest numba, or "
                 "take NumPy: --no-fast")
