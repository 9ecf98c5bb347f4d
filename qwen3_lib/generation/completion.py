"""An answer as text: streamed, ended by stop strings, with logprobs and times."""
from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Self, Unpack

import numpy as np

from qwen3 import CHUNK, KVCache, Model, Sequence, Stream, TokenIds, check_answers, default_sampling
from qwen3_lib.generation.answer import StoppingReader, inside_thought, last_turn
from qwen3_lib.generation.tools import schemas, values_for, why_ended
from qwen3_lib.generation.guesses import speculator
from qwen3_lib.generation.options import AnswerOptions, GivenOptions, options_of
from qwen3_lib.generation.messages import prompt_of
from qwen3_lib.generation.prompt_store import PromptStore
from qwen3_lib.generation.processors import Bias, Logprobs, Processor, StopLoops, ThinkBudget, TokenLogprob
from qwen3_lib.generation.schema import Constrained, Grammar, parsed
from qwen3_lib.generation.steps import Run, step
from tokenizer_utils import Answer, InputError, StreamDecoder, Tokenizer


class AnswerText(Processor):
    """Gives the text of the tokens to the reader, until a stop text, and notes the times."""

    def __init__(self, tokenizer: Tokenizer, reader: StoppingReader):
        self.decoder, self.reader = StreamDecoder(tokenizer, skip_special_tokens=True), reader
        self.times = list[float]()  # the start, then the arrival of each token in seconds
        self.n_thought = 0  # tokens between <think> and </think>

    def after(self, token: int | None, forces: Processor | None = None) -> str | None:
        if token is None:
            self.reader.push(self.decoder.flush(), ended=True)
        else:
            self.times.append(time.perf_counter())
            self.reader.push(self.decoder.push(token), token)
            self.n_thought += self.reader.was_inside and token != self.reader.think_ids[1]
        return "stop" if self.reader.stopped else None


class Completion(Stream):
    """An answer while it is generated: iterate over it for its text, piece by piece, `await` it, or call `finish`.

    `answer` (the text taken apart), `message` and `parsed` are of a finished answer, or of one that was closed.
    `prompt_ids` [n]; the state so far: `token_ids`, `text`, `logprobs` (if asked for), `times`, the start and the
    arrival of each token in seconds; `cached_tokens`, the prompt tokens found in the cache; `finish_reason`: None until
    the last token, then "tool_calls", "stop" (the model ended it, or a stop text), "length" (cut off) or "loop" (see
    stop_loops).
    """

    def __init__(self, model: Model, token_ids: TokenIds, cache: KVCache | None = None,
                 tools: list[dict[str, Any]] | None = None, picture_seconds: float = 0.0,
                 options: AnswerOptions | None = None, closed: bool = False,
                 **given: Unpack[GivenOptions]):
        """Takes the options of options.py: as `options`, with all settings of sampling, or by name.

        `tools`, JSON schemas, give the arguments of calls in XML their types. `picture_seconds`: how long the prompt's
        pictures have taken; the `times` begin so much earlier. `closed`: it runs no passes; a Batch gives it tokens.
        """
        wanted, tokenizer = options or options_of(given).over(model.sampling), model.tokenizer
        self.model, self.sequence = model, Sequence(model, token_ids, wanted.max_new_tokens, wanted.seed,
                                                    wanted.eos_token_ids, sampling=wanted.sampling)
        turn = last_turn(tokenizer, self.sequence.prompt)
        think_ids = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
        self.reader = StoppingReader(inside_thought(turn), values_for(tools), think_ids, stop=tuple(wanted.stop or ()))
        written, budget = AnswerText(tokenizer, self.reader), None
        self.noted = None if wanted.logprobs is None else Logprobs(tokenizer, wanted.logprobs)
        if wanted.think_budget is not None or wanted.stop_loops and None not in think_ids:
            most = math.inf if wanted.think_budget is None else wanted.think_budget
            budget = ThinkBudget(tokenizer, self.reader, most)
        may_think = "</think>" not in turn and "assistant" in turn
        self.constrained = None if wanted.schema is None else Constrained(
            model, self.reader, may_think, wanted.schema, wanted.max_string)
        # In this order: first the text, which the others look at; logprobs of the model's own logits, before the schema
        # and the bias change them; the end of a thought before tokens that the schema forces.
        self.sequence.processors += filter(None, [
            written, self.noted, budget, StopLoops(self.reader, budget) if wanted.stop_loops else None,
            self.constrained, None if wanted.logit_bias is None else Bias(wanted.logit_bias, model.config.vocab_size)])
        self.speculator = speculator(model, self.constrained, wanted.lookup, wanted.draft)
        self.token_ids, self.times, self.tools, self.written = self.sequence.token_ids, written.times, tools, written
        self.options, self.picture_seconds = wanted, picture_seconds
        self.streamed = self.cached_tokens = 0
        self.run: Run | None = None  # since it has a cache
        self.closed = closed
        if cache is not None:
            self.begin(cache)

    def begin(self, cache: KVCache, store: PromptStore | None = None, salt: str = "") -> None:
        """Takes a cache, cut back to its common prefix with the prompt, see Sequence.resume; and from the store what
        that has of the rest."""
        self.sequence.resume(cache)
        if store is not None:
            with cache.lock:
                store.load(cache, self.prompt_ids[:-1], salt)
        self.run = Run(self.sequence, cache, self.speculator)
        self.cached_tokens = cache.length
        self.times[:] = [time.perf_counter() - self.picture_seconds]

    def settle(self, seconds: float = 0) -> bool:
        """Whether its next token can be drawn, or it has ended; else what its schema allows is still computed.

        Waits for that for so long at most.
        """
        if self.constrained is None:
            return True
        arrived = self.constrained.settle(seconds)
        if arrived and self.ended is None and (reason := self.constrained.ended):
            self.sequence.end(reason)
        return arrived

    def __next__(self) -> str:
        if pairs := self.news():
            return "".join(piece for _, piece in pairs)
        raise StopIteration

    def parts(self) -> Iterator[tuple[str, str]]:
        """The `pairs`, as they come."""
        while pairs := self.news():
            yield from pairs

    def news(self) -> list[tuple[str, str]]:
        """The next of the `pairs`, after as many passes as they take; none at the end."""
        while self.streamed == len(self.pairs) and not self.closed and self.ended is None:
            self.advance()
        start, self.streamed = self.streamed, len(self.pairs)
        return self.pairs[start:]

    def advance(self, room: int | None = None) -> None:
        """Runs one pass; of the prompt, at most `room` tokens."""
        if self.run is None:
            self.begin(self.model.engine.new_cache(self.model.config))
        while not self.settle(1):
            pass
        if self.ended is not None:
            return
        assert self.run is not None
        with self.run.cache.lock:
            [outcome] = step(self.model, [self.run], room)
        if isinstance(outcome, InputError):
            raise outcome

    def finish(self) -> Self:
        """Generates the rest -> itself. Pieces that nobody has read yet can still be read."""
        while not self.closed and self.ended is None:
            self.advance()
        return self

    def close(self) -> None:
        """Ends the answer where it is."""
        self.closed = True

    def read_prompt(self, progress: Callable[[int, int], None]) -> None:
        """Computes the prompt but its end, and tells progress(tokens read, tokens to read) before each piece."""
        assert self.run is not None
        total, start, cache = len(self.prompt_ids), self.cached_tokens, self.run.cache
        while total - cache.length > CHUNK:
            progress(cache.length - start, total - start)
            self.advance(CHUNK)

    async def __aiter__(self) -> AsyncIterator[str]:
        import asyncio  # here, because importing it takes as long as an answer of the bundled model
        while (piece := await asyncio.to_thread(next, self, None)) is not None:
            yield piece

    def __await__(self) -> Generator[Any, None, Completion]:
        """Generates the rest in a thread -> itself: `answer = await chat(model, "Hello!")`."""
        import asyncio
        return asyncio.to_thread(self.finish).__await__()

    def _repr_markdown_(self) -> str:
        """What a notebook shows: it would take tags for HTML, so the thought is a quotation, and calls are code."""
        answer = self.finish().answer
        calls = [f"```json\n{json.dumps(call, ensure_ascii=False)}\n```" for call in answer.tool_calls]
        thought = [re.sub("(?m)^", "> ", answer.reasoning)] if answer.reasoning else []
        return "\n\n".join([*thought, answer.content, *calls])

    def __repr__(self) -> str:
        state = self.finish_reason or "not finished: iterate over it, print it, or call its finish()"
        return f"<Completion: {len(self.token_ids)} tokens, {state}, text={self.text!r}>"

    @property
    def text(self) -> str:  # type: ignore[override]
        return "".join(piece for _, piece in self.pairs)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pieces so far with their kinds, see AnswerReader."""
        return self.reader.pieces

    @property
    def ended(self) -> str | None:
        """Why the tokens have ended: None, "stop", "length" or "loop"."""
        return self.sequence.finish_reason

    @property
    def finish_reason(self) -> str | None:
        return self.ended and why_ended(self.ended, self.answer.tool_calls)

    @property
    def prompt_ids(self) -> np.ndarray:
        return self.sequence.prompt

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The logprobs of the tokens so far, if they were asked for."""
        return self.noted.found if self.noted else []

    @property
    def answer(self) -> Answer:
        """A finished answer, taken apart into reasoning, content and tool_calls. Raises InputError before."""
        self.check_finished()
        return self.reader.finish(self.ended is not None)

    @property
    def is_json(self) -> bool:
        """Whether the answer fits a JSON Schema."""
        return self.options.schema is not None and not isinstance(self.options.schema, Grammar)

    @property
    def parsed(self) -> Any:
        """An answer to a JSON Schema: an object of the class that was given as `schema`, else JSON's values.

        Raises InputError for JSON that is not complete, or without such a schema.
        """
        if not self.is_json:
            raise InputError("only an answer that fits a JSON Schema or a class can be parsed")
        return parsed(self.options.schema, self.answer.content)

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens so far between <think> and </think>."""
        return self.written.n_thought

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a conversation."""
        answer = self.answer
        parts = {"content": answer.content, "reasoning_content": answer.reasoning, "tool_calls": answer.tool_calls}
        return {"role": "assistant"} | {key: value for key, value in parts.items() if value or key == "content"}


def complete(model: Model, messages: list[dict[str, Any]],
             tools: list[Any] | None = None, enable_thinking: bool | None = None,
             chat_template_kwargs: dict[str, Any] | None = None, cache: KVCache | None = None,
             options: AnswerOptions | None = None, **given: Unpack[GivenOptions]) -> Completion:
    """The Completion of a conversation: see qwen3.chat, which calls this. Takes options as Completion does."""
    check_answers(model)
    about, options = schemas(tools), options_of(given) if options is None else options
    ids, seconds, _pictures = prompt_of(model, messages, about, enable_thinking, chat_template_kwargs,
                                        options.max_pixels)
    return Completion(model, ids, cache, about, seconds, options.over(default_sampling(model, enable_thinking)))
