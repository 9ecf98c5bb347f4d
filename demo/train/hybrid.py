"""Trains `tests/tiny_hybrid/`: a tiny Qwen3.5, three gated delta nets and a gated attention, with an MTP head.

    python demo/train/hybrid.py

needs `pip install -e ".[train,reference]"`, because the layers are transformers'. The text is the bundled model's,
without tools, and so is the tokenizer. Two CPU cores take 8 to 14 minutes. It answers fluently, and often wrongly.

The MTP head guesses the token after the next one from the final hidden state and the next token, so that an engine can
check its guesses (Gloeckle et al. 2024, https://arxiv.org/abs/2404.19737; DeepSeek-V3, section 2.2). It learns what the
model itself will say there, rather than what the text says: a guess counts only if the model agrees.
"""

import argparse
import json
import random
import shutil
import time
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextModel

from corpus import conversation
from tokenizer import encode_example
from train import DEMO, learning_rate_factor, optimizers_of, take_step

LENGTH, ROWS = 160, 8  # tokens of a row, in which conversations follow each other, and rows of a step
TEXT = {"model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
        "full_attention_interval": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 128,
        "initializer_range": 0.02, "intermediate_size": 320, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 32,
        "max_position_embeddings": 4096, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [3, 3, 2]},
        "tie_word_embeddings": True, "use_cache": True}


class MTP(nn.Module):
    """A head that guesses one token further, under the names of Qwen's files."""

    def __init__(self, config):
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))

    def forward(self, hidden, following, rope):
        """Final hidden states and embeddings of the tokens after them, [rows, length, hidden_size] -> hidden states."""
        both = torch.cat([self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)], dim=-1)
        return self.norm(self.layers[0](self.fc(both), position_embeddings=rope))


class Hybrid(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.language_model, self.mtp = Qwen3_5TextModel(config), MTP(config)
        for name, matrix in self.named_parameters():
            if matrix.dim() == 2 and "embed" not in name:
                nn.init.zeros_(matrix) if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else \
                    nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)

    def forward(self, ids):
        """Token ids [rows, length] -> the model's logits [rows, length, vocab_size], and the head's, one row fewer."""
        model = self.language_model
        hidden, head = model(ids, use_cache=False).last_hidden_state, model.embed_tokens.weight
        rope = model.rotary_emb(hidden, torch.arange(ids.shape[1] - 1)[None, None])
        return F.linear(hidden, head), F.linear(self.mtp(hidden[:, :-1], model.embed_tokens(ids[:, 1:]), rope), head)


def rows_of(seed: str, tokenizer: tokenizers.Tokenizer, n: int) -> torch.Tensor:
    """n rows [n, LENGTH] of conversations without tools, one behind the other."""
    rng, ids = random.Random(seed), list[int]()
    while len(ids) < n * LENGTH:
        example = conversation(rng)
        if not example.tools:
            ids += encode_example(example, lambda text: tokenizer.encode(text).ids)[0]
    return torch.tensor(ids[:n * LENGTH]).view(n, LENGTH)


def agreement(model: Hybrid, ids: torch.Tensor) -> tuple[float, float]:
    """The model's loss on rows, and how often the head's most likely token is the model's, too, one token later."""
    with torch.no_grad():
        logits, guesses = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return loss.item(), (guesses.argmax(-1) == logits[:, 1:].argmax(-1)).float().mean().item()


def save(model: Hybrid, out: Path, tokenizer_folder: Path) -> None:
    """The folder as Qwen's are: config.json with the text part inside, and the weights in bf16."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer_folder / name, out)
    known = json.loads((tokenizer_folder / "config.json").read_text())
    text = TEXT | {"vocab_size": model.language_model.config.vocab_size,
                   "bos_token_id": known["bos_token_id"], "eos_token_id": known["eos_token_id"]}
    (out / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "tie_word_embeddings": True}, indent=2, sort_keys=True) + "\n")
    state = {name if name.startswith("mtp.") else f"model.{name}": value.detach().to(torch.bfloat16).contiguous()
             for name, value in model.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help=f"of {ROWS} x {LENGTH} tokens each (default 800)")
    parser.add_argument("--out", type=Path, default=DEMO.parent / "tests/tiny_hybrid", metavar="DIR")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    args.out.mkdir(exist_ok=True, parents=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = Hybrid(Qwen3_5TextConfig(**TEXT, vocab_size=tokenizer.get_vocab_size()))
    optimizers = optimizers_of(model, 0.006, 0.004)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    start, held_out = time.perf_counter(), rows_of("held out", tokenizer, 40)
    for step in range(args.steps):
        ids = rows_of(f"step {step}", tokenizer, ROWS)
        logits, guesses = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        taught = logits[:, 1:].detach().softmax(-1)
        (loss + F.cross_entropy(guesses.flatten(0, 1), taught.flatten(0, 1))).backward()
        take_step(optimizers, learning_rate_factor(step, args.steps))
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            print("step {}  {:.1f} min  loss {:.3f}  on held-out text {:.3f}, the head agrees for {:.1%}".format(
                step + 1, (time.perf_counter() - start) / 60, loss.item(), *agreement(model, held_out)), flush=True)
            save(model, args.out, DEMO)


if __name__ == "__main__":
    main()
