"""Tokens per second of many sequences together, through qwen3_batch.Batch and by llama.cpp, all in one run.

    python bench/batch.py                      everything that is installed; about 15 minutes, 12 GB of memory

Random weights in the exact shape of Qwen3-0.6B. A step gives each sequence one more token, its choice included, after a
short prompt of its own. The limit: a step takes at least the time in which the memory delivers what it reads (all
weights once, and the keys and values of each sequence), and at least the time of its multiplications at the speed that
the faster of the two engines of a format reaches on a prompt of 255 tokens. The fastest of the rounds counts. The text
goes to bench/BATCH.md.
"""
from collections.abc import Sequence
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import harness
from harness import ALL, PAIRS, Bench, engines_table, seconds, table
from peers import LlamaEngine, matrices_of, peer_file, read_bytes

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
        self.step = self.batch.step  # one more token for each
        return [answer.token_ids[0] for answer in answers]


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
        return LlamaBatch(peer_file(path, folder, name), threads, POSITIONS, max(COUNTS), repack)
    return OurBatch(path, name, threads)


def speed(engine: Any, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second of all sequences together, by the median step."""
    engine.start(prompts)
    return len(prompts) / median(seconds(engine.step) for _ in range(STEPS))


def prompt_speed(engine: Any, prompt: Sequence[int]) -> float:
    return len(prompt) / seconds(lambda: engine.start([prompt]))


def limits(bench: Bench, name: str, n: int) -> tuple[float, float]:
    """Tokens per second of n sequences that (the memory, the arithmetic) allows at most, for name's format."""
    weights = sum(rows * columns for rows, columns in matrices_of(bench.config).values())
    head = bench.config.vocab_size * bench.config.hidden_size
    fastest = max(max(bench.values[each, "prompt"]) for each in (name, PAIRS[name]) if each in bench.workers)
    bandwidth = max(bench.bandwidths())
    # Of a prompt only the last token is multiplied with the head, of an answer each one.
    return (n * bandwidth / read_bytes(bench.config, name, PROMPT + STEPS // 2, n),
            fastest * (weights - head + head / POSITIONS) / weights)


def main() -> None:
    with Bench(harness.parsed(harness.options(__doc__))) as bench:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, bench.config.vocab_size, (max(COUNTS), PROMPT)).tolist()
        for name in ALL:
            bench.open(name, start_batch, check=methodcaller("start", prompts))
        for n in COUNTS:
            bench.each(n, speed, prompts[:n])
        bench.each("prompt", prompt_speed, rng.integers(0, bench.config.vocab_size, POSITIONS - 1).tolist())
        most = {name: [limits(bench, name, n) for n in COUNTS] for name in PAIRS if name in bench.workers}
        bench.publish("BATCH.md", f"Tokens/s of so many sequences together, after {PROMPT} tokens each:", "",
                      *engines_table([*map(str, COUNTS), "first tokens as the first engine"], {name: [
                          *(f"{bench.median(name, n):.1f}" for n in COUNTS), bench.same(name)]
                          for name in bench.workers}), "",
                      *table(["the limit", *map(str, COUNTS)], *([name, *(
                          f"{min(pair):.1f}{' (a)' * (pair[0] > pair[1])}" for pair in pairs)]
                          for name, pairs in most.items())), "",
                      "(a): arithmetic is the limit, not the memory.", "", *bench.ratios(*COUNTS))


if __name__ == "__main__":
    main()
