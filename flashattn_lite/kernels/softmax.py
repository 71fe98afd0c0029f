"""The standalone online softmax in Triton: softmax of rows, or their (m, l), by one program or several for each row.

A unit of work is a tile of ROWS neighbouring rows or, where a row is several tiles, as many of them as one of its
`splits` has. With AHEAD each of the programs that the GPU holds at once takes every `programs`-th unit, and a unit's
elements are on their way while its program still works on the one before, in the input's own format, which for
two-byte elements is half the registers. Those are bound by instructions, of which each element costs 8 in
softmax_kernel and 7 in stats_kernel: so a full tile has no mask, a pair stays one word until it is computed with, and
x - top is an fma.

`top` is the row maximum in natural units, and scores enter the state measured from it: x * log2(e) would overflow
float32 from 2.4e38 on and round away what sets large scores apart, x - top does neither. Invariant: (top, l_i) is the
maximum of the columns taken so far and their sum of exp(x - top), both float32. A split's (top, l_i) is its part; the
parts of a row are merged in one order, pairwise, so that a row has the same bits whichever program comes last.

| kernel | programs of a row | bytes moved |
| --- | --- | --- |
| softmax_kernel | one | one read, one write: the row stays in registers |
| sweep_kernel | one, tile after tile, twice | the same, if L2 holds the rows at work: where the ring does not serve |
| ring_kernel (softmax_ring.py) | its splits, all on the GPU at once | one read, one write: long rows and odd ones |
| stats_kernel, normalise_kernel | its splits, in two launches | two reads, one write: rows across, or longer still |

stats_kernel alone is `softmax_stats`: always one read; of a row's splits the one that comes last merges the parts.
Where rows lie at no address of 16 bytes, nor of two elements, and fit, ring_kernel takes its place.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, finish, merge, reference, update_fixed
from flashattn_lite.kernels.softmax_tiles import (
    addresses,
    columns,
    fetch,
    in_words,
    inside,
    lanes,
    load,
    load_tile,
    locate,
    place,
    tile_of,
    tops,
    unit_of,
    widen,
)


@triton.jit
def weighed(x, top, DTYPE: tl.constexpr):
    """(l, p [M, N], fix) of x [M, N] in natural units: p * fix [M] = exp(x - top) and l is the sum of p.

    Where x was of two bytes: one fma instead of a subtraction and a product. Its reference is rounded, by less than
    2^-7, which is common to a row; fix takes it off. From 2^16 on neighbours of those formats lie 2^8 apart and p is 1
    or 0 by whichever factor: 1 neither rounds nor overflows.
    """
    zero, origin = tl.zeros_like(top), reference(top)
    if DTYPE.primitive_bitwidth == 16:
        scale = tl.where(tl.abs(origin) < 65536.0, LOG2E, 1.0)
        m_ref = origin * scale
        l_i, p = update_fixed(m_ref, zero, x, scale[:, None])
        fix = tl.exp2(-tl.fma(origin, scale, -m_ref))
    else:
        l_i, p = update_fixed(zero, zero, x - origin[:, None], LOG2E)
        fix = zero + 1.0
    return l_i, p, fix


@triton.jit
def merge_from(origin, m_a, l_a, m_b, l_b):
    """l of the `merge` of (m, l) in natural units, seen from origin, which no m passes."""
    _, l_i, _, _ = merge((m_a - origin) * LOG2E, l_a, (m_b - origin) * LOG2E, l_b)
    return l_i


@triton.jit
def merge_along(m_i, l_i):
    """(top, l_i) [M] of M rows of states [M, N] in natural units."""
    top = tl.max(m_i, 1)
    origin = reference(top)[:, None]
    # Each is merged with a state that has seen nothing and stands at top: so all have one reference, and l only adds.
    return top, tl.sum(merge_from(origin, m_i, l_i, origin, tl.zeros_like(l_i)), 1)


@triton.jit
def merged_parts(m_parts_ptr, l_parts_ptr, tile, splits, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """(top, l_i) [ROWS] over all splits of a tile of rows; PARTS, a power of two, holds their number."""
    offs_s = tl.arange(0, PARTS)
    offs = (tile.to(tl.int64) * splits + offs_s)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, PARTS]
    there = (offs_s < splits)[None, :]
    # From the L2 cache, past the L1: other programs wrote them.
    m_i = tl.load(m_parts_ptr + offs, mask=there, other=EMPTY_M, cache_modifier=".cg")
    l_i = tl.load(l_parts_ptr + offs, mask=there, other=EMPTY_L, cache_modifier=".cg")
    return merge_along(m_i, l_i)


@triton.jit
def store_part(m_parts_ptr, l_parts_ptr, part, m_part, l_part, ROWS: tl.constexpr):
    """Leaves the state of a tile's rows over one of their splits for who merges them."""
    offs = tl.cast(part, tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(m_parts_ptr + offs, m_part)
    tl.store(l_parts_ptr + offs, l_part)


@triton.jit
def arrive(count_ptr, splits, split):
    """Counts a split whose part is stored; what it returns is 0 from the last of a tile's splits on.

    Split 0 takes off what the others add: so the count is 0 again, what the next launch must find, and it is 0 for one
    that has arrived only when all have.
    """
    tl.debug_barrier()  # every thread's part is stored before one of them counts it
    mine = tl.where(split == 0, 1 - splits, 1)
    return tl.atomic_add(count_ptr, mine, sem="acq_rel") + mine


# Nothing is specialized on a size or a stride, so nothing recompiles because a row grew. Vectorized access rests on
# ALIGN instead: strides, and the number of columns, come divided by it.
@triton.jit(do_not_specialize=range(2, 14))
def softmax_kernel(
    x_ptr, y_ptr, units: tl.int32, cols: tl.int64, size_1: tl.int32, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_y0: tl.int64, stride_y1: tl.int64, stride_yr: tl.int64, stride_yn: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, AHEAD: tl.constexpr, ACROSS: tl.constexpr, ALIGN: tl.constexpr,
    EVEN: tl.constexpr, FLAT: tl.constexpr, WIDTH: tl.constexpr, BOTH: tl.constexpr, X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, for rows that are one tile. Without AHEAD each program has one."""
    x_strides, y_strides = (stride_x0, stride_x1, stride_xr, stride_xn), (stride_y0, stride_y1, stride_yr, stride_yn)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = COLS // WIDTH
    offs_w, offs_n = tl.arange(0, WORDS), tl.arange(0, COLS)
    words, cols = cols * (ALIGN // WIDTH), cols * ALIGN
    first, programs = tl.program_id(0), tl.num_programs(0)
    at = locate(first, size_1, size_r, ROWS, FLAT)
    x = load(x_ptr, x_strides, at, offs_w, size_r, words, ALIGN, X_UNIT, ACROSS, WIDTH, EVEN)
    for unit in range(first, units if AHEAD else first + 1, programs if AHEAD else 1):
        wide = widen(x, DTYPE)
        top = tops(x, wide, DTYPE, BOTH)
        if AHEAD:
            at = locate(unit + programs, size_1, size_r, ROWS, FLAT)
            rows = tl.where(unit + programs < units, size_r, 0)
            x = load(x_ptr, x_strides, at, offs_w, rows, words, ALIGN, X_UNIT, ACROSS, WIDTH, EVEN)
        # What p is off by is common to a row.
        l_i, p, _ = weighed(wide, top, DTYPE)
        inv_l, _ = finish(l_i, l_i)
        y = (p * inv_l[:, None]).to(y_ptr.dtype.element_ty)
        at = locate(unit, size_1, size_r, ROWS, FLAT)
        there = inside(at, offs_n, size_r, cols, EVEN)
        tl.store(addresses(y_ptr, y_strides, at, offs_n, ALIGN, Y_UNIT, ACROSS), y, mask=there)


@triton.jit
def take(top, l_i, x, DTYPE: tl.constexpr, BOTH: tl.constexpr):
    """Takes a tile x, as it was loaded, into (top, l_i) [M]."""
    wide = widen(x, DTYPE)
    top_new = tl.maximum(top, tops(x, wide, DTYPE, BOTH))
    l_new, _, fix = weighed(wide, top_new, DTYPE)
    return top_new, l_i * tl.exp2((top - reference(top_new)) * LOG2E) + l_new * fix


@triton.jit(do_not_specialize=range(2, 13))
def sweep_kernel(
    x_ptr, y_ptr, cols: tl.int64, size_1: tl.int32, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_y0: tl.int64, stride_y1: tl.int64, stride_yr: tl.int64, stride_yn: tl.int64,
    COLS: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr, FLAT: tl.constexpr, WIDTH: tl.constexpr,
    BOTH: tl.constexpr, X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, for rows of more than COLS columns, each of which one program goes over twice.

    Forwards for (top, l_i), which each of LANES has for its own columns until the end; then backwards for y, so that
    the L2 cache still has what was read last. The next tile is always on its way. An access of two or four bytes costs
    as many instructions as one of 16, and so would its mask: the last tile alone has one.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    WORDS: tl.constexpr = COLS // WIDTH
    STEP: tl.constexpr = ALIGN // WIDTH
    i_0, i_1, i_r = place(tl.program_id(0), size_1, size_r, 1, FLAT)
    x_ptr = in_words(x_ptr, WIDTH) + (i_0 * stride_x0 + i_1 * stride_x1 + i_r * stride_xr) * STEP
    y_ptr += (i_0 * stride_y0 + i_1 * stride_y1 + i_r * stride_yr) * ALIGN
    step_x, step_y = 1 if X_UNIT else stride_xn * STEP, 1 if Y_UNIT else stride_yn * ALIGN
    last = ((cols * ALIGN - 1) // COLS).to(tl.int32)
    left = (cols * ALIGN - last * COLS).to(tl.int32)  # columns of the last tile
    there, stored = tl.arange(0, WORDS)[None, :] < left // WIDTH, tl.arange(0, COLS)[None, :] < left
    top, l_i = tl.full([LANES], EMPTY_M, tl.float32), tl.full([LANES], EMPTY_L, tl.float32)
    x = fetch(tile_of(x_ptr, step_x, 0, WORDS, X_UNIT), None, DTYPE, True)
    for number in range(1, last):
        taken = lanes(x, 1, WORDS, LANES, STEP)
        x = fetch(tile_of(x_ptr, step_x, number, WORDS, X_UNIT), None, DTYPE, True)
        top, l_i = take(top, l_i, taken, DTYPE, BOTH)
    taken = lanes(x, 1, WORDS, LANES, STEP)
    x = fetch(tile_of(x_ptr, step_x, last, WORDS, X_UNIT), there, DTYPE, False)
    top, l_i = take(top, l_i, taken, DTYPE, BOTH)
    top, l_i = take(top, l_i, lanes(x, 1, WORDS, LANES, STEP), DTYPE, BOTH)
    top, l_i = merge_along(tl.reshape(top, [1, LANES]), tl.reshape(l_i, [1, LANES]))
    inv_l, _ = finish(top, l_i)

    wide = widen(x, DTYPE)
    x = fetch(tile_of(x_ptr, step_x, last - 1, WORDS, X_UNIT), None, DTYPE, True)
    _, p, fix = weighed(wide, top, DTYPE)
    y = (p * (fix * inv_l)[:, None]).to(OUT)
    tl.store(tile_of(y_ptr, step_y, last, COLS, Y_UNIT), y, mask=stored)
    for back in range(1, last + 1):
        wide = widen(x, DTYPE)
        x = fetch(tile_of(x_ptr, step_x, tl.maximum(last - back - 1, 0), WORDS, X_UNIT), None, DTYPE, True)
        _, p, fix = weighed(wide, top, DTYPE)
        y = (p * (fix * inv_l)[:, None]).to(OUT)
        tl.store(tile_of(y_ptr, step_y, last - back, COLS, Y_UNIT), y)


@triton.jit
def store_stats(m_ptr, l_ptr, offs, rows, top, l_i):
    """Writes the statistics of rows, where `rows` says that they exist."""
    # A maximum passes over NaN, a sum does not: l_i tells of one (of +inf too, which top shows by itself).
    top = tl.where((l_i != l_i) & (top < float("inf")), l_i, top)
    tl.store(m_ptr + offs, top, mask=rows)
    tl.store(l_ptr + offs, l_i, mask=rows)


@triton.jit(do_not_specialize=range(6, 19))
def stats_kernel(
    x_ptr, m_ptr, l_ptr, m_parts_ptr, l_parts_ptr, counts_ptr,
    units: tl.int32, cols: tl.int64, splits: tl.int32, steps: tl.int32, size_1: tl.int32, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_m0: tl.int64, stride_m1: tl.int64, stride_mr: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    ACROSS: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, FLAT: tl.constexpr,
    WIDTH: tl.constexpr, BOTH: tl.constexpr, X_UNIT: tl.constexpr,
):  # fmt: skip
    """m = max(x), l = sum of exp(x - m) along the columns; m and l share their strides, which ALIGN does not divide.

    ONE: rows are a tile each, or less. PARTS 1: a unit is whole rows. More: it is `steps` tiles of them, whose part is
    stored, and the one that comes last merges the parts. Without AHEAD each program has one unit. The next tile is
    always on its way. Each of a row's LANES has a state of its own until a unit's end, so that its threads need not
    meet before.
    """
    x_strides = stride_x0, stride_x1, stride_xr, stride_xn
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = COLS // WIDTH
    words = cols * (ALIGN // WIDTH)
    tl.static_assert(PARTS == 1 or not AHEAD)
    first, programs = tl.program_id(0), tl.num_programs(0)
    tile, split = first, first * 0
    if PARTS > 1:
        tile, split = unit_of(first, splits, units, ACROSS)
    at, begin = place(tile, size_1, size_r, ROWS, FLAT), split.to(tl.int64) * steps
    x = load_tile(x_ptr, x_strides, at, begin, 0, size_r, words, WORDS, ROWS, ALIGN, X_UNIT, ACROSS, WIDTH, EVEN)
    for unit in range(first, units if AHEAD else first + 1, programs if AHEAD else 1):
        top, l_i = tl.full([ROWS * LANES], EMPTY_M, tl.float32), tl.full([ROWS * LANES], EMPTY_L, tl.float32)
        offs_r = at[2] + tl.arange(0, ROWS)
        offs_m = at[0] * stride_m0 + at[1] * stride_m1 + offs_r * stride_mr
        tiles = 1 if ONE else tl.minimum(steps, tl.cdiv(words, WORDS) - begin).to(tl.int32)
        for i in range(1, tiles if AHEAD else tiles + 1):
            taken = lanes(x, ROWS, WORDS, LANES, ALIGN // WIDTH)
            rows = size_r if AHEAD else tl.where(i < tiles, size_r, 0)
            x = load_tile(x_ptr, x_strides, at, begin, i, rows, words, WORDS, ROWS, ALIGN, X_UNIT, ACROSS, WIDTH, EVEN)
            top, l_i = take(top, l_i, taken, DTYPE, BOTH)
        if AHEAD:
            taken = lanes(x, ROWS, WORDS, LANES, ALIGN // WIDTH)
            at = place(unit + programs, size_1, size_r, ROWS, FLAT)
            rows = tl.where(unit + programs < units, size_r, 0)
            x = load_tile(x_ptr, x_strides, at, begin, 0, rows, words, WORDS, ROWS, ALIGN, X_UNIT, ACROSS, WIDTH, EVEN)
            top, l_i = take(top, l_i, taken, DTYPE, BOTH)
        top, l_i = merge_along(tl.reshape(top, [ROWS, LANES]), tl.reshape(l_i, [ROWS, LANES]))
        if PARTS == 1:
            store_stats(m_ptr, l_ptr, offs_m, offs_r < size_r, top, l_i)
        else:
            store_part(m_parts_ptr, l_parts_ptr, tile * splits + split, top, l_i, ROWS)
            if arrive(counts_ptr + tile, splits, split) == 0:
                top, l_i = merged_parts(m_parts_ptr, l_parts_ptr, tile, splits, ROWS, PARTS)
                store_stats(m_ptr, l_ptr, offs_m, offs_r < size_r, top, l_i)


@triton.jit(do_not_specialize=range(4, 18))
def normalise_kernel(
    x_ptr, y_ptr, m_ptr, l_ptr,
    units: tl.int32, cols: tl.int64, splits: tl.int32, steps: tl.int32, size_1: tl.int32, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_y0: tl.int64, stride_y1: tl.int64, stride_yr: tl.int64, stride_yn: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACROSS: tl.constexpr, ALIGN: tl.constexpr,
    EVEN: tl.constexpr, FLAT: tl.constexpr, WIDTH: tl.constexpr, X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, from their (m, l) row after row."""
    x_strides, y_strides = (stride_x0, stride_x1, stride_xr, stride_xn), (stride_y0, stride_y1, stride_yr, stride_yn)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = COLS // WIDTH
    words, cols = cols * (ALIGN // WIDTH), cols * ALIGN
    # Backwards: what the launch before read last is what the L2 cache still holds.
    tile, split = unit_of(units - 1 - tl.program_id(0), splits, units, ACROSS)
    at, number = locate(tile, size_1, size_r, ROWS, FLAT), split.to(tl.int64) * steps
    offs_w, offs_n = columns(number, WORDS), columns(number, COLS)
    offs_m = (at[0] * size_1 + at[1]) * size_r + at[2]
    top = tl.load(m_ptr + offs_m, mask=at[2] < size_r, other=EMPTY_M)
    inv_l, _ = finish(top, tl.load(l_ptr + offs_m, mask=at[2] < size_r, other=EMPTY_L))
    for _ in range(steps):
        x = load(x_ptr, x_strides, at, offs_w, size_r, words, ALIGN, X_UNIT, ACROSS, WIDTH, EVEN)
        _, p, fix = weighed(widen(x, DTYPE), top, DTYPE)
        y = (p * (fix * inv_l)[:, None]).to(y_ptr.dtype.element_ty)
        there = inside(at, offs_n, size_r, cols, EVEN)
        tl.store(addresses(y_ptr, y_strides, at, offs_n, ALIGN, Y_UNIT, ACROSS), y, mask=there)
        offs_w += WORDS
        offs_n += COLS
