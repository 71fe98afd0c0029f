"""The attention forward for Hopper (sm_90a), in Gluon: the kernel; `attention_hopper_launch.py` starts it.

As many blocks as fit live on each multiprocessor (one, of one consumer up to three) and work off row tiles. A tile is
BLOCK_M rows: query positions of one head, or of the PACK heads that share a K/V head, head by head within a position.
Where they are too few for the GPU, a row tile is dealt out to DEALT blocks, which visit keys as one with all its rows
would (tuning_dealt.py).
Warps have roles:
  producer (1 warp)               hopper_producer.py: draws tiles, tells the consumers, copies Q, K and V by TMA, with
                                  MASK_COPIED each consumer's rows of the mask too (else they load them themselves)
  consumer (4 warps) x 1, 2 or 3  64 rows each: S = Q K^T and O += P V by wgmma; P and O, with Q_HELD Q, in registers;
                                  where it takes chains of parts of the keys (FOLDS) as hopper_folds.py has it
A consumer starts S of the next key tile before it adds P V of this one, and its softmax runs under the latter.

State of each row, as in attention.py: (m_i, l_i, acc), m_i in log2 units. `visited_tiles` gives the tiles with masked
edges first: those move m_i (running maximum), the whole tiles after them keep it, with no maximum and no rescale. In
bfloat16 one tile that a row sees a key of is enough to set m_i; float16, whose range is small, also takes key block 0
with care. At the end a row whose l_i passed LIMIT (p may have overflowed its dtype), whose reference float32 can't
hold, or whose acc is not finite leaves a mark in its lse: EXACT or CLEAN. After a sweep of up to LISTED tiles the
producer has the marked ones done again (hopper_again.py), in the same launch. Only marked rows are written again.

The usual way through a row tile is kept short and in one piece, what is rare lies behind it: that code passes through
the instruction cache once a row tile, and its misses took up to a third of a short one (docs/experiments.md).

Barriers (mbarrier; each side counts its own phase)
  slot_full[2]     producer -> consumers: a message is there   slot_empty[2]     each consumer: it was read
  q_full[Q_SLOTS]  TMA -> a consumer: its rows of Q            q_empty[Q_SLOTS]  it: they may be overwritten (with
                                                                                 Q_HELD, from its first product on)
  k_full[STAGES]   TMA -> consumers: a tile of K, and of the   k_empty[STAGES]   each consumer: done with it, the mask
                   mask if it is copied                                          and, if not APART, V of the step before
  v_full[STAGES]   TMA -> consumers: a tile of V               v_empty[STAGES]   each consumer: done with it, if APART
  settled          consumers -> producer: everything sent so far is finished and its verdict written
  cleaned          consumers -> consumers: V is free of what is not finite; all are done with it (never in a first pass)
  9, 10 (bar.sync) consumer -> consumer: your turn to issue products, with TURNS
Shared memory (bytes, 16-bit dtypes): Q_SLOTS * 64 * D * 2 of Q, a consumer's O_SLOTS * 64 * O_WIDTH * 2 of O (of a
state's acc * 4; with FOLDS_IN_ROOM a float32 acc of each chain fits), K and V STAGES * BLOCK_N * D * 2 each, the list
4 * LISTED, a mask STAGES * BLOCK_N * BLOCK_M elements; at most 227 KiB.
Bytes moved: Q and O once, K and V once per row tile, mostly from L2 (head by head, see `place`).
Source: Shah et al., FlashAttention-3 (arXiv 2407.08608): roles, overlap, turns; docs/theory.md for m_i.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashattn_lite.kernels.hopper_again import again, again_part
from flashattn_lite.kernels.hopper_epilogue import deliver, write_sum
from flashattn_lite.kernels.hopper_folds import no_parts, row_tile_in_parts
from flashattn_lite.kernels.hopper_pieces import execute, finished, values_added
from flashattn_lite.kernels.hopper_producer import producer
from flashattn_lite.kernels.hopper_rows import (
    close,
    empty_state,
    is_bad,
    past_keys,
    row_sums,
    settles_first,
    take_rows,
)
from flashattn_lite.kernels.hopper_scores import careful
from flashattn_lite.kernels.hopper_steps import (
    attend,
    await_turn,
    first_scores,
    last_values,
    own_q,
    pass_over,
    pass_turn,
    take_q,
)
from flashattn_lite.kernels.hopper_tasks import (
    CLEAN,
    END,
    EXACT,
    FAST,
    LISTED,
    REPORT,
    ROWS,
    Barriers,
    Sizes,
    barriers,
    lse_pointers,
    q_slot,
    receive,
    stage,
)


# ------------------------------------------------------------------------------------------------------------- consumer
@gluon.jit
def row_tile(task, n_tile, it, failed, rings, bars, dst, lse, args, WG: gl.constexpr, F: gl.constexpr,
             T: gl.constexpr):  # fmt: skip
    """One row tile from first to last key tile, O and lse written. Returns it, and failed with the rows that did."""
    q_s, o_s = rings[0], rings[3]
    DTYPE: gl.constexpr = q_s.dtype
    S_LAYOUT: gl.constexpr = T.S_LAYOUT
    rows = take_rows(task, S_LAYOUT, WG, F, T)
    skip = past_keys(rows, task, F, T)
    it = pass_over(skip, bars, it, WG, T)
    m_i, l_i, acc = empty_state(T)
    q_at, q_phase = q_slot(n_tile, WG, T)
    mbarrier.wait(bars.q_full.index(q_at), q_phase)
    q = take_q(q_at, q_s, S_LAYOUT, T)
    s, mask = first_scores(q, rings, bars, it, skip, rows, task, args, S_LAYOUT, WG, F, T)
    if T.Q_HELD:  # not before a product has used it: a load that was issued may still be under way behind a barrier
        mbarrier.arrive(bars.q_empty.index(q_at), count=1)
    m_i, l_i, _alpha, p = careful(s, mask, m_i, l_i, skip, rows, task, args, F, T)
    if T.MASK_COPIED:
        mbarrier.arrive(bars.k_empty.index(stage(it, T)[0]), count=1)
    state = (acc, m_i, l_i)
    if not settles_first(F, T):
        state, p, it = attend(state, p, q, rings, bars, it, skip + 1, rows.settled, rows, task, args, True, WG, F, T)
    if F.mask == "":
        state, p, it = attend(state, p, own_q(q, T), rings, bars, it, gl.maximum(rows.settled, skip + 1), task.count,
                              rows, task, args, False, WG, F, T)  # fmt: skip
    acc, m_i, l_i = state
    if not T.Q_HELD:
        mbarrier.arrive(bars.q_empty.index(q_at), count=1)  # the next Q may land under what follows

    acc, v_at = last_values(p, acc, rings, bars, it, T)
    l_row = row_sums(l_i, T)
    lse_row, weight, overflow = close(m_i, l_row, rows, args, F, T)
    acc = values_added(acc, T)
    if T.APART:
        mbarrier.arrive(bars.v_empty.index(v_at), count=1)

    # O is on its way while its rows are looked at; who waits for room, waits behind that.
    lse_ptrs = lse_pointers(lse, task, rows.head, rows.pos, F, T)
    if T.PARTIAL:
        out = acc
        write_sum(weight, rows.exists, lse_ptrs, dst)
    else:
        out = finished(acc, weight, DTYPE, T)
    deliver(out, 0, T.O_SLOTS, dst, o_s, task, rows.exists, WG, F, T)
    mark = gl.where(overflow, EXACT, gl.where(is_bad(acc, T), CLEAN, 0))
    gl.store(lse_ptrs, gl.where(mark == 0, lse_row, mark.to(gl.float32, bitcast=True)), mask=rows.exists)
    failed |= ((mark != 0) & rows.exists).to(gl.int32)
    deliver(out, T.O_SLOTS, T.LEAVES, dst, o_s, task, rows.exists, WG, F, T)
    return it + 1, failed


@gluon.jit
def consumer(rings, bars, talk, dst, lse, args, WG: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    it, n_tile, n_message, n_clean, dirty = 0, 0, 0, 0, 0
    failed = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, T.S_LAYOUT))
    if WG == 1:
        pass_turn(WG, T)
    if T.FOLDS:
        chain = no_parts(rings[3], WG, T)
    message, task = receive(n_message, talk)
    # Two loops, not one with a choice inside: a sweep's code stays small, and ptxas takes no branch around wgmma well.
    while message != END:
        while message % 4 == FAST:
            if T.FOLDS:
                it, n_message, failed = row_tile_in_parts(task, n_tile, it, n_message, failed, rings, bars, talk, dst,
                                                          lse, args, WG, F, T)  # fmt: skip
            else:
                it, failed = row_tile(task, n_tile, it, failed, rings, bars, dst, lse, args, WG, F, T)
            message, task, n_message, failed, dirty = listen(n_message + 1, failed, dirty, talk, WG)
            n_tile += 1
        while message % 4 > FAST:
            if T.FOLDS:
                found, n_clean, chain = again_part(task, message % 4, chain, n_tile, it, n_clean, rings, bars, dst, lse,
                                                   args, WG, F, T)  # fmt: skip
            else:
                found, n_clean = again(task, message % 4, n_tile, it, n_clean, rings, bars, dst, lse, args, WG, F, T)
            dirty |= found
            it += task.count
            n_tile += 1
            message, task, n_message, failed, dirty = listen(n_message + 1, failed, dirty, talk, WG)
    if WG == 0:
        await_turn(WG, T)
    tma.store_wait(0)  # no block ends before its O has left


@gluon.jit
def listen(n_message, failed, dirty, talk, WG: gl.constexpr):
    """The next message with something to do; answers those that ask for a verdict on what was done so far."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    message, task = receive(n_message, talk)
    while message == REPORT:
        talk[4].index(WG).store(gl.full([1], 0, gl.int32, ONE) + (gl.max(failed, 0) | dirty))
        mbarrier.arrive(talk[3], count=1)
        failed, dirty = failed * 0, dirty * 0
        n_message += 1
        message, task = receive(n_message, talk)
    return message, task, n_message, failed, dirty


# --------------------------------------------------------------------------------------------------------------- kernel
@gluon.jit
def launch_dependents():
    """The launch behind this one, for uncovered rows or a merge, may be put on the card as soon as there is room."""
    execute("griddepcontrol.launch_dependents;")


@gluon.jit(
    do_not_specialize=["counter_ptr", "stride_ob", "stride_oh", "stride_om", "stride_lb", "stride_lh", "num_m", "heads",
                       "all_heads", "section", "early", "rows_q", "rows_k", "diag_lo", "diag_hi", "num_tiles",
                       "row_tiles"]
)  # fmt: skip
def attention_hopper_kernel(q_desc, k_desc, v_desc, o_desc, mask_desc, out_ptr, lse_ptr, counter_ptr, stride_ob,
                            stride_oh, stride_om, stride_lb, stride_lh, num_m, heads, all_heads, section, early, rows_q,
                            rows_k, diag_lo, diag_hi, num_tiles, row_tiles, args, F: gl.constexpr,
                            T: gl.constexpr):  # fmt: skip
    if F.varlen or T.PARTIAL:
        launch_dependents()
    DTYPE: gl.constexpr = q_desc.dtype
    CONSUMERS: gl.constexpr = T.WARPGROUPS
    STAGES: gl.constexpr = T.STAGES
    Q_SLOTS: gl.constexpr = T.Q_SLOTS
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(DTYPE, [Q_SLOTS * T.PIECES, 1, 1, ROWS // T.PACK, T.PACK, T.BLOCK_D], q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES * T.PIECES, 1, 1, T.BLOCK_N, T.BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES * T.V_PIECES, 1, 1, T.BLOCK_N, T.BLOCK_DV], v_desc.layout)
    O_BUFFERS: gl.constexpr = CONSUMERS * T.O_SLOTS
    o_s = gl.allocate_shared_memory(o_desc.dtype, [O_BUFFERS, 1, 1, ROWS // T.PACK, T.PACK, T.O_WIDTH], o_desc.layout)
    slot = gl.allocate_shared_memory(gl.int32, [2, 16], WORDS)
    verdicts = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], WORDS)
    listed = gl.allocate_shared_memory(gl.int32, [LISTED, 1], WORDS)
    k_full, k_empty, v_full = barriers(STAGES, 1 + T.MASK_COPIED), barriers(STAGES, CONSUMERS), barriers(STAGES, 1)
    v_empty = k_empty
    if T.APART:
        v_empty = barriers(STAGES, CONSUMERS)
    cleaned = barriers(1, CONSUMERS).index(0)
    bars = Barriers(barriers(Q_SLOTS, 1), barriers(Q_SLOTS, 1), k_full, k_empty, v_full, v_empty, cleaned)
    slot_full, slot_empty = barriers(2, 1), barriers(2, CONSUMERS)
    settled = barriers(1, CONSUMERS).index(0)

    rings = (q_s, k_s, v_s, o_s)
    if T.MASK_COPIED:
        MASKS: gl.constexpr = STAGES * CONSUMERS
        mask_s = gl.allocate_shared_memory(mask_desc.dtype, [MASKS, 1, 1, ROWS, T.BLOCK_N], mask_desc.layout)
        rings = (q_s, k_s, v_s, o_s, mask_s)
    talk = (slot, slot_full, slot_empty, settled, verdicts)
    descs = (q_desc, k_desc, v_desc, mask_desc)
    lse = (lse_ptr, (stride_lb, stride_lh))
    dst = (o_desc, out_ptr, (stride_ob, stride_oh, stride_om))
    sizes = Sizes(num_m, heads, all_heads, section, early, rows_q, rows_k, diag_lo, diag_hi, num_tiles, row_tiles)
    # Registers a thread: the launch's REGISTERS at first; the producer gives most of its own to the consumers, but for
    # what it takes to find pages.
    FOR_PAGES: gl.constexpr = 0 if T.PAGE == 0 else 16
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, args, 0, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [1], [24 + 2 * FOR_PAGES])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, args, 0, F, T)),
            (consumer, (rings, bars, talk, dst, lse, args, 1, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [4, 1], [240 - FOR_PAGES // 2, 24 + FOR_PAGES])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (rings, bars, talk, dst, lse, args, 0, F, T)),
            (consumer, (rings, bars, talk, dst, lse, args, 1, F, T)),
            (consumer, (rings, bars, talk, dst, lse, args, 2, F, T)),
            (producer, (descs, rings, bars, talk, listed, counter_ptr, lse, sizes, args, F, T)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
