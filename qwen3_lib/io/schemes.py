"""What config.json says of a published quantization, method by method: which schemes the matrices may have.

A scheme says how many bits a number has and which numbers share a scale. Most files have one; "mixed" files have some,
and the shapes of a matrix's parts tell which one it has. These functions take the object quantization_config and raise
ValueError for what formats.py can't read; the message's end, "supported", is added there.
"""
from collections.abc import Mapping
from typing import Any

from qwen3_lib.io.errors import brief, is_whole, some
from qwen3_lib.io.mlx import qwens_name

Settings = Mapping[str, Any]

PACKINGS = {"auto": "gptq", "auto_round:gptq": "gptq", "auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2",
            "auto_round:auto_gptq:exllamav2": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round:awq": "awq",
            "auto_round:auto_awq": "awq"}
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
         "mixed-precision")


def fp8_schemes(about: Settings) -> list[Settings]:
    size: Any = about.get("weight_block_size")
    if about.get("fmt", "e4m3") != "e4m3" or not is_block(size) or None in size:
        raise ValueError(f"fmt = {about.get('fmt')!r} with weight_block_size = {size!r}; only 'e4m3' with blocks is")
    return [{"type": "float", "bits": 8, "block": size}]


def is_block(size: Any) -> bool:
    """Whether this is a block's height and width; None stands for all of the matrix."""
    return isinstance(size, list) and len(size) == 2 and all(n is None or is_whole(n, 1) and n <= 2**20 for n in size)


def group_size(about: Settings) -> int | None:
    """Inputs of a group, None for all of them. AWQ's and GPTQ's default is 128."""
    size = about.get("group_size", about.get("q_group_size", 128))
    if size != -1 and not is_block([size, size]):
        raise ValueError(f"group_size = {size!r}; only a whole number above 0, or -1 for all inputs, is")
    return None if size == -1 else size


def awq_schemes(about: Settings) -> list[Settings]:
    if (about.get("bits", about.get("w_bit")), str(about.get("version", "gemm")).lower()) != (4, "gemm"):
        raise ValueError(f"bits = {about.get('bits')!r} in version {about.get('version')!r}; only 4 in 'gemm' is")
    return [{"group_size": group_size(about), "layout": "awq"}]


def gptq_schemes(about: Settings) -> list[Settings]:
    """The scheme of most matrices, then the schemes in GPTQModel's `dynamic` and auto-round's `extra_config`."""
    form, tables = about.get("checkpoint_format") or "gptq", [about.get("dynamic"), about.get("extra_config")]
    changes = [change for table in tables if isinstance(table, dict) for change in table.values()]
    schemes: list[Settings] = []
    for own in [about, *({**about, **change} for change in changes if isinstance(change, dict))]:
        bits = own.get("bits")
        if is_whole(bits, 2) and bits in (2, 4, 8) and form in ("gptq", "gptq_v2"):
            schemes.append({"bits": bits, "layout": form, "group_size": group_size(own),
                            "act_order": bool(own.get("desc_act"))})
        elif own is about:
            raise ValueError(f"bits = {bits!r} in checkpoint_format {form!r}; only 2, 4 or 8 in 'gptq' or 'gptq_v2' "
                             "are")
    return schemes


def auto_round_schemes(about: Settings) -> list[Settings]:
    packing = about.get("packing_format", "auto")
    layout = PACKINGS.get(packing if isinstance(packing, str) else "")
    plain: Settings = {"data_type": (None, "int"), "act_bits": (None, 16, 32), "rotation_config": (None, {}, "")}
    if other := [f"{key} = {brief(about[key])}" for key, values in plain.items() if about.get(key) not in values]:
        raise ValueError(f"{some(other)} isn't")
    if layout is None:
        raise ValueError(f"packing_format {brief(packing)}; only {some(PACKINGS, len(PACKINGS))} are")
    return (awq_schemes if layout == "awq" else gptq_schemes)({**about, "checkpoint_format": layout})


def compressed_schemes(about: Settings) -> list[Settings]:
    """The schemes in config_groups, each for some of the matrices: bits, and the blocks that share a scale."""
    if about.get("format") not in CT_FORMATS:
        raise ValueError(f"format {brief(about.get('format'))}; only {some(CT_FORMATS, len(CT_FORMATS))} are")
    if about.get("transform_config") not in (None, {}, {"config_groups": {}}):
        raise ValueError("transform_config, which changes activations, is not")
    groups = about.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"config_groups = {brief(groups)} are not")
    schemes: list[Settings] = []
    for weights in filter(None, (group.get("weights") for group in groups.values())):
        own = weights if isinstance(weights, dict) else {}
        kind, bits, size = own.get("type", "int"), own.get("num_bits", 8), own.get("group_size")
        usual = "tensor" if size is None else "channel" if size == -1 else "group"
        blocks: dict[str, Any] = {"tensor": [None, None], "channel": [1, None], "group": [1, size or 0],
                                  "block": own.get("block_structure")}
        block: Any = blocks.get(str(own.get("strategy") or usual))
        known = (kind, bits) in [("int", 2), ("int", 4), ("int", 8), ("float", 8)] and is_whole(bits, 2)
        if not known or not is_block(block):
            raise ValueError(f"weights of {brief(weights, 200)} are not")
        schemes.append({"type": kind, "bits": bits, "block": block, "zero_point": own.get("symmetric") is False,
                        "act_order": own.get("actorder") in ("group", "dynamic", True)})
    if not schemes:
        raise ValueError("config_groups without weights are not")
    return schemes


def bitsandbytes_schemes(about: Settings) -> list[Settings]:
    if about.get("load_in_4bit") and about.get("bnb_4bit_quant_type", "nf4") != "nf4":  # 8 bits: named, but unused
        raise ValueError(f"bnb_4bit_quant_type = {brief(about['bnb_4bit_quant_type'])}; only nf4 is")
    return [{}]


MLX_MODES = {"affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)), "mxfp4": ((4,), (32,))}  # bits, sizes of groups


def mlx_schemes(about: Settings) -> list[Settings]:
    """The scheme of most matrices, with those of other `modules` by their names."""
    own = {qwens_name(name): mlx_scheme(each) for name, each in about.items() if isinstance(each, dict)}
    return [mlx_scheme(about) | {"modules": own}]


def mlx_scheme(about: Settings) -> dict[str, Any]:
    mode = str(about.get("mode", "affine"))
    bits, size = about.get("bits", 4), about.get("group_size", 64 if mode == "affine" else 32)
    if mode not in MLX_MODES or bits not in MLX_MODES[mode][0] or size not in MLX_MODES[mode][1]:
        raise ValueError(f"mode {brief(mode)}, bits = {brief(bits)} and group_size = {brief(size)}; only 2 to 6 or 8 "
                         "bits in groups of 32, 64 or 128, and mxfp4, are")
    return {"mode": mode, "widths": MLX_MODES[mode][0], "group_size": int(size)}
