"""What all measurements share: processes, rounds, the memory's limit, tables.

    bench = Bench(args)
    bench.open("int8", path, folder, start)     a process with an engine, or a note why it is left out
    bench.each("decode", decode_speed, ids)     rounds over all engines in turn -> values["int8", "decode"]
    bench.ratio("int8", "llama-q8_0", "decode")

A work gets the engine of its process first: decode_speed(engine, ids). The first round warms up. Speeds are medians of
the rounds, ratios medians of each round's ratio: on a shared machine a ratio means something, a single speed does not.
"""
import argparse
import contextlib
import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PAIRS = {"bf16": "llama-bf16", "int8": "llama-q8_0", "int4": "llama-q4_0"}  # what is compared with each other
BANDWIDTH, NAN = " bandwidth", float("nan")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- Options ---------------------------------------------------------------------------------------------------------

def options(about: str | None, rounds: int = 3,
            model: str = "random weights, made for the run") -> argparse.ArgumentParser:
    """A parser with the options of all measurements."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=f"default: {model}")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder for the text (default: bench)")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options. The processes to come have so many threads."""
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(args.threads)
    return args


def random_model(path: Path, tokenizer: Path = ROOT / "demo", **changes: Any) -> Path:
    """A folder with random weights in the exact shape of Qwen3-0.6B, but for `changes` of its config.json."""
    from make_random_model import make_random_model, official_config
    return make_random_model(official_config("0.6B") | changes, path, tokenizer=tokenizer)


# ---- Processes -------------------------------------------------------------------------------------------------------

def alone(work: Callable, *args: Any) -> Any:
    """work(*args) in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


class Worker:
    """A process of its own with an engine, start(*args)."""

    def __init__(self, start: Callable, *args: Any):
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), begin, (start, args))

    def __call__(self, work: Callable, *args: Any) -> Any:
        return self.pool.submit(use, work, args).result()

    def close(self) -> None:
        self.pool.shutdown()


def begin(start: Callable, args: Sequence[Any]) -> None:
    global engine
    engine = start(*args)


def use(work: Callable, args: Sequence[Any]) -> Any:
    return work(engine, *args)


def peak_bytes(_: Any = None) -> int:
    """The most memory that this process has taken."""
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Reader:
    """Measures what the memory and OpenBLAS can do."""

    def __init__(self, threads: int):
        import numba

        @numba.njit(nogil=True, fastmath=True)
        def total(part):
            sum_ = np.float32(0)
            for value in part:
                sum_ += value
            return sum_

        @numba.njit(nogil=True, fastmath=True)
        def total_of_streams(part):  # four places at a time, so that they hide each other's waiting
            quarter, sum_ = len(part) // 4, np.float32(0)
            for i in range(quarter):
                sum_ += part[i] + part[quarter + i] + part[2 * quarter + i] + part[3 * quarter + i]
            return sum_

        self.matrix, vector = np.ones((2**16, 2**12), np.float32), np.ones(2**12, np.float32)
        parts, pool = np.array_split(self.matrix.reshape(-1), threads), ThreadPoolExecutor(threads)
        self.ways = [lambda: self.matrix @ vector] + [lambda sum_=sum_: list(pool.map(sum_, parts)) for sum_ in (
            lambda part: part @ part, total, total_of_streams)]

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
    """`values` maps (engine, what) to one value for each round; `notes` are lines below the tables."""

    def __init__(self, args: argparse.Namespace):
        self.threads, self.rounds = args.threads, args.rounds
        self.values: dict[tuple[str, Any], list[Any]] = {}
        self.notes = [f"The machine's load average before the run: {os.getloadavg()[0]:.1f}."]
        self.workers: dict[str, Worker] = {}
        self.reader = Worker(Reader, args.threads)

    def open(self, name: str, path: Path, folder: Path, start: Callable, *more: Any,
             check: Callable = peak_bytes) -> Any:
        """A process with the engine start(name, path, folder, threads, *more, repack) of the model in `path`.

        A peer's file is written into `folder`. The engine must pass a first check -> the check's result.
        """
        from peers import opened, write_once

        def begun(repack: bool) -> tuple[Worker, Any]:
            write_once(path, folder, name)
            worker = Worker(start, name, path, folder, self.threads, *more, repack)
            try:
                return worker, worker(check)
            except RuntimeError:
                worker.close()
                raise

        note(f"{name}: loading")
        if found := opened(name, begun, self.notes):
            self.workers[name], result = found
            return result

    def each(self, what: Any, work: Callable, *args: Any, names: Iterable[str] | None = None, rounds: int | None = None,
             warm: bool = True) -> None:
        """Rounds over the engines, with the memory's bandwidth before each work; `warm`: one more before them."""
        for i in range(not warm, (rounds or self.rounds) + 1):
            note(f"{what}: round {i}")
            for name in self.workers if names is None else names:
                bandwidth, value = self.reader(Reader.bandwidth), self.workers[name](work, *args)
                if i:
                    self.values.setdefault((name, what), []).append(value)
                    self.values.setdefault((name, f"{what}{BANDWIDTH}"), []).append(bandwidth)

    def bandwidths(self) -> list[float]:
        return [value for (_, what), found in self.values.items() if str(what).endswith(BANDWIDTH) for value in found]

    def close(self, *names: str) -> None:
        """Ends these processes; without names, all."""
        for name in names or [*self.workers]:
            self.workers.pop(name).close()
        if not names:
            self.reader.close()

    def median(self, name: str, what: Any) -> float:
        """NaN if it wasn't measured."""
        return median(self.values[name, what]) if (name, what) in self.values else NAN

    def ratio(self, name: str, peer: str, what: Any, other: Any = None) -> float:
        pairs = zip(self.values.get((name, what), []), self.values.get((peer, what if other is None else other), []))
        return median([a / b for a, b in pairs] or [NAN])

    def share(self, name: str, what: Any, n_bytes: float) -> float:
        """Of the memory's bandwidth, of a step that reads so many bytes."""
        return self.ratio(name, name, what, f"{what}{BANDWIDTH}") * n_bytes

    def ratios(self, *whats: Any) -> list[str]:
        """A table: this engine beside llama.cpp."""
        rows = [[name, *(f"{self.ratio(name, peer, what):.2f}" for what in whats)] for name, peer in PAIRS.items()]
        return table(["this engine / llama.cpp", *map(str, whats)], *rows)


# ---- Tables ----------------------------------------------------------------------------------------------------------

def table(*rows: Sequence[str]) -> list[str]:
    """A table in Markdown; the first row has the titles. What wasn't measured is a dash."""
    lines = [f"| {' | '.join('–' if cell == 'nan' else cell for cell in row)} |" for row in rows]
    return [lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]]


def publish(file: Path, threads: int, lines: Sequence[str], notes: Sequence[str] = ()) -> None:
    """Prints a text, and writes it."""
    text = "\n".join([f"# The latest run of bench/{Path(sys.argv[0]).name}", "", machine(threads), "", *lines, "",
                      *(f"- {line}" for line in notes)]).rstrip() + "\n"
    print(text)
    file.write_text(text, "utf-8")


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
    for package in ("numpy", "numba", "llama-cpp-python", "openvino-genai", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine(threads: int) -> str:
    """One line: the processor, and the versions of what was measured."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{cpu_name()}, {os.cpu_count()} cores, {threads} threads; {packages}; {datetime.date.today()}"
