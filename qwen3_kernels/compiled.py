"""Machine code: compiled by numba at the first run, and kept for the next ones."""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from qwen3_io.errors import InputError, brief
from qwen3_io.writing import write_whole

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


class Prepared(NamedTuple):
    """A named tuple of arrays, with its numbers: to find them takes as long as a layer of a small model."""
    fields: Any
    numbers: list[int]


class Kernel:
    """A function of layers.py, compiled, at an address. Other threads run while it does."""

    def __init__(self, address: int, arguments: list):
        self.arguments = arguments
        self.n_numbers = sum(1 if isinstance(kind, str) else 5 + 2 * kind[1] for kind in flat(arguments))
        unused = ctypes.create_string_buffer(16)  # where numba puts a result and an exception: there is neither
        self.function = partial(ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3)(address), unused, unused)

    def numbers(self, *args: Any) -> array[int]:
        """The arguments as 8 bytes each. TypeError unless arrays are contiguous and of the right types.

        An array is (owner, owner, size, itemsize, address, *shape, *strides); a named tuple is its fields.
        """
        return array("q", numbers(args, self.arguments))

    def call(self, given: array[int]) -> int:
        """Runs it -> its status. Raises TypeError for too few numbers or too many."""
        if len(given) != self.n_numbers:
            raise TypeError(f"a kernel takes {self.n_numbers} numbers, not {len(given)}")
        return self.function(given.buffer_info()[0])

    def prepared(self, argument: int, fields: Any) -> Prepared:
        """A named tuple for this argument of many calls."""
        return Prepared(fields, numbers(fields, self.arguments[argument]["fields"]))

    def __call__(self, *args: Any) -> None:
        status = self.call(self.numbers(*args))
        if status != 0:
            raise RuntimeError(f"a kernel ended with status {status}")


def flat(kinds: list) -> Iterator:
    """The types of arguments, with the fields of named tuples in their place."""
    for kind in kinds:
        yield from flat(kind["fields"]) if isinstance(kind, dict) else [kind]


def numbers(args: Iterable, kinds: list) -> list[int]:
    found: list[int] = []
    for arg, kind in zip(args, kinds, strict=True):
        if isinstance(arg, Prepared):
            found += arg.numbers
        elif isinstance(kind, dict):
            found += numbers(arg, kind["fields"])
        elif isinstance(kind, str):
            found.append(int(np.float64(arg).view(np.int64)) if kind == "float64" else int(arg))
        elif (arg.dtype, arg.ndim) != (kind[0], kind[1]) or not arg.flags.c_contiguous:
            raise TypeError(f"needs contiguous {kind[0]} with {kind[1]} dimensions, not {arg.dtype} {arg.shape}")
        else:
            found += (0, 0, arg.size, arg.itemsize, arg.ctypes.data, *arg.shape, *arg.strides)
    return found


def kernel_folders() -> list[Path]:
    """Where compiled kernels may be kept: in NUMBA_CACHE_DIR; or with Python's compiled modules, or in the home.

    Never in a folder below the current one, which could be anybody's: without HOME, "~" stays a plain name.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    given = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(given)] if given else [HERE / "__pycache__", Path(caches) / "qwen3"]
    return [folder for folder in folders if folder.is_absolute()]


def is_ours(about: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, or to root, and nobody else may write to it."""
    if not hasattr(os, "getuid"):  # Windows, where a home is its user's
        return True
    return about.st_uid in (0, os.getuid()) and about.st_mode & 0o022 == 0


def fingerprint(cpu: str) -> str:
    """A hash of everything that the machine code depends on."""
    files = (HERE / "layers.py", HERE / "vectors.py", HERE / "layout.py", NUMBA_VERSION)
    sources = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256(" ".join([*sources, llvmlite.__version__, cpu]).encode()).hexdigest()


def identity() -> tuple[str, str]:
    """(the name of the file for this CPU, a hash of everything that its machine code depends on)."""
    cpu = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {os.environ.get('QWEN3_INT8_PATH')}"
    return f"qwen3_kernels.{hashlib.sha256(cpu.encode()).hexdigest()[:8]}.o", fingerprint(cpu)


def kept_kernels() -> Path:
    """Where the kernels for this CPU are kept, compiled now if need be. Raises InputError if they can't be kept."""
    kernels()
    name, made_from = identity()
    for folder in kernel_folders():
        if read_kernels(folder / name, made_from) is not None:
            return folder / name
    tried = ", ".join(map(str, kernel_folders())) or "NUMBA_CACHE_DIR, which is no absolute path"
    raise InputError(f"the kernels can't be kept: no folder of yours that only you may write among {tried}")


@cache
def kernels() -> SimpleNamespace:
    """All kernels by their names: compiled by numba, or loaded from an earlier run's file.

    numba's own cache would import numba and its compiler at each start, which takes longer than all else. So the
    machine code is kept as an object file, and llvmlite, the smaller part of numba, loads it at once.
    """
    name, made_from = identity()
    found = next(filter(None, (read_kernels(folder / name, made_from) for folder in kernel_folders())), None)
    if found is None:
        try:
            from qwen3_kernels.layers import machine_code
            found = machine_code()
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
        keep_kernels(name, made_from, *found)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    arguments, code = found
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return SimpleNamespace(engine=engine, **{  # which keeps the code alive
        kernel: Kernel(engine.get_function_address(kernel), kinds) for kernel, kinds in arguments.items()})


# A file of kernels: a line with the SHA-256 of all that follows; a line of JSON, what the kernels were made from and
# their arguments; an object file. Its code is executed, so the file must be ours, and whole.


def read_kernels(file: Path, made_from: str) -> tuple[dict[str, list], bytes] | None:
    """The content of a file of keep_kernels; None if the file is absent, damaged, or made from other sources.

    None, too, if somebody else could have written it: whoever may write to the folder can exchange the file.
    """
    try:
        if not (file.is_file() and is_ours(os.stat(file.parent))):
            return None
        with open(file, "rb") as opened:
            if not is_ours(os.fstat(opened.fileno())):
                return None
            digest, rest = opened.read().split(b"\n", 1)
        if digest.decode() != hashlib.sha256(rest).hexdigest():
            return None
        header, code = rest.split(b"\n", 1)
        about = json.loads(header)
        return (about["arguments"], code) if about["made from"] == made_from else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep_kernels(name: str, made_from: str, arguments: dict[str, list], code: bytes) -> None:
    """Writes what machine_code has given into the first folder that takes it; if none does, each run compiles anew."""
    rest = json.dumps({"made from": made_from, "arguments": arguments}).encode() + b"\n" + code
    whole = hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
    for folder in kernel_folders():
        with contextlib.suppress(OSError, InputError):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if is_ours(os.stat(folder)):
                write_whole(folder / name, lambda out: out.write(whole), 0o644)
                return
