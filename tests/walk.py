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
BASH = shutil.which("bash") or "bash"  # on Windows Git's, if it stands before the system's own in the PATH
KEPT = ("QWEN3_INT8_PATH", "SYSTEMROOT", "TEMP", "TMP")  # without the latter, no program of Windows starts
PARIS = "The capital of France is Paris."
ANY = r"\S"
EXPECTED = {  # a part of README's command -> patterns of what stdout has and stderr is; of others: something, nothing
    "--stats": (ANY, ".*tokens/s.*"), "--fast": (PARIS, "compiling the fast engine .*\n"), "法国": ("巴黎", ""),
    "2 + 3": ("5", ""), "Mia": (r"Your name is Mia\.", ""), "circle.png": ("red circle", ""),
    "speech.wav": (r"\AMaria has four green apples\. Seven white birds\.\n\Z", ""),
    "--out said.wav": (r"\A\Z", r"said\.wav: \d\.\d s\n"), "said.wav": (r"\ATom sees six red birds\.\n\Z", ""),
    "--chat --hide-thinking": (r"\A\Z", "")}
failures: list[str] = []


def step(command: str, stdout: str = ANY, stderr: str = "", cwd: Path = ROOT) -> None:
    """A command without input: status 0, patterns of what it says."""
    start = time.monotonic()
    done = subprocess.run([BASH, "-euo", "pipefail", "-c", command], cwd=cwd, env=ENVIRONMENT, capture_output=True,
                          stdin=subprocess.DEVNULL, encoding="utf-8")
    faults = [f"status {done.returncode}"] * (done.returncode != 0)
    faults += [f"stdout is {done.stdout[-500:]!r}"] * (re.search(stdout, done.stdout) is None)
    right = re.fullmatch(stderr, done.stderr, re.DOTALL) and "Traceback" not in done.stderr
    failures.extend(faults := faults + [f"stderr is {done.stderr[-2000:]!r}"] * (not right))
    print(f"{time.monotonic() - start:6.2f} s  {' '.join(command.split())[:100]}",
          *(f"  FAILED: {each}" for each in faults), sep="\n", flush=True)


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
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        ENVIRONMENT = kept | {"HOME": home, "USERPROFILE": home,
                              "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        begun = time.monotonic()
        for part in (readme, two_files, jobs):
            part()
        print(f"{time.monotonic() - begun:6.0f} s in all, {len(failures)} failures")
    sys.exit(bool(failures))
