"""Models in several GGUF files, written by the gguf package: the same as in one file, and what is wrong with parts."""
import json
import shutil

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE
from helpers import assert_one_line, logits_of, message_of, random_ids, run_main
from make_random_model import make_random_model
from test_qwen3_moe import MOE

pytest.importorskip("gguf")
from test_gguf_file import DEMO, write_gguf  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_random_model(BASE, tmp_path_factory.mktemp("model"), "float32")


def parts_in(folder):
    return sorted(folder.glob("*-of-*.gguf"))


@pytest.mark.parametrize("config", [BASE, MOE | {"moe_intermediate_size": 32}], ids=["dense", "mixture"])
def test_parts_are_the_whole_file(config, tmp_path):
    """From the name of any part, or of the folder; both engines."""
    path = make_random_model(config, tmp_path / "model", "float32")
    whole = write_gguf(path, tmp_path / "whole.gguf", "Q8_0")
    (tmp_path / "parts").mkdir()
    first = write_gguf(path, tmp_path / "parts/x.gguf", "Q8_0", each=9)
    parts, ids = parts_in(first.parent), random_ids(30)
    assert len(parts) > 3 and first == parts[0]
    for load in (qwen3.load_model, fast.load_model):
        expected = logits_of(load(whole), ids)
        for name in (first, parts[2], first.parent):
            assert np.array_equal(logits_of(load(name), ids), expected)


def test_the_bundled_model_in_parts(tmp_path, capfd):
    """Its tokenizer, template and sampling come from the first part; --list counts the bytes of all."""
    first = write_gguf(DEMO, tmp_path / "demo.gguf", "BF16", each=20)
    status, out, _ = run_main(capfd, "--model", tmp_path, "--temperature", 0, "What is the capital of France?")
    assert status == 0 and "Paris" in out
    rows = [json.loads(line) for line in run_main(capfd, "--list", "--json", "--model", tmp_path)[1].splitlines()]
    mine = [row for row in rows if row["path"].startswith(str(tmp_path))]
    assert [(row["path"], row["runs"]) for row in mine] == [(str(first), True)]
    assert mine[0]["bytes"] == sum(part.stat().st_size for part in parts_in(tmp_path))


def test_parts_that_are_missing_cut_or_mixed(model, tmp_path):
    def refused(folder, *words):
        assert_one_line(message_of(qwen3.load_model, folder), *words)

    def copy(name):
        return [*map(shutil.copy, parts, [tmp_path / name / part.name for part in parts])] if not (
            tmp_path / name).mkdir() else []

    for name, each in (("good", 9), ("other", 10)):
        (tmp_path / name).mkdir()
        write_gguf(model, tmp_path / name / "x.gguf", each=each)
    parts, others = parts_in(tmp_path / "good"), parts_in(tmp_path / "other")
    assert len(parts) == len(others) == 4

    for i in range(4):
        copy(f"missing{i}")[i].unlink()
        refused(tmp_path / f"missing{i}", f"x-0000{i + 1}-of-00004.gguf: this part is missing", "all 4")
    shutil.copy(others[1], copy("mixed")[1])
    refused(tmp_path / "mixed", "the parts have 34 tensors", "split.tensors.count = 35")
    shutil.copy(parts[2], copy("twice")[1])
    refused(tmp_path / "twice", "x-00002-of-00004.gguf", "split.no = 2")
    cut = copy("cut")[3]
    cut.write_bytes(cut.read_bytes()[:-100])
    refused(tmp_path / "cut", "x-00004-of-00004.gguf", "beyond the end of the file")
    (tmp_path / "alone").mkdir()
    for i, part in enumerate(parts[:2]):
        shutil.copy(part, tmp_path / "alone/x.gguf")
        refused(tmp_path / "alone", "x.gguf", f"split.no = {i} and split.count = 4 don't fit its name")
    whole = write_gguf(model, tmp_path / "x-00001-of-00001.gguf", each=99)
    assert np.array_equal(logits_of(whole, random_ids(9)), logits_of(parts[0], random_ids(9)))
