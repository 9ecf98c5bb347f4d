"""The files of people: texts, conversations, tools, saved prompts.

Input is checked; bad input raises InputError with a message of one line.
"""
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from qwen3 import KVCache, Model, checked_ids
from qwen3_5 import HybridCache, State
from qwen3_lib.generation.messages import checked_messages, checked_tools
from qwen3_lib.io import adapter
from qwen3_lib.io.errors import InputError, parse_json
from qwen3_lib.io.tensors import both_ends
from qwen3_lib.io.writing import checksum, write_safetensors

STATES = "history", "state", "late"  # the parts of qwen3_5.State

# ---- Texts -----------------------------------------------------------------------------------------------------------


def read_text(name: str) -> str:
    """The text of a UTF-8 file, or of stdin for "-", without the newline at its end."""
    where = "stdin" if name == "-" else name
    if name == "-" and sys.stdin is None:
        raise InputError("stdin is closed, so nothing can be read from it")
    try:
        text = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise InputError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def read_json(name: str) -> Any:
    """The JSON value in a file (or stdin for "-")."""
    return parse_json(read_text(name), name)


# ---- Conversations and tools, in the form of OpenAI's API ------------------------------------------------------------

def read_messages(name: str) -> tuple[list[dict], list[dict] | None]:
    """(messages, tools or None) of a file with a list of messages, or with {"messages": [...], "tools": [...]}."""
    value = read_json(name)
    messages, tools = (value.get("messages"), value.get("tools")) if isinstance(value, dict) else (value, None)
    return checked_messages(messages, name), None if tools is None else checked_tools(tools, name)


def read_tools(name: str) -> list[dict]:
    """The tools of a file with a list of {"type": "function", "function": {"name", "description", "parameters"}}."""
    return checked_tools(read_json(name), name)


# ---- Saved prompts ---------------------------------------------------------------------------------------------------
# The KV cache of a prefix, as a safetensors file with token_ids [n] and k, v [layers, n_kv_heads, n, head_dim]; of a
# Qwen3.5, also history and state [layers, ...]. Its metadata name the model and hold a checksum of the bytes.

FORMAT = "qwen3 prompt cache 2"


def fingerprint(model: Model, cache: KVCache) -> str:
    """A short text that tells models apart: config, both ends of each tensor, how weights and cache are kept."""
    kept = f"{getattr(model.weights, 'form', None)} {cache.form} {cache.k.shape[3]}"
    digest = hashlib.sha256(f"{model.config} {kept}".encode())
    folder = model.folder
    while isinstance(folder, adapter.Adapted):
        digest.update(str(folder.weight).encode())
        for file in (adapter.CONFIG, adapter.WEIGHTS):
            digest.update((folder.adapter / file).read_bytes())
        folder = folder.base
    for name, tensor in sorted(model.folder.stored().items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + both_ends(tensor))
    return digest.hexdigest()


def save_prompt_cache(cache: KVCache, model: Model, name: str | Path) -> None:
    """Writes the filled part of a cache. Raises InputError when it can't be written."""
    n = cache.length
    if (cache.token_ids[:n] < 0).any():
        raise InputError(f"{name}: a prompt with pictures can't be kept in a file")
    arrays: dict[str, np.ndarray] = {"token_ids": cache.token_ids[:n], "k": cache.k[..., :n, :],
                                     "v": cache.v[..., :n, :]}
    if isinstance(cache, HybridCache):
        arrays |= zip(STATES, map(np.stack, zip(*cache.snapshots[-1].states.values())))
    write_safetensors(name, arrays, {"format": FORMAT, "model": fingerprint(model, cache),
                                     "crc32": checksum(arrays.values())})


def load_prompt_cache(model: Model, name: str | Path) -> KVCache:
    """The cache in a file, or an empty one if there is no such file yet.

    Raises InputError for a damaged file and for a file of another model.
    """
    cache = model.engine.new_cache(model.config)
    if not os.path.lexists(name):
        return cache
    if not os.path.isfile(name):
        raise InputError(f"{name}: not a regular file, so not a prompt cache")
    try:
        with open(name, "rb"), safetensors.safe_open(name, framework="numpy") as file:  # open says why it can't
            metadata = file.metadata() or {}
            recurrent = cache.config.linear_layers if isinstance(cache, HybridCache) else ()
            names = ("token_ids", "k", "v", *(STATES if recurrent else ()))
            token_ids, k, v, *states = arrays = [file.get_tensor(name) for name in names]
    except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise InputError(f"{name}: not a prompt cache, or a damaged one; give another name: {error}") from error
    if metadata.get("format") != FORMAT:
        raise InputError(f"{name}: not a prompt cache of this program; give another name")
    if metadata.get("model") != fingerprint(model, cache):
        if k.dtype != cache.k.dtype:
            option, engine = ("--no-fast", "NumPy") if k.dtype == np.float32 else ("--fast", "fast")
            raise InputError(f"{name}: a prompt cache of the {engine} engine; add {option}, or give another name")
        raise InputError(f"{name}: the prompt cache of another model (or of other options of the engine); give another "
                         "name")
    n = len(token_ids) if token_ids.ndim == 1 else 0
    shape = (*cache.k.shape[:2], n, cache.k.shape[3])
    if not 1 <= n <= model.config.context_length \
            or (token_ids < 0).any() or any(array.shape != shape or array.dtype != cache.k.dtype for array in (k, v)) \
            or metadata.get("crc32") != checksum(arrays):
        raise InputError(f"{name}: a damaged prompt cache; give another name")
    ids = checked_ids(model, token_ids)
    cache.reserve(n)
    cache.k[..., :n, :], cache.v[..., :n, :] = k, v
    if isinstance(cache, HybridCache) and recurrent:
        cache.new = dict(zip(recurrent, map(State, *states)))
    cache.advance(ids)
    return cache
