"""An answer taken apart while it grows, for a stream: reasoning, content, calls of tools."""
from __future__ import annotations

import re
from collections.abc import Sequence

from qwen3_lib.answers.answer import held_back, parse_answer
from qwen3_lib.app.openai import Value, called
from tokenizer_utils import TOOL_CALL

# What must have come until a call is told; any other way to write a call is told when it is complete.
OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class Deltas:
    """Takes an answer apart as parse_answer does, but piece by piece, and tells a call while it is written.

    Arguments are passed on as they are written, so those of a call that is cut off are no JSON. What may still become
    a mark is held back; everything else is looked at once.
    """

    def __init__(self, think_open_in_prompt: bool, one_call: bool, tools: Sequence[Value] | None = None):
        self.read = self.thought if think_open_in_prompt else self.start  # how `held` is read
        self.held, self.space, self.one_call = "", "", one_call  # space: what stands before a call
        self.tools = tools  # they give the arguments of calls in XML their types
        self.parts, self.calls = dict[str, str](), list[Value]()
        self.began = False  # whether the part has a character; newlines before its first one don't belong to it
        self.n_calls = self.depth = 0  # depth: of the brackets in the last call's arguments, 0 when they are complete
        self.quoted = self.escaped = False

    @property
    def called(self) -> bool:
        """Whether the answer ended with calls, the last one complete."""
        return self.n_calls > 0 and self.depth == 0

    def push(self, text: str, ended: bool) -> tuple[dict[str, str], list[Value]]:
        """(new reasoning_content and content, new deltas of calls) after more of the text."""
        self.held += text
        self.parts, self.calls = {"reasoning_content": "", "content": ""}, []
        while self.read(ended):
            pass
        return self.parts, self.calls

    def take(self, key: str, text: str) -> None:
        """Passes on what `held` begins with."""
        self.held = self.held[len(text):]
        text = text if self.began else text.lstrip("\n")
        self.began = self.began or text != ""
        self.parts[key] += text

    def certain(self, ended: bool, *marks: str) -> str:
        return self.held if ended else self.held[:len(self.held) - held_back(self.held, marks)]

    # ---- Ways to read `held`; True if another way goes on ------------------------------------------------------------

    def start(self, ended: bool) -> bool:
        text = self.held.lstrip()
        if not ended and len(text) < len("<think>") and "<think>".startswith(text):
            return False
        if text.startswith("<think>"):
            self.read, self.held = self.thought, text.removeprefix("<think>")
        else:
            self.read, self.began = self.content, True
        return True

    def thought(self, ended: bool) -> bool:
        text, closing, rest = self.held.partition("</think>")
        before, call, after = text.partition("<tool_call>")
        if closing or call and ended:  # a call ends a thought that nothing else ends
            self.take("reasoning_content", (text if closing else before).rstrip("\n"))
            self.read, self.held, self.began = self.content, rest if closing else call + after, False
            return True
        text = before if call else self.certain(ended, "</think>", "<tool_call>")
        self.take("reasoning_content", text.rstrip("\n"))
        return False

    def content(self, ended: bool) -> bool:
        text, call, rest = self.held.partition("<tool_call>")
        if call:
            self.take("content", text.rstrip())
            self.read, self.space, self.held = self.opening, text[len(text.rstrip()):], rest
            return True
        text = self.certain(ended, "<tool_call>")
        self.take("content", text if ended else text.rstrip())
        return False

    def opening(self, ended: bool) -> bool:
        text, closing, _ = self.held.partition("</tool_call>")
        if found := OPENING.match(text):
            self.call({"name": found[1], "arguments": ""})
            self.read, self.held = self.arguments, self.held[found.end():]
            return True
        written, in_xml = f"<tool_call>{self.held}", text.lstrip().startswith("<function=")
        whole = TOOL_CALL.match(written) if closing or ended else None
        if not whole or in_xml and not whole["name"] and not ended:  # a value in XML may contain the closing tag
            return False
        calls = parse_answer(whole[0], tools=self.tools).tool_calls
        for call in calls:
            self.call(call)
        self.read = self.between if calls else self.plain
        self.held = written[whole.end():] if calls else self.space + written
        return True

    def arguments(self, ended: bool) -> bool:
        text, closing, rest = self.held.partition("</tool_call>")
        text = text if closing else self.certain(ended, "</tool_call>")
        end = len(text)
        for at, char in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = char == "\\", char != '"'
            elif char == '"':
                self.quoted = True
            else:
                self.depth += (char in "{[") - (char in "}]")
                if self.depth <= 0:
                    end = at + 1
                    break
        if end:
            self.calls.append({"index": self.n_calls - 1, "function": {"arguments": text[:end]}})
        self.held = self.held[end:]
        if closing or end and self.depth <= 0:
            self.read, self.depth, self.quoted, self.escaped = self.between, 0, False, False
            return True
        return False

    def between(self, ended: bool) -> bool:
        """Behind the arguments: only another call matters."""
        _, call, rest = self.held.partition("<tool_call>")
        if call and not self.one_call:
            self.read, self.space, self.held = self.opening, "\n", rest
            return True
        self.held = self.held[len(self.certain(False, "<tool_call>")):]
        return False

    def plain(self, ended: bool) -> bool:
        """Behind a call that is none: all is content."""
        self.take("content", self.held)
        return False

    def call(self, call: Value) -> None:
        """Tells the name of a call, and its arguments if they are complete."""
        opening = called(call)
        arguments, opening["function"]["arguments"] = opening["function"]["arguments"], ""
        self.calls.append({"index": self.n_calls} | opening)
        if arguments:
            self.calls.append({"index": self.n_calls, "function": {"arguments": arguments}})
        self.n_calls += 1
