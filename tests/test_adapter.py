"""LoRA adapters: merged weights, against peft where it is installed; what is refused."""
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import qwen3
import qwen3_numba as fast
from configs import BASE
from helpers import REMOVED, assert_cli_refuses, assert_one_line, edit_json, logits_of, message_of, run_main
from make_random_model import make_random_model
from qwen3_embed import embed
from embedders import make_embedder
from qwen3_lib.generation.prompt_store import fingerprint
from qwen3_lib.io.models import open_model
from packed import to_bf16
from published import CASES, WHOLE_GROUPS, quantize_model, write_tensors
from test_qwen3_moe import MOE

UNTIED = BASE | {"tie_word_embeddings": False}
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
IDS = [5, 6, 7, 8, 9]


def matrices(shape, head=True, prefix="model."):
    """Name of each matrix that an adapter may change -> [outputs, inputs]."""
    h, i, d = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * d, shape["num_key_value_heads"] * d
    sizes = dict(zip(sum(PROJECTIONS.values(), ()), [(q, h), (kv, h), (kv, h), (h, q), (i, h), (i, h), (h, i)]))
    names = {f"{prefix}layers.{layer}.{part}.{name}": sizes[name] for layer in range(shape["num_hidden_layers"])
             for part, some in PROJECTIONS.items() for name in some}
    return names | ({"lm_head": (shape["vocab_size"], h)} if head else {})


def make_adapter(folder, sizes, rank=4, alpha=16, dtype=np.float32, root="base_model.model.", **config):
    """Writes a random adapter as peft lays it out -> the changes by torch's names, float32."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, tensors, changes = np.random.default_rng(3), {}, {}
    scale = alpha / (np.sqrt(rank) if config.get("use_rslora") else rank)
    for name, (outputs, inputs) in sizes.items():
        a = (rng.standard_normal((rank, inputs)) / 8).astype(dtype)
        b = (rng.standard_normal((outputs, rank)) / 8).astype(dtype)
        tensors |= {f"{root}{name}.lora_A.weight": a, f"{root}{name}.lora_B.weight": b}
        changes[name] = (scale * (b.astype(np.float64) @ a.astype(np.float64))).astype(np.float32)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere", "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "target_modules": sorted({name.split(".")[-1] for name in sizes}), "modules_to_save": None,
        "init_lora_weights": True, "layers_to_transform": None, "rank_pattern": {}, "alpha_pattern": {},
        "use_dora": False, "use_rslora": False} | config))
    return changes


def logits(model):
    return logits_of(model, IDS)


@pytest.fixture
def folders(tmp_path):
    """(an untied model, an adapter of all its projections and its head)"""
    make_random_model(UNTIED, tmp_path / "model", "float32")
    make_adapter(tmp_path / "adapter", matrices(UNTIED))
    return tmp_path / "model", tmp_path / "adapter"


# ---- The merged weights ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stored_as", ["bfloat16", "float16", "float32"])
def test_the_sum_is_rounded_once(stored_as, tmp_path):
    """To float32; in the fast engine to bfloat16 for a base with no more digits, unless activations are f32."""
    path = make_random_model(BASE, tmp_path / "model", stored_as)
    changes = make_adapter(tmp_path / "adapter", {"model.layers.1.mlp.up_proj": (64, 32)})
    plain, stored = (open_model(str(path), adapter=each).tensors for each in (None, tmp_path / "adapter"))
    name = "model.layers.1.mlp.up_proj.weight"
    exact = qwen3.to_float32(plain[name]).astype(np.float64) + changes["model.layers.1.mlp.up_proj"]
    found = qwen3.to_float32(stored[name])
    assert (np.abs(found - exact) <= np.exp2(np.floor(np.log2(np.abs(exact))) - 22) + 3e-7).all()
    for activations in "f32", None:
        model = fast.load_model(path, adapter=tmp_path / "adapter", activations=activations)
        kept = fast.matrix_rows(model.weights.matrices[name], range(64))
        np.testing.assert_array_equal(kept, to_bf16(found) if (stored_as, activations) == ("bfloat16", None) else found)
    assert stored.keys() == plain.keys()
    for other in stored.keys() - {name}:
        np.testing.assert_array_equal(stored[other].data, plain[other].data)


@pytest.mark.parametrize("case", ["AWQ, groups of 32", "GPTQ, act-order"])
def test_a_quantized_base(case, tmp_path):
    """As adapters are trained on 4 bits (QLoRA): the change is added to the numbers that the packed ones stand for."""
    path = make_random_model(WHOLE_GROUPS, tmp_path / "model", "float32")
    expected = quantize_model(path, *CASES[case])
    changes = make_adapter(tmp_path / "adapter", matrices(WHOLE_GROUPS))
    stored = open_model(str(path), adapter=tmp_path / "adapter").tensors
    for name, change in changes.items():
        np.testing.assert_allclose(stored[f"{name}.weight"].read(), expected[f"{name}.weight"] + change, atol=1e-6)
    assert np.isfinite(logits(qwen3.load_model(path, adapter=tmp_path / "adapter"))).all()


def test_the_changes_of_a_vision_tower_are_left_out(folders):
    path, adapter = folders
    expected = logits(qwen3.load_model(path, adapter=adapter))
    tower = {f"base_model.model.model.visual.blocks.0.q_proj.lora_{part}.weight": np.ones((4, 4), np.float32)
             for part in "AB"}
    with_adapter_tensors(adapter, lambda tensors: tensors.update(tower))
    np.testing.assert_array_equal(logits(qwen3.load_model(path, adapter=adapter)), expected)


def test_both_engines_take_it(folders):
    path, adapter = folders
    (path / "generation_config.json").write_text('{"do_sample": true}')
    expected = logits(qwen3.load_model(path, adapter=adapter))
    model = qwen3.load_model(path, fast.engine("int8", kv_dtype="f32"), adapter=adapter)
    assert np.sqrt(((logits(model) - expected) ** 2).mean()) < 0.1 * expected.std()
    assert model.sampling == qwen3.load_model(path).sampling != qwen3.Sampling()


def test_changes_between_the_ends_tell_models_apart(tmp_path):
    """By the fingerprint of a saved prompt, which reads both ends of each matrix, and an adapter's files."""
    path, name = make_random_model(BASE | {"intermediate_size": 256}, tmp_path / "model"), "model.layers.1.mlp.up_proj"
    found = set()
    for value in (1, 2):
        def middle(tensors, value=value):
            b = tensors[f"base_model.model.{name}.lora_B.weight"]
            b[:] = 0
            b[100:110] = value

        make_adapter(tmp_path / str(value), {name: (256, 32)})
        with_adapter_tensors(tmp_path / str(value), middle)
        model = qwen3.load_model(path, adapter=tmp_path / str(value))
        found.add(fingerprint(model, qwen3.KVCache(model.config)))
    assert len(found) == 2


def test_an_adapter_of_an_embedding_model(tmp_path):
    """Trained on a model without a head, whose names lack `model.`."""
    folder = make_embedder(tmp_path / "model")
    sizes = matrices(BASE, head=False, prefix="")
    changes = make_adapter(tmp_path / "adapter", sizes, task_type="FEATURE_EXTRACTION")
    file = tmp_path / "merged/model.safetensors"
    shutil.copytree(folder, file.parent)
    tensors = safetensors.numpy.load_file(file)
    tensors |= {f"{name}.weight": tensors[f"{name}.weight"] + change for name, change in changes.items()}
    safetensors.numpy.save_file(tensors, file)
    texts = ["Bees find home.", "Tea came by ship."]
    expected = embed(qwen3.load_model(file.parent), texts)
    np.testing.assert_allclose(embed(qwen3.load_model(folder, adapter=tmp_path / "adapter"), texts), expected,
                               atol=1e-5)
    assert np.abs(embed(qwen3.load_model(folder), texts) - expected).max() > 0.01


def test_the_command_line(tmp_path, capfd, pristine):
    shape = json.loads((pristine / "config.json").read_text())
    make_adapter(tmp_path / "adapter", matrices(shape, head=False), alpha=64)
    options = ["--model", pristine, "--score", "The capital of France is Paris."]
    plain, adapted = run_main(capfd, *options), run_main(capfd, *options, "--adapter", tmp_path / "adapter")
    assert plain[0] == adapted[0] == 0 and plain[1] != adapted[1]


def test_kept_prompts_belong_to_their_adapter(tmp_path, capfd, pristine):
    def cached_tokens(prompt, *more):
        out = run_main(capfd, "--model", pristine, "--raw", "-n", 1, "--json", "--keep-on-disk", tmp_path / "kept",
                       prompt, *more)[1]
        return json.loads(out)["cached_tokens"]

    text = "The capital of France is a city of many streets, and of old houses, and of a river, and of rain"
    shape, options, longer = json.loads((pristine / "config.json").read_text()), ("--adapter", tmp_path / "adapter"), \
        f"{text} and snow"
    make_adapter(tmp_path / "adapter", matrices(shape, head=False))
    assert cached_tokens(text, *options) == 0 < cached_tokens(longer, *options)
    assert cached_tokens(longer) == 0
    edit_json(tmp_path / "adapter/adapter_config.json", {"lora_alpha": 8})  # the same matrices, half as strong
    assert cached_tokens(longer, *options) == 0
    make_adapter(tmp_path / "adapter", matrices(shape, head=False), rank=3, r=3)  # another one in the same folder
    assert cached_tokens(longer, *options) == 0


# ---- Against peft ----------------------------------------------------------------------------------------------------

ALL = [*sum(PROJECTIONS.values(), ()), "lm_head", "embed_tokens"]
SMALL_MOE = MOE | {"num_experts": 4, "num_hidden_layers": 2}


def trained(base, folder, seed=0, **options):
    """peft's model of a base after random steps of training, which it has saved."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    with torch.no_grad():
        for values in filter(lambda values: values.requires_grad, model.parameters()):
            values += torch.randn_like(values) * 0.15
    model.save_pretrained(folder)
    return model


def save_with_peft(path, folder, seed=0, **options):
    """An adapter in the files that peft writes."""
    pytest.importorskip("peft")
    from make_golden import load as reference
    trained(reference(path), folder, seed, **{"target_modules": ALL} | options)


def logits_of_peft(path, folder):
    """Of the files, in the base model as it is."""
    import peft
    import torch
    from make_golden import load as reference
    model = peft.PeftModel.from_pretrained(reference(path), folder)
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0].numpy()


def assert_both_engines_give(expected, path, adapter):
    for engine in (qwen3.Engine(), fast.engine(kv_dtype="f32", threads=1)):
        found = logits(qwen3.load_model(path, engine, adapter=adapter))
        assert np.abs(found - expected).max() < 1e-4 * expected.std()


@pytest.mark.filterwarnings("ignore")  # of peft, about tied heads
@pytest.mark.parametrize("shape, options", [
    (BASE, {}),
    (UNTIED, {"rank_pattern": {"q_proj": 2, r".*\.0\.mlp\.up_proj": 5},
              "alpha_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 1}}),
    (BASE, {"use_rslora": True, "target_modules": r".*\.[01]\..*_proj|.*tokens", "exclude_modules": ["o_proj"]}),
    (BASE, {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}),
    (BASE, {"target_modules": ["v_proj", "lm_head"]}),
    (UNTIED, {"target_modules": "all-linear"})],
    ids=["all", "patterns", "a regular expression", "a layer", "a tied head", "all-linear"])
def test_files_that_peft_writes(shape, options, tmp_path):
    path = make_random_model(shape, tmp_path / "model", "float32")
    save_with_peft(path, tmp_path / "adapter", **options)
    expected = logits_of_peft(path, tmp_path / "adapter")
    assert np.abs(logits(qwen3.load_model(path)) - expected).max() > 0.3 * expected.std()
    assert_both_engines_give(expected, path, tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(5))
def test_random_adapters_of_peft(seed, tmp_path):
    rng = np.random.default_rng(seed)

    def some(names):
        return rng.permutation(names)[:rng.integers(1, len(names) + 1)].tolist()

    path = make_random_model(BASE | {"tie_word_embeddings": bool(seed % 2)}, tmp_path / "model", "float32")
    save_with_peft(path, tmp_path / "adapter", seed, target_modules=some(ALL), use_rslora=bool(rng.integers(2)),
                   rank_pattern={some(ALL)[0]: 2}, alpha_pattern={rf".*\.1\..*{some(ALL)[0]}": 11})
    assert_both_engines_give(logits_of_peft(path, tmp_path / "adapter"), path, tmp_path / "adapter")


def test_experts_one_by_one(tmp_path):
    """As peft stored them before transformers 5."""
    path = make_random_model(SMALL_MOE, tmp_path / "model", "float32")
    layers = {f"model.layers.{layer}.mlp": layer for layer in range(2)}
    sizes = {f"{start}.gate": (4, 32) for start in layers} | {
        f"{start}.experts.{expert}.{name}": size for start in layers for expert in range(4)
        for name, size in (("gate_proj", (24, 32)), ("up_proj", (24, 32)), ("down_proj", (32, 24)))}
    make_adapter(tmp_path / "adapter", sizes, lora_dropout=0)
    pytest.importorskip("peft")
    assert_both_engines_give(logits_of_peft(path, tmp_path / "adapter"), path, tmp_path / "adapter")


SMALL = {"bf16": ["q_proj", "v_proj"], "FP8": ALL, "AWQ": ALL}  # base -> what a small adapter changes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", SMALL)
def test_a_small_change_keeps_its_effect(base, tmp_path):
    """Its numbers are smaller than the steps of bf16, to which the fast engine rounds vectors and sums by default."""
    pytest.importorskip("peft")
    path = make_random_model(WHOLE_GROUPS, tmp_path / "model", "bfloat16" if base == "bf16" else "float32")
    plain = path
    if base != "bf16":
        plain = make_random_model(WHOLE_GROUPS, tmp_path / "plain", "float32")
        values = quantize_model(path, *CASES["FP8 by output" if base == "FP8" else "AWQ, groups of 32"])
        write_tensors(plain / "model.safetensors", {name: ("float32", value) for name, value in values.items()})
    save_with_peft(plain, tmp_path / "adapter", target_modules=SMALL[base], lora_alpha=0.05)
    before, expected = logits(qwen3.load_model(plain)), logits_of_peft(plain, tmp_path / "adapter")
    effect = np.linalg.norm(expected - before)
    assert effect < 0.1 * np.linalg.norm(before)
    for engine, lost in ((qwen3.Engine(), 0.001), (fast.engine(kv_dtype="f32", activations="f32", threads=1), 0.001),
                         (fast.engine(threads=1), {"bf16": 0.5, "FP8": 0.1, "AWQ": 0.2}[base])):
        found = logits(qwen3.load_model(path, engine, adapter=tmp_path / "adapter"))
        assert np.linalg.norm(found - expected) < lost * effect


def test_an_adapter_with_a_classification_head(tmp_path):
    """The head stands among the stored tensors, for the program that classifies."""
    path = make_random_model(BASE, tmp_path / "model", "float32")
    make_adapter(tmp_path / "adapter", matrices(BASE, head=False), modules_to_save=["classifier", "score"])
    score = np.ones((3, 32), np.float32)
    with_adapter_tensors(tmp_path / "adapter", lambda tensors: tensors.update({"base_model.model.score.weight": score}))
    model = qwen3.load_model(path, adapter=tmp_path / "adapter")
    np.testing.assert_array_equal(model.source.heads["score.weight"].data, score)
    assert logits(model).shape == (5, BASE["vocab_size"])


# ---- What is refused -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, words", [
    ({"peft_type": "IA3"}, ["peft_type", "IA3"]), ({"peft_type": REMOVED}, ["peft_type"]),
    ({"use_dora": True}, ["use_dora", "merge"]), ({"a_new_option": 1}, ["a_new_option"]),
    ({"alpha_pattern": ["q_proj"]}, ["alpha_pattern"]), ({"lora_alpha": 10**400}, ["lora_alpha"]),
    ({"alpha_pattern": {"*q": 3}}, ["alpha_pattern", "regular expressions"]),
    ({"alpha_pattern": {"q_proj": "3"}}, ["lora_alpha must be a number"]), ({"use_rslora": "no"}, ["use_rslora"]),
    ({"init_lora_weights": "pissa"}, ["'pissa'"]), ({"init_lora_weights": ["x"]}, ["init_lora_weights"])])
def test_options_that_change_the_computation(folders, changes, words):
    edit_json(folders[1] / "adapter_config.json", changes)
    assert_one_line(message_of(qwen3.load_model, folders[0], adapter=folders[1]), *words)


def with_adapter_tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.base_layer.weight"


@pytest.mark.parametrize("change, words", [
    (lambda tensors: tensors.pop(A), ["lora_A and lora_B of", "q_proj"]),
    (lambda tensors: tensors.clear(), ["there are no tensors"]),
    (lambda tensors: tensors.update({A: tensors[A][:2]}), ["don't belong together"]),
    (lambda tensors: tensors.update({A: tensors[A][:0], A.replace("_A", "_B"): np.ones((32, 0), np.float32)}),
     ["don't belong together"]),
    (lambda tensors: tensors.update({HEAD: np.ones((8, 32), np.float32)}), ["lm_head", "merge"]),
    (lambda tensors: tensors.update({A: tensors[A] * np.nan}), ["NaN", "q_proj"]),
    (lambda tensors: tensors.update({A: tensors[A][0]}), ["no matrix"]),
    (lambda tensors: tensors.update({A: tensors[A][:, :-1].copy()}), ["another model", "q_proj"]),
    (lambda tensors: tensors.update({"base_model.model.model.norm.weight": tensors[A][0] + 1}), ["norm", "merge"]),
    (lambda tensors: tensors.update({A.replace("lora_A", "lora_magnitude_vector"): tensors[A]}),
     ["magnitude", "merge"])])
def test_tensors_that_are_no_plain_adapter(folders, change, words):
    with_adapter_tensors(folders[1], change)
    assert_one_line(message_of(qwen3.load_model, folders[0], adapter=folders[1]), *words)


def test_an_adapter_of_another_model(folders, tmp_path):
    make_adapter(tmp_path / "deeper", matrices(UNTIED | {"num_hidden_layers": 4}))
    make_adapter(tmp_path / "wider", matrices(UNTIED | {"hidden_size": 40}))
    make_adapter(tmp_path / "norms", {"model.norm": (32, 32)})
    for name, words in (("deeper", "model.layers.3"), ("wider", "40"), ("norms", "model.norm")):
        assert_one_line(message_of(qwen3.load_model, folders[0], adapter=tmp_path / name), "another model", words)


def test_files_that_are_missing_or_damaged(folders, capfd):
    path, adapter = folders
    (adapter / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert_cli_refuses(capfd, ["--model", path, "--adapter", adapter, "Hi"], "adapter_model.safetensors",
                       "cannot be read")
    (adapter / "adapter_model.safetensors").unlink()
    for place in (adapter, path, adapter / "nowhere"):
        assert_one_line(message_of(open_model, str(path), adapter=place), "not a LoRA adapter", "it has no adapter_")
    for place, words in ((r"C:\none", "adapter_config.json"), (r"C:\none:0.5", "for a part of its changes, merge")):
        assert_one_line(message_of(open_model, str(path), adapter=place), f"{place}: not a LoRA adapter", words)
    assert_one_line(message_of(qwen3.load_model, path, adapter=["a", "b"]), "only one adapter", "merge them with peft")
    assert_cli_refuses(capfd, ["--model", path, "--adapter", "a", "--adapter", "b", "Hi"], "a, b: only one adapter")
    assert_one_line(message_of(qwen3.load_model, adapter), "this is not a model folder", "adapter_config.json")
