"""The row of Qwen3-TTS's talker and code predictor: dense, but one job may be several passes, with draws in between."""
from __future__ import annotations

from typing import Any

import numpy as np

from qwen3_lib.kernels import dense


def drawing(heads: list[np.ndarray], vectors: np.ndarray, talks: list[Any]) -> dict[str, np.ndarray]:
    """Fields of NewTokens for passes with these heads, WEIGHT [1], and vectors [passes, codes, hidden_size].

    The numbers that qwen3.sample would draw for these talks are drawn here.
    """
    n, samplings = int(heads[0][0].rows), [talk.other for talk in talks]
    counts = [0 if each.temperature < 1e-4 else each.top_k if 0 < each.top_k < n else n for each in samplings]
    noise = np.empty((len(talks), len(heads), max(counts)), np.float32)
    for numbers, talk, count in zip(noise, talks, counts):
        numbers[:, :count] = talk.rng.standard_exponential((len(heads), count))
    return {"heads": np.concatenate(heads), "vectors": vectors, "counts": np.array(counts), "noise": noise,
            "codes": np.empty((len(talks), len(heads)), np.int64),
            "temperatures": np.array([each.temperature for each in samplings], np.float32)}


def new_codes(weights: Any, caches: list[Any], counts: np.ndarray, new: Any) -> dict[str, np.ndarray]:
    """No states, and what `drawing` gives in the place of a Pass."""
    return dense.no_states(weights, caches, counts, new) | (new if isinstance(new, dict) else {})


KIND = dense.KIND._replace(last="codes.draw_codes", new=new_codes)
