"""What a consumer of the Hopper kernel does with a row tile of which its block takes chains of parts of the keys.

Each part has a state (m_i, l_i, acc) of its own, from a reference of its own; these are folded one after the other, as
decode_merge.py folds them where each part is a task: to the same bits, so that a row has them whoever takes its parts.
What leaves is O where there are no more chains, else the chain's state.
Loop invariant: (m_c, l_c, acc_c) is the state of the chain's parts so far; with CHAINS of two, and in the second of
these, `before` is (m, l) of the first, whose acc stays in its room. acc_c is not used within a part: it waits in shared
memory where registers do not hold two acc (FOLDS_IN_ROOM). What the compiler would put on the stack comes back from L2,
past the little that shared memory has left of L1.

No part waits for the one before: its first scores are under way while the last values of that are added. Q stays in
shared memory: its registers are for the states.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from flashattn_lite.kernels.decode_splits import finished_rows, weigh
from flashattn_lite.kernels.device.state import EMPTY_L, EMPTY_M, finish, merge
from flashattn_lite.kernels.gluon_names import reinterpret
from flashattn_lite.kernels.hopper_epilogue import deliver, write_sum
from flashattn_lite.kernels.hopper_pieces import add_values, pieces_of, query_key, values_added
from flashattn_lite.kernels.hopper_rows import (
    add_sink,
    empty_state,
    is_bad,
    overflows,
    past_keys,
    row_sums,
    rows_of_part,
    settles_first,
    take_rows,
)
from flashattn_lite.kernels.hopper_scores import careful, pack_p
from flashattn_lite.kernels.hopper_steps import attend, await_turn, first_scores, last_values, pass_over, pass_turn
from flashattn_lite.kernels.hopper_tasks import CLEAN, ROWS, lse_pointers, part_of, q_slot, receive, stage

# 32 bytes of a row, which four neighbouring threads have, lie elsewhere in the next of four rows: no bank has two.
ROOM = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))


@gluon.jit
def chain_of(part, T: gl.constexpr):
    """Which of its block's chains a part is of."""
    if T.CHAINS == 1:
        return 0
    else:
        return part // T.CHAIN


@gluon.jit
def waiting_room(o_s, chain, i: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """Where the i-th piece of a consumer's acc_c waits, float32 [64, BLOCK_DV]: in the room that its O leaves by."""
    rooms = reinterpret(o_s, gl.float32, [T.WARPGROUPS * T.CHAINS * T.V_PIECES, ROWS, T.BLOCK_DV], ROOM)
    return rooms.index((WG * T.CHAINS + chain) * T.V_PIECES + i)


@gluon.jit
def keep(acc, chain, o_s, WG: gl.constexpr, T: gl.constexpr):
    """The acc of a chain until the next part ends: what `kept` takes."""
    PIECES: gl.constexpr = T.V_PIECES
    if T.FOLDS_IN_ROOM:
        for i in gl.static_range(PIECES):
            waiting_room(o_s, chain, i, WG, T).store(acc[i])
        return ()
    else:
        return acc


@gluon.jit
def kept(acc_c, chain, o_s, WG: gl.constexpr, T: gl.constexpr):
    """acc of a chain, in pieces."""
    PIECES: gl.constexpr = T.V_PIECES
    pieces = ()
    if T.FOLDS_IN_ROOM:
        for i in gl.static_range(PIECES):
            pieces = pieces + (waiting_room(o_s, chain, i, WG, T).load(T.O_LAYOUT),)
        return pieces
    else:
        return acc_c


@gluon.jit
def of_o(x, T: gl.constexpr):
    """[64, 1] of [64] of rows of S, where acc has its rows."""
    return gl.convert_layout(x, gl.SliceLayout(1, T.O_LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def no_parts(o_s, WG: gl.constexpr, T: gl.constexpr):
    """The chain of no part: (m_c, l_c, what `keep` gave for acc_c, `before`)."""
    m_i, _, acc = empty_state(T)
    l_i = gl.full([ROWS], EMPTY_L, gl.float32, m_i.type.layout)
    acc_c = keep(acc, 0, o_s, WG, T)
    if T.CHAINS == 1:
        return m_i, l_i, acc_c, ()
    else:
        return m_i, l_i, keep(acc, 1, o_s, WG, T), (m_i, l_i)


@gluon.jit
def go_on(chain, part, T: gl.constexpr):
    """The chain that `part` is folded into, after the one before it."""
    if T.CHAINS == 1:
        return chain
    else:
        m_c, l_c, acc_c, before = chain
        begins = part % T.CHAIN == 0
        before = (gl.where(begins, m_c, before[0]), gl.where(begins, l_c, before[1]))
        return gl.where(begins, EMPTY_M, m_c), gl.where(begins, EMPTY_L, l_c), acc_c, before


@gluon.jit
def with_before(m_c, l_c, acc_c, before, o_s, weighed: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """(m, l, pieces of acc) of all of a block's chains, the last of which is given; `weighed`: infinities are kept."""
    if T.CHAINS == 1:
        return m_c, l_c, acc_c
    else:
        m_i, l_i, weight_b, weight_c = merge(before[0], before[1], m_c, l_c)
        return m_i, l_i, folded(kept((), 0, o_s, WG, T), acc_c, weight_b, weight_c, weighed, T)


@gluon.jit
def folded(acc_c, acc, weight_c, weight_i, weighed: gl.constexpr, T: gl.constexpr):
    """acc of a chain with a part's, or of two chains. Infinities are kept where that is asked for; by plain products
    one may become NaN, whose row is done again anyway.
    """
    weight_c, weight_i = of_o(weight_c, T), of_o(weight_i, T)
    PIECES: gl.constexpr = T.V_PIECES
    sums = ()
    for i in gl.static_range(PIECES):
        if weighed:
            sums = sums + (weigh(acc_c[i], weight_c) + weigh(acc[i], weight_i),)
        else:
            sums = sums + (acc_c[i] * weight_c + acc[i] * weight_i,)
    return sums


@gluon.jit
def fold_rows(chain, part, m_i, l_row, acc, wanted, o_s, WG: gl.constexpr, T: gl.constexpr):
    """The chain with a part folded in, of `wanted` rows: any part, infinities are kept."""
    m_c, l_c, acc_c, before = chain
    acc_c = kept(acc_c, chain_of(part, T), o_s, WG, T)
    m_new, l_new, weight_c, weight_i = merge(m_c, l_c, m_i, l_row)
    new, some = folded(acc_c, acc, weight_c, weight_i, True, T), of_o(wanted.to(gl.int32), T) != 0
    PIECES: gl.constexpr = T.V_PIECES
    sums = ()
    for i in gl.static_range(PIECES):
        sums = sums + (gl.where(some, new[i], acc_c[i]),)
    acc_c = keep(sums, chain_of(part, T), o_s, WG, T)
    return gl.where(wanted, m_new, m_c), gl.where(wanted, l_new, l_c), acc_c, before


@gluon.jit
def chain_rows(m_i, l_i, acc, rows, args, DTYPE: gl.constexpr, F: gl.constexpr, T: gl.constexpr):
    """(pieces of O, lse) of the chain of all parts, with the sink, as `decode_splits.write_rows` makes them."""
    m_i, l_i, weight = add_sink(m_i, l_i, rows, args, F)
    inv_l, lse = finish(m_i, l_i)
    weight, inv_l = of_o(weight, T), of_o(inv_l, T)
    PIECES: gl.constexpr = T.V_PIECES
    out = ()
    for i in gl.static_range(PIECES):
        if F.sinks:
            out = out + (finished_rows(weigh(acc[i], weight), inv_l, DTYPE),)
        else:
            out = out + (finished_rows(acc[i], inv_l, DTYPE),)
    return out, lse


@gluon.jit
def next_part(state, p, chain, q_at, rings, bars, talk, it, n_message, rows, args, WG: gl.constexpr, F: gl.constexpr,
              T: gl.constexpr):  # fmt: skip
    """The last step of a part and the first of the next. A step of `attend`, but acc is the old part's, and is folded.

    Returns (state and p of the next, the chain, which rows failed in the old, task and rows of the next). Tiles of
    which no row sees a key are not passed over.
    """
    acc, m_i, l_i = state
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, T.O_LAYOUT, 2)
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, p.type.layout)
    at, phase = stage(it, T)
    k_at, k_phase = stage(it + 1, T)
    v = pieces_of(at, rings[2], T.BLOCK_N, T.V_PIECES)
    mbarrier.wait(bars.k_full.index(k_at), k_phase)
    w = pack_p(p, v[0], P_LAYOUT)
    await_turn(WG, T)
    s = query_key(q_at, rings, k_at, zero, False, T)
    mbarrier.wait(bars.v_full.index(at), phase)
    acc = add_values(w, v, acc, T)
    pass_turn(WG, T)
    l_row = row_sums(l_i, T)
    over = overflows(m_i, l_row, F, T).to(gl.int32)
    m_c, l_c, acc_c, before = chain
    m_c, l_c, weight_c, weight_i = merge(m_c, l_c, m_i, l_row)
    _, task = receive(n_message, talk)
    part, _, _ = part_of(task, T)
    rows = rows_of_part(rows, task, F, T)
    s = warpgroup_mma_wait(T.V_PIECES, [s])
    if T.APART:
        mbarrier.arrive(bars.k_empty.index(k_at), count=1)
    m_i, l_i, none = empty_state(T)
    m_i, l_i, _alpha, p = careful(s, 0, m_i, l_i, 0, rows, task, args, F, T)
    acc = values_added(acc, T)
    if T.APART:
        mbarrier.arrive(bars.v_empty.index(at), count=1)
    else:
        mbarrier.arrive(bars.k_empty.index(k_at), count=1)
    at = chain_of(part - 1, T)
    acc_c = folded(kept(acc_c, at, rings[3], WG, T), acc, weight_c, weight_i, False, T)
    chain = go_on((m_c, l_c, keep(acc_c, at, rings[3], WG, T), before), part, T)
    return (none, m_i, l_i), p, chain, over, task, rows


@gluon.jit
def row_tile_in_parts(task, n_tile, it, n_message, failed, rings, bars, talk, dst, lse, args, WG: gl.constexpr,
                      F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """`row_tile` of `attention_hopper.py`, with a message for each part. Returns (it, n_message, failed)."""
    o_s = rings[3]
    DTYPE: gl.constexpr = rings[0].dtype
    S_LAYOUT: gl.constexpr = T.S_LAYOUT
    rows = take_rows(task, S_LAYOUT, WG, F, T)
    skip = past_keys(rows, task, F, T)
    it = pass_over(skip, bars, it, WG, T)
    m_i, l_i, acc = empty_state(T)
    tma.store_wait(0)  # the last tile's O has left the room
    chain = no_parts(o_s, WG, T)
    over = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, S_LAYOUT))
    q_at, q_phase = q_slot(n_tile, WG, T)
    mbarrier.wait(bars.q_full.index(q_at), q_phase)
    s, mask = first_scores(q_at, rings, bars, it, skip, rows, task, args, S_LAYOUT, WG, F, T)
    m_i, l_i, _alpha, p = careful(s, mask, m_i, l_i, skip, rows, task, args, F, T)
    state = (acc, m_i, l_i)
    _, behind, _ = part_of(task, T)
    more = behind >= 0
    while more:
        if not settles_first(F, T):
            state, p, it = attend(state, p, q_at, rings, bars, it, skip + 1, rows.settled, rows, task, args, True, WG,
                                  F, T)  # fmt: skip
        state, p, it = attend(state, p, q_at, rings, bars, it, gl.maximum(rows.settled, skip + 1), task.count,
                              rows, task, args, False, WG, F, T)  # fmt: skip
        more = behind > 0
        if more:
            n_message += 1
            state, p, chain, fails, task, rows = next_part(state, p, chain, q_at, rings, bars, talk, it, n_message,
                                                           rows, args, WG, F, T)  # fmt: skip
            over |= fails
            _, behind, _ = part_of(task, T)
            skip = task.first * 0
            it += 1
    acc, m_i, l_i = state
    mbarrier.arrive(bars.q_empty.index(q_at), count=1)

    acc, v_at = last_values(p, acc, rings, bars, it, T)
    l_row = row_sums(l_i, T)
    over |= overflows(m_i, l_row, F, T).to(gl.int32)
    m_c, l_c, acc_c, before = chain
    m_c, l_c, weight_c, weight_i = merge(m_c, l_c, m_i, l_row)
    acc = values_added(acc, T)
    if T.APART:
        mbarrier.arrive(bars.v_empty.index(v_at), count=1)

    part, _, _ = part_of(task, T)
    acc = folded(kept(acc_c, chain_of(part, T), o_s, WG, T), acc, weight_c, weight_i, False, T)
    m_c, l_c, acc = with_before(m_c, l_c, acc, before, o_s, False, WG, T)
    lse_ptrs = lse_pointers(lse, task, rows.head, rows.pos, F, T)
    if T.PARTIAL:
        out, lse_row = acc, m_c
        write_sum(l_c, rows.exists, lse_ptrs, dst)
    else:
        out, lse_row = chain_rows(m_c, l_c, acc, rows, args, DTYPE, F, T)
    deliver(out, 0, T.LEAVES, dst, o_s, task, rows.exists, WG, F, T)
    bad = (over != 0) | is_bad(acc, T)
    mark = gl.where(bad, CLEAN, 0)
    lse_row = gl.where(bad, mark.to(gl.float32, bitcast=True), lse_row)
    gl.store(lse_ptrs, lse_row, mask=rows.exists)
    failed |= (bad & rows.exists).to(gl.int32)
    return it + 1, n_message, failed
