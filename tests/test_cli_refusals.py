"""The command line names what it can't run, in one line that is short and harmless whatever a file or a name holds."""
import json
import os
import re
import struct

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from configs import BASE, FRANCE, PARIS, ROOT
from helpers import assert_cli_refuses, assert_one_line, edit_json, output, run_main
from qwen3_app import cli
from qwen3_io import checkpoint

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 12345\n"
QUANTIZED = {
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "MLX": {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
    "an unknown method": {"quantization_config": {"some": "thing"}},
}
RELATIVES = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2"), "qwen2_moe": ("Qwen2MoeForCausalLM", "mixture of experts"),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3-Next"), "qwen2_audio": ("Qwen2AudioForC", "Qwen2-Audio"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3.5"), "qwen3_vl": ("Qwen3VLForConditionalGeneration", "sees"),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "sees"), "qwen2_5_vl": ("Qwen2_5_VLForC", "Qwen2.5-VL"),
    "qwen3_omni_moe": ("Qwen3OmniMoeForConditionalGeneration", "sees and hears"),
    "llama": ("LlamaForCausalLM", "another"),
}


# ----------------------------------------------------------------------------------------------------------------------
# Things that people give as a model
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_elsewhere(folder, capfd, method):
    edit_json(folder / "config.json", QUANTIZED[method])
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], "quantized by " + method, "bfloat16", "--quantize",
                       "fp8, awq, gptq, compressed-tensors and GGUF")


@pytest.mark.parametrize("model_type", RELATIVES)
def test_other_architectures(folder, capfd, model_type):
    """Their config.json often has its sizes one level deeper: it is the name that is said, not the first lack."""
    architecture, words = RELATIVES[model_type]
    nested = {"model_type": model_type, "architectures": [architecture], "text_config": {"hidden_size": 64}}
    (folder / "config.json").write_text(json.dumps(nested))
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], words, f"'{model_type}'", architecture,
                       "only Qwen3 is")


def test_gguf_file_and_folder(tmp_path, capfd):
    (tmp_path / "Qwen3-0.6B-Q8_0.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert_cli_refuses(capfd, ["--model", tmp_path / "Qwen3-0.6B-Q8_0.gguf", "Hello"], "Q8_0.gguf", "GGUF file")
    assert_cli_refuses(capfd, ["--model", tmp_path, "Hello"], "Q8_0.gguf", "GGUF file")
    (tmp_path / "config.json").write_text(json.dumps(BASE))  # beside a config
    (tmp_path / "tokenizer.json").write_bytes((ROOT / "demo/tokenizer.json").read_bytes())
    assert_cli_refuses(capfd, ["--model", tmp_path, "Hello"], "GGUF", "safetensors", "give one of them", "Q8_0.gguf")
    (tmp_path / "config.json").unlink()
    (tmp_path / "Qwen3-0.6B-Q4_0.gguf").write_bytes(b"GGUF")
    assert_cli_refuses(capfd, ["--model", tmp_path, "Hello"], "several GGUF files", "Q4_0.gguf", "Q8_0.gguf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_file_of_a_model_in_place_of_its_folder(folder, capfd, name):
    assert_cli_refuses(capfd, ["--model", folder / name, "Hello"], "not a folder", f"give {folder}")


def test_lora_adapter(tmp_path, capfd):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert_cli_refuses(capfd, ["--model", tmp_path, "Hello"], "LoRA adapter", "--adapter")


def test_weights_in_a_pickle(folder, capfd):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], "pytorch_model.bin", "safetensors")


def test_shards_without_their_index(shards, capfd):
    (shards / "model.safetensors.index.json").unlink()
    assert_cli_refuses(capfd, ["--model", shards, "Hello"], "model.safetensors.index.json", "model-00001-of-00003")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                  "chat_template.jinja", "model.safetensors"])
def test_git_lfs_pointer_in_place_of_any_file(folder, capfd, name):
    (folder / name).write_text(LFS)
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], name, "git-lfs pointer", "git lfs pull")


def test_folder_of_the_hubs_cache_above_the_snapshot(folder, tmp_path, capfd):
    home = tmp_path / "models--Qwen--Qwen3-0.6B"
    (home / "snapshots").mkdir(parents=True)
    folder.rename(home / "snapshots" / "abc")
    assert_cli_refuses(capfd, ["--model", home, "Hello"], f"give {home / 'snapshots' / 'abc'}")
    status, out, _ = run_main(capfd, "--model", home / "snapshots" / "abc", "-n", 3, "Hello")  # as the line says
    assert status == 0 and out


def test_our_own_quantized_folder_says_which_command(folder, capfd):
    (folder / "model.safetensors").rename(folder / "model.int4.safetensors")
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], f"python qwen3_numba.py --model {folder}")


def test_a_folder_of_links_to_another_disk_answers(tmp_path):
    """Links of the user's own folder are followed: to files of other names, and over several links."""
    disk, mine = tmp_path / "disk", tmp_path / "mine"
    disk.mkdir()
    mine.mkdir()
    for i, file in enumerate((ROOT / "demo").iterdir()):
        (disk / f"blob{i}").write_bytes(file.read_bytes())
        (disk / f"link{i}").symlink_to(f"blob{i}")
        (mine / file.name).symlink_to(disk / f"link{i}")
    assert output("--model", mine, "--no-think", FRANCE) == PARIS


# ----------------------------------------------------------------------------------------------------------------------
# Short and harmless
# ----------------------------------------------------------------------------------------------------------------------

LONGEST = 2200  # characters of a refusal with the program's name
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60),
    st.sampled_from(["\u202e", "\u2066", "\u200b", "\x1b]0;title\x07", "\x1b[2J", "\r", "\n", "\u2028", "\x9b",
                     "\U000e0001", "a" * 300, "x" * 100_000, "\u202e" * 100_000, "\x1b" * 3000, "a b " * 50_000]))
VALUES = st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=3),
                   st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=3), st.integers(-10**300, 10**300), st.floats())
SECRET = "Zz" * 5000  # recognized in a message


def longest_quote(line: str) -> int:
    """How much of SECRET stands in a line."""
    return max(map(len, re.findall("(?:Zz)+", line)), default=0)


def assert_harmless(line: str) -> None:
    assert line.endswith("\n") and line[:-1].isprintable() and len(line) <= LONGEST, line[:3000]
    assert_one_line(line)
    assert longest_quote(line) <= 200


def with_tensor(folder, name: str, dtype: object, shape: object) -> None:
    """A safetensors file with one tensor, of that name."""
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def in_json(name, *keys):
    """A function that puts a value into a JSON file of the folder, at a place named by keys."""
    def put(folder, value):
        for key in reversed(keys):
            value = {key: value}
        edit_json(folder / name, value)
        return ["Hello"]
    return put


def as_key(name, *keys):
    def put(folder, value):
        return in_json(name, *keys, str(value))(folder, "value")
    return put


def in_argument_file(option, make):
    def put(folder, value):
        (folder / "argument.json").write_text(json.dumps(make(value)))
        return [option, folder / "argument.json", *([] if option == "--messages" else ["Hello"])]
    return put


def tensor_place(make):
    def put(folder, value):
        with_tensor(folder, *make(value))
        return ["Hello"]
    return put


def in_index(make):
    def put(folder, value):
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": make(value)}))
        return ["Hello"]
    return put


PLACES = {
    **{f"config: {key}": in_json("config.json", key) for key in sorted(checkpoint.KNOWN_KEYS)},
    "config: a key": as_key("config.json"), "config: rope parameter": as_key("config.json", "rope_parameters"),
    "config: quant_method": in_json("config.json", "quantization_config", "quant_method"),
    **{f"generation: {key}": in_json("generation_config.json", key)
       for key in ("temperature", "do_sample", "top_k", "eos_token_id")},
    "generation: a key": as_key("generation_config.json"),
    "tokenizer: a token": in_json("tokenizer_config.json", "added_tokens_decoder", "5", "content"),
    "tokenizer: an id": as_key("tokenizer_config.json", "added_tokens_decoder"),
    "tokenizer: eos": in_json("tokenizer_config.json", "eos_token", "nothing"),
    "tokenizer: template": in_json("tokenizer_config.json", "chat_template"),
    "tokenizer: model": in_json("tokenizer.json", "model", "type"),
    "tensor name": tensor_place(lambda value: (str(value), "F32", [1])),
    "tensor dtype": tensor_place(lambda value: ("model.norm.weight", value, [1])),
    "tensor shape": tensor_place(lambda value: ("model.norm.weight", "F32", value)),
    "shard": in_index(lambda value: {"model.norm.weight": value}),
    "shard's tensor": in_index(lambda value: {str(value): "a.safetensors"}),
    "role": in_argument_file("--messages", lambda value: [{"role": value, "content": "x"}]),
    "content": in_argument_file("--messages", lambda value: [{"role": "user", "content": [{"type": value}]}]),
    "call": in_argument_file("--messages", lambda value: [{"role": "assistant", "tool_calls": [value]}]),
    "messages": in_argument_file("--messages", lambda value: value),
    "tools": in_argument_file("--tools", lambda value: [{"type": "function", "function": value}]),
}


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(PLACES)), VALUES)
@example("config: hidden_act", SECRET)
@example("config: a key", SECRET)
@example("tensor name", SECRET)
@example("tokenizer: a token", SECRET)
@example("role", SECRET)
def test_any_value_in_a_file(pristine, tmp_path_factory, capfd, place, value):
    """What doesn't answer is refused by a line that can be shown to anybody."""
    folder = tmp_path_factory.mktemp("odd")
    for file in pristine.iterdir():  # links, but for what is changed: the weights would take too long to copy
        data = file.suffix in (".json", ".jinja")
        (folder / file.name).write_bytes(file.read_bytes()) if data else (folder / file.name).symlink_to(file)
    if place.startswith("tensor"):
        (folder / "model.safetensors").unlink()
    status, out, err = run_main(capfd, "--model", folder, "--json", "-n", 1, *PLACES[place](folder, value))
    if status:
        assert status == 1 and not out
        assert_harmless(err)
    else:
        assert err == ""


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["--model", "--file", "--messages", "--tools", "--system-file", "--prompt-cache", "--top-k",
                        "--seed", "--temperature", "--no-such-option"]), TEXTS)
@example("--file", "\u202etxt.exe")
@example("--model", "\x1b[2J")
@example("--model", SECRET)
@example("--file", "two\nlines")
def test_any_value_on_the_command_line(tmp_path_factory, capfd, monkeypatch, option, value):
    monkeypatch.chdir(tmp_path_factory.getbasetemp())  # where there is no such file
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = run_main(capfd, "--offline", "-n", "1", "--json", f"{option}={value}", "Hello")
    if status:
        assert not out
        assert err.endswith("\n") and err[:-1].isprintable() and len(err) <= LONGEST and len(err.splitlines()) == 1


@pytest.mark.parametrize("place", ["config: hidden_act", "config: a key", "config: layer_types", "tensor name",
                                   "shard", "role", "tokenizer: a token", "generation: a key"])
def test_values_of_60_megabytes(folder, capfd, place):
    if place.startswith("tensor"):
        (folder / "model.safetensors").unlink()
    status, out, err = run_main(capfd, "--model", folder, "-n", 1, *PLACES[place](folder, "Zz" * 30_000_000))
    assert status == 1 and not out
    assert_harmless(err)


def test_the_programs_own_name(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.sys, "argv", [os.fspath(tmp_path / "q\x1b[2J\u202e")])
    status, _, err = run_main(capfd, "--model", tmp_path, "Hello")
    assert status == 1 and err[:-1].isprintable()
