"""Texts per second of qwen3_embed.py, beside llama.cpp's embedding mode and transformers with torch, all in one run.

    python bench/embed.py                        everything that is installed; about 30 minutes, 10 GB of memory

Random weights in the exact shape of Qwen3-Embedding-0.6B. Inputs are token ids, so that no tokenizer is measured. torch
gets batches of 8 texts, in the order in which they come, padded on the left. llama.cpp gets as many texts at a time as
fit into 2,048 tokens. The text goes to bench/EMBED.md.
"""
import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import harness
from harness import Bench, engines_table, seconds, table
from peers import LlamaEngine, peer_file, torch_model

ENGINES = ("bf16", "llama-bf16", "int8", "llama-q8_0", "numpy", "torch")
RATIOS = [("bf16", "llama-bf16"), ("bf16", "torch"), ("int8", "llama-q8_0"), ("int8", "torch")]
COUNTS = {"16": 32, "128": 16, "512": 8, "mixed": 32}  # lengths of the texts -> how many texts
MIXED = (8, 512)  # lengths, evenly spread on a logarithmic scale
BATCH, LLAMA_TOKENS = 8, 2048


# ---- The engines: token ids of texts in, a row of numbers for each out -----------------------------------------------

class OurEngine:
    def __init__(self, path: Path, name: str, threads: int):
        import qwen3
        import qwen3_numba
        self.model = qwen3.load_model(path) if name == "numpy" else \
            qwen3_numba.load_model(path, None if name == "bf16" else name, threads)

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        from qwen3_embed import pooled_states
        return np.array(pooled_states(self.model, [], texts, [], False, 0, self.model.config.context_length,
                                      lambda states, ids: states[-1]))


class TorchEmbedder:
    def __init__(self, path: Path, threads: int):
        self.tensor, self.model = torch_model(path, threads, "AutoModel")

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        rows = []
        for batch in (texts[start:start + BATCH] for start in range(0, len(texts), BATCH)):
            padding = [[0] * (max(map(len, batch)) - len(text)) for text in batch]
            ids = self.tensor([before + text for before, text in zip(padding, batch)])
            mask = self.tensor([before + [1] * len(text) for before, text in zip(padding, batch)])
            states = self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            rows.append(states[:, -1].numpy())
        return np.concatenate(rows)


class LlamaEmbedder(LlamaEngine):
    """Embeddings of the last token, which llama.cpp pools itself."""

    def __init__(self, gguf: Path, threads: int, repack: bool):
        from llama_cpp import LLAMA_POOLING_TYPE_LAST
        super().__init__(gguf, threads, LLAMA_TOKENS, repack=repack, n_batch=LLAMA_TOKENS, n_ubatch=LLAMA_TOKENS,
                         n_seq_max=max(COUNTS.values()), kv_unified=True, embeddings=True, flash_attn_type=-1,
                         pooling_type=LLAMA_POOLING_TYPE_LAST)
        self.size = self.api.llama_model_n_embd(self.model)

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        rows: list[np.ndarray] = []
        while len(rows) < len(texts):
            left = texts[len(rows):]
            n = int(np.searchsorted(np.cumsum([*map(len, left)]), LLAMA_TOKENS, "right"))
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
            self.decode(left[:n], 0, every=True)
            vectors = (ctypes.cast(self.api.llama_get_embeddings_seq(self.context, row), ctypes.POINTER(ctypes.c_float))
                       for row in range(n))
            rows += [np.array(np.ctypeslib.as_array(vector, (self.size,))) for vector in vectors]
        return np.array(rows)


def start_embedder(name: str, path: Path, folder: Path, threads: int, repack: bool) -> Any:
    if name.startswith("llama"):
        return LlamaEmbedder(peer_file(path, folder, name), threads, repack)
    return TorchEmbedder(path, threads) if name == "torch" else OurEngine(path, name, threads)


def speed(engine: Any, texts: list[list[int]]) -> float:
    return len(texts) / seconds(lambda: engine.embed(texts))


def vectors(engine: Any, texts: list[list[int]]) -> np.ndarray:
    """Of length 1."""
    rows = engine.embed(texts)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def inputs(vocab_size: int) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng(0)
    lengths = {name: rng.permutation(np.geomspace(*MIXED, n).astype(int)) if name == "mixed" else [int(name)] * n
               for name, n in COUNTS.items()}
    return {name: [rng.integers(0, vocab_size, n).tolist() for n in some] for name, some in lengths.items()}


def main() -> None:
    make = partial(harness.random_model, vocab_size=151669, max_position_embeddings=32768)
    with Bench(harness.parsed(harness.options(__doc__)), make) as bench:
        texts = inputs(bench.config.vocab_size)
        for name in ENGINES:
            bench.open(name, start_embedder, check=partial(vectors, texts=texts["mixed"]))
        for kind, some in texts.items():
            bench.each(kind, speed, some)
        theirs = bench.checked.get("torch", np.nan)
        bench.publish(
            "EMBED.md", f"{bench.config.num_hidden_layers} layers, hidden_size {bench.config.hidden_size}. Texts per "
            "second, medians of the rounds; the smallest cosine of the mixed texts.", "",
            *engines_table([*(f"{kind} tokens" for kind in COUNTS), "cosine to torch"], {name: [
                *(f"{bench.median(name, kind):.2f}" for kind in COUNTS), f"{(ours * theirs).sum(axis=1).min():.6f}"]
                for name, ours in bench.checked.items()}), "",
            *table(["ratio, median of the rounds", *COUNTS], *(
                [f"{a} / {b}", *(f"{bench.ratio(a, b, kind):.2f}" for kind in COUNTS)] for a, b in RATIOS)))


if __name__ == "__main__":
    main()
