"""The CPU path: a row has its bits whatever shares the call with it, in every layout; what tiles share is bounded."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

import flashattn_lite as fa
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.testing.tensors import lay_out
from flashattn_lite.tiles import MOST_BIASES, TileShape, sequences

LAYOUTS = {
    "columns two apart": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "columns as far apart as the keys": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).mT,
    "entries an odd step apart": lambda *shape: lay_out(torch.randn(shape), "padded entries"),
    "rows an odd step apart": lambda *shape: lay_out(torch.randn(shape), "padded rows"),
    "rows an odd step apart, before heads": lambda b, h, n, d: torch.randn(b, n, h, d + 5)[..., :d].transpose(1, 2),
    "at an odd address": lambda *shape: torch.randn(math.prod(shape) + 1)[1:].view(shape),
    "one for the batch": lambda *shape: torch.randn(1, *shape[1:]).expand(shape),
    "one row for all": lambda b, h, n, d: torch.randn(b, h, 1, d).expand(b, h, n, d),
    "rows that overlap": lambda b, h, n, d: torch.randn(b, h, 8 * n + d).unfold(-1, d, 8)[:, :, :n],
    "one for all heads": lambda b, h, *rest: torch.randn(b, 1, *rest).expand(b, h, *rest),
}


def result(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None) -> list[Tensor]:
    """out, or the gradients of q, k and v."""
    if d_out is None:
        return [fa.attention(q, k, v, backend="tiled")]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return list(torch.autograd.grad(fa.attention(*leaves, backend="tiled"), leaves, d_out))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("laid", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sequence_and_a_head_have_their_bits_however_they_lie(laid, dtype, backward, monkeypatch):
    """A product of one slot must be that of many, and one of a view that of a copy."""
    torch.manual_seed(0)
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", functools.partial(draw, dtype=dtype))
    for _ in range(8 if backward else 25):
        heads, len_q, len_k = (int(torch.randint(1, most, ())) for most in (3, 60, 200))
        dim = 8 * int(torch.randint(1, 20, ()))
        q, k, v, d_out = (LAYOUTS[laid](2, heads, length, dim) for length in (len_q, len_k, len_k, len_q))
        tensors = (q, k, v, d_out if backward else None)
        whole = result(*tensors)
        for alone in ((slice(1, 2),), (slice(None), slice(0, 1))):
            of_one = result(*(x if x is None else x[alone] for x in tensors))
            assert all(torch.equal(x[alone], one) for x, one in zip(whole, of_one, strict=True))


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "all": {"window": (40, 3), "softcap": 3.0, "sinks": torch.linspace(-1, 2, 4)},
}
LENGTHS = (5, 5, 5, 3, 0, 0, 3, 3, 70, 70), (9, 9, 9, 9, 4, 4, 0, 0, 130, 130)  # of q and k


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_neighbours_of_one_length_have_the_bits_that_they_have_alone(dtype, options):
    """In a packed batch they are computed as a dense one."""
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in LENGTHS)
    q, d_out = torch.randn(2, sum(LENGTHS[0]), 4, 24, dtype=dtype)
    k, v = torch.randn(sum(LENGTHS[1]), 2, 2, 24, dtype=dtype).unbind(1)
    lens = torch.tensor([9, 2, 0, 9, 4, 4, 0, 0, 130, 101], dtype=torch.int32)

    def results(tensors: tuple[Tensor, ...], cu_q: Tensor, cu_k: Tensor, lens: Tensor) -> list[Tensor]:
        """Rows first: (out, lse, dq), (dk, dv)."""
        *leaves, d_out = (x.detach().requires_grad_() for x in tensors)
        told = options | {"kv_lens": lens, "return_lse": True, "backend": "tiled"}
        out, lse = fa.attention_varlen(*leaves, cu_q, cu_k, **told)
        return [out, lse.T, *torch.autograd.grad(out, leaves, d_out)]

    whole = results((q, k, v, d_out), cu_q, cu_k, lens)
    for b in range(len(lens)):
        m, n = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = (cu[b : b + 2] - cu[b] for cu in (cu_q, cu_k))
        of_one = results((q[m], k[n], v[n], d_out[m]), *alone, lens[b : b + 1])
        for x, one, part in zip(whole, of_one, (m, m, m, n, n), strict=True):
            assert torch.equal(x[part], one), b


@pytest.mark.parametrize(("device", "together"), [("cpu", [3, 1, 2, 2]), ("meta", [1] * 8)])
def test_neighbours_of_one_length_are_computed_together_on_the_cpu(device, together):
    """Elsewhere products of many slots have other bits than those of one."""
    q, k = torch.randn(sum(LENGTHS[0]), 4, 24, device=device), torch.randn(sum(LENGTHS[1]), 2, 24, device=device)
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in LENGTHS)
    inputs = Inputs(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    plain = dict.fromkeys(("q_start", "window_left", "window_right", "softcap"))
    found = [seq.q.shape[0] for seq in sequences(describe(inputs, causal=True, scale=1.0, **plain), inputs)]
    assert found == together


def test_what_positions_hide_is_kept_for_few_tiles():
    q, k = torch.randn(2, 4, 23, 16), torch.randn(2, 4, 37, 16)
    plain = dict.fromkeys(("q_start", "window_left", "window_right", "softcap"))
    inputs = Inputs(q, k, k)
    (of,) = sequences(describe(inputs, causal=True, scale=1.0, **plain), inputs)
    most = 0
    for tile in (tile for tiles in of.row_tiles(TileShape(rows=5, keys=7, slots=4)) for tile in tiles):
        for n, _ in tile.visited():
            tile.bias(n, torch.float32)
            most = max(most, len(of.biases))
    assert most == MOST_BIASES


def test_a_neighbours_length_does_not_decide_what_overflows():
    """P that is 0 times dP that is infinite is 0 in a tile that all rows see whole, as in one that some do not."""
    q, k, v = (torch.zeros(2, 1, rows, 8) for rows in (4, 512, 512))
    q[..., 0], k[:, :, 0, 0] = 1, 600
    v[:, :, 1:, 0] = 1e20

    def gradients(lens):
        inputs = [x[: len(lens)].clone().requires_grad_() for x in (q, k, v)]
        out = fa.attention(*inputs, kv_lens=torch.tensor(lens, dtype=torch.int32), backend="tiled")
        d_out = torch.zeros_like(out)
        d_out[..., 0] = 1e25
        return [x[0] for x in torch.autograd.grad(out, inputs, d_out)]

    alone = gradients([512])
    for lens in ([512, 512], [512, 3]):
        for ours, theirs in zip(gradients(lens), alone, strict=True):
            assert torch.equal(ours, theirs) and not ours.isnan().any()


def test_a_neighbour_that_has_settled_does_not_end_the_first_pass_for_others():
    """A huge score in a row that is done with it, where the others see no key of the first tile."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, 8, generator=generator) for rows in (9, 4400, 4400))
    k[:, :, 0] = 100
    mask = torch.ones(9, 4400, dtype=torch.bool)
    mask[1:, :4096] = False
    huge = q.clone()
    huge[:, :, 0] = 10
    few, many = (fa.attention(x, k, v, mask=mask, return_lse=True, backend="tiled") for x in (q, huge))
    assert all(torch.equal(a[:, :, 1:], b[:, :, 1:]) for a, b in zip(few, many, strict=True))


def test_an_unseen_key_has_no_sign_in_its_gradient():
    q, k, v = (torch.randn(2, 1, 4, 8) for _ in range(3))

    def gradient(lens):
        x = k[: len(lens)].clone().requires_grad_()
        lens = torch.tensor(lens, dtype=torch.int32)
        fa.attention(q[: len(lens)], x, v[: len(lens)], kv_lens=lens, scale=-0.3, backend="tiled").sum().backward()
        return x.grad[0]

    assert not gradient([0]).signbit().any() and not gradient([0, 4]).signbit().any()
