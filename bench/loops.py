"""How many instructions and cycles the loops of one vector take on other CPUs, by LLVM's models of them (llvm-mca).

A loop is what LLVM makes of a product for that CPU, without prefetches. The models know no caches and no memory.
"""
import re
import shutil
import subprocess
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

import harness
from qwen3_lib.kernels import objects, vectors
from qwen3_lib.kernels.build import product_kind
from qwen3_lib.kernels.layout import FORMATS, INT4, INT8, Q4_K, Q6_K, ROUNDED, is_packed
from qwen3_lib.kernels.vectors import I64, ONE


class Target(NamedTuple):
    """What products depend on: see cpu.py."""
    path: str
    sums: int = 6
    pairs: bool = False
    triple: str = "x86_64-unknown-linux-gnu"


TARGETS = {"znver4": Target("vnni512", 24, True), "icelake-server": Target("vnni512", 24), "alderlake": Target("vnni"),
           "znver3": Target("avx2"), "haswell": Target("avx2"),
           "neoverse-n1": Target("dotprod", triple="aarch64-unknown-linux-gnu")}
FORMS = ROUNDED, INT8, INT4, Q4_K, Q6_K
NAMES = "llvm-mca-22", "llvm-mca-21", "llvm-mca-20", "llvm-mca-19", "llvm-mca"  # 14, for one, knows no Zen 4


def assembly(name: str, form: int) -> list[str]:
    """The lines of a product of one vector for a CPU."""
    target = TARGETS[name]
    known = {"PATH": target.path, "SUMS": target.sums, "PAIRS": target.pairs,
             "FEATURES": {"sse2": target.triple.startswith("x86")}}
    before = {each: getattr(vectors, each) for each in known}
    vars(vectors).update(known)
    try:
        write, n_arguments = objects.WRITERS[product_kind(form)]
        module = ir.Module()
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * n_arguments), "product")
        b = ir.IRBuilder(function.append_basic_block())
        write(form, 1, vectors.way_of(form, ONE)._replace(prefetches=0), b, *function.args)
        b.ret_void()
    finally:
        vars(vectors).update(before)
    code = llvm.parse_assembly(str(module))
    code.triple = target.triple
    cpu = llvm.Target.from_triple(target.triple).create_target_machine(cpu=name, opt=3)
    objects.object_code(code, cpu)
    return [line.strip() for line in cpu.emit_assembly(code).splitlines()]


MULTIPLIES = re.compile(r"(\{vex\} )?v?(fma|fmla|pdpb|dpbf|pmadd|[su]dot)")


def inner_loop(lines: list[str]) -> list[str]:
    """The instructions of the loop that multiplies most, of those that have no loop inside."""
    labels, found = dict[str, int](), list[range]()
    for i, line in enumerate(lines):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = i
        elif (jump := re.match(r"(?:j|b\b|b\.|cb|tb).*(\.LBB\w+)", line)) and jump[1] in labels:
            found.append(range(labels[jump[1]], i + 1))
    inner = [[line for line in lines[one.start:one.stop] if line and not line.startswith((".", "#", "//"))]
             for one in found
             if not any(other.start in one and other.stop - 1 in one for other in found if other != one)]
    return max(inner, key=lambda loop: sum(map(bool, map(MULTIPLIES.match, loop))))


def groups_in(form: int, loop: list[str]) -> float:
    """The weights that one turn of a loop multiplies, in units of 32: LLVM unrolls loops of floats."""
    if is_packed(form):
        return FORMATS[form].group * FORMATS[form].halves
    lanes = ((16 if "zmm" in line else 8 if "ymm" in line else 4) * (2 if "bf16" in line else 1)
             for line in loop if MULTIPLIES.match(line))
    return sum(lanes) / 32


def loops() -> list[str]:
    """A table of all CPUs and formats; one line if there is no llvm-mca."""
    if (program := next(filter(None, map(shutil.which, NAMES)), None)) is None:
        return ["instructions and cycles of other CPUs: llvm-mca is missing (apt install llvm)"]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    rows = [["instructions / cycles of 32 weights", *(FORMATS[form].name for form in FORMS)]]
    for name, target in TARGETS.items():
        cells = []
        for form in FORMS:
            loop = inner_loop(assembly(name, form))
            done = subprocess.run([program, f"-mtriple={target.triple}", f"-mcpu={name}", "-iterations=100"], text=True,
                                  input="\n".join(loop), capture_output=True)
            counts = [re.search(f"{what}: +([0-9.]+)", done.stdout) for what in ("Instructions", "Total Cycles")]
            groups = 100 * groups_in(form, loop)
            cells.append(" / ".join(f"{float(each[1]) / groups:.2f}" for each in counts if each) or "nan")
        rows.append([f"{name} ({target.path})", *cells])
    return harness.table(*rows)
