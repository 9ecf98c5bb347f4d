"""Python functions as tools that a model may call."""
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from tokenizer_utils import InputError, brief, described

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


def checked_tools(tools: Any, name: str) -> list[dict]:
    """The tools. Raises InputError, which names the file, unless each has a name."""
    functions = [tool.get("function", tool) if isinstance(tool, dict) else None
                 for tool in (tools if isinstance(tools, list) else [None])]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise InputError(f'{name}: tools must be a list of {{"type": "function", "function": {{"name": ..., '
                         '"description": ..., "parameters": ...}}')
    return tools
