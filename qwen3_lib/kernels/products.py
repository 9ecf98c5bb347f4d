"""The products' machine code: which functions a pass needs."""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from qwen3_lib.io.errors import InputError
from qwen3_lib.io.models import MODEL_TYPES
from qwen3_lib.kernels.build import code_place, function, make_kernels, product_kind, read_code, symbol
from qwen3_lib.kernels.cpu import AVX512, LONG, PAIRS, PATH
from qwen3_lib.kernels.kind import kind_for, steps_of
from qwen3_lib.kernels.layout import (BF16, FORMATS, FUNCTIONS, IN_PARTS, KEYS, PRODUCT, PROMPT, REARRANGED, ROUNDED,
                                      STORABLE, TOGETHER, TRANSPOSED, TURNED, VALUES, WIDENED, is_packed)
from qwen3_lib.kernels.spread import DOTS, SPREAD_WAY
from qwen3_lib.kernels.vectors import AT_ONCE, MANY, ONE, Way, way_of, widened_form
from qwen3_lib.kernels.ways import Ways, measure

PACKERS = ("quantize.quantize_block",), ("quantize.pack_block",)  # kernels for loading
TRANSPOSABLE = (ROUNDED,) if AVX512 else (BF16, ROUNDED)  # formats whose rows a prompt's products take transposed
Needs = tuple[tuple[int, int], ...]  # (format, number of vectors) of products


@lru_cache(64)
def functions_for(needs: Needs, queries: Needs = (), ways: Ways = ()) -> np.ndarray:
    """The functions for products with weights and, in `queries`, for attention to a cache -> FUNCTIONS [3, formats, 4].

    ways: those of one vector that are not the default.
    [PRODUCT, format, TOGETHER] multiplies all vectors at once with rows of a format, [.., IN_PARTS] parts of them;
    likewise [KEYS, ..] for attention, and [VALUES, format, TOGETHER] of weighted_rows. [.., REARRANGED], where
    `most` > 0, does so for many vectors, after its `rearrange` has made rows what it multiplies: of packed weights, a
    block its widened_form, or spread (AVX2); other weights and keys transposed; values in pairs (without AVX-512).
    [.., TURNED] does so with vectors that layers.turn_all has turned.
    """
    table = np.zeros((3, len(FORMATS), 4), FUNCTIONS)
    for form, n in needs:
        if n >= WIDENED[form] and (wide := widened_form(form)) != form:
            way, functions = way_of(wide, MANY), table[PRODUCT, form, REARRANGED]
            functions.rearrange = function("widened", form, 1, way)
            fill(functions, way.vectors, "packed_product", wide, n, lambda _, way=way: way)
        elif n >= WIDENED[form] and is_packed(form) and PATH == DOTS:
            functions = table[PRODUCT, form, REARRANGED]
            functions.rearrange = function("spread", form, 1, SPREAD_WAY)
            fill(functions, SPREAD_WAY.vectors, "spread_product", form, n, lambda _: SPREAD_WAY)
        elif n >= LONG and form in TRANSPOSABLE:
            fill_transposed(table[PRODUCT, form, REARRANGED], "transposed_product", form, n)
            if PAIRS:
                fill_transposed(table[PRODUCT, form, TURNED], "turned_product", form, n)
        else:
            fill_product(table[PRODUCT, form], form, n, dict(ways).get(form))
    for form, n in queries:
        way = way_of(form, AT_ONCE)
        kind = "weighted_pairs" if form == ROUNDED and AVX512 else "weighted_rows"
        if n >= TRANSPOSED and form in TRANSPOSABLE:
            found = fill_transposed(table[KEYS, form, REARRANGED], "transposed_scores", form, n)
            if not AVX512:
                functions = table[VALUES, form, REARRANGED]
                functions.rearrange = function("paired_rows", form, 1, way)
                fill(functions, way.vectors, "paired_product", form, n, lambda _, way=way: way)
                continue
        else:
            found = fill_product(table[KEYS, form], form, n)
        for size in found:
            table[VALUES, form, TOGETHER].address[size] = function(kind, form, size, way)
    return table


def fill_transposed(functions: np.record, kind: str, form: int, n: int) -> set[int]:
    """`fill` with the products of n vectors with rows that are transposed before."""
    way = way_of(form, AT_ONCE)
    functions.rearrange = function("transposed_rows", form, 1, way)
    return fill(functions, way.vectors, kind, form, n, lambda _: way)


def fill(functions: np.record, most: int, kind: str, form: int, n: int, way: Callable[[int], Way]) -> set[int]:
    """Writes the functions for n vectors, at most so many at once -> the numbers of vectors that they multiply."""
    functions.most, found = most, sizes(n, most)
    for size in found:
        functions.address[size] = function(kind, form, size, way(size))
    return found


def fill_product(functions: np.ndarray, form: int, n: int, one: Way | None = None) -> set[int]:
    """`fill` of FUNCTIONS [3] with the products of a format, as they lie in memory; `one`: the way of one vector."""
    few, many = (way_of(form, count) for count in (AT_ONCE, MANY))
    functions["most"][:REARRANGED] = few.vectors, many.vectors
    kind, one = product_kind(form), one or way_of(form, ONE)
    if n > few.vectors:
        return fill(functions[IN_PARTS], many.vectors, kind, form, n, lambda _: many)
    return fill(functions[TOGETHER], few.vectors, kind, form, n, lambda size: few if size > 1 else one)


def sizes(n: int, most: int) -> set[int]:
    """How many vectors are multiplied at once if n are shared evenly, in as few parts as possible."""
    tiles = -(-n // most)
    return {n // tiles, -(-n // tiles)}


def any_number(form: int, most: int) -> Needs:
    """What is needed for any number of vectors up to the most: larger ones than here need no other functions."""
    return tuple((form, n) for n in (*range(1, PROMPT + 2), LONG, LONG + 1) if n <= most)


def compile_all() -> Path:
    """Compiles all that any model needs, and measures ways -> the folder where it is kept.

    Raises InputError if it can't be kept.
    """
    configs: Any = SimpleNamespace(sparse_layers=()), SimpleNamespace(sparse_layers=(0,))
    wanted = [steps_of(kind_for(kind), config) for kind in {each.fast: each for each in MODEL_TYPES.values()
                                                             if each.fast}.values()
              for config in configs]
    make_kernels(*wanted, *PACKERS)
    for form in STORABLE:
        needs = any_number(form, LONG + 1)
        functions_for(needs, () if is_packed(form) else (*needs, (form, TRANSPOSED + 1)))
    folder, made_from = code_place()
    if folder is None or any(read_code(folder / f"{symbol(*steps)}.o", made_from) is None
                             for steps in (*wanted, *PACKERS)):
        raise InputError(f"the kernels can't be kept: {folder or 'NUMBA_CACHE_DIR'} must be a folder that belongs to "
                         "you and that only you can write to")
    measure()
    return folder
