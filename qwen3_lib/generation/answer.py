"""The types of the arguments in calls, which tokenizer_utils.parse_answer doesn't know, and thoughts in prompts."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tokenizer_utils
from tokenizer_utils import Answer, Tokenizer, json_value

Value = dict[str, Any]


def inside_thought(tokenizer: Tokenizer, prompt: Iterable[int]) -> bool:
    """True if the last turn of the prompt [n] ends within <think>, so that the answer begins with a thought's rest."""
    turn = tokenizer.decode(prompt).rpartition("<|im_start|>")[2]
    return turn.rfind("<think>") > turn.rfind("</think>")


def parse_answer(text: str, think_open_in_prompt: bool = False, tools: Sequence[Value] | None = None) -> Answer:
    """tokenizer_utils.parse_answer. `tools`, JSON schemas, give the arguments of calls in XML their types."""
    def value_of(function: str, parameter: str, text: str) -> Any:
        schemas = _schemas(tools, function)
        return _argument(text, schemas.get(parameter, {"type": "string"} if schemas else {}))

    return tokenizer_utils.parse_answer(text, think_open_in_prompt, value_of)


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
        value = json_value(WORDS.get(text.lower(), text))
    except (ValueError, RecursionError):
        return text
    return value if kind is None or value is None or type(value) in TYPES.get(kind, (type(value),)) else text
