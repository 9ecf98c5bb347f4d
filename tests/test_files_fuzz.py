"""qwen3_lib/app/files.py with random files: conversations, tools, saved prompts."""
import json
import shutil

import numpy as np
import pytest

import qwen3
from fuzzing import DTYPES, another_shape, any_json, any_shape, any_text, change, damaged, fuzz, write_new
from helpers import filled_cache, read_safetensors, works_or_refused, write_safetensors
from qwen3_lib.app import files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


def any_message(rng):
    content = rng.choice([any_text(rng), any_text(rng, surrogates=False), "Hello", any_json(rng), None,
                          [{"type": rng.choice(["text", "text", "image"]), "text": any_text(rng)}, any_json(rng)][:rng.randint(0, 2)]])
    message = {"role": rng.choice(["user", "user", "user", "assistant", "assistant", "system", "tool"]), "content": content}
    if rng.random() < 0.2:
        function = {"name": any_text(rng), "arguments": rng.choice([{"a": any_json(rng)}, any_json(rng), '{"a": 1}'])}
        message["tool_calls"] = [rng.choice([function, {"type": "function", "function": function}, any_json(rng)])]
    if rng.random() < 0.2:
        message[rng.choice(["reasoning_content", "thinking", "items", "__class__", any_text(rng)])] = any_json(rng)
    if rng.random() < 0.1:
        change(rng, message)
    return message


def any_tool(rng):
    function = {"name": any_text(rng), "description": rng.choice([any_text(rng), any_json(rng)]),
                "parameters": rng.choice([{"type": "object", "properties": {any_text(rng): any_json(rng)}}, any_json(rng)])}
    if rng.random() < 0.1:
        change(rng, function)
    return rng.choice([function, {"type": "function", "function": function}, {"function": any_json(rng)}])


@fuzz(500)
def test_conversations(rng, talker, scratch):
    """What is accepted is rendered, and stays as it was; or one line says why not."""
    file, value = scratch / "file.json", [any_message(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
    if rng.random() < 0.4:
        value = {"messages": value, "tools": rng.choice([[any_tool(rng)], any_json(rng), None])}
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    write_new(file, damaged(rng, text) if rng.random() < 0.05 else text)
    read = works_or_refused(files.read_messages, str(file))
    if read is None:
        return False
    before = repr(read)
    prompt = works_or_refused(talker.tokenizer.apply_chat_template, *read, enable_thinking=rng.choice([None, True, False]),
                              join_text_parts=True)
    assert repr(read) == before
    last = read[0][-1]
    assert prompt is None or last["role"] != "user" or not isinstance(last["content"], str) or last["content"] in prompt
    return prompt is not None and works_or_refused(talker.tokenizer.encode, prompt) is not None


def continued(model, ids, cache=None):
    return list(qwen3.generate(model, ids, 4, temperature=0, eos_token_ids=(), cache=cache))


@pytest.fixture(scope="module")
def saved(tiny_model, tiny, memory):
    """(ids, their continuation, the bytes of their cache, and those of caches of another model and of other ids)."""
    ids, file = list(range(40, 60)), memory / "cache"
    other = shutil.copytree(tiny, memory / "other")
    header, data = read_safetensors(other / "model.safetensors")
    write_safetensors(other / "model.safetensors", header, (np.frombuffer(data, "<f4") * np.float32(1.5)).tobytes())
    contents = []
    for owner, prompt in ((tiny_model, ids), (qwen3.load_model(other), ids), (tiny_model, ids[:5])):
        files.save_prompt_cache(filled_cache(owner, prompt), owner, file)
        contents.append(file.read_bytes())
    return ids, continued(tiny_model, ids), contents


def odd_cache_file(rng, file, contents):
    """Writes something that is no sound cache of this model's."""
    own, other_model, shorter = contents
    header, data = read_safetensors(file)
    n, m = (8 + int.from_bytes(part[:8], "little") for part in (own, shorter))
    kind = rng.randrange(4)
    if kind == 0:
        file.write_bytes(damaged(rng, own))
    elif kind == 1:  # the header of one cache with the data of another
        file.write_bytes(rng.choice([own[:n] + shorter[m:], shorter[:m] + own[n:], own[:n] + other_model[n:], other_model]))
    elif kind == 2:
        change(rng, header)
        write_safetensors(file, header, data)
    else:
        entry = header[rng.choice(["token_ids", "k", "v"])]
        entry["dtype"] = rng.choice([*DTYPES, entry["dtype"], entry["dtype"]])
        entry["shape"] = rng.choice([entry["shape"], any_shape(rng), another_shape(rng, entry["shape"])])
        write_safetensors(file, header, data)


@fuzz(500)
def test_prompt_cache_file(rng, tiny_model, saved, scratch):
    """What is loaded gives the same tokens as computing the prompt does."""
    ids, expected, contents = saved
    file = scratch / "cache"
    file.write_bytes(contents[0] if rng.random() < 0.95 else contents[2])
    if rng.random() < 0.9:
        odd_cache_file(rng, file, contents)
    cache = works_or_refused(files.load_prompt_cache, tiny_model, file)
    if cache is not None:
        assert file.read_bytes() != contents[1]  # another model's
        assert 1 <= cache.length <= len(ids) and cache.common_prefix(np.array(ids)) == cache.length
        assert continued(tiny_model, ids, cache) == expected
    return cache is not None
