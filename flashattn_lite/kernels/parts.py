"""float32 tensors as their three bfloat16 parts in memory, made once for all programs that multiply by them.

A tile of parts is copied to where matrix units read it. Where each program makes them of what it streams, they go
through registers and back to shared memory, and the backward takes 1.3 to 1.5 times as long (tuning.BACKWARD_FLOAT32).
Bytes moved: of an element 4 read, 6 written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn_lite.kernels.device.products import parts
from flashattn_lite.kernels.operands import sizes, strides
from flashattn_lite.kernels.start import Starter
from flashattn_lite.kernels.tuning import cdiv, power_of_two

ROWS = 16  # of a program; not tuned
ALIGNED = 8  # columns: the tensor copy engine takes steps of 16 bytes


@triton.jit(do_not_specialize=["heads", "rows", "count"])
def parts_kernel(x_ptr, out_ptr, x_strides, heads, rows, count, DIM: tl.constexpr, WIDTH: tl.constexpr,
                 BLOCK_D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """x [batch, heads, rows, DIM] to out [3, batch, heads, rows, WIDTH], 0 past DIM. count: rows of all heads."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    head, exists = row // rows, (row < count)[:, None]
    ptrs = x_ptr + head // heads * x_strides[0] + head % heads * x_strides[1] + row % rows * x_strides[2]
    ptrs = ptrs[:, None] + offs_d.to(tl.int64)[None, :] * x_strides[3]
    high, middle, low = parts(tl.load(ptrs, mask=exists & (offs_d < DIM)[None, :], other=0.0))
    to = out_ptr + row[:, None] * WIDTH + offs_d[None, :]
    size, written = count.to(tl.int64) * WIDTH, exists & (offs_d < WIDTH)[None, :]
    tl.store(to, high, mask=written)
    tl.store(to + size, middle, mask=written)
    tl.store(to + 2 * size, low, mask=written)


class Parts:
    """What makes the parts of tensors of this metadata: float32, [batch, heads, rows, dim] or packed."""

    def __init__(self, x: Tensor, packed: bool) -> None:
        batch, self.heads, self.rows, self.dim = sizes(x, packed)
        self.packed, self.count, self.device = packed, batch * self.heads * self.rows, x.device
        width = cdiv(self.dim, ALIGNED) * ALIGNED
        # There is no map of an empty tensor, which nobody reads.
        self.shape = (3, *(max(size, 1) for size in (batch, self.heads, self.rows)), width)
        self.start = Starter(parts_kernel, cdiv(self.count, ROWS), {"num_warps": 4})

    def empty(self) -> Tensor:
        """[part, batch, heads, rows, columns] to be filled."""
        return torch.empty(self.shape, dtype=torch.bfloat16, device=self.device)

    def descriptor(self, block: list[int]) -> TensorDescriptor:
        """Tiles of one part of one head; reads 0 outside."""
        x = torch.empty(self.shape, dtype=torch.bfloat16, device="meta")  # it is asked for nothing but its form
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, 1, *block])

    def arguments(self, x: Tensor, out: Tensor) -> tuple[object, ...]:
        """Of the launch."""
        width = self.shape[-1]
        steps, block_d = strides(x, self.packed), power_of_two(width)
        return x, out, steps, self.heads, self.rows, self.count, self.dim, width, block_d, ROWS
