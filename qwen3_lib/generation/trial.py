"""A grammar is compiled on trial, in a process of its own: see vetting.py, which starts it.

llguidance is native code. A grammar may end its process, or take minutes and gigabytes.
"""
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SECONDS, MEMORY = 2, 2**28  # of the processor; bytes
STACK = 2**20  # bytes: no system gives a thread less, so what fits here fits where the answer is computed
SEARCH = 0.5  # seconds to find the part at fault
# Keywords with parts that are schemas, by name or number; those of $defs come last, because not all of them are used.
PARTS = ("properties", "patternProperties", "prefixItems", "items", "additionalProperties", "anyOf", "oneOf", "allOf",
         "$defs", "definitions")


def main() -> None:
    """Reads a grammar from stdin, and writes in JSON what is wrong with it."""
    grammar = sys.stdin.read()
    with contextlib.suppress(ImportError, ValueError):  # Windows has no such limits; a lower one may be set already
        import resource
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(json.dumps(tried(grammar)))


def tried(grammar: str) -> tuple[str, str]:
    """What `fault` says, in a thread whose stack is small."""
    found: list[tuple[str, str]] = []
    threading.stack_size(STACK)
    thread = threading.Thread(target=lambda: found.append(fault(grammar)))
    thread.start()
    thread.join()
    return found[0]


def fault(grammar: str) -> tuple[str, str]:
    """(the place, in a JSON Schema, and what is wrong with it); the message is "" if nothing is."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    place = ""
    if message := LLMatcher.validate_grammar(grammar):
        schema = json.loads(grammar)["grammars"][0].get("json_schema")
        if isinstance(schema, dict):
            named = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

            def fails(part: dict[str, Any]) -> bool:
                text = json.dumps({"grammars": [{"json_schema": named | part}]})
                return bool(LLMatcher.validate_grammar(text) == message)

            place = f" at {faulty(schema, fails, time.process_time() + SEARCH)}"
        return place, message
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    matcher = LLMatcher(tokenizer, re.sub(r"<\[[^\]]*\]>", f"<[{Bytes.eos_token_id}]>", grammar), log_level=0)
    matcher.compute_bitmask()
    nothing = matcher.is_error() and matcher.get_error().startswith("NoExtension")
    return "", "no answer fits it, because it refers to itself without an end" if nothing else ""


class Bytes:
    """A tokenizer with a token for each byte, as llguidance wants it."""
    eos_token_id, bos_token_id = 256, None
    tokens, special_token_ids = [*(bytes([i]) for i in range(256)), b"<end>"], [256]

    def __call__(self, text: bytes) -> list[int]:
        return [*text]


def faulty(schema: dict[str, Any], fails: Callable[[dict[str, Any]], bool], end: float, at: str = "#") -> str:
    """The place of the innermost part of a schema that fails alone, too, as a JSON pointer; found until then."""
    parts: list[tuple[str, Any]] = []
    for key in (key for key in PARTS if key in schema):
        value, by_name = schema[key], key not in ("items", "additionalProperties")
        parts += [(f"{key}/{name}", part) for name, part in value.items()] if by_name and isinstance(value, dict) else \
            [(f"{key}/{i}", part) for i, part in enumerate(value)] if isinstance(value, list) else [(key, value)]
    for place, part in parts:
        if time.process_time() > end:
            break
        if isinstance(part, dict) and fails(part):
            return faulty(part, fails, end, f"{at}/{place}")
    return at
