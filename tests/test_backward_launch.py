"""What the backward's launches are given and leave to each other: rows past a promise, gradients without strides."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import target as targets
from flashattn_lite.kernels import backward_launch
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.reference import attention_reference
from tests.exhaustive import one_in
from tests.targets import H200
from tests.test_backward_kernels import dtype_of, gradients, tensors_of, upstream_of

pytestmark = pytest.mark.usefixtures("where_kernels_run")


@pytest.mark.parametrize(
    ("spoiled", "options"),
    [(False, {"causal": False}), (False, {"causal": True, "q_start": 0}), (True, {"causal": True, "q_start": 0})],
    ids=["full", "causal", "beside one that is not finite"],
)
def test_rows_past_the_longest_sequence_that_was_promised_add_nothing(device, spoiled, options):
    """Forward, they are rows that no sequence covers: out 0, lse -inf. Nor where gradients are made once more."""
    promised, dtype = 37, dtype_of(device)
    q, k, v = tensors_of(device, dtype, batch=1, lengths=(100, 50))
    if spoiled:
        q[:, :, 33] = math.nan
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    out, lse = fa.attention(q, k, v, sinks=sinks, **options, scale=0.25, return_lse=True)
    q, k, v, out = (x[0].transpose(0, 1).contiguous() for x in (q, k, v, out))
    lse = lse[0].contiguous()
    out[promised:], lse[:, promised:] = 0, -math.inf
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (100, 50))
    inputs = Inputs(q, k, v, sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    problem = describe(inputs, **{"q_start": None} | options, window_left=None, window_right=None, scale=0.25,
                       softcap=None, max_seqlen_q=promised, max_seqlen_k=50)  # fmt: skip
    d_out, d_lse = upstream_of(out, lse)
    needs = (True, True, True, False, True)
    run = backward_launch.prepare(problem, inputs, d_out, needs, targets.of(q.device))
    got = run(inputs, out, lse, d_out, d_lse)
    shorter = inputs._replace(q=q[:promised], cu_seqlens_q=cu_q.clamp(max=promised))
    run = backward_launch.prepare(problem, shorter, d_out[:promised], needs, targets.of(q.device))
    rows = out[:promised], lse[:, :promised].contiguous(), d_out[:promised], d_lse[:, :promised].contiguous()
    want = run(shorter, *rows)
    assert not got[0][promised:].any()
    for ours, theirs in zip((got[0][:promised], got[1], got[2]), want, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert ours.isnan().any() == spoiled and not ours.isnan().all()
    torch.testing.assert_close(got[4], want[4], equal_nan=True)


def test_gradients_of_sums_have_no_strides(device):
    """Of out and of lse: one number, expanded."""
    leaves = [x.requires_grad_() for x in tensors_of(device, dtype_of(device))]
    out, lse = fa.attention(*leaves, causal=True, return_lse=True)
    summed = torch.autograd.grad(out.sum() + lse.sum(), leaves, retain_graph=True)
    whole = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert all(torch.equal(a, b) for a, b in zip(summed, whole, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_lse_that_comes_back_with_other_strides(device, packed):
    """As from hooks that offload what autograd keeps."""
    turned = 0

    def unpack(x):
        nonlocal turned
        if x.shape != lse.shape:
            return x
        turned += 1
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    tensors, tables = tensors_of(device, dtype_of(device)), ()
    if packed:
        tensors = [x[0].transpose(0, 1) for x in tensors]
        tables = [torch.tensor([0, 5, len(x)], dtype=torch.int32, device=device) for x in tensors[:2]]
    leaves = [x.requires_grad_() for x in tensors]
    call = fa.attention_varlen if packed else fa.attention
    limits = {"max_seqlen_q": len(leaves[0]), "max_seqlen_k": len(leaves[1])} if packed else {}

    out, lse = call(*leaves, *tables, causal=True, return_lse=True, **limits)
    upstream = upstream_of(out, lse)
    kept = torch.autograd.grad([out, lse], leaves, upstream)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        results = call(*leaves, *tables, causal=True, return_lse=True, **limits)
    again = torch.autograd.grad(results, leaves, upstream)
    assert turned == 1 and all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_a_sum_that_lse_hides_is_counted_anew(device):
    """Without a mask: scores so large that of their weights float32 holds three digits."""
    dtype = dtype_of(device)
    q, k, v = tensors_of(device, dtype, batch=1)
    tensors = (q * (8 if dtype == torch.float32 else 32), k * (8 if dtype == torch.float32 else 32), v)
    _, lse = attention_reference(*(x.double() for x in tensors), causal=True, return_lse=True)
    assert lse.max() > (256 if dtype == torch.float32 else 4096) * math.log(2)
    wanted = gradients(attention_reference, [x.double() for x in tensors], causal=True)
    for ours, want in zip(gradients(fa.attention, tensors, causal=True), wanted, strict=True):
        eps = 16 * torch.finfo(dtype).eps + 1e-4
        torch.testing.assert_close(ours.double(), want, atol=eps * float(want.abs().max()), rtol=eps)


@pytest.mark.parametrize(("masked", "dim", "size"), one_in(2, [False, True], [20, 64], [3e3, 1e4, 3e4, 1e5]))
def test_scores_of_millions_have_weights_of_0_or_1(device, masked, dim, size):
    """Past 2^23 what float32 rounds off a score is a factor of 2 in its weight; past 2^31 2^128."""
    q, k, v = tensors_of(device, torch.float32, batch=1, dim=dim)
    tensors, options = (q * size, k * size, v), {"causal": True}
    if masked:
        options["mask"] = torch.zeros(q.shape[2], k.shape[2], device=device)
    wanted = gradients(attention_reference, [x.double() for x in tensors], **options)
    for ours, want in zip(gradients(fa.attention, tensors, **options), wanted, strict=True):
        torch.testing.assert_close(ours.double(), want.double(), atol=1e-5 * float(want.abs().max()), rtol=1e-5)


@pytest.mark.parametrize(
    ("scores", "dtype"),
    one_in(
        2,
        [(1, -1e4), (1, -1e6), (1, -1e7), (1, -3e7), (1, -1e9), (100, None), (100, 0), (500, 0), (500, None)],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_weights_sum_to_1_whatever_is_left_of_scores(device, scores, dtype):
    """Scores of 1 beside -1e7, or of 1e6, keep few digits or none: the same ones in all launches."""
    size, mask = scores
    q, k, v = tensors_of(device, dtype, batch=1, dim=64)
    v.requires_grad_()
    if mask is not None:
        mask = torch.full((q.shape[2], k.shape[2]), float(mask), device=device)
    out = fa.attention(q * size, k * size, v, mask=mask)
    d_out, _ = upstream_of(out, out)
    (d_v,) = torch.autograd.grad(out, v, d_out)
    want = d_out.double().sum(2).unflatten(1, (v.shape[1], -1)).sum(2)
    eps = 8 * torch.finfo(dtype).eps + 1e-4  # P and the keys' rows of dV are rounded to the dtype, l and P by 1e-5
    torch.testing.assert_close(d_v.double().sum(2), want, atol=eps, rtol=eps)


def test_a_product_that_overflows_out_of_sight_shows_nowhere(device):
    """dO V^T of a pair that is not seen: 0 times infinity would be NaN. Nor does who sees it show in others."""
    q, k, v = tensors_of(device, torch.float32, batch=1, lengths=(40, 40))
    before = gradients(fa.attention, (q, k, v), causal=True)
    v[:, :, 39] = 3e38  # the last row alone sees it
    got = gradients(fa.attention, (q, k, v), causal=True)
    assert torch.equal(got[0][:, :, :39], before[0][:, :, :39])


@pytest.mark.parametrize("which", ["k", "v", "d_out"])
def test_tma_copies_both_that_are_streamed_or_neither(which):
    whole = lambda: torch.empty(2, 4, 512, 64, dtype=torch.bfloat16, device="meta")
    odd = lambda: torch.empty(2, 4, 512, 68, dtype=torch.bfloat16, device="meta")[..., :64]
    q, k, v, d_out = (odd() if name == which else whole() for name in ("q", "k", "v", "d_out"))
    plain = dict.fromkeys(("q_start", "window_left", "window_right", "scale", "softcap"))
    problem = describe(Inputs(q, k, v), causal=True, **plain)
    call = backward_launch.Call(problem, Inputs(q, k, v), d_out, (True, True, True, False, False), H200)
    for side in call.sides:
        assert (which not in (("q", "d_out") if side.keys else ("k", "v"))) == side.tile.TMA
