"""A JSON Schema made ready for llguidance: objects are closed, strings end, and its size is bounded.

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
LIMITED = {"maxLength", "pattern", "format", "enum", "const"}  # a string with one of these isn't limited here
UNKNOWN: Schema = {"$ref": None}  # in place of the target of a $ref to another document


def prepared(schema: Schema, max_string: int | None = None) -> Schema:
    """A copy in which objects are closed, and strings have at most max_string characters (None: MAX_STRING; 0: any).

    An object that allOf, anyOf, oneOf or $ref put together is closed around all its properties; a definition that is
    a part of such an object stays open elsewhere. Raises InputError for what is no JSON, for too many parts or too deep
    ones, and for what llguidance takes for something else.
    """
    try:
        schema = json.loads(json.dumps(schema, allow_nan=False), parse_float=json_number, parse_int=json_number)
    except InputError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the schema is no JSON: {brief(error)}") from error
    groups, todo, seen, size = list[list[Schema]](), [(schema, 0)], set[int](), 0
    while todo:
        part, depth = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        keys, below = part.keys() - NOTES, same_value(schema, part)
        if len(keys) != 1 or not (keys <= {"anyOf", "oneOf"} or keys <= {"allOf", "$ref"} and len(below) == 1):
            group, known = [part], {id(part)}  # the schemas that describe one value together, the outermost first
            for each in group:
                new = [other for other in same_value(schema, each) if id(other) not in known]
                known |= {*map(id, new)}
                group += new
            groups.append(group)
            below = [inner for each in group for inner in children(each, BELOW)]
            size += sum(1 + len(names_in(each)) for each in group)
        if size + len(seen) > 2 * MOST_PARTS or depth > DEEPEST:
            raise InputError(f"the schema has more than {MOST_PARTS:,} parts" if depth <= DEEPEST else
                             f"the schema is nested too deeply: at most {DEEPEST} levels, along references")
        todo += [(inner, depth + 1) for inner in below]
    combined = {id(part) for group in groups for part in group[1:]}
    for group in groups:
        if id(group[0]) not in combined:
            close(group)
        limit_strings(group, MAX_STRING if max_string is None else max_string)
    return schema


def children(part: Schema, keys: tuple[str, ...]) -> list[Schema]:
    """The schemas that a schema has under these keywords."""
    values = [[*value.values()] if key in NAMED and isinstance(value, dict) else value if isinstance(value, list) else
              [value] for key in keys for value in [part.get(key)]]
    return [inner for each in values for inner in each if isinstance(inner, dict)]


def same_value(schema: Schema, part: Schema) -> list[Schema]:
    """The schemas that describe the same value as this part; UNKNOWN for a $ref that is no path in this document."""
    same, reference = children(part, SAME_VALUE), part.get("$ref")
    if not isinstance(reference, str):
        return same
    found: Any = schema
    for name in unquote(reference).removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        inner = dict(enumerate(found)) if isinstance(found, list) else found if isinstance(found, dict) else {}
        found = inner.get(int(name) if isinstance(found, list) and re.fullmatch(r"\d{1,9}", name) else name)
    return [*same, found if isinstance(found, dict) and re.match("#(/|$)", reference) else UNKNOWN]


def close(group: list[Schema]) -> None:
    """Forbids the properties that no schema of a group names, unless one of them says what others may be."""
    keys, names = {key for part in group for key in part}, dict.fromkeys(
        (name for part in group for name in names_in(part)), True)
    own = group[0].get("properties", {})
    if "properties" in keys and "additionalProperties" not in keys and UNKNOWN not in group and isinstance(own, dict) \
            and "patternProperties" not in keys - group[0].keys() \
            and all(at_least(part, "minProperties") <= len(names) for part in group):
        group[0] |= {"properties": names | own, "additionalProperties": False}


def limit_strings(group: list[Schema], longest: int) -> None:
    """Gives strings of any length a maxLength, unless `longest` is 0. Raises InputError for arrays put together of
    which llguidance forgets a part."""
    firsts = {len(first) if isinstance(first := part.get("prefixItems", part.get("items")), list) else 0
              for part in group if part.keys() & {"items", "prefixItems", "additionalItems"}}
    if len(firsts) > 1:
        raise InputError("the schema can't be used: allOf puts arrays together that list different numbers of items")
    for part in group if longest and not LIMITED & {key for part in group for key in part} else ():
        if part.get("type") == "string" or isinstance(part.get("type"), list) and "string" in part["type"]:
            part["maxLength"] = max(longest, *(at_least(each, "minLength") for each in group))


def names_in(part: Schema) -> list[str]:
    """The names of properties in a schema."""
    values = [value for key in ("properties", "required") if isinstance(value := part.get(key), dict | list)]
    return [name for value in values for name in value if isinstance(name, str)]


def at_least(part: Schema, key: str) -> int:
    """The value of minLength or minProperties; 0 without one."""
    return value if isinstance(value := part.get(key), int) else 0


def json_number(text: str) -> int | float:
    """A number of JSON; 5.0 is a whole one. Raises InputError for one that llguidance's float64 would round."""
    value = float(text)
    if abs(value) >= 2**53 or not value.is_integer() and (abs(value) < 1e-15 or float(f"{value:.15g}") != value):
        raise InputError(f"the schema can't be used: {brief(text, 80)} has too many digits for llguidance; a text of "
                         "these digits can be used")
    return int(value) if value.is_integer() else value
