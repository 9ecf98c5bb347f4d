"""Files that are written whole or not at all: into a temporary file beside the target, which then takes its name."""
import contextlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen3_io.errors import InputError
from qwen3_io.progress import progress

try:
    import fcntl
except ImportError:  # Windows: temporary files of killed processes remain
    fcntl = None  # type: ignore[assignment]

TEMPORARY = re.compile(r"\.qwen3-[0-9a-f]{16}\.tmp")


def write_whole(name: str | Path, write: Callable[[BinaryIO], Any], mode: int = 0o666) -> None:
    """Calls write(file) on a temporary file beside `name`, then gives it that name: all of it is there, or nothing.

    `mode`: who may read and write it, less the umask. Temporary files of killed processes in the folder are removed
    first.
    Raises InputError when the file can't be written; an earlier file of that name is then unchanged.
    """
    try:
        target = Path(os.path.realpath(name))
        target.with_name("x")
    except ValueError as error:  # "/", a NUL character, a lone surrogate
        raise InputError(f"{ascii(str(name))}: not the name of a file") from error
    if os.fspath(name).endswith(os.sep) or (os.path.lexists(target) and not os.path.isfile(target)):
        raise InputError(f"{name}: not a regular file, so nothing is written to it")
    sweep(target.parent)
    temporary = None
    try:
        file = new_temporary(target, mode)
        temporary = file.name
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows renames no open file; elsewhere it stays locked until it has its name
            os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def new_temporary(target: Path, mode: int) -> BinaryIO:
    """A new file beside `target`, open and locked for as long as it stays open."""
    while True:
        temporary = target.with_name(f".qwen3-{secrets.token_hex(8)}.tmp")
        file = open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode))
        if fcntl is None:
            return file
        with contextlib.suppress(OSError):  # a file system without locks: then sweep() gets none, and removes nothing
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else it was swept between its creation and its lock
            return file
        file.close()


def sweep(folder: Path) -> None:
    """Removes the temporary files that killed processes have left in a folder: those that nobody holds locked."""
    with contextlib.suppress(OSError):
        for path in [entry.path for entry in os.scandir(folder) if TEMPORARY.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                remove_unlocked(path)


def remove_unlocked(path: str) -> None:
    """Removes a temporary file. Raises OSError if a process still writes it, or if that can't be told."""
    if fcntl is None:
        os.unlink(path)  # Windows refuses that while the file is open
        return
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(descriptor)


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
        with progress(description="writing", total=offset, unit="B", unit_scale=True) as bar:
            for array in tensors.values():
                for part in [array] if array.flags.c_contiguous else array:
                    bar.update(file.write(np.ascontiguousarray(part).data))

    write_whole(name, write)


def write_json(name: str | Path, value: Any, private: bool = False) -> None:
    """Writes a value as JSON that people can read, whole or not at all. A `private` file is its user's alone."""
    data = (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")
    write_whole(name, lambda file: file.write(data), 0o600 if private else 0o666)


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
