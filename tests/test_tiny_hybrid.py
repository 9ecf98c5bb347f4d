"""tests/tiny_hybrid: a Qwen3.5 that demo/train/hybrid.py has trained, with an MTP head."""
import math

import numpy as np
import pytest
from safetensors import safe_open

import qwen3
import qwen3_numba
from configs import ROOT
from qwen3_lib.generation.score import score

FOLDER = ROOT / "tests/tiny_hybrid"
TEXT = "<|im_start|>user\nPlease tell me a story.<|im_end|>\n<|im_start|>assistant\n<think>\nA story about a dog.\n" \
    "</think>\n\nOnce upon a time there was a dog in a small village.<|im_end|>\n<|im_start|>user\nHow are you?" \
    "<|im_end|>\n"


@pytest.mark.parametrize("engine", [qwen3.Engine, qwen3_numba.engine])
def test_it_has_learned_its_text(engine):
    """A text is far likelier than the same tokens in another order, and than by chance; an answer ends by itself."""
    model = qwen3.load_model(FOLDER, engine())
    ids = np.array(model.tokenizer.encode(TEXT))
    loss, shuffled = (-score(model, each).mean() for each in (ids, np.random.default_rng(0).permutation(ids)))
    chance = math.log(model.config.vocab_size)
    assert loss < chance / 3 and shuffled > chance / 2
    story = qwen3.chat(model, "Tell me a story.", enable_thinking=False, max_new_tokens=200).finish()
    assert story.text.startswith("Once upon a time ") and story.finish_reason == "stop"


def test_its_head_has_the_tensors_of_qwens():
    with safe_open(FOLDER / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    full = {name.removeprefix("model.language_model.layers.3."): shape for name, shape in shapes.items()
            if name.startswith("model.language_model.layers.3.")}
    assert "self_attn.q_norm.weight" in full
    assert {name: shape for name, shape in shapes.items() if name.startswith("mtp.")} == {
        "mtp.fc.weight": [128, 256], "mtp.norm.weight": [128], "mtp.pre_fc_norm_embedding.weight": [128],
        "mtp.pre_fc_norm_hidden.weight": [128], **{f"mtp.layers.0.{name}": shape for name, shape in full.items()}}
