"""Text to speech: what is spoken, as it comes and at once."""
import numpy as np
import pytest

import qwen3
from configs import TTS_SIZES, tts_config
from qwen3_tts import decode, speak, voices_of
from talking import make_talking

TEXT = "Good morning, how are you?"


@pytest.fixture(scope="module", params=[*TTS_SIZES])
def model(request, tmp_path_factory):
    return qwen3.load_model(make_talking(tmp_path_factory.mktemp("talking"), tts_config(request.param)))


def test_a_sound_has_the_same_bits_as_it_comes_and_at_once(model):
    codec, codes = voices_of(model).codec, np.random.default_rng(0).integers(0, 64, (30, 6))
    state, whole = {}, decode(codec, codes, {})
    parts = [decode(codec, codes[start:end], state) for start, end in ((0, 1), (1, 2), (2, 13), (13, 30))]
    assert np.array_equal(np.concatenate(parts), whole) and len(whole) == 30 * codec.samples


def test_the_same_seed_gives_the_same_sound(model):
    sounds = [speak(model, TEXT, "dylan", seed=seed).samples for seed in (1, 1, 2)]
    assert np.array_equal(sounds[0], sounds[1]) and sounds[0].dtype == np.float32
    assert len(sounds[0]) != len(sounds[2]) or not np.array_equal(sounds[0], sounds[2])
    assert np.array_equal(np.concatenate([*speak(model, TEXT, "dylan", seed=1)]), sounds[0])
