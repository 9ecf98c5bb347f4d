"""Trains the bundled model in `demo/` from scratch: the tokenizer, then the weights, on the text of `corpus.py`.

    python demo/train/train.py

needs `pip install -e ".[train]"`; two CPU cores are enough, a GPU is used where torch finds one. A run that was
interrupted goes on at its last checkpoint; with more `--steps` than before, so does one that had ended.
`--start demo --peak 0.6 --steps 2000` trains the weights of `demo/` further.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from corpus import conversation
from loop import HAS_BF16, IGNORED, PRODUCTS, ROOT, from_identity, options, train, write
from tokenizer import NAMED, SPECIAL, encode_branches, train_tokenizer

DEMO = ROOT / "demo"
LONGEST = 640  # tokens of a conversation, with those beside it; longer ones are not trained on
# until this share of the run only conversations up to this length: copying is learned sooner
SHORT, SHORT_UNTIL = 160, 0.04

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64,
          "hidden_act": "silu", "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 704,
          "max_position_embeddings": 4096, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 8,
          "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000,
          "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
          "use_sliding_window": False, "vocab_size": 4096}


def tokenizer_files(n_examples: int) -> dict[str, Any]:
    """The files of a folder but for the weights, with a tokenizer made from so many conversations."""
    tokenizer = train_tokenizer(CONFIG["vocab_size"], n_examples)
    about = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {str(tokenizer.token_to_id(token)): {"content": token} | about | {"special": token in SPECIAL}
             for token in SPECIAL + NAMED}
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    return {"tokenizer.json": tokenizer.to_str(pretty=True),
            "config.json": CONFIG | {"bos_token_id": pad, "eos_token_id": end},
            "generation_config.json": {"bos_token_id": pad, "do_sample": False, "eos_token_id": [end, pad],
                                       "pad_token_id": pad},
            "tokenizer_config.json": {
                "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
                "chat_template": Path(__file__).with_name("template.jinja").read_text(),
                "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
                "model_max_length": CONFIG["max_position_embeddings"], "pad_token": "<|endoftext|>",
                "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None}}


FILES = "config generation_config tokenizer tokenizer_config".split()


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


def new_model() -> Qwen3ForCausalLM:
    """transformers' model. Plain products are faster than torch's fused attention for such short rows on a CPU."""
    return from_identity(Qwen3ForCausalLM(Qwen3Config(**CONFIG, attn_implementation="eager")))


def states(model: Qwen3ForCausalLM, ids: torch.Tensor, branches: torch.Tensor, positions: torch.Tensor
           ) -> torch.Tensor:
    """Final hidden states, [rows, length, hidden_size]. A token sees those before it of its branch or trunk, 0."""
    keys, queries, n = branches[:, None, None, :], branches[:, None, :, None], ids.shape[1]
    seen = torch.ones(n, n, dtype=torch.bool, device=ids.device).tril() & ((keys == 0) | (keys == queries))
    mask = torch.zeros(seen.shape, device=ids.device).masked_fill(~seen, -1e9)
    with torch.autocast(ids.device.type, PRODUCTS, enabled=HAS_BF16):
        return model.model(ids, {"full_attention": mask}, positions, use_cache=False).last_hidden_state


def main() -> None:
    args = options(
        __doc__, 18000, "40 conversations", DEMO, threads=2,
        work=dict(type=Path, default=ROOT / ".train",
                  help="folder for the model so far and, by default, the checkpoint (default .train)"),
        examples_per_step=dict(type=int, default=40),
        tokenizer_examples=dict(type=int, default=60000,
                                help="conversations that the tokenizer is made from (default 60000)"),
        max_tokens=dict(type=int, default=2048, help="of one rectangle of a step (default 2048; more for a GPU)"),
        workers=dict(type=int, default=0, help="processes that draw the text (default 0: this one; more for a GPU)"))
    folder, device = args.work / "demo", "cuda" if torch.cuda.is_available() else "cpu"
    model = new_model().to(device)
    if not (folder / "tokenizer.json").exists():
        write(folder, model, str,
              {f"{name}.json": (args.start / f"{name}.json").read_text("utf-8") for name in FILES} if args.start else
              tokenizer_files(args.tokenizer_examples))
    for layer in model.model.layers:  # one layer is compiled, and serves for all
        layer.compile(dynamic=True)
    data = Steps(folder / "tokenizer.json", args.steps, args.examples_per_step, args.max_tokens)

    def losses(rectangles: list[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        n_targets = sum(int((labels != IGNORED).sum()) for _, labels, _, _ in rectangles)
        for each in rectangles:
            ids, labels, branches, positions = each.to(device)
            wanted = labels != IGNORED
            with torch.autocast(device, PRODUCTS, enabled=HAS_BF16):
                logits = model.lm_head(states(model, ids, branches, positions)[wanted])
            yield {"loss": F.cross_entropy(logits.float(), labels[wanted], reduction="sum") / n_targets}

    out, args.out, args.checkpoint = args.out, folder, args.checkpoint or args.work / "checkpoint.pt"
    train(args, model, str, {}, (0.006, 0.004), losses,
          lambda first, last: torch.utils.data.DataLoader(data, batch_size=None, sampler=range(first, last),
                                                          num_workers=args.workers))
    shutil.copytree(folder, out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
