"""How the hidden states of a text become its vector, by the files that sentence-transformers writes beside a model.

modules.json lists the modules: the model itself (Transformer), Pooling, then any of Dense and Normalize. Without
modules.json, a model gives vectors as Qwen3-Embedding does.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3 import Source, checked_whole, map_safetensors, to_float32
from qwen3_lib.io.errors import InputError, brief, parse_json, read_json_object, some

MODULES, PROMPTS, LENGTHS = VECTOR_FILES = ("modules.json", "config_sentence_transformers.json",
                                            "sentence_bert_config.json")
# pooling_mode of today -> its key in older files
POOLINGS = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
DENSE_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Identity": lambda x: x, "Tanh": np.tanh}
Stage = Callable[[np.ndarray], np.ndarray]  # [n, inputs] -> [n, outputs]
MESSAGES = {"chat_template": {"add_generation_prompt": True}}  # processing_kwargs of Qwen3-VL-Embedding
SEARCH = "Given a web search query, retrieve relevant passages that answer the query"  # the instruction for a search


class Recipe(NamedTuple):
    """How texts become vectors; the defaults are Qwen3-Embedding's."""
    width: int  # numbers of a vector
    longest: int  # tokens of a text
    pooling: str = "lasttoken"  # or "mean"
    include_prompt: bool = True  # whether the tokens of a prompt count in the mean
    steps: tuple[Stage, ...] = ()  # what follows pooling
    normalize: bool = True  # the last step scales vectors to length 1
    needs_end: bool = True  # <|endoftext|> follows a text if the tokenizer appends nothing
    prompts: dict[str, str] = {"query": f"Instruct: {SEARCH}\nQuery:", "document": ""}  # what stands before a text
    default_prompt: str | None = None  # the name of the prompt for texts without another one
    dot: bool = False  # vectors are compared by their dot product, not by the cosine
    messages: bool = False  # of a model that sees: its files say how texts and pictures become messages

    def pool(self, states: np.ndarray, n_prompt: int) -> np.ndarray:
        """The states [n, hidden_size] of a text whose first n_prompt tokens are the prompt -> one [hidden_size]."""
        if self.pooling == "lasttoken":
            return states[-1]
        states = states if self.include_prompt else states[n_prompt:]
        if not len(states):
            raise InputError("a text has no tokens but those of the prompt, which don't count in this model's vectors")
        return states.mean(axis=0)

    def prompt(self, name: str | None) -> str:
        """The text of a prompt; None is the default prompt. Raises InputError for an unknown name."""
        name = self.default_prompt if name is None else name
        if name not in (None, *self.prompts):
            raise InputError(f"there is no prompt {brief(repr(name))}; the model has {some(self.prompts)}")
        return "" if name is None else self.prompts[name]


def module_files(names: Iterable[str]) -> list[str]:
    """The files of modules among the names of a model's files, such as 1_Pooling/config.json, or a codec's."""
    return sorted(name for name in names
                  if re.fullmatch(r"(\d+_\w+|speech_tokenizer)/(config\.json|model\.safetensors)", name))


@lru_cache(maxsize=4)
def recipe_of(source: Source) -> Recipe:
    """The recipe of a model. Raises InputError for damaged files, and for modules that are not computed here."""
    folder, context, width = source.path, source.config.context_length, source.config.hidden_size
    if not (folder / MODULES).is_file():
        return Recipe(width, context)
    steps, normalize = list[Stage](), False
    _, (_, pooling_folder), *others = modules_of(folder)
    for kind, path in others:
        if normalize:
            steps.append(normalized)
        if normalize := kind == "Normalize":
            continue
        step, width = read_dense(path, width)
        steps.append(step)
    settings, about = read_pooling(pooling_folder / "config.json"), optional(folder / PROMPTS)
    given, default = about.get("prompts") or {}, about.get("default_prompt_name")
    prompts: dict[str, Any] = {"query": "", "document": ""} | (given if isinstance(given, dict) else {"": None})
    if not all(isinstance(text, str) for text in prompts.values()) or default not in (None, *prompts):
        raise InputError(f"{folder / PROMPTS}: prompts must be an object of name: text, with default_prompt_name in it")
    if (kept := about.get("truncate_dim")) is not None:  # sentence-transformers cuts after Normalize
        kept = checked_whole(f"{folder / PROMPTS}: truncate_dim", kept, 1)
        steps += [normalized] * normalize + [lambda x: x[:, :kept]]
        width, normalize = min(width, kept), False
    longest, messages = read_lengths(folder)
    return Recipe(width, min(context, longest), *settings, tuple(steps), normalize, False, prompts, default,
                  about.get("similarity_fn_name") == "dot", messages)


def modules_of(folder: Path) -> list[tuple[str, Path]]:
    """The modules of modules.json as (kind, folder): Transformer, Pooling and perhaps others."""
    file = folder / MODULES
    try:
        entries = parse_json(file.read_bytes(), file)
        modules = [(entry["type"].rpartition(".")[2], folder / entry["path"]) for entry in entries]
    except (OSError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{file}: must be a list of modules with type and path: {brief(error)}") from error
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or modules[0][1] != folder or set(kinds[2:]) - {"Dense", "Normalize"}:
        raise InputError(f"{file}: the modules {some(kinds)} are not supported, only Transformer in the folder itself, "
                         "Pooling, then Dense and Normalize; sentence-transformers computes others")
    return modules


def read_pooling(file: Path) -> tuple[str, bool]:
    """(pooling, include_prompt) of 1_Pooling/config.json."""
    raw = settings_in(file)
    modes = [mode for mode, key in POOLINGS.items() if raw.get(key)]
    modes += [key for key, value in raw.items() if key.startswith("pooling_mode_") and value and
              key not in POOLINGS.values()]
    modes = raw.get("pooling_mode") or modes or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in tuple(POOLINGS):
        raise InputError(f"{file}: the pooling {brief(modes)} is not supported, only one of {', '.join(POOLINGS)} is")
    return modes[0], raw.get("include_prompt", True) is not False


def read_dense(folder: Path, width: int) -> tuple[Stage, int]:
    """(the step x -> activation(x Wᵀ + b) of a Dense module, how many numbers a vector has after it).

    Raises InputError for other settings, and misshapen weights.
    """
    raw = settings_in(file := folder / "config.json")
    activation = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    tensors = map_safetensors(folder / "model.safetensors")
    if activation not in DENSE_ACTIVATIONS or raw.get("use_residual") or "linear.weight" not in tensors \
            or raw.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise InputError(f"{file}: this Dense module is not supported: {brief(raw)}")
    weight = to_float32(tensors["linear.weight"])
    bias = to_float32(tensors["linear.bias"]) if "linear.bias" in tensors else np.zeros(weight.shape[:1], np.float32)
    if weight.ndim != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
        raise InputError(f"{folder}: linear.weight has the shape {list(weight.shape)}, not [any, {width}], or its bias "
                         "has another one")
    # einsum computes each row by itself, so that a vector doesn't depend on the texts beside it.
    return lambda x: DENSE_ACTIVATIONS[activation](np.einsum("ni,oi->no", x, weight) + bias), len(weight)


def normalized(x: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1."""
    return x / np.maximum(np.sqrt(np.einsum("ni,ni->n", x, x)), 1e-12)[:, None]


def read_lengths(folder: Path) -> tuple[int, bool]:
    """(the most tokens of a text: max_seq_length, or else the tokenizer's model_max_length; Recipe.messages)."""
    raw, tokenizer = optional(folder / LENGTHS), optional(folder / "tokenizer_config.json")
    modes, more = raw.get("modality_config", {"text": {}}), raw.get("processing_kwargs", {})
    form = modes.get("message") if isinstance(modes, dict) else None
    known = isinstance(modes, dict) and "text" in modes and not more if form is None else \
        "image" in modes and isinstance(form, dict) and form.get("format") == "structured" and more == MESSAGES
    if not known or any(map(raw.get, ("do_lower_case", "query_length", "document_length", "query_expansion"))):
        raise InputError(f"{folder / LENGTHS}: only plain texts are supported, or messages with pictures as in "
                         "Qwen3-VL-Embedding; sentence-transformers computes others")
    given = raw.get("max_seq_length") or tokenizer.get("model_max_length") or 2**62
    given = int(given) if isinstance(given, float) and given.is_integer() else given  # 1e30 means no limit
    return checked_whole(f"{folder}: max_seq_length, or model_max_length of the tokenizer,", given, 1), form is not None


def settings_in(file: Path) -> dict[str, Any]:
    """The object in a module's JSON file. Raises InputError if there is none."""
    if not (raw := optional(file)):
        raise InputError(f"{file}: missing, or without settings")
    return raw


def optional(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_json_object(file) if file.is_file() else {}
