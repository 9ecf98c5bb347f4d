"""Lines from a terminal or a pipe."""
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from qwen3_lib.app.files import history_file
from qwen3_lib.app.terminal import OutputError, coloured, is_screen, note
from qwen3_lib.io.errors import InputError

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

ReadLine = Callable[[str], str]  # prompt -> a line without its newline; raises EOFError at the end of the input


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Keeps keys typed during an answer off the screen; the next prompt shows them."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def read_line(prompt: str) -> str:
    """A line from a pipe, or from a terminal without editing."""
    try:
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)
            return input()
        line = sys.stdin.buffer.readline()  # bytes, so that a line that isn't text spoils no other one
        if not line:
            raise EOFError
        return line.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"the line is not text in {error.encoding}: {error.reason}") from error
    except OSError as error:
        raise OutputError(f"stdin: cannot be read: {error.strerror}") from error


def read_message(prompt: str, read: ReadLine = read_line) -> str:
    """A message: a line, a pasted text, lines between two times three double quotes, or lines that end in a backslash.

    A message of several lines is never a command: one that begins with a slash gets a second slash.
    """
    line = read(prompt)
    if line.strip().startswith('"""'):
        several, lines, line = True, [], line.strip()[3:]
        with contextlib.suppress(EOFError):  # the end of the input ends the message, too
            while not line.rstrip().endswith('"""'):
                lines.append(line)
                line = read("... ")
            lines.append(line.rstrip()[:-3])
        text = "\n".join(lines).strip("\n")
    else:
        lines = [line.rstrip("\n")]
        several = "\n" in lines[0]
        with contextlib.suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read("... "))
        text = "\n".join(lines)
    return "/" + text if several and text.startswith("/") else text


def line_reader(commands: Iterable[str], settings: Iterable[str]) -> ReadLine:
    """The best way to read lines from the terminal at hand."""
    screen = next((stream for stream in (sys.stdout, sys.stderr) if is_screen(stream)), None)
    if screen is None:
        return read_line
    try:
        return edited_lines(screen, commands, settings)
    except ImportError:
        note("(editing, Tab and the up arrow need prompt_toolkit: pip install prompt_toolkit)")
        return read_line


def edited_lines(screen: Any, commands: Iterable[str], settings: Iterable[str]) -> ReadLine:
    """Lines with editing, Tab, the lines of earlier chats, and a pasted text as one message."""
    from prompt_toolkit import PromptSession  # here, because it takes 0.1 s
    from prompt_toolkit.completion import NestedCompleter, PathCompleter, WordCompleter, merge_completers
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import ColorDepth, create_output
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk; a lost line costs only comfort
                super().store_string(string)

    keys, here, files = KeyBindings(), has_focus(DEFAULT_BUFFER), PathCompleter(expanduser=True)

    @keys.add("enter", filter=here)
    @keys.add("c-j", filter=here)  # how a terminal stores the Enter of a line typed during an answer
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=here)
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=here)
    @keys.add("<sigint>")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset(append_to_history=True)  # so that the up arrow brings the line back
        else:
            event.app.exit(exception=KeyboardInterrupt)

    output: Any = create_output(screen)
    output.enable_cpr = False  # no question to the terminal where the cursor is: not all of them answer
    completer = merge_completers([
        WordCompleter(sorted(commands), sentence=True),
        NestedCompleter({"/set": WordCompleter(sorted(settings), sentence=True), "/save": files, "/load": files,
                         "/image": files})],
        deduplicate=True)
    file = history_file()
    session: Any = PromptSession(
        multiline=True, history=InMemoryHistory() if file is None else History(str(file)), completer=completer,
        complete_while_typing=False, complete_style=CompleteStyle.READLINE_LIKE, key_bindings=keys,
        prompt_continuation="... ", enable_suspend=True, output=output,
        style=Style.from_dict({"prompt": "bold ansigreen"}),
        color_depth=None if coloured(screen) else ColorDepth.MONOCHROME)

    def read(prompt: str) -> str:
        try:
            line: str = session.prompt([("class:prompt", prompt)])
            return line
        except OSError as error:  # the terminal has gone
            raise EOFError from error

    return read
