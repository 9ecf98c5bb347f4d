"""OpenAI's newer form, /v1/responses: requests as those of a chat, and their answers as items."""
from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from qwen3_lib.app.openai import SHARED, Body, Refusal, Value, known
from qwen3_lib.io.errors import brief, parse_json
from qwen3_lib.server.replies import ChatReply, encode
from qwen3_lib.server.worker import Job
from tokenizer_utils import checked_messages

SAME = (*SHARED, "parallel_tool_calls", "tool_choice")  # fields that a chat has, too
FIELDS = (*SAME, "input", "instructions", "reasoning", "text", "tools")
PARTS = ("input_text", "output_text", "text")  # types of the parts of a content


def as_chat(body: Body) -> Body:
    """A request as one to /v1/chat/completions. Raises Refusal for what a chat can't hold."""
    body = known(body, FIELDS)
    given, form = body.get("input"), body.get("text", {})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise Refusal(400, "input must be a text or a list of items", "input")
    messages = list[Value]()
    for i, item in enumerate(items):
        add_item(messages, item, f"input: item {i}")
    messages = checked_messages(messages, "input")
    if "instructions" in body:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    chat = {name: body[name] for name in SAME if name in body} | {"messages": messages}
    if "tools" in body:
        chat["tools"] = chat_tools(body["tools"])
    for name, value in (("reasoning", body.get("reasoning", {})), ("text", form)):
        if not isinstance(value, dict):
            raise Refusal(400, f"{name} must be an object", name)
    if (effort := body.get("reasoning", {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if isinstance(form := form.get("format"), dict):
        inner = {key: value for key, value in form.items() if key != "type"}
        chat["response_format"] = {"type": form.get("type"), "json_schema": inner} | inner
    return chat


def add_item(messages: list[Value], item: Any, where: str) -> None:
    """Adds an item to the messages; calls belong to the assistant's message before them. Raises InputError."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        messages.append({"role": item.get("role"), "content": as_parts(item.get("content"))})
    elif kind == "function_call":
        parse_json(str(item.get("arguments")), f"{where}: the arguments")
        call = {"type": "function", "id": item.get("call_id"),
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": as_parts(item.get("output"))})
    elif kind != "reasoning":  # the thoughts of others' models, often encrypted; there are none in answers here
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
    """The answer as items: messages and calls of functions, in the order in which they were written; no thought.

    The last item is open until another one begins, or the answer ends.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.id, self.items, self.n_events = f"resp_{uuid.uuid4().hex}", list[Value](), 0

    def event(self, kind: str, **fields: Any) -> str:
        value = {"type": f"response.{kind}", "sequence_number": self.n_events, **fields}
        self.n_events += 1
        return f"event: {value['type']}\ndata: {encode(value)}\n\n"

    @property
    def status(self) -> str:
        return {None: "in_progress", "length": "incomplete"}.get(self.jobs[0].finish_reason, "completed")

    def response(self) -> Value:
        usage, ended, job = self.usage(), self.status != "in_progress", self.jobs[0]
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                  "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"]}
        return {"id": self.id, "object": "response", "created_at": self.base["created"],
                "model": self.base["model"], "status": self.status, "error": None,
                "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
                "output": self.items, "usage": counts if ended else None, "tool_choice": "auto",
                "parallel_tool_calls": not self.asked.one_call,
                "tools": [{"type": "function", **tool["function"]} for tool in job.completion.tools or ()]}

    def first(self, i: int) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self.event(kind, response=self.response() | {"status": "in_progress"})

    def opened(self, kind: str, prefix: str, **fields: Any) -> Iterator[str]:
        """The events of a new item, after the end of the one before."""
        yield from self.closed("completed")
        self.items.append({"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **fields})
        yield self.event("output_item.added", output_index=len(self.items) - 1, item=self.items[-1])

    def place(self) -> Value:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place | ({"content_index": 0} if self.items[-1]["type"] == "message" else {})

    def written(self, text: str) -> Iterator[str]:
        """The events of a text."""
        if not self.items or self.items[-1]["type"] != "message":
            yield from self.opened("message", "msg", role="assistant", content=[])
            self.items[-1]["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            yield self.event("content_part.added", **self.place(), part=self.items[-1]["content"][0])
        if text:
            self.items[-1]["content"][0]["text"] += text
            yield self.event("output_text.delta", **self.place(), delta=text, logprobs=[])

    def closed(self, status: str) -> Iterator[str]:
        """The last events of the last item, if there is one."""
        if not self.items:
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            yield self.event("output_text.done", **self.place(), text=part["text"], logprobs=[])
            yield self.event("content_part.done", **self.place(), part=part)
        else:
            yield self.event("function_call_arguments.done", **self.place(), name=item["name"],
                             arguments=item["arguments"])
        yield self.event("output_item.done", output_index=len(self.items) - 1, item=item)

    def chunks(self, i: int, job: Job) -> Iterator[str]:
        parts, calls = self.deltas[i].push(self.news(i, job), job.ended)
        if parts["content"] or job.ended and not self.items and not calls:
            yield from self.written(parts["content"])
        for call in calls:
            if "id" in call:
                yield from self.opened("function_call", "fc", call_id=call["id"], name=call["function"]["name"],
                                       arguments="")
            if arguments := call["function"]["arguments"]:
                self.items[-1]["arguments"] += arguments
                yield self.event("function_call_arguments.delta", **self.place(), delta=arguments)
        if job.ended:
            yield from self.closed(self.status)

    def end(self) -> Iterator[str]:
        yield self.event(self.status, response=self.response())

    def whole(self) -> Value:
        [*self.chunks(0, self.jobs[0])]
        return self.response()
