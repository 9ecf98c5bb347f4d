"""qwen3_lib/io/formats.py: published quantizations against their own tools, or packed here from their layouts."""
import importlib.util
import json
import sys
import types

import numpy as np
import pytest

import qwen3
from configs import BASE
from helpers import assert_one_line, message_of, random_ids, works_or_refused
from make_random_model import make_random_model
from published import change_config, is_nearest_int8, kept_by_the_fast_engine, pack_words, print_losses, write_tensors
from qwen3_lib.app.files import fingerprint
from qwen3 import Tensor, map_safetensors, to_float32
from qwen3_lib.io.formats import FP8, check_settings, fp8
from qwen3_lib.io.models import Checkpoint, load_config
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.io.tensors import PACKED_DTYPES, PackedTensor, rows_of, to_bfloat16
from qwen3_lib.kernels.layout import BF16, INT8, Q4_1, Q5_1, Weight

CONFIG = BASE | {"hidden_size": 64, "intermediate_size": 192, "tie_word_embeddings": False}  # widths of whole groups
Q_PROJ = "model.layers.0.self_attn.q_proj"


def half(x: np.ndarray) -> np.ndarray:
    """Rounded to float16, as scales are stored."""
    return x.astype(np.float16).astype(np.float32)


def quantized(w: np.ndarray, bits: int, group: np.ndarray, symmetric: bool):
    """w rounded -> q [outputs, inputs], zero points and scales [outputs, groups]; `group` [inputs]: of each input."""
    n_groups, top = group.max() + 1, 2**bits - 1
    low = np.stack([w[:, group == g].min(1) for g in range(n_groups)], 1)
    high = np.stack([w[:, group == g].max(1) for g in range(n_groups)], 1)
    if symmetric:
        scale = half(np.maximum(-low, high) / (top // 2))
        zero = np.full(scale.shape, 2**(bits - 1))
    else:
        scale = half((high - low) / top)
        zero = np.clip(np.round(-low / scale), 0, top).astype(int)
    q = np.clip(np.round(w / scale[:, group]) + zero[:, group], 0, top).astype(int)
    return q, zero, scale


AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of 8 neighbours lies in its word


def awq(w, settings):
    group = np.arange(w.shape[1]) // settings["group_size"]
    q, zero, scale = quantized(w, 4, group, symmetric=False)
    parts = {"qweight": ("int32", pack_words(q.T, 4, AWQ_PLACES)),
             "qzeros": ("int32", pack_words(zero.T, 4, AWQ_PLACES)), "scales": ("float16", scale.T)}
    return parts, (q - zero[:, group]).astype(np.float32) * scale[:, group]


def gptq(w, settings):
    bits, inputs = settings["bits"], w.shape[1]
    group = np.arange(inputs) // (settings["group_size"] if settings["group_size"] > 0 else inputs)
    if settings["desc_act"]:
        group = group[np.random.default_rng(inputs).permutation(inputs)]
    q, zero, scale = quantized(w, bits, group, settings["sym"])
    qzeros = pack_words(zero.T, bits)
    if settings["checkpoint_format"] == "gptq":
        qzeros = (qzeros.astype(np.int64) - pack_words(np.ones(32 // bits, int), bits)).astype(np.int32)
    parts = {"qweight": ("int32", pack_words(q, bits).T), "qzeros": ("int32", qzeros), "scales": ("float16", scale.T),
             "g_idx": ("int32", group)}
    return parts, (q - zero[:, group]).astype(np.float32) * scale[:, group]


def packed_with_order(w, settings):
    """compressed-tensors with act-order, which its package can no longer write."""
    group = (np.arange(w.shape[1]) // 32)[np.random.default_rng(1).permutation(w.shape[1])]
    q, zero, scale = quantized(w, 4, group, symmetric=False)
    parts = {"weight_packed": ("int32", pack_words(q, 4)), "weight_zero_point": ("int32", pack_words(zero.T, 4).T),
             "weight_scale": ("float16", scale), "weight_shape": ("int64", np.array(w.shape)),
             "weight_g_idx": ("int32", group)}
    return parts, (q - zero[:, group]).astype(np.float32) * scale[:, group]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01,
        "checkpoint_format": "gptq", "lm_head": False, "true_sequential": True}
CASES = {
    "AWQ, groups of 32": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
                                "zero_point": True, "modules_to_not_convert": None}),
    "AWQ, groups of 16, GEMM": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"}),
    "GPTQ, 4 bits": (gptq, GPTQ),
    "GPTQ, 8 bits": (gptq, GPTQ | {"bits": 8}),
    "GPTQ, 2 bits, asymmetric": (gptq, GPTQ | {"bits": 2, "sym": False}),
    "GPTQ, asymmetric": (gptq, GPTQ | {"sym": False}),
    "GPTQ, act-order": (gptq, GPTQ | {"desc_act": True, "sym": False}),
    "GPTQ, version 2": (gptq, GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}),
    "GPTQ, version 2, act-order, 8 bits": (gptq, GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True, "bits": 8}),
    "GPTQ, one group": (gptq, GPTQ | {"group_size": -1}),
    "compressed-tensors, act-order": (packed_with_order, {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "actorder": "group"}}}}),
}


def quantize_model(path, pack, settings) -> dict[str, np.ndarray]:
    """Packs the linear layers of a float32 checkpoint in place -> the weights it now stands for."""
    tensors, expected = {}, {}
    for name, tensor in map_safetensors(path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, expected[name] = pack(tensor.data, settings)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            tensors[name], expected[name] = ("float32", tensor.data.copy()), tensor.data.copy()
    write_tensors(path / "model.safetensors", tensors)
    change_config(path, quantization_config=settings)
    return expected


def check(path, expected: dict[str, np.ndarray], original: dict[str, np.ndarray], name: str) -> None:
    """The numbers are exactly the expected ones, and the model computes with them; prints the loss by quantization."""
    stored = Checkpoint(path).stored()
    assert stored.keys() == expected.keys()
    assert any(isinstance(tensor, PackedTensor) for tensor in stored.values())
    for key, values in expected.items():
        ours = to_float32(stored[key])
        assert ours.dtype == np.float32 and np.array_equal(ours, values), key
        if isinstance(stored[key], PackedTensor) and len(values) > 128:
            parts = [rows_of(stored[key], *part) for part in ((0, 128), (128, len(values)))]
            assert np.array_equal(np.concatenate(parts), values), key
    matrices = [key for key in expected if key.endswith("_proj.weight")]
    print_losses(name, [original[key] for key in matrices], [expected[key] for key in matrices],
                 kept_by_the_fast_engine(path, matrices))
    plain = path / "plain"
    make_random_model({key: value for key, value in json.loads((path / "config.json").read_text()).items()
                       if key != "quantization_config"}, plain, "float32")
    write_tensors(plain / "model.safetensors", {key: ("float32", values) for key, values in expected.items()})
    ids = random_ids(9)
    logits = [qwen3.forward(model, ids, qwen3.KVCache(model.config))
              for model in (qwen3.load_model(path), qwen3.load_model(plain))]
    assert np.array_equal(*logits)


def original_of(path) -> dict[str, np.ndarray]:
    return {name: tensor.data.copy() for name, tensor in map_safetensors(path / "model.safetensors").items()}


@pytest.mark.parametrize("case", CASES)
def test_packed_from_the_layout(tmp_path, case):
    pack, settings = CASES[case]
    path = make_random_model(CONFIG, tmp_path, "float32")
    original = original_of(path)
    check(path, quantize_model(path, pack, settings), original, case)


def test_fp8_bytes_are_those_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FP8, theirs, equal_nan=True)


@pytest.mark.parametrize("rows, columns", [(256, 128), (200, 300)])
def test_fp8_in_blocks(rows, columns):
    """The last blocks of a row and of a column may be cut off; 0x7F and 0xFF are NaN."""
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (rows, columns), np.uint8), rng.random((2, -(-columns // 128)), np.float32)
    _, unpack, _ = fp8("w", {"weight": Tensor("F8_E4M3", codes, None), "weight_scale_inv": Tensor(
        "F32", scales, None)}, {"weight_block_size": [128, 128]})
    factors = scales.repeat(128, axis=0).repeat(128, axis=1)[:rows, :columns]
    ours = np.concatenate([unpack(start, min(start + 128, rows)) for start in range(0, rows, 128)])
    assert np.array_equal(ours, FP8[codes] * factors, equal_nan=True)


def test_fp8_of_torch(tmp_path):
    """Packed and unpacked by torch, in blocks of 32 x 32."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def pack(w, _settings):
        blocks = torch.tensor(w).reshape(w.shape[0] // 32, 32, -1, 32)
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448  # the largest number of e4m3
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        parts = {"weight": ("float8_e4m3fn", codes.reshape(w.shape).view(torch.uint8).numpy()),
                 "weight_scale_inv": ("float32", scales[:, 0, :, 0].numpy())}
        return parts, (codes.float() * scales).reshape(w.shape).numpy()

    path = make_random_model(CONFIG, tmp_path, "float32")
    original, settings = original_of(path), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    check(path, quantize_model(path, pack, settings), original, "FP8")


@pytest.mark.parametrize("bits, symmetric, group", [(4, True, 32), (4, False, 32), (8, True, 16), (8, False, None)])
def test_compressed_tensors(tmp_path, bits, symmetric, group):
    """Packed and unpacked by the compressed-tensors package itself; group None is one scale per output."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
    strategy = "channel" if group is None else "group"
    args = library.quantization.QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy,
                                                 group_size=group)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)

    def pack(w, _settings):
        groups = np.arange(w.shape[1]) // (group or w.shape[1])
        _, zero, scale = quantized(w, bits, groups, symmetric)
        state = {"weight": torch.tensor(w), "weight_scale": torch.tensor(scale),
                 "weight_zero_point": torch.tensor(zero - 2**(bits - 1)).to(torch.int8)}
        packed = Compressor.compress(state, scheme)
        parts = {name: ({torch.int32: "int32", torch.int64: "int64", torch.float32: "float32"}[value.dtype],
                        value.numpy()) for name, value in packed.items()}
        return parts, Compressor.decompress(packed, scheme)["weight"].numpy()

    path = make_random_model(CONFIG, tmp_path, "float32")
    original = original_of(path)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}
    check(path, quantize_model(path, pack, settings), original, f"compressed-tensors, {bits} bits, group {group}")


def part_of(package: str, name: str, monkeypatch):
    """A module of a package. The package's own start is left out: it wants libraries older than ours."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps autoawq==0.2.7.post3 auto-gptq==0.7.1")
    empty = types.ModuleType(package)
    empty.__path__ = found.submodule_search_locations
    monkeypatch.setitem(sys.modules, package, empty)
    return importlib.import_module(f"{package}.{name}")


def torch_layer(torch, values: np.ndarray):
    """A linear layer of torch with these weights."""
    layer = torch.nn.Linear(*values.shape[::-1], bias=False)
    layer.weight.data = torch.tensor(values)
    return layer


@pytest.mark.parametrize("size", [16, 32])
def test_autoawq(tmp_path, monkeypatch, size):
    """Packed and unpacked by AutoAWQ itself."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    gemm = part_of("awq", "modules.linear.gemm", monkeypatch)

    def pack(w, _settings):
        group = np.arange(w.shape[1]) // size
        q, zero, scale = quantized(w, 4, group, symmetric=False)
        values = (q - zero[:, group]).astype(np.float32) * scale[:, group]
        layer = gemm.WQLinear_GEMM.from_linear(torch_layer(torch, values), 4, size, scales=torch.tensor(scale).T,
                                               zeros=torch.tensor(zero).T)
        parts = {"qweight": ("int32", layer.qweight.numpy()), "qzeros": ("int32", layer.qzeros.numpy()),
                 "scales": ("float16", layer.scales.numpy())}
        return parts, gemm.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, size).numpy().T

    path = make_random_model(CONFIG, tmp_path, "float32")
    original, settings = original_of(path), {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    check(path, quantize_model(path, pack, settings), original, f"AutoAWQ, groups of {size}")


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_autogptq(tmp_path, monkeypatch, bits, order):
    """Packed by AutoGPTQ itself, and unpacked by its layer: the product with the identity is the matrix."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    library = part_of("auto_gptq", "nn_modules.qlinear.qlinear_cuda", monkeypatch)

    def pack(w, _settings):
        outputs, inputs = w.shape
        group = np.arange(inputs) // 32
        if order:
            group = group[np.random.default_rng(inputs).permutation(inputs)]
        q, zero, scale = quantized(w, bits, group, symmetric=False)
        values = (q - zero[:, group]).astype(np.float32) * scale[:, group]
        layer = library.QuantLinear(bits, 32, inputs, outputs, False, weight_dtype=torch.float32)
        layer.pack(torch_layer(torch, values), torch.tensor(scale), torch.tensor(zero).float(),
                   torch.tensor(group, dtype=torch.int32))
        parts = {"qweight": ("int32", layer.qweight.numpy()), "qzeros": ("int32", layer.qzeros.numpy()),
                 "scales": ("float16", layer.scales.numpy()), "g_idx": ("int32", layer.g_idx.numpy())}
        return parts, layer(torch.eye(inputs)).numpy().T

    path = make_random_model(CONFIG, tmp_path, "float32")
    original, settings = original_of(path), GPTQ | {"bits": bits, "desc_act": order, "sym": False}
    check(path, quantize_model(path, pack, settings), original, f"AutoGPTQ, {bits} bits, act-order {order}")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_every_size(bits):
    """Of both versions. A 0 borrows from the next number of its word; GPTQModel's sum over the word gives it back."""
    from qwen3_lib.io.formats import gptq as unpack
    rng, per_word = np.random.default_rng(0), 32 // bits
    zeros = rng.choice([0, 1, 2**bits - 1, 2**(bits - 1)], (3, 64))  # [groups, outputs]
    words = [[sum(int(row[i + j]) << bits * j for j in range(per_word)) for i in range(0, 64, per_word)]
             for row in zeros]
    ones = sum(1 << bits * j for j in range(per_word))
    for form, less in (("gptq", ones), ("gptq_v2", 0)):
        stored = np.array([[(word - less) % 2**32 for word in row] for row in words], np.uint32).view(np.int32)
        parts = {"qweight": ("I32", np.zeros((96 // per_word, 64), np.int32)), "qzeros": ("I32", stored),
                 "scales": ("F32", np.ones((3, 64), np.float32))}
        _, rows, _ = unpack("w", {name: Tensor(*part, None) for name, part in parts.items()},
                            {"bits": bits, "checkpoint_format": form})
        assert np.array_equal(rows(0, 64), -np.repeat(zeros.T, 32, axis=1).astype(np.float32))


def test_bfloat16_is_the_nearest():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    values = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    theirs = torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    ours = to_bfloat16(values)
    numbers = ~np.isnan(values)
    assert np.array_equal(ours[numbers], theirs[numbers])
    assert np.isnan((ours[~numbers].astype(np.uint32) << 16).view(np.float32)).all()


def test_as_bfloat16(tmp_path):
    """For an engine that wants half the memory: the nearest bfloat16 of the same numbers."""
    path = make_random_model(CONFIG, tmp_path, "float32")
    expected = quantize_model(path, gptq, GPTQ)
    tensor = Checkpoint(path).stored()[f"{Q_PROJ}.weight"]._replace(dtype="BF16")
    assert tensor.dtype == "BF16" and np.array_equal(tensor.data, to_bfloat16(expected[f"{Q_PROJ}.weight"]))


NEAREST = {"AWQ, groups of 16, GEMM": "int8", "GPTQ, act-order": "int8", "compressed-tensors, act-order": "int8",
           "GPTQ, version 2, act-order, 8 bits": "bf16"}  # whose groups no format of the fast engine has


@pytest.mark.parametrize("case", CASES)
def test_the_fast_engine_keeps_the_numbers(tmp_path, case):
    """As whole numbers with scales and minima; else in the nearest 8 bits, or, of 8 bits, as the nearest bfloat16."""
    fast = pytest.importorskip("qwen3_numba", reason="numba is not installed")
    pack, settings = CASES[case]
    path = make_random_model(CONFIG, tmp_path, "float32")
    expected = quantize_model(path, pack, settings)
    weights = fast.load_model(path).weights
    for name, row in weights.matrices(0, False).items():
        values, found = expected[name], fast.matrix_rows(row, range(row[3]))
        if case not in NEAREST:
            assert row[2] == (INT8 if "8 bits" in case else Q4_1) and np.array_equal(found, values), name
        elif NEAREST[case] == "int8":
            assert row[2] == INT8 and is_nearest_int8(found, values), name
        else:
            assert row[2] == BF16 and np.array_equal(found, to_bfloat16(values).astype(np.uint32).__lshift__(16).view(np.float32)), name


SCALES = {  # a matrix's scales, and whether the fast engine can hold them; None: rounded
    "float16": (np.array([1.0, 65504, 6.1e-5, 6e-8, 0.1, 1 / 3]).astype(np.float16), True),
    "negative, and zeros": (np.array([-1.0, 0, -0.0, 0.25, -3e-5, 1]).astype(np.float16), True),
    "bfloat16 digits": (np.array([1.0, 1 + 2**-7, 3 * 2**-17, 2**-47, 1.5 * 2**16, 2]), True),
    "float32 digits": (np.array([1.0, 1 + 2**-11, 1, 1, 1, 1]), None),
    "too large": (np.array([1.0, 2.0**17, 1, 1, 1, 1]), False),
    "too small": (np.array([1.0, 2.0**-48, 1, 1, 1, 1]), False),
    "infinite": (np.array([1.0, np.inf, 1, 1, 1, 1]), False), "no number": (np.array([1.0, np.nan, 1, 1, 1, 1]), False),
}


@pytest.mark.parametrize("form, most", [(INT8, 127), (Q5_1, 15), (Q4_1, 7)])
@pytest.mark.parametrize("further", [0, 1])
@pytest.mark.parametrize("case", SCALES)
def test_scales_that_the_fast_engine_can_hold(case, form, most, further):
    """Three groups in two rows of 192 columns, or 515 times as many rows; one has the largest and the least number."""
    pytest.importorskip("qwen3_numba", reason="numba is not installed")
    from packed import blocks_of, reference
    (scales, fits), rng = SCALES[case], np.random.default_rng(0)
    scales = np.tile(scales.astype(np.float32).reshape(2, 3), (515, 1))
    whole = rng.integers(-most, most + 1, (1030, 192)).astype(np.int16)
    whole[701, 3:5] = -most - 1 - further, most  # in a group whose scale isn't negative
    blocks = blocks_of(whole, scales, None, form)
    if fits is False or further:
        assert blocks is None
    else:
        found, expected = reference(blocks, Weight(0, 0, form, *whole.shape)), whole * np.repeat(scales, 64, axis=1)
        assert np.array_equal(found, expected) if fits else np.allclose(found, expected, atol=(most + 1) * 2**-11)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_fast_engine_computes_with_them(tmp_path, quantize):
    """Against qwen3.py, which has the same numbers, but no vectors rounded to 8 bits. What is saved gives the same."""
    fast = pytest.importorskip("qwen3_numba", reason="numba is not installed")
    path, ids = make_random_model(CONFIG, tmp_path / "model", "float32"), random_ids(40)
    expected = quantize_model(path, awq, CASES["AWQ, groups of 32"][1])
    oracle, model = qwen3.load_model(path), fast.load_model(path, quantize)
    logits = [each.engine.logits_of(each, ids, each.engine.new_cache(each.config), True) for each in (oracle, model)]
    error = np.sqrt(((logits[1] - logits[0])**2).mean()) / logits[0].std()
    assert error < {None: 0.05, "int8": 0.05, "int4": 0.5}[quantize]
    if quantize == "int4":
        return
    for name, row in model.weights.matrices(0, False).items():
        assert np.array_equal(fast.matrix_rows(row, range(row[3])), expected[name])
    if quantize is None:  # the head is F32
        assert "not loaded as int8" in message_of(save_quantized, model, tmp_path / "saved", "int8")
    else:
        save_quantized(model, tmp_path / "saved", "int8")
        saved = fast.load_model(tmp_path / "saved")
        assert np.array_equal(fast.forward(saved, ids, fast.KVCache(saved.config), True), logits[1])


def change_tensors(path, **changes):
    """Rewrites a file with parts of one matrix changed, (None) removed, or of another dtype."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
             "I32": "int32", "I64": "int64"}
    stored = map_safetensors(path / "model.safetensors", PACKED_DTYPES)
    tensors = {name: (names[tensor.dtype], tensor.data.copy()) for name, tensor in stored.items()}
    tensors |= {f"{Q_PROJ}.{part}": value for part, value in changes.items()}
    write_tensors(path / "model.safetensors", {name: value for name, value in tensors.items() if value is not None})


DAMAGES = {
    "no scales": ({"scales": None}, "scales is missing"),
    "no zero points": ({"qzeros": None}, "qzeros is missing"),
    "scales of another size": ({"scales": ("float16", np.ones((3, 64)))}, "doesn't fit the other parts"),
    "scales as integers": ({"scales": ("int32", np.ones((2, 64)))}, "I32"),
    "weights as floats": ({"qweight": ("float32", np.ones((8, 64)))}, "qweight is F32, not I32"),
    "weights as a vector": ({"qweight": ("int32", np.ones(8))}, "must be a matrix"),
    "groups out of range": ({"g_idx": ("int32", np.full(64, 9))}, "groups that don't exist"),
    "groups below zero": ({"g_idx": ("int32", np.full(64, -1))}, "groups that don't exist"),
    "too few groups": ({"g_idx": ("int32", np.zeros(9))}, "g_idx has shape [9]"),
    "a matrix that is not packed, too": ({"weight": ("float32", np.ones((64, 64)))}, "q_proj is there twice"),
    "no inputs": ({"qweight": ("int32", np.ones((0, 64))), "g_idx": ("int32", np.ones(0))}, "don't fit config.json"),
    "another shape": ({"qweight": ("int32", np.ones((4, 64))), "g_idx": None}, "[64, 32], not [64, 64]"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_parts(tmp_path, case):
    changes, words = DAMAGES[case]
    path = make_random_model(CONFIG, tmp_path, "float32")
    quantize_model(path, gptq, GPTQ)
    change_tensors(path, **changes)
    assert_one_line(message_of(qwen3.load_model, path), str(path), words)


@pytest.mark.parametrize("case, settings, part", [
    ("GPTQ, act-order", {}, "g_idx"), ("compressed-tensors, act-order", {}, "weight_g_idx"),
    ("compressed-tensors, act-order", {"symmetric": False}, "weight_zero_point")])
def test_parts_that_the_settings_promise(tmp_path, case, settings, part):
    """Without them, the numbers would be others."""
    path, (function, about) = make_random_model(CONFIG, tmp_path, "float32"), CASES[case]
    quantize_model(path, function, about)
    if settings:
        scheme = about["config_groups"]["group_0"]["weights"] | settings
        change_config(path, quantization_config=about | {"config_groups": {"group_0": {"weights": scheme}}})
    change_tensors(path, **{part: None})
    assert_one_line(message_of(qwen3.load_model, path), str(path), f"{part} is missing")


def test_fp8_without_its_scales(tmp_path):
    path = make_random_model(CONFIG, tmp_path, "float32")
    change_tensors(path, weight=("float8_e4m3fn", np.ones((64, 64))))
    change_config(path, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    assert_one_line(message_of(qwen3.load_model, path), str(path), "q_proj.weight is F8_E4M3", "weight_scale_inv")
    change_tensors(path, weight_scale_inv=("float32", np.ones((2, 1))))
    assert_one_line(message_of(qwen3.load_model, path), str(path), "weight_scale_inv has shape [2, 1]", "[1, 1]")
    change_tensors(path, weight_scale_inv=("float32", np.ones((1, 1))))
    assert (qwen3.load_model(path).weights["layers"][0]["q_proj"] == FP8[1]).all()


@pytest.mark.filterwarnings("error")  # which would be lines on stderr before the one that counts
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_broken_scales_are_refused(tmp_path, scale):
    path = make_random_model(CONFIG, tmp_path, "float32")
    quantize_model(path, awq, CASES["AWQ, groups of 32"][1])
    change_tensors(path, scales=("float16", np.full((2, 64), scale)))
    model = qwen3.load_model(path)
    assert_one_line(message_of(lambda: list(qwen3.generate(model, [1, 2], 2))), "not finite")
    fingerprint(model, qwen3.KVCache(model.config))


SETTINGS = {
    "FP8 without blocks": {"quant_method": "fp8", "fmt": "e4m3"},
    "FP8 in e5m2": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
    "AWQ, gemv": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "AWQ, 3 bits": {"quant_method": "awq", "bits": 3, "version": "gemm"},
    "GPTQ, 3 bits": GPTQ | {"bits": 3}, "GPTQ, 4.0 bits": GPTQ | {"bits": 4.0},
    "GPTQ, marlin": GPTQ | {"checkpoint_format": "marlin"},
    "float-quantized": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    "packed, no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed, 3 bits": {"quant_method": "compressed-tensors", "format": "pack-quantized",
                       "config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}}},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True}, "none named": {"": 0},
    "FP8 with blocks of 2^70": {"quant_method": "fp8", "weight_block_size": [128, 2**70]},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_supported(tmp_path, case):
    method = SETTINGS[case].get("quant_method", "unknown method")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": SETTINGS[case]}))
    assert_one_line(message_of(load_config, tmp_path), "quantization_config", method, "supported")


def test_any_settings(tmp_path):
    """Every key of the methods with values of every type: supported, or refused in one line."""
    values = [None, True, 0, 4, 2**70, 4.0, "4", "gemm", [128, 128], [None], {"a": 1}]
    for base in [*(case[1] for case in CASES.values()), *SETTINGS.values()]:
        for key in [*base, "format", "config_groups", "weight_block_size", "version", "checkpoint_format"]:
            for value in values:
                works_or_refused(check_settings, base | {key: value}, tmp_path)
    for about in ("fp8", ["fp8"], 4):
        assert_one_line(message_of(check_settings, about, tmp_path), "quantization_config", "quantized by")
