"""qwen3_lib/kernels/products.py: the passes of the answers teach which way of a product is the fastest."""
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import qwen3_numba as fast
from configs import ROOT
from qwen3_lib.kernels import build, products
from qwen3_lib.kernels.layout import BF16
from qwen3_lib.kernels.products import RARELY, Choice
from qwen3_lib.kernels.vectors import ONE, ways

pytestmark = pytest.mark.core


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file of choices, in a folder of its own."""
    monkeypatch.setattr(products, "place", lambda: (tmp_path, "these sources"))
    caches = products.choices, products.can_keep
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "choices.json"
    for cached in caches:
        cached.cache_clear()


class Machine:
    """Passes in ways that take so many units of the fastest one's time; context and load make them longer.

    The load comes and goes, and one pass in 20 waits for a core, up to as long as it works.
    """
    def __init__(self, times, seed):
        self.times, self.rng, self.passes = times, np.random.default_rng(seed), 0

    def answer(self, choice, n):
        """-> the units that n passes take by themselves."""
        units = 0.0
        for _ in range(n):
            self.passes += 1
            way = choice.next_way("decode")
            taken = self.times[choice.best if way is None else way]
            load = 1 + self.passes / 1000 + 0.3 * np.sin(self.passes / 70)
            waits = 1 + self.rng.random() * (self.rng.random() < 0.05)
            if way is not None:
                choice.note("decode", way, taken * load * waits * np.exp(self.rng.normal(0, 0.03)))
            units += taken
        return units


@pytest.mark.parametrize("times", [(1.1, 1.0), (1.0, 1.1), (1.3, 1.0, 1.4, 1.25), (1.0, 1.05, 1.1, 1.5),
                                   (1.2, 1.15, 1.1, 1.0)])
def test_the_fastest_way_is_found_in_the_first_200_tokens(times):
    """Or one that is at most 5 % slower: in 97 of 100 answers, for less than 3 % of their time."""
    right, costs = 0, []
    for seed in range(100):
        choice, machine = Choice([[] for _ in times]), Machine(times, seed)
        costs.append(machine.answer(choice, 200) / 200)
        right += times[choice.best] <= 1.05
    assert right >= 97 and np.mean(costs) < 1 / 0.97


def test_a_choice_made_among_noise_is_corrected_later():
    """A settled choice whose way becomes slow is exchanged, though rounds are rare."""
    choice, machine = Choice([[], []]), Machine((1.0, 1.2), 0)
    machine.answer(choice, 200)
    assert choice.best == 0
    machine.times = (1.2, 1.0)
    assert machine.answer(choice, 8 * RARELY) > 1.2 * 3 * RARELY  # it isn't exchanged at once
    machine.answer(choice, 40 * RARELY)
    assert choice.best == 1


def test_a_round_compares_equal_passes():
    """Passes of other numbers of tokens may take ten times as long, and teach nothing about each other."""
    choice, rng = Choice([[], []]), np.random.default_rng(0)
    for _ in range(400):
        n = int(rng.integers(1, 6))
        if (way := choice.next_way(n)) is not None:
            choice.note(n, way, 10.0 ** n * (1.2, 1.0)[way] * np.exp(rng.normal(0, 0.03)))
    assert choice.best == 1 and choice.slower(0) - choice.slower(1) == pytest.approx(np.log(1.2), abs=0.05)


def learn(model, n):
    """n tokens, one after the other -> their logits."""
    cache = fast.KVCache(model.config)
    return np.array([fast.forward(model, [i % 50], cache) for i in range(n)])


def test_learning_changes_no_bit_and_is_kept(kept):
    """And a model that the CPU's cache holds teaches nothing: its way would be wrong for others."""
    model = fast.load_model(ROOT / "demo", threads=2)
    plain = learn(model, 80)
    assert not model.weights.learns and not any(choice.rounds for choice in products.choices().values())
    model.weights.learns = True
    np.testing.assert_array_equal(learn(model, 80), plain)
    choice = products.choices()[BF16, ONE]
    assert choice.rounds > 0 and all(choice.seen)
    products.keep_choices()
    products.choices.cache_clear()
    again = products.choices()[BF16, ONE]
    assert again is not choice
    assert (again.seen, again.rounds, again.best) == (choice.seen, choice.rounds, choice.best)


REST = [[0.1]] * 4
GOOD = {"made from": "these sources", "bf16, one vector": [[[0.0], [-0.2], *REST], 16, 1]}


@pytest.mark.parametrize("change, best", [
    ({}, 1), ({"made from": "others"}, 0)] + [({"bf16, one vector": one}, 0) for one in (
    None, [], 7, "x", [[[0.0]], 16, 0], [[[0.0], [-0.2], *REST], 16, 6], [[[0.0], ["1"], *REST], 16, 1],
    [[[0.0], [-0.2] * 17, *REST], 16, 1], [[[0.0], [float("nan")], *REST], 16, 1],
    [[[0.0], [-0.2], *REST], -1, 1], [[0.0, -0.2, 0.1, 0.1, 0.1, 0.1], 16, 1])])
def test_choices_that_do_not_fit_are_ignored(kept, change, best):
    assert len(ways(BF16, ONE)) == 6
    kept.write_text(json.dumps(GOOD | change))
    assert products.choices()[BF16, ONE].best == best


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '{"made from": 1}', "\udcff"])
def test_a_damaged_file_of_choices_is_ignored(kept, text):
    kept.write_bytes(text.encode(errors="surrogateescape"))
    assert products.choices()[BF16, ONE].best == 0


LEARNING = """
import sys
from qwen3_lib.kernels import memory
memory.last_cache = lambda: 0  # so that the bundled model teaches something
import qwen3_numba
sys.exit(qwen3_numba.main(["--no-think", "--max-tokens", "60", "--temperature", "1", "Tell me a story about a fox."]))
"""


def test_a_command_ends_with_its_answer(tmp_path):
    """What it has learned is kept, and takes no time of its own."""
    for code in build.place()[0].glob("*.o"):  # what earlier tests have compiled
        (tmp_path / code.parent.name).mkdir(mode=0o700, exist_ok=True)
        shutil.copy(code, tmp_path / code.parent.name)
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    waits = []
    for _ in range(3):
        for file in tmp_path.glob("*/choices.json"):
            file.unlink()
        with subprocess.Popen([sys.executable, "-c", LEARNING], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, env=environment) as process:
            last = 0.0
            while os.read(process.stdout.fileno(), 1 << 16):
                last = time.monotonic()
            _, errors = process.communicate(timeout=100)
            waits.append(time.monotonic() - last)
        assert process.returncode == 0 and b"measuring" not in errors
        assert json.loads(next(tmp_path.glob("*/choices.json")).read_text()).keys() > {"made from"}
    assert min(waits) < 0.3
