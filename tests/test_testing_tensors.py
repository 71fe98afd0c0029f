"""How the kit's tensors lie in memory, which a law may ask about."""

from __future__ import annotations

import math

import pytest
import torch

from flashattn_lite.testing import Case
from flashattn_lite.testing.gradients import within_range
from flashattn_lite.testing.oracle import expect, summing
from flashattn_lite.testing.results import assert_same_bits, assert_within
from flashattn_lite.testing.tensors import LAYOUTS, lay_out, make_numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_numbers(layout: str) -> None:
    for shape in ((2, 3, 5, 4), (5, 3), (2, 1, 0, 4), (0, 2, 3, 4), (1, 1, 1, 1)):
        x = torch.randn(shape)
        assert torch.equal(lay_out(x, layout), x)
    laid = lay_out(torch.randn(2, 3, 5, 4), layout)
    assert laid.is_contiguous() == (layout == "contiguous")


def test_a_contiguous_case_has_the_strides_of_a_new_tensor() -> None:
    """Of one sequence too: any step to a second one is contiguous to torch, and a law would compare two codes."""
    x = lay_out(torch.randn(2, 1, 9, 3), "padded entries")[:1]
    case = Case(x, x, x, mask=x[..., :1]).contiguous()
    assert x.is_contiguous() and x.stride() == (32, 27, 3, 1)
    assert case.q.stride() == case.k.stride() == case.v.stride() == (27, 27, 3, 1)
    assert case.mask is not None and case.mask.stride() == (9, 9, 1, 1) and torch.equal(case.q, x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_gradients_are_asked_of_lies_as_it_did(layout: str) -> None:
    x, mask = lay_out(100 * torch.randn(2, 3, 5, 4), layout), lay_out(100 * torch.randn(2, 3, 5, 5), layout)
    x[0, 0, 1, 0], mask[0, 0, 0, 0] = math.nan, -math.inf
    case = Case(x, x, x.expand(2, 3, 5, 4), mask=mask)
    within = within_range(case)
    for name, largest in (("q", 4), ("k", 4), ("v", 4), ("mask", 8)):
        given, got = getattr(case, name), getattr(within, name)
        assert got.stride() == given.stride() and got.data_ptr() != given.data_ptr()
        want = given.clamp(-largest, largest).where(given != -math.inf, given)  # NaN stays
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert within_range(Case(x, x, x, mask=mask > 0)).mask.dtype == torch.bool


def test_results_of_other_shapes_are_told() -> None:
    """Not broadcast: beside no rows at all every row would be right."""
    one, none = torch.ones(1, 2), torch.ones(0, 2)
    with pytest.raises(AssertionError, match=r"x has shape \(1, 2\), should have \(0, 2\)"):
        assert_within("x", one, none, 1.0, "a case")
    with pytest.raises(AssertionError, match=r"again: lse has shape \(1, 2\), had \(0, 2\)"):
        assert_same_bits((none, one), (none, none), "again", "a case")


def test_a_zero_of_the_other_sign_has_other_bits() -> None:
    zero = torch.zeros(1, 2)
    for results in (((-zero, None), (zero, None)), ((zero, zero), (zero, -zero))):
        with pytest.raises(AssertionError, match=r"negated: (out|lse)\[0, 0\] is -?0, was -?0 \(2 of 2"):
            assert_same_bits(*results, "negated", "a case")


def test_bounds_are_no_larger_than_their_reasons() -> None:
    assert (summing(4), summing(256), summing(1024)) == (2, 128, 256)
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8)
    assert expect(Case(q, k, torch.zeros(1, 1, 5, 8))).out_bound.max() < 1e-30


def test_keys_of_a_case_whose_mask_is_one_number() -> None:
    x = torch.randn(1, 1, 5, 8)
    some = Case(x, x, x, mask=torch.tensor(0.0)).keys(slice(1, 3))
    assert some.k.shape[2] == 2 and some.mask is not None and some.mask.dim() == 0


def test_a_head_has_its_part_of_a_mask_without_a_batch() -> None:
    q, k, mask = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(4, 3, 5)
    for heads, part in ((mask, mask[2:]), (mask[:1], mask[:1]), (mask[0], mask[0])):
        assert torch.equal(Case(q, k, k, mask=heads).head(1).mask, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_subnormal_numbers_are_no_larger_than_the_smallest_normal_ones(dtype: torch.dtype) -> None:
    """But for what a standard normal number may be."""
    generator = torch.Generator().manual_seed(1)
    _, k, v = make_numbers("subnormal", *torch.randn(3, 1, 1, 4, 8, generator=generator), dtype, generator)
    for x in (k, v):
        assert 0 < x.abs().max() < 8 * torch.finfo(dtype).tiny
