"""The kernels of qwen3_numba.py: what numba compiles for this CPU, once. Run or import qwen3_numba.py, not this file.

A kernel with a namesake in qwen3.py computes the same; read the NumPy function first. The order is that of forward:

    small steps -> linear -> attention -> packing weights -> decoder layers -> logits

Four of them are called from Python, two by a team of threads at the same time, each with its rank; `machine_code`
compiles them and all that they call. layout.py tells how weights, vectors and the cache lie in memory.
"""
from collections.abc import Iterable
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types
from numba.core import event
from numba.core.dispatcher import Dispatcher

from qwen3_io.errors import InputError
from qwen3_io.progress import progress
from qwen3_kernels.layout import (BF16, CACHE8, DEPTH, DOWN, FEW, FLOAT16, FLOAT32, GATE, GROUP, INT8, K, LONG_PART,
                                  OUT, PAIR, PANEL, PANELS, POSITIONS, Q, TILE, UP, V, padded, tile_parts)
from qwen3_kernels.vectors import (FEATURES, FLOAT_VECTORS, INT4_VECTORS, INT8_VECTORS, PATH, ROWS, SOME_VECTORS,
                                   add_bf16, add_f16, add_f32, add_i8, adds_bf16, adds_f16, adds_f32, adds_i8,
                                   bf16_from_float, dot_bf16, dot_f16, dot_f32, dot_i8, dots_bf16, dots_f16, dots_f32,
                                   dots_i8, float_from_bf16, float_from_bits, float_from_half, half_from_float, meet,
                                   one_float, one_int4, one_int8, panel_bf16, panel_f16, panel_f32, panel_i8,
                                   rows_bf16, rows_bf16_pair, rows_f16, rows_f16_pair, rows_f32, rows_f32_pair,
                                   rows_i8, rows_i8_pair, some_float, tiles_float, tiles_int4, tiles_int8,
                                   to_pointer_f32, to_pointer_u16, to_pointer_u8)

# ----------------------------------------------------------------------------------------------------------------------
# The small steps of a layer
# ----------------------------------------------------------------------------------------------------------------------


# A function is compiled once for each combination of its arguments' types. To numba a constant like 0 or True has a
# type of its own, np.int64(0) has not: that is why it is written below.
#
# Sums may be taken in any order, so that they become vectors; but NaN stays NaN, or nobody noticed broken weights.
compiled = partial(numba.njit, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
called_from_python = partial(compiled, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # see machine_code


@compiled
def share(n, rank, n_threads):
    """(start, end) of a thread's part of n rows, in whole panels."""
    panels = (n + PANEL - 1) // PANEL
    return min(n, panels * rank // n_threads * PANEL), min(n, panels * (rank + 1) // n_threads * PANEL)


@compiled
def part_of(n, rank, n_threads):
    """A thread's part of range(n)."""
    return range(n * rank // n_threads, n * (rank + 1) // n_threads)


up_to, parts_of_tile = compiled(padded), compiled(tile_parts)


@compiled
def exp(x):
    """e ** x for x <= 0, to (4 + 0.8 |x|) 1e-7 of it: 2 ** whole from a float's bits, 2 ** fraction by a polynomial."""
    x = (np.float32(-87.0) if x < -87 else x) * np.float32(1.4426950408889634)
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    return p * float_from_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@compiled
def rms_norm(x, weight, eps, out):
    """qwen3.rms_norm of x [d] into out [d, or more]."""
    square = np.float32(0)
    for i in range(len(x)):
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
def largest_of(x):
    """The largest number of x float32 [1 or more]. NaN counts as the largest, unless its sign is negative."""
    bits, largest = x.view(np.int32), np.int32(-2**31)
    for i in range(len(x)):  # integers, in the order of the numbers: their maximum is found many at a time
        largest = max(largest, bits[i] ^ (bits[i] >> np.int32(31) & np.int32(0x7FFFFFFF)))
    return float_from_bits(largest ^ (largest >> np.int32(31) & np.int32(0x7FFFFFFF)))


@compiled
def largest_size(x):
    """The largest absolute value of x float32. NaN counts as the largest."""
    bits, largest = x.view(np.int32), np.int32(0)
    for i in range(len(x)):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return float_from_bits(largest)


@compiled
def bytes_from(largest):
    """The factor that makes numbers up to `largest` bytes; 0 for such small ones that it would overflow."""
    return np.float32(127) / largest if largest > np.float32(1e-36) else np.float32(0)


@compiled
def pack_vector(x, packed, zero, first, last):
    """Packs groups first to last - 1 of x float32 [n], n a multiple of 64, for packed weights, see layout.py.

    zero: the byte that stands for 0 in the weights.
    """
    n = len(x)
    values = packed[:n].view(np.int8)
    scales, corrections = packed[n:n + n // 8].view(np.float32), packed[n + n // 8:n + n // 4].view(np.int32)
    for g in range(first, last):
        group, whole = x[g * GROUP:(g + 1) * GROUP], values[g * GROUP:(g + 1) * GROUP]
        largest = largest_size(group)
        inverse = bytes_from(largest)
        sum_, xq, qq = np.int32(0), np.float32(0), np.float32(0)
        for i in range(GROUP):
            q = np.floor(group[i] * inverse + np.float32(0.5))
            xq += group[i] * q
            qq += q * q
            whole[i] = np.int32(q)
            sum_ += np.int32(q)
        # The scale that errs least; NaN if a number is NaN or infinite.
        scales[g] = (xq / qq if qq > 0 else np.float32(0)) + largest * np.float32(0)
        corrections[g] = -zero * sum_


ZERO_INT8 = 128 if PATH.startswith("vnni") else 0  # the other instructions subtract it themselves
ZERO_INT4 = 8


@compiled
def ready(x, n, form, packed, start, end):
    """Makes numbers start to end of x float32 [n, or more] the factor of a product with weights in this format.

    start is a multiple of 32, end too, or n. See `linear`.
    """
    if form >= INT8 and start < end:
        width = up_to(n, 2 * GROUP)
        if end == n:
            x[n:width] = 0
            end = width
        zero = ZERO_INT8 if form == INT8 else ZERO_INT4
        pack_vector(x[:width], packed[:width * 5 // 4], zero, start // GROUP, end // GROUP)


# ----------------------------------------------------------------------------------------------------------------------
# linear: the namesake of qwen3.linear, for one vector or many
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def linear(weight, x, packed, out, column, start, end, space):
    """Rows start to end of a weight times the vectors x float32 [n, ...] -> out float32 [n, ...], from `column` on.

    weight: (address, bytes per row or packed block, format, rows, columns), see Weights. packed uint8 [n, ...]: the
    vectors once more, for packed weights. start is a multiple of 32, and `out` is padded to a multiple of 32. space
    float32: to work in.
    """
    address, stride, form, columns = weight[0], weight[1], weight[2], up_to(weight[4], 32)
    if form >= INT8:
        linear_packed(weight, packed, out, column, start, end)
    elif len(x) > FEW:
        linear_expanded(weight, x, out, column, start, end, space.ctypes.data)
    else:
        for r in range(start, end):
            for t in range(0, len(x), PAIR):
                float_row(address + r * stride, form, x[t].ctypes.data, x.strides[0], columns,
                          out[t].ctypes.data + 4 * (column + r), out.strides[0], min(PAIR, len(x) - t))


@compiled
def float_row(row, form, x, x_stride, n, out, out_stride, count):
    """A row of floats times `count` vectors, one or PAIR."""
    if form == BF16:
        if count == 1:
            dot_bf16(row, 0, x, x_stride, n, out, out_stride)
        else:
            dots_bf16(row, 0, x, x_stride, n, out, out_stride)
    elif form == FLOAT16:
        if count == 1:
            dot_f16(row, 0, x, x_stride, n, out, out_stride)
        else:
            dots_f16(row, 0, x, x_stride, n, out, out_stride)
    elif form == CACHE8:
        if count == 1:
            dot_i8(row, 0, x, x_stride, n, out, out_stride)
        else:
            dots_i8(row, 0, x, x_stride, n, out, out_stride)
    elif count == 1:
        dot_f32(row, 0, x, x_stride, n, out, out_stride)
    else:
        dots_f32(row, 0, x, x_stride, n, out, out_stride)


@compiled
def linear_packed(weight, packed, out, column, start, end):
    """Packed weights are multiplied as they are, a block with several vectors, so that it is read once."""
    form, n, width = weight[2], len(packed), up_to(weight[4], 2 * GROUP)
    x_stride, out_stride, together = packed.strides[0], out.strides[0], INT8_VECTORS if form == INT8 else INT4_VECTORS
    for r in range(start, end, PANEL):
        w, t = weight[0] + r // PANEL * weight[1], 0
        while t < n:
            x, y = packed[t].ctypes.data, out[t].ctypes.data + 4 * (column + r)
            if t + together <= n:
                if form == INT8:
                    tiles_int8(w, x, x_stride, width, y, out_stride)
                else:
                    tiles_int4(w, x, x_stride, width, y, out_stride)
                t += together
            else:
                if form == INT8:
                    one_int8(w, x, x_stride, width, y, out_stride)
                else:
                    one_int4(w, x, x_stride, width, y, out_stride)
                t += 1


@compiled
def linear_expanded(weight, x, out, column, start, end, space):
    """Rows of floats are expanded, panel by panel, and each panel is multiplied with all vectors."""
    address, stride, form, n_rows, columns = weight[0], weight[1], weight[2], weight[3], up_to(weight[4], 32)
    size = 4 if form == FLOAT32 else 2
    for first in range(start, end, PANEL * PANELS):
        n_panels = min(PANELS, (end - first + PANEL - 1) // PANEL)
        for k in range(0, columns, DEPTH):
            depth = min(DEPTH, columns - k)
            for p in range(n_panels):
                r, panel = first + p * PANEL, space + p * DEPTH * PANEL * 4
                make_panel(address + r * stride + k * size, stride, form, min(PANEL, n_rows - r), depth, panel)
            t = 0
            while t < len(x):
                count = vectors_at_once(len(x) - t)
                for p in range(n_panels):
                    multiply(space + p * DEPTH * PANEL * 4, PANEL * 4, x[t].ctypes.data + 4 * k, x.strides[0], depth,
                             out[t].ctypes.data + 4 * (column + first + p * PANEL), out.strides[0], k > 0, count)
                t += count


@compiled
def make_panel(w, stride, form, rows, n, out):
    if form == BF16:
        panel_bf16(w, stride, rows, n, out)
    elif form == FLOAT16:
        panel_f16(w, stride, rows, n, out)
    elif form == CACHE8:
        panel_i8(w, stride, rows, n, out)
    else:
        panel_f32(w, stride, rows, n, out)


@compiled
def vectors_at_once(n):
    """How many of n vectors `multiply` takes next."""
    return FLOAT_VECTORS if n >= FLOAT_VECTORS else SOME_VECTORS if n >= SOME_VECTORS else 1


@compiled
def multiply(panel, panel_stride, x, x_stride, n, out, out_stride, add, count):
    if count == FLOAT_VECTORS:
        tiles_float(panel, panel_stride, x, x_stride, n, out, out_stride, add)
    elif count == SOME_VECTORS:
        some_float(panel, panel_stride, x, x_stride, n, out, out_stride, add)
    else:
        one_float(panel, panel_stride, x, x_stride, n, out, out_stride, add)


# ----------------------------------------------------------------------------------------------------------------------
# Attention of a few new positions: the cache is read once, like weights, by all threads
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def half_or_nan(x):
    """The bits of x as float16; NaN if x is too large: unlike infinity, NaN can't get lost in the softmax."""
    return half_from_float(x if abs(x) < np.float32(65520) else np.float32(np.nan))


@compiled
def store_kv(cache, form, index, values):
    """Writes a row of float32 values into the cache, a flat array, from `index` on; zeros fill it up."""
    n = len(values)
    width = up_to(n, GROUP)
    if form == FLOAT32:
        floats = cache[index:index + 2 * width].view(np.float32)
        floats[n:] = 0
        for i in range(n):
            floats[i] = values[i]
        return
    if form == CACHE8:
        whole, scales = cache[index:index + width // 2].view(np.int8), cache[index + width // 2:]
        whole[n:] = 0
        for g in range(width // GROUP):
            group = values[g * GROUP:min((g + 1) * GROUP, n)]
            largest, out = largest_size(group), whole[g * GROUP:]
            inverse = bytes_from(largest)
            for i in range(len(group)):
                out[i] = np.int32(np.floor(group[i] * inverse + np.float32(0.5)))
            scales[g] = half_or_nan(largest / np.float32(127))  # NaN if a number is NaN or infinite
        return
    out = cache[index:index + width]
    out[n:] = 0
    if form == FLOAT16:
        for i in range(n):
            out[i] = half_or_nan(values[i])
    else:
        for i in range(n):
            out[i] = bf16_from_float(values[i])


@compiled
def exp_from(scores, largest):
    """Makes scores [n] exp(score - largest), in place -> the sum of that."""
    sum_ = np.float32(0)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - largest)
        sum_ += scores[i]
    return sum_


@compiled
def some_rows(k, stride, form, x, x_stride, n, out, out_stride, count):
    """ROWS rows of keys times one or PAIR queries."""
    if form == FLOAT32:
        if count == 1:
            rows_f32(k, stride, x, x_stride, n, out, out_stride)
        else:
            rows_f32_pair(k, stride, x, x_stride, n, out, out_stride)
    elif form == BF16:
        if count == 1:
            rows_bf16(k, stride, x, x_stride, n, out, out_stride)
        else:
            rows_bf16_pair(k, stride, x, x_stride, n, out, out_stride)
    elif form == FLOAT16:
        if count == 1:
            rows_f16(k, stride, x, x_stride, n, out, out_stride)
        else:
            rows_f16_pair(k, stride, x, x_stride, n, out, out_stride)
    else:
        if count == 1:
            rows_i8(k, stride, x, x_stride, n, out, out_stride)
        else:
            rows_i8_pair(k, stride, x, x_stride, n, out, out_stride)


@compiled
def add_values(v, stride, form, p, p_stride, n, width, out, out_stride, count):
    """Adds n rows of values, weighted with one or PAIR vectors p [n]."""
    if form == FLOAT32:
        if count == 1:
            add_f32(v, stride, p, p_stride, n, width, out, out_stride)
        else:
            adds_f32(v, stride, p, p_stride, n, width, out, out_stride)
    elif form == BF16:
        if count == 1:
            add_bf16(v, stride, p, p_stride, n, width, out, out_stride)
        else:
            adds_bf16(v, stride, p, p_stride, n, width, out, out_stride)
    elif form == FLOAT16:
        if count == 1:
            add_f16(v, stride, p, p_stride, n, width, out, out_stride)
        else:
            adds_f16(v, stride, p, p_stride, n, width, out, out_stride)
    else:
        if count == 1:
            add_i8(v, stride, p, p_stride, n, width, out, out_stride)
        else:
            adds_i8(v, stride, p, p_stride, n, width, out, out_stride)


@compiled
def attend(q, k, v, stride, form, n, scores, partials):
    """One or PAIR query heads, q float32 [heads, width], with n positions of a KV head -> partials [heads, width + 2].

    k, v: the addresses of the first position, `stride` bytes from one to the next. partials: the sum of the values,
    weighted with exp(score - largest), then `largest`, then the sum of the weights. So what several threads have
    made of different positions can be added up later: softmax needs all scores only for its denominator (Milakov &
    Gimelshein 2018, "online" softmax). scores float32 [PAIR, n or more]: to work in.
    """
    count, width = q.shape
    partials[:] = 0
    partials[:, width] = -np.inf
    if n <= 0:
        return
    x, x_stride, p, p_stride = q.ctypes.data, q.strides[0], scores.ctypes.data, scores.strides[0]
    whole = n // ROWS * ROWS
    for t in range(0, whole, ROWS):
        some_rows(k + t * stride, stride, form, x, x_stride, width, p + 4 * t, p_stride, count)
    for t in range(whole, n):
        float_row(k + t * stride, form, x, x_stride, width, p + 4 * t, p_stride, count)
    for h in range(count):
        largest = largest_of(scores[h, :n])
        partials[h, width], partials[h, width + 1] = largest, exp_from(scores[h, :n], largest)
    add_values(v, stride, form, p, p_stride, n, width, partials.ctypes.data, partials.strides[0], count)


@compiled
def combine(partials, out):
    """The attention's output [head_dim] from the partial results [n, width + 2] of all positions."""
    width = partials.shape[1] - 2
    largest = np.float32(-np.inf)
    for c in range(len(partials)):
        largest = max(largest, partials[c, width])
    denominator = np.float32(0)
    out[:] = 0
    for c in range(len(partials)):
        if partials[c, width + 1] != 0:
            factor = exp(partials[c, width] - largest)
            denominator += factor * partials[c, width + 1]
            for i in range(len(out)):
                out[i] += factor * partials[c, i]
    if denominator != 0:  # else: a place that only pads its sequence
        for i in range(len(out)):
            out[i] /= denominator


# ----------------------------------------------------------------------------------------------------------------------
# Attention of many new positions: products again, of tiles that fit into a core's cache
# ----------------------------------------------------------------------------------------------------------------------


@compiled
def shaped(x, shape):
    """The beginning of x float32 as an array of this shape."""
    return numba.carray(to_pointer_f32(x.ctypes.data), shape)


@compiled
def attend_tile(q, k, v, stride, form, first, seen, out, space):
    """The query heads of one KV head at several tokens, with the positions that each may see, as in FlashAttention.

    q float32 [group, n, width]; k, v: addresses of the position 0, `stride` bytes from one to the next; token t sees
    the positions from `first` to before seen + t -> out float32 [n, group * head_dim]; space float32: to work in.
    """
    group, n, width = q.shape
    head_dim = out.shape[1] // group
    ends = parts_of_tile(group, n, width)
    keys, values, scores = space[:ends[0]], space[ends[0]:ends[1]], shaped(space[ends[1]:], (TILE, POSITIONS))
    sums = shaped(space[ends[2]:], (group, n, width))
    largest, denominators = shaped(space[ends[3]:], (group, n)), shaped(space[ends[4]:], (group, n))
    sums[:] = 0
    largest[:] = -np.inf
    denominators[:] = 0
    for start in range(first, seen + n - 1, POSITIONS):
        count = min(POSITIONS, seen + n - 1 - start)
        for p in range(0, count, PANEL):
            make_panel(k + (start + p) * stride, stride, form, count - p, width, keys.ctypes.data + p * width * 4)
        for i in range(up_to(count, PANEL)):  # values, too, lie in panels [POSITIONS, 32], one after the other
            for c in range(0, width, PANEL):
                here = c * POSITIONS + i * PANEL
                expand_row(v + (start + min(i, count - 1)) * stride, form, width, c, values[here:here + PANEL])
        for h in range(group):
            t = 0
            while t < n:
                together = vectors_at_once(n - t)
                reach = up_to(min(max(seen + t + together - 1 - start, 0), count), PANEL)  # what the last of them sees
                for p in range(0, reach, PANEL):
                    multiply(keys.ctypes.data + p * width * 4, PANEL * 4,
                             q[h].ctypes.data + t * q.strides[1], q.strides[1], width,
                             scores[t].ctypes.data + 4 * p, scores.strides[0], np.bool_(False), together)
                for i in range(t, t + together):
                    visible = min(max(seen + i - start, 0), count)
                    scores[i, visible:reach] = 0
                    if visible > 0:
                        old = largest[h, i]
                        largest[h, i] = max(old, largest_of(scores[i, :visible]))
                        factor = exp(old - largest[h, i])
                        denominators[h, i] = denominators[h, i] * factor + exp_from(scores[i, :visible], largest[h, i])
                        for j in range(width):
                            sums[h, i, j] *= factor
                for c in range(0, width, PANEL):
                    multiply(values.ctypes.data + 4 * c * POSITIONS, PANEL * 4,
                             scores.ctypes.data + t * scores.strides[0], scores.strides[0], reach,
                             sums[h, t].ctypes.data + 4 * c, sums.strides[1], np.bool_(True), together)
                t += together
    for h in range(group):
        for t in range(n):
            factor = np.float32(1) / denominators[h, t] if denominators[h, t] != 0 else np.float32(0)
            for i in range(head_dim):
                out[t, h * head_dim + i] = sums[h, t, i] * factor


# ----------------------------------------------------------------------------------------------------------------------
# Weights: packed, and rows of them
# ----------------------------------------------------------------------------------------------------------------------

TRIALS = 8  # scales that are tried for each group


@compiled
def rounded(x, bits):
    """The nearest whole number of 8 or 4 bits."""
    low, high = (np.float32(-127), np.float32(127)) if bits == 8 else (np.float32(-8), np.float32(7))
    return min(max(np.floor(x + np.float32(0.5)), low), high)


@compiled
def quantize_group(w, bits, scale):
    """(the best scale for the whole numbers that w [32] / scale rounds to, the squared error it leaves)."""
    inverse = np.float32(1) / scale
    wq, qq, ww = np.float32(0), np.float32(0), np.float32(0)
    for i in range(GROUP):
        q = rounded(w[i] * inverse, bits)
        wq += w[i] * q
        qq += q * q
        ww += w[i] * w[i]
    best = wq / qq if qq > 0 else scale
    return best, ww - best * wq


@compiled
def best_subnormal(w, bits, stored):
    """Of a subnormal float16, given by its bits, and its neighbours: the scale that errs least for w [32].

    Their distance is 2 ** -24, so the nearest to the best scale may be far too small for the largest weights.
    """
    least, best = np.float32(np.inf), stored
    for step in range(-1, 2):
        if (stored & 0x7FFF) + step >= 0:
            tried = np.uint16(stored + step)
            scale, error = float_from_half(tried), np.float32(0)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for i in range(GROUP):
                difference = w[i] - scale * rounded(w[i] * inverse, bits)
                error += difference * difference
            if error < least:
                least, best = error, tried
    return best


@called_from_python
def quantize_block(w, bits, block):
    """w float32 [32, n], n a multiple of 64 -> a packed block, see layout.py; the scales err least."""
    n_scales = 2 * PANEL * 8 // bits  # bytes
    unit_size = n_scales + 1024
    units = numba.carray(to_pointer_u8(block.ctypes.data), (len(block) // unit_size, unit_size))
    for r in range(PANEL):
        for g in range(w.shape[1] // GROUP):
            unit, half = units[g * bits // 8], g % (8 // bits)
            scales, values = unit[:n_scales].view(np.uint16), unit[n_scales:]
            group = w[r, g * GROUP:(g + 1) * GROUP]
            largest, extreme = np.float32(0), np.float32(0)
            for i in range(GROUP):
                if not abs(group[i]) <= largest:
                    largest, extreme = abs(group[i]), group[i]
            scale = np.float32(0)
            if largest > 0:
                smallest_error = np.float32(np.inf)
                for trial in range(TRIALS):
                    # 8 bits: the largest weight becomes 127 or somewhat less. 4 bits reach from -8 to 7: it becomes -8,
                    # or would become somewhat more, or less.
                    levels = np.float32(127 - trial) if bits == 8 else np.float32(8.75 - 0.25 * trial)
                    tried = largest / levels if bits == 8 else -extreme / levels
                    best, error = quantize_group(group, bits, tried)
                    if error < smallest_error:
                        smallest_error, scale = error, best
            stored = half_from_float(scale)
            if stored & 0x7C00 == 0:
                stored = best_subnormal(group, bits, stored)
            scales[half * PANEL + r] = stored
            scale = float_from_half(stored)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for i in range(GROUP):
                q = rounded(group[i] * inverse, bits)
                place = i // 4 * 4 * PANEL + r * 4 + i % 4
                if bits == 8:
                    values[place] = np.uint8(q + 128)
                elif half == 0:
                    values[place] = np.uint8(q + 8)
                else:
                    values[place] |= np.uint8(q + 8) << 4


@compiled
def expand_row(address, form, n, first, out):
    """Numbers of a row of n, from `first` on, as float32 into out. `first` and len(out) are multiples of 32, or all."""
    end = first + len(out)
    if form == CACHE8:
        row = numba.carray(to_pointer_u8(address), (n + n // GROUP * 2,))
        whole, scales = row[:n].view(np.int8), row[n:].view(np.uint16)
        for g in range(first // GROUP, end // GROUP):
            scale = float_from_half(scales[g])
            for i in range(GROUP):
                out[g * GROUP + i - first] = scale * np.float32(whole[g * GROUP + i])
    elif form == FLOAT32:
        floats = numba.carray(to_pointer_f32(address), (n,))[first:end]
        for i in range(len(out)):
            out[i] = floats[i]
    else:
        half = numba.carray(to_pointer_u16(address), (n,))[first:end]
        if form == BF16:
            for i in range(len(out)):
                out[i] = float_from_bf16(half[i])
        else:
            for i in range(len(out)):
                out[i] = float_from_half(half[i])


@called_from_python
def weight_row(weight, r, out):
    """Row r of a weight as float32 [columns]."""
    address, stride, form, n = weight[0], weight[1], weight[2], weight[4]
    if form < INT8:
        expand_row(address + r * stride, form, n, np.int64(0), out[:n])
        return
    bits = 8 if form == INT8 else 4
    n_scales, lane = 2 * PANEL * 8 // bits, r % PANEL
    unit_size = n_scales + 1024
    units = numba.carray(to_pointer_u8(address + r // PANEL * stride), (stride // unit_size, unit_size))
    for i in range(n):
        g = i // GROUP
        unit, half = units[g * bits // 8], g % (8 // bits)
        scale = float_from_half(unit[:n_scales].view(np.uint16)[half * PANEL + lane])
        value = np.int32(unit[n_scales + i % GROUP // 4 * 4 * PANEL + lane * 4 + i % 4])
        out[i] = scale * np.float32(value - 128 if form == INT8 else (value >> half * 4 & 15) - 8)

# ----------------------------------------------------------------------------------------------------------------------
# The decoder layers: one job for the team, for one token or for many
# ----------------------------------------------------------------------------------------------------------------------


@called_from_python
def decoder_layers(rank, n_threads, barrier, first, last, layers, norms, head_norms, eps, x, cos, sin, k_cache, v_cache,
                   kv_form, length, padding, part_length, h, packed, qkv, queries, inner,
                   inner_packed, partials, space):
    """Layers first to last - 1: the namesake of qwen3.decoder_layer, in place of x. Each thread of the team runs this.

    x float32 [batch * n, hidden_size], a sequence's n new tokens after the other's; cos, sin [batch * n, head_dim / 2];
    k_cache, v_cache: see Cache; `length` positions are filled, the first padding[b] of them with nothing. The rest is
    space to work in, rows are padded to a multiple of 64: h [batch * n, the widest factor], packed: the same; qkv
    [batch * n, ...], queries [n_heads, batch * n, width], inner [2, batch * n, ...], inner_packed, partials [batch * n,
    n_heads, parts, width + 2], space [n_threads, ...].
    """
    m, hidden = x.shape
    batch, n_kv_heads, capacity, row_size = k_cache.shape[1:]
    n, n_heads, head_dim = m // batch, len(queries), 2 * cos.shape[1]
    group, parts = n_heads // n_kv_heads, partials.shape[2]
    q_size, kv_size, n_inner = n_heads * head_dim, n_kv_heads * head_dim, layers[0, DOWN, 4]
    k_start, v_start = up_to(q_size, PANEL), up_to(q_size, PANEL) + up_to(kv_size, PANEL)
    root, gate, zero = np.float32(1 / np.sqrt(head_dim)), barrier.ctypes.data, np.int64(0)
    flat_k = numba.carray(to_pointer_u16(k_cache.ctypes.data), (k_cache.size,))
    flat_v = numba.carray(to_pointer_u16(v_cache.ctypes.data), (v_cache.size,))
    mine = space[rank]
    scores = shaped(mine, (PAIR, LONG_PART))
    for layer in range(first, last):
        w = layers[layer]
        for t in part_of(m, rank, n_threads):
            rms_norm(x[t], norms[layer, 0], eps, h[t])
            ready(h[t], hidden, w[Q, 2], packed[t], zero, hidden)
        meet(gate, n_threads)

        start, end = share(q_size, rank, n_threads)
        linear(w[Q], h, packed, qkv, zero, start, end, mine)
        start, end = share(kv_size, rank, n_threads)
        linear(w[K], h, packed, qkv, k_start, start, end, mine)
        linear(w[V], h, packed, qkv, v_start, start, end, mine)
        meet(gate, n_threads)

        items = m * (n_heads + n_kv_heads)
        for item in part_of(items, rank, n_threads):
            t, i = item // (n_heads + n_kv_heads), item % (n_heads + n_kv_heads)
            if i < n_heads:
                query = queries[i, t, :head_dim]
                rms_norm(qkv[t, i * head_dim:(i + 1) * head_dim], head_norms[layer, 0], eps, query)
                apply_rope(query, cos[t], sin[t])
                for j in range(head_dim):
                    query[j] *= root
            else:
                i -= n_heads
                key, value = qkv[t, k_start + i * head_dim:], qkv[t, v_start + i * head_dim:]
                rms_norm(key[:head_dim], head_norms[layer, 1], eps, key[:head_dim])
                apply_rope(key[:head_dim], cos[t], sin[t])
                at = (((layer * batch + t // n) * n_kv_heads + i) * capacity + length + t % n) * row_size
                store_kv(flat_k, kv_form, at, key[:head_dim])
                store_kv(flat_v, kv_form, at, value[:head_dim])
        meet(gate, n_threads)

        if n <= FEW:  # parts of the cache, whose results are then combined
            items = batch * n_kv_heads * parts
            for item in part_of(items, rank, n_threads):
                b, i, part = item // parts // n_kv_heads, item // parts % n_kv_heads, item % parts
                begin = max(part * part_length, padding[b])
                at = 2 * (((layer * batch + b) * n_kv_heads + i) * capacity + begin) * row_size
                for t in range(n):
                    seen = min(length + t + 1, (part + 1) * part_length) - begin
                    for j in range(i * group, (i + 1) * group, PAIR):
                        some = slice(j, min(j + PAIR, (i + 1) * group))
                        attend(queries[some, b * n + t], k_cache.ctypes.data + at, v_cache.ctypes.data + at,
                               2 * row_size, kv_form, seen, scores, partials[b * n + t, some, part])
            meet(gate, n_threads)
            for t in part_of(m, rank, n_threads):
                for j in range(n_heads):
                    combine(partials[t, j], h[t, j * head_dim:(j + 1) * head_dim])
        else:
            for item in range(rank, batch * ((n + TILE - 1) // TILE) * n_kv_heads, n_threads):
                b, i, tile = item // n_kv_heads % batch, item % n_kv_heads, item // n_kv_heads // batch
                t, end = b * n + tile * TILE, b * n + min(n, (tile + 1) * TILE)
                at = 2 * (((layer * batch + b) * n_kv_heads + i) * capacity) * row_size
                attend_tile(queries[i * group:(i + 1) * group, t:end], k_cache.ctypes.data + at,
                            v_cache.ctypes.data + at, 2 * row_size, kv_form, padding[b], length + tile * TILE + 1,
                            h[t:end, i * group * head_dim:(i + 1) * group * head_dim], mine)
            meet(gate, n_threads)
        for t in part_of(m, rank, n_threads):
            ready(h[t], q_size, w[OUT, 2], packed[t], zero, q_size)
        meet(gate, n_threads)

        start, end = share(hidden, rank, n_threads)
        linear(w[OUT], h, packed, qkv, zero, start, end, mine)
        for t in range(m):
            add_to(x[t, start:end], qkv[t, start:end])
        meet(gate, n_threads)

        for t in part_of(m, rank, n_threads):
            rms_norm(x[t], norms[layer, 1], eps, h[t])
            ready(h[t], hidden, w[GATE, 2], packed[t], zero, hidden)
        meet(gate, n_threads)

        start, end = share(n_inner, rank, n_threads)
        linear(w[GATE], h, packed, inner[0], zero, start, end, mine)
        linear(w[UP], h, packed, inner[1], zero, start, end, mine)
        for t in range(m):
            silu_times(inner[0, t, start:end], inner[1, t, start:end])
            ready(inner[0, t], n_inner, w[DOWN, 2], inner_packed[t], start, end)
        meet(gate, n_threads)

        start, end = share(hidden, rank, n_threads)
        linear(w[DOWN], inner[0], inner_packed, qkv, zero, start, end, mine)
        for t in range(m):
            add_to(x[t, start:end], qkv[t, start:end])
        meet(gate, n_threads)


@called_from_python
def output_logits(rank, n_threads, barrier, x, norm, eps, head, h, packed, logits, space):
    """The namesake of qwen3.output_logits: x [n, hidden_size] -> logits [n, vocab_size, or more]."""
    (n, hidden), zero = x.shape, np.int64(0)
    for t in part_of(n, rank, n_threads):
        rms_norm(x[t], norm, eps, h[t])
        ready(h[t], hidden, head[2], packed[t], zero, hidden)
    meet(barrier.ctypes.data, n_threads)
    start, end = share(head[3], rank, n_threads)
    linear(head, h, packed, logits, zero, start, end, space[rank])
    meet(barrier.ctypes.data, n_threads)


# ----------------------------------------------------------------------------------------------------------------------
# Machine code of the kernels that are called from Python
# ----------------------------------------------------------------------------------------------------------------------

INT, ROW = types.int64, types.int64[::1]
F1, F2, F3, F4 = (types.Array(types.float32, d, "C") for d in (1, 2, 3, 4))
U1, U2, U5 = types.uint8[::1], types.uint8[:, ::1], types.Array(types.uint16, 5, "C")
RANK = (INT, INT, ROW)
KERNELS = {
    weight_row: (ROW, INT, F1),
    quantize_block: (F2, INT, U1),
    output_logits: (*RANK, F2, F1, types.float64, ROW, F2, U2, F2, F2),
    decoder_layers: (*RANK, INT, INT, types.int64[:, :, ::1], F3, F3, types.float64, F2, F2, F2, U5, U5, INT, INT, ROW,
                     INT, F2, U2, F2, F3, F3, U2, F4, F2),
}
# numba's code frees numba's own arrays with this function; arrays passed from Python aren't numba's, so no call occurs.
NEVER_CALLED = "define void @NRT_MemInfo_call_dtor(ptr %memory) { ret void }"
C_LIBRARY = {"sqrt", "sqrtf", "sched_yield"}  # called by kernels; without numba there is no more


class Progress(event.Listener):
    """Moves a bar on when one of these functions has been compiled."""

    def __init__(self, functions: Iterable[Dispatcher], bar: Any):
        self.left, self.bar = set(functions), bar

    def on_start(self, started: event.Event) -> None:
        pass

    def on_end(self, ended: event.Event) -> None:
        if ended.data["dispatcher"] in self.left:
            self.left.remove(ended.data["dispatcher"])
            self.bar.update()


def machine_code() -> tuple[dict[str, list], bytes]:
    """Compiles the kernels for this CPU -> ({name: its arguments}, an object file that has functions of these names).

    An argument is "int64", "float64", or [dtype, n] for an array of n dimensions; see Kernel in compiled.py.
    Raises InputError if this CPU or numba's settings don't allow it.
    """
    if numba.config.DISABLE_JIT:
        raise InputError("the fast engine can't be compiled while NUMBA_DISABLE_JIT is set")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target, module, arguments = llvm.Target.from_default_triple(), llvm.parse_assembly(NEVER_CALLED), {}
    if target.name.startswith("x86") and not FEATURES.get("f16c"):
        raise InputError("the fast engine needs a CPU that converts float16 (F16C: since 2013); use qwen3.py")
    functions = [function for function in globals().values() if isinstance(function, Dispatcher)]
    with (progress(description="compiling, only this once", total=len(functions)) as bar,
          event.install_listener("numba:compile", Progress(functions, bar))):
        for kernel, signature in KERNELS.items():
            kernel.compile(signature)
    for kernel, signature in KERNELS.items():
        module.link_in(llvm.parse_assembly(kernel.inspect_llvm(signature)))
        module.get_function(kernel.overloads[signature].fndesc.llvm_func_name).name = kernel.__name__
        arguments[kernel.__name__] = [[str(kind.dtype), kind.ndim] if isinstance(kind, types.Array) else str(kind)
                                      for kind in signature]
    absent = {function.name for function in module.functions if function.is_declaration
              and not function.name.startswith("llvm.")} - C_LIBRARY
    if absent:
        raise InputError(f"numba {numba.__version__} compiles kernels that need {', '.join(sorted(absent))} to run, so "
                         "they can't be kept; install another version of numba, or use qwen3.py")
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3,
        reloc="static" if target.name.startswith("x86") else "default", codemodel="jitdefault", jit=True)
    return arguments, machine.emit_object(module)
