"""Kept for the user alone: the lines typed in chats, and the last conversation.

They lie in $XDG_STATE_HOME/qwen3, or ~/.local/state/qwen3. QWEN3_HISTORY=off keeps neither.
"""
import os
from pathlib import Path

from qwen3_lib.io.errors import InputError, brief, counted
from qwen3_lib.io.writing import write_json


def state_file(name: str) -> Path | None:
    """The path of a file in the state folder; None if nothing is to be kept, or there is no home."""
    if os.environ.get("QWEN3_HISTORY", "").lower() == "off":
        return None
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"  # as the XDG standard says
    except RuntimeError:
        return None
    return folder / "qwen3" / name


def make_private_folder(folder: Path) -> None:
    """Makes a folder that only its user can open. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def history_file() -> Path | None:
    """The file for the lines typed, readable by its user only; None if there can be none."""
    file = state_file("history")
    try:
        if file is not None:
            make_private_folder(file.parent)
            file.touch(mode=0o600)
            file.chmod(0o600)
    except OSError:  # a chat without a history is still a chat
        return None
    return file if file is not None and file.is_file() else None


def keep_conversation(messages: list[dict], tools: list[dict] | None) -> Path | None:
    """Writes the last conversation, in the form of /save -> its file; None if nothing is to be kept.

    Raises InputError if the file can't be written.
    """
    file = state_file("last.json")
    try:
        if file is not None:
            make_private_folder(file.parent)
            write_json(file, messages if tools is None else {"messages": messages, "tools": tools}, private=True)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror}") from error
    return file


def kept_conversation() -> str:
    """The name of the file with the last conversation. Raises InputError if there is none."""
    file = state_file("last.json")
    if file is None or not file.is_file():
        where = "QWEN3_HISTORY=off, or there is no home" if file is None else f"no file {file}"
        raise InputError(f"there is no conversation to continue ({where})")
    return str(file)


def going_on(messages: list[dict]) -> str:
    """A note that says which conversation goes on: how many messages it has, and its last question."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    last = f"; the last question: {brief(as_text(asked[-1]), 60)}" if asked else ""
    return f"(going on with {counted(len(messages), 'message')}{last})"


def as_text(content: str | list[dict] | None) -> str:
    """The text of a message, which OpenAI's API allows to come in parts."""
    return content or "" if isinstance(content, str | None) else "".join(part.get("text", "[picture] ") for part in content)
