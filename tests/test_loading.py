"""qwen3.load_model and qwen3_lib/io/models.py: a sound folder is read exactly; a damaged one is refused in one line."""
import json
import math
import os
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

import qwen3
from configs import (BASE, HYBRID, HYBRID_MOE, ROOT, SHARED, TINY, VOCABULARY, YARN, needs_official_files,
                     transformers_5)
from helpers import (HUGE_INT, REMOVED, assert_one_line, config_at, edit_json, message_of, read_safetensors, run_main,
                     with_tensors, write_safetensors)
from make_random_model import make_random_model
from qwen3_lib.io import models
from qwen3_lib.io.rope import stretched, with_scaled_rope

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]
MLP, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def small(tiny, tmp_path):
    """A copy of a model that loads in a millisecond, for the test to break."""
    return shutil.copytree(tiny, tmp_path / "model")


def logits_of(path):
    model = qwen3.load_model(path)
    return qwen3.forward(model, [1, 2, 3], qwen3.KVCache(model.config))


def config_of(folder, **changes):
    """The Config of a folder whose config.json is BASE with changes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE))
    edit_json(folder / "config.json", changes)
    return config_at(folder)


def test_an_option_of_the_fast_engine_names_its_module(small):
    assert "qwen3_numba" in message_of(qwen3.load_model, small, quantize="int8")


# ---- The folder ------------------------------------------------------------------------------------------------------

WATCH = """\
import os, sys
log = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(event, args):
    if event == "open" and isinstance(args[0], (str, os.PathLike)):
        os.write(log, f"opened {args[0]}\\n".encode())
    if event == "exec" and getattr(args[0], "co_name", "") == "<module>":
        os.write(log, f"ran {args[0].co_filename}\\n".encode())
sys.addaudithook(note)
"""


@pytest.mark.parametrize("config", [BASE, HYBRID, HYBRID_MOE], ids=["dense", "hybrid", "hybrid mixture"])
def test_a_command_reads_each_file_of_a_model_once_and_runs_itself_once(config, tmp_path):
    model = make_random_model(config | {"vocab_size": VOCABULARY}, tmp_path / "model", shards=2)
    (tmp_path / "sitecustomize.py").write_text(WATCH)  # Python runs it before the program
    done = subprocess.run([sys.executable, ROOT / "qwen3.py", "--model", model, "--max-tokens", "1", "Hi"],
                          capture_output=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(tmp_path), "WATCHED": str(tmp_path / "log")})
    events = (tmp_path / "log").read_text().splitlines()
    opened = [event for event in events if event.startswith(f"opened {model}/")]
    assert done.returncode == 0 and len(opened) > 4 and len(opened) == len({*opened})
    assert sum(event.startswith("ran ") and event.endswith("/qwen3.py") for event in events) == 1


def test_a_command_builds_the_config_of_a_model_once(small, monkeypatch, capfd):
    build = mock.Mock(wraps=models.with_scaled_rope)
    monkeypatch.setattr(models, "with_scaled_rope", build)
    assert run_main(capfd, "--model", small, "--raw", "--max-tokens", "1", "Hi")[0] == 0 and build.call_count == 1


def test_a_loaded_model_is_logged_where_the_program_wants_it(small, capfd, caplog):
    qwen3.load_model(small)
    assert capfd.readouterr() == ("", "") and not caplog.records
    with caplog.at_level("INFO", "qwen3"):
        model = qwen3.load_model(small)
    [line] = caplog.messages
    assert line.startswith(f"loaded {model.path} in ") and "parameters" in line and "NumPy float32" in line
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_a_model(tmp_path):
    assert "no where" in message_of(qwen3.load_model, tmp_path / "no\nwhere")
    assert "config.json" in message_of(qwen3.load_model, tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "notes.txt" in message_of(qwen3.load_model, tmp_path)
    assert "notes.txt" in message_of(qwen3.load_model, tmp_path / "notes.txt")
    message_of(qwen3.load_model, tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("how", ["missing", "a folder", "a link to nothing"])
def test_a_file_that_is_not_there(small, name, how):
    (small / name).unlink()
    if how == "a folder":
        (small / name).mkdir()
    elif how == "a link to nothing":
        (small / name).symlink_to("../../blobs/gone")
    assert name in message_of(qwen3.load_model, small)


def test_a_normalizer_that_makes_texts_longer_is_refused_before_it_is_used(small):
    """The library normalizes "aa" while it reads the file: five of these would make 2 * 300**5 characters of it."""
    file, longer = small / "tokenizer.json", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}
    raw = json.loads(file.read_text("utf-8"))
    raw["added_tokens"].append({"id": 4999, "content": "aa", "single_word": False, "lstrip": False, "rstrip": False,
                                "normalized": True, "special": False})
    text, evil = json.dumps(raw), json.dumps({"type": "Sequence", "normalizers": [longer] * 2})
    for key in ("normalizer", "n\\u006frmalizer"):
        file.write_text(f'{text[:-1]}, "{key}" : {evil}}}')  # the last one counts
        assert "must be NFC" in message_of(qwen3.load_model, small)
    for value in (None, {"type": "NFC"}):
        file.write_text(json.dumps(raw | {"normalizer": value}))
        assert qwen3.load_model(small).tokenizer.encode("aa")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b"\xff\xfe{", b"[" * 100_000,
                                     b'{"a": ' + b"9" * 5000 + b"}"],
                         ids=lambda content: repr(content[:8]))
def test_a_file_that_is_no_json_object(small, name, content):
    (small / name).write_bytes(content)
    assert name in message_of(qwen3.load_model, small)


def test_links_are_followed_and_nothing_is_written(small, tmp_path):
    """As in the hub's cache; the folder may lie on a read-only disk."""
    links = tmp_path / "links"
    links.mkdir()
    for file in small.iterdir():
        (links / file.name).symlink_to(file)
    before = {file.name: file.stat().st_mtime_ns for file in small.iterdir()}
    assert np.array_equal(logits_of(links), logits_of(small))
    assert {file.name: file.stat().st_mtime_ns for file in small.iterdir()} == before


# ---- Tensors ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 100, b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_no_safetensors(small, content):
    """Damaged ones: see test_damage.py."""
    (small / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in message_of(qwen3.load_model, small)


@pytest.mark.parametrize("dtype, size", [("U8", 1), ("F8_E4M3", 1), ("I32", 4), ("BOOL", 1)])
def test_numbers_of_another_type(small, dtype, size):
    """In a tensor of the model they are refused, in one that the model doesn't need they are ignored."""
    file, before = small / "model.safetensors", logits_of(small)
    header, data = read_safetensors(file)
    other = {"dtype": dtype, "shape": [4], "data_offsets": [len(data), len(data) + 4 * size]}
    write_safetensors(file, header | {"x": other}, data + bytes(4 * size))
    assert np.array_equal(logits_of(small), before)
    write_safetensors(file, header | {"x": header[NORM], NORM: other}, data + bytes(4 * size))
    assert_one_line(message_of(qwen3.load_model, small), NORM, "missing", "BF16, F16, F32")


def test_float64(small):
    file, before = small / "model.safetensors", logits_of(small)
    header, data = read_safetensors(file)
    doubled = {name: entry | {"dtype": "F64", "data_offsets": [2 * end for end in entry["data_offsets"]]}
               for name, entry in header.items() if name != "__metadata__"}
    write_safetensors(file, doubled, np.frombuffer(data, "<f4").astype("<f8").tobytes())
    assert np.array_equal(logits_of(small), before)


def test_other_names_of_files_and_tensors(small, shards):
    """By torch.compile; one file of another name; shards in a folder of their own."""
    file, before = small / "model.safetensors", logits_of(small)
    header, data = read_safetensors(file)
    write_safetensors(file, {f"_orig_mod.{name}": entry for name, entry in header.items()
                             if name != "__metadata__"}, data)
    file.rename(small / "weights.safetensors")
    assert np.array_equal(logits_of(small), before)
    before, index = logits_of(shards), shards / "model.safetensors.index.json"
    (shards / "parts").mkdir()
    for name in SHARDS:
        (shards / name).rename(shards / "parts" / name)
        index.write_text(index.read_text().replace(f'"{name}"', f'"parts/{name}"'))
    assert np.array_equal(logits_of(shards), before)


@pytest.mark.parametrize("changes, words", [
    ({NORM: None}, [NORM, "missing"]), ({EMBEDDING: None}, [EMBEDDING, "missing"]),
    ({MLP: np.zeros((16, 32))}, [MLP, "[16, 32]", "[16, 16]"]), ({NORM: np.zeros(9)}, [NORM, "[9]", "[8]"]),
    ({NORM: np.zeros((8, 1))}, [NORM, "[8, 1]"]), ({NORM: np.zeros(())}, [NORM, "[]"]),
    ({MLP: np.zeros((0, 16))}, [MLP, "[0, 16]"]), ({HEAD: np.zeros((3, 16))}, [HEAD, "[3, 16]"]),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_tensors_that_do_not_fit(small, changes, words):
    with_tensors(small / "model.safetensors", changes)
    assert_one_line(message_of(qwen3.load_model, small), *words)


@pytest.mark.parametrize("tied", [True, False, REMOVED], ids=["tied", "untied", "no flag"])
@pytest.mark.parametrize("head", ["none", "copy", "another"])
def test_the_head(small, tied, head):
    """What the file holds counts; a copy of the embedding is not kept twice; an untied model needs a head."""
    with_tensors(small / "model.safetensors", {})
    header, data = read_safetensors(small / "model.safetensors")
    embedding = np.frombuffer(data[slice(*header[EMBEDDING]["data_offsets"])], "<f4").reshape(-1, TINY["hidden_size"])
    expected, other = logits_of(small), embedding[::-1]
    with_tensors(small / "model.safetensors", {HEAD: {"none": None, "copy": embedding, "another": other}[head]})
    edit_json(small / "config.json", {"tie_word_embeddings": tied})
    if head == "none" and tied is False:
        assert f"{HEAD} is missing" in message_of(qwen3.load_model, small)
        return
    assert np.allclose(logits_of(small), expected[::-1] if head == "another" else expected, atol=1e-6)
    weights = qwen3.load_model(small).weights
    assert (weights["lm_head"] is weights["embed_tokens"]) == (head == "none" or head == "copy" and tied is not False)


def test_an_embedding_model_has_no_head(embedder):
    """Whatever config.json says, as in Qwen3-Embedding-8B; and it gives no answers."""
    for tied in (True, False):
        edit_json(embedder / "config.json", {"tie_word_embeddings": tied})
        assert "qwen3_embed.py" in message_of(qwen3.generate, qwen3.load_model(embedder), [1])


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 16), ("float16", 13)])
def test_half_precision_files_are_read_exactly(tmp_path, dtype, bits):
    """bfloat16 keeps the upper 16 bits of a float32, float16 leaves its lowest 13 bits zero."""
    exact = qwen3.load_model(make_random_model(BASE, tmp_path / "exact", "float32")).weights["layers"][1]["down_proj"]
    halved = qwen3.load_model(make_random_model(BASE, tmp_path / "half", dtype)).weights["layers"][1]["down_proj"]
    assert halved.dtype == np.float32 and halved.flags.c_contiguous and not exact.flags.writeable  # still in its file
    assert not (halved.view(np.uint32) & ((1 << bits) - 1)).any()
    assert np.abs(halved - exact).max() <= np.abs(exact).max() * 2.0 ** (-8 if dtype == "bfloat16" else -11)


def test_unaligned_float32_is_read_rightly(small):
    """Some writers don't pad the header, so that the floats begin at an odd address."""
    before, (header, data) = logits_of(small), read_safetensors(small / "model.safetensors")
    raw = json.dumps(header).encode()
    write_safetensors(small / "model.safetensors", raw + b" " * (1 - len(raw) % 2), data)
    assert np.array_equal(logits_of(small), before)


# ---- Shards ----------------------------------------------------------------------------------------------------------

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_shards(shards, tmp_path):
    assert np.array_equal(logits_of(shards), logits_of(make_random_model(
        json.loads((shards / "config.json").read_text()), tmp_path / "whole", "float32")))
    content = (shards / SHARDS[2]).read_bytes()
    (shards / SHARDS[2]).write_bytes(content[:-100])
    assert SHARDS[2] in message_of(qwen3.load_model, shards)
    (shards / SHARDS[2]).unlink()
    assert SHARDS[2] in message_of(qwen3.load_model, shards)


def test_a_damaged_tensor_is_named(shards):
    name = "model.layers.1.mlp.up_proj.weight"
    file = next(file for file in shards.glob("*.safetensors") if name in qwen3.map_safetensors(file))
    with_tensors(file, {name: np.full(qwen3.map_safetensors(file)[name].shape, np.nan, np.float32)})
    assert_one_line(message_of(lambda: list(qwen3.generate(qwen3.load_model(shards), [1, 2], 2))), f"{name} has NaN")


@pytest.mark.parametrize("weight_map", [[], [1], "x", 5, {"": ".."}, *(
    {"model.norm.weight": file} for file in (5, "\0.safetensors", "", ["x"]))], ids=repr)
def test_a_broken_index(shards, weight_map):
    edit_json(shards / "model.safetensors.index.json", {"weight_map": weight_map})
    message_of(qwen3.load_model, shards)


# ---- config.json -----------------------------------------------------------------------------------------------------

WRONG = [REMOVED, None, True, 0, -1, "16", [], [16], {}, math.nan, math.inf]
FRACTIONS = ["rms_norm_eps", "rope_theta"]


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                                 "num_attention_heads", "num_key_value_heads", *FRACTIONS])
def test_config_numbers(tmp_path, key):
    accepted = [REMOVED, None, *([0] if key == "rms_norm_eps" else ())]  # absent: see test_absent_keys.py
    for value in [*WRONG, *([HUGE_INT, 1e300] if key in FRACTIONS else [1.5, 16.0])]:
        if value not in accepted:
            assert_one_line(message_of(config_of, tmp_path, **{key: value}), "config.json", key)
    for theta in WRONG if key == "rope_theta" else ():  # as transformers 5 writes it
        if theta in accepted:
            continue
        rope = {"rope_type": "default", "rope_theta": theta}
        assert key in message_of(config_of, tmp_path, rope_theta=REMOVED, rope_parameters={
            name: value for name, value in rope.items() if value is not REMOVED})


@pytest.mark.parametrize("changes", [
    {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["Qwen3ForCausalLM", "Qwen3ForGuardModel"]},
    {"model_type": "llama"}, {"model_type": "qwen2"}, {"model_type": ["qwen3"]}, {"hidden_act": "gelu"},
    {"attention_bias": True}, {"use_sliding_window": True}, {"use_qk_norm": False}, {"qkv_bias": True},
    {"is_causal": False}, {"use_bidirectional_attention": True}, {"model_type": "bidirectional_pplx_qwen3"},
    {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, {"layer_types": 3},
    {"layer_types": ["full_attention", "full_attention", "linear_attention"]}, {"architectures": [["x"]]},
    {"partial_rotary_factor": 0.5}, {"quantization_config": {"quant_method": "hqq"}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, {"rope_scaling": {"rope_type": ["yarn"]}},
    {"rope_scaling": "yarn"}, {"rope_scaling": {"type": "yarn", "factor": 2.5}, "max_position_embeddings": 10**400},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    {"num_attention_heads": 4, "num_key_value_heads": 3}, {"head_dim": 15}, {"num_hidden_layers": 10**9},
    {"eos_token_id": "<|im_end|>"}, {"eos_token_id": -1}, {"eos_token_id": 1.5}, {"eos_token_id": [1, "x"]},
    {"eos_token_id": True}, {"eos_token_id": {"a": 1}},
    *({"rope_scaling": YARN | change} for change in (
        {"factor": 0}, {"factor": "4"}, {"factor": HUGE_INT}, {"original_max_position_embeddings": [64]},
        {"beta_fast": 1, "beta_slow": 1}, {"attention_factor": -1.0}, {"mscale": "1", "mscale_all_dim": 1.0})),
], ids=str)
def test_what_would_be_computed_otherwise_is_refused(tmp_path, changes):
    (tmp_path / "model").mkdir()
    message = message_of(config_of, tmp_path / "model", **changes)
    assert any(str(word) in message for key, value in changes.items()
               for word in (key, *(value if isinstance(value, dict) else ()), "RoPE", "rope", "'hqq'"))


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Eagle3Speculator"])  # SafeAILab's, RedHatAI's
def test_an_eagle_head_is_refused_by_name(tmp_path, name):
    assert "an EAGLE head is not supported" in message_of(config_of, tmp_path, architectures=[name], model_type=REMOVED)


def test_keys_that_change_nothing_are_accepted(tmp_path):
    expected = config_of(tmp_path)
    for changes in ({"surprise": 7}, {"use_mamba": None}, {"layer_types": ["full_attention"] * 3}, {"mlp_bias": False},
                    {"rope_scaling": {"rope_type": "default"}}, {"partial_rotary_factor": 1}, {"qkv_bias": False},
                    {"architectures": REMOVED}, {"architectures": None}, {"architectures": ["Qwen3MoeForCausalLM"]},
                    {"auto_map": {"AutoModel": "x.Y"}, "model_name": "x", "_pre_quantization_dtype": "bfloat16"},
                    {"query_pre_attn_scalar": 128, "id2label": {"0": "a"}, "custom_pipelines": {"x": {}}},
                    {"output_attentions": False, "keys_to_ignore_at_inference": ["past_key_values"]},
                    {"use_qk_norm": True, "_attn_implementation": "eager", "sliding_window": 8},
                    {"max_window_layers": None}):
        assert config_of(tmp_path, **changes) == expected


def test_without_a_number_of_kv_heads_there_are_32(tmp_path):
    """As in transformers."""
    for heads in (32, 64):
        assert config_of(tmp_path, num_attention_heads=heads, num_key_value_heads=REMOVED).num_key_value_heads == 32


def test_attn_factor_of_yarn(tmp_path):
    """DeepSeek-R1-0528-Qwen3-8B: the code of YaRN's authors multiplies 0.1 ln(factor) + 1 by it, here to 1."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = config_of(tmp_path, rope_scaling=yarn | {"attn_factor": 0.8782488562869419})
    assert config.rope_factor == pytest.approx(1, abs=1e-12)
    assert config.rope_frequencies == config_of(tmp_path, rope_scaling=yarn).rope_frequencies


FILES = [file for folder in ("configs", "configs_resaved") for file in sorted((SHARED / folder).glob("*.json"))]


@needs_official_files
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_official_configs(tmp_path, file):
    """Every size loads with its sizes, in every dialect."""
    shutil.copy(file, tmp_path / "config.json")
    config, raw = config_at(tmp_path), json.loads(file.read_text())
    named = {key: value for key, value in raw.items() if key in vars(config)}
    assert len(named) > 8 and named == {key: getattr(config, key) for key in named}
    assert config.eos_token_ids == (raw["eos_token_id"],) and config.context_length == raw["max_position_embeddings"]
    assert config.sparse_layers == (tuple(range(config.num_hidden_layers)) if "moe" in raw["model_type"] else ())
    longer = any(name in file.stem for name in ("Coder", "A3B-Instruct", "A3B-Thinking"))
    assert config.rope_theta == (1e7 if longer else 5e6 if "2507" in file.stem else 1e6)
    if "rope_parameters" not in raw:
        (tmp_path / "config.json").write_text(json.dumps(transformers_5(raw | {"torch_dtype": "bfloat16"})))
        assert config_at(tmp_path) == config


# ---- YaRN ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("d, theta, length, factor", [
    (64, 1e6, 32768, 4.0), (128, 1e6, 32768, 4.0), (32, 1e4, 4096, 16.0)])
def test_yarn_matches_peng_2023(d, theta, length, factor):
    """Section 3.2 with alpha = 1 and beta = 32: r, the turns of a pair within the original length, decides.

    Pairs with r > beta keep their frequency, pairs with r < alpha have it divided by the factor. Between them the
    paper's formula is linear in r; its code, for which checkpoints are made, is linear in the index of the pair.
    Section 3.4: q and k are scaled by 0.1 ln(factor) + 1.
    """
    plain = qwen3.Config(1, 1, 1, 1, 1, 1, d, 40960, 1e-6, theta, True, d)
    config = with_scaled_rope(plain, {"rope_type": "yarn", "factor": factor,
                                      "original_max_position_embeddings": length}, "config.json")
    low = math.floor(d * math.log(length / (2 * math.pi * 32)) / (2 * math.log(theta)))
    high = math.ceil(d * math.log(length / (2 * math.pi)) / (2 * math.log(theta)))
    cases = set()
    for i, frequency in enumerate(config.rope_frequencies):
        plain = theta ** (-2 * i / d)
        turns = length * plain / (2 * math.pi)
        case = "kept" if turns > 32 else "divided" if turns < 1 else "blended"
        ramp = {"kept": 0, "divided": 1}.get(case, (i - low) / (high - low))
        assert frequency == pytest.approx((1 - ramp) * plain + ramp * plain / factor, rel=1e-5)
        cases.add(case)
    assert cases == {"kept", "blended", "divided"} and len(config.rope_frequencies) == d // 2
    assert config.rope_factor == pytest.approx(0.1 * math.log(factor) + 1)
    assert config.context_length == max(40960, factor * length)


def test_the_context_that_yarn_gives(tmp_path):
    """At least the one in config.json: a stretch to less does not shorten it. 32,768 of Qwen3's 40,960 were trained."""
    for rope, length in (({"factor": 4.0, "original_max_position_embeddings": 64}, 512), ({"factor": 2.0}, 1024),
                         ({"factor": 4.0, "original_max_position_embeddings": 1000}, 4000)):
        assert config_of(tmp_path, rope_scaling={"rope_type": "yarn"} | rope).context_length == length
    assert config_of(tmp_path, rope_scaling=YARN | {"attention_factor": 1.25}).rope_factor == 1.25
    assert stretched(config_of(tmp_path), 3).context_length == 1536
    config = config_of(tmp_path, max_position_embeddings=40960)
    assert stretched(config, 1.125).context_length == 40960 and stretched(config, 4).context_length == 131072
    assert "already" in message_of(stretched, stretched(config, 4), 2)
    assert stretched(config, 4) == config_of(tmp_path, max_position_embeddings=40960, rope_scaling=YARN | {
        "original_max_position_embeddings": 32768})


# ---- generation_config.json ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": []}, {"temperature": HUGE_INT}, {"top_k": -3.0},
    {"top_k": 2.5}, {"num_beams": 4}, {"suppress_tokens": [3]}, {"top_k": True}, {"top_p": 1.5}, {"min_p": 2},
    {"repetition_penalty": 0}, {"presence_penalty": math.inf}, {"max_new_tokens": 0}, {"max_new_tokens": 1.5},
    {"max_new_tokens": True}, {"eos_token_id": "x"}, {"eos_token_id": [1, None]},
], ids=str)
def test_generation_config_values(small, changes):
    (small / "generation_config.json").write_text(json.dumps({"do_sample": True} | changes))
    assert_one_line(message_of(qwen3.load_model, small), "generation_config.json", *changes)


def test_defaults_of_a_checkpoint(small):
    """As in transformers: greedy without do_sample, with it top_k 50 and temperature 1 unless given."""
    file = small / "generation_config.json"
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    edit_json(small / "config.json", {"eos_token_id": 9})
    for values, sampling, ends, longest in (
            (settings | {"eos_token_id": [5, 7], "max_new_tokens": 3, "num_beams": 1}, (0.6, 20, 0.95), (5, 7), 3),
            (settings | {"top_k": 20.0, "suppress_tokens": [], "min_new_tokens": 0, "return_dict": True,
                         "disable_compile": True, "chat_format": "chatml"}, (0.6, 20, 0.95), (9,), None),
            (settings | {"top_k": -1}, (0.6, 0, 0.95), (9,), None),
            ({"do_sample": True, "top_p": None}, (1.0, 50, 1.0), (9,), None),
            (settings | {"do_sample": False}, (0, 20, 0.95), (9,), None),
            ({"eos_token_id": 3}, (0, 0, 1.0), (3,), None)):
        file.write_text(json.dumps(values))
        model = qwen3.load_model(small)
        assert (model.sampling, model.eos_token_ids, model.max_new_tokens) == (qwen3.Sampling(*sampling), ends, longest)
        if longest:
            assert len(list(qwen3.generate(model, [1, 2], temperature=0, eos_token_ids=()))) == longest
    file.unlink()
    assert qwen3.load_model(small).sampling == qwen3.Sampling()


@needs_official_files
@pytest.mark.parametrize("folder, sampling, ends", [
    ("tokenizer", (0.6, 20, 0.95), (151645, 151643)), ("tokenizer_base", (0,), (151643,)),
    ("tokenizer_instruct_2507", (0.7, 20, 0.8), (151645, 151643))])
def test_official_defaults(small, folder, sampling, ends):
    """A base model continues greedily and ends on <|endoftext|>; instruct models end on <|im_end|> as well."""
    shutil.copy(SHARED / folder / "generation_config.json", small)
    model = qwen3.load_model(small)
    assert (model.sampling, model.eos_token_ids) == (qwen3.Sampling(*sampling), ends)
