"""A job: one model answers many records, and nothing that stops the process loses a result.

The output file is the journal. A result is one line with the number of its record; it is written at once and never
changed, so the lines of the output say which records are done. A small file beside it, OUT.job, says what the job is:
the input, the model and the options. A job that is started again compares these, removes torn lines from the output,
and answers the other records.

The promise: after a kill, or on a full disk, each whole line is kept, and its record is never computed again. After a
power cut, the same holds for lines older than SYNC seconds.
"""
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any, BinaryIO

from qwen3 import Model
from qwen3_lib.app.dictation import SpeechRequest
from qwen3_lib.app.files import fingerprint
from qwen3_lib.app.openai import GenerationRequest
from qwen3_lib.app.records import (Id, JobSettings, Row, Source, answer_row, id_of, parsed_row,
                                   refused_row, result_of)
from qwen3_lib.app.speech import as_object
from qwen3_lib.app.terminal import NUMPY, engine_name, model_name, note
from qwen3_lib.io.errors import InputError, brief, counted
from qwen3_lib.io.progress import progress
from qwen3_lib.io.writing import write_whole

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two processes from one output file
    fcntl = None  # type: ignore[assignment]

SYNC = 1.0  # seconds between two fsyncs, which take some milliseconds each
TELL = 60.0  # seconds between two lines of progress, where no bar shows it
JOB_FORMAT = "qwen3 job 2"  # stands in OUT.job


class Journal:
    """The output file of a job. `done` has a byte for each record, by its number: 1 if its result is in the file."""

    def __init__(self, name: str, about: dict[str, Any], last: int):
        """Starts the job that `about` describes in the file `name`, or goes on with it.

        No record has a number above `last`. Raises InputError if the file belongs to another job, if another process
        writes it, or if it can't be written.
        """
        self.name, self.path, self.synced = name, os.path.realpath(name), time.monotonic()
        self.done, self.n_answered, self.n_failed = bytearray(last + 1), 0, 0
        if os.path.lexists(self.path) and not os.path.isfile(self.path):
            raise InputError(f"{name}: not a regular file, so a job can't go on in it")
        with self.writing(), contextlib.ExitStack() as opened:  # closing writes, too
            self.lock = opened.enter_context(open(f"{self.path}.job", "a+b"))
            self._take_lock()
            if os.path.exists(self.path) and os.path.getsize(self.path):
                self._compare(about)
                self._repair()
            else:
                self._describe(about)
            self.file: BinaryIO = opened.enter_context(open(self.path, "ab", buffering=0))
            self.close = opened.pop_all().close

    @property
    def n_done(self) -> int:
        return self.n_answered + self.n_failed

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an error of the disk into InputError."""
        try:
            yield
        except OSError as error:
            done = f"; done: {counted(self.n_done, 'record')}; the same command goes on from there"
            raise InputError(f"{self.name}: cannot be written: {error.strerror or error}{done if self.n_done else ''}"
                             ) from error

    def _take_lock(self) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"{self.name}: another process is writing this file now") from error
            except OSError:
                note(f"{self.name}: this file system has no locks; start no second process with this output")

    def _describe(self, about: dict[str, Any]) -> None:
        self.lock.truncate(0)
        self.lock.write((json.dumps(about, indent=2) + "\n").encode())
        self.lock.flush()
        os.fsync(self.lock.fileno())  # before the first result: results without a description can't be used again

    def _compare(self, about: dict[str, Any]) -> None:
        """Raises InputError that names the first difference from the job of this output."""
        self.lock.seek(0)
        try:
            former = json.loads(self.lock.read())
        except (ValueError, RecursionError):
            former = None
        if not isinstance(former, dict) or former.get("format") != JOB_FORMAT:
            raise InputError(f"{self.name}: exists already, and {self.name}.job describes no job; give another --out")
        now = json.loads(json.dumps(about))  # tuples are lists in JSON
        for key in [*now, *former]:
            if former.get(key) != now.get(key):
                before, after = (brief(json.dumps(each.get(key)), 80) for each in (former, now))
                raise InputError(f"{self.name}: belongs to another job: its {key} was {before} and is {after} now; "
                                 "change it back, or give another --out")

    def _repair(self) -> None:
        """Marks the records that are done. Removes lines that are no results: one that a kill has torn, or after a
        power cut zeros, which may stand between whole lines, too."""
        wrong, last, kept = set(), 0, 0
        with open(self.path, "rb") as file:
            for last, line in enumerate(file):
                n, is_answer = result_of(line) or (0, False)
                if not 0 < n < len(self.done) or self.done[n]:
                    wrong.add(last)
                else:
                    self._mark(n, is_answer)
                    kept += len(line)
        if not wrong:
            return
        note(f"{self.name}: removed {os.path.getsize(self.path) - kept} bytes that were no whole result")
        if wrong == {last}:
            os.truncate(self.path, kept)
        else:
            with open(self.path, "rb") as file:
                whole = (line for i, line in enumerate(file) if i not in wrong)
                write_whole(self.path, lambda new: new.writelines(whole))

    def _mark(self, n: int, is_answer: bool) -> None:
        self.done[n] = 1
        self.n_answered += is_answer
        self.n_failed += not is_answer

    def write(self, line: int, result: Row, is_answer: bool) -> None:
        """Appends the result of a record. Raises InputError if the disk is full."""
        rest = (json.dumps(result, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")  # lone surrogates
        with self.writing():
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self.file.write(rest):]
        self._mark(line, is_answer)

    def sync(self, every: float = 0.0) -> None:
        """Forces the results to the disk, unless that was done within the last `every` seconds."""
        if time.monotonic() - self.synced >= every:
            with self.writing():
                os.fsync(self.file.fileno())
            self.synced = time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.sync()
        finally:
            self.close()


def description(source: Source, model: Model, settings: JobSettings) -> dict[str, Any]:
    """What a job is, for OUT.job: a job goes on only if all of it is the same."""
    cache, engine = model.engine.new_cache(model.config), engine_name(model)
    digest = hashlib.sha256(fingerprint(model, cache).encode())
    digest.update(repr((model.tokenizer.chat_template, model.sampling, model.eos_token_ids,
                        model.max_new_tokens)).encode("utf-8", "backslashreplace"))
    digest.update(model.tokenizer.backend.to_str().encode())
    engine += "" if engine == NUMPY else f", cache {cache.dtype}"
    options = asdict(settings) | settings.options
    del options["options"]
    return {"format": JOB_FORMAT, "input form": source.form, "input's sha256": source.sha256,
            "model": model_name(model),
            "engine": engine, "model's sha256": digest.hexdigest()} | options


def run_job(source: Source, journal: Journal, batch: Any,
            prepare: Callable[[Row, int], GenerationRequest | SpeechRequest], openai: bool = False,
            fail_fast: bool = False) -> None:
    """Answers the records that are not done yet in a Batch, and writes a summary to stderr.

    prepare(record, line) -> its request. A record that can't be answered gets a result that says why; with `fail_fast`
    it raises InputError.
    """
    running = dict[int, tuple[Id, Any, Iterator[Any]]]()  # line -> id, request, its answers that haven't begun
    todo = ((line, row) for line, row in source.rows() if line < len(journal.done) and not journal.done[line])
    n_before = n_shown = journal.n_done
    n_tokens, began = 0, (told := time.monotonic())
    bars = sys.stderr is not None and sys.stderr.isatty()

    def fail(error: InputError, line: int, record_id: Id | None) -> None:
        if fail_fast:
            raise InputError(f"record {line}: {error}") from error
        journal.write(line, refused_row(error, line, record_id, openai), False)

    def go_on(line: int) -> bool:
        """Adds a record's next answer to the batch; False if there is none."""
        _, asked, answers = running[line]
        if (given := next(answers, None)) is not None:
            batch.add(line, given[0], asked.salt, options=given[1], tools=asked.tools)
        return given is not None

    try:
        with progress(description="answering", total=source.n_records, initial=n_before, unit=" records") as bar:
            while (taken := [*islice(todo, batch.free)]) or not batch.idle:
                for line, row in taken:
                    record_id = None
                    try:
                        record = parsed_row(row, source.form)
                        record_id = id_of(record, line)
                        asked = prepare(record, line)
                        running[line] = record_id, asked, iter(asked.answers)
                        go_on(line)
                    except InputError as error:
                        running.pop(line, None)
                        fail(error, line, record_id)
                for line, outcome in [] if batch.idle else batch.step():
                    record_id, asked, _ = running[line]
                    try:
                        if isinstance(outcome, InputError):
                            raise outcome
                        n_tokens += len(outcome.token_ids)
                        if isinstance(asked, SpeechRequest):
                            asked.take(outcome)
                        if go_on(line):
                            continue
                    except InputError as error:
                        fail(error, line, record_id)
                    else:
                        found = as_object(asked.parts) if isinstance(asked, SpeechRequest) else outcome
                        journal.write(line, answer_row(found, line, record_id, openai), True)
                    del running[line]
                journal.sync(every=SYNC)
                speed = f"{n_tokens / (time.monotonic() - began):.0f} tokens/s"
                if not bars and time.monotonic() - told >= TELL:
                    told = time.monotonic()
                    note(f"{journal.name}: {journal.n_done} of {counted(source.n_records, 'record')}, {speed}")
                bar.set_postfix_str(speed, refresh=False)
                bar.update(journal.n_done - n_shown)
                n_shown = journal.n_done
    except KeyboardInterrupt:
        note(f"{journal.name}: done: {journal.n_done} of {counted(source.n_records, 'record')}; the same command goes "
             "on from there")
        raise
    source.check_unchanged()
    before = f" ({n_before} were done before)" if n_before else ""
    failed = f"; {counted(journal.n_failed, 'record')} failed: the results say why" if journal.n_failed else ""
    note(f"{journal.name}: {counted(journal.n_answered, 'record')} answered{before}, {counted(n_tokens, 'token')} in "
         f"{time.monotonic() - began:.1f} s{failed}")
