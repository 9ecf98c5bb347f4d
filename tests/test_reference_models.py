"""Every official config, at a reduced size with random weights, against transformers in float32: docs/models.md."""
import json

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE, SHARED
from make_random_model import make_random_model
from qwen3_app import cli
from published import change_config, official_configs, reduced, write_tensors
from qwen3_io.checkpoint import map_safetensors, map_checkpoint, to_float32
from test_qwen3_moe import MOE, fuse

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -r requirements-reference.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from make_golden import greedy, load as reference  # noqa: E402

CONFIGS = official_configs() or [pytest.param(None, marks=pytest.mark.skip(reason=f"no configs at {SHARED}"))]
ENGINES = [qwen3.load_model, lambda path: fast.load_model(path, kv_dtype="f32")]


def compare(path, theirs, engines=ENGINES) -> None:
    """1e-4 of the spread of the logits, and 32 greedy tokens."""
    n_tokens = theirs.config.vocab_size
    ids = np.random.default_rng(1).integers(0, n_tokens, 40).tolist()
    tokens = greedy(theirs, ids[:9], 32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    for load in engines:
        model = load(path)
        logits = model.engine.forward(model, ids, model.engine.new_cache(model.config), all_logits=True)
        assert np.abs(logits - expected).max() < 1e-4 * expected.std()
        assert list(qwen3.generate(model, ids[:9], 32, temperature=0, eos_token_ids=())) == tokens


def to_fp8(path, block: int) -> None:
    """Replaces the weights of the linear layers by torch's float8 with a scale per block, as Qwen publishes them.

    `path`/dense gets the same model in float32, dequantized by torch; `path`/rounded has its matrices in bfloat16.
    """
    packed, plain, rounded = {}, {}, {}
    for name, tensor in map_safetensors(path / "model.safetensors").items():
        weight = torch.tensor(to_float32(tensor))
        if not name.endswith("_proj.weight"):
            packed[name], plain[name] = ("bfloat16", tensor.data.copy()), ("float32", weight.numpy())
            rounded[name] = plain[name]
            continue
        n_rows, n_columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -n_columns % block, 0, -n_rows % block))
        blocks = padded.reshape(-(-n_rows // block), block, -(-n_columns // block), block)
        scales = (blocks.abs().amax((1, 3)) / 448).bfloat16().float()
        codes = (blocks / scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        restored = codes.float() * scales[:, None, :, None]
        codes = codes.view(torch.uint8).reshape(padded.shape)[:n_rows, :n_columns]
        packed[name] = ("float8_e4m3fn", codes.numpy())
        packed[name + "_scale_inv"] = ("bfloat16", scales.bfloat16().view(torch.int16).numpy().view(np.uint16))
        restored = restored.reshape(padded.shape)[:n_rows, :n_columns]
        plain[name], rounded[name] = ("float32", restored.numpy()), ("float32", restored.bfloat16().float().numpy())
    for folder, tensors in ((path / "dense", plain), (path / "rounded", rounded)):
        folder.mkdir()
        (folder / "config.json").write_text((path / "config.json").read_text())
        change_config(folder, quantization_config=None)
        write_tensors(folder / "model.safetensors", tensors)
    write_tensors(path / "model.safetensors", packed)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: getattr(file, "stem", None))
def test_official_config(tmp_path, file):
    """The fast engine computes with FP8 weights as if they were stored in bfloat16."""
    raw = reduced(json.loads(file.read_text()))
    path = make_random_model(raw, tmp_path, "bfloat16" if "quantization_config" in raw else "float32")
    if "quantization_config" not in raw:
        compare(path, reference(path))
    else:
        change_config(path, quantization_config=raw["quantization_config"] | {"weight_block_size": [8, 8]})
        to_fp8(path, 8)
        ours, theirs = map_checkpoint(path), map_safetensors(path / "dense/model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(to_float32(ours[name]), tensor.data) for name, tensor in theirs.items())
        for folder, load in zip(("dense", "rounded"), ENGINES):
            compare(path, reference(path / folder), [load])


MOE_CASES = {
    "sparse step 2": {"decoder_sparse_step": 2}, "a dense layer": {"mlp_only_layers": [1]},
    "not normalised": {"norm_topk_prob": False}, "all experts": {"num_experts_per_tok": 8},
    "one expert": {"num_experts_per_tok": 1}, "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", MOE_CASES)
def test_mixture_of_experts(tmp_path, case):
    path = make_random_model(MOE | MOE_CASES[case], tmp_path, "float32")
    compare(path, reference(path))


def test_four_times_the_trained_length(tmp_path):
    """YaRN by the options of the command line, against transformers with the same parameters in its config.json."""
    trained = 48
    path = make_random_model(BASE | {"max_position_embeddings": trained, "head_dim": 32}, tmp_path, "float32")
    model = cli.load(cli.make_parser().parse_args(["-m", str(path), "--rope-scaling", "yarn", "--rope-factor", "4"]),
                     qwen3.NUMPY)
    assert model.config.context_length == 4 * trained
    ids = np.random.default_rng(1).integers(0, 320, 4 * trained).tolist()
    ours = qwen3.forward(model, ids, qwen3.KVCache(model.config), all_logits=True)
    change_config(path, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": trained})
    assert qwen3.load_config(path) == model.config
    with torch.no_grad():
        expected = reference(path)(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - expected).max() < 1e-4 * expected.std()


def test_fused_file_is_that_of_transformers(tmp_path):
    """What our test writes as fused is what transformers writes when told not to undo its layout."""
    path = make_random_model(MOE, tmp_path / "ours", "float32")
    reference(path).save_pretrained(tmp_path / "theirs", save_original_format=False)
    fuse(path)
    ours, theirs = (map_safetensors(folder / "model.safetensors") for folder in (path, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name].data, theirs[name].data) for name in ours)
    compare(tmp_path / "theirs", reference(path), [])
    model = qwen3.load_model(tmp_path / "theirs", tokenizer=False)
    assert model.config.num_experts == 8
