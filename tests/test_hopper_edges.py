"""Diagonals that end a key before, at and after the border of a tile of keys: none is taken for whole that is not."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.testing import Case, assert_close_to_oracle


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
def test_borders(hopper_device, dtype, side):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).to(hopper_device, dtype) for n in (64, 700, 700))
    for border in (128, 176, 192, 256):
        for start in range(border - 3, border + 3):
            # the first row's last key, or the last row's first
            options = (
                {"window": (None, 0), "q_start": start} if side == "right" else {"window": (63, None), "q_start": start}
            )
            out, lse = fa.attention(q, k, v, **options, return_lse=True, backend="hopper")
            assert_close_to_oracle(out, lse, Case(q, k, v, **options))


def test_who_sees_none_of_two_tiles_still_has_the_first_keys(hopper_device):
    """Of float16 they come second: the first of three consumers sees them, and no tile right of its rows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 2048, 64, generator=generator).to(hopper_device, torch.float16) for _ in range(3))
    out, lse = fa.attention(q, k, v, causal=True, return_lse=True, backend="hopper")
    assert_close_to_oracle(out, lse, Case(q, k, v, causal=True))


@pytest.mark.parametrize("dim", [64, 128])
def test_sequences_that_end_beside_the_border_of_a_tile(dim, hopper_device):
    """A key before, at and after it: the keys behind theirs count for nothing."""
    generator = torch.Generator().manual_seed(0)
    lens = torch.tensor([63, 64, 65, 127, 128, 129, 191], dtype=torch.int32, device=hopper_device)
    q, k, v = (torch.randn(7, 1, n, dim, generator=generator).to(hopper_device, torch.bfloat16) for n in (20, 200, 200))
    out, lse = fa.attention(q, k, v, kv_lens=lens, return_lse=True, backend="hopper")
    assert_close_to_oracle(out, lse, Case(q, k, v, kv_lens=lens))
