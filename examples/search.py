"""Searches a folder of text files by meaning.

    python examples/search.py index notes.npz notes/ --model Qwen/Qwen3-Embedding-0.6B
    python examples/search.py find notes.npz "Where do bees live?" --reranker Qwen/Qwen3-Reranker-0.6B
"""
import argparse
import json
import sys
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not needed where qwen3 is installed

from qwen3 import InputError, load_model  # noqa: E402  (load_model of qwen3_numba is faster)
from qwen3_embed import embed, rerank  # noqa: E402
from qwen3_lib.io.errors import brief  # noqa: E402

TOP = 5  # answers to show


def index(file: str, folder: str, name: str) -> None:
    """Writes a vector for each paragraph of the .txt and .md files below the folder."""
    if not Path(folder).is_dir():
        raise InputError(f"{folder}: no such folder")
    files = [path for path in sorted(Path(folder).rglob("*")) if path.suffix in (".txt", ".md")]
    passages = [(str(path), " ".join(text.split())) for path in files
                for text in path.read_text("utf-8", "replace").split("\n\n") if text.strip()]
    if not passages:
        raise InputError(f"{folder}: there is no text in .txt or .md files")
    vectors = embed(load_model(name), [text for _, text in passages], truncate=True, prompt="document")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # some models give other lengths than 1
    with open(file, "wb") as opened:  # np.savez would change a name without .npz
        np.savez(opened, model=name, vectors=vectors, passages=json.dumps(passages))
    print(f"{file}: {len(passages)} passages of {len(files)} files")


def find(file: str, question: str, reranker: str | None) -> None:
    """Prints the passages that answer the question best."""
    try:
        saved = dict(np.load(file))
        name, vectors, passages = str(saved["model"]), saved["vectors"], json.loads(str(saved["passages"]))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise InputError(f"{file}: no index, or a damaged one; make it again with the action index") from error
    scores = vectors @ embed(load_model(name), [question], prompt="query")[0]
    best = np.argsort(-scores)[:TOP if reranker is None else 10 * TOP]
    if reranker is not None:  # the reranker reads each of the most similar passages together with the question
        scores[best] = rerank(load_model(reranker), question, [passages[i][1] for i in best], truncate=True)
        best = best[np.argsort(-scores[best])][:TOP]
    for i in best:
        print(f"{scores[i]:.3f}  {brief(passages[i][0])}: {brief(passages[i][1])}")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("action", choices=["index", "find"])
parser.add_argument("file", help="the index")
parser.add_argument("what", help="the folder to index, or the question")
parser.add_argument("--model", default="Qwen/Qwen3-Embedding-0.6B",
                    help="the embedding model of the index (default: %(default)s)")
parser.add_argument("--reranker", help="a model that ranks the best passages, such as Qwen/Qwen3-Reranker-0.6B")
args = parser.parse_args()
try:
    index(args.file, args.what, args.model) if args.action == "index" else find(args.file, args.what, args.reranker)
except (InputError, OSError) as error:
    sys.exit(f"search.py: {error}")
except KeyboardInterrupt:
    print("search.py: interrupted", file=sys.stderr)
    sys.exit(130)
