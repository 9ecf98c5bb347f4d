"""Random embedding models and rerankers for the tests."""
import json

import numpy as np
import safetensors.numpy

from configs import BASE, ROOT
from helpers import with_tensors
from make_random_model import make_random_model

SHAPE = BASE | {"max_position_embeddings": 4096}
WORDS = ("the bee finds home by sun and landmark while rain falls on tea ships 蜜蜂 通过 太阳 回家 "
         "Élan naïve 417 + 385 =").split()
# What stands before and after a reranker's question, letter by letter as in Qwen3-Reranker's model card.
BEFORE = ("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
          'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def tokenizer_of(folder, source, ending):
    """Puts the tokenizer of `source` into a model's folder, changed to have tokens yes and no -> the number of ids.

    With `ending`, its post-processor puts <|endoftext|> behind each text, as in Qwen3-Embedding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    added, vocabulary = tokenizer["added_tokens"], tokenizer["model"]["vocab"]
    n = max(*vocabulary.values(), *(token["id"] for token in added)) + 1
    for word in ("yes", "no"):
        if word not in vocabulary:
            added.append({"id": n, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": False})
            n += 1
    end = next(token["id"] for token in added if token["content"] == "<|endoftext|>")
    if ending and "<|endoftext|>" not in str(tokenizer["post_processor"]):
        text, special = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing", "single": [text, special], "pair": [text, special],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [end], "tokens": ["<|endoftext|>"]}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return n


def without_prefix(folder):
    """Takes `model.` off the names of the tensors, as in the files of Qwen3-Embedding, which have no head either."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()
                                 if name != "lm_head.weight"}, file, {"format": "pt"})


def make_embedder(folder, shape=SHAPE, source=ROOT / "demo", ending=True, dtype="float32", **changes):
    """The folder of a random embedding model."""
    n = tokenizer_of(folder, source, ending)
    make_random_model(shape | {"vocab_size": n} | changes, folder, dtype, tokenizer=folder.parent / "none")
    without_prefix(folder)
    return folder


def make_reranker(folder, shape=SHAPE, source=ROOT / "demo", dtype="float32", **changes):
    """The folder of a random reranker."""
    n = tokenizer_of(folder, source, ending=False)
    return make_random_model(shape | {"vocab_size": n} | changes, folder, dtype, tokenizer=folder.parent / "none")


def make_classifier(folder, n_labels, kind="Qwen3ForSequenceClassification", **changes):
    """The folder of a random classifier."""
    make_reranker(folder, SHAPE, architectures=[kind], num_labels=n_labels, **changes)
    weight = np.random.default_rng(1).standard_normal((n_labels, SHAPE["hidden_size"]), np.float32)
    with_tensors(folder / "model.safetensors", {"score.weight": weight})
    return folder


def add_modules(folder, *modules, **pooling):
    """Writes the files of sentence-transformers: these modules after the model, and pooling's settings."""
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", *modules]
    (folder / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": f"{i}_{kind.rpartition('.')[2]}" if i else "", "type": kind}
        for i, kind in enumerate(kinds)]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    return folder


def texts(rng, n, longest=40):
    """n texts of 1 to `longest` words."""
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(n)]


