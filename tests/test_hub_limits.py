"""What a hub with bad intentions meets: limits on sizes, rates and waiting times, and a token that stays at home."""
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qwen3_io.hub import WINDOW, Watch
from test_hub import (  # noqa: F401  the fixtures are used by name
    COMMIT, DEMO, IMPATIENT, LARGE, Hub, answer_api, answer_file, assert_complete, assert_refused, environment, get,
    hub, sharded)

pytestmark = pytest.mark.core


# ----------------------------------------------------------------------------------------------------------------------
# A hub without end
# ----------------------------------------------------------------------------------------------------------------------

QUICK = IMPATIENT + "from qwen3_io import hub; hub.WINDOW = 1\n"


def trickle(handler, head, more, pause=0.1):
    """Sends the head and then, for ever, a little more."""
    handler.wfile.write(head)
    while not handler.server.hub.closing.wait(pause):
        handler.wfile.write(more)


ANSWERS = {"head": (b"HTTP/1.1 200 OK\r\n", b"a"), "line": (b"HTTP/1.1 20", b"0"),
           "informed": (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
           "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"["),
           "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n[\r\n"),
           "size of a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0")}


HEADS = ("head", "line", "informed")


@pytest.mark.parametrize("method, place, kind", [
    *(("GET", "/api/models/tiny/demo", kind) for kind in ANSWERS), *(("HEAD", "/config.json", kind) for kind in HEADS),
    *(("GET", "/model.safetensors", kind) for kind in ANSWERS)])
def test_a_hub_that_trickles(hub, get, tmp_path, method, place, kind):
    hub.fault = lambda handler, path: path.endswith(place) and handler.command == method and (
        trickle(handler, *ANSWERS[kind]) or True)
    slow = place == "/model.safetensors" and kind not in HEADS
    words = ["too slowly, fewer than 1000 bytes a second"] if slow else ["more than 1 seconds for an answer"]
    assert_refused(get(before=QUICK), "tiny/demo: ", *words, "run the same command again")
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.fault = lambda handler, path: False
    assert_complete(get())


def test_a_slow_hub_that_is_fast_enough(hub, get):
    """The file takes several windows, at more than the slowest rate in each."""
    def slow(handler, path):
        if path.endswith("/tokenizer.json") and handler.command == "GET":
            content = DEMO["tokenizer.json"]
            handler.send_file(b"", {"Content-Length": len(content)})
            for part in range(5):
                handler.wfile.write(content[len(content) * part // 5:len(content) * (part + 1) // 5])
                hub.closing.wait(0.7)
            return True

    hub.fault = slow
    assert len(DEMO["tokenizer.json"]) > 10000 and WINDOW == 60
    assert_complete(get(before=QUICK))


ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: a\r\n\r\n"
MANY = b"10000\r\n" + b" " * 2**16 + b"\r\n"


@pytest.mark.parametrize("place, words", [
    ("/api/models/tiny/demo", ["more than 16777216 bytes for an answer"]),
    ("/tokenizer.json", [f"more than {len(DEMO['tokenizer.json'])} bytes for tokenizer.json"]),
    ("/model.safetensors", [f"more than {len(DEMO['model.safetensors'])} bytes for model.safetensors"]),
])
def test_a_hub_that_sends_for_ever(hub, get, tmp_path, place, words):
    hub.fault = lambda handler, path: path.endswith(place) and handler.command == "GET" and (
        trickle(handler, ENDLESS, MANY, pause=0) or True)
    assert_refused(get(), "tiny/demo: ", *words)
    assert not list(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize("name, size, words", [
    ("tokenizer.json", 2**26 + 1, ["tokenizer.json with 67108865 bytes"]),
    ("config.json", 10**17, ["config.json with 100000000000000000 bytes"]),
    ("model.safetensors", 10**11, ["model.safetensors with 100000000000 bytes"]),
])
@pytest.mark.parametrize("header", ["Content-Length", "X-Linked-Size"])
def test_a_size_that_cannot_be_right(hub, get, header, name, size, words):
    def announce(handler, path):
        if path.endswith("/" + name) and handler.command == "HEAD":
            handler.send_file(DEMO[name], {header: size})
            return True

    hub.fault = announce
    assert_refused(get(), "tiny/demo: ", *words)
    assert name not in hub.files_asked()


def test_a_file_without_a_size(hub, get):
    """A hub need not say how large a small file is, if it is indeed small."""
    def chunked(handler, path):
        name = path.rpartition("/")[2]
        if "/resolve/" in path and name == "tokenizer.json":
            handler.send_response(200)
            for header in (("ETag", '"a"'), ("X-Repo-Commit", COMMIT), ("Transfer-Encoding", "chunked")):
                handler.send_header(*header)
            handler.end_headers()
            if handler.command == "GET":
                handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DEMO[name]), DEMO[name]))
            return True

    hub.fault = chunked
    assert_complete(get())


def test_a_hub_that_packs_unasked(hub, get):
    bomb = gzip.compress(bytes(2**20))
    hub.fault = answer_api(200, bomb, {"Content-Encoding": "gzip"})
    assert_refused(get(), "tiny/demo: ", "packed by gzip")
    assert {headers["Accept-Encoding"] for _, _, headers in hub.requests} == {"identity"}


def test_a_hub_that_begins_again_and_again(hub, get):
    """It cuts each answer and doesn't resume: each time, the client begins anew and counts that as progress."""
    hub.models["tiny/demo"] = LARGE

    def cut(handler, path):
        if path.endswith("/model.safetensors") and handler.command == "GET":
            del handler.headers["Range"]
            handler.send_half(LARGE["model.safetensors"])
            return True

    hub.fault = cut
    assert_refused(get(before=IMPATIENT), "tiny/demo: ", "begins again and again", "run the same command again")
    assert len(hub.files_asked()) < 20


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [{"Retry-After": "86400"}, {"Retry-After": "9" * 5000},
                                     {"RateLimit": '"api";r=0;t=299'}])
@pytest.mark.parametrize("place", ["config.json", "model.safetensors"])
def test_a_hub_that_asks_to_wait_long(hub, get, place, status, headers):
    def refuse(handler, path):
        if path.endswith("/" + place):
            handler.send(status, b"", headers)
            return True

    hub.fault = refuse
    assert_refused(get(), "tiny/demo: ", "asks to wait", "run the same command again then")


# ----------------------------------------------------------------------------------------------------------------------
# The token
# ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def elsewhere():
    """A second server: on the same machine, but not the endpoint."""
    hub = Hub()
    yield hub
    hub.stop()


def tokens(hub):
    return {headers.get("Authorization") for _, path, headers in hub.requests if path != "/api/agent-harnesses"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_the_token_does_not_follow_a_redirect(hub, elsewhere, get, host, method):
    """As of the hub's large files, to servers whose addresses carry a permission of their own."""
    there = f"http://{host}:{elsewhere.server_port}"

    def redirect(handler, path):
        if path.endswith("/model.safetensors") and (method == "HEAD" or handler.command == "GET"):
            content = DEMO["model.safetensors"]
            handler.send(302, b"", {"Location": there + path, "X-Linked-Size": len(content), "X-Repo-Commit": COMMIT,
                                    "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"'})
            return True

    hub.fault = redirect
    assert_complete(get(HF_TOKEN="hf_secret", NO_PROXY="127.0.0.1,localhost"))
    assert tokens(hub) == {"Bearer hf_secret"}
    assert elsewhere.files_asked() == ["model.safetensors"] and tokens(elsewhere) == {None}


def test_the_token_does_not_follow_a_redirected_question(hub, elsewhere, get):
    def redirect(handler, path):
        if path.startswith("/api/models/"):
            handler.send(307, b"", {"Location": f"http://127.0.0.1:{elsewhere.server_port}{path}"})
            return True

    hub.fault = redirect
    assert_complete(get(HF_TOKEN="hf_secret"))
    assert tokens(hub) == {"Bearer hf_secret"} and tokens(elsewhere) == {None}


def test_the_token_stays_with_an_endpoint_that_redirects_to_the_hub_itself(hub):
    """The client takes huggingface.co for the endpoint's equal; the token may be of the mirror alone."""
    import huggingface_hub.utils
    sent = []

    def answer(request):
        sent.append((request.url.host, request.headers.get("Authorization")))
        home = request.url.host == "mirror.example"
        return httpx.Response(302 if home else 200, headers={"Location": "https://huggingface.co/a"} if home else {})

    httpx = huggingface_hub.utils.httpx
    watch = Watch(SimpleNamespace(constants=SimpleNamespace(ENDPOINT="https://mirror.example",
                                                            HF_HUB_DOWNLOAD_TIMEOUT=1), utils=huggingface_hub.utils))
    client = watch.over(httpx.Client(transport=httpx.MockTransport(answer), follow_redirects=False))
    for url in ("https://mirror.example/a", "https://huggingface.co/a", "http://mirror.example/a",
                "https://mirror.example:8443/a", "https://mirror.example:443/a"):
        client.get(url, headers={"Authorization": "Bearer hf_secret"})
    assert [token for _, token in sent] == ["Bearer hf_secret", None, None, None, "Bearer hf_secret"]


@pytest.mark.parametrize("route", ["X-Xet-Refresh-Route", "Link"])
def test_xet_is_never_asked(hub, elsewhere, get, tmp_path, route):
    """Its routes, which the client would follow with the token, may lead anywhere."""
    there = f"http://127.0.0.1:{elsewhere.server_port}/token"
    storage = {"X-Xet-Hash": "ab" * 32, route: f'<{there}>; rel="xet-auth"' if route == "Link" else there}

    def offer(handler, path):
        if path.endswith("/model.safetensors"):
            handler.send_file(DEMO["model.safetensors"], storage)
            return True

    hub.fault = offer
    assert_complete(get(HF_TOKEN="hf_secret"))
    assert elsewhere.requests == []


def test_the_client_is_left_as_it_was(hub, environment, tmp_path):
    """Who uses this as a library has the client's own settings afterwards, after an error, too."""
    code = """
import huggingface_hub
from huggingface_hub.utils import _http
from qwen3_io.hub import resolve_model
from qwen3_io.errors import InputError
made = []
def factory():
    made.append(_http.default_client_factory())
    return made[-1]
huggingface_hub.set_client_factory(factory)
for name in ("tiny/demo", "tiny/absent"):
    try:
        resolve_model(name)
    except InputError:
        print("refused", name)
    assert made and _http._GLOBAL_CLIENT_FACTORY is factory and not huggingface_hub.constants.HF_HUB_DISABLE_XET
    assert _http.get_session().event_hooks == {"request": [_http.hf_request_event_hook], "response": []}
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "refused tiny/absent\n"), done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# File names and headers
# ----------------------------------------------------------------------------------------------------------------------

def outside(tmp_path):
    """All files beside the client's home."""
    return sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "home"))


@pytest.mark.parametrize("name", [
    "../../../../../escaped.safetensors", "..\\..\\escaped.safetensors", "sub/../escaped.safetensors",
    "{tmp}/escaped.safetensors", "C:\\escaped.safetensors", "C:escaped.safetensors", "..",
])
def test_file_names_that_lead_out_of_the_cache(hub, get, tmp_path, name):
    name = name.format(tmp=tmp_path)
    hub.models["tiny/demo"] = DEMO | {name: b"evil"}
    assert_complete(get())
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.models["tiny/demo"] = sharded() | {"model.safetensors.index.json": index, name: b"evil"}
    shutil.rmtree(tmp_path / "home")
    assert_refused(get())
    assert outside(tmp_path) == [] and not list(tmp_path.rglob("*escaped*"))
    assert not any("escaped" in path for _, path, _ in hub.requests)


@pytest.mark.parametrize("status, header, value", [
    (200, "ETag", '"{tmp}/escaped"'), (200, "ETag", "../../../../../escaped"), (200, "ETag", 'W/"../../escaped"'),
    (200, "ETag", "..\\escaped"), (200, "X-Linked-Etag", '"{tmp}/escaped"'),
    (200, "ETag", ".."), (200, "ETag", '".."'), (200, "ETag", 'W/".."'), (200, "ETag", "."), (200, "ETag", ""),
    (200, "ETag", '""'), (200, "ETag", "W/"), (200, "ETag", "a" * 300), (200, "ETag", "a\tb"), (200, "ETag", "\xe9"),
    (200, "ETag", "C:a"), (200, "X-Linked-Etag", ".."), (200, "X-Repo-Commit", ".."), (200, "X-Repo-Commit", "."),
    (200, "X-Repo-Commit", ""), (200, "X-Repo-Commit", "a" * 300), (404, "X-Repo-Commit", ".."),
    (200, "X-Repo-Commit", "../../../../escaped"), (404, "X-Repo-Commit", "{tmp}/escaped"),
])
def test_headers_that_lead_out_of_the_cache(hub, get, tmp_path, status, header, value):
    def fault(handler, path):
        if path.endswith("/config.json"):
            headers = {"X-Error-Code": "EntryNotFound"} if status == 404 else {}
            handler.send(status, b"evil", {"ETag": '"a"', "X-Repo-Commit": COMMIT} | headers |
                         {header: value.format(tmp=tmp_path)})
            return True

    hub.fault = fault
    assert_refused(get(), header, "no name for a file")
    assert outside(tmp_path) == [] and not list(tmp_path.rglob("*escaped*"))


@pytest.mark.parametrize("etag", ["a\0b", "a\x1b[31mb", "a\x7fb", "a\rb"])
def test_control_characters_in_a_header(hub, get, tmp_path, etag):
    hub.fault = answer_file("config.json", content=b"evil", X_Repo_Commit=COMMIT, ETag=etag)
    assert_refused(get(before=IMPATIENT))
    assert outside(tmp_path) == [] and not list(tmp_path.rglob("blobs/*"))
