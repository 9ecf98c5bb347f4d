import signal
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

# A script's `pytest &` starts with SIGINT ignored, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a result depends on the code only; other ones: --hypothesis-profile=default
settings.register_profile("same examples", derandomize=True, deadline=None)
settings.load_profile("same examples")
