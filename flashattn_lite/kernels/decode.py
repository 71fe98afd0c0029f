"""Split-KV decoding in Triton: states of parts of a cache, and their merge; `decode_launch.py` starts both kernels.

Keys fall into splits of T.SPLIT at fixed places, T.SPAN splits make a span. `partial_kernel`: one program owns the rows
of one key/value head (the query heads that share it times the query tokens, BLOCK_M of them) and one part: a split, or
a whole span where the launch is large enough. Loop invariant: (m_i, l_i, acc) is the state of these rows over the tiles
of the open split at their running maximum, (m_s, l_s, acc_s) that of the closed splits of the part; all float32.
`merge_kernel`: one program owns COLUMNS of one row, folds the splits of each span in their order, then the spans.
Either way a split's state is made by the same tiles, a span's by the same folds and a row's by the same merge, so that
the bits of a row depend neither on the batch nor on which of the two ways was taken.

Bytes moved: K and V once, which is the floor; a state of Dv + 2 floats a row and part, written and read.
Keys that no row sees are not read. A key that one row sees and another does not can still put 0 * NaN into the other:
such a part is done again with a V freed of what is not finite, which is then given to the rows that see it.
Source: Dao, Haziza, Massa, Sizov, Flash-Decoding for long-context inference (2023); the merge, docs/theory.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.device.scores import to_log2, visible
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, finish, merge, update


@dataclass(frozen=True)
class DecodeTile:
    """Compile-time shape of both kernels: what a problem fixes, and what tuning chose for it."""

    BLOCK_M: int  # packed query rows
    BLOCK_N: int  # keys
    SPLIT: int  # keys
    SPAN: int  # splits
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int  # HEAD_DIM as the power of two that the matrix unit takes
    BLOCK_DV: int
    GROUP: int  # query heads of one key/value head
    PAGE: int  # keys of a page; 0: the cache is contiguous
    ALIGN: int  # elements that divide every stride of the cache but the last
    PRECISION: str  # of tl.dot on float32 operands
    UNEQUAL: bool  # rows of one sequence may see different keys
    LANES: int  # spans that a merging program folds side by side
    COLUMNS: int  # of the output, a merging program
    PDL: bool  # the merge may be put on the card while the last parts still run (sm_90 and newer)


@triton.jit
def visible_keys(kv_lens_ptr, b, len_q, max_k, diag_lo, diag_hi, F: tl.constexpr):
    """(lo, hi, len_k, diag_lo, diag_hi) of sequence b; no row sees a key outside lo <= key < hi."""
    len_k = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + b), 0), max_k)
    lo = 0
    hi = len_k
    if F.end_aligned:
        diag_lo += len_k - len_q
        diag_hi += len_k - len_q
    if F.left:
        lo = tl.maximum(diag_lo, 0)
    if F.right:
        hi = tl.minimum(len_q + diag_hi, len_k)
    some = lo < hi
    return tl.where(some, lo, 0), tl.where(some, hi, 0), len_k, diag_lo, diag_hi


@triton.jit
def key_rows(offs_n, exists, table_ptr, pages, T: tl.constexpr):
    """(page or batch entry, row in it) of each key [N], 64-bit. A table's entry is clamped into the cache."""
    if T.PAGE:
        page = tl.load(table_ptr + offs_n // T.PAGE, mask=exists, other=0)
        return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64), (offs_n % T.PAGE).to(tl.int64)
    else:
        return tl.zeros_like(offs_n).to(tl.int64), offs_n.to(tl.int64)


@triton.jit
def load_rows(src, page, row, exists, DIM: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr):
    """Rows [N, BLOCK] of K or V of one head; src = (pointer, strides). What does not exist is not read, and is 0."""
    offs_d = tl.arange(0, BLOCK)
    # In whole units of ALIGN, so that the compiler knows that rows start where 16-byte loads may.
    offs = row * (src[1][2] // T.ALIGN * T.ALIGN)
    if T.PAGE:
        offs += page * (src[1][0] // T.ALIGN * T.ALIGN)
    ptrs = src[0] + offs[:, None] + offs_d.to(tl.int64)[None, :] * src[1][3]
    if DIM == BLOCK:
        return tl.load(ptrs, mask=exists[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=exists[:, None] & (offs_d < DIM)[None, :], other=0.0)


@triton.jit
def weigh(acc, alpha):
    """acc * alpha, but an infinity stays one whatever its weight, so that it does not matter when it is weighed."""
    return tl.where(tl.abs(acc) < float("inf"), acc * alpha, acc)


@triton.jit
def fold(m_a, l_a, acc_a, m_b, l_b, acc_b):
    """The state over two disjoint key sets; m, l [M], acc [M, N]."""
    m_i, l_i, alpha_a, alpha_b = merge(m_a, l_a, m_b, l_b)
    return m_i, l_i, weigh(acc_a, alpha_a[:, None]) + weigh(acc_b, alpha_b[:, None])


@triton.jit
def close(closes, m_s, l_s, acc_s, m_i, l_i, acc):
    """Where `closes`, folds the open state (m_i, l_i, acc) into the closed one (m_s, l_s, acc_s) and empties it.

    A choice and not a branch: Triton 3.6 can't pipeline a loop with a branch that yields tensors.
    """
    m_f, l_f, acc_f = fold(m_s, l_s, acc_s, m_i, l_i, acc)
    m_s, l_s, acc_s = (tl.where(closes, m_f, m_s), tl.where(closes, l_f, l_s), tl.where(closes, acc_f, acc_s))
    return m_s, l_s, acc_s, tl.where(closes, EMPTY_M, m_i), tl.where(closes, EMPTY_L, l_i), tl.where(closes, 0.0, acc)


@triton.jit
def attend(q, k_src, v_src, table_ptr, pages, first, last, lo, hi, offs_m, len_k, diag_lo, diag_hi, scale_log2, softcap,
           FINITE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The state of these rows over the tiles first <= i < last. FINITE: from a V without its infinities and NaN."""
    m_s, m_i = (tl.full([T.BLOCK_M], EMPTY_M, tl.float32), tl.full([T.BLOCK_M], EMPTY_M, tl.float32))
    l_s, l_i = (tl.full([T.BLOCK_M], EMPTY_L, tl.float32), tl.full([T.BLOCK_M], EMPTY_L, tl.float32))
    acc = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    acc_s = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    for i in tl.range(first, last):
        offs_n = i * T.BLOCK_N + tl.arange(0, T.BLOCK_N)
        exists = (offs_n >= lo) & (offs_n < hi)
        page, row = key_rows(offs_n, exists, table_ptr, pages, T)
        k = load_rows(k_src, page, row, exists, T.HEAD_DIM, T.BLOCK_D, T)
        s = to_log2(tl.dot(q, tl.trans(k), input_precision=T.PRECISION), scale_log2, softcap, F)  # [M, N]
        s = tl.where(visible(offs_m, offs_n, len_k, diag_lo, diag_hi, F), s, float("-inf"))
        m_i, l_i, alpha, p = update(m_i, l_i, s, 1.0)
        v = load_rows(v_src, page, row, exists, T.HEAD_DIM_V, T.BLOCK_DV, T)
        if FINITE:
            v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=T.PRECISION)
        closes = (i + 1) % (T.SPLIT // T.BLOCK_N) == 0
        m_s, l_s, acc_s, m_i, l_i, acc = close(closes, m_s, l_s, acc_s, m_i, l_i, acc)
    return fold(m_s, l_s, acc_s, m_i, l_i, acc)


@triton.jit
def add_infinities(acc, v_src, table_ptr, pages, first, last, lo, hi, offs_m, len_k, diag_lo, diag_hi,
                   F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """acc plus the infinities of V (a NaN counts as both) that each row sees in the tiles first <= i < last."""
    for negative in tl.range(0, 2):
        infinity = tl.where(negative == 0, float("inf"), float("-inf"))
        hits = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)  # how many such keys the row sees
        for i in tl.range(first, last, num_stages=1):
            offs_n = i * T.BLOCK_N + tl.arange(0, T.BLOCK_N)
            exists = (offs_n >= lo) & (offs_n < hi)
            page, row = key_rows(offs_n, exists, table_ptr, pages, T)
            v = load_rows(v_src, page, row, exists, T.HEAD_DIM_V, T.BLOCK_DV, T)
            hit = ((v != v) | (v.to(tl.float32) == infinity)).to(v.dtype)  # [N, Dv]
            seen = visible(offs_m, offs_n, len_k, diag_lo, diag_hi, F).to(v.dtype)  # [M, N]
            hits = tl.dot(seen, hit, hits, input_precision=T.PRECISION)
        acc += tl.where(hits > 0, infinity, 0.0)
    return acc


@triton.jit
def store_state(m_i, l_i, acc, m_ptr, l_ptr, acc_ptr, first_row, offs_r, rows, T: tl.constexpr):
    """A part's state of the rows offs_r [M]; row 0 of the part is row first_row of m, l [..] and acc [.., Dv]."""
    offs_d = tl.arange(0, T.BLOCK_DV)
    at = first_row + offs_r
    tl.store(m_ptr + at, m_i, mask=offs_r < rows)
    tl.store(l_ptr + at, l_i, mask=offs_r < rows)
    ptrs = acc_ptr + at[:, None] * T.HEAD_DIM_V + offs_d[None, :]
    tl.store(ptrs, acc, mask=(offs_r < rows)[:, None] & (offs_d < T.HEAD_DIM_V)[None, :])


@triton.jit(do_not_specialize=["stride_tb", "pages", "num_m", "parts", "part_splits", "heads", "len_q", "max_k",
                               "diag_lo", "diag_hi"])  # fmt: skip
def partial_kernel(q_ptr, k_ptr, v_ptr, table_ptr, kv_lens_ptr, m_ptr, l_ptr, acc_ptr, q_strides, k_strides, v_strides,
                   stride_tb, pages, num_m, parts, part_splits, heads, len_q, max_k, diag_lo, diag_hi, scale_log2,
                   softcap, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    if T.PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring programs read the same keys, then the keys behind them.
    pid = tl.program_id(0)
    block_m = pid % num_m
    part = pid // num_m % parts
    h = pid // num_m // parts % heads
    b = pid // num_m // parts // heads

    lo, hi, len_k, diag_lo, diag_hi = visible_keys(kv_lens_ptr, b, len_q, max_k, diag_lo, diag_hi, F)
    start = part * part_splits * T.SPLIT
    first = tl.maximum(start, lo) // T.BLOCK_N
    last = tl.cdiv(tl.minimum(start + part_splits * T.SPLIT, hi), T.BLOCK_N)
    if first >= last:
        return

    rows = T.GROUP * len_q
    offs_r = block_m * T.BLOCK_M + tl.arange(0, T.BLOCK_M)
    offs_m = offs_r % len_q  # query token of each packed row
    offs_d = tl.arange(0, T.BLOCK_D)
    head_q = h.to(tl.int64) * T.GROUP + offs_r // len_q
    q_ptrs = q_ptr + b.to(tl.int64) * q_strides[0] + head_q[:, None] * q_strides[1]
    q_ptrs += offs_m.to(tl.int64)[:, None] * q_strides[2] + offs_d.to(tl.int64)[None, :] * q_strides[3]
    q = tl.load(q_ptrs, mask=(offs_r < rows)[:, None] & (offs_d < T.HEAD_DIM)[None, :], other=0.0)  # [M, D]

    k_ptr += h.to(tl.int64) * (k_strides[1] // T.ALIGN * T.ALIGN)
    v_ptr += h.to(tl.int64) * (v_strides[1] // T.ALIGN * T.ALIGN)
    if T.PAGE:
        table_ptr += b.to(tl.int64) * stride_tb
    else:
        k_ptr += b.to(tl.int64) * (k_strides[0] // T.ALIGN * T.ALIGN)
        v_ptr += b.to(tl.int64) * (v_strides[0] // T.ALIGN * T.ALIGN)
    k_src, v_src = ((k_ptr, k_strides), (v_ptr, v_strides))
    m_i, l_i, acc = attend(q, k_src, v_src, table_ptr, pages, first, last, lo, hi, offs_m, len_k, diag_lo, diag_hi,
                           scale_log2, softcap, False, F, T)  # fmt: skip
    first_row = ((b.to(tl.int64) * heads + h) * parts + part) * rows
    store_state(m_i, l_i, acc, m_ptr, l_ptr, acc_ptr, first_row, offs_r, rows, T)
    if T.UNEQUAL:
        failed = tl.max((acc * 0.0 != 0.0).to(tl.int32), 1)
        if tl.max(failed, 0) > 0:
            m_i, l_i, acc = attend(q, k_src, v_src, table_ptr, pages, first, last, lo, hi, offs_m, len_k, diag_lo,
                                   diag_hi, scale_log2, softcap, True, F, T)  # fmt: skip
            acc = add_infinities(acc, v_src, table_ptr, pages, first, last, lo, hi, offs_m, len_k, diag_lo, diag_hi,
                                 F, T)  # fmt: skip
            tl.debug_barrier()  # the first store comes first
            store_state(m_i, l_i, acc, m_ptr, l_ptr, acc_ptr, first_row, offs_r, rows, T)


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "parts", "part_splits", "heads", "len_q", "max_k", "diag_lo",
                               "diag_hi"])  # fmt: skip
def merge_kernel(out_ptr, lse_ptr, sinks_ptr, kv_lens_ptr, m_ptr, l_ptr, acc_ptr, o_strides, stride_lb, stride_lh,
                 parts, part_splits, heads, len_q, max_k, diag_lo, diag_hi,
                 F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    blocks: tl.constexpr = (T.HEAD_DIM_V + T.COLUMNS - 1) // T.COLUMNS
    rows = T.GROUP * len_q
    block = tl.program_id(0) % blocks
    r = tl.program_id(0) // blocks % rows
    b = tl.program_id(0) // blocks // rows // heads
    h = tl.program_id(0) // blocks // rows % heads
    lo, hi, _, _, _ = visible_keys(kv_lens_ptr, b, len_q, max_k, diag_lo, diag_hi, F)

    # Parts that no row sees were not written. Lane n folds the spans n, n + LANES, ... of the sequence, and first each
    # span's splits where parts are splits: (m_i, l_i, acc) is the open span, (m_s, l_s, acc_s) the closed ones.
    part_lo = lo // T.SPLIT // part_splits
    part_hi = tl.cdiv(tl.cdiv(hi, T.SPLIT), part_splits)
    span_parts = T.SPAN // part_splits
    first = part_lo // span_parts // T.LANES * span_parts
    last = tl.cdiv(tl.cdiv(part_hi, span_parts), T.LANES) * span_parts
    offs_d = block * T.COLUMNS + tl.arange(0, T.COLUMNS)
    exists = (offs_d < T.HEAD_DIM_V)[None, :]
    m_s, m_i = (tl.full([T.LANES], EMPTY_M, tl.float32), tl.full([T.LANES], EMPTY_M, tl.float32))
    l_s, l_i = (tl.full([T.LANES], EMPTY_L, tl.float32), tl.full([T.LANES], EMPTY_L, tl.float32))
    acc = tl.full([T.LANES, T.COLUMNS], 0.0, tl.float32)
    acc_s = tl.full([T.LANES, T.COLUMNS], 0.0, tl.float32)
    if T.PDL:
        tl.extra.cuda.gdc_wait()
    # Staged, although there is no dot: a whole span is asked for before its first split is waited for. Unrolled, ptxas
    # 12.8 put each load right before its fold.
    for i in tl.range(first, last, num_stages=T.SPAN + 1):
        part = (i // span_parts * T.LANES + tl.arange(0, T.LANES)) * span_parts + i % span_parts
        written = (part >= part_lo) & (part < part_hi)
        at = ((b.to(tl.int64) * heads + h) * parts + part) * rows + r
        m_p = tl.load(m_ptr + at, mask=written, other=EMPTY_M)
        l_p = tl.load(l_ptr + at, mask=written, other=EMPTY_L)
        acc_ptrs = acc_ptr + at[:, None] * T.HEAD_DIM_V + offs_d[None, :]
        acc_p = tl.load(acc_ptrs, mask=written[:, None] & exists, other=0.0)
        m_i, l_i, acc = fold(m_i, l_i, acc, m_p, l_p, acc_p)
        m_s, l_s, acc_s, m_i, l_i, acc = close((i + 1) % span_parts == 0, m_s, l_s, acc_s, m_i, l_i, acc)

    # The lanes are the scores of one more softmax, whose weights are theirs.
    empty_m, empty_l = (tl.full([1], EMPTY_M, tl.float32), tl.full([1], EMPTY_L, tl.float32))
    m_i, _, _, weights = update(empty_m, empty_l, m_s[None, :], 1.0)  # [1], [1, LANES]
    l_i = tl.sum(weights * l_s[None, :], 1)
    acc = tl.sum(weigh(acc_s, tl.trans(weights)), 0)[None, :]  # [1, COLUMNS]
    head = h * T.GROUP + r // len_q
    if F.sinks:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E + tl.zeros_like(m_i)
        sink_l = tl.where(sink == EMPTY_M, EMPTY_L, 1.0)
        m_i, l_i, alpha, _ = merge(m_i, l_i, sink, sink_l)
        acc = weigh(acc, alpha[:, None])
    inv_l, lse = finish(m_i, l_i)
    token = r % len_q
    at = b.to(tl.int64) * o_strides[0] + head.to(tl.int64) * o_strides[1] + token.to(tl.int64) * o_strides[2]
    out = (acc * inv_l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at + offs_d.to(tl.int64)[None, :] * o_strides[3], out, mask=exists)
    if block == 0:
        one = tl.arange(0, 1)
        tl.store(lse_ptr + b.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh + token + one, lse)
