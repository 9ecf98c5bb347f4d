"""The time that the tower of Qwen3.5-0.8B takes for a picture, beside a matrix product's and transformers'.

    python bench/vision.py [--size 640 480]

Random weights of the tower's shapes. Each round times one product of its MLP, as NumPy's BLAS computes it, and the
tower, ours and transformers', on the same weights. The best round counts.
"""
import numpy as np
from threadpoolctl import threadpool_limits

import harness
from harness import seconds, table

ABOUT = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "out_hidden_size": 1024,
         "patch_size": 16, "temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": []}


def theirs(weights: dict[str, np.ndarray], pixels: np.ndarray, threads: int):
    """transformers' tower, as a function without arguments."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionConfig, Qwen3_5VisionModel
    from qwen3_vision import VisionConfig, patches_of
    torch.set_num_threads(threads)
    model = Qwen3_5VisionModel(Qwen3_5VisionConfig(**ABOUT)).eval()
    model.load_state_dict({name: torch.tensor(weights[name]).reshape(old.shape)
                           for name, old in model.state_dict().items()})
    patches = torch.tensor(patches_of(pixels, VisionConfig()))
    grid = torch.tensor([[1, pixels.shape[0] // 16, pixels.shape[1] // 16]])
    return torch.inference_mode()(lambda: model(patches, grid).pooler_output.numpy())


def main() -> None:
    parser = harness.options(__doc__, 5)
    parser.add_argument("--size", type=int, nargs=2, default=(640, 480), help="width and height")
    args = harness.parsed(parser)
    from make_random_model import random_tensor, tower_shapes
    from qwen3_vision import VisionConfig, tower
    rng, config, d = np.random.default_rng(0), VisionConfig(ABOUT["depth"], ABOUT["num_heads"]), ABOUT["hidden_size"]
    weights = {name.removeprefix("model.visual."): random_tensor(rng, shape, "float32").reshape(shape[0], -1).squeeze()
               for name, shape in tower_shapes(ABOUT).items()}
    pixels = rng.integers(0, 256, (*args.size[::-1], 3), np.uint8)
    n, fc1 = args.size[0] * args.size[1] // 256, weights["blocks.0.mlp.linear_fc1.weight"]
    x = rng.standard_normal((n, d), np.float32)
    size = sum(w.size / (4 if "merger" in name else 1) for name, w in weights.items()  # of a quarter of the rows
               if w.ndim == 2 and name != "pos_embed.weight")
    whole = 2 * n * size + 4 * ABOUT["depth"] * n * n * d
    work = {"sgemm": 2 * n * fc1.size, "tower": whole, "transformers": whole}
    jobs = {"sgemm": lambda: x @ fc1.T, "tower": lambda: tower(pixels, weights, config)[0],
            "transformers": theirs(weights, pixels, args.threads)}
    with threadpool_limits(args.threads):
        rounds = [{name: seconds(job) for name, job in jobs.items()} for _ in range(args.rounds)]
    best = {name: min(taken[name] for taken in rounds) for name in jobs}
    speeds = {name: work[name] / best[name] / 1e9 for name in jobs}
    print(*table(["", "seconds", "GFLOP/s", "/ sgemm"], *(
        [name, f"{best[name]:.3f}", f"{speeds[name]:.0f}", f"{speeds[name] / speeds['sgemm']:.2f}"] for name in jobs)),
        sep="\n")


if __name__ == "__main__":
    main()
