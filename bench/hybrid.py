"""Tokens per second of Qwen3.5-0.8B, by this engine and by llama.cpp, in one run.

    python bench/hybrid.py           random weights; 12 GB of memory, 4 GB of disk, 20 minutes
    python bench/hybrid.py --quick   a look: fewer rounds, no long text

Each engine has a process of its own; rounds go over the engines in turn, and ratios are medians of each round's ratio.
A decoded token reads all matrices, the keys and values, and the states, which are written, too: all that counts as
bytes. The second turn comes after a first one of 8,000 tokens: this engine goes on from a kept state; llama.cpp, whose
state can't be cut back to the end of the question, reads all of it again. The text goes to bench/HYBRID.md, too.
"""
import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import run  # noqa: E402
from configs import HYBRID  # noqa: E402
from make_random_model import make_random_model  # noqa: E402
from peers import ENTRIES, gguf_file, opened  # noqa: E402
from run import (  # noqa: E402
    alone, layer_matrices, machine, new_process, note, prefill_speed, read_bandwidth, seconds, sgemm_rate, start_reader)

CONFIG = HYBRID | {"head_dim": 256, "hidden_size": 1024, "intermediate_size": 3584, "linear_key_head_dim": 128,
                   "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
                   "max_position_embeddings": 262144, "num_attention_heads": 8, "num_hidden_layers": 24,
                   "num_key_value_heads": 2, "vocab_size": 248320, "torch_dtype": "bfloat16",
                   "rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [11, 11, 10]}}
PAIRS = {"bf16": "llama-bf16", "int8": "llama-q8_0", "int4": "llama-q4_0"}
PROMPT, SHORT, LONG, TURN, STEPS = 512, 16, 32768, 8000, 24  # tokens
KV_DTYPES = ("f16", "int8")
END = 7  # the token at the end of a turn


def make_model(path: Path) -> None:
    make_random_model(CONFIG, path)
    (path / "generation_config.json").write_text(f'{{"eos_token_id": {END}}}')


def write_file(path: Path, folder: Path, name: str) -> None:
    from test_gguf_file import tokenizer_keys, write_hybrid
    none = dict.fromkeys(tokenizer_keys(path)) | {"tokenizer.ggml.model": "no_vocab",
                                                  "qwen35.vocab_size": CONFIG["vocab_size"]}
    write_hybrid(path, gguf_file(folder, name), ENTRIES[name].format.upper(), **none)


def start(name: str, path: Path, folder: Path, threads: int, repack: bool) -> None:
    if name.startswith("llama") and not gguf_file(folder, name).exists():
        alone(write_file, path, folder, name)
    run.start_engine(name, path, folder, threads, LONG + 2 * STEPS, repack)


def decode_speed(context: list[int]) -> float:
    """Tokens per second after a context, by the median token."""
    run.fill(context)
    return next_tokens(context)


def next_tokens(context: list[int]) -> float:
    return 1 / median(seconds(lambda: run.engine.run([token])) for token in context[:STEPS])


def repeat_keys(context: list[int]) -> None:
    """Goes on with the keys and values of the tokens in the cache, again and again: to compute them takes minutes."""
    cache = run.engine.cache
    places, filled = cache.reserve(len(context) - cache.length), cache.length
    for rows in (cache.k, cache.v):
        rows[:, :, places] = rows[:, :, places % filled]
    cache.new = dict(cache.snapshots[-1].states)
    cache.advance(np.array(context[filled:]))


def long_decode(short: list[int], long: list[int], kv_dtype: str) -> tuple[float, float]:
    """(tokens per second after a long context, its ratio to those after a short one) with this cache."""
    from qwen3_numba import HYBRID_CACHES
    model = run.engine.model
    run.engine.model = replace(model, engine=replace(model.engine, new_cache=HYBRID_CACHES[kv_dtype]))
    run.engine.cache = HYBRID_CACHES[kv_dtype](model.config, len(long) + 2 * STEPS)
    before = decode_speed(short)
    run.fill(short)
    repeat_keys(long)
    speed = next_tokens(long)
    return speed, speed / before


def second_turn(first: list[int], question: list[int]) -> float:
    """Seconds until the first token of a second turn, whose prompt has not the thought of the first answer."""
    run.fill(first)
    for token in question[::-1]:  # as many tokens of a thought, which the next prompt leaves out
        run.engine.run([token])
    prompt = first + question
    start = 0
    if hasattr(run.engine, "cache"):
        start = run.engine.cache.common_prefix(np.array(prompt))
    run.engine.truncate(start)

    def read() -> None:
        for at in range(start, len(prompt), run.STEP):
            run.engine.run(prompt[at:at + run.STEP])

    return seconds(read)


def step_bytes(name: str, context: int) -> float:
    """Bytes that a decoded token reads and writes."""
    from qwen3_5 import hybrid_config, tensor_shapes
    config = hybrid_config(CONFIG, Path("config.json"))
    shapes = tensor_shapes(config)
    del shapes["model.embed_tokens.weight"]
    matrices = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
    attending = config.num_hidden_layers - len(config.linear_layers)
    keys = 2 * attending * config.num_key_value_heads * config.head_dim * context * ENTRIES[name].kv_bytes
    state = len(config.linear_layers) * config.linear_num_value_heads * config.linear_key_head_dim * \
        config.linear_value_head_dim * 4
    return matrices * ENTRIES[name].weight_bytes + keys + 2 * state


class Bench:
    """`values` maps (engine, what) to a list with one value for each round."""

    def __init__(self, folder: Path, threads: int, rounds: int, quick: bool):
        self.rounds, self.quick = rounds, quick
        self.notes = [f"the machine's load average before the run: {os.getloadavg()[0]:.1f}"]
        self.values: dict[tuple[str, str], list[Any]] = {}
        ids = np.random.default_rng(0).integers(8, 4000, LONG).tolist()
        self.prompt, self.short, self.long = ids[:PROMPT], ids[:SHORT], ids
        self.turn, self.question = ids[:TURN - 1] + [END, 9], ids[100:140]
        alone(make_model, folder / "model")
        self.reader = new_process(start_reader, threads)
        self.workers = {name: worker for pair in PAIRS.items() for name in pair if (worker := opened(
            name, partial(self.started, name, folder, threads), self.notes)) is not None}

    def started(self, name: str, folder: Path, threads: int, repack: bool) -> ProcessPoolExecutor:
        note(f"{name}: loading")
        worker = new_process()
        try:
            worker.submit(start, name, folder / "model", folder, threads, repack).result()
        except Exception as error:  # a process that has crashed says no more
            raise RuntimeError(str(error)) from error
        return worker

    def each(self, what: str, rounds: int, names: list[str], work: Callable[..., Any], *args: Any) -> None:
        for i in range(rounds + (rounds > 1)):  # the first of several warms up
            note(f"{what}: round {i}")
            for name in names:
                bandwidth = self.reader.submit(read_bandwidth).result()
                speed = self.workers[name].submit(work, *args).result()
                if i > 0 or rounds == 1:
                    self.values.setdefault((name, what), []).append(speed)
                    self.values.setdefault((name, f"{what} bandwidth"), []).append(bandwidth)

    def run(self) -> None:
        names = list(self.workers)
        self.each("decode", self.rounds, names, decode_speed, self.short)
        from qwen3_5 import hybrid_config, tensor_shapes
        matrices = layer_matrices(tensor_shapes(hybrid_config(CONFIG, Path("config.json"))))
        rates = [self.reader.submit(sgemm_rate, matrices[:len(matrices) // 6]).result() for _ in range(self.rounds)]
        self.limit = median(rates) / (2 * sum(rows * columns for rows, columns in matrices))
        self.each("prefill", self.rounds, names, prefill_speed, self.prompt)
        if not self.quick:
            eight_bits = [name for name in names if "int8" in name or "q8_0" in name]
            self.each("second turn", 1, eight_bits, second_turn, self.turn, self.question)
            ours = [name for name in names if name in PAIRS]
            for kv_dtype in KV_DTYPES:
                self.each(kv_dtype, self.rounds, ours, long_decode, self.short, self.long, kv_dtype)

    def median(self, name: str, what: str) -> float:
        return median(self.values[name, what]) if (name, what) in self.values else float("nan")

    def ratio(self, name: str, what: str) -> float:
        pairs = zip(self.values.get((name, what), []), self.values.get((PAIRS[name], what), []))
        return median([a / b for a, b in pairs] or [float("nan")])

    def share(self, name: str) -> float:
        pairs = zip(self.values[name, "decode"], self.values[name, "decode bandwidth"])
        return median(speed / bandwidth for speed, bandwidth in pairs) * step_bytes(name, SHORT)

    def report(self, threads: int) -> str:
        titles = ["engine", "format", f"decode at {SHORT}, tokens/s", "of the bandwidth", f"prefill {PROMPT}, tokens/s",
                  f"second turn after {TURN} tokens, s"]
        lines = [machine(threads), "", f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
        for name in self.workers:
            numbers = [f"{self.median(name, 'decode'):.2f}", f"{self.share(name):.2f}",
                       f"{self.median(name, 'prefill'):.1f}", f"{self.median(name, 'second turn'):.2f}"]
            cells = [ENTRIES[name].engine, ENTRIES[name].format, *(each.replace("nan", "–") for each in numbers)]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "| this engine / llama.cpp | decode | prefill |", "| --- | --- | --- |"]
        lines += [f"| {name} | {self.ratio(name, 'decode'):.2f} | {self.ratio(name, 'prefill'):.2f} |"
                  for name in PAIRS]
        if not self.quick:
            heads = " | ".join(f"{kv} cache: tokens/s | / at {SHORT}" for kv in KV_DTYPES)
            lines += ["", f"| decode at {LONG} | {heads} |", "| --- " * (1 + 2 * len(KV_DTYPES)) + "|"]
            lines += [f"| {name} | " + " | ".join(f"{median(column):.2f}" for kv in KV_DTYPES
                                                 for column in zip(*self.values[name, kv])) + " |" for name in PAIRS]
        share = self.median("bf16", "prefill") / self.limit
        return "\n".join([*lines, "", f"bf16: prefill {share:.2f} of float32's limit (sgemm), at least 0.8 wanted.",
                          *(f"- {line}" for line in self.notes)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, no long text")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder for the text")
    args = parser.parse_args()
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # for the processes to come
        os.environ[variable] = str(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.threads, 1 if args.quick else args.rounds, args.quick)
        bench.run()
        text = f"# The latest run of bench/hybrid.py\n\n{bench.report(args.threads)}"
    print(text)
    (args.out / "HYBRID.md").write_text(text)


if __name__ == "__main__":
    main()
