"""The README keeps its word: its commands run, its programs run, its tables are complete."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen3_app.chat import HELP
from qwen3_app.cli import make_parser
from test_hub import DEMO, Hub

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    """The code blocks of a language, without those that build a virtual environment (CI runs these)."""
    return [block for block in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if ".venv" not in block]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the programs, in which the README's commands may write."""
    folder = tmp_path_factory.mktemp("readme")
    for file in [*ROOT.glob("*.py"), *ROOT.glob("demo/*")]:
        (folder / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(file, folder / file.relative_to(ROOT))
    return folder


@pytest.fixture(scope="module")
def environment(folder):
    """The commands ask a hub of our own, where the name of Qwen's model stands for the bundled one."""
    hub = Hub()
    hub.models = {"Qwen/Qwen3-0.6B": DEMO}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "QWEN3_"))}
    yield clean | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(folder / "hub"),
                   "HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    hub.stop()


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands(block, folder, environment):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    n_commands = len([line for line in block.splitlines() if "qwen3" in line])
    assert n_commands and "Traceback" not in done.stderr


@pytest.mark.parametrize("block", blocks("python"))
def test_programs(block, folder, environment):
    done = subprocess.run([sys.executable, "-c", block], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0 and done.stdout.strip() and not done.stderr, done.stderr


def test_what_the_last_program_says(folder, environment):
    done = subprocess.run([sys.executable, "-c", blocks("python")[-1]], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=120)
    assert "21" in done.stdout and "Lisbon" in done.stdout


def test_table_of_options_is_complete():
    table = README[README.index("### All options"):README.index("### The fast engine")]
    listed = set(re.findall(r"--[a-z][a-z-]+", table))
    assert listed == {option for action in make_parser()._actions for option in action.option_strings
                      if option.startswith("--") and option != "--help"}


def test_table_of_chat_commands_is_complete():
    table = README[README.index("### Chat"):README.index("### In and out")]
    assert set(re.findall(r"^(/\w+)", HELP, re.MULTILINE)) <= set(re.findall(r"`(/\w+)", table))
