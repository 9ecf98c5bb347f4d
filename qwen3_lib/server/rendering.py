"""Chat templates run in a process of their own, because a template is a program that somebody else wrote.

It may take seconds of the processor and memory for each conversation, but no more than that.
"""
from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from typing import Any

import tokenizers

from qwen3 import log
from qwen3_lib.app.fields import Refusal
from qwen3_lib.server.vetting import child_of
from tokenizer_utils import InputError, Tokenizer

RENDERING_SECONDS, RENDERING_MEMORY = 5, 2**30  # of the processor for a conversation; bytes
LONGEST_PROMPT, SHORT = 2**25, 2**16  # characters of a prompt, and of a short conversation in JSON


class Child:
    """A process that renders one conversation after another."""

    def __init__(self, about: list[Any]):
        self.about, self.lock = about, threading.Lock()
        self.start()  # now, because it takes 0.3 s

    def start(self) -> None:
        self.process = subprocess.Popen(**child_of(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, encoding="utf-8")
        self.write(json.dumps(self.about))

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, line: str) -> str:
        """What the process writes for a line; an empty text where that ends it. Raises Refusal if it has no time."""
        if not self.lock.acquire(timeout=RENDERING_SECONDS):
            raise Refusal(503, "other conversations are being rendered; try again", headers={"Retry-After": "2"})
        try:
            try:
                self.write(line)
                assert self.process.stdout is not None
                answer = self.process.stdout.readline()
            except OSError:  # it has ended
                answer = ""
            if not answer:
                log.warning("a chat template was given up, and its process started again")
                self.end()
                self.start()
            return answer
        finally:
            self.lock.release()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Renderer(Tokenizer):
    """A tokenizer that lets child processes render. A conversation that ends its child gets an InputError."""

    def __init__(self, tokenizer: Tokenizer, source: str):
        super().__init__(tokenizer.backend, tokenizer.chat_template, tokenizer.named_tokens, source)
        # Long conversations have a child of their own, so that they hold up each other only.
        self.short, self.long = (Child([tokenizer.chat_template, tokenizer.named_tokens, source]) for _ in range(2))

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        line = json.dumps([args, options])
        if not (answer := (self.short if len(line) <= SHORT else self.long).answer(line)):
            raise InputError(f"the chat template was given up: it takes more than {RENDERING_SECONDS} seconds or "
                             f"{RENDERING_MEMORY / 1e9:.0f} GB")
        text, error = json.loads(answer)
        if error is not None:
            raise InputError(error)
        return str(text)

    def end(self) -> None:
        self.short.end()
        self.long.end()


def main() -> None:
    """Reads a tokenizer's template, then conversations, from stdin, a line of JSON for each; writes [text, error]."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes stdin when it ends
    with contextlib.suppress(ImportError, ValueError):  # Windows has no such limit; a lower one may be set already
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (RENDERING_MEMORY, RENDERING_MEMORY))
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), *json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        limit(RENDERING_SECONDS)
        print(json.dumps(rendered(tokenizer, *json.loads(line))), flush=True)
        limit(0)


def limit(seconds: float) -> None:
    """Ends this process when it has computed for so long; 0: never."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def rendered(tokenizer: Tokenizer, args: list[Any], options: dict[str, Any]) -> tuple[str | None, str | None]:
    """(the text of a conversation, or None; what is wrong)"""
    try:
        text = tokenizer.apply_chat_template(*args, **options)
    except InputError as error:
        return None, str(error)
    if len(text) > LONGEST_PROMPT:
        return None, f"the chat template has written {len(text):,} characters; at most {LONGEST_PROMPT:,} are taken"
    return text, None
