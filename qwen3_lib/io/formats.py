"""Quantized checkpoints as they are published: from the tensors in a file to rows of float32.

    check_settings(about, file)      what config.json says of the quantization: the method's name and its settings
    unpacked(stored, method, ...)    the file's tensors, the parts of each quantized matrix replaced by a PackedTensor

A quantized matrix lies in the file as several tensors, its parts: numbers of few bits, scales, perhaps zero points.
METHODS has a row for each method. Its function takes the parts of one matrix and gives the shape and functions that
compute rows. A linear layer is [outputs, inputs] as everywhere; AWQ and GPTQ store it transposed.
"""
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3_lib.io.errors import InputError, brief, is_whole, some
from qwen3 import DTYPES, Tensor, to_float32
from qwen3_lib.io.tensors import AnyTensor, PackedTensor, Whole, scaled

Rows = Callable[[int, int], np.ndarray]
Grouped = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
Parts = Mapping[str, Tensor]
Unpacked = tuple[tuple[int, int], Rows, Whole | None]  # of a matrix: shape, rows and whole, see PackedTensor


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


def grouped(shape: tuple[int, int], numbers_of: Grouped, n_groups: int, group: np.ndarray | None) -> Unpacked:
    """A matrix of whole numbers times scales [rows, n_groups], both from `numbers_of`; `group`: see scaled."""
    in_order = group is None and shape[1] // n_groups % 32 == 0
    return (shape, lambda start, stop: scaled(*numbers_of(start, stop), group=group),
            (lambda start, stop: (*numbers_of(start, stop), None)) if in_order else None)


def less_zero(q: np.ndarray, zero: np.ndarray, group: np.ndarray | None) -> np.ndarray:
    """q - zero, int16: q uint8 [rows, inputs], zero [rows, groups], the group of each input (None: equal groups)."""
    values, zero = q.astype(np.int16), zero.astype(np.int16)
    if group is None:
        values.reshape(*zero.shape, -1)[:] -= zero[..., None]
    else:
        values -= zero[:, group]
    return values


def expect(name: str, parts: Parts, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
    """Raises InputError unless these parts have these shapes, and their dtypes; those without one must be floats."""
    for part, shape in shapes.items():
        if parts[part].shape != shape:
            raise InputError(f"{name}.{part} has shape {list(parts[part].shape)}, which doesn't fit the other parts; "
                             f"expected {list(shape)}")
    for part in parts:
        wanted = [dtypes[part]] if part in dtypes else list(DTYPES)
        if parts[part].dtype not in wanted:
            raise InputError(f"{name}.{part} is {parts[part].dtype}, not {' or '.join(wanted)}")


def groups_of(name: str, inputs: int, n_groups: int, parts: Parts, index: str) -> np.ndarray | None:
    """The group of each input [inputs], from the part `index`; None for groups of equal size, in order."""
    if index in parts:  # "act-order": the inputs were sorted by their importance before they were grouped
        expect(name, {index: parts[index]}, {index: (inputs,)}, {index: "I32"})
        group = parts[index].data
        if ((group < 0) | (group >= n_groups)).any():
            raise InputError(f"{name}.{index} names groups that don't exist; download the file again")
        equal = n_groups and inputs % n_groups == 0
        return None if equal and np.array_equal(group, np.arange(inputs) // (inputs // n_groups)) else group
    if n_groups == 0 or inputs % n_groups:
        raise InputError(f"{name}: {inputs} inputs can't be divided into {n_groups} groups")
    return None


# ---- FP8: a byte per weight, a scale per block of 128 x 128 ----------------------------------------------------------

def fp8_table() -> np.ndarray:
    """The float32 value of each byte in e4m3fn: sign, 4 bits exponent (bias 7), 3 bits mantissa, no infinity. [256]"""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0**(exponent - 7))
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


FP8 = fp8_table()


def fp8(name: str, parts: Parts, settings: Mapping[str, Any]) -> Unpacked:
    """W = weight * weight_scale_inv of its block (a factor, despite its name)."""
    weight, (height, width) = parts["weight"].data, settings["weight_block_size"]
    n_rows, n_columns = matrix(name, "weight", parts)
    expect(name, parts, {"weight_scale_inv": (-(-n_rows // height), -(-n_columns // width))}, {"weight": "F8_E4M3"})

    def rows(start: int, stop: int) -> np.ndarray:
        scales = to_float32(parts["weight_scale_inv"])[np.arange(start, stop) // height]
        values = FP8.take(weight[start:stop])
        for i, scale in enumerate(scales.T):
            values[:, i * width:(i + 1) * width] *= scale[:, None]
        return values

    return (n_rows, n_columns), rows, None


def matrix(name: str, part: str, parts: Parts) -> tuple[int, int]:
    """The shape of a part that must be a matrix."""
    if parts[part].data.ndim != 2:
        raise InputError(f"{name}.{part} has shape {list(parts[part].shape)}, but must be a matrix")
    return parts[part].data.shape


# ---- AWQ and GPTQ: W = (q - zero point) * scale ----------------------------------------------------------------------
# Each output has a zero point and a scale for each group of its inputs.

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place of each of 8 neighbouring outputs in a word


def awq(name: str, parts: Parts, _settings: Mapping[str, Any]) -> Unpacked:
    """AutoAWQ's layout "gemm": 4 bits, 8 neighbouring outputs in a word."""
    (n_inputs, n_words), n_groups = matrix(name, "qweight", parts), matrix(name, "scales", parts)[0]
    expect(name, parts, {"qzeros": (n_groups, n_words), "scales": (n_groups, 8 * n_words)},
           {"qweight": "I32", "qzeros": "I32"})
    group = groups_of(name, n_inputs, n_groups, parts, "g_idx")

    def numbers_of(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        some_words = slice(start // 8, -(-stop // 8))
        q, zero = (unpack(parts[part].data[:, some_words].T, 4, 0, AWQ_ORDER) for part in ("qweight", "qzeros"))
        return less_zero(q, zero, group), to_float32(parts["scales"])[:, start:stop].T

    return grouped((8 * n_words, n_inputs), numbers_of, n_groups, group)


def gptq(name: str, parts: Parts, settings: Mapping[str, Any]) -> Unpacked:
    """AutoGPTQ's and GPTQModel's layout: 32 / bits neighbouring inputs in a word. Version 1 stores zero point - 1.

    GPTQModel subtracts the 1s from a whole word of zero points, and adds them again: a 0 borrows from its neighbour.
    """
    bits, mask = settings["bits"], 2**settings["bits"] - 1
    per_word = 32 // bits
    (n_words, n_outputs), n_groups = matrix(name, "qweight", parts), matrix(name, "scales", parts)[0]
    expect(name, parts, {"qzeros": (n_groups, -(-n_outputs // per_word)), "scales": (n_groups, n_outputs)},
           {"qweight": "I32", "qzeros": "I32", "g_idx": "I32"})
    group = groups_of(name, n_words * per_word, n_groups, parts, "g_idx")
    less = np.uint32(0 if settings["checkpoint_format"] == "gptq_v2" else (2**32 - 1) // mask)  # a 1 for each number

    def numbers_of(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        q = unpack(parts["qweight"].data[:, start:stop].T, bits, 1)
        words = parts["qzeros"].data[:, start // per_word:-(-stop // per_word)].T.astype(np.uint32) + less
        return less_zero(q, unpack(words, bits, 0)[:stop - start], group), to_float32(parts["scales"])[:, start:stop].T

    return grouped((n_outputs, n_words * per_word), numbers_of, n_groups, group)


# ---- compressed-tensors, "pack-quantized": the same formula, with W not transposed and q stored as q + 2**(bits - 1) -

def pack_quantized(name: str, parts: Parts, settings: Mapping[str, Any]) -> Unpacked:
    """Neighbouring inputs in a word; the words of the zero points hold neighbouring outputs."""
    bits, per_word = settings["bits"], 32 // settings["bits"]
    expect(name, parts, {"weight_shape": (2,)}, {"weight_packed": "I32", "weight_shape": "I64",
                                                 "weight_zero_point": "I32", "weight_g_idx": "I32"})
    n_rows, n_columns = (int(size) for size in parts["weight_shape"].data)
    n_groups = matrix(name, "weight_scale", parts)[1]
    shapes = {"weight_packed": (n_rows, -(-n_columns // per_word)), "weight_scale": (n_rows, n_groups)}
    if "weight_zero_point" in parts:
        shapes["weight_zero_point"] = (-(-n_rows // per_word), n_groups)
    expect(name, {part: parts[part] for part in shapes}, shapes, {"weight_packed": "I32", "weight_zero_point": "I32"})
    group = groups_of(name, n_columns, n_groups, parts, "weight_g_idx")

    def numbers_of(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        q, scale = unpack(parts["weight_packed"].data[start:stop], bits, 1), to_float32(parts["weight_scale"])
        zero = np.full((stop - start, n_groups), 2**(bits - 1), np.uint8)  # of a symmetric quantization
        if "weight_zero_point" in parts:
            some_words = parts["weight_zero_point"].data[start // per_word:-(-stop // per_word)]
            zero = unpack(some_words, bits, 0)[:stop - start]
        return less_zero(q[:, :n_columns], zero, group), scale[start:stop]

    return grouped((n_rows, n_columns), numbers_of, n_groups, group)


# ---- The table, and what config.json says ----------------------------------------------------------------------------

class Method(NamedTuple):
    """A row of METHODS: the parts of a matrix, those that may be absent, its function, and a check of the settings."""
    parts: tuple[str, ...]  # the first one tells a quantized matrix from others
    optional: tuple[str, ...]
    function: Callable[[str, Parts, Mapping[str, Any]], Unpacked]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]  # raises ValueError: what isn't supported


def fp8_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    size = about.get("weight_block_size")
    if about.get("fmt", "e4m3") != "e4m3" or not (isinstance(size, list) and len(size) == 2
                                                  and all(is_whole(n, 1) and n <= 2**20 for n in size)):
        raise ValueError(f"fmt = {about.get('fmt')!r} with weight_block_size = {size!r}; only 'e4m3' with blocks is")
    return {"bits": 8, "weight_block_size": size}


def awq_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    if (about.get("bits", about.get("w_bit")), str(about.get("version", "gemm")).lower()) != (4, "gemm"):
        raise ValueError(f"bits = {about.get('bits')!r} in version {about.get('version')!r}; only 4 in 'gemm' is")
    return {"bits": 4}


def gptq_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    bits, form = about.get("bits"), about.get("checkpoint_format") or "gptq"
    if not is_whole(bits, 2) or bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise ValueError(f"bits = {bits!r} in checkpoint_format {form!r}; only 2, 4 or 8 in 'gptq' or 'gptq_v2' are")
    return {"bits": bits, "checkpoint_format": form, "needed": ("g_idx",) if about.get("desc_act") else ()}


def pack_quantized_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    groups = about.get("config_groups")
    found = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()] \
        if isinstance(groups, dict) else []
    schemes: list[dict[str, Any]] = [scheme if isinstance(scheme, dict) else {} for scheme in found]
    bits = [scheme.get("num_bits") if scheme.get("type", "int") == "int" else None for scheme in schemes]
    alike = bool(bits) and is_whole(bits[0], 4) and bits[0] in (4, 8) and bits == bits[:1] * len(bits)
    if about.get("format") != "pack-quantized" or not alike:
        raise ValueError(f"format {about.get('format')!r} with config_groups of {brief(bits)} bits; only "
                         "'pack-quantized' with integers of 4 or 8 bits is")
    needed = {"weight_zero_point": all(scheme.get("symmetric") is False for scheme in schemes),
              "weight_g_idx": all(scheme.get("actorder") in ("group", "dynamic", True) for scheme in schemes)}
    return {"bits": bits[0], "needed": [part for part, wanted in needed.items() if wanted]}


METHODS = {
    "fp8": Method(("weight_scale_inv", "weight"), (), fp8, fp8_settings),
    "awq": Method(("qweight", "qzeros", "scales"), (), awq, awq_settings),
    "gptq": Method(("qweight", "qzeros", "scales"), ("g_idx",), gptq, gptq_settings),
    "compressed-tensors": Method(("weight_packed", "weight_scale", "weight_shape"),
                                 ("weight_zero_point", "weight_g_idx"), pack_quantized, pack_quantized_settings),
}


def check_settings(about: Any, file: Path) -> tuple[str, dict[str, Any]]:
    """(method, its settings) of config.json's quantization_config. Raises InputError for what isn't supported."""
    method = about
    if isinstance(about, dict):  # older files of bitsandbytes, and MLX's, don't name it
        method = about.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in about or "load_in_8bit" in about
                                               else "MLX" if "bits" in about else None)
    if not isinstance(about, dict) or not isinstance(method, str) or method not in METHODS:
        raise InputError(f"{file}: quantization_config: a checkpoint quantized by "
                         f"{brief('an unknown method' if method is None else method)} is not supported, only "
                         f"{', '.join(METHODS)} and GGUF are; take one of these, or the model in bfloat16; python "
                         "qwen3_numba.py --quantize int8 quantizes it")
    try:
        return method, METHODS[method].settings(about)
    except ValueError as error:
        raise InputError(f"{file}: quantization_config: {method} with {error} supported") from error


def unpacked(stored: Mapping[str, Tensor], method: str, settings: Mapping[str, Any],
             folder: Path) -> dict[str, AnyTensor]:
    """The tensors of a quantized checkpoint under the names and with the shapes of an unquantized one.

    The parts of each quantized matrix become one PackedTensor; other tensors stay as they are. Raises InputError for
    absent parts and for shapes and dtypes that don't fit.
    """
    about, tensors = METHODS[method], dict[str, AnyTensor](stored)
    for key in [name for name in stored if name.endswith(f".{about.parts[0]}")]:
        name = key.removesuffix(f".{about.parts[0]}")
        parts = {part: stored[f"{name}.{part}"] for part in about.parts + about.optional if f"{name}.{part}" in stored}
        if absent := [f"{name}.{part}" for part in (*about.parts, *settings.get("needed", ())) if part not in parts]:
            raise InputError(f"{folder}: {some(absent)} is missing")
        if f"{name}.weight" in stored and "weight" not in parts:
            raise InputError(f"{folder}: {name} is there twice, as weight and as {about.parts[0]}")
        try:
            shape, rows, whole = about.function(name, parts, settings)
        except InputError as error:
            raise InputError(f"{folder}: {error}") from error
        for part in parts:
            del tensors[f"{name}.{part}"]
        mapping = parts[about.parts[0]].mapping
        tensors[f"{name}.weight"] = PackedTensor("F32", shape, rows, mapping, settings["bits"], whole)
    if left := [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]:
        raise InputError(f"{folder}: these tensors lack the other parts of {method}, such as {about.parts[0]}: "
                         f"{some(left)}")
    return tensors
