# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66", "jinja2>=3.1.6",
#                 "numba>=0.62"]
# ///
"""Qwen3 at the speed of the memory: the functions of qwen3.py whose limit it is, compiled by numba while they run.

    python qwen3_numba.py "What is the capital of France?"                the same options as qwen3.py, and --quantize

Each new token needs every weight once, and a processor multiplies faster than its memory delivers: so a token takes as
long as its weights take to be read. From that follows all that is done here:

    fewer bytes      weights stay bfloat16 as in the file, or become 8 or 4 bits; keys and values are 16 or 8 bits
    all of the speed each core reads its share of the rows as one stream, without gaps
    nothing else     one job for the threads per token: they meet at barriers and never wait for Python in between

What isn't defined here is that of qwen3.py, generation, sampling and the command line among it; what has a namesake
there does the same, and NumPy says there what that is. Two more files belong to this one:

    qwen3_layout.py  how weights and the cache lie in memory
    qwen3_kernels.py the kernels themselves, in the order of forward; imported only to be compiled, at the first run
"""
import argparse
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import queue
import shutil
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import qwen3
from qwen3 import *  # noqa: F403  the same names
from qwen3 import Config, Engine, InputError, KVCache, Model, check_tensors, checked_ids, map_checkpoint, rope_tables
from qwen3_layout import (BF16, CACHE8, DEPTH, FEW, FLOAT16, FLOAT32, GROUP, INT4, INT8, LINEAR, LONG_PART, PANEL,
                          PANELS, SHORT_PART, VERSION, packed_shape, padded, space_size)

numba = importlib.util.find_spec("numba")  # importing it would take longer than all else, and is seldom necessary
NUMBA_VERSION = Path(numba.origin).with_name("_version.py") if numba and numba.origin else Path()
try:
    if not NUMBA_VERSION.is_file():
        raise ImportError("it isn't installed")
    import llvmlite
    import llvmlite.binding as llvm
except ImportError as error:
    message = f"needs numba ({error}): pip install numba, or qwen3[fast]; qwen3.py does the same without it"
    if __name__ == "__main__":
        sys.exit(f"qwen3_numba.py: {message}")
    raise ImportError(f"qwen3_numba {message}") from error

# ----------------------------------------------------------------------------------------------------------------------
# Threads: a team that runs one kernel together
# ----------------------------------------------------------------------------------------------------------------------


def available_cpus() -> int:
    """How many CPUs this process may really use: its affinity, and the quota of its cgroup where there is one."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux, no cgroup, or "max": no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, round(int(quota) / int(period))))
    return n


class Team:
    """Threads that run a kernel together, each with its rank. They sleep while there is nothing to do, and end with it.

    The calling thread only waits, so that Ctrl-C reaches it at once; a job that was begun is still finished, and the
    next one comes after it. Callers from several threads take turns.
    """

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self._start()

    def _start(self) -> None:
        self.pid = os.getpid()
        self.barrier = np.zeros(16, np.int64)  # arrived [0], round [8]: on two cache lines
        self.queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(self.n_threads)]
        for rank in range(self.n_threads):
            threading.Thread(target=work, args=(rank, self.queues), daemon=True, name=f"qwen3-{rank}").start()
        weakref.finalize(self, self.queues[0].put, None)

    def run(self, kernel: "Kernel", weights: "Weights", *args: Any) -> None:
        """kernel(rank, n_threads, barrier, *args) on all threads. The kernel must end with `meet`.

        Weights and arrays are addresses to the kernel: they are kept until it ends, even if this call is interrupted.
        """
        if self.pid != os.getpid():  # threads don't survive a fork
            self._start()
        done: queue.SimpleQueue = queue.SimpleQueue()
        numbers = kernel.numbers(0, self.n_threads, self.barrier, *args)[1:]
        self.queues[0].put((kernel, numbers, done, (weights, args)))
        done.get()


def work(rank: int, queues: Sequence[queue.SimpleQueue]) -> None:
    """What a thread of a team does. It must not know the team, which else would never end."""
    while take_job(rank, queues):
        pass


def take_job(rank: int, queues: Sequence[queue.SimpleQueue]) -> bool:
    """Waits for a job and does a thread's part of it; False if there are no more."""
    job = queues[rank].get()
    if rank == 0:  # one put by the caller, which an interrupt can't cut in two; the others are called from here
        for other in queues[1:]:
            other.put(job)
    if job is None:
        return False
    kernel, numbers, done, _ = job
    kernel.call(rank, *numbers)
    if rank == 0:
        done.put(None)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Kernels: machine code that is made at the first run, and kept
# ----------------------------------------------------------------------------------------------------------------------


class Kernel:
    """A function of qwen3_kernels.py, compiled, at an address. Other threads run while it does."""

    def __init__(self, address: int, arguments: list):
        self.arguments = [kind if isinstance(kind, str) else (np.dtype(kind[0]), kind[1]) for kind in arguments]
        types = [ctypes.c_void_p, ctypes.c_void_p]  # where numba puts a result and an exception: there is neither
        for kind in self.arguments:
            n = 1 if isinstance(kind, str) else 5 + 2 * kind[1]
            types += [ctypes.c_double if kind == "float64" else ctypes.c_int64] * n
        unused = ctypes.create_string_buffer(16)
        self.call = partial(ctypes.CFUNCTYPE(ctypes.c_int32, *types)(address), unused, unused)

    def numbers(self, *args: Any) -> list[int | float]:
        """The arguments as numba's functions want them. TypeError unless arrays are contiguous and of the right types.

        An array is (owner, owner, size, itemsize, address, *shape, *strides).
        """
        numbers: list[int | float] = []
        for arg, kind in zip(args, self.arguments, strict=True):
            if isinstance(kind, str):
                numbers.append(float(arg) if kind == "float64" else int(arg))
            elif (arg.dtype, arg.ndim) != kind or not arg.flags.c_contiguous:
                raise TypeError(f"needs contiguous {kind[0]} with {kind[1]} dimensions, not {arg.dtype} {arg.shape}")
            else:
                numbers += (0, 0, arg.size, arg.itemsize, arg.ctypes.data, *arg.shape, *arg.strides)
        return numbers

    def __call__(self, *args: Any) -> None:
        self.call(*self.numbers(*args))


def kernel_folders() -> list[Path]:
    """Where compiled kernels may be kept: in NUMBA_CACHE_DIR; or with Python's compiled modules, or in the home."""
    if folder := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(folder)]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(__file__).resolve().parent / "__pycache__", Path(caches) / "qwen3"]


@cache
def kernels() -> SimpleNamespace:
    """All kernels by their names: compiled by numba, or as they were kept when they were.

    numba could keep them itself, but then each start had to import it and its compiler, which takes longer than all
    else: so what it has compiled is kept as an object file, which llvmlite, the smaller part of numba, loads at once.
    """
    folder = Path(__file__).resolve().parent
    cpu = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {os.environ.get('QWEN3_INT8_PATH')}"
    sources = [file.read_bytes() for file in (folder / "qwen3_kernels.py", folder / "qwen3_layout.py", NUMBA_VERSION)]
    made_from = hashlib.sha256(b"".join(sources) + f"{llvmlite.__version__} {cpu}".encode()).hexdigest()
    name = f"qwen3_kernels.{hashlib.sha256(cpu.encode()).hexdigest()[:8]}.o"
    found = next(filter(None, (read_kernels(folder / name, made_from) for folder in kernel_folders())), None)
    if found is None:
        try:
            from qwen3_kernels import machine_code
            found = machine_code()
        except (InputError, MemoryError):
            raise
        except ImportError as error:
            raise InputError(f"the kernels can't be compiled, because numba can't be imported: {error}") from error
        except Exception as error:  # numba and LLVM raise many types when their versions don't fit the kernels
            lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
            version = ".".join(map(str, llvm.llvm_version_info))
            raise InputError(f"the kernels can't be compiled by numba {sys.modules['numba'].__version__} with llvmlite "
                             f"{llvmlite.__version__} (LLVM {version}) and NumPy {np.__version__}: {' '.join(lines)[:300]}; "
                             "install the newest numba, or use qwen3.py") from error
        keep_kernels(name, made_from, *found)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    arguments, code = found
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return SimpleNamespace(engine=engine, **{  # which keeps the code alive
        kernel: Kernel(engine.get_function_address(kernel), kinds) for kernel, kinds in arguments.items()})


def read_kernels(file: Path, made_from: str) -> tuple[dict[str, list], bytes] | None:
    """What keep_kernels has written; None if there is no file, or a damaged one, or one made from something else."""
    try:
        header, code = file.read_bytes().split(b"\n", 1)
        about = json.loads(header)
        whole = about["made from"] == made_from and about["sha256"] == hashlib.sha256(code).hexdigest()
        return (about["arguments"], code) if whole else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep_kernels(name: str, made_from: str, arguments: dict[str, list], code: bytes) -> None:
    """Writes what machine_code has given into the first folder that takes it; if none does, each run compiles anew."""
    about = {"made from": made_from, "sha256": hashlib.sha256(code).hexdigest(), "arguments": arguments}
    for folder in kernel_folders():
        temporary = folder / f"{name}.{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(json.dumps(about).encode() + b"\n" + code)
                os.replace(temporary, folder / name)
                return
            finally:
                temporary.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# Weights: as they lie in the file, or packed
# ----------------------------------------------------------------------------------------------------------------------

FORMATS = {"F32": FLOAT32, "BF16": BF16, "F16": FLOAT16}
PACKED = {"int8": INT8, "int4": INT4}


@dataclass
class Weights:
    """Where the weights are. A matrix is (address, bytes per row or packed block, format, rows, columns).

    layers int64 [num_hidden_layers, 7, 5] in the order of LINEAR; embedding, head int64 [5]; norms float32
    [num_hidden_layers, 2, hidden_size], head_norms [num_hidden_layers, 2, head_dim], norm [hidden_size], all float32.
    `arrays` keeps alive what the addresses point to; `team` are the threads that work on it.
    """
    layers: np.ndarray
    embedding: np.ndarray
    head: np.ndarray
    norms: np.ndarray
    head_norms: np.ndarray
    norm: np.ndarray
    arrays: list[np.ndarray]
    team: Team

    @property
    def form(self) -> int:
        """The format of the matrices."""
        return int(self.head[2])


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """uint8 zeros that begin where a line of the cache does, so that no vector lies in two."""
    size = int(np.prod(shape))
    space = np.zeros(size + 64, np.uint8)
    start = -space.ctypes.data % 64
    return space[start:start + size].reshape(shape)

def to_float32(matrix: np.ndarray, form: int) -> np.ndarray:
    """Stored rows [rows, n] of one of the float formats as float32."""
    if form == BF16:
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix.astype(np.float32)


def quantize_matrix(name: str, rows: np.ndarray, form: int, target: int, pool: ThreadPoolExecutor) -> np.ndarray:
    """Stored rows of floats [rows, n] -> packed blocks, uint8. Raises InputError if some are not finite."""
    n_rows, n = rows.shape
    packed, together = aligned(packed_shape(n_rows, n, target)), 8  # blocks

    def part(block: int) -> None:
        w = np.zeros((together * PANEL, padded(n, 2 * GROUP)), np.float32)
        some = to_float32(rows[block * PANEL:(block + together) * PANEL], form)
        if not np.isfinite(some).all():
            raise InputError(f"{name} has weights that are not finite, so it can't be quantized")
        w[:len(some), :n] = some
        for i, out in enumerate(packed[block:block + together]):
            kernels().quantize_block(w[i * PANEL:(i + 1) * PANEL], 8 if target == INT8 else 4, out)

    list(pool.map(part, range(0, len(packed), together)))
    return packed


def load_weights(path: Path, config: Config, quantize: str | None = None, threads: int | None = None) -> Weights:
    """The namesake of qwen3.load_weights: nothing is expanded. `quantize` is None, "int8" or "int4"."""
    saved, stored = checked_version(path)
    if saved is None:
        stored = map_checkpoint(path)
        check_tensors(path, config, stored)
    elif quantize not in (None, saved):
        raise InputError(f"{path}: this checkpoint is {saved}, so it can't be made {quantize}")
    else:
        check_quantized(path, config, stored, saved)
        quantize = None
    kernels()  # before all that takes long
    team, shapes, arrays = Team(threads or available_cpus()), qwen3.tensor_shapes(config), []

    def place(name: str) -> np.ndarray:
        tensor, (rows, n) = stored[name], shapes[name]
        data, form = tensor.data, FORMATS.get(tensor.dtype, PACKED.get(saved))
        if quantize is not None:
            data, form = quantize_matrix(f"{path}: {name}", data, form, PACKED[quantize], pool), PACKED[quantize]
            qwen3.forget_pages(tensor.mapping)
        elif form < INT8 and n % 32:  # the kernels go in steps of 32
            data = np.zeros((rows, padded(n, 32)), data.dtype)
            data[:, :n] = tensor.data
        arrays.append(data)
        return np.array([data.ctypes.data, data.strides[0], form, rows, n])

    layers = np.zeros((config.num_hidden_layers, len(LINEAR), 5), np.int64)
    with ThreadPoolExecutor(team.n_threads) as pool:
        embedding = place("model.embed_tokens.weight")
        tied = config.tie_word_embeddings or "lm_head.weight" not in stored
        head = embedding if tied else place("lm_head.weight")
        numbers: Iterable[int] = range(config.num_hidden_layers)
        if quantize is not None:
            from tqdm import tqdm  # only here: importing it takes as long as all else that is done here
            numbers = tqdm(numbers, f"quantizing to {quantize}", delay=1, leave=False, disable=None)
        for i in numbers:
            for j, name in enumerate(LINEAR):
                layers[i, j] = place(f"model.layers.{i}.{name}.weight")

    def norms(*names: str) -> np.ndarray:
        return np.array([[qwen3.to_float32(stored[f"model.layers.{i}.{name}.weight"]) for name in names]
                         for i in range(config.num_hidden_layers)])

    norm = np.array(qwen3.to_float32(stored["model.norm.weight"]))
    return Weights(layers, embedding, head, norms("input_layernorm", "post_attention_layernorm"),
                   norms("self_attn.q_norm", "self_attn.k_norm"), norm, arrays, team)


def checked_version(path: Path) -> tuple[str | None, dict[str, qwen3.StoredTensor]]:
    """("int8" or "int4", the tensors) of a folder that save_quantized has written; (None, {}) for any other."""
    from qwen3_files import map_quantized
    form, file, stored = map_quantized(path)
    if file is not None:
        with qwen3.safetensors.safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
        if (metadata.get("format"), metadata.get("version")) != (form, VERSION):
            raise InputError(f"{file}: written by another version of this program; quantize the model anew")
    return form, stored


def check_quantized(path: Path, config: Config, stored: dict[str, qwen3.StoredTensor], form: str) -> None:
    """Raises InputError unless each matrix is packed in this format, and each norm is there, with the right sizes."""
    shapes = qwen3.tensor_shapes(config)
    if "lm_head.weight" not in stored and config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    expected = {name: packed_shape(*shape, PACKED[form]) if len(shape) == 2 else shape
                for name, shape in shapes.items()}
    found = {name: tensor.data.shape for name, tensor in stored.items()}
    kinds = {name: "U8" if len(shape) == 2 else "F32" for name, shape in shapes.items()}
    if found != expected or any(stored[name].dtype != kind for name, kind in kinds.items()):
        raise InputError(f"{path}: the quantized weights don't fit config.json; quantize the model anew")


def save_quantized(model: Model, folder: str | Path, form: str) -> None:
    """Writes a model that was loaded with quantize=form as a checkpoint of its own, which then loads at once.

    The folder must not exist yet, and appears when all of it is written. Raises InputError when that can't be done.
    """
    from qwen3_files import quantized_file, write_safetensors
    folder, w = Path(folder), model.weights
    if os.path.lexists(folder):
        raise InputError(f"{folder}: exists already; give the name of a new folder")
    if PACKED.get(form) != w.head[2]:
        raise InputError(f"{folder}: the model was not loaded as {form}")
    by_address = {array.ctypes.data: array for array in w.arrays}
    tensors = {"model.embed_tokens.weight": by_address[w.embedding[0]], "model.norm.weight": w.norm}
    if w.head[0] != w.embedding[0]:
        tensors["lm_head.weight"] = by_address[w.head[0]]
    for i, layer in enumerate(w.layers):
        tensors |= {f"model.layers.{i}.{name}.weight": by_address[entry[0]] for name, entry in zip(LINEAR, layer)}
        for name, norm in zip(("input_layernorm", "post_attention_layernorm"), w.norms[i]):
            tensors[f"model.layers.{i}.{name}.weight"] = norm
        for name, norm in zip(("self_attn.q_norm", "self_attn.k_norm"), w.head_norms[i]):
            tensors[f"model.layers.{i}.{name}.weight"] = norm
    temporary = folder.with_name(f".qwen3-{os.getpid()}-{folder.name}.tmp")
    try:
        temporary.mkdir()
        for name in MODEL_FILES:
            if file := qwen3.model_file(model.path, name):
                (temporary / name).write_bytes(file.read_bytes())
        write_safetensors(temporary / quantized_file(form), tensors, {"format": form, "version": VERSION})
        os.rename(temporary, folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja")


# ----------------------------------------------------------------------------------------------------------------------
# KV cache and forward
# ----------------------------------------------------------------------------------------------------------------------

class Cache(KVCache):
    """qwen3.KVCache with 16 bits per number, heads filled up with zeros to a multiple of 32 numbers.

    k, v uint16 [n_layers, batch, n_kv_heads, capacity, row_size].
    """
    form, stored_as = FLOAT16, "f16"

    def __init__(self, config: Config, max_length: int | None = None, left_padding: Sequence[int] | None = None):
        super().__init__(config, max_length, left_padding)
        shape = (*self.k.shape[:4], self.row_size(padded(config.head_dim, 32)))
        self.k, self.v = np.empty(shape, np.uint16), np.empty(shape, np.uint16)

    @staticmethod
    def row_size(n: int) -> int:
        """How many times 16 bits a row of n numbers takes."""
        return n


class Bf16Cache(Cache):
    """The same in bfloat16: fewer digits, but no value is too large for it."""
    form, stored_as = BF16, "bf16"


class Int8Cache(Cache):
    """Bytes, with a float16 scale for each 32 of them: little more than half the memory."""
    form, stored_as = CACHE8, "int8"

    @staticmethod
    def row_size(n: int) -> int:
        return n // 2 + n // GROUP


CACHES = {"f16": Cache, "bf16": Bf16Cache, "int8": Int8Cache}


def embed(weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Rows of the embedding as float32: ids [n] -> [n, hidden_size]."""
    x = np.empty((len(ids), weights.embedding[4]), np.float32)
    for row, token in zip(x, ids):
        kernels().weight_row(weights.embedding, token, row)
    return x


APART = 16  # numbers between two vectors: without them, many would fall on the same few lines of a core's first cache


def run_layers(model: Model, ids: np.ndarray, cache: Cache) -> np.ndarray:
    """Runs tokens [batch, n] through all layers -> the residual stream [batch * n, hidden_size]."""
    config, w, f32 = model.config, model.weights, np.float32
    (batch, n), n_heads, d = ids.shape, config.num_attention_heads, config.head_dim
    m, q_size, kv_size, width = batch * n, n_heads * d, config.num_key_value_heads * d, padded(d, 32)
    cos, sin = (table.reshape(m, d // 2) for table in rope_tables(config, cache.positions(n)))
    padding = np.zeros(batch, np.int64) if cache.left_padding is None else cache.left_padding
    x = embed(w, ids.reshape(-1))
    widest, inner = padded(max(config.hidden_size, q_size), 64), padded(config.intermediate_size, 64)
    length, n_items = cache.length + n, batch * config.num_key_value_heads
    is_long = n_items * (length // LONG_PART) >= w.team.n_threads or length <= SHORT_PART
    part_length = LONG_PART if is_long else SHORT_PART
    parts = -(-length // part_length) if n <= FEW else 0
    work = (np.zeros((m, widest + APART), f32), np.empty((m, widest * 5 // 4), np.uint8),
            np.empty((m, max(padded(q_size, PANEL) + 2 * padded(kv_size, PANEL), widest)), f32),
            np.zeros((n_heads, m, width), f32),
            np.zeros((2, m, inner + APART), f32), np.empty((m, inner * 5 // 4), np.uint8),
            np.empty((m, n_heads, parts, width + 2), f32),
            np.empty((w.team.n_threads, space_size(n_heads // config.num_key_value_heads, width)), f32))
    step = config.num_hidden_layers if m <= FEW else 1  # a long prompt can be interrupted between two layers
    for first in range(0, config.num_hidden_layers, step):
        w.team.run(kernels().decoder_layers, w, first, first + step, w.layers, w.norms, w.head_norms,
                   config.rms_norm_eps, x, cos, sin, cache.k, cache.v, cache.form, cache.length, padding,
                   part_length, *work)
    return x


def output(model: Model, x: np.ndarray) -> np.ndarray:
    """The logits [n, vocab_size] of x [n, hidden_size]."""
    config, w = model.config, model.weights
    width = padded(config.hidden_size, 64)
    logits = np.empty((len(x), padded(config.vocab_size, PANEL)), np.float32)
    space = np.empty((w.team.n_threads, PANELS * DEPTH * PANEL), np.float32)
    h, packed = np.zeros((len(x), width), np.float32), np.empty((len(x), width * 5 // 4), np.uint8)
    w.team.run(kernels().output_logits, w, x, w.norm, config.rms_norm_eps, w.head, h, packed, logits, space)
    return logits[:, :config.vocab_size]


def forward(model: Model, token_ids: Sequence[int] | np.ndarray, cache: Cache, all_logits: bool = False) -> np.ndarray:
    """The namesake of qwen3.forward."""
    config = model.config
    ids = checked_ids(token_ids, config)
    batch, n = ids.shape
    if batch != cache.k.shape[1]:
        raise InputError(f"the cache holds {cache.k.shape[1]} sequences, but there are tokens for {batch}")
    cache.reserve(n)
    logits = np.empty((batch, n if all_logits else 1, config.vocab_size), np.float32)
    chunk = max(1, qwen3.CHUNK // batch)
    for start in range(0, n, chunk):
        now = ids[:, start:start + chunk]
        x = run_layers(model, now, cache).reshape(*now.shape, -1)
        cache.advance(now)
        if all_logits:
            logits[:, start:start + chunk] = output(model, x.reshape(-1, config.hidden_size)).reshape(*now.shape, -1)
    if not all_logits:
        logits[:, 0] = output(model, np.ascontiguousarray(x[:, -1]))
    result = logits if all_logits else logits[:, 0]
    return result if np.ndim(token_ids) == 2 else result[0]


def engine(quantize: str | None = None, threads: int | None = None, kv_dtype: str = "f16") -> Engine:
    """The Engine for qwen3.load_model. Raises InputError for values that there aren't."""
    if quantize not in (None, *PACKED):
        raise InputError(f"quantize must be int8 or int4, not {quantize!r}")
    if kv_dtype not in CACHES:
        raise InputError(f"kv_dtype must be {', '.join(CACHES)}, not {kv_dtype!r}")
    qwen3.checked_whole("threads", threads, 1)
    return Engine(lambda path, config: load_weights(path, config, quantize, threads), CACHES[kv_dtype], forward)


def load_model(name: str | Path, quantize: str | None = None, threads: int | None = None, kv_dtype: str = "f16",
               offline: bool = False) -> Model:
    """The namesake of qwen3.load_model.

    quantize: None (weights stay as they are in the file), "int8" or "int4"; threads: None takes all available CPUs;
    kv_dtype: "f16", "bf16" or "int8", how keys and values are kept.
    """
    return qwen3.load_model(name, engine(quantize, threads, kv_dtype), offline)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of qwen3.py with this engine, and with options of its own."""
    import qwen3_cli
    parser = qwen3_cli.make_parser()
    add = parser.add_argument_group("the fast engine").add_argument
    add("--quantize", choices=["int8", "int4"], help="8 or 4 bits a weight: up to 2 or 3.5 times as fast as bfloat16")
    add("--save-quantized", metavar="DIR", help="write the quantized model into a new folder, which loads at once")
    add("--threads", type=int, metavar="N", help="how many threads compute (default: the CPUs that may be used)")
    add("--kv-dtype", choices=list(CACHES), default="f16", help="how keys and values are kept (default: %(default)s)")

    def save(args: argparse.Namespace, engine: Engine) -> None:
        if args.quantize is None:
            raise InputError("--save-quantized needs --quantize int8 or --quantize int4")
        save_quantized(qwen3_cli.load(args, engine), args.save_quantized, args.quantize)

    return qwen3_cli.main(argv, parser, lambda args: engine(args.quantize, args.threads, args.kv_dtype),
                          {"save_quantized": save})


if __name__ == "__main__":
    sys.exit(main())
