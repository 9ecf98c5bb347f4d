"""Text to speech: prompts, frames, the codec beside an oracle, seeds and limits, texts in parts, bad input."""
import json
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

import qwen3
import qwen3_batch
import qwen3_inspect
import qwen3_numba
import qwen3_tts
from configs import ROOT, TTS_SIZES, VOICES, codec_config, tts_config
from hearing import voice
from helpers import assert_one_line, counting, edit_json, message_of, run_main, with_engine, with_tensors
from qwen3_lib.app import cli
from qwen3_lib.generation.choir import Singer, sing
from qwen3_lib.generation.sentences import LONGEST_TEXT, sentences, spoken_parts
from qwen3_lib.io.cores import with_threads
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.io.sounds import open_sound
from oracle import norm, oracle
from qwen3 import Sampling
from qwen3_tts import Talk, decode, heard, next_frames, pass_of, speak, talker_prompt, voices_of
from talking import make_talking
from tokenizer_utils import InputError
from tts_oracle import codec_oracle

TEXT = "Good morning, how are you?"
ENGINES = {"NumPy": qwen3.Engine(), "fast": qwen3_numba.engine(), "int8": qwen3_numba.engine("int8")}


@pytest.fixture(scope="module", params=[*TTS_SIZES])
def path(request, tmp_path_factory):
    return make_talking(tmp_path_factory.mktemp("talking"), tts_config(request.param))


@pytest.fixture(scope="module")
def model(path):
    return qwen3.load_model(path)


def copy_of(path, tmp_path, **changes):
    """A copy of the folder with other values in config.json."""
    folder = shutil.copytree(path, tmp_path / "model")
    edit_json(folder / "config.json", changes)
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# The codec
# ----------------------------------------------------------------------------------------------------------------------

CODES = np.random.default_rng(0).integers(0, 64, (30, 6))


def test_the_codec(path, model):
    """Within 1e-5 of the sound's spread."""
    expected = codec_oracle(path / "speech_tokenizer", codec_config()["decoder_config"], CODES)
    found = decode(voices_of(model).codec, CODES, {})
    assert found.dtype == np.float32 and np.abs(found - expected).max() < 1e-5 * expected.std()
    assert np.abs(expected).max() < 1  # nothing was cut


@pytest.mark.parametrize("cuts, exact", [((1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 29), True), ((4, 18), True),
                                         (range(1, 30), False), ((5, 13), False)])
def test_a_sound_as_it_comes_and_at_once(model, cuts, exact):
    """The same bits, if it is cut where blocks end; anywhere else, BLAS rounds a block's products otherwise."""
    codec, state = voices_of(model).codec, {}
    found = np.concatenate([decode(codec, part, state) for part in np.split(CODES, cuts)])
    whole = decode(codec, CODES, {})
    assert np.array_equal(found, whole) if exact else np.abs(found - whole).max() < 1e-5 * whole.std()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_talk_is_heard_in_blocks(path, engine):
    """Few frames at first, so that the sound begins soon; the rest at the end; the same bits as its codes at once."""
    model = qwen3.load_model(path, ENGINES[engine])
    talk, pieces = Talk(model, *talker_prompt(model, TEXT, "serena"), 16, np.random.default_rng(14), None), []
    codec = voices_of(model).codec
    while talk.finish_reason is None:
        next_frames(model, [talk])
        pieces.append(heard(codec, talk))
    if engine == "NumPy":  # it decodes nothing beside the next frames
        assert [len(piece) // codec.samples for piece in pieces if len(piece)] == [1, 1, 1, 1, 2, 2, 3, 3, 2]
    assert np.array_equal(np.concatenate(pieces), with_threads(1, partial(decode, codec, np.array(talk.codes), {})))


@pytest.fixture
def fast(path):
    """With two threads, whatever this machine has."""
    return qwen3_numba.load_model(path, threads=2)


def test_the_codec_works_beside_the_next_frames(fast, monkeypatch):
    """In another thread, in which BLAS has one, while later frames are drawn; the first and the last sound are waited
    for, and BLAS has all threads for them."""
    blas, drawn, seen, real = ThreadpoolController().select(user_api="blas"), threading.Event(), [], qwen3_tts.decode

    def slow(*given):
        seen.append((threading.current_thread() is threading.main_thread(), not given[2] or drawn.wait(20),
                     [library.num_threads for library in blas.lib_controllers]))
        return real(*given)

    before, expected = [library.num_threads for library in blas.lib_controllers], speak(fast, TEXT, seed=1).samples
    monkeypatch.setattr(qwen3_tts, "decode", slow)
    monkeypatch.setattr(qwen3_tts, "next_frames", lambda model, talks: (
        next_frames(model, talks), drawn.set() if len(talks[0].codes) >= 3 else None))
    assert np.array_equal(speak(fast, TEXT, seed=1).samples, expected)
    first, *others, last = seen
    assert first == last == (False, True, [min(2, n) for n in before]) and len(others) > 1
    assert all(each == (False, True, [1] * len(before)) for each in others)
    assert [library.num_threads for library in blas.lib_controllers] == before


def test_one_thread_is_one_thread(path, monkeypatch):
    threads, real = [], qwen3_tts.decode
    monkeypatch.setattr(qwen3_tts, "decode", lambda *given: threads.append(threading.current_thread()) or real(*given))
    one = speak(qwen3_numba.load_model(path, threads=1), TEXT, seed=1).samples
    assert {*threads} == {threading.main_thread()}
    assert np.array_equal(speak(qwen3_numba.load_model(path, threads=2), TEXT, seed=1).samples, one)
    assert len({*threads}) == 2


def test_ctrl_c_while_the_codec_works(fast, monkeypatch):
    """What it decodes then is lost; the next speech is as ever."""
    expected = speak(fast, TEXT, seed=1).samples
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(qwen3_tts, "next_frames", lambda model, talks: (
            next_frames(model, talks), signal.raise_signal(signal.SIGINT) if len(talks[0].codes) == 3 else None))
        [*speak(fast, TEXT, seed=1)]
    assert np.array_equal(speak(fast, TEXT, seed=1).samples, expected)


def broken(speech):
    """The speech, with a codec whose samples are no numbers."""
    w = speech.codec.weights
    speech.codec = replace(speech.codec, weights=w | {"decoder.0.conv.bias": w["decoder.0.conv.bias"] * np.nan})
    return speech


def test_a_codec_that_fails(fast):
    """The one who iterates learns of it, after the samples before."""
    speech = speak(fast, TEXT, seed=1)
    assert len(next(speech))
    assert "no finite numbers" in message_of(lambda: broken(speech).samples)


def test_speeches_together(fast):
    """The same bits as alone, also beside one whose codec fails."""
    texts = [["Yes. ", "No."], [TEXT], ["one two three four five"]]
    singers = [Singer(speak(fast, text, seed=i)) for i, text in enumerate(texts)]
    broken(singers[1].speech)
    pieces, ends, going = {singer: [] for singer in singers}, {}, singers
    while going:
        for singer, outcome in zip(going, sing(going)):
            if isinstance(outcome, np.ndarray):
                pieces[singer].append(outcome)
            else:
                ends[singer] = outcome
        going = [singer for singer in singers if singer not in ends]
    assert isinstance(ends[singers[1]], InputError) and ends[singers[0]] is ends[singers[2]] is None
    for i in (0, 2):
        assert np.array_equal(np.concatenate(pieces[singers[i]]), speak(fast, texts[i], seed=i).samples)


def test_a_frame_changes_no_earlier_sample(model):
    codec, others = voices_of(model).codec, CODES.copy()
    others[20:] = 0
    one, other = (decode(codec, codes, {}) for codes in (CODES, others))
    assert np.array_equal(one[:20 * codec.samples], other[:20 * codec.samples])
    assert not np.array_equal(one[20 * codec.samples:][:codec.samples], other[20 * codec.samples:][:codec.samples])


def test_the_sizes_of_the_published_codec():
    assert 8 * 5 * 4 * 3 * 2 * 2 == 1920 and all(
        text in qwen3_tts.__doc__ for text in ("1920", "24,000", "frame (80 ms)", "[3072]", "16 codebooks"))


# ----------------------------------------------------------------------------------------------------------------------
# Frames
# ----------------------------------------------------------------------------------------------------------------------

def frames_of(model, seed, limit=12, temperature=None, text=TEXT):
    talk = Talk(model, *talker_prompt(model, text, "serena"), limit, np.random.default_rng(seed), temperature)
    while talk.finish_reason is None:
        next_frames(model, [talk])
    return talk


def vector_sums(model, text_ids, codes):
    """What the talker gets, in float64: for each place, the vector of a token of the text and of some codes, added.

    text_ids [n]; codes: for each place c0, or a whole frame, or none -> (the sums [n, hidden_size], all tensors)
    """
    tensors = {name: qwen3.to_float32(tensor).astype(np.float64) for name, tensor in (
        model.source.tensors | model.source.tower).items()}
    tables = [tensors["model.embed_tokens.weight"], *(tensors[f"talker.code_predictor.model.codec_embedding.{i}.weight"]
                                                      for i in range(voices_of(model).groups - 1))]
    found = []
    for token, frame in zip(text_ids, codes, strict=True):
        h = tensors["talker.model.text_embedding.weight"][token]
        for i in (1, 2):
            start = f"talker.text_projection.linear_fc{i}"
            h = tensors[f"{start}.weight"] @ h + tensors[f"{start}.bias"]
            h = h / (1 + np.exp(-h)) if i == 1 else h
        found.append(h + sum(table[code] for table, code in zip(tables, frame)))
    return np.array(found), tensors


def oracle_of(model, x, head):
    """tests/oracle.py on vectors x [n, hidden_size] in the place of tokens -> logits, states after the norm."""
    weights = model.weights | {"embed_tokens": x, "lm_head": head}
    found = oracle(SimpleNamespace(config=model.config, weights=weights), np.arange(len(x)))
    return found.logits, norm(found.streams[-1], model.weights["norm"].astype(np.float64), model.config.rms_norm_eps)


def test_prompt_and_frames(model, monkeypatch):
    """Logits of talker and code predictor with given codes, within 1e-5 of their spread."""
    voices, seen, start = voices_of(model), [], "talker.code_predictor"
    codes = np.random.default_rng(1).integers(0, 64, (9, voices.groups))
    given = iter(codes.ravel())
    monkeypatch.setattr(qwen3_tts, "sample", lambda logits, *_: seen.append(logits) or next(given))
    talk = Talk(model, *talker_prompt(model, TEXT, "serena", "english"), 9, np.random.default_rng(0))
    while talk.finish_reason is None:
        next_frames(model, [talk])
    words, role = model.tokenizer.encode(TEXT, False), model.tokenizer.encode("<|im_start|>assistant\n", False)
    text = [*role, *[4076] * 5, 4077, *words, 4078, *[4076] * 9]
    marks = [[]] * len(role) + [[1075], [1077], [1080], [1078], [1081]]  # think, its begin, English, its end, the voice
    x, tensors = vector_sums(model, text, [*marks, *[[1072]] * (len(words) + 2), [1073], *codes[:-1]])
    logits, states = (each[-9:] for each in oracle_of(model, x, model.weights["lm_head"]))
    found = np.array(seen[::voices.groups])
    assert np.isfinite(found[2]).tolist() == [i < 64 or i == 1074 for i in range(1088)]
    assert np.abs(found[:, :64] - logits[:, :64]).max() < 1e-5 * logits.std()
    for n, (frame, state) in enumerate(zip(codes, states)):
        x = np.array([state, tensors["model.embed_tokens.weight"][frame[0]], *(
            tensors[f"{start}.model.codec_embedding.{i}.weight"][code] for i, code in enumerate(frame[1:-1]))])
        if (narrow := f"{start}.small_to_mtp_projection") and f"{narrow}.weight" in tensors:
            x = x @ tensors[f"{narrow}.weight"].T + tensors[f"{narrow}.bias"]
        for i in range(voices.groups - 1):
            expected = oracle_of(voices.predictor(model.engine)[i], x, tensors[f"{start}.lm_head.{i}.weight"])[0][i + 1]
            assert np.abs(seen[n * voices.groups + i + 1] - expected).max() < 1e-5 * expected.std()


@pytest.mark.parametrize("engine", ENGINES)
def test_several_talks_in_one_pass(path, engine):
    """They draw what each draws alone; the fast engine's bits are the same, NumPy's nearly."""
    model = qwen3.load_model(path, ENGINES[engine])
    texts = ["Yes.", TEXT, "one two three four five"]
    talks = [Talk(model, *talker_prompt(model, text, "serena"), 5 + 2 * i, np.random.default_rng(i))
             for i, text in enumerate(texts)]
    while going := [talk for talk in talks if talk.finish_reason is None]:
        next_frames(model, going)
    for i, (text, talk) in enumerate(zip(texts, talks)):
        alone = frames_of(model, i, 5 + 2 * i, text=text)
        assert talk.finish_reason == alone.finish_reason and np.array_equal(talk.codes, alone.codes)


DRAWN = Sampling(0.9, 50, 1.0), Sampling(0.7, 3, 1.0), Sampling(0.0, 3, 1.0), Sampling(1.3, 0, 0.8)


def drawn_in(model, samplings, frames=4):
    """The frames of a talk for each sampling of the later codes, all in the same passes; what is drawn next."""
    talks = [Talk(model, *talker_prompt(model, TEXT, "serena"), frames, np.random.default_rng(i))
             for i in range(len(samplings))]
    for talk, talk.other in zip(talks, samplings):
        pass
    while going := [talk for talk in talks if talk.finish_reason is None]:
        next_frames(model, going)
    return [np.array(talk.codes).tolist() for talk in talks], [talk.rng.random() for talk in talks]


@pytest.mark.parametrize("alike, passes", [((), 2), ((2,), 3), ((3, 5), 4)])
def test_a_frame_of_codes_in_one_call(path, tmp_path, alike, passes):
    """It draws what single passes draw, and takes so many numbers. Of three candidates, where all codes come in pairs
    that are as likely, it isn't clear which: then a single pass draws this code, and a call those after it."""
    file = shutil.copytree(path, tmp_path / "model") / "model.safetensors"
    heads = {name: tensor.read() for name, tensor in qwen3.map_safetensors(file).items() if "predictor.lm_head" in name}
    with_tensors(file, {name: np.repeat(head[::2], 2, axis=0) for name, head in heads.items()
                        if int(name.split(".")[-2]) + 1 in alike})
    model = qwen3.load_model(file.parent, qwen3_numba.engine())
    single = with_engine(model, draws=lambda *_: [])
    assert drawn_in(model, DRAWN[:3]) == drawn_in(single, DRAWN[:3])
    for sampling in DRAWN:
        counted, sizes = counting(model)
        assert drawn_in(counted, [sampling], 1) == drawn_in(single, [sampling], 1)
        assert len(sizes) == {DRAWN[1]: passes, DRAWN[3]: voices_of(model).groups}.get(sampling, 2)


def test_numbers_that_are_not_finite_in_a_frame(path):
    model = qwen3.load_model(path, qwen3_numba.engine())
    voices_of(model).weights["narrow"][2] = np.nan
    assert "not finite" in message_of(drawn_in, model, DRAWN[:3])


def predicted(path, engine):
    """The code predictor's logits [groups - 1, codes] after some vectors, by each of its heads."""
    model, rng = qwen3.load_model(path, engine), np.random.default_rng(0)
    predictor = voices_of(model).predictor(model.engine)
    x = rng.standard_normal((5, predictor[0].config.hidden_size), np.float32)
    return np.array([model.engine.run(each, pass_of([model.engine.new_cache(each.config)], [x.copy()]))[0][0]
                     for each in predictor])


@pytest.mark.parametrize("size", [64, 70])  # 70: rows that fill no block
def test_heads_of_the_code_predictor(tmp_path, size):
    """The fast engine's are NumPy's, and int4 leaves the code predictor at int8."""
    config, codec = tts_config(), codec_config()
    config["talker_config"]["code_predictor_config"]["vocab_size"] = size
    codec["decoder_config"]["codebook_size"] = size
    path = make_talking(tmp_path, config, codec)
    expected = predicted(path, qwen3.Engine())
    exact, int8, int4 = (predicted(path, qwen3_numba.engine(quantize, activations="f32" if quantize is None else None))
                         for quantize in (None, "int8", "int4"))
    assert exact.shape == (voices_of(qwen3.load_model(path)).groups - 1, size)
    assert np.abs(exact - expected).max() < 1e-2 * expected.std() < np.abs(expected[1:] - expected[:-1]).mean()
    assert np.abs(int8 - expected).max() < 0.2 * expected.std() and np.array_equal(int4, int8)


def test_what_may_be_drawn(model):
    """Marks never are, the end not before two frames, and then it ends the talk."""
    voices = voices_of(model)
    talk = Talk(model, *talker_prompt(model, TEXT, "serena"), 9, np.random.default_rng(0), 0)
    logits = np.zeros(model.config.vocab_size, np.float32)
    logits[64:] = 9  # marks, the end among them
    logits[[5, 7]] = 2, 1
    assert talk.first(logits) == 5 and talk.finish_reason is None
    for _ in range(2):
        assert talk.first(logits) != voices.end
        talk.take(np.full(voices.groups, 5), np.zeros(model.config.hidden_size, np.float32))
    assert talk.first(logits) == voices.end and talk.finish_reason == "stop"
    logits[voices.end], logits[5] = -9, 1.04  # below 1 after the penalty of 1.05
    assert talk.first(logits) == 7


def test_the_same_seed_gives_the_same_sound(model):
    sounds = [speak(model, TEXT, "dylan", seed=seed).samples for seed in (1, 1, 2)]
    assert np.array_equal(sounds[0], sounds[1]) and sounds[0].dtype == np.float32
    assert not np.array_equal(sounds[0], sounds[2])
    assert np.array_equal(np.concatenate([*speak(model, TEXT, "dylan", seed=1)]), sounds[0])
    cold = [frames_of(model, seed, temperature=0.0).codes for seed in (1, 2)]
    assert np.array_equal(*cold)


def test_limits(model):
    """In seconds, and the model's own; a limit counts for all parts of a text together."""
    codec = voices_of(model).codec
    speech = speak(model, TEXT, seed=4, max_seconds=3 * codec.samples / codec.rate)
    assert len(speech.samples) == 3 * codec.samples and speech.finish_reason == "length"
    assert len([*speak(model, TEXT, seed=4, max_seconds=0)]) == 1
    speech = speak(model, ["Yes. ", "No. "] * 9, seed=4, max_seconds=30 * codec.samples / codec.rate)
    assert len(speech.samples) == 30 * codec.samples and speech.finish_reason == "length"
    most = max(len([*speak(model, TEXT, seed=seed)]) for seed in range(3))
    assert most <= 24  # of generation_config.json


def test_a_saved_sound(model, tmp_path):
    """WAV of 16 bits: the numbers, rounded."""
    speech = speak(model, TEXT, seed=1)
    speech.save(tmp_path / "a.wav")
    found = open_sound(str(tmp_path / "a.wav"), 24_000)
    assert found.rate == speech.rate == 24_000
    assert np.abs(np.concatenate([*found.blocks]) - speech.samples).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_fewer_bits(tmp_path, dtype):
    path = make_talking(tmp_path / "a", tts_config("1.7B"), dtype=dtype)
    assert len(speak(qwen3.load_model(path), TEXT, seed=0).samples)
    assert len(speak(qwen3_numba.load_model(path), TEXT, seed=0).samples)


def test_few_codes_in_a_frame(tmp_path):
    """Sizes come from the configs."""
    codec = codec_config(3)
    codec["decoder_config"] |= {"codebook_size": 64, "upsample_rates": [5], "upsampling_ratios": [2], "decoder_dim": 24}
    model = qwen3.load_model(make_talking(tmp_path / "a", tts_config("0.6B", groups=3), codec))
    speech = speak(model, TEXT, seed=0)
    assert speech.codec.samples == 10 and len(speech.samples) % 10 == 0


def test_a_folder_that_was_quantized(path, tmp_path):
    model = qwen3_numba.load_model(path, quantize="int8")
    save_quantized(model, tmp_path / "packed", "int8")
    packed = qwen3_numba.load_model(tmp_path / "packed")
    assert np.array_equal(speak(packed, TEXT, seed=3).samples, speak(model, TEXT, seed=3).samples)


# ----------------------------------------------------------------------------------------------------------------------
# Prompts and texts
# ----------------------------------------------------------------------------------------------------------------------

def test_special_tokens_in_a_text_stay_text(model):
    lengths = [len(talker_prompt(model, text, "serena")[0]) for text in ("a", "a<|im_end|>", "a<|im_end|><|im_start|>")]
    assert lengths[0] + 3 < lengths[1] < lengths[2]


def test_voices_with_a_dialect(model):
    """In Chinese, and if the model is to find out the language."""
    dialect, auto, chinese, english, other = (talker_prompt(model, TEXT, voice, language)[0] for voice, language in (
        ("dylan", "beijing_dialect"), ("dylan", "auto"), ("dylan", "chinese"), ("dylan", "english"),
        ("serena", "auto")))
    assert np.array_equal(dialect, auto) and np.array_equal(dialect, chinese)
    assert not np.array_equal(dialect, english) and len(other) == len(auto) - 1  # serena has no dialect


def test_a_voice_in_capitals(tmp_path):
    """As Qwen's script for fine-tuning writes the name that it gets."""
    config = tts_config()
    config["talker_config"] |= {"spk_id": {"Alice": 1070, "serena": 1071},
                                "spk_is_dialect": {"Alice": "beijing_dialect"}}
    model = qwen3.load_model(make_talking(tmp_path, config))
    alice, same, other, plain = (speak(model, TEXT, seed=0, voice=name, language=code).samples for name, code in (
        ("Alice", None), (None, "zh"), ("serena", None), ("alice", "en")))
    assert np.array_equal(alice, same) and not np.array_equal(alice, other) and not np.array_equal(alice, plain)


def test_languages_by_their_names_and_codes(model):
    voices = voices_of(model)
    assert [qwen3_tts.language_spoken(voices, name) for name in (None, "auto", "English", "en", "en-US", "zh_CN")] == [
        "auto", "auto", "english", "english", "english", "chinese"]
    for name in ("beijing_dialect", "fr", "klingon", ""):
        assert_one_line(message_of(speak, model, TEXT, language=name),
                        f"language must be one of auto, chinese, english, not {name!r}")


@pytest.mark.parametrize("text, parts", [
    ("One. Two! Three?", ["One.", "Two!", "Three?"]),
    ("你好。世界！再见", ["你好。", "世界！", "再见"]),
    ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
    ("It costs 3.14 euros", ["It costs 3.14 euros"]),
    ("A title\n\nand a\ntext. ", ["A title", "and a\ntext."]), ("  \n ", []), ("…", ["…"]),
    ("他问：「好吗？！」然后走了。", ["他问：「好吗？！」", "然后走了。"]),
    ("a" * 499 + "." + "”" * 9 + " b", ["a" * 499 + ".", "”" * 9 + " b"]),
    ("a" * 499 + "\n" * 9 + "b", ["a" * 499, "b"]),
    ("x" * 1200, ["x" * 500, "x" * 500, "x" * 200])])
def test_sentences(text, parts):
    assert [*sentences([text])] == parts == [*sentences(text)]  # at once, and letter by letter


def test_a_long_row_of_dots():
    """In time that grows with its length, not with its square or cube."""
    assert [*sentences(["." * 40_000])] == ["." * LONGEST_TEXT] * 80


def test_a_sentence_comes_as_soon_as_it_is_complete():
    asked = []
    found = sentences(asked.append(i) or piece for i, piece in enumerate(["One. T", "wo. Three"]))
    assert [(next(found), len(asked)), (next(found), len(asked)), (next(found), len(asked))] == [
        ("One.", 1), ("Two.", 2), ("Three", 2)]


def test_long_texts_are_spoken_in_parts():
    text = " ".join(f"This is sentence number {i}." for i in range(100))
    parts = [*spoken_parts(text)]
    assert " ".join(parts) == text and all(LONGEST_TEXT / 2 < len(part) <= LONGEST_TEXT for part in parts[:-1])
    assert [*spoken_parts(" One. Two. ")] == ["One. Two."]


def test_an_answer_is_spoken_as_it_comes(model):
    """The text may be a chat's stream."""
    pieces = ["Yes", ". N", "o."]
    assert np.array_equal(speak(model, iter(pieces), seed=0).samples, speak(model, ["Yes. No."], seed=0).samples)


# ----------------------------------------------------------------------------------------------------------------------
# Kinds of models, and bad input
# ----------------------------------------------------------------------------------------------------------------------

def test_kinds_of_models(tmp_path):
    design = qwen3.load_model(make_talking(tmp_path / "design", tts_config("1.7B", "voice_design")))
    old, new = (speak(design, TEXT, describe=words, seed=0).samples for words in ("An old man.", "A girl."))
    assert not np.array_equal(old, new) and len(speak(design, TEXT, seed=0).samples)
    base = qwen3.load_model(make_talking(tmp_path / "base", tts_config("0.6B", "base")))
    one, other = (speak(base, TEXT, clone=(voice(72_000, i), 24_000), seed=0).samples for i in (0, 1))
    assert len(one) and not np.array_equal(one, other)
    for options, words in (({"describe": "a"}, "no describe, but clone"), ({}, "give clone"),
                           ({"clone": (voice(99), 24_000)}, "0.5 to 60 seconds"),
                           ({"clone": "none.wav"}, "no such file"),
                           ({"clone": (np.full(24_000, np.nan), 24_000)}, "finite")):
        assert_one_line(message_of(speak, base, TEXT, **options), words)
    assert "no voice, but describe" in message_of(speak, design, TEXT, voice="serena")
    custom = qwen3.load_model(make_talking(tmp_path / "custom", tts_config("1.7B")))
    calm, angry = (speak(custom, TEXT, instruct=words, seed=0).samples for words in ("calm", "very angry"))
    assert not np.array_equal(calm, angry)


@pytest.mark.parametrize("options, words", [
    ({"voice": "Nobody"}, f"voice must be one of {', '.join(VOICES)}, not 'nobody'"), ({"seed": -1}, "seed"),
    ({"temperature": -1}, "temperature"),
    ({"max_seconds": -1}, "max_seconds"), ({"max_seconds": float("nan")}, "max_seconds"),
    ({"clone": "a.wav"}, "no clone"), ({"text": " \n"}, "no text")])
def test_bad_input(model, options, words):
    assert_one_line(message_of(speak, model, **{"text": TEXT} | options), words)


def test_the_smaller_model_takes_no_instruct(tmp_path):
    model = qwen3.load_model(make_talking(tmp_path / "a"))
    assert_one_line(message_of(speak, model, TEXT, instruct="whisper"), "0.6B takes no instruct")


def test_commands_for_answers_say_what_speaks(path, tmp_path, capfd):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello"}\n')
    for main, *arguments in ((cli.main, "Hello"), (cli.main, "--score", "Hello"),
                             (qwen3_inspect.main, "Hello", "--out", tmp_path / "a.html")):
        status, out, err = run_main(capfd, "--model", path, *arguments, main=main)
        assert (status, out) == (1, "")
        assert_one_line(err, "use qwen3_tts.py")
    assert run_main(capfd, "--model", path, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl",
                    main=qwen3_batch.main)[0] == 1
    assert "speaks" in (tmp_path / "out.jsonl").read_text()


def test_what_cannot_speak_or_answer(model):
    assert_one_line(message_of(speak, qwen3.load_model(ROOT / "demo"), TEXT), "can't speak")
    assert_one_line(message_of(qwen3.chat, model, TEXT), "qwen3_tts.py")
    assert_one_line(message_of(qwen3.generate, model, [1, 2]), "qwen3_tts.py")


@pytest.mark.parametrize("changes, words", [
    ({"tts_model_type": "singing"}, "singing"), ({"tts_model_type": None}, "tts_model_type"),
    ({"architectures": ["Qwen3TTS"]}, "architectures")])
def test_configs_that_are_not_computed(path, tmp_path, changes, words):
    folder = copy_of(path, tmp_path, **changes)
    assert_one_line(message_of(lambda: speak(qwen3.load_model(folder), TEXT)), words)


@pytest.mark.parametrize("name", ["talker.code_predictor.lm_head.2.weight", "talker.text_projection.linear_fc1.bias",
                                  "talker.code_predictor.model.layers.0.mlp.up_proj.weight", "talker.codec_head.weight",
                                  "talker.model.text_embedding.weight", "talker.code_predictor.model.norm.weight"])
@pytest.mark.parametrize("damage", ["missing", "misshapen", "NaN"])
def test_damaged_weights(path, tmp_path, name, damage):
    folder = copy_of(path, tmp_path)
    file = folder / "model.safetensors"
    old = qwen3.map_safetensors(file)[name].data
    with_tensors(file, {name: {"missing": None, "misshapen": np.ones((3, 5), np.float32),
                               "NaN": np.full_like(old, np.nan)}[damage]})
    assert_one_line(message_of(lambda: speak(qwen3.load_model(folder), TEXT).samples), str(folder))


@pytest.mark.parametrize("damage", ["no folder", "no weights", "missing", "misshapen", "NaN", "no config"])
def test_a_damaged_codec(path, tmp_path, damage):
    folder = copy_of(path, tmp_path) / "speech_tokenizer"
    name, file = "decoder.decoder.0.conv.weight", folder / "model.safetensors"
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage.startswith("no "):
        (folder / ("config.json" if "config" in damage else "model.safetensors")).unlink()
    else:
        with_tensors(file, {name: {"missing": None, "misshapen": np.ones((3, 5, 2), np.float32),
                                   "NaN": np.full_like(qwen3.map_safetensors(file)[name].data, np.nan)}[damage]})
    assert_one_line(message_of(lambda: speak(qwen3.load_model(folder.parent), TEXT).samples), str(folder.parent))


@pytest.mark.parametrize("place, value, words", [
    (("talker_config", "spk_id"), [1], "spk_id must be an object"),
    (("talker_config", "spk_id"), {"a": 9999}, "a = 9999"),
    (("talker_config", "codec_bos_id"), "x", "codec_bos_id"), (("talker_config", "codec_eos_token_id"), 5000, "5000"),
    (("talker_config", "num_code_groups"), 1, "num_code_groups"),
    (("talker_config", "hidden_act"), "gelu", "hidden_act"),
    (("talker_config", "code_predictor_config"), {"hidden_size": "x"}, "hidden_size")])
def test_values_in_config_json(path, tmp_path, place, value, words):
    config = json.loads((path / "config.json").read_text())
    config[place[0]][place[1]] = value
    folder = copy_of(path, tmp_path, **config)
    assert_one_line(message_of(lambda: speak(qwen3.load_model(folder), TEXT).samples), words)


@pytest.mark.parametrize("key, value", [
    ("sliding_window", 0), ("upsample_rates", [4, "x"]), ("upsample_rates", [4, 0]), ("upsample_rates", [4, -3]),
    ("upsample_rates", 5), ("upsampling_ratios", [2, 3]), ("num_attention_heads", 3)])
def test_values_in_the_codecs_config(path, tmp_path, key, value):
    folder, config = copy_of(path, tmp_path), codec_config()
    config["decoder_config"][key] = value
    (folder / "speech_tokenizer/config.json").write_text(json.dumps(config))
    found = message_of(lambda: speak(qwen3.load_model(folder), TEXT).samples)
    assert_one_line(found, "speech_tokenizer")


@pytest.mark.parametrize("groups, size", [(6, 32), (4, 64)])
def test_a_codec_with_fewer_codes(tmp_path, groups, size):
    """Than the code predictor draws: 6 of 64."""
    codec = codec_config(groups)
    codec["decoder_config"]["codebook_size"] = size
    path = make_talking(tmp_path / "a", codec=codec)
    assert_one_line(message_of(lambda: speak(qwen3.load_model(path), TEXT)), "speech_tokenizer", "the codec's weights")


def test_a_long_prompt_in_pieces(model, monkeypatch):
    whole = frames_of(model, 0, temperature=0.0, text=TEXT * 3).codes
    monkeypatch.setattr(qwen3_tts, "CHUNK", 7)
    assert np.array_equal(frames_of(model, 0, temperature=0.0, text=TEXT * 3).codes, whole)
