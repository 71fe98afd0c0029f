"""Any number of batch dims as the one that attention has: views, never a copy."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from flashattn_lite.problem import Inputs
from flashattn_lite.scalars import unless_known


def viewed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Inputs | None:
    """These as views with one batch dim; None where they have broadcast batch dims that no stride can express."""
    lead = q.shape[:-3]
    flat = [_flatten(x, lead) for x in (q, k, v)]
    flat_mask = mask if mask is None else _flatten_mask(mask, lead)
    if any(x is None for x in flat) or (mask is not None and flat_mask is None):
        return None
    return Inputs(flat[0], flat[1], flat[2], flat_mask)  # type: ignore[arg-type]


def entry(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The i-th entry of the first batch dim."""
    return q[i], k[i], v[i], None if mask is None else mask[i if mask.shape[0] > 1 else 0]


def with_dims(x: Tensor, dims: int) -> Tensor:
    """x, with dims of one entry in front, if it has fewer."""
    return x if x.dim() >= dims else x.reshape((1,) * (dims - x.dim()) + x.shape)


def expanded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x in that shape; itself if it has it, since expand makes up strides of dims of one entry.

    A known call is found by strides as its tensors come.
    """
    return x if x.shape == shape else x.expand(shape)


def _flatten(x: Tensor, lead: torch.Size) -> Tensor | None:
    """[*lead, H, length, dim] as a view [B, H, length, dim], or None where strides do not allow it."""
    if len(lead) == 1:
        return x
    if len(lead) == 0:
        return x.unsqueeze(0)
    # Asked of the strides: a view that fails raises one thing here, another for fake tensors, and ends a compiler.
    # What a compiler does not know yet (`x[keep]`) is taken for a size above 1, and for strides that allow it.
    outer = [(size, step) for size, step in zip(lead, x.stride(), strict=False) if unless_known(size != 1)]
    gaps = (not unless_known(step == size * inner) for (_, step), (size, inner) in pairwise(outer))
    if unless_known(x.numel() != 0) and any(gaps):
        return None
    return x.view(math.prod(lead), *x.shape[-3:])


def _flatten_mask(mask: Tensor, lead: torch.Size) -> Tensor | None:
    """A mask [*lead or 1s, H or 1, L or 1, S or 1] as [B or 1, ...]; None where it broadcasts over a part of lead."""
    if all(size == 1 for size in mask.shape[: len(lead)]):
        return mask if mask.dim() == 4 else mask.reshape(1, *mask.shape[-3:])
    return _flatten(expanded(mask, (*lead, *mask.shape[-3:])), lead)
