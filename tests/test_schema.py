"""Answers that fit a schema: what is allowed, held against jsonschema and against answers of models."""
import dataclasses
import enum
import json
import os
from pathlib import Path
from typing import Literal

import pytest

import qwen3
from configs import FORM, FRANCE
from helpers import assert_one_line, message_of
from qwen3 import chat
from qwen3_lib.answers.classes import json_schema, parsed
from qwen3_lib.answers.prepare import prepared
from qwen3_lib.answers.schema import lark, regex
from qwen3_lib.batch.batch import Batch

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")


class Size(enum.Enum):
    SMALL, LARGE = "small", 2


@dataclasses.dataclass
class Tree:
    size: Size
    kind: Literal["oak", "fir"]
    alive: bool | None
    heights: list[float] = dataclasses.field(default_factory=list)
    ages: dict[str, int] = dataclasses.field(default_factory=dict)
    next: "Tree | None" = None


@dataclasses.dataclass
class Odd:
    a: set


TREE = {"size": 2, "kind": "oak", "alive": None, "heights": [1.5], "ages": {"a": 1}, "next": None}


def test_a_dataclass_is_a_schema(demo):
    schema = json_schema(Tree)
    for tree in (TREE, TREE | {"next": TREE}, {"size": "small", "kind": "fir", "alive": True}):
        jsonschema.validate(tree, schema)
    for wrong in ({"size": 3}, {"kind": "elm"}, {"alive": 1}, {"heights": ["a"]}, {"ages": {"a": "b"}}, {"more": 1},
                  {"next": {"size": 2}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(TREE | wrong, schema)
    answer = chat(demo, "A tree?", enable_thinking=False, schema=Tree, max_new_tokens=3).finish()
    assert answer.text.startswith('{"size')
    assert_one_line(message_of(lambda: answer.parsed), "the JSON is not complete")
    assert_one_line(message_of(chat, demo, "x", schema=Odd), "set")


def test_an_answer_is_an_object_of_the_class_that_was_passed(demo):
    pydantic = pytest.importorskip("pydantic")
    oak = parsed(Tree, json.dumps(TREE | {"heights": [1, 2.5], "next": TREE}))
    assert oak == Tree(Size.LARGE, "oak", None, [1.0, 2.5], {"a": 1}, Tree(Size.LARGE, "oak", None, [1.5], {"a": 1}))
    assert type(oak.heights[0]) is float
    place = dataclasses.make_dataclass("Place", [("capital", Literal["Paris", "Rome"])])
    assert chat(demo, FRANCE, schema=place).finish().parsed == place("Paris")
    model = pydantic.create_model("Place", capital=Literal["Paris", "Rome"])
    assert chat(demo, FRANCE, schema=model).finish().parsed == model(capital="Paris")
    assert chat(demo, FRANCE, schema=json_schema(model)).finish().parsed == {"capital": "Paris"}
    assert "JSON Schema" in message_of(lambda: chat(demo, FRANCE, schema=regex("a")).finish().parsed)


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab")
REF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize("schema, fits, more", [
    (A, {"a": 1}, {"a": 1, "x": 1}),
    (A | {"additionalProperties": True}, {"a": 1, "x": 1}, None),
    (A | {"additionalProperties": {"type": "null"}}, {"a": 1, "x": None}, {"a": 1, "x": 1}),
    ({"type": "object"}, {"x": 1}, None),
    ({"type": "array", "items": {"anyOf": [A, B]}}, [{"a": 1}, {"b": 2}], [{"a": 1, "x": 1}]),
    ({"allOf": [A, B]}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "x": 3}),
    ({"allOf": [REF], "$defs": {"a": A}}, {"a": 1}, {"a": 1, "x": 3}),
    ({"allOf": [REF, B], "$defs": {"a": A}}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "x": 3}),
    ({"allOf": [A | {"additionalProperties": True}, B]}, {"a": 1, "b": 2, "x": 3}, None),
    (REF | {"$defs": {"a": A}}, {"a": 1}, {"a": 1, "x": 1}),
    (REF | B | {"$defs": {"a": A}}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "x": 3}),
    ({"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 1}, {"b": 1, "x": 1}),
    ({"properties": {"t": {}}, "oneOf": [A, B]}, {"t": 0, "a": 1}, {"t": 0, "a": 1, "x": 1}),
    (A | {"required": ["a", "b"]}, {"a": 1, "b": "any"}, {"a": 1, "b": "any", "x": 1}),
    (A | {"minProperties": 3}, {"a": 1, "x": 2, "y": 3}, None),
    (A | {"patternProperties": {"^x": {}}}, {"a": 1, "x1": 2}, {"a": 1, "y": 2}),
    ({"allOf": [A, {"patternProperties": {"^x": {}}}]}, {"a": 1, "x1": 2}, None),
    (A | {"properties": {"a": {"properties": {"b": {"$ref": "#"}}}}}, {"a": {"b": {"a": {}}}}, {"a": {"b": {"a": {"x": 1}}}}),
])
def test_an_object_with_properties_is_closed(schema, fits, more):
    """With allOf, anyOf, oneOf and $ref around all properties that they name together."""
    closed, open_ = (jsonschema.Draft202012Validator(each) for each in (prepared(schema), schema))
    assert closed.is_valid(fits) and open_.is_valid(fits)
    assert more is None or not closed.is_valid(more)


@pytest.mark.parametrize("schema, longest", [
    ({"type": "string"}, 4096), ({"type": "string", "maxLength": 5000}, 5000), ({"type": ["null", "string"]}, 4096),
    ({"type": "string", "minLength": 5000}, 5000), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 4096),
    ({"type": "string", "pattern": "^a*$"}, None), ({"type": "string", "enum": ["a" * 5000]}, None),
    ({"allOf": [{"type": "string"}, {"pattern": "a"}]}, None)])
def test_a_string_without_a_limit_gets_one(schema, longest):
    valid = jsonschema.Draft202012Validator(prepared(schema)).is_valid
    assert valid("a" * (longest or 5000)) and (longest is None or not valid("a" * (longest + 1)))
    assert prepared(schema, 0) == schema


def test_max_string_is_an_option_of_answers(demo):
    asked = {"model": demo, "messages": FRANCE, "schema": {"type": "string"}, "enable_thinking": False}
    assert len(chat(max_string=3, temperature=2.0, seed=1, **asked).finish().parsed) <= 3
    assert len(chat(max_string=0, temperature=0, max_new_tokens=9, **asked).finish().text) > 9
    assert_one_line(message_of(chat, max_string=-1, **asked), "max_string")


SCHEMAS = [
    FORM, {"type": "object"}, {"type": "integer", "minimum": -3, "maximum": 12}, {"type": "boolean"}, {"const": "é\n"},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3}, {"enum": [1, "two", [3]]},
    {"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"format": "date"},
    {"anyOf": [{"type": "number"}, {"type": "object", "required": ["a"], "properties": {"a": {"type": "boolean"}}}]},
    {"$defs": {"t": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}},
                     "required": ["next"], "additionalProperties": False}}, "$ref": "#/$defs/t"}]


def test_finished_answers_are_valid(talker):
    """With random weights and seeds."""
    finished, model = 0, dataclasses.replace(talker, eos_token_ids=(talker.tokenizer.token_to_id("<|im_end|>"),))
    for number, schema in enumerate(SCHEMAS):
        for seed in range(4):
            answer = chat(model, "x", enable_thinking=False, schema=schema, seed=seed, max_new_tokens=200).finish()
            if answer.finish_reason == "stop":
                jsonschema.validate(json.loads(answer.text), schema)
                finished += 1
            assert answer.finish_reason in ("stop", "length"), number
    assert finished > 3 * len(SCHEMAS)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3}, {"lookup": 3},
                                     {"max_new_tokens": 6}, {"stop": "tin"}, {"logprobs": 0, "think_budget": 2}])
def test_what_a_schema_forces_is_computed_in_one_pass(demo, options):
    """The same tokens as one by one, in fewer passes; beside others, too."""
    properties = {f"the capital of {name}": {"enum": ["Paris", "Rome"]} for name in ("France", "Italy")}
    form = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    passes = []

    def counted(*args, **more):
        passes.append(1)
        return qwen3.logits_of(*args, **more)

    def passes_of(answer):
        passes.clear()
        return answer.finish().token_ids, answer.text, answer.finish_reason, len(passes)

    model = dataclasses.replace(demo, engine=dataclasses.replace(demo.engine, logits_of=counted))
    single, together = (chat(model, FRANCE, schema=form, **{"enable_thinking": "think_budget" in options} | options)
                        for _ in range(2))
    single.driver = single
    *expected, many = passes_of(single)
    *got, few = passes_of(together)
    assert got == expected and few < many - 3 * (many > 9)
    batch = Batch(demo, 2, 500)
    beside = [batch.add(i, together.prompt, schema=form, **options) for i in range(2)]
    while not batch.idle:
        batch.step()
    assert [answer.token_ids for answer in beside] == [expected[0]] * 2


def test_other_grammars_and_what_cannot_be_used(demo):
    assert str(chat(demo, "x", enable_thinking=False, schema=regex("(Paris|Lon/don)!{3}"), seed=1)) in (
        "Paris!!!", "Lon/don!!!")
    assert str(chat(demo, "x", enable_thinking=False, schema=regex(r"a\/b\\/c"), seed=1)) == r"a/b\/c"
    assert set(str(chat(demo, "x", enable_thinking=False, schema=lark('start: "ab"+'), max_new_tokens=9))) == {*"ab"}
    thought = chat(demo, FRANCE, schema={"const": "Rome"}, think_budget=0).finish()
    assert thought.answer.content == '"Rome"' and thought.finish_reason == "stop"
    nested = {"type": "object", "properties": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$defs": {"b": {"not": {}}}}
    assert_one_line(message_of(chat, demo, "x", schema=nested), "#/properties/a/items", "not")
    assert_one_line(message_of(chat, demo, "x", schema=3), "schema", "3")


SUITE = os.environ.get("JSON_SCHEMA_SUITE")  # the folder tests/draft2020-12 of the JSON Schema Test Suite


@pytest.mark.skipif(SUITE is None, reason="needs the JSON Schema Test Suite: $JSON_SCHEMA_SUITE")
def test_the_schemas_of_the_json_schema_test_suite(small):
    """Those that llguidance supports, with random weights: every finished answer is valid. Others are refused."""
    model, used, finished = small, 0, 0
    ends = {str(token): 6 for text in '"}]' for token in (*model.tokenizer.encode(text), *model.eos_token_ids)}
    groups = [(file.name, group["description"], group["schema"]) for file in sorted(Path(SUITE).glob("*.json"))
              for group in json.loads(file.read_text()) if isinstance(group["schema"], dict)]
    for *name, schema in groups:
        try:
            answers = [chat(model, "x", enable_thinking=False, schema=schema, temperature=1.0, seed=seed,
                            max_new_tokens=60, logit_bias=ends) for seed in range(2)]
        except qwen3.InputError as error:
            assert_one_line(str(error), "the schema can't be used at #")
            continue
        used += 1
        for answer in answers:
            if answer.finish().finish_reason == "stop":
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
                finished += 1
    assert used > len(groups) / 3 and finished > used, (len(groups), used, finished)
