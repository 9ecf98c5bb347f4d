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

Both models are the model of qwen3.py without its head. The last token of a text attends to the whole text; its hidden
state, scaled to length 1, is the embedding. A reranker reads query and document together and is asked whether the
document answers the query: the score is the probability of "yes" against "no". Source: Zhang et al. 2025 (Qwen3
Embedding).
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from qwen3 import InputError, Model, brief, checked_whole, load_model
from qwen3_lib.app.cli import guarded
from qwen3_lib.app.files import read_text
from qwen3_lib.app.options import Parser, add_engine_options, add_model_options, load, named_model
from qwen3_lib.app.terminal import columns, print_json, to_stdout, write
from qwen3_lib.batch.caches import Caches, copy_prefix
from qwen3_lib.io.progress import progress

__all__ = ["SEARCH", "InputError", "Model", "embed", "load_model", "rerank"]

SEARCH = "Given a web search query, retrieve relevant passages that answer the query"  # the instruction for a search
END = "<|endoftext|>"  # follows each text that is embedded

# The reranker's prompt is PREFIX, "<Instruct>: ...", SUFFIX, exactly as in its training.
PREFIX = ("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
          'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


# ---- Embeddings and scores -------------------------------------------------------------------------------------------

def embed(model: Model, texts: Iterable[str], instruction: str | None = None, dimensions: int | None = None,
          truncate: bool = False) -> np.ndarray:
    """A vector of length 1 for each text -> float32 [n, hidden_size]; with `dimensions`, only its first numbers.

    `instruction` is the task of a query, such as SEARCH; documents have no instruction. Raises InputError for a model
    that is no embedding model, and for a text longer than the model's context; `truncate` cuts such a text instead.
    """
    if not model.embeds:
        raise InputError(f"{model.path}: not an embedding model; take a model such as Qwen/Qwen3-Embedding-0.6B")
    size = model.config.hidden_size if dimensions is None else dimensions
    if checked_whole("dimensions", size, 1) > model.config.hidden_size:
        raise InputError(f"dimensions must be at most {model.config.hidden_size}, not {size}")
    task = "" if instruction is None else f"Instruct: {instruction}\nQuery:"
    ending = model.tokenizer.ending  # the tokenizer may append END; a text is cut before END, so END is added later

    def encode(text: str) -> list[int]:
        ids = model.tokenizer.encode(text)
        return ids[:len(ids) - len(ending)]

    bodies = [encode(task + text) for text in checked_texts(texts)]
    vectors = last_states(model, [], bodies, ending or [token_id(model, END)], truncate, len(encode(task)))[:, :size]
    lengths = np.sqrt(np.einsum("ni,ni->n", vectors, vectors))
    if (wrong := np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))).size:
        raise InputError(f"{model.path}: the vector of text {wrong[0] + 1} has the length {lengths[wrong[0]]}: the "
                         f"weights are damaged, or {model.engine.overflow}")
    return vectors / lengths[:, None]


def rerank(model: Model, query: str, documents: Iterable[str], instruction: str | None = None,
           truncate: bool = False) -> np.ndarray:
    """The probability that each document answers the query -> float32 [n], from 0 to 1.

    `instruction` describes the task; the default is SEARCH. Raises InputError for an embedding model, and for a
    document longer than the context has room for; `truncate` cuts such a document instead.
    """
    if model.embeds:
        raise InputError(f"{model.path}: an embedding model, not a reranker; compare the vectors of embed(), or take a "
                         "model such as Qwen/Qwen3-Reranker-0.6B")
    checked_texts([query], "the query")
    task = f"<Instruct>: {SEARCH if instruction is None else instruction}\n<Query>: {query}\n<Document>: "
    encode, answers = model.tokenizer.encode, [token_id(model, "no"), token_id(model, "yes")]
    bodies = [encode(task + document) for document in checked_texts(documents, "document")]
    states = last_states(model, encode(PREFIX), bodies, encode(SUFFIX), truncate, len(encode(task)))
    no, yes = model.engine.head_rows(model, answers)  # two rows [hidden_size], not the whole vocabulary
    difference = np.einsum("nh,h->n", states, yes - no)  # of the two logits; each row by itself, whatever n is
    if not np.isfinite(difference).all():
        raise InputError(f"{model.path}: the scores are not finite: damaged weights, or {model.engine.overflow}")
    with np.errstate(over="ignore"):  # exp may be inf: then the score is 0
        return 1 / (1 + np.exp(-difference))  # their softmax, the share of "yes"


def token_id(model: Model, token: str) -> int:
    """The id of a token. Raises InputError if the tokenizer doesn't have it."""
    if (found := model.tokenizer.token_to_id(token)) is None or found >= model.config.vocab_size:
        raise InputError(f"{model.path}: the tokenizer has no token {token!r}")
    return found


def checked_texts(texts: Iterable[str], name: str = "text") -> list[str]:
    """The texts as a list. Raises InputError for one that is no text or an empty text."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise InputError(f"expected a list of texts, not {brief(repr(texts), 40)}")
    texts = list(texts)
    for i, text in enumerate(texts, 1):
        which = name if len(texts) == 1 else f"{name} {i}"
        if not isinstance(text, str):
            raise InputError(f"{which} must be a text, not {type(text).__name__}")
        if not text or text.isspace():
            raise InputError(f"{which} is empty")
    return texts


# ---- The last hidden state of many texts -----------------------------------------------------------------------------
# The tokens of several texts go through the layers in one array, without padding. A beginning that all texts share,
# such as an instruction and a query, is computed once.

TOGETHER = 512  # tokens in one pass: enough for full speed of the matrix products
POSITIONS = 4096  # positions in the KV caches of one pass: at most 0.9 GB in Qwen3-0.6B
PASS = 16  # computing this many tokens takes about as long as reading the weights once


def last_states(model: Model, before: list[int], bodies: Sequence[list[int]], after: list[int],
                truncate: bool, n_task: int) -> np.ndarray:
    """The hidden state of the last token of each text, before + body + after -> float32 [n, hidden_size].

    Raises InputError for a text longer than the context; `truncate` cuts its body instead, but never the body's first
    `n_task` tokens, the instruction or query.
    """
    room = model.config.context_length - len(before) - len(after)
    for i, body in enumerate(bodies, 1):
        if n_task and len(body) > room <= n_task:
            raise InputError(f"the instruction and query alone have {n_task} tokens, and the model's context has room "
                             f"for {max(room, 0)}")
        if room < 1 or len(body) > room and not truncate:
            raise InputError(f"text {i} has {len(body)} tokens, and the model's context has room for {max(room, 0)}; "
                             "the option truncate cuts the text")
    texts = [before + body[:room] + after for body in bodies]
    shared = common_length(texts)
    lengths, new_cache = [len(text) - shared for text in texts], model.engine.new_cache
    states = np.empty((len(texts), model.config.hidden_size), np.float32)
    if shared:
        beginning = new_cache(model.config, shared)
        model.engine.hidden_states(model, np.array(texts[0][:shared]), beginning)
    with progress(description="embedding", total=sum(lengths), unit=" tokens", unit_scale=True) as bar:
        for rows in groups(lengths, shared):
            caches = [new_cache(model.config, len(texts[i])) for i in rows]
            for cache in caches if shared else ():
                copy_prefix(cache, beginning, shared)
            together = Caches(caches, [lengths[i] for i in rows])
            x = model.engine.hidden_states(model, np.concatenate([texts[i][shared:] for i in rows]), together)
            states[rows] = x[together.last]
            bar.update(len(x))
    return states


def common_length(texts: Sequence[list[int]]) -> int:
    """How many tokens all texts share at their start; 0 if computing them once saves less than a pass costs."""
    if len(texts) < 2:
        return 0
    # The first and the last text in dictionary order share the fewest. At least one token of each text must remain.
    shared = min(len(os.path.commonprefix([min(texts), max(texts)])), min(map(len, texts)) - 1)
    return shared if shared * (len(texts) - 1) > PASS else 0


def groups(lengths: Sequence[int], shared: int) -> Iterator[list[int]]:
    """The indices of the texts of each pass."""
    group: list[int] = []
    total = 0
    for i, n in enumerate(lengths):
        if group and (total + n > TOGETHER or total + n + shared * (len(group) + 1) > POSITIONS):
            yield group
            group, total = [], 0
        group.append(i)
        total += n
    if group:
        yield group


# ---- The command line ------------------------------------------------------------------------------------------------

def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Reads texts from stdin, one per line, and writes one vector per text to stdout. With "
                    "--query, ranks documents by how well they answer the query.")
    add = parser.add_argument
    add("--instruction", metavar="TEXT", help="the task of queries (default: a web search for --query, no instruction "
        "for texts from stdin)")
    add("--dimensions", type=int, metavar="N", help="keep only the first N numbers of each vector")
    add("--query", metavar="TEXT", help="rank the documents for this query: by the scores of a reranker, or by the "
        "similarity of an embedding model's vectors")
    add("--documents", metavar="FILE", help="the documents to rank, one per line (default: stdin)")
    add("--truncate", action="store_true", help="cut texts that are too long for the model (default: refuse them)")
    add("--json", action="store_true", help="print one JSON object per text or document")
    add_model_options(parser, "none")
    add_engine_options(parser)
    return parser


def print_ranking(documents: Sequence[str], scores: np.ndarray, as_json: bool) -> None:
    """Prints the documents in order of their scores; on a terminal, each as one line cut to the width."""
    if not as_json:
        write(f"{'RANK':>4}  {'SCORE':>7}  {'LINE':>6}  DOCUMENT\n")
    for rank, i in enumerate(np.argsort(-scores, kind="stable").tolist(), 1):
        if as_json:
            print_json({"rank": rank, "score": round(float(scores[i]), 7), "line": i + 1, "document": documents[i]})
        else:
            width = columns(sys.stdout)
            text = brief(documents[i], max(width - 23, 20)) if width else documents[i]
            write(f"{rank:4}  {scores[i]:7.4f}  {i + 1:6}  {text}\n")


def run(args: argparse.Namespace) -> int:
    """Does what the options say -> exit status."""
    if named_model(args) is None:
        raise InputError("no model is given; give one, such as --model Qwen/Qwen3-Embedding-0.6B")
    if args.query is None and not args.json and sys.stdout.isatty():
        raise InputError("a terminal can't show vectors; write them into a file (> vectors.npy), or give --json")
    text, where = read_text(args.documents or "-"), args.documents or "stdin"
    lines = checked_texts([line.removesuffix("\r") for line in text.split("\n")], f"{where}: line")
    model = load(args)
    if args.query is None:
        vectors = embed(model, lines, args.instruction, args.dimensions, args.truncate)
        if not args.json:
            with to_stdout():
                np.lib.format.write_array(sys.stdout.buffer, vectors, allow_pickle=False)
        else:
            for line, vector in zip(lines, vectors):
                print_json({"text": line, "vector": np.round(vector.astype(np.float64), 7).tolist()})
        return 0
    if model.embeds:
        task = SEARCH if args.instruction is None else args.instruction
        query = embed(model, checked_texts([args.query], "the query"), task, args.dimensions, args.truncate)
        scores = embed(model, lines, None, args.dimensions, args.truncate) @ query[0]
    elif args.dimensions is not None:
        raise InputError(f"--dimensions: {model.path} is no embedding model, so there are no vectors")
    else:
        scores = rerank(model, args.query, lines, args.instruction, args.truncate)
    print_ranking(lines, scores, args.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.documents is not None and args.query is None:
        parser.error("--documents needs --query")
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
