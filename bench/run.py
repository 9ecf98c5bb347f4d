"""Measures the engines beside others, on random weights in the exact shapes of Qwen's models.

    python bench/run.py --list                          the works, and how long they take on two cores
    python bench/run.py --ik FOLDER                     `speed`, with all that is installed, for README's tables
    python bench/run.py --only batch hybrid             other works; each writes bench/NAME.md
    python bench/run.py --engines numpy torch           the NumPy engine beside torch

llama.cpp is tried again without repacked weights if it crashes; peers that are not installed, or that crash for good,
are left out with a note. For OpenVINO, `optimum-cli` of an environment of its own must be in $PATH; --ik FOLDER
compiles ik_llama.cpp from its sources. QWEN3_INT8_PATH=avx2 holds the peers to AVX2, too, but for llama-cpp-python:
install it with the CMAKE_ARGS below.
"""
import argparse
import os
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import NamedTuple

from harness import ENTRIES, ROOT, Bench, note


class Work(NamedTuple):
    """A row of the table. The work `name` is the function `name` of the module."""
    module: str
    rounds: int
    needs: str
    takes: str
    about: str


LLAMA = "numba; llama-cpp-python, gguf"
WORKS = {
    "speed": Work("speed", 5, f"{LLAMA}; the other engines", "25 minutes with --rounds 1, 16 GB",
                  "speed and memory beside all engines: a file for this kind of CPU in bench/results"),
    "batch": Work("works", 3, LLAMA, "15 minutes, 12 GB", "tokens/s of 1 to 32 sequences together, and the limit"),
    "busy": Work("works", 5, f"{LLAMA}; the other engines", "15 minutes (an estimate), 12 GB",
                 "what is left of each engine's speed beside a program that takes half of one core"),
    "embed": Work("works", 3, f"{LLAMA}; torch", "30 minutes, 10 GB", "texts per second of Qwen3-Embedding-0.6B"),
    "hybrid": Work("works", 3, LLAMA, "20 minutes, 12 GB", "Qwen3.5-0.8B, and a second turn after 8,000 tokens"),
    "moe": Work("works", 3, LLAMA, "15 minutes, 15 GB", "a mixture of experts: 4 layers of Qwen3-30B-A3B"),
    "large": Work("large", 3, f"{LLAMA}; root, Linux", "20 minutes, 6 GB of disk",
                  "a mixture larger than the memory: 6 layers of Qwen3.6-35B-A3B in memory cgroups"),
    "draft": Work("works", 5, "numba", "6 minutes, 6 GB", "--draft int4, with guesses right in a given share"),
    "mtp": Work("works", 5, "numba", "15 minutes, 6 GB", "the same by the MTP head of Qwen3.5-0.8B"),
    "vision": Work("works", 5, "torch, transformers", "1 minute", "Qwen3.5-0.8B's tower, seconds for a picture"),
    "speech": Work("works", 3, "numba; torch, transformers", "8 minutes", "Qwen3-ASR-0.6B, part by part"),
    "talk": Work("works", 3, "numba; torch, librosa, qwen-tts-hf", "8 minutes", "Qwen3-TTS-0.6B, seconds of sound"),
    "server": Work("server", 3, f"{LLAMA}; llama-server", "11 minutes", "1 to 32 clients of the server"),
    "agents": Work("agents", 3, f"{LLAMA}; llama-server", "12 minutes, 12 GB, 6 GB of disk",
                   "an agent's first prompt, its next turns and one after a restart, through the server"),
    "kept": Work("kept", 1, "numba", "8 minutes", "32 conversations on one folder of prompts, kills, a full disk"),
    "parts": Work("parts", 9, "numba", "4 minutes", "where prompts and tokens spend their time, and the CPU's limits"),
    "quality": Work("works", 1, f"{LLAMA}; the extra train", "15 minutes, 5 GB",
                    "the loss of each format, beside llama.cpp's"),
}
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "CT2_FORCE_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OPENBLAS_CORETYPE":
        "Haswell", "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"}


def parsed() -> tuple[argparse.Namespace, dict[str, Callable]]:
    """(the options, the functions of the chosen works). A parameter of a function is an option of its work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     add_help=False)
    add = parser.add_argument
    add("--list", action="store_true", help="say what the works are")
    add("--only", nargs="+", choices=WORKS, default=["speed"], metavar="NAME", help="default: speed")
    add("--engines", nargs="+", choices=ENTRIES, metavar="NAME", help=f"of {', '.join(ENTRIES)}")
    add("--model", type=Path, metavar="FOLDER", help="default: random weights, made for the run")
    add("--rounds", type=int)
    add("--threads", type=int, default=2, help="default: 2")
    add("--out", type=Path, default=ROOT / "bench", help="folder for the results (default: bench)")
    add("--files", type=Path, metavar="FOLDER", help="keeps the peers' files of one --model")
    add("--ik", type=Path, metavar="FOLDER", help="sources of ik_llama.cpp, for cmake")
    known, _ = parser.parse_known_args()
    works = {name: getattr(import_module(WORKS[name].module), name) for name in known.only}
    for name, work in works.items():
        for option, parameter in [*signature(work).parameters.items()][1:]:
            many = isinstance(parameter.default, tuple)
            usual = parameter.default if many else (parameter.default,)
            if f"--{option.replace('_', '-')} " not in parser.format_usage():
                add(f"--{option.replace('_', '-')}", type=type(usual[0]), nargs="+" if many else None,
                    help=f"of {name} (default: {' '.join(map(str, usual))})")
    add("-h", "--help", action="help")
    return parser.parse_args(), works


def main() -> None:
    args, works = parsed()
    if args.list:
        for name, work in WORKS.items():
            print(f"{name:8} {work.about} (needs {work.needs}; {work.takes})")
        return
    # The processes to come have so many threads, and the kernels of BLAS that NumPy itself chooses for this CPU: a
    # variable that chooses others may halve the speed of its products, and users don't have it.
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.pop("OPENBLAS_CORETYPE", None)
    os.environ |= AVX2 if os.environ.get("QWEN3_INT8_PATH") == "avx2" else {}
    rounds = args.rounds
    for name, work in works.items():
        note(f"{name}: {WORKS[name].about}")
        args.rounds = rounds or WORKS[name].rounds
        given = {option: getattr(args, option) for option in [*signature(work).parameters][1:]}
        bench = Bench(args)
        with bench.stack:
            if lines := work(bench, **{option: value for option, value in given.items() if value is not None}):
                bench.publish(name, lines)


if __name__ == "__main__":
    main()
