"""The conversation of `python qwen3.py --chat`: messages in, streamed answers out, commands that begin with a slash.

The KV cache is kept from turn to turn. The chat template drops thoughts from earlier turns; the tokens from the first
changed one on are computed again. Answers go to stdout, everything else to stderr.
"""
import contextlib
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from qwen3 import Completion, Model, Sampling, chat, default_sampling
from qwen3_app import terminal
from qwen3_app.files import read_messages
from qwen3_app.prompt import CtrlC, LineDropped, Stopped, completions, line_reader, read_line, read_message, signals
from qwen3_app.state import check_kept, keep_conversation
from qwen3_app.terminal import CYAN, OutputError, Status, banner, cut_note, print_answer, statistics, told_progress
from qwen3_io.arguments import checked_whole
from qwen3_io.errors import InputError, brief, counted, did_you_mean
from qwen3_io.writing import write_json

SETTINGS = {**{name: name for name in Sampling.__dataclass_fields__}, "seed": "seed", "max_tokens": "max_new_tokens",
            "think_budget": "think_budget", "hide_thinking": "hide_thinking", "stats": "show_stats"}
SWITCHES = ("hide_thinking", "show_stats")  # attributes of Chat; the other settings are options of Completion

HELP = {
    "/help": "this list",
    "/clear": "begin anew; the system prompt stays",
    "/undo": "take back the last message and its answer, or /clear and /load",
    "/history": "show the conversation",
    "/regenerate": "another answer to the last message",
    "/system [TEXT]": "show or set the system prompt; /system - removes it",
    "/think, /no_think": "reason before the answers from now on, or don't",
    "/save FILE, /load FILE": "write the conversation to a file, go on with one (JSON, as --messages reads it)",
    "/stats": "speed and memory of the last answer, and how full the context is",
    "/set [KEY [VALUE]]": f"show or set: {', '.join(SETTINGS)} (VALUE default: the value at the start)",
    "/exit": "leave, as exit, quit, bye, /quit, /bye and Ctrl-D do, or Ctrl-C twice; Ctrl-C once stops an answer",
    '"""': "begins and ends a message of several lines; so does \\ at the end of a line, and Alt-Enter; "
           "a pasted text is one message",
    "//": "a message that begins with a slash"}
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/nothink": "/no_think", "/no-think": "/no_think", "/?": "/help"}
TAKES_TEXT = ("/system", "/save", "/load", "/set")
FAREWELLS = ("exit", "quit", "bye")


def note(text: str) -> None:
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
                 options: dict[str, Any] | None = None, show_stats: bool = False):
        self.model, self.messages, self.tools = model, messages, tools
        self.enable_thinking, self.hide_thinking, self.show_stats = enable_thinking, hide_thinking, show_stats
        self.options = dict(options or {})  # of Completion
        self.defaults = dict(self.options) | {"hide_thinking": hide_thinking, "show_stats": show_stats}
        self.cache = model.engine.new_cache(model.config)
        self.last: Completion | None = None
        self.n_answers = 0  # since the start: each draws with a seed of its own
        self.saved = list(messages)  # as they are in a file
        self.before: list[dict] = []  # the messages before /clear or /load, what of them was saved, and
        self.saved_before: list[dict] = []
        self.start: list[dict] = []  # the messages right after
        self.own_files: set[str] = set()  # that /save may write again
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(help_text()), "/clear": self.clear, "/undo": self.undo, "/history": self.history,
            "/regenerate": self.regenerate, "/system": self.set_system, "/think": lambda _: self.set_thinking(True),
            "/no_think": lambda _: self.set_thinking(False), "/save": self.save, "/load": self.load,
            "/stats": self.stats, "/set": self.set_option, "/exit": self.leave}

    def handle(self, text: str) -> None:
        """Runs a command, or answers a message. Raises EOFError for /exit."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the line is not valid Unicode, so it was left out") from error
        if text.startswith("//"):
            self.say(text[1:])
        elif text.startswith("/"):
            name, _, rest = text.partition(" ")
            name = ALIASES.get(name, name)
            if name not in self.commands:
                similar = did_you_mean(name, [*self.commands, *ALIASES]) or "; /help lists them"
                raise InputError(f"there is no command {brief(name, 40)}{similar} (// begins a message with a slash)")
            if rest.strip() and name not in TAKES_TEXT:
                raise InputError(f"{name} takes nothing behind it")
            self.commands[name](rest.strip())
        elif text.strip() in FAREWELLS:
            raise EOFError
        elif text.strip():
            self.say(text)

    def missing_results(self) -> int:
        """How many of the last answer's tool calls have no result yet."""
        n_results = 0
        while n_results < len(self.messages) and self.messages[-1 - n_results]["role"] == "tool":
            n_results += 1
        before = self.messages[-1 - n_results] if n_results < len(self.messages) else {}
        return max(len(before.get("tool_calls") or []) - n_results, 0)

    def say(self, text: str) -> None:
        """Adds a message (or the result of a tool that was called) and answers it."""
        message = {"role": "tool" if self.missing_results() else "user", "content": text}
        self.answer_to([*self.messages, message])

    def answer_to(self, messages: list[dict]) -> None:
        """Answers the last one of the messages, or goes back to those before it if no answer begins."""
        before = messages[:-1]
        try:
            self.messages = messages
            if not self.missing_results():
                self.answer()
        except OutputError:
            raise
        except InputError as error:
            self.messages = before
            raise InputError(f"{error} (the message was not added; /clear begins anew)") from error
        except KeyboardInterrupt:
            if len(self.messages) <= len(before) + 1:
                self.messages = before
                note("(stopped before the answer began, so your message was taken back)")
            else:
                note("(stopped; the answer is kept as far as it came)")
            raise

    def answer(self) -> None:
        """Generates, prints and keeps the answer to the messages; one that is stopped is kept as far as it came."""
        options, status = dict(self.options), Status()
        if options.get("seed") is not None:
            options["seed"] += self.n_answers
        completion = chat(told_progress(self.model, status), self.messages, self.tools, self.enable_thinking,
                          cache=self.cache, **options)
        self.last, self.n_answers = completion, self.n_answers + 1
        status.show("reading the prompt …", delay=0.5)
        try:
            print_answer(completion, self.hide_thinking, status)
        finally:
            if completion.text or completion.finish_reason is not None:
                self.keep(completion)
        if cut := cut_note(completion, "max_tokens (/set)"):
            note(f"({cut})")
        if self.show_stats:
            self.stats("")

    def keep(self, completion: Completion) -> None:
        """Adds an answer, complete or not, to the messages."""
        answer = completion.answer
        message = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning,
                   "tool_calls": answer.tool_calls}
        self.messages.append({key: value for key, value in message.items() if value or key == "content"})

    def leave(self, _: str) -> None:
        raise EOFError

    def system_messages(self) -> list[dict]:
        return self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []

    def clear(self, _: str) -> None:
        self.replace(self.system_messages())
        note("(a new conversation; /undo brings back the one before)" if self.before else "(a new conversation)")

    def replace(self, messages: list[dict]) -> None:
        """Takes other messages; /undo brings those before back."""
        if has_turns(self.messages):
            self.before, self.saved_before = self.messages, self.saved
        self.messages, self.start, self.last = messages, messages, None

    def undo(self, _: str) -> None:
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if self.before and (last is None or self.messages == self.start):
            self.messages, self.saved, self.before = self.before, self.saved_before, []
            note(f"(back in the conversation before, with {counted(len(self.messages), 'message')})")
        elif last is None:
            raise InputError("there is no message to take back")
        else:
            note(f"(took back: {brief(self.messages[last]['content'], 60)})")
            self.messages = self.messages[:last]

    def history(self, _: str) -> None:
        """Prints the messages, without thoughts."""
        for message in self.messages:
            content, calls = message.get("content") or "", message.get("tool_calls") or []
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            name = {"user": "> ", "assistant": ""}.get(message["role"], message["role"] + "> ")
            terminal.note("\n".join([name + text, *(json.dumps(call, ensure_ascii=False) for call in calls)]).strip())
        if not self.messages:
            note("(nothing has been said yet)")

    def set_system(self, text: str) -> None:
        old = self.system_messages()
        if not text:
            note(str(old[0]["content"]) if old else "(no system prompt)")
        else:
            new = [] if text == "-" else [{"role": "system", "content": text}]
            self.messages = new + self.messages[len(old):]
            note("(no system prompt from now on)" if text == "-" else "(system prompt set)")

    def set_thinking(self, on: bool) -> None:
        self.enable_thinking = on
        note("(thinks before it answers)" if on else "(answers without thinking)")

    def regenerate(self, _: str) -> None:
        kept = len(self.messages)
        if self.missing_results():  # then it is the answer with the calls that is made anew
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
        if self.messages == old and self.shown_value("temperature") == "0.0":
            note("(the same answer: temperature 0 always takes the most likely token; /set temperature 0.7 draws)")

    def save(self, name: str) -> None:
        name = one_name(name)
        if not self.messages:
            raise InputError("there is nothing to save yet")
        if os.path.lexists(name) and os.path.realpath(name) not in self.own_files:
            raise InputError(f"{name}: exists already; choose another name")
        write_json(name, self.messages if self.tools is None else {"messages": self.messages, "tools": self.tools})
        self.own_files.add(os.path.realpath(name))
        self.saved = list(self.messages)
        note(f"(saved {counted(len(self.messages), 'message')})")

    def load(self, name: str) -> None:
        name = one_name(name)
        messages, tools = read_messages(name)
        self.replace(messages)
        self.tools, self.saved = tools if tools is not None else self.tools, list(messages)
        self.own_files.add(os.path.realpath(name))
        waiting = "; /regenerate answers the last one" if messages[-1]["role"] in ("user", "tool") else ""
        note(f"(loaded {counted(len(messages), 'message')}{waiting})")

    def stats(self, _: str) -> None:
        if self.last is None:
            raise InputError("there is no answer yet")
        used = len(self.last.prompt_ids) + len(self.last.token_ids)
        told = statistics(self.last, lookup=bool(self.options.get("lookup")))
        note(f"{told} | context: {used} of {self.model.config.context_length} tokens")

    def set_option(self, text: str) -> None:
        key, _, value = text.replace("=", " ", 1).partition(" ")
        key, value = key.replace("-", "_"), value.strip()
        if key and key not in SETTINGS:
            similar = did_you_mean(key, SETTINGS) or "; /help lists them"
            raise InputError(f"there is no setting {brief(key, 40)}{similar}")
        name = SETTINGS.get(key) if value else None
        if name in SWITCHES:
            setattr(self, name, self.defaults[name] if value == "default" else parsed_switch(key, value))
        elif name is not None:
            self.options[name] = self.defaults.get(name) if value == "default" else parsed_value(key, value)
        note("  ".join(f"{shown} = {self.shown_value(SETTINGS[shown])}" for shown in ([key] if key else SETTINGS)))

    def shown_value(self, name: str) -> str:
        """The value of a setting in words."""
        if name in SWITCHES:
            return "on" if getattr(self, name) else "off"
        value = self.options.get(name)
        sampling = default_sampling(self.model, self.enable_thinking)
        return str(getattr(sampling, name, "default") if value is None else value)

    def keep_unsaved(self) -> None:
        """Keeps the conversation for --continue if it is in no file, and says so."""
        for messages, saved in ((self.messages, self.saved), (self.before, self.saved_before)):
            if has_turns(messages) and messages != saved:
                break
        else:
            return
        try:
            if (file := keep_conversation(messages, self.tools)) is not None:
                note(f"(kept in {file}: --continue goes on with it)")
        except InputError as error:
            note(f"(the conversation is lost: {error})")


def has_turns(messages: list[dict]) -> bool:
    """True if somebody has said something."""
    return any(message["role"] != "system" for message in messages)


def one_name(text: str) -> str:
    """The file's name in the rest of a command; quotes and ~ work as in a shell."""
    try:
        names = shlex.split(text) if os.name != "nt" else [text.strip('"')]
    except ValueError:  # an unpaired quote: take it literally
        names = [text]
    if len(names) != 1 or names[0] in ("", "-") or "\0" in names[0]:
        raise InputError("this command needs the name of one file (in quotes if it has spaces)")
    return os.path.expanduser(names[0])


def parsed_switch(key: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise InputError(f"{key} must be on or off, not {brief(repr(text), 40)}")
    return text == "on"


def parsed_value(key: str, text: str) -> float | int:
    """The value of a setting, checked. Raises InputError that names the values allowed."""
    try:
        value: float | int = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError as error:
        raise InputError(f"{key} must be a number, not {brief(repr(text), 40)}") from error
    if key in Sampling.__dataclass_fields__:
        Sampling().updated(**{key: value})
    else:
        checked_whole(key, value, 1 if key == "max_tokens" else 0)
    return value


# ----------------------------------------------------------------------------------------------------------------------
# The loop
# ----------------------------------------------------------------------------------------------------------------------

def run_chat(conversation: Chat) -> int:
    """Reads messages and commands until the end -> exit status: 1 if a piped line was refused.

    On a terminal, an unsaved conversation is kept, however the chat ends.
    """
    if not sys.stdin.isatty():
        return 1 if converse(conversation, read_line, CtrlC()) else 0
    ctrl_c = CtrlC()
    try:
        commands = [*conversation.commands, *ALIASES]
        read = line_reader(lambda line: completions(line, commands, SETTINGS), ctrl_c)
        note(f"{banner(conversation.model)}\n/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves")
        try:
            check_kept()
        except InputError as error:
            note(f"({error}; so only /save keeps this conversation)")
        converse(conversation, read, ctrl_c)
        return 0
    finally:
        conversation.keep_unsaved()


def converse(conversation: Chat, read: Callable[[str], str], ctrl_c: CtrlC) -> int:
    """The conversation, until /exit, the end of the input, or Ctrl-C twice in a row -> how many lines were refused."""
    first = bool(conversation.messages) and conversation.messages[-1]["role"] in ("user", "tool")
    refused, leaving = 0, False
    with contextlib.suppress(EOFError, KeyboardInterrupt), signals(ctrl_c):
        while True:
            try:
                if first:
                    first = False
                    with ctrl_c.while_answering():
                        conversation.answer_to(conversation.messages)
                text = read_message("result> " if conversation.missing_results() else "> ", read)
                leaving = False
                with ctrl_c.while_answering():
                    conversation.handle(text)
            except OutputError:
                raise
            except InputError as error:
                note(str(error))
                refused += 1
            except (LineDropped, Stopped):
                leaving = False
            except KeyboardInterrupt:
                if leaving:
                    break
                leaving = True
                note("(Ctrl-C once more, Ctrl-D or /exit leaves)")
    return refused
