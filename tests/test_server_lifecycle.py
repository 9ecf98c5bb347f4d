"""qwen3_lib/server: clients that come and leave, who may ask, and the process."""
import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

import qwen3_server
from qwen3_batch import positions_in
from configs import ROOT
from helpers import WEATHER, assert_one_line, message_of, with_engine
from qwen3_lib.app.fields import Refusal
from serving import FRANCE, PARIS, Served, endless, openai, received, started, streamed, until, web
from qwen3_lib.server import rendering, vetting
from qwen3_lib.server.rendering import Renderer
from qwen3_lib.server.worker import Worker
from tokenizer_utils import Tokenizer


def test_a_salt_hides_what_others_have_asked(demo):
    """cached_tokens, and the time of the first token, tell what the server has read before."""
    def cached(path, **fields):
        body = {"messages": FRANCE} if "chat" in path else {"input": FRANCE}
        usage = served.ask(path, body | fields)[1]["usage"]
        return usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"]

    with Served(demo) as served:
        found = [cached(path, **salt) > 0 for path in ("/v1/chat/completions", "/v1/responses")
                 for salt in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "other" + path})]
        assert found == [False, True, False, True, False, True, True, True, True, False]
        assert served.ask("/v1/completions", {"prompt": "x", "cache_salt": 5})[1]["error"]["param"] == "cache_salt"


def test_too_much_at_once_is_refused_for_a_moment(demo, monkeypatch):
    """New schemas, and conversations: where others take the time, or as many wait as may wait."""
    monkeypatch.setattr(vetting, "WAIT", 0.01)
    monkeypatch.setattr(rendering, "RENDERING_SECONDS", 0.01)
    renderer, new = Renderer(demo.tokenizer, "demo"), {"schema": {"enum": ["new"]}}
    with Served(dataclasses.replace(demo, tokenizer=renderer)) as served:
        for lock, fields in ((vetting.ONE_CHILD, new), (renderer.short.lock, {})):
            with lock:
                status, value, headers = served.ask("/v1/chat/completions", {"messages": FRANCE} | fields)
            assert status == 503 and headers["retry-after"] and "try again" in value["error"]["message"]
            assert served.ask("/v1/chat/completions", {"messages": FRANCE, "max_tokens": 1} | fields)[0] == 200
        with renderer.long.lock:  # which holds up no short conversation
            assert served.ask("/v1/chat/completions", {"messages": FRANCE, "max_tokens": 1})[0] == 200
            assert served.ask("/v1/chat/completions", {"messages": FRANCE * 4096})[0] == 503
        monkeypatch.setattr(vetting, "WAITING", threading.Semaphore(0))
        fields = {"messages": FRANCE, "max_tokens": 1, "schema": {"enum": ["newer"]}}
        assert served.ask("/v1/chat/completions", fields)[0] == 503
    renderer.end()


def test_clients_that_leave_free_their_slots(demo):
    """While the answer grows, while the prompt is read, while it waits; streamed or not."""
    long = {"prompt": "a b c d e f g h " * 150}
    for fields in ({}, {"stream": False}, long, long | {"stream": False}):
        with Served(demo, slots=1, longest=4000) as served:
            connections = [endless(served, **fields) for _ in range(2)]
            until(lambda: len(served.worker.batch.requests) == 2 and served.worker.batch.running)
            if "prompt" not in fields:
                until(lambda: served.worker.totals["generated_tokens"] > 0)
            start = time.monotonic()
            for connection in connections:
                connection.close()
            served.idle()
            assert served.worker.totals["cancelled"] == 2 and time.monotonic() - start < 5


def test_a_prompt_is_read_only_while_its_client_is_there(demo):
    """The stream begins before the first pass has ended; the pass in which the client leaves is the last one. Who sends
    the same again gets what was read."""
    passes, go, run = [], threading.Semaphore(0), demo.engine.run

    def held(model, new):
        passes.append(len(new.token_ids))
        assert go.acquire(timeout=60)
        return run(model, new)

    body = {"model": "m", "max_tokens": 2, "stream": True, "messages": [
        {"role": "user", "content": "a b c d e f g h " * 150}]}
    with Served(with_engine(demo, run=held), slots=1, longest=4000) as served:
        with contextlib.closing(endless(served, "/v1/messages", **body)) as connection:
            received(connection, b"message_start")
            until(lambda: passes)
        until(lambda: not served.worker.jobs)
        go.release()
        served.idle()
        assert len(passes) == 1 and served.worker.totals["cancelled"] == 1
        for _ in range(100):
            go.release()
        again = served.ask("/v1/messages", body | {"stream": False})[1]["usage"]
        assert again["cache_read_input_tokens"] == passes[0] and again["input_tokens"] == sum(passes[1:-1])


def test_a_stopping_server_gives_up_answers_and_takes_no_more(demo):
    with Served(demo, longest=4000) as served, contextlib.closing(endless(served, stream=False)) as connection, \
            contextlib.closing(endless(served)) as stream:
        until(lambda: len(served.worker.batch.running) == 2)
        served.worker.ends_at = time.monotonic()
        assert connection.recv(100).startswith(b"HTTP/1.1 503 ")
        assert served.ask("/v1/completions", {"prompt": "x"})[0] == 503
        received(stream, b"stopping")
    with pytest.raises(Refusal, match="has failed"):  # its thread has ended
        asyncio.run(served.worker.do(lambda: 1))


def test_the_queue_and_the_time_are_limited(demo):
    with Served(demo, slots=1, longest=4000, queue=1, seconds=1.0) as served:
        with contextlib.closing(endless(served)) as first, contextlib.closing(endless(served, stream=False)) as second:
            until(lambda: len(served.worker.jobs) == 2)
            status, value, headers = served.ask("/v1/completions", {"prompt": "x"})
            assert status == 429 and headers["retry-after"] and value["error"]["type"] == "rate_limit_error"
            assert second.recv(100).startswith(b"HTTP/1.1 504 ")
            assert b"[DONE]" not in received(first, b'"timeout"')
        served.idle()


KEYS = {"Bearer secret": 200, "bearer secret": 200, "BEARER  secret": 200, None: 401, "": 401, "Bearer": 401,
        "Bearer ": 401, "Bearer wrong": 401, "Bearer Secret": 401, "Bearer secret secret": 401, "Basic secret": 401,
        "secret": 401, "Bearersecret": 401}


@pytest.mark.core
def test_the_key_opens_the_paths_in_every_form_and_nothing_else_does(demo):
    with Served(demo, hosts=None, key="secret") as served:
        for path in ("/v1/models", "/v1/models/demo", "/v1/models?/health", "/v1/models#/health", "/metrics",
                     "/health/x", "//health", "/health/../v1/models"):
            for host in ("localhost", "localhost:/health?", "localhost/?", "x/health#"):
                for key, expected in KEYS.items():
                    status, _, _ = served.ask(path, headers={"Host": host} | ({"Authorization": key} if key else {}))
                    assert (404 if status == 404 and "health" in path else status) == (
                        expected if expected == 401 or status == 200 else 404), (path, host, key)
        assert served.ask("/health")[0] == served.ask("/")[0] == 200


def test_who_may_ask(demo, monkeypatch):
    monkeypatch.setattr(web, "LARGEST_BODY", 1000)
    monkeypatch.setattr(web, "BODY_SECONDS", 0.3)
    with Served(demo, key="söcret", origins=("https://friend.org",)) as served:
        ask = served.ask
        assert ask("/v1/models")[0] == 401 and ask("/health")[0] == 200
        for key in ("wrong", "söcret"):
            got = ask("/v1/models", headers={"Authorization": f"Bearer {key}".encode().decode("latin-1")})
            assert got[0] == (200 if key == "söcret" else 401)
        for host in ("evil.org", "localhost:80@evil.com", "localhost:x", "[::1", "[::1]x", ""):
            assert ask("/health", headers={"Host": host})[0] == 403, host  # evil.org may lead to 127.0.0.1
        assert ask("/health", headers={"Origin": "https://evil.org"})[0] == 403
        assert ask("/health", headers={"Origin": served.url})[0] == 200
        allowed = ask("/health", headers={"Origin": "https://friend.org"})
        assert allowed[0] == 200 and allowed[2]["access-control-allow-origin"] == "https://friend.org"
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as preflight:  # it comes without a key
            preflight.sendall(b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: https://friend.org\r\n"
                              b"Access-Control-Request-Method: GET\r\n\r\n")
            assert preflight.recv(100).startswith(b"HTTP/1.1 200 ")
    with Served(demo) as served:
        assert served.ask("/health", headers={"Host": "[::1]:8000"})[0] == 200
        assert served.ask("/v1/completions", {"prompt": "x" * 1000})[0] == 413
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as slow:  # the body never ends
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


# ---- The process -----------------------------------------------------------------------------------------------------

def test_health_while_loading_and_metrics(demo):
    ready = threading.Event()

    def load():
        ready.wait(30)
        return demo

    with Served(load, wait=False) as served:
        assert served.ask("/health")[0] == 503 == served.ask("/v1/completions", {"prompt": "x"})[0]
        ready.set()
        until(lambda: served.worker.batch is not None)
        assert served.ask("/health")[0] == 200
        served.client().completions.create(model="m", prompt="The", max_tokens=7)
        lines = served.ask("/metrics")[1].splitlines()
        assert "qwen3_generated_tokens_total 7" in lines and "qwen3_slots 4" in lines
        assert [each.id for each in served.client().models.list()] == ["demo"]
        assert served.client().models.retrieve("demo").id == "demo"


def test_the_page_needs_nothing_from_elsewhere(served):
    """Its policy allows the scripts and the style in it, and nothing from elsewhere; its own parts name no address."""
    status, text, headers = served.ask("/")
    policy = headers["content-security-policy"]
    assert status == 200 and "<title>Qwen3</title>" in text
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "connect-src 'self'" in policy
    for kind, tag, n in (("script-src", "script", 20), ("style-src", "style", 1)):
        parts = re.findall(f"<{tag}(?: data-manual)?>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        assert len(parts) == n and f"{kind} " + " ".join(f"'sha256-{digest}'" for digest in digests) + ";" in policy
    own = "".join(path.read_text("utf-8") for path in (ROOT / "qwen3_lib/server/page").glob("page.*"))
    assert not re.search(r"""://|url\(|@import| on\w+=| style=| src=|innerHTML|eval\(""", own)


def test_the_command():
    """It says where it listens, logs requests without texts, answers, and ends after SIGTERM, when all is done."""
    process, lines = started("--verbose")
    try:
        url = lines[-1].split()[-1]
        client = openai.OpenAI(base_url=url, api_key="x", timeout=60, max_retries=0)
        until(lambda: urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=10).status == 200)
        stream = iter(client.chat.completions.create(model="m", messages=FRANCE, stream=True,
                                                          stream_options={"include_usage": True}))
        next(stream)
        port = str(client.base_url.port)
        taken = subprocess.run([sys.executable, ROOT / "qwen3_server.py", "--port", port], text=True,
                               capture_output=True, timeout=60)
        assert taken.returncode == 1
        assert_one_line(taken.stderr, f"port {port} of 127.0.0.1", "in use", "--port")
        process.send_signal(signal.SIGTERM)
        answer, *_, chunks = streamed(stream)
        client.close()
        assert process.wait(30) == 0 and answer == PARIS
        *log, end = process.stderr.read().splitlines()
        assert "1 answer was finished, 0 given up" in end
        assert re.fullmatch(r"GET /health 200, \d+\.\d\d s", log[0])
        tokens = f"{chunks[-1].usage.prompt_tokens} \\+ {chunks[-1].usage.completion_tokens} tokens"
        assert re.fullmatch(rf"POST /v1/chat/completions 200, \d+\.\d\d s, {tokens}", log[-1])
    finally:
        process.kill()
        process.wait()


def test_the_default_context_is_what_the_memory_holds(demo):
    """Its line says so, and a longer prompt is refused before anything is computed."""
    n = positions_in(demo, 2, 8_000_000 - 8_000_000 // 3)
    process, lines = started("--memory", "8MB")
    try:
        assert lines[1] == (f"2 answers at a time, each of at most {n} tokens with its prompt, of the 4,096 that the "
                            "model can read (--context, --memory); 2.7 MB for earlier ones (--keep)\n")
        url = lines[-1].split()[-1].removesuffix("/v1")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=60, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match=f"prompt is too long: {n} tokens > {n - 1} maximum"):
                client.completions.create(model="m", prompt=[5] * n)
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        assert "qwen3_answers_begun_total 0\n" in metrics
    finally:
        process.kill()
        process.wait()


def test_a_conversation_goes_on_after_a_restart(tmp_path):
    """Found on the disk, with another number of slots, after SIGTERM; with a salt nothing is found."""
    def asked(client, salt=""):
        system = {"role": "system", "content": "You are a helpful assistant."}
        answer = client.chat.completions.create(model="m", messages=[system, *FRANCE], extra_body={"cache_salt": salt})
        return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens > 0

    found = []
    for slots in ("2", "3"):
        process, lines = started("--slots", slots, "--keep-on-disk", f"{tmp_path / 'kept'}:10MB")
        try:
            with openai.OpenAI(base_url=lines[-1].split()[-1], api_key="x", timeout=60, max_retries=0) as client:
                found += [asked(client), asked(client, slots)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    assert found == [(PARIS, False), (PARIS, False), (PARIS, True), (PARIS, False)]


def test_requests_and_failures_are_logged_without_texts(demo, caplog, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setitem(web.ANSWERS, "/detokenize", fail)
    with caplog.at_level("INFO", "qwen3"), Served(demo) as served:
        served.ask("/tokenize", {"content": "secret"})
        assert served.ask("/detokenize", {"tokens": [5]})[0] == 500
    ours = [record for record in caplog.records if record.name == "qwen3"]
    assert re.fullmatch(r"POST /tokenize 200, \d+\.\d\d s", ours[0].getMessage()) and "secret" not in caplog.text
    [failure] = [record for record in ours if record.levelname == "ERROR"]
    assert "/detokenize" in failure.getMessage() and failure.exc_info[0] is ZeroDivisionError


def test_a_signal_before_the_worker_begins_ends_it_all_the_same():
    async def begun():
        worker = Worker(threading.Event().wait, 1, lambda error: None)  # it loads for ever
        worker.end(-1)  # SIGTERM, a second ago
        worker.start()
        await asyncio.wait_for(worker.over.wait(), 5)

    asyncio.run(begun())


@pytest.mark.parametrize("options, words", [
    (("--host", "256.1.1.1"), "--host"), (("--host", "203.0.113.9"), "--host"), (("--host", "a" * 70), "--host"),
    (("--port", "99999"), "--port"), (("--cors", "foo"), "--cors must be an origin"),
    (("--cors", "https://example.org/"), "--cors must be an origin")])
def test_an_address_that_cannot_be_served(options, words, capfd):
    assert qwen3_server.main(options) == 1
    assert_one_line(capfd.readouterr().err, words)


def test_a_model_that_is_missing():
    """One line, and no address."""
    process, lines = started("--model", "no/such/folder")
    assert process.wait(30) == 1 and lines[1:] == [""]
    assert_one_line(lines[0], "no/such/folder")


SLOW = """# the seconds that a pass takes, and the grace
import sys, time, qwen3_server
from qwen3_lib.generation.batch import Batch
step = Batch.step
def slow(self):
    time.sleep(float(sys.argv[1]))
    return step(self)
Batch.step, qwen3_server.GRACE, qwen3_server.LAST = slow, float(sys.argv[2]), 1.5
sys.exit(qwen3_server.main(sys.argv[3:]))
"""


@pytest.mark.parametrize("seconds, grace, signals, status, told", [
    (1000, 1, [signal.SIGTERM], 1, "what still ran was given up"),
    (0.1, 60, [signal.SIGINT, signal.SIGINT], 0, "0 answers were finished, 1 given up")])
def test_signals_end_the_process_whatever_runs(seconds, grace, signals, status, told):
    """A pass that never ends is given up after the grace; a second signal sends running streams their error."""
    process, lines = started(program=("-c", SLOW, str(seconds), str(grace)))
    try:
        port = int(lines[-1].rpartition(":")[2].partition("/")[0])
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        body = b'{"prompt": "once", "max_tokens": 5000, "stream": true, "ignore_eos": true}'
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
            len(body), body))
        text = received(connection, b"200 OK" if status else b"data")
        waiting = socket.create_connection(("127.0.0.1", port), timeout=30)
        if seconds == 1000:
            waiting.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n"
                            b'{"prompt":"a"}')
            time.sleep(0.3)
        start = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        text += b"".join(iter(lambda: connection.recv(2**16), b""))
        if seconds == 1000:  # its answer hasn't begun
            assert b"HTTP/1.1 503 " in waiting.recv(100)
        assert process.wait(30) == status and time.monotonic() - start < 10
        assert told in process.stderr.read().splitlines()[-1]
        assert (b"the server is stopping" in text) == (status == 0) and b"[DONE]" not in text
    finally:
        process.kill()
        process.wait()


TEMPLATES = [  # from strangers
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = messages|length * 3000000000 %}{{ 'a' * n }}", "{% for a in range(99999) %}{{ 'a' * 400 }}{% endfor %}",
    "{{ raise_exception('no') }}"]


def test_a_template_that_never_ends_is_given_up(demo, monkeypatch):
    """Or one that writes gigabytes. The next conversation is rendered as before."""
    monkeypatch.setattr(rendering, "child_of", lambda name: vetting.child_of(name) | {
        "args": [sys.executable, "-P", "-c", f"import {name} as room; room.RENDERING_SECONDS = 0.3; room.main()"]})
    for template in TEMPLATES:
        renderer = Renderer(Tokenizer(demo.tokenizer.backend, template), "strangers")
        assert_one_line(message_of(renderer.apply_chat_template, FRANCE), "the chat template")
        renderer.end()
    renderer = Renderer(demo.tokenizer, "demo")
    renderer.short.process.kill()
    assert_one_line(message_of(renderer.apply_chat_template, FRANCE), "given up")
    for options in ({}, {"enable_thinking": False}, {"tools": [WEATHER], "add_generation_prompt": False}):
        assert renderer.apply_chat_template(FRANCE, **options) == demo.tokenizer.apply_chat_template(FRANCE, **options)
    renderer.end()
