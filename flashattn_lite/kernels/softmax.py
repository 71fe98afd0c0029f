"""The standalone online softmax in Triton: softmax of rows, or their (m, l); the kernels, then the plan of a launch.

One program owns a tile of ROWS neighbouring rows. `top` is the row maximum in natural units, and scores enter the
state measured from it: x * log2(e) would overflow float32 from 2.4e38 on and round away what sets large scores apart,
x - top does neither. Loop invariant after the columns before `start`: top is their maximum, l_i their sum of
exp(x - top), both float32. Bytes moved: one read and one write of a row that fits in a tile, else two reads and one
write; statistics alone always take one read.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, finish, reference, update_fixed
from flashattn_lite.kernels.interpreter import numpy_errors_off

MAX_ELEMENTS = 32768  # of a tile: 64 float32 registers in each of 512 threads, half of what they may have
STEP_ELEMENTS = 16384  # of one step along a longer row: 32 KiB of float16 under way, enough to hide memory's latency
SHORT_ELEMENTS = 4096  # of a tile of short rows: 32 in each of 128 threads
NEIGHBOURS = 32  # rows that lie side by side in memory and share a tile: 64 bytes of float16, two sectors
VECTOR_BYTES = 16  # the widest load of a thread
ROW_DIMS = 3  # row dimensions that the kernels decode


@triton.jit
def take(top, l_i, x):
    """Takes a tile x [M, N] in natural units into (top, l_i) [M]; returns them and p = exp(x - top) [M, N]."""
    top_new = tl.maximum(top, tl.max(x, 1))
    origin = reference(top_new)
    rescaled = l_i * tl.exp2((top - origin) * LOG2E)
    l_new, p = update_fixed(tl.zeros_like(top), rescaled, x - origin[:, None], LOG2E)
    return top_new, l_new, p


@triton.jit
def locate(size_1, size_r, ROWS: tl.constexpr):
    """This program's index in the two outer row dimensions and its ROWS indices in the inner one, all 64-bit."""
    tiles = tl.cdiv(size_r, ROWS)
    outer = tl.program_id(0) // tiles
    offs_r = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    return outer // size_1, outer % size_1, offs_r


@triton.jit
def offsets(offs_r, offs_n, stride_r, stride_n, UNIT: tl.constexpr, ACROSS: tl.constexpr):
    """[M, N] 64-bit element offsets. A unit stride is known when compiling, so that neighbours are loaded together."""
    if UNIT and ACROSS:
        return offs_r[:, None] + offs_n[None, :].to(tl.int64) * stride_n
    elif UNIT:
        return offs_r[:, None] * stride_r + offs_n[None, :]
    else:
        return offs_r[:, None] * stride_r + offs_n[None, :].to(tl.int64) * stride_n


@triton.jit
def load(x_ptr, offs, inside):
    """A tile [M, N] in float32; what lies outside its rows or columns is -inf, which adds nothing to a sum."""
    return tl.load(x_ptr + offs, mask=inside, other=float("-inf")).to(tl.float32)


# Nothing is specialized on a size or a stride, so nothing recompiles because a row grew. Vectorized access rests on
# ALIGN instead: strides, and the number of columns, come divided by it.
@triton.jit(do_not_specialize=range(2, 13))
def softmax_kernel(
    x_ptr, y_ptr, cols: tl.int64, size_1: tl.int64, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_y0: tl.int64, stride_y1: tl.int64, stride_yr: tl.int64, stride_yn: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, ACROSS: tl.constexpr, ALIGN: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns. WHOLE: a row is one tile, and stays on chip between its read and its write."""
    cols *= ALIGN
    i_0, i_1, offs_r = locate(size_1, size_r, ROWS)
    x_ptr += (i_0 * stride_x0 + i_1 * stride_x1) * ALIGN
    y_ptr += (i_0 * stride_y0 + i_1 * stride_y1) * ALIGN
    rows = (offs_r < size_r)[:, None]
    top = tl.full([ROWS], EMPTY_M, tl.float32)
    l_i = tl.full([ROWS], EMPTY_L, tl.float32)
    if WHOLE:
        offs_n = tl.arange(0, COLS)
        inside = rows & (offs_n < cols)[None, :]
        x = load(x_ptr, offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS), inside)
        top, l_i, p = take(top, l_i, x)
        inv_l, _ = finish(top, l_i)
        y = (p * inv_l[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offsets(offs_r, offs_n, stride_yr * ALIGN, stride_yn * ALIGN, Y_UNIT, ACROSS), y, mask=inside)
    else:
        for start in range(0, cols, COLS):
            offs_n = start + tl.arange(0, COLS)
            inside = rows & (offs_n < cols)[None, :]
            x = load(x_ptr, offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS), inside)
            top, l_i, _ = take(top, l_i, x)
        inv_l, _ = finish(top, l_i)
        origin = reference(top)
        for start in range(0, cols, COLS):
            offs_n = start + tl.arange(0, COLS)
            inside = rows & (offs_n < cols)[None, :]
            x = load(x_ptr, offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS), inside)
            p = tl.exp2((x - origin[:, None]) * LOG2E)  # [M, N]
            y = (p * inv_l[:, None]).to(y_ptr.dtype.element_ty)
            offs_y = offsets(offs_r, offs_n, stride_yr * ALIGN, stride_yn * ALIGN, Y_UNIT, ACROSS)
            tl.store(y_ptr + offs_y, y, mask=inside)


@triton.jit(do_not_specialize=range(3, 13))
def stats_kernel(
    x_ptr, m_ptr, l_ptr, cols: tl.int64, size_1: tl.int64, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_m0: tl.int64, stride_m1: tl.int64, stride_mr: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACROSS: tl.constexpr, ALIGN: tl.constexpr, X_UNIT: tl.constexpr,
):  # fmt: skip
    """m = max(x), l = sum of exp(x - m) along the columns. m and l share their strides, which ALIGN does not divide."""
    cols *= ALIGN
    i_0, i_1, offs_r = locate(size_1, size_r, ROWS)
    x_ptr += (i_0 * stride_x0 + i_1 * stride_x1) * ALIGN
    rows = offs_r < size_r
    top = tl.full([ROWS], EMPTY_M, tl.float32)
    l_i = tl.full([ROWS], EMPTY_L, tl.float32)
    for start in range(0, cols, COLS):
        offs_n = start + tl.arange(0, COLS)
        inside = rows[:, None] & (offs_n < cols)[None, :]
        x = load(x_ptr, offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS), inside)
        top, l_i, _ = take(top, l_i, x)
    offs_m = i_0 * stride_m0 + i_1 * stride_m1 + offs_r * stride_mr
    # A maximum passes over NaN, a sum does not: l_i tells of one (of +inf too, which top shows by itself).
    top = tl.where((l_i != l_i) & (top < float("inf")), l_i, top)
    tl.store(m_ptr + offs_m, top, mask=rows)
    tl.store(l_ptr + offs_m, l_i, mask=rows)


class RowDim(NamedTuple):
    """A dimension of rows: how many, and how far apart they lie in the input and in the result, in elements."""

    size: int
    stride_x: int
    stride_y: int


class Rows(NamedTuple):
    """How rows lie in memory. `across`: neighbouring rows are closer to each other than a row's own elements are."""

    dims: list[RowDim]  # as few as describe the rows, or ROW_DIMS; a tile runs along the last
    across: bool
    single_strides: list[int]  # of dimensions of size 1: they address nothing, but show how a larger batch is aligned


class Plan(NamedTuple):
    """All that a launch needs: `kernel[grid](*args, **kwargs)`, or `kernel.warmup(*args, grid=grid, **kwargs)`."""

    kernel: Any
    grid: tuple[int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def rows_of(x: Tensor, y: Tensor, dim: int) -> Rows:
    """The rows of x along dim, and of y, which has x's rank. Dimensions that are one in both tensors are joined."""
    dims = [RowDim(x.shape[i], x.stride(i), y.stride(i)) for i in range(x.dim()) if i != dim]
    nearest = min((d for d in dims if d.stride_x > 0), key=lambda d: (d.stride_x, -d.size), default=None)
    across = nearest is not None and nearest.stride_x < x.stride(dim)
    # The nearest stays even if its size is 1: a slice of a batch must be read as the batch is.
    kept = [d for d in dims if d.size != 1 or (across and d is nearest)]
    joined: list[RowDim] = []
    for d in sorted(kept, key=lambda d: (d.stride_x == 0, d.stride_x, d.stride_y), reverse=True):
        if joined and joined[-1][1:] == (d.size * d.stride_x, d.size * d.stride_y):
            joined[-1] = RowDim(joined[-1].size * d.size, d.stride_x, d.stride_y)
        else:
            joined.append(d)
    if not across:
        joined.sort(key=lambda d: d.size)
    joined = [RowDim(1, 0, 0)] * (ROW_DIMS - len(joined)) + joined
    return Rows(joined, across, [d.stride_x for d in dims if d.size == 1])


def tile_of(cols: int, across: bool) -> tuple[int, int, int]:
    """(ROWS, COLS, num_warps): from the length and layout of a row alone, so that no other row changes its result."""
    least = NEIGHBOURS if across else 1
    block = triton.next_power_of_2(max(cols, 1))
    if block * least > MAX_ELEMENTS:
        block = STEP_ELEMENTS // least
    rows = max(least, SHORT_ELEMENTS // block)
    return rows, block, min(max(rows * block // 1024, 4), 16)


def unit_apart(strides: list[int], across: bool) -> tuple[list[int], bool]:
    """Strides of (outer, outer, inner row, column), 0 for the unit one (the kernel knows it), and if there is one."""
    at = 2 if across else 3
    unit = strides[at] == 1
    return [0 if unit and i == at else stride for i, stride in enumerate(strides)], unit


def plan(x: Tensor, results: tuple[Tensor] | tuple[Tensor, Tensor], dim: int) -> Plan | None:
    """What writes softmax(x) along dim into results (y,), or statistics into (m, l); None if a copy must come first.

    y has x's shape; m and l have x's shape with 1 at dim, are float32 and lie alike. No result is empty.
    """
    cols, y = x.shape[dim], results[0]
    (dims, across, single_strides), wants_softmax = rows_of(x, y, dim), len(results) == 1
    if len(dims) > ROW_DIMS:
        return None
    x_strides, x_unit = unit_apart([*(d.stride_x for d in dims), x.stride(dim)], across)
    y_strides, y_unit = unit_apart([*(d.stride_y for d in dims), y.stride(dim)], across)
    vector = VECTOR_BYTES // x.element_size()
    size_r = dims[-1].size
    together = [cols, *x_strides, *(y_strides if wants_softmax else []), *single_strides]
    # Not for rows across: there the width of a load, and with it the order of a sum, would depend on the batch.
    align = vector if not across and math.gcd(vector, *together) == vector else 1
    sizes = (cols // align, dims[1].size, size_r)
    args = (x, *results, *sizes, *(stride // align for stride in x_strides))
    block_rows, block_cols, num_warps = tile_of(cols, across)
    kwargs = {"ROWS": block_rows, "COLS": block_cols, "ACROSS": across, "ALIGN": align, "X_UNIT": x_unit}
    kwargs |= {"num_warps": num_warps, "enable_fp_fusion": False}
    grid = (dims[0].size * dims[1].size * triton.cdiv(size_r, block_rows),)
    if wants_softmax:
        kwargs |= {"Y_UNIT": y_unit, "WHOLE": cols <= block_cols}
        return Plan(softmax_kernel, grid, (*args, *(stride // align for stride in y_strides)), kwargs)
    return Plan(stats_kernel, grid, (*args, *(d.stride_y for d in dims)), kwargs)


def launch(x: Tensor, results: tuple[Tensor] | tuple[Tensor, Tensor], dim: int) -> None:
    """Fills results, as in `plan`. Copies only rows that are spread over more than ROW_DIMS dimensions."""
    if results[0].numel() == 0:
        return
    planned = plan(x, results, dim)
    if planned is None:
        flat = tuple(torch.empty_like(result, memory_format=torch.contiguous_format) for result in results)
        launch(x.contiguous(), flat, dim)  # type: ignore[arg-type]
        for result, values in zip(results, flat, strict=True):
            result.copy_(values)
        return
    with torch.cuda.device(x.device) if x.is_cuda else numpy_errors_off():
        planned.kernel[planned.grid](*planned.args, **planned.kwargs)


def interpret(x: Tensor, results: tuple[Tensor] | tuple[Tensor, Tensor], dim: int) -> None:
    """`launch` on CPU tensors, through Triton's interpreter, which truncates float32 to bfloat16 where a GPU rounds."""
    if results[0].dtype != torch.bfloat16:
        launch(x, results, dim)
        return
    wide = torch.empty_like(results[0], dtype=torch.float32)
    launch(x, (wide,), dim)
    results[0].copy_(wide)
