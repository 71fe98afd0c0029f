"""The standalone softmax, its (m, l) and their merge: values, layouts, hostile numbers, laws, error texts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashattn_lite import softmax_tiled
from flashattn_lite.softmax import merge_softmax_stats, online_softmax, runs_triton, softmax_stats
from flashattn_lite.testing.softmax import assert_softmax, assert_stats
from tests.exhaustive import also

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INF, NAN = math.inf, math.nan
# The lengths enter each way through the kernels: short rows together, a row a tile, swept, in the ring; rows across.
SHAPES = [
    ((3, 1), 1), ((129, 5), 1), ((7, 1000), -1), ((5, 1009), -1), ((3, 2051), 1), ((2, 32768), 1), ((2, 40009), 1),
    ((5, 66), 0), ((1024, 40), 0), ((1031, 9), 0), ((3, 37, 4, 6), 1), ((2, 1500, 3, 2), -3),
]  # fmt: skip


def check_softmax(x: Tensor, dim: int) -> None:
    y = online_softmax(x, dim)
    assert y.dtype == x.dtype
    assert y.stride() == torch.empty_like(x).stride()
    assert_softmax(y, x, dim)


def check_stats(x: Tensor, dim: int) -> None:
    m, l_i = softmax_stats(x, dim)
    assert m.dtype == l_i.dtype == torch.float32
    assert m.shape == l_i.shape == x.movedim(dim, -1).shape[:-1]
    assert_stats(m, l_i, x, dim)


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: (3 * torch.randn(*shape, generator=generator)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values(randn: Callable[..., Tensor], shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    check_softmax(x, dim)
    check_stats(x, dim)


def test_which_path_runs(device: torch.device, interpreting: bool) -> None:
    pytest.importorskip("triton")
    assert runs_triton(torch.ones(1, device=device)) == (device.type == "cuda" or interpreting)
    assert not runs_triton(torch.ones(1, device=device, dtype=torch.float64))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2),
        also(lambda x: x.permute(2, 0, 1)),
        lambda x: x[:, 1:, ::2],
        also(lambda x: x[::2, :, 3:]),
        lambda x: x[:, :1].expand(-1, 50, -1),
        also(lambda x: x[:, :, :1].expand(-1, -1, 50)),
        also(lambda x: x.reshape(2, 2, 3, 5, 2, 8).permute(4, 0, 2, 1, 5, 3)),
        lambda x: x.reshape(2, 2, 3, 5, 2, 8)[:, :1, 1:, ::3, :, 1:],
        lambda x: x.unsqueeze(1).unsqueeze(-1),
    ],
)
def test_layouts(randn: Callable[..., Tensor], layout: Callable[[Tensor], Tensor]) -> None:
    x = layout(randn(4, 15, 16))
    for dim in range(-x.dim(), x.dim()):
        check_softmax(x, dim)
        check_stats(x, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 1000, 33000])
def test_tiles_are_what_torch_s_kernel_is_on_the_cpu(dtype: torch.dtype, cols: int) -> None:
    """Plain torch on a GPU goes by tiles: it may ask for no value, as the CPU does to find rows of -inf."""
    x = (3 * torch.randn(7, cols, generator=torch.Generator().manual_seed(0))).to(dtype)
    x[1], x[2, 0], x[3, -1] = -INF, NAN, INF
    y = torch.empty_like(x)
    softmax_tiled._by_tiles(x, y)
    assert_softmax(y, x, -1)


def test_scalars_and_empty_tensors(device: torch.device) -> None:
    one = torch.tensor(3.0, device=device, requires_grad=True)
    assert online_softmax(one) == 1
    assert [part.item() for part in softmax_stats(one, 0)] == [3.0, 1.0]
    assert torch.autograd.grad(softmax_stats(one)[0], one)[0] == 1
    for shape, dim in (((3, 0), 1), ((0, 3), 1), ((0, 3), 0), ((0,), 0), ((2, 0, 4), 0)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        assert online_softmax(x, dim).shape == x.shape
        m, l_i = softmax_stats(x, dim)
        assert m.shape == x.shape[:dim] + x.shape[dim + 1 :]
        assert (m == -INF).all()
        assert (l_i == 0).all()
        assert torch.autograd.grad(online_softmax(x, dim).sum() + l_i.sum(), x)[0].shape == x.shape
    apart = torch.zeros(3, 3, 4, 2, 3, device=device).transpose(3, 4).narrow(1, 0, 0)  # rows over many dimensions
    assert [float(part.max()) for part in softmax_stats(apart, 1)] == [-INF, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_row_of_equals_keeps_its_sum(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.full((2**20,), 7.0, device=device, dtype=dtype)
    assert (online_softmax(x) == 2.0**-20).all()
    m, l_i = softmax_stats(x)
    # Two bytes: 7 * log2(e) is rounded for the whole row, and 2 to what that was is taken off again.
    eps = 0 if dtype == torch.float32 else 4 * torch.finfo(torch.float32).eps
    assert m == 7
    assert abs(l_i.item() * 2.0**-20 - 1) <= eps


def test_a_row_of_many_tiles_keeps_its_sum(device: torch.device, interpreting: bool) -> None:
    if interpreting:
        pytest.skip("half a million steps")
    x = torch.rand(2**25, generator=torch.Generator().manual_seed(0)).to(device)
    m, l_i = softmax_stats(x)
    exact = (x.double() - m.double()).exp().sum()
    assert abs(l_i.double() / exact - 1) <= 2 * torch.finfo(torch.float32).eps


def test_a_long_row(randn: Callable[..., Tensor]) -> None:
    x = randn(2**20)
    check_softmax(x, 0)
    check_stats(x, 0)


@pytest.mark.parametrize("length", [3, 33000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_huge_scores(randn: Callable[..., Tensor], dtype: torch.dtype, length: int) -> None:
    """Up to the ends of float32, where x * log2(e) overflows; and far from 0, where it loses what sets scores apart."""
    x = randn(6, length, dtype=dtype)
    x[0] += 1e6
    x[1] -= 2e38
    x[2, 0], x[2, -1] = 3.3e38, -3.3e38
    x[3] *= 2e37
    x[4, ::2] = -3.3e38
    x[5] = 3.3e38
    check_softmax(x, 1)
    check_softmax(x[:, -1100:].T.contiguous(), 0)
    check_stats(x, 1)


@pytest.mark.parametrize("length", [6, 1000, 33000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_stay_in_their_row(randn: Callable[..., Tensor], dtype: torch.dtype, length: int) -> None:
    x = randn(6, length, dtype=dtype)
    clean = online_softmax(x, 1)
    x[1], x[2, 3], x[3, -1], x[4, :-1] = -INF, INF, NAN, -INF
    y = online_softmax(x, 1)
    m, l_i = softmax_stats(x, 1)
    assert (y[1] == 0).all()
    assert (m[1], l_i[1]) == (-INF, 0)
    assert y[2:4].isnan().all()
    assert l_i[2:4].isnan().all()
    assert m[2] == INF
    assert m[3].isnan()
    assert (y[4, :-1] == 0).all()
    assert y[4, -1] == 1
    assert torch.equal(y[[0, 5]], clean[[0, 5]])


@pytest.mark.parametrize(("shape", "dim"), [((9, 100), 1), ((9, 1001), 1), ((1000, 40), 0), ((5, 7, 33), 1)])
def test_a_row_depends_on_itself_alone(randn: Callable[..., Tensor], shape: tuple[int, ...], dim: int) -> None:
    """The same bits in another batch: a slot alone, or beside other rows."""
    x = randn(*shape)
    batch = 1 - dim if x.dim() == 2 else 0
    y, stats = online_softmax(x, dim), torch.stack(softmax_stats(x, dim))
    for slot in (slice(0, 1), slice(3, 4), slice(2, 5)):
        part = x[(slice(None),) * batch + (slot,)]
        assert torch.equal(online_softmax(part, dim), y[(slice(None),) * batch + (slot,)])
        assert torch.equal(torch.stack(softmax_stats(part, dim)), stats[:, slot])


@settings(max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 2**31))
def test_merge_of_any_split_is_the_whole(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 50 * torch.randn(3, sum(sizes), generator=generator)
    x[0] = -INF
    x[1, ::2] = -3e38
    parts = [softmax_stats(part, 1) for part in x.split(sizes, 1)]
    whole, forward, backward = softmax_stats(x, 1), parts[0], parts[-1]
    for part in parts[1:]:
        forward = merge_softmax_stats(forward, part)
    for part in parts[-2::-1]:
        backward = merge_softmax_stats(part, backward)
    for merged in (forward, backward):
        assert torch.equal(merged[0], whole[0])
        # each of at most six merges rounds l a few times
        torch.testing.assert_close(merged[1], whole[1], rtol=24 * torch.finfo(torch.float32).eps, atol=0)


def test_merge_is_commutative_has_an_identity_and_broadcasts(randn: Callable[..., Tensor]) -> None:
    a, b = softmax_stats(randn(4, 30)), softmax_stats(randn(5, 1, 30))
    empty = softmax_stats(randn(4, 0))
    ab, ba = merge_softmax_stats(a, b), merge_softmax_stats(b, a)
    assert ab[0].shape == (5, 4)
    assert all(torch.equal(x, y) for x, y in zip(ab, ba, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(merge_softmax_stats(a, empty), a, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(merge_softmax_stats(empty, empty), empty, strict=True))


def test_worked_example(device: torch.device) -> None:
    m, l_i = softmax_stats(torch.tensor([1.0, 3.0, 2.0, 5.0], device=device))
    assert m == 5
    assert f"{l_i.item():.4f}" == "1.2034"


ONES = torch.ones(2)
PAIR = (ONES, ONES)
ERRORS = [
    (lambda: online_softmax([1.0]), TypeError,
     "x: must be a torch.Tensor; got [1.0]. Convert it with torch.as_tensor."),
    (lambda: online_softmax(ONES.long()), TypeError,
     "x: dtype must be float16, bfloat16, float32 or float64; got a tensor of shape (2,), int64, on cpu. Cast it"),
    (lambda: softmax_stats(ONES.to(torch.complex64)), TypeError,
     "x: must be real; got a tensor of shape (2,), complex64, on cpu."),
    (lambda: online_softmax(ONES.to_sparse()), TypeError,
     "x: must be a dense strided tensor; got"),
    (lambda: online_softmax(torch.ones(2, 3), 2), ValueError,
     "dim: must be from -2 to 1 for x of 2 dimensions; got 2. Pass -1 for the last."),
    (lambda: softmax_stats(torch.tensor(1.0), -2), ValueError,
     "dim: must be from -1 to 0 for x of 0 dimensions; got -2. Pass -1 for the last."),
    (lambda: online_softmax(ONES, None), TypeError,
     "dim: must be an int; got None. Pass one dimension; flatten several into one."),
    (lambda: merge_softmax_stats(ONES, PAIR), TypeError,
     "a: must be a pair (m, l); got a tensor of shape (2,), float32, on cpu. Pass what softmax_stats returned."),
    (lambda: merge_softmax_stats(PAIR, (ONES.half(), ONES)), TypeError,
     "m_b: dtype must be float32 or float64; got a tensor of shape (2,), float16, on cpu. Cast it: .float()."),
    (lambda: merge_softmax_stats(PAIR, (ONES, ONES.double())), TypeError,
     "l_b: dtype must equal m_a's (float32); got a tensor of shape (2,), float64, on cpu. Cast one of them."),
    (lambda: merge_softmax_stats(PAIR, (ONES.to("meta"), ONES)), ValueError,
     "m_b: must be on m_a's device (cpu); got a tensor of shape (2,), float32, on meta. Move it with .to(device)."),
    (lambda: merge_softmax_stats(PAIR, (ONES, torch.ones(3))), ValueError,
     "l_b: shape must equal m_b's (2,); got a tensor of shape (3,), float32, on cpu. Pass what softmax_stats"),
    (lambda: merge_softmax_stats(PAIR, (torch.ones(3), torch.ones(3))), ValueError,
     "m_b: shape must broadcast with m_a's (2,); got a tensor of shape (3,), float32, on cpu. Pass two of the same"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), ERRORS)
def test_errors_say_what_and_why(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(text)
