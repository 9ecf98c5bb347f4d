"""Files that people give to the programs and get from them: texts, conversations, tools, saved prompts.

Whatever is read is checked, and what is wrong with it raises InputError, whose message is one line. Whatever is written
is complete or not there: it goes into a file beside the target first, which then takes the target's name.
"""
import contextlib
import hashlib
import json
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors

from qwen3 import (STORED_DTYPES, InputError, KVCache, Model, StoredTensor, checked_ids, map_checkpoint,
                   map_safetensors)
from tokenizer_utils import LARGEST_TEXT, model_file

# ----------------------------------------------------------------------------------------------------------------------
# Texts
# ----------------------------------------------------------------------------------------------------------------------


def read_text(name: str) -> str:
    """The text of a file, or of stdin for "-", without the newline at its end. UTF-8, at most LARGEST_TEXT bytes."""
    where = "stdin" if name == "-" else name
    try:
        if name == "-":
            if sys.stdin is None:
                raise InputError("stdin is closed, so no prompt can be read from it")
            data = sys.stdin.buffer.read(LARGEST_TEXT + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(LARGEST_TEXT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise InputError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > LARGEST_TEXT:
        raise InputError(f"{where}: longer than {LARGEST_TEXT} bytes, which no model's context can hold")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: byte {error.start} is {data[error.start]:#x}") from error
    return text.removesuffix("\n").removesuffix("\r")


def read_json(name: str) -> Any:
    """The JSON value in a file (or stdin for "-")."""
    text = read_text(name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not valid JSON: {error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Conversations and tools, in the form of OpenAI's API
# ----------------------------------------------------------------------------------------------------------------------

ROLES = ("system", "user", "assistant", "tool")


def read_messages(name: str) -> tuple[list[dict], list[dict] | None]:
    """(messages, tools or None) of a file with a list of messages, or with {"messages": [...], "tools": [...]}."""
    value = read_json(name)
    messages, tools = (value.get("messages"), value.get("tools")) if isinstance(value, dict) else (value, None)
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{name}: expected a list of messages, [{{"role": "user", "content": "..."}}, ...]')
    for i, message in enumerate(messages):
        check_message(message, f"{name}: message {i}")
    return messages, None if tools is None else checked_tools(tools, name)


def check_message(message: Any, where: str) -> None:
    """Raises InputError, which begins with `where`, unless it is a message as the chat templates expect them."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise InputError(f'{where} must be an object whose "role" is one of {", ".join(ROLES)}')
    calls, content = message.get("tool_calls"), message.get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if content is None and not (message["role"] == "assistant" and calls):
        raise InputError(f'{where} has no "content"')
    if content is not None and not all(isinstance(part, dict) and part.get("type") == "text"
                                       and isinstance(part.get("text"), str) for part in texts):
        raise InputError(f'{where}: "content" must be a text, or a list of {{"type": "text", "text": ...}}')
    for key in ("reasoning_content", "reasoning", "thinking"):
        if not isinstance(message.get(key), str | None):
            raise InputError(f'{where}: "{key}" must be a text')
    if calls is not None and not (isinstance(calls, list) and all(map(is_tool_call, calls))):
        raise InputError(f'{where}: "tool_calls" must be a list of {{"function": {{"name": ..., "arguments": ...}}}}')


def is_tool_call(call: Any) -> bool:
    """True for {"name", "arguments"}, also as the "function" of an object. OpenAI's API has the arguments as text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return (isinstance(function, dict) and isinstance(function.get("name"), str)
            and "arguments" in function)


def read_tools(name: str) -> list[dict]:
    """The tools of a file with a list of {"type": "function", "function": {"name", "description", "parameters"}}."""
    return checked_tools(read_json(name), name)


def checked_tools(tools: Any, name: str) -> list[dict]:
    """The tools. Raises InputError, which names the file, unless each has a name."""
    functions = [tool.get("function", tool) if isinstance(tool, dict) else None
                 for tool in (tools if isinstance(tools, list) else [None])]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise InputError(f'{name}: tools must be a list of {{"type": "function", "function": {{"name": ..., '
                         '"description": ..., "parameters": ...}}')
    return tools


# ----------------------------------------------------------------------------------------------------------------------
# Writing
# ----------------------------------------------------------------------------------------------------------------------

def write_whole(name: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    """Calls write(file) on a temporary file beside `name`, then gives it that name: all of it is there, or nothing.

    Raises InputError when it can't be written; what was there before is then as it was.
    """
    try:
        target = Path(os.path.realpath(name))
        temporary = target.with_name(f".qwen3-{secrets.token_hex(8)}.tmp")
    except ValueError as error:  # "/", a NUL character, a lone surrogate
        raise InputError(f"{ascii(str(name))}: not the name of a file") from error
    if os.fspath(name).endswith(os.sep) or (os.path.lexists(target) and not os.path.isfile(target)):
        raise InputError(f"{name}: not a regular file, so nothing is written to it")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "U16", "uint8": "U8", "int64": "I64"}


def write_safetensors(name: str | Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, whole or not at all, a row of each array after the other: no second copy in memory."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for key, array in tensors.items():
        header[key] = {"dtype": SAFETENSORS_DTYPES[array.dtype.name], "shape": array.shape,
                       "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * ((-8 - len(head)) % 64)  # the numbers begin where a line of the CPU's cache does

    def write(file: BinaryIO) -> None:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in tensors.values():
            for part in [array] if array.flags.c_contiguous else array:
                file.write(np.ascontiguousarray(part).data)

    write_whole(name, write)


def write_json(name: str | Path, value: Any) -> None:
    """Writes a value as JSON that people can read, whole or not at all."""
    data = (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace")
    write_whole(name, lambda file: file.write(data))


# ----------------------------------------------------------------------------------------------------------------------
# Saved prompts: the KV cache of a prefix, as a safetensors file with token_ids [n] and k, v [layers, 1, n_kv_heads, n,
# head_dim]. Its metadata name the model and hold a checksum of the bytes.
# ----------------------------------------------------------------------------------------------------------------------

FORMAT = "qwen3 prompt cache 1"


def quantized_file(form: str) -> str:
    return f"model.{form}.safetensors"


def map_quantized(path: Path) -> tuple[str | None, Path | None, dict[str, StoredTensor]]:
    """(format, file, tensors) of a folder that qwen3_numba.save_quantized has written; else (None, None, {})."""
    for form in ("int8", "int4"):
        if file := model_file(path, quantized_file(form), largest=None):
            return form, file, map_safetensors(file, {**STORED_DTYPES, "U8": np.dtype(np.uint8)})
    return None, None, {}


def fingerprint(model: Model, cache: KVCache) -> str:
    """A short text that tells models apart: config, both ends of each tensor, how weights and cache are kept."""
    kept = f"{getattr(model.weights, 'form', None)} {cache.stored_as} {cache.k.shape[4]}"
    digest = hashlib.sha256(f"{model.config} {kept}".encode())
    for name, tensor in sorted((map_quantized(model.path)[2] or map_checkpoint(model.path)).items()):
        flat = tensor.data.reshape(-1)
        digest.update(f"{name} {tensor.dtype} {tensor.data.shape}".encode())
        digest.update(flat[:1024].tobytes() + flat[-1024:].tobytes())
    return digest.hexdigest()


def checksum(arrays: Iterable[np.ndarray]) -> str:
    """CRC-32 over the bytes of the arrays."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).data, value)
    return f"{value:08x}"


def save_prompt_cache(cache: KVCache, model: Model, name: str | Path) -> None:
    """Writes the filled part of a cache of one sequence. Raises InputError when it can't be written."""
    n = cache.length
    tensors = {"token_ids": cache.token_ids[0, :n], "k": cache.k[..., :n, :], "v": cache.v[..., :n, :]}
    parts = [tensors["token_ids"], *tensors["k"], *tensors["v"]]  # layer by layer, for memory's sake
    write_safetensors(name, tensors,
                      {"format": FORMAT, "model": fingerprint(model, cache), "crc32": checksum(parts)})


def load_prompt_cache(model: Model, name: str | Path) -> KVCache:
    """A cache that holds what the file has. Raises InputError for a damaged file and for that of another model."""
    if not os.path.isfile(name):
        raise InputError(f"{name}: not a regular file, so not a prompt cache")
    cache = model.engine.new_cache(model.config)
    try:
        with safetensors.safe_open(name, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"{name}: not a prompt cache of this program; give another name, or delete it")
            if metadata.get("model") != fingerprint(model, cache):
                raise InputError(f"{name}: the prompt cache of another model (or engine); give another name")
            token_ids, k, v = (file.get_tensor(key) for key in ("token_ids", "k", "v"))
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: a damaged prompt cache; delete it: {error}") from error
    n = len(token_ids) if token_ids.ndim == 1 else 0
    shape = (*cache.k.shape[:3], n, cache.k.shape[4])
    if (metadata.get("crc32") != checksum([token_ids, k, v]) or not 1 <= n <= model.config.context_length
            or any(array.shape != shape or array.dtype != cache.k.dtype for array in (k, v))):
        raise InputError(f"{name}: a damaged prompt cache; delete it")
    ids = checked_ids(token_ids, model.config)
    cache.reserve(n)
    cache.k[..., :n, :], cache.v[..., :n, :] = k, v
    cache.advance(ids)
    return cache
