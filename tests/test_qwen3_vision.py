"""Pictures: files of all kinds, patches, a picture's tokens and their positions; and what sequences do with them."""
import errno
import gc
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

import qwen3
import qwen3_numba
import qwen3_vision
from configs import HYBRID, ROOT, VOCABULARY, seeing_hybrid, vl_config
from fuzzing import damaged
from helpers import assert_one_line, edit_json, message_of, random_ids, works_or_refused
from make_random_model import make_random_model
from qwen3_lib.generation.batch import Batch, generate_batch
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.guesses import Draft
from qwen3_lib.generation.score import score
from qwen3_lib.io.pictures import picture_of
from qwen3_vision import VisionConfig, mrope_positions, patches_of

COLOURS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)  # 60 pixels wide
PICTURES = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(
    [(300, 300, 3), (200, 500, 3), (300, 300, 3)])]


def saved(image, form, **options) -> bytes:
    image.save(file := io.BytesIO(), form, **options)
    return file.getvalue()


def pixels(source) -> np.ndarray:
    image = picture_of(source)
    assert image.mode == "RGB"
    return np.asarray(image)


# ---- Files -----------------------------------------------------------------------------------------------------------

def test_sources(tmp_path):
    """A path, its text, bytes, an open file, a PIL image, an array."""
    file = tmp_path / "a.png"
    file.write_bytes(saved(Image.fromarray(COLOURS), "PNG"))
    with open(file, "rb") as opened:
        for source in (file, str(file), file.read_bytes(), opened, Image.fromarray(COLOURS), COLOURS):
            assert np.array_equal(pixels(source), COLOURS)
    assert np.array_equal(pixels(COLOURS[..., 0]), COLOURS[..., :1].repeat(3, axis=2))


def test_turned_photos():
    """EXIF's eight orientations: the picture that a person sees."""
    turns = [np.asarray, np.fliplr, lambda x: np.rot90(x, 2), np.flipud, lambda x: x.swapaxes(0, 1),
             lambda x: np.rot90(x, -1), lambda x: np.rot90(x, 2).swapaxes(0, 1), np.rot90]
    for orientation, turn in enumerate(turns, 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert np.array_equal(pixels(saved(Image.fromarray(COLOURS), "PNG", exif=exif)), turn(COLOURS))


def on_white(rgb, alpha):
    return np.round(rgb * (alpha / 255.0)[..., None] + 255 * (1 - alpha / 255.0)[..., None])


def test_alpha_is_on_white():
    alpha = np.random.default_rng(1).integers(0, 256, COLOURS.shape[:2], np.uint8)
    rgba = np.dstack([COLOURS, alpha])
    assert np.abs(pixels(rgba).astype(int) - on_white(COLOURS, alpha)).max() <= 1
    assert np.abs(pixels(saved(Image.fromarray(rgba), "PNG")).astype(int) - on_white(COLOURS, alpha)).max() <= 1
    grey = Image.merge("LA", [Image.fromarray(COLOURS[..., 0]), Image.fromarray(alpha)])
    expected = on_white(COLOURS[..., :1].repeat(3, axis=2), alpha)
    assert np.abs(pixels(saved(grey, "PNG")).astype(int) - expected).max() <= 1


def test_palettes():
    palette, index = COLOURS[0, :16], np.random.default_rng(2).integers(0, 16, (40, 60), np.uint8)
    image = Image.fromarray(index).convert("P")
    image.putdata(index.reshape(-1).tolist())
    image.putpalette(palette.tobytes())
    assert np.array_equal(pixels(saved(image, "PNG")), palette[index])
    expected = np.where((index == 3)[..., None], 255, palette[index])
    assert np.array_equal(pixels(saved(image, "PNG", transparency=3)), expected)
    assert np.array_equal(pixels(saved(image, "GIF", transparency=3)), expected)


def test_other_kinds_of_pixels():
    bits = Image.fromarray(COLOURS[..., 0] > 127)
    assert np.array_equal(pixels(bits)[..., 0], np.where(COLOURS[..., 0] > 127, 255, 0))
    flat = Image.new("CMYK", (64, 64), (255, 0, 0, 0))  # all the cyan, and nothing else
    assert np.abs(pixels(saved(flat, "JPEG", quality=95))[32, 32].astype(int) - [0, 255, 255]).max() < 8


def png_of(width, height, bits=8, colours=2, data=bytes(1000), transparent=b"") -> bytes:
    """A PNG, by the specification. data: of each row a 0 and the packed pixels, or fewer."""
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"tRNS", transparent), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
        for kind, part in chunks if part or kind == b"IEND")


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("clear", [None, 1])
def test_grey_of_each_depth(bits, clear):
    """One level may be transparent: it is white, its neighbours aren't."""
    levels = np.random.default_rng(2).integers(0, 2**bits, (8, 16))
    levels[0, :4] = 0, 1, 2**bits - 2, 2**bits - 1
    data = b"".join(b"\0" + np.packbits(row[:, None] >> np.arange(bits)[::-1] & 1).tobytes() for row in levels)
    file = png_of(16, 8, bits, 0, data, b"" if clear is None else struct.pack(">H", clear))
    expected = np.where(levels == clear, 255, levels * 255 / (2**bits - 1))[..., None].repeat(3, axis=2)
    assert np.abs(pixels(file) - expected).max() < 1
    assert np.abs(pixels(Image.open(io.BytesIO(file))) - expected).max() < 1


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_animations_give_their_first_frame(form):
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "lime", "blue")]
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], duration=50)
    assert np.abs(pixels(data).astype(int) - [255, 0, 0]).max() < 10


def test_refusals(tmp_path):
    """One line that names what is wrong, before pixels take any memory."""
    folder, text, photo = tmp_path / "folder", tmp_path / "text.jpg", saved(Image.fromarray(COLOURS), "JPEG")
    folder.mkdir()
    text.write_text("This is no picture.")
    for source, words in ((tmp_path / "none.png", "no such file"), (folder, "is a folder"), (text, "text.jpg"),
                          (b"", "cannot"), ("https://example.com/cat.jpg", "download it first"),
                          (photo[:len(photo) // 2], "truncated"),
                          (png_of(30000, 30000), "pixels"), (png_of(9000, 9000), "9000 x 9000"),
                          (5, "not 5"), (None, "not None"), (saved(Image.fromarray(COLOURS), "TIFF"), "PNG, JPEG"),
                          (np.zeros((3, 4, 7), np.uint8), "cannot"),
                          *((np.zeros((3, 4), kind), "must be uint8") for kind in ("f4", "f8", "i4", "u2", "?")),
                          (Image.new("I", (3, 4)), "uint8"), (Image.new("F", (3, 4)), "uint8"),
                          (np.zeros((0, 4, 3), np.uint8), "4 x 0 pixels")):
        assert words in message_of(picture_of, source)


@pytest.mark.timeout(120)
def test_damaged_files(capfd):
    """2,000 of them, bytes changed, cut out and put in: a picture or one line, and nothing on stderr."""
    rng, small = random.Random(0), Image.fromarray(COLOURS)
    palette = small.convert("P")
    files = [saved(image, form, **options) for image, form, options in (
        (small, "PNG", {}), (palette, "PNG", {"transparency": 3}), (small, "JPEG", {}),
        (small, "JPEG", {"progressive": True}), (small, "WEBP", {}), (small, "GIF", {}),
        (small, "BMP", {}), (small.convert("CMYK"), "JPEG", {}),
        (palette, "GIF", {"save_all": True, "append_images": [palette]}), (small, "WEBP", {"lossless": True}))]
    for i in range(2000 * int(os.environ.get("FUZZ", 1))):
        head, rest = files[i % len(files)][:60], files[i % len(files)][60:]  # every second damage is in the head
        works_or_refused(picture_of, damaged(rng, head) + rest if i % 20 < 10 else damaged(rng, head + rest, 8))
    assert capfd.readouterr().err == ""


# ---- Patches, ids, positions -----------------------------------------------------------------------------------------

def test_the_drawing():
    """A picture of 64 x 96 pixels: 24 patches in blocks of four, as in the drawing at the top of qwen3_vision.py."""
    order = [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11], [12, 13, 16, 17, 20, 21], [14, 15, 18, 19, 22, 23]]
    patches = patches_of(np.array(order, np.uint8).repeat(16, 0).repeat(16, 1)[..., None].repeat(3, 2), VisionConfig())
    assert patches.shape == (24, 1536) and np.allclose(patches.mean(axis=1), np.arange(24) / 127.5 - 1)
    assert [str(i) for row in order for i in row] == [
        word for line in qwen3_vision.__doc__.splitlines() if line.strip().startswith("|")
        for word in line.replace("|", " ").split()[:6] if word.isdecimal()][:24]


def test_positions_of_any_text():
    """By the definition, token by token, for a text that may end within a picture."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids, expected, here = [], [], 0
        for number in rng.integers(0, 1000, rng.integers(0, 6)).tolist():
            for _ in range(rng.integers(0, 5)):
                ids.append(int(rng.integers(0, 1000)))
                expected.append([here] * 3)
                here += 1
            rows, columns = rng.integers(1, 7, 2).tolist()
            ids += qwen3_vision.Picture(number, rows, columns, None).ids.tolist()
            expected += [[here, here + row, here + column] for row in range(rows) for column in range(columns)]
            here += max(rows, columns)
        ids, expected = ids + [5, 6], expected + [[here] * 3, [here + 1] * 3]
        here, end = sorted(rng.integers(0, len(ids) + 1, 2).tolist())
        assert mrope_positions(np.array(ids[:here], int), np.array(ids[here:end], int)).tolist() == expected[here:end]


def test_ids_hold_each_size_that_is_not_refused():
    shown = qwen3_vision.Pictures.__new__(qwen3_vision.Pictures)
    shown.config = VisionConfig(patch_size=1, spatial_merge_size=1)  # one pixel, one token
    for sizes, side in (((400, 1), 20), ((900, 1), 30), ((None, 900), 30), ((None, 1600), 40)):
        assert shown.size(Image.new("L", (30, 30)), *sizes) == (side, side)
    for rows, columns, fits in ((1800, 9, True), (9, 1800, True), (128, 128, True), (2100, 11, False),
                                (11, 2100, False), (128, 129, False), (127, 130, False)):
        image = Image.new("L", (columns, rows))
        if not fits:
            assert "max_pixels" in message_of(shown.size, image, None, 1)
            continue
        assert shown.size(image, None, 1) == (rows, columns)
        for number in (0, 2**27 - 1):
            ids = qwen3_vision.Picture(number, rows, columns, None).ids
            found = [set(each.tolist()) for each in qwen3_vision.fields(ids)]
            assert max(ids) < 0 and found == [{number}, {rows}, {columns}, {*range(rows * columns)}]


# ---- Sequences with pictures -----------------------------------------------------------------------------------------

CONFIGS = {"VL": vl_config("2B"), "3.5": seeing_hybrid(HYBRID, "0.8B")}


def make_seeing(config, path):
    """A random model that sees, with the bundled tokenizer and the three tokens around a picture."""
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    config["text_config"] |= {"vocab_size": VOCABULARY + len(names)}
    make_random_model(config, path, "float32")
    tokenizer = json.loads((path / "tokenizer.json").read_text("utf-8"))
    one = tokenizer["added_tokens"][0] | {"special": True}
    tokenizer["added_tokens"] += [one | {"id": VOCABULARY + i, "content": name} for i, name in enumerate(names)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return path


@pytest.fixture(scope="module", params=CONFIGS)
def path(request, tmp_path_factory):
    return make_seeing(CONFIGS[request.param], tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module", params=["NumPy", "fast"])
def model(request, path):
    return qwen3.load_model(path, qwen3_numba.engine() if request.param == "fast" else qwen3.Engine())


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_deepstack_with_no_more_layers_than_vectors(n_layers, tmp_path):
    """A pruned model: three vectors to add, the last of them after the last layer."""
    config = vl_config("2B")
    path = make_seeing(config | {"text_config": config["text_config"] | {"num_hidden_layers": n_layers}}, tmp_path)
    plain, fast = (qwen3.load_model(path, engine) for engine in (qwen3.Engine(), qwen3_numba.engine(kv_dtype="f32")))
    expected, found = (qwen3.forward(model, ids_of(model, random_ids(5), 0, random_ids(5)),
                                     model.engine.new_cache(model.config), slice(None)) for model in (plain, fast))
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())


def ids_of(model, *parts) -> np.ndarray:
    """Numbers stand for PICTURES, lists are token ids."""
    return np.concatenate([show(model, PICTURES[part]).ids if isinstance(part, int) else part for part in parts])


def show(model, source, max_pixels=None):
    return model.media.show(picture_of(source), max_pixels)


def answer(model, ids, **options):
    return list(qwen3.generate(model, ids, 12, eos_token_ids=(), **{"temperature": 0} | options))


def test_a_picture_matters_and_so_does_its_place(model):
    text = random_ids(12)
    prompts = [ids_of(model, *parts) for parts in ((text, 0), (text, 2), (0, text), (text[:3], 0, text[3:]))]
    found = [qwen3.forward(model, [*ids, 5], model.engine.new_cache(model.config)) for ids in prompts]
    assert all(np.abs(a - b).max() > 0.01 for i, a in enumerate(found) for b in found[:i])
    assert len(prompts[0]) == len(prompts[1])  # two pictures of one size


def test_a_picture_is_computed_once(model, monkeypatch):
    shown = show(model, PICTURES[0])
    monkeypatch.setattr(qwen3_vision, "tower", None)
    assert show(model, saved(Image.fromarray(PICTURES[0]), "PNG")) is shown
    monkeypatch.undo()
    small = show(model, PICTURES[0], max_pixels=2**14)
    assert small.number != shown.number and len(small.ids) <= 16 < len(shown.ids)
    assert show(model, PICTURES[2]).number not in (shown.number, small.number)
    wide, high = (show(model, np.full((*size, 3), 255, np.uint8)) for size in ((64, 128), (128, 64)))
    assert (wide.rows, wide.columns) == (high.columns, high.rows) != (high.rows, high.columns)
    assert "max_pixels" in message_of(show, model, PICTURES[0], max_pixels=2**24 + 1)


def test_what_is_kept(model, monkeypatch):
    """The pictures shown last, and those of sequences, also of one that waits."""
    monkeypatch.setattr(qwen3_vision, "KEPT_PICTURES", 0)
    ids = ids_of(model, random_ids(4), 0)
    sequence = qwen3.Sequence(model, ids)
    show(model, PICTURES[1])
    gc.collect()
    assert answer(model, ids) == answer(model, ids)
    del sequence
    gc.collect()
    assert "out of range" in message_of(qwen3.Sequence, model, ids)
    assert not {*ids_of(model, 0)} & {*ids}  # a number is given once
    number = show(model, PICTURES[1]).number
    gc.collect()
    assert show(model, PICTURES[1]).number == number  # the last one stays, however large it is


def test_vectors_take_the_place_of_embeddings_and_are_added_behind_layers(model):
    """And the other tokens stay as they are."""
    picture = show(model, PICTURES[0])
    ids = np.array([0, *picture.ids, 0])
    [new] = qwen3.passes(model, [qwen3.NextTokens(model.engine.new_cache(model.config), ids)])
    assert np.array_equal(new.x[1:-1], picture.vectors[0])
    assert np.array_equal(new.x[[0, -1]], model.engine.rows(model, "embed_tokens", [0, 0]))
    assert np.array_equal(new.added[:, 1:-1], picture.vectors[1:]) and not new.added[:, [0, -1]].any()


def test_ids_that_are_no_picture(model):
    for wrong in (-1, -2**62, int(ids_of(model, 1)[0]) - 2**60):
        assert "out of range" in message_of(qwen3.generate, model, [3, wrong])


def test_the_same_bits_alone_and_in_company(model):
    text = random_ids(30)
    prompts = [ids_of(model, text[:5], 0, text), ids_of(model, text),
               ids_of(model, text[:5], 2, text[:3], 1, text[5:9])]
    alone = [answer(model, ids) for ids in prompts]
    assert generate_batch(model, prompts, 12, eos_token_ids=(), temperature=0) == alone
    if isinstance(model.weights, dict):  # BLAS takes other ways for other shapes
        return
    logits = [qwen3.forward(model, ids, model.engine.new_cache(model.config)) for ids in prompts]
    cache = model.engine.new_cache(model.config)
    pieces = [qwen3.forward(model, piece, cache) for piece in np.array_split(prompts[2], 7)]
    assert np.array_equal(pieces[-1], logits[2])


def test_prefixes_in_a_batch(model):
    """A prompt with the same picture takes its beginning from another slot; one with another picture doesn't."""
    text = random_ids(20)
    prompts = [ids_of(model, text, picture, text[:4], [i]) for i, picture in enumerate((0, 0, 2))]
    batch = Batch(model, 3, 400)
    found = []
    for i, prompt in enumerate(prompts):
        found.append(batch.add(i, prompt, max_new_tokens=12, eos_token_ids=(), temperature=0))
        while not batch.idle:
            batch.step()
    hybrid = hasattr(model.config, "linear_layers")
    assert [one.cached_tokens for one in found] == [0, 0 if hybrid else len(prompts[0]) - 1, 0 if hybrid else 20]
    assert [one.token_ids for one in found] == [answer(model, prompt) for prompt in prompts]


def test_a_second_turn(model):
    """The cache keeps the first picture; of another picture in its place, it keeps only what was before."""
    cache, first = model.engine.new_cache(model.config), ids_of(model, random_ids(9), 0, random_ids(5))
    said = answer(model, first, cache=cache)
    second = np.concatenate([first, said, ids_of(model, 1, random_ids(3))])
    assert answer(model, second, cache=cache) == answer(model, second)
    other = ids_of(model, random_ids(9), 2, random_ids(5))
    assert cache.common_prefix(other) in (0, 9) and answer(model, other, cache=cache) == answer(model, other)


def test_guesses_and_penalties(model):
    ids = ids_of(model, random_ids(9), 0, random_ids(9), 0, random_ids(4))
    plain = answer(model, ids)
    for options in ({"lookup": 4}, {"draft": Draft(model, model)}, {"draft": qwen3.load_model(model.path)}):
        guessing = Completion(model, ids, max_new_tokens=12, eos_token_ids=(), temperature=0, **options)
        assert guessing.finish().token_ids == plain
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "temperature": 0}
    logits = qwen3.forward(model, ids, model.engine.new_cache(model.config))
    words = np.unique(ids[ids >= 0])
    expected = np.where(logits > 0, logits / np.float32(1.3), logits * np.float32(1.3))
    expected = np.where(np.isin(np.arange(len(logits)), words), expected, logits)
    assert answer(model, ids, **options)[0] == expected.argmax()
    assert Completion(model, ids, max_new_tokens=3, logprobs=2, eos_token_ids=()).finish().logprobs


def test_pictures_have_no_probability(model):
    assert "no probability" in message_of(score, model, ids_of(model, [3], 0, [4]))


# ---- Conversations ---------------------------------------------------------------------------------------------------

def asked(*parts, role="user"):
    return {"role": role, "content": [
        {"type": "text", "text": part} if isinstance(part, str) else part if isinstance(part, dict) else
        {"type": "image", "image": part} for part in parts]}


def prompt_of(model, *messages, **options):
    return qwen3.chat(model, [*messages], max_new_tokens=1, **options).prompt_ids.tolist()


def test_messages_with_pictures(model):
    """Each pad token of the template's text becomes the picture's tokens."""
    start, end = (model.tokenizer.token_to_id(f"<|vision_{name}|>") for name in ("start", "end"))
    pictures = [[start, *ids_of(model, i).tolist(), end] for i in range(2)]
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": "Aé<<>>B<<>>"}])
    before, between, behind = (model.tokenizer.encode(part, False) for part in text.split("<<>>"))
    found = prompt_of(model, asked("Aé", PICTURES[0], "B", PICTURES[1]))
    assert found == before + pictures[0] + between + pictures[1] + behind
    first, said = asked("What?", PICTURES[0]), {"role": "assistant", "content": "This."}
    talk = prompt_of(model, first, said, asked(PICTURES[1], "And", "?"))
    assert talk[:len(found := prompt_of(model, first)[:-9])] == found
    assert [i for i in talk if i < 0] == [*ids_of(model, 0, 1)]
    assert prompt_of(model, asked("A ", "text", " alone")) == \
        prompt_of(model, {"role": "user", "content": "A text alone"})


def test_messages_that_are_refused(model):
    video, audio = {"type": "video", "video": "a.mp4"}, {"type": "input_audio", "input_audio": {}}
    for message, words in ((asked("<|image_pad|>", PICTURES[0]), "<|image_pad|>"),
                           (asked(PICTURES[0], role="system"), "system"), (asked(video), "a video"),
                           (asked(audio), "audio"), (asked("none.jpg", {"type": "image"}), "no url"),
                           (asked({"type": "image", "image": "none.jpg"}), "no such file"),
                           (asked({"type": "image_url", "image_url": {"url": "http://a/b.png"}}),
                            "not opened: 'http://a/b.png'"),
                           (asked({"type": "image", "image": COLOURS, "min_pixels": "a"}), "min_pixels"),
                           (asked({"type": "image", "image": COLOURS, "max_pixels": 0}), "max_pixels"),
                           (asked(np.zeros((7000, 30, 3), np.uint8)), "200 times")):
        assert words in message_of(qwen3.chat, model, [message])


def test_a_model_that_reads_only(demo):
    """A text without pictures may have the token of a picture, as in transformers."""
    messages = [{"role": "user", "content": "What is <|image_pad|>?"}]
    expected = demo.tokenizer.encode(demo.tokenizer.apply_chat_template(messages), False)
    assert demo.tokenizer.token_to_id("<|image_pad|>") in expected and prompt_of(demo, *messages) == expected
    assert "the model can't see" in message_of(qwen3.chat, demo, [asked("What?", PICTURES[0].tolist())])


def test_weights_that_do_not_fit(path, tmp_path):
    for name, changes, words in (("depth", {"depth": 9}, "blocks."), ("heads", {"num_heads": 5}, "doesn't fit"),
                                 ("size", {"patch_size": 8}, "doesn't fit")):
        shutil.copytree(path, tmp_path / name)
        raw = json.loads((path / "config.json").read_text())
        edit_json(tmp_path / name / "config.json", {"vision_config": raw["vision_config"] | changes})
        model = qwen3.load_model(tmp_path / name)
        assert words in message_of(show, model, COLOURS)
        assert answer(model, random_ids(5))  # of a text, as any model
    model = qwen3.load_model(path)
    model.media.weights["merger.linear_fc2.bias"] = np.float32(np.nan)
    assert "finite" in message_of(show, model, COLOURS)
    edit_json(tmp_path / name / "config.json", {"vision_config": raw["vision_config"] | {"hidden_act": "relu"}})
    assert "vision_config" in message_of(show, qwen3.load_model(tmp_path / name), COLOURS)


@pytest.mark.parametrize("section", [[1, 2], [1, 2, "3"], [1, 2, -3], [1.5, 2, 3], [1, 2, 3, 4], "123"], ids=str)
def test_sections_of_rope_that_can_not_be(path, section, tmp_path):
    shutil.copytree(path, tmp_path / "model")
    text = json.loads((path / "config.json").read_text())["text_config"]
    key = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    edit_json(tmp_path / "model/config.json", {"text_config": text | {key: text[key] | {"mrope_section": section}}})
    assert_one_line(message_of(qwen3.load_model, tmp_path / "model"), str(tmp_path), "three whole numbers")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs qwen3_vision.py in a folder with the three files that it stands on and a.png, without qwen3_lib."""
    folder = tmp_path_factory.mktemp("four files")
    for name in ("qwen3.py", "qwen3_5.py", "qwen3_vision.py", "tokenizer_utils.py"):
        shutil.copy(ROOT / name, folder)
    pixels = np.full((200, 200, 3), 230, np.uint8)
    pixels[40:180, 30:170] = 200, 45, 50
    Image.fromarray(pixels).save(folder / "a.png")

    def run(model, *arguments):
        done = subprocess.run([sys.executable, "qwen3_vision.py", "--model", model, *arguments], cwd=folder, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    return run


def test_four_files_alone(alone, tmp_path):
    tiny, asked = ROOT / "tests/tiny_seeing", ("--max-pixels", "4096", "What is this?")
    assert alone(tiny, "--image", "a.png", *asked) == (0, "red square\n", "")
    pixels = np.zeros((200, 200, 4), np.uint8)  # transparency is laid on white
    pixels[40:180, 30:170] = 200, 45, 50, 255
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    assert alone(tiny, "--image", tmp_path / "clear.png", *asked) == (0, "red square\n", "")
    (tmp_path / "text.png").write_text("This is no picture.")
    Image.new("RGB", (300, 1)).save(tmp_path / "narrow.png")
    for model, arguments, status, *words in (
            (tiny, ("none.png", *asked), 1, "none.png: cannot be read: ", os.strerror(errno.ENOENT)),
            (tiny, (tmp_path / "text.png", *asked), 1, "text.png: cannot be read: "),
            (tiny, (tmp_path / "narrow.png", *asked), 1, "narrow.png: cannot be read: ", "300 x 1 pixels"),
            (tiny, ("a.png", "--max-pixels", "abc", "What?"), 2, "--max-pixels", "abc"),
            (tiny, ("a.png", "<|image_pad|>"), 1, "stands for"), (ROOT / "demo", ("a.png", "What?"), 1, "can't see")):
        found, out, err = alone(model, "--image", *arguments)
        assert (found, out) == (status, "")
        assert_one_line(err, *words)


def test_four_files_alone_with_all_options(alone, path, tmp_path):
    """A Qwen3-VL and a Qwen3.5, two pictures, a system message: what the library answers to the same conversation."""
    shutil.copytree(path, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"do_sample": true, "temperature": 2.0, "top_k": 0}')
    model, file = qwen3.load_model(tmp_path / "model"), tmp_path / "b.png"
    Image.fromarray(PICTURES[1]).save(file)
    expected = qwen3.chat(model, [asked(file, file, "What is this?")], system="Short.", enable_thinking=False,
                          max_tokens=6, seed=5, top_k=30)
    options = ("--system", "Short.", "--no-think", "--max-tokens", "6", "--seed", "5", "--top-k", "30")
    assert alone(model.path, "--image", file, "--image", file, *options, "What is", "this?") == (0, f"{expected}\n", "")


def test_a_mixture_needs_the_library(alone, tmp_path):
    make_random_model(vl_config("30B-A3B"), tmp_path, "float32")
    status, out, err = alone(tmp_path, "--image", "a.png", "What?")
    assert (status, out) == (1, "")
    assert_one_line(err, "qwen3_vl_moe", "qwen3_lib")
