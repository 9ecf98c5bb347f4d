"""All commands with random options and values: they work, or one line on stderr says why not."""
import random
import re

import pytest

import qwen3_batch
import qwen3_embed
import qwen3_inspect
import qwen3_server
from configs import FRANCE
from fuzzing import any_number, any_text
from helpers import assert_one_line, run_main
from qwen3_lib.app import cli

ELSEWHERE = {"--help", "--compile", "--open", "--offline", "--model", "--api-key-file"}
COMMANDS = {cli: [FRANCE, "-n2"], qwen3_batch: ["in.txt", "--out", "out", "-n2"], qwen3_inspect: [FRANCE, "-n2"],
            qwen3_embed: [], qwen3_server: ["--api-key-file", "nowhere"]}  # with a key it would serve without end
VALUES = {"FILE": ["-", "in.txt", "nowhere", "."], "N": [0, 1, 2], "X": [0, 0.5, 1, 1.5], "SIZE": ["50MB", "1kB"]}


def any_options(rng, module):
    """Random options of a command, as its help lists them, most with a value of their kind."""
    listed = dict(re.findall(r"(--[a-z][a-z-]+)(?: ([A-Z]+|{.+?}))?", module.make_parser().format_help()))
    for name in rng.sample(sorted(listed.keys() - ELSEWHERE), rng.choice([0, 1, 1, 2, 3])):
        fitting = VALUES.get(listed[name]) or listed[name].strip("{}").split(",")
        value = rng.choice(fitting if rng.random() < 0.7 else [any_text(rng), "9" * 5000, str(any_number(rng))])
        yield from [f"{name}={value}"] if rng.random() < 0.5 else [name, str(value)] if listed[name] else [name]


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_any_command_line(module, capfd, tmp_path, monkeypatch, demo):
    monkeypatch.chdir(tmp_path)
    for seed in range(3 if module is qwen3_inspect else 25):
        (tmp_path / "in.txt").write_text(FRANCE)
        words = [*COMMANDS[module], *any_options(random.Random(f"{module.__name__} {seed}"), module)]
        status, _, err = run_main(capfd, *words, "--offline", "--model", demo.path, main=module.main)
        assert status in (0, 1, 2) and "Traceback" not in err, (words, status, err)
        if status:
            assert_one_line(err)
