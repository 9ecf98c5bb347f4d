"""The README and docs/ keep their word: their commands run, their programs run with both engines, their tables are
complete. tests/walk.py runs README's commands with the bundled model, in a fresh clone."""
import doctest
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qwen3_batch
import qwen3_embed
import qwen3_server
from helpers import run_forked
from qwen3_lib.app import cli, talk
from qwen3_lib.app.chat import HELP
from qwen3_lib.kernels.build import kernel_folder, make_kernels
from qwen3_lib.kernels.dense import DENSE_STEPS
from test_hub import DEMO, Hub

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = (ROOT / "docs/options.md").read_text()
PAGES = [(ROOT / "README.md").read_text(), *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language):
    """The code blocks of a language, without those that build a virtual environment (CI runs these), or compile."""
    return [block for page in PAGES for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
            if ".venv" not in block and "--compile" not in block]


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", OPTIONS, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the programs, in which the README's commands may write."""
    folder = tmp_path_factory.mktemp("readme")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for room in ("qwen3_lib", "demo"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "train"))
    return folder


@pytest.fixture(scope="module")
def environment(folder):
    """The commands ask a hub of our own, where the name of Qwen's model stands for the bundled one."""
    hub = Hub()
    hub.models = {"Qwen/Qwen3-0.6B": DEMO}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "QWEN3_"))}
    yield clean | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(folder / "hub"),
                   "HOME": str(folder), "NUMBA_CACHE_DIR": str(kernel_folder()),  # compiled once for all tests
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    hub.stop()


@pytest.mark.parametrize("block", [block for block in blocks("sh") if "0.6B" in block or block not in PAGES[0]])
def test_commands(block, folder, environment):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout.strip() and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def output(tmp_path, monkeypatch):
    """A function that runs a program of the pages beside a model's folder -> what it prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-0.6B").symlink_to(ROOT / "demo")
    make_kernels(DENSE_STEPS)  # else the first program would say that it compiles them

    def run(program):
        (tmp_path / "program.py").write_text(program)
        done = run_forked(lambda _: runpy.run_path("program.py", run_name="__main__"))
        assert done.returncode == 0 and done.stdout.strip() and not done.stderr, done.stderr
        return done.stdout.decode()

    return run


@pytest.mark.parametrize("block", blocks("python"))
def test_programs_run_with_either_engine(block, output):
    other = re.sub(r"\bqwen3\b(?= import)", "qwen3_numba", block)
    assert other != block
    assert output(block) == output(other)


def test_the_lines_for_hands_say_what_the_page_shows():
    lines = doctest.DocTestParser().get_doctest("".join(blocks("pycon")), {}, "hands-on.md", None, 0)
    assert len(lines.examples) > 10 and doctest.DocTestRunner().run(lines).failed == 0


def test_the_lines_for_hands_can_be_typed(tmp_path):
    """Into Python's own prompt, one after the other: it shows as many values, without an error in between."""
    pexpect = pytest.importorskip("pexpect")
    text, shown = "".join(blocks("pycon")), tmp_path / "shown"
    (tmp_path / "startup.py").write_text(
        "import sys\n"
        f"out = open({str(shown)!r}, 'w', encoding='utf-8')\n"
        "sys.displayhook = lambda value: value is None or print(repr(value), file=out, flush=True)\n"
        "sys.excepthook = lambda kind, *_: print(kind, file=out, flush=True)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_BASIC_REPL"}
    environment |= {"TERM": "xterm", "PYTHONSTARTUP": str(tmp_path / "startup.py"), "PYTHON_COLORS": "0"}
    prompt = pexpect.spawn(sys.executable, cwd=ROOT, env=environment, encoding="utf-8", timeout=100,
                           dimensions=(50, 300))
    for sign, line in re.findall(r"^(>>>|\.\.\.) ?(.*)", text, re.MULTILINE):
        prompt.expect_exact(f"{sign} ")
        prompt.sendline(line.strip() if sys.version_info >= (3, 13) else line)  # 3.13 indents by itself
    prompt.sendline("exit()")
    prompt.expect(pexpect.EOF)
    wanted = [each.want for each in doctest.DocTestParser().get_examples(text) if each.want]
    assert shown.read_text("utf-8") == "".join(wanted)


def test_the_service_of_systemd_keeps_its_files_where_it_may_write():
    [unit] = re.findall(r"```ini\n(.*?)```", "".join(PAGES), re.DOTALL)
    unit = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    args = qwen3_server.make_parser().parse_args(unit["ExecStart"].split()[1:])
    assert args.model and not args.offline  # the first start downloads it
    assert unit["Environment"] == f"HOME=/var/lib/{unit['StateDirectory']}"


def test_the_program_with_a_tool_uses_its_result(output):
    program = next(block for block in blocks("python") if "get_weather" in block)
    said = output(program)
    assert "21" in said and "Lisbon" in said


@pytest.mark.parametrize("page, module", [("options.md", cli), ("batch.md", qwen3_batch), ("vectors.md", qwen3_embed),
                                          ("voice.md", talk)])
def test_tables_of_options_are_complete(page, module):
    text = (ROOT / "docs" / page).read_text()
    rows = " ".join(line for line in text.splitlines() if line.startswith("| `"))
    rows, there, named = (set(re.findall(r"--[a-z]+(?:-[a-z]+)*", each)) - {"--help", "--no-think", "--no-stop-loops"}
                          for each in (rows, module.make_parser().format_help(), text))
    assert rows <= there <= named


def test_table_of_chat_commands_is_complete():
    commands = {command for line in HELP for command in re.findall(r"/\w+", line)}
    assert commands <= set(re.findall(r"`(/\w+)", section("Chat")))


def test_figures_of_speed_are_those_of_the_files():
    """Pages have what bench/figures.py makes of bench/results, README no other; two rows are counted here by hand.

    README has the CPUs of the newest measurement, whose versions it names; the others are in bench/RESULTS.md.
    """
    done = subprocess.run([sys.executable, ROOT / "bench/figures.py"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    before, table, after = re.split("<!-- figures -->|<!-- end -->(?=\n\n!)", PAGES[0])
    assert not re.search(r"tokens/s|GB/s|\d times as (fast|slow)", before + after)
    machines = sorted((json.loads(file.read_text()) for file in (ROOT / "bench/results").glob("*.json")),
                      key=lambda m: m["date"])
    for m, page in ((machines[-1], table), (machines[0], (ROOT / "bench/RESULTS.md").read_text())):
        row = next(line for line in page.splitlines() if line.startswith(f"| {m['machine']}, version {m['version']} of"))
        found = m["speeds"]["decode at 4,096"]
        cells = [found.get("bf16, activations too", found["bf16"]), found["int8"], found["int4"]]
        assert " / ".join(f"{each['ours'] / max(speed for name, speed in each.items() if name != 'ours'):.2f}"
                          for each in cells) in row
    assert machines[0]["machine"] not in table


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "demo/README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)
