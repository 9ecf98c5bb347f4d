"""Tokens per second of many sequences together, through qwen3_batch.Batch and by llama.cpp, all in one run.

    python bench/batch.py                      everything that is installed; about 15 minutes, 12 GB of memory

Random weights in the exact shape of Qwen3-0.6B. A step gives each sequence one more token, its choice included, after a
short prompt of its own. The limit: a step takes at least the time in which the memory delivers what it reads (all
weights once, and the keys and values of each sequence), and at least the time of its multiplications at the speed that
the faster of the two engines of a format reaches on a prompt of 255 tokens. The fastest of the rounds counts. The text
goes to bench/BATCH.md, and with matplotlib there is a picture, bench/batch.png.
"""
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import harness
from harness import PAIRS, Bench, alone, note, publish, seconds, table
from peers import ENTRIES, LlamaEngine, gguf_file, matrices_of, read_bytes

COUNTS = (1, 2, 4, 8, 16, 32)
PROMPT, STEPS = 16, 12  # tokens; steps that are timed
POSITIONS = 256  # room of a sequence, and the length of the prompt that shows the speed of multiplications


class OurBatch:
    def __init__(self, path: Path, name: str, threads: int):
        import qwen3_numba
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


class LlamaBatch(LlamaEngine):
    """llama.cpp with one stream of its cache for each sequence, the quicker one of its two layouts for this."""

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.tokens, self.length = self.best(prompts, 0), len(prompts[0])
        return self.tokens

    def step(self) -> None:
        self.tokens = self.best([[token] for token in self.tokens], self.length)
        self.length += 1

    def best(self, sequences: Sequence[Sequence[int]], position: int) -> list[int]:
        """The most likely token after each sequence."""
        rows = (self.api.llama_get_logits_ith(self.context, i) for i in self.decode(sequences, position))
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]


def start_batch(name: str, path: Path, folder: Path, threads: int, repack: bool = True) -> Any:
    if name.startswith("llama"):
        return LlamaBatch(gguf_file(folder, name), threads, POSITIONS, max(COUNTS), repack)
    return OurBatch(path, name, threads)


def first_tokens(engine: Any, prompts: Sequence[Sequence[int]]) -> list[int]:
    return engine.start(prompts)


def speed(engine: Any, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second of all sequences together, by the median step."""
    engine.start(prompts)
    return len(prompts) / median(seconds(engine.step) for _ in range(STEPS))


def prompt_speed(engine: Any, prompt: Sequence[int]) -> float:
    return len(prompt) / seconds(lambda: engine.start([prompt]))


def limits(bench: Bench, config: Any, name: str, n: float) -> tuple[float, float]:
    """Tokens per second of n sequences that (the memory, the arithmetic) allows at most, for name's format."""
    weights = sum(rows * columns for rows, columns in matrices_of(config).values())
    head = config.vocab_size * config.hidden_size
    fastest = max(max(bench.values[each, "prompt"]) for each in (name, PAIRS[name]) if each in bench.workers)
    bandwidth = max(bench.bandwidths())
    # Of a prompt only the last token is multiplied with the head, of an answer each one.
    return (n * bandwidth / read_bytes(config, name, PROMPT + STEPS // 2, n),
            fastest * (weights - head + head / POSITIONS) / weights)


def draw(bench: Bench, config: Any, file: Path) -> None:
    """A picture for each format: tokens/s over the number of sequences, below the limit."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for (name, peer), axes in zip(PAIRS.items(), figure.subplots(1, len(PAIRS))):
        axes.set(title=ENTRIES[name].format, xlabel="sequences together", ylabel="tokens/s")
        finer = np.geomspace(COUNTS[0], COUNTS[-1], 100)
        axes.loglog(finer, [min(limits(bench, config, name, n)) for n in finer], "k-", label="the limit", base=2)
        for each, style in ((name, "o-"), (peer, "o--")):
            if each in bench.workers:
                axes.plot(COUNTS, [bench.median(each, n) for n in COUNTS], style,
                          label=f"{ENTRIES[each].engine} {ENTRIES[each].format}")
        axes.set_xticks(COUNTS, map(str, COUNTS))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend()
    figure.savefig(file, dpi=100)


def main() -> None:
    args = harness.parsed(harness.options(__doc__))
    from qwen3_lib.io.models import Checkpoint
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = args.model or alone(harness.random_model, folder / "model")
        config, rng = Checkpoint(path).config(), np.random.default_rng(0)
        prompts = rng.integers(0, config.vocab_size, (max(COUNTS), PROMPT)).tolist()
        bench, first = Bench(args), {}
        for name in (name for pair in PAIRS.items() for name in pair):
            first[name] = bench.open(name, path, folder, start_batch, check=partial(first_tokens, prompts=prompts))
        for n in COUNTS:
            bench.each(n, speed, prompts[:n])
        bench.each("prompt", prompt_speed, rng.integers(0, config.vocab_size, POSITIONS - 1).tolist())
    rows = []
    for name in bench.workers:
        same = sum(a == b for a, b in zip(first[name], next(iter(first.values()))))
        rows.append([ENTRIES[name].engine, ENTRIES[name].format, *(f"{bench.median(name, n):.1f}" for n in COUNTS),
                     f"{same} of {len(prompts)}"])
        if name in PAIRS:
            both = [limits(bench, config, name, n) for n in COUNTS]
            cells = [f"{min(pair):.1f}{' (a)' * (pair[0] > pair[1])}" for pair in both]
            rows.append(["the limit", ENTRIES[name].format, *cells, ""])
    publish(args.out / "BATCH.md", args.threads, [
        f"Tokens/s of so many sequences together, after {PROMPT} tokens each:", "",
        *table(["engine", "format", *map(str, COUNTS), "first tokens as the first engine"], *rows), "",
        "(a): arithmetic is the limit, not the memory.", "", *bench.ratios(*COUNTS)], bench.notes)
    try:
        draw(bench, config, args.out / "batch.png")
    except ImportError:
        note("no picture: matplotlib is not installed")
    bench.close()


if __name__ == "__main__":
    main()
