# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "numba>=0.62"]
# ///
"""Qwen3 at the speed of the memory: the functions of qwen3.py whose limit it is, compiled by numba while they run.

    python qwen3_numba.py "What is the capital of France?"                the same options as qwen3.py, and --quantize

Each new token needs every weight once, and a processor multiplies faster than its memory delivers, so a token takes the
time to read its weights. From that follows the design:

    fewer bytes      weights stay bfloat16 as in the file, or become 8 or 4 bits; keys and values are 16, 8 or 32 bits
    full bandwidth   each core reads its share of the rows as one stream, without gaps
    nothing else     one job for the threads per token: they meet at barriers and never wait for Python in between

Every public name of qwen3.py is here, too. Names that aren't defined in this file come from qwen3.py, among them
generation, sampling and the command line; a function with a namesake in qwen3.py does the same. The room below is
qwen3_kernels/:

    layout.py    how weights and the cache lie in memory
    vectors.py   the products that numba can't say in Python
    layers.py    the kernels, in the order of forward; imported only to be compiled, at the first run
    compiled.py  machine code kept between runs
    team.py      the threads
"""
from __future__ import annotations

if __name__ == "__main__":  # so that Ctrl-C during the imports, too, ends in one line
    from qwen3_app.start import catch_ctrl_c
    catch_ctrl_c()

import argparse
import contextlib
import json
import mmap
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

import qwen3
from qwen3 import (BUNDLED, Answer, Completion, Config, Engine, InputError, Model, Sampling, TokenLogprob, Tokenizer,
                   __version__, chat, default_sampling, generate, generate_batch, load_config, rms_norm, rope_tables,
                   score)
from qwen3_io import checkpoint
from qwen3_io.arguments import TokenIds, checked_batch, checked_whole, is_batch, last_tokens, parts_of
from qwen3_io.progress import progress
from qwen3_io.errors import brief, parse_json
from qwen3_io.tensors import PackedTensor, StoredTensor, Tensor
from qwen3_io.writing import write_folder, write_safetensors, write_whole
from qwen3_kernels.layout import (APART, BF16, BIAS, BLOCK, EXPERT, F16, F32, FEW, GATE, GROUP, HEAD_NORMS, INT4, INT5,
                                  INT8, KV8, LARGEST, LINEAR, NAMES, NORMS, PANEL, PASS, Q4_1, Q5_1, SMALLEST, TILE,
                                  VERSION, Batch, Cache, Layers, Q, Space, Task, Weight, own_space, packed_shape,
                                  padded, unit_size)

try:
    from qwen3_kernels.compiled import Prepared, kept_kernels, kernels
    from qwen3_kernels.team import Team, available_cpus
except ImportError as error:
    if __name__ == "__main__":
        sys.exit(f"qwen3_numba.py: {error}")
    raise

__all__ = ["BUNDLED", "Answer", "Completion", "Config", "Engine", "InputError", "KVCache", "Model", "Sampling",
           "TokenLogprob", "Tokenizer", "__version__", "chat", "default_sampling", "engine", "forward", "generate",
           "generate_batch", "load_config", "load_model", "load_weights", "save_quantized", "score",
           "verify_quantized"]

# ----------------------------------------------------------------------------------------------------------------------
# Weights: as they lie in the file, or packed
# ----------------------------------------------------------------------------------------------------------------------

empty, zeros = np.empty, np.zeros  # what kernels write to; tests put pages behind it that mustn't be touched
STORED = {"F32": F32, "BF16": BF16, "F16": F16}  # by their names in safetensors
PACKED = {"int8": INT8, "int4": INT4}
NARROW = {2: Q4_1, 4: Q4_1, 5: Q5_1, 6: INT8}  # by the bits of a published packed matrix
MORE_BITS = {"v_proj": INT8, "o_proj": INT5, "embed_tokens": INT5, "lm_head": INT5}  # in an int4 model


def packed_form(name: str, quantize: str) -> int:
    """The format of a matrix in a quantized model: int4 keeps more bits where they lessen the error most per byte."""
    if is_router(name):
        return F32
    return MORE_BITS.get(name.split(".")[-2], INT4) if quantize == "int4" else PACKED[quantize]


def is_router(name: str) -> bool:
    """Whether a matrix is the router of a mixture of experts, which is small and keeps all its digits."""
    return name.endswith(".mlp.gate.weight")


@dataclass
class Weights:
    """Where the weights are: `layers` are the matrices of Layers in layout.py, and all up to `norm` are as there.

    The embedding is a Weight, too. `arrays` keeps alive what the addresses point to; `team`: the threads.
    """
    layers: np.ndarray
    forms: np.ndarray
    routers: np.ndarray
    experts: np.ndarray
    embedding: np.ndarray
    head: np.ndarray
    norms: np.ndarray
    head_norms: np.ndarray
    norm: np.ndarray
    arrays: list[np.ndarray]
    team: Team
    for_kernels: Prepared | None = None  # the Layers

    @property
    def form(self) -> str:
        """The name of the matrices' format; of most of them, if there are several."""
        return NAMES[self.layers[0, Q, 2]]

    def matrices(self, layer: int, sparse: bool) -> dict[str, np.ndarray]:
        """Name -> its row in `layers`, `routers` or `experts`, of each matrix of a layer."""
        start = f"model.layers.{layer}"
        rows = dict(zip(LINEAR[:GATE] if sparse else LINEAR, self.layers[layer]))
        if sparse:
            rows["mlp.gate"] = self.routers[layer]
            for expert, matrices in enumerate(self.experts[layer]):
                rows |= {f"mlp.experts.{expert}.{name}": row for name, row in zip(EXPERT, matrices)}
        return {f"{start}.{name}.weight": row for name, row in rows.items()}


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """uint8 zeros that begin where a line of the cache does, so that no vector lies in two."""
    size = int(np.prod(shape))
    space = zeros(size + 63, np.uint8)
    start = -space.ctypes.data % 64
    return space[start:start + size].reshape(shape)


def floats(*shape: int) -> np.ndarray:
    """float32 zeros that begin likewise."""
    return aligned((*shape[:-1], shape[-1] * 4)).view(np.float32)


class LargePages:
    """Zeros for packed matrices, cut from arrays so large that the system gives large pages: they are read faster."""
    LARGE = 64 << 20

    def __init__(self) -> None:
        self.space, self.used = aligned((0,)), 0

    def take(self, shape: tuple[int, int]) -> np.ndarray:
        size = shape[0] * shape[1]  # a multiple of 64
        if self.used + size > len(self.space):
            self.space, self.used = aligned((max(size, self.LARGE),)), 0
        self.used += size
        return self.space[self.used - size:self.used].reshape(shape)

    def give_back(self, last: np.ndarray) -> None:
        last[:] = 0
        self.used -= last.size


def to_float32(matrix: np.ndarray, form: int) -> np.ndarray:
    """Stored rows [rows, n] of one of the float formats as float32."""
    if form == BF16:
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix.astype(np.float32)


def quantize_matrix(name: str, tensor: Tensor, target: int, pages: LargePages, pool: ThreadPoolExecutor) -> np.ndarray:
    """A matrix [rows, n] -> packed blocks, uint8. Raises InputError for numbers the format can't hold."""
    n_rows, n = tensor.shape
    packed, together = pages.take(packed_shape(n_rows, n, target)), 8  # blocks

    def part(block: int) -> float:
        """Packs some blocks -> their largest weight."""
        w, work = np.zeros((together * PANEL, padded(n, 2 * GROUP)), np.float32), empty((10, PANEL), np.float32)
        start, stop = block * PANEL, min((block + together) * PANEL, n_rows)
        with np.errstate(over="ignore", invalid="ignore"):  # by infinite scales
            some = tensor.rows(start, stop) if isinstance(tensor, PackedTensor) else \
                to_float32(tensor.data[start:stop], STORED[tensor.dtype])
        if not np.isfinite(some).all():
            raise InputError(f"{name} has weights that are not finite, so it can't be quantized")
        w[:len(some), :n] = some
        for i, out in enumerate(packed[block:block + together]):
            columns = np.ascontiguousarray(w[i * PANEL:(i + 1) * PANEL].T)
            kernels().quantize_block(columns, target, out, work)
        return float(max(some.max(), -some.min()))

    largest = max(results(pool, part, range(0, len(packed), together)))
    if largest > LARGEST or 0 < largest < SMALLEST:
        raise InputError(f"{name} can't be quantized: its largest weight is {largest:.3g}, not between "
                         f"{SMALLEST:g} and {LARGEST:g}")
    checkpoint.forget_pages(tensor.mapping)
    return packed


def results(pool: ThreadPoolExecutor, part: Callable[[int], Any], starts: Iterable[int]) -> list[Any]:
    """part(start) of each start, by the threads of the pool. Raises InputError if they can't be started."""
    try:
        return list(pool.map(part, starts))
    except RuntimeError as error:
        raise InputError(f"threads can't be started to quantize ({error}); ask for fewer: --threads") from error


def whole_blocks(tensor: Tensor, form: int, pages: LargePages, pool: ThreadPoolExecutor) -> np.ndarray | None:
    """A published packed matrix as blocks of INT8, Q5_1 or Q4_1; None if the format can't hold its numbers.

    INT8 has the very numbers. So have the others if no scale has more than 10 bits behind the first one, as float16
    has; scales with more are rounded.
    """
    if not isinstance(tensor, PackedTensor) or tensor.whole is None:
        return None
    whole, (n_rows, n), step = tensor.whole, tensor.shape, 512
    packed, halves = pages.take(packed_shape(n_rows, n, form)), 1 if form == INT8 else 2
    units = packed.reshape(len(packed), -1, unit_size(form))

    def by_units(values: np.ndarray, dtype: type, each: int = 1) -> np.ndarray:
        """[rows, groups * each] -> [blocks, units, groups of a unit, 32 rows, each], filled up with zeros."""
        full = np.zeros((padded(len(values), PANEL), padded(n, 2 * GROUP) // GROUP * each), dtype)
        full[:len(values), :values.shape[1]] = values
        return full.reshape(len(full) // PANEL, PANEL, -1, halves, each).transpose(0, 2, 3, 1, 4)

    @np.errstate(over="ignore", invalid="ignore")  # by infinite scales
    def part(start: int) -> bool:
        """Packs some rows -> whether all their numbers fit."""
        numbers, scales, minima = whole(start, min(start + step, n_rows))
        groups = numbers.reshape(*scales.shape, -1)
        groups[scales == 0] = 0
        np.negative(groups, out=groups, where=(scales < 0)[..., None])
        scales = np.abs(scales).astype(np.float32)
        words = np.where(scales == 0, 0, scales.view(np.int32) - BIAS + 0x1000 & -0x2000)
        rounded = np.where(scales == 0, 0, (words + BIAS).astype(np.int32).view(np.float32))
        fits, least, most = minima is None and bool((rounded == scales).all()), -128, 127
        if form != INT8:
            lowest = np.minimum(groups.min(axis=-1), 0)
            groups -= lowest[..., None]
            minima = (rounded * lowest + (0 if minima is None else minima)).astype(np.float32)
            fits, least, most = bool(np.isfinite(minima).all()), 0, 31 if form == Q5_1 else 15
        if not fits or not np.isfinite(scales).all() or not 0 <= words.min() <= words.max() < 2**29 \
                or numbers.min() < least or numbers.max() > most:
            return False
        here, repeated = units[start // PANEL:(start + step) // PANEL], groups.shape[2] // GROUP
        flat = *here.shape[:2], -1
        here[..., :2 * PANEL * halves].view(np.uint16)[:] = \
            by_units(np.repeat(words >> 13, repeated, axis=1), np.uint16).reshape(flat)
        fours = by_units(numbers, np.uint8, GROUP).view(np.uint32).swapaxes(3, 4)  # four columns in one number
        if form == INT8:
            here[..., -1024:].view(np.uint32)[:] = (fours ^ np.uint32(0x80808080)).reshape(flat)
            return True
        here[..., 4 * PANEL:12 * PANEL].view(np.float32)[:] = \
            by_units(np.repeat(minima, repeated, axis=1), np.float32).reshape(flat)
        lower, fifths = fours & np.uint32(0x0F0F0F0F), fours >> np.uint32(4) & np.uint32(0x01010101)
        here[..., -1024:].view(np.uint32)[:] = (lower[:, :, 0] | lower[:, :, 1] << np.uint32(4)).reshape(flat)
        if form == Q5_1:
            bits = np.ascontiguousarray(fifths.swapaxes(2, 3)).view(np.uint8).reshape(flat)
            here[..., -1280:-1024] = np.packbits(bits, axis=-1, bitorder="little")
        return True

    fits = all(results(pool, part, range(0, n_rows, step)))
    checkpoint.forget_pages(tensor.mapping)
    if fits:
        return packed
    pages.give_back(packed)
    return None


def load_weights(path: Path, config: Config, quantize: str | None = None, threads: int | None = None) -> Weights:
    """The namesake of qwen3.load_weights: nothing is expanded. `quantize` is None, "int8" or "int4".

    A published packed matrix of 8 bits becomes INT8 where INT8 holds its very numbers, else the nearest BF16; one of 4
    or 5 bits Q4_1 or Q5_1 where these hold its numbers, else the nearest INT8, as one of 6 bits.
    """
    saved, packed = read_quantized(path, config)
    if saved is not None and quantize not in (None, saved):
        raise InputError(f"{path}: this checkpoint is {saved}, so it can't be made {quantize}")
    wish = quantize if saved is None else None
    stored: Mapping[str, Tensor] = packed if saved is not None else \
        checkpoint.map_weights(path, asdict(config), "BF16" if wish is None else "F32")
    kernels()  # before all that takes long
    team, shapes = Team(threads or available_cpus()), checkpoint.tensor_shapes(asdict(config))
    arrays, pages = list[np.ndarray](), LargePages()

    def place(name: str, in_f32: bool = False) -> np.ndarray:
        tensor, (rows, n) = stored[name], shapes[name]
        bits = tensor.bits if isinstance(tensor, PackedTensor) else 16
        target = packed_form(name, wish) if wish is not None else F32 if is_router(name) else \
            NARROW.get(bits, F32 if in_f32 else None)
        form = INT8 if target is None else target
        data = whole_blocks(tensor, form, pages, pool) if form in (INT8, Q5_1, Q4_1) else None
        if data is None and target is not None and target >= INT8:
            form = target = INT8 if target in (Q5_1, Q4_1) else target
            data = quantize_matrix(f"{path}: {name}", tensor, target, pages, pool)
        elif data is None:
            if isinstance(tensor, PackedTensor) and target == F32:
                tensor = tensor._replace(dtype="F32")
            data, form = tensor.data, STORED[tensor.dtype] if saved is None else packed_form(name, saved)
        target = form if target is None else target
        if target < INT8 and (n % 32 or target != form):  # steps of 32
            found, data = data, zeros((rows, padded(n, 32)), np.float32 if target == F32 else data.dtype)
            data[:, :n] = found if target == form else to_float32(found, form)
        arrays.append(data)
        return np.array(Weight(data.ctypes.data, data.strides[0], target, rows, n))

    n_layers = config.num_hidden_layers
    norm = np.array(checkpoint.to_float32(stored["model.norm.weight"]))

    def norms(names: tuple[str, ...]) -> np.ndarray:
        return np.array([[checkpoint.to_float32(stored[f"model.layers.{i}.{name}.weight"]) for name in names]
                         for i in range(n_layers)])

    with ThreadPoolExecutor(team.n_threads) as pool:
        embedding = place("model.embed_tokens.weight")
        head = place("lm_head.weight") if "lm_head.weight" in stored else embedding
        w = Weights(np.zeros((n_layers, len(LINEAR), 5), np.int64), np.zeros((n_layers, 2, 2), np.int64),
                    np.zeros((n_layers, 5), np.int64),
                    np.zeros((n_layers, config.num_experts, len(EXPERT), 5), np.int64), embedding, head,
                    norms(NORMS), norms(HEAD_NORMS), norm, arrays, team)
        numbers: Iterable[int] = range(n_layers)
        if wish is not None or any(isinstance(tensor, PackedTensor) for tensor in stored.values()):
            numbers = progress(numbers, "unpacking" if wish is None else f"quantizing to {wish}")
        for i in numbers:
            rows = w.matrices(i, i in config.sparse_layers)
            for behind, kinds in enumerate((("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))):
                names = [name for name in rows if name.split(".")[-2] in kinds]
                mixed = len({stored[name].dtype for name in names}) > 1  # BF16 wants the norm's output in its own order
                for name in names:
                    rows[name][:] = place(name, mixed and stored[name].dtype == "BF16")
                forms = [rows[name][2] for name in names]
                w.forms[i, behind] = min(forms), max(forms)
            for name, row in rows.items():
                if not row.any():
                    row[:] = place(name)
    w.for_kernels = kernels().decoder_layers.prepared(3, Layers(
        w.layers, w.norms, w.head_norms, w.norm, w.head, config.rms_norm_eps, w.forms, w.routers, w.experts,
        config.norm_topk_prob))
    if wish is None and not config.sparse_layers:
        touch_pages({id(tensor.mapping): tensor.mapping for tensor in stored.values()}.values())
    return w


def touch_pages(mappings: Iterable[mmap.mmap]) -> None:
    """Starts a thread that touches each page of mapped files: it takes 0.1 s per GB, beside the tokenizer.

    While the tokenizers library loads, no other thread runs Python; so the thread's work is one call of NumPy per file.
    """
    def touch() -> None:
        for mapping in mappings:
            np.frombuffer(mapping, np.uint8)[::mmap.PAGESIZE].max()

    with contextlib.suppress(RuntimeError):  # without another thread, the first pass touches them
        threading.Thread(target=touch, daemon=True).start()


def read_quantized(path: Path, config: Config) -> tuple[str | None, dict[str, StoredTensor]]:
    """("int8" or "int4", the tensors) of a folder written by save_quantized; (None, {}) for any other folder.

    Raises InputError unless each matrix is packed in this format, and each norm is there, with the right sizes. The
    numbers are not compared with their checksums, which would take time: see verify_quantized.
    """
    form, file = checkpoint.quantized_file(path) or (None, None)
    if form is None:
        return None, {}
    stored, sizes = checkpoint.map_quantized(file), about_quantized(file, form, "sizes")
    shapes = checkpoint.tensor_shapes(asdict(config))
    headless = checkpoint.EMBEDDING in stored
    if headless:  # with the names of an embedding model's own file
        stored = {f"model.{name}": tensor for name, tensor in stored.items()}
        sizes = {f"model.{name}": size for name, size in sizes.items()}
    if "lm_head.weight" not in stored and (headless or config.tie_word_embeddings):
        del shapes["lm_head.weight"]
    expected = {name: (list(shape), "U8", packed_shape(*shape, packed_form(name, form)))
                if len(shape) == 2 and packed_form(name, form) >= INT8 else (list(shape), "F32", shape)
                for name, shape in shapes.items()}
    found = {name: (sizes.get(name), tensor.dtype, tensor.data.shape) for name, tensor in stored.items()}
    if found != expected:
        raise InputError(f"{path}: the quantized weights don't fit config.json; quantize the model anew")
    return form, stored


def about_quantized(file: Path, form: str, key: str) -> dict[str, Any]:
    """What save_quantized has noted about each tensor: its "sizes", or its "crc32". Raises InputError."""
    with safetensors.safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata() or {}
    if (metadata.get("format"), metadata.get("version")) != (form, VERSION):
        raise InputError(f"{file}: written by another version of this program; quantize the model anew")
    about = parse_json(metadata.get(key, ""), f"{file}: {key}")
    if not isinstance(about, dict):
        raise InputError(f"{file}: damaged; quantize the model anew")
    return about


def verify_quantized(folder: str | Path) -> list[str]:
    """The names of damaged tensors in a folder written by save_quantized: their checksums differ.

    Reads the whole file. Raises InputError for any other folder, and for a file that isn't even readable.
    """
    form, file = checkpoint.quantized_file(Path(folder)) or (None, None)
    if form is None:
        raise InputError(f"{folder}: holds no quantized model, so there are no checksums to compare")
    stored, written = checkpoint.map_quantized(file), about_quantized(file, form, "crc32")
    wrong = sorted(written.keys() - stored.keys())
    for name in progress(stored, "verifying", unit=" tensors"):
        if crc32(stored[name].data) != written.get(name):
            wrong.append(name)
        checkpoint.forget_pages(stored[name].mapping)
    return wrong


def crc32(array: np.ndarray) -> str:
    return f"{zlib.crc32(array.reshape(-1).view(np.uint8)):08x}"


def save_quantized(model: Model, folder: str | Path, form: str) -> None:
    """Writes a model that was loaded with quantize=form as a checkpoint of its own, which then loads at once.

    The folder must not exist yet, and appears when all of it is written. Raises InputError when that can't be done.
    """
    w, shapes = model.weights, checkpoint.tensor_shapes(asdict(model.config))
    tensors, forms = packed_tensors(w)
    if form not in PACKED or any(found != packed_form(name, form) for name, found in forms.items()):
        raise InputError(f"{folder}: the model was not loaded as {brief(form)}")
    sizes = {name: shapes[name] for name in tensors}
    if checkpoint.is_headless(model.path):
        tensors = {name.removeprefix("model."): array for name, array in tensors.items()}
        sizes = {name.removeprefix("model."): size for name, size in sizes.items()}
    metadata = {"format": form, "version": VERSION, "sizes": json.dumps(sizes),
                "crc32": json.dumps({name: crc32(array) for name, array in tensors.items()})}

    def fill(temporary: Path) -> None:
        for name in MODEL_FILES:
            if file := checkpoint.model_file(model.path, name):
                data = file.read_bytes()
                write_whole(temporary / name, lambda out, data=data: out.write(data))
            elif (value := checkpoint.model_json(model.path, name)[1]) is not None:  # of a GGUF file
                data = json.dumps(value, ensure_ascii=False).encode()
                write_whole(temporary / name, lambda out, data=data: out.write(data))
        write_safetensors(temporary / f"model.{form}.safetensors", tensors, metadata)

    write_folder(folder, fill)


def packed_tensors(w: Weights) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """(name -> array, name -> the format of a matrix) of all that the engine keeps.

    A tied head is the embedding, and isn't named.
    """
    by_address = {array.ctypes.data: array for array in w.arrays}
    matrices, tensors = {"model.embed_tokens.weight": w.embedding}, {"model.norm.weight": w.norm}
    if w.head[0] != w.embedding[0]:
        matrices["lm_head.weight"] = w.head
    for i in range(len(w.layers)):
        matrices |= w.matrices(i, bool(w.routers[i, 3]))
        for name, norm in zip(NORMS + HEAD_NORMS, (*w.norms[i], *w.head_norms[i])):
            tensors[f"model.layers.{i}.{name}.weight"] = norm
    for name, row in matrices.items():
        array = by_address[row[0]]
        tensors[name] = array if row[2] >= INT8 else array[:, :row[4]]
    return tensors, {name: int(row[2]) for name, row in matrices.items()}


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja")


# ----------------------------------------------------------------------------------------------------------------------
# KV cache and forward
# ----------------------------------------------------------------------------------------------------------------------

class KVCache(qwen3.KVCache):
    """qwen3.KVCache with 16 bits per number, heads filled up with zeros to a multiple of 32 numbers.

    k, v uint16 [n_layers, batch, n_kv_heads, capacity, row_size].
    """
    form, stored, units = "f16", F16, 1  # units: of 16 bits, for each number

    def __init__(self, config: Config, max_length: int | None = None, batch: int = 1):
        super().__init__(config, max_length, batch)
        shape = (*self.k.shape[:4], int(padded(config.head_dim, 32) * self.units))
        self.k, self.v = empty(shape, np.uint16), empty(shape, np.uint16)
        self.space: Prepared | None = None  # of the last pass

    def work_space(self, model: Model, m: int, n_tasks: int, n_queries: int) -> Prepared:
        """The Space for m tokens, n_tasks tasks and n_queries queries of a task; kept, and used again if it fits."""
        config, n_threads = model.config, model.weights.team.n_threads
        if self.space is not None:
            h, own, partials = self.space.fields.h, self.space.fields.own, self.space.fields.partials
            if (len(h), len(own)) == (m, n_threads) and len(partials) >= n_tasks and partials.shape[2] >= n_queries:
                return self.space
            self.space = None  # before the next one, for the sake of memory
        n_heads, n_kv_heads, width = config.num_attention_heads, config.num_key_value_heads, padded(config.head_dim, 32)
        gathered, k, n_experts = padded(config.hidden_size, 64), config.num_experts_per_tok, config.num_experts
        widest = padded(max(config.hidden_size, n_heads * config.head_dim), 64)
        dense = config.num_hidden_layers > len(config.sparse_layers)
        inner = padded(max(config.intermediate_size * dense, config.moe_intermediate_size), 64)
        n_qkv = padded(n_heads * config.head_dim, PANEL) + 2 * padded(n_kv_heads * config.head_dim, PANEL)
        n_rows, n_pairs = max(m, m * k), m * k
        space = Space(floats(m, widest + APART), empty((m, widest * 5 // 4), np.uint8),
                      floats(m, max(n_qkv, widest, padded(n_experts, PANEL))),
                      floats(n_kv_heads, m * (n_heads // n_kv_heads), width), floats(n_rows, inner + APART),
                      floats(n_rows, inner + APART), empty((n_rows, inner * 5 // 4), np.uint8),
                      floats(n_tasks, n_kv_heads, n_queries, width + 16),
                      floats(n_threads, own_space(n_queries, width, max(widest, inner))),
                      floats(n_pairs, gathered + APART), empty((n_pairs, gathered * 5 // 4), np.uint8),
                      empty((m, k), np.int64), floats(m, k), empty(n_experts + 2, np.int64))
        self.space = kernels().decoder_layers.prepared(-1, space)
        return self.space


class Bf16Cache(KVCache):
    """The same in bfloat16: fewer digits, but no value is too large."""
    form, stored, units = "bf16", BF16, 1


class F32Cache(KVCache):
    """float32, as in qwen3.py: all digits, for twice the memory."""
    form, stored, units = "f32", F32, 2


class Int8Cache(KVCache):
    """Bytes, with a float16 scale for each 32 of them: little more than half the memory."""
    form, stored, units = "int8", KV8, 1 / 2 + 1 / GROUP


CACHES = {cache.form: cache for cache in (KVCache, Bf16Cache, F32Cache, Int8Cache)}
MOST = {"f16": 65504, "int8": 127 * 65504}  # the largest number that such a cache holds


def matrix_rows(matrix: np.ndarray, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Rows of the embedding or the head as float32: ids [n] -> [n, hidden_size]."""
    x = empty((len(ids), matrix[4]), np.float32)
    for row, token in zip(x, ids):
        kernels().weight_row(matrix, token, row)
    return x


def run_layers(model: Model, ids: np.ndarray, cache: KVCache, sequences: np.ndarray, positions: np.ndarray,
               wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs tokens ids [m] of these sequences of the cache, in order, through all layers.

    -> (x [m, hidden_size], logits [n, vocab_size] of the tokens `wanted` [n])
    """
    config, w, m = model.config, model.weights, len(ids)
    group = config.num_attention_heads // config.num_key_value_heads
    cos, sin = rope_tables(config, positions)
    tasks, tiles = attention_tasks(sequences, positions, group)
    x = matrix_rows(w.embedding, ids)
    space = cache.work_space(model, m, len(tasks), max(task.n for task in tasks) * group)
    logits = empty((len(wanted), padded(config.vocab_size, PANEL)), np.float32)
    batch = Batch(x, cos, sin, np.stack([sequences, positions], axis=1), np.array(tasks), np.array(tiles), wanted,
                  logits)
    filled = Cache(cache.k, cache.v, cache.stored)
    n_layers, step = config.num_hidden_layers, max(1, PASS // m)
    for first in range(0, n_layers, step):
        w.team.run(kernels().decoder_layers, w, first, min(first + step, n_layers), w.for_kernels, batch, filled, space)
    return x, logits[:, :config.vocab_size]


def attention_tasks(sequences: np.ndarray, positions: np.ndarray,
                    group: int) -> tuple[list[Task], list[tuple[int, int]]]:
    """(Tasks, (first, last + 1) of the tasks for the same tokens) for new tokens at these positions."""
    tasks, tiles = [], []
    for sequence, part in parts_of(sequences):
        few = part.stop - part.start <= FEW
        step = part.stop - part.start if few else max(1, TILE // group)
        for row in range(part.start, part.stop, step):
            n, seen = min(step, part.stop - row), int(positions[row]) + 1
            n_blocks, before = -(-(seen + n - 1) // BLOCK), len(tasks)
            here = (sequence, row, n, seen)
            tasks += [Task(*here, block, 1) for block in range(n_blocks)] if few else [Task(*here, 0, n_blocks)]
            tiles.append((before, len(tasks)))
    return tasks, tiles


def forward(model: Model, token_ids: TokenIds, cache: qwen3.KVCache, all_logits: bool = False) -> np.ndarray:
    """The namesake of qwen3.forward.

    A token's logits depend on the tokens before it and on nothing else, bit for bit. Raises InputError for a model or a
    cache of qwen3.py, too.
    """
    logits = [some for _, some in passes(model, token_ids, cache, None if all_logits else last_tokens(token_ids))]
    result = logits[0] if len(logits) == 1 else np.concatenate(logits)
    return result if all_logits or is_batch(token_ids) else result[0]


@np.errstate(over="ignore", invalid="ignore")
def hidden_states(model: Model, token_ids: TokenIds, cache: qwen3.KVCache) -> np.ndarray:
    """The namesake of qwen3.hidden_states."""
    return np.concatenate([rms_norm(x, model.weights.norm, model.config.rms_norm_eps)
                           for x, _ in passes(model, token_ids, cache, np.empty(0, np.int64))])


def passes(model: Model, token_ids: TokenIds, cache: qwen3.KVCache,
           wanted: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs new tokens through all layers and adds them to the cache, CHUNK or fewer of them in a pass.

    -> (x [m, hidden_size], logits [n, vocab_size]) of each pass, the logits of tokens `wanted` among all, None: of all.
    """
    if not isinstance(model.weights, Weights):
        raise InputError("qwen3_numba.forward needs a model of qwen3_numba, not of qwen3")
    ids, sequences = checked_batch(token_ids, cache, model.config, np.uint16)
    positions = cache.reserve(sequences)
    for start in range(0, len(ids), qwen3.CHUNK):
        now = slice(start, start + qwen3.CHUNK)
        here = np.arange(len(ids))[now] if wanted is None else wanted[(wanted >= start) & (wanted < now.stop)]
        result = run_layers(model, ids[now], cache, sequences[now], positions[now], here - start)
        cache.advance(sequences[now], positions[now], ids[now])
        yield result


def engine(quantize: str | None = None, threads: int | None = None, kv_dtype: str = "f16") -> Engine:
    """The Engine for qwen3.load_model. Raises InputError for unknown values."""
    if quantize not in (None, *PACKED):
        raise InputError(f"quantize must be int8 or int4, not {quantize!r}")
    if kv_dtype not in CACHES:
        raise InputError(f"kv_dtype must be {', '.join(CACHES)}, not {kv_dtype!r}")
    checked_whole("threads", threads, 1)
    overflow = {"overflow": f"a key or value is probably too large for the {kv_dtype} cache, which holds numbers up to "
                            f"{MOST[kv_dtype]}: try --kv-dtype bf16"} if kv_dtype in MOST else {}
    return Engine(lambda path, config: load_weights(path, config, quantize, threads), CACHES[kv_dtype], forward,
                  hidden_states, lambda model, token_ids: matrix_rows(model.weights.head, token_ids), quantize is None,
                  **overflow)


def load_model(name: str | Path, quantize: str | None = None, threads: int | None = None, kv_dtype: str = "f16",
               offline: bool = False, tokenizer: bool = True, adapter: str | Path | None = None) -> Model:
    """The namesake of qwen3.load_model.

    quantize: None (weights stay as in the file), "int8" or "int4"; threads: None takes all available CPUs;
    kv_dtype: "f16", "bf16", "f32" or "int8", the number format of keys and values.
    """
    return qwen3.load_model(name, engine(quantize, threads, kv_dtype), offline, tokenizer, adapter)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of qwen3.py with this engine, and with options of its own."""
    from llvmlite.binding import get_host_cpu_name
    from qwen3_app import cli
    from qwen3_app.models import named_model, readable_size, report_damage, size_on_disk, verify_cached
    from qwen3_app.terminal import note
    parser = cli.make_parser()
    add = parser.add_argument_group("the fast engine").add_argument
    add("--quantize", choices=["int8", "int4"], help="8 or 4 bits a weight: up to 2 or 3.5 times as fast as bfloat16")
    add("--save-quantized", metavar="DIR", help="write the quantized model into a new folder, which loads at once")
    add("--threads", type=int, metavar="N", help="how many threads compute (default: the CPUs that may be used)")
    add("--compile", action="store_true", help="only compile the kernels for this CPU, for an image that can't be "
                                               "written to at run time")
    add("--kv-dtype", choices=list(CACHES), default="f16", help="format of keys and values (default: %(default)s)")

    def save(args: argparse.Namespace, engine: Engine) -> None:
        if args.quantize is None:
            raise InputError("--save-quantized needs --quantize int8 or --quantize int4")
        save_quantized(cli.load(args, engine), args.save_quantized, args.quantize)
        size = readable_size(size_on_disk(Path(args.save_quantized)))
        note(f"Written: {args.save_quantized}, {size}, {args.quantize}. It loads with --model {args.save_quantized}")

    def compile_ahead(args: argparse.Namespace, engine: Engine) -> None:
        note(f"Compiled for {get_host_cpu_name()}: {kept_kernels()}")

    def verify(args: argparse.Namespace, engine: Engine) -> None:
        folder = Path(named_model(args) or BUNDLED)
        if checkpoint.quantized_file(folder) is None:
            verify_cached(args, engine)
        else:
            report_damage(folder, verify_quantized(folder))

    return cli.main(argv, parser, lambda args: engine(args.quantize, args.threads, args.kv_dtype),
                    {"save_quantized": save, "verify": verify, "compile": compile_ahead})


if __name__ == "__main__":
    sys.exit(main())
