"""Answers that fit a schema: what is allowed, held against jsonschema and against answers of models."""
import contextlib
import copy
import dataclasses
import enum
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import jsonschema
import pydantic
import pytest
import referencing

import qwen3
from configs import FORM, FRANCE
from fuzzing import any_number, any_text, change, fuzz
from helpers import assert_one_line, counting, message_of, works_or_refused
from qwen3 import chat
from qwen3_lib.generation.prepare import prepared
from qwen3_lib.server import vetting
from qwen3_lib.generation.schema import grammar_of, lark, parsed, regex, type_adapter
from qwen3_lib.generation.batch import Batch
from serving import until


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
    a: memoryview


TREE = {"size": 2, "kind": "oak", "alive": None, "heights": [1.5], "ages": {"a": 1}, "next": None}


def test_a_dataclass_is_a_schema(demo):
    schema = prepared(type_adapter(Tree).json_schema())
    for tree in (TREE, TREE | {"next": TREE}, {"size": "small", "kind": "fir", "alive": True}):
        jsonschema.validate(tree, schema)
    for wrong in ({"size": 3}, {"kind": "elm"}, {"alive": 1}, {"heights": ["a"]}, {"ages": {"a": "b"}}, {"more": 1},
                  {"next": {"size": 2}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(TREE | wrong, schema)
    answer = chat(demo, "A tree?", enable_thinking=False, schema=Tree, max_new_tokens=3).finish()
    assert answer.text.startswith('{"size')
    assert_one_line(message_of(lambda: answer.parsed), "the JSON is not complete")
    assert_one_line(message_of(chat, demo, "x", schema=Odd), "memoryview")


def test_a_class_needs_pydantic(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert_one_line(message_of(chat, demo, "x", schema=Tree), "a schema needs pydantic: pip install pydantic")


def test_an_answer_is_an_object_of_the_class_that_was_passed(demo):
    oak = parsed(Tree, json.dumps(TREE | {"heights": [1, 2.5], "next": TREE}))
    assert oak == Tree(Size.LARGE, "oak", None, [1.0, 2.5], {"a": 1}, Tree(Size.LARGE, "oak", None, [1.5], {"a": 1}))
    assert type(oak.heights[0]) is float
    place = dataclasses.make_dataclass("Place", [("capital", Literal["Paris", "Rome"])])
    assert chat(demo, FRANCE, schema=place).finish().parsed == place("Paris")
    model = pydantic.create_model("Place", capital=Literal["Paris", "Rome"])
    assert chat(demo, FRANCE, schema=model).finish().parsed == model(capital="Paris")
    assert chat(demo, FRANCE, schema=model.model_json_schema()).finish().parsed == {"capital": "Paris"}
    assert "JSON Schema" in message_of(lambda: chat(demo, FRANCE, schema=regex("a")).finish().parsed)


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab")
REF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize("schema, fits, more", [
    (A, {"a": 1}, {"a": 1, "x": 1}), (A | {"additionalProperties": True}, {"a": 1, "x": 1}, None),
    ({"type": "object"}, {"x": 1}, None),
    ({"type": "array", "items": {"anyOf": [A, B]}}, [{"a": 1}, {"b": 2}], [{"a": 1, "x": 1}]),
    ({"allOf": [REF], "$defs": {"a": A}}, {"a": 1}, {"a": 1, "x": 3}),
    ({"allOf": [REF, B], "$defs": {"a": A}}, {"a": 1, "b": 2, "x": 3}, None),
    ({"properties": {"p": REF, "q": {"allOf": [REF, B]}}, "$defs": {"a": A}}, {"q": {"a": 1, "b": 2}}, {"x": 1}),
    (REF | B | {"$defs": {"a": A}}, {"a": 1, "b": 2, "x": 3}, None),
    ({"properties": {"t": {}}, "oneOf": [A, B]}, {"t": 0, "a": 1}, None),
    (A | {"required": ["a", "b"]}, {"a": 1, "b": "any"}, {"a": 1, "b": "any", "x": 1}),
    (A | {"minProperties": 3}, {"a": 1, "x": 2, "y": 3}, None),
    (A | {"properties": {"a": {"properties": {"b": {"$ref": "#"}}}}}, {"a": {"b": {"a": {}}}},
     {"a": {"b": {"a": {"x": 1}}}}),
])
def test_an_object_with_properties_is_closed(schema, fits, more):
    """Unless others describe the same value, by allOf, anyOf, oneOf or $ref beside others."""
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


@pytest.mark.parametrize("schema, longest", [
    ({"type": "integer"}, 17), ({"type": ["number", "null"]}, 27), ({"type": "integer", "minimum": 7}, 16),
    ({"type": "number", "multipleOf": 0.5}, 19), ({"type": "number", "exclusiveMinimum": 0, "maximum": 5}, 11)])
def test_a_number_without_a_limit_gets_one(demo, schema, longest):
    """It has so many characters at most, whatever digits the model likes."""
    for end in "0123456789":
        bias = {str(token): 50 * (demo.tokenizer.decode([token]).strip()[-1:] == end) for token in range(4096)}
        reply = chat(demo, "x", enable_thinking=False, schema=schema, temperature=0, logit_bias=bias, max_new_tokens=99)
        value = reply.finish().parsed
        jsonschema.Draft202012Validator(schema).validate(value)
        assert reply.finish_reason == "stop" and len(reply.answer.content) <= longest, reply.text
    assert prepared(schema, 0) == schema


def test_max_string_is_an_option_of_answers(demo):
    asked = {"model": demo, "messages": FRANCE, "schema": {"type": "string"}, "enable_thinking": False}
    assert len(chat(max_string=3, temperature=2.0, seed=1, **asked).finish().parsed) <= 3
    assert len(chat(max_string=0, temperature=0, max_new_tokens=9, **asked).finish().text) > 9
    assert_one_line(message_of(chat, max_string=-1, **asked), "max_string")


SCHEMAS = [
    FORM, {"type": "object"}, {"type": "integer", "minimum": -3, "maximum": 12}, {"type": "boolean"}, {"const": "é\n"},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3}, {"enum": [1, "two", [3]]},
    {"type": "object", "properties": {f"a{i}": {"type": "null"} for i in range(600)}},
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


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3}, {"lookup": 3},
                                     {"max_new_tokens": 6}, {"stop": "tin"}, {"logprobs": 0, "think_budget": 2}])
def test_what_a_schema_forces_is_computed_in_one_pass(demo, options):
    """The same tokens as one by one, in fewer passes; beside others, too."""
    properties = {f"the capital of {name}": {"enum": ["Paris", "Rome"]} for name in ("France", "Italy")}
    form = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    model, passes = counting(demo)

    def passes_of(answer):
        passes.clear()
        return answer.finish().token_ids, answer.text, answer.finish_reason, len(passes)

    single, together = (chat(model, FRANCE, schema=form, **{"enable_thinking": "think_budget" in options} | options)
                        for _ in range(2))
    single.speculator = None
    *expected, many = passes_of(single)
    *got, few = passes_of(together)
    assert got == expected and few < many - 3 * (many > 9)
    batch = Batch(demo, 2, 500)
    beside = [batch.add(i, together.prompt_ids, schema=form, **options) for i in range(2)]
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
    assert_one_line(message_of(chat, demo, "x", schema=nested), "not")
    assert_one_line(message_of(chat, demo, "x", schema="[a-z]+"), 'regex("...")', 'lark("...")', "[a-z]+")


@pytest.mark.parametrize("text", ["a<|endoftext|>b", "<think>", "</tool_call>"])
def test_text_that_reads_like_a_special_token_is_text(demo, text):
    answer = chat(demo, FRANCE, enable_thinking=False, schema={"const": text}, logprobs=0).finish()
    assert (answer.parsed, answer.finish_reason) == (text, "stop")
    assert (answer.answer.content, answer.answer.reasoning) == (json.dumps(text), None)
    assert demo.tokenizer.decode(answer.token_ids, skip_special_tokens=True) == json.dumps(text)


@pytest.mark.parametrize("value", [0, -1, 0.1, 5490.0, 2**53 - 1, 12345678901234.5, 7987786306360180.0])
def test_a_number_is_written_as_it_is(demo, value):
    assert chat(demo, FRANCE, enable_thinking=False, schema={"enum": [value]}).finish().parsed == value


@pytest.mark.parametrize("schema, words", [
    ({"const": 9007199254740993}, "9007199254740993"), ({"enum": [1, {"a": [2**63]}]}, "9223372036854775808"),
    ({"type": "integer", "minimum": -10**400}, "too many digits"),
    ({"minimum": 0.30000000000000004}, "0.30000000000000004"), ({"const": -3e-300}, "-3e-300"),
    ({"$ref": "#"}, "itself"), (lark("start: start"), "itself"), ({"$ref": "#/$defs/0", "$defs": {
        f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(5000)}}, "at most 300 levels"),
    ({"allOf": [{"items": [{}, {}]}], "items": [{}], "additionalItems": {"type": "null"}}, "allOf"),
    ({"anyOf": [{"$ref": "#/$defs/a", "required": [f"b{i}"]} for i in range(200)],
      "$defs": {"a": {"properties": {f"a{i}": {} for i in range(200)}}}}, "too large"),
    ({"enum": ["a" * 2**19]}, "characters"), (["start: a0", *(f"a{i}: a{i + 1}" for i in range(1000))], "1,001 rules")])
def test_what_llguidance_would_take_for_something_else_is_refused_by_name(demo, schema, words):
    def ask():
        return chat(demo, FRANCE, schema=lark("\n".join(schema)) if isinstance(schema, list) else schema)
    assert_one_line(message_of(ask), words)


# ---- Strangers' schemas: the server compiles and follows each in a process of its own --------------------------------

@pytest.fixture(scope="module")
def grammars():
    """The processes for grammars of a model with the demo's tokenizer."""
    grammars = vetting.Grammars()
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def talkers_grammars():
    """The same for the talker's tokenizer."""
    grammars = vetting.Grammars()
    yield grammars
    grammars.close()


def elsewhere(grammars, model, schema):
    grammar = grammar_of(schema)
    return grammar._replace(matchers=grammars.matchers(model, grammar.text))


@pytest.mark.parametrize("grammar", [
    {"const": -2**63},
    {"$ref": "#/$defs/0", "$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(50_000)}},
    "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(50_000)), 'a50000: "x"']),
    "start: r0+\n" + "\n".join(f'r{i}: {"|".join(f"r{j} r{i}" for j in range(i + 1, 800))} | "a"' for i in range(800))])
def test_a_grammar_that_ends_its_process_is_refused_in_one_line(demo, grammars, grammar):
    kind = "lark_grammar" if isinstance(grammar, str) else "json_schema"
    text = json.dumps({"grammars": [{kind: grammar}]})
    assert_one_line(message_of(grammars.matchers, demo, text), "the schema can't be used")


def test_a_grammar_that_was_compiled_once_needs_no_second_process(demo, grammars):
    once, twice = (grammar_of({"enum": [word]}).text for word in ("once", "twice"))
    assert grammars.matchers(demo, once) is grammars.matchers(demo, once) is not grammars.matchers(demo, twice)


on_linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks /proc about processes")


@on_linux
def test_processes_that_have_ended_are_started_again(demo, grammars):
    for pids_of in (children, lambda pid: [pid]):
        pids = pids_of(grammars.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        gone = pids_of is not children
        until(lambda: not {*pids} & {*children(grammars.process.pid)} and grammars.conn.poll() == gone)
        answer = chat(demo, FRANCE, schema=elsewhere(grammars, demo, {"enum": ["Paris"]}), enable_thinking=False)
        assert answer.finish().text == '"Paris"'


def children(pid):
    """The numbers of a process's children, without those that have ended."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [*map(int, file.read_text().split())] if file.exists() else []


@on_linux
def test_processes_of_answers_end_with_them(demo, grammars):
    batch, schema = Batch(demo, 4, 100), elsewhere(grammars, demo, {"enum": ["Paris", "Rome"]})
    keeper = next(pid for pid in children(grammars.process.pid) if not children(pid))
    for key in range(6):
        batch.add(key, demo.tokenizer.encode("Italy: "), schema=schema, max_new_tokens=1 + key)
    until(lambda: sum(len(children(pid)) for pid in children(grammars.process.pid)) == 6)
    batch.step()
    batch.cancel(5)
    while not batch.idle:
        batch.step()
    assert keeper in children(grammars.process.pid)
    until(lambda: sum(len(children(pid)) for pid in children(grammars.process.pid)) == 0)


@on_linux
def test_grammars_have_a_limit_of_memory_together(demo, grammars, monkeypatch):
    monkeypatch.setattr(vetting, "KEPT_MEMORY", 0)
    monkeypatch.setattr(vetting, "MOST_MEMORY", 0)
    large = elsewhere(grammars, demo, {"enum": ["ab" * 200_000]})
    assert max(each.n_bytes for each in grammars.living) > 4e6
    assert "take the memory" in message_of(elsewhere, grammars, demo, {"enum": ["a"]})
    del large
    elsewhere(grammars, demo, {"enum": ["a"]})


def answers(model, wanted):
    """The answers of a Batch to requests (schema, seed) -> their texts, finish reasons, or errors; its longest step."""
    batch, found, longest = Batch(model, len(wanted), 300), {}, 0
    bias = dict.fromkeys(model.eos_token_ids, -100) | {model.tokenizer.encode("a")[0]: 9}
    for key, (schema, seed) in enumerate(wanted):
        batch.add(key, model.tokenizer.encode("The capital of"), schema=schema, seed=seed, max_new_tokens=200,
                  temperature=1.5, eos_token_ids=(), logit_bias=bias)
    while not batch.idle:
        start = time.monotonic()
        found |= {key: str(each) if isinstance(each, Exception) else (each.text, each.ended)
                  for key, each in batch.step()}
        longest = max(longest, time.monotonic() - start)
    return [found[key] for key in range(len(wanted))], longest


WANTED = [(FORM, 1), (None, 2), ({"enum": ["Rome", "Romeo", "<|im_end|>"]}, 3), (regex("(ab?){3,9}"), 4), (lark(
    'start: "Ro" ("me" | "ma")+ "." '), 5), ({"const": "a" * 300}, 6), ({"type": "array", "items": FORM}, 7)]


def test_a_grammar_that_is_followed_elsewhere_gives_the_same_answers(small, grammars, monkeypatch):
    """Also where its news come late: then the others go on, and the reason of the end comes late, too."""
    expected, _ = answers(small, WANTED)
    assert len({each[1] for each in expected}) == 2
    there = [(schema and elsewhere(grammars, small, schema), seed) for schema, seed in WANTED]
    assert answers(small, there)[0] == expected
    calls, arrived = itertools.count(), vetting.Following.arrived
    monkeypatch.setattr(vetting.Following, "arrived", lambda self, seconds: next(calls) % 5 == 0 and arrived(self, 9))
    assert answers(small, there)[0] == expected
    for schema, here in (({"enum": [355, "two", [3]]}, 0), ({"enum": [355, "two", [3]]}, 1), (WANTED[4][0], 2)):
        alone = [chat(small, FRANCE, schema=each, seed=here, temperature=1.5, enable_thinking=False).finish().text
                 for each in (schema, elsewhere(grammars, small, schema))]
        assert alone[0] == alone[1]


def test_a_grammar_that_takes_long_at_a_token_ends_its_answer_alone(small, monkeypatch):
    """These 49 characters compile at once; after 60 tokens, each next one takes seconds."""
    child_of = vetting.child_of
    monkeypatch.setattr(vetting, "child_of", lambda name: child_of(name) | {
        "args": [sys.executable, "-P", "-c", f"import {name} as room; room.VETTING_SECONDS = 0.5; room.main()"]})
    with contextlib.closing(vetting.Grammars()) as grammars:
        hostile = elsewhere(grammars, small, lark('start: y{0,1000}\ny: z{0,1000}\nz: "a"{0,1000}'))
        [error, other], longest = answers(small, [(hostile, 1), (None, 2)])
    assert_one_line(error, "the next token takes too much time")
    assert other == answers(small, [(None, 2)])[0][0] and longest < 5


def chain(rng, n):
    """A schema or grammar of n parts, each of which leads to the next one."""
    link = rng.choice([lambda ref: ref, lambda ref: {"items": ref, "minItems": 1}, lambda ref: {"allOf": [ref]},
                       lambda ref: {"anyOf": [{"type": "null"}, ref]},
                       lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]}, None, str.upper])
    names, end = [f"a{i}" for i in range(n)], rng.choice([{"type": "null"}, {"$ref": "#"}, {"$ref": "#/$defs/a0"}])
    if link is None or link is str.upper:
        rules = [f"{name}: {after} {rng.choice(['', '?', '*', '+'])}" for name, after in zip(names, names[1:])]
        text = "\n".join(["start: a0", *rules, f'{names[-1]}: "x"'])
        return lark(text if link is None else text.replace("a", "A").replace("stArt", "start"))
    references = [{"$ref": f"#/$defs/{name}"} for name in names]
    return references[0] | {"$defs": dict(zip(names, [*map(link, references[1:]), end]))}


TREES = type_adapter(Tree).json_schema()


def any_schema(rng):
    kind = rng.random()
    if kind < 0.1:
        return chain(rng, rng.choice([2, 10, 50, 100, 300, 900]))
    if kind < 0.25:
        return rng.choice([regex, lark])(any_text(rng, surrogates=False))
    if kind < 0.35:
        grammar = list('start: a | "x" a? {"y"}\na: /[b-d]+(e|f){2,3}/ | %json {"type": "integer"}')
        change(rng, grammar, lambda rng: rng.choice('"/|()[]{}?*+~%:\\\n ax0'))
        return lark("".join(map(str, grammar)))
    schema = copy.deepcopy(rng.choice([*SCHEMAS, TREES, A, {"allOf": [A, B]}, {"enum": [any_number(rng)]}]))
    if kind < 0.65:
        keyword = rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "maxLength",
                              "minLength", "minItems", "maxItems", "enum", "required", "multipleOf", "type",
                              "minProperties"])
        value = rng.choice([any_number(rng), rng.randint(-2, 9), [any_number(rng), 3, "a"], "integer"])
        schema |= {keyword: value} | rng.choice([{}, {"type": "integer"}, {"type": "number"}])
    for _ in range(rng.choice([0, 1, 1, 3])):
        change(rng, schema)
    return schema


@fuzz(120)
def test_no_schema_ends_the_process_or_takes_long_and_finished_answers_fit(rng, talker, talkers_grammars):
    model = dataclasses.replace(talker, eos_token_ids=(talker.tokenizer.token_to_id("<|im_end|>"),))
    schema, start = any_schema(rng), time.monotonic()
    answer = works_or_refused(lambda: chat(model, "x", enable_thinking=False, schema=elsewhere(
        talkers_grammars, model, schema), seed=1, max_new_tokens=30, temperature=2.0).finish())
    assert time.monotonic() - start < 20, schema
    if answer is not None and answer.finish_reason == "stop" and isinstance(schema, dict):
        validator = jsonschema.Draft202012Validator(schema)
        with contextlib.suppress(jsonschema.SchemaError, RecursionError, referencing.exceptions.Unresolvable):
            validator.check_schema(schema)
            assert validator.is_valid(json.loads(answer.answer.content)), (schema, answer.text)
    return answer is not None


SUITE = os.environ.get("JSON_SCHEMA_SUITE")  # the folder of a draft, tests/draft2020-12, of the JSON Schema Test Suite
DRAFTS = {"draft4": jsonschema.Draft4Validator, "draft6": jsonschema.Draft6Validator,
          "draft7": jsonschema.Draft7Validator, "draft2019-09": jsonschema.Draft201909Validator,
          "draft2020-12": jsonschema.Draft202012Validator}


@pytest.mark.skipif(SUITE is None, reason="needs the JSON Schema Test Suite: $JSON_SCHEMA_SUITE")
def test_the_schemas_of_the_json_schema_test_suite(small, grammars):
    """Those that llguidance supports, with random weights: every finished answer is valid. Others are refused."""
    model, used, finished, draft = small, 0, 0, DRAFTS[Path(SUITE).name]
    ends = {str(token): 6 for text in '"}]' for token in (*model.tokenizer.encode(text), *model.eos_token_ids)}
    groups = [(file.name, group["description"], group["schema"]) for file in sorted(Path(SUITE).glob("*.json"))
              for group in json.loads(file.read_text()) if isinstance(group["schema"], dict)]
    for *name, schema in groups:
        schema = {"$schema": draft.META_SCHEMA["$schema"]} | schema
        try:
            there = elsewhere(grammars, model, schema)
            answers = [chat(model, "x", enable_thinking=False, schema=there, temperature=1.0, seed=seed,
                            max_new_tokens=60, logit_bias=ends) for seed in range(2)]
        except qwen3.InputError as error:
            assert_one_line(str(error), "the schema")
            continue
        used += 1
        for answer in answers:
            if answer.finish().finish_reason == "stop":
                draft(schema).validate(json.loads(answer.text))
                finished += 1
    assert used > len(groups) / 3 and finished > used, (len(groups), used, finished)
