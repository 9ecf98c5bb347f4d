"""Each new grammar of a stranger is compiled on trial in a child process, before the server's own compiles it.

llguidance is native code: a grammar may end its process, or take minutes and gigabytes. The child imports this file, so
it begins with the standard library alone.
"""
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

VETTING_SECONDS, VETTING_MEMORY = 2, 2**28  # of the processor, and bytes, for a child
STACK = 2**20  # bytes: no system gives a thread less, so what fits here fits where the answer is computed
LASTS, WAIT = 5, 3  # seconds until a child must have ended, on a busy machine, too; for the children of other grammars
ONE_CHILD = threading.Lock()  # held while a child runs: many of them would slow down the answers
WAITING = threading.Semaphore(32)  # of the server's 64 threads wait for it, so that other requests find one


def child_of(module: str) -> dict[str, Any]:
    """The arguments for subprocess with which a process of its own calls main() of this module."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {"args": [sys.executable, "-P", "-c", f"from {module} import main; main()"],
            "env": os.environ | {"PYTHONPATH": path}}


def check(grammar: str) -> None:
    """Raises InputError for a grammar that llguidance can't use, or that could end this process. Remembers grammars."""
    from tokenizer_utils import InputError, brief
    if message := fault(grammar):
        raise InputError(f"the schema can't be used: {brief(message, 500)}")


@lru_cache(maxsize=64)
def fault(grammar: str) -> str:
    """What `tried` says. Requests with the same new grammar wait for one child."""
    from qwen3_lib.app.openai import Refusal
    busy = Refusal(503, "other schemas are being compiled; try again", headers={"Retry-After": "2"})
    if not WAITING.acquire(blocking=False):
        raise busy
    try:
        if not ONE_CHILD.acquire(timeout=WAIT):
            raise busy
        try:
            return tried(grammar)
        finally:
            ONE_CHILD.release()
    finally:
        WAITING.release()


@lru_cache(maxsize=64)
def tried(grammar: str) -> str:
    """What is wrong with a grammar, found out in a child process; or an empty text."""
    try:
        child = subprocess.run(**child_of(__name__), input=grammar.encode(), stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, timeout=LASTS)
    except subprocess.TimeoutExpired:
        return f"it isn't compiled within {LASTS} seconds"
    if child.returncode or not child.stdout:
        return "compiling it takes too much time or memory, or it is nested too deeply for llguidance"
    return str(json.loads(child.stdout))


# ---- In the child ----------------------------------------------------------------------------------------------------

def main() -> None:
    """Reads a grammar from stdin, and writes in JSON what is wrong with it."""
    grammar = sys.stdin.read()
    with contextlib.suppress(ImportError, ValueError):  # Windows has no such limits; a lower one may be set already
        import resource
        resource.setrlimit(resource.RLIMIT_CPU, (VETTING_SECONDS, VETTING_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (VETTING_MEMORY, VETTING_MEMORY))
    threading.stack_size(STACK)
    thread = threading.Thread(target=lambda: print(json.dumps(vetted_grammar(grammar))))
    thread.start()
    thread.join()


def vetted_grammar(grammar: str) -> str:
    """What llguidance says against a grammar, or an empty text."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    if message := LLMatcher.validate_grammar(grammar):
        return str(message)
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    LLMatcher(tokenizer, re.sub(r"<\[[^\]]*\]>", f"<[{Bytes.eos_token_id}]>", grammar), log_level=0).compute_bitmask()
    return ""


class Bytes:
    """A tokenizer with a token for each byte, as llguidance wants it."""
    eos_token_id, bos_token_id = 256, None
    tokens, special_token_ids = [*(bytes([i]) for i in range(256)), b"<end>"], [256]

    def __call__(self, text: bytes) -> list[int]:
        return [*text]
