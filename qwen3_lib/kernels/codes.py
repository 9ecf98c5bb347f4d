"""The kernel at the end of a code predictor's pass: it draws codes, and what they become is the next pass's x.

So the passes of a frame are one job for the threads, which wait for Python once: see speaking.py.
"""
import numpy as np

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.crew import crew_of, items, wait
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import bits_of
from qwen3_lib.kernels.layers import exp, largest_of, logits_of

INFINITE = 0x7F800000  # a float32's bits without its sign
NEARLY = np.float32(1 - 2e-5)  # exp of this engine and of NumPy differ by less: see intrinsics.write_exp


@compiled
def draw_codes(record, rank, layer):
    """layers.output_logits; in a job of several passes with the pass's head, then its draw, for each sequence."""
    crew, job = crew_of(record, rank), fields.table(record)
    x, rows, tasks, cos, sin = fields.x(job), fields.rows(job), fields.tasks(job), fields.cos(job), fields.sin(job)
    heads, number, codes = fields.heads(job), layer - len(fields.places(job)), fields.codes(job)
    logits_of(crew, heads if len(heads) > 0 else fields.head(job), number, job)
    for s in items(len(codes), crew):
        noise = fields.noise(job)[s, number, :fields.counts(job)[s]]
        code = drawn(fields.logits(job)[s, :heads[number].rows], fields.temperatures(job)[s], noise)
        codes[s, number] = code
        vector = fields.vectors(job)[number, max(code, 0)]
        for i in range(len(vector)):
            x[s, i] = vector[i]
        for i in range(cos.shape[1]):  # cos and sin have a row for each sequence, then one for each later position
            cos[s, i], sin[s, i] = cos[len(x) + number, i], sin[len(x) + number, i]
        rows[s].position += 1
        tasks[s].seen += 1
    wait(crew)


@compiled
def drawn(x, temperature, noise):
    """qwen3.sample from logits x [n], which change, with the numbers that it would draw: noise [k], one for each of the
    k likeliest, or none for the likeliest one. -1: where it could draw another code, or logits aren't finite.
    """
    greatest, largest = np.int32(0), largest_of(x)
    for i in range(len(x)):
        greatest = max(greatest, size_bits(x[i]))
    if greatest >= INFINITE:
        return -1
    if len(noise) == 0:
        for i in range(len(x)):
            if x[i] == largest:
                return i
    for i in range(len(x)):
        x[i] = (x[i] - largest) / temperature
    low, limit = np.int64(0), np.int64(INFINITE)  # bits of the k-th smallest size, by halves: no x is above 0
    while low < limit:
        middle = (low + limit) // 2
        if count_within(x, np.int32(middle)) < len(noise):
            low = middle + 1
        else:
            limit = middle
    code, best, second, j = -1, np.float32(0), np.float32(0), 0
    for i in range(len(x)):
        if size_bits(x[i]) <= limit:
            if j < len(noise):
                arrival = exp(x[i]) / noise[j]
                if arrival > best:
                    code, best, second = i, arrival, best
                else:
                    second = max(second, arrival)
            j += 1
    return code if j == len(noise) and second < best * NEARLY else -1


@compiled
def size_bits(x):
    """The bits of |x|, an int32, which is in the order of the numbers."""
    return bits_of(x) & np.int32(0x7FFFFFFF)


@compiled
def count_within(x, limit):
    """How many of x [n] have a size of at most so many bits."""
    n = np.int32(0)
    for i in range(len(x)):
        n += np.int32(size_bits(x[i]) <= limit)
    return n
