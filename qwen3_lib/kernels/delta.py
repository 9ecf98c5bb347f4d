"""The kernel of a gated delta net: qwen3_5.gated_delta_net, without its projections. See layers.py for the others.

A state has columns that don't depend on each other, so a thread takes 16 of them through some tokens while they stay in
the first cache, token by token as the paper writes it. This order of sums knows no chunks: a token's result depends on
the tokens before it only, bit for bit.
"""
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.crew import crew_of, items, pieces, wait
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import floats_at
from qwen3_lib.kernels.layers import exp, ready, rms_norm, sigmoid, silu_times, sum_of_squares, up_to
from qwen3_lib.kernels.layout import OUT, PANEL, SUMS_OF_DELTA, TOKENS, K, Q
from qwen3_lib.kernels.vectors import FLOAT, I64, at, broadcast, fma, load, loop, splat, store, variable, vector


@intrinsic
def delta_rule(context, old, new, kq, dk, factors, n, out, out_stride):
    """The gated delta rule of n tokens for 16 columns of a head's state. Source: Yang et al. 2024, equation 10.

    old: the address of the state float32 [dk, 16] before; it is read, and written to `new`; dk is a multiple of 4.
    kq float32 [n, 2, dk]: keys and queries; factors float32 [n, 2]: decay and beta.
    out: 16 values of each token, in their place then its 16 results. The stride is bytes.
    """
    def codegen(context, b, signature, args):
        old, new, kq, dk, factors, n, out, out_stride = args
        floats = vector(FLOAT, 16)
        sums = [variable(b, floats) for _ in range(SUMS_OF_DELTA)]

        def sum_of(term: Any) -> Any:
            """The sum of term(i, sum) over the rows of the state: SUMS_OF_DELTA partial sums, added in pairs."""
            for sum_ in sums:
                b.store(splat(FLOAT, 16, 0.0), sum_)

            def some(i: Any) -> None:
                for j, sum_ in enumerate(sums):
                    b.store(term(b.add(b.mul(i, I64(len(sums))), I64(j)), b.load(sum_)), sum_)

            loop(b, b.sdiv(dk, I64(len(sums))), some)
            one, two, three, four = map(b.load, sums)
            return b.fadd(b.fadd(one, two), b.fadd(three, four))

        def token(t: Any) -> None:
            state = b.select(b.icmp_signed("==", t, I64(0)), old, new)
            key = at(b, kq, (b.mul(t, dk), 8))
            query = at(b, key, (dk, 4))
            decay, beta = (broadcast(b, load(b, at(b, factors, (t, 8), 4 * i), FLOAT), 16) for i in range(2))

            def number(address: Any, i: Any) -> Any:
                return broadcast(b, load(b, at(b, address, (i, 4)), FLOAT), 16)

            known = sum_of(lambda i, sum_: fma(b, number(key, i), load(b, at(b, state, (i, 64)), FLOAT, 16), sum_))
            place = at(b, out, (t, out_stride))
            error = b.fmul(beta, b.fsub(load(b, place, FLOAT, 16), b.fmul(decay, known)))

            def updated(i: Any, sum_: Any) -> Any:
                row = fma(b, number(key, i), error, b.fmul(decay, load(b, at(b, state, (i, 64)), FLOAT, 16)))
                store(b, row, at(b, new, (i, 64)))
                return fma(b, number(query, i), row, sum_)

            store(b, sum_of(updated), place)

        loop(b, n, token)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@compiled
def log_of_one_plus(x):
    """log(1 + x) for 0 <= x <= 1, to 4 parts in 2^24: twice the series of the inverse hyperbolic tangent."""
    s = x / (np.float32(2) + x)
    square, sum_ = s * s, np.float32(0)
    for i in range(17, 1, -2):
        sum_ = (sum_ + np.float32(1) / np.float32(i)) * square
    return np.float32(2) * s * (sum_ + np.float32(1))


@compiled
def decay_of(a, rate, bias):
    """exp(-rate * softplus(a + bias)): how much of a state stays."""
    x = a + bias
    softplus = max(x, np.float32(0)) + log_of_one_plus(exp(-abs(x)))
    return exp(-rate * softplus)


@compiled
def unit_vector(x, factor, out):
    """x [d] divided by its length, times the factor -> out [d or more], the rest zeros."""
    scale = factor / np.sqrt(sum_of_squares(x) + np.float32(1e-6))
    for i in range(len(x)):
        out[i] = x[i] * scale
    out[len(x):] = 0


@compiled
def mix_states(record, rank, layer):
    """Convolution, delta rule and gated norm: from the projections to h, ready for the output's matrix.

    It does nothing in a layer of attention.
    """
    crew, job = crew_of(record, rank), fields.table(record)
    number = fields.places(job)[layer].state
    if number < 0:
        return
    convolve(crew, number, job)
    wait(crew)
    n_values, runs, own = fields.delta_sizes(job)[0].value_heads, fields.runs(job), fields.own(job)[crew.rank]
    for item in items(len(runs) * n_values, crew):
        run_head(runs[item // n_values], item // n_values, number, layer, item % n_values, job, own)
    wait(crew)
    w, h, packed = fields.matrices(job)[layer, OUT], fields.h(job), fields.packed(job)
    for t in items(len(h), crew):
        ready(h[t], w.columns, w.form, packed[t], np.int64(0), w.columns)
    wait(crew)


@compiled
def state_of(job, state, n_late):
    """(history float32 [taps - 1 + late, channels], states float32 [value heads, strips, key size padded, 16], late
    float32 [late, channels + 2 value heads]) at the addresses of a STATE: qwen3_5.State, with in_proj_ba's rows for g
    and beta. n_late: how many tokens the state hasn't learned.
    """
    sizes, (taps, channels) = fields.delta_sizes(job)[0], fields.conv(job).shape[1:]
    strips, height = up_to(sizes.value_size, 16) // 16, up_to(sizes.key_size, SUMS_OF_DELTA)
    return (floats_at(state.history, (taps - 1 + n_late, channels)),
            floats_at(state.memory, (sizes.value_heads, strips, height, 16)),
            floats_at(state.late, (n_late, channels + 2 * sizes.value_heads)))


@compiled
def states_of(job, sequence, number):
    """The state_of a layer of a sequence before the pass, and the one after it."""
    run, states = fields.runs(job)[sequence], fields.states(job)[sequence, number]
    return state_of(job, states[0], run.late), state_of(job, states[1], run.late_after)


@compiled
def convolve(crew, number, job):
    """qwen3_5.causal_convolution of the channels of q, k and v, in place, from the last token to the first."""
    qkv, conv, runs = fields.qkv(job), fields.conv(job)[number], fields.runs(job)
    taps, channels = conv.shape
    for start, end in pieces(channels, np.int64(16), len(qkv), crew):
        for s in range(len(runs)):
            first, stop = runs[s].first, runs[s].end
            if first == stop:  # it has no token in this pass
                continue
            (old, _, _), (new, _, late) = states_of(job, s, number)
            for j in range(len(new)):  # what later tokens need
                row = stop - len(new) + j
                kept = qkv[row] if row >= first else old[row - first + len(old)]
                copy(kept[start:end], new[j, start:end])
            for row in range(stop - 1, first - 1, -1):
                x = qkv[row, start:end]
                multiply(x, conv[taps - 1, start:end])
                for back in range(1, taps):
                    before = qkv[row - back] if row - back >= first else old[row - back - first + len(old)]
                    add_product(x, before[start:end], conv[taps - 1 - back, start:end])
                for i in range(len(x)):
                    x[i] *= sigmoid(x[i])
            for j in range(len(late)):
                copy(qkv[stop - len(late) + j, start:end], late[j, start:end])


@compiled
def copy(x, out):
    """x [n] -> out. Slices, because numba's loops from 0 on are the fastest."""
    for i in range(len(x)):
        out[i] = x[i]


@compiled
def multiply(x, y):
    """x [n] becomes x * y."""
    for i in range(len(x)):
        x[i] *= y[i]


@compiled
def add_product(x, y, z):
    """x [n] becomes x + y * z."""
    for i in range(len(x)):
        x[i] += y[i] * z[i]


@compiled
def run_head(run, sequence, number, layer, head, job, own):
    """The delta rule and the gated norm of a head of values for the new tokens of a sequence -> h.

    Guesses change a copy of the state, see qwen3_5.HybridCache.
    """
    sizes = fields.delta_sizes(job)[0]
    n_values, dv = sizes.value_heads, sizes.value_size
    qkv, h, first, stop = fields.qkv(job), fields.h(job), run.first, run.end
    (_, old, before), (_, new, after) = states_of(job, sequence, number)
    w, ba = fields.matrices(job)[layer], fields.conv(job).shape[2]
    z = up_to(w[Q].rows, PANEL)
    ba_start, sure = z + up_to(w[K].rows, PANEL), stop - len(after)
    for i in range(len(after)):
        for j in range(head, 2 * n_values, n_values):
            after[i, ba + j] = qkv[sure + i, ba_start + j]
    copy = floats_at(own.ctypes.data, new[head].shape)
    own = own[new[head].size:]
    learn(before, ba, old[head], new[head], np.int64(-1), number, head, job, own)
    learn(qkv[first:sure], ba_start, new[head] if len(before) else old[head], new[head], first, number, head, job, own)
    learn(qkv[sure:stop], ba_start, new[head], copy, sure, number, head, job, own)
    for row in range(first, stop):
        target, gate = h[row, head * dv:(head + 1) * dv], qkv[row, z + head * dv:z + (head + 1) * dv]
        if sizes.sigmoid:
            for j in range(dv):
                target[j] *= sigmoid(gate[j])
            continue
        silu_times(gate, target)
        for j in range(dv):
            target[j] = gate[j]


@compiled
def learn(rows, ba, old, new, first, number, head, job, own):
    """The delta rule of a head for tokens with q, k and v in `rows` and beta and decay from column `ba` on.

    The state `old` becomes `new`. The normed results go to h, from row `first` on; nowhere if that is negative.
    """
    sizes = fields.delta_sizes(job)[0]
    n_keys, dk, n_values, dv = sizes.key_heads, sizes.key_size, sizes.value_heads, sizes.value_size
    rates, (strips, height, _), key = fields.rates(job)[number], new.shape, head // (n_values // n_keys)
    kq = floats_at(own.ctypes.data, (TOKENS, 2, height))
    factors = floats_at(own[kq.size:].ctypes.data, (TOKENS, 2))
    out = floats_at(own[kq.size + factors.size:].ctypes.data, (TOKENS, strips * 16))
    for start in range(0, len(rows), TOKENS):
        n = min(TOKENS, len(rows) - start)
        for i in range(n):
            x = rows[start + i]
            unit_vector(x[key * dk:(key + 1) * dk], np.float32(1 / np.sqrt(dk)), kq[i, 1])
            unit_vector(x[(n_keys + key) * dk:(n_keys + key + 1) * dk], np.float32(1), kq[i, 0])
            factors[i, 0] = decay_of(x[ba + n_values + head], rates[0, head], rates[1, head])
            factors[i, 1] = sigmoid(x[ba + head])
            for j in range(dv):
                out[i, j] = x[2 * n_keys * dk + head * dv + j]
        for strip in range(strips):
            before = old if start == 0 else new
            delta_rule(before[strip].ctypes.data, new[strip].ctypes.data, kq.ctypes.data, height, factors.ctypes.data,
                       n, out[:, 16 * strip:].ctypes.data, out.strides[0])
        for i in range(n if first >= 0 else 0):
            rms_norm(out[i, :dv], fields.delta_norms(job)[number], fields.eps(job)[0],
                     fields.h(job)[first + start + i, head * dv:(head + 1) * dv])
