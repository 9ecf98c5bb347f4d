"""The project installed, copied, optimised: it works from wherever it lies."""
import email
import os
import re
import shutil
import subprocess
import sys

import pytest

import qwen3
import qwen3_numba
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


def copy_of_the_project(target):
    """Copies the project's own files, as git knows them."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = names.stdout.splitlines() if names.returncode == 0 else [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    for name in files:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the project is installed, from a copy, as pip installs it."""
    target, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    copy_of_the_project(source)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--target", target, source], check=True, timeout=300)
    return target


def surroundings(*paths):
    """An environment in which Python finds these folders first."""
    clean = {name: value for name, value in os.environ.items() if name != "QWEN3_MODEL"}
    return clean | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "MYPYPATH": ""}


def test_installed_command(installed, tmp_path):
    for command in ([installed / "bin/qwen3"], [sys.executable, "-m", "qwen3"], [sys.executable, "-m", "qwen3_numba"],
                    [installed / "bin/qwen3-fast"]):
        done = subprocess.run([*command, "--no-think", FRANCE], cwd=tmp_path, capture_output=True, text=True,
                              timeout=300, env=surroundings(installed))
        assert (done.returncode, done.stdout, done.stderr) == (0, PARIS, ""), command


def test_installed_version(installed, tmp_path):
    """Without a commit: the repository around site-packages, if there is one, is somebody else's."""
    subprocess.run(["git", "init", "-q", installed], check=True)
    for command in ("qwen3", "qwen3-fast"):
        done = subprocess.run([installed / "bin" / command, "--version"], cwd=tmp_path, capture_output=True, text=True,
                              timeout=60, env=surroundings(installed))
        assert (done.returncode, done.stdout, done.stderr) == (0, f"qwen3 {qwen3.__version__}\n", "")


@pytest.mark.parametrize("command", ["bin/qwen3-fast", "-m qwen3_numba", "qwen3_numba.py"])
def test_the_fast_engine_without_numba(installed, tmp_path, command):
    (tmp_path / "numba.py").write_text("raise ImportError('not here')")  # comes before the real one
    words = command.split() if command.startswith("-m") else [installed / command]
    done = subprocess.run([sys.executable, *words, "Hello"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env=surroundings(tmp_path, installed))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "needs numba" in done.stderr and "pip install" in done.stderr
    assert done.stderr.startswith(command.split("/")[-1].replace("-m qwen3_numba", "qwen3_numba.py") + ": ")


def test_licence(installed):
    [about] = installed.glob("qwen3-*.dist-info")
    text = (about / "licenses" / "LICENSE").read_text()
    assert text == (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and "the maintainers" in text
    metadata = email.message_from_string((about / "METADATA").read_text())
    files = ["LICENSE", "qwen3_page/uplot/LICENSE"]
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT" and metadata.get_all("License-File") == files
    for name in files:
        assert (about / "licenses" / name).read_bytes() == (ROOT / name).read_bytes()


def names_in(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


def test_the_installed_tree_has_the_shape_of_the_checkout(installed):
    """No file is renamed, every module and room is marked as typed, and nothing is installed that only we need."""
    modules = {file.stem for file in installed.glob("*.py")}
    rooms = {path.name for path in ROOT.glob("qwen3_*/") if (path / "__init__.py").exists()}
    assert modules == {file.stem for file in ROOT.glob("*.py")}
    for name in modules | rooms:
        assert (installed / name / "py.typed").is_file(), name
    for room in rooms:
        assert names_in(installed / room) == names_in(ROOT / room)
    assert names_in(installed / "qwen3_page/uplot") == names_in(ROOT / "qwen3_page/uplot")
    assert {name for name in names_in(installed) if "." not in name} - {"bin"} == modules | rooms


PROGRAM = """\
import qwen3
import qwen3_numba
from qwen3 import BUNDLED, Completion, InputError, KVCache, chat, generate, load_model, score
from qwen3_io.errors import InputError as SameError
from tokenizer_utils import Tokenizer

model: qwen3.Model = load_model(BUNDLED, offline=True)
reply: Completion = chat(model, "Hello", temperature=0.5, max_new_tokens=3, stop=["x"], cache=KVCache(model.config))
content: str = reply.answer.content
token_ids: list[int] = list(generate(model, [1], top_k=None, top_p=0.5))
likelihood: float = score(model, token_ids).sum()
fast = qwen3_numba.load_model("x", quantize="int8", threads=2)
text: str = qwen3_numba.chat(fast, [{"role": "user", "content": "x"}], seed=1).finish().text
tokenizer: Tokenizer = fast.tokenizer
version: str = qwen3.__version__
try:
    fast.tokenizer.encode("x")
except InputError as error:
    same: SameError = error
"""
MISTAKES = {  # a line -> what the type checker says of it
    "chat(model, 'Hello', temprature=1)": r'Unexpected keyword argument "temprature" .* "temperature"\?',
    "generate(model, [1], temprature=1)": r'Unexpected keyword argument "temprature" .* "temperature"\?',
    "qwen3_numba.chat(fast, 'x', max_tokens=1)": 'Unexpected keyword argument "max_tokens"',
    "generate(model, [1], top_p='all')": '"top_p" .* incompatible type "str"',
    "chat(model, 'Hello', stop=5)": '"stop" .* incompatible type "int"',
    "load_model(1.5)": '"load_model" has incompatible type "float"',
    "qwen3_numba.load_model('x', quantise='int8')": 'Unexpected keyword argument "quantise"',
    "number: int = reply.answer.content": 'Incompatible types in assignment',
}


def test_types_of_the_installed_package(installed, tmp_path):
    """A client's strict type checker accepts what is right, and finds each mistake."""
    (tmp_path / "program.py").write_text(PROGRAM + "\n".join(MISTAKES) + "\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--hide-error-context", "--cache-dir",
                           tmp_path / "cache", "program.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=300, env=surroundings(installed))
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(MISTAKES), done.stdout
    for error, (line, words) in zip(errors, MISTAKES.items()):
        assert re.search(words, error), (line, error)


def test_the_program_finds_the_same_mistakes(demo):
    for call in (qwen3.chat, qwen3.generate, qwen3_numba.chat, qwen3_numba.generate):
        prompt = "Hello" if "chat" in call.__name__ else [1]
        with pytest.raises(qwen3.InputError, match="temprature.*did you mean temperature"):
            call(demo, prompt, temprature=1)
    with pytest.raises(qwen3.InputError, match="max_tokens"):
        qwen3.chat(demo, "Hello", max_tokens=1)


def test_our_own_code_passes_the_type_checker(tmp_path):
    done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", tmp_path], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stdout
