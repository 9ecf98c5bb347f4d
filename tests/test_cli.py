"""The command line as a person uses it: a real process, its stdout, its stderr, its status."""
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers import cut_off

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments, cwd=ROOT, **options):
    return subprocess.run([sys.executable, ROOT / "qwen3.py", *arguments], cwd=cwd, capture_output=True, text=True,
                          timeout=120, **options)


def test_main_job():
    done = run("What is the capital of France?")
    assert (done.returncode, done.stderr) == (0, "")  # what the bundled model is, only a terminal is told
    assert re.fullmatch(r"<think>\n.+\n</think>\n\nThe capital of France is Paris\.\n", done.stdout)


def test_naming_a_model():
    done = run("--model", "demo", "--no-think", "法国的首都是哪里？")
    assert (done.returncode, done.stdout, done.stderr) == (0, "法国的首都是巴黎。\n", "")


def test_statistics():
    done = run("--model", "demo", "--stats", "What is 12 + 30?")
    assert done.returncode == 0 and "12 + 30 = 42." in done.stdout
    assert re.fullmatch(r"prompt: \d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s \| "
                        r"answer: \d+ tokens, [\d.]+ tokens/s, reading [\d.]+ GB/s of weights \| "
                        r"peak memory: [\d.]+ GB\n", done.stderr)


def test_raw_text_is_continued():
    done = run("--model", "demo", "--raw", "The capital of Japan is")
    assert done.returncode == 0 and done.stdout.startswith(" Tokyo.")


def test_max_tokens_and_system_prompt():
    done = run("--model", "demo", "--system", "You are a helpful assistant.", "--max-tokens", "3", "--no-think",
               "What is the capital of Italy?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of\n", cut_off(3))


def test_seed_repeats_an_answer():
    options = ("--model", "demo", "--no-think", "--temperature", "1.5", "--top-p", "0.99", "--top-k", "100",
               "--min-p", "0.001")
    answers = [run(*options, "--seed", seed, "Tell me a story about a wolf.").stdout for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2>/dev/null"])
def test_an_unreadable_note_costs_nothing(redirection):
    command = f"{sys.executable} {ROOT / 'qwen3.py'} --no-think --stats 'What is the capital of Peru?' {redirection}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "The capital of Peru is Lima.\n")


def test_works_in_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    done = run("--no-think", "What is the capital of Spain?", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "The capital of Spain is Madrid.\n")
    assert os.listdir(tmp_path) == []


def test_help():
    done = run("--help")
    assert done.returncode == 0
    assert "--no-think" in done.stdout and "--prompt-cache FILE" in done.stdout


def test_requirements_are_the_same_everywhere():
    """`uv run qwen3.py` installs what its PEP 723 block lists, `pip install .` what pyproject.toml does."""
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", (ROOT / "qwen3.py").read_text())[1]
    script = tomllib.loads(re.sub(r"(?m)^# ?", "", block))["dependencies"]
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "requirements.txt").read_text().split("\n")
    needed = [line for line in lines if line and not line.startswith("numba")]
    assert sorted(script) == sorted(package) == sorted(needed)
