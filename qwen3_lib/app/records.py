"""The records of a job: requests from JSON lines, plain text or OpenAI's batch files; and their results.

A record is identified by the number of its line, from 1 on. The id belongs to the user: it may be missing (then it is
the number) or repeat.
"""
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen3 import Model
from qwen3_asr import hears
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.choir import SpokenRequest
from qwen3_lib.generation.transcript import SpeechRequest, usual_part
from qwen3_lib.app.fields import CHAT, REQUEST_OPTIONS, Refusal, body_options, known
from qwen3_lib.app.openai import Door, GenerationRequest, chat_request, request_of
from qwen3_lib.app.objects import chat_choice, object_of, usage_of
from qwen3_lib.app.report import as_json
from qwen3_lib.io.facts import model_name
from qwen3_lib.io.errors import InputError, brief, is_whole, parse_json
from qwen3_lib.generation.messages import encoded
from qwen3_tts import speak, speaks

Row = dict[str, Any]
Id = str | int | float
# Tables are not read -> what makes JSON lines of one whose column TEXT holds the prompts.
TABLES = {".csv": """python -c "import csv, json; [print(json.dumps({'prompt': row['TEXT']})) for row in """
                  """csv.DictReader(open('%s', newline='', encoding='utf-8-sig'))]" > in.jsonl""",
          ".parquet": """python -c "import pandas; pandas.read_parquet('%s').rename(columns={'TEXT': 'prompt'})"""
                      """[['prompt']].to_json('in.jsonl', orient='records', lines=True)\""""}


@dataclass(frozen=True)
class JobSettings:
    """What the command line says about all records. A resumed job must have the same settings."""
    options: dict[str, Any] = field(default_factory=dict)  # defaults for the options of Completion
    system: str | None = None  # for records without a system message
    tools: list[dict] | None = None
    think: bool | None = None
    raw: bool = False  # continue the prompts as plain text, without the chat template
    openai: bool = False  # write results in the form of OpenAI's batch files
    context: int | None = None  # most tokens of a prompt and its answer


# ---- The input file --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Records:
    """An input file, as it was when the job began."""
    name: str
    form: str  # "json" or "text"
    sha256: str
    changed: int  # time of the file's last change
    n_records: int = 0
    last: int = 0  # the highest number of a record: more than n_records if there are blank lines

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """(number, line) of each record."""
        return lines_of(self.name)

    def check_unchanged(self) -> None:
        """Raises InputError if the file was written to after the job began."""
        if os.stat(self.name).st_mtime_ns != self.changed:
            raise InputError(f"{self.name}: changed while the job ran, so results may belong to other lines")


def open_source(name: str, text: bool = False) -> Records:
    """Reads the whole file once: its checksum and its number of records. Raises InputError."""
    if name == "-" or os.path.lexists(name) and not os.path.isfile(name):
        raise InputError(f"{name}: not a regular file; a job reads its input several times, so write it into a file")
    try:
        changed, form = os.stat(name).st_mtime_ns, "text" if text else form_of(name)
        with open(name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        source = Records(name, form, digest, changed)
        n_records = last = 0
        for n_records, (last, _) in enumerate(source.rows(), 1):
            pass
        return replace(source, n_records=n_records, last=last)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from error


def form_of(name: str) -> str:
    """The form of a file, by its suffix; without a known one, by the first character that isn't white space."""
    if (suffix := Path(name).suffix.lower()) in TABLES:
        raise InputError(f"{name}: tables are not read; make JSON lines of it: {TABLES[suffix] % name}")
    if suffix in (".jsonl", ".ndjson", ".json"):
        return "json"
    _, first = next(lines_of(name), (0, b"{"))
    return "json" if first.startswith(b"{") else "text"


def lines_of(name: str) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that isn't blank."""
    with open(name, "rb") as file:
        for number, line in enumerate(file, 1):
            if line := line.removeprefix(b"\xef\xbb\xbf").strip():  # files put together have several
                yield number, line


# ---- From a row to a request -----------------------------------------------------------------------------------------

SPEAK = ("voice", "language", "instruct", "describe", "seed", "temperature", "max_seconds")  # beside "speak"
# Fields of a record with --raw; the last three are the template's, and have no effect without it.
RAW = (*REQUEST_OPTIONS, "schema", "tools", "enable_thinking", "chat_template_kwargs")


def parsed_row(line: bytes, form: str = "json") -> Row:
    """The record in a line, as an object. Raises InputError for a line that isn't one."""
    try:
        value = {"prompt": line.decode()} if form == "text" else parse_json(line.decode(), "the record")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from error
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found {type(value).__name__}")
    return value


def id_of(row: Row, line: int) -> Id:
    """The record's id, or the number of its line if it has none. Raises InputError unless it is a text or a number."""
    given = row.get("custom_id", row.get("id"))
    if given is None:
        return line
    if type(given) not in (str, int, float) or type(given) is float and not math.isfinite(given):  # not True, not NaN
        raise InputError(f"the id must be a text or a number, not {brief(repr(given))}")
    return given


def request_of_row(model: Model, settings: JobSettings, row: Row, line: int, folder: Path | None = None,
                   longest: int = 0) -> GenerationRequest | SpeechRequest | SpokenRequest:
    """The request in a record, for one answer. Raises InputError for wrong fields.

    A record has the fields of a chat, see openai.py, or "prompt" in place of "messages", or "audio", or "speak". Paths
    of files are relative to `folder`; without it, no file is read. `longest`: most tokens of a part of a sound, with
    its text.
    """
    options = dict(settings.options)
    if options.get("seed") is not None:  # otherwise equal prompts would have equal answers
        options["seed"] += line - 1
    openai = bool({"custom_id", "body"} & row.keys())
    if "audio" in row and not openai and folder is not None:
        body = known({"context": settings.system or ""} | row, ("audio", "language", "context", *REQUEST_OPTIONS))
        if not isinstance(body["audio"], str) or not isinstance(body["context"], str):
            raise InputError("audio and context must be texts")
        return SpeechRequest(model, folder / body["audio"], body.get("language"), body["context"], usual_part(longest),
                             body_options(options, body))
    if "speak" in row and not openai:
        body = {name: value for name, value in options.items() if name in SPEAK} | known(row, ("speak", *SPEAK))
        if not isinstance(text := body.pop("speak"), str):
            raise InputError("speak must be a text")
        return SpokenRequest(speak(model, text, **body))
    if speaks(model):
        raise InputError('this model speaks: a record must be {"speak": "text"}')
    if hears(model):
        raise InputError('this model writes down sounds: a record must be {"audio": "file.wav"}')
    body = known(inner_request(row) if openai else row, (*CHAT, "prompt"))
    if not openai and not isinstance(body.get("logprobs", True), bool):  # a number, as in the library
        options["logprobs"] = body.pop("logprobs")
    prompt = body.pop("prompt", None)
    if ("messages" in body) is (prompt is not None):
        raise InputError('there must be a "prompt" or "messages"' + (", not both" if "messages" in body else ""))
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise InputError("the prompt is empty" if isinstance(prompt, str) else "the prompt must be a text")
    context = model.config.context_length
    if settings.raw:
        if prompt is None:
            raise InputError("messages need the chat template, which --raw leaves out")
        body = known(body, RAW)
        if "schema" in body:
            options["schema"] = body["schema"]
        return request_of("text", body, [encoded(model.tokenizer, prompt, context)],
                          body_options(options, body).over(model.sampling), context)
    if prompt is not None:
        body["messages"] = [{"role": "user", "content": prompt}]
    chat = {"system": settings.system, "tools": settings.tools, "enable_thinking": settings.think,
            "chat_template_kwargs": options.pop("chat_template_kwargs", None)}
    asked = chat_request(model, body, Door(context, folder, options, chat))
    if asked.n > 1 or asked.stream or asked.one_call:
        raise InputError("n must be 1, stream false and parallel_tool_calls true here")
    return asked


# ---- OpenAI's batch files --------------------------------------------------------------------------------------------
# Source: the Batch page of OpenAI's API reference

CHAT_URL = "/v1/chat/completions"


def inner_request(row: Row) -> Row:
    """The request in a line {"custom_id", "method", "url", "body"}. The job's model answers any `model`."""
    body, unknown = row.get("body"), row.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        raise InputError(f"unknown key {brief(min(unknown))} beside custom_id, method, url and body")
    if row.get("method", "POST") != "POST" or row.get("url", CHAT_URL) != CHAT_URL:
        raise InputError(f"only POST {CHAT_URL} is answered, not {brief(row.get('method'))} {brief(row.get('url'))}")
    if not isinstance(body, dict):
        raise InputError('"body" must be an object with the request')
    return body


def openai_answer(completion: Completion, line: int) -> Row:
    """The chat.completion object of an answer."""
    choice = {"index": 0, **chat_choice(completion)}
    usage = usage_of(len(completion.prompt_ids), len(completion.token_ids), completion.reasoning_tokens)
    return object_of("chat.completion", f"chatcmpl-{line}", model_name(completion.model), [choice], usage=usage)


# ---- Results ---------------------------------------------------------------------------------------------------------

TIMES = ("cached_tokens", "seconds_to_first_token", "seconds")  # depend on what else runs: left out of results
OPENAI_ID = re.compile("batch_req_([0-9]{1,18})")


def answer_row(found: Completion | Row, line: int, record_id: Id, openai: bool) -> Row:
    """The result of a record: what the model has answered, or the object of a sound's text."""
    if isinstance(found, dict):
        value = found
    elif openai:
        value = openai_answer(found, line)
    else:
        value = {key: part for key, part in as_json(found, found.options.logprobs).items() if key not in TIMES}
    if not openai:
        return {"line": line, "id": record_id} | value
    response = {"status_code": 200, "request_id": f"req_{line}", "body": value}
    return {"id": f"batch_req_{line}", "custom_id": record_id, "response": response, "error": None}


def refused_row(error: InputError, line: int, record_id: Id | None, openai: bool) -> Row:
    """The result of a record that can't be answered: one line that says why."""
    if not openai:
        return {"line": line, "id": record_id, "error": str(error)}
    body = (error if isinstance(error, Refusal) else Refusal(400, str(error))).value
    return {"id": f"batch_req_{line}", "custom_id": record_id, "error": None,
            "response": {"status_code": 400, "request_id": f"req_{line}", "body": body}}


def result_of(line: bytes) -> tuple[int, bool] | None:
    """(the number of its record, whether the model answered it) of a line of the output; None if it is no result."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not line.endswith(b"\n") or not isinstance(value, dict):
        return None
    number: Any
    number, name, response = value.get("line"), value.get("id"), value.get("response")
    if number is None and isinstance(name, str) and (found := OPENAI_ID.fullmatch(name)):
        number = int(found[1])
    failed = response.get("status_code") != 200 if isinstance(response, dict) else "error" in value
    return (number, not failed) if is_whole(number, 1) else None
