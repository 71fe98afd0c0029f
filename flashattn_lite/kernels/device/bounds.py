"""Which K/V tiles a tile of query rows visits, in which order, and which of them need no mask. Scalars only."""

import triton
import triton.language as tl


@triton.jit
def visited_tiles(row_lo, row_hi, len_k, diag_lo, diag_hi, BLOCK_N: tl.constexpr, F: tl.constexpr):
    """The visit of query rows row_lo <= i < row_hi: (count, edges, before, lo, full_lo, full_hi), for `tile_start`.

    `count` tiles of BLOCK_N keys hold every key that some row sees. The first `edges` of them need a mask (or come
    first to set the rows' reference: one whole tile is among them); the rest every row sees whole.
    Tiles start at multiples of BLOCK_N, so that a key is always in the same one.
    """
    lo = 0
    full_lo = 0
    hi = len_k
    full_hi = len_k
    if F.left:
        lo = tl.minimum(tl.maximum(row_lo + diag_lo, 0), len_k) // BLOCK_N * BLOCK_N
        full_lo = tl.minimum(tl.maximum(row_hi - 1 + diag_lo, 0), len_k)
        full_lo = (full_lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if F.right:
        hi = tl.minimum(tl.maximum(row_hi + diag_hi, 0), len_k)
        full_hi = tl.minimum(tl.maximum(row_lo + diag_hi + 1, 0), len_k)
    full_hi = full_hi // BLOCK_N * BLOCK_N
    count = tl.maximum(hi - lo + BLOCK_N - 1, 0) // BLOCK_N
    whole = 0
    if F.mask == "":
        full_lo += BLOCK_N
        whole = tl.maximum(full_hi - full_lo, 0) // BLOCK_N
    return count, count - whole, (full_lo - lo) // BLOCK_N, lo, full_lo, full_hi


@triton.jit
def tile_start(i, edges, before, lo, full_lo, full_hi, whole, BLOCK_N: tl.constexpr):
    """First key of the i-th tile of a visit: the edges before the whole tiles, those after them, the whole tiles."""
    edge = lo + i * BLOCK_N
    edge = tl.where((whole > 0) & (i >= before), full_hi + (i - before) * BLOCK_N, edge)
    return tl.where(i < edges, edge, full_lo + (i - edges) * BLOCK_N)


@triton.jit
def visited_start(i, visit, BLOCK_N: tl.constexpr):
    """`tile_start` of the i-th tile of what `visited_tiles` gave."""
    count, edges, before, lo, full_lo, full_hi = visit
    return tile_start(i, edges, before, lo, full_lo, full_hi, count - edges, BLOCK_N)


@triton.jit
def clamp_sequence(start, end, total):
    """(start, length) of a packed sequence, clamped into the tensor whatever the table holds."""
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, start), total)
    return start, end - start
