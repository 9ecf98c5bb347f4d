"""Models that aren't a plain folder: names on the hub, GGUF files, published quantizations, scaled RoPE, adapters."""
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

import qwen3
import qwen3_5
import qwen3_asr
from qwen3 import (DTYPES, QWEN3, QWEN3_VL, Config, Folder, InputError, Tensor, checked_whole, config_of, fitting,
                   rope_of)
from qwen3_lib.io.adapter import Adapted
from qwen3_lib.io.cores import sharing
from qwen3_lib.io.errors import brief
from qwen3_lib.io.formats import Settings, check_settings, unpacked
from qwen3_lib.io.gguf_file import gguf_json, is_embedder, is_gguf, map_gguf
from qwen3_lib.io.hub import resolve_model
from qwen3_lib.io.mmproj import map_tower, tower_file, tower_json
from qwen3_lib.io.packed import TOWER_FILE, Quantized, quantized_file
from qwen3_lib.io.rope import with_scaled_rope
from qwen3_lib.io.tensors import EMBEDDING, PACKED_DTYPES, AnyTensor, embeds
from tokenizer_utils import Tokenizer, library_errors, make_tokenizer


def open_model(name: str, offline: bool = False, adapter: str | Path | list[str] | None = None) -> Folder:
    """The model of this name. Raises InputError where there is none, and for a folder without a model."""
    path = resolve_model(name, offline)
    folder: Any = source_of(path)
    if (quantized := quantized_file(path)) is not None:
        if adapter is not None:
            raise InputError(f"{path}: packed weights take no adapter; quantize the original with --adapter")
        folder = Quantized(folder, *quantized)
    one, *more = adapter if isinstance(adapter, list) else [adapter]  # --adapter may be repeated
    if more:
        raise InputError(f"{one}, {', '.join(map(str, more))}: only one adapter can be added; merge them with peft first")
    return folder if one is None else Adapted(folder, one)  # type: ignore[return-value]


def source_of(path: Path) -> Folder:
    """The model in a folder or GGUF file."""
    return GGUFFile(path) if is_gguf(path) else Checkpoint(path)


def moe_config(folder: Folder) -> Config:
    """The config of a mixture of experts. Raises InputError for sizes that can't be."""
    found, file = folder.language(), folder.path / "config.json"
    if "head_dim" not in found:
        heads = checked_whole(f"{file}: num_attention_heads", found["num_attention_heads"], 1)
        found["head_dim"] = checked_whole(f"{file}: hidden_size", found["hidden_size"], 1) // heads
    config, found = config_of(found, file), {"num_experts": found["num_local_experts"]} | found
    sizes: dict[str, Any] = {key: checked_whole(f"{file}: {key}", found[key], 1)
                             for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    step = checked_whole(f"{file}: decoder_sparse_step", found.get("decoder_sparse_step", 1), 1)
    dense = found.get("mlp_only_layers") or []
    if not sizes["num_experts_per_tok"] <= sizes["num_experts"] <= 10_000 or not isinstance(dense, list):
        raise InputError(f"{file}: num_experts_per_tok = {sizes['num_experts_per_tok']} of num_experts = "
                         f"{sizes['num_experts']} and mlp_only_layers = {brief(dense)} can't be")
    sparse = tuple(i for i in range(config.num_hidden_layers) if (i + 1) % step == 0 and i not in dense)
    always = bool(folder.kind.text)  # a Qwen3-VL reads no norm_topk_prob
    return replace(config, **sizes, sparse_layers=sparse, norm_topk_prob=always or bool(found.get("norm_topk_prob")))


# The rows of qwen3.py and qwen3_5.py, with what embedders and classifiers may be (see qwen3_embed.py), and mixtures.
ANY_DENSE = replace(QWEN3, architectures=(*QWEN3.architectures, "Qwen3Model", "Qwen3MoeForCausalLM", "Qwen3MoeModel",
                                      "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"))
MOE = replace(ANY_DENSE, config=moe_config, defaults={
    key: value for key, value in QWEN3.defaults.items() if key != "head_dim"} | {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
    "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
VL_MOE = replace(QWEN3_VL, config=moe_config, architectures=("Qwen3VLMoeForConditionalGeneration",),
                 defaults=MOE.defaults | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
    "rope_theta": 5e5, "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408})
MODEL_TYPES = {name: replace(kind, engine=sharing(kind.engine)) for name, kind in (
    qwen3.MODEL_TYPES | qwen3_5.MODEL_TYPES | qwen3_asr.MODEL_TYPES | {
        "qwen3": ANY_DENSE, "qwen3_moe": MOE, "qwen3_vl_moe": VL_MOE}).items()}

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


class Checkpoint(Folder):
    """A folder of any Qwen3: its weights may be quantized in a published format, and its context stretched by YaRN."""
    dtypes = PACKED_DTYPES

    def __init__(self, path: Path):
        super().__init__(path, MODEL_TYPES)

    def config(self) -> Config:
        if "eagle" in str(self.json("config.json").get("architectures")).lower():
            raise InputError(f"{self.path / 'config.json'}: an EAGLE head is not supported; a small model or "
                             "--draft int4 can guess, too")
        self.quantization()
        return with_scaled_rope(super().config(), rope_of(super().language()), self.path / "config.json")

    def language(self) -> dict[str, Any]:
        """Folder.language, with plain RoPE: `config` scales it."""
        found = super().language()
        return found | {"rope_scaling": rope_of(found) | {"rope_type": "default"}}

    def generation(self) -> dict[str, Any]:
        """generation_config.json. Raises InputError for unknown methods."""
        raw = self.json("generation_config.json")
        for key, value in ONLY_GENERATION.items():
            if raw.get(key) not in (None, value):
                raise InputError(f"{self.path / 'generation_config.json'}: {key} = {brief(repr(raw[key]))} is not "
                                 f"supported, only {value!r} is")
        top_k = raw.get("top_k")
        if isinstance(top_k, float) and top_k.is_integer():
            top_k = int(top_k)
        return raw | {"top_k": 0 if top_k == -1 else top_k}  # -1: off in other engines

    def shards(self) -> set[str]:
        """The names of its safetensors files; a single one may have any name."""
        found = [file.name for file in self.path.glob("*.safetensors") if file.name != TOWER_FILE]
        return {*found} if len(found) == 1 and not self.json("model.safetensors.index.json") else super().shards()

    def tensors(self, config: Config) -> dict[str, Any]:
        """Folder.tensors; an embedding model's names lack `model.`, and it needs no head."""
        stored = self.stored()
        if EMBEDDING not in stored:
            stored = {f"model.{name}": tensor for name, tensor in stored.items()}
        return fitting(stored, self.kind.shapes(config), config.tie_word_embeddings or self.embeds(), self.path)

    def tokenizer(self) -> Tokenizer:
        """Raises InputError for a normalizer but NFC. The library applies it to tokens while it reads the file, and one
        that makes texts longer takes any memory."""
        file = self.path / "tokenizer.json"
        data = file.read_bytes() if file.is_file() else b""
        if rb"\u00" in data or not all(NORMALIZER.findall(data)):  # else it needn't be parsed, which takes 0.2 s
            if self.json("tokenizer.json").get("normalizer") not in (None, {"type": "NFC"}):
                raise InputError(f"{file}: the normalizer must be NFC, or null")
        return super().tokenizer()

    def embeds(self) -> bool:
        return embeds(self, self.mapped())

    def stored(self) -> dict[str, Any]:
        method = self.quantization()
        stored = {name.replace("_orig_mod.", ""): tensor  # by torch.compile
                  for name, tensor in self.mapped().items() if method or tensor.dtype in DTYPES}
        return self.renamed(split_experts(unpacked(stored, *method, self.path) if method else stored,
                                          self.language()["hidden_size"]))

    def quantization(self) -> tuple[str, list[Settings]] | None:
        """The method of a published quantization and its schemes, or None. Raises InputError for an unknown one."""
        raw = self.json("config.json")
        places = [place for place in (raw, raw.get("text_config")) if isinstance(place, dict)]
        about = next(filter(None, (place.get(key) for place in places for key in QUANTIZATION)), None)
        return None if about is None else check_settings(about, self.path / "config.json")


def split_experts(stored: Mapping[str, AnyTensor], hidden_size: Any = None) -> dict[str, AnyTensor]:
    """Replaces the fused expert tensors of transformers 5 by views of them, one per expert and projection.

    mlp.experts.gate_up_proj [num_experts, 2 * moe_intermediate_size, hidden_size], mlp.experts.down_proj
    [num_experts, hidden_size, moe_intermediate_size]. Qwen3-VL has them transposed, which the hidden_size tells.
    """
    tensors = dict(stored)
    for name, tensor in stored.items():
        start, _, part = name.rpartition(".")
        if start.endswith(".mlp.experts") and isinstance(tensor, Tensor) and len(tensor.shape) == 3:
            del tensors[name]
            turned = hidden_size is not None and tensor.shape[2 if part == "gate_up_proj" else 1] != hidden_size
            for expert, data in enumerate(tensor.data.swapaxes(1, 2) if turned else tensor.data):
                half = len(data) // 2
                rows = {"gate_proj": data[:half], "up_proj": data[half:]} if part == "gate_up_proj" else {part: data}
                tensors |= {f"{start}.{expert}.{key}.weight": tensor._replace(data=view) for key, view in rows.items()}
    return tensors


class GGUFFile(Checkpoint):
    """A GGUF file: its metadata are what the JSON files of a folder say."""

    def json(self, name: str) -> dict[str, Any]:
        def read(_: Path) -> dict[str, Any]:
            raw = gguf_json(self.path, name)
            tower = tower_file(self.path) if name == "config.json" else None
            return raw if tower is None else raw | tower_json(tower)

        return self.once(name, read)  # type: ignore[no-any-return]

    def tower(self) -> dict[str, Any]:
        file = tower_file(self.path)
        return {} if file is None else map_tower(file)

    def mapped(self) -> dict[str, Any]:
        stored = map_gguf(self.path)
        if is_embedder(self.path):  # as such a model's own file names its tensors
            stored = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
        return stored

    def tokenizer(self) -> Tokenizer:
        with library_errors(f"cannot read the tokenizer of {self.path}"):
            backend = tokenizers.Tokenizer.from_str(json.dumps(self.json("tokenizer.json")))
        return make_tokenizer(backend, self.json("tokenizer_config.json"), self.path)
