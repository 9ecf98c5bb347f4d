"""qwen3_kernels/vectors.py: the instructions of each kind of CPU."""
import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from qwen3_kernels import vectors

pytestmark = pytest.mark.core


@pytest.mark.parametrize("path, triple, cpu, instruction", [
    ("vnni512", "x86_64-linux-gnu", "cascadelake", "vpdpbusd"),
    ("vnni", "x86_64-linux-gnu", "alderlake", "{vex} vpdpbusd"), ("avx2", "x86_64-linux-gnu", "haswell", "vpmaddubsw"),
    ("neon", "aarch64-linux-gnu", "neoverse-n1", "sdot"), ("plain", "x86_64-linux-gnu", "x86-64", "pm"),
    ("plain", "aarch64-linux-gnu", "generic", "mull")])
@pytest.mark.parametrize("signed", [True, False])
def test_instruction_selection(path, triple, cpu, instruction, signed):
    """What each path compiles to on a CPU for which it is meant."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    n, module = vectors.INT8_SHAPES[path].lanes, ir.Module()
    sums = ir.VectorType(ir.IntType(16), 2 * n) if path == "avx2" else ir.VectorType(ir.IntType(32), n)
    values = ir.VectorType(ir.IntType(8), 4 * n)
    function = ir.Function(module, ir.FunctionType(sums, [sums, values, values]), "dot")
    b = ir.IRBuilder(function.append_basic_block())
    b.ret(vectors.dot_bytes(b, path, *function.args, signed))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module.triple = triple
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert instruction in assembly.replace("\t", " ")


@pytest.mark.parametrize("features, path", [
    ({"avx512vnni": True, "avx512f": True, "avx2": True}, "vnni512"), ({"avxvnni": True, "avx2": True}, "vnni"),
    ({"avx512f": True, "avx2": True}, "avx2"), ({"avx2": True}, "avx2"), ({"dotprod": True}, "neon"), ({}, "plain")])
def test_choice_of_instructions(features, path):
    assert vectors.int8_paths(features)[0] == path
