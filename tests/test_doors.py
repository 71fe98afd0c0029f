"""What calls are asked that came before, or of tensors that few tests pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad

import flashattn_lite as fa
from flashattn_lite.problem import FAR, Inputs, describe, too_long


def test_a_known_call_inside_autocast_is_cast():
    q = torch.randn(1, 2, 5, 16)
    for _ in range(2):
        assert fa.scaled_dot_product_attention(q, q, q).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fa.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16


def test_values_that_broadcast_with_queries_but_not_with_keys():
    q, k, v = (torch.randn(batch, 2, 5, 16) for batch in (1, 2, 3))
    with pytest.raises(ValueError, match=r"^value: batch dims must broadcast with key's \(2, 2, 5, 16\)"):
        fa.scaled_dot_product_attention(q, k, v)


def test_a_tangent_of_packed_sinks_is_refused():
    x, sinks = torch.randn(7, 4, 8), torch.randn(4)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^sinks: forward-mode.*Use reverse mode"):
        fa.attention_varlen(x, x, x, cu, cu, sinks=forward_ad.make_dual(sinks, torch.ones(4)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_part_holds_where_it_saw_nothing_is_dropped(value):
    """As some kernels leave it."""
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    blind = torch.full_like(out, value), torch.full_like(lse, -math.inf)
    merged, merged_lse = fa.merge_attention([blind, (out, lse)])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)
    assert not fa.merge_attention([blind, blind])[0].any()


@pytest.mark.parametrize("side", ["q", "k"])
def test_queries_and_keys_are_both_counted(side):
    lengths = {"q": 5, "k": 5} | {side: FAR}
    q, k = (torch.empty(1, 1, n, 8, device="meta") for n in lengths.values())
    plain = dict.fromkeys(("q_start", "window_left", "window_right", "scale", "softcap"))
    assert too_long(describe(Inputs(q, k, k), causal=True, **plain))
