"""The right gradients, in float64 by autograd of the definition, how far an honest backward may be, and their law.

The bound follows the backward of any fused attention, term by term in absolute values, with
e_ij = some eps + the uncertainty of the weight p_ij (see oracle.py):

    |dV_j| by sum_i e_ij p_ij |dO_i|,
    |dS_ij| by e_ij p_ij (|dO_i| . |v_j| + sum_d |dO_id| sum_j p_ij |v_jd| + |dlse_i|),
    |dQ|, |dK| by those of dS times |K|, |Q|, and a float mask and the sinks by sums of dS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashattn_lite.reference import attention_reference, repeat_heads, weigh
from flashattn_lite.testing.case import Attention, Case, PackedCase, memory_of, needs
from flashattn_lite.testing.oracle import (
    ACCUMULATION,
    ROUNDING,
    accumulator_eps,
    expect,
    smallest_weight,
    summing,
    upcast,
    weights,
)
from flashattn_lite.testing.results import arguments_stay, assert_within, run

NAMES = ("q", "k", "v", "mask", "sinks")
Bounded = dict[str, tuple[Tensor, Tensor]]


def differentiable(case: Case | PackedCase) -> tuple[str, ...]:
    """Names of the tensors that have a gradient."""
    tensors = {name: getattr(case, name, None) for name in NAMES}
    return tuple(name for name, x in tensors.items() if x is not None and x.dtype.is_floating_point)


def within_range(case: Any) -> Any:
    """The case with numbers of which a product of three fits in float16; they lie in memory as they did."""
    largest = {"q": 4.0, "k": 4.0, "v": 4.0, "mask": 8.0}
    tensors = {name: getattr(case, name) for name in differentiable(case) if name in largest}
    return case.replace(**{name: _clamped(x, largest[name], hides=name == "mask") for name, x in tensors.items()})


def _clamped(x: Tensor, largest: float, hides: bool) -> Tensor:
    memory = memory_of(x, x.dtype)
    clamped = memory.clamp(-largest, largest)
    if hides:  # what hides a key still does
        clamped = torch.where(memory == -torch.inf, memory, clamped)
    return clamped.as_strided(x.shape, x.stride(), x.storage_offset())


def run_backward(
    attention: Attention, case: Case | PackedCase, d_out: Tensor, d_lse: Tensor | None
) -> dict[str, Tensor | None]:
    """Gradients of sum(out * d_out) + sum(lse * d_lse); None where attention gives none. Strides are kept.

    Where there are no keys, out and lse may be constants.
    """
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in differentiable(case)}
    options = case.options() | {name: leaves[name] for name in leaves if name not in ("q", "k", "v")}
    with arguments_stay(case):
        out, lse = attention(leaves["q"], leaves["k"], leaves["v"], **options, return_lse=True)
        results = {"out": (out, d_out)} | ({} if d_lse is None or lse is None else {"lse": (lse, d_lse)})
        for name, (x, _) in results.items():
            assert x.requires_grad or not case.k.numel(), f"{name} is detached from its inputs in {case}"
        attached = [(x, upstream.to(x.dtype)) for x, upstream in results.values() if x.requires_grad]
        if not attached:
            return dict.fromkeys(leaves)
        outputs, upstream = zip(*attached, strict=True)
        grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
        return dict(zip(leaves, grads, strict=True))


def expect_gradients(case: Case, d_out: Tensor, d_lse: Tensor | None) -> Bounded:
    """Name -> (gradient, bound), float64."""
    exact = upcast(case)
    grads = run_backward(attention_reference, exact, d_out.double(), None if d_lse is None else d_lse.double())
    bounds = _bounds(exact, case, d_out.double().abs(), d_lse)
    result = {}
    for name, grad in grads.items():
        assert grad is not None
        tiny = torch.finfo(case.q.dtype).smallest_normal
        eps = max(_eps(case), torch.finfo(getattr(case, name).dtype).eps)  # of a gradient, in its tensor's dtype
        result[name] = (grad, bounds[name].sum_to_size(grad.shape) + ROUNDING * eps * grad.abs() + tiny)
    return result


def _eps(case: Case) -> float:
    return torch.finfo(case.q.dtype).eps


def _bounds(exact: Case, case: Case, d_out: Tensor, d_lse: Tensor | None) -> dict[str, Tensor]:
    """The formulas above; d_out is its absolute value, unseen NaN is cleared."""
    w, heads = weights(case), case.q.shape[1]
    q, k, v = (x.abs().nan_to_num(nan=0.0, posinf=0.0) for x in (exact.q, exact.k, exact.v))
    batch, heads_kv, len_k = k.shape[:3]
    k_heads, v_heads = repeat_heads(k, heads), repeat_heads(v, heads)
    longest = max(len_k, case.group * q.shape[2], q.shape[3], v.shape[3])
    unit = ROUNDING * _eps(case) + (ACCUMULATION + 2 * summing(longest)) * accumulator_eps(case)
    row = (w.p * w.delta).sum(-1, keepdim=True) + (w.p_sink * w.delta_sink).unsqueeze(-1)  # of the denominator
    e = unit + 2 * torch.expm1((w.delta + row).clamp(max=30.0))

    size = weigh(w.p, v_heads, w.seen)
    d_delta = (d_out * size).sum(-1, keepdim=True)
    if d_lse is not None:
        d_delta = d_delta + d_lse.double().abs().unsqueeze(-1)
    lost = torch.where(w.seen, smallest_weight(case.q.dtype), 0.0)
    d_p = d_out @ v_heads.mT
    p = torch.where(w.seen, e * w.p, 0.0)
    d_s = p * (d_p + d_delta) + lost * (d_p + d_delta + 1)
    sink = w.p_sink * torch.expm1(w.delta_sink + row.squeeze(-1)) + unit * w.p_sink
    grouped = lambda x: x.view(batch, heads_kv, case.group, len_k, x.shape[-1]).sum(2)
    return {
        "q": abs(case.factor) * (d_s @ k_heads),
        "k": grouped(abs(case.factor) * (d_s.mT @ q)),
        "v": grouped((p + lost).mT @ d_out),
        "mask": d_s,
        "sinks": (2 * sink * d_delta.squeeze(-1)).sum((0, 2)),
    }


@needs("gradients")
def gradients_match_autograd(attention: Attention, case: Case) -> None:
    """The gradients of q, k, v, a float mask and the sinks are those of autograd through the definition."""
    case = within_range(case)
    if not bool(torch.isfinite(expect(case, eager=False).out).all()):
        return
    generator = case.generator()
    d_out = torch.randn(*case.q.shape[:3], case.v.shape[-1], generator=generator).to(case.q)
    d_lse = torch.randn(case.q.shape[:3], generator=generator).to(case.q.device)
    with torch.no_grad():
        _, lse = run(attention, case)
    for upstream in (None,) if lse is None else (None, d_lse):
        grads = run_backward(attention, case, d_out, upstream)
        for name, (want, bound) in expect_gradients(case, d_out, upstream).items():
            got = grads[name]
            if got is None:  # to autograd that is 0
                assert not want.any(), f"no gradient reaches {name} in {case}"
            else:
                assert_within(f"gradient of {name}", got, want, bound, case)
