"""qwen3_embed.py as a command, and examples/search.py, in processes of their own."""
import io
import json
import os
import runpy
import sys

import numpy as np
import pytest

import qwen3
import qwen3_embed
from configs import ROOT
from embedders import add_modules, make_classifier, make_embedder
from helpers import assert_one_line, run_forked
from qwen3_embed import SEARCH, classify, embed, rerank

LINES = ["Bees find home by the sun.", "Tea came by ship.", "蜜蜂 通过 太阳 回家"]
QUERY = "How do bees find home?"
SEARCHER = "examples/search.py"


@pytest.fixture(autouse=True)
def without_a_model(monkeypatch):
    monkeypatch.delenv("QWEN3_MODEL", raising=False)


def run(*arguments, stdin="\n".join(LINES) + "\n", main=qwen3_embed.main, **options):
    return run_forked(main, *arguments, stdin=stdin.encode(), **options)


def search(arguments):
    sys.argv = [SEARCHER, *arguments]
    runpy.run_path(str(ROOT / SEARCHER), run_name="__main__")


def output(*arguments, **options) -> bytes:
    done = run(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    return done.stdout


def refusal(*arguments, **options) -> str:
    done = run(*arguments, **options)
    assert done.returncode in (1, 2) and not done.stdout, done
    assert_one_line(done.stderr.decode())
    return done.stderr.decode()


def test_lines_become_an_array_or_objects(embedder):
    """Also with a byte order mark, and the line ends of another system; only a line feed ends a line, as in sed."""
    lines = ["a\rb", "c\u2028d\x0ce", *LINES]
    options, text = ("--model", embedder, "--instruction", SEARCH, "--dimensions", 8), "\ufeff" + "\r\n".join(lines)
    vectors = np.load(io.BytesIO(output(*options, stdin=text)))
    expected = embed(qwen3.load_model(embedder), lines, SEARCH, 8)
    np.testing.assert_array_equal(vectors, expected)
    assert vectors.dtype == np.float32
    found = [json.loads(line) for line in output(*options, "--json", stdin=text).splitlines()]
    assert [entry["text"] for entry in found] == lines
    np.testing.assert_allclose([entry["vector"] for entry in found], expected, atol=1e-7)


def test_the_fast_engine(embedder):
    vectors = np.load(io.BytesIO(output("--model", embedder, "--quantize", "int8")))
    assert ((vectors * embed(qwen3.load_model(embedder), LINES)).sum(axis=1) > 0.99).all()


@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_documents_ranked(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    model, file = qwen3.load_model(folder), tmp_path / "documents.txt"
    file.write_text("\n".join(LINES), "utf-8")
    scores = rerank(model, QUERY, LINES) if kind == "reranker" else \
        embed(model, LINES) @ embed(model, [QUERY], SEARCH)[0]
    ranked = sorted(range(3), key=lambda i: -scores[i])
    objects = output("--model", folder, "--query", QUERY, "--documents", file, "--json", stdin="").splitlines()
    for rank, (i, entry) in enumerate(zip(ranked, map(json.loads, objects)), 1):
        assert (entry["rank"], entry["line"], entry["document"]) == (rank, i + 1, LINES[i])
        assert abs(entry["score"] - scores[i]) < 1e-6
    table = output("--model", folder, "--query", QUERY).decode().splitlines()
    assert table[0].split() == ["RANK", "SCORE", "LINE", "DOCUMENT"] and len(table) == 4
    for rank, (i, line) in enumerate(zip(ranked, table[1:]), 1):
        assert line.split(maxsplit=3) == [str(rank), f"{scores[i]:.4f}", str(i + 1), LINES[i]]


CLASSES = "Qwen3ForSequenceClassification"


@pytest.mark.parametrize("kind", [CLASSES, "Qwen3ForTokenClassification"])
def test_labels(kind, tmp_path):
    folder = make_classifier(tmp_path / "model", 2, kind, id2label={"0": "O", "1": "bee"})
    expected = [(line, row) for line, rows in enumerate(classify(qwen3.load_model(folder), LINES), 1) for row in rows]
    objects = output("--model", folder, "--classify", "--json").splitlines()
    for entry, (line, row) in zip(map(json.loads, objects), expected, strict=True):
        assert entry == {"line": line, "start": row.start, "end": row.end, "text": LINES[line - 1][row.start:row.end],
                         "label": row.best, "probabilities": row.probabilities, "scores": row.scores}
    table = output("--model", folder, "--classify").decode().splitlines()
    assert table[0].split() == ["LINE", "PROBABILITY", "SCORE", "LABEL", "TEXT"] and len(table) == len(expected) + 1
    for text, (line, row) in zip(table[1:], expected):
        assert text.split()[:4] == [str(line), f"{row.probabilities[row.best]:.4f}", f"{row.scores[row.best]:.4f}",
                                    row.best]


def test_prompts_for_a_search(tmp_path):
    """The model's own prompts, and the cosine of vectors that haven't length 1."""
    folder = add_modules(make_embedder(tmp_path), pooling_mode_mean_tokens=True)
    prompts = {"prompts": {"query": "find: ", "document": "text: ", "other": "tea "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    model = qwen3.load_model(folder)
    documents, query = embed(model, [f"text: {line}" for line in LINES]), embed(model, [f"find: {QUERY}"])[0]
    scores = documents @ query / np.linalg.norm(documents, axis=1) / np.linalg.norm(query)
    objects = map(json.loads, output("--model", folder, "--query", QUERY, "--json").splitlines())
    assert {entry["line"]: entry["score"] for entry in objects} == \
        pytest.approx({i: float(score) for i, score in enumerate(scores, 1)}, abs=1e-5)
    vectors = np.load(io.BytesIO(output("--model", folder, "--prompt", "other")))
    np.testing.assert_allclose(vectors, embed(model, [f"tea {line}" for line in LINES]), atol=1e-6)


def test_refusals(embedder, reranker, tmp_path):
    lines = tmp_path / "lines.txt"

    def message(*arguments, data=b"a\n"):
        lines.write_bytes(data)
        return refusal(*arguments)

    assert "no model is given" in message("--query", "a")
    assert "nowhere.txt: cannot be read" in message("--model", embedder, "--query", "a", "--documents", "nowhere.txt")
    documents = ["--query", "a", "--documents", lines]
    assert "no vectors" in message("--model", reranker, *documents, "--dimensions", 8)
    for data, words in ((b"", "there are no texts"), (b"a\xff", "not UTF-8 text: byte 1")):
        assert words in message("--model", embedder, *documents, data=data)


def test_empty_lines_are_skipped_where_the_output_tells_the_lines_apart(embedder, reranker, tmp_path):
    """As in a batch. A file of vectors has nothing but their order, so an empty line is refused, but at the end."""
    spread, folder = f"\n{LINES[0]}\n \r\n{LINES[1]}\n{LINES[2]}\n\n", make_classifier(tmp_path, 2, CLASSES)
    for arguments in (("--model", reranker, "--query", QUERY), ("--model", folder, "--classify")):
        plain, found = (list(map(json.loads, output(*arguments, "--json", stdin=text).splitlines()))
                        for text in ("\n".join(LINES), spread))
        assert found == [entry | {"line": {1: 2, 2: 4, 3: 5}[entry["line"]]} for entry in plain] != []
    found = output("--model", embedder, "--json", stdin=spread).splitlines()
    assert [json.loads(line)["text"] for line in found] == LINES
    assert "line 1 is empty" in refusal("--model", embedder, stdin=spread)
    assert np.load(io.BytesIO(output("--model", embedder, stdin="\n".join([*LINES, "", ""])))).shape == (3, 32)


def test_usage_and_truncation(embedder):
    assert "--documents needs --query" in refusal("--model", embedder, "--documents", "x")
    assert "--classify does not go with --query" in refusal("--model", embedder, "--classify", "--query", "x")
    assert "context has room" in refusal("--model", embedder, stdin="bee " * 5000)
    assert np.load(io.BytesIO(output("--model", embedder, "--truncate", stdin="bee " * 5000))).shape == (1, 32)


def test_a_reader_that_has_left_is_no_error(embedder):
    """As after `| head -1`; a full disk is an error in one line."""
    reading, writing = os.pipe()
    os.close(reading)
    done = run("--model", embedder, stdin="a\n" * 300, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
    with open("/dev/full", "wb") as full:
        assert "could not be written" in refusal("--model", embedder, stdout=full.fileno())


def test_a_terminal_gets_no_binary(embedder):
    leader, follower = pytest.importorskip("pty").openpty()
    message = refusal("--model", embedder, stdin="a\n", stdout=follower)
    os.close(follower)
    os.close(leader)
    assert_one_line(message, "vectors.npy", "--json")


# ---- examples/search.py ----------------------------------------------------------------------------------------------

def test_search(embedder, reranker, tmp_path):
    notes, index = tmp_path / "notes", tmp_path / "index.npz"
    (notes / "more").mkdir(parents=True)
    (notes / "bees.txt").write_text("Bees find home by the sun.\n\nThey also smell.\n", "utf-8")
    (notes / "more/tea.md").write_text("Tea came by ship.\n", "utf-8")
    assert b"3 passages of 2 files" in output("index", index, notes, "--model", embedder, main=search)
    found = output("find", index, LINES[0], main=search).decode().splitlines()
    model, passages = qwen3.load_model(embedder), [LINES[0], "They also smell.", "Tea came by ship."]
    best = int(np.argmax(embed(model, passages) @ embed(model, [LINES[0]], SEARCH)[0]))
    assert len(found) == 3 and passages[best] in found[0] and ("tea.md" if best == 2 else "bees.txt") in found[0]
    found = output("find", index, "sun", "--reranker", reranker, main=search).decode().splitlines()
    best = int(np.argmax(rerank(qwen3.load_model(reranker), "sun", passages)))
    assert len(found) == 3 and passages[best] in found[0]
    index.write_bytes(index.read_bytes()[:300])
    assert "index.npz: no index" in refusal("find", index, "sun", main=search)
    assert "no such folder" in refusal("index", index, tmp_path / "nowhere", main=search)
