"""Text in, token ids out, and back again: everything about Qwen3 that is text rather than arithmetic.

In the order in which a conversation meets it:

    messages --apply_chat_template--> prompt text --encode--> ids --(the model)--> ids --StreamDecoder--> text
    --parse_answer--> reasoning, content, tool calls

The byte-level BPE itself is done by the `tokenizers` library, from the model's own `tokenizer.json`. The chat template
comes with the model, too: it is a program written by somebody else, and qwen3_io/template.py runs it in a sandbox.
Damaged files and bad input raise `InputError` with a message of one line.
"""
import codecs
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from qwen3_io.checkpoint import model_file, model_json
from qwen3_io.errors import InputError, brief
from qwen3_io.gguf_file import is_gguf
from qwen3_io.template import compile_template, render

__all__ = ["Answer", "InputError", "NoTokenizer", "StreamDecoder", "Tokenizer", "held_back", "inside_thought",
           "load_tokenizer", "parse_answer", "split_stream", "stream_text", "until_stop", "until_stop_in_answer",
           "with_think_budget"]


def described(error: BaseException) -> str:
    """An error's class and message in one short line."""
    return brief(str(error) if type(error) is Exception else f"{type(error).__name__}: {error}")


@contextmanager
def _library_errors(doing: str, advice: str) -> Iterator[None]:
    """Turns the exceptions of the `tokenizers` library into InputError. Only for blocks that just call the library."""
    try:
        yield
    except BaseException as error:
        # The library raises bare `Exception`; a panic in its Rust code is a BaseException that cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InputError(f"{doing}: {described(error)}; {advice}") from error
        raise


STDERR = 2
_STDERR_TURNED_ASIDE = threading.Lock()


@contextmanager
def _without_panics() -> Iterator[None]:
    """Keep off stderr what a panic in Rust code prints, since the error that follows says it in one line.

    Meanwhile stderr is a temporary file, for all threads. It is passed on at the end, or dropped after an error.
    """
    with _STDERR_TURNED_ASIDE, ExitStack() as stack:
        waiting = None
        with suppress(OSError):  # stderr is closed, or there is no place for a file: then panics are printed
            stderr = os.dup(STDERR)
            stack.callback(os.close, stderr)
            waiting = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(os.dup2, stderr, STDERR)
            os.dup2(waiting.fileno(), STDERR)
        yield
        if waiting is not None:
            os.dup2(stderr, STDERR)
            waiting.seek(0)
            with suppress(OSError):
                os.write(STDERR, waiting.read())


# ---------------------------------------------------------------------------------------------------------------------
# Bytes of a token

def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level BPE vocabulary (GPT-2's alphabet): 256 entries.

    Printable Latin-1 characters stand for themselves, the other bytes get the code points from 256 up, in order: a
    space is written "Ġ" (0x20 + 0x100) and a newline "Ċ".
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_alphabet()


# ---------------------------------------------------------------------------------------------------------------------
# Conversations as a template expects them

@contextmanager
def _template_errors(source: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a foreign program: it can fail in any way that a program can
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InputError(f"the chat template in {source} failed{line}: {described(error)}; "
                         "check the messages, or fix the template or remove it and use --raw") from error


def _plain_json(value: Any, what: str) -> Any:
    """A deep copy of plain JSON types: the caller's value stays unchanged, and a template sees no live objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} must be plain JSON data: {described(error)}") from error


def _prepare_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Copies of the tools; None for none."""
    if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError("tools must be a list of JSON schemas, each an object such as "
                         f'{{"type": "function", "function": {{...}}}}, not {brief(repr(tools), 80)}')
    return _plain_json(tools, "tools") or None


def _joined_text(parts: list[Any], index: int) -> str:
    """The text of a content given as a list of `{"type": "text", "text": ...}` parts."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"message {index} has a content part that is not text ({brief(part, 80)}); "
                             'the model reads only parts of the form {"type": "text", "text": ...}')
    return "".join(part["text"] for part in parts)


def _prepare_messages(messages: Sequence[dict[str, Any]], join_text_parts: bool) -> list[dict[str, Any]]:
    """Copies of the messages as a template expects them: no nulls, reasoning under one name, text parts joined."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError("there are no messages to render; give a list of at least one message")
    prepared = []
    for index, message in enumerate(_plain_json(messages, "messages")):
        if not isinstance(message, dict):
            raise InputError(f'message {index} is not an object with "role" and "content"')
        message = {key: value for key, value in message.items() if value is not None}
        for key in ("reasoning_content", "thinking", "reasoning"):
            if key in message:
                message["reasoning_content"] = message[key]
                break
        if join_text_parts and isinstance(message.get("content"), list):
            message["content"] = _joined_text(message["content"], index)
        prepared.append(message)
    return prepared


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer

class Tokenizer:
    """Encodes, decodes and renders chats for one model; `load_tokenizer` makes it from the model's folder.

    `backend` is the `tokenizers` object (byte-level BPE), `chat_template` the jinja source or None, `named_tokens` the
    strings that a template may use (`eos_token`, `bos_token`, ...), and `template_source` names the template in errors.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: str | None = None,
                 named_tokens: dict[str, str] | None = None, template_source: str = "this tokenizer"):
        self.backend = backend
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})
        self.special_tokens = {token.content: token_id for token_id, token in
                               sorted(backend.get_added_tokens_decoder().items()) if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._template_source = template_source
        self._template = None
        if chat_template is not None:
            with _template_errors(template_source):
                self._template = compile_template(chat_template)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id with a name, plus 1. It takes a tenth of a second to find."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def eos_token(self) -> str | None:
        """The end-of-turn token's text as tokenizer_config.json names it (base models: `<|endoftext|>`)."""
        return self.named_tokens.get("eos_token")

    @property
    def ending(self) -> list[int]:
        """The tokens that the tokenizer itself puts behind each text: none, or an embedding model's `<|endoftext|>`."""
        return self.encode("")

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None: `token_to_id("</think>")`."""
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as transformers' `tokenizer.encode(text)` gives them.

        Special tokens written out in the text become their ids, and the model's post-processor runs (the embedding
        models' appends `<|endoftext|>`).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where = brief(repr(text[max(error.start - 20, 0):error.start + 1]))
            raise InputError(f"the text is not valid Unicode: a lone surrogate, the last character of {where}; repair "
                             'it, for example with text.encode("utf-8", "replace").decode()') from error
        with _library_errors("cannot encode the text", "check the model's tokenizer.json"):
            return self.backend.encode(text).ids

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes that a token adds to the decoded text; none for an id without a name (padding, out of range)."""
        if not 0 <= token_id < 2**32 or (skip_special_tokens and token_id in self._special_ids):  # ids have 32 bits
            return b""
        name = self.backend.id_to_token(int(token_id)) or ""
        try:
            return bytes([BYTE_OF_CHAR[char] for char in name])
        except KeyError:  # an added token such as "<a b>" or "你" is plain text, not written in the byte alphabet
            return name.encode("utf-8")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids. Ids without a name give nothing, bytes that are not UTF-8 give U+FFFD."""
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                            add_generation_prompt: bool = True, enable_thinking: bool | None = None,
                            join_text_parts: bool = False) -> str:
        """The prompt text of a conversation, rendered by the model's own template as transformers renders it.

        `messages` are `{"role", "content"}` objects, assistant turns may hold `reasoning_content` (or `thinking`, or
        `reasoning`) and `tool_calls`; `tools` are JSON schemas. `enable_thinking=None` leaves the choice to the
        template. A content given as a list of parts reaches the template unchanged, as in transformers, and Qwen3's
        template then renders nothing for it; `join_text_parts=True` joins the parts' texts into one string first.
        """
        if self._template is None:
            raise InputError("the model has no chat template; use --raw to give it plain text, "
                             "or put a chat_template.jinja into its folder")
        variables: dict[str, Any] = {
            **self.named_tokens,
            "messages": _prepare_messages(messages, join_text_parts),
            "tools": _prepare_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        with _template_errors(self._template_source):
            return render(self._template, variables)


class NoTokenizer(Tokenizer):
    """In place of the tokenizer of a model that was loaded without one: any use raises InputError."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        raise InputError(f"{self._folder}: the model was loaded with tokenizer=False, so it takes only token ids")


class StreamDecoder:
    """Decodes token by token: `push` returns the text that is complete, `flush` the rest at the end.

    A character whose bytes are spread over several tokens appears with its last byte. The joined pieces equal
    `tokenizer.decode` of all the ids, for any ids, and each token costs the same, however long the stream is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Works on bytes, because in text an unfinished character looks like a real U+FFFD (nine tokens hold one).
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        """The rest (U+FFFD for an unfinished character). The decoder is then ready for another stream."""
        return self._utf8.decode(b"", final=True)


def held_back(text: str, marks: Iterable[str]) -> int:
    """The number of characters at the end of a text that could be the beginning of one of the marks."""
    return max((n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])),
               default=0)


def until_stop(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """The pieces of a text up to the first stop text, which may be spread over several; one for each, maybe ""."""
    held = ""
    for piece in pieces:
        held += piece
        if ends := [(at + len(text), at) for text in stop if (at := held.find(text)) >= 0]:
            yield held[:min(ends)[1]]  # the one that is complete first, and of those that end alike the longest
            return
        certain = len(held) - held_back(held, stop)
        yield held[:certain]
        held = held[certain:]
    yield held


def split_stream(pieces: Iterable[str], think_open_in_prompt: bool = False) -> Iterator[tuple[str, str]]:
    """The pieces of an answer as (kind, piece): "thinking" with its tags, "content"; from <tool_call> on "call".

    At least one for each piece given; it may be "".
    """
    marks = {"start": ("<think>", "<tool_call>"), "thinking": ("</think>",), "content": ("<tool_call>",), "call": ()}
    following = {"<think>": "thinking", "</think>": "content", "<tool_call>": "call"}
    state, held = "thinking" if think_open_in_prompt else "start", ""
    for piece in pieces:
        held += piece
        while found := [(held.index(mark), mark) for mark in marks[state] if mark in held]:
            at, mark = min(found)
            at += len(mark) if mark == "</think>" else 0  # the closing tag belongs to the thought
            if at:
                yield state.replace("start", "content"), held[:at]
            state, held = following[mark], held[at:]
        certain = len(held) - held_back(held, marks[state])
        yield state.replace("start", "content"), held[:certain]
        held = held[certain:]
    yield state.replace("start", "content"), held


def until_stop_in_answer(pieces: Iterable[str], stop: Sequence[str], think_open_in_prompt: bool) -> Iterator[str]:
    """The pieces of a text up to the first stop text after the thought."""
    stream, blank = split_stream(pieces, think_open_in_prompt), ""  # white space, which a thought may follow
    for kind, piece in stream:
        blank += piece
        if blank.strip() and kind != "thinking":
            yield from until_stop(chain([blank], (piece for _, piece in stream)), stop)
            return
        yield blank if kind == "thinking" else ""
        blank = "" if kind == "thinking" else blank
    yield from until_stop([blank], stop)


def stream_text(tokenizer: Tokenizer, token_ids: Iterable[int]) -> Iterator[str]:
    """The text of a stream of token ids: for each what is complete with it, maybe "", and a rest at the end."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True)
    for token in token_ids:
        yield decoder.push(token)
    yield decoder.flush()


THOUGHT_CLOSING = "\n</think>\n\n"  # the forced end of a thought that has used up its budget


def with_think_budget(draw: Callable[[np.ndarray, int | None], int], tokenizer: Tokenizer, prompt: np.ndarray,
                      budget: int) -> Callable[[np.ndarray], int]:
    """A sampler's `draw` that lets `budget` tokens of thought pass, then draws the tokens that close the thought."""
    opening, closing = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    if opening is None or closing is None:
        raise InputError("think_budget needs a model whose tokenizer has the tokens <think> and </think>")
    ending = tokenizer.encode(THOUGHT_CLOSING)
    inside, spent = inside_thought(tokenizer, prompt), 0
    forced: Iterator[int] = iter(())

    def limited(logits: np.ndarray) -> int:
        nonlocal inside, spent, forced
        if inside and spent >= budget:
            inside, forced = False, iter(ending)
        closes = next(forced, None)
        token = draw(logits, closes)
        if closes is None:
            inside = token != closing and (inside or token == opening)
            spent += inside and token != opening
        return token

    return limited


def inside_thought(tokenizer: Tokenizer, prompt: np.ndarray) -> bool:
    """True if the last turn of the prompt [n] ends within <think>, so that the answer begins with a thought's rest."""
    text = tokenizer.decode(prompt)
    turn = text[text.rfind("<|im_start|>") + 1:]
    return turn.rfind("<think>") > turn.rfind("</think>")


# ---------------------------------------------------------------------------------------------------------------------
# Loading

def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer in a model's folder, or in a GGUF file.

    Reads `tokenizer.json` and, where they exist, `tokenizer_config.json` (names of special tokens, tokens that base
    models list nowhere else, the chat template of older models) and `chat_template.jinja` (which wins).
    Raises InputError if a file is missing, unreadable, malformed, or contradicts another.
    """
    folder = Path(path)
    gguf = is_gguf(folder)
    file = folder if gguf else model_file(folder, "tokenizer.json")
    if file is None:
        raise InputError(f"{folder / 'tokenizer.json'} does not exist; give the folder of a downloaded model")
    content = json.dumps(model_json(folder, "tokenizer.json")[1]) if gguf else None
    with _library_errors(f"cannot read {file}", "download it again"), _without_panics():
        backend = (tokenizers.Tokenizer.from_file(str(file)) if content is None else
                   tokenizers.Tokenizer.from_str(content))
        # A file saved while training may cut or pad every text that is encoded; transformers resets that, too.
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")  # a file with which the library panics at any text does so here
    if not (isinstance(backend.model, tokenizers.models.BPE)
            and isinstance(backend.decoder, tokenizers.decoders.ByteLevel)):
        raise InputError(f"{file} is not a byte-level BPE tokenizer, as every Qwen3 model has; use a Qwen3 model")
    if not isinstance(backend.normalizer, tokenizers.normalizers.NFC | None):
        raise InputError(f"{file} has another normalizer than NFC, which every Qwen3 model has; use a Qwen3 model")
    config_file, found = model_json(folder, "tokenizer_config.json")
    config = found or {}
    _add_config_tokens(backend, config, config_file)
    template_file = folder / "chat_template.jinja"
    template = _read_text(template_file)
    if template is None:
        template_file, template = config_file, _config_template(config, config_file)
    return Tokenizer(backend, template, _named_tokens(config, config_file), str(template_file))


def _read_text(file: Path) -> str | None:
    """A file's text, or None if there is no such file."""
    if model_file(file.parent, file.name) is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {described(error)}; download it again") from error


def _named_tokens(config: dict[str, Any], file: Path) -> dict[str, str]:
    """`eos_token`, `pad_token` and the like, as the variables of that name in a chat template."""
    named = {}
    for key, value in config.items():
        if not key.endswith("_token") or value is None or isinstance(value, bool):  # add_bos_token is a switch
            continue
        text = value.get("content") if isinstance(value, dict) else value  # older files describe it as an object
        if not isinstance(text, str):
            raise InputError(f'{file}: {key} must be a string or an object with "content"; correct it')
        named[key] = text
    return named


def _config_template(config: dict[str, Any], file: Path) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template", template) if named else template
    if template is not None and not isinstance(template, str):
        raise InputError(f'{file}: chat_template must be a string or a list with a {{"name": "default", '
                             '"template": ...}; correct it, or put a chat_template.jinja beside it')
    return template


TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _add_config_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], file: Path) -> None:
    """Adds the tokens that only the config's `added_tokens_decoder` knows, and check the ids of all of them.

    Qwen3's base checkpoints list `<think>` and three more (ids 151665 to 151668) in no other place.
    """
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise InputError(f"{file}: added_tokens_decoder must be an object of id: token; download it again")
    tokens = {}
    for key, entry in listed.items():
        if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(entry, dict):
            raise InputError(f"{file}: added_tokens_decoder[{key[:50]!r}] must be a token's id and its object; "
                                 "download it again")
        fields = {name: entry[name] for name in TOKEN_FIELDS if name in entry}
        with _library_errors(f"{file}: the added token {key} is malformed", "download it again"):
            tokens[int(key)] = tokenizers.AddedToken(**fields)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for _, token in sorted(tokens.items()) if token.content not in known]
    with _library_errors(f"cannot add the tokens of {file}", "download it again"):
        backend.add_tokens(missing)  # the library numbers them itself, from the end of its vocabulary on
    for token_id, token in tokens.items():
        actual = backend.token_to_id(token.content)
        if actual != token_id:
            raise InputError(f"{file} gives the token {token.content[:50]!r} the id {token_id}, but after the "
                                 f"tokenizer.json beside it, it is {actual}; take both files from the same model")


# ---------------------------------------------------------------------------------------------------------------------
# What the model answered

TOOL_CALL = re.compile("<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
END_TOKENS = ("<|im_end|>", "<|endoftext|>")


@dataclass
class Answer:
    """A model's output, taken apart. `tool_calls` are `{"name": str, "arguments": parsed JSON}`."""

    reasoning: str | None
    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning_truncated: bool = False  # the text ended before </think>


def parse_answer(text: str, think_open_in_prompt: bool = False) -> Answer:
    """Takes a model's output apart into reasoning, content and tool calls. Accepts any text, never raises.

    `think_open_in_prompt` says that the prompt ended inside `<think>` (the Thinking-2507 template does that), so the
    text starts with reasoning. A tool call that is not as agreed is left in the content, as are all others with it.
    """
    while text.endswith(END_TOKENS):
        text = text.removesuffix(END_TOKENS[0]).removesuffix(END_TOKENS[1])
    reasoning, content, truncated = _split_reasoning(text, think_open_in_prompt)
    tool_calls = _tool_calls(content)
    if tool_calls:
        content = content[:content.index("<tool_call>")].rstrip()
    return Answer(reasoning.strip("\n") or None, content, tool_calls, truncated)


def _split_reasoning(text: str, think_open_in_prompt: bool) -> tuple[str, str, bool]:
    """Reasoning, content, and whether the text ended within the reasoning."""
    before, opening, after = text.partition("<think>")
    body = after if opening else before
    reasoning, closing, content = body.partition("</think>")
    if closing:
        return reasoning, content.lstrip("\n"), False
    if not opening and not think_open_in_prompt:
        return "", body, False
    # Unclosed: only a tool call can end it, since the models sometimes go straight from thought to call.
    reasoning, call, rest = body.partition("<tool_call>")
    return reasoning, call + rest, not call


def _tool_calls(content: str) -> list[dict[str, Any]]:
    """The tool calls in a content, or none if one of them is malformed."""
    calls = []
    for closed, unclosed in TOOL_CALL.findall(content):
        try:
            call = json.loads(closed or unclosed)
            json.dumps(call, allow_nan=False)
        except (ValueError, RecursionError):  # not JSON, no number, thousands of digits, too deeply nested
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return []
        calls.append({"name": call["name"], "arguments": call["arguments"]})
    return calls
