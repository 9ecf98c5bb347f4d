"""qwen3_lib/io/formats.py: published quantizations against their own tools, or packed here from their layouts."""
import json
import mmap
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from helpers import assert_one_line, config_at, logits_of, message_of, random_ids, stored_in, works_or_refused
from make_random_model import make_random_model
from packed import blocks_of, factored, reference
from published import (AWQ_PLACES, CASES, COMPRESSED, FLOAT, GPTQ, STATE, awq, compressed, draws, gptq, half, in_groups,
                       is_nearest_int8, pack_words, quantize_model, tensors_of, text, write_tensors)
from published import WHOLE_GROUPS as CONFIG
from qwen3 import Tensor, to_float32
from qwen3_lib.generation.prompt_store import fingerprint
from qwen3_lib.io.formats import FP8, bitsandbytes, check_settings
from qwen3_lib.io.tensors import Blocks, PackedTensor, below, both_ends, rows_of, to_bfloat16
from qwen3_lib.kernels.layout import INT8, Q4_0, Q4_1, Q4_K, Q5_1, Q8_1, ROUNDED, WEIGHT
from qwen3_lib.kernels.packing import Packer
from test_qwen3_moe import MOE

Q_PROJ = "model.layers.0.self_attn.q_proj"


def check(path, expected: dict[str, np.ndarray]) -> None:
    """The numbers are exactly the expected ones, and the model computes with them."""
    stored = stored_in(path)
    assert stored.keys() == expected.keys()
    assert any(isinstance(tensor, PackedTensor) for tensor in stored.values())
    for key, values in expected.items():
        ours = to_float32(stored[key])
        assert ours.dtype == np.float32 and np.array_equal(ours, values), key
        if isinstance(stored[key], PackedTensor) and len(values) > 128:
            parts = [rows_of(stored[key], *part) for part in ((0, 128), (128, len(values)))]
            assert np.array_equal(np.concatenate(parts), values), key
    plain = path / "plain"
    make_random_model({key: value for key, value in json.loads((path / "config.json").read_text()).items()
                       if key != "quantization_config"}, plain, "float32")
    write_tensors(plain / "model.safetensors", {key: ("float32", values) for key, values in expected.items()})
    ids = random_ids(9)
    logits = [qwen3.forward(model, ids, qwen3.KVCache(model.config))
              for model in (qwen3.load_model(path), qwen3.load_model(plain))]
    assert np.array_equal(*logits)


# Whose groups or numbers no format of the fast engine has.
NEAREST = {"AWQ, groups of 16, GEMM": "int8", "GPTQ, act-order": "int8", "compressed-tensors, act-order": "int8",
           "GPTQ, version 2, act-order, 8 bits": "bf16", "LLM.int8()": "bf16"} | {
    case: "bf16" if "FP8" in case else "int8" for case in CASES
    if any(part in case for part in ("FP8", "nf4"))}
FROM_8_BELOW = ("GPTQ, 4 bits", "GPTQ, 2 bits, asymmetric", "GPTQ, one group", "GPTQ, mixed bits",
                "auto-round, mixed bits")  # numbers from -8 to 7


WITH_MINIMA = {"MLX, 5 bits": Q5_1, "MLX, mxfp4": Q5_1, "MLX, 6 bits": Q8_1, "MLX, 8 bits": Q8_1,
               "GPTQ, 8 bits, asymmetric": Q8_1}  # the others' is Q4_1


@pytest.mark.parametrize("case", CASES)
def test_packed_from_the_layout(tmp_path, case):
    """The fast engine keeps whole numbers with scales and minima; else the nearest 8 bits or, of 8 bits, bfloat16."""
    path = make_random_model(CONFIG, tmp_path, "float32")
    expected = quantize_model(path, *CASES[case])
    check(path, expected)
    weights = fast.load_model(path).weights
    for name in [name for name in weights.matrices if ".layers.0." in name]:
        weight, values = weights.matrices[name], expected[name]
        found, form = fast.matrix_rows(weight, range(len(values))), weight[0].form
        kept = "int8" if "mixed" in case and len(values) == 192 else NEAREST.get(case)
        if "mixed bits" in case or kept is None:
            eight = "8 bits" in case or "mixed bits" in case and "down" in name
            exact = WITH_MINIMA.get(case, INT8 if eight else Q4_0 if case in FROM_8_BELOW else Q4_1)
            assert form == exact and np.array_equal(found, values), name
        elif kept == "int8":
            assert form == INT8 and is_nearest_int8(found, values), name
        else:
            nearest = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
            assert form == ROUNDED and np.array_equal(found, nearest), name


def test_fp8_bytes_are_those_of_torch():
    codes = [0, 1, 8, 0x38, 0x7E, 0x7F, 0xFF, 0xB8, 0xFE]
    assert np.array_equal(FP8[codes], [0, 2**-9, 2**-6, 1, 448, np.nan, np.nan, -1, -448], equal_nan=True)
    torch = pytest.importorskip("torch")
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FP8, theirs, equal_nan=True)


PACKED = "pack-quantized"
BYTES = {  # of compressed-tensors: the format, its settings, and the block of numbers that shares a scale
    "4 bits, group": (PACKED, {"num_bits": 4, "group_size": 32}, (1, 32)),
    "4 bits, group, asymmetric": (PACKED, {"num_bits": 4, "group_size": 32, "symmetric": False}, (1, 32)),
    "2 bits, channel, asymmetric": (PACKED, {"num_bits": 2, "strategy": "channel", "symmetric": False}, (1, None)),
    "8 bits, group": (PACKED, {"num_bits": 8, "group_size": 16}, (1, 16)),
    "8 bits, channel, asymmetric": (PACKED, {"num_bits": 8, "strategy": "channel", "symmetric": False}, (1, None)),
    "int8, channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (1, None)),
    "int8, tensor, asymmetric": (
        "int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": False}, (None, None)),
    "int8, group, asymmetric": ("int-quantized", {"num_bits": 8, "group_size": 32, "symmetric": False}, (1, 32)),
    "int4, group": ("naive-quantized", {"num_bits": 4, "group_size": 32}, (1, 32)),
    "FP8, tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (None, None)),
    "FP8, channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (1, None)),
    "FP8, block": ("float-quantized", {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 40]}, (24, 40)),
    "FP8, group": ("float-quantized", {"num_bits": 8, "type": "float", "group_size": 32}, (1, 32)),
}


@pytest.mark.parametrize("case", BYTES)
def test_compressed_tensors(tmp_path, case):
    """Compressed and decompressed by the package itself."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    form, weights, size = BYTES[case]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    top = 448 if "FP8" in case else 2**args.num_bits // 2 - 1
    names = {torch.float32: "float32", torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn",
             torch.int32: "int32", torch.int64: "int64"}

    def pack(w, _settings):
        rng, blocks = draws(w), [-(-n // (step or n)) for n, step in zip(w.shape, size)]
        state = {"weight": torch.tensor(w), "weight_scale": torch.tensor(half(rng.uniform(0.05, 0.1, blocks) / top))}
        if form == PACKED or args.symmetric is False:
            zero = rng.integers(-3, 3, blocks) * (args.symmetric is False)
            state["weight_zero_point"] = torch.tensor(zero).to(torch.int8)
        packed = compressor.compress(state, scheme)
        values = compressor.decompress(packed, scheme)["weight"]
        parts = {name: (names[value.dtype], value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value)
                 for name, value in packed.items()}
        return parts | {"input_zero_point": ("int8", np.zeros(1))}, values.float().numpy()

    path = make_random_model(CONFIG, tmp_path, "float32")
    check(path, quantize_model(path, pack, compressed(form, **weights)))


@pytest.mark.parametrize("size, nested, storage", [(64, True, "uint8"), (256, False, "uint8"), (32, True, "bfloat16")])
def test_bitsandbytes(size, nested, storage):
    """Packed and unpacked by bitsandbytes itself, also where a block runs on over the end of a row."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("bitsandbytes.functional")
    w = torch.randn(300, 40)
    codes, state = library.quantize_4bit(w, blocksize=size, quant_type="nf4", compress_statistics=nested,
                                         quant_storage=getattr(torch, storage))
    stored = {"weight": codes} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    names = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}
    stored = {name: (names[value.dtype], value.view(torch.uint16) if value.dtype == torch.bfloat16 else value)
              for name, value in stored.items()}
    parts = {name: Tensor(dtype, value.numpy(), None) for name, (dtype, value) in stored.items()}
    _, _, blocks, _ = bitsandbytes("w", parts, {})
    ours = np.concatenate([blocks(start, min(start + 128, 300)).values() for start in (0, 128, 256)])
    assert np.array_equal(ours, library.dequantize_4bit(codes, state).numpy())


def test_llm_int8():
    """Rounded and dequantized by bitsandbytes itself."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("bitsandbytes.functional")
    codes, largest, _ = library.int8_vectorwise_quant(torch.randn(300, 40).half())
    parts = {"weight": Tensor("I8", codes.numpy(), None), "SCB": Tensor("F32", largest.numpy(), None)}
    ours = bitsandbytes("w", parts, {})[2](0, 300).values()
    assert np.array_equal(ours, library.int8_vectorwise_dequant(codes, largest).numpy())


@pytest.mark.parametrize("bits, order, sums", [
    (4, AWQ_PLACES, (1691635820, 3802259335)), (4, None, (956932586, 3990857909)),
    (8, None, (3110420310, 1234976046))], ids=["AutoAWQ 0.2.7", "AutoGPTQ 0.7.1", "AutoGPTQ 0.7.1, 8 bits"])
def test_words_are_packed_as_by_the_tools(bits, order, sums):
    """The CRC-32 of qweight and qzeros, by the tools themselves, whose layers gave the same values back."""
    w = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    q, zero, *_ = in_groups(w, bits, np.arange(32) // 8, symmetric=False, least=1)
    words = [pack_words(part.T, bits, order) for part in (q, zero)] if order else \
        [pack_words(q, bits).T, pack_words(zero.T - 1, bits)]
    assert tuple(zlib.crc32(np.ascontiguousarray(part)) for part in words) == sums


@pytest.mark.parametrize("bits, sums", [
    (2, (3252670081, 790936401, 2088914049)), (4, (4052039999, 3818963742, 4203092586)),
    (8, (3205114526, 4018639102, 3169105892))])
def test_words_are_packed_as_by_gptqmodel(bits, sums):
    """The CRC-32 of qweight, and of qzeros in version 2 and 1, by GPTQModel 7.7. Among the zero points are zeros."""
    settings, w = GPTQ | {"bits": bits, "sym": False}, np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    (two, values), (one, _) = (gptq(w, settings | {"checkpoint_format": form}) for form in ("gptq_v2", "gptq"))
    words = [two["qweight"][1], two["qzeros"][1], one["qzeros"][1]]
    assert tuple(zlib.crc32(np.ascontiguousarray(part)) for part in words) == sums


def test_bfloat16_is_the_nearest():
    torch = pytest.importorskip("torch")
    halfway = np.arange(2**15, 2**32, 9 * 2**16)  # between an even and an odd number, and the other way round
    bits = np.concatenate([np.random.default_rng(0).integers(0, 2**32, 100_000), halfway])
    values = bits.astype(np.uint32).view(np.float32)
    theirs = torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    ours = to_bfloat16(values)
    numbers = ~np.isnan(values)
    assert np.array_equal(ours[numbers], theirs[numbers])
    assert np.isnan((ours[~numbers].astype(np.uint32) << 16).view(np.float32)).all()


def test_the_ends_of_a_packed_matrix():
    """Those of its numbers; rows are asked for from multiples of 32 on, where words of every width begin."""
    values = np.random.default_rng(0).standard_normal((300, 128)).astype(np.float32)

    def blocks(start, stop):
        assert start % 32 == 0
        return Blocks(values[start:stop])

    expected = values.ravel()[:1024].tobytes() + values.ravel()[-1024:].tobytes()
    for tensor in Tensor("F32", values, None), PackedTensor("F32", values.shape, blocks, None, 4):
        assert both_ends(tensor) == expected


@pytest.mark.parametrize("n", [64, 40])
@pytest.mark.parametrize("minima", [(True, True), (False, False), (True, False)], ids=str)
@pytest.mark.parametrize("sizes", [(32, 32), (32, 64), (0, 32)], ids=str)
def test_two_packed_matrices_in_one(sizes, minima, n):
    """Packed where they are alike; its rows are always those of both."""
    def matrix(rows, size, with_minima):
        numbers, scales = rng.integers(0, 16, (rows, 128)).astype(np.int16), rng.random((2, rows, 128 // (size or 128)))
        scale, minimum = scales.astype(np.float32)
        whole = Blocks(numbers, scale, minimum if with_minima else None) if size else Blocks(numbers.astype(np.float32))
        return PackedTensor("F32", (rows, 128), lambda start, stop: Blocks._make(
            each if each is None else each[start:stop] for each in whole), mmap.mmap(-1, 4096), 4, size)

    rng = np.random.default_rng(0)
    both = [matrix(*each) for each in zip((n, 70), sizes, minima)]
    found = below(*both)
    assert found.shape == (n + 70, 128) and (found.group > 0) == (n == 64 and sizes == (32, 32) and len({*minima}) == 1)
    assert np.array_equal(found.read(), np.concatenate([each.read() for each in both]))
    assert all(np.array_equal(rows_of(found, i, min(i + 32, n + 70)), found.read()[i:i + 32])
               for i in range(0, n + 70, 32))


def test_a_packed_matrix_with_very_wide_rows():
    """A block of 32 rows is read at once, however wide they are."""
    values = np.arange(33 * (2**17 + 32), dtype=np.float32).reshape(33, -1)
    tensor = PackedTensor("F32", values.shape, lambda start, stop: Blocks(values[start:stop]), mmap.mmap(-1, 4096), 4)
    assert np.array_equal(tensor.read(), values)


SCALES = {  # a matrix's scales, and whether the fast engine can hold them; None: rounded
    "float16": (np.array([1.0, 65504, 6.1e-5, 6e-8, 0.1, 1 / 3]).astype(np.float16), True),
    "negative, and zeros": (np.array([-1.0, 0, -0.0, 0.25, -3e-5, 1]).astype(np.float16), True),
    "bfloat16 digits": (np.array([1.0, 1 + 2**-7, 3 * 2**-17, 2**-47, 1.5 * 2**16, 2]), True),
    "float32 digits": (np.array([1.0, 1 + 2**-11, 1, 1, 1, 1]), None),
    "too large": (np.array([1.0, 2.0**17, 1, 1, 1, 1]), False),
    "too small": (np.array([1.0, 2.0**-48, 1, 1, 1, 1]), False),
    "infinite": (np.array([1.0, np.inf, 1, 1, 1, 1]), False), "no number": (np.array([1.0, np.nan, 1, 1, 1, 1]), False),
}


@pytest.mark.filterwarnings("error")  # which would be lines on stderr
@pytest.mark.parametrize("form, most", [(INT8, 127), (Q8_1, 127), (Q5_1, 15), (Q4_1, 7), (Q4_0, 7)])
@pytest.mark.parametrize("further", [0, 1])
@pytest.mark.parametrize("case", SCALES)
def test_scales_that_the_fast_engine_can_hold(case, form, most, further):
    """Three groups in two rows of 192 columns, or 515 times as many rows; one has the largest and the least number."""
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
        found = reference(blocks, np.array([(0, 0, form, *whole.shape)], WEIGHT)[0])
        expected = whole * np.repeat(scales, 64, axis=1)
        assert np.array_equal(found, expected) if fits else np.allclose(found, expected, atol=(most + 1) * 2**-11)


@pytest.mark.parametrize("form", [Q8_1, Q5_1, Q4_1])
def test_minima_that_are_not_finite(form):
    """One among others, and the matrix doesn't fit."""
    whole, scales, minima = np.ones((32, 64), np.int16), np.ones((32, 2), np.float32), np.ones((32, 2), np.float32)
    assert blocks_of(whole, scales, minima, form) is not None
    minima[5, 1] = np.inf
    assert blocks_of(whole, scales, minima, form) is None


def test_factors_that_are_not_finite():
    """Of GGUF's K formats: one among others, and the matrix doesn't fit, so that loading says so."""
    fine = factored(np.random.default_rng(0).standard_normal((32, 512)).astype(np.float32), Q4_K, 0, 32)
    broken = fine._replace(factors=fine.factors.copy())
    broken.factors[1, 5, 1] = np.inf
    with ThreadPoolExecutor(1) as pool:
        found = [Packer(pool, []).exact(PackedTensor("F32", (32, 512), lambda start, stop, blocks=blocks: blocks,
                                                     mmap.mmap(-1, 4096), 4, factored=True), Q4_K)
                 for blocks in (fine._replace(numbers=fine.numbers.copy()), broken)]
    assert found[0] is not None and found[1] is None


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_fast_engine_computes_with_them(tmp_path, quantize):
    """Against qwen3.py, which has the same numbers, but no vectors rounded to 8 bits."""
    path, ids = make_random_model(CONFIG, tmp_path / "model", "float32"), random_ids(40)
    quantize_model(path, awq, CASES["AWQ, groups of 32"][1])
    oracle, model = qwen3.load_model(path), fast.load_model(path, quantize)
    logits = [logits_of(each, ids) for each in (oracle, model)]
    error = np.sqrt(((logits[1] - logits[0])**2).mean()) / logits[0].std()
    assert error < {None: 0.05, "int8": 0.05, "int4": 0.5}[quantize]


def change_tensors(path, **changes):
    """Rewrites a file with parts of one matrix changed, (None) removed, or of another dtype."""
    tensors = tensors_of(path)
    tensors |= {f"{Q_PROJ}.{part}": value for part, value in changes.items()}
    write_tensors(path / "model.safetensors", {name: value for name, value in tensors.items() if value is not None})


@pytest.mark.parametrize("case, changes, words", [*(("GPTQ, 4 bits", *rest) for rest in [
    ({"scales": None}, "scales is missing"), ({"scales": ("int32", np.ones((2, 64)))}, "I32"),
    ({"scales": ("float16", np.ones((3, 64)))}, "doesn't fit the other parts"),
    ({"g_idx": ("int32", np.full(64, 2))}, "groups that don't exist"),
    ({"g_idx": ("int32", np.arange(64) // 32 - (np.arange(64) == 5))}, "groups that don't exist"),
    ({"g_idx": ("int32", np.zeros(9))}, "g_idx has shape [9]"),
    ({"weight": ("float32", np.ones((64, 64)))}, "q_proj is there twice"),
    ({"qweight": ("int32", np.ones((0, 64))), "g_idx": ("int32", np.ones(0))}, "must be a matrix"),
    ({"qweight": ("int32", np.ones((4, 64))), "g_idx": None}, "groups of its 32 inputs"),
    ({"scales": ("float16", np.ones((4, 64))), "qzeros": ("int32", np.ones((4, 8)))}, "4 groups of its 64 inputs")]),
    ("AWQ, groups of 32", {"scales": ("float16", np.ones((4, 64))), "qzeros": ("int32", np.ones((4, 8)))},
     "4 groups of its 64 inputs"),
    ("GPTQ, act-order", {"g_idx": None}, "g_idx is missing"),  # which the settings promise
    ("compressed-tensors, act-order", {"weight_g_idx": None}, "weight_g_idx is missing"),
    ("compressed-tensors, act-order", {"weight_packed": ("int32", np.ones((64, 9)))}, "has shape [64, 9]"),
    ("compressed-tensors, act-order", {"weight_zero_point": None}, "weight_zero_point is missing"),
    ("FP8 in blocks, the last ones cut off", {"weight_scale_inv": ("float32", np.ones((4, 1)))},
     "weight_scale_inv has shape [4, 1]"),
    ("int8 by output, 8 bits", {"weight_scale": ("float32", np.ones((64, 2)))}, "[64, 2], but the matrix [64, 64]"),
    ("int8 by output, 8 bits", {"weight": ("float8_e4m3fn", np.ones((64, 64)))}, "F8_E4M3, not I8"),
    ("int8 by output, 8 bits", {"weight_packed": ("uint8", np.ones((64, 64)))}, "q_proj is there twice"),
    ("nf4", {STATE: ("uint8", [123, 255])}, "not valid JSON"),
    ("nf4", {STATE: text({"shape": [64, 2**70], "blocksize": 64})}, "names no sizes"),
    ("nf4", {STATE: text({"shape": [64, 64], "blocksize": 0})}, "names no sizes"),
    ("nf4", {STATE: text({"shape": [64, 63], "blocksize": 64, "nested_offset": 0, "nested_blocksize": 256})}, "absmax"),
    ("nf4", {"weight": ("uint8", np.ones((9, 1)))}, "weight has 9 bytes"),
    ("nf4", {"weight.quant_map": None}, "quant_map is missing"),
    ("LLM.int8()", {"weight_format": ("uint8", np.ones(()))}, "only 'row'"),
], ids=str)
def test_damaged_parts(tmp_path, case, changes, words):
    path = make_random_model(CONFIG, tmp_path, "float32")
    quantize_model(path, *CASES[case])
    change_tensors(path, **changes)
    assert_one_line(message_of(qwen3.load_model, path), str(path), words)


@pytest.mark.parametrize("case, changes, words", [
    ("auto-round, GPTQ's packing", {"group_size": 48}, "only whole groups"),
    ("nf4", {STATE: None, STATE.replace("nf4", "fp4"): text({"shape": [64, 64]})}, "lack the other parts")], ids=str)
def test_files_for_gpus(tmp_path, case, changes, words):
    """A smaller last group; and fp4, in a file whose config.json doesn't name it."""
    path = make_random_model(CONFIG, tmp_path, "float32")
    pack, settings = CASES[case]
    if "group_size" in changes:
        quantize_model(path, pack, settings | changes)
    else:
        quantize_model(path, pack, settings)
        change_tensors(path, **changes)
    assert_one_line(message_of(qwen3.load_model, path), words, "take a GGUF file, FP8, or the model in bfloat16")


def test_a_mixture_of_experts(tmp_path):
    """Its experts are quantized, its router is not; the file may hold more than the model computes with."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "moe_intermediate_size": 64}
    for i, case in enumerate(("int8 by output, 8 bits", "nf4", "FP8 and 4 bits mixed",
                              "auto-round, GPTQ's packing")):
        path = make_random_model(MOE | sizes, tmp_path / str(i), "float32")
        expected = quantize_model(path, *CASES[case])
        plain = make_random_model(MOE | sizes, tmp_path / f"{i} plain", "float32")
        write_tensors(plain / "model.safetensors", {key: ("float32", values) for key, values in expected.items()})
        ids = random_ids(9)
        logits = [logits_of(model, ids) for model in (plain, path, fast.load_model(path))]
        assert np.array_equal(logits[0], logits[1])
        assert np.sqrt(((logits[2] - logits[0])**2).mean()) < 0.1 * logits[0].std(), case


@pytest.mark.parametrize("case", ["GPTQ, 4 bits", "FP8 by output", "nf4"])
def test_buffers_are_ignored(tmp_path, case):
    """As in other files: positions and masks, which no model needs."""
    path = make_random_model(CONFIG, tmp_path, "float32")
    expected = quantize_model(path, *CASES[case])
    change_tensors(path, positions=("int64", np.arange(5)), mask=("uint8", np.ones((4, 4))))
    tensors = stored_in(path)
    assert tensors.keys() == expected.keys()


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
    "FP8 with blocks of any width": {"quant_method": "fp8", "weight_block_size": [128, None]},
    "AWQ, gemv": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "GPTQ, 3 bits": GPTQ | {"bits": 3}, "GPTQ, 4.0 bits": GPTQ | {"bits": 4.0},
    "GPTQ, marlin": GPTQ | {"checkpoint_format": "marlin"},
    "compressed, sparse": COMPRESSED | {"format": "sparse-24-bitmask"},
    "compressed, transforms": COMPRESSED | {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}},
    "FP6": compressed("mxfp6-pack-quantized", num_bits=6, type="float", group_size=32),
    "NVFP4": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "MXFP4": compressed("mixed-precision", num_bits=4, type="float", group_size=32),
    "MXFP8": compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32),
    "FP4 of bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "auto-round, another packing": {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:marlin"},
    "auto-round, rotated": {"quant_method": "auto-round", "bits": 4, "rotation_config": {"hadamard": 1}},
    "auto-round, FP8": {"quant_method": "auto-round", "bits": 8, "data_type": "fp"},
    "auto-round, 8 bits of activations": {"quant_method": "auto-round", "bits": 4, "act_bits": 8},
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": FLOAT["config_groups"]},
    "packed, no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed, a group that is a number": COMPRESSED | {"config_groups": COMPRESSED["config_groups"] | {"group_1": 3}},
    "HQQ": {"quant_method": "hqq", "bits": 4}, "none named": {"": 0},
    "FP8 with blocks of 2^70": {"quant_method": "fp8", "weight_block_size": [128, 2**70]},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_supported(tmp_path, case):
    method = SETTINGS[case].get("quant_method", "unknown method")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": SETTINGS[case]}))
    assert_one_line(message_of(config_at, tmp_path), "quantization_config", method, "supported",
                    "take a GGUF file")


@pytest.mark.parametrize("settings, key, value", [
    ({"quant_method": "awq", "bits": 4}, "group_size", 128), ({"quant_method": "gptq", "bits": 4}, "group_size", 128),
    *((compressed("pack-quantized", num_bits=4, group_size=32, actorder=order), "act_order", needed)
      for order, needed in (("group", True), ("dynamic", True), (True, True), ("weight", False), (None, False))),
    (compressed("int-quantized", num_bits=8), "block", [None, None]),
    (compressed("int-quantized", num_bits=8, group_size=-1), "block", [1, None]),
    (compressed("int-quantized", num_bits=8, group_size=32), "block", [1, 32])], ids=str)
def test_settings_that_say_little(tmp_path, settings, key, value):
    """As transformers and compressed-tensors complete them; the inputs of a static order need no index."""
    assert check_settings(settings, tmp_path)[1][0][key] == value


@pytest.mark.parametrize("packing, layout", [
    ("auto", "gptq"), ("auto_round:gptq", "gptq"), ("auto_round:auto_gptq", "gptq"), ("auto_round", "gptq_v2"),
    ("auto_round:auto_gptq:exllamav2", "gptq"), ("auto_round:gptqmodel", "gptq_v2"), ("auto_round:awq", "awq"),
    ("auto_round:auto_awq", "awq")])
def test_packings_of_auto_round(tmp_path, packing, layout):
    """As auto-round's own inference takes them: auto_round/inference of version 0.16."""
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing}
    assert check_settings(settings, tmp_path)[1][0]["layout"] == layout


def test_any_settings(tmp_path):
    """Every key of the methods with values of every type: supported, or refused in one line."""
    values = [None, True, 0, 4, 2**70, 4.0, "4", "gemm", [128, 128], [None], {"a": 1}]
    for base in [*(case[1] for case in CASES.values()), *SETTINGS.values()]:
        for key in [*base, "format", "config_groups", "weight_block_size", "version", "checkpoint_format"]:
            for value in values:
                works_or_refused(check_settings, base | {key: value}, tmp_path)
    for about in ("fp8", ["fp8"], 4):
        assert_one_line(message_of(check_settings, about, tmp_path), "quantization_config", "quantized by")
