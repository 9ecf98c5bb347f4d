"""Checks of conversations and tools, in the form of OpenAI's API."""
from __future__ import annotations

from typing import Any

from tokenizer_utils import InputError, check_parts

PICTURES = {"image": "image", "image_url": "image_url", "input_image": "image_url"}  # type of a part -> its field
ROLES = ("system", "developer", "user", "assistant", "tool")  # developer: OpenAI's newer name of system


def checked_messages(messages: Any, where: str) -> list[dict]:
    """The messages. Raises InputError, which begins with `where`, unless they are as the chat templates expect them."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(f'{where}: expected a list of messages, [{{"role": "user", "content": "..."}}, ...]')
    for i, message in enumerate(messages):
        check_message(message, f"{where}: message {i}")
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def check_message(message: Any, where: str) -> None:
    """Raises InputError, which begins with `where`, unless it is a message as the chat templates expect them."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise InputError(f'{where} must be an object whose "role" is one of {", ".join(ROLES)}')
    calls, content = message.get("tool_calls"), message.get("content")
    if content is None and not (message["role"] == "assistant" and calls):
        raise InputError(f'{where} has no "content"')
    if isinstance(content, list):
        check_parts([part for part in content if not is_picture(part)], where)
    elif not isinstance(content, str | None):
        raise InputError(f'{where}: "content" must be a text, or a list of {{"type": "text", "text": ...}}')
    for key in ("reasoning_content", "reasoning", "thinking"):
        if not isinstance(message.get(key), str | None):
            raise InputError(f'{where}: "{key}" must be a text')
    if calls is not None and not (isinstance(calls, list) and all(map(is_tool_call, calls))):
        raise InputError(f'{where}: "tool_calls" must be a list of {{"function": {{"name": ..., "arguments": ...}}}}')


def is_picture(part: Any) -> bool:
    """True for a part of a message's content that holds a picture, in our form or OpenAI's; it isn't checked here."""
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PICTURES


def is_tool_call(call: Any) -> bool:
    """True for {"name", "arguments"}, also as the "function" of an object. OpenAI's API has the arguments as text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return (isinstance(function, dict) and isinstance(function.get("name"), str)
            and "arguments" in function)


def checked_tools(tools: Any, name: str) -> list[dict]:
    """The tools. Raises InputError, which names the file, unless each has a name."""
    functions = [tool.get("function", tool) if isinstance(tool, dict) else None
                 for tool in (tools if isinstance(tools, list) else [None])]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise InputError(f'{name}: tools must be a list of {{"type": "function", "function": {{"name": ..., '
                         '"description": ..., "parameters": ...}}')
    return tools
