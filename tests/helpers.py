"""What tests share: one line of an error, the command line in this process and in its own, files of a model changed."""
import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import qwen3
from configs import BASE, ROOT
from qwen3_lib.app import cli
from qwen3_lib.generation.batch import generate_batch
from qwen3_lib.generation.completion import Completion
from qwen3_lib.io import models
from qwen3_lib.io.models import description_of, open_model
from qwen3_lib.io.errors import InputError

PERU, LIMA = "What is the capital of Peru?", "The capital of Peru is Lima."
SPAIN, MADRID = "What is the capital of Spain?", "The capital of Spain is Madrid."
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
REMOVED = object()  # in a set of changes to a config: the field is not there at all
HUGE_INT = 10**400  # JSON and the command line allow it; float() doesn't


# ---- The reference ---------------------------------------------------------------------------------------------------

def transformers_logits(path, ids) -> np.ndarray:
    """transformers' logits [n, vocab_size] in float64; skips the test where its packages are missing."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from make_golden import load
    theirs = load(path).double()
    theirs.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].numpy()
    assert logits.dtype == np.float64
    return logits


def assert_like(logits, expected: np.ndarray) -> None:
    """Logits in float32 are those of the reference, measured by their spread."""
    error = np.abs(logits - expected) / expected.std()
    assert np.sqrt((error**2).mean()) < 5e-6 and error.max() < 1e-4


# ---- One line that says what is wrong --------------------------------------------------------------------------------

def assert_one_line(text: str, *words: str) -> None:
    """`text` is one line with something in it, no traceback, and names all `words` (in any case)."""
    assert text.strip() and len(text.splitlines()) == 1, f"not one line: {text[:2000]!r}"
    assert "Traceback" not in text
    for word in words:
        assert str(word).lower() in text.lower(), f"{word!r} is not named in {text[:2000]!r}"


def hide(folder, *modules: str) -> None:
    """Hides modules, as if nobody had installed them, from a Python whose path begins with this folder."""
    (folder / "sitecustomize.py").write_text(f"""\
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name in {modules} else find_spec(name, *where)
""")


def message_of(call, *args, **options) -> str:
    """The message with which the library refuses a call. Any other exception, or none, fails the test."""
    with pytest.raises(InputError) as caught:
        call(*args, **options)
    assert_one_line(str(caught.value))
    return str(caught.value)


def works_or_refused(call, *args, **options):
    """The result of a call, or None if it was refused properly. Any other exception fails the test."""
    try:
        return call(*args, **options)
    except InputError as error:
        assert_one_line(str(error))
        return None


# ---- The command line, in this process and as a process of its own ---------------------------------------------------

def run_main(capfd, *args, stdin: bytes | None = b"", main=cli.main) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a command line in this process. capfd also sees what libraries print themselves.

    stdin: what is piped in; None for a terminal, at which nobody types.
    """
    capfd.readouterr()
    earlier, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin or b""), "utf-8")
    sys.stdin.isatty = lambda: stdin is None
    try:
        status = main([str(arg) for arg in args])
    except SystemExit as stop:  # argparse ends wrong usage so
        status = stop.code
    finally:
        sys.stdin = earlier
    return status, *capfd.readouterr()


def assert_cli_refuses(capfd, args, *words) -> None:
    status, out, err = run_main(capfd, *args)
    assert status in (1, 2), (status, out, err)
    assert_one_line(err, *words)
    assert not out.strip()


def command(*args) -> list[str]:
    return [sys.executable, str(ROOT / "qwen3.py"), *map(str, args)]


def start(*args, **options) -> subprocess.Popen:
    """The command line as a process of its own, which hears Ctrl-C (a shell's background jobs ignore it)."""
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | options.pop("env", {})
    prepare = options.pop("prepare", lambda: None)

    def in_child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare()

    return subprocess.Popen(args if isinstance(args[0], bytes) else command(*args), env=env, preexec_fn=in_child,
                            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options))


def finish(process: subprocess.Popen, timeout: float = 60) -> tuple[int, bytes, str]:
    """(status, stdout, stderr); a process that hangs is ended and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"still running after {timeout} s")
    return process.returncode, out, err.decode()


def forked(work) -> int:
    """Runs work() in a process of its own -> its exit status."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    if (child := os.fork()) == 0:
        sys.dont_write_bytecode = True  # under a limit for files, Python would keep modules that are cut off
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_forked(main, *args, stdin=b"", stdout=None) -> subprocess.CompletedProcess:
    """A command line in a fork of this process, which has imported everything: with files, a status and an end of its
    own, as a process of its own has. stdout: the number of an open file."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)

        def work() -> None:
            for number, file in enumerate((given.fileno(), out.fileno() if stdout is None else stdout, err.fileno())):
                os.dup2(file, number)
            sys.stdin, sys.stdout, sys.stderr = (open(number, "rw"[number > 0]) for number in range(3))
            try:
                status = main([str(arg) for arg in args])
            except SystemExit as stop:  # with a status or, as Python prints it, a text
                status = stop.code if isinstance(stop.code, int | None) else print(stop.code, file=sys.stderr) or 1
            except BaseException:
                status = traceback.print_exc() or 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status or 0)

        status = forked(work)
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(args, status, out.read(), err.read())


def endless(folder, *options, **popen):
    """A process that answers for minutes if nobody stops it."""
    return start("--model", folder, "--raw", "--seed", 1, *options, "Hello", **popen)


def cut_off(n: int) -> str:
    """What stderr says of an answer cut off after n tokens by --max-tokens."""
    return f"The answer was cut off after {n} tokens: raise --max-tokens for more.\n"


def with_engine(model, **changes):
    """The model with other functions of its engine."""
    return dataclasses.replace(model, engine=dataclasses.replace(model.engine, **changes))


def counting(model, count=lambda new: len(new.token_ids)):
    """(the model, a list to which each pass adds how many tokens it computes)."""
    passes, run = [], model.engine.run

    def counted(model, new):
        passes.append(count(new))
        return run(model, new)

    return with_engine(model, run=counted), passes


def with_logits(model, change):
    """The model, whose passes give change(logits [m, vocab_size], the Pass)."""
    run = model.engine.run

    def changed(model, new):
        logits, states = run(model, new)
        return change(logits, new), states

    return with_engine(model, run=changed)


def lengths_in(new):
    """How many tokens of each sequence a Pass has."""
    return [rows.stop - rows.start for _, rows in new.parts]


def roles(messages: list[dict]) -> str:
    """The initials of who has said something: s, u, a, t."""
    return "".join(message["role"][0] for message in messages)


# ---- A model's folder ------------------------------------------------------------------------------------------------

def edit_json(file: Path, changes: dict) -> None:
    """Changes fields of a JSON file; REMOVED takes one away."""
    values = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not REMOVED}))


def read_safetensors(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    start_of_data = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start_of_data]), content[start_of_data:]


def write_safetensors(file: Path, header: dict | bytes, data: bytes, length: int | None = None) -> None:
    """Writes the file as told, however wrong; `length` is what it says of its header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def with_tensors(file: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Rewrites a float32 safetensors file with tensors changed, added or (None) removed, all offsets right again."""
    old, data = read_safetensors(file)
    tensors = {name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
               for name, entry in old.items() if name != "__metadata__"} | changes
    header, parts, end = {}, [], 0
    for name, tensor in tensors.items():
        if tensor is not None:
            parts.append(tensor.astype("<f4").tobytes())
            header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + len(parts[-1])]}
            end += len(parts[-1])
    write_safetensors(file, header, b"".join(parts))


def filled_cache(model, ids):
    cache = qwen3.KVCache(model.config)
    qwen3.forward(model, ids, cache)
    return cache


def logits_of(model, ids):
    """All logits of ids with an empty cache, by a model or that of a folder or file."""
    model = model if isinstance(model, qwen3.Model) else qwen3.load_model(model)
    return qwen3.compute(model, [qwen3.NextTokens(model.engine.new_cache(model.config), np.asarray(ids), len(ids))])[0]


def rebuilt(model, cache):
    """A cache with the rows and the state of another one, as files give them."""
    n, copy = cache.length, model.engine.new_cache(model.config)
    copy.reserve(n)
    for name, array in copy.rows(0, n).items():
        array[...] = cache.rows(0, n)[name]
    copy.go_on(cache.token_ids[:n], cache.state(n))
    return copy


def states_of(model, ids, cache=None):
    """The hidden states of ids [n] -> [n, hidden_size]."""
    cache = model.engine.new_cache(model.config) if cache is None else cache
    return qwen3.compute(model, [qwen3.NextTokens(cache, np.asarray(ids), 0)], states=True)[1]


def config_at(folder: Path) -> qwen3.Config:
    """The Config of a folder that may have no weights."""
    return description_of(qwen3.json_in(folder / "config.json"), folder / "config.json").config()


def stored_in(path: Path) -> dict:
    """All tensors of a model's language model in its files, by our names."""
    source = open_model(str(path))
    return source.tensors | source.heads


def change_stored(patch: pytest.MonkeyPatch, change) -> None:
    """From now on, each model that is read has the tensors change(those in its files, its Source)."""
    real = models.read

    def changed(path):
        source = real(path)
        return dataclasses.replace(source, tensors=change(source.tensors, source))

    patch.setattr(models, "read", changed)


def random_ids(n, seed=0, vocab_size=BASE["vocab_size"]):
    return np.random.default_rng(seed).integers(0, vocab_size, n).tolist()


# ---- A page in a browser ---------------------------------------------------------------------------------------------

def complaints_of(page) -> list[str]:
    """What the browser will have complained of; a dialog is dismissed."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
    page.set_default_timeout(10_000)
    return complaints


def axe_core() -> str:
    """The script that looks for violations of accessibility."""
    axe = pytest.importorskip("axe_playwright_python")
    return next(Path(axe.__file__).parent.rglob("axe.min.js")).read_text("utf-8")


def assert_looks(page, width, picture, **options) -> None:
    """Nothing is wider than the window, and axe-core finds no violation; the page as a picture."""
    page.screenshot(path=picture, **options)
    assert page.evaluate("document.documentElement.scrollWidth") == width, picture
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe_core())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    assert [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found["violations"]] == []
    assert len(found["passes"]) > 10


# ---- The memory of a process -----------------------------------------------------------------------------------------

LOADING = """
import re, sys
from pathlib import Path
import numpy as np
import qwen3
from qwen3_lib.kernels import ways
from qwen3_numba import load_model
path, quantize, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
ways.last_cache = lambda: 2**60  # nothing is measured: once for each format, that takes twice the last cache

def memory(kind):  # VmHWM: the most that was resident, with the pages of mapped files; RssAnon: without these
    return int(re.search(rf"{kind}:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def arrays(weights):
    values = weights.values() if isinstance(weights, dict) else weights if isinstance(weights, list) else ()
    return [weights] if isinstance(weights, np.ndarray) else [array for value in values for array in arrays(value)]

load_model(qwen3.BUNDLED, "int8", threads)  # brings all into memory that isn't the weights
before, own = memory("VmRSS"), memory("RssAnon")
if quantize == "numpy":
    weights = arrays(qwen3.load_model(path).weights)
else:
    model = load_model(path, quantize or None, threads)
    weights = model.weights.arrays
kept = {array.ctypes.data: array.nbytes for array in weights}
print(memory("VmHWM") - before, memory("RssAnon") - own, sum(kept.values()))
"""


def memory_while_loading(path, quantize=None, threads=8) -> tuple[int, int, int]:
    """(the peak of the resident memory, the memory that isn't mapped from files, the kept weights) in bytes.

    Of a process that loads a model; quantize "numpy" stands for the NumPy engine.
    """
    done = subprocess.run([sys.executable, "-c", LOADING, path, quantize or "", str(threads)], cwd=ROOT, timeout=250,
                          capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    peak, own, kept = map(int, done.stdout.split())
    print(f"peak {peak / kept:.3f}, own {own / kept:.3f} of {kept / 1e6:.1f} MB")
    return peak, own, kept


# ---- hypothesis ------------------------------------------------------------------------------------------------------

def patiently(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def in_time(action, seconds=60):
    """What action() returns or raises, in a thread, so that a test that waits for ever fails instead."""
    outcome = []

    def attempt():
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"still waiting after {seconds} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def assert_batches_and_drafts_change_nothing(model, prompts):
    """Each prompt's tokens are the same alone, beside the others, and with guesses of the model's MTP head."""
    options = {"max_new_tokens": 12, "temperature": 0, "eos_token_ids": ()}
    alone = [list(qwen3.generate(model, prompt, 12, temperature=0, eos_token_ids=())) for prompt in prompts]
    assert generate_batch(model, prompts, **options) == alone
    for prompt, expected in zip(prompts, alone):
        drafted = Completion(model, prompt, **options).finish()
        assert drafted.speculator.mtp and drafted.speculator.guessed and drafted.token_ids == expected
