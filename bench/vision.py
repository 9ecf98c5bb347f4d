"""The time that the tower of Qwen3.5-0.8B takes for a picture, beside a matrix product's and transformers'.

    python bench/vision.py [--width 640] [--height 480] [--rounds 5] [--threads 2]

Random weights of the tower's shapes. Each round times one product of its MLP, as NumPy's BLAS computes it, and the
tower; with torch and transformers installed, their tower, too, on the same weights. The best round counts.
"""
import argparse
import sys
import time
from pathlib import Path

import numpy as np
import threadpoolctl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwen3_vision import VisionConfig, patches_of, tower  # noqa: E402

WIDTH, INNER, DEPTH, HEADS, OUT = 768, 3072, 12, 12, 1024
ABOUT = {"depth": DEPTH, "hidden_size": WIDTH, "intermediate_size": INNER, "num_heads": HEADS, "out_hidden_size": OUT}


def random_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    dense = {"patch_embed.proj": (WIDTH, 1536), "merger.linear_fc1": (4 * WIDTH, 4 * WIDTH),
             "merger.linear_fc2": (OUT, 4 * WIDTH)}
    for i in range(DEPTH):
        dense |= {f"blocks.{i}.{name}": shape for name, shape in (
            ("attn.qkv", (3 * WIDTH, WIDTH)), ("attn.proj", (WIDTH, WIDTH)), ("mlp.linear_fc1", (INNER, WIDTH)),
            ("mlp.linear_fc2", (WIDTH, INNER)))}
    norms = ["merger.norm", *(f"blocks.{i}.norm{j}" for i in range(DEPTH) for j in (1, 2))]
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
               for name, shape in dense.items()} | {f"{name}.weight": np.ones(WIDTH, np.float32) for name in norms}
    biases = {f"{name}.bias": np.zeros(dense.get(name, (WIDTH,))[0], np.float32) for name in (*dense, *norms)}
    return weights | biases | {"pos_embed.weight": rng.standard_normal((2304, WIDTH), np.float32)}


def theirs(weights: dict[str, np.ndarray], pixels: np.ndarray, threads: int):
    """transformers' tower, as a function without arguments; None if it isn't installed."""
    try:
        import torch
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionConfig, Qwen3_5VisionModel
    except ImportError:
        return None
    torch.set_num_threads(threads)
    model = Qwen3_5VisionModel(Qwen3_5VisionConfig(**ABOUT)).eval()
    model.load_state_dict({name: torch.tensor(weights[name]).reshape(old.shape)
                           for name, old in model.state_dict().items()})
    patches = torch.tensor(patches_of(pixels, VisionConfig()))
    grid = torch.tensor([[1, pixels.shape[0] // 16, pixels.shape[1] // 16]])
    return torch.inference_mode()(lambda: model(patches, grid).pooler_output.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 640), ("height", 480), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng, config = np.random.default_rng(0), VisionConfig(DEPTH, HEADS)
    pixels, weights = rng.integers(0, 256, (args.height, args.width, 3), np.uint8), random_weights(rng)
    n, fc1 = args.width * args.height // 256, weights["blocks.0.mlp.linear_fc1.weight"]
    x = rng.standard_normal((n, WIDTH), np.float32)
    size = sum(w.size / (4 if "merger" in name else 1) for name, w in weights.items()  # of a quarter of the rows
               if w.ndim == 2 and name != "pos_embed.weight")
    work = {"sgemm": 2 * n * fc1.size, "tower": 2 * n * size + 4 * DEPTH * n * n * WIDTH}
    jobs = {"sgemm": lambda: x @ fc1.T, "tower": lambda: tower(pixels, weights, config)[0]}
    if other := theirs(weights, pixels, args.threads):
        work["transformers"], jobs["transformers"] = work["tower"], other
    seconds = dict.fromkeys(jobs, float("inf"))
    with threadpoolctl.threadpool_limits(args.threads):
        for _ in range(args.rounds):
            for name, job in jobs.items():
                start = time.perf_counter()
                job()
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    speeds = {name: work[name] / seconds[name] / 1e9 for name in jobs}
    for name in jobs:
        print(f"{name:12} {seconds[name]:7.3f} s  {speeds[name]:5.0f} GFLOP/s  {speeds[name] / speeds['sgemm']:.2f}")


if __name__ == "__main__":
    main()
