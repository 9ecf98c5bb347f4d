"""/v1/audio/speech: a text as it is spoken, or its whole sound; and who speaks at the same time."""
from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from qwen3 import InputError, Model, log
from qwen3_lib.app.fields import Body, Refusal, known
from qwen3_lib.app.objects import usage_of
from qwen3_lib.app.openai import Value
from qwen3_lib.app.talk import UNKNOWN, in_16_bits, wav_header
from qwen3_lib.generation.choir import AT_ONCE, Outcome, Singer, sing
from qwen3_lib.io.errors import brief
from qwen3_lib.server.replies import typed_event
from qwen3_lib.server.worker import Worker, out_of_time, stopping
from qwen3_tts import speak, voices_of
from tokenizer_utils import library_errors

LONGEST_INPUT = 4096  # characters, as OpenAI's
AHEAD = 250  # frames, 20 seconds: a client that reads more slowly is waited for
SPEECH_FIELDS = ("input", "voice", "instructions", "response_format", "speed", "stream_format", "language", "seed",
                 "temperature")
# response_format -> media type, and what soundfile calls it, if it needs soundfile and is only written as a whole
FORMS: dict[str, tuple[str, tuple[str, str] | None]] = {
    "wav": ("audio/wav", None), "pcm": ("audio/pcm", None), "flac": ("audio/flac", ("FLAC", "PCM_16")),
    "opus": ("audio/ogg", ("OGG", "OPUS")), "mp3": ("audio/mpeg", ("MP3", "MPEG_LAYER_III"))}
FAILED = "the server has failed at this request"
ANY = "default"  # the voice of a model that makes one from a description


def voice_names(model: Model) -> list[str]:
    """The voices that clients may name. Raises InputError for a model that takes its voice from a sound."""
    if (voices := voices_of(model)).kind == "base":
        raise InputError(f"{model.path}: this model has no voice of its own, and a server takes none from a sound: "
                         "qwen3_tts.py --clone does; a CustomVoice has voices")
    return [*voices.names] or [ANY]


class Sounding:
    """A text that is spoken for a client: `pieces` come from the Speakers, None at last."""

    def __init__(self, model: Model, body: Body):
        """Checks the fields. Raises InputError; Refusal names the field."""
        body = known(body, SPEECH_FIELDS)
        text, voices = body.get("input"), voices_of(model)
        if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_INPUT:
            raise Refusal(400, f"input must be a text of 1 to {LONGEST_INPUT:,} characters", "input")
        if body.get("speed", 1) != 1:
            raise Refusal(400, "speed can only be 1: the model decides how fast it speaks", "speed")
        if body.get("seed") == -1:  # as for texts, see body_options
            del body["seed"]
        can = [form for form, (_, library) in FORMS.items() if library is None or find_spec("soundfile")]
        self.form = body.get("response_format", "mp3" if "mp3" in can else "wav")
        if self.form not in can:
            more = "" if "mp3" in can else "; more of them with: pip install soundfile"
            raise Refusal(400, f"response_format must be one of {', '.join(can)}{more}", "response_format")
        stream = body.get("stream_format", "audio")
        if stream not in ("audio", "sse"):
            raise Refusal(400, "stream_format must be audio or sse", "stream_format")
        voice = body.get("voice")
        voice = voice.get("id") if isinstance(voice, dict) else voice
        names = voice_names(model)
        if voice is not None and (not isinstance(voice, str) or voice.lower() not in names):
            raise Refusal(400, f"voice must be one of {', '.join(names)}, not {brief(repr(voice), 80)}", "voice")
        instructions = body.get("instructions") or None
        if not isinstance(instructions, str | None) or instructions and len(instructions) > LONGEST_INPUT:
            raise Refusal(400, f"instructions must be a text of at most {LONGEST_INPUT:,} characters", "instructions")
        how: dict[str, Any] = {"describe": instructions} if voices.kind == "voice_design" else \
            {"instruct": instructions} | ({"voice": voice} if voices.names else {})
        speech = speak(model, text, **how, **{name: body.get(name) for name in ("language", "seed", "temperature")})
        self.media, self.library = FORMS[self.form]
        self.streams, self.sse, self.rate = self.library is None or stream == "sse", stream == "sse", speech.rate
        self.n_prompt, self.singer = len(model.tokenizer.encode(text, False)), Singer(speech)
        self.pieces: asyncio.Queue[Outcome] = asyncio.Queue()
        self.read: Callable[[], None] = lambda: None  # called after each piece

    async def next(self) -> np.ndarray | None:
        """The next samples [n], None at the end. Raises InputError."""
        piece = await self.pieces.get()
        self.read()
        if isinstance(piece, InputError):
            raise piece
        return piece

    def coded(self, samples: np.ndarray, first: bool) -> bytes:
        """Samples as the client gets them in a stream."""
        data = in_16_bits(samples).tobytes()
        return wav_header(self.rate, UNKNOWN) + data if first and self.form == "wav" else data

    async def whole(self, first: np.ndarray | None) -> bytes:
        """All of the sound, in its form."""
        parts = list[np.ndarray]()
        while first is not None:
            parts.append(first)
            first = await self.next()
        samples = in_16_bits(np.concatenate([*parts, np.empty(0, np.float32)]))
        return await asyncio.to_thread(encoded, samples, self.rate, *self.library or ("WAV", "PCM_16"))

    def usage(self) -> Value:
        return usage_of(self.n_prompt, self.singer.n_frames)

    def delta(self, data: bytes) -> bytes:
        return typed_event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}).encode()

    def done(self) -> bytes:
        used = {"input_tokens": self.n_prompt, "output_tokens": self.singer.n_frames}
        return typed_event({"type": "speech.audio.done", "usage": used | {"total_tokens": sum(used.values())}}).encode()


def encoded(samples: np.ndarray, rate: int, form: str, kind: str) -> bytes:
    """The bytes of a file that soundfile writes."""
    import soundfile
    file = io.BytesIO()
    with library_errors(f"the sound can't be written as {form}"):
        soundfile.write(file, samples, rate, format=form, subtype=kind)
    return file.getvalue()


class Speakers:
    """The texts that are spoken, at most AT_ONCE at a time, each one frame further in a step of the worker's thread."""

    def __init__(self, worker: Worker):
        self.worker, self.all, self.wake = worker, dict[Sounding, None](), asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def join(self, sounding: Sounding) -> None:
        """Begins to speak. Raises Refusal if too many texts are spoken, or wait."""
        if self.worker.ends_at is not None:
            raise stopping()
        if len(self.all) >= AT_ONCE + self.worker.queue_size:
            raise Refusal(429, f"{len(self.all)} texts are spoken or wait already; try again later", code="queue_full",
                          headers={"Retry-After": "2"})
        sounding.read = self.wake.set
        self.all[sounding] = None
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.speak())

    def leave(self, sounding: Sounding) -> None:
        """Ends it after the frame that is being computed."""
        self.worker.totals["cancelled"] += sounding in self.all
        self.all.pop(sounding, None)
        self.wake.set()

    async def speak(self) -> None:
        while self.all:
            self.wake.clear()
            ready = [each for each in [*self.all][:AT_ONCE] if each.pieces.qsize() < AHEAD]
            if not ready:
                await self.wake.wait()
                continue
            try:
                outcomes = await self.worker.do(lambda: sing([each.singer for each in ready]))
            except Exception as error:  # whatever it is, the clients must learn of it
                log.exception("the texts that are spoken have failed")
                outcomes = [error if isinstance(error, InputError) else Refusal(500, FAILED)] * len(ready)
            if self.worker.ends_at is not None and time.monotonic() > self.worker.ends_at:
                outcomes = [stopping()] * len(ready)
            for each, outcome in zip(ready, outcomes):
                each.pieces.put_nowait(outcome)
                if isinstance(outcome, np.ndarray):
                    self.worker.totals["spoken_seconds"] += len(outcome) / each.rate  # type: ignore[assignment]
                elif each in self.all:  # else its client has left
                    del self.all[each]
                    self.worker.totals.update(spoken_texts=1, given_up=int(outcome is not None))


class SoundStream(StreamingResponse):
    """A sound as it is spoken, as bytes or in events; the work ends with the response, whatever ends that."""

    def __init__(self, speakers: Speakers, sounding: Sounding, first: np.ndarray | None, ends_at: float,
                 seconds: float):
        """`first`: its first samples; ends_at: when it must be there, by time.monotonic, after so many seconds."""
        self.speakers, self.sounding, self.first = speakers, sounding, first
        self.ends_at, self.seconds = ends_at, seconds
        media = "text/event-stream" if sounding.sse else f"{sounding.media}" + f";rate={sounding.rate}" * (
            sounding.form == "pcm")
        super().__init__((), media_type=media, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.speakers.leave(self.sounding)

    async def stream_response(self, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sounding, piece, first = self.sounding, self.first, True
        try:
            async with asyncio.timeout_at(self.ends_at):
                if sounding.library is not None:
                    await write(sounding.delta(await sounding.whole(piece)))
                    piece = None
                while piece is not None:
                    if data := sounding.coded(piece, first):
                        await write(sounding.delta(data) if sounding.sse else data)
                        first = False
                    piece = await sounding.next()
        except (InputError, TimeoutError) as error:
            if not sounding.sse:
                return  # the connection ends without the end of the sound, so the client knows
            refusal = error if isinstance(error, Refusal) else out_of_time(self.seconds) if isinstance(
                error, TimeoutError) else Refusal(500, str(error))
            return await write(typed_event({"type": "error"} | refusal.value).encode(), False)
        await write(sounding.done() if sounding.sse else b"", False)
