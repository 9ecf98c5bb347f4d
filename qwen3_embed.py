# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "threadpoolctl>=3.5", "numba>=0.62"]
# ///
"""Vectors, labels and scores of texts: Qwen3-Embedding, Qwen3-Reranker and their relatives, with either engine.

    python qwen3_embed.py --model Qwen/Qwen3-Embedding-0.6B < lines.txt > vectors.npy
    python qwen3_embed.py --model Qwen/Qwen3-Reranker-0.6B --query "How do bees find home?" --documents lines.txt
    python qwen3_embed.py --model Qwen/Qwen3-VL-Embedding-2B --image photo.jpg > vectors.npy
    python qwen3_embed.py --model a-classifier --classify < lines.txt

    model = load_model("Qwen/Qwen3-Embedding-0.6B")                     # of qwen3, or of qwen3_numba
    documents = embed(model, ["Bees remember landmarks.", "Paris is in France."])   # [2, 1024], each of length 1
    query = embed(model, ["How do bees find home?"], instruction=SEARCH)            # [1, 1024]
    similarities = query @ documents.T                                  # the cosine of the angle, up to 1

All are the model of qwen3.py without its head. The last token of a text attends to the whole text; its hidden state,
scaled to length 1, is the embedding. Other models say in sentence-transformers' files how to pool the states of all
tokens. A reranker reads query and document together and is asked whether the document answers the query: the score is
the probability of "yes" against "no". A classifier has a head with a row for each label. Source: Zhang et al. 2025
(Qwen3 Embedding).
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

if __name__ == "__main__" and None in map(find_spec, ("qwen3", "qwen3_lib")):
    sys.exit("qwen3_embed.py: it needs qwen3.py and the folder qwen3_lib beside it")

from qwen3 import (  # first: it says in one line what is missing
    InputError, Model, NextTokens, Source, brief, check_finite, checked_whole, compute, load_model, softmax,
    to_float32)
import numpy as np

from qwen3_5 import sigmoid
from qwen3_lib.app.terminal import columns, guarded, print_json, to_stdout, write
from qwen3_lib.app.files import picture_file, read_text
from qwen3_lib.app.arguments import Parser, add_engine_options, add_model_options, load_main, named_model
from qwen3_lib.generation.messages import encoded, messages_and_pictures
from qwen3_lib.io.pooling import SEARCH, normalized, recipe_of
from qwen3_lib.io.progress import progress
from qwen3_vision import Picture, prompt_ids, sees

__all__ = ["SEARCH", "InputError", "Labels", "Model", "classify", "embed", "load_model", "rerank"]

END = "<|endoftext|>"  # follows each text that is embedded

# The reranker's prompt is PREFIX, "<Instruct>: ...", SUFFIX, exactly as in its training.
JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. " \
    'Note that the answer can only be "yes" or "no".'
PREFIX = f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

# Of Qwen3-VL-Embedding and Qwen3-VL-Reranker.
REPRESENT = "Represent the user's input."  # where no instruction is given
RELEVANT = "Given a search query, retrieve relevant candidates that answer the query."
SEEN_TOGETHER = 8  # texts with pictures whose vectors are in memory together
Seen = dict[str, Any]  # {"image": ..., "text": ...}, or one of them


# ---- Embeddings and scores -------------------------------------------------------------------------------------------

def embed(model: Model, texts: Iterable[str | Seen], instruction: str | None = None, dimensions: int | None = None,
          truncate: bool = False, prompt: str | None = None) -> np.ndarray:
    """A vector for each text -> float32 [n, hidden_size]; with `dimensions`, only its first numbers.

    Pooling and what follows it, such as scaling to length 1, are those of sentence-transformers' files in the model's
    folder; without such files, those of Qwen3-Embedding: the last token's state, scaled to length 1.
    `instruction` is the task of a query, such as SEARCH; documents have no instruction. `prompt` is the name of one of
    the model's own prompts instead; without either, its default prompt. Raises InputError for a model that is no
    embedding model, and for a text longer than the model's context; `truncate` cuts such a text instead.
    Qwen3-VL-Embedding also takes {"image": ..., "text": ...} in place of a text, with both or one of them; an image is
    a path, the bytes of a file, a PIL image or an array. Its instruction or prompt is a system message.
    """
    if not model.embeds or head_of(model.source):
        raise InputError(f"{model.path}: not an embedding model; take a model such as Qwen/Qwen3-Embedding-0.6B")
    if instruction is not None and prompt is not None:
        raise InputError("give an instruction or the name of a prompt, not both")
    recipe = recipe_of(model.source)
    size = recipe.width if dimensions is None else dimensions
    if checked_whole("dimensions", size, 1) > recipe.width:
        raise InputError(f"dimensions must be at most {recipe.width}, not {size}")
    seeing = sees(model)
    task = recipe.prompt(prompt)
    if instruction is not None:
        task = instruction if seeing else f"Instruct: {instruction}\nQuery:"
    texts = checked_texts(texts, pictures=seeing)
    seen = any(isinstance(text, dict) for text in texts)
    if seen and len(texts) > SEEN_TOGETHER:  # of more pictures, the vectors would take much memory
        return np.concatenate([embed(model, texts[i:i + SEEN_TOGETHER], instruction, dimensions, truncate, prompt)
                               for i in range(0, len(texts), SEEN_TOGETHER)])
    shown, after = list[Picture](), ending(model)
    if seeing:
        system = task or ("" if recipe.messages else REPRESENT)
        bodies = [seen_body(model, system, parts_of(text, 1800), shown) for text in texts]
        n_task, truncate = 0, False
    else:
        bodies, n_task = [ids_of_text(model, task + text, truncate) for text in texts], len(ids_of_text(model, task))
        if not after and recipe.needs_end:
            after = [token_id(model, END, f"its tokenizer has no token {END}")]
    pooled = pooled_states(model, [], bodies, after, truncate, n_task, recipe.longest,
                           lambda states, ids: recipe.pool(states, n_task))
    vectors = np.array(pooled, np.float32).reshape(len(bodies), model.config.hidden_size)
    for step in recipe.steps:
        vectors = step(vectors)
    vectors = vectors[:, :size]
    lengths = np.sqrt(np.einsum("ni,ni->n", vectors, vectors))
    if (wrong := np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))).size:
        raise InputError(f"{model.path}: the vector of text {wrong[0] + 1} has the length {lengths[wrong[0]]}: the "
                         f"weights are damaged, or {model.engine.overflow}") from FloatingPointError()
    return vectors / lengths[:, None] if recipe.normalize else vectors


def parts_of(item: str | Seen, tokens: int) -> list[dict[str, Any]]:
    """The parts of a message: the picture, of at most so many tokens, before the text."""
    given = {"text": item} if isinstance(item, str) else item
    return [{"type": kind, kind: given[kind], "max_pixels": tokens * 32**2, "min_pixels": 4 * 32**2}
            for kind in ("image", "text") if kind in given]


def seen_body(model: Model, system: str, parts: list[dict[str, Any]], shown: list[Picture]) -> list[int]:
    """The ids of a conversation that a Qwen3-VL-Embedding or -Reranker reads; its pictures are added to `shown`."""
    before = [{"role": "system", "content": system}] if system else []
    messages, pictures = messages_and_pictures(model, [*before, {"role": "user", "content": parts}])
    shown += pictures  # they stay as long as somebody holds them
    text = model.tokenizer.apply_chat_template(messages, join_text_parts=True)
    return [*map(int, prompt_ids(model, ids_of_text(model, text), pictures))]


def rerank(model: Model, query: str | Seen, documents: Iterable[str | Seen], instruction: str | None = None,
           truncate: bool = False) -> np.ndarray:
    """The probability that each document answers the query -> float32 [n], from 0 to 1.

    `instruction` describes the task; the default is SEARCH. Takes a Qwen3-Reranker, also converted to a classifier
    with one label. Raises InputError for another model, and for a document longer than the context has room for;
    `truncate` cuts such a document instead. Qwen3-VL-Reranker also takes {"image": ..., "text": ...}, see `embed`.
    """
    head = head_of(model.source)
    if model.embeds and not (head and head.kind == SEQUENCE and len(head.labels) == 1):
        raise InputError(f"{model.path}: an embedding model, not a reranker; compare the vectors of embed(), or take a "
                         "model such as Qwen/Qwen3-Reranker-0.6B")
    seeing, shown = sees(model), list[Picture]()
    checked_texts([query], "the query", seeing)
    documents = checked_texts(documents, "document", seeing)
    if seeing and len(documents) > SEEN_TOGETHER:
        return np.concatenate([rerank(model, query, documents[i:i + SEEN_TOGETHER], instruction, truncate)
                               for i in range(0, len(documents), SEEN_TOGETHER)])
    if head is None:  # two rows [hidden_size], not the whole vocabulary
        words = [token_id(model, word, f"not a reranker: its tokenizer has no token {word!r}; take a model such as "
                          "Qwen/Qwen3-Reranker-0.6B") for word in ("no", "yes")]
        no, yes = model.engine.rows(model, "lm_head", words)
        weight = yes - no  # gives the difference of the two logits, and its sigmoid is the share of "yes"
    else:
        weight = head.weight[0]
    before, after = ids_of_text(model, PREFIX), ids_of_text(model, SUFFIX) + ending(model)
    if seeing:
        start = f"<Instruct>: {RELEVANT if instruction is None else instruction}<Query>:"
        asked = [*parts_of(start, 1280), *parts_of(query, 1280), *parts_of("\n<Document>:", 1280)]
        bodies = [seen_body(model, JUDGE, asked + parts_of(document, 1280), shown) for document in documents]
        before, after, n_task, truncate = [], ending(model), 0, False
    else:
        task = f"<Instruct>: {SEARCH if instruction is None else instruction}\n<Query>: {query}\n<Document>: "
        bodies, n_task = [ids_of_text(model, task + document, truncate) for document in documents], \
            len(ids_of_text(model, task))
    last = pooled_states(model, before, bodies, after, truncate, n_task, model.config.context_length,
                         lambda states, ids: states[-1 if head is None else head.last(ids)])
    states = np.array(last, np.float32).reshape(len(bodies), model.config.hidden_size)
    difference = np.einsum("nh,h->n", states, weight)  # each row by itself, whatever n is
    check_finite(model, difference)
    with np.errstate(over="ignore"):  # exp may be inf: then the result is 0
        return sigmoid(difference)


def ending(model: Model) -> list[int]:
    """The tokens that the tokenizer itself appends to each text: none, or `<|endoftext|>`."""
    return model.tokenizer.encode("")


def ids_of_text(model: Model, text: str, truncate: bool = False) -> list[int]:
    """The ids of a text without its ending: a text is cut before it. `truncate`: ids beyond the context may lack."""
    ids = encoded(model.tokenizer, text, model.config.context_length, cut=truncate)
    return ids[:len(ids) - len(ending(model))]


def token_id(model: Model, token: str, without: str) -> int:
    """The id of a token. Raises InputError, which says `without`, if the tokenizer doesn't have it."""
    if (found := model.tokenizer.token_to_id(token)) is None or found >= model.config.vocab_size:
        raise InputError(f"{model.path}: {without}")
    return found


def checked_texts(texts: Iterable[Any], name: str = "text", pictures: bool = False) -> list[Any]:
    """The texts as a list. Raises InputError for one that is no text or an empty text, nor, with `pictures`, a Seen."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise InputError(f"expected a list of texts, not {brief(repr(texts), 40)}")
    texts = list(texts)
    for i, text in enumerate(texts, 1):
        which = name if len(texts) == 1 else f"{name} {i}"
        if pictures and isinstance(text, dict):
            if not text or text.keys() - {"image", "text"} or not isinstance(text.get("text", ""), str):
                raise InputError(f'{which} must be {{"image": ..., "text": ...}}, or one of them')
            continue
        if not isinstance(text, str):
            raise InputError(f"{which} must be a text, not {type(text).__name__}")
        if not text or text.isspace():
            raise InputError(f"{which} is empty")
    return texts


# ---- Labels ----------------------------------------------------------------------------------------------------------

class Labels(NamedTuple):
    """The labels of a text, or of one of its tokens, which is text[start:end]."""
    start: int
    end: int
    scores: dict[str, float]  # label -> logit
    probabilities: dict[str, float]  # of each label; of a regression model, the scores

    @property
    def best(self) -> str:
        """The label with the highest score."""
        return max(self.scores, key=self.scores.__getitem__)


def classify(model: Model, texts: Iterable[str], truncate: bool = False) -> list[list[Labels]]:
    """The labels of each text: one Labels for the whole text, or one for each token with a token classifier.

    As in transformers' pipelines, the probabilities are the softmax of the scores, or their sigmoid where a text can
    have several labels, or the model has only one. A reward model's reward is its one score. Raises InputError for a
    model without such a head, and for a text longer than the context; `truncate` cuts such a text instead.
    """
    if (head := head_of(model.source)) is None:
        raise InputError(f"{model.path}: not a classifier: architectures in config.json is none of {', '.join(HEADS)}")
    texts = checked_texts(texts)
    bodies = [ids_of_text(model, text, truncate) for text in texts]

    def logits(states: np.ndarray, ids: list[int]) -> np.ndarray:
        rows = states if head.kind == TOKEN else states[[head.last(ids)]]
        return np.einsum("nh,lh->nl", rows, head.weight) + head.bias

    found = pooled_states(model, [], bodies, ending(model), truncate, 0, model.config.context_length, logits)
    result = []
    for text, scores in zip(texts, found):
        check_finite(model, scores)
        spans = [(0, len(text))]
        if head.kind == TOKEN:  # without the ending
            spans = model.tokenizer.backend.encode(text).offsets[:len(scores) - len(ending(model))]
        result.append([Labels(*span, dict(zip(head.labels, row.tolist())),
                              dict(zip(head.labels, head.probabilities(row).tolist())))
                       for span, row in zip(spans, scores)])
    return result


SEQUENCE, TOKEN = HEADS = ("Qwen3ForSequenceClassification", "Qwen3ForTokenClassification")


class Head(NamedTuple):
    """The last layer of a classifier: scores = weight @ state + bias."""
    kind: str
    weight: np.ndarray  # [labels, hidden_size]
    bias: np.ndarray  # [labels]
    labels: list[str]
    problem: str | None  # transformers' problem_type
    padding: int | None  # config.json's pad_token_id

    def last(self, ids: list[int]) -> int:
        """The position of the last token that is no padding, as transformers finds it."""
        return max((i for i, token in enumerate(ids) if token != self.padding), default=0)

    @np.errstate(over="ignore")
    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        if self.kind == SEQUENCE and self.problem == "regression":
            return scores
        several = self.problem == "multi_label_classification" or len(self.labels) == 1
        return sigmoid(scores) if self.kind == SEQUENCE and several else softmax(scores)


@lru_cache(maxsize=4)
def head_of(source: Source) -> Head | None:
    """The head of a classifier; None for other models. Raises InputError if its weights don't fit config.json."""
    raw, config = source.about, source.config
    if (kind := next((name for name in HEADS if name in str(raw.get("architectures"))), None)) is None:
        return None
    stored, names = source.heads, raw.get("id2label")
    names = names if isinstance(names, dict) else {}
    weight, bias = stored.get("score.weight"), stored.get("score.bias")
    n = len(names) or raw.get("num_labels", 2)
    if weight is None or weight.shape != (n, config.hidden_size) or (bias is not None and bias.shape != (n,)):
        raise InputError(f"{source.path}: score.weight is missing, or has another shape than [{n}, "
                         f"{config.hidden_size}], as config.json says")
    labels = [str(names.get(str(i), f"LABEL_{i}")) for i in range(n)]
    return Head(kind, to_float32(weight), np.zeros(n, np.float32) if bias is None else to_float32(bias), labels,
                raw.get("problem_type"), raw.get("pad_token_id"))


# ---- The hidden states of many texts ---------------------------------------------------------------------------------
# The tokens of several texts go through the layers in one array, without padding. A beginning that all texts share,
# such as an instruction and a query, is computed once.

PASS_TOKENS = 512  # tokens in one pass: enough for full speed of the matrix products
POSITIONS = 4096  # positions in the KV caches of one pass: at most 0.9 GB in Qwen3-0.6B
WORTH_SHARING = 16  # computing this many tokens takes about as long as reading the weights once


def pooled_states(model: Model, before: list[int], bodies: Sequence[list[int]], after: list[int], truncate: bool,
                  n_task: int, longest: int, pool: Callable[[np.ndarray, list[int]], np.ndarray]) -> list[np.ndarray]:
    """pool(states [n, hidden_size], ids [n]) of each text, before + body + after.

    Raises InputError for a text of more than `longest` tokens; `truncate` cuts its body instead, but never the body's
    first `n_task` tokens, the instruction or query.
    """
    room = longest - len(before) - len(after)
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
    results, first = list[np.ndarray](), np.empty((0, model.config.hidden_size), np.float32)
    if shared:
        beginning = new_cache(model.config, shared)
        _, first = compute(model, [NextTokens(beginning, np.array(texts[0][:shared]), wanted=0)], states=True)
    with progress(description="embedding", total=sum(lengths), unit=" tokens", unit_scale=True) as bar:
        for rows in groups(lengths, shared):
            caches = [new_cache(model.config, len(texts[i])) for i in rows]
            for cache in caches if shared else ():
                cache.copy_from(beginning, shared)
            parts = [NextTokens(cache, np.array(texts[i][shared:]), wanted=0) for i, cache in zip(rows, caches)]
            _, x = compute(model, parts, states=True)
            for i, states in zip(rows, np.split(x, np.cumsum([lengths[i] for i in rows])[:-1])):
                results.append(np.array(pool(np.concatenate([first, states]), texts[i])))  # a copy: states go
            bar.update(len(x))
    return results


def common_length(texts: Sequence[list[int]]) -> int:
    """How many tokens all texts share at their start; 0 if computing them once saves less than a pass costs."""
    if len(texts) < 2:
        return 0
    # The first and the last text in dictionary order share the fewest. At least one token of each text must remain.
    shared = min(len(os.path.commonprefix([min(texts), max(texts)])), min(map(len, texts)) - 1)
    return shared if shared * (len(texts) - 1) > WORTH_SHARING else 0


def groups(lengths: Sequence[int], shared: int) -> Iterator[list[int]]:
    """The indices of the texts of each pass."""
    group: list[int] = []
    total = 0
    for i, n in enumerate(lengths):
        if group and (total + n > PASS_TOKENS or total + n + shared * (len(group) + 1) > POSITIONS):
            yield group
            group, total = [], 0
        group.append(i)
        total += n
    if group:
        yield group


# ---- The command line ------------------------------------------------------------------------------------------------

def make_parser() -> Parser:
    parser = Parser(description="Reads texts from stdin, one per line, and writes one vector per text to stdout. With "
                    "--query, ranks documents by how well they answer the query. With --classify, labels the texts.")
    add = parser.add_argument
    add("--instruction", metavar="TEXT", help="the task of queries (default with --query: the model's prompt for "
        "queries, or a web search; for texts from stdin: none)")
    add("--prompt", metavar="NAME", help="put one of the model's own prompts before the texts, or before the query")
    add("--dimensions", type=int, metavar="N", help="keep only the first N numbers of each vector")
    add("--query", metavar="TEXT", help="rank the documents for this query: by the scores of a reranker, or by the "
        "similarity of an embedding model's vectors")
    add("--documents", metavar="FILE", help="the documents to rank, one per line (default: stdin)")
    add("--image", action="append", metavar="FILE", help="a picture after the texts, for a Qwen3-VL-Embedding or "
        "-Reranker; may be repeated")
    add("--classify", action="store_true", help="print the label of each text, or of each of its tokens, by a model "
        "with such a head")
    add("--truncate", action="store_true", help="cut texts that are too long for the model (default: refuse them)")
    add("--json", action="store_true", help="print one JSON object per text or document")
    add_model_options(parser, "none")
    add_engine_options(parser)
    return parser


def print_ranking(documents: Sequence[str], lines: Sequence[int | None], scores: np.ndarray, as_json: bool) -> None:
    """Prints the documents in order of their scores, on a terminal each cut to one line. A picture has no line."""
    if not as_json:
        write(f"{'RANK':>4}  {'SCORE':>7}  {'LINE':>6}  DOCUMENT\n")
    for rank, i in enumerate(np.argsort(-scores, kind="stable").tolist(), 1):
        if as_json:
            print_json({"rank": rank, "score": round(float(scores[i]), 7), "line": lines[i], "document": documents[i]})
        else:
            write(f"{rank:4}  {scores[i]:7.4f}  {lines[i] or '-':>6}  {cut(documents[i], 23)}\n")


def print_labels(texts: Sequence[str], lines: Sequence[int], found: list[list[Labels]], as_json: bool) -> None:
    """Prints the best label of each text, or of each of its tokens."""
    if not as_json:
        write(f"{'LINE':>6}  {'PROBABILITY':>11}  {'SCORE':>8}  {'LABEL':16}  TEXT\n")
    for text, line, rows in zip(texts, lines, found):
        for row in rows:
            part, best = text[row.start:row.end], row.best
            if as_json:
                print_json({"line": line, "start": row.start, "end": row.end, "text": part, "label": best,
                            "probabilities": row.probabilities, "scores": row.scores})
            else:
                write(f"{line:6}  {row.probabilities[best]:11.4f}  {row.scores[best]:8.4f}  {brief(best, 40):16}  "
                      f"{cut(part, 53)}\n")


def cut(text: str, beside: int) -> str:
    """The text; on a terminal as one line that leaves room for so many columns."""
    width = columns(sys.stdout)
    return brief(text, max(width - beside, 20)) if width else text


def run(args: argparse.Namespace) -> int:
    """Does what the options say -> exit status."""
    if named_model(args) is None:
        raise InputError("no model is given; give one, such as --model Qwen/Qwen3-Embedding-0.6B")
    bare = args.query is None and not args.classify and not args.json  # vectors alone: row i is of line i
    if bare and sys.stdout.isatty():
        raise InputError("a terminal can't show vectors; write them into a file (> vectors.npy), or give --json")
    images, where = args.image or [], args.documents or "stdin"
    for file in images:
        picture_file(file)  # refused before the model is loaded
    typed = args.documents is None and sys.stdin.isatty()
    text = "" if images and typed else read_text(args.documents or "-")
    if not text.strip() and not images:
        raise InputError(f"{where}: there are no texts")
    found = [(i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    numbers, texts = [i for i, _ in found], [line for _, line in found]
    if bare and (blank := next((i for i, number in enumerate(numbers, 1) if i != number), None)):
        raise InputError(f"{where}: line {blank} is empty and has no vector; --json skips empty lines")
    model = load_main(args)
    if images and not sees(model):
        raise InputError(f"{model.path}: the model can't see: it has no vision tower")
    if args.classify:
        print_labels(texts, numbers, classify(model, texts, args.truncate), args.json)
        return 0
    items: list[str | Seen] = [*texts, *({"image": file} for file in images)]
    if args.query is None:
        vectors = embed(model, items, args.instruction, args.dimensions, args.truncate, args.prompt)
        if not args.json:
            with to_stdout():
                np.lib.format.write_array(sys.stdout.buffer, vectors, allow_pickle=False)
        else:
            for item, vector in zip(items, vectors):
                shown = {"text": item} if isinstance(item, str) else item
                print_json(shown | {"vector": np.round(vector.astype(np.float64), 7).tolist()})
        return 0
    if model.embeds and head_of(model.source) is None:
        prompt = args.prompt or ("query" if args.instruction is None else None)
        query = embed(model, checked_texts([args.query], "the query"), args.instruction, args.dimensions, args.truncate,
                      prompt)
        documents = embed(model, items, None, args.dimensions, args.truncate, "document")
        compared = (lambda x: x) if recipe_of(model.source).dot else normalized
        scores = compared(documents) @ compared(query)[0]
    elif args.dimensions is not None or args.prompt is not None:
        raise InputError(f"--{'prompt' if args.dimensions is None else 'dimensions'}: {model.path} is no embedding "
                         "model, so there are no vectors")
    else:
        scores = rerank(model, args.query, items, args.instruction, args.truncate)
    print_ranking([*texts, *images], [*numbers, *(None for _ in images)], scores, args.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.documents is not None and args.query is None:
        parser.error("--documents needs --query")
    parser.check(args, {"classify": ("query", "instruction", "prompt", "dimensions", "image")})
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
