"""Threads: a team that runs one kernel together."""
from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen3_kernels.compiled import Kernel


def available_cpus() -> int:
    """How many CPUs this process may really use: its affinity, and the quota of its cgroup where there is one."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux, no cgroup, or "max": no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, round(int(quota) / int(period))))
    return n


class Team:
    """Threads that run a kernel together, each with its rank. They sleep while there is nothing to do, and end with it.

    The calling thread only waits, so that Ctrl-C reaches it at once; a job that was begun is still finished, and the
    next one comes after it. Callers from several threads take turns.
    """

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self._start()

    def _start(self) -> None:
        self.pid = os.getpid()
        self.barrier = np.zeros(16, np.int64)  # arrived [0], round [8]: on two cache lines
        self.queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(self.n_threads)]
        for rank in range(self.n_threads):
            threading.Thread(target=work, args=(rank, self.queues), daemon=True, name=f"qwen3-{rank}").start()
        weakref.finalize(self, self.queues[0].put, None)

    def run(self, kernel: Kernel, weights: Any, *args: Any) -> None:
        """kernel(rank, n_threads, barrier, *args) on all threads. The kernel must end with `meet`.

        Weights and arrays are addresses to the kernel: they are kept until it ends, even if this call is interrupted.
        """
        if self.pid != os.getpid():  # threads don't survive a fork
            self._start()
        done: queue.SimpleQueue = queue.SimpleQueue()
        numbers = kernel.numbers(0, self.n_threads, self.barrier, *args)[1:]
        self.queues[0].put((kernel, numbers, done, (weights, args)))
        done.get()


def work(rank: int, queues: Sequence[queue.SimpleQueue]) -> None:
    """What a thread of a team does. It must not know the team, which else would never end."""
    while take_job(rank, queues):
        pass


def take_job(rank: int, queues: Sequence[queue.SimpleQueue]) -> bool:
    """Waits for a job and does a thread's part of it; False if there are no more."""
    job = queues[rank].get()
    if rank == 0:  # one put by the caller, which an interrupt can't cut in two; the others are called from here
        for other in queues[1:]:
            other.put(job)
    if job is None:
        return False
    kernel, numbers, done, _ = job
    kernel.call(rank, *numbers)
    if rank == 0:
        done.put(None)
    return True
