"""Live comparison of what models see with transformers in float64: pixels, towers, whole models. Skipped
without torch."""
import numpy as np
import pytest
from PIL import Image

import qwen3
import qwen3_vision
from configs import FLASH, HYBRID, HYBRID_MOE, TOWERS, VL_SIZES, seeing_hybrid, tower_config, vl_config
from helpers import logits_of
from make_random_model import make_random_model
from published import write_tensors
from qwen3 import map_safetensors
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.page.contents import PageOptions, contents
from qwen3_vision import VisionConfig, patches_of, smart_resize, tower

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_inspect import unpacked  # noqa: E402
from test_qwen3_vision import CONFIGS, make_seeing  # noqa: E402
from test_reference import both_engines, load  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

PAD = 6  # image_token_id of the random models


def noise(width, height, seed=0):
    """A picture of patches in random colours with random pixels on them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 200, (height // 20 + 1, width // 20 + 1, 3)).repeat(20, 0).repeat(20, 1)[:height, :width]
    return Image.fromarray((coarse + rng.integers(0, 56, coarse.shape)).astype(np.uint8))


def processed(images, max_pixels=qwen3_vision.MAX_PIXELS):
    """What transformers makes of pictures: pixel_values, image_grid_thw."""
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 2**16, "longest_edge": max_pixels}, patch_size=16,
                                         image_mean=[0.5] * 3, image_std=[0.5] * 3)
    found = processor(images, return_tensors="pt")
    return {"pixel_values": found["pixel_values"].double(), "image_grid_thw": found["image_grid_thw"]}


# ---- Pixels ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [(640, 480), (480, 640), (1, 1), (4032, 3024), (31, 4000), (5000, 30), (256, 256),
                                  (7, 1399)])
def test_pixels(size):
    """Bit by bit, of any shape; a phone's photo has at most 1,024 tokens."""
    image = noise(*size)
    height, width = smart_resize(image.height, image.width, 32, 2**16, qwen3_vision.MAX_PIXELS)
    patches = patches_of(np.asarray(image.resize((width, height), 3)), VisionConfig())
    expected = processed([image])
    assert expected["image_grid_thw"].tolist() == [[1, height // 16, width // 16]] and len(patches) <= 4 * 1024
    assert np.array_equal(patches, expected["pixel_values"].numpy())


def test_sizes():
    """As transformers computes them, over all sizes and limits."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs
    rng = np.random.default_rng(0)
    for _ in range(20_000):
        height, width = (int(2 ** x) for x in rng.uniform(0, 14, 2))
        low, high = sorted(int(2 ** x) for x in rng.uniform(10, 24, 2))
        if max(height, width) <= 200 * min(height, width):
            assert smart_resize(height, width, 32, low, high) == theirs(height, width, 32, low, high)


# ---- Towers ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", TOWERS)
def test_towers(name, tmp_path):
    """The embeddings and deepstack of each official shape, within 1e-5 of their spread."""
    config = seeing_hybrid(HYBRID, name) if not TOWERS[name][-1] else \
        vl_config("8B") | {"vision_config": tower_config(name, 4096 // 16)}
    path = make_random_model(config, tmp_path, "float32")
    theirs = reference(path).model.visual
    pictures = qwen3.load_model(path, tokenizer=False).media
    ours = pictures.config
    for size in ((320, 416), (448, 256)):
        pixels = np.asarray(noise(*size))
        with torch.no_grad():
            grid = torch.tensor([[1, size[1] // 16, size[0] // 16]])
            found = theirs(torch.tensor(patches_of(pixels, ours)).double(), grid)
        expected = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
        vectors = tower(pixels, pictures.weights, ours)
        assert len(vectors) == len(expected)
        for one, other in zip(vectors, expected):
            assert np.abs(one - other.numpy()).max() < 1e-5 * other.std()


# ---- Whole models ----------------------------------------------------------------------------------------------------

def reference(path):
    """In float64: transformers' own float32 is off by up to 4e-4 of the spread, in the delta rule of a Qwen3.5."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager").eval()


def publish_experts(path, turned):
    """Stacks the experts of each layer as the published files have them; Qwen3-VL's are transposed."""
    stored = {name: tensor.data for name, tensor in map_safetensors(path / "model.safetensors").items()}
    tensors = {name: data for name, data in stored.items() if ".experts." not in name}
    for start in sorted({name.partition(".experts.")[0] for name in stored.keys() - tensors.keys()}):
        n = len([name for name in stored if name.startswith(f"{start}.experts.")]) // 3
        gate, up, down = (np.stack([stored[f"{start}.experts.{i}.{name}_proj.weight"].T for i in range(n)])
                          for name in ("gate", "up", "down"))
        stacked = {"gate_up_proj": np.concatenate([gate, up], axis=2), "down_proj": down}
        tensors |= {f"{start}.experts.{name}": data if turned else data.swapaxes(1, 2)
                    for name, data in stacked.items()}
    write_tensors(path / "model.safetensors", {name: ("float32", data) for name, data in tensors.items()})


MODELS = {**{f"VL {size}": vl_config(size) for size in VL_SIZES},
          "3.5": seeing_hybrid(HYBRID, "0.8B"), "3.5, mixture": seeing_hybrid(HYBRID_MOE, "9B, 27B"),
          "Flash-Next": seeing_hybrid(FLASH, "0.8B")}


@pytest.fixture(scope="module")
def both(request, tmp_path_factory):
    """(the folder of a random model, transformers' model)"""
    config = MODELS[request.param]
    path = make_random_model(config, tmp_path_factory.mktemp(request.param), "float32")
    if "moe" in config["model_type"]:
        publish_experts(path, "vl" in config["model_type"])
    return path, reference(path)


TEXT = np.random.default_rng(1).integers(10, 970, 3100).tolist()
PROMPTS = {"one picture": [*TEXT[:5], 0, *TEXT[5:9]], "first, then text": [0, *TEXT[:9]],
           "one behind the other": [4, 0, 5, 4, 1, 5],
           "between texts": [*TEXT[:7], 0, *TEXT[7:20], 1, *TEXT[20:22], 2, 5],
           "the same twice": [*TEXT[:4], 1, 9, 1, *TEXT[:4]],
           "after 3,000 tokens": [*TEXT[:3000], 2, *TEXT[3000:3010]]}
IMAGES = [noise(300, 260), noise(500, 180, 1), noise(190, 420, 2)]  # numbers below 3 in PROMPTS


def told(model, prompt):
    """-> (our ids, the arguments for transformers)"""
    shown = [IMAGES[i] for i in prompt if i < 3]
    ours = [model.media.show(image).ids for image in shown]
    ids = np.concatenate([[i] if i >= 3 else model.media.show(IMAGES[i]).ids for i in prompt])
    theirs = torch.tensor(np.where(ids < 0, PAD, ids))[None]
    assert len(ids) == len(prompt) - len(shown) + sum(map(len, ours))
    return ids, {"input_ids": theirs, "mm_token_type_ids": (theirs == PAD).int(), **processed(shown)}


# Each prompt with each kind of model, and one of them with all sizes.
PAIRS = [(model, prompt) for model in MODELS for prompt in PROMPTS
         if prompt == "between texts" or model in ("VL 2B", "3.5")
         or model in ("VL 30B-A3B", "3.5, mixture", "Flash-Next") and "3,000" not in prompt]
each_model = pytest.mark.parametrize("both", MODELS, indirect=True)


@both_engines
@pytest.mark.parametrize("both, name", PAIRS, indirect=["both"])
def test_models(name, engine, both):
    """Logits read at once and in pieces, and 32 greedy tokens."""
    path, theirs = both
    model = load(engine, path, tokenizer=False)
    ids, arguments = told(model, PROMPTS[name])
    with torch.no_grad():
        expected = theirs(**arguments).logits[0].numpy()
    caches = [model.engine.new_cache(model.config) for _ in range(2)]
    at_once = qwen3.forward(model, ids, caches[0], all_logits=True)
    pieces = np.concatenate([qwen3.forward(model, piece, caches[1], all_logits=True)
                             for piece in np.split(ids, [1, 9, 50, 51, len(ids) - 1]) if len(piece)])
    for logits in (at_once, pieces):
        difference = (logits - expected) / expected.std()
        assert (np.sqrt((difference**2).mean()) < 2e-5
                and np.abs(difference).max() < (1e-4 if "VL" in str(path) else 2e-4))
    theirs.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        answer = theirs.generate(**arguments, do_sample=False, max_new_tokens=32)[0, len(ids):].tolist()
    assert list(qwen3.generate(model, ids, 32, temperature=0, eos_token_ids=())) == answer


@each_model
def test_several_turns(both):
    """A second picture in a second turn: the cache keeps the first one, and the answer is that of the whole text."""
    path, theirs = both
    model = load("qwen3", path, tokenizer=False)
    first, _ = told(model, PROMPTS["one picture"])
    cache = model.engine.new_cache(model.config)
    answer = list(qwen3.generate(model, first, 8, temperature=0, eos_token_ids=(), cache=cache))
    second, arguments = told(model, [*PROMPTS["one picture"], *(i + 3 * (i < 3) for i in answer), 7, 2, 8])
    kept = cache.common_prefix(second)
    found = list(qwen3.generate(model, second, 32, temperature=0, eos_token_ids=(), cache=cache))
    with torch.no_grad():
        expected = theirs.generate(**arguments, do_sample=False, max_new_tokens=32,
                                   generation_config=transformers.GenerationConfig(pad_token_id=0))[0, len(second):]
    assert found == expected.tolist() and kept in (0, len(first) + 7)


@pytest.mark.parametrize("name", ["VL", "3.5"])
def test_the_inspect_page(name, tmp_path):
    """The attention weights that the page of qwen3_inspect.py shows, of all tokens to all patches of two pictures."""
    path, images = make_seeing(CONFIGS[name], tmp_path), [noise(320, 256), noise(256, 384, 1)]
    model = qwen3.load_model(path)
    found = contents(model, PageOptions("What is this?", answer=AnswerOptions(max_new_tokens=4), images=images))
    ids = np.array(found["tokens"]["ids"])
    assert [(ids == ~k).sum() for k in range(2)] == [80, 96]
    theirs = torch.tensor(np.where(ids < 0, PAD, ids))[None]
    with torch.no_grad():
        attentions = reference(path)(input_ids=theirs, mm_token_type_ids=(theirs == PAD).int(), **processed(images),
                                     output_attentions=True).attentions
    maps = unpacked(found["attention"]["maps"])
    assert len(maps) == len(attentions)
    for ours, expected in zip(maps, attentions):
        expected = expected[0].numpy()[:, *np.tril_indices(len(ids))]
        assert np.abs(ours - expected).max() < 1e-3 and np.abs(ours - expected).mean() < 1e-5


@each_model
def test_text_alone(both):
    """Such a folder answers texts as any Qwen3."""
    path, theirs = both
    model = load("qwen3", path, tokenizer=False)
    with torch.no_grad():
        expected = theirs(torch.tensor(TEXT[:40])[None]).logits[0].numpy()
    logits = logits_of(model, TEXT[:40])
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
