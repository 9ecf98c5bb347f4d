"""qwen3_lib/server: clients that come and leave, who may ask, and the process."""
import base64
import contextlib
import hashlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

from configs import ROOT
from helpers import assert_one_line
from qwen3_lib.batch.batch import Batch
from serving import FRANCE, PARIS, Served, endless, openai, started, streamed, until, web


def test_a_conversation_is_found_again_after_others_used_its_slot(demo):
    first = [{"role": "system", "content": "word " * 50}, *FRANCE]
    talk = [*FRANCE, {"role": "assistant", "content": PARIS}, {"role": "user", "content": "And of Peru?"}]
    with Served(demo, slots=1) as served:
        client = served.client()
        for messages in (first, talk, first):
            again = client.chat.completions.create(model="m", messages=messages)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_clients_that_leave_free_their_slots(demo):
    """While the answer grows, while the prompt is read, while it waits; streamed or not."""
    long = {"prompt": "a b c d e f g h " * 150}
    for fields in ({}, {"stream": False}, long, long | {"stream": False}):
        with Served(demo, slots=1, longest=4000) as served:
            connections = [endless(served, **fields) for _ in range(2)]
            until(lambda: len(served.worker.jobs) == 2 and served.worker.batch.running)
            if "prompt" not in fields:
                until(lambda: served.worker.totals["generated_tokens"] > 0)
            start = time.monotonic()
            for connection in connections:
                connection.close()
            served.idle()
            assert served.worker.totals["cancelled"] == 2 and time.monotonic() - start < 5


def test_the_queue_and_the_time_are_limited(demo):
    with Served(demo, slots=1, longest=4000, queue=1, seconds=1.0) as served:
        with contextlib.closing(endless(served)) as first, contextlib.closing(endless(served, stream=False)) as second:
            until(lambda: len(served.worker.jobs) == 2)
            status, value, headers = served.ask("/v1/completions", {"prompt": "x"})
            assert status == 429 and headers["retry-after"] and value["error"]["type"] == "rate_limit_error"
            assert second.recv(100).startswith(b"HTTP/1.1 504 ")
            text = b""
            while part := first.recv(2**16):
                text += part
                if b'"timeout"' in text:
                    break
            assert b"[DONE]" not in text
        served.idle()


def test_a_short_prompt_does_not_wait_for_a_long_one(demo):
    """Its first token comes within two passes, though the long prompt takes dozens."""
    batch = Batch(demo, 2, 4000)
    batch.add("long", demo.tokenizer.encode("a b c d e f g h " * 150), max_new_tokens=1)
    batch.step()
    short = batch.add("short", demo.tokenizer.encode("The capital of"), max_new_tokens=2)
    batch.step()
    assert len(short.token_ids) == 1


def test_who_may_ask(demo, monkeypatch):
    monkeypatch.setattr(web, "LARGEST_BODY", 1000)
    monkeypatch.setattr(web, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(web, "BODY_SECONDS", 0.3)
    with Served(demo, key="söcret", origins=("https://friend.org",)) as served:
        ask = served.ask
        assert ask("/v1/models")[0] == 401 and ask("/health")[0] == 200
        for key in ("wrong", "söcret"):
            got = ask("/v1/models", headers={"Authorization": f"Bearer {key}".encode().decode("latin-1")})
            assert got[0] == (200 if key == "söcret" else 401)
        assert ask("/health", headers={"Host": "evil.org"})[0] == 403  # a name that leads to 127.0.0.1
        assert ask("/health", headers={"Origin": "https://evil.org"})[0] == 403
        assert ask("/health", headers={"Origin": served.url})[0] == 200
        allowed = ask("/health", headers={"Origin": "https://friend.org"})
        assert allowed[0] == 200 and allowed[2]["access-control-allow-origin"] == "https://friend.org"
    with Served(demo) as served:
        assert served.ask("/v1/completions", {"prompt": "x" * 1000})[0] == 413
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as slow:  # headers that never end
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nA: b\r\n")
            assert slow.recv(100) == b""
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as slow:  # nor does the body
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
    """It says where it listens, logs requests without their texts, answers, and ends after SIGTERM, when all is done."""
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


def test_a_model_that_is_missing():
    """One line, and no address."""
    process, lines = started("--model", "no/such/folder")
    assert process.wait(30) == 1 and lines[1:] == [""]
    assert_one_line(lines[0], "no/such/folder")
