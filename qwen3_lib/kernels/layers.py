"""The kernels of qwen3_numba.py: what numba compiles for this CPU, once. Run or import qwen3_numba.py, not this file.

A kernel with a namesake in qwen3.py computes the same; read the NumPy function first. The order is that of forward:

    small steps -> linear -> attention -> decoder layer -> experts -> logits -> the door from Python

One rule holds for all: the order in which numbers are added depends on the numbers' places in their sequence only. So a
token's logits depend on the tokens before it and on nothing else, bit for bit: not on the other tokens of the batch,
the number of threads, or the CPU. Nothing may be reassociated or contracted here; sums over many numbers are made by
`dot` and the products of vectors.py. layout.py tells how weights, vectors and the cache lie in memory.
"""
from functools import partial
from typing import NamedTuple

import numba
import numpy as np

from qwen3_lib.kernels.layout import (BF16, BLOCK, DEPTH, DOWN, F16, F32, FEW, FORMATS, GATE, GROUP, KV8, OUT,
                                      PANEL, STRIP, UP, VECTORS, WHOLE, Batch, K, Layers, Q, Space, Task, V, Weight,
                                      is_packed, padded, unit_size)
from qwen3_lib.kernels.vectors import (MOST_FLOATS, PACKED_SHAPES, dot, even_first, fused, float_product,
                                       half_from_float, meet, packed_product, take, to_bytes, to_pointer_f32,
                                       to_pointer_f64, to_pointer_i64, to_pointer_u8, to_pointer_u16, weighted_rows)

# ----------------------------------------------------------------------------------------------------------------------
# The small steps of a layer
# ----------------------------------------------------------------------------------------------------------------------


# A function is compiled once for each combination of its arguments' types. To numba a constant like 0 or True has a
# type of its own, np.int64(0) has not: that is why it is written below.
compiled = partial(numba.njit, nogil=True, error_model="numpy")
called_from_python = partial(compiled, no_cpython_wrapper=True, no_cfunc_wrapper=True)
up_to, unit_bytes, packed_form = compiled(padded), compiled(unit_size), compiled(is_packed)
PIECES = 4  # for each thread, of the work on many tokens
ONES = np.ones(BLOCK, np.float32)
# By the format, the vectors that a packed block is multiplied with together, and at once if there are no more.
TOGETHER, AT_ONCE = (np.array([getattr(PACKED_SHAPES.get(form), name, 0) for form in range(len(FORMATS))])
                     for name in ("vectors", "all"))


class Crew(NamedTuple):
    """A thread among those that run a kernel together, and the address of the barrier where they meet."""
    rank: int
    n_threads: int
    barrier: int


@compiled
def wait(crew):
    """Waits for the other threads."""
    meet(crew.barrier, crew.n_threads)


@compiled
def pieces(n, unit, n_tokens, crew, counter):
    """(start, end) of the parts of range(n) that a thread works on, in whole units.

    Few tokens: its share, once. Many: smaller pieces, the next one as soon as it is ready, so that nobody waits for a
    slow core, or a busy one. The counter counts the pieces that are taken.
    """
    units, parts = (n + unit - 1) // unit, crew.n_threads * (1 if n_tokens <= FEW else PIECES)
    step, i = (units + parts - 1) // parts * unit, np.int64(crew.rank)
    while i * step < n:
        yield i * step, min(i * step + step, n)
        i = crew.n_threads + take(crew.barrier, counter) if n_tokens > FEW else n


@compiled
def part_of(n, crew):
    """A thread's part of range(n)."""
    return range(n * crew.rank // crew.n_threads, n * (crew.rank + 1) // crew.n_threads)


@compiled
def weight_of(row):
    """A Weight from a row of int64."""
    return Weight(row[0], row[1], row[2], row[3], row[4])


@compiled
def exp(x):
    """e ** x for x <= 0, to (4 + 0.8 |x|) 1e-7 of it: 2 ** whole from a float's bits, 2 ** fraction by a polynomial."""
    x = (np.float32(-87.0) if x < -87 else x) * np.float32(1.4426950408889634)
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = fused(np.float32(1.535336188319500e-4), f, np.float32(1.339887440266574e-3))
    p = fused(p, f, np.float32(9.618437357674640e-3))
    p = fused(p, f, np.float32(5.550332471162809e-2))
    p = fused(p, f, np.float32(2.402264791363012e-1))
    p = fused(p, f, np.float32(6.931472028550421e-1))
    p = fused(p, f, np.float32(1.0))
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def rms_norm(x, weight, eps, out):
    """qwen3.rms_norm of x [d] into out [d, or more]."""
    whole = len(x) // 16 * 16
    square = dot(x.ctypes.data, x.ctypes.data, whole)
    for i in range(whole, len(x)):
        square += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(square / np.float32(len(x)) + np.float32(eps))
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@compiled
def apply_rope(x, cos, sin):
    """qwen3.apply_rope of x [head_dim] in place."""
    half = len(cos)
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i] + a * sin[i]


@compiled
def silu_times(gate, up):
    """gate [n] becomes silu(gate) * up."""
    for i in range(len(gate)):
        e = exp(-abs(gate[i]))
        gate[i] *= up[i] * (np.float32(1) if gate[i] >= 0 else e) / (np.float32(1) + e)


@compiled
def add_to(x, y):
    """x [n] becomes x + y."""
    for i in range(len(x)):
        x[i] += y[i]


@compiled
def add_times(x, y, factor):
    """x [n] becomes x + y * factor."""
    for i in range(len(x)):
        x[i] += y[i] * factor


@compiled
def largest_of(x):
    """The largest number of x float32 [1 or more]. NaN counts as the largest, unless its sign is negative."""
    bits, largest = x.view(np.int32), np.int32(-2**31)
    for i in range(len(x)):  # integers, in the order of the numbers: their maximum is found many at a time
        largest = max(largest, bits[i] ^ (bits[i] >> np.int32(31) & np.int32(0x7FFFFFFF)))
    return np.int32(largest ^ (largest >> np.int32(31) & np.int32(0x7FFFFFFF))).view(np.float32)


@compiled
def ready(x, n, form, packed, start, end):
    """Makes numbers start to end of x float32 [n, or more] the factor of a product with weights of this format.

    start is a multiple of 32, and end is one, too, or n.
    """
    if end == n:
        end = up_to(n, 2 * GROUP)
        x[n:end] = 0
    if form == BF16:
        even_first(x[start:end].ctypes.data, end - start)
    if packed_form(form):
        pack_vector(x, up_to(n, 2 * GROUP), packed, start, end)


@compiled
def pack_vector(x, width, packed, start, end):
    """Packs numbers start to end of x float32 [width], multiples of 32, for packed weights: see layout.py."""
    values = packed[:width].view(np.int8)
    scales = packed[width:width + width // 8].view(np.float32)
    sums = packed[width + width // 8:width + width // 4].view(np.int32)
    for g in range(start // GROUP, end // GROUP):
        largest, sums[g] = to_bytes(x[g * GROUP:].ctypes.data, np.int64(GROUP), values[g * GROUP:].ctypes.data)
        scales[g] = largest / np.float32(127) + largest * np.float32(0)  # NaN if a number is NaN or infinite


# ----------------------------------------------------------------------------------------------------------------------
# linear: the namesake of qwen3.linear, for one vector or many
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def linear(w, x, packed, out, column, start, end, own):
    """Rows start to end of a Weight times the vectors x float32 [n, ...] -> out float32 [n, ...], from `column` on.

    packed uint8 [n, ...]: the vectors once more, for packed weights. start is a multiple of 32, and `out` is padded to
    a multiple of 32. own float32: to work in.
    """
    n = len(x)
    if not packed_form(w.form):
        for first in range(start, end, STRIP):
            float_strip(w, x, out[:, column + first:], first, min(STRIP, end - first), own)
        return
    most = AT_ONCE[w.form] if n <= AT_ONCE[w.form] else TOGETHER[w.form]
    tiles, width = (n + most - 1) // most, up_to(w.columns, 2 * GROUP)
    for first in range(start, end, PANEL):
        ahead = w.stride if first + PANEL < end else 0
        for tile in range(tiles):
            t, next_ = n * tile // tiles, n * (tile + 1) // tiles
            packed_product(w.form, next_ - t, (w.address + first // PANEL * w.stride, packed[t].ctypes.data,
                                               packed.strides[0], width, out[t, column + first:].ctypes.data,
                                               out.strides[0], ahead, tile, tiles))


@compiled
def float_strip(w, x, out, first, rows, own):
    """`rows` rows of a Weight of floats, from `first` on, times the vectors x [n, ...] -> out [n, ...].

    Wide rows are multiplied in parts of columns, so that a part of the vectors stays in the first cache.
    """
    n, size, width, address = len(x), 4 if w.form == F32 else 2, up_to(w.columns, 32), w.address + first * w.stride
    tiles, sums, copy = (n + MOST_FLOATS - 1) // MOST_FLOATS, own.ctypes.data, own[STRIP * VECTORS * 16:].ctypes.data
    apart = tiles > 1 and width > WHOLE
    depth = DEPTH if apart else width
    if apart:
        copy_parts(address, w.stride, rows, width * size, depth * size, copy)
    for tile in range(tiles):
        t, next_ = n * tile // tiles, n * (tile + 1) // tiles
        for k in range(0, width, depth):
            columns, part = min(depth, width - k), (1 if k > 0 else 0) + (2 if k + depth < width else 0)
            place, stride = (copy + k * size * rows, columns * size) if apart else (address, w.stride)
            float_product(w.form, next_ - t, (place, stride, rows, x[t, k:].ctypes.data, x.strides[0], columns,
                                              out[t].ctypes.data, out.strides[0], sums, part))


@compiled
def copy_parts(address, stride, rows, width, depth, out):
    """Copies rows of `width` bytes, in parts of `depth` bytes, all rows' first parts before the second ones.

    A core fetches ahead what comes next in memory, and behind a part of a row that isn't the same part of the next row.
    """
    for r in range(rows):
        row = numba.carray(to_pointer_u8(address + r * stride), (width,))
        for start in range(0, width, depth):
            part = row[start:start + depth]
            copy = numba.carray(to_pointer_u8(out + start * rows + r * len(part)), part.shape)
            for i in range(len(part)):
                copy[i] = part[i]


# ----------------------------------------------------------------------------------------------------------------------
# Attention: blocks of positions, counted from the first token of a sequence, joined in their order
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def half_or_nan(x):
    """The bits of x as float16; NaN if x is too large: unlike infinity, NaN can't get lost in the softmax."""
    return half_from_float(x if abs(x) < np.float32(65520) else np.float32(np.nan))


@compiled
def bf16_from(x):
    """The bits of x as bfloat16, rounded to the nearest, ties to even."""
    bits = np.float32(x).view(np.uint32)
    return np.uint16(bits >> 16 | 0x40 if np.isnan(x) else bits + (bits >> 16 & 1) + 0x7FFF >> 16)


@compiled
def store_kv(row, form, values):
    """Writes float32 values into a row of the cache; zeros fill it up."""
    n = len(values)
    if form == F32:
        floats = row.view(np.float32)
        floats[n:] = 0
        for i in range(n):
            floats[i] = values[i]
        return
    if form == KV8:
        width = up_to(n, GROUP)
        whole, scales = row[:width // 2].view(np.int8), row[width // 2:]
        for g in range(width // GROUP):
            start = g * GROUP
            largest, _ = to_bytes(values[start:].ctypes.data, min(GROUP, n - start), whole[start:].ctypes.data)
            scales[g] = half_or_nan(largest / np.float32(127))  # NaN if a number is NaN or infinite
        return
    row[n:] = 0
    if form == F16:
        for i in range(n):
            row[i] = half_or_nan(values[i])
    else:
        for i in range(n):
            row[i] = bf16_from(values[i])


@compiled
def shaped(x, shape):
    """The beginning of x float32 as an array of this shape."""
    return numba.carray(to_pointer_f32(x.ctypes.data), shape)


@compiled
def exp_from(scores, n, largest):
    """Makes the first n scores exp(score - largest), and zeros up to a multiple of 16 -> their sum."""
    for i in range(n):
        scores[i] = exp(scores[i] - largest)
    scores[n:up_to(n, 16)] = 0
    return dot(scores.ctypes.data, ONES.ctypes.data, up_to(n, 16))


@compiled
def attend(q, group, seen, keys, values, form, out, scores):
    """Queries of one KV head times a block of positions -> their part of the attention's output.

    q float32 [n, width], `group` of them for each token; the first token sees `seen` positions of this block, the next
    one more, up to all; keys, values: rows of the cache, from the block's first position on.
    out float32 [n, width + 16]: the sum of the values, weighted with exp(score - largest), then `largest`, then the sum
    of the weights: softmax needs all scores only for its denominator (Milakov & Gimelshein 2018, "online" softmax).
    scores float32 [VECTORS, BLOCK]: to work in.
    """
    (n, width), stride = q.shape, keys.strides[0]
    tiles = (n + MOST_FLOATS - 1) // MOST_FLOATS
    out[:] = 0
    for tile in range(tiles):
        start, end = n * tile // tiles, n * (tile + 1) // tiles
        least = min(max(seen + start // group, 0), BLOCK)
        most = min(max(seen + (end - 1) // group, 0), BLOCK)
        if most == 0:
            continue
        p, p_stride, y, y_stride = scores.ctypes.data, scores.strides[0], out[start].ctypes.data, out.strides[0]
        float_product(form, end - start, (keys.ctypes.data, stride, most, q[start].ctypes.data, q.strides[0], width, p,
                                          p_stride, np.int64(0), np.int64(0)))
        for r in range(start, end):
            count = min(max(seen + r // group, 0), BLOCK)
            if count > 0:
                largest = largest_of(scores[r - start, :count])
                out[r, width], out[r, width + 1] = largest, exp_from(scores[r - start], count, largest)
        weighted_rows(form, end - start, (values.ctypes.data, stride, least, p, p_stride, width, y, y_stride))
        for r in range(start, end):  # what later tokens see and the first one doesn't
            rest = min(max(seen + r // group, 0), BLOCK) - least
            if rest > 0:
                weighted_rows(form, np.int64(1), (values[least:].ctypes.data, stride, rest,
                                                  p + (r - start) * p_stride + 4 * least, p_stride, width,
                                                  y + (r - start) * y_stride, y_stride))


@compiled
def join(left, right, width):
    """Adds the result `right` of `attend` to that of the positions before."""
    if right[width + 1] == 0:  # none of its positions is seen
        return
    largest = max(left[width], right[width])
    a, b = exp(left[width] - largest), exp(right[width] - largest)
    for i in range(width):
        left[i] = left[i] * a + right[i] * b
    left[width], left[width + 1] = largest, left[width + 1] * a + right[width + 1] * b


@compiled
def attend_blocks(task, q, group, keys, values, form, result, own):
    """The blocks of a Task, one after the other, for the queries of a KV head with these keys and values of the cache
    -> result [n, width + 16], as `attend` gives it. own float32: to work in."""
    scores, more = shaped(own, (VECTORS, BLOCK)), shaped(own[VECTORS * BLOCK:], result.shape)
    for block in range(task.block, task.block + task.n_blocks):
        start, part = block * BLOCK, result if block == task.block else more
        attend(q, group, task.seen - start, keys[start:], values[start:], form, part, scores)
        if block > task.block:
            for r in range(len(q)):
                join(result[r], part[r], q.shape[1])


@compiled
def cache_rows(batch, which, sequence, layer, head, n_kv_heads):
    """The rows uint16 [capacity, row_size] of a head in a layer: the keys of a sequence if `which` is 0, values if 1."""
    capacity, size = batch.caches[sequence, 2], batch.cache_rows[1]
    before = (layer * n_kv_heads + head) * capacity * size
    return numba.carray(to_pointer_u16(batch.caches[sequence, which] + 2 * before), (capacity, size))


@compiled
def attention(crew, layer, batch, space, head_dim):
    """The namesake of qwen3.attention: space.queries and the cache -> space.h [m, n_heads * head_dim].

    A task of one block gives the same as the same block of a task of many: threads never change the order of sums.
    """
    n_kv_heads, n_tasks = len(space.queries), len(batch.tasks)
    group, width = space.queries.shape[1] // len(batch.x), space.queries.shape[2]
    for first, end in pieces(n_tasks * n_kv_heads, 1, len(batch.x), crew, np.int64(0)):
        for item in range(first, end):  # a head's blocks in a row: the next one is fetched meanwhile
            head, i = item // n_tasks, item % n_tasks
            task = task_of(batch.tasks[i])
            q = space.queries[head, task.first * group:(task.first + task.n) * group]
            keys = cache_rows(batch, np.int64(0), task.sequence, layer, head, n_kv_heads)
            values = cache_rows(batch, np.int64(1), task.sequence, layer, head, n_kv_heads)
            attend_blocks(task, q, group, keys, values, batch.cache_rows[0], space.partials[i, head, :len(q)],
                          space.own[crew.rank])
    wait(crew)
    for item in range(crew.rank, len(batch.tiles) * n_kv_heads, crew.n_threads):
        i, head = item // n_kv_heads, item % n_kv_heads
        first, end = batch.tiles[i]
        task = task_of(batch.tasks[first])
        for r in range(task.n * group):
            result = space.partials[first, head, r]
            for other in range(first + 1, end):
                join(result, space.partials[other, head, r], width)
            out = space.h[task.first + r // group, (head * group + r % group) * head_dim:]
            for j in range(head_dim):
                out[j] = result[j] / result[width + 1]


@compiled
def task_of(row):
    """A Task from a row of int64."""
    return Task(row[0], row[1], row[2], row[3], row[4], row[5])


# ----------------------------------------------------------------------------------------------------------------------
# The decoder layer: one job for the team, for one token or for many
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def decoder_layer(crew, layer, layers, batch, space):
    """The namesake of qwen3.decoder_layer. The threads share the rows of each matrix, or the tokens, and meet."""
    w, norms, forms, m = layers.matrices[layer], layers.norms[layer], layers.forms[layer], len(batch.x)
    heads = len(space.queries), space.queries.shape[1] // m, 2 * batch.cos.shape[1]  # KV heads, group, head_dim
    q_size, kv_size = heads[0] * heads[1] * heads[2], heads[0] * heads[2]
    k_start, v_start = up_to(q_size, PANEL), up_to(q_size, PANEL) + up_to(kv_size, PANEL)
    normalize(crew, batch.x, norms[0], layers.eps[0], forms[0, 0], forms[0, 1], space)
    wait(crew)
    project(crew, np.int64(0), weight_of(w[Q]), space.h, space.packed, space.qkv, np.int64(0), space)
    project(crew, np.int64(1), weight_of(w[K]), space.h, space.packed, space.qkv, k_start, space)
    project(crew, np.int64(2), weight_of(w[V]), space.h, space.packed, space.qkv, v_start, space)
    wait(crew)
    place_heads(crew, layer, layers, batch, space, heads, k_start, v_start)
    wait(crew)
    attention(crew, layer, batch, space, heads[2])
    wait(crew)
    for t in part_of(m, crew):
        ready(space.h[t], q_size, w[OUT, 2], space.packed[t], np.int64(0), q_size)
    wait(crew)
    add_projected(crew, weight_of(w[OUT]), space.h, space.packed, batch.x, space)
    wait(crew)
    if layers.routers[layer, 3] > 0:
        moe(crew, layer, layers, batch, space)
        return
    normalize(crew, batch.x, norms[1], layers.eps[0], forms[1, 0], forms[1, 1], space)
    wait(crew)
    inner = space.gate[:m], space.up[:m], space.gate_packed[:m]
    for rows in pieces(w[GATE, 3], PANEL, m, crew, np.int64(0)):
        gate_and_up(weight_of(w[GATE]), weight_of(w[UP]), w[DOWN, 2], space.h, space.packed, inner, rows,
                    space.own[crew.rank])
    wait(crew)
    add_projected(crew, weight_of(w[DOWN]), inner[0], inner[2], batch.x, space)
    wait(crew)


@compiled
def normalize(crew, x, norm, eps, least, greatest, space):
    """rms_norm of a thread's part of the tokens x [m, d] -> space.h, ready for weights of these formats."""
    d = x.shape[1]
    for t in part_of(len(x), crew):
        rms_norm(x[t], norm, eps, space.h[t])
        ready(space.h[t], d, greatest, space.packed[t], np.int64(0), d)
        if packed_form(greatest) and not packed_form(least):
            ready(space.h[t], d, least, space.packed[t], np.int64(0), d)


@compiled
def project(crew, counter, w, x, packed, out, column, space):
    """A thread's rows of linear."""
    for start, end in pieces(w.rows, PANEL, len(x), crew, counter):
        linear(w, x, packed, out, column, start, end, space.own[crew.rank])


@compiled
def add_projected(crew, w, x, packed, residual, space):
    """residual [m, rows of w] += linear(x), a thread's rows."""
    for start, end in pieces(w.rows, PANEL, len(x), crew, np.int64(0)):
        linear(w, x, packed, space.qkv, np.int64(0), start, end, space.own[crew.rank])
        for t in range(len(residual)):
            add_to(residual[t, start:end], space.qkv[t, start:end])


@compiled
def gate_and_up(gate, up, form, x, packed, inner, rows, own):
    """Some rows (start, end) of the first half of qwen3.swiglu -> inner, ready for weights of this format.

    inner: float32 [n, intermediate] the result, float32 to work in, uint8 the result for packed weights.
    """
    out, other, out_packed = inner
    start, end = rows
    linear(gate, x, packed, out, np.int64(0), start, end, own)
    linear(up, x, packed, other, np.int64(0), start, end, own)
    for t in range(len(x)):
        silu_times(out[t, start:end], other[t, start:end])
        if start < end:
            ready(out[t], gate.rows, form, out_packed[t], start, end)


@compiled
def place_heads(crew, layer, layers, batch, space, heads, k_start, v_start):
    """A thread's queries with norm, RoPE and 1 / sqrt(head_dim) -> space.queries; keys and values -> the cache."""
    n_kv_heads, group, head_dim = heads
    norms, root, qkv, form = layers.head_norms[layer], np.float32(1 / np.sqrt(head_dim)), space.qkv, batch.cache_rows[0]
    for item in part_of(len(batch.x) * n_kv_heads, crew):
        t, head = item // n_kv_heads, item % n_kv_heads
        for g in range(group):
            query, i = space.queries[head, t * group + g, :head_dim], (head * group + g) * head_dim
            rms_norm(qkv[t, i:i + head_dim], norms[0], layers.eps[0], query)
            apply_rope(query, batch.cos[t], batch.sin[t])
            for j in range(head_dim):
                query[j] *= root
            space.queries[head, t * group + g, head_dim:] = 0  # where even_first has put numbers of another token
            if form == BF16:
                even_first(space.queries[head, t * group + g].ctypes.data, space.queries.shape[2])
        key = qkv[t, k_start + head * head_dim:k_start + (head + 1) * head_dim]
        value = qkv[t, v_start + head * head_dim:v_start + (head + 1) * head_dim]
        rms_norm(key, norms[1], layers.eps[0], key)
        apply_rope(key, batch.cos[t], batch.sin[t])
        sequence, position = batch.rows[t]
        store_kv(cache_rows(batch, np.int64(0), sequence, layer, head, n_kv_heads)[position], form, key)
        store_kv(cache_rows(batch, np.int64(1), sequence, layer, head, n_kv_heads)[position], form, value)


# ----------------------------------------------------------------------------------------------------------------------
# Mixture of experts: the pairs of a token and an expert, sorted by expert, so that each expert is read once for all
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def moe(crew, layer, layers, batch, space):
    """The namesake of qwen3.moe with the norm before it, added to batch.x. Of the experts, only chosen ones are read.

    A pair's result depends on its token and its expert, and a token adds its pairs in the order of its own
    probabilities: the other tokens change where a pair lies, and nothing else.
    """
    x, router, experts, own = batch.x, weight_of(layers.routers[layer]), layers.experts[layer], space.own[crew.rank]
    hidden, k, n_pairs = x.shape[1], space.chosen.shape[1], len(space.gathered)
    least, greatest = layers.forms[layer, 1, 0], layers.forms[layer, 1, 1]
    normalize(crew, x, layers.norms[layer, 1], layers.eps[0], router.form, greatest if packed_form(greatest) else router.form,
              space)
    wait(crew)
    project(crew, np.int64(0), router, space.h, space.packed, space.qkv, np.int64(0), space)
    wait(crew)
    for t in part_of(len(x), crew):
        choose(space.qkv[t, :router.rows], layers.norm_topk_prob[0], space.chosen[t], space.shares[t])
    wait(crew)
    if crew.rank == 0:
        sort_by_expert(space.chosen, space.starts)
    wait(crew)
    gather(crew, hidden, least, space)
    wait(crew)
    for e in range(len(experts)):
        first, end = space.starts[e], space.starts[e + 1]
        if first < end:
            gate, up, form = weight_of(experts[e, 0]), weight_of(experts[e, 1]), experts[e, 2, 2]
            inner = space.gate[first:end], space.up[first:end], space.gate_packed[first:end]
            gate_and_up(gate, up, form, space.gathered[first:end], space.gathered_packed[first:end], inner,
                        expert_share(gate.rows, first, end, n_pairs, crew), own)
    wait(crew)
    for e in range(len(experts)):
        first, end = space.starts[e], space.starts[e + 1]
        if first < end:
            start, stop = expert_share(hidden, first, end, n_pairs, crew)
            linear(weight_of(experts[e, 2]), space.gate[first:end], space.gate_packed[first:end],
                   space.gathered[first:end], np.int64(0), start, stop, own)
    wait(crew)
    for start, end in pieces(hidden, PANEL, len(x), crew, np.int64(0)):
        for t in range(len(x)):
            sum_ = space.h[t, start:end]
            sum_[:] = 0
            for r in range(k):
                add_times(sum_, space.gathered[space.chosen[t, r], start:end], space.shares[t, r])
            add_to(x[t, start:end], sum_)
    wait(crew)


@compiled
def choose(logits, normalized, chosen, shares):
    """A router's logits [num_experts] -> the most likely experts, of equal ones the first, and their probabilities."""
    largest, total, sum_ = largest_of(logits), np.float32(0), np.float32(0)
    for e in range(len(logits)):
        logits[e] = exp(logits[e] - largest)
    for e in range(len(logits)):
        total += logits[e]
    for r in range(len(chosen)):
        best, most = 0, np.float32(-1)  # expert 0 if all are NaN
        for e in range(len(logits)):
            if logits[e] > most:
                best, most = e, logits[e]
        chosen[r], shares[r] = best, logits[best] / total
        logits[best] = -1
        sum_ += shares[r]
    if normalized:
        for r in range(len(shares)):
            shares[r] /= sum_


@compiled
def sort_by_expert(chosen, starts):
    """Gives each pair a row, in the order of experts, then of tokens: see `chosen` and `starts` in layout.py."""
    starts[:] = 0
    for t in range(len(chosen)):
        for r in range(chosen.shape[1]):
            starts[chosen[t, r] + 2] += 1
    for e in range(2, len(starts)):
        starts[e] += starts[e - 1]
    for t in range(len(chosen)):  # starts[e + 1] is the next row of expert e, and in the end the first of the next one
        for r in range(chosen.shape[1]):
            e = chosen[t, r]
            chosen[t, r] = starts[e + 1]
            starts[e + 1] += 1


@compiled
def gather(crew, n, form, space):
    """Copies a thread's part of the tokens' vectors [n] to the rows of their pairs, ready for BF16 if form is that."""
    width = up_to(n, 2 * GROUP)
    for t in part_of(len(space.h), crew):
        for r in range(space.chosen.shape[1]):
            vector, packed = space.gathered[space.chosen[t, r]], space.gathered_packed[space.chosen[t, r]]
            for i in range(width):
                vector[i] = space.h[t, i]
            for i in range(width * 5 // 4):
                packed[i] = space.packed[t, i]
            if form == BF16:
                even_first(vector.ctypes.data, width)


@compiled
def expert_share(n, first, end, n_pairs, crew):
    """(start, end) of a thread's part of the n rows, in whole blocks, of an expert with the pairs first to end - 1.

    The threads share the blocks of all experts one after the other, each block counted once for each of its pairs.
    """
    blocks, count = (n + PANEL - 1) // PANEL, end - first
    every, before = n_pairs * blocks, first * blocks
    start = (every * crew.rank // crew.n_threads - before + count - 1) // count
    stop = (every * (crew.rank + 1) // crew.n_threads - before + count - 1) // count
    return min(n, min(max(start, 0), blocks) * PANEL), min(n, min(max(stop, 0), blocks) * PANEL)


# ----------------------------------------------------------------------------------------------------------------------
# Logits
# ----------------------------------------------------------------------------------------------------------------------

@compiled
def output_logits(crew, layers, batch, space):
    """The end of qwen3.forward: norm and lm_head of the rows `wanted` of batch.x -> batch.logits."""
    n, head = len(batch.wanted), weight_of(layers.head)
    for i in part_of(n, crew):
        rms_norm(batch.x[batch.wanted[i]], layers.norm, layers.eps[0], space.h[i])
        ready(space.h[i], head.columns, head.form, space.packed[i], np.int64(0), head.columns)
    wait(crew)
    project(crew, np.int64(0), head, space.h[:n], space.packed[:n], batch.logits, np.int64(0), space)
    wait(crew)


# ----------------------------------------------------------------------------------------------------------------------
# The door from Python
# ----------------------------------------------------------------------------------------------------------------------


def array_of(pointer, n_dimensions):
    """A function that makes a row of a table, see layout.table, an array."""
    @compiled
    def read(row):
        return numba.carray(pointer(row[0]), (row[1], row[2], row[3], row[4])[:n_dimensions])
    return read


floats1, floats2, floats3, floats4 = (array_of(to_pointer_f32, n) for n in (1, 2, 3, 4))
ints1, ints2, ints3, ints4 = (array_of(to_pointer_i64, n) for n in (1, 2, 3, 4))
bytes1, bytes2, doubles1 = array_of(to_pointer_u8, 1), array_of(to_pointer_u8, 2), array_of(to_pointer_f64, 1)


@compiled
def table_at(address, n):
    """A table of n arrays."""
    return numba.carray(to_pointer_i64(address), (n, 5))


@called_from_python
def decoder_layers(record, rank):
    """Runs the layers of a Job, in place of batch.x, and the logits after all. Each thread of the team calls this."""
    job, n = numba.carray(to_pointer_i64(record), (7,)), np.int64
    w, b, s = table_at(job[4], n(10)), table_at(job[5], n(10)), table_at(job[6], n(14))
    layers = Layers(ints3(w[0]), floats3(w[1]), floats3(w[2]), floats1(w[3]), ints1(w[4]), doubles1(w[5]), ints3(w[6]),
                    ints2(w[7]), ints4(w[8]), ints1(w[9]))
    batch = Batch(floats2(b[0]), floats2(b[1]), floats2(b[2]), ints2(b[3]), ints2(b[4]), ints2(b[5]), ints1(b[6]),
                  floats2(b[7]), ints2(b[8]), ints1(b[9]))
    space = Space(floats2(s[0]), bytes2(s[1]), floats2(s[2]), floats3(s[3]), floats2(s[4]), floats2(s[5]), bytes2(s[6]),
                  floats4(s[7]), floats2(s[8]), floats2(s[9]), bytes2(s[10]), ints2(s[11]), floats2(s[12]), ints1(s[13]))
    crew = Crew(rank, job[0], job[1])
    for layer in range(job[2], job[3]):
        decoder_layer(crew, layer, layers, batch, space)
    if job[3] == len(layers.matrices):
        output_logits(crew, layers, batch, space)
