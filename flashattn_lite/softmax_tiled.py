"""softmax and its (m, l) in plain torch, over tiles but for softmax on the CPU: what runs where Triton does not."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from flashattn_lite import state

TILE = 131072  # elements of a tile for each thread, 512 KiB of float32: fewer pay for calls, more fall out of the cache
# Elements of whole rows for each thread that torch takes in one call: a quarter took 1.3 times as long at 4096 x 4096,
# 2.1 at 128 x 50257 (two threads, float32), four times as many no less.
WHOLE = 1 << 19
COLS = 16384  # of one row at once: from 32768 on torch would split the sum of a lone row between threads


def _rows(most: int, x: Tensor, *results: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching views of x [..., N] and of results with the same leading dimensions: at most so many rows, or one."""
    rows = x.shape[:-1]
    if rows.numel() <= max(most, 1):
        yield x, *results
        return
    axis = max(range(len(rows)), key=lambda i: rows[i])
    half = rows[axis] // 2
    for start, length in ((0, half), (half, rows[axis] - half)):
        yield from _rows(most, *(part.narrow(axis, start, length) for part in (x, *results)))


def _rows_of_tiles(x: Tensor, *results: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return _rows(TILE * torch.get_num_threads() // max(1, min(x.shape[-1], COLS)), x, *results)


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
    """softmax(x) [..., N] into y."""
    if x.device.type == "cpu":
        threads = torch.get_num_threads()
        for x_rows, y_rows in _rows(max(threads, WHOLE * threads // max(1, x.shape[-1])), x, y):
            _by_torch(x_rows, y_rows)
    else:
        _by_tiles(x, y)


def _by_torch(x: Tensor, y: Tensor) -> None:
    """torch's kernel is 2 to 5 times as fast as tiles in Python are, but adds up a row number by number.

    So its result is divided by what it adds up to, which torch.sum says to a few eps.
    """
    dtype = inner_dtype(x)
    p = torch.softmax(x, -1, out=y) if x.dtype == dtype else torch.softmax(x, -1, dtype)
    l_i = x.new_zeros(x.shape[:-1], dtype=torch.float64)
    for tile in _columns(p, dtype):
        l_i += tile.sum(-1)
    inv_l = l_i.reciprocal_().to(dtype)
    if bool(inv_l.isnan().any()):  # NaN or +inf, which all of the row becomes, or nothing but -inf, of which 0 does
        p.masked_fill_((x.amax(-1, keepdim=True) == -torch.inf), 0.0)
        inv_l.nan_to_num_(1.0)
    torch.mul(p, inv_l.unsqueeze(-1), out=y)


def _by_tiles(x: Tensor, y: Tensor) -> None:
    dtype = inner_dtype(x)
    for x_rows, y_rows in _rows_of_tiles(x, y):
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
    for x_rows, m_rows, l_rows in _rows_of_tiles(x, m, l_sum):
        top, l_i = _empty(x_rows, dtype)
        for tile in _columns(x_rows, dtype):
            top, l_i, _ = _take(top, l_i, tile)
        m_rows.copy_(top)
        l_rows.copy_(l_i)


def row_sums(p: Tensor, dim: int) -> Tensor:
    """p.sum(dim, keepdim=True), tile by tile, so that no other row has a part in a row's order."""
    p = p.movedim(dim, -1)
    sums = (tile.sum(-1, keepdim=True).double() for tile in _columns(p, p.dtype))
    return functools.reduce(torch.add, sums).to(p.dtype).movedim(-1, dim)


def inner_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
