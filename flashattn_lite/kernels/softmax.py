"""The standalone online softmax in Triton: softmax of rows, or their (m, l), by one program or several for each row.

One program owns a tile of ROWS neighbouring rows and, where rows are long, one of their `splits`. `top` is the row
maximum in natural units, and scores enter the state measured from it: x * log2(e) would overflow float32 from 2.4e38 on
and round away what sets large scores apart, x - top does neither. Invariant: (top, l_i) is the maximum of the columns
taken so far and their sum of exp(x - top), both float32. A split's (top, l_i) is its part; the parts of a row are
merged in one order, pairwise, by whoever needs them, so that the same row has the same bits by every way below.

| kernel | programs of a row | bytes moved |
| --- | --- | --- |
| softmax_kernel | one | one read, one write: the row stays in registers |
| together_kernel | its splits, all on the GPU at once | one read, one write: they wait for each other's parts |
| stats_kernel, normalise_kernel | its splits, in two launches | two reads, one write: for rows that no GPU holds |

stats_kernel alone is `softmax_stats`: always one read; of a row's splits the one that comes last merges the parts.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, finish, merge, reference, update_fixed

# One int32 for each tile of rows counts its programs: 1 for each that has stored its part, LEFT more when it is done
# waiting. The last to leave sets it back to 0, what the next launch must find.
LEFT: tl.constexpr = tl.constexpr(1 << 16)
HERE: tl.constexpr = tl.constexpr(LEFT.value - 1)


@triton.jit
def state_of(x):
    """(top, l_i) [M] of a tile x [M, N] in natural units, and p = exp(x - top) [M, N]."""
    top = tl.max(x, 1)
    zero = tl.zeros_like(top)
    l_i, p = update_fixed(zero, zero, x - reference(top)[:, None], LOG2E)
    return top, l_i, p


@triton.jit
def merge_from(origin, m_a, l_a, m_b, l_b):
    """l of the `merge` of (m, l) in natural units, seen from origin, which no m passes."""
    _, l_i, _, _ = merge((m_a - origin) * LOG2E, l_a, (m_b - origin) * LOG2E, l_b)
    return l_i


@triton.jit
def locate(tile, size_1, size_r, ROWS: tl.constexpr):
    """A tile's index in the two outer row dimensions and its ROWS indices in the inner one, all 64-bit."""
    tiles = tl.cdiv(size_r, ROWS)
    outer = tile // tiles
    offs_r = tile % tiles * ROWS + tl.arange(0, ROWS)
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


@triton.jit
def merged_parts(m_parts_ptr, l_parts_ptr, tile, splits, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """(top, l_i) [ROWS] over all splits of a tile of rows; PARTS, a power of two, holds their number."""
    offs_s = tl.arange(0, PARTS)
    offs = (tile * splits + offs_s)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, PARTS]
    there = (offs_s < splits)[None, :]
    # From the L2 cache, past the L1: other programs wrote them.
    m_i = tl.load(m_parts_ptr + offs, mask=there, other=EMPTY_M, cache_modifier=".cg")
    l_i = tl.load(l_parts_ptr + offs, mask=there, other=EMPTY_L, cache_modifier=".cg")
    top = tl.max(m_i, 1)
    origin = reference(top)[:, None]
    # Each is merged with a state that has seen nothing and stands at top: so all have one reference, and l only adds.
    return top, tl.sum(merge_from(origin, m_i, l_i, origin, tl.zeros_like(l_i)), 1)


@triton.jit
def share_of(m_part, top, l_i):
    """What p = exp(x - m_part) of a part is multiplied by to be softmax, for the whole row's (top, l_i); all [M]."""
    inv_l, _ = finish(top, l_i)
    return tl.exp2((m_part - reference(top)) * LOG2E) * inv_l


# Nothing is specialized on a size or a stride, so nothing recompiles because a row grew. Vectorized access rests on
# ALIGN instead: strides, and the number of columns, come divided by it.
@triton.jit(do_not_specialize=range(2, 13))
def softmax_kernel(
    x_ptr, y_ptr, cols: tl.int64, size_1: tl.int64, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_y0: tl.int64, stride_y1: tl.int64, stride_yr: tl.int64, stride_yn: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACROSS: tl.constexpr, ALIGN: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, for rows that are one tile."""
    i_0, i_1, offs_r = locate(tl.program_id(0), size_1, size_r, ROWS)
    x_ptr += (i_0 * stride_x0 + i_1 * stride_x1) * ALIGN
    y_ptr += (i_0 * stride_y0 + i_1 * stride_y1) * ALIGN
    offs_n = tl.arange(0, COLS)
    inside = (offs_r < size_r)[:, None] & (offs_n < cols * ALIGN)[None, :]
    x = load(x_ptr, offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS), inside)
    top, l_i, p = state_of(x)
    inv_l, _ = finish(top, l_i)
    y = (p * inv_l[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offsets(offs_r, offs_n, stride_yr * ALIGN, stride_yn * ALIGN, Y_UNIT, ACROSS), y, mask=inside)


@triton.jit(do_not_specialize=range(5, 17))
def together_kernel(
    x_ptr, y_ptr, m_parts_ptr, l_parts_ptr, counts_ptr,
    cols: tl.int64, splits: tl.int64, size_1: tl.int64, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_y0: tl.int64, stride_y1: tl.int64, stride_yr: tl.int64, stride_yn: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, PATIENCE: tl.constexpr,
    ACROSS: tl.constexpr, ALIGN: tl.constexpr, X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, for rows of several tiles, each of which stays in its program's registers.

    A program waits for the parts of the others of its row. Those come from programs next to it in the grid, so they are
    on the GPU already or next; but nothing promises that (another kernel may hold the GPU), and so nobody waits for
    ever: after PATIENCE looks a program computes all parts of its row itself, to the same bits, and goes on.
    """
    cols *= ALIGN
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    i_0, i_1, offs_r = locate(tile, size_1, size_r, ROWS)
    x_ptr += (i_0 * stride_x0 + i_1 * stride_x1) * ALIGN
    y_ptr += (i_0 * stride_y0 + i_1 * stride_y1) * ALIGN
    rows = (offs_r < size_r)[:, None]
    offs_n = split * COLS + tl.arange(0, COLS)
    inside = rows & (offs_n < cols)[None, :]
    offs_x = offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS)
    m_part, l_part, p = state_of(load(x_ptr, offs_x, inside))
    offs_part = (tile * splits + split) * ROWS + tl.arange(0, ROWS)
    tl.store(m_parts_ptr + offs_part, m_part)
    tl.store(l_parts_ptr + offs_part, l_part)
    tl.debug_barrier()  # every thread's part is stored before one of them counts it
    here = tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel") + 1
    looks = 0
    while ((here & HERE) < splits) & (looks < PATIENCE):
        here = tl.atomic_add(counts_ptr + tile, 0, sem="acquire")
        looks += 1
    if (here & HERE) < splits:
        for other in range(splits):
            offs_o = other * COLS + tl.arange(0, COLS)
            offs_xo = offsets(offs_r, offs_o, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS)
            m_o, l_o, _ = state_of(load(x_ptr, offs_xo, rows & (offs_o < cols)[None, :]))
            # Over what the other may be storing now: the same bits.
            offs_part = (tile * splits + other) * ROWS + tl.arange(0, ROWS)
            tl.store(m_parts_ptr + offs_part, m_o)
            tl.store(l_parts_ptr + offs_part, l_o)
        tl.debug_barrier()
        # Loaded anew rather than held in registers all the while: the rare way must not slow the usual one.
        m_part, l_part, p = state_of(load(x_ptr, offs_x, inside))
    top, l_i = merged_parts(m_parts_ptr, l_parts_ptr, tile, splits, ROWS, PARTS)
    y = (p * share_of(m_part, top, l_i)[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offsets(offs_r, offs_n, stride_yr * ALIGN, stride_yn * ALIGN, Y_UNIT, ACROSS), y, mask=inside)
    # Nobody reads what this orders but the next launch, so that no store is waited for.
    if tl.atomic_add(counts_ptr + tile, LEFT, sem="relaxed") == splits + (splits - 1) * LEFT:
        tl.store(counts_ptr + tile, 0)


@triton.jit
def take(top, l_i, x):
    """Takes a tile x [M, N] in natural units into (top, l_i) [M]."""
    m_x, l_x, _ = state_of(x)
    top_new = tl.maximum(top, m_x)
    return top_new, merge_from(reference(top_new), top, l_i, m_x, l_x)


@triton.jit
def store_stats(m_ptr, l_ptr, offs, rows, top, l_i):
    # A maximum passes over NaN, a sum does not: l_i tells of one (of +inf too, which top shows by itself).
    top = tl.where((l_i != l_i) & (top < float("inf")), l_i, top)
    tl.store(m_ptr + offs, top, mask=rows)
    tl.store(l_ptr + offs, l_i, mask=rows)


@triton.jit(do_not_specialize=range(6, 18))
def stats_kernel(
    x_ptr, m_ptr, l_ptr, m_parts_ptr, l_parts_ptr, counts_ptr,
    cols: tl.int64, splits: tl.int64, steps: tl.int64, size_1: tl.int64, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_m0: tl.int64, stride_m1: tl.int64, stride_mr: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, MERGE: tl.constexpr,
    ACROSS: tl.constexpr, ALIGN: tl.constexpr, X_UNIT: tl.constexpr,
):  # fmt: skip
    """m = max(x), l = sum of exp(x - m) along the columns; m and l share their strides, which ALIGN does not divide.

    PARTS 1: a program owns whole rows. More: it owns `steps` tiles of them, and stores their part; with MERGE, the one
    that comes last merges the parts into m and l.
    """
    cols *= ALIGN
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    i_0, i_1, offs_r = locate(tile, size_1, size_r, ROWS)
    x_ptr += (i_0 * stride_x0 + i_1 * stride_x1) * ALIGN
    rows = offs_r < size_r
    offs_n = split * steps * COLS + tl.arange(0, COLS)
    offs_x = offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS)
    top, l_i, _ = state_of(load(x_ptr, offs_x, rows[:, None] & (offs_n < cols)[None, :]))
    for _ in range(1, steps):
        offs_n += COLS
        offs_x = offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS)
        top, l_i = take(top, l_i, load(x_ptr, offs_x, rows[:, None] & (offs_n < cols)[None, :]))
    offs_m = i_0 * stride_m0 + i_1 * stride_m1 + offs_r * stride_mr
    if PARTS == 1:
        store_stats(m_ptr, l_ptr, offs_m, rows, top, l_i)
    else:
        offs_part = (tile * splits + split) * ROWS + tl.arange(0, ROWS)
        tl.store(m_parts_ptr + offs_part, top)
        tl.store(l_parts_ptr + offs_part, l_i)
        if MERGE:
            tl.debug_barrier()  # every thread's part is stored before one of them counts it
            if tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel") == splits - 1:
                top, l_i = merged_parts(m_parts_ptr, l_parts_ptr, tile, splits, ROWS, PARTS)
                store_stats(m_ptr, l_ptr, offs_m, rows, top, l_i)
                tl.store(counts_ptr + tile, 0)


@triton.jit(do_not_specialize=range(4, 17))
def normalise_kernel(
    x_ptr, y_ptr, m_parts_ptr, l_parts_ptr,
    cols: tl.int64, splits: tl.int64, steps: tl.int64, size_1: tl.int64, size_r: tl.int64,
    stride_x0: tl.int64, stride_x1: tl.int64, stride_xr: tl.int64, stride_xn: tl.int64,
    stride_y0: tl.int64, stride_y1: tl.int64, stride_yr: tl.int64, stride_yn: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    ACROSS: tl.constexpr, ALIGN: tl.constexpr, X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
):  # fmt: skip
    """y = softmax(x) along the columns, from the parts that stats_kernel stored."""
    cols *= ALIGN
    # Backwards: what the launch before read last is what the L2 cache still holds.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, split = program // splits, program % splits
    i_0, i_1, offs_r = locate(tile, size_1, size_r, ROWS)
    x_ptr += (i_0 * stride_x0 + i_1 * stride_x1) * ALIGN
    y_ptr += (i_0 * stride_y0 + i_1 * stride_y1) * ALIGN
    top, l_i = merged_parts(m_parts_ptr, l_parts_ptr, tile, splits, ROWS, PARTS)
    m_part = tl.load(m_parts_ptr + (tile * splits + split) * ROWS + tl.arange(0, ROWS))
    share = share_of(m_part, top, l_i)
    offs_n = split * steps * COLS + tl.arange(0, COLS)
    for _ in range(steps):
        inside = (offs_r < size_r)[:, None] & (offs_n < cols)[None, :]
        offs_x = offsets(offs_r, offs_n, stride_xr * ALIGN, stride_xn * ALIGN, X_UNIT, ACROSS)
        p = tl.exp2((load(x_ptr, offs_x, inside) - reference(m_part)[:, None]) * LOG2E)  # [M, N]
        y = (p * share[:, None]).to(y_ptr.dtype.element_ty)
        offs_y = offsets(offs_r, offs_n, stride_yr * ALIGN, stride_yn * ALIGN, Y_UNIT, ACROSS)
        tl.store(y_ptr + offs_y, y, mask=inside)
        offs_n += COLS
