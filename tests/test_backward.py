"""Gradients where a float32 lse says too little: masks far below every score, and float64."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference

LOWEST = torch.finfo(torch.float32).min


def qkv(device, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 16))
    return [(torch.randn(s, generator=generator, dtype=torch.float64) * scale).to(device, dtype) for s in shapes]


def gradients(function, tensors, d_out, **options):
    tensors = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad((function(*tensors, **options) * d_out).sum(), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lowest", [LOWEST, -1e30])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_rows_whose_keys_all_have_a_mask_far_below(device, lowest, dtype, sinks):
    """A padded row in a model: it averages V, and so does its gradient, though log l is lost in lse."""
    tensors = qkv(device, dtype)
    mask = torch.zeros(2, 1, 9, 11, device=device)
    mask[0, :, :, 7:] = lowest
    mask[1, :, 3] = lowest
    options = {"sinks": torch.tensor([-1.0, -1e30, -1e30, 0.5], device=device).to(dtype)} if sinks else {}
    d_out = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    got = gradients(fa.attention, tensors, d_out, mask=mask, **options)
    exact = {name: x.double() for name, x in options.items()}
    wanted = gradients(attention_reference, [x.double() for x in tensors], d_out.double(), mask=mask, **exact)
    # Gradients are sums of up to eleven products of normal numbers: a hundred eps of float32, some hundred of float64;
    # bfloat16's inputs are exact, and its O and results are rounded: eight eps.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-13}[dtype]
    for ours, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_score_that_overflows_out_of_sight_leaves_gradients_alone(device, dtype, softcap):
    """Of a key past the length, and of a large query with keys that it does not see, inf - inf is nobody's."""
    large = torch.finfo(dtype).max / 2
    q, k, v = (torch.randn(1, 1, 3, 2, device=device, dtype=dtype) for _ in range(3))
    q[0, 0, 0], k[0, 0, 0], k[0, 0, 1] = large, 0.0, torch.tensor([3.0, -3.0])
    for grad in gradients(fa.attention, (q, k, v), torch.ones_like(v), causal=True, softcap=softcap):
        assert grad.isfinite().all()
    q, k, v = (torch.randn(1, 1, n, 8, device=device, dtype=dtype) for n in (2, 4, 4))
    k[:, :, 2:] = large
    lens = torch.tensor([2], dtype=torch.int32, device=device)
    for grad in gradients(fa.attention, (q, k, v), torch.ones_like(q), kv_lens=lens, softcap=softcap):
        assert grad.isfinite().all()


def test_gradients_of_float64_are_float64(device):
    """Also of scores in the hundreds, of whose lse a float32 keeps five digits behind the point."""
    tensors = qkv(device, torch.float64, scale=8.0)
    d_out = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    wanted = gradients(attention_reference, tensors, d_out, causal=True)
    for ours, want in zip(gradients(fa.attention, tensors, d_out, causal=True), wanted, strict=True):
        # Scores of some hundreds are off by their eps (1e-13), and so is every P; a float32 lse alone gave 9e-5.
        torch.testing.assert_close(ours, want, atol=1e-10, rtol=1e-10)


LAID = {
    "as a projection leaves it": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a part of a fused one": lambda x: torch.stack([x.transpose(1, 2)] * 3, dim=2)[:, :, 1].transpose(1, 2),
    "contiguous": lambda x: x,
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "columns apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("laid", LAID)
def test_gradients_lie_as_what_they_are_of(laid, dtype, compiled, device):
    """In the order of heads and rows that a projection left: what goes back through it needs no copy."""
    tensors = [LAID[laid](x).detach().requires_grad_() for x in qkv(device, dtype)]
    mask = LAID[laid](torch.randn(2, 4, 9, 11).to(device, dtype)).detach().requires_grad_()
    torch._dynamo.reset()  # each case compiles this anew, and torch counts
    attend = lambda q, k, v, mask: fa.attention(q, k, v, mask=mask)
    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    d_out = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    given = (*tensors, mask)
    grads = torch.autograd.grad(call(*given), given, d_out)
    wanted = torch.autograd.grad(attention_reference(*tensors, mask=mask), given, d_out)
    for x, ours, want in zip(given, grads, wanted, strict=True):
        assert ours.stride() == torch.empty_like(x).stride()
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2  # sums of eleven products of normal numbers, rounded
        torch.testing.assert_close(ours, want, atol=tolerance, rtol=tolerance)
