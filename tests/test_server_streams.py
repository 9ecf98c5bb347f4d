"""qwen3_lib/server: streamed answers, and their pieces."""
import asyncio
import json
import re

import jsonschema
import pytest
from openai.types.chat.chat_completion_message_tool_call import Function

from helpers import WEATHER
from qwen3 import chat
from qwen3_lib.app.openai import Door, chat_request
from qwen3_lib.generation.completion import Completion
from serving import FRANCE, PARIS, Served, streamed, web  # first: it skips where the server needs packages
from qwen3_lib.server.replies import ChatReply
from qwen3_lib.server.worker import Job
from test_answers import CALL


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


def test_a_call_is_told_when_it_is_complete(client):
    """Index, id, name and arguments in one delta."""
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 30, "maxLength": 60}},
              "required": ["text"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "say", "parameters": schema}}]
    fields = {"model": "m", "messages": FRANCE, "tools": tools, "tool_choice": "required", "max_tokens": 200}
    deltas = [call for chunk in client.chat.completions.create(stream=True, **fields)
              for call in chunk.choices[0].delta.tool_calls or ()]
    calls = client.chat.completions.create(**fields).choices[0].message.tool_calls
    assert [call.function for call in calls] == [Function(**delta.function.model_dump()) for delta in deltas]
    assert [delta.index for delta in deltas] == [*range(len(calls))] and all(delta.id for delta in deltas)
    jsonschema.validate(json.loads(deltas[0].function.arguments), schema)


def test_an_answer_that_is_cut_within_a_call_has_the_same_reason_streamed_or_not(client):
    fields = {"model": "m", "messages": FRANCE, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 26}
    whole = client.chat.completions.create(**fields).choices[0]
    content, _, calls, [reason], _ = streamed(client.chat.completions.create(stream=True, **fields))
    assert whole.finish_reason == reason == "length" and not whole.message.tool_calls and not calls
    assert content == whole.message.content and content.startswith("<tool_call>")


def test_a_response_has_no_empty_delta(served):
    for most, expected in ((50, PARIS), (2, "")):  # the thought is cut, and no answer follows
        fields = {"input": FRANCE[0]["content"], "stream": True, "max_output_tokens": most}
        events = served.ask("/v1/responses", fields)[1]
        deltas = re.findall('"type": "response.output_text.delta".*"delta": "(.*?)"', events)
        assert "".join(deltas) == expected and "" not in deltas


@pytest.mark.parametrize("text, content, calls", [
    ('{"tag": "<think>", "end": "</think>\\n"}', '{"tag": "<think>", "end": "</think>\\n"}', []),
    (f"Hm.\n{CALL}\n{CALL} done", "Hm.", ["f", "f"]), (f"a {CALL}\n<tool_call>{{oops", "a", ["f"])])
def test_the_deltas_of_an_answer_do_not_depend_on_its_steps(demo, text, content, calls):
    """A call that was told isn't taken back when a malformed one follows; from there on, all is content."""
    asked = chat_request(demo, {"messages": FRANCE, "stream": True}, Door(1000))
    for n in (1, 7, len(text)):
        job = Job(asyncio.Event(), True, Completion(demo, asked.answers[0][0], options=asked.answers[0][1]))
        reply, told = ChatReply(asked, [job], demo, "m"), {"content": "", "tool_calls": []}
        for at in range(0, len(text), n):
            job.completion.reader.push(text[at:at + n], ended=at + n >= len(text))
            job.n_pairs, job.finish_reason = len(job.completion.pairs), "stop" if at + n >= len(text) else None
            for chunk in reply.chunks(0, job):
                [choice] = json.loads(chunk.removeprefix("data: "))["choices"]
                told["content"] += choice["delta"].get("content", "")
                told["tool_calls"] += [call["function"]["name"] for call in choice["delta"].get("tool_calls", ())]
        assert told["tool_calls"] == calls and told["content"].startswith(content)
        assert told["content"] == content or "oops" in told["content"]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
