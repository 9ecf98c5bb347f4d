"""A job: one model answers many records, and nothing that stops the process loses a result.

The output file is the journal, see journal.py. A result is a line with the number of its record, so the lines of the
output say which records are done. They are forced to the disk every SYNC seconds.
"""
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from qwen3 import Model
from qwen3_lib.generation.prompt_store import fingerprint
from qwen3_lib.app.journal import Journal
from qwen3_lib.app.openai import GenerationRequest
from qwen3_lib.app.records import (Id, JobSettings, Row, Records, answer_row, id_of, parsed_row,
                                   refused_row, result_of)
from qwen3_lib.app.subtitles import as_object
from qwen3_lib.io.facts import NUMPY, engine_name, model_name
from qwen3_lib.app.terminal import note
from qwen3_lib.app.talk import in_16_bits, wav_header
from qwen3_lib.generation.choir import Choir, Spoken, SpokenRequest
from qwen3_lib.generation.transcript import SpeechRequest
from qwen3_lib.io.errors import InputError, counted
from qwen3_lib.io.progress import progress
from qwen3_lib.io.writing import write_whole

SYNC = 1.0  # seconds between two fsyncs, which take some milliseconds each
TELL = 60.0  # seconds between two lines of progress, where no bar shows it
JOB_FORMAT = "qwen3 job 2"  # stands in OUT.job


class Results(Journal):
    """The output file of a job. `done` has a byte for each record, by its number: 1 if its result is in the file."""

    def __init__(self, name: str, about: dict[str, Any], source: Records):
        self.done, self.n_records, self.n_answered, self.n_failed = bytearray(source.last + 1), source.n_records, 0, 0
        super().__init__(name, about)

    @property
    def n_done(self) -> int:
        return self.n_answered + self.n_failed

    @property
    def so_far(self) -> str:
        return f"{self.n_done} of {counted(self.n_records, 'record')}" if self.n_done else ""

    def take(self, line: bytes) -> bool:
        n, is_answer = result_of(line) or (0, False)
        new = 0 < n < len(self.done) and not self.done[n]
        if new:
            self._mark(n, is_answer)
        return new

    def _mark(self, n: int, is_answer: bool) -> None:
        self.done[n] = 1
        self.n_answered += is_answer
        self.n_failed += not is_answer

    def write(self, line: int, result: Row, is_answer: bool) -> None:
        """Appends the result of a record. Raises InputError if the disk is full."""
        self.append(result)
        self._mark(line, is_answer)


def description(source: Records, model: Model, settings: JobSettings) -> dict[str, Any]:
    """What a job is, for OUT.job: a job goes on only if all of it is the same."""
    cache, engine = model.engine.new_cache(model.config), engine_name(model)
    digest = hashlib.sha256(fingerprint(model, cache).encode())
    digest.update(repr((model.tokenizer.chat_template, model.sampling, model.eos_token_ids,
                        model.max_new_tokens)).encode("utf-8", "backslashreplace"))
    digest.update(model.tokenizer.backend.to_str().encode())
    engine += "" if engine == NUMPY else f", cache {cache.dtype}"
    options = asdict(settings) | settings.options
    for name in ("options", "draft"):  # a draft changes no answer
        options.pop(name, None)
    return {"format": JOB_FORMAT, "input form": source.form, "input's sha256": source.sha256,
            "model": model_name(model),
            "engine": engine, "model's sha256": digest.hexdigest()} | options


def saved(spoken: Spoken, name: str) -> Row:
    """Writes a sound into a WAV file -> what a result tells. Raises InputError."""
    samples, speech = in_16_bits(spoken.samples), spoken.speech
    write_whole(name, lambda file: file.write(wav_header(speech.rate, samples.nbytes) + samples.tobytes()))
    return {"file": name, "seconds": len(samples) / speech.rate, "finish_reason": speech.finish_reason}


def run_job(source: Records, journal: Results, batch: Any,
            prepare: Callable[[Row, int], GenerationRequest | SpeechRequest | SpokenRequest], openai: bool = False,
            fail_fast: bool = False) -> None:
    """Answers the records that are not done yet in a Batch, and writes a summary to stderr.

    prepare(record, line) -> its request. A record that can't be answered gets a result that says why; with `fail_fast`
    it raises InputError.
    """
    running = dict[int, tuple[Id, Any, Iterator[Any]]]()  # line -> id, request, its answers that haven't begun
    todo = ((line, row) for line, row in source.rows() if line < len(journal.done) and not journal.done[line])
    n_before = n_shown = journal.n_done
    n_tokens, began = 0, (told := time.monotonic())
    bars, unit = sys.stderr is not None and sys.stderr.isatty(), "frame" if isinstance(batch, Choir) else "token"

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
                    n_tokens += outcome.n_frames if isinstance(outcome, Spoken) else len(outcome.token_ids)
                    if isinstance(outcome, Spoken):
                        outcome = saved(outcome, f"{journal.name.removesuffix('.jsonl')}-{line}.wav")
                    elif isinstance(asked, SpeechRequest):  # others have one answer
                        asked.read(outcome.text, outcome)
                        if go_on(line):
                            continue
                        outcome = as_object(asked.heard)
                except InputError as error:
                    fail(error, line, record_id)
                else:
                    journal.write(line, answer_row(outcome, line, record_id, openai), True)
                del running[line]
            journal.sync(every=SYNC)
            speed = f"{n_tokens / (time.monotonic() - began):.0f} {unit}s/s"
            if not bars and time.monotonic() - told >= TELL:
                told = time.monotonic()
                note(f"{journal.name}: {journal.so_far}, {speed}")
            bar.set_postfix_str(speed, refresh=False)
            bar.update(journal.n_done - n_shown)
            n_shown = journal.n_done
    source.check_unchanged()
    before = f" ({n_before} were done before)" if n_before else ""
    failed = f"; {counted(journal.n_failed, 'record')} failed: the results say why" if journal.n_failed else ""
    note(f"{journal.name}: {counted(journal.n_answered, 'record')} answered{before}, {counted(n_tokens, unit)} in "
         f"{time.monotonic() - began:.1f} s{failed}")
