"""Checkpoints as they are published: official configs at a reduced size, and packed weights."""
import json
import zlib
from pathlib import Path

import numpy as np
import safetensors

from configs import BASE, SHARED
from qwen3 import map_safetensors
from qwen3_lib.io.tensors import PACKED_DTYPES

DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8", "float8_e4m3fn": "u1",
          "uint8": "u1", "int8": "i1", "uint32": "<u4"}
WHOLE_GROUPS = BASE | {"hidden_size": 64, "intermediate_size": 192, "tie_word_embeddings": False}


def official_configs() -> list[Path]:
    return sorted((SHARED / "configs").glob("*.json"))


def reduced(raw: dict) -> dict:
    """An official config with the same proportions at a fraction of the size: 1/16 of the widths, 1/4 of the heads."""
    kv_heads = max(raw["num_key_value_heads"] // 4, 1)
    small = {"hidden_size": raw["hidden_size"] // 16, "intermediate_size": raw["intermediate_size"] // 16,
             "num_hidden_layers": max(raw["num_hidden_layers"] // 24, 2), "num_key_value_heads": kv_heads,
             "num_attention_heads": raw["num_attention_heads"] // raw["num_key_value_heads"] * kv_heads,
             "head_dim": raw["head_dim"] // 4, "vocab_size": raw["vocab_size"] // 128, "torch_dtype": "float32",
             "eos_token_id": None, "bos_token_id": 0, "max_window_layers": max(raw["num_hidden_layers"] // 24, 2)}
    if "num_experts" in raw:
        small |= {"num_experts": raw["num_experts"] // 8, "moe_intermediate_size": raw["moe_intermediate_size"] // 16}
    return raw | small


def write_tensors(file: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Writes name -> (dtype as safetensors calls it in Python, array) as a safetensors file."""
    arrays = {name: np.ascontiguousarray(data, DTYPES[dtype]) for name, (dtype, data) in tensors.items()}
    safetensors.serialize_file({name: safetensors.TensorSpec(dtype=tensors[name][0], shape=data.shape,
                                                             data_ptr=data.ctypes.data, data_len=data.nbytes)
                                for name, data in arrays.items()}, file, {"format": "pt"})


def tensors_of(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """What write_tensors has written."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
             "I32": "int32", "I64": "int64", "U8": "uint8", "I8": "int8", "U32": "uint32"}
    stored = map_safetensors(folder / "model.safetensors", PACKED_DTYPES)
    return {name: (names[tensor.dtype], tensor.data.copy()) for name, tensor in stored.items()}


def publish(folder: Path) -> Path:
    """Makes a folder of a Qwen3.5's text part one as Qwen publishes it, with the keys of 3.8.

    The text part is nested, and beside it are a vision tower and an MTP head: a copy of the last layer that attends.
    """
    raw, rng = json.loads((folder / "config.json").read_text()), np.random.default_rng(0)
    stored, visual, kind = tensors_of(folder), "model.visual.blocks.0.attn.qkv", raw["model_type"].removesuffix("_text")
    last = max(name.partition("self_attn")[0] for name in stored if ".self_attn." in name)
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in stored.items()}
    tensors |= {name.replace(last, "mtp.layers.0."): value for name, value in stored.items() if name.startswith(last)}
    hidden, norms = raw["hidden_size"], ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
    tensors |= {f"{name}.weight": ("float32", rng.standard_normal(shape)) for name, shape in (
        (visual, (4, 8)), ("mtp.fc", (hidden, 2 * hidden)), *((norm, (hidden,)) for norm in norms))}
    write_tensors(folder / "model.safetensors", tensors | {f"{visual}.bias": ("float32", np.ones(4))})
    about = {"quantization_config": raw.pop("quantization_config")} if "quantization_config" in raw else {}
    text = {key: value for key, value in raw.items() if key not in ("architectures", "torch_dtype")} | {
        "attn_output_gate": True, "dtype": "bfloat16", "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "pad_token_id": None,
        "output_gate_type": "swish", "partial_rotary_factor": 0.25, "output_router_logits": False}
    (folder / "config.json").write_text(json.dumps(about | {
        "architectures": [f"Qwen3_5{'Moe' * kind.endswith('moe')}ForConditionalGeneration"], "image_token_id": 248056,
        "language_model_only": False, "model_type": kind, "text_config": text, "transformers_version": "4.57.0.dev0",
        "tie_word_embeddings": raw["tie_word_embeddings"], "video_token_id": 248057, "vision_end_token_id": 248054,
        "vision_start_token_id": 248053, "vision_config": {
            "deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 8,
            "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 16, "model_type": kind, "num_heads": 2,
            "num_position_embeddings": 2304, "out_hidden_size": raw["hidden_size"], "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2}}))
    return folder


def change_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def pack_words(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Numbers [..., n] of so many bits -> int32 words [..., n * bits / 32]; the i-th goes to the place order[i]."""
    per_word = 32 // bits
    groups = numbers.reshape(*numbers.shape[:-1], -1, per_word).astype(np.uint64)
    places = range(per_word) if order is None else order
    words = sum(groups[..., i] << np.uint64(bits * place) for i, place in enumerate(places))
    return words.astype(np.uint32).view(np.int32)


def is_nearest_int8(found: np.ndarray, values: np.ndarray) -> bool:
    """Whether each group of 32 columns errs by no more than the fast engine's int8 may."""
    pairs = np.pad(np.stack([found - values, values]), ((0, 0), (0, 0), (0, -values.shape[1] % 32)))
    errors, values = pairs.reshape(2, len(values), -1, 32)
    return bool((np.sqrt((errors**2).mean(-1)) <= 0.006 * np.abs(values).max(-1)).all())


# ---- Quantized files -------------------------------------------------------------------------------------------------

def half(x: np.ndarray) -> np.ndarray:
    """Rounded to float16, as scales are stored."""
    return x.astype(np.float16).astype(np.float32)


# Packers: (a matrix, the settings) -> (parts in a file: (dtype, array), the values they stand for). Of the matrix only
# the shape counts: numbers and scales are drawn, so that every bit of the layout occurs.

def draws(w: np.ndarray) -> np.random.Generator:
    """Other random numbers for each matrix."""
    return np.random.default_rng(zlib.crc32(np.ascontiguousarray(w)))


def in_groups(w, bits: int, group: np.ndarray, symmetric: bool, least: int = 0):
    """q [outputs, inputs], zero points from `least` on and scales [outputs, groups], values; `group` of each input."""
    rng, sizes = draws(w), (len(w), group.max() + 1)
    q = rng.integers(0, 2**bits, w.shape)
    zero = np.full(sizes, 2**(bits - 1)) if symmetric else rng.integers(least, 2**bits, sizes)
    scale = half(rng.uniform(0.1, 0.2, sizes) / 2**bits)
    return q, zero, scale, (q - zero[:, group]).astype(np.float32) * scale[:, group]


AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of 8 neighbours lies in its word


def awq(w, settings):
    group = np.arange(w.shape[1]) // settings.get("group_size", settings.get("q_group_size"))
    q, zero, scale, values = in_groups(w, 4, group, symmetric=False)
    return {"qweight": ("int32", pack_words(q.T, 4, AWQ_PLACES)),
            "qzeros": ("int32", pack_words(zero.T, 4, AWQ_PLACES)), "scales": ("float16", scale.T)}, values


def ordered(group: np.ndarray) -> np.ndarray:
    """The groups of inputs in act-order."""
    return np.random.default_rng(1).permutation(group)


def gptq(w, settings):
    bits, inputs = settings["bits"], w.shape[1]
    group = np.arange(inputs) // (settings["group_size"] if settings["group_size"] > 0 else inputs)
    group = ordered(group) if settings["desc_act"] else group
    q, zero, scale, values = in_groups(w, bits, group, settings["sym"])
    qzeros = pack_words(zero.T, bits)
    if settings["checkpoint_format"] == "gptq":  # 1 less; a 0 borrows from the next number of its word
        qzeros = (qzeros.astype(np.int64) - pack_words(np.ones(32 // bits, int), bits)).astype(np.int32)
    return {"qweight": ("int32", pack_words(q, bits).T), "qzeros": ("int32", qzeros), "scales": ("float16", scale.T),
            "g_idx": ("int32", group)}, values


def packed_with_order(w, settings):
    """compressed-tensors with act-order, which its package can no longer write."""
    group = ordered(np.arange(w.shape[1]) // 32)
    q, zero, scale, values = in_groups(w, 4, group, symmetric=False)
    return {"weight_packed": ("int32", pack_words(q, 4)), "weight_zero_point": ("int32", pack_words(zero.T, 4).T),
            "weight_scale": ("float16", scale), "weight_shape": ("int64", np.array(w.shape)),
            "weight_g_idx": ("int32", group)}, values


E4M3 = np.array([(1 - code // 128 * 2) * ((code & 7) / 8 + (code >> 3 & 15 > 0)) * 2.0**(max(code >> 3 & 15, 1) - 7)
                 for code in range(256)], np.float32)
NF4 = np.array([-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0, 0.0795803,
                0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1], np.float32)


def spread(blocks: np.ndarray, size, shape) -> np.ndarray:
    """A number for each block of a matrix, for each of its numbers. The last blocks may be cut off."""
    return blocks.repeat(size[0], axis=0).repeat(size[1], axis=1)[:shape[0], :shape[1]]


def e4m3(rng, shape) -> np.ndarray:
    """Random bytes, without 0x7F and 0xFF, which are NaN."""
    return (rng.integers(0, 127, shape) + 128 * rng.integers(0, 2, shape)).astype(np.uint8)


def bytes_in_blocks(w, settings, height=1, width=None, name="weight_scale"):
    """Of compressed-tensors: int8 or FP8, and a scale for each block. None: all rows, all columns."""
    rng, size = draws(w), (height or w.shape[0], width or w.shape[1])
    groups = settings.get("config_groups")
    is_float = groups is None or groups["group_0"]["weights"]["type"] == "float"
    codes = e4m3(rng, w.shape) if is_float else rng.integers(-128, 128, w.shape).astype(np.int8)
    scale = half(rng.uniform(0.1, 0.2, [-(-n // step) for n, step in zip(w.shape, size)]) / (448 if is_float else 127))
    values = (E4M3[codes] if is_float else codes) * spread(scale, size, w.shape)
    return {"weight": ("float8_e4m3fn" if is_float else "int8", codes),
            name: ("float16", scale if height else scale.reshape(()))}, values


def nf4(w, settings, size=64, nested_size=256):
    """bitsandbytes: blocks of numbers in a row, or over the ends of rows; their largest numbers, or bytes for these."""
    rng, n_blocks = draws(w), -(-w.size // size)
    codes, absmax = rng.integers(0, 16, n_blocks * size), rng.uniform(0.1, 0.2, n_blocks).astype(np.float32)
    about, parts = {"quant_type": "nf4", "blocksize": size, "shape": list(w.shape), "dtype": "bfloat16"}, {}
    if nested_size:
        outer, bytes_ = np.arange(n_blocks) // nested_size, rng.integers(0, 256, n_blocks)
        largest, table = rng.uniform(0.02, 0.05, outer[-1] + 1).astype(np.float32), np.linspace(-1, 1, 256, dtype="f4")
        absmax = table[bytes_] * largest[outer] + np.float32(0.125)
        about |= {"nested_blocksize": nested_size, "nested_dtype": "float32", "nested_offset": 0.125}
        parts = {"weight.nested_absmax": ("float32", largest), "weight.nested_quant_map": ("float32", table)}
    return parts | {
        "weight": ("uint8", (16 * codes[::2] + codes[1::2])[:-(-w.size // 2), None]),
        "weight.absmax": ("uint8", bytes_) if nested_size else ("float32", absmax),
        "weight.quant_map": ("float32", NF4), STATE: text(about)
    }, (NF4[codes] * absmax.repeat(size))[:w.size].reshape(w.shape)


STATE = "weight.quant_state.bitsandbytes__nf4"


def text(content) -> tuple[str, np.ndarray]:
    return "uint8", np.frombuffer(json.dumps(content).encode(), np.uint8)


def llm_int8(w, settings):
    """bitsandbytes: the largest number of a row is 127."""
    rng = draws(w)
    q, largest = rng.integers(-127, 128, w.shape), rng.uniform(0.1, 0.2, len(w)).astype(np.float32)
    return {"weight": ("int8", q), "SCB": ("float32", largest), "weight_format": ("uint8", np.zeros(()))
            }, q.astype(np.float32) * largest[:, None] * np.float32(7.874015718698502e-3)


def auto_round(w, settings):
    """The layouts of GPTQ and AWQ, without g_idx."""
    forms = {"auto_round": "gptq_v2", "auto_round:auto_gptq": "gptq", "auto_round:auto_awq": ""}
    form = forms[settings["packing_format"]]
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


def in_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of whole numbers as uint32 words, bit by bit, the lowest ones first."""
    each = numbers[..., None] >> np.arange(bits) & 1
    return np.packbits(each.reshape(len(numbers), -1).astype(np.uint8), axis=1, bitorder="little").view("<u4")


def rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers cut to bfloat16, or as float16: as they are stored, and as float32."""
    if dtype == "float16":
        return x.astype(np.float16), half(x)
    upper = np.asarray(x, np.float32).view(np.uint32) >> 16
    return upper.astype(np.uint16), (upper << 16).view(np.float32)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def mlx(w, settings, dtype="bfloat16"):
    """MLX: signed scales and biases, or, of mxfp4, powers of two for floats of 4 bits."""
    rng, bits, n_groups = draws(w), settings["bits"], w.shape[1] // settings["group_size"]
    q, sizes = rng.integers(0, 2**bits, w.shape), (len(w), n_groups)
    words = "uint32", in_bits(q, bits)
    if settings.get("mode") == "mxfp4":
        exponents = rng.integers(120, 125, sizes)
        values = np.where(q < 8, 1, -1) * np.take(E2M1, q % 8) * np.repeat(2.0**(exponents - 127), 32, axis=1)
        return {"weight": words, "scales": ("uint8", exponents)}, values.astype(np.float32)
    stored, scales = rounded(rng.uniform(0.1, 0.2, sizes) * rng.choice([-1, 1], sizes) / 2**bits, dtype)
    biases, minima = rounded(-scales * rng.uniform(0.3, 0.7, sizes) * 2**bits, dtype)
    scales, minima = (np.repeat(each, settings["group_size"], axis=1) for each in (scales, minima))
    values = scales * q.astype(np.float32) + minima
    return {"weight": words, "scales": (dtype, stored), "biases": (dtype, biases)}, values


def compressed(form: str, **weights) -> dict:
    """A quantization_config of compressed-tensors, as llm-compressor writes it."""
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None,
            "quantization_status": "compressed", "transform_config": {}, "sparsity_config": {}, "config_groups": {
                "group_0": {"targets": ["Linear"], "input_activations": {"num_bits": 8, "dynamic": True},
                            "weights": weights}}}


COMPRESSED = compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
ORDERED = {"num_bits": 4, "type": "int", "actorder": "group", "group_size": 32}
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]}
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
    "GPTQ, 8 bits, asymmetric": (gptq, GPTQ | {"bits": 8, "sym": False}),
    "GPTQ, 2 bits, asymmetric": (gptq, GPTQ | {"bits": 2, "sym": False}),
    "GPTQ, asymmetric": (gptq, GPTQ | {"sym": False}),
    "GPTQ, act-order": (gptq, GPTQ | {"desc_act": True, "sym": False}),
    "GPTQ, version 2": (gptq, GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}),
    "GPTQ, version 2, act-order, 8 bits": (gptq, GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True, "bits": 8,
                                                        "sym": False}),
    "GPTQ, one group": (gptq, GPTQ | {"group_size": -1}),
    "compressed-tensors, act-order": (packed_with_order, compressed("pack-quantized", **ORDERED, symmetric=False)),
    "int8 by output, 8 bits": (bytes_in_blocks, COMPRESSED),
    "FP8 by output": (bytes_in_blocks, FLOAT | {"transform_config": {"config_groups": {}}}),
    "FP8 by matrix": (lambda w, settings: bytes_in_blocks(w, settings, None, None), compressed(
        "float-quantized", num_bits=8, type="float") | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
    "FP8 in blocks, the last ones cut off": (
        lambda w, settings: bytes_in_blocks(w, settings, 48, 40, "weight_scale_inv"), FP8_BLOCKS),
    "FP8 and 4 bits mixed": (mixed, FLOAT | {"format": "mixed-precision", "config_groups": FLOAT["config_groups"] | {
        "group_1": {"weights": ORDERED | {"strategy": "group"}}}}),
    "GPTQ, mixed bits": (dynamic, GPTQ | {
        "dynamic": {"-:.*q_proj.*": {}, "+:.*down.*": {"bits": 8, "group_size": 64}}}),
    "auto-round, GPTQ's packing": (auto_round, AUTO_ROUND),
    "auto-round, version 2": (auto_round, AUTO_ROUND | {
        "quant_method": "intel/auto-round", "packing_format": "auto_round", "group_size": 64}),
    "auto-round, mixed bits": (
        lambda w, settings: auto_round(w, settings | ({"bits": 8, "group_size": 64} if w.shape[1] == 192 else {})),
        AUTO_ROUND | {"sym": True, "extra_config": {
            f"model.layers.{i}.mlp.down_proj": {"bits": 8, "group_size": 64} for i in range(9)}}),
    "auto-round, AWQ's packing": (auto_round, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4, blocks over the ends of rows": (lambda w, settings: nf4(w, settings, 256, None), {"load_in_4bit": True}),
    "MLX, 2 bits, groups of 32": (mlx, {"group_size": 32, "bits": 2}),
    "MLX, 3 bits": (mlx, {"group_size": 64, "bits": 3}),
    "MLX, 4 bits": (mlx, {"group_size": 64, "bits": 4, "mode": "affine"}),
    "MLX, 4 bits, scales in float16": (lambda w, settings: mlx(w, settings, "float16"), {"group_size": 32, "bits": 4}),
    "MLX, 5 bits": (mlx, {"group_size": 64, "bits": 5}),
    "MLX, 6 bits": (mlx, {"group_size": 64, "bits": 6}),
    "MLX, 8 bits": (mlx, {"group_size": 32, "bits": 8}),
    "MLX, mxfp4": (mlx, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    "LLM.int8()": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}),
}


def quantize_model(path, pack, settings, ends=("_proj.weight",)) -> dict[str, np.ndarray]:
    """Packs a float32 checkpoint's matrices whose names have these ends, in place -> the weights it now stands for."""
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
