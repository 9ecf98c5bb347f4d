"""qwen3_kernels/layout.py: the space that kernels work in is as large as what they put there."""
import os
import signal
import subprocess
import sys

import pytest

from configs import BASE, ROOT
from make_random_model import make_random_model
from qwen3_kernels.layout import STRIP, VECTORS
from qwen3_kernels.vectors import MOST_FLOATS

pytestmark = pytest.mark.core
UNUSED = 16 * STRIP * (VECTORS - MOST_FLOATS)  # numbers, on a CPU with registers for fewer vectors

PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import qwen3_numba as fast
from guarded import guard_memory
guard_memory()
real = fast.own_space
fast.own_space = lambda *sizes: real(*sizes) - int(sys.argv[2])
model = fast.load_model(sys.argv[1], threads=1)
fast.forward(model, list(range(70)), fast.KVCache(model.config))
print("as it should be")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
@pytest.mark.parametrize("missing, status", [(0, 0), (UNUSED, 0), (UNUSED + 16, -signal.SIGSEGV),
                                             (UNUSED + 1000, -signal.SIGSEGV)])
def test_memory_beyond_the_space_is_guarded(missing, status, tmp_path):
    """64 bytes less than is used, and the process crashes: the mode in which all tests can run finds that."""
    model = make_random_model(BASE | {"hidden_size": 768, "intermediate_size": 1184}, tmp_path)  # needs all of it
    done = subprocess.run([sys.executable, "-c", PROGRAM, model, str(missing)], capture_output=True, text=True,
                          timeout=300)
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
