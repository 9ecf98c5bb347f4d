"""A JSON Schema made ready for llguidance: objects are closed, strings and numbers end, and its size is bounded.

JSON Schema leaves objects open: each may have more properties than its schema names. A small model never stops adding
some, so an object with `properties` and without `additionalProperties` is closed here, as OpenAI's `strict` closes it.
"""
from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

from tokenizer_utils import InputError, brief

Schema = dict[str, Any]
MAX_STRING = 4096  # characters of a string whose schema has no limit
MOST_PARTS, DEEPEST = 20_000, 300  # of a schema; llguidance overflows the stack at 1,000 references, one within another
SAME_VALUE = ("anyOf", "oneOf", "allOf")  # like a $ref, these describe the value of the schema around them
NAMED = ("properties", "patternProperties")  # objects of schemas
BELOW = (*NAMED, "items", "prefixItems", "additionalItems", "additionalProperties")  # describe the values within it
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema",
         "$id", "$anchor", "$defs", "definitions", "discriminator", "x-guidance"}  # say nothing about a value
# Limits of a number without limits: integers that a float64 holds, nine decimals, and so no exponent.
LIMITS = (("minimum", 1 - 2**53, "exclusiveMinimum"), ("maximum", 2**53 - 1, "exclusiveMaximum"))
SMALLEST = 1e-9
LIMITED = {"maxLength", "pattern", "format", "enum", "const"}  # a string with one of these isn't limited here


def prepared(schema: Schema, max_string: int | None = None) -> Schema:
    """A copy in which objects are closed, and strings have at most max_string characters (None: MAX_STRING; 0: any).

    Numbers get limits, too, unless max_string is 0, because a small model may write digits without an end.

    Schemas that together describe one value, by allOf, anyOf, oneOf or $ref beside others, stay as they are, because
    each would forbid the others' properties. Raises InputError for what is no JSON, for too many parts or too deep
    ones, and for what llguidance takes for something else.
    """
    try:
        schema = json.loads(json.dumps(schema, allow_nan=False), parse_float=json_number, parse_int=json_number)
    except InputError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the schema is no JSON: {brief(error)}") from error
    found, todo = dict[tuple[int, bool], Schema](), [(schema, True, 0)]
    while todo:
        part, alone, depth = todo.pop()  # alone: no other schema describes the same value
        if (id(part), alone) in found:
            continue
        same, keys = same_value(schema, part), part.keys() - NOTES
        choice = len(keys) == 1 and (keys <= {"anyOf", "oneOf"} or len(same) == 1)  # one of several, or another name
        found[id(part), alone and (choice or not same)] = found[id(part), alone] = part
        if len(found) > MOST_PARTS:
            raise InputError(f"the schema has more than {MOST_PARTS:,} parts")
        if depth > DEEPEST:
            raise InputError(f"the schema is nested too deeply: at most {DEEPEST} levels, along references")
        todo += [(inner, alone and choice, depth + 1) for inner in same]
        todo += [(inner, True, depth + 1) for inner in children(part, BELOW)]
    for (_, alone), part in found.items():
        if alone and (id(part), False) not in found:
            close_and_limit(part, MAX_STRING if max_string is None else max_string)
        elif isinstance(part.get("items"), list) or "prefixItems" in part:  # llguidance would forget some of them
            raise InputError("the schema can't be used: a list of items beside allOf, anyOf, oneOf or $ref")
    return schema


def children(part: Schema, keys: tuple[str, ...]) -> list[Schema]:
    """The schemas that a schema has under these keywords."""
    values = [[*value.values()] if key in NAMED and isinstance(value, dict) else value if isinstance(value, list) else
              [value] for key in keys for value in [part.get(key)]]
    return [inner for each in values for inner in each if isinstance(inner, dict)]


def same_value(schema: Schema, part: Schema) -> list[Schema]:
    """The schemas that describe the same value as this part; an empty one for a $ref to another document."""
    same, reference = children(part, SAME_VALUE), part.get("$ref")
    if not isinstance(reference, str):
        return same
    found: Any = schema
    for name in unquote(reference).removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        inner = dict(enumerate(found)) if isinstance(found, list) else found if isinstance(found, dict) else {}
        found = inner.get(int(name) if isinstance(found, list) and re.fullmatch(r"\d{1,9}", name) else name)
    return [*same, found if isinstance(found, dict) and re.match("#(/|$)", reference) else {}]


def close_and_limit(part: Schema, longest: int) -> None:
    """Closes an object that names properties; limits a string and a number of any length, unless `longest` is 0."""
    properties, required = part.get("properties"), part.get("required")
    if isinstance(properties, dict) and "additionalProperties" not in part:
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        properties = dict.fromkeys(names, True) | properties
        if part.get("minProperties", 0) in range(len(properties) + 1):
            part |= {"properties": properties, "additionalProperties": False}
    kinds = part.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if longest and "string" in kinds and not LIMITED & part.keys():
        least = part.get("minLength")
        part["maxLength"] = max(longest, least) if isinstance(least, int) else longest
    if longest and ("number" in kinds or "integer" in kinds) and not {"enum", "const"} & part.keys():
        part |= {key: limit for key, limit, other in LIMITS if not {key, other} & part.keys()}
        if "number" in kinds:
            part.setdefault("multipleOf", SMALLEST)


def json_number(text: str) -> int | float:
    """A number of JSON; 5.0 is a whole one. Raises InputError for one that llguidance's float64 would round."""
    value = float(text)
    if abs(value) >= 2**53 or not value.is_integer() and (abs(value) < 1e-15 or float(f"{value:.15g}") != value):
        raise InputError(f"the schema can't be used: {brief(text, 80)} has too many digits for llguidance; a text of "
                         "these digits can be used")
    return int(value) if value.is_integer() else value
