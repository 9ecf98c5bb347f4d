"""Threads: a team that runs one kernel together."""
from __future__ import annotations

import ctypes
import os
import queue
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from qwen3_lib.kernels.build import Kernel
from qwen3_lib.kernels.layout import ABANDONED, C_FUNCTIONS, IN_C, MEMBER_SIZE, MEMBERS, THREAD, crew_size
from qwen3_lib.io.errors import InputError


# Held while a team's threads are started. Threads don't survive a fork, and a lock may have been held at that moment: a
# forked process gets a new lock, which also tells teams that their threads belong to another process.
starting = threading.Lock()


def renew_lock() -> None:
    global starting
    starting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_lock)


def addresses(names: Iterable[str]) -> list[int]:
    """Where functions of the C library are; none if it lacks one: it isn't Linux's."""
    try:
        return [ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value or 0 for name in names]
    except (TypeError, AttributeError):  # Windows, macOS
        return []


CALLS = addresses(C_FUNCTIONS)


class Team:
    """The calling thread, rank 0, and others that run a kernel with it. These sleep while there is nothing to do.

    Ctrl-C is heard when a kernel has ended. Callers from several threads take turns. A forked process starts threads of
    its own.
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
            queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(1, self.n_threads)]
            try:
                for rank, tasks in enumerate(queues, 1):
                    threading.Thread(target=work, args=(tasks,), daemon=True, name=f"qwen3-{rank}").start()
            except RuntimeError as error:
                end(queues)
                raise InputError(f"{self.n_threads} threads can't be started ({error}); ask for fewer with --threads, "
                                 "or allow more of them, or more memory") from error
            weakref.finalize(self, end, queues)
            self.queues, self.turn = queues, threading.Lock()
            self.started_under = lock  # last: whoever sees it sees the queues, too

    def run(self, kernel: Kernel, record: np.ndarray, *kept: Any) -> None:
        """kernel(JOB [1], rank) on all threads, with their number and the address of what they share in the record.

        The kernel must end with crew.wait. Records are addresses: `kept` is what they point to, kept meanwhile.
        Raises the exception of a thread, after all threads have ended.
        """
        if self.started_under is not starting:
            self._start()
        shared = np.zeros(crew_size(self.n_threads), np.int64)  # of this call only: nothing is left over
        shared[IN_C:IN_C + len(CALLS)] = CALLS
        record["n_threads"], record["shared"] = self.n_threads, shared.ctypes.data
        failures: list[Exception] = []
        ended: queue.SimpleQueue = queue.SimpleQueue()

        def part(rank: int, _keeps: Any = kept) -> None:  # should a second Ctrl-C end the wait for threads
            """A thread's part."""
            if CALLS:
                shared[MEMBERS + MEMBER_SIZE * rank + THREAD] = threading.get_native_id()
            try:
                kernel(record, rank)
            except Exception as error:  # whatever it is: the caller raises it
                failures.append(error)
                shared[ABANDONED] = 1  # the others need not wait for this thread
            ended.put(None)

        with self.turn:
            try:
                for rank, tasks in enumerate(self.queues, 1):
                    tasks.put(partial(part, rank))
                part(0)
                for _ in range(self.n_threads):
                    ended.get()
            except BaseException:  # Ctrl-C: the kernel has ended, or won't begin here
                shared[ABANDONED] = 1
                self._settle()
                raise
        if failures:
            raise failures[0]

    def _settle(self) -> None:
        """Waits until each thread has done what was asked of it before."""
        answers: queue.SimpleQueue = queue.SimpleQueue()
        for tasks in self.queues:
            tasks.put(partial(answers.put, None))
        for _ in self.queues:
            answers.get()


TEAMS = weakref.WeakValueDictionary[int, Team]()


def team_of(n_threads: int) -> Team:
    """The team of so many threads that all models of this process share: two would have more threads than cores."""
    if (team := TEAMS.get(n_threads)) is None:
        team = TEAMS[n_threads] = Team(n_threads)
    return team


def end(queues: Iterable[queue.SimpleQueue]) -> None:
    """Ends the threads that take tasks from these queues."""
    for tasks in queues:
        tasks.put(None)


def work(tasks: queue.SimpleQueue) -> None:
    """The loop of a thread. It holds no reference to the team, or the team would never be freed."""
    while (task := tasks.get()) is not None:
        task()
        del task  # and with it the arrays that it keeps, before the next one comes
