"""docs/models.md keeps its word: its sizes are those of the official configs, its tables those of the program."""
import math
import re

import pytest

from configs import ROOT, SHARED
from published import official_configs
from qwen3_io.checkpoint import ARCHITECTURES, METHODS, read_config, tensor_shapes
from qwen3_io.gguf_file import FORMATS
from qwen3_kernels.layout import INT8, packed_shape
import qwen3_numba as fast

PAGE = (ROOT / "docs/models.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]


with_configs = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no official configs at {SHARED}")


def bytes_of(config) -> tuple[int, int, list[int]]:
    """(the number of weights, those that a token reads, the bytes in int8 and in int4) of a config's fields."""
    shapes = tensor_shapes(config)
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    n, experts = sum(counts.values()), sum(count for key, count in counts.items() if ".experts." in key)
    read = n - experts + experts * config["num_experts_per_tok"] // max(config["num_experts"], 1)
    packed = [sum(4 * math.prod(shape) if len(shape) == 1 or fast.packed_form(key, form) < INT8 else
                  math.prod(packed_shape(*shape, fast.packed_form(key, form))) for key, shape in shapes.items())
              for form in ("int8", "int4")]
    return n, read, packed


@with_configs
def test_sizes(tmp_path):
    """Of every official config; variants have the row of their size."""
    sizes = {re.sub("^Qwen3-", "", name): row[1:] for row in ROWS if row[0].startswith("Qwen3-")
             for name in row[0].split(", ")}
    for file in official_configs():
        name = re.sub("-(Base|FP8|Instruct-2507|Thinking-2507)", "", file.stem).removeprefix("Qwen3-")
        (tmp_path / "config.json").write_text(file.read_text())
        n, read, packed = bytes_of(read_config(tmp_path))
        expected = [4 * n, 2 * n, 2 * read, *packed]
        assert sizes[name] == [f"{n / 1e9:.2f} G", *(f"{size / 1e9:.1f}" for size in expected)]


@with_configs
def test_sizes_of_a_machine(tmp_path):
    """docs/scaling.md: each number of its first table, up to the digits that it has."""
    names, _, weights, positions, slots = [
        [cell.strip() for cell in line.strip("|").split("|")[1:]]
        for line in (ROOT / "docs/scaling.md").read_text("utf-8").splitlines() if line.startswith("|")][:5]
    assert names == ["0.6B", "4B", "8B"]
    for name, sizes, position, together in zip(names, weights, positions, slots):
        (tmp_path / "config.json").write_text((SHARED / f"configs/Qwen3-{name}.json").read_text())
        config = read_config(tmp_path)
        n, _, packed = bytes_of(config)
        kept = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
        assert position == f"{kept:,}"
        for text, size in zip([*sizes.split(", "), together], [2 * n, *packed, 16 * 2048 * kept], strict=True):
            assert text == f"{size / 1e9:.{len(text.partition('.')[2])}f}"


def test_tables():
    kinds = {row[1]: row for row in ROWS if row[1:2] and row[1].strip("`") in ARCHITECTURES}
    assert kinds.keys() == {f"`{name}`" for name in ARCHITECTURES}
    for name, about in ARCHITECTURES.items():
        runs = ["yes" if engine in about.engines else "no" for engine in ("qwen3.py", "qwen3_numba.py")]
        assert kinds[f"`{name}`"] == [about.title, f"`{name}`", *runs]
    weights = [row[0] for row in ROWS if len(row) == 4]
    assert all(any(row.startswith(f"`{method}`") for row in weights) for method in METHODS)
    listed = next(row for row in weights if row.startswith("GGUF: ")).removeprefix("GGUF: ").split(", ")
    assert {*listed} == {form for form, _, _ in FORMATS.values()}
