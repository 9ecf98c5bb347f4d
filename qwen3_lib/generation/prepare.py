"""A JSON Schema made ready for llguidance: objects are closed, strings end, and numbers are those that it can hold.

JSON Schema leaves objects open: each may have more properties than its schema names. A small model never stops adding
some, so an object with `properties` and without `additionalProperties` is closed here, as OpenAI's `strict` closes it.
llguidance holds numbers as floats of 64 bits, so a number that it would round is refused.
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
MOST_PARTS, MOST_PASSES = 20_000, 5  # of a schema, and over it
SAME = ("anyOf", "oneOf", "allOf")  # these, and the target of a $ref, describe the same value as the schema around them
NAMING = ("properties", "required")  # keywords that name properties
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # objects of schemas
BELOW = (*NAMED[:2], "items", "prefixItems", "additionalItems", "additionalProperties")  # describe the values within it
EXACT = 2**53  # below, each whole number is a float
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema",
         "$id", "$anchor", "$defs", "definitions", "discriminator", "x-guidance"}  # say nothing about a value
LIMITED = {"maxLength", "pattern", "format", "enum", "const"}  # a string with one of these isn't limited here
UNKNOWN: Schema = {"$ref": None}  # in place of the target of a $ref to another document


def prepared(schema: Schema, max_string: int | None = None) -> Schema:
    """A copy in which objects are closed, and strings have at most max_string characters (None: MAX_STRING; 0: any).

    An object that allOf, anyOf, oneOf or $ref put together is closed around all its properties; a definition that is
    a part of such an object stays open elsewhere. Raises InputError for what is no JSON, for too many parts, and for
    what llguidance takes for something else.
    """
    try:
        schema = json.loads(json.dumps(schema, allow_nan=False), parse_float=number, parse_int=number)
    except InputError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the schema is no JSON: {brief(error)}") from error
    if not ends(schema, all_parts(schema)):
        raise InputError("the schema contains itself without an end")
    groups = grouped(schema)
    combined = {id(part) for group in groups for part in group[1:]}
    for group in groups:
        check_arrays(group)
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
        size += sum(1 + len(names_of(each.get(key))) for each in group.values() for key in NAMING)
        if size > MOST_PARTS:
            raise InputError(f"the schema has more than {MOST_PARTS:,} parts")
    return groups


def all_parts(schema: Schema) -> list[Schema]:
    """A schema and all schemas in it, those that are used and those that aren't."""
    every = [schema]
    for part in every:
        every += children(part, (*SAME, *BELOW, *NAMED[2:]))
        if len(every) > MOST_PARTS:
            raise InputError(f"the schema has more than {MOST_PARTS:,} parts")
    return every


def children(part: Schema, keys: tuple[str, ...]) -> Iterator[Schema]:
    """The schemas that a schema has under these keywords."""
    for key in keys:
        value = part.get(key)
        values = [*value.values()] if key in NAMED and isinstance(value, dict) else \
            value if isinstance(value, list) else [value]
        yield from (inner for inner in values if isinstance(inner, dict))


def same_value(schema: Schema, part: Schema) -> Iterator[Schema]:
    """The schemas that describe the same value as this part."""
    yield from children(part, SAME)
    yield from target(schema, part)


def target(schema: Schema, part: Schema) -> Iterator[Schema]:
    """The schema that a $ref names, if there is one. UNKNOWN for one that isn't named by its path."""
    if isinstance(reference := part.get("$ref"), str):
        found: Any = schema
        for name in unquote(reference).removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if re.fullmatch(r"\d{1,9}", name) and int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        yield found if isinstance(found, dict) and re.match("#(/|$)", reference) else UNKNOWN


def close(group: list[Schema]) -> None:
    """Forbids the properties that no schema of a group names, unless one of them says what others may be."""
    keys = {key for part in group for key in part}
    if "properties" not in keys or "additionalProperties" in keys or UNKNOWN in group or \
            "patternProperties" in keys - group[0].keys():
        return
    names = {name: True for part in group for key in NAMING for name in names_of(part.get(key))}
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


# ---- What llguidance would take for something else -------------------------------------------------------------------

def number(text: str) -> int | float:
    """A number of JSON; 5.0 is a whole one. Raises InputError for one that llguidance would round."""
    value = float(text)
    if abs(value) >= EXACT or not value.is_integer() and (abs(value) < 1e-15 or float(f"{value:.15g}") != value):
        raise InputError(f"the schema can't be used: {brief(text, 80)} has too many digits for llguidance; a text of "
                         "these digits can be used")
    return int(value) if value.is_integer() else value


def check_arrays(group: list[Schema]) -> None:
    """Raises InputError for arrays of which llguidance forgets a part when it puts them together."""
    arrays = [part for part in group if part.keys() & {"items", "prefixItems", "additionalItems"}]
    firsts = {len(first) if isinstance(first := part.get("prefixItems", part.get("items")), list) else 0
              for part in arrays}
    if len(firsts) > 1:
        raise InputError("the schema can't be used: allOf puts arrays together that list different numbers of items")


def ends(schema: Schema, every: list[Schema]) -> bool:
    """Whether some finite value fits the schema: False for an object that requires one like itself."""
    stuck = {id(part) for part in every}  # no value of these is known yet that is finite

    def waits(part: Schema) -> bool:
        needed = [*children(part, ("allOf",)), *target(schema, part), *needed_within(part)]
        options = [[id(inner) in stuck for inner in children(part, (key,))] for key in ("anyOf", "oneOf")]
        return any(id(inner) in stuck for inner in needed) or any(each and all(each) for each in options)

    for _ in range(MOST_PASSES):
        before = len(stuck)
        for part in reversed(every):
            if id(part) in stuck and not waits(part):
                stuck.remove(id(part))
        if id(schema) not in stuck or len(stuck) == before:
            return id(schema) not in stuck
    return True


def needed_within(part: Schema) -> list[Any]:
    """The schemas of values that a value of this part can't be without."""
    if part.get("type") == "array" and at_least(part, "minItems") > 0:
        return [*children(part, ("items", "prefixItems"))][:1]
    properties = part.get("properties")
    if part.get("type") != "object" or not isinstance(properties, dict):
        return []
    return [properties.get(name) for name in names_of(part.get("required"))]
