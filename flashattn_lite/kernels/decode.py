"""Split-KV decoding in Triton: states of parts of a cache. `decode_merge.py` merges, `decode_launch.py` starts them.

One program of `partial_kernel` owns `own` neighbouring splits, one, a chain or two chains (see `decode_splits.py`), or
several that leave a state each, for the rows of one key/value head (the query heads that share it times the query
tokens, BLOCK_M of them). If that is all that there can be, ALONE, it leaves finished rows, and there is no merge.
Loop invariant: (m_i, l_i, acc) is these rows' state over the split's tiles so far at their running maximum, float32;
(m_c, l_c, acc_c) that of the chain's splits before it, (m_p, l_p, acc_p) that of the chain before it.

Bytes moved: K and V once, which is the floor; a state of Dv + 2 floats a row and program, written and read.
Keys that no row sees are not read. A key that one row sees and another does not can still put 0 * NaN into the other:
such splits are done again with a V freed of what is not finite, which is then given to the rows that see it.
Source: Dao, Haziza, Massa, Sizov, Flash-Decoding for long-context inference (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_lite.kernels.decode_splits import (
    fold,
    no_keys,
    place_of,
    splits_of,
    visible_keys,
    whole,
    write_rows,
)
from flashattn_lite.kernels.decode_tiles import (
    keys_there,
    load_queries,
    load_rows,
    mask_of_rows,
    pages_of,
    query_rows,
    rows_of_head,
    seen_by,
)
from flashattn_lite.kernels.device.integers import divided
from flashattn_lite.kernels.device.scores import add_mask, finite, to_log2
from flashattn_lite.kernels.device.state import EMPTY_L, update


@triton.jit
def empty_split(KEYS: tl.constexpr, T: tl.constexpr):
    """`no_keys` with an l_i [M, KEYS] of parts that are still to be added up."""
    m_i, _, acc = no_keys(T.BLOCK_M, T.BLOCK_DV)
    return m_i, tl.full([T.BLOCK_M, KEYS], EMPTY_L, tl.float32), acc


@triton.jit
def store_state(states, first_row, offs_r, rows, m_i, l_i, acc, T: tl.constexpr):
    """A program's state of the rows offs_r [M]; row 0 lies at row first_row of states (m, l [..], acc [.., Dv])."""
    offs_d = tl.arange(0, T.BLOCK_DV)
    at = first_row + offs_r
    tl.store(states[0] + at, m_i, mask=offs_r < rows)
    tl.store(states[1] + at, l_i, mask=offs_r < rows)
    ptrs = states[2] + at[:, None] * T.HEAD_DIM_V + offs_d[None, :]
    wanted = (offs_r < rows)[:, None] & (offs_d < T.HEAD_DIM_V)[None, :]
    # To be kept in L2 until the merge has read it, while K and V run through. Where one is of two chains it was slower
    # (64 x 8k 487 us for 481), and wider tiles have no register left for it.
    KEPT: tl.constexpr = "evict_last" if T.BLOCK_DV <= 128 and not T.OWNS_PAIR else ""
    tl.store(ptrs, acc, mask=wanted, eviction_policy=KEPT)


@triton.jit
def attend(chain, q, k_src, v_src, table_ptr, pages, mask, first, last, each, lo, hi, offs_m, len_k, diag_lo, diag_hi,
           scale_log2, softcap, dst, FINITE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """`chain`, a state, with the tiles first <= i < last folded into it: splits of `each` tiles, one if not FLAT.

    OWNS_PAIR: of the two chains that these splits are, added up. FINITE: from a V without its infinities and NaN.
    SEPARATE: each split's state is stored instead, at `dst`, the first arguments of `store_state`, and behind it.
    """
    m_c, l_c, acc_c = chain
    m_p, l_p, acc_p = no_keys(T.BLOCK_M, T.BLOCK_DV)  # of the first chain of a pair, once it is done
    # Of 16 rows the warps share the keys: l_i stays spread over these, so that no tile makes the warps meet for a sum.
    KEYS: tl.constexpr = T.BLOCK_N if T.BLOCK_M == 16 else 1
    m_i, l_i, acc = empty_split(KEYS, T)
    row_of_split = dst[1]
    left = each  # tiles of the split at hand
    splits = T.CHAIN  # of the first chain that are left
    # Pages are looked up a tile ahead, as numbers: an address that waits for a table in the same tile has the keys
    # wait for it, too, in stages of the pipeline that they could have.
    next_pages = pages_of(first * T.BLOCK_N, hi, table_ptr, pages, T)
    for i in tl.range(first, last):
        start = i * T.BLOCK_N
        offs_n = start + tl.arange(0, T.BLOCK_N)
        exists, bias = keys_there(offs_n, lo, hi, mask, F, T)
        tile_pages = next_pages
        next_pages = pages_of(start + T.BLOCK_N, hi, table_ptr, pages, T)
        k = load_rows(k_src, start, tile_pages, exists, T.HEAD_DIM, T.BLOCK_D, T)
        s = to_log2(tl.dot(q, tl.trans(k), input_precision=T.PRECISION), scale_log2, softcap, F)  # [M, N]
        if F.mask == "float":
            s, scale = add_mask(s, 1.0, bias if T.MASK_ROWS else bias[None, :], True)
            s = s * scale
        seen = seen_by(offs_m, offs_n, exists, bias, len_k, diag_lo, diag_hi, F, T)
        s = tl.where(seen, s, float("-inf"))
        m_i, _, alpha, p = update(m_i, m_i, s, 1.0)  # whose own sum would be over all keys: not asked for
        if KEYS == 1:
            l_i = l_i * alpha[:, None] + tl.sum(p, 1)[:, None]
        else:
            l_i = l_i * alpha[:, None] + p
        v = load_rows(v_src, start, tile_pages, exists, T.HEAD_DIM_V, T.BLOCK_DV, T)
        if FINITE:
            v = finite(v)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=T.PRECISION)
        if T.FLAT:
            left -= 1
            if left == 0:
                if T.SEPARATE:
                    store_state(dst[0], row_of_split, dst[2], dst[3], m_i, tl.sum(l_i, 1), acc, T)
                    row_of_split += dst[3]
                else:
                    m_c, l_c, acc_c = fold(m_c, l_c, acc_c, m_i, tl.sum(l_i, 1), acc)
                m_i, l_i, acc = empty_split(KEYS, T)
                left = each
                splits -= 1
                if T.OWNS_PAIR and splits == 0:
                    m_p, l_p, acc_p = whole(m_c, l_c, acc_c)
                    m_c, l_c, acc_c = no_keys(T.BLOCK_M, T.BLOCK_DV)
    if T.SEPARATE:
        if left < each:  # the last split is shorter
            store_state(dst[0], row_of_split, dst[2], dst[3], m_i, tl.sum(l_i, 1), acc, T)
        return m_c, l_c, acc_c
    m_c, l_c, acc_c = fold(m_c, l_c, acc_c, m_i, tl.sum(l_i, 1), acc)
    if T.OWNS_PAIR:
        m_c, l_c, acc_c = whole(m_c, l_c, acc_c)
        return fold(m_p, l_p, acc_p, m_c, l_c, acc_c)
    else:
        return m_c, l_c, acc_c


@triton.jit
def attend_splits(q, k_src, v_src, table_ptr, pages, mask, first, last, each, lo, hi, offs_m, len_k, diag_lo, diag_hi,
                  scale_log2, softcap, dst, FINITE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The state of these rows over the tiles first <= i < last: splits of `each` tiles, folded in order.

    In one loop if FLAT: at the end of a loop of its own, each split would wait for its first keys again.
    """
    m_c, l_c, acc_c = no_keys(T.BLOCK_M, T.BLOCK_DV)
    if T.FLAT:
        return attend((m_c, l_c, acc_c), q, k_src, v_src, table_ptr, pages, mask, first, last, each, lo, hi, offs_m,
                      len_k, diag_lo, diag_hi, scale_log2, softcap, dst, FINITE, F, T)  # fmt: skip
    else:
        for start in tl.range(first, last, each):
            end = tl.minimum(start + each, last)
            m_c, l_c, acc_c = attend((m_c, l_c, acc_c), q, k_src, v_src, table_ptr, pages, mask, start, end, each, lo,
                                     hi, offs_m, len_k, diag_lo, diag_hi, scale_log2, softcap, dst, FINITE, F,
                                     T)  # fmt: skip
        return m_c, l_c, acc_c


@triton.jit
def add_infinities(acc, v_src, table_ptr, pages, mask, first, last, lo, hi, offs_m, len_k, diag_lo, diag_hi,
                   F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """acc plus the infinities of V (a NaN counts as both) that each row sees in the tiles first <= i < last."""
    for negative in tl.range(0, 2):
        infinity = tl.where(negative == 0, float("inf"), float("-inf"))
        hits = tl.full([T.BLOCK_M, T.BLOCK_DV], 0.0, tl.float32)  # how many such keys the row sees
        for i in tl.range(first, last, num_stages=1):
            offs_n = i * T.BLOCK_N + tl.arange(0, T.BLOCK_N)
            exists, bias = keys_there(offs_n, lo, hi, mask, F, T)
            tile_pages = pages_of(i * T.BLOCK_N, hi, table_ptr, pages, T)
            v = load_rows(v_src, i * T.BLOCK_N, tile_pages, exists, T.HEAD_DIM_V, T.BLOCK_DV, T)
            hit = ((v != v) | (v.to(tl.float32) == infinity)).to(v.dtype)  # [N, Dv]
            seen = seen_by(offs_m, offs_n, exists, bias, len_k, diag_lo, diag_hi, F, T)  # [M, N]
            hits = tl.dot(seen.to(v.dtype), hit, hits, input_precision=T.PRECISION)
        acc += tl.where(hits > 0, infinity, 0.0)
    return acc


@triton.jit
def attend_again(q, k_src, v_src, table_ptr, pages, mask, first, last, each, lo, hi, offs_m, len_k, diag_lo, diag_hi,
                 scale_log2, softcap, dst, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """`attend_splits` with what is not finite in V given to those rows alone that see it."""
    m_i, l_i, acc = attend_splits(q, k_src, v_src, table_ptr, pages, mask, first, last, each, lo, hi, offs_m, len_k,
                                  diag_lo, diag_hi, scale_log2, softcap, dst, True, F, T)  # fmt: skip
    return m_i, l_i, add_infinities(acc, v_src, table_ptr, pages, mask, first, last, lo, hi, offs_m, len_k, diag_lo,
                                    diag_hi, F, T)  # fmt: skip


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "stride_tb", "pages", "num_m", "programs", "num_states",
                               "few_own", "long_own", "heads", "most_q", "most_k", "diag_lo", "diag_hi", "rows_q",
                               "rows_k"])  # fmt: skip
def partial_kernel(q_ptr, k_ptr, v_ptr, table_ptr, kv_lens_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, rows_q, rows_k,
                   m_ptr, l_ptr, acc_ptr, out_ptr, lse_ptr, sinks_ptr, q_strides, k_strides, v_strides, mask_strides,
                   o_strides, stride_lb, stride_lh, stride_tb, pages, num_m, programs, num_states, few_own, long_own,
                   heads, most_q, most_k, diag_lo, diag_hi, scale_log2, softcap, TELLS: tl.constexpr,
                   F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """programs, num_states: of a sequence and head, at most. few_own, long_own: splits of one program, where a sequence
    has up to FEW, and where it has more. m, l and acc, or, ALONE, out, lse and sinks: what is written. most_q, most_k:
    rows and keys of a sequence, of packed ones the longest; cu_q, cu_k, rows_q and rows_k are for these alone. TELLS:
    the launch behind, the merge or that for rows that no sequence covers, may come onto the card.
    """
    tl.static_assert(not T.SEPARATE or (T.ONE and T.FLAT and not T.UNEQUAL))
    states = (m_ptr, l_ptr, acc_ptr)
    if TELLS:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring programs read the same keys, then the keys behind them.
    head, at = divided(tl.program_id(0), programs * num_m)
    b, h = divided(head, heads)
    part, block_m = divided(at, num_m)

    # Q needs no kv_lens: it is on its way while that is read.
    start_q, len_q, start_k, max_k = place_of(b, most_q, most_k, (cu_q_ptr, cu_k_ptr, rows_q, rows_k), F)
    rows = T.GROUP if T.ONE else T.GROUP * most_q
    offs_r, offs_m, offs_h = query_rows(block_m, most_q, T)
    there = offs_r < rows
    if F.varlen:
        there = there & (offs_m < len_q)
    token = start_q + offs_m
    q = load_queries(q_ptr, q_strides, b, h, offs_h, token, there, T)

    most_rows = tl.minimum(len_q, most_q)
    lo, hi, len_k, diag_lo, diag_hi = visible_keys(kv_lens_ptr, b, most_rows, len_q, max_k, diag_lo, diag_hi, F)
    first, tiles, each = splits_of(lo, hi, T)
    own = tl.where(tiles > T.FEW * each, long_own, few_own)
    split, end = part * own, (part + 1) * own
    if not T.ALONE:  # noqa: SIM102 (known when this is compiled); else who has no keys still writes rows
        if split * each >= tiles:
            return

    if T.PAGE:
        table_ptr += b.to(tl.int64) * stride_tb
    k_src = rows_of_head(k_ptr, k_strides, b, h, start_k, F, T)
    v_src = rows_of_head(v_ptr, v_strides, b, h, start_k, F, T)
    mask = (mask_ptr, 0, 0)
    if F.mask != "":
        mask = mask_of_rows(mask_ptr, mask_strides, b, h, offs_h, offs_m, there, T)
    start, last = first + split * each, first + tl.minimum(end * each, tiles)
    first_row = ((b.to(tl.int64) * heads + h) * num_states + (split if T.SEPARATE else part)) * rows
    dst = (states, first_row, offs_r, rows)
    m_i, l_i, acc = attend_splits(q, k_src, v_src, table_ptr, pages, mask, start, last, each, lo, hi, offs_m, len_k,
                                  diag_lo, diag_hi, scale_log2, softcap, dst, False, F, T)  # fmt: skip
    if not (T.SEPARATE or T.ALONE):
        store_state(*dst, m_i, l_i, acc, T)
    if T.UNEQUAL:
        failed = tl.max((acc * 0.0 != 0.0).to(tl.int32), 1)
        if tl.max(failed, 0) > 0:
            m_i, l_i, acc = attend_again(q, k_src, v_src, table_ptr, pages, mask, start, last, each, lo, hi, offs_m,
                                         len_k, diag_lo, diag_hi, scale_log2, softcap, dst, F, T)  # fmt: skip
            if not T.ALONE:
                tl.debug_barrier()  # the first store comes first
                store_state(*dst, m_i, l_i, acc, T)
    if T.ALONE:
        if T.PAIRED and not T.OWNS_PAIR:
            m_i, l_i, acc = whole(m_i, l_i, acc)
        offs_d = tl.arange(0, T.BLOCK_DV)
        dst = (out_ptr, lse_ptr, sinks_ptr, o_strides, (stride_lb, stride_lh))
        write_rows(dst, m_i, l_i, acc, b, h * T.GROUP + offs_h, token, there, offs_d, True, F, T)
