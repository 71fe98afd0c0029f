"""Tiles as decoding takes them: query rows of one key/value head, rows of its keys and values, what a mask says."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_lite.kernels.device.scores import visible


@triton.jit
def query_rows(block_m, most_q, T: tl.constexpr):
    """(rows of this tile [M], of each its token and its head in the group)."""
    offs_r = block_m * T.BLOCK_M + tl.arange(0, T.BLOCK_M)
    if T.ONE:  # without a division
        return offs_r, tl.zeros_like(offs_r), offs_r
    else:
        return offs_r, offs_r % most_q, offs_r // most_q


@triton.jit
def load_queries(q_ptr, q_strides, b, h, offs_h, token, there, T: tl.constexpr):
    """Q [M, D] of heads offs_h of key/value head h and tokens [M] of sequence b; 0 where none is there."""
    offs_d = tl.arange(0, T.BLOCK_D)
    q_ptrs = q_ptr + b.to(tl.int64) * q_strides[0] + (h.to(tl.int64) * T.GROUP + offs_h[:, None]) * q_strides[1]
    q_ptrs += token.to(tl.int64)[:, None] * q_strides[2] + offs_d.to(tl.int64)[None, :] * q_strides[3]
    return tl.load(q_ptrs, mask=there[:, None] & (offs_d < T.HEAD_DIM)[None, :], other=0.0)


@triton.jit
def rows_of_head(ptr, strides, b, h, start, F: tl.constexpr, T: tl.constexpr):
    """(pointer, strides) of K or V of one head, from where sequence b begins; of pages, from the first one."""
    ptr += h.to(tl.int64) * (strides[1] // T.ALIGN * T.ALIGN)
    if not T.PAGE:
        ptr += b.to(tl.int64) * (strides[0] // T.ALIGN * T.ALIGN)
    if F.varlen:
        ptr += start.to(tl.int64) * (strides[2] // T.ALIGN * T.ALIGN)
    return ptr, strides


@triton.jit
def mask_of_rows(ptr, strides, b, h, offs_h, offs_m, there, T: tl.constexpr):
    """A mask as `mask_of_keys` takes it."""
    ptr += b.to(tl.int64) * strides[0] + h.to(tl.int64) * T.GROUP * strides[1]
    if T.MASK_ROWS:
        ptr += offs_h.to(tl.int64) * strides[1] + offs_m.to(tl.int64) * strides[2]
    return ptr, strides[3], there


@triton.jit
def pages_of(start, hi, table_ptr, pages, T: tl.constexpr):
    """The pages in which the keys of the tile from `start` on lie, one after the other; none of a contiguous cache."""
    if T.PAGE:
        return entries(start, hi, table_ptr, pages, max(1, T.BLOCK_N // T.PAGE), T)
    else:
        return ()


@triton.jit
def entries(start, hi, table_ptr, pages, COUNT: tl.constexpr, T: tl.constexpr):
    """COUNT entries of a table from key `start` on, clamped into the cache; none is read of keys from `hi` on."""
    entry = tl.load(table_ptr + start // T.PAGE, mask=start < hi, other=0)
    entry = tl.minimum(tl.maximum(entry, 0), pages - 1)
    if COUNT == 1:
        return (entry,)
    else:
        return (entry,) + entries(start + T.PAGE, hi, table_ptr, pages, COUNT - 1, T)


@triton.jit
def page_of_each(tile_pages, T: tl.constexpr):
    """The page of each key of a tile [N]."""
    offs_n = tl.arange(0, T.BLOCK_N)
    page = tile_pages[0]
    for i in tl.static_range(1, T.BLOCK_N // T.PAGE):
        page = tl.where(offs_n < i * T.PAGE, page, tile_pages[i])
    return page


@triton.jit
def load_rows(src, start, tile_pages, exists, DIM: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr):
    """Rows [N, BLOCK] of K or V of one head; src = (pointer, strides). What does not exist is not read, and is 0."""
    ptr = src[0]
    offs_n, offs_d = tl.arange(0, T.BLOCK_N), tl.arange(0, BLOCK)
    # In whole units of ALIGN, so that the compiler knows that rows start where 16-byte loads may.
    page_step, step = src[1][0] // T.ALIGN * T.ALIGN, src[1][2] // T.ALIGN * T.ALIGN
    if not T.PAGE:  # only one number changes from tile to tile
        ptr += tl.cast(start, tl.int64) * step
        offs = offs_n.to(tl.int64) * step
    elif T.PAGE >= T.BLOCK_N:  # or two
        ptr += tile_pages[0].to(tl.int64) * page_step + tl.cast(start % T.PAGE, tl.int64) * step
        offs = offs_n.to(tl.int64) * step
    else:
        offs = page_of_each(tile_pages, T).to(tl.int64) * page_step + (offs_n % T.PAGE).to(tl.int64) * step
    ptrs = ptr + (offs[:, None] + offs_d.to(tl.int64)[None, :] * src[1][3])
    if DIM == BLOCK:
        return tl.load(ptrs, mask=exists[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=exists[:, None] & (offs_d < DIM)[None, :], other=0.0)


@triton.jit
def mask_of_keys(mask, offs_n, exists, T: tl.constexpr):
    """The mask at keys offs_n: [N], or with MASK_ROWS [M, N]. mask = (where its rows begin, stride of keys, rows)."""
    offs = offs_n.to(tl.int64) * mask[1]
    # Of single elements whatever the addresses: their width would decide on layouts, and these on the order of sums.
    if T.MASK_ROWS:
        ptrs = tl.max_contiguous(mask[0][:, None] + offs[None, :], [1, 1])
        return tl.load(ptrs, mask=mask[2][:, None] & exists[None, :], other=0)
    else:
        return tl.load(tl.max_contiguous(mask[0] + offs, [1]), mask=exists, other=0)


@triton.jit
def shown(bias, F: tl.constexpr):
    """Where a mask lets rows look."""
    if F.mask == "bool":
        return bias != 0
    else:
        return bias != float("-inf")


@triton.jit
def keys_there(offs_n, lo, hi, mask, F: tl.constexpr, T: tl.constexpr):
    """(which keys exist [N], the mask as `mask_of_keys`). What a mask hides from every row does not exist."""
    exists = (offs_n >= lo) & (offs_n < hi)
    bias = 0
    if F.mask != "":
        bias = mask_of_keys(mask, offs_n, exists, T)
        if not T.MASK_ROWS:
            exists = exists & shown(bias, F)
    return exists, bias


@triton.jit
def seen_by(offs_m, offs_n, exists, bias, len_k, diag_lo, diag_hi, F: tl.constexpr, T: tl.constexpr):
    """[M, N] which rows see which keys; if that is what exists, a row of flags serves all."""
    if not T.UNEQUAL:
        return exists[None, :]
    else:
        seen = visible(offs_m, offs_n, len_k, diag_lo, diag_hi, F)
        if T.MASK_ROWS:
            seen = seen & shown(bias, F)
        elif F.mask != "":
            seen = seen & exists[None, :]
        return seen
