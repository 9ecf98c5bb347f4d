"""qwen3_io/checkpoint.py with random files: each loads and works, or one line says why not."""
import contextlib
import copy
import functools
import json
import os
import shutil
import sys

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

import qwen3
from configs import BASE, INTEGERS, TINY, YARN
from fuzzing import (DTYPES, another_shape, any_json, any_number, any_shape, any_text, change, copy_files, damaged,
                     deep_text, fuzz, write_new)
from helpers import NUMERALS, message_of, patiently, read_safetensors, workplace, works_or_refused, write_safetensors
from make_random_model import make_random_model
from qwen3_io import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


# ----------------------------------------------------------------------------------------------------------------------
# safetensors files
# ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def small_weights(tmp_path_factory):
    """The bytes of a float32 checkpoint of one layer, and its config."""
    path = make_random_model(BASE | {"num_hidden_layers": 1, "vocab_size": 20},
                             tmp_path_factory.mktemp("weights") / "model", "float32")
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


@pytest.fixture(scope="module")
def weights_file(memory):
    """(config, header, data) of a checkpoint of one layer."""
    path = make_random_model(TINY | {"vocab_size": 20}, memory / "weights", "float32")
    return qwen3.load_config(path), *read_safetensors(path / "model.safetensors")


def changed_header(rng, header, n_data):
    """One change to a header that its bytes still fit, or to any of its fields."""
    names = [name for name in header if name != "__metadata__"] or ["x"]
    name = rng.choice(names)
    entry = header.get(name)
    what = rng.random()
    if what < 0.15:  # a tensor without elements takes no bytes, so any shape would fit
        shape = any_shape(rng)
        shape.insert(rng.randint(0, len(shape)), 0)
        header[rng.choice([name, any_text(rng)])] = {"dtype": rng.choice(DTYPES[:3]), "shape": shape,
                                                     "data_offsets": [n_data, n_data]}
    elif what < 0.3 and isinstance(entry, dict):
        entry["shape"] = another_shape(rng, entry.get("shape"))
    elif what < 0.4 and isinstance(entry, dict):
        entry["dtype"] = rng.choice(DTYPES)
    elif what < 0.5 and isinstance(entry, dict):
        entry["shape"] = any_shape(rng)
    elif what < 0.6 and isinstance(entry, dict):
        entry["data_offsets"] = [rng.choice([any_number(rng), rng.randint(0, n_data)]) for _ in range(2)]
    elif what < 0.65:
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
    elif what < 0.7:
        header[any_text(rng)] = header.pop(name)
    elif what < 0.8:
        header["__metadata__"] = rng.choice([any_json(rng), {any_text(rng): any_text(rng)}])
    elif what < 0.85 and isinstance(entry, dict):
        entry[any_text(rng)] = any_json(rng)
    else:
        change(rng, header)


@fuzz(4000)
def test_safetensors_header(rng, weights_file, scratch):
    """What is accepted is what the header says, byte for byte, from within the file."""
    config, header, data = weights_file
    header = copy.deepcopy(header)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if header:
            changed_header(rng, header, len(data))
    text = deep_text(rng, json.dumps(header))
    if rng.random() < 0.05 and header:  # the same name twice
        name = rng.choice(list(header))
        pair = f"{json.dumps(name)}: {json.dumps(rng.choice([header[name], any_json(rng)]))}"
        text = rng.choice([f"{{{pair}, {text[1:]}", f"{text[:-1]}, {pair}}}"])
    raw = text.encode() + b" " * rng.choice([0, 0, -len(text) % 8, 1])
    length = rng.choice([None] * 9 + [len(raw) + rng.randint(-9, 9), rng.randrange(2**64)])
    file = scratch / "model.safetensors"
    write_safetensors(file, raw, data, length)
    tensors = works_or_refused(checkpoint.map_safetensors, file)
    loaded = works_or_refused(qwen3.load_weights, scratch, config)
    if tensors is None:
        assert loaded is None
        return False
    said, content = json.loads(raw[:length]), file.read_bytes()
    for name, tensor in tensors.items():
        begin, end = (8 + len(raw[:length]) + offset for offset in said[name]["data_offsets"])
        assert tensor.data.tobytes() == content[begin:end] and list(tensor.data.shape) == said[name]["shape"]
    assert sum(tensor.data.nbytes for tensor in tensors.values()) <= len(data)
    if loaded is not None:
        assert loaded["embed_tokens"].shape == (20, 16) and loaded["layers"][0]["gate_proj"].dtype == np.float32
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The index, and links
# ----------------------------------------------------------------------------------------------------------------------

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OUTSIDE = np.float32(7)  # all weights of the checkpoint that only names in an index lead to


@pytest.fixture(scope="module")
def sharded(memory):
    """(folder with two shards, a folder with files like them but for the weights, which must not be read, config)."""
    inside = make_random_model(TINY | {"vocab_size": 20}, memory / "inside", "float32", 2)
    outside = shutil.copytree(inside, memory / "outside")
    for shard in SHARDS:
        header, data = read_safetensors(outside / shard)
        write_safetensors(outside / shard, header, np.full(len(data) // 4, OUTSIDE).tobytes())
    return inside, outside, qwen3.load_config(inside)


@functools.cache  # once in a process
def refuse_to_open(folder):
    """From now on, in this process, whoever opens a file of this folder fails, whatever its path says."""
    folder = os.path.realpath(folder) + os.sep

    def check(event, arguments):
        if event == "open" and isinstance(arguments[0], str | bytes) and os.path.realpath(
                os.fsdecode(arguments[0])).startswith(folder):
            raise AssertionError(f"{arguments[0]} was opened")

    def checking(function):
        def checked(path, *args, **options):
            check("open", [os.fspath(path)])
            return function(path, *args, **options)
        return checked

    sys.addaudithook(check)
    safetensors.safe_open = checking(safetensors.safe_open)  # Rust's opening is no event of Python's


def new_folders(rng, scratch):
    """(home, blobs, folder) of a model as the hub's cache has them, or nearly so."""
    home = scratch / rng.choice(["models--x--y", "x"])
    blobs, folder = home / "blobs", home / rng.choice(["snapshots", "elsewhere"]) / "commit"
    for path in (blobs, folder, scratch / "disk"):
        path.mkdir(parents=True, exist_ok=True)
    return home, blobs, folder


FOLLOWED = ["copy", "hard link", "beside", "blob", "another disk", "another disk, relative", "two links",
            "linked folder"]
REFUSED = ["loop", "folder", "fifo", "dangling", "dangling by two", "device"]
DAMAGED = ["empty", "cut"]


def place(rng, folder, name, source, blobs):
    """Puts source/name at folder/name: as a file, through links, or not at all -> how."""
    target, disk = folder / name, blobs.parents[1] / "disk"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
    kind = rng.choice(["copy"] * 9 + FOLLOWED * 2 + REFUSED + DAMAGED)
    if kind in ("copy", "hard link"):
        (shutil.copy if kind == "copy" else os.link)(source / name, target)
    elif kind == "folder":
        target.mkdir()
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind in DAMAGED:
        target.write_bytes(b"" if kind == "empty" else (source / name).read_bytes()[:rng.randint(0, 300)])
    else:
        there = {"beside": folder / f"real {name}", "blob": blobs / name}.get(kind, disk / name)
        if kind in FOLLOWED:
            shutil.copy(source / name, there)
        if kind == "linked folder" and not (folder / "models").exists():
            (folder / "models").symlink_to(disk)
        if kind in ("two links", "dangling by two"):
            (folder / f"first {name}").unlink(missing_ok=True)
            (folder / f"first {name}").symlink_to(there if kind == "two links" else "nowhere")
        target.symlink_to({"loop": name, "dangling": "nowhere", "device": "/dev/zero", "beside": f"real {name}",
                           "blob": f"../../blobs/{name}", "two links": f"first {name}",
                           "dangling by two": f"first {name}", "linked folder": f"models/{name}",
                           "another disk, relative": os.path.relpath(disk / name, folder)}.get(kind, there))
    return kind


ODD_NAMES = ["", ".", "..", "x", "../outside/" + SHARDS[0], "outside/" + SHARDS[0], "./" + SHARDS[0], SHARDS[0] + "/",
             "..\\outside\\" + SHARDS[0], SHARDS[0] + "\0", SHARDS[0] + "\n", SHARDS[0].upper(), " " + SHARDS[0],
             SHARDS[0][:-1], "．．／outside／" + SHARDS[0], "%2e%2e%2foutside%2f" + SHARDS[0], "~/" + SHARDS[0],
             "$HOME/" + SHARDS[0], "-", "/dev/zero", "/dev/stdin", "file:///etc/passwd.safetensors", "\0.safetensors",
             "../.safetensors", "x" * 256 + ".safetensors", "link/" + SHARDS[0], "\ud800.safetensors",
             "CON.safetensors", "*.safetensors", "config.json"]


@fuzz(2500)
def test_index_and_links(rng, sharded, scratch):
    """Links in the folder are followed wherever they lead; no name in an index leads out of the folder."""
    inside, outside, config = sharded
    refuse_to_open(outside)
    home, blobs, folder = new_folders(rng, scratch)
    (folder / "outside").symlink_to(outside)
    (home / "outside").symlink_to(outside)
    index = json.loads((inside / "model.safetensors.index.json").read_bytes())
    kinds, changed = [place(rng, folder, shard, inside, blobs) for shard in SHARDS], rng.random() < 0.3
    weight_map = index["weight_map"]
    if changed:
        for _ in range(rng.randint(1, 2)):
            name = rng.choice([*weight_map, any_text(rng)])
            weight_map[name] = rng.choice([rng.choice(ODD_NAMES), str(outside / rng.choice(SHARDS)), any_json(rng),
                                           "../" * rng.randint(1, 9) + str(outside / SHARDS[0])[1:],
                                           rng.choice(SHARDS)])
        if rng.random() < 0.2:
            change(rng, index)
    text = deep_text(rng, json.dumps(index))
    changed = changed or text != json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    if rng.random() < 0.1:
        kinds.append(place(rng, folder, "model.safetensors.index.json", inside, blobs))
    given = folder
    if rng.random() < 0.1:  # the folder itself may be a link
        given = scratch / "link"
        given.symlink_to(folder)
    try:
        weights = works_or_refused(qwen3.load_weights, given, config)
        if all(kind in FOLLOWED for kind in kinds) and not changed:
            assert weights is not None
        if any(kind not in FOLLOWED for kind in kinds[:2]):
            assert weights is None
        if weights is not None:
            expected = qwen3.load_weights(inside, config)
            assert np.array_equal(weights["embed_tokens"], expected["embed_tokens"])
            assert np.array_equal(weights["layers"][0]["down_proj"], expected["layers"][0]["down_proj"])
    finally:
        given.is_symlink() and given.unlink()
        shutil.rmtree(home)
    return weights is not None


OTHER_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja"]


@fuzz(2000)
def test_links_of_the_small_files(rng, tiny, tiny_model, scratch):
    """A model's JSON files and template are read through links, too; a link to nothing is refused, not left out."""
    home, blobs, folder = new_folders(rng, scratch)
    copy_files(tiny, folder)
    kinds = [place(rng, folder, name, tiny, blobs) for name in rng.sample(OTHER_FILES, rng.randint(1, 2))]
    try:
        loaded = works_or_refused(qwen3.load_model, folder)
        if any(kind in REFUSED for kind in kinds):
            assert loaded is None
        if all(kind in FOLLOWED for kind in kinds):
            assert loaded.config == tiny_model.config and loaded.sampling == tiny_model.sampling
            assert loaded.tokenizer.chat_template == tiny_model.tokenizer.chat_template
            assert loaded.tokenizer.encode("Hello 12 é") == tiny_model.tokenizer.encode("Hello 12 é")
    finally:
        shutil.rmtree(home)
    return loaded is not None


# ----------------------------------------------------------------------------------------------------------------------
# config.json and generation_config.json
# ----------------------------------------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(st.none() | st.booleans() | NUMERALS | st.text(max_size=5)
                           | st.sampled_from(["default", "yarn", "silu", "full_attention"]),
                           lambda inner: st.lists(inner, max_size=3)
                           | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=4)
ROPE_VALUES = st.fixed_dictionaries({}, optional={
    "rope_type": st.sampled_from(["default", "yarn", "linear"]) | JSON_VALUES,
    "type": st.sampled_from(["yarn"]) | JSON_VALUES,
    **{key: NUMERALS | JSON_VALUES for key in ("rope_theta", "factor", "original_max_position_embeddings",
                                               "attention_factor", "beta_fast", "beta_slow", "x")}})
CONFIG_CHANGES = st.one_of(
    st.dictionaries(st.sampled_from(sorted(BASE)) | st.text(max_size=8), JSON_VALUES, max_size=3),
    st.fixed_dictionaries({"rope_scaling": ROPE_VALUES}, optional={"rope_theta": NUMERALS}),
    st.fixed_dictionaries({"rope_parameters": ROPE_VALUES}))


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
        assert frequencies.shape == (config.head_dim // 2,) and frequencies.dtype == np.float32
        assert isinstance(factor, float)


@patiently(200)
@given(name=st.sampled_from(["generation_config.json", "config.json", "tokenizer_config.json", "tokenizer.json"]),
       data=st.data())
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


CONFIG_KEYS = sorted({*checkpoint.KNOWN_KEYS, "factor", "sliding_window", "partial_rotary_factor", "num_experts"})
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
             "beta_fast", "beta_slow", "truncate", "mscale"]


def any_rope(rng):
    rope = dict(YARN) if rng.random() < 0.7 else {}
    for key in rng.sample(ROPE_KEYS, rng.randint(0, 3)):
        rope[key] = rng.choice([any_number(rng), rng.uniform(1, 64), rng.choice(["yarn", "default", "linear"]),
                                any_json(rng)])
    return rope


def use(loaded):
    """A model that could be loaded answers, or says why not."""
    with np.errstate(all="ignore"):
        return works_or_refused(lambda: list(qwen3.generate(loaded, [1, 2, 3], 1, seed=0)))


@fuzz(3000)
def test_config(rng, tiny, scratch):
    """From config.json to a token."""
    copy_files(tiny, scratch)
    config = json.loads((tiny / "config.json").read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.25:
            config[rng.choice(["rope_scaling", "rope_parameters"])] = any_rope(rng)
            if rng.random() < 0.5:
                config.pop("rope_theta", None)
        elif rng.random() < 0.2:
            change(rng, config)
        else:
            key = rng.choice([*CONFIG_KEYS, any_text(rng)])
            config[key] = rng.choice([any_json(rng), any_number(rng), config.get(key), None])
    write_new(scratch / "config.json", deep_text(rng, json.dumps(config)))
    loaded = works_or_refused(qwen3.load_model, scratch)
    return loaded is not None and use(loaded) is not None


@fuzz(3000)
def test_generation_config(rng, tiny, scratch):
    """From generation_config.json to a token."""
    copy_files(tiny, scratch)
    keys = sorted({*checkpoint.GENERATION_KEYS, *qwen3.Sampling.__dataclass_fields__, "num_beams", "stop_strings"})
    values = {"do_sample": True} if rng.random() < 0.7 else {}
    for key in rng.sample(keys, rng.randint(0, 4)):
        values[key] = rng.choice([any_json(rng), any_number(rng), rng.random(), rng.randint(0, 60), None, False,
                                  [1, 2]])
    if rng.random() < 0.1:
        values[any_text(rng)] = any_json(rng)
    if rng.random() < 0.1:
        change(rng, values)
    text = deep_text(rng, json.dumps(values)).encode()
    write_new(scratch / "generation_config.json", damaged(rng, text) if rng.random() < 0.1 else text)
    loaded = works_or_refused(qwen3.load_model, scratch)
    return loaded is not None and use(loaded) is not None
