"""Tools that a model may call: Python functions as tools, the types of the arguments in calls."""
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from tokenizer_utils import InputError, brief, described, json_value

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a Python function that the model may call, in the form of OpenAI's API.

    The description is the docstring's first paragraph, types come from the signature, and a line "name: text" of the
    docstring describes a parameter. Raises InputError for a signature that can't be read.
    """
    doc, properties, required = inspect.getdoc(function) or "", dict[str, Any](), []
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError, NameError) as error:
        raise InputError(f"the signature of the tool {brief(function)} can't be read: {described(error)}") from error
    for name, parameter in parameters.items():
        hint = parameter.annotation
        kinds = [JSON_TYPES.get(typing.get_origin(kind) or kind) for kind in (hint, *typing.get_args(hint))]
        properties[name] = {"type": next(filter(None, kinds), "string")}  # int of `int | None`
        if text := re.search(rf"^\s*{re.escape(name)}\b[^:\n]*:\s*(.+)$", doc, re.MULTILINE):
            properties[name]["description"] = text[1]
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    about = {"name": function.__name__, "description": " ".join(doc.split("\n\n")[0].split()), "parameters": schema}
    return {"type": "function", "function": about}


def schemas(tools: list[dict[str, Any] | Callable[..., Any]] | None) -> list[dict[str, Any]] | None:
    """The tools, each Python function as its JSON schema."""
    if not isinstance(tools, (list, tuple)):
        return tools
    return [tool_schema(tool) if callable(tool) else tool for tool in tools]


def why_ended(reason: str | None, calls: Any) -> str | None:
    """Why an answer has ended, from why its tokens have: "tool_calls" if it has `calls`."""
    return "tool_calls" if reason and calls else reason


def checked_tools(tools: Any, name: str) -> list[dict]:
    """The tools. Raises InputError, which names the file, unless each has a name."""
    functions = [tool.get("function", tool) if isinstance(tool, dict) else None
                 for tool in (tools if isinstance(tools, list) else [None])]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise InputError(f'{name}: tools must be a list of {{"type": "function", "function": {{"name": ..., '
                         '"description": ..., "parameters": ...}}')
    return tools


Value = dict[str, Any]


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
