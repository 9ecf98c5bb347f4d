"""Lines from a terminal or a pipe, and the effect of Ctrl-C and ending signals on a chat."""
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from qwen3_app import state
from qwen3_app.terminal import OutputError, coloured, is_screen
from qwen3_io.errors import LARGEST_TEXT, InputError

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

ReadLine = Callable[[str], str]  # prompt -> a line without its newline; raises EOFError at the end of the input

Complete = Callable[[str], Iterable[tuple[str, str]]]  # a line's beginning -> see completions()


class Stopped(KeyboardInterrupt):
    """Ctrl-C that has stopped an answer or a command."""


class LineDropped(KeyboardInterrupt):
    """Ctrl-C on a line that had text."""


# ----------------------------------------------------------------------------------------------------------------------
# Signals
# ----------------------------------------------------------------------------------------------------------------------

class CtrlC:
    """Ctrl-C in a chat: the first one stops an answer; further ones right after it do nothing."""
    PAUSE = 0.5  # seconds without Ctrl-C after which the next one has a meaning of its own

    def __init__(self) -> None:
        self.answering = self.stopping = False
        self.tapped = -self.PAUSE  # when Ctrl-C last came, in a row that has stopped an answer

    def counts(self) -> bool:
        """Takes note of Ctrl-C -> True unless it is one of those that do nothing."""
        now = time.monotonic()
        if self.stopping or now - self.tapped < self.PAUSE:
            self.tapped = now
            return False
        if self.answering:
            self.stopping, self.tapped = True, now
        return True

    def on_signal(self, *_: object) -> None:
        if self.counts():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def while_answering(self) -> Iterator[None]:
        self.answering, self.tapped = True, -self.PAUSE
        try:
            with no_echo():
                yield
        except KeyboardInterrupt as error:
            raise Stopped from error
        finally:
            self.answering = self.stopping = False


def end(number: int, _: object) -> None:
    """Ends the program in order when a signal asks for its end; a second one doesn't disturb that.

    An exception is lost where Python can't pass it on, as in __del__: so it is raised again after a second.
    """
    for name in ENDING:
        signal.signal(name, signal.SIG_IGN)
    if TIMER:
        signal.signal(signal.SIGALRM, lambda *_: end(number, None))
        signal.setitimer(signal.ITIMER_REAL, 1)
    raise SystemExit(128 + number)


TIMER = hasattr(signal, "setitimer")
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def signals(ctrl_c: CtrlC) -> Iterator[None]:
    """Handles Ctrl-C, SIGTERM and SIGHUP, but for those that are ignored, as after nohup."""
    handlers: dict[int, Callable[..., None]] = {signal.SIGINT: ctrl_c.on_signal, **dict.fromkeys(ENDING, end)}
    before: dict[int, Any] = {}
    try:
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        if TIMER:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Keeps keys typed during an answer off the screen; the next prompt shows them."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] = silent[3] & ~termios.ECHO | termios.NOFLSH  # Ctrl-C does not drop it, either
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


# ----------------------------------------------------------------------------------------------------------------------
# Lines
# ----------------------------------------------------------------------------------------------------------------------

def read_line(prompt: str) -> str:
    """A line from a pipe, or from a terminal that can do nothing but lines."""
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


def read_message(prompt: str, read: ReadLine = read_line) -> str:
    """A message of one line; or of several: pasted, between two times three double quotes, or with \\ at line ends."""
    line = read(prompt)
    if line.strip().startswith('"""'):
        lines, line = [], line.strip()[3:]
        with contextlib.suppress(EOFError):  # the end of the input ends the message, too
            while not line.rstrip().endswith('"""'):
                lines.append(line)
                line = read_more(read)
            lines.append(line.rstrip()[:-3])
        text = "\n".join(lines).strip("\n")
        return "/" + text if text.startswith("/") else text  # never a command
    lines = [line.rstrip("\n")]
    with contextlib.suppress(EOFError):
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_more(read))
    text = "\n".join(lines)
    return "/" + text if text.startswith("/") and "\n" in lines[0] else text  # pasted: no command, either


def read_more(read: ReadLine) -> str:
    """The next line of a message; Ctrl-C drops the whole message."""
    try:
        return read("... ")
    except KeyboardInterrupt as error:
        raise LineDropped from error


def line_reader(complete: Complete, ctrl_c: CtrlC) -> ReadLine:
    """The best way to read lines from the terminal at hand."""
    screen = next((stream for stream in (sys.stdout, sys.stderr) if is_screen(stream)), None)
    if screen is None:
        return read_line
    try:
        return edited_lines(screen, complete, ctrl_c)
    except ImportError:  # the program's files were copied without their dependencies
        return read_line


def edited_lines(screen: Any, complete: Complete, ctrl_c: CtrlC) -> ReadLine:
    """Lines with editing, Tab, the lines of earlier chats, and pasted text of several lines as one."""
    from prompt_toolkit import PromptSession  # here, because it takes 0.1 s
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import ColorDepth, create_output
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    class Lines(History):
        def load_history_strings(self) -> Iterable[str]:
            return reversed(state.read_lines())

        def store_string(self, string: str) -> None:
            state.add_line(string)

    class WholeLines(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterable[Any]:
            line = document.text_before_cursor
            for whole, shown in complete(line):
                yield Completion(whole, -len(line), display=shown)

    keys, here = KeyBindings(), has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=here)
    @keys.add("c-j", filter=here)  # the terminal's form of lines typed during an answer
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=here)
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=here)
    @keys.add("<sigint>")
    def _(event: Any) -> None:
        if ctrl_c.counts():
            event.current_buffer.append_to_history()  # so that the up arrow brings the line back
            event.app.exit(exception=LineDropped if event.current_buffer.text else KeyboardInterrupt)

    output: Any = create_output(screen)
    output.enable_cpr = False  # no question to the terminal where the cursor is: not all of them answer
    session: Any = PromptSession(
        multiline=True, history=Lines(), completer=WholeLines(), complete_while_typing=False, key_bindings=keys,
        complete_style=CompleteStyle.READLINE_LIKE, prompt_continuation="... ", enable_suspend=True, output=output,
        style=Style.from_dict({"prompt": "bold ansigreen"}),
        color_depth=None if coloured(screen) else ColorDepth.MONOCHROME)

    def read(prompt: str) -> str:
        try:
            line: str = session.prompt([("class:prompt", prompt)])
            return line
        except OSError as error:  # the terminal has gone
            raise EOFError from error

    return read


# ----------------------------------------------------------------------------------------------------------------------
# Tab
# ----------------------------------------------------------------------------------------------------------------------

PLAIN_NAME = re.compile(r"[\w@%+=:,./~-]*")


def completions(line: str, commands: Iterable[str], settings: Iterable[str]) -> list[tuple[str, str]]:
    """(the whole line, how a list shows it) for all that Tab may make of the beginning of a line."""
    name, space, rest = line.partition(" ")
    if not space:
        return [(command, command) for command in sorted(commands) if line and command.startswith(line)]
    if name == "/set":
        return [(f"/set {key} ", key) for key in settings if key.startswith(rest)]
    if name in ("/save", "/load"):
        return [(f"{name} {file}", shown) for file, shown in file_names(rest)]
    return []


def file_names(start: str) -> list[tuple[str, str]]:
    """(the path, quoted where it must be; the name) of each file whose path begins like this."""
    typed = start[1:] if start[:1] in ("'", '"') else start.replace("\\ ", " ")
    folder, begin = os.path.split(typed)
    found = []
    with contextlib.suppress(OSError, ValueError), os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(begin) and (begin or not entry.name.startswith(".")):
                shown = entry.name + "/" * entry.is_dir()
                path = os.path.join(folder, shown)
                quoted = path if PLAIN_NAME.fullmatch(path) else shlex.quote(path)
                found.append((quoted.removesuffix("'") if entry.is_dir() else quoted, shown))
    return found
