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
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

import qwen3
from qwen3 import (BUNDLED, Answer, Completion, Config, Engine, InputError, Model, Sampling, TokenLogprob, Tokenizer,
                   __version__, chat, default_sampling, generate, generate_batch, load_config, rope_tables, score)
from qwen3_io import checkpoint
from qwen3_io.arguments import checked_batch, checked_whole
from qwen3_io.checkpoint import StoredTensor
from qwen3_io.progress import progress
from qwen3_io.errors import brief, parse_json
from qwen3_io.writing import write_folder, write_safetensors, write_whole
from qwen3_kernels.layout import (BF16, CACHE8, DEPTH, FEW, FLOAT16, FLOAT32, GROUP, INT4, INT8, LARGEST, LINEAR,
                                  LONG_PART, PANEL, PANELS, SHORT_PART, SMALLEST, VERSION, packed_shape, padded,
                                  space_size)

try:
    from qwen3_kernels.compiled import kernels
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
    space = zeros(size + 64, np.uint8)
    start = -space.ctypes.data % 64
    return space[start:start + size].reshape(shape)


def to_float32(matrix: np.ndarray, form: int) -> np.ndarray:
    """Stored rows [rows, n] of one of the float formats as float32."""
    if form == BF16:
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix.astype(np.float32)


def quantize_matrix(name: str, rows: np.ndarray, form: int, target: int, pool: ThreadPoolExecutor) -> np.ndarray:
    """Stored rows of floats [rows, n] -> packed blocks, uint8. Raises InputError for numbers the format can't hold."""
    n_rows, n = rows.shape
    packed, together = aligned(packed_shape(n_rows, n, target)), 8  # blocks

    def part(block: int) -> float:
        """Packs some blocks -> their largest weight."""
        w = np.zeros((together * PANEL, padded(n, 2 * GROUP)), np.float32)
        some = to_float32(rows[block * PANEL:(block + together) * PANEL], form)
        if not np.isfinite(some).all():
            raise InputError(f"{name} has weights that are not finite, so it can't be quantized")
        w[:len(some), :n] = some
        for i, out in enumerate(packed[block:block + together]):
            kernels().quantize_block(w[i * PANEL:(i + 1) * PANEL], 8 if target == INT8 else 4, out)
        return float(max(some.max(), -some.min()))

    try:
        largest = max(pool.map(part, range(0, len(packed), together)))
    except RuntimeError as error:
        raise InputError(f"threads can't be started to quantize ({error}); ask for fewer: --threads") from error
    if largest > LARGEST[target] or 0 < largest < SMALLEST:
        raise InputError(f"{name} can't be quantized: its largest weight is {largest:.3g}, and scales are float16")
    return packed


def load_weights(path: Path, config: Config, quantize: str | None = None, threads: int | None = None) -> Weights:
    """The namesake of qwen3.load_weights: nothing is expanded. `quantize` is None, "int8" or "int4"."""
    if config.num_experts:
        raise InputError(f"{path}: a mixture of experts, which the fast engine doesn't run yet; qwen3.py does")
    saved, stored = read_quantized(path, config)
    if saved is None:
        stored = checkpoint.map_weights(path, asdict(config))
    elif quantize not in (None, saved):
        raise InputError(f"{path}: this checkpoint is {saved}, so it can't be made {quantize}")
    else:
        quantize = None
    kernels()  # before all that takes long
    team, shapes, arrays = Team(threads or available_cpus()), checkpoint.tensor_shapes(asdict(config)), []

    def place(name: str) -> np.ndarray:
        tensor, (rows, n) = stored[name], shapes[name]
        data, form = tensor.data, FORMATS.get(tensor.dtype, PACKED.get(saved))
        if quantize is not None:
            data, form = quantize_matrix(f"{path}: {name}", data, form, PACKED[quantize], pool), PACKED[quantize]
            checkpoint.forget_pages(tensor.mapping)
        elif form < INT8 and n % 32:  # the kernels go in steps of 32
            data = zeros((rows, padded(n, 32)), data.dtype)
            data[:, :n] = tensor.data
        arrays.append(data)
        return np.array([data.ctypes.data, data.strides[0], form, rows, n])

    layers = np.zeros((config.num_hidden_layers, len(LINEAR), 5), np.int64)
    with ThreadPoolExecutor(team.n_threads) as pool:
        embedding = place("model.embed_tokens.weight")
        head = place("lm_head.weight") if "lm_head.weight" in stored else embedding
        numbers: Iterable[int] = range(config.num_hidden_layers)
        if quantize is not None:
            numbers = progress(numbers, f"quantizing to {quantize}")
        for i in numbers:
            for j, name in enumerate(LINEAR):
                layers[i, j] = place(f"model.layers.{i}.{name}.weight")

    def norms(*names: str) -> np.ndarray:
        return np.array([[checkpoint.to_float32(stored[f"model.layers.{i}.{name}.weight"]) for name in names]
                         for i in range(config.num_hidden_layers)])

    norm = np.array(checkpoint.to_float32(stored["model.norm.weight"]))
    return Weights(layers, embedding, head, norms("input_layernorm", "post_attention_layernorm"),
                   norms("self_attn.q_norm", "self_attn.k_norm"), norm, arrays, team)


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
    if "lm_head.weight" not in stored and config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    expected = {name: (list(shape), "U8", packed_shape(*shape, PACKED[form])) if len(shape) == 2
                else (list(shape), "F32", shape) for name, shape in shapes.items()}
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
    if PACKED.get(form) != w.form:
        raise InputError(f"{folder}: the model was not loaded as {brief(form)}")
    tensors = packed_tensors(w)
    sizes = {name: shapes[name] for name in tensors}
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


def packed_tensors(w: Weights) -> dict[str, np.ndarray]:
    """Name -> array of all that the engine keeps. A tied head is the embedding, and isn't named."""
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
    return tensors


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja")


# ----------------------------------------------------------------------------------------------------------------------
# KV cache and forward
# ----------------------------------------------------------------------------------------------------------------------

class KVCache(qwen3.KVCache):
    """qwen3.KVCache with 16 bits per number, heads filled up with zeros to a multiple of 32 numbers.

    k, v uint16 [n_layers, batch, n_kv_heads, capacity, row_size].
    """
    form, stored_as = FLOAT16, "f16"

    def __init__(self, config: Config, max_length: int | None = None, left_padding: Sequence[int] | None = None):
        super().__init__(config, max_length, left_padding)
        shape = (*self.k.shape[:4], self.row_size(padded(config.head_dim, 32)))
        self.k, self.v = empty(shape, np.uint16), empty(shape, np.uint16)

    @staticmethod
    def row_size(n: int) -> int:
        """The size of a row of n numbers, in units of 16 bits."""
        return n


class Bf16Cache(KVCache):
    """The same in bfloat16: fewer digits, but no value is too large."""
    form, stored_as = BF16, "bf16"


class F32Cache(KVCache):
    """float32, as in qwen3.py: all digits, for twice the memory."""
    form, stored_as = FLOAT32, "f32"

    @staticmethod
    def row_size(n: int) -> int:
        return 2 * n


class Int8Cache(KVCache):
    """Bytes, with a float16 scale for each 32 of them: little more than half the memory."""
    form, stored_as = CACHE8, "int8"

    @staticmethod
    def row_size(n: int) -> int:
        return n // 2 + n // GROUP


CACHES = {"f16": KVCache, "bf16": Bf16Cache, "f32": F32Cache, "int8": Int8Cache}
MOST = {"f16": 65504, "int8": 127 * 65504}  # the largest number that such a cache holds


def embed(weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Rows of the embedding as float32: ids [n] -> [n, hidden_size]."""
    x = empty((len(ids), weights.embedding[4]), np.float32)
    for row, token in zip(x, ids):
        kernels().weight_row(weights.embedding, token, row)
    return x


APART = 16  # numbers between two vectors: without them, many would fall on the same few lines of a core's first cache


def run_layers(model: Model, ids: np.ndarray, cache: KVCache) -> np.ndarray:
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
    work = (zeros((m, widest + APART), f32), empty((m, widest * 5 // 4), np.uint8),
            empty((m, max(padded(q_size, PANEL) + 2 * padded(kv_size, PANEL), widest)), f32),
            zeros((n_heads, m, width), f32),
            zeros((2, m, inner + APART), f32), empty((m, inner * 5 // 4), np.uint8),
            empty((m, n_heads, parts, width + 2), f32),
            empty((w.team.n_threads, space_size(n_heads // config.num_key_value_heads, width)), f32))
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
    logits = empty((len(x), padded(config.vocab_size, PANEL)), np.float32)
    space = empty((w.team.n_threads, PANELS * DEPTH * PANEL), np.float32)
    h, packed = zeros((len(x), width), np.float32), empty((len(x), width * 5 // 4), np.uint8)
    w.team.run(kernels().output_logits, w, x, w.norm, config.rms_norm_eps, w.head, h, packed, logits, space)
    return logits[:, :config.vocab_size]


def forward(model: Model, token_ids: Sequence[int] | np.ndarray, cache: qwen3.KVCache,
            all_logits: bool = False) -> np.ndarray:
    """The namesake of qwen3.forward. Raises InputError for a model or a cache of qwen3.py."""
    config = model.config
    if not isinstance(model.weights, Weights) or not isinstance(cache, KVCache):
        raise InputError("qwen3_numba.forward needs a model and a KVCache of qwen3_numba, not of qwen3")
    ids = checked_batch(token_ids, cache.k.shape[1], config.vocab_size)
    batch, n = ids.shape
    cache.reserve(n)
    logits = empty((batch, n if all_logits else 1, config.vocab_size), np.float32)
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
    """The Engine for qwen3.load_model. Raises InputError for unknown values."""
    if quantize not in (None, *PACKED):
        raise InputError(f"quantize must be int8 or int4, not {quantize!r}")
    if kv_dtype not in CACHES:
        raise InputError(f"kv_dtype must be {', '.join(CACHES)}, not {kv_dtype!r}")
    checked_whole("threads", threads, 1)
    overflow = {"overflow": f"a key or value is probably too large for the {kv_dtype} cache, which holds numbers up to "
                            f"{MOST[kv_dtype]}: try --kv-dtype bf16"} if kv_dtype in MOST else {}
    return Engine(lambda path, config: load_weights(path, config, quantize, threads), CACHES[kv_dtype], forward,
                  **overflow)


def load_model(name: str | Path, quantize: str | None = None, threads: int | None = None, kv_dtype: str = "f16",
               offline: bool = False, tokenizer: bool = True) -> Model:
    """The namesake of qwen3.load_model.

    quantize: None (weights stay as in the file), "int8" or "int4"; threads: None takes all available CPUs;
    kv_dtype: "f16", "bf16", "f32" or "int8", the number format of keys and values.
    """
    return qwen3.load_model(name, engine(quantize, threads, kv_dtype), offline, tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of qwen3.py with this engine, and with options of its own."""
    from qwen3_app import cli
    from qwen3_app.models import named_model, readable_size, report_damage, size_on_disk, verify_cached
    from qwen3_app.terminal import note
    parser = cli.make_parser()
    add = parser.add_argument_group("the fast engine").add_argument
    add("--quantize", choices=["int8", "int4"], help="8 or 4 bits a weight: up to 2 or 3.5 times as fast as bfloat16")
    add("--save-quantized", metavar="DIR", help="write the quantized model into a new folder, which loads at once")
    add("--threads", type=int, metavar="N", help="how many threads compute (default: the CPUs that may be used)")
    add("--kv-dtype", choices=list(CACHES), default="f16", help="format of keys and values (default: %(default)s)")

    def save(args: argparse.Namespace, engine: Engine) -> None:
        if args.quantize is None:
            raise InputError("--save-quantized needs --quantize int8 or --quantize int4")
        save_quantized(cli.load(args, engine), args.save_quantized, args.quantize)
        size = readable_size(size_on_disk(Path(args.save_quantized)))
        note(f"Written: {args.save_quantized}, {size}, {args.quantize}. It loads with --model {args.save_quantized}")

    def verify(args: argparse.Namespace, engine: Engine) -> None:
        folder = Path(named_model(args) or BUNDLED)
        if checkpoint.quantized_file(folder) is None:
            verify_cached(args, engine)
        else:
            report_damage(folder, verify_quantized(folder))

    return cli.main(argv, parser, lambda args: engine(args.quantize, args.threads, args.kv_dtype),
                    {"save_quantized": save, "verify": verify})


if __name__ == "__main__":
    sys.exit(main())
