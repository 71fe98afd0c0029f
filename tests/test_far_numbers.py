"""Scales that float32 takes for 0, and 16-bit rows whose maximum log2 units can't hold."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.testing import Case, assert_close_to_oracle


@pytest.mark.parametrize("scale", [1e-39, 1e-50])
@pytest.mark.parametrize("rows", [4, 40])
def test_a_scale_that_float32_takes_for_0(device, scale, rows):
    """Causal: -inf times 0 would be NaN."""
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)).to(device) for n in (rows, 70, 70))
    out, lse = fa.attention(q, k, v, scale=scale, causal=True, q_start=0, return_lse=True)
    assert_close_to_oracle(out, lse, Case(q, k, v, scale=scale, causal=True, q_start=0))


@pytest.mark.parametrize("size", [1e5, 1e10, 1e30])
@pytest.mark.parametrize("cols", [40, 3000, 20000])
def test_softmax_of_large_numbers_of_16_bits(device, size, cols):
    x = (torch.randn(2, cols, generator=torch.Generator().manual_seed(cols)) * size).to(device, torch.bfloat16)
    x[:, 5] = x[:, 7] = x.amax(1)
    torch.testing.assert_close(fa.online_softmax(x), torch.softmax(x.double(), -1).bfloat16())
    m, l_i = fa.softmax_stats(x)
    torch.testing.assert_close(l_i.double(), (x.double() - m[:, None].double()).exp().sum(1), rtol=1e-5, atol=0)
