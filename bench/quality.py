"""What bf16, int8 and int4 cost in quality, next to llama.cpp's formats on the same weights and text.

    python bench/quality.py                 (15 minutes on two cores, an estimate; 5 GB of memory)
    python bench/quality.py --only files    one of the tables: demo, random, files

The reference is qwen3.py in float32. Printed are the mean Kullback-Leibler divergence of the next token's distribution
from the reference's, and the relative error of the logits. For GGUF files that llama.cpp has quantized, the reference
has the file's own numbers, so only the fast engine's rounding counts. The text for the bundled model are conversations
of demo/train/corpus.py (needs `pip install -e ".[train]"`); the random model in the shape of Qwen3-0.6B gets random
tokens.
"""
import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import harness
from harness import ENTRIES, ROOT, Bench, table
from peers import NumbaEngine, NumpyEngine, open_engine, peer_file

sys.path.append(str(ROOT / "demo/train"))
NAMES = [name for name, entry in ENTRIES.items()
         if entry.engine not in ("OpenVINO", "CTranslate2") and name not in ("numpy", "torch") and not entry.file]
FILES = ("llama-q8_0", "llama-q4_k_m", "llama-q5_k_m", "llama-q6_k")  # whose formats are compared
LONGEST = 1024  # tokens of a text
STEPS = {"together": LONGEST, "one by one": 1}  # how the tokens of a text go in: by the kernels of prefill, of decoding
TABLES = ("demo", "random", "files")


def conversations(tokens: int) -> list[list[int]]:
    """Token ids of conversations, in all at least this number of tokens."""
    import corpus
    import qwen3
    tokenizer, rng = qwen3.load_tokenizer(ROOT / "demo"), random.Random(0)
    texts: list[list[int]] = []
    while sum(map(len, texts)) < tokens:
        drawn = corpus.conversation(rng)
        if not drawn.raw:
            text = tokenizer.apply_chat_template(drawn.messages, drawn.tools, add_generation_prompt=False)
            texts.append(tokenizer.encode(text)[:LONGEST])
    return texts


def kl_divergences(reference: np.ndarray, logits: np.ndarray) -> list[float]:
    """sum p (log p - log q) for each position of the logits [n, vocab_size] of p and q; in float64."""
    from qwen3_lib.generation.processors import log_softmax
    pairs = ([log_softmax(x.astype(np.float64)) for x in pair] for pair in zip(reference, logits))
    return [float(np.exp(log_p) @ (log_p - log_q)) for log_p, log_q in pairs]


def all_logits(engine: Any, ids: Sequence[int], step: int) -> np.ndarray:
    """The logits [n, vocab_size] of a text, `step` tokens at a time."""
    engine.truncate(0)
    return np.concatenate([engine.run(ids[i:i + step], True).copy() for i in range(0, len(ids), step)])


def start(name: str, path: Path, folder: Path, threads: int, files: bool, _repack: bool) -> tuple[Any, Path]:
    """(the engine of an entry, or the fast engine with the GGUF file of an entry; the model of its reference)."""
    file = peer_file(path, folder, name) if files else path
    return (NumbaEngine(file, None, threads, LONGEST) if files else
            open_engine(name, path, folder, threads, LONGEST, repack=False)), file


def errors(started: tuple[Any, Path], texts: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """For each of STEPS [MB of weights, mean KL divergence, mean error of the logits, largest]: from NumPy's."""
    engine, numpy = started[0], NumpyEngine(started[1], LONGEST)
    found = {way: (list[float](), list[float]()) for way in STEPS}
    for ids in texts:
        reference = all_logits(numpy, ids, LONGEST)
        for way, step in STEPS.items():
            logits, (divergences, relative) = all_logits(engine, ids, step), found[way]
            divergences += kl_divergences(reference, logits)
            relative += (np.linalg.norm(logits - reference, axis=1) / np.linalg.norm(reference, axis=1)).tolist()
    return {way: [engine.weight_bytes / 1e6, float(np.mean(divergences)), float(np.mean(relative)), max(relative)]
            for way, (divergences, relative) in found.items()}


def compare(args: argparse.Namespace, title: str, names: Sequence[str], texts: Sequence[Sequence[int]],
            files: bool = False) -> None:
    """Prints `errors` of each engine that is installed and doesn't crash; each has a process of its own."""
    with Bench(args) as bench:
        for name in names:
            bench.open(name, start, files, check=partial(errors, texts=texts))
            bench.close(*bench.workers)
        rows = [["this engine" if files else ENTRIES[name].engine, ENTRIES[name].format, way,
                 f"{values[0]:.1f}", *(f"{value:.2e}" for value in values[1:])]
                for name, found in bench.checked.items() for way, values in found.items()]
    print(*table([title, "format", "tokens go in", "MB", "mean KL divergence", "error of the logits, mean", "largest"],
                 *rows), "", *bench.notes, sep="\n", flush=True)


def main() -> None:
    parser = harness.options(__doc__, 1, "random weights as Qwen3-0.6B, for random tokens")
    parser.add_argument("--tokens", type=int, default=4000, help="of text for the bundled model (default: %(default)s)")
    parser.add_argument("--random-tokens", type=int, default=64, help="for the random model (default: %(default)s)")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=TABLES, help="which tables (default: all)")
    parser.add_argument("--engines", choices=NAMES, nargs="+", default=NAMES, help="which rows (default: all)")
    args = harness.parsed(parser)
    if "demo" in args.only:
        texts, demo = conversations(args.tokens), argparse.Namespace(**vars(args) | {"model": ROOT / "demo"})
        compare(demo, f"bundled model, {sum(map(len, texts))} tokens", args.engines, texts)
    ids, title = np.random.default_rng(0).integers(0, 4096, args.random_tokens).tolist(), "random 0.6B"
    if "random" in args.only:
        compare(args, f"{title}, {len(ids)} tokens", args.engines, [ids])
    if "files" in args.only:
        compare(args, f"GGUF, {title}, {len(ids)} tokens", FILES, [ids], True)


if __name__ == "__main__":
    main()
