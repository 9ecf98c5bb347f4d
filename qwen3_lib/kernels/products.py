"""The products' machine code: which functions a pass needs."""
from __future__ import annotations

from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np

from qwen3_lib.io.errors import InputError
from qwen3_lib.kernels.build import LAYERS, address_of, make_kernels, place, read_code
from qwen3_lib.kernels.cpu import AVX512
from qwen3_lib.kernels.layout import (FORMATS, KEYS, PRODUCT, PROMPT, ROUNDED, TRANSPOSED, TRANSPOSES, VALUES,
                                      VECTORS, WIDE, WIDENS, is_packed)
from qwen3_lib.kernels.objects import compile_product
from qwen3_lib.kernels.vectors import AT_ONCE, MANY, ONE, Way, way_of, widened_form

Needs = tuple[tuple[int, int], ...]  # (format, number of vectors) of products


@lru_cache(64)
def functions_for(needs: Needs, queries: Needs = ()) -> np.ndarray:
    """The addresses of the functions for products with weights and, in `queries`, for attention to a cache.

    -> int64 [5, formats, 3, VECTORS + 1]: [PRODUCT, format, 0, n] multiplies n vectors with rows of a format if all
    vectors are multiplied at once, [.., 1, n] if there are more; likewise for attention [KEYS, ...], and
    [VALUES, format, 0, n] of weighted_rows. Where n is 0, the most vectors that are multiplied at once.
    [WIDENS, format, 0, 0] makes a block of a format its widened_form, which [PRODUCT, format, 2, n] multiplies with
    n of PROMPT vectors or more; it is 0 where that's not needed. [TRANSPOSES, format, 0, 0] transposes keys, which
    [KEYS, format, 2, n] multiplies with n of TRANSPOSED queries or more: that pays with the registers of AVX-512.
    """
    table = np.zeros((5, len(FORMATS), 3, VECTORS + 1), np.int64)
    for form, n in needs:
        if n >= PROMPT and (wide := widened_form(form)) != form:
            way = way_of(wide, MANY)
            table[WIDENS, form, 0, 0] = function("widened", form, 1, way)
            table[PRODUCT, form, 2, 0] = way.vectors
            for size in sizes(n, way.vectors):
                table[PRODUCT, form, 2, size] = function("packed_product", wide, size, way)
        else:
            fill(table[PRODUCT, form], form, n)
    for form, n in queries:
        way = way_of(form, AT_ONCE)
        if form == ROUNDED and AVX512 and n >= TRANSPOSED:
            table[TRANSPOSES, form, 0, 0] = function("transposed_keys", form, 1, way)
            table[KEYS, form, 2, 0], found = VECTORS, sizes(n, VECTORS)
            for size in found:
                table[KEYS, form, 2, size] = function("transposed_product", form, size, way)
        else:
            found = fill(table[KEYS, form], form, n)
        for size in found:
            kind = "weighted_pairs" if form == ROUNDED and AVX512 else "weighted_rows"
            table[VALUES, form, 0, size] = function(kind, form, size, way)
    return table


def fill(functions: np.ndarray, form: int, n: int) -> set[int]:
    """Writes the functions for n vectors into a part of a table -> the numbers of vectors that they multiply at once."""
    functions[:2, 0] = [way_of(form, count).vectors for count in (AT_ONCE, MANY)]
    many = int(n > functions[0, 0])
    found = sizes(n, int(functions[many, 0]))
    for size in found:
        way = way_of(form, MANY if many else ONE if size == 1 else AT_ONCE)
        functions[many, size] = function("packed_product" if is_packed(form) else "float_product", form, size, way)
    return found


def sizes(n: int, most: int) -> set[int]:
    """How many vectors are multiplied at once if n are shared evenly, in as few parts as possible."""
    tiles = -(-n // most)
    return {n // tiles, -(-n // tiles)}


@cache
def function(kind: str, form: int, n: int, way: Way) -> int:
    """The address of a product's function."""
    name = f"{kind}_{FORMATS[form].name}_{n}_{way.rows}_{way.prefetches}"
    return address_of(name, partial(compile_product, name, kind, form, n, way))


def any_number(form: int, most: int) -> Needs:
    """What is needed for any number of vectors up to the most: larger ones than here need no other functions."""
    return tuple((form, n) for n in (*range(1, 2 * VECTORS + 1), PROMPT) if n <= most)


def compile_all() -> Path:
    """Compiles all that any model needs -> the folder where it is kept. Raises InputError if it can't be kept."""
    names = (*LAYERS, "quantize_block", "pack_block")
    make_kernels(*names)
    for form in range(WIDE):
        needs = any_number(form, PROMPT)
        functions_for(needs, () if is_packed(form) else (*needs, (form, TRANSPOSED + 1)))
    folder, made_from = place()
    if folder is None or any(read_code(folder / f"{name}.o", made_from) is None for name in names):
        raise InputError(f"the kernels can't be kept: {folder or 'NUMBA_CACHE_DIR'} must be a folder that belongs to "
                         "you and that only you can write to")
    return folder
