"""GGUF models that see: a tower's file beside a text model, as llama.cpp's converter writes both."""
import json

import numpy as np
import pytest

import qwen3
import qwen3_numba
from configs import HYBRID, HYBRID_MOE, asr_config, seeing_hybrid, vl_config
from hearing import make_hearing, voice
from helpers import logits_of, message_of
from make_random_model import make_random_model
from qwen3_asr import Hearing
from qwen3_lib.io.models import open_model
from qwen3_lib.io.pictures import picture_of

gguf = pytest.importorskip("gguf")

import test_gguf_file  # noqa: E402

CONFIGS = {"qwen3vl": vl_config("2B"), "qwen3vlmoe": vl_config("30B-A3B"), "qwen35": seeing_hybrid(HYBRID, "0.8B"),
           "qwen35moe": seeing_hybrid(HYBRID_MOE, "9B, 27B")}
PIXELS = np.random.default_rng(0).integers(0, 256, (300, 260, 3), np.uint8)


def write_tower(path, out, form="F32", **changes):
    """The tower of a folder, after the steps of llama.cpp's conversion/qwen3vl.py."""
    config = json.loads((path / "config.json").read_text())
    about, tensors = config["vision_config"], open_model(str(path)).tower
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, about["depth"])
    deep, writer = about["deepstack_visual_indexes"], gguf.GGUFWriter(out, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"]), writer.add_vision_patch_size(16)
    writer.add_vision_embedding_length(about["hidden_size"]), writer.add_vision_block_count(about["depth"])
    writer.add_vision_head_count(about["num_heads"]), writer.add_vision_spatial_merge_size(2)
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_is_deepstack_layers([i in deep for i in range(about["depth"])])
    for name, tensor in tensors.items():
        name, (stem, part) = name.removeprefix("model."), name.removeprefix("model.visual.").rsplit(".", 1)
        parts, values = stem.split("."), tensor.data
        if parts[0] == "deepstack_merger_list":
            theirs = f"v.deepstack.{deep[int(parts[1])]}.{parts[2].removeprefix('linear_')}.{part}"
        elif parts[0] == "merger":
            theirs = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[parts[1]] + f".{part}"
        else:
            theirs = names.get_name(name, (".weight", ".bias"))
        if values.ndim == 5:
            writer.add_tensor(theirs, np.ascontiguousarray(values[:, :, 0]))
            theirs, values = f"{theirs}.1", np.ascontiguousarray(values[:, :, 1])
        kind = gguf.GGMLQuantizationType[form if values.ndim == 2 and values.shape[1] % 32 == 0 else "F32"]
        writer.add_tensor(theirs, gguf.quantize(values, kind), raw_dtype=kind)
    return test_gguf_file.finished(writer, changes, out)


@pytest.fixture(params=CONFIGS)
def both(request, tmp_path, monkeypatch):
    """(the folder of a random model, its GGUF file)"""
    monkeypatch.setattr(test_gguf_file, "ARCHITECTURES", (gguf.MODEL_ARCH.QWEN3VL, gguf.MODEL_ARCH.QWEN3VLMOE))
    config = CONFIGS[request.param]
    config["text_config"] |= {"vocab_size": test_gguf_file.N_TOKENS}
    path, out = make_random_model(config, tmp_path / "folder", "float32"), tmp_path / "x.gguf"
    if request.param.startswith("qwen35"):
        return path, test_gguf_file.write_hybrid(path, out)
    sections = config["text_config"]["rope_scaling"]["mrope_section"]
    return path, test_gguf_file.write_gguf(path, out, **{f"{request.param}.rope.dimension_sections": [*sections, 0]})


def logits(model):
    ids = [3, *model.media.show(picture_of(PIXELS)).ids, 5, 6]
    return logits_of(model, ids)


@pytest.mark.parametrize("engine", [qwen3.Engine, qwen3_numba.engine])
def test_the_same_as_the_folder(both, engine, tmp_path):
    """The tower's tensors bit by bit, the positions, and so the logits."""
    path, file = both
    write_tower(path, tmp_path / "mmproj-x.gguf")
    ours, expected = open_model(str(tmp_path)).tower, open_model(str(path)).tower
    assert ours.keys() == expected.keys()
    assert all(np.array_equal(ours[name].data, expected[name].data) for name in expected)
    model, original = (qwen3.load_model(each, engine(), tokenizer=False) for each in (file, path))
    assert np.array_equal(model.media.axes, original.media.axes)
    found, exact = logits(model), logits(original)
    assert np.abs(found - exact).max() < (1e-5 if engine is qwen3.Engine else 5e-3) * exact.std()  # norms are rounded


@pytest.mark.parametrize("form", ["F16", "BF16", "Q8_0"])
def test_other_formats(both, form, tmp_path):
    """The numbers are those that the gguf package reads."""
    path, file = both
    write_tower(path, tmp_path / "x.mmproj-f16.gguf", form)
    ours, exact = qwen3.load_model(file, tokenizer=False).media.weights, open_model(str(path)).tower
    for name, tensor in exact.items():
        values = tensor.data.reshape(len(tensor.data), -1) if tensor.data.ndim > 1 else tensor.data
        packed = tensor.data.ndim == 2 and values.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType[form if packed else "F32"]
        expected = gguf.dequantize(gguf.quantize(values, kind), kind)
        assert np.array_equal(ours[name.removeprefix("model.visual.")], expected), name


def test_a_tower_of_another_model_is_left_alone(both, tmp_path):
    path, file = both
    assert qwen3.load_model(file, tokenizer=False).media is None
    for changes in ({"clip.vision.projection_dim": 7}, {"clip.projector_type": "ldp"},
                    {"clip.vision.projector_type": "ldp"}):
        write_tower(path, tmp_path / "mmproj-b.gguf", **changes)
        assert qwen3.load_model(file, tokenizer=False).media is None
    (tmp_path / "mmproj-c.gguf").write_bytes(b"GGUF")
    assert "mmproj-c.gguf" in message_of(qwen3.load_model, file, tokenizer=False)
    for changes, words in (({"clip.vision.patch_size": 14}, "its config"), ({"clip.vision.block_count": 9}, "blocks.")):
        write_tower(path, tmp_path / "mmproj-a.gguf", **changes)  # the first one that fits counts
        model = qwen3.load_model(file, tokenizer=False)
        assert words in message_of(model.media.show, picture_of(PIXELS))


# ---- Towers that hear ------------------------------------------------------------------------------------------------

def write_ears(path, out, form="F32", **changes):
    """The tower of a Qwen3-ASR's folder, as llama.cpp's Qwen3ASRMmprojModel in conversion/qwen3vl.py does it."""
    about = json.loads((path / "config.json").read_text())["thinker_config"]["audio_config"]
    names, writer = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 9), gguf.GGUFWriter(out, "clip")
    writer.add_clip_has_audio_encoder(True)
    writer.add_audio_projection_dim(about["output_dim"]), writer.add_audio_embedding_length(about["d_model"])
    writer.add_audio_block_count(about["encoder_layers"]), writer.add_audio_num_mel_bins(about["num_mel_bins"])
    writer.add_audio_head_count(about["encoder_attention_heads"])
    writer.add_clip_audio_projector_type(gguf.VisionProjectorType.QWEN3A)
    writer.add_tensor("a.position_embd.weight", np.zeros((13, about["d_model"]), np.float32))
    for name, tensor in open_model(str(path)).tower.items():
        name, values = name.removeprefix("thinker."), tensor.data
        values = values[:, None, None] if "conv2d" in name and name.endswith(".bias") else values
        kind = gguf.GGMLQuantizationType[form if values.ndim == 2 and values.shape[1] % 32 == 0 else "F32"]
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quantize(values, kind), raw_dtype=kind)
    return test_gguf_file.finished(writer, changes, out)


@pytest.mark.parametrize("form", ["F32", "Q8_0"])
def test_a_model_that_hears(tmp_path, monkeypatch, form):
    """Its text model has the architecture of a Qwen3-VL; the answers are the folder's, also where the file samples."""
    monkeypatch.setattr(test_gguf_file, "ARCHITECTURES", (gguf.MODEL_ARCH.QWEN3VL, gguf.MODEL_ARCH.QWEN3VLMOE))
    path = make_hearing(asr_config("1.7B"), tmp_path / "folder")
    file = test_gguf_file.write_gguf(path, tmp_path / "x.gguf", **{"qwen3vl.rope.dimension_sections": [6, 5, 5, 0]})
    write_ears(path, tmp_path / "mmproj-x.gguf", form)
    model, original = qwen3.load_model(file), qwen3.load_model(path)
    if form == "F32":
        assert all(np.array_equal(model.media.weights[name], tensor) for name, tensor in original.media.weights.items())
        found, expected = (Hearing(each, each.media.hear(voice(30_000)), "English", max_tokens=12).finish().token_ids
                           for each in (model, original))
        assert found == expected and len({*found}) > 4
    else:
        exact = original.media.weights["layers.0.fc1.weight"]
        kind = gguf.GGMLQuantizationType.Q8_0
        assert np.array_equal(model.media.weights["layers.0.fc1.weight"],
                              gguf.dequantize(gguf.quantize(exact, kind), kind))
