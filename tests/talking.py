"""Models that talk, with random weights in the published layout: what the tests of Qwen3-TTS share.

    python tests/talking.py 0.6B /tmp/random-voice     one of the size that Qwen publishes, 1.3 GB
"""
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors

from configs import ROOT, codec_config, tts_config
from make_random_model import random_tensor

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(about: dict, d: int, inner: int, normed: bool) -> Shapes:
    """A layer's tensors; normed: with QK-norm, else with the scales of the codec's layers."""
    head = about["head_dim"]
    q, kv = about["num_attention_heads"] * head, about["num_key_value_heads"] * head
    shapes: Shapes = {"self_attn.q_proj.weight": (q, d), "self_attn.k_proj.weight": (kv, d),
                      "self_attn.v_proj.weight": (kv, d), "self_attn.o_proj.weight": (d, q),
                      "mlp.gate_proj.weight": (inner, d), "mlp.up_proj.weight": (inner, d),
                      "mlp.down_proj.weight": (d, inner), "input_layernorm.weight": (d,),
                      "post_attention_layernorm.weight": (d,)}
    return shapes | ({"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)} if normed else
                     {"self_attn_layer_scale.scale": (d,), "mlp_layer_scale.scale": (d,)})


def stack_shapes(about: dict, start: str, normed: bool = True) -> Shapes:
    d = about["hidden_size"]
    return {f"{start}norm.weight": (d,)} | {
        f"{start}layers.{i}.{name}": shape for i in range(about["num_hidden_layers"])
        for name, shape in layer_shapes(about, d, about["intermediate_size"], normed).items()}


def dense_shapes(name: str, outputs: int, *inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, *inputs), f"{name}.bias": (outputs,)}


def talker_shapes(config: dict) -> Shapes:
    """The tensors of model.safetensors."""
    talker = config["talker_config"]
    predictor, d, text = talker["code_predictor_config"], talker["hidden_size"], talker["text_hidden_size"]
    within, size, groups = predictor["hidden_size"], predictor["vocab_size"], talker["num_code_groups"] - 1
    shapes = stack_shapes(talker, "talker.model.") | stack_shapes(predictor, "talker.code_predictor.model.")
    shapes |= {"talker.model.codec_embedding.weight": (talker["vocab_size"], d),
               "talker.model.text_embedding.weight": (talker["text_vocab_size"], text),
               "talker.codec_head.weight": (talker["vocab_size"], d)}
    shapes |= dense_shapes("talker.text_projection.linear_fc1", text, text)
    shapes |= dense_shapes("talker.text_projection.linear_fc2", d, text)
    shapes |= {f"talker.code_predictor.model.codec_embedding.{i}.weight": (size, d) for i in range(groups)}
    shapes |= {f"talker.code_predictor.lm_head.{i}.weight": (size, within) for i in range(groups)}
    if within != d:
        shapes |= dense_shapes("talker.code_predictor.small_to_mtp_projection", within, d)
    return shapes | (encoder_shapes(config["speaker_encoder_config"]) if "speaker_encoder_config" in config else {})


def encoder_shapes(about: dict) -> Shapes:
    """The tensors of a speaker encoder, an ECAPA-TDNN."""
    channels, kernels, scale = about["enc_channels"], about["enc_kernel_sizes"], about["enc_res2net_scale"]
    shapes = dense_shapes("blocks.0.conv", channels[0], about["mel_dim"], kernels[0])
    for i in range(1, len(channels) - 1):
        n = channels[i]
        shapes |= dense_shapes(f"blocks.{i}.tdnn1.conv", n, channels[i - 1], 1)
        shapes |= dense_shapes(f"blocks.{i}.tdnn2.conv", n, n, 1)
        for j in range(scale - 1):
            shapes |= dense_shapes(f"blocks.{i}.res2net_block.blocks.{j}.conv", n // scale, n // scale, kernels[i])
        shapes |= dense_shapes(f"blocks.{i}.se_block.conv1", about["enc_se_channels"], n, 1)
        shapes |= dense_shapes(f"blocks.{i}.se_block.conv2", n, about["enc_se_channels"], 1)
    n, attention = channels[-1], about["enc_attention_channels"]
    shapes |= dense_shapes("mfa.conv", n, sum(channels[1:-1]), kernels[-1])
    shapes |= dense_shapes("asp.tdnn.conv", attention, 3 * n, 1) | dense_shapes("asp.conv", n, attention, 1)
    shapes |= dense_shapes("fc", about["enc_dim"], 2 * n, 1)
    return {f"speaker_encoder.{name}": shape for name, shape in shapes.items()}


def codec_shapes(about: dict) -> Shapes:
    """The tensors of speech_tokenizer/model.safetensors that a decoder needs."""
    half, latent, d = about["codebook_dim"] // 2, about["latent_dim"], about["hidden_size"]
    shapes = dense_shapes("pre_conv.conv", latent, about["codebook_dim"], 3)
    for name, n in (("rvq_first", 1), ("rvq_rest", about["num_quantizers"] - 1)):
        shapes |= {f"quantizer.{name}.output_proj.weight": (about["codebook_dim"], half, 1),
                   f"quantizer.{name}.input_proj.weight": (half, about["codebook_dim"], 1)}
        for i in range(n):
            book = f"quantizer.{name}.vq.layers.{i}._codebook"
            shapes |= {f"{book}.embedding_sum": (about["codebook_size"], half),
                       f"{book}.cluster_usage": (about["codebook_size"],)}
    shapes |= stack_shapes(about, "pre_transformer.", False)
    shapes |= dense_shapes("pre_transformer.input_proj", d, latent)
    shapes |= dense_shapes("pre_transformer.output_proj", latent, d)
    for i, ratio in enumerate(about["upsampling_ratios"]):
        shapes |= dense_shapes(f"upsample.{i}.0.conv", latent, latent, ratio)
        shapes |= dense_shapes(f"upsample.{i}.1.dwconv.conv", latent, 1, 7)
        shapes |= {f"upsample.{i}.1.norm.{name}": (latent,) for name in ("weight", "bias")}
        shapes |= dense_shapes(f"upsample.{i}.1.pwconv1", 4 * latent, latent)
        shapes |= dense_shapes(f"upsample.{i}.1.pwconv2", latent, 4 * latent)
        shapes |= {f"upsample.{i}.1.gamma": (latent,)}
    n = about["decoder_dim"]
    shapes |= dense_shapes("decoder.0.conv", n, latent, 7)
    for i, rate in enumerate(about["upsample_rates"], 1):
        start, n = f"decoder.{i}.block", n // 2
        shapes |= {f"{start}.0.{name}": (2 * n,) for name in ("alpha", "beta")}
        shapes |= {f"{start}.1.conv.weight": (2 * n, n, 2 * rate), f"{start}.1.conv.bias": (n,)}
        for j in (2, 3, 4):
            shapes |= {f"{start}.{j}.{act}.{name}": (n,) for act in ("act1", "act2") for name in ("alpha", "beta")}
            for name, kernel in (("conv1", 7), ("conv2", 1)):
                shapes |= dense_shapes(f"{start}.{j}.{name}.conv", n, n, kernel)
    last = len(about["upsample_rates"]) + 1
    shapes |= {f"decoder.{last}.{name}": (n,) for name in ("alpha", "beta")}
    return {f"decoder.{name}": shape for name, shape in (shapes | dense_shapes(
        f"decoder.{last + 1}.conv", 1, n, 7)).items()}


def random_tensors(shapes: Shapes, dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Biases, alpha and beta scatter around 0, other vectors around 1; no sound is cut at 1, heads are decided."""
    rng, found = np.random.default_rng(seed), {}
    scales = {"codec_head.weight": 4, ".conv2.conv.weight": 0.2, ".bias": 0, ".alpha": 0, ".beta": 0} | dict.fromkeys(
        [name for name in shapes if ".lm_head." in name], 4) | dict.fromkeys(
        [name for name, shape in shapes.items() if shape[0] == 1], 0.1)
    for name, shape in shapes.items():
        flat = shape if len(shape) < 3 else (shape[0], math.prod(shape[1:]))
        scale = next((scale for end, scale in scales.items() if name.endswith(end)), 1)
        found[name] = random_tensor(rng, flat, dtype, scale).reshape(shape)
    return found


def write_tensors(file: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    tensors = {name: np.ascontiguousarray(data) for name, data in tensors.items()}
    safetensors.serialize_file({name: safetensors.TensorSpec(dtype=dtype, shape=data.shape, data_ptr=data.ctypes.data,
                                                             data_len=data.nbytes) for name, data in tensors.items()},
                               file, {"format": "pt"})


def published(size: str) -> tuple[dict, dict]:
    """config.json of Qwen3-TTS-12Hz-0.6B-CustomVoice or of the 1.7B, and of the codec; with the bundled tokenizer."""
    config, codec = tts_config(size, groups=16), codec_config(16)
    hidden, inner = {"0.6B": (1024, 3072), "1.7B": (2048, 6144)}[size]
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    talker = config["talker_config"]
    talker |= heads | {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 28, "vocab_size": 3072,
                       "text_hidden_size": 2048, "max_position_embeddings": 32768, "codec_pad_id": 2148,
                       "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154,
                       "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
                       "rope_scaling": talker["rope_scaling"] | {"mrope_section": [24, 20, 20]}}
    talker["code_predictor_config"] |= heads | {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 2048,
                                                "num_hidden_layers": 5}
    codec["decoder_config"] |= {
        "latent_dim": 1024, "codebook_dim": 512, "codebook_size": 2048, "decoder_dim": 1536, "hidden_size": 512,
        "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_hidden_layers": 8, "sliding_window": 72, "upsample_rates": [8, 5, 4, 3]}
    return config, codec | {"decode_upsample_rate": 1920, "encode_downsample_rate": 1920}


GENERATION = {"do_sample": True, "top_k": 50, "top_p": 1.0, "temperature": 0.9, "repetition_penalty": 1.05,
              "subtalker_dosample": True, "subtalker_top_k": 50, "subtalker_top_p": 1.0, "subtalker_temperature": 0.9,
              "max_new_tokens": 24}


def make_talking(path: Path, config: dict | None = None, codec: dict | None = None, dtype: str = "float32",
                 seed: int = 0) -> Path:
    """A random Qwen3-TTS in the folder `path`, with the bundled model's tokenizer."""
    config, codec = config or tts_config(), codec or codec_config()
    inner = path / "speech_tokenizer"
    inner.mkdir(parents=True, exist_ok=True)
    for folder, about in ((path, config), (inner, codec)):
        (folder / "config.json").write_text(json.dumps(about, indent=2))
    write_tensors(path / "model.safetensors", random_tensors(talker_shapes(config), dtype, seed), dtype)
    codec_tensors = random_tensors(codec_shapes(codec["decoder_config"]), "float32", seed + 1)
    write_tensors(inner / "model.safetensors", codec_tensors, "float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "demo" / name, path / name)
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


if __name__ == "__main__":
    make_talking(Path(sys.argv[2]), *published(sys.argv[1]), dtype="bfloat16")
