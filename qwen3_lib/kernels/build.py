"""Machine code: compiled by numba at the first run, and kept for the next ones."""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from qwen3_lib.io.writing import write_whole
from qwen3_lib.io.errors import InputError, brief

numba = importlib.util.find_spec("numba")  # importing it would take longer than all else, and is seldom necessary
NUMBA_VERSION = Path(numba.origin).with_name("_version.py") if numba and numba.origin else Path()
try:
    if not NUMBA_VERSION.is_file():
        raise ImportError("it isn't installed")
    import llvmlite
    import llvmlite.binding as llvm
except ImportError as error:
    raise ImportError(f"qwen3_numba needs numba ({error}): pip install numba, or in the project's folder "
                      "pip install '.[fast]'; qwen3.py does the same without it") from error
except OSError as error:  # of its shared library
    raise ImportError("qwen3_numba needs llvmlite, which can't be loaded; is there enough memory? qwen3.py does the "
                      f"same without it ({brief(error)})") from error

HERE = Path(__file__).resolve().parent
SOURCES = ("compile.py", "layers.py", "layout.py", "quantize.py", "vectors.py")
KERNELS = ("weight_row", "quantize_block", "pack_block", "decoder_layers")
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


def identity() -> tuple[str, str]:
    """(the name of the file for this CPU, a hash of everything that its machine code depends on)."""
    cpu = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {os.environ.get('QWEN3_INT8_PATH')}"
    files = [HERE / name for name in SOURCES] + [NUMBA_VERSION]
    sources = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    made_from = hashlib.sha256(" ".join([*sources, llvmlite.__version__, cpu]).encode()).hexdigest()
    return f"qwen3_kernels.{hashlib.sha256(cpu.encode()).hexdigest()[:8]}.o", made_from


def kept_kernels() -> Path:
    """Where the kernels for this CPU are kept, compiled now if need be. Raises InputError if they can't be kept."""
    kernels()
    (name, made_from), folder = identity(), kernel_folder()
    if folder is None or read_kernels(folder / name, made_from) is None:
        raise InputError(f"the kernels can't be kept: {folder or 'NUMBA_CACHE_DIR'} is no folder of yours that only you "
                         "may write")
    return folder / name


@cache
def kernels() -> SimpleNamespace:
    """All kernels by their names: compiled by numba, or loaded from an earlier run's file.

    numba's own cache would import numba and its compiler at each start, which takes longer than all else. So the
    machine code is kept as an object file, and llvmlite, the smaller part of numba, loads it at once.
    """
    (name, made_from), folder = identity(), kernel_folder()
    code = folder and read_kernels(folder / name, made_from)
    if code is None:
        code = compiled()
        if folder is not None:
            keep_kernels(folder / name, made_from, code)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return SimpleNamespace(engine=engine, **{  # which keeps the code alive
        name: kernel_at(engine.get_function_address(name)) for name in KERNELS})


def compiled() -> bytes:
    """The machine code of all kernels. Raises InputError if numba can't compile them."""
    try:
        from qwen3_lib.kernels.compile import machine_code
        return machine_code()
    except (InputError, MemoryError):
        raise
    except ImportError as error:
        raise InputError(f"the kernels can't be compiled, because numba can't be imported: {error}") from error
    except Exception as error:  # numba and LLVM raise many types when their versions don't fit the kernels
        version = ".".join(map(str, llvm.llvm_version_info))
        raise InputError(f"the kernels can't be compiled by numba {sys.modules['numba'].__version__} with llvmlite "
                         f"{llvmlite.__version__} (LLVM {version}) and NumPy {np.__version__}: "
                         f"{brief(f'{type(error).__name__}: {error}', 300)}; install the newest numba, or use "
                         "qwen3.py") from error


def kernel_at(address: int) -> Kernel:
    """The kernel whose machine code is at an address. Other threads run while it does."""
    unused = ctypes.create_string_buffer(16)  # where numba puts a result and an exception: there is neither
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3, ctypes.c_int64)(address)

    def kernel(record: np.ndarray, number: int) -> None:
        if status := function(unused, unused, record.ctypes.data, int(number)):
            raise RuntimeError(f"a kernel ended with status {status}")

    return kernel


# A file of kernels: a line with the SHA-256 of all that follows; a line with what the kernels were made from; an object
# file. Its code is executed, so the file must be ours, and whole.


def read_kernels(file: Path, made_from: str) -> bytes | None:
    """The code in a file of keep_kernels; None if the file is absent, damaged, or made from other sources.

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


def keep_kernels(file: Path, made_from: str, code: bytes) -> None:
    """Writes machine code where it is kept; if that fails, each run compiles anew."""
    rest = made_from.encode() + b"\n" + code
    whole = hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
    with contextlib.suppress(OSError, InputError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours(os.stat(file.parent)):
            write_whole(file, lambda out: out.write(whole), 0o644)
