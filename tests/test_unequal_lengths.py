"""Sequences of unequal lengths in one row tile of plain torch: what one sees whole, another may not."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.testing import Case, assert_close_to_oracle
from tests.test_decode import int32


@pytest.mark.parametrize("window", [(300, None), (None, 0), (300, 0)], ids=str)
def test_they_see_their_own_keys(device, window):
    """Over several tiles of keys, of which all but the edges are whole for the longer one alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, n, 8, generator=generator).to(device) for n in (300, 1100, 1100))
    lens = int32([1100, 800], device)
    out, lse = fa.attention(q, k, v, window=window, kv_lens=lens, return_lse=True, backend="tiled")
    assert_close_to_oracle(out, lse, Case(q, k, v, window=window, kv_lens=lens))
