"""Packed sequences longer than promised: as a GPU may meet them, where no door reads the tables."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from flashattn_lite import target as targets
from flashattn_lite import tiled, tiled_backward
from flashattn_lite.kernels import backward_launch, decode_launch
from flashattn_lite.problem import Inputs, describe

pytestmark = pytest.mark.usefixtures("where_kernels_run")


def run(q, k, cu_q, cu_k, most_q, most_k, **options):
    """By decoding's kernels; rows that nobody writes stay 7."""
    inputs = Inputs(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    plain = {"causal": True, "q_start": None, "window_left": None, "window_right": None, "softcap": None, "scale": 0.5}
    problem = describe(inputs, **plain | options, max_seqlen_q=most_q, max_seqlen_k=most_k)
    out, lse = torch.full_like(q, 7), torch.full(q.shape[1::-1], 7.0, device=q.device)
    decode_launch.prepare(problem, inputs, out, lse, targets.of(q.device))(inputs, out, lse)
    return out, lse


@pytest.mark.parametrize("tokens", [40, 100, 200])
def test_more_rows(device, tokens):
    """The keys that the promised rows see are the same to both launches."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 2, 64, generator=generator).half().to(device) for n in (tokens, 230))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (tokens, 230))
    out, lse = run(q, k, cu_q, cu_k, 3, 230)
    want, exact = run(q[:3].contiguous(), k, cu_q.clamp(max=3), cu_k, 3, 230, q_start=230 - tokens)
    assert not out[3:].any() and (lse[:, 3:] == -torch.inf).all()
    torch.testing.assert_close(out[:3], want, rtol=0, atol=0)
    torch.testing.assert_close(lse[:, :3], exact, rtol=0, atol=0)


@pytest.mark.parametrize("promised", [0, 5, 40])
def test_more_keys(device, promised):
    """Those past the promise are not seen."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 2, 64, generator=generator).half().to(device) for n in (2, 1230))
    cu_q = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 1200, 1230], dtype=torch.int32, device=device)
    got = run(q, k, cu_q, cu_k, 1, promised, causal=False)
    kept = torch.cat([k[:promised], k[1200 : 1200 + min(promised, 30)]])
    fewer = torch.tensor([0, promised, promised + min(promised, 30)], dtype=torch.int32, device=device)
    want = run(q, kept, cu_q, fewer, 1, promised, causal=False)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("rubbish", [0.5, float("nan"), -float("inf")])
def test_gradients_of_more_rows(device, rubbish, monkeypatch):
    """Rows past the promise are nobody's and add nothing, whatever lay where their statistics would be."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(40, 2, 16, generator=generator).half().to(device) for _ in range(4))
    sinks = torch.tensor([0.5, 2.0], device=device)
    cu = torch.tensor([0, 40], dtype=torch.int32, device=device)
    inputs = Inputs(q, k, v, sinks=sinks, cu_seqlens_q=cu, cu_seqlens_k=cu)
    plain = {"causal": False, "q_start": None, "window_left": None, "window_right": None, "softcap": None, "scale": 0.5}
    problem = describe(inputs, **plain, max_seqlen_q=32, max_seqlen_k=40)
    out, lse = torch.zeros_like(q), torch.full((2, 40), -torch.inf, device=device)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(rubbish))
    few = Inputs(q[:32], k, v, sinks=sinks, cu_seqlens_q=cu.clamp(max=32), cu_seqlens_k=cu)
    kept = describe(few, **plain, max_seqlen_q=32, max_seqlen_k=40)
    tiled.forward(kept, few, out[:32], lse[:, :32])
    d_lse, needs = torch.zeros_like(lse), (True, True, True, False, True)
    make = backward_launch.prepare(problem, inputs, d_out, needs, targets.of(device))
    got = make(inputs, out, lse, d_out, d_lse)
    want = tiled_backward.backward(kept, few, out[:32], lse[:, :32], d_out[:32], d_lse[:, :32], needs)
    # float16 rounds P, dS and the result, by 2^-11 each: an ulp of numbers from 2 to 4, 0.002, is what the
    # interpreter differs by; what rows past the promise would add is far more.
    for ours, theirs in zip((got[0][:32], *got[1:3], got[4]), (*want[:3], want[4]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
