"""The test suite itself: its result depends neither on how it is started nor on what was published since."""
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PINNED = {canonicalize_name(name): version for name, version in
          re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints-test.txt").read_text(), re.MULTILINE)}


def requirements(file: str) -> list[Requirement]:
    lines = (ROOT / file).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith(("-", "#"))]


def test_processes_hear_ctrl_c():
    program = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    try:
        assert process.communicate(timeout=60)[1].endswith("KeyboardInterrupt\n")
    finally:
        process.kill()


def test_in_the_background_processes_hear_ctrl_c_as_well():
    """`pytest &` in a script starts with SIGINT ignored, and child processes inherit that."""
    tests = shlex.join([sys.executable, "-m", "pytest", "-p", "no:cacheprovider",
                        f"{__file__}::test_processes_hear_ctrl_c"])
    done = subprocess.run(["bash", "-c", f"{tests} & wait $!"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_every_version_is_pinned():
    """Also the versions of indirect requirements; each fits the bounds of whoever requires it."""
    left, seen = requirements("requirements.txt") + requirements("requirements-test.txt"), set()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        assert PINNED.get(name) in requirement.specifier if name in PINNED else False, requirement
        if name not in seen:
            seen.add(name)
            try:
                needed = map(Requirement, requires(requirement.name) or ())
            except PackageNotFoundError:
                continue
            left += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]


def test_every_requirement_has_a_lower_bound():
    """CI replaces >= by == to test the lower bounds."""
    for requirement in requirements("requirements.txt") + requirements("requirements-test.txt"):
        assert [one.operator for one in requirement.specifier] == [">="], requirement
