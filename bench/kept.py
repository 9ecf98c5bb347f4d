"""The work `kept` of run.py: prompts on the disk under load, in servers of the bundled model.

Conversations run at a time, each by turns through two servers on one folder that holds a part of them; then through a
server that is killed again and again while it writes, and one that may write small files only. Each answer is compared
with that of a server without a folder: one that differs ends the work with an error.
"""
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, Bench, note, table
from server import posted, started

SYSTEM = "You are an agent on a computer of somebody. " * 12
WORDS = "read write file line test code name list open close first last word text find move copy make show run".split()


def question(number: int, turn: int, n_words: int) -> str:
    rng = random.Random(100 * number + turn)
    return " ".join(rng.choice(WORDS) for _ in range(n_words))


class Talks:
    """Conversations that go on turn by turn, with a known answer to each."""

    def __init__(self, conversations: int, turns: int, n_words: int):
        self.numbers, self.turns, self.n_words = range(conversations), turns, n_words
        self.answers = dict[tuple[int, int], str]()
        self.n_right = self.cached = self.prompt = 0

    def ask(self, url: str, number: int, turn: int) -> None:
        """Asks a question after the known answers; checks the answer, or notes it if it is the first of its kind."""
        messages = [{"role": "system", "content": SYSTEM}]
        for before in range(turn + 1):
            messages.append({"role": "user", "content": question(number, before, self.n_words)})
            if before < turn:
                messages.append({"role": "assistant", "content": self.answers[number, before]})
        got = posted(f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0})
        text, usage = got["choices"][0]["message"]["content"], got["usage"]
        if self.answers.setdefault((number, turn), text) != text:
            raise RuntimeError(f"conversation {number}, turn {turn}: {text!r} in place of "
                               f"{self.answers[number, turn]!r}")
        self.n_right += 1
        self.cached += usage["prompt_tokens_details"]["cached_tokens"]
        self.prompt += usage["prompt_tokens"]

    def run(self, url_of: Callable[[int, int], str]) -> None:
        """All conversations at a time."""
        def talk(number: int) -> None:
            for turn in range(self.turns):
                self.ask(url_of(number, turn), number, turn)

        with ThreadPoolExecutor(len(self.numbers)) as clients:
            [*clients.map(talk, self.numbers)]

    def found(self) -> str:
        """The share of all prompts' tokens that was in memory or on the disk since the last time."""
        share, self.cached, self.prompt = self.cached / self.prompt, 0, 0
        return f"{100 * share:.0f} %"


def resident(pid: int) -> float:
    """MB of a process that belong to no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def killed_while_writing(talks: Talks, command: list[Any], folder: Path, kills: int) -> int:
    """Asks on, and kills the server as soon as a half written file is seen, or later -> how often one was seen."""
    seen, rng = 0, random.Random(0)
    for i in range(kills):
        process, url = started(*command)
        with ThreadPoolExecutor(1) as client:
            asking = client.submit(talks.run, lambda number, turn: url)
            end = time.monotonic() + rng.uniform(1, 4)
            while time.monotonic() < end and not any(folder.glob("*.tmp")) and not asking.done():
                pass
            seen += any(folder.glob("*.tmp"))
            process.kill()
            process.wait()
            error = asking.exception()
        if error is not None and not isinstance(error, OSError):  # OSError: the connection has broken
            raise error
    return seen


def kept(bench: Bench, conversations: int = 32, turns: int = 4, words: int = 120, kills: int = 20,
         megabytes: int = 60) -> list[str]:
    """Of the bundled model in int8. `words`: of a question; `megabytes`: of the folder."""
    talks, folder = Talks(conversations, turns, words), bench.folder / "kept"
    plain = [sys.executable, ROOT / "qwen3_server.py", "--quantize", "int8", "--threads", bench.args.threads]
    one = [*plain, "--slots", 1, "--keep", 0, "--keep-on-disk", f"{folder}:{megabytes}MB"]
    two = [*plain, "--slots", 4, "--keep", "8MB", "--keep-on-disk", f"{folder}:{megabytes}MB"]
    rows, processes = [["", "right answers", "found", "bytes on the disk", ""]], list[Any]()

    def step(name: str, work: Callable[[], Any], about: Callable[[Any], str] = lambda _: "") -> None:
        note(name)
        before, result = talks.n_right, work()
        size = sum(file.stat().st_size for file in folder.glob("*"))
        if size > megabytes * 10**6 + 2**21:  # two servers may each write one file more
            raise RuntimeError(f"{size:,} bytes in the folder")
        rows.append([name, str(talks.n_right - before), talks.found(), f"{size / 1e6:.1f} MB", about(result)])

    def serve(*commands: list[Any], **popen: Any) -> list[str]:
        for process in processes:
            process.terminate()
            process.wait()
        found = [started(*command, **popen) for command in commands]
        processes[:] = [process for process, _ in found]
        return [url for _, url in found]

    def again(urls: list[str], times: int) -> list[float]:
        found = []
        for _ in range(times):
            talks.run(lambda number, turn: urls[(number + turn) % len(urls)])
            found.append(sum(resident(process.pid) for process in processes))
        return found

    try:
        step("without a folder", lambda: again(serve(plain), 1))
        step("two servers on one folder", lambda: again(serve(two, two), 4),
             lambda found: "memory after each round: " + ", ".join(f"{n:.0f} MB" for n in found))
        serve()
        step(f"{kills} kills", lambda: killed_while_writing(talks, one, folder, kills),
             lambda seen: f"{seen} of them with a half written file")
        step("after them", lambda: again(serve(one), 1))
        errors = bench.folder / "errors"
        with errors.open("w") as file:
            small = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2**14, 2**14))
            full = [*one[:-1], bench.folder / "full"]
            step("a full disk", lambda: again(serve(full, preexec_fn=small, stderr=file), 1))
            serve()
        lines = [line for line in errors.read_text().splitlines() if "not kept on the disk" in line]
        rows[-1][-1] = f"{len(lines)} line on stderr, {len(os.listdir(bench.folder / 'full'))} files"
        if len(lines) != 1:
            raise RuntimeError(f"{len(lines)} lines about the full disk")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [f"{conversations} conversations at a time, {turns} turns each, in one slot to eight", "", *table(*rows)]
