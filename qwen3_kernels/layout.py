"""How the fast engine's numbers lie in memory: shared by qwen3_numba.py and its kernels.

A matrix [rows, n] is kept in one of these formats:

    FLOAT32, BF16, FLOAT16   by rows, as they lie in the file
    INT8, INT4               packed: by blocks of 32 rows, with a scale for each group of 32 columns of a row

A block is a stream of units, each for 32 columns of 8 bits or 64 of 4 bits: first the scales, float16 [groups, 32
rows], then 1024 bytes of weights, four columns of all rows at a time, in the order of the instructions for bytes:

    int8   a byte each, [8, 32 rows, 4 columns], w = scale * (byte - 128)
    int4   half a byte each, w = scale * (half - 8): the lower halves are the first group, the upper ones the second

Scales are chosen so that a group's weights err least. Those below 6.1e-5 are subnormal float16, 6e-8 apart, so the root
mean square of a group's errors is at most 0.6 % of its largest weight (int8) or 10 % (int4), plus 3e-8. So that this is
little, a tensor whose largest weight is below SMALLEST is refused; one with weights above LARGEST, too, whose scales
would be infinite.

The vector to multiply is packed likewise: signed bytes, a float32 scale for each group, and for each group an int32
correction for the weights' offset: -128 or -8 times the sum of its bytes, or 0 where the instructions subtract the
offset themselves (see pack_vector). A row of the KV cache is FLOAT32, FLOAT16, BF16 or CACHE8: n signed bytes,
then a float16 scale for each group.
"""
FLOAT32, BF16, FLOAT16, INT8, INT4, CACHE8 = range(6)
GROUP, PANEL = 32, 32  # columns with one scale; rows of a block, or of a panel of floats
UNIT = {8: 1024 + 64, 4: 1024 + 2 * 64}  # bytes
VERSION = "4"  # of the packed formats in files
SMALLEST, LARGEST = 1e-5, {INT8: 100 * 65504, INT4: 5 * 65504}  # what the largest weight of a packed tensor may be

LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # the matrices of a layer, in this order
Q, K, V, OUT, GATE, UP, DOWN = range(7)

ARRIVED, ROUND, ABANDONED = 0, 8, 9  # int64 of a barrier [16], the first on a line of the cache by itself

# How the work is cut into pieces, which decides how much space it needs.
FEW = 8  # up to this number of vectors, rows of floats are multiplied one by one; expanding them would be slower
DEPTH, PANELS = 256, 4  # columns, and panels, that are expanded together: a core's cache holds them
LONG_PART, SHORT_PART = 1024, 256  # positions that a thread works on at a time: long ones if they keep all busy
PAIR = 2  # query heads, or vectors, that are multiplied with a row of floats together
TILE, POSITIONS = 64, 256  # tokens whose queries are worked on together; positions of the cache likewise


def padded(n: int, step: int) -> int:
    """n, rounded up to a multiple of step."""
    return (n + step - 1) // step * step


def packed_shape(n_rows: int, n: int, form: int) -> tuple[int, int]:
    """(blocks, bytes of a block) of a packed matrix [n_rows, n]."""
    bits = 8 if form == INT8 else 4
    return -(-n_rows // PANEL), padded(n, 2 * GROUP) * bits // 8 // GROUP * UNIT[bits]


def tile_parts(group: int, n: int, width: int) -> tuple[int, int, int, int, int, int]:
    """Where the parts of a thread's space end in attend_tile: keys, values, scores, sums, largest, denominators.

    For n tokens and `group` query heads per KV head, `width` numbers each.
    """
    keys = POSITIONS * width
    scores = 2 * keys + TILE * POSITIONS
    sums = scores + group * n * width
    return keys, 2 * keys, scores, sums, sums + group * n, sums + 2 * group * n


def space_size(group: int, width: int) -> int:
    """How many float32 a thread needs to work in: panels of weights, scores of one or two queries, or a tile."""
    return max(PANELS * DEPTH * PANEL, PAIR * LONG_PART, tile_parts(group, TILE, width)[-1])
