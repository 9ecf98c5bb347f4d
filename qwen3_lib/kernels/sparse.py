"""The kernel of sparse attention: the positions that an index chooses. See qwen4_exp.py, and layers.py for the others.

A token that sees all is a task like those of layers.py. For any other, rows of the cache are copied one after the
other, a block of 256 at a time, and attention is computed as if they were all: so a token's sums depend on its own
choice only. Where the choice is everything, the two give the same bits.
"""
import numpy as np

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.crew import crew_of, items, pieces, wait
from qwen3_lib.kernels.delta import copy
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import bits_of, call_at, floats_at, uint16s_at
from qwen3_lib.kernels.layers import (apply_rope, attend, attend_blocks, cached_rows, gate_heads, join, join_tasks,
                                      place_heads, rms_norm, tiling, up_to)
from qwen3_lib.kernels.layout import BLOCK, F32, FEW, KEYS, PANEL, TRANSPOSED, VECTORS, K, Q

INDEX_QUERY, INDEX_BLOCK = range(2)  # of `index_norms`
SCORED = 1024  # blocks of the index that a thread scores at a time for few tokens: 0.5 MB


@compiled
def attend_chosen(record, rank, layer):
    """attend_heads of the positions that the index chooses. It does nothing in a layer without keys and values."""
    crew, job = crew_of(record, rank), fields.table(record)
    number = fields.places(job)[layer].attention
    if number < 0:
        return
    w, n_kv_heads, head_dim = fields.matrices(job)[layer], len(fields.queries(job)), fields.head_norms(job).shape[2]
    values = up_to(w[Q].rows, PANEL) + up_to(w[K].rows, PANEL)
    place_heads(crew, layer, job, up_to(w[Q].rows, PANEL), values)
    place_index(crew, number, values + n_kv_heads * head_dim, job)
    wait(crew)
    average_blocks(crew, number, job)
    wait(crew)
    choose_blocks(crew, number, job)
    wait(crew)
    sparse_attention(crew, layer, job)
    wait(crew)
    gate_heads(crew, w, job)
    wait(crew)


@compiled
def index_of(job, sequence, number):
    """The raw index keys of a sequence in a layer that attends [capacity, size], and those of blocks [n, width]."""
    index, size = fields.indices(job)[sequence], fields.indexing(job)[0].size
    width = fields.index_queries(job).shape[1]
    return (floats_at(index.keys + 4 * number * index.capacity * size, (index.capacity, size)),
            floats_at(index.blocks + 4 * number * index.n_blocks * width, (index.n_blocks, width)))


@compiled
def place_index(crew, number, start, job):
    """A thread's index queries, from column `start` of qkv on, with norm and RoPE; and the raw key after them."""
    sizes, rows, qkv, queries = fields.indexing(job)[0], fields.rows(job), fields.qkv(job), fields.index_queries(job)
    norm, eps, size = fields.index_norms(job)[number, INDEX_QUERY], fields.eps(job)[0], sizes.size
    cos, sin = fields.cos(job), fields.sin(job)
    for t in items(len(rows), crew):
        for g in range(sizes.heads):
            query, first = queries[t * sizes.heads + g], start + g * size
            rms_norm(qkv[t, first:first + size], norm, eps, query)
            query[size:] = 0
            apply_rope(query, cos[t], sin[t])
        keys, _ = index_of(job, rows[t].sequence, number)
        first = start + sizes.heads * size
        copy(qkv[t, first:first + size], keys[rows[t].position])


@compiled
def average_blocks(crew, number, job):
    """qwen4_exp.block_keys of the blocks whose last token is new."""
    whole, sizes, eps = fields.whole(job), fields.indexing(job)[0], fields.eps(job)[0]
    norm, cos, sin = fields.index_norms(job)[number, INDEX_BLOCK], fields.whole_cos(job), fields.whole_sin(job)
    ratio, size = sizes.ratio, sizes.size
    for i in items(len(whole), crew):
        keys, blocks = index_of(job, whole[i].sequence, number)
        block, first = blocks[whole[i].block], whole[i].block * ratio
        for j in range(size):
            sum_ = np.float32(0)
            for r in range(first, first + ratio):
                sum_ += keys[r, j]
            block[j] = sum_ / np.float32(ratio)
        rms_norm(block[:size], norm, eps, block)
        apply_rope(block, cos[i], sin[i])


@compiled
def choose_blocks(crew, number, job):
    """qwen4_exp.chosen_positions, as blocks, of each token that sees more than it may -> chosen_blocks.

    Of few tokens, the threads share the blocks, and meet before the choice; of many, each is one thread's.
    """
    rows, sizes, scores = fields.rows(job), fields.indexing(job)[0], fields.scores(job)
    chosen, few = fields.chosen_blocks(job), len(rows) <= FEW
    parts = (scores.shape[1] + SCORED - 1) // SCORED if few else 0
    for item in items(len(rows) * parts, crew):
        score(item // parts, item % parts * SCORED, SCORED, number, scores[item // parts], job, crew.rank)
    wait(crew)
    for t in items(len(rows), crew):
        n = (rows[t].position + 1) // sizes.ratio
        if n > sizes.most:
            own = scores[t if few else crew.rank]
            if not few:
                score(t, np.int64(0), n, number, own, job, crew.rank)
            choose_best(own[:n], chosen[t])


@compiled
def score(t, start, n, number, scores, job, rank):
    """A token's scores of n blocks from `start` on, or fewer: each the sum of its index queries' positive products
    with a block's key. A token that sees all needs none."""
    sizes, products, queries = fields.indexing(job)[0], fields.products(job), fields.index_queries(job)
    heads, width, row = sizes.heads, queries.shape[1], fields.rows(job)[t]
    end = min(start + n, (row.position + 1) // sizes.ratio)
    if end <= start or (row.position + 1) // sizes.ratio <= sizes.most:
        return
    _, blocks = index_of(job, row.sequence, number)
    blocks, scores, queries = blocks[start:end], scores[start:end], queries[t * heads:(t + 1) * heads]
    how, tiles = tiling(products[KEYS, F32], heads, TRANSPOSED)
    functions = products[KEYS, F32, how]
    out = floats_at(fields.own(job)[rank].ctypes.data, (heads, BLOCK))
    for first in range(0, len(blocks), BLOCK):
        some = scores[first:first + BLOCK]
        for tile in range(tiles):
            head, last = heads * tile // tiles, heads * (tile + 1) // tiles
            call_at(functions.address[last - head], (blocks[first:].ctypes.data, blocks.strides[0], len(some),
                                                     queries[head:].ctypes.data, queries.strides[0], width,
                                                     out[head:].ctypes.data, out.strides[0], np.int64(0), np.int64(0)))
        some[:] = 0
        for g in range(heads):
            add_positive(some, out[g, :len(some)])


@compiled
def add_positive(x, y):
    """x [n] becomes x + max(y, 0)."""
    for i in range(len(x)):
        x[i] += y[i] if y[i] > 0 else np.float32(0)


@compiled
def choose_best(scores, chosen):
    """The places of the best scores [n > len(chosen)], none below 0 and of equal ones the first -> chosen, in order.

    The bits of such numbers have their order. The least of the best is found bit by bit, from the highest one on.
    """
    least, n = np.int32(0), 0
    for bit in range(30, -1, -1):
        trial = least | np.int32(1) << np.int32(bit)
        if count_from(scores, trial) >= len(chosen):
            least = trial
    equal = len(chosen) - count_from(scores, least + np.int32(1))  # so many of those with `least` are chosen
    for i in range(len(scores)):
        bits = bits_of(scores[i])
        if n < len(chosen) and (bits > least or bits == least and equal > 0):
            equal -= bits == least
            chosen[n] = i
            n += 1


@compiled
def count_from(scores, bits):
    """How many scores have at least these bits."""
    n = np.int32(0)
    for i in range(len(scores)):
        n += np.int32(bits_of(scores[i]) >= bits)
    return n


@compiled
def sparse_attention(crew, layer, job):
    """layers.attention: the same for tasks of tokens that see all; see attend_copied for the others."""
    queries, tasks, partials = fields.queries(job), fields.tasks(job), fields.partials(job)
    sizes = fields.indexing(job)[0]
    products, own, form = fields.products(job), fields.own(job)[crew.rank], fields.cache_rows(job)[0].form
    copied, chosen = fields.copied(job)[crew.rank], fields.chosen_blocks(job)
    n_kv_heads, n_tasks, m = len(queries), len(tasks), len(fields.h(job))
    group = queries.shape[1] // m
    for first, end in pieces(n_tasks * n_kv_heads, np.int64(1), m, crew):
        for item in range(first, end):
            head, i = item // n_tasks, item % n_tasks
            task = tasks[i]
            q = queries[head, task.first * group:(task.first + task.n) * group]
            keys, values = cached_rows(job, task.sequence, layer, head, n_kv_heads)
            result = partials[i, head, :len(q)]
            if task.seen // sizes.ratio <= sizes.most:
                attend_blocks(products, task, q, group, keys, values, form, result, own)
                continue
            for t in range(task.n):
                attend_copied(products, task, task.seen + t, q[t * group:(t + 1) * group], chosen[task.first + t],
                              sizes.ratio, keys, values, form, result[t * group:(t + 1) * group], copied, own)
    wait(crew)
    join_tasks(crew, job)


@compiled
def attend_copied(products, task, length, q, chosen, ratio, keys, values, form, result, copied, own):
    """attend_blocks of the queries [group, width] of a token, the last of `length`, and the positions that it sees.

    copied uint16: room for keys and values of a block.
    """
    size, whole = keys.shape[1], len(chosen) * ratio
    seen = whole + length % ratio
    near_keys = uint16s_at(copied.ctypes.data, (BLOCK, size))
    near_values = uint16s_at(copied.ctypes.data + 2 * BLOCK * size, (BLOCK, size))
    more = floats_at(own[(VECTORS + q.shape[1]) * BLOCK:].ctypes.data, result.shape)
    for block in range(task.block, task.block + task.n_blocks):
        start, part = block * BLOCK, result if block == task.block else more
        for i in range(start, min(start + BLOCK, seen)):
            place = chosen[i // ratio] * ratio + i % ratio if i < whole else length - length % ratio + i - whole
            copy(keys[place], near_keys[i - start])
            copy(values[place], near_values[i - start])
        attend(products, q, len(q), seen - start, near_keys, near_values, form, part, own)
        if block > task.block:
            for r in range(len(q)):
                join(result[r], part[r], q.shape[1])
