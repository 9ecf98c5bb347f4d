"""Writes tests/golden_mlx.json with MLX: small matrices that mx.quantize packs, and what mx.dequantize makes of them.

    pip install "mlx[cpu]" && python tests/make_golden_mlx.py
"""
import base64
import json
from pathlib import Path

import mlx.core as mx
import numpy as np

CASES = [("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)] + [("mxfp4", 4, 32)]


def text(array: mx.array) -> str:
    return base64.b64encode(np.array(array).tobytes()).decode()


def main() -> None:
    weights = mx.array(np.random.default_rng(0).normal(0.1, 1, (2, 128)).astype(np.float32)).astype(mx.bfloat16)
    found = {}
    for mode, bits, size in CASES:
        parts = mx.quantize(weights, group_size=size, bits=bits, mode=mode)
        # With scales of bfloat16, it would round the product and the sum to bfloat16.
        floats = [part.astype(mx.float32) if part.dtype == mx.bfloat16 else part for part in parts]
        values = mx.dequantize(*floats, group_size=size, bits=bits, mode=mode, dtype=mx.float32)
        raw = [part.view(mx.uint16) if part.dtype == mx.bfloat16 else part for part in (*parts, values)]
        names = "weight", "scales", *["biases"] * (mode == "affine"), "values"
        found[f"{mode}, {bits} bits, groups of {size}"] = dict(zip(names, map(text, raw), strict=True))
    Path(__file__).with_name("golden_mlx.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
