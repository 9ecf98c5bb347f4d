# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "numba>=0.62"]
# ///
"""Vectors for texts, and scores of documents for a query: Qwen3-Embedding and Qwen3-Reranker, with either engine.

    python qwen3_embed.py --model Qwen/Qwen3-Embedding-0.6B < lines.txt > vectors.npy
    python qwen3_embed.py --model Qwen/Qwen3-Reranker-0.6B --query "How do bees find home?" --documents lines.txt

    model = load_model("Qwen/Qwen3-Embedding-0.6B")                     # of qwen3, or of qwen3_numba
    documents = embed(model, ["Bees remember landmarks.", "Paris is in France."])   # [2, 1024], each of length 1
    query = embed(model, ["How do bees find home?"], instruction=SEARCH)            # [1, 1024]
    similarities = query @ documents.T                                  # the cosine of the angle, up to 1

Both models are the one in qwen3.py without its head. An embedding is the hidden state of a text's last token, which has
seen the whole text, scaled to length 1. A reranker reads query and document together and is asked whether the document
answers the query: the score is the probability of "yes" against "no". Source: Zhang et al. 2025 (Qwen3 Embedding).
"""
from __future__ import annotations

if __name__ == "__main__":  # so that Ctrl-C during the imports, too, ends in one line
    from qwen3_app.start import catch_ctrl_c
    catch_ctrl_c()

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from qwen3 import NUMPY, Forward, InputError, Model, load_model
from qwen3_io.arguments import common_prefix
from qwen3_io.checkpoint import check_finite
from qwen3_io.errors import brief, is_whole
from qwen3_io.progress import progress

__all__ = ["SEARCH", "InputError", "Model", "embed", "load_model", "rerank"]

SEARCH = "Given a web search query, retrieve relevant passages that answer the query"  # the task of most queries
END = "<|endoftext|>"  # behind each text that is embedded

# The reranker's prompt, as it was trained: PREFIX, "<Instruct>: ...", SUFFIX.
PREFIX = ("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
          'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


# ----------------------------------------------------------------------------------------------------------------------
# Embeddings and scores
# ----------------------------------------------------------------------------------------------------------------------

def embed(model: Model, texts: Iterable[str], instruction: str | None = None, dimensions: int | None = None,
          truncate: bool = False) -> np.ndarray:
    """A vector of length 1 for each text -> float32 [n, hidden_size], or [n, dimensions] for its first numbers only.

    `instruction` is the task that queries are embedded for, such as SEARCH; documents have none. A text longer than the
    model's context is refused, or with `truncate` cut. Raises InputError for a model that isn't made for it, too.
    """
    if not model.embeds:
        raise InputError(f"{model.path}: not an embedding model, so its vectors say little about meaning; take a model "
                         "such as Qwen/Qwen3-Embedding-0.6B")
    size = model.config.hidden_size if dimensions is None else dimensions
    if not is_whole(size, 1) or size > model.config.hidden_size:
        raise InputError(f"dimensions must be a whole number from 1 to {model.config.hidden_size}, not "
                         f"{brief(repr(dimensions))}")
    task = "" if instruction is None else f"Instruct: {instruction}\nQuery:"
    own = model.tokenizer.ending  # what the tokenizer puts behind each text; taken away, so that a text can be cut
    bodies = [model.tokenizer.encode(task + text) for text in checked_texts(texts)]
    bodies = [ids[:len(ids) - len(own)] for ids in bodies]
    n_task = len(model.tokenizer.encode(task)) - len(own) if task else 0
    vectors = last_states(model, [], bodies, own or [token_id(model, END)], truncate, n_task)[:, :size]
    lengths = np.sqrt(np.einsum("ni,ni->n", vectors, vectors))
    if (wrong := np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))).size:
        raise InputError(f"{model.path}: the vector of text {wrong[0] + 1} has the length {lengths[wrong[0]]}, so it "
                         "can't be made 1 long: the weights are damaged")
    return vectors / lengths[:, None]


def rerank(model: Model, query: str, documents: Iterable[str], instruction: str | None = None,
           truncate: bool = False) -> np.ndarray:
    """The probability that each document answers the query -> float32 [n], from 0 to 1.

    `instruction` describes the task, SEARCH if None. A document for which the context has no room is refused, or with
    `truncate` cut. Raises InputError for an embedding model, too.
    """
    if model.embeds:
        raise InputError(f"{model.path}: an embedding model, not a reranker: compare the vectors of embed(), or take a "
                         "model such as Qwen/Qwen3-Reranker-0.6B")
    checked_texts([query], "the query")
    task = f"<Instruct>: {SEARCH if instruction is None else instruction}\n<Query>: {query}\n<Document>: "
    encode, answers = model.tokenizer.encode, [token_id(model, "no"), token_id(model, "yes")]
    bodies = [encode(task + document) for document in checked_texts(documents, "document")]
    states = last_states(model, encode(PREFIX), bodies, encode(SUFFIX), truncate, len(encode(task)))
    no, yes = given(model.engine.head_rows)(model, answers)  # two rows [hidden_size], not the whole vocabulary
    difference = np.einsum("nh,h->n", states, yes - no)  # of the two logits; each row by itself, whatever n is
    check_finite(difference, model.path, model.engine.overflow)
    with np.errstate(over="ignore"):  # exp may be inf: then the score is 0
        return 1 / (1 + np.exp(-difference))  # their softmax, the share of "yes"


def token_id(model: Model, token: str) -> int:
    """The id of a token that the tokenizer must have."""
    if (found := model.tokenizer.token_to_id(token)) is None or found >= model.config.vocab_size:
        raise InputError(f"{model.path}: its tokenizer has no token {token!r}, as every Qwen3 model has")
    return found


def given(function: Forward | None) -> Forward:
    """The engine's function. Raises InputError if it has none."""
    if function is None:
        raise InputError("this engine can only generate: it has no hidden_states and head_rows")
    return function


def checked_texts(texts: Iterable[str], name: str = "text") -> list[str]:
    """The texts. Raises InputError that names the first one that is no text, or has no character to read."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise InputError(f"a list of texts is needed, not {brief(repr(texts), 40)}")
    texts = list(texts)
    for i, text in enumerate(texts, 1):
        which = name if len(texts) == 1 else f"{name} {i}"
        if not isinstance(text, str):
            raise InputError(f"{which} is no text but {type(text).__name__}")
        if not text or text.isspace():
            raise InputError(f"{which} is empty: there is nothing to read")
    return texts


# ----------------------------------------------------------------------------------------------------------------------
# The last hidden state of many texts
#
# The tokens of several texts go through the layers behind each other, so nothing is filled up. A beginning that all
# texts have in common, such as an instruction and a query, is computed once.
# ----------------------------------------------------------------------------------------------------------------------

TOGETHER = 512  # tokens that are computed together: enough for full speed of the matrix products
POSITIONS = 4096  # positions in the KV caches of texts computed together: at most 0.9 GB in Qwen3-0.6B
PASS = 16  # about as many tokens are computed in the time that it takes to read the weights once


def last_states(model: Model, before: list[int], bodies: Sequence[list[int]], after: list[int],
                truncate: bool, n_task: int) -> np.ndarray:
    """The hidden state of the last token of each text, before + body + after -> float32 [n, hidden_size].

    Raises InputError for a text that is longer than the context, unless `truncate` cuts its body; the first `n_task`
    tokens of a body, its instruction or query, are never cut.
    """
    hidden_states = given(model.engine.hidden_states)
    room = model.config.context_length - len(before) - len(after)
    for i, body in enumerate(bodies, 1):
        if n_task and len(body) > room <= n_task:
            raise InputError(f"the instruction and query alone have {n_task} tokens, and the model's context has room "
                             f"for {max(room, 0)}")
        if room < 1 or len(body) > room and not truncate:
            raise InputError(f"text {i} has {len(body)} tokens, and the model's context has room for {max(room, 0)}; "
                             "the option truncate leaves out the rest")
    texts = [before + body[:room] + after for body in bodies]
    shared = common_length(texts)
    lengths = np.array([len(text) for text in texts], int) - shared
    states = np.empty((len(texts), model.config.hidden_size), np.float32)
    with progress(description="embedding", total=int(lengths.sum()), unit=" tokens", unit_scale=True) as bar:
        beginning = model.engine.new_cache(model.config, max(shared, 1))
        if shared:
            hidden_states(model, texts[0][:shared], beginning)
        for rows in groups(lengths, shared):
            cache = model.engine.new_cache(model.config, shared + int(lengths[rows].max()), len(rows))
            for sequence in range(len(rows)) if shared else ():
                cache.copy(sequence, beginning, 0, shared)
            x = hidden_states(model, [texts[i][shared:] for i in rows], cache)
            states[rows] = x[lengths[rows].cumsum() - 1]  # the last token of each
            check_finite(states[rows], model.path, model.engine.overflow, "hidden states")
            bar.update(int(lengths[rows].sum()))
    return states


def common_length(texts: Sequence[list[int]]) -> int:
    """The number of tokens at the start that all texts have in common, and that are worth computing first."""
    if len(texts) < 2:
        return 0
    first, last = min(texts), max(texts)  # in the order of a dictionary, so that all others lie between
    shared = min(common_prefix(np.array(first), np.array(last)), min(map(len, texts)) - 1)  # one token must be left
    return shared if shared * (len(texts) - 1) > PASS else 0


def groups(lengths: np.ndarray, shared: int) -> Iterator[list[int]]:
    """The indices of texts that are computed together, the longest ones first."""
    group: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        positions = (len(group) + 1) * (shared + lengths[group[0] if group else i])
        if group and (lengths[group].sum() + lengths[i] > TOGETHER or positions > POSITIONS):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------

def make_parser() -> argparse.ArgumentParser:
    from qwen3_app.cli import Parser
    parser = Parser(description="Reads texts from stdin, one a line, and writes a vector for each to stdout; with "
                    "--query, prints documents in the order in which they answer it.")
    add = parser.add_argument
    add("-m", "--model", metavar="NAME", help="a folder, a GGUF file, or a model on the Hugging Face hub, such as "
        "Qwen/Qwen3-Embedding-0.6B or Qwen/Qwen3-Reranker-0.6B (default: $QWEN3_MODEL)")
    add("--offline", action="store_true", help="never use the network: only folders and the hub's cache")
    add("--adapter", metavar="DIR", help="a folder with a LoRA adapter for the model")
    add("--instruction", metavar="TEXT", help="the task of the texts that are queries (default: for --query a web "
        "search; for texts from stdin none, as for documents)")
    add("--dimensions", type=int, metavar="N", help="keep only the first N numbers of each vector")
    add("--query", metavar="TEXT", help="rank the documents by this query: with a reranker by its scores, with an "
        "embedding model by the similarity of the vectors")
    add("--documents", metavar="FILE", help="the documents to rank, one a line (default: stdin)")
    add("--truncate", action="store_true", help="cut texts that are too long for the model, instead of refusing them")
    add("--json", action="store_true", help="print a JSON object for each text or document")
    add("--fast", action="store_true", help="compute with qwen3_numba; the next two options do so, too")
    add("--quantize", choices=["int8", "int4"], help="8 or 4 bits a weight")
    add("--threads", type=int, metavar="N", help="how many threads compute (default: the CPUs that may be used)")
    return parser


def read_lines(name: str) -> list[str]:
    """The lines of a file, or of stdin for "-". Raises InputError for none, an empty one, and what isn't UTF-8."""
    where = "stdin" if name == "-" else name
    try:
        if name == "-" and sys.stdin is None:
            raise InputError("stdin is closed, so no texts can be read from it")
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            lines = file.read().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise InputError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    if not lines:
        raise InputError(f"{where}: there are no lines")
    if empty := [i for i, line in enumerate(lines, 1) if not line or line.isspace()]:
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise InputError(f"{where}: line {empty[0]}{others} of {len(lines)}: empty, so there is nothing to read; leave "
                         "out empty lines")
    return lines


def write_vectors(vectors: np.ndarray) -> None:
    """Writes the array to stdout in the format of .npy files."""
    try:
        np.lib.format.write_array(sys.stdout.buffer, vectors, allow_pickle=False)
        sys.stdout.buffer.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain again when it exits
        raise InputError(f"the vectors could not be written to stdout: {error.strerror}") from error


def print_ranking(documents: Sequence[str], scores: np.ndarray, as_json: bool) -> None:
    """Prints the documents, the one with the highest score first; on a terminal, as much as fits into a line."""
    from qwen3_app.terminal import columns, print_json, write
    order = np.argsort(-scores, kind="stable").tolist()
    if not as_json:
        write(f"{'RANK':>4}  {'SCORE':>7}  {'LINE':>6}  DOCUMENT\n")
    for rank, i in enumerate(order, 1):
        if as_json:
            print_json({"rank": rank, "score": round(float(scores[i]), 7), "line": i + 1, "document": documents[i]})
        else:
            text = documents[i] if not columns(sys.stdout) else brief(documents[i], max(columns(sys.stdout) - 23, 20))
            write(f"{rank:4}  {scores[i]:7.4f}  {i + 1:6}  {text}\n")


def run(args: argparse.Namespace) -> int:
    """Does what the options say -> exit status."""
    from qwen3_app.models import named_model
    from qwen3_app.terminal import print_json
    if (name := named_model(args)) is None:
        raise InputError("no model is given: --model Qwen/Qwen3-Embedding-0.6B, for example")
    if args.query is None and not args.json and sys.stdout.isatty():
        raise InputError("vectors are no text for a terminal: write them into a file (> vectors.npy), or take --json")
    lines = read_lines("-" if args.documents is None else args.documents)
    if args.fast or args.quantize or args.threads is not None:
        try:
            import qwen3_numba
        except ImportError as error:  # numba is an extra that a plain installation leaves out
            raise InputError(str(error)) from error
        engine = qwen3_numba.engine(args.quantize, args.threads)
    else:
        engine = NUMPY
    model = load_model(name, engine, args.offline, adapter=args.adapter)
    if args.query is None:
        vectors = embed(model, lines, args.instruction, args.dimensions, args.truncate)
        if not args.json:
            write_vectors(vectors)
        else:
            for line, vector in zip(lines, vectors):
                print_json({"text": line, "vector": np.round(vector.astype(np.float64), 7).tolist()})
        return 0
    if args.dimensions is not None and not model.embeds:
        raise InputError(f"--dimensions: {model.path} is no embedding model, so there are no vectors")
    checked_texts([args.query], "the query")
    if model.embeds:
        task = SEARCH if args.instruction is None else args.instruction
        query = embed(model, [args.query], task, args.dimensions, args.truncate)
        scores = embed(model, lines, None, args.dimensions, args.truncate) @ query[0]
    else:
        scores = rerank(model, args.query, lines, args.instruction, args.truncate)
    print_ranking(lines, scores, args.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    from qwen3_app.cli import guarded
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.documents is not None and args.query is None:
        parser.error("--documents needs --query")
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
