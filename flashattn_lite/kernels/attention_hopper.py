"""The attention forward for Hopper (sm_90a), in Gluon: the kernel; `attention_hopper_launch.py` starts it.

As many blocks as fit live on each multiprocessor (one, or three of one consumer) and work off row tiles. A tile is
BLOCK_M rows: query positions of one head, or of the PACK heads that share a K/V head, head by head within a position.
Warps have roles:
  producer (1 warp)               hopper_producer.py: draws tiles, tells the consumers, copies Q, K and V by TMA
  consumer (4 warps) x 1, 2 or 3  64 rows each: S = Q K^T and O += P V by wgmma, P and O in registers
A consumer starts S of the next key tile before it adds P V of this one, and its softmax runs under the latter.

State of each row, as in attention.py: (m_i, l_i, acc), m_i in log2 units. `visited_tiles` gives the tiles with masked
edges and one whole tile first: those move m_i (running maximum); the whole tiles after them keep it, with no maximum
and no rescale. At the end a row whose l_i passed LIMIT (p may have overflowed its dtype), whose reference float32 can't
hold, or whose acc is not finite leaves a mark in its lse. After a sweep of up to LISTED tiles the producer has the
marked ones done again, REDO: EXACT rows at the running maximum throughout, CLEAN ones (a V that is not finite, seen or
not: 0 * NaN is NaN) as before to the bit; both from a V freed of what is not finite. PLUS and MINUS then give those
infinities to the rows that see them (a NaN counts as both). Only marked rows are written again.

Barriers (mbarrier; each side counts its own phase)
  slot_full[2]   producer -> consumers: a message is there          slot_empty[2]  each consumer: it was read
  q_full[w]      TMA -> consumer w: its rows of Q                    q_empty[w]     consumer w: they may be overwritten
  k_full, v_full[STAGES]  TMA -> consumers: a tile of K, of V
  kv_empty[STAGES]  each consumer -> producer: done with K of a step and V of the step before
  settled        consumers -> producer: everything sent so far is finished and its verdict written
  cleaned        consumers -> consumers: V is free of what is not finite (never in a first pass)
Shared memory (bytes, 16-bit dtypes): Q and O BLOCK_M * D * 2 each (one buffer for both with O_OVER_Q), K and V
STAGES * BLOCK_N * D * 2 each, the list 4 * LISTED; 195 KiB at head dim 128, of 227.
Bytes moved: Q and O once, K and V once per row tile, mostly from L2 (heads come in sections that fit there).
Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), for the roles and the overlap; docs/theory.md for m_i.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, EXACT_M, LOG2E, finish, merge
from flashattn_lite.kernels.hopper_producer import producer
from flashattn_lite.kernels.hopper_scores import Rows, careful, fast, settled_first
from flashattn_lite.kernels.hopper_tasks import (
    CLEAN,
    END,
    EXACT,
    FAST,
    LISTED,
    MINUS,
    PLUS,
    REDO,
    REPORT,
    ROWS,
    Sizes,
    entry_of,
    heads_of,
    key_start,
    lse_pointers,
    receive,
    rows_of,
)

# What changed its name between Triton 3.6 and 3.9.
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


# ------------------------------------------------------------------------------------------------------------- consumer
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
def attend(state, p, q, rings, bars, it, first, last, mode, rows, task, args, CAREFUL: gl.constexpr,
           WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """Takes tiles first <= i < last into the state; p is that of tile first - 1, whose V has not been added yet."""
    acc, m_i, l_i, dirty, n_clean = state
    _, k_s, v_s, _ = rings
    _, _, k_full, v_full, kv_empty, cleaned = bars
    DTYPE: gl.constexpr = k_s.dtype
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    S_LAYOUT: gl.constexpr = p.type.layout
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    for i in range(first, last):
        at = it % T.STAGES
        k_at = (it + 1) % T.STAGES
        phase = (it // T.STAGES) & 1
        v = v_s.index(at).reshape([T.BLOCK_N, T.BLOCK_DV])
        if CAREFUL:  # noqa: SIM102, the one at compile time
            if mode != FAST:
                mbarrier.wait(v_full.index(at), phase)
                found, n_clean = clean(v, mode, n_clean, cleaned, WG, T)
                dirty |= found
        mbarrier.wait(k_full.index(k_at), ((it + 1) // T.STAGES) & 1)
        k = k_s.index(k_at).reshape([T.BLOCK_N, T.BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
        w = gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True)
        mbarrier.wait(v_full.index(at), phase)
        acc = warpgroup_mma(w, v, acc, is_async=True)  # [M, Dv]
        s = warpgroup_mma_wait(1, [s])  # the scores are there; P V goes on under the softmax
        if CAREFUL:
            m_i, l_i, alpha, p = careful(s, m_i, l_i, i, mode, rows, task, args, F, T)
        else:
            l_i, p = fast(s, m_i, l_i, args, F, T)
            l_i = settled_first(l_i)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(kv_empty.index(k_at), count=1)
        if CAREFUL:
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
        it += 1
    return (acc, m_i, l_i, dirty, n_clean), p, it


@gluon.jit
def pass_over(count, bars, it, T: gl.constexpr):
    """Gives back tiles that no row of this consumer sees; the other consumers use them."""
    k_full, kv_empty = bars[2], bars[4]
    for _ in range(count):
        mbarrier.wait(k_full.index(it % T.STAGES), (it // T.STAGES) & 1)
        mbarrier.arrive(kv_empty.index(it % T.STAGES), count=1)
        it += 1
    return it


@gluon.jit
def take_rows(task, mode, lse, S_LAYOUT: gl.constexpr, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """(rows, their lse pointers, which to write, leading tiles past the last key that any of them sees)."""
    POSITIONS: gl.constexpr = ROWS // T.PACK
    pos, head, exists = rows_of(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT)), task, WG, T)
    lse_ptrs = lse_pointers(lse, task, head, pos, F)
    exact = pos * 0
    write = exists
    if mode == REDO:
        mark = gl.load(lse_ptrs, mask=exists, other=0.0).to(gl.int32, bitcast=True)
        exact = (mark == EXACT).to(gl.int32)
        write = exists & ((mark == EXACT) | (mark == CLEAN))
    first = task.first + WG * POSITIONS
    skip = task.first * 0
    if F.right:
        seen_to = gl.minimum(gl.maximum(gl.minimum(first + POSITIONS, task.len_q) + task.diag_hi, 0), task.len_k)
        skip = gl.maximum(key_start(0, task, T) - seen_to + T.BLOCK_N, 0) // T.BLOCK_N
        skip = gl.where(mode == FAST, gl.minimum(skip, task.count - 1), 0)
    return Rows(pos, head, exists, exact, first, first + POSITIONS - 1), lse_ptrs, write, skip


@gluon.jit
def first_scores(q, rings, bars, it, S_LAYOUT: gl.constexpr, T: gl.constexpr):
    """S of a row tile's first key tile, which has nothing to overlap with."""
    at = it % T.STAGES
    mbarrier.wait(bars[2].index(at), (it // T.STAGES) & 1)
    k = rings[1].index(at).reshape([T.BLOCK_N, T.BLOCK_D])
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)  # [M, N]
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(bars[4].index(at), count=1)  # with the last V of the tile before
    return s


@gluon.jit
def close(m_i, l_row, rows, mode, args, F: gl.constexpr, T: gl.constexpr):
    """(lse, factor of acc, overflow) of finished rows, with the sink: what can be known while the last P V runs."""
    overflow = ((l_row < T.LIMIT) == 0) | ((gl.abs(m_i) > EXACT_M) & (m_i != EMPTY_M))
    weight = l_row * 0.0 + 1.0
    if F.sinks:
        sink = gl.load(args.sinks_ptr + rows.head, mask=rows.exists, other=0.0).to(gl.float32) * LOG2E
        m_i, l_row, weight, _ = merge(m_i, l_row, sink, gl.where(sink == EMPTY_M, EMPTY_L, 1.0))
    inv_l, lse = finish(m_i, l_row)
    return lse, gl.where(mode >= PLUS, 1.0, weight * inv_l), overflow  # counts need only be positive


@gluon.jit
def consumer(rings, bars, talk, dst, lse, args, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    q_s, _, v_s, o_s = rings
    q_full, q_empty, _, v_full, _, cleaned = bars
    DTYPE: gl.constexpr = q_s.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # What is left when each thread adds up its own part of a row of S.
    L_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4])  # fmt: skip
    q = q_s.index(WG).reshape([ROWS, T.BLOCK_D])
    it, n_tile, n_message, n_clean, dirty = 0, 0, 0, 0, 0
    failed = gl.full([ROWS], 0, gl.int32, ROW)
    message, task = receive(n_message, talk)
    while message != END:
        mode = message % 4
        rows, lse_ptrs, write, skip = take_rows(task, mode, lse, S_LAYOUT, WG, F, T)
        it = pass_over(skip, bars, it, T)
        m_i = gl.full([ROWS], EMPTY_M, gl.float32, ROW)
        l_i = gl.full([ROWS, 4], EMPTY_L, gl.float32, L_LAYOUT)
        acc = gl.full([ROWS, T.BLOCK_DV], 0.0, gl.float32, O_LAYOUT)
        mbarrier.wait(q_full.index(WG), n_tile & 1)
        s = first_scores(q, rings, bars, it, S_LAYOUT, T)
        m_i, l_i, _alpha, p = careful(s, m_i, l_i, skip, mode, rows, task, args, F, T)
        state = (acc, m_i, l_i, dirty, n_clean)
        until = gl.where(mode == FAST, task.edges, task.count)
        state, p, it = attend(state, p, q, rings, bars, it, skip + 1, until, mode, rows, task, args, True, WG, F, T)
        if F.mask == "":
            state, p, it = attend(state, p, q, rings, bars, it, gl.maximum(until, skip + 1), task.count, mode, rows,
                                  task, args, False, WG, F, T)  # fmt: skip
        acc, m_i, l_i, dirty, n_clean = state
        if not T.O_OVER_Q:
            mbarrier.arrive(q_empty.index(WG), count=1)  # the next Q may land under what follows

        at = it % T.STAGES
        mbarrier.wait(v_full.index(at), (it // T.STAGES) & 1)
        v = v_s.index(at).reshape([T.BLOCK_N, T.BLOCK_DV])
        if mode != FAST:
            found, n_clean = clean(v, mode, n_clean, cleaned, WG, T)
            dirty |= found
        w = gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True)
        acc = warpgroup_mma(w, v, acc, is_async=True)  # [M, Dv]
        l_row = gl.convert_layout(gl.sum(l_i, 1), ROW, assert_trivial=True)
        lse_row, weight, overflow = close(m_i, l_row, rows, mode, args, F, T)
        acc = warpgroup_mma_wait(0, [acc])
        it += 1

        bad = gl.convert_layout(gl.sum(acc, 1), ROW, assert_trivial=True) * 0.0 != 0.0  # infinite or NaN
        mark = gl.where(rows.exact != 0, 0, gl.where(overflow, EXACT, gl.where(bad, CLEAN, 0)))
        if mode <= REDO:
            gl.store(lse_ptrs, gl.where(mark == 0, lse_row, mark.to(gl.float32, bitcast=True)), mask=write)
            write = write & (mark == 0)
            if mode == FAST:
                failed |= ((mark != 0) & rows.exists).to(gl.int32)
        weight = gl.convert_layout(weight, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        deliver((acc * weight[:, None]).to(DTYPE), dst, o_s.index(WG), task, write, mode, WG, F, T)
        if T.O_OVER_Q:
            mbarrier.arrive(q_empty.index(WG), count=1)
        n_tile += 1
        message, task, n_message, failed, dirty = listen(n_message + 1, failed, dirty, talk, WG)
    writes_done()


@gluon.jit
def listen(n_message, failed, dirty, talk, WG: gl.constexpr):
    """The next message with something to do; answers those that ask for a verdict on what was done so far."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    message, task = receive(n_message, talk)
    while message == REPORT:
        writes_done()
        talk[4].index(WG).store(gl.full([1], 0, gl.int32, ONE) + (gl.max(failed, 0) | dirty))
        mbarrier.arrive(talk[3], count=1)
        failed, dirty = failed * 0, dirty * 0
        n_message += 1
        message, task = receive(n_message, talk)
    return message, task, n_message, failed, dirty


@gluon.jit
def writes_done():
    """Waits until what this thread sent by TMA is in memory, not only out of its buffer."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def deliver(out, dst, o_buffer, task, write, mode, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """Writes a consumer's rows of O: all by TMA in a dense tensor, else those in `write`, or infinities where hit."""
    o_desc, out_ptr, o_strides = dst
    entry = entry_of(task, F)
    flat = o_buffer.reshape([ROWS, T.BLOCK_DV])
    tma.store_wait(0)  # the rows before have left the buffer
    flat.store(out)
    by_rows = mode != FAST
    if F.varlen:
        by_rows = mode >= FAST  # always: the rows after the last belong to the next sequence
    if by_rows:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // T.BLOCK_DV, T.BLOCK_DV // 8], [4, 1], [1, 0])
        ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
        x = flat.load(WIDE)  # [M, Dv]
        pos, head, _ = rows_of(gl.arange(0, ROWS, layout=ROW), task, WG, T)
        offs_d = gl.arange(0, T.BLOCK_DV, layout=gl.SliceLayout(0, WIDE))
        ptrs = out_ptr + entry.to(gl.int64) * o_strides[0] + head.to(gl.int64)[:, None] * o_strides[1]
        ptrs += (task.start_q + pos).to(gl.int64)[:, None] * o_strides[2] + offs_d[None, :]
        wanted = gl.convert_layout(write.to(gl.int32), ROW) != 0
        wanted = wanted[:, None] & (offs_d < T.HEAD_DIM_V)[None, :]
        if mode >= PLUS:
            wanted = wanted & (x > 0.0)
            infinity = gl.where(mode == PLUS, float("inf"), float("-inf"))
            x = (gl.load(ptrs, mask=wanted, other=0.0).to(gl.float32) + infinity).to(x.dtype)
        gl.store(ptrs, x, mask=wanted)
        fence_async_shared()
    else:
        fence_async_shared()
        kv_head, in_group = heads_of(task, T)
        row = task.start_q + task.first + WG * (ROWS // T.PACK)
        tma_store(o_desc, [entry, kv_head, row, in_group, 0], o_buffer)
        if T.O_OVER_Q:
            tma.store_wait(0)


# --------------------------------------------------------------------------------------------------------------- kernel
@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that each turn after ARRIVALS."""
    all_of = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(all_of.index(i), count=ARRIVALS)
    return all_of


@gluon.jit(
    do_not_specialize=[
        "num_m",
        "heads",
        "all_heads",
        "section",
        "rows_q",
        "rows_k",
        "diag_lo",
        "diag_hi",
        "num_tiles",
        "stride_ob",
        "stride_oh",
        "stride_om",
        "stride_lb",
        "stride_lh",
        "counter_ptr",
    ]
)
def attention_hopper_kernel(q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, counter_ptr, stride_ob, stride_oh,
                            stride_om, stride_lb, stride_lh, num_m, heads, all_heads, section, rows_q, rows_k, diag_lo,
                            diag_hi, num_tiles, args, F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    STAGES: gl.constexpr = T.STAGES
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS // T.PACK, T.PACK, T.BLOCK_D], q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [T.STAGES, 1, 1, T.BLOCK_N, T.BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [T.STAGES, 1, 1, T.BLOCK_N, T.BLOCK_DV], v_desc.layout)
    if T.O_OVER_Q:
        o_s = q_s
    else:
        o_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS // T.PACK, T.PACK, T.BLOCK_DV], o_desc.layout)
    slot = gl.allocate_shared_memory(gl.int32, [2, 16], WORDS)
    verdicts = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], WORDS)
    listed = gl.allocate_shared_memory(gl.int32, [LISTED, 1], WORDS)
    q_full, q_empty = barriers(CONSUMERS, 1), barriers(CONSUMERS, 1)
    k_full, v_full, kv_empty = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    slot_full, slot_empty = barriers(2, 1), barriers(2, CONSUMERS)
    settled, cleaned = barriers(1, CONSUMERS).index(0), barriers(1, CONSUMERS).index(0)

    rings = (q_s, k_s, v_s, o_s)
    bars = (q_full, q_empty, k_full, v_full, kv_empty, cleaned)
    talk = (slot, slot_full, slot_empty, settled, verdicts)
    descs = (q_desc, k_desc, v_desc)
    lse = (lse_ptr, (stride_lb, stride_lh))
    dst = (o_desc, out_ptr, (stride_ob, stride_oh, stride_om))
    sizes = Sizes(num_m, heads, all_heads, section, rows_q, rows_k, diag_lo, diag_hi, num_tiles)
    # Registers a thread: 168 (128 with three consumers) at launch; the producer gives most of its own to the consumers.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, args, 0, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, args, 0, F, T)),
            (consumer, (rings, bars, talk, dst, lse, args, 1, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, args, 0, F, T)),
            (consumer, (rings, bars, talk, dst, lse, args, 1, F, T)),
            (consumer, (rings, bars, talk, dst, lse, args, 2, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
