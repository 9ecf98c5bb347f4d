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
    return {"places": places} | dict.fromkeys(("delta_sizes", "conv", "rates", "delta_norms"), np.empty(0)) | NO_STREAMS


# Of models without streams: fields of Layers, and of NewTokens; and the latter of models without states, too.
NO_STREAMS = dict.fromkeys(("indexing", "reading", "stream_norms", "index_norms", "ngrams", "ngram_norms",
                            "ngram_conv"), np.empty(0))
NO_NEW_STREAMS = dict.fromkeys(("streams", "which", "found", "indices", "whole", "whole_cos", "whole_sin",
                                "scores", "heads", "vectors", "counts", "temperatures", "noise", "codes"), np.empty(0))
NO_NEW_STATES = NO_NEW_STREAMS | {"runs": np.empty(0, RUN), "states": np.empty((0, 0, 2), STATE)}


def no_states(weights: Any, caches: list[Any], counts: np.ndarray, new: Any) -> dict[str, np.ndarray]:
    """No states."""
    return NO_NEW_STATES


KIND = Kind(mixers=("layers.project_heads", "layers.attend_heads"), matrices=lambda config, layer: LINEAR,
            fields=attending, widths=lambda config: Widths(), cache=lambda plain: plain, new=no_states)
DENSE_STEPS = (*KIND.mixers, "layers.finish_dense", "layers.output_logits")  # of a model without experts
