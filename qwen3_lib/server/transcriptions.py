"""/v1/audio/transcriptions: the text of an uploaded sound in OpenAI's forms, whole or as it comes."""
from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from importlib.util import find_spec
from typing import Any
from zlib import compress

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from qwen3 import Model
from qwen3_asr import LANGUAGES, RATE
from qwen3_lib.app.fields import Body, Refusal, body_options, flag, known
from qwen3_lib.app.openai import GenerationRequest, Value
from qwen3_lib.app.objects import usage_of
from qwen3_lib.app.subtitles import SUBTITLE, file_text
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.transcript import LONGEST_PART, Part, SpeechRequest, languages, usual_part
from qwen3_lib.io.errors import brief
from qwen3_lib.io.sounds import Recording
from qwen3_lib.server.decoding import Upload
from qwen3_lib.server.replies import event
from qwen3_lib.server.worker import SIGN_OF_LIFE, Job, Worker, stopping

LARGEST_UPLOAD, UPLOAD_SECONDS = 25 * 2**20, 120  # bytes, as OpenAI's; seconds until they come
MOST_UPLOADED = 2**29  # bytes of all uploads that come, wait or are heard
EARS = 4  # sounds that are heard at a time, in turns: a part of one takes up to 120 MB
MOST_SECONDS = 2 * 3600  # of a sound: a small file can hold days of silence
FORM_FIELDS = ("file", "language", "prompt", "response_format", "stream", "temperature", "timestamp_granularities",
          "chunking_strategy")
STREAMED = ("json", "text")
TEXT_FORMS = (*STREAMED, "srt", "vtt", "verbose_json")
logging.getLogger("python_multipart").addHandler(logging.NullHandler())  # strangers' mistakes would be lines on stderr


class Ears:
    """Where uploads are heard, a few at a time, each in a thread. They wait on the disk.

    queue_size: how many may wait for an ear.
    """

    def __init__(self, queue_size: int):
        self.queue_size, self.n_waiting, self.n_bytes = queue_size, 0, 0  # n_bytes: of all uploads
        self.threads, self.free = ThreadPoolExecutor(EARS, "ear"), asyncio.Semaphore(EARS)

    @asynccontextmanager
    async def form_of(self, request: Request) -> AsyncIterator[Body]:
        """The fields of a form; `file` is an Upload until the end. Raises Refusal if there are too many uploads."""
        n_bytes = 0

        def count(n: int) -> None:
            nonlocal n_bytes
            n_bytes, self.n_bytes = n_bytes + n, self.n_bytes + n
            if self.n_bytes > MOST_UPLOADED:
                n_bytes, self.n_bytes = 0, self.n_bytes - n_bytes  # at once, so that others find room
                raise too_many(f"uploads have {MOST_UPLOADED:,} bytes already")

        try:
            with closing(Upload((body := await form_of(request, count))["file"].file)) as upload:
                yield body | {"file": upload}
        finally:
            self.n_bytes -= n_bytes

    @asynccontextmanager
    async def free_one(self) -> AsyncIterator[None]:
        """Waits for an ear, and keeps it. Raises Refusal if too many wait."""
        if self.free.locked() and self.n_waiting >= self.queue_size:
            raise too_many(f"{self.n_waiting + EARS} sounds are heard or wait already")
        self.n_waiting += 1
        try:
            await self.free.acquire()
        finally:
            self.n_waiting -= 1
        try:
            yield
        finally:
            self.free.release()


def too_many(what: str) -> Refusal:
    return Refusal(429, f"{what}; try again later", code="queue_full", headers={"Retry-After": "2"})


async def form_of(request: Request, count: Callable[[int], None]) -> Body:
    """The fields of a form; `file` is an UploadFile. count(n) is told of each n bytes that come.

    Raises Refusal if the form is too large, too slow, or none.
    """
    if find_spec("python_multipart") is None:
        raise Refusal(501, "the server lacks a package for uploads: pip install python-multipart")
    n_bytes, more = 0, True

    async def received() -> Message:
        nonlocal n_bytes, more
        message = await request.receive()
        n_bytes, more = n_bytes + len(message.get("body", b"")), message.get("more_body", False)
        return message

    async def receive() -> Message:
        message = await received()
        count(len(message.get("body", b"")))
        if n_bytes > LARGEST_UPLOAD:
            raise Refusal(413, f"the upload has more than {LARGEST_UPLOAD:,} bytes; FLAC and MP3 take fewer", "file")
        return message

    kind, _, rest = request.headers.get("content-type", "").partition(";")
    boundary = re.search(r'\bboundary=("?)([^";]{1,70})\1', rest, re.I)  # no charset: punycode takes minutes
    if kind.strip().lower() != "multipart/form-data" or not boundary:
        raise Refusal(400, "there must be a form (multipart/form-data with a boundary) with a file", "file")
    about = (b"content-type", b'multipart/form-data; boundary="%s"' % boundary[2].strip().encode("latin-1"))
    limited = Request({**request.scope, "headers": [about]}, receive)
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            try:
                form = await limited.form(max_files=1, max_fields=64, max_part_size=2**16)
            except (HTTPException, OSError, Refusal):
                while more and n_bytes < 2 * LARGEST_UPLOAD:  # a client that still sends may not see the answer
                    await received()
                raise
    except TimeoutError as error:
        raise Refusal(408, f"the upload has not come within {UPLOAD_SECONDS} seconds") from error
    except HTTPException as error:
        raise Refusal(400, f"the form: {brief(error.detail)}") from error
    except OSError as error:
        raise Refusal(503, "there is no room on the disk for the upload; try again later",
                      headers={"Retry-After": "2"}) from error
    if not isinstance(file := form.get("file"), UploadFile):
        await form.close()
        raise Refusal(400, "there must be a form (multipart/form-data) with a file", "file")
    body = {name.removesuffix("[]"): value for name, value in form.items()}
    granularities = [*form.getlist("timestamp_granularities[]"), *form.getlist("timestamp_granularities")]
    return body | {"file": file, "timestamp_granularities": granularities}


class HeardSound(SpeechRequest):
    """An uploaded sound: the `pieces` of its text as they come, and then all of it in the form that is wanted."""

    def __init__(self, worker: Worker, ears: Ears, body: Body, seconds: float, longest: int, aligner: Model | None):
        """`ears`: where the tower hears, window by window; `seconds`: until all must be heard; `aligner`: a forced
        aligner for the times of words. Raises InputError."""
        self.worker, self.ears, self.ends_at = worker, ears, time.monotonic() + seconds
        self.jobs, self.segments, self.n_prompt = list[Job](), list[Value](), 0  # the job of the part that is heard
        body = known(body, FORM_FIELDS)
        given, self.form = body.get("stream", "false"), body.get("response_format", "json")
        self.stream = flag({"stream": {"true": True, "false": False}.get(given, given)}, "stream")
        if self.form not in (STREAMED if self.stream else TEXT_FORMS):
            raise Refusal(400, f"response_format must be one of {', '.join(TEXT_FORMS)}; with stream, json or text",
                          "response_format")
        wanted = {*body["timestamp_granularities"]}
        if wanted - {"segment"} - ({"word"} if aligner is not None else set()):
            raise Refusal(400, "timestamp_granularities can only be segment, or word if the server has --aligner",
                          "timestamp_granularities")
        with suppress(KeyError, ValueError):
            body["temperature"] = float(body["temperature"])
        streamed = self.form in STREAMED
        super().__init__(worker.model, body["file"], body.get("language"), body.get("prompt"),
                         usual_part(longest, LONGEST_PART if streamed else SUBTITLE),
                         body_options({"logprobs": 0} if self.form == "verbose_json" else {}, body),
                         aligner if "word" in wanted and not streamed else None)
        self.todo = self.steps()

    def open(self) -> Recording:
        sound = self.sound.open()
        self.check(sound.seconds)
        return sound

    def check(self, seconds: float | None) -> None:
        """Raises Refusal for a sound of so many seconds if that is too long, and when the server ends."""
        if seconds and seconds > MOST_SECONDS:
            raise Refusal(413, f"the sound has more than {MOST_SECONDS:,} seconds", "file")
        if self.worker.over.is_set():
            raise stopping()

    def close(self) -> None:
        """Ends the work. What an ear is doing is finished, at most a window of 8 seconds, and its result is dropped."""
        def drop(_: Any) -> None:
            self.todo.close()  # a connection that stays open holds this object

        self.worker.release(self.jobs)
        self.sound.user.cancel()
        self.sound.user.add_done_callback(drop)

    async def by_ear(self, work: Callable[..., Any], *given: Any) -> AsyncIterator[Any]:
        """None, a sign of life, while an ear works; and then the work's result."""
        self.sound.user = self.ears.threads.submit(work, *given)
        result, over = asyncio.wrap_future(self.sound.user), asyncio.ensure_future(self.worker.over.wait())
        result.add_done_callback(lambda result: result.cancelled() or result.exception())  # if nobody waits any more
        try:
            while not result.done():
                await asyncio.wait((result, over), timeout=SIGN_OF_LIFE, return_when=asyncio.FIRST_COMPLETED)
                self.check(self.end / RATE)
                yield None
            yield result.result()
        finally:
            over.cancel()
            result.cancel()

    async def begin(self) -> None:
        """Opens the sound, so that one that can't be read is refused before a stream begins, and hears a window."""
        async for self.next in self.by_ear(next, self.todo):
            pass

    async def pieces(self) -> AsyncIterator[str]:
        """The pieces of the text; "" is a sign of life."""
        while self.next != ():
            if isinstance(self.next, Part):
                self.segments.append(self.segment(self.next))
            elif self.next is not None:
                async for piece in self.reply(*self.next):
                    yield piece
            async for self.next in self.by_ear(next, self.todo, ()):
                yield ""

    async def reply(self, ids: list[int], options: AnswerOptions) -> AsyncIterator[str]:
        """The pieces of a part's text."""
        asked = GenerationRequest("text", 1, [(ids, options)], self.stream, False, len(ids), "", [""])
        self.jobs = [job] = await self.worker.submit(asked, time.monotonic(), True)
        self.n_prompt += len(ids)
        n, ended = 0, False
        while not ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(job.news.wait(), SIGN_OF_LIFE)
            job.news.clear()
            if job.error is not None:
                raise job.error
            new = "".join(piece for _, piece in job.completion.pairs[n:job.n_pairs])
            n, ended = job.n_pairs, job.ended
            yield self.read(new, job.completion if ended else None)
        self.worker.release(self.jobs)

    async def events(self) -> AsyncIterator[str]:
        """The chunks of a stream."""
        async for piece in self.pieces():
            yield event({"type": "transcript.text.delta", "delta": piece}) if piece else ": it is being heard\n\n"
        yield event({"type": "transcript.text.done"} | self.whole())

    async def finish(self) -> Any:
        """All of the text, in its form."""
        async for _ in self.pieces():
            pass
        return self.whole()

    def usage(self) -> Value:
        return usage_of(self.n_prompt, sum(part.n_tokens for part in self.heard))

    def whole(self) -> Any:
        end, spoken = self.heard[-1].end, {part.language for part in self.heard}
        found = {"text": self.so_far, "usage": {"type": "duration", "seconds": end},
                 "languages": [{"code": code} for code, name in LANGUAGES.items() if name in spoken]}
        if self.form == "json" or self.stream:
            return found
        if self.form == "verbose_json":
            words = [{"word": word.text, "start": word.start, "end": word.end} for part in self.heard
                     for word in part.words]
            return found | {"task": "transcribe", "language": languages(self.heard).lower(), "duration": end,
                            "segments": self.segments} | ({"words": words} if self.words else {})
        return file_text(self.heard, "txt" if self.form == "text" else self.form)

    def segment(self, part: Part) -> Value:
        """A part with all the fields that clients expect; the model says only whether there is speech, 0 or 1."""
        data, answer, scores = part.text.encode(), self.answer, [each.logprob for each in self.answer.logprobs]
        return {"id": len(self.segments), "seek": round(100 * part.start), "start": part.start, "end": part.end,
                "text": part.text, "tokens": answer.token_ids, "temperature": self.options.temperature,
                "avg_logprob": sum(scores) / max(1, len(scores)), "compression_ratio": len(data) / len(compress(data)),
                "no_speech_prob": float(not part.language), "finish_reason": part.finish_reason}
