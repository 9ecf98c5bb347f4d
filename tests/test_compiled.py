"""qwen3_kernels/compiled.py: kernels are compiled once, kept, and refused where they can't work."""
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
import pexpect
import pytest

import qwen3
from configs import ROOT
from helpers import assert_one_line, run_fast
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
        stdout, stderr = process.communicate(timeout=1200)
        assert (process.returncode, stdout, stderr) == (0, "The capital of Peru is Lima.\n", "")
    done = run_fast(*command[1:], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.stdout == "The capital of Peru is Lima.\n"


# ----------------------------------------------------------------------------------------------------------------------
# Only what is whole, made from these sources, and nobody else's is executed
# ----------------------------------------------------------------------------------------------------------------------

ARGUMENTS = {"weight_row": [["int64", 1], "int64", ["float32", 1]], "other": ["float64", "int64"]}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file of kernels, in a folder of its own, and what it holds."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    code = np.random.default_rng(0).bytes(5000)
    compiled.keep_kernels("kernels.o", "these", ARGUMENTS, code)
    file = tmp_path / "kernels" / "kernels.o"
    assert compiled.read_kernels(file, "these") == (ARGUMENTS, code)
    return file


def test_every_flipped_bit_is_noticed(kept):
    """All bits of the checksum and the header, with the arguments in it, and 300 of the code."""
    whole = kept.read_bytes()
    start_of_code = len(whole) - 5000
    places = [*range(8 * start_of_code), *np.random.default_rng(0).integers(8 * start_of_code, 8 * len(whole), 300)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        kept.write_bytes(damaged)
        assert compiled.read_kernels(kept, "these") is None
    kept.write_bytes(whole)
    assert compiled.read_kernels(kept, "these") is not None


def test_a_type_that_does_not_exist_is_noticed(kept):
    whole = kept.read_bytes()
    assert b'"float64"' in whole
    kept.write_bytes(whole.replace(b'"float64"', b'"flnat64"'))
    assert compiled.read_kernels(kept, "these") is None


def test_files_that_are_cut_or_not_files(kept):
    whole = kept.read_bytes()
    for damaged in (b"", b"\n", b"\n\n", whole[:64], whole[:65], whole[:100], whole[:-1], whole + b"0", b"[]\n",
                    b"\xff\n{}\n"):
        kept.write_bytes(damaged)
        assert compiled.read_kernels(kept, "these") is None
    kept.unlink()
    os.mkfifo(kept)  # opening it would wait for ever
    assert compiled.read_kernels(kept, "these") is None
    kept.unlink()
    kept.mkdir()
    assert compiled.read_kernels(kept, "these") is None


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646, 0o602])
def test_a_file_that_others_may_write_is_not_executed(kept, mode):
    kept.chmod(mode)
    assert compiled.read_kernels(kept, "these") is None


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o703])
def test_a_folder_that_others_may_write_is_not_used(kept, mode):
    """Neither to read from, nor to write to."""
    kept.parent.chmod(mode)
    assert compiled.read_kernels(kept, "these") is None
    compiled.keep_kernels("new.o", "these", ARGUMENTS, b"code")
    assert [file.name for file in kept.parent.iterdir()] == ["kernels.o"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_another_user_is_not_executed(kept, what, monkeypatch):
    path = kept if what == "file" else kept.parent
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        name = "fstat" if what == "file" else "stat"
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, **options: os.stat_result(
            [12345 if i == 4 else x for i, x in enumerate(real(*args, **options)[:10])]))
    assert compiled.read_kernels(kept, "these") is None


def test_what_root_has_written_is_executed(kept, monkeypatch):
    """As an administrator installs it for all."""
    if os.getuid() != 0:
        pytest.skip("only root can write as root")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert compiled.read_kernels(kept, "these") is not None


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_kept_under_any_umask(umask, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    before = os.umask(umask)
    try:
        compiled.keep_kernels("kernels.o", "these", ARGUMENTS, b"code")
    finally:
        os.umask(before)
    assert compiled.read_kernels(tmp_path / "kernels" / "kernels.o", "these") == (ARGUMENTS, b"code")
    assert stat.S_IMODE((tmp_path / "kernels" / "kernels.o").stat().st_mode) & 0o022 == 0


def test_only_absolute_folders(monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "here")
    assert compiled.kernel_folders() == []
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/there")
    assert compiled.kernel_folders() == [Path("/there")]
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compiled.kernel_folders() == [compiled.HERE / "__pycache__"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and without an entry in passwd
    assert compiled.kernel_folders() == [compiled.HERE / "__pycache__"]


def test_nothing_is_loaded_from_the_current_folder(tmp_path):
    """Without HOME and an entry in passwd, "~/.cache" would lie there, with whatever somebody has put into it."""
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from qwen3_kernels import compiled
os.setuid(54321)
print(compiled.kernel_folders() == [compiled.HERE / "__pycache__"], os.path.expanduser("~"))
"""
    if os.getuid() != 0:
        pytest.skip("only root can become a user without an entry")
    unset = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path,
                          env=environment)
    assert done.stdout == "True ~\n", done.stderr


@pytest.mark.parametrize("name", ["layers.py", "vectors.py", "layout.py"])
def test_kernels_are_made_anew_when_a_source_changes(name, tmp_path, monkeypatch):
    before = compiled.fingerprint("cpu")
    room = shutil.copytree(compiled.HERE, tmp_path / "room")
    monkeypatch.setattr(compiled, "HERE", room)
    assert compiled.fingerprint("cpu") == before and compiled.fingerprint("other") != before
    with open(room / name, "a") as source:
        source.write("\n")
    assert compiled.fingerprint("cpu") != before


def test_sources_that_change_places_are_other_sources(tmp_path, monkeypatch):
    """A line that moves from the end of one file to the start of the next leaves the bytes of all in a row the same."""
    room = shutil.copytree(compiled.HERE, tmp_path / "room")
    monkeypatch.setattr(compiled, "HERE", room)
    before = compiled.fingerprint("cpu")
    first, second = (room / "layers.py").read_text(), (room / "vectors.py").read_text()
    (room / "layers.py").write_text(first[:-1])
    (room / "vectors.py").write_text(first[-1] + second)
    assert compiled.fingerprint("cpu") != before


def test_a_status_is_an_error():
    """numba's functions return one; nobody looked at it."""
    kernel = compiled.Kernel(0, ["int64"])
    kernel.call = lambda given: 1
    with pytest.raises(RuntimeError, match="status 1"):
        kernel(5)
    kernel.call = lambda given: 0
    kernel(5)


# ----------------------------------------------------------------------------------------------------------------------
# One line where it can't run
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", ["fast", "VNNI", "neon", "\x1b[31m", "x" * 5000])
def test_instructions_that_this_cpu_has_not(value, tmp_path):
    """An unknown name was a KeyError, and another CPU's instructions made LLVM abort."""
    if value == "neon" and llvm.get_host_cpu_features().get("dotprod"):
        value = "avx2"
    environment = os.environ | {"QWEN3_INT8_PATH": value, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = run_fast("--model", ROOT / "demo", "Hello", env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_line(done.stderr, "QWEN3_INT8_PATH", "plain")
    assert "\x1b" not in done.stderr and len(done.stderr) < 500


def test_little_memory_is_one_line():
    """So little, beyond what the program takes before, that llvmlite's library can't be loaded; and somewhat more."""
    program = "import numpy, tqdm, qwen3; print(4096 * int(open('/proc/self/statm').read().split()[0]))"
    environment, lines = os.environ | {"OPENBLAS_NUM_THREADS": "1"}, []
    base = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60,
                              env=environment).stdout)
    for limit in (base + 2**20 * extra for extra in (2, 20, 60, 90)):
        program = (f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
                   "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')")
        arguments = [ROOT / "qwen3_numba.py", "--model", ROOT / "demo", "Hello"]
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300,
                              env=environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert_one_line(done.stderr)
        lines.append(done.stderr)
    assert any("llvmlite, which can't be loaded" in line for line in lines), lines
