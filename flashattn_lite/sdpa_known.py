"""Calls by torch's signature that were there before: found again by their metadata, with nothing checked."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from flashattn_lite import batch_dims, calls, operators, ops, watchers
from flashattn_lite.autocast import autocasts
from flashattn_lite.problem import Inputs

Diagonal = tuple[bool, int | None]  # attention's causal and q_start


def arguments_of(inputs: Inputs, diagonal: Diagonal, scale: float | None) -> calls.Arguments:
    return (*inputs, *diagonal, None, None, scale, None, None, None, "auto")


def known(*args: Any, **options: Any) -> tuple[Tensor, Hashable] | None:
    """As `recalled`, for whatever the function may be called with."""
    try:
        return recalled(*args, **options)
    except TypeError:  # of arguments that the function itself refuses by its name
        return None


def recalled(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    scale: Any = None, enable_gqa: Any = False,
) -> tuple[Tensor, Hashable] | None:  # fmt: skip
    """The result, if the door knows such a call (3 or 4 dims, nothing to broadcast); nothing is checked yet.

    And what is the same for all calls of these shapes, dtypes and options.
    """
    if torch.compiler.is_compiling() or type(query) not in watchers.ORDINARY:
        return None
    if type(dropout_p) not in (float, int) or dropout_p != 0 or type(is_causal) is not bool:
        return None
    if type(scale) is int and abs(scale) < 2**53:
        scale = float(scale)
    if type(scale) not in (type(None), float) or type(enable_gqa) is not bool:
        return None
    if autocasts(query.device):
        return None
    given, dims = Inputs(query, key, value, attn_mask), query.dim()
    inputs = given if dims == 4 and attn_mask is None else _viewed(given, is_causal)
    if inputs is None:
        return None
    args = arguments_of(inputs, (is_causal, 0 if is_causal else None), scale)
    ready = calls.known(args)
    if ready is None or (ready.problem.heads_q != ready.problem.heads_kv and not enable_gqa):
        return None
    out, _ = ops.direct(ready, args)
    alike = ready, dims, None if attn_mask is None else attn_mask.dim()
    return (out if dims == 4 else operators.reshaped(out, out.shape[1:])), alike


def _viewed(inputs: Inputs, is_causal: bool) -> Inputs | None:
    """With 4 dims, where there are 3, or a mask of up to as many; None: other dims, a mask to be refused or cast."""
    q, k, v, mask = inputs[:4]
    if k is None or v is None or not watchers.plain((q, k, v, mask)):
        return None
    dims = q.dim()
    if dims not in (3, 4) or not dims == k.dim() == v.dim():
        return None
    if mask is not None:
        if is_causal or mask.dim() > dims or mask.dtype not in (torch.bool, torch.float32, q.dtype):
            return None
        mask = batch_dims.with_dims(mask, 4)
    return Inputs(q, k, v, mask) if dims == 4 else Inputs(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask)
