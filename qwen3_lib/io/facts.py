"""Facts about a model: its name, its parameters, its engine, the bytes that a token reads."""
import math

import numpy as np

from qwen3 import Model, Source
from qwen3_tts import speaks


def weight_bytes(model: Model) -> int:
    """The bytes of weights that a new token reads: all but an untied embedding, the experts that aren't chosen, and the
    MTP head.
    """
    weights, config = model.weights, model.config
    if isinstance(weights, dict):
        arrays = [w for name, w in weights.items() if name != "embed_tokens" and isinstance(w, np.ndarray)]
        for layer in weights["layers"]:
            arrays += [w for name, w in layer.items() if name != "experts"]
            arrays += [w for expert in range(config.num_experts_per_tok) if "experts" in layer
                       for w in layer["experts"][expert].values()]  # all experts have the same size
    else:
        unread = {*weights.layers.experts["address"][:, config.num_experts_per_tok:].reshape(-1).tolist()}  # likewise
        if weights.mtp is not None:
            unread |= {*weights.mtp.addresses().tolist()}
        arrays = [array for array in weights.arrays[0 if weights.head is weights.embedding else 1:]
                  if array.ctypes.data not in unread]  # the embedding comes first
    return sum(array.nbytes for array in arrays)


LARGE = 100_000_000  # parameters: models with more are computed by the fast engine if numba is installed
NUMPY = "NumPy float32"


def engine_name(model: Model) -> str:
    """NUMPY, or "numba" and the format of most weights."""
    return NUMPY if isinstance(model.weights, dict) else f"numba {model.weights.format}"


def parameters(source: Source) -> int:
    """The number of a model's parameters; a tied head counts once."""
    config = source.config
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return sum(map(math.prod, source.kind.shapes(config).values())) - tied


def banner(model: Model) -> str:
    """One line: the model's name, size, context and engine."""
    n = parameters(model.source)
    around = in_words(tower_parameters(model))
    more = "" if around == "0" else f" and {around} around the talker" if speaks(model) else f" and a tower of {around}"
    return f"qwen3 · {model_name(model)} · {in_words(n)} parameters{more} · context " \
           f"{model.config.context_length:,} · {engine_name(model)}"


def tower_parameters(model: Model) -> int:
    """The number of the vision tower's parameters; 0 if the model has none."""
    return 0 if model.media is None else sum(math.prod(tensor.shape) for tensor in model.source.tower.values())


def in_words(n: int) -> str:
    """A number of parameters: 1.72 B, 6.95 M, 12,345."""
    return f"{n / 1e9:.3g} B" if n >= 1e9 else f"{n / 1e6:.3g} M" if n >= 1e6 else f"{n:,}"


def model_name(model: Model) -> str:
    """The name of the model's folder; in the hub's cache, the name of the repository."""
    folder = model.path.resolve()
    hub = [part for part in folder.parts if part.startswith("models--")]
    return hub[-1].removeprefix("models--").replace("--", "/") if hub else folder.name
