"""The head of a GGUF file: magic, version, two counts, the metadata (name, type, value), a table of the tensors.

    is_gguf(path)           whether a path is such a file
    read_gguf(file)         its metadata and tensors, or those of all parts of a model

The tensors' bytes follow the head.
"""
import functools
import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.gguf_formats import GGUFFormat, format_of
from qwen3_lib.io.tensors import map_file

MAGIC = b"GGUF"

# A value of the metadata: its type's number -> its struct format. 8 is a text, 9 an array.
STRUCT_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT_TYPE, ARRAY = 8, 9


class TensorEntry(NamedTuple):
    """A tensor of the file: its format, its shape (rows first), and its bytes [..., bytes per row]."""
    form: GGUFFormat
    shape: tuple[int, ...]
    data: np.ndarray
    mapping: mmap.mmap


class GGUF(NamedTuple):
    """The contents of a file, its tensors under the names that GGUF gives them."""
    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def is_gguf(path: Path) -> bool:
    """True for a file with GGUF's suffix or its first bytes."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as opened:
            return path.suffix.lower() == ".gguf" or opened.read(4) == MAGIC
    except OSError:
        return False


# ---- Reading the head ------------------------------------------------------------------------------------------------

def invalid(file: Path, why: str) -> InputError:
    return InputError(f"{file}: not a valid GGUF file: {why}; download it again")


class Reader:
    """Takes values from the bytes of a file, one after the other. Raises InputError at its end."""

    def __init__(self, file: Path, data: mmap.mmap):
        self.file, self.data, self.at = file, data, 0

    def skip(self, size: int) -> int:
        """Moves on by so many bytes -> where they begin."""
        start = self.at
        if size > len(self.data) - start:
            raise invalid(self.file, f"it ends at byte {len(self.data)}, within its head")
        self.at += size
        return start

    def number(self, form: str) -> Any:
        return struct.unpack_from("<" + form, self.data, self.skip(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.skip(size)
        return self.data[start:start + size].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == TEXT_TYPE:
            return self.text()
        if kind in STRUCT_CODES:
            return self.number(STRUCT_CODES[kind])
        kind, count = (self.number("I"), self.number("Q")) if kind == ARRAY else (kind, 0)
        if kind == TEXT_TYPE:
            self.at = self.skip(8 * count)  # a text has 8 bytes at least, so a wrong count is noticed here
            return [self.text() for _ in range(count)]
        if kind not in STRUCT_CODES:
            raise invalid(self.file, f"a value of the unknown type {kind}")
        dtype = np.dtype("<" + STRUCT_CODES[kind])
        start = self.skip(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)


def plain(value: Any) -> Any:
    """A value of the metadata as in JSON: an array as a list, a float32 as the shortest number that rounds to it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) else value


PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """The names of all parts of a model, from the name of one, such as a-00002-of-00003.gguf; else only this name."""
    found = PART.fullmatch(name)
    count = int(found[3]) if found else 0
    return [f"{found[1]}-{i + 1:05}-of-{count:05}{found[4]}" for i in range(count)] if found and count else [name]


def read_gguf(file: Path) -> GGUF:
    """The contents of a GGUF file, or of a model in parts, checked. Raises InputError for damaged or missing ones."""
    files = tuple(file.with_name(name) for name in part_names(file.name))
    if missing := next((each for each in files if not each.is_file()), None):
        raise InputError(f"{missing}: this part is missing; the model needs all {len(files)} in one folder")
    return joined_parts(files, tuple((each.stat().st_size, each.stat().st_mtime_ns) for each in files))


@functools.lru_cache(maxsize=2)  # a model, and its tower, is read in several steps: config, tokenizer, tensors
def joined_parts(files: tuple[Path, ...], _states: tuple[tuple[int, int], ...]) -> GGUF:
    """The contents of all parts of a model, or of its only file. The first part has the metadata."""
    parts, tensors = [parsed_file(file) for file in files], dict[str, TensorEntry]()
    for i, part in enumerate(parts):
        number, count = (plain(part.metadata.get(f"split.{key}", 0)) for key in ("no", "count"))
        if number != i or count not in ((0, 1) if len(files) == 1 else (len(files),)):
            raise InputError(f"{part.file}: split.no = {brief(number)} and split.count = {brief(count)} don't fit its "
                             "name; parts are called like NAME-00001-of-00003.gguf, this one with split.no = 0")
        tensors |= part.tensors
    total = plain(parts[0].metadata.get("split.tensors.count", len(tensors)))
    if len(tensors) != total and len(files) > 1:
        raise InputError(f"{files[0]}: the parts have {len(tensors)} tensors, not split.tensors.count = "
                         f"{brief(total)}; take all parts from one model")
    return parts[0]._replace(tensors=tensors)


def parsed_file(file: Path) -> GGUF:
    """The contents of a file, checked."""
    mapping = map_file(file)
    reader = Reader(file, mapping)
    if mapping[:4] != MAGIC:
        raise InputError(f"{file}: not a GGUF file, despite its name: it doesn't begin with GGUF")
    reader.skip(4)
    if (version := reader.number("I")) not in (2, 3):
        raise InputError(f"{file}: version {version} of GGUF is not supported, only 2 and 3 are")
    n_tensors, n_values = reader.number("Q"), reader.number("Q")
    if max(n_tensors, n_values) > len(mapping) // 8:  # each takes more than 8 bytes
        raise invalid(file, f"{n_tensors} tensors and {n_values} values don't fit into {len(mapping)} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        name = reader.text()
        metadata[name] = reader.value(reader.number("I"))
    entries = []
    for _ in range(n_tensors):
        name, n_sizes = reader.text(), reader.number("I")
        if n_sizes > 4:
            raise invalid(file, f"{brief(name)} has {n_sizes} dimensions")
        shape = tuple(reader.number("Q") for _ in range(n_sizes))[::-1]
        entries.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment % 8:
        raise invalid(file, f"general.alignment = {brief(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in entries:
        try:
            form = format_of(kind)
        except InputError as error:
            raise InputError(f"{file}: {brief(name)} has {error}") from error
        if not shape or shape[-1] % form.numbers:
            raise invalid(file, f"{brief(name)} has shape {list(shape)}, but {form.name} has blocks of {form.numbers} "
                                "numbers")
        row_size = shape[-1] // form.numbers * form.size
        if (n_bytes := math.prod(shape[:-1]) * row_size) > len(mapping) - start - offset:
            raise invalid(file, f"{brief(name)} reaches beyond the end of the file")
        if name in tensors or offset % 8 or n_bytes == 0:
            raise invalid(file, f"{brief(name)} is there twice, empty or not aligned")
        data = np.frombuffer(mapping, np.uint8, n_bytes, start + offset).reshape(*shape[:-1], row_size)
        tensors[name] = TensorEntry(form, shape, data, mapping)
    return GGUF(file, metadata, tensors)
