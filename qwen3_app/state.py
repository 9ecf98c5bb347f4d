"""Kept after a chat: the lines typed, and the last conversation that was not saved. Only their user can read them.

They lie in $XDG_STATE_HOME/qwen3, or ~/.local/state/qwen3. QWEN3_HISTORY=off keeps neither. A lost line costs
only comfort, so it raises no error; a conversation that can't be kept does.
"""
import contextlib
import errno
import json
import os
import stat
from pathlib import Path

from qwen3_io.errors import InputError
from qwen3_io.writing import write_json, write_whole

LARGEST_HISTORY = 2**20  # bytes; a larger history loses its older half
LARGEST_ENTRY = 2**16


def state_file(name: str) -> Path | None:
    """The file's place in the state folder; None if nothing is to be kept, or there is no home."""
    if os.environ.get("QWEN3_HISTORY", "").lower() == "off":
        return None
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"  # as the XDG standard says
    except RuntimeError:
        return None
    return folder / "qwen3" / name


def make_private_folder(folder: Path) -> None:
    """Makes the folder, or an existing one private. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


def open_regular(file: Path, flags: int) -> int:
    """A descriptor of a regular file. Raises OSError for anything else; a FIFO would wait for its other end."""
    descriptor = os.open(file, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{file} is not a regular file")
    return descriptor


# ----------------------------------------------------------------------------------------------------------------------
# Lines typed: one entry a line, appended when it is typed, so several chats can share the file. An entry with a newline
# in it is a JSON string.
# ----------------------------------------------------------------------------------------------------------------------

def read_lines() -> list[str]:
    """The entries of earlier chats, the oldest first."""
    file = state_file("history")
    with contextlib.suppress(OSError, InputError):
        if file is not None:
            with open(open_regular(file, os.O_RDONLY), "rb") as opened:
                start = max(os.fstat(opened.fileno()).st_size - LARGEST_HISTORY // 2, 0)
                opened.seek(start)
                data = opened.read()
            if start:  # drop the rest of a cut entry
                data = data.partition(b"\n")[2]
            if start > LARGEST_HISTORY // 2:
                write_whole(file, lambda new: new.write(data), 0o600)
            return [decoded(line) for line in data.decode("utf-8", "replace").split("\n") if line]
    return []


def decoded(line: str) -> str:
    """The entry that a line of the history stands for."""
    if line.startswith('"'):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            return entry if isinstance(entry, str) else line
    return line


def add_line(text: str) -> None:
    """Appends an entry."""
    file = state_file("history")
    with contextlib.suppress(OSError, UnicodeEncodeError):
        literal = decoded(text) == text and not {"\n", "\r"} & set(text)
        data = ((text if literal else json.dumps(text, ensure_ascii=False)) + "\n").encode()
        if file is not None and len(data) <= LARGEST_ENTRY:
            make_private_folder(file.parent)
            descriptor = open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with open(descriptor, "ab", buffering=0) as opened:
                opened.write(data)  # in one piece


# ----------------------------------------------------------------------------------------------------------------------
# The last conversation, in the form of /save
# ----------------------------------------------------------------------------------------------------------------------

def check_kept() -> None:
    """Raises InputError if keep_conversation could not write its file."""
    file = state_file("last.json")
    try:
        if file is not None:
            make_private_folder(file.parent)
            if not os.access(file.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror}") from error


def keep_conversation(messages: list[dict], tools: list[dict] | None) -> Path | None:
    """Writes the conversation -> the file; None if nothing is to be kept. Raises InputError if it can't be written."""
    check_kept()
    file = state_file("last.json")
    if file is not None:
        write_json(file, messages if tools is None else {"messages": messages, "tools": tools}, private=True)
    return file


def kept_conversation() -> str:
    """The name of the file with the last conversation. Raises InputError if there is none."""
    file = state_file("last.json")
    if file is None or not file.is_file():
        where = "QWEN3_HISTORY=off, or there is no home" if file is None else f"no file {file}"
        raise InputError(f"there is no conversation to continue ({where})")
    return str(file)
