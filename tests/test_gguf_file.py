"""qwen3_lib/io/gguf_file.py: files written by the gguf package, the bundled model among them, and damaged ones."""
import dataclasses
import json
import mmap
import random
import re
import struct
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import (BASE, FRANCE, HYBRID, HYBRID_MOE, PARIS, QWEN3_5, ROOT, SHARED, YARN, needs_official_files)
from helpers import assert_one_line, logits_of, memory_while_loading, message_of, random_ids, run_main, stored_in
from make_random_model import make_random_model
from qwen3_lib.generation.processors import log_softmax
from qwen3_lib.io import facts
from qwen3_lib.io import gguf_file, gguf_head
from qwen3_lib.io.gguf_formats import GGUF_FORMATS
from qwen3 import rope_of, to_float32
from qwen3_lib.io.models import open_model
from qwen3_lib.io.tensors import PackedTensor, rows_of
from qwen3_lib.kernels import layout
from qwen3_lib.kernels.layout import F16, F32, INT8, Q4_0, Q4_1, Q5_1
from test_qwen3_moe import MOE
from tokenizer_utils import load_tokenizer

gguf = pytest.importorskip("gguf")

DEMO = ROOT / "demo"
N_TOKENS = 4080  # of tokenizer_keys(DEMO)
KEYS = {"hidden_size": gguf.Keys.LLM.EMBEDDING_LENGTH, "intermediate_size": gguf.Keys.LLM.FEED_FORWARD_LENGTH,
        "num_hidden_layers": gguf.Keys.LLM.BLOCK_COUNT, "num_attention_heads": gguf.Keys.Attention.HEAD_COUNT,
        "num_key_value_heads": gguf.Keys.Attention.HEAD_COUNT_KV, "head_dim": gguf.Keys.Attention.KEY_LENGTH,
        "max_position_embeddings": gguf.Keys.LLM.CONTEXT_LENGTH, "rms_norm_eps": gguf.Keys.Attention.LAYERNORM_RMS_EPS,
        "rope_theta": gguf.Keys.Rope.FREQ_BASE, "num_experts": gguf.Keys.LLM.EXPERT_COUNT,
        "num_experts_per_tok": gguf.Keys.LLM.EXPERT_USED_COUNT,
        "moe_intermediate_size": gguf.Keys.LLM.EXPERT_FEED_FORWARD_LENGTH}


ARCHITECTURES = gguf.MODEL_ARCH.QWEN3, gguf.MODEL_ARCH.QWEN3MOE  # whose dense layers are named as in the first one
NAME_MAPS = [gguf.get_tensor_name_map(arch, 99) for arch in ARCHITECTURES]


def gguf_name(name: str) -> str:
    """The name that the gguf package gives to a tensor of ours."""
    stem, _, part = name.rpartition(".")
    return next(filter(None, (names.get_name(stem) for names in NAME_MAPS))) + f".{part}"


def write_gguf(path, out, form="F32", tokenizer=None, each=0, **changes):
    """The checkpoint in the folder `path` as a GGUF file, as llama.cpp's converter writes it -> the file.

    Matrices are quantized by the gguf package; `changes` replace metadata, None removes a key. each: tensors of a part.
    """
    source = open_model(str(path))
    raw = source.language | {key: value for key, value in source.about.items() if key.startswith("rope_")}
    rope, config = rope_of(raw), vars(source.config) | {"max_position_embeddings": raw["max_position_embeddings"]}
    kind = gguf.GGMLQuantizationType[form]
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[bool(config["num_experts"])]]
    writer, keys = gguf.GGUFWriter(out, arch, split_max_tensors=each), {"general.name": "test"}
    keys |= {name.format(arch=arch): config[key] for key, name in KEYS.items() if config[key]}
    keys |= {f"{arch}.attention.value_length": config["head_dim"]}
    if rope["rope_type"] == "yarn":
        keys |= {f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.factor": rope["factor"],
                 f"{arch}.rope.scaling.original_context_length": int(rope["original_max_position_embeddings"])}
    keys |= tokenizer_keys(tokenizer or path)
    stored, written = stored_in(path), set()
    for name, tensor in stored.items():
        if name.startswith("model.visual."):  # see test_mmproj.py
            continue
        if name.startswith("model.layers.") and ".experts." in name:
            start, _, _, part, _ = name.rsplit(".", 4)
            experts = [stored[f"{start}.experts.{e}.{part}.weight"] for e in range(config["num_experts"])]
            values = np.stack([to_float32(expert) for expert in experts])
            theirs = gguf_name(f"{start}.experts.{part}.weight")
        else:
            theirs, values = gguf_name(name), to_float32(tensor)
        if theirs not in written:
            written.add(theirs)
            small = values.ndim == 1 or theirs.endswith("gate_inp.weight")
            target = gguf.GGMLQuantizationType.F32 if small else kind
            writer.add_tensor(theirs, gguf.quantize(values, target), raw_dtype=target)
    return finished(writer, keys | changes, out)


def finished(writer, keys, out):
    """Writes the file with this metadata -> the file, or the first part."""
    add = {float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array,
           str: writer.add_string}
    for key, value in keys.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(out)[0]


def tokenizer_keys(folder) -> dict:
    """The metadata of a folder's tokenizer: every id up to the last row of the embedding has a token and a type."""
    raw = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    added = {token["id"]: token for token in raw["added_tokens"]}
    added |= {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    tokens = {i: token for token, i in raw["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    n_tokens = max(tokens) + 5  # the rows behind the last token
    kinds = [5 if i not in tokens else 1 if i not in added else 3 if added[i]["special"] else 4
             for i in range(n_tokens)]
    template = folder / "chat_template.jinja"
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    ids = {token: i for i, token in tokens.items()}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(n_tokens)],
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
            "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
            "tokenizer.chat_template": template.read_text() if template.exists() else config.get("chat_template")}


# ---- Sound files -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def demo_gguf(tmp_path_factory):
    return write_gguf(DEMO, tmp_path_factory.mktemp("gguf") / "demo.gguf")


def test_the_bundled_model_is_the_same(demo_gguf, demo, capfd, tmp_path):
    model = qwen3.load_model(demo_gguf)
    assert dataclasses.replace(model.config, eos_token_ids=()) == dataclasses.replace(demo.config, eos_token_ids=())
    assert {*demo.eos_token_ids} <= {*model.eos_token_ids}
    assert model.sampling == qwen3.Sampling(0.6, 20, 0.95)
    ids = demo.tokenizer.encode(FRANCE)
    assert np.array_equal(logits_of(demo_gguf, ids), logits_of(demo, ids))
    assert model.path == demo_gguf and model.source.about["model_type"] == "qwen3"
    assert stored_in(demo_gguf).keys() == stored_in(DEMO).keys()
    assert facts.banner(model).startswith("qwen3 · demo.gguf · 6.95 M parameters")
    options = ["--model", demo_gguf, "--no-think", "--greedy", "--keep-on-disk", tmp_path / "kept", FRANCE]
    assert [run_main(capfd, *options) for _ in range(2)] == [(0, PARIS, "")] * 2


@pytest.mark.parametrize("text", ["Hello, world!", "法国的首都是哪里？", "<think>\n</think> <tool_call> <|im_end|>",
                                  " \n\t x 123", "I'm e\u0301 \u00e9 \U0001f600", "[PAD3060]"])
def test_the_bundled_tokenizer_is_the_same(demo_gguf, demo, text):
    tokenizer = open_model(str(demo_gguf)).tokenizer()
    ids = demo.tokenizer.encode(text)
    assert tokenizer.encode(text) == ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == demo.tokenizer.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": text}]
    assert tokenizer.apply_chat_template(messages) == demo.tokenizer.apply_chat_template(messages)


@needs_official_files
@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_base"])
def test_the_official_tokenizer_is_the_same(tmp_path, name):
    path = make_random_model(BASE, tmp_path, "float32")
    tokenizer = open_model(str(write_gguf(path, tmp_path / "x.gguf", tokenizer=SHARED / name))).tokenizer()
    cases = [json.loads(line) for line in (SHARED / "golden/tokenize.jsonl").read_text().splitlines()]
    assert len(cases) > 50
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"]


def test_it_is_listed(demo_gguf, capfd):
    """By itself, or in a folder of such files, with its size."""
    for place in (demo_gguf, demo_gguf.parent):
        about = json.loads(run_main(capfd, "--list", "--json", "--model", place)[1].splitlines()[-1])
        assert (about["path"], about["runs"], about["bytes"]) == (str(demo_gguf), True, demo_gguf.stat().st_size)


def test_sampling_and_the_end_token_of_the_file(tmp_path):
    path = make_random_model(BASE, tmp_path, "float32")
    model = qwen3.load_model(write_gguf(path, tmp_path / "x.gguf", **{
        "general.sampling.temp": 0.7, "general.sampling.top_k": 5, "tokenizer.ggml.eos_token_id": 5}))
    assert model.sampling == qwen3.Sampling(0.7, 5, 0.95) and 5 in model.eos_token_ids


def assert_kept(file, form=None) -> None:
    """The fast engine keeps a file's matrices, or those of one of its formats, number by number."""
    weights, stored = fast.load_model(file, tokenizer=False).weights, stored_in(file)
    entries = gguf_file.read_gguf(file).tensors
    for name, weight in ({"lm_head.weight": weights.head} | weights.matrices).items():
        if form is None or entries[gguf_name(name)].form.name == form:
            assert np.array_equal(fast.matrix_rows(weight, range(weight[0].rows)), to_float32(stored[name])), name


@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_formats_written_by_the_package(tmp_path, form):
    """The numbers are those of the package's own dequantization, and both engines compute with them."""
    path = make_random_model(BASE | {"hidden_size": 96, "tie_word_embeddings": False}, tmp_path / "model", "float32")
    file = write_gguf(path, tmp_path / "x.gguf", form)
    stored, original = stored_in(file), stored_in(path)
    assert stored.keys() == original.keys()
    for name, tensor in original.items():
        target = gguf.GGMLQuantizationType[form if tensor.data.ndim == 2 else "F32"]
        ours = to_float32(stored[name])
        assert ours.dtype == np.float32
        assert np.array_equal(ours, gguf.dequantize(gguf.quantize(tensor.data, target), target))
    kept = {"F32": F32, "F16": F16, "BF16": layout.ROUNDED, "Q8_0": INT8, "Q4_0": Q4_0, "Q4_1": Q4_1}.get(form, Q5_1)
    assert {weight[0].form for weight in fast.load_model(file).weights.matrices.values()} == {kept}
    assert_kept(file)
    ids, plain = random_ids(9), logits_of(path, random_ids(9))
    exact = logits_of(file, ids)
    assert np.sqrt(((exact - plain)**2).mean()) / plain.std() < {"F": 0.01, "B": 0.05}.get(form[0], 1)
    logits = logits_of(fast.load_model(file, kv_dtype="f32", activations="f32"), ids)
    assert np.abs(logits - exact).max() < (1e-4 if form[-1] in "26" else 0.5) * exact.std()


def test_a_format_without_a_kernel_is_read_by_the_package(tmp_path, monkeypatch):
    """The fast engine keeps the nearest int8. Without the package, one line says what to install."""
    path = make_random_model(BASE | {"hidden_size": 96, "tie_word_embeddings": False}, tmp_path / "model", "float32")
    file, kind = write_gguf(path, tmp_path / "x.gguf", "MXFP4"), gguf.GGMLQuantizationType.MXFP4
    stored = stored_in(file)
    for name, tensor in stored_in(path).items():
        if tensor.data.ndim == 2:
            expected = gguf.dequantize(gguf.quantize(tensor.data, kind), kind)
            assert np.array_equal(to_float32(stored[name]), expected)
            assert np.array_equal(rows_of(stored[name], 0, 20), expected[:20])
    model, exact = fast.load_model(file, kv_dtype="f32"), logits_of(file, random_ids(9))
    assert {weight[0].form for weight in model.weights.matrices.values()} == {INT8}
    assert np.abs(logits_of(model, random_ids(9)) - exact).max() < 0.5 * exact.std()
    gguf_head.joined_parts.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_one_line(message_of(qwen3.load_model, file), "x.gguf", "the format number 39", "pip install gguf")


@pytest.mark.parametrize("form", [form for form in GGUF_FORMATS.values() if form.unpack], ids=lambda it: it.name)
def test_packed_formats_are_those_of_the_package(form):
    """Random bytes, NaN and infinity among the scales: the package's own dequantization gives the same numbers."""
    kind = gguf.GGMLQuantizationType[form.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (form.numbers, form.size) and GGUF_FORMATS[kind] == form
    data = np.random.default_rng(0).integers(0, 256, (300, 512 // form.numbers * form.size), np.uint8)
    tensor = gguf_file.tensor_of(gguf_file.TensorEntry(form, (300, 512), data, mmap.mmap(-1, 4096)))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, kind)
        assert np.array_equal(tensor.read(), expected, equal_nan=True)
        assert np.array_equal(rows_of(tensor, 128, 200), expected[128:200], equal_nan=True)
        whole, scales, minima, _ = tensor.blocks(128, 200).multiplied()
        values = whole * np.repeat(scales, tensor.group, axis=1)
        values = values if minima is None else values + np.repeat(minima, tensor.group, axis=1)
        assert np.array_equal(values, expected[128:200], equal_nan=True)


# llama.cpp's numbers; of Q3_K to Q5_K the mix "M"
QUANTIZED = {"Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q4_K": 15, "Q5_K": 17,
             "Q6_K": 18, "IQ4_XS": 30, "TQ2_0": 37}
ROUNDED = ("Q2_K", "IQ4_XS", "TQ2_0")  # by the fast engine


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory):
    """A model's folder and its GGUF file; columns that the K formats can divide, and a token for each row."""
    folder = tmp_path_factory.mktemp("unquantized")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False}
    path = make_random_model(BASE | sizes | {"vocab_size": N_TOKENS}, folder / "m", "float32")
    return path, write_gguf(path, folder / "x.gguf")


def llama_logits(file, ids) -> np.ndarray:
    """llama.cpp's logits [n, vocab_size] of a file."""
    llama = pytest.importorskip("llama_cpp")
    model = llama.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    model.eval(ids)
    return model.scores[:len(ids)].copy()


def divergence(logits, others) -> float:
    """The mean Kullback-Leibler divergence of the next token's distribution."""
    p, q = (log_softmax(each.astype(np.float64)) for each in (logits, others))
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def llama_quantized(source, folder, form):
    """Files that llama.cpp has quantized, and turned into float32 again."""
    llama = pytest.importorskip("llama_cpp")
    written = [source]
    for number in (QUANTIZED[form], 0):  # 0: everything in float32
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = number, True, 1
        written.append(folder / f"{number}.gguf")
        assert llama.llama_model_quantize(*(str(file).encode() for file in written[-2:]), params) == 0
    return written[1:]


@pytest.mark.parametrize("form", QUANTIZED)
def test_files_of_llama_quantize(tmp_path, unquantized, form):
    """llama.cpp quantizes a file, and turns the result into float32 itself: ours are the same numbers."""
    written = llama_quantized(unquantized[1], tmp_path, form)
    packed, plain = (stored_in(file) for file in written)
    assert packed.keys() == plain.keys() and len(packed) == 3 + 3 * 11
    for name, tensor in packed.items():
        assert np.array_equal(to_float32(tensor), to_float32(plain[name])), name
    if form not in ROUNDED:
        assert_kept(written[0], form)
    ids = random_ids(9)
    between = divergence(logits_of(written[0], ids), llama_logits(written[0], ids))
    assert between < 2e-3  # llama.cpp rounds vectors to 8 bits


@pytest.mark.skipif(sys.platform != "linux", reason="which pages are in memory is read from Linux's /proc")
def test_a_file_whose_weights_are_packed_does_not_stay_in_memory(tmp_path):
    file = write_gguf(DEMO, tmp_path / "demo.gguf", "Q8_0")
    model = fast.load_model(file, tokenizer=False)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.name.startswith("qwen3-"):
            thread.join(60)
    mapped = re.search(rf"{re.escape(str(file))}\n(?:\w+: .*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert int(mapped[1]) * 1024 < file.stat().st_size / 10 and model.weights.arrays


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from Linux's /proc")
@pytest.mark.parametrize("form, bytes_per_weight", [("Q8_0", 1.0625), ("Q4_K", 0.578), ("Q6_K", 0.82)])
def test_loading_takes_little_more_than_the_weights(form, bytes_per_weight, memory, monkeypatch):
    """Q4_K_M is a mix of K formats. The package can't quantize to them: the factors are normal, the bytes random."""
    config = BASE | {"vocab_size": N_TOKENS, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 64}
    rng, quantize = np.random.default_rng(0), gguf.quantize
    factors = {"Q4_K": slice(0, 4), "Q6_K": slice(208, 210)}

    def random_blocks(values, kind):
        if kind.name not in factors:
            return quantize(values, kind)
        n, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (len(values), values.shape[1] // n, size), np.uint8)
        places = blocks[..., factors[kind.name]]
        places[:] = rng.normal(0, 1e-3, (*places.shape[:2], places.shape[2] // 2)).astype("<f2").view(np.uint8)
        return blocks.reshape(len(values), -1)

    monkeypatch.setattr(gguf, "quantize", random_blocks)
    folder = make_random_model(config, memory / form)
    peak, own, kept = memory_while_loading(write_gguf(folder, memory / f"{form}.gguf", form))
    n_weights = N_TOKENS * 1024 + 3 * 3 * 1024 * 3072 + 3 * 1024 * 64 * 12
    assert kept == pytest.approx(n_weights * bytes_per_weight, rel=0.03)
    assert max(peak, own) < 1.1 * kept + 2**23  # each of 8 threads has copies of some rows, which are long


@pytest.mark.parametrize("config", [MOE, MOE | {"mlp_only_layers": [1]}, MOE | {"tie_word_embeddings": True}],
                         ids=["MoE", "dense layers", "tied"])
def test_other_models(tmp_path, config):
    """In the fast engine, a router is float32 beside packed experts, whose numbers are the file's or near them."""
    path = make_random_model(config | {"moe_intermediate_size": 32}, tmp_path / "model", "float32")
    file, ids = write_gguf(path, tmp_path / "x.gguf"), random_ids(40)
    exact = logits_of(path, ids)
    assert np.array_equal(logits_of(file, ids), exact)
    for form in ("Q8_0", "Q4_1"):
        packed = write_gguf(path, tmp_path / f"{form}.gguf", form)
        plain, logits = logits_of(packed, ids), logits_of(fast.load_model(packed, kv_dtype="f32"), ids)
        for others in (plain, exact)[:2 if form == "Q8_0" else 1]:
            errors = np.sqrt(((logits - others)**2).mean(axis=1)) / others.std()
            assert np.quantile(errors, 0.25) < 0.055, errors  # at some tokens, others are chosen


def test_yarn(tmp_path):
    path = make_random_model(BASE | {"rope_scaling": YARN}, tmp_path / "model", "float32")
    file = write_gguf(path, tmp_path / "x.gguf")
    assert open_model(str(file)).config.rope_frequencies == open_model(str(path)).config.rope_frequencies != ()
    make_random_model(BASE | {"rope_scaling": YARN | {"beta_fast": 24.5, "beta_slow": 2}}, path, "float32")
    keys = {"yarn_beta_fast": 24.5, "yarn_beta_slow": 2.0, "finetuned": False, "yarn_attn_factor": 1.0}
    write_gguf(path, file, **{f"qwen3.rope.scaling.{key}": value for key, value in keys.items()})
    assert open_model(str(file)).config.rope_frequencies == open_model(str(path)).config.rope_frequencies != ()
    for factor in (None, 0.0):  # llama.cpp takes 1: nothing is stretched
        keys = {"factor": factor, "original_context_length": 64}
        write_gguf(path, file, **{f"qwen3.rope.scaling.{key}": value for key, value in keys.items()})
        config = open_model(str(file)).config
        plain = 1 / (config.rope_theta ** (np.arange(0, 16, 2) / 16)).astype(np.float32)
        np.testing.assert_allclose(config.rope_frequencies, plain, rtol=1e-6)
        assert (config.rope_factor, config.context_length) == (1, 512)


YARN_KEYS = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}


@pytest.mark.parametrize("keys", [
    {"scaling.type": "none", "scaling.factor": 4.0},
    {"freq_base": None}, YARN_KEYS, YARN_KEYS | {"scaling.attn_factor": 0.8},
    YARN_KEYS | {"scaling.yarn_attn_factor": 0.8}], ids=str)
def test_attention_of_llama_cpp(tmp_path, unquantized, keys):
    """The same file gives llama.cpp's logits."""
    changes, ids = {f"qwen3.rope.{key}": value for key, value in keys.items()}, random_ids(40)
    file = write_gguf(unquantized[0], tmp_path / "x.gguf", **changes)
    logits = logits_of(file, ids)
    assert divergence(logits, llama_logits(file, ids)) < 1e-5
    assert "none" in keys.values() or divergence(logits, logits_of(unquantized[1], ids)) > 1e-3


# ---- Files that are damaged, or of other models ----------------------------------------------------------------------

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The bytes of a sound file with the bundled tokenizer, and where its head ends."""
    folder = tmp_path_factory.mktemp("small")
    path = make_random_model(BASE, folder, "float32")
    data = write_gguf(path, folder / "x.gguf", "Q8_0").read_bytes()
    return data


def refused(tmp_path, data: bytes, *words) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    assert_one_line(message_of(qwen3.load_model, tmp_path / "x.gguf"), "x.gguf", *words)


def test_a_file_cut_short(tmp_path, small):
    rng = random.Random(0)
    for size in [0, 1, 4, 8, 23, 24, 31, len(small) - 1, *(rng.randrange(len(small)) for _ in range(30))]:
        refused(tmp_path, small[:size], "GGUF" if size > 0 else "empty")


KEY, TENSOR, ARRAY = b"general.architecture", b"blk.2.attn_q.weight", b"tokenizer.ggml.token_type"
# What is written where: at a place of the file, or so many bytes from the beginning of a name. A tensor's name is
# followed by the number of its sizes, two sizes, the format, and the offset; an array's by two types and a length.
OVERWRITTEN = [
    (0, b"GGML", "not a GGUF file"), (4, struct.pack("<I", 1), "version 1"),
    *((at, struct.pack("<Q", count), str(count)) for at in (8, 16) for count in (2**60, 2**63 - 1, 2**64 - 1)),
    *(((name, -8), struct.pack("<Q", 2**60), "download it again") for name in (KEY, TENSOR, ARRAY)),
    ((ARRAY, len(ARRAY) + 8), struct.pack("<Q", 2**60), "download it again"),
    ((b"general.name", 12), struct.pack("<I", 77), "unknown type 77"),
    *(((TENSOR, len(TENSOR) + at), struct.pack(form, value), words) for at, form, value, words in (
        (0, "<I", 9, "9 dimensions"), (4, "<Q", 2**60, "beyond the end"), (4, "<Q", 33, "blocks of 32"),
        (12, "<Q", 2**60, "beyond the end"), (12, "<Q", 32, "q_proj.weight has shape"), (12, "<Q", 0, "not a valid"),
        (20, "<I", 17, "IQ2_XS has blocks of 256"), (20, "<I", 99, "the format number 99"),
        (24, "<Q", 2**60, "beyond the end"), (24, "<Q", 2**64 - 8, "beyond the end"), (24, "<Q", 4, "not aligned")))]


@pytest.mark.parametrize("place, value, words", OVERWRITTEN, ids=str)
def test_a_head_that_is_damaged(tmp_path, small, place, value, words):
    at = place if isinstance(place, int) else small.index(place[0]) + place[1]
    refused(tmp_path, small[:at] + value + small[at + len(value):], words)


@pytest.mark.parametrize("name", ["llama", "qwen2vl"])
def test_other_architectures(tmp_path, name):
    file = write_gguf(make_random_model(BASE, tmp_path / "model", "float32"), tmp_path / "x.gguf",
                      **{"general.architecture": name})
    assert_one_line(message_of(qwen3.load_model, file), "x.gguf", f"'{name}'")


@pytest.mark.parametrize("changes, words", [
    ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe"), ({"tokenizer.ggml.model": "llama"}, "the tokenizer llama"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"), ({"tokenizer.ggml.merges": None}, "merges"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "token_type"), ({"qwen3.block_count": None}, "model.layers.3"),
    ({"qwen3.block_count": 4}, "model.layers.3"), ({"qwen3.attention.head_count": [4, 4]}, "num_attention_heads"),
    ({"qwen3.attention.value_length": 8}, "value_length = 8"),
    ({"qwen3.rope.scaling.type": "longrope", "qwen3.rope.scaling.factor": 4.0}, "longrope"),
    ({"qwen3.rope.scale_linear": 4.0}, "'linear' is not supported"), ({"qwen3.attention.causal": False}, "is_causal"),
    ({"qwen3.rope.dimension_count": 4}, "dimension_count = 4"), ({"split.count": 3}, "split.count = 3"),
    ({"general.alignment": 7}, "alignment"), ({"qwen3.pooling_type": 4}, "pooling_type = 4"),
    ({"tokenizer.chat_template": "{{"}, "template"), ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id"),
    ({"split.count": [1, 2]}, "split.count"), ({"tokenizer.ggml.pre": [1, 2]}, "the tokenizer gpt2, [1, 2]"),
    ({"general.sampling.temp": "hot"}, "temperature"), ({"qwen3.rope.scaling.attn_factor": 0.5}, "attn_factor"),
    ({"qwen3.rope.scaling.factor": [1, 2]}, "'linear' is not supported"),
], ids=str)
def test_metadata_that_is_wrong(tmp_path, changes, words):
    file = write_gguf(make_random_model(BASE, tmp_path / "model", "float32"), tmp_path / "x.gguf", **changes)
    assert_one_line(message_of(lambda: qwen3.chat(qwen3.load_model(file), "Hello")), "x.gguf", words)


def test_a_tensor_of_another_name(tmp_path, small):
    other = b"blk.1.attn_q_less.weight"
    refused(tmp_path, small.replace(b"blk.1.attn_q_norm.weight", other), other.decode())


def test_a_tensor_that_is_there_twice(tmp_path, monkeypatch):
    file = write_gguf(make_random_model(BASE, tmp_path / "model", "float32"), tmp_path / "x.gguf")
    monkeypatch.setitem(gguf_file.LAYER_NAMES, "attn_v", gguf_file.LAYER_NAMES["attn_k"])
    assert_one_line(message_of(qwen3.load_model, file), "x.gguf", "k_proj.weight is there twice", "attn_")


# ---- Qwen3.5 ---------------------------------------------------------------------------------------------------------

SMALL = HYBRID | {"vocab_size": N_TOKENS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64,
                  "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 6}
SMALL_MOE = HYBRID_MOE | {key: SMALL[key] for key in ("vocab_size", "hidden_size", "head_dim", "linear_key_head_dim",
                                                      "linear_value_head_dim")} | {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
NEWER = {"dense": SMALL, "a value head to a key head": SMALL | {"linear_num_value_heads": 2, "num_hidden_layers": 8},
         "untied": SMALL | {"tie_word_embeddings": False, "linear_num_value_heads": 4}, "mixture": SMALL_MOE}


def tiled(values, axis, config, size=None):
    """The heads of values as llama.cpp's converter deals them out: of each key's heads the first, then the second."""
    n_keys, n_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if config["model_type"] == "qwen3_next":  # whose heads stay in order
        return values
    shape = values.shape
    heads = values.reshape(*shape[:axis], n_keys, n_values // n_keys, size or 1, *shape[axis + 1:])
    return heads.swapaxes(axis, axis + 1).reshape(shape)


def as_converted(name, values, config):
    """(name, values) of a tensor after the steps of llama.cpp's conversion/qwen.py."""
    size, keys = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    part = name.split(".linear_attn.")[-1].removesuffix(".weight")
    if part == "conv1d":
        values = values.squeeze(1)
    if part in ("in_proj_qkv", "conv1d"):
        values = np.concatenate([values[:keys], tiled(values[keys:], 0, config, size)])
    elif part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        values = tiled(values, 0, config, size if part == "in_proj_z" else 1)
    elif part == "out_proj":
        values = tiled(values, 1, config, size)
    if part == "A_log":
        return name, -np.exp(values)
    if part == "dt_bias":
        return name.replace("dt_bias", "dt_proj.bias"), values
    return name, values + 1 if name.endswith("norm.weight") and part != "norm" and name != "mtp.norm.weight" else values


def early_or_cut(tensors, config, early):
    """The tensors of a Qwen3-Next as llama.cpp's converter cuts them; in 2025 (`early`), it didn't."""
    n, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"] // n
    out = {}
    for name, values in tensors.items():
        if name.endswith("in_proj_qkvz.weight") and not early:
            parts = np.split(values.reshape(n, -1, values.shape[1]), np.cumsum([key, key, value]), axis=1)
            q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
            out |= {name.replace("qkvz", "qkv"): np.concatenate([q, k, v]), name.replace("qkvz", "z"): z}
        else:
            out[name] = values
    return out


NEXTN = {"fc": "EH_PROJ", "pre_fc_norm_embedding": "ENORM", "pre_fc_norm_hidden": "HNORM", "norm": "SHARED_HEAD_NORM"}


def write_hybrid(path, out, form="F32", plain=False, fused=False, early=False, **changes):
    """The Qwen3.5 or Qwen3-Next in a folder as llama.cpp's converter writes it -> the file.

    plain: rounded to `form`, kept as F32; fused: gate and up of the experts.
    """
    config = json.loads((path / "config.json").read_text())
    config = config.get("text_config", config)
    sparse, rope = "num_experts" in config, config.get("rope_parameters", config)
    next_ = config["model_type"] == "qwen3_next"
    guesses = config.get("mtp_num_hidden_layers", int(next_))
    arch = gguf.MODEL_ARCH.QWEN3NEXT if next_ else gguf.MODEL_ARCH.QWEN35MOE if sparse else gguf.MODEL_ARCH.QWEN35
    writer, n = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch]), config["num_hidden_layers"] + guesses
    writer.add_block_count(n), writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"]), writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"]), writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"]), writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope.get("mrope_section", (4, 2, 2)), 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    if sparse:
        writer.add_expert_count(config["num_experts"]), writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if guesses:
        writer.add_nextn_predict_layers(guesses)
    names, kind = gguf.get_tensor_name_map(arch, n), gguf.GGMLQuantizationType[form]
    stored = qwen3.map_safetensors(path / "model.safetensors")
    tensors = {name.replace("model.language_model.", "model."): to_float32(tensor) for name, tensor in stored.items()
               if not name.startswith("model.visual.")}
    tensors = {name.replace("mtp.layers.0.", f"model.layers.{n - 1}."): tensor for name, tensor in tensors.items()}
    for name in [name for name in tensors if ".experts.0." in name]:
        experts = [tensors.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(config["num_experts"])]
        tensors[name.replace(".experts.0.", ".experts.")] = np.stack(experts)
    if fused:
        for name in [name for name in tensors if name.endswith("experts.gate_proj.weight")]:
            halves = tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))
            tensors[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(halves, axis=1)
    for name, values in (early_or_cut(tensors, config, early) if next_ else tensors).items():
        name, values = as_converted(name, values, config)
        theirs = names.get_name(name, (".weight", ".bias")) or "mtp." not in name and gguf_name(name)
        theirs = theirs.replace("ssm_ba", "ssm_beta_alpha") if early and theirs else theirs
        if name.startswith("mtp."):  # which this table doesn't have for a Qwen3.5
            kind_ = gguf.MODEL_TENSOR[f"NEXTN_{NEXTN[name.split('.')[1]]}"]
            theirs = f"{gguf.TENSOR_NAMES[kind_].format(bid=n - 1)}.weight"
            values = values + (values.ndim == 1)
        target = kind if theirs.endswith(".weight") and values.ndim > 1 and not theirs.endswith(
            ("gate_inp.weight", "gate_inp_shexp.weight", "conv1d.weight")) else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(np.ascontiguousarray(values), target)
        if plain:
            packed, target = gguf.dequantize(packed, target), gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, packed, raw_dtype=target)
    return finished(writer, tokenizer_keys(path) | changes, out)


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.parametrize("mtp, fused", [(0, False), (1, True)])
def test_a_converted_qwen3_5_is_the_folder(tmp_path, name, mtp, fused):
    """The same tensors (what the converter rounds, within rounding), the same config, the same logits."""
    path = make_random_model(NEWER[name] | {"mtp_num_hidden_layers": mtp}, tmp_path / "m", "float32")
    file = write_hybrid(path, tmp_path / "x.gguf", fused=fused and name == "mixture")
    ours, original = open_model(str(file)), open_model(str(path))
    assert original.config.mtp_num_hidden_layers == mtp
    assert dataclasses.replace(ours.config, eos_token_ids=()) == original.config
    stored, expected = ours.tensors, original.tensors
    assert stored.keys() == expected.keys()
    for key, tensor in expected.items():
        rounded = key.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight", "A_log"))
        assert stored[key].shape == tensor.shape, key
        assert np.allclose(to_float32(stored[key]), tensor.data, rtol=1e-6 * rounded, atol=2e-7 * rounded), key
    ids = random_ids(70, vocab_size=N_TOKENS)
    exact = logits_of(path, ids)
    for engine in (qwen3.Engine(), fast.engine(kv_dtype="f32")):
        assert np.abs(logits_of(qwen3.load_model(file, engine), ids) - exact).max() < 1e-4 * exact.std()
    assert qwen3.load_model(file).sampling == qwen3.Sampling(1.0, 20, 0.95)


@pytest.mark.parametrize("form", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", NEWER)
def test_a_packed_qwen3_5(tmp_path, name, form):
    """The numbers are those of the package's own dequantization, also as whole numbers and in parts."""
    path = make_random_model(NEWER[name], tmp_path / "m", "float32")
    files = [write_hybrid(path, tmp_path / f"{plain}.gguf", form, plain) for plain in (False, True)]
    packed, plain = (stored_in(file) for file in files)
    assert packed.keys() == plain.keys()
    for key, tensor in plain.items():
        assert np.array_equal(to_float32(packed[key]), tensor.data), key
        if isinstance(packed[key], PackedTensor):
            assert packed[key].group and np.array_equal(rows_of(packed[key], 0, 2), tensor.data[:2])
            assert np.array_equal(from_whole(packed[key], 1), tensor.data[1:]), key


def from_whole(tensor, start):
    """The rows from `start` on, from their whole numbers."""
    whole, scales, minima, _ = tensor.blocks(start, tensor.shape[0]).multiplied()
    values = whole * np.repeat(scales, whole.shape[1] // scales.shape[1], axis=1)
    return values if minima is None else values + np.repeat(minima, whole.shape[1] // minima.shape[1], axis=1)


WIDE = {"hidden_size": 256, "intermediate_size": 512, "linear_value_head_dim": 128, "linear_key_head_dim": 128}


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in NEWER), ("dense", WIDE)], ids=str)
def test_llama_cpp_reads_the_same_qwen3_5(tmp_path, name, changes):
    path = make_random_model(NEWER[name] | changes, tmp_path / "m", "float32")
    file, ids = write_hybrid(path, tmp_path / "x.gguf"), random_ids(40, vocab_size=N_TOKENS)
    theirs, ours = llama_logits(file, ids), logits_of(path, ids)
    assert np.abs(theirs - ours).max() < 3e-3 * ours.std()  # llama.cpp keeps keys and values in float16


@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "Q8_0", "TQ2_0"])
def test_a_qwen3_5_of_llama_quantize(tmp_path, form):
    """Blocks of 256 columns hold two heads, which the converter has put in another order."""
    path = make_random_model(SMALL | WIDE, tmp_path / "m", "float32")
    written = llama_quantized(write_hybrid(path, tmp_path / "x.gguf"), tmp_path, form)
    packed, plain = (stored_in(file) for file in written)
    assert any(isinstance(tensor, PackedTensor) for tensor in packed.values())
    for key, tensor in plain.items():
        assert np.array_equal(to_float32(packed[key]), tensor.data), key
        if isinstance(packed[key], PackedTensor) and packed[key].group:
            assert np.array_equal(from_whole(packed[key], 2), tensor.data[2:]), key


@needs_official_files
def test_the_tokenizer_of_qwen3_5_is_the_same(tmp_path):
    path = make_random_model(SMALL, tmp_path / "m", "float32")
    keys = tokenizer_keys(QWEN3_5 / "tokenizer") | {"tokenizer.ggml.pre": "qwen35"}
    file = write_hybrid(path, tmp_path / "x.gguf", **keys)
    ours, original = open_model(str(file)).tokenizer(), load_tokenizer(QWEN3_5 / "tokenizer")
    assert ours.chat_template == original.chat_template and ours.special_tokens == original.special_tokens
    for text in ("नमस्ते दुनिया", "กำลัง e\u0301 x\u0300y", "<|im_start|>user\nHi 123<|im_end|>",
                 "\u0303 a's\r\n\n  b"):
        assert ours.encode(text) == original.encode(text)


@pytest.mark.parametrize("changes, words", [
    ({"ssm.group_count": 0}, ("ssm", "sizes")), ({"ssm.time_step_rank": 5}, ("ssm", "sizes")),
    ({"ssm.inner_size": 7}, ("ssm", "sizes")), ({"ssm.state_size": 2**20 - 1}, ("ssm", "sizes")),
    ({"ssm.state_size": 2**30}, ("ssm", "sizes")),
    ({"block_count": 0}, ("block_count",)), ({"nextn_predict_layers": 4}, ("nextn_predict_layers",)),
    ({"ssm.state_size": 16}, ("shape",)), ({"block_count": 5}, ("missing",)), ({"embedding_length": 32}, ("shape",)),
    ({"rope.dimension_count": 63}, ("RoPE of 63",)), ({"rope.scaling.attn_factor": 2.0}, ("attn_factor",))], ids=str)
def test_a_qwen3_5_whose_sizes_are_wrong(tmp_path, changes, words):
    path = make_random_model(SMALL, tmp_path / "m", "float32")
    file = write_hybrid(path, tmp_path / "x.gguf", **{f"qwen35.{key}": value for key, value in changes.items()})
    assert_one_line(message_of(qwen3.load_model, file), *words)
