"""qwen3_lib/server/messages.py: Anthropic's form, on the wire and by the `anthropic` package."""
import contextlib
import copy
import json
import random
import threading
import time
import urllib.request
from collections import Counter

import pytest

from helpers import WEATHER, assert_one_line, with_engine
from qwen3 import InputError
from qwen3_lib.app.openai import Door, chat_request, with_one_system_message
from serving import FRANCE, PARIS, Served, endless, received, until, web  # first: it skips where packages are missing
from qwen3_lib.server.messages import messages_request
from test_server_attack import VALUES
from test_server_lifecycle import KEYS

TOOL = {"name": "get_weather", "description": WEATHER["function"]["description"],
        "input_schema": WEATHER["function"]["parameters"]}
RAIN = [{"role": "user", "content": "What is the weather in Paris?"}]
ASK = {"model": "any", "max_tokens": 60, "messages": FRANCE}
USED = [{"type": "thinking", "thinking": "Look.", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris", "n": 1}}]


def result(content, **more):
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def events_of(text):
    """(name, data) of each event on the wire."""
    found = [each.split("\n") for each in text.removesuffix("\n\n").split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


def test_the_package(served):
    """Its accumulator takes the events; whole answers and counts; a call, and its result sent back."""
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="x", max_retries=0) as client:
        same = {"model": "claude-of-any-name", "max_tokens": 60}
        whole = client.messages.create(messages=FRANCE, **same)
        assert [block.text for block in whole.content] == [PARIS]
        assert (whole.model, whole.stop_reason) == ("claude-of-any-name", "end_turn")
        with client.messages.stream(messages=FRANCE, thinking={"type": "adaptive"}, **same) as stream:
            kinds, final = [event.type for event in stream], stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"] and "text" in kinds
        assert final.content[0].thinking == "France: Paris" and final.content[1].text == PARIS
        with client.messages.stream(messages=RAIN, tools=[TOOL], **same) as stream:
            asked = stream.get_final_message()
        assert asked.stop_reason == "tool_use" and asked.content[-1].input == {"city": "Paris"}
        told = [*RAIN, {"role": "assistant", "content": asked.content},
                {"role": "user", "content": [result([{"type": "text", "text": "21 degrees"}])]}]
        answer = client.messages.create(messages=told, tools=[TOOL], **same)
        assert "21" in answer.content[-1].text
        n = client.messages.count_tokens(model="m", messages=told, tools=[TOOL]).input_tokens
        assert n == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        assert [each.id for each in client.models.list()] == ["demo"]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 999 maximum"):
            client.messages.create(messages=[{"role": "user", "content": "a b " * 1000}], **same)


def test_a_stream_on_the_wire(served):
    """One block is open at a time, each with its own index; cached tokens are counted once."""
    fields = ASK | {"messages": RAIN, "tools": [TOOL], "stream": True, "thinking": {"type": "enabled"}}
    n = served.ask("/v1/messages/count_tokens", fields)[1]["input_tokens"]
    for _ in range(2):
        status, text, headers = served.ask("/v1/messages?beta=true", fields)
        events = events_of(text)
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert all(name == data["type"] for name, data in events)
        (first, start), *inner, (last_but_one, delta), (last, _) = events
        assert (first, last_but_one, last) == ("message_start", "message_delta", "message_stop")
        assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
        order = [(name.removeprefix("content_block_"), data["index"]) for name, data in inner]
        assert [*dict.fromkeys(order)] == [
            (name, i) for i in range(order[-1][1] + 1) for name in ("start", "delta", "stop")]
        kinds = [data["content_block"]["type"] for name, data in inner if name == "content_block_start"]
        assert kinds[-1] == "tool_use" and delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        pieces = [data["delta"]["partial_json"] for _, data in inner if "partial_json" in data.get("delta", ())]
        assert json.loads("".join(pieces)) == {"city": "Paris"}
        usage = delta["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n and usage["output_tokens"] > 5
    assert usage["cache_read_input_tokens"] == n - 1


@pytest.mark.parametrize("fields, reason, stop", [
    ({}, "end_turn", None), ({"stop_sequences": ["zzz", "Fra"]}, "stop_sequence", "Fra"),
    ({"max_tokens": 3}, "max_tokens", None), ({"messages": RAIN, "tools": [TOOL]}, "tool_use", None),
    ({"messages": RAIN, "tools": [TOOL], "tool_choice": {"type": "none"}}, "end_turn", None),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 100}, "tool_use", None),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 100}, "tool_use", None)])
def test_why_an_answer_ends(served, fields, reason, stop):
    answer = served.ask("/v1/messages", ASK | fields)[1]
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
    assert answer["type"] == "message" and answer["role"] == "assistant" and answer["id"].startswith("msg_")
    events = events_of(served.ask("/v1/messages", ASK | fields | {"stream": True})[1])
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    text = "".join(data["delta"]["text"] for _, data in events if data.get("delta", {}).get("type") == "text_delta")
    assert text == "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def test_a_schema(served):
    schema = {"type": "object", "properties": {"capital": {"enum": ["Berlin", "Paris"]}}, "required": ["capital"]}
    answer = served.ask("/v1/messages", ASK | {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert json.loads(answer[1]["content"][0]["text"]) == {"capital": "Paris"}


CALLED = {"role": "assistant", "content": "I look.", "reasoning_content": "Look.", "tool_calls": [
    {"function": {"name": "get_weather", "arguments": {"city": "Paris", "n": 1}}}]}


@pytest.mark.parametrize("fields, chat", [
    ({"system": "S"}, {"messages": [{"role": "system", "content": "S"}, *FRANCE]}),
    ({"system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.1;"},
                 {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "T"}]},
     {"messages": [{"role": "system", "content": "S\n\nT"}, *FRANCE]}),
    ({"system": []}, {}), ({"metadata": {"user_id": "x"}, "context_management": {"edits": []}, "new": 5}, {}),
    ({"tools": [TOOL | {"cache_control": {}}, {"type": "web_search_20250305", "name": "web_search"}]},
     {"tools": [WEATHER]}),
    ({"messages": [*RAIN, {"role": "assistant", "content": USED}, {"role": "user", "content": [
        {"type": "text", "text": "And Rome?"}, result("21 degrees"),
        {"type": "text", "text": "<system-reminder>Late.</system-reminder>"}]}]},
     {"messages": [*RAIN, CALLED, {"role": "tool", "content": "21 degrees<system-reminder>Late.</system-reminder>"},
                   {"role": "user", "content": "And Rome?"}]}),
    ({"messages": [*RAIN, {"role": "assistant", "content": USED}, {"role": "user", "content": [
        result([{"type": "text", "text": "21"}, {"type": "tool_reference", "tool_name": "x"}])]}]},
     {"messages": [*RAIN, CALLED, {"role": "tool", "content": "21[tool_reference: left out, because this model can't "
                                   "read it]"}]}),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
     {"messages": [{"role": "user", "content": "[image: left out, because this model can't read it]"}]}),
    ({"messages": [*FRANCE, {"role": "system", "content": "Late."}, {"role": "ctx", "content": "x"}]},
     {"messages": [*FRANCE, {"role": "system", "content": "Late."}, {"role": "user", "content": "x"}]}),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "D"}}]}]},
     {"messages": [{"role": "user", "content": "D"}]}),
    ({"messages": [*FRANCE, {"role": "assistant", "content": [{"type": "text", "text": "The"}]}]},
     {"messages": [*FRANCE, {"role": "assistant", "content": "The"}]})])
def test_a_request_has_the_prompt_of_the_same_chat(demo, fields, chat):
    door = Door(4096)
    asked = messages_request(demo, ASK | {"thinking": {"type": "adaptive"}} | fields, door)
    expected = chat_request(demo, {"messages": FRANCE} | chat, door)
    text = [demo.tokenizer.decode(request.answers[0][0]) for request in (asked, expected)]
    assert text[0] == text[1]


@pytest.mark.parametrize("fields, thinks, budget", [
    ({}, False, None), ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False, None),
    ({"chat_template_kwargs": {"enable_thinking": True}}, True, None), ({"enable_thinking": True}, True, None),
    ({"thinking": {"type": "adaptive"}}, True, None), ({"output_config": {"effort": "xhigh"}}, True, None),
    ({"thinking": {"type": "adaptive", "budget_tokens": 0}, "output_config": {"effort": "low"}}, True, 256),
    ({"thinking": {"type": "enabled", "budget_tokens": 1500}}, True, 1500)])
def test_thoughts(demo, fields, thinks, budget):
    """As Anthropic's servers do, the model thinks only where the request says so."""
    prompt, options = messages_request(demo, ASK | fields, Door(1000)).answers[0]
    assert demo.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n") == thinks
    assert options.think_budget == budget


BAD = [({"messages": None}, "messages"), ({"messages": [5]}, "message 0"), ({"messages": [{"role": "user"}]}, "blocks"),
       ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "blocks"), ({"model": None}, "model"),
       ({"messages": [{"role": "assistant", "content": [USED[3] | {"input": "x"}]}]}, "input"),
       ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]}, "thinking"),
       ({"tools": [5]}, "tools"), ({"tools": [{"input_schema": {}}]}, "tools"), ({"thinking": 5}, "thinking"),
       ({"tool_choice": {"type": []}}, "tool_choice"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
       ({"stop_sequences": [""]}, "stop"), ({"output_config": {"effort": "much"}}, "output_config.effort"),
       ({"output_config": {"format": {"type": "x"}}}, "output_config.format"), ({"max_tokens": 0}, "max_tokens"),
       ({"system": 5}, "system"), ({"stream": "yes"}, "stream"), ({"messages": FRANCE * 4097}, "4,096"),
       ({"messages": [{"role": "user", "content": "x " * 9999}]}, "prompt is too long: ")]


@pytest.mark.parametrize("fields, words", BAD)
def test_bad_requests(served, fields, words):
    status, value, _ = served.ask("/v1/messages", ASK | fields)
    assert status == 400 and value["type"] == "error" and value["error"].keys() == {"type", "message"}
    assert value["error"]["type"] == "invalid_request_error" and words in value["error"]["message"]


def test_errors_have_the_types_that_clients_know(demo, monkeypatch):
    def error(path="/v1/messages", body=ASK):
        status, value, headers = served.ask(path, body)
        assert value["type"] == "error" and value["request_id"].startswith("req_")
        return status, value["error"]["type"], headers.get("x-should-retry")

    never = ASK | {"ignore_eos": True, "max_tokens": 3900}
    with Served(demo, longest=4000, seconds=0.2) as served:
        assert error(body=never) == (504, "timeout_error", "false")
        text = served.ask("/v1/messages", never | {"stream": True})[1]
        assert events_of(text)[-1][1]["error"]["type"] == "timeout_error"
    with Served(demo, key="secret") as served:
        assert error() == (401, "authentication_error", None)
    with Served(demo, slots=1, longest=4000, queue=0) as served:
        assert error("/v1/messages/batches") == (404, "not_found_error", None)
        assert error(body=b"{") == (400, "invalid_request_error", None)
        with contextlib.closing(endless(served)):
            until(lambda: served.worker.jobs)
            assert error() == (429, "rate_limit_error", None)
        served.worker.ends_at = time.monotonic() + 60
        assert error() == (503, "overloaded_error", None)
        monkeypatch.setattr(web, "LARGEST_BODY", 10)
        assert error() == (413, "request_too_large", None)


def test_the_key_in_both_headers(demo):
    with Served(demo, key="secret") as served:
        for key, expected in KEYS.items():
            for other, either in ({}, expected), ({"x-api-key": "secret"}, 200), ({"x-api-key": "no"}, expected):
                headers = other | ({"Authorization": key} if key else {})
                assert served.ask("/v1/models", headers=headers)[0] == either, headers


@pytest.mark.parametrize("path, fields, first, sign", [
    ("/v1/messages", ASK, b"event: message_start", b"event: ping\ndata: {\"type\": \"ping\"}\n\n"),
    ("/v1/responses", {"input": "x", "prompt": None}, b"event: response.in_progress", b"event: response.in_progress"),
    ("/v1/chat/completions", {"messages": FRANCE, "prompt": None}, b"chat.completion.chunk",
     b": the answer is being computed")])
def test_a_sign_of_life_while_a_prompt_is_read(demo, monkeypatch, path, fields, first, sign):
    """In the form of each door, since some clients count events only: Codex."""
    read, run = threading.Event(), demo.engine.run
    monkeypatch.setattr(web, "SIGN_OF_LIFE", 0.01)
    with Served(with_engine(demo, run=lambda model, new: read.wait(60) and run(model, new))) as served:
        with contextlib.closing(endless(served, path, **fields)) as connection:
            received(connection, first)
            received(connection, sign)
            read.set()


def test_a_response_that_fails_says_so(demo):
    """Codex takes a stream without this event for a broken connection, and asks again."""
    with Served(demo, longest=4000, seconds=0.3) as served:
        name, data = events_of(served.ask("/v1/responses", {"input": "x", "stream": True, "ignore_eos": True})[1])[-1]
    assert (name, data["response"]["status"]) == ("response.failed", "failed")
    assert data["response"]["error"]["code"] == "timeout"


def test_what_is_asked_before_a_conversation(served):
    for path in ("/", "/api/hello"):
        with urllib.request.urlopen(urllib.request.Request(served.url + path, method="HEAD"), timeout=30) as got:
            assert got.status == 200 and got.read() == b""
    value = served.ask("/v1/models?limit=1000")[1]
    assert value["object"] == "list" and value["has_more"] is False and value["first_id"] == "demo"
    [about] = value["data"]
    assert (about["object"], about["type"], about["display_name"]) == ("model", "model", "demo")


# ---- System messages in the middle -----------------------------------------------------------------------------------

def test_the_beginning_of_a_conversation_stays_as_it_goes_on():
    """What was in the prompt of an earlier request doesn't change, wherever system messages stand."""
    rng = random.Random(5)
    for _ in range(300):
        messages = [{"role": "system", "content": f"s{i} "} for i in range(rng.randrange(3))]
        while len(messages) < 14:
            role = rng.choice(["user", "tool", "assistant", "system", "system"])
            messages.append({"role": role, "content": rng.choice([f"{role}{len(messages)} ", [
                {"type": "text", "text": f"{role}{len(messages)} "}]])})
        *ends, last = [i for i, each in enumerate(messages) if each["role"] == "assistant"] + [len(messages)]
        texts = [told(with_one_system_message(messages[:end])) for end in (*ends, last) if end]
        assert all(texts[-1].startswith(text) for text in texts), messages
        assert "system" not in "".join(each["role"] for each in with_one_system_message(messages)[1:])
        said = [[word for word in text.split() if word[-1].isdigit()] for text in (texts[-1], told(messages))]
        assert said[0] == said[1]


def told(messages):
    contents = [(each["role"], each["content"]) for each in messages]
    return "".join(f"<{role} {content if isinstance(content, str) else ''.join(part['text'] for part in content)}>"
                   for role, content in contents)


def test_requests_with_any_value_anywhere(demo):
    """A value deep in a request that is another than expected: an answer's prompt, or one line."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    good = ASK | {"system": [{"type": "text", "text": "S"}], "tools": [TOOL], "tool_choice": {"type": "auto"},
                  "thinking": {"type": "enabled", "budget_tokens": 9}, "stop_sequences": ["x"],
                  "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
                  "messages": [*RAIN, {"role": "assistant", "content": USED}, {"role": "user", "content": [
                      result([{"type": "text", "text": "a"}]), {"type": "text", "text": "b"}]},
                      {"role": "system", "content": "Late."}, {"role": "user", "content": [{"type": "document"}]}]}
    rng, door = random.Random(7), Door(4096)
    assert messages_request(demo, good, door).n_prompt > 100
    counts = Counter()
    for _ in range(400):
        body = copy.deepcopy(good)
        if rng.random() < 0.1:
            body["messages"][-1]["content"].append(copy.deepcopy(picture))
        place, key = body, rng.choice([*body])
        while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
            place = place[key]
            key = rng.choice([*place]) if isinstance(place, dict) else rng.randrange(len(place))
        place[key] = rng.choice(VALUES)
        try:
            counts[messages_request(demo, body, door).kind] += 1
        except InputError as error:
            assert_one_line(str(error))
            counts["refused"] += 1
    assert min(counts["message"], counts["refused"]) > 50
