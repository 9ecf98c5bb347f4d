"""qwen3_embed.py as a library. test_embed_reference.py compares with transformers, test_embed_cli.py types commands."""
import dataclasses
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
import qwen3_numba as fast
from embedders import AFTER, BEFORE, add_modules, make_classifier, make_embedder, make_reranker, texts
from helpers import assert_one_line, counting, edit_json, message_of, patiently, states_of, with_tensors
from qwen3_embed import END, POSITIONS, SEARCH, PASS_TOKENS, classify, embed, groups, rerank
from qwen3_lib.app.models import why_not

QUERY = "how do bees find home?"


@pytest.fixture(scope="module")
def model(embedder):
    return qwen3.load_model(embedder)


@pytest.fixture(scope="module")
def judge(reranker):
    return qwen3.load_model(reranker)


@pytest.fixture
def some_texts():
    return texts(np.random.default_rng(0), 7, 20) + ["a", "a b", "a"]


# ---- Embeddings and scores -------------------------------------------------------------------------------------------

def test_an_embedding_is_the_last_hidden_state_with_length_1(model):
    ids = model.tokenizer.encode("the bee")
    assert ids[-1] == model.tokenizer.token_to_id(END)
    state = states_of(model, ids)[-1]
    [vector] = embed(model, ["the bee"])
    np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-6)
    [short] = embed(model, ["the bee"], dimensions=5)
    np.testing.assert_allclose(short, state[:5] / np.linalg.norm(state[:5]), atol=1e-6)
    assert embed(model, []).shape == (0, 32)


def test_a_query_has_its_instruction_before_it(model):
    [query] = embed(model, [QUERY], instruction=SEARCH)
    [plain] = embed(model, ["Instruct: Given a web search query, retrieve relevant passages that answer the query\n"
                            f"Query:{QUERY}"])
    np.testing.assert_array_equal(query, plain)
    assert query @ embed(model, [QUERY])[0] < 0.999


def test_the_end_follows_a_text_if_the_tokenizer_does_not_append_it(model, tmp_path, some_texts):
    other = qwen3.load_model(make_embedder(tmp_path / "model", ending=False))
    assert other.embeds and other.tokenizer.encode("") == [] != model.tokenizer.encode("")
    np.testing.assert_array_equal(embed(other, some_texts), embed(model, some_texts))


def test_a_score_is_the_share_of_yes_after_the_prompt_of_the_training(judge):
    body = ("<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            f"<Query>: {QUERY}\n<Document>: by the sun")
    ids = [i for text in (BEFORE, body, AFTER) for i in judge.tokenizer.encode(text)]
    logits = qwen3.forward(judge, ids, qwen3.KVCache(judge.config))
    yes, no = (np.exp(logits[judge.tokenizer.token_to_id(word)]) for word in ("yes", "no"))
    np.testing.assert_allclose(rerank(judge, QUERY, ["by the sun"]), yes / (yes + no), atol=1e-6)
    assert rerank(judge, QUERY, []).shape == (0,)


# ---- Files of sentence-transformers, and heads. test_embed_reference.py compares their results. ----------------------

def test_nothing_is_appended_if_the_files_of_sentence_transformers_are_there(tmp_path):
    model = qwen3.load_model(add_modules(make_embedder(tmp_path, ending=False), pooling_mode_lasttoken=True))
    ids = model.tokenizer.encode("the bee")
    state = states_of(model, ids)[-1]
    np.testing.assert_allclose(embed(model, ["the bee"])[0], state, atol=1e-6)  # and there is no Normalize


def test_pooling_without_a_mode_is_the_mean_and_is_cut_after_normalize(tmp_path):
    folder = add_modules(make_embedder(tmp_path, ending=False), "sentence_transformers.models.Normalize")
    model = qwen3.load_model(folder)
    ids = model.tokenizer.encode("the bee", False)
    mean = states_of(model, ids).mean(axis=0)
    np.testing.assert_allclose(embed(model, ["the bee"])[0], mean / np.linalg.norm(mean), atol=1e-6)
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 5}')
    cut = embed(qwen3.load_model(folder), ["the bee"])
    np.testing.assert_allclose(cut, [mean[:5] / np.linalg.norm(mean)], atol=1e-6)


def test_what_a_model_is(tmp_path, tiny_model):
    """A chat model whose tokenizer appends a token chats; a Qwen3ForCausalLM with Pooling gives vectors."""
    ending = make_reranker(tmp_path / "chat")
    shutil.copy(make_embedder(tmp_path / "embedder") / "tokenizer.json", ending)
    chat = qwen3.load_model(ending)
    assert chat.tokenizer.encode("") and not chat.embeds
    assert len(list(qwen3.generate(chat, [5], 3, eos_token_ids=()))) == 3
    assert qwen3.load_model(add_modules(ending, pooling_mode="mean")).embeds
    (ending / "modules.json").write_text('[{"type": "Transformer"}, {"type": "LogitScore"}]')  # a reranker's
    assert not qwen3.load_model(ending).embeds
    labels = qwen3.load_model(make_classifier(tmp_path / "labels", 3))
    assert_one_line(message_of(qwen3.generate, labels, [5]), "classifier", "qwen3_embed.py")
    assert_one_line(message_of(embed, labels, ["a"]), "not an embedding model")
    assert_one_line(message_of(rerank, labels, QUERY, ["a"]), "not a reranker")
    assert_one_line(message_of(classify, tiny_model, ["a"]), "not a classifier", "Qwen3ForSequenceClassification")


@pytest.mark.parametrize("file, content, words", [
    ("modules.json", {"a": 1}, ["modules.json", "list"]),
    *(("modules.json", [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"},
                        {"type": kind, "path": "2"}], words) for kind, words in (
        ("WordWeights", ["WordWeights"]), ("st_quantize.FlexibleQuantizer", ["sentence-transformers computes"]),
        ("Dense", ["2/config.json: missing"]))),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, ["1_Pooling", "pooling_mode_max_tokens"]),
    ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, ["1_Pooling", "cls"]),
    ("config_sentence_transformers.json", {"prompts": [1]}, ["prompts must be"]),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, ["default_prompt_name"]),
    ("config_sentence_transformers.json", {"truncate_dim": 0}, ["truncate_dim"]),
    ("sentence_bert_config.json", {"do_lower_case": True}, ["only plain texts"]),
    ("sentence_bert_config.json", {"modality_config": {"image": {}}}, ["only plain texts"]),
    ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 3}}}, ["only plain texts"]),
    ("sentence_bert_config.json", {"max_seq_length": "5"}, ["max_seq_length"]),
    ("sentence_bert_config.json", {"max_seq_length": 5}, ["text 1", "room for 5"])])
def test_files_that_are_refused(tmp_path, file, content, words):
    model = qwen3.load_model(add_modules(make_embedder(tmp_path, ending=False)))
    (tmp_path / file).write_text(json.dumps(content))
    assert_one_line(message_of(embed, model, ["a bee " * 9]), *words)


def test_what_is_listed_as_running(tmp_path):
    """`--list` refuses what loading and embedding refuse, with the same words."""
    folder = add_modules(make_embedder(tmp_path), pooling_mode="mean")
    assert why_not(folder) is None
    for file, changes, word in (("1_Pooling/config.json", {"pooling_mode": "max"}, "the pooling ['max']"),
                                ("generation_config.json", {"num_beams": 4}, "num_beams = 4")):
        edit_json(folder / file, changes)
        assert word in why_not(folder) and why_not(folder) in message_of(lambda: embed(qwen3.load_model(folder), ["a"]))


def test_what_nothing_says_how_to_compute(tmp_path, model):
    assert_one_line(message_of(embed, model, ["a"], prompt="title"), "no prompt 'title'", "query, document")
    assert_one_line(message_of(embed, model, ["a"], instruction="b", prompt="query"), "not both")
    assert_one_line(message_of(embed, model, ["a"], dimensions=33), "dimensions must be at most 32")
    whole = make_embedder(tmp_path / "whole")
    edit_json(whole / "config.json", {"is_causal": False})
    assert_one_line(message_of(qwen3.load_model, whole), "is_causal = False", "transformers computes it")
    jina = make_embedder(tmp_path / "jina")
    edit_json(jina / "config.json", {"model_type": "jina_embeddings_v5"})
    assert_one_line(message_of(qwen3.load_model, jina), "jina_embeddings_v5", "transformers computes it")
    guard = make_embedder(tmp_path / "guard")
    edit_json(guard / "config.json", {"architectures": ["Qwen3ForGuardModel"]})
    assert_one_line(message_of(qwen3.load_model, guard), "Qwen3ForGuardModel")
    labels = make_classifier(tmp_path / "labels", 3)
    edit_json(labels / "config.json", {"id2label": {"0": "a"}})
    assert_one_line(message_of(classify, qwen3.load_model(labels), ["a"]), "score.weight", "[1, 32]")


# ---- Many texts ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_fast_engine_gives_the_same_bits_in_a_batch(quantize, embedder, reranker, some_texts, tmp_path):
    mean = add_modules(make_embedder(tmp_path), pooling_mode_mean_tokens=True)
    model, judge, mean = (fast.load_model(folder, quantize, threads=2) for folder in (embedder, reranker, mean))
    for model, task in ((model, None), (model, SEARCH), (mean, SEARCH)):
        np.testing.assert_array_equal(embed(model, some_texts, task),
                                      [embed(model, [text], task)[0] for text in some_texts])
    np.testing.assert_array_equal(rerank(judge, QUERY, some_texts),
                                  [rerank(judge, QUERY, [text])[0] for text in some_texts])


@given(st.lists(st.integers(1, 900), max_size=200), st.integers(0, 3000))
@patiently(100)
def test_groups(lengths, shared):
    """Each text is in one pass; no pass is too large, or could take the next text."""
    def fits(group):
        total = sum(lengths[i] for i in group)
        return len(group) == 1 or total <= PASS_TOKENS and total + shared * len(group) <= POSITIONS

    found = list(groups(lengths, shared))
    assert [i for group in found for i in group] == [*range(len(lengths))]
    assert all(map(fits, found)) and not any(fits([*group, after[0]]) for group, after in zip(found, found[1:]))


def test_no_token_is_computed_twice(model, judge):
    """Texts of very different lengths are not padded; a query with its prompt, and an instruction, are read once."""
    model, passes = counting(model)
    documents = texts(np.random.default_rng(1), 100, 60)
    embed(model, documents)
    assert sum(passes) == sum(len(model.tokenizer.encode(text)) for text in documents) and len(passes) < 30
    passes.clear()
    embed(model, documents[:40], instruction=SEARCH)
    assert sum(passes) < passes[0] + 1.1 * sum(len(model.tokenizer.encode(text)) + 1 for text in documents[:40])
    judge, passes = counting(judge)
    documents, query = texts(np.random.default_rng(2), 50, 12), " ".join(texts(np.random.default_rng(3), 5))
    rerank(judge, query, documents)
    assert passes[0] > len(judge.tokenizer.encode(query))
    others = sum(len(judge.tokenizer.encode(text)) + 12 for text in documents)  # 12 for the suffix, and for joints
    assert sum(passes[1:]) < 1.2 * others < len(documents) * passes[0]


# ---- Texts that are too long -----------------------------------------------------------------------------------------

def test_a_text_that_is_too_long_is_refused_or_cut(tmp_path):
    model = qwen3.load_model(make_embedder(tmp_path / "model", max_position_embeddings=16))
    ids = model.tokenizer.encode("bee " * 40)
    assert_one_line(message_of(embed, model, ["bee", "bee " * 40]), "text 2", len(ids) - 1, "room for 15", "truncate")
    cut = embed(model, ["bee", "bee " * 40], truncate=True)
    state = states_of(model, [*ids[:15], ids[-1]])[-1]
    np.testing.assert_allclose(cut[1], state / np.linalg.norm(state), atol=1e-6)


def test_a_document_that_is_too_long_is_refused_or_cut(judge):
    """Never the question behind it, nor the query before it: the score would be of a part of the query alone."""
    judge = dataclasses.replace(judge, config=dataclasses.replace(judge.config, context_length=300))
    long = "bee " * 400
    assert_one_line(message_of(rerank, judge, QUERY, ["bee", long]), "text 2", "truncate")
    scores = rerank(judge, QUERY, ["bee", long], truncate=True)
    np.testing.assert_allclose(scores[1], rerank(judge, QUERY, ["bee " * 350], truncate=True)[0], atol=1e-5)
    assert_one_line(message_of(rerank, judge, long, ["sun"], truncate=True), "instruction and query alone", "room for")


# ---- Refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wrong, words", [
    ([""], ["text is empty"]), (["a", " \n"], ["text 2", "empty"]), (["a", None], ["text 2", "NoneType"]),
    ("abc", ["list of texts"]), (["\ud800"], ["Unicode"])])
def test_wrong_texts(model, judge, wrong, words):
    assert_one_line(message_of(embed, model, wrong), *words)
    assert_one_line(message_of(rerank, judge, QUERY, wrong), *(word.replace("text ", "document ") for word in words
                                                               if "list" not in word))


def test_models_for_something_else(model, judge, tiny_model):
    assert_one_line(message_of(embed, judge, ["a"]), "not an embedding model", "Qwen/Qwen3-Embedding-0.6B")
    assert_one_line(message_of(rerank, model, QUERY, ["a"]), "embedding model", "Qwen/Qwen3-Reranker-0.6B")
    assert_one_line(message_of(rerank, tiny_model, "a", ["b"]), "not a reranker", "Qwen/Qwen3-Reranker-0.6B")
    assert_one_line(message_of(rerank, judge, " ", ["a"]), "the query is empty")


@pytest.mark.parametrize("tensor, value", [("layers.1.mlp.up_proj.weight", np.nan), ("norm.weight", 0)])
def test_a_vector_without_a_direction(tmp_path, tensor, value):
    """NaN in a weight, or a vector of zeros."""
    folder = make_embedder(tmp_path / "model")
    shape = (64, 32) if "up_proj" in tensor else (32,)
    with_tensors(folder / "model.safetensors", {tensor: np.full(shape, value, np.float32)})
    assert_one_line(message_of(embed, qwen3.load_model(folder), ["bee", "sun"]), "vector of text 1", "damaged")
