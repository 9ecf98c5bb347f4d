"""qwen3_lib/io/writing.py: a file or a folder is written whole or not at all, whatever happens to the process."""
import json
import os
import signal
import stat
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers import forked, message_of
from qwen3_lib.io.errors import InputError
from qwen3_lib.io.writing import write_folder, write_json, write_safetensors, write_whole

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


def killed_at(point, write, name, content) -> None:
    """write(name, content) in a process that is killed when it calls os.fsync, or another function of this name."""
    def work():
        setattr(os, point, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write(name, content)

    assert forked(work) == -signal.SIGKILL


@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_process_killed_while_it_writes_a_file(tmp_path, point, before):
    file = tmp_path / "file"
    if before is not None:
        file.write_text(before)
    killed_at(point, write_whole, file, lambda out: out.write(b"new"))
    assert (file.read_text() if file.exists() else None) == before
    write_whole(file, lambda out: out.write(b"new"))  # what the dead process has left is in nobody's way
    assert file.read_text() == "new"


def test_nothing_of_a_killed_process_stays_where_it_writes_alone(tmp_path):
    write = partial(write_whole, alone=True)
    for point in ("fsync", "replace", "fsync"):
        killed_at(point, write, tmp_path / "file", lambda out: out.write(b"old"))
        assert len(os.listdir(tmp_path)) == 1
    write(tmp_path / "file", lambda out: out.write(b"new"))
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "new"


def test_a_process_killed_while_it_writes_a_folder(tmp_path):
    killed_at("rename", write_folder, tmp_path / "folder", lambda folder: (folder / "part").write_text("new"))
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ZeroDivisionError()])
def test_what_fails_leaves_the_old_file_and_nothing_else(error, tmp_path):
    def fail(place):
        if not isinstance(place, os.PathLike):
            place.write(b"half")
        raise error

    (tmp_path / "old").write_text("old")
    for write, name in ((write_whole, "old"), (write_whole, "new"), (write_folder, "folder")):
        with pytest.raises(InputError if isinstance(error, OSError) else type(error)) as caught:
            write(tmp_path / name, fail)
        if isinstance(error, OSError):
            assert str(caught.value) == f"{tmp_path / name}: cannot be written: No space left on device"
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"


def test_a_device_is_not_replaced():
    assert "not a regular file" in message_of(write_json, os.devnull, 1)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_folder_appears_whole(tmp_path):
    def fill(folder):
        assert not (tmp_path / "new").exists()
        (folder / "part").write_text("whole")

    write_folder(f"{tmp_path}/new/", fill)
    assert os.listdir(tmp_path) == ["new"] and (tmp_path / "new/part").read_text() == "whole"
    assert "exists already" in message_of(write_folder, tmp_path / "new", fill)


@pytest.mark.parametrize("name", ["/", "//", "", ".", "nowhere/x", "\ud800", "x" * 300, "folder/"])
def test_names_that_cannot_be_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    message_of(write_json, name, 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("private, mode", [(True, 0o600), (False, 0o644)])
def test_a_private_file_is_its_users_alone(tmp_path, private, mode):
    before = os.umask(0o022)
    try:
        write_json(tmp_path / "x", {"a": "\u00e9"}, private)
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode
    assert json.loads((tmp_path / "x").read_text("utf-8")) == {"a": "\u00e9"}


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_json(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "1\n"


def test_safetensors(tmp_path):
    tensors = {"a": np.arange(12, dtype=np.float32).reshape(3, 4).T, "b": np.arange(3, dtype=np.uint8)}
    write_safetensors(tmp_path / "x", tensors, {"format": "pt"})
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys() and all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert (8 + int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")) % 64 == 0
