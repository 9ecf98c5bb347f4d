"""Small model shapes that together cover the differences of official checkpoints, and where files lie."""
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared/data/qwen3"  # files of the official checkpoints, where there are some
QWEN3_5 = SHARED.parent / "qwen3_5"  # the same of Qwen3.5
needs_official_files = pytest.mark.skipif(not SHARED.is_dir() or not QWEN3_5.is_dir(),
                                          reason=f"{SHARED.parent} has no files of the official checkpoints")
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris.\n"
FORM = {"type": "object", "additionalProperties": False, "required": ["capital", "continent"], "properties": {
    "capital": {"enum": ["Berlin", "Paris", "Rome"]}, "continent": {"enum": ["Africa", "Asia", "Europe"]}}}

BASE = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": None, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
        "intermediate_size": 64, "max_position_embeddings": 512, "max_window_layers": 3, "model_type": "qwen3",
        "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "float32", "use_cache": True, "use_sliding_window": False, "vocab_size": 320}
TINY = BASE | {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
               "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
VOCABULARY = json.loads((ROOT / "demo/config.json").read_text())["vocab_size"]
CLI_CONFIG = BASE | {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 100_000}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def transformers_5(config: dict) -> dict:
    """The same config in the dialect that transformers 5 writes."""
    rope = {"rope_theta": config["rope_theta"]} | (config["rope_scaling"] or {"rope_type": "default"})
    rest = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    return rest | {"rope_parameters": rope, "dtype": config["torch_dtype"],
                   "layer_types": ["full_attention"] * config["num_hidden_layers"], "pad_token_id": None,
                   "transformers_version": "5.0.0"}


# name -> (config, dtype of the file, number of shards)
CASES = {
    "group of 2, tied": (BASE, "float32", 1),
    "group of 1": (BASE | {"num_key_value_heads": 4}, "float32", 1),
    "group of 4, untied": (BASE | {"num_attention_heads": 8, "tie_word_embeddings": False}, "float32", 1),
    "group of 5, head_dim 24": (BASE | {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24},
                                "float32", 1),
    "odd sizes": (BASE | {"hidden_size": 37, "intermediate_size": 51, "vocab_size": 311, "head_dim": 6,
                          "num_attention_heads": 3, "num_key_value_heads": 3}, "float32", 1),
    "head_dim 128": (BASE | {"head_dim": 128, "hidden_size": 48}, "bfloat16", 1),
    "theta 1e4": (BASE | {"rope_theta": 10000.0}, "bfloat16", 1),
    "theta 1e7, untied": (BASE | {"rope_theta": 10000000, "tie_word_embeddings": False}, "bfloat16", 2),
    "YaRN": (BASE | {"rope_scaling": YARN, "head_dim": 32}, "float32", 1),
    "YaRN, transformers 5": (transformers_5(BASE | {"rope_scaling": YARN | {"beta_fast": 16, "attention_factor": 1.2},
                                                    "head_dim": 64}), "float32", 1),
    "transformers 5": (transformers_5(BASE), "bfloat16", 1),
    "float16": (BASE, "float16", 1),
    "three shards": (BASE | {"num_hidden_layers": 5}, "float16", 3),
    "YaRN, mscale": (BASE | {"head_dim": 32, "rope_scaling": YARN | {
        "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}, "float32", 1),
    "YaRN, factor of the sizes": (BASE | {"head_dim": 32, "rope_scaling": YARN | {"factor": None}}, "float32", 1),
    "defaults": ({key: value for key, value in BASE.items() if key not in (
        "head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings")} | {
        "num_attention_heads": 32, "architectures": None, "mlp_bias": False, "output_attentions": False},
                 "bfloat16", 1),
    "eps 1e-5, one layer": (BASE | {"rms_norm_eps": 1e-5, "num_hidden_layers": 1}, "bfloat16", 1),
}

# Qwen3.5: three layers keep a state, and the fourth attends. The ratios of heads are those of the family.
HYBRID = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_act": "silu",
          "eos_token_id": None, "bos_token_id": None, "attention_bias": False, "attention_dropout": 0.0,
          "initializer_range": 0.02, "head_dim": 32, "hidden_size": 48, "intermediate_size": 80,
          "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
          "linear_num_value_heads": 2, "linear_value_head_dim": 16, "max_position_embeddings": 2048,
          "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
          "use_cache": True,
          "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                              "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
          "tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size": 320}
HYBRID_MOE = {key: value for key, value in HYBRID.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_attention_heads": 8,
    "linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40, "tie_word_embeddings": False}
# Qwen3-Next as published: flat, without a key for its MTP head.
NEXT = {key: value for key, value in HYBRID_MOE.items() if key != "rope_parameters"} | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "intermediate_size": 80, "norm_topk_prob": True, "rope_theta": 10000000,
    "rope_scaling": None, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "linear_value_head_dim": 24}
# Qwen3.8-Flash-Next's language model: a budget of 2 blocks, and a table in three parts.
FLASH = {key: value for key, value in HYBRID_MOE.items() if key != "norm_topk_prob"} | {
    "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", "eos_token_id": 7, "head_dim": 32,
    "hc_count": 4, "hc_lowrank": 12, "ple_layer_ids": [2], "ple_embed_dim": 48, "ple_conv_kernel_size": 4,
    "ngram_size": 3, "heads_per_ngram": 4, "ngram_vocab_size_base": 300, "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 3, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "output_gate_type": "sigmoid"}
HYBRIDS = {  # name -> config
    "tied": HYBRID,
    "untied, two value heads to a key head": HYBRID | {"tie_word_embeddings": False, "linear_num_value_heads": 4},
    "three value heads to a key head, six layers": HYBRID | {"linear_num_value_heads": 6, "num_attention_heads": 6,
                                                             "num_hidden_layers": 6, "linear_value_head_dim": 24},
    "layer_types, half of a head turned, a wider convolution": HYBRID | {
        "layer_types": ["full_attention", "linear_attention"] * 2, "linear_conv_kernel_dim": 6,
        "rope_parameters": HYBRID["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}},
    "mixture": HYBRID_MOE,
    "Qwen3-Next": NEXT,
    "Qwen3-Next, one value head to a key head, dense layers": NEXT | {
        "linear_num_value_heads": 2, "mlp_only_layers": [1], "norm_topk_prob": False, "num_hidden_layers": 6},
}
# The family's ratios: hidden size, FFN (of an expert), query and KV heads, value heads, tied head, experts.
HYBRID_SIZES = {"0.8B": (1024, 3584, 8, 2, 16, True, 0), "2B": (2048, 6144, 8, 2, 16, True, 0),
                "4B": (2560, 9216, 16, 4, 32, True, 0), "9B": (4096, 12288, 16, 4, 32, False, 0),
                "27B": (5120, 17408, 24, 4, 48, False, 0), "35B-A3B": (2048, 512, 16, 2, 32, False, 256),
                "397B-A17B": (4096, 1024, 32, 2, 64, False, 512)}

# Models that see: a tower and a language model. Sizes of official towers: depth, hidden size, FFN, heads, deepstack.
TOWERS = {"0.8B": (12, 768, 3072, 12, []), "2B, 4B": (24, 1024, 4096, 16, []), "9B, 27B": (27, 1152, 4304, 16, []),
          "VL 2B, 4B": (24, 1024, 4096, 16, [5, 11, 17]), "VL 8B, 32B, MoE": (27, 1152, 4304, 16, [8, 16, 24])}
# Of Qwen3-VL: hidden size, FFN (of an expert), query and KV heads, tied head, experts, its tower.
VL_SIZES = {"2B": (2048, 6144, 16, 8, True, 0, "VL 2B, 4B"), "4B": (2560, 9728, 32, 8, True, 0, "VL 2B, 4B"),
            "8B": (4096, 12288, 32, 8, False, 0, "VL 8B, 32B, MoE"),
            "32B": (5120, 25600, 64, 8, False, 0, "VL 8B, 32B, MoE"),
            "30B-A3B": (2048, 768, 32, 4, False, 128, "VL 8B, 32B, MoE"),
            "235B-A22B": (4096, 1536, 64, 4, False, 128, "VL 8B, 32B, MoE")}
SEEING = {"image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 4, "vision_end_token_id": 5}


def tower_config(name: str, out_hidden_size: int) -> dict:
    """An official tower with heads of their own size, but a quarter of them, and a fifth of the blocks."""
    depth, hidden, inner, heads, deep = TOWERS[name]
    return {"deepstack_visual_indexes": [i // 5 for i in deep], "depth": depth // 5, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": hidden // 4, "in_channels": 3, "intermediate_size": inner // 4, "num_heads": heads // 4,
            "num_position_embeddings": 2304, "out_hidden_size": out_hidden_size, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2}


def vl_config(size: str) -> dict:
    """A Qwen3-VL at 1/16 of the widths and 1/4 of the heads, with one layer more than deepstack reaches."""
    hidden, inner, heads, kv_heads, tied, experts, tower = VL_SIZES[size]
    kind = f"qwen3_vl{'_moe' * bool(experts)}"
    text = {key: BASE[key] for key in ("attention_bias", "hidden_act", "rms_norm_eps", "max_position_embeddings")} | {
        "head_dim": 32, "hidden_size": hidden // 16, "intermediate_size": inner // 16, "model_type": f"{kind}_text",
        "num_attention_heads": heads // 4, "num_hidden_layers": 4, "num_key_value_heads": kv_heads // 4,
        "rope_theta": 5000000, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5],
                                                "rope_type": "default"},
        "vocab_size": 970, "max_position_embeddings": 8192, "eos_token_id": None, "tie_word_embeddings": tied}
    text |= {"num_experts": experts // 16, "num_experts_per_tok": 4, "moe_intermediate_size": inner // 16,
             "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []} if experts else {}
    return SEEING | {"architectures": [f"Qwen3VL{'Moe' * bool(experts)}ForConditionalGeneration"], "model_type": kind,
                     "text_config": text, "tie_word_embeddings": tied,
                     "vision_config": tower_config(tower, hidden // 16)}


def seeing_hybrid(config: dict, tower: str) -> dict:
    """A Qwen3.5 as published: its text part nested, with a tower."""
    kind = config["model_type"].removesuffix("_text")
    text = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")} | {
        "max_position_embeddings": 8192, "vocab_size": 970}
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen4_exp": "Qwen4Exp"}[kind]
    return SEEING | {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": text,
                     "tie_word_embeddings": config["tie_word_embeddings"],
                     "vision_config": tower_config(tower, config["hidden_size"])}

SPEECH_TOKENS = {"<|audio_start|>": 4076, "<|audio_pad|>": 4077, "<|audio_end|>": 4078, "<asr_text>": 4079,
                 "<timestamp>": 4080}
# Qwen3-ASR at 1/8 of its widths: of the tower d_model, layers, heads, FFN; of the text model hidden size, FFN, heads.
ASR_SIZES = {"0.6B": (112, 4, 2, 448, 128, 384, 2), "1.7B": (128, 5, 2, 512, 256, 768, 4)}


def asr_config(size: str, native: bool = False, n_classes: int = 0) -> dict:
    """A Qwen3-ASR as Qwen published it, or, `native`, as transformers has it; with classes, a Qwen3-ForcedAligner."""
    d, layers, heads, inner, hidden, ffn, text_heads = ASR_SIZES[size]
    audio = {"model_type": "qwen3_asr_encoder" if native else "qwen3_asr_audio_encoder", "num_mel_bins": 128,
             "d_model": d, "encoder_layers": layers, "encoder_attention_heads": heads, "encoder_ffn_dim": inner,
             "output_dim": hidden, "activation_function": "gelu", "n_window": 50, "n_window_infer": 800,
             "downsample_hidden_size": 24, "scale_embedding": False}
    text = {"model_type": "qwen3", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 3,
            "num_attention_heads": text_heads, "num_key_value_heads": text_heads // 2, "head_dim": 32,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "vocab_size": VOCABULARY,
            "rope_theta": 1000000, "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5],
                                                    "mrope_interleaved": True},
            "max_position_embeddings": 8192, "tie_word_embeddings": True}
    text |= {"tie_word_embeddings": not n_classes}
    parts = {"audio_config": audio, "text_config": text, "audio_token_id": SPEECH_TOKENS["<|audio_pad|>"]}
    if native:
        name = "TokenClassification" if n_classes else "ConditionalGeneration"
        parts |= {"num_labels": n_classes} if n_classes else {}
        return {"architectures": [f"Qwen3ASRFor{name}"], "model_type": "qwen3_asr", "eos_token_id": [1, 2],
                "tie_word_embeddings": not n_classes} | parts
    parts |= {"classify_num": n_classes} if n_classes else {}
    return {"architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr",
            "support_languages": ["English"], "thinker_config": {"model_type": "qwen3_asr"} | parts}

# Qwen3-TTS at 1/16 of its widths: the talker's hidden size and FFN, and tts_model_size.
TTS_SIZES = {"0.6B": (64, 192, "0b6"), "1.7B": (128, 384, "1b7")}
VOICES = {"serena": 1081, "dylan": 1082, "eric": 1083}


def tts_config(size: str = "0.6B", kind: str = "custom_voice", groups: int = 6) -> dict:
    """A Qwen3-TTS as Qwen publishes it, with `groups` codes of 64 in a frame."""
    hidden, inner, name = TTS_SIZES[size]
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
             "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 4096,
             "num_code_groups": groups}
    predictor = shape | {"model_type": "qwen3_tts_talker_code_predictor", "hidden_size": 64, "intermediate_size": 192,
                         "num_hidden_layers": 2, "vocab_size": 64}
    talker = shape | {"model_type": "qwen3_tts_talker", "hidden_size": hidden, "intermediate_size": inner,
                      "num_hidden_layers": 3, "vocab_size": 64 + 1024, "text_vocab_size": VOCABULARY,
                      "text_hidden_size": 48, "tie_word_embeddings": False,
                      "rope_scaling": {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
                      "codec_pad_id": 1072, "codec_bos_id": 1073, "codec_eos_token_id": 1074, "codec_think_id": 1075,
                      "codec_nothink_id": 1076, "codec_think_bos_id": 1077, "codec_think_eos_id": 1078,
                      "codec_language_id": {"chinese": 1079, "english": 1080, "sichuan_dialect": 1084,
                                            "beijing_dialect": 1085},
                      "spk_id": VOICES if kind == "custom_voice" else {},
                      "spk_is_dialect": {"serena": False, "dylan": "beijing_dialect", "eric": "sichuan_dialect"},
                      "code_predictor_config": predictor}
    about = {"architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts", "talker_config": talker,
             "tokenizer_type": "qwen3_tts_tokenizer_12hz", "tts_model_size": name, "tts_model_type": kind,
             "tts_pad_token_id": 4076, "tts_bos_token_id": 4077, "tts_eos_token_id": 4078}
    encoder = {"speaker_encoder_config": {
        "mel_dim": 128, "enc_dim": hidden, "enc_channels": [32, 32, 32, 32, 96], "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 16, "enc_res2net_scale": 8, "enc_se_channels": 16,
        "sample_rate": 24000}}
    return about | (encoder if kind == "base" else {})


def codec_config(groups: int = 6) -> dict:
    """The codec of a Qwen3-TTS, much narrower, with a window of 8 frames and 48 samples a frame."""
    decoder = {"latent_dim": 40, "codebook_dim": 32, "codebook_size": 64, "decoder_dim": 48, "hidden_size": 32,
               "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
               "num_hidden_layers": 3, "num_quantizers": groups, "num_semantic_quantizers": 1, "rms_norm_eps": 1e-5,
               "rope_theta": 10000, "sliding_window": 8, "upsample_rates": [4, 3], "upsampling_ratios": [2, 2],
               "layer_scale_initial_scale": 0.01, "attention_bias": False, "hidden_act": "silu",
               "max_position_embeddings": 8000}
    return {"architectures": ["Qwen3TTSTokenizerV2Model"], "model_type": "qwen3_tts_tokenizer_12hz",
            "output_sample_rate": 24000, "input_sample_rate": 24000, "decode_upsample_rate": 48,
            "encode_downsample_rate": 48, "encoder_valid_num_quantizers": groups, "decoder_config": decoder}
