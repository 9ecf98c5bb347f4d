"""OpenAI's newer form, /v1/responses: requests as those of a chat, and their answers as items."""
from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qwen3 import InputError, Model

from qwen3_lib.app.fields import SHARED_FIELDS, Body, Refusal, as_sent, known, object_in, sent_names
from qwen3_lib.app.openai import Door, GenerationRequest, Value, chat_request, left_out
from qwen3_lib.io.errors import brief, parse_json
from qwen3_lib.server.replies import ChatReply, typed_event
from qwen3_lib.server.worker import Job
from qwen3_vision import sees
from tokenizer_utils import check_parts, is_picture, with_system

CHAT_FIELDS = (*SHARED_FIELDS, "parallel_tool_calls", "tool_choice")  # fields that a chat has, too
FIELDS = (*CHAT_FIELDS, "input", "instructions", "reasoning", "text", "tools")
# A chat's field -> the same here
SENT_NAMES = {"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of items' ids
PARTS = ("input_text", "output_text", "text")  # types of the parts of a content
# The first part of an item's content, and what the events of its text have, too
ITEM_TEXTS: dict[str, tuple[str, Value, Value]] = {"message": ("output_text", {"annotations": []}, {"logprobs": []}),
                                              "reasoning": ("reasoning_text", {}, {})}


def responses_request(model: Model, body: Body, door: Door) -> GenerationRequest:
    """The GenerationRequest of a request. Raises InputError."""
    try:
        return replace(chat_request(model, as_chat(body, sees(model)), door), kind="response")
    except InputError as error:
        raise as_sent(error, sent_names(body) | SENT_NAMES) from error


def as_chat(body: Body, seeing: bool) -> Body:
    """A request as one to /v1/chat/completions; `seeing`: to a model that sees. Raises Refusal for what a chat can't
    hold."""
    body = known(body, FIELDS)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise Refusal(400, "input must be a text or a list of items", "input")
    messages = list[Value]()
    for i, item in enumerate(items):
        add_item(messages, item, seeing, f"input: item {i}")
    chat = {name: body[name] for name in CHAT_FIELDS if name in body} | {
        "messages": with_system(messages, body.get("instructions"))}
    if "tools" in body:
        chat["tools"] = chat_tools(body["tools"])
    if (effort := object_in(body, "reasoning").get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if isinstance(form := object_in(body, "text").get("format"), dict):
        inner = {key: value for key, value in form.items() if key != "type"}
        chat["response_format"] = {"type": form.get("type"), "json_schema": inner} | inner
    return chat


def add_item(messages: list[Value], item: Any, seeing: bool, where: str) -> None:
    """Adds an item to the messages; a thought belongs to the assistant's message after it, calls to the one before.

    Raises InputError.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else None
    last = messages[-1] if messages else {}
    if kind == "message":
        message = {"role": item.get("role"), "content": as_parts(item.get("content"))}
        if message["role"] == "assistant" and last.get("content") == "" and "tool_calls" not in last:
            message = messages.pop() | message
        messages.append(message)
    elif kind == "function_call":
        parse_json(str(item.get("arguments")), f"{where}: the arguments")
        call = {"type": "function", "id": item.get("call_id"),
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        if last.get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": [
            left_out(part["type"]) if is_picture(part) and not seeing else part for part in output]
            if isinstance(output := as_parts(item.get("output")), list) else output})
    elif kind == "reasoning":
        given: Any = item.get("content") or []  # encrypted thoughts of others' models have none
        parts = [part | {"type": "text"} if isinstance(part, dict) else part
                 for part in (given if isinstance(given, list) else [given])]
        check_parts(parts, where)
        if thought := "".join(part["text"] for part in parts):
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif not str(kind).endswith(("_call", "_output")):  # of tools that chat_tools leaves out
        raise Refusal(400, f"{where} must be a message, function_call or function_call_output, not "
                      f"{brief(repr(kind), 80)}", "input")


def as_parts(content: Any) -> Any:
    """A content whose texts have the type that they have in a chat."""
    return [part | {"type": "text"} if isinstance(part, dict) and part.get("type") in PARTS else part
            for part in content] if isinstance(content, list) else content


def chat_tools(tools: Any) -> list[Value]:
    """The functions in the form of a chat. Codex sends other tools beside them: the model isn't told of these."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and (
            tool.get("type", "function") != "function" or isinstance(tool.get("name"), str)) for tool in tools):
        raise Refusal(400, 'tools must be a list of {"type": "function", "name": ..., "parameters": ...}', "tools")
    return [{"type": "function", "function": {key: value for key, value in tool.items()
                                              if key != "type" and value is not None}}
            for tool in tools if tool.get("type", "function") == "function"]


class Response(ChatReply):
    """The answer as items: thoughts, messages and calls of functions, in the order in which they were written.

    The last item is open until another one begins, or the answer ends.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.id, self.items, self.n_events = f"resp_{uuid.uuid4().hex}", list[Value](), 0

    def event(self, kind: str, **fields: Any) -> str:
        value = {"type": f"response.{kind}", "sequence_number": self.n_events, **fields}
        self.n_events += 1
        return typed_event(value)

    @property
    def status(self) -> str:
        return {None: "in_progress", "length": "incomplete"}.get(self.jobs[0].finish_reason, "completed")

    def response(self) -> Value:
        usage, ended, job = self.usage(), self.status != "in_progress", self.jobs[0]
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                  "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                  "output_tokens_details": usage["completion_tokens_details"]}
        return {"id": self.id, "object": "response", "created_at": self.base["created"],
                "model": self.base["model"], "status": self.status, "error": None,
                "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
                "output": self.items, "usage": counts if ended else None, "tool_choice": "auto",
                "parallel_tool_calls": not self.asked.one_call,
                "tools": [{"type": "function", **tool["function"]} for tool in job.completion.tools or ()]}

    def first(self, i: int) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self.event(kind, response=self.response() | {"status": "in_progress"})

    def ping(self) -> str:
        """An event: Codex doesn't count comments."""
        return self.event("in_progress", response=self.response())

    def failed(self, error: Refusal) -> str:
        told = {"code": error.code or "server_error", "message": error.value["error"]["message"]}
        return self.event("failed", response=self.response() | {"status": "failed", "error": told})

    def opened(self, kind: str, **fields: Any) -> Iterator[str]:
        """The events of a new item, after the end of the one before."""
        yield from self.closed("completed")
        name = f"{PREFIXES[kind]}_{uuid.uuid4().hex}"
        self.items.append({"type": kind, "id": name, "status": "in_progress", **fields})
        yield self.event("output_item.added", output_index=len(self.items) - 1, item=self.items[-1])

    def place(self) -> Value:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place | ({"content_index": 0} if "content" in self.items[-1] else {})

    def written(self, kind: str, text: str) -> Iterator[str]:
        """The events of a text of a "message" or "reasoning"."""
        part_kind, fields, more = ITEM_TEXTS[kind]
        if not self.items or self.items[-1]["type"] != kind:
            of_kind: Value = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self.opened(kind, **of_kind, content=[])
            self.items[-1]["content"] = [{"type": part_kind, "text": "", **fields, **more}]
            yield self.event("content_part.added", **self.place(), part=self.items[-1]["content"][0])
        if text:
            self.items[-1]["content"][0]["text"] += text
            yield self.event(f"{part_kind}.delta", **self.place(), delta=text, **more)

    def closed(self, status: str) -> Iterator[str]:
        """The last events of the last item, if there is one."""
        if not self.items:
            return
        item = self.items[-1]
        item["status"] = status
        if "content" in item:
            [part] = item["content"]
            yield self.event(f"{part['type']}.done", **self.place(), text=part["text"], **ITEM_TEXTS[item["type"]][2])
            yield self.event("content_part.done", **self.place(), part=part)
        else:
            yield self.event("function_call_arguments.done", **self.place(), name=item["name"],
                             arguments=item["arguments"])
        yield self.event("output_item.done", output_index=len(self.items) - 1, item=item)

    def chunks(self, i: int, job: Job) -> Iterator[str]:
        texts, calls = self.parts(i, job)
        if "reasoning_content" in texts:
            yield from self.written("reasoning", texts["reasoning_content"])
        if "content" in texts or job.ended and not self.items and not calls:
            yield from self.written("message", texts.get("content", ""))
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield from self.opened("function_call", call_id=call["id"], name=name, arguments="")
            self.items[-1]["arguments"] = arguments
            yield self.event("function_call_arguments.delta", **self.place(), delta=arguments)
        if job.ended:
            yield from self.closed(self.status)

    def end(self) -> Iterator[str]:
        yield self.event(self.status, response=self.response())

    def whole(self) -> Value:
        [*self.chunks(0, self.jobs[0])]
        return self.response()
