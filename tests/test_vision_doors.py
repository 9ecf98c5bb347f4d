"""Pictures where people use them: the server, its page, batch files, conversations in files, the chat."""
import asyncio
import base64
import gc
import io
import json
import socket
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from PIL import Image

import qwen3
import qwen3_batch
import qwen3_vision
from helpers import assert_cli_refuses, assert_looks, axe_core, message_of, roles, run_main
from qwen3_lib.app import openai
from qwen3_lib.app.chat import Chat
from qwen3_lib.app.files import read_messages
from qwen3_lib.app.records import JobSettings, request_of_row
from qwen3_lib.app.report import statistics
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.messages import MARK
from qwen3_lib.io import pictures
from qwen3_lib.io.pictures import picture_of
from qwen3_lib.server import web
from serving import FRANCE, Served, until
from test_chat import handled, refused
from qwen3_vision import tower
from test_qwen3_vision import CONFIGS, make_seeing, png_of as without_pixels

LIKELIEST = {"max_tokens": 5, "temperature": 0}
TEXT = {"type": "text", "text": "What is this?"}


def png_of(*size, seed=0, colours=256) -> bytes:
    """A picture of random colours as a file."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, colours, (*size, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def url_of(data: bytes, kind="image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def asked(*parts, role="user") -> dict:
    """A message that asks about pictures."""
    return {"role": role, "content": [*parts, TEXT]}


def picture(source, **fields) -> dict:
    return {"type": "image", "image": source, **fields}


def as_url(data: bytes, **fields) -> dict:
    return {"type": "image_url", "image_url": {"url": url_of(data), **fields}}


PNG, OTHER, LARGE = png_of(300, 200), png_of(200, 300, seed=1), png_of(800, 700, colours=1)

EMPTY = bytes(4) + b"tEXt" + zlib.crc32(b"tEXt").to_bytes(4, "big")  # a chunk of a PNG


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return qwen3.load_model(make_seeing(CONFIGS["VL"], tmp_path_factory.mktemp("seeing")))


@pytest.fixture(scope="module")
def served(model):
    with Served(model, slots=2, longest=1500) as served:
        yield served


def n_tokens(model, data, *most_pixels) -> int:
    return len(model.media.show(picture_of(data), *most_pixels).ids)


def completion_of(model, *messages):
    return qwen3.chat(model, [*messages], **LIKELIEST).finish()


@pytest.mark.parametrize("part", [
    as_url(PNG), as_url(PNG, detail="high"), {"type": "image_url", "image_url": url_of(PNG, "image/jpeg")}])
def test_a_chat(served, model, part):
    """Answer and number of tokens are the library's; the type that a URL names doesn't count."""
    expected = completion_of(model, asked(picture(PNG), picture(OTHER)))
    status, value, _ = served.ask("/v1/chat/completions", {"messages": [asked(part, as_url(OTHER))], **LIKELIEST})
    assert (status, value["choices"][0]["message"]["content"]) == (200, expected.answer.content)
    assert value["usage"]["prompt_tokens"] == len(expected.prompt_ids) and "pictures: 0." in statistics(expected)


def test_a_response(served, model):
    parts = [{"type": "input_image", "image_url": url_of(PNG), "detail": "auto"}, TEXT | {"type": "input_text"}]
    expected = completion_of(model, asked(picture(PNG)))
    client = served.client()
    got = client.responses.create(model="x", input=[{"role": "user", "content": parts}], max_output_tokens=5,
                                  temperature=0)
    assert (got.output_text, got.usage.input_tokens) == (expected.answer.content, len(expected.prompt_ids))
    result = {"type": "function_call_output", "call_id": "a", "output": parts[:1]}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    client.responses.create(model="x", input=[{"role": "user", "content": "Look."}, call, result], max_output_tokens=1)


def looked_at(data=PNG) -> dict:
    """The message in Anthropic's form with a picture that a tool has read."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [
        {"type": "image", "source": source}]}]}


def test_a_message(served):
    """A picture in the result of a tool has the same prompt as in a chat."""
    call = {"id": "a", "name": "look", "input": {}}
    asked_for = {"role": "assistant", "content": [{"type": "tool_use", **call}]}
    counts = {"model": "m", "messages": [*FRANCE, asked_for, looked_at()], "thinking": {"type": "adaptive"}}
    chat = {"messages": [*FRANCE, {"role": "assistant", "content": "", "tool_calls": [{"function": {
        "name": "look", "arguments": "{}"}}]}, {"role": "tool", "content": [as_url(PNG)]}], **LIKELIEST}
    status, value, _ = served.ask("/v1/chat/completions", chat)
    answer = served.ask("/v1/messages", counts | LIKELIEST)[1]
    assert status == 200 and sum(answer["usage"].values()) == value["usage"]["total_tokens"]
    assert answer["content"][-1]["text"] == value["choices"][0]["message"]["content"]
    assert served.ask("/v1/messages/count_tokens", counts)[1] == {"input_tokens": value["usage"]["prompt_tokens"]}


def test_models_and_templates(served, model, demo):
    assert served.ask("/v1/models")[1]["data"][0]["input_modalities"] == ["text", "image"]
    assert f"{MARK}What is this?" in served.ask("/apply-template", {"messages": [asked(as_url(PNG))]})[1]["prompt"]
    with Served(demo) as reading:
        assert reading.ask("/v1/models")[1]["data"][0]["input_modalities"] == ["text"]
        status, value, _ = reading.ask("/v1/chat/completions", {"messages": [asked(as_url(PNG))]})
        assert (status, value["error"]["param"]) == (400, "image_url") and "can't see" in value["error"]["message"]


@pytest.mark.parametrize("part, param, words", [
    ({"type": "image_url", "image_url": {"url": "https://a.org/b.png"}}, "image_url", "https://a.org/b.png"),
    ({"type": "image_url", "image_url": "file:///etc/passwd"}, "image_url", "not opened"),
    ({"type": "image_url", "image_url": {}}, "image_url", "or has no url"),
    ({"type": "input_image", "file_id": "f"}, "image_url", "data: URL"),
    (picture("/etc/passwd"), "image", "not opened"),
    ({"type": "image_url", "image_url": "data:image/png;base64,?"}, "image_url", "not base64"),
    (as_url(b"GIF89a"), "image_url", "cannot be read"), (as_url(PNG, detail="most"), "image_url", "detail"),
    (as_url(PNG) | {"detail": []}, "image_url", "detail"),
    (as_url(PNG[:33] + EMPTY * 600_000 + PNG[33:]), "image_url", "many parts"),
    (as_url(PNG[:-500]), "image_url", "cannot be read"), (as_url(PNG, size=1), "image_url", "unknown field: size"),
    (as_url(PNG) | {"max_pixels": 4096}, "image_url", "unknown field: max_pixels"),
    (as_url(bytes(2**23 + 3)), "image_url", "8,388,608 bytes"), (as_url(png_of(1, 300)), "image_url", "too narrow"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "messages", "a video")])
def test_parts_that_are_refused(served, part, param, words):
    status, value, _ = served.ask("/v1/chat/completions", {"messages": [*FRANCE, asked(part)]})
    assert (status, value["error"]["param"]) == (400, param)
    assert words in value["error"]["message"] and "message 1" in value["error"]["message"]


def test_limits(served, monkeypatch):
    """Of pixels before anything is decoded, and of tokens before the next picture is computed."""
    def refusal(*parts, role="user"):
        status, value, _ = served.ask("/v1/chat/completions", {"messages": [asked(*parts, role=role)]})
        return status, value["error"]["code"], value["error"]["message"]

    assert "4097 x 4096 pixels; 1 to 16,777,216 can be read" in refusal(as_url(without_pixels(4097, 4096)))[2]
    assert "4096 x 4096" not in refusal(as_url(without_pixels(4096, 4096)))[2]
    monkeypatch.setattr(served.model.media, "recent", [])
    seen = []
    monkeypatch.setattr(qwen3_vision, "tower", lambda *pixels: seen.append(1) or tower(*pixels))
    large = [as_url(png_of(900, 900, seed=seed)) for seed in (5, 6, 7)]
    assert refusal(*large)[:2] == (400, "context_length_exceeded") and len(seen) == 1
    assert "system" in refusal(as_url(PNG), role="developer")[2]


def test_limits_are_exact(model):
    """32 pictures are taken, and as many tokens as leave room for one more, also in the library."""
    small = png_of(64, 64, seed=20)
    messages, n = [asked(*[as_url(small)] * 32)], 32 * n_tokens(model, small)
    text, found = openai.chat_prompt(model, {"messages": messages}, openai.Door(n + 1))
    assert len(found) == text.count("<|image_pad|>") == 32
    too_long = f"brings the tokens of all pictures to {n:,}"
    for given, longest, words in ((messages * 2, 2**20, "more than 32 pictures"), (messages, n, too_long)):
        assert words in message_of(openai.chat_prompt, model, {"messages": given}, openai.Door(longest))
    short = replace(model, config=replace(model.config, context_length=n))
    assert too_long in message_of(qwen3.chat, short, messages)


def about(seed) -> dict:
    """A request about a small picture."""
    return {"messages": [asked(as_url(png_of(64, 64, seed=seed)))], "max_tokens": 1}


@pytest.fixture
def held(monkeypatch):
    """The tower waits -> (released when it has got a picture, to be set so that it goes on, its pictures)"""
    began, go, seen = threading.Semaphore(0), threading.Event(), []

    def slow(pixels, *rest):
        seen.append(pixels)
        began.release()
        assert go.wait(30)
        return tower(pixels, *rest)

    monkeypatch.setattr(qwen3_vision, "tower", slow)
    return began, go, seen


def test_while_a_picture_is_computed_others_are_answered(model, monkeypatch, held):
    """The tower works in the request's thread, and requests that wait for it take none."""
    monkeypatch.setattr(web, "THREADS", 2)
    began, go, _ = held
    with Served(model, slots=3, longest=1500) as served, ThreadPoolExecutor() as pool:
        answers = [pool.submit(served.ask, "/v1/chat/completions", about(seed)) for seed in (11, 12, 13)]
        assert began.acquire(timeout=30)
        until(lambda: len(served.server.server_state.connections) == 3)  # the others are there
        assert served.ask("/v1/chat/completions", {"messages": FRANCE, "max_tokens": 2})[0] == 200
        assert not began.acquire(blocking=False)
        go.set()
        assert [answer.result()[0] for answer in answers] == [200] * 3


def test_requests_that_wait_for_others_pictures_are_told_when_the_server_stops(model, held):
    began, go, _ = held
    with Served(model) as served, ThreadPoolExecutor() as pool:
        answers = [pool.submit(served.ask, "/v1/chat/completions", about(seed)) for seed in (31, 32, 33)]
        assert began.acquire(timeout=30)
        served.worker.loop.call_soon_threadsafe(served.worker.over.set)
        got = [answer.result() for answer in answers]
        go.set()
    assert [(status, value["error"]["message"]) for status, value, _ in got] == [(503, "the server is stopping")] * 3


def test_clients_that_leave_before_their_answer_begins(model, held):
    """While its picture is computed, or while it waits for that: nothing more is computed for it."""
    def asking(seed):
        body = json.dumps(about(seed)).encode()
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" %
                           len(body) + body)
        return connection

    began, go, seen = held
    with Served(model, slots=2, longest=1500) as served:
        connections = served.server.server_state.connections
        first = asking(16)
        assert began.acquire(timeout=30)
        others = [asking(17), asking(18)]
        until(lambda: len(connections) == 3)
        for connection in (first, others[0]):
            connection.close()
        until(lambda: len(connections) == 1)
        go.set()
        assert others[1].recv(100).startswith(b"HTTP/1.1 200")
        assert (len(seen), served.worker.totals["answers_begun"]) == (2, 1)
        others[1].close()


@pytest.mark.parametrize("path, body", [
    ("/v1/chat/completions", {"messages": [asked(as_url(PNG))]}),
    ("/apply-template", {"messages": [asked(as_url(PNG))]}),
    ("/v1/responses", {"messages": None, "input": [asked({"type": "input_image", "image_url": url_of(PNG)})]}),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}, {
        "type": "function_call_output", "call_id": "a", "content": "text", "output": [
            {"type": "input_image", "image_url": url_of(PNG)}]}]}),
    ("/v1/messages", {"model": "m", "messages": [*FRANCE, looked_at()]})])
def test_one_request_at_a_time_decodes_pictures(served, monkeypatch, path, body):
    """Wherever in the body they stand: a decoded one may take 200 MB."""
    def decode(url):
        with lock:
            running.append(url)
            most.append(len(running))
        time.sleep(0.1)
        with lock:
            running.pop()
        return pictures.picture_at(url)

    lock, running, most = threading.Lock(), [], []
    monkeypatch.setattr(openai, "picture_at", decode)
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda _: served.ask(path, body | {"max_tokens": 1}), range(4))]
    assert most == [1] * 4


def test_a_request_with_a_picture_is_checked_once(served, monkeypatch):
    checked, real = [], openai.known
    monkeypatch.setattr(openai, "known", lambda body, names: checked.append(names) or real(body, names))
    assert served.ask("/v1/chat/completions", {"messages": [asked(as_url(PNG))], **LIKELIEST})[0] == 200
    assert len(checked) == 1


def test_a_refused_picture_does_not_stay_in_memory(model, monkeypatch):
    """Also while no garbage is collected: an image has 50 MB."""
    images = []
    monkeypatch.setattr(openai, "picture_at", lambda url: images.append(pictures.picture_at(url)) or images[-1])
    with Served(model, longest=20) as served:
        gc.disable()
        try:
            for path in ("/v1/chat/completions", "/apply-template"):
                status, value, _ = served.ask(path, {"messages": [asked(as_url(png_of(640, 640)))]})
                assert (status, value["error"]["code"]) == (400, "context_length_exceeded")
                left = weakref.ref(images.pop())
                until(lambda: left() is None)
        finally:
            gc.enable()


def test_pictures_stay_until_they_are_answered(served, model, monkeypatch):
    """Though none is kept for later, and the answer waits for a slot while others show theirs."""
    monkeypatch.setattr(qwen3_vision, "KEPT_PICTURES", 0)
    submit, asked_for, waiting = served.worker.submit, threading.Event(), threading.Event()

    async def late(*asked):
        asked_for.set()
        while not waiting.is_set():
            await asyncio.sleep(0.01)
        return await submit(*asked)

    monkeypatch.setattr(served.worker, "submit", late)
    asking = {"messages": [asked(as_url(PNG), as_url(OTHER))], **LIKELIEST}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(served.ask, "/v1/chat/completions", asking)
        asked_for.wait()
        model.media.show(picture_of(png_of(64, 64, seed=10)))
        gc.collect()
        waiting.set()
    expected = completion_of(model, asked(picture(PNG), picture(OTHER))).answer.content
    assert answer.result()[1]["choices"][0]["message"]["content"] == expected


def test_batch_files(model, tmp_path, capfd, monkeypatch):
    """Paths beside the file, and OpenAI's form; none of a record's pictures is dropped before its answer."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "photo.png").write_bytes(PNG)
    asking = [asked(picture("photo.png"), as_url(OTHER)), asked(picture("photo.png", max_pixels=2**15)),
              asked(picture("none.png")), asked({"type": "video", "video": "a.mp4"}), asked(picture({}))]
    asking += [asked(picture(url_of(PNG), max_pixels=2**15)), asked(picture(url_of(bytes(2**23 + 3))))]
    asking += [asked({"type": "image_url", "image_url": {"url": "photo.png"}})]  # no stranger's form opens a file
    rows = [{"messages": [message], "max_new_tokens": 5, "temperature": 0} for message in asking]
    rows.append({"custom_id": "o", "body": {"messages": [asked(as_url(PNG))], **LIKELIEST}})
    (tmp_path / "in" / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(qwen3_vision, "KEPT_PICTURES", 0)
    status, _, _ = run_main(capfd, tmp_path / "in" / "in.jsonl", "--out", tmp_path / "out.jsonl", "--model", model.path,
                            "--no-fast", "--memory", "100MB", main=qwen3_batch.main)
    found = {row["line"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    expected = [asked(picture(PNG), picture(OTHER)), asked(picture(PNG, max_pixels=2**15)), asked(picture(PNG))]
    assert status == 0 and [found[line]["text"] for line in (1, 2, 9)] == [completion_of(model, message).text
                                                                         for message in expected]
    assert found[6]["text"] == found[2]["text"] and "8,388,608 bytes" in found[7]["error"]
    assert "not opened: 'photo.png'" in found[8]["error"]
    assert "none.png: no such file" in found[3]["error"] and "a video" in found[4]["error"]


def test_the_largest_size_at_each_door(model, tmp_path):
    """A part's own counts; else the smaller one of max_pixels and what its detail allows."""
    for part, given, most in ((as_url(LARGE), 2**17, 2**17), (as_url(LARGE) | {"max_pixels": 2**18}, 2**17, 2**18),
                              (as_url(LARGE, detail="low"), 2**19, 2**18), (as_url(LARGE, detail="low"), 2**17, 2**17)):
        row, n = {"messages": [asked(part)]}, n_tokens(model, LARGE, most)
        [(ids, _)] = request_of_row(model, JobSettings({"max_pixels": given}), row, 1, tmp_path).answers
        asked_here = qwen3.chat(model, row["messages"], max_pixels=given).prompt_ids
        assert (np.array(ids) < 0).sum() == (asked_here < 0).sum() == n
        if part == as_url(LARGE):  # a server has one size for all
            text, [found] = openai.chat_prompt(model, row, openai.Door(2**12, options={"max_pixels": given}))
            assert len(found.ids) == n


def test_urls_in_messages(model, tmp_path, capfd):
    """OpenAI's form with a data: URL, in a program and in --messages: as the bytes."""
    for part, same in ((as_url(PNG), picture(PNG)), ({"type": "input_image", "image_url": url_of(PNG)}, picture(PNG)),
                       (picture(url_of(PNG), max_pixels=2**15), picture(PNG, max_pixels=2**15))):
        expected, found = completion_of(model, asked(same)), completion_of(model, asked(part))
        assert (found.text, len(found.prompt_ids)) == (expected.text, len(expected.prompt_ids))
    (tmp_path / "talk.json").write_text(json.dumps([asked(part)]))
    status, out, err = run_main(capfd, "--messages", tmp_path / "talk.json", "--model", model.path, "--no-fast",
                                "--max-tokens", 5, "--greedy")
    assert (status, out.strip()) == (0, expected.text.strip())
    assert "8,388,608 bytes" in message_of(completion_of, model, asked(as_url(bytes(2**23 + 3))))


def test_conversations_in_files(tmp_path, capfd):
    """Paths are relative to the file."""
    call = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]}
    (tmp_path / "talk.json").write_text(json.dumps([asked(picture("a.png")), call]))
    [part, _] = read_messages(str(tmp_path / "talk.json"))[0][0]["content"]
    assert part == picture(str(tmp_path / "a.png"))
    (tmp_path / "talk.json").write_text(json.dumps([asked({"type": "audio", "audio": "a.wav"})]))
    assert "audio" in message_of(read_messages, str(tmp_path / "talk.json"))
    assert_cli_refuses(capfd, ["--max-pixels", "0", "Hello"], "--max-pixels must be a number from 1 to 16777216")


def test_the_chat(model, demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in (("a photo.png", PNG), ("first.png", PNG), ("other.png", OTHER)):
        (tmp_path / name).write_bytes(data)
    options = AnswerOptions(max_new_tokens=5, temperature=0)
    chat = Chat(model, [], options=options)
    assert "a photo.png" in handled(chat, f"/image {tmp_path}/a photo.png")
    assert handled(chat, "/image -") == handled(chat, "/image") == "(0 pictures for the next message)"
    for line in ("a\\ photo.png", f"'{tmp_path}/a photo.png'", f"{tmp_path}/other.png "):  # as terminals paste them
        handled(chat, line)
    shown = [str(tmp_path / name) for name in ("a photo.png", "a photo.png", "other.png")]
    assert chat.images == shown and chat.messages == []
    assert "no such file" in refused(chat, "/image none.png")
    assert "cannot be read" in refused(chat, f"/image {__file__}")
    handled(chat, "What is this?")
    expected = completion_of(model, asked(*map(picture, (PNG, PNG, OTHER))))
    assert chat.images == [] and chat.messages[1] == expected.message
    assert f"> [{shown[0]}] [{shown[1]}] [{shown[2]}] What is this?" in handled(chat, "/history")
    handled(chat, "/save talk.json")
    again = Chat(model, [], options=options)
    handled(again, "/load talk.json")
    handled(again, "/regenerate")
    assert again.messages == chat.messages
    (tmp_path / "other.png").unlink()
    assert "other.png: no such file (the message was not added" in refused(again, "And now?")
    for text in ("/image a photo.png", str(tmp_path / "a photo.png"), f"{tmp_path / 'first.png'} What is this?"):
        assert "can't see" in refused(Chat(demo, []), text)


def test_pictures_that_wait_for_a_question_in_the_chat(model, tmp_path, monkeypatch):
    """They stay if the question is taken back."""
    files = [tmp_path / name for name in ("a.png", "b.png", "narrow.png")]
    for file, size in zip(files, ((64, 64), (64, 96), (1, 300))):
        file.write_bytes(png_of(*size, seed=19))
    chat = Chat(model, [], options=AnswerOptions(max_new_tokens=5, temperature=0, max_pixels=2**16))
    handled(chat, "Hello")
    for file in files[:2]:
        handled(chat, f"/image {file}")
    assert "narrow.png: cannot be read: a picture of 300 x 1 pixels" in refused(chat, f"/image {files[2]}")
    monkeypatch.setattr(qwen3_vision, "tower", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        handled(chat, "What is this?")
    monkeypatch.undo()
    assert chat.images == [*map(str, files[:2])] and roles(chat.messages) == "ua"
    files[0].unlink()
    said = refused(chat, "What is this?")
    assert "a.png: no such file (the message was not added; 2 pictures for the next message: a.png, b.png; /im" in said
    handled(chat, "/image -")
    handled(chat, f"/image {files[1]}")
    assert "a number from 1 to 16777216" in refused(chat, "/set max_pixels 0")
    assert handled(chat, "/set max_pixels") == "max_pixels = 65536"
    handled(chat, "What is this?")
    assert chat.images == [] and chat.messages[2] == asked(picture(str(files[1]), max_pixels=2**16))


def test_a_chat_that_begins_with_a_picture(model, tmp_path, capfd, monkeypatch):
    """Its file is decoded once."""
    (tmp_path / "a.png").write_bytes(PNG)
    monkeypatch.setattr(pictures, "rgb", decoded := mock.Mock(side_effect=pictures.rgb))
    options = ("--model", model.path, "--no-fast", "--max-tokens", 5, "--greedy", "--image", tmp_path / "a.png")
    expected = completion_of(model, asked(picture(PNG))).text.strip()
    for more, stdin, said in ((["--chat"], b"What is this?\n", "(1 picture for the next message: a.png)\n"),
                              (["--chat", "What is this?"], b"", ""), (["What is this?"], b"", "")):
        decoded.reset_mock()
        status, out, err = run_main(capfd, *options, *more, stdin=stdin)
        assert (status, out.strip(), decoded.call_count) == (0, expected, 1) and err.startswith(said)
        assert ("picture" in err) == bool(said)
    assert_cli_refuses(capfd, ["--chat", "--image", tmp_path / "a.png"], "this model can't see")


PUT = """([bytes, place, name]) => {
  const data = new DataTransfer(), type = {paste: ClipboardEvent, drop: DragEvent}[name];
  data.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt())], "a.png", {type: "image/png"}));
  document.querySelector(place).dispatchEvent(new type(name, {
    bubbles: true, cancelable: true, ...(name === "paste" ? {clipboardData: data} : {dataTransfer: data})}));
}"""


@pytest.mark.timeout(120)
def test_the_page(browser, served, tmp_path):
    """Pictures are pasted, dropped and chosen, made smaller, kept in the browser, and asked about again."""
    from test_server_browser import CHATS, Tab, sync_api
    context = browser.new_context()
    context.add_init_script(axe_core())
    tab, thumbnails = Tab(context, served.url), "#pictures img"
    sync_api.expect(tab.page.locator("#add")).to_be_visible()
    tab.page.evaluate("at('max_tokens').value = 2")
    tab.page.evaluate(PUT, [base64.b64encode(png_of(1100, 1000, colours=1)).decode(), "#box", "paste"])
    sync_api.expect(tab.page.locator(thumbnails)).to_have_count(1)
    tab.page.evaluate(PUT, [base64.b64encode(PNG).decode(), "#log", "drop"])
    sync_api.expect(tab.page.locator(thumbnails)).to_have_count(2)
    tab.page.set_input_files("#files", [{"name": name, "mimeType": "image/png", "buffer": data}
                                        for name, data in (("b.png", OTHER), ("c.png", b"no picture"))])
    tab.see("#ask-says", "can't read c.png")
    tab.press("Remove picture 2")
    sync_api.expect(tab.page.locator(thumbnails)).to_have_count(2)
    tab.ask("What is this?")
    *shown, text = tab.bodies[-1]["messages"][0]["content"]
    files = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in shown]
    (width, height), size = (Image.open(io.BytesIO(file)).size for file in files)
    assert text == TEXT and size == (300, 200) and 2**20 - 5000 < width * height <= 2**20
    assert tab.texts("article .error") == [""]
    tab.page.reload()
    tab.page.evaluate("at('max_tokens').value = 2")
    sync_api.expect(tab.page.locator(".user .pictures img")).to_have_count(2)
    [chat] = tab.page.evaluate(CHATS)
    assert chat["turns"][0]["pictures"] == [part["image_url"]["url"] for part in shown]
    assert_looks(tab.page, tab.page.viewport_size["width"], tmp_path / "page.png")
    tab.ask("And this?")
    assert tab.bodies[-1]["messages"][0]["content"] == [*shown, text]
    assert tab.bodies[-1]["messages"][2] == {"role": "user", "content": "And this?"}
    tab.page.set_input_files("#files", [{"name": "d.png", "mimeType": "image/png", "buffer": png_of(1, 300)}])
    sync_api.expect(tab.page.locator(thumbnails)).to_have_count(1)
    tab.ask("And that?", wait=False)  # a picture that the server refuses is not added to the conversation
    tab.see("#ask-says", "too narrow")
    sync_api.expect(tab.page.locator(thumbnails)).to_have_count(1)
    assert tab.page.input_value("#box") == "And that?" and len(tab.page.evaluate(CHATS)[0]["turns"]) == 4
    tab.close("400")
    context.close()
