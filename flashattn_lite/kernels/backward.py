"""The portable attention backward in Triton: the kernels; `backward_launch.py` starts them.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - d_lse and dS = P * (dP - delta), each pair of a query and a
key adds to dV = P^T dO, dQ = scale dS K and dK = scale dS^T Q. Both sides are one kernel, `backward_kernel`: a program
owns rows a, b and streams all rows c, d that they meet,

    KEYS:  a, b = K, V    c, d = Q, dO    S^T = a c^T, dP^T = b d^T    ga = dK += dS^T c, gb = dV += P^T d
    else:  a, b = Q, dO   c, d = K, V     S = a c^T,   dP = b d^T      ga = dQ += dS c

so every gradient is summed by one program, in one order: no atomics, the same bits whatever else is there. S and dP are
made twice for that, seven products for five; where registers do not hold both dK and dV each has a launch, eight.
Before, `rows_kernel` writes what P and dS need of each query row.
Bytes moved: c and d once for every tile of own rows, mostly from L2, all else once.

What is not finite gets no further than it may. A query row is bad if its q, dO, lse or delta is not finite: its
reference is NaN then, and so is all that it enters. But in the sums over c and d 0 * NaN is NaN, also where a row is
not seen. So a program whose gradients are not all finite says so in `failed`, and a second launch, CAREFUL, makes those
once more without the bad rows of c and d: what sees one of them is NaN, the other rows' bits are the same. (In the same
launch that code took registers from the usual way: 140 a thread became 255, head dim 64.)
Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.attention_tiles import (
    Shape,
    factor,
    foremost,
    load_factor,
    load_tile,
    mask_of,
    mask_tile,
    masked_scores,
    plus_product,
    scores,
    sequence,
    times,
    transposed,
    without,
)
from flashattn_lite.kernels.device.bounds import visited_start, visited_tiles
from flashattn_lite.kernels.device.scores import add_mask, row_maximum, scaled, visible
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LN2, LOG2E, merge, reference, single, update_to
from flashattn_lite.problem import Features

# Of |lse| in log2 units, where float32 rounds it so that P is off by 1e-5, relative, and by 2e-4, which 16 bits hide.
COARSE: tl.constexpr = tl.constexpr(256.0)
COARSE_16: tl.constexpr = tl.constexpr(4096.0)
ALMOST_0: tl.constexpr = tl.constexpr(2.0**-100)  # log2 l of such a row where l is 1: taken off a number, it is nothing


@dataclass(frozen=True)
class BackwardTile(Shape):
    """Of backward_kernel; with TMA c and d are tensor descriptors, float32 in parts as those of parts, a and b too."""

    KEYS: bool  # it owns keys of a key/value head and streams the queries of the head's group; else the reverse
    MAKES_A: bool  # the gradient of a
    MAKES_B: bool  # the gradient of b, where it owns keys
    SEEN: Features  # as its own rows see what it streams: of keys, left and right change places
    CAREFUL: bool = False  # the launch that does again what failed

    @property
    def HEADS(self) -> int:
        """Heads whose rows it streams."""
        return self.GROUP if self.KEYS else 1


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


@triton.jit
def numbers_of(rows, offs, exists, APART: tl.constexpr):
    """(m_i, log2 l, delta) of query rows as rows_kernel left them at `rows`. APART: log2 l is not in m_i."""
    m_i = tl.load(rows[0] + offs, mask=exists, other=0.0)
    delta = tl.load(rows[2] + offs, mask=exists, other=0.0)
    log_l = tl.zeros_like(m_i)
    if APART:
        log_l = tl.load(rows[1] + offs, mask=exists, other=0.0)
    return m_i, log_l, delta


@triton.jit
def weights_of(s, m_i, log_l, offs_m, offs_n, mask_ptr, len_m, len_n, diag_lo, diag_hi, args, dtype: tl.constexpr,
               WHOLE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """(P [M, N], which pairs are seen, d of the capped score by the score) from products s of own and streamed rows.

    m_i, log_l: [M, 1], or [1, N] where queries are streamed. dtype: of the rows.
    """
    slope = 1.0
    s, scale = scaled(s, args, F)
    if F.softcap:
        capped = s / (args.softcap * LOG2E)
        slope = 1.0 - capped * capped
    if WHOLE:
        seen = True
        p = tl.exp2(tl.fma(s, scale, -m_i))
    else:
        SEEN: tl.constexpr = T.SEEN
        seen = visible(offs_m, offs_n, len_n, diag_lo, diag_hi, SEEN)  # [M, N]
        if F.mask != "":
            if T.KEYS:
                bias = mask_tile(mask_ptr, offs_n[None, :], offs_m[:, None], len_n, len_m, args, T)
            else:
                bias = mask_tile(mask_ptr, offs_m[:, None], offs_n[None, :], len_m, len_n, args, T)
        if F.mask == "bool":
            seen = seen & (bias != 0)
        GUARDED: tl.constexpr = dtype == tl.float32 if F.mask == "float" else T.CAREFUL
        if GUARDED:
            # Made again in another order a product differs by its rounding, of 1e10 by 1024. What is so near to the
            # maximum, or above it, is the maximum. A mask's numbers are added alike wherever: they widen nothing.
            # Beside a mask, in the usual launch too, for float32 alone: of 16 bits all orders gave the same bits.
            near = 0.5 - tl.abs(s) * tl.abs(scale * 2.0**-21)
        if F.mask == "float":
            seen = seen & (bias != float("-inf"))
            s, scale = add_mask(s, scale, bias, True)
        power = tl.fma(s, scale, -m_i)
        if F.mask == "float" or T.CAREFUL:
            below = s * scale - m_i
            if GUARDED:
                below = tl.where(below > near, 0.0, below)
            if F.mask == "float":
                power = below - log_l
            else:  # rows that are not counted anew keep the bits that the usual launch gives them
                power = tl.where(log_l != 0.0, below - log_l, power)
        p = tl.exp2(power)
        p = tl.where(seen, p, 0.0)
    return p, seen, slope


@triton.jit
def add_tiles(ga, gb, poisoned, own, streamed, own_rows, rows, mask_ptr, first, last, visit, offs_m, len_m, len_n,
              diag_lo, diag_hi, args, WHOLE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Adds the tiles first <= i < last of a visit to the gradients of own rows; WHOLE: all pairs in them are seen.

    own: factors. CAREFUL: without bad rows of what is streamed; own rows that see one are poisoned.
    """
    for i in tl.range(first, last):
        start_n = visited_start(i, visit, T.BLOCK_N)
        offs_n = start_n + tl.arange(0, T.BLOCK_N)
        c = load_factor(streamed[0], start_n, len_n, T.BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T.TMA, not WHOLE, T)
        d = load_factor(streamed[1], start_n, len_n, T.BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T.TMA, not WHOLE, T)
        dtype: tl.constexpr = tl.float32 if T.PRODUCTS == "parts" else c.dtype
        m_i, log_l, delta = own_rows
        if T.KEYS:
            m_i, log_l, delta = numbers_of(rows, offs_n, offs_n < len_n, F.mask == "float" or T.CAREFUL)
        if T.CAREFUL:
            bad = not_finite(foremost(c, T)) | not_finite(foremost(d, T))
            if T.KEYS:
                bad |= (m_i != m_i).to(tl.int32)
            c, d = without(c, bad, T), without(d, bad, T)
        if T.KEYS:
            m_i, log_l, delta = m_i[None, :], log_l[None, :], delta[None, :]
        s = times(own[0], transposed(c, T), T, T.KEYS)  # [M, N], with the bits of Q K^T
        p, seen, slope = weights_of(s, m_i, log_l, offs_m, offs_n, mask_ptr, len_m, len_n, diag_lo, diag_hi, args,
                                    dtype, WHOLE, F, T)  # fmt: skip
        if T.CAREFUL:
            good = (bad == 0)[None, :]
            poisoned |= tl.max((seen & (bad != 0)[None, :]).to(tl.int32), 1)
            p = tl.where(good, p, 0.0)
        if T.MAKES_A:
            ds = p * (times(own[1], transposed(d, T), T) - delta) * slope
            if not WHOLE:
                ds = tl.where(seen, ds, 0.0)
            if T.CAREFUL:
                ds = tl.where(good, ds, 0.0)
            ga = plus_product(ga, factor(ds.to(dtype), T), c, T)
        if T.MAKES_B:
            gb = plus_product(gb, factor(p.to(dtype), T), d, T)
    return ga, gb, poisoned


@triton.jit
def gradients(own, own_rows, c_src, d_src, rows, place, visit, offs_m, len_m, len_n, diag_lo, diag_hi, args,
              F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """(ga [M, D], gb [M, Dv], poisoned [M]) of own rows over all that they see.

    c_src, d_src: as load_tile takes them, of the first head that is streamed; place = (batch, query head, where rows of
    head 0 begin, stride of a head there).
    """
    ga = tl.full([T.BLOCK_M, T.BLOCK_D], 0.0, tl.float32)
    gb = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    poisoned = tl.full([T.BLOCK_M], 0, tl.int32)
    for g in tl.range(0, T.HEADS):
        streamed = ((c_src[0], c_src[1], c_src[2] + g, c_src[3], c_src[4]),
                    (d_src[0], d_src[1], d_src[2] + g, d_src[3], d_src[4]))  # fmt: skip
        at = place[2] + (place[1] + g).to(tl.int64) * place[3]
        of_head = (rows[0] + at, rows[1] + at, rows[2] + at)
        mask_ptr = args.mask_ptr
        if F.mask != "":
            mask_ptr = mask_of(place[0], place[1] + g, args)
        edges = visit[0] if T.CAREFUL else visit[1]
        ga, gb, poisoned = add_tiles(ga, gb, poisoned, own, streamed, own_rows, of_head, mask_ptr, 0, edges, visit,
                                     offs_m, len_m, len_n, diag_lo, diag_hi, args, False, F, T)  # fmt: skip
        if F.mask == "" and not T.CAREFUL:
            ga, gb, poisoned = add_tiles(ga, gb, poisoned, own, streamed, own_rows, of_head, mask_ptr, edges, visit[0],
                                         visit, offs_m, len_m, len_n, diag_lo, diag_hi, args, True, F, T)  # fmt: skip
    return ga, gb, poisoned


@triton.jit
def leave(g, poisoned, g_ptr, place, strides, offs_m, len_m, room, DIM: tl.constexpr, BLOCK: tl.constexpr,
          CAREFUL: tl.constexpr):  # fmt: skip
    """Writes rows of a gradient [M, BLOCK]; keys that are there but not in use get 0. place = (entry, head, row)."""
    offs_d = tl.arange(0, BLOCK)
    if CAREFUL:
        g = tl.where((poisoned != 0)[:, None], float("nan"), g)
    g = tl.where((offs_m < len_m)[:, None], g, 0.0)
    ptr = g_ptr + place[0].to(tl.int64) * strides[0] + place[1].to(tl.int64) * strides[1]
    ptrs = ptr + (place[2] + offs_m).to(tl.int64)[:, None] * strides[2] + offs_d.to(tl.int64)[None, :] * strides[3]
    tl.store(ptrs, g.to(g_ptr.dtype.element_ty), mask=(offs_m < room)[:, None] & (offs_d < DIM)[None, :])


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "num_m", "rows_q", "rows_k", "diag_lo", "diag_hi", "heads"])
def backward_kernel(a_src, b_src, c_src, d_src, ga_ptr, gb_ptr, failed_ptr, m_ptr, log_l_ptr, delta_ptr, a_strides,
                    b_strides, c_strides, d_strides, ga_strides, gb_strides, stride_lb, stride_lh, num_m, rows_q,
                    rows_k, diag_lo, diag_hi, heads, args, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    block_m = pid % num_m
    if T.SEEN.right:  # who sees most goes first
        block_m = num_m - 1 - block_m
    h, entry = pid // num_m % heads, pid // num_m // heads  # own head
    batch, start_q, len_q, start_k, room, len_k, diag_lo, diag_hi = sequence(entry, rows_q, rows_k, diag_lo, diag_hi,
                                                                             args, F)  # fmt: skip
    if T.KEYS:
        start_m, len_m, start_n, len_n, first = start_k, len_k, start_q, len_q, h * T.GROUP
        diag_lo, diag_hi = -diag_hi, -diag_lo
        query_head = first
    else:
        start_m, len_m, room, start_n, len_n, first = start_q, len_q, len_q, start_k, len_k, h // T.GROUP
        query_head = h
    row_lo = block_m * T.BLOCK_M
    if row_lo >= room:
        return
    offs_m = row_lo + tl.arange(0, T.BLOCK_M)
    failed_ptrs = failed_ptr + pid.to(tl.int64) * T.BLOCK_M + tl.arange(0, T.BLOCK_M)
    if T.CAREFUL and tl.max(tl.load(failed_ptrs, mask=offs_m < len_m, other=0), 0) == 0:
        return
    a = load_factor((a_src, batch, h, start_m, a_strides), row_lo, len_m, T.BLOCK_M, T.HEAD_DIM, T.BLOCK_D, False, True,
                    T)  # fmt: skip
    own = (a, 0)
    if T.MAKES_A:
        b = load_factor((b_src, batch, h, start_m, b_strides), row_lo, len_m, T.BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV,
                        False, True, T)  # fmt: skip
        own = (a, b)
    c, d = (c_src, batch, first, start_n, c_strides), (d_src, batch, first, start_n, d_strides)
    rows = (m_ptr, log_l_ptr, delta_ptr)
    place = (entry, query_head, batch.to(tl.int64) * stride_lb + start_q, stride_lh)
    at = place[2] + query_head.to(tl.int64) * stride_lh
    own_rows = (0, 0, 0)
    if not T.KEYS:
        APART: tl.constexpr = F.mask == "float" or T.CAREFUL
        m_i, log_l, delta = numbers_of((m_ptr + at, log_l_ptr + at, delta_ptr + at), offs_m, offs_m < len_m, APART)
        own_rows = (m_i[:, None], log_l[:, None], delta[:, None])
    row_hi = tl.maximum(tl.minimum(row_lo + T.BLOCK_M, len_m), row_lo)
    SEEN: tl.constexpr = T.SEEN
    visit = visited_tiles(row_lo, row_hi, tl.where(row_lo < len_m, len_n, 0), diag_lo, diag_hi, T.BLOCK_N, SEEN)

    to = (batch, h, start_m)
    ga, gb, poisoned = gradients(own, own_rows, c, d, rows, place, visit, offs_m, len_m, len_n, diag_lo, diag_hi, args,
                                 F, T)  # fmt: skip
    bad = tl.zeros_like(poisoned)
    if T.MAKES_A:
        bad |= not_finite(ga)
        ga *= args.scale_log2 * LN2
        leave(ga, poisoned, ga_ptr, to, ga_strides, offs_m, len_m, room, T.HEAD_DIM, T.BLOCK_D, T.CAREFUL)
    if T.MAKES_B:
        bad |= not_finite(gb)
        leave(gb, poisoned, gb_ptr, to, gb_strides, offs_m, len_m, room, T.HEAD_DIM_V, T.BLOCK_DV, T.CAREFUL)
    if not T.CAREFUL:
        tl.store(failed_ptrs, bad)
