"""The weights of the fast engine: which matrix takes which format, and where kernels find it."""
from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from qwen3 import Config, Source, Tensor, to_float32
from qwen3_5 import MTP_NORMS, mtp_config
from qwen3_lib.io.disk import available_memory
from qwen3_lib.io.packed import checked_saved
from qwen3_lib.io.tensors import BY_ROWS, EMBEDDING, AnyTensor, alike, below
from qwen3_lib.kernels.disk import Files, no_slots, with_slots
from qwen3_lib.kernels.hybrid import Vocabulary
from qwen3_lib.kernels.kind import Kind, kind_for
from qwen3_lib.kernels.layout import (BF16, EXPERT, F32, FEW, FORMATS, FORMS, GATE, HEAD_NORMS, LINEAR, NORMS, PANEL,
                                      PROMPT, ROUNDED, ROUTING, WEIGHT, Layers, Q, Space, address_table, is_packed,
                                      packed_shape, padded)
from qwen3_lib.kernels.memory import LargePages, Reused, experts_of, let_go, work_space
from qwen3_lib.kernels.packing import forms_of, matrix_rows, packed_form
from qwen3_lib.kernels.team import Team
from qwen3_lib.kernels.ways import Ways


class MTPHead(NamedTuple):
    """The MTP head of a Qwen3.5: see qwen3_5.guess; or one with streams: see qwen4_exp.guess."""
    fc: Any  # a model without layers, Weights, whose lm_head is fc; with streams, WEIGHT [1] of each of Kind.fc
    layer: Weights  # a model of one layer
    norms: list[np.ndarray]  # of the embedding and of the hidden states
    vocabulary: Vocabulary
    unpacked: tuple[np.ndarray, ...] = ()  # with streams, fc in float32 for NumPy

    def addresses(self) -> np.ndarray:
        """Where its matrices are, but for the rows of the vocabulary."""
        layers, entered = self.layer.layers, self.layer.kind.enter is not None
        return np.concatenate([array["address"].reshape(-1) for array in (
            layers.matrices, layers.routers, layers.experts, *(
                (layers.reading, *self.fc) if entered else [self.fc.layers.head]))])


@dataclass
class Weights:
    """Where the weights are. A tied head is the embedding, and has no name of its own."""
    kind: Kind
    config: Config
    matrices: dict[str, np.ndarray]  # WEIGHT [1] by their names in the file
    vectors: dict[str, np.ndarray]  # float32, by their names: norms and the like
    shapes: dict[str, tuple[int, ...]]  # of all tensors
    arrays: list[np.ndarray]  # what the addresses of matrices point to
    layers: Layers  # all of them, as kernels find them
    team: Team
    quantized: str | None  # "int8" or "int4", if all matrices are packed so
    ways: Ways  # of one vector
    mtp: MTPHead | None = None
    looked: bool = False  # whether its first prompt's keys and values were looked at: see note_small_numbers
    spaces: dict[int, tuple[Space, np.ndarray]] = field(default_factory=dict)  # with their tables: see work_space
    logits: Reused = field(default_factory=Reused)  # the memory of a pass's logits, unless they are many
    mapped: list[np.ndarray] = field(default_factory=list)  # what move_layer has yet to move, the first one last
    pages: LargePages = field(default_factory=LargePages)
    moved: list[np.ndarray] = field(default_factory=list)  # what it has moved
    moving: Any = field(default_factory=threading.Lock)  # of the thread that moves a layer
    slots: list[Any] = field(default_factory=list)  # the memory of experts that come from the disk, and their files
    in_files: dict[str, Tensor] = field(default_factory=dict)  # n-gram tables, by the names of their parts
    tables: Any = None  # of these

    @cached_property
    def table(self) -> np.ndarray:
        return address_table(self.layers)

    @cached_property
    def formats(self) -> tuple[int, ...]:
        """Of the matrices that all tokens of a pass are multiplied with."""
        return formats_in(self.layers.matrices, self.layers.routers, self.layers.reading, self.layers.ngrams)

    @cached_property
    def last_formats(self) -> tuple[int, ...]:
        """Of those beside the head that only tokens with logits are multiplied with."""
        return formats_in(self.layers.reading[-1:])

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

        Kept are the last one for many tokens, one for some, and one for each number of few tokens, which guesses make
        vary.
        """
        kind = m if m <= FEW else 0 if m > PROMPT else -1
        if (last := self.spaces.get(kind)) is not None:
            partials = last[0].partials
            if len(last[0].h) == m and len(partials) >= n_tasks and partials.shape[2] >= n_queries:
                return last
        last = self.spaces.pop(kind, None)
        own = [space.own for space, _ in self.spaces.values()]
        last = None  # before the next one, for the sake of memory
        space = work_space(self.kind, config, self.team.n_threads, m, n_tasks, n_queries, own)
        self.spaces[kind] = found = space, address_table(space)
        return found

    def tensors(self) -> dict[str, np.ndarray]:
        """Name -> array of all that the engine keeps."""
        by_address, tensors = {array.ctypes.data: array for array in self.arrays}, dict(self.vectors)
        for name, (weight,) in self.matrices.items():
            array = by_address[weight.address]
            tensors[name] = array if is_packed(weight.form) else array[:, :weight.columns]
        return tensors | {name: tensor.data for name, tensor in self.in_files.items()}


def may_move(w: Weights, mappings: Iterable[mmap.mmap]) -> None:
    """Lets move_layer move the matrices of mapped files, if the memory has room for three times as much."""
    starts = [(np.frombuffer(each, np.uint8).ctypes.data, len(each)) for each in mappings]
    records = [each for each in [*w.layers.head, *w.layers.matrices.reshape(-1)]
               if any(start <= each.address < start + size for start, size in starts)]
    if available_memory() >= 3 * sum(int(each.rows * each.stride) for each in records):
        w.mapped = records[::-1]


def take_slots(w: Weights, memory: int, mappings: Iterable[mmap.mmap]) -> None:
    """Experts come from the disk into so many bytes of memory, if the system can read past its page cache.

    Of what stays mapped, a page that is missing is read alone.
    """
    models, files = [w, *([w.mtp.layer] if w.mtp else [])], Files()
    n_layers = [np.count_nonzero(each.layers.routers["rows"]) for each in models]
    with contextlib.suppress(OSError):  # all stay mapped
        for each, n in zip(models, n_layers):
            each.layers, kept = with_slots(each.layers, w.config.num_experts, memory * n // sum(n_layers), files)
            w.slots.append(kept)
    for mapping in mappings:
        mapping.madvise(mmap.MADV_RANDOM)


def move_layer(w: Weights) -> None:
    """Moves the next layer's matrices from a mapped file into large pages of memory, which are read faster.

    A pass for a few tokens does so, as long as there are any: no answer begins later for it.
    """
    if not w.mapped or not w.moving.acquire(blocking=False):  # nothing is left, or another thread is at it
        return
    try:
        for _ in range(min(len(LINEAR), len(w.mapped))):
            weight = w.mapped.pop()
            size = int(weight.rows * weight.stride)
            try:
                copy = w.pages.take((-(-size // 64), 64))
            except MemoryError:  # a limit of this process: the matrices stay where they are
                w.mapped.clear()
                return
            ctypes.memmove(copy.ctypes.data, int(weight.address), size)
            w.moved.append(copy)
            before, weight.address = int(weight.address), copy.ctypes.data
            let_go(before, size)
    finally:
        w.moving.release()


def with_heads(load: Callable[[Source], Weights], source: Source, heads: list[Any]) -> Iterator[Weights]:
    """The weights of a source, as often as there are heads, each with one of these tensors [rows, hidden_size]."""
    if len({head.dtype for head in heads}) > 1:
        heads = [Tensor("F32", to_float32(head), head.mapping) for head in heads]
    (rows, d), apart = heads[0].shape, padded(heads[0].shape[0], PANEL)  # so that each begins with a block
    table = np.zeros((len(heads), apart, d), heads[0].data.dtype)
    for part, head in zip(table, heads):
        part[:rows] = head.data
    config = replace(source.config, vocab_size=len(heads) * apart)
    joined = source.tensors | {EMBEDDING: heads[0]._replace(data=table.reshape(-1, d))}
    w = load(replace(source, config=config, tensors=joined))
    for i in range(len(heads)):
        head = w.layers.head.copy()
        head["address"] += i * apart // (PANEL if is_packed(int(head[0].form)) else 1) * head["stride"]
        head["rows"] = rows
        yield replace(w, layers=w.layers._replace(head=head))


def bytes_in(matrices: Iterable[np.ndarray]) -> dict[int, int]:
    """Format -> the bytes of the matrices, WEIGHT [1], in this format."""
    found = Counter[int]()
    for matrix in matrices:
        _, stride, form, rows, _ = matrix.tolist()[0]
        found[form] += stride * (-(-rows // PANEL) if is_packed(form) else rows)
    return found


def formats_in(*tables: np.ndarray) -> tuple[int, ...]:
    """The formats of the matrices that stand in arrays of WEIGHT."""
    return (*sorted({form for some in tables if some.size for form in some["form"][some["address"] != 0].tolist()}),)


def after_layers(config: Config) -> str:
    """How the names of an MTP head begin, if there is one."""
    return f"model.layers.{config.num_hidden_layers}."


def has_head(kind: Kind, config: Config, names: Iterable[str]) -> bool:
    """Whether there is an MTP head among tensors of these names."""
    return f"{after_layers(config)}{kind.fc[0]}.weight" in names


def name_in_files(start: str, name: str) -> str:
    """Of a tensor of an MTP head, which is a model of one layer, where its names begin with `start` in the files."""
    return name.replace("model.layers.0.", start).replace("model.hyper", f"{start}hyper")


def mtp_head(w: Weights) -> MTPHead:
    """The MTP head, stored after the layers, as models of their own."""
    config, start = w.kind.head(mtp_config(w.config)), after_layers(w.config)
    ours = {name_in_files(start, name): name for name in (*matrix_slots(w.kind, config, 0), *w.kind.more(config))}
    matrices = w.matrices | {name: w.matrices[there] for there, name in ours.items()}
    vectors = {("model." if "mixer" in name else "model.layers.0.") + name.removeprefix(start): vector
               for name, vector in w.vectors.items() if name.startswith(start)}
    vocabulary = Vocabulary(w.head)
    norms = [1 + w.vectors[name] for name in (f"{start}{part}.weight" for part in MTP_NORMS) if name in w.vectors]
    layers = build_layers(w.kind, config, matrices, vectors)._replace(head=vocabulary.matrix, norm=norms[-1])
    layer = replace(w, config=config, layers=layers, spaces={}, logits=Reused())
    if w.kind.enter is not None:
        layer.kind = w.kind._replace(new=w.kind.new_of_head)
        fc = [w.matrices[f"{start}{name}.weight"] for name in w.kind.fc]
        return MTPHead(fc, layer, norms, vocabulary, tuple(matrix_rows(each, range(int(each[0].rows))) for each in fc))
    alone = layers._replace(head=w.matrices[f"{start}fc.weight"], places=layers.places[:0], eps=np.zeros(1),
                            norm=np.ones(2 * config.hidden_size, np.float32))
    return MTPHead(replace(layer, layers=alone), layer, norms[:2], vocabulary)


# The matrices of a layer that are multiplied with the result of its first norm, and of its second one; the last two of
# the first ones with rows of an n-gram table.
AFTER_NORMS = (("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_ba", "key_proj", "value_proj"),
               ("gate_proj", "up_proj"))


def matrix_slots(kind: Kind, config: Config, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (the field of Layers, the index there) of each matrix of a layer."""
    names, sparse = kind.matrices(config, layer), layer in config.sparse_layers
    places: dict[str, tuple[str, tuple[int, ...]]] = {
        name: ("matrices", (layer, i)) for i, name in enumerate(names[:GATE] if sparse else names)}
    if sparse:
        places["mlp.gate"] = "routers", (layer,)
        for expert in range(experts_of(config)[0]):
            where = f"experts.{expert}" if expert < config.num_experts else "shared_expert"
            places |= {f"mlp.{where}.{name}": ("experts", (layer, expert, i)) for i, name in enumerate(EXPERT)}
    return {f"model.layers.{layer}.{name}.weight": place for name, place in places.items()}


def after_norms(names: Iterable[str]) -> list[list[str]]:
    """The names of a layer's matrices after its first norm and after its second one."""
    return [[name for name in names if name.split(".")[-2] in kinds] for kinds in AFTER_NORMS]


def choose_formats(kind: Kind, config: Config, stored: dict[str, Any],
                   format: str | None) -> dict[str, tuple[int, ...]]:
    """Name -> its formats, see forms_of, of all matrices in the order in which kernels read them."""
    names = [[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in stored]
    names += [[*matrix_slots(kind, config, i)] for i in range(config.num_hidden_layers)] + [[*kind.more(config)]]
    if has_head(kind, config, stored):
        start, more = after_layers(config), kind.more(kind.head(mtp_config(config)))
        names += [[*matrix_slots(kind, config, config.num_hidden_layers)],
                  [name_in_files(start, name) for name in more], [f"{start}{name}.weight" for name in kind.fc]]
    forms = {name: forms_of(name, stored[name], format) for some in names for name in some}
    for together in itertools.chain.from_iterable(map(after_norms, names)):
        if len({forms[name][-1] for name in together if not is_packed(forms[name][-1])}) > 1:
            for name in together:  # products with BF16 take the norm in another order
                forms[name] = tuple(F32 if form == BF16 else form for form in forms[name])
    return forms


def build_layers(kind: Kind, config: Config, matrices: dict[str, np.ndarray],
                 vectors: dict[str, np.ndarray]) -> Layers:
    """The weights as kernels find them."""
    n, n_experts = config.num_hidden_layers, experts_of(config)[0]
    found = {"matrices": np.zeros((n, len(LINEAR)), WEIGHT), "routers": np.zeros(n, WEIGHT),
             "experts": np.zeros((n, n_experts, len(EXPERT)), WEIGHT)}
    forms = np.zeros((n, 2), FORMS)
    for i in range(n):
        slots = matrix_slots(kind, config, i)
        for name, (field, index) in slots.items():
            found[field][index] = matrices[name][0]
        for j, names in enumerate(after_norms(slots)):
            some = [matrices[name][0].form for name in names]
            forms[i, j] = min(some), max(some)
    layers = Layers(**found, **norm_fields(vectors, config, kind.norm_offset), **kind.fields(vectors, config),
                  forms=forms,
                  head=matrices.get("lm_head.weight", matrices["model.embed_tokens.weight"]).copy(),
                  eps=np.array([config.rms_norm_eps]),
                  **no_slots(n), routing=np.array([(config.norm_topk_prob, n_experts > config.num_experts)], ROUTING))
    for name, (field, index) in kind.more(config).items():
        getattr(layers, field)[index] = matrices[name][0]
    return layers


def touch_pages(mappings: Iterable[mmap.mmap]) -> None:
    """Starts a thread that touches each page of mapped files: it takes 0.1 s per GB, beside the tokenizer.

    While the tokenizers library loads, no other thread runs Python; so the thread's work is one call of NumPy per file.
    """
    def touch() -> None:
        for mapping in mappings:
            np.frombuffer(mapping, np.uint8)[::mmap.PAGESIZE].max()

    with contextlib.suppress(RuntimeError):  # without another thread, the first pass touches them
        threading.Thread(target=touch, daemon=True).start()


def norm_fields(vectors: dict[str, np.ndarray], config: Config, offset: float) -> dict[str, np.ndarray]:
    """The norms of Layers."""
    more, none = np.float32(offset), np.zeros(config.head_dim, np.float32)

    def norm(name: str) -> np.ndarray:  # a delta net has no norms of heads
        return more + vectors[name] if name in vectors else none

    norms, head_norms = (np.array([[norm(f"model.layers.{i}.{name}.weight") for name in names]
                                   for i in range(config.num_hidden_layers)]) for names in (NORMS, HEAD_NORMS))
    return {"norms": norms, "head_norms": head_norms, "norm": norm("model.norm.weight")}


def stored_tensors(source: Source) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Name -> shape, name -> tensor in the files. Raises InputError for missing and misshapen ones."""
    kind = kind_for(source.kind)
    shapes = join_matrices(kind, source.kind.shapes(source.config),
                           lambda first, second: (first[0] + second[0], first[1]))
    return shapes, (join_matrices(kind, source.tensors, stacked) if source.saved is None else
                    checked_saved(source, shapes, saved_tensor))


def join_matrices(kind: Kind, tensors: Mapping[str, Any], join: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """The tensors, or their shapes, by name; of two in kind.joined, what `join` makes of them."""
    out = dict(tensors)
    for first, second, both in kind.joined:
        for name in tensors:
            if name.endswith(f".{second}.weight"):
                start = name.removesuffix(f"{second}.weight")
                out[f"{start}{both}.weight"] = join(out.pop(f"{start}{first}.weight"), out.pop(name))
    return out


def stacked(first: AnyTensor, second: AnyTensor) -> AnyTensor:
    """One matrix below the other."""
    if alike(first, second):
        return below(first, second)
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.dtype == second.dtype:
        return Tensor(first.dtype, np.concatenate([first.data, second.data]), first.mapping)
    return Tensor("F32", np.concatenate([to_float32(first), to_float32(second)]), first.mapping)


def saved_tensor(name: str, shape: tuple[int, ...], form: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The dtypes that a tensor in a folder of packed weights may have, and its shape there."""
    if BY_ROWS in name:
        return ("F32", "BF16", "F16"), shape
    packed = len(shape) == 2 and is_packed(packed_form(name, form))
    return (("U8",), packed_shape(*shape, packed_form(name, form))) if packed else (("F32",), shape)
