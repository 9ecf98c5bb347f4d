"""qwen3_lib/server: streamed answers, and their pieces."""
import json
import random
import re

import jsonschema

from helpers import WEATHER
from qwen3 import chat
from qwen3_lib.generation.answer import parse_answer
from qwen3_lib.generation.marks import Marks
from serving import FRANCE, PARIS, Served, streamed, web  # first: it skips where the server needs packages
from qwen3_lib.server.deltas import Deltas


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


def test_an_answer_that_is_cut_within_a_call_has_the_same_reason_streamed_or_not(client):
    fields = {"model": "m", "messages": FRANCE, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 26}
    whole = client.chat.completions.create(**fields).choices[0]
    _, _, [call], [reason], _ = streamed(client.chat.completions.create(stream=True, **fields))
    assert whole.finish_reason == reason == "length" and not whole.message.tool_calls
    assert call["name"] == "get_weather" and call["arguments"].startswith('{"') and "}" not in call["arguments"]


def test_a_response_has_no_empty_delta(served):
    for most, expected in ((50, PARIS), (2, "")):  # the thought is cut, and no answer follows
        fields = {"input": FRANCE[0]["content"], "stream": True, "max_output_tokens": most}
        events = served.ask("/v1/responses", fields)[1]
        deltas = re.findall('"type": "response.output_text.delta".*"delta": "(.*?)"', events)
        assert "".join(deltas) == expected and "" not in deltas


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
