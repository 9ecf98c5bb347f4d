"""qwen3_app/jobs.py: whatever stops a job, no finished record is computed twice, none is lost or doubled."""
import contextlib
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from configs import ROOT
from helpers import assert_one_line, message_of
from qwen3_app import jobs
from qwen3_app.jobs import Journal, locked
from qwen3_app.records import json_lines, open_source
from qwen3_io.errors import InputError
from test_writing import die, killed
from tokenizer_utils import Answer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
ABOUT = {"format": jobs.FORMAT, "name": "in.jsonl", "input": {"bytes": 1, "sha256": "a"},
         "model": {"name": "demo", "sha256": "b"}, "options": {"temperature": None, "stop": ("x",)}}


def answer_to(prompt):
    """Something finished that looks like a Completion: its text is a function of the prompt."""
    text = f"{prompt[:99]}! 蜜蜂" * (len(prompt) % 7)
    return SimpleNamespace(answer=Answer(None, text), token_ids=[1, 2], prompt_ids=[1], cached_tokens=0,
                           times=[0.0, 0.0, 0.0], finish_reason="stop")


class Stub:
    """In place of a Batch: the requests of several slots end in an order of chance, as soon as they are asked for."""

    def __init__(self, slots=4, seed=0, log=None, pause=0.0):
        self.slots, self.rng, self.log, self.pause, self.running = slots, random.Random(seed), log, pause, {}

    idle = property(lambda self: not self.running)
    free = property(lambda self: self.slots - len(self.running))

    def add(self, key, token_ids, **options):
        if token_ids == "refuse":
            raise InputError("the prompt doesn't fit")
        self.running[key] = token_ids

    def step(self):
        if self.pause:
            time.sleep(self.pause)
        key = self.rng.choice([*self.running])
        prompt = self.running.pop(key)
        if self.log is not None:
            os.write(self.log, f"{key}\n".encode())
        return [(key, InputError("not finite") if prompt == "break" else answer_to(prompt))]


def prepare(row, line):
    return row["prompt"], {}


def write_input(folder, prompts):
    file = folder / "in.jsonl"
    records = [{"id": f"r{i}", "prompt": prompt} for i, prompt in enumerate(prompts, 1)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def run(source, out, batch=None, about=ABOUT, **options):
    with locked(str(out)) as lock, Journal(str(out), lock, about, open_source(str(source), None).n_rows) as journal:
        return jobs.run(json_lines(str(source)), journal, batch or Stub(), prepare, **options)


def results(out):
    """The results by their line; each must be a whole line and there once."""
    lines = out.read_bytes().split(b"\n")
    assert lines.pop() == b""
    values = [json.loads(line) for line in lines]
    by_line = {value["line"]: value for value in values}
    assert len(by_line) == len(values)
    return by_line


def whole(out):
    """The lines of the records whose result is a whole line, read as a person would."""
    found = set()
    for line in out.read_bytes().splitlines(keepends=True) if out.exists() else []:
        with contextlib.suppress(ValueError):
            if line.endswith(b"\n"):
                found.add(json.loads(line)["line"])
    return found


@pytest.fixture
def prompts():
    rng = random.Random(1)
    return [rng.choice(["refuse", "break", *(f"prompt {rng.random()}" for _ in range(6))]) for _ in range(400)]


@pytest.fixture
def expected(scratch, prompts):
    """The results of a job that nothing stops."""
    (scratch / "whole").mkdir()
    run(write_input(scratch, prompts), scratch / "whole/out.jsonl")
    found = results(scratch / "whole/out.jsonl")
    assert [found[i]["id"] for i in range(1, 401)] == [f"r{i}" for i in range(1, 401)]
    for i, prompt in enumerate(prompts, 1):
        if prompt in ("refuse", "break"):
            assert found[i] == {"line": i, "id": f"r{i}", "error": {"refuse": "the prompt doesn't fit",
                                                                    "break": "not finite"}[prompt]}
        else:
            assert found[i]["text"] == answer_to(prompt).answer.content
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Killed
# ----------------------------------------------------------------------------------------------------------------------

class DyingFile:
    """A raw file that takes so many bytes, then the process is killed."""

    def __init__(self, file, left):
        self.file, self.left = file, left

    def write(self, data):
        n = self.file.write(bytes(data)[:max(self.left, 0)])
        self.left -= len(data)
        if self.left <= 0:
            die()
        return n

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_killed_at_100_random_points(scratch, prompts, expected):
    """Every second time after some bytes of the output, in the middle of a line or at its end; else after some time."""
    rng, source, out, log = random.Random(2), scratch / "in.jsonl", scratch / "out.jsonl", scratch / "log"
    computed, torn, deaths = [], 0, 0
    while deaths < 100:
        before, n_log = whole(out), log.stat().st_size if log.exists() else 0

        def job(ready):
            stub = Stub(seed=deaths, log=os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), pause=1e-4)
            with locked(str(out)) as lock, Journal(str(out), lock, ABOUT, 401) as journal:
                if deaths % 2:
                    journal.file = DyingFile(journal.file, rng.randrange(1, 800))
                ready()
                jobs.run(json_lines(str(source)), journal, stub, prepare)

        status = killed(job, None if deaths % 2 else rng.uniform(0, 0.002))
        assert status == -signal.SIGKILL, "the job has ended before its 100th death: give it more records"
        deaths += 1
        torn += not out.read_bytes().endswith(b"\n")
        now = whole(out)
        assert before <= now, "lost"
        again = [int(line) for line in log.read_bytes()[n_log:].split()]
        assert not before & {*again}, "computed again"
        computed += again
    assert torn > 10 and len(now) < 400
    run(source, out)
    assert results(out) == expected


def test_killed_while_it_begins(scratch, prompts, expected):
    """Before the first result: the file that says what the job is is torn, or there and no output yet."""
    out = scratch / "out.jsonl"
    job = (scratch / "whole/out.jsonl.job").read_bytes()
    for n in (0, 1, len(job) // 2, len(job)):
        (scratch / "out.jsonl.job").write_bytes(job[:n])
        out.unlink(missing_ok=True)
        run(scratch / "in.jsonl", out)
        assert results(out) == expected and (scratch / "out.jsonl.job").read_bytes() == job


def test_torn_at_every_byte(scratch):
    source, out = write_input(scratch, ["a", "bb", "refuse", "dddd"]), scratch / "out.jsonl"
    run(source, out)
    data, expected = out.read_bytes(), results(out)
    for n in range(len(data) + 1):
        out.write_bytes(data[:n])
        before, stub = whole(out), Stub()
        run(source, out, stub)
        assert results(out) == expected and out.read_bytes().startswith(data[:data[:n].rfind(b"\n") + 1])
        assert len(before) == data[:n].count(b"\n")


def test_holes_left_by_a_power_cut(scratch, prompts, expected, capfd):
    """Pages that never reached the disk read as zeros: whole lines around them are kept."""
    rng, out = random.Random(3), scratch / "out.jsonl"
    good = (scratch / "whole/out.jsonl").read_bytes()
    (scratch / "out.jsonl.job").write_bytes((scratch / "whole/out.jsonl.job").read_bytes())
    for _ in range(20):
        start = rng.randrange(len(good))
        hole = min(rng.choice([1, 100, 4096]), len(good) - start)
        out.write_bytes(good[:start] + bytes(hole) + good[start + hole:])
        kept, log = whole(out), os.open(scratch / "log", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        run(scratch / "in.jsonl", out, Stub(log=log))
        assert results(out) == expected
        assert not kept & {*map(int, (scratch / "log").read_text().split())}
        assert_one_line(capfd.readouterr().err, "no whole result", "out.jsonl")
        os.close(log)


def test_deleted_lines_are_answered_again(scratch, expected):
    out = scratch / "whole/out.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:50] + lines[60:] + lines[:3]))  # and three that stand there twice
    run(scratch / "in.jsonl", out)
    assert results(out) == expected


def test_a_finished_job_does_nothing(scratch, expected):
    out, stub = scratch / "whole/out.jsonl", Stub()
    before = out.read_bytes()
    stub.step = None
    run(scratch / "in.jsonl", out, stub)
    assert out.read_bytes() == before


# ----------------------------------------------------------------------------------------------------------------------
# A full disk
# ----------------------------------------------------------------------------------------------------------------------

def test_a_full_disk(scratch, prompts, expected):
    """A write that the system takes in part, then refuses; many times, until the job is done."""
    resource = pytest.importorskip("resource", reason="there are no limits of files here")
    out, said = scratch / "out.jsonl", scratch / "said"
    for limit in range(4000, 200_000, 4000):
        before = whole(out)

        def job(ready):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                run(scratch / "in.jsonl", out)
                said.write_text("done")
            except InputError as error:
                said.write_text(str(error))
            die()

        said.unlink(missing_ok=True)
        killed(job)
        if said.read_text() == "done":
            break
        assert_one_line(said.read_text(), "out.jsonl: cannot be written: File too large", "goes on")
        assert results(out).keys() == whole(out) and before <= whole(out)
    assert limit > 10_000 and results(out) == expected


def test_a_write_that_fails_takes_nothing_with_it(scratch):
    class Full:
        """A file on a disk that takes 3 bytes more."""
        def __init__(self, file):
            self.file, self.taken = file, False

        def write(self, data):
            if self.taken:
                raise OSError(28, "No space left on device")
            self.taken = True
            return self.file.write(bytes(data)[:3])

        def __getattr__(self, name):
            return getattr(self.file, name)

    out = scratch / "out.jsonl"
    with locked(str(out)) as lock:
        journal = Journal(str(out), lock, ABOUT, 5)
        journal.write(1, {"line": 1})
        journal.write(2, {"line": 2})
        journal.file = Full(journal.file)
        assert_one_line(message_of(journal.write, 3, {"line": 3}), "No space left", "what is finished is kept")
        journal.file.close()
    assert out.read_bytes() == b'{"line": 1}\n{"line": 2}\n'


def test_a_lock_whose_file_is_removed_meanwhile(scratch, monkeypatch):
    """Another process that ends removes it: a third one would lock a new file of that name."""
    fcntl, out = pytest.importorskip("fcntl"), scratch / "out.jsonl"
    lock = fcntl.flock
    monkeypatch.setattr(jobs.fcntl, "flock", lambda file, how: (os.unlink(f"{out}.job"), lock(file, how)))
    assert_one_line(message_of(locked(str(out)).__enter__), "another process is writing it now")


# ----------------------------------------------------------------------------------------------------------------------
# Another job
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, words", [
    ({"input": {"bytes": 2, "sha256": "c"}}, ["in.jsonl", "input is not the same"]),
    ({"model": {"name": "Qwen3-0.6B", "sha256": "c"}}, ["the model is Qwen3-0.6B", "began with demo"]),
    ({"model": {"name": "demo", "sha256": "c"}}, ["the model is demo", "files have changed"]),
    ({"options": {"temperature": 0.5, "stop": ("x",)}}, ["temperature = null, not 0.5"]),
    ({"options": {"temperature": None, "stop": ("x", "y")}}, ['stop = ["x"], not ["x", "y"]']),
    ({"options": {"temperature": None}}, ['stop = ["x"], not null'])])
def test_another_job_is_refused_by_name(scratch, change, words):
    source, out = write_input(scratch, ["a", "b"]), scratch / "out.jsonl"
    run(source, out)
    before = out.read_bytes()
    assert_one_line(message_of(run, source, out, about=ABOUT | change), *words, "another --out than", out)
    assert out.read_bytes() == before
    out.write_bytes(b"")  # nothing has been answered: a new job
    run(source, out, about=ABOUT | change)
    assert len(results(out)) == 2


@pytest.mark.parametrize("beside", [None, b"", b"{", b"[]", b'{"format": "qwen3 job 1"}', b"\xff" * 9])
def test_a_file_that_is_no_job_is_not_touched(scratch, beside):
    source, out = write_input(scratch, ["a"]), scratch / "out.jsonl"
    out.write_text("my thesis")
    if beside is not None:
        (scratch / "out.jsonl.job").write_bytes(beside)
    assert_one_line(message_of(run, source, out), "out.jsonl: exists already")
    assert out.read_text() == "my thesis"
    assert (scratch / "out.jsonl.job").exists() is bool(beside)


def test_a_second_process_is_refused(scratch):
    source, out = write_input(scratch, ["a"]), scratch / "out.jsonl"
    (scratch / "link.jsonl").symlink_to(out)
    with locked(str(out)):
        for name in ("out.jsonl", "link.jsonl"):
            assert_one_line(message_of(run, source, scratch / name), "another process is writing it now")
    run(source, out)
    assert len(results(out)) == 1


@pytest.mark.parametrize("name, words", [(".", "not a regular file"), ("no/folder/out", "No such file"),
                                         ("a\0b", "not the name"), ("x" * 300, "too long")])
def test_outputs_that_cannot_be(scratch, name, words):
    with contextlib.chdir(scratch):
        assert_one_line(message_of(locked(name).__enter__), words)


def test_an_input_that_grows(scratch):
    source = write_input(scratch, ["a", "b"])
    opened = open_source(str(source), None)
    opened.check_unchanged()
    source.write_text(source.read_text() + '{"prompt": "c"}\n' * 5)
    with locked(str(scratch / "out")) as lock, Journal(str(scratch / "out"), lock, ABOUT, opened.n_rows) as journal:
        jobs.run(opened.rows(), journal, Stub(), prepare)
    assert {1, 2} <= results(scratch / "out").keys()
    assert_one_line(message_of(opened.check_unchanged), "in.jsonl: has changed while the job ran")


# ----------------------------------------------------------------------------------------------------------------------
# Odd records, many records
# ----------------------------------------------------------------------------------------------------------------------

def test_odd_lines(scratch):
    source, out = scratch / "in.jsonl", scratch / "out.jsonl"
    lines = [b'\xef\xbb\xbf{"id": "a", "prompt": "one"}', b"", b'{"id": "a", "prompt": "two"}\r',
             b'{"id": 7, "prompt": "\xff"}', b"   ", b'{"id": NaN, "prompt": "x"}',
             b'{"prompt": "' + b"x" * 10_000_000 + b'"}', b"[1]", b"[" * 100_000, b'{"id": "\\ud800", "prompt": "y"}', b'{"prompt": "z"}', b'{"id": true, "prompt": "z"}', b'{"id": "l']
    source.write_bytes(b"\n".join(lines))
    for _ in range(2):
        run(source, out)
        found = results(out)
        assert sorted(found) == [1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13]  # blank lines are no records
        assert [found[i]["id"] for i in (1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13)] == \
            ["a", "a", None, None, 7, None, None, "\ud800", 11, None, None]
        assert [i for i in found if "error" not in found[i]] == [i for i in found if i in (1, 3, 7, 10, 11)]
        for i, words in {4: "not UTF-8 text: byte 21 is 0xff", 6: "not nan", 8: "found list", 9: "not valid JSON",
                         12: "not True", 13: "not valid JSON"}.items():
            assert_one_line(found[i]["error"], words)


def test_fail_fast_keeps_what_is_finished(scratch):
    source, out = write_input(scratch, ["a", "b", "refuse", "d"]), scratch / "out.jsonl"
    message = message_of(run, source, out, Stub(slots=1), fail_fast=True)
    assert_one_line(message, "record 3: the prompt doesn't fit")
    assert sorted(results(out)) == [1, 2]
    run(source, out)
    assert sorted(results(out)) == [1, 2, 3, 4] and "error" in results(out)[3]


def test_it_feeds_no_more_than_the_slots(scratch):
    class Careful(Stub):
        def add(self, key, token_ids, **options):
            super().add(key, token_ids, **options)
            assert len(self.running) <= self.slots

    source = write_input(scratch, ["a"] * 50)
    for slots in (1, 3, 100):
        assert run(source, scratch / f"{slots}.jsonl", Careful(slots)).answers == 50


MILLION = """
import resource, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from qwen3_app import jobs
from qwen3_app.jobs import Journal, locked
from qwen3_app.records import open_source
from test_jobs import ABOUT, Stub, prepare

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

source, before = open_source({source!r}, None), peak()
with locked({out!r}) as lock, Journal({out!r}, lock, ABOUT, source.n_rows) as journal:
    counts = jobs.run(source.rows(), journal, Stub(), prepare)
print(counts.answers, peak() - before)
"""


def test_memory_stays_flat_for_a_million_lines(scratch):
    """A million pointers alone would be 8 MB. The second process reads what the first one has written."""
    pytest.importorskip("resource", reason="the peak of the memory is not told here")
    source, out = scratch / "in.jsonl", scratch / "out.jsonl"
    with open(source, "w") as file:
        file.writelines(f'{{"id": "record {i}", "prompt": "{i % 3}"}}\n' for i in range(1_000_000))
    program = MILLION.format(root=str(ROOT), source=str(source), out=str(out))
    for n in (1_000_000, 0):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        answers, growth = map(int, done.stdout.split())
        assert answers == n and growth < 6 * 2**20, growth


# ----------------------------------------------------------------------------------------------------------------------
# What the progress bar says
# ----------------------------------------------------------------------------------------------------------------------

BAR = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from qwen3_app import jobs
from qwen3_app.jobs import Journal, locked
from qwen3_app.records import Settings, open_source
from test_jobs import ABOUT, Stub, prepare

jobs.request, jobs.weight_bytes = (lambda model, settings, row, line: prepare(row, line)), (lambda model: jobs.MEASURED)
source = open_source({source!r}, None)
with locked({out!r}) as lock, Journal({out!r}, lock, ABOUT, source.n_rows) as journal:
    jobs.run_job(None, source, journal, Settings(), Stub(pause=0.05))
"""


def test_the_bar_on_a_terminal(scratch):
    pty, fcntl, termios = (pytest.importorskip(name, reason="no terminals") for name in ("pty", "fcntl", "termios"))
    source, (leader, follower) = write_input(scratch, ["a"] * 40), pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 150, 0, 0))
    program = BAR.format(root=str(ROOT), source=str(source), out=str(scratch / "out.jsonl"))
    process, shown = subprocess.Popen([sys.executable, "-c", program], stderr=follower), b""
    os.close(follower)
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(leader, 2**16):
            shown += data
    os.close(leader)
    assert process.wait() == 0
    lines = shown.decode().replace("\r", "\n").splitlines()
    said = re.compile(r"/40 \[\d.*<.* records/s, \d+ tokens/s, \d+% of the memory's limit\]")  # < is the time left
    assert any(map(said.search, lines)), lines
    assert any("40 records answered, 80 tokens in" in line for line in lines)


def test_progress(monkeypatch):
    now = iter([100.0, *[102.0] * 9])
    monkeypatch.setattr(jobs.time, "monotonic", lambda: next(now))
    counts = jobs.Counts()
    counts.tokens, counts.passes = 300, 50
    assert counts.shown(10**9, 0.0) == "150 tokens/s"
    assert counts.shown(10**9, 50e9) == "150 tokens/s, 50% of the memory's limit"
