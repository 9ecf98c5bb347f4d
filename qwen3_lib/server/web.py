"""The application: paths, bodies, streams, clients that leave, and who may ask."""
from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hmac
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen3 import InputError, Model, log
from qwen3_asr import hears
from qwen3_embed import SEARCH, embed, rerank
from qwen3_lib.app.fields import Body, Refusal, as_sent, flag, known, sent_names, whole
from qwen3_lib.app.openai import Door, GenerationRequest, chat_prompt, chat_request, text_request
from qwen3_lib.io.facts import model_name
from qwen3_lib.app.terminal import note
from qwen3_lib.io.errors import brief, is_whole, parse_json
from qwen3_lib.generation.messages import encoded
from qwen3_lib.page.page import joined
from qwen3_lib.server import messages, responses
from qwen3_lib.server.replies import ChatReply, Reply, event
from qwen3_lib.server.speeches import Sounding, SoundStream, Speakers, voice_names
from qwen3_lib.server.transcriptions import Ears, HeardSound
from qwen3_lib.server.vetting import Grammars
from qwen3_lib.server.worker import SIGN_OF_LIFE, Job, Worker, out_of_time, stopping
from qwen3_tts import speaks
from qwen3_vision import sees
from tokenizer_utils import is_picture

LARGEST_BODY, BODY_SECONDS = 2**24, 30  # bytes of a body; seconds until it comes
MOST_READ = 2**27  # bytes of a body that is too large: a client that finds its connection closed would send it again
LARGE_BODY = 2**17  # bytes; a larger one waits for others that are: reading it may take a second of Python
MOST_VALUES = 2**19  # commas, colons and brackets in a body: parsing millions of small values would hold up the others
THREADS = 64  # for what requests compute beside the event loop and the model
CHAT_PAGE, POLICY = joined(Path(__file__).with_name("page") / "page.html", {}, "; connect-src 'self'; img-src data:; "
                      "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify")
REPLIES: dict[str, type[Reply]] = {"chat": ChatReply, "text": Reply, "response": responses.Response,
                                  "message": messages.MessageReply}
EMBEDDING_FIELDS = ("input", "instruction", "dimensions", "encoding_format", "truncate")  # fields of /v1/embeddings
SCORES = ("query", "documents", "texts", "instruction", "top_n", "return_documents", "return_text", "truncate")
FOREIGN = {"/api/": "Ollama's", "/v1beta/": "Gemini's"}  # beginnings of paths
SPOKEN = "this server speaks OpenAI's API, at /v1/chat/completions, /v1/responses, /v1/completions, /v1/embeddings, " \
         "..., and Anthropic's, at /v1/messages"
LOCAL = ("localhost", "127.0.0.1", "[::1]")


@dataclass
class Limits:
    """What the command line says about requests."""
    seconds: float  # until an answer must be there
    key: str | None = None  # that clients must have
    origins: tuple[str, ...] = ()  # web pages that may ask, beside this server's own
    hosts: tuple[str, ...] | None = None  # names under which the server may be asked; None: any
    verbose: bool = False  # a line on stderr for each request
    options: dict[str, Any] = field(default_factory=dict)  # of answers, see Door
    aligner: Callable[[], Model | None] = lambda: None  # the forced aligner, if there is one


class Log:
    """Notes each request: method, path, status, seconds, tokens of prompt and answer; never a text."""

    def __init__(self, app: ASGIApp, verbose: bool):
        self.app, self.verbose = app, verbose  # verbose: on stderr, too

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0

        async def counting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, counting)
        finally:
            if scope["type"] == "http":
                usage = scope.pop("usage", lambda: None)()  # else it would stay as long as the connection
                tokens = f", {usage['prompt_tokens']} + {usage.get('completion_tokens', 0)} tokens" if usage else ""
                line = f"{scope['method']} {brief(scope['path'])} {status}, {time.monotonic() - began:.2f} s{tokens}"
                log.info(line)
                if self.verbose:
                    note(line)


class AuthMiddleware:
    """Rejects requests without a key, and web pages from elsewhere."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (refusal := self.refusal(Request(scope))) is None:
            await self.app(scope, receive, send)
        else:
            await refusal_response(refusal, scope)(scope, receive, send)

    def refusal(self, request: Request) -> Refusal | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        name = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:\d*)?", host)
        # A page elsewhere may point a name of its own to 127.0.0.1: then its requests aren't foreign to the browser.
        if self.limits.hosts is not None and (name is None or name[1] not in self.limits.hosts):
            return Refusal(403, "this server answers requests to localhost only")
        if origin is not None and origin.partition("://")[2] != host and origin not in self.limits.origins:
            return Refusal(403, f"pages from {brief(origin)} may not ask; --cors allows an origin")
        # Not request.url.path, which older versions of starlette make from the header Host.
        if self.limits.key is not None and request.scope["path"] not in ("/", "/health"):
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            keys = [given.strip(" ")] * (scheme.lower() == "bearer") + [request.headers.get("x-api-key", "")]
            if not any([hmac.compare_digest(key.encode("latin-1"), self.limits.key.encode()) for key in keys]):
                return Refusal(401, "wrong or missing API key", code="invalid_api_key")
        return None


def refusal_response(error: Refusal, scope: Scope) -> JSONResponse:
    value = messages.error_value(error) if scope["path"].startswith("/v1/messages") else error.value
    return JSONResponse(value, error.status, error.headers)


async def content_of(request: Request) -> bytearray:
    """The body of a request. Raises Refusal if it is too large or too slow."""
    content, n_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                n_bytes += len(part)
                if n_bytes <= LARGEST_BODY:
                    content += part
                elif n_bytes > MOST_READ:
                    break
            if n_bytes > LARGEST_BODY:
                raise Refusal(413, f"the body has more than {LARGEST_BODY} bytes")
    except TimeoutError as error:
        raise Refusal(408, f"the body has not come within {BODY_SECONDS} seconds") from error
    if (n := sum(map(content.count, b",:[{"))) > MOST_VALUES:
        raise Refusal(413, f"the body has {n:,} commas, colons and brackets; at most {MOST_VALUES:,} are taken")
    return content


def body_in(content: bytearray) -> Body:
    """The JSON object that a body is. Raises Refusal if it is none."""
    gc.disable()  # it would look again and again at all that is read, four times as long as reading takes
    try:
        text = content.decode("utf-8-sig")
        body = parse_json(text, "the body")
        if re.search(r"\\u[dD]", text):  # a half of a pair, alone, would fail where it is sent back
            json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeError, RecursionError) as error:
        raise Refusal(400, f"the body: not valid JSON in Unicode: {brief(error)}") from error
    finally:
        gc.enable()
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    return body


class EventStream(StreamingResponse):
    """The chunks of a Reply; the work ends with the response, whatever ends that."""

    def __init__(self, worker: Worker, reply: Any, seconds: float):
        self.worker, self.reply, self.seconds, self.due = worker, reply, seconds, True  # due: a sign of life
        super().__init__((), media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.worker.release(self.reply.jobs)

    def wake(self) -> None:
        self.due = True
        self.reply.jobs[0].news.set()

    async def stream_response(self, send: Send) -> None:
        """Writes the chunks. No generator of them: the client may leave at any moment, and nothing is left to close."""
        async def write(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self.write_chunks(write)
        await write("", False)

    async def write_chunks(self, write: Callable[[str], Awaitable[None]]) -> None:
        reply, jobs = self.reply, self.reply.jobs
        await write("".join(chunk for i in range(len(jobs)) for chunk in reply.first(i)))
        running, ends_at, loop = {*range(len(jobs))}, time.monotonic() + self.seconds, asyncio.get_running_loop()
        while running:
            if self.due:  # one timer in SIGN_OF_LIFE: one for each token took a fifth of its time here
                self.due = False
                loop.call_later(SIGN_OF_LIFE, self.wake)
            await jobs[0].news.wait()
            jobs[0].news.clear()
            if time.monotonic() > ends_at:
                return await write(reply.failed(out_of_time(self.seconds)))
            parts = list[str]()
            for i in sorted(running):
                if (error := jobs[i].error) is not None:
                    return await write("".join(parts) + reply.failed(as_refusal(error, self.worker)))
                parts += reply.chunks(i, jobs[i])
                if jobs[i].ended:
                    running.remove(i)
            parts += () if running else reply.end()
            if parts or self.due:  # at most one write for each step
                await write("".join(parts) or reply.ping())


class SpeechStream(EventStream):
    """The same of a HeardSound. `until`: what ends with it."""

    def __init__(self, worker: Worker, speech: HeardSound, seconds: float, until: contextlib.AsyncExitStack):
        super().__init__(worker, speech, seconds)
        self.until = until

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.until:
            await super().__call__(scope, receive, send)

    async def write_chunks(self, write: Callable[[str], Awaitable[None]]) -> None:
        try:
            async with in_time(self.reply.ends_at, self.seconds):
                async for chunk in self.reply.events():
                    await write(chunk)
        except InputError as error:
            await write(event(as_refusal(error, self.worker).value))


@contextlib.asynccontextmanager
async def in_time(ends_at: float, seconds: float) -> AsyncIterator[None]:
    """Raises Refusal at `ends_at`, by the clock of time.monotonic, which the event loop has."""
    try:
        async with asyncio.timeout_at(ends_at):
            yield
    except TimeoutError as error:
        raise out_of_time(seconds) from error


def shows_pictures(body: Body) -> bool:
    """Whether a message, a result of a tool in it, or an item of a response's input holds a picture."""
    items = [each for name in ("messages", "input") if isinstance(body.get(name), list) for each in body[name]]
    contents = [each.get(name) for each in items if isinstance(each, dict) for name in ("content", "output")]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    inner = [each for part in parts if isinstance(part, dict) and isinstance(part.get("content"), list)
             for each in part["content"]]
    return any(map(is_picture, [*parts, *inner]))


async def all_ended(jobs: list[Job]) -> None:
    """Waits until each job has ended, or one has failed, whose error it raises."""
    while not all(job.ended for job in jobs):
        await jobs[0].news.wait()
        jobs[0].news.clear()
        for job in jobs:
            if job.error is not None:
                raise job.error


async def gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_refusal(error: Any, worker: Worker, body: Body | None = None) -> Refusal:
    """An error as the client gets it, without a path of this machine."""
    if isinstance(error, Refusal):
        return error
    refusal = as_sent(error, sent_names(body or {}))
    message = str(refusal)
    if worker.batch is not None:
        message = message.replace(str(worker.batch.model.path), model_name(worker.batch.model))
    if isinstance(error.__cause__, FloatingPointError):  # NaN in the weights isn't the client's fault
        return Refusal(500, message)
    return Refusal(400, message, refusal.param, refusal.code)


def tokens_of(model: Model, body: Body, door: Door) -> Body:
    if not isinstance(text := body.get("content", body.get("prompt")), str):
        raise Refusal(400, "content must be a text", "content")
    ids = encoded(model.tokenizer, text, door.longest)
    return {"tokens": ids, "count": len(ids), "max_model_len": door.longest}


def text_of(model: Model, body: Body, door: Door) -> Body:
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(is_whole(i, 0) for i in ids):
        raise Refusal(400, "tokens must be a list of token ids", "tokens")
    text = model.tokenizer.decode(ids)
    return {"content": text, "prompt": text}


def prompt_text(model: Model, body: Body, door: Door) -> Body:
    return {"prompt": chat_prompt(model, body, door)[0]}


ANSWERS: dict[str, Callable[[Model, Body, Door], Any]] = {  # path -> what makes of its body a request, or the answer
    "/v1/chat/completions": chat_request, "/v1/completions": text_request,
    "/v1/responses": responses.responses_request, "/v1/messages": messages.messages_request,
    "/v1/messages/count_tokens": messages.count_tokens, "/tokenize": tokens_of, "/detokenize": text_of,
    "/apply-template": prompt_text}


class Server:
    """The handlers of the paths. `listener` hears and `speaker` speaks: workers of other models, or `worker`."""

    def __init__(self, worker: Worker, limits: Limits, listener: Worker | None = None, speaker: Worker | None = None):
        self.worker, self.limits, self.started = worker, limits, int(time.time())
        self.listener, self.speaker = listener or worker, speaker or worker
        self.speakers = Speakers(self.speaker)
        self.grammars = Grammars()
        self.large = ThreadPoolExecutor(1)  # reads and checks large bodies
        self.eyes = ThreadPoolExecutor(1)  # takes requests with pictures, one after another, in the same memory
        self.ears = Ears(worker.queue_size)

    @property
    def name(self) -> str:
        return model_name(self.worker.model)

    async def asked(self, request: Request, answer: Callable[[Model, Body, Door], Any]) -> Response:
        """The response of a function of ANSWERS, which runs beside the event loop."""
        model, content, began = self.worker.model, await content_of(request), time.monotonic()
        door = Door(self.longest, options=self.limits.options, matchers=self.grammars.matchers)
        sent: Body = {}  # the names of the fields

        def read() -> Any:
            body = body_in(content)
            sent.update(dict.fromkeys(body))
            work = partial(answer, model, body, door)
            return work if shows_pictures(body) else work()

        try:
            value = await self.unless_over(request, self.run(content, read))
            if isinstance(value, partial):
                value = await self.unless_over(request, asyncio.get_running_loop().run_in_executor(self.eyes, value))
            if isinstance(value, GenerationRequest):
                return await self.generated(request, value, began)
            return JSONResponse(value)
        except InputError as error:
            raise as_refusal(error, self.worker, sent) from None

    def run(self, content: bytearray, read: Callable[[], Any]) -> Awaitable[Any]:
        """The result of a function that reads a body: large ones one after another, and none in the event loop."""
        return asyncio.get_running_loop().run_in_executor(self.large if len(content) > LARGE_BODY else None, read)

    async def body_of(self, request: Request) -> Body:
        """The JSON object of a request."""
        content = await content_of(request)
        return await self.run(content, partial(body_in, content))  # type: ignore[no-any-return]

    async def unless_over(self, request: Request, work: Awaitable[Any]) -> Any:
        """The result of `work`. Raises ClientDisconnect if the client leaves before, Refusal if the server ends."""
        tasks = [*map(asyncio.ensure_future, (work, gone(request), self.worker.over.wait()))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ClientDisconnect if tasks[1].done() else stopping()
            return tasks[0].result()
        finally:
            del work  # an exception's traceback holds this frame: with its task in it, a refused picture would stay
            while tasks:
                tasks.pop().cancel()

    async def generated(self, request: Request, asked: GenerationRequest, began: float) -> Response:
        worker = self.worker
        jobs = await self.unless_over(request, worker.submit(asked, began))
        reply = REPLIES[asked.kind](asked, jobs, worker.model, self.name)
        request.scope["usage"] = reply.usage
        if asked.stream:
            return EventStream(worker, reply, self.limits.seconds)
        try:
            async with in_time(time.monotonic() + self.limits.seconds, self.limits.seconds):
                await self.unless_over(request, all_ended(jobs))
            return JSONResponse(reply.whole())
        finally:
            worker.release(jobs)

    @property
    def longest(self) -> int:
        return longest_of(self.worker)

    async def transcriptions(self, request: Request) -> Response:
        """The text of an uploaded sound: see transcriptions.py."""
        worker, seconds = self.listener, self.limits.seconds
        if worker is self.worker:
            self.able(hears(worker.model), "can't hear: --listen Qwen/Qwen3-ASR-0.6B")
        async with contextlib.AsyncExitStack() as stack:
            form = await stack.enter_async_context(self.ears.form_of(request))
            if worker.ends_at is not None:
                raise stopping()
            speech = HeardSound(worker, self.ears, form, seconds, longest_of(worker), self.limits.aligner())
            stack.callback(speech.close)
            request.scope["usage"] = speech.usage
            async with in_time(speech.ends_at, seconds):
                await self.unless_over(request, stack.enter_async_context(self.ears.free_one()))
                await self.unless_over(request, speech.begin())
                if speech.stream:
                    return SpeechStream(worker, speech, seconds, stack.pop_all())
                whole = await self.unless_over(request, speech.finish())
                return PlainTextResponse(whole) if isinstance(whole, str) else JSONResponse(whole)

    def able(self, can: bool, what: str) -> None:
        """Raises Refusal unless the model can do it."""
        if not can:
            raise Refusal(400, f"{self.name}: the model {what} names one that can", "model")

    async def speech(self, request: Request) -> Response:
        """A text as a sound: see speeches.py."""
        self.able(speaks(model := self.speaker.model), "can't speak: --speech Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice")
        seconds, body = self.limits.seconds, await self.body_of(request)
        try:
            sounding = await asyncio.to_thread(Sounding, model, body)
        except InputError as error:
            raise as_refusal(error, self.speaker, body) from None
        request.scope["usage"], ends_at = sounding.usage, time.monotonic() + seconds
        async with contextlib.AsyncExitStack() as stack:
            self.speakers.join(sounding)
            stack.callback(self.speakers.leave, sounding)
            async with in_time(ends_at, seconds):
                try:
                    first = await self.unless_over(request, sounding.next())
                    if not sounding.streams:
                        whole = await self.unless_over(request, sounding.whole(first))
                        return Response(whole, media_type=sounding.media)
                except InputError as error:
                    raise as_refusal(error, self.speaker) from None
            stack.pop_all()
            return SoundStream(self.speakers, sounding, first, ends_at, seconds)

    async def voices(self, request: Request) -> Response:
        """The voices of the model that speaks."""
        self.able(speaks(model := self.speaker.model), "can't speak: --speech Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice")
        return JSONResponse({"voices": [{"id": name, "name": name} for name in voice_names(model)]})

    async def models(self, request: Request) -> Response:
        """The models, the one that answers first, with the fields of OpenAI's form and of Anthropic's."""
        day, found = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)), dict[str, Body]()
        for worker in dict.fromkeys((self.worker, self.listener, self.speaker)):
            model, longest = worker.model, longest_of(worker)
            name = model_name(model)
            found[name] = {"id": name, "object": "model", "created": self.started, "owned_by": "qwen3",
                           "max_model_len": longest, "input_modalities": [
                               "text", *["image"] * sees(model), *["audio"] * hears(model)],
                           "output_modalities": ["audio" if speaks(model) else "text"], "type": "model",
                           "display_name": name, "created_at": day, "max_input_tokens": longest}
        if (wanted := request.path_params.get("name", self.name)) not in found:
            raise Refusal(404, f"there is no model {brief(wanted)}, but {', '.join(found)}", "model", "model_not_found")
        return JSONResponse(found[wanted] if request.path_params else {
            "object": "list", "data": [*found.values()], "has_more": False, "first_id": self.name,
            "last_id": [*found][-1]})

    async def page(self, request: Request) -> Response:
        return HTMLResponse(CHAT_PAGE, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer",
                                           "X-Content-Type-Options": "nosniff"})

    async def hello(self, request: Request) -> Response:
        return Response()  # Claude Code asks for it again and again

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self.name})

    # ---- Vectors and scores ------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        model, body = self.worker.model, known(await self.body_of(request), EMBEDDING_FIELDS)
        given, form = body.get("input"), body.get("encoding_format", "float")
        texts = [given] if isinstance(given, str) else given
        if form not in ("float", "base64"):
            raise Refusal(400, "encoding_format must be float or base64", "encoding_format")
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise Refusal(400, "input must be a text or a list of texts; token ids aren't taken, because clients make "
                          "them with OpenAI's tokenizer (LangChain: check_embedding_ctx_length=False)", "input")
        vectors = await self.computed(body, lambda: embed(model, texts, body.get("instruction"), body.get("dimensions"),
                                                          flag(body, "truncate")))
        data = [{"object": "embedding", "index": i, "embedding": vector.tolist() if form == "float" else
                 base64.b64encode(vector.astype("<f4").tobytes()).decode()} for i, vector in enumerate(vectors)]
        n = await asyncio.to_thread(lambda: sum(len(model.tokenizer.encode(text)) for text in texts))
        usage = {"prompt_tokens": n, "total_tokens": n}
        request.scope["usage"] = lambda: usage
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})

    async def computed(self, body: Body, function: Callable[[], Any]) -> Any:
        """The result of a function that the worker's thread calls. Raises Refusal for bad input."""
        try:
            return await self.worker.do(function)
        except InputError as error:
            raise as_refusal(error, self.worker, body) from None

    async def scores(self, body: Body, documents: list[Any]) -> np.ndarray:
        """How well each document answers the query; by the vectors' cosines if the model gives vectors."""
        model, query, task = self.worker.model, body.get("query"), body.get("instruction")
        texts: list[Any] = [document.get("text") if isinstance(document, dict) else document for document in documents]
        if not isinstance(query, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise Refusal(400, "query must be a text, and there must be a list of documents, which are texts", "query")
        if not model.embeds:
            return await self.computed(body, lambda: rerank(model, query, texts, task, flag(body, "truncate")))
        return await self.computed(body, lambda: embed(model, texts, None, None, flag(body, "truncate")) @ embed(
            model, [query], SEARCH if task is None else task)[0])

    async def rerank(self, request: Request) -> Response:
        """Jina's and Cohere's form, or with "texts" that of TEI."""
        body = known(await self.body_of(request), SCORES)
        given = body.get("texts", body.get("documents"))
        documents: list[Any] = given if isinstance(given, list) else []
        scores = await self.scores(body, documents)
        order = np.argsort(-scores, kind="stable").tolist()
        if "texts" in body:
            return JSONResponse([{"index": i, "score": float(scores[i])} |
                                 ({"text": documents[i]} if flag(body, "return_text") else {}) for i in order])
        shown = order[:whole(body, "top_n", len(order), 1, 10**9)]
        results = [{"index": i, "relevance_score": float(scores[i])} |
                   ({"document": documents[i]} if flag(body, "return_documents") else {}) for i in shown]
        return JSONResponse({"model": self.name, "results": results})

    # ---- Figures -----------------------------------------------------------------------------------------------------

    async def metrics(self, request: Request) -> Response:
        batch = self.worker.batch
        totals = sum((each.totals for each in {self.worker, self.listener, self.speaker}), Counter[str]())
        gauges = {"running": len(batch.running) if batch else 0, "waiting": len(batch.waiting) if batch else 0,
                  "slots": len(batch.slots) if batch else 0}
        names = ("answers_begun", "answers_ended", "cancelled", "prompt_tokens", "cached_tokens", "generated_tokens",
                 "first_token_seconds", "answer_seconds", "spoken_texts", "spoken_seconds")
        lines = [f"# TYPE qwen3_{name} gauge\nqwen3_{name} {value}\n" for name, value in gauges.items()]
        lines += [f"# TYPE qwen3_{name}_total counter\nqwen3_{name}_total {totals[name]}\n" for name in names]
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")


def longest_of(worker: Worker) -> int:
    """Most tokens of a prompt and its answer; 0 while the model is loading."""
    if (batch := worker.batch) is None:
        return 0
    return batch.longest if batch.model.source.kind.instead == "" and not batch.model.embeds else \
        batch.model.config.context_length


def make_app(worker: Worker, limits: Limits, listener: Worker | None = None,
             speaker: Worker | None = None) -> Starlette:
    """The application; `listener` and `speaker` have other models, which hear and speak."""
    server, workers = Server(worker, limits, listener, speaker), [*filter(None, (worker, listener, speaker))]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Requests with new schemas wait for each other in threads; the others must still find one.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        for each in workers:
            each.start()
        yield
        for threads in (server.large, server.eyes, server.ears.threads):  # here, where a signal's time still counts
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        for each in workers:
            await asyncio.to_thread(each.stop)
        server.grammars.close()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = brief(request.scope["path"])
        what = f"{path} doesn't take {request.method}"
        if error.status_code == 404:
            whose = next((f", which is {whose}" for begin, whose in FOREIGN.items() if path.startswith(begin)), "")
            what = f"there is no {path}{whose}: {SPOKEN}"
        return refusal_response(Refusal(error.status_code, what, headers=error.headers), request.scope)

    async def on_error(request: Request, error: Exception) -> Response:
        return refusal_response(as_refusal(error, worker), request.scope)

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def on_failure(request: Request, error: Exception) -> Response:
        log.error("a request to %s has failed", brief(request.scope["path"]), exc_info=error)
        return refusal_response(Refusal(500, "the server has failed at this request"), request.scope)

    posts = {path: partial(server.asked, answer=answer) for path, answer in ANSWERS.items()} | {
        "/v1/audio/transcriptions": server.transcriptions, "/v1/audio/speech": server.speech,
        "/v1/embeddings": server.embeddings,
        "/v1/rerank": server.rerank, "/rerank": server.rerank}
    gets = {"/": server.page, "/v1/models": server.models, "/v1/models/{name:path}": server.models,
            "/v1/audio/voices": server.voices,
            "/health": server.health, "/api/hello": server.hello, "/metrics": server.metrics}
    middleware = [Middleware(AuthMiddleware, limits=limits)]
    if limits.origins:
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=[*limits.origins], allow_methods=["*"],
                                        allow_headers=["*"]))
    middleware.insert(0, Middleware(Log, verbose=limits.verbose))
    return Starlette(
        routes=[*(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
                *(Route(path, handler, methods=["GET"]) for path, handler in gets.items())],
        middleware=middleware, lifespan=lifespan,
        exception_handlers={HTTPException: on_http, InputError: on_error, ClientDisconnect: on_gone,
                            Exception: on_failure})
