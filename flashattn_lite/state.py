"""The softmax state in plain torch: empty, update, merge, finish. The twin of `kernels/device/state.py`.

The state of a row over a set of keys is `(m_i, l_i)`, and `(m_i, l_i, acc)` for attention:

    m_i = a reference in log2 units (here the running maximum),
    l_i = sum of 2^(s - m_i),        acc = sum of 2^(s - m_i) * v.

Any finite m_i describes the same softmax; the maximum keeps every power at most 1. A row that has seen
nothing is m_i = -inf, l_i = 0, acc = 0, and finishes as 0 with lse = -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2E = 1.4426950408889634  # 1 / ln 2: natural units to log2 units
LN2 = 0.6931471805599453  # ln 2: log2 units to natural units
EMPTY_M = -math.inf
EMPTY_L = 0.0
# Sums about reference 0 that lost nothing: far from float32's 2^128, and not so low that a share of 2^-126 of them, as
# small as any reference can keep, would be less than the last bit of the least subnormal, 2^-149.
SETTLED = (2.0**-24, 2.0**100)


def exp2(x: Tensor) -> Tensor:
    """2^x, with bits that do not depend on where in x an element lies.

    On the CPU torch computes the last few elements of each thread's share by other code: one in 16 is an ulp off.
    """
    extra = _missing(x)
    if extra == 0 and x.is_contiguous():
        return torch.exp2(x)
    return torch.exp2(torch.nn.functional.pad(x.reshape(x.numel()), (0, extra)))[: x.numel()].view(x.shape)


def exp2_(x: Tensor) -> Tensor:
    """`exp2` in place."""
    return x.exp2_() if _missing(x) == 0 and x.is_contiguous() else x.copy_(exp2(x))


def _missing(x: Tensor) -> int:
    """Elements that x lacks to fill equal shares of whole vectors, as torch splits work among threads."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return 0
    shares = max(1, min(torch.get_num_threads(), -(-x.numel() // 32768)))  # torch's grain size
    return -x.numel() % (64 * shares)  # 64: two vectors of 16, twice what AVX-512 takes at once


def reference(m_i: Tensor) -> Tensor:
    """m_i where it is a number to subtract, 0 for a row that has seen nothing (so that no -inf - -inf arises)."""
    return torch.where(m_i == EMPTY_M, 0.0, m_i)


def update(
    m_i: Tensor, l_i: Tensor, s: Tensor, scale: float, pinned: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes a tile of scores into the state.

    m_i, l_i: [M]; s: [M, N], `s * scale` in log2 units, masked as -inf; scale > 0. Rows that are `pinned` keep m_i.
    Returns (m_new [M], l_new [M], alpha [M], p [M, N]): the caller does acc = acc * alpha + p @ v.
    """
    m_new = torch.maximum(m_i, s.amax(-1) * scale)
    if pinned is not None:
        m_new = torch.where(pinned, m_i, m_new)
    m_ref = reference(m_new)
    alpha = exp2(m_i - m_ref)
    p = exp2(s * scale - m_ref.unsqueeze(-1))
    return m_new, l_i * alpha + p.sum(-1), alpha, p


def update_pinned_(l_i: Tensor, s: Tensor) -> Tensor:
    """`update` where every row is pinned at m_i = 0, in place: adds to l_i, turns s (log2 units) into p, returns it.

    The caller does acc += p @ v, and asks `settled` at the end. Saves the maximum, the subtraction and the rescale.
    """
    p = exp2_(s)
    l_i += p.sum(-1)
    return p


def settled(l_i: Tensor) -> Tensor:
    """Whether l_i about the reference 0 says what any reference would; False for NaN and for a row that saw nothing."""
    return (l_i >= SETTLED[0]) & (l_i <= SETTLED[1])


def single(s: Tensor) -> tuple[Tensor, Tensor]:
    """The state (m_i, l_i) of one logit a row, in log2 units: a sink."""
    return s, torch.where(s == EMPTY_M, EMPTY_L, 1.0).to(s.dtype)


def merge(m_a: Tensor, l_a: Tensor, m_b: Tensor, l_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The state over the union of two disjoint key sets.

    All of one shape. Returns (m, l, alpha_a, alpha_b): the caller does acc = acc_a * alpha_a + acc_b * alpha_b.
    """
    m_i = torch.maximum(m_a, m_b)
    m_ref = reference(m_i)
    alpha_a = exp2(m_a - m_ref)
    alpha_b = exp2(m_b - m_ref)
    return m_i, l_a * alpha_a + l_b * alpha_b, alpha_a, alpha_b


def finish(m_i: Tensor, l_i: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (inv_l, lse): the output is acc * inv_l (0 for a row that has seen nothing), lse is in natural log."""
    inv_l = torch.where(l_i == EMPTY_L, 0.0, 1.0 / l_i)
    return inv_l, (m_i + torch.log2(l_i)) * LN2
