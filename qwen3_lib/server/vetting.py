"""Strangers' grammars are compiled, and followed token by token, in processes of their own, which have limits.

llguidance is native code: a grammar may end its process, or take minutes and gigabytes, to compile or at any token. One
process has read the tokenizer; its forks compile a grammar each, and theirs follow it in an answer each. They import
this file, so it begins with the standard library alone.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VETTING_SECONDS, TOKEN_SECONDS = 2, 0.01  # of the processor, to compile a grammar or follow it; more for each token
VETTING_MEMORY, ANSWER_MEMORY = 2**28, 2**26  # bytes for a grammar; then for an answer
KEPT_MEMORY, MOST_MEMORY = 2**28, 2**30  # bytes of grammars that are kept for later answers; of all
LASTS, WAIT = 10, 3  # seconds until a process must have answered, on a busy machine, too; for others' grammars
ONE_CHILD = threading.Lock()  # held while a grammar is compiled: many of them would slow down the answers
WAITING = threading.Semaphore(32)  # of the server's 64 threads wait for it, so that other requests find one
TOO_LARGE = "the schema can't be used: compiling it takes too much time or memory, or it is nested too deeply for " \
            "llguidance"
TOO_SLOW = "the schema can't be followed: the next token takes too much time or memory"


def child_of(module: str) -> dict[str, Any]:
    """The arguments for subprocess with which a process of its own calls main() of this module."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {"args": [sys.executable, "-P", "-c", f"from {module} import main; main()"],
            "env": os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}}


def fork_of(conn: Connection) -> Connection:
    """A connection to a fork of the process at the other end, which waits in `forked`. Raises OSError if it is gone."""
    ours, theirs = socket.socketpair()
    with theirs, socket.fromfd(conn.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as through:
        socket.send_fds(through, [b"f"], [theirs.fileno()])
    return Connection(ours.detach())


def received(conn: Connection, seconds: float, otherwise: str) -> tuple[Any, int]:
    """(News or an InputError, bytes of memory) as `send` writes them; the error `otherwise` if nothing comes."""
    from qwen3_lib.generation.matcher import News
    from tokenizer_utils import InputError
    try:
        head, _, mask = (conn.recv_bytes() if conn.poll(seconds) else b"").partition(b"\n")
    except (EOFError, OSError):  # the process has ended
        head = b""
    certain, stopped, n_bytes, error = json.loads(head) if head else ([], False, 0, otherwise)
    return InputError(error) if error else News(certain, mask, stopped), n_bytes


class Following:
    """A Matcher in a process of its own: see there."""

    def __init__(self, conn: Connection, first: Any):
        self.conn = conn
        self.found = first  # News or an InputError

    def take(self, token: int) -> None:
        self.found, self.ends_at = None, time.monotonic() + LASTS
        with contextlib.suppress(OSError):  # then nothing comes back
            self.conn.send_bytes(b"%d" % token)

    def arrived(self, seconds: float) -> bool:
        if self.found is None and (self.conn.poll(seconds) or time.monotonic() > self.ends_at):
            self.found = received(self.conn, 0, TOO_SLOW)[0]
        return self.found is not None

    def news(self) -> Any:
        while not self.arrived(1):
            pass
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Compiled:
    """A grammar in a process of its own: a call gives what follows it in an answer."""

    def __init__(self, conn: Connection, first: Any, n_bytes: int):
        self.conn, self.first, self.n_bytes = conn, first, n_bytes

    def __call__(self) -> Following:
        from tokenizer_utils import InputError
        try:
            return Following(fork_of(self.conn), self.first)
        except OSError as error:
            raise InputError("the schema's process has ended; try again") from error

    @property
    def is_alive(self) -> bool:
        return not self.conn.poll()  # there is nothing to read but the end


class Grammars:
    """The grammars of a model, of which the last ones are kept."""

    def __init__(self) -> None:
        self.conn: Connection | None = None  # to the process that has read the tokenizer
        self.starting, self.living = threading.Lock(), weakref.WeakSet[Compiled]()
        self.kept = lru_cache(maxsize=16)(self.tried)

    def matchers(self, model: Any, grammar: str) -> Callable[[], Any]:
        """What gives a Matcher for each answer. Raises InputError for a grammar that isn't compiled within limits."""
        from qwen3_lib.generation.schema import matchers
        from tokenizer_utils import InputError
        if not hasattr(os, "fork") or find_spec("llguidance") is None:  # Windows: no limits there
            return matchers(model, grammar)
        self.start(model)
        found = self.kept(grammar)
        if isinstance(found, Compiled) and not found.is_alive:
            self.kept.cache_clear()
            found = self.kept(grammar)
        if isinstance(found, str):
            raise InputError(found)
        return found

    def start(self, model: Any) -> None:
        """Starts the process that reads the tokenizer, unless it runs: it takes a second for 151,936 tokens."""
        from qwen3_lib.app.fields import Refusal
        from qwen3_lib.generation.schema import about_tokens
        with self.starting:
            if self.conn is not None and not self.conn.poll():
                return
            self.close()
            ours, theirs = socket.socketpair()
            about = json.dumps([model.tokenizer.backend.to_str(), *about_tokens(model)])
            with theirs:
                self.process = subprocess.Popen(**child_of(__name__), stdin=theirs.fileno(), stderr=subprocess.DEVNULL)
            self.conn = Connection(ours.detach())
            try:
                self.conn.send_bytes(about.encode())
                self.conn.recv_bytes()
            except (EOFError, OSError) as error:
                raise Refusal(500, "the process that follows schemas has ended") from error

    def close(self) -> None:
        """Ends the processes."""
        self.kept.cache_clear()
        if self.conn is not None:
            self.conn.close()
            self.process.kill()
            self.process.wait()

    def tried(self, grammar: str) -> Compiled | str:
        """The grammar in its process, or what is wrong with it."""
        from qwen3_lib.app.fields import Refusal
        busy = Refusal(503, "other schemas are being compiled; try again", headers={"Retry-After": "2"})
        if not WAITING.acquire(blocking=False):
            raise busy
        try:
            if not ONE_CHILD.acquire(timeout=WAIT):
                raise busy
            try:
                return self.compiled(grammar)
            finally:
                ONE_CHILD.release()
        finally:
            WAITING.release()

    def compiled(self, grammar: str) -> Compiled | str:
        from qwen3_lib.app.fields import Refusal
        if sum(each.n_bytes for each in self.living) > KEPT_MEMORY:
            self.kept.cache_clear()  # those of answers that run stay
        if sum(each.n_bytes for each in self.living) > MOST_MEMORY:
            raise Refusal(503, "others' schemas take the memory; try again", headers={"Retry-After": "10"})
        assert self.conn is not None
        try:
            conn = fork_of(self.conn)
            conn.send_bytes(grammar.encode())
        except OSError:  # the process has ended
            return TOO_LARGE
        first, n_bytes = received(conn, LASTS, TOO_LARGE)
        if isinstance(first, Exception):
            return str(first)
        self.living.add(found := Compiled(conn, first, n_bytes))
        return found


# ---- In the processes ------------------------------------------------------------------------------------------------

def main() -> None:
    """Reads a tokenizer, and becomes a process for each grammar, and for each answer."""
    from qwen3_lib.generation.matcher import Matcher, compiled_grammar
    from tokenizer_utils import InputError
    for number in (signal.SIGINT, signal.SIGTERM):  # for the server, which closes its connections when it ends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave nothing behind
    conn = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # else each fork would hold this connection, too
    text, n_rows, ends = json.loads(conn.recv_bytes())
    from llguidance import LLTokenizer
    tokens = LLTokenizer(text, n_vocab=n_rows, eos_token=ends)
    del text
    conn.send_bytes(b"ready")

    conn = forked(conn)  # from here on, this is a process for a grammar
    grammar, before = conn.recv_bytes().decode(), memory(VETTING_MEMORY)
    try:
        with limited(VETTING_SECONDS):
            matcher = Matcher(tokens, compiled_grammar(tokens, grammar))
            news = matcher.news()
        send(conn, news, memory(ANSWER_MEMORY) - before)

        conn, left = forked(conn), float(VETTING_SECONDS)  # and from here on, for an answer
        while True:
            matcher.take(int(conn.recv_bytes()))
            with limited(left) as rest:
                news = matcher.news()
            send(conn, news)
            left = min(rest[0] + TOKEN_SECONDS, VETTING_SECONDS)
    except InputError as error:
        send(conn, error=str(error))


def send(conn: Connection, news: Any = ((), b"", False), n_bytes: int = 0, error: str = "") -> None:
    certain, mask, stopped = news
    conn.send_bytes(json.dumps([certain, stopped, n_bytes, error]).encode() + b"\n" + mask)


def forked(conn: Connection) -> Connection:
    """Forks at each request of `fork_of` -> in the fork, its connection. The process itself ends with its own one."""
    with socket.socket(fileno=os.dup(conn.fileno())) as through:
        conn.close()
        while True:
            _, [*fds], _, _ = socket.recv_fds(through, 1, 1)
            if not fds:
                sys.exit()
            if os.fork() == 0:
                return Connection(fds[0])
            os.close(fds[0])


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[list[float]]:
    """Ends this process if the block computes for longer -> [the seconds that are left], after the block."""
    rest = list[float]()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield rest
    finally:
        rest.append(signal.setitimer(signal.ITIMER_PROF, 0)[0])


def memory(more: int) -> int:
    """The bytes of memory of this process, which may take so many more; 0 where the system doesn't say."""
    if not Path("/proc/self/statm").exists():
        return 0
    import resource
    n = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with contextlib.suppress(ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (n + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return n
