"""A job: many records answered by one model, in a way that survives whatever stops the process.

The output file is the journal. A result is one line with the number of its record, written at once and never changed.
So its lines say which records are done. A small file beside it, OUT.job, says what the job is: checksums of the input
and of the model, and the options. It is written before the first result. A job that is started again compares these,
removes what is no whole line from the output, and answers the records that are left.

The promise: after a kill, or with a full disk, each whole line is kept, and no record with one is computed again. After
a power cut this holds for lines older than SYNC seconds, because the lines are forced to the disk so often.
"""
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from qwen3 import Completion, Model
from qwen3_app.files import fingerprint
from qwen3_app.records import Row, Settings, Source, answered, id_of, line_of, parsed, refused, request
from qwen3_app.terminal import model_name, note, weight_bytes
from qwen3_io.errors import InputError, brief, counted
from qwen3_io.progress import progress
from qwen3_io.writing import write_whole

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two processes from one output file
    fcntl = None  # type: ignore[assignment]


class Requests(Protocol):
    """What a job needs of qwen3_batch.Batch: requests in, finished ones out."""
    @property
    def idle(self) -> bool: ...
    @property
    def free(self) -> int: ...
    @property
    def add(self) -> Callable[..., Any]: ...  # (key, token_ids, **options)
    def step(self) -> list[tuple[Any, Completion | InputError]]: ...


# ----------------------------------------------------------------------------------------------------------------------
# The journal
# ----------------------------------------------------------------------------------------------------------------------

SYNC = 1.0  # seconds between two fsyncs, which take some milliseconds each
LONGEST_RESULT = 2**28  # bytes of a line that is read back: a hole left by a power cut is not read as one line
FORMAT = "qwen3 job 1"  # stands in OUT.job


@contextlib.contextmanager
def locked(name: str) -> Iterator[BinaryIO]:
    """The file NAME.job, open and locked against other processes; in the end removed if nothing was written into it.

    Raises InputError if another process has locked it, or if it can't be written.
    """
    try:
        path = os.path.realpath(name)
        if os.path.lexists(path) and not os.path.isfile(path):
            raise InputError(f"{name}: not a regular file, so no job can go on in it")
        descriptor = os.open(f"{path}.job", os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{ascii(name)}: not the name of a file") from error  # a NUL character
    with open(descriptor, "r+b") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink == 0:  # another process has removed it just now
                    raise BlockingIOError
        except BlockingIOError as error:
            raise InputError(f"{name}: another process is writing it now") from error
        except OSError:
            note(f"{name}: its file system has no locks; take care that no second process writes it")
        try:
            yield file
        finally:
            if os.fstat(descriptor).st_size == 0:
                with contextlib.suppress(OSError):  # Windows removes no open file
                    os.unlink(f"{path}.job")


class Journal:
    """The output file of a job. `done` holds a byte for each record, `n_done` counts them."""

    def __init__(self, name: str, lock: BinaryIO, about: dict[str, Any], n_rows: int):
        """Starts the job that `about` describes in the file `name`, or goes on with it; `lock` is from locked(name).

        Records have numbers up to n_rows. Raises InputError if the file holds another job, or can't be written.
        """
        self.name, self.path, self.about = name, Path(os.path.realpath(name)), lock
        self.done, self.n_done, self.synced = bytearray(n_rows + 1), 0, time.monotonic()
        try:
            if not os.path.exists(self.path) or os.path.getsize(self.path) == 0:
                self._describe(about)
            else:
                self._compare(about)
                self._repair()
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            self.end = os.path.getsize(self.path)
            self._sync_folder()
        except OSError as error:
            raise self._trouble(error) from error

    def _describe(self, about: dict[str, Any]) -> None:
        self.about.truncate(0)
        self.about.write((json.dumps(about, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "backslashreplace"))
        self.about.flush()
        os.fsync(self.about.fileno())

    def _compare(self, about: dict[str, Any]) -> None:
        """Raises InputError that names what is not as it was when the job began."""
        text = self.about.read()
        if not text:
            raise InputError(f"{self.name}: exists already, and is not the output of a job: give another --out")
        try:
            then = json.loads(text)
        except (ValueError, RecursionError):
            then = None
        known = isinstance(then, dict) and then.get("format") == FORMAT
        if not known or not all(isinstance(then.get(part), dict) for part in ("input", "model", "options")):
            raise InputError(f"{self.name}: exists already, and {self.name}.job beside it describes no job: give "
                             "another --out")
        remedy = f"; go on as before, or give another --out than {self.name}"
        if then["input"] != about["input"]:
            raise InputError(f"{about['name']}: the input is not the same as when the job began{remedy}")
        if then["model"] != about["model"]:
            began, now = brief(then["model"].get("name")), about["model"]["name"]
            what = "its files have changed since the job began" if began == now else f"the job began with {began}"
            raise InputError(f"the model is {now}, but {what}{remedy}")
        former, given = then["options"], json.loads(json.dumps(about["options"]))  # lists, no tuples
        for option in sorted(former.keys() | given.keys()):
            if former.get(option) != given.get(option):
                began, asked = (brief(json.dumps(values.get(option)), 80) for values in (former, given))
                raise InputError(f"the job began with {option} = {began}, not {asked}{remedy}")

    def _whole_lines(self, file: BinaryIO, done: bytearray) -> Iterator[tuple[int, bytes]]:
        """(its end in the file, line) of each whole result, the first of each record; marks the records in `done`."""
        while line := file.readline(LONGEST_RESULT):
            n = line_of(line)
            if n is not None and n < len(done) and not done[n]:
                done[n] = 1
                yield file.tell(), line

    def _repair(self) -> None:
        """Marks the records that are done, and removes what is no whole result: the line that a kill has torn.

        A power cut may leave such lines in the middle, too: then the others are copied into a new file.
        """
        end = kept = 0
        with open(self.path, "rb") as file:
            for end, line in self._whole_lines(file, self.done):  # noqa: B007 (the last end counts)
                kept += len(line)
        self.n_done, removed = sum(self.done), os.path.getsize(self.path) - kept
        if removed and end == kept:  # all at the end
            os.truncate(self.path, end)
        elif removed:
            with open(self.path, "rb") as file:
                again = bytearray(len(self.done))
                write_whole(self.path, lambda new: new.writelines(line for _, line in self._whole_lines(file, again)))
        if removed:
            note(f"{self.name}: {removed} bytes that were no whole result have been removed")

    def _sync_folder(self) -> None:
        if fcntl is not None:  # Windows opens no folders
            descriptor = os.open(self.path.parent, os.O_RDONLY)
            with contextlib.suppress(OSError):  # some file systems refuse it for folders
                os.fsync(descriptor)
            os.close(descriptor)

    def _trouble(self, error: OSError) -> InputError:
        return InputError(f"{self.name}: cannot be written: {error.strerror or error}; what is finished is kept, and "
                          "the same command goes on from there")

    def write(self, line: int, result: Row) -> None:
        """Appends the result of a record. Raises InputError if the disk is full: then no part of it remains."""
        data = (json.dumps(result, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")  # lone surrogates
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self.file.write(rest):]
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.truncate(self.end)
            raise self._trouble(error) from error
        self.end += len(data)
        self.done[line], self.n_done = 1, self.n_done + 1

    def sync(self, every: float = 0.0) -> None:
        """Forces the results to the disk, unless that was done within the last `every` seconds."""
        if time.monotonic() - self.synced >= every:
            try:
                os.fsync(self.file.fileno())
            except OSError as error:
                raise self._trouble(error) from error
            self.synced = time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        with self.file:
            self.sync()


def description(source: Source, model: Model, settings: Settings) -> dict[str, Any]:
    """What a job is, for OUT.job: a job goes on only if all of it is the same."""
    cache = model.engine.new_cache(model.config)
    form = getattr(model.weights, "form", None)
    digest = hashlib.sha256(fingerprint(model, cache).encode())
    digest.update(repr((model.tokenizer.chat_template, model.sampling, model.eos_token_ids,
                        model.max_new_tokens)).encode("utf-8", "backslashreplace"))
    digest.update(model.tokenizer.backend.to_str().encode())
    name = f"{model_name(model)} in {'NumPy float32' if form is None else f'numba {form}, cache {cache.form}'}"
    options = asdict(settings) | settings.options
    del options["options"]
    return {"format": FORMAT, "name": source.name, "input": {"bytes": source.n_bytes, "sha256": source.sha256},
            "model": {"name": brief(name), "sha256": digest.hexdigest()}, "options": options}


# ----------------------------------------------------------------------------------------------------------------------
# The job
# ----------------------------------------------------------------------------------------------------------------------

class Counts:
    """What a job has done so far in this process, and what its progress bar says of it."""

    def __init__(self) -> None:
        self.answers = self.errors = self.tokens = self.passes = 0
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-9)

    def shown(self, bytes_per_pass: int, memory_speed: float) -> str:
        """Tokens per second; the share of the memory's limit, if its speed is known."""
        text = f"{self.tokens / self.seconds:.0f} tokens/s"
        if memory_speed:
            text += f", {self.passes * bytes_per_pass / self.seconds / memory_speed:.0%} of the memory's limit"
        return text


def run(rows: Iterable[tuple[int, Any]], journal: Journal, batch: Requests,
        prepare: Callable[[Row, int], tuple[Any, dict[str, Any]]], openai: bool = False, fail_fast: bool = False,
        told: Callable[[Counts], None] = lambda counts: None) -> Counts:
    """Answers the rows that are not done yet, each result written as soon as it is there -> what was done.

    prepare(row, line) -> (ids of the prompt, options of Completion). A record that can't be answered gets a result that
    says why; with `fail_fast`, InputError is raised instead. `told` is called after each pass of the model.
    """
    counts, running = Counts(), dict[int, tuple[str | int, int | None]]()  # line -> (id, how many logprobs)

    def failed(error: InputError, line: int, record_id: str | int | None) -> None:
        if fail_fast:
            raise InputError(f"record {line}: {error}") from error
        journal.write(line, refused(error, line, record_id, openai))
        counts.errors += 1

    done = journal.done
    todo = ((line, row) for line, row in rows if line < len(done) and not done[line])  # more: the file has grown
    exhausted = False
    while not (exhausted and batch.idle):
        while not exhausted and batch.free > 0:
            line, row = next(todo, (0, None))
            if row is None:
                exhausted = True
                break
            record_id = None
            try:
                row = parsed(row)
                record_id = id_of(row, line)
                token_ids, options = prepare(row, line)
                batch.add(line, token_ids, **options)
                running[line] = record_id, options.get("logprobs")
            except InputError as error:
                failed(error, line, record_id)
                told(counts)
        if batch.idle:
            continue
        ended = batch.step()
        counts.passes += 1
        for line, outcome in ended:
            record_id, n_logprobs = running.pop(line)
            if isinstance(outcome, InputError):
                failed(outcome, line, record_id)
            else:
                journal.write(line, answered(outcome, line, record_id, n_logprobs, openai))
                counts.answers += 1
                counts.tokens += len(outcome.token_ids)
        journal.sync(every=SYNC)
        told(counts)
    return counts


def run_job(model: Model, source: Source, journal: Journal, settings: Settings, batch: Requests,
            fail_fast: bool = False) -> None:
    """Runs the job from where it stands to its end, with a progress bar, and says on stderr what was done.

    Raises InputError for a full disk, for an input that has changed, and with `fail_fast` for a bad record.
    """
    before = shown = journal.n_done
    n_bytes, is_seen = weight_bytes(model), sys.stderr is not None and sys.stderr.isatty()
    speed = memory_speed() if is_seen and n_bytes >= MEASURED else 0.0
    bar = progress(description="answering", total=source.n_rows, initial=before, unit=" records")

    def told(counts: Counts) -> None:
        nonlocal shown
        bar.set_postfix_str(counts.shown(n_bytes, speed), refresh=False)
        bar.update(journal.n_done - shown)
        shown = journal.n_done

    try:
        with bar:
            counts = run(source.rows(), journal, batch, lambda row, line: request(model, settings, row, line),
                         settings.openai, fail_fast, told)
    except KeyboardInterrupt:
        note(f"{journal.name}: {journal.n_done} records are done; the same command goes on from there")
        raise
    source.check_unchanged()
    parts = [f"{counted(counts.answers, 'record')} answered, "
             f"{counted(counts.tokens, 'token')} in {counts.seconds:.1f} s"]
    parts += [f"{counted(counts.errors, 'record')} could not be answered: the results say why"] if counts.errors else []
    parts += [f"{before} were done before"] if before else []
    note(f"{journal.name}: {'; '.join(parts)}")


MEASURED = 2**28  # bytes: smaller weights stay in the CPU's caches, and the memory's speed is not their limit


def memory_speed() -> float:
    """Bytes per second that the memory gives to a product of a matrix of 256 MiB with a vector: the best of 3."""
    matrix, vector, best = np.ones((2**14, 2**12), np.float32), np.ones(2**12, np.float32), 0.0
    for _ in range(3):
        began = time.perf_counter()
        matrix @ vector
        best = max(best, matrix.nbytes / (time.perf_counter() - began))
    return best
