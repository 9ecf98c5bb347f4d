"""Models that aren't a plain folder: names on the hub, GGUF files, published quantizations, scaled RoPE, adapters."""
import functools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

import qwen3
import qwen3_5
import qwen3_asr
import qwen3_tts
import qwen4_exp
from qwen3 import (DTYPES, QWEN3, QWEN3_VL, Config, Engine, InputError, Model, ModelType, Source, Tensor, fitting,
                   json_in, kind_of, language_of, map_safetensors, renamed, rope_of, shards_of)
from qwen3_lib.io.adapter import with_adapter
from qwen3_lib.io.cores import ThreadpoolController, threads_for
from qwen3_lib.io.errors import brief
from qwen3_lib.io.formats import Settings, check_settings, unpacked
from qwen3_lib.io.gguf_file import gguf_json, is_embedder, map_gguf
from qwen3_lib.io.gguf_head import is_gguf
from qwen3_lib.io.hub import MTP_FILE, resolve_model
from qwen3_lib.io.mixtures import moe_config, split_experts
from qwen3_lib.io.mlx import from_mlx
from qwen3_lib.io.mmproj import map_tower, tower_file, tower_json
from qwen3_lib.io.packed import TOWER_FILE, quantized_file, refuse_saved, saved_tensors, saved_tower
from qwen3_lib.io.qwen3_next import NEXT
from qwen3_lib.io.rope import with_scaled_rope
from qwen3_lib.io.tensors import EMBEDDING, PACKED_DTYPES, embeds
from tokenizer_utils import Tokenizer, library_errors, load_tokenizer, make_tokenizer


def open_model(name: str, offline: bool = False, adapter: str | Path | list[str] | None = None) -> Source:
    """The model of this name. Raises InputError where there is none, and for a folder without a model."""
    source = read(resolve_model(name, offline))
    one, *more = adapter if isinstance(adapter, list) else [adapter]  # --adapter may be repeated
    if more:
        raise InputError(f"{one}, {', '.join(map(str, more))}: only one adapter can be added; merge them with peft "
                         "first")
    return source if one is None else with_adapter(source, one)


# The rows of qwen3.py and qwen3_5.py, with what embedders and classifiers may be (see qwen3_embed.py), and mixtures.
ANY_DENSE = replace(QWEN3, architectures=(*QWEN3.architectures, "Qwen3Model", "Qwen3MoeForCausalLM", "Qwen3MoeModel",
                                      "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"))
MOE = replace(ANY_DENSE, config=moe_config, defaults={
    key: value for key, value in QWEN3.defaults.items() if key != "head_dim"} | {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
    "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
VL_MOE = replace(QWEN3_VL, config=functools.partial(moe_config, normalized=True),
                 architectures=("Qwen3VLMoeForConditionalGeneration",), defaults=MOE.defaults | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
    "rope_theta": 5e5, "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408})


@functools.cache
def sharing(engine: Engine) -> Engine:
    """The engine; NumPy's with BLAS' threads for each pass: see threads_for."""
    def shared(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def one_pass(model: Model, *args: Any, **options: Any) -> Any:
            with threads_for(model.config.hidden_size):
                return function(model, *args, **options)

        return one_pass

    # glibc keeps freed blocks up to the size of the largest freed so far. With them, prefill is 1.12 times as fast.
    np.empty(2**25 - 2**16, np.uint8)
    if ThreadpoolController is None:
        return engine
    return replace(engine, run=shared(engine.run), guess=engine.guess and shared(engine.guess))


MODEL_TYPES = {name: replace(kind, engine=sharing(kind.engine)) for name, kind in (
    qwen3.MODEL_TYPES | qwen3_5.MODEL_TYPES | qwen3_asr.MODEL_TYPES | qwen3_tts.MODEL_TYPES | qwen4_exp.MODEL_TYPES | {
        "qwen3": ANY_DENSE, "qwen3_moe": MOE, "qwen3_vl_moe": VL_MOE, "qwen3_next": NEXT}).items()}

GENERATION = "generation_config.json"
QUANTIZATION = ("quantization_config", "compression_config", "quantization")  # the last key is MLX's
# Keys of generation_config.json that change which tokens are drawn; only these values are accepted.
ONLY_GENERATION = {"num_beams": 1, "penalty_alpha": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 0,
                   "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0,
                   "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1, "suppress_tokens": [],
                   "begin_suppress_tokens": [], "bad_words_ids": [], "sequence_bias": [], "forced_bos_token_id": [],
                   "forced_eos_token_id": [], "exponential_decay_length_penalty": [], "watermarking_config": {},
                   "stop_strings": [], "token_healing": False, "dola_layers": []}


# The key in tokenizer.json, with its value if that is harmless; "normalizer" may also be a token, with its id.
NORMALIZER = re.compile(rb'"normalizer"\s*:\s*(null|\d+|{\s*"type"\s*:\s*"NFC"\s*}|)')


class Described(NamedTuple):
    """What config.json says: the row of its type, Source.language with plain RoPE, RoPE's own parameters, and the
    method and schemes of a published quantization."""
    kind: ModelType
    language: dict[str, Any]
    rope: dict[str, Any]
    method: tuple[str, list[Settings]] | None
    file: Path

    def config(self, names: Iterable[str] = ()) -> Config:
        """Of a model with tensors of these names. Raises InputError for what is malformed or not computed here."""
        config: Config = self.kind.config(self.language, self.file, names)
        return with_scaled_rope(config, self.rope, self.file)


def description_of(about: dict[str, Any], file: Path) -> Described:
    """Of the object in config.json. Raises InputError for what isn't supported."""
    if "eagle" in str(about.get("architectures")).lower():
        raise InputError(f"{file}: an EAGLE head is not supported; a small model or --draft int4 can guess, too")
    method, kind = quantization(about, file), kind_of(about, file, MODEL_TYPES)
    language = language_of(about, file, kind)
    rope = rope_of(language)
    return Described(kind, language | {"rope_scaling": rope | {"rope_type": "default"}}, rope, method, file)


def read(path: Path) -> Source:
    """The Source of a folder, of a folder of our own packed weights, or of a GGUF file.

    Weights may be quantized in a published format, and the context stretched by YaRN. Raises InputError for what is
    missing, damaged or not computed here.
    """
    file, gguf, packed = path / "config.json", is_gguf(path), quantized_file(path)
    tower_path = tower_file(path) if gguf else None
    about = gguf_json(path, file.name) | (tower_json(tower_path) if tower_path else {}) if gguf else json_in(file)
    found, stored = description_of(about, file), dict[str, Any]()
    kind, method = found.kind, None if packed else found.method
    try:
        stored, saved = saved_tensors(*packed) if packed else (map_gguf(path) if gguf else published(path), None)
    except InputError:
        found.config()  # what can't be computed is told before a missing file is
        raise
    stored = {name.replace("_orig_mod.", ""): tensor  # by torch.compile
              for name, tensor in stored.items() if method or packed or tensor.dtype in DTYPES}
    stored = unpacked(stored, *method, path) if method else stored
    tensors: dict[str, Any] = renamed(split_experts(stored, found.language["hidden_size"]), kind, found.language)
    bare = is_embedder(path) if gguf else not any("model." in name for name in tensors)
    embedder = bare or embeds(about, path)
    config = found.config(tensors)
    shapes = kind.shapes(config)
    if EMBEDDING not in tensors:  # an embedding model's own file
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    tensors = tensors if packed else kind.cut(tensors, config, path)
    heads = {name: tensor for name, tensor in tensors.items() if name not in shapes}
    tower: dict[str, Any] = {name: tensor for name, tensor in stored.items() if name.startswith(kind.tower)}
    if saved is None:
        tensors = fitting(tensors, shapes, config.tie_word_embeddings or embedder, path)
        tower = map_tower(tower_path) if tower_path else tower
    else:
        kind = replace(kind, engine=replace(kind.engine, load_weights=refuse_saved))
        heads, tower = {}, saved_tower(path)
    generation = gguf_json(path, GENERATION) if gguf else json_in(path / GENERATION)
    return Source(path, kind, about, found.language, config, tensors, heads, tower,
                  generation_in(generation, path / GENERATION),
                  functools.partial(gguf_tokenizer if gguf else folder_tokenizer, path), embedder, bare, saved)


def published(folder: Path) -> dict[str, Tensor]:
    """The tensors in a folder's safetensors files; a single file may have any name."""
    found = [file for file in folder.glob("*.safetensors") if file.name not in (TOWER_FILE, MTP_FILE)]
    files = found if len(found) == 1 and not json_in(folder / "model.safetensors.index.json") else shards_of(folder)
    if (head := folder / MTP_FILE).is_file() and head not in files:
        files = [*files, head]
    return from_mlx({name: each for file in files for name, each in map_safetensors(file, PACKED_DTYPES).items()})


def generation_in(raw: dict[str, Any], file: Path) -> dict[str, Any]:
    """The object in generation_config.json. Raises InputError for unknown methods."""
    for key, value in ONLY_GENERATION.items():
        if raw.get(key) not in (None, value):
            raise InputError(f"{file}: {key} = {brief(repr(raw[key]))} is not supported, only {value!r} is")
    top_k = raw.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        top_k = int(top_k)
    return raw | {"top_k": 0 if top_k == -1 else top_k}  # -1: off in other engines


def quantization(about: dict[str, Any], file: Path) -> tuple[str, list[Settings]] | None:
    """The method of a published quantization and its schemes, or None. Raises InputError for an unknown one."""
    places = [place for place in (about, about.get("text_config")) if isinstance(place, dict)]
    found = next(filter(None, (place.get(key) for place in places for key in QUANTIZATION)), None)
    return None if found is None else check_settings(found, file)


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Raises InputError for a normalizer but NFC. The library applies it to tokens while it reads the file, and one
    that makes texts longer takes any memory."""
    file = folder / "tokenizer.json"
    data = file.read_bytes() if file.is_file() else b""
    if rb"\u00" in data or not all(NORMALIZER.findall(data)):  # else it needn't be parsed, which takes 0.2 s
        if json_in(file).get("normalizer") not in (None, {"type": "NFC"}):
            raise InputError(f"{file}: the normalizer must be NFC, or null")
    return load_tokenizer(folder)


def gguf_tokenizer(file: Path) -> Tokenizer:
    with library_errors(f"cannot read the tokenizer of {file}"):
        backend = tokenizers.Tokenizer.from_str(json.dumps(gguf_json(file, "tokenizer.json")))
    return make_tokenizer(backend, gguf_json(file, "tokenizer_config.json"), file)
