"""A grammar is compiled on trial, in a process of its own: see vetting.py, which starts it.

llguidance is native code. A grammar may end its process, or take minutes and gigabytes.
"""
import contextlib
import json
import re
import sys
import threading

SECONDS, MEMORY = 2, 2**28  # of the processor; bytes
STACK = 2**20  # bytes: no system gives a thread less, so what fits here fits where the answer is computed


def main() -> None:
    """Reads a grammar from stdin, and writes in JSON what is wrong with it."""
    grammar = sys.stdin.read()
    with contextlib.suppress(ImportError, ValueError):  # Windows has no such limits; a lower one may be set already
        import resource
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(json.dumps(tried(grammar)))


def tried(grammar: str) -> str:
    """What `fault` says, in a thread whose stack is small."""
    found: list[str] = []
    threading.stack_size(STACK)
    thread = threading.Thread(target=lambda: found.append(fault(grammar)))
    thread.start()
    thread.join()
    return found[0]


def fault(grammar: str) -> str:
    """What is wrong with a grammar, or an empty text."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    if message := LLMatcher.validate_grammar(grammar):
        return str(message)
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    matcher = LLMatcher(tokenizer, re.sub(r"<\[[^\]]*\]>", f"<[{Bytes.eos_token_id}]>", grammar), log_level=0)
    matcher.compute_bitmask()
    nothing = matcher.is_error() and matcher.get_error().startswith("NoExtension")
    return "no answer fits it, because it refers to itself without an end" if nothing else ""


class Bytes:
    """A tokenizer with a token for each byte, as llguidance wants it."""
    eos_token_id, bos_token_id = 256, None
    tokens, special_token_ids = [*(bytes([i]) for i in range(256)), b"<end>"], [256]

    def __call__(self, text: bytes) -> list[int]:
        return [*text]
