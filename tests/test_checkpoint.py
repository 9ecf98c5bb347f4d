"""qwen3_io/checkpoint.py, the tensors: folders, safetensors files and shards that are no model, each in one line."""
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

import qwen3
from configs import BASE, VOCABULARY, YARN
from helpers import (REMOVED, assert_cli_refuses, assert_one_line, cut_off, edit_json, endless, finish, message_of,
                     read_safetensors, refuse_folder, run_main, start, with_tensors, works_or_refused,
                     write_safetensors)
from make_random_model import make_random_model
from qwen3_io import checkpoint
from qwen3_io.errors import LARGEST_TEXT, InputError

# ----------------------------------------------------------------------------------------------------------------------
# The folder
# ----------------------------------------------------------------------------------------------------------------------


def test_the_sound_model_works(pristine, capfd):
    """What all tests below start from is accepted, so that what they break is what is refused."""
    status, out, err = run_main(capfd, "--model", pristine, "--max-tokens", 20, "--seed", 1, "Hello")
    assert (status, err) == (0, cut_off(20)) and out.strip()


def test_no_such_folder(tmp_path, capfd):
    refuse_folder(capfd, tmp_path / "nowhere", "nowhere", "no such folder")


def test_file_as_folder(tmp_path, capfd):
    (tmp_path / "model.gguf").write_text("x")
    refuse_folder(capfd, tmp_path / "model.gguf", "model.gguf", "not a GGUF file")
    (tmp_path / "notes.txt").write_text("x")
    refuse_folder(capfd, tmp_path / "notes.txt", "notes.txt", "not a folder")


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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                                  "generation_config.json"])
def test_directory_in_place_of_a_file(folder, capfd, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    refuse_folder(capfd, folder, name)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"),
                    reason="no /proc/self/mem, a file that cannot be read at its start")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                  "model.safetensors"])
def test_file_that_cannot_be_read(folder, capfd, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")
    refuse_folder(capfd, folder, name)


def test_model_folder_that_is_left_unchanged(folder):
    """Nothing is written beside the model, so that it may lie on a read-only disk."""
    before = {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()}
    assert finish(endless(folder, "--max-tokens", 5))[0] == 0
    assert {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()} == before


# ----------------------------------------------------------------------------------------------------------------------
# safetensors files
# ----------------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 7, b"\0" * 8, b"\0" * 100,
                                     b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"],
                         ids=["zero bytes", "one byte", "7 bytes", "8 zeros", "100 zeros", "git-lfs pointer"])
def test_file_that_is_no_safetensors(folder, capfd, content):
    (folder / "model.safetensors").write_bytes(content)
    refuse_folder(capfd, folder, "model.safetensors")


@pytest.mark.parametrize("dtype, size", [("F64", 8), ("I8", 1), ("U8", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("U16", 2),
                                         ("I32", 4), ("I64", 8), ("BOOL", 1)])
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
    ({NORM: None, ANY_TENSOR: np.zeros((2, 2)), "odd.one": np.zeros(3)},
     [f"{NORM} is missing", ANY_TENSOR, "[2, 2]", "odd.one"]),
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
    refuse_folder(capfd, folder, "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "[64, 48]",
                  "more")


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
    with_tensors(folder / "model.safetensors", {"model.norm.weight": np.full(32, value),
                                                ANY_TENSOR: np.full((64, 32), value)})
    status, out, err = finish(start("--model", folder, "Hello"))
    assert status == 1 and not out.strip()
    assert_one_line(err, "not finite" if value == 3e38 else ANY_TENSOR)


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 16), ("float16", 13)])
def test_half_precision_files_are_read_exactly(tmp_path, dtype, bits):
    """bfloat16 keeps the upper 16 bits of a float32, float16 leaves its lowest 13 bits zero."""
    exact = qwen3.load_model(make_random_model(BASE, tmp_path / "exact", "float32")).weights["layers"][1]["down_proj"]
    halved = qwen3.load_model(make_random_model(BASE, tmp_path / "half", dtype)).weights["layers"][1]["down_proj"]
    assert halved.dtype == np.float32 and halved.flags.c_contiguous
    assert not (halved.view(np.uint32) & ((1 << bits) - 1)).any()
    assert np.abs(halved - exact).max() <= np.abs(exact).max() * 2.0 ** (-8 if dtype == "bfloat16" else -11)


def test_float32_stays_in_the_file(model):
    assert not model.weights["embed_tokens"].flags.writeable  # a view of the mapped file
    assert model.weights["lm_head"] is model.weights["embed_tokens"]


def test_tied_checkpoint_with_a_copy_of_the_head(tmp_path):
    path = make_random_model(BASE | {"tie_word_embeddings": False}, tmp_path)
    tensors = checkpoint.map_safetensors(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(BASE))
    untied = qwen3.load_model(path).weights
    assert untied["lm_head"] is not untied["embed_tokens"]  # the file knows better than the flag
    offset = (path / "model.safetensors").read_bytes().index(tensors["lm_head.weight"].data.tobytes())
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(offset)
        file.write(tensors["model.embed_tokens.weight"].data.tobytes())
    weights = qwen3.load_model(path).weights
    assert weights["lm_head"] is weights["embed_tokens"]


# ----------------------------------------------------------------------------------------------------------------------
# Shards, their index, and links
# ----------------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                  "model.safetensors"])
def test_a_link_to_nothing_is_named(folder, capfd, name):
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "gone")
    refuse_folder(capfd, folder, name, "link to nothing")


def test_a_folder_of_links_to_another_disk_gives_the_same_logits(shards, tmp_path):
    """The folder itself is a link as well, and its files lie in two other folders, as in the hub's cache."""
    expected = qwen3.load_model(shards)
    (tmp_path / "disk").mkdir()
    links = tmp_path / "links"
    links.mkdir()
    for i, file in enumerate(sorted(shards.iterdir())):
        place = tmp_path / "disk" / f"blob {i}"
        (file.rename if i % 2 else lambda target, file=file: target.symlink_to(file))(place)
        (links / file.name).symlink_to(place if i % 3 else Path("../disk") / place.name)
    (tmp_path / "model").symlink_to(links)
    model = qwen3.load_model(tmp_path / "model")
    logits = [qwen3.forward(either, [1, 2, 3], qwen3.KVCache(either.config)) for either in (expected, model)]
    assert np.array_equal(*logits) and model.tokenizer.encode("Hello") == expected.tokenizer.encode("Hello")


def test_truncated_shard(shards, capfd):
    file = shards / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refuse_folder(capfd, shards, "model-00003-of-00003.safetensors")


def test_missing_index(shards, capfd):
    (shards / "model.safetensors.index.json").unlink()
    refuse_folder(capfd, shards, "model.safetensors.index.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"{}", b'{"weight_map": null}',
                                     b'{"weight_map": {}}', b'{"weight_map": []}',
                                     b'{"weight_map": "model.safetensors"}'], ids=repr)
def test_broken_index(shards, capfd, content):
    (shards / "model.safetensors.index.json").write_bytes(content)
    refuse_folder(capfd, shards, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["../model-00001-of-00003.safetensors", "/etc/passwd", "/tmp/x.safetensors",
                                  "sub/x.safetensors", "..", ".", "", "config.json", "..\\x.safetensors/..", 5, None,
                                  True, ["model-00001-of-00003.safetensors"], {"a": 1}, "x" * 300 + ".safetensors",
                                  "\0.safetensors", "a\nb.safetensors", "\ud800.safetensors"],
                         ids=lambda name: repr(name)[:30])
def test_index_with_a_bad_file_name(shards, capfd, name):
    edit_weight_map(shards, {"model.norm.weight": name})
    refuse_folder(capfd, shards, str(shards), *(["index.json"] if not str(name).endswith(".safetensors") else []))


def test_path_out_of_the_folder_is_not_followed(shards, tmp_path):
    """Even if the file that it leads to is sound."""
    name = "model-00001-of-00003.safetensors"
    (shards / name).rename(tmp_path / name)
    weight_map = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    edit_weight_map(shards, {key: f"../{name}" for key, value in weight_map.items() if value == name})
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


def test_end_of_text_of_generation_config_comes_before_that_of_config(tmp_path):
    folder = make_random_model(BASE | {"eos_token_id": 7}, tmp_path)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert qwen3.load_model(folder).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert qwen3.load_model(folder).eos_token_ids == (3, 5)


def test_yarn_without_its_original_length_takes_that_of_the_config(tmp_path):
    rope = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"rope_scaling": rope}))
    yarn = checkpoint.read_config(tmp_path)["yarn"]
    assert yarn["original_max_position_embeddings"] == BASE["max_position_embeddings"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                  "chat_template.jinja"])
def test_files_that_are_too_large_are_not_read(tmp_path, name):
    folder = make_random_model(BASE | {"vocab_size": VOCABULARY}, tmp_path)
    (folder / name).touch()
    os.truncate(folder / name, LARGEST_TEXT + 1)
    with pytest.raises(InputError, match=f"{name}.*larger than"):
        qwen3.load_model(folder)
