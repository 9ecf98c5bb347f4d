"""Files of the user: texts, conversations, tools, and the state for the next run.

Input is checked; bad input raises InputError with a message of one line.
"""
import argparse
import os
import sys
from pathlib import Path
from typing import Any

from qwen3_lib.app.terminal import note
from qwen3_lib.io.errors import InputError, brief, counted, parse_json
from qwen3_lib.io.writing import write_json
from qwen3_lib.generation.messages import question
from qwen3_lib.io.pictures import is_data_url, picture_of
from qwen3_lib.generation.tools import checked_tools
from tokenizer_utils import checked_messages, with_system

# ---- Texts -----------------------------------------------------------------------------------------------------------


def read_text(name: str) -> str:
    """The text of a UTF-8 file, or of stdin for "-", without the newline at its end."""
    where = "stdin" if name == "-" else name
    try:
        text = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise InputError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def read_json(name: str) -> Any:
    """The JSON value in a file (or stdin for "-")."""
    return parse_json(read_text(name), name)


# ---- Conversations and tools, in the form of OpenAI's API ------------------------------------------------------------

def read_messages(name: str) -> tuple[list[dict], list[dict] | None]:
    """(messages, tools or None) of a file with a list of messages, or with {"messages": [...], "tools": [...]}."""
    value = read_json(name)
    messages, tools = (value.get("messages"), value.get("tools")) if isinstance(value, dict) else (value, None)
    messages = checked_messages(messages, name)
    for part in (part for each in messages if isinstance(each.get("content"), list) for part in each["content"]):
        if isinstance(image := part.get("image"), str) and not is_data_url(image):  # beside the file
            part["image"] = os.path.join(os.path.dirname(os.path.abspath(name)), image)
    return messages, None if tools is None else checked_tools(tools, name)


def read_tools(name: str) -> list[dict]:
    """The tools of a file with a list of {"type": "function", "function": {"name", "description", "parameters"}}."""
    return checked_tools(read_json(name), name)


def picture_file(name: str) -> str:
    """The whole path of a picture's file, as conversations hold it. Raises InputError unless it can be opened."""
    picture_of(name, decoded=False).close()
    return os.path.abspath(name)


# ---- What to ask -----------------------------------------------------------------------------------------------------

def read_prompt(args: argparse.Namespace) -> str | None:
    """The text to ask: the prompt, stdin, --file; None if there is none. Raises InputError if all are empty."""
    parts = [] if args.prompt in (None, "-") else [args.prompt]
    if args.reads_stdin and ((piped := read_text("-")) or not parts and args.file is None and args.messages is None):
        parts.append(piped)
    if args.file is not None:
        parts.append(read_text(args.file))
    if parts and not any(map(str.strip, parts)):
        raise InputError("the prompt is empty")
    return "\n\n".join(parts) if parts else None


def read_conversation(args: argparse.Namespace) -> tuple[list[dict], list[dict] | None]:
    """(messages, tools) of --continue or --messages, --tools, --system and the prompt."""
    file = kept_conversation() if getattr(args, "continue") else args.messages
    messages, tools = ([], None) if file is None else read_messages(file)
    if getattr(args, "continue") and not (args.chat and sys.stdin.isatty()):  # there, the chat says so itself
        note(going_on(messages))
    tools = tools if args.tools is None else read_tools(args.tools)
    system = args.system if args.system_file is None else read_text(args.system_file)
    if system is not None:
        if any(message["role"] == "system" for message in messages):
            raise InputError("the conversation has a system message, so --system can't set another one")
        messages = with_system(messages, system)
    prompt = read_prompt(args)
    if prompt is not None:
        messages = [*messages, {"role": "user", "content": question(
            prompt, map(picture_file, args.image or ()), args.max_pixels)}]
    elif args.image and not args.chat:
        raise InputError("--image needs a question about the picture")
    return messages, tools


# ---- Kept for the user alone: the lines typed in chats, and the last conversation ------------------------------------
# They lie in $XDG_STATE_HOME/qwen3, or ~/.local/state/qwen3. QWEN3_HISTORY=off keeps neither.

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
    if isinstance(content, str | None):
        return content or ""
    return "".join(part["text"] if "text" in part else f"[{brief(part.get('image', 'a picture'), 200)}] "
                   for part in content)
