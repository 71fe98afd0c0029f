"""float32 in three bfloat16 parts: they sum to the number, whatever it is, and their products to float32's."""

from __future__ import annotations

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="the helpers need Triton")
import triton.language as tl  # noqa: E402

from flashattn_lite import target as targets  # noqa: E402
from flashattn_lite.kernels.device import products  # noqa: E402

parts, product, product_of_any = products.parts, products.product, products.product_of_any
N = 64


@triton.jit
def split(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    high, middle, low = parts(tl.load(x_ptr + offs))
    tl.store(out_ptr + offs, high.to(tl.float32))
    tl.store(out_ptr + N + offs, middle.to(tl.float32))
    tl.store(out_ptr + 2 * N + offs, low.to(tl.float32))


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, ANY: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr):
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = parts(tl.load(a_ptr + tile)), parts(tl.load(b_ptr + tile))
    tl.store(out_ptr + tile, product_of_any(a, b) if ANY else product(a, b, TURNED))


def numbers(device: torch.device) -> torch.Tensor:
    """[N] of all sizes and both signs, the largest and special ones among them."""
    x = torch.randn(N, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-90, 102, 3)
    largest = torch.finfo(torch.float32).max
    x[:6] = torch.tensor([math.inf, -math.inf, math.nan, largest, -largest, 0.0])
    return x.to(device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_parts_sum_to_the_number(device):
    if device.type == "cpu" and not targets.interpreting():
        pytest.skip("Triton runs on CPU tensors in its interpreter only (TRITON_INTERPRET=1)")
    x, out = numbers(device), torch.empty(3, N, device=device)
    split[(1,)](x, out, N)
    torch.testing.assert_close(out.double().sum(0), x.double(), rtol=0, atol=0, equal_nan=True)
    finite = out[:, 3:]
    assert (finite.sign() * finite[0].sign() >= 0).all()  # nothing cancels
    assert (finite[0].abs() <= x[3:].abs()).all()


def pair(device, seed):
    """Two factors, for a GPU alone: the interpreter multiplies bits of bfloat16."""
    if device.type == "cpu":
        pytest.skip("Triton compiles for GPU tensors only")
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(N, N, generator=generator).to(device) for _ in range(2)]


def multiplied(a, b, *, any_number=False, turned=False):
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)  # in a's strides
    multiply[(1,)](a, b, out, any_number, N, turned)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("any_number", [False, True])
def test_products_are_those_of_float32(device, any_number):
    a, b = pair(device, 1)
    b[:, :2] = 0
    b[3, 0], b[5, 1] = 1, 1.25
    out = multiplied(a, b, any_number=any_number)
    exact = a.double() @ b.double()
    assert torch.equal(out[:, 0], a[:, 3])  # a factor of 1
    # Six products of 64 terms, each cut off at 2^-23 of a sum of absolute values at worst, and what is left out.
    assert ((out - exact).abs() <= 2.0**-20 * (a.double().abs() @ b.double().abs())).all()
    assert ((out - exact).norm() / exact.norm()).item() < 5e-7


@pytest.mark.gpu
def test_a_turned_product_has_the_bits_of_the_other(device):
    """The backward makes scores both ways; what they differ in is a factor in weights."""
    a, b = pair(device, 3)
    out = multiplied(a, b)
    assert torch.equal(multiplied(b.mT, a.mT, turned=True).mT, out)
    assert not torch.equal(multiplied(b.mT, a.mT).mT, out)


@pytest.mark.gpu
def test_infinities_are_those_of_float32(device):
    a, b = pair(device, 2)
    a[1, 2], a[3, 4], a[5, 6], b[7, 8] = math.inf, -math.inf, math.nan, math.inf
    a[9] = 1.0  # no second and third part: infinity times 0
    out = multiplied(a, b, any_number=True)
    expected = (a.double() @ b.double()).float()
    special = ~expected.isfinite()
    assert special.sum() > 250
    assert torch.equal(special, ~out.isfinite())
    torch.testing.assert_close(out[special], expected[special], equal_nan=True, rtol=0, atol=0)
