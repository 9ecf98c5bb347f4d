"""qwen3_lib/kernels/crew.py: each piece of work is done once, by whoever has time, and threads wait for pieces only."""
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numba
import numpy as np
import pytest

from configs import ROOT
from helpers import in_time
from qwen3_lib.kernels import build
from qwen3_lib.kernels.crew import PIECES, Crew, items, pause, wait
from qwen3_lib.kernels.dense import DENSE_STEPS
from qwen3_lib.kernels.layout import JOB
from qwen3_lib.kernels.team import Team
import qwen3_numba as fast

pytestmark = pytest.mark.core
LONG = 10**6  # so many looks are long enough for sleep


@numba.njit(nogil=True)
def work(record, rank, counts, late, errors):
    """Round i has i % (counts.shape[1] + 1) items. late [rounds, n_threads, 2]: sleep before a round; in each item."""
    crew = Crew(rank, record[0].n_threads, record[0].shared)
    for i in range(len(counts)):
        n = i % (counts.shape[1] + 1)
        if late[i, rank, 0]:
            pause(LONG)
        for j in items(n, crew):
            counts[i, j] += 1
            if late[i, rank, 1]:
                pause(LONG)
        wait(crew)
        for j in range(n):
            errors[rank] += counts[i, j] != 1


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_each_piece_is_done_once_before_anybody_goes_on(n_threads):
    """Though threads sleep at random, and there are more of them than cores."""
    rounds = 3000 if n_threads <= 3 else 300
    counts, errors = np.zeros((rounds, 50), np.int64), np.zeros(n_threads, np.int64)
    late = np.random.default_rng(0).random((rounds, n_threads, 2)) < 0.02
    job = np.zeros(1, JOB)
    in_time(lambda: Team(n_threads).run(lambda record, rank: work(record, rank, counts, late, errors), job), 300)
    assert (errors == 0).all()
    assert counts.sum(axis=1).tolist() == [i % 51 for i in range(rounds)] and counts.max() == 1


@numba.njit(nogil=True)
def hold(record, rank, order, taken):
    """Rank 1 holds its first piece until there is no other one left."""
    crew = Crew(rank, record[0].n_threads, record[0].shared)
    while rank == 0 and taken[1] == 0:
        pause(LONG)
    for j in items(len(order[0]), crew):
        order[rank, taken[rank]] = j
        taken[rank] += 1
        while rank == 1 and taken[0] < len(order[0]) - 1:
            pause(LONG)
    wait(crew)


def test_a_thread_takes_its_own_pieces_first_then_the_last_ones_of_another():
    """So a thread on a slow core has fewer pieces, and nobody needs to know the kinds of cores."""
    n = 2 * PIECES
    order, taken = np.full((2, n), -1), np.zeros(2, np.int64)
    in_time(lambda: Team(2).run(lambda record, rank: hold(record, rank, order, taken), np.zeros(1, JOB)))
    assert taken.tolist() == [n - 1, 1] and order[1, 0] == PIECES
    assert order[0, :n - 1].tolist() == [*range(PIECES), *range(n - 1, PIECES, -1)]


@numba.njit(nogil=True)
def wait_for_a_piece(record, rank, begun, ended):
    crew = Crew(rank, record[0].n_threads, record[0].shared)
    while rank == 0 and begun[0] == 0:
        pause(LONG)
    for _ in items(1, crew):
        begun[0] = 1
        while ended[0] == 0:
            pause(LONG)
    wait(crew)


def test_a_thread_that_waits_for_long_sleeps():
    """So the system can move the other thread to its core."""
    begun, ended, spent = np.zeros(1, np.int64), np.ones(1, np.int64), [0.0, 0.0]

    def part(record, rank):
        before = time.thread_time()
        wait_for_a_piece(record, rank, begun, ended)
        spent[rank] = time.thread_time() - before

    in_time(lambda: Team(2).run(part, np.zeros(1, JOB)))  # it is compiled
    begun[:] = ended[:] = 0
    threading.Timer(1.5, ended.fill, [1]).start()
    in_time(lambda: Team(2).run(part, np.zeros(1, JOB)))
    assert spent[0] < 0.5


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
                    reason="Linux and two cores are needed")
def test_a_thread_that_waits_lends_its_core_and_takes_it_back():
    """To one that holds a piece and doesn't run: here it sleeps until it is lent a core."""
    begun, ended, team = np.zeros(1, np.int64), np.ones(1, np.int64), Team(2)
    in_time(lambda: team.run(lambda record, rank: wait_for_a_piece(record, rank, begun, ended), np.zeros(1, JOB)))
    begun[:] = ended[:] = 0
    threads, lent = [0, 0], list[set[int]]()

    def part(record, rank):
        threads[rank] = threading.get_native_id()
        wait_for_a_piece(record, rank, begun, ended)

    def watch():
        while not ended[0]:
            if begun[0] and len(cpus := os.sched_getaffinity(threads[1])) == 1:
                lent.append(cpus)
                ended[0] = 1

    def run():
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        team.run(part, np.zeros(1, JOB))
        watcher.join()
        return [os.sched_getaffinity(thread) for thread in threads]

    before = os.sched_getaffinity(0)
    assert in_time(run) == [before] * 2 and lent[0] < before


# ---- Real kernels ----------------------------------------------------------------------------------------------------

PROMPTS = [5, 40, 1, 1, 300, 3, 1]  # lengths of passes, one after the other


def logits_of(model):
    cache, rng = model.engine.new_cache(model.config), np.random.default_rng(0)
    return [fast.forward(model, rng.integers(0, model.config.vocab_size, n), cache, True) for n in PROMPTS]


def test_a_thread_without_a_core_holds_up_nobody(monkeypatch):
    """It begins each pass when the others have ended it, and finds nothing left to do."""
    model, kernel = fast.load_model(ROOT / "demo", threads=2), build.kernel(*DENSE_STEPS)
    expected, ended, passes = logits_of(model), [threading.Event() for _ in range(1000)], [0, 0]

    def part(record, rank):
        if rank == 1:
            assert ended[passes[1]].wait(60)
        kernel(record, rank)
        ended[passes[rank]].set()
        passes[rank] += 1

    monkeypatch.setattr("qwen3_lib.kernels.passes.kernel", lambda *steps: part)
    found = in_time(lambda: logits_of(model))
    assert passes[0] == passes[1] > 0 and all(map(np.array_equal, found, expected))


@pytest.mark.skipif(not hasattr(signal, "SIGRTMAX"), reason="stops threads by a signal of Linux")
@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["demo", "tests/tiny_hybrid"])
def test_threads_that_stop_at_any_moment_change_no_bit(name, n_threads):
    """The handler of a signal is usleep itself: a thread sleeps for 64 us wherever it is."""
    expected = logits_of(fast.load_model(ROOT / name, threads=1))
    model, libc, over = fast.load_model(ROOT / name, threads=n_threads), ctypes.CDLL(None), threading.Event()
    libc.signal.argtypes, threads = (ctypes.c_int, ctypes.c_void_p), list[int]()
    cpus, job = [], np.zeros(1, JOB)
    model.weights.team.run(lambda _, rank: threads.append(threading.get_ident()), job)
    libc.signal(int(signal.SIGRTMAX), ctypes.cast(libc.usleep, ctypes.c_void_p))

    def stop_some():
        rng = random.Random(0)
        while not over.is_set():
            for thread in threads:
                if rng.random() < 0.5:
                    signal.pthread_kill(thread, signal.SIGRTMAX)
            time.sleep(rng.random() * 1e-4)

    stopper = threading.Thread(target=stop_some)
    stopper.start()
    try:
        for _ in range(3):
            assert all(map(np.array_equal, logits_of(model), expected))
        model.weights.team.run(lambda _, rank: cpus.append(os.sched_getaffinity(0)), job)
        assert cpus == [os.sched_getaffinity(os.getpid())] * n_threads  # cores that were lent are given back
    finally:
        over.set()
        stopper.join()
        signal.signal(signal.SIGRTMAX, signal.SIG_IGN)  # a thread without a core may get its last one after this


WINDOWS = """
import ctypes, sys, threading, time
from types import SimpleNamespace
import numpy as np
from qwen3_lib.kernels import build
calls = []
function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: calls.append(1) or time.sleep(0.001) or 1)
ctypes.windll = SimpleNamespace(kernel32=SimpleNamespace(SwitchToThread=function))
sys.platform = "win32"
build.linker()
sys.platform = "linux"
import qwen3_numba
model = qwen3_numba.load_model("demo", threads=3)
for _ in range(200):
    cache = qwen3_numba.KVCache(model.config)
    qwen3_numba.forward(model, [1, 2, 3] * 80, cache)
    if calls:
        print("called")
        break
"""


def test_waiting_on_windows():
    """Its C library has no sched_yield: kernels call SwitchToThread."""
    done = subprocess.run([sys.executable, "-c", WINDOWS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "called\n", done.stderr
