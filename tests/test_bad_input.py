"""Bad input ends with one line that says what is wrong and where: as a library (InputError) and as a process."""
import contextlib
import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qwen3
from qwen3_app import cli as qwen3_cli
from configs import BASE, YARN, transformers_5
from make_random_model import make_random_model
from qwen3_io.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared/data/qwen3"
REFUSED = InputError
REMOVED = object()  # in a set of changes to a config: the field is not there at all
HUGE_INT = 10**400  # JSON and the command line allow it; float() doesn't
CLI_CONFIG = BASE | {"vocab_size": 3072, "num_hidden_layers": 2, "max_position_embeddings": 100_000}  # 3072: the bundled tokenizer fits


# ---------------------------------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------------------------------

def assert_one_line(text: str, *words: str) -> None:
    """`text` is one line with something in it, no traceback, and names all `words` (in any case)."""
    assert text.strip() and len(text.splitlines()) == 1, f"not one line: {text[:2000]!r}"
    assert "Traceback" not in text
    for word in words:
        assert str(word).lower() in text.lower(), f"{word!r} is not named in {text[:2000]!r}"


def message_of(call, *args, **options) -> str:
    """The message with which the library refuses a call. Any other exception, or none, fails the test."""
    with pytest.raises(REFUSED) as caught:
        call(*args, **options)
    assert_one_line(str(caught.value))
    return str(caught.value)


def works_or_refused(call, *args, **options):
    """The result of a call, or None if it was refused properly. Any other exception fails the test."""
    try:
        return call(*args, **options)
    except REFUSED as error:
        assert_one_line(str(error))
        return None


def cli(capfd, *args) -> tuple[int, str, str]:
    """(status, stdout, stderr) of the command line, run in this process. capfd also sees what libraries write past Python."""
    capfd.readouterr()
    try:
        status = qwen3_cli.main([str(arg) for arg in args])
    except SystemExit as stop:  # argparse ends wrong usage so
        status = stop.code
    return status, *capfd.readouterr()


def assert_cli_refuses(capfd, args, *words) -> None:
    status, out, err = cli(capfd, *args)
    assert status in (1, 2), (status, out, err)
    assert_one_line(err, *words)
    assert not out.strip()


def command(*args) -> list[str]:
    return [sys.executable, str(ROOT / "qwen3.py"), *map(str, args)]


def start(*args, **options) -> subprocess.Popen:
    """The command line as a process of its own, with Ctrl-C as a terminal gives it (a shell's background jobs ignore it)."""
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | options.pop("env", {})
    prepare = options.pop("prepare", lambda: None)

    def in_child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare()

    return subprocess.Popen(args if isinstance(args[0], bytes) else command(*args), env=env, preexec_fn=in_child,
                            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options))


def finish(process: subprocess.Popen, timeout: float = 60) -> tuple[int, bytes, str]:
    """(status, stdout, stderr); a process that hangs is ended and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"still running after {timeout} s")
    return process.returncode, out, err.decode()


def edit_json(file: Path, changes: dict) -> None:
    """Changes fields of a JSON file; REMOVED takes one away."""
    values = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not REMOVED}))


def read_safetensors(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    start_of_data = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start_of_data]), content[start_of_data:]


def write_safetensors(file: Path, header: dict | bytes, data: bytes, length: int | None = None) -> None:
    """Writes the file as told, however wrong; `length` is what it says of its header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def with_tensors(file: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Rewrites a float32 safetensors file with tensors changed, added or (None) removed, all offsets right again."""
    old, data = read_safetensors(file)
    tensors = {name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
               for name, entry in old.items() if name != "__metadata__"} | changes
    header, parts, end = {}, [], 0
    for name, tensor in tensors.items():
        if tensor is not None:
            parts.append(tensor.astype("<f4").tobytes())
            header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + len(parts[-1])]}
            end += len(parts[-1])
    write_safetensors(file, header, b"".join(parts))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A sound random model that the command line can run and that would talk until its context is full."""
    path = make_random_model(CLI_CONFIG, tmp_path_factory.mktemp("pristine") / "model", "float32")
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.0}')
    return path


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of the sound model, for the test to break."""
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return qwen3.load_model(make_random_model(BASE, tmp_path_factory.mktemp("small") / "model", "float32"))


def test_the_sound_model_works(pristine, capfd):
    """What all tests below start from is accepted, so that what they break is what is refused."""
    status, out, err = cli(capfd, "--model", pristine, "--max-tokens", 20, "--seed", 1, "Hello")
    assert (status, err) == (0, "") and out.strip()


# ---------------------------------------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------------------------------------

def refuse_folder(capfd, path, *words):
    """Refused alike by the library and by the command line."""
    message = message_of(qwen3.load_model, path)
    assert_one_line(message, *words)
    assert_cli_refuses(capfd, ["--model", path, "Hello"], *words)


def test_no_such_folder(tmp_path, capfd):
    refuse_folder(capfd, tmp_path / "nowhere", "nowhere", "no such folder")


def test_file_as_folder(tmp_path, capfd):
    (tmp_path / "model.gguf").write_text("x")
    refuse_folder(capfd, tmp_path / "model.gguf", "model.gguf", "not a folder")


def test_empty_folder(tmp_path, capfd):
    refuse_folder(capfd, tmp_path, tmp_path, "config.json")


def test_folder_without_weights(folder, capfd):
    (folder / "model.safetensors").unlink()
    refuse_folder(capfd, folder, folder, "model.safetensors")


def test_folder_whose_name_has_a_line_break(tmp_path, capfd):
    refuse_folder(capfd, tmp_path / "no\nwhere", "where", "no such folder")


def test_folder_whose_name_is_too_long(tmp_path, capfd):
    refuse_folder(capfd, tmp_path / ("x" * 300), "xxx")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_permission_denied(folder, capfd, name):
    (folder / name).chmod(0)
    refuse_folder(capfd, folder, name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_directory_in_place_of_a_file(folder, capfd, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    refuse_folder(capfd, folder, name)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no /proc/self/mem, a file that cannot be read at its start")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"])
def test_file_that_cannot_be_read(folder, capfd, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")
    refuse_folder(capfd, folder, name)


# ---------------------------------------------------------------------------------------------------------------------
# config.json
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("content", [b"", b"{", b"not json", b"\xff\xfe{", b"[1]", b"3", b"null", b'"x"', b"[" * 100_000, b"{}" * 2, b"9" * 5000],
                         ids=lambda content: repr(content[:10]))
def test_config_is_no_json_object(folder, capfd, content):
    (folder / "config.json").write_bytes(content)
    refuse_folder(capfd, folder, "config.json")


def config_message(tmp_path, changes, base=BASE):
    (tmp_path / "config.json").write_text(json.dumps(base))
    edit_json(tmp_path / "config.json", changes)
    return message_of(qwen3.load_config, tmp_path)


INTEGERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings")
NUMBERS = ("rms_norm_eps", "rope_theta")
NOT_POSITIVE = [REMOVED, None, True, 0, -1, -(2**40), "16", [], [16], {}, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", [*NOT_POSITIVE, 1.5, 16.0, 2**31, HUGE_INT], ids=lambda value: "missing" if value is REMOVED else repr(value)[:20])
@pytest.mark.parametrize("key", INTEGERS)
def test_config_integer(tmp_path, key, value):
    assert_one_line(config_message(tmp_path, {key: value}), "config.json", key)


@pytest.mark.parametrize("value", [*NOT_POSITIVE, HUGE_INT], ids=lambda value: "missing" if value is REMOVED else repr(value)[:20])
@pytest.mark.parametrize("key", NUMBERS)
def test_config_number(tmp_path, key, value):
    assert_one_line(config_message(tmp_path, {key: value}), "config.json", key)


@pytest.mark.parametrize("value", [*NOT_POSITIVE, HUGE_INT], ids=lambda value: "missing" if value is REMOVED else repr(value)[:20])
def test_config_rope_theta_in_the_newer_dialect(tmp_path, value):
    rope = {"rope_type": "default"} | ({} if value is REMOVED else {"rope_theta": value})
    assert_one_line(config_message(tmp_path, {"rope_parameters": rope}, transformers_5(BASE)), "config.json", "rope_theta")


NOT_SUPPORTED = {  # changes to the config, and what the message must name
    "MoE": ({"architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM"]),
    "Llama": ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM"]),
    "two architectures": ({"architectures": ["Qwen3ForCausalLM", "LlamaForCausalLM"]}, ["LlamaForCausalLM"]),
    "classifier": ({"architectures": ["Qwen3ForSequenceClassification"]}, ["Qwen3ForSequenceClassification"]),
    "no architecture": ({"architectures": []}, ["architecture"]),
    "architecture is no list": ({"architectures": "Qwen3ForCausalLM"}, ["architecture"]),
    "architecture is a number": ({"architectures": 3}, ["architecture", "3"]),
    "architecture is an object": ({"architectures": {"a": 1}}, ["architecture"]),
    "model_type": ({"model_type": "llama"}, ["model_type", "llama"]),
    "model_type of MoE": ({"model_type": "qwen3_moe"}, ["model_type", "qwen3_moe"]),
    "model_type is a list": ({"model_type": ["qwen3"]}, ["model_type"]),
    "gelu": ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    "no activation": ({"hidden_act": None}, ["hidden_act", "None"]),
    "attention_bias": ({"attention_bias": True}, ["attention_bias", "True"]),
    "attention_bias is a string": ({"attention_bias": "false"}, ["attention_bias"]),
    "sliding window": ({"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window", "True"]),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ["layer_types", "sliding_attention"]),
    "layer_types is a string": ({"layer_types": "full_attention"}, ["layer_types"]),
    "layer_types is a number": ({"layer_types": 3}, ["layer_types"]),
    "layer_types holds lists": ({"layer_types": [["full_attention"]]}, ["layer_types"]),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope", "linear"]),
    "dynamic rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope", "dynamic"]),
    "llama3 rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                      "original_max_position_embeddings": 64}}, ["rope", "llama3"]),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ["rope", "longrope"]),
    "rope type is a list": ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope", "yarn"]),
    "rope type is null": ({"rope_scaling": {"rope_type": None}}, ["rope", "None"]),
    "rope is a string": ({"rope_scaling": "yarn"}, ["rope", "yarn"]),
    "rope is a list": ({"rope_scaling": [4.0]}, ["rope", "4.0"]),
    "rope is true": ({"rope_scaling": True}, ["rope", "True"]),
    "default rope with a factor": ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, ["rope", "factor"]),
    "partial rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    "partial rope outside": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    "YaRN with mscale": ({"rope_scaling": YARN | {"mscale": 1.0}}, ["mscale"]),
    "YaRN not truncated": ({"rope_scaling": YARN | {"truncate": False}}, ["truncate"]),
    "YaRN with something": ({"rope_scaling": YARN | {"surprise": 7}}, ["surprise", "7"]),
    "YaRN without factor": ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, ["factor"]),
    "YaRN, factor null": ({"rope_scaling": YARN | {"factor": None}}, ["factor", "None"]),
    "YaRN, factor 0": ({"rope_scaling": YARN | {"factor": 0}}, ["factor", "0"]),
    "YaRN, factor nan": ({"rope_scaling": YARN | {"factor": math.nan}}, ["factor", "nan"]),
    "YaRN, factor a string": ({"rope_scaling": YARN | {"factor": "4"}}, ["factor", "4"]),
    "YaRN, factor huge": ({"rope_scaling": YARN | {"factor": HUGE_INT}}, ["factor"]),
    "YaRN, length negative": ({"rope_scaling": YARN | {"original_max_position_embeddings": -1}}, ["original_max_position_embeddings", "-1"]),
    "YaRN, length a list": ({"rope_scaling": YARN | {"original_max_position_embeddings": [64]}}, ["original_max_position_embeddings"]),
    "YaRN, beta_fast": ({"rope_scaling": YARN | {"beta_fast": "32"}}, ["beta_fast", "32"]),
    "YaRN, beta_slow": ({"rope_scaling": YARN | {"beta_slow": 0}}, ["beta_slow", "0"]),
    "YaRN, attention_factor": ({"rope_scaling": YARN | {"attention_factor": -1.0}}, ["attention_factor", "-1"]),
    "quantized": ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, ["quantization_config", "fp8"]),
    "unknown option": ({"logit_softcapping": 30.0}, ["logit_softcapping", "30"]),
    "unknown option, true": ({"use_mamba": True}, ["use_mamba", "True"]),
    "unknown option, zero": ({"first_k_dense_replace": 0}, ["first_k_dense_replace", "0"]),
    "unknown option, empty list": ({"mlp_only_layers": []}, ["mlp_only_layers"]),
    "unknown option, nan": ({"softcap": math.nan}, ["softcap", "nan"]),
    "unknown option with line breaks": ({"soft\ncap": "a\nb"}, ["soft", "cap"]),
    "experts": ({"num_experts": 128}, ["num_experts", "128"]),
    "heads not divisible": ({"num_attention_heads": 4, "num_key_value_heads": 3}, ["4", "3", "heads"]),
    "more KV heads than heads": ({"num_attention_heads": 2, "num_key_value_heads": 4}, ["2", "4", "heads"]),
    "odd head_dim": ({"head_dim": 15}, ["head_dim", "15"]),
    "tied is a string": ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
    "tied is a number": ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
    "eos is a string": ({"eos_token_id": "<|im_end|>"}, ["eos_token_id", "<|im_end|>"]),
    "eos is negative": ({"eos_token_id": -1}, ["eos_token_id", "-1"]),
    "eos is a float": ({"eos_token_id": 1.5}, ["eos_token_id", "1.5"]),
    "eos is true": ({"eos_token_id": True}, ["eos_token_id", "True"]),
    "eos list with a string": ({"eos_token_id": [1, "x"]}, ["eos_token_id", "x"]),
    "eos nested": ({"eos_token_id": [[1]]}, ["eos_token_id"]),
    "eos is an object": ({"eos_token_id": {"a": 1}}, ["eos_token_id"]),
}


@pytest.mark.parametrize("case", NOT_SUPPORTED)
def test_config_names_what_it_cannot_do(tmp_path, case):
    changes, words = NOT_SUPPORTED[case]
    assert_one_line(config_message(tmp_path, changes), "config.json", *words)


@pytest.mark.parametrize("changes, words", [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}, ["rope_scaling"]),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 5e6}, ["rope_theta"]),
    ({"rope_scaling": YARN | {"type": "linear"}}, ["linear"]),
], ids=["two scalings", "two thetas", "two types"])
def test_config_that_contradicts_itself(tmp_path, changes, words):
    """What one place says and another denies cannot be followed; ignoring one of them would be silent."""
    assert_one_line(config_message(tmp_path, changes), "config.json", *words)


def test_config_error_on_the_command_line(folder, capfd):
    edit_json(folder / "config.json", {"hidden_act": "gelu"})
    refuse_folder(capfd, folder, "config.json", "hidden_act", "gelu")


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a warning would be one more line on stderr
@pytest.mark.parametrize("changes", [
    {"rms_norm_eps": 1e300}, {"rms_norm_eps": 1e-300}, {"rms_norm_eps": 10**39}, {"rope_theta": 1e300}, {"rope_theta": 1e-300}, {"rope_theta": 10**39},
    {"rope_theta": 1}, {"rope_theta": 0.5}, {"head_dim": 2**30}, {"vocab_size": 2**31 - 1}, {"max_position_embeddings": 2**31 - 1},
    {"rope_scaling": YARN | {"factor": 1e308}}, {"rope_scaling": YARN | {"factor": 1e-308}}, {"rope_scaling": YARN | {"factor": 1e300}},
    {"rope_scaling": YARN | {"original_max_position_embeddings": 1e308}}, {"rope_scaling": YARN | {"original_max_position_embeddings": 1e-308}},
    {"rope_scaling": YARN | {"beta_fast": 1e308, "beta_slow": 1e-308}}, {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 1}},
    {"rope_scaling": YARN | {"attention_factor": 1e300}}, {"rope_scaling": YARN, "rope_theta": 1}, {"rope_scaling": YARN, "rope_theta": 1e300},
], ids=str)
def test_extreme_numbers_in_the_config(folder, changes):
    """Positive, finite, and useless: the model answers, or one line says why not."""
    edit_json(folder / "config.json", changes)
    works_or_refused(lambda: list(qwen3.generate(qwen3.load_model(folder), [1, 2, 3], 2)))


def test_billions_of_layers(folder):
    """A lie about the number of layers must not fill the memory before it is noticed."""
    edit_json(folder / "config.json", {"num_hidden_layers": 2**31 - 1})
    limit = 4 * 2**30
    process = start("--model", folder, "Hello", prepare=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    status, out, err = finish(process, 20)
    assert status == 1 and not out.strip()
    assert_one_line(err, "layers")


def config_files(where):
    return sorted((SHARED / where).glob("*.json")) or [pytest.param(None, marks=pytest.mark.skip(reason=f"no official configs at {SHARED / where}"))]


OFFICIAL = {"0.6B": (1024, 3072, 28, 16, True), "1.7B": (2048, 6144, 28, 16, True), "4B": (2560, 9728, 36, 32, True), "8B": (4096, 12288, 36, 32, False),
            "14B": (5120, 17408, 40, 40, False), "32B": (5120, 25600, 64, 64, False)}


@pytest.mark.parametrize("file", config_files("configs") + config_files("configs_resaved"), ids=lambda file: getattr(file, "stem", None))
def test_official_configs(tmp_path, file):
    """Every dense size loads with its sizes, in every dialect; MoE and FP8 are refused by name."""
    shutil.copy(file, tmp_path / "config.json")
    raw = json.loads(file.read_text())
    if "A3B" in file.stem or "A22B" in file.stem or "A35B" in file.stem:
        assert_one_line(message_of(qwen3.load_config, tmp_path), "config.json", "Qwen3MoeForCausalLM")
    elif "FP8" in file.stem:
        assert_one_line(message_of(qwen3.load_config, tmp_path), "config.json", "quantization_config", "fp8")
    else:
        hidden, inner, layers, heads, tied = next(sizes for size, sizes in OFFICIAL.items() if size in file.stem.replace(".transformers", "-").split("-"))
        config = qwen3.load_config(tmp_path)
        assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads) == (hidden, inner, layers, heads)
        assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps, config.tie_word_embeddings) == (8, 128, 1e-6, tied)
        assert (config.vocab_size, config.max_position_embeddings, config.eos_token_ids) == (raw["vocab_size"], raw["max_position_embeddings"],
                                                                                             (raw["eos_token_id"],))
        assert config.rope_theta == (5e6 if "2507" in file.stem else 1e6) and config.yarn is None
        assert config.context_length == config.max_position_embeddings
        if "rope_parameters" not in raw:
            (tmp_path / "config.json").write_text(json.dumps(transformers_5(raw | {"torch_dtype": "bfloat16"})))
            assert qwen3.load_config(tmp_path) == config


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no official configs at {SHARED}")
def test_official_config_is_the_same_in_all_dialects(tmp_path):
    configs = []
    for file in (SHARED / "configs/Qwen3-0.6B.json", *sorted((SHARED / "configs_resaved").glob("Qwen3-0.6B.*.json"))):
        shutil.copy(file, tmp_path / "config.json")
        configs.append(qwen3.load_config(tmp_path))
    assert len(configs) == 3 and configs[0] == configs[1] == configs[2]


# ---------------------------------------------------------------------------------------------------------------------
# safetensors files
# ---------------------------------------------------------------------------------------------------------------------

ANY_TENSOR = "model.layers.1.mlp.up_proj.weight"


def edit_entry(name, **changes):
    """A damage: other fields in the header for one tensor, the data as before."""
    def damage(header, data):
        header[name] |= changes
        return header, data
    return damage


def overlapping(header, data):
    header[ANY_TENSOR]["data_offsets"] = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"]
    return header, data


def gap(header, data):
    """Bytes in the middle that belong to no tensor."""
    start_of_gap = header[ANY_TENSOR]["data_offsets"][0]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= start_of_gap:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    return header, data[:start_of_gap] + bytes(8) + data[start_of_gap:]


DAMAGES = {  # (header, data) -> what is written instead
    "cut in the data": lambda header, data: (header, data[:-1]),
    "cut in half": lambda header, data: (header, data[:len(data) // 2]),
    "no data": lambda header, data: (header, b""),
    "more data than listed": lambda header, data: (header, data + bytes(16)),
    "header is no JSON": lambda header, data: (b"x" * 64, data),
    "header is a list": lambda header, data: (b"[1, 2]", data),
    "header is a number": lambda header, data: (b"17", data),
    "header is no UTF-8": lambda header, data: (b'{"\xff": 1}', data),
    "header cut": lambda header, data: (json.dumps(header).encode()[:-5], data),
    "empty header": lambda header, data: (b"", data),
    "deep header": lambda header, data: (b"[" * 100_000, data),
    "entry without dtype": edit_entry(ANY_TENSOR, dtype=None),
    "entry with an unknown dtype": edit_entry(ANY_TENSOR, dtype="F31"),
    "entry is a number": lambda header, data: (header | {ANY_TENSOR: 3}, data),
    "shape is a number": edit_entry(ANY_TENSOR, shape=2048),
    "shape is negative": edit_entry(ANY_TENSOR, shape=[-64, -32]),
    "shape is fractional": edit_entry(ANY_TENSOR, shape=[64.0, 32.0]),
    "shape overflows": edit_entry(ANY_TENSOR, shape=[2**63, 2, 2**63]),
    "shape says more than the bytes": edit_entry(ANY_TENSOR, shape=[64, 33]),
    "offsets past the end": edit_entry(ANY_TENSOR, data_offsets=[10**9, 10**9 + 4 * 2048]),
    "offsets beyond 64 bits": edit_entry(ANY_TENSOR, data_offsets=[2**70, 2**70 + 4 * 2048]),
    "offsets backwards": edit_entry(ANY_TENSOR, data_offsets=[4 * 2048, 0]),
    "offsets negative": edit_entry(ANY_TENSOR, data_offsets=[-4 * 2048, 0]),
    "offsets are three": edit_entry(ANY_TENSOR, data_offsets=[0, 1, 2]),
    "overlapping": overlapping,
    "gap": gap,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_safetensors(folder, capfd, damage):
    file = folder / "model.safetensors"
    write_safetensors(file, *DAMAGES[damage](*read_safetensors(file)))
    refuse_folder(capfd, folder, "model.safetensors")


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_lying_header_length(folder, capfd, length):
    file = folder / "model.safetensors"
    write_safetensors(file, *read_safetensors(file), length=length)
    refuse_folder(capfd, folder, "model.safetensors")


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 7, b"\0" * 8, b"\0" * 100, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"],
                         ids=["zero bytes", "one byte", "7 bytes", "8 zeros", "100 zeros", "git-lfs pointer"])
def test_file_that_is_no_safetensors(folder, capfd, content):
    (folder / "model.safetensors").write_bytes(content)
    refuse_folder(capfd, folder, "model.safetensors")


@pytest.mark.parametrize("dtype, size", [("F64", 8), ("I8", 1), ("U8", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("U16", 2), ("I32", 4), ("I64", 8), ("BOOL", 1)])
def test_wrong_dtype(folder, capfd, dtype, size):
    file = folder / "model.safetensors"
    header, data = read_safetensors(file)
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    begin = header[last]["data_offsets"][0]
    end = begin + math.prod(header[last]["shape"]) * size
    header[last] |= {"dtype": dtype, "data_offsets": [begin, end]}
    write_safetensors(file, header, data[:begin] + bytes(end - begin))
    refuse_folder(capfd, folder, "model.safetensors", last, dtype)


NORM = "model.layers.0.self_attn.q_norm.weight"


@pytest.mark.parametrize("changes, words", [
    ({NORM: None}, [f"{NORM} is missing"]),
    ({"model.embed_tokens.weight": None}, ["model.embed_tokens.weight", "missing"]),
    ({"model.norm.weight": None, ANY_TENSOR: None, NORM: None}, ["model.norm.weight", ANY_TENSOR, NORM]),
    ({"model.layers.0.self_attn.q_proj.bias": np.zeros(64)}, ["model.layers.0.self_attn.q_proj.bias", "unexpected"]),
    ({"model.layers.2.mlp.up_proj.weight": np.zeros((64, 32))}, ["model.layers.2.mlp.up_proj.weight", "unexpected"]),
    ({"model.layers.x.mlp.up_proj.weight": np.zeros((64, 32))}, ["model.layers.x.mlp.up_proj.weight", "unexpected"]),
    ({"norm": np.zeros(1)}, ["norm", "unexpected"]),
    ({"": np.zeros(1)}, ["unexpected"]),
    ({"a\nb": np.zeros(1)}, ["unexpected", "b"]),
    ({ANY_TENSOR: np.zeros((32, 64))}, [ANY_TENSOR, "[32, 64]", "[64, 32]"]),
    ({NORM: np.zeros(17)}, [NORM, "[17]", "[16]"]),
    ({NORM: np.zeros((16, 1))}, [NORM, "[16, 1]"]),
    ({NORM: np.zeros(())}, [NORM, "[]"]),
    ({ANY_TENSOR: np.zeros((0, 32))}, [ANY_TENSOR, "[0, 32]"]),
    ({"model.embed_tokens.weight": np.zeros((3071, 32))}, ["model.embed_tokens.weight", "[3071, 32]"]),
    ({"lm_head.weight": np.zeros((3071, 32))}, ["lm_head.weight", "[3071, 32]"]),
    ({NORM: None, ANY_TENSOR: np.zeros((2, 2)), "odd.one": np.zeros(3)}, [f"{NORM} is missing", ANY_TENSOR, "[2, 2]", "odd.one"]),
], ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, dict) else "")
def test_tensors_that_do_not_fit(folder, capfd, changes, words):
    with_tensors(folder / "model.safetensors", changes)
    refuse_folder(capfd, folder, *words)


def test_untied_config_without_a_head(folder, capfd):
    edit_json(folder / "config.json", {"tie_word_embeddings": False})
    refuse_folder(capfd, folder, "lm_head.weight", "missing")


def test_config_for_another_size(folder, capfd):
    """The config of another model: the first tensors that differ are named."""
    edit_json(folder / "config.json", {"hidden_size": 48})
    refuse_folder(capfd, folder, "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "[64, 48]", "more")


def test_unaligned_float32_is_read_rightly(folder):
    """Some writers don't pad the header, so that the floats begin at an odd address."""
    file = folder / "model.safetensors"
    before = qwen3.forward(qwen3.load_model(folder), [1, 2, 3], qwen3.KVCache(qwen3.load_config(folder)))
    header, data = read_safetensors(file)
    raw = json.dumps(header).encode()
    write_safetensors(file, raw + b" " * (1 - len(raw) % 2), data)  # of odd length
    assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 2 == 1
    loaded = works_or_refused(qwen3.load_model, folder)
    assert loaded is not None and np.array_equal(qwen3.forward(loaded, [1, 2, 3], qwen3.KVCache(loaded.config)), before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [NORM, ANY_TENSOR, "model.norm.weight", "model.embed_tokens.weight"])
def test_broken_weights_are_named(folder, capfd, name, value):
    header, data = read_safetensors(folder / "model.safetensors")
    tensor = np.frombuffer(data[slice(*header[name]["data_offsets"])], "<f4").reshape(header[name]["shape"]).copy()
    tensor.flat[3] = value
    with_tensors(folder / "model.safetensors", {name: tensor})
    loaded = qwen3.load_model(folder)
    message = message_of(lambda: next(qwen3.generate(loaded, [0, 1, 2, 3])))
    assert_one_line(message, name, "nan")
    assert "layers.0.mlp" not in message  # only what is broken
    assert_one_line(message_of(qwen3.generate_batch, loaded, [[0, 1], [0, 1, 2]]), name)
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], name)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_broken_weights_say_nothing_but_the_line(folder, value):
    """NumPy's warnings about overflow and invalid values are not for the user."""
    with_tensors(folder / "model.safetensors", {"model.norm.weight": np.full(32, value), ANY_TENSOR: np.full((64, 32), value)})
    status, out, err = finish(start("--model", folder, "Hello"))
    assert status == 1 and not out.strip()
    assert_one_line(err, "not finite" if value == 3e38 else ANY_TENSOR)


@pytest.fixture
def shards(tmp_path):
    return make_random_model(CLI_CONFIG, tmp_path / "sharded", "float32", 3)


def edit_weight_map(path, changes):
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | changes
    edit_json(index, {"weight_map": {key: value for key, value in weight_map.items() if value is not REMOVED}})


def test_shards_work(shards):
    assert len(list(shards.glob("*.safetensors"))) == 3
    assert qwen3.load_model(shards).config.num_hidden_layers == 2


def test_missing_shard(shards, capfd):
    (shards / "model-00002-of-00003.safetensors").unlink()
    refuse_folder(capfd, shards, "model-00002-of-00003.safetensors", "missing")


def test_dangling_shard(shards, capfd):
    """What is left in the hub's cache when a blob was deleted."""
    (shards / "model-00002-of-00003.safetensors").unlink()
    (shards / "model-00002-of-00003.safetensors").symlink_to("../../blobs/gone")
    refuse_folder(capfd, shards, "model-00002-of-00003.safetensors")


def test_truncated_shard(shards, capfd):
    file = shards / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refuse_folder(capfd, shards, "model-00003-of-00003.safetensors")


def test_missing_index(shards, capfd):
    (shards / "model.safetensors.index.json").unlink()
    refuse_folder(capfd, shards, "model.safetensors.index.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"{}", b'{"weight_map": null}', b'{"weight_map": {}}', b'{"weight_map": []}',
                                     b'{"weight_map": "model.safetensors"}'], ids=repr)
def test_broken_index(shards, capfd, content):
    (shards / "model.safetensors.index.json").write_bytes(content)
    refuse_folder(capfd, shards, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["../model-00001-of-00003.safetensors", "/etc/passwd", "/tmp/x.safetensors", "sub/x.safetensors", "..", ".", "", "config.json",
                                  "..\\x.safetensors/..", 5, None, True, ["model-00001-of-00003.safetensors"], {"a": 1}, "x" * 300 + ".safetensors",
                                  "\0.safetensors", "a\nb.safetensors", "\ud800.safetensors"], ids=lambda name: repr(name)[:30])
def test_index_with_a_bad_file_name(shards, capfd, name):
    edit_weight_map(shards, {"model.norm.weight": name})
    refuse_folder(capfd, shards, str(shards), *(["index.json"] if not str(name).endswith(".safetensors") else []))


def test_path_out_of_the_folder_is_not_followed(shards, tmp_path):
    """Even if the file that it leads to is sound."""
    name = "model-00001-of-00003.safetensors"
    (shards / name).rename(tmp_path / name)
    edit_weight_map(shards, {key: f"../{name}" for key, value in json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"].items()
                             if value == name})
    assert_one_line(message_of(qwen3.load_model, shards), f"../{name}", "index.json")


def test_tensor_in_two_shards(shards, capfd):
    header, data = read_safetensors(shards / "model-00001-of-00003.safetensors")
    name = next(name for name in header if name != "__metadata__")
    tensor = np.frombuffer(data[slice(*header[name]["data_offsets"])], "<f4").reshape(header[name]["shape"])
    with_tensors(shards / "model-00002-of-00003.safetensors", {name: tensor})
    refuse_folder(capfd, shards, name, "model-00002-of-00003.safetensors")


def test_tensor_that_no_shard_has(shards, capfd):
    name = "model.norm.weight"
    file = shards / json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"][name]
    with_tensors(file, {name: None})
    refuse_folder(capfd, shards, name)


def test_unneeded_tensor_that_no_shard_has(shards, capfd):
    """The index and the shards are then not of one model, whether the tensor is needed or not."""
    edit_weight_map(shards, {"model.layers.0.self_attn.q_proj.bias": "model-00001-of-00003.safetensors"})
    refuse_folder(capfd, shards, "model.layers.0.self_attn.q_proj.bias")


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer, template, generation_config.json
# ---------------------------------------------------------------------------------------------------------------------

def test_no_tokenizer(folder, capfd):
    (folder / "tokenizer.json").unlink()
    refuse_folder(capfd, folder, "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000], ids=lambda content: repr(content[:10]))
def test_broken_tokenizer(folder, capfd, name, content):
    (folder / name).write_bytes(content)
    refuse_folder(capfd, folder, name)


def test_cut_tokenizer(folder, capfd):
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content[:len(content) // 2])
    refuse_folder(capfd, folder, "tokenizer.json")


def test_panic_in_the_tokenizer(folder, capfd):
    """The Rust library prints its panic on stderr by itself; the line that the user needs follows."""
    edit_json(folder / "tokenizer.json", {"post_processor": {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<none>", "type_id": 0}}]}})
    assert qwen3_cli.main(["--model", str(folder), "Hello"]) == 1
    assert "tokenizer.json" in capfd.readouterr().err.splitlines()[-1]


def test_tokenizer_of_a_larger_model(tmp_path, capfd):
    """Ids beyond the embedding are refused, not wrapped around."""
    path = make_random_model(CLI_CONFIG | {"vocab_size": 10}, tmp_path / "model", "float32")
    assert_cli_refuses(capfd, ["--model", path, "Hello"], "10", "token")


@pytest.mark.parametrize("template", [
    "{{ raise_exception('no\nway') }}", "{{ messages[0].nothing.at.all }}", "{{ 1 / 0 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% if %}", "{{", "{% nosuchtag %}", "{% include 'other' %}", "{% for i in range(10**9) %}x{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ lipsum.__globals__['os'].popen('echo escaped').read() }}",
    "{{ cycler.__init__.__globals__.os.system('echo escaped') }}", "{{ '{0.__class__}'.format(1) }}", "{{ messages.append(1) }}",
    "{{ '\ud83d'.encode() }}",
], ids=lambda template: ascii(template)[:40])
def test_template_that_fails_or_tries_to_escape(folder, capfd, template):
    (folder / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
    status, out, err = cli(capfd, "--model", folder, "Hello")
    assert status == 1 and not out.strip() and "escaped" not in out
    assert_one_line(err, "chat_template.jinja")


@pytest.mark.parametrize("template", ["", "{# nothing #}", "{{ '\\ud800' }}"])
def test_template_whose_text_is_no_prompt(folder, capfd, template):
    (folder / "chat_template.jinja").write_text(template)
    assert_cli_refuses(capfd, ["--model", folder, "Hello"])


def test_no_template(folder, capfd):
    edit_json(folder / "tokenizer_config.json", {"chat_template": REMOVED})
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], "template", "--raw")
    assert cli(capfd, "--model", folder, "--raw", "--max-tokens", 2, "Hello")[0] == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "nul", "[" * 100_000], ids=lambda content: content[:10])
def test_generation_config_is_no_json_object(folder, capfd, content):
    (folder / "generation_config.json").write_text(content)
    refuse_folder(capfd, folder, "generation_config.json")


@pytest.mark.parametrize("changes", [
    {"temperature": "hot"}, {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": []}, {"temperature": HUGE_INT},
    {"top_k": -3}, {"top_k": 2.5}, {"top_k": "50"}, {"top_k": True}, {"top_k": math.nan}, {"top_p": 0}, {"top_p": 1.5},
    {"top_p": -0.1}, {"top_p": {}}, {"min_p": 2}, {"min_p": -1}, {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": "x"},
    {"presence_penalty": math.inf}, {"max_new_tokens": 0}, {"max_new_tokens": -5}, {"max_new_tokens": 1.5}, {"max_new_tokens": "20"},
    {"max_new_tokens": True}, {"eos_token_id": "x"}, {"eos_token_id": -1}, {"eos_token_id": [1, None]}, {"eos_token_id": True}, {"eos_token_id": 2.0},
    {"do_sample": "false"}, {"do_sample": []}, {"do_sample": 2},
], ids=lambda changes: str(changes)[:40])
def test_generation_config_values(folder, capfd, changes):
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True} | changes))
    refuse_folder(capfd, folder, "generation_config.json", *changes)


# ---------------------------------------------------------------------------------------------------------------------
# The library: forward, generate, generate_batch, KVCache
# ---------------------------------------------------------------------------------------------------------------------

BAD_IDS = {
    "empty": ([], ["empty"]), "empty array": (np.zeros(0, np.int64), ["empty"]), "empty row": ([[]], ["empty"]),
    "out of range": ([1, 320, 2], ["320"]), "far out of range": ([2**62], [str(2**62)]), "beyond 64 bits": ([2**80], []), "huge": ([HUGE_INT], []),
    "negative": ([1, -1], ["-1"]), "float": ([1.0, 2.0], ["float"]), "float array": (np.ones(3, np.float32), ["float32"]), "nan": ([math.nan], ["float"]),
    "bool": ([True, False], ["bool"]), "strings": (["a", "b"], []), "string": ("abc", []), "bytes": (b"abc", []), "none": (None, []), "nones": ([None], []),
    "a number": (5, []), "3-d": (np.zeros((1, 2, 3), np.int64), ["shape"]), "ragged": ([[1, 2], [3]], []), "deeply ragged": ([1, [2, [3]]], []),
    "a set": ({1, 2}, []), "a generator": ((i for i in (1, 2)), []), "mixed": ([1, "a"], []),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_token_ids(model, case):
    """forward, generate and generate_batch refuse the same ids, before anything is computed."""
    ids, words = BAD_IDS[case]
    cache = qwen3.KVCache(model.config)
    assert_one_line(message_of(qwen3.forward, model, ids, cache), *words)
    assert cache.length == 0
    assert_one_line(message_of(qwen3.generate, model, ids), *words)
    assert_one_line(message_of(qwen3.generate_batch, model, [[1, 2], ids]), *words)


def test_generate_takes_one_sequence(model):
    """A batch given to `generate` must not lose its other rows in silence."""
    message_of(qwen3.generate, model, [[1, 2], [3, 4]])
    message_of(qwen3.generate_batch, model, [[[1, 2], [3, 4]]])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint64])
def test_integers_of_any_width_are_ids(model, dtype):
    expected = list(qwen3.generate(model, [1, 2, 100], 4, temperature=0, eos_token_ids=()))
    assert list(qwen3.generate(model, np.array([1, 2, 100], dtype), 4, temperature=0, repetition_penalty=1.0, eos_token_ids=())) == expected


def test_prompt_longer_than_the_context(model):
    for n in (512, 513, 5000):
        assert_one_line(message_of(qwen3.generate, model, [1] * n), str(n), "512")
    assert_one_line(message_of(qwen3.generate_batch, model, [[1, 2], [1] * 600]), "600", "512")
    assert len(list(qwen3.generate(model, [1] * 510, 50, eos_token_ids=()))) == 2  # the context ends it
    assert_one_line(message_of(qwen3.forward, model, [1] * 513, qwen3.KVCache(model.config)), "513", "512")


def test_cache_too_small(model):
    cache = qwen3.KVCache(model.config, 4)
    assert_one_line(message_of(qwen3.forward, model, [1] * 5, cache), "5", "4")
    assert cache.length == 0
    before = qwen3.forward(model, [1, 2, 3], cache)
    assert_one_line(message_of(qwen3.forward, model, [4, 5], cache), "5", "4")
    assert cache.length == 3  # what was refused has changed nothing
    cache.truncate(0)
    assert np.array_equal(qwen3.forward(model, [1, 2, 3], cache), before)


@pytest.mark.parametrize("length", [0, -1])
def test_cache_length(model, length):
    assert_one_line(message_of(qwen3.KVCache, model.config, length), str(length))


@pytest.mark.parametrize("length", [-1, 4, 10**9])
def test_truncate_beyond_the_cache(model, length):
    cache = qwen3.KVCache(model.config)
    qwen3.forward(model, [1, 2, 3], cache)
    assert_one_line(message_of(cache.truncate, length), str(length))
    assert cache.length == 3


def test_batch_that_is_not_the_caches(model):
    assert_one_line(message_of(qwen3.forward, model, [[1, 2], [3, 4]], qwen3.KVCache(model.config)), "1", "2")
    assert_one_line(message_of(qwen3.forward, model, [1, 2], qwen3.KVCache(model.config, 10, [0, 0])), "1", "2")


BAD_ARGUMENTS = [("max_new_tokens", value) for value in (0, -1, 1.5, "5", math.nan)]
BAD_ARGUMENTS += [("temperature", value) for value in (-1, -0.001, math.nan, math.inf, "1", True, HUGE_INT)]
BAD_ARGUMENTS += [("top_k", value) for value in (-1, 2.5, math.nan, "5")] + [("top_p", value) for value in (0, -1, 1.01, math.nan, "1")]
BAD_ARGUMENTS += [("min_p", value) for value in (-0.1, 1.01, math.nan, "0")] + [("repetition_penalty", value) for value in (0, -1, math.inf, "x")]
BAD_ARGUMENTS += [(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (math.nan, math.inf, "x")]
BAD_ARGUMENTS += [("seed", value) for value in (-1, 1.5, "x")] + [("eos_token_ids", value) for value in ("x", ["x"], [1.5])]


@pytest.mark.parametrize("name, value", BAD_ARGUMENTS, ids=lambda value: repr(value)[:20])
def test_arguments_of_generate(model, name, value):
    assert_one_line(message_of(qwen3.generate, model, [1, 2], **{name: value}), name)
    assert_one_line(message_of(qwen3.generate_batch, model, [[1, 2]], **{name: value}), name)


def test_one_end_token_without_a_list(model):
    """config.json has it so; a caller may too."""
    first = next(qwen3.generate(model, [1, 2], temperature=0, eos_token_ids=()))
    tokens = works_or_refused(lambda: list(qwen3.generate(model, [1, 2], 5, temperature=0, eos_token_ids=first)))
    assert not tokens  # either way nothing may follow the end


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    (["--top-k", "-3"], ["top", "-3"]), (["--top-k", "2.5"], ["top-k", "2.5"]), (["--top-k", "x"], ["top-k", "x"]), (["--top-k", str(HUGE_INT)], []),
    (["--temperature", "nan"], ["temperature", "nan"]), (["--temperature", "-1"], ["temperature", "-1"]), (["--temperature", "inf"], ["temperature", "inf"]),
    (["--temperature=-inf"], ["temperature", "-inf"]), (["--temperature", "abc"], ["temperature", "abc"]), (["--temperature", ""], ["temperature"]),
    (["--temperature", "1e999"], ["temperature"]), (["--temperature"], ["temperature"]),
    (["--top-p", "0"], ["top", "0"]), (["--top-p", "1.5"], ["top", "1.5"]), (["--top-p", "nan"], ["top", "nan"]), (["--min-p", "2"], ["min", "2"]),
    (["--min-p", "-1"], ["min", "-1"]), (["--max-tokens", "0"], ["max", "0"]), (["--max-tokens", "-1"], ["max", "-1"]), (["--max-tokens", "1.5"], ["max", "1.5"]),
    (["--seed", "-1"], ["seed", "-1"]), (["--seed", "x"], ["seed", "x"]), (["--seed", "9" * 5000], ["seed"]), (["--repetition-penalty", "0"], ["repetition"]),
    (["--presence-penalty", "inf"], ["presence"]), (["--frequency-penalty", "nan"], ["frequency"]), (["--no-such-option"], ["--no-such-option"]),
    (["--no-such\noption"], ["--no-such"]), (["more", "words"], ["words"]), (["--raw", "--system", "Be brief."], ["--raw", "--system"]),
    (["--raw", "--think"], ["--raw", "--think"]), (["--raw", "--no-think"], ["--raw", "--no-think"]), (["--stats=1"], ["--stats"]),
]


@pytest.mark.parametrize("options, words", BAD_OPTIONS, ids=lambda value: " ".join(value)[:40])
def test_options(pristine, capfd, options, words):
    if options == ["--top-k", str(HUGE_INT)]:  # larger than any vocabulary, so all tokens stay: as good as refusing it
        status, _, err = cli(capfd, "--model", pristine, "--max-tokens", 2, *options, "--", "Hello")
        assert (status, err) == (0, "") or (status == 1 and assert_one_line(err, "top") is None)
    elif options == ["--temperature"]:
        assert_cli_refuses(capfd, ["--model", pristine, "Hello", *options], *words)
    else:
        assert_cli_refuses(capfd, ["--model", pristine, *options, "--", "Hello"], *words)


@pytest.mark.parametrize("options", [["--max-tokens", "0"], ["--seed", "-1"], ["--top-k", "-3"], ["--temperature", "nan"]], ids=" ".join)
def test_options_are_checked_before_the_model_is_loaded(pristine, capfd, monkeypatch, options):
    def load(*_):
        pytest.fail("a large model would have been loaded for nothing")
    monkeypatch.setattr(qwen3, "load_weights", load)
    monkeypatch.setattr(qwen3_cli, "load_model", load)
    assert_cli_refuses(capfd, ["--model", pristine, *options, "Hello"], options[1])


def test_no_prompt(pristine, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert_cli_refuses(capfd, ["--model", pristine], "prompt")


@pytest.mark.parametrize("raw", [[], ["--raw"]])
@pytest.mark.parametrize("prompt", ["", " ", "\n\t \u3000"])
def test_empty_prompt(pristine, capfd, prompt, raw):
    assert_cli_refuses(capfd, ["--model", pristine, *raw, prompt], "prompt", "empty")


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_prompt_longer_than_the_context_on_the_command_line(folder, capfd, raw):
    edit_json(folder / "config.json", {"max_position_embeddings": 8})
    assert_cli_refuses(capfd, ["--model", folder, *raw, "one two three four five six seven eight nine ten"], "prompt", "8")


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a warning would be one more line on stderr
@pytest.mark.parametrize("options", [
    ["--temperature", "1e-50"], ["--temperature", "1e-40"], ["--temperature", "1e-38"], ["--temperature", "1e-30"], ["--temperature", "1e39"],
    ["--temperature", "1e300"], ["--temperature", "1e-400"], ["--top-p", "1e-50"], ["--top-p", "1e-300"], ["--top-p", "0.9999999999999999"],
    ["--min-p", "1e-320"], ["--min-p", "1"], ["--repetition-penalty", "1e-50"], ["--repetition-penalty", "1e300"], ["--presence-penalty", "1e300"],
    ["--presence-penalty=-1e300"], ["--frequency-penalty", "1e300"], ["--frequency-penalty=-3e38"], ["--top-k", "1"], ["--top-k", "1000000000000"],
    ["--max-tokens", "1" + "0" * 30, "--temperature", "1e-45"], ["--seed", "1" + "0" * 300],
], ids=" ".join)
def test_extreme_options(folder, capfd, options):
    """Within the allowed range, but at its end: an answer, or one line that says why not."""
    edit_json(folder / "config.json", {"max_position_embeddings": 64})
    status, out, err = cli(capfd, "--model", folder, "--raw", "--seed", 1, "--max-tokens", 20, *options, "Hello")
    if status:
        assert status == 1
        assert_one_line(err)
    else:
        assert err == "" and out.endswith("\n")


def test_interrupt_while_loading(pristine, capfd, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(qwen3, "load_config", interrupt)
    status, out, err = cli(capfd, "--model", pristine, "Hello")
    assert status == 130 and not out.strip()
    assert_one_line(err)


def test_too_little_memory(pristine, capfd, monkeypatch):
    def fail(*_):
        raise MemoryError
    monkeypatch.setattr(qwen3, "load_config", fail)
    assert_cli_refuses(capfd, ["--model", pristine, "Hello"], "memory")


# ---------------------------------------------------------------------------------------------------------------------
# Processes: what the system can do to one
# ---------------------------------------------------------------------------------------------------------------------

def endless(folder, *options, **popen):
    """A process that answers for minutes if nobody stops it."""
    return start("--model", folder, "--raw", "--seed", 1, *options, "Hello", **popen)


def test_process_refuses_with_status_and_line(tmp_path):
    status, out, err = finish(start("--model", tmp_path / "nowhere", "Hello"))
    assert status == 1 and out == b""
    assert_one_line(err, "qwen3.py", "nowhere")


def test_ctrl_c_in_mid_answer(pristine):
    process = endless(pristine)
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process, 20)
    assert status == 130
    assert_one_line(err)
    assert out.endswith(b"\n")  # the shell's prompt begins on a line of its own


def test_stdout_closed_in_mid_answer(pristine):
    """As by `| head -1`."""
    process = endless(pristine)
    assert process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(20) not in (0, -signal.SIGPIPE)
    assert_one_line(err, "stdout")
    process.stderr.close()


def test_stdout_closed_by_head(pristine):
    script = 'set -o pipefail; "$0" "$@" | head -c 20 > /dev/null'
    arguments = ["bash", "-c", script, *command("--model", pristine, "--raw", "--seed", 1, "Hello")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert result.returncode not in (0, 130)
    assert_one_line(result.stderr)


def test_stdout_not_open_at_all(pristine):
    """As by `>&-`."""
    process = endless(pristine, "--max-tokens", 5, stdout=None, prepare=lambda: os.close(1))
    status, _, err = finish(process)
    assert status not in (0, 120)
    assert_one_line(err, "stdout")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, the disk that is always full")
@pytest.mark.parametrize("options", [[], ["--stats", "--max-tokens", "2"]], ids=["", "stats"])
def test_disk_full(pristine, options):
    with open("/dev/full", "w") as full:
        status, _, err = finish(endless(pristine, *options, stdout=full))
    assert status not in (0, 120)
    assert_one_line(err, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["prompt", "system", "model"])
def test_arguments_that_are_no_utf8(pristine, where):
    values = {"prompt": b"Hello", "system": b"Be brief.", "model": os.fsencode(pristine)} | {where: b"caf\xe9 \xff"}
    process = start(*map(os.fsencode, command("--max-tokens", 2, "--model")), values["model"], b"--system", values["system"], values["prompt"])
    status, out, err = finish(process)
    assert status == 1 and not out.strip()
    assert_one_line(err, "caf" if where == "model" else "surrogate")


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1"])
def test_stdout_that_cannot_show_everything(pristine, encoding):
    process = endless(pristine, "--max-tokens", 200, env={"PYTHONIOENCODING": encoding})
    status, out, err = finish(process)
    assert (status, err) == (0, "") and b"?" in out and len(out) > 100


def test_error_about_characters_that_stderr_cannot_show(tmp_path):
    status, _, err = finish(start("--model", tmp_path / "北京", "Hello", env={"PYTHONIOENCODING": "ascii"}))
    assert status == 1
    assert_one_line(err, "no such folder")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc, where nobody can write")
def test_working_directory_that_cannot_be_written(pristine):
    with pytest.raises(OSError):
        Path("/proc/self/x").write_text("x")
    status, out, err = finish(endless(pristine, "--max-tokens", 5, cwd="/proc/self"))
    assert (status, err) == (0, "") and out.strip()


def test_model_folder_that_is_left_unchanged(folder):
    """Nothing is written beside the model, so that it may lie on a read-only disk."""
    before = {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()}
    assert finish(endless(folder, "--max-tokens", 5))[0] == 0
    assert {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()} == before


# ---------------------------------------------------------------------------------------------------------------------
# Anything at all: only success, or one line
# ---------------------------------------------------------------------------------------------------------------------

def patiently(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def workplace():
    """A new folder for one example (hypothesis would share pytest's tmp_path among all)."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


NUMERALS = st.one_of(st.integers(-3, 600), st.sampled_from([2**31 - 1, 2**31, 2**63, -(2**63), HUGE_INT]), st.floats())
JSON_VALUES = st.recursive(st.none() | st.booleans() | NUMERALS | st.text(max_size=5) | st.sampled_from(["default", "yarn", "silu", "full_attention"]),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=4)
ROPE_VALUES = st.fixed_dictionaries({}, optional={
    "rope_type": st.sampled_from(["default", "yarn", "linear"]) | JSON_VALUES, "type": st.sampled_from(["yarn"]) | JSON_VALUES,
    **{key: NUMERALS | JSON_VALUES for key in ("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "x")}})
CONFIG_CHANGES = st.dictionaries(st.sampled_from(sorted(BASE)) | st.text(max_size=8), JSON_VALUES, max_size=3) | st.fixed_dictionaries(
    {"rope_scaling": ROPE_VALUES}, optional={"rope_theta": NUMERALS}) | st.fixed_dictionaries({"rope_parameters": ROPE_VALUES})


@patiently(500)
@given(CONFIG_CHANGES)
def test_any_config(changes):
    """What is accepted can also be used: the context length, the frequencies of RoPE, a cache."""
    with workplace() as path:
        (path / "config.json").write_text(json.dumps(BASE | changes))
        config = works_or_refused(qwen3.load_config, path)
        if config is None:
            return
    assert all(isinstance(getattr(config, key), int) and getattr(config, key) > 0 for key in INTEGERS)
    assert config.context_length >= config.max_position_embeddings
    if config.head_dim < 1000:
        with np.errstate(all="ignore"):
            frequencies, factor = qwen3.rope_frequencies(config)
        assert frequencies.shape == (config.head_dim // 2,) and frequencies.dtype == np.float32 and isinstance(factor, float)


@patiently(200)
@given(name=st.sampled_from(["generation_config.json", "config.json", "tokenizer_config.json", "tokenizer.json"]), data=st.data())
def test_any_bytes_in_a_json_file(pristine, name, data):
    """A few bytes of a file changed: the model loads and answers, or one line says why not."""
    content = bytearray((pristine / name).read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    with workplace() as path:
        for file in pristine.iterdir():
            os.link(file, path / file.name)
        (path / name).unlink()
        (path / name).write_bytes(content)

        def answer():
            loaded = qwen3.load_model(path)
            prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
            return list(qwen3.generate(loaded, loaded.tokenizer.encode(prompt), 1, seed=1))

        with np.errstate(all="ignore"):
            works_or_refused(answer)


@pytest.fixture(scope="module")
def small_weights(tmp_path_factory):
    """The bytes of a float32 checkpoint of one layer, and its config."""
    path = make_random_model(BASE | {"num_hidden_layers": 1, "vocab_size": 20}, tmp_path_factory.mktemp("weights") / "model", "float32")
    return (path / "model.safetensors").read_bytes(), qwen3.load_config(path)


@patiently(500)
@given(data=st.data())
def test_any_bytes_in_a_safetensors_header(small_weights, data):
    content, config = bytearray(small_weights[0]), small_weights[1]
    header_end = 8 + int.from_bytes(content[:8], "little")
    for at in data.draw(st.lists(st.integers(0, header_end - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.sampled_from(b'0123456789"{}[],:.-eF \x00\xff') | st.integers(0, 255))
    with workplace() as path:
        (path / "model.safetensors").write_bytes(content)
        weights = works_or_refused(qwen3.load_weights, path, config)
        if weights is not None:
            assert weights["embed_tokens"].shape == (20, 32) and weights["layers"][0]["gate_proj"].dtype == np.float32


@patiently(200)
@given(data=st.data())
def test_safetensors_cut_anywhere(small_weights, data):
    content, config = small_weights
    with workplace() as path:
        (path / "model.safetensors").write_bytes(content[:data.draw(st.integers(0, len(content) - 1))])
        message_of(qwen3.load_weights, path, config)


IDS = st.lists(st.integers(0, 319), min_size=1, max_size=6)
ANYTHING = st.one_of(st.none(), st.booleans(), NUMERALS, st.text(max_size=3), st.lists(st.integers(-2, 400) | st.floats() | st.none(), max_size=3))
POSITIVE = st.floats(1e-3, 1e3) | st.floats(0, allow_nan=False) | st.integers(0, 10**40)
ARGUMENTS = st.fixed_dictionaries({"max_new_tokens": st.integers(1, 4) | st.integers(-1, 4) | st.sampled_from([math.nan, "x", 1.5])}, optional={
    **{name: POSITIVE | NUMERALS | ANYTHING for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")},
    **{name: st.floats(0, 1) | NUMERALS | ANYTHING for name in ("top_p", "min_p")},
    "top_k": st.integers(0, 400) | ANYTHING, "seed": st.integers(0, 2**70) | ANYTHING,
    "eos_token_ids": st.lists(st.integers(0, 319), max_size=4) | ANYTHING})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@patiently(400)
@given(ids=IDS | st.lists(st.lists(st.integers(-1, 320), max_size=3), max_size=3) | ANYTHING, arguments=ARGUMENTS)
def test_any_arguments_to_generate(model, ids, arguments):
    tokens = works_or_refused(lambda: list(qwen3.generate(model, ids, **arguments)))
    if tokens is not None:
        assert all(type(token) is int and 0 <= token < 320 for token in tokens) and len(tokens) <= arguments["max_new_tokens"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@patiently(400)
@given(ids=IDS, arguments=st.fixed_dictionaries({"max_new_tokens": st.integers(1, 4), "seed": st.integers(0, 9)}, optional={
    "temperature": POSITIVE, "top_k": st.integers(0, 400), "top_p": st.floats(0, 1, exclude_min=True), "min_p": st.floats(0, 1),
    "repetition_penalty": POSITIVE, "presence_penalty": st.floats(allow_nan=False, allow_infinity=False),
    "frequency_penalty": st.floats(-2, 2), "eos_token_ids": st.lists(st.integers(0, 319), max_size=4)}))
def test_arguments_within_their_ranges(model, ids, arguments):
    tokens = works_or_refused(lambda: list(qwen3.generate(model, ids, **arguments)))
    if tokens is not None:
        assert all(type(token) is int and 0 <= token < 320 for token in tokens) and len(tokens) <= 4
