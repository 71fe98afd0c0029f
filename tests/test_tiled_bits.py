"""The CPU path: a row has its bits whatever shares the call with it, in every layout."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.testing.tensors import lay_out

LAYOUTS = {
    "columns two apart": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "columns as far apart as the keys": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).mT,
    "entries an odd step apart": lambda *shape: lay_out(torch.randn(shape), "padded entries"),
    "rows an odd step apart": lambda *shape: lay_out(torch.randn(shape), "padded rows"),
    "rows an odd step apart, before heads": lambda b, h, n, d: torch.randn(b, n, h, d + 5)[..., :d].transpose(1, 2),
    "at an odd address": lambda *shape: torch.randn(math.prod(shape) + 1)[1:].view(shape),
    "one for the batch": lambda *shape: torch.randn(1, *shape[1:]).expand(shape),
    "one for all heads": lambda b, h, *rest: torch.randn(b, 1, *rest).expand(b, h, *rest),
}


@pytest.mark.parametrize("laid", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sequence_and_a_head_have_their_bits_however_they_lie(laid: str, dtype: torch.dtype) -> None:
    """A product of one slot must be that of many, and one of a view that of a copy."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        for _ in range(50):
            heads, len_q, len_k = (int(torch.randint(1, most, ())) for most in (3, 60, 200))
            dim = 8 * int(torch.randint(1, 20, ()))
            q, k, v = (LAYOUTS[laid](2, heads, length, dim) for length in (len_q, len_k, len_k))
            out = fa.attention(q, k, v, backend="tiled")
            assert torch.equal(fa.attention(q[1:], k[1:], v[1:], backend="tiled"), out[1:])
            assert torch.equal(fa.attention(q[:, :1], k[:, :1], v[:, :1], backend="tiled"), out[:, :1])
    finally:
        torch.set_default_dtype(torch.float32)
