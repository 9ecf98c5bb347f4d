"""qwen3_lib/app/speech.py: the command line of speech to text: what it prints and writes, and how it goes on."""
import io
import json
import os
import random
import signal
import sys

import numpy as np
import pytest

import qwen3
import qwen3_asr
from configs import ROOT, asr_config
from hearing import make_hearing, model, path, voice, wav_of  # noqa: F401
from helpers import assert_one_line, forked, run_forked, run_main, works_or_refused
from qwen3_asr import transcribe
from qwen3_lib.app import speech
from qwen3_lib.app.subtitles import cues
from qwen3_lib.generation.aligner import Word
from qwen3_lib.generation.processors import StopLoops
from qwen3_lib.generation.transcript import Part, joined_text

NAN = wav_of(np.full((16_000, 1), np.nan, "<f4"), encoding=3)
VOICE = wav_of(np.round(voice(640_000) * 2**15).astype("<i2")[:, None])  # 40 seconds


@pytest.fixture
def sound(tmp_path, monkeypatch):
    """A file in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.wav").write_bytes(VOICE)
    return "a.wav"


@pytest.fixture(scope="module")
def parts(model):
    """What COMMAND hears."""
    parts = transcribe(model, VOICE, "en", longest_part=15, max_tokens=6).finish().parts
    assert len(parts) == 3 and all(part.text for part in parts)
    return parts


COMMAND = ("--language", "en", "--part", 15, "--max-tokens", 6)


def hear(capfd, path, *options, stdin=b""):
    return run_main(capfd, "--model", path, *options, stdin=stdin, main=qwen3_asr.main)


# ---- What is printed -------------------------------------------------------------------------------------------------

def test_the_text_and_nothing_else(path, model, sound, capfd):
    """On stdout: of a file, of stdin, as JSON; --stats on stderr. Of two files, with their names."""
    expected = transcribe(model, VOICE, "en", "Ada", max_tokens=6).finish()
    options = ("--language", "en", "--context", "Ada", "--max-tokens", 6)
    for more in ((), ("--out", "-"), ("--out", "-", "--format", "txt")):
        assert hear(capfd, path, *options, sound, *more)[:2] == (0, f"{expected}\n")
    assert hear(capfd, path, *options, sound, "./a.wav")[1] == f"a.wav:\n{expected}\n./a.wav:\n{expected}\n"
    status, out, err = hear(capfd, path, *options, "-", "--json", "--stats", stdin=VOICE)
    assert json.loads(out) == {"file": "-", "text": expected.text, "language": "English", "seconds": 40.0, "parts": [
        {"start": 0.0, "end": 40.0, "text": expected.text, "language": "English", "finish_reason": "length",
         "n_tokens": 6}]}
    assert "sound: 40.0 s in" in err and "6 tokens: raise --max-tokens" in err
    assert os.listdir() == ["a.wav"]


@pytest.mark.parametrize("options, engine", [((), "NumPy float32"), (("--fast",), "numba int8"), (
    ("--activations", "f32"), "numba f32"), (("--quantize", "int4"), "numba int4"), (("--no-fast",), "NumPy float32")])
def test_the_fast_engine_takes_8_bits(path, sound, capfd, options, engine):
    err = hear(capfd, path, *options, "--max-tokens", 1, "--stats", sound)[2]
    assert err.splitlines()[-1].endswith(f"| {engine}")


def test_times_are_printed_while_it_hears(path, parts, sound, capfd, monkeypatch):
    """Those of a part before the next one is heard."""
    expected = [[f"[{clock(start, '.')} --> {clock(end, '.')}] {text}\n" for start, end, text in cues([part])]
                for part in parts]
    real, printed, before = qwen3_asr.Sounds.hear_in_pieces, [], []
    monkeypatch.setattr(speech, "write", printed.append)
    monkeypatch.setattr(qwen3_asr.Sounds, "hear_in_pieces", lambda *given: before.append([*printed]) or real(*given))
    assert hear(capfd, path, *COMMAND, sound, "--timestamps")[0] == 0
    assert before == [[], expected[0], expected[0] + expected[1]] and printed == sum(expected, [])


class Screen(io.StringIO):
    """A terminal in place of stderr."""
    encoding, isatty = "utf-8", lambda self: True

    def line(self):
        """What stands on its last line."""
        shown = ""
        for text in self.getvalue().rpartition("\n")[2].split("\r"):
            shown = text + shown[len(text):]
        return shown.strip()


def test_progress_stays_on_the_terminal(path, parts, sound, capfd, monkeypatch):
    """While a part is heard, the screen shows how much was heard before, and the end of its text."""
    screen, real, seen = Screen(), qwen3_asr.Sounds.hear_in_pieces, []
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("tqdm.std.time", lambda: 1e9)  # else it depends on the machine's speed what tqdm draws
    monkeypatch.setattr(qwen3_asr.Sounds, "hear_in_pieces", lambda *given: seen.append(screen.line()) or real(*given))
    assert hear(capfd, path, *COMMAND, sound, "--out", "a.txt")[0] == 0
    assert len(seen) == 3
    for i, part in enumerate(parts):
        assert seen[i].startswith(f"hearing: {part.start / 40:4.0%}") and f" {part.start:.0f} s [" in seen[i]
        assert seen[i].rpartition("], ")[2].strip() in " ".join(joined_text(parts[:i]).split()) or i == 0
    assert screen.line() == "" and "a.txt: 00:00:40.000 heard, English" in screen.getvalue()


def test_a_circle_ends_its_part_and_the_next_one_goes_on(path, sound, capfd, monkeypatch):
    for name, value in (("SIZE", 2), ("LEAST", 8), ("WINDOW", 16), ("FEW", 0)):
        monkeypatch.setattr(StopLoops, name, value)
    monkeypatch.setattr(qwen3, "sample", lambda logits, *_: int(logits[:300].argmax()) % 2 + 40)
    status, out, err = hear(capfd, path, "--language", "en", "--part", 15, sound, "--json")
    parts = json.loads(out)["parts"]
    assert status == 0 and len(parts) == 3 and "loop" in [part["finish_reason"] for part in parts]
    assert err.count("it goes round in circles") == [part["finish_reason"] for part in parts].count("loop")


# ---- What is refused -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, status, words", [
    ((), 2, "sound"), (("none.wav",), 1, "none.wav: no such file"), (("a.wav", "--language", "Klingon"), 1, "klingon"),
    (("a.wav", "--out", "a.mp3"), 1, ".txt, .srt, .vtt, .json"), (("a.wav", "a.wav", "--out", "a.txt"), 1, "one sound"),
    (("a.wav", "--part", "0"), 1, "--part must be a number from 1 to 1200, not 0"),
    (("a.wav", "--part", "200", "--words"), 1, "--part must be a number from 1 to 180"),
    (("a.wav", "--out", "none/a.txt"), 1, "none/a.txt: cannot be written"),
    (("a.wav", "--max-tokens", "0"), 1, "--max-tokens"), (("a.wav", "--speak"), 2, "no option --speak here"),
    (("a.wav", "--out", "there.txt"), 1, "there.txt: exists already"),
    (("there.wav", "--format", "txt"), 1, "there.txt: exists already"),
    (("cut.wav", "none.wav"), 1, "cut.wav: cut short"),
    (("a.wav", "a.mp3", "--format", "srt"), 1, "a.srt: would be the text of two sounds"),
    (("a.wav", "--out", "./a.wav", "--format", "txt", "--overwrite"), 1, "a.wav: is the sound itself"),
    (("a.wav", "--out", "a.txt", "--json"), 2, "--json does not go with --out"),
    (("a.wav", "--out", "a.txt", "--timestamps"), 2, "--timestamps does not go with --out"),
    (("a.wav", "--task", "translate"), 2, "never a translation"),
    (("a.wav", "--initial_prompt", "Ada"), 2, "it is called --context"), (("a.wav", "--prompt", "x"), 2, "--context"),
    (("a.wav", "--output_format", "srt"), 2, "it is called --format"), (("a.wav", "-f", "srt"), 2, "--format"),
    (("-l", "en", "a.wav"), 2, "it is called --language"), (("a.wav", "-o", "."), 2, "--format writes")], ids=str)
def test_what_the_command_refuses(sound, capfd, monkeypatch, arguments, status, words):
    """In one line, or one for each sound; before a model is loaded; nothing is written."""
    for name, data in (("there.txt", b"mine"), ("there.wav", VOICE), ("cut.wav", VOICE[:999])):
        with open(name, "wb") as file:
            file.write(data)
    monkeypatch.setattr(speech, "load_main", None)
    before = sorted(os.listdir())
    found, out, err = hear(capfd, "model", *arguments)
    assert (found, out) == (status, "")
    assert_one_line(err.splitlines()[0], words)
    assert len(err.splitlines()) == 1 + ("none.wav" in arguments[1:]) and sorted(os.listdir()) == before
    assert open("there.txt").read() == "mine" and open("a.wav", "rb").read() == VOICE


def test_a_model_must_be_named_and_hear(path, sound, capfd, monkeypatch):
    monkeypatch.delenv("QWEN3_MODEL", raising=False)
    status, _, err = run_main(capfd, sound, main=qwen3_asr.main)
    assert status == 1
    assert_one_line(err, "--model Qwen/Qwen3-ASR-0.6B", "Qwen/Qwen3-ASR-1.7B")
    status, _, err = hear(capfd, path, sound, "--out", "a.txt", "--context", "Ada " * 9000)
    assert status == 1 and "context" in err and os.listdir() == ["a.wav"]
    with open("a.txt", "w") as file:
        file.write("mine")
    status, _, err = hear(capfd, ROOT / "demo", sound, "--out", "a.txt", "--overwrite")
    assert status == 1 and "can't hear" in err
    assert sorted(os.listdir()) == ["a.txt", "a.wav"] and read("a.txt") == "mine"


# ---- Files -----------------------------------------------------------------------------------------------------------

FORMS = {
    "txt": lambda parts: joined_text(parts) + "\n",
    "json": lambda parts: {"text": joined_text(parts), "language": "English", "seconds": parts[-1].end,
                           "parts": [{key: value for key, value in vars(part).items() if key != "words"}
                                     for part in parts]},
    "srt": lambda parts: "\n".join(f"{i}\n{clock(start, ',')} --> {clock(end, ',')}\n{text}\n"
                                   for i, (start, end, text) in enumerate(cues(parts), 1)),
    "vtt": lambda parts: "WEBVTT\n\n" + "\n".join(
        f"{clock(start, '.')} --> {clock(end, '.')}\n"
        f"{text.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')}\n"
        for start, end, text in cues(parts))}


def clock(seconds, comma):
    return f"00:00:{seconds:06.3f}".replace(".", comma)


def read(name):
    with open(name, encoding="utf-8") as file:
        return json.load(file) if name.endswith("json") else file.read()


def stop_after(monkeypatch, n, stop):
    """Calls stop() when n parts are written."""
    original = speech.Output.write

    def write(self, parts):
        original(self, parts)
        if len(parts) == n:
            stop()

    monkeypatch.setattr(speech.Output, "write", write)
    return original


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("form", FORMS)
def test_files_that_are_written_part_by_part(path, parts, sound, capfd, form, monkeypatch):
    """Stopped after a part: another command is refused, the same one goes on, and its job goes at last."""
    out = f"out.{form}"
    command, original = (*COMMAND, sound, "--out", out), stop_after(monkeypatch, 1, interrupt)
    status, _, err = hear(capfd, path, *command)
    assert status == 130 and f"{out}: done: {clock(parts[0].end, '.')} of 00:00:40.000; the same command goes on" in err
    assert read(out) == FORMS[form](parts[:1])
    for other, words in ((("--context", "Ada"), 'context was null and is "Ada"'), (("--part", 20), "part was 15.0")):
        status, _, err = hear(capfd, path, *command, *other)
        assert status == 1 and words in err and "--overwrite" in err
        assert read(out) == FORMS[form](parts[:1])
    monkeypatch.setattr(speech.Output, "write", original)
    starts, real = [], qwen3_asr.Sounds.hear_in_pieces
    monkeypatch.setattr(qwen3_asr.Sounds, "hear_in_pieces", lambda *given: starts.append(len(given[1])) or real(*given))
    status, printed, said = hear(capfd, path, *command)
    assert (status, printed) == (0, "") and len(starts) == 2
    assert ("share of the characters" in said) is (form in ("srt", "vtt"))
    assert read(out) == FORMS[form](parts) and sorted(os.listdir()) == ["a.wav", out]
    for other in ((), ("--part", 20)):
        status, _, err = hear(capfd, path, *command, *other)
        assert status == 1 and len(starts) == 2
        assert_one_line(err, f"{out}: exists already", "--overwrite")
    assert hear(capfd, path, *command, "--part", 40, "--overwrite")[0] == 0 and len(starts) == 3
    assert sorted(os.listdir()) == ["a.wav", out] and read(out) != FORMS[form](parts)


def test_another_command_after_the_output_was_deleted_starts_anew(path, parts, sound, capfd, monkeypatch):
    """And --overwrite goes on with its own job."""
    command, original = (*COMMAND, sound, "--out", "a.txt"), stop_after(monkeypatch, 1, interrupt)
    assert hear(capfd, path, *command, "--part", 39)[0] == 130
    os.unlink("a.txt")
    assert hear(capfd, path, *command)[0] == 130 and read("a.txt") == FORMS["txt"](parts[:1])
    monkeypatch.setattr(speech.Output, "write", original)
    starts, real = [], qwen3_asr.Sounds.hear_in_pieces
    monkeypatch.setattr(qwen3_asr.Sounds, "hear_in_pieces", lambda *given: starts.append(1) or real(*given))
    assert hear(capfd, path, *command, "--overwrite")[0] == 0 and len(starts) == 2
    assert read("a.txt") == FORMS["txt"](parts)


def test_a_file_beside_each_sound(path, parts, sound, capfd, monkeypatch):
    """Of a damaged sound the others aren't held up; a command that was stopped goes on where it was."""
    for name, data in (("b.wav", VOICE), ("cut.wav", VOICE[:999]), ("c.WAV", VOICE), ("nan.wav", NAN)):
        with open(name, "wb") as file:
            file.write(data)
    command = (*COMMAND, sound, "b.wav", "c.WAV", "--format", "txt")
    original, written = speech.Output.write, []

    def write(self, parts):
        original(self, parts)
        written.append(self.name)
        if len(written) == 4:
            interrupt()

    monkeypatch.setattr(speech.Output, "write", write)
    assert hear(capfd, path, *command)[0] == 130
    names = {"a.wav", "b.wav", "c.WAV", "cut.wav", "nan.wav", "a.txt", "b.txt"}
    assert {*os.listdir()} == names | {"a.txt.job", "b.txt.job"}
    assert hear(capfd, path, *command)[0] == 0 and written == ["a.txt"] * 3 + ["b.txt"] * 3 + ["c.txt"] * 3
    names |= {"c.txt"}
    assert {*os.listdir()} == names and {read(f"{name}.txt") for name in "abc"} == {FORMS["txt"](parts)}
    status, out, err = hear(capfd, path, *COMMAND, "cut.wav", sound, "--format", "srt")
    assert (status, out) == (1, "") and {*os.listdir()} == names | {"a.srt"} and read("a.srt") == FORMS["srt"](parts)
    assert_one_line(err.splitlines()[0], "cut.wav: cut short")
    status, _, err = hear(capfd, path, *COMMAND, "nan.wav", "b.wav", "--format", "srt")  # found when it is heard
    assert status == 1 and "nan.wav: the sound has samples that are no" in err and read("b.srt") == FORMS["srt"](parts)
    assert {*os.listdir()} == names | {"a.srt", "b.srt", "b.srt.job"}
    assert hear(capfd, path, *COMMAND, "-", "--format", "srt", stdin=VOICE)[:2] == (0, FORMS["srt"](parts))


def test_words_on_the_command_line(path, sound, capfd, tmp_path_factory, monkeypatch):
    """In JSON; the subtitles of a stopped job go on with them."""
    aligner = make_hearing(asr_config("0.6B", n_classes=60), tmp_path_factory.mktemp("aligner"))
    options = ("--language", "en", "--words", "--aligner", aligner, "--max-tokens", 60, sound, "--part", 20)
    parts = json.loads(hear(capfd, path, *options, "--json")[1])["parts"]
    assert all(len(part["words"]) > 1 and {*part["words"][0]} == {"text", "start", "end"} for part in parts)
    assert all("".join(word["text"] for word in part["words"]) == part["text"] for part in parts)
    original = stop_after(monkeypatch, 1, interrupt)
    assert hear(capfd, path, *options, "--out", "a.srt")[0] == 130
    monkeypatch.setattr(speech.Output, "write", original)
    status, _, err = hear(capfd, path, *options, "--out", "a.srt")
    assert status == 0 and "share of the characters" not in err
    parts = [Part(**part | {"words": tuple(Word(**word) for word in part["words"])}) for part in parts]
    assert read("a.srt") == FORMS["srt"](parts)
    printed = hear(capfd, path, *options[:-2], "--timestamps")[1]
    assert printed == "".join(f"[{clock(start, '.')} --> {clock(end, '.')}] {text}\n"
                              for part in parts for start, end, text in cues([part]))


# ---- Whatever stops it -----------------------------------------------------------------------------------------------

@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_killed_at_each_step(path, parts, sound, capfd, point):
    """No part that stands in the job is heard again, and nothing of a dead process stays."""
    for death in range(1, 10):
        def work():
            real, calls = getattr(os, point), []

            def step(*given):
                calls.append(1)
                return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == death else real(*given)

            setattr(os, point, step)
            qwen3_asr.main([*map(str, ("--model", path, *COMMAND, sound, "--out", "a.vtt", "--no-fast"))])

        if forked(work) == 0:
            break
        before = sum(b"n_tokens" in line for line in open("a.vtt.job", "rb"))
        assert {*os.listdir()} <= {"a.wav", "a.vtt", "a.vtt.job", "a.vtt.job.tmp"}
        heard, real = [], qwen3_asr.Sounds.hear_in_pieces
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(qwen3_asr.Sounds, "hear_in_pieces", lambda *given: heard.append(1) or real(*given))
            assert hear(capfd, path, *COMMAND, sound, "--out", "a.vtt")[0] == 0
        assert len(heard) == 3 - before and read("a.vtt") == FORMS["vtt"](parts)
        assert sorted(os.listdir()) == ["a.vtt", "a.wav"]
        os.unlink("a.vtt")
    assert death > 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_full_disk(path, parts, sound):
    """Again and again: the line says that the same command goes on, once there is a part, and it does."""
    heard = 0
    for limit in range(300, 3000, 150):
        def main(args, limit=limit):
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return qwen3_asr.main(args)

        found = run_forked(main, "--model", path, *COMMAND, sound, "--out", "a.vtt", "--no-fast")
        if not found.returncode:
            break
        heard = max(heard, open("a.vtt.job").read().count("n_tokens") if os.path.exists("a.vtt.job") else 0)
        assert_one_line(found.stderr.decode().splitlines()[-1], "a.vtt: cannot be written: File too large",
                        *["; the same command goes on from there"] * (heard > 0))
    assert limit > 300 and heard and read("a.vtt") == FORMS["vtt"](parts) and sorted(os.listdir()) == ["a.vtt", "a.wav"]


def test_a_second_command_at_the_same_time_is_refused(path, sound, capfd):
    about = {"format": speech.SPEECH_JOB, "part": 15}
    with speech.Output("a.txt", "txt", about, False, None):
        for options in ((), ("--part", 20), ("--overwrite",)):
            status, _, err = hear(capfd, path, sound, "--out", "a.txt", *options)
            assert status == 1
            assert_one_line(err, "a.txt: another process is writing this file now")


def test_a_damaged_job(sound, monkeypatch):
    """300 of them: it goes on with the first whole parts, or is refused in one line."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    rng, about = random.Random(0), {"format": speech.SPEECH_JOB, "part": 15.0, "context": "蜜蜂"}
    words = (Word("a ", 0.5, 1.0), Word("b", 1.0, 2.0))
    parts = [Part(15.0 * i, 15.0 * (i + 1), f"蜜 {i}", "English", "stop", i, words * (i % 2)) for i in range(5)]
    with speech.Output("a.txt", "txt", about, False, None) as output:
        for i in range(len(parts)):
            output.write(parts[:i + 1])
    with open("a.txt.job", "rb") as file:
        whole = file.read()
    went_on, lines = set(), whole.splitlines(keepends=True)
    for i in range(len(lines) - 5, len(lines) + 1):  # a line that doesn't belong there
        with open("a.txt.job", "wb") as file:
            file.writelines([*lines[:i], b"\n", *lines[i:]])
        kept = i + 5 - len(lines)
        for more in ((), range(kept, 5)):
            with speech.Output("a.txt", "txt", about, False, None) as output:
                assert output.earlier == parts[:kept]
                for n in more:
                    output.write(parts[:n + 1])
        with speech.Output("a.txt", "txt", about, False, None) as output:
            assert output.earlier == parts
    for _ in range(300 * int(os.environ.get("FUZZ", 1))):
        data = bytearray(whole[:rng.randrange(len(whole)) if rng.random() < 0.2 else None])
        for _ in range(rng.randint(0, 2)):
            place = rng.randrange(len(data) or 1)
            data[place:place + rng.randint(0, 4)] = rng.choice([b"\0" * 4, b"null", b"\n", b"5", rng.randbytes(3)])
        with open("a.txt.job", "wb") as file:
            file.write(data)
        if (output := works_or_refused(speech.Output, "a.txt", "txt", about, False, None)) is not None:
            with output:
                n = len(output.earlier)
                went_on.add(n)
                assert [part.start for part in output.earlier] == [0.0, *(part.end for part in output.earlier[:-1])][:n]
                output.write([*output.earlier, Part(output.end, 1e6, "end", "English", "stop", 1)])
            with speech.Output("a.txt", "txt", about, False, None) as output:
                assert len(output.earlier) == n + 1 and output.earlier[-1].text == "end"
    assert went_on == {0, 1, 2, 3, 4, 5}
