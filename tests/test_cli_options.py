"""qwen3_app/cli.py, the options: each that can't be meant is refused in one line, before a model is loaded."""
import sys

import pytest

import qwen3
from helpers import HUGE_INT, assert_cli_refuses, assert_one_line, cut_off, edit_json, refusal, run_fast, run_main
from qwen3_app import cli
from qwen3_io.checkpoint import stretched

BAD_OPTIONS = [
    (["--top-k", "-3"], ["top", "-3"]), (["--top-k", "2.5"], ["top-k", "2.5"]), (["--top-k", "x"], ["top-k", "x"]),
    (["--top-k", str(HUGE_INT)], []), (["--temperature", "nan"], ["temperature", "nan"]),
    (["--temperature", "-1"], ["temperature", "-1"]), (["--temperature", "inf"], ["temperature", "inf"]),
    (["--temperature=-inf"], ["temperature", "-inf"]), (["--temperature", "abc"], ["temperature", "abc"]),
    (["--temperature", ""], ["temperature"]), (["--temperature", "1e999"], ["temperature"]),
    (["--temperature"], ["temperature"]), (["--top-p", "0"], ["top", "0"]), (["--top-p", "1.5"], ["top", "1.5"]),
    (["--top-p", "nan"], ["top", "nan"]), (["--min-p", "2"], ["min", "2"]), (["--min-p", "-1"], ["min", "-1"]),
    (["--max-tokens", "0"], ["max", "0"]), (["--max-tokens", "-1"], ["max", "-1"]),
    (["--max-tokens", "1.5"], ["max", "1.5"]), (["--seed", "-1"], ["seed", "-1"]), (["--seed", "x"], ["seed", "x"]),
    (["--seed", "9" * 5000], ["seed"]), (["--repetition-penalty", "0"], ["repetition"]),
    (["--presence-penalty", "inf"], ["presence"]), (["--frequency-penalty", "nan"], ["frequency"]),
    (["--no-such-option"], ["no option --no-such-option"]), (["--temprature=1"], ["did you mean --temperature?"]),
    (["--quantize", "int8"], ["--quantize", "qwen3_numba.py"]), (["--no-such\noption"], ["--no-such"]),
    (["more", "words"], ["words"]), (["--raw", "--system", "Be brief."], ["--raw", "--system"]),
    (["--raw", "--think"], ["--raw", "--think"]), (["--raw", "--no-think"], ["--raw", "--no-think"]),
    (["--stats=1"], ["--stats"]),
]


@pytest.mark.parametrize("options, words", BAD_OPTIONS, ids=lambda value: " ".join(value)[:40])
def test_options(pristine, capfd, options, words):
    if options == ["--top-k", str(HUGE_INT)]:  # larger than any vocabulary, so all tokens stay: as good as refusing it
        status, _, err = run_main(capfd, "--model", pristine, "--max-tokens", 2, *options, "--", "Hello")
        assert (status, err) == (0, cut_off(2)) or (status == 1 and assert_one_line(err, "top") is None)
    elif options == ["--temperature"]:
        assert_cli_refuses(capfd, ["--model", pristine, "Hello", *options], *words)
    else:
        assert_cli_refuses(capfd, ["--model", pristine, *options, "--", "Hello"], *words)


@pytest.mark.parametrize("options", [["--rope-factor", "4"], ["--rope-scaling", "yarn"],
                                     *(["--rope-scaling", "yarn", "--rope-factor", x] for x in ("0", "nan", "1e300"))])
def test_rope_options_that_make_no_sense(pristine, capfd, options):
    assert_cli_refuses(capfd, ["--model", pristine, *options, "Hello"], "--rope-factor")


def test_a_context_that_is_stretched_already(folder, capfd):
    edit_json(folder / "config.json", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert_cli_refuses(capfd, ["--model", folder, "--rope-scaling", "yarn", "--rope-factor", "4", "Hello"],
                       "stretch the context already, 2 times", "leave out --rope-scaling")


def test_the_trained_length_of_qwen3():
    """Of 40,960 positions, 32,768 are trained: with factor 4, 131,072 as the authors say."""
    assert stretched(4, 40960)["original_max_position_embeddings"] == 32768
    assert stretched(4, 262144)["original_max_position_embeddings"] == 262144


@pytest.mark.parametrize("options", [["--max-tokens", "0"], ["--seed", "-1"], ["--top-k", "-3"],
                                     ["--temperature", "nan"]], ids=" ".join)
def test_options_are_checked_before_the_model_is_loaded(pristine, capfd, monkeypatch, options):
    def load(*_):
        pytest.fail("a large model would have been loaded for nothing")
    monkeypatch.setattr(qwen3, "load_weights", load)
    monkeypatch.setattr(cli, "load_model", load)
    assert_cli_refuses(capfd, ["--model", pristine, *options, "Hello"], options[1])


def test_no_prompt(pristine, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert_cli_refuses(capfd, ["--model", pristine], "prompt")


@pytest.mark.parametrize("raw", [[], ["--raw"]])
@pytest.mark.parametrize("prompt", ["", " ", "\n\t \u3000"])
def test_empty_prompt(pristine, capfd, prompt, raw):
    assert_cli_refuses(capfd, ["--model", pristine, *raw, prompt], "prompt", "empty")


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_prompt_longer_than_the_context_on_the_command_line(folder, capfd, raw):
    edit_json(folder / "config.json", {"max_position_embeddings": 8})
    assert_cli_refuses(capfd, ["--model", folder, *raw, "one two three four five six seven eight nine ten"], "prompt",
                       "8")


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a warning would be one more line on stderr
@pytest.mark.parametrize("options", [
    ["--temperature", "1e-50"], ["--temperature", "1e-40"], ["--temperature", "1e-38"], ["--temperature", "1e-30"],
    ["--temperature", "1e39"], ["--temperature", "1e300"], ["--temperature", "1e-400"], ["--top-p", "1e-50"],
    ["--top-p", "1e-300"], ["--top-p", "0.9999999999999999"], ["--min-p", "1e-320"], ["--min-p", "1"],
    ["--repetition-penalty", "1e-50"], ["--repetition-penalty", "1e300"], ["--presence-penalty", "1e300"],
    ["--presence-penalty=-1e300"], ["--frequency-penalty", "1e300"], ["--frequency-penalty=-3e38"], ["--top-k", "1"],
    ["--top-k", "1000000000000"], ["--max-tokens", "1" + "0" * 30, "--temperature", "1e-45"],
    ["--seed", "1" + "0" * 300],
], ids=" ".join)
def test_extreme_options(folder, capfd, options):
    """Within the allowed range, but at its end: an answer, or one line that says why not."""
    edit_json(folder / "config.json", {"max_position_embeddings": 64})
    status, out, err = run_main(capfd, "--model", folder, "--raw", "--seed", 1, "--max-tokens", 20, *options, "Hello")
    if status:
        assert status == 1
        assert_one_line(err)
    else:
        assert err in ("", cut_off(20)) and out.endswith("\n")


@pytest.mark.parametrize("options", [
    ["--raw", "--system", "x"], ["--raw", "--no-think"], ["--chat", "--json"], ["--score", "--stop", "x"],
    ["--score", "--top-k", "0"], ["--greedy", "--temperature", "0"], ["--list", "--no-think"],
    ["--system", "", "--system-file", "f"], ["--file", "-", "-"], ["--no-such-option"], ["--top-k", "many"]])
def test_options_that_do_not_go_together(options):
    assert "--help" in refusal(*options, "Hello", status=2) or "stdin" in refusal(*options, "Hello", status=2)


@pytest.mark.parametrize("job", [["--compile"], ["--save-quantized", "nowhere", "--quantize", "int8"]], ids=" ".join)
def test_what_answers_nothing_refuses_a_prompt(job):
    for more in (["Hello"], ["--stats"], ["--list"]):
        done = run_fast(*job, *more)
        assert done.returncode == 2 and not done.stdout
        assert_one_line(done.stderr, "does not go with")


def test_interrupt_while_loading(pristine, capfd, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(qwen3, "load_config", interrupt)
    status, out, err = run_main(capfd, "--model", pristine, "Hello")
    assert status == 130 and not out.strip()
    assert_one_line(err)


def test_too_little_memory(pristine, capfd, monkeypatch):
    def fail(*_):
        raise MemoryError
    monkeypatch.setattr(qwen3, "load_config", fail)
    assert_cli_refuses(capfd, ["--model", pristine, "Hello"], "memory")
