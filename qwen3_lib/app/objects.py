"""The objects in which OpenAI's form has answers."""
from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from qwen3 import Model
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.processors import TokenLogprob
from qwen3_lib.generation.tools import Value, why_ended


def call_object(call: Value, name: str | None = None) -> Value:
    """A call of a tool in OpenAI's form, from {"name", "arguments"}; its id is the name, or a random one."""
    arguments = call["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": name or f"call_{uuid.uuid4().hex[:24]}", "type": "function",
            "function": {"name": call["name"], "arguments": text}}


def reason_of(ended: str | None, calls: Any = ()) -> str | None:
    """OpenAI's word for why an answer with these calls has ended."""
    return why_ended("stop" if ended == "loop" else ended, calls)


def object_of(kind: str, name: str, model: str, choices: Sequence[Value], **more: Any) -> Value:
    """The object in which answers come."""
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices, **more}


def usage_of(n_prompt: int, n_answer: int, n_thought: int = 0) -> Value:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_answer, "total_tokens": n_prompt + n_answer,
            "completion_tokens_details": {"reasoning_tokens": n_thought}}


def chat_choice(completion: Completion, one_call: bool = False) -> Value:
    """{"message", "logprobs", "finish_reason"} of an answer."""
    answer = completion.answer
    calls = [call_object(call) for call in answer.tool_calls[:1 if one_call else None]]
    message: Value = {"role": "assistant", "content": answer.content or (None if calls else "")}
    message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    logprobs = None if completion.options.logprobs is None else chat_logprobs(completion.model, completion.logprobs)
    return {"message": message, "logprobs": logprobs, "finish_reason": reason_of(completion.ended, calls)}


def chat_logprobs(model: Model, entries: Iterable[TokenLogprob]) -> Value:
    """The logprobs of an answer's tokens, each with the most likely tokens there."""
    def described(token: int, logprob: float) -> Value:
        tokenizer = model.tokenizer
        return {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    return {"content": [described(entry.token_id, entry.logprob) |
                        {"top_logprobs": [described(*other) for other in entry.top]} for entry in entries]}
