"""The door of attention_varlen: packed sequences and the tables of where each begins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from flashattn_lite.arguments import QKV, check_int32, check_qkv, readable
from flashattn_lite.errors import type_error, value_error
from flashattn_lite.scalars import is_int, negative, unless_known


def check_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: object, max_seqlen_k: object
) -> None:
    """Packed sequences: q [total_q, Hq, D], k, v [total_k, Hkv, D]; values of cu_seqlens where they can be read."""
    check_qkv(q, k, v, QKV, "(total, heads, head_dim)")
    if v.shape[0] != k.shape[0]:
        raise value_error("v", f"length must equal k's ({k.shape[0]})", v, "Pass one value for each key.")
    sides = (("q", q, cu_seqlens_q, max_seqlen_q), ("k", k, cu_seqlens_k, max_seqlen_k))
    for side, x, cu, longest in sides:
        check_int32(f"cu_seqlens_{side}", cu, x)
        if cu.dim() != 1 or not unless_known(cu.shape[0] >= 1):
            raise value_error(
                f"cu_seqlens_{side}", "must have shape (batch + 1,)", cu, "Pass 0, then where each sequence ends."
            )
        if longest is not None and not is_int(longest):
            raise type_error(
                f"max_seqlen_{side}", "must be an int or None", longest, "Pass an int; of a tensor .item()."
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise value_error(
            "cu_seqlens_k", f"must have as many entries as cu_seqlens_q ({cu_seqlens_q.shape[0]})", cu_seqlens_k,
            "Pass both of one batch."
        )  # fmt: skip
    check_varlen_values(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def check_varlen_values(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: object, max_seqlen_k: object
) -> None:
    """What only the CPU reads, and no compiler or transform while it stands for a tensor: the op asks again inside."""
    for side, x, cu, longest in (("q", q, cu_seqlens_q, max_seqlen_q), ("k", k, cu_seqlens_k, max_seqlen_k)):
        if longest is not None and negative(longest):
            remedy = "Pass an upper bound on the lengths, or None."
            raise value_error(f"max_seqlen_{side}", "must be at least 0", longest, remedy)
        if readable(cu):
            _check_cu_values(side, x, cu, longest)


def _check_cu_values(side: str, x: Tensor, cu: Tensor, longest: object) -> None:
    name, total = f"cu_seqlens_{side}", x.shape[0]
    values: list[int] = cu.tolist()
    shown = values if len(values) <= 8 else [*values[:4], "...", *values[-3:]]
    if values[0] != 0:
        raise value_error(name, "must start with 0", shown, "Pass 0, then where each sequence ends.")
    if any(b < a for a, b in pairwise(values)):
        raise value_error(name, "must not decrease", shown, "Pass where each sequence ends, not its length.")
    if values[-1] != total:
        remedy = (
            "Slice off any padding." if values[-1] < total else f"Pass all of {side}'s rows, or correct the lengths."
        )
        raise value_error(name, f"must end with {side}'s total length ({total})", shown, remedy)
    if longest is not None:
        actual = max((b - a for a, b in pairwise(values)), default=0)
        if longest < actual:  # type: ignore[operator]
            raise value_error(f"max_seqlen_{side}", f"must be at least the longest sequence ({actual})", longest,
                              "Pass None to have it read.")  # fmt: skip
