# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "prompt_toolkit>=3.0.40",
#                 "threadpoolctl>=3.5", "pillow>=10.1"]
# ///
"""Pictures for Qwen3-VL and Qwen3.5 in plain NumPy: from a photo to vectors that stand beside those of the words.

    python qwen3_vision.py --model Qwen3.5-0.8B --image photo.jpg "What is this?"     a folder with Qwen's own files

This file stands on qwen3.py and qwen3_5.py, which you should read first. Read it from top to bottom:

    config -> picture -> patches -> tower -> merger -> a picture's tokens -> positions -> pictures of a model -> main

How a picture of 64 x 96 pixels becomes 6 tokens, with the sizes of Qwen3.5-0.8B:

    4 x 6 patches of 16 x 16 pixels        in blocks of 2 x 2, block after block     6 tokens
    +---+---+---+---+---+---+
    | 0 | 1 | 4 | 5 | 8 | 9 |              patches [24, 1536]: 3 colours x 2 equal frames x 16 x 16
    +---+---+---+---+---+---+              -> linear, + position embedding [24, 768]     +---+---+---+
    | 2 | 3 | 6 | 7 |10 |11 |              -> 12 x block [24, 768]                       | 0 | 1 | 2 |
    +---+---+---+---+---+---+              -> merger: four neighbours side by side       +---+---+---+
    |12 |13 |16 |17 |20 |21 |                 [6, 3072] -> linear -> GELU -> linear      | 3 | 4 | 5 |
    +---+---+---+---+---+---+              -> embeddings [6, 1024]                       +---+---+---+
    |14 |15 |18 |19 |22 |23 |
    +---+---+---+---+---+---+              block:  x + attention(LayerNorm(x)), then  x + mlp(LayerNorm(x))

The words that the other files don't have:

    patch        a square of pixels, the token of the tower
    tower        a transformer that reads patches; each patch sees all patches of its picture
    merger       joins four neighbouring patches, and maps them to the width of the language model
    deepstack    in Qwen3-VL: what earlier blocks of the tower saw is added behind the language model's first layers
    M-RoPE       RoPE with three positions for a token: time, row and column; for a word, the three are equal
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import qwen3
from qwen3 import Config, Folder, Model, apply_rope, checked_number, checked_whole, linear, rope_of, to_float32
from tokenizer_utils import InputError, brief, library_errors, stream_text

try:
    from qwen3_5 import HybridConfig
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"qwen3_vision.py: {error}; it needs qwen3_5.py beside it")

__all__ = ["Picture", "Pictures", "VisionConfig", "patches_of", "smart_resize", "tower"]

# ---- Config ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class VisionConfig:
    """The fields of `vision_config` in config.json that the tensors don't tell, under Hugging Face's names."""
    depth: int = 27  # blocks
    num_heads: int = 16
    patch_size: int = 16
    spatial_merge_size: int = 2  # so many rows and columns of patches become one token
    temporal_patch_size: int = 2  # frames
    deepstack_visual_indexes: tuple[int, ...] = ()  # blocks


def vision_config(raw: dict[str, Any], file: Path) -> VisionConfig:
    """The VisionConfig of config.json's object. Raises InputError for values that aren't supported."""
    found = {field.name: raw.get(field.name, field.default) for field in dataclasses.fields(VisionConfig)}
    deep = found.pop("deepstack_visual_indexes")
    sizes = {name: checked_whole(f"{file}: {name} of vision_config", value, 1) for name, value in found.items()}
    if raw.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or not isinstance(deep, list | tuple) \
            or not {*deep} <= {*range(sizes["depth"])}:
        raise InputError(f"{file}: this vision_config is not supported: {brief(raw, 400)}")
    return VisionConfig(**sizes, deepstack_visual_indexes=tuple(deep))


# ---- Pixels and patches ----------------------------------------------------------------------------------------------

MIN_PIXELS, MAX_PIXELS = 2**16, 2**20  # of a picture for the tower: 64 to 1,024 tokens, unless told otherwise
LARGEST = 2**24  # the most that can be told: 16,384 tokens


def smart_resize(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """The size nearest to a picture's own in multiples of `factor`, with a number of pixels within the limits."""
    if max(height, width) > 200 * min(height, width):
        raise InputError(f"a picture of {width} x {height} pixels is too narrow: one side has more than 200 times the "
                         "other's pixels")
    sides = [round(side / factor) * factor for side in (height, width)]
    if sides[0] * sides[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif sides[0] * sides[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


LEVELS = ((np.arange(256) / 255).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)  # of a byte: -1 to 1


def patches_of(pixels: np.ndarray, config: VisionConfig) -> np.ndarray:
    """Pixels uint8 [height, width, 3] -> patches float32 [rows * columns, 3 * 2 * 16 * 16], in blocks of 2 x 2."""
    size, m = config.patch_size, config.spatial_merge_size
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    x = LEVELS[pixels].reshape(rows // m, m, size, columns // m, m, size, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    x = x.reshape(rows * columns, 3, 1, size * size).repeat(config.temporal_patch_size, axis=2)
    return x.reshape(rows * columns, -1)


def places_of(rows: int, columns: int, m: int) -> np.ndarray:
    """The (row, column) of each patch of a grid [rows * columns, 2], in blocks of m x m."""
    grid = np.indices((rows, columns)).reshape(2, rows // m, m, columns // m, m)
    return grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


# ---- Tower -----------------------------------------------------------------------------------------------------------

Weights = dict[str, np.ndarray]  # by their names in the file, behind model.visual.
SCORES = 2**21  # of attention at a time, in one head: 8 MiB, that is all of 1,448 patches


def dense(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    """A linear layer with bias: x [n, inputs] -> [n, outputs]."""
    return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def layer_norm(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    """x [n, d] shifted to a mean of 0, scaled to a variance of 1, times weight plus bias (Ba et al. 2016)."""
    x = x - x.mean(axis=-1, keepdims=True)
    variance = np.einsum("ni,ni->n", x, x)[:, None] / np.float32(x.shape[-1])
    return x / np.sqrt(variance + np.float32(1e-6)) * w[f"{name}.weight"] + w[f"{name}.bias"]


@np.errstate(over="ignore")
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """gelu, nearly, with tanh: the tower was trained with this form. In place: the largest array of a block."""
    gate = x * x
    gate *= np.float32(-2 * math.sqrt(2 / math.pi) * 0.044715)
    gate -= np.float32(2 * math.sqrt(2 / math.pi))
    gate *= x
    np.exp(gate, out=gate)  # may overflow to inf: then the result is -0, which is right
    gate += 1
    return np.divide(x, gate, out=gate)


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the probability that a normally distributed number is below x (Hendrycks & Gimpel 2016)."""
    z = np.abs(x) / np.sqrt(np.float32(2))
    t = 1 / (1 + np.float32(0.3275911) * z)  # erf by Abramowitz & Stegun 7.1.26, off by 1.5e-7
    tail = np.exp(-z * z) * np.polyval(np.array([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0],
                                                np.float32), t)
    return x * np.float32(0.5) * np.where(x < 0, tail, 2 - tail)


def position_embedding(table: np.ndarray, places: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A learned vector for each patch, from a square grid [side * side, width] that is stretched over the picture.

    Between four points of the grid, their vectors are mixed (bilinear interpolation).
    """
    side = math.isqrt(len(table))
    at = places.astype(np.float32) * np.float32(side - 1) / np.maximum(np.array([rows, columns], np.float32) - 1, 1)
    low, out = np.floor(at).astype(np.int64), np.zeros((len(places), table.shape[1]), np.float32)
    for corner in itertools.product((0, 1), repeat=2):
        row, column = np.minimum(low + corner, side - 1).T
        share = (1 - np.abs(at - low - corner)).prod(axis=1, keepdims=True, dtype=np.float32)
        out += share * table[row * side + column]
    return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """qwen3.attention of all patches to all: [n_heads, n, head_dim] each -> the same shape."""
    out, (n_heads, n, head_dim) = np.empty_like(q), q.shape
    for head, start in itertools.product(range(n_heads), range(0, n, step := max(1, SCORES // n))):
        now = head, slice(start, start + step)
        scores = q[now] * np.float32(head_dim ** -0.5) @ k[head].T
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        out[now] = scores @ v[head] / scores.sum(axis=1, keepdims=True)
    return out


def block(x: np.ndarray, w: Weights, name: str, n_heads: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One block of the tower: x [n, hidden_size] -> the same shape."""
    n = len(x)
    qkv = dense(layer_norm(x, w, f"{name}.norm1"), w, f"{name}.attn.qkv")
    q, k, v = qkv.reshape(n, 3, n_heads, -1).transpose(1, 2, 0, 3)  # [n_heads, n, head_dim] each
    out = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)  # [n_heads, n, head_dim]
    x = x + dense(out.swapaxes(0, 1).reshape(n, -1), w, f"{name}.attn.proj")
    hidden = gelu_tanh(dense(layer_norm(x, w, f"{name}.norm2"), w, f"{name}.mlp.linear_fc1"))
    return x + dense(hidden, w, f"{name}.mlp.linear_fc2")


def merger(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    """Four neighbours side by side become a token: x [n, hidden_size] -> [n / 4, out_hidden_size]."""
    width, normed = w[f"{name}.linear_fc1.weight"].shape[1], len(w[f"{name}.norm.weight"])
    x = layer_norm(x.reshape(-1, normed), w, f"{name}.norm").reshape(-1, width)  # in deepstack, all four together
    return dense(gelu(dense(x, w, f"{name}.linear_fc1")), w, f"{name}.linear_fc2")


def tower(pixels: np.ndarray, w: Weights, config: VisionConfig) -> np.ndarray:
    """Pixels uint8 [height, width, 3] -> float32 [1 + deepstack, tokens, out_hidden_size], the embeddings first."""
    rows, columns = pixels.shape[0] // config.patch_size, pixels.shape[1] // config.patch_size
    places = places_of(rows, columns, config.spatial_merge_size)
    half = len(w["blocks.0.attn.proj.bias"]) // config.num_heads // 2  # of a head
    # RoPE in two dimensions: half of the pairs of a head turn by the row, the other half by the column.
    frequencies = 1 / (10000 ** (np.arange(0, half, 2) / half)).astype(np.float32)
    angles = (places[:, :, None].astype(np.float32) * frequencies).reshape(len(places), -1)
    cos, sin, deep = np.cos(angles), np.sin(angles), []
    x = dense(patches_of(pixels, config), w, "patch_embed.proj")
    x = x + position_embedding(w["pos_embed.weight"], places, rows, columns)
    for i in range(config.depth):
        x = block(x, w, f"blocks.{i}", config.num_heads, cos, sin)
        if i in config.deepstack_visual_indexes:
            deep.append(merger(x, w, f"deepstack_merger_list.{config.deepstack_visual_indexes.index(i)}"))
    return np.stack([merger(x, w, "merger"), *deep])


# ---- A picture's tokens ----------------------------------------------------------------------------------------------
# Their ids are below 0, where no vocabulary has any: ~id holds the picture's number, its rows and columns of tokens,
# and the token's place among them. A number is given once in a process. So whatever compares ids, such as a cache,
# never takes one picture for another, and knows a picture that comes again. Positions follow from the ids alone.

NUMBERS = itertools.count()
KEPT = 2**28  # bytes of pictures that are kept though no sequence holds them: 64 of 1,024 tokens of Qwen3.5-0.8B


@dataclass(frozen=True, eq=False)
class Picture:
    """What the language model sees of a picture: vectors [1 + deepstack, rows * columns, hidden_size]."""
    number: int
    rows: int
    columns: int
    vectors: np.ndarray

    @property
    def ids(self) -> np.ndarray:
        """The ids of its tokens [rows * columns]."""
        return ~((self.number << 36 | self.rows << 25 | self.columns << 14) + np.arange(self.rows * self.columns))


def fields(ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of a picture's tokens [n]: the picture's number, its rows, its columns, and the token's place."""
    return ~ids >> 36, ~ids >> 25 & 0x7FF, ~ids >> 14 & 0x7FF, ~ids & 0x3FFF


def spared(ids: np.ndarray) -> np.ndarray:
    """How many positions fewer than tokens a picture takes, at the first of its tokens; 0 at all others."""
    _, rows, columns, place = fields(ids)
    return np.where((ids < 0) & (place == 0), rows * columns - np.maximum(rows, columns), 0)


def mrope_positions(before: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Time, row and column of tokens [n] behind others -> [n, 3]. In a text alone, all are the token's index.

    A picture's tokens have the time s at which it begins, and their rows and columns from s on. The text goes on behind
    the largest of them.
    """
    positions = np.arange(len(before), len(before) + len(ids)) - spared(before[before < 0]).sum()
    _, rows, columns, place = fields(ids)
    inside = np.where(ids < 0, [0 * place, place // columns, place % columns], 0)
    since = np.where(ids < 0, place - rows * columns + np.maximum(rows, columns), 0)
    return (positions - np.cumsum(spared(ids)) - since + inside).T


class Pictures:
    """The pictures of a model. Those shown last are kept, those of the last messages, and all that a sequence holds."""

    def __init__(self, folder: Folder, width: int, axes: np.ndarray):
        self.folder, self.lock = folder, threading.Lock()
        self.width, self.axes = width, axes  # hidden_size; by what each pair of RoPE turns: 0 time, 1 row, 2 column
        self.recent, self.latest = list[Picture](), list[Picture]()
        self.by_pixels = weakref.WeakValueDictionary[bytes, Picture]()
        self.by_number = weakref.WeakValueDictionary[int, Picture]()

    @cached_property
    def config(self) -> VisionConfig:
        """Read for the first picture, as the weights are: a text needs none."""
        return vision_config(self.folder.json("config.json")["vision_config"], self.folder.path / "config.json")

    @cached_property
    def weights(self) -> Weights:
        found = {name.removeprefix("model.visual."): to_float32(each) for name, each in self.folder.tower().items()}
        return {name: each.reshape(len(each), -1) if each.ndim > 1 else each for name, each in found.items()}

    def show(self, image: Any, max_pixels: int | None = None, min_pixels: int = MIN_PIXELS) -> Picture:
        """The Picture of a PIL image in RGB. One that is known costs no arithmetic."""
        most = checked_number("max_pixels", MAX_PIXELS if max_pixels is None else max_pixels, 1, LARGEST)
        factor = self.config.patch_size * self.config.spatial_merge_size
        height, width = smart_resize(image.height, image.width, factor, min_pixels, most)
        pixels = np.asarray(image.resize((width, height), resample=3))  # bicubic
        key = hashlib.sha256(f"{height} {width}".encode() + pixels.tobytes()).digest()
        with self.lock:
            if (picture := self.by_pixels.get(key)) is None:
                try:
                    vectors = tower(pixels, self.weights, self.config)
                except (KeyError, ValueError) as error:  # no tensor of this name, or none of this shape
                    raise InputError(f"{self.folder.path}: its tower doesn't fit its config: {brief(error)}") from error
                if vectors.shape[2] != self.width or not np.isfinite(vectors).all():
                    raise InputError(f"{self.folder.path}: the vision tower gives no {self.width} finite numbers")
                picture = Picture(next(NUMBERS), height // factor, width // factor, vectors)
                self.by_pixels[key] = self.by_number[picture.number] = picture
            self.recent = [*(each for each in self.recent if each is not picture), picture]
            while len(self.recent) > 1 and sum(each.vectors.nbytes for each in self.recent) > KEPT:
                del self.recent[0]
        return picture

    def __contains__(self, token_id: int) -> bool:
        return token_id < 0 and int(~token_id >> 36) in self.by_number

    def held(self, ids: np.ndarray) -> list[Picture]:
        """The pictures of these tokens: they stay as long as this list does."""
        return [self.by_number[number] for number in {*fields(ids[ids < 0])[0].tolist()}]

    def embed(self, model: Model, ids: np.ndarray) -> np.ndarray:
        """The embeddings of tokens [n] -> [n, hidden_size]."""
        x = model.engine.rows(model, "embed_tokens", np.maximum(ids, 0))
        x[ids < 0] = 0
        self.add(x, ids, 0)
        return x

    def add(self, x: np.ndarray, ids: np.ndarray, which: int) -> None:
        """Adds pictures' vectors to x [n, hidden_size]: 0 are the embeddings, 1 + i those of deepstack for layer i."""
        for row in np.flatnonzero(ids < 0):
            number, _, _, place = fields(ids[row])
            if which < len(vectors := self.by_number[int(number)].vectors):
                x[row] += vectors[which, place]

    def positions(self, cache: Any, ids: np.ndarray) -> np.ndarray:
        """Of the next tokens [n] of a cache, or Caches: the position by which each pair of RoPE turns [n, pairs]."""
        found = [mrope_positions(one.token_ids[:one.length], ids[rows]) for one, rows in cache.parts(len(ids))]
        return np.take(np.concatenate(found), self.axes, axis=1)


def pictures_of(folder: Folder, config: Config) -> Pictures | None:
    """The Pictures of a model; None if it can't see. Raises InputError for values that aren't supported."""
    raw = folder.json("config.json")
    if not isinstance(raw.get("vision_config"), dict):
        return None
    rope, hybrid = rope_of(raw.get("text_config", raw)), isinstance(config, HybridConfig)
    section = rope.get("mrope_section", [11, 11, 10] if hybrid else [24, 20, 20])
    if not isinstance(section, list) or len(section) != 3 or not all(isinstance(n, int) and n >= 0 for n in section):
        raise InputError(f"{folder.path}: mrope_section must be three whole numbers, not {brief(section)}")
    axes = np.zeros(config.rope_dim // 2, int)
    for axis in (1, 2):  # rows and columns take every third pair each, as long as they have some
        axes[axis:3 * section[axis]:3] = axis
    return Pictures(folder, config.hidden_size, axes)


# ---- The command line ------------------------------------------------------------------------------------------------

MARK = "<|vision_start|><|image_pad|><|vision_end|>"  # what the chat templates write for a picture


def answer(args: argparse.Namespace) -> Iterator[str]:
    """The pieces of an answer about pictures. In the prompt, each one's tokens stand in the place of <|image_pad|>."""
    from PIL import Image, ImageOps
    model = qwen3.load_model(args.model)
    if model.pictures is None:
        raise InputError(f"{args.model}: the model can't see: it has no vision tower")
    shown = []
    for file in args.image:
        with library_errors(file):
            image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        shown.append(model.pictures.show(image, args.max_pixels).ids)
    content = MARK * len(shown) + " ".join(args.prompt)
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": content}])
    first, *rest = (model.tokenizer.encode(part, False) for part in text.split("<|image_pad|>"))
    ids = [*first, *(i for picture, part in zip(shown, rest) for i in (*picture, *part))]
    return stream_text(model.tokenizer, qwen3.generate(model, ids, args.max_tokens, args.seed))


def main(argv: list[str] | None = None) -> int:
    """Answers a question about pictures -> exit status, as qwen3.main, which takes over where qwen3_lib is there."""
    sys.modules.setdefault("qwen3_vision", sys.modules[__name__])  # so that nothing imports a second copy of this file
    if qwen3.LIBRARY.is_dir():
        return qwen3.main(argv)
    parser = argparse.ArgumentParser(description="Answers a question about pictures with a Qwen3.5.")
    parser.add_argument("prompt", nargs="+", help="what to ask")
    parser.add_argument("--model", required=True, help="folder with Qwen's own files")
    parser.add_argument("--image", action="append", required=True, help="a file; may be repeated")
    parser.add_argument("--max-pixels", type=int, help="of a picture; 1,024 are a token (default: 1,048,576)")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    try:
        for piece in answer(parser.parse_args(argv)):
            print(piece, end="", flush=True)
        print()
        return 0
    except (InputError, ImportError) as error:
        print(f"qwen3_vision.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
