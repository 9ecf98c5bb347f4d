"""Counts the instructions for a weight in the inner loops of the products on ARM, beside llama.cpp's, on any machine.

    python bench/instructions.py [libggml-cpu-VERSION.so ...]

LLVM compiles the products for ARM here. A library of llama.cpp for ARM is disassembled by aarch64-linux-gnu-objdump
(Debian: binutils-aarch64-linux-gnu); the package @node-llama-cpp/linux-arm64 of npm has one for each version of ARM.
"""
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import llvmlite.binding as llvm  # noqa: E402

from qwen3_lib.kernels import objects, vectors  # noqa: E402
from qwen3_lib.kernels.layout import BF16, FORMATS, INT4, INT8, is_packed  # noqa: E402

CPUS = {"i8mm": ("neoverse-n2", "+i8mm,+dotprod"), "dotprod": ("neoverse-n1", "+dotprod"), "neon": ("cortex-a72", "")}
# llama.cpp's products of one vector, and the weights of a turn of their inner loop: four rows times a block of 32. The
# two last are for CPUs without dot products, and take two blocks of a row.
PEERS = {"ggml_vec_dot_bf16": 8, "ggml_gemv_q8_0_4x4_q8_0": 128, "ggml_gemv_q4_0_4x4_q8_0": 128,
         "ggml_vec_dot_q8_0_q8_0": 64, "ggml_vec_dot_q4_0_q8_0": 64}

MULTIPLIES = re.compile("[su]dot|usdot|smull|fmla|fmul")


def inner_loop(lines: list[str]) -> list[str]:
    """The loop, without a loop inside, that multiplies most. A label is a line that ends with a colon."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = [(labels[line.split()[-1]], i) for i, line in enumerate(lines)
             if re.match(r"(b|b\.\w+|cbn?z|tbn?z)\s", line) and labels.get(line.split()[-1], i) < i]
    bodies = [lines[start:end + 1] for start, end in loops if not any(start < a and b < end for a, b in loops)]
    bodies = [[line for line in body if not line.endswith(":")] for body in bodies]
    return max(bodies, key=lambda body: sum(bool(MULTIPLIES.match(line)) for line in body), default=[])


def product(path: str, form: int, way: vectors.Way) -> list[str]:
    """The inner loop of one of our products."""
    cpu, features = CPUS[path]
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(cpu=cpu, features=features, opt=3)
    machine.emit_object = machine.emit_assembly
    objects.machine = lambda: machine
    kind = "packed_product" if is_packed(form) else "float_product"
    assembly = objects.compile_product("f", kind, form, way.vectors, way)
    lines = [line.split("//")[0].strip() for line in assembly.splitlines()]
    return inner_loop([line for line in lines if re.match(r"[a-z]|\.LBB.*:", line)])


def peers(library: str) -> dict[str, list[str]]:
    """The inner loops of llama.cpp's products."""
    text = subprocess.run(["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", library], capture_output=True,
                          text=True, check=True).stdout
    loops = {}
    for name in PEERS:
        lines = list[str]()
        for line in re.search(rf"<{name}>:\n(.*?)\n\n", text + "\n\n", re.DOTALL)[1].splitlines():
            address, instruction = line.split("\t", 1)
            lines += [address.strip(), re.sub(r"\s*(<.*|//.*)", "", instruction).replace("\t", " ")]
        loops[name] = inner_loop(lines)
    return loops


def main(libraries: list[str]) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for path in CPUS:
        vectors.PATH, vectors.SUMS = path, 6
        for form in (BF16, INT8, INT4):
            for count in (vectors.ONE, vectors.MANY):
                way = vectors.way_of(form, count)
                body = product(path, form, way)
                rows, columns = way.rows, 32
                if is_packed(form):
                    rows, columns = 4 * way.rows, FORMATS[form].group * FORMATS[form].halves
                print(f"{path:8} {FORMATS[form].name:5} {way.vectors} vectors x {rows:2} rows: "
                      f"{len(body) / (rows * columns * way.vectors):.2f} instructions for a weight and a vector")
    for library in libraries:
        seen = False
        for name, body in peers(library).items():
            if body and not (name.startswith("ggml_vec_dot_q") and seen):
                seen |= "gemv" in name
                print(f"{Path(library).name} {name}: {len(body) / PEERS[name]:.2f} instructions for a weight")


if __name__ == "__main__":
    main(sys.argv[1:])
