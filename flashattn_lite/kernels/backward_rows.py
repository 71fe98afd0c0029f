"""What the backward needs of each query row, in Triton: the kernel that comes ahead of `backward.py`'s.

P = exp(S - lse) wants more of lse than a float32 has where scores are large; dS wants delta = rowsum(dO * O) - d_lse. A
row is bad if its q, dO, lse or delta is not finite.
Bytes moved: q, O and dO once, some numbers a row written.
Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_lite.kernels.attention_tiles import factor, load_tile, mask_of, masked_scores, scores, sequence
from flashattn_lite.kernels.device.bounds import visited_tiles
from flashattn_lite.kernels.device.scores import row_maximum
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, merge, reference, single, update_to

# Of |lse| in log2 units, where float32 rounds it so that P is off by 1e-5, relative, and by 2e-4, which 16 bits hide.
COARSE: tl.constexpr = tl.constexpr(256.0)
COARSE_16: tl.constexpr = tl.constexpr(4096.0)
ALMOST_0: tl.constexpr = tl.constexpr(2.0**-100)  # log2 l of such a row where l is 1: taken off a number, it is nothing


@triton.jit
def not_finite(x):
    """[R] int32: rows of x [R, D] with an infinity or NaN."""
    return (tl.sum(x.to(tl.float32) * 0.0, 1) != 0.0).to(tl.int32)


@triton.jit
def counted_anew(m_i, log_l, q, k_src, mask_ptr, sink, offs_m, row_lo, len_q, len_k, diag_lo, diag_hi, args,
                 F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """(m_i, log2 l, which rows) anew where lse, a float32, says m + log2 l less well than P needs it; else as given.

    A float mask, or large scores, can hide log2 l altogether: of -1e9, what is left of it is a multiple of 64. Scores
    are rounded as `weights_of` rounds them, which knows such rows by a log2 l that is not 0.
    """
    limit = COARSE
    if F.mask != "float" and k_src[0].dtype.element_ty.primitive_bitwidth == 16:
        limit = COARSE_16
    coarse = (tl.abs(m_i) > limit) & (m_i < float("inf")) & (offs_m < len_q)
    if tl.max(coarse.to(tl.int32), 0) > 0:
        row_hi = tl.minimum(row_lo + T.BLOCK_M, len_q)
        visit = visited_tiles(row_lo, row_hi, len_k, diag_lo, diag_hi, T.BLOCK_N, F)
        m_new = tl.full([T.BLOCK_M], EMPTY_M, tl.float32)
        l_new = tl.full([T.BLOCK_M], EMPTY_L, tl.float32)
        for i in tl.range(0, visit[0], num_stages=1):
            start_n = visit[3] + i * T.BLOCK_N  # in any order
            k = load_tile(k_src, start_n, len_k, T.BLOCK_N, T.HEAD_DIM, T.BLOCK_D, False, True)
            s, scale = scores(factor(q, T), k, True, args, F, T)  # [M, N]
            offs_n = start_n + tl.arange(0, T.BLOCK_N)
            s, scale = masked_scores(s, scale, offs_m, offs_n, mask_ptr, len_q, len_k, diag_lo, diag_hi, args, True, F,
                                     T)  # fmt: skip
            s, scale = s * scale, 1.0  # an fma would take a rounded m off: past 2^31 that is 2^128 too much or little
            m_new, l_new, _, _ = update_to(m_new, l_new, tl.maximum(m_new, row_maximum(s, scale, F)), s, scale)
        if F.sinks:
            sink, sink_l = single(sink)
            m_new, l_new, _, _ = merge(m_new, l_new, sink, sink_l)
        m_i = tl.where(coarse, reference(m_new), m_i)
        log_l = tl.where(coarse, tl.log2(l_new), log_l)
        log_l = tl.where(coarse & (log_l == 0.0), ALMOST_0, log_l)
    return m_i, log_l, coarse


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "num_m", "rows_q", "rows_k", "diag_lo", "diag_hi", "heads"])
def rows_kernel(q_ptr, k_ptr, out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, m_ptr, exact_ptr, log_l_ptr, delta_ptr,
                d_sink_ptr, q_strides, k_strides, o_strides, d_out_strides, stride_lb, stride_lh, num_m, rows_q, rows_k,
                diag_lo, diag_hi, heads, args, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """What P and dS need of each query row; a program owns BLOCK_M rows of a head.

    m_i, the reference of P in log2 units, and delta; log2 l with a float mask, else it is part of m_i; with sinks what
    the row adds to their gradient. Where log2 l is lost in m_i, that is NaN, and the CAREFUL launch gets both apart.
    """
    pid = tl.program_id(0)
    h, b = pid // num_m % heads, pid // num_m // heads
    batch, start_q, len_q, start_k, _, len_k, diag_lo, diag_hi = sequence(b, rows_q, rows_k, diag_lo, diag_hi, args, F)
    row_lo = pid % num_m * T.BLOCK_M
    if row_lo >= len_q:
        return
    offs_m = row_lo + tl.arange(0, T.BLOCK_M)
    exists = offs_m < len_q
    q = load_tile((q_ptr, batch, h, start_q, q_strides), row_lo, len_q, T.BLOCK_M, T.HEAD_DIM, T.BLOCK_D, False, True)
    out = load_tile((out_ptr, batch, h, start_q, o_strides), row_lo, len_q, T.BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV, False,
                    True)  # fmt: skip
    d_out = load_tile((d_out_ptr, batch, h, start_q, d_out_strides), row_lo, len_q, T.BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV,
                      False, True)  # fmt: skip
    at = batch.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh + start_q + offs_m
    delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    if d_lse_ptr is not None:
        delta -= tl.load(d_lse_ptr + at, mask=exists, other=0.0)
    m_i = tl.load(lse_ptr + at, mask=exists, other=0.0) * LOG2E
    blind = m_i == EMPTY_M
    bad = (not_finite(q) | not_finite(d_out)) != 0
    bad |= ((tl.abs(m_i) < float("inf")) | blind) == 0
    bad |= (tl.abs(delta) < float("inf")) == 0
    m_i = tl.where(blind, float("inf"), m_i)  # P is 0 whatever the scores

    log_l = tl.zeros_like(m_i)
    sink = tl.zeros_like(m_i)
    if F.sinks:
        sink += tl.load(args.sinks_ptr + h).to(tl.float32) * LOG2E
    mask_ptr = args.mask_ptr
    if F.mask != "":
        mask_ptr = mask_of(b, h, args)
    k_src = (k_ptr, batch, h // T.GROUP, start_k, k_strides)
    m_new, log_l, coarse = counted_anew(tl.where(bad, 0.0, m_i), log_l, q, k_src, mask_ptr, sink, offs_m, row_lo, len_q,
                                        len_k, diag_lo, diag_hi, args, F, T)  # fmt: skip
    m_i = tl.where(bad, m_i, m_new)
    tl.store(log_l_ptr + at, log_l, mask=exists)
    if F.sinks:  # one more key of value 0, whose dS is -p * delta
        tl.store(d_sink_ptr + at, -tl.exp2(sink - m_i - log_l) * delta, mask=exists)
    m_i = tl.where(bad, float("nan"), m_i)
    tl.store(exact_ptr + at, m_i, mask=exists)
    if F.mask != "float":
        tl.store(m_ptr + at, tl.where(coarse, float("nan"), m_i), mask=exists)
    tl.store(delta_ptr + at, delta, mask=exists)
