"""YaRN: other frequencies than the powers of theta, for texts longer than in training."""
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qwen3 import Config, checked_number
from qwen3_lib.io.errors import InputError, brief

TRAINED = {40960: 32768}  # max_position_embeddings of Qwen3: 32,768 positions of training, and room for an answer
YARN_RANGES = {"factor": (1e-3, 1e6), "original_max_position_embeddings": (2, 2**31), "beta_fast": (1e-6, 1e6),
          "beta_slow": (1e-6, 1e6), "attention_factor": (1e-6, 1e6), "attn_factor": (1e-6, 1e6), "mscale": (0, 1e6),
          "mscale_all_dim": (0, 1e6)}
AnyConfig = TypeVar("AnyConfig", bound=Config)


def with_scaled_rope(config: AnyConfig, rope: Mapping[str, Any], file: Path) -> AnyConfig:
    """The config with YaRN, if `rope`, the parameters in config.json, ask for it.

    Computed as in transformers (modeling_rope_utils). Raises InputError for other types and values out of range.
    """
    if rope["rope_type"] == "default":
        return config
    if rope["rope_type"] != "yarn":
        raise InputError(f"{file}: rope_type = {brief(repr(rope['rope_type']))} is not supported, only 'default' and "
                         "'yarn' are; transformers computes it")
    try:
        return yarn(config, rope)
    except (InputError, OverflowError) as error:  # the latter by a max_position_embeddings of 10**400
        raise InputError(f"{file}: rope type yarn: {error}") from error


def yarn(config: AnyConfig, rope: Mapping[str, Any]) -> AnyConfig:
    """YaRN (Peng et al. 2023): divides the frequencies of the slow pairs by `factor`.

    Slow pairs made no full turn within the original length. The quick ones stay, and the pairs between are blended.
    """
    found = {"original_max_position_embeddings": config.context_length, **rope}

    def number(name: str, *default: float) -> float:
        return checked_number(name, found.get(name, *default), *YARN_RANGES[name])

    d, theta, original = config.rope_dim, config.rope_theta, number("original_max_position_embeddings")
    plain = 1 / (theta ** (np.arange(0, d, 2) / d)).astype(np.float32)
    factor = number("factor", config.context_length / original)
    fast, slow = number("beta_fast", 32), number("beta_slow", 1)
    if fast <= slow:
        raise InputError(f"beta_fast {fast:g} must be larger than beta_slow {slow:g}")
    # The (fractional) pairs that make so many turns within the original length; d - 1 and 0.001 as in transformers.
    low, high = (d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = np.clip((np.arange(d // 2, dtype=np.float32) - low) / np.float32((high - low) or 0.001), 0, 1)

    def root(name: str) -> float:
        return 0.1 * number(name, 1) * math.log(factor) + 1 if factor > 1 else 1.0

    both = rope.get("mscale") and rope.get("mscale_all_dim")
    usual = root("mscale") / root("mscale_all_dim") if both else 0.1 * math.log(max(factor, 1)) + 1
    frequencies = plain / np.float32(factor) * ramp + plain * (1 - ramp)
    # attn_factor: of YaRN's authors, whose code multiplies by it; transformers doesn't know the key.
    return replace(config, rope_frequencies=tuple(map(float, frequencies)),
                   rope_factor=number("attention_factor", usual) * number("attn_factor", 1),
                   context_length=max(int(max(config.context_length, factor * original)), 1))


def stretched(config: Config, factor: float) -> Config:
    """The config for a context that is `factor` times as long as in the training."""
    if config.rope_frequencies:
        raise InputError("the model's files stretch the context already; leave out --rope-scaling and --rope-factor")
    original = TRAINED.get(config.context_length, config.context_length)
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return with_scaled_rope(config, rope, Path("--rope-factor"))
