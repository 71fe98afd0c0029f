"""Numbers that hide others: scores beside whose size a sum is lost, sums of many nearly equal weights, weights of 0."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.reference import attention_reference


def gradients(function, q, k, v, d_out, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(function(*leaves, **options), leaves, d_out)


@pytest.mark.parametrize("size", [1e4, 1e6, pytest.param(1e8, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 5)}], ids=["causal", "window"])
def test_large_scores_keep_their_sums(size, options, device):
    """lse hides log l there: of 1e8 it is a multiple of 8. Half of the rows have such scores, the others their bits."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, heads, 70, 16).to(device, dtype) for heads in (2, 1, 1, 2))
    if (
        device.type == "cpu"
    ):  # scores that are exact: a library adds up other tiles in other orders, forward and backward
        q, k = (x.mul(4).round().clamp(-8, 8) / 4 for x in (q, k))
    small = (torch.arange(70, device=device)[:, None] % 2 == 0).expand_as(q)
    before = gradients(fa.attention, q, k, v, d_out, **options)
    q = torch.where(small, q, q * size)
    got = gradients(fa.attention, q, k, v, d_out, **options)
    want = gradients(attention_reference, *(x.double() for x in (q, k, v, d_out)), **options)[2]
    eager = gradients(attention_reference, *(x.float() for x in (q, k, v, d_out)), **options)[2]
    # Scores of nearly equal keys are as exact as float32 has them; P, O and results are rounded to the dtype.
    eps = 8 * torch.finfo(dtype).eps + 2e-6
    bound = 2 * float((eager - want).abs().max()) + eps * float(want.abs().max())
    torch.testing.assert_close(got[2].double(), want, atol=bound, rtol=eps)
    assert torch.equal(got[0][small], before[0][small])
    assert all(bool(torch.isfinite(x).all()) for x in got)


@pytest.mark.parametrize("rows", [1, 4])
def test_few_rows_keep_their_sum_over_many_keys(rows: int) -> None:
    """Nearly equal weights, of values 1: each addition to a large sum would lose as much, and in one direction."""
    k = torch.full((1, 1, 2**17, 1), -0.35667)
    k[0, 0, 0] = 0
    out = fa.attention(torch.ones(1, 1, rows, 1), k, torch.ones_like(k), scale=1.0, backend="tiled")
    assert float((out - 1).abs().max()) < 2**-14  # a 17th of what one sum over all keys loses


def test_a_visible_key_of_score_minus_infinity_keeps_its_value(device: torch.device) -> None:
    """Weight 0 times NaN, or an infinity: NaN, as in plain torch. Invisible to the first row, it does not reach it."""
    q = torch.ones(1, 1, 2, 1, device=device)
    k = torch.tensor([0.0, -math.inf], device=device).view(1, 1, 2, 1)
    for value in (math.nan, math.inf):
        v = torch.tensor([1.0, value], device=device).view(1, 1, 2, 1)
        out = fa.attention(q, k, v, causal=True, backend="tiled").flatten()
        assert out[0] == 1 and not math.isfinite(float(out[1]))


@pytest.mark.parametrize("scale", [1e-44, 1e-46, 1e-50])
def test_a_scale_that_float32_does_not_hold(scale, device):
    """It is 0 in a kernel, where a hidden score must not meet it. Only a GPU rounds it; elsewhere the choice shows."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, device=device) for _ in range(3))
    none = dict.fromkeys(("q_start", "window_left", "window_right", "softcap"))
    assert not describe(Inputs(q, k, v), causal=True, scale=scale, **none).features.positive_scale
    assert describe(Inputs(q, k, v), causal=True, scale=1e-30, **none).features.positive_scale
    for options in ({"causal": True}, {"causal": True, "softcap": 1.0}):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, want = (fa.attention(*leaves, scale=x, **options) for x in (scale, 0.0))
        torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)
        d_v, d_want = (torch.autograd.grad(x.sum(), leaves)[2] for x in (out, want))
        torch.testing.assert_close(d_v, d_want, atol=1e-6, rtol=1e-5)


TF32 = """
import sys, torch, flashattn_lite as fa
from flashattn_lite.target import takes_tf32
q = torch.randn(1, 2, 20, 16, requires_grad=True)
want = fa.attention(q, q, q)
assert not takes_tf32()
for setting, means in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    exec(setting)
    assert takes_tf32() == (means == "tf32"), setting
    fa.attention(q, q, q).sum().backward()
    fa.scaled_dot_product_attention(q, q, q)
    x = q.detach().half()
    fa.attention_decode(x[:, :, :1], x, x, torch.tensor([20], dtype=torch.int32))
    if means != "bf16":  # which is for the products of a CPU
        torch.testing.assert_close(fa.attention(q, q, q), want)
"""


@pytest.mark.parametrize(
    "settings",
    [
        {
            "torch.set_float32_matmul_precision('high')": "tf32",
            "torch.backends.cuda.matmul.fp32_precision = 'ieee'": "ieee",
        },
        {
            "torch.backends.fp32_precision = 'tf32'": "tf32",
            "torch.backends.fp32_precision = 'none'": "ieee",
            "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": "bf16",
        },
    ],
    ids=["older", "newer"],
)
def test_each_of_torchs_settings_for_float32_is_understood(settings, interpreting):
    """One after the other, in a process: torch refuses to be asked by the older one once the newer one was used."""
    if interpreting:
        pytest.skip("the same without TRITON_INTERPRET=1")
    steps = [word for step in settings.items() for word in step]
    subprocess.run([sys.executable, "-W", "ignore", "-c", TF32, *steps], check=True, timeout=300)


PAST_THE_RANGE = [  # dtype, a query, its keys, scale
    (torch.float32, 1e36, 1e-38, 1e3),
    (torch.float32, 3e38, 1e-38, None),
    (torch.float16, 1e3, 0.0, 1e36),
    (torch.float64, 1e300, 1e-305, 1e10),
]


@pytest.mark.parametrize(("dtype", "q", "k", "scale"), PAST_THE_RANGE)
def test_a_query_that_its_scale_takes_past_the_range_has_finite_scores(dtype, q, k, scale):
    """And the rows beside it keep their bits."""
    torch.manual_seed(0)
    queries, keys = torch.zeros(1, 1, 3, 1, dtype=dtype), torch.full((1, 1, 5, 1), k, dtype=dtype)
    queries[0, 0, 1] = q
    keys[0, 0, 2] *= 0.5
    v = torch.randn(1, 1, 5, 2).to(dtype)
    out, lse = fa.attention(queries, keys, v, scale=scale, return_lse=True, backend="tiled")
    wide = (x.double() for x in (queries, keys, v))
    exact, exact_lse = attention_reference(*wide, scale=scale, return_lse=True)
    torch.testing.assert_close(out.double(), exact, atol=4 * torch.finfo(dtype).eps, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-6, rtol=1e-5)
    without = fa.attention(torch.zeros_like(queries), keys, v, scale=scale, backend="tiled")
    assert torch.equal(out[:, :, ::2], without[:, :, ::2])
