"""From q.k to masked scores in plain torch: scale, softcap, visibility. The twin of `kernels/device/scores.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_lite.state import LOG2E

LOWEST, HIGHEST = -3.4028234663852886e38, 3.4028234663852886e38  # finite float32


def to_log2_(s: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scaled and soft-capped scores in log2 units, from raw dot products s [..., M, N], which it may write over."""
    return s.mul_(scale * LOG2E) if softcap is None else cap(s, scale, softcap)


def cap(s: Tensor, scale: float, softcap: float) -> Tensor:
    """Soft-capped scores in log2 units from raw dot products s [..., M, N].

    The factor is kept finite, and is not a query's: times infinity a product of 0 would be NaN.
    """
    most = torch.finfo(s.dtype).max
    factor = max(-most, min(most, scale / softcap))
    return torch.tanh(s * factor) * (softcap * LOG2E)


def visible(offs_m: Tensor, offs_n: Tensor, diag_lo: Tensor | int | None, diag_hi: Tensor | int | None) -> Tensor:
    """[..., M, N] bool: key offs_n [N] lies between the diagonals of row offs_m [M] (None = no bound)."""
    diagonal = offs_n - offs_m.unsqueeze(-1)  # [M, N]
    seen = torch.ones_like(diagonal, dtype=torch.bool)
    if diag_lo is not None:
        seen = seen & (diagonal >= diag_lo)
    if diag_hi is not None:
        seen = seen & (diagonal <= diag_hi)
    return seen


def add_mask(s: Tensor, mask: Tensor) -> Tensor:
    """Scores s [..., M, N] in log2 units plus an additive mask in natural units; -inf hides whatever s holds.

    A finite mask stays finite: float32's lowest number means "far below everything", not "invisible".
    """
    bias = (mask.to(s.dtype) * LOG2E).clamp(LOWEST, HIGHEST)  # clamp keeps NaN
    bias = torch.where(mask == torch.inf, torch.inf, bias)
    return torch.where(mask == -torch.inf, -torch.inf, s + bias)
