"""Speed and memory of the engines against the memory's limit and against other engines, all in one run.

    python bench/run.py --ik FOLDER            all that is installed; 16 GB; 25 minutes with --rounds 1
    python bench/run.py --only numpy torch     the NumPy engine beside torch

Random weights in the exact shape of Qwen3-0.6B. The read bandwidth is what the memory gives to whatever reads 1 GiB
fastest, measured right before each decoding. llama.cpp is tried again without repacked weights if it crashes; peers
that are not installed, or that crash for good, are left out with a note. For OpenVINO, `optimum-cli` of an environment
of its own must be in $PATH; --ik FOLDER compiles ik_llama.cpp from its sources. QWEN3_INT8_PATH=avx2 holds the peers to
AVX2, too, but for llama-cpp-python: install it with the CMAKE_ARGS below. The figures go to a file in bench/results/,
one for each kind of CPU; then `python bench/figures.py --write` writes the tables of README.md, docs/speed.md and
bench/RESULTS.md, and the picture.
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

import harness
from harness import ENTRIES, NAN, ROOT, Reader, alone, cpu_name, note, opened, peak_bytes, seconds
from peers import build_ik, matrices_of, open_engine, peer_file, read_bytes

OUR_FORMAT = {"Q8_0": "int8", "Q4_0": "int4"}  # what the peers' formats stand beside
PROMPT, CONTEXTS, DECODED = 512, (4096, 1024, 16), 16  # tokens that are read, in the cache before decoding, decoded
PATH = os.environ.get("QWEN3_INT8_PATH")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "CT2_FORCE_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OPENBLAS_CORETYPE":
        "Haswell", "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"}
LLAMA = """import sys; from pathlib import Path; from peers import LlamaEngine
file, threads, *ids = sys.argv[1:]; print(LlamaEngine(Path(file), int(threads), 256).run([*map(int, ids)])[0].argmax())
"""


def peak_memory(name: str, path: Path, folder: Path, threads: int, ids: Sequence[int],
                repack: bool) -> tuple[int, float]:
    """(the most memory in bytes of this process, seconds to load) for a long prompt and 16 more tokens."""
    start = time.perf_counter()
    engine = open_engine(name, path, folder, threads, len(ids), repack)
    load = time.perf_counter() - start
    engine.prefill_speed(ids[:-16])
    engine.decode_speed(len(ids) - 16, ids[-16:])
    return peak_bytes(), load


class Bench(harness.Bench):
    def measure(self, names: Sequence[str]) -> None:
        """Memory and start-up first, then decoding with ever shorter context, then a prompt."""
        if self.args.ik:
            build_ik(self.args.ik, self.folder / "ik_llama.cpp")
        longest, self.memory = CONTEXTS[0], dict[str, tuple[float, float]]()
        self.ids = np.random.default_rng(0).integers(0, self.config.vocab_size, longest + DECODED).tolist()
        for name in names:
            note(f"{name}: peak memory")
            if found := opened(name, partial(self.memory_of, name), self.notes):
                self.memory[name] = found
        self.start_up()
        for name in self.memory:
            self.open(name, open_engine, longest + DECODED)
            if name in self.workers and ENTRIES[name].engine == "this engine":
                self.workers[name]("settle")
        self.each(f"prompt of {longest:,}", "prefill_speed", self.ids[:longest], rounds=1, warm=False)
        for context in CONTEXTS:
            self.each(f"decode at {context:,}", "decode_speed", context, self.ids[:DECODED], warm=False)
        self.each(f"prompt of {PROMPT:,}", "prefill_speed", self.ids[:PROMPT])
        matrices = [shape for name, shape in matrices_of(self.config).items() if ".layers.0." in name]
        self.sgemm = median(self.reader(Reader.sgemm, matrices) for _ in range(self.args.rounds))

    def memory_of(self, name: str, repack: bool) -> tuple[float, float]:
        """Alone, the second time: what is written or compiled for a format isn't measured."""
        if name.startswith("ik"):  # loads the model in each of its processes
            return NAN, NAN
        args = name, self.path, self.folder, self.args.threads, self.ids[:PROMPT + 16], repack
        return [alone(peak_memory, *args) for _ in range(2)][1]

    def start_up(self) -> None:
        """Seconds of a whole process that continues a few words with one token."""
        def taken(*command: Any, **more: str) -> float:
            return seconds(lambda: subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True,
                                                  env=os.environ | {"PYTHONPATH": str(ROOT / "bench")} | more))

        few = ["--raw", "--max-tokens", "1", "the of and to"]
        commands = {"bf16": [ROOT / "qwen3_numba.py", "--threads", self.args.threads, "--model", self.path, *few]}
        if "llama-bf16" in self.memory:
            file = peer_file(self.path, self.folder, "llama-bf16")
            commands["llama-bf16"] = ["-c", LLAMA, file, self.args.threads, *self.ids[:4]]
        for name in commands.keys() & self.memory:
            self.values[name, "start"] = [taken(*commands[name]) for _ in range(self.args.rounds + 1)][1:]
        if "bf16" in self.memory:
            with tempfile.TemporaryDirectory() as folder:  # where no machine code is kept
                self.values["bf16", "first run"] = [
                    taken(ROOT / "qwen3_numba.py", "--max-tokens", "8", "Hello", NUMBA_CACHE_DIR=folder)]

    # What is made of the measurements

    def cells(self, measured: Callable[[str], float]) -> dict[str, dict[str, float]]:
        """Format of ours -> engine -> measured(name), with three digits, for all that were measured."""
        from figures import OURS
        found: dict[str, dict[str, float]] = {}
        for name in self.memory:
            entry = ENTRIES[name]
            if (value := measured(name)) == value:  # no NaN
                engine = OURS if entry.engine in ("this engine", "plain NumPy") else entry.engine
                found.setdefault(OUR_FORMAT.get(entry.format, entry.format), {})[engine] = float(f"{value:.3g}")
        if (rounded := ENTRIES["bf16-rounded"].format) in found:  # beside the same peers
            found[rounded] = found.get("bf16", {}) | found[rounded]
        return found

    def results(self, file: Path) -> dict:
        """What was measured, as bench/figures.py reads it. The machine keeps the name that it has in `file`."""
        from figures import OURS
        from qwen3 import __version__
        contexts = {f"decode at {n:,}": n for n in CONTEXTS[::-1]}
        works = [*contexts, *(f"prompt of {n:,}" for n in (PROMPT, CONTEXTS[0]))]
        shares = {work: self.cells(lambda name, work=work, n=n: self.share(
            name, work, read_bytes(self.config, name, n))) for work, n in contexts.items()}
        commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True)
        return {
            "machine": json.loads(file.read_text("utf-8"))["machine"] if file.exists() else
            cpu_name() + f", {PATH} alone" * bool(PATH), "cores": self.args.threads,
            "date": str(datetime.date.today()), "version": commit.stdout.decode().strip() or __version__,
            "method": f"QWEN3_INT8_PATH={PATH} " * bool(PATH) + " ".join(["bench/run.py", *(
                Path(each).name for each in sys.argv[1:])]),
            "versions": harness.versions(),
            "bandwidth": round(median(self.bandwidths()) / 1e9, 1), "sgemm": round(self.sgemm / 1e9),
            "speeds": {work: self.cells(lambda name, work=work: self.median(name, work)) for work in works},
            "shares": {work: {name: engines[OURS] for name, engines in formats.items() if OURS in engines}
                       for work, formats in shares.items()},
            "others": {"peak memory, GB": self.cells(lambda name: self.memory[name][0] / 1e9),
                       "loading, seconds": self.cells(lambda name: self.memory[name][1]),
                       "start to first token, seconds": self.cells(lambda name: self.median(name, "start")),
                       "first answer after installation, seconds": self.cells(
                           lambda name: self.median(name, "first run"))},
            "notes": [*self.notes, "The start loads the model's tokenizer in ours, none in llama.cpp."]}


def main() -> None:
    parser = harness.options(__doc__, 5)
    parser.add_argument("--ik", type=Path, metavar="FOLDER", help="sources of ik_llama.cpp, for cmake")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="keeps the peers' files of one --model")
    parser.add_argument("--only", nargs="+", choices=ENTRIES, metavar="NAME", help=f"of {', '.join(ENTRIES)}",
                        default=[name for name, entry in ENTRIES.items() if entry.for_speed])
    args = harness.parsed(parser)
    import llvmlite.binding  # not above: the processes whose memory is measured import this file, too
    from figures import whole_table
    file = args.out / f"results/{llvmlite.binding.get_host_cpu_name()}{f'-{PATH}' * bool(PATH)}.json"
    os.environ |= AVX2 if PATH == "avx2" else {}
    with Bench(args, folder=args.files) as bench:
        bench.notes += ["OpenVINO's attention and norms use AVX-512 all the same."] * (PATH == "avx2")
        bench.measure(args.only)
        results = bench.results(file)
    print(whole_table(results))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
