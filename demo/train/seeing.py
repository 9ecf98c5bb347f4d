"""Trains `tests/tiny_seeing/`: a tiny Qwen3.5 with a vision tower, which names drawn colours and shapes.

    python demo/train/seeing.py

needs `pip install -e ".[train,vision]"`. The tokens are bytes. The tower gets pictures of 64 to 512 pixels a side, the
small ones first. 256 x 256 pixels, to which smaller pictures are enlarged, are 256 patches for the tower and 64 tokens
for the language model.

The weights in the folder had 1,200 steps from nothing, with pictures before their questions only, and then

    python demo/train/seeing.py --start tests/tiny_seeing --peak 0.5 --steps 300
"""
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from loop import ROOT, encoded, judge, options, train

sys.path.insert(1, str(ROOT))

from qwen3 import Model, chat, load_model  # noqa: E402
from qwen3_vision import VisionConfig, patches_of  # noqa: E402

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


def cases(seed: str, n: int, largest: float) -> Iterator[tuple[Image.Image, str, bool, str]]:
    """n pictures of at most `largest` pixels a side, with a question, whether it comes first, and its answer."""
    rng = random.Random(seed)
    for _ in range(n):
        image, colour, shape = drawing(rng, largest)
        question, answer = rng.choice([*QUESTIONS.items()])
        yield image, question, rng.random() < 0.5, answer.format(colour, shape)


def batch_of(tokenizer: tokenizers.Tokenizer, drawn: Iterator[tuple[Image.Image, str, bool, str]]) -> dict[str, Any]:
    """The model's arguments for `cases`, and labels."""
    told, patches, grids = [], [], []
    for image, question, first, answer in drawn:
        patches.append(patches_of(np.asarray(image), VisionConfig()))
        grids.append([1, image.height // 16, image.width // 16])
        parts = [f"<|vision_start|>{'<|image_pad|>' * (len(patches[-1]) // 4)}<|vision_end|>", question]
        told.append((f"<|im_start|>user\n{''.join(parts[::-1] if first else parts)}<|im_end|>\n<|im_start|>assistant\n",
                     f"{answer}<|im_end|>"))
    ids, labels = encoded(tokenizer, told)
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.tensor(np.concatenate(patches)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (ids == tokenizer.token_to_id("<|image_pad|>")).int()}


def answers(model: Model, drawn: Iterator[tuple[Image.Image, str, bool, str]]) -> Iterator[tuple[str, str]]:
    """What is to be said of `cases`, and what the model says."""
    for image, question, first, answer in drawn:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        message = {"role": "user", "content": parts[::-1] if first else parts}
        yield answer, chat(model, message, temperature=0, max_new_tokens=20).finish().text


def main() -> None:
    args = options(__doc__, 1200, "24 pictures", ROOT / "tests/tiny_seeing")
    tokenizer = byte_tokenizer()
    ids = {name: tokenizer.token_to_id(token) for name, token in zip(
        ("eos", "start", "turn", "vision_start", "image", "vision_end"), SPECIAL)}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": VISION,
              "text_config": TEXT | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": ids["turn"]},
              "tie_word_embeddings": True, **{f"{name}_token_id": ids[name] for name in (
                  "image", "vision_start", "vision_end")}}
    files = {"tokenizer.json": tokenizer.to_str(pretty=True), "config.json": config,
             "generation_config.json": {"do_sample": False}, "tokenizer_config.json": {
                 "chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"}}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**config)).float()

    def losses(step: int) -> Iterator[dict[str, torch.Tensor]]:
        largest = 64 + 448 * min(2 * step / args.steps, 1) if args.start is None else 512  # small ones first
        batch = batch_of(tokenizer, cases(f"step {step}", 24, largest))
        labels = batch.pop("labels")
        yield {"loss": F.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    train(args, model, str, files, (0.01, 0.003), losses)
    judge("held-out pictures", answers(load_model(args.out), cases("held out", 300, 512)))


if __name__ == "__main__":
    main()
