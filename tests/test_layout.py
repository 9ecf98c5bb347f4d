"""qwen3_lib/kernels/layout.py: the space that kernels work in is as large as what they put there."""
import os
import signal
import subprocess
import sys

import pytest

from configs import BASE, ROOT
from make_random_model import make_random_model

pytestmark = pytest.mark.core

PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import qwen3_numba as fast
from guarded import guard_memory
from qwen3_lib.kernels import memory
guard_memory()
real = memory.own_space
memory.own_space = lambda *sizes: real(*sizes) - int(sys.argv[2])
model = fast.load_model(sys.argv[1], threads=1)
fast.forward(model, list(range(70)), fast.KVCache(model.config))
print("as it should be")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
@pytest.mark.parametrize("missing, status", [(0, 0), (16, -signal.SIGSEGV), (1000, -signal.SIGSEGV)])
def test_memory_beyond_the_space_is_guarded(missing, status, tmp_path):
    """64 bytes less than is used, and the process crashes: the mode in which all tests can run finds that."""
    sizes = {"hidden_size": 768, "intermediate_size": 1216}  # one thread uses all of its space
    model = make_random_model(BASE | sizes, tmp_path, "float32")
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
