"""ring_kernel from the host: which rows it serves, its arguments, the memory that launches of a stream share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_softmax_kernel import Noted

pytest.importorskip("triton")

from flashattn_lite import target as targets
from flashattn_lite.kernels import softmax_launch as kernels
from flashattn_lite.kernels import tuning
from flashattn_lite.kernels.tuning_softmax import ring_tile
from flashattn_lite.target import Target

HOPPER = Target("cuda", 90, "sm_90")


def planned(x: Tensor, dim: int = 1, target: Target = HOPPER, **given: Any) -> list[kernels.Plan]:
    launches = kernels.plan(x, (torch.empty_like(x),), dim, target, **given)
    assert launches is not None
    return launches


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("sms", [8, 16, 20, 24, 32, 132])
def test_the_number_of_rows_does_not_choose_the_kernel(sms):
    """On a part of a GPU too, where the units of a long row have no room: the schedule of few rows has more places."""
    for cols in range(65536, 600000, 8192):
        for itemsize in (2, 4):
            served = {kernels.ring_for(cols, itemsize, HOPPER, sms, wide=True, stats=False, rows=rows) is not None
                      for rows in (1, 2, 16, 100000)}  # fmt: skip
            assert len(served) == 1, (cols, itemsize, served)


def names(*launches: kernels.Plan) -> list[str]:
    return [launch.kernel.__name__ for launch in launches]


on_a_gpu = pytest.mark.skipif(targets.interpreting(), reason="ring_kernel is Gluon, which the interpreter does not run")


@on_a_gpu
@pytest.mark.parametrize("cols", [16392, 32768, 32776, 2**17 + 8, 2**20, 4097, 30522, 50257, 60001, 2**19 + 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_ring_hangs_on_the_row_alone(cols: int, dtype: torch.dtype) -> None:
    (one,), (many,) = planned(empty(1, cols, dtype=dtype)), planned(empty(1000, cols, dtype=dtype))
    assert one.kernel is many.kernel
    vector = 16 // dtype.itemsize
    between = cols % vector != 0
    whole = cols <= (51192 if dtype.itemsize == 2 else 26620 if between else 32768)
    in_registers = dtype == torch.float32 and whole and not between and cols > 22528  # which fill such a tile
    assert names(one) == ["softmax_kernel" if in_registers else "ring_kernel"]
    if in_registers:
        assert one.kwargs == many.kwargs
    else:
        shape, other = one.kwargs["T"], many.kwargs["T"]
        # Of few units another schedule, of which no bit depends.
        assert one.kwargs | {"T": replace(shape, SLOTS=other.SLOTS, LAG=other.LAG)} == many.kwargs
        assert shape.ALIKE and (vector, between) == (shape.ALIGN, shape.BETWEEN)
        units, length, splits = one.args[6:9]
        step = shape.COLS - vector * between
        assert (splits == 1) == whole and (splits - 1) * step < cols == length <= splits * step
        assert one.grid == (units,) == (splits,)
        tile = ring_tile(cols, dtype.itemsize, HOPPER, wide=not between)
        assert many.grid == (1000 if whole else tile.programs * kernels.OFFLINE,)  # all of them on the GPU at once


@on_a_gpu
def test_a_ring_gives_up_a_slot_before_a_program() -> None:
    on = {arch: ring_tile(2**17, 4, Target("cuda", arch, f"sm_{arch}"), wide=True) for arch in (80, 86, 90)}
    assert [(tile.slots, tile.programs) for tile in on.values()] == [(5, 2), (6, 1), (5, 2)]


@on_a_gpu
@pytest.mark.parametrize(("wide", "stats"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_are_whole_where_two_have_a_place(itemsize: int, wide: bool, stats: bool) -> None:
    """A slot holds the row wherever it begins, no more than a third of it is empty, and few sizes serve all lengths."""
    sizes = set()
    for arch in (80, 86, 90):
        target = Target("cuda", arch, f"sm_{arch}")
        for cols in range(8, 60_000, 8) if wide else range(1, 60_000, 37):
            tile = ring_tile(cols, itemsize, target, wide=wide, stats=stats)
            if tile is None:
                assert stats or cols <= (32768 if wide else 2048)
                continue
            chunk, vector = tile.cols // tile.chunks, 0 if wide else 16 // itemsize
            assert chunk * tile.chunks == tile.cols and chunk & (chunk - 1) == 0 and chunk % (32 * tile.num_warps) == 0
            if tile.split(cols) == 1:
                sizes.add((arch, tile.cols, tile.num_warps))
                assert cols + vector <= tile.cols and tile.cols - cols <= max(vector + chunk, tile.cols // 3)
                assert (tile.fit(1, itemsize, target) >= 2 or wide) and tile.lag == 0 and tile.slots == 1
            else:
                assert not stats and tile.lag > 0 and tile.slots > tile.lag + 1
    assert max(sum(size[0] == arch for size in sizes) for arch in (80, 86, 90)) <= 25  # a kernel each


@on_a_gpu
def test_a_ring_serves_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    long, whole = empty(16, 2**20), empty(64, 32768)
    assert names(*planned(long), *planned(whole), *planned(empty(16, 2**21))) == ["ring_kernel"] * 3
    between = [empty(16, 2**17 + 3), empty(16, 2**20 + 1, dtype=torch.float32), empty(16, 40008)[:, 2:40000]]
    between += [empty(16, 2**17 + 8)[:, 3:], empty(16, 2**20 + 3)]
    assert names(*(launch for x in between for launch in planned(x))) == ["ring_kernel"] * 5
    two, one = ["stats_kernel", "normalise_kernel"], ["sweep_kernel"]
    assert names(*planned(empty(16, 2**17, 2)[:, :, 0])) == one  # elements that lie apart
    assert names(*planned(empty(2**20, 16), 0)) == two
    assert names(*planned(empty(16, 2**23))) == two  # more units of a row than have a place at once
    old, amd = Target("cuda", 75, "sm_75"), Target("hip", "gfx942", "gfx942")
    assert names(*planned(long, target=old), *planned(whole, target=old)) == [*two, "softmax_kernel"]
    assert names(*planned(long, target=amd), *planned(empty(16, 2**17), target=amd)) == two + one
    assert names(*planned(empty(16, 50257), target=amd), *planned(empty(16, 50257), target=old)) == one * 2
    assert names(*planned(long, target=Target("cuda", 86, "sm_86"))) == ["ring_kernel"]  # 99 KiB: one program an SM
    # float32: 256 units of a row, but 132 programs
    assert names(*planned(long.float(), target=Target("cuda", 86, "sm_86"))) == two
    monkeypatch.setattr(tuning, "SHARED_KIB", {90: 64})
    assert names(*planned(long), *planned(whole)) == [*two, "softmax_kernel"]
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "ring_kernel", None)  # as where Gluon lacks something
    assert names(*planned(long), *planned(empty(16, 2**17)), *planned(whole)) == [*two, *one, "softmax_kernel"]


@on_a_gpu
@pytest.mark.parametrize(("cols", "kernel"), [(4096, "stats"), (4098, "stats"), (4097, "ring"), (2**20 + 1, "stats")])
def test_whose_statistics_a_ring_makes(cols: int, kernel: str) -> None:
    """Of rows that are a unit and lie at no address of 16 bytes, nor of two elements."""
    m = empty(16, 1, dtype=torch.float32)
    launches = kernels.plan(empty(16, cols), (m, m), 1, HOPPER)
    assert launches is not None and names(*launches) == [f"{kernel}_kernel"]


@on_a_gpu
def test_a_result_that_lies_as_its_rows_do_is_stored_by_16_bytes() -> None:
    whole = empty(9, 5003)
    cut = whole[:, 2:]
    results = {"its own": torch.empty_like(whole), "a cut": cut, "another row": empty(10, 5003)[1:]}
    alike = {
        name: kernels.plan(whole[:, : y.shape[1]], (y,), 1, HOPPER)[0].kwargs["T"].ALIKE for name, y in results.items()
    }
    assert alike == {"its own": True, "a cut": False, "another row": False}


def test_a_tensor_that_starts_between_words_is_not_aligned() -> None:
    memory = torch.zeros(8 * 1000 + 8, dtype=torch.float16)
    views = [memory[at:][: 8 * 1000].view(8, 1000) for at in (0, 1, 2, 4, 8)]
    assert [planned(x)[0].kwargs["ALIGN"] for x in views] == [8, 1, 2, 2, 8]
    launches = [kernels.plan(views[0], (y,), 1, HOPPER) for y in views]
    assert [launch.kwargs["ALIGN"] for (launch,) in launches] == [8, 1, 2, 2, 8]


@on_a_gpu
@pytest.mark.parametrize("cols", [32768, 2**18])
def test_a_prepared_ring_brings_every_argument_in_its_place(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on", lambda device, launch, *args: launch(*args))
    x = empty(6, cols)
    (launch,) = planned(x)
    ready, started = kernels.Ready(launch, 2), []
    ready.start = Noted(ready.start, started)
    ready(x, launch.args[1])
    known = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.kwargs
    (given,) = started
    words, others = known.pop("parts_ptr"), given.pop("parts_ptr")
    counter, another = known.pop("counter_ptr"), given.pop("counter_ptr")
    assert known.pop("l_ptr") is launch.args[1] and given.pop("l_ptr") is x  # nobody's
    assert known == given
    if cols == 32768:
        assert words is others is counter is another is x
    else:
        assert words.shape == others.shape == (2 * 6 * 32 + 1,)
        assert counter.dtype == another.dtype == torch.int32 and counter.shape == another.shape == (2,)


def test_what_a_stream_keeps_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and words are found again on their stream alone, grow, and no epoch comes twice on the same words."""
    stream, capturing = SimpleNamespace(cuda_stream=1), False
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(kernels, "current_stream", lambda index: stream.cuda_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for kept in ("_counts", "_words"):
        monkeypatch.setattr(kernels, kept, {})
    numbers = itertools.count()
    monkeypatch.setattr(kernels, "counters", SimpleNamespace(next=lambda device: next(numbers)))
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"), get_device=lambda: 0)
    counts, (first_zero, words, epoch) = kernels.counts_for(x, 3), kernels.room_for(x, 40, 4)
    assert kernels.counts_for(x, 1000) is counts and kernels.counts_for(x, 5000).numel() >= 5000
    zero, again, later = kernels.room_for(x, 12, 4)
    assert again is words and later == epoch + 1 and zero != first_zero and kernels.room_for(x, 12, 1) == (x, x, 1)
    assert kernels.room_for(x, 68, 4)[1].numel() >= 2 * 68  # which are more than the words, units are not
    _, larger, first = kernels.room_for(x, 1000, 4)
    assert larger.numel() >= 2000 and first == 1 and not larger.any()
    kernels._words[0, 1] = larger, iter([2**31 - 1])
    assert [kernels.room_for(x, 12, 4)[2] for _ in range(3)] == [2**31 - 1, 1, 2]
    assert kernels._words[0, 1][0] is not larger
    stream.cuda_stream = 2
    assert kernels.room_for(x, 12, 4)[2] == 1 and kernels.counts_for(x, 3) is not counts
    capturing = True
    each = [kernels.room_for(x, 12, 4) for _ in range(2)]
    assert each[0][1] is not each[1][1] and [epoch for *_, epoch in each] == [1, 1]
    assert all(zero.data_ptr() == words[24:].data_ptr() and not words.any() for zero, words, _ in each)
    assert kernels.counts_for(x, 3) is not kernels.counts_for(x, 3)
