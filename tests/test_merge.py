"""Attention over parts of the keys, put together: the whole, its identity, what no float holds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import flashattn_lite as fa
from tests.test_attention import close, qkv, randn


@pytest.mark.parametrize("heads", [1, 5])
def test_merge_of_parts_is_the_whole(device, heads):
    q, k, v = qkv(device, 5, 60, heads=heads)
    cuts = [0, 1, 1, 40, 60]
    parts = [fa.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in itertools.pairwise(cuts)]
    out, lse = fa.merge_attention(parts)
    whole, exact = fa.attention(q, k, v, return_lse=True)
    close(out, whole)
    close(lse, exact)
    one, same = fa.merge_attention([parts[1], parts[0], parts[1]])  # parts[1] is empty: the identity, to the last bit
    assert torch.equal(one, parts[0][0])
    assert torch.equal(same, parts[0][1])
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)  # which it is whatever its out holds
    assert all(map(torch.equal, fa.merge_attention([parts[0], nothing]), parts[0]))


@pytest.mark.parametrize("total", [5, 3], ids=["more tokens than heads", "as many tokens as heads"])
def test_merge_of_packed_parts_is_the_whole(device, total):
    """lse is (heads, total) there, also where that could be read the other way round."""
    q, k, v = (randn(device, rows, 3, 8, seed=rows) for rows in (total, 9, 9))
    cu_q, *cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, total], [0, 1, 4], [0, 3, 5]))
    whose = [[0, 4, 5, 6], [1, 2, 3, 7, 8]]  # keys of both sequences in each part: four and five
    parts = [
        fa.attention_varlen(q, k[at], v[at], cu_q, cu, return_lse=True) for at, cu in zip(whose, cu_k, strict=True)
    ]
    out, lse = fa.merge_attention(parts)
    whole, exact = fa.attention_varlen(q, k, v, cu_q, cu_k[0] + cu_k[1], return_lse=True)
    close(out, whole)
    close(lse, exact)


@pytest.mark.parametrize("far", [-3.4e38, -2.5e38, 2.5e38, 3.4e38])
def test_merge_of_parts_whose_lse_is_near_the_end_of_float32(device, far):
    """A mask of float32's lowest number, say: in log2 units they would be infinite."""
    out = torch.tensor([[1.0], [3.0], [5.0]], device=device).view(3, 1, 1, 1, 1)
    lse = torch.tensor([far, far, -far], device=device).view(3, 1, 1, 1)
    merged, merged_lse = fa.merge_attention([(out[0], lse[0]), (out[1], lse[1])])
    assert (merged.item(), merged_lse.item()) == (2.0, lse[0].item())
    merged, merged_lse = fa.merge_attention([(out[0], lse[0]), (out[2], lse[2])])
    assert (merged.item(), merged_lse.item()) == (out[0 if far > 0 else 2].item(), abs(lse[0].item()))


def test_merged_infinities_stay_however_small_their_part(device):
    """As in attention over all keys: a weight too small for a float is not 0, and times infinity no NaN."""
    q, k, v = qkv(device, 2, 8)
    k[:, :, :4] -= 100 * q[:, :1, :1].sign() * q.abs().max()
    v[:, :, 1, 0], v[:, :, 2, 1] = math.inf, -math.inf
    q = q[:, :, :1] * 100
    whole = fa.attention(q, k, v)
    parts = [fa.attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(0, 4), slice(4, 8))]
    merged, _ = fa.merge_attention(parts)
    assert whole[0, 0, 0, 0] == math.inf and whole[0, 0, 0, 1] == -math.inf and whole[0, 0, 0, 2:].isfinite().all()
    torch.testing.assert_close(merged[:, 0], whole[:, 0])


@pytest.mark.parametrize("size", [1e4, 1e8, -1e9])
def test_parts_weigh_the_same_in_any_order_however_large_lse(device, size):
    """Pair by pair the fourth would weigh half of all: lse + log 2 is lse in float32."""
    parts = [
        (torch.full((1, 1, 1, 1), float(i), device=device), torch.full((1, 1, 1), size, device=device))
        for i in range(4)
    ]
    leaves = [x.requires_grad_() for part in parts for x in part]
    for order in itertools.permutations(parts):
        out, lse = fa.merge_attention(order)
        assert out.item() == 1.5
        close(lse, parts[0][1] + math.log(4))
        for i, grad in enumerate(torch.autograd.grad(out.sum() + lse.sum(), leaves)):
            # d out_i: its weight. d lse_i: its weight, times how far its out is from the mean, and in lse.
            torch.testing.assert_close(grad.item(), 0.25 if i % 2 == 0 else 0.25 * (i // 2 - 1.5) + 0.25)


def test_merged_parts_share_no_memory(device):
    q, k, v = qkv(device, 3, 4)
    out, lse = fa.attention(q, k, v, return_lse=True)
    merged, merged_lse = fa.merge_attention([(out, lse)])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged_lse.zero_(), merged.zero_()
    assert lse.any() and out.any()


def float64_parts(packed=False):
    shape, rows = ((7, 2, 4), (2, 7)) if packed else ((1, 2, 7, 4), (1, 2, 7))
    generator = torch.Generator().manual_seed(0)
    make = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator)
    return [(make(*shape), make(*rows)) for _ in range(3)]


def exact(parts, packed=False):
    lses = torch.stack([lse.double() for _, lse in parts])
    weights = torch.softmax(lses, 0)
    weights = weights.transpose(1, 2) if packed else weights
    return (weights.unsqueeze(-1) * torch.stack([out for out, _ in parts])).sum(0), lses.logsumexp(0)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_float64_are_merged_in_float64(packed):
    parts = float64_parts(packed)
    for x, want in zip(fa.merge_attention(parts), exact(parts, packed), strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("narrow", [0, 1, 2])
def test_one_lse_of_float64_is_enough_wherever_it_comes(narrow):
    """An lse of float32 beside it costs no digits of the others."""
    parts = [(out, lse.float() if i == narrow else lse) for i, (out, lse) in enumerate(float64_parts())]
    for x, want in zip(fa.merge_attention(parts), exact(parts), strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, want, rtol=1e-14, atol=1e-14)


def test_nothing_is_mapped():
    merged = torch.vmap(lambda out: fa.merge_attention([(out, out[..., 0])])[0])(torch.randn(0, 2, 4, 5, 16))
    assert merged.shape == (0, 2, 4, 5, 16)
    m, _ = torch.vmap(lambda x: fa.merge_softmax_stats((x, x), (x, x)))(torch.randn(0, 5))
    assert m.shape == (0, 5)
