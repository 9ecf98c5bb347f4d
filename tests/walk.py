"""A new user's first hour in a fresh clone, with nothing set in the environment: README's commands and what comes next.

    env -i PATH="$PATH" .venv/bin/python tests/walk.py     after README's two commands; takes a minute

The home is empty: no cache, no kept conversation, no machine code. tests/test_readme.py runs what asks the hub. Each
step prints a line with its seconds; the exit status is 1 if one failed.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PROMPT = '"What is the capital of France?"'
PARIS = "The capital of France is Paris."
ANY = r"\S"
EXPECTED = {  # a part of README's command -> patterns of what stdout has and stderr is; of others: something, nothing
    "--stats": (ANY, ".*tokens/s.*"), "--fast": (PARIS, "compiling the fast engine .*\n"), "法国": ("巴黎", ""),
    "2 + 3": ("5", ""), "Mia": (r"Your name is Mia\.", ""), "--chat --hide-thinking": (r"\A\Z", "")}
SOON = 0.3  # seconds from the last character of an answer to the end of its command, once at least in three runs
failures: list[str] = []


def said(name: str, start: float, faults: list[str]) -> None:
    failures.extend(faults)
    print(f"{time.monotonic() - start:6.2f} s  {name}", *(f"  FAILED: {each}" for each in faults), sep="\n", flush=True)


def step(command: str, stdout: str = ANY, stderr: str = "", cwd: Path = ROOT) -> float:
    """A command without input: status 0, patterns of what it says -> seconds from its last character to its end."""
    with tempfile.TemporaryFile() as file:
        start = last = time.monotonic()
        out = b""
        process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", command], cwd=cwd, env=ENVIRONMENT, stderr=file,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        while piece := os.read(process.stdout.fileno(), 2**16):
            out, last = out + piece, time.monotonic()
        status = process.wait()
        wait = time.monotonic() - last
        file.seek(0)
        text, errors = out.decode(), file.read().decode()
    faults = [f"status {status}"] * (status != 0) + [f"stdout is {text[-500:]!r}"] * (re.search(stdout, text) is None)
    right = re.fullmatch(stderr, errors, re.DOTALL) and "Traceback" not in errors
    said(" ".join(command.split())[:100], start, faults + [f"stderr is {errors[-2000:]!r}"] * (not right))
    return wait


def program(part: str) -> str:
    """The command that runs README's program with this part."""
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return f"python -c {shlex.quote(next(each for each in programs if part in each))}"


def line(start: str) -> str:
    """README's command that begins so."""
    return re.search(rf"{re.escape(start)}.*?(?=  #|`|$)", README, re.MULTILINE)[0]


def readme() -> None:
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for command in block.splitlines():
            if "0.6B" not in command and ".venv" not in command:
                stdout, stderr = next((EXPECTED[part] for part in EXPECTED if part in command), (ANY, ""))
                step(command.partition("  #")[0], stdout, stderr)
    start, waits = time.monotonic(), []
    for _ in range(3):
        for file in (HOME / ".cache/qwen3").rglob("choices*"):  # of the ways to compute: nothing is settled
            file.unlink()
        waits.append(step(f"python qwen3.py --fast {PROMPT}", PARIS))
    said(f"its end {min(waits):.2f} s after its last character", start, ["too late"] * (min(waits) > SOON))
    step(program("BUNDLED"), f"(?s){PARIS}.*stop")


def two_files() -> None:
    folder = HOME / "two files"
    folder.mkdir()
    for name in ("qwen3.py", "tokenizer_utils.py"):
        shutil.copy(ROOT / name, folder)
    config = json.loads((ROOT / "demo/config.json").read_text())
    (HOME / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    step("python tests/make_random_model.py ~/config.json ~/two\\ files/Qwen3-0.6B --layers 2", "Qwen3-0.6B")
    step(line("python qwen3.py --model Qwen3-0.6B"), cwd=folder)
    step(program("Qwen3-0.6B"), cwd=folder)


def jobs() -> None:
    def command(start: str) -> str:
        return line(f"python {start}").replace("python ", f"python {shlex.quote(str(ROOT))}/")

    (HOME / "prompts.jsonl").write_text('{"prompt": "What is the capital of Peru?"}\n{"prompt": "Hello!"}\n')
    (HOME / "lines.txt").write_text("Bees fly.\nParis is in France.\n")
    step(f"{command('qwen3_batch.py prompts')} && cat answers.jsonl", "(?s)Lima.*Hello|Hello.*Lima", ".*", HOME)
    make = "import embedders, pathlib; embedders.make_embedder(pathlib.Path.home() / 'embedder')"
    step(f'PYTHONPATH=tests python -c "{make}"', "")
    embed = command("qwen3_embed.py").replace("Qwen/Qwen3-Embedding-0.6B", "embedder")
    step(f"{embed}; python -c 'import numpy; print(numpy.load(\"vectors.npy\").shape)'", r"\(2, \d+\)", cwd=HOME)
    inspect = command("qwen3_inspect.py").replace(" --open", "")
    step(f"{inspect}; head -c 15 qwen3_inspect.html", "(?i)<!doctype html>", ".*", HOME)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        HOME = Path(home)
        kept = {name: os.environ[name] for name in ["QWEN3_INT8_PATH"] if name in os.environ}
        ENVIRONMENT = kept | {"HOME": home, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        begun = time.monotonic()
        for part in (readme, two_files, jobs):
            part()
        print(f"{time.monotonic() - begun:6.0f} s in all, {len(failures)} failures")
    sys.exit(bool(failures))
