"""Which K/V tiles a tile of query rows visits, and which of them need no mask. Scalars only."""

import triton
import triton.language as tl


@triton.jit
def visited_keys(row_lo, row_hi, len_k, diag_lo, diag_hi, BLOCK_N: tl.constexpr, F: tl.constexpr):
    """For query rows row_lo <= i < row_hi: (lo, full_lo, full_hi, hi), lo <= full_lo <= full_hi <= hi (or nothing to visit).

    Tiles of BLOCK_N keys from lo up to hi hold every key that some row sees; those in [full_lo, full_hi) are
    seen whole by all rows. lo, full_lo and full_hi are multiples of BLOCK_N, so a key is always in the same tile.
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
    if F.mask != "":
        full_hi = 0
    full_lo = tl.minimum(full_lo, tl.maximum(hi, lo))
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi
