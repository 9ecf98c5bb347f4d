"""The project installed, copied, optimised: it works from wherever it lies."""
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

from configs import FRANCE, PARIS, ROOT
from helpers import assert_one_line, hide

COMMANDS = ("qwen3", "qwen3-fast", "qwen3-asr", "qwen3-tts", "qwen3-embed", "qwen3-batch", "qwen3-inspect",
            "qwen3-server")


def copy_of_the_project(target):
    """Copies what the Dockerfile of docs/server.md copies."""
    lines = re.findall(r"^COPY (.*) /src/(.*)", (ROOT / "docs/server.md").read_text(), re.MULTILINE)
    for file in (file for patterns, _ in lines for pattern in patterns.split() for file in ROOT.glob(pattern)):
        if file.is_dir():
            shutil.copytree(file, target / file.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(file, target)


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
    return clean | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def run(folder, *command, path) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=250,
                          stdin=subprocess.DEVNULL, env=surroundings(*path))


@pytest.mark.parametrize("command", ["bin/qwen3", "-m qwen3_numba"])
def test_installed_commands_answer(installed, tmp_path, command):
    words = [sys.executable, *command.split()] if command.startswith("-m") else [installed / command]
    done = run(tmp_path, *words, "--no-think", FRANCE, path=[installed])
    assert (done.returncode, done.stdout) == (0, PARIS), done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_installed_commands_name_themselves(installed, tmp_path, command):
    refused = run(tmp_path, installed / "bin" / command, "--nonsense", path=[installed])
    assert refused.returncode == 2 and refused.stderr.startswith(f"{command}: ")


@pytest.mark.parametrize("command, module", [("qwen3.py", "numpy"), *(
    (each, "tokenizers") for each in (*COMMANDS, "qwen3_batch.py", "qwen3_server.py"))])
def test_ctrl_c_while_modules_are_imported_is_one_line(installed, tmp_path, command, module):
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")  # comes before the real one
    words = [sys.executable, installed / command] if command.endswith(".py") else [installed / "bin" / command]
    done = run(tmp_path, *words, "Hello", path=[tmp_path, installed])
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", f"{command}: interrupted")


@pytest.fixture(params=["numba", "llvmlite", "numba llvmlite"])
def without(request, tmp_path):
    """A folder that hides these modules when it comes first in Python's path."""
    hide(tmp_path, *request.param.split())
    return tmp_path


@pytest.mark.parametrize("command", ["bin/qwen3-fast", "bin/qwen3 --quantize int8", "bin/qwen3 --compile",
                                     "-m qwen3_numba", "-c from qwen3_numba import load_model"])
def test_the_fast_engine_without_numba(installed, without, command):
    program, *options = command.split(maxsplit=1 if command.startswith("-c") else -1)
    words = [sys.executable, program] if program.startswith("-") else [installed / program]
    done = run(without, *words, *options, *["Hello"] * ("compile" not in command), path=[without, installed])
    assert (done.returncode, done.stdout) == (1, "")
    errors = done.stderr
    if program == "-c":  # one ImportError, not one during the handling of another
        assert errors.count("Traceback") == 1
        errors = errors.splitlines()[-1]
    assert_one_line(errors, "needs numba: pip install numba")
    assert errors.startswith(("qwen3-fast: ", "qwen3: ", "qwen3_numba.py: ", "ImportError: "))


def test_licence(installed):
    [about] = installed.glob("qwen3-*.dist-info")
    metadata = email.message_from_string((about / "METADATA").read_text())
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "LICENSE", *(ROOT / "qwen3_lib").rglob("LICENSE"))]
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT" and len(files) == 6
    assert {*metadata.get_all("License-File")} == {*files}
    for name in files:
        assert (about / "licenses" / name).read_bytes() == (ROOT / name).read_bytes()


def names_in(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


def test_the_installed_tree_has_the_shape_of_the_checkout(installed):
    """The modules, qwen3_lib/, and in it the bundled model; nothing else."""
    def tree(folder, *patterns) -> set[str]:
        paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        return {str(path.relative_to(folder)) for path in paths if "__pycache__" not in path.parts}

    demo = {f"qwen3_lib/{name}" for name in tree(ROOT, "demo/*")}
    assert tree(installed, "*.*", "qwen3_lib/**/*") == tree(ROOT, "*.py", "qwen3_lib/**/*") | demo
    assert names_in(installed / "bin") == {*COMMANDS}
    assert {name for name in names_in(installed) if "." not in name} == {"bin", "qwen3_lib"}


PROGRAM = """\
import qwen3
import qwen3_asr
import qwen3_numba
import qwen3_tts
from qwen3 import BUNDLED, InputError, KVCache, chat, generate, load_model
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.score import score
from qwen3_lib.io.errors import InputError as SameError
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
    "chat(model, 'Hello', temprature=0)": 'Unexpected keyword argument "temprature"',
    "chat(model, 'Hello', stop=1)": '"stop" .* incompatible type "int"',
    "Completion(model, [1], temprature=0)": 'Unexpected keyword argument "temprature"',
    "qwen3_asr.transcribe(model, 'x.wav', temprature=0)": 'Unexpected keyword argument "temprature"',
    "qwen3_tts.speak(model, 'Hello', temprature=0)": 'Unexpected keyword argument "temprature"',
    "generate(model, [1], temprature=0)": 'Unexpected keyword argument "temprature"',
    "load_model('x', quantize='int8')": '"quantize" .* incompatible type "str"; expected "Never"',
    "generate(model, [1], top_p='all')": '"top_p" .* incompatible type "str"',
    "load_model(1.5)": '"load_model" has incompatible type "float"',
    "chat('demo', 'Hello')": 'Argument 1 .* expected "Model"',
    "qwen3_numba.load_model('x', quantise='int8')": 'Unexpected keyword argument "quantise"',
    "number: int = reply.answer.content": 'Incompatible types in assignment',
}


def test_types(installed, tmp_path):
    """A client's strict type checker accepts what is right, and finds each mistake, where the project is installed."""
    (tmp_path / "program.py").write_text(PROGRAM + "\n".join(MISTAKES) + "\n")
    venv.create(tmp_path / "venv", with_pip=False)
    [packages] = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "these.pth").write_text(f"{installed}\n{sysconfig.get_path('purelib')}\n")
    flag = "--follow-untyped-imports"
    assert f"`mypy {flag}`" in (ROOT / "docs/embedding.md").read_text()
    done = run(tmp_path, sys.executable, "-m", "mypy", "--strict", flag, "--hide-error-context", "--python-executable",
               tmp_path / "venv/bin/python", "program.py", path=[])
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(MISTAKES), done.stdout
    for error, (line, words) in zip(errors, MISTAKES.items()):
        assert error.startswith("program.py:") and re.search(words, error), (line, error)
