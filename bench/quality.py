"""What bf16, int8 and int4 cost in quality, next to llama.cpp's formats on the same weights and text.

    python bench/quality.py                 (15 minutes on two cores, an estimate; 5 GB of memory)
    python bench/quality.py --only files    one of the tables: demo, random, files, answers

The reference is qwen3.py in float32. Printed are the mean Kullback-Leibler divergence of the next token's distribution
from the reference's, the relative error of the logits, and for the bundled model the share of demo/train/evaluate.py's
prompts that get the same greedy answer, token by token. For GGUF files that llama.cpp has quantized, the reference has
the file's own numbers, so only the fast engine's rounding counts. The text for the bundled model are conversations of
demo/train/corpus.py (needs `pip install -e ".[train]"`); the random model in the shape of Qwen3-0.6B gets random
tokens.
"""
import argparse
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "demo/train"), str(ROOT / "bench")]

import corpus  # noqa: E402
import evaluate  # noqa: E402
import qwen3  # noqa: E402
from qwen3_lib.generation.processors import log_softmax  # noqa: E402
from qwen3_lib.io.models import open_model  # noqa: E402
from make_random_model import make_random_model, official_config  # noqa: E402
from peers import ENTRIES, gguf_file, missing_packages, open_engine  # noqa: E402
from run import alone, write_once  # noqa: E402

NAMES = [name for name, entry in ENTRIES.items() if name not in ("numpy", "torch") and not entry.file]
FILES = ("llama-q8_0", "llama-q4_k_m", "llama-q5_k_m", "llama-q6_k", "llama-iq4_xs")  # whose formats are compared
LONGEST = 1024  # tokens of a text
STEPS = {"together": LONGEST, "one by one": 1}  # how the tokens of a text go in: by the kernels of prefill, of decoding
TABLES = ("demo", "random", "files", "answers")
MAX_TOKENS = 256  # of an answer, as in demo/train/evaluate.py


def conversations(tokens: int) -> list[list[int]]:
    """Token ids of conversations, in all at least this number of tokens."""
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
    pairs = ([log_softmax(x.astype(np.float64)) for x in pair] for pair in zip(reference, logits))
    return [float(np.exp(log_p) @ (log_p - log_q)) for log_p, log_q in pairs]


def relative_errors(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """|logits - reference| / |reference| of each position [n], as lengths of vectors."""
    return np.linalg.norm(logits - reference, axis=1) / np.linalg.norm(reference, axis=1)


def all_logits(engine: Any, texts: Sequence[Sequence[int]], step: int) -> Iterator[np.ndarray]:
    """The logits [n, vocab_size] of each text, `step` tokens at a time."""
    for ids in texts:
        engine.truncate(0)
        yield np.concatenate([engine.run(ids[i:i + step], True).copy() for i in range(0, len(ids), step)])


def save_reference(path: Path, folder: Path, texts: Sequence[Sequence[int]]) -> None:
    for i, logits in enumerate(all_logits(open_engine("numpy", path, folder, 0, LONGEST), texts, LONGEST)):
        np.save(folder / f"{i}.npy", logits)


def errors(name: str, path: Path, folder: Path, threads: int,
           texts: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """For each of STEPS [MB of weights, mean KL divergence, mean error of the logits, largest]: from the reference."""
    engine, results = open_engine(name, path, folder, threads, LONGEST, repack=False), {}
    for way, step in STEPS.items():
        divergences, relative = [], []
        for i, logits in enumerate(all_logits(engine, texts, step)):
            reference = np.load(folder / f"{i}.npy")
            divergences.append(kl_divergences(reference, logits))
            relative.append(relative_errors(reference, logits))
        of_all = np.concatenate(relative)
        results[way] = [engine.weight_bytes / 1e6, float(np.concatenate(divergences).mean()), float(of_all.mean()),
                        float(of_all.max())]
    return results


def compare(path: Path, folder: Path, threads: int, texts: Sequence[Sequence[int]]) -> dict[str, dict]:
    """Name -> `errors` of each engine that is installed and doesn't crash; each has a process of its own."""
    alone(save_reference, path, folder, texts)
    results = {}
    for name in tqdm([name for name in NAMES if not missing_packages(name)], "logits", leave=False, disable=None):
        try:
            write_once(path, folder, name)
            results[name] = alone(errors, name, path, folder, threads, texts)
        except RuntimeError as error:  # its own, or that of a process that is gone
            print(f"{name} is left out: {error}", file=sys.stderr)
    return results


def compare_files(path: Path, folder: Path, threads: int, texts: Sequence[Sequence[int]]) -> dict[str, dict]:
    """Name -> `errors` of the fast engine with the file of this entry, against the same file in float32."""
    results = {}
    for name in tqdm([name for name in FILES if not missing_packages(name)], "files", leave=False, disable=None):
        write_once(path, folder, name)
        alone(save_reference, gguf_file(folder, name), folder, texts)
        results[name] = alone(errors, "bf16", gguf_file(folder, name), folder, threads, texts)
    return results


def print_comparison(title: str, results: dict[str, dict], engine: str = "") -> None:
    print(f"| {title} | format | tokens go in | MB | mean KL divergence | error of the logits, mean | largest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, ways in results.items():
        for way, values in ways.items():
            cells = [engine or ENTRIES[name].engine, ENTRIES[name].format, way, f"{values[0]:.1f}",
                     *(f"{value:.2e}" for value in values[1:])]
            print(f"| {' | '.join(cells)} |")
    print(flush=True)


def demo_prompts(cases: int) -> list[list[int]]:
    """The first prompts of demo/train/evaluate.py's cases, so many of each skill (twice as many of the main ones)."""
    tokenizer, prompts = qwen3.load_tokenizer(ROOT / "demo"), []
    for name, (draw, factor) in evaluate.SKILLS.items():
        rng = random.Random(f"1 {name}")
        for case in (draw(rng, evaluate.HELD_OUT_FAMILY) for _ in range(factor * cases)):
            text = tokenizer.apply_chat_template(case.messages, case.tools, enable_thinking=case.enable_thinking)
            prompts.append(tokenizer.encode(text))
    return prompts


def greedy(model: qwen3.Model, prompts: Iterable[list[int]]) -> list[list[int]]:
    return [list(qwen3.generate(model, prompt, MAX_TOKENS, temperature=0))
            for prompt in tqdm(prompts, "greedy answers", leave=False, disable=None)]


def print_greedy(threads: int, cases: int) -> None:
    """How many greedy answers of the bundled model are those of float32."""
    import qwen3_numba
    prompts = demo_prompts(cases)
    wanted = greedy(qwen3.load_model(ROOT / "demo"), prompts)
    print("| the bundled model's greedy answers | the same ids as in float32 | of | share |")
    print("| --- | --- | --- | --- |")
    for form in (None, "int8", "int4"):
        answers = greedy(qwen3_numba.load_model(ROOT / "demo", quantize=form, threads=threads), prompts)
        same = sum(answer == expected for answer, expected in zip(answers, wanted))
        print(f"| {form or 'bf16'} | {same} | {len(prompts)} | {same / len(prompts):.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model for random tokens (default: random weights as Qwen3-0.6B)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4000, help="of text for the bundled model (default 4000)")
    parser.add_argument("--random-tokens", type=int, default=64, help="for the random model (default 64)")
    parser.add_argument("--cases", type=int, default=25, help="per skill, doubled for the main skills (default 25)")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=TABLES, help="which tables (default: all)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "demo" in args.only:
            (folder / "demo").mkdir()
            texts = conversations(args.tokens)
            print_comparison(f"bundled model, {sum(map(len, texts))} tokens",
                             compare(ROOT / "demo", folder / "demo", args.threads, texts))
        if {"random", "files"} & {*args.only}:
            path = args.model or make_random_model(official_config("0.6B"), folder / "model")
            size = open_model(str(path)).config().vocab_size
            ids = np.random.default_rng(0).integers(0, size, args.random_tokens).tolist()
            title = f"random 0.6B, {len(ids)} tokens"
        if "random" in args.only:
            print_comparison(title, compare(path, folder, args.threads, [ids]))
        if "files" in args.only:
            print_comparison(f"GGUF, {title}", compare_files(path, folder, args.threads, [ids]), "this engine")
    if "answers" in args.only:
        print_greedy(args.threads, args.cases)


if __name__ == "__main__":
    main()
