"""What is asked of attention: the frozen AttentionProblem and its Features, as kernels and dispatch see them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Window = tuple[int | None, int | None]  # (left, right); None: unbounded on that side
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # of q, k, v, mask and sinks
SMALL = 2.0**-120  # a scale of less may be 0 in float32, or in units of log2
UNPROMISED = 97  # rows that packed sequences have where nobody promises fewer: more than are few to any tile
FAR = 2**30  # diagonals are clamped there, so that row + diagonal fits in int32; nor may a sequence be as long


class Inputs(NamedTuple):
    """The tensors of one call. Dense: q, k, v are [B, H, rows, D]. Packed (cu_seqlens given): [total, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None  # broadcastable to [B, Hq, L, S]; bool (True = visible) or additive float
    sinks: Tensor | None = None  # [Hq], natural units
    kv_lens: Tensor | None = None  # [B] int32
    cu_seqlens_q: Tensor | None = None  # [B + 1] int32
    cu_seqlens_k: Tensor | None = None  # [B + 1] int32


NUM_TENSORS = len(Inputs._fields)  # they come first in a call's arguments

# Of (inputs, out, lse, d_out, d_lse); None stands for a d_lse of zeros.
Gradients = Callable[[Inputs, Tensor, Tensor, Tensor, Tensor | None], Grads]


@dataclass(frozen=True)
class Features:
    """What the inner loop must do: the one compile-time record that travels into every kernel.

    Hashable, and its repr is part of Triton's cache key. What changes from call to call is not in here.
    """

    left: bool = False  # a lowest visible diagonal exists (window)
    right: bool = False  # a highest visible diagonal exists (causal, window)
    end_aligned: bool = False  # diagonals count from each sequence's len_k - len_q instead of 0
    positive_scale: bool = True  # in float32 too: then the row maximum can be taken before the scale
    softcap: bool = False
    mask: str = ""  # "", "bool" or "float"
    sinks: bool = False
    kv_lens: bool = False
    varlen: bool = False

    @property
    def scale_first(self) -> bool:
        """Scores must be in log2 units before the softmax sees them (else the scale rides in its fma)."""
        return self.softcap or not self.positive_scale


@dataclass(frozen=True)
class AttentionProblem:
    """One checked call. Key j is visible to query i iff `diag_lo <= j - i - end <= diag_hi` (where those bounds exist),

    with end = len_k - len_q of the sequence if `features.end_aligned`, else 0.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int  # packed: the longest sequence
    len_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    features: Features
    scale: float
    softcap: float | None
    diag_lo: int
    diag_hi: int
    promised_q: int | None = None  # packed: max_seqlen_q
    cache: bool = False  # keys are in a cache: neither the room for them, len_k, nor pages may show in a row's bits

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def rows(self) -> int:
        """Query rows of a sequence; of packed ones those promised: no neighbour's decide about a row's bits."""
        if not self.features.varlen:
            return self.len_q
        return UNPROMISED if self.promised_q is None else self.promised_q

    @property
    def keys_seen(self) -> int:
        """Keys that the queries of a sequence of full length see between them; of a shorter one not more."""
        end = self.len_k - self.len_q if self.features.end_aligned else 0
        first = max(0, self.diag_lo + end) if self.features.left else 0
        last = min(self.len_k, self.len_q + self.diag_hi + end) if self.features.right else self.len_k
        return max(last - first, 0)


def too_long(problem: AttentionProblem) -> list[str]:
    """Why int32 does not hold a row plus a diagonal; empty if it does."""
    if max(problem.len_q, problem.len_k) < FAR:
        return []
    lengths = f"these are {problem.len_q} and {problem.len_k}"
    return [f"it counts fewer than {FAR} queries and keys of a sequence; {lengths}"]


def clamp_diagonal(diagonal: int) -> int:
    if isinstance(diagonal, torch.SymInt):  # which a compiler may not know yet
        return torch.sym_max(-FAR, torch.sym_min(FAR, diagonal))
    return max(-FAR, min(FAR, diagonal))


def at_most(promised: int | None, total: int) -> int:
    """The longest sequence that there can be of `total` rows; a promise far above it would launch blocks in vain."""
    if promised is None:
        return total
    # A compiler's symbols are left as they are: to compare them would tie what it compiled to one side.
    return min(promised, total) if type(promised) is type(total) is int else promised


def unpromised(side: str, longest: int) -> int:
    """max_seqlen of `side`, "q" or "k", where the longest sequence was measured.

    Of queries no promise that they are few: else neighbours would choose a sequence's kernel, and so its bits.
    """
    return max(longest, UNPROMISED) if side == "q" else longest


def describe(
    inputs: Inputs,
    *,
    causal: bool,
    q_start: int | None,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    softcap: float | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> AttentionProblem:
    """The problem that checked arguments pose. Trusts them; `arguments.py` is the door."""
    q, k, v = inputs.q, inputs.k, inputs.v
    varlen = inputs.cu_seqlens_q is not None
    if causal:
        window_right = 0
    left, right = window_left is not None, window_right is not None
    start, head_dim = 0 if q_start is None else q_start, q.shape[-1]
    if scale is None:  # no number is made of a compiler's symbol, which would tie what it compiled to one head dim
        scale = 1 / math.sqrt(max(head_dim, 1)) if type(head_dim) is int else 1.0
    # scale / softcap of less may be 0; the cap leaves float32's products below 2^115 as they are there.
    if softcap is not None and abs(scale) < torch.finfo(torch.promote_types(q.dtype, torch.float32)).tiny * softcap:
        softcap = None
    mask_kind = "" if inputs.mask is None else ("bool" if inputs.mask.dtype == torch.bool else "float")
    features = Features(
        left=left,
        right=right,
        end_aligned=(left or right) and q_start is None,
        positive_scale=scale > SMALL,
        softcap=softcap is not None,
        mask=mask_kind,
        sinks=inputs.sinks is not None,
        kv_lens=inputs.kv_lens is not None,
        varlen=varlen,
    )
    if inputs.cu_seqlens_q is not None:
        batch = inputs.cu_seqlens_q.shape[0] - 1
        len_q, len_k = at_most(max_seqlen_q, q.shape[0]), at_most(max_seqlen_k, k.shape[0])
    else:
        batch, len_q, len_k = q.shape[0], q.shape[2], k.shape[2]
    return AttentionProblem(
        batch=batch,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        len_q=len_q,
        len_k=len_k,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        dtype=q.dtype,
        device=q.device,
        features=features,
        scale=scale,
        softcap=softcap,
        diag_lo=0 if window_left is None else clamp_diagonal(start - window_left),
        diag_hi=0 if window_right is None else clamp_diagonal(start + window_right),
        promised_q=max_seqlen_q if varlen else None,
    )
