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
        convert_layout=lambda x, layout, assert_trivial: x, fma=fma, max=largest, store=store,
        maximum=lambda a, b: tensor(np.fmax(a, b)), minimum=lambda a, b: tensor(np.minimum(a, b)),
        sum=lambda x, axis: tensor(x.sum(axis)),
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
    )  # fmt: skip
    for name in ("softmax_exchange.py", "softmax_ring.py"):
        text = (KERNELS / name).read_text(encoding="utf-8")
        exec(compile(text[text.index("@gluon.jit") :], name, "exec"), known)
    return known["ring_kernel"]


RING = kernel()


def run(x, parts, epoch, cols, slots, lag, chunks, again, grid, patience, resident, pauses):
    """softmax of x [2, outer, rows, n], of a larger tensor, by that many programs, `resident` of them at once."""
    whole, element = x._base, F32 if x.dtype == torch.float32 else BF16
    memory = whole.reshape(-1).view(torch.float32 if element is F32 else torch.int16).numpy()
    n, align, width = x.shape[-1], 16 // x.element_size(), 4 // x.element_size()
    splits, y = -(-n // cols), np.full(x.numel(), RUBBISH, np.float32)
    units = x[..., 0].numel() * splits
    strides = [s // align for s in (*x.stride()[:3], *torch.empty(x.shape).stride()[:3])]
    numbers = [tensor(v, np.int64) for v in (n // align, splits, x.shape[1], x.shape[2], *strides)]
    counter = np.zeros(1, np.int32)
    power, failed = 1 << (splits - 1).bit_length(), []
    shape = (cols, slots, lag, power, patience, align, n == splits * cols, False, width, width == 2, chunks, again)

    def program(number):
        here.program, here.grid, here.copies, here.pause = number, min(grid, units), [[]], pauses
        try:
            with np.errstate(all="ignore"):
                at = Ptr(memory, element, x.storage_offset()), Ptr(y, np.float32), Ptr(counter, None), Ptr(parts, None)
                RING(*at, tensor(epoch, np.int32), tensor(units, np.int32), *numbers, *shape)
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
    return torch.from_numpy(y.reshape(x.shape))


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_whole_whoever_waits(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    dtype, alone = random.choice([torch.bfloat16, torch.float32]), seed % 5 == 0
    align, chunks = 16 // dtype.itemsize, random.choice([1, 2, 3])
    cols = 128 * WARPS * chunks * (4 // dtype.itemsize)
    short = align * random.choice([0, 1, 5, cols // align - 1])
    n = cols * (1 if alone else random.randint(2, 9)) - short
    lag = 0 if alone else random.choice([1, 2, 3])
    x = (3 * torch.randn(4, 3, 3, n + 64)).to(dtype)[::2, 1:, :, :n]
    x[0, 0, 0], x[0, 0, 1, : n // 2], x[0, 0, 2, -1], x[1, 0, 0, 0] = -torch.inf, -torch.inf, torch.nan, torch.inf
    wide = x.double()
    expected = torch.where(wide.amax(-1, keepdim=True) != -torch.inf, torch.softmax(wide, -1), 0.0)
    parts = np.zeros(2 * 12 * 9, np.int64)
    tile, seen = (cols, lag + 1 + random.randint(0, 2), lag, chunks, random.random() < 0.5), []
    for epoch in (1, 2, 3):
        parts ^= 1 << 20  # what a launch before this left are other numbers
        grid, resident = (5, 5) if epoch == 1 else (random.randint(1, 13), random.choice([1, 3, 13]))
        patience, pauses = (50, 0.0) if epoch == 1 else (random.choice([0, 1, 30]), random.choice([0, 0.05, 0.4]))
        seen.append(run(x, parts, epoch, *tile, grid, patience, resident, pauses))
    # |ln p| float32 eps from the exponent, up to 20 of them here, and a few more; below 1e-30 float32 thins out.
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-5, atol=1e-30, equal_nan=True)
    for other in seen[1:]:
        assert torch.equal(other.view(torch.int32), seen[0].view(torch.int32))
