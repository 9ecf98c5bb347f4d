"""The fast engine's parts: how numbers lie in memory, the kernels, their machine code, the threads."""
import importlib.util
from pathlib import Path

from qwen3_lib.io.errors import brief

numba = importlib.util.find_spec("numba")  # importing it would take longer than all else, and is seldom necessary
NUMBA_VERSION = Path(numba.origin).with_name("_version.py") if numba and numba.origin else Path()
try:  # before any module of this room needs it
    if not NUMBA_VERSION.is_file():
        raise ImportError
    import llvmlite.binding  # noqa: F401
except ImportError:
    raise ImportError("the fast engine needs numba: pip install numba, or uv run --with numba; the NumPy engine needs "
                      "none") from None
except OSError as error:  # of its shared library
    raise ImportError("qwen3_numba needs llvmlite, which can't be loaded; is there enough memory? qwen3.py does the "
                      f"same without it ({brief(error)})") from error
