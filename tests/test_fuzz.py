"""Whatever comes from outside, at random: files, options, texts. It works, or one line says why not.

Each surface gets at least 2,000 inputs, the same ones in every run. They run in a process of their own, whose memory
and time are limited: a crash of a library, a hang, or memory that grows without end fails the test, and so does a
warning. A failure names its input: `random.Random(seed)`. The share of inputs that work is checked, too, so that no
fuzzer tests nothing but the first line of a parser.
"""
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import itertools
import json
import math
import os
import pickle
import random
import resource
import select
import shutil
import signal
import string
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors

import qwen3
from qwen3_io import checkpoint
from qwen3_app import cli as qwen3_cli
from qwen3_app import files as qwen3_files
import tokenizer_utils
from qwen3_io import writing
from configs import BASE, YARN
from make_random_model import make_random_model
from test_bad_input import (assert_one_line, message_of, read_safetensors, with_tensors, works_or_refused,
                            write_safetensors)
from tokenizer_utils import StreamDecoder, Tokenizer, held_back, load_tokenizer, parse_answer, split_stream, until_stop

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
MEMORY = 2**30  # bytes that a test may need more than what is there when it begins
SECONDS = 300  # of computing, and of waiting: a hundred times what the slowest test needs


# ----------------------------------------------------------------------------------------------------------------------
# Running many inputs in a guarded process
# ----------------------------------------------------------------------------------------------------------------------

def in_child(work):
    """What work() returns (as JSON holds it), computed in a forked process that can't take the machine down."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.close(reading)
            try:
                limit_this_process()
                result = {"result": work()}
            except BaseException as error:
                result = {"error": "".join(traceback.format_exception(error))}
            with open(writing, "w", encoding="utf-8", errors="backslashreplace") as pipe:
                json.dump(result, pipe)
            status = 0
        os._exit(status)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        ready = select.select([pipe], [], [], SECONDS)[0]  # nothing comes before the end
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ready, f"it hung: no end within {SECONDS} s"
    assert text and status == 0, f"the process died: status {status} (minus the number of the signal)"
    result = json.loads(text)
    if "error" in result:
        pytest.fail(result["error"][-20_000:], pytrace=False)
    return result["result"]


def limit_this_process():
    warnings.simplefilter("error")  # a warning would be one more line on stderr
    with contextlib.suppress(FileNotFoundError):  # /proc is Linux's
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def fuzz(inputs, at_least=0.03, refused=True):
    """Makes of a test(rng, fixtures...) one that runs with so many random number generators ($FUZZ times as many).

    It says whether its input was accepted: at least this share must be and, unless refused=False, must not be.
    """
    inputs *= int(os.environ.get("FUZZ", 1))

    def decorate(test):
        def run(**fixtures):
            def all_inputs():
                accepted = 0
                for seed in range(inputs):
                    try:
                        accepted += bool(test(random.Random(f"{test.__name__} {seed}"), **fixtures))
                    except BaseException as error:
                        error.add_note(f'the input: random.Random("{test.__name__} {seed}")')
                        raise
                return accepted

            accepted = in_child(all_inputs)
            print(f"{accepted} of {inputs} inputs were accepted")
            assert accepted >= at_least * inputs, f"only {accepted} of {inputs} inputs were accepted"
            assert not refused or inputs - accepted >= at_least * inputs, f"{accepted} of {inputs} were accepted"

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__signature__ = inspect.Signature(list(inspect.signature(test).parameters.values())[1:])  # for pytest
        return run
    return decorate


# ----------------------------------------------------------------------------------------------------------------------
# Random values
# ----------------------------------------------------------------------------------------------------------------------

ODD_TEXTS = ["", " ", "\n", "\r\n", "\t", "\0", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u200b", "\u202e", "\ufeff",
             "\ufffd", "\uffff", "\U0010ffff", "e\u0301\u0323", "\u0130", "ß", "é", "日本語", "👩‍👩‍👧", "🇫🇷", "مرحبا",
             "..", "../../x", "/etc/passwd", "%s", "{}", "{{ 1 }}", "{% if %}", "\\", '"', "'", "<|im_start|>",
             "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
             "__metadata__", "null", "NaN", "-1", "1e400", "hello", " the "]
SURROGATES = ["\ud800", "\udfff", "\udcff", "\ude00\ud83d"]


def any_text(rng, pieces=4, surrogates=True):
    """A text of a few pieces, most of them odd."""
    odd = ODD_TEXTS + SURROGATES * surrogates
    return "".join(rng.choice([lambda: rng.choice(odd), lambda: chr(rng.randrange(0xD800)),
                               lambda: chr(rng.randrange(0xE000, 0x110000)),
                               lambda: "".join(rng.choices(string.printable, k=rng.randrange(8)))])()
                   for _ in range(rng.randint(0, pieces)))


def any_number(rng):
    return rng.choice([rng.randint(-3, 400), rng.choice([0, 1, 2, 8, 16, 64, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
                                                         2**63 - 1, 2**63, 2**64 - 1, 2**64, -2**63, 10**30, 10**400]),
                       rng.uniform(-2, 2), 10 ** rng.uniform(-320, 308),
                       rng.choice([0.0, -0.0, 5e-324, 1e-45, 1.8e308, math.inf, -math.inf, math.nan, 16.0])])


def any_json(rng, size=4):
    """Any JSON value, rarely one that is nested deeply."""
    kind = rng.random()
    if kind < 0.01:
        deep = rng.choice([None, "x", 1])
        for _ in range(rng.choice([50, 200, 480])):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    if kind < 0.3 or size <= 0:
        return rng.choice([None, True, False, any_number(rng), any_number(rng), any_text(rng), any_text(rng, 1)])
    if kind < 0.6:
        return any_number(rng)
    if kind < 0.75:
        return any_text(rng)
    if kind < 0.88:
        return [any_json(rng, size - 2) for _ in range(rng.randint(0, size))]
    return {any_text(rng, 2): any_json(rng, size - 2) for _ in range(rng.randint(0, size))}


def change(rng, tree, new=any_json):
    """Changes one place in a JSON value of lists and objects: `new(rng)` makes what is put there."""
    while True:
        place = rng.randrange(len(tree)) if isinstance(tree, list) and tree else (
            rng.choice(list(tree)) if isinstance(tree, dict) and tree else None)
        if place is None:
            tree |= {any_text(rng, 2): new(rng)} if isinstance(tree, dict) else {}
            return
        if not (isinstance(tree[place], list | dict) and tree[place] and rng.random() < 0.8):
            break
        tree = tree[place]
    what, other = rng.random(), rng.randrange(len(tree)) if isinstance(tree, list) else rng.choice(list(tree))
    if what < 0.5:
        tree[place] = new(rng)
    elif what < 0.6:
        del tree[place]
    elif what < 0.7:  # a copy of what lies beside it
        tree[place] = json.loads(json.dumps(tree[other]))
    elif what < 0.8:
        tree[place], tree[other] = tree[other], tree[place]
    elif what < 0.9 and isinstance(tree, list):
        tree.insert(place, new(rng))
    elif what < 0.9:
        tree[any_text(rng, 2)] = tree.pop(place)
    else:
        tree[place] = {"a": tree[place]} if rng.random() < 0.5 else [tree[place]]


def deep_text(rng, text):
    """Now and then, one number of a JSON text replaced by something that is nested deeper than any reader goes."""
    if rng.random() < 0.02:
        depth = rng.choice([rng.randint(900, 1100), 5000, 100_000])
        numbers = [i for i, char in enumerate(text) if char.isdigit() and text[i - 1] in " [:"]
        at = rng.choice(numbers or [0])
        open_, close = rng.choice([("[", "]"), ('{"a":', "}")])
        return text[:at] + open_ * depth + "1" + close * depth + text[at + 1:]
    return text


def damaged(rng, data, places=4):
    """Some bytes: a few of them changed, or cut, or with something inserted."""
    data = bytearray(data)
    for _ in range(rng.randint(1, places)):
        at = rng.randrange(len(data) + 1)
        what = rng.random()
        if what < 0.7 and data:
            data[at % len(data)] = rng.choice([rng.randrange(256), data[at % len(data)] ^ 1 << rng.randrange(8)])
        elif what < 0.8:
            del data[at:]
        elif what < 0.9:
            del data[at:at + rng.randint(1, 9)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
    return bytes(data)


# ----------------------------------------------------------------------------------------------------------------------
# A model that loads in a millisecond
# ----------------------------------------------------------------------------------------------------------------------

DEMO = qwen3.BUNDLED
N_MERGES = 40
TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}")
TINY = BASE | {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
               "num_attention_heads": 2,
               "num_key_value_heads": 1, "max_position_embeddings": 64}


def reduced_tokenizer():
    """The bundled tokenizer.json with its first merges only."""
    raw = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    merges = raw["model"]["merges"][:N_MERGES]
    letters = [token for token in raw["model"]["vocab"] if len(token) == 1]
    names = [*letters, *dict.fromkeys("".join(merge) for merge in merges)]
    raw["model"] |= {"merges": merges, "vocab": {name: i for i, name in enumerate(names)}}
    for i, token in enumerate(raw["added_tokens"]):
        token["id"] = len(names) + i
    return raw


@pytest.fixture(scope="module")
def memory():
    """A folder in memory where there is one: tens of thousands of files would otherwise wait for the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def tiny(memory):
    """The folder of a random model with the bundled tokenizer's first merges, and a short template."""
    tokenizer, files = reduced_tokenizer(), memory / "tokenizer"
    files.mkdir()
    (files / "tokenizer.json").write_text(json.dumps(tokenizer))
    (files / "chat_template.jinja").write_text(TEMPLATE)
    config = {key: value for key, value in json.loads((DEMO / "tokenizer_config.json").read_text("utf-8")).items()
              if key != "chat_template"}
    config["added_tokens_decoder"] = {str(token["id"]): {name: token[name] for name in token if name != "id"}
                                      for token in tokenizer["added_tokens"]}
    (files / "tokenizer_config.json").write_text(json.dumps(config))
    (files / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.0}')
    n_tokens = tokenizer["added_tokens"][-1]["id"] + 1
    return make_random_model(TINY | {"vocab_size": n_tokens}, memory / "model", "float32", tokenizer=files)


@pytest.fixture(scope="module")
def model(tiny):
    return qwen3.load_model(tiny)


@pytest.fixture(scope="module")
def talker(model):
    """The same with the bundled model's chat template."""
    demo = load_tokenizer(DEMO)
    return dataclasses.replace(model, tokenizer=Tokenizer(model.tokenizer.backend, demo.chat_template,
                                                          demo.named_tokens))


@pytest.fixture
def scratch(memory):
    """A folder for the files of one test, which it overwrites with each input."""
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


def use(loaded):
    """A model that could be loaded answers, or says why not."""
    with np.errstate(all="ignore"):
        return works_or_refused(lambda: list(qwen3.generate(loaded, [1, 2, 3], 1, seed=0)))


# ----------------------------------------------------------------------------------------------------------------------
# safetensors files. Random bytes in headers are in test_bad_input.py; here the JSON is sound, what it says is not.
# ----------------------------------------------------------------------------------------------------------------------

DTYPES = ["F32", "F16", "BF16", "F64", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL", "F8_E4M3",
          "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "f32", "F31", "", "BF16 "]


@pytest.fixture(scope="module")
def weights_file(memory):
    """(config, header, data) of a checkpoint of one layer."""
    path = make_random_model(TINY | {"vocab_size": 20}, memory / "weights", "float32")
    return qwen3.load_config(path), *read_safetensors(path / "model.safetensors")


def any_shape(rng):
    return rng.choice([lambda: [any_number(rng) for _ in range(rng.randint(0, 4))], lambda: [1] * rng.randint(0, 80),
                       lambda: [rng.choice([0, 1, 2**31, 2**62, 2**63, 2**64 - 1]) for _ in range(rng.randint(1, 4))],
                       lambda: [16, 16], lambda: [rng.randint(0, 400)]])()


def another_shape(rng, shape):
    """A shape of as many elements, which no length gives away."""
    if not isinstance(shape, list) or not shape or not all(qwen3.is_whole(size, 0) for size in shape):
        return [1] * 100
    shape = [math.prod(shape)]
    for _ in range(rng.randint(0, 3)):
        divisor = rng.choice([d for d in range(1, 30) if shape[-1] % d == 0])
        shape[-1:] = [divisor, shape[-1] // divisor]
    return shape + [1] * rng.choice([0, 1, 30, 59, 60, 61, 62, 64, 100])


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
# The index, and where links lead
# ----------------------------------------------------------------------------------------------------------------------

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OUTSIDE = np.float32(7)  # all weights of the checkpoint that lies outside of the model's folder


@pytest.fixture(scope="module")
def sharded(memory):
    """A folder with two shards, one with the same but for the weights, which must not be read, and the config."""
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
    home = scratch / rng.choice(["models--x--y", "models--x--y", "models--x--y", "x"])
    blobs, folder = home / "blobs", home / rng.choice(["snapshots", "snapshots", "snapshots", "elsewhere"]) / "commit"
    for path in (blobs, folder, scratch / "blobs"):
        path.mkdir(parents=True, exist_ok=True)
    return home, blobs, folder


def place(rng, folder, name, inside, outside, blobs):
    """Puts a file, link or something else at folder/name -> True if it may be read."""
    source, target = inside / name, folder / name
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
    kind = rng.choice(["copy"] * 9 + [
        "hard link", "blob", "blob", "shared blob", "blob of another", "blob that is a link", "beside", "loop", "out",
        "relative out", "out by two", "folder", "fifo", "dangling", "empty", "cut", "device"])
    link = None
    if kind in ("copy", "hard link", "beside"):
        (shutil.copy if kind == "copy" else os.link)(source, target if kind != "beside" else folder / f"real {name}")
        link = f"real {name}" if kind == "beside" else None
    elif kind == "blob":
        shutil.copy(source, blobs / name)
        link = f"../../blobs/{name}"
    elif kind == "shared blob":  # in the store of all models
        shutil.copy(source, blobs.parents[1] / "blobs" / name)
        (blobs / f"{name} shared").symlink_to(f"../../blobs/{name}")
        link = f"../../blobs/{name} shared"
    elif kind == "blob of another":  # another model of the hub's cache: it is not this one's
        other = blobs.parents[1] / "models--other" / "blobs"
        other.mkdir(parents=True, exist_ok=True)
        os.path.exists(other / name) or os.symlink(outside / name, other / name)
        link = f"../../../models--other/blobs/{name}"
    elif kind == "blob that is a link":
        (blobs / f"{name} out").symlink_to(outside / name)
        link = f"../../blobs/{name} out"
    elif kind == "out by two":
        (folder / f"first {name}").symlink_to(outside / name)
        link = f"first {name}"
    elif kind == "folder":
        target.mkdir()
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind in ("empty", "cut"):
        target.write_bytes(b"" if kind == "empty" else source.read_bytes()[:rng.randint(0, 300)])
    else:
        link = {"loop": name, "out": outside / name, "relative out": os.path.relpath(outside / name, folder),
                "dangling": "nowhere", "device": "/dev/zero"}[kind]
    if link is not None:
        target.symlink_to(link)
    in_hub = folder.parent.name == "snapshots" and blobs.parent.name.startswith("models--")
    return kind in ("copy", "hard link", "beside") or (in_hub and kind in ("blob", "shared blob"))


ODD_NAMES = ["", ".", "..", "x", "../outside/" + SHARDS[0], "outside/" + SHARDS[0], "./" + SHARDS[0], SHARDS[0] + "/",
             "..\\outside\\" + SHARDS[0], SHARDS[0] + "\0", SHARDS[0] + "\n", SHARDS[0].upper(), " " + SHARDS[0],
             SHARDS[0][:-1], "．．／outside／" + SHARDS[0], "%2e%2e%2foutside%2f" + SHARDS[0], "~/" + SHARDS[0],
             "$HOME/" + SHARDS[0], "-", "/dev/zero", "/dev/stdin", "file:///etc/passwd.safetensors", "\0.safetensors",
             "../.safetensors", "x" * 256 + ".safetensors", "link/" + SHARDS[0], "\ud800.safetensors",
             "CON.safetensors", "*.safetensors", "config.json"]


@fuzz(2500)
def test_index_and_links(rng, sharded, scratch):
    """No name in an index and no link makes the loader read a file from outside of the model's folder."""
    inside, outside, config = sharded
    refuse_to_open(outside)
    home, blobs, folder = new_folders(rng, scratch)
    (folder / "outside").symlink_to(outside)
    (home / "outside").symlink_to(outside)
    index = json.loads((inside / "model.safetensors.index.json").read_bytes())
    readable = sound = all([place(rng, folder, shard, inside, outside, blobs) for shard in SHARDS])
    weight_map = index["weight_map"]
    if rng.random() < 0.5:
        sound = False
        for _ in range(rng.randint(1, 2)):
            name = rng.choice([*weight_map, any_text(rng)])
            weight_map[name] = rng.choice([rng.choice(ODD_NAMES), str(outside / rng.choice(SHARDS)), any_json(rng),
                                           "../" * rng.randint(1, 9) + str(outside / SHARDS[0])[1:],
                                           rng.choice(SHARDS)])
        if rng.random() < 0.2:
            change(rng, index)
    text = deep_text(rng, json.dumps(index))
    sound = sound and text == json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    if rng.random() < 0.1:
        sound = sound and place(rng, folder, "model.safetensors.index.json", inside, outside, blobs)
    given = folder
    if rng.random() < 0.1:  # the folder itself may be a link: it is the user who names it
        given = scratch / "link"
        given.symlink_to(folder)
    try:
        weights = works_or_refused(qwen3.load_weights, given, config)
        assert readable if weights is not None else not sound
        if weights is not None:
            assert not np.any(weights["embed_tokens"] == OUTSIDE) and not np.any(weights["norm"] == OUTSIDE)
    finally:
        given.is_symlink() and given.unlink()
        shutil.rmtree(home)
        shutil.rmtree(scratch / "models--other", ignore_errors=True)
    return weights is not None


OTHER_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja"]


@fuzz(2000)
def test_links_of_the_small_files(rng, tiny, scratch):
    """A model's JSON files and template are not read through a link that leads out, either."""
    outside = scratch / "outside"
    if not outside.exists():
        outside.mkdir()
        for file in tiny.iterdir():
            shutil.copy(file, outside / file.name)
    refuse_to_open(outside)
    home, blobs, folder = new_folders(rng, scratch)
    for file in tiny.iterdir():
        os.link(file, folder / file.name)
    sound = True
    for name in rng.sample(OTHER_FILES, rng.randint(1, 2)):
        sound = place(rng, folder, name, tiny, outside, blobs) and sound
    try:
        loaded = works_or_refused(qwen3.load_model, folder)
        assert loaded is not None or not sound
        in_hub = folder.parent.name == "snapshots" and home.name.startswith("models--")
        homes = [folder, *([blobs, scratch / "blobs"] if in_hub else [])]
        assert loaded is None or all(any(Path(os.path.realpath(folder / name)).is_relative_to(home) for home in homes)
                                     for name in OTHER_FILES)
    finally:
        shutil.rmtree(home)
        shutil.rmtree(scratch / "models--other", ignore_errors=True)
    return loaded is not None


# ----------------------------------------------------------------------------------------------------------------------
# config.json and generation_config.json
# ----------------------------------------------------------------------------------------------------------------------

CONFIG_KEYS = sorted({*checkpoint.KNOWN_KEYS, "factor", "sliding_window", "partial_rotary_factor", "num_experts"})
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
             "beta_fast", "beta_slow", "truncate", "mscale"]


def copy_files(source, target):
    """The files of a model in a folder for one input, as hard links but for those that the test writes."""
    for file in source.iterdir():
        if not (target / file.name).exists():
            os.link(file, target / file.name)


def write_new(file, content):
    """Writes a file anew, because the old one is a hard link to what all inputs share."""
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def any_rope(rng):
    rope = dict(YARN) if rng.random() < 0.7 else {}
    for key in rng.sample(ROPE_KEYS, rng.randint(0, 3)):
        rope[key] = rng.choice([any_number(rng), rng.uniform(1, 64), rng.choice(["yarn", "default", "linear"]),
                                any_json(rng)])
    return rope


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


# ----------------------------------------------------------------------------------------------------------------------
# tokenizer.json and tokenizer_config.json
# ----------------------------------------------------------------------------------------------------------------------

COMPONENTS = [  # what else the library knows, sound or nearly so
    {"type": "NFD"}, {"type": "NFKC"}, {"type": "Lowercase"},
    {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "StripAccents"}, {"type": "Nmt"},
    {"type": "Prepend", "prepend": "▁"}, {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": ".*"}, "content": "x" * 50}, {"type": "Sequence", "normalizers": []},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
     "lowercase": True},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, {"type": "ByteLevel"},
    {"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "Digits", "individual_digits": True},
    {"type": "UnicodeScripts"}, {"type": "BertPreTokenizer"}, {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "FixedLength", "length": 0}, {"type": "CharDelimiterSplit", "delimiter": "e"},
    {"type": "Split", "pattern": {"Regex": "(?=a)"}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": False},
    {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
     "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}], "pair": [],
     "special_tokens": {}},
    {"type": "BertProcessing", "sep": ["<|im_end|>", 298], "cls": ["<|im_start|>", 10**6]}, {"type": "Fuse"},
    {"type": "ByteFallback"},
    {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True, "add_prefix_space": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "BPEDecoder", "suffix": "</w>"}, {"type": "CTC"},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0]]}, {"type": "BPE", "vocab": {}, "merges": []},
    {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": ["a b"]},
    {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []},
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5},
    {"strategy": {"Fixed": 10**12}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0,
     "pad_token": "x"},
    {"id": 0, "content": "a", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True, "special": True},
    {"id": 2**32 - 1, "content": "", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
     "special": False},
]
PARTS = ["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "truncation", "padding", "added_tokens"]


def any_part(rng):
    return copy.deepcopy(rng.choice(COMPONENTS)) if rng.random() < 0.5 else any_json(rng)


def use_tokenizer(tokenizer, rng):
    """Encoding, decoding and streaming with a tokenizer that could be loaded: consistent, or refused in one line."""
    ids = works_or_refused(tokenizer.encode, any_text(rng, surrogates=False) + "Hello <|im_start|> 123 é日本")
    ids = [0, 1, 299, 2**32, -1] if ids is None else ids
    assert all(type(token) is int for token in ids)
    text = tokenizer.decode(ids)
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text
    works_or_refused(tokenizer.apply_chat_template, [{"role": "user", "content": "Hi"}], enable_thinking=True)


@fuzz(3000)
def test_tokenizer_json(rng, tiny, scratch):
    copy_files(tiny, scratch)
    raw = json.loads((tiny / "tokenizer.json").read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        what = rng.random()
        if what < 0.35:
            part = rng.choice(PARTS)
            raw[part] = any_part(rng) if part != "added_tokens" else [any_part(rng) for _ in range(rng.randint(0, 3))]
        elif what < 0.45 and isinstance(raw.get("added_tokens"), list):
            raw["added_tokens"] += [rng.choice(COMPONENTS[-2:]) | {"id": rng.choice([300, 322, 400, 2**31]),
                                                                   "content": any_text(rng)}]
        elif what < 0.55 and isinstance(raw.get("model"), dict):
            raw["model"][rng.choice(["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                                     "fuse_unk",
                                     "byte_fallback", "ignore_merges", "vocab", "merges", "type"])] = any_json(rng)
        else:
            change(rng, raw, any_part)
    text = deep_text(rng, json.dumps(raw, ensure_ascii=rng.random() < 0.5)).encode("utf-8", "surrogatepass")
    write_new(scratch / "tokenizer.json", damaged(rng, text) if rng.random() < 0.2 else text)
    tokenizer = works_or_refused(load_tokenizer, scratch)
    if tokenizer is not None:
        use_tokenizer(tokenizer, rng)
    return tokenizer is not None


def test_normalizer_that_multiplies_the_text(tiny, scratch):
    """Twelve times ten for one: a kilobyte of tokenizer.json must not make a terabyte of a letter."""
    copy_files(tiny, scratch)
    raw = json.loads((tiny / "tokenizer.json").read_bytes())
    tenfold = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 10}
    raw["normalizer"] = {"type": "Sequence", "normalizers": [tenfold] * 12}
    write_new(scratch / "tokenizer.json", json.dumps(raw))
    assert in_child(lambda: works_or_refused(lambda: load_tokenizer(scratch).encode("x"))) is None


@fuzz(3000)
def test_tokenizer_config(rng, tiny, scratch):
    copy_files(tiny, scratch)
    raw = json.loads((tiny / "tokenizer_config.json").read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        what = rng.random()
        if what < 0.3:
            raw[rng.choice(["eos_token", "bos_token", "pad_token", "unk_token", "x_token", "messages_token", "_token",
                            "chat_template", "added_tokens_decoder", any_text(rng)])] = any_json(rng)
        elif what < 0.6 and isinstance(raw.get("added_tokens_decoder"), dict):
            key = rng.choice([*raw["added_tokens_decoder"], "0", "322", "323", "4294967296", "-1", "٣", "1e3",
                              any_text(rng)])
            raw["added_tokens_decoder"][key] = rng.choice([
                any_json(rng), {"content": any_text(rng)}, {"content": any_json(rng), "special": any_json(rng)}, {},
                {"special": True}, {"content": "<new>", "lstrip": rng.choice([1, None, True])}, {"content": "a"}])
        else:
            change(rng, raw)
    text = deep_text(rng, json.dumps(raw, ensure_ascii=rng.random() < 0.5)).encode("utf-8", "surrogatepass")
    write_new(scratch / "tokenizer_config.json", damaged(rng, text) if rng.random() < 0.1 else text)
    tokenizer = works_or_refused(load_tokenizer, scratch)
    if tokenizer is not None:
        use_tokenizer(tokenizer, rng)
    return tokenizer is not None


# ----------------------------------------------------------------------------------------------------------------------
# Conversations and tools
# ----------------------------------------------------------------------------------------------------------------------

def any_content(rng):
    return rng.choice([lambda: any_text(rng), lambda: any_text(rng, surrogates=False), lambda: "Hello",
                       lambda: any_json(rng),
                       lambda: [{"type": "text", "text": any_text(rng)} for _ in range(rng.randint(0, 3))],
                       lambda: [{"type": rng.choice(["text", "image"]), "text": any_json(rng)}, any_json(rng)]])()


def any_call(rng):
    function = {"name": any_text(rng), "arguments": rng.choice([{"a": any_json(rng)}, any_json(rng), '{"a": 1}', {}])}
    if rng.random() < 0.1:
        change(rng, function)
    return rng.choice([function, {"type": "function", "function": function, "id": any_json(rng)},
                       {"function": any_json(rng)}])


def any_message(rng):
    message = {"role": rng.choice(["user", "user", "user", "assistant", "assistant", "system", "tool"]),
               "content": any_content(rng)}
    if rng.random() < 0.2:
        message["tool_calls"] = rng.choice([[any_call(rng) for _ in range(rng.randint(0, 3))], any_json(rng)])
    if rng.random() < 0.2:
        message[rng.choice(["reasoning_content", "reasoning", "thinking"])] = rng.choice([any_text(rng), any_json(rng)])
    if rng.random() < 0.1:
        message[rng.choice(["items", "keys", "name", "tool_call_id", "__class__", any_text(rng)])] = any_json(rng)
    if rng.random() < 0.05:
        message["role"] = any_json(rng)
    return any_json(rng) if rng.random() < 0.03 else message


def any_tool(rng):
    function = {"name": any_text(rng), "description": rng.choice([any_text(rng), any_json(rng)]),
                "parameters": rng.choice([{"type": "object", "properties": {any_text(rng): any_json(rng)}},
                                          any_json(rng)])}
    if rng.random() < 0.1:
        change(rng, function)
    return rng.choice([function, {"type": "function", "function": function}, {"type": "function", "function": function},
                       {"function": any_json(rng), "name": any_json(rng)}, any_json(rng)])


def write_odd_json(rng, file, value):
    """Writes a JSON value, now and then with bytes that are none."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    write_new(file, rng.choice([lambda: text] * 17 + [lambda: b"\xef\xbb\xbf" + text, lambda: damaged(rng, text),
                                                      lambda: text.decode("utf-8", "replace").encode("utf-16")])())


def render(talker, messages, tools, rng):
    """The ids of a conversation that was accepted, or None if the template or the tokenizer refuses it."""
    options = {"enable_thinking": rng.choice([None, True, False]), "join_text_parts": True}
    before = repr((messages, tools))
    text = works_or_refused(lambda: talker.tokenizer.apply_chat_template(messages, tools, **options))
    assert repr((messages, tools)) == before  # the caller's are as they were
    if text is None:
        return None
    last = messages[-1]
    if last["role"] == "user" and isinstance(last["content"], str):
        assert last["content"] in text
    return works_or_refused(talker.tokenizer.encode, text)


@fuzz(4000)
def test_messages(rng, talker, scratch):
    file = scratch / "messages.json"
    value = [any_message(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 5]))]
    if rng.random() < 0.3:
        value = {"messages": value} | ({"tools": rng.choice([[any_tool(rng)], any_json(rng), None])}
                                       if rng.random() < 0.6 else {})
    if rng.random() < 0.05:
        change(rng, value) if value else None
    write_odd_json(rng, file, value)
    read = works_or_refused(qwen3_files.read_messages, str(file))
    return read is not None and render(talker, *read, rng) is not None


@fuzz(3000)
def test_tools(rng, talker, scratch):
    file = scratch / "tools.json"
    value = [any_tool(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))] if rng.random() < 0.9 else any_json(rng)
    write_odd_json(rng, file, value)
    tools = works_or_refused(qwen3_files.read_tools, str(file))
    return tools is not None and render(talker, [{"role": "user", "content": "Hi"}], tools, rng) is not None


# ----------------------------------------------------------------------------------------------------------------------
# Saved prompts
# ----------------------------------------------------------------------------------------------------------------------

class Bomb:
    """What, unpickled, leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (self.mark, "w")


def filled_cache(model, ids):
    cache = qwen3.KVCache(model.config)
    qwen3.forward(model, ids, cache)
    return cache


def continued(model, ids, cache=None):
    return list(qwen3.generate(model, ids, 4, temperature=0, eos_token_ids=(), cache=cache))


@pytest.fixture(scope="module")
def saved(model, tiny, memory):
    """(ids, their continuation, the bytes of their cache, and those of caches of another model and of other ids)."""
    ids, file = list(range(40, 60)), memory / "cache"
    other = shutil.copytree(tiny, memory / "other")
    header, data = read_safetensors(other / "model.safetensors")
    write_safetensors(other / "model.safetensors", header, (np.frombuffer(data, "<f4") * np.float32(1.5)).tobytes())
    contents = []
    for owner, prompt in ((model, ids), (qwen3.load_model(other), ids), (model, ids[:5])):
        qwen3_files.save_prompt_cache(filled_cache(owner, prompt), owner, file)
        contents.append(file.read_bytes())
    return ids, continued(model, ids), contents


def odd_cache_file(rng, file, contents, scratch):
    """Something at `file` that is no sound cache of this model's -> whether it could be one."""
    own, other_model, shorter = contents
    kind = rng.choice(["bytes"] * 6 + ["header"] * 8 + ["mixed", "other model", "pickle", "numpy", "weights", "empty",
                                                        "odd"])
    content = b""
    if kind == "bytes":
        content = damaged(rng, own)
    elif kind == "header":
        n = int.from_bytes(own[:8], "little")
        header, data = json.loads(own[8:8 + n]), own[8 + n:]
        what = rng.random()
        if what < 0.3:
            change(rng, header)
        elif what < 0.5:
            header["__metadata__"][rng.choice(["format", "model", "crc32", "x"])] = any_text(rng)
        else:
            key = rng.choice(["token_ids", "k", "v"])
            entry = header[key]
            entry["dtype"] = rng.choice([*DTYPES, entry["dtype"], entry["dtype"]])
            entry["shape"] = rng.choice([entry["shape"], any_shape(rng), another_shape(rng, entry["shape"])])
            if rng.random() < 0.2:
                header[rng.choice(["token_ids", "k", "v", any_text(rng)])] = header.pop(key)
        write_safetensors(file, header, data)
        return
    elif kind == "mixed":  # the header of one cache with the data of another
        n, m = (8 + int.from_bytes(part[:8], "little") for part in (own, shorter))
        content = rng.choice([own[:n] + shorter[m:], shorter[:m] + own[n:], own[:n] + other_model[n:], own + shorter])
    elif kind == "other model":
        content = other_model
    elif kind == "pickle":
        content = pickle.dumps(Bomb(str(scratch / "mark")), rng.randint(0, 5))
    elif kind == "numpy":
        buffer = io.BytesIO()
        np.save(buffer, np.array([Bomb(str(scratch / "mark"))], object), allow_pickle=True)
        content = buffer.getvalue()
    elif kind == "weights":
        content = rng.choice([b"{}", b"\0" * rng.randint(0, 40), (2).to_bytes(8, "little") + b"{}"])
    elif kind == "odd":
        rng.choice([lambda: file.mkdir(), lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"),
                    lambda: file.symlink_to(file), lambda: file.symlink_to("/proc/self/mem"), lambda: None])()
        return
    file.write_bytes(content)


def clear(file):
    with contextlib.suppress(FileNotFoundError):
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()


@fuzz(4000)
def test_prompt_cache_file(rng, model, saved, scratch):
    """What is loaded gives the same tokens as computing the prompt does; nothing in a file is run."""
    ids, expected, contents = saved
    file = scratch / "cache"
    clear(file)
    if rng.random() < 0.05:
        file.write_bytes(contents[rng.choice([0, 2])])
    else:
        odd_cache_file(rng, file, contents, scratch)
    cache = works_or_refused(qwen3_files.load_prompt_cache, model, file)
    assert not (scratch / "mark").exists()
    if cache is not None:
        assert file.read_bytes() != contents[1]  # another model's
        assert 1 <= cache.length <= len(ids) and cache.common_prefix(np.array(ids)) == cache.length
        assert continued(model, ids, cache) == expected
    return cache is not None


@fuzz(2000, refused=False)
def test_prompt_cache_round_trip(rng, model, scratch):
    """Saved and loaded, over whatever was there before: the same ids, keys and values; no other file is left."""
    ids = [rng.randrange(model.config.vocab_size) for _ in range(rng.choice([1, 2, rng.randint(1, 60)]))]
    cache, file = filled_cache(model, ids), scratch / "cache"
    qwen3_files.save_prompt_cache(cache, model, file)
    loaded = qwen3_files.load_prompt_cache(model, file)
    n = cache.length
    assert loaded.length == n and loaded.token_ids[0, :n].tolist() == ids
    for array, expected in ((loaded.k, cache.k), (loaded.v, cache.v)):
        assert np.array_equal(array[..., :n, :], expected[..., :n, :])
    prompt = ids[:rng.randint(1, n)] + [rng.randrange(model.config.vocab_size) for _ in range(rng.randint(0, 3))]
    assert continued(model, prompt, loaded) == continued(model, prompt)
    assert os.listdir(scratch) == ["cache"]
    return True


def killed(work, after=None):
    """Runs work(ready) in a process that is killed, by itself or so many seconds after it has called ready()."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reading)
            work(lambda: os.write(writing, b"x"))
        os._exit(1)
    os.close(writing)
    with open(reading, "rb", buffering=0) as pipe:
        pipe.read(1)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die():
    signal.raise_signal(signal.SIGKILL)


def dying_open(n_bytes):
    """An open() whose file takes so many bytes; then the process is killed."""
    def opened(*args, **options):
        file = open(*args, **options)  # noqa: SIM115 (closed by whoever called this)
        left = n_bytes

        class Writer:
            def write(self, data):
                nonlocal left
                data = bytes(data)
                file.write(data[:left])
                left -= len(data)
                if left <= 0:
                    file.flush()
                    die()

            def __getattr__(self, name):
                return getattr(file, name)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

        return Writer()
    return opened


@pytest.mark.parametrize("before", [False, True], ids=["a new file", "an old file"])
def test_killed_while_saving(model, tmp_path, monkeypatch, before):
    """After any number of bytes, and between the steps that follow: the old file, the new one, or none.

    All processes have the same number, as in a container: what one has left behind is in no other's way.
    """
    monkeypatch.setattr(os, "getpid", lambda: 7)
    file, old, new = tmp_path / "cache", filled_cache(model, [5, 6, 7]), filled_cache(model, list(range(30)))
    qwen3_files.save_prompt_cache(new, model, file)
    size = file.stat().st_size
    rng = random.Random(0)
    points = [0, 1, 7, 8, size - 1, *(rng.randrange(size) for _ in range(15)), "fsync", "before replace",
              "after replace"]
    for point in points:
        file.unlink(missing_ok=True)
        if before:
            qwen3_files.save_prompt_cache(old, model, file)

        def save(ready, point=point):
            replace = os.replace
            if point == "fsync":
                os.fsync = lambda _: die()
            elif point == "before replace":
                os.replace = lambda *_: die()
            elif point == "after replace":
                os.replace = lambda *names: (replace(*names), die())
            else:
                writing.open = dying_open(point)
            qwen3_files.save_prompt_cache(new, model, file)

        assert killed(save) == -signal.SIGKILL
        if not before and point != "after replace":
            assert not file.exists()
        else:
            length = qwen3_files.load_prompt_cache(model, file).length
            assert length == (30 if point == "after replace" else 3)
    qwen3_files.save_prompt_cache(new, model, file)
    assert qwen3_files.load_prompt_cache(model, file).length == 30


def test_killed_at_any_moment_while_saving(model, tmp_path):
    """As above, at moments that nobody chose."""
    file, caches = tmp_path / "cache", [filled_cache(model, list(range(n))) for n in (3, 60)]
    rng = random.Random(0)

    def save_forever(ready):
        ready()
        for cache in itertools.cycle(caches):
            qwen3_files.save_prompt_cache(cache, model, file)

    for _ in range(40):
        killed(save_forever, rng.uniform(0, 0.01))
        if file.exists():
            assert qwen3_files.load_prompt_cache(model, file).length in (3, 60)
    qwen3_files.save_prompt_cache(caches[0], model, file)
    assert qwen3_files.load_prompt_cache(model, file).length == 3


@pytest.mark.parametrize("name", ["/nowhere/..", "/nowhere/../", "//", "/", "", ".", "nowhere/x", "a\0b", "\ud800",
                                  "x" * 300, "é" * 250])
def test_names_that_cannot_be_written(model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    message_of(qwen3_files.save_prompt_cache, filled_cache(model, [1, 2, 3]), model, name)
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def odd_files(tiny, memory):
    """Names of files of all kinds: texts, JSON, and what is neither."""
    path = memory / "odd"
    path.mkdir()
    message = [{"role": "user", "content": "Hi"}]
    contents = {
        "text": b"Hello\n", "lines": b"one\r\ntwo\n\nthree", "empty": b"", "newline": b"\n", "nul": b"a\0b",
        "latin": b"caf\xe9",
        "bom": b"\xef\xbb\xbfHi", "only bom": b"\xef\xbb\xbf", "utf16": "Hi".encode("utf-16"), "half": "é".encode()[:1],
        "controls": bytes(range(32)), "surrogate": "\ud800".encode("utf-8", "surrogatepass"), "long": b"word " * 20_000,
        "special": b"<|im_end|><think>", "messages": json.dumps(message).encode(), "number": b"1",
        "deep": b"[" * 100_000,
        "both": json.dumps({"messages": message, "tools": [{"name": "f"}]}).encode(), "tools": b'[{"name": "f"}]',
        "system": b'[{"role": "system", "content": "Be brief."}]', "call": json.dumps([*message, {"role": "assistant",
            "tool_calls": [{"name": "f", "arguments": {}}]}, {"role": "tool", "content": "5"}]).encode(),
        "odd role": b'[{"role": "\\ud800", "content": ""}]', "a\nb": b"Hello", "\udcff": b"Hello", "-": b"dash",
        "日本": b"Hello",
    }
    for name, content in contents.items():
        (path / name).write_bytes(content)
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")
    (path / "link").symlink_to("text")
    with open(path / "huge", "wb") as file:
        file.truncate(2**40)  # of nothing: it takes no place on the disk
    qwen3_files.save_prompt_cache(filled_cache(qwen3.load_model(tiny), [1, 2, 3]), qwen3.load_model(tiny),
                                  path / "cache")
    return path


TEXT_FILES = ["text", "lines", "messages", "tools", "both", "call", "system", "bom", "link", "special"]
SPECIAL_FILES = ["", ".", "..", "/", "/dev/null", "/nowhere/..", "nowhere/x", "a\0b", "\ud800", "x" * 300,
                 "/proc/self/mem", "~"]


def any_file(rng, path):
    kind = rng.random()
    if kind < 0.002:
        return rng.choice(["/dev/zero", str(path / "huge")])  # the most that is read of them are 64 MiB
    if kind < 0.1:
        return rng.choice([*SPECIAL_FILES, any_text(rng)])
    if kind < 0.2:
        return "-"
    return str(path / rng.choice(sorted({*os.listdir(path)} - {"huge"}) if kind < 0.5 else TEXT_FILES))


def odd_number(rng):
    number = any_number(rng)
    return rng.choice([str(number) if abs(number) < 10**300 else "1e999", "", "x", "1_0", "٣", "0x10", "1e5", "+2",
                       " 3 ", "--", "9" * 5000])


def options_with_values(path, saving):
    """Option -> a function that makes a value: mostly one that it may have."""
    def whole(low, high):
        return lambda rng: str(rng.randint(low, high)) if rng.random() < 0.75 else odd_number(rng)

    def real(low, high):
        return lambda rng: str(round(rng.uniform(low, high), 3)) if rng.random() < 0.75 else odd_number(rng)

    def text(rng):
        return rng.choice(["Be brief.", "e", any_text(rng)])

    def file(rng):
        return any_file(rng, path)

    def fitting(*names):
        return lambda rng: str(path / rng.choice(names)) if rng.random() < 0.7 else any_file(rng, path)

    def cache(rng):
        if rng.random() < 0.6:
            return str(rng.choice([saving / "cache", saving / "new", path / "cache"]))
        name = any_file(rng, path)  # it may be written: so of odd texts only those that stay in the working directory
        return name if name in SPECIAL_FILES or name.startswith(str(path)) else name.replace("/", "")

    return {"--file": file, "--system": text, "--system-file": file,
            "--messages": fitting("messages", "both", "call", "system"),
            "--tools": fitting("tools"), "--think-budget": whole(0, 5), "--max-tokens": whole(1, 6), "--stop": text,
            "--temperature": real(0, 3), "--top-k": whole(0, 400), "--top-p": real(0, 1), "--min-p": real(0, 1),
            "--repetition-penalty": real(0.5, 2), "--presence-penalty": real(-2, 2), "--frequency-penalty": real(-2, 2),
            "--seed": whole(0, 99), "--logprobs": whole(0, 3), "--prompt-cache": cache, "--model": file}


SWITCHES = ["--raw", "--score", "--chat", "--think", "--no-think", "--hide-thinking", "--greedy", "--json", "--stats",
            "--offline", "--help", "--nonsense", "--sc", "--s", "-", "-x", "--chat=1"]
SWITCH_WEIGHTS = [6, 3, 2, 4, 4, 3, 2, 4, 3, 1, 0.3, 0.3, 0.3, 0.3, 0.5, 0.3, 0.3]


def any_arguments(rng, tiny, options):
    arguments = [["Hello"] if rng.random() < 0.6 else [rng.choice(["-", any_text(rng)])]] * (rng.random() < 0.85)
    names = [name for name in options if name not in ("--model", "--max-tokens")]
    for name in rng.sample(names, rng.choice([0, 1, 1, 2, 2, 3, 4, 6])) + ["--max-tokens"] * (rng.random() < 0.6):
        value = options[name](rng)
        arguments.append([f"{name}={value}"] if rng.random() < 0.5 or value.startswith("-") else [name, value])
    switches = rng.choices(SWITCHES, SWITCH_WEIGHTS, k=rng.choice([0, 0, 1, 1, 2, 3]))
    arguments += [[name] for name in dict.fromkeys(switches)]
    arguments.append(["--model", str(tiny) if rng.random() < 0.97 else options["--model"](rng)])
    rng.shuffle(arguments)
    if rng.random() < 0.05:
        arguments.append(rng.choice([[rng.choice(list(options))], ["--"], ["--", "-x"], ["--", any_text(rng)]]))
    return [argument for group in arguments for argument in group]


class Stream(io.TextIOWrapper):
    """A stream as Python opens one to a file or a pipe."""

    def __init__(self, content=b"", errors="strict"):
        buffer = io.BytesIO(content) if isinstance(content, bytes) else io.BufferedReader(content)
        super().__init__(buffer, "utf-8", errors, newline="" if not content else None, write_through=True)

    def write(self, text):
        assert self.buffer.tell() < 2**24, f"it writes without end: {text[:200]}"
        return super().write(text)

    def text(self):
        return self.buffer.getvalue().decode()


def run_cli(arguments, stdin, errors="strict"):
    """(status, stdout, stderr) of the command line in this process, with its streams replaced."""
    replaced = sys.stdin, sys.stdout, sys.stderr
    streams = sys.stdin, sys.stdout, sys.stderr = Stream(stdin, errors), Stream(), Stream(errors="backslashreplace")
    try:
        status = qwen3_cli.main(arguments)
    except SystemExit as stop:  # argparse ends wrong usage, and --help, so
        status = stop.code
    finally:
        sys.stdin, sys.stdout, sys.stderr = replaced
    return status, streams[1].text(), streams[2].text()


def pipe_content(rng, path):
    """What is piped in: a file's content, or any bytes. No lines that are commands of the chat."""
    content = rng.choice([(path / rng.choice(TEXT_FILES)).read_bytes(), rng.randbytes(rng.randint(0, 9)), b"",
                          any_text(rng).encode("utf-8", "surrogatepass"), b"Hello\n\xff\nHello\n", b"Hello\n\xe9",
                          b'"""\na', b"a\\\n", b"a\\"])
    return content.replace(b"/", b"")


@fuzz(2500)
def test_command_line(rng, tiny, odd_files, scratch):
    """Status 0 and an answer; or status 1 or 2 and one line that says why not."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch), "COLUMNS": "100"}
    saving, empty = scratch / "saving", scratch / "empty"
    for folder in (saving, empty):
        folder.mkdir(exist_ok=True)
    os.chdir(empty)
    arguments = any_arguments(rng, tiny, options_with_values(odd_files, saving))
    stdin = pipe_content(rng, odd_files)
    before = sorted(os.listdir(odd_files))
    status, out, err = run_cli(arguments, stdin, rng.choice(["strict", "surrogateescape"]))
    lines = [line for line in err.splitlines() if not line.startswith("No --model given")]
    where = (arguments, stdin, status, out[-300:], err[-300:])
    assert status in (0, 1, 2) and "Traceback" not in err and "not enough memory" not in err, where
    if status == 2:
        assert len(lines) == 1 and not out and "error:" in lines[0], where
    elif "--chat" in arguments:
        assert len(lines) <= 3 * len(stdin) + 3, where
    elif status == 1:
        assert len(lines) == 1, where
    else:
        assert out.endswith("\n"), where
        if "--json" in arguments and "--help" not in arguments:
            for line in out[:-1].split("\n"):
                assert isinstance(json.loads(line, parse_constant=pytest.fail), dict), where
    assert sorted(os.listdir(odd_files)) == before, where
    for name in os.listdir(empty):  # only what --prompt-cache names
        assert any(name in argument for argument in arguments), where
        (empty / name).unlink()
    return status == 0


class Endless(io.RawIOBase):
    """A pipe that never ends."""
    taken = 0

    def readable(self):
        return True

    def readinto(self, buffer):
        self.taken += len(buffer)
        assert self.taken < 2**28, "it reads without end"
        return len(buffer)


@pytest.mark.parametrize("arguments", [["-"], ["--raw", "-"], ["--score"], ["Hi", "--messages", "-"], ["--file", "-"]])
def test_endless_stdin(tiny, arguments):
    """No more is read than a model could hold."""
    status, out, err = in_child(lambda: run_cli(["--model", str(tiny), *arguments], Endless()))
    assert status == 1 and not out
    assert_one_line(err, "stdin", "longer")


def with_norm(tiny, path, value):
    """The tiny model with such numbers in its last norm, which scale all logits."""
    shutil.copytree(tiny, path)
    with_tensors(path / "model.safetensors", {"model.norm.weight": np.full(TINY["hidden_size"], value)})
    return path


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["", "json"])
def test_scores_beyond_all_bounds(tiny, tmp_path, as_json):
    """A text that the model finds so unlikely that its perplexity is no float."""
    path = with_norm(tiny, tmp_path / "model", 1e4)
    status, out, err = run_cli(["--score", "--model", str(path), "Hello", *as_json], b"")
    assert (status, err) == (0, "") and out.endswith("\n")
    if as_json:
        assert json.loads(out, parse_constant=pytest.fail)["logprob"] < -1000


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a warning would be one more line on stderr
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_score_of_a_broken_model(tiny, tmp_path, value):
    """Refused as for generation: not a number is no score."""
    path = with_norm(tiny, tmp_path / "model", value)
    message_of(qwen3.score, qwen3.load_model(path), [1, 2, 3])
    status, out, err = run_cli(["--score", "--model", str(path), "Hello"], b"")
    assert status == 1 and not out
    assert_one_line(err, "not finite")


# ----------------------------------------------------------------------------------------------------------------------
# Prompts of any kind
# ----------------------------------------------------------------------------------------------------------------------

@fuzz(3000)
def test_prompts(rng, talker):
    """Any text as a question and as a text to continue: pieces of text, or one line."""
    text = any_text(rng, rng.choice([1, 4, 12]))
    if rng.random() < 0.005:
        text = (text or "a") * (100_000 // max(len(text.encode("utf-8", "surrogatepass")), 1))
    options = {"max_new_tokens": rng.randint(1, 4), "seed": rng.randrange(100), "temperature": rng.choice([0, 1.0]),
               "logprobs": rng.choice([None, 0, 2])}
    thinking = rng.choice([None, True, False])
    done = [works_or_refused(lambda: qwen3.chat(talker, text, enable_thinking=thinking, **options).finish()),
            works_or_refused(lambda: qwen3.Completion(talker, talker.tokenizer.encode(text), **options).finish())]
    for completion in filter(None, done):
        ids = completion.token_ids
        assert len(ids) <= options["max_new_tokens"] and completion.finish_reason in ("stop", "length")
        assert completion.text == talker.tokenizer.decode(ids, skip_special_tokens=True)
        assert completion.answer == parse_answer(completion.text, completion.think_open_in_prompt)
        assert len(completion.logprobs) == (0 if options["logprobs"] is None else len(ids))
    return all(done)


def test_a_prompt_of_100_kilobytes(tmp_path):
    """Within the context of the model."""
    config = TINY | {"vocab_size": 3072, "num_attention_heads": 1, "head_dim": 2, "max_position_embeddings": 2**16}
    loaded = qwen3.load_model(make_random_model(config, tmp_path / "model", "float32"))
    text = " capital capital capital capital capital capital capital<|im_end|>\n日本\0" * 1400
    assert len(text.encode()) > 100_000 and len(loaded.tokenizer.encode(text)) > 15_000
    assert len(qwen3.chat(loaded, text, max_new_tokens=2, eos_token_ids=()).finish().token_ids) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Stop texts, and an answer's parts as it streams: held against functions of the whole text
# ----------------------------------------------------------------------------------------------------------------------

def until_first(text, stop):
    """The text before the stop text that is complete first; of several that end there, the longest."""
    for end in range(len(text) + 1):
        if found := [mark for mark in stop if text[:end].endswith(mark)]:
            return text[:end - max(map(len, found))]
    return text


def cut_up(rng, text, longest=4):
    """The text in pieces, some of them empty."""
    pieces = []
    while text:
        n = rng.randint(0, longest)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


@fuzz(8000, refused=False)
def test_until_stop(rng):
    """No part of a stop text gets through, however the text is cut up, and nothing else is held back."""
    letters = rng.choice(["ab", "aab", "abc", "<|im_end|>", "é\n日a"])
    text = "".join(rng.choices(letters, k=rng.randint(0, 30)))
    stop = tuple("".join(rng.choices(letters, k=rng.randint(1, rng.choice([2, 6])))) for _ in range(rng.randint(0, 4)))
    whole = until_first(text, stop)
    assert not any(mark in whole for mark in stop)
    pieces = cut_up(rng, text)
    passed = list(until_stop(pieces, stop))
    assert "".join(passed) == whole, (pieces, stop, passed)
    assert "".join(until_stop([text], stop)) == whole and "".join(until_stop(text, stop)) == whole, (text, stop)
    for i in range(len(pieces)):  # what has come so far: all of it has gone on but for a beginning of a stop text
        so_far = "".join(pieces[:i])
        if until_first(so_far, stop) == so_far:
            passed = passed_before_the_end(pieces[:i], stop)
            assert so_far.startswith(passed) and len(so_far) - len(passed) == held_back(so_far, stop)
    return True


def passed_before_the_end(pieces, stop):
    """What until_stop has passed on when it asks for more than these pieces."""
    passed = []

    def endless():
        yield from pieces
        raise EOFError

    with contextlib.suppress(EOFError):
        for piece in until_stop(endless(), stop):
            passed.append(piece)
    return "".join(passed)


@fuzz(5000, refused=False)
def test_held_back(rng):
    letters = rng.choice(["ab", "abc", "<think>/"])
    text, *marks = ["".join(rng.choices(letters, k=rng.randint(0, 9))) for _ in range(rng.randint(1, 4))]
    beginnings = {mark[:n] for mark in marks for n in range(len(mark))}
    assert held_back(text, marks) == max((len(start) for start in beginnings if text.endswith(start)), default=0)
    return True


@fuzz(2500, refused=False)
def test_stop_texts_of_a_model(rng, talker):
    """An answer with stop texts is the one without, cut; why it ended is said."""
    prompt = [rng.randrange(322) for _ in range(3)]
    options = {"max_new_tokens": rng.randint(1, 12), "seed": rng.randrange(1000), "temperature": 1.0}
    full = qwen3.Completion(talker, prompt, **options).finish()
    stop = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(full.text) + 1)
        stop.append(full.text[at:at + rng.randint(1, 6)] or any_text(rng) or "x")
    whole = until_first(full.text, stop)
    completion = qwen3.Completion(talker, prompt, stop=stop, **options)
    assert "".join(completion) == completion.text == whole
    assert completion.token_ids == full.token_ids[:len(completion.token_ids)]
    assert completion.finish_reason == ("stop" if whole != full.text and "\ufffd" not in "".join(stop)
                                        else completion.finish_reason)
    return True


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "think>", "</", "<tool", "\n", "\n\n", "a",
        " b", "é", "Hello", "<|im_end|>", "<|endoftext|>", '{"name": "f"}']


def merged(parts):
    """Neighbouring parts of the same kind joined, empty ones left out."""
    return [(kind, "".join(text for _, text in group))
            for kind, group in itertools.groupby((part for part in parts if part[1]), lambda part: part[0])]


def parts_of(text, opened):
    """What split_stream should make of a text, told from the whole of it."""
    before = ""
    if not opened:
        found = min((at for at in (text.find("<think>"), text.find("<tool_call>")) if at >= 0), default=len(text))
        before, text = text[:found], text[found:]
        if not text.startswith("<think>"):
            return merged([("content", before), ("call", text)])
    thinking, closing, rest = text.partition("</think>")
    content, mark, call = rest.partition("<tool_call>")
    return merged([("content", before), ("thinking", thinking + closing), ("content", content), ("call", mark + call)])


def any_answer(rng):
    """(the text of an answer, whether its prompt has opened a thought)"""
    text = "".join(rng.choices(TAGS, k=rng.randint(0, 8)))
    if rng.random() < 0.4:
        text = f"<think>\n{rng.choice(['a', 'b<', ''])}\n</think>\n\n" + text
    return text, rng.random() < 0.3


@fuzz(8000)
def test_split_stream(rng):
    """The same parts however the text is cut up, nothing lost; and they are those of parse_answer where it has them."""
    text, opened = any_answer(rng)
    expected = parts_of(text, opened)
    for pieces in (cut_up(rng, text, 9), [text], text):
        parts = list(split_stream(pieces, opened))
        assert "".join(piece for _, piece in parts) == text and all(piece for _, piece in parts)
        assert merged(parts) == expected
    kinds = [kind for kind, _ in expected]
    if text.endswith(tokenizer_utils.END_TOKENS) or text.count("<think>") + opened != ("thinking" in kinds):
        return False
    thinking, content, call = ("".join(piece for kind, piece in expected if kind == wanted)
                               for wanted in ("thinking", "content", "call"))
    if not thinking and "</think>" in text or thinking and kinds[0] != "thinking":
        return False
    if thinking and not thinking.endswith("</think>"):
        return False  # a call may yet end the thought, which is only known at the end
    answer = parse_answer(text, opened)
    thought = thinking.removeprefix("" if opened else "<think>").removesuffix("</think>").strip("\n")
    assert answer.reasoning == (thought or None)
    content = (content if answer.tool_calls else content + call).lstrip("\n" if thinking else "")
    assert answer.content == (content.rstrip() if answer.tool_calls else content)
    return True


class Finished:
    """An answer that has been generated, as print_answer takes it."""

    def __init__(self, pieces, opened):
        self.pieces, self.think_open_in_prompt, self.answer = pieces, opened, parse_answer("".join(pieces), opened)

    def __iter__(self):
        return iter(self.pieces)


@fuzz(5000, refused=False)
def test_what_is_printed(rng):
    """All of an answer, calls as JSON, and a newline at its end; with hidden thoughts, all but the thoughts."""
    text, opened = any_answer(rng)
    finished = Finished(cut_up(rng, text, 9), opened)
    hide = rng.random() < 0.5
    sys.stdout, before = Stream(), sys.stdout
    try:
        qwen3_cli.print_answer(finished, hide)
        out = sys.stdout.text()
    finally:
        sys.stdout = before
    assert out.endswith("\n")
    calls = finished.answer.tool_calls
    shown = [piece for kind, piece in parts_of(text, opened)
             if not (kind == "thinking" and hide) and not (kind == "call" and calls)]
    shown = "".join(shown) + "".join(json.dumps(call, ensure_ascii=False) for call in calls)
    assert "".join(out.split()) == "".join(shown.split())
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Thought budget, logprobs, scores
# ----------------------------------------------------------------------------------------------------------------------

def biased(model, bias):
    """The model with something added to all its logits."""
    def forward(*args, **options):
        return qwen3.forward(*args, **options) + bias
    return dataclasses.replace(model, engine=dataclasses.replace(qwen3.NUMPY, forward=forward))


@fuzz(2500)
def test_think_budget(rng, talker):
    """No more tokens of thought are drawn than the budget has, however often a thought is opened and closed."""
    tokenizer, budget = talker.tokenizer, rng.choice([0, 1, 2, 3, 5, 9, None])
    opening, closing = map(tokenizer.token_to_id, ("<think>", "</think>"))
    bias = np.zeros(talker.config.vocab_size, np.float32)
    bias[opening], bias[closing] = rng.uniform(-3, 9), rng.uniform(-3, 9)
    prompt = tokenizer.encode(rng.choice(["Hi", "Hi<think>", "<think>\n", "<think>a</think>",
                                          "<think>\n\n</think>\n\n"]))
    drawn, tokens = [], []  # the places of those that the model has drawn; all
    limit = rng.randint(1, 24)
    draw_one = qwen3.sampler(talker, np.array(prompt), qwen3.Sampling(1.0), rng.randrange(1000))

    def draw(logits):
        drawn.append(len(tokens))
        return draw_one(logits)

    limited = draw if budget is None else tokenizer_utils.with_think_budget(draw, tokenizer, prompt, budget)
    for token in qwen3.generate(biased(talker, bias), prompt, limit, draw=limited, eos_token_ids=()):
        tokens.append(token)
    assert len(tokens) == limit
    inside, spent = tokenizer.decode(prompt).rstrip().endswith("<think>"), 0
    ending = tokenizer.encode("\n</think>\n\n")
    for i, token in enumerate(tokens):
        if i in drawn:
            assert not inside or budget is None or spent < budget or token == closing and budget, (i, tokens, drawn)
            spent += inside and token not in (opening, closing)
        elif i == 0 or i - 1 in drawn:  # what is not drawn is the end of a thought
            forced = list(itertools.takewhile(lambda j: j not in drawn, range(i, limit)))
            repeated = ending * (len(forced) // len(ending) + 1)
            assert inside and spent == budget and [tokens[j] for j in forced] == repeated[:len(forced)]
        inside = (inside or token == opening) and token != closing
    assert budget is None or spent <= budget
    return len(drawn) < len(tokens)


def exact_logprobs(logits):
    """log-softmax in float64, written as it is defined."""
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@fuzz(2500, refused=False)
def test_logprobs(rng, model):
    """Each is that of the token drawn, of the model as it is: whatever the temperature, the penalties and the cache."""
    n_tokens = model.config.vocab_size
    prompt = [rng.randrange(n_tokens) for _ in range(rng.randint(1, 8))]
    cache = filled_cache(model, prompt[:rng.randint(1, 8)]) if rng.random() < 0.3 else None
    options = {"temperature": rng.choice([0, 0.3, 1.0, 4.0]), "top_k": rng.choice([0, 5]),
               "repetition_penalty": rng.uniform(0.5, 2),
               "presence_penalty": rng.uniform(-1, 1), "seed": rng.randrange(1000)}
    n_top = rng.choice([0, 1, 3, 20, n_tokens, 10**30])
    completion = qwen3.Completion(model, prompt, rng.randint(1, 8), logprobs=n_top, cache=cache, **options).finish()
    ids = completion.token_ids
    logits = qwen3.forward(model, prompt + ids[:-1], qwen3.KVCache(model.config), all_logits=True)
    exact = exact_logprobs(logits[len(prompt) - 1:])
    assert [entry.token_id for entry in completion.logprobs] == ids
    for entry, row in zip(completion.logprobs, exact, strict=True):
        assert type(entry.logprob) is float and abs(entry.logprob - row[entry.token_id]) < 1e-4
        best, values = [token for token, _ in entry.top], [value for _, value in entry.top]
        assert len(set(best)) == len(best) == min(n_top, n_tokens) and values == sorted(values, reverse=True)
        assert np.allclose(values, row[best], atol=1e-4) and np.allclose(values, np.sort(row)[::-1][:n_top], atol=1e-4)
    return True


@fuzz(2500, refused=False)
def test_score(rng, model):
    """Each logprob is that of a forward pass over nothing but what is before the token."""
    ids = [rng.randrange(model.config.vocab_size) for _ in range(rng.choice([1, 2, 3, 5, 8]))]
    logprobs = qwen3.score(model, ids)
    exact = [exact_logprobs(qwen3.forward(model, ids[:i], qwen3.KVCache(model.config)))[ids[i]]
             for i in range(1, len(ids))]
    assert logprobs.shape == (len(ids) - 1,) and np.allclose(logprobs, exact, atol=1e-4)
    assert abs(logprobs.sum() - sum(exact)) < 1e-3
    return True


@pytest.mark.parametrize("n", [127, 128, 129, 130, 256, 257, 258, 400])
def test_score_of_a_long_text(tmp_path, n):
    """Around the number of positions that are computed together."""
    loaded = qwen3.load_model(make_random_model(TINY | {"vocab_size": 3072, "max_position_embeddings": 400},
                                                tmp_path / "model", "float32"))
    ids = np.random.default_rng(n).integers(0, 3072, n)
    logits = qwen3.forward(loaded, ids, qwen3.KVCache(loaded.config), all_logits=True)
    exact = exact_logprobs(logits)[np.arange(n - 1), ids[1:]]
    assert np.allclose(qwen3.score(loaded, ids), exact, atol=1e-4)
