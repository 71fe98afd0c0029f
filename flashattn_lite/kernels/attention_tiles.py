"""Tiles as the portable kernels, forward and backward, take them: rows of a tensor, scores, what hides them."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.device.bounds import clamp_sequence
from flashattn_lite.kernels.device.products import parts, product, product_of_any
from flashattn_lite.kernels.device.scores import add_mask, scaled, visible


@dataclass(frozen=True)
class Shape:
    """Compile-time shape of one program of any of them: what a problem fixes, and what tuning chose for it."""

    BLOCK_M: int  # rows that it owns: of queries, or in the backward of keys; of a mask's gradient
    BLOCK_N: int  # rows of a tile that it streams; keys of a mask's gradient
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int  # HEAD_DIM as the power of two that the matrix unit takes
    BLOCK_DV: int
    GROUP: int  # query heads of one key/value head
    PRODUCTS: str  # of float32: "ieee", "tf32", or "parts" in bfloat16 (device/products.py)
    MASK_ROWS: bool  # the mask has a row for each query, not one for all of a head
    MASK_ALIGN: int  # its keys that one load may take, see `mask_align`
    TMA: bool  # what is streamed arrives as tensor descriptors


@triton.jit
def sequence(b, rows_q, rows_k, diag_lo, diag_hi, args, F: tl.constexpr):
    """A batch entry: (entry in memory, first row and number of queries, of keys, keys seen, its diagonals).

    Packed sequences lie behind one another in one entry.
    """
    batch, len_q, room_k = b, rows_q, rows_k
    start_q, start_k = b * 0, b * 0
    if F.varlen:
        batch = b * 0
        cu_q, cu_k = args.cu_seqlens_q_ptr + b, args.cu_seqlens_k_ptr + b
        start_q, len_q = clamp_sequence(tl.load(cu_q), tl.load(cu_q + 1), rows_q)
        start_k, room_k = clamp_sequence(tl.load(cu_k), tl.load(cu_k + 1), rows_k)
    len_k = room_k
    if F.kv_lens:
        len_k = tl.minimum(tl.maximum(tl.load(args.kv_lens_ptr + b), 0), len_k)
    if F.end_aligned:
        diag_lo += len_k - len_q
        diag_hi += len_k - len_q
    return batch, start_q, len_q, start_k, room_k, len_k, diag_lo, diag_hi


@triton.jit
def mask_of(b, h, args):
    """Where the mask of a batch entry and query head begins."""
    return args.mask_ptr + b.to(tl.int64) * args.mask_strides[0] + h.to(tl.int64) * args.mask_strides[1]


@triton.jit
def load_tile(src, start, rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
              CHECK_ROWS: tl.constexpr):  # fmt: skip
    """Rows start .. start + BLOCK of one head, [BLOCK, BLOCK_D]; what lies outside the tensor reads as 0.

    src = (pointer or descriptor, batch, head, first row, strides). Without CHECK_ROWS the rows must exist.
    """
    if TMA:
        return tl.reshape(src[0].load([src[1], src[2], src[3] + start, 0]), [BLOCK, BLOCK_D])
    else:
        offs = start + tl.arange(0, BLOCK)
        offs_d = tl.arange(0, BLOCK_D)
        base = src[0] + src[1].to(tl.int64) * src[4][0] + src[2].to(tl.int64) * src[4][1]
        base += src[3].to(tl.int64) * src[4][2]
        ptrs = base + offs.to(tl.int64)[:, None] * src[4][2] + offs_d.to(tl.int64)[None, :] * src[4][3]
        if CHECK_ROWS and DIM != BLOCK_D:
            return tl.load(ptrs, mask=(offs < rows)[:, None] & (offs_d < DIM)[None, :], other=0.0)
        elif CHECK_ROWS:
            return tl.load(ptrs, mask=(offs < rows)[:, None], other=0.0)
        elif DIM != BLOCK_D:
            return tl.load(ptrs, mask=(offs_d < DIM)[None, :], other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def load_part(src, part: tl.constexpr, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """One part of a tile; src as load_tile has it, with the descriptor of `parts.Parts`."""
    return tl.reshape(src[0].load([part, src[1], src[2], src[3] + start, 0]), [BLOCK, BLOCK_D])


@triton.jit
def load_factor(src, start, rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
                CHECK_ROWS: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """As load_tile, a factor: of float32 the parts, which the backward has in memory. They are copied by TMA."""
    if T.PRODUCTS != "parts":
        return load_tile(src, start, rows, BLOCK, DIM, BLOCK_D, TMA, CHECK_ROWS)
    else:
        return (load_part(src, 0, start, BLOCK, BLOCK_D), load_part(src, 1, start, BLOCK, BLOCK_D),
                load_part(src, 2, start, BLOCK, BLOCK_D))  # fmt: skip


@triton.jit
def mask_tile(mask_ptr, queries, keys, len_q, len_k, args, T: tl.constexpr):
    """A head's mask of queries and keys, one a row and the other a column; of keys alone without MASK_ROWS.

    Neighbouring keys come by one load where MASK_ALIGN allows it: all are read if the first exists. Queries that are
    not there have the last one's.
    """
    ALIGN: tl.constexpr = T.MASK_ALIGN
    BYTES: tl.constexpr = ALIGN * (mask_ptr.dtype.element_ty.primitive_bitwidth // 8)
    ptrs = mask_ptr + keys.to(tl.int64) * args.mask_strides[3]
    if T.MASK_ROWS:
        ptrs += tl.minimum(queries, len_q - 1).to(tl.int64) * args.mask_strides[2]
    if keys.shape[0] == 1:
        ptrs = tl.max_contiguous(tl.multiple_of(ptrs, [1, BYTES]), [1, ALIGN])
    else:
        ptrs = tl.max_contiguous(tl.multiple_of(ptrs, [BYTES, 1]), [ALIGN, 1])
    return tl.load(ptrs, mask=keys // ALIGN * ALIGN < len_k, other=0)


@triton.jit
def masked_scores(s, scale, offs_m, offs_n, mask_ptr, len_q, len_k, diag_lo, diag_hi, args, EXACT: tl.constexpr,
                  F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """(scores with -inf where a row may not look, and with a float mask added, the factor to log2 units)."""
    seen = visible(offs_m, offs_n, len_k, diag_lo, diag_hi, F)  # [M, N]
    if F.mask != "":
        mask = mask_tile(mask_ptr, offs_m[:, None], offs_n[None, :], len_q, len_k, args, T)
    if F.mask == "bool":
        seen = seen & (mask != 0)
    if F.mask == "float":
        s, scale = add_mask(s, scale, mask, EXACT)
    return tl.where(seen, s, float("-inf")), scale


@triton.jit
def factor(x, T: tl.constexpr):
    """A tile as products take it: itself, or its parts."""
    if T.PRODUCTS != "parts":
        return x
    else:
        return parts(x)


@triton.jit
def transposed(x, T: tl.constexpr):
    """A factor, transposed."""
    if T.PRODUCTS != "parts":
        return tl.trans(x)
    else:
        return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def foremost(x, T: tl.constexpr):
    """Of a factor the tile, or its first part, which is as finite as the number."""
    if T.PRODUCTS != "parts":
        return x
    else:
        return x[0]


@triton.jit
def without(x, bad, T: tl.constexpr):
    """A factor with zeros in its bad rows."""
    bad = (bad != 0)[:, None]
    if T.PRODUCTS != "parts":
        return tl.where(bad, 0.0, x).to(x.dtype)
    else:
        return (tl.where(bad, 0.0, x[0]).to(tl.bfloat16), tl.where(bad, 0.0, x[1]).to(tl.bfloat16),
                tl.where(bad, 0.0, x[2]).to(tl.bfloat16))  # fmt: skip


@triton.jit
def times(a, b, T: tl.constexpr, TURNED: tl.constexpr = False):
    """a b in float32, of factors. Where an infinity meets a 0 it is NaN, and with parts sooner; see `query_key`.

    TURNED: with the bits of b^T a^T. In 16 bits both have the same.
    """
    if T.PRODUCTS != "parts":
        return tl.dot(a, b, input_precision=T.PRODUCTS)
    else:
        return product(a, b, TURNED)


@triton.jit
def plus_product(total, a, b, T: tl.constexpr):
    """total + a b, of factors. The sum of parts is added in float32, since matrix units cut off what they add up."""
    if T.PRODUCTS != "parts":
        return tl.dot(a, b, total, input_precision=T.PRODUCTS)
    else:
        return total + product(a, b)


@triton.jit
def query_key(q, k, ANY: tl.constexpr, T: tl.constexpr):
    """q k^T [M, N] of a factor q and k [N, D].

    With products of parts infinities in q and k need ANY, which changes no other bits; without, a row that meets one
    becomes NaN.
    """
    k = transposed(factor(k, T), T)
    if ANY and T.PRODUCTS == "parts":
        return product_of_any(q, k)
    else:
        return times(q, k, T)


@triton.jit
def scores(q, k, ANY: tl.constexpr, args, F: tl.constexpr, T: tl.constexpr):
    """(scores [M, N] of q and k [N, D], the factor that brings them to log2 units); ANY as `query_key` has it."""
    return scaled(query_key(q, k, ANY, T), args, F)
