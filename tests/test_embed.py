"""qwen3_embed.py as a library. test_embed_reference.py compares with transformers, test_embed_cli.py types commands."""
import dataclasses
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
import qwen3_numba as fast
from configs import VOCABULARY
from embedders import SHAPE, make_embedder, texts, without_prefix
from helpers import assert_one_line, message_of, patiently, with_tensors
from make_random_model import make_random_model
from qwen3_embed import END, PASS, POSITIONS, SEARCH, TOGETHER, common_length, embed, groups, rerank
from qwen3_io.arguments import checked_batch, parts_of
from tokenizer_utils import load_tokenizer

QUERY = "how do bees find home?"


@pytest.fixture(scope="module")
def model(embedder):
    return qwen3.load_model(embedder)


@pytest.fixture(scope="module")
def judge(reranker):
    return qwen3.load_model(reranker)


@pytest.fixture
def some_texts():
    return texts(np.random.default_rng(0), 30) + ["a", "a b", "a"]


# ----------------------------------------------------------------------------------------------------------------------
# What an embedding is
# ----------------------------------------------------------------------------------------------------------------------

def test_an_embedding_is_the_last_hidden_state_with_length_1(model):
    ids = model.tokenizer.encode("the bee")
    assert ids[-1] == model.tokenizer.token_to_id(END)
    state = qwen3.hidden_states(model, ids, qwen3.KVCache(model.config))[-1]
    [vector] = embed(model, ["the bee"])
    np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-6)
    assert abs(np.linalg.norm(vector) - 1) < 1e-6
    [short] = embed(model, ["the bee"], dimensions=5)
    np.testing.assert_allclose(short, state[:5] / np.linalg.norm(state[:5]), atol=1e-6)


def test_forward_is_the_head_on_the_hidden_states(model):
    states = qwen3.hidden_states(model, [[5, 6, 7], [8, 9]], qwen3.KVCache(model.config, batch=2))
    logits = qwen3.forward(model, [[5, 6, 7], [8, 9]], qwen3.KVCache(model.config, batch=2), True)
    np.testing.assert_array_equal(logits, qwen3.linear(states, model.weights["lm_head"]))


def test_a_query_has_its_instruction_before_it(model):
    [query] = embed(model, [QUERY], instruction=SEARCH)
    [plain] = embed(model, [f"Instruct: {SEARCH}\nQuery:{QUERY}"])
    np.testing.assert_array_equal(query, plain)
    assert query @ embed(model, [QUERY])[0] < 0.999


def test_the_end_is_put_behind_a_text_if_the_tokenizer_does_not(model, tmp_path, some_texts):
    other = qwen3.load_model(make_embedder(tmp_path / "model", ending=False))
    assert other.embeds and other.tokenizer.ending == [] != model.tokenizer.ending
    np.testing.assert_array_equal(embed(other, some_texts), embed(model, some_texts))


def test_a_score_is_the_share_of_yes(judge):
    from qwen3_embed import PREFIX, SUFFIX
    encode = judge.tokenizer.encode
    ids = [*encode(PREFIX), *encode(f"<Instruct>: {SEARCH}\n<Query>: {QUERY}\n<Document>: by the sun"), *encode(SUFFIX)]
    logits = qwen3.forward(judge, ids, qwen3.KVCache(judge.config))
    yes, no = (np.exp(logits[judge.tokenizer.token_to_id(word)]) for word in ("yes", "no"))
    np.testing.assert_allclose(rerank(judge, QUERY, ["by the sun"]), yes / (yes + no), atol=1e-6)


def test_no_texts(model, judge):
    assert embed(model, []).shape == (0, 32) and rerank(judge, QUERY, []).shape == (0,)


def test_a_gguf_file(tmp_path, some_texts):
    """An embedding model's says that the tokenizer ends each text."""
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    from test_gguf_file import write_gguf
    path = make_random_model(SHAPE | {"vocab_size": VOCABULARY}, tmp_path / "model", "float32")
    tokenizer = load_tokenizer(path)
    file = write_gguf(path, tmp_path / "x.gguf", **{"tokenizer.ggml.add_eos_token": 1,
                                                    "tokenizer.ggml.eos_token_id": tokenizer.token_to_id(END)})
    source = shutil.copytree(path, tmp_path / "source")
    without_prefix(path)  # now the folder is an embedding model, too; its tokenizer ends no texts
    assert qwen3.load_model(file).tokenizer.ending == [tokenizer.token_to_id(END)]
    expected = embed(qwen3.load_model(path), some_texts)
    np.testing.assert_array_equal(embed(qwen3.load_model(file), some_texts), expected)
    older = write_gguf(source, tmp_path / "y.gguf", **{"qwen3.pooling_type": 3})  # as in Qwen's own files
    np.testing.assert_array_equal(embed(qwen3.load_model(older), some_texts), expected)
    ranks = write_gguf(source, tmp_path / "z.gguf", **{"qwen3.pooling_type": 4})
    assert_one_line(message_of(qwen3.load_model, ranks), "z.gguf", "a reranker", "Qwen/Qwen3-Reranker-0.6B")
    mean = write_gguf(source, tmp_path / "m.gguf", **{"qwen3.pooling_type": 1})  # another kind of embedding model
    assert_one_line(message_of(qwen3.load_model, mean), "m.gguf", "pooling_type = 1", "last token")
    assert not qwen3.load_model(write_gguf(source, tmp_path / "n.gguf", **{"qwen3.pooling_type": 0})).embeds


# ----------------------------------------------------------------------------------------------------------------------
# Many texts
# ----------------------------------------------------------------------------------------------------------------------

def one_token_at_a_time(model):
    """The model with an engine that is slow and always adds in the same order, whatever shares the batch."""
    def hidden_states(model, ids, cache):
        ids, sequences = checked_batch(ids, cache, model.config, np.float32)
        positions, rows = cache.reserve(sequences), []
        for sequence, part in parts_of(sequences):
            before, alone = cache.token_ids[sequence, :cache.lengths[sequence]], qwen3.KVCache(model.config)
            steps = [qwen3.hidden_states(model, [token], alone)[0] for token in (*before, *ids[part])]
            rows += steps[len(before):]
        cache.advance(sequences, positions, ids)
        return np.array(rows)

    return dataclasses.replace(model, engine=dataclasses.replace(model.engine, hidden_states=hidden_states))


def test_a_text_has_the_same_vector_whatever_is_beside_it(model, judge, some_texts):
    """To the last bit, if the engine has one order of summation; NumPy has not, so it may differ by rounding."""
    for model, work in ((model, embed), (model, lambda *args: embed(*args, instruction=SEARCH)),
                        (judge, lambda model, documents: rerank(model, QUERY, documents))):
        exact = one_token_at_a_time(model)
        np.testing.assert_array_equal(work(exact, some_texts), [work(exact, [text])[0] for text in some_texts])
        np.testing.assert_allclose(work(model, some_texts), work(exact, some_texts), atol=3e-6)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_fast_engine_gives_the_same_bits_in_a_batch(quantize, embedder, reranker, some_texts):
    model, judge = (fast.load_model(folder, quantize, threads=2) for folder in (embedder, reranker))
    for task in (None, SEARCH):
        np.testing.assert_array_equal(embed(model, some_texts, task),
                                      [embed(model, [text], task)[0] for text in some_texts])
    np.testing.assert_array_equal(rerank(judge, QUERY, some_texts),
                                  [rerank(judge, QUERY, [text])[0] for text in some_texts])


@given(st.lists(st.integers(1, 900), max_size=200), st.integers(0, 3000))
@patiently(200)
def test_groups(lengths, shared):
    """Each text is in one group; a group's first text is its longest; no group is too large, or could take the next."""
    found = list(groups(np.array(lengths, int), shared))
    assert sorted(i for group in found for i in group) == [*range(len(lengths))]
    longest = [lengths[group[0]] for group in found]
    assert longest == sorted(longest, reverse=True)
    for group, n in zip(found, longest):
        assert max(lengths[i] for i in group) == n
        total, positions = sum(lengths[i] for i in group), len(group) * (shared + n)
        assert len(group) == 1 or total <= TOGETHER and positions <= POSITIONS
    for group, after in zip(found, found[1:]):
        total, positions = sum(lengths[i] for i in [*group, after[0]]), (len(group) + 1) * (shared + lengths[group[0]])
        assert total > TOGETHER or positions > POSITIONS


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=8), st.lists(st.integers(0, 3)))
@patiently(300)
def test_common_length(bodies, before):
    sequences = [before + body for body in bodies]
    common = len(os.path.commonprefix(sequences)) if len(sequences) > 1 else 0
    common = min(common, min(map(len, sequences), default=1) - 1)
    assert common_length(sequences) == (common if common * (len(sequences) - 1) > PASS else 0)


def counting(model):
    """(the model, a list to which each pass adds how many tokens it computes)."""
    passes = []

    def counted(model, ids, cache):
        passes.append(len(checked_batch(ids, cache, model.config, np.float32)[0]))
        return qwen3.hidden_states(model, ids, cache)

    def never(*_):
        raise AssertionError("the whole head is computed")

    return dataclasses.replace(model, engine=dataclasses.replace(model.engine, hidden_states=counted, forward=never)), \
        passes


def test_filling_up_costs_little(model):
    """100 texts of very different lengths: 3 % more tokens than there are."""
    model, passes = counting(model)
    documents = texts(np.random.default_rng(1), 100, 60)
    embed(model, documents)
    assert sum(passes) < 1.03 * sum(len(model.tokenizer.encode(text)) for text in documents)
    assert len(passes) < 30


def test_prefix_and_query_are_read_once(judge):
    model, passes = counting(judge)
    documents, query = texts(np.random.default_rng(2), 50, 12), " ".join(texts(np.random.default_rng(3), 5))
    rerank(model, query, documents)
    assert passes[0] > len(judge.tokenizer.encode(query))
    others = sum(len(judge.tokenizer.encode(text)) + 12 for text in documents)  # 12 for the suffix, and for joints
    assert sum(passes[1:]) < 1.2 * others < len(documents) * passes[0]


def test_the_instruction_is_read_once(model):
    model, passes = counting(model)
    queries = texts(np.random.default_rng(4), 40, 4)
    embed(model, queries, instruction=SEARCH)
    assert sum(passes) < passes[0] + 1.1 * sum(len(model.tokenizer.encode(query)) + 1 for query in queries)


def test_only_two_rows_of_the_head_are_computed(judge):
    model, asked = counting(judge)[0], []

    def head_rows(model, token_ids):
        asked.append(token_ids)
        return judge.engine.head_rows(model, token_ids)

    engine = dataclasses.replace(model.engine, head_rows=head_rows)
    rerank(dataclasses.replace(model, engine=engine), QUERY, ["by the sun"] * 3)
    assert asked == [[judge.tokenizer.token_to_id("no"), judge.tokenizer.token_to_id("yes")]]


# ----------------------------------------------------------------------------------------------------------------------
# Too long
# ----------------------------------------------------------------------------------------------------------------------

def test_a_text_that_is_too_long_is_refused_or_cut(tmp_path):
    model = qwen3.load_model(make_embedder(tmp_path / "model", max_position_embeddings=16))
    ids = model.tokenizer.encode("bee " * 40)
    assert_one_line(message_of(embed, model, ["bee", "bee " * 40]), "text 2", len(ids) - 1, "room for 15", "truncate")
    cut = embed(model, ["bee", "bee " * 40], truncate=True)
    state = qwen3.hidden_states(model, [*ids[:15], ids[-1]], qwen3.KVCache(model.config))[-1]
    np.testing.assert_allclose(cut[1], state / np.linalg.norm(state), atol=1e-6)


def test_a_document_that_is_too_long_is_refused_or_cut(judge):
    long = "bee " * 5000
    assert_one_line(message_of(rerank, judge, QUERY, ["bee", long]), "text 2", "truncate")
    scores = rerank(judge, QUERY, ["bee", long], truncate=True)
    room = 4096 - 100  # what is cut is the document's end, not the question behind it
    np.testing.assert_allclose(scores[1], rerank(judge, QUERY, ["bee " * (room * 2)], truncate=True)[0], atol=1e-5)
    tiny = dataclasses.replace(judge, config=dataclasses.replace(judge.config, max_position_embeddings=20))
    assert_one_line(message_of(rerank, tiny, QUERY, ["bee"], truncate=True), "room for 0")


def test_an_instruction_or_a_query_is_never_cut(model, judge):
    """The score would be of a part of the query without any document."""
    for work in (lambda: rerank(judge, "bee " * 5000, ["sun"], truncate=True),
                 lambda: embed(model, ["sun"], "bee " * 5000, truncate=True)):
        assert_one_line(message_of(work), "instruction and query alone", "context has room for")


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wrong, words", [
    ([""], ["text is empty"]), (["a", " \n"], ["text 2", "empty"]), (["a", None], ["text 2", "NoneType"]),
    ("abc", ["list of texts"]), (None, ["list of texts", "None"]), (["\ud800"], ["Unicode"]),
    ([""] * 1_000_000, ["text 1 is empty"])])
def test_wrong_texts(model, judge, wrong, words):
    assert_one_line(message_of(embed, model, wrong), *words)
    assert_one_line(message_of(rerank, judge, QUERY, wrong), *(word.replace("text ", "document ") for word in words
                                                               if "list" not in word))


def test_texts_that_can_be_read_only_once(model, judge):
    texts = ["bee", "a sun", "bee"]
    np.testing.assert_array_equal(embed(model, iter(texts)), embed(model, texts))
    np.testing.assert_array_equal(rerank(judge, QUERY, iter(texts)), rerank(judge, QUERY, texts))


@pytest.mark.parametrize("dimensions", [0, -1, 33, 1.5, True, "8"])
def test_wrong_dimensions(model, dimensions):
    assert_one_line(message_of(embed, model, ["a"], dimensions=dimensions), "dimensions", "32")


def test_an_empty_query(judge):
    assert_one_line(message_of(rerank, judge, " ", ["a"]), "the query is empty")


def test_an_embedding_model_can_not_chat(model, embedder):
    """By its tokenizer, or by its file: the answer says what to do."""
    for work in (lambda: qwen3.chat(model, [{"role": "user", "content": "Hello"}]), lambda: qwen3.score(model, [5, 6]),
                 lambda: qwen3.generate(model, [5]), lambda: qwen3.generate_batch(model, [[5]])):
        assert_one_line(message_of(work), "embedding model", "qwen3_embed.py", "Qwen/Qwen3-0.6B")
    for loaded in (qwen3.load_model(embedder, tokenizer=False), fast.load_model(embedder)):
        assert_one_line(message_of(qwen3.generate, loaded, [5]), "embedding model", "qwen3_embed.py")


def test_other_models_do_not_embed(demo, model, judge):
    assert_one_line(message_of(embed, judge, ["a"]), "not an embedding model", "Qwen/Qwen3-Embedding-0.6B")
    assert_one_line(message_of(embed, demo, ["a"]), "not an embedding model")
    assert_one_line(message_of(rerank, model, QUERY, ["a"]), "embedding model", "Qwen/Qwen3-Reranker-0.6B")
    plain = dataclasses.replace(model, engine=dataclasses.replace(model.engine, hidden_states=None))
    assert_one_line(message_of(embed, plain, ["a"]), "engine", "hidden_states")


def test_a_tokenizer_without_yes(judge, tiny_model):
    assert_one_line(message_of(rerank, tiny_model, "a", ["b"]), "no token 'no'")


@pytest.mark.parametrize("load", [qwen3.load_model, fast.load_model])
def test_nan_in_a_vector(load, tmp_path):
    """It names the broken tensor."""
    folder = make_embedder(tmp_path / "model")
    broken = np.full((128, 32), 0.1, np.float32)
    broken[3, 4] = np.nan
    with_tensors(folder / "model.safetensors", {"layers.1.mlp.up_proj.weight": np.resize(broken, (64, 32))})
    model = load(folder)
    assert_one_line(message_of(embed, model, ["bee", "sun"]), "not finite", "layers.1.mlp.up_proj.weight")


def test_a_vector_without_a_length(tmp_path):
    folder = make_embedder(tmp_path / "model")
    with_tensors(folder / "model.safetensors", {"norm.weight": np.zeros(32, np.float32)})
    assert_one_line(message_of(embed, qwen3.load_model(folder), ["bee", "sun"]), "vector of text 1 has the length 0.0")


def test_missing_and_surplus_tensors(tmp_path):
    """Names without `model.` are checked as strictly as others."""
    folder = make_embedder(tmp_path / "model", SHAPE | {"tie_word_embeddings": False})
    assert qwen3.load_model(folder).embeds
    with_tensors(folder / "model.safetensors", {"layers.1.mlp.up_proj.weight": None})
    assert_one_line(message_of(qwen3.load_model, folder), "model.layers.1.mlp.up_proj.weight is missing")
    with_tensors(folder / "model.safetensors", {"model.norm.weight": np.ones(32, np.float32)})
    assert_one_line(message_of(qwen3.load_model, folder), "unexpected")
