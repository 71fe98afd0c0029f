"""Rows of several tiles: any split is the whole, however many programs stay, to the bit where it must be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashattn_lite import target as targets
from flashattn_lite.kernels import softmax_launch as kernels
from flashattn_lite.kernels.tuning_softmax import MOST_PARTS, SWEEP, SoftmaxTile, softmax_tile
from flashattn_lite.softmax import online_softmax, softmax_stats
from flashattn_lite.target import Target
from flashattn_lite.testing.softmax import assert_softmax, assert_stats
from tests.exhaustive import one_in
from tests.test_softmax_kernel import kernel_device  # noqa: F401

INF, NAN = math.inf, math.nan
EPS = torch.finfo(torch.float32).eps
# 205 columns in 1, 2, 4 and 13 splits
TILES = [SoftmaxTile(1, 256, 4), SoftmaxTile(2, 128, 4), SoftmaxTile(4, 64, 4), SoftmaxTile(8, 16, 4)]
SWEEPS = [SoftmaxTile(1, cols, 4, sweeps=True) for cols in (128, 64, 16)]


def hostile(device: torch.device, cols: int = 205) -> Tensor:
    """Rows with infinities, NaN and far values, some of them on one split alone."""
    x = 5 * torch.randn(10, cols, generator=torch.Generator().manual_seed(0))
    x[1], x[2, 3], x[3, -1], x[4, :-1] = -INF, INF, NAN, -INF
    x[5, : cols // 2], x[6, cols // 2 :] = -INF, -3.3e38
    x[7, cols // 3], x[8] = 3.3e38, 1e6 + x[8]
    x[9] = 61440.0  # of two bytes: so far from 0 its reference is off by 1/400
    return x.to(device)


def run(launches: list[kernels.Plan]) -> None:
    with kernels.interpreted():
        for kernel, grid, args, kwargs in launches:
            kernel[grid](*args, **kwargs)


def softmax(x: Tensor, tile: SoftmaxTile, dim: int = 1) -> Tensor:
    y = torch.empty_like(x)
    launches = kernels.plan(x, (y,), dim, tile=tile)
    assert launches is not None
    run(launches)
    return y


def stats(x: Tensor, tile: SoftmaxTile, dim: int = 1) -> tuple[Tensor, Tensor]:
    m, l_i = (torch.empty([1 if i == dim else n for i, n in enumerate(x.shape)], device=x.device) for _ in "ml")
    launches = kernels.plan(x, (m, l_i), dim, tile=tile)
    assert launches is not None
    run(launches)
    return m, l_i


def layouts(device: torch.device) -> list[tuple[Tensor, int]]:
    x = hostile(device)
    beside = torch.empty(10, 216, device=device)[:, 3:208].copy_(x)  # rows that start at no multiple of 16 bytes
    aligned = hostile(device, 208)
    return [(x, 1), (beside, 1), (aligned, 1), (x.T.contiguous(), 0)]


@pytest.mark.parametrize(
    ("dtype", "tile"), one_in(2, [torch.float16, torch.bfloat16, torch.float32], TILES + SWEEPS), ids=str
)
def test_any_split_is_the_whole(
    kernel_device: torch.device, tile: SoftmaxTile, dtype: torch.dtype  # noqa: F811
) -> None:  # fmt: skip
    if kernel_device.type == "cpu" and dtype == torch.bfloat16 and tile.cols == 16:
        pytest.skip("slow in the interpreter, which has seen such tiles of the other dtypes")
    for x, dim in layouts(kernel_device):
        if tile.sweeps and dim == 0:  # rows side by side are not swept
            continue
        x = x.to(dtype)
        y, wide = softmax(x, tile, dim), x.double()
        seen = wide.amax(dim, keepdim=True) != -INF
        expected = torch.where(seen, torch.softmax(wide, dim), 0.0)
        # |ln p| eps from the exponent, which the split rounds in two parts, and a few eps of p
        budget = 8 * EPS * (expected + torch.special.entr(expected)) + 4 * EPS * expected * 10
        if dtype.itemsize == 2:  # one rounding to it, of subnormals too
            budget += torch.finfo(dtype).eps * (expected + torch.finfo(dtype).smallest_normal)
        assert torch.equal(y.isnan(), expected.isnan())
        assert ((y.double() - expected).abs() <= budget).logical_or(expected.isnan()).all()


@pytest.mark.parametrize("tile", [*TILES, SoftmaxTile(1, 16, 4, steps=3), SoftmaxTile(1, 16, 4, steps=99)], ids=str)
def test_statistics_of_any_split(kernel_device: torch.device, tile: SoftmaxTile) -> None:  # noqa: F811
    for x, dim in layouts(kernel_device):
        m, l_i = stats(x, tile, dim)
        m_whole = x.amax(dim, keepdim=True)
        l_whole = torch.exp(x.double() - m_whole.double().where(m_whole != -INF, 0.0)).sum(dim, keepdim=True)
        torch.testing.assert_close(m, m_whole, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(l_i.double(), l_whole, rtol=8 * EPS, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cols", [47, 48, 49])
def test_a_row_that_ends_a_word_before_a_tile_takes_no_other(
    kernel_device: torch.device,  # noqa: F811
    cols: int,
    dtype: torch.dtype,
) -> None:
    x = torch.zeros(3, cols, dtype=dtype, device=kernel_device)
    x[1:] = 9
    m, l_i = stats(x, SoftmaxTile(1, 16, 4))
    assert m[:, 0].tolist() == [0, 9, 9] and l_i[:, 0].tolist() == [cols] * 3


@pytest.mark.parametrize("tile", [TILES[0], TILES[2], SWEEPS[1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_that_lie_anywhere(kernel_device: torch.device, tile: SoftmaxTile, dtype: torch.dtype) -> None:  # noqa: F811
    """Over three dimensions; their elements apart, of which two are no word; apart in the result alone, and in both."""
    x = hostile(kernel_device, 208).to(dtype)
    apart = x.new_empty(10, 4 * 208)[:, ::4].copy_(x)
    over_three = x[torch.arange(36) % 10].view(3, 4, 3, 208)[:, 1:3, :2]
    for rows, dim in ((over_three, 3), (apart, 1), *((y[:, :, None].expand(-1, -1, 2), 1) for y in (x, apart))):
        assert_softmax(softmax(rows, tile, dim), rows, dim)
        if not tile.sweeps:
            m, l_i = stats(rows, tile, dim)
            assert_stats(m.squeeze(dim), l_i.squeeze(dim), rows, dim)


def staying(x: Tensor, tile: SoftmaxTile, programs: int, monkeypatch: pytest.MonkeyPatch) -> SoftmaxTile:
    """That tile with so many programs in all."""
    monkeypatch.setattr(kernels, "processors", lambda x, target: 1)
    return replace(tile, programs=programs)


@pytest.mark.parametrize(("tile", "programs"), [(TILES[0], 3), (TILES[1], 1), (TILES[2], 100), (TILES[2], 8)], ids=str)
def test_programs_that_stay_give_the_same_bits(
    kernel_device: torch.device, tile: SoftmaxTile, programs: int, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Units taken one after the other, the next one's elements on their way, or by a program each."""
    for x, dim in layouts(kernel_device)[2:]:
        ahead = staying(x, tile, programs, monkeypatch)
        one, other = (softmax(x, t, dim) for t in (tile, ahead))
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        one, other = (stats(x, replace(t, cols=t.cols // 2, steps=2), dim) for t in (tile, ahead))
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


def test_programs_that_stay_are_no_more_than_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "processors", lambda x, target: 132)
    tile, grids = SoftmaxTile(1, 256, 4, programs=2), []
    for rows in (1000, 264, 7):
        x = torch.empty(rows, 205, device="meta")
        (launch,) = kernels.plan(x, (torch.empty_like(x),), 1, tile=tile)
        grids.append(launch.grid)
    assert grids == [(264,), (264,), (7,)]


def test_several_tiles_a_program_are_the_whole(kernel_device: torch.device) -> None:  # noqa: F811
    x = torch.randn(3, 205, device=kernel_device)
    y = softmax(x, SoftmaxTile(1, 16, 4, steps=3))
    torch.testing.assert_close(y, softmax(x, TILES[0]), rtol=16 * EPS, atol=0)


def test_counts_are_zero_again(kernel_device: torch.device) -> None:  # noqa: F811
    """What the next launch must find; so that a second launch with the same counts is right too."""
    x, y = torch.randn(6, 205, device=kernel_device), torch.empty(6, 205, device=kernel_device)
    m, l_i = torch.empty(2, 6, 1, device=kernel_device)
    for results, programs in (((y,), 0), ((y,), 1), ((m, l_i), 0)):
        launches = kernels.plan(x, results, 1, tile=SoftmaxTile(2, 64, 4, programs=programs))
        for _ in range(3):
            results[0].fill_(NAN)
            run(launches)
            assert (launches[0].args[5][:3] == 0).all()  # of the 3 tiles of rows
            assert not results[0].isnan().any()


def test_parts_lie_at_16_bytes() -> None:
    for count in (1, 4, 5, 13):
        m, l_i = kernels.parts_for(torch.empty(3), count)
        assert m.numel() >= count <= l_i.numel() and m.data_ptr() % 16 == l_i.data_ptr() % 16 == 0


def test_splits_are_whole_rows_and_no_more_parts_than_fit() -> None:
    assert SoftmaxTile(1, 16384, 8).split(0) == (1, 1)
    assert SoftmaxTile(1, 16384, 8).split(16385) == (2, 1)
    for tile in (SoftmaxTile(1, 16384, 8), SoftmaxTile(32, 256, 8), SoftmaxTile(1, 8192, 8, steps=4)):
        for cols in (1, 16384, 2**20 + 1, 2**24, 2**31 + 7):
            splits, steps = tile.split(cols)
            assert splits * tile.rows <= MOST_PARTS
            assert (splits - 1) * steps * tile.cols < cols <= splits * steps * tile.cols


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tile_hangs_on_the_row_alone(across: bool, dtype: torch.dtype) -> None:
    """The same plan of columns for one row and for a thousand: their number is no argument of the tile."""
    target = Target("cuda", 90, "sm_90")
    for cols in (1000, 40000, 2**20, 1001, 2049, 30522, 50257, 2**20 + 1):
        plans = []
        for rows in (32, 1000):
            x = torch.empty((cols, rows) if across else (rows, cols), dtype=dtype, device="meta")
            launches = kernels.plan(x, (torch.empty_like(x),), 0 if across else 1, target)
            plans.append([(launch.kernel, launch.kwargs) for launch in launches])
        assert plans[0] == plans[1]
        kernel, options = plans[0][0]
        if kernel is not kernels.ring_kernel:
            wide = not across and cols * dtype.itemsize % 16 == 0
            tile = softmax_tile(cols, dtype.itemsize, target, across=across, wide=wide)
            assert tile.cols == options["COLS"]


def swept(cols: int, dtype: torch.dtype) -> kernels.Plan | None:
    """The launch that sweeps rows of so many columns on a GPU without cp.async, if they are swept."""
    x = torch.empty(3, cols, dtype=dtype, device="meta")
    launches = kernels.plan(x, (torch.empty_like(x),), 1, Target("cuda", 75, "sm_75"))
    assert launches is not None
    return launches[0] if launches[0].kernel is kernels.sweep_kernel else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_between_addresses_are_swept_in_more_than_one_tile(dtype: torch.dtype) -> None:
    """sweep_kernel reads its first tile without a mask."""
    for cols in (2049, 4097, 8193, 16383, 32767, 2**18 - 1):
        launch = swept(cols, dtype)
        assert launch is not None and launch.kwargs["COLS"] < cols and launch.grid == (3,)
    for cols in (2047, 4096, 32768, 2**18 + 1):
        assert swept(cols, dtype) is None
    for most, tile in SWEEP[dtype.itemsize].items():
        assert tile.cols <= most // 2
        assert tile.num_warps <= 16  # of 64 threads on an AMD GPU, which takes 1024


@pytest.mark.slow
def test_a_sum_over_two_to_the_24_elements(device: torch.device, interpreting: bool) -> None:
    if interpreting:
        pytest.skip("the interpreter takes minutes; tests/test_softmax.py has 2^20 elements")
    x = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).to(device)
    for row in (x, torch.zeros_like(x)):
        m, l_i = softmax_stats(row)
        exact = torch.exp(row.double() - m.double()).sum().item()
        assert abs(l_i.item() - exact) <= 8 * EPS * exact
        assert abs(online_softmax(row).double().sum().item() - 1) <= 8 * EPS


@pytest.mark.skipif(not targets.interpreting(), reason="on a GPU, test_softmax_gpu.py calls twice")
@pytest.mark.parametrize(("cols", "across"), [(205, False), (8192 * 3 + 5, False), (205, True)])
def test_a_prepared_call_has_room_of_its_own(cols: int, across: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run through the interpreter in place of a GPU's launcher: other tensors, parts and counts each time."""

    class Interpreted:
        launcher = None

        def __init__(self, kernel: Any, blocks: int, options: dict[str, Any]) -> None:
            self.grid = (blocks, 1, 1)
            self.run = lambda args: run([kernels.Plan(kernel, (blocks,), args, options)])

        def __call__(self, args: tuple[Any, ...]) -> None:
            self.run(args)

    monkeypatch.setattr(kernels, "Starter", Interpreted)
    monkeypatch.setattr(kernels, "on", lambda device, launch, *args: launch(*args))
    x = hostile(torch.device("cpu"), cols)
    x = x.T.contiguous().T if across else x  # rows side by side take two launches
    other, y, m, l_i = 2 * x, torch.empty_like(x), torch.empty(10, 1), torch.empty(10, 1)
    softmax_of, stats_of = kernels.prepare(x, (y,), 1), kernels.prepare(x, (m, l_i), 1)
    assert isinstance(softmax_of, kernels.ReadyTwo) == across
    for values in (x, other, x):
        softmax_of(values, y)
        assert torch.equal(y.nan_to_num(7), online_softmax(values).nan_to_num(7))
        stats_of(values, m, l_i)
        for got, want in zip((m, l_i), softmax_stats(values), strict=True):
            assert torch.equal(got[:, 0].nan_to_num(7), want.nan_to_num(7))
