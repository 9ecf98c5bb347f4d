"""Machine code: compiled by numba at the first run, and kept for the next ones."""
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from qwen3_io.errors import InputError, brief

numba = importlib.util.find_spec("numba")  # importing it would take longer than all else, and is seldom necessary
NUMBA_VERSION = Path(numba.origin).with_name("_version.py") if numba and numba.origin else Path()
try:
    if not NUMBA_VERSION.is_file():
        raise ImportError("it isn't installed")
    import llvmlite
    import llvmlite.binding as llvm
except ImportError as error:
    raise ImportError(f"qwen3_numba needs numba ({error}): pip install numba, or qwen3[fast]; qwen3.py does the same "
                      "without it") from error

HERE = Path(__file__).resolve().parent


class Kernel:
    """A function of layers.py, compiled, at an address. Other threads run while it does."""

    def __init__(self, address: int, arguments: list):
        self.arguments = [kind if isinstance(kind, str) else (np.dtype(kind[0]), kind[1]) for kind in arguments]
        types = [ctypes.c_void_p, ctypes.c_void_p]  # where numba puts a result and an exception: there is neither
        for kind in self.arguments:
            n = 1 if isinstance(kind, str) else 5 + 2 * kind[1]
            types += [ctypes.c_double if kind == "float64" else ctypes.c_int64] * n
        unused = ctypes.create_string_buffer(16)
        self.call = partial(ctypes.CFUNCTYPE(ctypes.c_int32, *types)(address), unused, unused)

    def numbers(self, *args: Any) -> list[int | float]:
        """The arguments as numba's functions want them. TypeError unless arrays are contiguous and of the right types.

        An array is (owner, owner, size, itemsize, address, *shape, *strides).
        """
        numbers: list[int | float] = []
        for arg, kind in zip(args, self.arguments, strict=True):
            if isinstance(kind, str):
                numbers.append(float(arg) if kind == "float64" else int(arg))
            elif (arg.dtype, arg.ndim) != kind or not arg.flags.c_contiguous:
                raise TypeError(f"needs contiguous {kind[0]} with {kind[1]} dimensions, not {arg.dtype} {arg.shape}")
            else:
                numbers += (0, 0, arg.size, arg.itemsize, arg.ctypes.data, *arg.shape, *arg.strides)
        return numbers

    def __call__(self, *args: Any) -> None:
        self.call(*self.numbers(*args))


def kernel_folders() -> list[Path]:
    """Where compiled kernels may be kept: in NUMBA_CACHE_DIR; or with Python's compiled modules, or in the home."""
    if folder := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(folder)]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [HERE / "__pycache__", Path(caches) / "qwen3"]


@cache
def kernels() -> SimpleNamespace:
    """All kernels by their names: compiled by numba, or as they were kept when they were.

    numba could keep them itself, but then each start had to import it and its compiler, which takes longer than all
    else: so what it has compiled is kept as an object file, which llvmlite, the smaller part of numba, loads at once.
    """
    cpu = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {os.environ.get('QWEN3_INT8_PATH')}"
    files = (HERE / "layers.py", HERE / "vectors.py", HERE / "layout.py", NUMBA_VERSION)
    sources = [file.read_bytes() for file in files]
    made_from = hashlib.sha256(b"".join(sources) + f"{llvmlite.__version__} {cpu}".encode()).hexdigest()
    name = f"qwen3_kernels.{hashlib.sha256(cpu.encode()).hexdigest()[:8]}.o"
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


def read_kernels(file: Path, made_from: str) -> tuple[dict[str, list], bytes] | None:
    """What keep_kernels has written; None if there is no file, or a damaged one, or one made from something else."""
    try:
        header, code = file.read_bytes().split(b"\n", 1)
        about = json.loads(header)
        whole = about["made from"] == made_from and about["sha256"] == hashlib.sha256(code).hexdigest()
        return (about["arguments"], code) if whole else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep_kernels(name: str, made_from: str, arguments: dict[str, list], code: bytes) -> None:
    """Writes what machine_code has given into the first folder that takes it; if none does, each run compiles anew."""
    about = {"made from": made_from, "sha256": hashlib.sha256(code).hexdigest(), "arguments": arguments}
    for folder in kernel_folders():
        temporary = folder / f"{name}.{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(json.dumps(about).encode() + b"\n" + code)
                os.replace(temporary, folder / name)
                return
            finally:
                temporary.unlink(missing_ok=True)
