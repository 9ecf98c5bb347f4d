"""Models by name, against a small hub of our own on the loopback device: what it is asked, what its faults lead to.

The hub's client reads its environment when it is imported, so each run is a process of its own.
"""
import hashlib
import json
import logging
import os
import pty
import random
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from qwen3 import load_model
from qwen3_io.errors import InputError
from qwen3_io.hub import SHORT_NAMES, cached_models, check_blobs, hub_cache, resolve_model

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
DEMO = {name: (ROOT / "demo" / name).read_bytes() for name in NEEDED}
CHUNK = 10 * 2**20  # the client writes so many bytes at a time, and can resume where it has written last
LARGE = DEMO | {"model.safetensors": random.Random(0).randbytes(5 * CHUNK // 2)}
USELESS = {"README.md": b"# Tiny", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"onnx"}
IMPATIENT = "import time; time.sleep = lambda seconds: None  # the client waits before it tries again\n"
CHILD = """
import sys
from qwen3_io.hub import resolve_model
from qwen3_io.errors import InputError
try:
    print(resolve_model(sys.argv[1], offline="offline" in sys.argv[2:]))
except InputError as error:
    sys.exit(str(error))
"""


# ----------------------------------------------------------------------------------------------------------------------
# The hub
# ----------------------------------------------------------------------------------------------------------------------

class Handler(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks about a model, unless the hub's `fault(handler, path)` has answered already."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, path = self.server.hub, unquote(self.path)
        hub.requests.append((self.command, path, self.headers))
        if hub.fault(self, path):
            return
        if (api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/main)?", path)) and api[1] in hub.models:
            siblings = [{"rfilename": name} for name in hub.models[api[1]]]
            self.send(200, json.dumps({"id": api[1], "sha": COMMIT, "siblings": siblings}).encode())
        elif (tree := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.*", path)) and tree[1] in hub.models:  # hf
            files = [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha256(content).hexdigest()}
                     for name, content in hub.models[tree[1]].items()]
            self.send(200, json.dumps(files).encode())
        elif (file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) and file[3] in hub.models[file[1]]:
            self.send_file(hub.models[file[1]][file[3]])
        else:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound" if file else "RepoNotFound"})

    do_HEAD = do_GET

    def send_file(self, content, headers={}):
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT,
                   "Content-Disposition": f'inline; filename="{os.path.basename(self.path)}";'} | headers
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send(206 if start else 200, content[start:], headers)

    def send(self, status, content, headers={}):
        self.send_response(status)
        for name, value in ({"Content-Length": len(content)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def send_half(self, content):
        """The file's head and first half, then nothing: the connection is cut."""
        self.send_file(content[:len(content) // 2], {"Content-Length": len(content)})
        self.close_connection = True

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
def get(environment, tmp_path):
    """A function that resolves a name in a new process -> (path or None, stderr)."""
    def run(name="tiny/demo", *options, before="", **variables):
        done = subprocess.run([sys.executable, "-c", before + CHILD, name, *options], env=environment | variables,
                              cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, bool(done.stdout)) in ((0, True), (1, False)), done.stderr
        return (Path(done.stdout.removesuffix("\n")) if done.stdout else None), done.stderr

    return run


def assert_refused(outcome, *words):
    """The name was refused, with one line that has all `words`."""
    path, message = outcome
    assert path is None and len(message.splitlines()) == 1 and "Traceback" not in message, message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


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


# ----------------------------------------------------------------------------------------------------------------------
# What works
# ----------------------------------------------------------------------------------------------------------------------

def test_a_download_asks_for_what_is_needed_and_only_once(hub, get):
    outcome = get()
    assert_complete(outcome)
    assert sorted(hub.files_asked()) == sorted(NEEDED) and hub.files_asked()[-1] == "model.safetensors"
    assert set(hub.files_asked("HEAD")) == set(NEEDED)
    commits = {path.split("/")[4] for _, path, _ in hub.requests if "/resolve/" in path and "/config.json" not in path}
    assert commits == {COMMIT}  # and not "main", which may be another one by then
    hub.requests.clear()
    assert get() == outcome and hub.requests == []


def test_the_cache_is_enough_without_a_hub(hub, get):
    outcome = get()
    hub.stop()
    assert get() == get("tiny/demo", "offline") == get(HF_HUB_OFFLINE="1") == outcome


@pytest.mark.parametrize("options, variables", [(["offline"], {}), ([], {"HF_HUB_OFFLINE": "1"})])
def test_offline_without_the_model(hub, get, options, variables):
    assert_refused(get("tiny/demo", *options, **variables), "tiny/demo", "cache", "offline", "hf download tiny/demo")
    assert hub.requests == []


def test_a_folder_comes_first_and_needs_no_client(hub, get, tmp_path):
    (tmp_path / "tiny/demo").mkdir(parents=True)
    assert get()[0] == Path("tiny/demo") and hub.requests == []
    assert get("~/tiny", HOME=str(tmp_path))[0] == tmp_path / "tiny"
    code = "import sys; from qwen3_io import hub; hub.resolve_model('demo'); sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_short_name_is_one_of_qwen(hub, get):
    hub.models = {"Qwen/Qwen3-0.6B": DEMO}
    assert_complete(get("0.6b"))
    assert hub.files_asked()
    assert all(path.startswith(("/Qwen/Qwen3-0.6B/", "/api/models/Qwen/Qwen3-0.6B", "/api/agent"))
               for _, path, _ in hub.requests)
    assert set(SHORT_NAMES) == {"0.6B", "1.7B", "4B", "8B", "14B", "32B"}


@pytest.mark.parametrize("name, repo_id", [
    ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("qwen3-0.6b", "Qwen/Qwen3-0.6B"), ("QWEN3-4B-THINKING-2507",
    "Qwen/Qwen3-4B-Thinking-2507"), ("qwen/qwen3-8b-base", "Qwen/Qwen3-8B-Base"), ("Qwen3-My-own", "Qwen/Qwen3-My-own"),
    ("qwen3-embedding-0.6b", "Qwen/Qwen3-Embedding-0.6B"), ("other/qwen3-0.6b", "other/qwen3-0.6b"), ("14b",
    "Qwen/Qwen3-14B"),
])
def test_a_name_without_its_owner_is_of_qwen(hub, get, tmp_path, name, repo_id):
    hub.models = {repo_id: DEMO}
    outcome = get(name)
    assert_complete(outcome)
    assert outcome[0].parents[1].name == "models--" + repo_id.replace("/", "--")
    assert get(repo_id, "offline") == outcome
    (tmp_path / name).mkdir(parents=True)
    assert get(name)[0] == Path(name)


def test_a_sharded_model(hub, get):
    hub.models["tiny/demo"] = sharded() | USELESS | {"adapter.safetensors": b"not in the index"}
    outcome = get()
    assert_complete(outcome, sharded())
    assert hub.files_asked()[-3:] == sorted(name for name in sharded() if "-of-" in name)
    hub.requests.clear()
    assert get() == outcome and hub.requests == []


def test_the_token_is_sent(hub, get):
    assert_complete(get(HF_TOKEN="hf_secret"))
    assert {headers.get("Authorization") for _, path, headers in hub.requests if path != "/api/agent-harnesses"} == {
        "Bearer hf_secret"}


def test_the_progress_bar_is_for_terminals(environment, tmp_path):
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (25, 80))
    process = subprocess.Popen([sys.executable, "-c", CHILD, "tiny/demo"], env=environment, cwd=tmp_path,
                               stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux's way to say that nobody has the terminal open any more
            break
    os.close(terminal)
    assert process.wait(30) == 0
    lines = re.split(r"[\r\n]+", shown.decode().strip())
    assert any(line.startswith("model.safetensors: 100%") for line in lines), lines
    assert all(line.startswith(tuple(f"{name}: " for name in NEEDED)) for line in lines), lines


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variables", [
    {}, {"HF_HOME": "/a"}, {"XDG_CACHE_HOME": "/b"}, {"HF_HUB_CACHE": "/c"}, {"HUGGINGFACE_HUB_CACHE": "/d"},
    {"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}, {"HF_HOME": "/a", "HF_HUB_CACHE": "/c", "HUGGINGFACE_HUB_CACHE": "/d"},
    {"HF_HOME": "/a", "HUGGINGFACE_HUB_CACHE": "/d"}, {"HF_HOME": "~/a"}, {"HF_HUB_CACHE": "$HOME/a${HOME}"},
    {"HF_HOME": ""}, {"HF_HUB_CACHE": ""}, {"HUGGINGFACE_HUB_CACHE": ""}, {"XDG_CACHE_HOME": ""},
    {"XDG_CACHE_HOME": "~/b"}, {"HF_HOME": "$NOTHING/a"}, {"HF_HOME": "~nobody/a"},
])
def test_the_cache_is_where_the_client_has_it(environment, tmp_path, variables):
    places = {name for name in environment if name.startswith("HF_")} | {"XDG_CACHE_HOME"}
    clean = {name: value for name, value in environment.items() if name not in places}
    code = ("import sys; from qwen3_io.hub import hub_cache; ours = hub_cache(); "
            "assert 'huggingface_hub' not in sys.modules; from huggingface_hub import constants; "
            "print(ours, constants.HF_HUB_CACHE, sep='\\n')")
    done = subprocess.run([sys.executable, "-c", code], env=clean | {"HOME": str(tmp_path)} | variables, text=True,
                          capture_output=True, check=True)
    ours, clients = done.stdout.splitlines()
    assert ours == str(Path(clients))


def test_cached_models(hub, get, tmp_path, monkeypatch):
    other = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": b""}
    hub.models = {"tiny/demo": DEMO, "other/llama": other, "other/my-qwen": other, "Qwen/Qwen3-0.6B": DEMO}
    folders = {name: get(name)[0] for name in hub.models}
    cache = tmp_path / "home/hub"
    for useless in ("models--Qwen--empty", "datasets--Qwen--Qwen", "models--Qwen3", "version.txt"):
        (cache / useless).mkdir()
    for name, commit in {"up": "..", "absent": COMMIT, "binary": "\udcff", "long": "a" * 5000}.items():
        (cache / f"models--Qwen--{name}/refs").mkdir(parents=True)
        (cache / f"models--Qwen--{name}/refs/main").write_bytes(commit.encode(errors="surrogateescape"))
        (cache / f"models--Qwen--{name}/snapshots").mkdir()
    del folders["other/llama"]
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    assert cached_models() == sorted(folders.items())
    (folders["tiny/demo"] / "config.json").unlink()  # nothing says any more that this one is of Qwen's kind
    assert [name for name, _ in cached_models()] == ["Qwen/Qwen3-0.6B", "other/my-qwen"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nowhere"))
    assert cached_models() == [] and hub_cache() == tmp_path / "nowhere"


def test_a_folder_of_the_cache_stands_for_its_main_snapshot(hub, get, tmp_path):
    folder, _ = get()
    home = folder.parents[1]
    (home / "snapshots/ffff").mkdir()  # of another commit, not the main branch's
    assert get(str(home)) == get(f"{home}/", "offline") == (folder, "")
    (home / "refs/main").unlink()
    assert get(str(home))[0] == home
    with pytest.raises(InputError, match="cache keeps the model below this folder; give .*/snapshots/"):
        load_model(home)
    (home / "refs/main").write_text(COMMIT)
    assert load_model(home).path == folder
    (home / "config.json").write_bytes(DEMO["config.json"])  # then it is a model's folder itself
    assert get(str(home))[0] == home


def as_hub(files, cache):
    """A model in a cache as the hub has it: LFS files by SHA-256, others by git's name for them -> the snapshot."""
    home = cache / "models--tiny--demo"
    folder = home / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (home / "blobs").mkdir()
    for file, content in files.items():
        if file.endswith((".safetensors", "tokenizer.json")):
            name = hashlib.sha256(content).hexdigest()
        else:
            hashed = ["git", "hash-object", "--no-filters", "--stdin"]
            name = subprocess.run(hashed, input=content, capture_output=True, check=True).stdout.decode().strip()
        (home / "blobs" / name).write_bytes(content)
        (folder / file).symlink_to(f"../../blobs/{name}")
    return folder


def test_damaged_files_of_the_cache_are_named(tmp_path):
    folder = as_hub(sharded(), tmp_path)
    assert check_blobs(folder) == []
    for file, content in sharded().items():
        blob = (folder / file).resolve()
        for damaged in (content[:-1], content + b"\0", b"", bytes([content[0] ^ 1]) + content[1:]):
            blob.write_bytes(damaged)
            assert check_blobs(folder) == [file]
        blob.unlink()
        assert check_blobs(folder) == [file]
        blob.write_bytes(content)
    for file in ("config.json", "tokenizer.json"):
        (folder / file).resolve().write_bytes(b"{}")
    assert check_blobs(folder) == ["config.json", "tokenizer.json"]


def test_a_blob_that_several_models_share_is_checked(tmp_path):
    """The client may keep one copy below the whole cache's blobs/, under a name of its own."""
    folder = as_hub(DEMO, tmp_path)
    blob, shared = (folder / "model.safetensors").resolve(), tmp_path / "blobs/ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert check_blobs(folder) == []
    shared.write_bytes(b"damaged")
    assert check_blobs(folder) == ["model.safetensors"]


def test_a_folder_without_checksums_cannot_be_checked(tmp_path):
    for place in (ROOT / "demo", tmp_path):
        with pytest.raises(InputError, match="nothing to compare with"):
            check_blobs(place)
    (tmp_path / ("ab" * 32)).write_bytes(b"of the user's own")
    (tmp_path / "model.safetensors").symlink_to("ab" * 32)
    with pytest.raises(InputError, match="nothing to compare with"):
        check_blobs(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# What was broken off
# ----------------------------------------------------------------------------------------------------------------------

def test_an_incomplete_cache_is_completed(hub, get):
    hub.models["tiny/demo"] = sharded()
    folder, _ = get()
    shard = folder / "model-00002-of-00003.safetensors"
    shard.resolve().unlink()  # the link that remains leads nowhere
    hub.requests.clear()
    assert_refused(get("tiny/demo", "offline"), "not completely", "offline")
    assert_complete(get(), sharded())
    assert hub.files_asked() == [shard.name]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_cache_without_a_needed_file_is_not_complete(hub, get, name):
    folder, _ = get()
    (folder / name).unlink()
    assert_refused(get("tiny/demo", "offline"), "not completely", "offline")
    hub.requests.clear()
    assert_complete(get())
    assert f"/tiny/demo/resolve/{'main' if name == 'config.json' else COMMIT}/{name}" in [
        path for verb, path, _ in hub.requests if verb == "HEAD"]


@pytest.mark.parametrize("index", [
    b"", b"{", b"[]", b"{}", b"\xff", b"[" * 10**5, b'{"weight_map": {}}', b'{"weight_map": []}',
    b'{"weight_map": {"a": 1}}', b'{"weight_map": {"a": "\\u0000.safetensors"}}',
])
def test_a_damaged_index(hub, get, index):
    hub.models["tiny/demo"] = sharded() | {"model.safetensors.index.json": index}
    assert_refused(get(), "tiny/demo: model.safetensors.index.json lists", "delete")
    assert not any("-of-" in name for name in hub.files_asked())
    assert_refused(get("tiny/demo", "offline"), "not completely")


def test_a_cut_connection_is_resumed(hub, get):
    hub.models["tiny/demo"] = LARGE

    def cut_once(handler, path):
        if path.endswith("/model.safetensors") and handler.command == "GET" and "Range" not in handler.headers:
            handler.send_half(LARGE["model.safetensors"])
            return True

    hub.fault = cut_once
    assert_complete(get(), LARGE)
    assert [headers["Range"] for _, _, headers in hub.requests if "Range" in headers] == [f"bytes={CHUNK}-"]


def test_a_cut_connection_that_stays_cut(hub, get):
    hub.models["tiny/demo"] = LARGE

    def cut(handler, path):
        if path.endswith("/model.safetensors") and handler.command == "GET":
            if "Range" not in handler.headers:
                handler.send_half(LARGE["model.safetensors"])
            handler.close_connection = True
            return True

    hub.fault = cut
    assert_refused(get(before=IMPATIENT), "no connection", "run the same command again")
    assert_refused(get("tiny/demo", "offline"), "not completely")
    hub.fault = lambda handler, path: False
    hub.requests.clear()
    assert_complete(get(), LARGE)
    assert hub.files_asked() == ["model.safetensors"]


def wait_until_asleep(pid):
    """Returns when a process waits in the system. Python handles an earlier signal only after the wait."""
    deadline, asleep = time.monotonic() + 120, 0
    while asleep < 20 and time.monotonic() < deadline:
        asleep = asleep + 1 if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "S" else 0
        time.sleep(0.01)


def test_ctrl_c_stops_a_download_at_once(hub, get, environment, tmp_path):
    """The hub keeps the connection open to the end of the test: a process that ends earlier did not wait for it."""
    reached = threading.Event()

    def trickle(handler, path):
        if path.endswith("/model.safetensors") and handler.command == "GET":
            handler.send_half(DEMO["model.safetensors"])
            reached.set()
            hub.closing.wait()
            return True

    hub.fault = trickle
    process = subprocess.Popen([sys.executable, "-c", CHILD, "tiny/demo"], env=environment, cwd=tmp_path,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert reached.wait(120)
    wait_until_asleep(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1].endswith("KeyboardInterrupt\n")
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.fault = lambda handler, path: False
    assert_complete(get())


# ----------------------------------------------------------------------------------------------------------------------
# What goes wrong
# ----------------------------------------------------------------------------------------------------------------------

def answer_api(status, content=b"", headers={}):
    """A fault: the question about the model is answered so."""
    def fault(handler, path):
        if path.startswith("/api/models/"):
            handler.send(status, content, headers)
            return True

    return fault


def answer_file(name, status=200, content=b"", **headers):
    """A fault: requests for the file are answered so."""
    def fault(handler, path):
        if path.endswith("/" + name):
            handler.send(status, content, {key.replace("_", "-"): value for key, value in headers.items()})
            return True

    return fault


@pytest.mark.parametrize("fault, words", [
    (answer_api(404, headers={"X-Error-Code": "RepoNotFound"}), ["no such model", "check the name"]),
    (answer_api(404), ["no such model", "check the name"]),
    (answer_api(401, b'{"error": "Invalid username or password."}'), ["no such model", "HF_TOKEN"]),
    (answer_api(401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}), ["HF_TOKEN"]),
    (answer_api(403, headers={"X-Error-Code": "GatedRepo"}), ["conditions", "/tiny/demo", "HF_TOKEN"]),
    (answer_file("config.json", 401, X_Error_Code="GatedRepo"), ["conditions", "/tiny/demo", "HF_TOKEN"]),
    (answer_api(403, headers={"X-Error-Message": "red \x1b[31m"}), ["403", "red \\x1b[31m"]),
    (answer_api(429, b"slow\ndown" * 1000), ["429", "try again later"]),
    (answer_api(500, b"<html>\n<body>\nout of order", {"Content-Type": "text/html"}), ["500", "try again later"]),
    (answer_api(200, b"<html>\n<body>\nPlease log in"), ["HF_ENDPOINT", "login"]),
    (answer_api(200, b"[]"), ["HF_ENDPOINT"]),
    (answer_api(200, b"{}"), ["HF_ENDPOINT"]),
    (answer_api(200, b'{"id": "tiny/demo", "siblings": [{}]}'), ["HF_ENDPOINT"]),
    (answer_api(200, b'{"id": "tiny/demo", "siblings": [{"rfilename": 1}]}'), ["HF_ENDPOINT"]),
    (answer_api(200, b'{"id": "tiny/demo"}'), ["no config.json"]),
    (answer_api(200, b"[" * 10**5), ["tiny/demo"]),
    (answer_file("config.json", content=b"{}"), ["X-Repo-Commit", "HF_ENDPOINT"]),
    (answer_file("config.json", content=b"{}", X_Repo_Commit=COMMIT), ["ETag", "HF_ENDPOINT"]),
    (answer_file("tokenizer.json", 404, X_Error_Code="EntryNotFound"), ["tiny/demo"]),
])
def test_answers_of_a_hub(hub, get, fault, words):
    hub.fault = fault
    assert_refused(get(), "tiny/demo: ", *words)


@pytest.mark.parametrize("absent, words", [
    (["config.json"], ["no config.json on the hub"]),
    (["tokenizer.json"], ["no tokenizer.json on the hub"]),
    (["model.safetensors"], ["no model.safetensors or model.safetensors.index.json on the hub;"]),
    (NEEDED, ["no config.json, no tokenizer.json, no model.safetensors"]),
])
def test_a_model_that_lacks_a_file_is_refused_before_any_is_downloaded(hub, get, absent, words):
    hub.models["tiny/demo"] = {name: content for name, content in (DEMO | USELESS).items() if name not in absent}
    assert_refused(get(), "tiny/demo: has", *words)
    assert hub.files_asked() == hub.files_asked("HEAD") == []


def test_a_file_of_the_wrong_size(hub, get):
    def longer(handler, path):
        if path.endswith("/model.safetensors") and handler.command == "HEAD":
            handler.send_file(DEMO["model.safetensors"], {"Content-Length": len(DEMO["model.safetensors"]) + 1})
            return True

    hub.fault = longer
    assert_refused(get(), "tiny/demo: the download failed", "size", "run the same command again")
    assert_refused(get("tiny/demo", "offline"), "not completely")


def test_no_hub(hub, get):
    hub.stop()
    assert_refused(get(), "tiny/demo: no connection", "check the network", "run the same command again")


@pytest.mark.parametrize("endpoint", ["http://no-such-host.invalid", "nonsense", "ftp://127.0.0.1", "http://[",
                                      "http://127.0.0.1:x"])
def test_a_wrong_endpoint(get, endpoint):
    assert_refused(get(HF_ENDPOINT=endpoint), "tiny/demo", "HF_")


@pytest.mark.parametrize("place", ["/api/models/tiny/demo", f"/tiny/demo/resolve/{COMMIT}/tokenizer.json"])
def test_a_hub_that_does_not_answer(hub, get, place):
    hub.fault = lambda handler, path: path == place and handler.command == "GET" and hub.closing.wait(60)
    start = time.monotonic()
    outcome = get(before=IMPATIENT, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert_refused(outcome, "tiny/demo", "takes too long", "run the same command again")
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("failing", [
    "open('/dev/full', 'wb', 0).write(b'a')",
    "exec('import errno; raise OSError(errno.EDQUOT, str(errno.EDQUOT))')",
    "exec('raise RuntimeError(\"Task error: No space left on device (os error 28)\")')",  # as hf_xet does
])
def test_a_full_disk(get, failing):
    before = f"import huggingface_hub.file_download as d; d.http_get = lambda *args, **options: {failing}\n"
    assert_refused(get(before=before), "tiny/demo: the disk", "is full", "HF_HOME")


def test_the_client_warns_of_nothing(get):
    nearly_full = "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1, 1, 0)\n"
    assert_complete(get(before=nearly_full))


@pytest.mark.parametrize("inside", ["", "models--tiny--demo", "models--tiny--demo/blobs",
                                    "models--tiny--demo/refs/main/a"])
def test_a_cache_that_cannot_be_written(get, tmp_path, inside):
    place = tmp_path / "cache" / inside
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("a file where the client needs a folder, or the reverse")
    assert_refused(get(HF_HUB_CACHE=str(tmp_path / "cache")), "tiny/demo: the hub's cache", "HF_HOME")


def test_a_setting_that_makes_no_sense(get):
    assert_refused(get(HF_HUB_DOWNLOAD_TIMEOUT="soon"), "tiny/demo", "'soon'", "HF_")
    assert_refused(get(HF_TOKEN="t\u00f6ken"), "tiny/demo: HF_TOKEN can't be sent")
    assert_refused(get(before="import sys\nsys.modules['huggingface_hub'] = None"), "tiny/demo", "install")


# ----------------------------------------------------------------------------------------------------------------------
# Names
# ----------------------------------------------------------------------------------------------------------------------

NO_MODELS = [
    "", " ", "\n", ".", "..", "/", "//", "~nobody", "~\0", "~\ud800", "\0", "a\0/b", "a/b\0", "\ud800", "\ud800/b",
    "gpt2", "0.6", "B", "0.7B", "0.6B ", "0.6\uff22", "a/b/c", "a/b/", "/a/b", "./a", "../a", "~/a", "a\\b", "a/b\\c",
    "C:\\a", "C:/a", "a//b", "/a", "a/", "-a/b", "a/b.git", "a--b/c", "a/b..c", "a/.b", "a/b.", "a b/c", "a/b c",
    "a/b\n", "\u00e9/a", "a/\u6a21", "a/b?x=1", "a/b#c", "a/b@main", "https://huggingface.co/a/b", "hf://a/b",
    "a/" + "b" * 97, "b" * 97 + "/a", "b" * 5000, "b" * 5000 + "/a", "a/" * 5000, "\x1b[31m/a", "a\u2028b", "a\rb\x85c",
    "--help", "%s/%s", "{}/{}", "a/b%2f..",
]


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """This process has an empty cache, an empty folder to be in, and no way to open a connection."""
    import huggingface_hub.constants

    def refuse(*args):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def refusal(name, **options):
    """The one line with which a name is refused, or None for a folder."""
    try:
        assert resolve_model(name, **options).is_dir()
        return None
    except InputError as error:
        message = str(error)
        assert len(message.splitlines()) == 1 and len(message) < 1000 and message.encode(), message
        assert all(c.isprintable() for c in message), message
        return message


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_never_looked_up(no_network, name):
    message = refusal(name)
    assert (message is None) == (name in (".", "..", "/", "//"))
    assert message is None or "no such folder" in message and "Qwen/Qwen3-0.6B" in message


def test_a_file_is_no_folder(no_network):
    Path("owner").mkdir()
    for file in ("weights", "owner/model"):
        Path(file).write_text("")
        assert "not a folder" in refusal(file)
    assert "no such folder" in refusal("owner/model/")
    Path("0.6B").mkdir()
    assert resolve_model("0.6B") == Path("0.6B")


@pytest.mark.parametrize("file, content", [("model.gguf", b""), ("MODEL.GGUF", b"a"), ("sha256-0123", b"GGUF\3\0\0\0")])
def test_a_gguf_file_is_a_model(no_network, file, content):
    Path(file).write_bytes(content)
    assert resolve_model(file) == Path(file)
    Path("folder").mkdir()
    Path("folder/a.gguf").write_bytes(content)
    assert resolve_model("folder") == Path("folder/a.gguf")
    Path("folder/b.gguf").write_bytes(content)
    assert resolve_model("folder") == Path("folder")  # which one is not for us to choose


def test_a_file_of_a_model_is_not_the_model(no_network):
    message = refusal(str(ROOT / "demo/model.safetensors"))
    assert "not a folder" in message and message.endswith(f"give {ROOT / 'demo'}")
    os.mkfifo("fifo")  # reading it would wait for ever
    assert "not a folder" in refusal("fifo") and "give" not in refusal("fifo")


def test_random_names(no_network):
    import huggingface_hub.file_download  # noqa: F401  the first import sets its log level
    rng = random.Random(0)
    alphabets = ["ab/", "ab./-_", "aB0.~/\\ :", "abc/\0\n\t\x1b\u2028\u00e9\u6a21\U0001f600\ud800",
                 [chr(code) for code in range(1, 0x11000)]]
    valid, level = 0, logging.getLogger("huggingface_hub").level
    for _ in range(4000):
        name = "".join(rng.choices(rng.choice(alphabets), k=rng.choice([1, 3, 5, 8, 40, 300])))
        message = refusal(name, offline=True)
        valid += message is not None and "offline" in message
    assert valid > 100  # ids that could be of the hub were among them
    assert logging.getLogger("huggingface_hub").level == level  # who uses this as a library gets the client's log back
