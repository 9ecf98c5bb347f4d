"""Live comparison of what models hear with transformers in float64: log-mel, towers, whole models. Skipped without
torch."""
import json
import math

import numpy as np
import pytest

import qwen3
from configs import ASR_SIZES, SPEECH_TOKENS, asr_config
from hearing import make_hearing, voice
from qwen3 import gelu, map_safetensors
from qwen3_asr import (LANGUAGES, Hearing, SoundConfig, audio_tower, language_and_text, log_mel,
                       mel_filters, speech_prompt)
from qwen3_lib.generation.aligner import mark_classes, repaired, split_words, timed_words
from tokenizer_utils import SPLIT_PATTERNS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_reference import both_engines, load  # noqa: E402
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX  # noqa: E402
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor  # noqa: E402
from transformers.models.qwen3_asr.processing_qwen3_asr import (  # noqa: E402
    LANGUAGE_CODE_TO_NAME, Qwen3ASRProcessor, _fix_timestamps, _parse_single_output)

NATIVE = (("thinker.model.", "model.language_model."), ("thinker.lm_head.", "lm_head."), ("thinker.", "model."),
          ("model.audio_tower.proj1.", "model.multi_modal_projector.linear_1."),
          ("model.audio_tower.proj2.", "model.multi_modal_projector.linear_2."))
FRAMES = (1, 99, 100, 101, 799, 800, 801, 1234, 2500)


def processed(samples):
    """What transformers makes of a sound: input_features, input_features_mask."""
    found = Qwen3ASRFeatureExtractor()(samples, sampling_rate=16_000, padding=True, return_attention_mask=True)
    return {"input_features": found["input_features"].double(), "input_features_mask": found["attention_mask"]}


def reference(path, size, n_classes=0):
    """transformers' model in float64, with the tensors of a folder of either layout."""
    tensors = {}
    for name, tensor in map_safetensors(path / "model.safetensors").items():
        for start, native in NATIVE:
            name = native + name.removeprefix(start) if name.startswith(start) else name
        tensors[name] = torch.tensor(tensor.data.astype(np.float64))
    if n_classes:
        kind, tensors["score.weight"] = (transformers.Qwen3ASRForTokenClassification,
                                         tensors.pop("lm_head.weight", tensors.get("score.weight")))
    else:
        kind, tensors["lm_head.weight"] = (transformers.Qwen3ASRForConditionalGeneration,
                                           tensors["model.language_model.embed_tokens.weight"])
    model = kind(transformers.Qwen3ASRConfig(**asr_config(size, True, n_classes), attn_implementation="eager"))
    model.double().eval().load_state_dict(tensors)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


@pytest.fixture(scope="module", params=[(size, native) for size in ASR_SIZES for native in (False, True)],
                ids=lambda each: f"{each[0]}{', native' * each[1]}")
def both(request, tmp_path_factory):
    """(the folder of a random model, transformers' model)"""
    path = make_hearing(asr_config(*request.param), tmp_path_factory.mktemp("hearing"))
    return path, reference(path, request.param[0])


# ----------------------------------------------------------------------------------------------------------------------
# Features and towers
# ----------------------------------------------------------------------------------------------------------------------

def test_gelu():
    x = np.linspace(-12, 12, 100_001).astype(np.float32)
    expected = np.array([0.5 * each * math.erfc(-each / math.sqrt(2)) for each in x.astype(float)])
    assert (np.abs(gelu(x) - expected) < 1.3e-7 * np.maximum(np.abs(x), 1)).all()


@pytest.mark.parametrize("n", [5, 8_000, 8_001, 15_999, 16_000, 16_159, 200_000])
def test_log_mel(n):
    """transformers computes in float32: off by some 1e-5 where a pitch is nearly silent."""
    samples, expected = voice(n), processed(voice(n))
    valid = int(expected["input_features_mask"].sum())
    found = log_mel(np.pad(samples, (0, max(8_000 - n, 0))))
    difference = np.abs(found - expected["input_features"][0].numpy().T[:valid])
    assert len(found) == valid and difference.max() < 5e-5 and math.sqrt((difference**2).mean()) < 1e-6


def test_mel_filters():
    assert np.abs(mel_filters(128, 16_000, 400) - Qwen3ASRFeatureExtractor().mel_filters).max() < 1e-15


@pytest.mark.parametrize("key", [None, *vars(SoundConfig())])
def test_a_tower_whose_config_lacks_a_key(both, key, tmp_path):
    """transformers' own value; `None`: a config that lacks none."""
    for file in both[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((tmp_path / "config.json").read_text())
    audio = raw.get("thinker_config", raw)["audio_config"]
    if key is not None:
        del audio[key]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected = transformers.Qwen3ASRConfig(audio_config={name: value for name, value in audio.items()
                                                         if name != "model_type"}).audio_config
    found = qwen3.load_model(tmp_path, tokenizer=False).media.config
    assert vars(found) == {name: getattr(expected, name) for name in vars(found)}


def test_languages_and_how_a_text_is_cut():
    assert LANGUAGES == LANGUAGE_CODE_TO_NAME and SPLIT_PATTERNS == PRETOKENIZE_REGEX


@pytest.mark.parametrize("n_frames", FRAMES)
def test_towers(both, n_frames):
    """Within 1e-5 of their spread: parts of a chunk, of a window, several windows."""
    path, theirs = both
    sounds = qwen3.load_model(path, tokenizer=False).media
    mel, step = log_mel(voice(max(n_frames * 160, 8_000)))[:n_frames], sounds.config.n_window_infer
    padded = np.pad(mel, ((0, -n_frames % 100), (0, 0)))
    mask = torch.tensor(np.arange(len(padded)) < n_frames).long()[None]
    with torch.no_grad():
        expected = theirs.get_audio_features(torch.tensor(padded.T[None]).double(), mask).pooler_output.numpy()
    found = np.concatenate([audio_tower(mel[i:i + step], sounds.weights, sounds.config)
                            for i in range(0, n_frames, step)])
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5 * expected.std()


# ----------------------------------------------------------------------------------------------------------------------
# Whole models
# ----------------------------------------------------------------------------------------------------------------------

SOUNDS = {"one window": voice(70_000), "several": voice(300_000, 1), "short": voice(3_000, 2),
          "silence": np.zeros(20_000, np.float32)}
CASES = [("one window", "", ""), ("several", "", ""), ("short", "", ""), ("silence", "", ""),
         ("one window", "English", ""), ("several", "Greek", "Ada Lovelace, Jakob Bernoulli")]


@both_engines
@pytest.mark.parametrize("name, language, context", CASES)
def test_models(both, engine, name, language, context):
    """Logits and 32 greedy tokens: of sounds, with a context, a language, silence."""
    path, theirs = both
    model = load(engine, path)
    sound = model.media.hear(SOUNDS[name])
    ids = speech_prompt(model, sound, language, context)
    pad = model.tokenizer.token_to_id("<|audio_pad|>")
    text = (f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|>"
            f"{'<|audio_pad|>' * len(sound.ids)}<|audio_end|><|im_end|>\n<|im_start|>assistant\n"
            + (f"language {language}<asr_text>" if language else ""))
    assert np.where(ids < 0, pad, ids).tolist() == model.tokenizer.encode(text, False)
    arguments = {"input_ids": torch.tensor(np.where(ids < 0, pad, ids))[None], **processed(SOUNDS[name])}
    with torch.no_grad():
        expected = theirs(**arguments).logits[0].numpy()
        answer = theirs.generate(**arguments, do_sample=False, max_new_tokens=32)[0, len(ids):].tolist()
    found = qwen3.forward(model, ids, model.engine.new_cache(model.config), all_logits=True)
    difference = (found - expected) / expected.std()
    assert np.sqrt((difference**2).mean()) < 2e-5 and np.abs(difference).max() < 1e-3  # attention is sharp here
    assert len({*answer}) > 12
    hearing = Hearing(model, sound, language, context, max_tokens=32, eos_token_ids=())
    assert hearing.finish().token_ids == answer


@pytest.mark.parametrize("answer", [
    "language English<asr_text>Good morning.", "language None<asr_text>", " language english <asr_text> a\nb ", "plain",
    "language German\nEnglish<asr_text>x<asr_text>y", "Greek<asr_text>z", "<asr_text>w",
    "language None<asr_text>a", "", "language NONE<asr_text>",
    "Language Thai<asr_text>\n a \n", "language  Czech <asr_text>"])
def test_answers(answer):
    expected = _parse_single_output(answer)
    assert language_and_text(answer) == (expected["language"] or "", expected["transcription"])


# ----------------------------------------------------------------------------------------------------------------------
# Times of words
# ----------------------------------------------------------------------------------------------------------------------

TEXTS = {"English": "It's 12 o'clock, isn't it? — Yes: well-known e-mails, naïve cafés …",
         "Chinese": "你好，Hello 世界 3.14！", "German": "Die Straße ist lang."}


@both_engines
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("language", TEXTS)
def test_classes_of_words(language, native, engine, tmp_path):
    """Those of transformers' Qwen3ASRForTokenClassification, and the times that its processor makes of them."""
    path = make_hearing(asr_config("0.6B", native, 60), tmp_path)
    model, theirs, samples = load(engine, path), reference(path, "0.6B", 60), voice(90_000)
    words = [word for _, word in split_words(TEXTS[language])]
    assert words == Qwen3ASRProcessor.split_words_for_alignment(None, TEXTS[language], language)
    sound, encode = model.media.hear(samples), model.tokenizer.encode
    ids = torch.tensor(encode(f"<|audio_start|>{'<|audio_pad|>' * len(sound.ids)}<|audio_end|>" + "".join(
        f"{word}<timestamp><timestamp>" for word in words), False))
    with torch.no_grad():
        logits = theirs(input_ids=ids[None], **processed(samples)).logits
    found = mark_classes(model, sound, words)
    assert found.tolist() == logits[0, ids == SPEECH_TOKENS["<timestamp>"]].argmax(-1).tolist() and len({*found}) > 1
    expected = Qwen3ASRProcessor.decode_forced_alignment(None, logits, ids[None], [words],
                                                         SPEECH_TOKENS["<timestamp>"], 80)
    assert [(word.start, word.end) for word in timed_words(model, samples, TEXTS[language], language)] == [
        (word["start_time"], word["end_time"]) for word in expected[0]]


def test_times_are_repaired():
    rng = np.random.default_rng(0)
    for n in rng.integers(1, 40, 500):
        times = np.where(rng.random(n) < rng.random(), np.sort(rng.integers(0, 60, n)), rng.integers(0, 60, n)) * 80
        assert [int(each) for each in repaired(times)] == _fix_timestamps(times.astype(np.float32))


def test_words_of_any_text():
    rng = np.random.default_rng(0)
    for _ in range(500):
        codes = rng.choice([*map(ord, "a'- .,\n\u3000"), *rng.integers(0x20, 0x3000, 6),
                            *rng.integers(0x3300, 0xd7ff, 6), *rng.integers(0x1f300, 0x2fa30, 6)], rng.integers(0, 30))
        text = "".join(map(chr, codes))
        assert [word for _, word in split_words(text)] == Qwen3ASRProcessor.split_words_for_alignment(None, text)
