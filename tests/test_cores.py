"""qwen3_lib/io/cores.py: how many threads of BLAS a pass takes, and that the host program has its own number again."""
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from threadpoolctl import ThreadpoolController

import qwen3
from configs import ROOT
from fuzzing import in_child
from qwen3_lib.io import cores
from qwen3_lib.io.models import sharing

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of forks beside threads
BLAS = ThreadpoolController().select(user_api="blas")


def model_of(hidden_size):
    return SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size))


def threads(*_):
    return BLAS.lib_controllers[0].num_threads


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture
def four_threads():
    """The host program lets BLAS have four threads, and still does after the test.

    Threads that end set the limit: while a thread that has set one lives, threadpoolctl lets no other set one.
    """
    limits = []
    every = ThreadpoolController().select(user_api="blas")  # other tests may have loaded more than NumPy's
    in_thread(lambda: limits.append(every.limit(limits=4)))
    cores.blas.cache_clear()
    yield
    assert threads() == 4
    in_thread(limits[0].restore_original_limits)
    cores.blas.cache_clear()


def test_available_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert cores.available_cpus() == 1


@pytest.mark.parametrize("files, expected", [
    ({}, 8), ({"cpu.max": "max 100000"}, 8), ({"cpu.max": "250000 100000"}, 2), ({"cpu.max": "10000 100000"}, 1),
    ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8), ({"cpu/cpu.cfs_quota_us": "300000"}, 8),
    ({"cpu.max": "1600000 100000"}, 8)])
def test_the_quota_of_a_cgroup(files, expected, tmp_path, monkeypatch):
    """Of version 2, and of version 1, where there are two files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cores.available_cpus() == expected


@pytest.mark.parametrize("hidden_size, cpus, expected", [(256, 3, 1), (1024, 3, 3), (1024, 16, 4)],
                         ids=["small", "the CPUs of this process", "no more than the host program allows"])
def test_threads_of_a_pass(four_threads, monkeypatch, hidden_size, cpus, expected):
    monkeypatch.setattr(cores, "available_cpus", lambda: cpus)
    engine = sharing(qwen3.Engine(run=threads))
    assert engine.run(model_of(hidden_size)) == expected and engine.guess is None
    assert sharing(qwen3.Engine(run=threads, guess=threads)).guess(model_of(hidden_size)) == expected


def test_a_forked_process_does_not_wait_for_a_pass_of_its_parent(four_threads):
    model, entered, go = qwen3.load_model(ROOT / "demo"), threading.Event(), threading.Event()

    def hold():
        with cores.threads_for(256):
            entered.set()
            go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait()
    try:
        assert in_child(lambda: qwen3.forward(model, [1, 2], qwen3.KVCache(model.config)).shape) == [4096]
    finally:
        go.set()
        holder.join()


def test_without_threadpoolctl():
    """In a process of its own: BLAS decides on its threads, and a pass gives the same logits."""
    program = ("import sys; sys.modules['threadpoolctl'] = None; import qwen3; model = qwen3.load_model(sys.argv[1]); "
               "print(qwen3.forward(model, [1, 2], qwen3.KVCache(model.config)).argmax())")
    done = subprocess.run([sys.executable, "-c", program, ROOT / "demo"], cwd=ROOT, capture_output=True, text=True,
                          timeout=200)
    model = qwen3.load_model(ROOT / "demo")
    expected = qwen3.forward(model, [1, 2], qwen3.KVCache(model.config)).argmax()
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")
