"""The ring kernel's own source, run on NumPy: who draws which unit, addresses, slots, parts, whoever waits for whom.

Programs are threads that pause at random, of which only some may be there at once. A slot whose copy is on its way and
memory that nobody wrote hold rubbish. Not shown: warps within a program, its barriers, the GPU's arithmetic.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

np: Any = pytest.importorskip("numpy", "2")

KERNELS = Path(__file__).parent.parent / "flashattn_lite" / "kernels"
WARPS, RUBBISH = 2, 77
LOG2E = 1.4426950408889634
drawing = threading.Lock()
here = threading.local()  # a program's number, grid, copies on their way


class BF16:
    primitive_bitwidth, bits = 16, np.int16


class F32:
    primitive_bitwidth, bits = 32, np.float32


class T(np.ndarray):
    """A tensor, of no dimensions too."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)


def tensor(x, dtype=None):
    return np.asarray(x, dtype).view(T)


def pause():
    if random.random() < here.pause:
        time.sleep(random.random() * 1e-3)


class Ptr:
    def __init__(self, array, element, at=0):
        self.array, self.at, self.dtype = array, at, SimpleNamespace(element_ty=element)

    def __add__(self, offset):
        return Ptr(self.array, self.dtype.element_ty, self.at + np.asarray(offset))

    def __sub__(self, offset):
        return self + -offset

    def to(self, word):
        array = self.array.view(word)
        return Ptr(array, self.dtype.element_ty, self.at * len(array) // len(self.array))


class Shared:
    def __init__(self, array):
        self.array = array

    def index(self, at):
        return Shared(self.array[int(at)])

    def load(self, layout):
        return tensor(self.array.copy())

    def store(self, values):
        self.array[...] = values


def load(ptr, mask=True, other=0):
    return tensor(np.where(mask, ptr.array[np.where(mask, ptr.at, 0)], other), ptr.array.dtype)


def store(ptr, values, mask=True):
    at = ptr.at[np.broadcast_to(mask, ptr.at.shape)]
    assert (ptr.array[at] == RUBBISH).all()  # each element is written once
    ptr.array[at] = values[np.broadcast_to(mask, ptr.at.shape)]


def store_stats(m_ptr, l_ptr, offs, rows, top, l_i):
    for ptr, value in ((m_ptr, l_i if np.isnan(l_i) and top < np.inf else top), (l_ptr, l_i)):
        store(ptr + np.atleast_1d(offs), np.atleast_1d(value), np.atleast_1d(rows))


def asm(text, constraints, args, **options):
    if "atom" in text:
        pause()
        with drawing:
            ptr = args[0]
            number = int(ptr.array[0])
            ptr.array[0] += 1
        return tensor([number] + [0] * (WARPS - 1), np.int32)
    (ptr, *words), seen = args, []
    for word in range(2):  # one after the other, each as a whole
        pause()
        if words:
            ptr.array[ptr.at + word] = words[word]
        else:
            seen.append(tensor(ptr.array[ptr.at + word].copy()))
    return seen


def async_load(slot, ptr, mask=True):
    slot.array[...] = RUBBISH
    here.copies[-1].append((slot, ptr, mask))


def wait_group(ahead):
    while len(here.copies) - 1 > ahead:
        for slot, ptr, mask in here.copies.pop(0):
            slot.array[...] = np.where(mask, ptr.array[np.where(mask, ptr.at, 0)], RUBBISH)


def fma(a, b, c):
    return tensor(np.asarray(a, np.float64) * b + c, np.float32)


def largest(x, axis):
    return tensor((np.fmax if x.dtype == np.float32 else np.maximum).reduce(np.asarray(x), axis))


def widen(x, dtype):
    return x if dtype is F32 else tensor(np.stack([x << 16, x & -65536], -1).reshape(len(x), -1)).view(np.float32)


def larger_bfloat16(a, b):
    low, high = (np.fmax((x << 16).view(np.float32), (y << 16).view(np.float32)).view(np.int32)
                 for x, y in ((a, b), (a >> 16, b >> 16)))  # fmt: skip
    return (low >> 16 & 0xFFFF) | (high & -65536)


def kernel():
    language = SimpleNamespace(
        int32=np.int32, int64=np.int64, float32=np.float32, bfloat16=BF16, float16=None, constexpr=None,
        num_warps=lambda: WARPS, pointer_type=lambda word: word, static_range=range, static_assert=lambda true: None,
        program_id=lambda axis: tensor(here.program, np.int32), num_programs=lambda axis: tensor(here.grid, np.int32),
        arange=lambda a, b, layout: tensor(np.arange(a, b), np.int32), inline_asm_elementwise=asm, load=load,
        full=lambda shape, x, dtype, layout: tensor(np.full(shape, x), dtype),
        zeros=lambda shape, dtype, layout: tensor(np.zeros(shape, dtype)), zeros_like=np.zeros_like, abs=np.abs,
        convert_layout=lambda x, layout, assert_trivial=False: x, fma=fma, max=largest, store=store,
        maximum=lambda a, b: tensor(np.fmax(a, b)), minimum=lambda a, b: tensor(np.minimum(a, b)),
        sum=lambda x, axis: tensor(x.sum(axis)), reshape=np.reshape, gather=np.take, multiple_of=lambda x, n: x,
        where=lambda there, a, b: tensor(np.where(there, a, b)), exp2=lambda x: tensor(np.exp2(x), np.float32),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(np.full(shape, RUBBISH, dtype)),
        **dict.fromkeys(["BlockedLayout", "SliceLayout", "SwizzledSharedLayout"], lambda *layout: None),
    )  # fmt: skip
    known = dict(
        gl=language, gluon=SimpleNamespace(jit=lambda f=None, **options: f or (lambda f: f)), async_load=async_load,
        async_copy=SimpleNamespace(commit_group=lambda: here.copies.append([]), wait_group=wait_group), barrier=pause,
        EMPTY_M=-np.inf, EMPTY_L=0.0, LOG2E=LOG2E, reference=lambda m: tensor(np.where(m == -np.inf, 0, m), m.dtype),
        finish=lambda m, l_i: (tensor(np.where(l_i == 0, 0, 1 / l_i), np.float32), None), widen=widen,
        weights=lambda x, scale, m: tensor(np.exp2(fma(x, scale, -m[:, None]))), larger_bfloat16=larger_bfloat16,
        divided=lambda a, b: (a // b, a % b), tops=lambda x, wide, dtype, both: largest(wide, 1),
        store_stats=store_stats, NOTHING_BFLOAT16=-0x007F0080, NOTHING_FLOAT16=-0x03FF0400,
    )  # fmt: skip
    for name in ("softmax_exchange.py", "softmax_window.py", "softmax_unit.py", "softmax_ring.py"):
        text = (KERNELS / name).read_text(encoding="utf-8")
        exec(compile(text[text.index("@gluon.jit") :], name, "exec"), known)
    return known["ring_kernel"]


RING = kernel()


def at(result):
    return Ptr(result._base.reshape(-1).numpy(), np.float32, result.storage_offset())


def run(x, y, sums, parts, epoch, cols, slots, lag, chunks, between, grid, patience, resident, pauses):
    """y = softmax(x) [2, outer, rows, n], of larger tensors, by that many programs, `resident` of them at once.

    With room for sums: y = max(x) [2, outer, rows, 1], and the sums of exp(x - y).
    """
    element, word = (F32, torch.float32) if x.dtype == torch.float32 else (BF16, torch.int16)
    n, align, width, stats = x.shape[-1], 16 // x.element_size(), 4 // x.element_size(), sums is not None
    splits = -(-n // (cols - align * between))
    units = x[..., 0].numel() * splits
    starts = [x.storage_offset() % align, 0 if stats else y.storage_offset() % align]
    alike = starts[0] == starts[1] and all((a - b) % align == 0 for a, b in zip(x.stride(), y.stride(), strict=True))
    strides = (*x.stride()[:3], *y.stride()[:3])
    numbers = [tensor(v, np.int64) for v in (n, splits, x.shape[1], x.shape[2], *strides, *starts)]
    numbers = [tensor(v, np.int32) for v in (epoch, units)] + numbers
    counter, power, failed = np.zeros(1, np.int32), 1 << (splits - 1).bit_length(), []
    shape = (cols, slots, lag, power, patience, align, not between and n == splits * cols, between, alike, False)
    shape += (width, width == 2, chunks, stats)
    given = [Ptr(x._base.reshape(-1).view(word).numpy(), element, x.storage_offset())]
    given += [at(y), at(sums) if stats else None, Ptr(counter, None), Ptr(parts, None)]

    def program(number):
        here.program, here.grid, here.copies, here.pause = number, min(grid, units), [[]], pauses
        try:
            with np.errstate(all="ignore"):
                RING(*given, *numbers, *shape)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=program, args=(number,)) for number in range(min(grid, units))]
    random.shuffle(threads)
    for i in range(0, len(threads), resident):
        for act in (threading.Thread.start, threading.Thread.join):
            for thread in threads[i : i + resident]:
                act(thread)
    if failed:
        raise failed[0]


def spread(values, apart, first):
    """values [4, 3, 3, n] in a larger tensor of RUBBISH, rows n + `apart` from each other; the rows that are taken."""
    *dims, n = values.shape
    x = torch.full((*dims, n + apart), RUBBISH, dtype=values.dtype)[..., first : first + n].copy_(values)
    return x[::2, 1:]


def rubbish(values, *, n=None, apart, first):
    return spread(torch.full((*values.shape[:3], n or values.shape[3]), RUBBISH, dtype=torch.float32), apart, first)


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_whole_whoever_waits(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    dtype, alone, between = random.choice([torch.bfloat16, torch.float32]), seed % 5 == 0, seed % 3 > 0
    align, chunks = 16 // dtype.itemsize, random.choice([1, 2, 3])
    cols = 128 * WARPS * chunks * (4 // dtype.itemsize)
    step = cols - align * between
    short = align * random.choice([0, 1, 5, cols // align - 2]) + random.randrange(align) * between
    n = step * (1 if alone else random.randint(2, 9)) - short
    lag = 0 if alone else random.choice([1, 2, 3])
    values = (3 * torch.randn(4, 3, 3, n)).to(dtype)
    values[0, 1, 0], values[0, 1, 1, : n // 2] = -torch.inf, -torch.inf
    values[0, 1, 2, -1], values[2, 1, 0, 0] = torch.nan, torch.inf
    wide = values[::2, 1:].double()
    m = wide.amax(-1, keepdim=True)
    expected = torch.where(m != -torch.inf, torch.softmax(wide, -1), 0.0)
    sums = torch.where(m != -torch.inf, torch.exp(wide - m).sum(-1, keepdim=True), 0.0)
    parts = np.zeros(2 * 12 * 10, np.int64)
    tile, seen = (cols, lag + 1 + random.randint(0, 2), lag, chunks, between), []
    for epoch in (1, 2, 3, 4):
        parts ^= 1 << 20  # what a launch before this left are other numbers
        # Between addresses rows begin anywhere; their results as they do, or not.
        apart, first = (20 + random.randrange(9), random.randrange(20)) if between else (64, 0)
        x = spread(values, apart, first)
        alike = {"apart": apart + random.choice([0, 8]), "first": first}
        y = rubbish(values, **({"apart": 31, "first": 3} if between and epoch == 2 else alike))
        m_room, l_room = (rubbish(values, n=1, apart=2, first=1) for _ in "ml")
        grid, resident = (5, 5) if epoch == 1 else (random.randint(1, 13), random.choice([1, 3, 13]))
        patience, pauses = (50, 0.0) if epoch == 1 else (random.choice([0, 1, 30]), random.choice([0, 0.05, 0.4]))
        results = (y, None) if epoch < 4 else (m_room, l_room)
        run(x, *results, parts, epoch, *tile, grid, patience, resident, pauses)
        if epoch < 4:
            seen.append(y.clone())
        else:
            assert torch.equal(m_room.double().nan_to_num(nan=7), m.nan_to_num(nan=7))
            torch.testing.assert_close(l_room.double(), sums, rtol=1e-5, atol=0, equal_nan=True)
        for room in (y, m_room, l_room):
            room.fill_(RUBBISH)
            assert (room._base == RUBBISH).all()
    # |ln p| float32 eps from the exponent, up to 20 of them here, and a few more; below 1e-30 float32 thins out.
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-5, atol=1e-30, equal_nan=True)
    for other in seen[1:]:
        assert torch.equal(other.view(torch.int32), seen[0].view(torch.int32))
