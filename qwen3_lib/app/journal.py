"""A journal: the results of a job on the disk, where nothing that stops the process loses one.

NAME is the file that the user asked for. NAME.job beside it says what the job is: its input, the model and the options.
A result is one line of JSON. It is written at once and never changed: in NAME itself, or below the description in
NAME.job if NAME has another form. A job that is started again compares the descriptions, removes torn lines, and does
the rest.

The promise: after a kill, or on a full disk, each whole line is kept, and its result is never computed again. After a
power cut, the same holds for lines that were forced to the disk.
"""
import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

from qwen3_lib.app.terminal import note
from qwen3_lib.io.errors import InputError, brief
from qwen3_lib.io.writing import write_whole

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two processes from one file
    fcntl = None  # type: ignore[assignment]


class Journal(ABC):
    """The results of a job, and its description. A subclass takes the results of an earlier run, and writes new ones.

    below: the results stand below the description in NAME.job, and not in NAME
    way_out: what a user may do whose NAME belongs to another job
    """
    below, way_out = False, "give another --out"

    def __init__(self, name: str, about: dict[str, Any], overwrite: bool = False):
        """Starts the job that `about` describes, or goes on with it. `about["format"]` tells jobs from other files.

        overwrite: a NAME that belongs to another job, or to none, is replaced
        Raises InputError if NAME belongs to another job, if another process writes it, or if it can't be written.
        """
        self.name, self.path, self.synced, self.start = name, os.path.realpath(name), time.monotonic(), 0
        self.job = f"{self.path}.job"
        check_output(name, overwrite, self.way_out)
        with self.writing(), contextlib.ExitStack() as opened:
            self.lock = opened.enter_context(open(self.job, "a+b", buffering=0))
            self._take_lock()
            if goes_on := is_written(self.path) and self._is_this(about, overwrite):
                self._repair()
            else:
                self._describe(about)
            self.file: BinaryIO = self.lock if self.below else opened.enter_context(
                open(self.path, "ab" if goes_on else "wb", buffering=0))
            self.close = opened.pop_all().close

    @property
    @abstractmethod
    def so_far(self) -> str:
        """How much is done, for people; "" for nothing."""

    @property
    def way_on(self) -> str:
        """What to tell a user whose job ends too early."""
        return f"; done: {self.so_far}; the same command goes on from there" if self.so_far else ""

    @abstractmethod
    def take(self, line: bytes) -> bool:
        """Takes a line that an earlier run has written; False if it is no whole result: then it is removed."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an error of the disk into InputError."""
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.name}: cannot be written: {error.strerror or error}{self.way_on}") from error

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
        write_all(self.lock, (json.dumps(about, indent=2) + "\n").encode())
        os.fsync(self.lock.fileno())  # before the first result: results without a description can't be used again

    def _is_this(self, about: dict[str, Any], overwrite: bool) -> bool:
        """True if NAME belongs to this job. Else False with `overwrite`, or InputError, which names a difference."""
        self.lock.seek(0)
        try:
            former, end = json.JSONDecoder().raw_decode(self.lock.read().decode("latin-1"))  # a byte is a character
        except (ValueError, RecursionError):
            former, end = None, 0
        self.start, now = (end + 1) * self.below, json.loads(json.dumps(about))  # tuples are lists in JSON
        if not isinstance(former, dict) or former.get("format") != now["format"]:
            if overwrite:
                return False
            raise InputError(f"{self.name}: exists already, and {self.name}.job describes no job; {self.way_out}")
        different = [key for key in [*now, *former] if former.get(key) != now.get(key)]
        if different and not overwrite:
            key = different[0]
            before, after = (brief(json.dumps(each.get(key)), 80) for each in (former, now))
            raise InputError(f"{self.name}: belongs to another job: its {key} was {before} and is {after} now; "
                             f"change it back, or {self.way_out}")
        return not different

    def _repair(self) -> None:
        """Takes the lines of earlier runs. Removes lines that are no results: one that a kill has torn, or after a
        power cut zeros, which may stand between whole lines, too."""
        results = self.job if self.below else self.path
        wrong, last, kept = set[int](), 0, self.start
        with open(results, "rb") as file:
            file.seek(self.start)
            for last, line in enumerate(file):
                if self.below and wrong or not self.take(line):  # NAME.job is locked, so it can only be cut
                    wrong.add(last)
                else:
                    kept += len(line)
        if not wrong:
            return
        note(f"{self.name}: removed {os.path.getsize(results) - kept} bytes that were no whole result")
        if len(wrong) == last + 1 - min(wrong):
            os.truncate(results, kept)
        else:
            with open(results, "rb") as file:
                whole = (line for i, line in enumerate(file) if i not in wrong)
                write_whole(results, lambda new: new.writelines(whole), alone=True)

    def append(self, result: dict[str, Any]) -> None:
        """Writes a result. Raises InputError if the disk is full."""
        with self.writing():
            write_all(self.file, (json.dumps(result, ensure_ascii=False) + "\n").encode(
                "utf-8", "backslashreplace"))  # lone surrogates

    def sync(self, every: float = 0.0) -> None:
        """Forces the results to the disk, unless that was done within the last `every` seconds."""
        if time.monotonic() - self.synced >= every:
            with self.writing():
                os.fsync(self.file.fileno())
            self.synced = time.monotonic()

    def forget(self) -> None:
        """Removes NAME.job, when nothing is left to do."""
        with self.writing(), contextlib.suppress(FileNotFoundError):
            os.unlink(self.job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.sync()
        finally:
            self.close()
        if self.below and not is_written(self.path):  # nothing to go on with
            self.forget()
        if kind is KeyboardInterrupt and self.so_far:
            note(f"{self.name}: {self.way_on.removeprefix('; ')}")


def write_all(file: BinaryIO, data: bytes) -> None:
    """Writes the data without a buffer: a disk that is nearly full takes a part of them."""
    while data:
        data = data[file.write(data):]


def is_written(path: str) -> bool:
    """True for a file with something in it."""
    return os.path.exists(path) and os.path.getsize(path) > 0


def check_output(name: str, overwrite: bool, way_out: str) -> None:
    """Raises InputError if no job can have the output `name`: it is no regular file, or it belongs to no job."""
    path = os.path.realpath(name)
    if os.path.lexists(path) and not os.path.isfile(path):
        raise InputError(f"{name}: not a regular file, so a job can't go on in it")
    if is_written(path) and not overwrite and not os.path.exists(f"{path}.job"):
        raise InputError(f"{name}: exists already, and there is no {name}.job to go on with; {way_out}")
