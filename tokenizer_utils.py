"""Text in, token ids out, and back again: all of Qwen3 that is text, in the order in which a conversation meets it.

    messages --apply_chat_template--> prompt text --encode--> ids --(the model)--> ids --StreamDecoder--> text
        --parse_answer--> reasoning, content, calls of tools

The `tokenizers` library does the byte-level BPE (byte pair encoding: a text begins as bytes, and neighbours are joined
into longer pieces by a list that was learned from much text), from the model's own `tokenizer.json`. The chat template
comes with the model, too: it is a program written by somebody else, so it runs in jinja2's sandbox.
Damaged files and bad input raise `InputError` with a message of one line.
"""
import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers

__all__ = ["Answer", "AnswerReader", "InputError", "StreamDecoder", "Tokenizer", "load_tokenizer", "parse_answer"]


class InputError(ValueError):
    """Bad input: a file, a value, a prompt. The message is one line for the user, safe to print on a terminal."""

    def __init__(self, message: str):
        super().__init__(brief(message, 2000))


def brief(value: object, longest: int = 200) -> str:
    """The value's text as one line of at most `longest` characters, with unprintable characters written as escapes.

    Escaped are control characters, which command a terminal, and characters that hide or reverse text (U+200B, U+202E).
    """
    text = str(value)
    shortened = " ".join(text[:10 * longest].split())  # first, because the text may be large
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shortened[:longest + 1])
    complete = len(escaped) <= longest and len(text) <= 10 * longest
    return escaped if complete else escaped[:longest - 4].rstrip() + " ..."


def described(error: BaseException) -> str:
    """An error's message in one short line, with its class unless it says enough without."""
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    plain = getattr(error, "strerror", None) or type(error) in (Exception, InputError) and error
    return brief(plain or f"{type(error).__name__}{line}: {error}")


def parse_json(text: str | bytes, where: object) -> Any:
    """The JSON value in a text. Raises InputError that begins with `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {brief(error)}") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError that names the file."""
    try:
        value = parse_json(file.read_bytes(), file)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


# ---- Bytes of a token ------------------------------------------------------------------------------------------------

# The character that stands for each byte in a byte-level BPE vocabulary, GPT-2's alphabet. Printable Latin-1 characters
# stand for themselves, the other bytes get the code points from 256 up, in order: a space is "Ġ" (0x20 + 0x100).
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
BYTE_OF_CHAR = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)}


# ---- Conversations as a template expects them ------------------------------------------------------------------------

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


def check_parts(parts: list[Any], where: str) -> None:
    """Raises InputError, which begins with `where`, unless all parts of a message's content are texts."""
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            continue
        names = " ".join(map(str, (part.get("type"), *part))) if isinstance(part, dict) else ""
        if medium := next((each for each in ("an image", "a video", "audio") if each.split()[-1] in names), None):
            raise InputError(f"{where} holds {medium}, which can't be read here")
        raise InputError(f"{where} has a content part that is not text ({brief(part, 80)}); "
                         'the model reads only parts of the form {"type": "text", "text": ...}')


PICTURES = {"image": "image", "image_url": "image_url", "input_image": "image_url"}  # type of a part -> its field
ROLES = ("system", "developer", "user", "assistant", "tool")  # developer: OpenAI's newer name of system


def checked_messages(messages: Any, where: str) -> list[dict]:
    """The messages. Raises InputError, which begins with `where`, unless they are as the chat templates expect them."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(f'{where}: expected a list of messages, [{{"role": "user", "content": "..."}}, ...], '
                         f"not {brief(repr(messages), 80)}")
    for i, message in enumerate(messages):
        check_message(message, f"{where}: message {i}")
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def with_system(messages: list[dict], text: str | None) -> list[dict]:
    """The messages after a system message with this text, if there is one."""
    return messages if text is None else [{"role": "system", "content": text}, *messages]


def check_message(message: Any, where: str) -> None:
    """Raises InputError, which begins with `where`, unless it is a message as the chat templates expect them."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise InputError(f'{where} must be an object whose "role" is one of {", ".join(ROLES)}')
    calls, content = message.get("tool_calls"), message.get("content")
    if content is None and not (message["role"] == "assistant" and calls):
        raise InputError(f'{where} has no "content"')
    if isinstance(content, list):
        check_parts([part for part in content if not is_picture(part)], where)
    elif not isinstance(content, str | None):
        raise InputError(f'{where}: "content" must be a text, or a list of {{"type": "text", "text": ...}}')
    for key in ("reasoning_content", "reasoning", "thinking"):
        if not isinstance(message.get(key), str | None):
            raise InputError(f'{where}: "{key}" must be a text')
    if not all(isinstance(function.get("name"), str) and "arguments" in function for function in _called(message)):
        raise InputError(f'{where}: "tool_calls" must be a list of {{"function": {{"name": ..., "arguments": ...}}}}')


def is_picture(part: Any) -> bool:
    """True for a part of a message's content that holds a picture, in our form or OpenAI's; it isn't checked here."""
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PICTURES


def _called(message: dict[str, Any]) -> list[Any]:
    """The functions that a message calls: {"name", "arguments"}, also as the "function" of an object; {} for others."""
    calls = message.get("tool_calls")
    found = [call.get("function", call) if isinstance(call, dict) else {} for call in (
        calls if isinstance(calls, list) else [calls] * (calls is not None))]
    return [function if isinstance(function, dict) else {} for function in found]


def _prepare_messages(messages: Any, join_text_parts: bool, parse_arguments: bool) -> list[dict[str, Any]]:
    """Copies of the messages as a template expects them: no nulls, reasoning under one name, text parts joined."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError("there are no messages to render; give a list of at least one message")
    prepared = []
    for index, message in enumerate(_plain_json(messages, "messages")):
        if not isinstance(message, dict):
            raise InputError(f'message {index} is not an object with "role" and "content"')
        message = {key: value for key, value in message.items() if value is not None}
        if thoughts := [message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message]:
            message["reasoning_content"] = thoughts[0]
        if join_text_parts and isinstance(parts := message.get("content"), list):
            check_parts(parts, f"message {index}")
            message["content"] = "".join(part["text"] for part in parts)
        for function in _called(message) if parse_arguments else ():  # OpenAI's API has the arguments as JSON texts
            if isinstance(text := function.get("arguments"), str):
                function["arguments"] = parse_json(text.strip() or "{}", f"message {index}: a call's arguments")
        prepared.append(message)
    return prepared


# ---- The chat template, rendered as transformers does ----------------------------------------------------------------

class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; here its body is rendered."""
    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def compile_template(source: str) -> jinja2.Template:
    """A compiled chat template. It is a foreign program: compiling and rendering can raise any exception."""
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    if len(source) > 2**16:  # the longest of 70 published templates has 17,000
        raise jinja2.TemplateError(f"it has {len(source)} characters, more than {2**16}")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: \
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return environment.from_string(source)


# ---- The tokenizer ---------------------------------------------------------------------------------------------------

@contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turns exceptions into InputError. Only around calls of `tokenizers`, Pillow, a template, or to read a file."""
    try:
        yield
    except BaseException as error:
        # `tokenizers` raises bare `Exception`; a panic in its Rust code is a BaseException that cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InputError(f"{doing}: {described(error)}") from error
        raise


class Tokenizer:
    """Encodes, decodes and renders chats for one model; `load_tokenizer` makes it from the model's folder.

    `backend` is the `tokenizers` object, `chat_template` the jinja source or None, `named_tokens` the strings that a
    template may use (`eos_token`, ...), and `template_source` names the template in errors.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: str | None = None,
                 named_tokens: dict[str, str] | None = None, template_source: str = "this tokenizer"):
        self.backend, self.chat_template, self.named_tokens = backend, chat_template, dict(named_tokens or {})
        added = sorted(backend.get_added_tokens_decoder().items())
        self.special_tokens = {token.content: token_id for token_id, token in added if token.special}
        self._special_ids, self._template_source = frozenset(self.special_tokens.values()), template_source
        # Qwen3's template takes the arguments of a tool call as a JSON text, too; Qwen3.5's lists them one by one.
        self.lists_arguments = bool(re.search(r"arguments\s*(\|\s*items|\.items\()", chat_template or ""))
        with library_errors(f"the chat template in {template_source} failed"):
            self._template = None if chat_template is None else compile_template(chat_template)

    @cached_property
    def template_variables(self) -> set[str]:
        """The variables of the chat template that `chat_template_kwargs` may set."""
        found = set() if self._template is None or self.chat_template is None else \
            jinja2.meta.find_undeclared_variables(self._template.environment.parse(self.chat_template))
        return found - {"messages", "tools", "documents", "add_generation_prompt"}

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None: `token_to_id("</think>")`."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True, as_text: bool = False) -> list[int]:
        """Token ids of a text, as transformers gives them; special tokens written out in the text become their ids.

        add_special_tokens runs the model's post-processor (an embedding model's appends `<|endoftext|>`). With as_text,
        it doesn't run, and all added tokens written out, `<think>` too, stay text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where = brief(repr(text[:error.start + 1].rpartition("\n")[2][-20:]))
            raise InputError(f"the text is not valid Unicode: {where} ends with a lone surrogate") from error
        with library_errors("cannot encode the text"):  # `encode` is slower, and other threads would wait for it
            if as_text:
                text = self.backend.normalizer.normalize_str(text) if self.backend.normalizer else text
                return [token.id for piece, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)
                        for token in self.backend.model.tokenize(piece)]
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

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
                            join_text_parts: bool = False, chat_template_kwargs: dict[str, Any] | None = None) -> str:
        """The prompt text of a conversation, rendered by the model's own template as transformers renders it.

        Assistant turns of `messages` may hold `reasoning_content` (or `thinking`, or `reasoning`) and `tool_calls`;
        `tools` are JSON schemas. `enable_thinking=None` leaves the choice to the template, whose other variables
        `chat_template_kwargs` sets. `join_text_parts=True` joins a content's parts first, as Qwen3's template needs it.
        """
        if self._template is None:
            raise InputError("the model has no chat template; use --raw, or put a chat_template.jinja into its folder")
        given = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(given, dict) or given.keys() - self.template_variables:
            raise InputError("chat_template_kwargs must be an object of variables that the chat template has: "
                             f"{', '.join(sorted(self.template_variables)) or 'it has none'}")
        variables = self.named_tokens | _plain_json(given, "chat_template_kwargs") | {
            "messages": _prepare_messages(messages, join_text_parts, self.lists_arguments),
            "tools": _prepare_tools(tools), "documents": None, "add_generation_prompt": add_generation_prompt,
            **({} if enable_thinking is None else {"enable_thinking": enable_thinking})}
        with library_errors(f"the chat template in {self._template_source} failed"):
            return self._template.render(variables)


class StreamDecoder:
    """Decodes token by token: `push` returns the text that is complete, `flush` the rest at the end.

    A character whose bytes are spread over several tokens comes with the last one. Each token costs the same.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        # Works on bytes, because in text an unfinished character looks like a real U+FFFD (nine tokens hold one).
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        """The rest (U+FFFD for an unfinished character). The decoder is then ready for another stream."""
        return self._utf8.decode(b"", final=True)


def stream_text(tokenizer: Tokenizer, token_ids: Iterable[int]) -> Iterator[str]:
    """The text of a stream of token ids, in pieces that are complete; special tokens are left out."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True)
    yield from filter(None, map(decoder.push, token_ids))
    yield from filter(None, [decoder.flush()])


# ---- Answers taken apart: reasoning, content, and calls of tools as JSON (Qwen3) or XML (Qwen3.5) --------------------

END_TOKENS = ("<|im_end|>", "<|endoftext|>")


@dataclass
class Answer:
    """A model's output, taken apart. `tool_calls` are `{"name": str, "arguments": parsed JSON}`."""
    reasoning: str | None
    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning_truncated: bool = False  # the text ended before </think>


def json_value(text: str) -> Any:
    """Raises ValueError for what is no JSON, no number or thousands of digits, RecursionError for a deep nesting."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def json_or_text(function: str, parameter: str, text: str) -> Any:
    """The value of a text in a call in XML: JSON if it is any. generation/answer.py in qwen3_lib knows tools' types."""
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return text


# A value may contain the tags, too: its end is the one that another parameter or the function's end follows. Without
# backtracking (possessive, atomic), because a text with many open tags would otherwise take exponential time.
PARAMETER = r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
TOOL_CALL = re.compile(
    rf"""<tool_call>(?:\s*<function=(?P<name>[^<>{{}}"'\s]+)>(?P<body>(?>{PARAMETER})*+\s*</function>)\s*"""
    r"(?:</tool_call>|\Z)|(?P<json>.*?)(?:</tool_call>|\Z))", re.DOTALL)


class AnswerReader:
    """Takes an answer apart while it grows: `push` gives the pieces that are certain by now, each with its kind.

    "thinking", "content" and "call", a whole one, are parts of the Answer. A thought's "tag" has line breaks around it;
    "" is white space before a call, and text after one. All pieces join to the text. A thought opens at the beginning
    only; without </think>, a call ends it. A malformed call and all after it, in the Answer also before it, is content.
    `inside`: whether the latest token stands between <think> and </think>, whose ids are `think_ids`.
    """

    def __init__(self, think_open_in_prompt: bool = False, value_of: Callable[[str, str, str], Any] = json_or_text,
                 think_ids: tuple[int | None, int | None] = (None, None)):
        self.thinks, self.value_of, self.think_ids = think_open_in_prompt, value_of, think_ids
        self.pieces, self.calls, self.held, self.state = list[tuple[str, str]](), list[dict[str, Any]](), "", "start"
        self.inside = self.was_inside = think_open_in_prompt  # was_inside: before the latest token
        self.fresh = False  # whether line breaks that come now belong to a tag

    def push(self, text: str, token: int | None = None, ended: bool = False) -> list[tuple[str, str]]:
        """Takes the text of the next token, and its id if there is one; `ended`: no more will come."""
        n, self.held, self.was_inside = len(self.pieces), self.held + text, self.inside
        if token is not None:
            self.inside = token == self.think_ids[0] or self.inside and token != self.think_ids[1]
        while self.held and self.step(ended):
            pass
        return self.pieces[n:]

    def finish(self, ended: bool = True) -> Answer:
        """The parts; if the answer hasn't `ended`, those so far."""
        self.push("", ended=ended)
        kinds, calls = (("content", "call", ""), []) if self.state == "malformed" else (("content",), self.calls)
        thought, content = ("".join(text for kind, text in self.pieces if kind in each)
                            for each in (("thinking",), kinds))
        return Answer(thought or None, content, calls, self.thinks and self.state in ("start", "thinking"))

    def give(self, kind: str, n: int) -> None:
        """Makes the next n characters a piece."""
        self.pieces += [(kind, self.held[:n])] if n else []
        self.held = self.held[n:]

    def step(self, ended: bool) -> bool:
        """Gives what is certain of `held` -> whether the state has changed."""
        if self.fresh:
            self.give("tag", len(self.held) - len(self.held.lstrip("\n")))
            self.fresh = not self.held
        state, text = self.state, self.held.lstrip()
        space = len(self.held) - len(text)
        if state == "start" and (ended or not "<think>".startswith(text) or text == "<think>"):
            if text.startswith("<think>"):
                self.give("tag", space + len("<think>"))
                self.thinks = True
            self.state, self.fresh = "thinking" if self.thinks else "outside", self.thinks
        elif state == "thinking":
            thought, closing, _ = self.held.partition("</think>")
            if not closing:  # a call may end it, which only the end of the answer tells
                thought, call, _ = self.held.partition("<tool_call>")
                thought = thought if call or ended else certain(thought, "</think>", "<tool_call>")
            body = thought.rstrip("\n")
            self.give("thinking", len(body))
            if closing or ended:
                self.give("tag", len(thought) - len(body) + len(closing))
                self.state, self.fresh = "outside" if closing or self.held else state, bool(closing)
        elif state == "outside":
            text, call, _ = self.held.partition("<tool_call>")
            text = text if call or ended else certain(text, "<tool_call>")
            self.give("" if self.calls else "content", len(text if ended and not call else text.rstrip()))
            self.state = "call" if call else state
        elif state == "call" and (ended or "</tool_call>" in text):
            found: Any = TOOL_CALL.match(text)
            in_xml = text.removeprefix("<tool_call>").lstrip().startswith("<function=")  # a value may hold the last tag
            if ended or found[0].endswith("</tool_call>") and (found["name"] or not in_xml):
                if complete := called(found, self.value_of):
                    self.give("", space)
                    self.give("call", len(found[0]))
                    self.calls.append(complete)
                self.state = "outside" if complete else "malformed"
        elif state == "malformed":
            self.give("content", len(self.held))
        return self.state != state


def certain(text: str, *tags: str) -> str:
    """The text without an end that may begin one of the tags."""
    return text[:next((i for i in range(max(len(text) - 10, 0), len(text))
                       if any(tag.startswith(text[i:]) for tag in tags)), len(text))]


def called(found: re.Match[str], value_of: Callable[[str, str, str], Any]) -> dict[str, Any] | None:
    """The call in a match of TOOL_CALL; None if it is malformed."""
    if (name := found["name"]) is not None:
        parameters = re.findall(PARAMETER, found["body"], re.DOTALL)
        return {"name": name, "arguments": {key: value_of(name, key, text) for key, text in parameters}}
    try:
        call = json_value(found["json"])
    except (ValueError, RecursionError):
        return None
    valid = isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call
    return {"name": call["name"], "arguments": call["arguments"]} if valid else None


def parse_answer(text: str, think_open_in_prompt: bool = False,
                 value_of: Callable[[str, str, str], Any] = json_or_text) -> Answer:
    """Takes a model's output apart into reasoning, content and tool calls. Accepts any text, never raises.

    `think_open_in_prompt`: the prompt ended inside `<think>`, as Thinking-2507's template ends it, so the text starts
    with reasoning. Text before a thought is left out; a first </think> that nothing opened ends a thought, too.
    """
    while text.endswith(END_TOKENS):
        text = text.removesuffix(END_TOKENS[0]).removesuffix(END_TOKENS[1])
    tag = "" if think_open_in_prompt else "".join(re.findall("<think>|</think>|<tool_call>", text)[:1])
    reader = AnswerReader(think_open_in_prompt or tag == "</think>", value_of)
    reader.push(text[text.index(tag):] if tag == "<think>" else text)
    return reader.finish()


# ---- Loading ---------------------------------------------------------------------------------------------------------

# How Qwen's tokenizers cut a text before the merges, as their tokenizer.json says.
SPLIT_PATTERNS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                  r"\s+(?!\S)|\s+")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer in a model's folder.

    Reads `tokenizer.json`, or else `vocab.json` and `merges.txt`, and, where they exist, `tokenizer_config.json` (names
    of special tokens, some tokens, the template of older models) and `chat_template.jinja`, which wins. Raises
    InputError if they are missing or damaged.
    """
    file = Path(path) / "tokenizer.json"
    parts = file.with_name("vocab.json"), file.with_name("merges.txt")
    if not file.is_file() and not parts[0].is_file():
        raise InputError(f"{file} does not exist; a model's folder has one")
    with library_errors(f"cannot read {file if file.is_file() else f'{parts[0]} and merges.txt'}"):
        backend = tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else merging(*map(str, parts))
    config_file, template_file = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
    config = read_json_object(config_file) if config_file.is_file() else {}
    if not template_file.is_file():
        return make_tokenizer(backend, config, config_file)
    with library_errors(f"cannot read {template_file}"):
        template = template_file.read_text(encoding="utf-8")
    return make_tokenizer(backend, config | {"chat_template": template}, config_file, template_file)


def merging(vocabulary: str, merges: str) -> tokenizers.Tokenizer:
    """What Qwen's own folders have in place of tokenizer.json: the files vocab.json and merges.txt."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocabulary, merges))
    cutters = tokenizers.pre_tokenizers
    backend.normalizer, backend.decoder = tokenizers.normalizers.NFC(), tokenizers.decoders.ByteLevel()
    backend.pre_tokenizer = cutters.Sequence([cutters.Split(tokenizers.Regex(SPLIT_PATTERNS), "isolated"),
                                              cutters.ByteLevel(add_prefix_space=False, use_regex=False)])
    return backend


def make_tokenizer(backend: tokenizers.Tokenizer, config: dict[str, Any], config_file: Path,
                   template_file: Path | None = None) -> Tokenizer:
    """A Tokenizer from a `tokenizers` object and the content of tokenizer_config.json. The files are for errors."""
    if not (isinstance(backend.model, tokenizers.models.BPE)
            and isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
            and isinstance(backend.normalizer, tokenizers.normalizers.NFC | None)):  # others may take any memory
        raise InputError(f"the tokenizer beside {config_file} is not a byte-level BPE with NFC, as Qwen3 has")
    with library_errors(f"cannot use the tokenizer beside {config_file}"):
        # A file saved while training may cut or pad every text that is encoded; transformers resets that, too.
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")  # with some damaged files, the library panics at any text
    _add_config_tokens(backend, config, config_file)
    return Tokenizer(backend, _config_template(config, config_file), _named_tokens(config, config_file),
                     str(template_file or config_file))


def _named_tokens(config: dict[str, Any], file: Path) -> dict[str, str]:
    """`eos_token`, `pad_token` and the like, as the variables of that name in a chat template."""
    named = {key: value["content"] if isinstance(value, dict) and "content" in value else value  # in older files
             for key, value in config.items() if key.endswith("_token") and not isinstance(value, bool | None)}
    if wrong := [key for key, text in named.items() if not isinstance(text, str)]:
        raise InputError(f'{file}: {wrong[0]} must be a string or an object with "content"')
    return named


def _config_template(config: dict[str, Any], file: Path) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((each.get("template") for each in template
                         if isinstance(each, dict) and each.get("name") == "default"), template)
    if not isinstance(template, str | None):
        raise InputError(f'{file}: chat_template must be a string or a list with a {{"name": "default", "template"}}')
    return template


def _add_config_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], file: Path) -> None:
    """Adds the tokens that only the config knows, such as `<think>` of Qwen3's base models, and checks all ids."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(re.fullmatch("[0-9]{1,9}", key) and isinstance(entry, dict)
                                               for key, entry in listed.items()):
        raise InputError(f"{file}: added_tokens_decoder must be an object of id: token")
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    with library_errors(f"{file}: added_tokens_decoder is malformed"):
        tokens = {int(key): tokenizers.AddedToken(**{name: entry[name] for name in fields if name in entry})
                  for key, entry in listed.items()}
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        # The library numbers them itself, from the end of its vocabulary on.
        backend.add_tokens([token for _, token in sorted(tokens.items()) if token.content not in known])
    for token_id, token in tokens.items():
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise InputError(f"{file} gives the token {token.content[:50]!r} the id {token_id}, but in tokenizer.json "
                             f"beside it, it is {actual}; take both files from the same model")
