"""qwen3_kernels/layout.py: the space that kernels work in is as large as what they put there."""
import os
import signal
import subprocess
import sys

import pytest

from configs import ROOT
from qwen3_kernels import layout

pytestmark = pytest.mark.core

PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import qwen3_numba as fast
from guarded import guard_memory
guard_memory()
real = fast.space_size
fast.space_size = lambda *sizes: real(*sizes) - int(sys.argv[1])
model = fast.load_model({str(ROOT / "demo")!r})
fast.forward(model, list(range(70)), fast.KVCache(model.config))
print("as it should be")
"""


@pytest.mark.parametrize("group", [1, 2, 5, 16])
@pytest.mark.parametrize("width", [32, 128, 256])
def test_parts_of_the_space(group, width):
    """They follow each other, each as large as its array, and the last ends within the space."""
    for n in (1, 7, layout.TILE):
        ends = layout.tile_parts(group, n, width)
        sizes = [end - start for start, end in zip((0, *ends), ends)]
        assert sizes == [layout.POSITIONS * width, layout.POSITIONS * width, layout.TILE * layout.POSITIONS,
                         group * n * width, group * n, group * n]
        assert ends[-1] <= layout.space_size(group, width)
    assert layout.space_size(group, width) >= max(layout.PANELS * layout.DEPTH * layout.PANEL,
                                                  layout.PAIR * layout.LONG_PART)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
@pytest.mark.parametrize("missing, status", [(0, 0), (1, -signal.SIGSEGV), (1000, -signal.SIGSEGV)])
def test_memory_beyond_the_space_is_guarded(missing, status):
    """A single number too little, and the process crashes: the mode in which all tests can run finds that."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(missing)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (status, "" if status else "as it should be\n"), done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
def test_nothing_beyond_its_arrays_is_touched():
    """The tests of all kinds of caches, odd sizes among them, and of batches, with guarded memory."""
    if os.environ.get("QWEN3_CHECK_MEMORY"):
        pytest.skip("all tests run with guarded memory")
    tests = "test_logits or test_caches or test_batches or test_saved"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_qwen3_numba.py",
                           "-k", tests], capture_output=True, text=True, timeout=600, cwd=ROOT,
                          env=os.environ | {"QWEN3_CHECK_MEMORY": "1"})
    assert done.returncode == 0, done.stdout
