"""Folders of packed weights that save_quantized writes: from each kind of model, and what is refused."""
import json
import shutil

import numpy as np
import pytest

import qwen3
from configs import BASE, CASES, FRANCE, HYBRIDS
from embedders import add_modules, make_classifier, make_embedder
from helpers import (REMOVED, assert_one_line, edit_json, logits_of, message_of, random_ids, read_safetensors,
                     with_tensors)
from make_random_model import make_random_model
from published import publish
from qwen3_embed import embed
from qwen3_lib.app.models import why_not
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.io.writing import write_safetensors
from test_adapter import make_adapter, matrices
from published import CASES as PUBLISHED
from published import WHOLE_GROUPS, awq, quantize_model
from test_qwen3_moe import MOE
from test_qwen3_numba import distance, tensor_of
import qwen3_numba as fast

pytestmark = pytest.mark.core


# ---- Saved and loaded ------------------------------------------------------------------------------------------------

def quantized(path):
    quantize_model(make_random_model(WHOLE_GROUPS, path, "float32"), awq, PUBLISHED["AWQ, groups of 32"][1])
    return path


def gguf_file(path):
    pytest.importorskip("gguf")
    from test_gguf_file import DEMO, write_gguf
    return write_gguf(DEMO, path.with_suffix(".gguf"))


def gguf_file_of_a_hybrid(path):
    pytest.importorskip("gguf")
    from test_gguf_file import NEWER, write_hybrid
    return write_hybrid(make_random_model(NEWER["dense"], path, "float32"), path.with_suffix(".gguf"))


def with_adapter(path):
    """A model, and an adapter beside it."""
    make_adapter(path.with_name("adapter"), matrices(BASE, head=False))
    return make_random_model(BASE, path, "float32")


SOURCES = {
    "odd sizes": lambda path: make_random_model(CASES["odd sizes"][0], path, "float32"),
    "two files, untied": lambda path: make_random_model(CASES["theta 1e7, untied"][0], path, "bfloat16", 2),
    "mixture": lambda path: make_random_model(MOE | {"mlp_only_layers": [1], "hidden_size": 80}, path),
    "hybrid": lambda path: publish(make_random_model(HYBRIDS["three value heads to a key head, six layers"], path)),
    "hybrid mixture": lambda path: publish(make_random_model(HYBRIDS["mixture"], path)),
    "AWQ": quantized, "GGUF": gguf_file, "GGUF of a hybrid": gguf_file_of_a_hybrid,
    "an adapter": with_adapter,
    "embedding model": lambda path: add_modules(make_embedder(path), pooling_mode_mean_tokens=True),
    "embedding model, untied": lambda path: add_modules(make_embedder(path, tie_word_embeddings=False)),
}


def results(model):
    """What a model gives: vectors, or logits."""
    if model.embeds:
        return embed(model, ["the bee", "finds home"])
    return logits_of(model, random_ids(70, 0, model.config.vocab_size))


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_saved_folder_alone_gives_the_bits_of_quantizing_while_loading(source, form, tmp_path):
    path = SOURCES[source](tmp_path / "model")
    adapter = tmp_path / "adapter" if (tmp_path / "adapter").is_dir() else None
    model = fast.load_model(path, form, adapter=adapter)
    expected = results(model)
    save_quantized(model, tmp_path / "saved", form)
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    for quantize in (None, form):
        saved = fast.load_model(tmp_path / "saved", quantize)
        np.testing.assert_array_equal(results(saved), expected)
    assert why_not(tmp_path / "saved") is None  # `--list` knows that it runs
    for name in ("config", "sampling", "eos_token_ids", "embeds"):
        assert getattr(saved, name) == getattr(model, name), name
    assert saved.tokenizer.encode(FRANCE) == model.tokenizer.encode(FRANCE)


@pytest.mark.parametrize("form, tied", [("int8", True), ("int4", False), ("int8", None)])
@pytest.mark.parametrize("head", ["another", "a copy"])
def test_a_head_in_the_file_is_quantized_and_saved(head, tied, form, tmp_path):
    """If it is another matrix than the embedding, it counts, whatever tie_word_embeddings says; a copy need not."""
    path = make_random_model(BASE | {"tie_word_embeddings": False}, tmp_path / "model", "float32")
    edit_json(path / "config.json", {"tie_word_embeddings": REMOVED if tied is None else tied})
    embedding = np.array(tensor_of(path, "model.embed_tokens.weight").data)
    if head == "a copy":
        with_tensors(path / "model.safetensors", {"lm_head.weight": embedding})
    expected, model = results(qwen3.load_model(path)), fast.load_model(path, form)
    assert distance(results(model), expected) < {"int8": 0.05, "int4": 0.5}[form]
    save_quantized(model, tmp_path / "saved", form)
    np.testing.assert_array_equal(results(fast.load_model(tmp_path / "saved")), results(model))
    names = stored_in(tmp_path / "saved" / f"model.{form}.safetensors")
    assert ("lm_head.weight" in names) == (head == "another" or tied is False)


def test_a_saved_model_names_the_cache_that_overflows(tmp_path):
    """A norm isn't quantized, so its numbers may be too large for a float16."""
    path, name = make_random_model(BASE, tmp_path / "model", "float32"), "model.layers.1.self_attn.k_norm.weight"
    with_tensors(path / "model.safetensors", {name: np.array(tensor_of(path, name).data) * np.float32(1e6)})
    save_quantized(fast.load_model(path, "int8"), tmp_path / "saved", "int8")
    model = fast.load_model(tmp_path / "saved", kv_dtype="f16")
    assert "--kv-dtype bf16" in message_of(lambda: list(qwen3.generate(model, [1, 2], 4, temperature=0)))


# ---- What is refused -------------------------------------------------------------------------------------------------

def stored_in(file) -> dict:
    return qwen3.map_safetensors(file, {"U8": np.dtype("u1"), "F32": np.dtype("<f4")})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return fast.load_model(make_random_model(BASE, tmp_path_factory.mktemp("model")), "int8")


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    """A saved int8 model."""
    folder = tmp_path_factory.mktemp("packed") / "saved"
    save_quantized(model, folder, "int8")
    return folder


def test_a_folder_that_is_taken_for_something_else(model, packed, tmp_path):
    adapter, labels = tmp_path / "adapter", fast.load_model(make_classifier(tmp_path / "labels", 3), "int8")
    make_adapter(adapter, matrices(BASE, head=False))
    assert json.loads((packed / "config.json").read_text()) == json.loads((model.path / "config.json").read_text())
    for words, refused in {
            "only the fast engine loads it (--fast": lambda: qwen3.load_model(packed),
            "this checkpoint is int8": lambda: fast.load_model(packed, "int4"),
            "packed weights take no adapter": lambda: fast.load_model(packed, adapter=adapter),
            "exists already": lambda: save_quantized(model, packed, "int8"),
            "not loaded as int4": lambda: save_quantized(model, tmp_path / "no", "int4"),
            "score.weight would be lost": lambda: save_quantized(labels, tmp_path / "no", "int8")}.items():
        assert_one_line(message_of(refused), words)


@pytest.mark.parametrize("changes", [{"vocab_size": 319}, {"vocab_size": 289}, {"intermediate_size": 63},
                                     {"num_hidden_layers": 2}, {"tie_word_embeddings": False}])
def test_a_config_of_other_sizes(changes, packed, tmp_path):
    """Blocks of 319 and 320 rows are as large: the sizes stand in the file."""
    folder = shutil.copytree(packed, tmp_path / "saved")
    edit_json(folder / "config.json", changes)
    assert "don't fit config.json" in message_of(fast.load_model, folder) and "don't fit config.json" in why_not(folder)


@pytest.mark.parametrize("name, dtype", [("model.layers.0.self_attn.k_norm.weight", np.float16),
                                         ("model.layers.0.mlp.up_proj.weight", np.float32)])
def test_other_dtypes_in_a_saved_model(name, dtype, packed, tmp_path):
    """A tensor of the right shape whose numbers are of another kind: norms are float32, packed matrices bytes."""
    folder = shutil.copytree(packed, tmp_path / "saved")
    file = folder / "model.int8.safetensors"
    tensors = {key: np.array(tensor.data) for key, tensor in stored_in(file).items()}
    write_safetensors(file, tensors, read_safetensors(file)[0]["__metadata__"])
    assert fast.load_model(folder)  # as it was
    write_safetensors(file, tensors | {name: tensors[name].astype(dtype)}, read_safetensors(file)[0]["__metadata__"])
    assert "don't fit config.json" in message_of(fast.load_model, folder)


def test_a_damaged_saved_model(packed, tmp_path):
    file = shutil.copytree(packed, tmp_path / "saved") / "model.int8.safetensors"
    whole, (header, data) = file.read_bytes(), read_safetensors(file)
    for n in (100, -1):
        file.write_bytes(whole[:n])
        assert "cannot be read" in message_of(fast.load_model, tmp_path / "saved")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        at = len(whole) - len(data) + sum(header[name]["data_offsets"]) // 2
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        assert f"the checksum of {name} differs" in message_of(fast.load_model, tmp_path / "saved")


@pytest.mark.parametrize("key, value, words", [
    ("sizes", "{}", "don't fit config.json"), ("sizes", "[1]", "damaged"), ("sizes", "{", "not valid JSON"),
    ("sizes", None, "don't fit config.json"), ("crc32", "[]", "damaged"),
    ("crc32", '{"a": "b"}', "checksum"), ("version", "3", "another version"), ("format", "int4", "another version")])
def test_notes_in_a_saved_model_that_are_wrong(key, value, words, packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "saved")
    file = folder / "model.int8.safetensors"
    tensors = {name: np.array(tensor.data) for name, tensor in stored_in(file).items()}
    metadata = read_safetensors(file)[0]["__metadata__"]
    write_safetensors(file, tensors, {name: text for name, text in metadata.items() if name != "crc32"})
    assert fast.load_model(folder)  # written by an earlier version
    metadata |= {key: value}
    write_safetensors(file, tensors, {name: text for name, text in metadata.items() if text is not None})
    assert words in message_of(fast.load_model, folder)
