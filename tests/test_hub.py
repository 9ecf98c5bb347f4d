"""Models by name, against a small hub of our own on the loopback device: what it is asked, what its faults lead to.

The hub's client reads its environment when it is imported, so each run is a fork of this process.
"""
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from configs import ROOT
from helpers import assert_one_line, message_of, run_forked
from qwen3_lib.io.hub import cached_models, gguf_names, hub_cache, hub_id, named_gguf, resolve_model, tower_name

pytestmark = pytest.mark.core

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
DEMO = {name: (ROOT / "demo" / name).read_bytes() for name in NEEDED}
USELESS = {"README.md": b"# Tiny", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"onnx"}
IMPATIENT = "import time; time.sleep = lambda seconds: None  # the client waits before it tries again\n"
CHILD = """
import json, sys
from qwen3_lib.io.hub import resolve_model
from qwen3_lib.io.errors import InputError
from qwen3_lib.io.models import open_model
outcomes = []
for name, *options in json.loads(sys.argv[1]):
    try:
        path = open_model(name).path if "open" in options else resolve_model(name, "offline" in options)
        outcomes.append((str(path), ""))
    except InputError as error:
        outcomes.append((None, str(error)))
print(json.dumps(outcomes))
"""


# ---- The hub ---------------------------------------------------------------------------------------------------------

class Handler(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks about a model, unless the hub's `fault(handler, path)` has answered already."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, path = self.server.hub, unquote(self.path)
        hub.requests.append((self.command, path, self.headers))
        if hub.fault(self, path):
            return
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        if (api := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)) and api[1] in hub.models:
            siblings = [{"rfilename": name} for name in hub.models[api[1]]]
            self.send(200, json.dumps({"id": api[1], "sha": COMMIT, "siblings": siblings}).encode())
        elif file and file[2] in hub.models.get(file[1], ()):
            self.send_file(hub.models[file[1]][file[2]])
        else:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound" if file else "RepoNotFound"})

    do_HEAD = do_GET

    def send_file(self, content, headers={}):
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self.send(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT} | headers)

    def send(self, status, content, headers={}):
        self.send_response(status)
        for name, value in ({"Content-Length": len(content)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub, self.requests, self.closing = self, [], threading.Event()
        self.models = {"tiny/demo": DEMO | USELESS}
        self.fault = lambda handler, path: False
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def files_asked(self, method="GET"):
        """The names of the files asked for, in order."""
        return [path.split("/", 5)[5] for verb, path, _ in self.requests if verb == method and "/resolve/" in path]

    def handle_error(self, request, client_address):
        pass  # a client that goes away is what some tests are about

    def stop(self):
        self.closing.set()
        self.shutdown()
        self.server_close()


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.stop()


@pytest.fixture
def environment(hub, tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    return clean | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home"),
                    "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}


@pytest.fixture
def get_all(environment, tmp_path):
    """A function that resolves several (name, option ...) in a fork -> (path or None, message) of each."""
    def run(*wanted, before="", **variables):
        def child(arguments):
            os.chdir(tmp_path)
            os.environ.clear()
            os.environ.update(environment | variables)
            for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
                del sys.modules[name]  # of another test in this process, with another environment
            sys.argv[1:] = arguments
            exec(before + CHILD, {})

        done = run_forked(child, json.dumps(wanted))
        assert (done.returncode, done.stderr) == (0, b""), done.stderr
        return [(path and Path(path), message) for path, message in json.loads(done.stdout)]

    return run


@pytest.fixture
def get(get_all):
    return lambda *wanted, **options: get_all(wanted or ("tiny/demo",), **options)[0]


def assert_refused(outcome, *words):
    """The name was refused, with one line that has all `words`."""
    assert outcome[0] is None
    assert_one_line(outcome[1], *words)


def assert_complete(outcome, files=DEMO):
    """The name led to a folder with exactly these files, and nothing was printed."""
    path, message = outcome
    assert message == "" and {file.name: file.read_bytes() for file in path.iterdir()} == dict(files)


def sharded(n=3):
    """The bundled model's small files, with weights (of no use, but different) in n shards."""
    shards = {f"model-{i:05}-of-{n:05}.safetensors": bytes([i]) * 1000 for i in range(1, n + 1)}
    index = {"weight_map": {f"tensor{i}": name for i, name in enumerate([*shards, *shards])}}
    small = {name: content for name, content in DEMO.items() if name != "model.safetensors"}
    return small | shards | {"model.safetensors.index.json": json.dumps(index).encode()}


# ---- Downloads and the cache -----------------------------------------------------------------------------------------

def test_a_download_asks_for_what_is_needed_and_only_once(hub, get, get_all):
    outcome = get(HF_TOKEN="hf_secret")
    assert_complete(outcome)
    assert sorted(hub.files_asked()) == sorted(NEEDED) and hub.files_asked()[-1] == "model.safetensors"
    commits = {path.split("/")[4] for _, path, _ in hub.requests if "/resolve/" in path and "/config.json" not in path}
    assert commits == {COMMIT}  # and not "main", which may be another one by then
    assert all(headers["Authorization"] == "Bearer hf_secret" for _, path, headers in hub.requests if "/tiny/" in path)
    hub.requests.clear()
    assert get(before="import sys; sys.modules['huggingface_hub'] = None\n") == outcome and hub.requests == []
    hub.stop()
    for found in (get_all(("tiny/demo", "offline"), ("tiny/other", "offline")),
                  get_all(("tiny/demo",), ("tiny/other",), HF_HUB_OFFLINE="1")):
        assert found[0] == outcome
        assert_refused(found[1], "tiny/other: ", "offline", "lacks files")
    found = get_all(("tiny/demo",), ("tiny/other",), before=IMPATIENT)
    assert found[0] == outcome
    assert_refused(found[1], "tiny/other: there is no such folder, and the download failed",
                   "run the same command again")


def test_a_model_is_downloaded_unless_told_otherwise(hub, get):
    assert_complete(get("tiny/demo", "open"))


def test_a_single_file_of_weights_may_have_any_name(hub, get_all):
    files = {name.replace("model.safe", "merged.safe"): content for name, content in DEMO.items()}
    hub.models = {"tiny/merged": files | USELESS, "tiny/two": files | {"other.safetensors": b""}}
    outcome, again, two = get_all(("tiny/merged",), ("tiny/merged", "offline"), ("tiny/two",))
    assert_complete(outcome, files)
    assert again == outcome
    assert_refused(two, "tiny/two: ", "no model.safetensors")


def test_an_mlx_model_brings_its_mtp_head(hub, get_all):
    """A file that its index doesn't name; the weights still come last."""
    files = DEMO | {"model.safetensors.index.json": b'{"weight_map": {"a": "model.safetensors"}}',
                    "model-mtp.safetensors": b"head"}
    hub.models = {"Qwen/Qwen3-0.6B-MLX-4bit": files | USELESS}
    outcome, again = get_all(("Qwen3-0.6B-MLX-4bit",), ("Qwen/Qwen3-0.6B-MLX-4bit", "offline"))
    assert_complete(outcome, files)
    assert again == outcome and hub.files_asked()[-2:] == ["model-mtp.safetensors", "model.safetensors"]


def test_a_tokenizer_may_have_two_files(hub, get_all):
    files = {name: content for name, content in DEMO.items() if name != "tokenizer.json"} | {
        "vocab.json": b"{}", "merges.txt": b""}
    half = {name: content for name, content in files.items() if name != "merges.txt"}
    hub.models = {"tiny/asr": files | USELESS, "tiny/half": half}
    outcome, again, half = get_all(("tiny/asr",), ("tiny/asr", "offline"), ("tiny/half",))
    assert_complete(outcome, files)
    assert again == outcome
    assert_refused(half, "tiny/half: ", "no tokenizer.json")


def test_a_model_that_speaks_brings_its_codec(hub, get_all):
    codec = {f"speech_tokenizer/{name}": name.encode() for name in ("config.json", "model.safetensors")}
    hub.models = {"tiny/voice": DEMO | codec | {"speech_tokenizer/preprocessor_config.json": b"{}"} | USELESS}
    [(path, error)] = get_all(["tiny/voice"])
    assert not error and {name: (Path(path) / name).read_bytes() for name in codec} == codec
    assert {*hub.files_asked()} == {*DEMO, *codec} and hub.files_asked()[-1] == "model.safetensors"


def test_a_short_name_is_one_of_qwen(hub, get_all):
    hub.models = {"Qwen/Qwen3-0.6B": DEMO}
    outcome, *others = get_all(("0.6b",), ("Qwen3-0.6B", "offline"), ("Qwen/Qwen3-0.6B", "offline"))
    assert_complete(outcome)
    assert outcome[0].parents[1].name == "models--Qwen--Qwen3-0.6B" and others == [outcome] * 2


@pytest.mark.parametrize("name, repo_id, quantization", [
    ("Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""), ("Qwen3-My/own", "Qwen3-My/own", ""), ("14b", "Qwen/Qwen3-14B", ""),
    ("other/qwen3-0.6b", "other/qwen3-0.6b", ""), ("a/b:UD-Q4_K_M", "a/b", "UD-Q4_K_M"),
])
def test_names(name, repo_id, quantization):
    assert hub_id(name) == (repo_id, quantization)


@pytest.mark.parametrize("name", [
    "", " ", "a\0/b", "\ud800/b", "gpt2", "0.7B", "a/b/c", "a/b/", "./a", "../a", "~/a", "a\\b", "C:\\a", "a//b", "/a",
    "-a/b", "a b/c", "a/b\n", "\u00e9/a", "a/b?x=1", "https://huggingface.co/a/b", "\x1b[31m/a", "a/b:", "a/b:c/d",
    "a/b:..", "a/x.gguf", "x.gguf", "nowhere/model.gguf:Q8_0", "a/b:\n"])
def test_what_is_never_looked_up(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such" in message_of(resolve_model, name)


def test_a_broken_off_download_is_completed(hub, get):
    hub.models["tiny/demo"] = sharded() | USELESS | {"adapter.safetensors": b"not in the index"}
    outcome = get()
    assert_complete(outcome, sharded())
    (outcome[0] / "model-00002-of-00003.safetensors").resolve().unlink()  # the link that remains leads nowhere
    hub.requests.clear()
    assert_refused(get("tiny/demo", "offline"), "lacks files", "offline")
    assert get() == outcome and hub.files_asked() == ["model-00002-of-00003.safetensors"]


def stall(hub, name):
    """The hub sends half of a file and then nothing more -> an event: the half is sent."""
    reached = threading.Event()

    def fault(handler, path):
        if path.endswith(f"/{name}") and handler.command == "GET":
            handler.send_file(b"half", {"Content-Length": 8})
            reached.set()
            hub.closing.wait()
            return True

    hub.fault = fault
    return reached


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_download_that_is_ended_goes_on_with_the_next_file(hub, get, environment, tmp_path, number):
    """Ctrl-C ends it at once, though the hub keeps the connection open; what was complete is kept."""
    reached = stall(hub, "model.safetensors")
    patient = environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "250"}
    process = subprocess.Popen([sys.executable, "-c", CHILD, '[["tiny/demo"]]'], env=patient, cwd=tmp_path,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert reached.wait(60)
    time.sleep(0.3)  # Python handles a signal only once it waits for the hub
    process.send_signal(number)
    said = process.communicate(timeout=200)[1]  # before the client's own time-out
    assert process.returncode != 0 and (number == signal.SIGKILL or said.endswith("KeyboardInterrupt\n"))
    hub.fault = lambda handler, path: False
    hub.requests.clear()
    assert_complete(get())
    assert hub.files_asked() == ["model.safetensors"]


def test_the_files_of_sentence_transformers(hub, get_all):
    """Without them, vectors would be computed in another way."""
    modules = {name: b"{}" for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
                                        "config_sentence_transformers.json", "modules.json",
                                        "sentence_bert_config.json")}
    hub.models = {"tiny/embedder": DEMO | modules | USELESS | {"openvino/model.safetensors": b""}}
    [(folder, message)] = get_all(("tiny/embedder",))
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert message == "" and files == {*NEEDED, *modules}


# ---- What goes wrong -------------------------------------------------------------------------------------------------

def answer(place, status, content=b"", headers={}):
    """A fault: requests whose path ends with `place` are answered so."""
    def fault(handler, path):
        if path.endswith(place):
            handler.send(status, content, headers)
            return True

    return fault


ANSWERS = [
    (answer("/tiny/0", 401, b'{"error": "Invalid username or password."}'), ["no such model", "HF_TOKEN"]),
    (answer("/tiny/1", 403, headers={"X-Error-Code": "GatedRepo"}), ["conditions", "/tiny/1", "HF_TOKEN"]),
    (answer("/tiny/2/resolve/main/config.json", 401, headers={"X-Error-Code": "GatedRepo"}),
     ["conditions", "/tiny/2", "HF_TOKEN"]),
    (answer("/tiny/3", 403, headers={"X-Error-Message": "red \x1b[31m"}), ["403", "red \\x1b[31m"]),
    (answer("/tiny/4", 200, b"<html>\n<body>\nPlease log in"), ["HF_ENDPOINT"]),
    (answer(f"/tiny/5/resolve/{COMMIT}/tokenizer.json", 404, headers={"X-Error-Code": "EntryNotFound"}),
     ["there is no such folder", "no such model"])]


def test_answers_of_a_hub(hub, get_all):
    hub.models = {f"tiny/{i}": DEMO for i in range(len(ANSWERS))}
    hub.fault = lambda handler, path: any(fault(handler, path) for fault, _ in ANSWERS)
    outcomes = get_all(*((name,) for name in hub.models), before=IMPATIENT)
    for name, outcome, (_, words) in zip(hub.models, outcomes, ANSWERS):
        assert_refused(outcome, f"{name}: ", *words)


def test_what_is_no_model(hub, get_all):
    half = {name: DEMO[name] for name in ("config.json", "model.safetensors")}
    hub.models = {"tiny/demo": USELESS, "tiny/half": half}
    found = get_all(("tiny/demo",), ("tiny/half",))
    assert_refused(found[0], "tiny/demo: the hub has no model.safetensors and no whole GGUF file of it")
    assert_refused(found[1], "tiny/half: this is not a model folder", "tokenizer.json")
    assert hub.files_asked() == []


def test_a_damaged_index(hub, get_all):
    indices = {b"{": "index.json lists nothing", b'{"weight_map": {"a": 1}}': "index.json lists 1,",
               b'{"weight_map": {"a": "../../x.safetensors"}}': "the download failed"}
    hub.models = {f"tiny/{i}": sharded() | {"model.safetensors.index.json": index, "../../x.safetensors": b""}
                  for i, index in enumerate(indices)}
    for name, outcome, words in zip(hub.models, get_all(*((name,) for name in hub.models)), indices.values()):
        assert_refused(outcome, f"{name}: ", words)
    assert not any("-of-" in name or ".." in name for name in hub.files_asked())


def test_surroundings_that_make_no_sense(get, tmp_path):
    assert_refused(get(before="import sys\nsys.modules['huggingface_hub'] = None"), "tiny/demo", "can't be imported")
    (tmp_path / "file").write_text("a file where the client needs a folder")
    assert_refused(get(HF_HUB_CACHE=str(tmp_path / "file")),
                   "tiny/demo: there is no such folder, and the download failed", str(tmp_path / "file"))


# ---- Folders, files, and what is in the cache ------------------------------------------------------------------------

def test_what_is_there_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("tiny/demo")
    folder.mkdir(parents=True)
    (folder / "readme").write_text("")
    assert "this is not a model folder: it has no config.json, but readme" in message_of(resolve_model, "tiny/demo")
    assert "it is a file" in message_of(resolve_model, "tiny/demo/readme")
    (folder / "a.gguf").write_bytes(b"")
    assert resolve_model("tiny/demo") == resolve_model("tiny/demo/a.gguf") == folder / "a.gguf"
    (folder / "sha256-0123").write_bytes(b"GGUF\3\0\0\0")  # as Ollama calls them
    assert "a.gguf, readme, sha256-0123" in message_of(resolve_model, "tiny/demo")  # the user chooses one
    (folder / "config.json").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("tiny/demo") == folder and resolve_model("~/tiny/demo") == tmp_path / "tiny/demo"


@pytest.mark.parametrize("variables", [
    {"HF_HOME": "/a", "HF_HUB_CACHE": "/c", "HUGGINGFACE_HUB_CACHE": "/d"}, {"HF_HOME": "~/a", "XDG_CACHE_HOME": "/b"},
    {"HF_HUB_CACHE": "$HOME/a${HOME}"}, {"HF_HOME": "", "HUGGINGFACE_HUB_CACHE": "/d"}])
def test_the_cache_is_where_the_client_has_it(environment, tmp_path, variables):
    places = {name for name in environment if name.startswith("HF_")} | {"XDG_CACHE_HOME"}
    clean = {name: value for name, value in environment.items() if name not in places}
    code = ("from qwen3_lib.io.hub import hub_cache; from huggingface_hub import constants; "
            "print(hub_cache(), constants.HF_HUB_CACHE, sep='\\n')")
    done = subprocess.run([sys.executable, "-c", code], env=clean | {"HOME": str(tmp_path)} | variables, text=True,
                          capture_output=True, check=True)
    ours, clients = done.stdout.splitlines()
    assert ours == str(Path(clients))


def as_hub(files, cache, name="tiny--demo"):
    """A model in a cache, whose files are links to blobs -> the snapshot."""
    home = cache / f"models--{name}"
    for folder in (f"snapshots/{COMMIT}", "blobs", "refs"):
        (home / folder).mkdir(parents=True)
    (home / "refs/main").write_text(COMMIT)
    for file, content in files.items():
        blob = hashlib.sha256(content).hexdigest()
        (home / "blobs" / blob).write_bytes(content)
        (home / "snapshots" / COMMIT / file).symlink_to(f"../../blobs/{blob}")
    return home / "snapshots" / COMMIT


def test_cached_models(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    files = {"config.json": b'{"model_type": "llama"}', "a-Q8_0.gguf": b"GGUF", "a-Q4_K_M.gguf": b"GGUF"}
    demo, gguf = as_hub({"config.json": DEMO["config.json"]}, tmp_path), as_hub(files, tmp_path, "Qwen--X-GGUF")
    as_hub({"config.json": b'{"model_type": "llama"}'}, tmp_path, "other--llama")
    for name, commit in {"up": b"..", "absent": b"ffff", "binary": b"\xff", "long": b"a" * 5000}.items():
        (tmp_path / f"models--Qwen--{name}/refs").mkdir(parents=True)
        (tmp_path / f"models--Qwen--{name}/refs/main").write_bytes(commit)
        (tmp_path / f"models--Qwen--{name}/snapshots").mkdir()
    assert cached_models() == [("Qwen/X-GGUF:Q4_K_M", gguf / "a-Q4_K_M.gguf"),
                               ("Qwen/X-GGUF:Q8_0", gguf / "a-Q8_0.gguf"), ("tiny/demo", demo)]
    assert resolve_model(str(demo.parents[1])) == demo  # the model's folder in the cache stands for its snapshot
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nowhere"))
    assert cached_models() == [] and hub_cache() == tmp_path / "nowhere"


# ---- GGUF files ------------------------------------------------------------------------------------------------------

def test_quantizations():
    names = {"Qwen3-8B-Q4_K_M": "Q4_K_M", "Qwen3-8B-UD-Q4_K_XL": "UD-Q4_K_XL", "qwen3-8b.i1-IQ4_XS": "IQ4_XS",
             "Qwen3-0.6B.Q8_0": "Q8_0", "Qwen3-Embedding-0.6B-f16": "f16", "model": "model"}
    for stem, name in names.items():
        assert gguf_names([f"{stem}.gguf"]) == {name: f"{stem}.gguf"}
    same = ["a-Q8_0.gguf", "b-Q8_0.gguf", "b-F16.gguf", "config.json", "sub/sub/a-Q4_0.gguf"]
    assert gguf_names(same) == {"a-Q8_0": "a-Q8_0.gguf", "F16": "b-F16.gguf", "b-Q8_0": "b-Q8_0.gguf"}
    parts = [f"a-{form}-0000{i}-of-00002.gguf" for i in (2, 1) for form in ("UD-Q4_K_XL", "BF16")]
    assert gguf_names(parts) == {"UD-Q4_K_XL": parts[2], "BF16": parts[3]}
    assert gguf_names([f"Q8_0/{name}" for name in parts[1::2]]) == {"BF16": f"Q8_0/{parts[3]}"}
    assert named_gguf(gguf_names(same), "B-q8_0") == "b-Q8_0.gguf" and named_gguf(gguf_names(same), "Q8_0") is None


def test_gguf_files_of_a_hub(hub, get_all, tmp_path):
    name = "Qwen/Qwen3-0.6B-GGUF"
    files = {f"Qwen3-0.6B-{form}.gguf": b"GGUF" + form.encode() for form in ("Q8_0", "Q4_K_M", "UD-Q4_K_M")}
    hub.models = {"tiny/one": {"tiny-Q8_0.gguf": b"GGUF1"} | USELESS, "tiny/demo": DEMO,
                  name: files | USELESS | {"sub/sub/Qwen3-0.6B-Q2_K.gguf": b"GGUF", "config.json": b"{}"}}
    folder = str(tmp_path / "home/hub/models--tiny--one")
    (path, message), *others = get_all(("tiny/one",), ("tiny/one:q8_0", "offline"), (folder, "offline"))
    assert (path.name, path.read_bytes(), message) == ("tiny-Q8_0.gguf", b"GGUF1", "") and others == [(path, "")] * 2
    path.resolve().unlink()  # the link that remains leads nowhere
    hub.requests.clear()
    again, *refused = get_all(("tiny/one:q8_0",), (name,), (f"{name}:Q2_K",), ("tiny/demo:Q8_0",))
    assert again == (path, "") and path.read_bytes() == b"GGUF1" and hub.files_asked() == ["tiny-Q8_0.gguf"]
    for outcome in refused[:2]:
        assert_refused(outcome, f"{name}: choose one of its GGUF files Q4_K_M, Q8_0, UD-Q4_K_M, like {name}:Q4_K_M")
    assert_refused(refused[2], "no whole GGUF file")
    hub.requests.clear()
    (path, message), same, other = get_all(("Qwen3-0.6B-GGUF:q4_k_m",), (name, "offline"), (f"{name}:Q8_0", "offline"))
    assert (path.name, path.read_bytes(), message) == ("Qwen3-0.6B-Q4_K_M.gguf", b"GGUFQ4_K_M", "")
    assert hub.files_asked() == ["Qwen3-0.6B-Q4_K_M.gguf"] and same == (path, "")
    assert_refused(other, "offline", "lacks files")


def test_a_model_in_parts(hub, get_all):
    """All of them, in a folder of the model or not; those that are there aren't downloaded again."""
    parts = [f"Q4_0/tiny-Q4_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    files = {name: b"GGUF" + name.encode() for name in (*parts, "mmproj-F16.gguf", "tiny-Q8_0.gguf")}
    hub.models = {"tiny/parts": files | USELESS, "tiny/torn": dict.fromkeys(parts[:2], b"GGUF") | USELESS}
    outcome, again, torn = get_all(("tiny/parts:q4_0",), ("tiny/parts:Q4_0", "offline"), ("tiny/torn",))
    assert hub.files_asked() == ["mmproj-F16.gguf", *parts] and outcome[1] == "" and again == outcome
    assert outcome[0].parts[-2:] == ("Q4_0", "tiny-Q4_0-00001-of-00003.gguf")
    assert_refused(torn, "tiny/torn: the hub has no Q4_0/tiny-Q4_0-00003-of-00003.gguf, a part of the model")
    outcome[0].with_name("tiny-Q4_0-00002-of-00003.gguf").unlink()
    hub.requests.clear()
    offline, again = get_all(("tiny/parts:Q4_0", "offline"), ("tiny/parts:Q4_0",))
    assert_refused(offline, "lacks files") and hub.files_asked() == []
    assert again == outcome and outcome[0].with_name("tiny-Q4_0-00002-of-00003.gguf").is_file()


def test_a_gguf_model_brings_its_vision_tower(hub, get_all):
    """One file of it, which comes first: when the model is there, so is its tower."""
    towers = {f"mmproj-{form}.gguf": b"GGUF" for form in ("F32", "BF16", "Q8_0")}
    hub.models = {"tiny/seeing": {"tiny-Q8_0.gguf": b"GGUF1", "sub/mmproj-F16.gguf": b"GGUF"} | towers | USELESS}
    outcome, again = get_all(("tiny/seeing:Q8_0",), ("tiny/seeing", "offline"))
    assert hub.files_asked() == ["mmproj-BF16.gguf", "tiny-Q8_0.gguf"] and outcome[1] == "" and again == outcome
    assert {file.name for file in outcome[0].parent.iterdir()} == {*hub.files_asked()}
    assert {path.split("/")[4] for _, path, _ in hub.requests if path.endswith("tiny-Q8_0.gguf")} == {COMMIT}
    for files, name in ((["a.gguf", "b/mmproj.gguf"], None),
                        (["mmproj-x-f32.gguf", "x.mmproj-Q8_0.gguf"], "x.mmproj-Q8_0.gguf"),
                        (["mmproj-F32.gguf", "mmproj-f16.gguf"], "mmproj-f16.gguf"),
                        (["a.mmproj-Q8_0.gguf", "b.mmproj-F16.gguf"], "b.mmproj-F16.gguf")):
        assert tower_name(files) == name
