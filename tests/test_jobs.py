"""qwen3_lib/app/jobs.py: whatever stops a job, no finished record is computed again, none is lost or doubled."""
import contextlib
import json
import os
import random
import signal
import tracemalloc
from types import SimpleNamespace

import pytest

from helpers import assert_one_line, forked, message_of
from tokenizer_utils import Answer
from qwen3_lib.app import jobs
from qwen3_lib.app.jobs import Results
from qwen3_lib.app.records import JobSettings, open_source
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.io.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
ABOUT = {"format": jobs.JOB_FORMAT, "input's sha256": "a", "model": "demo", "temperature": None, "stop": ("x",)}


def answer_to(prompt):
    """What a job needs of a finished Completion; its text is a function of the prompt."""
    text = f"{prompt[:99]}! 蜜蜂" * (len(prompt) % 7)
    return SimpleNamespace(answer=Answer(None, text), token_ids=[1, 2], prompt_ids=[1], cached_tokens=0,
                           options=AnswerOptions(), times=[0.0, 0.0, 0.0], finish_reason="stop")


class Stub:
    """In place of a Batch: requests end in random order. `log` is a file of the lines that were computed.

    After so many steps, the process is killed.
    """

    def __init__(self, slots=4, seed=0, log=None, steps=10**9):
        self.slots, self.rng, self.log, self.steps, self.running = slots, random.Random(seed), log, steps, {}

    idle = property(lambda self: not self.running)
    free = property(lambda self: self.slots - len(self.running))

    def add(self, key, token_ids, salt, **options):
        if token_ids == "refuse":
            raise InputError("the prompt doesn't fit")
        self.running[key] = token_ids
        assert len(self.running) <= self.slots

    def step(self):
        self.steps -= 1
        if self.steps < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        key = self.rng.choice([*self.running])
        prompt = self.running.pop(key)
        if self.log is not None:
            os.write(self.log, f"{key}\n".encode())
        return [(key, InputError("not finite") if prompt == "break" else answer_to(prompt))]


def prepare(row, line):
    return SimpleNamespace(answers=[(row["prompt"], None)], salt="", tools=None)


def write_input(folder, prompts):
    file = folder / "in.jsonl"
    records = [{"id": f"r{i}", "prompt": prompt} for i, prompt in enumerate(prompts, 1)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def run(source, out, batch=None, about=ABOUT, **options):
    source = open_source(str(source))
    with Results(str(out), about, source) as journal:
        jobs.run_job(source, journal, batch or Stub(), prepare, **options)
    return journal


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
    return [rng.choice(["refuse", "break", *(f"prompt {rng.random()}" for _ in range(6))]) for _ in range(200)]


@pytest.fixture
def expected(scratch, prompts):
    """The results of a job that nothing stops."""
    (scratch / "whole").mkdir()
    journal = run(write_input(scratch, prompts), scratch / "whole/out.jsonl")
    found = results(scratch / "whole/out.jsonl")
    assert [found[i]["id"] for i in range(1, 201)] == [f"r{i}" for i in range(1, 201)]
    errors = {"refuse": "the prompt doesn't fit", "break": "not finite"}
    for i, prompt in enumerate(prompts, 1):
        if prompt in errors:
            assert found[i] == {"line": i, "id": f"r{i}", "error": errors[prompt]}
        else:
            assert found[i]["text"] == answer_to(prompt).answer.content
    assert journal.n_failed == sum(prompt in errors for prompt in prompts) == 200 - journal.n_answered
    return found


# ---- Killed ----------------------------------------------------------------------------------------------------------

def test_killed_at_random_points(scratch, expected):
    rng, source, out, log = random.Random(2), scratch / "in.jsonl", scratch / "out.jsonl", scratch / "log"
    log.touch()
    for death in range(15):
        before, n_log = whole(out), log.stat().st_size

        stub = Stub(seed=death, log=os.open(log, os.O_WRONLY | os.O_APPEND), steps=rng.randrange(20))
        assert forked(lambda stub=stub: run(source, out, stub)) == -signal.SIGKILL
        assert before <= whole(out), "lost"
        assert not before & {*map(int, log.read_bytes()[n_log:].split())}, "computed again"
    assert 0 < len(whole(out)) < 200
    journal = run(source, out)
    assert results(out) == expected and journal.n_failed == sum("error" in value for value in expected.values())


def test_killed_while_it_begins(scratch, expected):
    """Before the first result: the description is torn, or whole and there is no output yet."""
    out, job = scratch / "out.jsonl", (scratch / "whole/out.jsonl.job").read_bytes()
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
        run(source, out)
        assert results(out) == expected and out.read_bytes().startswith(data[:data[:n].rfind(b"\n") + 1])


def test_holes_left_by_a_power_cut(scratch, expected, capfd):
    """Pages that never reached the disk read as zeros: whole lines around them are kept."""
    rng, out = random.Random(3), scratch / "out.jsonl"
    good = (scratch / "whole/out.jsonl").read_bytes()
    (scratch / "out.jsonl.job").write_bytes((scratch / "whole/out.jsonl.job").read_bytes())
    for _ in range(10):
        start = rng.randrange(len(good))
        hole = min(rng.choice([1, 100, 4096]), len(good) - start)
        out.write_bytes(good[:start] + bytes(hole) + good[start + hole:])
        kept, log = whole(out), os.open(scratch / "log", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        capfd.readouterr()
        run(scratch / "in.jsonl", out, Stub(log=log))
        os.close(log)
        assert results(out) == expected
        assert not kept & {*map(int, (scratch / "log").read_text().split())}
        assert_one_line(capfd.readouterr().err.splitlines()[0], "no whole result", "out.jsonl")


def test_deleted_lines_are_answered_again(scratch, expected):
    out = scratch / "whole/out.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:50] + lines[60:] + lines[:3]))  # and three that stand there twice
    run(scratch / "in.jsonl", out)
    assert results(out) == expected
    before = out.read_bytes()
    stub = Stub()
    stub.add = None  # now all is done
    run(scratch / "in.jsonl", out, stub)
    assert out.read_bytes() == before


def test_results_are_forced_to_the_disk(scratch, monkeypatch):
    """The description before the first result; then no result waits for more than a second; at the end, all."""
    out, synced, passes, now = scratch / "out.jsonl", {}, [], 0.0

    def fsync(file):
        status = os.fstat(file)
        name = "out" if out.exists() and status.st_ino == out.stat().st_ino else "job"
        synced.setdefault(name, []).append(status.st_size)

    class Slow(Stub):
        def step(self):
            nonlocal now
            assert synced["job"] == [(scratch / "out.jsonl.job").stat().st_size]
            lost = out.read_bytes()[synced.get("out", [0])[-1]:]
            assert lost.count(b"\n") <= 3, "a power cut would take results older than a second"
            now += 0.4
            passes.append(now)
            return super().step()

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now)
    run(write_input(scratch, ["a"] * 40), out, Slow())
    assert synced["out"][-1] == out.stat().st_size > 0 and len(passes) == 40 and len(synced["out"]) <= 15


def test_a_full_disk(scratch, expected):
    """A write that the system takes in part, then refuses; many times, until the job is done."""
    out, said = scratch / "out.jsonl", scratch / "said"
    for limit in range(4000, 200_000, 4000):
        before = whole(out)

        def job(limit=limit):
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                run(scratch / "in.jsonl", out)
                said.write_text("done")
            except InputError as error:
                said.write_text(str(error))

        said.unlink(missing_ok=True)
        forked(job)
        if said.read_text() == "done":
            break
        assert_one_line(said.read_text(), "out.jsonl: cannot be written: File too large", "the same command goes on")
        assert before <= whole(out)
    assert limit > 10_000 and results(out) == expected


def test_a_draft_belongs_to_no_job(demo, tmp_path):
    """It changes no answer, so a job goes on with another one."""
    (tmp_path / "in.txt").write_text("a")
    source = open_source(str(tmp_path / "in.txt"))
    plain, faster, other = (jobs.description(source, demo, JobSettings(options))
                            for options in ({}, {"draft": "auto"}, {"top_k": 3}))
    assert plain == faster != other


def test_a_disk_too_full_for_the_description(scratch):
    """OUT.job is written before any result. Closing it fails, too, without a traceback; the job can begin later."""
    source, out, said = write_input(scratch, ["a"]), scratch / "out.jsonl", scratch / "said"

    def job():
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
        message = message_of(run, source, out)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        said.write_text(message)

    forked(job)
    assert_one_line(said.read_text(), "out.jsonl: cannot be written: File too large")
    run(source, out)
    assert [*results(out)] == [1]


# ---- Refused ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, words", [
    ({"input's sha256": "c"}, 'input\'s sha256 was "a" and is "c" now'), ({"stop": ("x", "y")}, 'is ["x", "y"] now'),
    ({"temperature": 0.5}, "temperature was null and is 0.5 now"), ({"top_k": 5}, "top_k was null and is 5 now")])
def test_another_job_is_refused_by_name(scratch, change, words):
    source, out = write_input(scratch, ["a", "b"]), scratch / "out.jsonl"
    run(source, out)
    before = out.read_bytes()
    assert_one_line(message_of(run, source, out, about=ABOUT | change), words, "give another --out", out)
    assert out.read_bytes() == before
    out.write_bytes(b"")  # nothing has been answered: a new job
    run(source, out, about=ABOUT | change)
    assert len(results(out)) == 2
    message_of(run, source, out)


@pytest.mark.parametrize("beside", [None, b"{", b"[]", b'{"format": "qwen3 job 1"}', b"\xff" * 9])
def test_a_file_that_is_no_job_is_not_touched(scratch, beside):
    source, out = write_input(scratch, ["a"]), scratch / "out.jsonl"
    out.write_text("my thesis")
    if beside is not None:
        (scratch / "out.jsonl.job").write_bytes(beside)
    assert_one_line(message_of(run, source, out), "out.jsonl: exists already")
    assert out.read_text() == "my thesis"


def test_a_second_process_is_refused(scratch):
    source, out = write_input(scratch, ["a"]), scratch / "out.jsonl"
    (scratch / "link.jsonl").symlink_to(out)
    with Results(str(out), ABOUT, open_source(str(source))):
        for name in ("out.jsonl", "link.jsonl"):
            assert_one_line(message_of(run, source, scratch / name), "another process")
    run(source, out)
    assert len(results(out)) == 1


@pytest.mark.parametrize("name, words", [(".", "not a regular file"), ("no/folder/out", "No such file"),
                                         ("x" * 300, "too long")])
def test_outputs_that_cannot_be(scratch, name, words):
    with contextlib.chdir(scratch):
        assert_one_line(message_of(Results, name, ABOUT, SimpleNamespace(last=1, n_records=1)), words)


def test_an_input_that_grows(scratch):
    file, out = write_input(scratch, ["a", "b"]), scratch / "out"
    source = open_source(str(file))
    file.write_text(file.read_text() + '{"prompt": "c"}\n' * 5)
    with Results(str(out), ABOUT, source) as journal:
        message = message_of(jobs.run_job, source, journal, Stub(), prepare)
    assert_one_line(message, "in.jsonl: changed while the job ran")
    assert results(out).keys() == {1, 2}


# ---- Odd records, many records ---------------------------------------------------------------------------------------

def test_odd_lines(scratch):
    source, out = scratch / "in.jsonl", scratch / "out.jsonl"
    lines = {1: b'\xef\xbb\xbf{"id": "a", "prompt": "one"}', 2: b"", 3: b'{"id": "a", "prompt": "two"}\r',
             4: b'{"id": 7, "prompt": "\xff"}', 5: b"   ", 6: b'{"id": NaN, "prompt": "x"}', 7: b"[1]",
             8: b"[" * 100_000, 9: b'{"id": "\\ud800", "prompt": "y"}', 10: b'{"prompt": "z"}', 11: b'{"id": "l'}
    source.write_bytes(b"\n".join(lines.values()))
    wrong = {4: "not UTF-8 text: byte 21 is 0xff", 6: "not nan", 7: "found list", 8: "not valid JSON",
             11: "not valid JSON"}
    for _ in range(2):
        journal = run(source, out)
        found = results(out)
        assert found.keys() == lines.keys() - {2, 5}  # blank lines are no records
        assert {i: found[i]["id"] for i in found.keys() - wrong} == {1: "a", 3: "a", 9: "\ud800", 10: 10}
        assert {i for i in found if "error" in found[i]} == wrong.keys()
        for i, words in wrong.items():
            assert_one_line(found[i]["error"], words)
        assert (journal.n_answered, journal.n_failed) == (4, 5)


def test_progress_is_told_where_no_bar_shows_it(scratch, monkeypatch, capfd):
    monkeypatch.setattr(jobs, "TELL", 0)
    run(write_input(scratch, ["a", "b", "c"]), scratch / "out.jsonl", Stub(slots=1))
    lines = [line.rpartition(", ")[0] for line in capfd.readouterr().err.splitlines()[:-1]]
    assert lines == [f"{scratch / 'out.jsonl'}: {n} of 3 records" for n in (1, 2, 3)]


def test_memory_stays_flat(scratch):
    """The input has 30 MB, and so has the output, which the second job only reads."""
    source, out = scratch / "in.jsonl", scratch / "out.jsonl"
    with open(source, "w") as file:
        file.writelines(f'{{"id": "{i:010000}", "prompt": "{i % 3}"}}\n' for i in range(3000))
    for _ in range(2):
        tracemalloc.start()
        assert run(source, out).n_answered == 3000
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
        tracemalloc.stop()
