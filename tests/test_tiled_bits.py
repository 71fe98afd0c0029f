"""The CPU path: a row has its bits whatever shares the call with it, in every layout."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sequence_and_a_head_have_their_bits_however_the_columns_lie(dtype: torch.dtype) -> None:
    """Columns of K and V two apart, or as far as the keys: a product of one slot must be that of many."""
    torch.manual_seed(0)
    apart = lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    across = lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
    for i in range(100):
        heads, len_q, len_k = (int(torch.randint(1, most, ())) for most in (3, 60, 200))
        dim, laid = 8 * int(torch.randint(1, 20, ())), (apart, across)[i % 2]
        q, k, v = (laid(2, heads, length, dim) for length in (len_q, len_k, len_k))
        out = fa.attention(q, k, v, backend="tiled")
        assert torch.equal(fa.attention(q[1:], k[1:], v[1:], backend="tiled"), out[1:])
        assert torch.equal(fa.attention(q[:, :1], k[:, :1], v[:, :1], backend="tiled"), out[:, :1])
