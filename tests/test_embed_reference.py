"""qwen3_embed.py against transformers and sentence-transformers in float32. Skipped where they aren't installed."""
import json
from functools import cache

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import ROOT, SHARED, needs_official_files
from embedders import AFTER, BEFORE, SHAPE, make_embedder, make_reranker, texts, tokenizer_of
from helpers import edit_json
from qwen3_embed import SEARCH, classify, embed, rerank

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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


@pytest.fixture(scope="module", params=["small", "wide, untied", *(
    pytest.param(size, marks=needs_official_files) for size in OFFICIAL)])
def embedder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder") / "model"
    if isinstance(request.param, str):
        return make_embedder(folder, SHAPE if request.param == "small" else WIDE)
    source = SHARED / OFFICIAL[request.param]
    # As in Qwen3-Embedding-4B, the config may name another end of text than the tokenizer puts behind the texts.
    return make_embedder(folder, source=source, vocab_size=request.param, eos_token_id=151645)


@pytest.mark.parametrize("engine", ["NumPy", "fast"])
def test_embeddings(engine, embedder):
    """Texts of 1 to 700 tokens: alone, together, in several steps, as queries, and with fewer dimensions."""
    rng, model = np.random.default_rng(0), load(engine, embedder)
    short, long = texts(rng, 20) + texts(rng, 3, 5) * 2, [" ".join(texts(rng, 15, 40)) for _ in range(2)]
    documents, states = short + long, torch.cat([their_vectors(embedder, part) for part in (short, long)])
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
@pytest.mark.parametrize("size", [None, pytest.param(151669, marks=needs_official_files)])
def test_scores(engine, size, tmp_path):
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


# ---- Pooling, against sentence-transformers --------------------------------------------------------------------------

@pytest.fixture(scope="module")
def st():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    """A Qwen3Model whose tokenizer appends nothing."""
    return make_embedder(tmp_path_factory.mktemp("body") / "model", ending=False)


def make_sentence_model(st, body, folder, pooling, *more, prompts=None, **pooling_options):
    """Writes a SentenceTransformer -> it."""
    modules = st.sentence_transformer.modules
    transformer = modules.Transformer(str(body))
    pooling = modules.Pooling(SHAPE["hidden_size"], pooling_mode=pooling, **pooling_options)
    model = st.SentenceTransformer(modules=[transformer, pooling, *more], device="cpu", prompts=prompts)
    model.save(str(folder))
    return st.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("engine", ["NumPy", "fast"])
@pytest.mark.parametrize("pooling, normalize, dense", [
    ("mean", False, None), ("mean", True, None), ("lasttoken", False, "Tanh"), ("mean", True, "Identity")])
def test_pooling(st, body, tmp_path, engine, pooling, normalize, dense):
    """Also in the older layout of the files, and with a text that is cut."""
    modules = st.sentence_transformer.modules
    more = [modules.Normalize()] if normalize else []
    if dense:
        more.insert(0, modules.Dense(32, 24, bias=dense == "Tanh", activation_function=getattr(torch.nn, dense)()))
    theirs = make_sentence_model(st, body, tmp_path, pooling, *more)
    documents = texts(np.random.default_rng(3), 9) + [" ".join(texts(np.random.default_rng(4), 30, 30))]
    model = load(engine, tmp_path)
    assert model.embeds
    np.testing.assert_allclose(embed(model, documents), theirs.encode(documents), atol=2e-5)
    old = {"mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(
        {"word_embedding_dimension": 32, "pooling_mode_max_tokens": False, old[pooling]: True}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": False}))
    theirs = st.SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(embed(load(engine, tmp_path), documents, truncate=True), theirs.encode(documents),
                               atol=2e-5)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(st, body, tmp_path, include_prompt):
    theirs = make_sentence_model(st, body, tmp_path, "mean", prompts={"query": "find this: ", "other": "the bee "},
                                 include_prompt=include_prompt)
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"default_prompt_name": "other"}))
    theirs, model = st.SentenceTransformer(str(tmp_path), device="cpu"), qwen3.load_model(tmp_path)
    documents = texts(np.random.default_rng(5), 5)
    np.testing.assert_allclose(embed(model, documents), theirs.encode(documents), atol=2e-5)
    np.testing.assert_allclose(embed(model, documents, prompt="query"), theirs.encode_query(documents), atol=2e-5)
    np.testing.assert_allclose(embed(model, documents, prompt="document"), theirs.encode_document(documents), atol=2e-5)
    assert np.abs(theirs.encode(documents) - theirs.encode_query(documents)).max() > 0.01


def test_vectors_that_are_cut(st, body, tmp_path):
    """After Normalize, and not scaled again."""
    make_sentence_model(st, body, tmp_path, "mean", st.sentence_transformer.modules.Normalize())
    edit_json(tmp_path / "config_sentence_transformers.json", {"truncate_dim": 16})
    theirs = st.SentenceTransformer(str(tmp_path), device="cpu")
    documents = texts(np.random.default_rng(5), 5)
    np.testing.assert_allclose(embed(qwen3.load_model(tmp_path), documents), theirs.encode(documents), atol=2e-5)


# ---- Classifiers -----------------------------------------------------------------------------------------------------

def their_classifier(folder, kind, dtype=torch.float32, source=ROOT / "demo", ending=False, **changes):
    """The folder of a random classifier -> transformers' model."""
    n = tokenizer_of(folder, source, ending)
    config = transformers.Qwen3Config(**WIDE | {"vocab_size": n, "pad_token_id": None} | changes)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    model.to(dtype).save_pretrained(folder)
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("engine", ["NumPy", "fast"])
@pytest.mark.parametrize("changes", [
    {"num_labels": 3, "id2label": {0: "joy", 1: "anger", 2: "calm"}}, {"num_labels": 1},
    {"num_labels": 4, "problem_type": "multi_label_classification"}, {"num_labels": 2, "problem_type": "regression"}])
def test_labels_of_texts(engine, changes, tmp_path):
    """The tokenizer's ending is the padding token here, so that the last token before it counts."""
    theirs = their_classifier(tmp_path, "Qwen3ForSequenceClassification", ending=True, **changes)
    words = tokenizer(tmp_path)
    theirs.config.pad_token_id = words.pad_token_id
    theirs.save_pretrained(tmp_path)
    pipeline = transformers.pipeline("text-classification", model=theirs, tokenizer=words, device="cpu")
    documents, model = texts(np.random.default_rng(6), 8), load(engine, tmp_path)
    for [row], expected in zip(classify(model, documents), pipeline(documents, top_k=None), strict=True):
        expected = {entry["label"]: entry["score"] for entry in expected}
        assert row.probabilities == pytest.approx(expected, abs=1e-5)
        assert row.best == max(expected, key=expected.get)


@pytest.mark.parametrize("engine", ["NumPy", "fast"])
def test_labels_of_tokens(engine, tmp_path):
    theirs = their_classifier(tmp_path, "Qwen3ForTokenClassification", id2label={0: "O", 1: "B-X", 2: "I-X"})
    pipeline = transformers.pipeline("token-classification", model=theirs, tokenizer=tokenizer(tmp_path), device="cpu",
                                     ignore_labels=[])
    documents, model = texts(np.random.default_rng(7), 8), load(engine, tmp_path)
    for rows, expected in zip(classify(model, documents), pipeline(documents), strict=True):
        assert [(row.best, row.start, row.end) for row in rows] == \
            [(entry["entity"], entry["start"], entry["end"]) for entry in expected]
        np.testing.assert_allclose([row.probabilities[row.best] for row in rows],
                                   [entry["score"] for entry in expected], atol=1e-5)


@pytest.mark.parametrize("engine", ["NumPy", "fast"])
def test_a_reranker_converted_to_a_classifier(engine, tmp_path):
    """In float16, as tomaarsen/Qwen3-Reranker-0.6B-seq-cls, with the official tokenizer where it is here."""
    official = SHARED / "tokenizer"
    source = official if official.exists() else ROOT / "demo"
    theirs = their_classifier(tmp_path, "Qwen3ForSequenceClassification", torch.float16, source, num_labels=1,
                             **({"vocab_size": 151669, "hidden_size": 16} if official.exists() else {}))
    query, documents, ids = "how do bees find home?", texts(np.random.default_rng(8), 8), tokenizer(tmp_path)
    pairs = [(f"{BEFORE}<Instruct>: {SEARCH}\n<Query>: {query}\n", f"<Document>: {document}{AFTER}")
             for document in documents]
    with torch.no_grad():
        expected = [torch.sigmoid(theirs(**ids(*pair, return_tensors="pt")).logits)[0, 0].item() for pair in pairs]
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(rerank(load(engine, tmp_path), query, documents), expected, atol=1e-5)
