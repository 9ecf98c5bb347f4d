"""Files that are written whole or not at all: into a temporary file beside the target, which then takes its name."""
import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen3_io.errors import InputError

try:
    import fcntl
except ImportError:  # Windows: what a killed process leaves remains there
    fcntl = None  # type: ignore[assignment]


def write_whole(name: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    """Calls write(file) on a temporary file beside `name`, then gives it that name: all of it is there, or nothing.

    Raises InputError when it can't be written; what was there before is then as it was.
    """
    try:
        target = Path(os.path.realpath(name))
        temporary = target.with_name(f".qwen3-{secrets.token_hex(8)}.tmp")
    except ValueError as error:  # "/", a NUL character, a lone surrogate
        raise InputError(f"{ascii(str(name))}: not the name of a file") from error
    if os.fspath(name).endswith(os.sep) or (os.path.lexists(target) and not os.path.isfile(target)):
        raise InputError(f"{name}: not a regular file, so nothing is written to it")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "U16", "uint8": "U8", "int64": "I64"}


def write_safetensors(name: str | Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, whole or not at all, a row of each array after the other: no second copy in memory."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for key, array in tensors.items():
        header[key] = {"dtype": SAFETENSORS_DTYPES[array.dtype.name], "shape": array.shape,
                       "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * ((-8 - len(head)) % 64)  # the numbers begin where a line of the CPU's cache does

    def write(file: BinaryIO) -> None:
        file.write(len(head).to_bytes(8, "little") + head)
        from tqdm import tqdm  # here, because importing it takes time
        bar = tqdm(desc="writing", total=offset, unit="B", unit_scale=True, delay=1, leave=False, disable=None)
        with bar:
            for array in tensors.values():
                for part in [array] if array.flags.c_contiguous else array:
                    bar.update(file.write(np.ascontiguousarray(part).data))

    write_whole(name, write)


def write_json(name: str | Path, value: Any) -> None:
    """Writes a value as JSON that people can read, whole or not at all."""
    data = (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")
    write_whole(name, lambda file: file.write(data))


# ----------------------------------------------------------------------------------------------------------------------
# Folders
#
# A process holds a lock on its temporary folder while it lives, and a lock ends with its process. So a temporary folder
# that can be locked was left by a process that is dead, and is removed by the next one that writes beside it.
# ----------------------------------------------------------------------------------------------------------------------

def write_folder(name: str | Path, fill: Callable[[Path], Any]) -> None:
    """Calls fill(folder) on a temporary folder beside `name`, then gives it that name: all of it is there, or nothing.

    Raises InputError, which names `name` and no temporary file, when it exists already or can't be written.
    """
    target = Path(name)
    try:
        if os.path.lexists(target):
            raise InputError(f"{name}: exists already; give the name of a new folder")
        remove_abandoned(target.parent)
        temporary, lock = locked_folder(target.parent)
        try:
            fill(temporary)
            os.rename(temporary, target)
        except InputError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{ascii(str(name))}: not the name of a folder") from error  # a NUL character


def locked_folder(parent: Path) -> tuple[Path, int]:
    """(a new temporary folder, a file descriptor that holds the lock on it)."""
    while True:
        folder = parent / f".qwen3-{secrets.token_hex(8)}.tmp"
        folder.mkdir()
        try:
            lock = lock_folder(folder)
        except FileNotFoundError:  # taken for an abandoned one before it was locked
            continue
        if lock is not None:
            return folder, lock


def lock_folder(folder: Path) -> int | None:
    """A file descriptor that holds the lock on a folder; None if another process holds it.

    Raises OSError if the folder is gone. Some network file systems have no locks on folders: there, nothing is locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        return descriptor
    try:
        os.stat(folder)  # removed between opening and locking?
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(parent: Path) -> None:
    """Removes the temporary folders that dead processes have left in `parent`."""
    if fcntl is None:
        return
    for folder in parent.glob(".qwen3-*.tmp"):
        with contextlib.suppress(OSError):
            if folder.is_dir() and not folder.is_symlink():
                descriptor = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(descriptor)
