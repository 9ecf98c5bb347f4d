"""The records of a job: requests from JSON lines, OpenAI's batch files, CSV or Parquet, and results in their form.

A record is known by the number of its line in the file, from 1 on; in a table, by the number of its row. Its id is the
user's own affair: it may be missing (then it is the number) or occur twice.
"""
import csv
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from qwen3 import Completion, Model, default_sampling
from qwen3_app.files import check_message, checked_tools
from qwen3_app.terminal import as_json, model_name
from qwen3_io.arguments import OPTIONS
from qwen3_io.errors import LARGEST_TEXT, InputError, brief, did_you_mean, is_whole, some

Row = dict[str, Any]
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of such bytes


@dataclass(frozen=True)
class Settings:
    """How the records are read and answered, as the command line says. A resumed job must have the same."""
    options: dict[str, Any] = field(default_factory=dict)  # defaults for the options of Completion
    system: str | None = None  # for records without a system message
    tools: list[dict] | None = None
    think: bool | None = None
    raw: bool = False  # continue the prompts as plain text, without the chat template
    template: str | None = None  # the prompt is this text with {columns} filled in
    openai: bool = False  # results in the form of OpenAI's batch files
    context: int | None = None  # the longest prompt with its answer


# ----------------------------------------------------------------------------------------------------------------------
# The input file
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Source:
    """An input file: its name, what it held when the job began, and its rows."""
    name: str
    n_bytes: int
    sha256: str
    n_rows: int  # no row has a higher number
    stamp: tuple[int, int]  # size and time of the last change
    rows: Callable[[], Iterator[tuple[int, bytes | Row | InputError]]]  # (number, the row as it lies in the file)

    def check_unchanged(self) -> None:
        """Raises InputError if the file was written to while it was read."""
        if stamp(self.name) != self.stamp:
            raise InputError(f"{self.name}: has changed while the job ran, so results may belong to other lines")


def open_source(name: str, template: str | None) -> Source:
    """Reads the file once, for its checksum. Raises InputError for one that can't be read or lacks a column."""
    if name == "-" or os.path.lexists(name) and not os.path.isfile(name):
        raise InputError(f"{'stdin' if name == '-' else name}: not a regular file, and a job that goes on after a stop "
                         "must read its input again: write it into a file first")
    suffix, n_bytes, n_lines, last, digest = Path(name).suffix.lower(), 0, 0, b"\n", hashlib.sha256()
    try:
        before = stamp(name)
        with open(name, "rb") as file:
            while data := file.read(2**20):
                digest.update(data)
                n_bytes, n_lines, last = n_bytes + len(data), n_lines + data.count(b"\n"), data[-1:]
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise InputError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    n_lines += last != b"\n"
    rows: Callable[[], Iterator[tuple[int, Any]]]
    if suffix not in (".csv", ".parquet"):
        rows = lambda: json_lines(name)  # noqa: E731 (a def would need a name)
    elif template is None:
        raise InputError(f"{name}: say which column holds the prompts: --column NAME, or --template \"... {{NAME}}\"")
    elif suffix == ".csv":
        n_lines, rows = csv_table(name, columns_of(template))
    else:
        n_lines, rows = parquet_table(name, columns_of(template))
    return Source(name, n_bytes, digest.hexdigest(), n_lines, before, rows)


def stamp(name: str) -> tuple[int, int]:
    """(size, time of the last change) of a file."""
    status = os.stat(name)
    return status.st_size, status.st_mtime_ns


def json_lines(name: str) -> Iterator[tuple[int, bytes | InputError]]:
    """(number, line) of each line that isn't blank; an error for one of more than LARGEST_TEXT bytes."""
    with reading(name) as file:
        number = 0
        while line := file.readline(LARGEST_TEXT + 1):
            number += 1
            if len(line) > LARGEST_TEXT:
                while line and not line.endswith(b"\n"):  # passes over the rest
                    line = file.readline(LARGEST_TEXT)
                yield number, InputError(f"a line of more than {LARGEST_TEXT} bytes, which no model's context can hold")
            elif text := line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip():
                yield number, text


def reading(name: str) -> BinaryIO:
    """The file, open. Raises InputError."""
    try:
        return open(name, "rb")
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from error


def csv_table(name: str, columns: list[str]) -> tuple[int, Callable[[], Iterator[tuple[int, Row | InputError]]]]:
    """(the number of rows, the rows) of a CSV file with a header, all values as text; an error for a row too long.

    Raises InputError for a missing column, and for quotes that don't end or end within a value.
    """
    csv.field_size_limit(LARGEST_TEXT)

    def rows() -> Iterator[tuple[int, Row | InputError]]:
        # A byte that isn't UTF-8 becomes a lone surrogate, for which its row alone is refused.
        with open(name, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader, number = csv.DictReader(file, strict=True), 0
            try:
                check_columns(name, columns, reader.fieldnames or ())
                for number, row in enumerate(reader, 1):
                    if row.pop(None, []):
                        yield number, InputError("more values than the header has columns: put texts with a comma into "
                                                 "quotes")
                    elif any(NOT_UTF8.search(value or "") for value in row.values()):
                        yield number, InputError("not UTF-8 text")
                    else:
                        yield number, row
            except csv.Error as error:
                raise InputError(f"{name}: row {number + 1} is not CSV: {error}") from error

    return sum(1 for _ in rows()), rows


def parquet_table(name: str, columns: list[str]) -> tuple[int, Callable[[], Iterator[tuple[int, Row]]]]:
    """(the number of rows, the rows) of a Parquet file, read some thousand at a time by pyarrow or polars.

    Raises InputError if neither is installed, and for a damaged file or a missing column.
    """
    n_rows, names, read = by_pyarrow(name) or by_polars(name) or no_parquet(name)
    check_columns(name, columns, names)
    wanted = [column for column in names if column in {*columns, "id"}]
    return n_rows, lambda: enumerate(read(wanted), 1)


TOGETHER = 4096  # rows of a Parquet file in memory at a time
Parquet = tuple[int, list[str], Callable[[list[str]], Iterator[Row]]]  # number of rows, columns, read(columns)


def by_pyarrow(name: str) -> Parquet | None:
    """The file through pyarrow, or None if that isn't installed."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        return None
    try:
        opened = ParquetFile(name)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{name}: not a Parquet file, or damaged: {brief(error)}") from error

    def read(columns: list[str]) -> Iterator[Row]:
        try:
            for batch in opened.iter_batches(TOGETHER, columns=columns):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{name}: damaged: {brief(error)}") from error

    return opened.metadata.num_rows, opened.schema_arrow.names, read


def by_polars(name: str) -> Parquet | None:
    """The file through polars, or None if that isn't installed."""
    try:
        import polars
    except ImportError:
        return None
    try:
        table = polars.scan_parquet(name, glob=False)
        names, n_rows = table.collect_schema().names(), table.select(polars.len()).collect().item()
    except (polars.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{name}: not a Parquet file, or damaged: {brief(error)}") from error

    def read(columns: list[str]) -> Iterator[Row]:
        try:
            for start in range(0, n_rows, TOGETHER):
                yield from table.select(columns).slice(start, TOGETHER).collect().iter_rows(named=True)
        except (polars.exceptions.PolarsError, OSError) as error:
            raise InputError(f"{name}: damaged: {brief(error)}") from error

    return n_rows, names, read


def no_parquet(name: str) -> Parquet:
    raise InputError(f"{name}: reading Parquet needs pyarrow or polars: pip install pyarrow")


# ----------------------------------------------------------------------------------------------------------------------
# Templates: "Translate: {text}"
# ----------------------------------------------------------------------------------------------------------------------

PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")  # doubled braces stand for single ones


def columns_of(template: str) -> list[str]:
    """The columns that a template names. Raises InputError if there are none."""
    columns = [name for name in PLACE.findall(template) if name]
    if not columns:
        raise InputError(f"the template {brief(repr(template))} names no column in braces: all prompts would be alike")
    return columns


def check_columns(name: str, columns: Iterable[str], there: Iterable[str]) -> None:
    """Raises InputError for a column that isn't there."""
    for column in columns:
        if column not in {*there}:
            raise InputError(f"{name}: has no column {brief(column)}{did_you_mean(column, there)} (it has "
                             f"{some(there) or 'none'})")


def filled(template: str, row: Row) -> str:
    """The template with the row's values. Raises InputError for one that is missing or no text."""
    def value(place: re.Match) -> str:
        if place[1] is None:
            return place[0][0]
        found = row.get(place[1])
        if found is None or isinstance(found, bytes | list | dict):
            raise InputError(f"the column {brief(place[1])} " + ("is empty" if found is None else "holds no text"))
        return str(found)

    return PLACE.sub(value, template)


# ----------------------------------------------------------------------------------------------------------------------
# From a row to a request
# ----------------------------------------------------------------------------------------------------------------------

PARTS = ("id", "prompt", "messages", "tools", "enable_thinking")
KEYS = (*PARTS, *(name for name in OPTIONS if name not in ("cache", "lookup")))


def parsed(row: bytes | Row | InputError) -> Row:
    """The row as an object. Raises InputError for a line that isn't one."""
    if isinstance(row, InputError):
        raise row
    if isinstance(row, dict):
        return row
    try:
        value = json.loads(row.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {brief(error)}") from error
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found {type(value).__name__}")
    return value


def id_of(row: Row, line: int) -> str | int:
    """The record's id, or the number of its line if it has none. Raises InputError unless it is a text or a number."""
    given = row.get("custom_id", row.get("id"))
    if given is None:
        return line
    if type(given) not in (str, int):  # not True
        raise InputError(f"the id must be a text or a whole number, not {brief(repr(given))}")
    return given


def request(model: Model, settings: Settings, row: Row, line: int) -> tuple[list[int], dict[str, Any]]:
    """(the ids of the prompt, the options of Completion) of a record. Raises InputError that says what is wrong."""
    if settings.template is not None:
        row = {"prompt": filled(settings.template, row)}
    elif {"custom_id", "body"} & row.keys():
        row = from_openai(row)
    for key in row:
        if key not in KEYS:
            raise InputError(f"unknown key {brief(key)}{did_you_mean(key, KEYS)}")
    row = {key: value for key, value in row.items() if value is not None}
    options = settings.options | {key: value for key, value in row.items() if key not in PARTS}
    if "seed" not in row and settings.options.get("seed") is not None:
        options["seed"] += line - 1  # otherwise equal prompts would have equal answers
    if not isinstance(stop := options.get("stop", ""), str | list | tuple):
        raise InputError(f"stop must be a text or a list of texts, not {brief(repr(stop))}")
    prompt, think = row.get("prompt"), row.get("enable_thinking", settings.think)
    if ("messages" in row) is (prompt is not None):
        raise InputError('there must be a "prompt" or "messages"' + (", not both" if "messages" in row else ""))
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise InputError("the prompt is empty" if isinstance(prompt, str) else "the prompt must be a text")
    if settings.raw:
        if prompt is None:
            raise InputError("messages need the chat template, which --raw leaves out")
        return model.tokenizer.encode(prompt), options
    if not isinstance(think, bool | None):
        raise InputError(f"enable_thinking must be true or false, not {brief(repr(think))}")
    messages = conversation(row.get("messages", [{"role": "user", "content": prompt}]), settings.system)
    tools = checked_tools(row["tools"], "this record") if "tools" in row else settings.tools
    text = model.tokenizer.apply_chat_template(messages, tools, enable_thinking=think, join_text_parts=True)
    return model.tokenizer.encode(text), asdict(default_sampling(model, think)) | options


def conversation(messages: Any, system: str | None) -> list[dict]:
    """The checked messages, with the system prompt if they have none of their own."""
    if not isinstance(messages, list) or not messages:
        raise InputError('"messages" must be a list of messages, [{"role": "user", "content": "..."}, ...]')
    for i, message in enumerate(messages):
        check_message(message, f"message {i}")
    own = system is None or any(message["role"] == "system" for message in messages)
    return messages if own else [{"role": "system", "content": system}, *messages]


# ----------------------------------------------------------------------------------------------------------------------
# OpenAI's batch files. Source: the Batch and Chat Completions pages of OpenAI's API reference
# ----------------------------------------------------------------------------------------------------------------------

CHAT_URL = "/v1/chat/completions"
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
ONLY: dict[str, tuple] = {"n": (1,), "stream": (False,), "response_format": ({"type": "text"},), "logit_bias": ({},),
                          "tool_choice": ("auto",), "parallel_tool_calls": (True,)}  # the values that change nothing


def from_openai(row: Row) -> Row:
    """A line {"custom_id", "method", "url", "body"} as a record of ours. The model is the job's, whatever it names."""
    body, unknown = row.get("body"), row.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        raise InputError(f"unknown key {brief(min(unknown))} beside custom_id, method, url and body")
    if row.get("method", "POST") != "POST" or row.get("url", CHAT_URL) != CHAT_URL:
        raise InputError(f"only POST {CHAT_URL} is answered, not {brief(row.get('method'))} {brief(row.get('url'))}")
    if not isinstance(body, dict):
        raise InputError('"body" must be an object with the request')
    body = {key: value for key, value in body.items() if value is not None and key not in WITHOUT_EFFECT}
    for key, values in ONLY.items():
        if key in body and body.pop(key) not in values:
            raise InputError(f"{key} must be {json.dumps(values[0])} here")
    if not isinstance(kwargs := body.pop("chat_template_kwargs", {}), dict):
        raise InputError("chat_template_kwargs must be an object")
    top, wanted = body.pop("top_logprobs", 0), body.pop("logprobs", False)
    if not isinstance(wanted, bool):
        raise InputError(f"logprobs must be true or false here, not {brief(repr(wanted))}")
    options: Row = {RENAMED.get(key, key): value for key, value in {**kwargs, **body}.items()}
    return options | ({"logprobs": top} if wanted else {})


def openai_answer(completion: Completion, value: Row, line: int) -> Row:
    """The chat.completion object of an answer, from its as_json."""
    message: Row = {"role": "assistant", "content": value["text"] or None if value["tool_calls"] else value["text"]}
    if value["reasoning"] is not None:
        message["reasoning_content"] = value["reasoning"]
    if value["tool_calls"]:
        message["tool_calls"] = [
            {"id": f"call_{line}_{i}", "type": "function", "function": {
                "name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}}
            for i, call in enumerate(value["tool_calls"])]

    def scored(entry: Row) -> Row:
        said = completion.model.tokenizer.token_bytes(entry["id"])
        return {"token": entry["token"], "logprob": entry["logprob"], "bytes": list(said)}

    logprobs = {"content": [scored(entry) | {"top_logprobs": [scored(other) for other in entry["top"]]}
                            for entry in value["logprobs"]]} if "logprobs" in value else None
    n_prompt, n_answer = value["prompt_tokens"], value["completion_tokens"]
    return {"id": f"chatcmpl-{line}", "object": "chat.completion", "created": int(time.time()),
            "model": model_name(completion.model),
            "choices": [{"index": 0, "message": message, "logprobs": logprobs,
                         "finish_reason": value["finish_reason"]}],
            "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_answer, "total_tokens": n_prompt + n_answer}}


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------

TIMES = ("cached_tokens", "seconds_to_first_token", "seconds")  # depend on what else runs: left out of results
OPENAI_ID = re.compile("batch_req_([0-9]{1,18})")


def answered(completion: Completion, line: int, record_id: str | int, n_logprobs: int | None, openai: bool) -> Row:
    """The result of a record: what the model has answered."""
    value = {key: part for key, part in as_json(completion, n_logprobs).items() if key not in TIMES}
    if not openai:
        return {"line": line, "id": record_id} | value
    response = {"status_code": 200, "request_id": f"req_{line}", "body": openai_answer(completion, value, line)}
    return {"id": f"batch_req_{line}", "custom_id": record_id, "response": response, "error": None}


def refused(error: InputError, line: int, record_id: str | int | None, openai: bool) -> Row:
    """The result of a record that can't be answered: one line that says why."""
    if not openai:
        return {"line": line, "id": record_id, "error": str(error)}
    body = {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}}
    return {"id": f"batch_req_{line}", "custom_id": record_id, "error": None,
            "response": {"status_code": 400, "request_id": f"req_{line}", "body": body}}


def line_of(result: bytes) -> int | None:
    """The number of the record to which a line of the output belongs; None if it is no whole result."""
    try:
        value = json.loads(result)
    except (ValueError, RecursionError):
        return None
    if not result.endswith(b"\n") or not isinstance(value, dict):
        return None
    line, name = value.get("line"), value.get("id")
    if line is None and isinstance(name, str) and (found := OPENAI_ID.fullmatch(name)):
        line = int(found[1])
    return line if is_whole(line, 1) else None
