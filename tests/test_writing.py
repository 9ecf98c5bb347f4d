"""qwen3_io/writing.py: a file is written whole or not at all, whatever happens to the process."""
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from configs import ROOT
from helpers import filled_cache, message_of
from qwen3_app import files
from qwen3_io import writing
from qwen3_io.errors import InputError
from qwen3_io.writing import write_folder, write_whole

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


def killed(work, after=None):
    """Runs work(ready) in a process that is killed, by itself or so many seconds after it has called ready()."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reading)
            work(lambda: os.write(writing, b"x"))
        os._exit(1)
    os.close(writing)
    with open(reading, "rb", buffering=0) as pipe:
        pipe.read(1)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die():
    signal.raise_signal(signal.SIGKILL)


def dying_open(n_bytes):
    """An open() whose file takes so many bytes; then the process is killed."""
    def opened(*args, **options):
        file = open(*args, **options)  # noqa: SIM115 (closed by whoever called this)
        left = n_bytes

        class Writer:
            def write(self, data):
                nonlocal left
                data = bytes(data)
                file.write(data[:left])
                left -= len(data)
                if left <= 0:
                    file.flush()
                    die()

            def __getattr__(self, name):
                return getattr(file, name)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

        return Writer()
    return opened


@pytest.mark.parametrize("before", [False, True], ids=["a new file", "an old file"])
def test_killed_while_saving(model, tmp_path, monkeypatch, before):
    """After any number of bytes, and between the steps that follow: the old file, the new one, or none.

    All processes have the same number, as in a container: what one has left behind is in no other's way.
    """
    monkeypatch.setattr(os, "getpid", lambda: 7)
    file, old, new = tmp_path / "cache", filled_cache(model, [5, 6, 7]), filled_cache(model, list(range(30)))
    files.save_prompt_cache(new, model, file)
    size = file.stat().st_size
    rng = random.Random(0)
    points = [0, 1, 7, 8, size - 1, *(rng.randrange(size) for _ in range(15)), "fsync", "before replace",
              "after replace"]
    for point in points:
        file.unlink(missing_ok=True)
        if before:
            files.save_prompt_cache(old, model, file)

        def save(ready, point=point):
            replace = os.replace
            if point == "fsync":
                os.fsync = lambda _: die()
            elif point == "before replace":
                os.replace = lambda *_: die()
            elif point == "after replace":
                os.replace = lambda *names: (replace(*names), die())
            else:
                writing.open = dying_open(point)
            files.save_prompt_cache(new, model, file)

        assert killed(save) == -signal.SIGKILL
        if not before and point != "after replace":
            assert not file.exists()
        else:
            length = files.load_prompt_cache(model, file).length
            assert length == (30 if point == "after replace" else 3)
    files.save_prompt_cache(new, model, file)
    assert files.load_prompt_cache(model, file).length == 30 and os.listdir(tmp_path) == ["cache"]


def test_killed_at_any_moment_while_saving(model, tmp_path):
    """As above, at moments that nobody chose."""
    file, caches = tmp_path / "cache", [filled_cache(model, list(range(n))) for n in (3, 60)]
    rng = random.Random(0)

    def save_forever(ready):
        ready()
        for cache in itertools.cycle(caches):
            files.save_prompt_cache(cache, model, file)

    for _ in range(40):
        killed(save_forever, rng.uniform(0, 0.01))
        if file.exists():
            assert files.load_prompt_cache(model, file).length in (3, 60)
    files.save_prompt_cache(caches[0], model, file)
    assert files.load_prompt_cache(model, file).length == 3 and os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("name", ["/nowhere/..", "/nowhere/../", "//", "/", "", ".", "nowhere/x", "a\0b", "\ud800",
                                  "x" * 300, "é" * 250])
def test_names_that_cannot_be_written(model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    message_of(files.save_prompt_cache, filled_cache(model, [1, 2, 3]), model, name)
    assert os.listdir(tmp_path) == []


def test_what_others_are_writing_is_not_swept(tmp_path):
    """Only a temporary file whose process has ended is removed; and nothing else that is called alike."""
    unlike = [".qwen3-7-model.tmp", ".qwen3-0123.tmp", "x.tmp", ".qwen3-0123456789abcdef.tmp.json"]
    for name in unlike:
        (tmp_path / name).write_text("theirs")
    (tmp_path / ".qwen3-0000000000000000.tmp").symlink_to("x.tmp")
    os.mkfifo(tmp_path / ".qwen3-0000000000000001.tmp")
    others = set(os.listdir(tmp_path))

    def write_slowly(ready):
        writing.write_whole(tmp_path / "slow", lambda file: (file.write(b"half"), ready(), time.sleep(60)))

    reading, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            write_slowly(lambda: os.write(pipe, b"x"))
        os._exit(1)
    os.read(reading, 1)
    writing.write_json(tmp_path / "mine", 1)
    assert len(set(os.listdir(tmp_path)) - others - {"mine"}) == 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    writing.write_json(tmp_path / "mine", 2)
    assert set(os.listdir(tmp_path)) == others | {"mine"}


def test_many_at_once_in_a_folder_disturb_no_other(tmp_path):
    children = []
    for i in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            with contextlib.suppress(BaseException):
                for n in range(100):
                    writing.write_json(tmp_path / f"{i}.json", n)
                os._exit(0)
            os._exit(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert sorted(os.listdir(tmp_path)) == [f"{i}.json" for i in range(4)]


@pytest.mark.parametrize("private, mode", [(True, 0o600), (False, 0o644)])
def test_a_private_file_is_its_users_alone(tmp_path, private, mode):
    before = os.umask(0o022)
    try:
        writing.write_json(tmp_path / "x", 1, private)
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode


# ----------------------------------------------------------------------------------------------------------------------
# Folders
# ----------------------------------------------------------------------------------------------------------------------

WRITER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from qwen3_io.writing import write_folder

def fill(folder):
    (folder / "part").write_text("half")
    print(folder.name, flush=True)
    sys.stdin.readline()
    (folder / "part").write_text("whole")

write_folder(sys.argv[1], fill)
"""


@contextlib.contextmanager
def writing_process(target):
    """(a process in the middle of writing a folder, the name of its temporary folder)."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def write_part(folder):
    (folder / "part").write_text("whole")


def test_what_a_dead_process_has_left_is_removed_by_the_next(tmp_path):
    with writing_process(tmp_path / "first") as (process, temporary):
        process.kill()
        process.wait()
    assert [path.name for path in tmp_path.iterdir()] == [temporary]
    write_folder(tmp_path / "second", write_part)
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    """Even if it has been at it for days."""
    with writing_process(tmp_path / "first") as (process, temporary):
        os.utime(tmp_path / temporary, (1, 1))
        write_folder(tmp_path / "second", write_part)
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    assert (tmp_path / "first" / "part").read_text() == "whole"


def test_only_folders_with_names_of_ours_are_removed(tmp_path):
    for name in ("mine", ".qwen3-notes", "x.qwen3-1.tmp", ".qwen3-1.tmp.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("precious")
    (tmp_path / ".qwen3-link.tmp").symlink_to(tmp_path / "mine")
    (tmp_path / ".qwen3-file.tmp").write_text("of a process that writes a file")
    before = sorted(tmp_path.rglob("*"))
    write_folder(tmp_path / "new", write_part)
    assert sorted(set(tmp_path.rglob("*"))) == sorted([*before, tmp_path / "new", tmp_path / "new" / "part"])


def test_a_folder_taken_away_before_it_was_locked(tmp_path, monkeypatch):
    """Between making and locking it, another process may take it for abandoned: then there is a second try."""
    real, taken = writing.lock_folder, []

    def lock_late(folder):
        if len(taken) < 3:
            taken.append(folder)
            folder.rmdir()
        return real(folder)

    monkeypatch.setattr(writing, "lock_folder", lock_late)
    write_folder(tmp_path / "new", write_part)
    assert len(taken) == 3 and [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ZeroDivisionError()])
def test_nothing_is_left_if_a_folder_cannot_be_filled(error, tmp_path):
    def fill(folder):
        write_part(folder)
        raise error

    with pytest.raises(InputError if isinstance(error, OSError) else type(error)) as caught:
        write_folder(tmp_path / "new", fill)
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert str(caught.value) == f"{tmp_path / 'new'}: cannot be written: No space left on device"


def test_errors_name_the_folder_and_no_temporary_one(tmp_path):
    def fill(folder):
        write_whole(folder / "missing" / "file", lambda file: None)

    message = message_of(write_folder, tmp_path / "new", fill)
    assert message.startswith(f"{tmp_path / 'new'}: cannot be written: No such")
    for name in (tmp_path / "no" / "new", tmp_path, f"{tmp_path}/a\0b"):
        message = message_of(write_folder, name, write_part)
        assert ".tmp" not in message and str(tmp_path) in message
    assert list(tmp_path.iterdir()) == []
