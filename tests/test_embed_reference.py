"""qwen3_embed.py against transformers in float32, both kinds of models. Skipped where torch isn't installed."""
import json
from functools import cache

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import ROOT, SHARED
from embedders import AFTER, BEFORE, SHAPE, make_embedder, make_reranker, texts
from qwen3_embed import SEARCH, embed, rerank

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[reference]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WIDE = SHAPE | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 96,
                "tie_word_embeddings": False}
OFFICIAL = {151669: "tokenizer_embedding", 151665: "tokenizer_base"}  # size of the vocabulary -> a folder in ../shared


def load(engine, folder):
    return qwen3.load_model(folder) if engine == "NumPy" else fast.load_model(folder, kv_dtype="f32", threads=1)


@cache
def tokenizer(folder, **sides):
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"),
                                                pad_token="<|endoftext|>", **sides)


def their_vectors(folder, inputs):
    """Texts of different lengths in one batch padded on the left, the last position, scaled to length 1."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    batch = tokenizer(folder, padding_side="left")(inputs, padding=True, return_tensors="pt")
    assert (batch["input_ids"][:, -1] == tokenizer(folder).pad_token_id).all()  # the tokenizer's own end
    with torch.no_grad():
        states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state[:, -1]
    return states


def their_scores(folder, task, query, documents):
    """Each document by itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(folder).encode
    yes, no = tokenizer(folder).convert_tokens_to_ids(["yes", "no"])
    scores = []
    for document in documents:
        body = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        with torch.no_grad():
            last = model(torch.tensor([ids(BEFORE) + ids(body) + ids(AFTER)])).logits[0, -1]
        scores.append(torch.softmax(last[[no, yes]], 0)[1].item())
    return np.array(scores)


def assert_same_direction(ours, states, dimensions=None):
    theirs = torch.nn.functional.normalize(states[:, :dimensions], dim=1).numpy()
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    assert ((ours.astype(np.float64) * theirs).sum(axis=1) >= 1 - 1e-6).all()
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.fixture(scope="module", params=["small", "wide, untied", 151669, 151665])
def embedder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder") / "model"
    if isinstance(request.param, str):
        return make_embedder(folder, SHAPE if request.param == "small" else WIDE)
    source = SHARED / OFFICIAL[request.param]
    if not source.exists():
        pytest.skip("the official tokenizers are not here")
    # As in Qwen3-Embedding-4B, the config may name another end of text than the tokenizer puts behind the texts.
    return make_embedder(folder, source=source, vocab_size=request.param, eos_token_id=151645)


@pytest.mark.parametrize("engine", ["NumPy", "fast"])
def test_embeddings(engine, embedder):
    """Texts of 1 to 700 tokens: alone, together, in several steps, as queries, and with fewer dimensions."""
    rng, model = np.random.default_rng(0), load(engine, embedder)
    documents = texts(rng, 20) + texts(rng, 3, 5) * 2 + [" ".join(texts(rng, 15, 40)) for _ in range(2)]
    states = their_vectors(embedder, documents)
    assert_same_direction(embed(model, documents), states)
    assert_same_direction(embed(model, documents, dimensions=16), states, 16)
    queries = texts(rng, 6, 8)
    states = their_vectors(embedder, [f"Instruct: {SEARCH}\nQuery:{query}" for query in queries])
    assert_same_direction(embed(model, queries, instruction=SEARCH), states)


def test_a_file_that_transformers_writes(tmp_path):
    """Without a head, and with the name of its class in config.json, as fine-tuned embedding models are published."""
    folder = make_embedder(tmp_path / "model")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    documents = texts(np.random.default_rng(1), 5)
    assert_same_direction(embed(qwen3.load_model(folder), documents), their_vectors(folder, documents))


@pytest.mark.parametrize("engine", ["NumPy", "fast"])
@pytest.mark.parametrize("size", [None, 151669])
def test_scores(engine, size, tmp_path):
    if size is not None and not (SHARED / "tokenizer").exists():
        pytest.skip("the official tokenizers are not here")
    source = ROOT / "demo" if size is None else SHARED / "tokenizer"
    folder = make_reranker(tmp_path / "model", WIDE if size is None else SHAPE, source,
                           **({} if size is None else {"vocab_size": size}))
    rng, model = np.random.default_rng(2), load(engine, folder)
    documents = texts(rng, 12) + [" ".join(texts(rng, 12, 40))]
    for task, given in ((SEARCH, None), ("Find the same sentence", "Find the same sentence")):
        expected = their_scores(folder, task, "how do bees find home?", documents)
        scores = rerank(model, "how do bees find home?", documents, given)
        assert scores.dtype == np.float32 and np.ptp(expected) > 0.01
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        np.testing.assert_allclose(rerank(model, "how do bees find home?", documents[:1], given), expected[:1],
                                   atol=1e-5)
