"""numba compiles the kernels: imported only at the first run, see build.py."""
import sys
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core import event
from numba.core.dispatcher import Dispatcher

from qwen3_lib.io.progress import progress
from qwen3_lib.kernels import layers, quantize
from qwen3_lib.kernels.vectors import FEATURES
from qwen3_lib.io.errors import InputError

KERNELS = (quantize.weight_row, quantize.quantize_block, quantize.pack_block, layers.decoder_layers)  # called from Python
# numba's code frees numba's own arrays with this function; arrays passed from Python aren't numba's, so no call occurs.
NEVER_CALLED = "define void @NRT_MemInfo_call_dtor(ptr %memory) { ret void }"
C_LIBRARY = {"sqrt", "sqrtf", "sched_yield"}  # called by kernels; without numba there is no more


class Progress(event.Listener):
    """Moves a bar on when one of these functions has been compiled."""

    def __init__(self, functions: set[Dispatcher], bar: Any):
        self.left, self.bar = functions, bar

    def on_start(self, started: event.Event) -> None:
        pass

    def on_end(self, ended: event.Event) -> None:
        if ended.data["dispatcher"] in self.left:
            self.left.remove(ended.data["dispatcher"])
            self.bar.update()


def machine_code() -> bytes:
    """Compiles the kernels for this CPU -> an object file that has functions of their names.

    They are numba's own functions, not those that @cfunc makes: these report errors through Python, which would tie the
    object file to numba. Raises InputError if this CPU or numba's settings don't allow it.
    """
    if numba.config.DISABLE_JIT:
        raise InputError("the fast engine can't be compiled while NUMBA_DISABLE_JIT is set")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target, module, signature = llvm.Target.from_default_triple(), llvm.parse_assembly(NEVER_CALLED), (types.int64,) * 2
    if target.name.startswith("x86") and not (FEATURES.get("f16c") and FEATURES.get("fma")):
        raise InputError("the fast engine needs a CPU with FMA and F16C (since 2013); use qwen3.py")
    if not sys.stderr.isatty():
        print("compiling the kernels for this CPU, once; about a minute", file=sys.stderr)
    functions = {function for room in (layers, quantize) for function in vars(room).values()
                 if isinstance(function, Dispatcher)}
    with (progress(description="compiling, only this once", total=len(functions)) as bar,
          event.install_listener("numba:compile", Progress(functions, bar))):
        for kernel in KERNELS:
            kernel.compile(signature)
            module.link_in(llvm.parse_assembly(kernel.inspect_llvm(signature)))
            module.get_function(kernel.overloads[signature].fndesc.llvm_func_name).name = kernel.__name__
    absent = {function.name for function in module.functions if function.is_declaration
              and not function.name.startswith("llvm.")} - C_LIBRARY
    if absent:
        raise InputError(f"numba {numba.__version__} compiles kernels that need {', '.join(sorted(absent))} to run, so "
                         "they can't be kept; install another version of numba, or use qwen3.py")
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.FeatureMap(FEATURES).flatten(), opt=3,
        reloc="static" if target.name.startswith("x86") else "default", codemodel="jitdefault", jit=True)
    return machine.emit_object(module)
