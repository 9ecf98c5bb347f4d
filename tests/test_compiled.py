"""qwen3_kernels/compiled.py: kernels are compiled once, kept, and refused where they can't work."""
import os
import re
import shutil
import subprocess
import sys

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
import pexpect
import pytest

import qwen3
from configs import ROOT
from helpers import run_fast
from qwen3_kernels import compiled
from qwen3_kernels import layers as kernels

pytestmark = pytest.mark.core


@pytest.mark.compiles
def test_no_place_for_the_kernels(tmp_path):
    """No folder can be made, neither beside the program nor in the home: they are compiled, with a bar; it works."""
    for file in [*ROOT.glob("*.py"), *ROOT.glob("qwen3_*/*.py")]:
        (tmp_path / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    for name in ("__pycache__", "qwen3_kernels/__pycache__", "cache"):
        (tmp_path / name).write_text("a file where a folder should be")
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    arguments = [str(tmp_path / "qwen3_numba.py"), "--model", str(ROOT / "demo"), "--no-think",
                 "What is the capital of Peru?"]
    terminal = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=300,
                             env=environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    shown = terminal.read()
    terminal.close()
    assert terminal.exitstatus == 0 and "compiling, only this once" in shown
    assert len(set(re.findall(r"\d+/\d+", shown))) > 5  # the bar moves
    assert shown.split("\r")[-2:] == ["The capital of Peru is Lima.", "\n"]


def test_kernels_are_kept(tmp_path, monkeypatch):
    """In the first folder that takes them; whatever else lies there is not taken for them."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled, "kernel_folders", lambda: [tmp_path / "file" / "no", tmp_path / "new" / "yes"])
    arguments, code = {"weight_row": [["int64", 1], "int64", ["float32", 1]]}, os.urandom(5000)
    compiled.keep_kernels("kernels.o", "these", arguments, code)
    file = tmp_path / "new" / "yes" / "kernels.o"
    assert [path.name for path in file.parent.iterdir()] == ["kernels.o"]
    assert compiled.read_kernels(file, "these") == (arguments, code)
    assert compiled.read_kernels(file, "those") is None and compiled.read_kernels(tmp_path / "none", "these") is None
    whole = file.read_bytes()
    for damaged in (b"", whole[:50], whole[:-1], whole + b"0", whole[:-1] + bytes([whole[-1] ^ 1]), b"{}\n" + code,
                    b"[]\n", code):
        file.write_bytes(damaged)
        assert compiled.read_kernels(file, "these") is None


def test_kernels_take_only_what_they_are_made_for():
    for wrong in (np.zeros(32), np.zeros((1, 32), np.float32), np.zeros(64, np.float32)[::2]):
        with pytest.raises(TypeError, match="contiguous float32"):
            compiled.kernels().weight_row(np.zeros(5, np.int64), 0, wrong)
    with pytest.raises(ValueError):
        compiled.kernels().weight_row(np.zeros(5, np.int64), 0)


def test_cpus_and_settings_that_do_not_do(monkeypatch):
    monkeypatch.setattr(kernels, "FEATURES", {})
    if llvm.get_default_triple().startswith("x86"):
        with pytest.raises(qwen3.InputError, match="F16C"):
            kernels.machine_code()
    monkeypatch.setattr(kernels.numba.config, "DISABLE_JIT", 1)
    with pytest.raises(qwen3.InputError, match="NUMBA_DISABLE_JIT"):
        kernels.machine_code()


def test_what_cannot_be_compiled_is_one_line_with_the_versions(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("LLVM IR parsing error\n<string>:1:36: error: expected type\n" + 1000 * "~")

    monkeypatch.setattr(kernels, "machine_code", fail)
    monkeypatch.setattr(compiled, "kernel_folders", lambda: [tmp_path])
    with pytest.raises(qwen3.InputError) as refused:
        compiled.kernels.__wrapped__()
    message, llvm_version = str(refused.value), ".".join(map(str, llvm.llvm_version_info))
    assert len(message.splitlines()) == 1 and len(message) < 600
    for words in (f"numba {numba.__version__} ", f"llvmlite {llvmlite.__version__} ", f"LLVM {llvm_version}",
                  f"NumPy {np.__version__}", "RuntimeError: LLVM IR parsing error <string>:1:36: error: expected type",
                  "install the newest numba, or use qwen3.py"):
        assert words in message
    assert not any(tmp_path.iterdir())


def test_kernels_that_need_numba_to_run_are_refused(monkeypatch):
    """They would crash in the next process, which loads them without numba."""
    @kernels.called_from_python
    def allocates(x):
        x[:] = x[::-1].copy()

    monkeypatch.setattr(kernels, "KERNELS", {allocates: (kernels.F1,)})
    with pytest.raises(qwen3.InputError, match="NRT_"):
        kernels.machine_code()


@pytest.mark.compiles
def test_a_full_disk_and_two_at_once(tmp_path):
    """Both compile, because the cache is empty, and one can't even write it."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
    program = "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [ROOT / "qwen3_numba.py", "--model", ROOT / "demo", "--no-think", "What is the capital of Peru?"]
    processes = [subprocess.Popen([sys.executable, "-c", start + program, *command], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True,
                                  env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)})
                 for start in (limit, "import runpy, sys; ", "import runpy, sys; ")]
    for process in processes:
        stdout, stderr = process.communicate(timeout=300)
        assert (process.returncode, stdout, stderr) == (0, "The capital of Peru is Lima.\n", "")
    done = run_fast(*command[1:], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.stdout == "The capital of Peru is Lima.\n"
