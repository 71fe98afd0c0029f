"""What both decoding kernels know: the splits that a sequence's keys fall into, how states are folded, rows written.

The keys that a sequence's rows see fall into at most T.FEW splits of T.SPLIT keys or more; where those would have more
than T.LONG keys, into at most T.LANES of as many or more (`splits_of`). T.CHAIN neighbouring splits are a chain: their
states are folded one after the other. So a row's bits follow from its keys alone: not from the batch, nor the room in
the cache, nor who folds a chain. With T.PAIRED, states of chains are brought to whole references (`whole`), and those
of two neighbours are added up first, again whoever does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flashattn_lite.kernels.device.bounds import clamp_sequence
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, LOG2E, finish, merge, rounded, shift, single


@dataclass(frozen=True)
class DecodeTile:
    """Compile-time shape of both kernels: what a problem fixes, and what tuning chose for it."""

    BLOCK_M: int  # packed query rows
    BLOCK_N: int  # keys
    SPLIT: int  # keys of a split, at least
    FEW: int  # of how many, at most
    LONG: int  # keys of one, at least, where there are more
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
    MASK_ROWS: bool  # there is a mask, and it may differ from row to row
    LANES: int  # splits of a sequence, at most
    CHAIN: int  # neighbouring splits that are folded one after the other, whoever does it
    PAIRED: bool  # neighbouring chains are added up first, whoever does it
    OWNS_PAIR: bool  # and a program of `partial_kernel` owns two
    SEPARATE: bool  # or owns several splits, each with a state of its own; of one token, FLAT, and not UNEQUAL
    ALONE: bool  # or has all that any sequence has, and writes the rows themselves: there is nothing to merge
    FLAT: bool  # a chain is one loop over its keys, not one over splits of one over keys
    PDL: bool  # the merge may be put on the card while the last splits still run (sm_90 and newer)


@triton.jit
def place_of(b, most_q, most_k, packing, F: tl.constexpr):
    """(first query, queries, first key, keys) of sequence b, as it lies in memory: packed, behind other sequences.

    packing: (cu_seqlens_q, cu_seqlens_k, rows of q, rows of k). most_q, most_k: of the longest sequence, as promised.
    """
    start_q, start_k = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    len_q, len_k = most_q, most_k
    if F.varlen:
        cu_q, cu_k = packing[0] + b, packing[1] + b
        start_q, len_q = clamp_sequence(tl.load(cu_q), tl.load(cu_q + 1), packing[2])
        start_k, len_k = clamp_sequence(tl.load(cu_k), tl.load(cu_k + 1), packing[3])
        # There are programs for no more keys than were promised, and none are for who asks nothing.
        len_k = tl.where(len_q > 0, tl.minimum(len_k, most_k), 0)
    return start_q, len_q, start_k, len_k


@triton.jit
def visible_keys(kv_lens_ptr, b, rows, len_q, max_k, diag_lo, diag_hi, F: tl.constexpr):
    """(lo, hi, len_k, diag_lo, diag_hi) of sequence b; none of its first `rows` sees a key outside lo <= key < hi."""
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
        hi = tl.minimum(rows + diag_hi, len_k)
    some = lo < hi
    return tl.where(some, lo, 0), tl.where(some, hi, 0), len_k, diag_lo, diag_hi


@triton.jit
def splits_of(lo, hi, T: tl.constexpr):
    """(first tile, tiles, tiles of a split) of the keys lo <= key < hi. Split i exists if some tile is left for it."""
    first = lo // T.BLOCK_N
    tiles = tl.cdiv(hi, T.BLOCK_N) - first
    each = tl.minimum(tl.cdiv(tiles, T.FEW), T.LONG // T.BLOCK_N)
    return first, tiles, tl.maximum(tl.maximum(each, T.SPLIT // T.BLOCK_N), tl.cdiv(tiles, T.LANES))


@triton.jit
def weigh(acc, alpha):
    """acc * alpha, but an infinity stays one whatever its weight, so that it does not matter when it is weighed."""
    return tl.where(tl.abs(acc) < float("inf"), acc * alpha, acc)


@triton.jit
def no_keys(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The state of no keys: (m [ROWS], l [ROWS], acc [ROWS, COLUMNS])."""
    m_i = tl.full([ROWS], EMPTY_M, tl.float32)
    l_i = tl.full([ROWS], EMPTY_L, tl.float32)
    return m_i, l_i, tl.full([ROWS, COLUMNS], 0.0, tl.float32)


@triton.jit
def whole(m_i, l_i, acc):
    """The same state at a reference that is a whole number.

    Between such states weights are powers of two, and so exact (docs/theory.md): a pair may be added up before its
    weight is known.
    """
    m_w = tl.ceil(m_i)
    _, alpha = shift(m_i, m_w)
    return m_w, l_i * alpha, weigh(acc, alpha[:, None])


@triton.jit
def fold(m_a, l_a, acc_a, m_b, l_b, acc_b):
    """The state of two disjoint sets of keys, the first of which came before."""
    m_i, l_i, alpha_a, alpha_b = merge(m_a, l_a, m_b, l_b)
    return m_i, l_i, weigh(acc_a, alpha_a[:, None]) + weigh(acc_b, alpha_b[:, None])


@triton.jit
def sums_by_halves(x, ROWS: tl.constexpr, LEFT: tl.constexpr, COLUMNS: tl.constexpr):
    """[LEFT, COLUMNS] of [ROWS, COLUMNS], powers of two: sums of every LEFT-th row.

    Two terms at a time, so that no layout orders them.
    """
    if ROWS == LEFT:
        return x
    else:
        return sums_by_halves(tl.sum(tl.reshape(x, [2, ROWS // 2, COLUMNS]), 0), ROWS // 2, LEFT, COLUMNS)


@triton.jit
def finished_rows(acc, inv_l, DTYPE: tl.constexpr):
    """acc * inv_l in its dtype; an infinity stays one."""
    out = acc * inv_l
    return tl.where(tl.abs(out) < float("inf"), rounded(out, DTYPE), out.to(DTYPE))


@triton.jit
def write_rows(dst, m_i, l_i, acc, b, head, token, exists, offs_d, first, F: tl.constexpr, T: tl.constexpr):
    """Columns offs_d [C] of finished rows [R], with the sink, to `head` and `token` [R] of sequence b; lse if `first`.

    dst: (out, lse, sinks, strides of out, of lse).
    """
    out_ptr, lse_ptr, sinks_ptr, o_strides, lse_strides = dst
    if F.sinks:
        sink = tl.load(sinks_ptr + head, mask=exists, other=0.0).to(tl.float32) * LOG2E
        sink, sink_l = single(sink)
        m_i, l_i, alpha, _ = merge(m_i, l_i, sink, sink_l)
        acc = weigh(acc, alpha[:, None])
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    inv_l, lse = finish(m_i, l_i)
    at = b.to(tl.int64) * o_strides[0] + head.to(tl.int64) * o_strides[1] + token.to(tl.int64) * o_strides[2]
    out = finished_rows(acc, inv_l[:, None], DTYPE)
    wanted = exists[:, None] & (offs_d < T.HEAD_DIM_V)[None, :]
    tl.store(out_ptr + at[:, None] + offs_d.to(tl.int64)[None, :] * o_strides[3], out, mask=wanted)
    if first:
        lse_at = b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + token
        tl.store(lse_ptr + lse_at, lse, mask=exists)
