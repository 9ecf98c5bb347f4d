"""qwen3.py and tokenizer_utils.py, copied alone beside a model folder, with four packages: a program and a library."""
import errno
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import files

import pytest

import qwen3
from configs import FRANCE, HYBRID, PARIS, ROOT, VOCABULARY, vl_config
from helpers import REMOVED, assert_one_line, edit_json, message_of
from make_random_model import make_random_model

PACKAGES = ("numpy", "safetensors", "tokenizers", "jinja2", "markupsafe")  # jinja2 imports markupsafe
@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python that finds these packages, in the versions of this environment, and nothing else."""
    folder = tmp_path_factory.mktemp("four packages")
    venv.create(folder, with_pip=False, symlinks=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    for package in PACKAGES:
        for file in files(package):
            link = site_packages / file.parts[0]
            if file.parts[0] != ".." and not link.exists():
                link.symlink_to(file.locate().parents[len(file.parts) - 1] / file.parts[0])
    return folder / "bin/python"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files, and the bundled model in `model`."""
    folder = tmp_path_factory.mktemp("two files")
    for name in ("qwen3.py", "tokenizer_utils.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "model").mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                 "tokenizer_config.json"):
        shutil.copy(ROOT / "demo" / name, folder / "model")
    return folder


def run(python, folder, *args) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "QWEN3_MODEL")}
    return subprocess.run([python, *args], cwd=folder, env=clean, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=120)


def answer(python, folder, *args) -> str:
    done = run(python, folder, "qwen3.py", "--model", "model", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_environment_has_exactly_these_packages(python, folder):
    program = "from importlib.metadata import distributions; print(*(d.name.lower() for d in distributions()))"
    assert sorted(run(python, folder, "-c", program).stdout.split()) == sorted(PACKAGES)


def test_a_prompt_is_answered(python, folder):
    thought = answer(python, folder, FRANCE)
    assert thought.endswith(PARIS) and len(thought) > len(PARIS)
    assert answer(python, folder, "--no-think", FRANCE) == PARIS
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"qwen3.py", "tokenizer_utils.py", "model"}


def test_the_options(python, folder, demo):
    pirates = ["--seed", "8", "--system", "Talk like a pirate."]
    asked = (["--top-k", "1"], ["--top-p", "0.000001"], ["--seed", "8"], ["--seed", "8"], ["--seed", "7"],
             ["--max-tokens", "3", "--seed", "8"], pirates)
    hot = ["--model", "model", "--temperature", "3", "--max-tokens", "12", "--no-think"]
    program = f"import qwen3\nfor asked in {asked}: qwen3.main([*{hot}, *asked, {FRANCE!r}]), print(end='\\0')"
    likeliest, also, drawn, again, other, short, pirate, _ = run(python, folder, "-c", program).stdout.split("\0")
    assert likeliest == also == PARIS and drawn == again != other and drawn.startswith(short.rstrip("\n"))
    messages = [{"role": "system", "content": "Talk like a pirate."}, {"role": "user", "content": FRANCE}]
    told = qwen3.chat(demo, messages, temperature=3, seed=8, max_new_tokens=12, enable_thinking=False).finish().text
    assert pirate.strip() == told.strip()
    assert told.strip() != drawn.strip()


def test_pipes(python, folder):
    """A piped text follows the prompt, whose words may stand without quotes; a reader that leaves is no error."""
    command = f'"{python}" qwen3.py --model model --no-think'
    for line, said in ((f"echo What is the capital of Peru? | {command} Please answer this:",
                        "The capital of Peru is Lima."),
                       (f"echo What is the capital of Peru? | {command}", "The capital of Peru is Lima."),
                       (f"{command} What is 2 + 3? < /dev/null | head -c 1", "2"),
                       (f"{command} Tell me a story. | true", "")):
        done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL)
        assert (done.stdout.strip(), done.stderr) == (said, "")
    done = run(python, folder, "qwen3.py", "--model", "model")
    assert done.returncode == 2 and "there is no prompt" in done.stderr
    done = subprocess.run([python, "qwen3.py", "--model", "model"], cwd=folder, capture_output=True, timeout=60,
                          input=b"a\xff", env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stdout) == (1, b"")
    assert_one_line(done.stderr.decode(), "0xff")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line(python, folder):
    with open("/dev/full", "w") as full:
        disk = subprocess.run([python, "qwen3.py", "--model", "model", "Hello"], cwd=folder, stdout=full, text=True,
                              stderr=subprocess.PIPE, timeout=60, stdin=subprocess.DEVNULL)
    assert disk.returncode == 1
    assert_one_line(disk.stderr, os.strerror(errno.ENOSPC))


def test_a_stdout_that_is_ascii(python, folder, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert set(answer(python, folder, "--no-think", "法国的首都是哪里？")) == {"?", "\n"}


def test_what_needs_more_files_is_one_line(python, folder):
    done = run(python, folder, "qwen3.py", "--model", "Qwen/Qwen3-0.6B", "Hello")
    assert done.returncode and not done.stdout
    assert_one_line(done.stderr, "Qwen/Qwen3-0.6B")
    for option in ("--fast", "--tempreature"):
        done = run(python, folder, "qwen3.py", "--model", "model", option, "Hello")
        assert done.returncode == 2 and not done.stdout
        assert_one_line(done.stderr, f"unknown option {option}", "the folder qwen3_lib")


SCRIPTS = sorted(file.name for file in ROOT.glob("qwen3_*.py"))


@pytest.mark.parametrize("beside", [(), ("qwen3.py",), ("qwen3.py", "tokenizer_utils.py")])
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_alone_lacks_is_one_line(tmp_path, script, beside):
    """By a Python without packages."""
    for name in (script, *beside):
        shutil.copy(ROOT / name, tmp_path)
    done = run(sys.executable, tmp_path, "-I", "-S", "-c",
               f"import runpy, sys; sys.path[0] = sys.argv[0] = {script!r}; "
               f"sys.path.insert(0, '.'); runpy.run_path({script!r}, run_name='__main__')")
    assert done.returncode == 1 and not done.stdout
    small = ("qwen3_5.py", "qwen4_exp.py", "qwen3_asr.py", "qwen3_tts.py", "qwen3_vision.py")
    missing = "qwen3.py" if not beside else "numpy" if script in small else "qwen3_lib"
    assert_one_line(done.stderr, script, missing)


def test_missing_packages_are_named(python, tmp_path):
    for program, words in (("qwen3.py", "tokenizer_utils.py beside it"), ("qwen3_vision.py", "no module PIL")):
        shutil.copy(ROOT / program, tmp_path)
        done = run(python, tmp_path, program, "Hello")
        assert done.returncode and not done.stdout
        assert_one_line(done.stderr, program, words)
    (tmp_path / "tokenizer_utils.py").write_text("# another package's module of this name")
    assert_one_line(run(python, tmp_path, "qwen3.py", "Hello").stderr, f"({tmp_path / 'tokenizer_utils.py'})")


ANSWER = """\
from qwen3 import BUNDLED, InputError, Sequence, Stream, chat, load_model

model = load_model("model")
reply = chat(model, "What is the capital of France?", enable_thinking=False)
assert BUNDLED is None and "finish()" in repr(reply)
first = next(reply)
assert first in repr(reply) and reply.text == first
print(reply.finish())
print(chat(model, "What is the capital of France?", enable_thinking=False, max_tokens=2))
parts = chat(model, "What is the capital of France?").finish().answer
print(len(parts.reasoning) > 9, parts.content)
prompt = [*reply.sequence.prompt[:-4], *model.tokenizer.encode("<think>\\n", False)]  # as some templates end it
within = Stream(model, Sequence(model, prompt, 4)).finish().answer
print(within.reasoning_truncated, repr(within.content))
for option in ("stop", "logprobs", "schema"):
    try:
        chat(model, "Hello", **{option: 1})
    except InputError as error:
        print(error)
"""


def test_an_answer_prints_as_its_text_and_options_that_need_the_folder_say_so(python, folder):
    done = run(python, folder, "-c", ANSWER)
    whole, cut, parts, within, *refused = done.stdout.splitlines()
    assert (done.returncode, done.stderr, whole) == (0, "", PARIS.strip())
    assert (parts, within) == (f"True {PARIS.strip()}", "True ''")
    assert PARIS.startswith(cut) and len(cut) < len(whole)
    for name, said in zip(("stop", "logprobs", "schema"), refused, strict=True):
        assert f"no option {name}" in said and "the folder qwen3_lib" in said


@pytest.mark.parametrize("program", ["qwen3.py", "qwen3_5.py"])
def test_a_third_file_adds_the_hybrids(python, folder, tmp_path, program):
    path = make_random_model(HYBRID | {"vocab_size": VOCABULARY}, tmp_path / "hybrid", "bfloat16")
    for name in ("qwen3.py", "tokenizer_utils.py"):
        shutil.copy(ROOT / name, tmp_path)
    asked = (program, "--model", "hybrid", "--temperature", "0", "--max-tokens", "5", FRANCE)
    if program == "qwen3.py":
        assert_one_line(run(python, tmp_path, *asked).stderr, "model_type", "qwen3_5_text", "need qwen3_5.py")
        shutil.copy(ROOT / "qwen3_vision.py", tmp_path)
        (tmp_path / "PIL.py").touch()
        assert_one_line(run(python, tmp_path, "qwen3_vision.py", *asked[1:], "--image", "a.png").stderr,
                        "need qwen3_5.py")
        (tmp_path / "qwen3_vision.py").unlink()
    shutil.copy(ROOT / "qwen3_5.py", tmp_path)
    told = qwen3.chat(qwen3.load_model(path), FRANCE, temperature=0, max_new_tokens=5).finish().text
    assert run(python, tmp_path, *asked).stdout.strip() == told.strip() != ""


@pytest.mark.parametrize("tied", [True, False])
def test_the_words_of_a_model_that_sees(python, folder, tmp_path, tied):
    """The language model of a Qwen3-VL is a Qwen3; whether the head is tied stands beside text_config, or in it."""
    config = vl_config("2B" if tied else "8B")
    config["text_config"] |= {"vocab_size": VOCABULARY}
    del (config["text_config"] if tied else config)["tie_word_embeddings"]
    path = make_random_model(config, tmp_path / "seeing", "bfloat16", 2)
    done = run(python, folder, "qwen3.py", "--model", path, "--temperature", "0", "--max-tokens", "5", FRANCE)
    told = qwen3.chat(qwen3.load_model(path), FRANCE, temperature=0, max_new_tokens=5).finish().text
    assert (done.stdout.strip(), done.stderr) == (told.strip(), "") and told.strip()


@pytest.mark.parametrize("changes", [
    {"model_type": "qwen3_moe"}, {"model_type": REMOVED},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"attention_bias": True},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
    {"use_sliding_window": True}, {"architectures": ["Qwen3ForSequenceClassification"]},
    {"head_dim": REMOVED}, {"tie_word_embeddings": False}, {"intermediate_size": 24}])
def test_what_two_files_do_not_compute_is_refused(tiny, tmp_path, monkeypatch, changes):
    folder = shutil.copytree(tiny, tmp_path / "model")
    monkeypatch.setattr(qwen3, "LIBRARY", tmp_path / "nowhere")
    qwen3.load_model(folder)
    edit_json(folder / "config.json", changes)
    assert_one_line(message_of(qwen3.load_model, folder), "config.json")
