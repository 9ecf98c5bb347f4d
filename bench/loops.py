"""How many instructions and cycles the loops of one vector take on other CPUs, by LLVM's models of them (llvm-mca).

A loop is what LLVM makes of a product for that CPU, without prefetches. The models know no caches and no memory.
Beside them those of llama.cpp and ik_llama.cpp, if their sources are there: the files with their products, compiled as
for such a CPU, and taken apart by objdump. Of several loops for a format, the one with the fewest instructions counts.
"""
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

import harness
from qwen3_lib.kernels import objects, vectors
from qwen3_lib.kernels.build import product_kind
from qwen3_lib.kernels.layout import FORMATS, INT4, INT8, Q4_K, Q6_K, ROUNDED, is_packed
from qwen3_lib.kernels.vectors import I64, ONE


class Target(NamedTuple):
    """What products depend on, see cpu.py; what gcc calls such a CPU."""
    path: str
    gcc: str
    sums: int = 6
    pairs: bool = False
    triple: str = "x86_64-unknown-linux-gnu"


TARGETS = {"znver4": Target("vnni512", "icelake-server -mavx512bf16", 24, True),
           "icelake-server": Target("vnni512", "icelake-server", 24), "alderlake": Target("vnni", "alderlake"),
           "znver3": Target("avx2", "haswell"), "haswell": Target("avx2", "haswell"),
           "neoverse-n1": Target("dotprod", "armv8.2-a+dotprod+fp16", triple="aarch64-unknown-linux-gnu")}
FORMS = ROUNDED, INT8, INT4, Q4_K, Q6_K


class PeerLoop(NamedTuple):
    form: int
    file: str  # of `SOURCES`
    function: str  # how its name begins
    weights: int  # of a turn of the loop, in units of 32; 0: see groups_in
    turns: int = 1  # of the loop inside
    arm: bool = False


LLAMA, IK, GEMV = "ggml/src/ggml-cpu", "ggml/src/iqk/iqk_gemm_", "void (anonymous namespace)::mul_mat_"
SOURCES = {"vec": f"{LLAMA}/vec.cpp", "dots": f"{LLAMA}/arch/x86/quants.c", "rows": f"{LLAMA}/arch/x86/repack.cpp",
           "arm rows": f"{LLAMA}/arch/arm/repack.cpp", **{name: f"{IK}{name}.cpp" for name in (
               "floats", "legacy_quants", "kquants")}}
PEERS = {"llama.cpp": (
    PeerLoop(ROUNDED, "vec", "ggml_vec_dot_bf16", 0), PeerLoop(INT8, "dots", "ggml_vec_dot_q8_0_q8_0", 1),
    PeerLoop(INT4, "dots", "ggml_vec_dot_q4_0_q8_0", 1),
    PeerLoop(INT4, "rows", "void gemv_q4_b32_8x8_q8_0_lut_avx<block<4, 8>", 8),
    PeerLoop(Q4_K, "dots", "ggml_vec_dot_q4_K_q8_K", 8), PeerLoop(Q4_K, "rows", "ggml_gemv_q4_K_8x8_q8_K", 64, 4),
    PeerLoop(Q6_K, "dots", "ggml_vec_dot_q6_K_q8_K", 8),
    PeerLoop(INT8, "arm rows", "ggml_gemv_q8_0_4x4_q8_0", 4, arm=True),
    PeerLoop(INT4, "arm rows", "ggml_gemv_q4_0_4x4_q8_0", 4, arm=True)), "ik_llama.cpp": (
    PeerLoop(ROUNDED, "floats", f"{GEMV}bf16_r16_bf16<1>", 0),
    PeerLoop(INT8, "legacy_quants", f"{GEMV}q8_0_r8_q8_2<1>", 32),
    PeerLoop(INT4, "legacy_quants", f"{GEMV}q4_0_r8_q8_2_avx2<1>", 32),
    PeerLoop(Q4_K, "kquants", f"{GEMV}q4_k_r4_q8_k<1>", 32),
    PeerLoop(Q6_K, "kquants", f"{GEMV}q6_k_r4_q8_k<1>", 32, 8))}
NAMES = "llvm-mca-22", "llvm-mca-21", "llvm-mca-20", "llvm-mca-19", "llvm-mca"  # 14, for one, knows no Zen 4


def assembly(name: str, form: int) -> list[str]:
    """The lines of a product of one vector for a CPU."""
    target = TARGETS[name]
    known = {"PATH": target.path, "SUMS": target.sums, "PAIRS": target.pairs, "SIZES_BYTES": 80,
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


def inner_loop(lines: list[str], turns: int = 1) -> list[str]:
    """The instructions of the loop that multiplies most, of those that have no loop inside.

    With more `turns`, a turn of the loop around it, where the inner one makes so many.
    """
    labels, found = dict[str, int](), list[range]()
    for i, line in enumerate(lines):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = i
        elif (jump := re.match(r"(?:j|b\b|b\.|cb|tb).*(\.LBB\w+)", line)) and jump[1] in labels:
            found.append(range(labels[jump[1]], i + 1))

    def inside(one: range) -> list[str]:
        return [line for line in lines[one.start:one.stop] if line and not line.startswith((".", "#", "//"))]

    inner = max((one for one in found if not any(other.start in one and other.stop - 1 in one for other in found
                                                 if other != one)),
                key=lambda one: sum(map(bool, map(MULTIPLIES.match, inside(one)))))
    if turns == 1:
        return inside(inner)
    outer = min((one for one in found if one.start < inner.start and inner.stop < one.stop), key=len)
    return [*inside(range(outer.start, inner.start)), *inside(inner) * turns, *inside(range(inner.stop, outer.stop))]


@cache
def functions_of(source: Path, cpu: str) -> dict[str, list[str]]:
    """Function -> its lines, with labels before what is jumped to; none without compiler and objdump for that CPU."""
    prefix = "aarch64-linux-gnu-" if cpu.startswith("arm") else ""
    kind, standard = ("gcc", "gnu11") if source.suffix == ".c" else ("g++", "gnu++17")
    compiler, dump = (shutil.which(f"{prefix}{kind}") or shutil.which(f"{prefix}{kind}-12"),
                      shutil.which(f"{prefix}objdump"))
    if not source.exists() or None in (compiler, dump):
        return {}
    ggml = next(folder for folder in source.parents if folder.name == "src")
    folders = ggml, ggml / "ggml-cpu", ggml / "iqk", ggml.parent / "include"
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        done = subprocess.run([str(compiler), f"-std={standard}", "-O3", "-w", "-fPIC", "-DNDEBUG", "-D_GNU_SOURCE",
                               "-DGGML_USE_CPU_REPACK", "-DGGML_USE_IQK_MULMAT", *f"-march={cpu}".split(),
                               *(f"-I{folder}" for folder in folders), "-c", source, "-o", file.name])
        text = subprocess.run([str(dump), "-dC", "--no-show-raw-insn", file.name], capture_output=True,
                              text=True).stdout
    found: dict[str, list[str]] = {}
    targets = set(re.findall(r"\s([0-9a-f]+) <.*\+0x", text))
    for line in () if done.returncode else text.splitlines():
        if name := re.match(r"[0-9a-f]+ <(.*)>:", line):
            lines = found.setdefault(name[1], [])
        elif code := re.match(r" +([0-9a-f]+):\t(.*)", line):
            lines += [f".LBB{code[1]}:"] * (code[1] in targets)
            lines.append(re.sub(r"([0-9a-f]+) <.*", r".LBB\1", re.sub(" *(#|//) .*", "", code[2])))
    return found


def groups_in(form: int, loop: list[str]) -> float:
    """The weights that one turn of a loop multiplies, in units of 32: LLVM unrolls loops of floats."""
    if is_packed(form):
        return FORMATS[form].group * FORMATS[form].halves
    lanes = ((16 if "zmm" in line else 8 if "ymm" in line else 4) * (2 if "bf16" in line else 1)
             for line in loop if MULTIPLIES.match(line))
    return sum(lanes) / 32


def counted(program: str, name: str, loop: list[str], groups: float) -> list[float]:
    """Instructions and cycles of a loop on a CPU, for 32 weights."""
    done = subprocess.run([program, f"-mtriple={TARGETS[name].triple}", f"-mcpu={name}", "-iterations=100"], text=True,
                          input="\n".join(loop), capture_output=True)
    counts = [re.search(f"{what}: +([0-9.]+)", done.stdout) for what in ("Instructions", "Total Cycles")]
    return [float(each[1]) / groups / 100 for each in counts if each]


def peer_counts(program: str, name: str, form: int, peer: str, sources: Path) -> list[float]:
    """`counted` of a peer's loop; nothing if it isn't there."""
    found = list[list[float]]()
    for each in PEERS[peer]:
        if each.form == form and each.arm == (TARGETS[name].path == "dotprod"):
            functions = functions_of(sources / SOURCES[each.file], TARGETS[name].gcc)
            for lines in (lines for function, lines in functions.items()
                          if function.startswith(each.function) and ".cold" not in function):
                loop = inner_loop(lines, each.turns)
                found.append(counted(program, name, loop, each.weights or groups_in(form, loop)))
    return min(found, default=[])


def loops(llama: str, ik: Path | None) -> list[str]:
    """A table of all CPUs and formats; one line if there is no llvm-mca. llama, ik: the peers' sources."""
    if (program := next(filter(None, map(shutil.which, NAMES)), None)) is None:
        return ["instructions and cycles of other CPUs: llvm-mca is missing (apt install llvm)"]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    sources = {"llama.cpp": Path(llama), "ik_llama.cpp": ik or Path()}
    rows = [["instructions / cycles of 32 weights", "", *(FORMATS[form].name for form in FORMS)]]

    def row(name: str, engine: str, counts: Sequence[list[float]]) -> list[str]:
        return [f"{name} ({TARGETS[name].path})", engine,
                *(" / ".join(f"{each:.2f}" for each in cell) or "nan" for cell in counts)]

    for name in TARGETS:
        ours = [inner_loop(assembly(name, form)) for form in FORMS]
        rows.append(row(name, "ours", [counted(program, name, loop, groups_in(form, loop))
                                       for form, loop in zip(FORMS, ours)]))
        rows += [row(name, peer, [peer_counts(program, name, form, peer, folder) for form in FORMS])
                 for peer, folder in sources.items() if folder != Path()]
    return harness.table(*rows)
