"""The files of a model, changed at random: both engines compute the same numbers, or refuse in one line."""
import json
import shutil

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE, TINY, YARN
from embedders import add_modules
from fuzzing import DTYPES, another_shape, any_json, any_number, any_shape, any_text, change, damaged, deep_text, fuzz
from helpers import logits_of, read_safetensors, with_tensors, works_or_refused, write_safetensors
from make_random_model import make_random_model
from published import CASES, WHOLE_GROUPS, quantize_model
from qwen3_embed import classify, embed
from test_adapter import make_adapter, matrices

ENGINES = ((qwen3, {}), (fast, {"kv_dtype": "f32", "threads": 1}))
PUBLISHED = [*CASES][[*CASES].index("int8 by output, 8 bits"):]  # the newer quantizations
KEYS = {"config.json": [*qwen3.ONLY, "rope_scaling", "rope_parameters"], "generation_config.json": [
    *qwen3.Sampling.__dataclass_fields__, "max_new_tokens", "eos_token_id"], "adapter_config.json": [
    "exclude_modules", "layers_pattern", "target_parameters", "modules_to_save"]}
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
             "beta_fast", "beta_slow", "truncate"]


# ---- One damage ------------------------------------------------------------------------------------------------------

def damage_json(rng, file):
    raw = {"any": json.loads(file.read_text("utf-8"))}
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if file.name in KEYS and isinstance(raw.get("any"), dict) and rng.random() < 0.4:
            rope = dict(YARN) | {key: rng.choice([any_number(rng), rng.uniform(1, 64), any_json(rng)])
                                 for key in rng.sample(ROPE_KEYS, rng.randint(0, 2))}
            value = rng.choice([any_json(rng), any_number(rng), rng.random(), rng.randint(0, 60), rope])
            raw["any"][rng.choice([*raw["any"], *KEYS[file.name], any_text(rng)])] = value
        elif isinstance(raw.get("any"), dict) and isinstance(raw["any"].get("quantization_config"), dict):
            change(rng, raw["any"]["quantization_config"])
        else:
            change(rng, raw)
    text = deep_text(rng, json.dumps(raw.get("any"))).encode("utf-8", "surrogatepass")
    file.write_bytes(damaged(rng, text) if rng.random() < 0.2 else text)


def damage_header(rng, header, n_data):
    """One change to a header that its bytes still fit, or to any of its fields."""
    name = rng.choice([name for name in header if name != "__metadata__"])
    what, about = rng.choice(["empty", "same size", "dtype", "shape", "offsets", "swap", "rename", "any"]), header[name]
    if what == "empty":  # a tensor without elements takes no bytes, so any shape would fit
        header[rng.choice([name, any_text(rng)])] = {"dtype": rng.choice(DTYPES[:3]), "shape": [0, *any_shape(rng)],
                                                     "data_offsets": [n_data, n_data]}
    elif what == "swap":
        other = rng.choice([name for name in header if name != "__metadata__"])
        header[name], header[other] = header[other], header[name]
    elif what == "rename":
        header[any_text(rng)] = header.pop(name)
    elif what == "any" or not isinstance(about, dict):
        change(rng, header)
    else:
        about |= {"same size": lambda: {"shape": another_shape(rng, about.get("shape"))},
                  "dtype": lambda: {"dtype": rng.choice(DTYPES)}, "shape": lambda: {"shape": any_shape(rng)},
                  "offsets": lambda: {"data_offsets": [any_number(rng), rng.randint(0, n_data)]}}[what]()


def damage_safetensors(rng, file):
    """Its header, the header's length, its end, or some bytes of a tensor. What is still read is as the header says."""
    header, data = read_safetensors(file)
    if rng.random() < 0.2:  # in the text of a quant_state, in sizes, groups, scales
        first, end = rng.choice([about["data_offsets"] for name, about in header.items() if name != "__metadata__"])
        new = rng.randbytes(min(end - first, rng.choice([1, 9, 10**6])))
        data = data[:first] + new + data[first + len(new):]
    else:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            damage_header(rng, header, len(data))
    raw = deep_text(rng, json.dumps(header)).encode()
    raw = damaged(rng, raw) if rng.random() < 0.1 else raw + b" " * rng.choice([0, -len(raw) % 8, 1])
    length = rng.choice([None] * 19 + [len(raw) + rng.randint(-9, 9), rng.randrange(2**64)])
    write_safetensors(file, raw, data[:rng.choice([len(data)] * 19 + [rng.randrange(len(data))])], length)
    content = file.read_bytes()
    for name, tensor in (works_or_refused(qwen3.map_safetensors, file) or {}).items():
        said = json.loads(raw[:length])[name]
        begin, end = (8 + len(raw[:length]) + offset for offset in said["data_offsets"])
        assert tensor.data.tobytes() == content[begin:end] and list(tensor.shape) == said["shape"]


def damage_gguf(rng, file):
    """Some bytes of its head, or the format of a tensor."""
    data = bytearray(file.read_bytes())
    end = data.index(b"blk.0.") + 4000
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.choice([rng.randrange(end), rng.randrange(200), end - rng.randrange(6000)])
        data[at] = rng.choice([0, 1, 255, data[at] ^ 1 << rng.randrange(8)])
    if rng.random() < 0.3:
        at = data.find(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 20
        data[at] = rng.choice([0, 1, 2, 8, 12, 14, 16, 17, 28, 30, 99])
    file.write_bytes(data)


DAMAGES = {".json": damage_json, ".safetensors": damage_safetensors, ".gguf": damage_gguf}


# ---- The kinds of files ----------------------------------------------------------------------------------------------

def token(module, folder, **options):
    """The first token of an answer, by way of the template and the tokenizer."""
    model = module.load_model(folder, **options)
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    return list(qwen3.generate(model, model.tokenizer.encode(prompt), 1, seed=1)) and []


def vectors(module, folder, **options):
    model = module.load_model(folder, **options)
    return [embed(model, ["the bee", "a"], truncate=True, prompt=name).tolist() for name in (None, "query")]


def labels(module, folder, **options):
    found = classify(module.load_model(folder, **options), ["the bee", "a"], truncate=True)
    return [list(each.scores.values()) for rows in found for each in rows]


def make_vectors(folder):
    add_modules(folder, "sentence_transformers.models.Dense", "sentence_transformers.models.Normalize",
                pooling_mode_mean_tokens=True)
    (folder / "2_Dense").mkdir()
    header = {"linear.weight": {"dtype": "F32", "shape": [5, 16], "data_offsets": [0, 320]},
              "linear.bias": {"dtype": "F32", "shape": [5], "data_offsets": [320, 340]}}
    write_safetensors(folder / "2_Dense/model.safetensors", header,
                      np.random.default_rng(0).standard_normal(85).astype("<f4").tobytes())
    for name, content in {
            "2_Dense/config.json": {"in_features": 16, "out_features": 5, "bias": True},
            "sentence_bert_config.json": {"max_seq_length": 9, "do_lower_case": False},
            "config_sentence_transformers.json": {"prompts": {"query": "find: ", "document": ""},
                                                  "default_prompt_name": "query", "similarity_fn_name": "dot"}}.items():
        (folder / name).write_text(json.dumps(content))


def make_files(kind, tiny, memory):
    """(folders of which one is damaged, the name of a file that is, what is computed of it)"""
    n_tokens = json.loads((tiny / "config.json").read_text())["vocab_size"]

    def made(name, shape):
        return make_random_model(shape, memory / name, "float32", tokenizer=tiny)

    if kind == "a folder":
        return [tiny], "*", token
    if kind == "a quantized folder":
        folders = [made(f"quantized{i}", WHOLE_GROUPS | {"num_hidden_layers": 1}) for i in range(len(PUBLISHED))]
        for folder, case in zip(folders, PUBLISHED):
            quantize_model(folder, *CASES[case])
        return folders, "[cm]*", lambda module, folder, **options: list(qwen3.generate(
            module.load_model(folder, tokenizer=False, **options), [1, 2], 1)) and []
    if kind == "an adapter":
        base, folder = made("base", BASE | {"tie_word_embeddings": False}), memory / "adapter"
        make_adapter(folder, matrices(BASE), alpha_pattern={r".*\.1\..*": 2, "q_proj": 4})
        return [folder], "*", lambda module, damaged, **options: logits_of(
            module.load_model(base, adapter=damaged, tokenizer=False, **options), [1, 2]).tolist()
    if kind == "a GGUF file":
        pytest.importorskip("gguf")
        from test_gguf_file import write_gguf
        folder = memory / "gguf"
        folder.mkdir()
        write_gguf(make_random_model(BASE, memory / "of gguf", "float32"), folder / "x.gguf", "Q8_0")
        return [folder], "*", lambda module, damaged, **options: module.load_model(damaged / "x.gguf") and []
    if kind == "vectors":
        folder = made("vectors", TINY | {"vocab_size": n_tokens})
        make_vectors(folder)
        return [folder], "[!gt]*", vectors
    folders = [made(f"labels{i}", TINY | {"vocab_size": n_tokens} | changes) for i, changes in enumerate((
        {"num_labels": 3, "architectures": ["Qwen3ForSequenceClassification"]},
        {"id2label": {"0": "O", "1": "X"}, "architectures": ["Qwen3ForTokenClassification"]}))]
    for n, folder in zip((3, 2), folders):
        with_tensors(folder / "model.safetensors", {"score.weight": np.ones((n, 16)), "score.bias": np.arange(n)})
    return folders, "[!gt]*", labels


@pytest.fixture(scope="module", params=["a folder", "a quantized folder", "an adapter", "vectors", "labels",
                                        "a GGUF file"])
def files(request, tiny, memory):
    return make_files(request.param, tiny, memory)


@fuzz(150)
def test_any_damage(rng, files, scratch):
    folders, names, compute = files
    source = rng.choice(folders)
    shutil.rmtree(scratch)
    shutil.copytree(source, scratch)
    file = rng.choice(sorted(file for file in scratch.rglob(names) if file.suffix in DAMAGES))
    DAMAGES[file.suffix](rng, file)
    with np.errstate(all="ignore"):
        found = [works_or_refused(compute, module, scratch, **options) for module, options in ENGINES]
    if any(found):
        assert None not in found
        np.testing.assert_allclose(*(np.hstack(each) for each in found), rtol=1e-3, atol=1e-3)
    return found[0] is not None
