"""Files that are written whole or not at all: into a temporary file beside the target, which then takes its name."""
import contextlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen3_io.errors import InputError


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
        for array in tensors.values():
            for part in [array] if array.flags.c_contiguous else array:
                file.write(np.ascontiguousarray(part).data)

    write_whole(name, write)


def write_json(name: str | Path, value: Any) -> None:
    """Writes a value as JSON that people can read, whole or not at all."""
    data = (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")
    write_whole(name, lambda file: file.write(data))
