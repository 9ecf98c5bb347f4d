"""qwen3_lib/io/formats.py: published quantizations against their own tools, or packed here from their layouts."""
import importlib.util
import json
import sys
import types
import zlib

import numpy as np
import pytest

import qwen3
from configs import BASE
from fuzzing import change, copy_files, fuzz, write_new
from helpers import (assert_one_line, message_of, random_ids, read_safetensors, works_or_refused, write_safetensors)
from make_random_model import make_random_model
from test_loading import changed_header
from test_qwen3_moe import MOE
from published import (change_config, is_nearest_int8, kept_by_the_fast_engine, pack_words, print_losses, tensors_of,
                       write_tensors)
from qwen3_lib.app.files import fingerprint
from qwen3 import Tensor, map_safetensors, to_float32
from qwen3_lib.io.formats import FP8, bitsandbytes, check_settings, eight_bits
from qwen3_lib.io.models import Checkpoint
from qwen3_lib.io.tensors import PackedTensor, rows_of, to_bfloat16
from qwen3_lib.kernels.layout import BF16, INT8, Q4_0, Q4_1, Q5_1, WEIGHT

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


def in_blocks(w: np.ndarray, height: int | None, width: int | None, size_of=np.abs) -> np.ndarray:
    """The largest size_of(w) in each block of a matrix, [rows, columns] of blocks; None: all rows, all columns."""
    steps = (height or w.shape[0], width or w.shape[1])
    rows, columns = (np.arange(n) // step for n, step in zip(w.shape, steps))
    largest = np.full((rows[-1] + 1, columns[-1] + 1), -np.inf, np.float32)
    np.maximum.at(largest, (rows[:, None], columns), size_of(w))
    return largest


AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of 8 neighbours lies in its word


def awq(w, settings):
    group = np.arange(w.shape[1]) // settings.get("group_size", settings.get("q_group_size"))
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


E4M3 = np.array([(1 - code // 128 * 2) * ((code & 7) / 8 + (code >> 3 & 15 > 0)) * 2.0**(max(code >> 3 & 15, 1) - 7)
                 for code in range(256)])
E4M3[[127, 255]] = np.inf, -np.inf  # not a number, and the nearest one to nothing
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.array([-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0, 0.0795803, 0.1609302,
                0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1], np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The places of the nearest numbers in a table."""
    order = np.argsort(table, kind="stable")
    return order[np.searchsorted((table[order][1:] + table[order][:-1]) / 2, values)]


def bytes_in_blocks(w, settings, height=1, width=None):
    """Of compressed-tensors and ModelOpt: int8 or FP8, and a scale for each block."""
    is_float = settings["config_groups"]["group_0"]["weights"]["type"] == "float"
    table = E4M3 if is_float else np.concatenate([np.arange(128), np.arange(-128, 0)])
    scale = half(in_blocks(w, height, width) / (448 if is_float else 127))
    spread = scale[np.ix_(np.arange(w.shape[0]) // (height or w.shape[0]), np.arange(w.shape[1]) // (width or w.shape[1]))]
    codes = nearest(w / spread, table)
    parts = {"weight": ("float8_e4m3fn" if is_float else "int8", codes.astype(np.uint8).view("u1" if is_float else "i1")),
             "weight_scale": ("float16", scale if height else scale.reshape(()))}
    return parts, table[codes].astype(np.float32) * spread


def nvfp4(w, settings, name="weight_packed", common="weight_global_scale", factor=np.float32(1000)):
    """FP4, two numbers in a byte, groups of 16 with a scale in FP8, and one scale of all, which divides; or a factor."""
    codes_of_scales = nearest(in_blocks(w, 1, 16) / 6 * factor, E4M3)
    one = np.float32(1 / factor) if common == "weight_scale_2" else factor
    scale = E4M3[codes_of_scales].astype(np.float32)
    scale = (scale * one if common == "weight_scale_2" else scale / one).repeat(16, axis=1)
    codes = nearest(w / scale, E2M1)
    parts = {name: ("uint8", codes[:, ::2] + 16 * codes[:, 1::2]), common: ("float32", one.reshape(1)),
             "weight_scale": ("float8_e4m3fn", codes_of_scales)}
    return parts, E2M1[codes].astype(np.float32) * scale


def modelopt_nvfp4(w, settings):
    parts, values = nvfp4(w, settings, "weight", "weight_scale_2")
    return parts | {"input_scale": ("float32", np.ones(())), "k_scale": ("float32", np.ones(()))}, values


def mxfp4(w, settings):
    """FP4 in groups of 32 whose scale is a power of 2."""
    exponents = np.ceil(np.log2(in_blocks(w, 1, 32) / 6))
    scale = (2.0**exponents).astype(np.float32).repeat(32, axis=1)
    codes = nearest(w / scale, E2M1)
    parts = {"weight_packed": ("uint8", codes[:, ::2] + 16 * codes[:, 1::2]), "weight_scale": ("uint8", exponents + 127)}
    return parts, E2M1[codes].astype(np.float32) * scale


def nf4(w, settings, size=64, nested_size=256):
    """bitsandbytes: blocks of numbers in a row, or over the ends of rows; their sizes in bytes of a table, plus an offset."""
    flat, table = np.pad(w.reshape(-1), (0, -w.size % size)), np.linspace(-1, 1, 256).astype(np.float32)
    absmax = np.abs(flat.reshape(-1, size)).max(axis=1)
    about, parts = {"quant_type": "nf4", "blocksize": size, "shape": list(w.shape), "dtype": "bfloat16"}, {}
    if nested_size:
        offset = absmax.mean()
        outer = np.arange(len(absmax)) // nested_size
        largest = np.array([np.abs(absmax[outer == i] - offset).max() for i in range(outer[-1] + 1)], np.float32)
        bytes_ = nearest((absmax - offset) / largest[outer], table)
        absmax = table[bytes_] * largest[outer] + offset
        about |= {"nested_blocksize": nested_size, "nested_dtype": "float32", "nested_offset": float(offset)}
        parts = {"weight.nested_absmax": ("float32", largest), "weight.nested_quant_map": ("float32", table)}
    scale = absmax.repeat(size)
    codes = nearest(flat / scale, NF4)
    parts |= {"weight": ("uint8", (16 * codes[::2] + codes[1::2])[:-(-w.size // 2), None]),
              "weight.absmax": ("uint8", bytes_) if nested_size else ("float32", absmax), "weight.quant_map": ("float32", NF4),
              "weight.quant_state.bitsandbytes__nf4": ("uint8", np.frombuffer(json.dumps(about).encode(), np.uint8))}
    return parts, (NF4[codes] * scale)[:w.size].reshape(w.shape)


def llm_int8(w, settings):
    """bitsandbytes: the largest number of a row is 127."""
    largest = np.abs(w).max(axis=1)
    q = np.round(w * (127 / largest[:, None]))
    parts = {"weight": ("int8", q), "SCB": ("float32", largest), "weight_format": ("uint8", np.zeros(()))}
    return parts, q.astype(np.float32) * largest[:, None] * np.float32(7.874015718698502e-3)


def auto_round(w, settings):
    """The layouts of GPTQ and AWQ, without g_idx."""
    form = {"auto_round": "gptq_v2", "auto_round:auto_gptq": "gptq", "auto_round:auto_awq": ""}[settings["packing_format"]]
    parts, values = gptq(w, settings | {"checkpoint_format": form, "desc_act": False}) if form else awq(w, settings)
    return {name: part for name, part in parts.items() if name != "g_idx"}, values


def mixed(w, settings):
    """FP8 in one half of the matrices, 4 bits in the other one."""
    if w.shape[0] == 192:
        return packed_with_order(w, settings)
    return bytes_in_blocks(w, settings)


def dynamic(w, settings):
    """GPTQModel: other bits and groups for some matrices."""
    return gptq(w, settings | (settings["dynamic"]["+:.*down.*"] if w.shape[1] == 192 else {}))


def compressed(form: str, **weights) -> dict:
    """A quantization_config of compressed-tensors, as llm-compressor writes it."""
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None,
            "quantization_status": "compressed", "transform_config": {}, "sparsity_config": {}, "config_groups": {"group_0": {
                "targets": ["Linear"], "input_activations": {"num_bits": 8, "dynamic": True}, "weights": weights}}}


COMPRESSED = compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
FLOAT = compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
              "sym": False, "data_type": "int", "iters": 200, "autoround_version": "0.9.0"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01,
        "checkpoint_format": "gptq", "lm_head": False, "true_sequential": True}
CASES = {
    "AWQ, groups of 32": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
                                "zero_point": True, "modules_to_not_convert": None}),
    "AWQ in capitals": (awq, {"quant_method": "AWQ", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
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
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "actorder": "group", "group_size": 32}}}}),
    "int8 by output, 8 bits": (bytes_in_blocks, COMPRESSED),
    "FP8 by output": (bytes_in_blocks, FLOAT | {"transform_config": {"config_groups": {}}}),
    "FP8 of ModelOpt": (lambda w, settings: bytes_in_blocks(w, settings, None, None), {
        "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}}),
    "NVFP4": (nvfp4, compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "NVFP4 of ModelOpt": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}),
    "MXFP4": (mxfp4, compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32) | {
        "transform_config": None}),
    "FP8 and 4 bits mixed": (mixed, FLOAT | {"format": "mixed-precision", "config_groups": FLOAT["config_groups"] | {"group_1": {
        "weights": {"num_bits": 4, "type": "int", "actorder": "group", "strategy": "group", "group_size": 32}}}}),
    "GPTQ, mixed bits": (dynamic, GPTQ | {"dynamic": {"-:.*q_proj.*": {}, "+:.*down.*": {"bits": 8, "group_size": 64}}}),
    "auto-round, GPTQ's packing": (auto_round, AUTO_ROUND),
    "auto-round, a smaller last group": (auto_round, AUTO_ROUND | {
        "quant_method": "intel/auto-round", "packing_format": "auto_round", "group_size": 128}),
    "auto-round, mixed bits": (
        lambda w, settings: auto_round(w, settings | ({"bits": 8, "group_size": 64} if w.shape[1] == 192 else {})),
        AUTO_ROUND | {"sym": True, "extra_config": {
            f"model.layers.{i}.mlp.down_proj": {"bits": 8, "group_size": 64} for i in range(9)}}),
    "auto-round, AWQ's packing": (auto_round, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4, blocks over the ends of rows": (lambda w, settings: nf4(w, settings, 256, None), {"load_in_4bit": True}),
    "LLM.int8()": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}),
}


def quantize_model(path, pack, settings, ends=("_proj.weight",)) -> dict[str, np.ndarray]:
    """Packs the linear layers of a float32 checkpoint in place -> the weights it now stands for. `ends`: of their names."""
    tensors, expected = {}, {}
    for name, tensor in map_safetensors(path / "model.safetensors").items():
        if name.endswith(ends):
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
    _, _, blocks, _ = eight_bits("w", {"weight": Tensor("F8_E4M3", codes, None), "weight_scale_inv": Tensor(
        "F32", scales, None)}, {"type": "float", "block": [128, 128]})
    factors = scales.repeat(128, axis=0).repeat(128, axis=1)[:rows, :columns]
    ours = np.concatenate([blocks(start, min(start + 128, rows)).values() for start in range(0, rows, 128)])
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


BYTES = {  # of compressed-tensors: the format, its settings, and the block of numbers that shares a scale
    "int8, channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (1, None)),
    "int8, tensor, asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": False}, (None, None)),
    "int8, group, asymmetric": ("int-quantized", {"num_bits": 8, "group_size": 32, "symmetric": False}, (1, 32)),
    "int4, group": ("naive-quantized", {"num_bits": 4, "group_size": 32}, (1, 32)),
    "FP8, tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (None, None)),
    "FP8, channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (1, None)),
    "FP8, block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 40]},
                   (24, 40)),
    "MXFP8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32}, (1, 32)),
    "MXFP4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}, (1, 32)),
    "NVFP4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, (1, 16)),
}


@pytest.mark.parametrize("case", BYTES)
def test_compressed_tensors_of_every_kind(tmp_path, case):
    """Compressed and decompressed by the package itself."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    form, weights, size = BYTES[case]
    is_mx, is_float = case.startswith("MX"), weights.get("type") == "float"
    args = QuantizationArgs(**weights, **{"scale_dtype": torch.uint8} if is_mx else {})
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    top = {8: 448, 4: 6}[args.num_bits] if is_float else 2**args.num_bits // 2 - 1
    names = {torch.float32: "float32", torch.int8: "int8", torch.uint8: "uint8", torch.float8_e4m3fn: "float8_e4m3fn"}

    def pack(w, _settings):
        largest, low = in_blocks(w, *size, np.abs), in_blocks(w, *size, lambda w: -w)
        scale, zero = torch.tensor(half(largest / top)), None
        if args.symmetric is False:
            scale = torch.tensor(half((largest + low) / (2 * top + 1)))
            zero = torch.tensor(np.round(low / scale.numpy()) - top - 1).to(torch.int8)
        scale = 2**torch.ceil(torch.log2(scale)) if is_mx else scale
        state = {"weight": torch.tensor(w), "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
        if case == "NVFP4":
            state["weight_global_scale"] = torch.tensor([448 / float(scale.max())])
            state["weight_scale"] = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        packed = compressor.compress(state, scheme)
        if "weight_packed" in packed:  # its decompress() rounds to bfloat16 at the end
            numbers = unpack_fp4_from_uint8(packed["weight_packed"], *w.shape, torch.float32)
            values = dequantize(numbers, state["weight_scale"], None, args, torch.float32, state.get("weight_global_scale"))
        else:
            values = compressor.decompress(packed if not is_mx else packed | {"weight": packed["weight"].float()}, scheme)["weight"]
        parts = {name: (names[value.dtype], (value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value).numpy())
                 for name, value in packed.items()}
        return parts | {"input_zero_point": ("int8", np.zeros(1))}, values.float().numpy()

    path = make_random_model(CONFIG, tmp_path, "float32")
    original = original_of(path)
    check(path, quantize_model(path, pack, compressed(form, **weights)), original, case)


def test_fp4_of_bitsandbytes():
    """What bitsandbytes 0.50 makes of 2 x 32 normally distributed numbers, and dequantizes: its table isn't sorted."""
    codes = bytes.fromhex("ddee44eb6a66125eaa747ae34f96225ce1e16166979162dde7419e6ee753dc5e")
    table = [0, 0.0052083334885537624, 0.6666666865348816, 1, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25]
    state = b'{"quant_type": "fp4", "blocksize": 32, "dtype": "float32", "shape": [2, 32]}'
    parts = {"weight": ("U8", np.frombuffer(codes, np.uint8)[:, None]),
             "weight.absmax": ("F32", np.frombuffer(bytes.fromhex("c15f0740ad455a40"), np.float32)),
             "weight.quant_map": ("F32", np.array([*table, *(-number for number in table)], np.float32)),
             "weight.quant_state.bitsandbytes__fp4": ("U8", np.frombuffer(state, np.uint8))}
    shape, bits, blocks, _ = bitsandbytes("w", {name: Tensor(*part, None) for name, part in parts.items()}, {})
    assert (shape, bits) == ((2, 32), 4) and zlib.crc32(blocks(0, 2).numbers.tobytes()) == 3570014639


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("size, nested, storage", [(64, True, "uint8"), (256, False, "uint8"), (32, True, "bfloat16")])
def test_bitsandbytes(kind, size, nested, storage):
    """Packed and unpacked by bitsandbytes itself, also where a block runs on over the end of a row."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    library = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    w = torch.randn(300, 40)
    codes, state = library.quantize_4bit(w, blocksize=size, quant_type=kind, compress_statistics=nested,
                                         quant_storage=getattr(torch, storage))
    stored = {"weight": codes} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    names = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}
    parts = {name: Tensor(names[value.dtype], (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy(), None)
             for name, value in stored.items()}
    _, _, blocks, _ = bitsandbytes("w", parts, {})
    ours = np.concatenate([blocks(start, min(start + 128, 300)).values() for start in (0, 128, 256)])
    assert np.array_equal(ours, library.dequantize_4bit(codes, state).numpy())


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
        _, _, blocks, _ = unpack("w", {name: Tensor(*part, None) for name, part in parts.items()},
                                 {"bits": bits, "layout": form, "group_size": 32, "act_order": False})
        assert np.array_equal(blocks(0, 64).values(), -np.repeat(zeros.T, 32, axis=1).astype(np.float32))


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
           "GPTQ, version 2, act-order, 8 bits": "bf16", "LLM.int8()": "bf16"} | {
    case: "bf16" if "FP8" in case else "int8" for case in CASES if "FP8" in case or "NVFP4" in case or "nf4" in case
    or "smaller" in case}  # whose groups or numbers no format of the fast engine has
FROM_8_BELOW = ("GPTQ, 4 bits", "GPTQ, 2 bits, asymmetric", "GPTQ, one group", "GPTQ, mixed bits",
                "auto-round, mixed bits")  # numbers from -8 to 7


@pytest.mark.parametrize("case", CASES)
def test_the_fast_engine_keeps_the_numbers(tmp_path, case):
    """As whole numbers with scales and minima; else in the nearest 8 bits, or, of 8 bits, as the nearest bfloat16."""
    fast = pytest.importorskip("qwen3_numba", reason="numba is not installed")
    pack, settings = CASES[case]
    path = make_random_model(CONFIG, tmp_path, "float32")
    expected = quantize_model(path, pack, settings)
    weights = fast.load_model(path).weights
    for name in [name for name in weights.matrices if ".layers.0." in name]:
        weight = weights.matrices[name]
        values, found = expected[name], fast.matrix_rows(weight, range(weight[0].rows))
        kept = "int8" if "mixed" in case and len(values) == 192 else NEAREST.get(case)
        if "mixed bits" in case or kept is None:
            eight = "8 bits" in case or "mixed bits" in case and "down" in name
            form = Q5_1 if case == "MXFP4" else INT8 if eight else Q4_0 if case in FROM_8_BELOW else Q4_1
            assert weight[0].form == form and np.array_equal(found, values), name
        elif kept == "int8":
            assert weight[0].form == INT8 and is_nearest_int8(found, values), name
        else:
            assert weight[0].form == BF16 and np.array_equal(found, to_bfloat16(values).astype(np.uint32).__lshift__(16).view(np.float32)), name


NEWER = [*CASES][[*CASES].index("int8 by output, 8 bits"):]

SCALES = {  # a matrix's scales, and whether the fast engine can hold them; None: rounded
    "float16": (np.array([1.0, 65504, 6.1e-5, 6e-8, 0.1, 1 / 3]).astype(np.float16), True),
    "negative, and zeros": (np.array([-1.0, 0, -0.0, 0.25, -3e-5, 1]).astype(np.float16), True),
    "bfloat16 digits": (np.array([1.0, 1 + 2**-7, 3 * 2**-17, 2**-47, 1.5 * 2**16, 2]), True),
    "float32 digits": (np.array([1.0, 1 + 2**-11, 1, 1, 1, 1]), None),
    "too large": (np.array([1.0, 2.0**17, 1, 1, 1, 1]), False),
    "too small": (np.array([1.0, 2.0**-48, 1, 1, 1, 1]), False),
    "infinite": (np.array([1.0, np.inf, 1, 1, 1, 1]), False), "no number": (np.array([1.0, np.nan, 1, 1, 1, 1]), False),
}


@pytest.mark.parametrize("form, most", [(INT8, 127), (Q5_1, 15), (Q4_1, 7), (Q4_0, 7)])
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
    if form == Q4_0:  # whose scales are exactly float16
        fits = case in ("float16", "negative, and zeros")
    if fits is False or further:
        assert blocks is None
    else:
        found, expected = reference(blocks, np.array([(0, 0, form, *whole.shape)], WEIGHT)[0]), whole * np.repeat(scales, 64, axis=1)
        assert np.array_equal(found, expected) if fits else np.allclose(found, expected, atol=(most + 1) * 2**-11)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_fast_engine_computes_with_them(tmp_path, quantize):
    """Against qwen3.py, which has the same numbers, but no vectors rounded to 8 bits."""
    fast = pytest.importorskip("qwen3_numba", reason="numba is not installed")
    path, ids = make_random_model(CONFIG, tmp_path / "model", "float32"), random_ids(40)
    expected = quantize_model(path, awq, CASES["AWQ, groups of 32"][1])
    oracle, model = qwen3.load_model(path), fast.load_model(path, quantize)
    logits = [each.engine.logits_of(each, ids, each.engine.new_cache(each.config), True) for each in (oracle, model)]
    error = np.sqrt(((logits[1] - logits[0])**2).mean()) / logits[0].std()
    assert error < {None: 0.05, "int8": 0.05, "int4": 0.5}[quantize]
    if quantize == "int4":
        return
    for name in [name for name in model.weights.matrices if ".layers.0." in name]:
        weight = model.weights.matrices[name]
        assert np.array_equal(fast.matrix_rows(weight, range(weight[0].rows)), expected[name])


def change_tensors(path, **changes):
    """Rewrites a file with parts of one matrix changed, (None) removed, or of another dtype."""
    tensors = tensors_of(path)
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
    "no inputs": ({"qweight": ("int32", np.ones((0, 64))), "g_idx": ("int32", np.ones(0))}, "must be a matrix"),
    "another shape": ({"qweight": ("int32", np.ones((4, 64))), "g_idx": None}, "groups of its 32 inputs"),
    "groups of another size": ({"scales": ("float16", np.ones((4, 64))), "qzeros": ("int32", np.ones((4, 8)))},
                               "4 groups of its 64 inputs"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_parts(tmp_path, case):
    changes, words = DAMAGES[case]
    path = make_random_model(CONFIG, tmp_path, "float32")
    quantize_model(path, gptq, GPTQ)
    change_tensors(path, **changes)
    assert_one_line(message_of(qwen3.load_model, path), str(path), words)


STATE = "weight.quant_state.bitsandbytes__nf4"


def text(content) -> tuple[str, np.ndarray]:
    return "uint8", np.frombuffer(json.dumps(content).encode(), np.uint8)


@pytest.mark.parametrize("case, changes, words", [
    ("int8 by output, 8 bits", {"weight_scale": ("float32", np.ones((64, 2)))}, "[64, 2], but the matrix [64, 64]"),
    ("int8 by output, 8 bits", {"weight": None}, "q_proj.weight is missing"),
    ("int8 by output, 8 bits", {"weight": ("float8_e4m3fn", np.ones((64, 64)))}, "F8_E4M3, not I8"),
    ("int8 by output, 8 bits", {"weight_packed": ("uint8", np.ones((64, 64)))}, "q_proj is there twice"),
    ("NVFP4", {"weight_global_scale": None}, "weight_global_scale is missing"),
    ("NVFP4 of ModelOpt", {"weight_scale_2": ("float32", np.ones(64))}, "one common scale"),
    ("NVFP4 of ModelOpt", {"pre_quant_scale": ("float32", np.ones(64))}, "q_proj.pre_quant_scale"),
    ("auto-round, a smaller last group", {"scales": ("float16", np.ones((2, 64))), "qzeros": ("int32", np.ones((2, 8)))},
     "2 groups of its 64 inputs"),
    ("nf4", {STATE: ("uint8", [123, 255])}, "not valid JSON"),
    ("nf4", {STATE: text({"shape": [64, 2**70], "blocksize": 64})}, "names no sizes"),
    ("nf4", {STATE: text({"shape": [64, 63], "blocksize": 64, "nested_offset": 0, "nested_blocksize": 256})}, "absmax"),
    ("nf4", {"weight": ("uint8", np.ones((9, 1)))}, "weight has 9 bytes"),
    ("nf4", {"weight.quant_map": None}, "quant_map is missing"),
    ("LLM.int8()", {"weight_format": ("uint8", np.ones(()))}, "only 'row'"),
])
def test_damaged_parts_of_newer_kinds(tmp_path, case, changes, words):
    path, (pack, settings) = make_random_model(CONFIG, tmp_path, "float32"), CASES[case]
    quantize_model(path, pack, settings)
    change_tensors(path, **changes)
    assert_one_line(message_of(qwen3.load_model, path), str(path), words)


@pytest.fixture(scope="module")
def quantized_models(tiny, memory):
    """A folder for each of the newer kinds, all of one layer, with a tokenizer."""
    folders = {}
    for i, case in enumerate(NEWER):
        folders[case] = make_random_model(CONFIG | {"num_hidden_layers": 1}, memory / f"quantized{i}", "float32", tokenizer=tiny)
        quantize_model(folders[case], *CASES[case])
    return folders


@fuzz(300)
def test_any_damage_to_quantized_files(rng, quantized_models, scratch):
    """A changed config.json, header or tensor: both engines load and compute, or refuse in one line."""
    fast = pytest.importorskip("qwen3_numba", reason="numba is not installed")
    source = quantized_models[rng.choice(NEWER)]
    copy_files(source, scratch)
    what = rng.choice(["config", "header", "bytes", "parts"])
    header, data = read_safetensors(source / "model.safetensors")
    if what == "config":
        raw = json.loads((source / "config.json").read_text())
        change(rng, raw["quantization_config"])
        write_new(scratch / "config.json", json.dumps(raw).encode("utf-8", "surrogatepass"))
    elif what == "header":
        changed_header(rng, header, len(data))
    elif what == "bytes":  # in the text of a quant_state, in sizes, groups, scales
        first, end = rng.choice([about["data_offsets"] for name, about in header.items() if "_proj" in name])
        new = rng.randbytes(min(end - first, rng.choice([1, 9, 10**6])))
        data = data[:first] + new + data[first + len(new):]
    else:
        names = [name for name in header if "_proj" in name]
        one, other = rng.choice(names), rng.choice(names)
        header[one], header[other] = header[other], header[one]
    if what != "config":
        (scratch / "model.safetensors").unlink()
        write_safetensors(scratch / "model.safetensors", json.dumps(header).encode(), data)

    def answers():
        for engine in (qwen3, fast):
            model = engine.load_model(scratch, tokenizer=False)
            list(qwen3.generate(model, [1, 2], 1))
        return True

    with np.errstate(all="ignore"):
        return works_or_refused(answers) is not None


def test_a_mixture_of_experts(tmp_path):
    """Its experts are quantized, its router is not; the file may hold more than the model computes with."""
    fast = pytest.importorskip("qwen3_numba", reason="numba is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "moe_intermediate_size": 64}
    for i, case in enumerate(("int8 by output, 8 bits", "NVFP4", "nf4", "FP8 and 4 bits mixed", "auto-round, GPTQ's packing")):
        path = make_random_model(MOE | sizes, tmp_path / str(i), "float32")
        expected = quantize_model(path, *CASES[case])
        plain = make_random_model(MOE | sizes, tmp_path / f"{i} plain", "float32")
        write_tensors(plain / "model.safetensors", {key: ("float32", values) for key, values in expected.items()})
        ids = random_ids(9)
        logits = [model.engine.logits_of(model, ids, model.engine.new_cache(model.config), True)
                  for model in (qwen3.load_model(plain), qwen3.load_model(path), fast.load_model(path))]
        assert np.array_equal(logits[0], logits[1])
        assert np.sqrt(((logits[2] - logits[0])**2).mean()) < 0.1 * logits[0].std(), case


@pytest.mark.parametrize("case", ["GPTQ, 4 bits", "NVFP4", "nf4"])
def test_buffers_are_ignored(tmp_path, case):
    """As in other files: positions and masks, which no model needs."""
    path = make_random_model(CONFIG, tmp_path, "float32")
    expected = quantize_model(path, *CASES[case])
    change_tensors(path, positions=("int64", np.arange(5)), mask=("uint8", np.ones((4, 4))))
    tensors = Checkpoint(path).tensors(Checkpoint(path).config())
    assert tensors.keys() == expected.keys()


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
    "compressed, no groups": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    "compressed, sparse": COMPRESSED | {"format": "sparse-24-bitmask"},
    "compressed, transforms": COMPRESSED | {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}},
    "FP6": compressed("mxfp6-pack-quantized", num_bits=6, type="float", group_size=32),
    "FP4 in groups of 8": compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=8),
    "auto-round, another packing": {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:marlin"},
    "auto-round, rotated": {"quant_method": "auto-round", "bits": 4, "rotation_config": {"hadamard": 1}},
    "ModelOpt, AWQ": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    "packed, no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed, 3 bits": {"quant_method": "compressed-tensors", "format": "pack-quantized",
                       "config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}}},
    "HQQ": {"quant_method": "hqq", "bits": 4}, "none named": {"": 0},
    "FP8 with blocks of 2^70": {"quant_method": "fp8", "weight_block_size": [128, 2**70]},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_supported(tmp_path, case):
    method = SETTINGS[case].get("quant_method", "unknown method")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": SETTINGS[case]}))
    assert_one_line(message_of(Checkpoint(tmp_path).config), "quantization_config", method, "supported")


def test_any_settings(tmp_path):
    """Every key of the methods with values of every type: supported, or refused in one line."""
    values = [None, True, 0, 4, 2**70, 4.0, "4", "gemm", [128, 128], [None], {"a": 1}]
    for base in [*(case[1] for case in CASES.values()), *SETTINGS.values()]:
        for key in [*base, "format", "config_groups", "weight_block_size", "version", "checkpoint_format"]:
            for value in values:
                works_or_refused(check_settings, base | {key: value}, tmp_path)
    for about in ("fp8", ["fp8"], 4):
        assert_one_line(message_of(check_settings, about, tmp_path), "quantization_config", "quantized by")
