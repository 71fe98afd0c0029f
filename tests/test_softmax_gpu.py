"""Softmax where only a GPU can show it: programs that wait for each other, repeated, side by side, in a graph."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import flashattn_lite as fa
from flashattn_lite.kernels import softmax_launch as kernels
from flashattn_lite.softmax import online_softmax, softmax_stats
from tests.test_softmax_split import hostile

pytestmark = pytest.mark.gpu
# 400 x 100000 goes by another schedule than one such row.
SHAPES = [((16, 2**20), 1), ((400, 100_000), 1), ((5, 77_777), 1), ((40_000, 70), 0), ((2, 2**22), 1), ((96, 32768), 1),
          ((300, 50_258), 1), ((6, 2**21), 1), ((70, 50_304), 1), ((300, 5120), 1)]  # fmt: skip
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EPS = torch.finfo(torch.float32).eps
# Rows of ring_kernel, if of two bytes; the last between 16-byte addresses, one of them whole.
LENGTHS = [131_072, 131_072 + 8, 131_072 + 8 * 1023, 40_960, 53_000, 32_768, 20_000, 131_073, 30_522]
# Lengths between 16-byte addresses, of each tile. Past 1024 (float32: 2048) they go through the ring.
BETWEEN = [1023, 1537, 2049, 4097, 4610, 8193, 16_387, 30_523, 50_257, 60_001, 131_073, 2**18 + 1, 4098, 8196]


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


def ring(x: Tensor, grid: int | None = None, **changed: int) -> Tensor:
    """softmax along the last dimension by ring_kernel."""
    y = torch.empty_like(x)
    (launch,) = kernels.plan(x, (y,), x.dim() - 1)
    assert launch.kernel is kernels.ring_kernel
    changed_shape = {"T": replace(launch.kwargs["T"], **changed)}
    launch.kernel[launch.grid if grid is None else (grid,)](*launch.args, **(launch.kwargs | changed_shape))
    return y


def bits(y: Tensor) -> Tensor:
    return y.view(torch.int16 if y.element_size() == 2 else torch.int32)


def check_ring(x: Tensor, y: Tensor) -> None:
    wide = x.double()
    expected = torch.where(wide.amax(-1, keepdim=True) != -torch.inf, torch.softmax(wide, -1), 0.0)
    info = torch.finfo(y.dtype)
    # One rounding, |ln p| eps from the exponent, a few eps from the sum; what float32 or y's dtype flushes to zero.
    budget = info.eps * expected + 16 * EPS * (expected + torch.special.entr(expected))
    budget += max(info.eps * info.smallest_normal, 2e-38)
    assert torch.equal(y.isnan(), expected.isnan())
    assert ((y.double() - expected).abs() <= budget).logical_or(expected.isnan()).all()


@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ring_of_hostile_rows_whoever_waits(cols, dtype):
    """Infinities, NaN, far values; the same bits if nobody waits, in small grids and in another batch."""
    if dtype == torch.float32 and cols == 32768:
        pytest.skip("such rows of four bytes stay in registers")
    x = hostile(torch.device("cuda"), cols).to(dtype)
    y = ring(x)
    check_ring(x, y)
    for grid, patience in ((None, 0), (1, 0), (1, 3), (7, 0), (7, kernels.PATIENCE)):
        assert torch.equal(bits(ring(x, grid, PATIENCE=patience)), bits(y))
    assert torch.equal(bits(ring(x[3:])), bits(y[3:]))


@pytest.mark.parametrize("cols", BETWEEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_rows_between_addresses(cols, dtype):
    """Right, the statistics too; the same bits in another batch; nothing written beside rows that lie apart."""
    x = hostile(torch.device("cuda"), cols).to(dtype)
    y, m, l_i = results(x, 1)
    check_ring(x, y)
    wide = x.double()
    top = wide.amax(1)
    torch.testing.assert_close(m.double(), top, rtol=0, atol=0, equal_nan=True)
    exact = torch.exp(wide - top.where(top != -torch.inf, 0.0)[:, None]).sum(1)
    torch.testing.assert_close(l_i.double(), exact, rtol=8 * EPS, atol=0, equal_nan=True)
    for whole, part in zip((y, m, l_i), results(x[3:], 1), strict=True):
        torch.testing.assert_close(part, whole[3:], rtol=0, atol=0, equal_nan=True)
    memory = torch.full((10, cols + 6), 7.0, dtype=dtype, device="cuda")
    kernels.launch(x, (memory[:, 3:-3],), 1)
    check_ring(x, memory[:, 3:-3].contiguous())
    assert (memory[:, :3] == 7).all() and (memory[:, -3:] == 7).all()


@pytest.mark.parametrize("cols", [1537, 4097, 16_387, 50_257, 60_001, 131_073])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_wherever_it_begins(cols, dtype):
    """At any element of 16 bytes, with its result at any other; neighbours are read, never taken in, never written."""
    if dtype == torch.float32 and cols == 1537:
        pytest.skip("so short a row of four bytes stays in registers")
    x = hostile(torch.device("cuda"), cols).to(dtype)
    y, m, l_i = results(x, 1)
    for lead in range(16 // dtype.itemsize):
        around = torch.full((x.numel() + 16,), torch.inf, dtype=dtype, device="cuda")
        moved = around[lead : lead + x.numel()].view(x.shape).copy_(x)
        for part, whole in zip(results(moved, 1), (y, m, l_i), strict=True):
            torch.testing.assert_close(part, whole, rtol=0, atol=0, equal_nan=True)
        for other in (lead, 3):
            memory = torch.full_like(around, 7.0)
            to = memory[other : other + x.numel()].view(x.shape)
            kernels.launch(moved, (to,), 1)
            assert torch.equal(bits(to), bits(y))
            to.fill_(7.0)
            assert (memory == 7).all()


@pytest.mark.parametrize("cols", [40_960, 131_072 + 8, 32_768])
def test_ring_of_rows_that_lie_apart(cols):
    x = torch.randn(4, 6, 3, cols + 64, device="cuda").to(torch.bfloat16)[::2, 1::2, :, :cols]
    y = ring(x)
    check_ring(x, y)
    assert torch.equal(y, ring(x.contiguous()))


@pytest.mark.parametrize("shape", [(200, 131_072), (9, 131_072 + 8), (16, 2**20), (600, 32_768)])
def test_ring_again_and_again_beside_other_work(shape):
    x, other, noise = made(shape), torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    first, different = ring(x), torch.zeros((), device="cuda", dtype=torch.int64)
    check_ring(x[:8], first[:8])
    for i in range(500):
        if i % 8 == 0:
            with torch.cuda.stream(other):
                noise = (noise @ noise).clamp_(-1, 1)
        different += (bits(ring(x)) != bits(first)).sum()
    assert different.item() == 0


def test_epochs_end_and_words_grow():
    """A launch never meets words of its own epoch that another wrote, not with the last of int32 either."""
    small, large = made((3, 131_072)), made((70, 131_072 + 8))
    expected = [ring(x) for x in (small, large)]
    key = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    words, _ = kernels._words[key]
    last = 2**31 - 1
    kernels._words[key] = words, iter(range(last - 2, last + 1))
    seen = []
    for _ in range(4):
        for x, want in zip((small, large), expected, strict=True):
            assert torch.equal(ring(x), want)
            (launch,) = kernels.plan(x, (torch.empty_like(x),), 1)
            seen.append(launch.args[5])  # an epoch that nothing is launched with
    assert seen[:2] == [last - 1, 1]
    kernels._words[key] = words[:64].clone().zero_(), iter(range(1, 5))
    for x, want in zip((small, large), expected, strict=True):
        assert torch.equal(ring(x), want)
    assert kernels._words[key][0].numel() >= 2 * 70 * 17


def test_a_graph_of_ring_launches_beside_calls():
    """Each replay begins with zeros of its own, wherever the epochs of calls stand."""
    x, other = made((40, 131_072)), made((40, 131_072), 9)
    online_softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = online_softmax(online_softmax(x))
    for seed in range(5):
        x.copy_(made(x.shape, seed))
        for _ in range(3):
            graph.replay()
            online_softmax(other)
        assert torch.equal(twice, online_softmax(online_softmax(x)))


def test_no_call_waits_for_the_gpu():
    x = made((16, 2**20))
    results(x, 1)
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, torch says
            torch.cuda.set_sync_debug_mode("error")
        results(x, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_the_short_way_cannot_look_at_meets_the_door():
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], device="cuda")
    for function in (fa.online_softmax, fa.softmax_stats):
        with pytest.raises(TypeError, match="nested"):
            function(nested)
    x = torch.randn(3, 8, device="cuda", requires_grad=True)
    y = fa.online_softmax(x)
    grads = torch.autograd.grad(y, x, torch.eye(24, device="cuda").view(24, 3, 8), is_grads_batched=True)[0]
    torch.testing.assert_close(grads.view(24, 24), torch.func.jacrev(lambda x: x.softmax(-1))(x.detach()).view(24, 24))
