"""The models on this computer, as `--list` shows them."""
import argparse
import json
import os
import re
from pathlib import Path

from qwen3 import BUNDLED, NUMPY, Engine
from qwen3_app.terminal import write
from qwen3_io.checkpoint import (architecture_of, checked_weights, map_quantized, model_file, quantized_file,
                                 read_config)
from qwen3_io.errors import InputError, brief, some
from qwen3_io.gguf_file import is_gguf
from qwen3_io.hub import cached_models, check_blobs, resolve_model


def print_models(args: argparse.Namespace, engine: Engine) -> None:
    """Prints a table of names, sizes on disk, and whether this program runs them; with --json an object per line."""
    found = [("(bundled)", BUNDLED), *cached_models(), *([] if args.model is None else models_in(Path(args.model)))]
    rows = [(brief(name), size_on_disk(folder), why_not(folder, engine)) for name, folder in found]
    if args.json:
        for (name, size, why), (_, folder) in zip(rows, found):
            write(json.dumps({"name": name, "path": str(folder), "bytes": size, "runs": why is None, "why_not": why},
                             ensure_ascii=False) + "\n")
        return
    width = max(len(name) for name, _, _ in rows)
    write(f"{'MODEL':{width}}  {'SIZE':>8}  RUNS\n")
    for name, size, why in rows:
        write(f"{name:{width}}  {readable_size(size):>8}  {'yes' if why is None else f'no: {why}'}\n")


def named_model(args: argparse.Namespace) -> str | None:
    """The name of the model that --model or $QWEN3_MODEL gives, or None."""
    return args.model if args.model is not None else os.environ.get("QWEN3_MODEL") or None


def verify_cached(args: argparse.Namespace, engine: Engine) -> None:
    """Compares the files of a model in the hub's cache with their checksums. Raises InputError that names damage."""
    folder = resolve_model(named_model(args) or str(BUNDLED), args.offline)
    report_damage(folder, check_blobs(folder))


def report_damage(folder: Path, damaged: list[str]) -> None:
    """Prints that all checksums are right. Raises InputError that names the damaged parts."""
    if damaged:
        raise InputError(f"{folder}: damaged: {some(damaged)}; delete and download or quantize it again")
    write(f"{brief(folder)}: all checksums are right\n")


def models_in(folder: Path) -> list[tuple[str, Path]]:
    """(name, folder) of a model's folder, or of each model one level below. Raises InputError where there is none."""
    try:
        alone = (folder / "config.json").exists() or is_gguf(folder)
        folders = [folder] if alone else sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed: {error.strerror}") from error
    if not (models := [(str(path), path) for path in folders
                       if is_gguf(path) or (path / "config.json").is_file()]):
        raise InputError(f"{folder}: no model's folder, and none in it")
    return models


def size_on_disk(folder: Path) -> int:
    """The bytes of a folder's files, or of a GGUF file; a file with several names, or links, counts once."""
    if folder.is_file():
        return os.path.getsize(folder)
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.stat(os.path.join(parent, name))
            except OSError:  # a link to nothing
                continue
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def readable_size(n: int) -> str:
    """A number of bytes in words: 8.6 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"


def why_not(folder: Path, engine: Engine) -> str | None:
    """Why this program doesn't run the model in a folder, in a few words; None if its config and its tensors fit."""
    try:
        config = read_config(folder)
        kind, this = architecture_of(config), "qwen3.py" if engine is NUMPY else "qwen3_numba.py"
        if this not in kind.engines:
            return f"{kind.title}, which {' or '.join(kind.engines)} runs"
        if (quantized := quantized_file(folder)) is not None:
            map_quantized(quantized[1])  # raises InputError for a damaged file
            return "quantized by qwen3_numba.py, which runs it" if engine is NUMPY else None
        checked_weights(folder, config)
        return None if is_gguf(folder) or model_file(folder, "tokenizer.json") else "no tokenizer.json"
    except InputError as error:
        said = str(error).replace(str(folder) + os.sep, "").removeprefix(f"{folder}: ")
        return brief(re.split("[;(]", said, maxsplit=1)[0].strip(), 100)
