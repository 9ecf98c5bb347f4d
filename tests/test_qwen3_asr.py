"""Sounds as a model hears them: folders of either layout, prefixes, bits, files beside qwen3.py alone."""
import gc
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest

import qwen3
import qwen3_asr
import qwen3_numba
from configs import ROOT, SPEECH_TOKENS, asr_config
from hearing import make_hearing, path, voice, wav_of  # noqa: F401
from helpers import assert_one_line, edit_json, message_of, random_ids
from make_random_model import make_random_model
from oracle import ears_oracle
from published import write_tensors
from qwen3 import map_safetensors
from qwen3_asr import (LANGUAGES, RATE, Hearing, SpokenText, audio_tower, language_and_text, language_named, log_mel,
                       samples_in_wav, sinusoids, speech_prompt)
from qwen3_lib.generation.batch import Batch, generate_batch
from qwen3_lib.generation.completion import Completion
from qwen3_lib.io.packed import save_quantized

ENGINES = {"NumPy": qwen3.Engine(), "float32": qwen3_numba.engine(), "bfloat16": qwen3_numba.engine(),
           "int8": qwen3_numba.engine("int8"), "int8, KV in int8": qwen3_numba.engine("int8", kv_dtype="int8")}


@pytest.fixture(scope="module", params=ENGINES)
def model(request, path, tmp_path_factory):
    if request.param == "bfloat16":
        path = make_hearing(asr_config("0.6B"), tmp_path_factory.mktemp("bfloat16"), "bfloat16")
    return qwen3.load_model(path, ENGINES[request.param])


def ids_of(model, *parts) -> np.ndarray:
    """Numbers stand for voices, lists are token ids."""
    return np.concatenate([model.media.hear(voice(20_000, part)).ids if isinstance(part, int) else part
                           for part in parts])


def answer(model, ids, **options):
    return list(qwen3.generate(model, ids, 12, eos_token_ids=(), temperature=0, **options))


# ----------------------------------------------------------------------------------------------------------------------
# From samples to tokens
# ----------------------------------------------------------------------------------------------------------------------

def test_the_drawing(path):
    """2.5 seconds, 250 frames, 33 tokens, as at the top of qwen3_asr.py."""
    sound = qwen3.load_model(path, tokenizer=False).media.hear(voice(40_000))
    assert log_mel(voice(40_000)).shape == (250, 128) and len(sound.ids) == 33
    assert all(text in qwen3_asr.__doc__ for text in ("40,000 samples", "[250, 128]", "33 tokens", "| 7 tokens |"))


@pytest.mark.parametrize("frames", [50, 116, 207])
def test_the_tower_is_that_of_the_formulas(frames, path):
    """A part of a second, a second and two whole tokens, two seconds and a part of a token."""
    sounds = qwen3.load_model(path, tokenizer=False).media
    config = sounds.config
    mel = np.random.default_rng(frames).uniform(-1, 1.5, (frames, 128)).astype(np.float32)
    expected = ears_oracle(sounds.source.tower, mel, config.encoder_layers, config.encoder_attention_heads)
    found = audio_tower(mel, sounds.weights, config)
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5 * expected.std()


def test_windows_are_heard_apart(path):
    """Each 8 seconds by themselves, and what is left."""
    sounds, samples = qwen3.load_model(path, tokenizer=False).media, voice(RATE * 19 // 2)
    mel, sizes = log_mel(samples), (sounds.config.encoder_layers, sounds.config.encoder_attention_heads)
    found = sounds.hear(samples).windows
    assert [len(each.vectors[0]) for each in found] == [104, 20]
    expected = ears_oracle(sounds.source.tower, mel[800:], *sizes)
    assert np.abs(found[1].vectors[0] - expected).max() < 1e-5 * expected.std()


@pytest.mark.parametrize("seconds, n_tokens", [(0.01, 7), (0.5, 7), (1, 13), (1.07, 14), (1.08, 14), (1.09, 15),
                                               (8, 104), (8.5, 111)])
def test_tokens_of_a_length(path, seconds, n_tokens):
    """A token for every 8 frames of a second; at least half a second."""
    sounds = qwen3.load_model(path, tokenizer=False).media
    assert len(sounds.hear(voice(round(16_000 * seconds))).ids) == n_tokens


def test_a_tone_is_loudest_at_its_pitch():
    """1,000 Hz is mel step 15, and the 128 pitches are 45.2 / 129 steps apart."""
    tone = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000).astype(np.float32)
    step = (15 + 27 * np.log(8) / np.log(6.4)) / 129
    assert (log_mel(tone)[2:-2].argmax(axis=1) == round(15 / step) - 1).all()


def test_loudness_is_in_powers_of_ten():
    noise = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    assert np.allclose(log_mel(noise) - log_mel(noise / 10), 2 / 4, atol=1e-5)


def test_positions_turn_from_fast_to_slow():
    found = sinusoids(13, 8)
    for i, slow in enumerate((1, 10_000 ** (1 / 3), 10_000 ** (2 / 3), 10_000)):
        assert np.allclose(found[:, i], np.sin(np.arange(13) / slow)) \
            and np.allclose(found[:, 4 + i], np.cos(np.arange(13) / slow))


# ----------------------------------------------------------------------------------------------------------------------
# Folders
# ----------------------------------------------------------------------------------------------------------------------

def test_both_layouts_are_one_model(path, tmp_path):
    """transformers' names of the same tensors, and its config: the same bits."""
    shutil.copytree(path, tmp_path / "native")
    names = (("thinker.model.", "model.language_model."), ("thinker.", "model."))
    names = (("thinker.audio_tower.proj", "model.multi_modal_projector.linear_"), *names)
    tensors = {}
    for name, tensor in map_safetensors(path / "model.safetensors").items():
        start, native = next(pair for pair in names if name.startswith(pair[0]))
        tensors[native + name.removeprefix(start)] = ("float32", tensor.data)
    write_tensors(tmp_path / "native/model.safetensors", tensors)
    (tmp_path / "native/config.json").write_text(json.dumps(asr_config("0.6B", native=True)))
    found = [str(Hearing(model, model.media.hear(voice(20_000)), max_tokens=9)) for model in map(
        qwen3.load_model, (path, tmp_path / "native"))]
    assert found[0] == found[1] != ""


def test_a_tokenizer_of_two_files(path, tmp_path):
    """vocab.json and merges.txt, as Qwen's own folders have them, in place of tokenizer.json."""
    shutil.copytree(path, tmp_path / "model")
    known = json.loads((path / "tokenizer.json").read_text("utf-8"))
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/vocab.json").write_text(json.dumps(known["model"]["vocab"]), "utf-8")
    merges = ["#version: 0.2", *map(" ".join, known["model"]["merges"])]
    (tmp_path / "model/merges.txt").write_text("\n".join(merges), "utf-8")
    edit_json(tmp_path / "model/tokenizer_config.json", {"added_tokens_decoder": {
        str(token["id"]): token for token in known["added_tokens"]}})
    tokenizer = qwen3.load_model(tmp_path / "model").tokenizer
    assert {name: tokenizer.token_to_id(name) for name in SPEECH_TOKENS} == SPEECH_TOKENS
    for pieces in ("It|'s| THEY|'LL| |1|2|3|4| x|1", "a| \n\n| | b| \r\n", " \n| a|\t\n", "two| | spaces| ",
                   "don|'t|!\n", "¿qué|?!\n\n|no", "你好|，世界| |1|2", "(a|)", " --|  \r\r", "a|\n| | b| \n|c"):
        assert [text[slice(*place)] for text in [pieces.replace("|", "")]
                for _, place in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)] == pieces.split("|")
    text = "<|im_start|>It’s 12\n\n  o'clock,\tÅsa\u030a!"
    assert tokenizer.decode(tokenizer.encode(text)) == "<|im_start|>It’s 12\n\n  o'clock,\tÅså!"
    assert tokenizer.encode("The capital") == qwen3.load_model(path).tokenizer.encode("The capital")
    (tmp_path / "model/merges.txt").unlink()
    assert "merges.txt" in message_of(qwen3.load_model, tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantized_folder_keeps_its_tower(tmp_path, dtype):
    """To the bit, in its own format."""
    make_random_model(asr_config("0.6B"), tmp_path / "model", dtype)
    model = qwen3_numba.load_model(tmp_path / "model", quantize="int8")
    save_quantized(model, tmp_path / "saved", "int8")
    found = qwen3_numba.load_model(tmp_path / "saved").media
    assert np.array_equal(*(each.vectors(each.hear(voice(9_000)).ids) for each in (found, model.media)))
    size = sum(math.prod(tensor.shape) for tensor in model.source.tower.values())
    assert (tmp_path / "saved/tower.safetensors").stat().st_size < size * (4 if dtype == "float32" else 2) + 20_000


@pytest.mark.parametrize("changes, words", [
    (None, "audio_config must be an object, not None"), ({"n_window": 100}, "n_window = 100"),
    ({"activation_function": "relu"}, "activation_function = relu"),
    ({"scale_embedding": True}, "scale_embedding"), ({"n_window_infer": 850}, "n_window_infer"),
    ({"encoder_layers": 0}, "encoder_layers"), ({"encoder_attention_heads": 5}, "tower doesn't fit"),
    ({"encoder_layers": 9}, "tower doesn't fit"), ({"num_mel_bins": 80}, "tower doesn't fit"),
    ({"num_mel_bins": 10**9}, "num_mel_bins")], ids=str)
def test_towers_that_are_refused(path, tmp_path, changes, words):
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = asr_config("0.6B")
    config["thinker_config"]["audio_config"] = changes and config["thinker_config"]["audio_config"] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words in message_of(qwen3.load_model(tmp_path).media.hear, voice(9_000))


# As config.json of Qwen/Qwen3-ASR-0.6B and -1.7B lists them, and their codes by ISO 639.
SUPPORTED = """Chinese zh, English en, Cantonese yue, Arabic ar, German de, French fr, Spanish es, Portuguese pt,
Indonesian id, Italian it, Korean ko, Russian ru, Thai th, Vietnamese vi, Japanese ja, Turkish tr, Hindi hi, Malay ms,
Dutch nl, Swedish sv, Danish da, Finnish fi, Polish pl, Czech cs, Filipino fil, Persian fa, Greek el, Romanian ro,
Hungarian hu, Macedonian mk"""


def test_languages():
    """By their names and codes, in any case, with spaces around them."""
    pairs = [each.split() for each in SUPPORTED.split(",")]
    assert len(pairs) == 30 and LANGUAGES == {code: name for name, code in pairs}
    for name, code in pairs:
        for given in (name, code, name.upper(), code.upper(), f" {name}\n", f"\t{code.title()} "):
            assert language_named(given) == name
    assert language_named(None) == language_named("") == language_named(" ") == ""


@pytest.mark.parametrize("answer, language, expected", [
    ("language English<asr_text>Hi. ", "", ("English", "Hi.")), (" Hi.\n", "", ("", "Hi.")),
    (" Hi. ", "German", ("German", "Hi.")), ("language None<asr_text>", "", ("", "")),
    ("language NONE<asr_text>\n", "", ("", "")), ("language none<asr_text>", "", ("", "")),
    ("\nlanguage  German \nx<asr_text> a\nb ", "", ("German", "a\nb")),
    ("LANGUAGE Greek<asr_text>a", "", ("Greek", "a")),
    ("language English<asr_text>a", "German", ("German", "language English<asr_text>a")),
    ("Greek <asr_text>a<asr_text>b", "", ("Greek", "a<asr_text>b"))])
def test_an_answer_has_a_language_and_a_text(answer, language, expected):
    """As a whole, and in pieces of any length: those of the text join to it, and none is taken back."""
    assert language_and_text(answer, language) == expected
    for n in (1, 2, 7, 99):
        spoken = SpokenText(language)
        pieces = [spoken.push(answer[i:i + n]) for i in range(0, len(answer), n)]
        pieces.append(spoken.push("", ended=True))
        assert ("".join(pieces), spoken.language, spoken.text) == (expected[1], *expected)


@pytest.mark.filterwarnings("error")  # which would be lines on stderr before the one that counts
@pytest.mark.parametrize("part, change", [
    ("proj2", lambda weight: weight[:-1]), ("proj2", lambda weight: weight * np.nan),
    ("layers.0.fc1", lambda weight: weight * 0 + np.inf), ("layers.0.fc1", lambda weight: weight * 0 + 3e38)],
    ids=["narrow", "NaN", "infinite", "too large"])
def test_towers_that_give_no_embeddings(path, part, change):
    sounds = qwen3.load_model(path, tokenizer=False).media
    for name in (f"{part}.weight", f"{part}.bias"):
        sounds.weights[name] = change(sounds.weights[name]).astype(np.float32)
    assert "the tower gives no 128 finite numbers" in message_of(sounds.hear, voice(9_000))


def test_a_sound_too_long_to_be_heard_as_one(path):
    hear = qwen3.load_model(path, tokenizer=False).media.hear
    assert "at most 1,260 s" in message_of(hear, np.zeros(1_260 * 16_000 + 1, np.float32))


def test_a_model_that_cant_hear(demo):
    assert "can't hear" in message_of(qwen3_asr.transcribe, demo, (voice(9_000), 16_000))


# ----------------------------------------------------------------------------------------------------------------------
# Sequences with sounds
# ----------------------------------------------------------------------------------------------------------------------

def test_a_sound_matters_and_so_does_its_place(model):
    text = random_ids(12)
    prompts = [ids_of(model, *parts) for parts in ((text, 0), (text, 2), (0, text), (text[:3], 0, text[3:]))]
    found = [qwen3.forward(model, [*ids, 5], model.engine.new_cache(model.config)) for ids in prompts]
    assert all(np.abs(a - b).max() > 0.01 for i, a in enumerate(found) for b in found[:i])
    assert len({*map(len, prompts)}) == 1


SPECIAL = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>",
           "<asr_text>", "<timestamp>", "<think>")


@pytest.mark.parametrize("token", SPECIAL)
def test_tokens_in_a_context_are_text(path, token):
    """The prompt has those of the template, and reads as it was written."""
    tokenizer, context = (model := qwen3.load_model(path)).tokenizer, f"\n Ada{token}{token}Lovelace {token}"
    plain, ids = ([*map(int, speech_prompt(model, model.media.hear(voice(9_000)), "English", each))] for each in (
        "", context))
    assert tokenizer.token_to_id(token) is not None and ids.count(tokenizer.token_to_id(token)) == plain.count(
        tokenizer.token_to_id(token))
    assert tokenizer.decode([i for i in ids if i >= 0]) == tokenizer.decode([i for i in plain if i >= 0]).replace(
        "system\n", f"system\n{context}")


def test_a_sound_is_computed_once(model, monkeypatch):
    """While four others come."""
    def first_id(*given):
        return int(model.media.hear(voice(*given)).ids[0])

    first, *others = [first_id(20_000, i) for i in range(5)]
    gc.collect()
    heard = first_id(20_000)
    assert heard != first
    monkeypatch.setattr(qwen3_asr, "audio_tower", None)
    gc.collect()
    assert [first_id(20_000, i) for i in (2, 3, 4, 0)] == [*others[1:], heard]
    monkeypatch.undo()
    assert first_id(20_001) != heard


def test_a_sound_that_grows(path, monkeypatch):
    """Of its windows of 8 seconds only the last one is computed again, and of its seconds only the last two; the bits
    are those of the whole sound. A louder place, which moves the floor of a quiet beginning, computes all."""
    media, windows, chunks = qwen3.load_model(path, tokenizer=False).media, [], []
    for name, calls in (("audio_tower", windows), ("embed_chunk", chunks)):
        real = getattr(qwen3_asr, name)
        monkeypatch.setattr(qwen3_asr, name, lambda mel, *more, real=real, calls=calls: (
            calls.append(len(mel)), real(mel, *more))[1])
    sound = voice(19 * qwen3_asr.RATE) + 0.1 * np.random.default_rng(0).standard_normal(19 * qwen3_asr.RATE)
    for end in (10, 12, 17):
        heard = media.hear(sound[:end * qwen3_asr.RATE])
    assert windows == [800, 200, 400, 800, 100] and len(chunks) == 10 + 3 + 6
    heard = media.hear(sound)
    assert windows[5:] == [300] and len(chunks) == 22
    fresh = qwen3.load_model(path, tokenizer=False).media
    assert np.array_equal(media.vectors(heard.ids), fresh.vectors(fresh.hear(sound).ids))
    sound[:8 * qwen3_asr.RATE] *= 1e-7
    media.hear(sound[:10 * qwen3_asr.RATE])
    media.hear(np.append(sound, 1))
    assert sorted(windows[-5:]) == [200, 300, 800, 800, 800]


def test_what_is_kept(model, monkeypatch):
    """The last sounds, and those of a sequence that waits."""
    ids = ids_of(model, random_ids(4), 0)
    sequence = qwen3.Sequence(model, ids)
    ids_of(model, 1, 2, 3, 4)
    gc.collect()
    assert answer(model, ids) == answer(model, ids)
    del sequence
    ids_of(model, 1, 2, 3, 4)
    gc.collect()
    assert "out of range" in message_of(qwen3.Sequence, model, ids)
    assert not {*ids_of(model, 0)} & {*ids[4:]}  # a number is given once


def test_the_same_bits_alone_in_a_batch_and_in_pieces(model):
    prompts = [speech_prompt(model, model.media.hear(voice(n, i)), *words) for i, (n, *words) in enumerate(
        [(20_000,), (150_000, "English"), (33_333, "", "Ada Lovelace")])]
    alone = [answer(model, ids) for ids in prompts]
    assert generate_batch(model, prompts, 12, eos_token_ids=(), temperature=0) == alone
    if isinstance(model.weights, dict):  # BLAS takes other ways for other shapes
        return
    logits, cache = (qwen3.forward(model, prompts[1], model.engine.new_cache(model.config)),
                     model.engine.new_cache(model.config))
    pieces = [qwen3.forward(model, piece, cache) for piece in np.array_split(prompts[1], 7)]
    assert np.array_equal(pieces[-1], logits)


def test_prefixes(model):
    """The same sound again is in the cache; of another one of its length, only what was before it."""
    text = random_ids(20)
    prompts = [ids_of(model, text, sound, text[:4], [i]) for i, sound in enumerate((0, 0, 1))]
    batch, found = Batch(model, 3, 400), []
    for i, prompt in enumerate(prompts):
        found.append(batch.add(i, prompt, max_new_tokens=12, eos_token_ids=(), temperature=0))
        while not batch.idle:
            batch.step()
    assert [one.cached_tokens for one in found] == [0, len(prompts[0]) - 1, 20]
    assert [one.token_ids for one in found] == [answer(model, prompt) for prompt in prompts]


def test_guesses(model):
    ids = ids_of(model, random_ids(9), 0, random_ids(9))
    found = Completion(model, ids, max_new_tokens=12, eos_token_ids=(), temperature=0, lookup=4)
    assert found.finish().token_ids == answer(model, ids)


# ----------------------------------------------------------------------------------------------------------------------
# Three files alone
# ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def alone(tmp_path):
    """Runs qwen3_asr.py beside qwen3.py and tokenizer_utils.py only -> (status, stdout, stderr)."""
    for name in ("qwen3_asr.py", "qwen3.py", "tokenizer_utils.py"):
        shutil.copy(ROOT / name, tmp_path)

    def run(*arguments):
        done = subprocess.run([sys.executable, "qwen3_asr.py", *arguments], cwd=tmp_path, text=True, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True)
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_mean_of_two_channels(tmp_path):
    numbers = np.random.default_rng(0).integers(-2**15, 2**15, (999, 2)).astype("<i2")
    (tmp_path / "a.wav").write_bytes(wav_of(numbers))
    found = samples_in_wav(str(tmp_path / "a.wav"))
    assert found.dtype == np.float32 and np.abs(found - numbers.mean(axis=1) / 2**15).max() < 1e-6


def test_a_sounds_prompt_without_the_library(path, tmp_path):
    """A system prompt is a context, unless there is one; the language by its name or code; neither: Qwen's template."""
    numbers = np.round(voice(30_000) * 30_000).astype("<i2")[:, None]
    (tmp_path / "a.wav").write_bytes(wav_of(numbers))
    model = qwen3.load_model(path)
    sound = model.media.hear(samples_in_wav(str(tmp_path / "a.wav")))
    for given, wanted in (((None, None, None), ("", "")), (("de", "Ada", None), ("German", "Ada")),
                          ((None, None, "Bob"), ("", "Bob")), (("Thai", "Ada", "Bob"), ("Thai", "Ada"))):
        found = qwen3_asr.chat(model, str(tmp_path / "a.wav"), *given, None, max_tokens=1)
        assert found.sequence.prompt.tolist() == speech_prompt(model, sound, *wanted).tolist()
    template = ("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_end|><|im_end|>\n"
                "<|im_start|>assistant\n")
    for ids in (speech_prompt(model, sound), Hearing(model, sound, max_tokens=1).sequence.prompt):
        assert model.tokenizer.decode([int(i) for i in ids if i >= 0]) == template


def test_three_files_alone(alone, path, tmp_path):
    """The text of a sound in two channels, with a language and a context: what the library gives."""
    numbers = np.round(voice(30_000) * 30_000).astype("<i2")[:, None].repeat(2, axis=1)
    (tmp_path / "a.wav").write_bytes(wav_of(numbers))
    (tmp_path / "empty.wav").write_bytes(wav_of(numbers[:0].reshape(0, 2)))
    (tmp_path / "fast.wav").write_bytes(wav_of(numbers, 44_100))
    model = qwen3.load_model(path)
    expected = Hearing(model, model.media.hear(numbers[:, 0].astype(np.float32) / 2**15), "German", "Ada", max_tokens=6)
    options = ("--model", path, "--max-tokens", "6")
    assert alone(*options, "--language", "de", "--context", "Ada", "a.wav") == (0, f"{expected}\n", "")
    for arguments, words in (((path, "none.wav"), "none.wav"), ((path, "qwen3.py"), "qwen3.py: cannot be read as WAV"),
                             ((path, "fast.wav"), "44100"), ((path, "empty.wav"), "empty.wav: 0 samples"),
                             ((path, "a.wav", "--language", "Klingon"), "klingon"),
                             ((ROOT / "demo", "a.wav"), "can't hear")):
        status, out, err = alone("--model", *arguments)
        assert (status, out) == (1, "")
        assert_one_line(err, words)
