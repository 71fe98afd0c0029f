"""From q.k to masked scores on the device: scale, softcap, visibility. Layout-free, twin of `scores.py` above."""

import triton
import triton.language as tl

from flashattn_lite.kernels.device.state import EMPTY_M, LN2, LOG2E

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of float32's finite numbers
# The largest float32 that times LOG2E, rounded, is finite.
HIGHEST_BIAS: tl.constexpr = tl.constexpr(2.3586574e38)


@triton.jit
def tanh(x):
    """tanh(x) to a few float32 eps, relative: 1 - 2 / (1 + e^(2 x)), and a polynomial below 1/2, where that cancels.

    One over something as the square of its rsqrt, because a division has a case for each range of the divisor. The
    polynomial is the best of its degree for x -> tanh(x) / x, to 2^-26 (least squares, weighed anew until level).
    """
    root = tl.rsqrt(1 + tl.exp2(x * (2 * LOG2E)))
    x2 = x * x
    odd = x2 * tl.fma(x2, tl.fma(x2, tl.fma(x2, 0.017241486, -0.053045492), 0.133258789), -0.333331439)
    return tl.where(tl.abs(x) < 0.5, tl.fma(x, odd, x), tl.fma(root * root, -2.0, 1.0))


@triton.jit
def to_log2(s, scale_log2, softcap, F: tl.constexpr):
    """Scaled and soft-capped scores in log2 units, from raw dot products s [M, N]; scale_log2 = scale / ln 2."""
    if F.softcap:
        softcap_log2 = softcap * LOG2E
        # Kept finite, since infinity times a product of 0 is NaN.
        factor = tl.minimum(tl.maximum(scale_log2 / softcap_log2, LOWEST), -LOWEST)
        return tanh(s * factor) * softcap_log2
    else:
        return s * scale_log2


@triton.jit
def scaled(s, args, F: tl.constexpr):
    """(scores, the factor that brings them to log2 units)."""
    if F.scale_first:
        return to_log2(s, args.scale_log2, args.softcap, F), 1.0
    else:
        return s, args.scale_log2


@triton.jit
def finite(v):
    """v with 0 for infinities and NaN."""
    return tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0).to(v.dtype)


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
def add_mask(s, scale, mask, EXACT: tl.constexpr):
    """Scores s [M, N], s * scale in log2 units, plus an additive mask tile: (scores in natural units, their scale).

    A finite mask stays finite: float32's lowest number means "far below everything", not "invisible"; -inf hides
    whatever s holds, with EXACT. Without, one fma adds it: a NaN in s shows in the row's l, a row that sees nothing but
    numbers whose log2 float32 can't hold in its m (`row_maximum`); all other rows are the same to the bit.
    """
    bias = mask.to(tl.float32)
    if EXACT or mask.dtype.is_fp64():
        given = mask if mask.dtype.is_fp64() else bias  # float64 has numbers that float32 takes for infinities
        finite = bias
        if not mask.dtype.is_fp16():  # whose numbers are all far from the edge
            finite = tl.clamp(bias, -HIGHEST_BIAS, HIGHEST_BIAS, propagate_nan=tl.PropagateNan.ALL)
        s = tl.where(tl.abs(given) == float("inf"), bias, tl.fma(s, scale * LN2, finite))
    else:
        s = tl.fma(s, scale * LN2, bias)
    return s, LOG2E


@triton.jit
def row_maximum(s, scale, F: tl.constexpr):
    """The highest s * scale of each row of s [M, N], for scale > 0. Below float32's range it is its lowest number."""
    highest = tl.max(s, 1)
    reference = highest * scale
    if F.mask == "float":
        reference = tl.where(highest == EMPTY_M, EMPTY_M, tl.maximum(reference, LOWEST))
    return reference
