"""The thread that computes. It steps a Batch; requests join and leave between two steps.

The event loop gives it commands and gets news. But for its completion, a Job belongs to the event loop.
"""
from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from qwen3 import InputError, Model, log
from qwen3_lib.generation.completion import Completion
from qwen3_lib.app.openai import GenerationRequest
from qwen3_lib.app.fields import Refusal
from qwen3_lib.app.objects import reason_of
from qwen3_lib.generation.batch import Batch

SIGN_OF_LIFE = 10.0  # seconds without news until a stream gets a sign of life


def stopping() -> Refusal:
    return Refusal(503, "the server is stopping")


def out_of_time(seconds: float) -> Refusal:
    return Refusal(504, f"the answer was not finished within {seconds:g} seconds", code="timeout",
                   headers={"x-should-retry": "false"})  # OpenAI's and Anthropic's clients would ask again


@dataclass(eq=False)
class Job:
    """An answer while it is generated: `n_pairs`, `n_tokens` and `finish_reason` belong to the same step."""
    news: asyncio.Event  # set when the answer has begun, grown or ended
    streams: bool  # False: nobody looks at the answer while it grows
    completion: Completion = None  # type: ignore[assignment]  # the thread writes it, before the first news
    n_pairs: int = 0
    n_tokens: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    began: float = field(default_factory=time.monotonic)  # when its request came

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Worker:
    """Loads a model and answers with it. `totals` counts, for /metrics.

    load() -> the Batch; queue: how many answers may wait for a slot; on_end(error) is called in the event loop if
    loading or computing fails, on_load() in the thread when requests can be answered.
    """

    def __init__(self, load: Callable[[], Batch], queue_size: int, on_end: Callable[[Exception], None],
                 on_load: Callable[[], None] = lambda: None):
        self.load, self.queue_size, self.on_end, self.on_load = load, queue_size, on_end, on_load
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.jobs, self.totals = set[Job](), Counter[str]()
        self.batch: Batch | None = None  # None: still loading
        self.ends_at: float | None = None  # when all that runs is given up
        self.over = asyncio.Event()  # set a second after that: then nothing is waited for
        self.thread = threading.Thread(target=self.work, name="worker", daemon=True)
        self.loop: Any = None  # since `start`

    def start(self) -> None:
        """Begins to load; to be called in the event loop."""
        self.loop = asyncio.get_running_loop()
        if self.ends_at is not None:  # a signal came before
            self.loop.call_later(max(self.ends_at + 1 - time.monotonic(), 0), self.over.set)
        self.thread.start()

    def end(self, seconds: float) -> None:
        """Gives up in so many seconds what then still runs; may be called by a signal."""
        self.ends_at = time.monotonic() + seconds
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.call_later, seconds + 1, self.over.set)

    @property
    def model(self) -> Model:
        if self.batch is None:
            raise Refusal(503, "the model is still loading", headers={"Retry-After": "1"})
        return self.batch.model

    # ---- In the event loop -------------------------------------------------------------------------------------------

    async def do(self, function: Callable[[], Any]) -> Any:
        """The result of a function that is called in the thread, between two steps."""
        if not self.thread.is_alive():
            raise Refusal(500, "the server has failed")
        future = Future[Any]()

        def command() -> None:
            if future.set_running_or_notify_cancel():  # else the client has left
                try:
                    future.set_result(function())
                except Exception as error:  # whatever it is, it belongs to this request, and the others go on
                    future.set_exception(error)

        self.commands.put(command)
        return await asyncio.wrap_future(future)

    async def submit(self, asked: GenerationRequest, began: float, goes_on: bool = False) -> list[Job]:
        """Jobs for the answers to a request; `began`: when it came, by time.monotonic; `goes_on`: it has begun before.

        Raises Refusal if too many wait, and InputError.
        """
        assert self.batch is not None
        batch, news, n = self.batch, asyncio.Event(), len(asked.answers)
        if self.ends_at is not None and not goes_on:
            raise stopping()
        if n > (most := len(batch.slots) + self.queue_size):
            raise Refusal(400, f"{n} answers are asked for at once, but at most {most} can run and wait "
                          "(--queue)")
        if len(self.jobs) + n > most:
            raise Refusal(429, f"{len(self.jobs)} answers run or wait already; try again later", code="queue_full",
                          headers={"Retry-After": "2"})
        jobs = [Job(news, asked.stream, began=began) for _ in asked.answers]
        self.jobs.update(jobs)
        try:
            for job, (token_ids, options) in zip(jobs, asked.answers):
                await self.do(lambda: self.add(batch, job, token_ids, asked.salt, options=options, tools=asked.tools))
        except BaseException:
            self.release(jobs)
            raise
        return jobs

    def release(self, jobs: list[Job]) -> None:
        """Ends the work for jobs whose client has left or is answered."""
        def command(batch: Batch | None, left: set[Job]) -> None:
            for request in batch.requests if batch else ():
                if request.key in left:
                    batch.cancel(request.key)  # type: ignore[union-attr]

        left = {job for job in jobs if not job.ended}
        self.jobs.difference_update(jobs)
        if left:
            self.totals["cancelled"] += sum(job.completion is not None for job in left)
            self.commands.put(lambda: command(self.batch, left))

    def deliver(self, news: list[tuple[Job, int, int, str | None, Exception | None]]) -> None:
        """Writes what a step has brought into the jobs."""
        now = time.monotonic()
        for job, n_pairs, n_tokens, reason, error in news:
            if job.n_tokens == 0 < n_tokens:
                self.totals["prompt_tokens"] += len(job.completion.prompt_ids)
                self.totals["cached_tokens"] += job.completion.cached_tokens
                self.totals["first_token_seconds"] += now - job.began  # type: ignore[assignment]
                self.totals["answers_begun"] += 1
            self.totals["generated_tokens"] += n_tokens - job.n_tokens
            job.n_pairs, job.n_tokens, job.finish_reason, job.error = n_pairs, n_tokens, reason, error
            if job.ended:
                self.totals["answers_ended"] += 1
                self.totals["given_up"] += error is not None
                self.totals["answer_seconds"] += now - job.began  # type: ignore[assignment]
            job.news.set()

    def fail(self, error: Exception) -> None:
        """Ends all jobs with an error."""
        self.deliver([(job, job.n_pairs, job.n_tokens, None, error) for job in self.jobs if not job.ended])

    def stop(self) -> None:
        """Ends the thread after the step that runs."""
        self.commands.put(None)
        self.thread.join(5 if self.batch is None else None)  # a model that is still being loaded isn't waited for

    # ---- In the thread -----------------------------------------------------------------------------------------------

    def work(self) -> None:
        try:
            self.batch = self.load()
            self.on_load()
            while self.obey(self.batch):
                self.step(self.batch)
            self.batch.save()
        except Exception as error:  # a thread that ends silently would leave its clients waiting
            log.exception("the thread that computes has failed")
            if not isinstance(error, InputError | MemoryError):
                traceback.print_exc()
            self.loop.call_soon_threadsafe(self.fail, Refusal(500, "the server has failed"))
            self.loop.call_soon_threadsafe(self.on_end, error)

    def obey(self, batch: Batch) -> bool:
        """Carries out the commands, and waits for one while there is nothing to compute -> False at the end."""
        while batch.idle or not self.commands.empty():
            if (command := self.commands.get()) is None:
                return False
            command()
        return True

    def add(self, batch: Batch, job: Job, *wanted: Any, **options: Any) -> None:
        job.completion = batch.add(job, *wanted, **options)

    def step(self, batch: Batch) -> None:
        requests = [(request, len(request.completion.token_ids)) for request in batch.requests]
        outcomes = dict(batch.step())
        if self.ends_at is not None and time.monotonic() > self.ends_at:
            for request in batch.requests:
                batch.cancel(request.key)
                outcomes[request.key] = stopping()
        news = list[Any]()
        for request, before in requests:
            job: Any = request.key
            answer, outcome = request.completion, outcomes.get(job)
            error = outcome if isinstance(outcome, InputError) else None
            if outcome is not None or len(answer.token_ids) > before and (job.streams or not before):
                reason = None if error else reason_of(answer.ended)  # the reply knows of calls
                news.append((job, len(answer.pairs), len(answer.token_ids), reason, error))
        if news:
            self.loop.call_soon_threadsafe(self.deliver, news)
