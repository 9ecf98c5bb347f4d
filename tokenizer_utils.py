"""Text in, token ids out, and back again: everything about Qwen3 that is text rather than arithmetic.

In the order in which a conversation meets it:

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

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers

__all__ = ["Answer", "InputError", "StreamDecoder", "Tokenizer", "load_tokenizer", "parse_answer"]


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

def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level BPE vocabulary (GPT-2's alphabet): 256 entries.

    Printable Latin-1 characters stand for themselves, the other bytes get the code points from 256 up, in order: a
    space is written "Ġ" (0x20 + 0x100) and a newline "Ċ".
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_alphabet()


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


MEDIA = {"image": "an image", "video": "a video", "audio": "audio"}


def check_parts(parts: list[Any], where: str) -> None:
    """Raises InputError, which begins with `where`, unless all parts of a message's content are texts."""
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            continue
        names = " ".join(map(str, (part.get("type"), *part))) if isinstance(part, dict) else ""
        if medium := next((MEDIA[name] for name in MEDIA if name in names), None):
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
    if calls is not None and not (isinstance(calls, list) and all(map(is_tool_call, calls))):
        raise InputError(f'{where}: "tool_calls" must be a list of {{"function": {{"name": ..., "arguments": ...}}}}')


def is_picture(part: Any) -> bool:
    """True for a part of a message's content that holds a picture, in our form or OpenAI's; it isn't checked here."""
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PICTURES


def is_tool_call(call: Any) -> bool:
    """True for {"name", "arguments"}, also as the "function" of an object. OpenAI's API has the arguments as text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return (isinstance(function, dict) and isinstance(function.get("name"), str)
            and "arguments" in function)


def _parse_arguments(message: dict[str, Any], where: str) -> None:
    """Makes objects of a message's tool calls' arguments, which OpenAI's API has as JSON texts."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
            function["arguments"] = parse_json(text.strip() or "{}", f"{where}: the arguments of a tool call")


def _prepare_messages(messages: Sequence[dict[str, Any]], join_text_parts: bool,
                      parse_arguments: bool) -> list[dict[str, Any]]:
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
        if join_text_parts and isinstance(parts := message.get("content"), list):
            check_parts(parts, f"message {index}")
            message["content"] = "".join(part["text"] for part in parts)
        if parse_arguments:
            _parse_arguments(message, f"message {index}")
        prepared.append(message)
    return prepared


# ---- The chat template, rendered as transformers does ----------------------------------------------------------------

MAX_TEMPLATE = 2**16  # characters; the longest of 70 published templates has 17,000


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

    def tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    if len(source) > MAX_TEMPLATE:
        raise jinja2.TemplateError(f"it has {len(source)} characters, more than {MAX_TEMPLATE}")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception,
                            "strftime_now": lambda format: datetime.now().strftime(format)}
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
        # Qwen3's template takes the arguments of a tool call as a JSON text, too; Qwen3.5's lists them one by one.
        self.lists_arguments = bool(re.search(r"arguments\s*(\|\s*items|\.items\()", chat_template or ""))
        self._template = None
        if chat_template is not None:
            with library_errors(f"the chat template in {template_source} failed"):
                self._template = compile_template(chat_template)

    @cached_property
    def template_variables(self) -> set[str]:
        """The variables of the chat template that `chat_template_kwargs` may set."""
        if self._template is None or self.chat_template is None:
            return set()
        found = jinja2.meta.find_undeclared_variables(self._template.environment.parse(self.chat_template))
        return found - {"messages", "tools", "documents", "add_generation_prompt"}

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None: `token_to_id("</think>")`."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as transformers' `tokenizer.encode` gives them.

        Special tokens written out in the text become their ids. With add_special_tokens, the model's post-processor
        runs (an embedding model's appends `<|endoftext|>`); a chat template's text is encoded without it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where = brief(repr(text[:error.start + 1].rpartition("\n")[2][-20:]))
            raise InputError(f"the text is not valid Unicode: {where} ends with a lone surrogate") from error
        with library_errors("cannot encode the text"):  # `encode` is slower, and other threads would wait for it
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

        `messages` are `{"role", "content"}` objects, assistant turns may hold `reasoning_content` (or `thinking`, or
        `reasoning`) and `tool_calls`; `tools` are JSON schemas. `enable_thinking=None` leaves the choice to the
        template. A content given as a list of parts reaches the template unchanged, as in transformers;
        `join_text_parts=True` joins the parts' texts first, because Qwen3's template renders nothing for a list.
        `chat_template_kwargs` sets other variables of the template, such as Qwen3.8's `reasoning_effort` and
        `preserve_thinking`.
        """
        if self._template is None:
            raise InputError("the model has no chat template; use --raw to give it plain text, "
                             "or put a chat_template.jinja into its folder")
        given = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(given, dict) or given.keys() - self.template_variables:
            raise InputError("chat_template_kwargs must be an object of variables that the chat template has: "
                             f"{', '.join(sorted(self.template_variables)) or 'it has none'}")
        variables = self.named_tokens | _plain_json(given, "chat_template_kwargs") | {
            "messages": _prepare_messages(messages, join_text_parts, self.lists_arguments),
            "tools": _prepare_tools(tools), "documents": None, "add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        with library_errors(f"the chat template in {self._template_source} failed"):
            return self._template.render(variables)


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


def stream_text(tokenizer: Tokenizer, token_ids: Iterable[int]) -> Iterator[str]:
    """The text of a stream of token ids, in pieces that are complete; special tokens are left out."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True)
    yield from filter(None, map(decoder.push, token_ids))
    if rest := decoder.flush():
        yield rest


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
    """The value of a text in a call in XML: JSON if it is any. qwen3_lib/generation/answer.py knows tools' types."""
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return text


def parse_answer(text: str, think_open_in_prompt: bool = False,
                 value_of: Callable[[str, str, str], Any] = json_or_text) -> Answer:
    """Takes a model's output apart into reasoning, content and tool calls. Accepts any text, never raises.

    `think_open_in_prompt` says that the prompt ended inside `<think>` (the Thinking-2507 template does that), so the
    text starts with reasoning. A malformed tool call stays in the content, and so do all others with it.
    """
    while text.endswith(END_TOKENS):
        text = text.removesuffix(END_TOKENS[0]).removesuffix(END_TOKENS[1])
    reasoning, content, truncated = _split_reasoning(text, think_open_in_prompt)
    tool_calls = _tool_calls(content, value_of)
    if tool_calls:
        content = content[:content.index("<tool_call>")].rstrip()
    return Answer(reasoning.strip("\n") or None, content, tool_calls, truncated)


def _split_reasoning(text: str, think_open_in_prompt: bool) -> tuple[str, str, bool]:
    """Reasoning, content, and whether the text ended within the reasoning."""
    first = re.search("<think>|</think>|<tool_call>", text)
    if first and first[0] == "<tool_call>" and not think_open_in_prompt:  # tags in its arguments are text
        return "", text, False
    before, opening, after = text.partition("<think>") if first and first[0] == "<think>" else (text, "", "")
    body = after if opening else before
    reasoning, closing, content = body.partition("</think>")
    if closing:
        return reasoning, content.lstrip("\n"), False
    if not opening and not think_open_in_prompt:
        return "", body, False
    # Unclosed: only a tool call can end it, since the models sometimes go straight from thought to call.
    reasoning, call, rest = body.partition("<tool_call>")
    return reasoning, call + rest, not call


# A value may contain the tags, too: its end is the one that another parameter or the function's end follows. Without
# backtracking (possessive, atomic), because a text with many open tags would otherwise take exponential time.
PARAMETER = r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
TOOL_CALL = re.compile(
    rf"""<tool_call>(?:\s*<function=(?P<name>[^<>{{}}"'\s]+)>(?P<body>(?>{PARAMETER})*+\s*</function>)\s*"""
    r"(?:</tool_call>|\Z)|(?P<json>.*?)(?:</tool_call>|\Z))", re.DOTALL)


def _tool_calls(content: str, value_of: Callable[[str, str, str], Any]) -> list[dict[str, Any]]:
    """The tool calls in a content, or none if one of them is malformed."""
    calls = []
    for found in TOOL_CALL.finditer(content):
        if (name := found["name"]) is not None:
            parameters = re.findall(PARAMETER, found["body"], re.DOTALL)
            calls.append({"name": name, "arguments": {key: value_of(name, key, text) for key, text in parameters}})
            continue
        try:
            call = json_value(found["json"])
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return []
        calls.append({"name": call["name"], "arguments": call["arguments"]})
    return calls


# ---- Loading ---------------------------------------------------------------------------------------------------------

def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer in a model's folder.

    Reads `tokenizer.json` and, where they exist, `tokenizer_config.json` (names of special tokens, tokens that base
    models list nowhere else, the chat template of older models) and `chat_template.jinja` (which wins).
    Raises InputError if a file is missing, unreadable, malformed, or contradicts another.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{file} does not exist; a model's folder has one")
    with library_errors(f"cannot read {file}"):
        backend = tokenizers.Tokenizer.from_file(str(file))
    config_file, template_file = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
    config = read_json_object(config_file) if config_file.is_file() else {}
    if not template_file.is_file():
        return make_tokenizer(backend, config, config_file)
    with library_errors(f"cannot read {template_file}"):
        template = template_file.read_text(encoding="utf-8")
    return make_tokenizer(backend, config | {"chat_template": template}, config_file, template_file)


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
    named = {}
    for key, value in config.items():
        if not key.endswith("_token") or value is None or isinstance(value, bool):  # add_bos_token is a switch
            continue
        text = value.get("content") if isinstance(value, dict) else value  # older files describe it as an object
        if not isinstance(text, str):
            raise InputError(f'{file}: {key} must be a string or an object with "content"')
        named[key] = text
    return named


def _config_template(config: dict[str, Any], file: Path) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template
                         if isinstance(entry, dict) and entry.get("name") == "default"), template)
    if not isinstance(template, str | None):
        raise InputError(f'{file}: chat_template must be a string or a list with a {{"name": "default", '
                         '"template": ...}')
    return template


TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _add_config_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], file: Path) -> None:
    """Adds the tokens that only the config's `added_tokens_decoder` knows, and checks the ids of all of them.

    Qwen3's base checkpoints list `<think>` and three more (ids 151665 to 151668) in no other place.
    """
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(re.fullmatch("[0-9]{1,9}", key) and isinstance(entry, dict)
                                               for key, entry in listed.items()):
        raise InputError(f"{file}: added_tokens_decoder must be an object of id: token")
    with library_errors(f"{file}: added_tokens_decoder is malformed"):
        tokens = {int(key): tokenizers.AddedToken(**{name: entry[name] for name in TOKEN_FIELDS if name in entry})
                  for key, entry in listed.items()}
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        # The library numbers them itself, from the end of its vocabulary on.
        backend.add_tokens([token for _, token in sorted(tokens.items()) if token.content not in known])
    for token_id, token in tokens.items():
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise InputError(f"{file} gives the token {token.content[:50]!r} the id {token_id}, but in tokenizer.json "
                             f"beside it, it is {actual}; take both files from the same model")
