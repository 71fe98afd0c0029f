"""NaN, infinities and the ends of a dtype's range, row by row: who has them, who must not, and what stays finite."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import Case, matches_oracle
from tests.test_attention import close, qkv
from tests.test_decode import cache, int32

INFINITIES = [math.inf, -math.inf]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [5, 40])
def test_a_mask_that_is_no_number_makes_its_row_nan(device, rows, value):
    """As plain torch has it, +inf too; other rows keep their bits."""
    q, k, v = qkv(device, rows, 40)
    mask = torch.zeros(rows, 40, device=device)
    before = fa.attention(q, k, v, mask=mask)
    mask[2, 3] = value
    out = fa.attention(q, k, v, mask=mask)
    others = [i for i in range(rows) if i != 2]
    assert out[:, :, 2].isnan().all()
    assert torch.equal(out[:, :, others], before[:, :, others])


@pytest.mark.parametrize("rows", [1, 4])
def test_the_lowest_number_hides_nothing_from_few_rows(device, rows):
    q, k, v = qkv(device, rows, 40)
    lowest = torch.full((40,), torch.finfo(torch.float32).min, device=device)
    lowest[30:] = -math.inf
    out = fa.attention(q, k, v, mask=lowest)
    close(out, v[:, :, :30].mean(2, keepdim=True).expand(-1, 2, rows, -1))


def test_padding_hides_what_causality_shows(device):
    q, k, v = qkv(device, 4, 40)
    matches_oracle(fa.attention, Case(q, k, v, mask=torch.arange(40, device=device) >= 7, causal=True))


@pytest.mark.parametrize("rows", [5, 40])
def test_a_nan_of_float16_stays_one(device, rows):
    """Where finite numbers are clamped into float16's range."""
    q, k, v = qkv(device, rows, 40, dtype=torch.float16)
    q[:, :, 2, 3] = math.nan
    assert fa.attention(q, k, v)[:, :, 2].isnan().all()


def test_a_sum_of_powers_that_overflows(device):
    """float32 holds each, not their sum; the values are so small that it holds acc."""
    q, k, v = qkv(device, 40, 128)
    q[:], k[:], v = 0, 0, v * 2**-10
    q[..., 0] = 1
    k[:, :, 64:, 0] = 127.5 * math.log(2)
    matches_oracle(fa.attention, Case(q, k, v, scale=1.0))


@pytest.mark.parametrize("power", [25, 27, 28, 29, 30])
def test_references_past_what_float32_holds_to_within_1(device, power):
    """A product that is rounded before it is subtracted. Rows of two nearly equal keys are left out."""
    q, k, v = qkv(device, 40, 70, dtype=torch.float16)
    q, scale = q + 3 * q.sign(), 2.0**power / 64
    highest, second = (q.double() @ k.double().mT).topk(2, -1).values.unbind(-1)
    clear = highest - second > 2**-12 * highest
    exact = attention_reference(q.double(), k.double(), v.double(), scale=scale)
    close(fa.attention(q, k, v, scale=scale)[clear], exact[clear], 4e-3)
    assert clear.float().mean() > 0.8


def test_rows_done_again_have_the_bits_of_before(device):
    """By the same references, although their later scores are larger."""
    q, k, v = qkv(device, 96, 96)
    k[:, :, 64:] *= 2
    expected = fa.attention(q, k, v, causal=True)
    v[:, :, 90:] = math.nan
    assert torch.equal(fa.attention(q, k, v, causal=True)[:, :, :90], expected[:, :, :90])


@pytest.mark.parametrize("value", INFINITIES)
@pytest.mark.parametrize("right", [0, 2])
def test_an_infinity_reaches_whose_window_has_it(device, right, value):
    q, k, v = qkv(device, 130, 130)
    v[:, :, 120, 3] = value
    out = fa.attention(q, k, v, window=(9, right))
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[:, :, 120 - right : 130, 3] = True
    assert torch.equal(out == value, seen) and out[~seen].isfinite().all()


@pytest.mark.parametrize("value", INFINITIES)
@pytest.mark.parametrize("rows", [1, 4])
def test_an_infinity_of_no_weight_stays_one_in_decoding(device, rows, value):
    """Where its split weighs nothing beside the others, and all splits nothing beside a sink."""
    q, k, v = cache(device, batch=1, rows=rows, keys=700)  # more than one split holds, anywhere
    q[..., 0], k[..., 0] = 1e3, 0
    k[:, :, 600:, 0] = 1e3
    v[:, :, 20, 3] = value
    for sinks in (None, torch.full((4,), 1e30, device=device)):
        out = fa.attention_decode(q, k, v, int32([690], device), sinks=sinks)
        assert (out[..., 3] == value).all() and out[..., 4:].isfinite().all()


@pytest.mark.parametrize("value", INFINITIES)
@pytest.mark.parametrize("rows", [1, 4])
def test_an_infinity_of_float16_stays_one_in_decoding(device, rows, value):
    q, k, v = cache(device, batch=1, rows=rows, dtype=torch.float16)
    v[:, :, 20, 3] = value
    assert (fa.attention_decode(q, k, v, int32([300], device))[..., 3] == value).all()


def test_the_largest_half_stays_finite_in_decoding(device):
    """Weights just above the middle of two halfs are all rounded up: by as much as takes a mean of 65504s to inf."""
    q = torch.ones(1, 1, 1, 16, device=device, dtype=torch.float16)
    k = torch.zeros(1, 1, 140, 16, device=device, dtype=torch.float16)
    k[..., 0] = 1
    k[:, :, ::16, 0] = 0  # so that each split has its own maximum
    scale = math.log(0.5 + 2**-12 + 2**-15)
    out = fa.attention_decode(q, k, torch.full_like(k, 65504.0), int32([140], device), scale=scale)
    assert out.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_the_first_rows_alone_see_stays_theirs_in_decoding(device, value):
    """Behind the left edge of the later rows' windows, which have no right one."""
    q, k, v = cache(device, batch=1, rows=4)
    run = lambda: fa.attention_decode(q, k, v, int32([300], device), causal=False, window=(50, None))
    before = run()
    close(before, attention_reference(q, k, v, window=(50, None), kv_lens=int32([300], device)))
    v[:, :, 247, 3] = value  # rows 0 and 1 see it
    out = run()
    assert torch.equal(out[:, :, 2:], before[:, :, 2:]) and not out[:, :, :2, 3].isfinite().any()


def test_more_keys_than_a_length_counts():
    """Lengths are int32, keys need not be."""
    k = torch.randn(1, 1, 1, 4).expand(1, 1, 2**31, 4)
    q, lens = torch.randn(1, 1, 1, 4), torch.tensor([5], dtype=torch.int32)
    out = fa.attention(q, k, k, kv_lens=lens, backend="tiled")
    torch.testing.assert_close(out, k[:, :, :1])
    torch.testing.assert_close(fa.attention_decode(q, k, k, lens, causal=False, backend="tiled"), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("score", [-16.5, -10.0, -0.75, 3.0])
def test_weights_below_1_do_not_take_values_out_of_the_range(score, dtype):
    """On the tiled path, whose rows stay at the reference 0 while their sums allow it."""
    tiny = torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).tiny
    q, k = torch.ones(1, 1, 2, 1, dtype=dtype), torch.full((1, 1, 3, 1), score, dtype=dtype)
    v = (tiny * torch.tensor([1.0, 24.0, 0.0, 2.0**30], dtype=torch.float64)).to(dtype).expand(1, 1, 3, 4)
    out = fa.attention(q, k, v, scale=1.0, backend="tiled")
    torch.testing.assert_close(
        out.double() / tiny, v[:, :, :2].double() / tiny, rtol=torch.finfo(dtype).eps * 2, atol=0
    )
