"""Anthropic's form, /v1/messages: requests as those of a chat, and their answers as blocks."""
from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qwen3 import InputError, Model

from qwen3_lib.app.fields import ERROR_TYPES, SHARED_FIELDS, Body, Refusal, as_sent, flag, object_in, sent_names
from qwen3_lib.app.objects import reason_of
from qwen3_lib.app.openai import Door, GenerationRequest, Value, chat_request, left_out
from qwen3_lib.io.errors import brief, parse_json
from qwen3_lib.server.replies import ChatReply, encode, typed_event
from qwen3_lib.server.worker import Job
from qwen3_vision import sees
from tokenizer_utils import with_system

# A chat's field -> the same here
NAMES_HERE = {"stop": "stop_sequences", "reasoning_effort": "output_config.effort",
              "response_format": "output_config.format"}
ATTRIBUTION = "x-anthropic-billing-header"  # begins a block of the system prompt that differs between conversations
REMINDER = "<system-reminder>"  # begins a text that Claude Code, not the user, writes
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # tool_choice here -> in a chat
BLOCK_TYPES = {"reasoning_content": "thinking", "content": "text"}  # a chat's field -> the type of its block
LONGEST_NAME = 1024  # characters of the model's name, which an answer repeats: Claude Code drops others' thoughts
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", None: None}
MORE_ERROR_TYPES = {408: "timeout_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def messages_request(model: Model, body: Body, door: Door) -> GenerationRequest:
    """The GenerationRequest of a request. Raises InputError."""
    name = body.get("model")
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise Refusal(400, f"model must be a text of at most {LONGEST_NAME} characters", "model")
    try:
        return replace(chat_request(model, chat_body(body, sees(model)), door), kind="message", model_name=name)
    except InputError as error:
        raise as_sent(error, sent_names(body) | NAMES_HERE) from error


def count_tokens(model: Model, body: Body, door: Door) -> Body:
    """The answer of /v1/messages/count_tokens."""
    return {"input_tokens": messages_request(model, body, door).n_prompt}


def error_value(error: Refusal) -> Value:
    """The object that the client gets."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = (ERROR_TYPES | MORE_ERROR_TYPES).get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": brief(error, 2000)},
            "request_id": f"req_{uuid.uuid4().hex}"}


# ---- Requests --------------------------------------------------------------------------------------------------------

def chat_body(body: Body, seeing: bool) -> Body:
    """A request as one to /v1/chat/completions; `seeing`: to a model that sees. Fields that a chat hasn't are ignored.

    Raises Refusal.
    """
    body = {name: value for name, value in body.items() if value is not None}
    given, messages = body.get("messages"), list[Value]()
    for i, message in enumerate(given if isinstance(given, list) else ()):
        add_message(messages, message, seeing, f"messages: message {i}")
    system = "\n\n".join(text for block in blocks_of(body.get("system", ""), "system")
                         if (text := text_of_block(block, "system")) and not text.startswith(ATTRIBUTION))
    chat = {name: body[name] for name in SHARED_FIELDS if name in body}
    chat["messages"] = with_system(messages, system or None)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = functions_of(body["tools"])
    choice = object_in(body, "tool_choice")
    if (kind := str(choice.get("type", "auto"))) not in (*CHOICES, "tool"):
        raise Refusal(400, "tool_choice: type must be auto, any, tool or none", "tool_choice")
    chat["tool_choice"] = CHOICES.get(kind, {"type": "function", "function": {"name": choice.get("name")}})
    chat["parallel_tool_calls"] = not flag(choice, "disable_parallel_tool_use")
    output, thinking = object_in(body, "output_config"), object_in(body, "thinking")
    if (effort := output.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if form := object_in(output, "format"):
        chat["response_format"] = form | {"json_schema": form}
    if thinking.get("type") == "enabled":
        chat |= {"enable_thinking": True, "thinking_budget": thinking.get("budget_tokens")}
    elif "enable_thinking" not in (object_in(body, "chat_template_kwargs") | chat) and (
            thinking.get("type") == "disabled" or not thinking and effort is None):
        chat["enable_thinking"] = False
    return chat


def add_message(messages: list[Value], message: Any, seeing: bool, where: str) -> None:
    """Adds a message as those of a chat: results of tools are messages of their own there. Raises Refusal."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise Refusal(400, f"{where} must be an object with a role", "messages")
    blocks = blocks_of(message.get("content"), where)
    if role == "assistant":
        return messages.append(answer_of(blocks, where))
    results = [block for block in blocks if block["type"] == "tool_result"]
    parts = [part_of(block, seeing) for block in blocks if block["type"] != "tool_result"]
    messages += [{"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": [
        part_of(part, seeing) for part in blocks_of(block.get("content", ""), where)]} for block in results]
    if results:  # a message of a user's would end the turn in which the model calls tools
        notes = [part for part in parts if str(part.get("text")).startswith(REMINDER)]
        messages[-1]["content"] += notes
        parts = [part for part in parts if part not in notes]
    if parts or not results:
        messages.append({"role": "system" if role == "system" else "user", "content": parts})


def answer_of(blocks: list[Value], where: str) -> Value:
    """The message of a chat with an answer's blocks; what other servers add to answers is left out."""
    texts: dict[str, list[str]] = {kind: [text_of_block(block, where) for block in blocks if block["type"] == kind]
                                   for kind in ("text", "thinking")}
    message: Value = {"role": "assistant", "content": "".join(texts["text"])}
    if thought := "".join(texts["thinking"]):
        message["reasoning_content"] = thought
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if not all(isinstance(call.get("input"), dict) for call in calls):
        raise Refusal(400, f"{where}: the input of a tool_use must be an object", "messages")
    return message | ({"tool_calls": [{"type": "function", "id": call.get("id"), "function": {
        "name": call.get("name"), "arguments": call["input"]}} for call in calls]} if calls else {})


def blocks_of(content: Any, where: str) -> list[Value]:
    """The blocks of a content; a text is one. Raises Refusal."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and isinstance(block.get("type"), str)
                                               for block in blocks):
        raise Refusal(400, f"{where} must have a text or a list of blocks, each an object with a type",
                      where.partition(":")[0])
    return blocks


def text_of_block(block: Value, where: str) -> str:
    if not isinstance(text := block.get(block["type"], ""), str):
        raise Refusal(400, f"{where}: the {block['type']} of a block must be a text", where.partition(":")[0])
    return text


def part_of(block: Value, seeing: bool) -> Value:
    """A block as a part of a chat's content."""
    kind, source = block["type"], block.get("source")
    source = source if isinstance(source, dict) else {}
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind == "image" and seeing:
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": source.get("url") if source.get("type") == "url" else data}}
    if kind == "document" and source.get("type") == "text":
        return {"type": "text", "text": source.get("data")}
    return left_out(kind)


def functions_of(tools: Any) -> list[Value]:
    """The tools in the form of a chat. The model isn't told of those that Anthropic's servers carry out or describe."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refusal(400, 'tools must be a list of {"name": ..., "description": ..., "input_schema": ...}', "tools")
    return [{"type": "function", "function": {ours: tool[name] for name, ours in (
        ("name", "name"), ("description", "description"), ("input_schema", "parameters"), ("strict", "strict"))
        if tool.get(name) is not None}} for tool in tools if tool.get("type", "custom") in (None, "custom")]


# ---- Answers ---------------------------------------------------------------------------------------------------------

def input_of(arguments: str) -> Value:
    """The arguments of a call; a model may write others than an object, which this form demands."""
    with contextlib.suppress(InputError):
        if isinstance(value := parse_json(arguments, "arguments"), dict):
            return value
    return {"arguments": arguments}


class MessageReply(ChatReply):
    """The answer as blocks: thoughts, texts and calls of tools, in the order in which they were written.

    The last block is open until another one begins, or the answer ends.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.id, self.blocks = f"msg_{uuid.uuid4().hex}", list[Value]()

    def message(self) -> Value:
        usage, job = self.usage(), self.jobs[0]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reason = STOP_REASONS[reason_of(job.finish_reason, self.n_calls[0])]
        stopped = job.completion.reader.stopped if reason == "end_turn" else ""
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.asked.model_name,
                "content": self.blocks, "stop_reason": "stop_sequence" if stopped else reason,
                "stop_sequence": stopped or None,
                "usage": {"input_tokens": usage["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
                          "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"]}}

    def first(self, i: int) -> Iterator[str]:
        message = self.message() | {"stop_reason": None, "stop_sequence": None}
        yield typed_event({"type": "message_start", "message": message})

    def ping(self) -> str:
        return typed_event({"type": "ping"})

    def failed(self, error: Refusal) -> str:
        return typed_event(error_value(error))

    def opened(self, block: Value) -> Iterator[str]:
        """The events of a new block, after the end of the one before."""
        yield from self.closed()
        self.blocks.append(block)
        yield typed_event({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block})

    def delta(self, kind: str, **fields: str) -> str:
        delta = {"type": kind, **fields}
        return typed_event({"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta})

    def closed(self) -> Iterator[str]:
        """The last events of the last block, if there is one."""
        if self.blocks:
            if self.blocks[-1]["type"] == "thinking":  # some clients send only signed thoughts back
                self.blocks[-1]["signature"] = self.id
                yield self.delta("signature_delta", signature=self.id)
            yield typed_event({"type": "content_block_stop", "index": len(self.blocks) - 1})

    def chunks(self, i: int, job: Job) -> Iterator[str]:
        texts, calls = self.parts(i, job)
        for name, text in texts.items():
            kind = BLOCK_TYPES[name]
            if not self.blocks or self.blocks[-1]["type"] != kind:
                yield from self.opened({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
            self.blocks[-1][kind] += text
            yield self.delta(f"{kind}_delta", **{kind: text})
        for call in calls:
            function, name = call["function"], call["id"].replace("call_", "toolu_")
            yield from self.opened({"type": "tool_use", "id": name, "name": function["name"], "input": {}})
            self.blocks[-1]["input"] = input_of(function["arguments"])
            yield self.delta("input_json_delta", partial_json=encode(self.blocks[-1]["input"]))
        if job.ended:
            yield from self.closed()

    def end(self) -> Iterator[str]:
        message = self.message()
        yield typed_event({"type": "message_delta", "usage": message["usage"], "delta": {
            name: message[name] for name in ("stop_reason", "stop_sequence")}})
        yield typed_event({"type": "message_stop"})

    def whole(self) -> Value:
        [*self.chunks(0, self.jobs[0])]
        return self.message()
