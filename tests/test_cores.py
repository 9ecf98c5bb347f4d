"""qwen3_lib/io/cores.py: NumPy's products take the cores that are free, and give the host program its threads back."""
import contextlib
import os
import threading
import time

import pytest
from threadpoolctl import ThreadpoolController

import qwen3
from configs import ROOT
from fuzzing import in_child
from qwen3_lib.io import cores

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of forks beside threads
BLAS = ThreadpoolController().select(user_api="blas")


def threads() -> int:
    return BLAS.lib_controllers[0].num_threads


@pytest.fixture
def four_threads():
    """The host program lets BLAS have four threads; each test has a Passes of its own.

    Threads that end set the limit: while a thread that has set one lives, threadpoolctl lets no other set one.
    """
    limits = []
    every = ThreadpoolController().select(user_api="blas")  # other tests may have loaded more than NumPy's
    in_thread(lambda: limits.append(every.limit(limits=4)))
    cores.passes.cache_clear()
    yield
    assert threads() == 4
    in_thread(limits[0].restore_original_limits)
    cores.passes.cache_clear()


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_available_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert cores.available_cpus() == 1


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux tells how long its CPUs are idle")
def test_spare_seconds_are_at_most_those_of_all_cpus_and_at_least_our_own():
    start, ours, before = time.monotonic(), time.process_time(), cores.spare_seconds()
    while time.process_time() < ours + 0.2:
        pass
    spare, passed = cores.spare_seconds() - before, time.monotonic() - start
    assert 0.19 < spare < passed * len(os.sched_getaffinity(0)) + 0.05  # idle time comes in hundredths


@pytest.mark.parametrize("spare, expected", [(8, 4), (4, 4), (3.6, 4), (2.4, 2), (1, 1), (0.2, 1)])
def test_a_pass_has_as_many_threads_as_cores_are_free(four_threads, monkeypatch, spare, expected):
    monkeypatch.setattr(cores, "available_cpus", lambda: 16)
    now, counts = [100.0], iter([50.0, 50.0 + spare])
    monkeypatch.setattr(cores.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cores, "spare_seconds", lambda: next(counts))
    passes = cores.Passes()
    with passes.one():
        assert threads() == 1  # nothing is known yet
    now[0] += 1
    for _ in range(2):  # the second one comes too soon for another look
        with passes.one():
            assert threads() == expected


def test_a_system_that_tells_nothing_leaves_all_cpus(four_threads, monkeypatch):
    monkeypatch.setattr(cores, "available_cpus", lambda: 3)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with cores.Passes().one():
        assert threads() == 3


@pytest.mark.parametrize("allowed, together", [(4, 1), (1, 2)])
def test_passes_take_turns_unless_blas_has_one_thread(four_threads, monkeypatch, allowed, together):
    """Seen by the engine's own function: how many threads of the program are in it at the same time.

    No core is free, so a pass limits BLAS to one thread itself; the other thread still waits for its turn.
    """
    monkeypatch.setattr(cores, "available_cpus", lambda: 1)
    inside, most = [], []

    def slow(*args):
        inside.append(args)
        time.sleep(0.2)
        most.append(len(inside))
        inside.pop()

    engine = cores.sharing(qwen3.Engine(logits_of=slow))
    with BLAS.limit(limits=allowed) if allowed == 1 else contextlib.nullcontext():
        callers = [threading.Thread(target=engine.logits_of, args=(i,)) for i in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert max(most) == together


def test_a_forked_process_does_not_wait_for_a_pass_of_its_parent(four_threads):
    model, entered, go = qwen3.load_model(ROOT / "demo"), threading.Event(), threading.Event()

    def hold():
        with cores.passes().one():
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
