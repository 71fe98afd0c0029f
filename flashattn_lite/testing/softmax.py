"""What softmax and its statistics are, in float64 on x as it is, and how far from it an honest kernel may land."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expect_stats(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(m, l), row by row in memory: there torch's sum is pairwise, which its softmax across rows is not."""
    x = x.double().movedim(dim, -1).contiguous()
    m = x.amax(-1)
    return m, torch.exp(x - m.where(m != -math.inf, 0.0).unsqueeze(-1)).sum(-1)


def expect_softmax(x: Tensor, dim: int) -> Tensor:
    """0 for rows of -inf only."""
    m, l_i = (part.unsqueeze(dim) for part in expect_stats(x, dim))
    return torch.where(l_i == 0, 0.0, torch.exp(x.double() - m) / l_i)


def assert_softmax(y: Tensor, x: Tensor, dim: int) -> None:
    """y is softmax(x, dim) within twice the error of eager torch in a row, and what base 2 costs, rounded once.

    All that in float32 at least. An exponent |ln p| comes as a rounded product, off by as many eps; the row's sum, by
    their mean, the entropy; the rest is 4 eps of p. What lies below the smallest normal number a GPU's exp2 makes 0.
    """
    want, inside = expect_softmax(x, dim), torch.promote_types(x.dtype, torch.float32)
    error = (torch.softmax(x, dim, inside).double() - want).abs().nan_to_num(0.0)
    entropies = torch.special.entr(want)
    base_2 = 4 * want + entropies + want * entropies.sum(dim, keepdim=True)
    bound = 2 * error.amax(dim, keepdim=True) + torch.finfo(inside).eps * base_2 + torch.finfo(inside).tiny
    if inside != x.dtype:
        kind = torch.finfo(x.dtype)
        bound = bound + (want + bound).clamp(min=kind.tiny) * kind.eps / 2  # half a last place
    wrong = ~(((y.double() - want).abs() <= bound) | (y.isnan() & want.isnan()))
    assert not bool(wrong.any()), f"softmax: {int(wrong.sum())} of {wrong.numel()} elements are wrong"


def assert_stats(m: Tensor, l_i: Tensor, x: Tensor, dim: int) -> None:
    """m exact; l to 8 float32 eps, relative: exp2 and its argument are each off by about one, sums by trees add few."""
    m_want, l_want = expect_stats(x, dim)
    torch.testing.assert_close(m, m_want.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(l_i.double(), l_want, rtol=8 * torch.finfo(torch.float32).eps, atol=0, equal_nan=True)
