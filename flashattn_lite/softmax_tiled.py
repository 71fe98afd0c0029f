"""softmax and its (m, l) over tiles in plain torch: what runs where Triton does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashattn_lite import state

TILE = 131072  # elements of a tile for each thread, 512 KiB of float32: fewer pay for calls, more fall out of the cache
COLS = 16384  # of one row at once: from 32768 on torch would split the sum of a lone row between threads


def _rows(x: Tensor, *results: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching views of x [..., N] and of results with the same leading dimensions: a tile's rows, at least one."""
    rows = x.shape[:-1]
    if rows.numel() * min(x.shape[-1], COLS) <= TILE * torch.get_num_threads() or rows.numel() <= 1:
        yield x, *results
        return
    axis = max(range(len(rows)), key=lambda i: rows[i])
    half = rows[axis] // 2
    for start, length in ((0, half), (half, rows[axis] - half)):
        yield from _rows(*(part.narrow(axis, start, length) for part in (x, *results)))


def _columns(x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """x [..., N] in tiles of columns, each laid out row by row: a sum's order must not depend on where its row lies."""
    for start in range(0, x.shape[-1], COLS):
        yield x[..., start : start + COLS].to(dtype).contiguous()


def _log2_from(origin: Tensor, x: Tensor) -> Tensor:
    """A tile x [..., N], natural units, as scores in log2 units measured from origin [...]. Fresh memory.

    x * log2(e) would overflow float32 from 2.4e38 on and round away what sets large scores apart; x - origin does not.
    """
    return (x - origin.unsqueeze(-1)).mul_(state.LOG2E)


def _take(top: Tensor, l_i: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Takes a tile x [..., N] in natural units into (top, l_i) [...]; returns them and p = exp(x - top) [..., N].

    top: the row maximum, natural units; l_i: the sum of exp(x - top), the state, pinned at 0, of scores less top.
    """
    top_new = torch.maximum(top, x.amax(-1))
    origin = state.reference(top_new)
    l_new = l_i * state.exp2((top - origin) * state.LOG2E)
    p = state.update_pinned_(l_new, _log2_from(origin, x))
    return top_new, l_new, p


def _empty(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The state of x's rows before any column. Sums of many tiles in float64, where a device has it for sure."""
    top = x.new_full(x.shape[:-1], state.EMPTY_M, dtype=dtype)
    return top, x.new_full(top.shape, state.EMPTY_L, dtype=torch.float64 if x.device.type == "cpu" else dtype)


def softmax(x: Tensor, y: Tensor) -> None:
    """softmax(x) [..., N] into y, by tiles."""
    dtype = inner_dtype(x)
    for x_rows, y_rows in _rows(x, y):
        top, l_i = _empty(x_rows, dtype)
        for tile in _columns(x_rows, dtype):
            top, l_i, p = _take(top, l_i, tile)
        inv_l = state.finish(top, l_i)[0].unsqueeze(-1)
        if x.shape[-1] <= COLS:
            y_rows.copy_(p.mul_(inv_l))
            continue
        origin = state.reference(top)
        for tile, y_tile in zip(_columns(x_rows, dtype), y_rows.split(COLS, -1), strict=True):
            y_tile.copy_(state.exp2_(_log2_from(origin, tile)).mul_(inv_l))


def stats(x: Tensor, m: Tensor, l_sum: Tensor) -> None:
    """(m, l) of x [..., N] into m and l_sum [...], by tiles."""
    dtype = inner_dtype(x)
    for x_rows, m_rows, l_rows in _rows(x, m, l_sum):
        top, l_i = _empty(x_rows, dtype)
        for tile in _columns(x_rows, dtype):
            top, l_i, _ = _take(top, l_i, tile)
        m_rows.copy_(top)
        l_rows.copy_(l_i)


def inner_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
