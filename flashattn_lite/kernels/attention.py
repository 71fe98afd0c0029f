"""The portable attention forward in Triton: the kernel; `attention_launch.py` starts it.

One program owns BLOCK_M query rows of one head and streams the K/V tiles that any of them can see.
Loop invariant, for each row after some tiles: m_i is a reference (log2 units), l_i = sum of 2^(s - m_i),
acc = sum of 2^(s - m_i) * v over the keys of those tiles, all in float32. Any reference gives the same softmax as long
as the powers stay finite: the masked tiles and one whole one go first and move it (running maximum), the other tiles,
which all rows see whole, keep it: no maximum, no rescale. Bytes moved: Q and O once, K and V once per row tile (mostly
from L2), a mask tile where there is a mask.

At the end a row checks itself. One whose state is not finite (an infinity or NaN in V, also of a key that it can't
see, as 0 * NaN is NaN; or a score far above the reference), or whose reference is so large that float32 does not hold
it to within 1, is computed once more: first with V freed of what is not finite, which is then given to the rows that
see it, else as before to the bit; and if that did not help, at the running maximum with exact subtraction. Only such
rows are written, so that a row's bits depend on that row and the keys that it sees alone.
Source: Dao, FlashAttention-2 (arXiv 2307.08691); Milakov and Gimelshein, Online normalizer (arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.attention_tiles import (
    Shape,
    factor,
    load_tile,
    mask_of,
    masked_scores,
    plus_product,
    scores,
    sequence,
)
from flashattn_lite.kernels.device.bounds import visited_start, visited_tiles
from flashattn_lite.kernels.device.scores import finite, row_maximum
from flashattn_lite.kernels.device.state import (
    EMPTY_L,
    EMPTY_M,
    EXACT_M,
    LOG2E,
    finish,
    merge,
    rounded,
    single,
    update_fixed,
    update_to,
)


@dataclass(frozen=True)
class Tile(Shape):
    """Of the forward: queries are its own rows, keys those that it streams."""

    RELOAD: bool  # flags of failed rows go through memory: Triton 3.6 for sm_100 can't reduce what comes from acc twice


@triton.jit
def add_values(p, v, acc, T: tl.constexpr):
    """acc + p v [M, Dv]."""
    return plus_product(acc, factor(p.to(v.dtype), T), factor(v, T), T)


@triton.jit
def attend(acc, m_i, l_i, q, k_src, v_src, mask_ptr, first, last, visit, offs_m, len_q, len_k, diag_lo, diag_hi, args,
           FIXED: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Takes the tiles first <= i < last of a visit into the state of these rows.

    FIXED: tiles that every row sees whole, at the reference that the rows have by now. Else masked, at the running
    maximum.
    """
    for i in tl.range(first, last):
        start_n = visited_start(i, visit, T.BLOCK_N)
        k = load_tile(k_src, start_n, len_k, T.BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T.TMA, not FIXED)
        s, scale = scores(q, k, False, args, F, T)  # [M, N]
        if FIXED:
            l_i, p = update_fixed(m_i, l_i, s, scale)
        else:
            offs_n = start_n + tl.arange(0, T.BLOCK_N)
            s, scale = masked_scores(s, scale, offs_m, offs_n, mask_ptr, len_q, len_k, diag_lo, diag_hi, args, False,
                                     F, T)  # fmt: skip
            m_i, l_i, alpha, p = update_to(m_i, l_i, tl.maximum(m_i, row_maximum(s, scale, F)), s, scale)
            acc *= alpha[:, None]
        v = load_tile(v_src, start_n, len_k, T.BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T.TMA, not FIXED)
        acc = add_values(p, v, acc, T)
    return acc, m_i, l_i


@triton.jit
def attend_again(q, k_src, v_src, mask_ptr, visit, exact, offs_m, len_q, len_k, diag_lo, diag_hi, args,
                 F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The state of these rows over a whole visit, from a V without its infinities and NaN.

    With `exact`, also at the running maximum throughout, and with scores multiplied before they are subtracted.
    Without, the arithmetic of `attend`, to the bit.
    """
    m_i = tl.full([T.BLOCK_M], EMPTY_M, tl.float32)
    l_i = tl.full([T.BLOCK_M], EMPTY_L, tl.float32)
    acc = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    for i in tl.range(0, visit[0]):
        start_n = visited_start(i, visit, T.BLOCK_N)
        k = load_tile(k_src, start_n, len_k, T.BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T.TMA, True)
        s, scale = scores(q, k, True, args, F, T)  # [M, N]
        offs_n = start_n + tl.arange(0, T.BLOCK_N)
        s, scale = masked_scores(s, scale, offs_m, offs_n, mask_ptr, len_q, len_k, diag_lo, diag_hi, args, True, F, T)
        s = tl.where(exact == 1, s * scale, s)
        scale = tl.where(exact == 1, 1.0, scale)
        fixed = (exact == 0) & (i >= visit[1]) & (m_i != EMPTY_M)  # at a reference of -inf nothing stays
        m_new = tl.where(fixed, m_i, tl.maximum(m_i, row_maximum(s, scale, F)))
        m_i, l_i, alpha, p = update_to(m_i, l_i, m_new, s, scale)
        v = load_tile(v_src, start_n, len_k, T.BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T.TMA, True)
        v = finite(v)  # add_infinities does the rest
        acc = add_values(p, v, acc * alpha[:, None], T)
    return acc, m_i, l_i


@triton.jit
def unsettled(acc, m_i, l_i):
    """[M] bool: rows whose state is not finite, or whose reference float32 does not hold to within 1."""
    failed = (tl.sum(acc * 0.0, 1) + l_i * 0.0) != 0.0  # NaN where anything is not finite
    return failed | ((tl.abs(m_i) > EXACT_M) & (m_i != EMPTY_M))


@triton.jit
def out_pointers(dst, offs_m, T: tl.constexpr):
    """[M, Dv] pointers; dst = (out, lse, batch, head, first row, out strides, lse strides of batch and head)."""
    offs_d = tl.arange(0, T.BLOCK_DV).to(tl.int64)
    base = dst[0] + dst[2].to(tl.int64) * dst[5][0] + dst[3].to(tl.int64) * dst[5][1]
    return base + (dst[4].to(tl.int64) + offs_m)[:, None] * dst[5][2] + offs_d[None, :] * dst[5][3]


@triton.jit
def lse_pointers(dst, offs_m):
    """[M] pointers; dst as for out_pointers."""
    return dst[1] + dst[2].to(tl.int64) * dst[6][0] + dst[3].to(tl.int64) * dst[6][1] + dst[4] + offs_m


@triton.jit
def finish_rows(acc, m_i, l_i, dst, offs_m, write, args, F: tl.constexpr, T: tl.constexpr):
    """Takes the sink into the state, finishes it, and writes the rows in `write`."""
    h = dst[3]
    if F.sinks:
        sink = tl.load(args.sinks_ptr + h).to(tl.float32) * LOG2E + tl.zeros_like(m_i)
        sink, sink_l = single(sink)
        m_i, l_i, alpha, _ = merge(m_i, l_i, sink, sink_l)
        acc *= alpha[:, None]
    inv_l, lse = finish(m_i, l_i)
    exists = (tl.arange(0, T.BLOCK_DV) < T.HEAD_DIM_V)[None, :]
    out = rounded(acc * inv_l[:, None], dst[0].dtype.element_ty)  # [M, Dv]
    tl.store(out_pointers(dst, offs_m, T), out, mask=write[:, None] & exists)
    tl.store(lse_pointers(dst, offs_m), lse, mask=write)


@triton.jit
def add_infinities(v_src, mask_ptr, visit, dst, offs_m, write, len_q, len_k, diag_lo, diag_hi, args,
                   F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Adds the infinities of V (a NaN counts as both) to the finished rows in `write` that see their keys."""
    exists = (tl.arange(0, T.BLOCK_DV) < T.HEAD_DIM_V)[None, :]
    ptrs = out_pointers(dst, offs_m, T)
    for negative in tl.range(0, 2):
        infinity = tl.where(negative == 0, float("inf"), float("-inf"))
        hits = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)  # [M, Dv] how many such keys the row sees
        for i in tl.range(0, visit[0], num_stages=1):
            start_n = visit[3] + i * T.BLOCK_N  # in any order
            v = load_tile(v_src, start_n, len_k, T.BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T.TMA, True)
            hit = ((v != v) | (v.to(tl.float32) == infinity)).to(tl.float16)  # [N, Dv]
            offs_n = start_n + tl.arange(0, T.BLOCK_N)
            s = tl.full([T.BLOCK_M, T.BLOCK_N], 0.0, tl.float32)
            s, _ = masked_scores(s, 1.0, offs_m, offs_n, mask_ptr, len_q, len_k, diag_lo, diag_hi, args, True, F, T)
            hits = tl.dot((s != float("-inf")).to(tl.float16), hit, hits)
        out = tl.load(ptrs, mask=write[:, None] & exists, other=0.0)
        tl.store(ptrs, out + tl.where(hits > 0, infinity, 0.0).to(out.dtype), mask=write[:, None] & exists)


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "num_m", "rows_q", "rows_k", "diag_lo", "diag_hi", "heads"])
def attention_kernel(q_ptr, k_src, v_src, out_ptr, lse_ptr, q_strides, k_strides, v_strides, o_strides, stride_lb,
                     stride_lh, num_m, rows_q, rows_k, diag_lo, diag_hi, heads, args, F: tl.constexpr,
                     T: tl.constexpr):  # fmt: skip
    # Neighbouring programs share a head, so that its K and V stay in L2; the longest rows of a causal head go first.
    pid = tl.program_id(0)
    block_m = pid % num_m
    if F.right:
        block_m = num_m - 1 - block_m
    h = pid // num_m % heads
    b = pid // num_m // heads

    batch, start_q, len_q, start_k, _, len_k, diag_lo, diag_hi = sequence(b, rows_q, rows_k, diag_lo, diag_hi, args, F)
    row_lo = block_m * T.BLOCK_M
    if row_lo >= len_q:
        return
    q_src = (q_ptr, batch, h, start_q, q_strides)
    k = (k_src, batch, h // T.GROUP, start_k, k_strides)
    v = (v_src, batch, h // T.GROUP, start_k, v_strides)
    mask_ptr = args.mask_ptr
    if F.mask != "":
        mask_ptr = mask_of(b, h, args)

    offs_m = row_lo + tl.arange(0, T.BLOCK_M)
    row_hi = tl.minimum(row_lo + T.BLOCK_M, len_q)
    q = load_tile(q_src, row_lo, len_q, T.BLOCK_M, T.HEAD_DIM, T.BLOCK_D, False, True)  # [M, D]
    q = factor(q, T)
    visit = visited_tiles(row_lo, row_hi, len_k, diag_lo, diag_hi, T.BLOCK_N, F)

    m_i = tl.full([T.BLOCK_M], EMPTY_M, tl.float32)
    l_i = tl.full([T.BLOCK_M], EMPTY_L, tl.float32)
    acc = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    acc, m_i, l_i = attend(acc, m_i, l_i, q, k, v, mask_ptr, 0, visit[1], visit, offs_m, len_q, len_k, diag_lo,
                           diag_hi, args, False, F, T)  # fmt: skip
    if F.mask == "":
        acc, m_i, l_i = attend(acc, m_i, l_i, q, k, v, mask_ptr, visit[1], visit[0], visit, offs_m, len_q, len_k,
                               diag_lo, diag_hi, args, True, F, T)  # fmt: skip

    dst = (out_ptr, lse_ptr, batch, h, start_q, o_strides, (stride_lb, stride_lh))
    rows = offs_m < len_q
    todo = (rows & unsettled(acc, m_i, l_i)).to(tl.int32)
    finish_rows(acc, m_i, l_i, dst, offs_m, rows & (todo == 0), args, F, T)
    if T.RELOAD:
        tl.store(lse_pointers(dst, offs_m), float("nan"), mask=todo != 0)
        tl.debug_barrier()
        mark = tl.load(lse_pointers(dst, offs_m), mask=rows, other=0.0)
        todo = (mark != mark).to(tl.int32)
    if tl.max(todo, 0) > 0:
        for exact in tl.range(0, 2):
            acc, m_i, l_i = attend_again(q, k, v, mask_ptr, visit, exact, offs_m, len_q, len_k, diag_lo, diag_hi,
                                         args, F, T)  # fmt: skip
            done = (todo != 0) & ((unsettled(acc, m_i, l_i) == 0) | (exact == 1))
            finish_rows(acc, m_i, l_i, dst, offs_m, done, args, F, T)
            add_infinities(v, mask_ptr, visit, dst, offs_m, done, len_q, len_k, diag_lo, diag_hi, args, F, T)
            todo = tl.where(done, 0, todo)
