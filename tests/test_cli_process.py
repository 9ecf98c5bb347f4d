"""The command line as a process: what the system can do to it ends in a status and in one line."""
import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from helpers import assert_one_line, command, cut_off, endless, finish, start


def test_process_refuses_with_status_and_line(tmp_path):
    status, out, err = finish(start("--model", tmp_path / "nowhere", "Hello"))
    assert status == 1 and out == b""
    assert_one_line(err, "qwen3.py", "nowhere")


def test_ctrl_c_in_mid_answer(pristine):
    process = endless(pristine)
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process, 20)
    assert status == 130
    assert_one_line(err)
    assert out.endswith(b"\n")  # the shell's prompt begins on a line of its own


def test_stdout_closed_in_mid_answer(pristine):
    """As by `| head -1`."""
    process = endless(pristine)
    assert process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(20) not in (0, -signal.SIGPIPE)
    assert_one_line(err, "stdout")
    process.stderr.close()


def test_stdout_closed_by_head(pristine):
    script = 'set -o pipefail; "$0" "$@" | head -c 20 > /dev/null'
    arguments = ["bash", "-c", script, *command("--model", pristine, "--raw", "--seed", 1, "Hello")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60,
                            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert result.returncode not in (0, 130)
    assert_one_line(result.stderr)


def test_stdout_not_open_at_all(pristine):
    """As by `>&-`."""
    process = endless(pristine, "--max-tokens", 5, stdout=None, prepare=lambda: os.close(1))
    status, _, err = finish(process)
    assert status not in (0, 120)
    assert_one_line(err, "stdout")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, the disk that is always full")
@pytest.mark.parametrize("options", [[], ["--stats", "--max-tokens", "2"]], ids=["", "stats"])
def test_disk_full(pristine, options):
    with open("/dev/full", "w") as full:
        status, _, err = finish(endless(pristine, *options, stdout=full))
    assert status not in (0, 120)
    assert_one_line(err, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["prompt", "system", "model"])
def test_arguments_that_are_no_utf8(pristine, where):
    values = {"prompt": b"Hello", "system": b"Be brief.", "model": os.fsencode(pristine)} | {where: b"caf\xe9 \xff"}
    process = start(*map(os.fsencode, command("--max-tokens", 2, "--model")), values["model"], b"--system",
                    values["system"], values["prompt"])
    status, out, err = finish(process)
    assert status == 1 and not out.strip()
    assert_one_line(err, "caf" if where == "model" else "surrogate")


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1"])
def test_stdout_that_cannot_show_everything(pristine, encoding):
    process = endless(pristine, "--max-tokens", 200, env={"PYTHONIOENCODING": encoding})
    status, out, err = finish(process)
    assert (status, err) == (0, cut_off(200)) and b"?" in out and len(out) > 100


def test_error_about_characters_that_stderr_cannot_show(tmp_path):
    status, _, err = finish(start("--model", tmp_path / "北京", "Hello", env={"PYTHONIOENCODING": "ascii"}))
    assert status == 1
    assert_one_line(err, "no such folder")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc, where nobody can write")
def test_working_directory_that_cannot_be_written(pristine):
    with pytest.raises(OSError):
        Path("/proc/self/x").write_text("x")
    status, out, err = finish(endless(pristine, "--max-tokens", 5, cwd="/proc/self"))
    assert (status, err) == (0, cut_off(5)) and out.strip()
