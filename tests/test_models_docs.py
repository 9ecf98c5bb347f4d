"""docs/models.md: the sizes follow from the official configs, the formats are those read."""
import math
import re

from configs import ROOT, needs_official_files
from published import official_configs
from qwen3 import tensor_shapes
from qwen3_lib.io.formats import METHODS
from qwen3_lib.io.gguf_formats import GGUF_FORMATS
from helpers import config_at
from qwen3_lib.kernels.layout import INT8, packed_shape
from qwen3_lib.kernels.packing import packed_form


def rows_of(page):
    lines = (ROOT / "docs" / page).read_text("utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def sizes_of(folder, file):
    """(the number of weights, those that a token reads, the bytes in int8 and in int4) of a config.json."""
    (folder / "config.json").write_text(file.read_text())
    config = config_at(folder)
    shapes = tensor_shapes(config)
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    n, experts = sum(counts.values()), sum(count for key, count in counts.items() if ".experts." in key)
    read = n - experts + experts * config.num_experts_per_tok // max(config.num_experts, 1)
    packed = [sum(4 * math.prod(shape) if len(shape) == 1 or packed_form(key, form) < INT8 else
                  math.prod(packed_shape(*shape, packed_form(key, form))) for key, shape in shapes.items())
              for form in ("int8", "int4")]
    return n, read, packed


@needs_official_files
def test_sizes(tmp_path):
    """Of every official config; variants have the row of their size."""
    sizes = {re.sub("^Qwen3-", "", name): row[1:] for row in rows_of("models.md") if row[0].startswith("Qwen3-")
             for name in row[0].split(", ")}
    for file in official_configs():
        name = re.sub("-(Base|FP8|Instruct-2507|Thinking-2507)", "", file.stem).removeprefix("Qwen3-")
        n, read, packed = sizes_of(tmp_path, file)
        expected = [4 * n, 2 * n, 2 * read, *packed]
        assert sizes[name] == [f"{n / 1e9:.2f} G", *(f"{size / 1e9:.1f}" for size in expected)]


def test_formats():
    formats = [row[0] for row in rows_of("models.md") if len(row) == 4]
    assert all(any(row.startswith(f"`{method}`") for row in formats) for method in METHODS)
    listed = next(row for row in formats if row.startswith("GGUF: ")).removeprefix("GGUF: ").split(", ")
    assert {*listed} == {form.name for form in GGUF_FORMATS.values()}
