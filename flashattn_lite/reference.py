"""The definition: naive attention with every option, and the four textbook softmaxes side by side, in plain torch.

Nothing here is fast or frugal. It is what the kernels are held against, and what to read first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.arguments import FLOAT_DTYPES, check_dense, check_flag, check_kv_lens, check_options, check_sinks
from flashattn_lite.arguments_mask import check_mask
from flashattn_lite.arguments_varlen import check_varlen
from flashattn_lite.autocast import as_written
from flashattn_lite.errors import type_error
from flashattn_lite.scalars import diagonals_as_int64
from flashattn_lite.watchers import mapped

# ---- softmax of one row, four times -------------------------------------------------------------------------------

State = tuple[Tensor, Tensor]  # (m, d): a reference, here the maximum so far, and the sum of exp(x - m) so far


def softmax_naive(x: Tensor) -> Tensor:
    """p_i = exp(x_i) / sum_j exp(x_j), as it is written in books. x: [n].

    Two passes. exp overflows from 88.8 in float32, from 11.1 in float16; then inf / inf is NaN.
    """
    e = torch.exp(x)
    return e / e.sum()


def softmax_safe(x: Tensor) -> tuple[Tensor, State]:
    """p_i = exp(x_i - m) / d. Three passes over x [n]: the maximum m, the sum d, the quotient. Returns (p, (m, d)).

    The factor exp(-m) cancels, so any m gives the same p; the maximum keeps every power at most 1.
    """
    m = x.max()
    d = torch.exp(x - m).sum()
    return torch.exp(x - m) / d, (m, d)


def softmax_online(x: Tensor) -> tuple[Tensor, State]:
    """Maximum and sum in one pass: when the maximum grows, the old sum is rescaled. Returns (p, (m, d)).

    x: [n]. The m and d that come back are [n]: the state after each element, so that the steps can be read.

        m_i = max(m_{i-1}, x_i),    d_i = d_{i-1} exp(m_{i-1} - m_i) + exp(x_i - m_i)
    """
    m, d = empty_state(x)
    steps = []
    for x_i in x:
        m_new = torch.maximum(m, x_i)
        d = d * torch.exp(m - m_new) + torch.exp(x_i - m_new)
        m = m_new
        steps.append((m, d))
    p = torch.exp(x - m) / d
    return p, (torch.stack([m for m, _ in steps]), torch.stack([d for _, d in steps]))


def softmax_blocked(x: Tensor, block: int) -> tuple[Tensor, State]:
    """Each block of x [n] makes its own (m, d); merged in pairs, in pairs of pairs, ... they give the row's.

    Merging is associative and commutative, so the blocks may be anywhere and come in any order. A tree also keeps
    rounding small: each element passes through log2(n / block) sums, not through n / block.
    """
    states = [softmax_safe(part)[1] for part in x.split(block)]
    while len(states) > 1:
        paired = [merge_states(a, b) for a, b in zip(states[::2], states[1::2], strict=False)]
        states = paired + states[2 * len(paired) :]
    m, d = states[0]
    return torch.exp(x - m) / d, (m, d)


def empty_state(x: Tensor) -> State:
    """The state of no elements: the identity of `merge_states`."""
    return x.new_tensor(-math.inf), x.new_tensor(0.0)


def merge_states(a: State, b: State) -> State:
    """The state of the union of two disjoint sets, of which at least one is not empty."""
    (m_a, d_a), (m_b, d_b) = a, b
    m = torch.maximum(m_a, m_b)
    return m, d_a * torch.exp(m_a - m) + d_b * torch.exp(m_b - m)


# ---- attention ----------------------------------------------------------------------------------------------------


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    q_start: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by its definition, with the whole score matrix in memory; differentiable by plain autograd.

        s_ij = cap(scale q_i . k_j) + mask_ij over the keys j that row i sees,      cap(s) = softcap tanh(s / softcap)
        lse_i = ln(sum_j exp(s_ij) + exp(sink)),       out_i = sum_j exp(s_ij - lse_i) v_j

    Args:
        q, k, v: (B, Hq, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv), one floating dtype, any strides.
        causal, q_start, window, mask, kv_lens: who sees whom, see `visibility`. Default: everyone.
        scale: factor of q . k. Default 1 / sqrt(D).
        softcap: bound of the scaled scores. Default none.
        mask: bool (True = visible) or float (added), broadcastable to (B, Hq, L, S).
        sinks: (Hq,), one more logit per head, in natural units; it enters the denominator only.
        return_lse: return (out, lse) instead of out.
        dtype: the dtype of the arithmetic. Default: q's, but float32 for float16 and bfloat16.

    Returns:
        out (B, Hq, L, Dv) in q's dtype; lse (B, Hq, L) in the arithmetic's dtype, at least float32.
        A row that sees no key has out 0 and lse -inf (the sink, if there is one).
        A key that a row does not see contributes nothing, even if it holds NaN. Seen keys follow IEEE rules,
        and a score of -inf weighs nothing. Where keys that are seen hold NaN, memory grows by a factor of D,
        and under torch.vmap, where nobody can ask whether they do.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flashattn_lite.attention`.

    Source: Vaswani et al., Attention Is All You Need, 2017, equation 1.

    >>> q = k = v = torch.eye(2).view(1, 1, 2, 2)
    >>> attention_reference(q, k, v, causal=True)[0, 0, 0]
    tensor([1., 0.])
    """
    check_dense(q, k, v)
    check_options(causal=causal, q_start=q_start, window=window, scale=scale, softcap=softcap)
    check_mask(mask, q, k.shape[2])
    check_sinks(sinks, q)
    check_kv_lens(kv_lens, q, q.shape[0])
    check_flag("return_lse", return_lse)
    if dtype is None:
        dtype = torch.promote_types(q.dtype, torch.float32)
    elif dtype not in FLOAT_DTYPES:
        raise type_error("dtype", "must be float16, bfloat16, float32 or float64", dtype, "Pass one of them, or none.")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)

    seen = visibility(q, k, causal=causal, q_start=q_start, window=window, mask=mask, kv_lens=kv_lens)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    with as_written(q.device):
        s = dot(q.to(dtype), k.to(dtype), seen) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None and mask.dtype != torch.bool:
        cast, largest = mask.to(dtype), torch.finfo(dtype).max  # what is finite stays finite
        s = s + torch.where(mask.abs() == math.inf, cast, cast.clamp(-largest, largest))
    s = s.masked_fill(~seen, -math.inf)

    sink = s.new_full(s.shape[1:2], -math.inf) if sinks is None else sinks.to(dtype)  # a sink of -inf is no sink
    logits = torch.cat([s, sink.view(1, sink.shape[0], 1, 1).expand(*s.shape[:3], 1)], dim=-1)
    m = logits.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -math.inf, 0.0)
    p = torch.exp(logits - m)
    d = p.sum(-1, keepdim=True)
    nothing = d == 0
    d = d.masked_fill(nothing, 1.0)
    with as_written(q.device):
        out = weigh(p[..., :-1] / d, v.to(dtype), seen).to(q.dtype)
    if not return_lse:
        return out
    lse = (m + torch.log(d)).masked_fill(nothing, -math.inf).squeeze(-1)
    return out, lse.to(torch.promote_types(dtype, torch.float32))


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_reference` over packed sequences, one after the other.

    q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv); cu_seqlens (batch + 1,) int32, from 0 to the total.
    Options as `attention_reference`, without mask; kv_lens (batch,) int32 hides the keys of sequence b from
    kv_lens[b] on. Returns out (total_q, Hq, Dv), and lse (Hq, total_q).

    >>> q = torch.randn(5, 2, 8)
    >>> cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> attention_varlen_reference(q, q, q, cu, cu, causal=True).shape
    torch.Size([5, 2, 8])
    """
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_kv_lens(kv_lens, q, cu_seqlens_q.shape[0] - 1)
    check_flag("return_lse", return_lse)
    none = [x[:0].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    attention_reference(*none, **options)  # of no rows: whoever packs no sequence is told of wrong options, too
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], []
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(bounds_q) - 1):
        rows, keys = slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_k[b], bounds_k[b + 1])
        one = [x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys])]  # (1, H, rows, D)
        lens = None if kv_lens is None else kv_lens[b : b + 1]
        out, lse = attention_reference(*one, kv_lens=lens, return_lse=True, **options)
        outs.append(out.squeeze(0).transpose(0, 1))
        lses.append(lse.squeeze(0))
    out = torch.cat(outs)
    if not return_lse:
        return out
    return out, torch.cat(lses, dim=-1) if lses else q.new_zeros(q.shape[1], 0, dtype=torch.float32)


# ---- its parts ----------------------------------------------------------------------------------------------------


def visibility(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    q_start: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
) -> Tensor:
    """(B, Hq, L, S) bool: which query sees which key.

    Query i stands at position i + q_start, by default such that the last query stands at the last key
    (q_start = kv_lens[b] - L, or S - L). It sees key j iff j exists (j < kv_lens[b]), j is not after it (causal),
    j is at most left before and right after it (window), and the mask is neither False nor -inf there.
    """
    batch, heads, len_q, len_k = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    j = torch.arange(len_k, device=q.device)
    lens = torch.full((batch,), len_k, device=q.device) if kv_lens is None else kv_lens
    lens = lens.long().clamp(0, len_k).view(batch, 1, 1, 1)
    q_start, left, right = diagonals_as_int64(q_start, *(window or (None, None)))
    start = lens - len_q if q_start is None else q_start
    position = torch.arange(len_q, device=q.device).view(1, 1, len_q, 1) + start
    seen = (j < lens).expand(batch, heads, len_q, len_k)
    if causal:
        seen = seen & (j <= position)
    if left is not None:
        seen = seen & (j >= position - left)
    if right is not None:
        seen = seen & (j <= position + right)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return seen


def repeat_heads(x: Tensor, heads_q: int) -> Tensor:
    """(B, Hkv, S, D) to (B, Hq, S, D): query heads h G ... h G + G - 1 share key/value head h."""
    return x.repeat_interleave(heads_q // max(x.shape[1], 1), dim=1)


def dot(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """q_i . k_j (..., L, S), for the caller to mask. Through a pair that is not seen no gradient flows, NaN or not."""
    k = torch.where(seen.any(-2).unsqueeze(-1), k, 0.0)
    if not (q.requires_grad or k.requires_grad) or _finite(q, k):
        return q @ k.mT
    pair = seen.unsqueeze(-1)
    return (torch.where(pair, q.unsqueeze(-2), 0.0) * torch.where(pair, k.unsqueeze(-3), 0.0)).sum(-1)


def weigh(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """sum_j p_ij v_j (..., L, Dv) over the seen keys: 0 times an unseen NaN does not arise."""
    p = torch.where(seen, p, 0.0)
    v = torch.where(seen.any(-2).unsqueeze(-1), v, 0.0)
    finite = torch.isfinite(v)
    out = p @ torch.where(finite, v, 0.0)
    if _finite(v):
        return out
    spoiled = torch.where(finite, 0.0, v).unsqueeze(-3)  # NaN and inf, for the rows that see them alone
    return out + (p.unsqueeze(-1) * torch.where(seen.unsqueeze(-1), spoiled, 0.0)).sum(-2)


def _finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite; not those that torch.vmap maps over, nor those of meta tensors."""
    return all(not (x.is_meta or mapped(x)) and bool(torch.isfinite(x).all()) for x in tensors)
