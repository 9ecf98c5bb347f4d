"""The models on this computer, for `--list`."""
import argparse
import json
import os
import re
from pathlib import Path

from qwen3 import BUNDLED, InputError
from qwen3_lib.app.terminal import write
from qwen3_lib.io.disk import available_memory, from_disk
from qwen3_lib.io.errors import brief
from qwen3_lib.io.gguf_head import is_gguf, part_names
from qwen3_lib.io.hub import cached_models, tokenizer_files
from qwen3_lib.io.models import open_model
from qwen3_lib.io.packed import quantized_file
from qwen3_lib.io.pooling import recipe_of


def print_models(args: argparse.Namespace) -> None:
    """Prints a table: name, size on disk, whether this program runs the model; with --json one object a line."""
    found = [("(bundled)", BUNDLED), *cached_models(), *([] if args.model is None else models_in(Path(args.model)))]
    rows = [(brief(name), size_on_disk(folder), *judged(folder)) for name, folder in found]
    if args.json:
        for (name, size, why, disk), (_, folder) in zip(rows, found):
            write(json.dumps({"name": name, "path": str(folder), "bytes": size, "runs": why is None, "why_not": why,
                              "from_disk": disk}, ensure_ascii=False) + "\n")
        return
    width = max(len(name) for name, *_ in rows)
    write(f"{'MODEL':{width}}  {'SIZE':>8}  RUNS\n")
    for (name, size, why, disk), (_, folder) in zip(rows, found):
        how = " (--fast)" * (quantized_file(folder) is not None) + (f"; {disk}" if disk else "")
        write(f"{name:{width}}  {readable_size(size):>8}  {f'yes{how}' if why is None else f'no: {why}'}\n")


def models_in(folder: Path) -> list[tuple[str, Path]]:
    """(name, folder) of a model's folder, or of each model in a folder. Raises InputError if there is none."""
    try:
        paths = [folder] if is_model(folder) else [path for path in sorted(folder.iterdir()) if is_model(path)]
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed: {error.strerror}") from error
    if not paths:
        raise InputError(f"{folder}: no model's folder, and none in it")
    return [(str(path), path) for path in paths]


def is_model(path: Path) -> bool:
    """True for a GGUF file, the first of several parts, and for a folder with a config.json."""
    return is_gguf(path) and part_names(path.name)[0] == path.name or (path / "config.json").is_file()


def size_on_disk(folder: Path) -> int:
    """The bytes of the files in a folder, or of a GGUF file with all its parts."""
    parts = (folder.with_name(name) for name in part_names(folder.name))
    return sum(file.stat().st_size for file in (*parts, *folder.glob("*")) if file.is_file())


def readable_size(n: int) -> str:
    """A number of bytes in words: 8.6 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"


def why_not(path: Path) -> str | None:
    """Why this program doesn't run the model in a folder, in a few words; None if its files fit."""
    return judged(path)[0]


def judged(path: Path) -> tuple[str | None, str | None]:
    """why_not(path), and how much memory is missing for all weights of a mixture; None if nothing is."""
    try:
        source = open_model(str(path), offline=True)
        if source.saved is not None:
            from qwen3_numba import stored_tensors  # here: numba is an extra
            stored_tensors(source)
        if source.embeds:
            recipe_of(source)
        disk = from_disk(source.config, source.tensors, available_memory())
        whole = is_gguf(path) or all((path / name).is_file() for name in tokenizer_files(os.listdir(path)))
        return None if whole else "no tokenizer.json", None if disk is None else str(disk)
    except (InputError, ImportError) as error:
        said = str(error).replace(str(path) + os.sep, "").removeprefix(f"{path}: ")
        return brief(re.split("[;(]", said, maxsplit=1)[0].strip(), 100), None
