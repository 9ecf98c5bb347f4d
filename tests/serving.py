"""A server in this process or in one of its own, and what tests ask of it."""
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
import uvicorn

from configs import ROOT
from qwen3_lib.generation.batch import Batch
from qwen3_lib.server import web
from qwen3_lib.server.protocol import Protocol
from qwen3_lib.server.web import Limits, make_app
from qwen3_lib.server.worker import Worker

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
TRANSCRIPTIONS = "/v1/audio/transcriptions"


class Served:
    """A server in this process."""

    def __init__(self, model, slots=4, longest=1000, kept=2**26, queue=64, wait=True, hears=None, speaks=None,
                 store=None, **limits):
        """`hears` and `speaks`: other models of the server."""
        self.model, self.errors = model, []
        self.worker = Worker(lambda: Batch(model() if callable(model) else model, slots, longest, kept, store), queue,
                             self.errors.append)
        others = [each and Worker(lambda each=each: Batch(each, 2, 150), queue, self.errors.append)
                  for each in (hears, speaks)]
        app = make_app(self.worker, Limits(**{"seconds": 60, "hosts": web.LOCAL} | limits), *others)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, http=Protocol, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if wait:
            until(lambda: all(each.batch is not None for each in (self.worker, *filter(None, others))))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive() and not self.errors

    def client(self, kind=openai.OpenAI, **options):
        return kind(base_url=f"{self.url}/v1", **{"api_key": "x", "max_retries": 0, "timeout": 60} | options)

    def ask(self, path, body=None, headers=None):
        """(status, JSON or text, headers) of a request; a body that is no bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=30) as got:
                status, text, given = got.status, got.read().decode(), got.headers
        except urllib.error.HTTPError as error:
            status, text, given = error.code, error.read().decode(), error.headers
        return status, json.loads(text) if given["content-type"] == "application/json" else text, given

    def idle(self):
        until(lambda: self.worker.batch.idle and not self.worker.jobs)


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't happen"
        time.sleep(0.005)


def streamed(stream):
    """(content, reasoning, calls, finish reasons, the chunks) of a stream; calls are put together from their pieces."""
    chunks, calls, content, reasoning, reasons = [], {}, "", "", []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                known["arguments"] += call.function.arguments or ""
    return content, reasoning, [*calls.values()], reasons, chunks


def endless(served, path="/v1/completions", **fields):
    """A connection with a stream that goes on for a while, after its first chunks."""
    body = json.dumps({"prompt": "once", "max_tokens": 5000, "stream": True, "logit_bias": {
        str(token): -100 for token in served.worker.model.eos_token_ids}} | fields).encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def form(sound: bytes, fields: str = "") -> tuple[bytes, dict]:
    """(body, headers) of an upload; fields: parts of the form before it."""
    body = f'{fields}--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode() + sound
    return body + b"\r\n--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}


def received(connection, word):
    """What a connection gives until it has given this word."""
    text = b""
    while word not in text:
        assert (part := connection.recv(2**16)), text
        text += part
    return text


def started(*options, program=(ROOT / "qwen3_server.py",), **variables):
    """(the process of a server at a free port, its lines until it is ready: the last ends with its address)"""
    process = subprocess.Popen([sys.executable, *program, "--port", "0", "--slots", "2", *options], cwd=ROOT, text=True,
                               stderr=subprocess.PIPE, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"} | variables)
    lines = [process.stderr.readline()]
    while lines[-1] and "for clients" not in lines[-1]:
        lines.append(process.stderr.readline())
    return process, lines
