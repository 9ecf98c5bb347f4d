"""Trains `tests/tiny_seeing/`: a tiny Qwen3.5 with a vision tower, which names drawn colours and shapes.

    python demo/train/seeing.py

needs `pip install -e ".[train,reference,vision]"`, because the layers are transformers'. The tokens are bytes. Two CPU
cores take some minutes. The tower gets pictures of 64 to 512 pixels a side, the small ones first. 256 x 256 pixels, to
which smaller pictures are enlarged, are 256 patches for the tower and 64 tokens for the language model.
"""
import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from qwen3_vision import VisionConfig, patches_of  # noqa: E402
from train import learning_rate_factor, optimizers_of, take_step  # noqa: E402

COLOURS = {"red": ((210, 40, 40), (255, 0, 0)), "green": ((40, 160, 60), (0, 128, 0), (0, 255, 0)),
           "blue": ((50, 70, 210), (0, 0, 255))}
SHAPES = ("circle", "square", "triangle")
QUESTIONS = {"What is this?": "{} {}", "Which colour?": "{}", "Which shape?": "{1}"}
SIDES = (64, 256, *range(64, 513, 32), *range(64, 513, 32))  # pixels of a picture for the tower
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEXT = {"model_type": "qwen3_5_text", "full_attention_interval": 2, "head_dim": 32, "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 128, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_value_head_dim": 16,
        "max_position_embeddings": 1024, "num_attention_heads": 2, "num_hidden_layers": 4, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
            "mrope_section": [3, 3, 2]},
        "tie_word_embeddings": True, "dtype": "bfloat16"}
VISION = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
          "num_position_embeddings": 64, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
          "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": []}


def drawing(rng: random.Random, largest: float) -> tuple[Image.Image, str, str]:
    """A shape of a random size on a light ground, in a size for the tower -> (picture, colour, shape)."""
    colour, shape, sides = rng.choice([*COLOURS]), rng.choice(SHAPES), [side for side in SIDES if side <= largest]
    width, height = rng.choices(sides, k=2) if rng.random() < 0.4 else [rng.choice(sides)] * 2
    width, height = min(width, 2 * height), min(height, 2 * width)
    image = Image.new("RGB", (width, height), rng.choice(["white", tuple(rng.randint(200, 255) for _ in range(3))]))
    size = rng.uniform(0.4, 0.95) * min(width, height)
    ink = tuple(min(max(level + rng.randint(-35, 35), 0), 255) for level in rng.choice(COLOURS[colour]))
    x, y = rng.uniform(0, width - size), rng.uniform(0, height - size)
    draw, box = ImageDraw.Draw(image), (x, y, x + size, y + size)
    if shape == "circle":
        draw.ellipse(box, ink)
    elif shape == "square":
        draw.rectangle(box, ink)
    else:
        draw.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], ink)
    return image, colour, shape


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Each byte is a token; so are the SPECIAL ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def batch_of(tokenizer: tokenizers.Tokenizer, seed: str, n: int, largest: float) -> dict[str, torch.Tensor]:
    """The model's arguments for n pictures of at most `largest` pixels a side, each with a question and its answer."""
    rng, rows, patches, grids = random.Random(seed), [], [], []
    for _ in range(n):
        image, colour, shape = drawing(rng, largest)
        question, answer = rng.choice([*QUESTIONS.items()])
        patches.append(patches_of(np.asarray(image), VisionConfig()))
        grids.append([1, image.height // 16, image.width // 16])
        pads = "<|image_pad|>" * (len(patches[-1]) // 4)
        told = (f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n",
                f"{answer.format(colour, shape)}<|im_end|>")
        asked, said = (tokenizer.encode(text).ids for text in told)
        rows.append(([*asked, *said], [-100] * len(asked) + said))
    end, most = tokenizer.token_to_id("<|endoftext|>"), max(len(ids) for ids, _ in rows)
    ids, labels = (torch.tensor([row + [fill] * (most - len(row)) for row in part])
                   for part, fill in zip(zip(*rows), (end, -100)))
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.tensor(np.concatenate(patches)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (ids == tokenizer.token_to_id("<|image_pad|>")).int()}


def save(model: Any, tokenizer: tokenizers.Tokenizer, config: dict[str, Any], out: Path) -> None:
    """The folder as Qwen's are: the text part and the tower in one file, in bf16."""
    tokenizer.save(str(out / "tokenizer.json"))
    for name, content in (("config", config), ("generation_config", {"do_sample": False}), ("tokenizer_config", {
            "chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"})):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    save_file({name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()
               if name != "lm_head.weight"}, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="of 24 pictures each (default 1200)")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/tiny_seeing", metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    ids = {name: tokenizer.token_to_id(token) for name, token in zip(
        ("eos", "start", "turn", "vision_start", "image", "vision_end"), SPECIAL)}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": VISION,
              "text_config": TEXT | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": ids["turn"]},
              "tie_word_embeddings": True, **{f"{name}_token_id": ids[name] for name in (
                  "image", "vision_start", "vision_end")}}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**config)).float()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    optimizers = optimizers_of(model, 0.01, 0.003)
    start = time.perf_counter()
    for step in range(args.steps):
        batch = batch_of(tokenizer, f"step {step}", 24, 64 + 448 * min(2 * step / args.steps, 1))  # small ones first
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        take_step(optimizers, learning_rate_factor(step, args.steps))
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}  {(time.perf_counter() - start) / 60:.1f} min  loss {loss.item():.4f}", flush=True)
            save(model, tokenizer, config, args.out)


if __name__ == "__main__":
    main()
