"""Speed and memory of the fast engine against the memory's limit and against other engines, all in one run.

    python bench/run.py                        all that is installed; 16 GB; 15 minutes with --rounds 1
    python bench/run.py --quick --rounds 2     fewer tokens, for a look
    python bench/run.py --tokenizer FOLDER     with the tokenizer of an official model, for an honest start-up

Random weights in the exact shape of Qwen3-0.6B. Each engine has a process of its own; rounds go over all engines in
turn, and speeds are medians of the rounds: on a shared machine their ratios mean something, a single speed does not.
The read bandwidth is what the memory gives to whatever reads 1 GiB fastest, measured right before each decoding.
llama.cpp is tried again without repacked weights if it crashes; peers that are not installed, or that crash for good,
are left out with a note. For OpenVINO, `optimum-cli` of an environment of its own must be in $PATH. The figures go to a
file in bench/results/, one for each kind of CPU; then `python bench/figures.py --write` writes the tables of README.md,
docs/speed.md and bench/RESULTS.md, and the picture.
"""
import argparse
import contextlib
import datetime
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from figures import OURS, whole_table  # noqa: E402
from qwen3 import __version__, tensor_shapes  # noqa: E402
from peers import (  # noqa: E402
    ENTRIES, NumbaEngine, OpenVinoEngine, export_openvino, gguf_file, open_engine, opened, write_gguf)

FLOAT32 = ("numpy", "torch")
ROUNDED = ENTRIES["bf16-rounded"].format
OUR_FORMAT = {"Q8_0": "int8", "Q4_0": "int4"}  # what the peers' formats stand beside
STEP = 512  # tokens at a time, to fill a peer's cache
MARGIN = 64  # positions after the longest context
LONG_ROUNDS = 1  # at most, of prompts as long as that: each takes half a minute


@dataclass(frozen=True)
class Sizes:
    """How many tokens are measured."""
    prompt: int = 512
    contexts: tuple[int, ...] = (4096, 1024, 16)  # tokens in the cache before decoding, most first
    decoded: tuple[int, ...] = (16, 16, 24)  # after each of them

    @property
    def short(self) -> int:
        return self.contexts[-1]

    @property
    def long(self) -> int:
        return self.contexts[0]


QUICK = Sizes(128, (1024, 256, 16), (6, 6, 10))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ----------------------------------------------------------------------------------------------------------------------
# Inside the workers: `engine` is the one of this process
# ----------------------------------------------------------------------------------------------------------------------


def start_engine(name: str, path: Path, folder: Path, threads: int, capacity: int, repack: bool) -> None:
    global engine
    engine = open_engine(name, path, folder, threads, capacity, repack)


def fill(ids: Sequence[int]) -> None:
    """The cache holds these tokens and nothing else. This project's engines cut a prompt themselves."""
    engine.truncate(0)
    step = len(ids) if isinstance(engine, NumbaEngine) else STEP
    for start in range(0, len(ids), step):
        engine.run(ids[start:start + step])


def prefill_speed(ids: Sequence[int]) -> float:
    if isinstance(engine, OpenVinoEngine):
        return engine.prefill_speed(ids)
    return len(ids) / seconds(lambda: fill(ids))


def decode_speed(context: int, ids: Sequence[int]) -> float:
    """Tokens per second after the first `context` positions of the cache, by the median token.

    By the mean, other work on the machine would decide: threads of OpenMP that spin for one whose core was taken lose
    tenths of a second at once.
    """
    if isinstance(engine, OpenVinoEngine):
        return engine.decode_speed(context, ids)
    engine.truncate(context)
    return 1 / median(seconds(lambda: engine.run([token])) for token in ids)


def peak_memory(name: str, path: Path, folder: Path, threads: int, ids: Sequence[int],
                repack: bool) -> tuple[int, float]:
    """(the most memory in bytes of this process, seconds to load) for a long prompt and 16 more tokens."""
    global engine
    start = time.perf_counter()
    engine = open_engine(name, path, folder, threads, len(ids), repack)
    load = time.perf_counter() - start
    prefill_speed(ids[:-16])
    decode_speed(len(ids) - 16, ids[-16:])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024), load


def start_reader(threads: int) -> None:
    """Makes the worker whose process measures the bandwidth: `ways` read 1 GiB, each its own way."""
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

    global ways, matrix_bytes
    matrix = np.ones((2**16, 2**12), np.float32)
    vector, matrix_bytes = np.ones(2**12, np.float32), matrix.nbytes
    parts, pool = np.array_split(matrix.reshape(-1), threads), ThreadPoolExecutor(threads)
    ways = [lambda: matrix @ vector] + [lambda sum_=sum_: list(pool.map(sum_, parts))
                                        for sum_ in (lambda part: part @ part, total, total_of_streams)]


def read_bandwidth() -> float:
    """Bytes per second of the fastest way to read more than any cache holds."""
    return matrix_bytes / min(seconds(way) for _ in range(2) for way in ways)


def sgemm_rate(shapes: Sequence[tuple[int, int]], n: int = STEP) -> float:
    """Operations per second of OpenBLAS, when it multiplies n vectors with float32 matrices of these shapes."""
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal(shape, np.float32) for shape in shapes]
    vectors = {columns: rng.standard_normal((columns, n), np.float32) for _, columns in shapes}

    def multiply() -> None:
        for matrix in matrices:
            matrix @ vectors[matrix.shape[1]]

    return 2 * n * sum(matrix.size for matrix in matrices) / min(seconds(multiply) for _ in range(4))


# ----------------------------------------------------------------------------------------------------------------------
# Measuring: one process for each engine, in turn
# ----------------------------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def new_process(start: Callable | None = None, *args: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), start, args)


def alone(work: Callable, *args: Any) -> Any:
    """work(*args) in a process of its own."""
    with new_process() as worker:
        return worker.submit(work, *args).result()


def write_once(path: Path, folder: Path, name: str, words: bool = False) -> None:
    """Writes the model in `path` for llama.cpp or OpenVINO, if the engine reads its file and it isn't there yet."""
    name = ENTRIES[name].file or name
    if name.startswith("openvino") and not (folder / name).exists():
        export_openvino(path, folder, name)
    if name.startswith("llama") and not gguf_file(folder, name).exists():
        alone(write_gguf, path, folder, name, 1, words)


def matrix_weights(config: Any) -> int:
    """The weights that a token is multiplied with: all matrices (of an embedding that is no head: none)."""
    shapes = tensor_shapes(config)  # lm_head is among them, and is read, whether it is tied or not
    del shapes["model.embed_tokens.weight"]
    return sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)


def layer_matrices(shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, int]]:
    """The shapes of the matrices of all layers."""
    return [(shape[0], shape[1]) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]


def read_bytes(config: Any, name: str, context: int, sequences: int = 1) -> float:
    """Bytes that a step of decoding reads: all matrices once, and each sequence's keys and values."""
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context
    return matrix_weights(config) * ENTRIES[name].weight_bytes + sequences * cached * ENTRIES[name].kv_bytes


class Bench:
    """The measurements of all engines. `values` maps (engine, what) to a list with one value for each round."""

    def __init__(self, path: Path, folder: Path, names: Sequence[str], threads: int, rounds: int, sizes: Sizes):
        from qwen3_lib.io.models import Checkpoint
        self.path, self.folder, self.threads, self.rounds, self.sizes = path, folder, threads, rounds, sizes
        self.config = Checkpoint(path).config()
        self.ids = np.random.default_rng(0).integers(0, self.config.vocab_size, sizes.long + MARGIN).tolist()
        self.values: dict[tuple[str, str], list[float]] = {}
        self.memory: dict[str, tuple[int, float]] = {}
        self.plain: set[str] = set()  # runs without repacked weights
        self.notes = [f"The machine's load average before the run: {os.getloadavg()[0]:.1f}."]
        self.names = list(names)

    def prepare(self) -> None:
        """Leaves out what isn't installed, writes the files for llama.cpp, and measures each engine's memory alone."""
        for name in list(self.names):
            note(f"{name}: loading, peak memory")
            memory = opened(name, partial(self.measure_memory, name), self.notes)
            if memory is None:
                note(self.notes[-1])
                self.names.remove(name)
            else:
                self.memory[name] = memory

    def measure_memory(self, name: str, repack: bool) -> tuple[int, float]:
        write_once(self.path, self.folder, name)
        if not repack:
            self.plain.add(name)
        args = name, self.path, self.folder, self.threads, self.ids[:self.sizes.prompt + 16], repack
        if ENTRIES[name].engine == "this engine":  # what is compiled for this format isn't measured
            alone(peak_memory, *args)
        return alone(peak_memory, *args)

    def run(self) -> None:
        """All rounds: start-up first, then decoding with ever shorter context, then prefill."""
        self.start_up()
        reader = new_process(start_reader, self.threads)
        workers = {name: new_process(start_engine, name, self.path, self.folder, self.threads, self.sizes.long + MARGIN,
                                     name not in self.plain) for name in self.names}
        compared = {name: worker for name, worker in workers.items() if name not in FLOAT32}
        self.each_round(f"prompt of {self.sizes.long:,}", compared, reader, min(self.rounds, LONG_ROUNDS),
                        prefill_speed, self.ids[:self.sizes.long])
        for context, decoded in zip(self.sizes.contexts, self.sizes.decoded):
            taking_part = {name: worker for name, worker in workers.items()
                           if context == self.sizes.short or name not in self.skipped}
            self.fill(taking_part, context)
            self.each_round(f"decode at {context:,}", taking_part, reader, self.rounds, decode_speed, context,
                            self.ids[:decoded])
        self.each_round(f"prompt of {self.sizes.prompt:,}", workers, reader, self.rounds, prefill_speed,
                        self.ids[:self.sizes.prompt])
        for worker in (reader, *workers.values()):
            worker.shutdown()

    @property
    def skipped(self) -> tuple[str, ...]:
        """Engines that don't get a long context: with --quick, those that take minutes to fill it."""
        return FLOAT32 if self.sizes is QUICK else ()

    def fill(self, workers: dict[str, ProcessPoolExecutor], context: int) -> None:
        """Fills the caches, unless a longer context is already there to be cut."""
        for name, worker in workers.items():
            if name in FLOAT32 and (context == self.sizes.long or name in self.skipped):
                note(f"{name}: {context} tokens into the cache")
                worker.submit(fill, self.ids[:context]).result()

    def each_round(self, what: str, workers: dict[str, ProcessPoolExecutor], reader: ProcessPoolExecutor, rounds: int,
                   work: Callable, *args: Any) -> None:
        """Rounds over all engines, with the bandwidth before each. The first round warms up, but for long work."""
        for i in range(f"{self.sizes.long:,}" in what, rounds + 1):
            note(f"{what}: round {i} of {rounds}")
            if i > 0 and what.startswith("prompt"):
                matrices = layer_matrices(tensor_shapes(self.config))
                rate = reader.submit(sgemm_rate, matrices[:len(matrices) // self.config.num_hidden_layers]).result()
                self.values.setdefault(("sgemm", "rate"), []).append(rate)
            for name, worker in workers.items():
                bandwidth = reader.submit(read_bandwidth).result()
                speed = worker.submit(work, *args).result()
                if i > 0:
                    self.values.setdefault((name, what), []).append(speed)
                    self.values.setdefault((name, f"{what} bandwidth"), []).append(bandwidth)

    def start_up(self) -> None:
        """Seconds of a whole process that continues a few words with one token."""
        ours = ["--model", self.path, "--raw", "--max-tokens", "1", "the of and to"]
        commands = {"bf16": [ROOT / "qwen3_numba.py", *ours],
                    "llama-bf16": [ROOT / "bench/peers.py", gguf_file(self.folder, "llama-bf16"), *self.ids[:4]]}
        for i in range(self.rounds + 1):
            for name in [name for name in commands if name in self.names]:
                command = [sys.executable, *map(str, commands[name]), "--threads", str(self.threads)]
                taken = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
                if i > 0:
                    self.values.setdefault((name, "start"), []).append(taken)
        if "bf16" in self.names:
            with tempfile.TemporaryDirectory() as folder:  # where no machine code is kept
                first = [sys.executable, str(ROOT / "qwen3_numba.py"), "--max-tokens", "8", "Hello"]
                environment = os.environ | {"NUMBA_CACHE_DIR": folder}
                self.values["bf16", "first run"] = [seconds(lambda: subprocess.run(
                    first, check=True, capture_output=True, env=environment))]

    # What is made of the measurements

    def speed(self, name: str, what: str) -> float | None:
        """Median of the rounds, or None if it wasn't measured."""
        return median(self.values[name, what]) if (name, what) in self.values else None

    def bandwidth(self) -> float:
        return median(value for (_, what), values in self.values.items() if what.endswith("bandwidth")
                      for value in values)

    def share(self, name: str, context: int) -> float | None:
        """Median share of the bandwidth that decoding uses."""
        what = f"decode at {context:,}"
        if (name, what) not in self.values:
            return None
        pairs = zip(self.values[name, what], self.values[name, f"{what} bandwidth"])
        return median(speed / bandwidth for speed, bandwidth in pairs) * read_bytes(self.config, name, context)

    def cells(self, measured: Callable[[str], float | None]) -> dict[str, dict[str, float]]:
        """Format of ours -> engine -> measured(name), with three digits, for all that were measured."""
        found: dict[str, dict[str, float]] = {}
        for name in self.names:
            entry = ENTRIES[name]
            if (value := measured(name)) is not None:
                engine = OURS if entry.engine in ("this engine", "plain NumPy") else entry.engine
                found.setdefault(OUR_FORMAT.get(entry.format, entry.format), {})[engine] = float(f"{value:.3g}")
        if ROUNDED in found:  # beside the same peers
            found[ROUNDED] = found.get("bf16", {}) | found[ROUNDED]
        return found

    def results(self, method: str) -> dict:
        """What was measured, as bench/figures.py reads it."""
        contexts = {f"decode at {n:,}": n for n in self.sizes.contexts[::-1]}
        works = [*contexts, *(f"prompt of {n:,}" for n in (self.sizes.prompt, self.sizes.long))]
        shares = {work: self.cells(lambda name, n=n: self.share(name, n)) for work, n in contexts.items()}
        commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True)
        return {
            "machine": cpu_name(), "cores": self.threads, "date": str(datetime.date.today()),
            "version": commit.stdout.decode().strip() or __version__, "method": method, "versions": versions(),
            "bandwidth": round(self.bandwidth() / 1e9, 1), "sgemm": round(self.speed("sgemm", "rate") / 1e9),
            "speeds": {work: self.cells(lambda name, work=work: self.speed(name, work)) for work in works},
            "shares": {work: {name: engines[OURS] for name, engines in formats.items() if OURS in engines}
                       for work, formats in shares.items()},
            "others": {"peak memory, GB": self.cells(lambda name: self.memory[name][0] / 1e9),
                       "loading, seconds": self.cells(lambda name: self.memory[name][1]),
                       "start to first token, seconds": self.cells(lambda name: self.speed(name, "start")),
                       "first answer after installation, seconds":
                           self.cells(lambda name: self.speed(name, "first run"))},
            "notes": [*self.notes, f"The start loads a tokenizer of {vocabulary_size(self.path):,} tokens in ours, "
                      "none in llama.cpp."]}


# ----------------------------------------------------------------------------------------------------------------------
# Writing it down
# ----------------------------------------------------------------------------------------------------------------------


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


def vocabulary_size(path: Path) -> int:
    return len(json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path,
                        help="a model folder (default: random weights in the shape of Qwen3-0.6B, made for the run)")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "demo",
                        help="folder whose tokenizer the random weights get (default: the bundled model's)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", metavar="NAME,...", help=f"only these of {', '.join(ENTRIES)}")
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="what to write (default: bench/results/CPU.json, CPU as LLVM names it)")
    args = parser.parse_args()
    import llvmlite.binding  # not above: the processes whose memory is measured import this file, too
    names = args.only.split(",") if args.only else [name for name, entry in ENTRIES.items() if entry.for_speed]
    if unknown := [name for name in names if name not in ENTRIES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(ENTRIES)}")
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # for the processes to come
        os.environ[variable] = str(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or alone(make_model, Path(folder) / "model", args.tokenizer)
        bench = Bench(path, Path(folder), names, args.threads, args.rounds, QUICK if args.quick else Sizes())
        bench.prepare()
        bench.run()
        results = bench.results(f"bench/run.py {shlex.join(sys.argv[1:])}".strip())
    print(whole_table(results))
    out = args.out or ROOT / f"bench/results/{llvmlite.binding.get_host_cpu_name()}.json"
    out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")


def make_model(path: Path, tokenizer: Path = ROOT / "demo") -> Path:
    from make_random_model import make_random_model, official_config
    return make_random_model(official_config("0.6B"), path, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
