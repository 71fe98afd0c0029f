"""Split-KV decoding in Triton: states of parts of a cache, and their merge; `decode_launch.py` starts both kernels.

The keys that a sequence's rows see fall into at most T.LANES splits of T.SPLIT keys or more (`splits_of`), and T.CHAIN
neighbouring splits are a chain: their states are folded one after the other.
`partial_kernel`: one program owns `own` neighbouring splits, one or a chain, for the rows of one key/value head (the
query heads that share it times the query tokens, BLOCK_M of them).
Loop invariant: (m_i, l_i, acc) is these rows' state over the split's tiles so far at their running maximum, float32.
`merge_kernel`: one program, of one warp, owns COLUMNS of one row. It folds the chains of which every split has a state
of its own, and takes all chains at once.
So a row's bits follow from its keys alone: not from the batch, nor the room in the cache, nor who folds a chain.

Bytes moved: K and V once, which is the floor; a state of Dv + 2 floats a row and program, written and read.
Keys that no row sees are not read. A key that one row sees and another does not can still put 0 * NaN into the other:
such splits are done again with a V freed of what is not finite, which is then given to the rows that see it.
Source: Dao, Haziza, Massa, Sizov, Flash-Decoding for long-context inference (2023); the merge, docs/theory.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.device.integers import divided
from flashattn_lite.kernels.device.scores import to_log2, visible
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, finish, merge, rounded, update


@dataclass(frozen=True)
class DecodeTile:
    """Compile-time shape of both kernels: what a problem fixes, and what tuning chose for it."""

    BLOCK_M: int  # packed query rows
    BLOCK_N: int  # keys
    SPLIT: int  # keys of a split, at least
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int  # HEAD_DIM as the power of two that the matrix unit takes
    BLOCK_DV: int
    GROUP: int  # query heads of one key/value head
    PAGE: int  # keys of a page; 0: the cache is contiguous
    ALIGN: int  # elements that divide every stride of the cache but the last
    PRECISION: str  # of tl.dot on float32 operands
    ONE: bool  # a single query token
    UNEQUAL: bool  # rows of one sequence may see different keys
    LANES: int  # splits of a sequence, at most
    CHAIN: int  # neighbouring splits that are folded one after the other, whoever does it
    COLUMNS: int  # of the output, a merging program
    PDL: bool  # the merge may be put on the card while the last splits still run (sm_90 and newer)


@triton.jit
def visible_keys(kv_lens_ptr, b, len_q, max_k, diag_lo, diag_hi, F: tl.constexpr):
    """(lo, hi, len_k, diag_lo, diag_hi) of sequence b; no row sees a key outside lo <= key < hi."""
    len_k = max_k
    if F.kv_lens:
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
def splits_of(lo, hi, T: tl.constexpr):
    """(first tile, tiles, tiles of a split) of the keys lo <= key < hi. Split i exists if some tile is left for it."""
    first = lo // T.BLOCK_N
    tiles = tl.cdiv(hi, T.BLOCK_N) - first
    return first, tiles, tl.maximum(tl.cdiv(tiles, T.LANES), T.SPLIT // T.BLOCK_N)


@triton.jit
def key_rows(start, exists, table_ptr, pages, T: tl.constexpr):
    """(page, row in it) of the keys from start on [N], 64-bit; of a contiguous cache (0, row behind row start).

    A table's entry is clamped into the cache.
    """
    offs = tl.arange(0, T.BLOCK_N)
    if T.PAGE:
        page = tl.load(table_ptr + (start + offs) // T.PAGE, mask=exists, other=0)
        return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64), ((start + offs) % T.PAGE).to(tl.int64)
    else:
        return tl.zeros_like(offs).to(tl.int64), offs.to(tl.int64)


@triton.jit
def load_rows(src, start, page, row, exists, DIM: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr):
    """Rows [N, BLOCK] of K or V of one head; src = (pointer, strides). What does not exist is not read, and is 0."""
    offs_d = tl.arange(0, BLOCK)
    # In whole units of ALIGN, so that the compiler knows that rows start where 16-byte loads may.
    step = src[1][2] // T.ALIGN * T.ALIGN
    ptr = src[0]
    offs = row * step
    if T.PAGE:
        offs += page * (src[1][0] // T.ALIGN * T.ALIGN)
    else:  # only one number changes from tile to tile
        ptr += tl.cast(start, tl.int64) * step
    ptrs = ptr + (offs[:, None] + offs_d.to(tl.int64)[None, :] * src[1][3])
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
    """The state of two disjoint sets of keys, the first of which came before."""
    m_i, l_i, alpha_a, alpha_b = merge(m_a, l_a, m_b, l_b)
    return m_i, l_i, weigh(acc_a, alpha_a[:, None]) + weigh(acc_b, alpha_b[:, None])


@triton.jit
def attend(q, k_src, v_src, table_ptr, pages, first, last, lo, hi, offs_m, len_k, diag_lo, diag_hi, scale_log2, softcap,
           FINITE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The state of these rows over the tiles first <= i < last. FINITE: from a V without its infinities and NaN."""
    m_i = tl.full([T.BLOCK_M], EMPTY_M, tl.float32)
    # Of 16 rows the warps share the keys: l_i stays spread over these, so that no tile makes the warps meet for a sum.
    KEYS: tl.constexpr = T.BLOCK_N if T.BLOCK_M == 16 else 1
    l_i = tl.full([T.BLOCK_M, KEYS], EMPTY_L, tl.float32)
    acc = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    for i in tl.range(first, last):
        start = i * T.BLOCK_N
        offs_n = start + tl.arange(0, T.BLOCK_N)
        exists = (offs_n >= lo) & (offs_n < hi)
        page, row = key_rows(start, exists, table_ptr, pages, T)
        k = load_rows(k_src, start, page, row, exists, T.HEAD_DIM, T.BLOCK_D, T)
        s = to_log2(tl.dot(q, tl.trans(k), input_precision=T.PRECISION), scale_log2, softcap, F)  # [M, N]
        if T.UNEQUAL:  # else what exists is what every row sees, and a row of flags serves all
            s = tl.where(visible(offs_m, offs_n, len_k, diag_lo, diag_hi, F), s, float("-inf"))
        else:
            s = tl.where(exists[None, :], s, float("-inf"))
        m_i, _, alpha, p = update(m_i, m_i, s, 1.0)  # whose own sum would be over all keys: not asked for
        if KEYS == 1:
            l_i = l_i * alpha[:, None] + tl.sum(p, 1)[:, None]
        else:
            l_i = l_i * alpha[:, None] + p
        v = load_rows(v_src, start, page, row, exists, T.HEAD_DIM_V, T.BLOCK_DV, T)
        if FINITE:
            v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=T.PRECISION)
    return m_i, tl.sum(l_i, 1), acc


@triton.jit
def attend_splits(q, k_src, v_src, table_ptr, pages, split, end, first, tiles, each, lo, hi, offs_m, len_k, diag_lo,
                  diag_hi, scale_log2, softcap, FINITE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The state of these rows over the splits split <= i < end, folded in that order; those past the last are empty."""
    m_i = tl.full([T.BLOCK_M], EMPTY_M, tl.float32)
    l_i = tl.full([T.BLOCK_M], EMPTY_L, tl.float32)
    acc = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)
    for i in tl.range(split, end):
        last = first + tl.minimum((i + 1) * each, tiles)
        m_s, l_s, acc_s = attend(q, k_src, v_src, table_ptr, pages, first + i * each, last, lo, hi, offs_m, len_k,
                                 diag_lo, diag_hi, scale_log2, softcap, FINITE, F, T)  # fmt: skip
        m_i, l_i, acc = fold(m_i, l_i, acc, m_s, l_s, acc_s)
    return m_i, l_i, acc


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
            page, row = key_rows(i * T.BLOCK_N, exists, table_ptr, pages, T)
            v = load_rows(v_src, i * T.BLOCK_N, page, row, exists, T.HEAD_DIM_V, T.BLOCK_DV, T)
            hit = ((v != v) | (v.to(tl.float32) == infinity)).to(v.dtype)  # [N, Dv]
            seen = visible(offs_m, offs_n, len_k, diag_lo, diag_hi, F).to(v.dtype)  # [M, N]
            hits = tl.dot(seen, hit, hits, input_precision=T.PRECISION)
        acc += tl.where(hits > 0, infinity, 0.0)
    return acc


@triton.jit
def store_state(states, m_i, l_i, acc, first_row, offs_r, rows, T: tl.constexpr):
    """A program's state of the rows offs_r [M]; row 0 lies at row first_row of states (m, l [..], acc [.., Dv])."""
    offs_d = tl.arange(0, T.BLOCK_DV)
    at = first_row + offs_r
    tl.store(states[0] + at, m_i, mask=offs_r < rows)
    tl.store(states[1] + at, l_i, mask=offs_r < rows)
    ptrs = states[2] + at[:, None] * T.HEAD_DIM_V + offs_d[None, :]
    # To be kept in L2 until the merge has read it, while K and V run through; wider tiles have no register left for it.
    KEPT: tl.constexpr = "evict_last" if T.BLOCK_DV <= 128 else ""
    wanted = (offs_r < rows)[:, None] & (offs_d < T.HEAD_DIM_V)[None, :]
    tl.store(ptrs, acc, mask=wanted, eviction_policy=KEPT)


@triton.jit(do_not_specialize=["stride_tb", "pages", "num_m", "parts", "own", "heads", "len_q", "max_k", "diag_lo",
                               "diag_hi"])  # fmt: skip
def partial_kernel(q_ptr, k_ptr, v_ptr, table_ptr, kv_lens_ptr, m_ptr, l_ptr, acc_ptr, q_strides, k_strides, v_strides,
                   stride_tb, pages, num_m, parts, own, heads, len_q, max_k, diag_lo, diag_hi, scale_log2, softcap,
                   F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    states = (m_ptr, l_ptr, acc_ptr)
    if T.PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring programs read the same keys, then the keys behind them.
    head, at = divided(tl.program_id(0), parts * num_m)
    b, h = divided(head, heads)
    part, block_m = divided(at, num_m)

    # Q needs no length: it is on its way while that is read. Without a division where there is one token.
    offs_r = block_m * T.BLOCK_M + tl.arange(0, T.BLOCK_M)
    rows, offs_m, offs_h = T.GROUP, tl.zeros_like(offs_r), offs_r
    if not T.ONE:
        rows, offs_m, offs_h = T.GROUP * len_q, offs_r % len_q, offs_r // len_q  # query token and head of packed rows
    offs_d = tl.arange(0, T.BLOCK_D)
    q_ptrs = q_ptr + b.to(tl.int64) * q_strides[0] + (h.to(tl.int64) * T.GROUP + offs_h[:, None]) * q_strides[1]
    q_ptrs += offs_m.to(tl.int64)[:, None] * q_strides[2] + offs_d.to(tl.int64)[None, :] * q_strides[3]
    q = tl.load(q_ptrs, mask=(offs_r < rows)[:, None] & (offs_d < T.HEAD_DIM)[None, :], other=0.0)  # [M, D]

    lo, hi, len_k, diag_lo, diag_hi = visible_keys(kv_lens_ptr, b, len_q, max_k, diag_lo, diag_hi, F)
    first, tiles, each = splits_of(lo, hi, T)
    split, end = part * own, (part + 1) * own
    if split * each >= tiles:
        return

    k_ptr += h.to(tl.int64) * (k_strides[1] // T.ALIGN * T.ALIGN)
    v_ptr += h.to(tl.int64) * (v_strides[1] // T.ALIGN * T.ALIGN)
    if T.PAGE:
        table_ptr += b.to(tl.int64) * stride_tb
    else:
        k_ptr += b.to(tl.int64) * (k_strides[0] // T.ALIGN * T.ALIGN)
        v_ptr += b.to(tl.int64) * (v_strides[0] // T.ALIGN * T.ALIGN)
    k_src, v_src = ((k_ptr, k_strides), (v_ptr, v_strides))
    m_i, l_i, acc = attend_splits(q, k_src, v_src, table_ptr, pages, split, end, first, tiles, each, lo, hi, offs_m,
                                  len_k, diag_lo, diag_hi, scale_log2, softcap, False, F, T)  # fmt: skip
    first_row = ((b.to(tl.int64) * heads + h) * parts + part) * rows
    store_state(states, m_i, l_i, acc, first_row, offs_r, rows, T)
    if T.UNEQUAL:
        failed = tl.max((acc * 0.0 != 0.0).to(tl.int32), 1)
        if tl.max(failed, 0) > 0:
            m_i, l_i, acc = attend_splits(q, k_src, v_src, table_ptr, pages, split, end, first, tiles, each, lo, hi,
                                          offs_m, len_k, diag_lo, diag_hi, scale_log2, softcap, True, F, T)  # fmt: skip
            last = first + tl.minimum(end * each, tiles)
            acc = add_infinities(acc, v_src, table_ptr, pages, first + split * each, last, lo, hi, offs_m, len_k,
                                 diag_lo, diag_hi, F, T)  # fmt: skip
            tl.debug_barrier()  # the first store comes first
            store_state(states, m_i, l_i, acc, first_row, offs_r, rows, T)


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "parts", "own", "heads", "len_q", "max_k", "diag_lo",
                               "diag_hi"])  # fmt: skip
def merge_kernel(out_ptr, lse_ptr, sinks_ptr, kv_lens_ptr, m_ptr, l_ptr, acc_ptr, o_strides, stride_lb, stride_lh,
                 parts, own, heads, len_q, max_k, diag_lo, diag_hi, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    blocks: tl.constexpr = (T.HEAD_DIM_V + T.COLUMNS - 1) // T.COLUMNS
    CHAIN: tl.constexpr = T.CHAIN
    CHAINS: tl.constexpr = T.LANES // T.CHAIN
    rows = T.GROUP if T.ONE else T.GROUP * len_q
    at, block = divided(tl.program_id(0), blocks)
    head, r = divided(at, rows)
    b, h = divided(head, heads)
    lo, hi, _, _, _ = visible_keys(kv_lens_ptr, b, len_q, max_k, diag_lo, diag_hi, F)
    _, tiles, each = splits_of(lo, hi, T)
    offs_d = block * T.COLUMNS + tl.arange(0, T.COLUMNS)
    exists = (offs_d < T.HEAD_DIM_V)[None, :]
    if T.PDL:
        tl.extra.cuda.gdc_wait()
    per_chain = CHAIN // own  # states
    m_c = tl.full([CHAINS], EMPTY_M, tl.float32)
    l_c = tl.full([CHAINS], EMPTY_L, tl.float32)
    acc_c = tl.full([CHAINS, T.COLUMNS], 0.0, tl.float32)
    for i in tl.static_range(CHAIN):
        part = tl.arange(0, CHAINS) * per_chain + i
        written = part * own * each < tl.where(i < per_chain, tiles, 0)
        at = ((b.to(tl.int64) * heads + h) * parts + part) * rows + r
        m_p = tl.load(m_ptr + at, mask=written, other=EMPTY_M)
        l_p = tl.load(l_ptr + at, mask=written, other=EMPTY_L)
        acc_ptrs = acc_ptr + at[:, None] * T.HEAD_DIM_V + offs_d[None, :]
        wanted = written[:, None] & exists
        acc_p = tl.load(acc_ptrs, mask=wanted, other=0.0, eviction_policy="evict_first")  # [CHAINS, COLUMNS]
        m_c, l_c, acc_c = fold(m_c, l_c, acc_c, m_p, l_p, acc_p)
    # The chains are the scores of one more softmax, whose weights are theirs.
    empty = tl.full([1], EMPTY_M, tl.float32)
    m_i, _l, _alpha, weights = update(empty, empty, m_c[None, :], 1.0)  # [1], [1, CHAINS]
    l_i = tl.sum(weights * l_c[None, :], 1)
    acc = tl.sum(weigh(acc_c, tl.trans(weights)), 0)[None, :]
    offs_h, token = divided(r, 1 if T.ONE else len_q)
    head = h * T.GROUP + offs_h
    if F.sinks:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E + tl.zeros_like(m_i)
        m_i, l_i, alpha, _ = merge(m_i, l_i, sink, tl.where(sink == EMPTY_M, EMPTY_L, 1.0))
        acc = weigh(acc, alpha[:, None])
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    inv_l, lse = finish(m_i, l_i)
    at = b.to(tl.int64) * o_strides[0] + head.to(tl.int64) * o_strides[1] + token.to(tl.int64) * o_strides[2]
    out = acc * inv_l[:, None]
    out = tl.where(tl.abs(out) < float("inf"), rounded(out, DTYPE), out.to(DTYPE))
    tl.store(out_ptr + at + offs_d.to(tl.int64)[None, :] * o_strides[3], out, mask=exists)
    if block == 0:
        one = tl.arange(0, 1)
        tl.store(lse_ptr + b.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh + token + one, lse)
