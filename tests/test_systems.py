"""Systems on which the project's tests don't run: what they lack is taken away here, and all else works as before."""
import ctypes
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from configs import BASE, FRANCE, PARIS, ROOT
from helpers import assert_one_line
from make_random_model import make_random_model
from qwen3_lib.app import cli
from qwen3_lib.kernels.team import available_cpus

ABSENT = {  # names of Linux that Python doesn't have there
    "macOS": ["os.sched_getaffinity", "os.sched_setaffinity", "os.posix_fadvise", "mmap.MADV_HUGEPAGE"],
    "Windows": ["os.sched_getaffinity", "os.sched_setaffinity", "os.posix_fadvise", "os.fork", "os.register_at_fork",
                "os.getuid", "os.sysconf", "mmap.MADV_DONTNEED", "mmap.MADV_HUGEPAGE", "signal.SIGHUP", "fcntl", "termios",
                "resource"]}
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

    assert cli.guarded(work) == 0
    assert out.getvalue().decode("utf-8").split() == ["法国"]
    assert modes == {111: 7, 112: 7}  # ENABLE_VIRTUAL_TERMINAL_PROCESSING, 4, among them


@pytest.mark.parametrize("name, value", [("maxsize", 2**31 - 1), ("byteorder", "big")])
def test_pythons_that_cannot_map_the_files(name, value):
    program = f"import runpy, sys; sys.{name} = {value!r}; runpy.run_path('qwen3.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program, FRANCE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    assert_one_line(done.stderr, "qwen3.py: this is Python", "32 bits" if name == "maxsize" else "big-endian",
                    "it needs", "64 bits, little-endian")


# ----------------------------------------------------------------------------------------------------------------------
# Small machines
# ----------------------------------------------------------------------------------------------------------------------

LOADING = """
import re, sys, threading, time
from pathlib import Path
import numpy as np
import qwen3
engine, folder = sys.argv[1:3]

def own_bytes():  # without pages of mapped files, which the system takes back when it needs memory
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(folder):
    if engine == "numpy":
        return qwen3.load_model(folder)
    from qwen3_numba import load_model
    return load_model(folder, None if engine == "mapped" else engine, threads=2)

def arrays(weights):
    values = weights.values() if isinstance(weights, dict) else weights if isinstance(weights, list) else ()
    return [weights] if isinstance(weights, np.ndarray) else [array for value in values for array in arrays(value)]

def watch():
    while not done:
        peaks.append(own_bytes())
        time.sleep(0.0005)

load(qwen3.BUNDLED)  # all that isn't the weights
done, before, peaks = False, own_bytes(), []
watcher = threading.Thread(target=watch)
watcher.start()
weights = load(folder).weights
done = True
watcher.join()
kept = {array.ctypes.data: array.nbytes for array in (arrays(weights) if engine == "numpy" else weights.arrays)}
print(max(peaks) - before, own_bytes() - before, sum(kept.values()))
"""


@pytest.fixture(scope="module")
def large_embedding(memory):
    config = BASE | {"vocab_size": 151_936, "hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 512}
    return make_random_model(config, memory / "large embedding")


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from Linux's /proc")
@pytest.mark.parametrize("engine, bytes_per_weight, most", [("numpy", 4, 1.1), ("mapped", 2, 0), ("int4", 0.6875, 1.1)])
def test_loading_takes_little_more_than_the_weights(engine, bytes_per_weight, most, large_embedding):
    """The embedding, nearly all of this model, is never in memory twice; `mapped` weights stay in the file."""
    done = subprocess.run([sys.executable, "-c", LOADING, engine, large_embedding], cwd=ROOT, capture_output=True,
                          text=True, timeout=250, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    peak, after, kept = map(int, done.stdout.split())
    assert kept == pytest.approx(151_936 * 256 * bytes_per_weight, rel=0.03)
    for taken in (peak, after):
        assert taken < most * kept + 2**22, (peak, after, kept)  # each thread has a few copies of some rows
