"""Quantized checkpoints as they are published: from the tensors in a file to rows of float32.

    check_settings(about, file)      what config.json says of the quantization: the method's name and its schemes
    unpacked(stored, method, ...)    the file's tensors, the parts of each quantized matrix replaced by a PackedTensor

A quantized matrix lies in the file as several tensors, its parts: numbers of few bits, scales, perhaps zero points.
METHODS has a row for each method. Its function takes the parts of one matrix and gives the shape and functions that
compute rows. A linear layer is [outputs, inputs] as everywhere; AWQ and GPTQ store it transposed.

Only weights are quantized here. What a file says of quantized activations and of a quantized KV cache is left out:
both stay float32, which is more exact.
"""
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3_lib.io.errors import InputError, brief, is_whole, parse_json, some
from qwen3 import DTYPES, Tensor, checked_number, to_float32
from qwen3_lib.io.schemes import (Settings, auto_round_schemes, awq_schemes, bitsandbytes_schemes, compressed_schemes,
                                  fp8_schemes, gptq_schemes, mlx_schemes)
from qwen3_lib.io.tensors import BY_ROWS, AnyTensor, Blocks, PackedTensor, scaled

Grouped = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
Parts = Mapping[str, Tensor]
FLOATS = " ".join(DTYPES)
TAKE = "take a GGUF file, FP8, or the model in bfloat16; python qwen3_numba.py --quantize int8 quantizes it"
Unpacked = tuple[tuple[int, int], int, Callable[[int, int], Blocks], int]  # shape, bits, blocks, group of PackedTensor


def unpack(words: np.ndarray, bits: int, axis: int, order: np.ndarray | None = None) -> np.ndarray:
    """int32 words, each with 32 / bits small numbers from its lowest bits up -> the numbers along `axis`, as uint8.

    With `order`, the i-th number of a word lies at the place order[i].
    """
    words, mask = np.ascontiguousarray(words).view(np.uint32), np.uint32(2**bits - 1)
    places = range(32 // bits) if order is None else map(int, order)
    numbers = [(words >> np.uint32(bits * place) & mask).astype(np.uint8) for place in places]
    shape = list(words.shape)
    shape[axis] *= len(numbers)
    return np.stack(numbers, axis + 1).reshape(shape)


def grouped(shape: tuple[int, int], bits: int, numbers_of: Grouped, size: int, group: np.ndarray | None) -> Unpacked:
    """A matrix of whole numbers times scales, both from `numbers_of`; `size` inputs share one; `group`: see scaled."""
    if group is None:
        return shape, bits, lambda start, stop: Blocks(*numbers_of(start, stop)), size
    return shape, bits, lambda start, stop: Blocks(scaled(*numbers_of(start, stop), group=group)), 0


def less_zero(q: np.ndarray, zero: np.ndarray, group: np.ndarray | None) -> np.ndarray:
    """q - zero, int16: q [rows, inputs], zero [rows, groups], the group of each input (None: equal groups)."""
    values, zero = q.astype(np.int16), zero.astype(np.int16)
    if group is None:
        values.reshape(*zero.shape, -1)[:] -= zero[..., None]
    else:
        values -= zero[:, group]
    return values


def expect(name: str, parts: Parts, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises InputError unless those of the parts that are there have these dtypes ("U8 I8") and these shapes."""
    for part, shape in shapes.items():
        if part in parts and parts[part].shape != shape:
            raise InputError(f"{name}.{part} has shape {list(parts[part].shape)}, which doesn't fit the other parts; "
                             f"expected {list(shape)}")
    for part, wanted in dtypes.items():
        if part in parts and parts[part].dtype not in wanted.split():
            raise InputError(f"{name}.{part} is {parts[part].dtype}, not {' or '.join(wanted.split())}")


def need(name: str, parts: Parts, *names: str) -> None:
    """Raises InputError for a part that is absent."""
    if absent := [f"{name}.{part}" for part in names if part not in parts]:
        raise InputError(f"{some(absent)} is missing")


def matrix(name: str, part: str, parts: Parts) -> tuple[int, int]:
    """The shape of a part that must be a matrix."""
    if parts[part].data.ndim != 2 or 0 in parts[part].shape:
        raise InputError(f"{name}.{part} has shape {list(parts[part].shape)}, but must be a matrix")
    return parts[part].data.shape


def groups_of(name: str, inputs: int, size: int, parts: Parts, index: str = "") -> np.ndarray | None:
    """The group of each input [inputs], from the part `index`, or by order; None for groups of equal size, in order."""
    group = np.arange(inputs) // size  # the last group may be smaller
    if index not in parts:
        return None if inputs % size == 0 else group
    expect(name, parts, {index: "I32"}, {index: (inputs,)})
    stored = parts[index].data  # "act-order": the inputs were sorted by their importance before they were grouped
    if ((stored < 0) | (stored > group[-1])).any():
        raise InputError(f"{name}.{index} names groups that don't exist; download the file again")
    return None if inputs % size == 0 and np.array_equal(stored, group) else stored


def check_groups(name: str, inputs: int, size: int, n_groups: int) -> None:
    """Raises InputError unless so many inputs are n_groups whole groups."""
    if inputs % size:
        raise InputError(f"{name} has {inputs} inputs in groups of {size}; only whole groups are supported; {TAKE}")
    if n_groups != inputs // size:
        raise InputError(f"{name} has scales for {n_groups} groups of its {inputs} inputs, but config.json says groups "
                         f"of {size}")


# ---- A byte per weight: FP8 and int8 ---------------------------------------------------------------------------------

def fp8_table() -> np.ndarray:
    """The float32 value of each byte in e4m3fn: sign, 4 bits exponent (bias 7), 3 bits mantissa, no infinity. [256]"""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0**(exponent - 7))
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


FP8 = fp8_table()


def spread(name: str, part: str, parts: Parts, shape: tuple[int, int],
           block: tuple[int, int]) -> Callable[[int, int], Tensor]:
    """The part with a number for each block of a matrix -> (start, stop) gives that of some rows, [rows, groups].

    Raises InputError unless the part has as many numbers as the matrix has blocks of this height and width.
    """
    data, expected = parts[part].data, tuple(-(-size // step) for size, step in zip(shape, block))
    if [size for size in data.shape if size != 1] != [size for size in expected if size != 1]:
        raise InputError(f"{name}.{part} has shape {list(data.shape)}, but the matrix {list(shape)} in config.json's "
                         f"blocks of {list(block)} needs {list(expected)}")
    data = data.reshape(expected)
    return lambda start, stop: parts[part]._replace(data=data[np.arange(start, stop) // block[0]])


def with_byte_tables(stored: Mapping[str, Tensor]) -> dict[str, AnyTensor]:
    """The tensors; parts of an n-gram table in FP8, which share one scale, as PackedTensors."""
    tensors: dict[str, AnyTensor] = dict(stored)
    for name, part in stored.items():
        scale = stored.get(f"{name.rpartition('.shard_')[0]}.weight_scale")
        if scale is not None and part.dtype == "F8_E4M3":
            tensors[name] = byte_table(part, to_float32(scale).reshape(()))
    return tensors


def byte_table(part: Tensor, scale: np.ndarray) -> PackedTensor:
    def rows(some: Any) -> np.ndarray:
        return FP8.take(part.data[some]) * scale

    return PackedTensor("F32", part.data.shape, lambda start, stop: Blocks(rows(slice(start, stop))), part.mapping, 8,
                        stored=(part,), rows=rows)


def block_shape(settings: Settings, shape: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the blocks of a matrix that share a scale; in the settings, None stands for all of it."""
    height, width = settings["block"]
    return height or shape[0], width or shape[1]


def eight_bits(name: str, parts: Parts, settings: Settings) -> Unpacked:
    """W = (weight - zero point) * scale of its block. fp8's weight_scale_inv is a factor, too, despite its name."""
    shape, weight = matrix(name, "weight", parts), parts["weight"].data
    factor = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    is_float = settings["type"] == "float"
    expect(name, parts, {"weight": "F8_E4M3" if is_float else "I8", factor: FLOATS, "weight_zero_point": "I8"},
           {})
    block = block_shape(settings, shape)
    scales, group = spread(name, factor, parts, shape, block), groups_of(name, shape[1], block[1], parts)
    if is_float:
        return shape, 8, lambda start, stop: Blocks(scaled(FP8.take(weight[start:stop]),
                                                           to_float32(scales(start, stop)),
                                                           group=group)), 0
    zeros = spread(name, "weight_zero_point", parts, shape, block) if "weight_zero_point" in parts else None

    def numbers_of(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        q, scale = weight[start:stop].astype(np.int16), to_float32(scales(start, stop))
        return q if zeros is None else less_zero(q, zeros(start, stop).data, group), scale

    return grouped(shape, settings["bits"], numbers_of, block[1], group)


# ---- AWQ and GPTQ: W = (q - zero point) * scale ----------------------------------------------------------------------
# Each output has a zero point and a scale for each group of its inputs.

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place of each of 8 neighbouring outputs in a word


def awq(name: str, parts: Parts, settings: Settings) -> Unpacked:
    """AutoAWQ's layout "gemm": 4 bits, 8 neighbouring outputs in a word."""
    (n_inputs, n_words), n_groups = matrix(name, "qweight", parts), matrix(name, "scales", parts)[0]
    expect(name, parts, {"qweight": "I32", "qzeros": "I32", "scales": FLOATS},
           {"qzeros": (n_groups, n_words), "scales": (n_groups, 8 * n_words)})
    size = settings["group_size"] or n_inputs
    check_groups(name, n_inputs, size, n_groups)
    group = groups_of(name, n_inputs, size, parts)

    def numbers_of(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        some_words = slice(start // 8, -(-stop // 8))
        q, zero = (unpack(parts[part].data[:, some_words].T, 4, 0, AWQ_ORDER) for part in ("qweight", "qzeros"))
        return less_zero(q, zero, group), to_float32(parts["scales"])[:, start:stop].T

    return grouped((8 * n_words, n_inputs), 4, numbers_of, size, group)


def gptq(name: str, parts: Parts, settings: Settings) -> Unpacked:
    """AutoGPTQ's and GPTQModel's layout: 32 / bits neighbouring inputs in a word. Version 1 stores zero point - 1.

    GPTQModel subtracts the 1s from a whole word of zero points, and adds them again: a 0 borrows from its neighbour.
    """
    bits, mask = settings["bits"], 2**settings["bits"] - 1
    per_word = 32 // bits
    (n_words, n_outputs), n_groups = matrix(name, "qweight", parts), matrix(name, "scales", parts)[0]
    expect(name, parts, {"qweight": "I32", "qzeros": "I32", "scales": FLOATS},
           {"qzeros": (n_groups, -(-n_outputs // per_word)), "scales": (n_groups, n_outputs)})
    if settings["act_order"]:
        need(name, parts, "g_idx")
    n_inputs = n_words * per_word
    size = settings["group_size"] or n_inputs
    check_groups(name, n_inputs, size, n_groups)
    group = groups_of(name, n_inputs, size, parts, "g_idx")
    less = np.uint32(0 if settings["layout"] == "gptq_v2" else (2**32 - 1) // mask)  # a 1 for each number

    def numbers_of(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        q = unpack(parts["qweight"].data[:, start:stop].T, bits, 1)
        words = parts["qzeros"].data[:, start // per_word:-(-stop // per_word)].T.astype(np.uint32) + less
        return less_zero(q, unpack(words, bits, 0)[:stop - start], group), to_float32(parts["scales"])[:, start:stop].T

    return grouped((n_outputs, n_inputs), bits, numbers_of, size, group)


def auto_round(name: str, parts: Parts, settings: Settings) -> Unpacked:
    """auto-round writes one of these two layouts."""
    return (awq if settings["layout"] == "awq" else gptq)(name, parts, settings)


# ---- compressed-tensors ----------------------------------------------------------------------------------------------

def compressed(name: str, parts: Parts, settings: Settings) -> Unpacked:
    """A matrix in the layout of its scheme."""
    if "weight" in parts and "weight_packed" in parts:
        raise InputError(f"{name} is there twice, as weight and as weight_packed")
    packed = "weight_packed" in parts
    need(name, parts, "weight_packed" if packed else "weight", *["weight_zero_point"] * settings["zero_point"])
    return (pack_quantized if packed else eight_bits)(name, parts, settings)


def pack_quantized(name: str, parts: Parts, settings: Settings) -> Unpacked:
    """AWQ's and GPTQ's formula, W not transposed, q stored as q + 2**(bits - 1), neighbouring inputs in a word.

    The words of the zero points hold neighbouring outputs.
    """
    bits, per_word = settings["bits"], 32 // settings["bits"]
    need(name, parts, "weight_shape", *["weight_g_idx"] * settings["act_order"])
    expect(name, parts, {"weight_packed": "I32", "weight_shape": "I64", "weight_scale": FLOATS,
                         "weight_zero_point": "I32"}, {"weight_shape": (2,)})
    n_rows, n_columns = shape = int(parts["weight_shape"].data[0]), int(parts["weight_shape"].data[1])
    matrix(name, "weight_packed", parts)
    expect(name, parts, {}, {"weight_packed": (n_rows, -(-n_columns // per_word))})
    block = block_shape(settings, shape)
    scales, n_groups = spread(name, "weight_scale", parts, shape, block), -(-n_columns // block[1])
    expect(name, parts, {}, {"weight_zero_point": (-(-n_rows // per_word), n_groups)})
    group = groups_of(name, n_columns, block[1], parts, "weight_g_idx")

    def numbers_of(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        q = unpack(parts["weight_packed"].data[start:stop], bits, 1)
        zero = np.full((stop - start, n_groups), 2**(bits - 1), np.uint8)  # of a symmetric quantization
        if "weight_zero_point" in parts:
            some_words = parts["weight_zero_point"].data[start // per_word:-(-stop // per_word)]
            zero = unpack(some_words, bits, 0)[:stop - start]
        return less_zero(q[:, :n_columns], zero, group), to_float32(scales(start, stop))

    return grouped(shape, bits, numbers_of, block[1], group)


# ---- bitsandbytes ----------------------------------------------------------------------------------------------------

NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


def bitsandbytes(name: str, parts: Parts, _settings: Settings) -> Unpacked:
    """4 bits: W = quant_map[code] * absmax of its block of numbers, which runs on over the ends of rows.

    The higher bits of a byte come first. "Double quantization": absmax itself is nested_quant_map[byte] *
    nested_absmax of its block + nested_offset. Source: bitsandbytes' QuantState.
    """
    if "SCB" in parts:
        return int8(name, parts)
    expect(name, parts, {NF4_STATE: "U8"}, {})
    state = parse_json(parts[NF4_STATE].data.tobytes(), f"{name}.{NF4_STATE}")
    shape = state.get("shape") if isinstance(state, dict) else None
    sizes = [*shape, state.get("blocksize"), state.get("nested_blocksize", 1)] if isinstance(shape, list) else []
    if len(sizes) != 4 or not all(is_whole(number, 1) and number <= 2**20 for number in sizes):
        raise InputError(f"{name}.{NF4_STATE} names no sizes of a quantized matrix: {brief(state, 80)}")
    (n_rows, n, size, group), nested = sizes, "weight.nested_absmax" in parts
    n_blocks = -(-n_rows * n // size)
    offset = state.get("nested_offset", 0)
    offset = np.float32(checked_number(f"{name}.{NF4_STATE}: nested_offset", offset, -1e30, 1e30))
    need(name, parts, "weight.absmax", "weight.quant_map", *["weight.nested_quant_map"] * nested)
    expect(name, parts, {"weight.absmax": "U8" if nested else "F32", "weight.quant_map": "F32",
                         "weight.nested_absmax": "F32", "weight.nested_quant_map": "F32"},
           {"weight.absmax": (n_blocks,), "weight.quant_map": (16,), "weight.nested_absmax": (-(-n_blocks // group),),
            "weight.nested_quant_map": (256,)})
    absmax, numbers, nested_absmax, nested_numbers = (
        parts[f"weight.{part}"].data if f"weight.{part}" in parts else np.empty(0)
        for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"))
    pair_of = np.stack([np.repeat(numbers, 16), np.tile(numbers, 16)], axis=1)  # the two numbers of each byte
    codes = np.ascontiguousarray(parts["weight"].data).reshape(-1).view(np.uint8)  # of any dtype: "quant_storage"
    if len(codes) != -(-n_rows * n // 2):
        raise InputError(f"{name}.weight has {len(codes)} bytes, which doesn't fit the shape {shape}")

    def blocks(start: int, stop: int) -> Blocks:
        first, end = start * n, stop * n  # numbers; first is even, as start is
        places = np.arange(first // size, -(-end // size))
        scales = absmax[places]
        if nested:
            scales = nested_numbers[scales] * nested_absmax[places // group] + offset
        values = pair_of.take(codes[first // 2:-(-end // 2)], axis=0).reshape(-1)[:end - first]
        return Blocks((values * np.repeat(scales, size)[first % size:][:end - first]).reshape(-1, n))

    return (n_rows, n), 4, blocks, 0


def int8(name: str, parts: Parts) -> Unpacked:
    """W = weight * SCB of its row / 127."""
    shape, weight = matrix(name, "weight", parts), parts["weight"].data
    expect(name, parts, {"weight": "I8", "SCB": FLOATS}, {"SCB": (shape[0],)})
    if "weight_format" in parts and parts["weight_format"].data.any():
        raise InputError(f"{name}.weight_format: only 'row' is supported")

    def blocks(start: int, stop: int) -> Blocks:
        return Blocks(weight[start:stop] * to_float32(parts["SCB"])[start:stop, None] * np.float32(1 / 127))

    return shape, 8, blocks, 0


# ---- MLX -------------------------------------------------------------------------------------------------------------

FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)  # e2m1, times 2


def mlx(name: str, parts: Parts, settings: Settings) -> Unpacked:
    """W = scales * number + biases; of mxfp4, the number is a float of 4 bits, and the scale a power of two.

    A row is one stream of bits. Source: MLX's quantized.cpp.
    """
    own = settings["modules"].get(re.sub(r"\.experts\.\d+\.", ".switch_mlp.", name), settings)
    (n_rows, n_words), n_groups = matrix(name, "weight", parts), matrix(name, "scales", parts)[1]
    size, affine, weight = own["group_size"], own["mode"] == "affine", parts["weight"].data
    bits, rest = divmod(32 * n_words, columns := n_groups * size)  # of a router, it may be more than config.json says
    if rest or bits not in own["widths"]:
        raise InputError(f"{name}.weight has {n_words} words in a row, which doesn't fit {n_groups} groups of {size}")
    need(name, parts, *["biases"] * affine)
    expect(name, parts, {"weight": "U32", "scales": FLOATS if affine else "U8", "biases": FLOATS},
           dict.fromkeys(("scales", "biases"), (n_rows, n_groups)))

    def blocks(start: int, stop: int) -> Blocks:
        eights = np.zeros((stop - start, columns // 8, 8), np.uint8)  # 8 numbers are `bits` bytes
        eights[..., :bits] = np.ascontiguousarray(weight[start:stop]).view(np.uint8).reshape(*eights.shape[:2], bits)
        shifts, mask = np.arange(0, 8 * bits, bits, dtype=np.uint64), np.uint64(2**bits - 1)
        numbers = (eights.view("<u8") >> shifts & mask).astype(np.int16).reshape(len(eights), columns)
        scales = parts["scales"]._replace(data=parts["scales"].data[start:stop])
        if affine:
            minima = parts["biases"]._replace(data=parts["biases"].data[start:stop])
            return Blocks(numbers, to_float32(scales), to_float32(minima))
        return Blocks(FP4[numbers], np.ldexp(np.float32(0.5), scales.data.astype(np.int32) - 127))

    return (n_rows, columns), bits if affine else 5, blocks, size


# ---- The table -------------------------------------------------------------------------------------------------------

class Method(NamedTuple):
    """A row of METHODS. A part is a tensor of a matrix, such as "scales"."""
    keys: tuple[str, ...]  # each quantized matrix has one of these parts, no other matrix has
    parts: tuple[str, ...]  # what each must have
    optional: tuple[str, ...]
    function: Callable[[str, Parts, Settings], Unpacked]
    schemes: Callable[[Settings], list[Settings]]  # of quantization_config; raises ValueError: what isn't supported


FP8_SCALES, PACKED_PARTS = ("weight_scale_inv",), ("qweight", "qzeros", "scales")
OPTIONAL_PARTS = ("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx")
NESTED = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "weight_format")
METHODS = {
    "fp8": Method(FP8_SCALES, ("weight",), FP8_SCALES, eight_bits, fp8_schemes),
    "awq": Method(("qweight",), PACKED_PARTS, (), awq, awq_schemes),
    "gptq": Method(("qweight",), PACKED_PARTS, ("g_idx",), gptq, gptq_schemes),
    "auto-round": Method(("qweight",), PACKED_PARTS, ("g_idx",), auto_round, auto_round_schemes),
    "compressed-tensors": Method(("weight_scale",), ("weight_scale",), OPTIONAL_PARTS, compressed, compressed_schemes),
    "bitsandbytes": Method((NF4_STATE, "SCB"), ("weight",), (NF4_STATE, "SCB", *NESTED), bitsandbytes,
                           bitsandbytes_schemes),
    "mlx": Method(("scales",), ("weight", "scales"), ("biases",), mlx, mlx_schemes),
}
# What is needed only to quantize activations or the KV cache: k_proj.k_scale, q_proj.input_zero_point, ...
AT_RUN_TIME = re.compile(r".*\.(input|output|[qkv])(_global)?_(scale|zero_point)")


def check_settings(about: Any, file: Path) -> tuple[str, list[Settings]]:
    """(method, its schemes) of config.json's quantization_config. Raises InputError for what isn't supported."""
    method = about
    if isinstance(about, dict):  # older files of bitsandbytes, and MLX's, don't name it
        method = about.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in about or "load_in_8bit" in about
                                               else "mlx" if "bits" in about or "mode" in about else None)
    name = method.lower().removeprefix("intel/") if isinstance(method, str) else ""
    if not isinstance(about, dict) or name not in METHODS:
        raise InputError(f"{file}: quantization_config: a checkpoint quantized by "
                         f"{brief('an unknown method' if method is None else method)} is not supported, only "
                         f"{', '.join(METHODS)} and GGUF are; {TAKE}")
    try:
        return name, METHODS[name].schemes(about)
    except ValueError as error:
        raise InputError(f"{file}: quantization_config: {name} with {error} supported; {TAKE}") from error


def unpacked(stored: Mapping[str, Tensor], method: str, schemes: list[Settings], folder: Path) -> dict[str, AnyTensor]:
    """The tensors of a quantized checkpoint under the names and with the shapes of an unquantized one.

    The parts of each quantized matrix become one PackedTensor; other tensors stay as they are. Raises InputError for
    absent parts and for shapes and dtypes that don't fit.
    """
    about = METHODS[method]
    tensors = {name: tensor for name, tensor in with_byte_tables(stored).items() if not AT_RUN_TIME.fullmatch(name)}
    found = {name.removesuffix(f".{end}"): end for name in stored for end in about.keys if name.endswith(f".{end}")}
    for name, end in found.items():
        parts = {part: stored[f"{name}.{part}"] for part in about.parts + about.optional if f"{name}.{part}" in stored}
        if f"{name}.weight" in stored and "weight" not in parts:
            raise InputError(f"{folder}: {name} is there twice, as weight and as {end}")
        try:
            need(name, parts, *about.parts)
            shape, bits, blocks, group = with_any_scheme(about.function, name, parts, schemes)
        except InputError as error:
            raise InputError(f"{folder}: {error}") from error
        for part in parts:
            del tensors[f"{name}.{part}"]
        mapping = max(parts.values(), key=lambda part: part.data.nbytes).mapping
        packed = PackedTensor("F32", shape, blocks, mapping, bits, group=group)
        if BY_ROWS in name and all(part.shape[:1] == shape[:1] for part in parts.values()):
            rows = partial(some_rows, about.function, name, parts, schemes)
            packed = packed._replace(stored=tuple(parts.values()), rows=rows)
        tensors[f"{name}.weight"] = packed
    others = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in DTYPES}
    if left := [f"{name} is {dtype}" for name, dtype in others.items() if name.endswith(".weight")]:
        raise InputError(f"{folder}: these tensors lack the other parts of {method}, such as {about.keys[0]}: "
                         f"{some(left)}; {TAKE}")
    return {name: tensor for name, tensor in tensors.items() if name not in others}  # without masks and other buffers


def some_rows(function: Callable[[str, Parts, Settings], Unpacked], name: str, parts: Parts, schemes: list[Settings],
              rows: np.ndarray) -> np.ndarray:
    """Any rows of a matrix whose parts have a row for each of its rows: they are a small matrix of their own."""
    own = {name: part._replace(data=part.data[rows]) for name, part in parts.items()}
    _, _, blocks, _ = with_any_scheme(function, name, own, schemes)
    return blocks(0, len(rows)).values()


def with_any_scheme(function: Callable[[str, Parts, Settings], Unpacked], name: str, parts: Parts,
                    schemes: list[Settings]) -> Unpacked:
    """The matrix in the first scheme that its parts fit. Raises InputError, the first scheme's, if they fit none."""
    errors = []
    for scheme in schemes:
        try:
            return function(name, parts, scheme)
        except InputError as error:
            errors.append(error)
    raise errors[0]
