"""Threads: a team that runs one kernel together."""
from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qwen3_io.errors import InputError
from qwen3_kernels.compiled import Kernel
from qwen3_kernels.layout import ABANDONED


def available_cpus() -> int:
    """How many CPUs this process may really use: its affinity, and the quota of its cgroup where there is one."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux, no cgroup, or "max": no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, round(int(quota) / int(period))))
    return n


# Held while a team's threads are started. Threads don't survive a fork, and a lock may have been held at that moment: a
# forked process gets a new lock, which also tells teams that their threads belong to another process.
starting = threading.Lock()


def renew_lock() -> None:
    global starting
    starting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_lock)


@dataclass
class Job:
    """A kernel with its arguments for all threads of a team, and how it went."""
    kernel: Kernel
    numbers: array[int]  # the first one is the thread's rank
    barrier: np.ndarray  # where the threads meet: see `meet` in vectors.py
    keeps: Any  # what the addresses among the numbers point to
    running: list[int]  # one number for each thread that hasn't ended yet
    failures: list[Exception] = field(default_factory=list)
    done: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def work(self, rank: int) -> None:
        """A thread's part. The last thread to end tells the caller."""
        try:
            own = self.numbers[:]
            own[0] = rank
            status = self.kernel.call(own)
            if status != 0:
                raise RuntimeError(f"a kernel ended with status {status}")
        except Exception as error:  # whatever it is: the caller raises it
            self.failures.append(error)
            self.barrier[ABANDONED] = 1  # the others need not wait for this thread
        if self.running.pop() == 0:  # in one step: lists are safe between threads
            self.done.put(None)


class Team:
    """Threads that run a kernel together, each with its rank. They sleep while there is nothing to do, and end with it.

    The calling thread only waits, so that Ctrl-C reaches it at once; a job that was begun is still finished, and the
    next one comes after it. Callers from several threads take turns. A forked process starts threads of its own.
    """

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self._start()

    def _start(self) -> None:
        """Starts the threads, once, however many callers ask at the same time."""
        lock = starting
        with lock:
            if getattr(self, "started_under", None) is lock:
                return
            queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(self.n_threads)]
            try:
                for rank in range(self.n_threads):
                    threading.Thread(target=work, args=(rank, queues), daemon=True, name=f"qwen3-{rank}").start()
            except RuntimeError as error:
                for waiting in queues:
                    waiting.put(None)
                raise InputError(f"{self.n_threads} threads can't be started ({error}); ask for fewer with --threads, "
                                 "or allow more of them, or more memory") from error
            weakref.finalize(self, queues[0].put, None)
            self.queues, self.running = queues, list[int]()
            self.started_under = lock  # last: whoever sees it sees the queues, too

    def run(self, kernel: Kernel, weights: Any, *args: Any) -> None:
        """kernel((rank, n_threads, barrier), *args) on all threads. The kernel must end with `meet`.

        Weights and arrays are addresses to the kernel: they are kept until it ends, even if this call is interrupted.
        Raises the exception of a thread, after all threads have ended.
        """
        if self.started_under is not starting:
            self._start()
        barrier = np.zeros(24, np.int64)  # of this job only: nothing is left over from one that failed
        numbers = kernel.numbers((0, self.n_threads, barrier.ctypes.data), *args)
        job = Job(kernel, numbers, barrier, (weights, args), list(range(self.n_threads)))
        self.queues[0].put(job)
        self.running = job.running
        job.done.get()
        if job.failures:
            raise job.failures[0]

    def settle(self) -> None:
        """Waits until no job runs any more whose caller was interrupted."""
        running = self.running
        while running and self.started_under is starting:
            time.sleep(0.001)


def work(rank: int, queues: Sequence[queue.SimpleQueue]) -> None:
    """The loop of a thread. It holds no reference to the team, or the team would never be freed."""
    while True:
        job = queues[rank].get()
        if rank == 0:  # one put by the caller, which an interrupt can't cut in two; the others are called from here
            for other in queues[1:]:
                other.put(job)
        if job is None:
            return
        job.work(rank)
        del job  # and with it the arrays that it keeps, before the next one comes
