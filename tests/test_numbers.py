"""Numbers that hide others: scores beside whose size a sum is lost, sums of many nearly equal weights, weights of 0."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference


def gradients(function, q, k, v, d_out, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(function(*leaves, **options), leaves, d_out)


@pytest.mark.parametrize("size", [1e4, 1e6, pytest.param(1e8, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 5)}], ids=["causal", "window"])
def test_large_scores_keep_their_sums(size, options, device):
    """lse hides log l there: of 1e8 it is a multiple of 8. Half of the rows have such scores, the others their bits."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, heads, 70, 16).to(device, dtype) for heads in (2, 1, 1, 2))
    small = (torch.arange(70, device=device)[:, None] % 2 == 0).expand_as(q)
    before = gradients(fa.attention, q, k, v, d_out, **options)
    q = torch.where(small, q, q * size)
    got = gradients(fa.attention, q, k, v, d_out, **options)
    want = gradients(attention_reference, *(x.double() for x in (q, k, v, d_out)), **options)[2]
    eager = gradients(attention_reference, *(x.float() for x in (q, k, v, d_out)), **options)[2]
    # Scores of nearly equal keys are as exact as float32 has them; P, O and results are rounded to the dtype.
    eps = 8 * torch.finfo(dtype).eps + 2e-6
    bound = 2 * float((eager - want).abs().max()) + eps * float(want.abs().max())
    torch.testing.assert_close(got[2].double(), want, atol=bound, rtol=eps)
    assert torch.equal(got[0][small], before[0][small])
    assert all(bool(torch.isfinite(x).all()) for x in got)


@pytest.mark.parametrize("rows", [1, 4])
def test_few_rows_keep_their_sum_over_many_keys(rows: int) -> None:
    """Nearly equal weights, of values 1: each addition to a large sum would lose as much, and in one direction."""
    k = torch.full((1, 1, 2**17, 1), -0.35667)
    k[0, 0, 0] = 0
    out = fa.attention(torch.ones(1, 1, rows, 1), k, torch.ones_like(k), scale=1.0, backend="tiled")
    assert float((out - 1).abs().max()) < 2**-14  # a 17th of what one sum over all keys loses


def test_a_visible_key_of_score_minus_infinity_keeps_its_value(device: torch.device) -> None:
    """Weight 0 times NaN, or an infinity: NaN, as in plain torch. Invisible to the first row, it does not reach it."""
    q = torch.ones(1, 1, 2, 1, device=device)
    k = torch.tensor([0.0, -math.inf], device=device).view(1, 1, 2, 1)
    for value in (math.nan, math.inf):
        v = torch.tensor([1.0, value], device=device).view(1, 1, 2, 1)
        out = fa.attention(q, k, v, causal=True, backend="tiled").flatten()
        assert out[0] == 1 and not math.isfinite(float(out[1]))
