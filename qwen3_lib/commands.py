"""The installed commands: each is a script's `main`."""
import sys
from collections.abc import Callable
from importlib import import_module


def command(script: str, *options: str) -> Callable[[], int]:
    """A function that calls the script's main; these options come before those of the command line."""
    def run() -> int:
        status: int = import_module(script).main([*options, *sys.argv[1:]])
        return status

    return run


qwen3, asr, tts, embed, batch, inspect, server = map(command, (
    "qwen3", "qwen3_asr", "qwen3_tts", "qwen3_embed", "qwen3_batch", "qwen3_inspect", "qwen3_server"))
fast = command("qwen3", "--fast")
