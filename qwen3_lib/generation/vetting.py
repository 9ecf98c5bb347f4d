"""Each new grammar is tried in a child process before this process compiles it, because strangers send grammars."""
import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

from tokenizer_utils import InputError, brief

class Busy(InputError):
    """Too much comes at once: the same may be asked again in a moment."""


LONGEST = 2**19  # characters of a grammar
SECONDS = 5  # until a child must have ended, on a busy machine, too; it computes for trial.SECONDS at most
WAIT = 3  # seconds for the children of other grammars
ONE = threading.Lock()  # held while a child runs: many of them would slow down the answers


def child_of(module: str) -> dict[str, Any]:
    """The arguments for subprocess with which a process of its own calls main() of this module."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {"args": [sys.executable, "-P", "-c", f"from {module} import main; main()"],
            "env": os.environ | {"PYTHONPATH": path}}


def check(grammar: str) -> None:
    """Raises InputError for a grammar that llguidance can't use, or that could end this process. Remembers grammars."""
    if len(grammar) > LONGEST:
        raise InputError(f"the schema has {len(grammar):,} characters; at most {LONGEST:,} are taken")
    if message := fault(grammar):
        raise InputError(f"the schema can't be used: {brief(message, 500)}")


@lru_cache(maxsize=64)
def fault(grammar: str) -> str:
    """What trial.fault says. Requests with the same new grammar wait for one child."""
    if not ONE.acquire(timeout=WAIT):
        raise Busy("other schemas are being compiled; try again")
    try:
        return tried(grammar)
    finally:
        ONE.release()


@lru_cache(maxsize=64)
def tried(grammar: str) -> str:
    """What trial.fault says in a child process."""
    try:
        child = subprocess.run(**child_of("qwen3_lib.generation.trial"), input=grammar.encode(), stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"the schema can't be used: it isn't compiled within {SECONDS} seconds") from error
    except OSError as error:
        raise InputError(f"no process can be started to compile the schema in: {error.strerror}") from error
    if child.returncode or not child.stdout:
        return "compiling it takes too much time or memory, or it is nested too deeply for llguidance"
    return str(json.loads(child.stdout))
