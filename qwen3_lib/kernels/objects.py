"""From LLVM's language to object files for this CPU: a product, see vectors.py, or a job that runs all layers."""
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from qwen3_lib.kernels.attention import (write_paired_product, write_paired_rows, write_transposed_product,
                                         write_transposed_rows, write_transposed_scores, write_turned_product,
                                         write_weighted_pairs, write_weighted_rows)
from qwen3_lib.kernels.cpu import FEATURES
from qwen3_lib.kernels.layout import JOB
from qwen3_lib.kernels.spread import write_spread, write_spread_product
from qwen3_lib.kernels.vectors import (I32, I64, Way, load, loop, variable, write_float_product, write_packed_product,
                                       write_each_block, write_widened)

WRITERS = {  # with their numbers of arguments
    "float_product": (write_float_product, 10), "packed_product": (write_packed_product, 9),
    "each_block": (write_each_block, 7),
    "weighted_rows": (write_weighted_rows, 8), "weighted_pairs": (write_weighted_pairs, 8),
    "transposed_rows": (write_transposed_rows, 5), "transposed_product": (write_transposed_product, 10),
    "transposed_scores": (write_transposed_scores, 10), "turned_product": (write_turned_product, 10),
    "paired_rows": (write_paired_rows, 5), "paired_product": (write_paired_product, 8),
    "widened": (write_widened, 3), "spread": (write_spread, 3), "spread_product": (write_spread_product, 9)}


def machine() -> llvm.TargetMachine:
    """This CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.FeatureMap(FEATURES).flatten(), opt=3,
        reloc="static" if target.name.startswith("x86") else "default", codemodel="jitdefault", jit=True)


def compile_product(name: str, kind: str, form: int, n_vectors: int, way: Way) -> bytes:
    """An object file with a function of this name, which multiplies n_vectors with rows of a format in this way.

    Raises ValueError for more vectors than the way is for: registers couldn't hold their sums.
    """
    write, n_arguments = WRITERS[kind]
    if n_vectors > way.vectors:
        raise ValueError(f"{name}: {n_vectors} vectors at once, {way} takes {way.vectors}")
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * n_arguments), name)
    b = ir.IRBuilder(function.append_basic_block())
    write(form, n_vectors, way, b, *function.args)
    b.ret_void()
    return object_code(llvm.parse_assembly(str(module)), machine())


def object_code(module: llvm.ModuleRef, cpu: llvm.TargetMachine, level: int = 3) -> bytes:
    """The object file of a module, optimized for a CPU."""
    passes = llvm.create_pass_builder(cpu, llvm.create_pipeline_tuning_options(speed_level=level))
    passes.getModulePassManager().run(module, passes)
    return cpu.emit_object(module)


def compile_layers(name: str, steps: Sequence[str], end: str) -> bytes:
    """An object file with a function that runs kernels on a Job: in each pass for each layer the steps, then `end`."""
    module, status = ir.Module(), ir.FunctionType(I32, [I64] * 5)  # numba's kernels: two pointers, record, rank, layer
    function = ir.Function(module, ir.FunctionType(I32, [I64] * 5), name)
    kernels = {step: ir.Function(module, status, step) for step in (*steps, end)}
    b = ir.IRBuilder(function.append_basic_block())
    unused, also, record, rank, _ = function.args
    places = (JOB.fields[name][1] for name in ("first", "last", "logits"))
    first, last, logits = (load(b, b.add(record, I64(place)), I64) for place in places)
    failed = variable(b, I32)
    b.store(I32(0), failed)

    def run(kernel: str, layer: Any) -> None:
        b.store(b.or_(b.load(failed), b.call(kernels[kernel], [unused, also, record, rank, layer])), failed)

    def one_pass(number: Any) -> None:
        loop(b, b.sub(last, first), lambda i: [run(step, b.add(first, i)) for step in steps])
        with b.if_then(b.icmp_signed("!=", logits, I64(0))):
            run(end, b.add(last, number))

    loop(b, b.select(b.icmp_signed(">", logits, I64(1)), logits, I64(1)), one_pass)
    b.ret(b.load(failed))
    return object_code(llvm.parse_assembly(str(module)), machine())
