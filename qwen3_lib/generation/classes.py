"""Dataclasses and classes of pydantic: the JSON Schema of a class, and its object from an answer's JSON."""
from __future__ import annotations

import enum
import json
import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from tokenizer_utils import InputError, brief

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def json_schema(schema: Any) -> Any:
    """The JSON Schema of a dataclass, or of a class of pydantic; anything else is returned as it is."""
    if hasattr(schema, "model_json_schema"):
        return schema.model_json_schema()
    if isinstance(schema, type) and is_dataclass(schema):
        classes: dict[str, Any] = {}
        return type_schema(schema, classes) | {"$defs": classes}
    return schema


def type_schema(hint: Any, classes: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a type hint; dataclasses are added to `classes`. Raises InputError."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return {"anyOf": [type_schema(part, classes) for part in parts]}
    if kind is typing.Literal:
        return {"enum": [*parts]}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and is_dataclass(kind):
        if (name := re.sub(r"\W", "_", f"{kind.__module__}.{kind.__qualname__}")) not in classes:
            classes[name] = {}  # so that it may contain itself
            hints = typing.get_type_hints(kind)
            classes[name] |= {
                "type": "object", "additionalProperties": False,
                "properties": {field.name: type_schema(hints[field.name], classes) for field in fields(kind)},
                "required": [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]}
        return {"$ref": f"#/$defs/{name}"}
    if kind is list:
        return {"type": "array", "items": type_schema(parts[0], classes) if parts else {}}
    if kind is dict:
        return {"type": "object", "additionalProperties": type_schema(parts[1], classes) if parts else True}
    names = JSON_TYPES | {type(None): "null"}
    if kind is Any or kind in names:
        return {} if kind is Any else {"type": names[kind]}
    raise InputError(f"no JSON Schema describes the type {brief(repr(hint), 80)}")


def parsed(schema: Any, text: str) -> Any:
    """JSON that fits a schema -> an object of the class that the schema was made of, or JSON's own values.

    Raises InputError for JSON that isn't complete; a class of pydantic raises its ValidationError.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"the JSON is not complete: {brief(text[-80:])}") from error
    if hasattr(schema, "model_validate_json"):
        return schema.model_validate_json(text)
    return typed(schema, value) if isinstance(schema, type) and is_dataclass(schema) else value


def typed(hint: Any, value: Any) -> Any:
    """A value of JSON as a type hint wants it, see type_schema. Raises ValueError for a value of another type."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        for part in parts:
            try:
                return typed(part, value)
            except ValueError:
                continue
    elif kind is typing.Literal:
        return value
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    elif isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        if value.keys() <= hints.keys():
            return kind(**{name: typed(hints[name], part) for name, part in value.items()})
    elif kind is list and isinstance(value, list):
        return [typed(parts[0], part) for part in value] if parts else value
    elif kind is dict and isinstance(value, dict):
        return {name: typed(parts[1], part) for name, part in value.items()} if parts else value
    elif kind in (int, float) and type(value) in (int, float) and kind(value) == value:  # JSON has one kind of number
        return kind(value)
    elif kind is Any or kind is type(value):
        return value
    raise ValueError(f"{brief(repr(value), 80)} isn't of the type {hint}")
