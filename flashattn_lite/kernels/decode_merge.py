"""The merge of the states that `decode.py` leaves: one softmax over the chains of each row.

One program of `merge_kernel`, of one warp, owns some columns of one row. Where each split has a state of its own it
folds those of a chain first, to the bits that a program of `partial_kernel`, or a block of the Hopper kernel, with the
whole chain has. It takes all chains at once, and adds them up two at a time: its bits do not follow from how many
columns it has.
Bytes moved: the states once, the output once. Source: the merge of docs/theory.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_lite.kernels.decode_splits import (
    fold,
    no_keys,
    place_of,
    splits_of,
    sums_by_halves,
    visible_keys,
    weigh,
    whole,
    write_rows,
)
from flashattn_lite.kernels.device.integers import divided
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, shift


@triton.jit
def merged(states, first, r, rows, offs_d, tiles, each, OWN: tl.constexpr, LANES: tl.constexpr, T: tl.constexpr):
    """(m [1], l [1], acc [1, COLUMNS]) of row r: the states `first` and behind, of OWN of up to LANES splits each."""
    PARTS: tl.constexpr = max(1, T.CHAIN // OWN)  # of a chain
    CHAINS: tl.constexpr = LANES // (OWN * PARTS)  # pairs of chains, where a program owned one
    PAIRED: tl.constexpr = T.PAIRED and OWN <= T.CHAIN  # and the pairs are still to be added up
    COLUMNS: tl.constexpr = offs_d.shape[0]
    exists = (offs_d < T.HEAD_DIM_V)[None, :]
    m_c, l_c, acc_c = no_keys(CHAINS, COLUMNS)
    chain = tl.arange(0, CHAINS)
    if PAIRED:  # neighbours half of the chains apart: where the first sum takes them
        chain = chain % (CHAINS // 2) * 2 + chain // (CHAINS // 2)
    for i in tl.static_range(PARTS):
        part = chain * PARTS + i
        written = part * OWN * each < tiles
        at = (first + part) * rows + r
        m_p = tl.load(states[0] + at, mask=written, other=EMPTY_M)
        l_p = tl.load(states[1] + at, mask=written, other=EMPTY_L)
        acc_ptrs = states[2] + at[:, None] * T.HEAD_DIM_V + offs_d[None, :]
        wanted = written[:, None] & exists
        acc_p = tl.load(acc_ptrs, mask=wanted, other=0.0, eviction_policy="evict_first")  # [CHAINS, COLUMNS]
        m_c, l_c, acc_c = fold(m_c, l_c, acc_c, m_p, l_p, acc_p)
    if PAIRED:
        m_c, l_c, acc_c = whole(m_c, l_c, acc_c)
    # The chains are the scores of one more softmax, whose weights are theirs.
    m_i = tl.max(m_c, 0) + tl.zeros([1], tl.float32)
    _, weight = shift(m_c[:, None], m_i[None, :])  # [CHAINS, 1]
    l_i = tl.reshape(sums_by_halves(weight * l_c[:, None], CHAINS, 1, 1), [1])
    return m_i, l_i, sums_by_halves(weigh(acc_c, weight), CHAINS, 1, COLUMNS)


@triton.jit(do_not_specialize=["rows_q", "rows_k", "stride_lb", "stride_lh", "parts", "heads", "most_q", "most_k",
                               "diag_lo", "diag_hi"])  # fmt: skip
def merge_kernel(out_ptr, lse_ptr, sinks_ptr, kv_lens_ptr, cu_q_ptr, cu_k_ptr, rows_q, rows_k, m_ptr, l_ptr, acc_ptr,
                 o_strides, stride_lb, stride_lh, parts, heads, most_q, most_k, diag_lo, diag_hi, OWN: tl.constexpr,
                 LANES: tl.constexpr, LONG_OWN: tl.constexpr, LONG_LANES: tl.constexpr, COLUMNS: tl.constexpr,
                 TELLS: tl.constexpr, F: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """From states of OWN of up to LANES splits each, of which there is room for `parts` in a sequence and head.

    Where a sequence has more than FEW, LONG_OWN and LONG_LANES; LONG_LANES of 0: none has. TELLS: the launch behind,
    for rows that no sequence covers, may come onto the card.
    """
    blocks: tl.constexpr = (T.HEAD_DIM_V + COLUMNS - 1) // COLUMNS
    rows = T.GROUP if T.ONE else T.GROUP * most_q
    at, block = divided(tl.program_id(0), blocks)
    head, r = divided(at, rows)
    b, h = divided(head, heads)
    start_q, len_q, _, max_k = place_of(b, most_q, most_k, (cu_q_ptr, cu_k_ptr, rows_q, rows_k), F)
    lo, hi, _, _, _ = visible_keys(kv_lens_ptr, b, tl.minimum(len_q, most_q), len_q, max_k, diag_lo, diag_hi, F)
    _, tiles, each = splits_of(lo, hi, T)
    offs_d = block * COLUMNS + tl.arange(0, COLUMNS)
    states, first = (m_ptr, l_ptr, acc_ptr), (b.to(tl.int64) * heads + h) * parts
    if TELLS:
        tl.extra.cuda.gdc_launch_dependents()
    if T.PDL:
        tl.extra.cuda.gdc_wait()
    if LONG_LANES == 0:
        m_i, l_i, acc = merged(states, first, r, rows, offs_d, tiles, each, OWN, LANES, T)
    else:
        if tiles > T.FEW * each:
            m_i, l_i, acc = merged(states, first, r, rows, offs_d, tiles, each, LONG_OWN, LONG_LANES, T)
        else:
            m_i, l_i, acc = merged(states, first, r, rows, offs_d, tiles, each, OWN, LANES, T)
    offs_h, offs_m = divided(r + tl.arange(0, 1), 1 if T.ONE else most_q)
    dst = (out_ptr, lse_ptr, sinks_ptr, o_strides, (stride_lb, stride_lh))
    there = offs_h >= 0  # as every row is that has a program
    if F.varlen:  # not so where another sequence is the longest
        there = offs_m < len_q
    write_rows(dst, m_i, l_i, acc, b, h * T.GROUP + offs_h, start_q + offs_m, there, offs_d, block == 0, F, T)
