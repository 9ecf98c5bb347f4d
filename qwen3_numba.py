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
    nothing else     one job for the threads per token: they meet at barriers and never wait for Python in between

Every public name of qwen3.py is here, too; a function with a namesake in qwen3.py does the same. The room below is
qwen3_lib/kernels/:

    layout.py      how weights and the cache lie in memory
    cpu.py         the instructions that this CPU has
    vectors.py     the products with weights, in the language of LLVM; attention.py: those with keys and values
    products.py    which functions of them a pass needs
    layers.py      the kernels, in the order of forward; fields.py: how they find their arrays
    experts.py     the kernel of a mixture of experts
    delta.py       the kernel of Qwen3.5's delta nets; hybrid.py: their matrices and states
    intrinsics.py  what numba can't say in Python
    quantize.py    the kernels that pack weights
    compile.py     numba compiles kernels: a program of its own, for the first run
    build.py       machine code kept between runs
    packing.py     tensors of a file become matrices in memory
    memory.py      aligned arrays, and the space that kernels work in
    team.py        the threads
"""
from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and None in map(find_spec, ("qwen3", "qwen3_lib")):
    sys.exit("qwen3_numba.py: it needs qwen3.py and the folder qwen3_lib beside it")

import qwen3  # first: it says in one line what is missing
import numpy as np

from qwen3 import (BUNDLED, CHUNK, Config, Engine, Folder, InputError, Model, Sampling, Sequence, Tokenizer,
                   __version__, chat, checked_whole, default_sampling, embed, forward, generate, rms_norm, rope_tables,
                   to_float32)
from qwen3_5 import MTP_NORMS, HybridConfig, mtp_config, turn_ends
from qwen3_lib.io.cores import available_cpus
from qwen3_lib.io.packed import Quantized
from qwen3_lib.io.progress import progress
from qwen3_lib.io.tensors import PackedTensor
from qwen3_lib.kernels.layout import (BF16, BLOCK, EXPERT, F16, F32, FEW, FORMATS, GATE, GROUP, HEAD_NORMS,
                                      JOB, KV8, LINEAR, NORMS, PANEL, PASS, PROMPT, ROUNDED, TASK, TILE, WEIGHT, Batch,
                                      Layers, Q, Space, is_packed, packed_shape, padded, table)
from qwen3_lib.kernels.hybrid import (DELTA, StateCache, Vocabulary, is_recurrent, joined, stacked, state_fields,
                                      state_tables)
from qwen3_lib.kernels.memory import Reused, aligned, empty, experts_of, work_space

try:
    from qwen3_lib.kernels.build import kernel, make_kernels
    from qwen3_lib.kernels.cpu import check_path
    from qwen3_lib.kernels.packing import PACKED, Packer, forms_of, matrix_rows, packed_form
    from qwen3_lib.kernels.products import any_number, compile_all, functions_for
    from qwen3_lib.kernels.team import Team
except ImportError as error:
    if __name__ == "__main__":
        sys.exit(f"qwen3_numba.py: {error}")
    raise

__all__ = ["BUNDLED", "Config", "Engine", "InputError", "KVCache", "Model", "Sampling", "Sequence", "Tokenizer",
           "__version__",
           "chat", "compile_all", "default_sampling", "engine", "forward", "generate", "load_model", "load_weights"]

# ----------------------------------------------------------------------------------------------------------------------
# Weights: as they lie in the file, or packed
# ----------------------------------------------------------------------------------------------------------------------

class MTPHead(NamedTuple):
    """The MTP head of a Qwen3.5: see qwen3_5.guess."""
    fc: Weights  # a model without layers, whose lm_head is fc
    layer: Weights  # a model of one layer
    norms: list[np.ndarray]  # of the embedding and of the hidden states
    vocabulary: Vocabulary

    def addresses(self) -> np.ndarray:
        """Where its matrices are, but for the rows of the vocabulary."""
        layers = self.layer.layers
        return np.concatenate([array["address"].reshape(-1) for array in (
            layers.matrices, layers.routers, layers.experts, self.fc.layers.head)])


@dataclass
class Weights:
    """Where the weights are. A tied head is the embedding, and has no name of its own."""
    config: Config
    matrices: dict[str, np.ndarray]  # WEIGHT [1] by their names in the file
    vectors: dict[str, np.ndarray]  # float32, by their names: norms and the like
    shapes: dict[str, tuple[int, ...]]  # of all tensors
    arrays: list[np.ndarray]  # what the addresses of matrices point to
    layers: Layers  # all of them, as kernels find them
    team: Team
    quantized: str | None  # "int8" or "int4", if all matrices are packed so
    mtp: MTPHead | None = None
    looked: bool = False  # whether its first prompt's keys and values were looked at: see note_small_numbers
    spaces: dict[int, tuple[Space, np.ndarray]] = field(default_factory=dict)  # with their tables: see work_space
    logits: Reused = field(default_factory=Reused)  # the memory of a pass's logits, unless they are many

    @cached_property
    def table(self) -> np.ndarray:
        return table(self.layers)

    @cached_property
    def formats(self) -> tuple[int, ...]:
        """Of the matrices that all tokens of a pass are multiplied with."""
        return formats_in(self.layers.matrices, self.layers.routers)

    @cached_property
    def experts_formats(self) -> tuple[int, ...]:
        return formats_in(self.layers.experts)

    @property
    def embedding(self) -> np.ndarray:
        return self.matrices["model.embed_tokens.weight"]

    @property
    def head(self) -> np.ndarray:
        return self.matrices.get("lm_head.weight", self.embedding)

    @property
    def format(self) -> str:
        """The name of the matrices' format, of most of them if there are several, and whether vectors are rounded."""
        most, head = int(self.layers.matrices[0, Q].form), int(self.layers.head[0].form)
        rounds = ROUNDED in (head, *self.formats, *self.experts_formats)
        return FORMATS[BF16 if most == ROUNDED else most].name + ", activations bf16" * rounds

    def work_space(self, config: Config, m: int, n_tasks: int, n_queries: int) -> tuple[Space, np.ndarray]:
        """A Space for m tokens, n_tasks tasks and n_queries queries of a task; an earlier one, if it fits.

        Kept are the last one for many tokens, and one for each number of few tokens, which guesses make vary.
        """
        kind = m if m <= FEW else 0
        if (last := self.spaces.get(kind)) is not None:
            partials = last[0].partials
            if len(last[0].h) == m and len(partials) >= n_tasks and partials.shape[2] >= n_queries:
                return last
        last = self.spaces.pop(kind, None)
        own = [space.own for space, _ in self.spaces.values()]
        last = None  # before the next one, for the sake of memory
        space = work_space(config, self.team.n_threads, m, n_tasks, n_queries, own)
        self.spaces[kind] = found = space, table(space)
        return found

    def tensors(self) -> dict[str, np.ndarray]:
        """Name -> array of all that the engine keeps."""
        by_address, tensors = {array.ctypes.data: array for array in self.arrays}, dict(self.vectors)
        for name, (weight,) in self.matrices.items():
            array = by_address[weight.address]
            tensors[name] = array if is_packed(weight.form) else array[:, :weight.columns]
        return tensors


def formats_in(*tables: np.ndarray) -> tuple[int, ...]:
    """The formats of the matrices that stand in arrays of WEIGHT."""
    return (*sorted({form for some in tables for form in some["form"][some["address"] != 0].tolist()}),)


def layers_of(config: Config) -> str:
    """The name of the kernel that runs a model's layers."""
    dense, sparse = ("hybrid_layers", "sparse_hybrid_layers") if isinstance(config, HybridConfig) else \
        ("decoder_layers", "sparse_layers")
    return sparse if config.sparse_layers else dense


def load_weights(folder: Folder, config: Config, quantize: str | None = None, threads: int | None = None,
                 activations: str = "f32") -> Weights:
    """The namesake of qwen3.load_weights: nothing is expanded. `quantize` is None, "int8" or "int4".

    With activations "bf16", vectors are rounded to bf16 before they are multiplied with a matrix of BF16.

    A published packed matrix of 8 bits becomes INT8 where INT8 holds its very numbers, else the nearest BF16; one of 4
    or 5 bits Q4_0, Q4_1 or Q5_1 where these hold its numbers, else the nearest INT8; GGUF's Q4_K, Q5_K and Q6_K stay as
    they are.
    """
    saved = folder.format if isinstance(folder, Quantized) else None
    if saved is not None and quantize not in (None, saved):
        raise InputError(f"{folder.path}: this checkpoint is {saved}, so it can't be made {quantize}")
    shapes, stored = stored_tensors(folder, config)
    format = saved or quantize
    unpacks = any(isinstance(tensor, PackedTensor) for tensor in stored.values())
    packs = quantize or unpacks
    make_kernels(layers_of(config), *["quantize_block"] * bool(quantize), *["pack_block"] * unpacks)
    team, arrays = Team(threads or available_cpus()), list[np.ndarray]()
    vectors = {name: np.array(to_float32(tensor)) for name, tensor in stored.items() if len(shapes[name]) != 2}
    matrices, plan = {}, planned(config, stored, format).items()
    if saved is None and packs:
        plan = progress(plan, f"quantizing to {quantize}" if quantize else "unpacking")
    with ThreadPoolExecutor(team.n_threads) as pool:
        packer = Packer(pool, arrays)
        if isinstance(folder, Quantized):
            packer.each(folder.check, [*stored.items()])
        for name, forms in plan:
            tensor, shape = stored[name], shapes[name]
            matrices[name] = packer.kept(tensor.data, forms[0], *shape) if tensor.dtype == "U8" else \
                packer.weight(f"{folder.path}: {name}", tensor, forms, shape)
    for matrix in matrices.values() if activations == "bf16" else ():
        matrix["form"][matrix["form"] == BF16] = ROUNDED
    if format is None and not packs and not config.sparse_layers:
        touch_pages({id(tensor.mapping): tensor.mapping for tensor in stored.values()}.values())
    weights = Weights(config, matrices, vectors, shapes, arrays, described(config, matrices, vectors), team, format)
    has_head = isinstance(config, HybridConfig) and config.mtp_num_hidden_layers
    return replace(weights, mtp=mtp_head(weights)) if has_head else weights


def mtp_head(w: Weights) -> MTPHead:
    """The MTP head that stands behind the layers, as models of their own."""
    config, behind = mtp_config(w.config), f"model.layers.{w.config.num_hidden_layers}."
    matrices, vectors = ({name.replace(behind, "model.layers.0."): each for name, each in some.items()}
                         for some in (w.matrices, w.vectors))
    vocabulary = Vocabulary(w.head)
    norms = [1 + w.vectors[f"{behind}{name}.weight"] for name in MTP_NORMS]
    layers = described(config, matrices, vectors)._replace(head=vocabulary.matrix, norm=norms[2])
    layer = replace(w, config=config, layers=layers, spaces={}, logits=Reused())
    alone = layers._replace(head=w.matrices[f"{behind}fc.weight"], places=layers.places[:0], eps=np.zeros(1),
                            norm=np.ones(2 * config.hidden_size, np.float32))
    return MTPHead(replace(layer, layers=alone), layer, norms[:2], vocabulary)


# The matrices of a layer that are multiplied with the result of its first norm, and of its second one.
BEHIND = ("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_ba"), ("gate_proj", "up_proj")


def places_of(config: Config, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (the field of Layers, the index there) of each matrix of a layer."""
    names, sparse = DELTA if is_recurrent(config, layer) else LINEAR, layer in config.sparse_layers
    places: dict[str, tuple[str, tuple[int, ...]]] = {
        name: ("matrices", (layer, i)) for i, name in enumerate(names[:GATE] if sparse else names)}
    if sparse:
        places["mlp.gate"] = "routers", (layer,)
        for expert in range(experts_of(config)[0]):
            where = f"experts.{expert}" if expert < config.num_experts else "shared_expert"
            places |= {f"mlp.{where}.{name}": ("experts", (layer, expert, i)) for i, name in enumerate(EXPERT)}
    return {f"model.layers.{layer}.{name}.weight": place for name, place in places.items()}


def behind_norms(names: Iterable[str]) -> list[list[str]]:
    """The names of a layer's matrices behind its first and its second norm."""
    return [[name for name in names if name.split(".")[-2] in kinds] for kinds in BEHIND]


def planned(config: Config, stored: dict[str, Any], format: str | None) -> dict[str, tuple[int, ...]]:
    """Name -> its formats, see forms_of, of all matrices in the order in which kernels read them."""
    names = [[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in stored]
    names += [[*places_of(config, i)] for i in range(config.num_hidden_layers)]
    if isinstance(config, HybridConfig) and config.mtp_num_hidden_layers:
        n = config.num_hidden_layers
        names += [[*places_of(config, n)], [f"model.layers.{n}.fc.weight"]]
    forms = {name: forms_of(name, stored[name], format) for some in names for name in some}
    for behind in itertools.chain.from_iterable(map(behind_norms, names)):
        if len({forms[name][-1] for name in behind if not is_packed(forms[name][-1])}) > 1:
            for name in behind:  # products with BF16 take the norm in another order
                forms[name] = tuple(F32 if form == BF16 else form for form in forms[name])
    return forms


def described(config: Config, matrices: dict[str, np.ndarray], vectors: dict[str, np.ndarray]) -> Layers:
    """The weights as kernels find them."""
    n, n_experts = config.num_hidden_layers, experts_of(config)[0]
    found = {"matrices": np.zeros((n, len(LINEAR)), WEIGHT), "routers": np.zeros(n, WEIGHT),
             "experts": np.zeros((n, n_experts, len(EXPERT)), WEIGHT)}
    forms = np.zeros((n, 2, 2), np.int64)
    for i in range(n):
        places = places_of(config, i)
        for name, (field, index) in places.items():
            found[field][index] = matrices[name][0]
        for j, behind in enumerate(behind_norms(places)):
            some = [matrices[name][0].form for name in behind]
            forms[i, j] = min(some), max(some)
    return Layers(**found, **norms_of(vectors, config), **state_fields(vectors, config), forms=forms,
                  head=matrices.get("lm_head.weight", matrices["model.embed_tokens.weight"]),
                  eps=np.array([config.rms_norm_eps]),
                  routing=np.array([config.norm_topk_prob, n_experts > config.num_experts], np.int64))


def touch_pages(mappings: Iterable[mmap.mmap]) -> None:
    """Starts a thread that touches each page of mapped files: it takes 0.1 s per GB, beside the tokenizer.

    While the tokenizers library loads, no other thread runs Python; so the thread's work is one call of NumPy per file.
    """
    def touch() -> None:
        for mapping in mappings:
            np.frombuffer(mapping, np.uint8)[::mmap.PAGESIZE].max()

    with contextlib.suppress(RuntimeError):  # without another thread, the first pass touches them
        threading.Thread(target=touch, daemon=True).start()


def norms_of(vectors: dict[str, np.ndarray], config: Config) -> dict[str, np.ndarray]:
    """The norms of Layers."""
    more, none = np.float32(isinstance(config, HybridConfig)), np.zeros(config.head_dim, np.float32)

    def norm(name: str) -> np.ndarray:  # a delta net has no norms of heads
        return more + vectors[name] if name in vectors else none

    norms, head_norms = (np.array([[norm(f"model.layers.{i}.{name}.weight") for name in names]
                                   for i in range(config.num_hidden_layers)]) for names in (NORMS, HEAD_NORMS))
    return {"norms": norms, "head_norms": head_norms, "norm": norm("model.norm.weight")}


def stored_tensors(folder: Folder, config: Config) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Name -> shape, name -> tensor in the files. Raises InputError for missing and misshapen ones."""
    shapes = joined(folder.shapes(config), lambda first, second: (first[0] + second[0], first[1]))
    return shapes, (folder.packed(config, shapes, saved_tensor) if isinstance(folder, Quantized) else
                    joined(folder.tensors(config), stacked))


def saved_tensor(name: str, shape: tuple[int, ...], form: str) -> tuple[str, tuple[int, ...]]:
    """The dtype and the shape of a tensor in a folder of packed weights."""
    packed = len(shape) == 2 and is_packed(packed_form(name, form))
    return ("U8", packed_shape(*shape, packed_form(name, form))) if packed else ("F32", shape)


# ----------------------------------------------------------------------------------------------------------------------
# KV cache and forward
# ----------------------------------------------------------------------------------------------------------------------

class KVCache(qwen3.KVCache):
    """qwen3.KVCache with 16 bits per number, heads filled up with zeros to a multiple of 32 numbers.

    k, v uint16 [n_layers, n_kv_heads, capacity, row_size].
    """
    dtype, stored, units = "f16", F16, 1.0  # units: of 16 bits, for each number

    def __init__(self, config: Config, max_length: int | None = None):
        super().__init__(config, max_length)
        shape = (*self.k.shape[:3], int(padded(config.head_dim, 32) * self.units))
        self.k, self.v = np.empty(shape, np.uint16), np.empty(shape, np.uint16)

    @classmethod
    def fits(cls, cache: Any) -> bool:
        return isinstance(cache, KVCache) and isinstance(cache, StateCache) == issubclass(cls, StateCache)

    def _resized(self, old: np.ndarray, capacity: int) -> np.ndarray:
        new = aligned((*old.shape[:2], capacity, 2 * old.shape[3])).view(np.uint16)
        new[:, :, :self.length] = old[:, :, :self.length]
        return new


class Bf16Cache(KVCache):
    """The same in bfloat16: fewer digits, but no value is too large."""
    dtype, stored = "bf16", BF16


class RoundedCache(KVCache):
    """Bf16Cache for attention that rounds queries and the softmax's weights to bf16, too."""
    dtype, stored = "bf16, activations too", ROUNDED


class F32Cache(KVCache):
    """float32, as in qwen3.py: all digits, for twice the memory."""
    dtype, stored, units = "f32", F32, 2


class Int8Cache(KVCache):
    """Bytes, with a float16 scale for each 32 of them: little more than half the memory."""
    dtype, stored, units = "int8", KV8, 1 / 2 + 1 / GROUP


CACHES = {cache.dtype: cache for cache in (KVCache, Bf16Cache, RoundedCache, F32Cache, Int8Cache)}
HYBRID_CACHES = {dtype: type(f"Hybrid{cache.__name__}", (cache, StateCache), {"plain": cache})
                 for dtype, cache in CACHES.items()}
KV_DTYPES = "f16", "bf16", "f32", "int8"
ACTIVATIONS = "f32", "bf16"  # to which vectors may be rounded before they are multiplied with weights of bf16
MOST = {"f16": 65504, "int8": 127 * 65504}  # the largest number that such a cache holds
STEPS = {"f16": 1024, "int8": 128}  # float16 is counted in steps of 2^-24; a number or a scale of fewer loses digits


def run_layers(model: Model, ids: np.ndarray, caches: list[Any], sequences: np.ndarray, positions: np.ndarray,
               places: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs tokens ids [m], each the next one of a sequence of these caches, through all layers.

    positions [m]: of their rows in the caches; places: for RoPE, [m] or [3, m]
    -> (x [m, hidden_size], logits [n, vocab_size] of the tokens `wanted` [n])
    """
    see = model.pictures
    x = embed(model, ids)
    deep = 0 if see is None or ids.min() >= 0 else len(see.config.deepstack_visual_indexes)  # so many layers add to x
    logits = compute(model.weights, x, rope_tables(model.config, places), caches, sequences, positions, wanted,
                     deep=deep, deepen=lambda layer: see.add(x, ids, 1 + layer))
    return x, logits


def compute(w: Weights, x: np.ndarray, turned: tuple[np.ndarray, np.ndarray], caches: list[Any], sequences: np.ndarray,
            positions: np.ndarray, wanted: np.ndarray, deep: int = 0,
            deepen: Callable[[int], None] | None = None) -> np.ndarray:
    """Runs x [m, hidden_size] through all layers, in place; turned: rope_tables -> logits of the tokens `wanted`.

    deepen(layer) changes x after each of the `deep` first layers.
    """
    config, m, (cos, sin) = w.config, len(x), turned
    group, n_layers, n_rows = config.num_attention_heads // config.num_key_value_heads, len(w.layers.places), \
        int(w.layers.head[0].rows)
    tasks, tiles = attention_tasks(sequences, positions, group)
    shape = len(wanted), padded(n_rows, PANEL)
    logits = w.logits.take(shape[0] * shape[1]).reshape(shape) if len(wanted) <= PROMPT else empty(shape, np.float32)
    where = [(cache.k.ctypes.data, cache.v.ctypes.data, cache.k.shape[2]) for cache in caches]
    batch = Batch(x, cos, sin, np.stack([sequences, positions], axis=1), tasks, tiles, wanted, logits, np.array(where),
                  np.array([caches[0].stored, caches[0].k.shape[3]]),
                  *state_tables(caches, np.bincount(sequences, minlength=len(caches))))
    space = w.work_space(config, m, len(tasks), int(tasks["n"].max()) * group)
    head = int(w.layers.head[0].form)
    needs = [*((form, m) for form in w.formats), *((head, len(wanted)) for _ in wanted[:1])]
    for form in w.experts_formats:  # an expert may have been chosen by any number of tokens
        needs += any_number(form, m)
    queries = tuple((caches[0].stored, n) for n in sorted({1, *(tasks["n"] * group).tolist()}))
    functions = functions_for(tuple(needs), queries)
    job_table = np.concatenate([w.table, table(batch), space[1], table((functions,))])
    stops = sorted({0, n_layers, *range(0, n_layers, max(1, PASS // m)), *range(1, min(deep, n_layers) + 1)})
    if deep >= n_layers:  # the head by itself: x changes after the last layer, or there are no layers
        stops.append(n_layers)
    for first, last in (spans := [*itertools.pairwise(stops)]):
        ends = (first, last) == spans[-1]
        job = np.array([(0, 0, first, last, job_table.ctypes.data, ends)], JOB)
        w.team.run(kernel(layers_of(config)), job, w, caches, batch, space, functions, job_table)
        if deepen is not None and first < last <= deep:
            deepen(last - 1)
    return logits[:, :n_rows]


def attention_tasks(sequences: np.ndarray, positions: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (TASK [n_tasks], first and last + 1 of the tasks for the same tokens [n_tiles, 2])"""
    tasks, tiles = [], []
    ends = [*(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(sequences)] if len(sequences) > 1 else [1]
    for start, end in zip([0, *ends], ends):
        sequence, n_new = int(sequences[start]), end - start
        few = n_new <= FEW
        step = n_new if few else max(1, TILE // group)
        for row in range(start, start + n_new, step):
            n = min(step, start + n_new - row)
            seen, most = (int(positions[last]) + 1 for last in (row, row + n - 1))
            n_blocks, before = -(-most // BLOCK), len(tasks)
            here = (sequence, row, n, seen)
            tasks += [(*here, block, 1) for block in range(n_blocks)] if few else [(*here, 0, n_blocks)]
            tiles.append((before, len(tasks)))
    return np.array(tasks, TASK), np.array(tiles)


@np.errstate(over="ignore", invalid="ignore")
def logits_of(model: Model, token_ids: qwen3.TokenIds, cache: Any, all_logits: bool = False,
              states: bool = False) -> Any:
    """The namesake of qwen3.logits_of, and of qwen3_5.logits_of.

    A token's logits depend on the tokens before it and on nothing else, bit for bit.
    """
    rows, eps = np.arange(len(token_ids)), model.config.rms_norm_eps
    wanted, hidden, logits = rows if all_logits else rows[cache.last], list[np.ndarray](), list[np.ndarray]()
    for x, some in passes(model, token_ids, cache, np.atleast_1d(wanted)):
        logits.append(some)
        hidden += [rms_norm(x, model.weights.layers.norm, eps)] if states else []
    found = (np.concatenate(logits) if len(logits) > 1 else logits[0])[... if wanted.ndim else 0]
    return (found, np.concatenate(hidden)) if states else found


@np.errstate(over="ignore", invalid="ignore")
def guess(model: Model, states: np.ndarray, token_ids: qwen3.TokenIds, cache: Any,
          start: int) -> tuple[np.ndarray, int]:
    """The namesake of qwen3_5.guess; the guess is a common token, or like one of the text."""
    ids, head, eps, n = np.asarray(token_ids), model.weights.mtp, model.config.rms_norm_eps, len(token_ids)
    rows = embed(model, ids)
    head.vocabulary.add(ids)
    parts = zip((rows, states), head.norms)
    both = np.concatenate([rms_norm(part, norm, eps) for part, norm in parts], axis=1)
    size = np.sqrt(np.square(both).mean(axis=1, keepdims=True))  # by which the norm before fc divides
    slots, zeros = cache.reserve(n), np.zeros(n, np.int64)
    where = rope_tables(model.config, start + slots), [cache], zeros, slots
    x = compute(head.fc, both, *where, np.arange(n)) * size
    logits = compute(head.layer, x, *where, np.arange(n - 1, n))
    cache.advance(ids)
    return rms_norm(x, head.layer.layers.norm, eps), head.vocabulary.token(int(logits.argmax()))


@np.errstate(over="ignore", invalid="ignore")
def hidden_states(model: Model, token_ids: qwen3.TokenIds, cache: Any) -> np.ndarray:
    """The namesake of qwen3.hidden_states."""
    return np.concatenate([rms_norm(x, model.weights.layers.norm, model.config.rms_norm_eps)
                           for x, _ in passes(model, token_ids, cache, np.empty(0, np.int64))])


def passes(model: Model, token_ids: qwen3.TokenIds, cache: Any,
           wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs new tokens through all layers and adds them to the cache, or Caches, CHUNK or fewer of them in a pass.

    -> (x [m, hidden_size], logits [n, vocab_size]) of each pass, the logits of the tokens `wanted` among all.
    """
    ids = np.asarray(token_ids)
    caches, counts = getattr(cache, "caches", [cache]), getattr(cache, "counts", [len(ids)])
    positions, sequences = cache.reserve(len(ids)), np.repeat(np.arange(len(caches)), counts)
    borders = turn_ends(model, ids) if isinstance(caches[0], StateCache) else []
    for start, end in itertools.pairwise(sorted({*range(0, len(ids), CHUNK), *borders, len(ids)})):
        now = slice(start, end)
        here = wanted[(wanted >= start) & (wanted < now.stop)] - start
        places = positions[now] if model.pictures is None else model.pictures.positions(cache, ids[now])
        result = run_layers(model, ids[now], caches, sequences[now], positions[now], places, here)
        cache.advance(ids[now])
        if end in borders:
            cache.keep()
        yield result
    if caches[0].length > 1 and caches[0].dtype in STEPS and not model.weights.looked:
        note_small_numbers(model, caches[0])


def note_small_numbers(model: Model, cache: Any) -> None:
    """Says on stderr, for the first prompt of a model, which layer's keys or values are too small for the cache."""
    model.weights.looked = True
    scales = padded(model.config.head_dim, 32) // 2 if cache.dtype == "int8" else 0  # begin behind the bytes
    some = [(rows[:, :, :min(cache.length, 64), scales:] & 0x7FFF).max(axis=(1, 2, 3)) for rows in (cache.k, cache.v)]
    if (small := np.flatnonzero(np.min(some, axis=0) < STEPS[cache.dtype])).size and sys.stderr is not None:
        print(f"{model.path}: layer {small[0]} has keys or values so small that the {cache.dtype} cache loses their "
              "digits: try --kv-dtype f32", file=sys.stderr)


def engine(quantize: str | None = None, threads: int | None = None, kv_dtype: str | None = None,
           activations: str | None = None) -> Callable[[Folder, Config], Engine]:
    """A function that gives the Engine for a model: what qwen3.load_model takes. The arguments are those of load_model.

    Raises InputError for unknown values.
    """
    check_path()
    if quantize not in (None, *PACKED):
        raise InputError(f"quantize must be int8 or int4, not {quantize!r}")
    if kv_dtype not in (None, *KV_DTYPES):
        raise InputError(f"kv_dtype must be {', '.join(KV_DTYPES)}, not {kv_dtype!r}")
    if activations not in (None, *ACTIVATIONS):
        raise InputError(f"activations must be {' or '.join(ACTIVATIONS)}, not {activations!r}")
    if threads is not None:
        checked_whole("threads", threads, 1)

    def for_model(folder: Folder, config: Config) -> Engine:
        rounds = activations == "bf16" or activations is None and (bool(quantize) or stays_packed(folder))
        dtype = kv_dtype or ("bf16" if rounds else "f16")
        overflow = {"overflow": f"a key or value is probably too large for the {dtype} cache, which holds numbers up "
                                f"to {MOST[dtype]}: try --kv-dtype bf16"} if dtype in MOST else {}
        cached = RoundedCache.dtype if rounds and dtype == "bf16" else dtype
        load = partial(load_weights, quantize=quantize, threads=threads, activations=activations or "f32")
        return Engine(load, CACHES[cached], logits_of, hidden_states, guess=guess, drafts=True,
                      rows=lambda model, name, token_ids: matrix_rows(
                          model.weights.head if name == "lm_head" else model.weights.embedding, token_ids), **overflow,
                      hybrid_cache=HYBRID_CACHES[cached])

    return for_model


def stays_packed(folder: Folder) -> bool:
    """Whether matrices of a model's files stay in packed formats."""
    return isinstance(folder, Quantized) or any(
        isinstance(tensor, PackedTensor) and is_packed(forms_of(name, tensor, None)[-1])
        for name, tensor in folder.stored().items())


def load_model(name: str | Path, quantize: str | None = None, threads: int | None = None, kv_dtype: str | None = None,
               offline: bool = False, tokenizer: bool = True, adapter: str | Path | list[str | Path] | None = None,
               activations: str | None = None) -> Model:
    """The namesake of qwen3.load_model.

    quantize: None (weights stay as in the file), "int8" or "int4"; threads: None takes all available CPUs;
    kv_dtype: "f16", "bf16", "f32" or "int8", the number format of keys and values; activations: "f32", or "bf16", to
    which vectors are rounded before they are multiplied with a matrix of bf16, or with keys and values of bf16, which
    are then the default. None rounds them for keys and values only, and only if the weights are packed.
    """
    return qwen3.load_model(name, engine(quantize, threads, kv_dtype, activations), offline, tokenizer, adapter)


def main(argv: list[str] | None = None) -> int:
    """The command line of qwen3.py with this engine."""
    return qwen3.main(["--fast", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
