"""What a model answered, taken apart: reasoning, content, and calls of tools as JSON (Qwen3) or XML (Qwen3.5).

    <tool_call>                                      <tool_call>
    {"name": "weather", "arguments": {"days": 3}}    <function=weather>
    </tool_call>                                     <parameter=days>
                                                     3
                                                     </parameter>
                                                     </function>
                                                     </tool_call>
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = dict[str, Any]


def held_back(text: str, marks: Iterable[str]) -> int:
    """The number of characters at the end of a text that could be the beginning of one of the marks."""
    return max((n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])),
               default=0)


def split_stream(pieces: Iterable[str], think_open_in_prompt: bool = False) -> Iterator[tuple[str, str]]:
    """The pieces of an answer as (kind, piece): "thinking" with its tags, "content"; from <tool_call> on "call".

    At least one for each piece given; it may be "".
    """
    marks = {"start": ("<think>", "<tool_call>"), "thinking": ("</think>",), "content": ("<tool_call>",), "call": ()}
    following = {"<think>": "thinking", "</think>": "content", "<tool_call>": "call"}
    state, held = "thinking" if think_open_in_prompt else "start", ""
    for piece in pieces:
        held += piece
        while found := [(held.index(mark), mark) for mark in marks[state] if mark in held]:
            at, mark = min(found)
            at += len(mark) if mark == "</think>" else 0  # the closing tag belongs to the thought
            if at:
                yield state.replace("start", "content"), held[:at]
            state, held = following[mark], held[at:]
        certain = len(held) - held_back(held, marks[state])
        yield state.replace("start", "content"), held[:certain]
        held = held[certain:]
    yield state.replace("start", "content"), held


END_TOKENS = ("<|im_end|>", "<|endoftext|>")


@dataclass
class Answer:
    """A model's output, taken apart. `tool_calls` are `{"name": str, "arguments": parsed JSON}`."""

    reasoning: str | None
    content: str
    tool_calls: list[Value] = field(default_factory=list)
    reasoning_truncated: bool = False  # the text ended before </think>


def parse_answer(text: str, think_open_in_prompt: bool = False, tools: Sequence[Value] | None = None) -> Answer:
    """Takes a model's output apart into reasoning, content and tool calls. Accepts any text, never raises.

    `think_open_in_prompt` says that the prompt ended inside `<think>` (the Thinking-2507 template does that), so the
    text starts with reasoning. `tools`, JSON schemas, give the arguments of XML calls their types. A malformed tool
    call stays in the content, and so do all others with it.
    """
    while text.endswith(END_TOKENS):
        text = text.removesuffix(END_TOKENS[0]).removesuffix(END_TOKENS[1])
    reasoning, content, truncated = _split_reasoning(text, think_open_in_prompt)
    tool_calls = _tool_calls(content, tools)
    if tool_calls:
        content = content[:content.index("<tool_call>")].rstrip()
    return Answer(reasoning.strip("\n") or None, content, tool_calls, truncated)


def _split_reasoning(text: str, think_open_in_prompt: bool) -> tuple[str, str, bool]:
    """Reasoning, content, and whether the text ended within the reasoning."""
    first = re.search("<think>|</think>|<tool_call>", text)
    if first and first[0] == "<tool_call>" and not think_open_in_prompt:  # tags in its arguments are text
        return "", text, False
    before, opening, after = text.partition("<think>") if first and first[0] == "<think>" else (text, "", "")
    body = after if opening else before
    reasoning, closing, content = body.partition("</think>")
    if closing:
        return reasoning, content.lstrip("\n"), False
    if not opening and not think_open_in_prompt:
        return "", body, False
    # Unclosed: only a tool call can end it, since the models sometimes go straight from thought to call.
    reasoning, call, rest = body.partition("<tool_call>")
    return reasoning, call + rest, not call


# A value may contain the tags, too: its end is the one that another parameter or the function's end follows. Without
# backtracking (possessive, atomic), because a text with many open tags would otherwise take exponential time.
PARAMETER = r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
TOOL_CALL = re.compile(
    rf"""<tool_call>(?:\s*<function=(?P<name>[^<>{{}}"'\s]+)>(?P<body>(?>{PARAMETER})*+\s*</function>)\s*"""
    r"(?:</tool_call>|\Z)|(?P<json>.*?)(?:</tool_call>|\Z))", re.DOTALL)


def _tool_calls(content: str, tools: Sequence[Value] | None) -> list[Value]:
    """The tool calls in a content, or none if one of them is malformed."""
    calls = []
    for found in TOOL_CALL.finditer(content):
        if (name := found["name"]) is not None:
            schemas = _schemas(tools, name)
            unnamed = {"type": "string"} if schemas else {}
            arguments = {key: _argument(text, schemas.get(key, unnamed))
                         for key, text in re.findall(PARAMETER, found["body"], re.DOTALL)}
            calls.append({"name": name, "arguments": arguments})
            continue
        try:
            call = _json_value(found["json"])
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return []
        calls.append({"name": call["name"], "arguments": call["arguments"]})
    return calls


def _json_value(text: str) -> Any:
    """Raises ValueError for what is no JSON, no number or thousands of digits, RecursionError for a deep nesting."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def _schemas(tools: Sequence[Value] | None, name: str) -> Value:
    """Parameter -> JSON schema of the tool of this name; empty if it isn't known."""
    for tool in tools or ():
        found: Any = tool.get("function", tool)
        if isinstance(found, dict) and found.get("name") == name:
            for key in ("parameters", "properties"):
                found = found.get(key) if isinstance(found, dict) else None
            return found if isinstance(found, dict) else {}
    return {}


TYPES: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
                                      "array": (list,)}
WORDS = {"null": "null", "none": "null", "true": "true", "false": "false"}  # also as Python writes them


def kinds_of(schema: Any) -> list[str]:
    """The types that a JSON schema names, also those of its alternatives."""
    schema = schema if isinstance(schema, dict) else {}
    options = [schema, *(option for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)
                         for option in schema[key] if isinstance(option, dict))]
    given = [option.get("type") for option in options]
    return [kind for each in given for kind in (each if isinstance(each, list) else [each]) if isinstance(kind, str)]


def _argument(text: str, schema: Any) -> Any:
    """The value of a text in an XML call: of its schema's type; without a type JSON if it is any; else the text.

    As in vLLM's and SGLang's parsers (qwen3_coder), the first type but null counts, a parameter that the schema of its
    tool doesn't name is a text, and Python's None, True and False count, because Qwen3.5's template writes them so.
    """
    kinds = kinds_of(schema)
    kind = next((kind for kind in kinds if kind != "null"), None)
    if kind == "string" and not ("null" in kinds and text.lower() in ("null", "none")):
        return text
    try:
        value = _json_value(WORDS.get(text.lower(), text))
    except (ValueError, RecursionError):
        return text
    return value if kind is None or value is None or type(value) in TYPES.get(kind, (type(value),)) else text
