"""What the scripts share, one room for each concern; qwen3.py and tokenizer_utils.py work without it."""
import os
import sys
from types import TracebackType


def one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints one line and exits with 130 if Ctrl-C stops a script or an installed command during its imports."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


if os.path.basename(sys.argv[0]).startswith("qwen3"):
    sys.excepthook = one_line
