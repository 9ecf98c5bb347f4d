"""qwen3_lib/server, asked over HTTP by OpenAI's own client and by sockets."""
import asyncio
import base64
import contextlib
import dataclasses
import enum
import gc
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import qwen3
from configs import FORM, ROOT
from helpers import WEATHER, assert_one_line, message_of
from make_random_model import make_random_model
from qwen3 import chat
from qwen3_embed import embed, rerank
from qwen3_lib.answers.answer import parse_answer
from qwen3_lib.answers.marks import Marks
from qwen3_lib.answers.completion import Completion
from qwen3_lib.answers.schema import matcher_of
from qwen3_lib.app.openai import CHAT, TEXT, Refusal, chat_wish
from qwen3_lib.batch.batch import Batch

openai = pytest.importorskip("openai")
jsonschema = pytest.importorskip("jsonschema")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("llguidance")
from qwen3_lib.server import web  # noqa: E402
from qwen3_lib.server.deltas import Deltas  # noqa: E402
from qwen3_lib.server.replies import ChatReply  # noqa: E402
from qwen3_lib.server.responses import FIELDS  # noqa: E402
from qwen3_lib.server.web import Limits, Protocol, make_app  # noqa: E402
from qwen3_lib.server.worker import Job, Worker  # noqa: E402
from test_tokenizer_utils import LIKE_3_8  # noqa: E402
from tokenizer_utils import InputError, Tokenizer  # noqa: E402

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


class Served:
    """A server in this process."""

    def __init__(self, model, slots=4, longest=1000, kept=2**26, queue=64, wait=True, **limits):
        self.model, self.errors = model, []
        self.worker = Worker(lambda: Batch(model() if callable(model) else model, slots, longest, kept), queue,
                             self.errors.append)
        app = make_app(self.worker, Limits(**{"seconds": 60, "hosts": web.LOCAL} | limits))
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, http=Protocol, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if wait:
            until(lambda: self.worker.batch is not None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive() and not self.errors

    def client(self, kind=openai.OpenAI, **options):
        return kind(base_url=f"{self.url}/v1", **{"api_key": "x", "max_retries": 0, "timeout": 60} | options)

    def ask(self, path, body=None, headers=None):
        """(status, JSON or text, headers) of a request; a body that is no bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=30) as got:
                status, text, given = got.status, got.read().decode(), got.headers
        except urllib.error.HTTPError as error:
            status, text, given = error.code, error.read().decode(), error.headers
        return status, json.loads(text) if given["content-type"] == "application/json" else text, given

    def idle(self):
        until(lambda: self.worker.batch.idle and not self.worker.jobs)


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't happen"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def served(demo):
    with Served(demo) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def streamed(stream):
    """(content, reasoning, calls, finish reasons, the chunks) of a stream; calls are put together from their pieces."""
    chunks, calls, content, reasoning, reasons = [], {}, "", "", []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                known["arguments"] += call.function.arguments or ""
    return content, reasoning, [*calls.values()], reasons, chunks


# ---- Chat ------------------------------------------------------------------------------------------------------------

def test_an_answer_whole_and_streamed(client, demo):
    whole = client.chat.completions.create(model="demo", messages=FRANCE, logprobs=True, top_logprobs=2)
    [choice] = whole.choices
    alone = chat(demo, FRANCE, logprobs=2).finish()
    assert (choice.message.content, choice.message.reasoning_content) == (PARIS, "France: Paris")
    assert choice.finish_reason == "stop" and whole.usage.completion_tokens == len(alone.token_ids)
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == alone.text
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)

    content, reasoning, calls, reasons, chunks = streamed(client.chat.completions.create(
        model="demo", messages=FRANCE, stream=True, stream_options={"include_usage": True}, logprobs=True))
    assert (content, reasoning, calls, reasons) == (PARIS, "France: Paris", [], ["stop"])
    first, last = chunks[0].choices[0].delta, chunks[-1]
    assert first.role == "assistant" and first.content is None and "content" in first.model_fields_set
    assert last.choices == [] and last.usage.prompt_tokens == len(alone.prompt_ids)
    assert last.usage.prompt_tokens_details.cached_tokens == len(alone.prompt_ids) - 1
    assert {chunk.id for chunk in chunks} == {last.id} and all(chunk.usage is None for chunk in chunks[:-1])
    assert [entry.token for chunk in chunks[:-1] if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content] == [entry.token for entry in entries]
    chunks = [*client.chat.completions.create(model="demo", messages=FRANCE, stream=True)]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_a_stream_on_the_wire(served):
    status, text, headers = served.ask("/v1/chat/completions", {"messages": FRANCE, "stream": True})
    events = text.split("\n\n")
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(each.removeprefix("data: "))["object"] == "chat.completion.chunk" for each in events[:-2])


def test_a_sign_of_life_while_a_long_prompt_is_read(demo, monkeypatch):
    monkeypatch.setattr(web, "SIGN_OF_LIFE", 0.01)
    with Served(demo, longest=4000) as served:
        fields = {"messages": [{"role": "user", "content": "a b c d e f g h " * 150}], "stream": True, "max_tokens": 2}
        events = served.ask("/v1/chat/completions", fields)[1].split("\n\n")
    assert '"role": "assistant"' in events[0] and events[1].startswith(": ") and events[-2] == "data: [DONE]"


@pytest.mark.parametrize("options, expected", [
    ({"extra_body": {"enable_thinking": False}}, (PARIS, "stop")),
    ({"reasoning_effort": "none"}, (PARIS, "stop")),
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "stop": [" is Par", "x"]},
     ("The capital of France", "stop")),
    ({"extra_body": {"enable_thinking": False}, "max_tokens": 3}, ("The capital of", "length")),
    ({"extra_body": {"enable_thinking": False}, "max_completion_tokens": 2, "stop": "apex"}, ("The capital", "length")),
])
def test_options(client, options, expected):
    for stream in (False, True):
        got = client.chat.completions.create(model="m", messages=FRANCE, stream=stream, **options)
        if stream:
            content, _, _, [reason], _ = streamed(got)
        else:
            content, reason = got.choices[0].message.content, got.choices[0].finish_reason
        assert (content, reason) == expected


def test_choices_bias_prefill_and_roles(client, demo):
    """Each of n answers is drawn with a seed of its own: that of a single request."""
    same = {"messages": FRANCE, "model": "m", "temperature": 9, "max_tokens": 12}
    several = client.chat.completions.create(n=3, seed=5, **same)
    assert len({choice.message.content for choice in several.choices}) == 3
    for i, choice in enumerate(several.choices):
        alone = client.chat.completions.create(seed=5 + i, **same)
        assert choice.message == alone.choices[0].message and choice.index == i
    dot = str(demo.tokenizer.encode(".")[0])
    biased = client.chat.completions.create(model="m", messages=FRANCE, reasoning_effort="none", max_tokens=9,
                                            logit_bias={dot: -100})
    assert "." not in biased.choices[0].message.content
    begun = [{"role": "developer", "content": "Be brief."}, *FRANCE, {"role": "assistant", "content": "The capital of"}]
    for fields in {}, {"continue_final_message": True, "add_generation_prompt": False}:
        [choice] = client.chat.completions.create(model="m", messages=begun, extra_body=fields).choices
        assert choice.message.content == " France is Paris."
    budget = client.chat.completions.create(model="m", messages=FRANCE, extra_body={"thinking_budget": 2})
    assert budget.choices[0].message.content == PARIS and "</think>" not in budget.choices[0].message.reasoning_content


def test_tools(client):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    same = {"model": "m", "messages": asked, "tools": [WEATHER]}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}},
                   {"type": "function", "name": "get_weather"}):  # the last as a response has it
        whole = client.chat.completions.create(tool_choice=choice, **same).choices[0]
        [call] = whole.message.tool_calls
        assert whole.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"city": "Paris"}
        _, _, [put_together], reasons, chunks = streamed(client.chat.completions.create(
            tool_choice=choice, stream=True, **same))
        assert (put_together["name"], put_together["arguments"]) == ("get_weather", call.function.arguments)
        assert put_together["id"] and reasons == ["tool_calls"]
    history = [*asked, whole.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    assert "21" in client.chat.completions.create(**same | {"messages": history}).choices[0].message.content
    forced = client.chat.completions.create(model="m", messages=FRANCE, tools=[WEATHER], tool_choice="required")
    assert forced.choices[0].message.tool_calls[0].function.name == "get_weather"
    free = client.chat.completions.create(model="m", messages=FRANCE, tools=[WEATHER], tool_choice="none")
    assert free.choices[0].message.content == PARIS


def test_calls_are_told_while_they_are_written(client):
    """Index, id and name come first, then the arguments in fragments, before the answer ends."""
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 30, "maxLength": 60}},
              "required": ["text"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "say", "parameters": schema}}]
    fields = {"model": "m", "messages": FRANCE, "tools": tools, "tool_choice": "required", "max_tokens": 200}
    deltas = [call for chunk in client.chat.completions.create(stream=True, **fields)
              for call in chunk.choices[0].delta.tool_calls or () if call.index == 0]
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0]
    assert deltas[0].id and (deltas[0].function.name, deltas[0].function.arguments) == ("say", "")
    assert len(deltas) > 5 and all(delta.index == 0 and not delta.id for delta in deltas[1:])
    text = "".join(delta.function.arguments for delta in deltas)
    assert text == whole.function.arguments
    jsonschema.validate(json.loads(text), schema)


def an_answer(rng):
    """A text with a thought, a content and calls, each in several ways; a call may be malformed."""
    text = rng.choice(["", "\n", "<think>\nhm\n</think>", "<think></think>", "<think>a < b\n\n</thin\n</think>",
                       "<think>x <tool_call> y</think>"])
    text += rng.choice(["", "\n\nHello", "\n\n\n", "Hi \n <b", "a\n\n\n"])
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        arguments = rng.choice([{}, {"city": 'Par"is}'}, {"a": [1, {"b": ']\\"'}], "c": "</x>"}, {"é": "<tool"}, None])
        call = {"name": "f", "arguments": arguments} if rng.random() < 0.8 else {"arguments": arguments, "name": "g"}
        written = json.dumps(call, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5)
        if rng.random() < 0.3:
            values = (arguments or {}) | rng.choice([{}, {"city": "</tool_call>", "n": 5}])
            texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
            body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
            written = f"<function=f>\n{body}</function>"
        text += f"\n<tool_call>\n{written if rng.random() < 0.95 else '{oops'}\n</tool_call>"
    return text


def test_an_answer_taken_apart_piece_by_piece():
    """However the text is cut: as parse_answer takes it apart, unless a malformed call follows a call that was told."""
    rng, tools = random.Random(5), [{"name": "f", "parameters": {"properties": {"a": {}, "n": {"type": "integer"}}}}]
    for _ in range(1000):
        text, think_open = an_answer(rng), rng.random() < 0.2
        text = text.removeprefix("<think>") if think_open else text
        marks, deltas, calls, at = Marks(think_open), Deltas(think_open, False, tools), {}, 0
        joined = {"reasoning_content": "", "content": ""}
        while at == 0 or at < len(text):
            end = at + rng.choice([1, 2, 5, 30])
            marks.push(text[at:end], end >= len(text))
            parts, told = deltas.push(marks.pairs, end >= len(text))
            marks.pairs.clear()
            joined = {key: joined[key] + part for key, part in parts.items()}
            for call in told:
                calls.setdefault(call["index"], [call["function"].get("name"), ""])[1] += call["function"]["arguments"]
            at = end
        whole = parse_answer(text, think_open, tools)
        assert joined["reasoning_content"] == (whole.reasoning or "")
        if whole.tool_calls or not calls:
            assert joined["content"] == whole.content and deltas.called == bool(whole.tool_calls)
            assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls.values()] == \
                whole.tool_calls


def test_tags_in_a_json_answer_are_content():
    marks, deltas = Marks(False), Deltas(False, False)
    marks.push(text := '{"tag": "<think>", "end": "</think>\\n"}', ended=True)
    assert deltas.push(marks.pairs, True) == ({"reasoning_content": "", "content": text}, [])


def test_strict_tools_and_schemas_beside_tools(client):
    """Calls fit the tool's schema, though the model is free to answer; or the answer fits another one."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"],
                  "additionalProperties": False}
    tool = {"type": "function", "function": WEATHER["function"] | {"strict": True, "parameters": parameters}}
    same = {"model": "m", "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [tool]}
    [call] = client.chat.completions.create(**same).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert client.chat.completions.create(**same | {"messages": FRANCE}).choices[0].message.content == PARIS
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    message = client.chat.completions.create(response_format=form, tool_choice="none", **same).choices[0].message
    jsonschema.validate(json.loads(message.content), FORM)
    [call] = client.chat.completions.create(response_format=form, **same).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    parameters["properties"]["city"] = {"not": {}}
    with pytest.raises(openai.BadRequestError, match="get_weather.*#/properties/city") as caught:
        client.chat.completions.create(**same)
    assert caught.value.param == "tools"


@pytest.fixture(scope="module")
def newer(demo):
    """The bundled model with a chat template of the kind of Qwen3.8's."""
    tokenizer = Tokenizer(demo.tokenizer.backend, LIKE_3_8, demo.tokenizer.named_tokens)
    return dataclasses.replace(demo, tokenizer=tokenizer)


@pytest.mark.parametrize("fields, begin", [
    ({}, "Effort: xhigh\n"), ({"reasoning_effort": "high"}, "Effort: xhigh\n"),
    ({"reasoning_effort": "max"}, "Effort: xhigh\n"),
    ({"reasoning_effort": "low"}, "Effort: low\n"), ({"reasoning_effort": "medium"}, ""),
    ({"reasoning_effort": "none"}, ""), ({"enable_thinking": False}, ""),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "Effort: low\n"),
    ({"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}}, "")])
def test_variables_of_a_template(newer, fields, begin):
    prompt, options = chat_wish(newer, {"messages": FRANCE} | fields, 1000).answers[0]
    assert newer.tokenizer.decode(prompt) == f"{begin}user:{FRANCE[0]['content']}\n" and "think_budget" not in options
    with pytest.raises(InputError, match="^chat_template_kwargs must"):
        chat_wish(newer, {"messages": FRANCE, "chat_template_kwargs": {"effort": "low"}}, 1000)


FIRST_ONLY = """{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}{{- m.role + ':' + m.content + '\\n' }}
{%- endfor %}"""


def test_system_messages_are_joined_where_a_template_wants_one_at_the_beginning(demo):
    tokenizer = Tokenizer(demo.tokenizer.backend, FIRST_ONLY, demo.tokenizer.named_tokens)
    strict = dataclasses.replace(demo, tokenizer=tokenizer)
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
                *FRANCE, {"role": "system", "content": "It is late."}, {"role": "user", "content": "Go on."}]
    prompt = tokenizer.decode(chat_wish(strict, {"messages": messages}, 1000).answers[0][0])
    assert prompt == f"system:Be brief.\n\nBe kind.\n\nIt is late.\nuser:{FRANCE[0]['content']}\nuser:Go on.\n"
    prompt = demo.tokenizer.decode(chat_wish(demo, {"messages": messages}, 1000).answers[0][0])
    assert [*re.findall(r"<\|im_start\|>(\w+)", prompt)] == ["system", "system", "user", "system", "user", "assistant"]


LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {
    "type": "object", "required": ["word", "n"], "$defs": {"u": {"type": "boolean"}}, "properties": {
        "word": {"type": "string", "enum": ["a/b", "c"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "deep": {"$ref": "#/$defs/u"}, "more": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}}}}
TOUCH = {"name": "touch"}


def test_forced_calls_are_in_xml_where_the_template_writes_xml(newer):
    names = set()
    for seed in range(12):
        body = {"messages": FRANCE, "tools": [LOOK_UP, TOUCH], "tool_choice": "required", "parallel_tool_calls": False,
                "temperature": 2, "top_k": 0, "top_p": 1, "seed": seed, "reasoning_effort": "none"}
        prompt, options = chat_wish(newer, body, 1000).answers[0]
        answer = Completion(newer, prompt, **options).finish()
        [call] = answer.answer.tool_calls
        names.add(call["name"])
        assert answer.text.startswith(f"<tool_call>\n<function={call['name']}>\n")
        if call["name"] == "look_up":
            jsonschema.validate(call["arguments"], LOOK_UP["function"]["parameters"])
        else:  # it has no parameters
            assert answer.text == "<tool_call>\n<function=touch>\n</function>\n</tool_call>"
    assert names == {"look_up", "touch"}
    with pytest.raises(Refusal, match="touch: a schema must be a JSON Schema"):
        chat_wish(newer, {"messages": FRANCE, "tools": [TOUCH | {"parameters": 5}], "tool_choice": "required"}, 1000)


@pytest.mark.parametrize("text, fits", [
    ("Hello!", True), ("Hm.<tool_call>\n<function=touch>\n</function>\n</tool_call>", True),
    ("<tool_call>\n<function=touch>\n<parameter=any>\n</b>\n\n</parameter>\n</function>\n</tool_call>", True),
    ("<tool_call>\n<function=touch>\nany\n</function>\n</tool_call>", False),
    ("<tool_call>\n<function=look_up>\n<parameter=word>\nc\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=touch>\n</function>\n</tool_call>", True),
    ("<tool_call>\n<function=look_up>\n<parameter=word>\nd\n</parameter>\n", False)])
def test_calls_in_xml_of_strict_tools_fit(newer, text, fits):
    tools = [{"function": LOOK_UP["function"] | {"strict": True}}, TOUCH]
    _, options = chat_wish(newer, {"messages": FRANCE, "tools": tools}, 1000).answers[0]
    ids, matcher = newer.tokenizer.encode(text, add_special_tokens=False), matcher_of(newer, options["schema"])
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits


@pytest.mark.parametrize("arguments, expected", [
    ("5", '{"n": 5, "word": "5"}'), ("null", '{"n": null, "word": "null"}')])
def test_calls_in_xml_have_typed_arguments(newer, arguments, expected):
    wish = chat_wish(newer, {"messages": FRANCE, "tools": [LOOK_UP]}, 1000)
    prompt, options = wish.answers[0]
    job = Job(asyncio.Event(), True, Completion(newer, prompt, **options))
    reply, said = ChatReply(wish, [job], newer, "m"), f"""Let me see.

<tool_call>
<function=look_up>
<parameter=n>
{arguments}
</parameter>
<parameter=word>
{arguments}
</parameter>
</function>
</tool_call>"""
    job.completion.marks.push(said[:40])
    job.n_pairs = len(job.completion.pairs)
    shown = "".join(reply.chunks(0, job))
    assert "Let me see." in shown and "tool_call" not in shown.replace("tool_calls", "")
    job.completion.marks.push(said[40:], ended=True)
    job.n_pairs, job.finish_reason = len(job.completion.pairs), "stop"
    message = reply.whole()["choices"][0]["message"]
    assert message["content"] == "Let me see." and message["tool_calls"][0]["function"]["arguments"] == expected
    told = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"] for chunk in reply.chunks(0, job)]
    named, fragment = (call["function"] for delta in told for call in delta.get("tool_calls", ()))
    assert (named["name"], named["arguments"] + fragment["arguments"]) == ("look_up", expected)


# ---- Answers that fit ------------------------------------------------------------------------------------------------

def test_a_form_is_filled_in(client):
    import pydantic

    class Country(pydantic.BaseModel):
        capital: str = pydantic.Field(json_schema_extra={"enum": FORM["properties"]["capital"]["enum"]})
        continent: str = pydantic.Field(json_schema_extra={"enum": FORM["properties"]["continent"]["enum"]})

    for effort in ("none", "high"):
        parsed = client.chat.completions.parse(model="m", messages=FRANCE, response_format=Country,
                                               reasoning_effort=effort).choices[0].message
        assert parsed.parsed == Country(capital="Paris", continent="Europe")
        assert (getattr(parsed, "reasoning_content", None) is None) == (effort == "none")


def test_tools_and_schemas_of_nested_classes_end(client):
    """$ref in a tool's parameters, objects that don't forbid further properties, and strings that the field limits."""
    import pydantic
    place = pydantic.create_model("Place", name=str)
    route = pydantic.create_model("Route", start=place, end=place)
    same = {"model": "m", "messages": FRANCE, "extra_body": {"max_string": 9}}
    call = client.chat.completions.create(tool_choice="required", tools=[openai.pydantic_function_tool(route)], **same)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": route.model_json_schema()}}
    for text in (call.choices[0].message.tool_calls[0].function.arguments,
                 client.chat.completions.create(response_format=form, **same).choices[0].message.content):
        filled = route.model_validate_json(text)
        assert max(len(filled.start.name), len(filled.end.name)) <= 9


def test_a_schema_that_cannot_be_used_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=FRANCE, response_format={
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?=a)b"}}})
    assert caught.value.param == "response_format" and "look-around" in caught.value.message


def test_schemas_that_take_long_hold_up_nobody_else(demo):
    """Six of 200 kB, with a fault in the innermost of 30 levels, are refused while a chat with another schema goes on."""
    def hostile(number):
        inner = {"type": "string", "format": f"unknown{number}"}
        for _ in range(30):
            properties = {f"p{j}": {"$ref": "#/$defs/e"} for j in range(199)}
            inner = {"type": "object", "properties": properties | {"x": inner}}
        return inner | {"$defs": {"e": {"enum": [f"v{i}" for i in range(5000)]}}}

    def form(schema):
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    with Served(demo) as served:
        ask = {"messages": FRANCE, "max_tokens": 5, "response_format": form(FORM)}
        assert served.ask("/v1/chat/completions", ask)[0] == 200
        got = []
        threads = [threading.Thread(target=lambda i=i: got.append(served.ask(
            "/v1/chat/completions", {"messages": FRANCE, "response_format": form(hostile(i))})[:2])) for i in range(6)]
        for thread in threads:
            thread.start()
        waits = []
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            assert served.ask("/v1/chat/completions", ask)[0] == served.ask("/health")[0] == 200
            waits.append(time.monotonic() - start)
        assert len(waits) > 3 and max(waits) < 3
        for status, body in got:
            assert status == 400 and re.search("unknown[0-9]|try again|can't be used", body["error"]["message"])


# ---- Plain text, tokens, vectors -------------------------------------------------------------------------------------

def test_plain_text(client, demo):
    ids = demo.tokenizer.encode("The capital of")
    got = client.completions.create(model="m", prompt=["The capital of", ids], max_tokens=4, echo=True, n=2)
    expected = "The capital of" + str(Completion(demo, ids, max_new_tokens=4))
    assert [choice.text for choice in got.choices] == [expected] * 4 and got.usage.prompt_tokens == 2 * len(ids)
    parts = [*client.completions.create(model="m", prompt=ids, max_tokens=4, stream=True, logprobs=1)]
    assert "The capital of" + "".join(part.choices[0].text for part in parts) == expected
    assert [token for part in parts for token in part.choices[0].logprobs.tokens] == [
        demo.tokenizer.decode([token]) for token in Completion(demo, ids, max_new_tokens=4).finish().token_ids]


def test_tokens_and_templates(served, demo):
    text = "Ça va? 👍"
    status, value, _ = served.ask("/tokenize", {"content": text})
    assert status == 200 and value["tokens"] == demo.tokenizer.encode(text)
    assert served.ask("/detokenize", {"tokens": value["tokens"]})[1]["content"] == text
    assert served.ask("/apply-template", {"messages": FRANCE})[1]["prompt"] == \
        demo.tokenizer.apply_chat_template(FRANCE)


def test_vectors_and_scores(embedder, reranker):
    texts = ["bee finds home", "rain falls on tea", "蜜蜂"]
    model = qwen3.load_model(embedder)
    with Served(model, 1, 1) as served:
        vectors = embed(model, texts)
        for form in ("float", "base64"):
            got = served.client().embeddings.create(model="m", input=texts, encoding_format=form)
            data = [np.frombuffer(base64.b64decode(each.embedding), "<f4") if form == "base64" else each.embedding
                    for each in got.data]
            np.testing.assert_array_equal(np.array(data, np.float32), vectors)
        assert got.usage.prompt_tokens == sum(len(model.tokenizer.encode(text)) for text in texts)
        status, value, _ = served.ask("/v1/chat/completions", {"messages": FRANCE})
        assert status == 400 and "embedding model" in value["error"]["message"]
        assert str(embedder) not in json.dumps(value)
        status, value, _ = served.ask("/rerank", {"query": "home", "texts": texts})
        assert status == 200 and [each["score"] for each in value] == sorted((each["score"] for each in value))[::-1]
    model = qwen3.load_model(reranker)
    with Served(model) as served:
        scores = rerank(model, "home", texts)
        status, value, _ = served.ask("/v1/rerank", {"query": "home", "documents": texts, "top_n": 2,
                                                     "return_documents": True})
        assert status == 200 and [each["index"] for each in value["results"]] == np.argsort(-scores)[:2].tolist()
        assert value["results"][0] == {"index": int(scores.argmax()), "relevance_score": float(scores.max()),
                                       "document": texts[int(scores.argmax())]}


# ---- Company ---------------------------------------------------------------------------------------------------------

def a_request(rng):
    """A random request, as fields of a chat."""
    country = rng.choice(["France", "Peru", "Japan", "Kenya", "法国"])
    system = rng.choice([[], [{"role": "system", "content": "You are a helpful assistant. " * 9}]])
    fields = {"messages": [*system, {"role": "user", "content": f"What is the capital of {country}?"}],
              "max_tokens": rng.randrange(1, 15), "seed": rng.randrange(9), "temperature": rng.choice([0, 1, 2.5]),
              "logprobs": True, "top_logprobs": rng.randrange(3)}
    extra = {"top_k": rng.choice([0, 5]), "repetition_penalty": rng.choice([1, 1.2]),
             "enable_thinking": rng.choice([True, False])}
    if rng.random() < 0.2:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    return fields, extra


def alone(model, fields, extra):
    form = fields.get("response_format")
    options = {key: value for key, value in fields.items() if key in ("seed", "temperature")} | extra
    answer = chat(model, fields["messages"], logprobs=fields["top_logprobs"], max_new_tokens=fields["max_tokens"],
                  schema=form and form["json_schema"]["schema"], **options).finish()
    return answer.answer.content, answer.answer.reasoning or "", [entry.logprob for entry in answer.logprobs]


async def answered(client, fields, extra, stream, leave=False):
    """What `alone` returns, from a server; None if the client leaves after the first text of a stream."""
    if not stream:
        got = (await client.chat.completions.create(model="m", extra_body=extra, **fields)).choices[0]
        return (got.message.content, getattr(got.message, "reasoning_content", None) or "",
                [entry.logprob for entry in got.logprobs.content])
    content, reasoning, logprobs = "", "", []
    stream = await client.chat.completions.create(model="m", stream=True, extra_body=extra, **fields)
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        logprobs += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
        if leave and content + reasoning:
            await stream.close()
            return None
    return content, reasoning, logprobs


def test_200_requests_in_any_company_have_the_bits_of_single_runs(small):
    """Whole and streamed, with equal and different beginnings, some leaving midway; few slots, and caches are kept."""
    rng = random.Random(1)
    requests, order = [a_request(rng) for _ in range(200)], rng.sample(range(200), 200)

    async def all_of_them():
        async def ask(number):
            async with room:
                return await answered(client, *requests[number], number % 2 == 0, number % 20 == 0)

        async with served.client(openai.AsyncOpenAI) as client:
            room = asyncio.Semaphore(24)
            return await asyncio.gather(*map(ask, order))

    with Served(small, slots=5, longest=400, kept=2**22) as served:
        answers = dict(zip(order, asyncio.run(all_of_them())))
        served.idle()
        assert served.worker.totals["cached_tokens"] > 1000
    assert sum(answer is None for answer in answers.values()) <= 10
    for number, answer in answers.items():
        if answer is not None:
            assert answer == alone(small, *requests[number]), number


FUZZ = int(os.environ.get("FUZZ", 1))


def resident():
    """The bytes of memory that this process has now; 0 where the system doesn't say."""
    gc.collect()
    if not Path("/proc/self/statm").exists():
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_64_clients(small):
    """For 4 seconds (FUZZ=15: a minute): no wrong answer, no slot is lost, and memory doesn't grow."""
    rng, seconds = random.Random(2), 4 * FUZZ
    requests = [a_request(rng) for _ in range(40)]
    expected, counts = [alone(small, *request) for request in requests], Counter()

    async def use(client, number, end):
        rng = random.Random(number)
        while time.monotonic() < end:
            which, leaves = rng.randrange(len(requests)), rng.random() < 0.15
            try:
                if rng.random() < 0.15:
                    wrong = rng.choice([{"n": 0}, {"messages": [{"role": "x"}]}, {"temperature": "hot"}, {"stop": [3]}])
                    await client.chat.completions.create(**{"model": "m", "messages": FRANCE, "extra_body": wrong})
                    counts["accepted"] += 1
                else:
                    got = await answered(client, *requests[which], leaves or rng.random() < 0.5, leaves)
                    counts["left" if got is None else "right" if got == expected[which] else "wrong"] += 1
            except openai.RateLimitError:
                counts["full"] += 1
                await asyncio.sleep(0.05)
            except openai.BadRequestError:
                counts["refused"] += 1

    async def all_of_them():
        # Connections that stay open might be closed by the server just when they are used again.
        async with served.client(openai.AsyncOpenAI, default_headers={"Connection": "close"}) as client:
            await asyncio.gather(*(use(client, number, time.monotonic() + seconds / 2) for number in range(64)))
            before = resident()
            await asyncio.gather(*(use(client, 64 + number, time.monotonic() + seconds / 2) for number in range(64)))
        return resident() - before

    with Served(small, slots=8, longest=400, kept=2**22, queue=24) as served:
        grown = asyncio.run(all_of_them())
        served.idle()
        assert served.ask("/metrics")[1].count("qwen3_running 0") == 1
    assert counts["wrong"] == counts["accepted"] == 0 and grown < 30e6, (counts, grown)
    assert counts["right"] > 50 and counts["left"] and counts["refused"] and counts["full"], counts


def test_a_conversation_is_found_again_after_others_used_its_slot(demo):
    first = [{"role": "system", "content": "word " * 50}, *FRANCE]
    talk = [*FRANCE, {"role": "assistant", "content": PARIS}, {"role": "user", "content": "And of Peru?"}]
    with Served(demo, slots=1) as served:
        client = served.client()
        for messages in (first, talk, first):
            again = client.chat.completions.create(model="m", messages=messages)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def endless(served, **fields):
    """A connection with a stream that goes on for a while, after its first chunks."""
    body = json.dumps({"prompt": "once", "max_tokens": 5000, "stream": True, "logit_bias": {
        str(token): -100 for token in served.worker.model.eos_token_ids}} | fields).encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
    connection.sendall(body)
    return connection


def test_clients_that_leave_free_their_slots(demo):
    """While the answer grows, while the prompt is read, while it waits; streamed or not."""
    long = {"prompt": "a b c d e f g h " * 150}
    for fields in ({}, {"stream": False}, long, long | {"stream": False}):
        with Served(demo, slots=1, longest=4000) as served:
            connections = [endless(served, **fields) for _ in range(2)]
            until(lambda: len(served.worker.jobs) == 2 and served.worker.batch.running)
            if "prompt" not in fields:
                until(lambda: served.worker.totals["generated_tokens"] > 0)
            start = time.monotonic()
            for connection in connections:
                connection.close()
            served.idle()
            assert served.worker.totals["cancelled"] == 2 and time.monotonic() - start < 5


def test_the_queue_and_the_time_are_limited(demo):
    with Served(demo, slots=1, longest=4000, queue=1, seconds=1.0) as served:
        with contextlib.closing(endless(served)) as first, contextlib.closing(endless(served, stream=False)) as second:
            until(lambda: len(served.worker.jobs) == 2)
            status, value, headers = served.ask("/v1/completions", {"prompt": "x"})
            assert status == 429 and headers["retry-after"] and value["error"]["type"] == "rate_limit_error"
            assert second.recv(100).startswith(b"HTTP/1.1 504 ")
            text = b""
            while part := first.recv(2**16):
                text += part
                if b'"timeout"' in text:
                    break
            assert b"[DONE]" not in text
        served.idle()


def test_a_short_prompt_does_not_wait_for_a_long_one(demo):
    """Its first token comes within two passes, though the long prompt takes dozens."""
    batch = Batch(demo, 2, 4000)
    batch.add("long", demo.tokenizer.encode("a b c d e f g h " * 150), max_new_tokens=1)
    batch.step()
    short = batch.add("short", demo.tokenizer.encode("The capital of"), max_new_tokens=2)
    batch.step()
    assert len(short.token_ids) == 1


# ---- Bad requests ----------------------------------------------------------------------------------------------------

BAD = [  # path, body, status, the field at fault, words of the message
    ("/v1/chat/completions", {"messages": FRANCE, "temperature": -1}, 400, "temperature", "temperature"),
    ("/v1/chat/completions", {"messages": FRANCE, "max_tokens": 0}, 400, "max_tokens", "whole"),
    ("/v1/chat/completions", {"messages": FRANCE, "n": 9}, 400, "n", "8"),
    ("/v1/chat/completions", {"messages": FRANCE, "stop": [""]}, 400, None, "stop"),
    ("/v1/chat/completions", {"messages": FRANCE, "stop": {"a": 1}}, 400, None, "stop"),
    ("/v1/chat/completions", {"messages": FRANCE, "logit_bias": {"a": 1}}, 400, "logit_bias", "id"),
    ("/v1/chat/completions", {"messages": FRANCE, "tempurature": 1}, 400, "tempurature", "temperature"),
    ("/v1/chat/completions", {"messages": FRANCE, "tool_choice": "required"}, 400, "tool_choice", "tools"),
    ("/v1/chat/completions", {"messages": FRANCE, "response_format": {"type": "x"}}, 400, "response_format", "json"),
    ("/v1/chat/completions", {"messages": FRANCE, "continue_final_message": True}, 400, "continue_final_message", "last"),
    ("/v1/chat/completions", {}, 400, None, "messages"),
    ("/v1/chat/completions", {"messages": 3}, 400, "messages", "messages"),
    ("/v1/chat/completions", {"messages": [*FRANCE, {"role": "tool"}]}, 400, "messages", "message 1"),
    ("/v1/chat/completions", {"messages": [*FRANCE, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, 400, "messages", "message 1"),
    ("/v1/chat/completions", {"messages": FRANCE * 300}, 400, "messages", "context"),
    ("/v1/completions", {"prompt": "a " * 2000, "stream": True}, 400, "prompt", "context"),
    ("/v1/completions", {"prompt": [10**30]}, 400, None, "range"),
    ("/v1/completions", {"prompt": {}}, 400, "prompt", "text"),
    ("/v1/completions", {"prompt": "\ud800"}, 400, None, "Unicode"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", "supported"),
    ("/v1/completions", {"prompt": "x", "mirostat": 2}, 400, "mirostat", "supported"),
    ("/v1/responses", {"input": [{"role": "user"}]}, 400, "input", "content"),
    ("/v1/responses", {"input": "x", "background": True}, 400, "background", "supported"),
    ("/v1/completions", b"{", 400, None, "JSON"),
    ("/v1/completions", b"[" * 10000, 400, None, "JSON"),
    ("/v1/completions", b"\xff", 400, None, "JSON"),
    ("/v1/completions", b"3", 400, None, "object"),
    ("/v1/embeddings", {"input": "x"}, 400, None, "embedding"),
    ("/v1/embeddings", {"input": 3}, 400, "input", "text"),
    ("/v1/embeddings", {"input": [[1, 2]]}, 400, "input", "check_embedding_ctx_length"),
    ("/v1/embeddings", {"input": "x", "dimension": 2}, 400, "dimension", "dimensions"),
    ("/rerank", {"query": "x", "texts": ["a"]}, 400, None, "demo: not a reranker"),
    ("/rerank", {"query": "x", "texts": ["a"], "raw_scores": True}, 400, "raw_scores", "supported"),
    ("/v1/responses", {"input": "x", "tools": [{}]}, 400, "tools", "list"),
    ("/v1/responses", {"input": "x", "tools": [WEATHER]}, 400, "tools", "name"),
    ("/v1/responses", {"input": "x", "tool_choice": "required"}, 400, "tool_choice", "tools"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input", "item_reference"),
    ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, 400, "input", "JSON"),
    ("/v1/responses", {"input": [{"type": "function_call", "arguments": "{}"}]}, 400, "input", "tool_calls"),
    ("/v1/rerank", {"query": "x", "documents": []}, 400, "query", "documents"),
    ("/tokenize", {}, 400, "content", "text"), ("/detokenize", {"tokens": "x"}, 400, "tokens", "ids"),
    ("/v1/models/other/name", None, 404, "model", "other/name"),
    ("/v1/nothing", {}, 404, None, "/v1/nothing"), ("/v1/models", {}, 405, None, "POST")]


@pytest.mark.parametrize("path, body, status, param, words", BAD)
def test_bad_requests(served, path, body, status, param, words):
    got, value, _ = served.ask(path, body)
    assert got == status and value["error"].keys() == {"message", "type", "param", "code"}
    assert value["error"]["param"] == param and words in value["error"]["message"]
    assert_one_line(value["error"]["message"])
    if words == "context":
        assert value["error"]["code"] == "context_length_exceeded"
    assert str(ROOT) not in json.dumps(value)


VALUES = [None, True, False, 0, 1, -1, 2**70, 1e308, 0.5, "", "x", "\ud800", [], [[]], {}, {"type": "object"}, [1, "a"],
          {"a": {"b": [None]}}, [None], "\0", "auto", [{}], {"function": 3}, {"type": "function", "function": None}]


CLIENTS = {  # what they send beside the question; none of it has an effect here at these values
    "openai": {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "verbosity": "low",
               "parallel_tool_calls": True, "safety_identifier": "1", "prompt_cache_key": "1", "audio": None,
               "modalities": ["text"], "prediction": {"type": "content", "content": "Paris"}, "stream_options": None},
    "Zed": {"stop": [], "tools": [], "tool_choice": "auto", "prompt_cache_key": "1", "parallel_tool_calls": False},
    "Open WebUI": {"chat_id": "1", "session_id": "2", "id": "3", "frequency_penalty": 0, "keep_alive": "5m"},
    "vLLM": {"min_tokens": 0, "top_k": -1, "skip_special_tokens": True, "spaces_between_special_tokens": True,
             "cache_salt": "1", "return_token_ids": False, "continue_final_message": False, "chat_template_kwargs": {}},
    "llama.cpp": {"cache_prompt": True, "n_predict": 1, "timings_per_token": True, "return_progress": True,
                  "reasoning_format": "deepseek", "typical_p": 1.0, "xtc_probability": 0, "xtc_threshold": 0.1,
                  "n_probs": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "mirostat": 0,
                  "mirostat_tau": 5, "seed": -1, "backend_sampling": False},
    "LM Studio": {"max_tokens": -1, "ttl": 60}}


@pytest.mark.parametrize("name", CLIENTS)
def test_fields_without_effect_are_accepted(served, name):
    assert served.ask("/v1/chat/completions", {"messages": FRANCE, "max_tokens": 1} | CLIENTS[name])[0] == 200


def test_nan_in_the_weights_is_the_servers_fault(demo, embedder):
    broken = dataclasses.replace(demo, weights=demo.weights | {"norm": demo.weights["norm"] * np.nan})
    with Served(broken) as served:
        for stream, status in ((False, 500), (True, 200)):
            found, answer, _ = served.ask("/v1/chat/completions", {"messages": FRANCE, "stream": stream})
            assert found == status and "not finite" in str(answer) and "server_error" in str(answer)
        served.idle()
    model = qwen3.load_model(embedder)
    with Served(dataclasses.replace(model, weights=model.weights | {"norm": model.weights["norm"] * np.nan})) as served:
        assert served.ask("/v1/embeddings", {"input": "a"})[0] == 500


def test_fields_without_effect_of_a_response(served):
    fields = {"tools": [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}], "tool_choice": "auto",
              "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"},
              "stream_options": {"include_obfuscation": False},
              "store": True, "truncation": "disabled", "top_logprobs": 0, "background": False, "client_metadata": {}}
    assert served.ask("/v1/responses", {"input": "x", "max_output_tokens": 1} | fields)[0] == 200


def test_requests_of_any_shape(served):
    """Fields with values of any kind: answered or refused, and the next good request is answered."""
    rng = random.Random(3)
    good = {"/v1/chat/completions": ({"messages": FRANCE, "max_tokens": 1}, CHAT),
        "/v1/completions": ({"prompt": "The", "max_tokens": 1}, TEXT),
        "/v1/responses": ({"input": "x", "max_output_tokens": 1}, FIELDS),
        "/v1/embeddings": ({"input": "x"}, ("encoding_format", "dimensions")),
        "/rerank": ({"query": "x", "texts": ["a"]}, ("documents", "top_n", "instruction", "truncate")),
        "/tokenize": ({"content": "x"}, ("prompt",)), "/detokenize": ({"tokens": [1]}, ()),
        "/apply-template": ({"messages": FRANCE}, ("tools", "tool_choice", "enable_thinking"))}
    for _ in range(150 * FUZZ):
        path = rng.choice([*good])
        body, fields = good[path]
        changed = body | {rng.choice([*body, *fields]): rng.choice(VALUES) for _ in range(rng.choice([1, 1, 2]))}
        if isinstance(changed.get("messages"), list) and rng.random() < 0.3:
            changed["messages"] = [FRANCE[0] | {rng.choice(["role", "content", "tool_calls"]): rng.choice(VALUES)}]
        data = json.dumps(changed).encode()
        data = data if rng.random() < 0.9 else data[:rng.randrange(len(data))]
        status, value, _ = served.ask(path, data)
        assert status in (200, 400), (status, value, path, data)
    assert served.ask("/v1/completions", {"prompt": "The", "max_tokens": 1})[0] == 200


def malformed(rng):
    """The bytes of a request that can't be answered."""
    def post(body, path=b"/v1/chat/completions", headers=b""):
        headers += b"Host: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"POST %s HTTP/1.1\r\n%s%s" % (path, headers, body)

    good = json.dumps({"messages": FRANCE, "max_tokens": 1}).encode()
    noise = rng.randbytes(rng.randrange(1, 200))
    key = rng.choice(["messages", "max_tokens", "temperature", "stop", "logit_bias", "tools", "response_format", "n"])
    value = rng.choice([-1.5, [[]], {"a": {}}, [None], {"type": "json_schema"}])
    return rng.choice([
        lambda: post(good[:rng.randrange(len(good))]), lambda: post(noise), lambda: post(good + noise),
        lambda: post(b"[" * rng.randrange(10**5)), lambda: post(b'{"a":' * 5000),
        lambda: post(b'"%s"' % (b"a" * 10**5)),
        lambda: post(good.replace(b'"user"', b'"\xff"')), lambda: post(good.replace(b"1}", b"1" * 5000 + b"}")),
        lambda: post(json.dumps({"messages": FRANCE, "max_tokens": 1, key: value}).encode()),
        lambda: post(json.dumps({"prompt": rng.choice([None, 3, {}, [[]], [-1], [2**40], [None], [True]])}).encode(),
                     b"/v1/completions"),
        lambda: post(good, b"/v1/" + rng.choice([b"chat", b"%00", b"../v1", b"\xc3\xa9"])),
        lambda: post(good, headers=b"no colon\r\n"), lambda: post(good, headers=b"A: %s\r\n" % (b"b" * 10**6)),
        lambda: post(good, headers=b"Host: evil.org\r\n"), lambda: post(good, headers=b"Origin: null\r\n"),
        lambda: post(good, headers=b"Transfer-Encoding: gzip\r\n"),
        lambda: post(b"").replace(b"h: 0", b"h: " + rng.choice([b"-1", b"x", b"1e3", b"", b"9" * 40])),
        lambda: post(b"xyz\r\n" + noise, headers=b"Transfer-Encoding: chunked\r\n").replace(b"Content-Length", b"A"),
        lambda: b"%s / HTTP/1.1\r\nHost: localhost\r\n\r\n" % rng.choice([b"PUT", b"DELETE", b"BREW"]),
        lambda: noise.replace(b"\n", b"") + b"\r\n\r\n", lambda: b"GET / HTTP/9.9\r\n\r\n",
        lambda: b"GET /\r\n\r\n"])()


def test_malformed_requests(served, caplog):
    """In pieces of any size: each gets a 4xx, the next good request is answered, and memory doesn't grow.

    500 of them; FUZZ=10: 5,000.
    """
    rng, before = random.Random(4), 0
    for number in range(500 * FUZZ):
        data = malformed(rng)
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice([0, 0, 1, 3])))
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError):  # refused before all of it was sent
                for start, end in zip([0, *cuts], [*cuts, len(data)]):
                    connection.sendall(data[start:end])
                    time.sleep(0.001 * (len(cuts) > 0))
            status = connection.recv(12)
        assert re.fullmatch(rb"HTTP/1.1 4\d\d", status), (status, data[:300])
        if number % 50 == 0:
            assert served.ask("/v1/completions", {"prompt": "The", "max_tokens": 1})[0] == 200
            before = before or (resident() if number >= 100 else 0)
    served.idle()
    assert resident() - before < 30e6 and not [each for each in caplog.records if each.levelname == "ERROR"]


def test_who_may_ask(demo, monkeypatch):
    monkeypatch.setattr(web, "LARGEST_BODY", 1000)
    monkeypatch.setattr(web, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(web, "BODY_SECONDS", 0.3)
    with Served(demo, key="söcret", origins=("https://friend.org",)) as served:
        ask = served.ask
        assert ask("/v1/models")[0] == 401 and ask("/health")[0] == 200
        for key in ("wrong", "söcret"):
            got = ask("/v1/models", headers={"Authorization": f"Bearer {key}".encode().decode("latin-1")})
            assert got[0] == (200 if key == "söcret" else 401)
        assert ask("/health", headers={"Host": "evil.org"})[0] == 403  # a name that leads to 127.0.0.1
        assert ask("/health", headers={"Origin": "https://evil.org"})[0] == 403
        assert ask("/health", headers={"Origin": served.url})[0] == 200
        allowed = ask("/health", headers={"Origin": "https://friend.org"})
        assert allowed[0] == 200 and allowed[2]["access-control-allow-origin"] == "https://friend.org"
    with Served(demo) as served:
        assert served.ask("/v1/completions", {"prompt": "x" * 1000})[0] == 413
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as slow:  # headers that never end
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nA: b\r\n")
            assert slow.recv(100) == b""
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as slow:  # nor does the body
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


# ---- The process -----------------------------------------------------------------------------------------------------

def test_health_while_loading_and_metrics(demo):
    ready = threading.Event()

    def load():
        ready.wait(30)
        return demo

    with Served(load, wait=False) as served:
        assert served.ask("/health")[0] == 503 == served.ask("/v1/completions", {"prompt": "x"})[0]
        ready.set()
        until(lambda: served.worker.batch is not None)
        assert served.ask("/health")[0] == 200
        served.client().completions.create(model="m", prompt="The", max_tokens=7)
        lines = served.ask("/metrics")[1].splitlines()
        assert "qwen3_generated_tokens_total 7" in lines and "qwen3_slots 4" in lines
        assert [each.id for each in served.client().models.list()] == ["demo"]
        assert served.client().models.retrieve("demo").id == "demo"


def test_the_page_needs_nothing_from_elsewhere(served):
    """Its policy allows the scripts and the style in it, and nothing from elsewhere; its own parts name no address."""
    status, text, headers = served.ask("/")
    policy = headers["content-security-policy"]
    assert status == 200 and "<title>Qwen3</title>" in text
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "connect-src 'self'" in policy
    for kind, tag, n in (("script-src", "script", 20), ("style-src", "style", 1)):
        parts = re.findall(f"<{tag}(?: data-manual)?>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        assert len(parts) == n and f"{kind} " + " ".join(f"'sha256-{digest}'" for digest in digests) + ";" in policy
    own = "".join(path.read_text("utf-8") for path in (ROOT / "qwen3_lib/server/page").glob("page.*"))
    assert not re.search(r"""://|url\(|@import| on\w+=| style=| src=|innerHTML|eval\(""", own)


def started(*options):
    """(the process of a server at a free port, its lines until it is ready: the last ends with its address)"""
    process = subprocess.Popen([sys.executable, ROOT / "qwen3_server.py", "--port", "0", "--slots", "2", *options],
                               stderr=subprocess.PIPE, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    lines = [process.stderr.readline()]
    while lines[-1] and "for clients" not in lines[-1]:
        lines.append(process.stderr.readline())
    return process, lines


def test_the_command():
    """It says where it listens, logs requests without their texts, answers, and ends after SIGTERM, when all is done."""
    process, lines = started("--verbose")
    try:
        url = lines[-1].split()[-1]
        client = openai.OpenAI(base_url=url, api_key="x", timeout=60, max_retries=0)
        until(lambda: urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=10).status == 200)
        stream = iter(client.chat.completions.create(model="m", messages=FRANCE, stream=True,
                                                          stream_options={"include_usage": True}))
        next(stream)
        port = str(client.base_url.port)
        taken = subprocess.run([sys.executable, ROOT / "qwen3_server.py", "--port", port], text=True,
                               capture_output=True, timeout=60)
        assert taken.returncode == 1
        assert_one_line(taken.stderr, f"port {port} of 127.0.0.1", "in use", "--port")
        process.send_signal(signal.SIGTERM)
        answer, *_, chunks = streamed(stream)
        client.close()
        assert process.wait(30) == 0 and answer == PARIS
        *log, end = process.stderr.read().splitlines()
        assert "1 answer was finished, 0 given up" in end
        assert re.fullmatch(r"GET /health 200, \d+\.\d\d s", log[0])
        tokens = f"{chunks[-1].usage.prompt_tokens} \\+ {chunks[-1].usage.completion_tokens} tokens"
        assert re.fullmatch(rf"POST /v1/chat/completions 200, \d+\.\d\d s, {tokens}", log[-1])
    finally:
        process.kill()
        process.wait()


def test_a_model_that_is_missing():
    """One line, and no address."""
    process, lines = started("--model", "no/such/folder")
    assert process.wait(30) == 1 and lines[1:] == [""]
    assert_one_line(lines[0], "no/such/folder")
