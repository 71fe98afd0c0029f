"""Directed cases for attention on each backend: what hypothesis would find late. The laws are in test_laws.py."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference, attention_varlen_reference
from flashattn_lite.testing import Case, matches_oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def qkv(device, len_q, len_k, dim=16, heads=2, heads_kv=1, batch=1, dtype=torch.float32):
    shapes = ((batch, heads, len_q, dim), (batch, heads_kv, len_k, dim), (batch, heads_kv, len_k, dim))
    return [randn(device, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def close(out, expected, eps=4e-6):
    torch.testing.assert_close(out.double(), expected.double(), atol=eps, rtol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [(1, 1), (3, 70), (80, 80), (96, 33), (192, 128), (256, 256)], ids=str)
def test_head_dims(device, dtype, dim):
    q, k = randn(device, 1, 2, 35, dim[0], dtype=dtype), randn(device, 1, 1, 40, dim[0], dtype=dtype, seed=1)
    v = randn(device, 1, 1, 40, dim[1], dtype=dtype, seed=2)
    matches_oracle(fa.attention, Case(q, k, v, causal=True))


@pytest.mark.parametrize("len_q", [1, 31, 64, 129])
@pytest.mark.parametrize("len_k", [1, 33, 128, 200])
def test_lengths_and_window(device, len_q, len_k):
    q, k, v = qkv(device, len_q, len_k)
    for options in ({}, {"causal": True}, {"window": (20, 5)}, {"causal": True, "q_start": 3}, {"window": (0, 0)}):
        out, lse = fa.attention(q, k, v, return_lse=True, **options)
        expected, exact = attention_reference(q.double(), k.double(), v.double(), return_lse=True, **options)
        close(out, expected)
        close(lse, exact)


def test_far_diagonals_do_not_overflow(device):
    q, k, v = qkv(device, 5, 7)
    for q_start in (2**31 + 7, 2**40, -(2**40)):
        for options in ({"causal": True}, {"window": (2**33, 2**33)}, {"window": (2**45, 0)}):
            expected = attention_reference(q.double(), k.double(), v.double(), q_start=q_start, **options)
            close(fa.attention(q, k, v, q_start=q_start, **options), expected)


@pytest.mark.parametrize(("scale", "softcap", "entry"), [(1e-60, 1.0, 1e30), (1e38, 0.1, 1e-20), (1e-90, 1e-30, 1e30)])
def test_float64_has_its_own_ends(scale, softcap, entry):
    """Of scale / softcap, and so soft caps beyond those of float32."""
    q = torch.full((1, 1, 1, 1), entry, dtype=torch.float64)
    k, v = torch.cat([q, 0 * q], 2), torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 2, 1)
    out, lse = fa.attention(q, k, v, scale=scale, softcap=softcap, return_lse=True)
    logit = softcap * math.tanh(scale * entry**2 / softcap)
    assert out.item() == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-14)
    assert lse.item() == pytest.approx(math.log1p(math.exp(logit)), rel=1e-6)  # which is float32


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "softcap"), [(1.6e38, 1e-3), (-1e38, 0.2), (0.3, 1.2e-38), (1e-30, 1e30)])
def test_a_scale_far_from_its_softcap(device, dtype, backend, scale, softcap):
    """A product of 0 is 0 however large the factor, and no query becomes infinite on the way."""
    q, k, v = qkv(device, 5, 40, dtype=dtype)
    q[..., 2, :] = 0
    options = {"scale": scale, "softcap": softcap}
    wide = (x.double() for x in (q, k, v))
    expected, exact = attention_reference(*wide, return_lse=True, **options)
    out, lse = fa.attention(q, k, v, return_lse=True, backend=backend, **options)
    close(out, expected, eps=4 * torch.finfo(dtype).eps)
    close(lse, exact)
    if backend == "auto":
        lens = torch.tensor([40], dtype=torch.int32, device=device)
        close(fa.attention_decode(q, k, v, lens, causal=False, **options), expected, eps=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_a_cap_that_float32_cannot_divide_the_scale_by(device, backend):
    """scale / softcap is 0 there; the cap is far above all scores, so that they stay as they are."""
    q, k, v = qkv(device, 5, 48)
    q[..., 0], k[..., 0] = 1e5, torch.linspace(-1e5, 1e5, 48, device=device)
    options = {"scale": 1e-8, "softcap": 1e38}
    expected, exact = attention_reference(*(x.double() for x in (q, k, v)), return_lse=True, **options)
    out, lse = fa.attention(q, k, v, return_lse=True, backend=backend, **options)
    close(out, expected, 1e-5)
    close(lse, exact, 1e-5)
    assert exact.max() > 90


@pytest.mark.parametrize("growth", [0.5, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_grow_from_tile_to_tile(device, growth, dtype):
    """A reference taken from the first tiles is far too low for the last: such rows must be noticed and redone."""
    q, k, v = qkv(device, 40, 700, dtype=dtype)
    q[..., 0] = 1
    k[..., 0] = torch.arange(700, device=device) / 700 * growth * 4  # scale is 1/4
    matches_oracle(fa.attention, Case(q, k, v))
    matches_oracle(fa.attention, Case(q, k.flip(2), v, causal=True))


@pytest.mark.parametrize(("first", "last"), [(0, 1 / 2), (1 / 2, 1), (1 / 4, 1), (0, 7 / 8)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_below_float32_set_no_reference(device, dtype, causal, first, last):
    """Products that overflow to -inf are weights of 0: a row that begins with a tile of them still sees the others."""
    for len_q, len_k, backend in ((9, 64, "auto"), (200, 512, "auto"), (200, 1024, "triton")):
        if len_k == 64 or device.type == "cuda":
            q, k, v = qkv(device, len_q, len_k, dtype=dtype)
            q[..., 0], k[..., 0] = 1e20, 0
            k[:, :, int(first * len_k) : int(last * len_k), 0] = -1e20
            matches_oracle(functools.partial(fa.attention, backend=backend), Case(q, k, v, causal=causal))


@pytest.mark.parametrize("size", [1e3, 1e10, 1e17])
def test_huge_logits_pick_the_largest(device, size):
    """A scale folded into a fused multiply-add overflows or vanishes here, because the maximum is rounded."""
    q, k, v = qkv(device, 9, 300)
    q, k = q * size**0.5, k * size**0.5
    scores = q.double() @ k.double().mT / 4
    out, lse = fa.attention(q, k, v, return_lse=True)
    close(lse / size, scores.logsumexp(-1) / size)
    close(out, scores.softmax(-1) @ v.double(), 1e-2 if size < 1e4 else 4e-6)  # close calls exist at 1e3 only


@pytest.mark.parametrize("len_k", [1, 70])
def test_the_largest_half_stays_finite(device, len_k):
    """Weights are rounded to V's dtype: without care, by as much as takes a mean of 65504s to inf."""
    q, k, v = qkv(device, 300, len_k, dtype=torch.float16)
    v[:] = 65504.0
    close(fa.attention(q * 300, k * 300, -v), -torch.full_like(q, 65504.0), 2**-10)
    lens = torch.full((40,), len_k, dtype=torch.int32, device=device)
    one_token = q[:, :, :40].permute(2, 1, 0, 3)
    decoded = fa.attention_decode(one_token * 300, k.expand(40, -1, -1, -1) * 300, v.expand(40, -1, -1, -1), lens)
    for out in (fa.attention(q * 300, k * 300, v), decoded):
        close(out, torch.full_like(out, 65504.0), 2**-10)  # an eps of float16


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_hides_behind_causality_stays_there(device, value):
    q, k, v = qkv(device, 90, 90)
    expected = fa.attention(q, k, v, causal=True)
    v[:, :, 70:, 3] = value
    k[:, :, 80:] = value
    out = fa.attention(q, k, v, causal=True)
    assert torch.equal(out[:, :, :70], expected[:, :, :70])
    close(out[:, :, 70:80, :3], expected[:, :, 70:80, :3])  # these rows see the value, and were computed once more
    seen = out[:, :, 70:80, 3]
    assert (seen.isnan() if math.isnan(value) else seen == value).all()


def test_both_infinities_in_sight_are_nan(device):
    q, k, v = qkv(device, 3, 50)
    v[:, :, 10, 0], v[:, :, 20, 0] = math.inf, -math.inf
    out = fa.attention(q, k, v)
    assert out[..., 0].isnan().all()
    assert out[..., 1:].isfinite().all()


def test_sinks(device):
    q, k, v = qkv(device, 5, 40)
    for sinks in ([0.0, 3.0], [-math.inf, 90.0], [-200.0, -math.inf]):
        sinks = torch.tensor(sinks, device=device)
        out, lse = fa.attention(q, k, v, sinks=sinks, return_lse=True)
        expected, exact = attention_reference(q.double(), k.double(), v.double(), sinks=sinks.double(), return_lse=True)
        close(out, expected)
        close(lse, exact)
    nothing, lse = fa.attention(q, k[:, :, :0], v[:, :, :0], sinks=sinks, return_lse=True)
    assert not nothing.any()
    assert torch.equal(lse, sinks[None, :, None].expand_as(lse))


def test_kv_lens_out_of_range_are_clamped(device):
    q, k, v = qkv(device, 4, 20, batch=3)
    lens = torch.tensor([-5, 20, 1000], dtype=torch.int32, device=device)
    out, lse = fa.attention(q, k, v, kv_lens=lens, return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    close(out[1:], attention_reference(q[1:].double(), k[1:].double(), v[1:].double()))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (9, 2), "softcap": 3.0}, {"causal": True, "q_start": 1}]
)
def test_packed(device, options):
    lens_q, lens_k = [5, 0, 70, 1], [9, 3, 65, 0]
    q, k, v = (randn(device, sum(lens), h, 16, seed=h) for lens, h in ((lens_q, 4), (lens_k, 2), (lens_k, 2)))
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32) for lens in (lens_q, lens_k))
    out, lse = fa.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    expected, exact = attention_varlen_reference(
        q.double(), k.double(), v.double(), cu_q, cu_k, return_lse=True, **options
    )
    close(out, expected)
    close(lse, exact)
    with_limits = fa.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=100, max_seqlen_k=100, **options)
    close(with_limits, expected)


def test_a_length_past_the_keys_counts_as_all(device):
    """In the definition and in every backend: where the last query stands follows from the clamped length."""
    q, k, v = qkv(device, 5, 12, batch=2)
    lens = torch.tensor([40, -3], dtype=torch.int32, device=device)
    want = attention_reference(q.double(), k.double(), v.double(), causal=True, kv_lens=lens.clamp(0, 12))
    close(attention_reference(q.double(), k.double(), v.double(), causal=True, kv_lens=lens), want)
    close(fa.attention(q, k, v, causal=True, kv_lens=lens), want)


def test_finite_masks_stay_finite(device):
    """Also those that float32 can't hold, in either direction, and in the definition."""
    q, k, v = qkv(device, 5, 7)
    lowest = torch.full((5, 7), torch.finfo(torch.float64).min, dtype=torch.float64, device=device)
    mean = v.mean(2, keepdim=True).expand(-1, 2, 5, -1)
    far = fa.attention(q, k, v, mask=lowest, return_lse=True)
    close(far[0], mean)
    close(attention_reference(q, k, v, mask=lowest), mean)
    assert bool((far[1] > -2.36e38).all() and (far[1] < -2.35e38).all())  # its log2 is float32's lowest number
    near = fa.attention(q, k, v, return_lse=True)
    for merged, lse in (fa.merge_attention([far, near]), fa.merge_attention([near, far])):
        assert torch.equal(merged, near[0])
        assert torch.equal(lse, near[1])
    highest = torch.zeros(5, 7, device=device)
    highest[:, 1] = torch.finfo(torch.float32).max
    assert torch.equal(fa.attention(q, k, v, mask=highest), v[:, :, 1:2].expand(-1, 2, 5, -1))


def test_fp32_is_fp32(device):
    """Full precision unless torch itself was allowed TF32: a product of 24-bit numbers tells them apart."""
    q = torch.full((1, 1, 1, 16), 1 + 2**-12, device=device)
    k = torch.cat([q, -q], 2)
    _, lse = fa.attention(q, k, k, scale=1.0, return_lse=True)
    exact = 16 * (1 + 2**-12) ** 2
    assert abs(lse.item() - exact) < 4e-6  # a few eps of 16; TF32 is off by 4e-3


@pytest.mark.parametrize("rows", [4, 24])
def test_small_inputs_of_any_stride(device, rows):
    """sinks, kv_lens and cu_seqlens as columns of something larger; of few rows by the kernels of decoding."""
    q, k, v = qkv(device, rows, 30, heads=6, heads_kv=2, batch=3)
    sinks = randn(device, 6, 5)[:, 2]
    lens = torch.tensor([[3, 99], [30, 99], [7, 99]], dtype=torch.int32, device=device)[:, 0]
    out, lse = fa.attention(q, k, v, sinks=sinks, kv_lens=lens, return_lse=True)
    same, same_lse = fa.attention(q, k, v, sinks=sinks.contiguous(), kv_lens=lens.contiguous(), return_lse=True)
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    cu = torch.tensor([[0, 9], [10, 9], [30, 9]], dtype=torch.int32, device=device)[:, 0]
    packed = k[0].transpose(0, 1)
    assert torch.equal(
        fa.attention_varlen(packed, packed, packed, cu, cu),
        fa.attention_varlen(packed, packed, packed, *[cu.clone()] * 2),
    )


@pytest.mark.parametrize(
    "dim", [(139, 7), (71, 9), (192, 8), (221, 16), (26, 8), (33, 8), (16, 16), (128, 16)], ids=str
)
@pytest.mark.parametrize("kind", ["plain", "mask", "kv_lens"])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.gpu)], ids=str)
def test_narrow_values_beside_rows_that_are_not_aligned(device, dim, kind, dtype):
    """On Hopper such tiles once read outside of shared memory."""
    on_gpu = device.type == "cuda"
    heads = (4, 2) if on_gpu else (2, 1)
    for len_q, len_k in ((19, 1), (19, 40), (19, 130), (70, 100)) if on_gpu else ((19, 1), (19, 40)):
        q = randn(device, 2, heads[0], len_q, dim[0], dtype=dtype)
        k = randn(device, 2, heads[1], len_k, dim[0], dtype=dtype)
        v = randn(device, 2, heads[1], len_k, 2 * dim[1], dtype=dtype)[..., 1::2]
        options = {"causal": True}
        if kind == "mask":
            options = {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device), "window": (None, 10)}
        elif kind == "kv_lens":
            options = {"kv_lens": torch.tensor([len_k, 1], dtype=torch.int32, device=device), "scale": 0.0}
        matches_oracle(fa.attention, Case(q, k, v, **options))


def test_a_small_share_of_a_small_sum_keeps_its_digits(device):
    """About 0 the only key weighs 2^-136, a subnormal; beside a sink of 2^-26 float32 holds it well."""
    q, k = torch.full((1, 1, 1, 1), -94.5, device=device), torch.ones(1, 1, 1, 1, device=device)
    v = torch.linspace(-1.0, 1.0, 15, device=device).view(1, 1, 1, 15)
    sinks = torch.tensor([-18.36], device=device)
    out = fa.attention(q, k, v, scale=1.0, sinks=sinks)
    exact = attention_reference(q.double(), k.double(), v.double(), scale=1.0, sinks=sinks.double())
    # Three roundings of a score of 94.5, and what the definition does not lose.
    torch.testing.assert_close(out.double(), exact, atol=0, rtol=3 * 94.5 * torch.finfo(torch.float32).eps)
