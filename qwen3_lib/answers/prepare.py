"""A JSON Schema made ready for llguidance: objects are closed, and strings end.

JSON Schema leaves objects open: each may have more properties than its schema names. A small model never stops adding
some, so an object with `properties` and without `additionalProperties` is closed here, as OpenAI's `strict` closes it.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tokenizer_utils import InputError, brief

Schema = dict[str, Any]
MAX_STRING = 4096  # characters of a string whose schema has no limit
MOST_PARTS = 20_000  # of a schema
SAME = ("anyOf", "oneOf", "allOf")  # these, and the target of a $ref, describe the same value as the schema around them
NAMED = ("properties", "patternProperties")  # objects of schemas
BELOW = (*NAMED, "items", "prefixItems", "additionalItems", "additionalProperties")  # describe the values within it
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema",
         "$id", "$anchor", "$defs", "definitions", "discriminator", "x-guidance"}  # say nothing about a value
LIMITED = {"maxLength", "pattern", "format", "enum", "const"}  # a string with one of these isn't limited here
UNKNOWN: Schema = {"$ref": None}  # in place of the target of a $ref to another document


def prepared(schema: Schema, max_string: int | None = None) -> Schema:
    """A copy in which objects are closed, and strings have at most max_string characters (None: MAX_STRING; 0: any).

    An object that allOf, anyOf, oneOf or $ref put together is closed around all its properties; a definition that is
    a part of such an object stays open elsewhere. Raises InputError for what is no JSON, and for too many parts.
    """
    try:
        schema = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the schema is no JSON: {brief(error)}") from error
    groups = grouped(schema)
    combined = {id(part) for group in groups for part in group[1:]}
    for group in groups:
        if id(group[0]) not in combined:
            close(group)
        if max_string != 0:
            limit_strings(group, MAX_STRING if max_string is None else max_string)
    return schema


def grouped(schema: Schema) -> list[list[Schema]]:
    """The schemas of each value that the schema describes: one, or several that hold together, the outermost first."""
    groups, todo, seen, size = list[list[Schema]](), [schema], set[int](), 0
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        keys, same = part.keys() - NOTES, [*same_value(schema, part)]
        if len(keys) == 1 and (keys <= {"anyOf", "oneOf"} or keys <= {"allOf", "$ref"} and len(same) == 1):
            todo += same  # each of them describes the value alone
            continue
        group, rest = dict[int, Schema](), [part]
        while rest:
            each = rest.pop()
            if id(each) not in group:
                group[id(each)] = each
                rest += [*same_value(schema, each)][::-1]
        groups.append([*group.values()])
        todo += [inner for each in group.values() for inner in children(each, BELOW)]
        if (size := size + len(group)) > MOST_PARTS:
            raise InputError(f"the schema has more than {MOST_PARTS:,} parts")
    return groups


def children(part: Schema, keys: tuple[str, ...]) -> Iterator[Schema]:
    """The schemas that a schema has under these keywords."""
    for key in keys:
        value = part.get(key)
        values = [*value.values()] if key in NAMED and isinstance(value, dict) else \
            value if isinstance(value, list) else [value]
        yield from (inner for inner in values if isinstance(inner, dict))


def same_value(schema: Schema, part: Schema) -> Iterator[Schema]:
    """The schemas that describe the same value as this part. That of a $ref to another document is {}."""
    yield from children(part, SAME)
    if isinstance(reference := part.get("$ref"), str):
        target: Any = schema
        for name in unquote(reference).removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            target = dict(enumerate(target)) if isinstance(target, list) else target
            target = target.get(int(name) if re.fullmatch(r"\d{1,9}", name) else name) if isinstance(target, dict) else None
        yield target if isinstance(target, dict) and re.match("#(/|$)", reference) else UNKNOWN


def close(group: list[Schema]) -> None:
    """Forbids the properties that no schema of a group names or requires, unless one of them says what others may be."""
    keys = {key for part in group for key in part}
    if "properties" not in keys or "additionalProperties" in keys or UNKNOWN in group or \
            "patternProperties" in keys - group[0].keys():
        return
    names = {name: True for part in group for key in ("properties", "required") for name in names_of(part.get(key))}
    own = group[0].get("properties", {})
    if isinstance(own, dict) and all(at_least(part, "minProperties") <= len(names) for part in group):
        group[0]["properties"] = names | own
        group[0]["additionalProperties"] = False


def limit_strings(group: list[Schema], longest: int) -> None:
    """Gives strings of any length a maxLength."""
    if not LIMITED & {key for part in group for key in part}:
        for part in group:
            if part.get("type") == "string" or isinstance(part.get("type"), list) and "string" in part["type"]:
                part["maxLength"] = max(longest, *(at_least(each, "minLength") for each in group))


def names_of(value: Any) -> list[str]:
    """The names in an object or a list."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, dict | list) else []


def at_least(part: Schema, key: str) -> int:
    """The value of minLength or minProperties; 0 without one."""
    return value if isinstance(value := part.get(key), int) else 0
