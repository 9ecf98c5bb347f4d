# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "jinja2>=3.1.6", "prompt_toolkit>=3.0.40",
#                 "threadpoolctl>=3.5", "pillow>=10.3"]
# ///
"""Pictures for Qwen3-VL and Qwen3.5 in plain NumPy: from a photo to vectors that stand beside those of the words.

    python qwen3_vision.py --model Qwen3-VL-2B-Instruct --image photo.jpg "What is this?"     a folder with Qwen's files

This file stands on qwen3.py, which you should read first; a Qwen3.5 needs qwen3_5.py, too. Read it from top to bottom:

    config -> RGB -> size -> patches -> tower -> a picture's tokens -> positions -> a model's pictures -> main

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

    patch        a square of 16 x 16 pixels, the token of the tower
    tower        a transformer that reads patches; each patch sees all patches of its picture
    merger       joins four neighbouring patches, and maps them to the width of the language model
    deepstack    in a Qwen3-VL, mergers read earlier blocks, too; the results are added after the first decoder layers
    M-RoPE       RoPE with three positions for a token: time, row and column; for a word, the three are equal
"""
from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import sys
import threading
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

if __name__ == "__main__" and (absent := [name for name in ("qwen3", "PIL") if find_spec(name) is None]):
    sys.exit(f"qwen3_vision.py: no module {absent[0]}: it needs qwen3.py beside it, and: pip install pillow "
             "numpy safetensors tokenizers jinja2")

import qwen3  # first: it says in one line what is missing
import numpy as np
from qwen3 import (Media, Model, Source, TokenIds, apply_rope, attention_in_blocks, checked_number, checked_whole,
                   dense, gelu, layer_norm, rope_of, to_float32)
from tokenizer_utils import InputError, brief, library_errors, with_system

__all__ = ["Picture", "Pictures", "VisionConfig", "patches_of", "smart_resize", "tower"]

# ---- Config, and a picture in patches --------------------------------------------------------------------------------

MIN_PIXELS, MAX_PIXELS = 2**16, 2**20  # of a picture for the tower: 64 to 1,024 tokens, unless the caller says so
PIXELS_LIMIT = 2**24  # the largest max_pixels: 16,384 tokens


@dataclass(frozen=True)
class VisionConfig:
    """The fields of vision_config in config.json that the tensors don't tell, under Hugging Face's names."""
    depth: int = 27  # blocks of the tower
    num_heads: int = 16
    patch_size: int = 16  # pixels, the side of a patch
    spatial_merge_size: int = 2  # patches, the side of the square that becomes one token
    temporal_patch_size: int = 2  # frames of a patch: the tower was trained with videos, too
    deepstack_visual_indexes: tuple[int, ...] = ()  # the blocks that deepstack reads
    rope_theta: float = 1e4

    @property
    def side(self) -> int:
        """The side of a token in pixels."""
        return self.patch_size * self.spatial_merge_size


def rgb(source: Any, where: str) -> Any:
    """A picture's file, or an image of Pillow -> an image of Pillow in RGB, upright and on white. Raises InputError."""
    from PIL import Image, ImageOps
    with library_errors(f"{where}: cannot be read"):
        opened = source if isinstance(source, Image.Image) else Image.open(source)
        scale = {"L;2": 85, "L;4": 17}.get(tile[0][3], 1) if (tile := getattr(opened, "tile", None)) else 1
        image = ImageOps.exif_transpose(opened)
        if image.mode in ("I", "F"):
            raise InputError("its pixels must be uint8")
        if scale > 1 and "transparency" in image.info:  # Pillow makes pixels of 2 and 4 bits 0 to 255, but not this one
            image.info["transparency"] *= scale
        if image.mode.startswith("I;16"):  # grey of 16 bits
            grey, clear = np.asarray(image), image.info.get("transparency", -1)
            image = Image.fromarray(np.dstack([grey // 256, (grey != clear) * np.uint8(255)]).astype(np.uint8))
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        smart_resize(image.height, image.width, 1, 0, math.inf)  # raises InputError if it is too narrow
        return image.convert("RGB")


def smart_resize(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """A picture's size -> one near it, in multiples of `factor`, the side of a token, with pixels within the limits."""
    if max(height, width) > 200 * min(height, width):
        raise InputError(f"a picture of {width} x {height} pixels is too narrow: a side is over 200 times the other")
    sides = [round(side / factor) * factor for side in (height, width)]
    if sides[0] * sides[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif sides[0] * sides[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def in_blocks(grid: np.ndarray, m: int) -> np.ndarray:
    """A grid of cells [rows, columns, ...] -> the cells in blocks of m x m, block after block [rows * columns, ...]."""
    rows, columns, *cell = grid.shape
    return grid.reshape(rows // m, m, columns // m, m, *cell).swapaxes(1, 2).reshape(-1, *cell)


def patches_of(pixels: np.ndarray, config: VisionConfig) -> np.ndarray:
    """Pixels uint8 [height, width, 3] -> patches float32 [n, 3 * 2 * 16 * 16], in blocks of 2 x 2."""
    size, half = config.patch_size, np.float32(0.5)
    levels = ((pixels / 255).astype(np.float32) - half) / half  # from -1 to 1
    grid = levels.reshape(len(pixels) // size, size, -1, size, 3)  # [rows, 16, columns, 16, 3]
    patches = in_blocks(grid.transpose(0, 2, 4, 1, 3), config.spatial_merge_size)  # [n, 3, 16, 16]
    return patches[:, :, None].repeat(config.temporal_patch_size, axis=2).reshape(len(patches), -1)


# ---- Tower -----------------------------------------------------------------------------------------------------------

@np.errstate(over="ignore")
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """Nearly gelu, and what the blocks were trained with: x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))."""
    gate = x * x * np.float32(-2 * math.sqrt(2 / math.pi) * 0.044715) - np.float32(2 * math.sqrt(2 / math.pi))
    gate *= x  # from here on in place: x is the largest array of a block
    np.exp(gate, out=gate)  # may overflow to inf: then the result is -0, which is right
    gate += 1
    return np.divide(x, gate, out=gate)


def position_embedding(table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A learned vector for each patch: table [side * side, width] -> [rows, columns, width].

    The table is a square grid, stretched over the picture. A patch gets a mix of the four vectors around it (bilinear).
    """
    side = math.isqrt(len(table))
    of_rows, of_columns = (np.maximum(1 - np.abs(np.linspace(0, side - 1, n)[:, None] - np.arange(side)), 0)
                           .astype(np.float32) for n in (rows, columns))  # [n, side]: the shares in the mix
    return of_columns @ (of_rows @ table.reshape(side, -1)).reshape(rows, side, -1)


def block(x: np.ndarray, w: dict[str, Any], name: str, n_heads: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One block of the tower: x [n, hidden_size] -> the same shape. cos and sin [n, head_dim / 2] are those of RoPE."""
    n = len(x)
    qkv = dense(layer_norm(x, w, f"{name}.norm1", 1e-6), w, f"{name}.attn.qkv")
    q, k, v = qkv.reshape(n, 3, n_heads, -1).transpose(1, 2, 0, 3)  # [n_heads, n, head_dim] each
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    # Each patch sees all. Head by head, the scores stay in the CPU's cache: 1.2 times as fast for 4,096 patches.
    heads = [attention_in_blocks(q[i:i + 1], k[i:i + 1], v[i:i + 1], causal=False)[0] for i in range(n_heads)]
    x = x + dense(np.concatenate(heads, axis=1), w, f"{name}.attn.proj")
    hidden = gelu_tanh(dense(layer_norm(x, w, f"{name}.norm2", 1e-6), w, f"{name}.mlp.linear_fc1"))
    return x + dense(hidden, w, f"{name}.mlp.linear_fc2")


def merger(x: np.ndarray, w: dict[str, Any], name: str) -> np.ndarray:
    """Four neighbours side by side become a token: x [n, hidden_size] -> [n / 4, the language model's hidden_size]."""
    normed, joined = len(w[f"{name}.norm.weight"]), w[f"{name}.linear_fc1.weight"].shape[1]
    x = layer_norm(x.reshape(-1, normed), w, f"{name}.norm", 1e-6).reshape(-1, joined)  # deepstack: of all four
    return dense(gelu(dense(x, w, f"{name}.linear_fc1")), w, f"{name}.linear_fc2")


def tower(pixels: np.ndarray, w: dict[str, Any], config: VisionConfig) -> np.ndarray:
    """Pixels uint8 [height, width, 3] -> float32 [1 + deepstack, tokens, width of the merger], the embeddings first."""
    (rows, columns), m = (side // config.patch_size for side in pixels.shape[:2]), config.spatial_merge_size
    x = dense(patches_of(pixels, config), w, "patch_embed.proj")  # [n, hidden_size]
    x = x + in_blocks(position_embedding(w["pos_embed.weight"], rows, columns), m)
    # RoPE in two dimensions: half of the pairs of a head turn by the patch's row, the other half by its column.
    places = in_blocks(np.indices((rows, columns), np.float32).transpose(1, 2, 0), m)  # row and column [n, 2]
    pairs = x.shape[1] // config.num_heads // 2  # of a head
    frequencies = 1 / (config.rope_theta ** (np.arange(0, pairs, 2) / pairs)).astype(np.float32)  # [pairs / 2]
    angles = (places[:, :, None] * frequencies).reshape(len(places), pairs)
    cos, sin, deep = np.cos(angles), np.sin(angles), []
    for i in range(config.depth):
        x = block(x, w, f"blocks.{i}", config.num_heads, cos, sin)
        if i in config.deepstack_visual_indexes:
            deep.append(merger(x, w, f"deepstack_merger_list.{config.deepstack_visual_indexes.index(i)}"))
    return np.stack([merger(x, w, "merger"), *deep])


# ---- A picture's tokens ----------------------------------------------------------------------------------------------
# Their ids are below 0, see qwen3.Media: ~id holds the picture's number, its rows and columns of tokens, and a token's
# place among them. So positions follow from the ids alone.

PICTURE_NUMBERS = itertools.count(1)  # so that -1 is no picture
KEPT_PICTURES = 2**28  # bytes of vectors kept though no sequence holds them: 64 pictures of 1,024 tokens, Qwen3.5-0.8B


@dataclass(frozen=True, eq=False)
class Picture:
    """What the language model sees of a picture: `vectors` [1 + deepstack, rows * columns, hidden_size], by `tower`."""
    number: int
    rows: int
    columns: int
    vectors: np.ndarray
    digest: bytes = bytes(32)  # of what it was made of

    @property
    def ids(self) -> np.ndarray:
        """The ids of its tokens [rows * columns]."""
        return ~((self.number << 36 | self.rows << 25 | self.columns << 14) + np.arange(self.rows * self.columns))


def fields(ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """Picture.ids taken apart: of tokens [n], the picture's number, its rows, its columns, the token's place."""
    return ~ids >> 36, ~ids >> 25 & 0x7FF, ~ids >> 14 & 0x7FF, ~ids & 0x3FFF


def mrope_positions(before: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The positions of tokens [n] after the tokens `before` -> time, row and column of each [n, 3].

    Two words, a picture of 2 x 3 tokens, a word, a picture of 1 x 2 tokens:

        time      0  1   2  2  2  2  2  2   5   6  6       a picture's tokens have the time at which it begins,
        row       0  1   2  2  2  3  3  3   5   6  6       and count their rows and columns from there;
        column    0  1   2  3  4  2  3  4   5   6  7       what follows comes after the largest of these numbers
    """
    words = np.count_nonzero(before >= 0)  # each moves what follows by 1, wherever it stands
    ids = np.concatenate([before[before < 0], ids])
    _, rows, columns, place = fields(ids)
    steps = np.where(ids >= 0, 1, np.where(place + 1 == rows * columns, np.maximum(rows, columns), 0))
    inside = np.where(ids < 0, [0 * place, place // columns, place % columns], 0)
    return (words + np.cumsum(steps) - steps + inside).T[len(before) - words:]


# ---- A model's pictures ----------------------------------------------------------------------------------------------

class Pictures(Media):
    """The pictures of a model: those shown last are kept, and all that a sequence holds."""

    def __init__(self, source: Source):
        super().__init__()
        self.source, self.width, self.lock = source, source.config.hidden_size, threading.Lock()
        self.recent = list[Picture]()
        section = rope_of(source.language).get("mrope_section", source.kind.seeing.get("mrope_section"))
        if not isinstance(section, list) or [isinstance(n, int) and n >= 0 for n in section] != [True] * 3:
            raise InputError(f"{source.path}: mrope_section must be three whole numbers, not {brief(section)}")
        self.axes = np.zeros(source.config.rope_dim // 2, int)  # what turns each pair of RoPE: 0 time, 1 row, 2 column
        for axis in (1, 2):  # of the first pairs, every third one turns by the row, and every third one by the column
            self.axes[axis:3 * section[axis]:3] = axis

    @cached_property
    def config(self) -> VisionConfig:
        """Read for the first picture, as the weights are. Raises InputError for values that aren't supported."""
        raw, where = self.source.about["vision_config"], f"{self.source.path / 'config.json'}: "
        usual = asdict(VisionConfig()) | self.source.kind.seeing
        found = {name: usual[name] if raw.get(name) is None else raw[name] for name in asdict(VisionConfig())}
        deep, rope = found.pop("deepstack_visual_indexes"), rope_of({"rope_theta": found.pop("rope_theta")} | raw)
        theta = checked_number(f"{where}rope_theta of vision_config", rope["rope_theta"], 1.1, 1e12)
        sizes = {name: checked_whole(f"{where}{name} of vision_config", value, 1) for name, value in found.items()}
        if raw.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or not isinstance(deep, list | tuple) \
                or rope["rope_type"] not in ("default", "axial") \
                or not {*deep} <= {*range(sizes["depth"])}:
            raise InputError(f"{where}this vision_config is not supported: {brief(raw, 400)}")
        return VisionConfig(**sizes, deepstack_visual_indexes=tuple(deep), rope_theta=theta)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        found = {name.removeprefix("model.visual."): to_float32(each) for name, each in self.source.tower.items()}
        return {name: each.reshape(len(each), -1) if each.ndim > 1 else each for name, each in found.items()}

    def size(self, image: Any, max_pixels: int | None = None, min_pixels: int = MIN_PIXELS) -> tuple[int, int]:
        """The rows and columns of tokens that a PIL image has. Raises InputError for more than Picture.ids can hold."""
        most = checked_number("max_pixels", MAX_PIXELS if max_pixels is None else max_pixels, 1, PIXELS_LIMIT)
        least, side = checked_number("min_pixels", min_pixels, 1, PIXELS_LIMIT), self.config.side
        rows, columns = (n // side for n in smart_resize(image.height, image.width, side, least, most))
        if rows * columns > 2**14:  # fewer than 2,048 rows, as a side is at most 200 times the other
            raise InputError(f"a picture of {rows:,} x {columns:,} tokens is too large: lower max_pixels")
        return rows, columns

    def show(self, image: Any, max_pixels: int | None = None, min_pixels: int = MIN_PIXELS) -> Picture:
        """The Picture of a PIL image in RGB. One that is kept costs no arithmetic."""
        (rows, columns), side = self.size(image, max_pixels, min_pixels), self.config.side
        pixels = np.asarray(image.resize((columns * side, rows * side), resample=3))  # bicubic
        key = hashlib.sha256(f"{rows} {columns}".encode() + pixels.tobytes()).digest()
        with self.lock:
            if (picture := self.known.get(key)) is None:
                try:
                    vectors = tower(pixels, self.weights, self.config)
                except (KeyError, ValueError) as error:  # no tensor of this name, or none of this shape
                    raise InputError(f"{self.source.path}: its tower doesn't fit its config: {brief(error)}") from error
                if vectors.shape[2] != self.width or not np.isfinite(vectors).all():
                    raise InputError(f"{self.source.path}: the vision tower gives no {self.width} finite numbers")
                picture = Picture(next(PICTURE_NUMBERS), rows, columns, vectors, key)
                self.known[key] = self.known[picture.number] = picture
            self.recent = [*(each for each in self.recent if each is not picture), picture]
            while len(self.recent) > 1 and sum(each.vectors.nbytes for each in self.recent) > KEPT_PICTURES:
                del self.recent[0]
        return picture

    def positions(self, before: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Of tokens [n] after the tokens `before`: by what each pair of RoPE turns [n, rope_dim / 2]."""
        return np.take(mrope_positions(before, ids), self.axes, axis=1)


def media_of(source: Source) -> Pictures | None:
    """A model's Pictures, or None if it has no tower."""
    return Pictures(source) if isinstance(source.about.get("vision_config"), dict) else None


def sees(model: Model) -> bool:
    """Whether a model sees pictures."""
    return isinstance(model.media, Pictures)


def prompt_ids(model: Model, ids: TokenIds, pictures: list[Picture]) -> TokenIds:
    """The ids of a prompt, with a picture's in place of each <|image_pad|>, which the chat template has written."""
    if not pictures:
        return ids
    ids = np.asarray(ids)
    first, *rest = np.split(ids, np.flatnonzero(ids == model.tokenizer.token_to_id("<|image_pad|>")))
    if len(rest) != len(pictures):
        raise InputError(f"messages: <|image_pad|>, which stands for a picture, comes {len(rest)} times for "
                         f"{len(pictures)} pictures: leave it out of texts")
    return np.concatenate([first, *(part for each, after in zip(pictures, rest) for part in (each.ids, after[1:]))])


# ---- The command line ------------------------------------------------------------------------------------------------

def chat(model: Model, prompt: str, image: list[str], max_pixels: int | None, system: str | None,
         enable_thinking: bool | None, max_tokens: int | None, seed: int | None, **sampling: Any) -> qwen3.Stream:
    """qwen3.chat about pictures in files: the template writes <|image_pad|>, and a picture's ids take its place."""
    if not sees(model):
        raise InputError(f"{model.path}: the model can't see: it has no vision tower")
    shown = [model.media.show(rgb(file, file), max_pixels) for file in image]
    messages = [{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>" * len(shown) + prompt}]
    text = model.tokenizer.apply_chat_template(with_system(messages, system), enable_thinking=enable_thinking)
    ids = prompt_ids(model, model.tokenizer.encode(text, False), shown)
    settings = qwen3.default_sampling(model, enable_thinking).updated(**sampling)
    return qwen3.Stream(model, qwen3.Sequence(model, ids, max_tokens, seed, sampling=settings))


def main(argv: list[str] | None = None) -> int:
    """qwen3.main, with pictures -> exit status."""
    sys.modules.setdefault("qwen3_vision", sys.modules[__name__])  # so that load_model imports no second copy
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--image", action="append", required=True, metavar="FILE", help="a picture; may be repeated")
    more.add_argument("--max-pixels", type=int, metavar="N", help="of a picture, 1,024 a token (default: 1,048,576)")
    return qwen3.main(argv, chat, (more,))


if __name__ == "__main__":
    sys.exit(main())
