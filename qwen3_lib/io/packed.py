"""Folders of the fast engine's own packed weights, which load at once: written, found and read."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from qwen3 import DTYPES, InputError, Model, Source, Tensor, map_safetensors, to_float32
from qwen3_lib.io.errors import brief, parse_json
from qwen3_lib.io.gguf_file import gguf_json
from qwen3_lib.io.gguf_head import is_gguf
from qwen3_lib.io.hub import tokenizer_files
from qwen3_lib.io.tensors import BY_ROWS, EMBEDDING, PackedTensor
from qwen3_lib.io.pooling import VECTOR_FILES, module_files
from qwen3_lib.io.writing import checksum, write_folder, write_safetensors

SAVED_FORMATS = ("int8", "int4")
TOWER_FILE = "tower.safetensors"  # a tower's tensors as they were; U16 is bfloat16
VERSION = "5"  # of the packed formats, see qwen3_lib/kernels/layout.py
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja", *VECTOR_FILES)
BY_ROWS_DTYPES = {"F16": np.dtype("<f2"), "U16": np.dtype("<u2")}  # of an n-gram table; U16 is bfloat16
Expected = Callable[[str, tuple[int, ...], str], tuple[tuple[str, ...], tuple[int, ...]]]


def quantized_file(folder: Path) -> tuple[str, Path] | None:
    """(format, file) of a folder written by save_quantized, the format "int8" or "int4"; None for any other folder."""
    files = [(format, folder / f"model.{format}.safetensors") for format in SAVED_FORMATS]
    return next(((format, file) for format, file in files if file.is_file()), None)


class Saved(NamedTuple):
    """What such a folder's file says of its tensors, beside their bytes."""
    format: str
    file: Path
    sizes: dict[str, Any]  # name -> the shape of the matrix
    sums: dict[str, Any]  # name -> checksum; a folder of an earlier version has none

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises InputError if a tensor's bytes have changed.

        Experts and n-gram tables, which come into memory when they are chosen, aren't read for it.
        """
        later = ".experts." in name or BY_ROWS in name
        if self.sums and not later and self.sums.get(name) != checksum([tensor.data]):
            raise InputError(f"{self.file}: damaged: the checksum of {name} differs; quantize the model anew")


def saved_tensors(format: str, file: Path) -> tuple[dict[str, Tensor], Saved]:
    """The tensors in a file of save_quantized. Raises InputError for another version's, and for a damaged one."""
    stored = {name: tensor._replace(dtype=tensor.dtype.replace("U16", "BF16")) for name, tensor in map_safetensors(
        file, {"U8": np.dtype("u1"), "F32": np.dtype("<f4")} | BY_ROWS_DTYPES).items()}
    with safetensors.safe_open(file, framework="numpy") as opened:
        about = opened.metadata() or {}
    if (about.get("format"), about.get("version")) != (format, VERSION):
        raise InputError(f"{file}: written by another version of this program; quantize the model anew")
    sizes, sums = (parse_json(about.get(key, "{}"), str(file)) for key in ("sizes", "crc32"))
    if not isinstance(sizes, dict) or not isinstance(sums, dict):
        raise InputError(f"{file}: damaged; quantize the model anew")
    if EMBEDDING not in stored:  # with the names of an embedding model's own file
        sizes, sums = ({f"model.{name}": value for name, value in each.items()} for each in (sizes, sums))
    return stored, Saved(format, file, sizes, sums)


def saved_tower(folder: Path) -> dict[str, Tensor]:
    """The tensors of the tower, if there is one."""
    file = folder / TOWER_FILE
    found = map_safetensors(file, DTYPES | {"U16": np.dtype("<u2")}) if file.is_file() else {}
    return {name: tensor._replace(dtype=tensor.dtype.replace("U16", "BF16")) for name, tensor in found.items()}


def checked_saved(source: Source, shapes: dict[str, tuple[int, ...]], expected: Expected) -> dict[str, Tensor]:
    """The tensors. Raises InputError unless each has a dtype and the shape of those that expected(name, shape, format)
    gives."""
    saved, shapes = source.saved, dict(shapes)
    if "lm_head.weight" not in source.tensors and (source.config.tie_word_embeddings or source.embeds):
        del shapes["lm_head.weight"]

    def fits(name: str, tensor: Tensor) -> bool:
        dtypes, shape = expected(name, shapes[name], saved.format)
        return saved.sizes.get(name) == [*shapes[name]] and tensor.dtype in dtypes and tensor.shape == shape

    if source.tensors.keys() != shapes.keys() or not all(fits(*each) for each in source.tensors.items()):
        raise InputError(f"{source.path}: the quantized weights don't fit config.json; quantize the model anew")
    return source.tensors


def refuse_saved(source: Source) -> Any:
    """For the NumPy engine."""
    raise InputError(f"{source.path}: only the fast engine loads it (--fast, or load_model of qwen3_numba)")


def save_quantized(model: Model, folder: str | Path, format: str) -> None:
    """Writes a model that the fast engine loaded with quantize=format as a checkpoint of its own, which loads at once.

    The folder must not exist yet, and appears when all of it is written. Raises InputError when that can't be done.
    """
    if getattr(model.weights, "quantized", None) != format or format not in SAVED_FORMATS:
        raise InputError(f"{folder}: the model was not loaded as {brief(format)}")
    source = model.source
    if "score.weight" in source.heads:
        raise InputError(f"{model.path}: score.weight would be lost; quantize such a model while loading")
    if any(BY_ROWS in name and isinstance(tensor, PackedTensor) for name, tensor in source.tensors.items()):
        raise InputError(f"{model.path}: its packed n-gram table can't be saved; quantize Qwen's files in bf16")
    tensors = model.weights.tensors()
    sizes = {name: model.weights.shapes[name] for name in tensors}
    if source.bare:  # the names of an embedding model's own file
        tensors = {name.removeprefix("model."): array for name, array in tensors.items()}
        sizes = {name.removeprefix("model."): size for name, size in sizes.items()}
    sums = {name: checksum([array]) for name, array in tensors.items()}
    metadata = {"format": format, "version": VERSION, "sizes": json.dumps(sizes), "crc32": json.dumps(sums)}

    def fill(temporary: Path) -> None:
        modules = module_files(file.relative_to(model.path).as_posix() for file in model.path.glob("*/*"))
        for name in (*MODEL_FILES, *tokenizer_files(file.name for file in model.path.glob("*")), *modules):
            file = model.path / name
            (temporary / name).parent.mkdir(exist_ok=True)
            copied = file.is_file()
            if copied or name.endswith(".json") and is_gguf(model.path) and (value := gguf_json(model.path, name)):
                data = file.read_bytes() if copied else json.dumps(value, ensure_ascii=False).encode()
                (temporary / name).write_bytes(data)
        write_safetensors(temporary / f"model.{format}.safetensors", tensors, metadata)
        if tower := source.tower:
            write_safetensors(temporary / TOWER_FILE, {name: tensor.data if isinstance(tensor, Tensor) else
                                                       to_float32(tensor) for name, tensor in tower.items()}, {})

    write_folder(folder, fill)
