"""How the command line begins: without arguments, short options, the version, the list of models, Ctrl-C."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pexpect
import pytest

import qwen3
from configs import BASE, FRANCE, PARIS, ROOT
from helpers import cut_off, edit_json, output, refusal, run, run_fast
from make_random_model import make_random_model
from qwen3_app import start
from qwen3_io.writing import write_safetensors
from test_package import copy_of_the_project

FOX = "Tell me a story about a fox."


# ----------------------------------------------------------------------------------------------------------------------
# The answer that a newcomer gets
# ----------------------------------------------------------------------------------------------------------------------

def test_a_cut_answer_says_so():
    done = run("--max-tokens", "5", "--hide-thinking", FOX)
    assert done.returncode == 0 and done.stdout.strip() == ""
    assert re.fullmatch(r"The thought took 5 tokens, .* --max-tokens .*\n", done.stderr)
    for hidden in ([], ["--hide-thinking"]):
        assert run("--max-tokens", "20", *hidden, FOX).stderr == cut_off(20)
    assert run("--no-think", "--max-tokens", "3", FRANCE).stderr == cut_off(3)
    assert run("--raw", "--max-tokens", "3", "The capital of").stderr == cut_off(3)
    assert json.loads(output("--json", "--max-tokens", "5", FOX))["finish_reason"] == "length"  # said there, not twice


def test_stop_strings_apply_to_the_answer():
    thought, end, story = output(FOX).partition("</think>\n\n")
    assert "." in thought and "." in story
    assert output("--stop", ".", "--stop", "!", FOX) == thought + end + re.split("[.!]", story)[0] + "\n"


def test_json_without_the_thought():
    whole, hidden = (json.loads(output("--json", *option, FRANCE)) for option in ([], ["--hide-thinking"]))
    assert whole["reasoning"] and hidden["reasoning"] is None
    assert hidden.keys() == whole.keys() and hidden["text"] == whole["text"] == PARIS.strip()


def test_short_options(tmp_path):
    short = json.loads(output("-m", ROOT / "demo", "-s", "Be brief.", "-n", "7", "-p", FOX, "--json"))
    long = json.loads(output("--system", "Be brief.", "--max-tokens", "7", "--prompt", FOX, "--json"))
    assert short["completion_tokens"] == 7 and short["text"] == long["text"]
    assert short["prompt_tokens"] == long["prompt_tokens"] > json.loads(output("--json", "-n1", FOX))["prompt_tokens"]
    assert output("--no-think", "-p", "-", stdin=FRANCE) == PARIS
    assert "two prompts" in refusal("-p", "one", "two", status=2)
    assert "empty" in refusal("-p", " ")


# ----------------------------------------------------------------------------------------------------------------------
# On a terminal
# ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def terminal(tmp_path):
    """A function that starts a shell command on a terminal of its own."""
    started = []

    def begin(command):
        environment = {name: value for name, value in os.environ.items() if name != "QWEN3_MODEL"}
        process = pexpect.spawn("/bin/sh", ["-c", command], timeout=60, encoding="utf-8", dimensions=(40, 200),
                                cwd=str(tmp_path), env=environment | {
                                    "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm"})
        started.append(process)
        return process

    yield begin
    for process in started:
        process.close(force=True)


def ended(process) -> str:
    """The rest of what a process shows, which must have succeeded."""
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0
    return process.before


PYTHON, SCRIPT = sys.executable, ROOT / "qwen3.py"


def test_alone_on_a_terminal_it_starts_the_chat(terminal):
    chat = terminal(f"{PYTHON} {SCRIPT}")
    chat.expect("/help")
    chat.expect("> ")
    chat.sendeof()
    ended(chat)


def test_alone_in_a_pipe_it_reads_the_prompt():
    done = subprocess.run([PYTHON, SCRIPT, "--no-think"], input=FRANCE, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, PARIS, "")


@pytest.mark.parametrize("option", ["--json", "--raw", "--score", "--logprobs 1", "--prompt-cache f"])
def test_no_chat_where_it_was_not_meant(terminal, option):
    process = terminal(f"{PYTHON} {SCRIPT} {option}; test $? = 2")
    assert "there is no prompt" in ended(process)


def test_only_a_terminal_is_told_that_the_bundled_model_answers(terminal):
    seen = ended(terminal(f"{PYTHON} {SCRIPT} --no-think '{FRANCE}'"))
    assert seen.count("No --model given") == 1 and "Qwen/Qwen3-0.6B" in seen
    assert "No --model" not in ended(terminal(f"{PYTHON} {SCRIPT} --no-think '{FRANCE}' 2>log; cat log"))
    assert "No --model" not in ended(terminal(f"{PYTHON} {SCRIPT} --model {ROOT}/demo --no-think '{FRANCE}'"))


# ----------------------------------------------------------------------------------------------------------------------
# --version and --list
# ----------------------------------------------------------------------------------------------------------------------

def git(*arguments, cwd) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_version_with_the_commit_of_its_own_checkout_only(tmp_path):
    checkout = tmp_path / "outer" / "checkout"
    copy_of_the_project(checkout)

    def version(**environment):
        done = subprocess.run([PYTHON, checkout / "qwen3.py", "--version"], capture_output=True, text=True, timeout=60,
                              env=os.environ | environment, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    plain = f"qwen3 {qwen3.__version__}\n"
    assert version() == plain
    git("init", "-q", cwd=tmp_path / "outer")
    git("add", ".", cwd=tmp_path / "outer")
    git("commit", "-qm", "x", cwd=tmp_path / "outer")
    assert version() == plain  # as where site-packages lies somewhere in a repository
    (checkout / ".git").mkdir()
    assert version() == plain  # no repository, although it looks like one
    (checkout / ".git").rmdir()
    git("init", "-q", cwd=checkout)
    assert version() == plain  # no commit yet
    git("add", ".", cwd=checkout)
    git("commit", "-qm", "y", cwd=checkout)
    named = f"qwen3 {qwen3.__version__} ({git('rev-parse', '--short', 'HEAD', cwd=checkout)})\n"
    assert version() == named != plain
    assert version(GIT_DIR=str(tmp_path / "outer/.git")) == named
    assert version(PATH="/nowhere") == plain  # no git


@pytest.fixture
def hub_cache(tmp_path):
    """A hub's cache with a model that runs, one of another architecture, and one whose weights are missing."""
    cache, tokenizer = tmp_path / "cache", ROOT / "demo" / "tokenizer.json"
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B", "someone/qwen3-half"):
        home = cache / f"models--{name.replace('/', '--')}"
        snapshot = home / "snapshots" / ("a" * 40)
        snapshot.parent.mkdir(parents=True)
        make_random_model(BASE | {"vocab_size": 4096}, snapshot, "float32", tokenizer=tokenizer.parent)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("a" * 40)
    edit_json(cache / "models--Qwen--Qwen2.5-7B/snapshots" / ("a" * 40) / "config.json", {"model_type": "qwen2"})
    (cache / "models--someone--qwen3-half/snapshots" / ("a" * 40) / "model.safetensors").unlink()
    return cache


def table(*options, cache, program="qwen3.py") -> dict[str, tuple[str, str]]:
    """Name -> (size, whether it runs) of --list."""
    done = run_fast("--list", *options, program=program, env=os.environ | {"HF_HUB_CACHE": str(cache)})
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = [re.split(" {2,}", line.strip()) for line in done.stdout.splitlines()]
    assert head == ["MODEL", "SIZE", "RUNS"]
    return {name: (size, runs) for name, size, runs in rows}


def test_list_of_models(hub_cache):
    listed = table(cache=hub_cache)
    assert list(listed)[0] == "(bundled)" and listed["(bundled)"][1] == "yes"
    assert listed["Qwen/Qwen3-0.6B"][1] == "yes"
    assert re.fullmatch("no: config.json: Qwen2.* is not supported", listed["Qwen/Qwen2.5-7B"][1])
    assert re.fullmatch("no: no model.safetensors.*", listed["someone/qwen3-half"][1])
    n_bytes = sum(file.stat().st_size for file in (ROOT / "demo").iterdir())
    number, unit = listed["(bundled)"][0].split()
    assert float(number) == round(n_bytes / {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit], 1)


def test_list_for_scripts_and_of_a_folder(hub_cache, tmp_path):
    (tmp_path / "models" / "empty").mkdir(parents=True)
    shutil.copytree(ROOT / "demo", tmp_path / "models" / "one")
    for folder in (tmp_path / "models", tmp_path / "models" / "one"):
        done = run("--list", "--json", "--model", folder, environment={"HF_HUB_CACHE": str(hub_cache)})
        listed = [json.loads(line) for line in done.stdout.splitlines()]
        assert [model["name"] for model in listed][-1] == str(tmp_path / "models" / "one") and len(listed) == 5
        for model in listed:
            assert model["runs"] == (model["why_not"] is None) and model["bytes"] > 0
            answers = run("--model", model["path"], "-n", "1", "--json", "Hello").returncode == 0
            assert answers == model["runs"]
    assert "no model's folder" in refusal("--list", "--model", tmp_path / "models" / "empty")
    assert "no such file" in refusal("--list", "--model", tmp_path / "none").lower()


def test_list_without_a_cache(tmp_path):
    assert list(table(cache=tmp_path / "none")) == ["(bundled)"]


# ----------------------------------------------------------------------------------------------------------------------
# Quantized models and prompt caches are written
# ----------------------------------------------------------------------------------------------------------------------

def test_save_quantized_says_where_and_how_large(tmp_path):
    folder = tmp_path / "small"
    done = run_fast("-m", ROOT / "demo", "--quantize", "int4", "--save-quantized", folder)
    said = re.fullmatch(r"Written: (.+), ([\d.]+) MB, int4\. .*\n", done.stderr)
    assert done.returncode == 0 and said[1] == str(folder)
    assert float(said[2]) == round(sum(file.stat().st_size for file in folder.iterdir()) / 1e6, 1)
    assert f"python qwen3_numba.py --model {folder}" in refusal("--model", folder, "Hello")
    with_it = table("--model", folder, cache=tmp_path, program="qwen3_numba.py")
    without = table("--model", folder, cache=tmp_path)
    assert with_it[str(folder)][1] == "yes"
    assert without[str(folder)][1] == "no: quantized by qwen3_numba.py, which runs it"
    os.truncate(folder / "model.int4.safetensors", 3_000_000)
    cut = table("--model", folder, cache=tmp_path, program="qwen3_numba.py")
    assert "not a valid safetensors file" in cut[str(folder)][1]


def test_progress_of_a_file_that_is_written(tmp_path, monkeypatch, demo):
    """The bar counts the bytes of the numbers, and is shown on terminals only, when it takes long."""
    import tqdm
    bars, real = [], tqdm.tqdm

    def recorded(*arguments, **options):
        bars.append((options, real(*arguments, **options | {"disable": False, "delay": 1000})))
        return bars[-1][1]

    monkeypatch.setattr(tqdm, "tqdm", recorded)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    cache = qwen3.KVCache(demo.config)
    qwen3.forward(demo, list(range(10)), cache)
    arrays = {"k": cache.k[..., :10, :], "token_ids": cache.token_ids[0, :10]}
    write_safetensors(tmp_path / "file", arrays, {})
    [(options, bar)] = bars
    assert bar.n == bar.total == sum(array.nbytes for array in arrays.values())
    assert (options["leave"], options["delay"]) == (False, 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    write_safetensors(tmp_path / "other", arrays, {})
    assert len(bars) == 1


def test_a_closed_stderr_is_no_obstacle_to_progress():
    command = f"{PYTHON} {ROOT / 'qwen3.py'} --no-think '{FRANCE}' 2>&-"
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, PARIS)


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C before anything has happened
# ----------------------------------------------------------------------------------------------------------------------

SLOW = """import sys, time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:  # as libraries do that try to import others
    pass
"""
COMMANDS = {"qwen3.py": [str(SCRIPT)], "qwen3_numba.py": [str(ROOT / "qwen3_numba.py")],
            "qwen3": ["-c", "import sys; sys.argv[0] = 'qwen3'; from qwen3_app.commands import main; sys.exit(main())"],
            "qwen3-fast": ["-c", "import sys; sys.argv[0] = 'qwen3-fast'; from qwen3_app.commands import fast_main; "
                           "sys.exit(fast_main())"]}


@pytest.mark.parametrize("module", ["numpy", "jinja2", "tokenizers"])
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_during_imports(tmp_path, command, module):
    (tmp_path / f"{module}.py").write_text(SLOW)
    process = subprocess.Popen(
        [PYTHON, *COMMANDS[command], "Hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out, err) == (130, "", f"{command}: interrupted\n")


def test_an_ignored_ctrl_c_stays_ignored():
    """As in a shell's `qwen3 ... &`."""
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start.catch_ctrl_c()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and not start.release_ctrl_c()
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_importing_the_model_leaves_signals_alone():
    program = ("import signal, qwen3, qwen3_app.cli, qwen3_app.start; "
               "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    done = subprocess.run([PYTHON, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert done.stdout == "True\n", done.stderr


def test_a_broken_tokenizer_is_one_line(folder):
    edit_json(folder / "tokenizer.json", {"post_processor": {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<none>", "type_id": 0}}]}})
    assert "tokenizer.json" in refusal("--model", folder, "Hello")
