"""The kernel of a mixture of experts, in place of layers.finish_dense. See layers.py for the others.

The pairs of a token and an expert are sorted by expert, so that each expert is read once for all its tokens.
"""
import numpy as np

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.crew import crew_of, items, pieces, pieces_for, wait
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.layers import (add_projected, add_to, exp, for_bf16, form_is_packed, gate_and_up, largest_of,
                                      linear, normalize, project, sigmoid, swiglu, up_to)
from qwen3_lib.kernels.layout import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, GROUP, OUT, PANEL, vector_size
from qwen3_lib.kernels.slots import fetch, turns_for

vector_bytes = compiled(vector_size)


@compiled
def finish_sparse(record, rank, layer):
    """finish_dense in a mixture of experts, which may have dense layers, too."""
    crew, job = crew_of(record, rank), fields.table(record)
    add_projected(crew, fields.matrices(job)[layer, OUT], fields.h(job), fields.packed(job), job)
    wait(crew)
    router, form = fields.routers(job)[layer], fields.forms(job)[layer, 1].greatest
    if router.rows > 0:
        normalize(crew, fields.norms(job)[layer, 1], router.form, form if form_is_packed(form) else router.form, job)
        wait(crew)
        moe(crew, layer, fields.last(record), job)
    else:
        swiglu(crew, layer, job)


@compiled
def moe(crew, layer, last, job):
    """The namesake of qwen3.moe, of h, added to x. Of the experts, only chosen ones are read.

    A pair's result depends on its token and its expert, and a token adds its pairs in the order of its own
    probabilities: the other tokens change where a pair lies, and nothing else.
    """
    x, h, packed, logits = fields.x(job), fields.h(job), fields.packed(job), fields.qkv(job)
    router, own = fields.routers(job)[layer], fields.own(job)[crew.rank]
    experts, forms = fields.experts(job)[layer], fields.forms(job)[layer, 1]
    chosen, shares, starts, products = fields.chosen(job), fields.shares(job), fields.starts(job), fields.products(job)
    gate, up, gate_packed = fields.gate(job), fields.up(job), fields.gate_packed(job)
    gathered, gathered_packed = fields.gathered(job), fields.gathered_packed(job)
    hidden = x.shape[1]
    project(crew, router, h, packed, logits, np.int64(0), job, np.int64(0))
    wait(crew)
    for t in items(len(x), crew):
        choose(logits[t, :router.rows], fields.routing(job)[0], chosen[t], shares[t])
    wait(crew)
    for _ in items(1, crew):
        sort_by_expert(chosen, starts)
    wait(crew)
    gather(crew, hidden, forms.least, job)
    wait(crew)
    parts, turns = pieces_for(len(x), crew), turns_for(len(x), job)
    for turn in range(turns):
        begin, stop = len(experts) * turn // turns, len(experts) * (turn + 1) // turns
        fetch(crew, layer, last, turn, turns, job)
        for part in pieces(parts, np.int64(1), parts, crew):
            before, n_pairs = starts[begin], starts[stop] - starts[begin]
            for e in range(begin, stop):
                first, end, w = starts[e], starts[e + 1], experts[e]
                if first < end:
                    rows = expert_share(w[EXPERT_GATE].rows, first - before, end - before, n_pairs, part, parts)
                    gate_and_up(products, w[EXPERT_GATE], w[EXPERT_UP], w[EXPERT_DOWN].form,
                                gathered[first:end], gathered_packed[first:end],
                                (gate[first:end], up[first:end], gate_packed[first:end]), rows, own, np.int64(0))
        wait(crew)
        for part in pieces(parts, np.int64(1), parts, crew):
            before, n_pairs = starts[begin], starts[stop] - starts[begin]
            for e in range(begin, stop):
                first, end = starts[e], starts[e + 1]
                if first < end:
                    rows = expert_share(hidden, first - before, end - before, n_pairs, part, parts)
                    linear(products, experts[e, EXPERT_DOWN], gate[first:end], gate_packed[first:end],
                           gathered[first:end], np.int64(0), rows[0], rows[1], own, np.int64(0))
        wait(crew)
    for start, end in pieces(hidden, np.int64(PANEL), len(x), crew):
        for t in range(len(x)):
            sum_ = h[t, start:end]
            sum_[:] = 0
            for r in range(chosen.shape[1]):
                add_times(sum_, gathered[chosen[t, r], start:end], shares[t, r])
            add_to(x[t, start:end], sum_)
    wait(crew)


@compiled
def add_times(x, y, factor):
    """x [n] becomes x + y * factor."""
    for i in range(len(x)):
        x[i] += y[i] * factor


@compiled
def choose(logits, routing, chosen, shares):
    """A router's logits [num_experts] -> the most likely experts, of equal ones the first, and their probabilities.

    A shared expert comes last, with the sigmoid of its logit.
    """
    if routing.shared:
        last = len(logits) - 1
        chosen[len(chosen) - 1], shares[len(shares) - 1] = last, sigmoid(logits[last])
        logits, chosen, shares = logits[:last], chosen[:len(chosen) - 1], shares[:len(shares) - 1]
    largest, total, sum_ = largest_of(logits), np.float32(0), np.float32(0)
    for e in range(len(logits)):
        logits[e] = exp(logits[e] - largest)
    for e in range(len(logits)):
        total += logits[e]
    for r in range(len(chosen)):
        best, most = 0, np.float32(-1)
        for e in range(len(logits)):
            if logits[e] != -1 and not logits[e] <= most:  # NaN counts, so that no expert is chosen twice
                best, most = e, logits[e]
        chosen[r], shares[r] = best, logits[best] / total
        logits[best] = -1
        sum_ += shares[r]
    if routing.norm_topk_prob:
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
def gather(crew, n, form, job):
    """Copies the tokens' vectors [n] to the rows of their pairs, ready for BF16 if form is that."""
    h, h_packed, chosen = fields.h(job), fields.packed(job), fields.chosen(job)
    gathered, gathered_packed = fields.gathered(job), fields.gathered_packed(job)
    width = up_to(n, 2 * GROUP)
    for t in items(len(h), crew):
        for r in range(chosen.shape[1]):
            vector, packed = gathered[chosen[t, r]], gathered_packed[chosen[t, r]]
            for i in range(width):
                vector[i] = h[t, i]
            for i in range(vector_bytes(width)):
                packed[i] = h_packed[t, i]
            for_bf16(vector[:width], form)


@compiled
def expert_share(n, first, end, n_pairs, part, parts):
    """(start, end) of the parts (from, to - 1) of the n rows, in whole blocks; the expert has pairs first to end - 1.

    The parts share the blocks of all experts one after the other, each block counted once for each of its pairs.
    """
    blocks, count = (n + PANEL - 1) // PANEL, end - first
    every, before = n_pairs * blocks, first * blocks
    start = (every * part[0] // parts - before + count - 1) // count
    stop = (every * part[1] // parts - before + count - 1) // count
    return min(n, min(max(start, 0), blocks) * PANEL), min(n, min(max(stop, 0), blocks) * PANEL)
