"""examples/ray_batch.py on a Ray of this machine: the job is killed and goes on, and the answers stay the same."""
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

import qwen3
import qwen3_numba
from configs import ROOT
from helpers import assert_one_line

PROGRAM = ROOT / "examples" / "ray_batch.py"
WITHOUT_RAY = importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None
with_ray = pytest.mark.skipif(WITHOUT_RAY or not shutil.which("pkill"),
                              reason="needs pkill and pip install -e '.[ray]'")
RECORDS = [{"id": f"record {i}", "prompt": f"Tell me a story about a fox and {i} hens.", "max_new_tokens": 20 + i % 30,
            "seed": i, "temperature": 0.9 * (i % 3)} for i in range(150)]
WRONG = {  # a word of the error -> a line
    "object": b"[]\n", "UTF-8": b'{"id": 1, "prompt": "\xff"}\n', "a text": b'{"id": 6, "prompt": 6}'}


@pytest.fixture(scope="module")
def answers():
    """line -> (id, text, reasoning) by one process, each record alone."""
    model, found = qwen3_numba.load_model(qwen3.BUNDLED, threads=1), {}
    for line, record in enumerate(RECORDS, 1):
        options = {key: record[key] for key in ("max_new_tokens", "seed", "temperature")}
        answer = qwen3.chat(model, record["prompt"], **options).finish().answer
        found[line] = record["id"], answer.content, answer.reasoning
    return found


@pytest.fixture
def job(tmp_path):
    """A function that starts the job, and the folder of its results. At the end, no process of Ray may be left.

    The job's folder is not the program's, from which Ray would let its workers import anyway.
    """
    (tmp_path / "in.jsonl").write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
                                        + b"\n" + b"".join(WRONG.values()))
    (tmp_path / "model").symlink_to(qwen3.BUNDLED)
    # A short name, because the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        environment = os.environ | {"RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        sessions = []

        def start(*options):
            with open(tmp_path / "stderr", "w") as stderr:
                process = subprocess.Popen([sys.executable, PROGRAM, "in.jsonl", "out", *options], cwd=tmp_path,
                                           env=environment, stderr=stderr, start_new_session=True)
            process.said = lambda: (tmp_path / "stderr").read_text("utf-8")
            sessions.append(str(process.pid))
            return process

        # To all processes of these sessions, those that have lost their parents among them -> whether there are any.
        start.send = lambda signal: subprocess.run(["pkill", f"-{signal}", "-s", ",".join(sessions)]).returncode == 0
        start.out = tmp_path / "out"
        yield start
        for _ in range(300):  # Ray's own cleaning takes a few seconds
            if not start.send(0):
                break
            time.sleep(0.1)
        assert not start.send("KILL")


def results(job) -> list[dict]:
    return [json.loads(line) for file in job.out.glob("*.jsonl") for line in file.read_text("utf-8").splitlines()]


def finish(process, seconds=300) -> str:
    """What the process has said on stderr, when it has ended."""
    try:
        process.wait(seconds)
    finally:
        process.kill()
    return process.said()


def check(job, answers):
    """Each record has one result: its answer to the last bit, or what is wrong with it."""
    found, first = results(job), len(RECORDS) + 2  # after a blank line
    errors = {result["line"]: result["error"] for result in found if "error" in result}
    assert {result["line"]: (result["id"], result["text"], result["reasoning"])
            for result in found if "text" in result} == answers
    assert len(found) == len(RECORDS) + len(WRONG) and errors.keys() == {*range(first, first + len(WRONG))}
    for line, word in enumerate(WRONG, first):
        assert_one_line(errors[line], word)


SMALL = ("--model", "model", "--actors", "2", "--slots", "4", "--block", "10")


@with_ray
def test_a_job_that_is_killed_goes_on(job, answers):
    process = job(*SMALL)
    while len(results(job)) <= 20:  # pytest's timeout ends what never happens
        assert process.poll() is None, process.said()[-3000:]
        time.sleep(0.02)
    job.send("KILL")  # a power failure; of a Ray that loses only its job, a part lives on for a minute
    process.wait()
    before = {file: file.stat().st_mtime_ns for file in job.out.glob("done/*.parquet")}
    again = job(*SMALL)
    said = finish(again)
    assert again.returncode == 0 and before, said[-3000:]
    check(job, answers)
    assert all(file.stat().st_mtime_ns == time_ for file, time_ in before.items() if file.exists())
    finished = job(*SMALL)
    said = finish(finished)
    assert finished.returncode == 0, said[-3000:]
    check(job, answers)
    refused = job("--positions", "100")
    assert_one_line(finish(refused), "another input", str(job.out))
    assert refused.returncode == 1


@pytest.mark.skipif(not WITHOUT_RAY, reason="ray is installed")
def test_without_ray_it_says_what_to_install(tmp_path):
    done = subprocess.run([sys.executable, PROGRAM, tmp_path, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert_one_line(done.stderr, "ray[data]")
