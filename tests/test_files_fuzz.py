"""qwen3_app/files.py with random files: conversations, tools, saved prompts."""
import contextlib
import io
import json
import os
import pickle
import shutil

import numpy as np
import pytest

import qwen3
from fuzzing import DTYPES, another_shape, any_json, any_shape, any_text, change, damaged, fuzz, write_new
from helpers import filled_cache, read_safetensors, works_or_refused, write_safetensors
from qwen3_app import files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


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
    read = works_or_refused(files.read_messages, str(file))
    return read is not None and render(talker, *read, rng) is not None


@fuzz(3000)
def test_tools(rng, talker, scratch):
    file = scratch / "tools.json"
    value = [any_tool(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))] if rng.random() < 0.9 else any_json(rng)
    write_odd_json(rng, file, value)
    tools = works_or_refused(files.read_tools, str(file))
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
        files.save_prompt_cache(filled_cache(owner, prompt), owner, file)
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
    cache = works_or_refused(files.load_prompt_cache, model, file)
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
    files.save_prompt_cache(cache, model, file)
    loaded = files.load_prompt_cache(model, file)
    n = cache.length
    assert loaded.length == n and loaded.token_ids[0, :n].tolist() == ids
    for array, expected in ((loaded.k, cache.k), (loaded.v, cache.v)):
        assert np.array_equal(array[..., :n, :], expected[..., :n, :])
    prompt = ids[:rng.randint(1, n)] + [rng.randrange(model.config.vocab_size) for _ in range(rng.randint(0, 3))]
    assert continued(model, prompt, loaded) == continued(model, prompt)
    assert os.listdir(scratch) == ["cache"]
    return True
