"""Sounds where people use them: the server and its page, batch files."""
import base64
import io
import json
import socket
import threading
import wave
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import openai
import pytest

import qwen3
import qwen3_asr
import qwen3_batch
import qwen3_numba
from configs import ROOT, asr_config
from helpers import assert_looks, axe_core
from hearing import make_hearing, voice, wav_of
from qwen3_asr import transcribe
from qwen3_lib.app.subtitles import file_text
from qwen3_lib.generation.processors import StopLoops
from qwen3_lib.server import decoding, transcriptions
from serving import TRANSCRIPTIONS, Served, form, received, until

pytest.importorskip("python_multipart")


def wav(seconds, seed=0) -> bytes:
    return wav_of(np.round(voice(round(16_000 * seconds), seed) * 30_000).astype("<i2")[:, None])


SOUND, LONG = wav(2.5), wav(75, 1)
NAN = wav_of(np.full((16_000, 1), np.nan, "<f4"), encoding=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In the fast engine, whose bits don't depend on company."""
    return qwen3_numba.load_model(make_hearing(asr_config("0.6B"), tmp_path_factory.mktemp("hearing")), "int8", 1)


@pytest.fixture(scope="module")
def served(model):
    with Served(model, slots=2) as served:
        yield served
        served.idle()


@pytest.fixture(scope="module")
def hear(served):
    create = served.client().audio.transcriptions.create
    return lambda sound=SOUND, **fields: create(file=("a.wav", sound), model="m", **fields)


# ----------------------------------------------------------------------------------------------------------------------
# What the server gives
# ----------------------------------------------------------------------------------------------------------------------

def test_forms_of_the_text(model, hear):
    text = transcribe(model, SOUND).finish().text
    assert hear().text == hear(response_format="verbose_json").text == text != ""
    assert hear(response_format="text") == f"{text}\n"
    for form in ("srt", "vtt"):
        assert hear(response_format=form) == file_text(transcribe(model, SOUND).finish().parts, form)


@pytest.mark.parametrize("given", [{"language": "de"}, {"language": "Japanese", "prompt": "Ada Lovelace"}], ids=str)
def test_language_and_words_that_are_likely(model, hear, given):
    expected = transcribe(model, SOUND, given["language"], given.get("prompt")).finish()
    found = hear(**given)
    assert found.text == expected.text != transcribe(model, SOUND).finish().text
    assert found.languages[0].code == {"German": "de", "Japanese": "ja"}[expected.language]
    assert (found.usage.type, found.usage.seconds) == ("duration", 2.5)


@pytest.mark.parametrize("sound", [SOUND, LONG], ids=["short", "long"])
def test_a_stream_has_the_text_as_it_comes(model, hear, sound):
    *deltas, done = hear(sound, language="en", stream=True)
    assert {event.type for event in deltas} == {"transcript.text.delta"} and done.type == "transcript.text.done"
    assert len(deltas) > 1 and "".join(event.delta for event in deltas) == done.text
    assert done.text == transcribe(model, sound, "en", longest_part=1000 // 30).finish().text


def test_segments(model, hear):
    """A long sound in parts of 20 seconds, with all fields that clients expect."""
    found = hear(LONG, language="en", response_format="verbose_json", timestamp_granularities=["segment"])
    parts = transcribe(model, LONG, "en", longest_part=20).finish().parts
    assert [(segment.start, segment.end, segment.text) for segment in found.segments] == [
        (part.start, part.end, part.text) for part in parts] and len(parts) == 5
    assert (found.language, found.duration, found.text) == ("english", 75, " ".join(part.text for part in parts))
    assert all(segment.avg_logprob < 0 < segment.compression_ratio and len(segment.tokens) == part.n_tokens
               for segment, part in zip(found.segments, parts))


def test_words(model, tmp_path, monkeypatch):
    """Their times are the library's; subtitles break at them. The aligner, too, hears in one thread for each sound."""
    aligner = qwen3_numba.load_model(make_hearing(asr_config("0.6B", n_classes=60), tmp_path / "aligner"), "int8", 1)
    fields = {"file": ("a.wav", LONG), "model": "m", "language": "en", "timestamp_granularities": ["word"]}
    expected = transcribe(model, LONG, "en", longest_part=20, words=aligner).finish().parts
    threads, real = set(), qwen3_asr.audio_tower
    monkeypatch.setattr(qwen3_asr, "audio_tower",
                        lambda *given: threads.add(threading.current_thread()) or real(*given))
    with Served(model, slots=2, aligner=lambda: aligner) as served:
        create = served.client().audio.transcriptions.create
        found, subtitles = (create(response_format=name, **fields) for name in ("verbose_json", "srt"))
        with pytest.raises(openai.BadRequestError, match="timed in Japanese"):
            create(response_format="verbose_json", **fields | {"language": "ja"})
    assert [(word.word, word.start, word.end) for word in found.words] == [
        (word.text, word.start, word.end) for part in expected for word in part.words] and len(found.words) > 10
    assert subtitles.count(" --> ") > len(expected) and {thread.name[:3] for thread in threads} == {"ear"}
    assert "".join(word.word for word in found.words) == "".join(part.text for part in expected)


def test_a_loud_sound_is_divided_by_its_peak(model, hear, results, tmp_path):
    """Words and their times, too: as if it came with a peak of 1. In a batch file, too."""
    loud = voice(60_000, 3) * np.float32(30)
    sounds = [wav_of(each.astype("<f4")[:, None], encoding=3) for each in (loud, loud / np.abs(loud).max())]
    aligner = qwen3_numba.load_model(make_hearing(asr_config("0.6B", n_classes=60), tmp_path / "aligner"), "int8", 1)
    with Served(model, slots=2, aligner=lambda: aligner) as served:
        create = partial(served.client().audio.transcriptions.create, model="m", language="en",
                         response_format="verbose_json", timestamp_granularities=["word"])
        found = [create(file=("a.wav", each)) for each in sounds]
    [expected] = transcribe(model, sounds[1], "en", words=aligner).finish().parts
    for each in found:
        assert each.text == expected.text and [(word.word, word.start, word.end) for word in each.words] == [
            (word.text, word.start, word.end) for word in expected.words]
    (tmp_path / "loud.wav").write_bytes(sounds[0])
    assert results({"audio": "loud.wav", "language": "en"})[1][0]["text"] == expected.text


def test_the_server_says_that_it_hears(served, hear):
    assert served.ask("/v1/models")[1]["data"][0]["input_modalities"] == ["text", "audio"]
    before = served.worker.totals["answers_ended"]
    hear()
    assert served.worker.totals["answers_ended"] == before + 1


# ----------------------------------------------------------------------------------------------------------------------
# What it refuses
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields, words", [
    ({"sound": b""}, "the sound: "), ({"sound": SOUND[:1000]}, "cut short"), ({"sound": SOUND[:40]}, "damaged"),
    ({"sound": b"<html>"}, "the sound: "), ({"sound": NAN}, "no finite"), ({"language": "Klingon"}, "'Klingon'"),
    ({"stream": True, "sound": SOUND[:1000]}, "cut short"), ({"stream": True, "sound": b"<html>"}, "the sound: "),
    ({"stream": True, "response_format": "srt"}, "with stream, json or text"), ({"temperature": -1}, "temperature"),
    ({"timestamp_granularities": ["word"]}, "--aligner"), ({"prompt": "Ada " * 3000}, "leaves no room"),
    ({"prompt": "<|audio_pad|>" * 900}, "leaves no room"),
    ({"prompt": "Ada " * 30_000}, "64KB"), ({"extra_body": {"response_format": "xml"}}, "response_format must be"),
    ({"extra_body": {"temperature": "warm"}}, "'warm'"), ({"extra_body": {"stream": "maybe"}}, "'maybe'"),
    ({"extra_body": {"promt": "Ada"}}, "did you mean prompt"), ({"include": ["logprobs"]}, "include")],
    ids=lambda value: str(value)[:40])
def test_refusals(hear, fields, words):
    with pytest.raises(openai.BadRequestError) as caught:
        hear(**fields)
    assert words in caught.value.body["message"] and "\n" not in caught.value.body["message"]


@pytest.mark.parametrize("body, headers, words", [
    (b"{}", {"Content-Type": "application/json"}, "multipart/form-data"),
    (b"file=abc", {"Content-Type": "application/x-www-form-urlencoded"}, "multipart/form-data"),
    (b"nonsense", {"Content-Type": "multipart/form-data"}, "boundary"),
    (b"nonsense", {"Content-Type": "multipart/form-data; boundary=x"}, "form"),
    (form(b"")[0].replace(b"; filename", b"; name2"), form(b"")[1], "with a file"),
    (form(b"", form(b"")[0][:-5].decode() + "\r\n")[0], form(b"")[1], "Too many files")], ids=range(6))
def test_forms_that_hold_no_file(served, body, headers, words):
    status, answer, _ = served.ask(TRANSCRIPTIONS, body, headers)
    assert status == 400 and words in answer["error"]["message"]


@pytest.mark.parametrize("name, most", [("LARGEST_UPLOAD", len(SOUND)), ("MOST_SECONDS", 2)])
def test_sounds_that_are_too_large(hear, monkeypatch, name, most):
    monkeypatch.setattr(transcriptions, name, most)
    with pytest.raises(openai.APIStatusError) as caught:
        hear()
    assert caught.value.status_code == 413 and f"more than {most:,}" in caught.value.body["message"]


def test_an_upload_that_doesnt_come(served, monkeypatch):
    monkeypatch.setattr(transcriptions, "UPLOAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", served.port), 30) as connection:
        connection.sendall(f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n"
                           "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
        assert b"408" in received(connection, b"has not come within")


@pytest.mark.parametrize("charset", ["punycode", "undefined", "idna", "utf-16", "UTF-8"])
def test_a_form_is_read_as_utf_8_whatever_charset_it_names(served, charset):
    """punycode takes minutes for a megabyte."""
    body, _ = form(SOUND, '--x\r\nContent-Disposition: form-data; name="fié"\r\n\r\nx\r\n')
    headers = {"Content-Type": f"multipart/form-data; charset={charset}; boundary=x"}
    status, answer, _ = served.ask(TRANSCRIPTIONS, body, headers)
    assert status == 400 and "unknown field fié" in answer["error"]["message"]


def test_a_form_that_holds_no_file_is_refused_before_it_comes(served):
    """12 MB of "&" are millions of empty fields."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12000000\r\n"
                           b"Content-Type: application/x-www-form-urlencoded\r\n\r\n&" % TRANSCRIPTIONS.encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")


def test_a_server_without_python_multipart_names_it(served, monkeypatch):
    monkeypatch.setattr(transcriptions, "find_spec", lambda name: None)
    status, answer, _ = served.ask(TRANSCRIPTIONS, *form(SOUND))
    assert status == 501 and "pip install python-multipart" in answer["error"]["message"]


def test_models_that_dont_hear_or_dont_chat(served, demo):
    status, answer, _ = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]})
    assert status == 400 and TRANSCRIPTIONS in answer["error"]["message"]
    with Served(demo) as deaf:
        status, answer, _ = deaf.ask(TRANSCRIPTIONS, *form(SOUND))
    assert status == 400 and "can't hear" in answer["error"]["message"]


def test_a_sound_that_takes_too_long(model):
    with Served(model, slots=1, seconds=0) as served:
        status, answer, _ = served.ask(TRANSCRIPTIONS, *form(SOUND))
    assert (status, answer["error"]["code"]) == (504, "timeout")


# ----------------------------------------------------------------------------------------------------------------------
# Beside others
# ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def tower(monkeypatch):
    """A tower that waits before each window until it may go on, and notes the frames of each."""
    class Tower(threading.Semaphore):
        def __init__(self):
            super().__init__(0)
            self.frames, self.real = [], qwen3_asr.audio_tower

        def __call__(self, mel, *rest):
            self.frames.append(len(mel))
            assert self.acquire(timeout=30)
            return self.real(mel, *rest)

    tower = Tower()
    monkeypatch.setattr(qwen3_asr, "audio_tower", tower)
    yield tower
    tower.release(100)


def test_others_are_answered_while_a_sound_is_heard(served, hear, tower):
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(hear, wav(9, seed=2), language="en")
        until(lambda: tower.frames)
        assert served.client().completions.create(model="m", prompt="once", max_tokens=5).choices[0].text
        assert not heard.done()
        tower.release(100)
        assert heard.result().text


@pytest.mark.parametrize("ends, words", [(False, "not finished within 3 seconds"), (True, "the server is stopping")])
def test_a_stream_that_takes_too_long(model, tower, ends, words):
    """For its client, or for a server that ends: then the window isn't waited for."""
    with Served(model, slots=1, seconds=60 if ends else 3) as served, ThreadPoolExecutor() as threads:
        create = served.client().audio.transcriptions.create
        heard = threads.submit(lambda: [*create(file=("a.wav", wav(9, seed=6)), model="m", stream=True)])
        tower.release()
        until(lambda: len(tower.frames) == 2)
        if ends:
            served.worker.end(0)
        with pytest.raises(openai.APIError, match=words):
            heard.result(20)
        tower.release()


def test_a_sound_that_is_heard_when_the_server_ends_has_its_time(model, tower):
    """Its text, too; a sound that comes then has none."""
    with Served(model, slots=1) as served, ThreadPoolExecutor() as threads:
        heard = threads.submit(served.ask, TRANSCRIPTIONS, *form(wav(3, seed=7)))
        until(lambda: tower.frames)
        served.worker.end(60)
        assert served.ask(TRANSCRIPTIONS, *form(SOUND))[0] == 503
        tower.release()
        assert heard.result(30)[0] == 200


def test_two_sounds_take_turns(hear, tower, monkeypatch):
    begun, real = [], qwen3_asr.Sounds.hear_in_pieces
    monkeypatch.setattr(qwen3_asr.Sounds, "hear_in_pieces", lambda *given: begun.append(1) or real(*given))
    with ThreadPoolExecutor() as threads:
        threads.submit(hear, wav(30, seed=3), language="en")
        until(lambda: tower.frames)
        threads.submit(hear, wav(1, seed=4), language="en")
        until(lambda: len(begun) == 2)
        for n in range(2, 6):  # the short one comes second, or third if its log-mel took long
            tower.release()
            until(lambda: len(tower.frames) == n)
        tower.release()
    assert sorted(tower.frames) == [100, 600, 800, 800, 800] and tower.frames[-1] == 600


def test_a_client_that_leaves_ends_the_work(served, tower):
    body, headers = form(wav(30, seed=5))
    with socket.create_connection(("127.0.0.1", served.port), 30) as connection:
        connection.sendall(f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                           f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body)
        until(lambda: tower.frames)
    tower.release(100)
    served.idle()
    assert len(tower.frames) < 4


# ----------------------------------------------------------------------------------------------------------------------
# Batch files
# ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def results(model, tmp_path, monkeypatch):
    """Runs qwen3_batch.py on records -> (exit status, the results by their lines)."""
    def run(*records, options=()):
        monkeypatch.setattr(qwen3_batch, "load_main", lambda args: model)
        for name, sound in (("a.wav", SOUND), ("long.wav", LONG), ("cut.wav", SOUND[:999])):
            (tmp_path / name).write_bytes(sound)
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
        status = qwen3_batch.main([str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), *options])
        found = map(json.loads, (tmp_path / "out.jsonl").read_text("utf-8").splitlines())
        return status, [*sorted(found, key=lambda result: result["line"])] if "--openai" not in options else [*found]

    return run


def test_a_file_of_sounds(model, results):
    """Short and long ones together: the text that each has alone."""
    status, [short, long, named] = results(
        {"audio": "a.wav"}, {"audio": "long.wav", "language": "en", "id": "b"},
        {"audio": "a.wav", "language": "fr", "context": "Ada", "max_tokens": 9}, options=["--context", "700"])
    expected = transcribe(model, LONG, "en", longest_part=700 // 30).finish()
    assert status == 0 and short["text"] == transcribe(model, SOUND).finish().text
    assert (long["id"], long["text"], long["seconds"]) == ("b", expected.text, 75) and len(long["parts"]) == 4
    asked = transcribe(model, SOUND, "fr", "Ada", max_tokens=9).finish()
    assert (named["language"], named["text"]) == ("French", asked.text)


def test_a_sound_whose_text_goes_round_in_circles(results, monkeypatch):
    for name, value in (("SIZE", 2), ("LEAST", 8), ("WINDOW", 16), ("FEW", 0)):
        monkeypatch.setattr(StopLoops, name, value)
    again = {"audio": "a.wav", "logit_bias": {"40": 100}}
    status, (ended, whole) = results(again, again | {"stop_loops": False})
    assert [each["parts"][0]["finish_reason"] for each in (ended, whole)] == ["loop", "length"]


def test_sounds_that_a_job_cant_read(results):
    status, found = results({"audio": "a.wav", "max_tokens": 1}, {"audio": "none.wav"}, {"audio": "cut.wav"},
                            {"audio": 1}, {"audio": "a.wav", "language": "Klingon"}, {"audio": "a.wav", "prompt": "x"},
                            {"prompt": "Hello!"}, {"custom_id": "a", "body": {"messages": []}})
    words = ("no such file", "cut short", "must be texts", "'Klingon'", "unknown field prompt", '{"audio": "file.wav"}',
             '{"audio": "file.wav"}')
    assert status == 0 and "text" in found[0]
    assert all(word in result["error"] for word, result in zip(words, found[1:], strict=True))


def test_a_sound_in_openais_form(model, results):
    text = transcribe(model, SOUND).finish().text
    assert results({"audio": "a.wav", "id": "x"}, options=["--openai"])[1] == [{
        "id": "batch_req_1", "custom_id": "x", "error": None, "response": {
            "status_code": 200, "request_id": "req_1", "body": {"text": text, "language": "",
            "seconds": 2.5, "parts": [{"start": 0.0, "end": 2.5, "text": text, "language": "",
                                       "finish_reason": "length", "n_tokens": 97}]}}}]


# ----------------------------------------------------------------------------------------------------------------------
# The page, with a model that really hears
# ----------------------------------------------------------------------------------------------------------------------

HEARING = ROOT / "tests/tiny_hearing"
SPEECH = (HEARING / "speech.wav").read_bytes()
SAYS = "Maria has four green apples. Seven white birds."
DROP = """data => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], "speech.wav"));
  at("log").dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""
MICROPHONE = """data => {  // a microphone that hears a file once
  navigator.mediaDevices.getUserMedia = async () => {
    const context = new AudioContext(), source = context.createBufferSource();
    source.buffer = await context.decodeAudioData(Uint8Array.from(atob(data), c => c.charCodeAt(0)).buffer);
    const place = context.createMediaStreamDestination();
    source.connect(place);
    source.addEventListener("ended", () => at("record").click());
    source.start(context.currentTime + 0.3);
    return place.stream;
  };
}"""


@pytest.mark.parametrize("engine", [qwen3.Engine, lambda: qwen3_numba.engine("int8", 1)], ids=["NumPy", "int8"])
def test_a_model_that_hears(engine):
    """Its language is told apart from the text, in a stream, too; noise has none."""
    with Served(qwen3.load_model(HEARING, engine()), slots=2) as served:
        create = served.client().audio.transcriptions.create
        whole, (*deltas, done) = (create(file=("a.wav", SPEECH), model="m", stream=each) for each in (False, True))
        noise = np.random.default_rng(0).normal(0, 1600, (32_000, 1)).astype("<i2")
        silent = create(file=("a.wav", wav_of(noise)), model="m", response_format="verbose_json")
    assert whole.text == done.text == "".join(event.delta for event in deltas) == SAYS
    assert [language.code for language in whole.languages] == [language.code for language in done.languages] == ["en"]
    assert (silent.text, silent.language, silent.segments[0].no_speech_prob) == ("", "", 1)


def test_the_page(browser, tmp_path, monkeypatch):
    """A sound is chosen, dropped, recorded; it comes as WAV of one channel, 16,000 samples a second."""
    from test_server_browser import CHATS, Tab, sync_api
    uploads, real = [], decoding.read_wav
    monkeypatch.setattr(decoding, "read_wav", lambda file, where: uploads.append(file.read()) or file.seek(0) or real(
        file, where))
    with wave.open(io.BytesIO(SPEECH)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    thirds = np.interp(np.arange(3 * len(samples)) / 3, np.arange(len(samples)), samples).astype("<i2")
    with Served(qwen3.load_model(HEARING), slots=2) as served:
        context = browser.new_context()
        context.add_init_script(axe_core())
        tab = Tab(context, served.url)
        tab.see("#log", "Speech to text by tiny_hearing")
        sync_api.expect(tab.page.locator("#box")).to_be_hidden()
        tab.page.set_input_files("#sound", {"name": "fast.wav", "mimeType": "audio/wav",
                                            "buffer": wav_of(thirds[:, None].repeat(2, axis=1), 48_000)})
        tab.shows(".turn:not(.user) .block", [SAYS])
        with wave.open(io.BytesIO(uploads[0])) as file:
            assert file.getparams()[:3] == (1, 2, 16_000)
            sent = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert len(sent) == len(samples) and np.corrcoef(sent, samples)[0, 1] > 0.99
        tab.page.evaluate(DROP, base64.b64encode(SPEECH).decode())
        tab.shows(".turn:not(.user) .block", [SAYS, SAYS])
        tab.page.evaluate(MICROPHONE, base64.b64encode(SPEECH).decode())
        tab.press("Record")
        tab.see("#record", "Stop recording")
        tab.shows(".turn:not(.user) .block", [SAYS] * 3)
        assert tab.texts(".user .text") == ["fast.wav", "speech.wav", "Recording"]
        assert_looks(tab.page, tab.page.viewport_size["width"], tmp_path / "page.png")
        tab.page.set_input_files("#sound", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"no sound"})
        tab.see(".turn:last-child .error", "No answer: the sound: ")
        tab.page.reload()
        tab.shows(".turn:not(.user) .block", [SAYS] * 3)
        assert len(tab.page.evaluate(CHATS)) == 1
        tab.close("400")
        context.close()
