"""Rows that the Hopper kernel does again, beside others of their tile: each has its bits, whatever those do."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing.results import assert_same_bits
from tests.test_hopper import HALVES, take_parts

ROUNDED = {"rtol": 2**-7, "atol": 2**-7}  # a bfloat16 eps: the roundings of P and of the result, half of one each
SUMMED = {"rtol": 1e-5, "atol": 1e-4}  # float32 scores of up to some hundreds, in log2 units, and a sum of hundreds
FAILING = [0.0, 22.0, 400.0]  # by how much scores pass the reference: never, by P V that is infinite, by l


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("taken", ["whole", "in parts", "in parts of one block"])
def test_rows_of_a_tile_fail_in_every_way(taken, dtype, hopper_device, monkeypatch):
    """In the first pass, in the second, in both, by what V holds too; or not. Beside them, and beside rows of none."""
    if taken != "whole":
        take_parts(monkeypatch, "one block" in taken)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).to(hopper_device, dtype) for n in (100, 500, 500))
    q[..., 0] = torch.tensor(FAILING, device=hopper_device).repeat(34)[:100]
    k[..., 0] = 0
    k[:, :, 100:160, 0] = 8
    if dtype == torch.bfloat16:
        v[:, :, 100:160, 5] = 1e32
    v[:, :, 430, 3], v[:, :, 460, 3] = math.inf, math.nan  # of rows from 30 on, from 60 on
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), causal=True, return_lse=True)
    rows = [0, 1, 2, 33, 34, 35]
    q, k, v = (x.repeat(1 + len(rows), 1, 1, 1) for x in (q, k, v))
    for entry, row in enumerate(rows, 1):
        q[entry, :, :row, 0], q[entry, :, row + 1 :, 0] = 0, 0
        v[entry, :, 430 if row < 30 else 460 :, 3] = 1
    out, lse = fa.attention(q, k, v, causal=True, return_lse=True, backend="hopper")
    torch.testing.assert_close(out[:1].double(), exact, **ROUNDED, equal_nan=True)
    torch.testing.assert_close(lse[:1].double(), exact_lse, **SUMMED)
    for entry, row in enumerate(rows, 1):
        alone, among = ((x[i, :, row] for x in (out, lse)) for i in (entry, 0))
        assert_same_bits(tuple(alone), tuple(among), f"row {row} beside rows of which none fails", None)


@pytest.mark.parametrize("taken", ["whole", "in parts", "in parts of one block"])
def test_an_infinity_leaves_a_sum_past_float32_infinite(taken, hopper_device, monkeypatch):
    """One in V, of the sign of the sum, which is no number that the infinity may take the place of."""
    if taken != "whole":
        take_parts(monkeypatch, "one block" in taken)
    q, k, v = (torch.zeros(1, 1, n, 72, device=hopper_device, dtype=torch.bfloat16) for n in (20, 300, 300))
    v[..., :2] = torch.tensor([3e38, -3e38], device=hopper_device)
    v[:, :, 40, 0], v[:, :, 200, 1] = math.inf, -math.inf
    out = fa.attention(q, k, v, backend="hopper")
    assert out[..., 0].isposinf().all() and out[..., 1].isneginf().all() and (out[..., 2:] == 0).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_references_that_float32_does_not_hold(sign, dtype, hopper_device):
    """Of equal scores far from 0 each weighs the same; from a reference that is off, all would weigh 0 together."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).to(hopper_device, dtype) for n in (100, 300, 300))
    q[..., 0], q[..., 1:] = torch.linspace(1e4, 6e4, 100, device=hopper_device), 0
    k[..., 0] = sign * 6e4
    out = fa.attention(q, k, v, scale=100.0, backend="hopper")
    mean = v.double().mean(2, keepdim=True).expand(out.shape)  # of 300: some hundredths, so less is allowed
    torch.testing.assert_close(out.double(), mean, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_first_tile_of_scores_of_minus_infinity(dtype, hopper_device):
    """It sets no reference; one such score behind it makes the sum NaN, which is not the values' doing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).to(hopper_device, dtype) for n in (100, 500, 500))
    q[..., 0] = 1
    k[:, :, :64, 0], k[:, :, 200, 0], k[:, :, 380:, 0] = -math.inf, -math.inf, -math.inf
    out, lse = fa.attention(q, k, v, return_lse=True, backend="hopper")
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), return_lse=True)
    torch.testing.assert_close(out.double(), exact, **ROUNDED)
    torch.testing.assert_close(lse.double(), exact_lse, **SUMMED)
