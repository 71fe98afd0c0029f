"""Softmax as torch sees it: gradients of each order, the custom ops' contracts, compilation without a graph break."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashattn_lite import softmax
from flashattn_lite.softmax import merge_softmax_stats, online_softmax, softmax_stats
from tests.exhaustive import case_once

SHAPES = [((3, 5), 1), ((5, 3), 0), ((2, 4, 3), 1), ((6,), 0)]


def composite_stats(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """What softmax_stats is, in operations that torch differentiates by itself."""
    m = x.amax(dim)
    return m, (x - m.unsqueeze(dim)).exp().sum(dim)


def gradient(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor, dim: int, weights: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    m, l_i = function(x, dim)
    return torch.autograd.grad((m * weights[0] + l_i * weights[1]).sum(), x)[0]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_softmax_gradients_of_first_and_second_order(device: torch.device, shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: online_softmax(x, dim), x)
    assert torch.autograd.gradgradcheck(lambda x: online_softmax(x, dim), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_softmax_gradients_in_low_precision(device: torch.device, dtype: torch.dtype) -> None:
    """From an output rounded by at most eps / 2 the gradient is off by a few eps of the largest term."""
    x = torch.randn(7, 50, device=device).to(dtype).requires_grad_()
    d_y = torch.randn(7, 50, device=device).to(dtype)
    exact = torch.autograd.grad(torch.softmax(wide := x.double(), 1), wide, d_y.double())[0]
    got = torch.autograd.grad(online_softmax(x, 1), x, d_y)[0]
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * d_y.abs().max().item()


def test_softmax_backward_needs_the_output_only(device: torch.device) -> None:
    x = torch.randn(4, 8, device=device, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = online_softmax(x)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_stats_gradients(device: torch.device, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """Those of the composite, ties included."""
    x = torch.randn(shape, dtype=dtype, device=device)
    tied = x.round()
    weights = torch.randn(2, *x.sum(dim).shape, device=device)
    for rows in (x, tied, torch.zeros_like(x), 1e6 + x):
        got, expected = (gradient(function, rows, dim, weights) for function in (softmax_stats, composite_stats))
        # the same few operations in another order
        torch.testing.assert_close(got, expected, rtol=0, atol=16 * torch.finfo(dtype).eps * weights.abs().max().item())


def test_stats_gradients_of_second_order(device: torch.device) -> None:
    x = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    second = []
    for function in (softmax_stats, composite_stats):
        m, l_i = function(x, 1)
        (first,) = torch.autograd.grad((m * l_i).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
    # the product of the float32 outputs enters the first gradient
    torch.testing.assert_close(*second, rtol=0, atol=1e-4 * second[1].abs().max().item())


def test_rows_that_see_nothing_have_gradient_zero(device: torch.device) -> None:
    x = torch.full((2, 3), -math.inf, device=device)
    x[1, 1] = 1.0
    x.requires_grad_()
    m, l_i = softmax_stats(x)
    assert torch.autograd.grad(online_softmax(x).sum(), x)[0].eq(0).all()
    assert torch.autograd.grad(m.sum(), x, retain_graph=True)[0].tolist() == [[0.0] * 3, [0.0, 1.0, 0.0]]
    assert torch.equal(
        torch.autograd.grad((m + l_i)[1] + l_i[0], x)[0].cpu(), torch.tensor([[0.0] * 3, [0.0, 1.0, 0.0]])
    )
    parts = [part.detach().requires_grad_() for part in (m[:1], l_i[:1], m[:1], l_i[:1])]
    merged = merge_softmax_stats((parts[0], parts[1]), (parts[2], parts[3]))[1]
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(merged.sum(), parts, allow_unused=True))


def test_merge_gradients(device: torch.device) -> None:
    parts = [torch.rand(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(4)]

    def merge(m_a: Tensor, l_a: Tensor, m_b: Tensor, l_b: Tensor) -> tuple[Tensor, Tensor]:
        return merge_softmax_stats((m_a, l_a), (m_b, l_b))

    assert torch.autograd.gradcheck(merge, parts)
    assert torch.autograd.gradgradcheck(merge, parts)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        case_once(lambda x: x, torch.float16),
        (lambda x: x.transpose(0, 2), torch.float32),
        case_once(lambda x: x[:, ::2], torch.float64),
        case_once(lambda x: x[:0], torch.bfloat16),
    ],
)
def test_opcheck(device: torch.device, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for op in (softmax._softmax_op, softmax._stats_op):
        for dim in (0, 2):
            x = layout(torch.randn(2, 6, 4, device=device).to(dtype)).detach().requires_grad_()
            torch.library.opcheck(op, (x, dim))


def test_who_calls_an_op_itself_may_count_from_the_end(device: torch.device) -> None:
    """A kernel that took -2 for a dimension would write beside its output."""
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    for op, public in ((softmax._softmax_op, online_softmax), (softmax._stats_op, softmax_stats)):
        found = []
        for function in (op, public):
            for results in (function(x, -2), torch.vmap(lambda row, f=function: f(row, -2))(x)):
                total = sum(r.square().sum() for r in ((results,) if isinstance(results, Tensor) else results))
                found += [total, *torch.autograd.grad(total, x)]
        assert all(map(torch.equal, found[:4], found[4:]))
        with pytest.raises(ValueError, match=r"^dim: must be from -3 to 2 for x of 3 dimensions; got 3"):
            op(x, 3)


@pytest.mark.parametrize("dynamic", [case_once(False), True])
def test_compiles_without_a_graph_break(device: torch.device, dynamic: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        m, l_i = merge_softmax_stats(softmax_stats(x, 0), softmax_stats(2 * x, 0))
        return (online_softmax(x, 0) * x).sum() + (m + l_i.log()).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((5, 4), (9, 3)):
        x = torch.randn(shape, device=device, requires_grad=True)
        torch.testing.assert_close(compiled(x), loss(x))
        torch.testing.assert_close(*(torch.autograd.grad(f(x), x)[0] for f in (compiled, loss)))


@pytest.mark.parametrize("dim", [0, -1])
def test_function_transforms(dim: int) -> None:
    """torch.func.grad, jacrev, grad of grad, vmap, vmap of grad and grad of vmap: what torch's own softmax gives."""
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    weights = torch.randn(4, 5, dtype=torch.float64)

    def stats_of(x: Tensor) -> Tensor:
        m, l_sum = softmax_stats(x, dim)
        return m + torch.log(l_sum)

    pairs = [
        (lambda x: online_softmax(x, dim) * weights, lambda x: torch.softmax(x, dim) * weights),
        (stats_of, lambda x: torch.logsumexp(x, dim).float()),
    ]
    for ours, theirs in pairs:  # the statistics are float32, their derivatives have a few eps (1e-7) of it
        for change in (
            lambda f: torch.func.grad(lambda x: f(x).square().sum()),
            torch.func.jacrev,
            lambda f: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).square().sum())(x).sin().sum()),
        ):
            torch.testing.assert_close(change(ours)(x[0]), change(theirs)(x[0]), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(torch.vmap(change(ours))(x), torch.vmap(change(theirs))(x), atol=1e-6, rtol=1e-5)
            inside = lambda f: change(torch.vmap(f))  # noqa: B023
            torch.testing.assert_close(inside(ours)(x), inside(theirs)(x), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(torch.vmap(ours, in_dims=2)(x.movedim(0, 2)), torch.vmap(theirs)(x))


@pytest.mark.parametrize("function", [lambda x: online_softmax(x).square().sum(), lambda x: softmax_stats(x)[1].sum()])
def test_a_hessian_is_refused_in_words_and_reverse_mode_twice_makes_it(function):
    x = torch.randn(6, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="x: forward-mode derivatives are not implemented; got one inside"):
        torch.func.hessian(function)(x)
    assert torch.func.jacrev(torch.func.jacrev(function))(x).shape == (6, 6)


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_long_columns_are_as_exact_as_those_of_rows(dim):
    """Across rows a CPU's kernel in torch sums number by number: 1e-4 off at a million."""
    generator = torch.Generator().manual_seed(0)
    x, d_y = (torch.rand(2**20, 2, generator=generator).movedim(0, dim) for _ in range(2))
    x.requires_grad_()
    (got,) = torch.autograd.grad(online_softmax(x, dim), x, 1 + d_y)
    y = x.detach().double().softmax(dim)
    want = y * (1 + d_y - (y * (1 + d_y)).sum(dim, keepdim=True))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert got.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((40, 20), 1), ((40, 1000), 1), ((300, 37), 0), ((2, 50000), 1), ((7,), 0)])
def test_a_rows_gradient_has_its_bits_alone(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """On a CPU: there torch adds up a lone row, or the columns at an edge, in another order."""
    x, d_y = (torch.randn(shape).to(dtype) for _ in range(2))

    def gradients(x: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        m, l_i = softmax_stats(x, dim)
        of_softmax = torch.autograd.grad(online_softmax(x, dim), x, d_y)[0]
        return of_softmax, torch.autograd.grad((m * d_y.select(dim, 0) + l_i * d_y.select(dim, 1)).sum(), x)[0]

    among = gradients(x, d_y)
    for i in range(0, x.shape[1 - dim] if x.dim() > 1 else 0, 3):
        row = (slice(None),) * (1 - dim) + (slice(i, i + 1),)
        alone = gradients(x[row], d_y[row])
        assert all(map(torch.equal, alone, (gradient[row] for gradient in among)))
    assert all(gradient.isfinite().all() for gradient in among)
