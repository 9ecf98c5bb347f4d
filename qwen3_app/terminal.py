"""What is printed and how: answers on stdout; notes, statistics and errors on stderr."""
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO

from qwen3 import Completion
from qwen3_io.errors import InputError
from tokenizer_utils import split_stream


class OutputError(InputError):
    """The answer can't be written, or nothing more be read: a conversation can't go on."""


DIM, NORMAL = "\x1b[2m", "\x1b[0m"


def harmless(text: str, stream: TextIO) -> str:
    """The text without control characters, if a terminal would obey them: neither a model nor a file may command it."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text) if stream.isatty() else text


def note(text: str) -> None:
    """Prints a line to stderr. Where nobody can read it, nothing else is lost."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(harmless(text, sys.stderr), file=sys.stderr, flush=True)


def coloured() -> bool:
    """True if stdout is a terminal whose owner has nothing against colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write(text: str, dim: bool = False) -> None:
    """Prints a piece of the answer. Raises OutputError when stdout was closed (`| head -1`) or its disk is full."""
    text = harmless(text, sys.stdout)
    if dim and text and coloured():
        text = DIM + text + NORMAL
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain again when it exits
        raise OutputError(f"the answer could not be written to stdout: {error.strerror}") from error


def print_answer(completion: Completion, hide_thinking: bool = False) -> None:
    """Streams an answer: its thought dimmed (or hidden), and each tool call as a line of JSON. Ends with a newline."""
    started, held, last = False, [], ""
    try:
        for kind, piece in split_stream(completion, completion.think_open_in_prompt):
            if hide_thinking:
                piece = "" if kind == "thinking" else piece if started else piece.lstrip("\n")
            if kind == "call":
                held.append(piece)  # until it is known whether it is one
            elif piece:
                write(piece, dim=kind == "thinking")
                started, last = started or kind == "content", piece[-1]
        calls = completion.answer.tool_calls
        rest = "\n".join(json.dumps(call, ensure_ascii=False) for call in calls) or "".join(held)
        if rest:
            write(rest if last in ("", "\n") else "\n" + rest)
            last = rest[-1]
    finally:
        if last != "\n":
            write("\n")


def print_raw(completion: Completion) -> None:
    """Streams the text as it comes."""
    try:
        for piece in completion:
            write(piece)
    finally:
        write("\n")


def print_json(value: dict) -> None:
    """Prints a value as one line of JSON."""
    write(json.dumps(value, ensure_ascii=False) + "\n")


def as_json(completion: Completion, n_logprobs: int | None) -> dict:
    """A finished answer as an object: its parts, why it ended, how many tokens, and the seconds they took."""
    answer, n = completion.answer, len(completion.token_ids)
    value = {
        "text": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": answer.tool_calls,
        "finish_reason": "tool_calls" if answer.tool_calls else completion.finish_reason,
        "prompt_tokens": len(completion.prompt_ids),
        "cached_tokens": completion.cached_tokens,
        "completion_tokens": n,
        "seconds_to_first_token": round(completion.times[1] - completion.times[0], 4) if n else None,
        "seconds": round(completion.times[-1] - completion.times[0], 4),
    }
    if n_logprobs is not None:
        value["logprobs"] = list(logprob_objects(completion))
    return value


def logprob_objects(completion: Completion) -> Iterable[dict]:
    """The recorded logprobs as objects: the token's id, its text, its logprob, and the same of those most likely."""
    def described(token: int, logprob: float) -> dict:
        return {"id": token, "token": completion.model.tokenizer.decode([token]), "logprob": round(logprob, 5)}

    for token, logprob, top in completion.logprobs:
        yield described(token, logprob) | {"top": [described(*other) for other in top]}


def statistics(completion: Completion) -> str:
    """One line: tokens, their speed, and the memory."""
    times, parts = completion.times, []
    n_prompt, n_cached, n_answer = len(completion.prompt_ids), completion.cached_tokens, len(completion.token_ids)
    if n_answer > 0:
        first = times[1] - times[0]
        cached = f" ({n_cached} from the cache)" if n_cached else ""
        parts.append(f"prompt: {n_prompt} tokens{cached}, {(n_prompt - n_cached) / first:.1f} tokens/s, "
                     f"first token after {first:.2f} s")
    speed = f", {(n_answer - 1) / (times[-1] - times[1]):.1f} tokens/s" if n_answer > 1 else ""
    parts.append(f"answer: {n_answer} tokens{speed}")
    if (peak := peak_memory()) is not None:
        parts.append(f"peak memory: {peak / 1e9:.2f} GB")
    return " | ".join(parts)


def cut_note(completion: Completion, option: str = "--max-tokens") -> str | None:
    """A sentence for stderr if the answer was cut off; None if it ended by itself. `option` sets the longest answer."""
    if completion.finish_reason != "length":
        return None
    n, context, answer = len(completion.token_ids), completion.model.config.context_length, completion.answer
    full = len(completion.prompt_ids) + n >= context
    if answer.reasoning_truncated or answer.reasoning and not answer.content.strip() and not answer.tool_calls:
        rest = f"and the context of {context} tokens is full" if full else f"raise {option} for more"
        return f"All {n} tokens went into the thought, so there is no answer yet: {rest}."
    reason = f"the context of {context} tokens is full" if full else f"raise {option} for more"
    return f"The answer was cut off after {n} tokens: {reason}."


def peak_memory() -> int | None:
    """The most memory the process has had at a time, in bytes; None where the system doesn't tell."""
    try:
        import resource  # Unix only
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
