"""Products of plain torch, slot by slot. On the CPU a slot's bits follow from its own operands alone.

A slot is a key/value head of a sequence. On the CPU `torch.bmm` multiplies one slot by another algorithm than several,
and operands that lie between whole addresses otherwise than others (docs/design.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGN = 8  # columns; in narrower steps the bits of a product depend on where its operands lie in memory (measured)
BLOCKED_ROWS = 16  # from so many on torch's product adds up blocks of keys first (MKL, AVX2)


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[slots, rows, columns] as an operand of a product: cast, columns padded with zeros to ALIGN, `in_line`."""
    x = F.pad(x.to(dtype), (0, -x.shape[-1] % ALIGN)) if x.shape[-1] % ALIGN else x.to(dtype)
    return x if in_line(x) else x.clone(memory_format=torch.contiguous_format)


def in_line(x: Tensor) -> bool:
    """On the CPU: columns side by side, every row at a multiple of ALIGN columns, none inside of another.

    Else where operands lie shows in the bits, and one slot is a view where many are a copy, which torch makes of
    columns that lie apart, and `RowTile.keys` of slots that have no one step. Of rows that overlap, or are one row
    expanded, torch multiplies one slot after the other, the same slot to other bits (measured).
    """
    if x.device.type != "cpu":
        return True
    steps = (step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)
    aligned = x.data_ptr() % (ALIGN * x.element_size()) == 0
    apart = x.shape[-2] <= 1 or x.stride(-2) >= x.shape[-1]
    return x.stride(-1) == 1 and aligned and apart and all(step % ALIGN == 0 for step in steps)


def sum_is_finite(x: Tensor) -> bool:
    """Then all of x is finite. If not, some of it may be infinite or NaN, or the sum has overflowed: look at each."""
    return bool(torch.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32))))


def two_slots(*operands: Tensor) -> tuple[Tensor, ...]:
    """On the CPU a lone slot twice."""
    return tuple(x.expand(2, -1, -1) if x.shape[0] == 1 and x.device.type == "cpu" else x for x in operands)


def product(a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
    """a @ b for each slot, summed and returned in float32 at least; a is rounded to b's dtype.

    `room`, flat, holds the result of two slots or more, and is written.
    """
    if b.dtype.itemsize < 4:
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    left, right = two_slots(a, b)
    shape = (*left.shape[:2], right.shape[2])
    out = None if room is None else room[: shape[0] * shape[1] * shape[2]].view(shape)
    return torch.bmm(left, right, out=out)[: a.shape[0]]


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total += a @ b for each slot.

    Of few rows torch adds key after key to what total holds, whose low bits are lost: there apart.
    """
    if b.dtype.itemsize < 4 or a.shape[1] < BLOCKED_ROWS:
        return total.add_(product(a, b))
    sums, left, right = two_slots(total, a, b)
    return total.baddbmm_(a, b) if sums is total else total.copy_(torch.baddbmm(sums, left, right)[:1])
