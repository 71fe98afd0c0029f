"""The ring kernel's own source, run on PyTorch (gluon_on_torch): who draws which unit, slots, parts, who waits.

Not shown: warps within a program and the barriers between them, the GPU's arithmetic.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from flashattn_lite import target as targets
from flashattn_lite.kernels import softmax_launch
from flashattn_lite.kernels.tuning_softmax import RingTile
from tests.exhaustive import quick
from tests.gluon_on_torch import RUBBISH, Sources, launch
from tests.gluon_on_torch.pointers import Pointer, store
from tests.gluon_on_torch.sources import WARPS, language

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="the same without TRITON_INTERPRET=1")


def spread(values: Tensor, apart: int, first: int) -> Tensor:
    """values [4, 3, 3, n] in memory of RUBBISH, rows n + `apart` from each other; the rows that are taken.

    The memory ends with the last of them: nothing behind it is anybody's to read.
    """
    *dims, n = values.shape
    x = torch.full((*dims, n + apart), RUBBISH, dtype=values.dtype)[..., first : first + n].copy_(values)
    taken = x[::2, 1:, :2]
    end = taken[-1, -1, -1].storage_offset() + n
    return x._base.flatten()[:end].clone().as_strided(taken.shape, taken.stride(), taken.storage_offset())


def rubbish(values: Tensor, *, n: int | None = None, apart: int, first: int) -> Tensor:
    dtype = values.dtype if n is None else torch.float32
    return spread(torch.full((*values.shape[:3], n or values.shape[3]), RUBBISH, dtype=dtype), apart, first)


def store_once(ptr: Pointer, results: Any, mask: Any = True) -> None:
    at, wanted, _ = ptr.wanted(mask, results)
    assert (ptr.memory[at[wanted]] == RUBBISH).all(), "written twice"
    store(ptr, results, mask)


class Ring:
    """The kernel of some sources on rows of one length, tile after tile and launch after launch."""

    def __init__(self, seed: int, sources: Sources, patch: pytest.MonkeyPatch) -> None:
        self.kernel = sources.load("flashattn_lite.kernels.softmax_ring").ring_kernel
        self.patch, self.seeds = patch, itertools.count(1000 * seed)
        patch.setattr(language, "store", store_once)
        self.words, self.epoch = torch.zeros(0, dtype=torch.int64), 0

    def run(self, x: Tensor, results: Any, tile: RingTile, programs: int, patience: int, at_once: int) -> None:
        """`programs` of them, `at_once` on the GPU; what a launch before this left in the words are other numbers."""
        if not self.words.numel():  # of 8 rows: nobody may look behind the last one's
            self.words = torch.zeros(2 * 8 * tile.split(x.shape[3]), dtype=torch.int64)
        self.words ^= 1 << 20
        self.epoch += 1
        room = (torch.zeros(1, dtype=torch.int32), self.words, self.epoch)
        self.patch.setattr(softmax_launch, "room_for", lambda x, units, splits: room)
        self.patch.setattr(softmax_launch, "PATIENCE", patience)
        rows = softmax_launch.rows_of(x, results[0], 3)
        ready = softmax_launch.ring_launch(x, results, rows.dims, x.shape[3], not tile.spare, tile, programs)
        names = ready.kernel.arg_names[len(ready.args) :]
        args = (*ready.args, *(ready.kwargs[name] for name in names))
        launch(self.kernel, ready.grid[0], args, next(self.seeds), at_once)
        # Of each unit a part that others know for this launch's: else all would wait in vain, and compute it.
        assert tile.split(x.shape[3]) == 1 or (self.words >> 32 == self.epoch).all()


def check(seed: int, sources: Sources, patch: pytest.MonkeyPatch) -> None:
    """Rows of one length: three softmaxes, by different programs from different places, the same bits; statistics."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype, alone, between = choose.choice([torch.bfloat16, torch.float32]), seed % 5 == 0, seed % 3 > 0
    dtype = torch.float16 if dtype == torch.bfloat16 and seed % 2 else dtype
    align, chunks = 16 // dtype.itemsize, choose.choice([1, 2, 3])
    cols = 128 * WARPS * chunks * (4 // dtype.itemsize)
    step = cols - align * between
    short = align * choose.choice([0, 1, 5, cols // align - 2]) + choose.randrange(align) * between
    n = step * (1 if alone else choose.randint(2, 6)) - short
    lag = 0 if alone else choose.choice([1, 2, 3])
    slots = lag + 1 + choose.randint(0, 2)
    tile = RingTile(cols, WARPS, slots, lag, programs=1, chunks=chunks, spare=align * between)
    values = (3 * torch.randn(4, 3, 3, n)).to(dtype)
    values[0, 1, 0], values[0, 1, 1, : n // 2] = -torch.inf, -torch.inf
    values[0, 2, 0, -1], values[2, 1, 0, 0] = torch.nan, torch.inf
    # Where two bytes have a reference off by 1/400, and where it would overflow as a power of 2.
    values[2, 1, 1], values[2, 2, 0], values[2, 2, 1] = 61440.0, torch.finfo(dtype).max, torch.finfo(dtype).min
    wide = values[::2, 1:, :2].double()
    m = wide.amax(-1, keepdim=True)
    expected = torch.where(m != -torch.inf, torch.softmax(wide, -1), 0.0)
    sums = torch.where(m != -torch.inf, torch.exp(wide - m).sum(-1, keepdim=True), 0.0)
    ring, seen = Ring(seed, sources, patch), []
    for number in range(4):
        # Between addresses rows begin anywhere; their results as they do, or not.
        apart, first = (20 + choose.randrange(9), choose.randrange(20)) if between else (64, 0)
        x = spread(values, apart, first)
        alike = {"apart": apart + choose.choice([0, 8]), "first": first}
        y = rubbish(values, **({"apart": 31, "first": 3} if between and number == 1 else alike))
        stats = [rubbish(values, n=1, apart=2, first=1) for _ in "ml"]
        programs, at_once = (5, 5) if number == 0 else (choose.randint(1, 13), choose.choice([1, 3, 13]))
        patience = 50 if number == 0 else choose.choice([0, 1, 30])
        ring.run(x, (y,) if number < 3 else tuple(stats), tile, programs, patience, at_once)
        if number < 3:
            seen.append(y.clone())
        else:
            assert torch.equal(stats[0].double().nan_to_num(nan=7), m.nan_to_num(nan=7))
            torch.testing.assert_close(stats[1].double(), sums, rtol=1e-5, atol=0, equal_nan=True)
        for result in (y, *stats):
            result.fill_(RUBBISH)
            assert (result._base == RUBBISH).all()
    # |ln p| float32 eps from the exponent, up to 20 of them here, and a few more, below 1e-30 float32 thins out; and
    # the result's own rounding.
    eps = 1e-5 + torch.finfo(dtype).eps / 2 * (dtype != torch.float32)
    least = 2.0**-24 if dtype == torch.float16 else 1e-30
    torch.testing.assert_close(seen[0].double(), expected, rtol=eps, atol=least, equal_nan=True)
    for other in seen[1:]:
        assert torch.equal(other.nan_to_num(7), seen[0].nan_to_num(7))  # of float16 torch gives NaN either sign


# Between them each dtype, number of chunks and lag, parts that are alone, rows between addresses and not.
@pytest.mark.parametrize("seed", quick(range(12), (0, 1, 2, 5, 6, 7)))
def test_rows_are_whole_whoever_waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, Sources(), monkeypatch)


@pytest.mark.parametrize("end", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_that_end_beside_the_border_of_a_chunk(
    dtype: torch.dtype, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element before, at or after it: neighbours are cleared from there on, the last row's end is loaded there."""
    align, half = 16 // dtype.itemsize, 128 * WARPS * (4 // dtype.itemsize)
    torch.manual_seed(0)
    values = torch.randn(4, 3, 3, half + end).to(dtype)
    lies = {"apart": 2 * align - end, "first": 0}  # each begins at a 16-byte address, so only its end is to be cleared
    x, y = spread(values, **lies), rubbish(values, **lies)
    tile = RingTile(2 * half, WARPS, slots=2, lag=0, programs=1, chunks=2, spare=align)
    Ring(0, Sources(), monkeypatch).run(x, (y,), tile, programs=3, patience=0, at_once=3)
    # A float32 sum's rounding; the result's own.
    expected = torch.softmax(values[::2, 1:, :2].double(), -1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5 + torch.finfo(dtype).eps, atol=2.0**-24)


# (what is wrong: the module, what stands there, what stands there instead)
BROKEN = {
    "a slot is read before its copy has landed": ("softmax_ring", "wait_group(AHEAD)", "wait_group(AHEAD + 1)"),
    "a slot is filled while it is needed": (
        "softmax_ring", "ring[c].index(i % T.SLOTS)", "ring[c].index((i + 1) % T.SLOTS)"),
    "neighbours are not cleared": (
        "softmax_ring", "            if not T.EVEN:\n                clear(",
        "            if False:\n                clear("),
    "what lies behind the last row is read": ("softmax_window", "gl.minimum(vectors, sizes[3] - start // ALIGN)",
        "(vectors + 0 * sizes[3])"),
    "a row's last elements are not loaded": ("softmax_unit", "if words * T.WIDTH < end", "if words * T.WIDTH > end"),
    "a row's odd element is not loaded": ("softmax_window", "(offs_n < end)\n    if", "(offs_n + 1 < end)\n    if"),
    "a row's last elements bring neighbours": (
        "softmax_window", "here = (offs_n >= lead) & (offs_n < end)\n    if", "here = offs_n < end\n    if"),
    "sums are not turned": ("softmax_unit", "        l_i = turned(l_i, window[0])\n", "        l_i = l_i\n"),
    "parts of the launch before are taken": ("softmax_exchange", "((m_word >> 32).to(gl.int32) == epoch) & (", "("),
    "half of a part is taken": ("softmax_exchange", " & ((l_word >> 32).to(gl.int32) == epoch)", ""),
    "a missing part is not missed": ("softmax_exchange", "gl.where(published, 0, 1)", "gl.where(published, 0, 0)"),
    "a number is drawn twice": ("softmax_ring", "+ (AHEAD + 1) * programs", "+ AHEAD * programs"),
    "the output is another unit's": ("softmax_ring", "(i + T.SLOTS - LAG) % T.SLOTS", "i % T.SLOTS"),
}  # fmt: skip


# Problems before these do not show it.
FIRST = {
    "a row's last elements bring neighbours": 11,
    "sums are not turned": 5,
    "parts of the launch before are taken": 4,
    "half of a part is taken": 6,
}


# Late to be found, each beside one like it that is found sooner.
LATE = {
    "a row's last elements bring neighbours": "neighbours are not cleared",
    "a row's odd element is not loaded": "a row's last elements are not loaded",
    "parts of the launch before are taken": "half of a part is taken",
    "the output is another unit's": "a slot is filled while it is needed",
}


@pytest.mark.parametrize("wrong", quick(BROKEN, BROKEN.keys() - LATE.keys()))
def test_one_thing_wrong_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_all() -> None:
        for seed in range(FIRST.get(wrong, 0), 30):
            check(seed, sources, monkeypatch)

    sources = Sources(BROKEN[wrong])
    with pytest.raises(AssertionError):
        check_all()
