"""qwen3_lib/server asked by many clients, some of them hostile. FUZZ=10 takes ten times as long."""
import asyncio
import contextlib
import gc
import json
import os
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from configs import FORM
from helpers import assert_one_line
from qwen3 import chat
from qwen3_lib.app.fields import CHAT, COMPLETION_FIELDS
from serving import FRANCE, Served, endless, openai, web  # first: it skips where the server needs packages
from qwen3_lib.server import vetting
from qwen3_lib.server.responses import FIELDS

MESSAGES_FIELDS = ("system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "stream")
FUZZ = int(os.environ.get("FUZZ", 1))


def resident():
    """The bytes of memory that this process has now; 0 where the system doesn't say."""
    gc.collect()
    if not Path("/proc/self/statm").exists():
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def a_request(rng):
    """A random request, as fields of a chat."""
    country = rng.choice(["France", "Peru", "Japan", "Kenya", "法国"])
    system = rng.choice([[], [{"role": "system", "content": "You are a helpful assistant. " * 9}]])
    fields = {"messages": [*system, {"role": "user", "content": f"What is the capital of {country}?"}],
              "max_tokens": rng.randrange(1, 15), "seed": rng.randrange(9), "temperature": rng.choice([0, 1, 2.5]),
              "logprobs": True, "top_logprobs": rng.randrange(3)}
    extra = {"top_k": rng.choice([0, 5]), "repetition_penalty": rng.choice([1, 1.2]),
             "enable_thinking": rng.choice([True, False])}
    if rng.random() < 0.2:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    return fields, extra


def alone(model, fields, extra):
    form = fields.get("response_format")
    options = {key: value for key, value in fields.items() if key in ("seed", "temperature")} | extra
    answer = chat(model, fields["messages"], logprobs=fields["top_logprobs"], max_new_tokens=fields["max_tokens"],
                  schema=form and form["json_schema"]["schema"], **options).finish()
    return answer.answer.content, answer.answer.reasoning or "", [entry.logprob for entry in answer.logprobs]


async def answered(client, fields, extra, stream, leave):
    """What `alone` returns, from a server; None if the client leaves after the first text of a stream."""
    if not stream:
        got = (await client.chat.completions.create(model="m", extra_body=extra, **fields)).choices[0]
        return (got.message.content, getattr(got.message, "reasoning_content", None) or "",
                [entry.logprob for entry in got.logprobs.content])
    content, reasoning, logprobs = "", "", []
    stream = await client.chat.completions.create(model="m", stream=True, extra_body=extra, **fields)
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        logprobs += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
        if leave and content + reasoning:
            await stream.close()
            return None
    return content, reasoning, logprobs


def test_64_clients(small):
    """For 2 seconds (FUZZ=30: a minute): each answer has the bits of a single run, no slot is lost, and memory doesn't
    grow. Whole and streamed, with equal and different beginnings, some leave midway; caches are kept."""
    rng, seconds = random.Random(2), 2 * FUZZ
    requests = [a_request(rng) for _ in range(40)]
    expected, counts = [alone(small, *request) for request in requests], Counter()

    async def use(client, number, end):
        rng = random.Random(number)
        while time.monotonic() < end:
            which, leaves = rng.randrange(len(requests)), rng.random() < 0.15
            try:
                if rng.random() < 0.15:
                    wrong = rng.choice([{"n": 0}, {"messages": [{"role": "x"}]}, {"temperature": "hot"}, {"stop": [3]}])
                    await client.chat.completions.create(**{"model": "m", "messages": FRANCE, "extra_body": wrong})
                    counts["accepted"] += 1
                else:
                    got = await answered(client, *requests[which], leaves or rng.random() < 0.5, leaves)
                    counts["left" if got is None else "right" if got == expected[which] else "wrong"] += 1
            except openai.RateLimitError:
                counts["full"] += 1
                await asyncio.sleep(0.05)
            except openai.BadRequestError:
                counts["refused"] += 1

    async def all_of_them():
        # Connections that stay open might be closed by the server just when they are used again.
        async with served.client(openai.AsyncOpenAI, default_headers={"Connection": "close"}) as client:
            await asyncio.gather(*(use(client, number, time.monotonic() + seconds / 2) for number in range(64)))
            before = resident()
            await asyncio.gather(*(use(client, 64 + number, time.monotonic() + seconds / 2) for number in range(64)))
        return resident() - before

    with Served(small, slots=8, longest=400, kept=2**22, queue=24) as served:
        grown = asyncio.run(all_of_them())
        served.idle()
        assert served.ask("/metrics")[1].count("qwen3_running 0") == 1 and served.worker.totals["cached_tokens"] > 100
    assert counts["wrong"] == counts["accepted"] == 0 and grown < 30e6, (counts, grown)
    assert counts["right"] > 20 and counts["left"] and counts["refused"] and counts["full"], counts


VALUES = [None, True, False, 0, 1, -1, 2**70, 1e308, 0.5, "", "x", "\ud800", [], [[]], {}, {"type": "object"}, [1, "a"],
          {"a": {"b": [None]}}, [None], "\0", "auto", [{}], {"function": 3}, {"type": "function", "function": None}]


def test_requests_of_any_shape(served):
    """Fields with values of any kind: answered or refused, and the next good request is answered."""
    rng = random.Random(3)
    good = {
        "/v1/chat/completions": ({"messages": FRANCE, "max_tokens": 1}, CHAT),
        "/v1/completions": ({"prompt": "The", "max_tokens": 1}, COMPLETION_FIELDS),
        "/v1/responses": ({"input": "x", "max_output_tokens": 1}, FIELDS),
        "/v1/messages": ({"model": "m", "messages": FRANCE, "max_tokens": 1}, MESSAGES_FIELDS),
        "/v1/messages/count_tokens": ({"model": "m", "messages": FRANCE}, MESSAGES_FIELDS),
        "/v1/embeddings": ({"input": "x"}, ("encoding_format", "dimensions")),
        "/rerank": ({"query": "x", "texts": ["a"]}, ("documents", "top_n", "instruction", "truncate")),
        "/tokenize": ({"content": "x"}, ("prompt",)), "/detokenize": ({"tokens": [1]}, ()),
        "/apply-template": ({"messages": FRANCE}, ("tools", "tool_choice", "enable_thinking"))}
    for _ in range(150 * FUZZ):
        path = rng.choice([*good])
        body, fields = good[path]
        changed = body | {rng.choice([*body, *fields]): rng.choice(VALUES) for _ in range(rng.choice([1, 1, 2]))}
        if isinstance(changed.get("messages"), list) and rng.random() < 0.3:
            changed["messages"] = [FRANCE[0] | {rng.choice(["role", "content", "tool_calls"]): rng.choice(VALUES)}]
        data = json.dumps(changed).encode()
        data = data if rng.random() < 0.9 else data[:rng.randrange(len(data))]
        status, value, _ = served.ask(path, data)
        assert status in (200, 400), (status, value, path, data)
    assert served.ask("/v1/completions", {"prompt": "The", "max_tokens": 1})[0] == 200


def malformed(rng):
    """The bytes of a request that can't be answered."""
    def post(body, path=b"/v1/chat/completions", headers=b""):
        headers += b"Host: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"POST %s HTTP/1.1\r\n%s%s" % (path, headers, body)

    good = json.dumps({"messages": FRANCE, "max_tokens": 1}).encode()
    noise = rng.randbytes(rng.randrange(1, 200))
    return rng.choice([
        lambda: post(good[:rng.randrange(len(good))]), lambda: post(noise), lambda: post(good + noise),
        lambda: post(b"[" * rng.randrange(10**5)), lambda: post(good.replace(b'"user"', b'"\xff"')),
        lambda: post(good.replace(b"1}", b"1" * 5000 + b"}")),
        lambda: post(good, b"/v1/" + rng.choice([b"chat", b"%00", b"../v1", b"\xc3\xa9"])),
        lambda: post(good, headers=b"no colon\r\n"), lambda: post(good, headers=b"A: %s\r\n" % (b"b" * 10**6)),
        lambda: post(good, headers=b"Host: evil.org\r\n"), lambda: post(good, headers=b"Origin: null\r\n"),
        lambda: post(good, headers=b"Transfer-Encoding: gzip\r\n"),
        lambda: post(b"").replace(b"h: 0", b"h: " + rng.choice([b"-1", b"x", b"1e3", b"", b"9" * 40])),
        lambda: post(b"xyz\r\n" + noise, headers=b"Transfer-Encoding: chunked\r\n").replace(b"Content-Length", b"A"),
        lambda: b"%s / HTTP/1.1\r\nHost: localhost\r\n\r\n" % rng.choice([b"PUT", b"DELETE", b"BREW"]),
        lambda: noise.replace(b"\n", b"") + b"\r\n\r\n", lambda: b"GET / HTTP/9.9\r\n\r\n", lambda: b"GET /\r\n\r\n"])()


def test_malformed_requests(served, caplog):
    """In pieces of any size: each gets a 4xx, the next good request is answered, and memory doesn't grow.

    250 of them; FUZZ=10: 2,500.
    """
    rng, before = random.Random(4), 0
    for number in range(250 * FUZZ):
        data = malformed(rng)
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice([0, 0, 1, 3])))
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError):  # refused before all of it was sent
                for start, end in zip([0, *cuts], [*cuts, len(data)]):
                    connection.sendall(data[start:end])
                    time.sleep(0.001 * (len(cuts) > 0))
            status = connection.recv(12)
        assert re.fullmatch(rb"HTTP/1.1 4\d\d", status), (status, data[:300])
        if number % 50 == 0:
            assert served.ask("/v1/completions", {"prompt": "The", "max_tokens": 1})[0] == 200
            before = before or (resident() if number >= 100 else 0)
    served.idle()
    assert resident() - before < 30e6 and not [each for each in caplog.records if each.levelname == "ERROR"]


def test_schemas_that_take_long_hold_up_nobody_else(demo):
    """Six of 200 kB, with a fault in the innermost of 30 levels, are refused while another schema's chat goes on."""
    def hostile(number):
        inner = {"type": "string", "format": f"unknown{number}"}
        for _ in range(30):
            properties = {f"p{j}": {"$ref": "#/$defs/e"} for j in range(199)}
            inner = {"type": "object", "properties": properties | {"x": inner}}
        return inner | {"$defs": {"e": {"enum": [f"v{i}" for i in range(5000)]}}}

    def form(schema):
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    with Served(demo) as served:
        ask = {"messages": FRANCE, "max_tokens": 5, "response_format": form(FORM)}
        assert served.ask("/v1/chat/completions", ask)[0] == 200
        got = []
        threads = [threading.Thread(target=lambda i=i: got.append(served.ask(
            "/v1/chat/completions", {"messages": FRANCE, "response_format": form(hostile(i))})[:2])) for i in range(6)]
        for thread in threads:
            thread.start()
        waits = []
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            assert served.ask("/v1/chat/completions", ask)[0] == served.ask("/health")[0] == 200
            waits.append(time.monotonic() - start)
        assert len(waits) > 3 and max(waits) < 8
        for status, body in got:
            assert re.search({400: "unknown[0-9]|can't be used", 503: "try again"}[status], body["error"]["message"])


def test_a_grammar_that_takes_long_at_a_token_holds_up_nobody_else(demo, monkeypatch):
    """After some 60 tokens, each next one takes seconds."""
    child_of = vetting.child_of
    monkeypatch.setattr(vetting, "child_of", lambda name: child_of(name) | {
        "args": [sys.executable, "-P", "-c", f"import {name} as room; room.VETTING_SECONDS = 0.3; room.main()"]})
    bias = dict.fromkeys(demo.eos_token_ids, -100) | {demo.tokenizer.encode("a")[0]: 100}
    grammar = {"type": "lark", "grammar": 'start: y{0,1000}\ny: z{0,1000}\nz: "a"{0,1000}'}
    hostile = {"messages": FRANCE, "max_tokens": 500, "enable_thinking": False, "response_format": grammar,
               "logit_bias": {str(token): each for token, each in bias.items()}}
    with Served(demo) as served:
        got, waits = [], []
        threads = [threading.Thread(target=lambda: got.append(served.ask("/v1/chat/completions", hostile)[:2]))
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            assert served.ask("/v1/chat/completions", {"messages": FRANCE, "max_tokens": 5})[0] == 200
            waits.append(time.monotonic() - start)
        assert max(waits) < 8
        for status, body in got:
            assert status == 400 and "the next token takes too much time" in body["error"]["message"]


def chat_with(**fields):
    return "/v1/chat/completions", {"messages": FRANCE, "max_tokens": 1} | fields


def user(content):
    return [{"role": "user", "content": content}]


HOSTILE = [  # path, body as JSON or bytes: the largest that are taken
    ("/tokenize", {"content": "a" * 16_000_000}), ("/v1/completions", {"prompt": "a b " * 4_000_000}),
    ("/v1/completions", {"prompt": ["1" * 19_000] * 60}), chat_with(messages=user("\u00e9" * 2_000_000)),
    chat_with(messages=user("</think>" * 2_000_000)), chat_with(messages=FRANCE * 50_000),
    chat_with(messages=FRANCE * 4097), ("/v1/responses", {"input": FRANCE * 60_000}),
    chat_with(messages=user([{"type": "text", "text": "a"}] * 50_000)),
    chat_with(messages=[{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 10_000}}] * 100}]),
    chat_with(tools=[{"type": "function", "function": {"name": "f"}}] * 30_000, messages=user("a" * 30_000)),
    chat_with(stop=[str(i) for i in range(300_000)]), chat_with(logit_bias={str(i): 1 for i in range(100_000)}),
    chat_with(chat_template_kwargs={str(i): 1 for i in range(100_000)}), chat_with(**{"x" * 10_000_000: 1}),
    ("/v1/completions", {"prompt": [[5] * 4_000] * 100}), ("/v1/completions", {"prompt": [5] * 500_000}),
    ("/v1/completions", b"[" * 2**24), ("/v1/completions", b"[" + b"[]," * 5_500_000 + b"[]]"),
    ("/v1/completions", b'{"seed":' + b"1" * 10_000_000 + b"}"),
    ("/v1/completions", b'"' + b"\\u0000" * 2_700_000 + b'"'), ("/rerank", {"query": "a", "texts": ["a"] * 100_000}),
    ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}] * 30_000})]


def test_hostile_bodies_are_refused_and_hold_up_nobody(demo):
    """Two at a time, while /health is asked all the time."""
    bodies, got, waits = [*HOSTILE] * FUZZ, [], []
    random.Random(5).shuffle(bodies)

    def send():
        while bodies:
            path, body = bodies.pop()
            got.append((path, *served.ask(path, body)[:2]))

    with Served(demo, longest=1000) as served:
        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            assert served.ask("/health")[0] == 200
            waits.append(time.monotonic() - start)
            time.sleep(0.05)
        assert served.ask("/v1/completions", {"prompt": "The", "max_tokens": 1})[0] == 200
    assert len(got) == len(HOSTILE) * FUZZ and max(waits) < 3 and sorted(waits)[len(waits) // 2] < 0.2, max(waits)
    for path, status, value in got:
        assert status in (400, 413), (path, value)
        assert_one_line(value["error"]["message"])


def test_a_body_that_is_too_large_is_refused_in_words(served):
    """Its client writes all of it before it reads: a connection that was closed before is asked again and again."""
    status, value, _ = served.ask("/v1/messages", bytes(web.LARGEST_BODY + 2**23))
    assert (status, value["error"]["type"]) == (413, "request_too_large")


def test_a_body_in_tiny_parts_is_cut_off(demo):
    """Before and after the refusal of a key: 24 MB on the wire, in chunks of one byte, don't come through."""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sTransfer-Encoding: chunked\r\n\r\n"
    with Served(demo, key="secret") as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
            connection.sendall(head % (b"/v1/chat/completions", b""))
            assert connection.recv(2**16).startswith(b"HTTP/1.1 401 ")  # before the body
        for more in (b"", b"Authorization: Bearer secret\r\n"):
            with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
                connection.sendall(head % (b"/v1/chat/completions", more))
                with pytest.raises(ConnectionError):
                    for _ in range(400):
                        connection.sendall(b"1\r\na\r\n" * 10_000)
            with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
                connection.sendall(head % (b"/tokenize", more) + b"f\r\n" + b'{"content": "a ' + b"\r\n")
                for _ in range(1000):
                    connection.sendall(b"400\r\n" + b"a " * 512 + b"\r\n")
                connection.sendall(b'2\r\n"}\r\n0\r\n\r\n')
                assert connection.recv(2**16).startswith(b"HTTP/1.1 %d " % (400 if more else 401))
        assert served.ask("/health")[0] == 200


def test_large_bodies_are_read_and_checked_one_at_a_time(demo, monkeypatch):
    """Each takes a second of Python, and six together would take it from everybody else; the event loop reads none."""
    running, most, parse = [], [], web.parse_json

    def step(kind):
        running.append(kind)
        most.append((kind, len(running), threading.current_thread() is served.thread))
        time.sleep(0.05)
        running.remove(kind)

    monkeypatch.setattr(web, "parse_json", lambda *given: step("read") or parse(*given))
    monkeypatch.setitem(web.ANSWERS, "/tokenize", lambda *_: step("check") or {})
    with Served(demo) as served:
        for length in (web.LARGE_BODY, 10):
            most.clear()
            threads = [threading.Thread(target=served.ask, args=("/tokenize", {"i": i, "content": "a" * length}))
                       for i in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(most) == 12 and not any(loop for *_, loop in most)
            assert (max(n for _, n, _ in most) > 1) == (length == 10)
            if length > 10:  # what was read doesn't wait in memory
                assert [kind for kind, *_ in most] == ["read", "check"] * 6


def test_many_connections_and_slow_senders(demo, monkeypatch):
    """300 (FUZZ=10: 3,000) silent ones, or ones that send a byte now and then: others are answered."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(web, "BODY_SECONDS", 1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    slow = [head + b"Content-Length: 99\r\n\r\n", head + b"Content-Length: 99\r\n\r\n{"]
    begun = [b"", b"P", head, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea", *slow]
    with Served(demo) as served, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=30))
                       for _ in range(min(300 * FUZZ, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 100))]
        for i, connection in enumerate(connections):
            connection.sendall(begun[i % len(begun)])
        for _ in range(10):
            start = time.monotonic()
            assert served.ask("/v1/completions", {"prompt": "The", "max_tokens": 1})[0] == 200
            assert time.monotonic() - start < 10
            for connection in connections[::3]:
                with contextlib.suppress(OSError):
                    connection.send(b"a")
            time.sleep(0.1)
        for connection in (each for i, each in enumerate(connections) if begun[i % len(begun)] in slow):
            assert connection.recv(2**16).startswith(b"HTTP/1.1 408 ")
        served.idle()


def test_clients_that_leave_at_any_moment_free_their_slots(small):
    """60 of them (FUZZ=10: 600), streamed or not; some close their sending half only."""
    rng = random.Random(6)

    def use(rng):
        fields = {"prompt": "once " * rng.randrange(1, 60), "max_tokens": 300, "stream": rng.random() < 0.5}
        with endless(served, **fields) as connection:
            time.sleep(rng.choice([0, 0.001, 0.01, 0.1]))
            if rng.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**16):
                    pass

    with Served(small, slots=4, longest=400) as served:
        for _ in range(6 * FUZZ):
            threads = [threading.Thread(target=use, args=(random.Random(rng.random()),)) for _ in range(10)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        served.idle()
