"""Tokens per second and the time to the first token of qwen3_server.py, beside Batch directly, all in one run.

    python bench/server.py                      random weights in the shape of Qwen3-0.6B, int8; about 10 minutes
    python bench/server.py --model FOLDER --tokens 32 --rounds 1
    python bench/server.py --model FOLDER --beside http://127.0.0.1:8081    and beside a server that runs already

The other server must have a model of the same shape, and take OpenAI's completions with token ids and `ignore_eos`. For
llama.cpp's: `llama-server -m model.gguf --port 8081 -np 32 -c 16384 -t 2`. No package brings that program; the server of
llama-cpp-python answers one request at a time, and needs fastapi.

Each client sends one request with a prompt of its own and reads the stream of its answer; all begin together. Rounds go
over the numbers of clients, and for each number over all servers in turn; ratios are medians of each round's ratio. The
text goes to bench/SERVER.md, too.
"""
import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from run import alone, machine, make_model, new_process, note  # noqa: E402

model: Any = None  # in the process that uses Batch directly


def start_model(path: Path, form: str, threads: int) -> None:
    global model
    import qwen3_numba
    model = qwen3_numba.load_model(path, form, threads)


def speed_of_batch(prompts: list[list[int]], n_tokens: int) -> float:
    """Tokens per second of all answers together, prompts included."""
    from qwen3_lib.batch.batch import Batch
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


def started(path: Path, args: argparse.Namespace) -> tuple[subprocess.Popen, str]:
    """A server of ours in a process of its own, and its address."""
    command = [sys.executable, ROOT / "qwen3_server.py", "--model", path, "--quantize", args.quantize, "--threads",
               args.threads, "--slots", max(args.clients), "--context", args.prompt + args.tokens + 1, "--port", 0,
               "--keep", 0]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    lines = []
    while not lines or "at a time" not in lines[-1]:
        lines.append(process.stderr.readline())
        if process.poll() is not None:
            raise RuntimeError("".join(lines))
    return process, lines[0].split()[-1].removesuffix("/v1")


def report(args: argparse.Namespace, values: dict[tuple[str, int], list[Any]]) -> str:
    names = sorted({name for name, _ in values} - {"batch"}, reverse=True)
    titles = ["clients", "Batch: tokens/s", *(f"{name}: {what}" for name in names for what in (
        "tokens/s", "/ Batch", "95 % of first tokens within"))]
    about = f"{args.quantize}, prompts of {args.prompt} tokens, answers of {args.tokens}"
    lines = [machine(args.threads), "", about, "",
             f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for n in args.clients:
        cells = [str(n), f"{median(values['batch', n]):.1f}"]
        for name in names:
            speeds, firsts = zip(*values[name, n])
            ratio = median(speed / batch for speed, batch in zip(speeds, values["batch", n]))
            cells += [f"{median(speeds):.1f}", f"{ratio:.2f}", f"{np.percentile(np.concatenate(firsts), 95):.2f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (default: random weights, made for the run)")
    parser.add_argument("--quantize", default="int8", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--beside", metavar="URL", help="another server with the same model")
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder for SERVER.md")
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the processes to come
    values, rng = dict[tuple[str, int], list[Any]](), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or alone(make_model, Path(folder) / "model")
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        process, url = started(path, args)
        batch = new_process(start_model, path, args.quantize, args.threads)
        urls = {"this server": url} | ({"the other server": args.beside} if args.beside else {})
        try:
            for i in range(args.rounds + 1):  # the first one warms up
                for n in args.clients:
                    note(f"{n} clients: round {i} of {args.rounds}")
                    prompts = rng.integers(0, vocab_size, (n, args.prompt)).tolist()
                    found: dict[str, Any] = {"batch": batch.submit(speed_of_batch, prompts, args.tokens).result()}
                    found |= {name: measure(url, prompts, args.tokens) for name, url in urls.items()}
                    for name, value in found.items() if i else ():
                        values.setdefault((name, n), []).append(value)
        finally:
            process.terminate()
            process.wait()
            batch.shutdown()
    text = f"# The latest run of bench/server.py\n\n{report(args, values)}"
    print(text)
    (args.out / "SERVER.md").write_text(text)


if __name__ == "__main__":
    main()
