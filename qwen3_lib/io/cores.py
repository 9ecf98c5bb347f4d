"""Cores: how many this process may use, and how many of them NumPy's products take."""
from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any



try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # copied without it: BLAS decides on its threads
    ThreadpoolController = None


CGROUPS = Path("/sys/fs/cgroup")
QUOTAS = ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # of cgroups v2 and v1: quota, period


def available_cpus() -> int:
    """How many CPUs this process may really use: its affinity, and the quota of its cgroup where there is one.

    Cores of all kinds count: threads share work by how fast they are. Of a Mac, only the performance cores do, which is
    a guess: no Mac was at hand to measure whether the others help where the memory is the limit.
    """
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, ValueError):  # a Mac with cores of one kind doesn't know the name
            name = "hw.perflevel0.physicalcpu"
            n = int(subprocess.run(["sysctl", "-n", name], capture_output=True).stdout)
    for names in QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # not Linux, no cgroup, or "max": no limit
            quota, period = (int(word) for name in names for word in (CGROUPS / name).read_text().split())
            n = min(n, max(1, round(quota / period))) if quota > 0 else n  # -1: no limit
    return n


SHARED_FROM = 1024  # hidden_size below which a product is too small to share: fewer than a million weights


@functools.cache
def blas() -> tuple[Any, int, threading.Lock]:
    """BLAS' libraries, the CPUs of this process, and a lock for changes of BLAS' threads."""
    return ThreadpoolController().select(user_api="blas"), available_cpus(), threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread of the parent may hold the lock
    os.register_at_fork(after_in_child=blas.cache_clear)


@contextlib.contextmanager
def threads_for(hidden_size: int) -> Iterator[None]:
    """Around a pass of the NumPy engine: BLAS has one thread for small products, else at most the CPUs of this process.

    BLAS' threads wait for each other at the end of each product. In a small model they cost more than they bring, and
    if another program has a thread's core, all wait for it. BLAS has one number of threads for the whole process, so it
    is set back after each pass, and passes that change it take turns.
    """
    libraries, cpus, turn = blas()
    threads = 1 if hidden_size < SHARED_FROM else cpus
    if all(library.num_threads <= threads for library in libraries.lib_controllers):
        yield
        return
    with turn, libraries.limit(limits=threads):
        yield


def in_turns(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """map(work, items) with one thread of BLAS; all who call it take turns, item by item."""
    for item in items:
        yield with_threads(1, functools.partial(work, item))


def with_threads(n: int, work: Callable[[], Any]) -> Any:
    """work() with at most so many threads of BLAS; all who call it take turns."""
    if ThreadpoolController is None:
        return work()
    libraries, _, turn = blas()
    with turn, libraries.limit(limits=min([n, *(library.num_threads for library in libraries.lib_controllers)])):
        return work()


def in_threads(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """map(work, items) on all CPUs of this process, each with one thread of BLAS."""
    if ThreadpoolController is None or len(items := [*items]) == 1:  # BLAS shares each product
        yield from map(work, items)
        return
    libraries, cpus, turn = blas()
    with turn, libraries.limit(limits=1), ThreadPoolExecutor(cpus) as pool:
        yield from pool.map(work, items)


@functools.cache
def background() -> ThreadPoolExecutor:
    """One thread, which is started when there is work, and sleeps in between."""
    return ThreadPoolExecutor(1, "qwen3-background")


if hasattr(os, "register_at_fork"):  # threads don't survive a fork
    os.register_at_fork(after_in_child=background.cache_clear)


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """work() in this thread, now."""
    done = Future[Any]()
    done.set_result(work())
    return done


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """work() in the thread of this process for such work, one after the other."""
    return background().submit(work)
