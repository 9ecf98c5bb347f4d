"""Texts that the server speaks: its forms and streams, several clients, those that leave, three models in
one server, the page, batch files."""
import base64
import io
import json
import socket
import threading
import time
import urllib.request
import wave
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import openai
import pytest

import qwen3
import qwen3_batch
import qwen3_numba
import qwen3_tts
from configs import ROOT, tts_config
from helpers import assert_looks, axe_core, run_main
from qwen3_lib.generation import choir
from qwen3_lib.server import speeches
from qwen3_lib.server.speeches import AHEAD, AT_ONCE, LONGEST_INPUT
from serving import PARIS, FRANCE, Served, form, received, started, until
from talking import make_talking

pytest.importorskip("python_multipart")
SPEECH, TEXT = "/v1/audio/speech", "Good morning. How are you?"
LONG = "All of these words are spoken. " * 40  # three parts, 72 frames
HEARING = ROOT / "tests/tiny_hearing"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_talking(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def model(path):
    """It never draws the end, so a part of a text has 24 frames, as many as its generation_config.json allows."""
    model = qwen3.load_model(path)
    model.media.allowed[model.media.end] = False
    return model


@pytest.fixture(scope="module")
def served(model):
    with Served(model, slots=1, longest=1) as served:
        yield served


@pytest.fixture(scope="module")
def create(served):
    return lambda text=TEXT, seed=1, **fields: served.client().audio.speech.create(
        **{"input": text, "voice": "serena", "model": "m", "extra_body": {"seed": seed}} | fields)


def spoken(model, text=TEXT, seed=1, **options) -> np.ndarray:
    return np.rint(qwen3_tts.speak(model, text, seed=seed, **options).samples * 32767).astype("<i2")


def read_sound(data: bytes) -> tuple[np.ndarray, int]:
    return pytest.importorskip("soundfile").read(io.BytesIO(data), dtype="int16")


@pytest.fixture
def steps(monkeypatch):
    """A pass that waits until it may go on, and notes how many texts it takes."""
    class Steps(threading.Semaphore):
        def __init__(self):
            super().__init__(0)
            self.sizes, self.real = [], choir.next_frames

        def __call__(self, model, talks):
            self.sizes.append(len(talks))
            assert self.acquire(timeout=30)
            return self.real(model, talks)

    steps = Steps()
    monkeypatch.setattr(choir, "next_frames", steps)
    yield steps
    steps.release(10_000)


@pytest.fixture
def moves(monkeypatch):
    """Who has begun to be spoken, and who has left."""
    found = SimpleNamespace(join=[], leave=[])
    for name, calls in vars(found).items():
        monkeypatch.setattr(speeches.Speakers, name, lambda self, one, real=getattr(speeches.Speakers, name),
                            calls=calls: (real(self, one), calls.append(one)))
    return found


# ---- What comes ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("voice", ["serena", "Dylan", {"id": "eric"}], ids=str)
def test_the_samples_are_those_of_speak(create, model, voice):
    name = voice["id"] if isinstance(voice, dict) else voice
    got = create(voice=voice, response_format="pcm")
    assert got.response.headers["content-type"] == "audio/pcm;rate=24000"
    assert np.array_equal(np.frombuffer(got.content, "<i2"), spoken(model, voice=name))


def test_a_language_and_a_long_text(create, model):
    for text, options in ((TEXT, {"language": "en"}), (LONG, {}), (TEXT, {"temperature": 0.0})):
        got = create(text, response_format="pcm", extra_body={"seed": 1} | options)
        assert np.array_equal(np.frombuffer(got.content, "<i2"), spoken(model, text, **options))


@pytest.mark.parametrize("form, media, kind", [
    ("wav", "audio/wav", "WAV"), ("flac", "audio/flac", "FLAC"), ("opus", "audio/ogg", "OGG"),
    ("mp3", "audio/mpeg", "MP3"), (None, "audio/mpeg", "MP3")])
def test_forms_of_sounds(create, model, form, media, kind):
    """By the library that others read them with; the lossless ones have the samples. The default is OpenAI's, MP3."""
    soundfile = pytest.importorskip("soundfile")
    got = create(LONG, **{} if form is None else {"response_format": form})
    samples, rate = read_sound(got.content)
    expected = spoken(model, LONG)
    assert (got.response.headers["content-type"], rate) == (media, 24_000)
    assert soundfile.info(io.BytesIO(got.content)).format == kind
    if form in ("wav", "flac"):
        assert np.array_equal(samples, expected)
    else:
        assert 0 <= len(samples) - len(expected) < 3_000  # a coder may fill its last frame


def test_without_soundfile(create, monkeypatch):
    """WAV is the default then, and others are refused."""
    monkeypatch.setattr(speeches, "find_spec", lambda name: None)
    with wave.open(io.BytesIO(create().content)) as file:
        assert file.getframerate() == 24_000
    with pytest.raises(openai.BadRequestError, match="one of wav, pcm; more of them with: pip install soundfile"):
        create(response_format="flac")


def test_sound_comes_while_it_is_spoken(served, steps, model):
    body = json.dumps({"input": LONG, "seed": 1, "response_format": "wav"}).encode()
    steps.release(3)
    with urllib.request.urlopen(served.url + SPEECH, body, timeout=30) as got:
        first = got.read(44 + 2 * 2 * 48)
        assert len(steps.sizes) <= 4
        steps.release(10_000)
        assert np.array_equal(np.frombuffer((first + got.read())[44:], "<i2"), spoken(model, LONG))


@pytest.mark.parametrize("kind", ["pcm", "wav", "flac"])
def test_events(served, model, kind):
    """As OpenAI names them."""
    if kind == "flac":
        pytest.importorskip("soundfile")
    body = json.dumps({"input": TEXT, "seed": 1, "response_format": kind, "stream_format": "sse"}).encode()
    with urllib.request.urlopen(served.url + SPEECH, body, timeout=30) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        *deltas, done = [json.loads(part.partition("data: ")[2]) for part in got.read().decode().strip().split("\n\n")]
    assert {each["type"] for each in deltas} == {"speech.audio.delta"}
    data, expected = b"".join(base64.b64decode(each["audio"]) for each in deltas), spoken(model)
    samples = np.frombuffer(data, "<i2") if kind == "pcm" else read_sound(data)[0]
    assert np.array_equal(samples, expected) and len(expected) == 24 * 48
    assert len(deltas) == (1 if kind == "flac" else 11)  # blocks of 1, 1, 1, 1, 2, 2, 3, 3, 4, 5 frames, and the rest
    n = len(model.tokenizer.encode(TEXT))
    assert done == {"type": "speech.audio.done", "usage": {
        "input_tokens": n, "output_tokens": len(expected) // 48, "total_tokens": n + len(expected) // 48}}


def test_no_seed(served):
    """-1, as for texts."""
    sounds = {served.client().audio.speech.create(input=TEXT, voice="serena", model="m", response_format="pcm",
                                                  extra_body={"seed": -1}).content for _ in range(2)}
    assert len(sounds) == 2


def test_figures(model):
    """Of all models of the server: texts, seconds of sound, and the parts of a sound that were heard."""
    def figure(name):
        return float(served.ask("/metrics")[1].partition(f"\nqwen3_{name}_total ")[2].split("\n")[0])

    with Served(lambda: qwen3.load_model(ROOT / "demo"), hears=qwen3.load_model(HEARING), speaks=model) as served:
        for text in (TEXT, LONG):
            served.client().audio.speech.create(input=text, voice="serena", model="m", response_format="pcm")
        assert figure("spoken_texts") == 2 and figure("answers_ended") == figure("cancelled") == 0
        assert figure("spoken_seconds") == pytest.approx((24 + 72) * 48 / 24_000)
        with open(HEARING / "speech.wav", "rb") as file:
            served.client().audio.transcriptions.create(model="m", file=file)
        assert figure("answers_ended") == 1


def test_voices(served):
    assert served.ask("/v1/audio/voices")[:2] == (200, {"voices": [
        {"id": name, "name": name} for name in ("serena", "dylan", "eric")]})


# ---- What is refused -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields, param, words", [
    ({"input": ""}, "input", "input must be a text of 1 to 4,096 characters"), ({"input": " \n"}, "input", "a text of"),
    ({"input": "a" * (LONGEST_INPUT + 1)}, "input", "4,096"), ({"input": ["a"]}, "input", "a text of"),
    ({"voice": "alloy"}, "voice", "voice must be one of serena, dylan, eric, not 'alloy'"), ({"voice": 3}, "voice", ""),
    ({"speed": 1.5}, "speed", "speed can only be 1"),
    ({"response_format": "aac"}, "response_format", "one of wav, pcm"),
    ({"stream_format": "x"}, "stream_format", "audio or sse"), ({"language": "Klingon"}, "language", "Klingon"),
    ({"instructions": "angry"}, None, "the 0.6B takes no instruct"), ({"seed": -2}, "seed", "seed"),
    ({"instructions": 3}, "instructions", "must be a text"), ({"temperature": -1}, "temperature", "temperature"),
    ({"voise": "serena"}, "voise", "unknown field voise; did you mean voice?")], ids=str)
def test_what_is_refused(served, path, fields, param, words):
    status, answer, _ = served.ask(SPEECH, {"input": TEXT} | fields)
    assert status == 400 and answer["error"]["param"] == param
    assert words in answer["error"]["message"] and str(path) not in answer["error"]["message"]


def test_models_that_speak_in_other_ways(tmp_path, path):
    """A description is the instructions; a model without a voice says so; one that speaks doesn't chat."""
    designs = make_talking(tmp_path / "design", tts_config("1.7B", "voice_design"))
    with Served(model := qwen3.load_model(designs), slots=1, longest=1) as served:
        got = served.client().audio.speech.create(input=TEXT, voice="default", model="m", response_format="pcm",
                                                  instructions="a deep voice", extra_body={"seed": 1})
        assert np.array_equal(np.frombuffer(got.content, "<i2"), spoken(model, describe="a deep voice"))
        assert served.ask("/v1/audio/voices")[1] == {"voices": [{"id": "default", "name": "default"}]}
        for where, fields in (("/v1/chat/completions", {"messages": FRANCE}), ("/v1/completions", {"prompt": "a"})):
            status, answer, _ = served.ask(where, fields)
            assert status == 400 and "POST /v1/audio/speech" in answer["error"]["message"]
    with Served(qwen3.load_model(make_talking(tmp_path / "base", tts_config(kind="base"))), slots=1) as served:
        for answer in (served.ask(SPEECH, {"input": TEXT, "voice": "alloy"}), served.ask("/v1/audio/voices")):
            assert answer[0] == 400 and "base: this model has no voice of its own" == answer[1]["error"]["message"][:40]


def test_weights_that_are_not_finite(tmp_path):
    broken = qwen3.load_model(make_talking(tmp_path))
    broken.media.weights["narrow"] = np.full_like(broken.media.weights["narrow"], np.nan)
    with Served(broken, slots=1, longest=1) as served:
        status, answer, _ = served.ask(SPEECH, {"input": TEXT})
        assert status == 500 and "finite" in answer["error"]["message"]


# ---- Several clients -------------------------------------------------------------------------------------------------

def test_clients_share_passes(create, model, steps, moves):
    """Each has the sound that it has alone."""
    with ThreadPoolExecutor(AT_ONCE + 1) as threads:
        sounds = [threads.submit(create, LONG[-310 - 31 * i:], i, response_format="pcm") for i in range(AT_ONCE + 1)]
        until(lambda: len(moves.join) == AT_ONCE + 1)
        steps.release(10_000)
        for i, sound in enumerate(sounds):
            found = np.frombuffer(sound.result().content, "<i2")
            expected = spoken(model, LONG[-310 - 31 * i:], i)
            assert len(found) == len(expected) and np.abs(found.astype(int) - expected).max() <= 1
    assert max(steps.sizes) == AT_ONCE


def test_a_choir_sings_the_same_bits(path):
    """In the fast engine, texts that begin and end at different times."""
    model = qwen3_numba.load_model(path, "int8", 1)
    choir_of = choir.Choir()
    found = {}
    for i in range(20):
        if i < 10:
            choir_of.add(i, qwen3_tts.speak(model, LONG[-31 * (i + 1):], seed=i))
        assert choir_of.free == AT_ONCE - len(choir_of.singers)
        while choir_of.free <= 0 or i >= 10 and not choir_of.idle:
            found |= choir_of.step()
        found |= choir_of.step()
    assert len(found) == 10
    for i, one in found.items():
        assert np.array_equal(one.samples, qwen3_tts.speak(model, LONG[-31 * (i + 1):], seed=i).samples)


def ask_for(served, **fields) -> socket.socket:
    body = json.dumps({"input": LONG, "response_format": "pcm"} | fields).encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    head = f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}, {"response_format": "flac"}], ids=str)
def test_a_client_that_leaves_ends_its_sound(served, steps, moves, fields):
    """Within a frame, also one that waits for a whole file."""
    if "response_format" in fields:
        pytest.importorskip("soundfile")
    connection = ask_for(served, **fields)
    until(lambda: steps.sizes)
    if "response_format" not in fields:
        steps.release()
        received(connection, b"\r\n\r\n")
        until(lambda: len(steps.sizes) == 2)
    connection.close()
    steps.release()
    until(lambda: moves.leave)
    n = len(steps.sizes)
    steps.release(10_000)
    assert served.client().audio.speech.create(input="Hi.", voice="serena", model="m", response_format="pcm").content
    assert len(steps.sizes) <= n + 1 + 24  # of "Hi."


def test_too_many_texts(model, steps, moves):
    with Served(model, slots=1, longest=1, queue=0) as served:
        connections = [ask_for(served) for _ in range(AT_ONCE)]
        until(lambda: len(moves.join) == AT_ONCE)
        status, answer, headers = served.ask(SPEECH, {"input": TEXT})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "2")
        for connection in connections:
            connection.close()
        steps.release(10_000)
        until(lambda: {*moves.join} <= {*moves.leave})
        assert served.client().audio.speech.create(input=TEXT, voice="serena", model="m").content


@pytest.mark.parametrize("ends", [False, True])
def test_a_sound_that_takes_too_long(model, steps, moves, ends):
    """For its client, or for a server that ends: an event says it, and a stream of bytes has no end."""
    with Served(model, slots=1, longest=1, seconds=60 if ends else 2) as served:
        events, sound = ask_for(served, stream_format="sse"), ask_for(served)
        until(lambda: len(moves.join) == 2)
        steps.release(2)
        for connection in (events, sound):
            received(connection, b"\r\n\r\n")
        if ends:
            served.worker.loop.call_soon_threadsafe(served.worker.end, 0)
            time.sleep(0.1)
            steps.release(10_000)
        told = received(events, b"error")
        assert (b"the server is stopping" if ends else b"not finished within 2 seconds") in told + events.recv(2**16)
        data = b""
        while more := sound.recv(2**16):
            data += more
        assert not data.endswith(b"0\r\n\r\n")
        steps.release(10_000)


def test_a_slow_reader_is_waited_for(served, monkeypatch):
    monkeypatch.setattr(speeches, "AHEAD", 5)
    sounding = speeches.Sounding(served.worker.model, {"input": LONG, "response_format": "pcm", "seed": 1})
    speakers = speeches.Speakers(served.worker)
    served.worker.loop.call_soon_threadsafe(speakers.join, sounding)
    until(lambda: sounding.pieces.qsize() == 5)
    time.sleep(0.2)
    assert sounding.pieces.qsize() == 5 and AHEAD > 5
    served.worker.loop.call_soon_threadsafe(speakers.leave, sounding)
    until(lambda: speakers.task.done())


# ---- Three models in one server --------------------------------------------------------------------------------------

def test_three_models(model):
    hearing = qwen3.load_model(HEARING)
    with Served(lambda: qwen3.load_model(ROOT / "demo"), hears=hearing, speaks=model) as served:
        client = served.client()
        assert client.chat.completions.create(model="m", messages=FRANCE, temperature=0, extra_body={
            "enable_thinking": False}).choices[0].message.content == PARIS
        with open(HEARING / "speech.wav", "rb") as file:
            heard = client.audio.transcriptions.create(model="m", file=file).text
        assert heard == "Maria has four green apples. Seven white birds."
        assert client.audio.speech.create(input=heard, voice="eric", model="m", response_format="pcm").content
        models = [each.to_dict() for each in client.models.list()]
        assert [each["id"] for each in models] == ["demo", "tiny_hearing", model.path.name]
        assert [each["input_modalities"] for each in models] == [["text"], ["text", "audio"], ["text"]]
        assert [each["output_modalities"] for each in models] == [["text"], ["text"], ["audio"]]
        assert client.models.retrieve("tiny_hearing").to_dict() == models[1]


def test_the_server_says_what_is_missing():
    with Served(lambda: qwen3.load_model(ROOT / "demo")) as served:
        body, headers = form(b"RIFF")
        for answer in (served.ask(SPEECH, {"input": TEXT}), served.ask("/v1/audio/voices")):
            assert answer[0] == 400 and "can't speak: --speech Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice" in \
                answer[1]["error"]["message"]
        answer = served.ask("/v1/audio/transcriptions", body, headers)
        assert answer[0] == 400 and "can't hear: --listen Qwen/Qwen3-ASR-0.6B" in answer[1]["error"]["message"]


def test_the_command(path, model):
    process, lines = started("--listen", str(HEARING), "--speech", str(path))
    try:
        url = lines[-1].split()[-1].removesuffix("/v1")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
        until(lambda: len([*client.models.list()]) == 3)
        got = client.audio.speech.create(input=TEXT, voice="dylan", model="m", response_format="pcm",
                                         extra_body={"seed": 1})
        assert np.array_equal(np.frombuffer(got.content, "<i2"), spoken(qwen3.load_model(path), voice="dylan"))
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize("option, value, words", [
    ("--speech", HEARING, "the model can't speak"), ("--listen", ROOT / "demo", "the model can't hear")])
def test_a_model_that_can_not(option, value, words):
    process, lines = started(option, str(value))
    status, told = process.wait(30), "".join(lines) + process.stderr.read()
    assert status == 1 and words in told and "Traceback" not in told and "a page to chat on" not in told


@pytest.mark.parametrize("kind, page", [("speaking", ""), ("hearing", "a page to record on: {}/   ")])
def test_a_model_that_does_not_chat(kind, page):
    """The first line says what its page is for, the last one counts what was spoken."""
    process, lines = started("--model", str(ROOT / f"tests/tiny_{kind}"))
    try:
        url = lines[-1].split()[-1].removesuffix("/v1")
        assert ("around the talker" if kind == "speaking" else "and a tower of") in lines[0]
        assert lines[-1] == f"{page.format(url)}for clients: {url}/v1\n"
        if kind == "speaking":
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
            client.audio.speech.create(input="Tom sees six red birds.", voice="tom", model="m")
    finally:
        process.terminate()
        told = process.stderr.read()
        assert process.wait(30) == 0
    assert told == f"stopped; {'1 answer was' if kind == 'speaking' else '0 answers were'} finished, 0 given up\n"


# ---- Batch files -----------------------------------------------------------------------------------------------------

def batch(tmp_path, capfd, path, *records, options=()):
    """(status, results) of a batch file."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    status, *_ = run_main(capfd, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--model", path, *options,
                          main=qwen3_batch.main)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    return status, sorted(lines, key=lambda each: each.get("line", 0))


def test_a_batch_file_of_texts(path, tmp_path, capfd):
    """A WAV file for each beside the results, with the samples of speak; the same command goes on."""
    records = [{"speak": f"{i}. {TEXT}", "seed": i, "voice": "eric"} for i in range(AT_ONCE + 2)]
    wrong = [{"speak": "a", "voice": "alloy"}, {"speak": 3}, {"prompt": "a"}, {"speak": " "}, {"speak": "a", "n": 2}]
    model = qwen3.load_model(path)
    for _ in range(2):
        status, results = batch(tmp_path, capfd, path, *records, *wrong)
        assert status == 0 and len(results) == len(records) + len(wrong)
        for i, found in enumerate(results[:len(records)]):
            with wave.open(str(tmp_path / f"out-{i + 1}.wav")) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            expected = spoken(model, f"{i}. {TEXT}", i, voice="eric")
            assert len(samples) == len(expected) and np.abs(samples.astype(int) - expected).max() <= 1
            assert found == {"line": i + 1, "id": i + 1, "file": str(tmp_path / f"out-{i + 1}.wav"),
                             "seconds": len(samples) / 24_000, "finish_reason": found["finish_reason"]}
            assert found["finish_reason"] in ("stop", "length")
        words = ("one of serena", "speak must be a text", '{"speak": "text"}', "no text to speak", "unknown field n")
        assert all(word in found["error"] for word, found in zip(words, results[len(records):], strict=True))
        (tmp_path / "out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results[3:]))


def test_what_a_batch_file_of_texts_tells(path, tmp_path, capfd):
    """Frames of sound, no tokens."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"speak": TEXT, "seed": 1}))
    *_, told = run_main(capfd, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--model", path,
                        main=qwen3_batch.main)
    n = round(json.loads((tmp_path / "out.jsonl").read_text())["seconds"] * 24_000) // 48
    begins, ends = told.splitlines()
    assert begins.endswith(f"records: 1, {AT_ONCE} at a time") and f"1 record answered, {n} frames in " in ends


def test_a_batch_file_for_a_model_that_does_not_speak(tmp_path, capfd):
    status, [found] = batch(tmp_path, capfd, ROOT / "demo", {"speak": "a"})
    assert status == 1 and "can't speak" in found["error"]


# ---- The page --------------------------------------------------------------------------------------------------------

PLAYED = """() => {  // counts what is played, and plays it at once
  const start = AudioBufferSourceNode.prototype.start;
  self.played = 0;
  AudioBufferSourceNode.prototype.start = function (when) {
    if (this.buffer.sampleRate === 24000) self.played += this.buffer.length;
    start.call(this, when);
  };
}"""


SPOKEN = """seconds => {  // a server that ends each sound so long after its last sample was played
  self.inputs = [];
  self.fetch = async (address, {body}) => {
    inputs.push(JSON.parse(body).input);
    const body_ = new ReadableStream({start(stream) {
      stream.enqueue(new Uint8Array(200));
      setTimeout(() => stream.close(), 1000 * seconds);
    }});
    return new Response(body_, {headers: {"content-type": "audio/pcm;rate=24000"}});
  };
}"""


def test_an_answer_is_read_to_its_end(browser, model):
    """Also a long one, in parts that the server takes. A sound's end may come after its last sample was played."""
    from test_server_browser import Tab
    with Served(lambda: qwen3.load_model(ROOT / "demo"), speaks=model) as served:
        context = browser.new_context()
        tab = Tab(context, served.url)
        tab.ask("What is the capital of France?")
        tab.page.evaluate("self.place = document.querySelector('.turn:not(.user) .block').parentElement")
        tab.page.evaluate("text => showAnswer(place, text)", "Run:\n\n```python\nprint(1)\n```\n\nDone.")
        tab.page.evaluate(SPOKEN, 0)
        tab.press("Read aloud")
        until(lambda: tab.page.evaluate("reading === null"))
        assert tab.page.evaluate("inputs")[0].split() == ["Run:", "print(1)", "Done."]  # no "python", no "Copy"
        text = "It's 3.5 metres high. 好。" * 900 + "x" * 5000
        tab.page.evaluate("text => place.innerText = text", text)
        tab.page.evaluate(SPOKEN, 0.5)
        tab.press("Read aloud")
        until(lambda: tab.page.evaluate("reading === null"))
        inputs = tab.page.evaluate("inputs")
        assert "".join(inputs) == text and all(len(each) <= LONGEST_INPUT for each in inputs)
        assert all(len(each) > 4000 and each[-1] in ".。" for each in inputs[:5]) and len(inputs) == 8
        tab.close()
        context.close()


def test_the_page_of_a_model_that_only_speaks(browser, served, model):
    from test_server_browser import Tab, sync_api
    context = browser.new_context()
    tab = Tab(context, served.url)
    tab.see("#log", f"Text to speech by {model.path.name}")
    for place in ("#box", "#send", "#think", "#record"):
        sync_api.expect(tab.page.locator(place)).to_be_hidden()
    tab.close()
    context.close()


def test_a_conversation_by_voice(browser, model, tmp_path):
    """A recording is the question; its answer is read aloud. Each answer has a button for it, which also ends it."""
    from test_server_browser import Tab, sync_api
    from test_speech_doors import MICROPHONE, SAYS
    from test_speech_doors import SPEECH as RECORDED
    hearing = qwen3.load_model(HEARING)
    with Served(lambda: qwen3.load_model(ROOT / "demo"), hears=hearing, speaks=model) as served:
        context = browser.new_context()
        context.add_init_script(axe_core())
        tab = Tab(context, served.url)
        tab.see("#record", "Record")
        tab.page.evaluate(PLAYED)
        tab.page.uncheck("#think")
        tab.page.evaluate(MICROPHONE, base64.b64encode(RECORDED).decode())
        tab.press("Record")
        tab.shows(".turn.user .text", [SAYS])
        until(lambda: tab.page.evaluate("played") > 0)
        until(lambda: tab.page.evaluate("reading === null"))
        asked, said = tab.bodies
        assert asked["messages"][-1]["content"] == SAYS and said["response_format"] == "pcm"
        assert said["input"].split() == tab.page.locator(".turn:not(.user) .block").inner_text().split() != []
        assert tab.page.evaluate("played") % (24 * 48) == 0  # whole parts of 24 frames
        tab.ask("What is the capital of France?")
        assert len(tab.bodies) == 3  # a typed question isn't read
        assert_looks(tab.page, tab.page.viewport_size["width"], tmp_path / "page.png")
        tab.page.route("**/v1/audio/speech", lambda route: None)  # never answered
        tab.page.get_by_role("button", name="Read aloud").last.click()
        tab.page.get_by_role("button", name="Stop reading").click()
        sync_api.expect(tab.page.get_by_role("button", name="Read aloud")).to_have_count(2)
        tab.page.unroute("**/v1/audio/speech")
        tab.page.route("**/v1/audio/speech", lambda route: route.fulfill(status=400, json={"error": {"message": "no"}}))
        tab.press("Read aloud")
        tab.see("#ask-says", "The answer isn't read aloud: no.")
        tab.close("400")
        context.close()
