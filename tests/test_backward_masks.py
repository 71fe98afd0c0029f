"""The gradient of a float mask in Triton: whatever it is broadcast to, what is not finite, tiles that nobody sees."""

from __future__ import annotations

import functools
import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite import tiled_backward
from flashattn_lite.kernels import backward_launch
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.reference import attention_reference
from tests.test_backward_kernels import tensors_of

pytestmark = pytest.mark.usefixtures("where_kernels_run")

BATCH, HEADS, LEN_Q, LEN_K, DIM = 2, 4, 40, 70, 16
SHAPES = [
    (BATCH, HEADS, LEN_Q, LEN_K),
    (1, HEADS, LEN_Q, LEN_K),
    (BATCH, 1, LEN_Q, LEN_K),
    (HEADS, 1, LEN_K),
    (BATCH, 1, 1, LEN_K),
    (LEN_Q, LEN_K),
    (LEN_K,),
]
OPTIONS = [{}, {"causal": True}, {"window": (9, 5), "q_start": 12, "softcap": 2.0}, {"kv_lens": [50, 0], "scale": -0.3}]
ALL_PAIRS = [  # the interpreter takes some seconds for each
    pytest.param(shape, options, marks=() if (i - j) % len(OPTIONS) == 1 else pytest.mark.gpu)
    for i, shape in enumerate(SHAPES)
    for j, options in enumerate(OPTIONS)
]


def inputs_of(device, shape, dtype=None, dim=DIM):
    """(q, k, v, mask, d_out); two query heads share a key head."""
    generator = torch.Generator().manual_seed(0)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    shapes = ((HEADS, LEN_Q, dim), (HEADS // 2, LEN_K, dim), (HEADS // 2, LEN_K, dim), (HEADS, LEN_Q, dim))
    q, k, v, d_out = (torch.randn(BATCH, *each, generator=generator).to(device, dtype) for each in shapes)
    return q, k, v, torch.randn(shape, generator=generator).to(device), d_out


def gradients(function, of, q, k, v, mask, d_out, **options):
    """Of the tensors named."""
    given = {"q": q, "k": k, "v": v, "mask": mask}
    leaves = [given[name].detach().requires_grad_() for name in of]
    given.update(zip(of, leaves, strict=True))
    if "kv_lens" in options:
        options["kv_lens"] = torch.tensor(options["kv_lens"], dtype=torch.int32, device=q.device)
    return torch.autograd.grad(function(**given, **options), leaves, d_out)


def gradient(function, *tensors, **options):
    return gradients(function, ["mask"], *tensors, **options)[0]


@pytest.fixture
def told(monkeypatch):
    """Whether the kernels were asked for the gradient of a mask, call by call."""
    asked = []
    prepare = backward_launch.prepare
    watched = lambda problem, inputs, d_out, needs, target: (
        asked.append(needs[3]) or prepare(problem, inputs, d_out, needs, target)
    )
    monkeypatch.setattr(backward_launch, "prepare", watched)
    monkeypatch.setattr("flashattn_lite.calls._gradients", {})
    return asked


@pytest.mark.parametrize(("shape", "options"), ALL_PAIRS, ids=str)
def test_it_is_summed_over_what_it_is_broadcast_to(shape, options, device, told):
    q, k, v, mask, d_out = inputs_of(device, shape)
    got = gradient(fa.attention, q, k, v, mask, d_out, **options)
    assert told == [True]
    assert got.shape == mask.shape and got.dtype == mask.dtype
    wide = [x.double() for x in (q, k, v, mask, d_out)]
    want = gradient(attention_reference, *wide, **options)
    eps = 8 * torch.finfo(q.dtype).eps + 2e-6  # of the largest: P, dO and O are rounded to the dtype
    torch.testing.assert_close(got.double(), want, atol=eps * float(want.abs().max()), rtol=eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [33, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_head_dims(dim, dtype, device, told):
    """With the others, whose tiles leave room for the mask's."""
    tensors = inputs_of(device, SHAPES[1], dtype, dim)
    got = gradients(fa.attention, ("mask", "q", "k", "v"), *tensors, causal=True)
    assert bool(told) == (dtype == torch.float16 or dim <= 128)
    eps = 8 * torch.finfo(dtype).eps + 2e-6  # as above
    wide = (x.double() for x in tensors)
    wanted = gradients(attention_reference, ("mask", "q", "k", "v"), *wide, causal=True)
    for ours, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), want, atol=eps * float(want.abs().max()), rtol=eps)


@pytest.mark.parametrize(
    ("spoiled", "value", "shape"),
    [("q", math.nan, 1), ("k", math.nan, 1), ("k", math.inf, 1), ("v", -math.inf, 3), ("d_out", math.inf, 3)],
)
def test_what_is_not_finite_stays_where_it_is_seen(spoiled, value, shape, device):
    """NaN where a visible pair that shares the element has a bad member, as in plain torch; all else as before."""
    tensors = dict(zip(("q", "k", "v", "mask", "d_out"), inputs_of(device, SHAPES[shape]), strict=True))
    before = gradient(fa.attention, *tensors.values(), causal=True)
    tensors[spoiled][0, 1, 30, 3] = value
    got = gradient(fa.attention, *tensors.values(), causal=True)

    inputs = Inputs(*(tensors[name] for name in ("q", "k", "v", "mask")))
    problem = describe(inputs, causal=True, q_start=None, window_left=None, window_right=None, scale=DIM**-0.5,
                       softcap=None)  # fmt: skip
    out, lse = fa.attention(*inputs[:3], mask=inputs.mask, causal=True, return_lse=True)
    needs = (False, False, False, True, False)
    told = tiled_backward.backward(problem, inputs, out, lse, tensors["d_out"], torch.zeros_like(lse), needs)[3]
    assert torch.equal(got.isnan(), told.isnan())
    assert 0 < got.isnan().sum() < got.numel()
    if (spoiled, value) != ("k", math.inf):  # which takes its weight from rows whose score it makes -inf
        assert torch.equal(got[~got.isnan()], before[~got.isnan()])


def test_a_key_that_nobody_sees_spoils_no_gradient(device):
    """Of one mask for all queries, whose last tile of rows ends before its queries' tile."""
    q, k, v, mask, d_out = inputs_of(device, SHAPES[-1])
    before = gradient(fa.attention, q, k, v, mask, d_out, causal=True, q_start=0)
    k[:, :, LEN_Q + 5], v[:, :, LEN_Q + 6] = math.nan, math.inf
    assert torch.equal(gradient(fa.attention, q, k, v, mask, d_out, causal=True, q_start=0), before)


def test_a_tile_that_is_seen_in_one_corner_is_not_left_out(device):
    """Three keys around each query: two of them in another tile than all others, whether of 32 or of 64."""
    q, k, v = tensors_of(device, torch.float32, batch=1, heads=1, heads_kv=1, lengths=(70, 70), dim_v=DIM)
    tensors, options = (q, k, v, q.new_zeros(70, 70), torch.ones_like(v)), {"window": (2, 0), "q_start": 1}
    got = gradient(fa.attention, *tensors, **options)
    want = gradient(attention_reference, *(x.double() for x in tensors), **options)
    torch.testing.assert_close(got.double(), want, atol=4e-6 * float(want.abs().max()), rtol=4e-6)


def test_sequences_of_other_lengths_share_a_mask(device):
    """A tile that nobody sees in the first is seen in the second."""
    tensors, options = inputs_of(device, SHAPES[1], torch.float32), {"kv_lens": [3, LEN_K], "causal": True}
    got = gradient(fa.attention, *tensors, **options)
    want = gradient(attention_reference, *(x.double() for x in tensors), **options)
    torch.testing.assert_close(got.double(), want, atol=4e-6 * float(want.abs().max()), rtol=4e-6)


def test_numbers_that_hide_have_no_gradient(device):
    """-inf in the mask, keys that the window and the lengths hide: 0, not NaN."""
    q, k, v, mask, d_out = inputs_of(device, SHAPES[0])
    mask[0, :, :, 3], mask[1, :, 7] = -math.inf, -math.inf
    got = gradient(fa.attention, q, k, v, mask, d_out, window=(9, 5), kv_lens=[50, LEN_K])
    rows, keys = torch.arange(LEN_Q, device=device)[:, None], torch.arange(LEN_K, device=device)
    for entry, length in enumerate((50, LEN_K)):
        at = rows + length - LEN_Q
        seen = (keys >= at - 9) & (keys <= at + 5) & (keys < length) & (mask[entry] > -math.inf)
        assert not got[entry][~seen].any()
        assert got[entry][seen].count_nonzero() > 0.9 * seen.sum()


@pytest.mark.parametrize("kind", ["bool", "half", "float"])
@pytest.mark.parametrize(
    ("len_k", "offset", "step"),
    [(72, 0, 1), pytest.param(72, 4, 1, marks=pytest.mark.gpu), pytest.param(68, 2, 1, marks=pytest.mark.gpu)]
    + [pytest.param(*layout, marks=pytest.mark.gpu) for layout in ((71, 0, 1), (72, 1, 1), (72, 0, 2), (64, 0, -1))],
)
def test_masks_that_lie_anywhere(kind, len_k, offset, step, device):
    """As many keys come by one load as lie side by side at whole addresses; step -1: keys are the slowest dimension."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(BATCH, HEADS, n, DIM).to(device, dtype) for n in (LEN_Q, len_k, len_k, LEN_Q))
    wide = torch.randn((HEADS, len_k, LEN_Q) if step < 0 else (HEADS, LEN_Q, offset + step * len_k)).to(device)
    wide = wide < 1 if kind == "bool" else wide.to(dtype if kind == "half" else torch.float32)
    mask = wide.mT if step < 0 else wide[..., offset::step]
    if kind != "bool":  # what lies past the lengths is read with its neighbours, and nothing is made of it
        mask[..., 53:] = math.nan
    options = {"kv_lens": [53, 7], "causal": True}
    of = ("q", "k", "v") if kind == "bool" else ("q", "k", "v", "mask")
    got = gradients(functools.partial(fa.attention, backend="triton"), of, q, k, v, mask, d_out, **options)
    exact = (x if x.dtype == torch.bool else x.double().nan_to_num(0.0) for x in (q, k, v, mask, d_out))
    wanted = gradients(attention_reference, of, *exact, **options)
    eps = 8 * torch.finfo(dtype).eps + 2e-6  # as above
    for ours, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), want, atol=eps * float(want.abs().max()), rtol=eps)


def test_a_key_that_a_float_mask_hides_spoils_no_gradient(device):
    """But of the row that sees it."""
    q, k, v = tensors_of(device, torch.float32, batch=1)
    mask = torch.zeros(40, 70, device=device)
    mask[:, 20] = -math.inf
    mask[3, 20] = 0

    def run(k):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(fa.attention(*leaves, mask=mask).sum(), leaves)

    before = run(k)
    k = k.clone()
    k[:, :, 20, 3] = math.nan
    got = run(k)
    others = [i for i in range(40) if i != 3]
    assert torch.equal(got[0][:, :, others], before[0][:, :, others]) and got[0][:, :, 3].isnan().all()


def test_keys_past_the_length_have_no_gradient(device):
    """Without causality too, which would hide them from most rows."""
    q, k, v = (x.requires_grad_() for x in tensors_of(device, torch.float32))
    lens = torch.tensor([50, 0], dtype=torch.int32, device=device)
    fa.attention(q, k, v, kv_lens=lens).square().sum().backward()
    assert not k.grad[0, :, 50:].any() and not v.grad[0, :, 50:].any()
    assert not k.grad[1].any() and not v.grad[1].any()


def test_a_sink_of_no_weight_beside_rows_that_see_nothing(device):
    """Both have gradients of 0, not NaN."""
    tensors = (*tensors_of(device, torch.float32), torch.tensor([-math.inf, 0.5, 1.0, -math.inf], device=device))
    lens = torch.tensor([50, 0], dtype=torch.int32, device=device)

    def run(function, dtype):
        leaves = [x.to(dtype).detach().requires_grad_() for x in tensors]
        out = function(*leaves[:3], sinks=leaves[3], kv_lens=lens, causal=True)
        return torch.autograd.grad(out.square().sum(), leaves)

    for got, want in zip(run(fa.attention, torch.float32), run(attention_reference, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
