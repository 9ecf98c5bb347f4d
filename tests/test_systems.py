"""Systems on which the project's tests don't run: what they lack is taken away here, and all else works as before."""
import ctypes
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import qwen3_numba
from configs import BASE, FRANCE, PARIS, ROOT
from helpers import assert_one_line, memory_while_loading
from make_random_model import make_random_model
from qwen3_lib.app import terminal
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.io.cores import available_cpus

ABSENT = {  # names of Linux that Python doesn't have there
    "macOS": ["os.sched_getaffinity", "os.sched_setaffinity", "os.posix_fadvise", "mmap.MADV_HUGEPAGE"],
    "Windows": ["os.sched_getaffinity", "os.sched_setaffinity", "os.posix_fadvise", "os.fork", "os.register_at_fork",
                "os.getuid", "os.sysconf", "mmap.MADV_DONTNEED", "mmap.MADV_HUGEPAGE", "signal.SIGHUP", "fcntl",
                "termios", "resource"]}
PROGRAM = """
import importlib, os, pathlib, sys
import subprocess, tempfile  # which use some of the names themselves
names, prompts, out = sys.argv[1].split(), *sys.argv[2:4]
for name in names:
    module, _, attribute = name.partition(".")
    if attribute:
        vars(importlib.import_module(module)).pop(attribute, None)
    else:
        sys.modules[name] = None
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: not str(path).startswith("/proc") and exists(path)
from qwen3_lib.app.cli import main
from qwen3_batch import main as batch
main(["--chat", "--no-think"])  # reads all of stdin
main(["--no-think", "--stats", sys.argv[4]])
main(["--no-think", "--fast", "--threads", "2", sys.argv[4]])
batch([prompts, "--out", out, "--no-think", "--fast", "--memory", "50MB"])
batch([prompts, "--out", out + "2", "--no-think"])
"""


@pytest.mark.parametrize("system", ABSENT)
def test_names_that_a_system_lacks(system, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"prompt": FRANCE}) + "\n")
    done = subprocess.run([sys.executable, "-c", PROGRAM, " ".join(ABSENT[system]), prompts, out, FRANCE], cwd=ROOT,
                          input=f"{FRANCE}\n", capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, PARIS * 3), done.stderr
    assert json.loads(out.read_text())["text"] + "\n" == PARIS
    lines = done.stderr.splitlines()
    assert ("peak memory" in lines[0]) == (system == "macOS"), lines
    if system == "Windows":
        assert_one_line(lines[-1], "free memory is unknown", "--memory")
    else:
        assert (tmp_path / "answers.jsonl2").read_text() == out.read_text()


@pytest.mark.parametrize("sysctl, expected", [("echo 3", 3), ("echo unknown oid >&2; exit 1", 8), (None, 8)])
def test_the_performance_cores_of_a_mac(sysctl, expected, tmp_path, monkeypatch):
    if sysctl:
        (tmp_path / "sysctl").write_text(f'#!/bin/sh\n[ "$*" = "-n hw.perflevel0.physicalcpu" ] || exit 2\n{sysctl}\n')
        (tmp_path / "sysctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: "max 100000\n")  # no limit by a cgroup
    assert available_cpus() == expected


def test_a_console_and_a_pipe_of_windows(monkeypatch):
    """A pipe has the code page of the system there, and a console shows escape sequences unless it is told to obey."""
    modes, out = {}, io.BytesIO()
    kernel32 = SimpleNamespace(GetStdHandle=lambda stream: 100 - stream, SetConsoleMode=modes.__setitem__)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "cp1252"))

    def work() -> int:
        print("法国", flush=True)
        return 0

    assert terminal.guarded(work) == 0
    assert out.getvalue().decode("utf-8").split() == ["法国"]
    assert modes == {111: 7, 112: 7}  # ENABLE_VIRTUAL_TERMINAL_PROCESSING, 4, among them


PROGRAMS = "qwen3.py", "qwen3_numba.py", "qwen3_batch.py", "qwen3_embed.py", "qwen3_inspect.py", "qwen3_server.py"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("change, words", [
    ("import typing; del typing.Self", ("this is Python", "3.11 or newer")),  # as in Python 3.10
    ("sys.modules['numpy'] = None", ("numpy", "pip install numpy safetensors"))])
def test_pythons_that_do_not_do(program, change, words):
    source = f"import runpy, sys\n{change}\nsys.argv = [{program!r}]\nrunpy.run_path({program!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    assert_one_line(done.stderr, f"{program}: ", "it needs", *words)


# ---- Small machines --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def large_embedding(memory):
    """Nearly all of this model is its embedding, never in memory twice; the rows are long."""
    config = BASE | {"vocab_size": 12_000, "hidden_size": 3072, "num_hidden_layers": 1, "intermediate_size": 512}
    return make_random_model(config, memory / "large embedding")


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from Linux's /proc")
@pytest.mark.parametrize("quantize, bytes_per_weight", [(None, 2), ("int8", 1.0625), ("int4", 0.6875), ("numpy", 4)])
def test_loading_takes_little_more_than_the_weights(quantize, bytes_per_weight, large_embedding):
    peak, own, kept = memory_while_loading(large_embedding, quantize)
    assert kept == pytest.approx(12_000 * 3072 * bytes_per_weight, rel=0.15)
    # NumPy touches a whole tensor's pages.
    mapped = (large_embedding / "model.safetensors").stat().st_size if quantize == "numpy" else 0
    assert peak < 1.1 * kept + mapped + 2**23  # each of 8 threads has copies of some rows
    assert own < (1.1 * kept if quantize else 0) + 2**23  # without quantizing, the weights stay in the file


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from Linux's /proc")
def test_a_saved_model_stays_in_its_file(large_embedding, memory):
    save_quantized(qwen3_numba.load_model(large_embedding, "int4", tokenizer=False), memory / "saved", "int4")
    peak, own, kept = memory_while_loading(memory / "saved", None)
    assert kept > 0.95 * (memory / "saved/model.int4.safetensors").stat().st_size
    assert own < 2**22 and peak < kept + 2**22
