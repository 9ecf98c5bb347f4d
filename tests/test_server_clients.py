"""Clients that others wrote, against the bundled model: openai, llm, LangChain, LiteLLM."""
import asyncio
import datetime
import enum
import json
import os
import subprocess
import sys
from typing import Annotated, Literal

import openai
import pydantic
import pytest

from helpers import WEATHER
from serving import FRANCE, PARIS

QUESTION = FRANCE[0]["content"]
RAIN = [{"role": "user", "content": "What is the weather in Paris?"}]


class Country(pydantic.BaseModel, extra="forbid"):
    capital: str = pydantic.Field(json_schema_extra={"enum": ["Berlin", "Paris", "Rome"]})
    continent: str = pydantic.Field(json_schema_extra={"enum": ["Africa", "Asia", "Europe"]})


EXPECTED = Country(capital="Paris", continent="Europe")
# The bundled model would fill its context with one string, or one number.
Word, Few = Annotated[str, pydantic.Field(max_length=20)], Annotated[int, pydantic.Field(ge=0, lt=100)]
Share = Annotated[float, pydantic.Field(ge=-1, lt=1, multiple_of=0.25)]


class Size(enum.Enum):
    SMALL, LARGE = "small", "large"


class City(pydantic.BaseModel):
    name: Word
    country: Country


class Sun(pydantic.BaseModel):
    kind: Literal["sun"]
    hours: Few


class Rain(pydantic.BaseModel):
    kind: Literal["rain"]
    liters: Share


def shape(name, **fields):
    return pydantic.create_model(name, **fields)


SHAPES = [  # all but the first say nothing about further properties
    Country, shape("Flat", city=Word, ok=bool), City,
    shape("Several", cities=(list[City], pydantic.Field(max_length=2))),
    shape("Optional", size=(Size | None, None), n=(Few | None, None)),
    shape("Sized", size=Size, letter=Literal["a", "b"]),
    shape("Bounded", n=Few, x=Share), shape("Any", weather=Sun | Rain | Word),
    shape("Told", weather=Annotated[Sun | Rain, pydantic.Field(discriminator="kind")]),
    shape("Dated", day=datetime.date, at=datetime.datetime),
    shape("Deep", one=shape("One", two=shape("Two", three=shape("Three", word=Word, size=Size))), more=(list[Few], []))]


@pytest.fixture(scope="module")
def where(served):
    return {"base_url": f"{served.url}/v1", "api_key": "x"}


def test_openai(served):
    async def asked():
        async with served.client(openai.AsyncOpenAI) as client:
            whole = await client.chat.completions.create(model="m", messages=FRANCE)
            stream = await client.chat.completions.create(model="m", messages=FRANCE, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return whole.choices[0].message.content, streamed

    assert asyncio.run(asked()) == (PARIS, PARIS)
    client = served.client()
    tool = openai.pydantic_function_tool(pydantic.create_model("get_weather", city=str))
    with client.chat.completions.stream(model="m", messages=RAIN, tools=[tool]) as stream:
        fragments = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert fragments == ['{"city": "Paris"}']
    assert call.function.parsed_arguments.city == "Paris"


def asked_by_openai(where, shape):
    with openai.OpenAI(**where) as client:
        answer = client.chat.completions.parse(model="m", messages=FRANCE, response_format=shape)
        return answer.choices[0].message.parsed


def asked_by_llm(where, shape):
    pytest.importorskip("llm")
    from llm.default_plugins.openai_models import Chat
    model = Chat("local", model_name="m", api_base=where["base_url"], supports_schema=True)
    model.key = where["api_key"]
    return shape.model_validate_json(model.prompt(QUESTION, schema=shape, stream=False).text())


def asked_by_langchain(where, shape):
    model = pytest.importorskip("langchain_openai").ChatOpenAI(model="m", max_retries=0, **where)
    return model.with_structured_output(shape).invoke(QUESTION)


def asked_by_litellm(where, shape):
    litellm = pytest.importorskip("litellm")
    answer = litellm.completion("openai/m", FRANCE, api_base=where["base_url"], api_key="x", response_format=shape)
    return shape.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("asked", [asked_by_openai, asked_by_llm, asked_by_langchain, asked_by_litellm])
def test_an_answer_to_a_class_is_finished_and_valid(where, asked, shape, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    answer = asked(where, shape)
    assert isinstance(answer, shape) and (shape is not Country or answer == EXPECTED)


def test_openai_responses(served):
    client, same = served.client(), {"model": "m", "input": QUESTION}
    whole = client.responses.create(**same)
    assert (whole.output_text, whole.status) == (PARIS, "completed") and whole.usage.output_tokens > 5
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "France: Paris"
    with client.responses.stream(**same | {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": QUESTION}]}]}) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert final.output_text == PARIS and final.output[0].content[0].text == "France: Paris"
    for kind, text in (("output_text", PARIS), ("reasoning_text", "France: Paris")):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert client.responses.parse(text_format=Country, **same).output_parsed == EXPECTED
    brief = client.responses.create(reasoning={"effort": "none"}, instructions="Be brief.", **same)
    assert brief.output_text == PARIS and brief.usage.input_tokens > whole.usage.input_tokens
    cut = client.responses.create(max_output_tokens=3, reasoning={"effort": "none"}, **same)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert PARIS.startswith(cut.output_text) and cut.output_text
    for wrong in ({"input": [{"type": "function_call_output"}]}, {"previous_response_id": "x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**same | wrong)
        assert caught.value.param in wrong


def test_openai_responses_with_tools(served):
    """A call is an item, whole and streamed; with the call and its output in the input, the model answers."""
    client, tool = served.client(), {"type": "function", **WEATHER["function"]}
    same = {"model": "m", "input": RAIN, "tools": [tool]}
    thought, call = client.responses.create(**same).output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    with client.responses.stream(**same) as stream:
        events = [*stream]
        streamed = stream.get_final_response().output[-1]
    assert (streamed.name, streamed.arguments, streamed.status) == (call.name, call.arguments, "completed")
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert pieces == [call.arguments]
    assert [event.type.partition(".")[2] for event in events if "delta" not in event.type] == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done",
        "output_item.done", "output_item.added", "function_call_arguments.done", "output_item.done", "completed"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    told = client.responses.create(**same | {"input": [*RAIN, thought, call.model_dump(), output]})
    assert "21" in told.output_text and told.output[-1].type == "message"
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        *_, call = client.responses.create(tool_choice=choice, **same | {"input": QUESTION}).output
        assert call.name == "get_weather"
    assert client.responses.create(tool_choice="none", **same | {"input": QUESTION}).output_text == PARIS
    cut = client.responses.create(max_output_tokens=20, tool_choice="required", **same)
    assert (cut.status, cut.output[-1].status) == ("incomplete", "incomplete")


def test_llm(where, tmp_path):
    """Its command, which streams, or gets the whole answer; a schema; a tool."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([{  # JSON is YAML
        "model_id": "local", "model_name": "m", "api_base": where["base_url"], "supports_schema": True,
        "supports_tools": True}]))
    env = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "x"}

    def llm(*words):
        return subprocess.run([sys.executable, "-m", "llm", "-m", "local", *words], env=env, text=True,
                              check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=100).stdout.strip()

    assert llm(QUESTION) == llm("--no-stream", "-o", "max_tokens", "50", QUESTION) == PARIS
    assert Country.model_validate_json(llm("--schema", json.dumps(Country.model_json_schema()), QUESTION)) == EXPECTED
    function = 'def get_weather(city: str) -> str:\n    "The weather in a city."\n    return "21 degrees"'
    assert "21" in llm("--functions", function, RAIN[0]["content"])


def test_langchain(where):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(model="m", max_retries=0, **where)
    assert model.invoke(QUESTION).content == PARIS == asyncio.run(model.ainvoke(QUESTION)).content
    whole = None
    for chunk in model.bind_tools([WEATHER]).stream(RAIN):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]
    assert model.bind_tools([WEATHER], tool_choice="any").invoke(QUESTION).tool_calls[0]["name"] == "get_weather"
    by_tool = model.with_structured_output(Country, method="function_calling").invoke(QUESTION)
    assert isinstance(by_tool, Country) and by_tool.capital == "Paris"
    newer = langchain_openai.ChatOpenAI(model="m", use_responses_api=True, **where)
    assert newer.invoke(QUESTION).text == PARIS
    asked = newer.bind_tools([WEATHER]).invoke(RAIN)
    answer = {"role": "tool", "content": "21 degrees", "tool_call_id": asked.tool_calls[0]["id"]}
    assert "21" in newer.bind_tools([WEATHER]).invoke([*RAIN, asked, answer]).text


def test_litellm(where, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network when it is imported
    litellm = pytest.importorskip("litellm")
    same = {"model": "openai/m", "api_base": where["base_url"], "api_key": "x", "messages": FRANCE, "num_retries": 0}
    whole = litellm.completion(user="me", metadata={"a": "b"}, **same).choices[0].message
    assert (whole.content, whole.reasoning_content) == (PARIS, "France: Paris")
    chunks = litellm.completion(stream=True, stream_options={"include_usage": True}, **same)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == PARIS
    chunks = [*litellm.completion(tools=[WEATHER], stream=True, **same | {"messages": RAIN})]
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
