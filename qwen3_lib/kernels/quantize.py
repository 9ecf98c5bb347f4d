"""The kernels that pack weights. `pack_group` alone writes their bytes; layout.py tells what they mean."""
import numpy as np
from numba.types import float32, int16, uint8

from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import bits_of, entry, float_of, floats_at, uint16s_at, uint32s_at
from qwen3_lib.kernels.layers import unit_bytes
from qwen3_lib.kernels.layout import (BIAS, GROUP, GROUPS, HALVES, HIGH_BITS, LEAST, MINIMA, MOST, PANEL, SHARED,
                                      factors_size)

weights, block_of, group_of, work_of = (entry(i, kind, n) for i, (kind, n) in enumerate(
    [(float32, 2), (uint8, 1), (float32, 2), (float32, 2)]))  # of quantize_block
whole_numbers, scale_values, block_bytes = entry(0, int16, 2), entry(1, float32, 3), entry(2, uint8, 1)  # of pack_block
factors_bytes = compiled(factors_size)
SCALES = 6  # that are tried for each group


@compiled
def scale_from(word):
    """The float32 of a scale's 16 bits."""
    return float_of((np.int32(word) << np.int32(13)) + np.int32(BIAS))


@compiled
def zero_from(word, form):
    """What is subtracted from a packed weight."""
    if HALVES[form] == 1:
        return np.float32(128)
    return (np.float32(6) + np.float32(0.25) * np.float32(word & 15)) * np.float32(2 if HIGH_BITS[form] else 1)


@compiled
def rounded(x, form):
    """The nearest whole number that a packed weight can be."""
    return min(max(np.floor(x + np.float32(0.5)), np.float32(LEAST[form])), np.float32(MOST[form]))


@compiled
def choose_scales(group, form, words, work):
    """The scales' bits uint16 [32 rows] by which group float32 [32 columns, 32 rows] errs least. work [10, 32].

    For the whole numbers q that a tried scale gives, the best scale is sum(w q) / sum(q q), and then the squared error
    is smaller than sum(w w) by sum(w q) ** 2 / sum(q q).
    """
    low, high, inverse, zero, wq = work[0], work[1], work[2], work[3], work[4]
    # Not `= work`: numba takes rows for strided then, and computes one number at a time.
    qq, most, best, factor, best_factor = work[5], work[6], work[7], work[8], work[9]
    low[:], high[:], most[:], best[:], best_factor[:] = np.inf, -np.inf, 0, 0, 1
    words[:] = 8  # zero is 8 or 16, so 0 stays 0
    for c in range(GROUP):
        for r in range(PANEL):
            low[r], high[r] = min(low[r], group[c, r]), max(high[r], group[c, r])
    fixed = HALVES[form] == 1  # the zero
    least, levels, unit = np.float32(LEAST[form]), np.float32(MOST[form]), np.float32(0.5 if HIGH_BITS[form] else 1)
    for trial in range(SCALES if fixed else SCALES + 2):  # the last two: the best so far with another zero
        for r in range(PANEL):
            if fixed:
                zero[r], factor[r] = np.float32(128), np.float32(1 - trial / 127)
            else:
                middle = levels * np.float32(0.5) * (np.float32(1) - (high[r] + low[r]) / (high[r] - low[r]))
                step = np.floor((middle * unit - np.float32(6)) * np.float32(4) + np.float32(0.5))
                if trial >= SCALES:
                    step += np.float32(2 * (trial - SCALES) - 1)
                zero[r] = zero_from(np.int32(min(max(step, np.float32(0)), np.float32(15))), form)
                factor[r] = best_factor[r] if trial >= SCALES else np.float32(0.97 + 0.06 * trial)
            size = max(high[r] / (levels - zero[r]), low[r] / (least - zero[r]))
            inverse[r] = factor[r] / size if size > 0 else np.float32(0)
        wq[:], qq[:] = 0, 0
        for c in range(GROUP):
            for r in range(PANEL):
                q = rounded(group[c, r] * inverse[r] + zero[r], form) - zero[r]
                wq[r] += group[c, r] * q
                qq[r] += q * q
        for r in range(PANEL):
            scale = wq[r] / qq[r]
            better = (wq[r] > 0) & (scale * wq[r] > most[r])  # no branch, so that eight rows are compared at a time
            most[r] = scale * wq[r] if better else most[r]
            best[r] = scale if better else best[r]
            best_factor[r] = factor[r] if better else best_factor[r]
            if not fixed:
                words[r] = np.int32((zero[r] * unit - np.float32(6)) * np.float32(4)) if better else words[r]
    step = 1 if fixed else 16  # the last 4 bits are the zero's
    for r in range(PANEL):
        zero_bits = 0 if fixed else np.int64(words[r])
        if fixed:
            place = np.int64(bits_of(best[r]) - BIAS + (1 << 12) >> 13)
        else:
            place = np.int64((bits_of(best[r]) - BIAS >> 13) - zero_bits + step // 2)
        words[r] = min(max(place // step * step, 0), 0x10000 - step) + zero_bits


@compiled
def scales_and_minima(unit, half, form):
    """The scales' bits [32 rows] of a group in a unit, and its minima float32 [32 rows], if the format has them."""
    return (uint16s_at(unit[2 * PANEL * half:].ctypes.data, (PANEL,)),
            floats_at(unit[2 * PANEL * (HALVES[form] + 2 * half):].ctypes.data, (PANEL,)))  # after all scales


@compiled
def columns_of(rows, first, group):
    """Sets a group float32 [columns, 32 rows] to the columns of rows [at most 32, n] from `first` on; elsewhere 0."""
    group[:] = 0
    for r in range(len(rows)):
        for c in range(min(len(group), rows.shape[1] - first)):
            group[c, r] = rows[r, first + c]


@compiled
def four(group, k, r):
    """Four columns of a row of a group of whole numbers, 0 to 255, as the bytes of a word, the first one lowest."""
    word = np.uint32(0)
    for c in range(4):
        word |= np.uint32(np.uint32(np.int32(group[4 * k + c, r])) << np.uint32(8 * c))
    return word


@compiled
def pack_group(unit, half, form, group):
    """Writes a group of whole numbers, float32 [columns, 32 rows], into its unit, whose bytes are zeros before."""
    start, n = len(unit) - PANEL * GROUPS[form], GROUPS[form] // 4
    values = uint32s_at(unit[start:].ctypes.data, (PANEL * n,))
    further = unit[start - 256 * min(HIGH_BITS[form], 1):start]
    mask = np.uint32(0xFFFFFFFF if HALVES[form] == 1 else 0x0F0F0F0F)
    for k in range(n):
        for r in range(PANEL):
            values[PANEL * k + r] |= (four(group, k, r) & mask) << np.uint32(4 * half)
    if HIGH_BITS[form]:
        some, more = uint32s_at(further.ctypes.data, (len(further) // 4,)), HIGH_BITS[form]
        mask = np.uint32(0x01010101 * (2**more - 1))
        for k in range(n):
            place, shift = PANEL * (more * k // 4), np.uint32(more * (2 * k + half) % 8)
            for r in range(PANEL):
                some[place + r] |= (four(group, k, r) >> np.uint32(4) & mask) << shift


@compiled
def quantize_block(record, form, _):
    """A table of w float32 [at most 32 rows, n]; a block of zeros; to work in, float32 [32, 32] and [10, 32]."""
    w, block, group, work = weights(record), block_of(record), group_of(record), work_of(record)
    size = unit_bytes(form)
    for g in range(len(block) // size * HALVES[form]):
        i, half = g // HALVES[form], g % HALVES[form]
        unit = block[i * size:(i + 1) * size]
        words, _ = scales_and_minima(unit, half, form)
        columns_of(w, g * GROUP, group)
        choose_scales(group, form, words, work)
        scale, zero = work[0], work[1]  # low and high are no longer needed
        for r in range(PANEL):
            scale[r], zero[r] = scale_from(words[r]), zero_from(words[r], form)
        for c in range(GROUP):
            for r in range(PANEL):
                group[c, r] = rounded(group[c, r] / scale[r] + zero[r], form)
        pack_group(unit, half, form, group)


@compiled
def pack_block(record, form, _):
    """A table of whole numbers int16 [at most 32 rows, n]; the bits of their scales and their minima; a block of zeros.

    Then a group to work in. Scales and minima are float32 [2, 32, groups], the group float32 [32, 32]; n is a multiple
    of 32.
    """
    whole, scales, block = whole_numbers(record), scale_values(record), block_bytes(record)
    group = work_of(record)[:GROUPS[form]]
    for g in range(scales.shape[2]):
        i, half = g // HALVES[form], g % HALVES[form]
        start = i * unit_bytes(form) + (i // max(SHARED[form], 1) + 1) * factors_bytes(form)
        unit = block[start:start + unit_bytes(form)]
        words, minima = scales_and_minima(unit, half, form)
        for r in range(PANEL):
            if SHARED[form]:
                for kind in range(1 + MINIMA[form]):
                    unit[PANEL * (2 * kind + half) + r] = np.uint8(np.int64(scales[kind, r, g]))
            else:
                words[r] = np.uint16(scales[0, r, g])
            if MINIMA[form] and not SHARED[form]:
                minima[r] = scales[1, r, g]
        columns_of(whole, g * GROUPS[form], group)
        pack_group(unit, half, form, group)
