"""GGUF, llama.cpp's format: one file with a model's weights, sizes, tokenizer and chat template.

    is_gguf(path)           whether a path is such a file
    gguf_json(file, name)   what config.json, tokenizer.json, ... of the same model would say
    map_gguf(file)          name -> tensor, under the names of a safetensors checkpoint
    is_embedder(file)       whether it is an embedding model

A GGUF file is a head (magic, version, two counts), the metadata (name, type, value), a table of the tensors (name,
sizes, format, offset), and the tensors' bytes.
"""
import functools
import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3 import DTYPES, Tensor
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.gguf_formats import FORMATS, OTHER_FORMATS, Format
from qwen3_lib.io.tensors import AnyTensor, PackedTensor, map_file, scaled

MAGIC = b"GGUF"

# A value of the metadata: its type's number -> its struct format. 8 is a text, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens; others are unused


class TensorEntry(NamedTuple):
    """A tensor of the file: its format, its shape (rows first), and its bytes [..., bytes per row]."""
    form: Format
    shape: tuple[int, ...]
    data: np.ndarray


class GGUF(NamedTuple):
    """The contents of a file, its tensors under the names that GGUF gives them."""
    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    mapping: mmap.mmap


def is_gguf(path: Path) -> bool:
    """True for a file that is called *.gguf or begins as GGUF files do."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as opened:
            return path.suffix.lower() == ".gguf" or opened.read(4) == MAGIC
    except OSError:
        return False


# ---- Reading the head ------------------------------------------------------------------------------------------------

def invalid(file: Path, why: str) -> InputError:
    return InputError(f"{file}: not a valid GGUF file: {why}; download it again")


class Reader:
    """Takes values from the bytes of a file, one after the other. Raises InputError at its end."""

    def __init__(self, file: Path, data: mmap.mmap):
        self.file, self.data, self.at = file, data, 0

    def skip(self, size: int) -> int:
        """Moves on by so many bytes -> where they begin."""
        start = self.at
        if size > len(self.data) - start:
            raise invalid(self.file, f"it ends at byte {len(self.data)}, within its head")
        self.at += size
        return start

    def number(self, form: str) -> Any:
        return struct.unpack_from("<" + form, self.data, self.skip(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.skip(size)
        return self.data[start:start + size].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        kind, count = (self.number("I"), self.number("Q")) if kind == ARRAY else (kind, 0)
        if kind == TEXT:
            self.at = self.skip(8 * count)  # a text has 8 bytes at least, so a wrong count is noticed here
            return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            raise invalid(self.file, f"a value of the unknown type {kind}")
        dtype = np.dtype("<" + NUMBERS[kind])
        start = self.skip(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)


def read_gguf(file: Path) -> GGUF:
    """The contents of a GGUF file, checked. Raises InputError for a damaged one."""
    status = file.stat()
    return parsed(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1)  # a model is read in several steps: config, tokenizer, tensors
def parsed(file: Path, _size: int, _time: int) -> GGUF:
    mapping = map_file(file)
    reader = Reader(file, mapping)
    if mapping[:4] != MAGIC:
        raise InputError(f"{file}: not a GGUF file, despite its name: it doesn't begin with GGUF")
    reader.skip(4)
    if (version := reader.number("I")) not in (2, 3):
        raise InputError(f"{file}: version {version} of GGUF is not supported, only 2 and 3 are")
    n_tensors, n_values = reader.number("Q"), reader.number("Q")
    if max(n_tensors, n_values) > len(mapping) // 8:  # each takes more than 8 bytes
        raise invalid(file, f"{n_tensors} tensors and {n_values} values don't fit into {len(mapping)} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        name = reader.text()
        metadata[name] = reader.value(reader.number("I"))
    entries = []
    for _ in range(n_tensors):
        name, n_sizes = reader.text(), reader.number("I")
        if n_sizes > 4:
            raise invalid(file, f"{brief(name)} has {n_sizes} dimensions")
        shape = tuple(reader.number("Q") for _ in range(n_sizes))[::-1]
        entries.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment % 8:
        raise invalid(file, f"general.alignment = {brief(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in entries:
        if kind not in FORMATS:
            name_of_kind = OTHER_FORMATS.get(kind, f"number {kind}")
            raise InputError(f"{file}: {brief(name)} has the format {name_of_kind}, which is not supported, only "
                             f"{', '.join(form.name for form in FORMATS.values())} are")
        form = FORMATS[kind]
        if not shape or shape[-1] % form.numbers:
            raise invalid(file, f"{brief(name)} has shape {list(shape)}, but {form.name} has blocks of {form.numbers} "
                                "numbers")
        row_size = shape[-1] // form.numbers * form.size
        if (n_bytes := math.prod(shape[:-1]) * row_size) > len(mapping) - start - offset:
            raise invalid(file, f"{brief(name)} reaches beyond the end of the file")
        if name in tensors or offset % 8 or n_bytes == 0:
            raise invalid(file, f"{brief(name)} is there twice, empty or not aligned")
        data = np.frombuffer(mapping, np.uint8, n_bytes, start + offset).reshape(*shape[:-1], row_size)
        tensors[name] = TensorEntry(form, shape, data)
    return GGUF(file, metadata, tensors, mapping)


# ---- Tensors ---------------------------------------------------------------------------------------------------------

# GGUF's name -> ours; in a layer, blk.7.NAME.weight -> model.layers.7.NAME.weight
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
         "output.weight": "lm_head.weight"}
LAYER_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
               "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
               "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
               "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
               "ffn_gate_inp": "mlp.gate"}
EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
NAMES_OF_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")


def map_gguf(file: Path) -> dict[str, AnyTensor]:
    """The tensors of a GGUF file, under the names of a safetensors checkpoint with one tensor per expert.

    Packed matrices become PackedTensors. Raises InputError for a damaged file.
    """
    gguf = read_gguf(file)
    tensors: dict[str, AnyTensor] = {}
    for name, entry in gguf.tensors.items():
        _, layer, tail = name.split(".", 2) if name.startswith("blk.") and name.count(".") > 2 else ("", "", "")
        key, _, part = tail.partition(".")
        if key in EXPERT_NAMES and len(entry.shape) == 3:
            for expert, data in enumerate(entry.data):
                ours = f"model.layers.{layer}.mlp.experts.{expert}.{EXPERT_NAMES[key]}.weight"
                tensors[ours] = tensor_of(entry._replace(shape=entry.shape[1:], data=data), gguf.mapping)
        else:
            known = key in LAYER_NAMES and part == "weight" or key in NAMES_OF_BIASES and part == "bias"
            ours = f"model.layers.{layer}.{LAYER_NAMES[key]}.{part}" if known else NAMES.get(name, "")
            if not ours:
                raise InputError(f"{file}: no Qwen3 has the tensor {brief(name)}")
            if ours in tensors:
                raise InputError(f"{file}: {brief(ours)} is there twice, also as {brief(name)}")
            tensors[ours] = tensor_of(entry, gguf.mapping)
    return tensors


def tensor_of(entry: TensorEntry, mapping: mmap.mmap) -> AnyTensor:
    """A tensor of the file, mapped or packed."""
    form, data = entry.form, entry.data
    if form.unpack is None:
        return Tensor(form.name, data.view(DTYPES[form.name]), mapping)
    unpack, blocks = form.unpack, data.reshape(-1, data.shape[-1] // form.size, form.size)

    def whole(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        numbers, scales, minima = unpack(blocks[start:stop])
        n = stop - start
        return numbers.reshape(n, -1), scales.reshape(n, -1), None if minima is None else minima.reshape(n, -1)

    def factored(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert form.factored is not None
        numbers, scales, factors = form.factored(blocks[start:stop])
        n = stop - start
        return numbers.reshape(n, -1), scales.reshape(len(scales), n, -1), factors.reshape(len(factors), n, -1)

    return PackedTensor("F32", (len(blocks), entry.shape[-1]), lambda start, stop: scaled(*whole(start, stop)), mapping,
                        form.bits, whole if form.numbers // form.groups % 32 == 0 else None,
                        factored=None if form.factored is None else factored)


# ---- Metadata, as the files of a model's folder ----------------------------------------------------------------------

def gguf_json(file: Path, name: str) -> dict[str, Any]:
    """The JSON object that a model's folder would have in the file `name`; empty if it would have none.

    Its values are not checked here, but by those who read them. Raises InputError for a damaged GGUF file.
    """
    makers: dict[str, Callable[[GGUF], dict[str, Any]]] = {
        "config.json": config_json, "generation_config.json": generation_json, "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": tokenizer_config_json}
    return makers[name](read_gguf(file)) if name in makers else {}


POOLING = {"none": 0, "last": 3}  # llama.cpp's numbers; an embedding is that of a text's last token; 4 is a reranker


def is_embedder(file: Path) -> bool:
    """True for an embedding model. Raises InputError for a damaged file."""
    metadata = read_gguf(file).metadata
    return bool(plain(metadata.get(f"{metadata.get('general.architecture')}.pooling_type")) == POOLING["last"])


MODEL_TYPES = {"qwen3moe": "qwen3_moe"}  # GGUF's name -> transformers', where they differ

# key of config.json -> that of the metadata, which stands behind "qwen3." or "qwen3moe."
SIZES = {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
         "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
         "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
         "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
         "rope_theta": "rope.freq_base"}
# The same for YaRN's keys, behind "rope.scaling.".
YARN = {"factor": "factor", "original_max_position_embeddings": "original_context_length", "attn_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
MOE_SIZES = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
             "moe_intermediate_size": "expert_feed_forward_length"}


def plain(value: Any) -> Any:
    """A value of the metadata as in JSON: an array as a list, a float32 as the shortest number that rounds to it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def config_json(gguf: GGUF) -> dict[str, Any]:
    metadata, kind = gguf.metadata, gguf.metadata.get("general.architecture")
    head_dim = plain(metadata.get(f"{kind}.attention.key_length"))
    only = {"split.count": (0, 1), f"{kind}.pooling_type": (None, *POOLING.values()),
            f"{kind}.attention.value_length": (head_dim,), f"{kind}.rope.dimension_count": (None, head_dim)}
    for key, values in only.items():
        if (value := plain(metadata.get(key, 0 if key == "split.count" else None))) not in values:
            raise InputError(f"{gguf.file}: {key} = {brief(value)} is not supported, only "
                             f"{' or '.join(str(each) for each in values if each is not None)} is")
    model_type, embedding = MODEL_TYPES.get(str(kind), kind), gguf.tensors.get("token_embd.weight")
    sizes = SIZES | (MOE_SIZES if model_type == "qwen3_moe" else {})
    raw = {key: plain(metadata.get(f"{kind}.{name}")) for key, name in sizes.items()}
    raw["rope_theta"] = raw["rope_theta"] or 10_000.0  # as in llama.cpp
    raw |= {"model_type": model_type, "vocab_size": embedding.shape[0] if embedding else None,
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "attention_bias": any(name.endswith(".bias") for name in gguf.tensors),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id")}
    if model_type == "qwen3_moe":  # llama.cpp always scales the chosen experts' weights
        n_layers = raw["num_hidden_layers"]
        dense = [i for i in range(n_layers if isinstance(n_layers, int) and n_layers <= len(gguf.tensors) else 0)
                 if f"blk.{i}.ffn_gate_inp.weight" not in gguf.tensors]
        raw |= {"norm_topk_prob": True, "mlp_only_layers": dense}
    return raw | {"is_causal": bool(plain(metadata.get(f"{kind}.attention.causal", True))),
                  "rope_scaling": rope_scaling(gguf, f"{kind}.rope.")}


def rope_scaling(gguf: GGUF, start: str) -> dict[str, Any] | None:
    """The object rope_scaling of config.json. `start`: of the keys' names.

    A factor without a type means linear. llama.cpp reads yarn_attn_factor, yarn_ext_factor and yarn_log_multiplier for
    other architectures only, so they change nothing here.
    """
    about = {key.removeprefix(f"{start}scaling."): plain(value) for key, value in gguf.metadata.items()}
    kind, factor = about.get("type", "linear"), about.get("factor", about.get(f"{start}scale_linear"))
    if kind == "yarn":
        return {"factor": factor or 1} | {key: about[name] for key, name in YARN.items() if about.get(name)} | \
            {"rope_type": kind}
    if about.get("attn_factor", 1) != 1:
        raise InputError(f"{gguf.file}: {start}scaling.attn_factor = {brief(about['attn_factor'])} is not supported "
                         "without yarn")
    return None if kind == "none" or factor in (None, 0, 1) else {"rope_type": kind, "factor": factor}


# Qwen's own values for Qwen3, because only new files hold some.
SAMPLING = {"temperature": ("temp", 0.6), "top_k": ("top_k", 20), "top_p": ("top_p", 0.95)}
END_TOKENS = ("<|im_end|>", "<|endoftext|>")  # either ends an answer, whichever one the file names


def generation_json(gguf: GGUF) -> dict[str, Any]:
    tokens, end = gguf.metadata.get("tokenizer.ggml.tokens"), gguf.metadata.get("tokenizer.ggml.eos_token_id")
    ends = [] if end is None else [end]
    if isinstance(tokens, list):
        ends += [tokens.index(text) for text in END_TOKENS if text in tokens]
    values = {key: plain(gguf.metadata.get(f"general.sampling.{name}", default))
              for key, (name, default) in SAMPLING.items()}
    return {"do_sample": True, "eos_token_id": ends} | values


# How Qwen's tokenizers cut a text before the merges: the values of their tokenizer.json.
PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
PRE_TOKENIZERS = ("qwen2", "deepseek-r1-qwen")  # names of this way in GGUF


def tokenizer_json(gguf: GGUF) -> dict[str, Any]:
    keys = ("model", "pre", "tokens", "token_type", "merges")
    about = {key: gguf.metadata.get(f"tokenizer.ggml.{key}") for key in keys}
    model, pre = plain(about["model"]), plain(about["pre"])
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise InputError(f"{gguf.file}: the tokenizer {brief(model)}, {brief(pre)} is not supported, only gpt2 with "
                         f"{' or '.join(PRE_TOKENIZERS)} is")
    tokens, kinds, merges = about["tokens"], about["token_type"], about["merges"]
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(kinds, np.ndarray) \
            or len(kinds) != len(tokens):
        raise InputError(f"{gguf.file}: tokenizer.ggml.tokens, token_type or merges are absent or don't fit each other")
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] == NORMAL}
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": bool(kinds[i] == CONTROL)}
             for i, token in enumerate(tokens) if kinds[i] in (CONTROL, USER_DEFINED)]
    pre = [{"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False},
           {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]
    end = gguf.metadata.get("tokenizer.ggml.eos_token_id")
    ending = None
    if plain(gguf.metadata.get("tokenizer.ggml.add_eos_token")) and isinstance(end, int) and 0 <= end < len(tokens):
        text = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": tokens[end], "type_id": 0}}]
        special = {tokens[end]: {"id": tokens[end], "ids": [end], "tokens": [tokens[end]]}}
        ending = {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": special}
    return {"version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"}, "post_processor": ending,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre},
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}


def tokenizer_config_json(gguf: GGUF) -> dict[str, Any]:
    metadata, config = gguf.metadata, dict[str, Any]()
    tokens = metadata.get("tokenizer.ggml.tokens")
    for name, key in (("eos_token", "eos"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    if (template := plain(metadata.get("tokenizer.chat_template"))) is not None:
        config["chat_template"] = template
    added = tokenizer_json(gguf)["added_tokens"]
    return config | {"added_tokens_decoder": {str(token["id"]): token for token in added}}
