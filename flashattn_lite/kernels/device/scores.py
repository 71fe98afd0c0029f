"""From q.k to masked scores on the device: scale, softcap, visibility. Layout-free, twin of `scores.py` above."""

import triton
import triton.language as tl

from flashattn_lite.kernels.device.state import LOG2E

HIGHEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # finite float32


@triton.jit
def tanh(x):
    """tanh(x) to a few float32 eps, relative: a series below 1/4, where (1 - e) / (1 + e) would cancel."""
    x2 = x * x
    odd = x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    large = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, tl.fma(x, odd, x), tl.where(x < 0, -large, large))


@triton.jit
def to_log2(s, scale_log2, softcap, F: tl.constexpr):
    """Scaled and soft-capped scores in log2 units, from raw dot products s [M, N]; scale_log2 = scale / ln 2."""
    if F.softcap:
        softcap_log2 = softcap * LOG2E
        return tanh(s * (scale_log2 / softcap_log2)) * softcap_log2
    else:
        return s * scale_log2


@triton.jit
def visible(offs_m, offs_n, len_k, diag_lo, diag_hi, F: tl.constexpr):
    """[M, N] bool: key offs_n [N] exists and lies between the diagonals of row offs_m [M] (bounds that F has)."""
    seen = (offs_n < len_k)[None, :]
    if F.left:
        seen = seen & (offs_n[None, :] >= offs_m[:, None] + diag_lo)
    if F.right:
        seen = seen & (offs_n[None, :] <= offs_m[:, None] + diag_hi)
    return seen


@triton.jit
def add_mask(s, mask):
    """Scores s [M, N] in log2 units plus an additive mask tile in natural units; -inf hides whatever s holds.

    A finite mask stays finite: float32's lowest number means "far below everything", not "invisible".
    """
    bias = mask.to(tl.float32) * LOG2E
    bias = tl.where(bias < -HIGHEST, -HIGHEST, bias)  # not tl.maximum, which would lose a NaN
    bias = tl.where((bias > HIGHEST) & (mask < float("inf")), HIGHEST, bias)
    return tl.where(mask == float("-inf"), float("-inf"), s + bias)
