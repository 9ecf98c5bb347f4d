"""Many random inputs in a process of their own: what runs them, and what they are made of.

Each surface gets the same inputs in every run. They run in a process of their own, whose memory
and time are limited: a crash of a library, a hang, or memory that grows without end fails the test, and so does a
warning. A failure names its input: `random.Random(seed)`. The share of inputs that work is checked, too, so that no
fuzzer tests nothing but the first line of a parser.
"""
import contextlib
import inspect
import json
import math
import os
import random
import select
import signal
import string
import traceback
import warnings
from pathlib import Path

import pytest

import qwen3
from tokenizer_utils import TOOL_CALL, Answer, AnswerReader, called, json_or_text

MEMORY = 2**30  # bytes that a test may need more than what is there when it begins
SECONDS = 300  # of computing, and of waiting: a hundred times what the slowest test needs


# ---- Running many inputs in a guarded process ------------------------------------------------------------------------

def in_child(work, seconds=SECONDS):
    """What work() returns (as JSON holds it), computed in a forked process that can't take the machine down."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
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
        ready = select.select([pipe], [], [], seconds)[0]  # nothing comes before the end
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ready, f"it hung: no end within {seconds} s"
    assert text and status == 0, f"the process died: status {status} (minus the number of the signal)"
    result = json.loads(text)
    if "error" in result:
        pytest.fail(result["error"][-20_000:], pytrace=False)
    return result["result"]


def limit_this_process():
    import resource  # not on Windows
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


# ---- Random values ---------------------------------------------------------------------------------------------------

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


DTYPES = ["F32", "F16", "BF16", "F64", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL", "F8_E4M3",
          "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "f32", "F31", "", "BF16 "]


def any_shape(rng):
    return rng.choice([lambda: [any_number(rng) for _ in range(rng.randint(0, 4))], lambda: [1] * rng.randint(0, 80),
                       lambda: [rng.choice([0, 1, 2**31, 2**62, 2**63, 2**64 - 1]) for _ in range(rng.randint(1, 4))],
                       lambda: [16, 16], lambda: [rng.randint(0, 400)]])()


def another_shape(rng, shape):
    """A shape of as many elements, which no length gives away."""
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size >= 0 for size in shape):
        return [1] * 100
    shape = [math.prod(shape)]
    for _ in range(rng.randint(0, 3)):
        divisor = rng.choice([d for d in range(1, 30) if shape[-1] % d == 0])
        shape[-1:] = [divisor, shape[-1] // divisor]
    return shape + [1] * rng.choice([0, 1, 30, 59, 60, 61, 62, 64, 100])


# ---- A model that loads in a millisecond -----------------------------------------------------------------------------

DEMO = qwen3.BUNDLED
N_MERGES = 40
TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}")


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


# ---- Answers with thoughts and calls, and what their parts are -------------------------------------------------------

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "think>", "</", "<tool", "\n", "\n\n", "a",
        " b", "é", "Hello", "<|im_end|>", "<|endoftext|>", '{"name": "f"}']


def any_answer(rng):
    """(the text of an answer, whether its prompt has opened a thought)"""
    text = "".join(rng.choices(TAGS, k=rng.randint(0, 8)))
    if rng.random() < 0.4:
        text = f"<think>\n{rng.choice(['a', 'b<', ''])}\n</think>\n\n" + text
    return text, rng.random() < 0.3


def taken_apart(text, opened):
    """What an AnswerReader should make of a text, told from the whole of it: an Answer, and the text of its calls."""
    thinks, begin = opened, text.lstrip()
    if begin.startswith("<think>"):
        thinks, text = True, begin.removeprefix("<think>")
    thought, content, truncated = "", text, False
    if thinks:
        thought, closing, content = text.partition("</think>")
        content = content.lstrip("\n")
        if not closing:  # a call ends a thought that nothing else ends
            thought, call, rest = text.partition("<tool_call>")
            content, truncated = call + rest, not call
    thought = thought.strip("\n")
    found = [*TOOL_CALL.finditer(content)]
    calls = [called(each, json_or_text) for each in found]
    if not calls or None in calls:
        return Answer(thought or None, content, [], truncated), ""
    before = content[:content.index("<tool_call>")].rstrip()
    return Answer(thought or None, before, calls, truncated), "".join(each[0] for each in found)


def pairs_of(pieces, opened):
    """What an AnswerReader makes of the pieces of a text."""
    reader = AnswerReader(opened)
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    return reader.pieces


def cut_up(rng, text, longest=4):
    """The text in pieces, some of them empty."""
    pieces = []
    while text:
        n = rng.randint(0, longest)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


# ---- Conversations ---------------------------------------------------------------------------------------------------

TALK = ["Hi", "你好", " two\n\nlines ", "", "naïve 😀", "<b>'\"&", "\n", "a</think>\nb", "<think>\nhm\n</think>\n\nyes",
        "<tool_response>\nx\n</tool_response>", "/no_think"]
ARGUMENTS = [5, -1.5, True, None, "x", " é\n\"", "", [1, "é"], [], {"k": {"l": [None]}}, {}]


def any_conversation(rng):
    """(messages, tools) as chat templates take them. Some refuse a system message in the middle, or no question."""
    def said(role, **more):
        text = rng.choice(TALK)
        parts = [{"type": "text", "text": part} for part in rng.choices(TALK, k=rng.randint(0, 3))]
        return {"role": role, "content": parts if rng.random() < 0.2 else text} | more

    messages = [said("system")] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 4)):
        messages += [said(rng.choices(["user", "system"], [30, 1])[0])] if rng.random() < 0.95 else []
        for _ in range(rng.randint(0, 2)):
            answer = said("assistant", **{"reasoning_content": rng.choice(TALK)} if rng.random() < 0.5 else {})
            messages.append(answer)
            if rng.random() < 0.5:
                calls = [{"name": rng.choice(["f", "get_x"]), "arguments": {
                    rng.choice("abc"): rng.choice(ARGUMENTS) for _ in range(rng.randint(0, 3))}}
                    for _ in range(rng.randint(1, 3))]
                answer["tool_calls"] = [
                    {"type": "function", "id": "c", "function": call} if rng.random() < 0.7 else call for call in calls]
                answer["content"] = rng.choice([answer["content"], None])
                messages += [said("tool") for _ in range(rng.randint(0, 3))]
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "<é>"}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": schema}}]
    return messages or [said("user")], rng.choice([None, None, tools, tools * 2])
