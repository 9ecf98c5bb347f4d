"""Tokens per second of a mixture of experts, by this engine and by llama.cpp, in one run.

    python bench/moe.py                  4 layers of Qwen3-30B-A3B at full width; 15 GB of memory and of disk
    python bench/moe.py --whole          all 48 layers with 4 bits a weight; 22 GB of memory, 22 GB of disk
    python bench/moe.py --config FILE    the mixture of another config.json

Random weights. Each engine has a process of its own; rounds go over the two engines of a format in turn, after one that
warms up, and ratios are medians of each round's ratio. The tokens are all different, so they choose different experts.

With --whole, memory is too small for two engines, so they come one after the other. A product takes as long with any
numbers, so one layer is made and packed, and written under the names of all layers. Before an engine starts, the system
drops the file's pages from memory: the first tokens read their experts from the disk, unless the engine reads the whole
file while it loads. The rounds follow when all experts are in memory. --whole needs Linux. The temporary folder must be
on a disk, see TMPDIR.

The choice of experts counts. The output of attention is much alike for all tokens. With weights of equal spread it soon
outweighs the embedding, and all tokens choose the same few experts. So the embedding is made large and o_proj small;
then 512 tokens choose nearly all experts of each layer. The text goes to bench/MOE.md, too,
or to bench/MOE-WHOLE.md.
"""
import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import run  # noqa: E402
from make_random_model import make_random_model, official_config  # noqa: E402
from peers import ENTRIES, gguf_file, opened, write_gguf  # noqa: E402
from run import (alone, decode_speed, machine, new_process, note, prefill_speed, read_bandwidth, seconds,  # noqa: E402
                 start_reader)

CONFIG = official_config("8B") | {  # what Qwen3-30B-A3B has in common with it, and what it hasn't
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
PAIRS = (("bf16", "llama-bf16"), ("int8", "llama-q8_0"), ("int4", "llama-q4_0"))
PROMPT, CONTEXT, STEPS, COLD = 512, 16, 48, 64  # tokens
N_PROMPTS = 16  # prompts of CONTEXT tokens, whose first tokens are compared


def make_mixture(path: Path, config: dict[str, Any], n_layers: int) -> Path:
    """Random bf16 weights, in a file for each layer."""
    scales = {"embed_tokens": config["hidden_size"] ** 0.5, "o_proj": 0.125}
    return make_random_model(config | {"num_hidden_layers": n_layers}, path, shards=n_layers + 1, scales=scales)


def write_model(path: Path, folder: Path, name: str, copies: int) -> Path:
    """Writes what the engine `name` opens, each layer of the model in `path` so many times -> its folder."""
    if name.startswith("llama"):
        write_gguf(path, folder, name, copies)
    if name.startswith("llama") or copies == 1:
        return path
    import qwen3_numba
    from qwen3_lib.io.packed import save_quantized
    model, out = qwen3_numba.load_model(path, name), folder / name
    repeated = {part: np.repeat(getattr(model.weights, part), copies, axis=0)
                for part in ("layers", "forms", "routers", "experts", "norms", "head_norms")}  # addresses, and norms
    config = replace(model.config, num_hidden_layers=copies, sparse_layers=tuple(range(copies)))
    save_quantized(replace(model, config=config, weights=replace(model.weights, **repeated)), out, name)
    written = json.loads((path / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(written | {"num_hidden_layers": copies}))
    return out


def read_bytes(config: Any, name: str) -> float:
    """The bytes of weights that a token reads: all matrices but the embedding, and of the experts the chosen ones."""
    from qwen3 import tensor_shapes
    from qwen3_lib.kernels.layout import packed_shape
    from qwen3_lib.kernels.packing import PACKED, packed_form
    total = 0.0
    for tensor, shape in tensor_shapes(config).items():
        size = np.prod(shape) * (4 if tensor.endswith(".mlp.gate.weight")
                                 or len(shape) == 1 else ENTRIES[name].weight_bytes)
        if name in PACKED and len(shape) == 2 and not tensor.endswith(".mlp.gate.weight"):
            size = np.prod(packed_shape(*shape, packed_form(tensor, name)))
        share = config.num_experts_per_tok / config.num_experts if ".experts." in tensor else "embed" not in tensor
        total += float(size * share)
    return total


def drop_pages(folder: Path) -> None:
    """Lets the system forget what it keeps of the files in memory."""
    for file in filter(Path.is_file, folder.rglob("*")):
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ----------------------------------------------------------------------------------------------------------------------
# Inside the workers: run.engine is the one of this process
# ----------------------------------------------------------------------------------------------------------------------

def begin(ids: Sequence[int], *args: Any) -> tuple[float, float, list[int]]:
    """Opens an engine -> (seconds, tokens/s of the first COLD tokens, the most likely token after each prompt)."""
    load = seconds(lambda: run.start_engine(*args))
    speed = COLD / seconds(lambda: [run.engine.run([token]) for token in ids[:COLD]])
    first = []
    for prompt in np.reshape(ids[:N_PROMPTS * CONTEXT], (N_PROMPTS, CONTEXT)).tolist():
        run.engine.truncate(0)
        first.append(int(run.engine.run(prompt)[0].argmax()))
    return load, speed, first


# ----------------------------------------------------------------------------------------------------------------------
# Measuring and writing it down
# ----------------------------------------------------------------------------------------------------------------------

class Bench:
    """`values` maps (engine, "prefill" or "decode" or "bandwidth") to one value a round; `began`: see begin()."""

    def __init__(self, about: dict[str, Any], folder: Path, args: argparse.Namespace):
        self.about, self.folder, self.threads, self.whole = about, folder, args.threads, args.whole
        self.rounds, self.n_layers = args.rounds, about["num_hidden_layers"] if args.whole else args.layers
        self.plain = args.no_repack
        self.ids = np.random.default_rng(0).permutation(about["vocab_size"])[:PROMPT].tolist()
        self.values: dict[tuple[str, str], list[float]] = {}
        self.began: dict[str, tuple[float, float, list[int]]] = {}
        self.memory: dict[str, int] = {}
        self.paths: dict[str, Path] = {}  # what an engine opens
        self.notes = [f"The machine's load average before the run: {os.getloadavg()[0]:.1f}."]
        self.notes += ["llama.cpp runs without repacked weights (--no-repack)."] if args.no_repack else []

    def disk_space(self) -> float:
        """Bytes of files: the model and a copy for llama.cpp; or of the whole, one layer and one file with 4 bits."""
        layer = 3.2 * self.about["hidden_size"] * self.about["moe_intermediate_size"] * self.about["num_experts"]
        ends = 2 * self.about["hidden_size"] * self.about["vocab_size"]
        return (2 + 0.6 * self.n_layers) * layer + 2.7 * ends if self.whole else 4 * (self.n_layers * layer + ends)

    def run(self) -> None:
        """All engines; together in memory are the two of a format, or with --whole one."""
        note("random weights")
        path = alone(make_mixture, self.folder / "model", self.about, 1 if self.whole else self.n_layers)
        with new_process(start_reader, self.threads) as reader:
            for group in [PAIRS[-1][:1], PAIRS[-1][1:]] if self.whole else PAIRS:
                workers = {name: worker for name in group
                           if (worker := opened(name, partial(self.start, name, path), self.notes))}
                self.measure(workers, reader)
                for name, worker in workers.items():
                    usage = worker.submit(resource.getrusage, resource.RUSAGE_SELF).result()
                    self.memory[name] = usage.ru_maxrss * 1024
                    worker.shutdown()
                for name in group:
                    gguf_file(self.folder, name).unlink(missing_ok=True)
                    shutil.rmtree(self.folder / name, ignore_errors=True)

    def start(self, name: str, path: Path, repack: bool) -> ProcessPoolExecutor:
        """A process with this engine, which has answered."""
        note(f"{name}: writing and loading")
        if repack or not gguf_file(self.folder, name).exists():
            self.paths[name] = alone(write_model, path, self.folder, name, self.n_layers if self.whole else 1)
        if self.whole:
            drop_pages(self.folder)
        worker = new_process()
        try:
            self.began[name] = worker.submit(begin, self.ids, name, self.paths[name], self.folder, self.threads,
                                             PROMPT + COLD, repack and not self.plain).result()
        except RuntimeError:
            worker.shutdown()
            raise
        return worker

    def measure(self, workers: dict[str, ProcessPoolExecutor], reader: ProcessPoolExecutor) -> None:
        """All rounds over these engines. The first one warms up, and reads all experts into memory."""
        for i in range(self.rounds + 1):
            note(f"{', '.join(workers)}: round {i} of {self.rounds}")
            for name, worker in workers.items():
                measured = {"prefill": worker.submit(prefill_speed, self.ids).result(),
                            "bandwidth": reader.submit(read_bandwidth).result(),
                            "decode": worker.submit(decode_speed, CONTEXT, self.ids[-STEPS:]).result()}
                for what, value in measured.items() if i > 0 else ():
                    self.values.setdefault((name, what), []).append(value)

    def ratio(self, name: str, what: str, peer: str, other: str) -> float:
        """Median over the rounds of one value / another."""
        return median(a / b for a, b in zip(self.values[name, what], self.values[peer, other]))

    def row(self, name: str, config: Any) -> list[str]:
        """The cells of an engine in the table."""
        read, (load, cold, first) = read_bytes(config, name), self.began[name]
        same = sum(a == b for a, b in zip(first, next(iter(self.began.values()))[2]))
        cells = [ENTRIES[name].engine, ENTRIES[name].format, f"{read / 1e9:.2f}",
                 f"{median(self.values[name, 'decode']):.2f}", f"{median(self.values[name, 'prefill']):.1f}",
                 f"{self.ratio(name, 'decode', name, 'bandwidth') * read:.2f}"]
        return cells + ([f"{load:.1f}", f"{cold:.2f}", f"{self.memory[name] / 1e9:.1f}"] if self.whole else
                        [f"{same} of {N_PROMPTS}"])

    def report(self) -> str:
        from qwen3_lib.io.models import open_model
        config = replace(open_model(str(self.folder / "model")).config(), num_hidden_layers=self.n_layers,
                         sparse_layers=tuple(range(self.n_layers)))
        titles = ["engine", "format", "read per token, GB", f"decode at {CONTEXT}, tokens/s",
                  f"prefill {PROMPT}, tokens/s", "decode: of the bandwidth"]
        titles += ["seconds to load", f"first {COLD} tokens, from the disk, tokens/s", "peak memory, GB"] \
            if self.whole else ["first tokens as the first engine"]
        experts = f"{config.num_experts} experts, {config.num_experts_per_tok} of them for a token"
        lines = [machine(self.threads), "",
                 f"{self.n_layers} layers of width {config.hidden_size}, each with {experts}:", ""]
        lines += [f"| {' | '.join(cells)} |" for cells in
                  (titles, ["---"] * len(titles), *(self.row(name, config) for name in self.memory))]
        lines += ["", "| this engine / llama.cpp | decode | prefill |", "| --- | --- | --- |"]
        lines += [f"| {a} | {self.ratio(a, 'decode', b, 'decode'):.2f} | {self.ratio(a, 'prefill', b, 'prefill'):.2f} |"
                  for a, b in PAIRS if {a, b} <= self.memory.keys()]
        return "\n".join([*lines, "", *(f"- {line}" for line in self.notes)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="config.json of another mixture")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--whole", action="store_true", help="all layers, in int4 and Q4_0")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp with its weights in the order of the file, "
                        "which with --whole takes half the memory; else only if it crashes with repacked ones")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder for the text")
    args = parser.parse_args()
    about = json.loads(args.config.read_text()) if args.config else CONFIG
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # for the processes to come
        os.environ[variable] = str(args.threads)
    if args.whole and sys.platform != "linux":
        parser.error("--whole needs Linux")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(about, Path(folder), args)
        if (free := shutil.disk_usage(folder).free / 1e9) < (needed := bench.disk_space() / 1e9):
            parser.error(f"{folder} has {free:.0f} GB of free disk space; {needed:.0f} GB are needed: see TMPDIR")
        bench.run()
        text = f"# The latest run of bench/moe.py{' --whole' if args.whole else ''}\n\n{bench.report()}"
    print(text)
    (args.out / ("MOE-WHOLE.md" if args.whole else "MOE.md")).write_text(text)


if __name__ == "__main__":
    main()
