"""Trains the bundled model in `demo/` from scratch: the tokenizer, then the weights, on the text of `corpus.py`.

    python demo/train/train.py

needs `pip install -e ".[train]"`; two CPU cores are enough, a GPU is used where torch finds one. A run that was
interrupted goes on at its last checkpoint (`--work`); with more `--steps` than before, so does one that had ended.
`--start demo --peak 0.6 --steps 2000` trains the weights of `demo/` further.
"""

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

from corpus import conversation
from tokenizer import IGNORED, NAMED, SPECIAL, encode_branches, train_tokenizer

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent
LONGEST = 640  # tokens of a conversation, with those beside it; longer ones are not trained on
# The type of the products: float32 where the CPU has no instructions for bf16, whose emulation is twenty times slower.
HAS_BF16 = torch.cuda.is_available() or any(torch.cpu.get_capabilities().get(name)
                                            for name in ("avx512_bf16", "amx_bf16"))
PRODUCTS = torch.bfloat16 if HAS_BF16 else torch.float32
# until this share of the run only conversations up to this length: copying is learned sooner
SHORT, SHORT_UNTIL = 160, 0.04

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64,
          "hidden_act": "silu", "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 704,
          "max_position_embeddings": 4096, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 8,
          "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000,
          "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
          "use_sliding_window": False, "vocab_size": 4096}


def write_tokenizer_files(folder: Path, n_examples: int) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer = train_tokenizer(CONFIG["vocab_size"], n_examples)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {str(tokenizer.token_to_id(token)): {"content": token} | about | {"special": token in SPECIAL}
             for token in SPECIAL + NAMED}
    config = {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
              "chat_template": (HERE / "template.jinja").read_text(), "clean_up_tokenization_spaces": False,
              "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": CONFIG["max_position_embeddings"],
              "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer",
              "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"bos_token_id": pad, "eos_token_id": end}, indent=2,
                                                   sort_keys=True) + "\n")
    generation = {"bos_token_id": pad, "do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


class Steps(torch.utils.data.Dataset):
    """The examples of each step, always the same for the same number: sorted by length and cut into right-padded
    rectangles of at most `max_tokens`. A causal model needs no padding mask for padding on the right."""

    def __init__(self, tokenizer: Path, steps: int, examples_per_step: int, max_tokens: int):
        self.tokenizer, self.steps = tokenizer, steps
        self.examples_per_step, self.max_tokens = examples_per_step, max_tokens

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> list[torch.Tensor]:
        """[int64 [4, rows, length], ...]: ids, labels, branches, positions"""
        if isinstance(self.tokenizer, Path):
            self.tokenizer = tokenizers.Tokenizer.from_file(str(self.tokenizer))
        rng, longest = random.Random(f"step {step}"), SHORT if step < SHORT_UNTIL * self.steps else LONGEST
        rows: list[np.ndarray] = []
        while len(rows) < self.examples_per_step:
            row = encode_branches(conversation(rng), lambda text: self.tokenizer.encode(text).ids, longest)
            if row.shape[1] <= longest:
                rows.append(row)
        rows.sort(key=lambda row: row.shape[1])
        rectangles, start = [], 0
        while start < len(rows):
            end = start + 1
            while end < len(rows) and rows[end].shape[1] * (end + 1 - start) <= self.max_tokens:
                end += 1
            rectangles.append(rectangle(rows[start:end]))
            start = end
        return rectangles


def rectangle(rows: list[np.ndarray]) -> torch.Tensor:
    shape = 4, max(len(rows), 2), -(-rows[-1].shape[1] // 16) * 16  # a single row would be compiled for once more
    filled = np.zeros(shape, np.int64)
    filled[1] = IGNORED
    for i, row in enumerate(rows):
        filled[:, i, : row.shape[1]] = row
    return torch.from_numpy(filled)


# ---- The model: names of parameters as in Hugging Face's files; products in PRODUCTS, the rest in float32 -----------


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(PRODUCTS)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x):
        return F.linear(x, self.weight.to(PRODUCTS))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = Linear(c["hidden_size"], self.heads * self.head_dim)
        self.k_proj = Linear(c["hidden_size"], self.kv_heads * self.head_dim)
        self.v_proj = Linear(c["hidden_size"], self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, c["hidden_size"])
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, c["rms_norm_eps"]), RMSNorm(self.head_dim, c["rms_norm_eps"])

    def forward(self, x, cos, sin, mask):
        """Plain products: on a CPU they are faster than torch's fused attention for such short rows."""
        rows, length, _ = x.shape
        group, kv = self.heads // self.kv_heads, rows * self.kv_heads
        q = rotate(self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.head_dim)), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim)), cos,
                   sin).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = v.reshape(kv, length, self.head_dim)
        scores = torch.bmm(q.reshape(kv, group * length, self.head_dim),
                           k.reshape(kv, length, self.head_dim).transpose(1, 2))
        scores = scores.view(rows, self.heads, length, length).float() * self.head_dim**-0.5 + mask
        out = torch.bmm(scores.softmax(-1).to(PRODUCTS).view(kv, group * length, length), v)
        return self.o_proj(out.view(rows, self.heads, length, self.head_dim).transpose(1, 2).reshape(rows, length, -1))


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(PRODUCTS)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = Linear(c["hidden_size"], c["intermediate_size"])
        self.up_proj = Linear(c["hidden_size"], c["intermediate_size"])
        self.down_proj = Linear(c["intermediate_size"], c["hidden_size"])

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c, longest: int = 1024):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        inverse = c["rope_theta"] ** -(torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angles = torch.arange(longest)[:, None, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("causal", torch.ones(longest, longest, dtype=torch.bool).tril(), persistent=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for layer in self.layers:  # each layer starts as the identity
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)

    def forward(self, ids, branches, positions):
        """Final hidden states, [rows, length, hidden_size]. A token sees those before it of its branch or trunk, 0."""
        x, length = self.embed_tokens(ids), ids.shape[1]
        keys, queries = branches[:, None, None, :], branches[:, None, :, None]
        seen = self.causal[:length, :length] & ((keys == 0) | (keys == queries))
        mask = torch.zeros(seen.shape, device=ids.device).masked_fill(~seen, -1e9)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


# ---- Training -------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal steps, https://kellerjordan.github.io/posts/muon/, scaled as by Kimi's Moonlight.

    torch.optim.Muon multiplies in bf16, one matrix after another: on a CPU without instructions for it ten times
    slower.
    """

    def __init__(self, matrices, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for (rows, columns), alike in shapes.items():
                moments = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in alike]
                gradients = [p.grad for p in alike]
                torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
                steps = orthogonal(torch.stack(gradients).lerp(torch.stack(moments), group["momentum"]))
                torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(alike, list(steps), alpha=-0.2 * group["lr"] * max(rows, columns) ** 0.5)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Each of the matrices [n, rows, columns] with singular values near 1, by five steps of Newton and Schulz."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(PRODUCTS)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.float()


def save_model(model: nn.Module, path: Path) -> None:
    """The weights in bf16 safetensors, under Hugging Face's names (the head is tied: there is no lm_head.weight)."""
    from safetensors.torch import save_file

    state = {f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
             for name, value in model.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up over a hundred steps, constant, then linear to zero over the last 45 %."""
    return min(step / 100, 1.0, (1.0 - step / steps) / 0.45)


def optimizers_of(model: nn.Module, muon: float, adam: float, **options) -> dict[torch.optim.Optimizer, float]:
    """Muon for the matrices, AdamW for embeddings and vectors, each with its highest learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    return {Muon(matrices): muon, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, **options): adam}


def take_step(optimizers: dict[torch.optim.Optimizer, float], factor: float) -> None:
    """Changes the weights, with the highest learning rates times `factor`, and forgets the gradients."""
    for optimizer, highest in optimizers.items():
        for group in optimizer.param_groups:
            group["lr"] = highest * factor
        optimizer.step()
        optimizer.zero_grad()


def train(steps: int, work: Path, examples_per_step: int, max_tokens: int, threads: int, workers: int,
          start: Path | None = None, peak: float = 1.0) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = Model(CONFIG).to(device)
    optimizers = optimizers_of(model, 0.006, 0.004, fused=True)
    done = {"step": 0, "seconds": 0.0, "tokens": 0}
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        done = saved["done"]
    elif start:
        from safetensors.torch import load_file

        state = load_file(start / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): value.float() for name, value in state.items()})
    for layer in model.layers:  # one layer is compiled, and serves for all
        layer.compile(dynamic=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}", flush=True)
    data = Steps(work / "demo" / "tokenizer.json", steps, examples_per_step, max_tokens)
    loader = torch.utils.data.DataLoader(data, batch_size=None, sampler=range(done["step"], steps), num_workers=workers)
    started, losses = time.perf_counter(), []
    for rectangles in loader:
        n_targets = sum(int((labels != IGNORED).sum()) for _, labels, _, _ in rectangles)
        total = torch.zeros((), device=device)
        for each in rectangles:
            ids, labels, branches, positions = each.to(device)
            wanted = labels != IGNORED
            logits = F.linear(model(ids, branches, positions)[wanted], model.embed_tokens.weight.to(PRODUCTS))
            loss = F.cross_entropy(logits.float(), labels[wanted], reduction="sum") / n_targets
            loss.backward()
            total += loss.detach()
            done["tokens"] += ids.numel()
        factor = peak * learning_rate_factor(done["step"], steps)
        take_step(optimizers, factor)
        done["step"] += 1
        done["seconds"] += time.perf_counter() - started
        started = time.perf_counter()
        losses.append(total)
        if done["step"] % 20 == 0:
            mean = torch.stack(losses[-20:]).mean().item()
            if not math.isfinite(mean):
                raise SystemExit(f"the loss is {mean} at step {done['step']}")
            print(f"step {done['step']}  {done['seconds'] / 60:.1f} min  loss {mean:.4f}  lr x {factor:.2f}  "
                  f"{done['tokens'] / 1e6:.2f} M tokens", flush=True)
        if done["step"] % 100 == 0 or done["step"] == steps:
            torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                        "done": done}, work / "checkpoint.new")
            (work / "checkpoint.new").replace(checkpoint)
            save_model(model, work / "demo" / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=18000, help="of 40 conversations each (default 18000)")
    parser.add_argument("--work", type=Path, default=DEMO.parent / ".train",
                        help="folder for the checkpoint and the model so far (default .train)")
    parser.add_argument("--examples-per-step", type=int, default=40)
    parser.add_argument("--tokenizer-examples", type=int, default=60000,
                        help="conversations that the tokenizer is made from (default 60000)")
    parser.add_argument("--max-tokens", type=int, default=2048,
                        help="of one rectangle of a step (default 2048; more for a GPU)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0,
                        help="processes that draw the text (default 0: this one; more for a GPU)")
    parser.add_argument("--start", type=Path, metavar="DIR",
                        help="weights and tokenizer to go on from, such as demo (default: from nothing)")
    parser.add_argument("--out", type=Path, default=DEMO, metavar="DIR",
                        help="folder to write the trained model to (default demo)")
    parser.add_argument("--peak", type=float, default=1.0,
                        help="factor of the learning rates; 0.6 with --start (default 1)")
    args = parser.parse_args()
    if not (args.work / "demo" / "tokenizer.json").exists():
        if args.start:
            shutil.copytree(args.start, args.work / "demo", ignore=shutil.ignore_patterns("README.md"),
                            dirs_exist_ok=True)
        else:
            write_tokenizer_files(args.work / "demo", args.tokenizer_examples)
    train(args.steps, args.work, args.examples_per_step, args.max_tokens, args.threads, args.workers, args.start,
          args.peak)
    shutil.copytree(args.work / "demo", args.out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
