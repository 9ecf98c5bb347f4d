"""The work `speed` of run.py: a file in bench/results/ for each kind of CPU, from which bench/figures.py makes tables.

The read bandwidth is what the memory gives to whatever reads 1 GiB fastest, measured right before each decoding.
"""
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness import ENTRIES, NAN, ROOT, Bench, Reader, alone, cpu_name, note, opened, peak_bytes, seconds, versions
from peers import build_ik, matrices_of, open_engine, peer_file, read_bytes

OUR_FORMAT = {"Q8_0": "int8", "Q4_0": "int4"}  # what the peers' formats stand beside
PROMPT, CONTEXTS, DECODED = 512, (4096, 1024, 16), 16  # tokens that are read, in the cache before decoding, decoded
PATH = os.environ.get("QWEN3_INT8_PATH")
LLAMA = """import sys; from pathlib import Path; from peers import LlamaEngine
file, threads, *ids = sys.argv[1:]; print(LlamaEngine(Path(file), int(threads), 256).run([*map(int, ids)])[0].argmax())
"""


def speed(bench: Bench) -> None:
    """Memory and start-up first, then decoding with ever shorter context, then a prompt."""
    import llvmlite.binding  # not above: the processes whose memory is measured import this file, too
    from figures import whole_table
    config, longest, memory = bench.model(), CONTEXTS[0], dict[str, tuple[float, float]]()
    if bench.args.ik:
        build_ik(bench.args.ik, bench.folder / "ik_llama.cpp")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, longest + DECODED).tolist()
    for name in bench.names(name for name, entry in ENTRIES.items() if entry.for_speed or bench.args.engines):
        note(f"{name}: peak memory")
        args = name, bench.path, bench.folder, bench.args.threads, ids[:PROMPT + 16]
        if found := opened(name, partial(memory_and_loading, *args), bench.notes):
            memory[name] = found
    start_up(bench, memory, ids)
    for name in memory:
        bench.open(name, open_engine, longest + DECODED)
        if name in bench.workers and ENTRIES[name].engine == "this engine":
            bench.workers[name]("settle")
    bench.each(f"prompt of {longest:,}", "prefill_speed", ids[:longest], rounds=1, warm=False)
    for context in CONTEXTS:
        bench.each(f"decode at {context:,}", "decode_speed", context, ids[:DECODED], warm=False)
    bench.each(f"prompt of {PROMPT:,}", "prefill_speed", ids[:PROMPT])
    bench.notes += ["OpenVINO's attention and norms use AVX-512 all the same."] * (PATH == "avx2")
    file = bench.args.out / f"results/{llvmlite.binding.get_host_cpu_name()}{f'-{PATH}' * bool(PATH)}.json"
    found = results(bench, config, memory, file)
    print(whole_table(found))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


def memory_and_loading(name: str, *args: Any) -> tuple[float, float]:
    """`peak_memory` alone, the second time: what is written or compiled for a format isn't measured."""
    if name.startswith("ik"):  # loads the model in each of its processes
        return NAN, NAN
    return [alone(peak_memory, name, *args) for _ in range(2)][1]


def peak_memory(name: str, path: Path, folder: Path, threads: int, ids: Sequence[int],
                repack: bool) -> tuple[int, float]:
    """(the most memory in bytes of this process, seconds to load) for a long prompt and 16 more tokens."""
    start = time.perf_counter()
    engine = open_engine(name, path, folder, threads, len(ids), repack)
    load = time.perf_counter() - start
    engine.prefill_speed(ids[:-16])
    engine.decode_speed(len(ids) - 16, ids[-16:])
    return peak_bytes(), load


def start_up(bench: Bench, names: Any, ids: Sequence[int]) -> None:
    """Seconds of a whole process that continues a few words with one token."""
    path = os.pathsep.join(filter(None, [str(ROOT / "bench"), os.environ.get("PYTHONPATH")]))

    def taken(*command: Any, **more: str) -> float:
        return seconds(lambda: subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True,
                                              env=os.environ | {"PYTHONPATH": path} | more))

    few, threads = ["--raw", "--max-tokens", "1", "the of and to"], bench.args.threads
    commands = {"bf16": [ROOT / "qwen3_numba.py", "--threads", threads, "--model", bench.path, *few]}
    if "llama-bf16" in names:
        commands["llama-bf16"] = ["-c", LLAMA, peer_file(bench.path, bench.folder, "llama-bf16"), threads, *ids[:4]]
    for name in commands.keys() & names:
        bench.values[name, "start"] = [taken(*commands[name]) for _ in range(bench.args.rounds + 1)][1:]
    if "bf16" in names:
        with tempfile.TemporaryDirectory() as folder:  # where no machine code is kept
            bench.values["bf16", "first run"] = [
                taken(ROOT / "qwen3_numba.py", "--max-tokens", "8", "Hello", NUMBA_CACHE_DIR=folder)]


def results(bench: Bench, config: Any, memory: dict[str, tuple[float, float]], file: Path) -> dict[str, Any]:
    """What was measured, as bench/figures.py reads it. The machine keeps the name that it has in `file`."""
    from figures import OURS
    from qwen3 import __version__

    def cells(measured: Callable[[str], float]) -> dict[str, dict[str, float]]:
        """Format of ours -> engine -> measured(name), with three digits, for all that were measured."""
        found: dict[str, dict[str, float]] = {}
        for name in memory:
            entry = ENTRIES[name]
            if (value := measured(name)) == value:  # no NaN
                engine = OURS if entry.engine in ("this engine", "plain NumPy") else entry.engine
                found.setdefault(OUR_FORMAT.get(entry.format, entry.format), {})[engine] = float(f"{value:.3g}")
        if (rounded := ENTRIES["bf16-rounded"].format) in found:  # beside the same peers
            found[rounded] = found.get("bf16", {}) | found[rounded]
        return found

    contexts = {f"decode at {n:,}": n for n in CONTEXTS[::-1]}
    works = [*contexts, *(f"prompt of {n:,}" for n in (PROMPT, CONTEXTS[0]))]
    shares = {work: cells(lambda name, work=work, n=n: bench.share(name, work, read_bytes(config, name, n)))
              for work, n in contexts.items()}
    matrices = [shape for name, shape in matrices_of(config).items() if ".layers.0." in name]
    sgemm = median(bench.reader(Reader.sgemm, matrices) for _ in range(bench.args.rounds))
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True)
    return {
        "machine": json.loads(file.read_text("utf-8"))["machine"] if file.exists() else
        cpu_name() + f", {PATH} alone" * bool(PATH), "cores": bench.args.threads,
        "date": str(datetime.date.today()), "version": commit.stdout.decode().strip() or __version__,
        "method": f"QWEN3_INT8_PATH={PATH} " * bool(PATH) + " ".join(["bench/run.py", *(
            Path(each).name for each in sys.argv[1:])]),
        "versions": versions(), "bandwidth": round(median(bench.bandwidths()) / 1e9, 1), "sgemm": round(sgemm / 1e9),
        "speeds": {work: cells(lambda name, work=work: bench.median(name, work)) for work in works},
        "shares": {work: {name: engines[OURS] for name, engines in formats.items() if OURS in engines}
                   for work, formats in shares.items()},
        "others": {"peak memory, GB": cells(lambda name: memory[name][0] / 1e9),
                   "loading, seconds": cells(lambda name: memory[name][1]),
                   "start to first token, seconds": cells(lambda name: bench.median(name, "start")),
                   "first answer after installation, seconds": cells(lambda name: bench.median(name, "first run"))},
        "notes": [*bench.notes, "The start loads the model's tokenizer in ours, none in llama.cpp."]}
