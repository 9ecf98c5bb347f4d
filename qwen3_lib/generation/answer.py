"""Answers as they grow: thoughts in prompts, stop texts, the types of the arguments in calls."""
from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tokenizer_utils import AnswerReader, Tokenizer, json_value

Value = dict[str, Any]


def last_turn(tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray) -> str:
    """The text of the prompt [n] after its last <|im_start|>; all of it without one."""
    starts = np.flatnonzero(np.asarray(prompt) == tokenizer.token_to_id("<|im_start|>"))
    return tokenizer.decode(prompt[starts[-1] + 1 if len(starts) else 0:])


def inside_thought(turn: str) -> bool:
    """True if a prompt with this last turn ends within <think>, so that the answer begins with a thought's rest."""
    return turn.rfind("<think>") > turn.rfind("</think>")


def held_back(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of a text that could begin one of the marks, which are sorted."""
    for start in range(max(len(text) - max(map(len, marks), default=0), 0), len(text)):
        at = bisect.bisect_left(marks, end := text[start:])
        if at < len(marks) and marks[at].startswith(end):
            return len(end)
    return 0


class StoppingReader(AnswerReader):
    """An AnswerReader that ends at the first of some texts, which is left out. They don't apply to a thought."""

    def __init__(self, *args: Any, stop: Sequence[str] = ()):
        super().__init__(*args)
        self.stop, self.stopped = sorted(stop), False

    def push(self, text: str, token: int | None = None, ended: bool = False) -> list[tuple[str, str]]:
        return super().push("" if self.stopped else text, token, ended)

    def step(self, ended: bool) -> bool:
        if self.state in ("start", "thinking"):
            return super().step(ended)
        if ends := [(at + len(text), at) for text in self.stop if (at := self.held.find(text)) >= 0]:
            self.held, self.stopped = self.held[:min(ends)[1]], True  # the first complete one, of two the longer
        certain = len(self.held) - (0 if ended or self.stopped else held_back(self.held, self.stop))
        self.held, rest = self.held[:certain], self.held[certain:]
        again = bool(self.held) and super().step(ended or self.stopped)
        self.held += rest
        return again


def values_for(tools: Sequence[Value] | None) -> Callable[[str, str, str], Any]:
    """The `value_of` of parse_answer. `tools`, JSON schemas, give the arguments of calls in XML their types."""
    def value_of(function: str, parameter: str, text: str) -> Any:
        schemas = _schemas(tools, function)
        return _argument(text, schemas.get(parameter, {"type": "string"} if schemas else {}))

    return value_of


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
JSON_WORDS = {"null": "null", "none": "null", "true": "true", "false": "false"}  # also as Python writes them


def kinds_of(schema: Any) -> list[str]:
    """The types that a JSON schema and its alternatives name."""
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
        value = json_value(JSON_WORDS.get(text.lower(), text))
    except (ValueError, RecursionError):
        return text
    return value if kind is None or value is None or type(value) in TYPES.get(kind, (type(value),)) else text
