"""How the commands begin: Ctrl-C during the imports, which take a while, ends in one line, as it does later on.

It imports nothing that takes time.
"""
import contextlib
import os
import signal
import sys
from types import FrameType


def catch_ctrl_c() -> None:
    """Lets Ctrl-C end the process at once, with one line and status 130, until `release_ctrl_c`.

    A handler, not an exception: libraries that are being imported lose exceptions, or print them.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where SIGINT is ignored, as after `&`
        signal.signal(signal.SIGINT, end_at_once)


def end_at_once(_signum: int, _frame: FrameType | None) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"{program()}: interrupted\n".encode("ascii", "replace"))
    os._exit(130)


def release_ctrl_c() -> bool:
    """Lets Ctrl-C raise KeyboardInterrupt again -> whether `catch_ctrl_c` was in force."""
    if signal.getsignal(signal.SIGINT) is not end_at_once:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


def program() -> str:
    """The name of the command, as it begins an error message."""
    return "".join(c if c.isprintable() else "?" for c in os.path.basename(sys.argv[0]))
