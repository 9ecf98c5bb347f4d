"""Tokens per second of many sequences together, through qwen3_batch.Batch and by llama.cpp, all in one run.

    python bench/batch.py                      everything that is installed; about 15 minutes, 12 GB of memory
    python bench/batch.py --model FOLDER       with other weights
    python bench/batch.py --workers            one process with all threads, or two with half of them: docs/scaling.md

Random weights in the exact shape of Qwen3-0.6B. Each engine has a process of its own. Rounds go over the numbers of
sequences, and for each number over all engines in turn; ratios are medians of each round's ratio. A step gives each
sequence one more token, its choice included, after a short prompt of its own.

The limit: a step takes at least the time in which the memory delivers what it reads (all weights once, and the keys
and values of each sequence), and at least the time of its multiplications at the speed that the faster of the two
engines of a format reaches on a prompt of 256 tokens. Both are measured in each round; the fastest counts. The text
goes to bench/BATCH.md, too, and with matplotlib there is a picture, bench/batch.png.
"""
import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import peers  # noqa: E402
from peers import ENTRIES, gguf_file, opened  # noqa: E402
from run import (alone, machine, make_model, matrix_weights, new_process, note, read_bandwidth,  # noqa: E402
                 read_bytes, seconds, start_reader, write_once)

COUNTS = (1, 2, 4, 8, 16, 32)
PAIRS = {"bf16": "llama-bf16", "int8": "llama-q8_0", "int4": "llama-q4_0"}  # what is compared with each other
GOALS = {"bf16": {8: 1.4, 32: 2.0}, "int8": {8: 2.5, 32: 2.0}, "int4": {8: 2.5, 32: 2.0}}  # ratio to the peer's
PROMPT, STEPS = 16, 12  # tokens; steps that are timed
POSITIONS = 256  # room of a sequence, and the length of the prompt that shows the speed of multiplications


# ----------------------------------------------------------------------------------------------------------------------
# Inside the workers: `engine` is the one of this process
# ----------------------------------------------------------------------------------------------------------------------


class OurEngine:
    def __init__(self, path: Path, name: str, threads: int):
        import qwen3_numba
        self.new_cache, self.forward = qwen3_numba.KVCache, qwen3_numba.forward
        self.model = qwen3_numba.load_model(path, None if name == "bf16" else name, threads)

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Reads the prompts -> the first token after each."""
        from qwen3_lib.generation.batch import Batch
        self.batch = Batch(self.model, len(prompts), POSITIONS)
        answers = [self.batch.add(i, prompt, eos_token_ids=(), temperature=0.0) for i, prompt in enumerate(prompts)]
        while not all(answer.token_ids for answer in answers):
            self.batch.step()
        return [answer.token_ids[0] for answer in answers]

    def step(self) -> None:
        """One more token for each."""
        self.batch.step()

    def read(self, prompt: Sequence[int]) -> None:
        self.forward(self.model, prompt, self.new_cache(self.model.config, len(prompt)))


class LlamaEngine(peers.LlamaEngine):
    """llama.cpp with one stream of its cache for each sequence, the quicker one of its two layouts for this."""

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.tokens = self.decode(prompts, 0)
        self.length = len(prompts[0])
        return self.tokens

    def step(self) -> None:
        self.tokens = self.decode([[token] for token in self.tokens], self.length)
        self.length += 1

    def read(self, prompt: Sequence[int]) -> None:
        self.start([prompt])

    def decode(self, sequences: Sequence[Sequence[int]], position: int) -> list[int]:
        """Adds tokens to each sequence -> the most likely next token of each."""
        api, last, at = self.api, [], 0
        batch = api.llama_batch_init(sum(map(len, sequences)), 0, 1)
        for i, ids in enumerate(sequences):
            for j, token in enumerate(ids):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + j, 1
                batch.seq_id[at][0], batch.logits[at] = i, j == len(ids) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        status = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        return [int(np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.vocab_size,)).argmax())
                for i in last]


def start_engine(name: str, path: Path, folder: Path, threads: int, repack: bool) -> None:
    """Makes the engine of this process."""
    global engine
    if name.startswith("llama"):
        engine = LlamaEngine(gguf_file(folder, name), threads, POSITIONS, max(COUNTS), repack)
    else:
        engine = OurEngine(path, name, threads)


def first_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    return engine.start(prompts)


def speed(prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second of all sequences together, by the median step."""
    engine.start(prompts)
    return len(prompts) / median(seconds(engine.step) for _ in range(STEPS))


def memory() -> int:
    """Bytes that this process takes; of pages that processes share, its part. Only on Linux."""
    return int(re.search(r"\nPss: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024


def prefill_speed(prompt: Sequence[int]) -> float:
    """Tokens per second."""
    return len(prompt) / seconds(lambda: engine.read(prompt))


# ----------------------------------------------------------------------------------------------------------------------
# Measuring and writing it down
# ----------------------------------------------------------------------------------------------------------------------


class Bench:
    """`values` maps (engine or "memory", number of sequences or "prefill" or "bandwidth") to one value a round."""

    def __init__(self, path: Path, folder: Path, threads: int, rounds: int, counts: Sequence[int]):
        from qwen3_lib.io.models import Checkpoint
        self.path, self.folder, self.threads, self.rounds, self.counts = path, folder, threads, rounds, counts
        self.config = Checkpoint(path).config()
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(0, self.config.vocab_size, (max(counts), PROMPT)).tolist()
        self.long = rng.integers(0, self.config.vocab_size, POSITIONS).tolist()
        self.values: dict[tuple[str, int | str], list[float]] = {}
        self.first: dict[str, list[int]] = {}  # the first token after each prompt
        self.notes = [f"The machine's load average before the run: {os.getloadavg()[0]:.1f}."]
        self.workers: dict[str, ProcessPoolExecutor] = {}

    def prepare(self) -> None:
        """A process for each engine that is installed and answers the prompts."""
        for name in [name for pair in PAIRS.items() for name in pair]:
            note(f"{name}: loading")
            if worker := opened(name, partial(self.open, name), self.notes):
                self.workers[name] = worker

    def open(self, name: str, repack: bool) -> ProcessPoolExecutor:
        write_once(self.path, self.folder, name)
        worker = new_process(start_engine, name, self.path, self.folder, self.threads, repack)
        self.first[name] = worker.submit(first_tokens, self.prompts).result()  # compiles, and shows that it works
        return worker

    def run(self) -> None:
        """All rounds. The first one warms up."""
        reader = new_process(start_reader, self.threads)
        for i in range(self.rounds + 1):
            measured: dict[tuple[str, int | str], float] = {}
            for n in self.counts:
                note(f"{n} sequences: round {i} of {self.rounds}")
                for name, worker in self.workers.items():
                    measured[name, n] = worker.submit(speed, self.prompts[:n]).result()
            measured["memory", "bandwidth"] = reader.submit(read_bandwidth).result()
            for name, worker in self.workers.items():
                measured[name, "prefill"] = worker.submit(prefill_speed, self.long).result()
            for key, value in measured.items():
                if i > 0:
                    self.values.setdefault(key, []).append(value)
        for worker in (reader, *self.workers.values()):
            worker.shutdown()

    # What is made of the measurements

    def value(self, name: str, what: int | str) -> float:
        return median(self.values[name, what])

    def ratio(self, name: str, n: int) -> float | None:
        """Median over the rounds of name's speed / its peer's; None if one of them wasn't measured."""
        pairs = zip(self.values.get((name, n), []), self.values.get((PAIRS[name], n), []))
        return median(ratios) if (ratios := [a / b for a, b in pairs]) else None

    def limits(self, name: str, n: int) -> tuple[float, float]:
        """Tokens per second of n sequences that (the memory, the arithmetic) allows at most, for name's format."""
        read = read_bytes(self.config, name, PROMPT + STEPS // 2, n)
        weights, head = matrix_weights(self.config), self.config.vocab_size * self.config.hidden_size
        fastest = max(max(self.values[each, "prefill"]) for each in (name, PAIRS[name]) if each in self.workers)
        # Of a prompt only the last token is multiplied with the head, of an answer each one.
        product_speed = fastest * (weights - head + head / POSITIONS)  # weights per second
        return n * max(self.values["memory", "bandwidth"]) / read, product_speed / weights

    def alike(self, name: str) -> str:
        """The number of first tokens that equal the first engine's."""
        own, other = self.first[name], self.first[next(iter(self.first))]
        return f"{sum(a == b for a, b in zip(own, other))} of {len(own)}"


def report(bench: Bench) -> str:
    titles = ["engine", "format", *map(str, bench.counts), "first tokens as the first engine"]
    lines = [machine(bench.threads), "", f"Tokens/s of so many sequences together, after {PROMPT} tokens each:", "",
             f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for name, peer in PAIRS.items():
        for each in (each for each in (name, peer) if each in bench.workers):
            cells = [ENTRIES[each].engine, ENTRIES[each].format, *(f"{bench.value(each, n):.1f}" for n in bench.counts)]
            lines.append(f"| {' | '.join([*cells, bench.alike(each)])} |")
        if name in bench.workers:
            cells = [f"{min(limits):.1f}{'' if limits[0] < limits[1] else ' (a)'}"
                     for limits in (bench.limits(name, n) for n in bench.counts)]
            lines.append(f"| the limit | {ENTRIES[name].format} | {' | '.join(cells)} | |")
    bandwidth = f"{max(bench.values['memory', 'bandwidth']) / 1e9:.1f} GB/s"
    lines += ["", f"The memory reads {bandwidth}; (a): arithmetic is the limit, not the memory.", "",
              "| this engine / llama.cpp, median of the rounds | measured | wanted | reached |",
              "| --- | --- | --- | --- |"]
    for name, goals in GOALS.items():
        for n in bench.counts:
            if (ratio := bench.ratio(name, n)) is not None:
                wanted, reached = "", ""
                if n in goals:
                    wanted, reached = f"at least {goals[n]:g}", "yes" if ratio >= goals[n] else "**no**"
                lines.append(f"| {name}, {n} sequences | {ratio:.2f} | {wanted} | {reached} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in bench.notes)]) + "\n"


def draw(bench: Bench, file: Path) -> None:
    """A picture for each format: tokens/s over the number of sequences, below the limit."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for (name, peer), axes in zip(PAIRS.items(), figure.subplots(1, len(PAIRS))):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        if name in bench.workers:
            finer = np.geomspace(bench.counts[0], bench.counts[-1], 100)
            axes.plot(finer, [min(bench.limits(name, n)) for n in finer], "-", color="black", label="the limit")
        for each, style in ((name, "o-"), (peer, "o--")):
            if each in bench.workers:
                axes.plot(bench.counts, [bench.value(each, n) for n in bench.counts], style,
                          label=f"{ENTRIES[each].engine} {ENTRIES[each].format}")
        axes.set_xticks(bench.counts, map(str, bench.counts))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(title=ENTRIES[name].format, xlabel="sequences together", ylabel="tokens/s")
        axes.legend()
    figure.savefig(file, dpi=100)


def compare_workers(path: Path, threads: int, rounds: int) -> str:
    """A table: the speed and the memory of a machine with one worker, and with two that share its threads and slots."""
    slots, values = 16, {}
    prompts = np.random.default_rng(0).integers(0, 1000, (slots, PROMPT)).tolist()
    for i in range(rounds):
        for name in PAIRS:
            for n in (1, 2):
                note(f"{name}, {n} workers: round {i + 1} of {rounds}")
                workers = [new_process(start_engine, name, path, path, max(threads // n, 1), True) for _ in range(n)]
                list(map(Future.result, [worker.submit(first_tokens, prompts[:slots // n]) for worker in workers]))
                measured = [worker.submit(speed, prompts[:slots // n]) for worker in workers]
                values.setdefault((name, n, "speed"), []).append(sum(map(Future.result, measured)))
                measured = [worker.submit(memory) for worker in workers]
                values.setdefault((name, n, "memory"), []).append(sum(map(Future.result, measured)))
                for worker in workers:
                    worker.shutdown()
    titles = [f"{slots} slots in all", "tokens/s, 1 worker", "2 workers", "GB, 1 worker", "2 workers"]
    lines = [machine(threads), "", f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for name in PAIRS:
        cells = [f"{median(values[name, n, 'speed']):.0f}" for n in (1, 2)]
        cells += [f"{median(values[name, n, 'memory']) / 1e9:.2f}" for n in (1, 2)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (default: random weights, made for the run)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", action="store_true", help="compare one process with two, and nothing else")
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder for BATCH.md and batch.png")
    args = parser.parse_args()
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # for the processes to come
        os.environ[variable] = str(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or alone(make_model, Path(folder) / "model")
        if args.workers:
            print(compare_workers(path, args.threads, args.rounds))
            return
        bench = Bench(path, Path(folder), args.threads, args.rounds, COUNTS)
        bench.prepare()
        bench.run()
    text = f"# The latest run of bench/batch.py\n\n{report(bench)}"
    print(text)
    (args.out / "BATCH.md").write_text(text)
    try:
        draw(bench, args.out / "batch.png")
    except ImportError:
        note("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main()
