"""qwen3_lib/kernels/products.py: a product's ways give the same bits, and the fastest is found and kept."""
import json
import shutil

import numpy as np
import pytest

import qwen3_numba as fast
from configs import ROOT
from helpers import run_fast
from packed import FORMATS, stored
from qwen3_lib.kernels import build, products
from qwen3_lib.kernels.build import kernel
from qwen3_lib.kernels.layout import BF16, F16, Job, own_space, padded, table, vector_size
from qwen3_lib.kernels.team import Team
from qwen3_lib.kernels.vectors import AT_ONCE, MANY, ONE, ways

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", FORMATS)
def test_every_way_gives_the_same_bits(name):
    form, rng, team, results = FORMATS[name], np.random.default_rng(0), Team(2), {}
    data, weight = stored(rng.standard_normal((70, 1100)).astype(np.float32), form)
    width = padded(1100, 64)
    x, packed = np.zeros((31, width), np.float32), rng.integers(0, 255, (31, vector_size(width)), np.uint8)
    x[:, :1100] = rng.standard_normal((31, 1100))
    packed[:, width:width + width // 8].view(np.float32)[:] = rng.standard_normal((31, width // 32))
    own = np.zeros((2, own_space(0, 0, width)), np.float32)
    for count, numbers in ((ONE, [1]), (AT_ONCE, [2, 3, 5, 8]), (MANY, [9, 16, 31])):
        for way in ways(form, count):
            for n in numbers if way.asks else numbers[-1:]:  # each product compiles for a second
                addresses, out = np.zeros(products.SHAPE, np.int64), np.zeros((n, 96), np.float32)
                products.fill(addresses[products.PRODUCT, form], form, n, [way if some == count else ways(form, some)[0] for some in range(3)])
                arrays = np.array(weight), x[:n], packed[:n], out, own, addresses
                fields = table(arrays)
                team.run(kernel("multiply"), np.array(Job(0, 0, 0, 0, fields.ctypes.data, 0)))
                for t in range(n):  # whatever the company, too
                    assert (results.setdefault(t, out[t, :70].copy()) == out[t, :70]).all(), (way, n)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file of choices, in a folder of its own."""
    monkeypatch.setattr(products, "place", lambda: (tmp_path, "these sources"))
    caches = products.choices, products.prepare, products.prepare_all, products.prepare_attention
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "choices.json"
    for cached in caches:
        cached.cache_clear()


def timed(monkeypatch, fastest):
    """From now on `measured` finds the way with this number 1.5 times as fast as the others."""
    monkeypatch.setattr(products, "measured", lambda form, count, known, team, columns: [
        (15e9 if i == fastest % len(known) else 10e9, 1e9) for i in range(len(known))])


def test_a_choice_is_measured_until_two_runs_agree(kept, monkeypatch):
    """One measurement under load doesn't stick."""
    for fastest, agreeing in ((1, False), (0, False), (1, False), (1, True)):
        timed(monkeypatch, fastest)
        found = list(products.tune([BF16], None))
        assert sum(each.chosen for each in found) == 3
        assert products.is_settled([BF16]) == agreeing
        assert products.chosen_way(BF16, ONE) == ways(BF16, ONE)[fastest]
    assert not products.is_settled([BF16, F16])


def test_a_small_gain_keeps_the_default(kept, monkeypatch):
    monkeypatch.setattr(products, "measured", lambda form, count, known, *_: [
        ((10 + 0.2 * i) * 1e9, 1e9) for i in range(len(known))][:2] + [(1e9, 1e9)] * (len(known) - 2))
    list(products.tune([BF16], None))
    assert products.chosen_way(BF16, ONE) == ways(BF16, ONE)[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"made from": "others", "bf16 0": [1, 2]}',
                                  '{"made from": "these sources", "bf16 0": [99, 2]}',
                                  '{"made from": "these sources", "bf16 0": ["1", 2]}'])
def test_choices_that_do_not_fit_are_ignored(kept, text):
    kept.write_text(text)
    assert products.chosen_way(BF16, ONE) == ways(BF16, ONE)[0]


def test_tuning_in_a_command(tmp_path):
    """It prints the ways with their speeds, and the choice is found by the next command."""
    for code in build.place()[0].glob("*.o"):  # what earlier tests have compiled
        (tmp_path / code.parent.name).mkdir(mode=0o700, exist_ok=True)
        shutil.copy(code, tmp_path / code.parent.name)
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "QWEN3_TUNE": "on"}
    for _ in range(2):
        done = run_fast("--tune", env=environment)
        assert done.returncode == 0 and done.stdout.count("chosen") == 6 and "GB/s" in done.stdout
    choices = json.loads(next(tmp_path.glob("*/choices.json")).read_text())
    assert {"bf16 0", "bf16 1", "bf16 2", "f16 0", "f16 1", "f16 2"} < choices.keys()


def test_an_answer_is_not_changed_by_tuning():
    model = fast.load_model(ROOT / "demo", threads=2)
    ids = list(range(40))
    before = fast.forward(model, ids, fast.KVCache(model.config))
    list(fast.tune(model))
    np.testing.assert_array_equal(fast.forward(model, ids, fast.KVCache(model.config)), before)
