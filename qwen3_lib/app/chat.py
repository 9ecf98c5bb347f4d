"""The conversation of `python qwen3.py --chat`: messages in, streamed answers out, commands that begin with a slash.

The KV cache is kept from turn to turn. The chat template drops thoughts from earlier turns; the tokens from the first
changed one on are computed again. Answers go to stdout, everything else to stderr.
"""
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qwen3 import Model, Sampling, default_sampling
from qwen3_lib.generation.completion import Completion, complete
from qwen3_lib.generation.messages import prompt_of, question
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.prompt_store import PromptStore
from qwen3_lib.app import terminal
from qwen3_lib.app.files import as_text, going_on, keep_conversation, picture_file, read_messages
from qwen3_lib.app.prompt import ReadLine, line_reader, no_echo, read_line, read_message
from qwen3_lib.app.terminal import CYAN, OutputError, Status
from qwen3_lib.io.facts import banner, parameters
from qwen3_lib.app.report import cut_note, print_answer, statistics
from qwen3_lib.io.errors import InputError, brief, counted, did_you_mean
from qwen3_lib.io.writing import write_json
from qwen3_vision import sees

CHAT_OPTIONS = {name: name for name in (*Sampling.__dataclass_fields__, "seed", "think_budget", "max_pixels",
                                         "stop_loops")} | {"max_tokens": "max_new_tokens"}  # fields of AnswerOptions
SWITCHES = {"think": "enable_thinking", "hide_thinking": "hide_thinking", "stats": "show_stats"}  # attributes of Chat
SETTINGS = [*CHAT_OPTIONS, *SWITCHES]

HELP = {
    "/help": "show this list, as / alone does",
    "/clear": "start a new conversation; the system prompt stays",
    "/undo": "take back the last message with its answer, or the last command that changed the conversation",
    "/history": "show the conversation",
    "/regenerate": "another answer to the last message",
    "/system [TEXT]": "show or set the system prompt; /system - removes it",
    "/think, /no_think": "reason before each answer, or don't",
    "/image [FILE]": "add a picture to the next message, for a model that sees, or show which are added; /image - "
                     "removes them; the path of a picture alone on a line adds it, too",
    "/save FILE, /load FILE": "write the conversation to a file; go on with the conversation in a file (JSON, in the "
                              "form of --messages)",
    "/show": "the model, its format, and how full the context is",
    "/stats": "speed and memory of the last answer",
    "/set [KEY [VALUE]]": f"show or change settings: {', '.join(SETTINGS)}; the VALUE default restores the first value",
    "/exit": "leave the chat, as Ctrl-D does, or Ctrl-C twice; Ctrl-C once stops an answer",
    '"""': "starts and ends a message of several lines; or end each line with \\, or press Alt-Enter",
    "//": "starts a message that begins with a slash"}
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/reset": "/clear", "/new": "/clear", "/retry": "/regenerate",
           "/": "/help", "/nothink": "/no_think", "/no-think": "/no_think", "/info": "/show", "/?": "/help"}
TAKES_TEXT = ("/system", "/image", "/save", "/load", "/set")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # of pictures that are dropped on the terminal
FAREWELLS = ("exit", "quit", "bye")


def remark(text: str) -> None:
    """Prints a remark of the program, which looks different from an answer."""
    terminal.note(text, CYAN)


def help_text() -> str:
    """The commands with their descriptions, in the width of the terminal."""
    left, lines = max(map(len, HELP)) + 2, []
    for command, does in HELP.items():
        rows = textwrap.wrap(does, max(min(terminal.columns(sys.stderr) or 120, 120) - left, 20))
        lines += [f"{command:{left}}{rows[0]}", *(" " * left + row for row in rows[1:])]
    return "\n".join(lines)


class Chat:
    """A conversation: its messages, its settings, and the KV cache of its tokens."""

    def __init__(self, model: Model, messages: list[dict], tools: list[dict] | None = None,
                 enable_thinking: bool | None = None, hide_thinking: bool = False,
                 options: AnswerOptions = AnswerOptions(), show_stats: bool = False,
                 chat_template_kwargs: dict[str, Any] | None = None, store: PromptStore | None = None):
        self.model, self.messages, self.tools = model, messages, tools
        self.enable_thinking, self.hide_thinking, self.show_stats = enable_thinking, hide_thinking, show_stats
        self.options = replace(options, stop_loops=options.stop_loops is not False)
        self.chat_template_kwargs = chat_template_kwargs
        self.images = list[str]()  # files of the next message's pictures
        self.defaults = vars(self.options) | {name: getattr(self, name) for name in SWITCHES.values()}
        self.cache, self.store = model.engine.new_cache(model.config), store
        self.last: Completion | None = None
        self.n_answers = 0  # since the start: each draws with a seed of its own
        self.earlier: list[tuple[str, list[dict]]] = []  # each change, as typed, and the messages before it, for /undo
        self.own_files: set[str] = set()  # that /save may write again
        self.kept = messages  # what --continue finds, and
        self.kept_in: Path | None = None  # its file
        self.keeps = True
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: remark(help_text()), "/clear": self.clear, "/undo": self.undo, "/history": self.history,
            "/regenerate": self.regenerate, "/system": self.set_system, "/image": self.image,
            "/think": lambda _: self.set("think on"),
            "/no_think": lambda _: self.set("think off"), "/save": self.save, "/load": self.load, "/show": self.show,
            "/stats": self.stats, "/set": self.set, "/exit": self.leave}

    def handle(self, text: str) -> None:
        """Runs a command, or answers a message. Raises EOFError for /exit."""
        name, _, rest = text.partition(" ")
        before = self.messages
        try:
            if (file := dropped(text)) is not None:
                self.image(file)
            elif rest.strip() and (file := dropped(name)) is not None:  # and a question about it
                self.image(file)
                self.say(rest.strip())
            elif text.startswith("/") and not text.startswith("//"):
                self.run(ALIASES.get(name, name), rest.strip())
            elif text.strip() in FAREWELLS:
                raise EOFError
            elif text.strip():
                self.say(text.removeprefix("/"))
        finally:
            if name != "/undo" and self.messages != before:
                self.earlier.append((text, before))

    def run(self, name: str, rest: str) -> None:
        """Runs the command `name`."""
        if name not in self.commands:
            near = [ALIASES.get(each, each) for each in get_close_matches(name, [*self.commands, *ALIASES], 1)]
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            raise InputError(f"there is no command {brief(name, 40)}; {hint} (// begins a message with a slash)")
        if rest and name not in TAKES_TEXT:
            raise InputError(f"{name} takes nothing after it")
        self.commands[name](rest)

    def missing_results(self) -> int:
        """How many of the last answer's tool calls have no result yet."""
        n_results = 0
        while n_results < len(self.messages) and self.messages[-1 - n_results]["role"] == "tool":
            n_results += 1
        before = self.messages[-1 - n_results] if n_results < len(self.messages) else {}
        return max(len(before.get("tool_calls") or []) - n_results, 0)

    def say(self, text: str) -> None:
        """Adds a message (or the result of a tool that was called) and answers it."""
        role = "tool" if self.missing_results() else "user"
        before = self.messages
        try:
            self.answer_to([*before, {"role": role, "content": question(
                text, self.images, self.options.max_pixels)}])
        finally:
            self.images = self.images if self.messages == before else []

    def answer_to(self, messages: list[dict]) -> None:
        """Answers the last message, or takes it back if no answer begins."""
        before = messages[:-1]
        try:
            self.messages = messages
            if not self.missing_results():
                self.answer()
        except OutputError:
            raise
        except InputError as error:  # the context is full, for example
            self.messages = before
            hint = f"; {self.pictures()}; /image - removes them" if self.images else \
                "; /clear starts a new conversation" * (before != self.system_messages())
            raise InputError(f"{error} (the message was not added{hint})") from error
        except KeyboardInterrupt:
            if self.messages is messages:
                self.messages = before
                kept = f"; {self.pictures()}" * bool(self.images)
                remark(f"(stopped before the answer began: your message was taken back{kept})")
            else:
                remark("(stopped; the conversation keeps what you see)")
            raise

    def answer(self) -> None:
        """Generates and prints the answer to the messages, and adds it to them, also if Ctrl-C stops it."""
        options, status = self.options, Status()
        if options.seed is not None:
            options = replace(options, seed=options.seed + self.n_answers)
        if isinstance(self.messages[-1].get("content"), list):
            status.show("looking at the pictures …")
        try:
            completion = complete(self.model, self.messages, self.tools, self.enable_thinking,
                                  self.chat_template_kwargs, options=options)
            completion.begin(self.cache, self.store)
        finally:
            status.erase()
        self.last, self.n_answers = completion, self.n_answers + 1
        n_new = len(completion.prompt_ids) - completion.cached_tokens
        if n_new * parameters(self.model.source) > 10**10:  # half a second and more
            status.show("reading the prompt …")
        try:
            completion.read_prompt(lambda n, total: status.show(f"reading the prompt … {100 * n // total} %"))
            print_answer(completion, self.hide_thinking, status)
        finally:
            completion.close()
            seen = completion.answer.content if self.hide_thinking else completion.text
            if seen or completion.finish_reason is not None:
                self.messages = [*self.messages, completion.message]
        if cut := cut_note(completion, "max_tokens (/set)"):
            remark(f"({cut})")
        if self.show_stats:
            self.stats("")

    def leave(self, _: str) -> None:
        raise EOFError

    def system_messages(self) -> list[dict]:
        return self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []

    def clear(self, _: str) -> None:
        empty, self.messages, self.last = self.messages == self.system_messages(), self.system_messages(), None
        self.images = []
        remark("(the conversation is empty)" if empty else "(a new conversation; /undo brings the old one back)")

    def undo(self, _: str) -> None:
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not self.earlier and not asked:
            raise InputError("there is nothing to take back")
        undone, self.messages = self.earlier.pop() if self.earlier else \
            (as_text(self.messages[asked[-1]]["content"]), self.messages[:asked[-1]])
        now = "is empty" if self.messages == self.system_messages() else \
            f"ends with: {brief(as_text(self.messages[-1].get('content')), 60)}"
        remark(f"(undone: {brief(undone, 60)} | the conversation {now})")

    def history(self, _: str) -> None:
        """Prints the messages, without thoughts."""
        for message in self.messages:
            name = {"user": "> ", "assistant": ""}.get(message["role"], message["role"] + "> ")
            calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or []]
            terminal.note("\n".join([name + as_text(message.get("content")), *calls]).strip())
        if not self.messages:
            remark("(the conversation is empty)")

    def set_system(self, text: str) -> None:
        old = self.system_messages()
        if not text:
            remark(str(old[0]["content"]) if old else "(no system prompt)")
        else:
            new = [] if text == "-" else [{"role": "system", "content": text}]
            self.messages = new + self.messages[len(old):]
            remark("(no system prompt from now on)" if text == "-" else "(system prompt set)")

    def image(self, text: str) -> None:
        """Adds a picture to the next message."""
        if not sees(self.model):
            raise InputError("this model can't see: it has no vision tower")
        self.images = [] if text == "-" else [*self.images, picture_file(file_name(text))] if text else self.images
        remark(f"({self.pictures()})")

    def pictures(self) -> str:
        """Which pictures the next message will have."""
        names = ", ".join(map(os.path.basename, self.images))
        return f"{counted(len(self.images), 'picture')} for the next message{': ' * bool(names)}{names}"

    def regenerate(self, _: str) -> None:
        kept = len(self.messages)
        if self.missing_results():  # then the answer with the calls is made again
            while self.messages[kept - 1]["role"] == "tool":
                kept -= 1
        while kept and self.messages[kept - 1]["role"] not in ("user", "tool"):
            kept -= 1
        if not kept:
            raise InputError("there is no message to answer yet")
        old = self.messages
        try:
            self.messages = old[:kept]
            self.answer()
        finally:
            if len(self.messages) == kept:  # there is no other answer
                self.messages = old
        if self.messages == old and float(self.shown_value("temperature")) == 0:
            remark("(the same answer: temperature 0 takes the most likely token; for others, /set temperature 0.7)")

    def save(self, text: str) -> None:
        name = file_name(text)
        if not self.messages:
            raise InputError("there is nothing to save yet")
        if os.path.lexists(name) and os.path.realpath(name) not in self.own_files:
            raise InputError(f"{name}: exists already; choose another name")
        write_json(name, self.messages if self.tools is None else {"messages": self.messages, "tools": self.tools})
        self.own_files.add(os.path.realpath(name))
        remark(f"(saved {counted(len(self.messages), 'message')})")

    def load(self, text: str) -> None:
        name = file_name(text)
        self.messages, tools = read_messages(name)
        self.tools, self.last = self.tools if tools is None else tools, None
        self.own_files.add(os.path.realpath(name))
        waiting = "; /regenerate answers the last one" if self.messages[-1]["role"] in ("user", "tool") else ""
        remark(f"(loaded {counted(len(self.messages), 'message')}{waiting})")

    def show(self, _: str) -> None:
        remark(f"{banner(self.model)}\nfolder: {self.model.path}\n"
             f"conversation: {counted(len(self.messages), 'message')} | {self.context_used()}")

    def stats(self, _: str) -> None:
        if self.last is None:
            raise InputError("there is no answer yet")
        remark(f"{statistics(self.last)} | {self.context_used()}")

    def context_used(self) -> str:
        used = len(prompt_of(self.model, self.messages, self.tools, self.enable_thinking, self.chat_template_kwargs,
                             self.options.max_pixels)[0]) if self.messages else 0
        return f"context: {used:,} of {self.model.config.context_length:,} tokens used"

    def set(self, text: str) -> None:
        key, _, value = text.replace("=", " ", 1).partition(" ")
        key, value = key.replace("-", "_"), value.strip()
        meant = [key] if key in SETTINGS else [name for name in SETTINGS if name.startswith(key)]
        if key and len(meant) > 1:
            raise InputError(f"{brief(key, 40)} is the beginning of {' and '.join(meant)}")
        if key and not meant:
            similar = did_you_mean(key, SETTINGS) or f"; the settings are {', '.join(SETTINGS)}"
            raise InputError(f"there is no setting {brief(key, 40)}{similar}")
        key = meant[0]
        name = SWITCHES.get(key) or CHAT_OPTIONS[key]
        if value:
            parse = as_switch if key in SWITCHES or key == "stop_loops" else as_number
            new: Any = self.defaults[name] if value == "default" else parse(key, value)
            if key in SWITCHES:
                setattr(self, name, new)
            else:
                try:
                    self.options = replace(self.options, **{name: new})
                except InputError as error:  # begins with the option's name
                    raise InputError(f"{key} {str(error).partition(' ')[2]}") from error
        width = max(map(len, meant))
        remark("\n".join(f"{key:{width}} = {self.shown_value(key)}" for key in meant))

    def shown_value(self, key: str) -> str:
        """The value of a setting in words."""
        value = getattr(self, SWITCHES[key]) if key in SWITCHES else getattr(self.options, CHAT_OPTIONS[key])
        if isinstance(value, bool):
            return "on" if value else "off"
        return str(getattr(default_sampling(self.model, self.enable_thinking), key, "default")
                   if value is None else value)

    def keep(self) -> None:
        """Writes the conversation for --continue if it has changed; if that is impossible, says so once."""
        if self.keeps and self.messages != self.kept and any(message["role"] != "system" for message in self.messages):
            try:
                self.kept, self.kept_in = self.messages, keep_conversation(self.messages, self.tools)
            except InputError as error:
                self.keeps = False
                remark(f"({error}; so only /save keeps this conversation)")


def file_name(text: str) -> str:
    """The file's name after a command, with or without quotes."""
    name = text[1:-1] if text[:1] in ("'", '"') and text[1:].endswith(text[0]) else text
    if name in ("", "-"):
        raise InputError("this command needs the name of a file")
    return os.path.expanduser(name)


def dropped(text: str) -> str | None:
    """The path of a picture, if it is all of the text: bare, in quotes, or with a backslash before each space."""
    name = text.strip()
    for path in (name, name.strip("'\""), re.sub(r"\\(.)", r"\1", name)):
        if path.lower().endswith(SUFFIXES) and os.path.isfile(path := os.path.expanduser(path)):
            return path
    return None


def as_switch(key: str, text: str) -> bool:
    """The value of a setting that is on or off."""
    if text not in ("on", "off"):
        raise InputError(f"{key} must be on or off, not {brief(repr(text), 40)}")
    return text == "on"


def as_number(key: str, text: str) -> float | int:
    """The value of a setting that is a number; AnswerOptions checks its range."""
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError as error:
        raise InputError(f"{key} must be a number, not {brief(repr(text), 40)}") from error


# ---- The loop --------------------------------------------------------------------------------------------------------

def run_chat(conversation: Chat, images: Sequence[str] = ()) -> int:
    """Reads messages and commands until the end -> exit status: 1 if a piped line was refused.

    `images`: files of pictures for the first message.
    """
    typed = sys.stdin.isatty()
    read = welcome(conversation) if typed else read_line
    for file in images:
        conversation.image(file)
    try:
        refused = converse(conversation, read)
    except KeyboardInterrupt:  # the second one in a row, before the next prompt was there
        refused = 0
    finally:
        conversation.keep()
        if conversation.store is not None:
            conversation.store.save(conversation.cache)
    if typed and conversation.kept_in is not None:
        remark("(the conversation is kept: --continue goes on with it)")
    return int(refused > 0 and not typed)


def welcome(conversation: Chat) -> ReadLine:
    """Greets a person at a terminal -> the function that reads lines there."""
    for name in ("SIGTERM", "SIGHUP"):  # a kill, too, keeps the answer so far and gives the terminal its echo back
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    remark(f"{banner(conversation.model)}\n/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves")
    if any(message["role"] == "assistant" for message in conversation.messages):
        remark(going_on(conversation.messages))
    return line_reader(conversation.commands, SETTINGS)


def converse(conversation: Chat, read: ReadLine) -> int:
    """The conversation, until /exit, the end of the input, or Ctrl-C twice in a row -> how many lines were refused."""
    waiting = bool(conversation.messages) and conversation.messages[-1]["role"] in ("user", "tool")
    refused, leaving, answering, text = 0, False, False, ""
    while True:
        try:
            conversation.keep()  # after each line: a crash costs one answer at most
            if not waiting:
                text = read_message("result> " if conversation.missing_results() else "> ", read)
            leaving, answering = False, True
            with no_echo():
                if waiting:
                    waiting = False
                    conversation.answer_to(conversation.messages)
                else:
                    conversation.handle(text)
        except OutputError:
            raise
        except InputError as error:
            remark(str(error))
            refused += 1
        except EOFError:
            return refused
        except KeyboardInterrupt:
            if leaving:
                return refused
            if not answering:
                leaving = True
                remark("(press Ctrl-C once more to leave, or Ctrl-D)")
        answering = False
