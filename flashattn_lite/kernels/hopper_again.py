"""What a consumer of the Hopper kernel does with a row tile in which rows failed: all its keys again, step by step.

Nothing overlaps here, and nothing is as fast as it could be: it is rare, and its code must not weigh on the usual way.
REDO: rows marked EXACT at the running maximum throughout, rows marked CLEAN by the arithmetic of the first pass, to the
bit, both from a V freed of what is not finite. PLUS, MINUS: that infinity to the rows that see one in V, by a count of
such keys (a NaN is both). Only marked rows are written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn_lite.kernels.device.state import rounded
from flashattn_lite.kernels.hopper_rows import close, empty_state, is_bad, out_pointers, take_rows
from flashattn_lite.kernels.hopper_scores import hide, scaled, take
from flashattn_lite.kernels.hopper_tasks import CLEAN, EXACT, MINUS, PLUS, REDO, ROWS, lse_pointers, q_slot


@gluon.jit
def clean(v, mode, n_clean, cleaned, WG: gl.constexpr, T: gl.constexpr):
    """V [N, Dv] in shared memory without what is not finite; PLUS, MINUS: 1 where it is that infinity, else 0.

    Every consumer does its share and waits for the others. Returns 1 if there was any in that share.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // T.BLOCK_DV, T.BLOCK_DV // 8], [4, 1], [1, 0])
    dirty = 0
    PARTS: gl.constexpr = T.BLOCK_N // 16
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    for part in gl.static_range(WG, PARTS, CONSUMERS):
        rows = v.slice(part * 16, 16, dim=0)
        x = rows.load(WIDE).to(gl.float32)  # [16, Dv]
        finite = gl.abs(x) < float("inf")
        infinity = gl.where(mode == MINUS, float("-inf"), float("inf"))
        hit = gl.where((x != x) | (x == infinity), 1.0, 0.0)
        x = gl.where(mode == REDO, gl.where(finite, x, 0.0), hit)
        rows.store(x.to(v.dtype))
        dirty |= 1 - gl.min(gl.min(finite.to(gl.int32), 1), 0)
    fence_async_shared()
    mbarrier.arrive(cleaned, count=1)
    mbarrier.wait(cleaned, n_clean & 1)
    return dirty, n_clean + 1


@gluon.jit
def update(s, m_i, l_i, i, exact, mode, rows, task, args, F: gl.constexpr, T: gl.constexpr):
    """The i-th tile of scores: (m_i, l_i, alpha, p). PLUS, MINUS: p is 1 for each key that is seen."""
    s, scale = scaled(s, args, F)
    row_scale = gl.full([ROWS], 0.0, gl.float32, m_i.type.layout) + scale
    # Past EXACT_M a product must be rounded before it is subtracted.
    s = gl.where(mode == REDO, gl.where((exact != 0)[:, None], s * scale, s), 0.0)
    row_scale = gl.where(exact != 0, 1.0, row_scale)
    s = hide(s, i, rows, task, args, F, T)
    m_new = gl.maximum(m_i, gl.max(s, 1) * row_scale)
    m_new = gl.where((i >= rows.settled) & (exact == 0), m_i, m_new)
    return take(s, row_scale[:, None], m_i, m_new, l_i, T)


@gluon.jit
def again(task, mode, n_tile, it, n_clean, rings, bars, dst, lse, args, WG: gl.constexpr, F: gl.constexpr,
          T: gl.constexpr):  # fmt: skip
    """One row tile. Returns 1 if V had what is not finite, as far as this consumer looked, and n_clean."""
    q_s, k_s, v_s, _ = rings
    DTYPE: gl.constexpr = q_s.dtype
    S_LAYOUT: gl.constexpr = T.S_LAYOUT
    O_LAYOUT: gl.constexpr = T.O_LAYOUT
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    rows = take_rows(task, S_LAYOUT, WG, F, T)
    lse_ptrs = lse_pointers(lse, task, rows.head, rows.pos, F)
    mark = gl.load(lse_ptrs, mask=rows.exists & (mode == REDO), other=0.0).to(gl.int32, bitcast=True)
    exact = (mark == EXACT).to(gl.int32)
    write = rows.exists & ((mark == EXACT) | (mark == CLEAN) | (mode != REDO))
    m_i, l_i, acc = empty_state(T)
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    dirty = 0
    q_at, q_phase = q_slot(n_tile, WG, T)
    q = q_s.index(q_at).reshape([ROWS, T.BLOCK_D])
    mbarrier.wait(bars.q_full.index(q_at), q_phase)
    for i in range(task.count):
        at = it % T.STAGES
        phase = (it // T.STAGES) & 1
        mbarrier.wait(bars.k_full.index(at), phase)
        k = k_s.index(at).reshape([T.BLOCK_N, T.BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(bars.k_empty.index(at), count=1)
        m_i, l_i, alpha, p = update(s, m_i, l_i, i, exact, mode, rows, task, args, F, T)
        acc = acc * gl.convert_layout(alpha, O_ROW, assert_trivial=True)[:, None]
        mbarrier.wait(bars.v_full.index(at), phase)
        v = v_s.index(at).reshape([T.BLOCK_N, T.BLOCK_DV])
        found, n_clean = clean(v, mode, n_clean, bars.cleaned, WG, T)
        dirty |= found
        acc = warpgroup_mma(gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        if T.APART:
            mbarrier.arrive(bars.v_empty.index(at), count=1)
        it += 1
    mbarrier.arrive(bars.q_empty.index(q_at), count=1)

    l_row = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    lse_row, weight, overflow = close(m_i, l_row, rows, args, F, T)
    # A row with a clean V and its old reference may still show that it needs the maximum: by l_i, or by an acc that a
    # large V made infinite. At the maximum nothing is asked, so that this ends.
    mark = gl.where((exact == 0) & (overflow | is_bad(acc, S_LAYOUT)), EXACT, 0)
    lse_row = gl.where(mark == 0, lse_row, mark.to(gl.float32, bitcast=True))
    gl.store(lse_ptrs, lse_row, mask=write & (mode == REDO))
    weight = gl.convert_layout(gl.where(mode == REDO, weight, 1.0), O_ROW, assert_trivial=True)
    write = gl.convert_layout((write & ((mark == 0) | (mode != REDO))).to(gl.int32), O_ROW, assert_trivial=True)
    ptrs, inside = out_pointers(dst, task, O_LAYOUT, WG, F, T)
    x = acc * weight[:, None]
    wanted = (write != 0)[:, None] & inside & ((mode == REDO) | (x > 0.0))
    infinity = gl.where(mode == PLUS, float("inf"), float("-inf"))
    had = gl.load(ptrs, mask=wanted & (mode != REDO), other=0.0).to(gl.float32)
    gl.store(ptrs, gl.where(mode == REDO, rounded(x, DTYPE), (had + infinity).to(DTYPE)), mask=wanted)
    return dirty, n_clean
