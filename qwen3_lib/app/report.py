"""An answer on a terminal, in a pipe or as JSON; what there is to say about it: speed, memory, why it was cut off."""
import json
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from qwen3_lib.app.objects import call_object
from qwen3_lib.app.terminal import Page, Status, write
from qwen3_lib.generation.completion import Completion
from qwen3_lib.io.errors import counted
from qwen3_lib.io.facts import LARGE, NUMPY, engine_name, parameters, weight_bytes


def print_answer(completion: Completion, hide_thinking: bool = False, status: Status | None = None) -> None:
    """Streams an answer: its thought dimmed (or hidden), each tool call as a line of JSON, a newline at the end."""
    status, page, held = status or Status(), Page(), ""
    try:
        for kind, piece in completion.parts():
            if kind in ("thinking", "tag") and hide_thinking:
                status.show("thinking …")
            elif kind in ("call", ""):
                held += piece  # until it is certain that no malformed one follows
            else:
                status.erase()
                page.write(held + piece, dim=kind != "content")
                held = ""
        status.erase()
        calls = completion.answer.tool_calls
        page.write("\n" if calls and page.last not in ("", "\n") else "")
        page.write("\n".join(json.dumps(call, ensure_ascii=False) for call in calls))
    finally:
        status.erase()
        page.end()


def print_raw(completion: Completion) -> None:
    """Streams the text as it comes."""
    try:
        for piece in completion:
            write(piece)
    finally:
        write("\n")


def as_json(completion: Completion, n_logprobs: int | None) -> dict:
    """A finished answer as an object: its parts, why it ended, how many tokens, and the seconds they took."""
    answer, n = completion.answer, len(completion.token_ids)
    value = {
        "text": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": [call_object(call, f"call_{i}") for i, call in enumerate(answer.tool_calls)],
        "finish_reason": completion.finish_reason,
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
    """The recorded logprobs as objects: the token's id, text and logprob, and the same for the most likely tokens."""
    def described(token: int, logprob: float) -> dict:
        return {"id": token, "token": completion.model.tokenizer.decode([token]), "logprob": round(logprob, 5)}

    for entry in completion.logprobs:
        yield described(entry.token_id, entry.logprob) | {"top": [described(*other) for other in entry.top]}


def statistics(completion: Completion) -> str:
    """One line: tokens, tokens per second, bytes of weights per second, memory, engine.

    Each token reads all weights once, so the memory's bandwidth is the limit; with guesses, one pass may give several
    tokens, so the guesses are shown in place of the bandwidth.
    """
    times, config, parts = completion.times, completion.model.config, []
    n_weights, engine = parameters(completion.model.source), engine_name(completion.model)
    n_prompt, n_cached, n_answer = len(completion.prompt_ids), completion.cached_tokens, len(completion.token_ids)
    if n_answer > 0:
        first, seeing = times[1] - times[0], completion.picture_seconds
        cached = f" ({n_cached} from the cache)" if n_cached else ""
        pictures = f"pictures: {seeing:.2f} s, " if seeing else ""
        parts.append(f"prompt: {n_prompt} tokens{cached}, {(n_prompt - n_cached) / (first - seeing):.1f} tokens/s, "
                     f"{pictures}first token after {first:.2f} s")
    speed = (n_answer - 1) / (times[-1] - times[1]) if n_answer > 1 else 0.0
    read = weight_bytes(completion.model) * speed / 1e9
    guesses = completion.speculator
    shown = f"reading {read:.3g} GB/s of weights"
    if guesses is not None and (guesses.guessed or not guesses.mtp):
        shown = f"{guesses.accepted} of {guesses.guessed} guesses right"
        shown += f", {1 + guesses.accepted / guesses.passes:.2f} tokens a pass"
    parts.append(f"answer: {n_answer} tokens" + (f", {speed:.1f} tokens/s, {shown}" if speed else ""))
    if config.num_experts:
        left_out = (config.num_experts - config.num_experts_per_tok) * len(config.sparse_layers)
        share = 1 - left_out * 3 * config.hidden_size * config.moe_intermediate_size / n_weights
        parts.append(f"a token goes through {share:.1%} of the weights")
    if (peak := peak_memory()) is not None:
        parts.append(f"peak memory: {peak / 1e9:.2f} GB")
    slow = engine == NUMPY and n_weights > LARGE and find_spec("numba") is None
    parts.append(engine + " (at least twice as fast with numba: pip install numba)" * slow)
    return " | ".join(parts)


def cut_note(completion: Completion, option: str = "--max-tokens") -> str | None:
    """A sentence for stderr if the answer was cut off, else None. `option` is what sets the longest answer."""
    n, context, answer = len(completion.token_ids), completion.model.config.context_length, completion.answer
    if completion.finish_reason == "loop":
        return f"The answer was ended after {counted(n, 'token')}, because it repeats the same text again and again."
    if completion.finish_reason != "length":
        return None
    full = len(completion.prompt_ids) + n >= context
    reason = f"the context of {context} tokens is full" if full else f"raise {option} for more"
    length = counted(n, "token")
    if answer.reasoning_truncated or answer.reasoning and not answer.content.strip() and not answer.tool_calls:
        return f"The thought took {length}, and no answer followed: {reason}."
    incomplete = ", and the JSON is not complete" if completion.is_json else ""
    return f"The answer was cut off after {length}{incomplete}: {reason}."


def peak_memory() -> int | None:
    """The peak resident memory of the process in bytes; None if the system doesn't report it."""
    try:
        import resource  # Unix only
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
