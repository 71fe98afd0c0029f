"""What the right answer is, in float64 on the inputs as they are, and how far from it an honest attention may land.

The bound is computed, element by element, from the rounding that every fused attention does:

- a score s_j comes with an error of at most delta_j: (D / 2 + some) eps of float32 times |q| . |k_j| * |scale|,
  and some eps of |mask_j|;
- that moves the output by at most sum_j p_j (e^delta_j - 1) (|v_j| + |out|) / sum_j p_j e^-delta_j, exactly;
- weights and output are rounded to the dtype of the inputs, sums over keys to float32: some eps of sum_j p_j |v_j|;
- a weight below the smallest number of its dtype is lost: that number times sum_j |v_j|.

To it comes twice the error that eager torch makes in the same dtype, as the largest of a row relative to
sum_j p_j |v_j|. A row is judged by its own size: an outlier in one row hides nothing in another, a key of weight 0
hides nothing at all, and an element that eager torch happens to hit exactly gets no tighter bound than its neighbours.
lse is judged without eager torch's error: it is float32, from float32 scores, whatever the dtype of the inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn_lite.reference import attention_reference, dot, repeat_heads, weigh
from flashattn_lite.target import takes_tf32
from flashattn_lite.testing.case import Case
from flashattn_lite.testing.results import assert_form, assert_within

ACCUMULATION = 4  # eps of float32 for all that is not a sum: exp2, tanh, scales, rescaling
ROUNDING = 2  # the weights once, the output once, each by half an eps; times 2


@dataclass(frozen=True)
class Expected:
    """The answer and its bounds, float64: out (B, Hq, L, Dv), lse (B, Hq, L); `blind` rows see no key."""

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor
    blind: Tensor


@dataclass(frozen=True)
class Weights:
    """Each row's softmax in float64 and the uncertainty of its scores, (B, Hq, L, S); the sink's apart, (B, Hq, L)."""

    p: Tensor
    delta: Tensor
    p_sink: Tensor
    delta_sink: Tensor
    out: Tensor
    lse: Tensor
    seen: Tensor


def upcast(case: Case) -> Case:
    """The same numbers in float64: rounding happened before, so this is exact."""
    q, k, v = (x.detach().double() for x in (case.q, case.k, case.v))
    mask, sinks = case.mask, case.sinks
    mask = mask.detach().double() if mask is not None and mask.dtype != torch.bool else mask
    return case.replace(q=q, k=k, v=v, mask=mask, sinks=None if sinks is None else sinks.detach().double())


def run_reference(case: Case, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    out, lse = attention_reference(case.q, case.k, case.v, **case.options(), return_lse=True, dtype=dtype)
    return out, lse


def accumulator_eps(case: Case, inside: torch.dtype | None = None) -> float:
    """Eps of the arithmetic inside: float32, or float64 for float64; TF32's where torch is told to allow it.

    `inside` says otherwise: float64 that goes through an lse in float32 has no more digits than that.
    """
    dtype = inside or case.q.dtype
    if dtype == torch.float32 and case.q.is_cuda and takes_tf32():
        return 2.0**-10
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def summing(terms: int) -> float:
    """In eps, the error of a sum of n terms in any order, relative to the sum of absolute values: n / 2 at worst.

    Equal terms come near it while they are few (constant rows: 96 of them were seen to err by more than 4). No rounding
    keeps its side over many binades, so from 256 terms on it grows as a random walk.
    """
    return min(terms / 2, 8 * math.sqrt(terms))


def smallest_weight(dtype: torch.dtype) -> float:
    """Weights below are lost: float16 keeps subnormals, and float32's are flushed by the GPU's exp2."""
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(torch.float32).tiny


def weights(case: Case, inside: torch.dtype | None = None) -> Weights:
    """Needs no care for speed, only for infinities: e^delta is kept as a logarithm where it could overflow."""
    eps = accumulator_eps(case, inside)
    exact, unit = upcast(case), ACCUMULATION * eps
    out, lse = run_reference(exact)
    seen = case.visible()
    k = repeat_heads(exact.k, case.q.shape[1])
    s = dot(exact.q, k, seen) * case.factor
    score_unit = unit + summing(case.q.shape[-1]) * eps
    delta = score_unit * abs(case.factor) * dot(exact.q.abs(), k.abs(), seen)
    if case.softcap is not None:
        cap = lambda x: case.softcap * torch.tanh(x / case.softcap)
        delta = cap(s + delta) - cap(s - delta) + unit * cap(s).abs()
        s = cap(s)
    if exact.mask is not None and exact.mask.dtype != torch.bool:
        s, delta = s + exact.mask, delta + unit * exact.mask.abs()
    base = lse.masked_fill(lse == -math.inf, 0.0)
    p = torch.exp(s - base.unsqueeze(-1)).masked_fill(~seen, 0.0)
    sink = (
        torch.full_like(lse, -math.inf) if exact.sinks is None else exact.sinks.view(1, lse.shape[1], 1).expand_as(lse)
    )
    delta_sink = unit * sink.abs().masked_fill(sink == -math.inf, 0.0)
    return Weights(p, delta.masked_fill(~seen, 0.0), torch.exp(sink - base), delta_sink, out, lse, seen)


def grown(p: Tensor, delta: Tensor) -> Tensor:
    """p (e^delta - 1), also where delta is huge and p is 0."""
    if not bool((delta > 30).any()):
        return p * torch.expm1(delta)
    log_growth = torch.where(delta > 30, delta, torch.log(torch.expm1(delta.clamp(max=30))))
    return torch.exp(torch.log(p) + log_growth).nan_to_num(nan=0.0, posinf=math.inf)


def expect(case: Case, eager: bool = True, inside: torch.dtype | None = None) -> Expected:
    """The answer and the bounds; `eager=False` leaves eager torch's error out of them, and its run too.

    inside: see `accumulator_eps`.
    """
    w, dtype = weights(case, inside), case.q.dtype
    out, lse = w.out, w.lse
    v = repeat_heads(case.v.detach().double(), case.q.shape[1])
    size = weigh(w.p, v.abs(), w.seen)
    growth, growth_sink = grown(w.p, w.delta), grown(w.p_sink, w.delta_sink)
    total = growth.sum(-1) + growth_sink
    least = (w.p * torch.exp(-w.delta)).sum(-1) + w.p_sink * torch.exp(-w.delta_sink)
    moved = (weigh(growth, v.abs(), w.seen) + total.unsqueeze(-1) * out.abs()) / least.unsqueeze(-1)
    unit = (ACCUMULATION + summing(case.k.shape[2])) * accumulator_eps(case, inside)
    rounding = ROUNDING * torch.finfo(dtype).eps + unit
    lost = smallest_weight(dtype) * weigh(w.seen.double(), v.abs(), w.seen)
    bound = moved + rounding * size + lost + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = bound + torch.finfo(torch.float32).tiny  # float32's subnormals may be flushed
    if eager:
        error = (run_reference(case, dtype)[0].detach().double() - out).abs() / size
        bound = bound + 2 * error.nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True) * size
    lse_unit = unit + torch.finfo(torch.float32).eps
    lse_bound = torch.log1p(total) - torch.log(least.clamp(max=1.0)) + lse_unit * (1 + lse.abs())
    bound, lse_bound = (x.nan_to_num(nan=math.inf, posinf=math.inf) for x in (bound, lse_bound))  # rows that hold NaN
    return Expected(out, lse, bound, lse_bound, ~w.seen.any(-1))


def assert_close_to_oracle(out: Tensor, lse: Tensor | None, case: Case, expected: Expected | None = None) -> None:
    """(out, lse) of `case` is what it should be, or an AssertionError tells where it is not, by how much, and the case.

    Where the answer is finite, the result lies within the bound; where it is NaN or inf, the result is one of both;
    a row that sees no key is exactly 0 with lse -inf (or the sink). lse may be None: not given.

    >>> case = Case(*(torch.randn(1, 2, 5, 8) for _ in range(3)), causal=True)
    >>> out, lse = attention_reference(case.q, case.k, case.v, causal=True, return_lse=True)
    >>> assert_close_to_oracle(out, lse, case)
    """
    expected = expect(case) if expected is None else expected
    assert_form(out, lse, case)
    blind = out.detach()[expected.blind]
    assert bool((blind == 0).all()), f"a row that sees no key must be 0; got {blind[blind != 0][0].item()} in {case}"
    assert_within("out", out, expected.out, expected.out_bound, case)
    if lse is not None:
        assert_within("lse", lse, expected.lse, expected.lse_bound, case)
