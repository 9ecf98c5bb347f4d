"""A mixture larger than the memory: tokens/s while its experts come from the disk."""
from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any

import numpy as np

from harness import Bench, alone, note, table
from peers import LlamaEngine, NumbaEngine

EXPERTS, SOME = 256, 8  # of a layer; so many are different, the others are copies, which take as long to read
HOT, CHOICES = 0.3, 0.8  # with a skewed router, this share of the experts gets this share of the choices
BLOCK, DEPTH = 1 << 21, 8  # how the disk's own speed is measured: about an expert, as many as a token chooses
NAMES = {"int4": "model/model.int4.safetensors", "llama-q4_0": "llama-q4_0.gguf"}


def large(bench: Bench, layers: int = 6, tokens: int = 32, prompt: int = 256,
          memory: Sequence[float] = (0.25, 0.5, 0.75)) -> list[str]:
    """Each row is a process of its own in a group with so much memory, a share of the file; the file's pages are
    dropped before. With random weights, all experts are chosen alike, which is the worst case: no cache can have more
    hits than its share of the experts. The skewed router is nearer to trained ones.
    """
    folder, peers = bench.temporary, find_spec("llama_cpp") is not None and find_spec("gguf") is not None
    alone(write_models, folder, layers, peers)
    found: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    names = bench.names([*NAMES] if peers else ["int4"])
    if not peers:
        bench.notes.append("llama-q4_0 is left out: llama_cpp or gguf not installed")
    for router in ("random", "skewed"):
        if router == "skewed":
            skew(folder)
        for share in memory if router == "random" else (0.5,):
            for name in names * bench.args.rounds:
                note(f"{name}, {router} router, {share:.0%}")
                size = os.path.getsize(folder / NAMES[name])
                for file in NAMES.values():
                    drop(folder / file)
                with contextlib.closing(Group(int(size * share))) as group:
                    disk = disk_speed(folder / NAMES[name])
                    some = (tokens, prompt) if name == "int4" else (max(tokens // 4, 1), 0)
                    values = alone(run_in, group.path, name, folder, bench.args.threads, *some)
                found.setdefault((router, name, share), []).append(values | {"disk": disk})
    rows = [[router, "this engine" if name == "int4" else "llama.cpp", f"{share:.0%}",
             *(f"{of(runs, key) / unit:.{digits}f}" for key, unit, digits in COLUMNS),
             *(f"{float(np.median([run.get(key, float('nan')) / run['disk'] for run in runs])):.2f}"
               for key in ("decoding", "prompting"))]
            for (router, name, share), runs in found.items()]
    size = os.path.getsize(folder / NAMES["int4"])
    return [f"{layers} layers of Qwen3.6-35B-A3B, {size / 1e9:.1f} GB in int4; memory is that of the process, with its "
            "files' pages:", "",
            *table(["router", "engine", "memory / file", "decode, tokens/s", "read per token, MB", "prefill, tokens/s",
                    "decode after it", "disk, MB/s", "decode: of the disk", "prefill: of the disk"], *rows)]


COLUMNS = ("decode", 1, 2), ("read", 1e6, 1), ("prefill", 1, 1), ("after", 1, 2), ("disk", 1e6, 0)


def of(runs: list[dict[str, float]], key: str) -> float:
    """The median of a value that the runs have."""
    return float(np.median([run.get(key, float("nan")) for run in runs]))


def drop(file: Path) -> None:
    """Drops a file's pages from the page cache."""
    if file.exists():
        with open(file) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_models(folder: Path, layers: int, peers: bool) -> None:
    """Layers of Qwen3.6-35B-A3B in int4, and the same in Q4_0 for llama.cpp, with a vocabulary cut like the layers.

    Few experts are made and packed, then copied: so neither the disk nor the memory has to hold the bf16 weights.
    """
    from configs import HYBRID_MOE
    from make_random_model import make_random_model
    import qwen3_numba
    import qwen3_lib.io.packed as packed
    about = HYBRID_MOE | {
        "head_dim": 256, "hidden_size": 2048, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_attention_heads": 16, "num_experts": SOME,
        "num_experts_per_tok": 8, "num_key_value_heads": 2, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": layers, "vocab_size": 32768,
        "rope_parameters": HYBRID_MOE["rope_parameters"] | {"mrope_section": [11, 11, 10]}}
    few, model = folder / "few", folder / "model"
    make_random_model(about, few, scales={"embed_tokens": 45, "o_proj": 0.125, "out_proj": 0.125})  # as in moe_model
    packed.save_quantized(qwen3_numba.load_model(few, "int4", tokenizer=False), folder / "packed", "int4")
    model.mkdir()
    for file in (folder / "packed").glob("*.json*"):
        shutil.copy(file, model)
    (model / "config.json").write_text(json.dumps(about | {"num_experts": EXPERTS}))
    stored, saved = packed.saved_tensors("int4", folder / "packed/model.int4.safetensors")
    tensors, rng = dict[str, np.ndarray](), np.random.default_rng(1)
    routers = [rng.standard_normal((EXPERTS, 2048), np.float32) / np.float32(45) for _ in range(layers)]
    for name, tensor in stored.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        if name.endswith(".mlp.gate.weight"):
            tensors[name] = np.concatenate([routers[layer], tensor.data[-1:]])  # last the gate of the shared expert
            saved.sizes[name] = [EXPERTS + 1, 2048]
        elif ".experts." not in name:
            tensors[name] = tensor.data
        elif ".experts.0.gate_proj" in name:  # an expert's three matrices together, as save_quantized writes them
            for e in range(EXPERTS):
                for kind in ("gate", "up", "down"):
                    this = name.replace(".0.gate_", f".{e}.{kind}_")
                    source = name.replace(".0.gate_", f".{e % SOME}.{kind}_")
                    tensors[this], saved.sizes[this] = stored[source].data, saved.sizes[source]
    packed.write_safetensors(folder / NAMES["int4"], tensors, {
        "format": "int4", "version": packed.VERSION, "sizes": json.dumps(saved.sizes)})
    if peers:
        write_gguf(few, folder / NAMES["llama-q4_0"], routers)
    shutil.rmtree(few), shutil.rmtree(folder / "packed")


def write_gguf(few: Path, target: Path, routers: list[np.ndarray]) -> None:
    import gguf
    from peers import write_gguf as write
    write(few, small := target.with_suffix(".few"), "llama-q4_0", False)
    reader = gguf.GGUFReader(small)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = EXPERTS if name == f"{arch}.expert_count" else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)

    def whole(tensor: Any) -> np.ndarray:
        if "ffn_gate_inp.weight" in tensor.name:
            return routers[int(tensor.name.split(".")[1])]
        return np.tile(tensor.data, (EXPERTS // SOME, 1, 1)) if "_exps." in tensor.name else tensor.data

    for tensor in reader.tensors:
        data = whole(tensor)
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(whole(tensor))
    writer.close()
    del reader
    small.unlink()


def skew(folder: Path) -> None:
    """Makes a share HOT of the experts get a share CHOICES of the choices: the rows of their routers become longer."""
    hot = np.arange(EXPERTS) < HOT * EXPERTS
    logits, low, high = np.random.default_rng(2).standard_normal((2000, EXPERTS)), 1.0, 4.0
    for _ in range(20):
        factor = (low + high) / 2
        top = np.argsort(logits * np.where(hot, factor, 1))[:, -8:]
        low, high = (factor, high) if hot[top].mean() < CHOICES else (low, factor)
    for start, file in routers_in(folder):
        rows = np.memmap(file, "<f4", "r+", start, (EXPERTS, 2048))
        rows[hot] *= np.float32(factor)
        rows.flush()


def routers_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """(the first byte, the file) of each router."""
    file = folder / NAMES["int4"]
    start = 8 + int.from_bytes(file.open("rb").read(8), "little")
    for name, about in json.loads(file.open("rb").read(start)[8:]).items():
        if name.endswith(".mlp.gate.weight"):
            yield start + about["data_offsets"][0], file
    if (file := folder / NAMES["llama-q4_0"]).exists():
        import gguf
        yield from [(tensor.data_offset, file) for tensor in gguf.GGUFReader(file).tensors
                    if tensor.name.endswith("ffn_gate_inp.weight")]


class Group:
    """A group of processes with so much memory, their files' pages among it."""

    def __init__(self, n_bytes: int):
        first = Path("/sys/fs/cgroup/memory")
        root, limit = (first, "memory.limit_in_bytes") if first.exists() else (first.parent, "memory.max")
        self.path = root / f"qwen3-bench-{os.getpid()}"
        self.path.mkdir()
        (self.path / limit).write_text(str(n_bytes))

    def close(self) -> None:
        for _ in range(50):
            with contextlib.suppress(OSError):  # its processes haven't gone yet
                return self.path.rmdir()
            time.sleep(0.1)


def disk_speed(file: Path, length: float = 1.5) -> float:
    """Bytes per second of DEPTH threads that read blocks at random places of a file, past the page cache, into large
    pages, as the engine's slots are: small ones take more than half of the speed."""
    blocks, end, handle = os.path.getsize(file) // BLOCK, time.perf_counter() + length, os.open(file, os.O_DIRECT)

    def read(seed: int) -> int:
        rng, memory, n = random.Random(seed), mmap(-1, 3 * BLOCK, MAP_PRIVATE | MAP_ANONYMOUS), 0
        memory.madvise(MADV_HUGEPAGE)
        while time.perf_counter() < end:
            n += os.preadv(handle, [memoryview(memory)[BLOCK:2 * BLOCK]], rng.randrange(blocks) * BLOCK)
        return n

    start = time.perf_counter()
    with ThreadPoolExecutor(DEPTH) as pool:
        total = sum(pool.map(read, range(DEPTH)))
    os.close(handle)
    return total / (time.perf_counter() - start)


def run_in(group: Path, name: str, folder: Path, threads: int, tokens: int, prompt: int) -> dict[str, float]:
    """What a process in this group measures, after as many tokens as it measures, so that its cache is full."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    file, ids = folder / NAMES[name], np.random.default_rng(0).permutation(32768)[:2 * tokens + prompt].tolist()
    found = dict[str, float]()
    engine = LlamaEngine(file, threads, 1024, repack=False) if name.startswith("llama") else \
        NumbaEngine(file.parent, None, threads, 1024)
    for part in (ids[:tokens], ids[tokens:2 * tokens]):
        start, before = time.perf_counter(), bytes_read()
        for token in part:
            engine.run([token])
        took, read = time.perf_counter() - start, bytes_read() - before
        found |= {"decode": tokens / took, "read": read / tokens, "decoding": read / took}
    if prompt:
        start, before = time.perf_counter(), bytes_read()
        engine.run(ids[-prompt:])
        took = time.perf_counter() - start
        found |= {"prefill": prompt / took, "prompting": (bytes_read() - before) / took}
        start = time.perf_counter()
        for token in ids[:16]:
            engine.run([token])
        found["after"] = 16 / (time.perf_counter() - start)
    return found


def bytes_read() -> int:
    """From the disk, by this process."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])
