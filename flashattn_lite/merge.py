"""Attention over disjoint sets of keys, put together: the softmax state's merge, of finished parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_lite import arguments, state
from flashattn_lite.errors import type_error, value_error


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    r"""Attention over the union of disjoint key sets, from `(out, lse)` over each.

        lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) out_i

    Args:
        parts: one or more pairs as `attention(..., return_lse=True)` or `attention_varlen` return them, all of the
            same shapes: out `(B, Hq, L, Dv)` with lse `(B, Hq, L)`, or packed `(total, Hq, Dv)` with `(Hq, total)`.
            A sink must enter one part only.

    Returns:
        (out, lse) in the shapes and out-dtype of the parts; lse float32 (float64 if the parts' are).
        A part whose row saw nothing (lse -inf) is the identity, whatever its out holds.

    Numerics: associative and commutative up to rounding; computed in float32, in float64 where the parts are. With an
        lse of float32, which `attention` returns for float64 too, the weights are as good as that. Differentiable.

    Raises:
        ValueError, TypeError, NotImplementedError: naming the part.

    Source: the softmax state's merge, docs/theory.md.

    Example:
        >>> q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 10, 8)
        >>> parts = [attention(q, x, x, return_lse=True) for x in k.split(6, dim=2)]
        >>> torch.allclose(merge_attention(parts)[0], attention(q, k, k), atol=1e-6)
        True
    """
    if not isinstance(parts, Sequence):
        raise type_error("parts", "must be a sequence of (out, lse) pairs", parts, "Pass a list of them.")
    if not parts:
        raise value_error("parts", "must hold at least one (out, lse) pair", parts, "Pass a list of them.")
    for i, part in enumerate(parts):
        _check_part(i, part, parts[0])
    dtype = parts[0][0].dtype
    wide = functools.reduce(torch.promote_types, (lse.dtype for _, lse in parts), torch.float32)
    lses = [lse.to(wide) for _, lse in parts]
    # A finished part is the state with m = lse, l = 1. All are brought to one reference, the highest: pair by pair a
    # sum would be lost in the last bits of a large lse, and in log2 units one may be too large.
    origin = state.reference(functools.reduce(torch.maximum, lses).detach())
    weights = [state.exp2((lse - origin) * state.LOG2E) for lse in lses]
    l_i = functools.reduce(torch.add, weights)
    empty = l_i == state.EMPTY_L
    inv_l, log_l = state.finish(torch.zeros_like(l_i), torch.where(empty, 1.0, l_i))  # gradients stay finite
    acc = functools.reduce(torch.add, map(_weighed, parts, (weight * inv_l for weight in weights)))
    return acc.to(dtype), torch.where(empty, -torch.inf, origin + log_l)


def _weighed(part: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    """out * weight in float32 at least; 0 of a part whose rows saw nothing.

    An infinity stays one where its weight is too small for a float, as in attention over all.
    """
    out, lse = part
    if out.dim() == 3:  # packed: lse is (H, total) where out is (total, H, Dv)
        lse, weight = lse.transpose(0, 1), weight.transpose(0, 1)
    acc = out.to(torch.promote_types(out.dtype, torch.float32)).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    return torch.where(acc.abs() < torch.inf, acc * weight.unsqueeze(-1), acc)


def _check_part(i: int, part: Any, first: Any) -> None:
    name = f"parts[{i}]"
    if not isinstance(part, (tuple, list)) or len(part) != 2 or not all(isinstance(x, Tensor) for x in part):
        raise type_error(name, "must be a pair of tensors (out, lse)", part, "Call attention with return_lse=True.")
    out, lse = part
    for what, x in (("out", out), ("lse", lse)):
        arguments.check_float_tensor(f"{name} {what}", x)
    if out.dim() not in (3, 4):
        relation = "out must be (batch, heads, length, head_dim_v), or packed (total, heads, head_dim_v)"
        raise value_error(name, relation, out, "Pass what attention or attention_varlen returned.")
    rows = out.shape[1::-1] if out.dim() == 3 else out.shape[:-1]
    if lse.shape != rows:
        relation = f"lse must have one value per row of out {tuple(out.shape)}"
        raise value_error(name, relation, lse, "Pass the lse that came with this out.")
    if lse.device != out.device:
        raise value_error(name, f"lse must be on out's device ({out.device})", lse, "Move it with .to(device).")
    if out.shape != first[0].shape:
        remedy = "Compute every part for the same queries."
        raise value_error(name, f"out must have the shape of parts[0]'s {tuple(first[0].shape)}", out, remedy)
    if out.dtype != first[0].dtype or out.device != first[0].device:
        raise type_error(name, "out must have the dtype and device of parts[0]'s", out, "Cast or move it.")
