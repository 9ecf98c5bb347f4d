"""Speed and memory of the plain NumPy path, in one run with torch float32 through transformers.

    python bench/plain.py            (needs torch and transformers for the peer; about 5 minutes, 7 GB of memory)

Random weights in the exact shape of Qwen3-0.6B. Rounds of the two engines alternate, and medians are compared: on a
shared machine a ratio means something, a single time does not. Bandwidth is what the memory gives to whatever reads the
largest weight matrix fastest, measured right before each decoding.
"""
import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import qwen3  # noqa: E402
from qwen3_lib.io.models import Checkpoint  # noqa: E402
from make_random_model import make_random_model, official_config  # noqa: E402

PROMPT, CONTEXT, DECODED = 512, 16, 24  # tokens: of the prompt to prefill, before decoding, decoded


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_bandwidth(matrix: np.ndarray) -> float:
    """Bytes per second of the fastest way to read a matrix once: a product, or a sum of squares on each core."""
    vector = np.ones(matrix.shape[1], np.float32)
    parts = np.array_split(matrix.reshape(-1), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(len(parts)) as pool:
        ways = [lambda: matrix @ vector, lambda: list(pool.map(lambda part: part @ part, parts))]
        return matrix.nbytes / min(seconds(way) for way in ways for _ in range(3))


class NumpyEngine:
    def __init__(self, path: Path):
        self.model = qwen3.load_model(path)
        self.head = self.model.weights["lm_head"]

    def prefill(self, ids: list[int]) -> qwen3.KVCache:
        cache = qwen3.KVCache(self.model.config)
        qwen3.forward(self.model, ids, cache)
        return cache

    def decode(self, ids: list[int], cache: qwen3.KVCache) -> None:
        for token in ids:
            qwen3.forward(self.model, [token], cache)


class TorchEngine:
    def __init__(self, path: Path):
        import torch
        import transformers
        torch.set_grad_enabled(False)
        self.tensor = torch.tensor
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.head = self.model.lm_head.weight.numpy()

    def prefill(self, ids: list[int]) -> Any:
        return self.model(self.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values

    def decode(self, ids: list[int], cache: Any) -> None:
        for token in ids:
            self.model(self.tensor([[token]]), past_key_values=cache, use_cache=True)


def start(kind: type, path: Path) -> None:
    """Makes the engine of a worker process: each has one of its own, so that neither disturbs the other's memory."""
    global engine
    engine = kind(path)


def measure(ids: list[int]) -> tuple[float, float, float]:
    """(prefill tokens/s, decode tokens/s, read bandwidth in bytes/s) of a worker's engine."""
    prefill = PROMPT / seconds(lambda: engine.prefill(ids[:PROMPT]))
    cache = engine.prefill(ids[:CONTEXT])
    bandwidth = read_bandwidth(engine.head)
    return prefill, DECODED / seconds(lambda: engine.decode(ids[:DECODED], cache)), bandwidth


def peak_memory(path: Path) -> int:
    """The most memory in bytes of a process that answers a long prompt from the command line."""
    prompt = "word " * PROMPT
    subprocess.run([sys.executable, ROOT / "qwen3.py", "--model", path, "--raw", "--max-tokens", "16", prompt],
                   check=True, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def sampling_milliseconds() -> dict[str, float]:
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal(151936).astype(np.float32)
    settings = {"greedy": qwen3.Sampling(), "temperature only": qwen3.Sampling(0.7),
                "top-k 20, top-p 0.8": qwen3.Sampling(0.7, 20, 0.8),
                "top-p 0.95": qwen3.Sampling(0.6, 0, 0.95), "min-p 0.05": qwen3.Sampling(0.7, min_p=0.05)}
    return {name: 1000 * median(seconds(lambda: qwen3.sample(logits, sampling, rng)) for _ in range(50))
            for name, sampling in settings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path,
                        help="a model folder (default: random weights in the shape of Qwen3-0.6B, made for the run)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true", help="leave out torch and transformers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or make_random_model(official_config("0.6B"), Path(folder))
        peak = peak_memory(path)
        config, stored = Checkpoint(path).config(), Checkpoint(path).stored()
        # Bytes of the weights, and of those that each token reads: of an embedding that is not the head, only a row.
        weight_bytes = sum(4 * tensor.data.size for tensor in stored.values())
        read_bytes = weight_bytes - 4 * config.vocab_size * config.hidden_size * ("lm_head.weight" in stored)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, max(PROMPT, CONTEXT, DECODED)).tolist()
        engines = {"NumPy": NumpyEngine} | ({} if args.no_peer else {"torch": TorchEngine})
        workers = {name: ProcessPoolExecutor(1, get_context("spawn"), start, (kind, path))
                   for name, kind in engines.items()}
        rounds = [{name: worker.submit(measure, ids).result() for name, worker in workers.items()}
                  for _ in range(args.rounds + 1)][1:]  # the first one warms up
        for worker in workers.values():
            worker.shutdown()
    bandwidth = median(measured["NumPy"][2] for measured in rounds)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s; float32 weights {weight_bytes / 1e9:.2f} GB, so decoding can't "
          f"pass {bandwidth / read_bytes:.1f} tokens/s\n")
    print(f"| engine, float32 | prefill {PROMPT}, tokens/s | decode, tokens/s | GB/s | of the bandwidth |")
    print("| --- | --- | --- | --- | --- |")
    for name in engines:
        prefill, decode = (median(measured[name][i] for measured in rounds) for i in range(2))
        share = median(measured[name][1] * read_bytes / measured[name][2] for measured in rounds)
        print(f"| {name} | {prefill:.1f} | {decode:.2f} | {decode * read_bytes / 1e9:.1f} | {share:.2f} |")
    if "torch" in engines:
        ratios = [median(measured["NumPy"][i] / measured["torch"][i] for measured in rounds) for i in range(2)]
        print(f"\nNumPy / torch, median of the rounds: prefill {ratios[0]:.2f}, decode {ratios[1]:.2f}")
    print(f"\npeak memory {peak / 1e9:.2f} GB = float32 weights x {peak / weight_bytes:.3f}")
    print("\nsampling from 151,936 logits: " + ", ".join(
        f"{name} {ms:.2f} ms" for name, ms in sampling_milliseconds().items()))


if __name__ == "__main__":
    main()
