"""The arguments of callers, checked: options with their names and ranges, and token ids."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from qwen3_io.errors import InputError, brief, did_you_mean, is_number, is_whole


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of generate: the fields of Sampling; None is the same as absent."""
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None


class Options(SamplingOptions, total=False):
    """Keyword arguments of chat, see Completion; None is the same as absent."""
    max_new_tokens: int | None
    stop: str | Sequence[str]
    logprobs: int | None
    cache: Any  # KVCache or None; its class stands above this room
    seed: int | None
    eos_token_ids: Iterable[int] | None
    think_budget: int | None
    lookup: int | None


TokenIds = Sequence[int] | Sequence[Sequence[int]] | np.ndarray  # of one sequence, or of several
OPTIONS = sorted(Options.__annotations__)

# Field of qwen3.Sampling -> (its values in words, a test of them)
SAMPLING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("0 (greedy), or between 0.0001 and 10000", lambda t: t == 0 or 1e-4 <= t <= 1e4),
    "top_k": ("a whole number, 0 (off) or more", lambda k: is_whole(k, 0)),
    "top_p": ("above 0 and at most 1", lambda p: 0 < p <= 1),
    "min_p": ("between 0 and 1", lambda p: 0 <= p <= 1),
    "repetition_penalty": ("between 0.0001 and 10000", lambda x: 1e-4 <= x <= 1e4),
    "presence_penalty": ("between -10000 and 10000", lambda x: abs(x) <= 1e4),
    "frequency_penalty": ("between -10000 and 10000", lambda x: abs(x) <= 1e4),
}

def check_sampling(values: Mapping[str, Any]) -> None:
    """Raises InputError for an unknown setting and for a value out of its range."""
    for name, value in values.items():
        if name not in SAMPLING:
            raise InputError(f"there is no option {brief(name)} here{did_you_mean(name, {*OPTIONS} - {name})}")
        wanted, is_right = SAMPLING[name]
        if not is_number(value) or not is_right(value):
            raise InputError(f"{name} must be {wanted}, not {brief(repr(value))}")


def checked_whole(name: str, value: Any, minimum: int) -> int | None:
    """The value. Raises InputError unless it is None or a whole number of at least `minimum`."""
    if value is not None and not is_whole(value, minimum):
        raise InputError(f"{name} must be a whole number, {minimum} or more, not {brief(repr(value))}")
    return value


def checked_prompt(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """The token ids of one sequence as an array [n]. Raises InputError unless there are some and all are known."""
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise InputError("a prompt is one list of token ids, not lists within a list") from error
    if ids.size == 0:
        raise InputError("there are no tokens: the prompt is empty")
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise InputError(f"token ids must be integers in a list, not {ids.dtype} of shape {ids.shape}")
    if ids.ndim == 2:
        raise InputError("a prompt is one list of token ids, not several lists (generate_batch takes several prompts)")
    if wrong := ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise InputError(f"token id {wrong[0]} is out of range: the model has {vocab_size} tokens")
    return ids


def is_batch(token_ids: Any) -> bool:
    """Whether these are the ids of several sequences."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.ndim == 2
    return isinstance(token_ids, (list, tuple)) and any(isinstance(ids, (list, tuple, np.ndarray)) for ids in token_ids)


def checked_batch(token_ids: Sequence[Any] | np.ndarray, cache: Any, config: Any,
                  stored: type) -> tuple[np.ndarray, np.ndarray]:
    """(ids [n], the sequence of each [n]): the new tokens of all sequences of a KVCache behind each other.

    Raises InputError for a cache of another model, or of the other engine, which stores another type.
    """
    if cache.config != config or cache.k.dtype != stored:
        raise InputError("the cache belongs to another model, or to the other engine")
    each, n_sequences = list(token_ids) if is_batch(token_ids) else [token_ids], len(cache.lengths)
    if len(each) != n_sequences:
        raise InputError(f"the cache holds {n_sequences} sequences, but there are tokens for {len(each)}")
    given = [i for i, ids in enumerate(each) if n_sequences == 1 or not hasattr(ids, "__len__") or len(ids)]
    if not given:
        raise InputError("there are no tokens: the prompt is empty")
    checked = [checked_prompt(each[i], config.vocab_size) for i in given]
    return np.concatenate(checked), np.repeat(given, [len(ids) for ids in checked])


def last_tokens(token_ids: Sequence[Any] | np.ndarray) -> np.ndarray:
    """The indices of each sequence's last token among the tokens of all."""
    lengths = [len(ids) for ids in token_ids if len(ids)] if is_batch(token_ids) else [len(token_ids)]
    return np.cumsum(lengths) - 1


def parts_of(sequences: np.ndarray) -> list[tuple[int, slice]]:
    """(Sequence, its tokens) for tokens [n] of these sequences, in order."""
    bounds = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(sequences)]
    return [(int(sequences[start]), slice(start, end)) for start, end in zip(bounds, bounds[1:])]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences have in common at their start."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def checked_ends(eos_token_ids: Iterable[int] | None, default: Iterable[int]) -> set[int]:
    """The ids that end an answer: those given, else the default."""
    ids = default if eos_token_ids is None else eos_token_ids
    ids = list(ids) if isinstance(ids, Iterable) else [None]
    if not all(is_whole(i, 0) for i in ids):
        raise InputError(f"eos_token_ids must be a list of token ids, not {brief(repr(eos_token_ids))}")
    return set(ids)


def checked_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop texts as a tuple. Raises InputError for an empty one, which would end every answer at once."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InputError(f"a stop text must be a text of at least one character, not {brief(repr(text))}")
    return texts
