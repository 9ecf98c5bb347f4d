"""The work `agents` of run.py: how long a coding agent waits for the first token, through a server over HTTP.

llama-server, in $LLAMA_SERVER or in $PATH, gets the same weights, and keeps prompts in memory by --cache-ram and in a
file by --slot-save-path: before the restart its slot is saved, and after it restored, which counts as waiting.

A round has new prompts: a first one; a turn with some tokens more; the next turn, after another prompt came between,
which takes a slot of its own; and the next one after the server was stopped and started again.
"""
import os
import shutil
import sys
import time
import urllib.error
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness import PAIRS, ROOT, Bench, note, table
from peers import peer_file
from server import OURS, ask, make_words, posted, started

STEPS = "first prompt", "next turn", "after another prompt", "after a restart"


def saved(url: str, slot: int) -> int:
    """Lets llama-server write a slot into a file of its name -> its tokens; 0 if it has none."""
    try:
        return int(posted(f"{url}/slots/{slot}?action=save", {"filename": f"{slot}"})["n_saved"])
    except urllib.error.HTTPError:
        return 0


def agents(bench: Bench, quantize: str = "int4", prompt: int = 15000, turn: int = 200, other: int = 2000) -> list[str]:
    """Random weights in the shape of Qwen3-0.6B. `other`: tokens of the prompt that comes between."""
    vocab_size, rng, args = bench.model(make_words).vocab_size, np.random.default_rng(0), bench.args
    room, waits, ends = prompt + 3 * turn + 8, dict[tuple[str, str], list[float]](), dict[str, list[float]]()
    names = [OURS]
    if program := os.environ.get("LLAMA_SERVER") or shutil.which("llama-server"):
        names.append("llama-server")
        file = peer_file(bench.path, bench.folder, PAIRS[quantize], True)
    else:
        bench.notes.append("llama-server is left out: neither in $LLAMA_SERVER nor in $PATH")

    def command(name: str, folder: Path) -> list[Any]:
        if name == OURS:
            return [sys.executable, ROOT / "qwen3_server.py", "--model", bench.path, "--quantize", quantize,
                    "--threads", args.threads, "--slots", 2, "--context", room, "--keep", "4GB",
                    "--keep-on-disk", folder]
        return [program, "-m", file, "-np", 2, "-c", 2 * room, "-t", args.threads, "--cache-ram", 8192,
                "--slot-save-path", folder]

    def waited(name: str, url: str, ids: list[int]) -> float:
        return ask(url, ids, 1, **({} if name == OURS else {"cache_prompt": True}))[0]

    for i in range(args.rounds + 1):  # the first one warms up, with short prompts
        n = prompt if i else min(prompt, 512)
        ids, between = (rng.integers(0, vocab_size, size).tolist() for size in (n + 3 * turn, other if i else 64))
        for name in names:
            note(f"{name}: round {i} of {args.rounds}")
            folder = bench.folder / f"kept {i} {name.split()[0]}"
            folder.mkdir()
            process, url = started(*command(name, folder))
            try:
                found = [waited(name, url, ids[:n]), waited(name, url, ids[:n + turn])]
                waited(name, url, between)
                found.append(waited(name, url, ids[:n + 2 * turn]))
                start = time.perf_counter()
                if name != OURS:
                    longest = max((0, 1), key=lambda slot: saved(url, slot))
                process.terminate()
                process.wait()
                ends.setdefault(name, []).append(time.perf_counter() - start)
                process, url = started(*command(name, folder))
                start = time.perf_counter()
                if name != OURS:
                    posted(f"{url}/slots/{longest}?action=restore", {"filename": f"{longest}"})
                found.append(time.perf_counter() - start + waited(name, url, ids))
            finally:
                process.kill()
                process.wait()
            shutil.rmtree(folder)
            for step, value in zip(STEPS, found) if i else ():
                waits.setdefault((name, step), []).append(value)
    rows = [["seconds to the first token", *STEPS, "writing and ending"]]
    rows += [[name, *(f"{median(waits[name, step]):.2f}" for step in STEPS), f"{median(ends[name][1:]):.2f}"]
             for name in names]
    if len(names) > 1:
        rows.append(["llama-server's / this server's", *(
            f"{median(theirs / ours for ours, theirs in zip(*(waits[name, step] for name in names))):.2f}"
            for step in STEPS), ""])
    return [f"{quantize}; a first prompt of {prompt} tokens, then {turn} more each turn; {other} tokens between", "",
            *table(*rows)]
