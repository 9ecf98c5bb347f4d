"""Files and folders that are written whole or not at all: beside the target, which then gets their name."""
import contextlib
import json
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen3_lib.io.errors import InputError
from qwen3_lib.io.progress import progress

SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "U16", "uint8": "U8", "int64": "I64"}


def write_whole(name: str | Path, write: Callable[[BinaryIO], Any], mode: int = 0o666, alone: bool = False,
                durable: bool = True) -> None:
    """Calls write(file) on a temporary file beside `name`, which then replaces it. `mode`: of a file, less the umask.

    alone: no other process writes this file, so the temporary file has a fixed name: after a kill, it is used again
    durable: the file survives a loss of power; without, its reader must notice a damaged file
    Raises InputError when the file can't be written; an earlier file of that name is then unchanged.
    """
    if "\0" in os.fspath(name):
        raise InputError(f"{ascii(str(name))}: not the name of a file")
    try:
        target = os.path.realpath(name)
        if os.fspath(name).endswith(os.sep) or (os.path.lexists(target) and not os.path.isfile(target)):
            raise InputError(f"{name}: not a regular file, so nothing is written to it")
        temporary = f"{target}.{'job' if alone else secrets.token_hex(4)}.tmp"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                write(file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    except (OSError, UnicodeEncodeError) as error:
        raise InputError(f"{name}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def check_place(name: str | Path) -> None:
    """Raises InputError if nothing can be written where `name` stands: for a place that is needed much later."""
    if not str(name):
        raise InputError("the name of the file to write is empty")
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(name))).close()
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise InputError(f"{name}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def check_new_folder(name: str | Path) -> None:
    """Raises InputError unless write_folder can make a folder of this name."""
    if os.path.lexists(name):
        raise InputError(f"{name}: exists already; give the name of a new folder")
    check_place(name)


def write_folder(name: str | Path, fill: Callable[[Path], Any]) -> None:
    """Calls fill(folder) on a temporary folder beside `name`, which then gets that name.

    Raises InputError when `name` exists already or can't be written.
    """
    check_new_folder(name)
    temporary = Path(f"{Path(name)}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        fill(temporary)
        os.rename(temporary, name)
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def checksum(arrays: Iterable[np.ndarray]) -> str:
    """CRC-32 over the bytes of the arrays."""
    value = 0
    for array in arrays:
        for part in [array] if array.flags.c_contiguous else array:  # part by part, which takes less memory
            value = zlib.crc32(np.ascontiguousarray(part).data, value)
    return f"{value:08x}"


def header_of(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """What the header of a safetensors file says of its tensors."""
    header, offset = dict[str, Any](), 0
    for key, array in tensors.items():
        header[key] = {"dtype": SAFETENSORS_DTYPES[array.dtype.name], "shape": array.shape,
                       "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    return header


def write_safetensors(name: str | Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, whole or not at all, a row of each array after the other: no second copy in memory."""
    head = json.dumps({"__metadata__": metadata} | header_of(tensors)).encode()
    head += b" " * ((-8 - len(head)) % 64)  # the numbers begin where a line of the CPU's cache does

    def write(file: BinaryIO) -> None:
        file.write(len(head).to_bytes(8, "little") + head)
        total = sum(array.nbytes for array in tensors.values())
        with progress(description="writing", total=total, unit="B", unit_scale=True) as bar:
            for array in tensors.values():
                for part in [array] if array.flags.c_contiguous else array:
                    bar.update(file.write(np.ascontiguousarray(part).data))

    write_whole(name, write)


def write_json(name: str | Path, value: Any, private: bool = False) -> None:
    """Writes a value as JSON that people can read, whole or not at all. A `private` file is its user's alone."""
    data = (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")
    write_whole(name, lambda file: file.write(data), 0o600 if private else 0o666)
