"""How much the testing kit lets pass. A wider bound hides more: these are as derived, with a third to spare."""

from __future__ import annotations

import math

import pytest
import torch

from flashattn_lite.reference import attention_reference
from flashattn_lite.testing import Case
from flashattn_lite.testing.gradients import expect_gradients
from flashattn_lite.testing.oracle import assert_close_to_oracle, expect
from flashattn_lite.testing.softmax import assert_softmax, assert_stats, expect_stats


def tensors(dtype, count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, 40, 64, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 260), (torch.float16, 2.9), (torch.bfloat16, 2.9)])
def test_of_out_and_lse(dtype, most):
    """The median: of out in eps of its dtype, of lse in those of float32."""
    expected = expect(Case(*tensors(dtype)))
    assert expected.out_bound.median() <= most * torch.finfo(dtype).eps
    assert expected.lse_bound.median() <= 650 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (torch.float32, {"q": 50000, "k": 50000, "v": 4200, "mask": 25000, "sinks": 112000}),
        (torch.float16, {"q": 130, "k": 130, "v": 14, "mask": 67, "sinks": 840}),
        (torch.bfloat16, {"q": 130, "k": 130, "v": 14, "mask": 67, "sinks": 840}),
    ],
)
def test_of_gradients(dtype, most):
    """The median, in eps of the dtype and of the gradient's own median."""
    *qkv, d_out = tensors(dtype, 4)
    generator = torch.Generator().manual_seed(2)
    given = {"mask": torch.randn(40, 40, generator=generator).to(dtype), "sinks": torch.randn(2, generator=generator)}
    expected = expect_gradients(Case(*qkv, **given), d_out, torch.randn(1, 2, 40, generator=generator))
    for name, (gradient, bound) in expected.items():
        assert bound.median() <= most[name] * torch.finfo(dtype).eps * gradient.abs().median(), name


@pytest.mark.parametrize("least", [1e-30, 1e-4])
def test_a_row_that_sees_nothing_is_0_to_the_bit(least):
    case = Case(*tensors(torch.float32), kv_lens=torch.tensor([0], dtype=torch.int32))
    out, lse = attention_reference(case.q, case.k, case.v, kv_lens=case.kv_lens, return_lse=True)
    assert_close_to_oracle(out, lse, case)
    with pytest.raises(AssertionError):
        assert_close_to_oracle(out + least, lse, case)


@pytest.mark.parametrize("factor", [1 + 2e-6, 1 - 2e-6, math.nan])
def test_of_a_softmax_sum(factor):
    (x,) = tensors(torch.float32, 1)
    m, l_i = (y.float() for y in expect_stats(x, -1))
    assert_stats(m, l_i, x, -1)
    spoiled = l_i.clone()
    spoiled[0, 1, 7] *= factor
    with pytest.raises(AssertionError):
        assert_stats(m, spoiled, x, -1)


@pytest.mark.parametrize("factor", [1 + 1e-5, 1 - 1e-5, math.nan])
def test_of_a_softmax(factor):
    """Of a row's largest weight: eager torch's errors elsewhere in the row, however many, are no excuse."""
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    y = torch.softmax(x.double(), -1).float()
    assert_softmax(y, x, -1)
    y[2, x[2].argmax()] *= factor
    with pytest.raises(AssertionError, match=r"^softmax: 1 of 4000 elements are wrong"):
        assert_softmax(y, x, -1)
