"""Speed and memory of the fast engine against the memory's limit and against other engines, all in one run.

    python bench/run.py                        all that is installed; 16 GB; 34 minutes with --rounds 2
    python bench/run.py --quick --rounds 2     fewer tokens, for a look
    python bench/run.py --tokenizer FOLDER     with the tokenizer of an official model, for an honest start-up

Random weights in the exact shape of Qwen3-0.6B. Each engine has a process of its own; rounds go over all engines in
turn, and ratios are medians of each round's ratio: on a shared machine a ratio means something, a single time does not.
The read bandwidth is what the memory gives to whatever reads 1 GiB fastest, measured right before each decoding.
llama.cpp is tried again without repacked weights if it crashes; peers that are not installed, or that crash for good,
are left out with a note. The text goes to bench/RESULTS.md, too, and with matplotlib there is a picture,
bench/results.png.
"""
import argparse
import datetime
import json
import os
import platform
import resource
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
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from qwen3 import tensor_shapes  # noqa: E402
from peers import ENTRIES, gguf_file, open_engine, opened, write_gguf  # noqa: E402


class Goal(NamedTuple):
    """What the fast engine is to reach in a format: ratios to the peer, and shares of the bandwidth.

    ik_llama.cpp, which no package installs, was measured once beside llama.cpp: it decodes `ik_decode` times and reads
    prompts `ik_prefill` times as fast. The faster of the two is the peer that counts.
    """
    peer: str
    ik_decode: float
    ik_prefill: float
    decode: float
    share: float
    prefill: float
    long: float  # decoding with the longest context
    long_share: float
    long_prefill: float  # of a prompt as long as that


GOALS = {"bf16": Goal("llama-bf16", 1.0, 1.24, 1.05, 0.90, 0.92, 1.2, 0.85, 1.0),
         "int8": Goal("llama-q8_0", 1.09, 1.77, 1.05, 0.88, 1.25, 1.7, 0.92, 1.3),
         "int4": Goal("llama-q4_0", 1.0, 1.41, 1.05, 0.82, 1.25, 1.5, 0.87, 1.25),
         "q4_k_m": Goal("llama-q4_k_m", 1.06, 1.3, 1.1, 0.82, 1.3, 1.1, 0.82, 1.0)}  # the same file
TORCH_GOAL, MEMORY_GOAL, LOAD_GOAL, FIRST_GOAL = 1.2, 1.25, 10, 25
FLOAT32 = ("numpy", "torch")
STEP = 512  # tokens at a time, to fill a cache
MARGIN = 64  # positions behind the longest context
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
    if name in GOALS:
        engine.tune()


def fill(ids: Sequence[int]) -> None:
    """The cache holds these tokens and nothing else."""
    engine.truncate(0)
    for start in range(0, len(ids), STEP):
        engine.run(ids[start:start + STEP])


def fill_speed(ids: Sequence[int]) -> float:
    return len(ids) / seconds(lambda: fill(ids))


def prefill_speed(ids: Sequence[int]) -> float:
    engine.truncate(0)
    return len(ids) / seconds(lambda: engine.run(ids))


def decode_speed(context: int, ids: Sequence[int]) -> float:
    """Tokens per second behind the first `context` positions of the cache, by the median token.

    By the mean, other work on the machine would decide: threads of OpenMP that spin for one whose core was taken lose
    tenths of a second at once.
    """
    engine.truncate(context)
    return 1 / median(seconds(lambda: engine.run([token])) for token in ids)


def peak_memory(name: str, path: Path, folder: Path, threads: int, ids: Sequence[int],
                repack: bool) -> tuple[int, float]:
    """(the most memory in bytes of this process, seconds to load) for a long prompt and 16 more tokens."""
    global engine
    start = time.perf_counter()
    engine = open_engine(name, path, folder, threads, len(ids), repack)
    load = time.perf_counter() - start
    engine.run(ids[:-16])
    for token in ids[-16:]:
        engine.run([token])
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
    """Writes the model in `path` for llama.cpp, if the engine reads such a file and it isn't there yet."""
    name = ENTRIES[name].file or name
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
        self.notes = [f"the machine's load average before the run: {os.getloadavg()[0]:.1f}"]
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
        if name in GOALS:  # what is compiled for this format isn't measured
            alone(peak_memory, *args)
        return alone(peak_memory, *args)

    def run(self) -> None:
        """All rounds: start-up first, then decoding with ever shorter context, then prefill."""
        self.start_up()
        reader = new_process(start_reader, self.threads)
        workers = {name: new_process(start_engine, name, self.path, self.folder, self.threads, self.sizes.long + MARGIN,
                                     name not in self.plain) for name in self.names}
        compared = {name: worker for name, worker in workers.items() if name not in FLOAT32}
        self.each_round(f"prefill {self.sizes.long}", compared, reader, min(self.rounds, LONG_ROUNDS), fill_speed,
                        self.ids[:self.sizes.long])
        for context, decoded in zip(self.sizes.contexts, self.sizes.decoded):
            taking_part = {name: worker for name, worker in workers.items()
                           if context == self.sizes.short or name not in self.skipped}
            self.fill(taking_part, context)
            self.each_round(f"decode {context}", taking_part, reader, self.rounds, decode_speed, context,
                            self.ids[:decoded])
        self.each_round("prefill", workers, reader, self.rounds, prefill_speed, self.ids[:self.sizes.prompt])
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
        """Rounds over all engines, with the bandwidth before each. The first round warms up."""
        for i in range(rounds + 1):
            note(f"{what}: round {i} of {rounds}")
            if i > 0 and what.startswith("prefill"):
                self.values.setdefault(("sgemm", what), []).append(self.float32_limit(len(args[0]), reader))
            for name, worker in workers.items():
                bandwidth = reader.submit(read_bandwidth).result()
                speed = worker.submit(work, *args).result()
                if i > 0:
                    self.values.setdefault((name, what), []).append(speed)
                    self.values.setdefault((name, f"{what} bandwidth"), []).append(bandwidth)

    def float32_limit(self, n: int, reader: ProcessPoolExecutor) -> float:
        """Tokens per second of a prompt of n tokens whose products and attention run as fast as OpenBLAS multiplies."""
        config = self.config
        matrices = layer_matrices(tensor_shapes(config))
        rate = reader.submit(sgemm_rate, matrices[:len(matrices) // config.num_hidden_layers]).result()
        attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * n  # half is masked
        return rate / (2 * sum(rows * columns for rows, columns in matrices) + attention)

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
        """Median tokens per second, or None if it wasn't measured."""
        return median(self.values[name, what]) if (name, what) in self.values else None

    def ratio(self, name: str, peer: str, what: str, faster: float = 1.0) -> float | None:
        """Median over the rounds of name's value / peer's value, which is taken to be `faster` times as large."""
        if (name, what) not in self.values or (peer, what) not in self.values:
            return None
        return median(a / b for a, b in zip(self.values[name, what], self.values[peer, what])) / max(faster, 1.0)

    def bandwidth(self) -> float:
        return median(value for (_, what), values in self.values.items() if what.endswith("bandwidth")
                      for value in values)

    def read_bytes(self, name: str, context: int) -> float:
        return read_bytes(self.config, name, context)

    def share(self, name: str, context: int) -> float | None:
        """Median share of the bandwidth that decoding uses."""
        what = f"decode {context}"
        if (name, what) not in self.values:
            return None
        pairs = zip(self.values[name, what], self.values[name, f"{what} bandwidth"])
        return median(speed / bandwidth for speed, bandwidth in pairs) * self.read_bytes(name, context)


# ----------------------------------------------------------------------------------------------------------------------
# Writing it down
# ----------------------------------------------------------------------------------------------------------------------


def cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def table(bench: Bench) -> list[str]:
    sizes = bench.sizes
    titles = ["engine", "format", *(f"prefill {n}, tokens/s" for n in (sizes.prompt, sizes.long))]
    for context in (sizes.short, sizes.long):
        titles += [f"decode at {context}, tokens/s", "GB/s", "of the bandwidth"]
    titles.append("peak memory, GB")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for name in bench.names:
        cells = [ENTRIES[name].engine, ENTRIES[name].format,
                 *(cell(bench.speed(name, what), 1) for what in ("prefill", f"prefill {sizes.long}"))]
        for context in (sizes.short, sizes.long):
            speed = bench.speed(name, f"decode {context}")
            gigabytes = None if speed is None else speed * bench.read_bytes(name, context) / 1e9
            cells += [cell(speed, 2), cell(gigabytes, 1), cell(bench.share(name, context), 2)]
        lines.append(f"| {' | '.join([*cells, cell(bench.memory[name][0] / 1e9, 2)])} |")
    return lines


def goals(bench: Bench) -> list[tuple[str, float | None, str, float]]:
    """(what, measured or None, "at least" or "at most", wanted) for all that the fast engine is to reach."""
    rows: list[tuple[str, float | None, str, float]] = []
    least, most, sizes = "at least", "at most", bench.sizes
    for name, goal in GOALS.items():
        peer = goal.peer
        other, better = f"{ENTRIES[peer].engine} {ENTRIES[peer].format}", "the faster of llama.cpp and ik_llama.cpp"
        for context, ratio, part in ((sizes.short, goal.decode, goal.share), (sizes.long, goal.long, goal.long_share)):
            what = f"decode {context}"
            rows += [(f"{name}: {what} / {better}", bench.ratio(name, peer, what, goal.ik_decode), least, ratio),
                     (f"{name}: {what}, share of the bandwidth", bench.share(name, context), least, part)]
        for n, what, ratio in ((sizes.prompt, "prefill", goal.prefill),
                               (sizes.long, f"prefill {sizes.long}", goal.long_prefill)):
            rows.append((f"{name}: prefill {n} / {better}", bench.ratio(name, peer, what, goal.ik_prefill), least, ratio))
        both = name in bench.memory and peer in bench.memory
        memory = bench.memory[name][0] / bench.memory[peer][0] if both else None
        rows.append((f"{name}: peak memory / {other}", memory, most, MEMORY_GOAL))
    rows += [(f"bf16: prefill {sizes.prompt}, share of float32's limit (sgemm)", bench.ratio("bf16", "sgemm", "prefill"),
              least, 0.92),
             (f"bf16: prefill {sizes.long}, share of float32's limit (sgemm)",
              bench.ratio("bf16", "sgemm", f"prefill {sizes.long}"), least, 0.85),
             (f"bf16: prefill {sizes.prompt} / torch float32", bench.ratio("bf16", "torch", "prefill"), least, TORCH_GOAL)]
    rows.append(("seconds of the first run to the bundled model's first answer, compiling",
                 bench.speed("bf16", "first run"), most, FIRST_GOAL))
    return rows + [(f"{name}: seconds to load and quantize", bench.memory[name][1], most, LOAD_GOAL)
                   for name in ("int8", "int4") if name in bench.memory]


def goals_table(bench: Bench) -> list[str]:
    lines = ["| | measured | wanted | reached |", "| --- | --- | --- | --- |"]
    for what, measured, relation, wanted in goals(bench):
        if measured is not None:
            reached = measured >= wanted if relation == "at least" else measured <= wanted
            lines.append(f"| {what} | {measured:.2f} | {relation} {wanted:g} | {'yes' if reached else '**no**'} |")
    return lines


def machine(threads: int) -> str:
    """One line: the processor, and the versions of what was measured."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    versions = [f"Python {platform.python_version()}"]
    for package in ("numpy", "numba", "llama-cpp-python", "torch", "transformers"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{cpu}, {os.cpu_count()} cores, {threads} threads; {', '.join(versions)}; {datetime.date.today()}"


def report(bench: Bench) -> str:
    starts = [f"{ENTRIES[name].engine} {bench.speed(name, 'start'):.2f} s"
              for name in ("bf16", "llama-bf16") if (name, "start") in bench.values]
    limits = ", ".join(f"{ENTRIES[name].format} {bench.bandwidth() / bench.read_bytes(name, 0):.1f}"
                       for name in ("numpy", *GOALS))
    bandwidth = f"{bench.bandwidth() / 1e9:.1f} GB/s"
    lines = [machine(bench.threads), "", f"Read bandwidth {bandwidth}: decoding can't pass {limits} tokens/s.", "",
             *table(bench), "", *goals_table(bench), ""]
    if starts:
        lines += [f"Start-up, a whole process for a few words and one more token: {', '.join(starts)}. This engine "
                  f"loads a tokenizer of {vocabulary_size(bench.path)} tokens for it, llama.cpp none.", ""]
    return "\n".join(lines + [f"- {text}\n" for text in bench.notes])


def vocabulary_size(path: Path) -> int:
    return len(json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])


def draw(bench: Bench, file: Path) -> None:
    """Two pictures: each engine's tokens/s below the memory's limit, and decoding over the length of the context."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    limits, lengths = figure.subplots(1, 2)
    draw_limits(bench, limits)
    draw_lengths(bench, lengths)
    figure.savefig(file, dpi=100)


def draw_limits(bench: Bench, axes: Any) -> None:
    colors = {"this engine": "tab:blue", "llama.cpp": "tab:orange"}
    for i, name in enumerate(bench.names):
        speed = bench.speed(name, f"decode {bench.sizes.short}")
        limit = bench.bandwidth() / bench.read_bytes(name, bench.sizes.short)
        axes.bar(i, speed, color=colors.get(ENTRIES[name].engine, "tab:gray"))
        axes.hlines(limit, i - 0.45, i + 0.45, color="black", label=None if i else "the memory's limit")
        axes.text(i, speed / 2, f"{speed:.1f}", ha="center")
    labels = [f"{ENTRIES[name].engine}\n{ENTRIES[name].format}" for name in bench.names]
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set(title="Decoding at short context", ylabel="tokens/s")
    axes.legend(loc="upper left")


def draw_lengths(bench: Bench, axes: Any) -> None:
    contexts = bench.sizes.contexts[::-1]
    for i, pair in enumerate((name, goal.peer) for name, goal in GOALS.items()):
        for name, style in zip(pair, ("o-", "o--")):
            if name in bench.names:
                speeds = [bench.speed(name, f"decode {context}") for context in contexts]
                label = f"{ENTRIES[name].engine} {ENTRIES[name].format}"
                axes.plot(contexts, speeds, style, color=f"C{i}", label=label)
    axes.set(title="Decoding over the length of the context", xlabel="tokens of context", ylabel="tokens/s", ylim=0)
    axes.legend()


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
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder of RESULTS.md and results.png")
    args = parser.parse_args()
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
        text = report(bench)
        print(text)
        keep(bench, text, args.out)


def make_model(path: Path, tokenizer: Path = ROOT / "demo") -> Path:
    from make_random_model import make_random_model, official_config
    return make_random_model(official_config("0.6B"), path, tokenizer=tokenizer)


def keep(bench: Bench, text: str, folder: Path) -> None:
    """Writes the text and, with matplotlib, the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "RESULTS.md").write_text("# The latest run of bench/run.py\n\n" + text)
    try:
        draw(bench, folder / "results.png")
    except ImportError:
        note("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main()
