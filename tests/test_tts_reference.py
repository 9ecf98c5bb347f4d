"""Live comparison of what a model speaks with Qwen's own package in float64: prompts, talker, code predictor, codec,
log-mel, x-vectors. Skipped without torch and the packages: pip install librosa, and --no-deps qwen-tts-hf."""
import json
import sys
import types
from unittest.mock import patch

import numpy as np
import pytest

import qwen3
import qwen3_tts
from configs import TTS_SIZES, tts_config
from hearing import voice
from qwen3 import map_safetensors, to_float32
from qwen3_lib.generation.speaker import voice_in, voice_mel
from qwen3_tts import Talk, decode, next_frames, talker_prompt, voices_of
from talking import make_talking

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("librosa")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
# A part of the package that needs torchaudio, onnxruntime, sox and einops, for models that were never published.
unused = sys.modules.setdefault("qwen_tts.core.tokenizer_25hz.vq.speech_vq", types.ModuleType("speech_vq"))
vars(unused).update(WhisperEncoderVQ=None, XVectorExtractor=None)
usual = {**ROPE_INIT_FUNCTIONS}
pytest.importorskip("qwen_tts")
ROPES = {**ROPE_INIT_FUNCTIONS}  # the package adds one, which other models' classes would then take
ROPE_INIT_FUNCTIONS.clear()
ROPE_INIT_FUNCTIONS.update(usual)

from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig  # noqa: E402
from qwen_tts.core.models.modeling_qwen3_tts import (  # noqa: E402
    Qwen3TTSForConditionalGeneration, mel_spectrogram)
from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (  # noqa: E402
    Qwen3TTSTokenizerV2DecoderConfig)
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Decoder  # noqa: E402
from transformers.utils import ModelOutput  # noqa: E402

TEXT = "Good morning! 你好, it's 12 o'clock."


def loaded(model, file, start=""):
    """The reference in float64, with the tensors of a file whose names begin so."""
    tensors = {name.removeprefix(start): torch.tensor(to_float32(tensor).astype(np.float64))
               for name, tensor in map_safetensors(file).items() if name.startswith(start)}
    model = model.double().eval()
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and not [name for name in missing if "inv_freq" not in name and "input_proj" not in name]
    return model


def reference(path):
    config = Qwen3TTSConfig(**json.loads((path / "config.json").read_text()))
    for each in (config, config.talker_config, config.talker_config.code_predictor_config):
        each._attn_implementation = "eager"
    with patch.dict(ROPE_INIT_FUNCTIONS, ROPES):
        theirs = Qwen3TTSForConditionalGeneration(config)
    return loaded(theirs, path / "model.safetensors")


def reference_codec(path):
    about = json.loads((path / "speech_tokenizer/config.json").read_text())["decoder_config"]
    config = Qwen3TTSTokenizerV2DecoderConfig(**about, attn_implementation="eager")
    with patch.dict(ROPE_INIT_FUNCTIONS, ROPES):
        theirs = Qwen3TTSTokenizerV2Decoder(config)
    return loaded(theirs, path / "speech_tokenizer/model.safetensors", "decoder.")


@pytest.fixture(scope="module", params=[*TTS_SIZES])
def path(request, tmp_path_factory):
    return make_talking(tmp_path_factory.mktemp("talking"), tts_config(request.param))


@pytest.fixture(scope="module")
def both(path):
    """(a model, Qwen's)"""
    return qwen3.load_model(path), reference(path)


def off(found, expected):
    """The largest difference, in units of the spread."""
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else expected
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / expected.std()


@pytest.mark.parametrize("n", [1, 7, 8, 9, 40])
def test_codec(path, n):
    codec, codes = voices_of(qwen3.load_model(path)).codec, np.random.default_rng(n).integers(0, 64, (n, 6))
    with torch.no_grad():
        expected = reference_codec(path)(torch.tensor(codes.T[None]))[0, 0]
    assert off(decode(codec, codes, {}), expected) < 1e-5


def test_a_long_sound(path):
    """700 frames, which the reference's chunks of 300 with 25 before them compute wrong: ours equal its whole."""
    codec, codes = voices_of(qwen3.load_model(path)).codec, np.random.default_rng(0).integers(0, 64, (700, 6))
    theirs, given = reference_codec(path), torch.tensor(codes.T[None])
    with torch.no_grad():
        whole, in_chunks = theirs(given)[0, 0], theirs.chunked_decode(given)[0, 0]
    assert off(decode(codec, codes, {}), whole) < 1e-5 and off(in_chunks.numpy(), whole) > 1e-3


MODES = {"a voice": dict(voice="serena", language="auto"), "a language": dict(voice="serena", language="english"),
         "instruct": dict(voice="serena", language="chinese", instruct="用特别愤怒的语气说"),
         "a dialect": dict(voice="dylan", language="auto"),
         "a dialect, chinese": dict(voice="eric", language="chinese"),
         "a dialect, english": dict(voice="eric", language="english"), "no voice": dict(language="auto"),
         "design": dict(language="english", instruct="An old man, hoarse.")}


SPOKEN = "<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>assistant\n"
ASKED = "<|im_start|>user\n{}<|im_end|>\n"


def ids_of(tokenizer, text):
    return torch.tensor(tokenizer.encode(text, False))[None]


def prompt_of(theirs, tokenizer, text, voice=None, language="auto", instruct="", streamed=False, x_vector=None):
    """What the reference gives its talker: (inputs_embeds [n, d], trailing_text_hidden [m, d])."""
    class Given(Exception):
        pass

    def generate(**inputs):
        raise Given(inputs["inputs_embeds"][0], inputs["trailing_text_hidden"][0])

    cloned = None if x_vector is None else {
        "ref_spk_embedding": [torch.tensor(x_vector)], "x_vector_only_mode": [True], "icl_mode": [False],
        "ref_code": None}
    theirs.talker.generate = generate
    try:
        theirs.generate([ids_of(tokenizer, SPOKEN.format(text))], [ids_of(tokenizer, ASKED.format(instruct))
                        if instruct else None], None, cloned, [language], [voice], not streamed)
    except Given as given:
        return given.args
    finally:
        del theirs.talker.generate


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("mode", [*MODES, "a clone"])
def test_prompts(both, mode, streamed):
    model, theirs = both
    asked = MODES.get(mode, {"language": "chinese"})
    x_vector = np.random.default_rng(0).standard_normal(model.config.hidden_size) if mode == "a clone" else None
    ours = asked if x_vector is None else asked | {"voice": x_vector.astype(np.float32)}
    found = talker_prompt(model, TEXT, **ours, streamed=streamed)
    expected = prompt_of(theirs, model.tokenizer, TEXT, **asked, streamed=streamed, x_vector=x_vector)
    assert off(found[0], expected[0]) < 1e-6
    trailing = found[1][:len(expected[1])]  # then the last one of ours is tts_pad, which the reference adds by itself
    assert np.abs(trailing - expected[1].numpy()).max() < 1e-5


def test_logits(both, monkeypatch):
    """Of the talker and of the code predictor, with given codes, over some frames."""
    model, theirs = both
    voices, seen, (x, trailing) = voices_of(model), [], talker_prompt(model, TEXT, "serena", streamed=True)
    codes = np.random.default_rng(1).integers(0, 64, (30, voices.groups))
    given = iter(codes.ravel())
    monkeypatch.setattr(qwen3_tts, "sample", lambda logits, *_: seen.append(logits) or next(given))
    talk = Talk(model, x, trailing, len(codes), np.random.default_rng(0))
    while talk.finish_reason is None:
        next_frames(model, [talk])
    assert talk.finish_reason == "length" and np.array_equal(talk.codes, codes)
    talker, predictor, frames = theirs.talker, theirs.talker.code_predictor, torch.tensor(codes)
    tables = [talker.get_input_embeddings(), *predictor.get_input_embeddings()]
    with torch.no_grad():
        prompt, text = prompt_of(theirs, model.tokenizer, TEXT, "serena", streamed=True)
        vectors = torch.stack([table(frames[:, i]) for i, table in enumerate(tables)])
        pad = talker.text_projection(talker.get_text_embeddings()(torch.tensor([4076])))
        text = torch.cat([text, pad.expand(len(codes), -1)])[:len(codes)]
        x = torch.cat([prompt, vectors.sum(0) + text])[None]
        states = talker.model(inputs_embeds=x, use_cache=False).last_hidden_state[0, len(prompt) - 1:-1]
        first = talker.codec_head(states).numpy()
        inputs = torch.cat([states[:, None], vectors[:-1].swapaxes(0, 1)], dim=1)
        others = predictor.forward_finetune(inputs_embeds=inputs, use_cache=False).logits.numpy()
    seen_first = np.array(seen[::voices.groups])
    spread = first.std()
    allowed = np.isfinite(seen_first)
    assert (allowed[2:] == voices.allowed).all() and not allowed[:2, voices.end].any()
    assert np.abs(seen_first - first)[allowed].max() < 1e-5 * spread
    found = np.stack([row for i, row in enumerate(seen) if i % voices.groups]).reshape(others.shape)
    assert off(found, others) < 1e-5


@pytest.mark.skipif(hasattr(ModelOutput, "past_key_values"), reason="qwen-tts-hf 0.1.1 loses its cache with transformers "
                    "5.24, which calls past_key_values cache; 5.23 works")
@pytest.mark.parametrize("text", [TEXT, "Yes.", "好", "one two three four five six seven eight"])
@pytest.mark.parametrize("streamed", [False, True])
def test_greedy_frames(both, text, streamed):
    """As Qwen's own loop draws them: with the repetition penalty, without marks, the end not before two frames."""
    model, theirs = both
    with torch.no_grad():
        [expected], _ = theirs.generate(
            [ids_of(model.tokenizer, SPOKEN.format(text))], None, None, None, ["auto"], ["serena"], not streamed,
            max_new_tokens=41, do_sample=False, subtalker_dosample=False)
    talk = Talk(model, *talker_prompt(model, text, "serena", streamed=streamed), 40, np.random.default_rng(0), 0.0)
    while talk.finish_reason is None:
        next_frames(model, [talk])
    assert np.array_equal(talk.codes, expected.numpy())
    assert talk.finish_reason == ("length" if len(expected) == 40 else "stop")


@pytest.mark.parametrize("n", [12_000, 72_001, 100_000])
def test_a_voice(tmp_path, n):
    """Log-mel and x-vector. The reference computes log-mel in float32: off by some 1e-4 where a pitch is silent."""
    path = make_talking(tmp_path, tts_config("0.6B", "base"))
    model, theirs, samples = qwen3.load_model(path), reference(path), voice(n)
    mel = mel_spectrogram(torch.tensor(samples)[None], 1024, 128, 24000, 256, 1024, 0, 12000)[0].T
    assert off(voice_mel(samples, 128, 24_000), mel) < 1e-4
    with torch.no_grad():
        expected = theirs.speaker_encoder(torch.tensor(voice_mel(samples, 128, 24_000)[None].astype(np.float64)))[0]
    assert off(voice_in((samples, 24_000), model.source), expected) < 1e-5
