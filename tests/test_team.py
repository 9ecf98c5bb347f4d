"""qwen3_lib/kernels/team.py: threads that don't change the result, cost nothing when idle, and end with their model."""
import ctypes
import gc
import queue
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numba
import numpy as np
import pytest

from configs import BASE, ROOT
from fuzzing import in_child
from helpers import in_time
from make_random_model import make_random_model
from qwen3_lib.kernels import build
from qwen3_lib.kernels import team as teams
from qwen3_lib.kernels.crew import Crew, items, wait
from qwen3_lib.kernels.dense import DENSE_STEPS
from qwen3_lib.kernels.layout import JOB
from qwen3_lib.kernels.team import Team
from tokenizer_utils import InputError
import qwen3_numba as fast

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of forks beside threads


@pytest.mark.parametrize("delay", [0, 0.002])
def test_callers_from_several_threads_take_turns(delay, monkeypatch):
    """With prompts of equal lengths, which share a work space, and of others; a part of a job may be slow."""
    model, kernel = fast.load_model(ROOT / "demo", threads=2), build.kernel(*DENSE_STEPS)
    prompts = [[i + 1] * (21 if i < 4 else 1 + 40 * (i % 2)) for i in range(6)]
    expected = [tokens_of(model, prompt) for prompt in prompts]

    def late(record, rank):
        time.sleep(delay * rank)
        kernel(record, rank)

    monkeypatch.setattr("qwen3_lib.kernels.passes.kernel", lambda *steps: late)
    assert at_once(model, prompts) == expected


def test_idle_threads_cost_nothing():
    model = fast.load_model(ROOT / "demo", threads=3)
    fast.forward(model, [1, 2, 3], fast.KVCache(model.config))
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_a_long_prefill_can_be_interrupted(moment, tmp_path, monkeypatch):
    """Before, within or after the caller's part of a pass: no pass follows, and no thread is left in this one.

    And what comes next is computed as if nothing had been."""
    config = BASE | {"max_position_embeddings": 40000, "hidden_size": 128, "num_hidden_layers": 12}
    model = fast.load_model(make_random_model(config, tmp_path, "bfloat16"), threads=2)
    ids = np.random.default_rng(0).integers(0, 320, 30000)
    cache = fast.KVCache(model.config)
    fast.forward(model, ids[:20], cache)
    kernel, passes, ended = build.kernel(*DENSE_STEPS), [], []

    def interrupted_kernel(record, rank):
        passes.extend([1] * (rank == 0))
        interrupted = len(passes) == 2
        if interrupted and rank == 0 and moment == "before":
            signal.raise_signal(signal.SIGINT)
        if interrupted and rank == 1 and moment == "within":  # the caller waits in the kernel for this thread
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        kernel(record, rank)
        if interrupted and rank == 0 and moment == "after":
            signal.raise_signal(signal.SIGINT)
        ended.append(rank)

    with monkeypatch.context() as patch:
        patch.setattr("qwen3_lib.kernels.passes.kernel", lambda *steps: interrupted_kernel)
        with pytest.raises(KeyboardInterrupt):
            fast.forward(model, ids, cache)
    assert len(passes) == 2 and ended.count(1) == 2
    cache.truncate(20)
    other = fast.KVCache(model.config)
    fast.forward(model, ids[:20], other)
    np.testing.assert_array_equal(fast.forward(model, ids[:5], cache), fast.forward(model, ids[:5], other))


def test_a_second_interrupt_leaves_threads_what_they_read(monkeypatch):
    """It ends the wait for the other threads, one of which still runs, with addresses of the weights."""
    team, weights, begun, go_on, ended = Team(2), threading.Event(), *(threading.Event() for _ in range(3))
    kept = weakref.ref(weights)

    def function(record, rank):
        if rank == 0:
            begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        go_on.wait(60)
        ended.set()

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(team, "_settle", interrupted)
        team.run(function, record(), weights)
    del weights
    gc.collect()
    assert kept() is not None and not ended.is_set()
    go_on.set()
    assert ended.wait(60)
    done = np.zeros((100, 16), np.int64)
    in_time(lambda: team.run(working(done), record()))
    assert (done == 1).all()


def test_threads_end_with_the_models_that_share_them():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("qwen3-")}

    gc.collect()
    before = threads()
    model, other = (fast.load_model(ROOT / "demo", threads=3) for _ in range(2))
    cache = fast.KVCache(model.config)
    fast.forward(model, [1, 2, 3], cache)
    fast.forward(other, [1, 2, 3], fast.KVCache(other.config))
    del other
    mine, weights, keys = threads() - before, weakref.ref(model.weights), weakref.ref(cache.k)
    assert len(mine) == 2  # the third is this one
    del cache
    deadline = time.monotonic() + 30
    while keys() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert keys() is None  # no thread holds on to its last job
    del model
    gc.collect()
    for thread in mine:
        thread.join(30)
    assert weights() is None and not any(thread.is_alive() for thread in mine)


# ---- Failures --------------------------------------------------------------------------------------------------------

def record():
    """A record without anything but the team's numbers."""
    return np.zeros(1, JOB)


@numba.njit(nogil=True)
def work(shared, n_threads, rank, rounds, fails_at, done):
    """Each round has 16 items; `fails_at`: leaves in the midst of one."""
    crew = Crew(rank, n_threads, shared)
    for i in range(rounds):
        for j in items(16, crew):
            if i >= fails_at:
                return
            done[i, j] += 1
        wait(crew)


def working(done, failing=None):
    """A kernel; the rank `failing` leaves in the middle with an exception."""
    def function(record, rank):
        fails_at = len(done) // 2 if rank == failing else len(done)
        work(record[0].shared, record[0].n_threads, rank, len(done), fails_at, done)
        if rank == failing:
            raise ValueError("injected")
    return function


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_a_failure_comes_back_and_the_next_job_runs(n_threads):
    """Of any thread, at a moment when the others wait for it."""
    team = Team(n_threads)
    for rank in range(n_threads):
        done = np.zeros((100, 16), np.int64)
        with pytest.raises(ValueError, match="injected"):
            in_time(lambda: team.run(working(done, rank), record()))
        done[:] = 0
        in_time(lambda: team.run(working(done), record()))
        assert (done == 1).all()


def test_a_failure_after_the_last_meeting_comes_back():
    """The caller hears of it even if its own thread of the team was the first to end."""
    def late(record, rank):
        if rank == 1:
            time.sleep(0.2)
            raise OSError("late")

    with pytest.raises(OSError, match="late"):
        in_time(lambda: Team(2).run(late, record()))


def test_one_thread_of_a_real_kernel_fails(monkeypatch):
    """The others wait in machine code for the one that never comes. A status other than 0 is an error."""
    model, kernel = fast.load_model(ROOT / "demo", threads=3), build.kernel(*DENSE_STEPS)
    failing = build.kernel_at(ctypes.cast(FAILS, ctypes.c_void_p).value)
    with monkeypatch.context() as patch:
        patch.setattr("qwen3_lib.kernels.passes.kernel", lambda *steps: lambda record, rank: (
            failing if rank == 1 else kernel)(record, rank))
        with pytest.raises(RuntimeError, match="status 5"):
            in_time(lambda: fast.forward(model, [1, 2], fast.KVCache(model.config)))
    assert np.isfinite(in_time(lambda: fast.forward(model, [1, 2], fast.KVCache(model.config)))).all()


FAILS = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3, ctypes.c_int64)(lambda *_: 5)


# ---- Threads that can't be started -----------------------------------------------------------------------------------

def test_threads_that_cannot_be_started(monkeypatch):
    """One line, and those that were started end."""
    real, started = threading.Thread.start, []

    def start(thread):
        if thread.name.startswith("qwen3-"):
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(InputError, match="5 threads can't be started"):
        Team(5)
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


# ---- Forked processes, as servers make them that load a model first --------------------------------------------------

def tokens_of(model, ids, n=5):
    cache, tokens = fast.KVCache(model.config), []
    new = ids
    for _ in range(n):
        new = [int(fast.forward(model, new, cache).argmax())]
        tokens += new
    return tokens


def at_once(model, prompts):
    """The tokens of several threads that begin at the same moment."""
    results, ready = [None] * len(prompts), threading.Barrier(len(prompts))

    def answer(i):
        ready.wait()
        results[i] = tokens_of(model, prompts[i])

    callers = [threading.Thread(target=answer, args=(i,), daemon=True) for i in range(len(prompts))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    return results


@pytest.mark.parametrize("delay, rounds", [(0, 2), (0.02, 1)])
def test_eight_threads_at_once_after_a_fork(delay, rounds):
    """Each finds that the threads are gone; they must start them once, not eight times, however long that takes."""
    model = fast.load_model(ROOT / "demo", threads=2)
    prompts = [[i + 1, 2 * i + 5, 77] for i in range(8)]
    expected = [tokens_of(model, prompt) for prompt in prompts]
    real_start, real_queue = threading.Thread.start, queue.SimpleQueue

    def start_late(thread):
        time.sleep(delay if thread.name.startswith("qwen3-") else 0)
        real_start(thread)

    def queue_late():
        time.sleep(delay)
        return real_queue()

    def child():
        sys.setswitchinterval(1e-6)
        threading.Thread.start, teams.queue = start_late, SimpleNamespace(SimpleQueue=queue_late)
        assert at_once(model, prompts) == expected
        assert sum(thread.name.startswith("qwen3-") for thread in threading.enumerate()) == 1

    for _ in range(rounds):
        in_child(child, 120)


def test_a_fork_while_threads_are_started_or_work():
    """A lock is held by a thread that the child doesn't have."""
    model = fast.load_model(ROOT / "demo", threads=2)
    expected = tokens_of(model, [1, 2, 3])
    for lock in (teams.starting, model.weights.team.turn):
        with lock:
            assert in_child(lambda: tokens_of(model, [1, 2, 3]), 120) == expected
