"""Scaled RoPE: frequencies other than the powers of theta, for texts that are longer than those of the training."""
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qwen3 import Config, checked_number
from qwen3_lib.io.errors import InputError, brief

TRAINED = {40960: 32768}  # max_position_embeddings of Qwen3: 32,768 positions of training, and room for an answer
RANGES = {"factor": (1e-3, 1e6), "original_max_position_embeddings": (2, 2**31), "beta_fast": (1e-6, 1e6),
          "beta_slow": (1e-6, 1e6), "attention_factor": (1e-6, 1e6), "attn_factor": (1e-6, 1e6), "mscale": (0, 1e6),
          "mscale_all_dim": (0, 1e6), "low_freq_factor": (1e-6, 1e6), "high_freq_factor": (1e-6, 1e6)}
Scaled = tuple[np.ndarray, float, float]  # frequencies [rope_dim / 2], the factor of cos and sin, the context's length
AnyConfig = TypeVar("AnyConfig", bound=Config)
Number = Callable[..., float]  # number(name, default) of the parameters; without a default it must be there


def with_scaled_rope(config: AnyConfig, rope: Mapping[str, Any], file: Path) -> AnyConfig:
    """The config with scaled RoPE, of which `rope` are the parameters in config.json.

    Computed as in transformers (modeling_rope_utils). Raises InputError for unknown types and values out of range.
    """
    kind = rope["rope_type"]
    if kind not in ("default", *TYPES):
        raise InputError(f"{file}: rope type {brief(repr(kind))} is not supported, only "
                         f"{', '.join(('default', *TYPES))} are")
    if kind == "default":
        return config
    found = {"original_max_position_embeddings": config.context_length, **rope}

    def number(name: str, *default: float) -> float:
        value = found.get(name, *default) if default or name in found else None
        return checked_number(name, value, *RANGES[name])

    powers = config.rope_theta ** (np.arange(0, config.rope_dim, 2) / config.rope_dim)
    try:
        frequencies, factor, length = TYPES[kind](config, 1 / powers.astype(np.float32), number, found)
    except (InputError, OverflowError) as error:  # the latter by a max_position_embeddings of 10**400
        raise InputError(f"{file}: rope type {kind}: {error}") from error
    return replace(config, rope_frequencies=tuple(map(float, frequencies)), rope_factor=factor,
                   context_length=max(int(length), 1))


def linear(config: Config, plain: np.ndarray, number: Number, _: Mapping[str, Any]) -> Scaled:
    """All positions lie `factor` times as close together. Source: Chen et al. 2023 (Position Interpolation)."""
    factor = number("factor")
    return plain / np.float32(factor), 1.0, config.context_length * max(factor, 1)


def dynamic(config: Config, plain: np.ndarray, number: Number, _: Mapping[str, Any]) -> Scaled:
    """Up to max_position_embeddings, the default; beyond it, all frequencies would change with each new token."""
    number("factor")
    return plain, 1.0, config.context_length


def longrope(config: Config, plain: np.ndarray, number: Number, rope: Mapping[str, Any]) -> Scaled:
    """short_factor divides each frequency, up to the original length. Source: Ding et al. 2024 (LongRoPE).

    Beyond that length, long_factor would replace it, also for the keys that the cache already holds.
    """
    original, short = number("original_max_position_embeddings"), rope.get("short_factor")
    if not isinstance(short, list) or len(short) != len(plain):
        raise InputError(f"short_factor must be a list of {len(plain)} numbers, not {brief(short)}")
    short = np.array([checked_number("short_factor", value, 1e-6, 1e6) for value in short], np.float32)
    factor = number("factor", config.context_length / original)
    root = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1 / (short * (1 / plain)), number("attention_factor", root), min(config.context_length, original)


def llama3(config: Config, plain: np.ndarray, number: Number, _: Mapping[str, Any]) -> Scaled:
    """Divides the frequencies with few turns within the original length, as in Llama 3.1, and blends at the border."""
    factor, original = number("factor"), number("original_max_position_embeddings")
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if high <= low:
        raise InputError(f"high_freq_factor {high:g} must be larger than low_freq_factor {low:g}")
    turns = np.float32(original) * plain / np.float32(2 * math.pi)
    blend = (turns - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * plain / np.float32(factor) + blend * plain
    return np.where(turns < low, plain / np.float32(factor), np.where(turns > high, plain, blended)), 1.0, \
        config.context_length


def yarn(config: Config, plain: np.ndarray, number: Number, rope: Mapping[str, Any]) -> Scaled:
    """YaRN (Peng et al. 2023): divides the frequencies of the slow pairs by `factor`.

    Slow pairs made no full turn within the original length. The quick ones stay, and the pairs between are blended.
    """
    d, theta, original = config.rope_dim, config.rope_theta, number("original_max_position_embeddings")
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
    # attn_factor: of YaRN's authors, whose code multiplies by it; transformers doesn't know the key.
    return (plain / np.float32(factor) * ramp + plain * (1 - ramp),
            number("attention_factor", usual) * number("attn_factor", 1), max(config.context_length, factor * original))


TYPES = {"linear": linear, "dynamic": dynamic, "yarn": yarn, "longrope": longrope, "llama3": llama3}


def stretched(config: Config, factor: float) -> Config:
    """The config for a context that is `factor` times as long as in the training."""
    if config.rope_frequencies:
        raise InputError("the model's files stretch the context already; leave out --rope-scaling and --rope-factor")
    original = TRAINED.get(config.context_length, config.context_length)
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return with_scaled_rope(config, rope, Path("--rope-factor"))
