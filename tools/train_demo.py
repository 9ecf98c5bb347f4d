"""Trains the bundled model in `demo/` from scratch: the tokenizer, then the weights, on the text of `demo_corpus.py`.

    python tools/train_demo.py --minutes 100

needs torch; two CPU cores are enough. A run that was interrupted goes on where its last checkpoint was (`--work`).
"""
import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

import demo_corpus

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
IGNORED = -100  # the label of a position that is not trained on

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 640,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 3072,
}

# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE, split and normalised as Qwen3's, the special tokens under the same names
# ---------------------------------------------------------------------------------------------------------------------

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
           "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
NAMED = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
         "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(n_examples: int = 30000) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    rng = random.Random(0)
    texts = [text for _ in range(n_examples) for text in plain_texts(demo_corpus.example(rng))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - len(SPECIAL + NAMED) - 20,  # a few rows stay unnamed, as in the real checkpoints
        min_frequency=8, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=False) for token in NAMED])
    return tokenizer


def plain_texts(example: demo_corpus.Example) -> list[str]:
    return [text for message in example.messages for text in (message["role"], message["content"])] + [
        "assistant", example.reasoning, example.answer, json.dumps(example.tools or "")]


def write_tokenizer_files() -> None:
    DEMO.mkdir(exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(DEMO / "tokenizer.json"))
    added = {str(tokenizer.token_to_id(token)): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                                                 "single_word": False, "special": token in SPECIAL} for token in SPECIAL + NAMED}
    config = {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
              "chat_template": (Path(__file__).parent / "demo_template.jinja").read_text(), "clean_up_tokenization_spaces": False,
              "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": CONFIG["max_position_embeddings"],
              "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None}
    (DEMO / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    (DEMO / "config.json").write_text(json.dumps(CONFIG | {"bos_token_id": pad, "eos_token_id": end}, indent=2, sort_keys=True) + "\n")
    (DEMO / "generation_config.json").write_text(json.dumps(
        {"bos_token_id": pad, "do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Examples as token ids
# ---------------------------------------------------------------------------------------------------------------------

def encode_example(example: demo_corpus.Example, tokenizer) -> tuple[list[int], int]:
    """(token ids, how many of them are given: the loss is on the rest)"""
    if example.raw:
        return tokenizer.encode(example.answer + "<|endoftext|>"), 1
    prompt = tokenizer.apply_chat_template(example.messages, tools=example.tools, enable_thinking=example.enable_thinking)
    thought = "" if example.enable_thinking is False else f"<think>\n{example.reasoning}\n</think>\n\n"
    given = tokenizer.encode(prompt)
    return given + tokenizer.encode(f"{thought}{example.answer}<|im_end|>"), len(given)


def draw_batches(rng: random.Random, tokenizer, examples_per_step: int, max_tokens: int, max_length: int = 768):
    """One optimisation step's examples, sorted by length and cut into right-padded rectangles of at most `max_tokens`.
    A causal model needs no padding mask for padding on the right. -> list of (ids, labels), int64 [rows, length]"""
    rows = []
    while len(rows) < examples_per_step:
        ids, given = encode_example(demo_corpus.example(rng), tokenizer)
        if len(ids) <= max_length:
            rows.append((ids, [IGNORED] * (given - 1) + ids[given:] + [IGNORED]))
    rows.sort(key=lambda row: len(row[0]))
    rectangles, start = [], 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and len(rows[end][0]) * (end + 1 - start) <= max_tokens:
            end += 1
        length = -(-len(rows[end - 1][0]) // 16) * 16
        ids, labels = np.zeros((end - start, length), np.int64), np.full((end - start, length), IGNORED, np.int64)
        for row, (row_ids, row_labels) in enumerate(rows[start:end]):
            ids[row, :len(row_ids)], labels[row, :len(row_labels)] = row_ids, row_labels
        rectangles.append((torch.from_numpy(ids), torch.from_numpy(labels)))
        start = end
    return rectangles


# ---------------------------------------------------------------------------------------------------------------------
# The model, its parameters under the names that Hugging Face's files use
# ---------------------------------------------------------------------------------------------------------------------

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], c["num_attention_heads"] * c["head_dim"], bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], c["num_key_value_heads"] * c["head_dim"], bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], c["num_key_value_heads"] * c["head_dim"], bias=False)
        self.o_proj = nn.Linear(c["num_attention_heads"] * c["head_dim"], c["hidden_size"], bias=False)
        self.q_norm = nn.RMSNorm(c["head_dim"], c["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(c["head_dim"], c["rms_norm_eps"])

    def forward(self, x, cos, sin):
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k = self.q_norm(self.q_proj(x).view(heads)), self.k_norm(self.k_proj(x).view(heads))
        q, k = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        inverse = c["rope_theta"] ** -(torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angles = torch.arange(1024)[:, None, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # each layer starts as the identity

    def forward(self, ids):
        """Final hidden states, [rows, length, hidden_size]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:ids.shape[1]], self.sin[:ids.shape[1]])
        return self.norm(x)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------

def save_model(model: nn.Module, path: Path) -> None:
    """The weights in bf16 safetensors, under Hugging Face's names (the head is tied: there is no lm_head.weight)."""
    from safetensors.torch import save_file
    state = {f"model.{name}": value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def learning_rate_factor(progress: float) -> float:
    """Warm-up over the first 2 %, constant, then linear to zero over the last 40 %."""
    return min(progress / 0.02, 1.0, max(1.0 - progress, 0.0) / 0.4)


def train(minutes: float, work: Path, examples_per_step: int, max_tokens: int, threads: int) -> None:
    from tokenizer_utils import load_tokenizer
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    tokenizer, model = load_tokenizer(DEMO), Model(CONFIG)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    peaks = [0.006, 0.004]
    step, spent, losses = 0, 0.0, []
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        step, spent = saved["step"], saved["spent"]
    compiled = torch.compile(model, dynamic=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    tokens = 0
    while spent < 60 * minutes:
        started = time.perf_counter()
        rectangles = draw_batches(random.Random(step), tokenizer, examples_per_step, max_tokens)
        n_targets = sum(int((labels != IGNORED).sum()) for _, labels in rectangles)
        total = 0.0
        for ids, labels in rectangles:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = compiled(ids)
                wanted = labels != IGNORED
                logits = F.linear(hidden[wanted], model.embed_tokens.weight)
            loss = F.cross_entropy(logits.float(), labels[wanted], reduction="sum") / n_targets
            loss.backward()
            total += loss.item()
            tokens += ids.numel()
        factor = learning_rate_factor(spent / (60 * minutes))
        for optimizer, peak in zip(optimizers, peaks):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        if not math.isfinite(total):
            raise SystemExit(f"loss is {total} at step {step}")
        step, spent = step + 1, spent + time.perf_counter() - started
        losses.append(total)
        if step % 20 == 0:
            print(f"step {step}  {spent / 60:.1f} min  loss {sum(losses[-20:]) / 20:.4f}  lr x {factor:.2f}  {tokens / 20:.0f} tokens/step", flush=True)
            tokens = 0
        if step % 200 == 0 or spent >= 60 * minutes:
            torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step, "spent": spent}, checkpoint)
            save_model(model, DEMO / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=100, help="how long to train, interruptions not counted (default 100)")
    parser.add_argument("--work", type=Path, default=ROOT / ".train", help="folder for the checkpoint (default .train)")
    parser.add_argument("--examples-per-step", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of one rectangle of a step (default 2048)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "checkpoint.pt").exists():
        write_tokenizer_files()
    train(args.minutes, args.work, args.examples_per_step, args.max_tokens, args.threads)


if __name__ == "__main__":
    import sys
    sys.path.insert(0, str(ROOT))
    main()
