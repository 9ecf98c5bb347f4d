"""Scaled RoPE: frequencies other than the powers of theta, for texts that are longer than those of the training."""
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwen3 import Config, checked_number
from qwen3_lib.io.errors import InputError, brief

YARN_RANGES = {"factor": (1, 1e6), "original_max_position_embeddings": (1, 2**31), "beta_fast": (1e-6, 1e6),
               "beta_slow": (1e-6, 1e6), "attention_factor": (1e-6, 1e6)}
TRAINED = {40960: 32768}  # max_position_embeddings of Qwen3: 32,768 positions of training, and room for an answer


def with_yarn(config: Config, rope: Mapping[str, Any], file: Path) -> Config:
    """The config with YaRN (Peng et al. 2023): its frequencies, its factor for cos and sin, and its context.

    It divides the frequency of the slow pairs, which made no full turn within the original context, by `factor`, keeps
    the quick ones, and blends the pairs between. Raises InputError for values out of range and for unknown ones.
    """
    yarn: dict[str, Any] = {"factor": None, "original_max_position_embeddings": config.context_length, "beta_fast": 32,
                            "beta_slow": 1}
    yarn |= {key: value for key, value in rope.items()
             if key not in ("rope_theta", "rope_type", "type") and value is not None}
    for key, value in yarn.items():
        if key not in YARN_RANGES:
            raise InputError(f"{file}: rope parameter {brief(key)} = {brief(repr(value))} is not supported with yarn")
        yarn[key] = checked_number(f"{file}: {key}", value, *YARN_RANGES[key])
    if yarn["beta_fast"] <= yarn["beta_slow"]:
        raise InputError(f"{file}: beta_fast {yarn['beta_fast']:g} must be larger than beta_slow {yarn['beta_slow']:g}")
    d, theta = config.head_dim, config.rope_theta
    factor, original = yarn["factor"], yarn["original_max_position_embeddings"]
    # The (fractional) pairs that make so many turns within the original context; d - 1 and 0.001 as in transformers.
    quick, slow = (d * math.log(original / (yarn[turns] * 2 * math.pi)) / (2 * math.log(theta))
                   for turns in ("beta_fast", "beta_slow"))
    low, high = max(math.floor(quick), 0), min(math.ceil(slow), d - 1)
    ramp = np.clip((np.arange(d // 2, dtype=np.float32) - low) / np.float32(max(high - low, 0.001)), 0, 1)
    frequencies = 1 / (theta ** (np.arange(0, d, 2) / d)).astype(np.float32)
    frequencies = frequencies / np.float32(factor) * ramp + frequencies * (1 - ramp)
    return replace(config, rope_frequencies=tuple(map(float, frequencies)),
                   rope_factor=yarn.get("attention_factor", 0.1 * math.log(factor) + 1),
                   context_length=max(config.context_length, int(factor * original)))


def stretched(config: Config, factor: float) -> Config:
    """The config for a context that is `factor` times as long as in the training."""
    if config.rope_frequencies:
        raise InputError("the model's files stretch the context already; leave out --rope-scaling and --rope-factor")
    original = TRAINED.get(config.context_length, config.context_length)
    return with_yarn(config, {"factor": factor, "original_max_position_embeddings": original}, Path("--rope-factor"))
