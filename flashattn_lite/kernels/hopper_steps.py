"""A consumer's way through the key tiles of a row tile, in the Hopper kernel: wait, multiply, give back, take turns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from flashattn_lite.kernels.hopper_pieces import add_values, execute, pieces_of, query_key, values_added, weighed
from flashattn_lite.kernels.hopper_scores import careful, computed_first, fast, mask_tile, pack_p
from flashattn_lite.kernels.hopper_tasks import ROWS, next_stage, stage


@gluon.jit
def await_turn(WG: gl.constexpr, T: gl.constexpr):
    """Two consumers issue their products by turns, so that the softmax of one runs under the products of the other."""
    if T.TURNS:
        if WG == 0:
            execute("bar.sync 9, 256;")
        else:
            execute("bar.sync 10, 256;")


@gluon.jit
def pass_turn(WG: gl.constexpr, T: gl.constexpr):
    if T.TURNS:
        if WG == 0:
            execute("bar.arrive 10, 256;")
        else:
            execute("bar.arrive 9, 256;")


@gluon.jit
def take_q(q_at, q_s, S_LAYOUT: gl.constexpr, T: gl.constexpr):
    """This consumer's rows of Q [64, D] as `query_key` takes them: their place or, with Q_HELD, pieces in registers."""
    PIECES: gl.constexpr = T.PIECES
    if T.Q_HELD:
        q = pieces_of(q_at, q_s, ROWS, PIECES)
        held = ()
        for i in gl.static_range(PIECES):
            held = held + (q[i].load(gl.DotOperandLayout(0, S_LAYOUT, 2)),)
        return held
    else:
        return q_at


@gluon.jit
def own_q(q, T: gl.constexpr):
    """Q in registers that only what follows uses: ptxas of CUDA 13.4 copies those that several loops use at every step.

    By an xor with blockIdx.z, which is 0, because it sees through a move.
    """
    PIECES: gl.constexpr = T.PIECES
    if T.Q_HELD:
        asm: gl.constexpr = "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; xor.b32 $0, $1, zero; }"
        own = ()
        for i in gl.static_range(PIECES):
            piece = gl.inline_asm_elementwise(asm, "=r,r", [q[i]], dtype=q[i].dtype, is_pure=False, pack=2)
            own = own + (piece,)
        return own
    else:
        return q


@gluon.jit
def attend(state, p, q, rings, bars, it, first, last, rows, task, args, CAREFUL: gl.constexpr, WG: gl.constexpr,
           F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """Takes tiles first <= i < last into the state; p is that of tile first - 1, whose V has not been added yet."""
    acc, m_i, l_i = state
    v_s = rings[2]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, T.O_LAYOUT, 2)
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, p.type.layout)
    at, phase = stage(it, T)
    for i in range(first, last):
        if T.CARRIED == "":
            at, phase = stage(it, T)
        k_at, k_phase = next_stage(at, phase, it, T)
        v = pieces_of(at, v_s, T.BLOCK_N, T.V_PIECES)
        mbarrier.wait(bars.k_full.index(k_at), k_phase)
        w = pack_p(p, v[0], P_LAYOUT)
        await_turn(WG, T)
        s = query_key(q, rings, k_at, zero, T.Q_HELD, T)
        mbarrier.wait(bars.v_full.index(at), phase)
        acc = add_values(w, v, acc, T)
        pass_turn(WG, T)
        if CAREFUL:
            mask = mask_tile(k_at, i, rings, rows, task, args, WG, F, T)
        s = warpgroup_mma_wait(T.V_PIECES, [s])  # the scores are there; P V goes on under the softmax
        if T.APART:
            mbarrier.arrive(bars.k_empty.index(k_at), count=1)
        if CAREFUL:
            m_i, l_i, alpha, p = careful(s, mask, m_i, l_i, i, rows, task, args, F, T)
        else:
            l_i, p = fast(s, m_i, l_i, args, F, T)
            l_i = computed_first(l_i)
        acc = values_added(acc, T)
        if T.APART:
            mbarrier.arrive(bars.v_empty.index(at), count=1)
        else:
            mbarrier.arrive(bars.k_empty.index(k_at), count=1)
        if CAREFUL:
            acc = weighed(acc, alpha, T)
        it += 1
        at, phase = k_at, k_phase
    return (acc, m_i, l_i), p, it


@gluon.jit
def pass_over(count, bars, it, WG: gl.constexpr, T: gl.constexpr):
    """Gives back tiles that no row of this consumer sees, but for V of the last; the other consumers use them."""
    for i in range(count):
        await_turn(WG, T)
        pass_turn(WG, T)
        at, phase = stage(it, T)
        mbarrier.wait(bars.k_full.index(at), phase)
        pass_over_v(i > 0, bars, it - 1, T)
        mbarrier.arrive(bars.k_empty.index(at), count=1)
        it += 1
    return it


@gluon.jit
def pass_over_v(passed, bars, it, T: gl.constexpr):
    """If tile `it` was passed over, gives back its V, before the K behind it is given back.

    V is waited for although nobody here reads it: who runs ahead of V by the whole ring would take the end of the phase
    before for that of its own.
    """
    if passed:
        at, phase = stage(it, T)
        mbarrier.wait(bars.v_full.index(at), phase)
        if T.APART:
            mbarrier.arrive(bars.v_empty.index(at), count=1)


@gluon.jit
def first_scores(q, rings, bars, it, skip, rows, task, args, S_LAYOUT: gl.constexpr, WG: gl.constexpr,
                 F: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """(S, mask tile) of the first key tile that this consumer sees: the skip-th, and the it-th of the block.

    Nothing overlaps with it but V of one passed over. With MASK_COPIED K is not given back.
    """
    at, phase = stage(it, T)
    mbarrier.wait(bars.k_full.index(at), phase)
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    s = query_key(q, rings, at, zero, T.Q_HELD, T)
    mask = mask_tile(at, skip, rings, rows, task, args, WG, F, T)
    pass_over_v(skip > 0, bars, it - 1, T)
    s = warpgroup_mma_wait(0, [s])
    if not T.MASK_COPIED:
        mbarrier.arrive(bars.k_empty.index(at), count=1)
    return s, mask


@gluon.jit
def last_values(p, acc, rings, bars, it, T: gl.constexpr):
    """(O + P V of the last key tile, the it-th of the block, under way; the place of its V)."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, T.O_LAYOUT, 2)
    at, phase = stage(it, T)
    mbarrier.wait(bars.v_full.index(at), phase)
    v = pieces_of(at, rings[2], T.BLOCK_N, T.V_PIECES)
    w = gl.convert_layout(p.to(v[0].dtype), P_LAYOUT, assert_trivial=True)
    return add_values(w, v, acc, T), at
