"""qwen3_lib/kernels/layout.py: the space that kernels work in is as large as what they put there."""
import signal
import subprocess
import sys

import pytest

from configs import BASE, CASES, HYBRID, HYBRID_MOE, ROOT
from make_random_model import make_random_model
from test_qwen3_moe import MOE

pytestmark = [pytest.mark.core, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")]

PROGRAM = f"""
import itertools, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import numpy as np
from guarded import guard_memory
from packed import load_model
from qwen3 import NextTokens, compute
from qwen3_lib.kernels import memory
guard_memory()
missing, threads, n_forms, *folders = sys.argv[1:]
real = memory.own_space
memory.own_space = lambda *sizes: real(*sizes) - int(missing)
forms = zip((None, None, "int8", "int4", "q5_1", "q4_1", "q4_0", "q8_1"),
            ("f32", "bf16", "int8", "f16", "bf16", "f16", "f32", "f16"))
for folder, (quantize, kv_dtype) in itertools.product(folders, [*forms][:int(n_forms)]):
    model = load_model(folder, quantize, int(threads), kv_dtype)
    caches = [model.engine.new_cache(model.config) for _ in range(3)]
    for counts in (70, 1, 260), (1, 1, 1), (9, 1, 2):
        compute(model, [NextTokens(cache, np.arange(n) % 300, n) for cache, n in zip(caches, counts)])
print("as it should be")
"""


def run(*arguments):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True,
                          timeout=300)
    notes = [line for line in done.stderr.splitlines() if not line.startswith("compiling the fast engine")]
    return done.returncode, done.stdout, notes


def test_memory_beyond_the_space_is_guarded(tmp_path):
    """64 bytes less than is used, and the process crashes: the mode in which all tests can run finds that."""
    sizes = {"hidden_size": 1536, "intermediate_size": 1600}  # an eighth of down_proj's rows fills a thread's strip
    model = make_random_model(BASE | sizes, tmp_path, "float32")
    assert run(0, 1, 2, model) == (0, "as it should be\n", [])
    assert run(16, 1, 2, model) == (-signal.SIGSEGV, "", [])


def test_nothing_beyond_its_arrays_is_touched(tmp_path):
    """All formats of weights and caches, odd sizes among them, and experts, in a batch, with guarded memory."""
    shapes = BASE, CASES["odd sizes"][0], CASES["group of 5, head_dim 24"][0], MOE, HYBRID, HYBRID_MOE
    folders = [make_random_model(config, tmp_path / str(i), "bfloat16") for i, config in enumerate(shapes)]
    assert run(0, 3, 8, *folders) == (0, "as it should be\n", [])
