"""qwen3_lib/server: the fields of requests, answers whole and streamed."""
import asyncio
import base64
import dataclasses
import json
import re

import jsonschema
import numpy as np
import pytest
from openai.types.chat.chat_completion_message_tool_call import Function

import qwen3
from configs import FORM, ROOT
from fuzzing import CALL
from helpers import WEATHER, assert_one_line
from qwen3 import chat
from qwen3_embed import SEARCH, embed, rerank
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.processors import StopLoops
from qwen3_lib.app.openai import Door, chat_request
from qwen3_lib.app.fields import Refusal
from serving import FRANCE, PARIS, Served, openai, streamed  # first: it skips where the server needs packages
from qwen3_lib.server import responses
from qwen3_lib.server.replies import ChatReply
from qwen3_lib.server.worker import Job
from test_tokenizer_utils import LIKE_3_8
from tokenizer_utils import InputError, Tokenizer


@pytest.mark.parametrize("options, expected", [
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "stop": [" is Par", "x"]},
     ("The capital of France", "stop")),
    ({"reasoning_effort": "none", "max_completion_tokens": 2, "stop": "apex"}, ("The capital", "length"))])
def test_options(client, options, expected):
    for stream in (False, True):
        got = client.chat.completions.create(model="m", messages=FRANCE, stream=stream, **options)
        if stream:
            content, _, _, [reason], _ = streamed(got)
        else:
            content, reason = got.choices[0].message.content, got.choices[0].finish_reason
        assert (content, reason) == expected


def test_choices_prefill_and_roles(client):
    """Each of n answers is drawn with a seed of its own: that of a single request."""
    same = {"messages": FRANCE, "model": "m", "temperature": 9, "max_tokens": 12}
    several = client.chat.completions.create(n=3, seed=5, **same)
    assert len({choice.message.content for choice in several.choices}) == 3
    for i, choice in enumerate(several.choices):
        alone = client.chat.completions.create(seed=5 + i, **same)
        assert choice.message == alone.choices[0].message and choice.index == i
    begun = [{"role": "developer", "content": "Be brief."}, *FRANCE, {"role": "assistant", "content": "The capital of"}]
    for fields in {}, {"continue_final_message": True, "add_generation_prompt": False}:
        [choice] = client.chat.completions.create(model="m", messages=begun, extra_body=fields).choices
        assert choice.message.content == " France is Paris."
    budget = client.chat.completions.create(model="m", messages=FRANCE, extra_body={"thinking_budget": 2})
    assert budget.choices[0].message.content == PARIS and "</think>" not in budget.choices[0].message.reasoning_content


def test_loops_end_on_request(client, monkeypatch):
    """With OpenAI's word for the reason."""
    monkeypatch.setattr(StopLoops, "LEAST", 200)
    form = {"type": "regex", "pattern": "(The quick brown fox jumps over the lazy dog[.] ){40}"}
    asked = {"response_format": form, "enable_thinking": False, "stop_loops": True}
    ended = client.chat.completions.create(model="m", messages=FRANCE, extra_body=asked)
    assert ended.choices[0].finish_reason == "stop" and 200 < ended.usage.completion_tokens < 400


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
    with pytest.raises(openai.BadRequestError, match=r'\["not"\].*get_weather') as caught:
        client.chat.completions.create(**same)
    assert caught.value.param == "tools"


def test_enable_thinking_wins_over_reasoning_effort(served, demo):
    for effort, think in (("high", False), ("none", True)):
        body = {"messages": FRANCE, "reasoning_effort": effort, "enable_thinking": think}
        expected = demo.tokenizer.apply_chat_template(FRANCE, enable_thinking=think)
        assert served.ask("/apply-template", body)[1]["prompt"] == expected


def test_the_items_of_a_response_go_back_as_messages_of_a_chat(demo):
    """A thought belongs to the message or call after it."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "5"}
    calls = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}]
    for items, answer in [([thought, said], {"content": said["content"], "reasoning_content": "hm"}),
                          ([said], {"content": said["content"]}), ([call], {"content": "", "tool_calls": calls}),
                          ([thought, call], {"content": "", "reasoning_content": "hm", "tool_calls": calls}),
                          ([{"type": "web_search_call", "id": "w"}, said, {"type": "tool_search_output", "tools": []}],
                           {"content": said["content"]}),
                          ([thought, said, call],
                           {"content": said["content"], "reasoning_content": "hm", "tool_calls": calls})]:
        messages = responses.as_chat({"input": [*FRANCE, *items, result]}, False)["messages"]
        answer = answer | ({"content": [{"type": "text", "text": "Hi."}]} if answer["content"] else {})
        assert messages == [*FRANCE, {"role": "assistant"} | answer,
                            {"role": "tool", "tool_call_id": "1", "content": "5"}]


def test_a_picture_that_a_tool_gives_a_model_that_cannot_see_ends_no_conversation(served):
    """Codex sends it again with each request: the model is told that it was there."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    told = [{"type": "input_text", "text": "[input_image: left out, because this model can't read it]"}]
    answers = [served.ask("/v1/responses", {"max_output_tokens": 2, "input": [
        *FRANCE, {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output}]}) for output in ([picture], told)]
    assert [status for status, *_ in answers] == [200, 200]
    assert answers[1][1]["usage"]["input_tokens_details"]["cached_tokens"] == answers[0][1]["usage"]["input_tokens"] - 1


@pytest.fixture(scope="module")
def newer(demo):
    """The bundled model with a chat template of the kind of Qwen3.8's."""
    tokenizer = Tokenizer(demo.tokenizer.backend, LIKE_3_8, demo.tokenizer.named_tokens)
    return dataclasses.replace(demo, tokenizer=tokenizer)


@pytest.mark.parametrize("fields, begin", [
    ({}, "Effort: xhigh\n"), ({"reasoning_effort": "high"}, "Effort: xhigh\n"),
    ({"reasoning_effort": "low"}, "Effort: low\n"), ({"reasoning_effort": "medium"}, ""),
    ({"reasoning_effort": "none"}, ""), ({"enable_thinking": False}, ""),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "Effort: low\n"),
    ({"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}}, "")])
def test_variables_of_a_template(newer, fields, begin):
    prompt, options = chat_request(newer, {"messages": FRANCE} | fields, Door(1000)).answers[0]
    assert newer.tokenizer.decode(prompt) == f"{begin}user:{FRANCE[0]['content']}\n" and options.think_budget is None
    with pytest.raises(InputError, match="^chat_template_kwargs must"):
        chat_request(newer, {"messages": FRANCE, "chat_template_kwargs": {"effort": "low"}}, Door(1000))


def test_thoughts_stay_in_an_agents_prompt_where_the_template_knows_how(demo):
    """In a conversation with tools, the prompt of the next question begins with what was read and written before."""
    later = "loop.index0 > question.index"
    source = demo.tokenizer.chat_template.replace(later, f"(preserve_thinking or {later})")
    newer = dataclasses.replace(demo, tokenizer=Tokenizer(demo.tokenizer.backend, source, demo.tokenizer.named_tokens))
    said = {"role": "assistant", "reasoning_content": "Hm.", "content": "Rain."}

    def prompt(model, messages, **fields):
        return model.tokenizer.decode(chat_request(model, {"messages": messages} | fields, Door(1000)).answers[0][0])

    for fields, kept in (({"tools": [WEATHER]}, True), ({}, False),
                         ({"tools": [WEATHER], "chat_template_kwargs": {"preserve_thinking": False}}, False)):
        read = prompt(newer, FRANCE, **fields) + "<think>\nHm.\n</think>\n\nRain.<|im_end|>\n"
        assert prompt(newer, [*FRANCE, said, *FRANCE], **fields).startswith(read) == kept
    assert "Hm." not in prompt(demo, [*FRANCE, said, *FRANCE], tools=[WEATHER])  # its own template doesn't know it


FIRST_ONLY = """{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}{{- m.role + ':' + m.content + '\\n' }}
{%- endfor %}"""


def test_system_messages_join_their_neighbours_where_a_template_wants_one_at_the_beginning(demo):
    tokenizer = Tokenizer(demo.tokenizer.backend, FIRST_ONLY, demo.tokenizer.named_tokens)
    strict = dataclasses.replace(demo, tokenizer=tokenizer)
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
                *FRANCE, {"role": "system", "content": "It is late."}, {"role": "user", "content": "Go on."}]
    prompt = tokenizer.decode(chat_request(strict, {"messages": messages}, Door(1000)).answers[0][0])
    assert prompt == f"system:Be brief.\n\nBe kind.\nuser:{FRANCE[0]['content']}\n\nIt is late.\nuser:Go on.\n"
    prompt = demo.tokenizer.decode(chat_request(demo, {"messages": messages}, Door(1000)).answers[0][0])
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
        asked = chat_request(newer, body, Door(1000))
        answer = Completion(newer, asked.answers[0][0], tools=asked.tools, options=asked.answers[0][1]).finish()
        [call] = answer.answer.tool_calls
        names.add(call["name"])
        assert answer.text.startswith(f"<tool_call>\n<function={call['name']}>\n")
        if call["name"] == "look_up":
            jsonschema.validate(call["arguments"], LOOK_UP["function"]["parameters"])
        else:  # it has no parameters
            assert answer.text == "<tool_call>\n<function=touch>\n</function>\n</tool_call>"
    assert names == {"look_up", "touch"}
    with pytest.raises(Refusal, match="the parameters of the tool touch must be a JSON Schema"):
        chat_request(newer, {"messages": FRANCE, "tools": [TOUCH | {"parameters": 5}], "tool_choice": "required"},
                     Door(1000))


@pytest.mark.parametrize("text, fits", [
    ("Hello!", True), ("Hm.<tool_call>\n<function=touch>\n</function>\n</tool_call>", True),
    ("<tool_call>\n<function=touch>\n<parameter=any>\n</b>\n\n</parameter>\n</function>\n</tool_call>", True),
    ("<tool_call>\n<function=touch>\nany\n</function>\n</tool_call>", False),
    ("<tool_call>\n<function=look_up>\n<parameter=word>\nc\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=touch>\n</function>\n</tool_call>", True),
    ("<tool_call>\n<function=look_up>\n<parameter=word>\nd\n</parameter>\n", False)])
def test_calls_in_xml_of_strict_tools_fit(newer, text, fits):
    tools = [{"function": LOOK_UP["function"] | {"strict": True}}, TOUCH]
    _, options = chat_request(newer, {"messages": FRANCE, "tools": tools}, Door(1000)).answers[0]
    ids, matcher = newer.tokenizer.encode(text, add_special_tokens=False), options.schema.matchers().matcher
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits


# ---- Answers that fit ------------------------------------------------------------------------------------------------

# ---- Plain text, tokens, vectors -------------------------------------------------------------------------------------

def test_plain_text(client, demo):
    ids = demo.tokenizer.encode("The capital of")
    got = client.completions.create(model="m", prompt=["The capital of", ids], max_tokens=4, echo=True, n=2)
    expected = "The capital of" + str(Completion(demo, ids, max_new_tokens=4))
    assert [choice.text for choice in got.choices] == [expected] * 4 and got.usage.prompt_tokens == 2 * len(ids)
    parts = [*client.completions.create(model="m", prompt=ids, max_tokens=4, stream=True, logprobs=1)]
    assert "The capital of" + "".join(part.choices[0].text for part in parts) == expected
    tokens = [token for part in parts for token in part.choices[0].logprobs.tokens]
    assert tokens == [demo.tokenizer.decode([token])
                      for token in Completion(demo, ids, max_new_tokens=4).finish().token_ids]
    assert [at for part in parts for at in part.choices[0].logprobs.text_offset] == [
        len("".join(tokens[:i])) for i in range(4)]
    again = client.completions.create(model="m", prompt=ids, max_tokens=1, n=3)
    assert again.usage.prompt_tokens_details.cached_tokens == len(ids) - 1


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
        told = [served.ask("/tokenize", {"content": text})[1] for text in texts]
        assert {each["max_model_len"] for each in told} == {model.config.context_length}
        assert sum(each["count"] for each in told) == got.usage.prompt_tokens  # with the ending of each text
        for path, body, words in (("/v1/embeddings", {"input": LONG}, "too long"),
                                  ("/rerank", {"query": "x", "texts": [LONG]}, "too long"),
                                  ("/v1/chat/completions", {"messages": FRANCE}, "embedding model")):
            status, value, _ = served.ask(path, body)
            assert status == 400 and words in value["error"]["message"] and str(embedder) not in json.dumps(value)
        status, value, _ = served.ask("/rerank", {"query": "home", "texts": texts})
        searched = vectors @ embed(model, ["home"], SEARCH)[0]
        np.testing.assert_allclose([each["score"] for each in value], np.sort(searched)[::-1], rtol=1e-6)
    model = qwen3.load_model(reranker)
    with Served(model) as served:
        scores = rerank(model, "home", texts)
        status, value, _ = served.ask("/v1/rerank", {"query": "home", "documents": texts, "top_n": 2,
                                                     "return_documents": True})
        best = int(scores.argmax())
        assert [each["index"] for each in value["results"]] == np.argsort(-scores)[:2].tolist()
        assert value["results"][0] == {"index": best, "relevance_score": float(scores[best]), "document": texts[best]}


# ---- Bad requests ----------------------------------------------------------------------------------------------------

LONG = "to be " * 20_000
BAD = [  # path, body, status, the field at fault, words of the message
    ("/v1/chat/completions", {"messages": FRANCE, "temperature": -1}, 400, "temperature", "temperature"),
    ("/v1/chat/completions", {"messages": FRANCE, "n": 9}, 400, "n", "8"),
    ("/v1/chat/completions", {"messages": FRANCE, "logit_bias": {"a": 1}}, 400, "logit_bias", "id"),
    ("/v1/chat/completions", {"messages": FRANCE, "tempurature": 1}, 400, "tempurature", "temperature"),
    ("/v1/chat/completions", {"messages": FRANCE, "tool_choice": "required"}, 400, "tool_choice", "tools"),
    ("/v1/chat/completions", {"messages": FRANCE, "response_format": {"type": "x"}}, 400, "response_format", "json"),
    ("/v1/chat/completions", {"messages": FRANCE, "response_format": {"type": "regex", "pattern": "(?=a)b"}}, 400,
     "response_format", "look-around"),
    ("/v1/chat/completions", {"messages": FRANCE, "continue_final_message": True}, 400, "continue_final_message",
     "last"), ("/v1/chat/completions", {}, 400, None, "messages"),
    ("/v1/chat/completions", {"messages": 3}, 400, "messages", "messages"),
    ("/v1/chat/completions", {"messages": [*FRANCE, {"role": "tool"}]}, 400, "messages", "message 1"),
    ("/v1/chat/completions", {"messages": [*FRANCE, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, 400, "messages", "message 1"),
    ("/v1/chat/completions", {"messages": FRANCE * 300}, 400, "messages", "too long"),
    ("/v1/completions", {"prompt": [5] * 1000}, 400, "prompt", "too long"),
    ("/v1/completions", {"prompt": LONG}, 400, "prompt", "too long"),
    ("/v1/responses", {"input": "a " * 3000}, 400, "input", "too long"),
    ("/tokenize", {"content": LONG}, 400, None, "too long"),
    ("/v1/completions", {"prompt": ["a"] * 69}, 400, None, "at most 68"),
    ("/v1/completions", {"prompt": "a", "eos_token_ids": 5}, 400, "eos_token_ids", "list of token ids"),
    ("/v1/chat/completions", {"messages": FRANCE, "schema": 5}, 400, "schema", "JSON Schema"),
    ("/v1/completions", {"prompt": "a", "stop": "a" * 1025}, 400, "stop", "1,024"),
    ("/v1/completions", {"prompt": [10**30]}, 400, None, "range"),
    ("/v1/completions", {"prompt": {}}, 400, "prompt", "text"),
    ("/v1/completions", {"prompt": "\ud800"}, 400, None, "Unicode"),
    ("/apply-template", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, "Unicode"),
    ("/apply-template", b'{"messages": "\xed\xa0\x80"}', 400, None, "Unicode"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", "supported"),
    ("/v1/responses", {"input": [{"role": "user"}]}, 400, "input", "content"),
    ("/v1/responses", {"input": "x", "background": True}, 400, "background", "supported"),
    ("/v1/completions", b"{", 400, None, "JSON"), ("/v1/completions", b"3", 400, None, "object"),
    ("/v1/completions", b"[" + b"1," * 2**19 + b"1]", 413, None, "524,289 commas, colons and brackets"),
    ("/v1/completions", b"[" * 2**17 + b"{" * 2**17 + b":" * 2**18 + b",", 413, None, "524,289 commas, colons"),
    ("/v1/embeddings", {"input": "x"}, 400, None, "embedding"), ("/v1/embeddings", {"input": 3}, 400, "input", "text"),
    ("/v1/embeddings", {"input": [[1, 2]]}, 400, "input", "check_embedding_ctx_length"),
    ("/v1/embeddings", {"input": "x", "dimension": 2}, 400, "dimension", "dimensions"),
    ("/rerank", {"query": "x", "texts": ["a"]}, 400, None, "demo: not a reranker"),
    ("/rerank", {"query": "x", "texts": ["a"], "raw_scores": True}, 400, "raw_scores", "supported"),
    ("/v1/responses", {"input": "x", "tools": [{}]}, 400, "tools", "list"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens must"),
    ("/v1/completions", {"prompt": "a", "repeat_penalty": 0}, 400, "repeat_penalty", "repeat_penalty must"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens", "max_output_tokens must"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "much"}}, 400, "reasoning.effort", "effort must"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "x"}}}, 400, "text.format", "text.format must"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 4097}, 400, "input", "input: 4,097 messages"),
    ("/v1/responses", {"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, 400, "input", "not text"),
    ("/v1/chat/completions", {"messages": FRANCE * 4097}, 400, "messages", "at most 4,096"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input", "item_reference"),
    ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, 400, "input", "JSON"),
    ("/v1/responses", {"input": [{"type": "function_call", "arguments": "{}"}]}, 400, "input", "tool_calls"),
    ("/v1/rerank", {"query": "x", "documents": []}, 400, "query", "documents"),
    ("/tokenize", {}, 400, "content", "text"), ("/detokenize", {"tokens": "x"}, 400, "tokens", "ids"),
    ("/v1/models/other/name", None, 404, "model", "other/name"),
    ("/v1/completions", {"prompt": "x", "cache_salt": "a" * 1025}, 400, "cache_salt", "at most 1,024 characters"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {f"{i:09}": 1 for i in range(32_769)}}, 400, "logit_bias",
     "32,769 tokens; at most 32,768"),
    ("/v1/nothing", {}, 404, None, "there is no /v1/nothing: this server speaks OpenAI's API, at /v1/chat/completions"),
    ("/api/chat", {}, 404, None, "there is no /api/chat, which is Ollama's: this server speaks OpenAI's API"),
    ("/v1/models", {}, 405, None, "POST")]


@pytest.mark.parametrize("path, body, status, param, words", BAD)
def test_bad_requests(served, path, body, status, param, words):
    got, value, _ = served.ask(path, body)
    assert got == status and value["error"].keys() == {"message", "type", "param", "code"}
    assert value["error"]["param"] == param and words in value["error"]["message"]
    assert_one_line(value["error"]["message"])
    if words == "too long":
        assert value["error"]["code"] == "context_length_exceeded"
    assert str(ROOT) not in json.dumps(value)


CLIENTS = {  # what they send beside the question; none of it has an effect here at these values
    "openai": {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "verbosity": "low",
               "parallel_tool_calls": True, "safety_identifier": "1", "prompt_cache_key": "1", "audio": None,
               "modalities": ["text"], "prediction": {"type": "content", "content": "Paris"}, "stream_options": None},
    "Zed": {"stop": [], "tools": [], "tool_choice": "auto", "prompt_cache_key": "1", "parallel_tool_calls": False},
    "Open WebUI": {"chat_id": "1", "session_id": "2", "id": "3", "frequency_penalty": 0, "keep_alive": "5m"},
    "vLLM": {"min_tokens": 0, "top_k": -1, "skip_special_tokens": True, "spaces_between_special_tokens": True,
             "return_token_ids": False, "continue_final_message": False, "chat_template_kwargs": {}},
    "llama.cpp": {"cache_prompt": True, "n_predict": 1, "timings_per_token": True, "return_progress": True,
                  "reasoning_format": "deepseek", "typical_p": 1.0, "xtc_probability": 0, "xtc_threshold": 0.1,
                  "n_probs": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "mirostat": 0,
                  "mirostat_tau": 5, "seed": -1, "backend_sampling": False}, "LM Studio": {"max_tokens": -1, "ttl": 60}}


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


# ---- Streams ---------------------------------------------------------------------------------------------------------

def test_an_answer_whole_and_streamed(client, demo):
    whole = client.chat.completions.create(model="demo", messages=FRANCE, logprobs=True, top_logprobs=2)
    [choice] = whole.choices
    alone = chat(demo, FRANCE, logprobs=2).finish()
    assert (choice.message.content, choice.message.reasoning_content) == (PARIS, "France: Paris")
    assert choice.finish_reason == "stop" and whole.usage.completion_tokens == len(alone.token_ids)
    think = demo.tokenizer.token_to_id("<think>"), demo.tokenizer.token_to_id("</think>")
    thought = [*alone.token_ids[alone.token_ids.index(think[0]) + 1:alone.token_ids.index(think[1])]]
    assert len(thought) > 2 and whole.usage.completion_tokens_details.reasoning_tokens == len(thought)
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
    assert last.usage.completion_tokens_details.reasoning_tokens == len(thought)
    assert client.chat.completions.create(model="demo", messages=FRANCE, reasoning_effort="none").usage \
        .completion_tokens_details.reasoning_tokens == 0
    for stream in (False, True):
        got = client.responses.create(model="demo", input=FRANCE, stream=stream)
        usage = [*got][-1].response.usage if stream else got.usage
        assert usage.output_tokens_details.reasoning_tokens == len(thought) < usage.output_tokens
        assert usage.input_tokens_details.cached_tokens == len(alone.prompt_ids) - 1
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
