import signal
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

# `pytest &` in a script starts with SIGINT ignored. Child processes would inherit that and not hear Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that the result depends only on the code. Other examples: --hypothesis-profile=default
settings.register_profile("same examples", derandomize=True, deadline=None)
settings.load_profile("same examples")
