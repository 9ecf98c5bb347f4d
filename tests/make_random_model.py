"""Writes a model folder with random weights: the shape of an official Qwen3, or of any config.json.

    python tests/make_random_model.py 0.6B /tmp/random-0.6B
    python tests/make_random_model.py path/to/config.json /tmp/random --dtype float16 --shards 3

The weights are normally distributed. The tokenizer files are those of the bundled model, unless --tokenizer names a
folder with others.
"""
import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import safetensors

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qwen3_5 import HybridConfig  # noqa: E402
from qwen3_lib.io.models import description_of  # noqa: E402

# hidden_size, intermediate_size, layers, heads, KV heads, tied head
SIZES = {"0.6B": (1024, 3072, 28, 16, 8, True), "1.7B": (2048, 6144, 28, 16, 8, True),
         "4B": (2560, 9728, 36, 32, 8, True), "8B": (4096, 12288, 36, 32, 8, False),
         "14B": (5120, 17408, 40, 40, 8, False), "32B": (5120, 25600, 64, 64, 8, False)}
# Norms of a Qwen3.5 are stored as their distance from 1; the state of a head keeps half of itself for some 20 tokens.
HYBRID_SCALES = {"input_layernorm": 0, "post_attention_layernorm": 0, "q_norm": 0, "k_norm": 0, "A_log": -3,
                 "pre_fc_norm_embedding": 0, "pre_fc_norm_hidden": 0, "hc_norm": 0, "norm_key": 0, "norm_query": 0,
                 "norm_conv": 0, "q_layernorm": 0, "k_layernorm": 0}


def official_config(size: str) -> dict:
    """config.json as the Qwen3 of this size has it."""
    hidden, inner, layers, heads, kv_heads, tied = SIZES[size]
    return {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": inner,
            "max_position_embeddings": 40960, "max_window_layers": layers, "model_type": "qwen3",
            "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
            "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
            "vocab_size": 151936}


def tower_shapes(about: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a tower with this vision_config."""
    d, inner, size, joined = (about["hidden_size"], about["intermediate_size"], about["patch_size"],
                              4 * about["hidden_size"])
    parts: dict[str, tuple[int, ...]] = {"patch_embed.proj": (d, 3, about["temporal_patch_size"], size, size)}
    for i in range(about["depth"]):
        parts |= {f"blocks.{i}.{name}": shape for name, shape in (
            ("norm1", (d,)), ("norm2", (d,)), ("attn.qkv", (3 * d, d)), ("attn.proj", (d, d)),
            ("mlp.linear_fc1", (inner, d)), ("mlp.linear_fc2", (d, inner)))}
    for name in ("merger", *(f"deepstack_merger_list.{i}" for i in range(len(about["deepstack_visual_indexes"])))):
        parts |= {f"{name}.norm": (d if name == "merger" else joined,), f"{name}.linear_fc1": (joined, joined),
                  f"{name}.linear_fc2": (about["out_hidden_size"], joined)}
    shapes = {f"{name}.weight": shape for name, shape in parts.items()} | {
        f"{name}.bias": shape[:1] for name, shape in parts.items()}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()} | {
        "model.visual.pos_embed.weight": (about["num_position_embeddings"], d)}


def audio_tower_shapes(about: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a Qwen3-ASR's tower with this audio_config, without a prefix."""
    d, inner, channels = about["d_model"], about["encoder_ffn_dim"], about["downsample_hidden_size"]
    pitches = -(-about["num_mel_bins"] // 8)
    parts: dict[str, tuple[int, ...]] = {"conv2d1": (channels, 1, 3, 3), "ln_post": (d,), "proj1": (d, d),
                                         "proj2": (about["output_dim"], d)}
    parts |= dict.fromkeys(("conv2d2", "conv2d3"), (channels, channels, 3, 3))
    for i in range(about["encoder_layers"]):
        parts |= {f"layers.{i}.self_attn.{name}_proj": (d, d) for name in ("q", "k", "v", "out")}
        parts |= {f"layers.{i}.{name}": (d,) for name in ("self_attn_layer_norm", "final_layer_norm")}
        parts |= {f"layers.{i}.fc1": (inner, d), f"layers.{i}.fc2": (d, inner)}
    return {f"{name}.weight": shape for name, shape in parts.items()} | {
        f"{name}.bias": shape[:1] for name, shape in parts.items()} | {"conv_out.weight": (d, channels * pitches)}


def hearing(shapes: dict, config: dict) -> dict[str, tuple[int, ...]]:
    """A Qwen3-ASR's tensors, as Qwen or transformers names them, from those of its language model."""
    if "thinker_config" in config:
        tower = audio_tower_shapes(config["thinker_config"]["audio_config"])
        n = config["thinker_config"].get("classify_num")
        shapes |= {"lm_head.weight": (n, shapes["model.norm.weight"][0])} if n else {}
        return {f"thinker.{name}": shape for name, shape in shapes.items()} | {
            f"thinker.audio_tower.{name}": shape for name, shape in tower.items()}
    tower = audio_tower_shapes(config["audio_config"])
    shapes |= {"score.weight": (config["num_labels"], *shapes["model.norm.weight"])} if "num_labels" in config else {}
    return {name.replace("model.", "model.language_model.", 1): shape for name, shape in shapes.items()} | {
        (f"model.multi_modal_projector.linear_{name[4:]}" if name.startswith("proj") else f"model.audio_tower.{name}"):
        shape for name, shape in tower.items()}


def joined(shapes: dict) -> dict[str, tuple[int, ...]]:
    """A Qwen3-Next's tensors as they are published, from those of a Qwen3.5: two projections of a delta net are one."""
    out = {}
    for name, shape in shapes.items():
        for first, second in (("qkv", "z"), ("b", "a")):
            if name.endswith(f".in_proj_{second}.weight"):
                name = name.replace(f"in_proj_{second}", f"in_proj_{first}{second}")
                shape = (shape[0] + out.pop(name.replace(f"{first}{second}.", f"{first}."))[0], shape[1])
        out[name] = shape
    return out


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1) -> np.ndarray:
    """Norms scatter around `scale`; a matrix [outputs, inputs] makes what flows through it `scale` times as large.

    bfloat16 comes as uint16.
    """
    values = rng.standard_normal(shape, np.float32)
    inputs = math.prod(shape[1:]) if len(shape) > 3 else math.prod(shape[1:2])
    values = scale + values / 10 if len(shape) == 1 else values / np.float32(math.sqrt(inputs) / scale)
    if dtype == "bfloat16":  # cut to the upper half, rounded to nearest
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return values.astype({"float16": "<f2", "float32": "<f4"}[dtype])


def published(name: str, behind: str) -> str:
    """The name in a file; `behind`: how names of the layer behind the others begin here, which is an MTP head's."""
    within = name.removeprefix(behind)
    in_layer = within.startswith(("self_attn.", "mlp.", "attn_hyper", "mlp_hyper")) or "layernorm" in within
    return name if within == name else f"mtp.{'layers.0.' * in_layer}{within}"


def make_random_model(config: dict, out: Path, dtype: str = "bfloat16", shards: int = 1, seed: int = 0,
                      tokenizer: Path = ROOT / "demo", scales: Mapping[str, float] = MappingProxyType({})) -> Path:
    """Writes config.json, the weights in `dtype` over so many shards, and the tokenizer files into the folder `out`.

    `scales`, by the last part of a tensor's name such as o_proj, makes its weights larger or smaller than
    random_tensor does.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = config.get("text_config", config)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    about = description_of(config, out / "config.json")
    sizes = about.config(["mtp.fc.weight"])
    shapes, behind = about.kind.shapes(sizes), f"model.layers.{sizes.num_hidden_layers}."
    scales = (HYBRID_SCALES if isinstance(sizes, HybridConfig) else {}) | dict(scales)
    if config.get("tie_word_embeddings") or config["model_type"] == "qwen3_asr":
        del shapes["lm_head.weight"]
    if "vision_config" in config:
        shapes = {name.replace("model.", "model.language_model.", 1): shape for name, shape in shapes.items()}
        shapes |= tower_shapes(config["vision_config"])
    if config["model_type"] == "qwen3_asr":
        shapes = hearing(shapes, config)
    if config["model_type"] == "qwen3_next":
        shapes = joined(shapes)
    names = list(shapes)
    files = ["model.safetensors"] if shards == 1 else \
        [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    rng, weight_map = np.random.default_rng(seed), {}
    for file, part in zip(files, np.array_split(np.arange(len(names)), shards)):
        tensors = {published(names[i], behind): random_tensor(rng, shapes[names[i]], dtype, scales.get(
            names[i].removesuffix(".weight").split(".")[-1], int(names[i].endswith("weight")))) for i in part}
        specs = {name: safetensors.TensorSpec(dtype=dtype, shape=data.shape, data_ptr=data.ctypes.data,
                                              data_len=data.nbytes)
                 for name, data in tensors.items()}
        safetensors.serialize_file(specs, out / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if shards > 1:
        (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)
    return out


def let_head_agree(folder: Path, hidden: bool = False) -> None:
    """Changes a Qwen3.5's weights so that its MTP head guesses what the model would draw after the next token alone.

    The head passes on the token's embedding: its fc takes that half of what it gets, its layer adds nothing. It is
    right as often as the model's own layers change little. Half of the last norm's signs change, so that a token isn't
    followed by itself. hidden: the head passes on the hidden state instead.
    """
    for file in folder.glob("*.safetensors"):
        start = 8 + int.from_bytes(file.open("rb").read(8), "little")
        for name, about in json.loads(file.open("rb").read(start)[8:]).items():
            if name == "__metadata__":
                continue
            dtype, shape = {"BF16": "<u2", "F32": "<f4"}[about["dtype"]], tuple(about["shape"])
            data = np.memmap(file, dtype, "r+", start + about["data_offsets"][0], shape)
            signs = np.random.default_rng(0).choice(np.array([0, -2], np.float32), shape[-1])  # their distance from 1
            if name == "model.norm.weight" or name == "mtp.norm.weight" and not hidden:
                values = signs
            elif name == "mtp.fc.weight":
                values = np.eye(*shape, shape[0] * hidden, dtype=np.float32)
            elif name.startswith("mtp.") and (len(shape) == 1 or name.endswith(("o_proj.weight", "down_proj.weight"))):
                values = np.zeros(shape, np.float32)
            else:
                continue
            data[:] = values.view("<u4") >> 16 if dtype == "<u2" else values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help=f"{', '.join(SIZES)}, or a config.json")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--layers", type=int, help="fewer layers than the config has, at the full width")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "demo", help="folder whose tokenizer files are copied")
    args = parser.parse_args()
    config = official_config(args.config) if args.config in SIZES else json.loads(Path(args.config).read_text())
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    print(make_random_model(config, args.out, args.dtype, args.shards, args.seed, args.tokenizer))


if __name__ == "__main__":
    main()
