"""The project installed, copied, optimised: it works from wherever it lies."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from configs import FRANCE, PARIS, ROOT
from helpers import output


def test_works_without_assertions():
    assert output("--no-think", FRANCE, flags=["-O"]) == PARIS
    assert output("--no-think", FRANCE, flags=["-OO"]) == PARIS


def test_works_from_a_copy_of_the_files(tmp_path):
    for name in ("qwen3.py", "tokenizer_utils.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    shutil.copytree(ROOT / "qwen3_io", tmp_path / "qwen3_io")
    program = (f"from qwen3 import load_model, generate, chat\nmodel = load_model({str(ROOT / 'demo')!r})\n"
               f"print(chat(model, {FRANCE!r}, enable_thinking=False).finish().text)")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, PARIS, "")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the project is installed, from a copy, as pip installs it."""
    target, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = names.stdout.splitlines() if names.returncode == 0 else [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--target", target, source], check=True, timeout=300)
    return target


def test_installed_command(installed, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "QWEN3_MODEL"}
    done = subprocess.run([installed / "bin/qwen3", "--no-think", FRANCE], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120, env=environment | {"PYTHONPATH": str(installed)})
    assert (done.returncode, done.stdout) == (0, PARIS)
    assert "bundled model" in done.stderr


def test_installed_types(installed, tmp_path):
    (tmp_path / "program.py").write_text(
        "from qwen3 import load_model, generate, chat\nmodel = load_model('x')\nreply = chat(model, 'Hello')\n"
        "reveal_type(reply.answer.content)\nreveal_type(list(generate(model, [1])))\nload_model(1.5)\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "program.py"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"MYPYPATH": "", "PYTHONPATH": str(installed)})
    assert 'is "str"' in done.stdout and 'is "list[int]"' in done.stdout
    assert re.search(r'program.py:6: error: Argument 1 to "load_model" has incompatible type "float"', done.stdout)
    assert "Found 1 error" in done.stdout, done.stdout
