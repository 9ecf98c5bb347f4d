"""The kernels of a model with residual streams: reading and writing them, and its n-gram layers. See layers.py for the
others, and sparse.py for its attention. A kernel's namesake is in qwen4_exp.py.

x [m, hidden_size] isn't the residual stream here: it is what a layer adds to the streams, and zeros in between.
"""
import numpy as np

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.crew import crew_of, items, pieces, wait
from qwen3_lib.kernels.delta import add_product, copy
from qwen3_lib.kernels.experts import add_times, moe
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import dot, floats_at
from qwen3_lib.kernels.layers import (add_projected, form_is_packed, project, project_all, ready, ready_for_both,
                                      rms_norm, sigmoid, up_to)
from qwen3_lib.kernels.layout import OUT, PANEL

BEFORE_MIXER, BEFORE_MLP = range(2)  # of a layer's `reading` and `stream_norms`
DOWN_AND_INJECT, UP_AGAIN = range(2)  # of `reading`: input_mix_weight_down above block_inject_weight, and _up
NGRAM_KEY, NGRAM_VALUE = range(2)  # of `ngrams`
KEY_NORM, QUERY_NORM, CONV_NORM = range(3)  # of `ngram_norms`


@compiled
def read_mixed(record, rank, layer):
    """The n-gram layer, where there is one; the streams' reading; and the mixer's projections of it."""
    crew, job = crew_of(record, rank), fields.table(record)
    number = fields.places(job)[layer].ngrams
    if number >= 0:
        ngram_layer(crew, number, job)
    forms = fields.forms(job)[layer, 0]
    read_streams(crew, fields.which(job), layer, BEFORE_MIXER, job)
    wait(crew)
    make_ready(crew, forms.least, forms.greatest, job)
    wait(crew)
    project_all(crew, fields.matrices(job)[layer], job)
    wait(crew)


@compiled
def finish_streams(record, rank, layer):
    """The mixer's last matrix, written to the streams; and the experts, which read and write them again."""
    crew, job = crew_of(record, rank), fields.table(record)
    router, form = fields.routers(job)[layer], fields.forms(job)[layer, 1].greatest
    add_projected(crew, fields.matrices(job)[layer, OUT], fields.h(job), fields.packed(job), job)
    wait(crew)
    write_streams(crew, job)
    wait(crew)
    read_streams(crew, fields.which(job), layer, BEFORE_MLP, job)
    wait(crew)
    make_ready(crew, router.form, form if form_is_packed(form) else router.form, job)
    wait(crew)
    moe(crew, layer, fields.last(record), job)
    write_streams(crew, job)
    wait(crew)


@compiled
def output_streams(record, rank, layer):
    """The streams' last reading, and the lm_head, of the rows `wanted` -> logits."""
    crew, job = crew_of(record, rank), fields.table(record)
    h, packed, d, head = fields.h(job), fields.packed(job), fields.x(job).shape[1], fields.head(job)[0]
    wanted = fields.wanted(job)
    if len(wanted) == 0:
        return
    read_streams(crew, wanted, layer, BEFORE_MIXER, job)
    wait(crew)
    for i in items(len(wanted), crew):
        ready(h[i], d, head.form, packed[i], np.int64(0), d)
    wait(crew)
    project(crew, head, h[:len(wanted)], packed[:len(wanted)], fields.logits(job), np.int64(0), job, np.int64(0))
    wait(crew)


@compiled
def make_ready(crew, least, greatest, job):
    """Makes h the factor of products with weights of these formats."""
    h, packed, d = fields.h(job), fields.packed(job), fields.x(job).shape[1]
    for t in items(len(h), crew):
        ready_for_both(h[t], d, least, greatest, packed[t])


@compiled
def read_streams(crew, which, layer, half, job):
    """qwen4_exp.read_streams of the tokens `which` [n] -> the first n rows of h, and `writing` for write_streams.

    `ready` may round the normalised streams for the product, so they are normalised anew for the mean.
    """
    norms, w = fields.stream_norms(job)[layer, half], fields.reading(job)[layer, half]
    down, up, n, (n_streams, d) = w[DOWN_AND_INJECT], w[UP_AGAIN], len(which), norms.shape
    streams, h, packed, mixed = fields.streams(job), fields.h(job), fields.packed(job), fields.qkv(job)
    inner, inner_packed, writing = fields.gate(job), fields.gate_packed(job), fields.writing(job)
    eps, own, count = fields.eps(job)[0], fields.own(job)[crew.rank], np.float32(n_streams)
    for i in items(n, crew):
        for c in range(n_streams):
            rms_norm(streams[which[i], c * d:(c + 1) * d], norms[c], eps, h[i, c * d:(c + 1) * d])
        ready(h[i], n_streams * d, down.form, packed[i], np.int64(0), n_streams * d)
    wait(crew)
    project(crew, down, h[:n], packed[:n], mixed, np.int64(0), job, np.int64(0))
    wait(crew)
    for i in items(n, crew):
        for j in range(up.columns):
            x = mixed[i, j] / count
            inner[i, j] = x * sigmoid(x)
        for c in range(down.rows - up.columns):
            writing[i, c] = np.float32(2) * sigmoid(mixed[i, up.columns + c] / count)
        ready(inner[i], up.columns, up.form, inner_packed[i], np.int64(0), up.columns)
    wait(crew)
    project(crew, up, inner[:n], inner_packed[:n], mixed, np.int64(0), job, np.int64(0))
    wait(crew)
    for i in items(n, crew):
        out = h[i, :d]
        out[:] = 0
        for c in range(n_streams):
            rms_norm(streams[which[i], c * d:(c + 1) * d], norms[c], eps, own)
            add_gated(out, mixed[i, c * d:(c + 1) * d], own[:d])
        for j in range(d):
            out[j] /= count


@compiled
def add_gated(x, gate, y):
    """x [n] becomes x + sigmoid(gate) * y."""
    for i in range(len(x)):
        x[i] += sigmoid(gate[i]) * y[i]


@compiled
def write_streams(crew, job):
    """qwen4_exp.write_streams of x, which becomes zeros."""
    x, streams, writing = fields.x(job), fields.streams(job), fields.writing(job)
    d = x.shape[1]
    for t in items(len(x), crew):
        for c in range(writing.shape[1]):
            add_times(streams[t, c * d:(c + 1) * d], x[t], writing[t, c])
        x[t] = 0


@compiled
def ngram_layer(crew, number, job):
    """qwen4_exp.ngram_layer of `found`, what the table has for each token."""
    found, w, norms = fields.found(job)[number], fields.ngrams(job)[number], fields.ngram_norms(job)[number]
    streams, h, packed, mixed = fields.streams(job), fields.h(job), fields.packed(job), fields.qkv(job)
    eps, own, (n_streams, d) = fields.eps(job)[0], fields.own(job)[crew.rank], norms.shape[1:]
    n, value_start = found.shape[1], up_to(w[NGRAM_KEY].rows, PANEL)
    least, greatest = min(w[NGRAM_KEY].form, w[NGRAM_VALUE].form), max(w[NGRAM_KEY].form, w[NGRAM_VALUE].form)
    for t in items(len(h), crew):
        copy(found[t], h[t])
        ready_for_both(h[t], n, least, greatest, packed[t])
    wait(crew)
    project(crew, w[NGRAM_KEY], h, packed, mixed, np.int64(0), job, np.int64(0))
    project(crew, w[NGRAM_VALUE], h, packed, mixed, value_start, job, np.int64(0))
    wait(crew)
    for t in items(len(h), crew):
        value = mixed[t, value_start:value_start + d]
        for c in range(n_streams):
            key, stream = mixed[t, c * d:(c + 1) * d], streams[t, c * d:(c + 1) * d]
            rms_norm(key, norms[KEY_NORM, c], eps, key)
            rms_norm(stream, norms[QUERY_NORM, c], eps, own)
            factor = sigmoid(fit_of(key, own[:d]))
            add_times(stream, value, factor)
            for j in range(d):
                key[j] = factor * value[j]
            rms_norm(key, norms[CONV_NORM, c], eps, key)
    wait(crew)
    spread(crew, number, job)
    wait(crew)


@compiled
def fit_of(key, query):
    """How far an n-gram's value fits a stream: the root of |key · query / sqrt(d)|, with its sign."""
    whole = len(key) // 16 * 16
    sum_ = dot(key.ctypes.data, query.ctypes.data, whole)
    for i in range(whole, len(key)):
        sum_ += key[i] * query[i]
    fit = sum_ / np.float32(np.sqrt(len(key)))
    root = np.sqrt(max(abs(fit), np.float32(1e-6)))
    return root if fit > 0 else -root if fit < 0 else fit * np.float32(0)


@compiled
def histories_of(job, sequence, place, n_rows, channels):
    """The last rows of an n-gram layer before the pass, and those after it: see delta.state_of."""
    run, states = fields.runs(job)[sequence], fields.states(job)[sequence, place]
    return (floats_at(states[0].history, (n_rows + run.late, channels)),
            floats_at(states[1].history, (n_rows + run.late_after, channels)))


@compiled
def spread(crew, number, job):
    """silu of the convolution over every step-th token of an n-gram layer's rows, in qkv, added to the streams."""
    rows, streams, conv, runs = fields.qkv(job), fields.streams(job), fields.ngram_conv(job)[number], fields.runs(job)
    (taps, channels), step, place = conv.shape, fields.indexing(job)[0].step, len(fields.conv(job)) + number
    own = fields.own(job)[crew.rank]
    for start, end in pieces(channels, np.int64(16), len(rows), crew):
        sums = own[:end - start]
        for s in range(len(runs)):
            first, stop = runs[s].first, runs[s].end
            if first == stop:  # it has no token in this pass
                continue
            old, new = histories_of(job, s, place, (taps - 1) * step, channels)
            for j in range(len(new)):
                row = stop - len(new) + j
                kept = rows[row] if row >= first else old[row - first + len(old)]
                copy(kept[start:end], new[j, start:end])
            for row in range(first, stop):
                sums[:] = 0
                for tap in range(taps):
                    at = row - (taps - 1 - tap) * step
                    before = rows[at] if at >= first else old[at - first + len(old)]
                    add_product(sums, before[start:end], conv[tap, start:end])
                add_gated(streams[row, start:end], sums, sums)
