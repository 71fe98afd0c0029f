"""The gradient of a float mask in Triton: the kernel; `backward_launch.py` starts it behind `rows_kernel`.

An element of a mask is added to the scores of all pairs that it is broadcast to, so its gradient is the sum of their
dS = P * (dP - delta). A program owns a tile of the mask and makes S and dP of every pair that meets it, two products:
each element is summed by one program, in one order, with no atomics. No pair enters another's sum, so that what is
not finite spoils the elements that it meets and no others.
Bytes moved: q, dO, k and v of a pair of tiles for each such pair, mostly from L2; the mask and its gradient once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.attention_tiles import Shape, foremost, load_factor, mask_of, sequence, times, transposed
from flashattn_lite.kernels.backward import numbers_of, weights_of
from flashattn_lite.kernels.backward_rows import not_finite
from flashattn_lite.problem import Features


@dataclass(frozen=True)
class MaskTile(Shape):
    """Of mask_kernel; with TMA q, k, v and dO are tensor descriptors, of float32 in parts as those of parts."""

    SEEN: Features
    ALL_ROWS: bool  # the mask has one row for all queries

    KEYS = False  # as the backward's Tile has it: queries are the rows of its products


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "num_m", "num_n", "rows_q", "rows_k", "diag_lo", "diag_hi",
                               "heads", "sum_batch", "sum_heads", "sum_rows"])  # fmt: skip
def mask_kernel(q_src, k_src, v_src, d_out_src, d_mask_ptr, m_ptr, log_l_ptr, delta_ptr, q_strides, k_strides,
                v_strides, d_out_strides, d_mask_strides, stride_lb, stride_lh, num_m, num_n, rows_q, rows_k, diag_lo,
                diag_hi, heads, sum_batch, sum_heads, sum_rows, args, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """num_m, num_n, heads: tiles and heads of the mask; sum_*: entries, heads, row tiles that share an element."""
    pid = tl.program_id(0)
    start_n = pid % num_n * T.BLOCK_N
    block_m = pid // num_n % num_m
    own_head, own_entry = pid // num_n // num_m % heads, pid // num_n // num_m // heads
    offs_n = start_n + tl.arange(0, T.BLOCK_N)
    steps = sum_batch * sum_heads * sum_rows
    if not F.kv_lens and not T.ALL_ROWS:  # all entries have the same diagonals: is it a tile that no row sees?
        common = sequence(own_entry, rows_q, rows_k, diag_lo, diag_hi, args, F)
        if F.right:
            steps = tl.where(start_n > (block_m + 1) * T.BLOCK_M - 1 + common[7], 0, steps)
        if F.left:
            steps = tl.where(start_n + T.BLOCK_N - 1 < block_m * T.BLOCK_M + common[6], 0, steps)
    total = tl.full([T.BLOCK_M, T.BLOCK_N], 0.0, tl.float32)
    for i in tl.range(0, steps):
        row_lo = (block_m + i % sum_rows) * T.BLOCK_M
        h, entry = own_head + i // sum_rows % sum_heads, own_entry + i // sum_rows // sum_heads
        batch, start_q, len_q, start_k, _room, len_k, lo, hi = sequence(
            entry, rows_q, rows_k, diag_lo, diag_hi, args, F
        )
        offs_m = row_lo + tl.arange(0, T.BLOCK_M)
        q = load_factor((q_src, batch, h, start_q, q_strides), row_lo, len_q, T.BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T.TMA,
                        True, T)  # fmt: skip
        k = load_factor((k_src, batch, h // T.GROUP, start_k, k_strides), start_n, len_k, T.BLOCK_N, T.HEAD_DIM,
                        T.BLOCK_D, T.TMA, True, T)  # fmt: skip
        d_out = load_factor((d_out_src, batch, h, start_q, d_out_strides), row_lo, len_q, T.BLOCK_M, T.HEAD_DIM_V,
                            T.BLOCK_DV, T.TMA, True, T)  # fmt: skip
        v = load_factor((v_src, batch, h // T.GROUP, start_k, v_strides), start_n, len_k, T.BLOCK_N, T.HEAD_DIM_V,
                        T.BLOCK_DV, T.TMA, True, T)  # fmt: skip
        dtype: tl.constexpr = tl.float32 if T.PRODUCTS == "parts" else q.dtype
        at = batch.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh
        m_i, log_l, delta = numbers_of((m_ptr + at, log_l_ptr + at, delta_ptr + at), offs_m, offs_m < len_q, True)
        s = times(q, transposed(k, T), T)  # [M, N]
        p, seen, _slope = weights_of(s, m_i[:, None], log_l[:, None], offs_m, offs_n, mask_of(entry, h, args), len_q,
                                     len_k, lo, hi, args, dtype, False, F, T)  # fmt: skip
        ds = p * (times(d_out, transposed(v, T), T) - delta[:, None])
        bad = (not_finite(foremost(k, T)) | not_finite(foremost(v, T))) != 0
        ds = tl.where(bad[None, :], float("nan"), ds)
        total += tl.where(seen & (offs_m < len_q)[:, None], ds, 0.0)

    ptr = d_mask_ptr + own_entry.to(tl.int64) * d_mask_strides[0] + own_head.to(tl.int64) * d_mask_strides[1]
    ptrs = ptr + offs_n.to(tl.int64) * d_mask_strides[3]
    exists = offs_n < rows_k
    if T.ALL_ROWS:
        tl.store(ptrs, tl.sum(total, 0).to(d_mask_ptr.dtype.element_ty), mask=exists)
    else:
        offs_m = block_m * T.BLOCK_M + tl.arange(0, T.BLOCK_M)
        ptrs = ptrs[None, :] + offs_m.to(tl.int64)[:, None] * d_mask_strides[2]
        total = total.to(d_mask_ptr.dtype.element_ty)
        tl.store(ptrs, total, mask=(offs_m < rows_q)[:, None] & exists[None, :])
