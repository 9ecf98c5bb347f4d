"""Machine code that is kept between runs: taken only if it is whole, made from these sources, and nobody else's."""
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen3_kernels import compiled

ROOT = Path(__file__).resolve().parents[1]
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
    for damaged in (b"", b"\n", b"\n\n", whole[:64], whole[:65], whole[:100], whole[:-1], whole + b"0", b"[]\n", b"\xff\n{}\n"):
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
        real = os.fstat if what == "file" else os.stat
        name = "fstat" if what == "file" else "stat"
        monkeypatch.setattr(os, name, lambda *a, **k: os.stat_result([12345 if i == 4 else x for i, x in enumerate(real(*a, **k)[:10])]))
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
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
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
    """A line that moves from the end of one file to the start of the next changes the meaning, not the bytes in a row."""
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
    kernel.call = lambda *numbers: 1
    with pytest.raises(RuntimeError, match="status 1"):
        kernel(5)
    kernel.call = lambda *numbers: 0
    kernel(5)


# ----------------------------------------------------------------------------------------------------------------------
# One line where it can't run
# ----------------------------------------------------------------------------------------------------------------------

def run(*arguments, environment=(), **options):
    return subprocess.run([sys.executable, ROOT / "qwen3_numba.py", "--model", ROOT / "demo", *arguments], capture_output=True,
                          text=True, timeout=300, env=os.environ | dict(environment), **options)


def one_line(done):
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("value", ["fast", "VNNI", "neon", "\x1b[31m", "x" * 5000])
def test_instructions_that_this_cpu_has_not(value, tmp_path):
    """An unknown name was a KeyError, and another CPU's instructions made LLVM abort."""
    from llvmlite import binding
    if value == "neon" and binding.get_host_cpu_features().get("dotprod"):
        value = "avx2"
    line = one_line(run("Hello", environment={"QWEN3_INT8_PATH": value, "NUMBA_CACHE_DIR": str(tmp_path)}))
    assert "QWEN3_INT8_PATH" in line and "plain" in line and "\x1b" not in line and len(line) < 500


def limits():
    """Sizes of the address space, in MB, around that at which llvmlite can't be loaded, found by trying."""
    import resource
    program = "import numpy, tqdm, qwen3, json; print(open('/proc/self/statm').read().split()[0])"
    pages = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60).stdout)
    base = pages * resource.getpagesize()
    return [base + extra * 2**20 for extra in (2, 20, 60, 90)]


def test_little_memory_is_one_line():
    """So little that llvmlite's library can't be loaded."""
    lines = []
    for limit in limits():
        program = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); sys.argv = sys.argv[1:]; " \
                  "runpy.run_path(sys.argv[0], run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", program, ROOT / "qwen3_numba.py", "--model", ROOT / "demo", "Hello"],
                              capture_output=True, text=True, timeout=300, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
        lines.append(one_line(done))
    assert any("llvmlite, which can't be loaded" in line for line in lines), lines
