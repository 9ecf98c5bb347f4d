"""Trains `tests/tiny_hybrid/`: a tiny Qwen3.5, three gated delta nets and a gated attention, with an MTP head.

    python demo/train/hybrid.py

needs `pip install -e ".[train]"`. The text is the bundled model's, without tools, and so is the tokenizer. Two CPU
cores take 8 to 14 minutes. It answers fluently, and often wrongly.

The MTP head guesses the token after the next one from the final hidden state and the next token, so that an engine can
check its guesses (Gloeckle et al. 2024, https://arxiv.org/abs/2404.19737; DeepSeek-V3, section 2.2). It learns what the
model itself will say there, rather than what the text says: a guess counts only if the model agrees.
"""

import json
import random
from collections.abc import Iterator

import tokenizers
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextModel

from corpus import conversation
from loop import ROOT, from_identity, judge, options, train
from tokenizer import encode_example

DEMO = ROOT / "demo"
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
        from_identity(self)

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


def guesses_of(model: Hybrid, ids: torch.Tensor) -> Iterator[tuple[str, str]]:
    """The model's most likely token at each place of rows, and the head's guess of it, one token earlier."""
    with torch.no_grad():
        logits, guesses = model(ids)
    return zip(*(map(str, each.argmax(-1).flatten().tolist()) for each in (logits[:, 1:], guesses)))


def main() -> None:
    args = options(__doc__, 800, f"{ROWS} x {LENGTH} tokens", ROOT / "tests/tiny_hybrid", threads=2)
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = Hybrid(Qwen3_5TextConfig(**TEXT, vocab_size=tokenizer.get_vocab_size()))
    files = {name: (DEMO / name).read_text("utf-8")
             for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")}
    known = json.loads((DEMO / "config.json").read_text())
    files["config.json"] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
        "text_config": TEXT | {"vocab_size": tokenizer.get_vocab_size()}
        | {key: known[key] for key in ("bos_token_id", "eos_token_id")}}

    def losses(step: int) -> Iterator[dict[str, torch.Tensor]]:
        ids = rows_of(f"step {step}", tokenizer, ROWS)
        logits, guesses = model(ids)
        taught = logits[:, 1:].detach().softmax(-1)
        yield {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
               "of the head": F.cross_entropy(guesses.flatten(0, 1), taught.flatten(0, 1))}

    train(args, model, lambda name: name if name.startswith("mtp.") else f"model.{name}", files, (0.006, 0.004), losses)
    judge("the head guesses the model's next token", guesses_of(model, rows_of("held out", tokenizer, 40)))


if __name__ == "__main__":
    main()
