"""Requests in OpenAI's form, for the server and for batch files: their prompts, options, tools and schemas.

Each field is checked here and in fields.py, or by the Completion that takes it.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from qwen3 import InputError, Model, default_sampling
from qwen3_asr import hears
from qwen3_lib.generation.tools import Value, checked_tools
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.messages import PictureError, encoded, given_in, messages_and_pictures
from qwen3_lib.generation.matcher import Matcher
from qwen3_lib.generation.schema import Grammar, calls_grammar, grammar_of, lark, matchers, regex
from qwen3_lib.io.errors import brief, is_whole, parse_json
from qwen3_lib.io.pictures import is_data_url, picture_at, picture_of
from qwen3_lib.app.fields import (CHAT, COMPLETION_FIELDS, LONGEST_SALT, MOST_CHOICES, MOST_LOGPROBS, MOST_PROMPTS,
                                  Body, Refusal, body_options, flag, known, must_generate, object_in,
                                  whole)
from qwen3_vision import Picture, prompt_ids
from tokenizer_utils import PICTURES, checked_messages, with_system


# ---- Requests --------------------------------------------------------------------------------------------------------

# reasoning_effort -> enable_thinking, thinking_budget
THOUGHTS = {"none": (False, None), "minimal": (False, None), "low": (True, 256), "medium": (True, 1024),
            "high": (True, None), "xhigh": (True, None), "max": (True, None)}
MOST_PICTURES, MOST_MESSAGES, MOST_TOOLS = 32, 4096, 1024  # of a request
ANY_ARGUMENTS = {"parameters": {"type": "object"}}  # of a tool that isn't strict


@dataclass(frozen=True)
class Door:
    """What a request meets where it comes in: a server's door is for strangers, a batch file's for its user."""
    longest: int  # tokens of a prompt and its answer
    folder: Path | None = None  # {"type": "image", "image": FILE} is read from there; None: no file is read
    options: dict[str, Any] = field(default_factory=dict)  # of an answer, for absent fields
    chat: dict[str, Any] = field(default_factory=dict)  # system, tools, enable_thinking, chat_template_kwargs, likewise
    matchers: Callable[[Model, str], Callable[[], Matcher]] = matchers  # compiles a grammar


@dataclass
class GenerationRequest:
    """A checked request: what to generate, and in which form to answer."""
    kind: str  # "chat", "text" or "response"
    n: int  # answers to each prompt
    answers: list[tuple[list[int], AnswerOptions]]  # (prompt, options) of each
    stream: bool
    include_usage: bool
    n_prompt: int  # tokens of the prompts, each counted once
    salt: str  # see Batch
    echoes: list[str]  # what stands before each answer to a text
    tools: list[dict[str, Any]] | None = None
    one_call: bool = False  # at most one call of a tool
    pictures: Sequence[Picture] = ()  # of the prompts: they live as long as something holds them
    model_name: str = ""  # by which the answer calls the model; empty: its own


def request_of(kind: str, body: Body, prompts: list[list[int]], options: AnswerOptions,
               longest: int, echoes: Sequence[str] = (), **more: Any) -> GenerationRequest:
    """The GenerationRequest of either kind. Each of a prompt's n answers has a seed of its own."""
    n = whole(body, "n", 1, 1, MOST_CHOICES)
    field = "messages" if kind == "chat" else "prompt"
    for prompt in prompts:
        if len(prompt) >= longest:
            raise Refusal(400, f"prompt is too long: {len(prompt)} tokens > {longest - 1} maximum", field,
                          "context_length_exceeded")  # in the words by which agents know that they must shorten it
    if not isinstance(salt := body.get("cache_salt", ""), str) or len(salt) > LONGEST_SALT:
        raise Refusal(400, f"cache_salt must be a text of at most {LONGEST_SALT:,} characters", "cache_salt")
    each = [options if options.seed is None else replace(options, seed=options.seed + i) for i in range(n)]
    return GenerationRequest(kind, n, [(prompt, one) for prompt in prompts for one in each], flag(body, "stream"),
                             flag(object_in(body, "stream_options"), "include_usage"), sum(map(len, prompts)), salt,
                             [echo for echo in echoes for _ in range(n)], **more)


# ---- Chat ------------------------------------------------------------------------------------------------------------

def thoughts_of(model: Model, body: Body, door: Door) -> tuple[bool | None, int | None, dict[str, Any]]:
    """(enable_thinking or the default, thinking_budget, other variables of the chat template) of a request."""
    effort, kwargs = body.get("reasoning_effort"), body.get("chat_template_kwargs", {})
    if effort is not None and (not isinstance(effort, str) or effort not in THOUGHTS):
        raise Refusal(400, f"reasoning_effort must be one of {', '.join(THOUGHTS)}", "reasoning_effort")
    if not isinstance(kwargs, dict):
        raise Refusal(400, "chat_template_kwargs must be an object", "chat_template_kwargs")
    think, budget = THOUGHTS[effort] if effort is not None else (door.chat.get("enable_thinking"), None)
    if body.get("tools") and "preserve_thinking" in model.tokenizer.template_variables:
        kwargs = {"preserve_thinking": True} | kwargs  # else a new question would change the prompt before it
    if effort and think and "reasoning_effort" in model.tokenizer.template_variables:  # Qwen3.8: low, medium, xhigh
        kwargs, budget = {"reasoning_effort": "xhigh" if effort in ("high", "max") else effort} | kwargs, None
    given = body.get("enable_thinking", kwargs.get("enable_thinking"))
    if not isinstance(given, bool | None):
        raise Refusal(400, "enable_thinking must be true or false", "enable_thinking")
    others = {name: value for name, value in kwargs.items() if name != "enable_thinking"}
    return think if given is None else given, budget, others


def tools_of(body: Body) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
    """(tools in the prompt, tools of which one must be called)."""
    tools, choice = body.get("tools") or None, body.get("tool_choice", "auto")
    if isinstance(tools, list) and len(tools) > MOST_TOOLS:
        raise Refusal(400, f"there are {len(tools):,} tools; at most {MOST_TOOLS:,} are taken", "tools")
    if tools is not None:
        checked_tools(tools, "tools")
    if choice == "none":
        return None, []
    if choice == "auto":
        return tools, []
    if choice == "required" and tools:
        return tools, tools
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if named := [tool for tool in tools or [] if tool.get("function", tool)["name"] == name]:
        return tools, named
    raise Refusal(400, "tool_choice must be auto, none, required, or {\"type\": \"function\", \"function\": {\"name\": "
                  "...}} with the name of one of the tools", "tool_choice")


def schema_of(body: Body) -> Any:
    """The schema of response_format, or None."""
    form = body.get("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema" and isinstance(form["json_schema"] if "json_schema" in form else None, dict):
        return form["json_schema"].get("schema", {"type": "object"})
    if kind == "regex" and isinstance(form.get("pattern"), str):
        return regex(form["pattern"])
    if kind == "lark" and isinstance(form.get("grammar"), str):
        return lark(form["grammar"])
    if kind not in ("text", "json_object"):
        raise Refusal(400, 'response_format must be {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", '
                      '"json_schema": {"name": ..., "schema": ...}}, {"type": "regex", "pattern": ...} or '
                      '{"type": "lark", "grammar": ...}', "response_format")
    return {"type": "object"} if kind == "json_object" else None


def is_strict(tool: dict[str, Any]) -> bool:
    return bool(tool.get("function", tool).get("strict"))


def answer_schema(model: Model, schema: Any, tools: list[dict[str, Any]], forced: list[dict[str, Any]],
                  several: bool, max_string: int | None, field: str, door: Door) -> Grammar:
    """What an answer must fit: calls of the forced tools; else the schema, if there is one, or calls.

    Unless they are forced, calls of tools that aren't strict may have any arguments. Raises Refusal.
    """
    bound = [tool if forced or is_strict(tool) else ANY_ARGUMENTS | {"name": tool.get("function", tool)["name"]}
             for tool in forced or tools]
    if bound and not forced and isinstance(schema, Grammar):
        raise Refusal(400, "tools go with a JSON Schema, but not with other grammars", "response_format")
    otherwise = False if forced else True if schema is None else schema
    try:
        wanted = calls_grammar(model.tokenizer, bound, several, otherwise, max_string) if bound else \
            grammar_of(schema, max_string)
        return wanted._replace(matchers=door.matchers(model, wanted.text))  # here, where nobody else waits for it
    except Refusal:
        raise
    except InputError as error:
        raise Refusal(400, str(error), "tools" if forced or schema is None else field) from error


def with_one_system_message(messages: list[Value]) -> list[Value]:
    """The messages, so that only the first one may be a system message.

    Further ones first join the first; later ones join the user's message or the result of a tool before them, or after
    an assistant's message the next one. What they join doesn't depend on what follows, so that the prompt of a
    conversation that goes on begins as before.
    """
    found, noted = list[Value](), False  # noted: the last one is a system message after an assistant's
    for message in messages:
        if message["role"] == "system" and found and found[-1]["role"] != "assistant":
            found[-1] = found[-1] | {"content": both(found[-1], message)}
        elif message["role"] == "system":
            noted = bool(found)
            found.append(message | {"role": "user"} if noted else message)
        else:
            joins, noted = noted and message["role"] != "assistant", False
            found.append(message | {"content": both(found.pop(), message)} if joins else message)
    return found


def both(first: Value, second: Value) -> list[Value]:
    """The contents of two messages as one, with a blank line between them."""
    return [part for each in (first["content"], "\n\n", second["content"])
            for part in ([{"type": "text", "text": each}] if isinstance(each, str) else each)]


def left_out(kind: str) -> Value:
    """In place of a part that the model can't read, it is told that it was there: an error would come again with each
    request, because an agent sends the part again and again."""
    return {"type": "text", "text": f"[{brief(kind, 80)}: left out, because this model can't read it]"}


def image_reader(door: Door) -> Callable[[Value], Any]:
    """What opens the picture of a part for this door. Strangers send the bytes, in a data: URL.

    Where the door has a folder, {"type": "image", "image": FILE} is read from there, too.
    """
    numbers = count(1)

    def image_of(part: Value) -> Any:
        name, given = PICTURES[part["type"]], given_in(part)
        if next(numbers) > MOST_PICTURES:
            raise InputError(f"more than {MOST_PICTURES} pictures")
        known = {"type", name, "detail", *(("max_pixels",) if door.folder is not None else ())}
        if unknown := [*({*part} - known), *({*given} - {"url", "detail"} if isinstance(part.get(name), dict) else ())]:
            raise InputError(f"unknown field: {brief(unknown[0], 80)}")
        url = given["url"]
        local = name == "image" and door.folder is not None and isinstance(url, str) and not is_data_url(url)
        return picture_of(os.path.join(str(door.folder), url)) if local else picture_at(url)

    return image_of


def with_arguments(message: Value, where: str) -> Value:
    """The message, whose calls have their arguments as values: clients write JSON with other spaces than the model."""
    def with_values(call: Value) -> Value:
        function = call.get("function", call)
        if not isinstance(arguments := function["arguments"], str):
            return call
        values = parse_json(arguments.strip() or "{}", f"{where}: the arguments of a tool call")
        function = function | {"arguments": values if isinstance(values, dict) else arguments}
        return call | {"function": function} if "function" in call else function

    calls = message.get("tool_calls")
    return message | {"tool_calls": [*map(with_values, calls)]} if isinstance(calls, list) else message


def chat_prompt(model: Model, body: Body, door: Door) -> tuple[str, list[Picture]]:
    """The text of a conversation, and its pictures. If it ends with the assistant's turn, the answer goes on there."""
    messages, (think, _, kwargs) = checked_messages(body.get("messages"), "messages"), thoughts_of(model, body, door)
    if (n := sum(1 + len(message.get("tool_calls") or ()) for message in messages)) > MOST_MESSAGES:
        raise Refusal(400, f"messages: {n:,} messages and calls; at most {MOST_MESSAGES:,} are taken", "messages")
    messages = [with_arguments(message, f"messages: message {i}") for i, message in enumerate(messages)]
    try:
        messages, pictures = messages_and_pictures(model, messages, bool(kwargs.get("add_vision_id")),
                                                   door.options.get("max_pixels"), image_reader(door), door.longest)
    except PictureError as error:
        raise Refusal(400, str(error).replace(str(model.path), "the model"), error.field) from error
    if (system := door.chat.get("system")) is not None and all(message["role"] != "system" for message in messages):
        messages = with_system(messages, system)
    prefill = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    for name, default in (("continue_final_message", False), ("add_generation_prompt", True)):
        if flag({name: default} | body, name) != default and not prefill:  # vLLM's names for what the last message says
            raise Refusal(400, f"{name} {str(not default).lower()} needs the assistant's message as the last one", name)

    def rendered(messages: list[dict[str, Any]]) -> str:
        return model.tokenizer.apply_chat_template(messages, tools_of(body)[0], not prefill, think,
                                                   join_text_parts=True, chat_template_kwargs=kwargs)

    try:
        text = rendered(messages)
    except InputError:
        if all(message["role"] != "system" for message in messages[1:]):
            raise
        text = rendered(with_one_system_message(messages))  # Qwen3.5 refuses a system message in the middle
    return text.rstrip().removesuffix("<|im_end|>") if prefill else text, pictures


def chat_request(model: Model, body: Body, door: Door) -> GenerationRequest:
    """A request to /v1/chat/completions. Raises InputError."""
    must_generate(model)
    if hears(model):
        raise Refusal(400, "this model writes down sounds and doesn't chat: POST /v1/audio/transcriptions", "model")
    body = {name: door.chat[name] for name in ("tools", "chat_template_kwargs") if door.chat.get(name) is not None} | \
        known(body, CHAT)
    think, budget, _ = thoughts_of(model, body, door)
    tools, forced = tools_of(body)
    one_call = "parallel_tool_calls" in body and not flag(body, "parallel_tool_calls")
    defaults = door.options | ({} if budget is None else {"think_budget": budget})
    top = whole(body, "top_logprobs", 0, 0, MOST_LOGPROBS)
    if flag(body, "logprobs"):
        defaults["logprobs"] = top
    schema = defaults.pop("schema", None)
    options = body_options(defaults, body).over(default_sampling(model, think))
    bound = [] if isinstance(schema, Grammar) else tools or []  # with a job's own grammar, tools are only told
    field = "response_format" if "response_format" in body else "schema"
    if field in body:
        schema, bound = schema_of(body) if field == "response_format" else body["schema"], tools or []
        if not isinstance(schema, dict | Grammar | None):
            raise Refusal(400, "schema must be a JSON Schema; response_format takes other grammars, too", "schema")
    if schema is not None or forced or any(map(is_strict, tools or ())):
        options = replace(options, schema=answer_schema(model, schema, bound, forced, not one_call, options.max_string,
                                                        field, door))
    text, pictures = chat_prompt(model, body, door)
    prompt = encoded(model.tokenizer, text, door.longest, add_special_tokens=False)
    if pictures:
        prompt = [*map(int, prompt_ids(model, prompt, pictures))]
    return request_of("chat", body, [prompt], options, door.longest, tools=tools, one_call=one_call, pictures=pictures)


# ---- Plain text ------------------------------------------------------------------------------------------------------

def prompts_of(model: Model, given: Any, longest: int) -> list[list[int]]:
    """The ids of each prompt: a text, a list of ids, or a list of these."""
    if isinstance(given, str) or isinstance(given, list) and given and all(is_whole(part, 0) for part in given):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_PROMPTS:
        raise Refusal(400, f"prompt must be a text, a list of token ids, or a list of at most {MOST_PROMPTS} of these",
                      "prompt")
    for prompt in given:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(is_whole(i, 0) for i in prompt)):
            raise Refusal(400, f"prompt must be a text or a list of token ids, not {brief(repr(prompt), 80)}", "prompt")
    return [encoded(model.tokenizer, prompt, longest) if isinstance(prompt, str) else prompt for prompt in given]


def text_request(model: Model, body: Body, door: Door) -> GenerationRequest:
    """The GenerationRequest of a request to /v1/completions. Raises InputError."""
    must_generate(model)
    body = known(body, COMPLETION_FIELDS)
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise Refusal(400, "best_of isn't supported, unless it is n", "best_of")
    prompts = prompts_of(model, body.get("prompt"), door.longest)
    defaults = dict(door.options)
    if "logprobs" in body:
        defaults["logprobs"] = whole(body, "logprobs", 0, 0, MOST_LOGPROBS)
    echo, options = flag(body, "echo"), body_options(defaults, body).over(model.sampling)
    if echo and options.logprobs is not None:
        raise Refusal(400, "echo with logprobs isn't supported", "echo")
    echoes = [model.tokenizer.decode(prompt) if echo else "" for prompt in prompts]
    return request_of("text", body, prompts, options, door.longest, echoes)
