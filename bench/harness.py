"""What all works share: processes, rounds, the memory's limit, tables. A work is a function and a row in run.py:

    def tokens(bench, context=16):                      `context` is an option of the command, too
        \"\"\"Tokens/s after so many others.\"\"\"
        config = bench.model()                          random weights, or those of --model
        for name in bench.names(ALL):                   those of them that --engines names
            bench.open(name, open_engine, 4096)         a process with an engine, or a note why it is left out
        bench.each("decode", "decode_speed", context)   rounds over the engines in turn -> values["int8", "decode"]
        return bench.ratios("decode")                   lines, which are printed and written to TOKENS.md

`each` takes a function of the engine of a process, or the name of its method. The first round warms up. Speeds are
medians of the rounds, ratios medians of each round's ratio: on a shared machine a ratio means something, a single speed
does not.
"""
import argparse
import contextlib
import datetime
import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cached_property, partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


class Entry(NamedTuple):
    """A row of the tables. `weight_bytes` counts the bytes of a weight, its share of the group's scale included."""
    engine: str
    format: str
    weight_bytes: float
    kv_bytes: int  # of a number in the KV cache
    needs: tuple[str, ...]  # packages
    for_speed: bool = True  # else only its quality is compared
    file: str = ""  # the entry whose GGUF file it reads


LLAMA, OPENVINO, CT2 = ("llama_cpp", "gguf"), ("openvino_genai",), ("ctranslate2", "torch", "transformers")
# What is compared with each other stands together, so that it is also measured close together.
ENTRIES = {
    "bf16": Entry("this engine", "bf16", 2, 2, ("numba",)),
    "bf16-rounded": Entry("this engine", "bf16, activations too", 2, 2, ("numba",)),
    "llama-bf16": Entry("llama.cpp", "bf16", 2, 2, LLAMA),
    "ik-bf16": Entry("ik_llama.cpp", "bf16", 2, 2, LLAMA, file="llama-bf16"),
    "openvino-fp16": Entry("OpenVINO", "bf16", 2, 1, OPENVINO),  # computed in bf16 if the CPU can
    "int8": Entry("this engine", "int8", 34 / 32, 2, ("numba",)),
    "llama-q8_0": Entry("llama.cpp", "Q8_0", 34 / 32, 2, LLAMA),
    "ik-q8_0": Entry("ik_llama.cpp", "Q8_0", 34 / 32, 2, LLAMA, file="llama-q8_0"),
    "openvino-int8": Entry("OpenVINO", "int8", 1, 1, OPENVINO),
    "ct2-int8": Entry("CTranslate2", "int8", 1, 4, CT2),
    "int4": Entry("this engine", "int4", 5.06 / 8, 2, ("numba",)),  # of the 0.6B: some matrices have more bits
    "llama-q4_0": Entry("llama.cpp", "Q4_0", 18 / 32, 2, LLAMA),
    "ik-q4_0": Entry("ik_llama.cpp", "Q4_0", 18 / 32, 2, LLAMA, file="llama-q4_0"),
    "openvino-int4": Entry("OpenVINO", "int4", 4.5 / 8, 1, OPENVINO),
    "q4_k_m": Entry("this engine", "Q4_K_M", 5.42 / 8, 2, ("numba", *LLAMA), file="llama-q4_k_m"),
    "llama-q4_k_m": Entry("llama.cpp", "Q4_K_M", 5.33 / 8, 2, LLAMA),
    "ik-q4_k_m": Entry("ik_llama.cpp", "Q4_K_M", 5.33 / 8, 2, LLAMA, file="llama-q4_k_m"),
    "llama-q5_k_m": Entry("llama.cpp", "Q5_K_M", 5.9 / 8, 2, LLAMA, False),
    "llama-q6_k": Entry("llama.cpp", "Q6_K", 6.6 / 8, 2, LLAMA, False),
    "torch-bf16": Entry("transformers + torch", "bf16", 2, 2, ("torch", "transformers"), False),
    "numpy": Entry("plain NumPy", "float32", 4, 4, ()),
    "torch": Entry("transformers + torch", "float32", 4, 4, ("torch", "transformers")),
}
PAIRS = {"bf16": "llama-bf16", "int8": "llama-q8_0", "int4": "llama-q4_0"}  # what is compared with each other
ALL = [name for pair in PAIRS.items() for name in pair]
BANDWIDTH, NAN = " bandwidth", float("nan")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def random_model(path: Path, **changes: Any) -> Path:
    """A folder with random weights in the exact shape of Qwen3-0.6B, but for `changes` of its config.json."""
    from make_random_model import make_random_model, official_config
    return make_random_model(official_config("0.6B") | changes, path)


# ---- Processes -------------------------------------------------------------------------------------------------------

def alone(work: Callable, *args: Any) -> Any:
    """work(*args) in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


class Worker:
    """A process of its own with an engine, start(*args). Raises RuntimeError if it can't be started."""

    def __init__(self, start: Callable, *args: Any):
        self.pool = ProcessPoolExecutor(1, get_context("spawn"))
        self.pool.submit(begin, start, args).result()

    def __call__(self, work: Callable | str, *args: Any) -> Any:
        return self.pool.submit(use, work, args).result()


def begin(start: Callable, args: Sequence[Any]) -> None:
    global engine
    engine = start(*args)


def use(work: Callable | str, args: Sequence[Any]) -> Any:
    return getattr(engine, work)(*args) if isinstance(work, str) else work(engine, *args)


def peak_bytes(_: Any = None) -> int:
    """The most memory that this process has taken."""
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def opened(name: str, start: Callable[[bool], Any], notes: list[str]) -> Any:
    """start(True): what opens an engine in a process of its own -> its result; None if it can't, with a note why.

    llama.cpp gets a second chance: on some CPUs it crashes when it brings the weights into an order of its own, which
    start(False) forbids.
    """
    missing = [package for package in ENTRIES[name].needs if importlib.util.find_spec(package) is None]
    reason = f"{', '.join(missing)} not installed"
    for repack in () if missing else (True, False) if name.startswith("llama") else (True,):
        try:
            result = start(repack)
        except RuntimeError as error:  # the engine's own, or because its process has crashed
            reason = str(error)
            continue
        if not repack:
            notes.append(f"{name} runs without repacked weights (use_extra_bufts), with which it failed: {reason}")
        return result
    notes.append(f"{name} is left out: {reason}")
    return None


class Reader:
    """Measures what the memory and OpenBLAS can do."""

    def __init__(self, threads: int):
        import numba

        @numba.njit(nogil=True, fastmath=True)
        def total_of_streams(part):  # four places at a time, so that they hide each other's waiting
            quarter, sum_ = len(part) // 4, np.float32(0)
            for i in range(quarter):
                sum_ += part[i] + part[quarter + i] + part[2 * quarter + i] + part[3 * quarter + i]
            return sum_

        self.matrix, vector = np.ones((2**16, 2**12), np.float32), np.ones(2**12, np.float32)
        parts, pool = np.array_split(self.matrix.reshape(-1), threads), ThreadPoolExecutor(threads)
        self.ways = [lambda: self.matrix @ vector, lambda: [*pool.map(lambda part: part @ part, parts)],
                     lambda: [*pool.map(total_of_streams, parts)]]

    def bandwidth(self) -> float:
        """Bytes per second of the fastest way to read more than any cache holds."""
        return self.matrix.nbytes / min(seconds(way) for _ in range(2) for way in self.ways)

    def sgemm(self, shapes: Sequence[tuple[int, int]], n: int = 512) -> float:
        """Operations per second of OpenBLAS, when it multiplies n vectors with float32 matrices of these shapes."""
        rng = np.random.default_rng(0)
        matrices = [rng.standard_normal(shape, np.float32) for shape in shapes]
        vectors = {columns: rng.standard_normal((columns, n), np.float32) for _, columns in shapes}
        best = min(seconds(lambda: [matrix @ vectors[matrix.shape[1]] for matrix in matrices]) for _ in range(4))
        return 2 * n * sum(matrix.size for matrix in matrices) / best


# ---- Rounds ----------------------------------------------------------------------------------------------------------

class Bench:
    """A run of a work.

    `values` maps (engine, what) to one value for each round, `checked` an engine to the result of its first check;
    `notes` are lines below the tables. `path` has the model; other engines' files are written into `folder`, by default
    one that goes in the end, if they aren't there yet.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.stack = args, contextlib.ExitStack()
        self.temporary = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.path, self.folder = Path(), args.files or self.temporary
        self.values: dict[tuple[str, Any], list[Any]] = {}
        self.checked: dict[str, Any] = {}
        self.notes = [f"The machine's load average before the run: {os.getloadavg()[0]:.1f}."]
        self.workers: dict[str, Worker] = {}

    @cached_property
    def reader(self) -> Worker:
        return self.worker(Reader, self.args.threads)

    def worker(self, start: Callable, *args: Any) -> Worker:
        """One that ends with the run."""
        worker = Worker(start, *args)
        self.stack.callback(worker.pool.shutdown)
        return worker

    def model(self, make: Callable[..., Path] = random_model, **changes: Any) -> Any:
        """Takes the model of --model, or makes one -> its Config."""
        from qwen3_lib.io.models import open_model
        self.path = self.args.model or alone(partial(make, **changes), self.temporary / "model")
        return open_model(str(self.path)).config

    def names(self, names: Iterable[str]) -> list[str]:
        """Those that --engines names, if it is given."""
        return [name for name in names if name in (self.args.engines or ENTRIES)]

    def open(self, name: str, start: Callable, *more: Any, check: Callable = peak_bytes, **options: Any) -> None:
        """A process with the engine start(name, path, folder, threads, *more, repack=…), which has passed a check."""
        def begun(repack: bool) -> tuple[Worker, Any]:
            worker = self.worker(partial(start, repack=repack, **options), name, self.path, self.folder,
                                 self.args.threads, *more)
            return worker, worker(check)

        note(f"{name}: loading")
        if found := opened(name, begun, self.notes):
            self.workers[name], self.checked[name] = found

    def each(self, what: Any, work: Callable | str, *args: Any, names: Iterable[str] | None = None,
             rounds: int | None = None, warm: bool = True) -> None:
        """Rounds over the engines, with the memory's bandwidth before each work; `warm`: one more before them."""
        for i in range(not warm, (rounds or self.args.rounds) + 1):
            note(f"{what}: round {i}")
            for name in self.workers if names is None else names:
                bandwidth, value = self.reader(Reader.bandwidth), self.workers[name](work, *args)
                if i:
                    self.values.setdefault((name, what), []).append(value)
                    self.values.setdefault((name, f"{what}{BANDWIDTH}"), []).append(bandwidth)

    def bandwidths(self) -> list[float]:
        return [value for (_, what), found in self.values.items() if str(what).endswith(BANDWIDTH) for value in found]

    def close(self, *names: str) -> None:
        """Ends these processes."""
        for name in names:
            self.workers.pop(name).pool.shutdown()

    def median(self, name: str, what: Any) -> float:
        """NaN if it wasn't measured."""
        return median(self.values[name, what]) if (name, what) in self.values else NAN

    def ratio(self, name: str, peer: str, what: Any, other: Any = None) -> float:
        pairs = zip(self.values.get((name, what), []), self.values.get((peer, what if other is None else other), []))
        return median([a / b for a, b in pairs] or [NAN])

    def share(self, name: str, what: Any, n_bytes: float) -> float:
        """Of the memory's bandwidth, of a step that reads so many bytes."""
        return self.ratio(name, name, what, f"{what}{BANDWIDTH}") * n_bytes

    def same(self, name: str) -> str:
        """How many first tokens of an engine's check are those of the first engine."""
        pairs = [*zip(self.checked[name], next(iter(self.checked.values())))]
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"

    def ratios(self, *whats: Any) -> list[str]:
        """A table: this engine beside llama.cpp, where both were measured."""
        rows = [[name, *(f"{self.ratio(name, peer, what):.2f}" for what in whats)] for name, peer in PAIRS.items()
                if {(name, whats[0]), (peer, whats[0])} <= self.values.keys()]
        return ["", *table(["this engine / llama.cpp", *map(str, whats)], *rows)] if rows else []

    def publish(self, name: str, lines: Iterable[str]) -> None:
        """Prints the result of a work, and writes it to NAME.md."""
        packages = ", ".join(f"{package} {version}" for package, version in versions().items())
        about = f"{cpu_name()}, {os.cpu_count()} cores, {self.args.threads} threads; {packages}"
        text = "\n".join([f"# The latest run of bench/run.py --only {name}", "", f"{about}; {datetime.date.today()}",
                          "", *lines, "", *(f"- {line}" for line in self.notes)]).rstrip() + "\n"
        print(text)
        (self.args.out / f"{name.upper()}.md").write_text(text, "utf-8")


# ---- Tables ----------------------------------------------------------------------------------------------------------

def table(*rows: Sequence[str]) -> list[str]:
    """A table in Markdown; the first row has the titles. What wasn't measured is a dash."""
    lines = [f"| {' | '.join('–' if cell == 'nan' else cell for cell in row)} |" for row in rows]
    return [lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]]


def engines_table(titles: Sequence[str], cells: dict[str, Sequence[str]]) -> list[str]:
    """A table with a row for each engine: what it is, and its cells."""
    return table(["engine", "format", *titles], *([ENTRIES[name].engine, ENTRIES[name].format, *row]
                                                  for name, row in cells.items()))


def cpu_name() -> str:
    """The processor, as the system names it."""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The version of Python, and of the packages that were measured and are installed."""
    found = {"Python": platform.python_version()}
    for package in ("numpy", "numba", "llama-cpp-python", "openvino-genai", "ctranslate2", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found

