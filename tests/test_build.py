"""qwen3_lib/kernels/build.py: kernels are compiled once, kept, and refused where they can't work."""
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
import pytest

import qwen3
from configs import ROOT
from helpers import assert_one_line
from qwen3_lib.kernels import build, compile, cpu, fields, layers, layout, products

pytestmark = pytest.mark.core
COMMAND = ["--model", ROOT / "demo", "--no-think", "What is the capital of Peru?"]
COMPILING = "compiling the fast engine for this CPU: a few seconds, once for models of this kind\n"


def run_fast(*arguments, **options):
    return subprocess.run([sys.executable, ROOT / "qwen3_numba.py", *arguments], capture_output=True, text=True,
                          timeout=300, **options)


ONLY_ONE = """
import sys, time
from pathlib import Path
from qwen3_lib.kernels import build, objects

log, announce = Path(sys.argv[1]), build.announce

def note(word):
    with open(log, "a") as file:
        file.write(word + "\\n")

def told(folder):
    announce(folder)
    note("waits")

def compiled(groups):
    note("compiled")
    while log.read_text().count("waits") < 3:
        time.sleep(0.01)
    code = "define i32 @%s(ptr %%a, ptr %%b, i64 %%c, i64 %%d, i64 %%e) { ret i32 0 }"
    return [objects.machine().emit_object(build.llvm.parse_assembly(code % build.symbol(name))) for name, in groups]

build.compiled_kernels, build.announce = compiled, told
build.kernel("delta.mix_states")(build.np.zeros(1, int), 0)
build.kernel("layers.attend_heads")(build.np.zeros(1, int), 0)
"""


def test_of_several_processes_one_compiles(tmp_path):
    """Those that come meanwhile wait for it and take its kernels. Each says once that this takes a while."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "new"), "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen([sys.executable, "-c", ONLY_ONE, tmp_path / "log"], env=environment, text=True,
                                  stderr=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        assert (process.communicate(timeout=100)[1], process.returncode) == (COMPILING, 0)
    assert (tmp_path / "log").read_text().count("compiled") == 2


def test_a_place_that_keeps_no_kernels_is_named(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    for folder in (None, tmp_path / "file" / "12345678"):
        build.announce.__wrapped__(folder)
        assert_one_line(capfd.readouterr().err, "at each start", f"in {tmp_path / 'file'};", "set NUMBA_CACHE_DIR")


def test_cpus_and_settings_that_do_not_do(tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "FEATURES", {})
    if llvm.get_default_triple().startswith("x86"):
        with pytest.raises(qwen3.InputError, match="F16C"):
            compile.machine_code(["layers.attend_heads"])
    done = run_fast(*COMMAND, env={"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DISABLE_JIT": "1"})
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith(COMPILING)
    assert_one_line(done.stderr.removeprefix(COMPILING), "NUMBA_DISABLE_JIT")


def test_what_cannot_be_compiled_is_one_line_with_the_versions(monkeypatch):
    def fail(names):
        raise RuntimeError("LLVM IR parsing error\n<string>:1:36: error: expected type\n" + 1000 * "~")

    monkeypatch.setattr(compile, "machine_code", fail)
    with pytest.raises(SystemExit) as refused:
        compile.main(["attend_heads"])
    message, llvm_version = str(refused.value), ".".join(map(str, llvm.llvm_version_info))
    assert len(message.splitlines()) == 1 and len(message) < 600
    for words in (f"numba {numba.__version__} ", f"llvmlite {llvmlite.__version__} ", f"LLVM {llvm_version}",
                  f"NumPy {np.__version__}", "RuntimeError: LLVM IR parsing error <string>:1:36: error: expected type",
                  "install the newest numba, or take NumPy: --no-fast"):
        assert words in message


def test_kernels_that_need_numba_to_run_are_refused(monkeypatch):
    """They would crash in the next process, which loads them without numba."""
    @fields.compiled
    def draws(record, number, _):
        fields.x(record)[0, 0] = np.random.random()

    monkeypatch.setattr(layers, "attend_heads", draws)
    with pytest.raises(qwen3.InputError, match="numba_get_np_random_state"):
        compile.machine_code(["layers.attend_heads"])


# ---- Only what is whole, made from these sources, and nobody else's is executed --------------------------------------

CODE = np.random.default_rng(0).bytes(5000)


@pytest.fixture
def kept(tmp_path):
    """A file of kernels, in a folder of its own."""
    file = tmp_path / "kernels" / "kernels.o"
    build.keep_code(file, "these", CODE)
    assert build.read_code(file, "these") == CODE
    return file


def test_damage_is_noticed(kept):
    """All bits of the checksum and the header, 300 of the code, and files that are cut or not files."""
    assert build.read_code(kept, "those") is None and build.read_code(kept.with_name("none"), "these") is None
    whole = kept.read_bytes()
    start = 8 * (len(whole) - len(CODE))
    for place in [*range(start), *np.random.default_rng(0).integers(start, 8 * len(whole), 300)]:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        kept.write_bytes(damaged)
        assert build.read_code(kept, "these") is None
    for damaged in (b"", b"\n", b"\n\n", whole[:64], whole[:65], whole[:-1], whole + b"0", b"\xff\n{}\n"):
        kept.write_bytes(damaged)
        assert build.read_code(kept, "these") is None
    kept.unlink()
    os.mkfifo(kept)  # opening it would wait for ever
    assert build.read_code(kept, "these") is None


@pytest.mark.parametrize("what, mode", [("file", 0o666), ("file", 0o664), ("file", 0o602), ("folder", 0o777),
                                        ("folder", 0o775), ("folder", 0o1777), ("folder", 0o703)])
def test_what_others_may_write_is_not_executed(kept, what, mode):
    """And nothing is written to such a folder."""
    (kept if what == "file" else kept.parent).chmod(mode)
    assert build.read_code(kept, "these") is None
    build.keep_code(kept.with_name("new.o"), "these", CODE)
    assert kept.with_name("new.o").exists() == (what == "file")


@pytest.mark.parametrize("user, executed", [(0, True), (12345, False)])
def test_only_what_belongs_to_this_user_or_root_is_executed(kept, user, executed, monkeypatch):
    """What root has written is installed by an administrator, for all."""
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for name in ("stat", "fstat"):
        monkeypatch.setattr(os, name, lambda *args, real=getattr(os, name), **options: os.stat_result(
            [user if i == 4 else x for i, x in enumerate(real(*args, **options)[:10])]))
    assert (build.read_code(kept, "these") == CODE) is executed


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_kept_under_any_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        build.keep_code(tmp_path / "kernels" / "kernels.o", "these", CODE)
    finally:
        os.umask(before)
    assert build.read_code(tmp_path / "kernels" / "kernels.o", "these") == CODE


def test_where_they_are_kept(monkeypatch, tmp_path):
    """In one place, and never in a folder below the current one, which could be anybody's."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    for given, expected in (("/there", Path("/there")), ("here", None), ("", Path("/caches/qwen3"))):
        monkeypatch.setenv("NUMBA_CACHE_DIR", given)
        assert build.kernel_folder() == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/mia")
    assert build.kernel_folder() == Path("/home/mia/.cache/qwen3")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and without an entry in passwd
    assert build.kernel_folder() is None
    (tmp_path / "file").touch()
    build.keep_code(tmp_path / "file" / "kernels.o", "these", CODE)  # no place for a folder: nothing is kept


def test_kernels_are_made_anew_when_a_source_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "KERNELS", shutil.copytree(build.KERNELS, tmp_path / "room"))
    found = {build.identity()}
    files = [*(tmp_path / "room").glob("*.py")]
    for file in files:
        with open(file, "a") as source:
            source.write("\n")
        found.add(build.identity())
    assert len(found) == 1 + len(files)
    assert tmp_path / "room" / "build.py" in files  # which has what is compiled together


def test_kernels_of_another_cpu_or_version_are_others(tmp_path, monkeypatch):
    (tmp_path / "_version.py").write_text("another version of numba")
    found = [build.identity()]
    for change in (lambda: monkeypatch.setenv("QWEN3_INT8_PATH", "plain"),
                   lambda: monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap({"sse2": True})),
                   lambda: monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "another"),
                   lambda: monkeypatch.setattr(llvmlite, "__version__", "0.1"),
                   lambda: monkeypatch.setattr(build, "NUMBA_VERSION", tmp_path / "_version.py")):
        change()
        found.append(build.identity())
    assert len({*found}) == 6


# ---- One line where it can't run -------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", ["fast", "neon", "\x1b[31m" + "x" * 5000])
def test_instructions_that_this_cpu_has_not(value, tmp_path):
    """An unknown name was a KeyError, and another CPU's instructions made LLVM abort."""
    if value == "neon" and cpu.FEATURES.get("neon"):
        value = "avx2"
    environment = os.environ | {"QWEN3_INT8_PATH": value, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = run_fast("--model", ROOT / "demo", "Hello", env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_line(done.stderr, "QWEN3_INT8_PATH", "plain")
    assert "\x1b" not in done.stderr and len(done.stderr) < 500


def test_compiling_ahead_leaves_no_product_to_compile(monkeypatch):
    """Whatever the number of vectors and of queries. Here nothing is compiled: the names of products are collected."""
    names = set[tuple]()
    monkeypatch.setattr(products, "function", lambda *about: names.add(about) or 1)
    monkeypatch.setattr(products, "functions_for", products.functions_for.__wrapped__)
    monkeypatch.setattr(products, "make_kernels", lambda *_: None)
    monkeypatch.setattr(products, "measure", lambda: None)
    monkeypatch.setattr(products, "read_code", lambda *_: b"")
    products.compile_all()
    ahead = names.copy()
    for form, n in itertools.product(layout.STORABLE, range(1, 700)):
        products.functions_for(((form, n),), () if layout.is_packed(form) else ((form, n),))
    assert len(ahead) > 100 and names == ahead
