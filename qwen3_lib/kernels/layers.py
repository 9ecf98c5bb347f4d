"""The kernels of qwen3_numba.py: what numba compiles for this CPU, once. Run or import qwen3_numba.py, not this file.

A kernel with a namesake in qwen3.py computes the same; read the NumPy function first. The order is that of forward:

    small steps -> linear -> attention -> decoder layer -> logits; a mixture of experts: experts.py

One rule holds for all: the order in which numbers are added depends on the numbers' places in their sequence only. So a
token's logits depend on the tokens before it and on nothing else, bit for bit: not on the other tokens of the batch,
the number of threads, or the CPU. Nothing may be reassociated or contracted here; sums over many numbers are made by
`dot` and the products of vectors.py and attention.py. layout.py tells how weights, vectors and the cache lie in memory.
"""
import numpy as np

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.cpu import LONG, PAIRS
from qwen3_lib.kernels.crew import crew_of, items, pieces, wait
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import (bits_of, bytes_at, call_at, dot, even_first, exp_of, exp_until, float_of,
                                          floats_at, half_from_float, pack_groups, round_groups, rounded_exp_until,
                                          to_bytes, turn_pairs, uint16s_at)
from qwen3_lib.kernels.layout import (BF16, BLOCK, DEPTH, DOWN, F16, F32, GATE, GROUP, GROUP16_BYTES, GROUP_BYTES,
                                      IN_PARTS, KEYS, KV8, OUT, PANEL, PRODUCT, PROMPT, REARRANGED, ROUNDED, SPREAD,
                                      STRIP, TOGETHER, TRANSPOSED, TURNED, UP, VALUES, VECTORS, WHOLE, WIDENED, K, Q, V,
                                      is_packed, padded, unit_size)

# ---- The small steps of a layer --------------------------------------------------------------------------------------


up_to, unit_bytes, form_is_packed = compiled(padded), compiled(unit_size), compiled(is_packed)


@compiled
def exp(x):
    """e ** x for x <= 0, see write_exp."""
    return exp_of(x)


@compiled
def sum_of_squares(x):
    whole = len(x) // 16 * 16
    square = dot(x.ctypes.data, x.ctypes.data, whole)
    for i in range(whole, len(x)):
        square += x[i] * x[i]
    return square


@compiled
def rms_norm(x, weight, eps, out):
    """qwen3.rms_norm of x [d] into out [d, or more]."""
    factor = np.float32(1) / np.sqrt(sum_of_squares(x) / np.float32(len(x)) + np.float32(eps))
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@compiled
def apply_rope(x, cos, sin):
    """qwen3.apply_rope of the first 2 * len(cos) numbers of x, in place."""
    half = len(cos)
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i] + a * sin[i]


@compiled
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    e = exp(-abs(x))
    return (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


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
def largest_of(x):
    """The largest number of x float32 [1 or more]. NaN counts as the largest, unless its sign is negative."""
    largest = np.int32(-2**31)
    for i in range(len(x)):  # integers, in the order of the numbers: their maximum is found many at a time
        largest = max(largest, in_order(bits_of(x[i])))
    return float_of(in_order(largest))


@compiled
def in_order(bits):
    """The bits of a float32 as an int32 in the order of the numbers, and back."""
    return np.int32(bits ^ (bits >> np.int32(31) & np.int32(0x7FFFFFFF)))


@compiled
def for_bf16(x, form):
    """Makes x float32 [n], n a multiple of 32, the factor of a product with BF16 or ROUNDED, if the format is that."""
    if form == ROUNDED:
        round_groups(x.ctypes.data, len(x), np.int64(4 * GROUP))
    if form == BF16 or form == ROUNDED and not PAIRS:
        even_first(x.ctypes.data, len(x))


@compiled
def ready(x, n, form, packed, start, end):
    """Makes numbers start to end of x float32 [n, or more] the factor of a product with weights of this format.

    start is a multiple of 32, and end is one, too, or n.
    """
    if end == n:
        end = up_to(n, 2 * GROUP)
        x[n:end] = 0
    for_bf16(x[start:end], form)
    if form_is_packed(form):
        group = start // GROUP
        pack_groups(x.ctypes.data + 4 * start, end - start, packed.ctypes.data + group * GROUP_BYTES,
                    np.int64(GROUP_BYTES), groups16_of(packed, n) + group * GROUP16_BYTES, np.int64(GROUP16_BYTES), n)


@compiled
def groups16_of(packed, n):
    """The address of the groups in 16 bits of a packed vector of n numbers."""
    return packed.ctypes.data + up_to(n, 2 * GROUP) // GROUP * GROUP_BYTES


# ---- linear: the namesake of qwen3.linear, for one vector or many ----------------------------------------------------


@compiled
def linear(products, w, x, packed, out, column, start, end, own, turned):
    """Rows start to end of a Weight times the vectors x float32 [n, ...] -> out float32 [n, ...], from `column` on.

    packed uint8 [n, ...]: the vectors once more, for packed weights. start is a multiple of 32, and `out` is padded to
    a multiple of 32. own float32: to work in. turned: what turn_all says.
    """
    n = len(x)
    if not form_is_packed(w.form):
        strip = STRIP
        if tiling(products[PRODUCT, w.form], n, LONG)[0] == REARRANGED:
            strip = min(STRIP, max(SPREAD // w.columns // PANEL, 1) * PANEL)
        for first in range(start, end, strip):
            float_strip(products, w, x, out[:, column + first:], first, min(strip, end - first), own, turned)
        return
    how, tiles = tiling(products[PRODUCT, w.form], n, WIDENED[w.form])
    functions, width = products[PRODUCT, w.form, how], up_to(w.columns, 2 * GROUP)
    for first in range(start, end, PANEL):
        block, ahead = w.address + first // PANEL * w.stride, w.stride if first + PANEL < end else 0
        if how == REARRANGED:
            call_at(functions.rearrange, (block, width, own.ctypes.data))
            block, ahead = own.ctypes.data, block + ahead - own.ctypes.data
        for tile in range(tiles):
            t, next_ = n * tile // tiles, n * (tile + 1) // tiles
            call_at(functions.address[next_ - t], (block, packed[t].ctypes.data, packed.strides[0], width,
                                                   out[t, column + first:].ctypes.data, out.strides[0], ahead, tile,
                                                   tiles))


@compiled
def tiling(table, n, many):
    """(TOGETHER, IN_PARTS or REARRANGED, how many parts) of n vectors, by FUNCTIONS [3]: see products.py."""
    rearranged = n >= many and table[REARRANGED].most > 0
    how = REARRANGED if rearranged else IN_PARTS if n > table[TOGETHER].most else TOGETHER
    return how, (n + table[how].most - 1) // table[how].most


@compiled
def float_strip(products, w, x, out, first, rows, own, turned):
    """`rows` rows of a Weight of floats, from `first` on, times the vectors x [n, ...] -> out [n, ...].

    Wide rows are multiplied in parts of columns, so that a part of the vectors stays in the first cache. A
    prompt's rows of bf16 are transposed before.
    """
    n, size, width, address = len(x), 4 if w.form == F32 else 2, up_to(w.columns, 32), w.address + first * w.stride
    how, tiles = tiling(products[PRODUCT, w.form], n, LONG)
    functions = products[PRODUCT, w.form, TURNED if turned == 1 else how]
    room = 2 if PAIRS and w.form == ROUNDED else 1  # vectors of bf16 take half of it
    sums, copy = own.ctypes.data, own[STRIP * VECTORS * 16:].ctypes.data
    transposes = functions.rearrange if how == REARRANGED else 0
    apart, padded_rows = tiles > 1 and width > room * WHOLE and turned == 0, rows
    depth = (WHOLE if transposes else room * DEPTH) if apart else width
    if transposes:
        padded_rows = up_to(rows, PANEL)
        for k in range(0, width, depth):
            call_at(transposes, (address + k * size, w.stride, rows, min(depth, width - k),
                                 copy + k * size * padded_rows))
    elif apart:
        copy_parts(address, w.stride, rows, width * size, depth * size, copy)
    for tile in range(tiles):
        t, next_ = n * tile // tiles, n * (tile + 1) // tiles
        for k in range(0, width, depth):
            columns, part = min(depth, width - k), (1 if k > 0 else 0) + (2 if k + depth < width else 0)
            place, stride = address, w.stride
            if apart or transposes:
                place, stride = copy + k * size * padded_rows, columns * size
            call_at(functions.address[next_ - t], (place, stride, rows, x[t, k:].ctypes.data, x.strides[0], columns,
                                                   out[t].ctypes.data, out.strides[0], sums, part))


@compiled
def turn_all(crew, w, x, job):
    """Turns the vectors x [n, ...] for products with a prompt's wide rows of bf16 -> 1 if it has, or 0.

    Such vectors don't fit into a core's first cache, but turned ones are read once for each of 16 partial sums.
    """
    products = fields.products(job)
    if form_is_packed(w.form) or w.columns <= WHOLE or len(x) < LONG or products[PRODUCT, w.form, TURNED].most == 0:
        return np.int64(0)
    for t in items(len(x), crew):
        turn_pairs(x[t].ctypes.data, up_to(w.columns, GROUP), fields.own(job)[crew.rank].ctypes.data)
    wait(crew)
    return np.int64(1)


@compiled
def copy_parts(address, stride, rows, width, depth, out):
    """Copies rows of `width` bytes, in parts of `depth` bytes, all rows' first parts before the second ones.

    A core fetches ahead what comes next in memory. After a part of a row, that should be the same part of the next row.
    """
    for r in range(rows):
        row = bytes_at(address + r * stride, (width,))
        for start in range(0, width, depth):
            part = row[start:start + depth]
            copy = bytes_at(out + start * rows + r * len(part), (len(part),))
            for i in range(len(part)):
                copy[i] = part[i]


# ---- Attention: blocks of positions, counted from the first token of a sequence, joined in their order ---------------


@compiled
def half_or_nan(x):
    """The bits of x as float16; NaN if x is too large: unlike infinity, NaN can't get lost in the softmax."""
    return half_from_float(x if abs(x) < np.float32(65520) else np.float32(np.nan))


@compiled
def bf16_from(x):
    """The bits of x as bfloat16, rounded to the nearest, ties to even."""
    bits = np.uint32(bits_of(x))
    return np.uint16(bits >> 16 | 0x40 if np.isnan(x) else bits + (bits >> 16 & 1) + 0x7FFF >> 16)


@compiled
def store_kv(row, form, values):
    """Writes float32 values into a row of the cache; zeros fill it up."""
    n = len(values)
    if form == F32:
        floats = floats_at(row.ctypes.data, (len(row) // 2,))
        floats[n:] = 0
        for i in range(n):
            floats[i] = values[i]
        return
    if form == KV8:
        width = up_to(n, GROUP)
        whole, scales = row.ctypes.data, row[width // 2:]
        for g in range(width // GROUP):
            start = g * GROUP
            scales[g] = half_or_nan(to_bytes(values[start:].ctypes.data, min(GROUP, n - start), whole + start))
        return
    row[n:] = 0
    if form == F16:
        for i in range(n):
            row[i] = half_or_nan(values[i])
    else:
        for i in range(n):
            row[i] = bf16_from(values[i])


@compiled
def seen_by(token, seen):
    """How many positions of a block a token sees, see `attend`."""
    return min(max(seen + token, 0), BLOCK)


@compiled
def attend(products, q, group, seen, keys, values, form, out, own):
    """Queries of one KV head times a block of positions -> their part of the attention's output.

    q float32 [n, width], `group` of them for each token; keys, values: rows of the cache, from the block's first
    position on. The first token sees `seen` positions of this block, the next one more, up to all.
    out float32 [n, width + 16]: the sum of the values, weighted with exp(score - largest), then `largest`, then the sum
    of the weights: softmax needs all scores only for its denominator (Milakov & Gimelshein 2018, "online" softmax).
    own float32 [(VECTORS + width) * BLOCK]: to work in.
    """
    (n, width), stride, size = q.shape, keys.strides[0], np.int64(2 if PAIRS and form == ROUNDED else 4)
    how, tiles = tiling(products[KEYS, form], n, TRANSPOSED)
    functions, weigh_one = products[KEYS, form, how], products[VALUES, form, TOGETHER].address[1]
    scores, own_keys = floats_at(own.ctypes.data, (VECTORS, BLOCK)), own[VECTORS * BLOCK:].ctypes.data
    k, v, in_block = keys.ctypes.data, values.ctypes.data, seen_by((n - 1) // group, seen)
    if how == REARRANGED and in_block > 0:
        call_at(functions.rearrange, (k, stride, in_block, width, own_keys))
        k = own_keys
    weigh, v_stride = products[VALUES, form, TOGETHER], stride
    if how == REARRANGED and products[VALUES, form, REARRANGED].most > 0:
        weigh, v, v_stride = products[VALUES, form, REARRANGED], own_keys + 2 * BLOCK * width, in_block // 2 * 64
        call_at(weigh.rearrange, (values.ctypes.data, stride, in_block, width, v))
    out[:] = 0
    for tile in range(tiles):
        start, end = n * tile // tiles, n * (tile + 1) // tiles
        least, most = seen_by(start // group, seen), seen_by((end - 1) // group, seen)
        if most == 0:
            continue
        least -= least % 2  # a pair of rows is never torn
        p, p_stride, y, y_stride = scores.ctypes.data, scores.strides[0], out[start].ctypes.data, out.strides[0]
        call_at(functions.address[end - start], (k, stride, most, q[start].ctypes.data, q.strides[0], width, p,
                                                 p_stride, np.int64(0), np.int64(0)))
        for r in range(start, end):  # each step for all rows: a core begins a row before it is done with the last one
            count = seen_by(r // group, seen)
            out[r, width] = largest_of(scores[r - start, :count]) if count > 0 else np.float32(0)
        for r in range(start, end):
            numbers, count, largest = scores[r - start].ctypes.data, seen_by(r // group, seen), out[r, width]
            if form == ROUNDED:
                out[r, width + 1] = rounded_exp_until(numbers, count, largest)
            else:
                out[r, width + 1] = exp_until(numbers, count, largest)
        call_at(weigh.address[end - start], (v, v_stride, least, p, p_stride, width, y, y_stride))
        for r in range(start, end):  # what later tokens see and the first one doesn't
            rest = seen_by(r // group, seen) - least
            if rest > 0:
                call_at(weigh_one, (values[least:].ctypes.data, stride, rest,
                                           p + (r - start) * p_stride + size * least, p_stride, width,
                                           y + (r - start) * y_stride, y_stride))


@compiled
def join(left, right, width):
    """Adds the result `right` of `attend` to that of the positions before."""
    if right[width + 1] == 0:  # none of its positions is seen
        return
    if left[width + 1] == 0:
        for i in range(width + 2):
            left[i] = right[i]
        return
    largest = max(left[width], right[width])
    a, b = exp(left[width] - largest), exp(right[width] - largest)
    for i in range(width):
        left[i] = left[i] * a + right[i] * b
    left[width], left[width + 1] = largest, left[width + 1] * a + right[width + 1] * b


@compiled
def attend_blocks(products, task, q, group, keys, values, form, result, own):
    """The blocks of a Task, one after the other, for the queries of a KV head with these keys and values of the cache
    -> result [n, width + 16], as `attend` gives it. own float32: to work in."""
    more = floats_at(own[(VECTORS + q.shape[1]) * BLOCK:].ctypes.data, result.shape)
    for block in range(task.block, task.block + task.n_blocks):
        start, part = block * BLOCK, result if block == task.block else more
        attend(products, q, group, task.seen - start, keys[start:], values[start:], form, part, own)
        if block > task.block:
            for r in range(len(q)):
                join(result[r], part[r], q.shape[1])


@compiled
def cached_rows(job, sequence, layer, head, n_kv_heads):
    """The keys and the values of a head in a layer of a sequence, rows uint16 [capacity, row_size]."""
    cache, size = fields.caches(job)[sequence], fields.cache_rows(job)[0].size
    before = 2 * (fields.places(job)[layer].attention * n_kv_heads + head) * cache.capacity * size
    return uint16s_at(cache.k + before, (cache.capacity, size)), uint16s_at(cache.v + before, (cache.capacity, size))


@compiled
def attention(crew, layer, job):
    """The namesake of qwen3.attention: the queries and the cache -> h [m, n_heads * head_dim].

    A task of one block gives the same as the same block of a task of many: threads never change the order of sums.
    """
    queries, tasks, partials = fields.queries(job), fields.tasks(job), fields.partials(job)
    products, own, form = fields.products(job), fields.own(job)[crew.rank], fields.cache_rows(job)[0].form
    n_kv_heads, n_tasks, m = len(queries), len(tasks), len(fields.h(job))
    group = queries.shape[1] // m
    for first, end in pieces(n_tasks * n_kv_heads, np.int64(1), m, crew):
        for item in range(first, end):  # a head's blocks in a row: the next one is fetched meanwhile
            head, i = item // n_tasks, item % n_tasks
            task = tasks[i]
            q = queries[head, task.first * group:(task.first + task.n) * group]
            keys, values = cached_rows(job, task.sequence, layer, head, n_kv_heads)
            attend_blocks(products, task, q, group, keys, values, form, partials[i, head, :len(q)], own)
    wait(crew)
    join_tasks(crew, job)


@compiled
def join_tasks(crew, job):
    """The results of tasks, joined and divided by the sums of their weights -> h."""
    tasks, tiles, partials, h = fields.tasks(job), fields.tiles(job), fields.partials(job), fields.h(job)
    queries, head_dim = fields.queries(job), fields.head_norms(job).shape[2]
    n_kv_heads, group, width = len(queries), queries.shape[1] // len(h), queries.shape[2]
    for item in items(len(tiles) * n_kv_heads, crew):
        i, head = item // n_kv_heads, item % n_kv_heads
        first, end = tiles[i].first, tiles[i].end
        task = tasks[first]
        for r in range(task.n * group):
            result = partials[first, head, r]
            for other in range(first + 1, end):
                join(result, partials[other, head, r], width)
            out = h[task.first + r // group, (head * group + r % group) * head_dim:]
            for j in range(head_dim):
                out[j] = result[j] / result[width + 1]


# ---- The decoder layer: one job for the team, for one token or for many ----------------------------------------------


@compiled
def project_heads(record, rank, layer):
    """The norm, and the rows of q, k and v: the beginning of qwen3.decoder_layer.

    The threads share the rows of each matrix, or the tokens, and wait for each other.
    """
    crew, job = crew_of(record, rank), fields.table(record)
    forms = fields.forms(job)[layer, 0]
    normalize(crew, fields.norms(job)[layer, 0], forms.least, forms.greatest, job)
    wait(crew)
    project_all(crew, fields.matrices(job)[layer], job)
    wait(crew)


@compiled
def project_all(crew, w, job):
    """A thread's rows of q, k and v, side by side -> qkv."""
    h, packed, qkv = fields.h(job), fields.packed(job), fields.qkv(job)
    turned = turn_all(crew, w[V], h, job)
    project(crew, w[Q], h, packed, qkv, np.int64(0), job, turned)
    project(crew, w[K], h, packed, qkv, up_to(w[Q].rows, PANEL), job, turned)
    project(crew, w[V], h, packed, qkv, up_to(w[Q].rows, PANEL) + up_to(w[K].rows, PANEL), job, turned)


@compiled
def attend_heads(record, rank, layer):
    """QK-Norm, RoPE and attention: from q, k and v to h, ready for the output's matrix.

    It does nothing in a layer without keys and values: see delta.py.
    """
    crew, job = crew_of(record, rank), fields.table(record)
    if fields.places(job)[layer].attention < 0:
        return
    w = fields.matrices(job)[layer]
    place_heads(crew, layer, job, up_to(w[Q].rows, PANEL), up_to(w[Q].rows, PANEL) + up_to(w[K].rows, PANEL))
    wait(crew)
    attention(crew, layer, job)
    wait(crew)
    gate_heads(crew, w, job)
    wait(crew)


@compiled
def gate_heads(crew, w, job):
    """The gates of heads, where they have some; then h is ready for the output's matrix."""
    out, h, packed, qkv = w[OUT], fields.h(job), fields.packed(job), fields.qkv(job)
    head_dim = fields.head_norms(job).shape[2]
    for t in items(len(h), crew):
        if w[Q].rows > out.columns:  # a head's gate follows its query
            for i in range(out.columns):
                h[t, i] *= sigmoid(qkv[t, i + (i // head_dim + 1) * head_dim])
        ready(h[t], out.columns, out.form, packed[t], np.int64(0), out.columns)


@compiled
def finish_dense(record, rank, layer):
    """The output's matrix and swiglu: the end of qwen3.decoder_layer."""
    crew, job = crew_of(record, rank), fields.table(record)
    add_projected(crew, fields.matrices(job)[layer, OUT], fields.h(job), fields.packed(job), job)
    wait(crew)
    swiglu(crew, layer, job)


@compiled
def swiglu(crew, layer, job):
    """The namesake of qwen3.swiglu with the norm before it, added to x."""
    w, forms = fields.matrices(job)[layer], fields.forms(job)[layer, 1]
    x, gate, gate_packed = fields.x(job), fields.gate(job), fields.gate_packed(job)
    normalize(crew, fields.norms(job)[layer, 1], forms.least, forms.greatest, job)
    wait(crew)
    inner = gate[:len(x)], fields.up(job)[:len(x)], gate_packed[:len(x)]
    turned = turn_all(crew, w[UP], fields.h(job), job)
    for rows in pieces(w[GATE].rows, np.int64(PANEL), len(x), crew):
        gate_and_up(fields.products(job), w[GATE], w[UP], w[DOWN].form, fields.h(job),
                    fields.packed(job), inner, rows, fields.own(job)[crew.rank], turned)
    wait(crew)
    add_projected(crew, w[DOWN], inner[0], inner[2], job)
    wait(crew)


@compiled
def normalize(crew, norm, least, greatest, job):
    """rms_norm of a thread's part of the tokens x [m, d] -> h, ready for weights of these formats."""
    x, h, packed, eps = fields.x(job), fields.h(job), fields.packed(job), fields.eps(job)[0]
    d = x.shape[1]
    for t in items(len(x), crew):
        rms_norm(x[t], norm, eps, h[t])
        ready_for_both(h[t], d, least, greatest, packed[t])


@compiled
def ready_for_both(x, n, least, greatest, packed):
    """Makes x float32 [n, or more] the factor of products with weights of these formats."""
    ready(x, n, greatest, packed, np.int64(0), n)
    if form_is_packed(greatest) and not form_is_packed(least):
        ready(x, n, least, packed, np.int64(0), n)


@compiled
def project(crew, w, x, packed, out, column, job, turned):
    """A thread's rows of linear."""
    products, own = fields.products(job), fields.own(job)[crew.rank]
    for start, end in pieces(w.rows, np.int64(PANEL), len(x), crew):
        linear(products, w, x, packed, out, column, start, end, own, turned)


@compiled
def add_projected(crew, w, factors, packed, job):
    """x [m, rows of w] += linear(factors), a thread's rows."""
    products, own, x, out = fields.products(job), fields.own(job)[crew.rank], fields.x(job), fields.qkv(job)
    turned = turn_all(crew, w, factors, job)
    for start, end in pieces(w.rows, np.int64(PANEL), len(x), crew):
        linear(products, w, factors, packed, out, np.int64(0), start, end, own, turned)
        for t in range(len(x)):
            add_to(x[t, start:end], out[t, start:end])


@compiled
def gate_and_up(products, gate, up, form, x, packed, inner, rows, own, turned):
    """Some rows (start, end) of the first half of qwen3.swiglu -> inner, ready for weights of this format.

    inner: float32 [n, intermediate] the result, float32 to work in, uint8 the result for packed weights.
    """
    out, other, out_packed = inner
    start, end = rows
    n = len(x)
    if n >= PROMPT and form_is_packed(form) and form_is_packed(gate.form):
        one, two = out.ctypes.data + 4 * start * n, other.ctypes.data + 4 * start * n
        left, right = floats_at(one, (n, PANEL)), floats_at(two, (n, PANEL))
        for first in range(start, end, PANEL):  # 32 rows at a time, in the same memory: they stay in the second cache
            linear(products, gate, x, packed, left, -first, first, min(first + PANEL, end), own, turned)
            linear(products, up, x, packed, right, -first, first, min(first + PANEL, end), own, turned)
            silu_times(floats_at(one, (n * PANEL,)), floats_at(two, (n * PANEL,)))
            left[:, gate.rows - first:] = 0
            place, stride = out_packed.ctypes.data + first // GROUP * GROUP_BYTES, out_packed.strides[0]
            place16 = groups16_of(out_packed, gate.rows) + first // GROUP * GROUP16_BYTES
            pack_groups(left.ctypes.data, left.size, place, stride, place16, stride, gate.rows)
            if first + PANEL >= up_to(gate.rows, PANEL) < up_to(gate.rows, 2 * GROUP):
                left[:] = 0
                pack_groups(left.ctypes.data, left.size, place + GROUP_BYTES, stride, place16 + GROUP16_BYTES, stride,
                            gate.rows)
        return
    linear(products, gate, x, packed, out, np.int64(0), start, end, own, turned)
    linear(products, up, x, packed, other, np.int64(0), start, end, own, turned)
    for t in range(n):
        silu_times(out[t, start:end], other[t, start:end])
        if start < end:
            ready(out[t], gate.rows, form, out_packed[t], start, end)


@compiled
def place_heads(crew, layer, job, k_start, v_start):
    """A thread's queries with norm, RoPE and 1 / sqrt(head_dim) -> queries; keys and values -> the cache."""
    norms, eps = fields.head_norms(job)[layer], fields.eps(job)[0]
    form, rows = fields.cache_rows(job)[0].form, fields.rows(job)
    qkv, queries, cos, sin = fields.qkv(job), fields.queries(job), fields.cos(job), fields.sin(job)
    n_kv_heads, group, head_dim = len(queries), queries.shape[1] // len(rows), norms.shape[1]
    apart = fields.matrices(job)[layer, Q].rows // (n_kv_heads * group)  # head_dim, or more with a gate after a query
    root = np.float32(1 / np.sqrt(head_dim))
    for item in items(len(rows) * n_kv_heads, crew):
        t, head = item // n_kv_heads, item % n_kv_heads
        for g in range(group):
            whole, i = queries[head, t * group + g], (head * group + g) * apart
            query = whole[:head_dim]
            rms_norm(qkv[t, i:i + head_dim], norms[0], eps, query)
            apply_rope(query, cos[t], sin[t])
            for j in range(head_dim):
                query[j] *= root
            whole[head_dim:] = 0  # where even_first has put numbers of another token
            for_bf16(whole, form)
        k, v = k_start + head * head_dim, v_start + head * head_dim
        key, value = qkv[t, k:k + head_dim], qkv[t, v:v + head_dim]
        rms_norm(key, norms[1], eps, key)
        apply_rope(key, cos[t], sin[t])
        keys, values = cached_rows(job, rows[t].sequence, layer, head, n_kv_heads)
        store_kv(keys[rows[t].position], form, key)
        store_kv(values[rows[t].position], form, value)


# ---- Logits ----------------------------------------------------------------------------------------------------------

@compiled
def output_logits(record, rank, _):
    """The end of qwen3.forward: norm and lm_head of the rows `wanted` of x -> logits."""
    job = fields.table(record)
    logits_of(crew_of(record, rank), fields.head(job), 0, job)


@compiled
def logits_of(crew, heads, number, job):
    """output_logits with one of some heads."""
    x, h, packed = fields.x(job), fields.h(job), fields.packed(job)
    head, wanted = heads[number], fields.wanted(job)
    for i in items(len(wanted), crew):
        rms_norm(x[wanted[i]], fields.norm(job), fields.eps(job)[0], h[i])
        ready(h[i], x.shape[1], head.form, packed[i], np.int64(0), x.shape[1])
    wait(crew)
    x, packed = h[:len(wanted)], packed[:len(wanted)]
    project(crew, head, x, packed, fields.logits(job), np.int64(0), job, np.int64(0))
    wait(crew)
