"""qwen3_kernels/team.py: threads that don't change the result, cost nothing when idle, and end with their model."""
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import qwen3
from configs import BASE, ROOT
from make_random_model import make_random_model
import qwen3_numba as fast

pytestmark = pytest.mark.core


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_threads_change_nothing(threads, quantize):
    one, several = (fast.load_model(ROOT / "demo", quantize, n) for n in (1, threads))
    ids = one.tokenizer.encode("The capital of France is Paris, and that of Italy is Rome.")
    caches = [fast.KVCache(one.config), fast.KVCache(one.config)]
    for i in ids:
        a, b = (fast.forward(model, [i], cache) for model, cache in zip((one, several), caches))
        np.testing.assert_array_equal(a, b)


def test_callers_from_several_threads_take_turns():
    model = fast.load_model(ROOT / "demo")
    expected = qwen3.chat(model, "What is 12 + 30?").finish().text
    texts = []
    callers = [threading.Thread(target=lambda: texts.append(qwen3.chat(model, "What is 12 + 30?").finish().text))
               for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert texts == [expected] * 4


def test_available_cpus():
    program = ("import os, qwen3_numba; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
               "print(qwen3_numba.available_cpus())")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.stdout == "1\n"


def test_idle_threads_cost_nothing():
    model = fast.load_model(ROOT / "demo", threads=3)
    fast.forward(model, [1, 2, 3], fast.KVCache(model.config))
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.1


class Interrupt:
    """SIGINT for the main thread from another one, again and again until `stopped` is set; only the first one counts.

    Python doesn't hear one that comes just before the thread begins to wait for a lock, until that wait is over.
    """

    def __init__(self):
        self.stopped, self.count = threading.Event(), 0
        signal.signal(signal.SIGINT, self.heard)

    def heard(self, *_):
        self.count += 1
        if self.count == 1:
            raise KeyboardInterrupt

    def send(self) -> bool:
        """Whether it was stopped within a minute."""
        for _ in range(600):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if self.stopped.wait(0.1):
                return True
        return False


def test_a_long_prefill_can_be_interrupted(tmp_path, monkeypatch):
    """In the middle of a job, which waits here until the caller has its KeyboardInterrupt; no job follows.

    And what comes next is computed as if nothing had been."""
    config = BASE | {"max_position_embeddings": 40000, "hidden_size": 128, "num_hidden_layers": 12}
    model = fast.load_model(make_random_model(config, tmp_path, "bfloat16"))
    ids = np.random.default_rng(0).integers(0, 320, 30000)
    cache = fast.KVCache(model.config)
    fast.forward(model, ids[:20], cache)
    kernel, jobs, in_time, before = fast.kernels().decoder_layers, [], [], signal.getsignal(signal.SIGINT)
    call = kernel.call

    def interrupted_call(rank, *numbers):
        if rank == 0:
            jobs.append(numbers)
            if len(jobs) == 2:
                in_time.append(interrupt.send())
        return call(rank, *numbers)

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "call", interrupted_call)
        interrupt = Interrupt()
        try:
            with pytest.raises(KeyboardInterrupt):
                fast.forward(model, ids, cache)
            interrupt.stopped.set()
        finally:
            signal.signal(signal.SIGINT, before)
        cache.truncate(20)
        other = fast.KVCache(model.config)
        fast.forward(model, ids[:20], other)  # a job for each layer, after the one that was interrupted
    assert in_time == [True] and len(jobs) == 2 + config["num_hidden_layers"]
    np.testing.assert_array_equal(fast.forward(model, ids[:5], cache), fast.forward(model, ids[:5], other))


def test_an_interrupted_job_keeps_what_it_reads(tmp_path):
    """The model is gone, and its file would no longer be mapped, before a thread reads the weights."""
    program = f"""
import gc, signal, sys, threading, weakref
sys.path.insert(0, {str(ROOT)!r})
import qwen3_numba as fast

{inspect.getsource(Interrupt)}
kernel, interrupt, computed = fast.kernels().decoder_layers, Interrupt(), threading.Event()
call = kernel.call

def interrupted_call(*numbers):
    interrupt.send()
    result = call(*numbers)
    computed.set()
    return result

def work():
    global model
    model = fast.load_model({str(make_random_model(BASE, tmp_path, "bfloat16"))!r}, threads=1)
    kernel.call = interrupted_call
    fast.forward(model, list(range(300)), fast.KVCache(model.config))

try:
    work()
except KeyboardInterrupt:
    kernel.call = call
model, last = None, weakref.ref(model)
gc.collect()
print("gone" if last() is None else "still there")
interrupt.stopped.set()
demo = fast.load_model({str(ROOT / "demo")!r})
fast.forward(demo, [1, 2, 3], fast.KVCache(demo.config))
print("computed" if computed.wait(60) else "not computed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gone\ncomputed\n", "")


def test_threads_end_with_their_model():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("qwen3-")}

    gc.collect()
    before = threads()
    model = fast.load_model(ROOT / "demo", threads=3)
    cache = fast.KVCache(model.config)
    fast.forward(model, [1, 2, 3], cache)
    mine, weights, keys = threads() - before, weakref.ref(model.weights), weakref.ref(cache.k)
    assert len(mine) == 3
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


def test_a_forked_process_has_threads_of_its_own():
    model = fast.load_model(ROOT / "demo", threads=2)
    expected = fast.forward(model, [1, 2, 3], fast.KVCache(model.config))
    child = os.fork()
    if child == 0:
        same = np.array_equal(fast.forward(model, [1, 2, 3], fast.KVCache(model.config)), expected)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
