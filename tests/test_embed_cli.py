"""qwen3_embed.py as a command, and examples/search.py: real processes."""
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import qwen3
from configs import ROOT
from helpers import assert_one_line, run_fast
from qwen3_embed import SEARCH, embed, make_parser, rerank

LINES = ["Bees find home by the sun.", "Tea came by ship.", "蜜蜂 通过 太阳 回家"]
QUERY = "How do bees find home?"


def run(*arguments, stdin="\n".join(LINES) + "\n", program="qwen3_embed.py", **options):
    data = stdin.encode() if isinstance(stdin, str) else stdin
    environment = {name: value for name, value in os.environ.items() if name != "QWEN3_MODEL"}
    return subprocess.run([sys.executable, ROOT / program, *map(str, arguments)], input=data, capture_output=True,
                          timeout=300, env=environment, **options)


def output(*arguments, **options) -> bytes:
    done = run(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    return done.stdout


def refusal(*arguments, status=1, **options) -> str:
    done = run(*arguments, **options)
    assert done.returncode == status and done.stdout == b"", done
    assert_one_line(done.stderr.decode())
    return done.stderr.decode()


def test_lines_become_an_array(embedder):
    vectors = np.load(io.BytesIO(output("--model", embedder)))
    expected = embed(qwen3.load_model(embedder), LINES)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, expected)
    for stdin in ("\ufeff" + "\r\n".join(LINES), "\n".join(LINES)):  # a mark and line ends of another system
        np.testing.assert_array_equal(np.load(io.BytesIO(output("--model", embedder, stdin=stdin))), expected)
    vectors = np.load(io.BytesIO(output("--model", embedder, "--instruction", SEARCH, "--dimensions", 8)))
    np.testing.assert_array_equal(vectors, embed(qwen3.load_model(embedder), LINES, SEARCH, 8))


def test_json_lines(embedder):
    found = [json.loads(line) for line in output("--model", embedder, "--json").splitlines()]
    assert [entry["text"] for entry in found] == LINES
    np.testing.assert_allclose([entry["vector"] for entry in found], embed(qwen3.load_model(embedder), LINES), atol=1e-7)


def test_the_fast_engine(embedder):
    model = qwen3.load_model(embedder)
    for options in (["--fast"], ["--quantize", "int8"], ["--threads", "1"]):
        vectors = np.load(io.BytesIO(output("--model", embedder, *options)))
        assert ((vectors * embed(model, LINES)).sum(axis=1) > 0.99).all()


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


@pytest.mark.parametrize("stdin, words", [
    ("", ["no lines"]), ("\n" * 1_000_000, ["line 1 and 999999 more of 1000000", "empty"]),
    ("a\n \nb\n\n", ["line 2 and 1 more of 4"]), ("a\n\nb", ["line 2 of 3", "empty"]), (b"a\xff", ["UTF-8", "byte 1"])])
def test_wrong_lines(embedder, stdin, words):
    assert_one_line(refusal("--model", embedder, stdin=stdin), "stdin", *words)


def test_wrong_usage(embedder, reranker, tmp_path):
    assert "no model is given" in refusal()
    assert "--documents needs --query" in refusal("--model", embedder, "--documents", "x", status=2)
    assert "nowhere.txt: cannot be read" in refusal("--model", embedder, "--query", "a", "--documents", "nowhere.txt")
    assert "not an embedding model" in refusal("--model", reranker)
    assert "dimensions" in refusal("--model", embedder, "--dimensions", 33)
    assert "no vectors" in refusal("--model", reranker, "--query", "a", "--dimensions", 8)
    assert "the query is empty" in refusal("--model", reranker, "--query", "")
    assert "not an embedding model" in refusal("--model", ROOT / "demo")
    assert "context has room" in refusal("--model", embedder, stdin="bee " * 5000)
    assert np.load(io.BytesIO(output("--model", embedder, "--truncate", stdin="bee " * 5000))).shape == (1, 32)


def test_the_table_of_options_is_complete():
    listed = set(re.findall(r"--[a-z]+", (ROOT / "docs/vectors.md").read_text()))
    assert listed == {option for action in make_parser()._actions for option in action.option_strings
                      if option.startswith("--") and option != "--help"}


def test_a_closed_pipe_is_one_line(embedder):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, ROOT / "qwen3_embed.py", "--model", embedder], input=b"a\n" * 2000,
                          stdout=writing, stderr=subprocess.PIPE, timeout=300)
    os.close(writing)
    assert done.returncode == 1
    assert_one_line(done.stderr.decode(), "could not be written")


def test_a_terminal_gets_no_binary(embedder):
    pty = pytest.importorskip("pty", reason="there are no terminals here")
    leader, follower = pty.openpty()
    done = subprocess.run([sys.executable, ROOT / "qwen3_embed.py", "--model", embedder], input=b"a\n",
                          stdout=follower, stderr=subprocess.PIPE, timeout=300)
    os.close(follower)
    os.close(leader)
    assert done.returncode == 1
    assert_one_line(done.stderr.decode(), "vectors.npy", "--json")


@pytest.mark.parametrize("program", ["qwen3.py", "qwen3_numba.py"])
def test_an_embedding_model_asked_to_chat(embedder, program):
    """It says what to do; --list says that the model runs."""
    for options in (["--no-think", "Hello"], ["--raw", "Hello"], ["--score", "Hello"]):
        done = run_fast("--model", embedder, *options, program=program)
        assert done.returncode == 1 and done.stdout == ""
        assert_one_line(done.stderr, "embedding model", f"qwen3_embed.py --model {embedder}")
    for stdin in ("Hello\n", ""):  # refused before the first question
        assert f"qwen3_embed.py --model {embedder}" in refusal("--model", embedder, "--chat", stdin=stdin, program=program)
    done = run_fast("--model", embedder, "--list", program=program)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].split()[-1] == "yes"


# ----------------------------------------------------------------------------------------------------------------------
# examples/search.py
# ----------------------------------------------------------------------------------------------------------------------

def test_search(embedder, reranker, tmp_path):
    notes, index = tmp_path / "notes", tmp_path / "index.npz"
    (notes / "more").mkdir(parents=True)
    (notes / "bees.txt").write_text("Bees find home by the sun.\n\nThey also smell.\n", "utf-8")
    (notes / "more/tea.md").write_text("Tea came by ship.\n", "utf-8")
    program = "examples/search.py"
    assert b"3 passages of 2 files" in output("index", index, notes, "--model", embedder, program=program)
    found = output("find", index, "Bees find home by the sun.", program=program).decode().splitlines()
    model, passages = qwen3.load_model(embedder), ["Bees find home by the sun.", "They also smell.", "Tea came by ship."]
    best = int(np.argmax(embed(model, passages) @ embed(model, ["Bees find home by the sun."], SEARCH)[0]))
    assert len(found) == 3 and passages[best] in found[0] and ("tea.md" if best == 2 else "bees.txt") in found[0]
    found = output("find", index, "sun", "--reranker", reranker, program=program).decode().splitlines()
    best = int(np.argmax(rerank(qwen3.load_model(reranker), "sun", passages)))
    assert len(found) == 3 and passages[best] in found[0]
    assert "nothing.npz" in refusal("find", tmp_path / "nothing.npz", "sun", program=program)
    data = index.read_bytes()
    for wrong in (b"", b"no zip file", data[:300], data[:-1], np.load(index)["vectors"].tobytes()):
        index.write_bytes(wrong)
        assert "index.npz: no index" in refusal("find", index, "sun", program=program)
    np.save(tmp_path / "vectors.npy", np.zeros((3, 2)))
    assert "no index" in refusal("find", tmp_path / "vectors.npy", "sun", program=program)
    (tmp_path / "empty").mkdir()
    for folder, words in (("nowhere", "no such folder"), ("empty", "there is no text")):
        assert words in refusal("index", index, tmp_path / folder, "--model", embedder, program=program)
    (notes / "latin.txt").write_bytes("Frère \x1b[2J".encode("latin-1"))
    assert b"4 passages of 3 files" in output("index", index, notes, "--model", embedder, program=program)
    assert "Fr\ufffdre \\x1b[2J" in output("find", index, "sun", program=program).decode()
