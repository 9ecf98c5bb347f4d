"""An answer taken apart while it grows, for a stream: reasoning, content, calls of tools."""
from __future__ import annotations

import re
from collections.abc import Sequence

from qwen3_lib.generation.answer import parse_answer
from qwen3_lib.generation.marks import held_back
from qwen3_lib.app.openai import Value, called
from tokenizer_utils import TOOL_CALL

# What must have come until a call is told; any other way to write a call is told when it is complete.
OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class Deltas:
    """Makes the pairs of Marks the deltas of a stream that join to what parse_answer finds; a call is told early.

    Arguments are passed on as they are written, so those of a call that is cut off are no JSON. White space that may
    not belong to the answer, and what may still become a mark, are held back. A thought that doesn't begin the answer
    is content.
    """

    def __init__(self, think_open_in_prompt: bool, one_call: bool, tools: Sequence[Value] | None = None):
        self.kind = "thinking" if think_open_in_prompt else "start"
        self.began = not think_open_in_prompt  # else newlines before the next character don't belong to the answer
        self.space = ""  # white space after the last character
        self.held, self.read = "", self.between  # the rest of the calls, and how it is read
        self.one_call, self.tools = one_call, tools  # tools: they give the arguments of calls in XML their types
        self.parts, self.calls = dict[str, str](), list[Value]()
        self.n_calls = self.depth = 0  # depth: of the brackets in the last call's arguments, 0 when they are complete
        self.quoted = self.escaped = False

    @property
    def called(self) -> bool:
        """Whether the answer ended with calls, the last one complete."""
        return self.n_calls > 0 and self.depth == 0

    def push(self, pairs: list[tuple[str, str]], ended: bool) -> tuple[dict[str, str], list[Value]]:
        """(new reasoning_content and content, new deltas of calls) after more of the answer."""
        self.parts, self.calls = {"reasoning_content": "", "content": ""}, []
        for kind, piece in pairs:
            self.take(kind, piece)
        while self.read(ended):
            pass
        if ended and self.kind in ("start", "content"):
            self.parts["content"] += self.space
        return self.parts, self.calls

    def take(self, kind: str, piece: str) -> None:
        """Passes on a piece of a thought or content without its tags; a call is added to `held`."""
        if self.kind == "start" and kind == "thinking":
            self.kind, self.began, self.space, piece = kind, False, "", piece.removeprefix("<think>")
        elif self.kind == "thinking" != kind:
            self.kind, self.began, self.space = "content", False, ""
        if kind == "call":
            self.kind, self.held = kind, self.held + piece
            return
        thinks = self.kind == "thinking"
        text = self.space + (piece.removesuffix("</think>") if thinks else piece)
        text = text if self.began else text.lstrip("\n")
        certain = text.rstrip("\n" if thinks else None)
        self.space, self.began = text[len(certain):], self.began or certain != ""
        self.parts["reasoning_content" if thinks else "content"] += certain
        if certain and not thinks:
            self.kind = "content"

    # ---- Ways to read `held`; True if another way goes on ------------------------------------------------------------

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
        self.held = written[whole.end():] if calls else written
        return True

    def arguments(self, ended: bool) -> bool:
        text, closing, rest = self.held.partition("</tool_call>")
        if not closing and not ended:
            text = text[:len(text) - held_back(text, ("</tool_call>",))]
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
        """Before and after a call: only another call matters."""
        _, call, rest = self.held.partition("<tool_call>")
        if call and not (self.one_call and self.n_calls):
            self.read, self.held = self.opening, rest
            return True
        self.held = self.held[len(self.held) - held_back(self.held, ("<tool_call>",)):]
        return False

    def plain(self, ended: bool) -> bool:
        """From a call on that is none: all is content."""
        self.parts["content"] += self.space + self.held
        self.space = self.held = ""
        return False

    def call(self, call: Value) -> None:
        """Tells the name of a call, and its arguments if they are complete."""
        opening = called(call)
        arguments, opening["function"]["arguments"] = opening["function"]["arguments"], ""
        self.calls.append({"index": self.n_calls} | opening)
        if arguments:
            self.calls.append({"index": self.n_calls, "function": {"arguments": arguments}})
        self.n_calls += 1
        self.space = "\n" * self.began  # before a call that is none
