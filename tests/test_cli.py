"""qwen3_lib/app/cli.py: what a person types, what comes back on stdout and stderr, and the exit status."""
import errno
import json
import math
import os
import random
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import qwen3
import qwen3_batch
import qwen3_embed
import qwen3_inspect
import qwen3_numba
import qwen3_server
from configs import FORM, FRANCE, PARIS, ROOT
from fuzzing import any_number, any_text
from helpers import (assert_cli_refuses, assert_one_line, command, cut_off, edit_json, endless, finish, run_main, start)
from qwen3_lib.app import arguments as app_arguments
from qwen3_lib.app import cli, report
from qwen3_lib.generation.score import score
from qwen3_lib.io.errors import did_you_mean
from qwen3_lib.io.packed import save_quantized

SHORT = ("--model", ROOT / "demo", "--no-think")  # in this process: no import, no thought


def ask(capfd, *words, stdin=b"", err="") -> str:
    """The stdout of a command that must succeed, in this process, and have only `err` to say."""
    status, out, said = run_main(capfd, *SHORT, *words, stdin=stdin)
    assert (status, said) == (0, err)
    return out


def prompt_tokens(demo, text, **options) -> int:
    return len(qwen3.chat(demo, text, enable_thinking=False, **options).prompt_ids)


# ---- A process: what the system can do to it ends in a status and in one line ----------------------------------------

def test_main_job():
    done = subprocess.run(command(FRANCE), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")  # only a terminal is told which model answers
    assert re.fullmatch(r"<think>\n.+\n</think>\n\nThe capital of France is Paris\.\n", done.stdout)


def test_bad_input_is_one_line_and_status_1(tmp_path):
    status, out, err = finish(start("--model", tmp_path / "北京", "Hello", env={"PYTHONIOENCODING": "ascii"}))
    assert (status, out) == (1, b"")
    assert_one_line(err, "qwen3.py: ", "no such file or folder")


def test_ctrl_c_in_mid_answer(pristine):
    process = endless(pristine, stdin=subprocess.DEVNULL)
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process, 20)
    assert (status, err) == (130, "qwen3.py: interrupted\n")
    assert out.endswith(b"\n")  # the shell's prompt begins on a line of its own


def test_head_is_quiet(pristine):
    line = ["bash", "-c", '"$@" | head -c 20; exit ${PIPESTATUS[0]}', "bash",
            *command("--model", pristine, "--raw", "Hello")]
    done = subprocess.run(line, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 141 and len(done.stdout) == 20 and done.stderr == b""


@pytest.mark.parametrize("redirection, said", [
    (">&-", "stdout is closed"), pytest.param("> /dev/full", os.strerror(errno.ENOSPC), marks=pytest.mark.skipif(
        not os.path.exists("/dev/full"), reason="no /dev/full, the disk that is always full")),
    ("2>&-", None), ("<&-", None)])
def test_closed_and_full_streams(redirection, said):
    line = ["bash", "-c", f'"$@" {redirection}', "bash", *command("--no-think", "--stats", FRANCE)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    if said:
        assert done.returncode == 1 and done.stdout == ""
        assert_one_line(done.stderr, said)
    else:
        assert (done.returncode, done.stdout) == (0, PARIS)


def test_text_that_is_no_utf8(pristine):
    process = start(*map(os.fsencode, command("--model", pristine)), b"caf\xe9", stdin=subprocess.DEVNULL)
    status, out, err = finish(process)
    assert status == 1 and not out.strip()
    assert_one_line(err, "surrogate", r"'caf\udce9'")
    assert "<|im_start|>" not in err  # the template's, which the user never wrote


# ---- Where the prompt comes from -------------------------------------------------------------------------------------

def test_words_without_quotes_and_other_names_of_options(capfd, demo):
    told = json.loads(ask(capfd, "tell", "me", "--json", "a", "story", "--max_new_tokens", 3,
                          "--system-prompt=Be brief.", "--stream"))
    assert (told["completion_tokens"], told["finish_reason"]) == (3, "length")
    assert told["prompt_tokens"] == prompt_tokens(demo, "tell me a story", system="Be brief.")
    told = json.loads(ask(capfd, "--json", "-n1", "--", "--max_tokens", "is", "what?"))
    assert told["prompt_tokens"] == prompt_tokens(demo, "--max_tokens is what?")
    assert ask(capfd, "-s", "Be brief.", "-n", 3, "-p", FRANCE, err=cut_off(3)) == "The capital of\n"


@pytest.mark.parametrize("arguments, stdin, text", [
    ([], "A\n", "A"), (["-"], "A", "A"), (["-p", "-"], "A", "A"), (["Q"], "", "Q"), (["Q"], "A\n", "Q\n\nA"),
    (["--file", "F"], "", "B"), (["Q", "--file", "F"], "A", "Q\n\nA\n\nB"), (["Q", "--file", "-"], "A", "Q\n\nA"),
    (["--file", "F"], "\ufeffA\r\n", "A\n\nB")])
def test_the_prompt_is_joined(capfd, tmp_path, monkeypatch, demo, arguments, stdin, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "F").write_bytes(b"B\r\n")
    told = json.loads(ask(capfd, "--json", "-n", 1, *arguments, stdin=stdin.encode()))
    assert told["prompt_tokens"] == prompt_tokens(demo, text)


@pytest.mark.parametrize("arguments, stdin", [
    (["-"], b" \n"), ([], b""), (["", "--raw"], b""), (["-p", " \u3000"], b"\n")])
def test_an_empty_prompt(capfd, arguments, stdin):
    status, out, err = run_main(capfd, *SHORT[:2], *arguments, stdin=stdin)
    assert (status, out) == (1, "")
    assert_one_line(err, "the prompt is empty")


def test_on_a_terminal(capfd, monkeypatch):
    """Without a prompt the chat starts, but not where an answer was meant; a person hears which model answers."""
    monkeypatch.setattr(cli, "start_chat", lambda args: 7)
    assert run_main(capfd, stdin=None)[0] == 7
    for option in (["--json"], ["--raw"], ["--score"], ["--logprobs", "1"], ["--raw", "--keep-on-disk", "f"]):
        status, out, err = run_main(capfd, *option, stdin=None)
        assert (status, out) == (2, "")
        assert_one_line(err, "there is no prompt")
    for terminal, said in ((True, "No --model given"), (False, "")):
        monkeypatch.setattr(cli.sys.stderr, "isatty", lambda: terminal)
        status, out, err = run_main(capfd, "--no-think", FRANCE)
        assert (status, out) == (0, PARIS) and said in err and bool(said) == bool(err)
    assert "No --model" not in run_main(capfd, *SHORT, FRANCE)[2]


@pytest.mark.parametrize("name", ["./nosuch", "x.gguf", "C:\\models\\x", "~nobody", "models/"])
def test_a_path_that_does_not_exist(capfd, monkeypatch, name):
    assert_cli_refuses(capfd, ["--model", name, "Hello"], f" {name}: there is no such file or folder")
    monkeypatch.setenv("QWEN3_MODEL", name)
    assert_cli_refuses(capfd, ["Hello"], f"$QWEN3_MODEL: {name}: there is no such")


# ---- Going on with the last conversation -----------------------------------------------------------------------------

def test_continue(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("QWEN3_HISTORY")
    assert_cli_refuses(capfd, ["--continue", "and red?"], "no conversation to continue")
    assert ask(capfd, FRANCE) == PARIS
    said = "(going on with 2 messages; the last question: What is the capital of France?)\n"
    assert ask(capfd, "--continue", "and of Italy?", err=said) == "The capital of Italy is Rome.\n"
    said = "(going on with 4 messages; the last question: and of Italy?)\n"
    assert ask(capfd, "--continue", stdin=b"and of Spain?", err=said) == "The capital of Spain is Madrid.\n"
    run_main(capfd, "--raw", "-n", 1, "x")  # plain text is no conversation
    assert len(json.loads((tmp_path / "qwen3/last.json").read_text())) == 6


def test_an_answer_that_cannot_be_kept_is_an_answer(capfd, tmp_path, monkeypatch):
    (tmp_path / "qwen3").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("QWEN3_HISTORY")
    assert ask(capfd, FRANCE) == PARIS
    monkeypatch.setattr(cli.sys.stderr, "isatty", lambda: True)
    assert "--continue will not find this answer" in run_main(capfd, *SHORT, FRANCE)[2]


# ---- Answers in other forms ------------------------------------------------------------------------------------------

def test_json(capfd, demo):
    value = json.loads(run_main(capfd, "--json", "--logprobs", 2, FRANCE)[1])
    answer = qwen3.chat(demo, FRANCE, logprobs=2).finish()
    assert (value["text"], value["reasoning"]) == (PARIS.strip(), answer.answer.reasoning)
    assert (value["finish_reason"], value["tool_calls"]) == ("stop", [])
    assert (value["prompt_tokens"], value["completion_tokens"]) == (len(answer.prompt_ids), len(answer.token_ids))
    assert 0 < value["seconds_to_first_token"] <= value["seconds"]
    for entry, (token, logprob, top, text) in zip(value["logprobs"], answer.logprobs, strict=True):
        assert (entry["id"], entry["token"]) == (token, text) == (token, demo.tokenizer.decode([token]))
        assert [other["id"] for other in entry["top"]] == [other for other, _ in top]
        assert entry["logprob"] == pytest.approx(logprob, abs=1e-3)
    assert "".join(entry.text for entry in answer.logprobs) == answer.text
    hidden = json.loads(run_main(capfd, "--json", "--hide-thinking", FRANCE)[1])
    assert hidden["reasoning"] is None and hidden["text"] == value["text"]


def test_thoughts_stop_texts_and_notes(capfd):
    thought, end, text = run_main(capfd, FRANCE)[1].partition("</think>\n\n")
    assert "Paris" in thought and text == PARIS
    assert run_main(capfd, "--hide-thinking", FRANCE) == (0, PARIS, "")
    stopped = f"{thought}{end}The capital of France is \n"  # at the Paris of the answer
    assert run_main(capfd, "--stop", "Pari", "--stop", "zz", FRANCE) == (0, stopped, "")
    assert run_main(capfd, "--think-budget", 0, FRANCE)[1] == f"<think>\n</think>\n\n{PARIS}"
    status, out, err = run_main(capfd, "--hide-thinking", "-n", 5, FRANCE)
    assert (status, out.strip()) == (0, "") and re.fullmatch(r"The thought took 5 tokens, .* --max-tokens .*\n", err)
    status, out, err = run_main(capfd, *SHORT, "--logprobs", 1, FRANCE)
    assert out == PARIS and len(err.splitlines()) == 9 and all(re.match(r" *-\d+\.\d{4} '.*' \|", line)
                                                              for line in err.splitlines())
    status, out, err = run_main(capfd, *SHORT, "--stats", FRANCE)
    assert re.fullmatch(r"prompt: \d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s \| answer: \d+ tokens, "
                        r"[\d.]+ tokens/s, reading [\d.]+ GB/s of weights \| peak memory: [\d.]+ GB \| "
                        r"NumPy float32\n", err)


ROUNDED = "numba bf16, activations bf16"
SLOW = "NumPy float32 (at least twice as fast with numba: pip install numba)"


@pytest.mark.parametrize("options, large, numba, said", [
    ("", False, True, "NumPy float32"), ("", True, True, ROUNDED), ("--no-fast", True, True, "NumPy float32"),
    ("--fast", False, True, ROUNDED), ("--kv-dtype bf16", False, True, ROUNDED),
    ("--activations f32", False, True, "numba bf16"),
    ("", True, False, SLOW), ("", False, False, "NumPy float32"), ("--no-fast", True, False, SLOW)])
def test_large_models_take_the_fast_engine_where_numba_is(capfd, monkeypatch, options, large, numba, said):
    for room in (app_arguments, report):
        monkeypatch.setattr(room, "LARGE", 6_000_000 if large else 7_000_000)  # the bundled model has 6.9 million
    if not numba:
        monkeypatch.setitem(sys.modules, "qwen3_numba", None)
        monkeypatch.setattr(report, "find_spec", lambda name: None)
    status, out, err = run_main(capfd, *SHORT, "--stats", *options.split(), FRANCE)
    assert (status, out, err.rpartition(" | ")[2]) == (0, PARIS, said + "\n")


def test_engines_that_cannot_be_had(capfd, monkeypatch, tmp_path):
    for main, *words in ((cli.main, "Hi"), (qwen3_batch.main, "a.jsonl", "--out", "b.jsonl"), (qwen3_embed.main,),
                         (qwen3_server.main,)):
        status, out, err = run_main(capfd, *words, "--no-fast", "--quantize", "int8", "--model", "none", main=main)
        assert (status, out) == (2, "")
        assert_one_line(err, "--no-fast does not go with --quantize")
    save_quantized(qwen3_numba.load_model(ROOT / "demo", "int8"), tmp_path / "packed", "int8")
    packed = ["--model", tmp_path / "packed", "--no-think", FRANCE]
    assert run_main(capfd, *packed) == (0, PARIS, "")  # it can't be loaded otherwise, however small it is
    assert_cli_refuses(capfd, ["--no-fast", *packed], "only the fast engine")
    monkeypatch.setitem(sys.modules, "qwen3_numba", None)
    assert_cli_refuses(capfd, packed, "qwen3_numba")


def test_answers_that_fit(capfd, tmp_path):
    form, grammar = tmp_path / "form.json", tmp_path / "grammar"
    form.write_text(json.dumps(FORM))
    grammar.write_text('start: "The city " NAME\nNAME: /Rome|Paris/')
    status, out, err = run_main(capfd, *SHORT, "--json-schema", form, FRANCE)
    assert (status, json.loads(out)["capital"], err) == (0, "Paris", "")
    assert run_main(capfd, *SHORT, "--regex", "(Rome|Paris)!", FRANCE) == (0, "Paris!\n", "")
    assert run_main(capfd, *SHORT, "--grammar", grammar, FRANCE) == (0, "The city Paris\n", "")
    form.write_text("[3]")
    assert_cli_refuses(capfd, ["--json-schema", form, FRANCE], "form.json", "object")


def test_sampling_options_reach_the_sampler(capfd, demo):
    options = {"temperature": 1.5, "top_p": 0.99, "top_k": 100, "min_p": 0.001, "repetition_penalty": 1.1,
               "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 3, "lookup": 2}
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    expected = qwen3.chat(demo, FRANCE, enable_thinking=False, max_new_tokens=20, **options).finish()
    assert json.loads(ask(capfd, "--json", "-n", 20, *given, FRANCE))["text"] == expected.text
    assert ask(capfd, "--greedy", FRANCE) == PARIS


def test_scores(capfd, demo, tmp_path):
    lines = ["The capital of France is Paris.", "The capital of France is Rome.", "", "a", "法国的首都是巴黎。"]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    rows = [line.split("\t") for line in run_main(capfd, "--score", "--file", tmp_path / "lines")[1].splitlines()]
    for line, (logprob, tokens, perplexity, text) in zip(lines, rows, strict=True):
        expected = score(demo, demo.tokenizer.encode(line)) if line else np.empty(0)
        assert (text, int(tokens)) == (line, len(expected))
        assert float(logprob) == pytest.approx(expected.sum(), abs=1e-3)
        assert perplexity == "-" if not len(expected) else float(perplexity) == pytest.approx(
            math.exp(-expected.mean()), rel=1e-3)
    for arguments, stdin in (([lines[0]], b""), ([], lines[0].encode()), (["-"], lines[0].encode())):
        assert json.loads(run_main(capfd, "--score", "--json", *arguments, stdin=stdin)[1]) == {
            "text": lines[0], "logprob": float(rows[0][0]), "tokens": int(rows[0][1]), "perplexity": float(rows[0][2])}


# ---- What answers nothing --------------------------------------------------------------------------------------------

def test_download_prints_the_folder_of_the_model(capfd, monkeypatch):
    assert run_main(capfd, "--download", "--model", ROOT / "demo") == (0, f"{ROOT / 'demo'}\n", "")
    assert_cli_refuses(capfd, ["--download"], "--download needs --model")
    monkeypatch.setattr(cli, "resolve_model", lambda name, offline=False: f"the folder of {name}")
    assert run_main(capfd, "--download", "-m", "0.6B") == (0, "the folder of 0.6B\n", "")


def test_variables_of_the_template(capfd):
    option = "--chat-template-kwargs"
    assert run_main(capfd, option, '{"enable_thinking": false}', FRANCE) == (0, PARIS, "")
    for wrong, words in (("{", f"{option}: not valid JSON"), ('{"x": 1}', "chat_template_kwargs must be"),
                         ("5", "chat_template_kwargs must be")):
        assert_cli_refuses(capfd, [option, wrong, FRANCE], words)


def test_help_and_version(capfd):
    status, out, err = run_main(capfd, "--help")
    assert (status, err) == (0, "") and out.splitlines()[0].endswith(" [options] [prompt]")
    with pytest.raises(SystemExit, match="^0$"):
        qwen3.main(["--version"])
    assert capfd.readouterr() == (f"qwen3 {qwen3.__version__}\n", "")


# ---- Options that can't be meant -------------------------------------------------------------------------------------

@pytest.mark.parametrize("line", [
    "--raw --system x", "--raw --no-think", "--chat --json", "--score --system x", "--stats=1",
    "--greedy --temperature 0", "--regex a --grammar f", "--list --no-think", "--list", "--system x --system-file f",
    "--file - -p -", "--continue --messages f", "--compile", "--compile --list", "--save-quantized d --quantize int8",
    "--rope-factor 4", "--rope-scaling yarn", "-p one"])
def test_options_that_do_not_go_together(capfd, line):
    status, out, err = run_main(capfd, *line.split(), "Hello")
    assert (status, out) == (2, "")
    assert_one_line(err, "(--help lists the options)")


@pytest.mark.parametrize("line, words", [
    ("--top-k 2.5", "top-k 2.5"), ("--temperature=-inf", "temperature -inf"), ("--max-tokens 0", "max 0"),
    (f"--seed {'9' * 5000}", "seed"), ("--think-budget -1", "--think-budget"),
    ("--no-such-option", "no option --no-such-option"), ("--temprature=1", "did you mean --temperature?"),
    ("--temp 1", "did you mean --temperature?"), ("--ctx-size 4096", "the context is the model's, and --rope-factor"),
    ("--port 80", "qwen3_server.py serves"),
    ("--rope-scaling yarn --rope-factor nan", "--rope-factor"), ("--quantize int7", "int7 int8 int4")])
def test_values_are_checked_before_the_model_is_loaded(capfd, monkeypatch, line, words):
    monkeypatch.setattr(qwen3, "load_weights", lambda *_: pytest.fail("a model would have been loaded for nothing"))
    assert_cli_refuses(capfd, [*line.split(), "Hello"], *(words.split() if "?" not in words else [words]))


@pytest.mark.parametrize("line, words", [
    ("--api-key sk-123", "--api-key-file FILE, or in $QWEN3_API_KEY"), ("--api-key=sk-123", "--api-key-file FILE"),
    ("--api_key sk-123", "--api-key-file FILE"), ("--api-key-fil sk-123", "did you mean --api-key-file?"),
    ("--ctx-size 4096", "it is called --context"), ("-np 4", "it is called --slots")])
def test_options_of_other_servers_are_hinted_at_and_a_key_is_never_printed(capfd, line, words):
    with pytest.raises(SystemExit) as caught:
        qwen3_server.main(line.split())
    out, err = capfd.readouterr()
    assert caught.value.code == 2 and "123" not in out + err
    assert_one_line(err, "there is no option", words)


def test_a_guess_is_near():
    known = ["--part", "--context", "--timestamps", "--out"]
    for given, guess in (("--timestamp", "--timestamps"), ("--output", "--out"), ("--prompt", None),
                         ("--frames", None)):
        assert did_you_mean(given, known) == (f"; did you mean {guess}?" if guess else "")


def test_interrupt_and_too_little_memory_while_loading(capfd, monkeypatch):
    for error, status, said in ((KeyboardInterrupt, 130, "interrupted"), (MemoryError, 1, "not enough memory")):
        def fail(*_, **__):
            raise error
        monkeypatch.setattr(cli, "load_main", fail)
        found = run_main(capfd, "Hello")
        assert found[:2] == (status, "")
        assert_one_line(found[2], said)


def test_a_message_is_harmless_and_short_whatever_a_file_holds(folder, capfd):
    for value in ("\x1b[2J\u202e\r\n", "Zz" * 50_000):
        edit_json(folder / "config.json", {"hidden_act": value})
        status, out, err = run_main(capfd, "--model", folder, "Hello")
        assert (status, out) == (1, "") and err[:-1].isprintable() and len(err) < 2200
        assert_one_line(err, "hidden_act")


# ---- All commands with random options: they work, or one line says why not -------------------------------------------

ELSEWHERE = {"--help", "--compile", "--ways", "--open", "--offline", "--model", "--api-key-file"}
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
