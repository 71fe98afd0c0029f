"""Softmax where only a GPU can show it: programs that wait for each other, repeated, side by side, in a graph."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from flashattn_lite.softmax import online_softmax, softmax_stats

pytestmark = pytest.mark.gpu
SHAPES = [((16, 2**20), 1), ((300, 100_000), 1), ((5, 77_777), 1), ((40_000, 70), 0), ((2, 2**22), 1)]


def made(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.bfloat16)


def results(x: Tensor, dim: int) -> list[Tensor]:
    return [online_softmax(x, dim), *softmax_stats(x, dim)]


def differing(one: list[Tensor], other: list[Tensor]) -> Tensor:
    return sum((a != b).sum() for a, b in zip(one, other, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_repeats_beside_other_work_give_the_same_bits(shape, dim):
    """Other work takes SMs away, so that the programs of a row start far apart."""
    x, other, noise = made(shape), torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    first, different = results(x, dim), torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(100):
        if i % 4 == 0:
            with torch.cuda.stream(other):
                noise = (noise @ noise).clamp_(-1, 1)
        different += differing(results(x, dim), first)
    assert different.item() == 0
    assert not any(part.isnan().any() for part in first)


def test_two_streams_at_once():
    """Each may hold the SMs that the other's programs wait for: nobody waits for ever, and counts are not shared."""
    inputs = [(made(shape, i), dim) for i, (shape, dim) in enumerate(SHAPES[:2])]
    expected = [results(x, dim) for x, dim in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    different = torch.zeros(2, device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                different[i] += differing(results(*inputs[i]), expected[i])
    torch.cuda.synchronize()
    assert different.tolist() == [0, 0]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_a_row_has_its_bits_in_any_batch(shape, dim):
    x = made(shape)
    whole = results(x, dim)
    for slot in (slice(0, 1), slice(1, 2), slice(shape[1 - dim] - 1, None)):
        part = x[:, slot] if dim == 0 else x[slot]
        y, m, l_i = results(part, dim)
        assert torch.equal(y, whole[0][:, slot] if dim == 0 else whole[0][slot])
        assert torch.equal(m, whole[1][slot])
        assert torch.equal(l_i, whole[2][slot])


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_cuda_graph(shape, dim):
    x = made(shape)
    results(x, dim)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(x, dim)
    for seed in (1, 2, 3):
        x.copy_(made(shape, seed))
        graph.replay()
        assert differing(captured, results(x, dim)).item() == 0


@pytest.mark.parametrize(("shape", "dim"), [((300, 1000), 1), ((7, 4096), -1), ((100, 70), 0), ((30, 100_000), 1)])
def test_remembered_calls_are_the_checked_one(shape, dim):
    """The first is checked, the second compiles, from the third on nothing is looked at but metadata."""
    xs = [made(shape, seed) for seed in range(4)]
    expected = [torch.softmax(x.float(), dim) for x in xs]
    for x, exact in zip(xs, expected, strict=True):
        y, m, _ = results(x, dim)
        torch.testing.assert_close(y.float(), exact, rtol=2**-7, atol=0)
        assert torch.equal(m, x.amax(dim).float())
    wanted = xs[0].clone().requires_grad_()
    online_softmax(wanted, dim).square().sum().backward()
    assert wanted.grad is not None


def test_no_call_waits_for_the_gpu():
    x = made((16, 2**20))
    results(x, 1)
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, torch says
            torch.cuda.set_sync_debug_mode("error")
        results(x, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
