"""An attention that writes to what it is given fails the kit's laws, wherever in memory it writes."""

from __future__ import annotations

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.testing import Case, check, check_decode
from flashattn_lite.testing.case import PackedCase, memory_of
from flashattn_lite.testing.gradients import gradients_match_autograd
from flashattn_lite.testing.laws import lengths_outside_count_as_the_nearest, matches_oracle
from flashattn_lite.testing.packed import packed_is_a_loop_of_dense


def keeps_no_keys_past_lengths(q, k, v, kv_lens, **options):
    """Its own answer is right, and the next to read the cache finds zeros."""
    if "block_table" not in options and all(step for x in (k, v) for step in x.stride()):
        for b, length in enumerate(kv_lens.clamp(0, k.shape[2]).tolist()):
            k[b, :, length:] = 0
    return fa.attention_decode(q, k, v, kv_lens, **options)


def test_a_cache_past_its_lengths_is_not_to_be_cleared():
    with pytest.raises(AssertionError, match=r"^k was written to \(\d+ of \d+ bytes\)"):
        check_decode(keeps_no_keys_past_lengths, n=20)


def test_lengths_are_not_to_be_cut():
    """By the law that has lengths to cut: of all of them no other has."""

    def cuts(q, k, v, *, kv_lens=None, **options):
        kv_lens = None if kv_lens is None else kv_lens.clamp_(0, k.shape[2])
        return fa.attention(q, k, v, kv_lens=kv_lens, **options)

    with pytest.raises(AssertionError, match=r"^kv_lens was written to"):
        check(cuts, n=50, laws=[lengths_outside_count_as_the_nearest], shrink=False)


@pytest.mark.parametrize("name", ["q", "mask", "sinks"])
def test_what_is_cleared_after_use_is_named(name):
    def clears(q, k, v, **options):
        results = fa.attention(q, k, v, **options)
        (q if name == "q" else options[name]).zero_()
        return results

    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 7, 16)
    with pytest.raises(AssertionError, match=rf"^{name} was written to"):
        matches_oracle(clears, Case(q, k, k, mask=torch.randn(3, 7), sinks=torch.randn(2)))


def test_rows_between_those_that_a_view_has_are_not_its_own():
    whole = torch.randn(1, 2, 6, 16)

    def writes_between(q, k, v, **options):
        results = fa.attention(q, k, v, **options)
        whole[:, :, 1] = 0
        return results

    k = torch.randn(1, 2, 7, 16)
    with pytest.raises(AssertionError, match=r"^q was written to"):
        matches_oracle(writes_between, Case(whole[:, :, ::2], k, k))


def test_packed_tokens_are_not_to_be_written_to():
    def clears(q, k, v, *lens, **options):
        results = fa.attention_varlen(q, k, v, *lens, **options)
        v.zero_()
        return results

    x, cu = torch.randn(7, 2, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(AssertionError, match=r"^v was written to"):
        packed_is_a_loop_of_dense(clears, PackedCase(x, x.clone(), x.clone(), cu, cu))


def test_a_backward_is_not_to_write_between_rows():
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, k):
            ctx.k = k
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            memory_of(ctx.k, torch.float32)[16] += 1  # the first number behind its first row
            return grad, None

    def attention(q, k, v, **options):
        out, lse = fa.attention(q, k, v, **options)
        return Writes.apply(out, k.detach()), lse

    k = torch.randn(1, 2, 7, 24)[..., :16]
    with pytest.raises(AssertionError, match=r"^k was written to"):
        gradients_match_autograd(attention, Case(torch.randn(1, 2, 5, 16), k, torch.randn(1, 2, 7, 16)))
