"""Texts per second of qwen3_embed.py, beside llama.cpp's embedding mode and transformers with torch, all in one run.

    python bench/embed.py                        everything that is installed; about 30 minutes, 10 GB of memory
    python bench/embed.py --model FOLDER         with other weights

Random weights in the exact shape of Qwen3-Embedding-0.6B. Each engine has a process of its own; rounds go over all
engines in turn, and ratios are medians of each round's ratio. Inputs are token ids, so that no tokenizer is measured.
torch gets batches of 8 texts, in the order in which they come, padded on the left. llama.cpp gets as many texts at a
time as fit into 2,048 tokens. The text goes to bench/EMBED.md, too.
"""
import argparse
import ctypes
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from peers import ENTRIES, gguf_file, opened  # noqa: E402
from run import machine, new_process, note, seconds, write_once  # noqa: E402

ENGINES = ("bf16", "llama-bf16", "int8", "llama-q8_0", "numpy", "torch")
COUNTS = {"16": 32, "128": 16, "512": 8, "mixed": 32}  # lengths of the texts -> how many texts
MIXED = (8, 512)  # lengths, evenly spread on a logarithmic scale
BATCH, LLAMA_TOKENS = 8, 2048
# What is to be reached: (engine, peer, at equal lengths, at mixed lengths).
GOALS = [("bf16", "llama-bf16", 1.6, 1.6), ("bf16", "torch", 1.0, 1.5),
         ("int8", "llama-q8_0", 3.0, 3.0), ("int8", "torch", 2.0, 2.0)]


# ----------------------------------------------------------------------------------------------------------------------
# The engines: token ids of texts in, a row of numbers for each out
# ----------------------------------------------------------------------------------------------------------------------

class OurEngine:
    def __init__(self, path: Path, name: str, threads: int):
        if name == "numpy":
            import qwen3
            self.model = qwen3.load_model(path)
        else:
            import qwen3_numba
            self.model = qwen3_numba.load_model(path, None if name == "bf16" else name, threads)

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        from qwen3_embed import pooled_states
        return np.array(pooled_states(self.model, [], texts, [], False, 0, self.model.config.context_length,
                                      lambda states, ids: states[-1]))


class TorchEngine:
    def __init__(self, path: Path, threads: int):
        import torch
        import transformers
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        rows = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start:start + BATCH]
            longest = max(map(len, batch))
            ids = self.torch.tensor([[0] * (longest - len(text)) + text for text in batch])
            mask = self.torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in batch])
            states = self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            rows.append(states[:, -1].numpy())
        return np.concatenate(rows)


class LlamaEngine:
    """llama.cpp by its C functions: embeddings of the last token, which it pools itself."""

    def __init__(self, gguf: Path, threads: int, repack: bool):
        import llama_cpp
        self.api = api = llama_cpp
        self.quiet = api.llama_log_callback(lambda level, text, data: None)  # lives as long as it may be called
        api.llama_log_set(self.quiet, None)
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self.model = api.llama_model_load_from_file(str(gguf).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {gguf}")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = LLAMA_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = max(COUNTS.values()), True
        params.embeddings, params.pooling_type = True, api.LLAMA_POOLING_TYPE_LAST
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp can't make a context for embeddings")
        self.size = api.llama_model_n_embd(self.model)

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        rows: list[np.ndarray] = []
        while len(rows) < len(texts):
            together: list[list[int]] = []
            for text in texts[len(rows):]:
                if sum(map(len, together)) + len(text) > LLAMA_TOKENS:
                    break
                together.append(text)
            rows += self.embed_together(together)
        return np.array(rows)

    def embed_together(self, texts: list[list[int]]) -> list[np.ndarray]:
        api, n = self.api, sum(map(len, texts))
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        batch = api.llama_batch_init(n, 0, 1)
        batch.n_tokens, at = n, 0
        for row, text in enumerate(texts):
            for position, token in enumerate(text):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
                batch.seq_id[at][0], batch.logits[at] = row, True
                at += 1
        status = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        vectors = [ctypes.cast(api.llama_get_embeddings_seq(self.context, row), ctypes.POINTER(ctypes.c_float))
                   for row in range(len(texts))]
        return [np.array(np.ctypeslib.as_array(vector, (self.size,))) for vector in vectors]


def start_engine(name: str, path: Path, folder: Path, threads: int, repack: bool) -> None:
    """Makes the engine of this process."""
    global engine
    if name == "torch":
        engine = TorchEngine(path, threads)
    else:
        engine = LlamaEngine(gguf_file(folder, name), threads, repack) if name.startswith("llama") else \
            OurEngine(path, name, threads)


def speed(texts: list[list[int]]) -> float:
    return len(texts) / seconds(lambda: engine.embed(texts))


def vectors(texts: list[list[int]]) -> np.ndarray:
    """Of length 1."""
    rows = engine.embed(texts)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# ----------------------------------------------------------------------------------------------------------------------
# Measuring and writing it down
# ----------------------------------------------------------------------------------------------------------------------

def inputs(vocab_size: int) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng(0)
    lengths = {name: rng.permutation(np.geomspace(*MIXED, n).astype(int)) if name == "mixed" else [int(name)] * n
               for name, n in COUNTS.items()}
    return {name: [rng.integers(0, vocab_size, n).tolist() for n in some] for name, some in lengths.items()}


def prepared(path: Path, folder: Path, threads: int, notes: list[str]) -> dict[str, ProcessPoolExecutor]:
    """A process for each engine that is installed and that loads the model."""
    def start(name: str, repack: bool) -> ProcessPoolExecutor:
        write_once(path, folder, name)
        worker = new_process(start_engine, name, path, folder, threads, repack)
        worker.submit(vectors, [[1, 2, 3]] * 8).result()  # compiles, and shows that it works at all
        return worker

    workers = {}
    for name in ENGINES:
        note(f"{name}: loading")
        if worker := opened(name, partial(start, name), notes):
            workers[name] = worker
    return workers


def report(values: dict[tuple[str, str], list[float]], cosines: dict[str, float], notes: list[str], about: str) -> str:
    names = [name for name in ENGINES if any(key[0] == name for key in values)]
    lines = [about, "", f"| engine | format | {' | '.join(f'{kind} tokens' for kind in COUNTS)} | cosine to torch |",
             "| --- " * (len(COUNTS) + 3) + "|"]
    for name in names:
        speeds = [f"{median(values[name, kind]):.2f}" for kind in COUNTS]
        cosine = f"{cosines[name]:.6f}" if name in cosines else "–"
        lines.append(f"| {ENTRIES[name].engine} | {ENTRIES[name].format} | {' | '.join(speeds)} | {cosine} |")
    lines += ["", "Texts per second, medians of the rounds. The cosine is the smallest of the mixed texts.", "",
              "| ratio, median of the rounds | " + " | ".join(COUNTS) + " | wanted |",
              "| --- " * (len(COUNTS) + 2) + "|"]
    for name, peer, equal, mixed in GOALS:
        if {name, peer} <= {*names}:
            ratios = [median(a / b for a, b in zip(values[name, kind], values[peer, kind])) for kind in COUNTS]
            marks = [f"{ratio:.2f}{'' if ratio >= (mixed if kind == 'mixed' else equal) else ' (less)'}"
                     for kind, ratio in zip(COUNTS, ratios)]
            lines.append(f"| {name} / {peer} | {' | '.join(marks)} | {equal}, mixed {mixed} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in notes)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (default: random weights, made for the run)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder for EMBED.md")
    args = parser.parse_args()
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # for the processes to come
        os.environ[variable] = str(args.threads)
    from qwen3_lib.io.models import Checkpoint
    from make_random_model import make_random_model, official_config
    values: dict[tuple[str, str], list[float]] = {}
    notes = [f"the machine's load average before the run: {os.getloadavg()[0]:.1f}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = official_config("0.6B") | {"vocab_size": 151669, "max_position_embeddings": 32768}
        path = args.model or make_random_model(shape, folder / "model")
        config = Checkpoint(path).config()
        texts = inputs(config.vocab_size)
        workers = prepared(path, folder, args.threads, notes)
        found: dict[str, Any] = {name: worker.submit(vectors, texts["mixed"]).result()
                                 for name, worker in workers.items()}
        cosines = {name: float((rows * found["torch"]).sum(axis=1).min()) for name, rows in found.items()
                   if "torch" in found}
        for i in range(args.rounds + 1):
            for kind, some in texts.items():
                note(f"{kind} tokens: round {i} of {args.rounds}")
                for name, worker in workers.items():
                    measured = worker.submit(speed, some).result()
                    if i > 0:  # the first round warms up
                        values.setdefault((name, kind), []).append(measured)
        for worker in workers.values():
            worker.shutdown()
    about = f"{machine(args.threads)}; {config.num_hidden_layers} layers, hidden_size {config.hidden_size}"
    text = "# The latest run of bench/embed.py\n\n" + report(values, cosines, notes, about)
    print(text)
    (args.out / "EMBED.md").write_text(text)


if __name__ == "__main__":
    main()
