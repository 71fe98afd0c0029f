"""The softmax state on the device: update, merge, finish. The twin of `flashattn_lite/state.py`, layout-free.

(m_i, l_i) of a row: m_i a reference in log2 units, l_i = sum of 2^(s - m_i). Empty is m_i = EMPTY_M, l_i = EMPTY_L;
the caller makes those tensors, because only the caller knows their layout.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # 1 / ln 2: natural units to log2 units
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)  # ln 2: log2 units to natural units
EMPTY_M: tl.constexpr = tl.constexpr(float("-inf"))
EMPTY_L: tl.constexpr = tl.constexpr(0.0)
# Up to here a float32 reference is within 1 of any real number, so that p of the largest score is in [1/2, 2] although
# its fma is rounded once and the reference twice. Beyond, it drifts by ulp(m_i) / 2 and would overflow or vanish.
EXACT_M: tl.constexpr = tl.constexpr(2.0**24)


@triton.jit
def reference(m_i):
    """m_i where it is a number to subtract, 0 for a row that has seen nothing (so that no -inf - -inf arises)."""
    return tl.where(m_i == EMPTY_M, 0.0, m_i)


@triton.jit
def shift(m_i, m_new):
    """From reference m_i to m_new: (m_new as a number to subtract, alpha that brings an old l and acc to it)."""
    m_ref = reference(m_new)
    return m_ref, tl.exp2(m_i - m_ref)


@triton.jit
def weights(s, scale, m_ref):
    """p [M, N] = 2^(s * scale - m_ref), one fma and one exponential an element."""
    return tl.exp2(tl.fma(s, scale, -m_ref[:, None]))


@triton.jit
def update(m_i, l_i, s, scale):
    """Takes a tile of scores s [M, N] into the state [M]; s * scale in log2 units, masked as -inf, scale > 0.

    Returns (m_new, l_new, alpha, p [M, N]): the caller does acc = acc * alpha + p @ v.
    Scale and subtraction are one fma: p is exact for the rounded reference m_new, but its largest element can
    be 2^(ulp(m_new) / 2) for 1: 2 at EXACT_M, more beyond. A caller that must be right there multiplies first and
    passes scale = 1.
    """
    return update_to(m_i, l_i, tl.maximum(m_i, tl.max(s, 1) * scale), s, scale)


@triton.jit
def update_to(m_i, l_i, m_new, s, scale):
    """`update` to a reference that the caller chose, any that keeps 2^(s * scale - m_new) finite."""
    m_ref, alpha = shift(m_i, m_new)
    p = weights(s, scale, m_ref)  # [M, N]
    return m_new, tl.fma(l_i, alpha, tl.sum(p, 1)), alpha, p


@triton.jit
def update_fixed(m_i, l_i, s, scale):
    """`update_to` the reference that the row already has, to the bit, but with no rescale; m_i must be finite.

    Returns (l_new, p [M, N]): the caller does acc = acc + p @ v, and checks at its end that l and acc are finite,
    because a score that passes m_i by more than p's format holds makes them infinite.
    """
    p = weights(s, scale, m_i)  # [M, N]
    return l_i + tl.sum(p, 1), p


@triton.jit
def single(s):
    """The state (m_i, l_i) of one logit a row, in log2 units: a sink."""
    return s, tl.where(s == EMPTY_M, EMPTY_L, 1.0)


@triton.jit
def merge(m_a, l_a, m_b, l_b):
    """The state over the union of two disjoint key sets, elementwise.

    Returns (m, l, alpha_a, alpha_b): the caller does acc = acc_a * alpha_a + acc_b * alpha_b.
    """
    m_i = tl.maximum(m_a, m_b)
    m_ref = reference(m_i)
    alpha_a = tl.exp2(m_a - m_ref)
    alpha_b = tl.exp2(m_b - m_ref)
    return m_i, l_a * alpha_a + l_b * alpha_b, alpha_a, alpha_b


@triton.jit
def finish(m_i, l_i):
    """Returns (inv_l, lse): the output is acc * inv_l (0 for a row that has seen nothing), lse is in natural log."""
    inv_l = tl.where(l_i == EMPTY_L, 0.0, 1.0 / l_i)
    return inv_l, (m_i + tl.log2(l_i)) * LN2


@triton.jit
def rounded(out, DTYPE: tl.constexpr):
    """A finished output in its dtype. The mean of finite V is finite: rounded weights must not take it past float16."""
    if DTYPE.is_fp16():
        out = tl.clamp(out, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return out.to(DTYPE)
