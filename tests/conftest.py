"""How the tests run, and the models that several rooms test with."""
import dataclasses
import functools
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # before NumPy and torch come: else each of pytest's processes
    os.environ.setdefault(name, "1")  # takes all cores
os.environ["QWEN3_HISTORY"] = "off"  # nothing is kept in the home of who runs the tests
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles all modules again

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import qwen3  # noqa: E402
import tokenizer_utils  # noqa: E402
from configs import BASE, CLI_CONFIG, TINY  # noqa: E402
from embedders import make_embedder, make_reranker  # noqa: E402
from fuzzing import DEMO, TEMPLATE, reduced_tokenizer  # noqa: E402
from make_random_model import make_random_model  # noqa: E402
from qwen3_lib.page import contents  # noqa: E402
from tokenizer_utils import Tokenizer, load_tokenizer  # noqa: E402

# A script's `pytest &` starts with SIGINT ignored, nohup with SIGHUP, and so would every process that a test starts.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    if number is not None and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# What many tests do again and none of them tests: compiling the same chat template, measuring the speed of memory.
tokenizer_utils.compile_template = functools.cache(tokenizer_utils.compile_template)
contents.READ = 2**18

if os.environ.get("QWEN3_CHECK_MEMORY"):
    from guarded import guard_memory
    guard_memory()

# The same examples in every run, so that a result depends on the code only; other ones: --hypothesis-profile=default
settings.register_profile("same examples", derandomize=True, deadline=None)
settings.load_profile("same examples")


def pytest_collection_finish():
    """What was imported stays: else each full garbage collection looks at it again, also in forks. They are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter):
    """One line for each reason for which tests are skipped; pytest's own summary has one for each place in a file."""
    reasons = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        absent = re.match(r"could not import '(\w+)", reason)
        reasons[f"{absent[1]} is not installed" if absent else reason] += 1
    for reason, n in reasons.most_common():
        terminalreporter.line(f"{n} skipped: {reason}")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A sound random model that the command line can run and that would talk until its context is full."""
    path = make_random_model(CLI_CONFIG, tmp_path_factory.mktemp("pristine") / "model", "float32")
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.0}')
    return path


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of the sound model, for the test to break."""
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture
def shards(tmp_path):
    return make_random_model(CLI_CONFIG, tmp_path / "sharded", "float32", 3)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return qwen3.load_model(make_random_model(BASE, tmp_path_factory.mktemp("random"), "float32"))


@pytest.fixture(scope="session")
def demo():
    return qwen3.load_model(qwen3.BUNDLED)


@pytest.fixture(scope="session")
def embedder(tmp_path_factory):
    """The folder of a random embedding model."""
    return make_embedder(tmp_path_factory.mktemp("embedder") / "model")


@pytest.fixture(scope="session")
def reranker(tmp_path_factory):
    """The folder of a random reranker."""
    return make_reranker(tmp_path_factory.mktemp("reranker") / "model")


@pytest.fixture(scope="session")
def memory():
    """A folder in memory where there is one: tens of thousands of files would otherwise wait for the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def tiny(memory):
    """The folder of a random model with the bundled tokenizer's first merges, and a short template."""
    tokenizer, source = reduced_tokenizer(), memory / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    config = {key: value for key, value in json.loads((DEMO / "tokenizer_config.json").read_text("utf-8")).items()
              if key != "chat_template"}
    config["added_tokens_decoder"] = {str(token["id"]): {name: token[name] for name in token if name != "id"}
                                      for token in tokenizer["added_tokens"]}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.0}')
    n_tokens = tokenizer["added_tokens"][-1]["id"] + 1
    return make_random_model(TINY | {"vocab_size": n_tokens}, memory / "model", "float32", tokenizer=source)


@pytest.fixture(scope="session")
def tiny_model(tiny):
    return qwen3.load_model(tiny)


@pytest.fixture(scope="session")
def talker(tiny_model):
    """The same with the bundled model's chat template."""
    demo = load_tokenizer(DEMO)
    return dataclasses.replace(tiny_model, tokenizer=Tokenizer(tiny_model.tokenizer.backend, demo.chat_template,
                                                          demo.named_tokens))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """One layer of random weights in the fast engine, whose bits don't depend on company; the demo's tokenizer."""
    pytest.importorskip("numba")
    import qwen3_numba
    path = make_random_model(BASE | {"vocab_size": 4096, "num_hidden_layers": 1, "max_position_embeddings": 1000},
                             tmp_path_factory.mktemp("small"), "bfloat16", tokenizer=DEMO)
    return qwen3_numba.load_model(path, "int8", 1)


@pytest.fixture(scope="module")
def served(demo):
    """The bundled model in a server."""
    from serving import Served
    with Served(demo) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    """OpenAI's client of this server."""
    return served.client()


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])  # CI's user is root
        yield browser
        browser.close()


@pytest.fixture
def screenshots(tmp_path):
    """The folder that QWEN3_SCREENSHOTS names, or one that goes."""
    folder = Path(os.environ.get("QWEN3_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def scratch(memory):
    """A folder for the files of one test, which it overwrites with each input."""
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)
