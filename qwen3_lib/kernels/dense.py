"""The row of models whose layers all attend: Qwen3, its mixtures of experts, Qwen3-VL, Qwen3-ASR."""
from __future__ import annotations

from typing import Any

import numpy as np

from qwen3_lib.kernels.kind import Kind, Widths
from qwen3_lib.kernels.layout import LINEAR, PLACE, RUN, STATE


def attending(vectors: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """Each layer attends, and has no state."""
    places = np.full(config.num_hidden_layers, -1, PLACE)
    places["attention"] = np.arange(config.num_hidden_layers)
    return {"places": places} | dict.fromkeys(("delta_sizes", "conv", "rates", "delta_norms"), np.empty(0))


KIND = Kind(mixers=("layers.project_heads", "layers.attend_heads"), matrices=lambda config, layer: LINEAR,
            fields=attending, widths=lambda config: Widths(), cache=lambda plain: plain,
            tables=lambda caches, counts: (np.empty(0, RUN), np.empty((0, 0, 2), STATE)))
DENSE_STEPS = (*KIND.mixers, "layers.finish_dense", "layers.output_logits")  # of a model without experts
