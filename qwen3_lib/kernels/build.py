"""Machine code: made when it is first needed, one function at a time, and kept for the next runs."""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import llvmlite
import llvmlite.binding as llvm

from qwen3_lib.io.writing import write_whole
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.kernels import NUMBA_VERSION
from qwen3_lib.kernels.cpu import host_features
from qwen3_lib.kernels.layout import FORMATS, WAITING, is_packed
from qwen3_lib.kernels.objects import compile_layers, compile_product
from qwen3_lib.kernels.vectors import Way

KERNELS = Path(__file__).resolve().parent
Kernel = Callable[[np.ndarray, int], None]  # takes its record, int64, and a number; see layers.py and quantize.py


def kernel_folder() -> Path | None:
    """Where machine code is kept: $NUMBA_CACHE_DIR, else ~/.cache/qwen3.

    None if that is no absolute path, and so anybody's: without HOME, "~" stays a plain name.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(caches) / "qwen3")
    return folder if folder.is_absolute() else None


def is_ours(about: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, or to root, and nobody else may write to it."""
    if not hasattr(os, "getuid"):  # Windows, where a home is its user's
        return True
    return about.st_uid in (0, os.getuid()) and about.st_mode & 0o022 == 0


def made_ours(folder: Path) -> bool:
    """Whether a folder, which is made if it is absent, is ours."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    return is_ours(os.stat(folder))


def can_keep(folder: Path | None) -> bool:
    """Whether machine code can be kept in a folder."""
    with contextlib.suppress(OSError):
        return folder is not None and made_ours(folder) and os.access(folder, os.W_OK)
    return False


def identity() -> str:
    """A hash of everything that machine code depends on; two versions of this program have a folder each."""
    cpu = f"{llvm.get_host_cpu_name()} {llvm.FeatureMap(host_features()).flatten()} {os.environ.get('QWEN3_INT8_PATH')}"
    files = [*sorted(KERNELS.glob("*.py")), NUMBA_VERSION]
    sources = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256(" ".join([*sources, llvmlite.__version__, cpu]).encode()).hexdigest()


@cache
def code_place() -> tuple[Path | None, str]:
    """(the folder of this process's machine code, what it is made from)."""
    made_from, folder = identity(), kernel_folder()
    return folder and folder / made_from[:8], made_from


@cache
def linker() -> Any:
    """What brings machine code into memory, and keeps it there: LLVM's, since numba's would import numba."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if sys.platform == "win32":  # its C library has no such names
        for name in WAITING:
            llvm.add_symbol(name, ctypes.cast(ctypes.windll.kernel32.SwitchToThread, ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


lock = threading.RLock()  # one thread makes and links at a time


def address_of(name: str, make: Callable[[], bytes]) -> int:
    """The address of a function: from its object file, or from one that is made now, and kept."""
    with lock:
        if (known := linker().get_function_address(name)) != 0:
            return known
        folder, made_from = code_place()
        code = folder and read_code(folder / f"{name}.o", made_from)
        if code is None:
            code = make()
            if folder is not None:
                keep_code(folder / f"{name}.o", made_from, code)
        linker().add_object_file(llvm.ObjectFileRef.from_data(code))
        linker().finalize_object()
        return linker().get_function_address(name)


@cache
def function(kind: str, form: int, n: int, way: Way) -> int:
    """The address of a product's function."""
    name = f"{kind}_{FORMATS[form].name}_{n}_{way.rows}_{way.prefetches}"
    return address_of(name, partial(compile_product, name, kind, form, n, way))


def product_kind(form: int) -> str:
    """The kind of the functions that multiply vectors with rows of a format as they lie in memory."""
    return "packed_product" if is_packed(form) else "float_product"


# The kernels that numba compiles, file.function: a process and an object file for each group, so that two cores work on
# the first answer, and LLVM optimizes once what a group's kernels share. Any other kernel is a group by itself.
COMPILED_TOGETHER = (("layers.project_heads", "layers.finish_dense", "layers.output_logits"),
                     ("streams.read_mixed", "streams.finish_streams", "streams.output_streams"))


def compiled_with(kernel: str) -> tuple[str, ...]:
    return next((group for group in COMPILED_TOGETHER if kernel in group), (kernel,))


def symbol(*kernels: str) -> str:
    """The name of a kernel's machine code, or of what runs several: also that of its file."""
    return "_then_".join(each.rpartition(".")[2] for each in kernels)


@cache
def kernel(*steps: str) -> Kernel:
    """A kernel, or what runs several on a Job: for each layer all but the last one, then that one."""
    make_kernels(steps)
    return kernel_at(linker().get_function_address(symbol(*steps)))


@cache
def announce(folder: Path | None) -> None:
    """Says why the first answer takes long; once in a process, however many groups it compiles."""
    often = "once for models of this kind" if can_keep(folder) else "at each start, because nothing can be kept in " \
        f"{kernel_folder() or '~/.cache'}; set NUMBA_CACHE_DIR to a folder that you alone can write to"
    if sys.stderr is not None:
        print(f"compiling the fast engine for this CPU: a few seconds, {often}", file=sys.stderr)


def make_kernels(*wanted: tuple[str, ...]) -> None:
    """Compiles kernels, side by side, or loads them from an earlier run's files; `wanted`: see `kernel`.

    numba's own cache would import numba and its compiler at each start, which takes longer than all else. So machine
    code is kept as object files, and llvmlite, the smaller part of numba, loads them at once.
    """
    with lock:
        groups = [*dict.fromkeys(compiled_with(step) for steps in wanted for step in steps)]
        folder, made_from = code_place()

        def kept() -> dict[tuple[str, ...], bytes | None]:
            return {group: folder and read_code(folder / f"{symbol(group[0])}.o", made_from) for group in groups
                    if not linker().get_function_address(symbol(group[0]))}

        with contextlib.ExitStack() as stack:
            if None in (found := kept()).values():  # then look again when it is this process's turn
                announce(folder)
                stack.enter_context(turn(folder))
                found = kept()
                absent = [group for group, code in found.items() if code is None]
                found |= zip(absent, compiled_kernels(absent)) if absent else {}
            for group, code in found.items():
                address_of(symbol(group[0]), lambda code=code: code)
        for steps in wanted:
            if len(steps) > 1:
                names = [symbol(step) for step in steps]
                address_of(symbol(*steps), lambda: compile_layers(symbol(*steps), names[:-1], names[-1]))


@contextlib.contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """One process at a time compiles; those that wait find its kernels. Where there are no locks, each compiles."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if folder is not None and fcntl is not None and made_ours(folder):
                fcntl.flock(stack.enter_context(open(folder / "lock", "wb")), fcntl.LOCK_EX)
        yield


def kernel_at(address: int) -> Kernel:
    """The kernel whose machine code is at an address. Other threads run while it does."""
    unused = ctypes.create_string_buffer(16)  # where numba puts a result and an exception: there is neither
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)(address)

    def run(record: np.ndarray, number: int) -> None:
        if status := function(unused, unused, record.ctypes.data, int(number), 0):
            raise RuntimeError(f"a kernel ended with status {status}")

    return run


def compiled_kernels(groups: list[tuple[str, ...]]) -> list[bytes]:
    """An object file of each group of kernels. Raises InputError if numba can't compile them."""
    code = ("import gc, os, sys; gc.disable(); sys.path.insert(0, sys.argv[1]); "
            "from qwen3_lib.kernels.compile import main; main(sys.argv[2:]); "
            "os._exit(0)")  # to collect and to free numba's objects would take a quarter of the time
    unoptimized = os.environ | {"NUMBA_OPT": "0"}  # LLVM optimizes all at once
    processes = list[subprocess.Popen[bytes]]()
    try:
        for group in groups:
            processes.append(subprocess.Popen(
                [sys.executable, "-c", code, KERNELS.parents[1], *group], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=unoptimized))
        with ThreadPoolExecutor(len(groups)) as pool:
            results = list(pool.map(subprocess.Popen.communicate, processes))
    except (OSError, RuntimeError) as error:  # no Python program to start, or no thread
        raise InputError(f"the kernels can't be compiled: {brief(error)}") from error
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results):
        if process.returncode:
            lines = errors.decode(errors="replace").split("\n")
            ended = f"the compiler ended with {process.returncode}"
            last = next((line for line in reversed(lines) if line.strip()), ended)
            raise InputError(f"the kernels can't be compiled: {brief(last, 600)}")
    return [out for out, _ in results]


# A file of machine code: a line with the SHA-256 of all that follows; a line with what the code was made from; an
# object file. Its code is executed, so the file must be ours, and whole.


def read_code(file: Path, made_from: str) -> bytes | None:
    """The code in a file of keep_code; None if the file is absent, damaged, or made from other sources.

    None, too, if somebody else could have written it: whoever may write to the folder can exchange the file.
    """
    with contextlib.suppress(OSError, ValueError):
        if file.is_file() and is_ours(os.stat(file.parent)):
            with open(file, "rb") as opened:
                if is_ours(os.fstat(opened.fileno())):
                    digest, rest = opened.read().split(b"\n", 1)
                    origin, code = rest.split(b"\n", 1)
                    if (digest.decode(), origin.decode()) == (hashlib.sha256(rest).hexdigest(), made_from):
                        return code
    return None


def keep_code(file: Path, made_from: str, code: bytes) -> None:
    """Writes machine code where it is kept; if that fails, each run compiles anew."""
    rest = made_from.encode() + b"\n" + code
    whole = hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
    with contextlib.suppress(OSError, InputError):
        if made_ours(file.parent):
            write_whole(file, lambda out: out.write(whole), 0o644)
