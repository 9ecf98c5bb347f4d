"""The conversation of `python qwen3.py --chat`: lines in, streamed answers out, and commands that begin with a slash.

The KV cache is kept from turn to turn. What the chat template rewrites (thoughts are dropped from earlier turns) is
computed anew from the first token that differs. Answers go to stdout, everything else to stderr.
"""
import contextlib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen3 import Completion, Model, Sampling, chat, default_sampling
from qwen3_app.files import read_messages
from qwen3_app.terminal import OutputError, note, print_answer, statistics
from qwen3_io.arguments import checked_whole
from qwen3_io.errors import LARGEST_TEXT, InputError
from qwen3_io.writing import write_json

HELP = '''/help                    this list
/clear                   begin anew; the system prompt stays
/system [TEXT]           show or set the system prompt; /system - removes it
/think, /no_think        reason before the answers from now on, or don't
/regenerate              another answer to the last message
/save FILE, /load FILE   write the conversation to a file, go on with one (JSON, as --messages reads it)
/stats                   speed and memory of the last answer, and how full the context is
/set [KEY VALUE]         show or set: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
                         frequency_penalty, seed, max_tokens, think_budget, hide_thinking (VALUE default: as it was)
/exit                    leave, as Ctrl-D does, or Ctrl-C twice; Ctrl-C once stops an answer
"""                      begins and ends a message of several lines; a \\ at the end of a line goes on, too
//                       a message that begins with a slash'''


SETTINGS = {**{name: name for name in Sampling.__dataclass_fields__}, "seed": "seed", "max_tokens": "max_new_tokens",
            "think_budget": "think_budget", "hide_thinking": "hide_thinking"}  # as /set calls them: as Completion does


# ----------------------------------------------------------------------------------------------------------------------
# Lines from the terminal, or from a pipe
# ----------------------------------------------------------------------------------------------------------------------

def history_file() -> Path:
    """Where the lines typed are kept from one chat to the next."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "qwen3" / "history"


@contextlib.contextmanager
def line_editing(commands: list[str]):
    """Arrow keys, a history that outlives the chat, and Tab for commands, where Python has readline."""
    try:
        import readline
    except ImportError:  # Windows: its terminal has line editing of its own
        yield
        return
    readline.set_history_length(1000)
    readline.set_completer_delims("\n")
    readline.set_completer(lambda text, i: [*filter(lambda name: name.startswith(text), commands), None][i])
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    with contextlib.suppress(OSError, RuntimeError):  # no history yet, or no home
        readline.read_history_file(history_file())
    try:
        yield
    finally:
        with contextlib.suppress(OSError, RuntimeError):  # a folder without write permission: the history is a comfort
            history_file().parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history_file())


def read_line(prompt: str) -> str:
    """A line without its newline. Raises EOFError at the end of the input, InputError for what is not text."""
    try:
        if sys.stdin.isatty():
            if not sys.stdout.isatty():  # the answers go into a file; the prompt doesn't
                print(prompt, end="", file=sys.stderr, flush=True)
            return input(prompt if sys.stdout.isatty() else "")
        line = sys.stdin.buffer.readline(LARGEST_TEXT)  # bytes, so that a line that isn't text spoils no other one
        if not line:
            raise EOFError
        return line.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"the line is not text in {error.encoding}: {error.reason}") from error
    except OSError as error:
        raise OutputError(f"stdin: cannot be read: {error.strerror}") from error


def read_message(prompt: str) -> str:
    """A message of one line; or of several, between two times three double quotes, or with \\ at the ends of lines."""
    line = read_line(prompt)
    if line.strip().startswith('"""'):
        lines, line = [], line.strip()[3:]
        with contextlib.suppress(EOFError):  # the end of the input ends the message, too
            while not line.rstrip().endswith('"""'):
                lines.append(line)
                line = read_line("... ")
            lines.append(line.rstrip()[:-3])
        text = "\n".join(lines).strip("\n")
        return "/" + text if text.startswith("/") else text  # never a command
    lines = [line]
    with contextlib.suppress(EOFError):
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line("... "))
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# The conversation
# ----------------------------------------------------------------------------------------------------------------------

class Chat:
    """A conversation: its messages, its settings, and the KV cache of what has been said."""

    def __init__(self, model: Model, messages: list[dict], tools: list[dict] | None = None,
                 enable_thinking: bool | None = None, hide_thinking: bool = False,
                 options: dict[str, Any] | None = None, show_stats: bool = False):
        self.model, self.messages, self.tools = model, messages, tools
        self.enable_thinking, self.hide_thinking, self.show_stats = enable_thinking, hide_thinking, show_stats
        self.options = dict(options or {})  # of Completion
        self.defaults = dict(self.options) | {"hide_thinking": hide_thinking}
        self.cache = model.engine.new_cache(model.config)
        self.last: Completion | None = None
        self.n_answers = 0  # since the start: each draws with a seed of its own
        self.own_files: set[str] = set()  # that /save may write again
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(HELP), "/clear": self.clear, "/system": self.set_system,
            "/think": lambda _: self.set_thinking(True), "/no_think": lambda _: self.set_thinking(False),
            "/regenerate": self.regenerate, "/save": self.save, "/load": self.load, "/stats": self.stats,
            "/set": self.set_option, "/exit": self.leave}

    def handle(self, text: str) -> None:
        """Does what a line says: a command, or a message to answer. Raises EOFError for /exit."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the line is not valid Unicode, so it was left out") from error
        if text.startswith("//"):
            self.say(text[1:])
        elif text.startswith("/"):
            name, _, rest = text.partition(" ")
            if name not in self.commands:
                raise InputError(f"there is no command {name[:40]}; /help lists them, // begins a message with a slash")
            self.commands[name](rest.strip())
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
        self.messages.append({"role": "tool" if self.missing_results() else "user", "content": text})
        if not self.missing_results():
            self.answer_last()

    def answer_last(self) -> None:
        """Answers the last message, or takes it back if that can't be done."""
        try:
            self.answer()
        except OutputError:
            raise
        except InputError as error:
            self.messages.pop()
            raise InputError(f"{error} (the message was not added; /clear begins anew)") from error

    def answer(self) -> None:
        """Generates, prints and keeps the answer to the messages; what Ctrl-C has stopped is kept as far as it came."""
        options = dict(self.options)
        if options.get("seed") is not None:
            options["seed"] += self.n_answers
        completion = chat(self.model, self.messages, self.tools, self.enable_thinking, cache=self.cache, **options)
        self.last, self.n_answers = completion, self.n_answers + 1
        try:
            print_answer(completion, self.hide_thinking)
        except KeyboardInterrupt:
            if completion.token_ids:
                self.keep(completion)
            raise
        self.keep(completion)
        if completion.finish_reason == "length":
            note(f"(cut off after {len(completion.token_ids)} tokens)")
        if self.show_stats:
            self.stats("")

    def keep(self, completion: Completion) -> None:
        """Adds an answer, as far as it has come, to the messages."""
        answer = completion.answer
        message = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning,
                   "tool_calls": answer.tool_calls}
        self.messages.append({key: value for key, value in message.items() if value or key == "content"})

    def leave(self, _: str) -> None:
        raise EOFError

    def clear(self, _: str) -> None:
        self.last = None
        self.messages = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        note("(a new conversation)")

    def set_system(self, text: str) -> None:
        has_one = bool(self.messages) and self.messages[0]["role"] == "system"
        if not text:
            note(str(self.messages[0]["content"]) if has_one else "(no system prompt)")
        else:
            new = [] if text == "-" else [{"role": "system", "content": text}]
            self.messages = new + self.messages[has_one:]
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
        dropped, self.messages = self.messages[kept:], self.messages[:kept]
        try:
            self.answer()
        finally:
            if len(self.messages) == kept:  # there is no other answer
                self.messages += dropped

    def save(self, name: str) -> None:
        name = one_name(name)
        if not self.messages:
            raise InputError("there is nothing to save yet")
        if os.path.lexists(name) and os.path.realpath(name) not in self.own_files:
            raise InputError(f"{name}: exists already; choose another name")
        write_json(name, self.messages if self.tools is None else {"messages": self.messages, "tools": self.tools})
        self.own_files.add(os.path.realpath(name))
        note(f"(saved {len(self.messages)} messages)")

    def load(self, name: str) -> None:
        name = one_name(name)
        messages, tools = read_messages(name)
        self.messages, self.tools = messages, tools if tools is not None else self.tools
        self.own_files.add(os.path.realpath(name))
        self.last = None
        waiting = "; /regenerate answers the last one" if messages[-1]["role"] in ("user", "tool") else ""
        note(f"(loaded {len(messages)} messages{waiting})")

    def stats(self, _: str) -> None:
        if self.last is None:
            raise InputError("there is no answer yet")
        used = len(self.last.prompt_ids) + len(self.last.token_ids)
        note(f"{statistics(self.last)} | context: {used} of {self.model.config.context_length} tokens")

    def set_option(self, text: str) -> None:
        key, _, value = text.partition(" ")
        if key and key not in SETTINGS:
            raise InputError(f"there is no setting {key[:40]!r}; /help lists them")
        name, value = SETTINGS.get(key), value.strip()
        if name == "hide_thinking":
            self.hide_thinking = self.defaults[name] if value == "default" else parsed_switch(value)
        elif name is not None:
            self.options[name] = self.defaults.get(name) if value == "default" else parsed_value(key, value)
        note("  ".join(f"{shown} = {self.shown_value(SETTINGS[shown])}" for shown in ([key] if key else SETTINGS)))

    def shown_value(self, name: str) -> str:
        """The value of a setting in words."""
        if name == "hide_thinking":
            return "on" if self.hide_thinking else "off"
        value = self.options.get(name)
        sampling = default_sampling(self.model, self.enable_thinking)
        return str(getattr(sampling, name, "default") if value is None else value)


def one_name(text: str) -> str:
    """The file's name in the rest of a command; quotes and ~ work as in a shell."""
    try:
        names = shlex.split(text) if os.name != "nt" else [text.strip('"')]
    except ValueError:  # an unpaired quote: take it literally
        names = [text]
    if len(names) != 1 or names[0] in ("", "-") or "\0" in names[0]:
        raise InputError("this command needs the name of one file (in quotes if it has spaces)")
    return os.path.expanduser(names[0])


def parsed_switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise InputError(f"hide_thinking must be on or off, not {text[:40]!r}")
    return text == "on"


def parsed_value(key: str, text: str) -> float | int:
    """The value of a setting, checked. Raises InputError, which says what it may be."""
    try:
        value: float | int = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError as error:
        raise InputError(f"{key} must be a number, not {text[:40]!r}") from error
    if key in Sampling.__dataclass_fields__:
        Sampling().updated(**{key: value})
    else:
        checked_whole(key, value, 1 if key == "max_tokens" else 0)
    return value


def run_chat(conversation: Chat) -> int:
    """Reads messages and commands until /exit, Ctrl-D or two Ctrl-C -> exit status: 1 if a piped line was refused."""
    interactive, interrupted, status = sys.stdin.isatty(), False, 0
    if interactive:
        note("/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves")
    first = bool(conversation.messages) and conversation.messages[-1]["role"] in ("user", "tool")
    editing = line_editing([*conversation.commands]) if interactive else contextlib.nullcontext()
    with contextlib.suppress(EOFError, KeyboardInterrupt), editing:
        while True:
            try:
                if first:
                    first = False
                    conversation.answer_last()
                text = read_message("result> " if conversation.missing_results() else "> ")
                interrupted = False
                conversation.handle(text)
            except OutputError:
                raise
            except InputError as error:
                note(str(error))
                status = 0 if interactive else 1
            except KeyboardInterrupt:
                if interrupted:
                    break
                interrupted = True
                note("\n(Ctrl-C once more, Ctrl-D or /exit leaves)")
    if interactive:
        note("")
    return status
