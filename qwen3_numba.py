# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "threadpoolctl>=3.5", "numba>=0.62"]
# ///
"""Qwen3 at the speed of the memory: the functions of qwen3.py that the memory limits, compiled at their first use.

    python qwen3_numba.py "What is the capital of France?"                the same as qwen3.py --fast

Each new token needs every weight once, and a processor multiplies faster than its memory delivers, so a token takes the
time to read its weights. From that follows the design:

    fewer bytes      weights stay bfloat16 as in the file, or become 8 or 4 bits; keys and values are 16, 8 or 32 bits
    full bandwidth   each core reads its share of the rows as one stream, without gaps
    nothing else     one job for the threads per token: they share pieces of it and never wait for Python in between

Every public name of qwen3.py is here, too; a function with a namesake in qwen3.py does the same. The room below is
qwen3_lib/kernels/:

    layout.py      how weights and the cache lie in memory
    cpu.py         the instructions that this CPU has
    vectors.py     the products with weights, in the language of LLVM; attention.py: those with keys and values
    passes.py      a pass of new tokens: what the kernels get, and which of them run
    products.py    which functions of them a pass needs; ways.py: which way is the fastest for one vector
    layers.py      the kernels, in the order of forward; fields.py: how they find their arrays
    experts.py     the kernel of a mixture of experts; slots.py, disk.py: of one that is larger than the memory
    kind.py        what differs between model types: dense.py; hybrid.py for Qwen3.5, whose kernel is delta.py; and
                   flash.py for Qwen3.8-Flash-Next, whose kernels are streams.py and sparse.py; speaking.py for
                   Qwen3-TTS, whose code predictor's kernel is codes.py
    intrinsics.py  what numba can't say in Python
    quantize.py    the kernels that pack weights
    compile.py     numba compiles kernels: a program of its own, for the first run; translate.py: how numba is used
    build.py       machine code kept between runs
    packing.py     tensors of a file become matrices in memory
    weights.py     which matrix takes which format, and where kernels find it
    memory.py      aligned arrays, and the space that kernels work in
    team.py        the threads; crew.py: how they share the work of a kernel, and wait
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__" and None in map(find_spec, ("qwen3", "qwen3_lib")):
    sys.exit("qwen3_numba.py: it needs qwen3.py and the folder qwen3_lib beside it")

import qwen3  # first: it says in one line what is missing
import numpy as np

from qwen3 import (BUNDLED, Config, Engine, InputError, Model, Pass, Sampling, Sequence, Source, Tensor, Tokenizer,
                   __version__, chat, checked_whole, default_sampling, embed_tokens, forward, generate, rms_norm,
                   rope_tables, to_float32)
from qwen3_lib.io.cores import at_once, available_cpus, in_background, with_threads
from qwen3_lib.io.disk import available_memory, from_disk, stays
from qwen3_lib.io.progress import progress
from qwen3_lib.io.tensors import BY_ROWS, PackedTensor

try:
    from qwen3_lib.kernels.build import make_kernels
    from qwen3_lib.kernels.cpu import check_path
    from qwen3_lib.kernels.disk import ExpertFile
    from qwen3_lib.kernels.kind import kind_for, steps_of
    from qwen3_lib.kernels.layout import BF16, F16, F32, GROUP, KV8, ROUNDED, ROW, is_packed, padded
    from qwen3_lib.kernels.memory import aligned, in_memory
    from qwen3_lib.kernels.packing import PACKED, Packer, as_packed, bytes_of, forms_of, matrix_rows
    from qwen3_lib.kernels.passes import batch_of, run_layers
    from qwen3_lib.kernels.products import compile_all
    from qwen3_lib.kernels.speaking import drawing
    from qwen3_lib.kernels.team import team_of
    from qwen3_lib.kernels.ways import ways_for, ways_table
    from qwen3_lib.kernels.weights import (Weights, build_layers, bytes_in, choose_formats, has_head, may_move,
                                           mtp_head, stored_tensors, take_slots, touch_pages, with_heads)
except ImportError as error:
    if __name__ == "__main__":
        sys.exit(f"qwen3_numba.py: {error}")
    raise

__all__ = ["BUNDLED", "Config", "Engine", "InputError", "KVCache", "Model", "Sampling", "Sequence", "Tokenizer",
           "__version__",
           "chat", "compile_all", "default_sampling", "engine", "forward", "generate", "load_model", "load_weights",
           "ways_table"]

# ---- Weights: as they lie in the file, or packed ---------------------------------------------------------------------

def load_weights(source: Source, quantize: str | None = None, threads: int | None = None,
                 activations: str = "bf16") -> Weights:
    """The namesake of qwen3.load_weights: nothing is expanded. `quantize` is None, "int8" or "int4".

    With activations "bf16", vectors are rounded to bf16 before they are multiplied with a matrix of BF16. With "f32",
    a matrix that an adapter has changed becomes F32: rounded to BF16, many of a small adapter's changes would be lost.

    A published packed matrix of 6 or 8 bits becomes INT8 or Q8_1 where these hold its very numbers, else the nearest
    BF16; one of fewer bits Q4_0, Q4_1 or Q5_1 where these hold its numbers, else the nearest INT8; GGUF's Q4_K, Q5_K
    and Q6_K stay as they are.
    """
    saved, kind, config = source.saved, kind_for(source.kind), source.config
    if saved is not None and quantize not in (None, saved.format):
        raise InputError(f"{source.path}: this checkpoint is {saved.format}, so it can't be made {quantize}")
    quantize = quantize and source.kind.fewest or quantize
    shapes, stored = stored_tensors(source)
    format = saved.format if saved else quantize
    if activations == "f32":
        stored = {name: tensor._replace(bits=32) if isinstance(tensor, PackedTensor) and tensor.bits == 16 else tensor
                  for name, tensor in stored.items()}
    unpacks = any(isinstance(tensor, PackedTensor) for tensor in stored.values())
    packs = quantize or unpacks
    make_kernels(steps_of(kind, config), *[("quantize.quantize_block",)] * bool(quantize),
                 *[("quantize.pack_block",)] * unpacks)
    team, arrays = team_of(threads or available_cpus()), list[np.ndarray]()
    vectors = {name: np.array(to_float32(tensor)) for name, tensor in stored.items() if len(shapes[name]) != 2}
    matrices, formats, experts = {}, choose_formats(kind, config, stored, format), None
    packs, plan = saved is None and packs, formats.items()
    disk = from_disk(config, as_packed(formats, shapes) if packs else stored, available_memory())
    if packs:
        plan = progress(plan, f"quantizing to {quantize}" if quantize else "unpacking")
        if disk is not None and disk.fits:
            experts = ExpertFile(source.path, sum(bytes_of(forms, shapes[name]) + 64 for name, forms in formats.items()
                                                  if ".experts." in name))
    if disk is not None and sys.stderr is not None:
        print(f"{source.path}: {disk}{f', packed into a file in {experts.folder}' if experts else ''}", file=sys.stderr)
    with ThreadPoolExecutor(team.n_threads) as pool:
        packer = Packer(pool, arrays)
        if saved is not None:
            [*pool.map(saved.check, *zip(*stored.items()))]
        for name, forms in plan:
            tensor, shape = stored[name], shapes[name]
            if disk is not None and disk.fits and not packs and stays(name, stored):
                tensor = tensor._replace(data=in_memory(tensor.data))
            matrices[name] = packer.kept(tensor.data, forms[0], *shape) if tensor.dtype == "U8" else \
                packer.weight(f"{source.path}: {name}", tensor, forms, shape)
            if experts is not None and ".experts." in name:
                matrices[name] = packer.moved(matrices[name], experts)
    for matrix in matrices.values() if activations == "bf16" else ():
        matrix["form"][matrix["form"] == BF16] = ROUNDED
    weights = Weights(kind, config, matrices, vectors, shapes, arrays, build_layers(kind, config, matrices, vectors),
                      team, format, ways_for(bytes_in(matrices.values())), tables=kind.tables(source),
                      in_files={name: tensor for name, tensor in stored.items() if BY_ROWS in name})
    mappings = {id(tensor.mapping): tensor.mapping for tensor in stored.values()}.values()
    if format is None and not packs and not config.sparse_layers:
        touch_pages(mappings)
        may_move(weights, mappings)
    if has_head(kind, config, matrices):
        weights = replace(weights, mtp=mtp_head(weights))
    if disk is not None and disk.fits:
        take_slots(weights, disk.for_experts, [*mappings, *([experts.mapping] if experts else [])])
    return weights


# ---- KV cache and forward --------------------------------------------------------------------------------------------

class KVCache(qwen3.KVCache):
    """qwen3.KVCache with 16 bits per number, heads filled up with zeros to a multiple of 32 numbers.

    k, v uint16 [n_layers, n_kv_heads, capacity, row_size].
    """
    dtype, stored, units = "f16", F16, 1.0  # units: of 16 bits, for each number
    kind = "of the fast engine"

    def __init__(self, config: Config, max_length: int | None = None):
        super().__init__(config, max_length)
        shape = (*self.k.shape[:3], int(padded(config.head_dim, 32) * self.units))
        self.k, self.v = np.empty(shape, np.uint16), np.empty(shape, np.uint16)

    def _resized(self, old: np.ndarray, capacity: int) -> np.ndarray:
        new = aligned((*old.shape[:2], capacity, old.itemsize * old.shape[3])).view(old.dtype)
        new[:, :, :self.length] = old[:, :, :self.length]
        return new


class Bf16Cache(KVCache):
    """The same in bfloat16: fewer digits, but no value is too large."""
    dtype, stored = "bf16", BF16


class RoundedCache(KVCache):
    """Bf16Cache for attention that rounds queries and the softmax's weights to bf16, too."""
    dtype, stored = "rounded-bf16", ROUNDED


class F32Cache(KVCache):
    """float32, as in qwen3.py: all digits, for twice the memory."""
    dtype, stored, units = "f32", F32, 2


class Int8Cache(KVCache):
    """Bytes, with a float16 scale for each 32 of them: little more than half the memory."""
    dtype, stored, units = "int8", KV8, 1 / 2 + 1 / GROUP


CACHES = {cache.dtype: cache for cache in (KVCache, Bf16Cache, RoundedCache, F32Cache, Int8Cache)}
KV_DTYPES = "f16", "bf16", "f32", "int8"
ACTIVATIONS = "f32", "bf16"  # to which vectors may be rounded before they are multiplied with weights of bf16
LARGEST_CACHED = {"f16": 65504, "int8": 127 * 65504}  # the largest number that such a cache holds
STEPS = {"f16": 1024, "int8": 128}  # float16 is counted in steps of 2^-24; a number or a scale of fewer loses digits


@np.errstate(over="ignore", invalid="ignore")
def run_pass(model: Model, new: Pass) -> tuple[np.ndarray, np.ndarray]:
    """The namesake of qwen3.run_pass; without new.states, there are no hidden states, [0, hidden_size].

    A token's logits depend on the tokens before it and on nothing else, bit for bit.
    """
    w, caches = model.weights, [cache for cache, _ in new.parts]
    rows = np.array([(i, place) for i, (cache, some) in enumerate(new.parts)
                     for place in range(cache.length, cache.length + some.stop - some.start)], ROW)
    batch = batch_of(w, new.x, rope_tables(model.config, new.positions), caches, rows, new.wanted, new)
    logits = run_layers(w, batch, caches, new.added, new.states or w.kind.enter is not None)
    new.advance()
    if caches[0].length > 1 and caches[0].dtype in STEPS and not w.looked:
        note_small_numbers(model, caches[0])
    if w.kind.enter is not None:
        return logits, batch.streams if new.states else batch.streams[:0]
    if not new.states:
        return logits, new.x[:0]
    return logits, rms_norm(new.x, w.layers.norm, model.config.rms_norm_eps)


def draws(models: list[Model], vectors: np.ndarray, codes: np.ndarray, talks: list[Any]) -> list[np.ndarray]:
    """Codes of qwen3_tts.predict_codes in one call of the kernels: from each model one of each talk [m], in its frame.

    codes [m]: the last ones; vectors [1 + len(models), codes, hidden_size]: of the last ones, and of what each model
    draws. Fewer are drawn where the kernels' exp leaves open which one NumPy's would draw; none for top_p.
    """
    if not models or any(talk.other.top_p < 1 for talk in talks):
        return []
    w, n, m = models[0].weights, len(models), np.arange(len(talks))
    before, caches = [talk.rng.bit_generator.state for talk in talks], [talk.frame for talk in talks]
    new = drawing([model.weights.layers.head for model in models], vectors[1:], talks)
    first, *following = range(caches[0].length, caches[0].length + n + 1)
    turned = rope_tables(w.config, np.array([*[first] * len(m), *following]))
    for cache in caches:
        cache.reserve(n)
    rows = np.array([(i, first) for i in m], ROW)
    run_layers(w, batch_of(w, vectors[0, codes], turned, caches, rows, m, new), caches)
    sure = (new["codes"] >= 0).all(axis=0)
    n_sure = n if sure.all() else int(sure.argmin())
    for talk, state, count in zip(talks, before, new["counts"]):
        talk.frame.advance(np.zeros(n_sure, int))
        if n_sure < n:
            talk.rng.bit_generator.state = state
            talk.rng.standard_exponential(n_sure * count)
    return [*new["codes"].T[:n_sure]]


@np.errstate(over="ignore", invalid="ignore")
def guess(model: Model, states: np.ndarray, token_ids: qwen3.TokenIds, cache: Any,
          start: int) -> tuple[np.ndarray, int]:
    """The namesake of qwen3_5.guess; the guess is a common token, or like one of the text."""
    ids, head, eps, n = np.asarray(token_ids), model.weights.mtp, model.config.rms_norm_eps, len(token_ids)
    rows = embed_tokens(model, ids)
    head.vocabulary.add(ids)
    slots, caches = cache.reserve(n), [cache]
    where = rope_tables(model.config, start + slots), caches, np.array([(0, slot) for slot in slots], ROW)
    if (enter := head.layer.kind.enter) is not None:
        batch = batch_of(head.layer, np.zeros_like(rows), *where, np.arange(n - 1, n), enter(head, rows, states, eps))
        logits = run_layers(head.layer, batch, caches)
        cache.advance(ids)
        return batch.streams, head.vocabulary.token(int(logits.argmax()))
    parts = zip((rows, states), head.norms)
    both = np.concatenate([rms_norm(part, norm, eps) for part, norm in parts], axis=1)
    size = np.sqrt(np.square(both).mean(axis=1, keepdims=True))  # by which the norm before fc divides
    x = run_layers(head.fc, batch_of(head.fc, both, *where, np.arange(n)), caches) * size
    logits = run_layers(head.layer, batch_of(head.layer, x, *where, np.arange(n - 1, n)), caches)
    cache.advance(ids)
    return rms_norm(x, head.layer.layers.norm, eps), head.vocabulary.token(int(logits.argmax()))


def note_small_numbers(model: Model, cache: Any) -> None:
    """Says on stderr, for the first prompt of a model, which layer's keys or values are too small for the cache."""
    model.weights.looked = True
    scales = padded(model.config.head_dim, 32) // 2 if cache.dtype == "int8" else 0  # come after the bytes
    some = [(rows[:, :, :min(cache.length, 64), scales:] & 0x7FFF).max(axis=(1, 2, 3)) for rows in (cache.k, cache.v)]
    if (small := np.flatnonzero(np.min(some, axis=0) < STEPS[cache.dtype])).size and sys.stderr is not None:
        print(f"{model.path}: layer {small[0]} has keys or values so small that the {cache.dtype} cache loses their "
              "digits: try --kv-dtype f32", file=sys.stderr)


def engine(quantize: str | None = None, threads: int | None = None, kv_dtype: str | None = None,
           activations: str | None = None) -> Callable[[Source], Engine]:
    """A function that gives the Engine for a model: what qwen3.load_model takes. The arguments are those of load_model.

    Raises InputError for unknown values.
    """
    check_path()
    for name, value, known in (("quantize", quantize, PACKED), ("kv_dtype", kv_dtype, KV_DTYPES),
                               ("activations", activations, ACTIVATIONS)):
        if value not in (None, *known):
            raise InputError(f"{name} must be {' or '.join(known)}, not {value!r}")
    if threads is not None:
        checked_whole("threads", threads, 1)
    # Threads share a pass by pieces: it goes on where one of them has less of its core.
    n_threads = threads or available_cpus()
    start = at_once if n_threads == 1 else in_background

    def for_model(source: Source) -> Engine:
        plain = source.saved is None and all(isinstance(each, Tensor) for each in source.tensors.values())
        packing = quantize or (source.saved.format if source.saved else
                               source.kind.quantize if plain and activations is None else None)
        rounds = activations == "bf16" or activations is None and (bool(packing) or is_rounded(source))
        dtype = kv_dtype or ("bf16" if rounds else "f16")
        overflow = {"overflow": f"a key or value is probably too large for the {dtype} cache, which holds numbers up "
                                f"to {LARGEST_CACHED[dtype]}: try --kv-dtype bf16"} if dtype in LARGEST_CACHED else {}
        cached = RoundedCache.dtype if rounds and dtype == "bf16" else dtype
        load = partial(load_weights, quantize=packing, threads=threads, activations=activations or "bf16")
        return Engine(load, kind_for(source.kind).cache(CACHES[cached]), run_pass, draws=draws, guess=guess,
                      drafts=True, with_heads=lambda *given: [*with_heads(load, *given)],
                      rows=lambda model, name, token_ids: matrix_rows(
                          model.weights.head if name == "lm_head" else model.weights.embedding, token_ids),
                      beside=lambda work, waits: start(partial(with_threads, n_threads if waits else 1, work)),
                      **overflow)

    return for_model


def is_rounded(source: Source) -> bool:
    """Whether a model's files have matrices of bf16, or some that stay packed: vectors are rounded for both. An n-gram
    table is no matrix: nothing is multiplied with it."""
    return source.saved is not None or any(
        len(tensor.shape) == 2 and ((form := forms_of(name, tensor, None)[-1]) == BF16 or is_packed(form))
        for name, tensor in source.tensors.items() if BY_ROWS not in name)


def load_model(name: str | Path, quantize: str | None = None, threads: int | None = None, kv_dtype: str | None = None,
               offline: bool = False, tokenizer: bool = True, adapter: str | Path | None = None,
               activations: str | None = None) -> Model:
    """The namesake of qwen3.load_model.

    quantize: None (weights stay as in the file), "int8" or "int4"; threads: None takes all available CPUs;
    kv_dtype: "f16", "bf16", "f32" or "int8", the number format of keys and values; activations: "bf16", to which
    vectors are rounded before they are multiplied with a matrix of bf16, or with keys and values of bf16, or "f32". By
    default they are rounded, and keys and values are bf16, if the weights are bf16 or packed.
    """
    return qwen3.load_model(name, engine(quantize, threads, kv_dtype, activations), offline, tokenizer, adapter)


def main(argv: list[str] | None = None) -> int:
    """The command line of qwen3.py with this engine."""
    return qwen3.main(["--fast", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
