"""The time of forward in two processes, interleaved: one never imported a recorder, the other used a recorder before.

    python bench/recorder.py

The recorder of qwen3_inspect.py runs copies of the functions, so both times should be equal.
"""
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import qwen3  # noqa: E402


def start(used: bool) -> None:
    global model
    model = qwen3.load_model(qwen3.BUNDLED, offline=True)
    if used:
        from qwen3_lib.page.recorder import Recorder
        recorder = Recorder(model)
        recorder.forward([1, 2, 3], recorder.new_cache())


def decoded() -> float:
    """Milliseconds per token: the mean of 50 decoded tokens."""
    cache, began = qwen3.KVCache(model.config), time.perf_counter()
    for token in range(50):
        qwen3.forward(model, [token], cache)
    return (time.perf_counter() - began) * 1000 / 50


if __name__ == "__main__":
    processes = [get_context("spawn").Pool(1, start, (used,)) for used in (False, True)]
    rounds = [[process.apply(decoded) for process in processes] for _ in range(31)][1:]
    never, before = map(median, zip(*rounds))
    print(f"never imported: {never:.3f} ms per token; used before: {before:.3f} ms; ratio of the medians "
          f"{before / never:.3f}")
