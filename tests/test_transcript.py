"""Transcripts: where long sounds are cut, how parts join, the times of words, what the options do."""
import functools
import os
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given

import qwen3
import qwen3_asr
from configs import asr_config
from hearing import make_hearing, model, path, voice, wav_of  # noqa: F401
from helpers import message_of, patiently
from qwen3_asr import transcribe
from qwen3_lib.generation.aligner import Word, timed_words
from qwen3_lib.generation.transcript import Part, Transcript, joined_text, languages, parts_in, quietest, usual_part
from qwen3_lib.io.sounds import open_sound
from test_subtitles import TEXTS

VOICE = voice(30_000)


def samples_of(source) -> np.ndarray:
    return np.concatenate([*open_sound(source).blocks])


@pytest.fixture(scope="module")
def aligner_path(tmp_path_factory):
    return make_hearing(asr_config("0.6B", n_classes=60), tmp_path_factory.mktemp("aligner"))


aligner_at = functools.cache(qwen3.load_model)


@pytest.fixture
def sound(tmp_path):
    """A file with 40 seconds of a voice."""
    (tmp_path / "voice.wav").write_bytes(wav_of(np.round(voice(640_000) * 2**15).astype("<i2")[:, None]))
    return tmp_path / "voice.wav"


# ----------------------------------------------------------------------------------------------------------------------
# Cut into parts
# ----------------------------------------------------------------------------------------------------------------------

def test_the_quietest_place():
    """By the definition, step by step, which is that of Qwen's package."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        samples = (rng.standard_normal(60_000) * rng.random(60_000 // 100).repeat(100)).astype(np.float32)
        levels = np.abs(samples[20_000:40_000]).astype(float)
        first = min(range(20_000 - 1_600 + 1), key=lambda i: levels[i:i + 1_600].sum())
        place, level = quietest(samples, 30_000, 10_000)
        assert place == 20_000 + first + levels[first:first + 1_600].argmin()
        assert level == pytest.approx(levels[first:first + 1_600].mean())


@pytest.mark.parametrize("seconds, longest", [(3, 180), (25, 10), (25, 3), (25, 25), (25.1, 25)])
def test_parts_join_to_the_sound(seconds, longest):
    """Whatever the blocks are; a part is as long as it may be, give or take 5 seconds."""
    sound = voice(int(16_000 * seconds))
    for n in (1_000, 65_536, len(sound)):
        parts = [*parts_in((sound[i:i + n] for i in range(0, len(sound), n)), longest)]
        around = min(5, longest / 2)
        assert np.array_equal(np.concatenate(parts), sound)
        assert all(longest - around <= len(part) / 16_000 <= longest + around for part in parts[:-1])
        assert len(parts) == (1 if seconds <= longest else len(parts)) and len(parts[-1]) <= longest * 16_000


def test_samples_that_are_no_numbers():
    for wrong in (np.nan, np.inf):
        samples = voice(300_000)
        samples[200_000] = wrong
        assert "finite" in message_of(lambda: [*parts_in(open_sound((samples, 16_000)).blocks)])


@pytest.mark.parametrize("longest, quiet, found", [
    (10, 14.9, True), (10, 5.1, True), (10, 15.2, False), (10, 4.8, False), (3, 1.6, True), (3, 4.4, True),
    (3, 1.3, False)])
def test_how_far_from_its_usual_place_a_cut_may_be(longest, quiet, found):
    """5 seconds at most, and no more than half a part."""
    samples, place = 1 + voice(20 * 16_000), round(16_000 * quiet)
    samples[place - 1600:place + 1600] = 0.001
    first, *_ = parts_in(iter([samples]), longest)
    assert (abs(len(first) - place) <= 1600) is found


def test_parts_behind_a_place(model):
    """Those of a sound that goes on there; blocks may end anywhere before and behind it."""
    sound = voice(100_000)
    for start in (1, 30_000, 65_536, 99_999):
        for n in (7_000, 65_536):
            parts = [*parts_in((sound[i:i + n] for i in range(0, len(sound), n)), 2, start)]
            assert all(map(np.array_equal, parts, parts_in(iter([sound[start:]]), 2)))
            assert np.array_equal(np.concatenate(parts), sound[start:])
    assert [*parts_in(iter([sound]), 2, len(sound))] == []


def test_an_hour_takes_little_memory(tmp_path):
    file = tmp_path / "hour.wav"
    head = wav_of(np.zeros((1, 1), "<i2"))[:40] + (2 * 16_000 * 3600).to_bytes(4, "little")
    file.write_bytes(head)
    os.truncate(file, len(head) + 2 * 16_000 * 3600)
    tracemalloc.start()
    try:
        assert sum(map(len, parts_in(open_sound(file).blocks))) == 16_000 * 3600
        assert tracemalloc.get_traced_memory()[1] < 2**26  # as float32, the hour has 230 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("language, text", [
    *((each, "one two") for each in ("English", "Korean", "Vietnamese", "Arabic", "")),
    *((each, "onetwo") for each in ("Chinese", "Cantonese", "Japanese", "Thai"))])
def test_a_space_between_parts_where_the_language_has_spaces(language, text):
    parts = [Part(0, 1, each, language, "stop", 1) for each in ("", "one", "", "two", "")]
    assert joined_text(parts) == text


@pytest.mark.parametrize("spoken, expected", [
    (["English"] * 2, "English"), (["", "English", "", "", "English", ""], "English"), (["", ""], ""), ([], ""),
    (["English", "", "French", "English"], "English,French,English")])
def test_languages_of_parts(spoken, expected):
    """Without the parts that have no speech."""
    assert languages(Part(0, 1, "", language, "stop", 1) for language in spoken) == expected


# ----------------------------------------------------------------------------------------------------------------------
# Heard
# ----------------------------------------------------------------------------------------------------------------------

def test_a_transcript(model, sound):
    """Its pieces are its text; its parts are those of sounds by themselves."""
    found = transcribe(model, sound, "en", "Ada", max_tokens=5, longest_part=15)
    pieces = [*found]
    assert "".join(pieces) == found.text == str(found) == joined_text(found.parts) and len(pieces) > 3
    assert (found.language, found.seconds) == ("English", 40.0)
    samples = samples_of(sound)
    for part in found.parts:
        alone = transcribe(model, (samples[round(part.start * 16_000):round(part.end * 16_000)], 16_000), "en", "Ada",
                           max_tokens=5).finish()
        assert (alone.text, part.finish_reason, part.n_tokens) == (part.text, "length", 5)
    assert [part.end for part in found.parts] == [*[part.start for part in found.parts[1:]], 40.0]


@pytest.mark.parametrize("language", ["Japanese", "German"])
def test_a_transcript_goes_on_behind_its_first_parts(model, sound, language):
    """They aren't heard again; what comes has the space that belongs before it."""
    options = {"language": language, "longest_part": 9}
    whole = transcribe(model, sound, max_tokens=5, **options).finish()
    for n in range(1, len(whole.parts) + 1):
        found = Transcript(model, sound, heard=whole.parts[:n], max_new_tokens=5, **options)
        rest = "".join(found)
        assert joined_text(whole.parts[:n]) + rest == found.text == whole.text and found.parts == whole.parts
        assert rest.startswith(" ") is (language == "German" and n < len(whole.parts))
    assert len(whole.parts) > 2 and whole.seconds == found.seconds == 40


def test_a_transcript_that_is_closed(model, sound):
    """It keeps what was heard, and hears no more."""
    found = transcribe(model, sound, "en", max_tokens=5, longest_part=9)
    first = next(found)
    found.close()
    assert found.text == first != "" and [*found] == found.parts == [] and found.seconds == 0


def test_how_long_a_text_is(model):
    """Unless somebody sets a limit: as many tokens as its sound has, and 64 more."""
    for n_samples, n_tokens in ((16_000, 13), (40_000, 33)):
        found = transcribe(model, (voice(n_samples), 16_000), eos_token_ids=()).finish()
        assert (found.parts[0].n_tokens, found.parts[0].finish_reason) == (n_tokens + 64, "length")


def test_a_text_is_drawn_greedily(path, model, tmp_path):
    """Whatever the model's files say; but for what the caller says."""
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 5.0, "top_k": 50}')
    warm, sound = qwen3.load_model(tmp_path), (VOICE, 16_000)
    assert qwen3.default_sampling(warm, None).temperature == 5
    texts = [transcribe(warm, sound, max_tokens=9, seed=seed).finish().text for seed in (1, 2)]
    assert texts == [transcribe(model, sound, max_tokens=9).finish().text] * 2
    drawn = [transcribe(warm, sound, max_tokens=9, seed=seed, temperature=5.0).finish().text for seed in (1, 2)]
    assert drawn[0] != drawn[1]


def test_a_part_fits_into_a_small_context(model, sound):
    small = replace(model, config=replace(model.config, context_length=450))
    found = transcribe(small, sound, "en", max_tokens=5).finish()
    expected = transcribe(small, sound, "en", max_tokens=5, longest_part=15).finish()
    assert found.parts == expected.parts and len(found.parts) > 2
    assert usual_part(65_536) == 180 and usual_part(65_536, 20) == 20 and usual_part(10) == 1


def test_words_have_times(model, aligner_path, sound):
    """Within their part, and those of the part by itself; they join to its text."""
    aligner = qwen3.load_model(aligner_path)
    found = transcribe(model, sound, "en", words=aligner, max_tokens=12, longest_part=15).finish()
    samples = samples_of(sound)
    for part in found.parts:
        assert "".join(word.text for word in part.words) == part.text != ""
        times = [time for word in part.words for time in (word.start, word.end)]
        assert times == sorted(times) and part.start - 0.001 <= times[0] and times[-1] < part.start + 60 * 0.08
        alone = samples[round(part.start * 16_000):round(part.end * 16_000)]
        alone = timed_words(aligner, alone, part.text, "English")
        assert [round(word.start + part.start, 3) for word in alone] == [word.start for word in part.words]


@patiently(60)
@given(TEXTS)
def test_timed_words_join_to_any_text(aligner_path, text):
    """A text without letters and numbers is one word, as long as the sound."""
    found = timed_words(aligner_at(aligner_path), VOICE[:9_000], text, "English", 3.0)
    times = [time for word in found for time in (word.start, word.end)]
    assert "".join(word.text for word in found) == text and times == sorted(times) and min(times, default=3) >= 3
    if not any(c.isalnum() or c == "'" for c in text):
        assert found == ((Word(text, 3.0, 3.562),) if text else ())


def test_words_that_have_no_times(model, aligner_path):
    aligner = qwen3.load_model(aligner_path)
    for words, options, said in ((True, {}, "must be the model of a forced aligner"), (model, {}, "no forced aligner"),
                                 (aligner, {"language": "ja"}, "timed in Japanese"),
                                 (aligner, {"language": "Korean"}, "timed in Korean"),
                                 (aligner, {"language": "Thai"}, "only in Chinese, English"),
                                 (aligner, {"longest_part": 300}, "longest_part")):
        assert said in message_of(transcribe, model, (VOICE, 16_000), words=words, **options)
    assert "no answers" in message_of(lambda: transcribe(aligner, (VOICE, 16_000)).finish())


@pytest.mark.parametrize("gain", [10, 1, 1 / 30])
def test_loud_samples_are_divided_by_their_peak(model, aligner_path, monkeypatch, gain):
    """For the text and for the times of its words, in each part; quiet ones stay."""
    aligner, heard, real = qwen3.load_model(aligner_path), [], qwen3_asr.log_mel
    monkeypatch.setattr(qwen3_asr, "log_mel", lambda samples, *more: heard.append(samples) or real(samples, *more))
    samples = voice(40_000, 9) * np.float32(gain)
    found = transcribe(model, (samples, 16_000), "en", words=aligner, max_tokens=12, longest_part=1).finish().parts
    expected = []
    for i, part in enumerate(found):
        alone = samples[round(part.start * 16_000):round(part.end * 16_000)]
        expected.append(alone / max(1, np.abs(alone).max()))
        assert all(np.array_equal(each[:len(alone)], expected[i]) for each in heard[2 * i:2 * i + 2])
        times = timed_words(aligner, expected[i], part.text, "English", part.start)
        assert times == part.words == timed_words(aligner, alone, part.text, "English", part.start) != ()
    assert len(expected) > 1


def test_samples_in_int16_are_those_of_a_file(model):
    """32,768 is 1: from the lowest to the highest."""
    numbers = np.concatenate([[-2**15, 2**15 - 1], np.round(VOICE * 2**15)]).astype(np.int16)
    assert np.array_equal(samples_of((numbers, 16_000)), samples_of(wav_of(numbers[:, None])))
    assert samples_of((numbers, 16_000)).dtype == np.float32 and samples_of((numbers, 16_000))[0] == -1
    assert transcribe(model, (numbers, 16_000), max_tokens=5).finish().text == transcribe(
        model, (numbers / 2**15, 16_000), max_tokens=5).finish().text != ""


def test_a_notebook_shows_the_text(model):
    """By IPython's own protocol; at a plain prompt nothing is computed."""
    found = transcribe(model, (VOICE, 16_000), max_tokens=5)
    assert repr(found).startswith("<Transcript, so far '': ") and found.heard == []
    assert {message_of(lambda: getattr(found, name)) for name in ("text", "parts", "language", "seconds")} == {
        "the sound isn't heard to its end: iterate over its text, or call finish()"}
    shown = SimpleNamespace(text=lambda text: shown.__setattr__("found", text))
    found._repr_pretty_(shown, False)
    assert shown.found == found.text == str(found) != "" and repr(found.text) in repr(found)


def test_names_of_languages():
    names = {None: "", "": "", "auto": "", "Auto": "", "de": "German", "GERMAN": "German", "en-US": "English",
             "pt_BR": "Portuguese", " yue ": "Cantonese", "zh-Hans-CN": "Chinese", "mk": "Macedonian",
             "FIL": "Filipino"}
    assert {name: qwen3_asr.language_named(name) for name in names} == names
    for wrong in ("xx", "auto en", "-", "e n"):
        assert repr(wrong) in message_of(qwen3_asr.language_named, wrong)


@pytest.mark.parametrize("options, words", [
    ({"language": "Klingon"}, "'Klingon' is none of Chinese, English"), ({"longest_part": 0}, "longest_part"),
    ({"max_tokens": 0}, "max_tokens"), ({"temprature": 1}, "temprature is none of"),
    ({"context": "a " * 9000}, "context")])
def test_options_that_are_refused(model, options, words):
    assert words in message_of(lambda: transcribe(model, (VOICE, 16_000), **options).finish())
