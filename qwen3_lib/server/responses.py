"""OpenAI's newer form, /v1/responses, as far as it is plain text: requests as those of a chat, and their answers."""
from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from qwen3_lib.answers.messages import checked_messages
from qwen3_lib.app.openai import SHARED, Body, Refusal, Value, known
from qwen3_lib.server.replies import ChatReply, encode
from qwen3_lib.server.worker import Job

SAME = (*SHARED, "parallel_tool_calls")  # fields that a chat has, too
FIELDS = (*SAME, "input", "instructions", "reasoning", "text")
PARTS = ("input_text", "output_text", "text")  # types of the parts of a content


def as_chat(body: Body) -> Body:
    """A request as one to /v1/chat/completions. Raises Refusal for what isn't plain text."""
    body = known(body, FIELDS)
    given, form = body.get("input"), body.get("text", {})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise Refusal(400, "input must be a text or a list of messages", "input")
    messages = []
    for i, item in enumerate(items):
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise Refusal(400, f"input: item {i} is no message", "input")
        content = item.get("content")
        parts = [part | {"type": "text"} if isinstance(part, dict) and part.get("type") in PARTS else part
                 for part in content] if isinstance(content, list) else content
        messages.append({"role": item.get("role"), "content": parts})
    messages = checked_messages(messages, "input")
    if "instructions" in body:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    chat = {name: body[name] for name in SAME if name in body} | {"messages": messages}
    for name, value in (("reasoning", body.get("reasoning", {})), ("text", form)):
        if not isinstance(value, dict):
            raise Refusal(400, f"{name} must be an object", name)
    if (effort := body.get("reasoning", {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if isinstance(form := form.get("format"), dict):
        inner = {key: value for key, value in form.items() if key != "type"}
        chat["response_format"] = {"type": form.get("type"), "json_schema": inner} | inner
    return chat


class Response(ChatReply):
    """The answer, without its thought."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.item_id, self.text, self.n_events = f"msg_{uuid.uuid4().hex}", "", 0

    def event(self, kind: str, **fields: Any) -> str:
        value = {"type": f"response.{kind}", "sequence_number": self.n_events, **fields}
        self.n_events += 1
        return f"event: {value['type']}\ndata: {encode(value)}\n\n"

    def part(self) -> Value:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> Value:
        return {"type": "message", "id": self.item_id, "role": "assistant", "status": status,
                "content": [] if status == "in_progress" else [self.part()]}

    @property
    def status(self) -> str:
        return {None: "in_progress", "length": "incomplete"}.get(self.jobs[0].finish_reason, "completed")

    def response(self) -> Value:
        usage, ended = self.usage(), self.status != "in_progress"
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                  "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"]}
        return {"id": f"resp_{self.item_id[4:]}", "object": "response", "created_at": self.base["created"],
                "model": self.base["model"], "status": self.status, "error": None,
                "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
                "output": [self.item(self.status)] if ended else [], "usage": counts if ended else None,
                "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}

    def first(self, i: int) -> Iterator[str]:
        yield self.event("created", response=self.response() | {"status": "in_progress"})
        yield self.event("output_item.added", output_index=0, item=self.item("in_progress"))
        yield self.event("content_part.added", item_id=self.item_id, output_index=0, content_index=0, part=self.part())

    def chunks(self, i: int, job: Job) -> Iterator[str]:
        parts, _ = self.deltas[i].push(self.news(i, job), job.ended)
        self.text += parts["content"]
        place = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        if parts["content"]:
            yield self.event("output_text.delta", **place, delta=parts["content"], logprobs=[])
        if job.ended:
            yield self.event("output_text.done", **place, text=self.text, logprobs=[])
            yield self.event("content_part.done", **place, part=self.part())
            yield self.event("output_item.done", output_index=0, item=self.item(self.status))

    def end(self) -> Iterator[str]:
        yield self.event(self.status, response=self.response())

    def whole(self) -> Value:
        [*self.chunks(0, self.jobs[0])]
        return self.response()
