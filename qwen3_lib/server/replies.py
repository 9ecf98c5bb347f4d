"""Answers in OpenAI's form: whole, and in the chunks of a stream."""
from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

from qwen3 import Model
from qwen3_lib.generation.processors import TokenLogprob
from qwen3_lib.app.fields import Refusal
from qwen3_lib.app.openai import GenerationRequest, Value
from qwen3_lib.app.objects import call_object, chat_choice, chat_logprobs, object_of, reason_of, usage_of
from qwen3_lib.server.worker import Job

PIECE_FIELDS = {"thinking": "reasoning_content", "content": "content"}  # kind of a piece -> its field
encode = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make an encoder for each event


def event(value: Value) -> str:
    """An event of a stream."""
    return f"data: {encode(value)}\n\n"


def typed_event(value: Value) -> str:
    """An event that bears its type as its name, too."""
    return f"event: {value['type']}\n{event(value)}"


class Reply:
    """The answer to a GenerationRequest: `chunks` of a stream as they come, or all of it as `whole`."""
    name, whole_name, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, asked: GenerationRequest, jobs: list[Job], model: Model, model_name: str):
        self.asked, self.jobs, self.model = asked, jobs, model
        self.base = object_of(self.name, f"{self.prefix}-{uuid.uuid4().hex}", model_name, ())
        self.told, self.ends = [0] * len(jobs), [len(echo) for echo in asked.echoes]  # tokens, characters of logprobs
        self.read = [0] * len(jobs)  # pairs of each answer that the chunks have taken up

    def news(self, i: int, job: Job) -> list[tuple[str, str]]:
        """The pairs (kind, piece) of the i-th answer since the last time."""
        start, self.read[i] = self.read[i], job.n_pairs
        return job.completion.pairs[start:job.n_pairs]

    def chunk(self, i: int, part: Value, reason: str | None = None) -> str:
        """An event with a part of the i-th answer."""
        choice = {"index": i, **part, "finish_reason": reason}
        usage = {"usage": None} if self.asked.include_usage else {}
        return event({**self.base, "choices": [choice], **usage})

    def logprobs(self, i: int) -> Value | None:
        """Those of the i-th answer's tokens since the last time."""
        start, self.told[i] = self.told[i], self.jobs[i].n_tokens
        if self.jobs[i].completion.options.logprobs is None:
            return None
        return self.scored(self.jobs[i].completion.logprobs[start:self.told[i]], i)

    def usage(self) -> Value:
        n_answer = sum(job.n_tokens for job in self.jobs)
        cached = sum(job.completion.cached_tokens for job in self.jobs[::self.asked.n])
        n_thought = sum(job.completion.reasoning_tokens for job in self.jobs)
        return usage_of(self.asked.n_prompt, n_answer, n_thought) | {"prompt_tokens_details": {"cached_tokens": cached}}

    def ping(self) -> str:
        """What a stream has in a silent time: a comment."""
        return ": the answer is being computed\n\n"

    def failed(self, error: Refusal) -> str:
        """The last event of a stream that fails."""
        return event(error.value)

    def end(self) -> Iterator[str]:
        """The last events of a stream."""
        if self.asked.include_usage:
            yield event({**self.base, "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def whole(self) -> Value:
        choices = [{"index": i, **self.choice(i, job)} for i, job in enumerate(self.jobs)]
        return {**self.base, "object": self.whole_name, "choices": choices, "usage": self.usage()}

    # ---- Plain text; a chat has its own ------------------------------------------------------------------------------

    def first(self, i: int) -> Iterator[str]:
        """The events before the i-th answer has begun."""
        if echo := self.asked.echoes[i]:
            yield self.chunk(i, {"text": echo, "logprobs": None})

    def chunks(self, i: int, job: Job) -> Iterator[str]:
        """The events for what has come since the last time."""
        text = "".join(piece for _, piece in self.news(i, job))
        if text or job.ended:
            yield self.chunk(i, {"text": text, "logprobs": self.logprobs(i)}, job.finish_reason)

    def choice(self, i: int, job: Job) -> Value:
        return {"text": self.asked.echoes[i] + job.completion.text, "logprobs": self.logprobs(i),
                "finish_reason": job.finish_reason}

    def scored(self, entries: list[TokenLogprob], i: int) -> Value:
        decode = self.model.tokenizer.decode
        tokens, offsets = [decode([entry.token_id]) for entry in entries], []
        for token in tokens:
            offsets.append(self.ends[i])
            self.ends[i] += len(token)
        return {"tokens": tokens, "token_logprobs": [entry.logprob for entry in entries], "text_offset": offsets,
                "top_logprobs": [{decode([token]): logprob for token, logprob in entry.top} for entry in entries]}


class ChatReply(Reply):
    """The same for a conversation: reasoning and calls of tools apart from the content."""
    name, whole_name, prefix = "chat.completion.chunk", "chat.completion", "chatcmpl"

    def __init__(self, asked: GenerationRequest, jobs: list[Job], model: Model, model_name: str):
        super().__init__(asked, jobs, model, model_name)
        self.n_calls = [0] * len(jobs)  # told of each answer

    def parts(self, i: int, job: Job) -> tuple[dict[str, str], list[Value]]:
        """(the new texts that aren't empty, the new calls) of the i-th answer."""
        texts, calls = {"reasoning_content": "", "content": ""}, list[Value]()
        for kind, piece in self.news(i, job):
            if kind in PIECE_FIELDS:
                texts[PIECE_FIELDS[kind]] += piece
            elif kind == "call" and not (self.asked.one_call and self.n_calls[i]):
                calls.append({"index": self.n_calls[i]} | call_object(job.completion.reader.calls[self.n_calls[i]]))
                self.n_calls[i] += 1
        return {name: text for name, text in texts.items() if text}, calls

    def first(self, i: int) -> Iterator[str]:
        yield self.chunk(i, {"delta": {"role": "assistant", "content": None}, "logprobs": None})

    def chunks(self, i: int, job: Job) -> Iterator[str]:
        (delta, calls), logprobs = self.parts(i, job), self.logprobs(i)
        if delta or logprobs and logprobs["content"]:
            yield self.chunk(i, {"delta": delta, "logprobs": logprobs})
        for call in calls:
            yield self.chunk(i, {"delta": {"tool_calls": [call]}, "logprobs": None})
        if job.ended:
            yield self.chunk(i, {"delta": {}, "logprobs": None}, reason_of(job.finish_reason, self.n_calls[i]))

    def choice(self, i: int, job: Job) -> Value:
        return chat_choice(job.completion, self.asked.one_call)

    def scored(self, entries: list[TokenLogprob], i: int) -> Value:
        return chat_logprobs(self.model, entries)
