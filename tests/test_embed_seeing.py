"""Qwen3-VL-Embedding and Qwen3-VL-Reranker, on random weights: texts and pictures, compared with transformers."""
import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from PIL import Image

import qwen3_embed
from configs import ROOT, vl_config
from embedders import BEFORE, add_modules, tokenizer_of
from helpers import assert_one_line, message_of, run_main
from make_random_model import make_random_model
from tokenizer_utils import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_reference import both_engines, load  # noqa: E402
from test_vision_reference import noise, reference  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

PAD = tokenizers.Tokenizer.from_file(str(ROOT / "demo/tokenizer.json")).token_to_id("<|image_pad|>")
PICTURES = [noise(300, 260), noise(70, 200, 1)]  # the second one stays smaller than in a chat
NORMALIZE = "sentence_transformers.models.Normalize"
ITEMS = [{"image": PICTURES[0], "text": "bees on a tea ship"}, "bees on a tea ship", {"image": PICTURES[1]},
         {"text": "rain"}]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(the folder of a random model, transformers' model)"""
    path = tmp_path_factory.mktemp("seeing")
    config = vl_config("2B") | {"image_token_id": PAD}
    config["text_config"] |= {"vocab_size": tokenizer_of(path, ROOT / "demo", False)}
    make_random_model(config, path, "float32", tokenizer=path / "none")
    shutil.copy(ROOT / "demo/tokenizer_config.json", path)
    return path, reference(path)


def image_processor(most):
    """transformers', for pictures of 4 to `most` tokens."""
    size = {"shortest_edge": 4 * 32**2, "longest_edge": most * 32**2}
    return Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def last_state(theirs, model, text, images, most):
    """transformers' final hidden state of the last token of a text with <> in the place of each picture."""
    text = text.replace("<>", "<|vision_start|><|image_pad|><|vision_end|>")
    more, ids = {}, model.tokenizer.encode(text)
    if images:
        found = image_processor(most)(images, return_tensors="pt")
        more = {"pixel_values": found["pixel_values"].double(), "image_grid_thw": found["image_grid_thw"]}
        counts = iter((found["image_grid_thw"].prod(axis=1) // 4).tolist())
        ids = [i for token in ids for i in [token] * (next(counts) if token == PAD else 1)]
        more["mm_token_type_ids"] = (torch.tensor([ids]) == PAD).int()
    with torch.no_grad():
        return theirs.model(input_ids=torch.tensor([ids]), **more).last_hidden_state[0, -1].numpy()


def shown(item):
    """-> (the text with <> in the place of the picture, the pictures)"""
    if isinstance(item, str):
        return item, []
    images = [item["image"]] if "image" in item else []
    return "<>" * len(images) + item.get("text", ""), images


@both_engines
@pytest.mark.parametrize("instruction", [None, "Find a place to rest."])
def test_embeddings(engine, both, instruction):
    """Texts, pictures and both, each like the hidden state of the last token of the conversation."""
    path, theirs = both
    add_modules(path, NORMALIZE, pooling_mode="lasttoken")
    model = load(engine, path)
    vectors = qwen3_embed.embed(model, ITEMS, instruction)
    assert vectors.shape == (len(ITEMS), model.config.hidden_size)
    for vector, item in zip(vectors, ITEMS):
        text, images = shown(item)
        state = last_state(theirs, model, f"<|im_start|>system\n{instruction or qwen3_embed.REPRESENT}<|im_end|>\n"
                           f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", images, 1800)
        assert np.abs(vector - state / np.linalg.norm(state)).max() < 1e-4 * vector.std()
    alone = qwen3_embed.embed(model, ITEMS[:1], instruction)
    assert np.abs(alone - vectors[:1]).max() < 1e-6
    for wrong in ({}, {"text": 5}, {"video": "a.mp4"}, ""):
        assert "text" in message_of(qwen3_embed.embed, model, [wrong])
    assert "no such file" in message_of(qwen3_embed.embed, model, [{"image": "none.png"}])
    (path / "modules.json").unlink()


# A content may be a list of parts, as in the template of a Qwen3-VL.
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% for part in ([{'text': m.content}] if m.content is string else m.content) %}{{ part.text }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_messages_by_sentence_transformers_files(both):
    """With these files, an instruction or prompt is the system message, as it is; without one, there is none."""
    path, theirs = both
    add_modules(path, NORMALIZE, pooling_mode="lasttoken")
    files = {"config_sentence_transformers.json": {"prompts": {"query": "Find."}},
             "sentence_bert_config.json": {"modality_config": {"text": {}, "image": {},
                                                               "message": {"format": "structured"}},
                                           "processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    model = load("qwen3", path)
    model = replace(model, tokenizer=Tokenizer(model.tokenizer.backend, TEMPLATE))
    for options, system in (({}, ""), ({"instruction": "Rest."}, "Rest."), ({"prompt": "query"}, "Find.")):
        for items in (ITEMS, ITEMS[1:2]):
            for vector, item in zip(qwen3_embed.embed(model, items, **options), items):
                text, images = shown(item)
                state = last_state(theirs, model, f"<|im_start|>system\n{system}<|im_end|>\n" * bool(system) +
                                   f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", images, 1800)
                assert np.abs(vector - state / np.linalg.norm(state)).max() < 1e-4 * vector.std()
    for name in ("modules.json", *files):
        (path / name).unlink()


def test_the_command(both, tmp_path, capfd):
    """Pictures follow the texts; they need none."""
    path, _ = both
    file = tmp_path / "a.png"
    PICTURES[0].save(file)
    found = qwen3_embed.rerank(load("qwen3", path), "bees", ["rain", {"image": str(file)}])
    arguments = ["--model", path, "--image", file, "--json", "--no-fast", "--query", "bees"]
    status, out, err = run_main(capfd, *arguments, stdin=b"rain\n", main=qwen3_embed.main)
    rows = sorted(map(json.loads, out.splitlines()), key=lambda row: row["line"] is None)
    assert (status, err) == (0, "") and [(row["line"], row["document"])
                                         for row in rows] == [(1, "rain"), (None, str(file))]
    assert np.allclose([row["score"] for row in rows], found, atol=1e-5)
    status, out, err = run_main(capfd, *arguments, main=qwen3_embed.main)
    assert (status, err) == (0, "") and json.loads(out)["rank"] == 1
    for more, words in ((["--image", "none.png"], "none.png"), (["--model", ROOT / "demo"], "can't see")):
        status, out, err = run_main(capfd, *arguments, *more, stdin=b"rain\n", main=qwen3_embed.main)
        assert (status, out) == (1, "")
        assert_one_line(err, words)


@both_engines
def test_scores(engine, both):
    """Of a text and of a picture, the sigmoid of the difference of the logits of yes and no."""
    path, theirs = both
    model = load(engine, path)
    words = [model.tokenizer.token_to_id(word) for word in ("yes", "no")]
    yes, no = theirs.lm_head.weight[words].detach().numpy()
    for query, instruction in (("where bees rest", None), ({"image": PICTURES[0]}, "Judge.")):
        found = qwen3_embed.rerank(model, query, ITEMS, instruction)
        for score, item in zip(found, ITEMS):
            (asked, images), (text, more) = shown(query), shown(item)
            task = instruction or qwen3_embed.RELEVANT
            both_texts = f"<Instruct>: {task}<Query>:{asked}\n<Document>:{text}"
            state = last_state(theirs, model, f"{BEFORE}{both_texts}<|im_end|>\n<|im_start|>assistant\n",
                               images + more, 1280)
            assert abs(score - 1 / (1 + np.exp(-state @ (yes - no)))) < 1e-4


def test_a_picture_in_bytes_may_be_the_query(both):
    """However large: only its size in tokens counts, not how Python shows it."""
    model, png = load("qwen3", both[0]), io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    Image.fromarray(pixels).save(png, "png")
    scores = [qwen3_embed.rerank(model, {"image": query}, ["bees"])
              for query in (png.getvalue(), Image.fromarray(pixels))]
    assert len(png.getvalue()) > 400_000 and np.array_equal(*scores)
