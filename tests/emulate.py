"""Runs tests as on other CPUs, by emulation: do ARMs and an x86 without AVX-512 give the fast engine's golden bits?

    python tests/emulate.py [FOLDER]     (needs Debian, qemu-user-static; what it downloads stays in FOLDER)

LLVM can compile for any CPU: the fast engine's machine code is made on this machine, and only run by the emulator.
"""
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# qemu's names, and what multiplies bytes there.
X86, ARMS = {"Haswell": "avx2"}, {"cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}
EXACT = ("-k", "every_cpu", "tests/test_qwen3_numba_exact.py")
CORE = ("-m", "core", "-k", "transformers and (False or defaults) or grouped_query or rope",
        "tests/test_qwen3.py")  # all would take ten minutes
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
ASK = """
import json, llvmlite.binding as llvm
from qwen3_lib.kernels.cpu import FEATURES, PATH
print(json.dumps([llvm.get_host_cpu_name(), FEATURES, PATH]))
"""


def run(*command: object, **environment: str) -> str:
    """The stdout of a command that must succeed."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=os.environ | environment, capture_output=True,
                          text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
    return done.stdout


def arm(folder: Path) -> Path:
    """`folder/arm`, which runs a Python for ARM with this project's requirements."""
    emulator = shutil.which("qemu-aarch64-static")
    if emulator is None:
        raise RuntimeError("there is no qemu-aarch64-static")
    apt, root, site = folder / "apt", folder / "root", folder / "site"
    for part in (apt / "lists/partial", apt / "archives/partial", root):
        part.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # nothing is installed: so all that they need is fetched
    options = [f"-oDir::{name}={apt}{path}" for name, path in {
        "State": "", "State::Lists": "/lists", "State::status": "/status", "Cache": ""}.items()]
    options += ["-oAPT::Architecture=arm64", "-oAPT::Architectures::=arm64", "-oAPT::Sandbox::User=root", "-qq", "-y"]
    run("apt-get", *options, "update")
    run("apt-get", *options, "install", "--download-only", "--no-install-recommends", *PACKAGES)
    for package in apt.glob("archives/*.deb"):
        run("dpkg", "-x", package, root)
    program = root / "usr/bin/python3"
    (folder / "arm").write_text(
        f'#!/bin/sh\nPYTHONHOME={root}/usr PYTHONPATH={ROOT}:{site} exec {emulator} -L {root} -0 "$0" {program} "$@"\n')
    (folder / "arm").chmod(0o755)
    version = run(folder / "arm", "-c", "import sys; print(*sys.version_info[:2], sep='.')").strip()
    platforms = [f"--platform=manylinux{kind}_aarch64" for kind in ("_2_28", "_2_17", "2014")]
    run(sys.executable, "-m", "pip", "install", "-q", "--target", site, "--python-version", version, *platforms,
        "--only-binary=:all:", "-c", "constraints-test.txt", "-r", "requirements.txt", "numba", "pytest",
        "pytest-timeout", "hypothesis")
    return folder / "arm"


def compile_for(name: str, features: dict[str, bool], triple: str, folder: Path) -> None:
    """Keeps the machine code for a CPU where the fast engine looks for it there. `folder` has what numba compiled."""
    import llvmlite.binding as llvm
    from llvmlite.binding import targets
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for module in (llvm, targets):  # for them, too, this machine is the other one
        module.get_default_triple = module.get_process_triple = lambda: triple
        module.get_host_cpu_name = lambda: name
        module.get_host_cpu_features = lambda: llvm.FeatureMap(features)
    from qwen3_lib.kernels import build, objects, products
    from qwen3_lib.kernels.dense import DENSE_STEPS
    from qwen3_lib.kernels.compile import machine_code
    from qwen3_lib.kernels.layout import BF16, F16, INT4, INT5, INT8, ROUNDED

    def keep(function: str, make: Callable[[], bytes]) -> int:
        cache, made_from = build.code_place()
        assert cache is not None
        build.keep_code(cache / f"{function}.o", made_from, make())
        return 1  # an address that nobody calls

    def numbas(kernels: tuple[str, ...]) -> bytes:
        file = folder / f"{triple}-{kernels[0]}.o"
        if not file.exists():  # the first CPU, which has no more than the others
            file.write_bytes(machine_code(kernels))
        return file.read_bytes()

    names = *DENSE_STEPS, "quantize.quantize_block", "quantize.pack_block"
    for group in dict.fromkeys(map(build.compiled_with, names)):
        keep(build.symbol(group[0]), partial(numbas, group))
    steps = [build.symbol(step) for step in DENSE_STEPS]
    keep(build.symbol(*DENSE_STEPS), partial(objects.compile_layers, build.symbol(*DENSE_STEPS), steps[:-1], steps[-1]))
    build.address_of = keep
    for form in (BF16, ROUNDED, INT8, INT5, INT4):
        for n in (1, 4, 10, 30, 31, 45):  # the passes of EXACT
            products.functions_for(((form, n),))
    for form in (F16, ROUNDED):
        products.functions_for((), products.any_number(form, 16))


def test(python: Path, cpu: str, *arguments: str, **environment: str) -> str:
    """The last line of pytest as on this CPU."""
    start = time.monotonic()
    out = run(python, "-m", "pytest", "-p", "no:cacheprovider", *arguments, QEMU_CPU=cpu, **environment)
    return f"{cpu}: {out.strip().splitlines()[-1]} ({time.monotonic() - start:.0f} seconds)"


def x86(folder: Path) -> Path:
    """`folder/x86`, which runs this environment's Python as on another x86."""
    emulator = shutil.which("qemu-x86_64-static")
    if emulator is None or platform.machine() != "x86_64":
        raise RuntimeError("there is no qemu-x86_64-static" if emulator is None else "this machine is no x86")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x86").write_text(f'#!/bin/sh\nexec {emulator} {sys.executable} "$@"\n')
    (folder / "x86").chmod(0o755)
    return folder / "x86"


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:
        return compile_for(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        folder, jobs = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).resolve(), []
        for machine, python_of, cpus in (("x86_64", x86, X86), ("aarch64", arm, ARMS)):
            try:
                python = python_of(folder)
            except (RuntimeError, OSError) as error:
                print(f"{machine} can't be emulated here:", str(error).splitlines()[0])
                continue
            if cpus is ARMS:
                jobs.append(pool.submit(test, python, "cortex-a72", *CORE))
            for cpu, path in cpus.items():
                kept = {"NUMBA_CACHE_DIR": str(folder / "kernels" / cpu)}
                name, features, found = json.loads(run(python, "-c", ASK, QEMU_CPU=cpu))
                assert found == path, (cpu, found)
                run(sys.executable, __file__, "--compile", name, json.dumps(features), f"{machine}-unknown-linux-gnu",
                    folder, **kept)
                jobs.append(pool.submit(test, python, cpu, *EXACT, **kept))
        for job in jobs:
            print(job.result(), flush=True)


if __name__ == "__main__":
    main()
