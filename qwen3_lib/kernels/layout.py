"""How the fast engine's numbers lie in memory: shared by qwen3_numba.py and its kernels.

A matrix [rows, n] is kept in one of these formats:

    F32, BF16, F16      by rows, as they lie in the file
    ROUNDED             BF16, but vectors are rounded to bf16 before they are multiplied with it
    INT8, INT5, INT4    packed: by blocks of 32 rows, with a scale for each group of 32 columns of a row
    Q8_1, Q5_1, Q4_1    likewise, with a minimum for each group, too: they hold the numbers of other programs' formats
    Q4_0                likewise, without minima; its scales are float16 with a sign
    Q6_K, Q5_K, Q4_K    the same numbers as in GGUF's formats of these names; groups of Q6_K have 16 columns

A block is a stream of units, each for two groups (INT8, Q8_1: one): first the scales, 16 bits [groups, 32 rows], then
the minima, float32 [groups, 32 rows], and 256 bytes of further bits, where the format has them, then the weights, four
columns of all rows at a time, in the order of the instructions for bytes:

    INT8   a byte each, [8, 32 rows, 4 columns], w = scale * (byte - 128)
    Q8_1   the same, but w = scale * (byte - 128) + minimum
    INT4   half a byte each, w = scale * (half - zero): the lower halves are the first group, the upper ones the second
    INT5   the same with 16 more for each set bit; of [2, 32 rows, 4 columns] a byte's bits from the lowest on belong to
           a first group, a second group, and to both groups four columns later, and so on
    Q4_1, Q5_1   the same, but w = scale * half + minimum
    Q4_0   the same, but w = scale * (half - 8)
    Q4_K, Q5_K   the same, with scales and minima of 8 bits, which are multiplied by numbers common to 256 columns:
           float16 [scales and minima, 32 rows], before the first of their units
    Q6_K   likewise, w = scale * (number - 32); two further bits for each number stand as one does in INT5

    WIDE, WIDE_M   a block of the formats with two groups in a unit, while many vectors are multiplied with it: bytes as
           in INT8, with float32 scales; w = scale * (byte - 128), or scale * byte + minimum

Any other scale is a float with 6 bits of exponent and 10 of fraction, see BIAS; it has no sign and no subnormals.
Its last 4 bits are also the `zero` of INT4, 6 + these bits / 4, and of INT5, twice that. Scales and zeros are chosen so
that a group's weights err least; the root mean square of their errors is at most 0.6 % (INT8), 3 % (INT5) or 6 % (INT4)
of the group's largest weight. A tensor whose largest weight is below SMALLEST or above LARGEST is
refused. The formats with a Q are never made by rounding weights.

The vector to multiply is packed likewise, a group of 32 after the other: signed bytes, their float32 scale, and three
int32: the sum of the bytes, the sum of the first 16, and the sum times -128, because sum((w - zero) x) = sum(w x) -
zero sum(x), and likewise with a minimum. With AVX2, behind all groups follow the same groups once more, for spread.py:
their numbers as int16, first the odd ones, then the even ones, and the products of these two, instead of the bytes,
added up times -1. Behind these follow the same groups for one vector times INT8 or Q8_1: the bytes' sizes, 127 where a
byte is negative and -128 elsewhere, and as the last sum the sizes of the negative bytes, see vectors.sizes_and_flips.
A product adds whole numbers within a group, and floats in the order of the groups, however many vectors are multiplied
together. A row of the KV cache is F32, F16, BF16 or KV8: n signed bytes, then a float16 scale for each group of 32.
"""
from typing import Annotated, Any, NamedTuple

import numpy as np

from qwen3_lib.kernels.cpu import PAIRS, PATH


class Format(NamedTuple):
    """How numbers are kept: by rows, or packed."""
    name: str
    number_size: int = 0  # bytes of a number in a row; 0 where packed
    halves: int = 0  # groups of 32 columns in a unit; two of them share its bytes
    high_bits: int = 0  # bits of a number beyond the first four
    minima: int = 0  # 1 with a minimum for each group: what is added
    least: int = 0  # the least and the greatest whole number
    most: int = 0
    group: int = 32  # columns with one scale
    shared: int = 0  # units of 256 columns whose scales, of 8 bits, are multiplied by a common float16; 0 without it
    offset: int = 0  # what is subtracted from each number; 0 with a zero for each group
    float16: bool = False  # the scales of 16 bits are float16; else see BIAS
    scale_size: int = 2  # bytes of a scale in a unit


FORMATS = list[Format]()  # kernels know a format by its place here


def new_format(name: str, **about: Any) -> int:
    FORMATS.append(Format(name, **about))
    return len(FORMATS) - 1


F32 = new_format("f32", number_size=4)
BF16 = new_format("bf16", number_size=2)
F16 = new_format("f16", number_size=2)
ROUNDED = new_format("bf16_rounded", number_size=2)
KV8 = new_format("int8", number_size=1)
INT8 = new_format("int8", halves=1, least=1, most=255, offset=128)  # is_packed: this one and all that follow
INT5 = new_format("int5", halves=2, high_bits=1, most=31)
INT4 = new_format("int4", halves=2, most=15)
Q5_1 = new_format("q5_1", halves=2, high_bits=1, minima=1, most=31)
Q4_1 = new_format("q4_1", halves=2, minima=1, most=15)
Q6_K = new_format("q6_k", halves=2, high_bits=2, most=63, group=16, shared=8, offset=32, scale_size=1)
Q5_K = new_format("q5_k", halves=2, high_bits=1, minima=1, most=31, shared=4, scale_size=1)
Q4_K = new_format("q4_k", halves=2, minima=1, most=15, shared=4, scale_size=1)
Q4_0 = new_format("q4_0", halves=2, most=15, offset=8, float16=True)
Q8_1 = new_format("q8_1", halves=1, minima=1, most=255, offset=128)
STORABLE = range(len(FORMATS))  # of matrices and caches; the others are made from these while a prompt is computed
WIDE = new_format("wide", halves=1, offset=128, scale_size=4)
WIDE_M = new_format("wide_m", halves=1, minima=1, scale_size=4)
HALVES, HIGH_BITS, MINIMA, LEAST, MOST, GROUPS, SHARED, SCALE_SIZE = (  # for kernels, by the format
    np.array([getattr(format_, name) for format_ in FORMATS])
    for name in ("halves", "high_bits", "minima", "least", "most", "group", "shared", "scale_size"))

GROUP, PANEL = 32, 32  # columns with one scale, in most formats; rows of a block
GROUP_SUMS = 16  # bytes of the scale and the sums of a group of a packed vector
GROUP_BYTES = GROUP + GROUP_SUMS  # of a group
GROUP16_BYTES = 2 * GROUP + GROUP_SUMS if PATH == "avx2" else 0  # of a group in 16 bits
SIZES_BYTES = GROUP16_BYTES  # of a group of sizes and signs
WIDENED = np.array([14 if GROUP16_BYTES and form in (INT8, Q8_1) else 5 if PATH in ("avx2", "vnni") else 64
                    for form in range(len(FORMATS))])  # so many vectors pay for widening or spreading a packed block
SHARING = 256  # columns whose scales are multiplied by a common number
SMALLEST, LARGEST = 1e-10, 2.0**18  # what the largest weight of a packed tensor may be
BIAS = 80 << 23  # a scale's 16 bits, 13 places to the left, plus this: the bits of a float32

LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # the matrices of a layer, in this order
Q, K, V, OUT, GATE, UP, DOWN = range(7)
EXPERT = ("gate_proj", "up_proj", "down_proj")  # the matrices of an expert, in this order
EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = range(3)
NORMS, HEAD_NORMS = ("input_layernorm", "post_attention_layernorm"), ("self_attn.q_norm", "self_attn.k_norm")

# What threads share, int64, see crew.py: how many pieces are done; in the next line of the cache whether a thread has
# failed, and from IN_C on the addresses of C_FUNCTIONS. From MEMBERS on for each thread: its queue; in the next line
# how many pieces there have been for all so far, how many of them it has worked on since it last waited, whether it may
# hold some, its number in the system or 0, and whether another thread has lent it a core; a time; two sets of CPUs.
C_FUNCTIONS = "clock_gettime", "sched_getcpu", "sched_getaffinity", "sched_setaffinity"
DONE, ABANDONED, IN_C, MEMBERS = 0, 8, 9, 16
PROMISED, READY, HOLDS, THREAD, LENT, TIME, CPUS, CHOSEN, MEMBER_SIZE = 8, 9, 10, 11, 12, 14, 16, 32, 48
CPUS_SIZE = CHOSEN - CPUS
# Of Layers.fetching: the addresses of C's pread and syscall; of Linux's AIO the numbers of two system calls, the
# context or 0, the address of the request; the number of the turn; how many reads are on their way; how many experts
# threads have to read; a request, 8 numbers; an event, 4 numbers; from LIST on, the slots of these experts.
PREAD, SYSCALL, SUBMIT, EVENTS, CONTEXT, WHICH, TURN, COMING, MISSING, REQUEST = range(10)
EVENT, LIST = REQUEST + 8, REQUEST + 12
MOST_READS = 128  # that are on their way at a time
WAITING = "sched_yield", "usleep"  # functions of the C library that a thread calls when it waits for long

PRODUCT, KEYS, VALUES = range(3)  # the first index of the table of products.py: weights, keys, values
# And the third: all vectors at once; in parts; with rows rearranged before; and with vectors turned, too.
TOGETHER, IN_PARTS, REARRANGED, TURNED = range(4)
VECTORS = 8  # at most so many vectors are multiplied with a row together
PROMPT = 64  # so many vectors are multiplied with 32 rows of gate and up at a time: all of it stays in the second cache
TRANSPOSED = 32  # so many queries of one KV head pay for transposing its keys: see attention.py
STRIP = 192  # rows that are multiplied with all vectors before the next ones: they stay in cache
# Numbers of bf16 that are transposed at a time, or 32 rows: half of a second cache of 512 KB; with AVX512_BF16 of 1 MB.
SPREAD = 2**18 if PAIRS else 2**17
WHOLE, DEPTH = 1024, 768  # so many columns at a time, or in parts of so many: they stay in the first cache
PASS = 2048  # tokens times layers that are computed in one go; after it, Ctrl-C is heard, and all threads meet
BLOCK = 256  # positions whose attention is computed together, counted from the first token of the sequence
TILE = 128  # queries of one KV head that are worked on together: for them, a block of keys is transposed once
FEW = 8  # up to this number of new tokens, the blocks of a sequence are spread over the threads
TOKENS, SUMS_OF_DELTA = 32, 4  # tokens of the delta rule at a time; partial sums of a column: see delta.py
APART = 16  # numbers between two vectors: without them, many would fall on the same few lines of a core's first cache


def record(*names: str) -> np.dtype:
    """The dtype of a record of whole numbers: array[i].name is one of them."""
    return np.dtype((np.record, [(name, np.int64) for name in names]))


# A matrix in memory: `stride` bytes from one row, or packed block, to the next.
WEIGHT = record("address", "stride", "form", "rows", "columns")
# The least and the greatest format of the matrices that are multiplied with the result of a norm.
FORMS = record("least", "greatest")
# Where a matrix of an expert is: mapped; in a slot, so many bytes behind its beginning. The slot's bytes from `into` on
# are `length` bytes of a file from `start` on; 0 if the matrix comes with the one before it.
FILE_BLOCK = record("mapped", "behind", "file", "start", "length", "into")
# Memory for an expert: the layer and the number of the expert in it, or -1; the number of the turn that used it last;
# how many of its reads haven't ended, and whether those that have ended brought all of their bytes.
SLOT = record("address", "layer", "expert", "used", "coming", "whole")
# Whether the weights of the chosen experts are scaled to a sum of 1; whether all tokens go through the last expert.
ROUTING = record("norm_topk_prob", "shared")
# Which of the layers with keys and values a layer is, which of those with a state, of those with n-grams; or -1.
PLACE = record("attention", "state", "ngrams")
# Heads of keys and values of a delta net, the sizes of a head, and whether sigmoid is the output's gate, not silu.
DELTA_SIZES = record("key_heads", "key_size", "value_heads", "value_size", "sigmoid")
# Sparse attention: index queries of a token, their size, the most blocks that a token sees, positions of a block; and
# how many tokens lie between two taps of an n-gram layer's convolution.
INDEXING = record("heads", "size", "most", "ratio", "step")
# The sequence of a new token, and its position there.
ROW = record("sequence", "position")
# Attention of `n` new tokens of a sequence of the cache, from row `first` of the batch on, to some of its blocks; the
# first token sees `seen` positions. One block, or all of them from the first on: the order of sums is the same.
TASK = record("sequence", "first", "n", "seen", "block", "n_blocks")
# The tasks first to end - 1, whose results belong to the same tokens.
TILES = record("first", "end")
# A sequence's cache: the addresses of k and v, uint16 [n_layers, n_kv_heads, capacity, row_size].
CACHE = record("k", "v", "capacity")
CACHE_ROWS = record("form", "size")  # of all caches
# The index of a sequence's cache: the addresses of the raw index keys, float32 [n_layers, capacity, size], and of those
# of whole blocks, float32 [n_layers, n_blocks, size padded to 32].
INDEX = record("keys", "blocks", "capacity", "n_blocks")
WHOLE_BLOCK = record("sequence", "block")  # whose last token is new
# The rows first to end - 1 of the batch belong to a sequence; so many tokens its state hasn't learned yet, before the
# pass and after it.
RUN = record("first", "end", "late", "late_after")
STATE = record("history", "memory", "late")  # the addresses of the arrays of delta.state_of
# The machine code for some vectors: the most that are multiplied at once; the address of the function for each number;
# that of the function which rearranges the rows before.
FUNCTIONS = np.dtype((np.record, [("most", np.int64), ("address", np.int64, (VECTORS + 1,)), ("rearrange", np.int64)]))
# What a kernel gets: the number of threads; the address of what they share; the layers first to last - 1; the
# address of the table of all fields of Layers, NewTokens and Space, and of products.py's table; how many passes there
# are whose end gives logits, or 0 for one without them.
JOB = record("n_threads", "shared", "first", "last", "table", "logits")


def of(dtype: Any, n_dimensions: int) -> Any:
    """The type of a field: an array of so many dimensions."""
    return Annotated[np.ndarray, np.dtype(dtype), n_dimensions]


class Layers(NamedTuple):
    """The weights of all layers. The router of a dense layer has no rows."""
    matrices: of(WEIGHT, 2)  # [n_layers, 7], in the order of LINEAR
    norms: of(np.float32, 3)  # [n_layers, 2, hidden_size]
    head_norms: of(np.float32, 3)  # [n_layers, 2, head_dim]
    norm: of(np.float32, 1)  # [hidden_size]
    head: of(WEIGHT, 1)  # [1]
    eps: of(np.float64, 1)  # [1]
    forms: of(FORMS, 2)  # [n_layers, 2], after each norm
    routers: of(WEIGHT, 1)  # [n_layers], all F32
    experts: of(WEIGHT, 3)  # [n_layers, num_experts, 3], in the order of EXPERT
    routing: of(ROUTING, 1)  # [1]
    blocks: of(FILE_BLOCK, 3)  # [n_layers, num_experts, 3], see slots.py; or [n_layers, 0, 3]
    slots: of(SLOT, 1)  # [n_layers * slots of a layer], or [0]: the experts are in memory, or mapped
    slot_of: of(np.int64, 2)  # [n_layers, num_experts], which slot an expert has; or -1
    fetching: of(np.int64, 1)  # how experts are read, see PREAD
    places: of(PLACE, 1)  # [n_layers]
    delta_sizes: of(DELTA_SIZES, 1)  # [1], or [0]
    conv: of(np.float32, 3)  # [layers with a state, taps, channels], the oldest tap first
    rates: of(np.float32, 3)  # [layers with a state, exp(A_log) and dt_bias, heads of values]
    delta_norms: of(np.float32, 2)  # [layers with a state, size of a head of values]
    indexing: of(INDEXING, 1)  # [1], or [0]: of models with streams, as all that follows
    reading: of(WEIGHT, 3)  # [n_layers + 1, 2, 2]: of the streams, down and up, before the mixer and before the MLP
    stream_norms: of(np.float32, 4)  # [n_layers + 1, 2, streams, hidden_size]
    index_norms: of(np.float32, 3)  # [layers that attend, 2, index size], of queries and of blocks
    ngrams: of(WEIGHT, 2)  # [n-gram layers, 2]: the matrices of keys and of values
    ngram_norms: of(np.float32, 4)  # [n-gram layers, 3, streams, hidden_size]: of keys, queries, and the convolution
    ngram_conv: of(np.float32, 3)  # [n-gram layers, taps, streams * hidden_size], the oldest tap first


class NewTokens(NamedTuple):
    """The new tokens of all sequences."""
    x: of(np.float32, 2)  # [m, hidden_size]
    cos: of(np.float32, 2)  # [m, head_dim / 2]
    sin: of(np.float32, 2)
    rows: of(ROW, 1)  # [m]
    tasks: of(TASK, 1)
    tiles: of(TILES, 1)
    wanted: of(np.int64, 1)  # the rows of x whose logits are wanted
    logits: of(np.float32, 2)  # [n, vocab_size, or more]
    caches: of(CACHE, 1)  # [n_sequences]
    cache_rows: of(CACHE_ROWS, 1)  # [1]
    runs: of(RUN, 1)  # [n_sequences], or [0]
    states: of(STATE, 3)  # [n_sequences, layers with a state, 2]: before the pass and after it; then the n-gram layers
    streams: of(np.float32, 2)  # [m, streams * hidden_size], in place of x, which is what a layer adds; or [0]
    which: of(np.int64, 1)  # [m], all rows of x
    found: of(np.float32, 3)  # [n-gram layers, m, numbers of the table for a token]
    indices: of(INDEX, 1)  # [n_sequences]
    whole: of(WHOLE_BLOCK, 1)
    whole_cos: of(np.float32, 2)  # [whole blocks, rope_dim / 2]
    whole_sin: of(np.float32, 2)
    scores: of(np.float32, 2)  # [m, if these are few, or n_threads, blocks]: of a token, or of a thread's token
    heads: of(WEIGHT, 1)  # [passes], of a job of several passes of a code predictor, as all that follows; or [0]
    vectors: of(np.float32, 3)  # [passes, codes, hidden_size]: x after a code was drawn
    counts: of(np.int64, 1)  # [m], of how many codes one is drawn; 0: the likeliest
    temperatures: of(np.float32, 1)  # [m]
    noise: of(np.float32, 3)  # [m, passes, most counts]
    codes: of(np.int64, 2)  # [m, passes], what was drawn; -1: it isn't sure


class Space(NamedTuple):
    """What kernels work in; rows are padded to a multiple of 64.

    In a mixture of experts, a pair is a token with an expert that it has chosen.
    """
    h: of(np.float32, 2)  # [m, widest factor]
    packed: of(np.uint8, 2)  # h, packed
    qkv: of(np.float32, 2)  # [m, ...]
    queries: of(np.float32, 3)  # [n_kv_heads, m * group, width]
    gate: of(np.float32, 2)  # [m or n_pairs, intermediate]
    up: of(np.float32, 2)
    gate_packed: of(np.uint8, 2)
    partials: of(np.float32, 4)  # [n_tasks, n_kv_heads, queries of a task, width + 16]
    own: of(np.float32, 2)  # [n_threads, own_space(...)]
    gathered: of(np.float32, 2)  # [n_pairs, hidden_size], first the vectors of the pairs, then the experts' results
    gathered_packed: of(np.uint8, 2)
    chosen: of(np.int64, 2)  # [m, k], the experts of a token, then the rows of its pairs
    shares: of(np.float32, 2)  # [m, k], the weights of these experts
    starts: of(np.int64, 1)  # [num_experts + 2]: an expert e has the pairs from starts[e] to starts[e + 1]
    writing: of(np.float32, 2)  # [m, streams]: the weights of what a layer adds
    index_queries: of(np.float32, 2)  # [m * index heads, size padded to 32]
    chosen_blocks: of(np.int64, 2)  # [m, most blocks], in order; of tokens that see more blocks than these
    copied: of(np.uint16, 2)  # [n_threads, ...]: rows of keys and values that a token has chosen


def address_table(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """int64 [n, 5], the address and the shape of each array: so kernels find them."""
    found = {id(array): array for array in arrays}  # fields that a model doesn't have are all the same array
    assert all(array.flags.c_contiguous for array in found.values())
    rows = {key: (array.ctypes.data, *array.shape, 0, 0, 0, 0)[:5] for key, array in found.items()}
    return np.array([rows[id(array)] for array in arrays], np.int64)


def crew_size(n_threads: int) -> int:
    """How many int64 so many threads share."""
    return MEMBERS + MEMBER_SIZE * n_threads


def vector_size(width: int) -> int:
    """The bytes of a packed vector of `width` numbers, a multiple of 64."""
    return width // GROUP * (GROUP_BYTES + GROUP16_BYTES + SIZES_BYTES)


def padded(n: int, step: int) -> int:
    """n, rounded up to a multiple of step."""
    return (n + step - 1) // step * step


def is_packed(form: int) -> bool:
    return form >= INT8


def fours_in_16_bits(form: int) -> int:
    """How many products of four columns with signed bytes an int16 holds, each the sum of two: 2 * 8 * 15 * 127."""
    return (2**15 - 1) // (2 * (16 * 2**FORMATS[form].high_bits - 1) * 127)


def unit_size(form: int) -> int:
    """The bytes of a unit of a packed format: scales, minima, further bits, and 1024 or 512 bytes of weights."""
    scales = PANEL * HALVES[form] * (SCALE_SIZE[form] + MINIMA[form] * (1 if SHARED[form] else 4))
    return PANEL * GROUPS[form] + 256 * min(HIGH_BITS[form], 1) + scales


def factors_size(form: int) -> int:
    """The bytes of the factors that some units share."""
    return 2 * PANEL * (1 + MINIMA[form]) * min(SHARED[form], 1)


def packed_shape(n_rows: int, n: int, form: int) -> tuple[int, int]:
    """(blocks, bytes of a block) of a packed matrix [n_rows, n]."""
    units = padded(n, SHARING if SHARED[form] else 2 * GROUP) // (GROUPS[form] * HALVES[form])
    factors = units // max(SHARED[form], 1) * factors_size(form)
    return padded(n_rows, PANEL) // PANEL, int(units * unit_size(form) + factors)


def own_space(n_queries: int, width: int, columns: int) -> int:
    """How many float32 a thread works in: sums of a strip of rows, and the strip; or a block's scores, keys, results.

    n_queries of a head of this width, padded; columns: of the widest matrix, padded.
    """
    attention = VECTORS * BLOCK + BLOCK * width + n_queries * (width + 16)
    return max(STRIP * VECTORS * 16 + max(STRIP * columns * (columns > WHOLE), PANEL * columns, SPREAD), attention)
