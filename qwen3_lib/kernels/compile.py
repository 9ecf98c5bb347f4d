"""numba compiles kernels: a program of its own that build.py runs, for numba takes long to import and to compile.

    main([KERNEL, ...])    writes an object file to stdout, or ends with one line on stderr

numba only translates: see translate.py. LLVM optimizes all functions once, as a whole.
"""
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types

from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.kernels.cpu import FEATURES
from qwen3_lib.kernels.layout import WAITING
from qwen3_lib.kernels.objects import machine, object_code

SIGNATURE = (types.int64,) * 3
C_LIBRARY = {"sqrt", "sqrtf", *WAITING}  # called by kernels; without numba there is no more


def machine_code(names: Sequence[str]) -> bytes:
    """Compiles kernels, file.function, for this CPU -> an object file that has functions of these names.

    They are numba's own functions, not those that @cfunc makes: these report errors through Python, which would tie the
    object file to numba. Raises InputError if this CPU or numba's settings don't allow it.
    """
    if numba.config.DISABLE_JIT:
        raise InputError("the fast engine can't be compiled while NUMBA_DISABLE_JIT is set")
    cpu = machine()
    if cpu.triple.startswith("x86") and not (FEATURES.get("f16c") and FEATURES.get("fma")):
        raise InputError("the fast engine needs a CPU with FMA and F16C (since 2013); --no-fast takes NumPy")
    module, known, functions = llvm.parse_assembly(""), set[Any](), {name.partition(".")[2] for name in names}
    for name in names:
        file, _, name = name.partition(".")
        kernel = getattr(import_module(f"qwen3_lib.kernels.{file}"), name)
        kernel.compile(SIGNATURE)
        found = kernel.overloads[SIGNATURE]
        for text in found.library.texts(known):
            part = llvm.parse_assembly(text)
            for function in part.functions:
                if function.name == found.fndesc.llvm_func_name:
                    function.name = name
                elif not function.is_declaration:
                    function.linkage = "linkonce_odr"  # several functions of numba's bring some function with them
            module.link_in(part)
    for function in module.functions:  # kernels are linked together: only their names may meet
        if function.name not in functions and not function.is_declaration:
            function.linkage = "internal"
    absent = {function.name for function in module.functions if function.is_declaration
              and not function.name.startswith("llvm.")} - C_LIBRARY
    if absent:
        raise InputError(f"numba {numba.__version__} compiles kernels that need {', '.join(sorted(absent))} to run, so "
                         "they can't be kept; install another version of numba, or take NumPy: --no-fast")
    return object_code(module, cpu, 2)


def main(names: list[str]) -> None:
    try:
        sys.stdout.buffer.write(machine_code(names))
        sys.stdout.flush()
    except InputError as error:
        sys.exit(str(error))
    except Exception as error:  # numba and LLVM raise many types when their versions don't fit the kernels
        version = ".".join(map(str, llvm.llvm_version_info))
        sys.exit(f"by numba {numba.__version__} with llvmlite {llvmlite.__version__} (LLVM {version}) and NumPy "
                 f"{np.__version__}: {brief(f'{type(error).__name__}: {error}', 300)}; install the newest numba, or "
                 "take NumPy: --no-fast")
