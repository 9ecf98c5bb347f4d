"""qwen3_io/checkpoint.py, the settings: each field of config.json and generation_config.json is right, or named."""
import json
import math
import resource
import shutil

import pytest

import qwen3
from configs import BASE, INTEGERS, SHARED, YARN, transformers_5
from helpers import (HUGE_INT, REMOVED, assert_one_line, edit_json, finish, message_of, random_ids, refuse_folder,
                     start, works_or_refused)
from make_random_model import make_random_model
from qwen3_io.checkpoint import read_generation_config

# ----------------------------------------------------------------------------------------------------------------------
# config.json
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"not json", b"\xff\xfe{", b"[1]", b"3", b"null", b'"x"',
                                     b"[" * 100_000, b"{}" * 2, b"9" * 5000],
                         ids=lambda content: repr(content[:10]))
def test_config_is_no_json_object(folder, capfd, content):
    (folder / "config.json").write_bytes(content)
    refuse_folder(capfd, folder, "config.json")


def config_message(tmp_path, changes, base=BASE):
    (tmp_path / "config.json").write_text(json.dumps(base))
    edit_json(tmp_path / "config.json", changes)
    return message_of(qwen3.load_config, tmp_path)


NUMBERS = ("rms_norm_eps", "rope_theta")
NOT_POSITIVE = [REMOVED, None, True, 0, -1, -(2**40), "16", [], [16], {}, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", [*NOT_POSITIVE, 1.5, 16.0, 2**31, HUGE_INT],
                         ids=lambda value: "missing" if value is REMOVED else repr(value)[:20])
@pytest.mark.parametrize("key", INTEGERS)
def test_config_integer(tmp_path, key, value):
    assert_one_line(config_message(tmp_path, {key: value}), "config.json", key)


@pytest.mark.parametrize("value", [*NOT_POSITIVE, HUGE_INT],
                         ids=lambda value: "missing" if value is REMOVED else repr(value)[:20])
@pytest.mark.parametrize("key", NUMBERS)
def test_config_number(tmp_path, key, value):
    assert_one_line(config_message(tmp_path, {key: value}), "config.json", key)


@pytest.mark.parametrize("value", [*NOT_POSITIVE, HUGE_INT],
                         ids=lambda value: "missing" if value is REMOVED else repr(value)[:20])
def test_config_rope_theta_in_the_newer_dialect(tmp_path, value):
    rope = {"rope_type": "default"} | ({} if value is REMOVED else {"rope_theta": value})
    assert_one_line(config_message(tmp_path, {"rope_parameters": rope}, transformers_5(BASE)), "config.json",
                    "rope_theta")


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
    "model_type of MoE": ({"model_type": "qwen3_moe"}, ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]),
    "model_type is a list": ({"model_type": ["qwen3"]}, ["model_type"]),
    "gelu": ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    "no activation": ({"hidden_act": None}, ["hidden_act", "None"]),
    "attention_bias": ({"attention_bias": True}, ["attention_bias", "True"]),
    "attention_bias is a string": ({"attention_bias": "false"}, ["attention_bias"]),
    "sliding window": ({"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window", "True"]),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
                       ["layer_types", "sliding_attention"]),
    "layer_types is a string": ({"layer_types": "full_attention"}, ["layer_types"]),
    "layer_types is a number": ({"layer_types": 3}, ["layer_types"]),
    "layer_types holds lists": ({"layer_types": [["full_attention"]]}, ["layer_types"]),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope", "linear"]),
    "dynamic rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope", "dynamic"]),
    "llama3 rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
                    ["rope", "llama3"]),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
                 ["rope", "longrope"]),
    "rope type is a list": ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope", "yarn"]),
    "rope type is null": ({"rope_scaling": {"rope_type": None}}, ["rope", "None"]),
    "rope is a string": ({"rope_scaling": "yarn"}, ["rope", "yarn"]),
    "rope is a list": ({"rope_scaling": [4.0]}, ["rope", "4.0"]),
    "rope is true": ({"rope_scaling": True}, ["rope", "True"]),
    "default rope with a factor": ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, ["rope", "factor"]),
    "partial rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}},
                     ["partial_rotary_factor"]),
    "partial rope outside": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    "YaRN with mscale": ({"rope_scaling": YARN | {"mscale": 1.0}}, ["mscale"]),
    "YaRN not truncated": ({"rope_scaling": YARN | {"truncate": False}}, ["truncate"]),
    "YaRN with something": ({"rope_scaling": YARN | {"surprise": 7}}, ["surprise", "7"]),
    "YaRN without factor": ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
                            ["factor"]),
    "YaRN, factor null": ({"rope_scaling": YARN | {"factor": None}}, ["factor", "None"]),
    "YaRN, factor 0": ({"rope_scaling": YARN | {"factor": 0}}, ["factor", "0"]),
    "YaRN, factor nan": ({"rope_scaling": YARN | {"factor": math.nan}}, ["factor", "nan"]),
    "YaRN, factor a string": ({"rope_scaling": YARN | {"factor": "4"}}, ["factor", "4"]),
    "YaRN, factor huge": ({"rope_scaling": YARN | {"factor": HUGE_INT}}, ["factor"]),
    "YaRN, length negative": ({"rope_scaling": YARN | {"original_max_position_embeddings": -1}},
                              ["original_max_position_embeddings", "-1"]),
    "YaRN, length a list": ({"rope_scaling": YARN | {"original_max_position_embeddings": [64]}},
                            ["original_max_position_embeddings"]),
    "YaRN, beta_fast": ({"rope_scaling": YARN | {"beta_fast": "32"}}, ["beta_fast", "32"]),
    "YaRN, beta_slow": ({"rope_scaling": YARN | {"beta_slow": 0}}, ["beta_slow", "0"]),
    "YaRN, attention_factor": ({"rope_scaling": YARN | {"attention_factor": -1.0}}, ["attention_factor", "-1"]),
    "quantized": ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq"]),
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
    {"rms_norm_eps": 1e300}, {"rms_norm_eps": 1e-300}, {"rms_norm_eps": 10**39}, {"rope_theta": 1e300},
    {"rope_theta": 1e-300}, {"rope_theta": 10**39}, {"rope_theta": 1}, {"rope_theta": 0.5}, {"head_dim": 2**30},
    {"vocab_size": 2**31 - 1}, {"max_position_embeddings": 2**31 - 1}, {"rope_scaling": YARN | {"factor": 1e308}},
    {"rope_scaling": YARN | {"factor": 1e-308}}, {"rope_scaling": YARN | {"factor": 1e300}},
    {"rope_scaling": YARN | {"original_max_position_embeddings": 1e308}},
    {"rope_scaling": YARN | {"original_max_position_embeddings": 1e-308}},
    {"rope_scaling": YARN | {"beta_fast": 1e308, "beta_slow": 1e-308}},
    {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 1}}, {"rope_scaling": YARN | {"attention_factor": 1e300}},
    {"rope_scaling": YARN, "rope_theta": 1}, {"rope_scaling": YARN, "rope_theta": 1e300},
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
    none = pytest.param(None, marks=pytest.mark.skip(reason=f"no official configs at {SHARED / where}"))
    return sorted((SHARED / where).glob("*.json")) or [none]


OFFICIAL = {"0.6B": (1024, 3072, 28, 16, True), "1.7B": (2048, 6144, 28, 16, True), "4B": (2560, 9728, 36, 32, True),
            "8B": (4096, 12288, 36, 32, False), "14B": (5120, 17408, 40, 40, False),
            "32B": (5120, 25600, 64, 64, False)}

EXPERTS = {"A3B": (128, 768), "A22B": (128, 1536), "A35B": (160, 2560)}  # num_experts, moe_intermediate_size


@pytest.mark.parametrize("file", config_files("configs") + config_files("configs_resaved"),
                         ids=lambda file: getattr(file, "stem", None))
def test_official_configs(tmp_path, file):
    """Every size loads with its sizes, in every dialect."""
    shutil.copy(file, tmp_path / "config.json")
    raw = json.loads(file.read_text())
    if "A3B" in file.stem or "A22B" in file.stem or "A35B" in file.stem:
        config = qwen3.load_config(tmp_path)
        experts, inner = next(sizes for size, sizes in EXPERTS.items() if size in file.stem)
        assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (experts, 8, inner)
        assert config.sparse_layers == tuple(range(raw["num_hidden_layers"])) and config.norm_topk_prob
        assert not config.tie_word_embeddings
    else:
        hidden, inner, layers, heads, tied = next(sizes for size, sizes in OFFICIAL.items()
                                                  if size in file.stem.replace(".transformers", "-").split("-"))
        config = qwen3.load_config(tmp_path)
        assert (config.hidden_size, config.intermediate_size) == (hidden, inner)
        assert (config.num_hidden_layers, config.num_attention_heads) == (layers, heads)
        assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (8, 128, 1e-6)
        assert config.tie_word_embeddings == tied
        assert (config.vocab_size, config.eos_token_ids) == (raw["vocab_size"], (raw["eos_token_id"],))
        assert config.max_position_embeddings == raw["max_position_embeddings"]
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


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no official configs at {SHARED}")
def test_a_base_model_continues_greedily_and_ends_on_its_own_token(tmp_path):
    """<|endoftext|>, 151643, in config.json as in generation_config.json; instruct models end on <|im_end|> as well."""
    for name in ("Qwen3-0.6B-Base", "Qwen3-30B-A3B-Base"):
        shutil.copy(SHARED / f"configs/{name}.json", tmp_path / "config.json")
        assert qwen3.load_config(tmp_path).eos_token_ids == (151643,)
    sampling, ends, longest = read_generation_config(SHARED / "tokenizer_base")
    assert (sampling["temperature"], ends, longest) == (0, (151643,), 2048)
    assert read_generation_config(SHARED / "tokenizer")[1] == (151645, 151643)


# ----------------------------------------------------------------------------------------------------------------------
# generation_config.json
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("content", ["", "{", "[]", "3", "nul", "[" * 100_000], ids=lambda content: content[:10])
def test_generation_config_is_no_json_object(folder, capfd, content):
    (folder / "generation_config.json").write_text(content)
    refuse_folder(capfd, folder, "generation_config.json")


@pytest.mark.parametrize("changes", [
    {"temperature": "hot"}, {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf},
    {"temperature": []}, {"temperature": HUGE_INT}, {"top_k": -3}, {"top_k": 2.5}, {"top_k": "50"}, {"top_k": True},
    {"top_k": math.nan}, {"top_p": 0}, {"top_p": 1.5}, {"top_p": -0.1}, {"top_p": {}}, {"min_p": 2}, {"min_p": -1},
    {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": "x"}, {"presence_penalty": math.inf},
    {"max_new_tokens": 0}, {"max_new_tokens": -5}, {"max_new_tokens": 1.5}, {"max_new_tokens": "20"},
    {"max_new_tokens": True}, {"eos_token_id": "x"}, {"eos_token_id": -1}, {"eos_token_id": [1, None]},
    {"eos_token_id": True}, {"eos_token_id": 2.0}, {"do_sample": "false"}, {"do_sample": []}, {"do_sample": 2},
], ids=lambda changes: str(changes)[:40])
def test_generation_config_values(folder, capfd, changes):
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True} | changes))
    refuse_folder(capfd, folder, "generation_config.json", *changes)


def test_checkpoint_defaults(tmp_path):
    path = make_random_model(BASE, tmp_path)
    settings_file = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 7],
                     "max_new_tokens": 3}
    (path / "generation_config.json").write_text(json.dumps(settings_file))
    model = qwen3.load_model(path)
    assert model.sampling == qwen3.Sampling(0.6, 20, 0.95)
    assert model.eos_token_ids == (5, 7)
    assert len(list(qwen3.generate(model, random_ids(5), temperature=0, eos_token_ids=()))) == 3
    (path / "generation_config.json").write_text('{"do_sample": true}')
    assert qwen3.load_model(path).sampling == qwen3.Sampling(1.0, top_k=50)  # transformers' own defaults
    (path / "generation_config.json").write_text('{"do_sample": true, "num_beams": 4}')
    with pytest.raises(qwen3.InputError, match="num_beams"):
        qwen3.load_model(path)
    (path / "generation_config.json").write_text(json.dumps(settings_file | {"do_sample": False}))
    assert qwen3.load_model(path).sampling.temperature == 0
    (path / "generation_config.json").unlink()
    (path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 9}))
    model = qwen3.load_model(path)
    assert (model.sampling.temperature, model.eos_token_ids, model.max_new_tokens) == (0, (9,), None)
