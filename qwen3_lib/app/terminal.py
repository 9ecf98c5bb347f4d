"""The output: answers on stdout; notes, statistics and errors on stderr."""
import contextlib
import ctypes
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TextIO

from qwen3 import Model, Source
from qwen3_lib.generation.completion import Completion
from qwen3_lib.app.openai import call_object
from qwen3_lib.app.wrap import Wrap, wrapped
from qwen3_lib.io.errors import InputError, counted


class OutputError(InputError):
    """stdout can't be written, or stdin can't be read: the conversation ends."""


# ---- The terminal: colours, widths, harmless text --------------------------------------------------------------------

DIM, CYAN, RESET, ERASE_LINE = "\x1b[2m", "\x1b[36m", "\x1b[0m", "\r\x1b[K"
COMMANDING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters
                        "\u200b\u202a-\u202e\u2066-\u2069]")  # show nothing, or turn the direction of the text


def harmless(text: str, stream: TextIO) -> str:
    """On a terminal, the text without control characters: neither a model nor a file may command the terminal."""
    return COMMANDING.sub("\ufffd", text) if stream.isatty() else text


def obey_escapes() -> None:
    """Makes a console of Windows obey colours and movements of the cursor, as all other terminals do at once."""
    if sys.platform == "win32":
        kernel32 = ctypes.windll.kernel32
        for stream in (-11, -12):  # stdout, stderr; a stream that is no console refuses, which is harmless
            kernel32.SetConsoleMode(kernel32.GetStdHandle(stream), 7)  # 4, this ability, and 1 + 2, the usual ones


def is_screen(stream: TextIO | None) -> bool:
    """True for a terminal whose cursor can be moved."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(stream: TextIO) -> bool:
    """True for a screen, unless NO_COLOR is set (https://no-color.org)."""
    return is_screen(stream) and not os.environ.get("NO_COLOR")


def columns(stream: TextIO) -> int:
    """The width of the terminal now; 0 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def note(text: str, colour: str = "") -> None:
    """Prints a line to stderr, on a terminal broken between words. A closed stderr is no error."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            text = wrapped(harmless(text, sys.stderr), columns(sys.stderr))
            text = colour + text + RESET if colour and text and coloured(sys.stderr) else text
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def to_stdout() -> Iterator[None]:
    """Raises OutputError when stdout was closed (`| head -1`) or its disk is full."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain again when it exits
        raise OutputError(f"the answer could not be written to stdout: {error.strerror}") from error


def write(text: str, dim: bool = False) -> None:
    """Prints a piece of the answer."""
    text = harmless(text, sys.stdout)
    if dim and text and coloured(sys.stdout):
        text = DIM + text + RESET
    with to_stdout():
        print(text, end="")


class Status:
    """A progress line on a terminal, erased before anything else is printed. In a pipe it isn't shown."""

    def __init__(self) -> None:
        self.text = ""

    def show(self, text: str) -> None:
        """Shows the text in place of an earlier one."""
        if text != self.text and is_screen(sys.stderr):
            self.text = text
            colour, normal = (CYAN, RESET) if coloured(sys.stderr) else ("", "")
            self.print(ERASE_LINE + colour + text + normal)

    def erase(self) -> None:
        if self.text:
            self.text = ""
            self.print(ERASE_LINE)

    def print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)


# ---- Answers ---------------------------------------------------------------------------------------------------------

class Page:
    """Stdout while an answer is written: on a terminal, lines are broken between words and thoughts dimmed."""

    def __init__(self) -> None:
        self.wrap = Wrap(lambda: columns(sys.stdout))
        self.dim, self.last = False, ""  # the last piece: dimmed or not, and its last character

    def write(self, text: str, dim: bool = False) -> None:
        """Writes a piece of the answer."""
        if text:
            rest, self.dim = self.wrap.flush() if dim != self.dim else "", dim
            write(rest, not dim)
            self.last = text[-1]
            write(self.wrap.feed(harmless(text, sys.stdout)), dim)

    def end(self) -> None:
        """Ends the last line."""
        write(self.wrap.flush(), self.dim)
        if self.last != "\n":
            write("\n")


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


def print_json(value: dict) -> None:
    """Prints a value as one line of JSON."""
    write(json.dumps(value, ensure_ascii=False) + "\n")


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


def weight_bytes(model: Model) -> int:
    """The bytes of weights that a new token reads: all but an untied embedding, the experts that aren't chosen, and the
    MTP head.
    """
    weights, config = model.weights, model.config
    if isinstance(weights, dict):
        arrays = [weights["norm"], weights["lm_head"]]
        for layer in weights["layers"]:
            arrays += [w for name, w in layer.items() if name != "experts"]
            arrays += [w for expert in range(config.num_experts_per_tok) if "experts" in layer
                       for w in layer["experts"][expert].values()]  # all experts have the same size
    else:
        unread = {*weights.layers.experts["address"][:, config.num_experts_per_tok:].reshape(-1).tolist()}  # likewise
        if weights.mtp is not None:
            unread |= {*weights.mtp.addresses().tolist()}
        arrays = [array for array in weights.arrays[0 if weights.head is weights.embedding else 1:]
                  if array.ctypes.data not in unread]  # the embedding comes first
    return sum(array.nbytes for array in arrays)


LARGE = 100_000_000  # parameters: models with more are computed by the fast engine if numba is installed
NUMPY = "NumPy float32"


def engine_name(model: Model) -> str:
    """NUMPY, or "numba" and the format of most weights."""
    return NUMPY if isinstance(model.weights, dict) else f"numba {model.weights.format}"


def parameters(source: Source) -> int:
    """The number of a model's parameters; a tied head counts once."""
    config = source.config
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return sum(map(math.prod, source.kind.shapes(config).values())) - tied


def banner(model: Model) -> str:
    """One line: the model's name, size, context and engine."""
    n = parameters(model.source)
    tower = f" and a tower of {in_words(n_tower)}" if (n_tower := tower_parameters(model)) else ""
    return f"qwen3 · {model_name(model)} · {in_words(n)} parameters{tower} · context " \
           f"{model.config.context_length:,} · {engine_name(model)}"


def tower_parameters(model: Model) -> int:
    """The number of the vision tower's parameters; 0 if the model has none."""
    return 0 if model.media is None else sum(math.prod(tensor.shape) for tensor in model.source.tower.values())


def in_words(n: int) -> str:
    """A number of parameters: 1.72 B, 6.95 M, 12,345."""
    return f"{n / 1e9:.3g} B" if n >= 1e9 else f"{n / 1e6:.3g} M" if n >= 1e6 else f"{n:,}"


def model_name(model: Model) -> str:
    """The name of the model's folder; in the hub's cache, the name of the repository."""
    folder = model.path.resolve()
    hub = [part for part in folder.parts if part.startswith("models--")]
    return hub[-1].removeprefix("models--").replace("--", "/") if hub else folder.name


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
