"""OpenAI's form of requests, answers and errors, for the server and for batch files.

Each field of a request is checked here, or by the Completion that takes it.
"""
from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from qwen3 import InputError, Model, default_sampling
from qwen3_asr import hears
from qwen3_lib.generation.answer import Value
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.options import OPTION_NAMES, AnswerOptions, options_of
from qwen3_lib.generation.pictures import PictureError, given_in, messages_and_pictures
from qwen3_lib.generation.matcher import Matcher
from qwen3_lib.generation.schema import Grammar, calls_grammar, grammar_of, lark, matchers, regex
from qwen3_lib.generation.processors import TokenLogprob
from qwen3_lib.generation.tools import checked_tools
from qwen3_lib.io.errors import TooLong, brief, did_you_mean, encoded, is_whole, parse_json
from qwen3_lib.io.pictures import is_data_url, picture_at, picture_of
from qwen3_vision import Picture, prompt_ids
from tokenizer_utils import PICTURES, checked_messages, with_system

Body = dict[str, Any]
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(InputError):
    """A request that gets this status and message; `param` is the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def value(self) -> Value:
        """The object that the client gets."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": brief(self, 2000), "type": kind, "param": self.param, "code": self.code}}


# ---- Requests --------------------------------------------------------------------------------------------------------

MOST_CHOICES, MOST_LOGPROBS, MOST_PROMPTS = 8, 20, 128
MOST_BIASES, LONGEST_SALT = 2**15, 1024  # tokens of logit_bias; characters of cache_salt
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
           "max_output_tokens": "max_new_tokens", "thinking_budget": "think_budget",
           "repeat_penalty": "repetition_penalty"}
OURS = tuple(name for name in OPTION_NAMES if name not in ("schema", "logprobs", "lookup", "draft", "max_pixels"))
REQUEST_OPTIONS = (*OURS, "ignore_eos", "cache_salt", *RENAMED)
SHARED_FIELDS = (*REQUEST_OPTIONS, "stream", "enable_thinking", "chat_template_kwargs")
BOTH = (*REQUEST_OPTIONS, "n", "stream", "stream_options", "logprobs")
CHAT = (*BOTH, "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "schema", "top_logprobs",
        "enable_thinking", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message")
COMPLETION_FIELDS = (*BOTH, "prompt", "echo", "best_of")
# Clients send these, and they don't change an answer.
IGNORED_FIELDS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                  "verbosity",
            "prompt_cache_retention", "prediction", "cache_prompt", "include_reasoning", "timings_per_token",
            "return_progress", "chat_id", "session_id", "id", "id_slot", "request_id", "priority", "keep_alive", "ttl",
            "client_metadata", "stream_options", "incremental_output", "spaces_between_special_tokens",
            "max_tool_calls", "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "dry_base",
            "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
# These have no effect at this value; at any other one, they would change the answer.
NEUTRAL = {"modalities": ["text"], "functions": [], "function_call": "auto", "suffix": "", "min_tokens": 0,
           "stop_token_ids": [], "bad_words": [], "include_stop_str_in_output": False,
           "skip_special_tokens": True, "add_generation_prompt": True, "use_beam_search": False, "length_penalty": 1,
           "typical_p": 1, "tfs_z": 1, "mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0, "dynatemp_range": 0,
           "reasoning_format": "auto", "reasoning_in_content": False, "continue_final_message": False, "echo": False,
           "tools": [], "tool_choice": "auto", "top_logprobs": 0, "n_probs": 0, "min_keep": 0, "repeat_last_n": -1,
           "top_n_sigma": -1, "top_a": 0, "post_sampling_probs": False, "backend_sampling": False,
           "return_tokens": False, "return_token_ids": False, "return_tokens_as_token_ids": False,
           "enable_search": False, "raw_scores": False, "truncation_direction": "Right", "previous_response_id": None,
           "background": False, "include": [], "truncation": "disabled"}
ALSO_NEUTRAL = {"reasoning_format": "deepseek",  # the thought in reasoning_content, as here
                "include": ["reasoning.encrypted_content"]}  # thoughts to be sent back; a response has none here
# reasoning_effort -> enable_thinking, thinking_budget
THOUGHTS = {"none": (False, None), "minimal": (False, None), "low": (True, 256), "medium": (True, 1024),
            "high": (True, None), "xhigh": (True, None), "max": (True, None)}
MOST_PICTURES, MOST_MESSAGES, MOST_TOOLS = 32, 4096, 1024  # of a request
ANY_ARGUMENTS = {"parameters": {"type": "object"}}  # of a tool that isn't strict


class Unseen(Exception):
    """Raised at the first picture, where a Door shows none yet."""


@dataclass(frozen=True)
class Door:
    """What a request meets where it comes in: a server's door is for strangers, a batch file's for its user."""
    longest: int  # tokens of a prompt and its answer
    folder: Path | None = None  # {"type": "image", "image": FILE} is read from there; None: no file is read
    max_pixels: int | None = None  # of a picture
    shows: bool = True  # False: no picture is decoded
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


def known(body: Body, names: tuple[str, ...]) -> Body:
    """The fields that aren't null. Raises Refusal for one that would have an effect elsewhere, and has none here."""
    for name, value in body.items():
        if name in names or name in IGNORED_FIELDS or value is None:
            continue
        if name not in NEUTRAL:
            raise Refusal(400, f"unknown field {brief(name)}{did_you_mean(name, names)}", brief(name), "unknown_field")
        if value not in (NEUTRAL[name], ALSO_NEUTRAL.get(name)):
            raise Refusal(400, f"{name} isn't supported", name, "unsupported_field")
    return {name: value for name, value in body.items() if value is not None and name in names}


def must_generate(model: Model) -> None:
    if model.embeds:
        raise Refusal(400, "this is an embedding model, which gives vectors: POST /v1/embeddings", "model")


def flag(body: Body, name: str) -> bool:
    if not isinstance(value := body.get(name, False), bool):
        raise Refusal(400, f"{name} must be true or false, not {brief(repr(value), 80)}", name)
    return value


def whole(body: Body, name: str, default: int, low: int, high: int) -> int:
    value = body.get(name, default)
    if not is_whole(value, low) or value > high:
        raise Refusal(400, f"{name} must be a whole number from {low} to {high}, not {brief(repr(value), 80)}", name)
    return value


def as_sent(error: InputError, names: Mapping[str, str]) -> Refusal:
    """The error, about the field that the client has sent. names: our name of a field -> the client's."""
    message = str(error)
    word = message.partition(" ")[0].rstrip(":")
    message = names.get(word, word) + message[len(word):]
    if isinstance(error, Refusal):
        return Refusal(error.status, message, names.get(error.param or "", error.param), error.code, error.headers)
    return Refusal(400, message, names.get(word), "context_length_exceeded" if isinstance(error, TooLong) else None)


def sent_names(body: Body) -> dict[str, str]:
    return {RENAMED.get(name, name): name for name in body}


def body_options(defaults: dict[str, Any], body: Body) -> AnswerOptions:
    """The options of a request, with `defaults` for absent ones. Raises Refusal."""
    given = {RENAMED.get(name, name): body[name] for name in (*OURS, *RENAMED) if name in body}
    for name, none in (("top_k", 0), ("seed", None), ("max_new_tokens", None)):
        if given.get(name) == -1:  # as vLLM, llama.cpp and LM Studio write it
            given[name] = none
    if isinstance(bias := given.get("logit_bias"), dict) and len(bias) > MOST_BIASES:
        raise Refusal(400, f"logit_bias has {len(bias):,} tokens; at most {MOST_BIASES:,} are taken", "logit_bias")
    if flag(body, "ignore_eos"):
        given["eos_token_ids"] = ()
    try:
        return options_of(defaults | given)
    except InputError as error:
        raise as_sent(error, sent_names(body)) from error


def request_of(kind: str, body: Body, prompts: list[list[int]], options: AnswerOptions,
               longest: int, echoes: Sequence[str] = (), **more: Any) -> GenerationRequest:
    """The GenerationRequest of either kind. Each of a prompt's n answers has a seed of its own."""
    n = whole(body, "n", 1, 1, MOST_CHOICES)
    if "stream_options" in body and not isinstance(body["stream_options"], dict):
        raise Refusal(400, "stream_options must be an object", "stream_options")
    field = "messages" if kind == "chat" else "prompt"
    for prompt in prompts:
        if len(prompt) >= longest:
            raise Refusal(400, f"the prompt has {len(prompt)} tokens and leaves no room for an answer: the context has "
                          f"{longest} tokens, and the prompt is {len(prompt) + 1 - longest} tokens too long", field,
                          "context_length_exceeded")
    if not isinstance(salt := body.get("cache_salt", ""), str) or len(salt) > LONGEST_SALT:
        raise Refusal(400, f"cache_salt must be a text of at most {LONGEST_SALT:,} characters", "cache_salt")
    each = [options if options.seed is None else replace(options, seed=options.seed + i) for i in range(n)]
    return GenerationRequest(kind, n, [(prompt, one) for prompt in prompts for one in each], flag(body, "stream"),
                             flag(body.get("stream_options", {}), "include_usage"), sum(map(len, prompts)), salt,
                             [echo for echo in echoes for _ in range(n)], **more)


# ---- Chat ------------------------------------------------------------------------------------------------------------

def thoughts_of(model: Model, body: Body, default: bool | None) -> tuple[bool | None, int | None, dict[str, Any]]:
    """(enable_thinking or the default, thinking_budget, other variables of the chat template) of a request."""
    effort, kwargs = body.get("reasoning_effort"), body.get("chat_template_kwargs", {})
    if effort is not None and (not isinstance(effort, str) or effort not in THOUGHTS):
        raise Refusal(400, f"reasoning_effort must be one of {', '.join(THOUGHTS)}", "reasoning_effort")
    if not isinstance(kwargs, dict):
        raise Refusal(400, "chat_template_kwargs must be an object", "chat_template_kwargs")
    think, budget = THOUGHTS[effort] if effort is not None else (default, None)
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


def system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with one system message, the first, which has the texts of all."""
    contents = [message["content"] for message in messages if message["role"] == "system"]
    texts = [text if isinstance(text, str) else "".join(part["text"] for part in text) for text in contents]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


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
        if not door.shows:
            raise Unseen
        url = given["url"]
        local = name == "image" and door.folder is not None and isinstance(url, str) and not is_data_url(url)
        return picture_of(os.path.join(str(door.folder), url)) if local else picture_at(url)

    return image_of


def chat_prompt(model: Model, body: Body, door: Door, system: str | None = None,
                think: bool | None = None) -> tuple[str, list[Picture]]:
    """The text of a conversation, and its pictures. If it ends with the assistant's turn, the answer goes on there.

    `system` and `think`: a system message's text and enable_thinking, where the request has none.
    """
    messages, (think, _, kwargs) = checked_messages(body.get("messages"), "messages"), thoughts_of(model, body, think)
    if (n := sum(1 + len(message.get("tool_calls") or ()) for message in messages)) > MOST_MESSAGES:
        raise Refusal(400, f"messages: {n:,} messages and calls; at most {MOST_MESSAGES:,} are taken", "messages")
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            if isinstance(arguments := call.get("function", call)["arguments"], str):
                parse_json(arguments, f"messages: message {i}: the arguments of a tool call")
    try:
        messages, pictures = messages_and_pictures(model, messages, bool(kwargs.get("add_vision_id")), door.max_pixels,
                                                   image_reader(door), door.longest)
    except PictureError as error:
        raise Refusal(400, str(error).replace(str(model.path), "the model"), error.field) from error
    if system is not None and all(message["role"] != "system" for message in messages):
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
        text = rendered(system_first(messages))  # Qwen3.5's template refuses a system message that isn't the first
    return text.rstrip().removesuffix("<|im_end|>") if prefill else text, pictures


def chat_request(model: Model, body: Body, door: Door, defaults: dict[str, Any] | None = None) -> GenerationRequest:
    """A request to /v1/chat/completions. Raises InputError.

    `defaults` for absent fields: options of a Completion, system, tools, enable_thinking, chat_template_kwargs.
    """
    must_generate(model)
    if hears(model):
        raise Refusal(400, "this model writes down sounds and doesn't chat: POST /v1/audio/transcriptions", "model")
    defaults = {name: value for name, value in (defaults or {}).items() if value is not None}
    system, default, schema = (defaults.pop(name, None) for name in ("system", "enable_thinking", "schema"))
    others = {name: defaults.pop(name) for name in ("tools", "chat_template_kwargs") if name in defaults}
    body = others | known(body, CHAT)
    think, budget, _ = thoughts_of(model, body, default)
    tools, forced = tools_of(body)
    one_call = "parallel_tool_calls" in body and not flag(body, "parallel_tool_calls")
    defaults = asdict(default_sampling(model, think)) | defaults | ({} if budget is None else {"think_budget": budget})
    top = whole(body, "top_logprobs", 0, 0, MOST_LOGPROBS)
    if flag(body, "logprobs"):
        defaults["logprobs"] = top
    options = body_options(defaults, body)
    bound = [] if isinstance(schema, Grammar) else tools or []  # with a job's own grammar, tools are only told
    field = "response_format" if "response_format" in body else "schema"
    if field in body:
        schema, bound = schema_of(body) if field == "response_format" else body["schema"], tools or []
        if not isinstance(schema, dict | Grammar | None):
            raise Refusal(400, "schema must be a JSON Schema; response_format takes other grammars, too", "schema")
    if schema is not None or forced or any(map(is_strict, tools or ())):
        options = replace(options, schema=answer_schema(model, schema, bound, forced, not one_call, options.max_string,
                                                        field, door))
    text, pictures = chat_prompt(model, body, door, system, default)
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
    defaults = asdict(default_sampling(model, None))
    if "logprobs" in body:
        defaults["logprobs"] = whole(body, "logprobs", 0, 0, MOST_LOGPROBS)
    echo, options = flag(body, "echo"), body_options(defaults, body)
    if echo and options.logprobs is not None:
        raise Refusal(400, "echo with logprobs isn't supported", "echo")
    echoes = [model.tokenizer.decode(prompt) if echo else "" for prompt in prompts]
    return request_of("text", body, prompts, options, door.longest, echoes)


# ---- Answers ---------------------------------------------------------------------------------------------------------

def call_object(call: Value, name: str | None = None) -> Value:
    """A call of a tool in OpenAI's form, from {"name", "arguments"}; its id is the name, or a random one."""
    arguments = call["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": name or f"call_{uuid.uuid4().hex[:24]}", "type": "function",
            "function": {"name": call["name"], "arguments": text}}


def reason_of(ended: str | None) -> str | None:
    """OpenAI's word for why an answer has ended."""
    return "stop" if ended == "loop" else ended


def object_of(kind: str, name: str, model: str, choices: Sequence[Value], **more: Any) -> Value:
    """The object in which answers come."""
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices, **more}


def usage_of(n_prompt: int, n_answer: int, n_thought: int = 0) -> Value:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_answer, "total_tokens": n_prompt + n_answer,
            "completion_tokens_details": {"reasoning_tokens": n_thought}}


def chat_choice(completion: Completion, finish_reason: str | None, one_call: bool = False) -> Value:
    """{"message", "logprobs", "finish_reason"} of an answer."""
    answer = completion.answer
    calls = [call_object(call) for call in answer.tool_calls[:1 if one_call else None]]
    message: Value = {"role": "assistant", "content": answer.content or (None if calls else "")}
    message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    logprobs = None if completion.options.logprobs is None else chat_logprobs(completion.model, completion.logprobs)
    return {"message": message, "logprobs": logprobs, "finish_reason": "tool_calls" if calls else finish_reason}


def chat_logprobs(model: Model, entries: Iterable[TokenLogprob]) -> Value:
    """The logprobs of an answer's tokens, each with the most likely tokens there."""
    def described(token: int, logprob: float) -> Value:
        tokenizer = model.tokenizer
        return {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    return {"content": [described(entry.token_id, entry.logprob) |
                        {"top_logprobs": [described(*other) for other in entry.top]} for entry in entries]}
