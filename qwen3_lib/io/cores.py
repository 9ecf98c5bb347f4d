"""Cores: how many this process may use, and how many of them are free for NumPy's products."""
from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3 import Engine

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # copied without it: BLAS decides on its threads
    ThreadpoolController = None


def available_cpus() -> int:
    """How many CPUs this process may really use: its affinity, and the quota of its cgroup where there is one.

    Of a Mac, the performance cores: they would wait for the slower ones at each barrier.
    """
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, ValueError):  # a Mac with cores of one kind doesn't know the name
            name = "hw.perflevel0.physicalcpu"
            n = int(subprocess.run(["sysctl", "-n", name], capture_output=True).stdout)
    with contextlib.suppress(OSError, ValueError):  # not Linux, no cgroup, or "max": no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, round(int(quota) / int(period))))
    return n


def spare_seconds() -> float:
    """CPU seconds that no other process has had: those of this process, and those in which its CPUs were idle."""
    cpus = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    idle = sum(int(row[4]) + int(row[5]) for row in rows if row[0] in cpus)  # row[5]: waiting for a disk
    return idle / os.sysconf("SC_CLK_TCK") + time.process_time()


class Passes:
    """Passes of the NumPy engine: one at a time, and each with as many threads of BLAS as there are free cores.

    BLAS' threads wait for each other at the end of each product. If another program has a thread's core, all wait for
    it: with two threads on two cores and 8 busy programs, a pass takes 2 to 8 times as long as with one thread. BLAS
    has one number of threads for the whole process, so it is set back after each pass.
    """
    INTERVAL = 0.1  # seconds between two looks at the CPUs; they count in hundredths

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.blas = ThreadpoolController().select(user_api="blas")
        self.cpus = self.free = available_cpus()
        self.looked, self.spare = time.monotonic(), 0.0
        with contextlib.suppress(OSError, AttributeError):  # not Linux: nothing tells which cores are free
            self.spare = spare_seconds()
            self.free = 1  # until the first look

    def look(self) -> None:
        """Counts the cores that were free since the last look."""
        now = time.monotonic()
        if self.spare and now - self.looked >= self.INTERVAL:
            spare = spare_seconds()
            self.free = min(self.cpus, max(1, round((spare - self.spare) / (now - self.looked))))
            self.looked, self.spare = now, spare

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around a pass."""
        with self.turn:
            most = min((library.num_threads for library in self.blas.lib_controllers), default=1)
            if most > 1:
                self.look()
                with self.blas.limit(limits=self.free) if self.free < most else contextlib.nullcontext():
                    yield
                return
        yield  # $OPENBLAS_NUM_THREADS is 1, for example: threads of the program run passes at the same time


@functools.cache
def passes() -> Passes:
    return Passes()


if hasattr(os, "register_at_fork"):  # another thread of the parent may have been in a pass
    os.register_at_fork(after_in_child=passes.cache_clear)


@functools.cache
def sharing(engine: Engine) -> Engine:
    """The engine; NumPy's with as many threads in each pass as there are free cores: see Passes."""
    def shared(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def one_pass(*args: Any, **options: Any) -> Any:
            with passes().one():
                return function(*args, **options)

        return one_pass

    if engine.hybrid_cache is not None or ThreadpoolController is None:  # the fast engine has threads of its own
        return engine
    passes()  # it begins to watch the CPUs while the model loads
    return replace(engine, logits_of=shared(engine.logits_of), hidden_states=shared(engine.hidden_states),
                   guess=engine.guess and shared(engine.guess))
